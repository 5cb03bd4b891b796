/* The order (value descending, id ascending), one bucket at a time: only the buckets in which something is decided are
 * ever sorted. Equal values share a bucket and are collected in ascending id, which every sort here keeps. */
#include "sampler.h"
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

uint64_t clb_order_start(clb_sampler_t *s, int with_mass, uint32_t limit) {
    memset(s->mass, 0, CLB_BUCKETS * sizeof *s->mass);
    for (uint32_t i = s->vocab; i < s->padded; i++) s->bucket[i] = CLB_NO_BUCKET;
    s->current = CLB_NO_BUCKET;
    return s->model->kernels.spread(s->x, s->vocab, s->t, s->max, limit, s->bucket, with_mass ? s->mass : NULL);
}

/* ids = the members of the buckets [low, low + n_buckets), ascending; returns how many. */
static uint32_t members(clb_sampler_t *s, uint32_t low, uint32_t n_buckets) {
    return s->model->kernels.members(s->bucket, s->padded, low, n_buckets, s->ids);
}

uint32_t clb_count_below(clb_sampler_t *s, uint32_t limit) {
    uint32_t n = members(s, 0, limit);
    memset(s->count, 0, limit * sizeof *s->count);
    for (uint32_t i = 0; i < n; i++) s->count[s->bucket[s->ids[i]]]++;
    return n;
}

/* weight = that of the i-th of n ids */
static void weigh(clb_sampler_t *s, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) s->value[i] = s->x[s->ids[i]] / s->t;
    s->model->kernels.weigh(s->value, n, s->max, s->least, s->weight);
}

void clb_mass_below(clb_sampler_t *s, uint32_t limit) {
    uint32_t n = members(s, 0, limit);
    weigh(s, n);
    memset(s->mass, 0, CLB_BUCKETS * sizeof *s->mass);
    for (uint32_t i = 0; i < n; i++) s->mass[s->bucket[s->ids[i]]] += s->weight[i];
    s->current = CLB_NO_BUCKET;
}

void clb_order_bucket(clb_sampler_t *s, uint32_t b) {
    if (b == s->current) return;
    uint32_t n = members(s, b, 1);
    for (uint32_t i = 0; i < n; i++) s->pairs[i] = pair_of(s->x[s->ids[i]] / s->t, s->ids[i]);
    sort_pairs(s->pairs, s->weight, n);
    for (uint32_t i = 0; i < n; i++) s->ids[i] = (uint32_t)s->pairs[i];
    weigh(s, n);
    s->current = b;
}
