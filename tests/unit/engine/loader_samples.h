/* Manifests of small models, built from the architecture's rules: what test_loader.c edits and damages. build() has to
 * be called once for each sample. */
#ifndef LOADER_SAMPLES_H
#define LOADER_SAMPLES_H
#include "model/manifest.h"
#include "model/rules.h"
#include "test.h"
#include <stdarg.h>

enum { MAX_TENSORS = 64, MAX_TEXT = 1 << 15 };

typedef struct tensor {
    const clb_rule_t *rule;
    char name[40];
    int layer, expert, file, format;
    uint32_t rows, cols;
    uint64_t offset, bytes;
} tensor_t;

typedef struct sample {
    const char *architecture;
    clb_geometry_t g;
    const char *dense_format, *gate_format, *down_format;
    tensor_t tensors[MAX_TENSORS];
    int n;
    uint64_t file_bytes[CLB_FILES];
    char text[MAX_TEXT];
    size_t size;
} sample_t;

#define GEOMETRY .vocab = 40, .hidden = 48, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 12, .inter = 80, \
    .context = 256, .norm_eps_bits = 0x3727c5ac
static sample_t samples[] = {
    {.architecture = "mixtral", .g = {GEOMETRY, .experts = 3, .top_k = 2}, .dense_format = "q8", .gate_format = "q4",
     .down_format = "q8"},
    {.architecture = "mixtral", .g = {GEOMETRY, .experts = 2, .top_k = 1, .window = 64, .tied_head = 1},
     .dense_format = "f32", .gate_format = "bf16", .down_format = "bf16"},
    {.architecture = "llama", .g = {GEOMETRY, .experts = 1, .top_k = 1}, .dense_format = "f16", .gate_format = "f16",
     .down_format = "f16"},
    {.architecture = "llama", .g = {GEOMETRY, .experts = 1, .top_k = 1, .tied_head = 1}, .dense_format = "q4",
     .gate_format = "q4", .down_format = "q4"},
};
enum { SAMPLES = sizeof samples / sizeof *samples };

static uint32_t dimension(const clb_geometry_t *g, clb_dim_t dim) {
    switch (dim) {
    case CLB_DIM_VOCAB: return g->vocab;
    case CLB_DIM_HIDDEN: return g->hidden;
    case CLB_DIM_Q: return g->heads * g->head_dim;
    case CLB_DIM_KV: return g->kv_heads * g->head_dim;
    case CLB_DIM_INTER: return g->inter;
    case CLB_DIM_EXPERTS: return g->experts;
    case CLB_DIM_HALF_HEAD: return g->head_dim / 2;
    default: return 0;
    }
}

static const char *format_of(const sample_t *s, const clb_rule_t *rule) {
    if (rule->f32_only) return "f32";
    if (rule->place != CLB_PER_EXPERT) return s->dense_format;
    return strcmp(rule->role, "ffn_down") ? s->gate_format : s->down_format;
}

static void add(sample_t *s, const clb_rule_t *rule, int layer, int expert) {
    tensor_t *t = &s->tensors[s->n++];
    *t = (tensor_t){.rule = rule, .layer = layer, .expert = expert, .file = rule->place == CLB_PER_EXPERT,
                    .rows = dimension(&s->g, rule->dim0), .cols = dimension(&s->g, rule->dim1)};
    int n = snprintf(t->name, sizeof t->name, "%s", rule->role);
    if (layer >= 0) n += snprintf(t->name + n, sizeof t->name - (size_t)n, ".%d", layer);
    if (expert >= 0) snprintf(t->name + n, sizeof t->name - (size_t)n, ".%d", expert);
    const char *format = format_of(s, rule);
    t->format = clb_format_find(format, strlen(format));
    t->bytes = t->cols ? clb_panels(t->rows) * clb_panel_stride(clb_format((uint32_t)t->format), clb_blocks(t->cols))
                       : 4 * t->rows;
    uint64_t *end = &s->file_bytes[t->file], unit = !strcmp(rule->role, "ffn_gate") ? 4096 : 64;
    t->offset = (*end + unit - 1) / unit * unit;
    *end = t->offset + t->bytes;
}

static void add_all(sample_t *s, clb_place_t place, int layer, int expert) {
    for (int r = 0; r < CLB_DECODER_N_RULES; r++) {
        const clb_rule_t *rule = &clb_decoder_rules[r];
        int absent = (rule->need == CLB_UNLESS_TIED && s->g.tied_head) ||
                     (rule->need == CLB_IF_ROUTED && s->g.experts == 1);
        if (rule->place == place && !absent) add(s, rule, layer, expert);
    }
}

__attribute__((format(printf, 2, 3)))
static void print(sample_t *s, const char *format, ...) {
    va_list args;
    va_start(args, format);
    s->size += (size_t)vsnprintf(s->text + s->size, sizeof s->text - s->size, format, args);
    va_end(args);
}

static void print_tensor(sample_t *s, const tensor_t *t) {
    print(s, "{\"name\":\"%s\",\"role\":\"%s\",\"layer\":%d,\"expert\":%d,\"dtype\":\"%s\",\"layout\":\"%s\",", t->name,
          t->rule->role, t->layer, t->expert, clb_format((uint32_t)t->format)->name, t->cols ? "panel16" : "row");
    print(s, t->cols ? "\"shape\":[%u,%u]," : "\"shape\":[%u],", t->rows, t->cols);
    print(s, "\"file\":%d,\"offset\":%llu,\"bytes\":%llu,\"sha256\":\"\"}", t->file, (unsigned long long)t->offset,
          (unsigned long long)t->bytes);
}

static void build(sample_t *s) {
    const clb_geometry_t *g = &s->g;
    add_all(s, CLB_PER_MODEL, -1, -1);
    for (int l = 0; l < (int)g->layers; l++) {
        add_all(s, CLB_PER_LAYER, l, -1);
        for (int e = 0; e < (int)g->experts; e++) add_all(s, CLB_PER_EXPERT, l, e);
    }
    print(s, "{\"format\":\"colibri\",\"version\":1,\"architecture\":\"%s\",\"name\":\"test\",\n\"geometry\":{"
          "\"vocab\":%u,\"hidden\":%u,\"layers\":%u,\"heads\":%u,\"kv_heads\":%u,\"head_dim\":%u,\"inter\":%u,",
          s->architecture, g->vocab, g->hidden, g->layers, g->heads, g->kv_heads, g->head_dim, g->inter);
    print(s, "\"experts\":%u,\"top_k\":%u,\"context\":%u,\"window\":%u,\"norm_eps_bits\":%u,\"tied_head\":%u},\n",
          g->experts, g->top_k, g->context, g->window, g->norm_eps_bits, g->tied_head);
    print(s, "\"files\":[{\"name\":\"dense.bin\",\"bytes\":%llu},{\"name\":\"experts.bin\",\"bytes\":%llu}],\n",
          (unsigned long long)s->file_bytes[0], (unsigned long long)s->file_bytes[1]);
    print(s, "\"tensors\":[");
    for (int i = 0; i < s->n; i++) {
        print(s, i ? ",\n" : "\n");
        print_tensor(s, &s->tensors[i]);
    }
    print(s, "]}\n");
}
#endif
