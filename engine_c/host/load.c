/* colibri_host_load: a model folder as buffers. Of the manifest only the "files" list is read here; the engine checks
 * the rest. */
#include "fail.h"
#include "map.h"
#include <stdatomic.h>
#include <string.h>

/* ---- just enough JSON ------------------------------------------------------------------------------------------ */

typedef struct json { const char *p, *end; } json_t;

static int peek(json_t *j) { /* next non-blank character, -1 at the end */
    while (j->p < j->end && strchr(" \t\r\n", *j->p) && *j->p) j->p++;
    return j->p < j->end ? (unsigned char)*j->p : -1;
}
static int take(json_t *j, int c) { return peek(j) == c ? (j->p++, 1) : 0; }

/* A string: *s and *n span what is between the quotes, escapes left as they are. */
static int json_string(json_t *j, const char **s, size_t *n) {
    if (!take(j, '"')) return -1;
    *s = j->p;
    for (; j->p < j->end && *j->p != '"'; j->p++)
        if (*j->p == '\\' && j->end - j->p > 1) j->p++;
    if (j->p >= j->end) return -1;
    *n = (size_t)(j->p++ - *s);
    return 0;
}

static int json_uint(json_t *j, uint64_t *value) {
    if (peek(j) < '0' || peek(j) > '9') return -1;
    for (*value = 0; j->p < j->end && *j->p >= '0' && *j->p <= '9'; j->p++) {
        *value = *value * 10 + (uint64_t)(*j->p - '0');
        if (*value > (1ull << 53)) return -1;
    }
    return 0;
}

/* Any value, brackets counted, never recursing. */
static int json_skip(json_t *j) {
    uint64_t depth = 0;
    const char *s;
    size_t n;
    do {
        int c = peek(j);
        if (c < 0) return -1;
        if (c == '"') {
            if (json_string(j, &s, &n)) return -1;
            continue;
        }
        j->p++;
        if (c == '{' || c == '[') depth++;
        else if (c == '}' || c == ']') {
            if (!depth) return -1;
            depth--;
        } else if (!depth) { /* a number or word: to its end */
            while (j->p < j->end && !strchr(",]} \t\r\n", *j->p)) j->p++;
        }
    } while (depth);
    return 0;
}

/* Moves to the next value of an object (key set) or array (key NULL) whose opening bracket was taken; *first starts at
 * 1. Returns 1, 0 after the closing bracket, -1 if malformed. */
static int json_next(json_t *j, int close, int *first, const char **key, size_t *n) {
    if (take(j, close)) return 0;
    if (!*first && !take(j, ',')) return -1;
    *first = 0;
    if (!key) return 1;
    return json_string(j, key, n) || !take(j, ':') ? -1 : 1;
}

static int is(const char *s, size_t n, const char *word) { return n == strlen(word) && !memcmp(s, word, n); }

/* ---- the "files" list ------------------------------------------------------------------------------------------ */

typedef struct entry {
    const char *name;
    size_t name_size;
    uint64_t bytes;
} entry_t;

static int parse_file(json_t *j, entry_t *e) {
    const char *key;
    size_t n;
    int first = 1, more;
    *e = (entry_t){0};
    if (!take(j, '{')) return -1;
    while ((more = json_next(j, '}', &first, &key, &n)) == 1) {
        int bad = is(key, n, "name") ? json_string(j, &e->name, &e->name_size)
                : is(key, n, "bytes") ? json_uint(j, &e->bytes)
                                      : json_skip(j);
        if (bad) return -1;
    }
    return more || !e->name || !e->bytes ? -1 : 0;
}

/* Returns the number of entries, or -1 if there is no well-formed list of 1 to COLIBRI_HOST_FILES files. */
static int parse_files(json_t *j, entry_t *entries) {
    int first = 1, more, count = 0;
    if (!take(j, '[')) return -1;
    while ((more = json_next(j, ']', &first, NULL, NULL)) == 1)
        if (count == (int)COLIBRI_HOST_FILES || parse_file(j, &entries[count++])) return -1;
    return more || !count ? -1 : count;
}

static int find_files(const char *manifest, uint64_t size, entry_t *entries) {
    json_t j = {manifest, manifest + size};
    const char *key;
    size_t n;
    int first = 1;
    if (!take(&j, '{')) return -1;
    while (json_next(&j, '}', &first, &key, &n) == 1) {
        if (is(key, n, "files")) return parse_files(&j, entries);
        if (json_skip(&j)) return -1;
    }
    return -1;
}

