/* init, unload and what a handle tells about itself. No arithmetic: checks, then the loader. */
#include "../cpu/features.h"
#include "../ops/routing_table.h"
#include "../ops/step.h"
#include "api.h"
#include <string.h>

uint32_t colibri_abi_version(void) { return COLIBRI_ABI_MAJOR << 16 | COLIBRI_ABI_MINOR; }
const char *colibri_version(void) { return COLIBRI_VERSION; }
uint32_t colibri_best_isa(void) { return clb_cpu_best_isa(); }
const char *colibri_isa_name(uint32_t isa) { return clb_isa_name(isa); }

colibri_status_t clb_model_check(const colibri_model_t *model, colibri_error_t *err) {
    if (!model) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "model is NULL");
    if (model->magic != CLB_MODEL_MAGIC)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "model is not a live handle of this library version");
    return COLIBRI_OK;
}

typedef struct limit { const char *name; size_t offset; uint32_t least, most, step; } limit_t;
static const limit_t limits[] = {
    {"max_tokens", offsetof(colibri_config_t, max_tokens), 1, 1u << 20, 1},
    {"max_sequences", offsetof(colibri_config_t, max_sequences), 1, 1u << 20, 1},
    {"max_context", offsetof(colibri_config_t, max_context), 1, 1u << 30, 1},
    {"max_visible", offsetof(colibri_config_t, max_visible), 1, 1u << 30, 1},
    {"threads", offsetof(colibri_config_t, threads), 1, 1024, 1},
    {"slab_tokens", offsetof(colibri_config_t, slab_tokens), 16, 1u << 16, 16},
    {"kv_format", offsetof(colibri_config_t, kv_format), 0, COLIBRI_KV_F32, 1},
    {"isa", offsetof(colibri_config_t, isa), 0, COLIBRI_ISA_AVX512, 1},
};

static colibri_status_t check_limits(const colibri_config_t *c, colibri_error_t *err) {
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        const limit_t *l = &limits[i];
        uint32_t v;
        memcpy(&v, (const uint8_t *)c + l->offset, sizeof v);
        if (v < l->least || v > l->most || v % l->step)
            return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "config.%s is %u; it must be %u..%u in steps of %u", l->name,
                            (uint64_t)v, (uint64_t)l->least, (uint64_t)l->most, (uint64_t)l->step);
    }
    return COLIBRI_OK;
}

/* The caller's config in this library's version of the struct, with defaults filled in. */
static colibri_status_t read_config(const colibri_config_t *config, colibri_config_t *c, colibri_error_t *err) {
    CLB_TRY(clb_struct_check(config, CLB_MIN_CONFIG, "config", err));
    clb_struct_read(c, sizeof *c, config);
    if (!c->threads) c->threads = 1;
    if (!c->slab_tokens) c->slab_tokens = 64;
    if (!c->max_visible) c->max_visible = c->max_context;
    if (c->max_visible > c->max_context) c->max_visible = c->max_context;
    CLB_TRY(check_limits(c, err));
    if (!c->manifest || !c->manifest_size)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "config.manifest is NULL or empty");
    if (!c->expert_fetch != !c->expert_release)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "config.expert_fetch and expert_release go together");
    return COLIBRI_OK;
}

static colibri_status_t choose_isa(colibri_config_t *c, colibri_error_t *err) {
    uint32_t best = clb_cpu_best_isa();
    if (c->isa == COLIBRI_ISA_AUTO) c->isa = best;
    if (c->isa > best)
        return clb_fail(err, COLIBRI_CPU, "config.isa asks for %s; this CPU and system support up to %s",
                        clb_isa_name(c->isa), clb_isa_name(best));
    return COLIBRI_OK;
}

static colibri_status_t check_files(const colibri_config_t *c, colibri_error_t *err) {
    if (!c->weights || c->n_weights != 2)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "config.weights must hold 2 buffers: dense.bin, experts.bin");
    CLB_TRY(clb_buffer_check(c->weights, "weights[0] (dense.bin)", COLIBRI_WEIGHTS, 1, err));
    const colibri_buffer_t *experts = clb_weights_at(c, 1);
    CLB_TRY(clb_struct_check(experts, CLB_MIN_BUFFER, "weights[1] (experts.bin)", err));
    int absent = c->expert_fetch && !experts->ptr;
    return clb_buffer_check(experts, "weights[1] (experts.bin)", COLIBRI_WEIGHTS, absent ? 0 : 1, err);
}

