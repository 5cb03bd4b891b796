/* What this CPU and its operating system support. */
#ifndef CLB_FEATURES_H
#define CLB_FEATURES_H
#include <stdint.h>
enum {
    CLB_CPU_AVX2 = 1,   /* with OS support for YMM state */
    CLB_CPU_FMA = 2,
    CLB_CPU_F16C = 4,
    CLB_CPU_AVX512 = 8, /* F, BW, DQ, VL, with OS support for ZMM and mask state */
    CLB_CPU_VNNI = 16   /* AVX512_VNNI */
};
uint32_t clb_cpu_features(void); /* a mask of the above; pure, no state */
uint32_t clb_cpu_best_isa(void); /* highest colibri_isa_t whose features are all present */
const char *clb_isa_name(uint32_t isa); /* NULL if unknown or AUTO */
#endif
