/* One decoder layer as Llama and Mixtral define it. */
#include "decoder.h"
#include "../ops/step.h"

void clb_decoder_layer(clb_step_t *st, uint32_t layer) {
    const clb_layer_t *l = &st->m->layers[layer];
    clb_norm(st, l->attn_norm, clb_kind_bit(&l->q) | clb_kind_bit(&l->k) | clb_kind_bit(&l->v));
    clb_qkv(st, l);
    clb_kv_write(st, layer);
    clb_attention(st, layer);
    clb_attn_project(st, l);
    clb_norm(st, l->ffn_norm, clb_kind_bit(&l->gate) | (l->router.data ? 1u << CLB_ACT_F32 : 0));
    clb_route(st, layer);
    clb_experts(st, layer);
}
