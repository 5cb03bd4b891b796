/* Every callback of colibri_config_t, used by a step of a small model in memory: parallel_for, log, kv_evict, kv_keep,
 * kv_mass, expert_fetch with its leases, and progress and cancel. Policies written against them are in Python, see
 * tests/unit/engine_py/test_callbacks.py. */
#include "../../../engine_c/host/pool.h"
#include "loader_samples.h"
#include <pthread.h>

enum { TOKENS = 24, SLAB = 16, SLABS = 4, THREADS = 4, MAX_CALLS = 64 };

/* ---- a model in memory ----------------------------------------------------------------------------------------- */

static void *memory(size_t n) {
    void *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096 + 4096);
    if (!p) abort();
    memset(p, 0, (n + 4095) / 4096 * 4096 + 4096);
    return p;
}

static colibri_buffer_t buffer(colibri_buffer_type_t type, void *p, uint64_t n) {
    return (colibri_buffer_t){.struct_size = sizeof(colibri_buffer_t), .type = type, .ptr = p, .size = n,
                              .alignment = COLIBRI_ALIGNMENT, .ref_count = 1};
}

static void fill_vector(const tensor_t *t, float *out) {
    int freqs = !strcmp(t->rule->role, "rope_freqs");
    for (uint32_t i = 0; i < t->rows; i++) out[i] = freqs ? 1.0f / (float)(1 + i * i) : 1.0f;
}

static void fill_matrix(const tensor_t *t, void *out, unsigned long long *seed) {
    size_t n = (size_t)t->rows * t->cols;
    float *w = memory(n * sizeof *w);
    for (size_t i = 0; i < n; i++) w[i] = test_uniform(seed) * 0.4f;
    CHECK(colibri_panel_pack(clb_format((uint32_t)t->format)->name, t->rows, t->cols, w, out, NULL) == COLIBRI_OK);
    free(w);
}

typedef struct weights { void *file[2]; } weights_t;

static weights_t make_weights(const sample_t *s) {
    weights_t w = {{memory(s->file_bytes[0]), memory(s->file_bytes[1])}};
    unsigned long long seed = 7;
    for (int i = 0; i < s->n; i++) {
        const tensor_t *t = &s->tensors[i];
        void *at = (char *)w.file[t->file] + t->offset;
        if (t->cols) fill_matrix(t, at, &seed);
        else fill_vector(t, at);
    }
    return w;
}

/* ---- what the callbacks are told and do ------------------------------------------------------------------------ */

typedef enum lease_fault { NO_FAULT, FETCH_FAILS, DATA_NULL, DATA_MISALIGNED, DATA_SHORT, OTHER_EXPERT } lease_fault_t;

typedef struct call { int32_t layer; uint32_t n, experts[8]; } call_t;

typedef struct host {
    const sample_t *sample;
    const uint8_t *experts; /* experts.bin */
    /* orders */
    lease_fault_t fault;
    int32_t fault_layer, fail_keep, fail_evict;
    uint32_t hide_from, hide_length; /* positions that kv_keep and kv_evict hide */
    int cancel_in_fetch, cancel_in_loop; /* set the flag in that call; 0 = never, 1 = first */
    /* records */
    call_t fetched[MAX_CALLS];
    uint32_t n_fetched, n_released, n_logged, n_kept, n_evicted, n_mass, n_loops, most_lanes;
    char logged[256];
    float mass[8][TOKENS + 8];
    int wrong; /* anything a callback saw that the header rules out */
    colibri_pool_t *pool;
    uint32_t cancel;
    uint64_t progress, tokens[2 * 8];
} host_t;

static void on_log(void *user, int32_t level, const char *message) {
    host_t *h = user;
    h->n_logged++;
    h->wrong |= level != 2;
    snprintf(h->logged, sizeof h->logged, "%s", message);
}

static int32_t on_keep(void *user, uint64_t id, int32_t layer, uint32_t n, uint64_t *keep) {
    host_t *h = user;
    h->wrong |= id != 41 || layer != (int32_t)(h->n_kept++ % h->sample->g.layers) || n > 64;
    for (uint32_t i = 0; i < n; i++) h->wrong |= !(keep[0] >> i & 1);
    for (uint32_t i = 0; i < h->hide_length; i++) keep[0] &= ~((uint64_t)1 << (h->hide_from + i));
    return h->fail_keep;
}

static int32_t on_evict(void *user, uint64_t id, int32_t layer, int32_t expert, uint32_t *start, uint32_t *length) {
    host_t *h = user;
    h->wrong |= id != 41 || layer != (int32_t)(h->n_evicted++ % h->sample->g.layers) || expert != -1;
    *start = h->hide_from, *length = h->hide_length;
    return h->fail_evict;
}

