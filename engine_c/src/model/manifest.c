/* See manifest.h. The tables below are the container's keys and limits (CONTAINER.md). */
#include "manifest.h"
#include <string.h>

const char *const clb_file_name[CLB_FILES] = {"dense.bin", "experts.bin"};

#define FIELD(type, key, kind, min, max) {#key, CLB_FIELD_##kind, 1, offsetof(type, key), min, max}
#define UNREAD(key) {#key, CLB_FIELD_UNREAD, 0, 0, 0, 0}
#define COUNT(table) (sizeof(table) / sizeof(table)[0])

static const clb_field_t manifest_fields[] = {
    FIELD(clb_manifest_t, format, TEXT, 0, 0),
    FIELD(clb_manifest_t, version, I64, 0, CLB_INT_MAX),
    FIELD(clb_manifest_t, architecture, TEXT, 0, 0),
    FIELD(clb_manifest_t, geometry, VALUE, 0, 0),
    FIELD(clb_manifest_t, files, VALUE, 0, 0),
    FIELD(clb_manifest_t, tensors, VALUE, 0, 0),
    UNREAD(name), UNREAD(model_id), UNREAD(quantization), UNREAD(created_by),
};

/* What is beyond these is a damaged or hostile file, not a model. They keep every size computed from a geometry far
 * from 2^64; products of two are checked against LARGEST_ROW as well. */
enum { LARGEST_ROW = 1 << 20 };
static const clb_field_t geometry_fields[] = {
    FIELD(clb_geometry_t, vocab, U32, 1, 1 << 24),
    FIELD(clb_geometry_t, hidden, U32, 1, LARGEST_ROW),
    FIELD(clb_geometry_t, layers, U32, 1, 4096),
    FIELD(clb_geometry_t, heads, U32, 1, LARGEST_ROW),
    FIELD(clb_geometry_t, kv_heads, U32, 1, LARGEST_ROW),
    FIELD(clb_geometry_t, head_dim, U32, 2, 1024),
    FIELD(clb_geometry_t, inter, U32, 1, LARGEST_ROW),
    FIELD(clb_geometry_t, experts, U32, 1, 65536),
    FIELD(clb_geometry_t, top_k, U32, 1, 64),
    FIELD(clb_geometry_t, context, U32, 1, (int64_t)1 << 31),
    FIELD(clb_geometry_t, window, U32, 0, (int64_t)1 << 31),
    FIELD(clb_geometry_t, norm_eps_bits, U32, 1, 0x3f800000), /* positive floats sort as their bits: (0, 1.0f] */
    FIELD(clb_geometry_t, tied_head, U32, 0, 1),
};

typedef struct file_entry {
    clb_slice_t name;
    int64_t bytes;
} file_entry_t;
static const clb_field_t file_fields[] = {
    FIELD(file_entry_t, name, TEXT, 0, 0),
    FIELD(file_entry_t, bytes, I64, 1, CLB_INT_MAX),
};

static const clb_field_t tensor_fields[] = {
    FIELD(clb_tensor_t, name, TEXT, 0, 0),
    FIELD(clb_tensor_t, role, TEXT, 0, 0),
    FIELD(clb_tensor_t, layer, I64, -1, CLB_INT_MAX),
    FIELD(clb_tensor_t, expert, I64, -1, CLB_INT_MAX),
    FIELD(clb_tensor_t, dtype, TEXT, 0, 0),
    FIELD(clb_tensor_t, layout, TEXT, 0, 0),
    FIELD(clb_tensor_t, shape, DIMS, 0, CLB_INT_MAX),
    FIELD(clb_tensor_t, file, I64, 0, CLB_FILES - 1),
    FIELD(clb_tensor_t, offset, I64, 0, CLB_INT_MAX),
    FIELD(clb_tensor_t, bytes, I64, 1, CLB_INT_MAX),
    UNREAD(sha256),
};
_Static_assert(COUNT(manifest_fields) <= CLB_FIELDS_MAX && COUNT(geometry_fields) <= CLB_FIELDS_MAX &&
               COUNT(tensor_fields) <= CLB_FIELDS_MAX, "clb_fields_read keeps one bit per field");

static colibri_status_t read_top(const char *text, uint64_t size, clb_manifest_t *m, colibri_error_t *err) {
    const clb_where_t top = {"top level", -1};
    clb_json_t j = clb_json_open(text, size);
    colibri_status_t status = clb_fields_read(&j, manifest_fields, COUNT(manifest_fields), 1, top, m, err);
    if (status) return status;
    return clb_json_end(&j) ? clb_fields_fault(&j, top, err) : COLIBRI_OK;
}

