/* Shared pieces of the AVX-512 kernels. The trees and scalar reductions are those of AVX2, on the sum of the two
 * halves. With CLB_EMULATE_AVX512 the intrinsics are functions that run on any AVX2 CPU, for tests. */
#ifndef CLB_AVX512_VEC_H
#define CLB_AVX512_VEC_H
#if defined(CLB_EMULATE_AVX512)
#include "emulate.h"
#endif
#include "../avx2/vec.h"

CLB_INLINE __mmask16 mask16(uint32_t n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }
/* the first n floats of p, zeros after them; n >= 16 is a full vector */
CLB_INLINE __m512 load16_n(const float *p, uint32_t n) {
    return n >= 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(mask16(n), p);
}
CLB_INLINE void store16_n(float *p, uint32_t n, __m512 v) {
    if (n >= 16) _mm512_storeu_ps(p, v);
    else _mm512_mask_storeu_ps(p, mask16(n), v);
}

CLB_INLINE __m256 low_half(__m512 v) { return _mm512_castps512_ps256(v); }
CLB_INLINE __m256 high_half(__m512 v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
/* the first step of clb_tree16: lanes l + l+8 */
CLB_INLINE __m256 fold(__m512 v) { return _mm256_add_ps(low_half(v), high_half(v)); }
CLB_INLINE float max_lane16(__m512 v) { return max_lane(_mm256_max_ps(low_half(v), high_half(v))); }

/* lanes where x is NaN or infinite */
CLB_INLINE __mmask16 not_finite16(__m512 x) {
    const __m512i e = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(x), e), e);
}

/* clb_expf, line by line */
CLB_INLINE __m512 exp16(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f), one = _mm512_set1_ps(1.0f);
    __m512 n = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(CLB_EXP_LOG2E)), magic), magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-CLB_EXP_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-CLB_EXP_LN2_LO), r);
    __m512 p = _mm512_set1_ps(CLB_EXP_C6);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CLB_EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CLB_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CLB_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CLB_EXP_C2));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i i = _mm512_cvttps_epi32(n), a = _mm512_srai_epi32(i, 1), b = _mm512_sub_epi32(i, a);
    const __m512i bias = _mm512_set1_epi32(127);
    p = _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(a, bias), 23)));
    p = _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(b, bias), 23)));
    __mmask16 low = _mm512_cmp_ps_mask(x, _mm512_set1_ps(CLB_EXP_LO), _CMP_LT_OQ);
    __mmask16 high = _mm512_cmp_ps_mask(x, _mm512_set1_ps(CLB_EXP_HI), _CMP_GT_OQ);
    return _mm512_mask_blend_ps(high, _mm512_mask_blend_ps(low, p, _mm512_setzero_ps()), _mm512_set1_ps(CLB_INF));
}

CLB_INLINE __m512 load_half16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
/* elements [i, i + 16) of a KV row; wide: f32, else f16 */
CLB_INLINE __m512 load_kv16(const void *row, size_t i, int wide) {
    return wide ? _mm512_loadu_ps((const float *)row + i) : load_half16((const uint16_t *)row + i);
}
#endif
