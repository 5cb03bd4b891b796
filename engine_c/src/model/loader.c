/* From manifest to model view. A manifest is hostile until shown otherwise: every size is recomputed from the geometry,
 * every tensor of the architecture must be there once, and no two extents may share a byte.
 *
 * Each tensor the model needs has a slot: rules in table order, within a rule by layer, then expert. The extent table
 * [slots] tells present from missing and duplicate, and is sorted by (file, offset) at the end to find overlaps. */
#include "../base/checked.h"
#include "../base/fp.h"
#include "manifest.h"
#include "rules.h"
#include <string.h>

enum { ALIGN = 64, EXPERT_ALIGN = 4096, SMALLEST_ENTRY = 64 /* bytes of JSON, a lower bound of a tensor's entry */ };

typedef struct extent {
    uint64_t offset, bytes; /* bytes 0: not seen yet */
    uint32_t slot, file;
} extent_t;

typedef struct loader {
    const colibri_config_t *config;
    colibri_error_t *err;
    clb_manifest_t m;
    uint64_t first[CLB_RULES_MAX + 1]; /* slot of each rule's first tensor; then the number of slots */
    uint64_t layers_at, offsets_at, extents_at, size; /* bytes from the start of the view */
    struct colibri_model *model;
    extent_t *extents;       /* [slots] */
    uint64_t *expert_offset; /* [layers, experts] */
} loader_t;

#define REFUSE_AS(status, l, t, format, ...)                                                                        \
    clb_fail((l)->err, status, "manifest.json: tensors[%u] \"%S\": " format, (t)->index,                            \
             clb_json_clip((t)->name, CLB_NAME_SHOWN).ptr, (int)clb_json_clip((t)->name, CLB_NAME_SHOWN).size, \
             __VA_ARGS__)
#define REFUSE(l, t, ...) REFUSE_AS(COLIBRI_TENSOR, l, t, __VA_ARGS__)

/* ---- slots and the view's size ------------------------------------------------------------------------------- */

/* Tensors of one kind this geometry has. */
static uint64_t tensors_of(const clb_rule_t *rule, const clb_geometry_t *g) {
    if (rule->need == CLB_UNLESS_TIED && g->tied_head) return 0;
    if (rule->need == CLB_IF_ROUTED && g->experts == 1) return 0;
    if (rule->place == CLB_PER_MODEL) return 1;
    return rule->place == CLB_PER_LAYER ? g->layers : (uint64_t)g->layers * g->experts;
}

static colibri_status_t number_slots(loader_t *l) {
    const clb_arch_t *arch = l->m.arch;
    uint64_t n = 0;
    for (uint32_t r = 0; r < arch->n_rules; r++) {
        l->first[r] = n;
        n += tensors_of(&arch->rules[r], &l->m.g);
    }
    l->first[arch->n_rules] = n;
    /* so that a small manifest cannot ask for a large view */
    if (n > l->m.size / SMALLEST_ENTRY || n > UINT32_MAX)
        return clb_fail(l->err, COLIBRI_TENSOR, "manifest.json: the geometry needs %u tensors, more than %u bytes of "
                        "manifest can list", n, l->m.size);
    return COLIBRI_OK;
}

static uint64_t slots(const loader_t *l) { return l->first[l->m.arch->n_rules]; }

/* Reserves n elements after *size bytes: the offset in *at, the new end in *size. */
static int carve(uint64_t *size, uint64_t n, uint64_t element, uint64_t *at) {
    uint64_t bytes;
    *at = *size;
    return clb_mul(n, element, &bytes) || clb_add(*size, bytes, size) || clb_round_up(*size, ALIGN, size);
}

