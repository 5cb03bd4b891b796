/* AVX2 GEMM of one panel in f32, f16 and bf16: each of 16 lanes is an output row: a chain of fma over the k of a block,
 * blocks added in order. A tile of 6 activation rows keeps 12 sums, 2 weight vectors and a broadcast in 15 of 16
 * registers. */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

enum { TILE = 6, SPAN = 8, AHEAD = 2048 }; /* rows; blocks; bytes of prefetch distance */

/* 8 weights of k from lane 8 * half on */
CLB_INLINE __m256 weights(const uint8_t *block, uint32_t k, uint32_t half, int format) {
    size_t i = k * CLB_PANEL + 8 * half;
    if (format == CLB_FMT_f32) return _mm256_loadu_ps((const float *)(const void *)block + i);
    const uint16_t *h = (const uint16_t *)(const void *)block + i;
    if (format == CLB_FMT_f16) return load_half8(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)h)), 16));
}

/* y[r][16] += sum over one block, for r in [0, R); x: float [R][32] */
CLB_INLINE void block(const uint8_t *w, const float *x, const uint32_t R, const int format, float *y, size_t ldy) {
    const size_t step = (format == CLB_FMT_f32 ? 4 : 2) * (size_t)CLB_PANEL; /* bytes per k */
    __m256 sum[TILE][2];
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (uint32_t k = 0; k < CLB_BLOCK; k += 2) {
        _mm_prefetch((const char *)w + k * step + AHEAD, _MM_HINT_T0);
        CLB_UNROLL
        for (uint32_t j = k; j < k + 2; j++) {
            __m256 lo = weights(w, j, 0, format), hi = weights(w, j, 1, format);
            CLB_UNROLL
            for (uint32_t r = 0; r < R; r++) {
                __m256 v = _mm256_broadcast_ss(x + r * CLB_BLOCK + j);
                sum[r][0] = _mm256_fmadd_ps(lo, v, sum[r][0]);
                sum[r][1] = _mm256_fmadd_ps(hi, v, sum[r][1]);
            }
        }
    }
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++)
        CLB_UNROLL
        for (uint32_t h = 0; h < 2; h++) {
            float *at = y + r * ldy + 8 * h;
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), sum[r][h]));
        }
}

/* y[r][16] += blocks [0, n), one after another; x: float [n][stride] at the tile's first row */
CLB_INLINE void tile(const uint8_t *w, uint32_t n, const float *x, size_t stride, const uint32_t R, const int format,
                     float *y, size_t ldy) {
    const size_t bytes = (format == CLB_FMT_f32 ? 4 : 2) * CLB_BLOCK * CLB_PANEL;
    for (; n > 0; n--, w += bytes, x += stride) block(w, x, R, format, y, ldy);
}

/* a span of blocks stays in L1 while the tiles pass over it, their sums waiting in y */
CLB_INLINE void gemm(const uint8_t *w, uint32_t nb, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y,
                     size_t ldy, const int format) {
    const size_t stride = (size_t)x->cap * CLB_BLOCK, bytes = (format == CLB_FMT_f32 ? 4 : 2) * CLB_BLOCK * CLB_PANEL;
    for (uint32_t r = 0; r < rows; r++) memset(y + r * ldy, 0, CLB_PANEL * sizeof *y);
    for (uint32_t b = 0; b < nb; b += SPAN, w += SPAN * bytes) {
        const float *q = (const float *)x->q + ((size_t)b * x->cap + row0) * CLB_BLOCK;
        uint32_t n = nb - b < SPAN ? nb - b : SPAN, t = 0;
        for (uint32_t r = 0; r < rows; r += t) {
            const float *qr = q + (size_t)r * CLB_BLOCK;
            float *yr = y + r * ldy;
            t = tile_rows(rows - r, TILE);
            switch (t) {
            case 1: tile(w, n, qr, stride, 1, format, yr, ldy); break;
            case 2: tile(w, n, qr, stride, 2, format, yr, ldy); break;
            case 3: tile(w, n, qr, stride, 3, format, yr, ldy); break;
            case 4: tile(w, n, qr, stride, 4, format, yr, ldy); break;
            case 5: tile(w, n, qr, stride, 5, format, yr, ldy); break;
            default: tile(w, n, qr, stride, 6, format, yr, ldy); break;
            }
        }
    }
}

#define GEMM(name)                                                                                            \
    void clb_avx2_gemm_##name(const clb_panels_t *w, const clb_act_t *x, uint32_t row0, uint32_t rows,          \
                              float *y, size_t ldy) {                                                         \
        for (uint32_t p = 0; p < w->n; p++)                                                                   \
            gemm(clb_panel_at(w, p), w->nb, x, row0, rows, y + p * CLB_PANEL, ldy, CLB_FMT_##name);            \
    }
GEMM(f32)
GEMM(f16)
GEMM(bf16)
#else
typedef int clb_avx2_gemm_f_not_x86;
#endif
