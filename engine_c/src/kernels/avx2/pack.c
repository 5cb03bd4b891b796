/* AVX2 packing of activations and KV rows. */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

void clb_avx2_pack_f32(const float *x, uint32_t n, const clb_act_t *act, uint32_t block0, uint32_t row) {
    for (uint32_t b = 0, k = 0; k < n; b++, k += CLB_BLOCK) {
        float *q = (float *)act->q + ((size_t)(block0 + b) * act->cap + row) * CLB_BLOCK;
        for (uint32_t i = 0; i < CLB_BLOCK; i += 8)
            _mm256_storeu_ps(q + i, k + i < n ? load_n(x + k + i, n - k - i) : _mm256_setzero_ps());
    }
}

/* largest |x| of 4 x 8 floats, as bits */
CLB_INLINE uint32_t max_bits(const __m256 v[4]) {
    const __m256i abs = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_setzero_si256();
    CLB_UNROLL
    for (int i = 0; i < 4; i++) m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(v[i]), abs));
    return max_lane_epi32(m);
}

/* q[32] = rne(v * inv); the packs work per 128 bits, the permutation restores the order. Returns the sum of q. */
CLB_INLINE int32_t quantise(const __m256 v[4], float inv, int8_t *q) {
    const __m256 k = _mm256_set1_ps(inv);
    __m256i i[4];
    CLB_UNROLL
    for (int j = 0; j < 4; j++) i[j] = _mm256_cvtps_epi32(_mm256_mul_ps(v[j], k));
    __m256i b = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
    b = _mm256_permutevar8x32_epi32(b, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)(void *)q, b);
    return sum_bytes(b);
}

void clb_avx2_pack_q8(const float *x, uint32_t n, const clb_act_t *act, uint32_t block0, uint32_t row) {
    for (uint32_t b = 0, k = 0; k < n; b++, k += CLB_BLOCK) {
        size_t at = (size_t)(block0 + b) * act->cap + row;
        int8_t *q = (int8_t *)act->q + at * CLB_BLOCK;
        __m256 v[4];
        CLB_UNROLL
        for (uint32_t i = 0; i < 4; i++)
            v[i] = k + 8 * i < n ? load_n(x + k + 8 * i, n - k - 8 * i) : _mm256_setzero_ps();
        uint32_t bits = max_bits(v);
        float amax = clb_float(bits);
        if (bits >= 0x7f800000u || amax < 0x1p-100f) {
            _mm256_storeu_si256((__m256i *)(void *)q, _mm256_setzero_si256());
            act->d[at] = bits >= 0x7f800000u ? CLB_NAN : 0.0f;
            act->s[at] = 0;
        } else {
            act->d[at] = amax / 127.0f;
            act->s[at] = quantise(v, 127.0f / amax, q);
        }
    }
}

int clb_avx2_kv_store_f16(const float *x, uint32_t n, void *row) {
    const __m256i e = _mm256_set1_epi16(0x7c00);
    __m256i bad = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += 16) {
        __m256 a = load_n(x + i, n - i), b = i + 8 < n ? load_n(x + i + 8, n - i - 8) : _mm256_setzero_ps();
        __m256i h = _mm256_set_m128i(_mm256_cvtps_ph(b, 0), _mm256_cvtps_ph(a, 0));
        bad = _mm256_or_si256(bad, _mm256_cmpeq_epi16(_mm256_and_si256(h, e), e));
        _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)row + i), h);
    }
    return -!_mm256_testz_si256(bad, bad);
}

int clb_avx2_kv_store_f32(const float *x, uint32_t n, void *row) {
    __m256i bad = _mm256_setzero_si256();
    for (uint32_t i = 0; i < ((n + 15) & ~15u); i += 8) {
        __m256 a = i < n ? load_n(x + i, n - i) : _mm256_setzero_ps();
        bad = _mm256_or_si256(bad, not_finite(a));
        _mm256_storeu_ps((float *)row + i, a);
    }
    return -!_mm256_testz_si256(bad, bad);
}
#else
typedef int clb_avx2_pack_not_x86;
#endif
