/* The expert feed-forward, expert by expert over the rows routed to it:
 *   gather -> gate, up, silu(gate) * up, requantise (fused per 32 outputs) -> down -> weighted sum in expert order.
 * Experts without rows cost nothing. */
#include "linear.h"
#include <string.h>

/* The same activations from cell `at` on: a cell is 32 values, a scale and a sum. */
static clb_act_t from_cell(clb_act_t a, uint32_t kind, size_t at) {
    a.q = (uint8_t *)a.q + at * CLB_BLOCK * (kind == CLB_ACT_F32 ? sizeof(float) : 1);
    a.d = a.d ? a.d + at : NULL;
    a.s = a.s ? a.s + at : NULL;
    return a;
}

/* A bucket's own [nb][odd(rows)][32] area; the buckets before it hold at most first + index rows. */
static clb_act_t area(const clb_step_t *st, const clb_acts_t *acts, uint32_t kind, const clb_bucket_t *b) {
    size_t rows = b->first + (size_t)(b - st->buckets);
    clb_act_t a = from_cell(acts->kind[kind], kind, rows * acts->kind[kind].nb);
    a.cap = clb_odd(b->rows);
    return a;
}

/* What an expert reads: gathered rows, or the one row where it lies. */
static clb_act_t inputs(const clb_step_t *st, uint32_t kind, const clb_bucket_t *b) {
    if (b->rows > 1) return area(st, &st->gathered, kind, b);
    return from_cell(st->in.kind[kind], kind, st->source[b->first]);
}

static void gather_row(const clb_act_t *from, uint32_t t, const clb_act_t *to, uint32_t row, size_t cell) {
    for (uint32_t b = 0; b < from->nb; b++) {
        size_t src = (size_t)b * from->cap + t, dst = (size_t)b * to->cap + row;
        memcpy((uint8_t *)to->q + dst * cell, (const uint8_t *)from->q + src * cell, cell);
        if (from->d) to->d[dst] = from->d[src], to->s[dst] = from->s[src];
    }
}

static void gather_chunk(clb_step_t *st, const void *arg, uint32_t i, clb_lane_t *lane) {
    (void)lane;
    uint32_t kind = *(const uint32_t *)arg;
    const clb_bucket_t *b = &st->buckets[i];
    clb_act_t to = area(st, &st->gathered, kind, b);
    size_t cell = CLB_BLOCK * (kind == CLB_ACT_F32 ? sizeof(float) : 1);
    for (uint32_t r = 0; b->rows > 1 && r < b->rows; r++)
        gather_row(&st->in.kind[kind], st->source[b->first + r], &to, r, cell);
}

/* How the active experts' outputs are cut: each bucket has `chunks` chunks of `per` pairs of panels. */
typedef struct split {
    const clb_layer_t *layer;
    uint32_t pairs, per, chunks;
} split_t;

static split_t cut(const clb_step_t *st, const clb_layer_t *layer, uint32_t pairs, size_t bytes) {
    split_t s = {layer, pairs, clb_pairs_per_chunk(st, pairs * st->n_buckets, bytes), 0};
    s.chunks = (pairs + s.per - 1) / s.per;
    return s;
}

/* The bucket of a chunk and its pairs [*from, *to). */
static const clb_bucket_t *locate(const clb_step_t *st, const split_t *s, uint32_t chunk, uint32_t *from,
                                  uint32_t *to) {
    *from = chunk % s->chunks * s->per;
    *to = *from + s->per < s->pairs ? *from + s->per : s->pairs;
    return &st->buckets[chunk / s->chunks];
}

/* 32 outputs of gate or up for `rows` rows: tile [rows][32]; a missing second panel is zero. */
static void half_tile(const clb_step_t *st, const clb_matrix_t *w, const uint8_t *expert, const clb_act_t *x,
                      uint32_t pair, uint32_t r0, uint32_t rows, float *tile) {
    uint32_t from = pair * 2, to = from + 2 < w->panels ? from + 2 : w->panels;
    clb_panels_t part = clb_part(w, expert + w->offset, from, to);
    st->m->kernels.gemm[w->format_id](&part, x, r0, rows, tile, 2 * CLB_PANEL);
    if (to - from < 2)
        for (uint32_t r = 0; r < rows; r++) memset(tile + r * 32 + CLB_PANEL, 0, CLB_PANEL * sizeof *tile);
}

