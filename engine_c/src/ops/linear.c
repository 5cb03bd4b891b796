/* Panels are streamed once, in order; rows are tiled so that their activations stay in cache while a chunk of panels
 * passes. Every output element is one kernel call's own accumulation over all of k, so the split never shows. */
#include "linear.h"
#include <string.h>

enum { MAX_JOBS = 3, CHUNK_BYTES = 96 * 1024, CHUNKS_PER_LANE = 6, PAIR = 2 * CLB_PANEL };

uint32_t clb_pairs_per_chunk(const clb_step_t *st, uint32_t pairs, size_t bytes) {
    uint32_t by_size = (uint32_t)(CHUNK_BYTES / bytes) + 1;
    uint32_t by_lanes = pairs / (st->m->config.threads * CHUNKS_PER_LANE) + 1;
    return by_size < by_lanes ? by_size : by_lanes;
}

typedef struct product {
    clb_linear_t job[MAX_JOBS];
    uint32_t per[MAX_JOBS], end[MAX_JOBS]; /* panels per chunk, first chunk after this job */
} product_t;

/* From a tile [rows][PAIR] to the columns from `panel` on that the matrix has. */
static void store(const clb_step_t *st, const clb_linear_t *j, const float *tile, uint32_t r0, uint32_t rows,
                  uint32_t panel) {
    uint32_t at = panel * CLB_PANEL, n = j->w->rows - at < PAIR ? j->w->rows - at : PAIR;
    for (uint32_t r = 0; r < rows; r++, tile += PAIR) {
        float *y = j->y + (r0 + r) * j->ldy + at;
        if (j->add) st->m->kernels.add(tile, n, y);
        else memcpy(y, tile, n * sizeof *y);
    }
}

/* Panels [from, to) for some rows: straight to y where whole panels fit, else pair by pair through a tile. */
static void part_rows(const clb_step_t *st, const clb_linear_t *j, uint32_t from, uint32_t to, uint32_t r0,
                      uint32_t rows, float *tile) {
    const clb_act_t *x = &j->x->kind[j->w->format->act];
    clb_gemm_fn *gemm = st->m->kernels.gemm[j->w->format_id];
    if (!j->add && (size_t)to * CLB_PANEL <= j->ldy && to * CLB_PANEL <= j->w->rows) {
        clb_panels_t w = clb_part(j->w, j->w->data, from, to);
        gemm(&w, x, r0, rows, j->y + r0 * j->ldy + from * CLB_PANEL, j->ldy);
        return;
    }
    for (uint32_t p = from; p < to; p += 2) {
        clb_panels_t w = clb_part(j->w, j->w->data, p, p + 2 < to ? p + 2 : to);
        gemm(&w, x, r0, rows, tile, PAIR);
        store(st, j, tile, r0, rows, p);
    }
}

static void chunk_fn(clb_step_t *st, const void *arg, uint32_t chunk, clb_lane_t *lane) {
    const product_t *p = arg;
    uint32_t i = 0;
    while (chunk >= p->end[i]) i++;
    const clb_linear_t *j = &p->job[i];
    uint32_t from = (chunk - (i ? p->end[i - 1] : 0)) * p->per[i];
    uint32_t to = from + p->per[i] < j->w->panels ? from + p->per[i] : j->w->panels;
    for (uint32_t r = 0; r < j->rows; r += CLB_ROW_TILE) {
        uint32_t rows = j->rows - r < CLB_ROW_TILE ? j->rows - r : CLB_ROW_TILE;
        part_rows(st, j, from, to, r, rows, lane->gate);
    }
}

void clb_linears(clb_step_t *st, const clb_linear_t *jobs, uint32_t n) {
    product_t p;
    uint32_t chunks = 0;
    for (uint32_t i = 0; i < n; i++) {
        p.job[i] = jobs[i];
        p.per[i] = 2 * clb_pairs_per_chunk(st, clb_pairs(jobs[i].w->panels), 2 * jobs[i].w->stride);
        p.end[i] = chunks += (jobs[i].w->panels + p.per[i] - 1) / p.per[i];
    }
    clb_run(st, chunk_fn, &p, chunks);
}
