/* Grouped-query attention (Ainslie et al. 2023) over paged KV with a pinned prefix and a sliding window (attention
 * sinks: Xiao et al. 2024). One chunk = a tile of query positions and one KV head, for all query heads of its group: a
 * pass over the keys and values that all of them see serves them all. Sequences that begin with the same slabs, because
 * their prompts begin with the same tokens, share such passes (as in Hydragen, Juravsky et al. 2024), if they are
 * neighbours in the batch.
 *
 * The scores of a query's visible keys lie in one row whose index is congruent to the key's position mod 16, so that
 * the softmax denominator's lanes, and with them its bits, depend on positions only. Each query meets its keys one by
 * one in ascending order, whatever tile it is in. Invisible keys are never read. */
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

void clb_kv_write(clb_step_t *st, uint32_t layer) { clb_run_rows(st, kv_chunk, &layer, st->n_tokens); }

/* What a query at position t sees: [0, pinned_end) and [window_from, t]; `shift` maps window positions to indices. */
typedef struct view {
    uint32_t pinned_end, window_from, end, shift;
} view_t;

static view_t view_of(const colibri_sequence_t *seq, uint32_t t) {
    view_t v = {0, 0, t + 1, 0};
    if (seq->window && t + 1 > seq->window + seq->pinned) {
        v.pinned_end = seq->pinned;
        v.window_from = t + 1 - seq->window;
        uint32_t after = (v.pinned_end + 15) & ~15u;
        v.shift = v.window_from > after ? (v.window_from - after) & ~15u : 0;
    }
    return v;
}

/* A tile: `n` consecutive queries, [first, first + n), for all heads of one group. Row i * group + g of the lane's
 * scores, sums and out is head g of query i. They are of one sequence, or of several of which all keys are visible and
 * the first `shared` in the same slabs. */
typedef struct tile {
    clb_step_t *st;
    const colibri_sequence_t *seq; /* whose slabs are read */
    const uint64_t *keep; /* NULL = all */
    clb_lane_t *lane;
    uint32_t layer, head, group, first, n, shared;
    uint32_t pinned_end, shift; /* of all of them */
    size_t ld;                  /* scores per row */
} tile_t;

/* A range of keys for `rows` rows from `row` on; queries of pinned keys lie apart if those are met elsewhere. */
typedef struct span {
    uint32_t from, end, shift, row, rows;
    int pinned;
} span_t;

static uint32_t next_kept(const tile_t *q, uint32_t pos, uint32_t end) {
    while (q->keep && pos < end && !(q->keep[pos / 64] >> (pos % 64) & 1)) pos++;
    return pos;
}

/* End of the run of kept positions from `pos` that stays in one slab; pos itself is kept. */
static uint32_t run_end(const tile_t *q, uint32_t pos, uint32_t end) {
    uint32_t t = q->st->m->config.slab_tokens, stop = (pos / t + 1) * t;
    if (stop > end) stop = end;
    if (q->keep)
        for (uint32_t i = pos + 1; i < stop; i++)
            if (!(q->keep[i / 64] >> (i % 64) & 1)) return i;
    return stop;
}

static const uint8_t *rows_at(const tile_t *q, clb_kv_part_t part, uint32_t pos) {
    const struct colibri_model *m = q->st->m;
    uint32_t slab = q->seq->slabs[pos / m->config.slab_tokens];
    if (slab == COLIBRI_NO_SLAB) { /* only possible with an eviction callback that keeps what was given back */
        clb_step_fail(q->st, COLIBRI_KV_SLAB);
        return NULL;
    }
    return clb_kv_row(m, q->st->arena, slab, q->layer, part, q->head, pos);
}

/* Visits the span's runs of kept keys in ascending order: their rows of `part`, and the scores of the first of them. */
typedef void run_fn(const tile_t *q, const span_t *s, const uint8_t *rows, uint32_t n, float *scores);

typedef struct run {
    uint32_t pos, n; /* n = 0: no more */
    const uint8_t *rows;
} run_t;

/* The first run at `pos` or after it. */
static run_t run_from(const tile_t *q, const span_t *s, clb_kv_part_t part, uint32_t pos) {
    run_t r = {next_kept(q, pos, s->end), 0, NULL};
    if (r.pos < s->end && (r.rows = rows_at(q, part, r.pos))) r.n = run_end(q, r.pos, s->end) - r.pos;
    return r;
}

