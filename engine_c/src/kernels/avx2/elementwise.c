/* AVX2 row kernels: every element goes through the operations of ../ref/elementwise.c in the same order. */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

void clb_avx2_rmsnorm(const float *x, const float *w, float eps, uint32_t n, float *y) {
    __m256 lo = _mm256_setzero_ps(), hi = lo; /* fma(0, 0, acc) in the tail changes nothing: acc >= +0 */
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        lo = _mm256_fmadd_ps(a, a, lo);
        hi = _mm256_fmadd_ps(b, b, hi);
    }
    if (i < n) {
        __m256 a = load_n(x + i, n - i);
        lo = _mm256_fmadd_ps(a, a, lo);
    }
    if (i + 8 < n) {
        __m256 b = load_n(x + i + 8, n - i - 8);
        hi = _mm256_fmadd_ps(b, b, hi);
    }
    float inv = 1.0f / clb_sqrtf(tree8(_mm256_add_ps(lo, hi)) / (float)n + eps);
    const __m256 v = _mm256_set1_ps(inv);
    for (i = 0; i < n; i += 8) {
        __m256 t = _mm256_mul_ps(load_n(x + i, n - i), v);
        store_n(y + i, n - i, _mm256_mul_ps(t, load_n(w + i, n - i)));
    }
}

void clb_avx2_silu_mul(float *g, const float *u, uint32_t n) {
    const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    for (uint32_t i = 0; i < n; i += 8) {
        __m256 v = load_n(g + i, n - i);
        __m256 s = _mm256_div_ps(v, _mm256_add_ps(one, exp8(_mm256_xor_ps(v, sign))));
        store_n(g + i, n - i, _mm256_mul_ps(s, load_n(u + i, n - i)));
    }
}

void clb_avx2_rope(float *x, const float *c, const float *s, float scale, uint32_t n) {
    uint32_t half = n / 2;
    const __m256 k = _mm256_set1_ps(scale);
    for (uint32_t i = 0; i < half; i += 8) {
        uint32_t m = half - i;
        __m256 a = load_n(x + i, m), b = load_n(x + i + half, m), cos = load_n(c + i, m), sin = load_n(s + i, m);
        __m256 p = _mm256_fmsub_ps(a, cos, _mm256_mul_ps(b, sin)), q = _mm256_fmadd_ps(b, cos, _mm256_mul_ps(a, sin));
        store_n(x + i, m, scale != 1.0f ? _mm256_mul_ps(p, k) : p);
        store_n(x + i + half, m, scale != 1.0f ? _mm256_mul_ps(q, k) : q);
    }
}

float clb_avx2_softmax(float *p, uint32_t n) {
    __m256 m = _mm256_set1_ps(-CLB_INF), lo = _mm256_setzero_ps(), hi = lo;
    for (uint32_t i = 0; i < n; i += 8) m = _mm256_max_ps(_mm256_loadu_ps(p + i), m); /* a NaN leaves m */
    m = _mm256_set1_ps(max_lane(m));
    for (uint32_t i = 0; i < n; i += 16) {
        __m256 a = exp8(_mm256_sub_ps(_mm256_loadu_ps(p + i), m));
        __m256 b = exp8(_mm256_sub_ps(_mm256_loadu_ps(p + i + 8), m));
        _mm256_storeu_ps(p + i, a);
        _mm256_storeu_ps(p + i + 8, b);
        lo = _mm256_add_ps(lo, a);
        hi = _mm256_add_ps(hi, b);
    }
    return tree8(_mm256_add_ps(lo, hi));
}

void clb_avx2_axpy(float w, const float *x, uint32_t n, float *acc) {
    const __m256 k = _mm256_set1_ps(w);
    for (uint32_t i = 0; i < n; i += 8)
        store_n(acc + i, n - i, _mm256_fmadd_ps(k, load_n(x + i, n - i), load_n(acc + i, n - i)));
}

void clb_avx2_scale(float w, uint32_t n, float *x) {
    const __m256 k = _mm256_set1_ps(w);
    for (uint32_t i = 0; i < n; i += 8) store_n(x + i, n - i, _mm256_mul_ps(load_n(x + i, n - i), k));
}

void clb_avx2_add(const float *x, uint32_t n, float *acc) {
    for (uint32_t i = 0; i < n; i += 8)
        store_n(acc + i, n - i, _mm256_add_ps(load_n(acc + i, n - i), load_n(x + i, n - i)));
}

/* the largest value so far, and the largest as a magnitude's bits: NaN and infinity are the greatest there */
typedef struct extent { __m256 most; __m256i bits; } extent_t;
CLB_INLINE void extend(extent_t *e, __m256 v) {
    e->most = _mm256_max_ps(v, e->most); /* a NaN leaves it */
    e->bits = _mm256_max_epi32(e->bits, _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(INT32_MAX)));
}

int clb_avx2_finite_max(const float *x, uint32_t n, float *m) {
    extent_t e[4];
    for (int j = 0; j < 4; j++) e[j] = (extent_t){_mm256_set1_ps(-CLB_INF), _mm256_setzero_si256()};
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        CLB_UNROLL
        for (int j = 0; j < 4; j++) extend(&e[j], _mm256_loadu_ps(x + i + 8 * j));
    }
    for (; i + 8 <= n; i += 8) extend(&e[0], _mm256_loadu_ps(x + i));
    if (i < n)
        extend(&e[1], _mm256_blendv_ps(_mm256_set1_ps(x[i]), load_n(x + i, n - i), _mm256_castsi256_ps(mask8(n - i))));
    for (int j = 1; j < 4; j++) {
        e[0].most = _mm256_max_ps(e[0].most, e[j].most);
        e[0].bits = _mm256_max_epi32(e[0].bits, e[j].bits);
    }
    *m = max_lane(e[0].most) + 0.0f; /* -0 becomes +0: which zero came first is not a lane's business */
    return -(max_lane_epi32(e[0].bits) > 0x7f7fffff);
}

/* l[0], l[1] += the first n of 8 exp(x - m), in double */
CLB_INLINE void add_exp(const float *x, uint32_t n, __m256 m, __m256d l[2]) {
    __m256 e = exp8(_mm256_sub_ps(load_n(x, n), m));
    if (n < 8) e = _mm256_and_ps(e, _mm256_castsi256_ps(mask8(n)));
    l[0] = _mm256_add_pd(l[0], _mm256_cvtps_pd(_mm256_castps256_ps128(e)));
    l[1] = _mm256_add_pd(l[1], _mm256_cvtps_pd(_mm256_extractf128_ps(e, 1)));
}

double clb_avx2_exp_sum(const float *x, uint32_t n, float m) {
    const __m256 k = _mm256_set1_ps(m);
    __m256d l[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    for (uint32_t i = 0; i < n; i += 16) {
        add_exp(x + i, n - i, k, l);
        if (i + 8 < n) add_exp(x + i + 8, n - i - 8, k, l + 2);
    }
    return tree8d(_mm256_add_pd(l[0], l[2]), _mm256_add_pd(l[1], l[3]));
}
#else
typedef int clb_avx2_elementwise_not_x86;
#endif
