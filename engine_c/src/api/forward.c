/* colibri_forward: checks the batch whole before anything is written, lays out the workspace, runs the layers. */
#include "../base/fpenv.h"
#include "../ops/routing_table.h"
#include "../ops/step.h"
#include "api.h"
#include <string.h>

#define BAD(field_format, ...)                                                                                         \
    clb_fail(err, COLIBRI_INVALID_ARGUMENT, "sequences[%u]." field_format, (uint64_t)i, __VA_ARGS__)

static colibri_status_t check_range(const colibri_model_t *m, const colibri_sequence_t *s, uint32_t i,
                                    colibri_error_t *err) {
    if (!s->n_tokens || !s->tokens) return BAD("n_tokens is 0 or tokens is NULL%s", "");
    if (s->logits_from > s->n_tokens)
        return BAD("logits_from is %u; at most n_tokens = %u", (uint64_t)s->logits_from, (uint64_t)s->n_tokens);
    if (s->positions > COLIBRI_POSITIONS_ABSOLUTE)
        return BAD("positions is %u; it must be 0 or 1", (uint64_t)s->positions);
    if (s->pinned && !s->window) return BAD("pinned is %u but window is 0 (full attention)", (uint64_t)s->pinned);
    uint64_t end = (uint64_t)s->position + s->n_tokens, visible = end;
    if (end > m->config.max_context)
        return clb_fail(err, COLIBRI_CONTEXT, "sequences[%u] ends at position %u; config.max_context is %u",
                        (uint64_t)i, end, (uint64_t)m->config.max_context);
    if (s->window && visible > (uint64_t)s->pinned + s->window) visible = (uint64_t)s->pinned + s->window;
    if (visible > m->config.max_visible)
        return clb_fail(err, COLIBRI_CONTEXT, "sequences[%u] sees %u keys; config.max_visible is %u", (uint64_t)i,
                        visible, (uint64_t)m->config.max_visible);
    return COLIBRI_OK;
}

static colibri_status_t check_tokens(const colibri_model_t *m, const colibri_sequence_t *s, uint32_t i,
                                     colibri_error_t *err) {
    for (uint32_t t = 0; t < s->n_tokens; t++)
        if (s->tokens[t] >= m->g.vocab)
            return clb_fail(err, COLIBRI_TOKEN_RANGE, "sequences[%u].tokens[%u] is %u; the vocabulary has %u",
                            (uint64_t)i, (uint64_t)t, (uint64_t)s->tokens[t], (uint64_t)m->g.vocab);
    return COLIBRI_OK;
}

/* Positions [from, to) must have slabs inside the arena. */
static colibri_status_t check_slabs(const colibri_sequence_t *s, uint32_t i, uint32_t from, uint32_t to, uint32_t T,
                                    uint64_t slabs, colibri_error_t *err) {
    for (uint32_t j = from / T; from < to && j <= (to - 1) / T; j++)
        if (s->slabs[j] >= slabs)
            return clb_fail(err, COLIBRI_KV_SLAB, "sequences[%u].slabs[%u] is %u; positions %u.. need one of %u slabs",
                            (uint64_t)i, (uint64_t)j, (uint64_t)s->slabs[j], (uint64_t)j * T, slabs);
    return COLIBRI_OK;
}

/* With an eviction callback positions before the step may have no slab; the rest of the table is checked all the same.
 */