/* Keys `from` to `to` of a run, as far as there are so many. */
static void fetch(const run_t *r, uint32_t from, uint32_t to, size_t row_bytes) {
    if (to > r->n) to = r->n;
    for (size_t at = from * row_bytes; at < to * row_bytes; at += 64) __builtin_prefetch(r->rows + at, 0, 2);
}

/* Slabs lie anywhere, so the CPU cannot know the next one: a few rows' arithmetic is too short to hide the wait, and
 * they fetch a piece of the next run before each piece of this one. */
static void each_run(const tile_t *q, const span_t *s, clb_kv_part_t part, run_fn *run) {
    enum { PIECE = 16, FEW_ROWS = 8 };
    size_t row_bytes = clb_kv_row_bytes(q->st->m);
    for (run_t now = run_from(q, s, part, s->from), next; now.n; now = next) {
        float *scores = q->lane->scores + s->row * q->ld + (now.pos - s->shift);
        next = run_from(q, s, part, now.pos + now.n);
        uint32_t piece = s->rows > FEW_ROWS ? now.n : PIECE;
        for (uint32_t i = 0; i < now.n; i += piece) {
            uint32_t n = now.n - i < piece ? now.n - i : piece;
            if (s->rows <= FEW_ROWS) fetch(&next, i, i + piece, row_bytes);
            run(q, s, now.rows + i * row_bytes, n, scores + i);
        }
    }
}

static void score_run(const tile_t *q, const span_t *s, const uint8_t *k, uint32_t n, float *scores) {
    const struct colibri_model *m = q->st->m;
    size_t row = s->row + (s->pinned && q->st->tokens[q->first].pinned_rope ? (size_t)q->n * q->group : 0);
    m->kernels.attn_scores[m->config.kv_format](q->lane->q + row * m->hdp, s->rows, k, n, m->hdp, scores, q->ld);
}

static void value_run(const tile_t *q, const span_t *s, const uint8_t *v, uint32_t n, float *scores) {
    const struct colibri_model *m = q->st->m;
    m->kernels.attn_accumulate[m->config.kv_format](scores, q->ld, s->rows, v, n, m->hdp,
                                                    q->lane->out + (size_t)s->row * m->hdp);
}

static const colibri_sequence_t *sequence_at(const clb_step_t *st, uint32_t t) {
    return clb_sequence(st, st->tokens[t].seq);
}

static view_t view_at(const tile_t *q, uint32_t i) {
    return view_of(sequence_at(q->st, q->first + i), q->st->tokens[q->first + i].pos);
}

/* Keys from `from` on of queries [i, end), which are of one sequence: what all see, then what only later ones do. */
static void each_own(const tile_t *q, uint32_t i, uint32_t end, uint32_t from, clb_kv_part_t part, run_fn *run) {
    tile_t own = *q;
    own.seq = sequence_at(q->st, q->first + i);
    uint32_t first_end = view_at(q, i).end, high = first_end > from ? first_end : from;
    each_run(&own, &(span_t){from, high, q->shift, i * q->group, (end - i) * q->group, 0}, part, run);
    for (; i < end; i++)
        each_run(&own, &(span_t){high, view_at(q, i).end, q->shift, i * q->group, q->group, 0}, part, run);
}

/* End of the tile's queries of the same sequence as query i. */
static uint32_t own_end(const tile_t *q, uint32_t i) {
    const clb_token_t *t = q->st->tokens + q->first;
    uint32_t end = i + 1;
    while (end < q->n && t[end].seq == t[i].seq) end++;
    return end;
}

/* All visible keys of every row, ascending for each: the pinned ones, then what only some queries see of the beginning
 * of the window, what all sequences share, and of each sequence the rest. */
static void each_span(const tile_t *q, clb_kv_part_t part, run_fn *run) {
    uint32_t all = q->n * q->group, low = view_at(q, q->n - 1).window_from;
    each_run(q, &(span_t){0, q->pinned_end, 0, 0, all, 1}, part, run);
    for (uint32_t i = 0; i < q->n && view_at(q, i).window_from < low; i++) {
        view_t v = view_at(q, i);
        uint32_t end = v.end < low ? v.end : low;
        each_run(q, &(span_t){v.window_from, end, q->shift, i * q->group, q->group, 0}, part, run);
    }
    each_run(q, &(span_t){low, q->shared, q->shift, 0, all, 0}, part, run);
    if (low < q->shared) low = q->shared;
    for (uint32_t i = 0, end; i < q->n; i = end) each_own(q, i, end = own_end(q, i), low, part, run);
}

