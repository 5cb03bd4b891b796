/* The order (value descending, id ascending), built from the front as far as it is needed.
 *
 * A bucket is a monotone function of the value, so whole buckets come in order; each is sorted only when reached. Equal
 * values share a bucket and are collected in ascending id, which every sort here keeps. All bounds are O(vocab). */
#include "sampler.h"
#include "../base/fp.h"
#include <string.h>

enum { INSERTION_MAX = 48, DIGITS = 256 };

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
    memset(s->fill, 0, (CLB_BUCKETS + 1) * sizeof *s->fill);
    for (uint32_t i = 0; i < s->padded; i++) {
        float distance = (s->max - s->v[i]) * CLB_BUCKETS_PER_UNIT;
        int32_t b = (int32_t)(distance < far ? distance : far);
        s->bucket[i] = (uint16_t)(b + (s->v[i] == -CLB_INF));
    }
    for (uint32_t i = 0; i < s->padded; i++) s->fill[s->bucket[i]]++;
    s->n_allowed = s->padded - s->fill[CLB_EXCLUDED];
    s->n_sorted = s->next_bucket = 0;
}

/* Appends the members of buckets [low, high) to sorted[], each bucket in its place; fill[b] becomes bucket b's end. */
static void collect(clb_sampler_t *s, uint32_t low, uint32_t high) {
    uint32_t end = s->n_sorted;
    for (uint32_t b = low; b < high; b++) {
        uint32_t n = s->fill[b];
        s->fill[b] = end;
        end += n;
    }
    for (uint32_t i = 0; i < s->vocab; i++) {
        uint32_t b = s->bucket[i];
        if (b - low < high - low) s->sorted[s->fill[b]++] = pair_of(s->v[i], i);
    }
}

void clb_order_reach(clb_sampler_t *s, uint32_t n) {
    uint32_t low = s->next_bucket, high = low, reached = s->n_sorted;
    while (high < CLB_BUCKETS && reached < n) reached += s->fill[high++];
    if (reached == s->n_sorted) return;
    collect(s, low, high);
    for (uint32_t b = low, begin = s->n_sorted; b < high; begin = s->fill[b++])
        sort_pairs(s->sorted + begin, s->spare, s->fill[b] - begin);
    s->n_sorted = reached;
    s->next_bucket = high;
}
