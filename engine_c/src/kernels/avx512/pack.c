/* AVX-512 packing of activations and KV rows. */
#if defined(__x86_64__)
#include "avx512.h"
#include "vec.h"

CLB_INLINE __m512 load16_or_zero(const float *x, uint32_t i, uint32_t n) { /* [i, i + 16) of x[n] */
    return i < n ? load16_n(x + i, n - i) : _mm512_setzero_ps();
}

void clb_avx512_pack_f32(const float *x, uint32_t n, const clb_act_t *act, uint32_t block0, uint32_t row) {
    for (uint32_t b = 0, k = 0; k < n; b++, k += CLB_BLOCK) {
        float *q = (float *)act->q + ((size_t)(block0 + b) * act->cap + row) * CLB_BLOCK;
        _mm512_storeu_ps(q, load16_or_zero(x, k, n));
        _mm512_storeu_ps(q + 16, load16_or_zero(x, k + 16, n));
    }
}

CLB_INLINE uint32_t max_bits(__m512 a, __m512 b) { /* largest magnitude of 32 floats, as bits */
    const __m512i abs = _mm512_set1_epi32(0x7fffffff);
    __m512i x = _mm512_and_si512(_mm512_castps_si512(a), abs), y = _mm512_and_si512(_mm512_castps_si512(b), abs);
    __m512i m = _mm512_max_epi32(x, y);
    return max_lane_epi32(_mm256_max_epi32(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1)));
}

CLB_INLINE __m128i quantise(__m512 x, __m512 inv) { /* rne(x * inv) as 16 bytes; never out of range */
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, inv)));
}

void clb_avx512_pack_q8(const float *x, uint32_t n, const clb_act_t *act, uint32_t block0, uint32_t row) {
    for (uint32_t b = 0, k = 0; k < n; b++, k += CLB_BLOCK) {
        size_t at = (size_t)(block0 + b) * act->cap + row;
        __m512 lo = load16_or_zero(x, k, n), hi = load16_or_zero(x, k + 16, n);
        uint32_t bits = max_bits(lo, hi);
        float amax = clb_float(bits);
        __m256i q = _mm256_setzero_si256();
        if (bits >= 0x7f800000u || amax < 0x1p-100f) {
            act->d[at] = bits >= 0x7f800000u ? CLB_NAN : 0.0f;
        } else {
            const __m512 inv = _mm512_set1_ps(127.0f / amax);
            act->d[at] = amax / 127.0f;
            q = _mm256_set_m128i(quantise(hi, inv), quantise(lo, inv));
        }
        _mm256_storeu_si256((void *)((int8_t *)act->q + at * CLB_BLOCK), q);
        act->s[at] = sum_bytes(q);
    }
}

int clb_avx512_kv_store_f16(const float *x, uint32_t n, void *row) {
    const __m256i e = _mm256_set1_epi16(0x7c00);
    __m256i bad = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += 16) {
        __m256i h = _mm512_cvtps_ph(load16_n(x + i, n - i), 0);
        bad = _mm256_or_si256(bad, _mm256_cmpeq_epi16(_mm256_and_si256(h, e), e));
        _mm256_storeu_si256((void *)((uint16_t *)row + i), h);
    }
    return -!_mm256_testz_si256(bad, bad);
}

int clb_avx512_kv_store_f32(const float *x, uint32_t n, void *row) {
    unsigned bad = 0;
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 v = load16_n(x + i, n - i);
        bad |= not_finite16(v);
        _mm512_storeu_ps((float *)row + i, v);
    }
    return -(bad != 0);
}
#else
typedef int clb_avx512_pack_not_x86;
#endif
