/* AVX-512 attention kernels, each in two forms with the same bits.
 *
 * Few queries (a decode step): K and V are converted in passing and shared by the heads of a group. Scores: one zmm per
 * (query, key) holds the 16 lanes; sixteen keys are reduced at once.
 * Many queries (a prefill tile): a block of keys is transposed once, so that SIMD lanes are keys, the 16 lanes of a
 * score are 16 registers, and the tree is plain additions; a block of values is converted once. */
#if defined(__x86_64__)
#include "avx512.h"
#include "vec.h"

enum {
    KEYS = 16,     /* keys reduced together */
    BLOCK = 32,    /* keys transposed, or values converted, together */
    SPAN = 32,     /* keys per pass over V, so that they stay in L1 */
    HEADS = 4,     /* queries that share loads of transposed keys */
    MANY = 8,      /* queries from which the second form pays */
    WIDEST = 256   /* head size up to which its block lies on the stack */
};

CLB_INLINE size_t row_bytes_of(uint32_t hdp, int wide) { return (size_t)hdp * (wide ? 4 : 2); }

/* ---- scores, few queries --------------------------------------------------------------------------------------- */

/* sixteen clb_tree16 at once: result i is that of t[i] */
CLB_INLINE __m512 tree16x16(const __m512 *t) {
    __m512 w[4], c[2];
    CLB_UNROLL
    for (int e = 0; e < 4; e++) {
        __m512 u = _mm512_add_ps(_mm512_shuffle_f32x4(t[e], t[4 + e], 0x44),
                                 _mm512_shuffle_f32x4(t[e], t[4 + e], 0xee)); /* l + l+8 of trees e, 4 + e */
        __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(t[8 + e], t[12 + e], 0x44),
                                 _mm512_shuffle_f32x4(t[8 + e], t[12 + e], 0xee));
        w[e] = _mm512_add_ps(_mm512_shuffle_f32x4(u, v, 0x88), _mm512_shuffle_f32x4(u, v, 0xdd)); /* l + l+4 */
    }
    CLB_UNROLL
    for (int i = 0; i < 2; i++) { /* l + l+2 */
        __m512d u = _mm512_castps_pd(w[2 * i]), v = _mm512_castps_pd(w[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(u, v)), _mm512_castpd_ps(_mm512_unpackhi_pd(u, v)));
    }
    return _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
}

/* lanes[h * KEYS + j] = the 16 lanes of q[h] . k[j], for H queries and J keys */
CLB_INLINE void score_tile(const float *q, const uint8_t *k, uint32_t hdp, const int wide, const int H, const int J,
                           __m512 *lanes) {
    const size_t row_bytes = row_bytes_of(hdp, wide);
    __m512 acc[4][8];
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int j = 0; j < J; j++) acc[h][j] = _mm512_setzero_ps();
    for (uint32_t d = 0; d < hdp; d += 16) {
        __m512 v[4];
        CLB_UNROLL
        for (int h = 0; h < H; h++) v[h] = _mm512_loadu_ps(q + (size_t)h * hdp + d);
        CLB_UNROLL
        for (int j = 0; j < J; j++) {
            __m512 key = load_kv16(k + (size_t)j * row_bytes, d, wide);
            CLB_UNROLL
            for (int h = 0; h < H; h++) acc[h][j] = _mm512_fmadd_ps(v[h], key, acc[h][j]);
        }
    }
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int j = 0; j < J; j++) lanes[h * KEYS + j] = acc[h][j];
}

/* H queries against n keys */
CLB_INLINE void score_queries(const float *q, const uint8_t *k, uint32_t n, uint32_t hdp, const int wide, const int H,
                              float *scores, size_t ld) {
    const int J = H == 4 ? 4 : 8;
    const size_t row_bytes = row_bytes_of(hdp, wide);
    __m512 lanes[4 * KEYS];
    for (uint32_t from = 0; from < n; from += KEYS, k += KEYS * row_bytes) {
        uint32_t keys = n - from < KEYS ? n - from : KEYS, j = 0;
        if (keys < KEYS) memset(lanes, 0, sizeof lanes);
        for (; j + (uint32_t)J <= keys; j += (uint32_t)J)
            score_tile(q, k + j * row_bytes, hdp, wide, H, J, lanes + j);
        for (; j < keys; j++) score_tile(q, k + j * row_bytes, hdp, wide, H, 1, lanes + j);
        for (int h = 0; h < H; h++) store16_n(scores + (size_t)h * ld + from, keys, tree16x16(lanes + h * KEYS));
    }
}

