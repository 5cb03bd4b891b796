/* AVX-512 VNNI GEMM of q8 and q4: a zmm holds 4 k of all 16 output rows of a panel, vpdpbusd takes u8 weights and an s8
 * broadcast of 4 activations. The int32 sum starts at -offset * sum(x), so stored unsigned weights give the signed dot
 * exactly.
 *
 * Few rows, one panel: a tile of up to 16 activation rows keeps float sums in registers beside 8 zmm of weights. Its
 * rows go in groups whose integer sums advance together, since one row's 8 dependent vpdpbusd take 40 cycles and the
 * scheduler sees only a few rows ahead. One tile function per height, chosen from a table: no cliff.
 * Many rows, two panels: each block is unpacked once for all rows and each broadcast serves both panels, which pays for
 * float sums in L1; with one panel those would need eleven loads for eleven operations.
 *
 * The bound: a row of a block costs 8 vpdpbusd, a conversion, a product of scales and an fma, all on the two 512-bit
 * ports, so at most 8/11 = 73 % of the vpdpbusd rate. */
#if defined(__x86_64__)
#include "avx512.h"
#include "vec.h"

enum { TILE = 16, FEW = 5, SPAN = 32 };       /* rows; rows; blocks */
enum { NEAR = 1152, FAR = 12288 };           /* bytes ahead of which weights are asked for into L1, into L2 */
enum { PAIRED = 20, MANY = 64, GROUP = 4 }; /* rows from which two panels go together, at least 6; most of a pass */

CLB_INLINE void ask_ahead(const uint8_t *w, const int format) {
    const size_t bytes = format == CLB_FMT_q4 ? 288 : 544;
    CLB_UNROLL
    for (size_t i = 0; i < bytes; i += 64) {
        _mm_prefetch((const char *)w + NEAR + i, _MM_HINT_T0);
        _mm_prefetch((const char *)w + FAR + i, _MM_HINT_T1);
    }
}

/* the block's weights as u8, group g = k 4g .. 4g + 3, and the 16 scales */
CLB_INLINE __m512 load_block(const uint8_t *w, const int format, __m512i g[8]) {
    if (format == CLB_FMT_q8) {
        CLB_UNROLL
        for (int i = 0; i < 8; i++) g[i] = _mm512_loadu_si512(w + 64 * i);
        return load_half16(w + 512);
    }
    const __m512i low = _mm512_set1_epi8(15);
    CLB_UNROLL
    for (int i = 0; i < 4; i++) {
        __m512i v = _mm512_loadu_si512(w + 64 * i);
        g[2 * i] = _mm512_and_si512(v, low);
        g[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
    }
    return load_half16(w + 256);
}

/* sum += dot of 4 u8 weights and the 4 s8 at q, per lane. GCC 12 loads the broadcast apart, one more instruction for
 * each of these; the operand form halves what the front end has to deliver. */
CLB_INLINE __m512i dot4(__m512i sum, __m512i weights, const int8_t *q) {
#if defined(CLB_EMULATE_AVX512)
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
#else
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const int8_t(*)[4])q));
    return sum;
#endif
}

/* start[r] = -offset * s[r] for the first min(n, TILE) rows; zeros after them */
CLB_INLINE void starts(const int32_t *s, uint32_t n, const int format, int32_t *start) {
    __m512i v = n < TILE ? _mm512_maskz_loadu_epi32(mask16(n), s) : _mm512_loadu_si512(s);
    v = _mm512_slli_epi32(v, format == CLB_FMT_q4 ? 3 : 7); /* 8 or 128 times */
    _mm512_store_si512(start, _mm512_sub_epi32(_mm512_setzero_si512(), v));
}

/* the same of R rows for n blocks */
CLB_INLINE void starts_of(const int32_t *s, size_t cap, uint32_t n, const uint32_t R, const int format,
                          int32_t *start) {
    for (uint32_t b = 0; b < n; b++, s += cap, start += TILE) {
        if (R > FEW) starts(s, R, format, start);
        else
            for (uint32_t r = 0; r < R; r++) start[r] = -(s[r] * (format == CLB_FMT_q4 ? 8 : 128));
    }
}

/* acc[r] += one block, n rows */
CLB_INLINE void rows_block(const __m512i g[8], const __m512 scale, const int8_t *q, const float *d,
                           const int32_t *start, const uint32_t n, __m512 *acc) {
    __m512i sum[TILE];
    CLB_UNROLL
    for (uint32_t r = 0; r < n; r++) sum[r] = _mm512_set1_epi32(start[r]);
    CLB_UNROLL
    for (int i = 0; i < 8; i++) {
        CLB_UNROLL
        for (uint32_t r = 0; r < n; r++) sum[r] = dot4(sum[r], g[i], q + CLB_BLOCK * r + 4 * i);
    }
    CLB_UNROLL
    for (uint32_t r = 0; r < n; r++)
        acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_mul_ps(scale, _mm512_set1_ps(d[r])), acc[r]);
}

