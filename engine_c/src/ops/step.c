/* Workspace layout and the phase runner. */
#include "step.h"
#include "../base/fpenv.h"

enum { CLAIMS_PER_LANE = 8 };

static uint32_t up_to(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* Both packings of `rows` rows of `k` values, block-major. */
static void take_acts(clb_acts_t *acts, clb_arena_t *a, uint64_t rows, uint32_t k) {
    uint32_t nb = clb_blocks(k);
    for (int kind = 0; kind < 2; kind++) {
        clb_act_t *act = &acts->kind[kind];
        act->nb = nb;
        act->cap = (uint32_t)rows;
        act->q = clb_take(a, rows * nb, CLB_BLOCK * (kind == CLB_ACT_F32 ? sizeof(float) : 1));
        act->d = kind == CLB_ACT_Q8 ? CLB_TAKE(a, float, rows * nb) : NULL;
        act->s = kind == CLB_ACT_Q8 ? CLB_TAKE(a, int32_t, rows * nb) : NULL;
    }
}

static void take_lane(clb_lane_t *lane, const clb_step_t *st, clb_arena_t *a) {
    const clb_geometry_t *g = &st->m->g;
    uint64_t rows = (uint64_t)st->tile_queries * (g->heads / g->kv_heads), hdp = st->m->hdp;
    clb_lane_t l = {
        .row = CLB_TAKE(a, float, larger(up_to(g->hidden, 32), st->ldq)),
        .gate = CLB_TAKE(a, float, CLB_ROW_TILE * 32),
        .up = CLB_TAKE(a, float, CLB_ROW_TILE * 32),
        .q = CLB_TAKE(a, float, 2 * rows * hdp),
        .out = CLB_TAKE(a, float, rows * hdp),
        .scores = CLB_TAKE(a, float, st->score_floats),
        .sums = CLB_TAKE(a, float, rows),
        .router = CLB_TAKE(a, float, (uint64_t)clb_blocks(g->hidden) * CLB_BLOCK * CLB_PANEL),
    };
    if (lane) *lane = l;
}

static void take_rows(clb_step_t *st, clb_arena_t *a) {
    const clb_geometry_t *g = &st->m->g;
    uint64_t n = st->m->config.max_tokens;
    st->tokens = CLB_TAKE(a, clb_token_t, n);
    st->x = CLB_TAKE(a, float, n * g->hidden);
    st->cos = CLB_TAKE(a, float, n * g->head_dim);
    st->sin = CLB_TAKE(a, float, n * g->head_dim);
    st->q = CLB_TAKE(a, float, n * st->ldq);
    st->k = CLB_TAKE(a, float, n * st->ldk);
    st->v = CLB_TAKE(a, float, n * st->ldk);
    st->attn = CLB_TAKE(a, float, n * st->ldq);
    take_acts(&st->in, a, n + 1, g->hidden);
    take_acts(&st->mid, a, n + 1, g->heads * g->head_dim);
}

static void take_moe(clb_step_t *st, clb_arena_t *a) {
    const clb_geometry_t *g = &st->m->g;
    uint64_t n = st->m->config.max_tokens, rows = n * g->top_k;
    st->route = CLB_TAKE(a, float, n * st->lde);
    st->picked = CLB_TAKE(a, uint32_t, rows);
    st->weight = CLB_TAKE(a, float, rows);
    st->slot = CLB_TAKE(a, uint32_t, rows);
    st->source = CLB_TAKE(a, uint32_t, rows);
    st->count = CLB_TAKE(a, uint32_t, (uint64_t)g->experts + 1);
    st->buckets = CLB_TAKE(a, clb_bucket_t, g->experts);
    st->leases = CLB_TAKE(a, colibri_expert_lease_t, g->experts);
    take_acts(&st->gathered, a, rows + g->experts, g->hidden);
    take_acts(&st->act, a, rows + g->experts, g->inter);
    st->down = CLB_TAKE(a, float, rows * st->ldh);
}

/* A row of scores has at most max_visible cells, 30 more for alignment and 16 for the stride, and one more for each
 * further query of its tile. */
static void layout_tiles(clb_step_t *st) {
    const colibri_config_t *c = &st->m->config;
    uint32_t group = st->m->g.heads / st->m->g.kv_heads, queries = CLB_TILE_ROWS / group;
    if (queries > CLB_TILE_QUERIES) queries = CLB_TILE_QUERIES;
    if (queries > c->max_tokens) queries = c->max_tokens;
    st->tile_queries = queries ? queries : 1;
    uint64_t row = (uint64_t)up_to(c->max_visible, 16) + 48, least = group * row;
    uint64_t most = st->tile_queries * group * (row + up_to(st->tile_queries, 16));
    st->score_floats = most < CLB_TILE_SCORES ? most : least > CLB_TILE_SCORES ? least : CLB_TILE_SCORES;
}

void clb_step_layout(clb_step_t *st, const struct colibri_model *m, clb_arena_t *a) {
    const clb_geometry_t *g = &m->g;
    const colibri_config_t *c = &m->config;
    int evicting = c->kv_evict || c->kv_keep;
    st->m = m;
    st->ldq = up_to(g->heads * g->head_dim, CLB_PANEL);
    st->ldk = up_to(g->kv_heads * g->head_dim, CLB_PANEL);
    st->ldh = up_to(g->hidden, CLB_PANEL);
    st->lde = up_to(g->experts, CLB_PANEL);
    layout_tiles(st);
    st->keep_words = evicting ? (c->max_context + 63) / 64 : 0;
    st->bad = CLB_TAKE(a, uint32_t, c->max_sequences);
    st->tiles = CLB_TAKE(a, clb_tile_t, c->max_tokens);
    take_rows(st, a);
    take_moe(st, a);
    st->keep = CLB_TAKE(a, uint64_t, (uint64_t)c->max_sequences * st->keep_words);
    st->mass = CLB_TAKE(a, float, c->kv_mass ? c->max_context : 0);
    st->lanes = CLB_TAKE(a, clb_lane_t, c->threads);
    for (uint32_t i = 0; i < c->threads; i++) take_lane(st->lanes ? st->lanes + i : NULL, st, a);
}

void clb_step_fail(clb_step_t *st, colibri_status_t status) {
    int32_t none = 0;
    __atomic_compare_exchange_n(&st->status, &none, (int32_t)status, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

typedef struct phase {
    clb_step_t *st;
    clb_chunk_fn *fn;
    const void *arg;
    uint32_t n, grain; /* chunks; how many a lane claims at once */
} phase_t;

static void heartbeat(clb_step_t *st) {
    const colibri_config_t *c = &st->m->config;
    if (c->progress) __atomic_fetch_add(c->progress, 1, __ATOMIC_RELAXED);
    if (c->cancel && __atomic_load_n(c->cancel, __ATOMIC_RELAXED)) clb_step_fail(st, COLIBRI_CANCELLED);
}

static void run_lane(void *arg, uint32_t i) {
    const phase_t *p = arg;
    clb_fpenv_t env = clb_fpenv_enter();
    for (;;) {
        uint32_t from = __atomic_fetch_add(&p->st->next, p->grain, __ATOMIC_RELAXED);
        if (from >= p->n || !clb_step_ok(p->st)) break;
        uint32_t to = p->n - from < p->grain ? p->n : from + p->grain;
        for (uint32_t chunk = from; chunk < to; chunk++) p->fn(p->st, p->arg, chunk, &p->st->lanes[i]);
        heartbeat(p->st);
    }
    clb_fpenv_leave(env);
}

static void run(clb_step_t *st, phase_t *phase) {
    const colibri_config_t *c = &st->m->config;
    uint32_t claims = (phase->n + phase->grain - 1) / phase->grain, lanes = claims < c->threads ? claims : c->threads;
    if (!clb_step_ok(st) || !claims) return;
    st->next = 0;
    if (lanes > 1 && c->parallel_for) c->parallel_for(c->parallel_ctx, run_lane, phase, lanes);
    else run_lane(phase, 0);
}

void clb_run(clb_step_t *st, clb_chunk_fn *fn, const void *arg, uint32_t n_chunks) {
    run(st, &(phase_t){st, fn, arg, n_chunks, 1});
}

void clb_run_rows(clb_step_t *st, clb_chunk_fn *fn, const void *arg, uint32_t n_rows) {
    uint32_t grain = n_rows / (st->m->config.threads * CLAIMS_PER_LANE) + 1;
    run(st, &(phase_t){st, fn, arg, n_rows, grain});
}
