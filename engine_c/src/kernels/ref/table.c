/* The reference table: every slot, portable C. */
#include "ref.h"

void clb_kernels_ref(clb_kernels_t *t) {
    *t = (clb_kernels_t){
        .gemm = {[CLB_FMT_f32] = clb_ref_gemm_f32,
                 [CLB_FMT_f16] = clb_ref_gemm_f16,
                 [CLB_FMT_bf16] = clb_ref_gemm_bf16,
                 [CLB_FMT_q8] = clb_ref_gemm_q8,
                 [CLB_FMT_q4] = clb_ref_gemm_q4},
        .pack = {clb_ref_pack_f32, clb_ref_pack_q8},
        .kv_store = {clb_ref_kv_store_f16, clb_ref_kv_store_f32},
        .attn_scores = {clb_ref_attn_scores_f16, clb_ref_attn_scores_f32},
        .attn_accumulate = {clb_ref_attn_accumulate_f16, clb_ref_attn_accumulate_f32},
#define CLB_KERNEL(slot) .slot = clb_ref_##slot,
#include "../kernels.def"
#undef CLB_KERNEL
    };
}