static void on_mass(void *user, uint64_t id, int32_t layer, uint32_t n, const float *mass) {
    host_t *h = user;
    h->wrong |= id != 41 || layer != (int32_t)(h->n_mass++ % h->sample->g.layers) || n > TOKENS + 8;
    memcpy(h->mass[layer], mass, n * sizeof *mass);
}

static const tensor_t *gate_of(const sample_t *s, int32_t layer, uint32_t expert) {
    for (int i = 0; i < s->n; i++)
        if (s->tensors[i].layer == layer && s->tensors[i].expert == (int)expert) return &s->tensors[i];
    abort();
}

static void fill_lease(const host_t *h, int32_t layer, colibri_expert_lease_t *l) {
    const tensor_t *gate = gate_of(h->sample, layer, l->expert); /* gate, up, down follow one another */
    l->data = h->experts + gate->offset;
    l->size = gate[0].bytes + gate[1].bytes + gate[2].bytes;
    l->lease = 1000 + l->expert;
}

static void spoil(colibri_expert_lease_t *l, lease_fault_t fault) {
    if (fault == DATA_NULL) l->data = NULL;
    if (fault == DATA_MISALIGNED) l->data = (const uint8_t *)l->data + 32;
    if (fault == DATA_SHORT) l->size--;
    if (fault == OTHER_EXPERT) l->expert++;
}

static int32_t on_fetch(void *user, int32_t layer, colibri_expert_lease_t *leases, uint32_t n) {
    host_t *h = user;
    call_t *call = &h->fetched[h->n_fetched++];
    h->wrong |= n > 8 || h->n_fetched > MAX_CALLS || h->n_released != h->n_fetched - 1;
    *call = (call_t){layer, n, {0}};
    for (uint32_t i = 0; i < n; i++) {
        h->wrong |= leases[i].struct_size != sizeof *leases || (i && leases[i].expert <= leases[i - 1].expert);
        call->experts[i] = leases[i].expert;
        fill_lease(h, layer, &leases[i]);
    }
    if ((int)h->n_fetched == h->cancel_in_fetch) __atomic_store_n(&h->cancel, 1u, __ATOMIC_RELAXED);
    if (layer != h->fault_layer) return 0;
    spoil(&leases[n - 1], h->fault);
    return h->fault == FETCH_FAILS ? -1 : 0;
}

static void on_release(void *user, int32_t layer, const colibri_expert_lease_t *leases, uint32_t n) {
    host_t *h = user;
    const call_t *call = &h->fetched[h->n_fetched - 1];
    h->wrong |= ++h->n_released != h->n_fetched || layer != call->layer || n != call->n;
    for (uint32_t i = 0; i < n; i++) h->wrong |= leases[i].lease != 1000 + call->experts[i];
}

/* ---- forms of parallel_for ------------------------------------------------------------------------------------- */

static void note_loop(host_t *h, uint32_t n) {
    if (n > h->most_lanes) h->most_lanes = n;
    if ((int)++h->n_loops == h->cancel_in_loop) __atomic_store_n(&h->cancel, 1u, __ATOMIC_RELAXED);
}
static void serial(void *ctx, colibri_task_fn task, void *arg, uint32_t n) {
    note_loop(ctx, n);
    for (uint32_t i = 0; i < n; i++) task(arg, i);
}
static void reversed(void *ctx, colibri_task_fn task, void *arg, uint32_t n) {
    note_loop(ctx, n);
    for (uint32_t i = n; i-- > 0;) task(arg, i);
}
static void pooled(void *ctx, colibri_task_fn task, void *arg, uint32_t n) {
    host_t *h = ctx;
    note_loop(h, n);
    colibri_pool_run(h->pool, task, arg, n);
}

typedef struct lane { colibri_task_fn task; void *arg; uint32_t i; } lane_t;
static void *run_one(void *p) {
    const lane_t *lane = p;
    lane->task(lane->arg, lane->i);
    return NULL;
}
/* A fresh thread for every lane, one after another. */
static void one_by_one(void *ctx, colibri_task_fn task, void *arg, uint32_t n) {
    note_loop(ctx, n);
    for (uint32_t i = 0; i < n; i++) {
        lane_t lane = {task, arg, i};
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_one, &lane)) abort();
        pthread_join(thread, NULL);
    }
}

/* ---- one run: open, a step of TOKENS, a step of one token, close ----------------------------------------------- */

