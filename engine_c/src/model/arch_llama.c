/* Llama (Touvron et al. 2023): the same layer with a single, always-used feed-forward. */
#include "decoder.h"

static const char *check(const clb_geometry_t *g) {
    return g->experts != 1 || g->top_k != 1 ? "geometry.experts and top_k must be 1 for llama" : NULL;
}

const clb_arch_t clb_arch_llama = {
    .name = "llama",
    .rules = clb_decoder_rules,
    .n_rules = CLB_DECODER_N_RULES,
    .check = check,
    .layer = clb_decoder_layer,
};