static colibri_status_t check_table(const colibri_model_t *m, const colibri_sequence_t *s, uint32_t i, uint64_t slabs,
                                    colibri_error_t *err) {
    uint32_t T = m->config.slab_tokens, end = s->position + s->n_tokens, from = 0, pinned_end = 0;
    if (!s->slabs || s->n_slabs < (end + T - 1) / T)
        return clb_fail(err, COLIBRI_KV_SLAB, "sequences[%u] has %u slabs; %u positions of %u a slab need %u",
                        (uint64_t)i, (uint64_t)s->n_slabs, (uint64_t)end, (uint64_t)T, ((uint64_t)end + T - 1) / T);
    for (uint32_t j = 0; j < (end + T - 1) / T; j++)
        if (s->slabs[j] != COLIBRI_NO_SLAB && s->slabs[j] >= slabs)
            return clb_fail(err, COLIBRI_KV_SLAB, "sequences[%u].slabs[%u] is %u; the arena has %u", (uint64_t)i,
                            (uint64_t)j, (uint64_t)s->slabs[j], slabs);
    if (m->config.kv_evict || m->config.kv_keep) return check_slabs(s, i, s->position, end, T, slabs, err);
    if (s->window && s->position + 1ull > (uint64_t)s->pinned + s->window) {
        from = s->position + 1 - s->window;
        pinned_end = s->pinned;
    }
    CLB_TRY(check_slabs(s, i, 0, pinned_end, T, slabs, err));
    return check_slabs(s, i, from, end, T, slabs, err);
}

static colibri_status_t check_sequences(const colibri_model_t *m, const colibri_batch_t *b, uint32_t *tokens,
                                        uint32_t *rows, colibri_error_t *err) {
    clb_step_t view = {.batch = (colibri_batch_t *)(uintptr_t)b};
    uint64_t n = 0, out = 0, slabs = b->kv->size / m->slab_bytes;
    if (!b->sequences || !b->n_sequences || b->n_sequences > m->config.max_sequences)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT,
                        "batch.n_sequences is %u; it must be 1..%u (config.max_sequences)", (uint64_t)b->n_sequences,
                        (uint64_t)m->config.max_sequences);
    CLB_TRY(clb_struct_check(b->sequences, CLB_MIN_SEQUENCE, "sequences[0]", err));
    if (b->sequences->struct_size % _Alignof(colibri_sequence_t))
        return clb_fail(err, COLIBRI_STRUCT_SIZE, "sequences[0].struct_size is not a multiple of its alignment");
    for (uint32_t i = 0; i < b->n_sequences; i++) {
        const colibri_sequence_t *s = clb_sequence(&view, i);
        if (s->struct_size != b->sequences->struct_size)
            return clb_fail(err, COLIBRI_STRUCT_SIZE, "sequences[%u].struct_size differs from sequences[0]'s",
                            (uint64_t)i);
        CLB_TRY(check_range(m, s, i, err));
        CLB_TRY(check_tokens(m, s, i, err));
        CLB_TRY(check_table(m, s, i, slabs, err));
        n += s->n_tokens;
        out += s->n_tokens - s->logits_from;
        if (n > m->config.max_tokens)
            return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "the batch has more than config.max_tokens = %u tokens",
                            (uint64_t)m->config.max_tokens);
    }
    *tokens = (uint32_t)n;
    *rows = (uint32_t)out;
    return COLIBRI_OK;
}

static colibri_status_t check_buffers(const colibri_model_t *m, const colibri_batch_t *b, uint32_t rows,
                                      colibri_error_t *err) {
    uint64_t routing = 0;
    CLB_TRY(clb_buffer_check(b->workspace, "workspace", COLIBRI_WORKSPACE, clb_workspace_bytes(m), err));
    if (rows) CLB_TRY(clb_buffer_check(b->output, "output", COLIBRI_OUTPUT, (uint64_t)rows * m->g.vocab * 4, err));
    if (!b->routing_table) return COLIBRI_OK;
    if (clb_routing_bytes(m, &routing))
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "batch.routing_table is set but the model has no router");
    return clb_buffer_check(b->routing_table, "routing_table", COLIBRI_ROUTING_TABLE, routing, err);
}

