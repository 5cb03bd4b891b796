/* q4: blocks of 32 k with an f16 scale per row; u4 = w + 8. As GGUF's Q4_0 the scale is the value of largest magnitude
 * over -8, so that the extreme itself is exact; the quantised value is rne(w / scale) with the scale already rounded to
 * f16, in [-8, 7]. GGUF Q4_0 repacks exactly. */
#include "../base/fp.h"
#include "format.h"

typedef struct block {
    uint8_t q[4][CLB_PANEL][4]; /* group of 8 k, row, j: low nibble k = j, high nibble k = 4 + j */
    uint16_t scale[CLB_PANEL];
} block_t;
_Static_assert(sizeof(block_t) == 288, "q4 block");

static void put(block_t *b, int k, int r, int q) {
    uint8_t *p = &b->q[k / 8][r][k % 4];
    int shift = k % 8 < 4 ? 0 : 4;
    *p = (uint8_t)((*p & (0xf0 >> shift)) | (q + 8) << shift);
}

static float extreme(const float *w, int r) {
    float m = 0;
    for (int k = 0; k < CLB_BLOCK; k++) {
        float x = w[k * CLB_PANEL + r];
        if (!clb_finite(x)) return x;
        if ((x < 0 ? -x : x) > (m < 0 ? -m : m)) m = x;
    }
    return m;
}

static int pack(const float *w, void *block) {
    block_t *b = block;
    for (int r = 0; r < CLB_PANEL; r++) {
        b->scale[r] = clb_f32_to_f16(extreme(w, r) / -8.0f);
        float d = clb_f16_to_f32(b->scale[r]);
        if (!clb_finite(d)) return -1;
        for (int k = 0; k < CLB_BLOCK; k++) {
            float q = d != 0 ? clb_rnef(w[k * CLB_PANEL + r] / d) : 0.0f;
            put(b, k, r, q > 7.0f ? 7 : q < -8.0f ? -8 : (int)q);
        }
    }
    return 0;
}

static int pack_quants(const int8_t *q, const uint16_t *scale, void *block) {
    block_t *b = block;
    for (int r = 0; r < CLB_PANEL; r++) {
        if (!clb_finite(clb_f16_to_f32(scale[r]))) return -1;
        b->scale[r] = scale[r];
        for (int k = 0; k < CLB_BLOCK; k++) {
            int v = q[k * CLB_PANEL + r];
            if (v < -8 || v > 7) return -1;
            put(b, k, r, v);
        }
    }
    return 0;
}

static float value(const block_t *b, int k, int r) {
    int shift = k % 8 < 4 ? 0 : 4;
    return (float)((b->q[k / 8][r][k % 4] >> shift & 15) - 8) * clb_f16_to_f32(b->scale[r]);
}

static void unpack(const void *block, float *w) {
    for (int k = 0; k < CLB_BLOCK; k++)
        for (int r = 0; r < CLB_PANEL; r++) w[k * CLB_PANEL + r] = value(block, k, r);
}

static void row(const void *panel, uint32_t lane, uint32_t n, float *out) {
    const block_t *b = panel;
    for (uint32_t k = 0; k < n; k++) out[k] = value(b + k / CLB_BLOCK, (int)(k % CLB_BLOCK), (int)lane);
}

const clb_format_t clb_format_q4 = {"q4", sizeof(block_t), CLB_ACT_Q8, pack, pack_quants, unpack, row};