static void fill(float *p, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) p[i] = -CLB_INF;
}

/* Cells of query i's scores that count, a multiple of 16. */
static uint32_t cells_of(const tile_t *q, uint32_t i) { return (view_at(q, i).end - q->shift + 15) & ~15u; }

/* -inf wherever no score will be written. */
static void clear_scores(const tile_t *q) {
    for (uint32_t row = 0; row < q->n * q->group; row++) {
        view_t v = view_at(q, row / q->group);
        float *p = q->lane->scores + row * q->ld;
        if (q->keep) fill(p, 0, cells_of(q, row / q->group));
        fill(p, v.pinned_end, v.window_from - q->shift);
        fill(p, v.end - q->shift, cells_of(q, row / q->group));
    }
}

static float *head_of(const tile_t *q, float *x, uint32_t row) {
    size_t t = q->first + row / q->group, head = (size_t)q->head * q->group + row % q->group;
    return x + t * q->st->ldq + head * q->st->m->g.head_dim;
}

/* The tile's queries, rotated for window keys, and for pinned keys if those are met elsewhere. */
static void rotate(const tile_t *q) {
    const struct colibri_model *m = q->st->m;
    uint32_t hd = m->g.head_dim, hdp = m->hdp, rows = q->n * q->group;
    float scale = 1.0f / clb_sqrtf((float)hd);
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t t = q->first + row / q->group;
        for (uint32_t where = 0; where < (q->st->tokens[t].pinned_rope ? 2u : 1u); where++) {
            float *dst = q->lane->q + (size_t)(where * rows + row) * hdp;
            size_t at = (size_t)t * hd + where * (hd / 2);
            memcpy(dst, head_of(q, q->st->q, row), hd * sizeof *dst);
            memset(dst + hd, 0, (hdp - hd) * sizeof *dst);
            m->kernels.rope(dst, q->st->cos + at, q->st->sin + at, scale, hd);
        }
    }
}

static void add_mass(const tile_t *q) {
    float *mass = q->st->mass;
    for (uint32_t row = 0; row < q->n * q->group; row++) {
        view_t v = view_at(q, row / q->group);
        const float *p = q->lane->scores + row * q->ld, sum = q->lane->sums[row];
        for (uint32_t i = 0; i < v.pinned_end; i++) mass[i] += p[i] / sum;
        for (uint32_t i = v.window_from; i < v.end; i++) mass[i] += p[i - q->shift] / sum;
    }
}

static void attend(const tile_t *q) {
    const struct colibri_model *m = q->st->m;
    uint32_t rows = q->n * q->group;
    rotate(q);
    clear_scores(q);
    each_span(q, CLB_KV_K, score_run);
    for (uint32_t row = 0; row < rows; row++)
        q->lane->sums[row] = m->kernels.softmax(q->lane->scores + row * q->ld, cells_of(q, row / q->group));
    memset(q->lane->out, 0, (size_t)rows * m->hdp * sizeof(float));
    each_span(q, CLB_KV_V, value_run);
    for (uint32_t row = 0; row < rows; row++) {
        float *out = head_of(q, q->st->attn, row);
        memcpy(out, q->lane->out + (size_t)row * m->hdp, m->g.head_dim * sizeof *out);
        m->kernels.scale(1.0f / q->lane->sums[row], m->g.head_dim, out);
    }
    if (q->st->mass) add_mass(q);
}

static uint32_t group_of(const clb_step_t *st) { return st->m->g.heads / st->m->g.kv_heads; }

/* Floats from one row of scores to the next, if the highest position is `last`: an odd multiple of 16, so that rows do
 * not alias in L1. */
static uint32_t row_stride(const clb_step_t *st, uint32_t first, uint32_t last) {
    return ((last - view_of(sequence_at(st, first), st->tokens[first].pos).shift) / 16 + 1) * 16 | 16u;
}

static uint32_t last_position(const clb_step_t *st, clb_tile_t tile) {
    uint32_t last = 0;
    for (uint32_t t = tile.first; t < tile.first + tile.n; t++)
        if (st->tokens[t].pos > last) last = st->tokens[t].pos;
    return last;
}

