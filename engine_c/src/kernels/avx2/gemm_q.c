/* AVX2 GEMM of one panel in q8 and q4. Each of 16 lanes is an output row; a block gives an exact integer dot and one
 * fma, blocks in order, so every tile shape gives the same bits.
 *
 * q4: u4 x s8 by vpmaddubsw: a pair is at most 2 * 15 * 127 = 3810, the 8 of a block fit 16 bits, one vpmaddwd a block.
 * q8: vpmaddubsw(|w|, sign(x, w)): a pair is at most 2 * 128 * 127 = 32512, widened by vpmaddwd at once.
 *
 * The float accumulators live in y: one load and store per block costs less than spilling integer sums, and the tiles
 * of many rows can take turns on a span of blocks that stays in L1. (Unpacking such a span once for all tiles was
 * measured: +0 to 3 % on Zen 3, not taken.) */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

/* rows; blocks; bytes of prefetch distance (between 640 and 9216 no difference beyond noise was seen) */
enum { TILE = 4, SPAN = 32, AHEAD = 4608 };

typedef struct clb_rows { /* a tile's activations in one block */
    const int8_t *q; /* [rows][32] */
    const float *d;
    const int32_t *s;
} rows_t;

CLB_INLINE __m256i load(const void *p) { return _mm256_loadu_si256(p); }

/* y[r][8 * half ..] = fma(dot, scale * d[r], y) */
CLB_INLINE void add_block(float *y, __m256i dot, __m256 scale, __m256 d) {
    _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale, d), _mm256_loadu_ps(y)));
}

CLB_INLINE void load_scales(const uint8_t *p, __m256 scale[2]) {
    scale[0] = load_half8(p);
    scale[1] = load_half8(p + 16);
}

CLB_INLINE void q4_group(const uint8_t *block, uint32_t g, __m256i w[2][2]) { /* [k group of 4][half] */
    const __m256i low = _mm256_set1_epi8(15);
    CLB_UNROLL
    for (uint32_t h = 0; h < 2; h++) {
        __m256i v = load(block + 64 * g + 32 * h);
        w[0][h] = _mm256_and_si256(v, low);
        w[1][h] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
    }
}

/* one block, R rows */
CLB_INLINE void q4_block(const uint8_t *block, rows_t x, const uint32_t R, float *y, size_t ldy) {
    __m256i sum[TILE][2];
    CLB_UNROLL
    for (uint32_t g = 0; g < 4; g++) {
        __m256i w[2][2];
        q4_group(block, g, w);
        CLB_UNROLL
        for (uint32_t r = 0; r < R; r++)
            CLB_UNROLL
            for (uint32_t i = 0; i < 2; i++) {
                __m256i v = broadcast4(x.q + CLB_BLOCK * r + 8 * g + 4 * i);
                CLB_UNROLL
                for (uint32_t h = 0; h < 2; h++) {
                    __m256i p = _mm256_maddubs_epi16(w[i][h], v);
                    sum[r][h] = g + i ? _mm256_add_epi16(sum[r][h], p) : p;
                    CLB_PIN(sum[r][h]);
                }
            }
    }
    const __m256i one = _mm256_set1_epi16(1);
    __m256 scale[2];
    load_scales(block + 256, scale);
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) {
        const __m256i offset = _mm256_slli_epi32(broadcast4(x.s + r), 3); /* 8 * sum of x */
        const __m256 d = _mm256_broadcast_ss(x.d + r);
        CLB_UNROLL
        for (uint32_t h = 0; h < 2; h++)
            add_block(y + r * ldy + 8 * h, _mm256_sub_epi32(_mm256_madd_epi16(sum[r][h], one), offset), scale[h], d);
    }
}

CLB_INLINE void q8_block(const uint8_t *block, rows_t x, const uint32_t R, float *y, size_t ldy) {
    const __m256i one = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128);
    __m256i sum[TILE][2];
    CLB_UNROLL
    for (uint32_t g = 0; g < 8; g++) {
        __m256i w[2], a[2];
        CLB_UNROLL
        for (uint32_t h = 0; h < 2; h++) {
            w[h] = _mm256_xor_si256(load(block + 64 * g + 32 * h), flip);
            a[h] = _mm256_abs_epi8(w[h]);
        }
        CLB_UNROLL
        for (uint32_t r = 0; r < R; r++) {
            __m256i v = broadcast4(x.q + CLB_BLOCK * r + 4 * g);
            CLB_UNROLL
            for (uint32_t h = 0; h < 2; h++) {
                __m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(a[h], _mm256_sign_epi8(v, w[h])), one);
                sum[r][h] = g ? _mm256_add_epi32(sum[r][h], p) : p;
                CLB_PIN(sum[r][h]);
            }
        }
    }
    __m256 scale[2];
    load_scales(block + 512, scale);
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) {
        const __m256 d = _mm256_broadcast_ss(x.d + r);
        CLB_UNROLL
        for (uint32_t h = 0; h < 2; h++) add_block(y + r * ldy + 8 * h, sum[r][h], scale[h], d);
    }
}

/* blocks [b, end): one tile of R rows from `row` on; w is block b */
CLB_INLINE void tile(const uint8_t *w, const int format, uint32_t b, uint32_t end, const clb_act_t *x, uint32_t row,
                     const uint32_t R, float *y, size_t ldy) {
    const size_t bytes = format == CLB_FMT_q4 ? 288 : 544;
    for (; b < end; b++, w += bytes) {
        size_t at = (size_t)b * x->cap + row;
        rows_t rows = {(const int8_t *)x->q + at * CLB_BLOCK, x->d + at, x->s + at};
        CLB_UNROLL
        for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)w + AHEAD + i, _MM_HINT_T0);
        if (format == CLB_FMT_q4) q4_block(w, rows, R, y, ldy);
        else q8_block(w, rows, R, y, ldy);
    }
}

/* a span of blocks stays in L1 while the tiles pass over it; tiles are of even height (5 rows are 3 + 2, not 4 + 1) */
CLB_INLINE void gemm(const uint8_t *w, const int format, uint32_t nb, const clb_act_t *x, uint32_t row0, uint32_t rows,
                     float *y, size_t ldy) {
    const size_t bytes = format == CLB_FMT_q4 ? 288 : 544;
    for (uint32_t r = 0; r < rows; r++) memset(y + r * ldy, 0, CLB_PANEL * sizeof *y);
    for (uint32_t b = 0; b < nb; b += SPAN, w += SPAN * bytes) {
        uint32_t end = nb - b < SPAN ? nb : b + SPAN, n = 0;
        for (uint32_t r = 0; r < rows; r += n) {
            n = tile_rows(rows - r, TILE);
            switch (n) {
            case 1: tile(w, format, b, end, x, row0 + r, 1, y + r * ldy, ldy); break;
            case 2: tile(w, format, b, end, x, row0 + r, 2, y + r * ldy, ldy); break;
            case 3: tile(w, format, b, end, x, row0 + r, 3, y + r * ldy, ldy); break;
            default: tile(w, format, b, end, x, row0 + r, 4, y + r * ldy, ldy); break;
            }
        }
    }
}

#define GEMM(f)                                                                                               \
    void clb_avx2_gemm_##f(const clb_panels_t *w, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y,   \
                           size_t ldy) {                                                                      \
        for (uint32_t p = 0; p < w->n; p++)                                                                   \
            gemm(clb_panel_at(w, p), CLB_FMT_##f, w->nb, x, row0, rows, y + p * CLB_PANEL, ldy);               \
    }
GEMM(q8)
GEMM(q4)
#else
typedef int clb_avx2_gemm_q_not_x86;
#endif