CLB_INLINE void score_few(const float *q, uint32_t nq, const uint8_t *k, uint32_t n, uint32_t hdp, float *out,
                          size_t ld, const int wide) {
    for (uint32_t h = 0, height; h < nq; h += height) {
        height = tile_rows(nq - h, 4);
        const float *qh = q + (size_t)h * hdp;
        float *to = out + h * ld;
        switch (height) {
        case 4: score_queries(qh, k, n, hdp, wide, 4, to, ld); break;
        case 3: score_queries(qh, k, n, hdp, wide, 3, to, ld); break;
        case 2: score_queries(qh, k, n, hdp, wide, 2, to, ld); break;
        default: score_queries(qh, k, n, hdp, wide, 1, to, ld);
        }
    }
}

/* ---- scores, many queries -------------------------------------------------------------------------------------- */

/* kt[d * BLOCK + j] = element d of row j, for 16 rows (those beyond `rows` repeat the last) and 16 elements */
CLB_INLINE void transpose(const uint8_t *k, uint32_t rows, uint32_t hdp, uint32_t d, const int wide, float *kt) {
    __m512 a[16], b[16];
    CLB_UNROLL
    for (uint32_t j = 0; j < 16; j++)
        a[j] = load_kv16(k + (j < rows ? j : rows - 1) * row_bytes_of(hdp, wide), d, wide);
    CLB_UNROLL
    for (int j = 0; j < 16; j += 2) {
        b[j] = _mm512_unpacklo_ps(a[j], a[j + 1]);
        b[j + 1] = _mm512_unpackhi_ps(a[j], a[j + 1]);
    }
    CLB_UNROLL
    for (int j = 0; j < 16; j += 4)
        CLB_UNROLL
        for (int i = 0; i < 2; i++) { /* lane L of a[j + e]: element 4 L + e of rows j .. j + 3 */
            __m512d u = _mm512_castps_pd(b[j + i]), v = _mm512_castps_pd(b[j + 2 + i]);
            a[j + 2 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(u, v));
            a[j + 2 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(u, v));
        }
    CLB_UNROLL
    for (int e = 0; e < 4; e++) {
        __m512 lo = _mm512_shuffle_f32x4(a[e], a[4 + e], 0x88), hi = _mm512_shuffle_f32x4(a[8 + e], a[12 + e], 0x88);
        _mm512_storeu_ps(kt + (size_t)e * BLOCK, _mm512_shuffle_f32x4(lo, hi, 0x88));
        _mm512_storeu_ps(kt + (size_t)(8 + e) * BLOCK, _mm512_shuffle_f32x4(lo, hi, 0xdd));
        lo = _mm512_shuffle_f32x4(a[e], a[4 + e], 0xdd), hi = _mm512_shuffle_f32x4(a[8 + e], a[12 + e], 0xdd);
        _mm512_storeu_ps(kt + (size_t)(4 + e) * BLOCK, _mm512_shuffle_f32x4(lo, hi, 0x88));
        _mm512_storeu_ps(kt + (size_t)(12 + e) * BLOCK, _mm512_shuffle_f32x4(lo, hi, 0xdd));
    }
}

typedef struct sums { __m512 of[HEADS][2]; } sums_t; /* of H queries against G groups of 16 keys */

CLB_INLINE sums_t plus(sums_t a, sums_t b, const int H, const int G) {
    CLB_UNROLL
    for (int r = 0; r < H; r++)
        CLB_UNROLL
        for (int g = 0; g < G; g++) a.of[r][g] = _mm512_add_ps(a.of[r][g], b.of[r][g]);
    return a;
}

