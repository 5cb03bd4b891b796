/* The registry of architectures. */
#include "model.h"
#include <string.h>

#define CLB_ARCH(name) extern const clb_arch_t clb_arch_##name;
#include "archs.def"
#undef CLB_ARCH

static const struct {
    const clb_arch_t *arch;
    const char *name;
    size_t size;
} archs[] = {
#define CLB_ARCH(name) {&clb_arch_##name, #name, sizeof #name - 1},
#include "archs.def"
#undef CLB_ARCH
};

const clb_arch_t *clb_arch_find(const char *name, size_t n) {
    for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++)
        if (archs[i].size == n && !memcmp(archs[i].name, name, n)) return archs[i].arch;
    return NULL;
}
