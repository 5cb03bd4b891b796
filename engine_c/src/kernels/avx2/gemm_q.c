/* AVX2 GEMM of one panel in q8 and q4. Each of 16 lanes is an output row; a block gives an exact integer dot and one
 * fma, blocks in order, so every tile shape gives the same bits.
 *
 * q4: u4 x s8 by vpmaddubsw: a pair is at most 2 * 15 * 127 = 3810, all 8 of a block fit 16 bits, one vpmaddwd per block.
 * q8: vpmaddubsw(|w|, sign(x, w)): a pair is at most 2 * 128 * 127 = 32512, widened by vpmaddwd at once.
 *
 * Many rows: a span of blocks is unpacked once into L1 and every tile of 4 rows reads it. The float accumulators live
 * in y: one load and store per block costs less than spilling integer sums. */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

enum { TILE = 4, SPAN = 8, UNPACK_ROWS = 12, AHEAD = 2304 };

typedef struct clb_wide { /* one block, unpacked: a quarter or half of it per load is gone */
    int8_t w[8][CLB_PANEL][4];  /* q4: u4; q8: w */
    uint8_t a[8][CLB_PANEL][4]; /* q8: |w| */
    float scale[CLB_PANEL];
} wide_t;

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

CLB_INLINE void load_scales(const uint8_t *block, size_t ints, const int unpacked, __m256 scale[2]) {
    const wide_t *u = (const void *)block;
    CLB_UNROLL
    for (uint32_t h = 0; h < 2; h++)
        scale[h] = unpacked ? _mm256_loadu_ps(u->scale + 8 * h) : load_half8(block + ints + 16 * h);
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

/* one block, R rows; block is packed (unpacked = 0) or a wide_t */
CLB_INLINE void q4_block(const uint8_t *block, const int unpacked, rows_t x, const uint32_t R, float *y, size_t ldy) {
    const wide_t *u = (const void *)block;
    __m256i sum[TILE][2];
    CLB_UNROLL
    for (uint32_t g = 0; g < 4; g++) {
        __m256i w[2][2];
        if (unpacked)
            for (uint32_t h = 0; h < 4; h++) w[h >> 1][h & 1] = load(u->w[2 * g + (h >> 1)][8 * (h & 1)]);
        else q4_group(block, g, w);
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
    load_scales(block, 256, unpacked, scale);
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) {
        const __m256i offset = _mm256_slli_epi32(broadcast4(x.s + r), 3); /* 8 * sum of x */
        const __m256 d = _mm256_broadcast_ss(x.d + r);
        CLB_UNROLL
        for (uint32_t h = 0; h < 2; h++)
            add_block(y + r * ldy + 8 * h, _mm256_sub_epi32(_mm256_madd_epi16(sum[r][h], one), offset), scale[h], d);
    }
}

CLB_INLINE void q8_block(const uint8_t *block, const int unpacked, rows_t x, const uint32_t R, float *y, size_t ldy) {
    const wide_t *u = (const void *)block;
    const __m256i one = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128);
    __m256i sum[TILE][2];
    CLB_UNROLL
    for (uint32_t g = 0; g < 8; g++) {
        __m256i w[2], a[2];
        CLB_UNROLL
        for (uint32_t h = 0; h < 2; h++) {
            w[h] = unpacked ? load(u->w[g][8 * h]) : _mm256_xor_si256(load(block + 64 * g + 32 * h), flip);
            a[h] = unpacked ? load(u->a[g][8 * h]) : _mm256_abs_epi8(w[h]);
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
    load_scales(block, 512, unpacked, scale);
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) {
        const __m256 d = _mm256_broadcast_ss(x.d + r);
        CLB_UNROLL
        for (uint32_t h = 0; h < 2; h++) add_block(y + r * ldy + 8 * h, sum[r][h], scale[h], d);
    }
}

/* blocks [0, n) of a span: one tile of R rows from `row` on */
CLB_INLINE void tile(const uint8_t *w, size_t bytes, const int unpacked, const int format, uint32_t b0, uint32_t n,
                     const clb_act_t *x, uint32_t row, const uint32_t R, float *y, size_t ldy) {
    for (uint32_t b = 0; b < n; b++, w += bytes) {
        size_t at = (size_t)(b0 + b) * x->cap + row;
        rows_t rows = {(const int8_t *)x->q + at * CLB_BLOCK, x->d + at, x->s + at};
        if (!unpacked)
            for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)w + AHEAD + i, _MM_HINT_T0);
        if (format == CLB_FMT_q4) q4_block(w, unpacked, rows, R, y, ldy);
        else q8_block(w, unpacked, rows, R, y, ldy);
    }
}

