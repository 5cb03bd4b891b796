/* Model files in memory: read-only, shared between processes, never copied.
 *
 *     colibri_host_model_t m;
 *     if (colibri_host_load("model", COLIBRI_MAP_DEFAULT, &m, &err)) ...
 *     config.manifest = m.manifest, config.manifest_size = m.manifest_size;
 *     config.weights = m.weights, config.n_weights = m.n_weights;
 *     ... colibri_unload(model), then colibri_host_unload(&m) ...
 *
 * Advice (huge pages, no core dumps, NUMA placement) is best effort: a kernel that refuses it costs speed, not
 * correctness. A file must not change while it is mapped; one that shrinks raises SIGBUS on the next touch (fault.h).
 */
#ifndef COLIBRI_MAP_H
#define COLIBRI_MAP_H
#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLIBRI_MAP_POPULATE 1u    /* read all of it now, so that no step waits for the disk */
#define COLIBRI_MAP_HUGEPAGE 2u    /* MADV_HUGEPAGE */
#define COLIBRI_MAP_DONTDUMP 4u    /* MADV_DONTDUMP */
#define COLIBRI_MAP_INTERLEAVE 8u  /* spread the pages over all NUMA nodes, if there is more than one */
#define COLIBRI_MAP_BIND 16u       /* prefer the NUMA node of the calling thread, if there is more than one */
#define COLIBRI_MAP_DEFAULT (COLIBRI_MAP_HUGEPAGE | COLIBRI_MAP_DONTDUMP)
#define COLIBRI_MAP_ANY_SIZE 0u    /* expected: any size but zero */
#define COLIBRI_HOST_FILES 8u      /* most files of one container */

typedef struct colibri_map {
    const void *data; /* page aligned */
    uint64_t size;    /* bytes of the file */
} colibri_map_t;

/* Maps a regular file. expected: its exact size, or COLIBRI_MAP_ANY_SIZE. Fails with INVALID_ARGUMENT (missing,
 * unreadable, a directory, empty) or BUFFER_TOO_SMALL / TENSOR (truncated / longer than expected); *map is zeroed. */
colibri_status_t colibri_map_open(const char *path, uint32_t flags, uint64_t expected, colibri_map_t *map,
                                  colibri_error_t *err);
/* The same for a file that is open for reading; path is for messages. fd stays the caller's and is not needed after. */
colibri_status_t colibri_map_fd(int fd, const char *path, uint32_t flags, uint64_t expected, colibri_map_t *map,
                                colibri_error_t *err);
void colibri_map_close(colibri_map_t *map); /* a zeroed map is allowed */

typedef struct colibri_host_model {
    const char *manifest;   /* mapped manifest.json, not NUL-terminated */
    uint64_t manifest_size;
    colibri_buffer_t *weights; /* [n_weights] in the order of manifest "files", ref_count 1 */
    uint32_t n_weights;
    uint32_t reserved;
    colibri_map_t maps[1 + COLIBRI_HOST_FILES]; /* manifest, then the files */
    colibri_buffer_t buffers[COLIBRI_HOST_FILES];
} colibri_host_model_t;

/* Maps manifest.json of the folder and every file its "files" list names, each checked against its stated size.
 * model must not move afterwards (weights points into it). On failure nothing stays mapped. */
colibri_status_t colibri_host_load(const char *folder, uint32_t flags, colibri_host_model_t *model,
                                   colibri_error_t *err);
/* The same for files that are open already, whatever the folder has under their names by now. Each file that is needed
 * must be in opened[n_opened]; folder is for messages. The descriptors stay the caller's and are not needed after. */
typedef struct colibri_host_file {
    const char *name; /* such as "manifest.json" */
    int32_t fd;
    uint32_t reserved;
} colibri_host_file_t;
colibri_status_t colibri_host_load_opened(const char *folder, const colibri_host_file_t *opened, uint32_t n_opened,
                                          uint32_t flags, colibri_host_model_t *model, colibri_error_t *err);
/* Unmaps everything. Every buffer's ref_count must be back at 1: a model that still uses them is
 * COLIBRI_INVALID_ARGUMENT and nothing is unmapped. */
colibri_status_t colibri_host_unload(colibri_host_model_t *model, colibri_error_t *err);

#ifdef __cplusplus
}
#endif
#endif
