/* Carving a caller's buffer into 64-byte-aligned pieces. With base NULL only the size is counted, so one function
 * both measures and lays out. Nothing (count 0) is NULL. Overflow sticks: used becomes UINT64_MAX. */
#ifndef CLB_ARENA_H
#define CLB_ARENA_H
#include "checked.h"
#include <stddef.h>

typedef struct clb_arena {
    uint8_t *base;
    uint64_t used;
} clb_arena_t;

static inline void *clb_take(clb_arena_t *a, uint64_t count, uint64_t size) {
    uint64_t bytes, at = a->used;
    if (at == UINT64_MAX || clb_mul(count, size, &bytes) || clb_round_up(bytes, 64, &bytes) ||
        clb_add(at, bytes, &a->used)) {
        a->used = UINT64_MAX;
        return NULL;
    }
    return a->base && bytes ? a->base + at : NULL;
}
#define CLB_TAKE(arena, type, count) ((type *)clb_take(arena, count, sizeof(type)))
#endif