/* lanes l + l+8, l = `lane`: four queries share a load of keys and two groups of keys a broadcast */
CLB_INLINE sums_t eighth(const float *q, const float *kt, uint32_t hdp, const int lane, const int H, const int G) {
    sums_t acc[2];
    CLB_UNROLL
    for (int l = 0; l < 2; l++)
        CLB_UNROLL
        for (int r = 0; r < H; r++)
            CLB_UNROLL
            for (int g = 0; g < G; g++) acc[l].of[r][g] = _mm512_setzero_ps();
    q += lane, kt += lane * BLOCK;
    for (uint32_t d = 0; d < hdp; d += 16, q += 16, kt += 16 * BLOCK)
        CLB_UNROLL
        for (int l = 0; l < 2; l++) {
            __m512 key[2];
            CLB_UNROLL
            for (int g = 0; g < G; g++) key[g] = _mm512_loadu_ps(kt + 8 * l * BLOCK + 16 * g);
            CLB_UNROLL
            for (int r = 0; r < H; r++) {
                __m512 v = _mm512_set1_ps(q[(size_t)r * hdp + 8 * (size_t)l]);
                CLB_UNROLL
                for (int g = 0; g < G; g++) acc[l].of[r][g] = _mm512_fmadd_ps(v, key[g], acc[l].of[r][g]);
            }
        }
    return plus(acc[0], acc[1], H, G);
}

/* H queries against a transposed block of `keys` keys, at most 16 G */
CLB_INLINE void score_block(const float *q, const float *kt, uint32_t keys, uint32_t hdp, const int H, const int G,
                            float *scores, size_t ld) {
    sums_t half[2];
    CLB_UNROLL
    for (int i = 0; i < 2; i++) { /* lanes i, i+2, i+4 …: l + l+4, then l + l+2 */
        sums_t a = plus(eighth(q, kt, hdp, i, H, G), eighth(q, kt, hdp, i + 4, H, G), H, G);
        sums_t b = plus(eighth(q, kt, hdp, i + 2, H, G), eighth(q, kt, hdp, i + 6, H, G), H, G);
        half[i] = plus(a, b, H, G);
    }
    sums_t all = plus(half[0], half[1], H, G);
    CLB_UNROLL
    for (int r = 0; r < H; r++)
        CLB_UNROLL
        for (int g = 0; g < G; g++)
            store16_n(scores + (size_t)r * ld + 16 * g, keys - 16 * (uint32_t)g, all.of[r][g]);
}

/* nq queries against a transposed block */
CLB_INLINE void score_blocks(const float *q, uint32_t nq, const float *kt, uint32_t keys, uint32_t hdp, const int G,
                             float *scores, size_t ld) {
    for (; nq >= HEADS; nq -= HEADS, q += (size_t)HEADS * hdp, scores += HEADS * ld)
        score_block(q, kt, keys, hdp, HEADS, G, scores, ld);
    if (nq >= 2) {
        score_block(q, kt, keys, hdp, 2, G, scores, ld);
        nq -= 2, q += (size_t)2 * hdp, scores += 2 * ld;
    }
    if (nq) score_block(q, kt, keys, hdp, 1, G, scores, ld);
}

CLB_INLINE void score_many(const float *q, uint32_t nq, const uint8_t *k, uint32_t n, uint32_t hdp, float *out,
                           size_t ld, const int wide) {
    _Alignas(64) float kt[WIDEST * BLOCK];
    for (uint32_t j = 0; j < n; j += BLOCK, k += BLOCK * row_bytes_of(hdp, wide)) {
        uint32_t keys = n - j < BLOCK ? n - j : BLOCK;
        for (uint32_t g = 0; g < keys; g += 16)
            for (uint32_t d = 0; d < hdp; d += 16)
                transpose(k + g * row_bytes_of(hdp, wide), keys - g, hdp, d, wide, kt + (size_t)d * BLOCK + g);
        if (keys > 16) score_blocks(q, nq, kt, keys, hdp, 2, out + j, ld);
        else score_blocks(q, nq, kt, keys, hdp, 1, out + j, ld);
    }
}

/* ---- values ---------------------------------------------------------------------------------------------------- */

