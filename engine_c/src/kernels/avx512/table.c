/* The AVX-512 overrides. */
#include "../kernels.h"
void clb_kernels_avx512(clb_kernels_t *t) { (void)t; }
