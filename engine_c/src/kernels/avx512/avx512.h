/* Prototypes of the AVX-512 kernels; contracts in ../kernels.h. */
#ifndef CLB_AVX512_H
#define CLB_AVX512_H
#include "../kernels.h"
clb_gemm_fn clb_avx512_gemm_f32, clb_avx512_gemm_f16, clb_avx512_gemm_bf16, clb_avx512_gemm_q8, clb_avx512_gemm_q4;
clb_pack_fn clb_avx512_pack_f32, clb_avx512_pack_q8;
clb_kv_store_fn clb_avx512_kv_store_f16, clb_avx512_kv_store_f32;
clb_attn_scores_fn clb_avx512_attn_scores_f16, clb_avx512_attn_scores_f32;
clb_attn_accumulate_fn clb_avx512_attn_accumulate_f16, clb_avx512_attn_accumulate_f32;
#define CLB_KERNEL(slot) clb_##slot##_fn clb_avx512_##slot;
#include "../kernels.def"
#undef CLB_KERNEL
#endif
