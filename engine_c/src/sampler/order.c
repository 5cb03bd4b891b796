/* The order (value descending, id ascending), one bucket at a time: only the buckets in which something is decided are
 * ever sorted. Equal values share a bucket and are collected in ascending id, which every sort here keeps. */
#include "sampler.h"
#include <string.h>

enum { LANES = 16, INSERTION_MAX = 48, DIGITS = 256 };

/* Ascending pairs are descending values, then ascending ids; +0 and -0 are one value. */
static uint64_t pair_of(float value, uint32_t id) {
    uint32_t u = clb_bits(value + 0.0f);
    uint32_t ascending = u >> 31 ? ~u : u | 0x80000000u;
    return (uint64_t)~ascending << 32 | id;
}

static void insertion_sort(uint64_t *a, uint32_t n) {
    for (uint32_t i = 1; i < n; i++) {
        uint64_t x = a[i];
        uint32_t j = i;
        for (; j && a[j - 1] > x; j--) a[j] = a[j - 1];
        a[j] = x;
    }
}

/* One stable counting pass by the byte at `shift`; returns 0 if all bytes were equal and nothing was done. */
static int radix_pass(const uint64_t *from, uint64_t *to, uint32_t n, int shift) {
    uint32_t start[DIGITS] = {0}, sum = 0;
    for (uint32_t i = 0; i < n; i++) start[from[i] >> shift & 255]++;
    if (start[from[0] >> shift & 255] == n) return 0;
    for (int d = 0; d < DIGITS; d++) {
        uint32_t c = start[d];
        start[d] = sum;
        sum += c;
    }
    for (uint32_t i = 0; i < n; i++) to[start[from[i] >> shift & 255]++] = from[i];
    return 1;
}

/* Sorts pairs whose ids ascend where values are equal. */
static void sort_pairs(uint64_t *a, uint64_t *spare, uint32_t n) {
    if (n <= INSERTION_MAX) {
        insertion_sort(a, n);
        return;
    }
    uint64_t *from = a, *to = spare;
    for (int shift = 32; shift < 64; shift += 8)
        if (radix_pass(from, to, n, shift)) {
            uint64_t *t = from;
            from = to;
            to = t;
        }
    if (from != a) memcpy(a, from, n * sizeof *a);
}

void clb_order_start(clb_sampler_t *s) {
    const float far = CLB_BUCKETS - 1;
    for (uint32_t i = 0; i < s->padded; i++) {
        float distance = (s->max - s->v[i]) * CLB_BUCKETS_PER_UNIT;
        s->bucket[i] = (uint16_t)(int32_t)(distance < far ? distance : far);
    }
    memset(s->count, 0, CLB_BUCKETS * sizeof *s->count);
    for (uint32_t i = 0; i < s->padded; i++) s->count[s->bucket[i]]++;
    s->current = CLB_BUCKETS;
}

/* sorted = the members of bucket b, ids ascending; whole lines without any are skipped. */
static void collect(clb_sampler_t *s, uint32_t b) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->padded; i += LANES) {
        int hit = 0;
        for (uint32_t j = i; j < i + LANES; j++) hit |= s->bucket[j] == b;
        if (!hit) continue;
        for (uint32_t j = i; j < i + LANES; j++)
            if (s->bucket[j] == b) s->sorted[n++] = pair_of(s->v[j], j);
    }
}

void clb_order_bucket(clb_sampler_t *s, uint32_t b) {
    if (b == s->current) return;
    collect(s, b);
    sort_pairs(s->sorted, s->spare, s->count[b]);
    s->current = b;
}
