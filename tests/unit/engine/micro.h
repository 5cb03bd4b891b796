/* A sample of loader_samples.h as a running model in memory: random weights, KV arena, workspace, output. */
#ifndef MICRO_H
#define MICRO_H
#include "loader_samples.h"

enum { MICRO_TOKENS = 20, MICRO_SLAB = 16, MICRO_SLABS = 3 };

typedef struct micro {
    const sample_t *sample;
    colibri_config_t config;
    colibri_buffer_t weights[2], view, kv, workspace, output, scratch;
    colibri_model_t *model;
} micro_t;

static colibri_buffer_t micro_buffer(colibri_buffer_type_t type, uint64_t size) {
    size_t n = (size_t)(size + 4095) / 4096 * 4096;
    void *p = aligned_alloc(4096, n);
    if (!p) abort();
    memset(p, 0, n);
    return (colibri_buffer_t){.struct_size = sizeof(colibri_buffer_t), .type = type, .ptr = p, .size = size,
                              .alignment = COLIBRI_ALIGNMENT, .ref_count = 1};
}

static void micro_tensor(const tensor_t *t, void *out, unsigned long long *seed) {
    if (!t->cols) {
        int freqs = !strcmp(t->rule->role, "rope_freqs");
        for (uint32_t i = 0; i < t->rows; i++)
            ((float *)out)[i] = freqs ? 1.0f / (float)(1 + i * i) : 1.0f + 0.1f * test_uniform(seed);
        return;
    }
    size_t n = (size_t)t->rows * t->cols;
    float *w = malloc(n * sizeof *w);
    if (!w) abort();
    for (size_t i = 0; i < n; i++) w[i] = test_uniform(seed) * 0.4f;
    CHECK(colibri_panel_pack(clb_format((uint32_t)t->format)->name, t->rows, t->cols, w, out, NULL) == COLIBRI_OK);
    free(w);
}

/* build(sample) must have been called. threads 1 and parallel NULL: serial. */
static void micro_open(micro_t *m, const sample_t *sample, uint32_t isa, uint32_t kv_format, uint32_t threads,
                       colibri_parallel_for_fn parallel, void *ctx) {
    uint64_t bytes = 0;
    unsigned long long seed = 11;
    *m = (micro_t){.sample = sample};
    for (int f = 0; f < 2; f++) m->weights[f] = micro_buffer(COLIBRI_WEIGHTS, sample->file_bytes[f]);
    for (int i = 0; i < sample->n; i++)
        micro_tensor(&sample->tensors[i], (char *)m->weights[sample->tensors[i].file].ptr + sample->tensors[i].offset,
                     &seed);
    m->config = (colibri_config_t){.struct_size = sizeof m->config, .isa = isa, .manifest = sample->text,
                                   .manifest_size = sample->size, .weights = m->weights, .n_weights = 2,
                                   .max_tokens = MICRO_TOKENS, .max_sequences = 1,
                                   .max_context = MICRO_SLABS * MICRO_SLAB, .threads = threads,
                                   .slab_tokens = MICRO_SLAB, .kv_format = kv_format, .parallel_for = parallel,
                                   .parallel_ctx = ctx};
    CHECK(colibri_init_size(&m->config, &bytes, NULL) == COLIBRI_OK);
    m->view = micro_buffer(COLIBRI_WORKSPACE, bytes);
    m->config.view = &m->view;
    if (colibri_init(&m->config, &m->model, NULL) != COLIBRI_OK) abort();
    colibri_model_info_t info = {.struct_size = sizeof info};
    CHECK(colibri_describe(m->model, &info) == COLIBRI_OK);
    CHECK(colibri_workspace_size(m->model, &bytes) == COLIBRI_OK);
    m->workspace = micro_buffer(COLIBRI_WORKSPACE, bytes);
    CHECK(colibri_sample_size(m->model, &bytes) == COLIBRI_OK);
    m->scratch = micro_buffer(COLIBRI_WORKSPACE, bytes);
    m->kv = micro_buffer(COLIBRI_KV_CACHE, MICRO_SLABS * info.slab_bytes);
    m->output = micro_buffer(COLIBRI_OUTPUT, (uint64_t)MICRO_TOKENS * info.vocab * sizeof(float));
}

/* A prefill of MICRO_TOKENS tokens and one more step, under pinned prefix + window if window is set. Logits of the
 * second are at the start of m->output. Calls nothing but colibri_forward. */
static colibri_status_t micro_run(micro_t *m, uint32_t pinned, uint32_t window) {
    uint32_t tokens[MICRO_TOKENS], slabs[MICRO_SLABS] = {2, 0, 1}, last = 5;
    for (uint32_t i = 0; i < MICRO_TOKENS; i++) tokens[i] = (i * 7 + 3) % m->sample->g.vocab;
    colibri_sequence_t seq = {.struct_size = sizeof seq, .n_tokens = MICRO_TOKENS, .tokens = tokens,
                              .n_slabs = MICRO_SLABS, .slabs = slabs, .pinned = pinned, .window = window};
    colibri_batch_t batch = {.struct_size = sizeof batch, .n_sequences = 1, .sequences = &seq, .kv = &m->kv,
                             .workspace = &m->workspace, .output = &m->output};
    colibri_status_t status = colibri_forward(m->model, &batch, NULL);
    if (status || seq.status) return status ? status : (colibri_status_t)seq.status;
    seq.n_tokens = 1, seq.tokens = &last, seq.position = MICRO_TOKENS;
    status = colibri_forward(m->model, &batch, NULL);
    return status ? status : (colibri_status_t)seq.status;
}

static void micro_close(micro_t *m) {
    colibri_buffer_t *all[] = {&m->weights[0], &m->weights[1], &m->view, &m->kv, &m->workspace, &m->output,
                               &m->scratch};
    colibri_unload(m->model);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        CHECK(all[i]->ref_count == 1);
        free(all[i]->ptr);
    }
}
#endif
