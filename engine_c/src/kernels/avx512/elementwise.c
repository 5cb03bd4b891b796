/* AVX-512 row kernels: every element goes through the operations of ../ref/elementwise.c in the same order. */
#if defined(__x86_64__)
#include "avx512.h"
#include "vec.h"

void clb_avx512_rmsnorm(const float *x, const float *w, float eps, uint32_t n, float *y) {
    __m512 ss = _mm512_setzero_ps(); /* fma(0, 0, acc) in the tail changes nothing: acc >= +0 */
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 v = load16_n(x + i, n - i);
        ss = _mm512_fmadd_ps(v, v, ss);
    }
    const __m512 inv = _mm512_set1_ps(1.0f / clb_sqrtf(tree8(fold(ss)) / (float)n + eps));
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 t = _mm512_mul_ps(load16_n(x + i, n - i), inv);
        store16_n(y + i, n - i, _mm512_mul_ps(t, load16_n(w + i, n - i)));
    }
}

CLB_INLINE __m512 negate(__m512 v) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), _mm512_set1_epi32(INT32_MIN)));
}

void clb_avx512_silu_mul(float *g, const float *u, uint32_t n) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 v = load16_n(g + i, n - i);
        __m512 s = _mm512_div_ps(v, _mm512_add_ps(one, exp16(negate(v))));
        store16_n(g + i, n - i, _mm512_mul_ps(s, load16_n(u + i, n - i)));
    }
}

void clb_avx512_rope(float *x, const float *c, const float *s, float scale, uint32_t n) {
    uint32_t half = n / 2;
    const __m512 k = _mm512_set1_ps(scale);
    for (uint32_t i = 0; i < half; i += 16) {
        uint32_t m = half - i;
        __m512 a = load16_n(x + i, m), b = load16_n(x + i + half, m);
        __m512 cos = load16_n(c + i, m), sin = load16_n(s + i, m);
        __m512 p = _mm512_fmadd_ps(a, cos, negate(_mm512_mul_ps(b, sin)));
        __m512 q = _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin));
        store16_n(x + i, m, scale != 1.0f ? _mm512_mul_ps(p, k) : p);
        store16_n(x + i + half, m, scale != 1.0f ? _mm512_mul_ps(q, k) : q);
    }
}

float clb_avx512_softmax(float *p, uint32_t n) {
    __m512 m = _mm512_set1_ps(-CLB_INF), sum = _mm512_setzero_ps();
    for (uint32_t i = 0; i < n; i += 16) m = _mm512_max_ps(_mm512_loadu_ps(p + i), m); /* a NaN leaves m */
    m = _mm512_set1_ps(max_lane16(m));
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(p + i), m));
        _mm512_storeu_ps(p + i, e);
        sum = _mm512_add_ps(sum, e);
    }
    return tree8(fold(sum));
}

void clb_avx512_axpy(float w, const float *x, uint32_t n, float *acc) {
    const __m512 k = _mm512_set1_ps(w);
    for (uint32_t i = 0; i < n; i += 16)
        store16_n(acc + i, n - i, _mm512_fmadd_ps(k, load16_n(x + i, n - i), load16_n(acc + i, n - i)));
}

void clb_avx512_scale(float w, uint32_t n, float *x) {
    const __m512 k = _mm512_set1_ps(w);
    for (uint32_t i = 0; i < n; i += 16) store16_n(x + i, n - i, _mm512_mul_ps(load16_n(x + i, n - i), k));
}

void clb_avx512_add(const float *x, uint32_t n, float *acc) {
    for (uint32_t i = 0; i < n; i += 16)
        store16_n(acc + i, n - i, _mm512_add_ps(load16_n(acc + i, n - i), load16_n(x + i, n - i)));
}

/* the largest value so far, and the largest as a magnitude's bits: NaN and infinity are the greatest there */
typedef struct extent { __m512 most; __m512i bits; } extent_t;
CLB_INLINE void extend(extent_t *e, __m512 v) {
    e->most = _mm512_max_ps(v, e->most); /* a NaN leaves it */
    e->bits = _mm512_max_epi32(e->bits, _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(INT32_MAX)));
}

int clb_avx512_finite_max(const float *x, uint32_t n, float *m) {
    extent_t e[4];
    for (int j = 0; j < 4; j++) e[j] = (extent_t){_mm512_set1_ps(-CLB_INF), _mm512_setzero_si512()};
    uint32_t i = 0;
    for (; i + 64 <= n; i += 64) {
        CLB_UNROLL
        for (int j = 0; j < 4; j++) extend(&e[j], _mm512_loadu_ps(x + i + 16 * j));
    }
    for (; i + 16 <= n; i += 16) extend(&e[0], _mm512_loadu_ps(x + i));
    if (i < n) extend(&e[1], _mm512_mask_blend_ps(mask16(n - i), _mm512_set1_ps(x[i]), load16_n(x + i, n - i)));
    for (int j = 1; j < 4; j++) {
        e[0].most = _mm512_max_ps(e[0].most, e[j].most);
        e[0].bits = _mm512_max_epi32(e[0].bits, e[j].bits);
    }
    *m = max_lane16(e[0].most) + 0.0f; /* -0 becomes +0: which zero came first is not a lane's business */
    return -(_mm512_cmpgt_epi32_mask(e[0].bits, _mm512_set1_epi32(0x7f7fffff)) != 0);
}

double clb_avx512_exp_sum(const float *x, uint32_t n, float m) {
    const __m512 k = _mm512_set1_ps(m);
    __m512d lo = _mm512_setzero_pd(), hi = lo;
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 e = exp16(_mm512_sub_ps(load16_n(x + i, n - i), k));
        if (n - i < 16) e = _mm512_mask_blend_ps(mask16(n - i), _mm512_setzero_ps(), e);
        lo = _mm512_add_pd(lo, _mm512_cvtps_pd(low_half(e)));
        hi = _mm512_add_pd(hi, _mm512_cvtps_pd(high_half(e)));
    }
    lo = _mm512_add_pd(lo, hi);
    return tree8d(_mm512_castpd512_pd256(lo), _mm512_extractf64x4_pd(lo, 1));
}
#else
typedef int clb_avx512_elementwise_not_x86;
#endif