/* y[r][16] = y, or 0 before the first block, + blocks [b, end) for r in [0, R); w is block b, row the tile's first */
CLB_INLINE void tile(const uint8_t *w, const int format, uint32_t b, uint32_t end, const clb_act_t *x, uint32_t row,
                     const uint32_t R, float *y, size_t ldy) {
    const size_t bytes = format == CLB_FMT_q4 ? 288 : 544;
    const uint32_t most = R > 12 ? 4 : R > 8 ? 6 : 8, groups = (R + most - 1) / most; /* what registers are left for */
    /* Starts of all blocks at once, so that no dot waits for its own to come back from the store: pays from 6 to 15
     * rows; fewer have too little work to share it, a full tile enough to hide it. */
    const int ahead = R > FEW && R < TILE;
    _Alignas(64) int32_t all[SPAN * TILE], *start = all;
    __m512 acc[TILE];
    if (ahead) starts_of(x->s + (size_t)b * x->cap + row, x->cap, end - b, R, format, all);
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) acc[r] = b ? _mm512_loadu_ps(y + r * ldy) : _mm512_setzero_ps();
    for (; b < end; b++, w += bytes) {
        const size_t at = (size_t)b * x->cap + row;
        const int8_t *q = (const int8_t *)x->q + at * CLB_BLOCK;
        const float *d = x->d + at;
        __asm__("" : "+r"(q), "+r"(d)); /* plain addresses: an indexed one takes two slots of the front end */
        __m512i g[8];
        ask_ahead(w, format);
        const __m512 scale = load_block(w, format, g);
        if (!ahead) {
            starts_of(x->s + at, x->cap, 1, R, format, start);
            __asm__("" : "+m"(*(int32_t(*)[TILE])all)); /* broadcast from memory, not by shuffles on a dot's port */
        }
        CLB_UNROLL
        for (uint32_t i = 0; i < groups; i++) { /* of even size */
            const uint32_t r = R * i / groups, n = R * (i + 1) / groups - r;
            rows_block(g, scale, q + CLB_BLOCK * r, d + r, start + r, n, acc + r);
        }
        if (ahead) start += TILE;
    }
    CLB_UNROLL
    for (uint32_t r = 0; r < R; r++) _mm512_storeu_ps(y + r * ldy, acc[r]);
}

typedef void tile_fn(const uint8_t *w, uint32_t b, uint32_t end, const clb_act_t *x, uint32_t row, float *y,
                     size_t ldy);
#define HEIGHTS(X, f) X(f, 1) X(f, 2) X(f, 3) X(f, 4) X(f, 5) X(f, 6) X(f, 7) X(f, 8) \
    X(f, 9) X(f, 10) X(f, 11) X(f, 12) X(f, 13) X(f, 14) X(f, 15) X(f, 16)
#define TILE_FN(f, R)                                                                                                 \
    static void tile_##f##_##R(const uint8_t *w, uint32_t b, uint32_t end, const clb_act_t *x, uint32_t row, float *y, \
                               size_t ldy) {                                                                          \
        tile(w, CLB_FMT_##f, b, end, x, row, R, y, ldy);                                                              \
    }
#define TILE_NAME(f, R) tile_##f##_##R,

/* ---- one panel ------------------------------------------------------------------------------------------------- */

/* a span of blocks stays in L1 while the tiles, of even height, pass over it */
CLB_INLINE void one_panel(tile_fn *const *tiles, size_t bytes, const uint8_t *w, uint32_t nb, const clb_act_t *x,
                          uint32_t row0, uint32_t rows, float *y, size_t ldy) {
    for (uint32_t b = 0; b < nb; b += SPAN, w += SPAN * bytes) {
        uint32_t end = nb - b < SPAN ? nb : b + SPAN, n = 0;
        for (uint32_t r = 0; r < rows; r += n) {
            n = tile_rows(rows - r, TILE);
            tiles[n - 1](w, b, end, x, row0 + r, y + r * ldy, ldy);
        }
    }
}

/* ---- two panels ------------------------------------------------------------------------------------------------ */

/* acc[r][32] = acc, or 0 in the first block, + one block of two panels for n rows, whose broadcasts serve both */
CLB_INLINE void pair_rows(__m512i g[2][8], const __m512 scale[2], const int8_t *q, const float *d,
                          const int32_t *start, const uint32_t n, const int first, float *acc, size_t ld) {
    __m512i sum[GROUP][2];
    CLB_UNROLL
    for (uint32_t r = 0; r < n; r++) sum[r][0] = sum[r][1] = _mm512_set1_epi32(start[r]);
    CLB_UNROLL
    for (int i = 0; i < 8; i++) {
        CLB_UNROLL
        for (uint32_t r = 0; r < n; r++) {
            int32_t four;
            memcpy(&four, q + CLB_BLOCK * r + 4 * i, 4);
            const __m512i x = _mm512_set1_epi32(four);
            CLB_UNROLL
            for (int p = 0; p < 2; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], g[p][i], x);
        }
    }
    CLB_UNROLL
    for (uint32_t r = 0; r < n; r++) {
        const __m512 dr = _mm512_set1_ps(d[r]);
        CLB_UNROLL
        for (int p = 0; p < 2; p++) {
            float *a = acc + r * ld + p * CLB_PANEL;
            const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(a);
            _mm512_storeu_ps(a, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), _mm512_mul_ps(scale[p], dr), before));
        }
    }
}

