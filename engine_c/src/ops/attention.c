/* Grouped-query attention (Ainslie et al. 2023) over paged KV with a pinned prefix and a sliding window (attention
 * sinks: Xiao et al. 2024). One chunk = one query position and one KV head, for all query heads of its group.
 *
 * The scores of the visible keys lie in one buffer whose index is congruent to the key's position mod 16, so that the
 * softmax denominator's lanes, and with them its bits, depend on positions only. Invisible keys are never read. */
#include "../base/fp.h"
#include "../kv/kv_layout.h"
#include "linear.h"

void clb_qkv(clb_step_t *st, const clb_layer_t *l) {
    uint32_t n = st->n_tokens;
    clb_linear_t jobs[3] = {{&l->q, &st->in, n, st->q, st->ldq, 0},
                            {&l->k, &st->in, n, st->k, st->ldk, 0},
                            {&l->v, &st->in, n, st->v, st->ldk, 0}};
    clb_linears(st, jobs, 3);
}

static void kv_chunk(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)lane;
    const struct colibri_model *m = st->m;
    uint32_t layer = *(const uint32_t *)arg, hd = m->g.head_dim, bad = 0;
    const clb_token_t *tok = &st->tokens[t];
    uint32_t slab = clb_sequence(st, tok->seq)->slabs[tok->pos / m->config.slab_tokens];
    clb_kv_store_fn *put = m->kernels.kv_store[m->config.kv_format];
    for (uint32_t h = 0; h < m->g.kv_heads; h++) {
        float *k = st->k + (size_t)t * st->ldk + h * hd, *v = st->v + (size_t)t * st->ldk + h * hd;
        m->kernels.rope(k, st->cos + (size_t)t * hd, st->sin + (size_t)t * hd, 1.0f, hd);
        bad |= put(k, hd, clb_kv_row(m, st->arena, slab, layer, CLB_KV_K, h, tok->pos)) != 0;
        bad |= put(v, hd, clb_kv_row(m, st->arena, slab, layer, CLB_KV_V, h, tok->pos)) != 0;
    }
    if (bad) clb_flag(st, tok->seq);
}

void clb_kv_write(clb_step_t *st, uint32_t layer) { clb_run(st, kv_chunk, &layer, st->n_tokens); }

/* What a query at position t sees: [0, pinned_end) and [window_from, t]; `shift` maps window positions to indices. */
typedef struct view {
    uint32_t pinned_end, window_from, end, shift, cells; /* cells: scores used, a multiple of 16 */
} view_t;

static view_t view_of(const colibri_sequence_t *seq, uint32_t t) {
    view_t v = {0, 0, t + 1, 0, 0};
    if (seq->window && t + 1 > seq->window + seq->pinned) {
        v.pinned_end = seq->pinned;
        v.window_from = t + 1 - seq->window;
        uint32_t after = (v.pinned_end + 15) & ~15u;
        v.shift = v.window_from > after ? (v.window_from - after) & ~15u : 0;
    }
    v.cells = (t + 1 - v.shift + 15) & ~15u;
    return v;
}

typedef struct query {
    clb_step_t *st;
    const colibri_sequence_t *seq;
    const uint64_t *keep; /* NULL = all */
    clb_lane_t *lane;
    uint32_t layer, head, group;
} query_t;

/* End of the run of kept positions from `pos` that stays in one slab; pos itself is kept. */
static uint32_t run_end(const query_t *q, uint32_t pos, uint32_t end) {
    uint32_t t = q->st->m->config.slab_tokens, stop = (pos / t + 1) * t;
    if (stop > end) stop = end;
    if (q->keep)
        for (uint32_t i = pos + 1; i < stop; i++)
            if (!(q->keep[i / 64] >> (i % 64) & 1)) return i;
    return stop;
}

static uint32_t next_kept(const query_t *q, uint32_t pos, uint32_t end) {
    while (q->keep && pos < end && !(q->keep[pos / 64] >> (pos % 64) & 1)) pos++;
    return pos;
}

static const uint8_t *rows_at(const query_t *q, clb_kv_part_t part, uint32_t pos) {
    const struct colibri_model *m = q->st->m;
    uint32_t slab = q->seq->slabs[pos / m->config.slab_tokens];
    if (slab == COLIBRI_NO_SLAB) { /* only possible with an eviction callback that keeps what was given back */
        clb_step_fail(q->st, COLIBRI_KV_SLAB);
        return NULL;
    }
    return clb_kv_row(m, q->st->arena, slab, q->layer, part, q->head, pos);
}

