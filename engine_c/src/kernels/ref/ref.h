/* Prototypes of the reference kernels; contracts in ../kernels.h. */
#ifndef CLB_REF_H
#define CLB_REF_H
#include "../kernels.h"
clb_gemm_fn clb_ref_gemm_f32, clb_ref_gemm_f16, clb_ref_gemm_bf16, clb_ref_gemm_q8, clb_ref_gemm_q4;
clb_pack_fn clb_ref_pack_f32, clb_ref_pack_q8;
clb_kv_store_fn clb_ref_kv_store_f16, clb_ref_kv_store_f32;
clb_attn_scores_fn clb_ref_attn_scores_f16, clb_ref_attn_scores_f32;
clb_attn_accumulate_fn clb_ref_attn_accumulate_f16, clb_ref_attn_accumulate_f32;
#define CLB_KERNEL(slot) clb_##slot##_fn clb_ref_##slot;
#include "../kernels.def"
#undef CLB_KERNEL
#endif
