/* The usage sketch of colibri.h, complete: generate MODEL_DIR STEPS TOKEN...
 * Prefills the token ids, then prints STEPS greedily chosen ones. Exit code 1: the model or a step failed, 2: usage. */
#include "colibri.h"
#include "host/machine.h"
#include "host/map.h"
#include "host/pool.h"
#include <stdio.h>
#include <stdlib.h>

enum { CHUNK = 256 }; /* most tokens of one step */

typedef struct session {
    colibri_host_model_t files;
    colibri_pool_t *pool;
    colibri_model_t *model;
    colibri_buffer_t view, workspace, scratch, kv, output;
    uint32_t *tokens, *slabs, n_slabs; /* [length]: prompt and what was drawn; [n_slabs] */
    colibri_model_info_t info;
    colibri_error_t err;
} session_t;

static int fail(session_t *s, const char *why) {
    snprintf(s->err.message, sizeof s->err.message, "%s", why);
    return -1;
}

/* 64-byte-aligned memory behind a buffer. */
static int allocate(colibri_buffer_t *b, uint32_t type, uint64_t size) {
    size = (size + 63) / 64 * 64;
    *b = (colibri_buffer_t){.struct_size = sizeof *b, .type = type, .ptr = aligned_alloc(64, size), .size = size,
                            .alignment = 64, .ref_count = 1};
    return b->ptr ? 0 : -1;
}

static int open_model(session_t *s, const char *folder, uint32_t length) {
    uint32_t threads = colibri_host_threads();
    if (colibri_host_load(folder, COLIBRI_MAP_DEFAULT, &s->files, &s->err)) return -1;
    if (colibri_pool_create(threads, 0, &s->pool)) return -1;
    colibri_config_t config = {.struct_size = sizeof config, .manifest = s->files.manifest,
                               .manifest_size = s->files.manifest_size, .weights = s->files.weights,
                               .n_weights = s->files.n_weights, .max_tokens = CHUNK, .max_sequences = 1,
                               .max_context = length, .threads = threads, .parallel_for = colibri_pool_run,
                               .parallel_ctx = s->pool, .view = &s->view};
    uint64_t size;
    return colibri_host_isa(&config.isa, &s->err) || colibri_init_size(&config, &size, &s->err) ||
           allocate(&s->view, COLIBRI_WORKSPACE, size) || colibri_init(&config, &s->model, &s->err);
}

static int allocate_all(session_t *s, uint32_t length) {
    uint64_t workspace, scratch;
    if (colibri_describe(s->model, &s->info) || colibri_workspace_size(s->model, &workspace) ||
        colibri_sample_size(s->model, &scratch))
        return -1;
    s->n_slabs = (length + s->info.slab_tokens - 1) / s->info.slab_tokens;
    if (!(s->slabs = malloc(s->n_slabs * sizeof *s->slabs))) return -1;
    for (uint32_t i = 0; i < s->n_slabs; i++) s->slabs[i] = i; /* the arena is this sequence's alone */
    return allocate(&s->workspace, COLIBRI_WORKSPACE, workspace) || allocate(&s->scratch, COLIBRI_WORKSPACE, scratch) ||
           allocate(&s->kv, COLIBRI_KV_CACHE, s->n_slabs * s->info.slab_bytes) ||
           allocate(&s->output, COLIBRI_OUTPUT, (uint64_t)s->info.vocab * sizeof(float));
}

/* Computes tokens [position, position + n) in chunks; logits of the last are left in output. */
static int forward(session_t *s, uint32_t position, uint32_t n) {
    while (n) {
        uint32_t now = n < CHUNK ? n : CHUNK;
        colibri_sequence_t sequence = {.struct_size = sizeof sequence, .n_tokens = now, .tokens = s->tokens + position,
                                       .position = position, .logits_from = now == n ? now - 1 : now,
                                       .n_slabs = s->n_slabs, .slabs = s->slabs,
                                       .pinned = s->info.pinned, .window = s->info.window}; /* its own attention */
        colibri_batch_t batch = {.struct_size = sizeof batch, .n_sequences = 1, .sequences = &sequence, .kv = &s->kv,
                                 .workspace = &s->workspace, .output = &s->output};
        if (colibri_forward(s->model, &batch, &s->err)) return -1;
        if (sequence.status) return fail(s, colibri_status_text(sequence.status));
        position += now, n -= now;
    }
    return 0;
}

static int generate(session_t *s, uint32_t n_prompt, uint32_t steps) {
    colibri_sampling_t greedy = {.struct_size = sizeof greedy};
    colibri_sample_t sample = {.struct_size = sizeof sample};
    uint32_t done = 0;
    for (uint32_t length = n_prompt; length < n_prompt + steps; length++) {
        if (forward(s, done, length - done)) return -1;
        done = greedy.position = length;
        if (colibri_sample(s->model, &greedy, s->output.ptr, &s->scratch, &sample, &s->err)) return -1;
        s->tokens[length] = sample.token;
        printf("%u%c", sample.token, length + 1 < n_prompt + steps ? ' ' : '\n');
        if (fflush(stdout)) return fail(s, "cannot write the output");
    }
    return 0;
}

static void close_all(session_t *s) {
    colibri_unload(s->model);
    colibri_pool_destroy(s->pool);
    colibri_host_unload(&s->files, NULL);
    free(s->view.ptr), free(s->workspace.ptr), free(s->scratch.ptr), free(s->kv.ptr), free(s->output.ptr);
    free(s->tokens), free(s->slabs);
}

/* A decimal number below 2^31, or UINT32_MAX: no token has that id. */
static uint32_t number(const char *text) {
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    return *text < '0' || *text > '9' || *end || value > INT32_MAX ? UINT32_MAX : (uint32_t)value;
}

int main(int argc, char **argv) {
    uint32_t n_prompt = argc > 3 ? (uint32_t)argc - 3 : 0, steps = n_prompt ? number(argv[2]) : 0;
    if (!steps || steps > INT32_MAX - n_prompt) return fputs("usage: generate MODEL_DIR STEPS TOKEN...\n", stderr), 2;
    session_t s = {.err.struct_size = sizeof s.err, .info.struct_size = sizeof s.info};
    s.tokens = malloc(((size_t)n_prompt + steps) * sizeof *s.tokens);
    for (uint32_t i = 0; s.tokens && i < n_prompt; i++) s.tokens[i] = number(argv[3 + i]);
    int failed = !s.tokens || open_model(&s, argv[1], n_prompt + steps) || allocate_all(&s, n_prompt + steps) ||
                 generate(&s, n_prompt, steps);
    if (failed) fprintf(stderr, "generate: %s\n", *s.err.message ? s.err.message : "out of memory or threads");
    return close_all(&s), failed;
}