static colibri_status_t plan_view(loader_t *l) {
    const clb_geometry_t *g = &l->m.g;
    uint64_t start;
    l->size = 0;
    if (carve(&l->size, 1, sizeof *l->model, &start) ||
        carve(&l->size, g->layers, sizeof(clb_layer_t), &l->layers_at) ||
        carve(&l->size, (uint64_t)g->layers * g->experts, sizeof(uint64_t), &l->offsets_at) ||
        carve(&l->size, slots(l), sizeof(extent_t), &l->extents_at) || l->size > SIZE_MAX)
        return clb_fail(l->err, COLIBRI_UNSUPPORTED, "the model view would exceed the address space");
    return COLIBRI_OK;
}

/* "role, layer, expert" of a slot. */
typedef struct place {
    const char *role;
    int64_t layer, expert; /* -1 = none */
} place_t;

static place_t place_of(const loader_t *l, uint64_t slot) {
    uint32_t r = 0, experts = l->m.g.experts;
    while (slot >= l->first[r + 1]) r++;
    const clb_rule_t *rule = &l->m.arch->rules[r];
    uint64_t i = slot - l->first[r];
    if (rule->place == CLB_PER_MODEL) return (place_t){rule->role, -1, -1};
    if (rule->place == CLB_PER_LAYER) return (place_t){rule->role, (int64_t)i, -1};
    return (place_t){rule->role, (int64_t)(i / experts), (int64_t)(i % experts)};
}

/* ---- one tensor ---------------------------------------------------------------------------------------------- */

/* A tensor together with what the architecture says about it. */
typedef struct item {
    const clb_tensor_t *t;
    const clb_rule_t *rule;
    uint64_t slot;
    uint32_t dim[2]; /* expected; dim[1] 0 for a vector */
    int format_id;
} item_t;

static colibri_status_t find_rule(const loader_t *l, item_t *item) {
    const clb_arch_t *arch = l->m.arch;
    clb_slice_t shown = clb_json_clip(item->t->role, CLB_NAME_SHOWN);
    uint32_t r = 0;
    while (r < arch->n_rules && !clb_json_equal(item->t->role, arch->rules[r].role)) r++;
    if (r == arch->n_rules)
        return REFUSE(l, item->t, "architecture %s has no role \"%S\"", arch->name, shown.ptr, (int)shown.size);
    item->rule = &arch->rules[r];
    item->slot = l->first[r];
    if (l->first[r] == l->first[r + 1])
        return REFUSE(l, item->t, "unexpected role %s (%s)", item->rule->role,
                      item->rule->need == CLB_UNLESS_TIED ? "tied_head is 1" : "experts is 1");
    return COLIBRI_OK;
}

/* Index `found` must be -1 if the role has none, else below n. */
static int index_fits(int64_t found, int has, uint32_t n) {
    return has ? found >= 0 && found < (int64_t)n : found == -1;
}

static colibri_status_t find_slot(const loader_t *l, item_t *item) {
    const clb_tensor_t *t = item->t;
    const clb_geometry_t *g = &l->m.g;
    clb_place_t place = item->rule->place;
    if (!index_fits(t->layer, place != CLB_PER_MODEL, g->layers))
        return REFUSE(l, t, "layer %d does not fit role %s and %u layers", t->layer, item->rule->role,
                      (uint64_t)g->layers);
    if (!index_fits(t->expert, place == CLB_PER_EXPERT, g->experts))
        return REFUSE(l, t, "expert %d does not fit role %s and %u experts", t->expert, item->rule->role,
                      (uint64_t)g->experts);
    if (place == CLB_PER_LAYER) item->slot += (uint64_t)t->layer;
    if (place == CLB_PER_EXPERT) item->slot += (uint64_t)t->layer * g->experts + (uint64_t)t->expert;
    if (l->extents[item->slot].bytes)
        return REFUSE(l, t, "duplicate of role %s, layer %d, expert %d", item->rule->role, t->layer, t->expert);
    return COLIBRI_OK;
}

