/* Matrix products over panels, split by output. */
#ifndef CLB_LINEAR_H
#define CLB_LINEAR_H
#include "step.h"

/* y [rows][ldy] = w x, or y += w x with add. ldy >= panels*16 unless ragged, then only w->rows columns are written. */
typedef struct clb_linear {
    const clb_matrix_t *w;
    const clb_acts_t *x;
    uint32_t rows;
    float *y;
    size_t ldy;
    int add;
} clb_linear_t;

/* Pairs of panels per chunk for `pairs` of them of `bytes` bytes each; kernels are best at two panels side by side. */
uint32_t clb_pairs_per_chunk(const clb_step_t *st, uint32_t pairs, size_t bytes);
static inline uint32_t clb_pairs(uint32_t panels) { return (panels + 1) / 2; }
/* Panels [from, to) of a matrix whose first panel is at data. */
static inline clb_panels_t clb_part(const clb_matrix_t *w, const uint8_t *data, uint32_t from, uint32_t to) {
    return (clb_panels_t){data + from * w->stride, w->stride, to - from, w->nb};
}
/* Runs up to 3 products as one phase. */
void clb_linears(clb_step_t *st, const clb_linear_t *jobs, uint32_t n);
#endif