static void score_range(const query_t *q, const float *queries, uint32_t from, uint32_t end, uint32_t shift) {
    const struct colibri_model *m = q->st->m;
    clb_attn_scores_fn *scores = m->kernels.attn_scores[m->config.kv_format];
    for (uint32_t pos = next_kept(q, from, end); pos < end;) {
        uint32_t stop = run_end(q, pos, end);
        const uint8_t *k = rows_at(q, CLB_KV_K, pos);
        if (!k) return;
        scores(queries, q->group, k, stop - pos, m->hdp, q->lane->scores + pos - shift, q->st->score_cap);
        pos = next_kept(q, stop, end);
    }
}

static void value_range(const query_t *q, uint32_t from, uint32_t end, uint32_t shift) {
    const struct colibri_model *m = q->st->m;
    clb_attn_accumulate_fn *accumulate = m->kernels.attn_accumulate[m->config.kv_format];
    for (uint32_t pos = next_kept(q, from, end); pos < end;) {
        uint32_t stop = run_end(q, pos, end);
        const uint8_t *v = rows_at(q, CLB_KV_V, pos);
        if (!v) return;
        accumulate(q->lane->scores + pos - shift, q->st->score_cap, q->group, v, stop - pos, m->hdp, q->lane->out);
        pos = next_kept(q, stop, end);
    }
}

static void fill(float *p, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) p[i] = -CLB_INF;
}

/* -inf wherever no score will be written. */
static void clear_scores(const query_t *q, const view_t *v) {
    for (uint32_t g = 0; g < q->group; g++) {
        float *p = q->lane->scores + (size_t)g * q->st->score_cap;
        if (q->keep) fill(p, 0, v->cells);
        fill(p, v->pinned_end, v->window_from - v->shift);
        fill(p, v->end - v->shift, v->cells);
    }
}

/* The group's queries, rotated for window keys, and for pinned keys if those are met elsewhere. */
static void rotate(const query_t *q, uint32_t t) {
    const struct colibri_model *m = q->st->m;
    uint32_t hd = m->g.head_dim, hdp = m->hdp;
    float scale = 1.0f / clb_sqrtf((float)hd);
    for (uint32_t g = 0; g < q->group; g++) {
        const float *src = q->st->q + (size_t)t * q->st->ldq + ((size_t)q->head * q->group + g) * hd;
        for (uint32_t where = 0; where < (q->st->tokens[t].pinned_rope ? 2u : 1u); where++) {
            float *dst = q->lane->q + ((size_t)where * q->group + g) * hdp;
            size_t at = (size_t)t * hd + where * (hd / 2);
            memcpy(dst, src, hd * sizeof *dst);
            memset(dst + hd, 0, (hdp - hd) * sizeof *dst);
            m->kernels.rope(dst, q->st->cos + at, q->st->sin + at, scale, hd);
        }
    }
}

static void weigh(const query_t *q, const view_t *v, float *sums) {
    for (uint32_t g = 0; g < q->group; g++)
        sums[g] = q->st->m->kernels.softmax(q->lane->scores + (size_t)g * q->st->score_cap, v->cells);
}

static void add_mass(const query_t *q, const view_t *v, const float *sums) {
    float *mass = q->st->mass;
    for (uint32_t g = 0; g < q->group; g++) {
        const float *p = q->lane->scores + (size_t)g * q->st->score_cap;
        for (uint32_t i = 0; i < v->pinned_end; i++) mass[i] += p[i] / sums[g];
        for (uint32_t i = v->window_from; i < v->end; i++) mass[i] += p[i - v->shift] / sums[g];
    }
}

static void attend(const query_t *q, uint32_t t) {
    const struct colibri_model *m = q->st->m;
    view_t v = view_of(q->seq, q->st->tokens[t].pos);
    float *sums = q->lane->sums;
    rotate(q, t);
    clear_scores(q, &v);
    const float *pinned = q->lane->q + (q->st->tokens[t].pinned_rope ? (size_t)q->group * m->hdp : 0);
    score_range(q, pinned, 0, v.pinned_end, 0);
    score_range(q, q->lane->q, v.window_from, v.end, v.shift);
    weigh(q, &v, sums);
    memset(q->lane->out, 0, (size_t)q->group * m->hdp * sizeof(float));
    value_range(q, 0, v.pinned_end, 0);
    value_range(q, v.window_from, v.end, v.shift);
    for (uint32_t g = 0; g < q->group; g++) {
        float *out = q->st->attn + (size_t)t * q->st->ldq + ((size_t)q->head * q->group + g) * m->g.head_dim;
        memcpy(out, q->lane->out + (size_t)g * m->hdp, m->g.head_dim * sizeof *out);
        m->kernels.scale(1.0f / sums[g], m->g.head_dim, out);
    }
    if (q->st->mass) add_mass(q, &v, sums);
}

