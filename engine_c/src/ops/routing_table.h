/* The optional int8 routing table: per layer [panels] of { scale f32 [16], zero f32 [16], q int8 [k padded][16] },
 * where w is approximately scale * q + zero with the row's minimum at -128 and its maximum at 127. */
#ifndef CLB_ROUTING_TABLE_H
#define CLB_ROUTING_TABLE_H
#include "../model/model.h"

int clb_routing_bytes(const struct colibri_model *m, uint64_t *bytes); /* -1: no router, or overflow */
void clb_routing_fill(const struct colibri_model *m, uint8_t *table);  /* from the float routers */
/* Dequantises one panel: w f32 [k padded][16]. */
void clb_routing_panel(const struct colibri_model *m, const uint8_t *table, uint32_t layer, uint32_t panel, float *w);
#endif