static colibri_status_t check_format(const loader_t *l, item_t *item) {
    const clb_tensor_t *t = item->t;
    const char *layout = item->rule->dim1 == CLB_DIM_NONE ? "row" : "panel16";
    clb_slice_t dtype = clb_json_clip(t->dtype, CLB_NAME_SHOWN), shown = clb_json_clip(t->layout, CLB_NAME_SHOWN);
    char name[16];
    int n = clb_json_copy(t->dtype, name, sizeof name);
    item->format_id = n < 0 ? -1 : clb_format_find(name, (size_t)n);
    if (item->format_id < 0)
        return REFUSE_AS(COLIBRI_UNSUPPORTED, l, t, "unknown dtype \"%S\"", dtype.ptr, (int)dtype.size);
    if (item->rule->f32_only && item->format_id != CLB_FMT_f32)
        return REFUSE(l, t, "dtype is %S, role %s must be f32", dtype.ptr, (int)dtype.size, item->rule->role);
    if (!clb_json_equal(t->layout, layout))
        return REFUSE(l, t, "layout is \"%S\", role %s needs \"%s\"", shown.ptr, (int)shown.size, item->rule->role,
                      layout);
    return COLIBRI_OK;
}

static uint32_t dimension(const clb_geometry_t *g, clb_dim_t dim) {
    const uint32_t size[] = {
        [CLB_DIM_NONE] = 0,
        [CLB_DIM_VOCAB] = g->vocab,
        [CLB_DIM_HIDDEN] = g->hidden,
        [CLB_DIM_Q] = g->heads * g->head_dim,
        [CLB_DIM_KV] = g->kv_heads * g->head_dim,
        [CLB_DIM_INTER] = g->inter,
        [CLB_DIM_EXPERTS] = g->experts,
        [CLB_DIM_HALF_HEAD] = g->head_dim / 2,
    };
    return size[dim];
}

static colibri_status_t check_shape(const loader_t *l, item_t *item) {
    const clb_tensor_t *t = item->t;
    const int64_t *found = t->shape.dim;
    uint64_t a = dimension(&l->m.g, item->rule->dim0), b = dimension(&l->m.g, item->rule->dim1);
    item->dim[0] = (uint32_t)a;
    item->dim[1] = (uint32_t)b;
    if (t->shape.n != (b ? 2 : 1))
        return REFUSE(l, t, "shape has %u dimensions, expected %u", t->shape.n, (uint64_t)(b ? 2 : 1));
    if (!b && found[0] != (int64_t)a) return REFUSE(l, t, "shape is [%d], expected [%u]", found[0], a);
    if (b && (found[0] != (int64_t)a || found[1] != (int64_t)b))
        return REFUSE(l, t, "shape is [%d, %d], expected [%u, %u]", found[0], found[1], a, b);
    return COLIBRI_OK;
}

static clb_matrix_t matrix(const item_t *item) {
    const clb_format_t *format = clb_format((uint32_t)item->format_id);
    uint32_t nb = clb_blocks(item->dim[1]);
    return (clb_matrix_t){.format = format, .stride = clb_panel_stride(format, nb), .nb = nb,
                          .format_id = (uint32_t)item->format_id, .rows = item->dim[0], .cols = item->dim[1],
                          .panels = clb_panels(item->dim[0])};
}

static colibri_status_t check_bytes(const loader_t *l, const item_t *item) {
    uint64_t bytes;
    clb_matrix_t w = matrix(item);
    int wraps = item->dim[1] ? clb_mul(w.panels, w.stride, &bytes) : clb_mul(item->dim[0], sizeof(float), &bytes);
    if (wraps || bytes != (uint64_t)item->t->bytes)
        return REFUSE(l, item->t, "\"bytes\" is %d, shape and dtype make %u", item->t->bytes, wraps ? 0 : bytes);
    return COLIBRI_OK;
}