CLB_INLINE void tiles(const uint8_t *w, size_t bytes, const int unpacked, const int format, uint32_t b0, uint32_t n,
                      const clb_act_t *x, uint32_t row, uint32_t rows, float *y, size_t ldy) {
    for (; rows >= TILE; rows -= TILE, row += TILE, y += TILE * ldy)
        tile(w, bytes, unpacked, format, b0, n, x, row, TILE, y, ldy);
    switch (rows) {
    case 1: tile(w, bytes, unpacked, format, b0, n, x, row, 1, y, ldy); break;
    case 2: tile(w, bytes, unpacked, format, b0, n, x, row, 2, y, ldy); break;
    case 3: tile(w, bytes, unpacked, format, b0, n, x, row, 3, y, ldy); break;
    }
}

CLB_INLINE void unpack(const uint8_t *block, const int format, wide_t *u) {
    const __m256i flip = _mm256_set1_epi8(-128);
    const size_t ints = format == CLB_FMT_q4 ? 256 : 512;
    for (uint32_t g = 0; g < 8; g += 2) {
        __m256i w[2][2];
        if (format == CLB_FMT_q4) q4_group(block, g / 2, w);
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t k = g + (i >> 1), lane = 8 * (i & 1);
            if (format != CLB_FMT_q4) {
                w[i >> 1][i & 1] = _mm256_xor_si256(load(block + 64 * k + 4 * lane), flip);
                _mm256_store_si256((void *)u->a[k][lane], _mm256_abs_epi8(w[i >> 1][i & 1]));
            }
            _mm256_store_si256((void *)u->w[k][lane], w[i >> 1][i & 1]);
        }
    }
    for (uint32_t h = 0; h < 2; h++) _mm256_store_ps(u->scale + 8 * h, load_half8(block + ints + 16 * h));
}

CLB_INLINE void gemm(const uint8_t *w, size_t bytes, const int format, uint32_t nb, const clb_act_t *x, uint32_t row0,
                     uint32_t rows, float *y, size_t ldy) {
    for (uint32_t r = 0; r < rows; r++) memset(y + r * ldy, 0, CLB_PANEL * sizeof *y);
    if (rows < UNPACK_ROWS) {
        tiles(w, bytes, 0, format, 0, nb, x, row0, rows, y, ldy);
        return;
    }
    _Alignas(64) wide_t span[SPAN];
    for (uint32_t b = 0; b < nb; b += SPAN) {
        uint32_t n = nb - b < SPAN ? nb - b : SPAN;
        for (uint32_t i = 0; i < n; i++, w += bytes) unpack(w, format, span + i);
        tiles((const uint8_t *)span, sizeof *span, 1, format, b, n, x, row0, rows, y, ldy);
    }
}

void clb_avx2_gemm_q8(const void *panel, uint32_t nb, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y,
                      size_t ldy) {
    gemm(panel, 544, CLB_FMT_q8, nb, x, row0, rows, y, ldy);
}
void clb_avx2_gemm_q4(const void *panel, uint32_t nb, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y,
                      size_t ldy) {
    gemm(panel, 288, CLB_FMT_q4, nb, x, row0, rows, y, ldy);
}
#else
typedef int clb_avx2_gemm_q_not_x86;
#endif