typedef struct run {
    colibri_status_t status; /* of init, or of the first step that failed */
    colibri_model_info_t info;
    float logits[(TOKENS + 1) * 64];
    size_t bytes;            /* of logits that are filled */
} run_t;

typedef struct buffers { colibri_buffer_t view, workspace, kv, output; } buffers_t;

static colibri_status_t step(colibri_model_t *m, buffers_t *b, uint32_t position, uint32_t n, float *out,
                             uint32_t vocab) {
    uint32_t tokens[TOKENS], slabs[SLABS] = {2, 0, 3, 1};
    for (uint32_t i = 0; i < n; i++) tokens[i] = (position + i) * 7 % vocab;
    colibri_sequence_t s = {.struct_size = sizeof s, .n_tokens = n, .tokens = tokens, .position = position, .id = 41,
                            .n_slabs = SLABS, .slabs = slabs};
    b->output = buffer(COLIBRI_OUTPUT, b->output.ptr, (uint64_t)(TOKENS + 1) * vocab * 4);
    colibri_batch_t batch = {.struct_size = sizeof batch, .n_sequences = 1, .sequences = &s, .kv = &b->kv,
                             .workspace = &b->workspace, .output = &b->output};
    colibri_status_t status = colibri_forward(m, &batch, NULL);
    CHECK(b->kv.ref_count == 1 && b->workspace.ref_count == 1 && b->output.ref_count == 1);
    if (!status) memcpy(out, b->output.ptr, (size_t)n * vocab * 4);
    return status;
}

static void steps(colibri_model_t *m, buffers_t *b, run_t *r) {
    uint64_t n = 0;
    r->info.struct_size = sizeof r->info;
    CHECK(!colibri_describe(m, &r->info) && !colibri_workspace_size(m, &n));
    b->workspace = buffer(COLIBRI_WORKSPACE, memory(n), n);
    b->kv = buffer(COLIBRI_KV_CACHE, memory(SLABS * r->info.slab_bytes), SLABS * r->info.slab_bytes);
    b->output.ptr = memory(sizeof r->logits);
    r->status = step(m, b, 0, TOKENS, r->logits, r->info.vocab);
    if (!r->status) r->status = step(m, b, TOKENS, 1, r->logits + TOKENS * r->info.vocab, r->info.vocab);
    r->bytes = (size_t)(TOKENS + 1) * r->info.vocab * 4;
}

static run_t run(const weights_t *w, host_t *h, colibri_config_t c) {
    run_t r = {0};
    colibri_model_t *m = NULL;
    int fetching = c.expert_fetch != NULL;
    colibri_buffer_t files[2] = {buffer(COLIBRI_WEIGHTS, w->file[0], h->sample->file_bytes[0]),
                                 buffer(COLIBRI_WEIGHTS, fetching ? NULL : w->file[1],
                                        fetching ? 0 : h->sample->file_bytes[1])};
    h->experts = w->file[1];
    c.struct_size = sizeof c, c.manifest = h->sample->text, c.manifest_size = h->sample->size;
    c.weights = files, c.n_weights = 2, c.max_tokens = TOKENS, c.max_sequences = 1, c.max_context = SLAB * SLABS;
    c.slab_tokens = SLAB, c.user = h, c.parallel_ctx = h;
    c.progress = &h->progress, c.cancel = &h->cancel, c.expert_tokens = h->tokens;
    buffers_t b = {0};
    uint64_t n = 0;
    CHECK(!colibri_init_size(&c, &n, NULL));
    b.view = buffer(COLIBRI_WORKSPACE, memory(n), n);
    c.view = &b.view;
    r.status = colibri_init(&c, &m, NULL);
    if (m) steps(m, &b, &r);
    colibri_unload(m);
    CHECK(files[0].ref_count == 1 && files[1].ref_count == 1);
    free(b.view.ptr), free(b.workspace.ptr), free(b.kv.ptr), free(b.output.ptr);
    return r;
}

static int same(const run_t *a, const run_t *b) {
    return !a->status && !b->status && a->bytes == b->bytes && !memcmp(a->logits, b->logits, a->bytes);
}

#define RUN(host, ...) run(w, (host), (colibri_config_t){__VA_ARGS__})

/* ---- the checks ------------------------------------------------------------------------------------------------ */

