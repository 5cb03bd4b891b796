/* Size arithmetic that cannot wrap. Each returns 0 and stores the result, or -1. */
#ifndef CLB_CHECKED_H
#define CLB_CHECKED_H
#include <stdint.h>
static inline int clb_mul(uint64_t a, uint64_t b, uint64_t *out) { return __builtin_mul_overflow(a, b, out) ? -1 : 0; }
static inline int clb_add(uint64_t a, uint64_t b, uint64_t *out) { return __builtin_add_overflow(a, b, out) ? -1 : 0; }
static inline int clb_round_up(uint64_t a, uint64_t to, uint64_t *out) {
    if (clb_add(a, to - 1, out)) return -1;
    *out -= *out % to;
    return 0;
}
#endif