/* one block for `rows` rows, in groups of GROUP and then one smaller; rows >= 16 */
CLB_INLINE void pair_block(const uint8_t *at, size_t stride, const int format, const clb_act_t *x, size_t cell,
                           uint32_t rows, const int first, float *acc, size_t ld) {
    const uint32_t full = rows - (rows * (GROUP - 1)) % GROUP * (GROUP - 1); /* rows in groups of GROUP */
    const int8_t *q = (const int8_t *)x->q + cell * CLB_BLOCK;
    const float *d = x->d + cell;
    _Alignas(64) int32_t start[MANY];
    __m512i g[2][8];
    __m512 scale[2];
    CLB_UNROLL
    for (uint32_t p = 0; p < 2; p++) {
        ask_ahead(at + p * stride, format);
        scale[p] = load_block(at + p * stride, format, g[p]);
    }
    uint32_t r = 0;
    for (; r < rows; r += TILE) starts(x->s + cell + r, rows - r, format, start + r);
    for (r = 0; r < full; r += GROUP, acc += GROUP * ld)
        pair_rows(g, scale, q + CLB_BLOCK * r, d + r, start + r, GROUP, first, acc, ld);
    for (; r < rows; r += GROUP - 1, acc += (GROUP - 1) * ld)
        pair_rows(g, scale, q + CLB_BLOCK * r, d + r, start + r, GROUP - 1, first, acc, ld);
}

/* The float sums of up to MANY rows stay in L1 while the blocks, each unpacked once, pass: in y if its rows are
 * together, else apart, since rows at a power-of-two stride would fall into few sets. */
CLB_INLINE void two_panels(const clb_panels_t *w, const uint8_t *at, const int format, const clb_act_t *x,
                           uint32_t row0, uint32_t rows, float *y, size_t ldy) {
    const size_t bytes = format == CLB_FMT_q4 ? 288 : 544;
    _Alignas(64) float apart[MANY * 32];
    for (uint32_t r = 0, n; r < rows; r += n, y += n * ldy) {
        n = tile_rows(rows - r, MANY);
        float *acc = ldy == 32 ? y : apart;
        pair_block(at, w->stride, format, x, row0 + r, n, 1, acc, 32);
        for (uint32_t b = 1; b < w->nb; b++)
            pair_block(at + b * bytes, w->stride, format, x, (size_t)b * x->cap + row0 + r, n, 0, acc, 32);
        for (uint32_t i = 0; acc != y && i < n; i++) memcpy(y + i * ldy, acc + i * 32, 32 * sizeof *y);
    }
}

#define GEMM(f, bytes)                                                                                                \
    HEIGHTS(TILE_FN, f)                                                                                               \
    static tile_fn *const f##_tiles[TILE] = {HEIGHTS(TILE_NAME, f)}; /* by height - 1 */                              \
    void clb_avx512_gemm_##f(const clb_panels_t *w, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y,        \
                             size_t ldy) {                                                                            \
        uint32_t p = 0;                                                                                               \
        for (; rows >= PAIRED && p + 2 <= w->n; p += 2)                                                               \
            two_panels(w, clb_panel_at(w, p), CLB_FMT_##f, x, row0, rows, y + p * CLB_PANEL, ldy);                     \
        for (; p < w->n; p++)                                                                                         \
            one_panel(f##_tiles, bytes, clb_panel_at(w, p), w->nb, x, row0, rows, y + p * CLB_PANEL, ldy);             \
    }
GEMM(q8, 544)
GEMM(q4, 288)
#else
typedef int clb_avx512_gemm_q_not_x86;
#endif