static query_t query_at(clb_step_t *st, uint32_t layer, uint32_t t, uint32_t head, clb_lane_t *lane) {
    uint32_t s = st->tokens[t].seq;
    return (query_t){st,
                     clb_sequence(st, s),
                     st->keep ? st->keep + (size_t)s * st->keep_words : NULL,
                     lane,
                     layer,
                     head,
                     st->m->g.heads / st->m->g.kv_heads};
}

static void attend_chunk(clb_step_t *st, const void *arg, uint32_t chunk, clb_lane_t *lane) {
    uint32_t heads = st->m->g.kv_heads, t = st->n_tokens - 1 - chunk / heads; /* longest first */
    query_t q = query_at(st, *(const uint32_t *)arg, t, chunk % heads, lane);
    attend(&q, t);
}

/* With kv_mass: all of one sequence in one chunk, so that the sums over heads and queries have one order. */
static void attend_sequence(clb_step_t *st, const void *arg, uint32_t chunk, clb_lane_t *lane) {
    (void)chunk;
    uint32_t layer = *(const uint32_t *)arg;
    const colibri_config_t *c = &st->m->config;
    for (uint32_t from = 0, t = 0; t < st->n_tokens; from = t) {
        const colibri_sequence_t *seq = clb_sequence(st, st->tokens[from].seq);
        uint32_t n = seq->position + seq->n_tokens;
        memset(st->mass, 0, n * sizeof *st->mass);
        for (; t < st->n_tokens && st->tokens[t].seq == st->tokens[from].seq; t++)
            for (uint32_t head = 0; head < st->m->g.kv_heads; head++) {
                query_t q = query_at(st, layer, t, head, lane);
                attend(&q, t);
            }
        if (!clb_step_ok(st)) return;
        c->kv_mass(c->user, seq->id, (int32_t)layer, n, st->mass);
    }
}

static void clear_bits(uint64_t *bits, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) bits[i / 64] &= ~((uint64_t)1 << (i % 64));
}
static void set_bits(uint64_t *bits, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) bits[i / 64] |= (uint64_t)1 << (i % 64);
}

static int ask_one(clb_step_t *st, uint32_t s, uint32_t layer) {
    const colibri_config_t *c = &st->m->config;
    const colibri_sequence_t *seq = clb_sequence(st, s);
    uint64_t *keep = st->keep + (size_t)s * st->keep_words;
    uint32_t n = seq->position + seq->n_tokens, start = 0, length = 0;
    memset(keep, 0xff, (n + 63) / 64 * 8);
    if (c->kv_keep && c->kv_keep(c->user, seq->id, (int32_t)layer, n, keep)) return -1;
    if (c->kv_evict && c->kv_evict(c->user, seq->id, (int32_t)layer, -1, &start, &length)) return -1;
    if (length && (start >= n || length > n - start)) return -1;
    clear_bits(keep, start, start + length);
    set_bits(keep, seq->position, n);
    return 0;
}

static void ask_evictions(clb_step_t *st, uint32_t layer) {
    for (uint32_t s = 0; st->keep && s < st->batch->n_sequences && clb_step_ok(st); s++)
        if (ask_one(st, s, layer)) clb_step_fail(st, COLIBRI_CALLBACK);
}

void clb_attention(clb_step_t *st, uint32_t layer) {
    ask_evictions(st, layer);
    if (st->mass) clb_run(st, attend_sequence, &layer, 1);
    else clb_run(st, attend_chunk, &layer, st->n_tokens * st->m->g.kv_heads);
}

static void pack_chunk(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)lane;
    uint32_t kind = *(const uint32_t *)arg, n = st->m->g.heads * st->m->g.head_dim;
    st->m->kernels.pack[kind](st->attn + (size_t)t * st->ldq, n, &st->mid.kind[kind], 0, t);
}

void clb_attn_project(clb_step_t *st, const clb_layer_t *l) {
    uint32_t kind = l->o.format->act;
    clb_run(st, pack_chunk, &kind, st->n_tokens);
    clb_linears(st, &(clb_linear_t){&l->o, &st->mid, st->n_tokens, st->x, st->m->g.hidden, 1}, 1);
}
