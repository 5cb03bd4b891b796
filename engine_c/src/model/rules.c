/* The role table of CONTAINER.md. Per-expert rules stand in the order of an expert's extent: gate, up, down. */
#include "rules.h"

#define MODEL(field) offsetof(struct colibri_model, field)
#define LAYER(field) offsetof(clb_layer_t, field)

const clb_rule_t clb_decoder_rules[CLB_DECODER_N_RULES] = {
    /* role, place, shape [dim0, dim1], f32 only, need, target */
    {"embed", CLB_PER_MODEL, CLB_DIM_VOCAB, CLB_DIM_HIDDEN, 0, CLB_ALWAYS, MODEL(embed)},
    {"head", CLB_PER_MODEL, CLB_DIM_VOCAB, CLB_DIM_HIDDEN, 0, CLB_UNLESS_TIED, MODEL(head)},
    {"final_norm", CLB_PER_MODEL, CLB_DIM_HIDDEN, CLB_DIM_NONE, 1, CLB_ALWAYS, MODEL(final_norm)},
    {"rope_freqs", CLB_PER_MODEL, CLB_DIM_HALF_HEAD, CLB_DIM_NONE, 1, CLB_ALWAYS, MODEL(rope_freqs)},
    {"attn_norm", CLB_PER_LAYER, CLB_DIM_HIDDEN, CLB_DIM_NONE, 1, CLB_ALWAYS, LAYER(attn_norm)},
    {"ffn_norm", CLB_PER_LAYER, CLB_DIM_HIDDEN, CLB_DIM_NONE, 1, CLB_ALWAYS, LAYER(ffn_norm)},
    {"attn_q", CLB_PER_LAYER, CLB_DIM_Q, CLB_DIM_HIDDEN, 0, CLB_ALWAYS, LAYER(q)},
    {"attn_k", CLB_PER_LAYER, CLB_DIM_KV, CLB_DIM_HIDDEN, 0, CLB_ALWAYS, LAYER(k)},
    {"attn_v", CLB_PER_LAYER, CLB_DIM_KV, CLB_DIM_HIDDEN, 0, CLB_ALWAYS, LAYER(v)},
    {"attn_o", CLB_PER_LAYER, CLB_DIM_HIDDEN, CLB_DIM_Q, 0, CLB_ALWAYS, LAYER(o)},
    {"router", CLB_PER_LAYER, CLB_DIM_EXPERTS, CLB_DIM_HIDDEN, 1, CLB_IF_ROUTED, LAYER(router)},
    {"ffn_gate", CLB_PER_EXPERT, CLB_DIM_INTER, CLB_DIM_HIDDEN, 0, CLB_ALWAYS, LAYER(gate)},
    {"ffn_up", CLB_PER_EXPERT, CLB_DIM_INTER, CLB_DIM_HIDDEN, 0, CLB_ALWAYS, LAYER(up)},
    {"ffn_down", CLB_PER_EXPERT, CLB_DIM_HIDDEN, CLB_DIM_INTER, 0, CLB_ALWAYS, LAYER(down)},
};
_Static_assert(CLB_DECODER_N_RULES <= CLB_RULES_MAX, "the loader's table of rules");
