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

/* Panels per chunk for a matrix of `panels` panels of `stride` bytes. */
uint32_t clb_panels_per_chunk(const clb_step_t *st, uint32_t panels, size_t stride);
/* Runs up to 3 products as one phase. */
void clb_linears(clb_step_t *st, const clb_linear_t *jobs, uint32_t n);
#endif