/* Leading tokens that lie in the same whole slabs for queries a and b. */
static uint32_t shared_keys(const clb_step_t *st, uint32_t a, uint32_t b) {
    const colibri_sequence_t *s = sequence_at(st, a), *z = sequence_at(st, b);
    uint32_t pa = st->tokens[a].pos, pb = st->tokens[b].pos, size = st->m->config.slab_tokens, n = 0;
    uint32_t whole = (pa < pb ? pa : pb) / size;
    while (n < whole && s->slabs[n] == z->slabs[n]) n++;
    return n * size;
}

static int sees_all(const clb_step_t *st, uint32_t t) {
    return !view_of(sequence_at(st, t), st->tokens[t].pos).window_from;
}

/* The tile with the query after it; n = 0 if that does not go with the others. */
static clb_tile_t grown(const clb_step_t *st, clb_tile_t tile) {
    uint32_t next = tile.first + tile.n, group = group_of(st);
    const colibri_sequence_t *seq = sequence_at(st, tile.first);
    clb_tile_t more = {tile.first, tile.n + 1, tile.shared}, none = {tile.first, 0, 0};
    if (tile.shared || st->tokens[tile.first].seq != st->tokens[next].seq) {
        if (st->keep || st->mass || !sees_all(st, next - 1) || !sees_all(st, next)) return none;
        uint32_t keys = shared_keys(st, tile.first, next);
        if (!keys) return none;
        more.shared = tile.shared && tile.shared < keys ? tile.shared : keys;
    }
    if (view_of(seq, st->tokens[tile.first].pos).pinned_end !=
        view_of(sequence_at(st, next), st->tokens[next].pos).pinned_end)
        return none;
    uint64_t floats = (uint64_t)more.n * group * row_stride(st, tile.first, last_position(st, more));
    return floats <= st->score_floats ? more : none;
}

/* A few tiles per lane at least, so that the last to finish is not far behind. */
void clb_attention_plan(clb_step_t *st) {
    enum { CHUNKS_PER_LANE = 4 };
    uint32_t most = st->n_tokens * st->m->g.kv_heads / (st->m->config.threads * CHUNKS_PER_LANE);
    if (most > st->tile_queries) most = st->tile_queries;
    st->n_tiles = 0;
    for (uint32_t first = 0; first < st->n_tokens;) {
        clb_tile_t tile = {first, 1, 0}, more;
        while (tile.n < most && tile.first + tile.n < st->n_tokens && (more = grown(st, tile)).n) tile = more;
        st->tiles[st->n_tiles++] = tile;
        first += tile.n;
    }
}

static tile_t tile_at(clb_step_t *st, uint32_t layer, clb_tile_t at, uint32_t head, clb_lane_t *lane) {
    uint32_t s = st->tokens[at.first].seq;
    view_t first = view_of(clb_sequence(st, s), st->tokens[at.first].pos);
    return (tile_t){.st = st, .seq = clb_sequence(st, s), .lane = lane, .layer = layer, .head = head,
                    .keep = st->keep ? st->keep + (size_t)s * st->keep_words : NULL, .group = group_of(st),
                    .first = at.first, .n = at.n, .shared = at.shared, .pinned_end = first.pinned_end,
                    .shift = first.shift, .ld = row_stride(st, at.first, last_position(st, at))};
}

static void attend_chunk(clb_step_t *st, const void *arg, uint32_t chunk, clb_lane_t *lane) {
    uint32_t heads = st->m->g.kv_heads;
    clb_tile_t at = st->tiles[st->n_tiles - 1 - chunk / heads]; /* longest first */
    tile_t q = tile_at(st, *(const uint32_t *)arg, at, chunk % heads, lane);
    attend(&q);
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
                tile_t q = tile_at(st, layer, (clb_tile_t){t, 1, 0}, head, lane);
                attend(&q);
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
    else clb_run(st, attend_chunk, &layer, st->n_tiles * st->m->g.kv_heads);
}

static void pack_chunk(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)lane;
    uint32_t kind = *(const uint32_t *)arg, n = st->m->g.heads * st->m->g.head_dim;
    st->m->kernels.pack[kind](st->attn + (size_t)t * st->ldq, n, &st->mid.kind[kind], 0, t);
}

void clb_attn_project(clb_step_t *st, const clb_layer_t *l) {
    uint32_t kind = l->o.format->act;
    clb_run_rows(st, pack_chunk, &kind, st->n_tokens);
    clb_linears(st, &(clb_linear_t){&l->o, &st->mid, st->n_tokens, st->x, st->m->g.hidden, 1}, 1);
}
