/* The registry of weight formats. */
#include "format.h"

static const clb_format_t *const formats[CLB_FORMATS] = {
#define CLB_FORMAT(name, id) [id] = &clb_format_##name,
#include "formats.def"
#undef CLB_FORMAT
};

const clb_format_t *clb_format(uint32_t id) { return id < CLB_FORMATS ? formats[id] : NULL; }

static int same(const char *literal, const char *name, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!literal[i] || literal[i] != name[i]) return 0;
    return !literal[n];
}

int clb_format_find(const char *name, size_t n) {
    for (int i = 0; i < CLB_FORMATS; i++)
        if (same(formats[i]->name, name, n)) return i;
    return -1;
}