static colibri_status_t check_extent(const loader_t *l, const item_t *item) {
    const clb_tensor_t *t = item->t;
    uint64_t end, file = item->rule->place == CLB_PER_EXPERT ? CLB_FILE_EXPERTS : CLB_FILE_DENSE;
    if ((uint64_t)t->file != file)
        return REFUSE(l, t, "stands in %s, role %s belongs in %s", clb_file_name[t->file], item->rule->role,
                      clb_file_name[file]);
    if (t->offset % ALIGN)
        return REFUSE(l, t, "offset %d in %s is not a multiple of 64", t->offset, clb_file_name[file]);
    if (clb_add((uint64_t)t->offset, (uint64_t)t->bytes, &end) || end > l->m.file_bytes[file])
        return REFUSE(l, t, "offset %d + %d bytes is beyond the end of %s (%u bytes)", t->offset, t->bytes,
                      clb_file_name[file], l->m.file_bytes[file]);
    return COLIBRI_OK;
}

/* Points the view's field at the tensor. Of an expert only the kind of matrix is kept, one for the layer. */
static colibri_status_t set_target(const loader_t *l, const item_t *item) {
    const clb_tensor_t *t = item->t;
    const clb_rule_t *rule = item->rule;
    char *base = rule->place == CLB_PER_MODEL ? (char *)l->model : (char *)&l->model->layers[t->layer];
    void *target = base + rule->target;
    const uint8_t *dense = l->model->files[CLB_FILE_DENSE]->ptr;
    clb_matrix_t w = matrix(item), *kept = target;
    if (rule->dim1 == CLB_DIM_NONE) {
        *(const float **)target = (const float *)(const void *)(dense + t->offset);
        return COLIBRI_OK;
    }
    if (rule->place != CLB_PER_EXPERT) w.data = dense + t->offset;
    else if (kept->format && kept->format != w.format)
        return REFUSE(l, t, "dtype is %s, other experts of layer %d have %s", w.format->name, t->layer,
                      kept->format->name);
    *kept = w;
    return COLIBRI_OK;
}

static colibri_status_t take(const loader_t *l, const clb_tensor_t *t) {
    item_t item = {.t = t};
    colibri_status_t status;
    if ((status = find_rule(l, &item)) || (status = find_slot(l, &item)) || (status = check_format(l, &item)) ||
        (status = check_shape(l, &item)) || (status = check_bytes(l, &item)) || (status = check_extent(l, &item)) ||
        (status = set_target(l, &item)))
        return status;
    l->extents[item.slot] = (extent_t){(uint64_t)t->offset, (uint64_t)t->bytes, (uint32_t)item.slot, (uint32_t)t->file};
    return COLIBRI_OK;
}

static colibri_status_t take_all(const loader_t *l) {
    clb_json_t j = l->m.tensors;
    clb_tensor_t t = {.index = 0};
    colibri_status_t status;
    int more;
    if (clb_json_enter(&j, CLB_JSON_ARRAY)) return clb_fields_fault(&j, (clb_where_t){"tensors", -1}, l->err);
    for (;; t.index++) {
        if ((status = clb_manifest_tensor(&j, &t, &more, l->err)) || !more) return status;
        if ((status = take(l, &t))) return status;
    }
}

/* ---- all tensors together ------------------------------------------------------------------------------------ */

static colibri_status_t check_complete(const loader_t *l) {
    for (uint64_t s = 0; s < slots(l); s++)
        if (!l->extents[s].bytes) {
            place_t p = place_of(l, s);
            return clb_fail(l->err, COLIBRI_TENSOR, "manifest.json: tensor missing: role %s, layer %d, expert %d",
                            p.role, p.layer, p.expert);
        }
    return COLIBRI_OK;
}

