/* RMSNorm (Zhang and Sennrich 2019) and packing, one row per chunk. */
#include "step.h"

typedef struct norm { const float *w; uint32_t mask; } norm_t;

static void chunk_fn(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    const norm_t *n = arg;
    const struct colibri_model *m = st->m;
    m->kernels.rmsnorm(st->x + (size_t)t * m->g.hidden, n->w, m->norm_eps, m->g.hidden, lane->row);
    for (uint32_t kind = 0; kind < 2; kind++)
        if (n->mask >> kind & 1) m->kernels.pack[kind](lane->row, m->g.hidden, &st->in.kind[kind], 0, t);
}

void clb_norm(clb_step_t *st, const float *w, uint32_t mask) {
    norm_t n = {w, mask};
    clb_run_rows(st, chunk_fn, &n, st->n_tokens);
}
