/* Portable exact float building blocks: fused multiply-add, half floats, exp, log, sin/cos. No libm (its results differ
 * between C libraries); every function here is a fixed sequence of IEEE operations, so vector kernels that follow the
 * same sequence give the same bits. */
#ifndef CLB_FP_H
#define CLB_FP_H
#include <stdint.h>
#include <string.h>

static inline uint32_t clb_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float clb_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline uint64_t clb_bits64(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
static inline double clb_double(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }
#define CLB_INF (clb_float(0x7f800000u))
#define CLB_NAN (clb_float(0x7fc00000u))
static inline int clb_finite(float x) { return (clb_bits(x) & 0x7f800000u) != 0x7f800000u; }

/* fma(a, b, c) rounded once. The product is exact in double; the sum is rounded to odd in double, which makes the
 * final rounding to float correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). */
static inline float clb_fmaf(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    double p = (double)a * (double)b, s = p + (double)c;
    double t = s - p, e = (p - (s - t)) + ((double)c - t); /* TwoSum error */
    uint64_t u = clb_bits64(s);
    if (e != 0 && !(u & 1) && (u & 0x7ff0000000000000u) != 0x7ff0000000000000u)
        u += ((e > 0) == (s > 0)) ? 1u : (uint64_t)-1; /* toward the discarded part, landing on an odd mantissa */
    return (float)clb_double(u);
#endif
}

/* f16 bits -> float, exact; NaNs become quiet (as VCVTPH2PS). */
static inline float clb_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
    if (e == 31) return clb_float(sign | 0x7f800000u | (m ? 0x400000u | m << 13 : 0));
    if (e) return clb_float(sign | (e + 112) << 23 | m << 13);
    return clb_float(sign | clb_bits((float)m * 0x1p-24f));
}

/* float -> f16 bits, round to nearest even (as VCVTPS2PH with imm 0). */
static inline uint16_t clb_f32_to_f16(float x) {
    uint32_t u = clb_bits(x), sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (u >> 13 & 0x1ffu));
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (u < 0x38800000u) { /* subnormal half: let the float adder round */
        uint32_t r = clb_bits(clb_float(u) + 0.5f) - clb_bits(0.5f);
        return (uint16_t)(sign | r);
    }
    u += 0xfffu + (u >> 13 & 1u);
    return (uint16_t)(sign | (u - (112u << 23)) >> 13);
}

static inline float clb_bf16_to_f32(uint16_t h) { return clb_float((uint32_t)h << 16); }
static inline uint16_t clb_f32_to_bf16(float x) {
    uint32_t u = clb_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static inline float clb_sqrtf(float x) { return __builtin_sqrtf(x); } /* -fno-math-errno: the instruction */

/* round to nearest even for |x| < 2^22 */
static inline float clb_rnef(float x) { return (x + 12582912.0f) - 12582912.0f; }

/* exp(x) to < 2 ulp: n = rne(x log2 e), r = x - n ln 2 in two fma, degree-6 polynomial, scaling by 2^n in two exact
 * steps. x < -87.33 gives 0, x > 88.72 gives +inf, NaN gives NaN. Vector kernels must follow this line by line. */
#define CLB_EXP_LO (-87.336544f)
#define CLB_EXP_HI 88.722839f
#define CLB_EXP_LOG2E 1.44269504f
#define CLB_EXP_LN2_HI 0.693145752f
#define CLB_EXP_LN2_LO 1.42860677e-6f
#define CLB_EXP_C6 1.37805939e-3f
#define CLB_EXP_C5 8.37312452e-3f
#define CLB_EXP_C4 4.16695364e-2f
#define CLB_EXP_C3 1.66664720e-1f
#define CLB_EXP_C2 4.99999851e-1f
static inline float clb_expf(float x) {
    float n = clb_rnef(x * CLB_EXP_LOG2E);
    float r = clb_fmaf(n, -CLB_EXP_LN2_HI, x);
    r = clb_fmaf(n, -CLB_EXP_LN2_LO, r);
    float p = CLB_EXP_C6;
    p = clb_fmaf(p, r, CLB_EXP_C5);
    p = clb_fmaf(p, r, CLB_EXP_C4);
    p = clb_fmaf(p, r, CLB_EXP_C3);
    p = clb_fmaf(p, r, CLB_EXP_C2);
    p = clb_fmaf(p, r, 1.0f);
    p = clb_fmaf(p, r, 1.0f);
    if (x < CLB_EXP_LO) return 0.0f;
    if (x > CLB_EXP_HI) return CLB_INF;
    if (x != x) return x;
    int32_t i = (int32_t)n;
    int32_t a = i >> 1, b = i - a;
    return p * clb_float((uint32_t)(a + 127) << 23) * clb_float((uint32_t)(b + 127) << 23);
}

/* p in units of 2^-39, rounded to nearest even: sums over any vocabulary (<= 2^24) are exact in 64 bits, so no order
 * of summation is needed. p in [0, 1]. */
static inline uint64_t clb_weight(float p) {
    return clb_bits64((double)p * 0x1p39 + 0x1p52) & 0x000fffffffffffffu;
}

double clb_exp(double x);                               /* full double range; < 1 ulp */
double clb_log(double x);                               /* x > 0, normal */
void clb_sincos(double x, double *s, double *c);        /* |x| < 2^20 * pi / 2 */

/* The fixed tree over 16 lanes. */
static inline float clb_tree16(const float *l) {
    float a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = l[i] + l[i + 8];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}
static inline double clb_tree16d(const double *l) {
    double a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = l[i] + l[i + 8];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}
#endif
