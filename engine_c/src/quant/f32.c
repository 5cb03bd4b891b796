/* f32: [32 k][16 rows] floats. */
#include "../base/fp.h"
#include "format.h"

typedef struct block { float w[CLB_BLOCK * CLB_PANEL]; } block_t;
_Static_assert(sizeof(block_t) == 2048, "f32 block");

static int pack(const float *w, void *block) {
    int bad = 0;
    for (int i = 0; i < CLB_BLOCK * CLB_PANEL; i++) bad |= !clb_finite(w[i]);
    memcpy(block, w, sizeof(block_t));
    return -bad;
}

static void unpack(const void *block, float *w) { memcpy(w, block, sizeof(block_t)); }

static void row(const void *panel, uint32_t lane, uint32_t n, float *out) {
    const float *w = panel;
    for (uint32_t k = 0; k < n; k++) out[k] = w[k * CLB_PANEL + lane];
}

const clb_format_t clb_format_f32 = {"f32", sizeof(block_t), CLB_ACT_F32, pack, NULL, unpack, row};
