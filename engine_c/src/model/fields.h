/* Reading a JSON object into a struct by a table of its keys. */
#ifndef CLB_FIELDS_H
#define CLB_FIELDS_H
#include "../base/json.h"
#include "../base/status.h"

typedef enum clb_field_kind {
    CLB_FIELD_U32,   /* uint32_t, an integer in [min, max] */
    CLB_FIELD_I64,   /* int64_t, the same */
    CLB_FIELD_TEXT,  /* clb_slice_t */
    CLB_FIELD_DIMS,  /* clb_dims_t, each dimension in [min, max] */
    CLB_FIELD_VALUE, /* clb_json_t, a bookmark of the value, which is checked and passed over */
    CLB_FIELD_UNREAD /* known, may stand at most once, of no interest here; no target */
} clb_field_kind_t;

/* A shape: all dimensions are counted, the first two are kept. */
typedef struct clb_dims {
    int64_t dim[2];
    uint64_t n;
} clb_dims_t;

typedef struct clb_field {
    const char *key;
    clb_field_kind_t kind;
    int required;
    size_t target; /* offsetof in the struct read */
    int64_t min, max;
} clb_field_t;

/* Where in manifest.json the object stands, for messages: "geometry", or "tensors"[index]. index -1 = none. */
typedef struct clb_where {
    const char *part;
    int64_t index;
} clb_where_t;

enum { CLB_FIELDS_MAX = 32, CLB_NAME_SHOWN = 72 };

/* Largest integer a manifest may hold, 2^53 - 1. */
#define CLB_INT_MAX (((int64_t)1 << 53) - 1)

/* Reads the object that comes next in j into *out by fields[n], n <= 32. Duplicates of a known key, missing required
 * keys, wrong kinds and values out of range are refused with a message naming part and key; so are unknown keys unless
 * `open`. Fields that are absent keep their value in *out. */
colibri_status_t clb_fields_read(clb_json_t *j, const clb_field_t *fields, uint32_t n, int open, clb_where_t where,
                                 void *out, colibri_error_t *err);
/* The failure of j's recorded fault. */
colibri_status_t clb_fields_fault(const clb_json_t *j, clb_where_t where, colibri_error_t *err);
#endif
