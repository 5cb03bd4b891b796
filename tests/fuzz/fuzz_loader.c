/* libFuzzer target of the model loader: any bytes as manifest.json, through both passes of clb_load.
 *
 * Build with clang -fsanitize=fuzzer,address,undefined and the engine's sources, run as
 *     fuzz_loader -dict=tests/fuzz/loader.dict SCRATCH tests/fuzz/corpus/loader
 * (new inputs are written to SCRATCH, a directory of one's own). The seed corpus holds the manifests of
 * tests/unit/engine/loader_samples.h as build() writes them; an input that ever failed belongs there too.
 *
 * The loader compares file sizes and takes addresses within the files but reads none of their bytes. So the buffers
 * here have whatever sizes the manifest claims, which lets the fuzzer past that comparison, and no memory behind
 * them. */
#include "model/manifest.h"
#include <stdlib.h>
#include <string.h>

enum { LARGEST_VIEW = 1 << 26 };

/* Of a model that was accepted: every extent lies within its file, and every table within the view. */
static void check_matrix(const clb_matrix_t *w, const colibri_buffer_t *file, uint64_t start) {
    uint64_t end = start + w->panels * (uint64_t)w->stride;
    if (!w->format || end > file->size || start % COLIBRI_ALIGNMENT) abort();
}

static void check_layer(const struct colibri_model *m, const clb_layer_t *y) {
    const colibri_buffer_t *dense = m->files[0], *experts = m->files[1];
    const uint8_t *base = dense->ptr;
    check_matrix(&y->q, dense, (uint64_t)(y->q.data - base));
    check_matrix(&y->o, dense, (uint64_t)(y->o.data - base));
    if (m->g.experts > 1) check_matrix(&y->router, dense, (uint64_t)(y->router.data - base));
    for (uint32_t e = 0; e < m->g.experts; e++) {
        check_matrix(&y->gate, experts, y->expert_offset[e] + y->gate.offset);
        check_matrix(&y->down, experts, y->expert_offset[e] + y->down.offset);
        if (y->expert_offset[e] + y->expert_bytes > experts->size) abort();
    }
}

static void check_model(const struct colibri_model *m, uint64_t bytes) {
    const uint8_t *base = m->files[0]->ptr;
    check_matrix(&m->embed, m->files[0], (uint64_t)(m->embed.data - base));
    check_matrix(&m->head, m->files[0], (uint64_t)(m->head.data - base));
    if ((const char *)(m->layers + m->g.layers) > (const char *)m + bytes) abort();
    for (uint32_t i = 0; i < m->g.layers; i++) check_layer(m, &m->layers[i]);
}

/* The sizes the manifest gives its files, as far as it can be read. */
static void claim_sizes(const colibri_config_t *config) {
    clb_manifest_t m;
    if (clb_manifest_open(config->manifest, config->manifest_size, &m, NULL)) return;
    for (int i = 0; i < CLB_FILES; i++) config->weights[i].size = m.file_bytes[i];
}

static void load(const colibri_config_t *config) {
    colibri_error_t err = {.struct_size = sizeof err};
    uint64_t bytes = 0, again = 0;
    if (clb_load(config, NULL, &bytes, &err)) {
        if (!err.status || !err.message[0]) abort();
        return;
    }
    if (bytes > LARGEST_VIEW || bytes % COLIBRI_ALIGNMENT) abort(); /* a small manifest needs a small view */
    struct colibri_model *model = aligned_alloc(COLIBRI_ALIGNMENT, bytes);
    if (!clb_load(config, model, &again, &err)) check_model(model, bytes);
    else if (!err.status || !err.message[0]) abort();
    if (again != bytes) abort();
    free(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    colibri_buffer_t files[CLB_FILES] = {
        {.struct_size = sizeof files[0], .ptr = (void *)(uintptr_t)0x10000000},
        {.struct_size = sizeof files[0], .ptr = (void *)(uintptr_t)0x20000000},
    };
    char *text = malloc(size ? size : 1); /* exactly `size` bytes, so that a read beyond them is seen */
    memcpy(text, data, size);
    colibri_config_t config = {.struct_size = sizeof config, .weights = files, .n_weights = CLB_FILES,
                               .manifest = text, .manifest_size = size};
    claim_sizes(&config);
    load(&config);
    free(text);
    return 0;
}
