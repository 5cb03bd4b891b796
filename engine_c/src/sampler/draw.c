/* Probabilities, top-k, top-p, min-p and the draw (steps 6 to 11). */
#include "sampler.h"
#include <string.h>

__extension__ typedef unsigned __int128 clb_uint128_t;

/* The survivors are a prefix of the order: all members of the buckets below `bucket` and the first `rank` of it. */
typedef struct clb_cut {
    uint32_t bucket, rank;
    uint64_t mass; /* sum of their weights */
} clb_cut_t;

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

/* floor(u * total), u in [0, 1) a multiple of 2^-53; exact */
static uint64_t level_of(uint64_t seed, uint64_t position, uint64_t total) {
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t x[4];
    clb_philox(counter, key, x);
    uint64_t u = ((uint64_t)x[0] << 32 | x[1]) >> 11;
    return (uint64_t)((clb_uint128_t)u * total >> 53);
}

static void probabilities(clb_sampler_t *s) {
    memcpy(s->p, s->v, s->padded * sizeof *s->p);
    s->model->kernels.softmax(s->p, s->padded);
}

static void weigh(clb_sampler_t *s) {
    memset(s->mass, 0, CLB_BUCKETS * sizeof *s->mass);
    for (uint32_t i = 0; i < s->padded; i++) s->mass[s->bucket[i]] += clb_weight(s->p[i]);
}

/* Weight of the i-th member of the current bucket. */
static uint64_t weight_at(const clb_sampler_t *s, uint32_t i) { return clb_weight(s->p[clb_order_id(s, i)]); }

/* Mass of the buckets below `bucket` and the first `rank` of it. */
static uint64_t mass_of(clb_sampler_t *s, uint32_t bucket, uint32_t rank) {
    uint64_t sum = 0;
    for (uint32_t b = 0; b < bucket; b++) sum += s->mass[b];
    if (!rank || !s->mass[bucket]) return sum;
    clb_order_bucket(s, bucket);
    for (uint32_t i = 0; i < rank; i++) sum += weight_at(s, i);
    return sum;
}

/* The first k of the order, or all if there are not more. */
static clb_cut_t first_k(clb_sampler_t *s, uint32_t k) {
    uint32_t b = 0;
    for (; b < CLB_BUCKETS && s->count[b] <= k; b++) k -= s->count[b];
    if (b == CLB_BUCKETS) k = 0;
    return (clb_cut_t){b, k, mass_of(s, b, k)};
}

/* The shortest prefix of *all whose mass reaches p of it. */
static clb_cut_t first_p(clb_sampler_t *s, const clb_cut_t *all, float p) {
    double enough = (double)p * (double)all->mass;
    uint32_t b = 0, i = 0;
    uint64_t sum = 0;
    for (; b < all->bucket && (double)(sum + s->mass[b]) < enough; b++) sum += s->mass[b];
    clb_order_bucket(s, b);
    while ((double)sum < enough) sum += weight_at(s, i++); /* ends: all of *all reaches it */
    return (clb_cut_t){b, i, sum};
}

/* Makes p and the weights of survivors below min_p zero. */
static void filter(clb_sampler_t *s, clb_cut_t *cut) {
    for (uint32_t i = 0; i < s->padded; i++) s->p[i] = s->p[i] < s->in.min_p ? 0.0f : s->p[i];
    weigh(s);
    cut->mass = mass_of(s, cut->bucket, cut->rank);
}

/* The token at which the running sum exceeds level, which is below the survivors' mass. */
static uint32_t pick(clb_sampler_t *s, uint64_t level) {
    uint32_t b = 0, i = 0;
    while (s->mass[b] <= level) level -= s->mass[b++];
    clb_order_bucket(s, b);
    while (weight_at(s, i) <= level) level -= weight_at(s, i++);
    return clb_order_id(s, i);
}

uint32_t clb_draw(clb_sampler_t *s) {
    const colibri_sampling_t *in = &s->in;
    clb_order_start(s);
    probabilities(s);
    weigh(s);
    clb_cut_t cut = first_k(s, in->top_k ? in->top_k : s->vocab);
    if (in->top_p < 1.0f) cut = first_p(s, &cut, in->top_p);
    if (in->min_p > 0.0f) filter(s, &cut);
    return pick(s, level_of(in->seed, in->position, cut.mass));
}
