/* See fields.h. */
#include "fields.h"

typedef struct reader {
    clb_json_t *j;
    clb_where_t where;
    colibri_error_t *err;
} reader_t;

/* Fails with "manifest.json: PART: ..." or "manifest.json: PART[INDEX]: ...". */
#define FAIL(r, format, ...)                                                                                 \
    ((r)->where.index < 0                                                                                    \
         ? clb_fail((r)->err, COLIBRI_MANIFEST, "manifest.json: %s: " format, (r)->where.part, __VA_ARGS__)  \
         : clb_fail((r)->err, COLIBRI_MANIFEST, "manifest.json: %s[%u]: " format, (r)->where.part,           \
                    (uint64_t)(r)->where.index, __VA_ARGS__))

static colibri_status_t fail_key(const reader_t *r, clb_slice_t key, const char *what) {
    key = clb_json_clip(key, CLB_NAME_SHOWN);
    return FAIL(r, "key \"%S\" %s", key.ptr, (int)key.size, what);
}

/* `key` may be NULL. */
static colibri_status_t fail_fault(const reader_t *r, const char *key) {
    uint64_t at = clb_json_offset(r->j);
    if (key) return FAIL(r, "\"%s\", byte %u: %s", key, at, r->j->fault);
    return FAIL(r, "byte %u: %s", at, r->j->fault);
}

colibri_status_t clb_fields_fault(const clb_json_t *j, clb_where_t where, colibri_error_t *err) {
    clb_json_t copy = *j;
    return fail_fault(&(reader_t){&copy, where, err}, NULL);
}

static colibri_status_t read_int(const reader_t *r, const clb_field_t *f, int64_t *v) {
    if (clb_json_int(r->j, v)) return fail_fault(r, f->key);
    if (*v >= f->min && *v <= f->max) return COLIBRI_OK;
    return FAIL(r, "\"%s\" is %d, must be in [%d, %d]", f->key, *v, f->min, f->max);
}

static colibri_status_t read_dims(const reader_t *r, const clb_field_t *f, clb_dims_t *dims) {
    int more;
    *dims = (clb_dims_t){0};
    if (clb_json_enter(r->j, CLB_JSON_ARRAY)) return fail_fault(r, f->key);
    while ((more = clb_json_next(r->j, NULL)) > 0) {
        int64_t v;
        colibri_status_t status = read_int(r, f, &v);
        if (status) return status;
        if (dims->n < 2) dims->dim[dims->n] = v;
        dims->n++;
    }
    return more < 0 ? fail_fault(r, f->key) : COLIBRI_OK;
}

static colibri_status_t read_field(const reader_t *r, const clb_field_t *f, void *target) {
    int64_t v;
    colibri_status_t status;
    switch (f->kind) {
    case CLB_FIELD_U32:
        status = read_int(r, f, &v);
        if (!status) *(uint32_t *)target = (uint32_t)v;
        return status;
    case CLB_FIELD_I64: return read_int(r, f, target);
    case CLB_FIELD_DIMS: return read_dims(r, f, target);
    case CLB_FIELD_TEXT: return clb_json_string(r->j, target) ? fail_fault(r, f->key) : COLIBRI_OK;
    case CLB_FIELD_VALUE: *(clb_json_t *)target = *r->j; break;
    case CLB_FIELD_UNREAD: break;
    }
    return clb_json_skip(r->j) ? fail_fault(r, f->key) : COLIBRI_OK;
}

static uint32_t find(const clb_field_t *fields, uint32_t n, clb_slice_t key) {
    uint32_t i = 0;
    while (i < n && !clb_json_equal(key, fields[i].key)) i++;
    return i;
}

static colibri_status_t check_required(const reader_t *r, const clb_field_t *fields, uint32_t n, uint32_t seen) {
    for (uint32_t i = 0; i < n; i++)
        if (fields[i].required && !(seen >> i & 1)) return FAIL(r, "key \"%s\" is missing", fields[i].key);
    return COLIBRI_OK;
}

colibri_status_t clb_fields_read(clb_json_t *j, const clb_field_t *fields, uint32_t n, int open, clb_where_t where,
                                 void *out, colibri_error_t *err) {
    const reader_t r = {j, where, err};
    uint32_t seen = 0;
    clb_slice_t key;
    int more;
    if (clb_json_enter(j, CLB_JSON_OBJECT)) return fail_fault(&r, NULL);
    while ((more = clb_json_next(j, &key)) > 0) {
        uint32_t i = find(fields, n, key);
        if (i == n) {
            if (!open) return fail_key(&r, key, "is unknown");
            if (clb_json_skip(j)) return fail_fault(&r, NULL);
            continue;
        }
        if (seen >> i & 1) return fail_key(&r, key, "stands twice");
        seen |= (uint32_t)1 << i;
        colibri_status_t status = read_field(&r, &fields[i], (char *)out + fields[i].target);
        if (status) return status;
    }
    if (more < 0) return fail_fault(&r, NULL);
    return check_required(&r, fields, n, seen);
}
