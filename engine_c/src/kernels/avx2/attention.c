/* AVX2 attention kernels. Scores: two accumulators per (head, key) hold the 16 lanes; eight keys are reduced at once by
 * a transposition that adds the same pairs as clb_tree16. K and V loads are shared by the heads of a group. (One pass
 * per half of the lanes over 4 heads x 2 keys was measured on Zen 3: +10 % with gcc, -25 % with clang, not taken.) */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

enum { KEYS = 8, SPAN = 32 }; /* keys reduced together; keys per pass over V, so that they stay in L1 */

/* sums[h * KEYS + j] = lanes 0..7 + lanes 8..15 of q[h] . k[j], for H heads and J keys */
CLB_INLINE void score_tile(const float *q, const uint8_t *k, size_t row_bytes, uint32_t hdp, const int wide,
                           const int H, const int J, __m256 *sums) {
    __m256 acc[2][4][2];
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int j = 0; j < J; j++) acc[h][j][0] = acc[h][j][1] = _mm256_setzero_ps();
    for (uint32_t d = 0; d < hdp; d += 16) {
        CLB_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            __m256 key[4];
            CLB_UNROLL
            for (int j = 0; j < J; j++) key[j] = load_kv8(k + (size_t)j * row_bytes, d + 8 * half, wide);
            CLB_UNROLL
            for (int h = 0; h < H; h++) {
                __m256 v = _mm256_loadu_ps(q + (size_t)h * hdp + d + 8 * half);
                CLB_UNROLL
                for (int j = 0; j < J; j++) acc[h][j][half] = _mm256_fmadd_ps(v, key[j], acc[h][j][half]);
            }
        }
    }
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int j = 0; j < J; j++) sums[h * KEYS + j] = _mm256_add_ps(acc[h][j][0], acc[h][j][1]);
}

/* H heads against `keys` <= KEYS keys */
CLB_INLINE void score_keys(const float *q, const uint8_t *k, uint32_t keys, uint32_t hdp, const int wide, const int H,
                           float *scores, size_t ld) {
    const int J = 4 / H; /* 8 accumulators: two fma a cycle at a latency of 4 */
    const size_t row_bytes = (size_t)hdp * (wide ? 4 : 2);
    __m256 sums[2 * KEYS];
    uint32_t j = 0;
    if (keys < KEYS) memset(sums, 0, sizeof sums);
    for (; j + (uint32_t)J <= keys; j += (uint32_t)J)
        score_tile(q, k + j * row_bytes, row_bytes, hdp, wide, H, J, sums + j);
    for (; j < keys; j++) score_tile(q, k + j * row_bytes, row_bytes, hdp, wide, H, 1, sums + j);
    for (int h = 0; h < H; h++) store_n(scores + (size_t)h * ld, keys, tree8x8(sums + h * KEYS));
}

CLB_INLINE void scores(const float *q, uint32_t nq, const void *k, uint32_t n, uint32_t hdp, float *out, size_t ld,
                       const int wide) {
    const size_t row_bytes = (size_t)hdp * (wide ? 4 : 2);
    for (uint32_t j = 0; j < n; j += KEYS) {
        const uint8_t *kj = (const uint8_t *)k + j * row_bytes;
        uint32_t keys = n - j < KEYS ? n - j : KEYS, h = 0;
        for (; h + 2 <= nq; h += 2) score_keys(q + (size_t)h * hdp, kj, keys, hdp, wide, 2, out + h * ld + j, ld);
        if (h < nq) score_keys(q + (size_t)h * hdp, kj, keys, hdp, wide, 1, out + h * ld + j, ld);
    }
}

/* acc[h][d0 .. d0 + 16 * D) += p[h][j] v[j][d0 ..] over `keys` keys in order, for H heads */
CLB_INLINE void mix_tile(const float *p, size_t ld, const uint8_t *v, uint32_t keys, uint32_t hdp, const int wide,
                         const int H, const int D, float *acc) {
    const size_t row_bytes = (size_t)hdp * (wide ? 4 : 2);
    __m256 a[4][8];
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int d = 0; d < 2 * D; d++) a[h][d] = _mm256_loadu_ps(acc + (size_t)h * hdp + 8 * d);
    for (uint32_t j = 0; j < keys; j++, v += row_bytes) {
        __m256 w[4];
        CLB_UNROLL
        for (int h = 0; h < H; h++) w[h] = _mm256_broadcast_ss(p + (size_t)h * ld + j);
        CLB_UNROLL
        for (int d = 0; d < 2 * D; d++) {
            __m256 t = load_kv8(v, (size_t)d * 8, wide);
            CLB_UNROLL
            for (int h = 0; h < H; h++) a[h][d] = _mm256_fmadd_ps(w[h], t, a[h][d]);
        }
    }
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int d = 0; d < 2 * D; d++) _mm256_storeu_ps(acc + (size_t)h * hdp + 8 * d, a[h][d]);
}

/* all of hdp for H heads: D x 16 elements at a time, 8 accumulators (H * 2D), then 16 */
CLB_INLINE void mix_heads(const float *p, size_t ld, const uint8_t *v, uint32_t keys, uint32_t hdp, const int wide,
                          const int H, float *acc) {
    const uint32_t step = 16u * (4 / (uint32_t)H), size = wide ? 4 : 2;
    uint32_t d = 0;
    for (; d + step <= hdp; d += step) mix_tile(p, ld, v + (size_t)d * size, keys, hdp, wide, H, 4 / H, acc + d);
    for (; H < 4 && d < hdp; d += 16) mix_tile(p, ld, v + (size_t)d * size, keys, hdp, wide, H, 1, acc + d);
}

CLB_INLINE void accumulate(const float *p, size_t ld, uint32_t nq, const void *v, uint32_t n, uint32_t hdp, float *acc,
                           const int wide) {
    for (uint32_t j = 0; j < n; j += SPAN) {
        const uint8_t *vj = (const uint8_t *)v + (size_t)j * hdp * (wide ? 4 : 2);
        uint32_t keys = n - j < SPAN ? n - j : SPAN, h = 0;
        for (; h + 4 <= nq; h += 4) mix_heads(p + h * ld + j, ld, vj, keys, hdp, wide, 4, acc + (size_t)h * hdp);
        for (; h + 2 <= nq; h += 2) mix_heads(p + h * ld + j, ld, vj, keys, hdp, wide, 2, acc + (size_t)h * hdp);
        if (h < nq) mix_heads(p + h * ld + j, ld, vj, keys, hdp, wide, 1, acc + (size_t)h * hdp);
    }
}

#define ATTENTION(name, wide)                                                                                   \
    void clb_avx2_attn_scores_##name(const float *q, uint32_t nq, const void *k, uint32_t n, uint32_t hdp,      \
                                     float *out, size_t ld) {                                                   \
        scores(q, nq, k, n, hdp, out, ld, wide);                                                                \
    }                                                                                                           \
    void clb_avx2_attn_accumulate_##name(const float *p, size_t ld, uint32_t nq, const void *v, uint32_t n,     \
                                         uint32_t hdp, float *acc) {                                            \
        accumulate(p, ld, nq, v, n, hdp, acc, wide);                                                            \
    }
ATTENTION(f16, 0)
ATTENTION(f32, 1)
#else
typedef int clb_avx2_attention_not_x86;
#endif
