/* AVX2 GEMM of one panel in f32, f16 and bf16: each of 16 lanes is an output row, one fma per k in k order. A tile of 6
 * activation rows keeps 12 accumulators, 2 weight vectors and a broadcast in 15 of 16 registers. */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

enum { TILE = 6, AHEAD = 2048 }; /* rows of a full tile; prefetch distance in bytes */

/* 8 weights of k from lane 8 * half on */
CLB_INLINE __m256 weights(const uint8_t *block, uint32_t k, uint32_t half, int format) {
    size_t i = k * CLB_PANEL + 8 * half;
    if (format == CLB_FMT_f32) return _mm256_loadu_ps((const float *)(const void *)block + i);
    const uint16_t *h = (const uint16_t *)(const void *)block + i;
    if (format == CLB_FMT_f16) return load_half8(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)h)), 16));
}

/* y[r][16] for r in [0, R); x: float [nb][stride][32] at the tile's first row */
CLB_INLINE void tile(const uint8_t *w, uint32_t nb, const float *x, size_t stride, const uint32_t R, const int format,
                     float *y, size_t ldy) {
    const size_t bytes = (format == CLB_FMT_f32 ? 4 : 2) * (size_t)CLB_BLOCK * CLB_PANEL;
    __m256 acc[TILE][2];
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (uint32_t b = 0; b < nb; b++, w += bytes, x += stride) {
        for (uint32_t k = 0; k < CLB_BLOCK; k += 2) {
            if (R == 1) _mm_prefetch((const char *)w + k * (bytes / CLB_BLOCK) + AHEAD, _MM_HINT_T0);
            CLB_UNROLL
            for (uint32_t j = k; j < k + 2; j++) {
                __m256 lo = weights(w, j, 0, format), hi = weights(w, j, 1, format);
                CLB_UNROLL
                for (uint32_t r = 0; r < R; r++) {
                    __m256 v = _mm256_broadcast_ss(x + r * CLB_BLOCK + j);
                    acc[r][0] = _mm256_fmadd_ps(lo, v, acc[r][0]);
                    acc[r][1] = _mm256_fmadd_ps(hi, v, acc[r][1]);
                }
            }
        }
    }
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) {
        _mm256_storeu_ps(y + r * ldy, acc[r][0]);
        _mm256_storeu_ps(y + r * ldy + 8, acc[r][1]);
    }
}

CLB_INLINE void gemm(const void *panel, uint32_t nb, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y,
                     size_t ldy, const int format) {
    const float *q = (const float *)x->q + (size_t)row0 * CLB_BLOCK;
    const size_t stride = (size_t)x->cap * CLB_BLOCK;
    for (; rows >= TILE; rows -= TILE, q += TILE * CLB_BLOCK, y += TILE * ldy) tile(panel, nb, q, stride, TILE, format, y, ldy);
    switch (rows) {
    case 1: tile(panel, nb, q, stride, 1, format, y, ldy); break;
    case 2: tile(panel, nb, q, stride, 2, format, y, ldy); break;
    case 3: tile(panel, nb, q, stride, 3, format, y, ldy); break;
    case 4: tile(panel, nb, q, stride, 4, format, y, ldy); break;
    case 5: tile(panel, nb, q, stride, 5, format, y, ldy); break;
    }
}

#define GEMM(name)                                                                                            \
    void clb_avx2_gemm_##name(const void *panel, uint32_t nb, const clb_act_t *x, uint32_t row0, uint32_t rows, \
                              float *y, size_t ldy) {                                                         \
        gemm(panel, nb, x, row0, rows, y, ldy, CLB_FMT_##name);                                               \
    }
GEMM(f32)
GEMM(f16)
GEMM(bf16)
#else
typedef int clb_avx2_gemm_f_not_x86;
#endif
