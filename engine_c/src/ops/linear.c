/* Panels are streamed once, in order; rows are tiled so that their activations stay in cache while a chunk of panels
 * passes. Every output element is one kernel call's own accumulation over all of k, so the split never shows. */
#include "linear.h"

enum { MAX_JOBS = 3, CHUNK_BYTES = 96 * 1024, CHUNKS_PER_LANE = 6 };

uint32_t clb_panels_per_chunk(const clb_step_t *st, uint32_t panels, size_t stride) {
    uint32_t by_size = (uint32_t)(CHUNK_BYTES / stride) + 1;
    uint32_t by_lanes = panels / (st->m->config.threads * CHUNKS_PER_LANE) + 1;
    return by_size < by_lanes ? by_size : by_lanes;
}

typedef struct product {
    clb_linear_t job[MAX_JOBS];
    uint32_t per[MAX_JOBS], end[MAX_JOBS]; /* panels per chunk, first chunk after this job */
} product_t;

static void store(const clb_linear_t *j, const float *tile, uint32_t r0, uint32_t rows, uint32_t panel) {
    uint32_t at = panel * CLB_PANEL, n = j->w->rows - at < CLB_PANEL ? j->w->rows - at : CLB_PANEL;
    for (uint32_t r = 0; r < rows; r++) {
        float *y = j->y + (r0 + r) * j->ldy + at;
        for (uint32_t i = 0; i < n; i++) y[i] = j->add ? y[i] + tile[r * CLB_PANEL + i] : tile[r * CLB_PANEL + i];
    }
}

static void panel_rows(const clb_step_t *st, const clb_linear_t *j, uint32_t panel, uint32_t r0, uint32_t rows,
                       float *tile) {
    const clb_matrix_t *w = j->w;
    clb_gemm_fn *gemm = st->m->kernels.gemm[w->format_id];
    const void *data = w->data + panel * w->stride;
    const clb_act_t *x = &j->x->kind[w->format->act];
    int direct = !j->add && (size_t)(panel + 1) * CLB_PANEL <= j->ldy && (panel + 1) * CLB_PANEL <= w->rows;
    if (direct) {
        gemm(data, w->nb, x, r0, rows, j->y + r0 * j->ldy + panel * CLB_PANEL, j->ldy);
        return;
    }
    gemm(data, w->nb, x, r0, rows, tile, CLB_PANEL);
    store(j, tile, r0, rows, panel);
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
        for (uint32_t panel = from; panel < to; panel++) panel_rows(st, j, panel, r, rows, lane->gate);
    }
}

void clb_linears(clb_step_t *st, const clb_linear_t *jobs, uint32_t n) {
    product_t p;
    uint32_t chunks = 0;
    for (uint32_t i = 0; i < n; i++) {
        p.job[i] = jobs[i];
        p.per[i] = clb_panels_per_chunk(st, jobs[i].w->panels, jobs[i].w->stride);
        p.end[i] = chunks += (jobs[i].w->panels + p.per[i] - 1) / p.per[i];
    }
    clb_run(st, chunk_fn, &p, chunks);
}
