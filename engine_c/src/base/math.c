/* Double exp, log and sin/cos as fixed sequences of IEEE operations (no libm, no fused operation).
 *
 * Source: the argument reductions, minimax coefficients and error-compensated evaluation orders are those of fdlibm
 * (e_exp.c, e_log.c, e_rem_pio2.c, k_sin.c, k_cos.c; Copyright (C) 1993 by Sun Microsystems, Inc., developed at
 * SunPro; "Permission to use, copy, modify, and distribute this software is freely granted, provided that this notice
 * is preserved."), rewritten without branches on the size of the argument. */
#include "fp.h"

/* 2^n for n in [-1022, 1023] */
static double power_of_two(int64_t n) { return clb_double((uint64_t)(n + 1023) << 52); }

/* Nearest integer (ties to even) for |x| < 2^51. */
static double round_even(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

static const double LN2_HI = 6.93147180369123816490e-01; /* 33 bits: n * LN2_HI is exact for |n| < 2^20 */
static const double LN2_LO = 1.90821492927058770002e-10;
static const double LOG2E = 1.44269504088896338700e+00;

/* exp(x) = 2^n exp(r), r = hi - lo in [-ln2/2, ln2/2]. With c(r) = r - r^2 P(r^2), exp(r) = 1 + 2 r / (2 - ...) is
 * taken in Remez' form 1 - ((lo - r c / (2 - c)) - hi). */
double clb_exp(double x) {
    static const double P[5] = {1.66666666666666019037e-01, -2.77777777770155933842e-03, 6.61375632143793436117e-05,
                                -1.65339022054652515390e-06, 4.13813679705723846039e-08};
    if (x != x) return x;
    if (x > 7.09782712893383973096e+02) return (double)CLB_INF;
    if (x < -7.45133219101941108420e+02) return 0.0;
    double n = round_even(x * LOG2E);
    double hi = x - n * LN2_HI, lo = n * LN2_LO;
    double r = hi - lo, t = r * r;
    double c = r - t * (P[0] + t * (P[1] + t * (P[2] + t * (P[3] + t * P[4]))));
    double y = 1.0 - ((lo - (r * c) / (2.0 - c)) - hi);
    int64_t i = (int64_t)n, a = i / 2; /* two steps: the first is exact, the second may round to a subnormal */
    return y * power_of_two(a) * power_of_two(i - a);
}

/* log(x) = k ln2 + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)). With s = f / (2 + f), log(1 + f) = f - (f^2/2 - s (f^2/2
 * + R(s^2))). */
double clb_log(double x) {
    static const double L[7] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                                2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                                1.479819860511658591e-01};
    uint64_t u = clb_bits64(x) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu); /* exponent of x / sqrt(1/2) */
    double k = (double)((int64_t)(u >> 52) - 1023);
    double f = clb_double((u & 0x000fffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1.0;
    double s = f / (2.0 + f), z = s * s, w = z * z;
    double even = w * (L[1] + w * (L[3] + w * L[5]));
    double odd = z * (L[0] + w * (L[2] + w * (L[4] + w * L[6])));
    double half = 0.5 * f * f;
    return k * LN2_HI - ((half - (s * (half + (odd + even)) + k * LN2_LO)) - f);
}

/* sum + error = a - b exactly (Knuth's TwoSum). */
static double difference(double a, double b, double *error) {
    double sum = a - b, bb = a - sum;
    *error = (a - (sum + bb)) + (bb - b);
    return sum;
}

/* x = n pi/2 + r + tail, |r| <= pi/4 (1 + eps), for |x| < 2^20 pi/2: Cody and Waite's reduction with pi/2 in three
 * pieces of 33 bits, whose products with n are exact, and a rest. Returns n mod 4. */
static unsigned reduce(double x, double *r, double *tail) {
    static const double PI2[3] = {1.57079632673412561417e+00, 6.07710050630396597660e-11, 2.02226624871116645580e-21};
    static const double PI2_REST = 8.47842766036889956997e-32;
    double n = round_even(x * 6.36619772367581382433e-01);
    double e1, e2, hi = x - n * PI2[0]; /* exact */
    hi = difference(hi, n * PI2[1], &e1);
    hi = difference(hi, n * PI2[2], &e2);
    double lo = (e1 + e2) - n * PI2_REST;
    *r = hi + lo;
    *tail = (hi - *r) + lo;
    return (unsigned)((int64_t)n & 3);
}

/* sin(x + tail), |x| <= pi/4 */
static double kernel_sin(double x, double tail) {
    static const double S[6] = {-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
                                2.75573137070700676789e-06,  -2.50507602534068634195e-08, 1.58969099521155010221e-10};
    double z = x * x, w = z * z, v = z * x;
    double p = S[1] + z * (S[2] + z * S[3]) + z * w * (S[4] + z * S[5]);
    return x - ((z * (0.5 * tail - v * p) - tail) - v * S[0]);
}

/* cos(x + tail), |x| <= pi/4 */
static double kernel_cos(double x, double tail) {
    static const double C[6] = {4.16666666666666019037e-02,  -1.38888888888741095749e-03, 2.48015872894767294178e-05,
                                -2.75573143513906633035e-07, 2.08757232129817482790e-09,  -1.13596475577881948265e-11};
    double z = x * x, w = z * z, half = 0.5 * z, head = 1.0 - half;
    double p = z * (C[0] + z * (C[1] + z * C[2])) + w * w * (C[3] + z * (C[4] + z * C[5]));
    return head + (((1.0 - head) - half) + (z * p - x * tail));
}

void clb_sincos(double x, double *s, double *c) {
    double r, tail;
    unsigned quadrant = reduce(x, &r, &tail);
    double sine = kernel_sin(r, tail), cosine = kernel_cos(r, tail);
    double a = quadrant & 1 ? cosine : sine, b = quadrant & 1 ? sine : cosine;
    *s = quadrant & 2 ? -a : a;
    *c = (quadrant + 1) & 2 ? -b : b;
}