/* Checks that expert i (layer * experts + expert) is one aligned extent of consecutive tensors; end = its end. */
static colibri_status_t check_expert(const loader_t *l, uint64_t i, uint64_t *end) {
    const clb_arch_t *arch = l->m.arch;
    const extent_t *before = NULL;
    for (uint32_t r = 0; r < arch->n_rules; r++) {
        if (arch->rules[r].place != CLB_PER_EXPERT) continue;
        const extent_t *x = &l->extents[l->first[r] + i];
        place_t p = place_of(l, l->first[r] + i);
        if (!before && x->offset % EXPERT_ALIGN)
            return clb_fail(l->err, COLIBRI_TENSOR, "experts.bin: role %s, layer %d, expert %d starts at %u, not a "
                            "multiple of 4096", p.role, p.layer, p.expert, x->offset);
        if (before && x->offset != *end)
            return clb_fail(l->err, COLIBRI_TENSOR, "experts.bin: role %s, layer %d, expert %d stands at %u, must "
                            "follow its expert's last tensor at %u", p.role, p.layer, p.expert, x->offset, *end);
        before = x;
        *end = x->offset + x->bytes;
    }
    return COLIBRI_OK;
}

/* Fills the offsets of a layer's experts and of the matrices within an expert. */
static colibri_status_t finish_layer(loader_t *l, uint32_t layer) {
    uint32_t experts = l->m.g.experts;
    uint64_t *offset = l->expert_offset + (uint64_t)layer * experts, end = 0;
    clb_layer_t *y = &l->model->layers[layer];
    if (y->gate.format != y->up.format)
        return clb_fail(l->err, COLIBRI_TENSOR, "manifest.json: layer %u: ffn_gate is %s and ffn_up is %s, must be one "
                        "dtype", (uint64_t)layer, y->gate.format->name, y->up.format->name);
    y->up.offset = (uint64_t)y->gate.panels * y->gate.stride;
    y->down.offset = y->up.offset + (uint64_t)y->up.panels * y->up.stride;
    y->expert_bytes = y->down.offset + (uint64_t)y->down.panels * y->down.stride;
    y->expert_offset = offset;
    for (uint64_t e = 0; e < experts; e++) {
        colibri_status_t status = check_expert(l, (uint64_t)layer * experts + e, &end);
        if (status) return status;
        offset[e] = end - y->expert_bytes;
    }
    if (y->expert_bytes > l->model->expert_bytes) l->model->expert_bytes = y->expert_bytes;
    return COLIBRI_OK;
}

static int before(const extent_t *a, const extent_t *b) {
    return a->file != b->file ? a->file < b->file : a->offset < b->offset;
}

/* Restores the heap below `root`: every parent is at or after its children. */
static void sift(extent_t *x, uint64_t root, uint64_t n) {
    extent_t moved = x[root];
    for (uint64_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && before(&x[child], &x[child + 1])) child++;
        if (!before(&moved, &x[child])) break;
        x[root] = x[child];
    }
    x[root] = moved;
}

static void heap_sort(extent_t *x, uint64_t n) {
    for (uint64_t i = n / 2; i-- > 0;) sift(x, i, n);
    for (uint64_t end = n; end-- > 1;) {
        extent_t last = x[end];
        x[end] = x[0];
        x[0] = last;
        sift(x, 0, end);
    }
}

/* Sorts the extents; slots are no longer their indices afterwards. */
static colibri_status_t check_overlap(const loader_t *l) {
    extent_t *x = l->extents;
    heap_sort(x, slots(l));
    for (uint64_t i = 1; i < slots(l); i++)
        if (x[i].file == x[i - 1].file && x[i].offset < x[i - 1].offset + x[i - 1].bytes) {
            place_t a = place_of(l, x[i - 1].slot), b = place_of(l, x[i].slot);
            return clb_fail(l->err, COLIBRI_TENSOR, "%s: extents overlap: role %s, layer %d, expert %d and role %s, "
                            "layer %d, expert %d at %u", clb_file_name[x[i].file], a.role, a.layer, a.expert, b.role,
                            b.layer, b.expert, x[i].offset);
        }
    return COLIBRI_OK;
}

/* ---- the view ------------------------------------------------------------------------------------------------ */

