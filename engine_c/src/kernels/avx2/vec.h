/* Shared pieces of the AVX2 kernels: tails, exp, the fixed tree over 16 lanes, loads of KV elements. */
#ifndef CLB_AVX2_VEC_H
#define CLB_AVX2_VEC_H
#include "../../base/fp.h"
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CLB_INLINE static inline __attribute__((always_inline))
/* Loops with constant bounds that must become straight code so that small arrays live in registers. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define CLB_SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CLB_SANITIZED 1
#endif
#if defined(CLB_UNROLL) /* the emulation leaves loops as they are */
#elif defined(CLB_SANITIZED) /* so do sanitizer builds: a check per unrolled access takes a minute to compile */
#define CLB_UNROLL
#elif defined(__clang__)
#define CLB_UNROLL _Pragma("clang loop unroll(full)")
#else
#define CLB_UNROLL _Pragma("GCC unroll 32")
#endif
/* Keeps compilers from reassociating integer sums, which would hold all the terms at once and spill them. */
#define CLB_PIN(v) __asm__("" : "+x"(v))

/* height of the next tile of `rows` rows: as even as possible, at most `most` */
CLB_INLINE uint32_t tile_rows(uint32_t rows, uint32_t most) {
    uint32_t tiles = (rows + most - 1) / most;
    return (rows + tiles - 1) / tiles;
}

/* the first n of 8 lanes: all bits set */
CLB_INLINE __m256i mask8(uint32_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
/* the first n floats of p, zeros after them; n >= 8 is a full vector */
CLB_INLINE __m256 load_n(const float *p, uint32_t n) {
    return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask8(n));
}
CLB_INLINE void store_n(float *p, uint32_t n, __m256 v) {
    if (n >= 8) _mm256_storeu_ps(p, v);
    else _mm256_maskstore_ps(p, mask8(n), v);
}

/* all bits set where x is NaN or infinite */
CLB_INLINE __m256i not_finite(__m256 x) {
    const __m256i e = _mm256_set1_epi32(0x7f800000);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(x), e), e);
}

/* largest of 8 lanes, none of them NaN */
CLB_INLINE float max_lane(__m256 m) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
CLB_INLINE uint32_t max_lane_epi32(__m256i m) {
    __m128i a = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

/* sum of 32 signed bytes */
CLB_INLINE int32_t sum_bytes(__m256i q) {
    __m256i s = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    s = _mm256_madd_epi16(s, _mm256_set1_epi16(1));
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

/* clb_expf, line by line */
CLB_INLINE __m256 exp8(__m256 x) {
    const __m256 magic = _mm256_set1_ps(12582912.0f), one = _mm256_set1_ps(1.0f);
    __m256 n = _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(CLB_EXP_LOG2E)), magic), magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-CLB_EXP_LN2_HI), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-CLB_EXP_LN2_LO), r);
    __m256 p = _mm256_set1_ps(CLB_EXP_C6);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CLB_EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CLB_EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CLB_EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CLB_EXP_C2));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i i = _mm256_cvttps_epi32(n), a = _mm256_srai_epi32(i, 1), b = _mm256_sub_epi32(i, a);
    const __m256i bias = _mm256_set1_epi32(127);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(a, bias), 23)));
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(b, bias), 23)));
    p = _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(CLB_EXP_LO), _CMP_LT_OQ), p);
    return _mm256_blendv_ps(p, _mm256_set1_ps(CLB_INF), _mm256_cmp_ps(x, _mm256_set1_ps(CLB_EXP_HI), _CMP_GT_OQ));
}

/* clb_tree16 after its first step: t = lanes 0..7 + lanes 8..15 */
CLB_INLINE float tree8(__m256 t) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

/* eight tree8 at once: the transposition puts each tree's operands into the same lane; result i is tree8(t[i]) */
CLB_INLINE __m256 tree8x8(const __m256 t[8]) {
    __m256 b[4], c[2];
    for (int i = 0; i < 4; i++) /* [t_i | t_i+4] */
        b[i] = _mm256_add_ps(_mm256_permute2f128_ps(t[i], t[i + 4], 0x20),
                             _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
    for (int i = 0; i < 2; i++) { /* pairs (b0 + b2, b1 + b3) of trees 2i and 2i + 1 */
        __m256d u = _mm256_castps_pd(b[2 * i]), v = _mm256_castps_pd(b[2 * i + 1]);
        c[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(u, v)), _mm256_castpd_ps(_mm256_unpackhi_pd(u, v)));
    }
    return _mm256_add_ps(_mm256_shuffle_ps(c[0], c[1], 0x88), _mm256_shuffle_ps(c[0], c[1], 0xdd));
}

/* clb_tree16d after its first step: t = lanes 0..7 + lanes 8..15, in two vectors of 4 */
CLB_INLINE double tree8d(__m256d t0, __m256d t1) {
    __m256d b = _mm256_add_pd(t0, t1);
    __m128d c = _mm_add_pd(_mm256_castpd256_pd128(b), _mm256_extractf128_pd(b, 1));
    return _mm_cvtsd_f64(_mm_add_sd(c, _mm_unpackhi_pd(c, c)));
}

CLB_INLINE __m256 load_half8(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
/* elements [i, i + 8) of a KV row; wide: f32, else f16 */
CLB_INLINE __m256 load_kv8(const void *row, size_t i, int wide) {
    return wide ? _mm256_loadu_ps((const float *)row + i) : load_half8((const uint16_t *)row + i);
}

CLB_INLINE __m256i broadcast4(const void *p) { /* 4 bytes into every lane */
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}
#endif
