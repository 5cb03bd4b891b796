/* Where a key or value lives. A slab holds T positions of all layers:
 *   slab [layers][2: K, V][kv_heads][T][hdp] of f16 or f32, hdp = head_dim rounded up to 16.
 * So the keys of one head are contiguous within a slab and a run of positions is one pointer. */
#ifndef CLB_KV_LAYOUT_H
#define CLB_KV_LAYOUT_H
#include "../model/model.h"

typedef enum clb_kv_part { CLB_KV_K = 0, CLB_KV_V = 1 } clb_kv_part_t;

static inline size_t clb_kv_row_bytes(const struct colibri_model *m) {
    return (size_t)m->hdp * (m->config.kv_format == COLIBRI_KV_F32 ? 4 : 2);
}

/* Row of position `pos` (its slab's index is `slab`). */
static inline uint8_t *clb_kv_row(const struct colibri_model *m, uint8_t *arena, uint32_t slab, uint32_t layer,
                                  clb_kv_part_t part, uint32_t head, uint32_t pos) {
    size_t t = m->config.slab_tokens, row = clb_kv_row_bytes(m);
    size_t index = ((size_t)layer * 2 + part) * m->g.kv_heads + head;
    return arena + slab * m->slab_bytes + (index * t + pos % t) * row;
}
#endif
