/* q8: blocks of 32 k with an f16 scale per row; u8 = w + 128 so that u8 x s8 dot instructions apply. The quantised
 * value is rne(w / scale) with the scale already rounded to f16, in [-127, 127]. GGUF Q8_0 repacks exactly. */
#include "../base/fp.h"
#include "format.h"

typedef struct block {
    uint8_t q[8][CLB_PANEL][4]; /* group of 4 k, row, k */
    uint16_t scale[CLB_PANEL];
} block_t;
_Static_assert(sizeof(block_t) == 544, "q8 block");

static uint8_t *at(block_t *b, int k, int r) { return &b->q[k / 4][r][k % 4]; }

static int pack(const float *w, void *block) {
    block_t *b = block;
    for (int r = 0; r < CLB_PANEL; r++) {
        float amax = 0;
        for (int k = 0; k < CLB_BLOCK; k++) {
            float a = clb_float(clb_bits(w[k * CLB_PANEL + r]) & 0x7fffffffu);
            if (!clb_finite(a)) return -1;
            if (a > amax) amax = a;
        }
        b->scale[r] = clb_f32_to_f16(amax / 127.0f);
        float d = clb_f16_to_f32(b->scale[r]);
        if (!clb_finite(d)) return -1;
        for (int k = 0; k < CLB_BLOCK; k++) {
            float q = d > 0 ? clb_rnef(w[k * CLB_PANEL + r] / d) : 0.0f;
            q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
            *at(b, k, r) = (uint8_t)((int)q + 128);
        }
    }
    return 0;
}

static int pack_quants(const int8_t *q, const uint16_t *scale, void *block) {
    block_t *b = block;
    for (int r = 0; r < CLB_PANEL; r++) {
        if (!clb_finite(clb_f16_to_f32(scale[r]))) return -1;
        b->scale[r] = scale[r];
        for (int k = 0; k < CLB_BLOCK; k++) *at(b, k, r) = (uint8_t)(q[k * CLB_PANEL + r] + 128);
    }
    return 0;
}

static float value(const block_t *b, int k, int r) {
    return (float)((int)b->q[k / 4][r][k % 4] - 128) * clb_f16_to_f32(b->scale[r]);
}

static void unpack(const void *block, float *w) {
    for (int k = 0; k < CLB_BLOCK; k++)
        for (int r = 0; r < CLB_PANEL; r++) w[k * CLB_PANEL + r] = value(block, k, r);
}

static void row(const void *panel, uint32_t lane, uint32_t n, float *out) {
    const block_t *b = panel;
    for (uint32_t k = 0; k < n; k++) out[k] = value(b + k / CLB_BLOCK, (int)(k % CLB_BLOCK), (int)lane);
}

const clb_format_t clb_format_q8 = {"q8", sizeof(block_t), CLB_ACT_Q8, pack, pack_quants, unpack, row};
