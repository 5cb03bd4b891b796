/* Mixtral (Jiang et al. 2024): every layer routes each token to top_k of `experts` gated feed-forwards. */
#include "decoder.h"

static const char *check(const clb_geometry_t *g) {
    return g->experts < 2 ? "geometry.experts must be at least 2 for mixtral" : NULL;
}

const clb_arch_t clb_arch_mixtral = {
    .name = "mixtral",
    .rules = clb_decoder_rules,
    .n_rules = CLB_DECODER_N_RULES,
    .check = check,
    .layer = clb_decoder_layer,
};
