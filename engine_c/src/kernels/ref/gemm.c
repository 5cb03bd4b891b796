/* Reference GEMM, panel by panel: plain loops in the contract's order. A new format needs a line here only if it has a
 * dot product of its own; formats with float partners go through their unpack. */
#include "../../base/fp.h"
#include "ref.h"

static void gemm_float(const clb_format_t *f, const void *panel, uint32_t nb, const clb_act_t *x, uint32_t row0,
                       uint32_t rows, float *y, size_t ldy) {
    float w[CLB_BLOCK * CLB_PANEL];
    for (uint32_t r = 0; r < rows; r++) memset(y + r * ldy, 0, CLB_PANEL * sizeof *y);
    for (uint32_t b = 0; b < nb; b++) {
        f->unpack((const uint8_t *)panel + (size_t)b * f->block_bytes, w);
        for (uint32_t r = 0; r < rows; r++) {
            const float *xb = (const float *)x->q + ((size_t)b * x->cap + row0 + r) * CLB_BLOCK;
            float *acc = y + r * ldy, sum[CLB_PANEL] = {0};
            for (int k = 0; k < CLB_BLOCK; k++)
                for (int l = 0; l < CLB_PANEL; l++) sum[l] = clb_fmaf(w[k * CLB_PANEL + l], xb[k], sum[l]);
            for (int l = 0; l < CLB_PANEL; l++) acc[l] += sum[l];
        }
    }
}

/* One block of a quantised format: integers [16 rows][32 k] and scales [16]. */
typedef struct ints {
    void (*unpack)(const uint8_t *block, int8_t *w, float *scale);
    size_t block_bytes;
} ints_t;

static void ints_q8(const uint8_t *block, int8_t *w, float *scale) {
    const uint16_t *s = (const uint16_t *)(const void *)(block + 512);
    for (int l = 0; l < CLB_PANEL; l++) {
        scale[l] = clb_f16_to_f32(s[l]);
        for (int k = 0; k < CLB_BLOCK; k++)
            w[l * CLB_BLOCK + k] = (int8_t)(block[k / 4 * 64 + l * 4 + k % 4] - 128);
    }
}

static void ints_q4(const uint8_t *block, int8_t *w, float *scale) {
    const uint16_t *s = (const uint16_t *)(const void *)(block + 256);
    for (int l = 0; l < CLB_PANEL; l++) {
        scale[l] = clb_f16_to_f32(s[l]);
        for (int k = 0; k < CLB_BLOCK; k++) {
            uint8_t byte = block[k / 8 * 64 + l * 4 + k % 4];
            w[l * CLB_BLOCK + k] = (int8_t)((k % 8 < 4 ? byte & 15 : byte >> 4) - 8);
        }
    }
}

static int32_t dot32(const int8_t *a, const int8_t *b) {
    int32_t sum = 0;
    for (int k = 0; k < CLB_BLOCK; k++) sum += a[k] * b[k];
    return sum;
}

static void gemm_ints(const ints_t *f, const void *panel, uint32_t nb, const clb_act_t *x, uint32_t row0, uint32_t rows,
                      float *y, size_t ldy) {
    int8_t w[CLB_PANEL * CLB_BLOCK];
    float scale[CLB_PANEL];
    for (uint32_t r = 0; r < rows; r++) memset(y + r * ldy, 0, CLB_PANEL * sizeof *y);
    for (uint32_t b = 0; b < nb; b++) {
        f->unpack((const uint8_t *)panel + b * f->block_bytes, w, scale);
        for (uint32_t r = 0; r < rows; r++) {
            size_t at = (size_t)b * x->cap + row0 + r;
            const int8_t *xb = (const int8_t *)x->q + at * CLB_BLOCK;
            float *acc = y + r * ldy;
            for (int l = 0; l < CLB_PANEL; l++)
                acc[l] = clb_fmaf((float)dot32(w + l * CLB_BLOCK, xb), scale[l] * x->d[at], acc[l]);
        }
    }
}

static const ints_t q8 = {ints_q8, 544}, q4 = {ints_q4, 288};

#define GEMM(f, one_panel, how)                                                                                \
    void clb_ref_gemm_##f(const clb_panels_t *w, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y,    \
                          size_t ldy) {                                                                        \
        for (uint32_t p = 0; p < w->n; p++)                                                                    \
            one_panel(how, clb_panel_at(w, p), w->nb, x, row0, rows, y + p * CLB_PANEL, ldy);                   \
    }
GEMM(f32, gemm_float, &clb_format_f32)
GEMM(f16, gemm_float, &clb_format_f16)
GEMM(bf16, gemm_float, &clb_format_bf16)
GEMM(q8, gemm_ints, &q8)
GEMM(q4, gemm_ints, &q4)
