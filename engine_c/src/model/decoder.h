/* What the decoder architectures share: pre-norm attention and a pre-norm gated feed-forward. */
#ifndef CLB_DECODER_H
#define CLB_DECODER_H
#include "model.h"
#include "rules.h"

/* x += attention(norm(x)); x += feed_forward(norm(x)), with one expert or routed ones. */
void clb_decoder_layer(struct clb_step *step, uint32_t layer);
#endif
