/* Routing: float logits (or the int8 table's), top-k with ties to the lower index, softmax over the chosen (Mixtral,
 * Jiang et al. 2024), then a counting sort of (token, rank) by expert. */
#include "../base/fp.h"
#include "linear.h"
#include "routing_table.h"

/* Router logits of all rows from one dequantised panel of the int8 table. */
static void table_chunk(clb_step_t *st, const void *arg, uint32_t panel, clb_lane_t *lane) {
    uint32_t layer = *(const uint32_t *)arg;
    const clb_matrix_t *w = &st->m->layers[layer].router;
    clb_routing_panel(st->m, st->routing, layer, panel, lane->router);
    for (uint32_t r = 0; r < st->n_tokens; r += CLB_ROW_TILE) {
        uint32_t rows = st->n_tokens - r < CLB_ROW_TILE ? st->n_tokens - r : CLB_ROW_TILE;
        st->m->kernels.gemm[CLB_FMT_f32](&(clb_panels_t){lane->router, 0, 1, w->nb}, &st->in.kind[CLB_ACT_F32], r, rows,
                                         st->route + (size_t)r * st->lde + panel * CLB_PANEL, st->lde);
    }
}

static void router_logits(clb_step_t *st, uint32_t layer) {
    const clb_matrix_t *w = &st->m->layers[layer].router;
    if (st->routing) clb_run(st, table_chunk, &layer, w->panels);
    else clb_linears(st, &(clb_linear_t){w, &st->in, st->n_tokens, st->route, st->lde, 0}, 1);
}

/* The k best of logits[n], best first; ties go to the lower index; NaN loses to everything. */
static void top_k(const float *logits, uint32_t n, uint32_t k, uint32_t *best) {
    uint32_t have = 0;
    for (uint32_t e = 0; e < n; e++) {
        uint32_t at = have;
        while (at > 0 && (logits[e] > logits[best[at - 1]] || logits[best[at - 1]] != logits[best[at - 1]])) at--;
        if (at >= k) continue;
        if (have < k) have++;
        for (uint32_t i = have - 1; i > at; i--) best[i] = best[i - 1];
        best[at] = e;
    }
}

static int all_finite(const float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (!clb_finite(x[i])) return 0;
    return 1;
}

/* Softmax in rank order, then (expert, weight) pairs by ascending expert: the order in which they are summed. */
static void pick(const float *logits, uint32_t k, uint32_t *experts, float *weight) {
    float sum = 0, top = logits[experts[0]];
    for (uint32_t r = 0; r < k; r++) sum += weight[r] = clb_expf(logits[experts[r]] - top);
    for (uint32_t r = 0; r < k; r++) weight[r] /= sum;
    for (uint32_t r = 1; r < k; r++)
        for (uint32_t i = r; i > 0 && experts[i] < experts[i - 1]; i--) {
            uint32_t e = experts[i];
            float w = weight[i];
            experts[i] = experts[i - 1], weight[i] = weight[i - 1];
            experts[i - 1] = e, weight[i - 1] = w;
        }
}

static void pick_chunk(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)arg, (void)lane;
    const clb_geometry_t *g = &st->m->g;
    const float *logits = st->route + (size_t)t * st->lde;
    uint32_t *experts = st->picked + (size_t)t * g->top_k;
    if (!all_finite(logits, g->experts)) clb_flag(st, st->tokens[t].seq);
    top_k(logits, g->experts, g->top_k, experts);
    pick(logits, g->top_k, experts, st->weight + (size_t)t * g->top_k);
}

/* A dense feed-forward is the one expert, with weight 1. */
static void pick_only(clb_step_t *st) {
    for (uint32_t t = 0; t < st->n_tokens; t++) st->picked[t] = 0, st->weight[t] = 1.0f;
}

static void counting_sort(clb_step_t *st) {
    uint32_t experts = st->m->g.experts, rows = st->n_tokens * st->m->g.top_k, at = 0;
    memset(st->count, 0, ((size_t)experts + 1) * sizeof *st->count);
    for (uint32_t i = 0; i < rows; i++) st->count[st->picked[i]]++;
    st->n_buckets = 0;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t n = st->count[e];
        if (n) st->buckets[st->n_buckets++] = (clb_bucket_t){e, at, n, NULL};
        st->count[e] = at;
        at += n;
    }
    for (uint32_t i = 0; i < rows; i++) {
        st->slot[i] = st->count[st->picked[i]]++;
        st->source[st->slot[i]] = i / st->m->g.top_k;
    }
}

static void count_tokens(clb_step_t *st, uint32_t layer) {
    uint64_t *total = st->m->config.expert_tokens;
    for (uint32_t b = 0; total && b < st->n_buckets; b++)
        __atomic_fetch_add(&total[(size_t)layer * st->m->g.experts + st->buckets[b].expert], st->buckets[b].rows,
                           __ATOMIC_RELAXED);
}

void clb_route(clb_step_t *st, uint32_t layer) {
    if (st->m->g.experts == 1) {
        pick_only(st);
    } else {
        router_logits(st, layer);
        clb_run_rows(st, pick_chunk, NULL, st->n_tokens);
    }
    if (!clb_step_ok(st)) return;
    counting_sort(st);
    count_tokens(st, layer);
}
