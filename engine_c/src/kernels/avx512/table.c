/* The AVX-512 overrides: every slot. */
#include "avx512.h"

void clb_kernels_avx512(clb_kernels_t *t) {
#if defined(__x86_64__)
    t->gemm[CLB_FMT_f32] = clb_avx512_gemm_f32;
    t->gemm[CLB_FMT_f16] = clb_avx512_gemm_f16;
    t->gemm[CLB_FMT_bf16] = clb_avx512_gemm_bf16;
    t->gemm[CLB_FMT_q8] = clb_avx512_gemm_q8;
    t->gemm[CLB_FMT_q4] = clb_avx512_gemm_q4;
    t->pack[CLB_ACT_F32] = clb_avx512_pack_f32;
    t->pack[CLB_ACT_Q8] = clb_avx512_pack_q8;
    t->kv_store[0] = clb_avx512_kv_store_f16;
    t->kv_store[1] = clb_avx512_kv_store_f32;
    t->attn_scores[0] = clb_avx512_attn_scores_f16;
    t->attn_scores[1] = clb_avx512_attn_scores_f32;
    t->attn_accumulate[0] = clb_avx512_attn_accumulate_f16;
    t->attn_accumulate[1] = clb_avx512_attn_accumulate_f32;
#define CLB_KERNEL(slot) t->slot = clb_avx512_##slot;
#include "../kernels.def"
#undef CLB_KERNEL
#else
    (void)t;
#endif
}