static void gate_up_chunk(clb_step_t *st, const void *arg, uint32_t chunk, clb_lane_t *lane) {
    const split_t *s = arg;
    const clb_layer_t *l = s->layer;
    uint32_t from, to, inter = st->m->g.inter, kind = l->down.format->act;
    const clb_bucket_t *b = locate(st, s, chunk, &from, &to);
    clb_act_t x = inputs(st, l->gate.format->act, b), y = area(st, &st->act, kind, b);
    for (uint32_t r0 = 0; r0 < b->rows; r0 += CLB_ROW_TILE)
        for (uint32_t pair = from; pair < to; pair++) {
            uint32_t rows = b->rows - r0 < CLB_ROW_TILE ? b->rows - r0 : CLB_ROW_TILE;
            uint32_t n = inter - pair * 32 < 32 ? inter - pair * 32 : 32;
            half_tile(st, &l->gate, b->data, &x, pair, r0, rows, lane->gate);
            half_tile(st, &l->up, b->data, &x, pair, r0, rows, lane->up);
            st->m->kernels.silu_mul(lane->gate, lane->up, rows * 32);
            for (uint32_t r = 0; r < rows; r++) st->m->kernels.pack[kind](lane->gate + r * 32, n, &y, pair, r0 + r);
        }
}

static void down_chunk(clb_step_t *st, const void *arg, uint32_t chunk, clb_lane_t *lane) {
    (void)lane;
    const split_t *s = arg;
    const clb_matrix_t *w = &s->layer->down;
    uint32_t from, to;
    const clb_bucket_t *b = locate(st, s, chunk, &from, &to);
    clb_act_t x = area(st, &st->act, w->format->act, b);
    clb_panels_t part = clb_part(w, b->data + w->offset, from * 2, to * 2 < w->panels ? to * 2 : w->panels);
    for (uint32_t r0 = 0; r0 < b->rows; r0 += CLB_ROW_TILE) {
        uint32_t rows = b->rows - r0 < CLB_ROW_TILE ? b->rows - r0 : CLB_ROW_TILE;
        float *y = st->down + (size_t)(b->first + r0) * st->ldh + from * 2 * CLB_PANEL;
        st->m->kernels.gemm[w->format_id](&part, &x, r0, rows, y, st->ldh);
    }
}

/* x[t] += sum over the token's experts, ascending, of weight * down. */
static void combine_chunk(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)arg;
    const clb_kernels_t *k = &st->m->kernels;
    uint32_t n = st->m->g.hidden, top_k = st->m->g.top_k;
    memset(lane->row, 0, n * sizeof *lane->row);
    for (uint32_t i = t * top_k; i < (t + 1) * top_k; i++)
        k->axpy(st->weight[i], st->down + (size_t)st->slot[i] * st->ldh, n, lane->row);
    k->add(lane->row, n, st->x + (size_t)t * n);
}

static int lease_ok(const clb_step_t *st, const clb_layer_t *l, uint32_t i) {
    const colibri_expert_lease_t *x = &st->leases[i];
    return x->expert == st->buckets[i].expert && x->data && (uintptr_t)x->data % COLIBRI_ALIGNMENT == 0 &&
           x->size >= l->expert_bytes;
}

/* Points every bucket at its weights: the mapped file, or leases. Returns 1 if leases are held. */
static int fetch(clb_step_t *st, uint32_t layer) {
    const colibri_config_t *c = &st->m->config;
    const clb_layer_t *l = &st->m->layers[layer];
    if (!c->expert_fetch) {
        for (uint32_t i = 0; i < st->n_buckets; i++)
            st->buckets[i].data = st->m->experts + l->expert_offset[st->buckets[i].expert];
        return 0;
    }
    for (uint32_t i = 0; i < st->n_buckets; i++)
        st->leases[i] = (colibri_expert_lease_t){sizeof *st->leases, st->buckets[i].expert, NULL, 0, 0};
    if (c->expert_fetch(c->user, (int32_t)layer, st->leases, st->n_buckets)) {
        clb_step_fail(st, COLIBRI_CALLBACK);
        return 0;
    }
    for (uint32_t i = 0; i < st->n_buckets; i++) {
        if (!lease_ok(st, l, i)) clb_step_fail(st, COLIBRI_CALLBACK);
        st->buckets[i].data = st->leases[i].data;
    }
    return 1;
}

static void compute(clb_step_t *st, const clb_layer_t *l) {
    uint32_t kind = l->gate.format->act;
    split_t pairs = cut(st, l, clb_blocks(st->m->g.inter), (l->gate.stride + l->up.stride) * 2);
    split_t outputs = cut(st, l, clb_pairs(l->down.panels), l->down.stride * 2);
    if (st->n_tokens > 1) clb_run(st, gather_chunk, &kind, st->n_buckets);
    clb_run(st, gate_up_chunk, &pairs, pairs.chunks * st->n_buckets);
    clb_run(st, down_chunk, &outputs, outputs.chunks * st->n_buckets);
    clb_run_rows(st, combine_chunk, NULL, st->n_tokens);
}

void clb_experts(clb_step_t *st, uint32_t layer) {
    const colibri_config_t *c = &st->m->config;
    if (!clb_step_ok(st)) return;
    int leased = fetch(st, layer);
    compute(st, &st->m->layers[layer]);
    if (leased && c->expert_release) c->expert_release(c->user, (int32_t)layer, st->leases, st->n_buckets);
}