static colibri_status_t check_file(const loader_t *l, uint32_t i) {
    const colibri_buffer_t *file = clb_weights_at(l->config, i);
    uint64_t need = l->m.file_bytes[i];
    if (i == CLB_FILE_EXPERTS && l->config->expert_fetch && !file->ptr && !file->size) return COLIBRI_OK;
    if (file->size != need)
        return clb_fail(l->err, file->size < need ? COLIBRI_BUFFER_TOO_SMALL : COLIBRI_TENSOR,
                        "%s: the file has %u bytes, the manifest says %u", clb_file_name[i], file->size, need);
    if (!file->ptr) return clb_fail(l->err, COLIBRI_INVALID_ARGUMENT, "%s: the buffer's ptr is NULL", clb_file_name[i]);
    return COLIBRI_OK;
}

static colibri_status_t check_files(const loader_t *l) {
    colibri_status_t status = COLIBRI_OK;
    if (l->config->n_weights != CLB_FILES || !l->config->weights)
        return clb_fail(l->err, COLIBRI_INVALID_ARGUMENT, "config.weights has %u buffers, the model has %u files: "
                        "dense.bin, experts.bin", (uint64_t)l->config->n_weights, (uint64_t)CLB_FILES);
    for (uint32_t i = 0; i < CLB_FILES && !status; i++) status = check_file(l, i);
    return status;
}

/* One slab: layers x (K and V) x kv_heads x slab_tokens rows of hdp elements. */
static colibri_status_t size_slab(const loader_t *l) {
    const clb_geometry_t *g = &l->m.g;
    struct colibri_model *m = l->model;
    uint64_t element = l->config->kv_format == COLIBRI_KV_F32 ? 4 : 2;
    uint64_t tokens = l->config->slab_tokens ? l->config->slab_tokens : 64;
    uint64_t row = m->hdp * element, rows = (uint64_t)g->layers * 2 * g->kv_heads;
    if (clb_mul(rows, tokens, &rows) || clb_mul(rows, row, &m->slab_bytes))
        return clb_fail(l->err, COLIBRI_INVALID_ARGUMENT, "config.slab_tokens: a slab of %u tokens exceeds 64-bit "
                        "sizes", tokens);
    return COLIBRI_OK;
}

static colibri_status_t start_view(loader_t *l) {
    struct colibri_model *m = l->model;
    memset(m, 0, l->size);
    m->g = l->m.g;
    m->arch = l->m.arch;
    m->layers = (clb_layer_t *)(void *)((char *)m + l->layers_at);
    l->expert_offset = (uint64_t *)(void *)((char *)m + l->offsets_at);
    l->extents = (extent_t *)(void *)((char *)m + l->extents_at);
    for (uint32_t i = 0; i < CLB_FILES; i++) {
        m->files[i] = clb_weights_at(l->config, i);
        m->weight_bytes += l->m.file_bytes[i];
    }
    m->experts = l->config->expert_fetch ? NULL : m->files[CLB_FILE_EXPERTS]->ptr;
    m->norm_eps = clb_float(m->g.norm_eps_bits);
    m->hdp = (m->g.head_dim + 15) & ~15u;
    return size_slab(l);
}

static colibri_status_t finish_view(loader_t *l) {
    struct colibri_model *m = l->model;
    colibri_status_t status = check_complete(l);
    for (uint32_t i = 0; i < m->g.layers && !status; i++) status = finish_layer(l, i);
    if (m->g.tied_head) m->head = m->embed;
    return status ? status : check_overlap(l);
}

colibri_status_t clb_load(const colibri_config_t *config, struct colibri_model *model, uint64_t *bytes,
                          colibri_error_t *err) {
    loader_t l = {.config = config, .err = err, .model = model};
    colibri_status_t status;
    if ((status = clb_manifest_open(config->manifest, config->manifest_size, &l.m, err)) ||
        (status = number_slots(&l)) || (status = plan_view(&l)))
        return status;
    *bytes = l.size;
    if (!model) return COLIBRI_OK;
    if ((status = check_files(&l)) || (status = start_view(&l)) || (status = take_all(&l))) return status;
    return finish_view(&l);
}
