/* AVX-512 GEMM of one panel in f32, f16 and bf16: the 16 lanes of a zmm are the panel's output rows: a chain of fma
 * over the k of a block with the activation broadcast from memory, blocks added in order. One tile function per height
 * up to 16 activation rows. */
#if defined(__x86_64__)
#include "avx512.h"
#include "vec.h"

enum { TILE = 16, SPAN = 8, AHEAD = 2048 }; /* rows; blocks; bytes of prefetch distance */

CLB_INLINE __m512 weights(const uint8_t *p, const int format) { /* 16 weights of one k */
    if (format == CLB_FMT_f32) return _mm512_loadu_ps(p);
    if (format == CLB_FMT_f16) return load_half16(p);
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

/* y[r][16] += blocks [0, n), one after another, for r in [0, R); x: float [n][stride] at the tile's first row */
CLB_INLINE void tile(const uint8_t *w, const int format, uint32_t n, const float *x, size_t stride, const uint32_t R,
                     float *y, size_t ldy) {
    const size_t step = (format == CLB_FMT_f32 ? 4 : 2) * (size_t)CLB_PANEL; /* bytes per k */
    for (; n > 0; n--, x += stride) {
        __m512 sum[TILE];
        CLB_UNROLL
        for (uint32_t r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
        for (uint32_t k = 0; k < CLB_BLOCK; k += 2, w += 2 * step) {
            _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            if (format == CLB_FMT_f32) _mm_prefetch((const char *)w + AHEAD + 64, _MM_HINT_T0);
            CLB_UNROLL
            for (uint32_t j = 0; j < 2; j++) {
                const __m512 v = weights(w + j * step, format);
                CLB_UNROLL
                for (uint32_t r = 0; r < R; r++)
                    sum[r] = _mm512_fmadd_ps(v, _mm512_set1_ps(x[r * CLB_BLOCK + k + j]), sum[r]);
            }
        }
        CLB_UNROLL
        for (uint32_t r = 0; r < R; r++)
            _mm512_storeu_ps(y + r * ldy, _mm512_add_ps(_mm512_loadu_ps(y + r * ldy), sum[r]));
    }
}

typedef void tile_fn(const uint8_t *w, uint32_t n, const float *x, size_t stride, float *y, size_t ldy);
#define HEIGHTS(X, f) X(f, 1) X(f, 2) X(f, 3) X(f, 4) X(f, 5) X(f, 6) X(f, 7) X(f, 8) \
    X(f, 9) X(f, 10) X(f, 11) X(f, 12) X(f, 13) X(f, 14) X(f, 15) X(f, 16)
#define TILE_FN(f, R)                                                                                       \
    static void tile_##f##_##R(const uint8_t *w, uint32_t n, const float *x, size_t stride, float *y, size_t ldy) { \
        tile(w, CLB_FMT_##f, n, x, stride, R, y, ldy);                                                      \
    }
#define TILE_NAME(f, R) tile_##f##_##R,

/* a span of blocks stays in L1 while the tiles, of even height, pass over it, their sums waiting in y */
CLB_INLINE void gemm(tile_fn *const *tiles, size_t bytes, const uint8_t *w, uint32_t nb, const clb_act_t *x,
                     uint32_t row0, uint32_t rows, float *y, size_t ldy) {
    for (uint32_t r = 0; r < rows; r++) _mm512_storeu_ps(y + r * ldy, _mm512_setzero_ps());
    for (uint32_t b = 0; b < nb; b += SPAN, w += SPAN * bytes) {
        const float *q = (const float *)x->q + ((size_t)b * x->cap + row0) * CLB_BLOCK;
        uint32_t n = nb - b < SPAN ? nb - b : SPAN, t = 0;
        for (uint32_t r = 0; r < rows; r += t) {
            t = tile_rows(rows - r, TILE);
            tiles[t - 1](w, n, q + (size_t)r * CLB_BLOCK, (size_t)x->cap * CLB_BLOCK, y + r * ldy, ldy);
        }
    }
}

#define GEMM(f, bytes)                                                                                        \
    HEIGHTS(TILE_FN, f)                                                                                       \
    static tile_fn *const f##_tiles[TILE] = {HEIGHTS(TILE_NAME, f)}; /* by height - 1 */                      \
    void clb_avx512_gemm_##f(const clb_panels_t *w, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y, \
                             size_t ldy) {                                                                    \
        for (uint32_t p = 0; p < w->n; p++)                                                                   \
            gemm(f##_tiles, bytes, clb_panel_at(w, p), w->nb, x, row0, rows, y + p * CLB_PANEL, ldy);          \
    }
GEMM(f32, 2048)
GEMM(f16, 1024)
GEMM(bf16, 1024)
#else
typedef int clb_avx512_gemm_f_not_x86;
#endif