colibri_status_t colibri_init_size(const colibri_config_t *config, uint64_t *bytes, colibri_error_t *err) {
    colibri_config_t c;
    if (!bytes) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "bytes is NULL");
    CLB_TRY(read_config(config, &c, err));
    CLB_TRY(check_files(&c, err));
    return clb_load(&c, NULL, bytes, err);
}

static void tell(const colibri_model_t *m) {
    colibri_error_t line = {.struct_size = sizeof line}; /* the formatter, used for a message that is no error */
    if (!m->config.log) return;
    clb_fail(&line, COLIBRI_OK, "architecture %s, instruction set %s, %u threads", m->arch->name,
             clb_isa_name(m->config.isa), (uint64_t)m->config.threads);
    m->config.log(m->config.user, 2, line.message);
}

static colibri_status_t check_workspace(const colibri_model_t *m, colibri_error_t *err) {
    if (clb_workspace_bytes(m) == UINT64_MAX)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT,
                        "the workspace would exceed 2^64 bytes: lower config.max_tokens, max_context or threads");
    return COLIBRI_OK;
}

colibri_status_t colibri_init(const colibri_config_t *config, colibri_model_t **model, colibri_error_t *err) {
    colibri_config_t c;
    uint64_t bytes = 0;
    if (!model) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "model is NULL");
    *model = NULL;
    CLB_TRY(read_config(config, &c, err));
    CLB_TRY(choose_isa(&c, err));
    CLB_TRY(check_files(&c, err));
    CLB_TRY(clb_load(&c, NULL, &bytes, err));
    CLB_TRY(clb_buffer_check(c.view, "view", COLIBRI_WORKSPACE, bytes, err));
    colibri_model_t *m = c.view->ptr;
    CLB_TRY(clb_load(&c, m, &bytes, err));
    m->view = c.view;
    m->config = c;
    m->config.manifest = NULL;
    m->config.weights = NULL;
    clb_kernels_fill(&m->kernels, c.isa);
    CLB_TRY(check_workspace(m, err));
    for (int i = 0; i < 2; i++) clb_buffer_acquire(m->files[i]);
    clb_buffer_acquire(m->view);
    m->magic = CLB_MODEL_MAGIC;
    tell(m);
    *model = m;
    return COLIBRI_OK;
}

void colibri_unload(colibri_model_t *m) {
    if (!m || m->magic != CLB_MODEL_MAGIC) return;
    m->magic = 0;
    for (int i = 0; i < 2; i++) clb_buffer_release(m->files[i]);
    clb_buffer_release(m->view); /* last: from here on the caller may free the view */
}

colibri_status_t colibri_describe(const colibri_model_t *m, colibri_model_info_t *info) {
    CLB_TRY(clb_model_check(m, NULL));
    CLB_TRY(clb_struct_check(info, CLB_MIN_INFO, "info", NULL));
    const clb_geometry_t *g = &m->g;
    colibri_model_info_t own = {
        .struct_size = info->struct_size, .vocab = g->vocab, .hidden = g->hidden, .layers = g->layers,
        .heads = g->heads, .kv_heads = g->kv_heads, .head_dim = g->head_dim, .inter = g->inter,
        .experts = g->experts, .top_k = g->top_k, .context = g->context, .pinned = 0, .window = g->window,
        .slab_tokens = m->config.slab_tokens, .isa = m->config.isa, .slab_bytes = m->slab_bytes,
        .weight_bytes = m->weight_bytes, .expert_bytes = m->expert_bytes, .architecture = m->arch->name,
        .isa_name = clb_isa_name(m->config.isa),
        .numerics_class = m->config.kv_evict || m->config.kv_keep ? "evicting" : "exact",
    };
    uint32_t size = info->struct_size;
    if (size > sizeof own) memset((uint8_t *)info + sizeof own, 0, size - sizeof own);
    memcpy(info, &own, size < sizeof own ? size : sizeof own);
    return COLIBRI_OK;
}

uint64_t clb_workspace_bytes(const colibri_model_t *m) {
    clb_arena_t counting = {NULL, 0};
    clb_step_t st;
    clb_step_layout(&st, m, &counting);
    return counting.used;
}

colibri_status_t colibri_workspace_size(const colibri_model_t *m, uint64_t *bytes) {
    CLB_TRY(clb_model_check(m, NULL));
    if (!bytes) return COLIBRI_INVALID_ARGUMENT;
    *bytes = clb_workspace_bytes(m);
    return COLIBRI_OK;
}

colibri_status_t colibri_routing_size(const colibri_model_t *m, uint64_t *bytes) {
    CLB_TRY(clb_model_check(m, NULL));
    if (!bytes || clb_routing_bytes(m, bytes)) return COLIBRI_INVALID_ARGUMENT;
    return COLIBRI_OK;
}