/* acc[h][16 * D] += p[h][j] v[j] over `keys` keys in order, for H queries */
CLB_INLINE void mix_tile(const float *p, size_t ld, const uint8_t *v, uint32_t keys, uint32_t hdp, const int wide,
                         const int H, const int D, float *acc) {
    const size_t row_bytes = row_bytes_of(hdp, wide);
    __m512 a[6][4];
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int d = 0; d < D; d++) a[h][d] = _mm512_loadu_ps(acc + (size_t)h * hdp + 16 * d);
    for (uint32_t j = 0; j < keys; j++, v += row_bytes) {
        __m512 t[4];
        CLB_UNROLL
        for (int d = 0; d < D; d++) t[d] = load_kv16(v, (size_t)d * 16, wide);
        CLB_UNROLL
        for (int h = 0; h < H; h++) {
            __m512 w = _mm512_set1_ps(p[(size_t)h * ld + j]);
            CLB_UNROLL
            for (int d = 0; d < D; d++) a[h][d] = _mm512_fmadd_ps(w, t[d], a[h][d]);
        }
    }
    CLB_UNROLL
    for (int h = 0; h < H; h++)
        CLB_UNROLL
        for (int d = 0; d < D; d++) _mm512_storeu_ps(acc + (size_t)h * hdp + 16 * d, a[h][d]);
}

/* all of hdp for H queries, 64 elements at a time, then 16 */
CLB_INLINE void mix_queries(const float *p, size_t ld, const uint8_t *v, uint32_t keys, uint32_t hdp, const int wide,
                            const int H, float *acc) {
    const uint32_t size = wide ? 4 : 2;
    uint32_t d = 0;
    for (; d + 64 <= hdp; d += 64) mix_tile(p, ld, v + (size_t)d * size, keys, hdp, wide, H, 4, acc + d);
    for (; d < hdp; d += 16) mix_tile(p, ld, v + (size_t)d * size, keys, hdp, wide, H, 1, acc + d);
}

CLB_INLINE void mix(const float *p, size_t ld, uint32_t nq, const uint8_t *v, uint32_t keys, uint32_t hdp,
                    const int wide, float *acc) {
    for (uint32_t h = 0, height; h < nq; h += height) {
        height = tile_rows(nq - h, 6);
        const float *ph = p + h * ld;
        float *to = acc + (size_t)h * hdp;
        switch (height) {
        case 6: mix_queries(ph, ld, v, keys, hdp, wide, 6, to); break;
        case 5: mix_queries(ph, ld, v, keys, hdp, wide, 5, to); break;
        case 4: mix_queries(ph, ld, v, keys, hdp, wide, 4, to); break;
        case 3: mix_queries(ph, ld, v, keys, hdp, wide, 3, to); break;
        case 2: mix_queries(ph, ld, v, keys, hdp, wide, 2, to); break;
        default: mix_queries(ph, ld, v, keys, hdp, wide, 1, to);
        }
    }
}

/* wide[0, elements) of f16 values; elements is a multiple of 16 */
CLB_INLINE void widen(const uint8_t *v, size_t elements, float *wide) {
    for (size_t i = 0; i < elements; i += 16) _mm512_storeu_ps(wide + i, load_kv16(v, i, 0));
}

CLB_INLINE void accumulate(const float *p, size_t ld, uint32_t nq, const uint8_t *v, uint32_t n, uint32_t hdp,
                           float *acc, const int wide) {
    _Alignas(64) float block[SPAN * WIDEST];
    for (uint32_t j = 0; j < n; j += SPAN, v += SPAN * row_bytes_of(hdp, wide)) {
        uint32_t keys = n - j < SPAN ? n - j : SPAN;
        if (wide || nq < MANY || hdp > WIDEST) {
            mix(p + j, ld, nq, v, keys, hdp, wide, acc);
        } else {
            widen(v, (size_t)keys * hdp, block);
            mix(p + j, ld, nq, (const uint8_t *)block, keys, hdp, 1, acc);
        }
    }
}

#define ATTENTION(name, wide)                                                                                   \
    void clb_avx512_attn_scores_##name(const float *q, uint32_t nq, const void *k, uint32_t n, uint32_t hdp,    \
                                       float *out, size_t ld) {                                                 \
        if (nq < MANY || hdp > WIDEST) score_few(q, nq, k, n, hdp, out, ld, wide);                              \
        else score_many(q, nq, k, n, hdp, out, ld, wide);                                                       \
    }                                                                                                           \
    void clb_avx512_attn_accumulate_##name(const float *p, size_t ld, uint32_t nq, const void *v, uint32_t n,   \
                                           uint32_t hdp, float *acc) {                                          \
        accumulate(p, ld, nq, v, n, hdp, acc, wide);                                                            \
    }
ATTENTION(f16, 0)
ATTENTION(f32, 1)
#else
typedef int clb_avx512_attention_not_x86;
#endif