static void fill_tokens(clb_step_t *st) {
    uint32_t n = 0, row = 0;
    for (uint32_t i = 0; i < st->batch->n_sequences; i++) {
        colibri_sequence_t *s = clb_sequence(st, i);
        s->logits_row = row;
        s->status = COLIBRI_OK;
        st->bad[i] = 0;
        for (uint32_t t = 0; t < s->n_tokens; t++) {
            uint32_t pos = s->position + t;
            int far = s->window && s->pinned && pos >= (uint64_t)s->pinned + s->window;
            st->tokens[n++] = (clb_token_t){s->tokens[t], i, pos, t >= s->logits_from ? row++ : UINT32_MAX,
                                            far && s->positions == COLIBRI_POSITIONS_CACHE};
        }
    }
}

static void pack_densely(clb_step_t *st) {
    for (int kind = 0; kind < 2; kind++) st->in.kind[kind].cap = st->mid.kind[kind].cap = clb_odd(st->n_tokens);
}

static void compute(clb_step_t *st) {
    pack_densely(st);
    clb_attention_plan(st);
    clb_embed(st);
    for (uint32_t layer = 0; layer < st->m->g.layers && clb_step_ok(st); layer++) st->m->arch->layer(st, layer);
    clb_head(st);
    for (uint32_t i = 0; i < st->batch->n_sequences; i++)
        if (st->bad[i]) clb_sequence(st, i)->status = COLIBRI_NON_FINITE;
}

static void each_buffer(const colibri_batch_t *b, void (*fn)(colibri_buffer_t *)) {
    colibri_buffer_t *all[] = {b->kv, b->workspace, b->output, b->routing_table};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]) fn(all[i]);
}
static void acquire(colibri_buffer_t *b) { clb_buffer_acquire(b); }
static void release(colibri_buffer_t *b) { clb_buffer_release(b); }

static const char *reason(int32_t status) {
    switch (status) {
    case COLIBRI_CANCELLED: return "config.cancel was set during the step";
    case COLIBRI_CALLBACK: return "kv_evict, kv_keep or expert_fetch failed or returned something unusable";
    case COLIBRI_KV_SLAB: return "the keep-list keeps a position whose slab was given back";
    default: return colibri_status_text(status);
    }
}

colibri_status_t colibri_forward(const colibri_model_t *m, colibri_batch_t *b, colibri_error_t *err) {
    uint32_t tokens = 0, rows = 0;
    CLB_TRY(clb_model_check(m, err));
    CLB_TRY(clb_struct_check(b, CLB_MIN_BATCH, "batch", err));
    CLB_TRY(clb_buffer_check(b->kv, "kv", COLIBRI_KV_CACHE, m->slab_bytes, err));
    CLB_TRY(check_sequences(m, b, &tokens, &rows, err));
    CLB_TRY(check_buffers(m, b, rows, err));
    clb_step_t st = {.batch = b, .n_tokens = tokens, .n_out = rows, .arena = b->kv->ptr};
    clb_arena_t arena = {b->workspace->ptr, 0};
    st.logits = rows ? b->output->ptr : NULL;
    st.routing = b->routing_table ? b->routing_table->ptr : NULL;
    clb_step_layout(&st, m, &arena);
    each_buffer(b, acquire);
    clb_fpenv_t env = clb_fpenv_enter();
    fill_tokens(&st);
    compute(&st);
    clb_fpenv_leave(env);
    each_buffer(b, release);
    b->logits_rows = rows;
    return st.status ? clb_fail(err, (colibri_status_t)st.status, "%s", reason(st.status)) : COLIBRI_OK;
}

colibri_status_t colibri_routing_build(const colibri_model_t *m, colibri_buffer_t *table, colibri_error_t *err) {
    uint64_t bytes = 0;
    CLB_TRY(clb_model_check(m, err));
    if (clb_routing_bytes(m, &bytes)) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "the model has no router");
    CLB_TRY(clb_buffer_check(table, "table", COLIBRI_ROUTING_TABLE, bytes, err));
    clb_buffer_acquire(table);
    clb_fpenv_t env = clb_fpenv_enter();
    clb_routing_fill(m, table->ptr);
    clb_fpenv_leave(env);
    clb_buffer_release(table);
    return COLIBRI_OK;
}