static colibri_status_t check_identity(clb_manifest_t *m, colibri_error_t *err) {
    char name[32];
    int n = clb_json_copy(m->architecture, name, sizeof name);
    clb_slice_t shown = clb_json_clip(m->architecture, CLB_NAME_SHOWN);
    if (!clb_json_equal(m->format, "colibri"))
        return clb_fail(err, COLIBRI_MANIFEST, "manifest.json: \"format\" is not \"colibri\"");
    if (m->version != 1)
        return clb_fail(err, COLIBRI_UNSUPPORTED, "manifest.json: container version %d, this library reads version 1",
                        m->version);
    m->arch = n < 0 ? NULL : clb_arch_find(name, (size_t)n);
    if (!m->arch)
        return clb_fail(err, COLIBRI_UNSUPPORTED, "manifest.json: unknown \"architecture\" \"%S\"", shown.ptr,
                        (int)shown.size);
    return COLIBRI_OK;
}

/* What fields contradict each other, or NULL. */
static const char *contradiction(const clb_geometry_t *g) {
    if (g->head_dim % 2) return "head_dim is odd";
    if (g->heads % g->kv_heads) return "heads is not a multiple of kv_heads";
    if ((uint64_t)g->heads * g->head_dim > LARGEST_ROW) return "heads * head_dim exceeds 2^20";
    if (g->top_k > g->experts) return "top_k exceeds experts";
    return NULL;
}

static colibri_status_t read_geometry(clb_manifest_t *m, colibri_error_t *err) {
    colibri_status_t status = clb_fields_read(&m->geometry, geometry_fields, COUNT(geometry_fields), 0,
                                              (clb_where_t){"geometry", -1}, &m->g, err);
    if (status) return status;
    const char *wrong = contradiction(&m->g);
    if (wrong) return clb_fail(err, COLIBRI_MANIFEST, "manifest.json: geometry: %s", wrong);
    wrong = m->arch->check ? m->arch->check(&m->g) : NULL;
    if (wrong)
        return clb_fail(err, COLIBRI_UNSUPPORTED, "manifest.json: geometry: architecture %s: %s", m->arch->name, wrong);
    return COLIBRI_OK;
}

static colibri_status_t read_file(clb_manifest_t *m, int64_t i, colibri_error_t *err) {
    file_entry_t file = {0};
    colibri_status_t status = clb_fields_read(&m->files, file_fields, COUNT(file_fields), 0, (clb_where_t){"files", i},
                                              &file, err);
    if (status) return status;
    if (!clb_json_equal(file.name, clb_file_name[i]))
        return clb_fail(err, COLIBRI_MANIFEST, "manifest.json: files[%u]: \"name\" must be \"%s\"", (uint64_t)i,
                        clb_file_name[i]);
    m->file_bytes[i] = (uint64_t)file.bytes;
    return COLIBRI_OK;
}

static colibri_status_t read_files(clb_manifest_t *m, colibri_error_t *err) {
    int64_t n = 0;
    int more;
    if (clb_json_enter(&m->files, CLB_JSON_ARRAY)) return clb_fields_fault(&m->files, (clb_where_t){"files", -1}, err);
    while ((more = clb_json_next(&m->files, NULL)) > 0 && n < CLB_FILES) {
        colibri_status_t status = read_file(m, n++, err);
        if (status) return status;
    }
    if (more || n != CLB_FILES)
        return clb_fail(err, COLIBRI_MANIFEST, "manifest.json: files: there must be exactly dense.bin and experts.bin");
    return COLIBRI_OK;
}

colibri_status_t clb_manifest_open(const char *text, uint64_t size, clb_manifest_t *m, colibri_error_t *err) {
    colibri_status_t status;
    memset(m, 0, sizeof *m);
    if (!size) return clb_fail(err, COLIBRI_MANIFEST, "manifest.json is empty");
    if (!text) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "config.manifest is NULL");
    m->size = size;
    if ((status = read_top(text, size, m, err)) || (status = check_identity(m, err)) ||
        (status = read_geometry(m, err)))
        return status;
    return read_files(m, err);
}

colibri_status_t clb_manifest_tensor(clb_json_t *j, clb_tensor_t *t, int *more, colibri_error_t *err) {
    *more = clb_json_next(j, NULL);
    if (*more <= 0) return *more < 0 ? clb_fields_fault(j, (clb_where_t){"tensors", -1}, err) : COLIBRI_OK;
    return clb_fields_read(j, tensor_fields, COUNT(tensor_fields), 1, (clb_where_t){"tensors", (int64_t)t->index}, t,
                           err);
}
