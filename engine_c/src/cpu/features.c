/* CPUID and XGETBV. An instruction set counts only if the operating system saves its registers. */
#include "features.h"
#include "../../include/colibri.h"
#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t os_state(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static int has(uint32_t word, int bit) { return word >> bit & 1; }

uint32_t clb_cpu_features(void) {
    uint32_t a, b, c, d, mask = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return 0; /* OSXSAVE */
    uint64_t os = os_state();
    int ymm = (os & 0x6) == 0x6, zmm = (os & 0xe6) == 0xe6;
    if (!ymm) return 0;
    if (has(c, 12)) mask |= CLB_CPU_FMA;
    if (has(c, 29)) mask |= CLB_CPU_F16C;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return mask;
    if (has(b, 5)) mask |= CLB_CPU_AVX2;
    if (zmm && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31)) mask |= CLB_CPU_AVX512;
    if (zmm && has(c, 11)) mask |= CLB_CPU_VNNI;
    return mask;
}
#else
uint32_t clb_cpu_features(void) { return 0; }
#endif

static const struct { const char *name; uint32_t isa, needs; } sets[] = {
#define CLB_ISA(name, suffix, needs) {#name, COLIBRI_ISA_##suffix, needs},
#include "isa.def"
#undef CLB_ISA
};

uint32_t clb_cpu_best_isa(void) {
    uint32_t have = clb_cpu_features(), best = COLIBRI_ISA_REF;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if ((have & sets[i].needs) == sets[i].needs) best = sets[i].isa;
    return best;
}

const char *clb_isa_name(uint32_t isa) {
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if (sets[i].isa == isa) return sets[i].name;
    return NULL;
}