static void test_parallel_for(const sample_t *s, const weights_t *w) {
    static const colibri_parallel_for_fn forms[] = {serial, reversed, one_by_one, pooled};
    host_t h = {.sample = s};
    run_t alone = RUN(&h, .threads = 1);
    uint64_t progress = 0;
    CHECK(!alone.status);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        host_t lanes = {.sample = s};
        CHECK(!colibri_pool_create(THREADS, 0, &lanes.pool));
        run_t r = RUN(&lanes, .threads = THREADS, .parallel_for = forms[i]);
        colibri_pool_destroy(lanes.pool);
        CHECK_MSG(same(&alone, &r), "parallel_for form %zu of %s gives other bytes", i, s->architecture);
        CHECK(lanes.n_loops > 10 && lanes.most_lanes == THREADS);
        if (!i) progress = lanes.progress;
        CHECK(lanes.progress == progress && progress > h.progress / 2); /* one per chunk, on whatever lane */
    }
    host_t none = {.sample = s};
    run_t r = RUN(&none, .threads = THREADS); /* lanes without a parallel_for: serial */
    CHECK(same(&alone, &r));
}

static void test_log(const sample_t *s, const weights_t *w) {
    host_t h = {.sample = s};
    run_t r = RUN(&h, .log = on_log, .isa = COLIBRI_ISA_REF);
    CHECK(!r.status && h.n_logged == 1 && !h.wrong);
    CHECK_MSG(strstr(h.logged, s->architecture) && strstr(h.logged, "ref"), "logged: %s", h.logged);
}

static uint32_t routed(const call_t *call, uint32_t expert) {
    for (uint32_t i = 0; i < call->n; i++)
        if (call->experts[i] == expert) return 1;
    return 0;
}

static void test_fetch(const sample_t *s, const weights_t *w) {
    host_t mapped = {.sample = s}, h = {.sample = s, .fault_layer = -1};
    run_t a = RUN(&mapped, .threads = 1);
    run_t b = RUN(&h, .threads = 1, .expert_fetch = on_fetch, .expert_release = on_release);
    CHECK(same(&a, &b) && !h.wrong);
    CHECK(h.n_fetched == 2 * s->g.layers && h.n_released == h.n_fetched);
    CHECK(!memcmp(mapped.tokens, h.tokens, sizeof h.tokens));
    for (uint32_t layer = 0; layer < s->g.layers; layer++) {
        uint64_t total = 0;
        for (uint32_t e = 0; e < s->g.experts; e++) {
            uint64_t tokens = h.tokens[layer * s->g.experts + e];
            total += tokens;
            CHECK(!tokens == !(routed(&h.fetched[layer], e) | routed(&h.fetched[s->g.layers + layer], e)));
        }
        CHECK(total == (TOKENS + 1) * s->g.top_k);
        CHECK(h.fetched[s->g.layers + layer].n == s->g.top_k); /* the step of one token: exactly its experts */
    }
}

static void test_lease_faults(const sample_t *s, const weights_t *w) {
    for (lease_fault_t fault = FETCH_FAILS; fault <= OTHER_EXPERT; fault++) {
        host_t h = {.sample = s, .fault = fault, .fault_layer = 1};
        run_t r = RUN(&h, .threads = 1, .expert_fetch = on_fetch, .expert_release = on_release);
        CHECK_MSG(r.status == COLIBRI_CALLBACK, "fault %d: status %d", (int)fault, (int)r.status);
        CHECK(h.n_fetched == 2 && !h.wrong);
        CHECK_MSG(h.n_released == (fault == FETCH_FAILS ? 1 : 2), "fault %d: %u releases", (int)fault, h.n_released);
    }
}

/* experts.bin may be absent only if something fetches, and NULL with a size is never right. */
static void test_absent_experts(const sample_t *s, const weights_t *w) {
    host_t h = {.sample = s, .fault_layer = -1};
    uint64_t n;
    colibri_buffer_t files[2] = {buffer(COLIBRI_WEIGHTS, w->file[0], s->file_bytes[0]),
                                 buffer(COLIBRI_WEIGHTS, NULL, 0)};
    colibri_config_t c = {.struct_size = sizeof c, .manifest = s->text, .manifest_size = s->size, .weights = files,
                          .n_weights = 2, .max_tokens = 1, .max_sequences = 1, .max_context = 16, .user = &h};
    CHECK(colibri_init_size(&c, &n, NULL) != COLIBRI_OK);
    c.expert_fetch = on_fetch;
    CHECK(colibri_init_size(&c, &n, NULL) == COLIBRI_INVALID_ARGUMENT); /* fetch without release */
    c.expert_release = on_release;
    CHECK(colibri_init_size(&c, &n, NULL) == COLIBRI_OK);
    files[1].size = s->file_bytes[1];
    CHECK(colibri_init_size(&c, &n, NULL) == COLIBRI_INVALID_ARGUMENT);
}