/* ---- loading --------------------------------------------------------------------------------------------------- */

enum { PATH_SIZE = 4096 };

static colibri_status_t join(char *path, const char *folder, const char *name, size_t n, colibri_error_t *err) {
    if (!n || memchr(name, '/', n) || memchr(name, '\\', n) || *name == '.')
        return host_fail(err, COLIBRI_MANIFEST, "%.120s/manifest.json: bad file name \"%.*s\"", folder,
                         (int)(n < 60 ? n : 60), name);
    int length = snprintf(path, PATH_SIZE, "%s/%.*s", folder, (int)(n < 256 ? n : 256), name);
    if (length < 0 || length >= PATH_SIZE || n > 255)
        return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.120s: the path is too long", folder);
    return COLIBRI_OK;
}

/* Where the files come from: the folder, or, if there is a list, descriptors. */
typedef struct source {
    const char *folder;
    const colibri_host_file_t *opened;
    uint32_t n_opened;
} source_t;

static colibri_status_t map_file(const source_t *from, uint32_t flags, const entry_t *e, colibri_map_t *map,
                                 colibri_error_t *err) {
    char path[PATH_SIZE];
    colibri_status_t status = join(path, from->folder, e->name, e->name_size, err);
    if (status) return status;
    if (!from->opened) return colibri_map_open(path, flags, e->bytes, map, err);
    for (uint32_t i = 0; i < from->n_opened; i++)
        if (is(e->name, e->name_size, from->opened[i].name))
            return colibri_map_fd(from->opened[i].fd, path, flags, e->bytes, map, err);
    return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: is not among the open files", path);
}

static void unmap_all(colibri_host_model_t *model) {
    for (uint32_t i = 0; i <= COLIBRI_HOST_FILES; i++) colibri_map_close(&model->maps[i]);
    *model = (colibri_host_model_t){0};
}

static void fill_buffer(colibri_buffer_t *b, const colibri_map_t *map) {
    *b = (colibri_buffer_t){.struct_size = sizeof *b, .type = COLIBRI_WEIGHTS, .ptr = (void *)map->data,
                            .size = map->size, .alignment = COLIBRI_ALIGNMENT, .ref_count = 1};
}

static colibri_status_t load(const source_t *from, uint32_t flags, colibri_host_model_t *model, colibri_error_t *err) {
    *model = (colibri_host_model_t){0};
    if (!from->folder) return host_fail(err, COLIBRI_INVALID_ARGUMENT, "colibri_host_load: no folder");
    entry_t entries[COLIBRI_HOST_FILES], manifest = {"manifest.json", 13, COLIBRI_MAP_ANY_SIZE};
    colibri_status_t status = map_file(from, 0, &manifest, &model->maps[0], err);
    if (status) return status;
    model->manifest = model->maps[0].data, model->manifest_size = model->maps[0].size;
    int count = find_files(model->manifest, model->manifest_size, entries);
    if (count < 0)
        status = host_fail(err, COLIBRI_MANIFEST, "%.180s/manifest.json: no usable \"files\" list", from->folder);
    for (int i = 0; !status && i < count; i++) {
        status = map_file(from, flags, &entries[i], &model->maps[i + 1], err);
        if (!status) fill_buffer(&model->buffers[i], &model->maps[i + 1]);
    }
    if (status) {
        unmap_all(model);
        return status;
    }
    model->weights = model->buffers, model->n_weights = (uint32_t)count;
    return COLIBRI_OK;
}

colibri_status_t colibri_host_load(const char *folder, uint32_t flags, colibri_host_model_t *model,
                                   colibri_error_t *err) {
    return load(&(source_t){folder, NULL, 0}, flags, model, err);
}

colibri_status_t colibri_host_load_opened(const char *folder, const colibri_host_file_t *opened, uint32_t n_opened,
                                          uint32_t flags, colibri_host_model_t *model, colibri_error_t *err) {
    static const colibri_host_file_t none;
    return load(&(source_t){folder, opened ? opened : &none, opened ? n_opened : 0}, flags, model, err);
}

colibri_status_t colibri_host_unload(colibri_host_model_t *model, colibri_error_t *err) {
    for (uint32_t i = 0; i < model->n_weights; i++) {
        uint32_t refs = atomic_load((_Atomic uint32_t *)&model->buffers[i].ref_count);
        if (refs != 1)
            return host_fail(err, COLIBRI_INVALID_ARGUMENT, "file %u still has %u users; call colibri_unload first", i,
                             refs - 1);
    }
    unmap_all(model);
    return COLIBRI_OK;
}
