/* Probabilities, top-k, top-p, min-p and the draw (steps 6 to 11). */
#include "sampler.h"
#include "../base/fp.h"
#include <string.h>

enum { LANES = 16, FIRST_REACH = 256, REACH_FACTOR = 8 };

void clb_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u; /* golden ratio */
        k1 += 0xBB67AE85u; /* sqrt(3) - 1 */
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* u in [0, 1), a multiple of 2^-53 */
static double uniform(uint64_t seed, uint64_t position) {
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t x[4];
    clb_philox(counter, key, x);
    return (double)(((uint64_t)x[0] << 32 | x[1]) >> 11) * 0x1p-53;
}

/* p of every token; returns T. */
static double probabilities_all(clb_sampler_t *s) {
    double lane[LANES] = {0};
    memcpy(s->p, s->v, s->padded * sizeof *s->p);
    s->model->kernels.softmax(s->p, s->padded);
    for (uint32_t i = 0; i < s->padded; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += (double)s->p[i + j];
    return clb_tree16d(lane);
}

/* p of the first n of the order, which are sorted; returns T. The maximum is among them, so softmax sees it. */
static double probabilities_first(clb_sampler_t *s, uint32_t n) {
    float *x = (float *)(void *)s->spare;
    uint32_t padded = (n + LANES - 1) / LANES * LANES;
    for (uint32_t i = 0; i < n; i++) x[i] = s->v[clb_order_id(s, i)];
    for (uint32_t i = n; i < padded; i++) x[i] = -CLB_INF;
    s->model->kernels.softmax(x, padded);
    double cum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        s->p[clb_order_id(s, i)] = x[i];
        cum += (double)x[i];
    }
    return cum;
}

/* p of the token at `rank` < n_allowed, sorting that far and, by a growing amount, farther. */
static float probability(clb_sampler_t *s, uint32_t rank) {
    if (rank >= s->n_sorted) {
        uint64_t reach = rank ? (uint64_t)rank * REACH_FACTOR : FIRST_REACH;
        clb_order_reach(s, reach < s->n_allowed ? (uint32_t)reach : s->n_allowed);
    }
    return s->p[clb_order_id(s, rank)];
}

/* Top-p and min-p over the first *n of the order: shortens *n, returns cum of the last survivor. */
static double shorten(clb_sampler_t *s, double enough, uint32_t *n) {
    double cum = 0.0;
    for (uint32_t rank = 0; rank < *n; rank++) {
        float p = probability(s, rank);
        if (p < s->in.min_p || p == 0.0f) {
            *n = rank;
            break;
        }
        cum += (double)p;
        if (cum >= enough) *n = rank + 1;
    }
    return cum;
}

/* The first of the first n with cum > level, or the last one with p > 0. */
static uint32_t pick(clb_sampler_t *s, uint32_t n, double level) {
    double cum = 0.0;
    uint32_t rank = 0;
    for (; rank < n; rank++) {
        float p = probability(s, rank);
        if (p == 0.0f) break;
        cum += (double)p;
        if (cum > level) return clb_order_id(s, rank);
    }
    return clb_order_id(s, rank - 1); /* rank > 0: p of the first is 1 */
}

uint32_t clb_draw(clb_sampler_t *s) {
    const colibri_sampling_t *in = &s->in;
    double total;
    clb_order_start(s);
    uint32_t n = s->n_allowed;
    if (in->top_k && in->top_k < n) {
        n = in->top_k;
        clb_order_reach(s, n);
        total = probabilities_first(s, n);
    } else {
        total = probabilities_all(s);
    }
    if (in->top_p < 1.0f || in->min_p > 0.0f)
        total = shorten(s, in->top_p < 1.0f ? (double)in->top_p * total : (double)CLB_INF, &n);
    return pick(s, n, uniform(in->seed, in->position) * total);
}