static void test_evictions(const sample_t *s, const weights_t *w) {
    host_t all = {.sample = s}, idle = all, list = {.sample = s, .hide_from = 3, .hide_length = 9}, range = list;
    run_t whole = RUN(&all, .threads = 1);
    run_t kept = RUN(&list, .threads = 1, .kv_keep = on_keep, .kv_mass = on_mass);
    run_t cut = RUN(&range, .threads = 1, .kv_evict = on_evict);
    run_t nothing = RUN(&idle, .threads = 1, .kv_evict = on_evict, .kv_keep = on_keep);
    CHECK(same(&kept, &cut) && same(&whole, &nothing));
    CHECK(!all.wrong && !list.wrong && !range.wrong && !idle.wrong);
    CHECK(list.n_kept == 2 * s->g.layers && range.n_evicted == 2 * s->g.layers && list.n_mass == 2 * s->g.layers);
    size_t first = (size_t)TOKENS * s->g.vocab; /* a step's own tokens cannot be hidden, the second step's past can */
    CHECK(!memcmp(whole.logits, kept.logits, first * 4));
    CHECK(memcmp(whole.logits + first, kept.logits + first, s->g.vocab * 4));
    CHECK(!strcmp(whole.info.numerics_class, "exact") && !strcmp(kept.info.numerics_class, "evicting"));
    CHECK(!strcmp(cut.info.numerics_class, "evicting"));
    for (uint32_t layer = 0; layer < s->g.layers; layer++) {
        double sum = 0;
        for (uint32_t i = 0; i <= TOKENS; i++) {
            int hidden = i >= 3 && i < 12;
            CHECK(hidden ? list.mass[layer][i] == 0.0f : list.mass[layer][i] > 0.0f);
            sum += list.mass[layer][i];
        }
        CHECK_MSG(sum > s->g.heads - 1e-4 && sum < s->g.heads + 1e-4, "mass of layer %u sums to %g", layer, sum);
    }
}

static void test_eviction_failures(const sample_t *s, const weights_t *w) {
    host_t refused = {.sample = s, .fail_keep = 1}, refused2 = {.sample = s, .fail_evict = -5};
    CHECK(RUN(&refused, .threads = 1, .kv_keep = on_keep).status == COLIBRI_CALLBACK);
    CHECK(RUN(&refused2, .threads = 1, .kv_evict = on_evict).status == COLIBRI_CALLBACK);
    static const uint32_t bad[][2] = {{TOKENS, 1}, {0, TOKENS + 1}, {UINT32_MAX, 2}, {1, UINT32_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        host_t h = {.sample = s, .hide_from = bad[i][0], .hide_length = bad[i][1]};
        CHECK(RUN(&h, .threads = 1, .kv_evict = on_evict).status == COLIBRI_CALLBACK);
    }
}

static void test_cancel(const sample_t *s, const weights_t *w) {
    host_t whole = {.sample = s};
    run_t full = RUN(&whole, .threads = THREADS, .parallel_for = serial);
    CHECK(!full.status && whole.progress > 0 && whole.n_loops > 0);
    uint64_t before = 0;
    for (uint32_t at = 1; at <= whole.n_loops; at++) { /* before each phase of both steps */
        host_t h = {.sample = s, .cancel_in_loop = (int)at, .fault_layer = -1};
        run_t r = RUN(&h, .threads = THREADS, .parallel_for = serial, .expert_fetch = on_fetch,
                      .expert_release = on_release);
        CHECK(r.status == COLIBRI_CANCELLED && h.n_loops == at);
        CHECK(h.progress > before && h.progress <= whole.progress);
        CHECK(h.n_released == h.n_fetched && !h.wrong);
        before = h.progress;
    }
    host_t inside = {.sample = s, .cancel_in_fetch = 1, .fault_layer = -1};
    run_t r = RUN(&inside, .threads = 1, .expert_fetch = on_fetch, .expert_release = on_release);
    CHECK(r.status == COLIBRI_CANCELLED && inside.n_fetched == 1 && inside.n_released == 1 && !inside.wrong);
}

int main(void) {
    for (int i = 0; i < SAMPLES; i++) {
        const sample_t *s = &samples[i];
        build(&samples[i]);
        weights_t made = make_weights(s), *w = &made;
        test_parallel_for(s, w);
        test_log(s, w);
        test_fetch(s, w);
        test_lease_faults(s, w);
        test_absent_experts(s, w);
        test_evictions(s, w);
        test_eviction_failures(s, w);
        test_cancel(s, w);
        free(made.file[0]), free(made.file[1]);
    }
    return report();
}
