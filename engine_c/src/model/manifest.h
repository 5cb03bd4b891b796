/* manifest.json in C structs, checked as far as it can be without knowing the architecture's tensors. Slices and
 * bookmarks point into the caller's text. */
#ifndef CLB_MANIFEST_H
#define CLB_MANIFEST_H
#include "fields.h"
#include "model.h"

enum { CLB_FILE_DENSE = 0, CLB_FILE_EXPERTS = 1, CLB_FILES = 2 };
extern const char *const clb_file_name[CLB_FILES]; /* "dense.bin", "experts.bin" */

typedef struct clb_manifest {
    clb_slice_t format, architecture;
    int64_t version;
    clb_json_t geometry, files, tensors; /* bookmarks */
    const clb_arch_t *arch;
    clb_geometry_t g;
    uint64_t file_bytes[CLB_FILES];
    uint64_t size; /* of the text */
} clb_manifest_t;

/* One entry of "tensors" as it stands there: kinds and general ranges checked, nothing else. */
typedef struct clb_tensor {
    clb_slice_t name, role, dtype, layout;
    int64_t layer, expert, file, offset, bytes; /* layer, expert: -1 = none */
    clb_dims_t shape;
    uint64_t index; /* in "tensors" */
} clb_tensor_t;

/* Passes over the whole document once, then reads format, version, architecture, geometry and files. m->tensors is
 * left standing at the array. */
colibri_status_t clb_manifest_open(const char *text, uint64_t size, clb_manifest_t *m, colibri_error_t *err);
/* Steps through "tensors" with j, a copy of m->tensors entered as an array; *more = 0 at its end. t->index counts. */
colibri_status_t clb_manifest_tensor(clb_json_t *j, clb_tensor_t *t, int *more, colibri_error_t *err);
#endif
