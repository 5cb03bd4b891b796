/* The tensors of a decoder-only transformer with RMS norms, rotary attention and gated feed-forward experts. A dense
 * model is the case of one expert and no router, so mixtral and llama share the table. */
#ifndef CLB_RULES_H
#define CLB_RULES_H
#include "model.h"

enum { CLB_RULES_MAX = 32, CLB_DECODER_N_RULES = 14 };
extern const clb_rule_t clb_decoder_rules[CLB_DECODER_N_RULES];
#endif
