/* f16: [32 k][16 rows] f16 bits. */
#include "../base/fp.h"
#include "format.h"

typedef struct block { uint16_t w[CLB_BLOCK * CLB_PANEL]; } block_t;
_Static_assert(sizeof(block_t) == 1024, "f16 block");

static int pack(const float *w, void *block) {
    block_t *b = block;
    int bad = 0;
    for (int i = 0; i < CLB_BLOCK * CLB_PANEL; i++) {
        b->w[i] = clb_f32_to_f16(w[i]);
        bad |= !clb_finite(clb_f16_to_f32(b->w[i]));
    }
    return -bad;
}

static void unpack(const void *block, float *w) {
    const block_t *b = block;
    for (int i = 0; i < CLB_BLOCK * CLB_PANEL; i++) w[i] = clb_f16_to_f32(b->w[i]);
}

static void row(const void *panel, uint32_t lane, uint32_t n, float *out) {
    const uint16_t *w = panel;
    for (uint32_t k = 0; k < n; k++) out[k] = clb_f16_to_f32(w[k * CLB_PANEL + lane]);
}

const clb_format_t clb_format_f16 = {"f16", sizeof(block_t), CLB_ACT_F32, pack, NULL, unpack, row};
