/* Dispatch: ref fills every slot, each higher instruction set overrides what it does better. */
#include "../../include/colibri.h"
#include "kernels.h"

void clb_kernels_fill(clb_kernels_t *table, uint32_t isa) {
    clb_kernels_ref(table);
    if (isa >= COLIBRI_ISA_AVX2) clb_kernels_avx2(table);
    if (isa >= COLIBRI_ISA_AVX512) clb_kernels_avx512(table);
}
