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

/* Buckets whose masses are summed at first: farther from the best than 12 there is hardly ever anything to decide. */
enum { NEAR = 12 * CLB_BUCKETS_PER_UNIT, FEWEST = 4 * CLB_BUCKETS_PER_UNIT, LAST = CLB_BUCKETS - 1 };

/* Mass of bucket b. Those from s->known on are summed when first asked for. */
static uint64_t mass_at(clb_sampler_t *s, uint32_t b) {
    if (b >= s->known) {
        clb_order_start(s, 1, LAST);
        s->known = CLB_BUCKETS;
    }
    return s->mass[b];
}

/* Mass of the buckets below `bucket` and the first `rank` of it. */
static uint64_t mass_of(clb_sampler_t *s, uint32_t bucket, uint32_t rank) {
    uint64_t sum = 0;
    for (uint32_t b = 0; b < bucket; b++) sum += s->mass[b];
    if (!rank || !s->mass[bucket]) return sum;
    clb_order_bucket(s, bucket);
    for (uint32_t i = 0; i < rank; i++) sum += s->weight[i];
    return sum;
}

/* mass[] of the survivors' buckets, and cut->mass */
static void weigh(clb_sampler_t *s, clb_cut_t *cut, uint32_t limit) {
    clb_mass_below(s, limit);
    s->known = CLB_BUCKETS;
    cut->mass = mass_of(s, cut->bucket, cut->rank);
}

/* All tokens of any weight; without their masses if the caller does not need them. */
static clb_cut_t all(clb_sampler_t *s, int with_mass) {
    s->known = NEAR;
    return (clb_cut_t){LAST, 0, clb_order_start(s, with_mass, NEAR)};
}

/* The first k of the order, or all of any weight if there are not more. */
static clb_cut_t first_k(clb_sampler_t *s, uint32_t k) {
    uint32_t limit = FEWEST, b = 0;
    clb_order_start(s, 0, 0);
    while (clb_count_below(s, limit) < k && limit < LAST) limit = 2 * limit < LAST ? 2 * limit : LAST;
    for (; b < limit && s->count[b] <= k; b++) k -= s->count[b];
    clb_cut_t cut = {b, b < LAST ? k : 0, 0};
    weigh(s, &cut, b < LAST ? b + 1 : LAST);
    return cut;
}

/* The shortest prefix of *from whose mass reaches p of it. */
static clb_cut_t first_p(clb_sampler_t *s, const clb_cut_t *from, float p) {
    double enough = (double)p * (double)from->mass;
    uint32_t b = 0, i = 0;
    uint64_t sum = 0;
    for (; b < from->bucket && (double)(sum + mass_at(s, b)) < enough; b++) sum += s->mass[b];
    clb_order_bucket(s, b);
    while ((double)sum < enough) sum += s->weight[i++]; /* ends: all of *from reaches it */
    return (clb_cut_t){b, i, sum};
}

/* The last bucket that can hold a p of min_p or more, of those below LAST. */
static uint32_t last_of(float min_p) {
    double b = -clb_log((double)min_p) * CLB_BUCKETS_PER_UNIT + 1.0;
    return b < LAST - 1 ? (uint32_t)b : LAST - 1;
}

/* Survivors below min_p get weight 0. */
static void filter(clb_sampler_t *s, clb_cut_t *cut) {
    uint32_t limit = last_of(s->in.min_p) + 1;
    s->least = s->in.min_p;
    weigh(s, cut, cut->bucket < limit ? cut->bucket + 1 : limit);
}

/* The token at which the running sum exceeds level, which is below the survivors' mass. */
static uint32_t pick(clb_sampler_t *s, uint64_t level) {
    uint32_t b = 0, i = 0;
    while (mass_at(s, b) <= level) level -= s->mass[b++];
    clb_order_bucket(s, b);
    while (s->weight[i] <= level) level -= s->weight[i++];
    return s->ids[i];
}

uint32_t clb_draw(clb_sampler_t *s) {
    const colibri_sampling_t *in = &s->in;
    int filters = in->min_p >= 0x1p-41f; /* what is smaller has weight 0 anyway */
    clb_cut_t cut = in->top_k && in->top_k < s->vocab ? first_k(s, in->top_k) : all(s, !filters || in->top_p < 1.0f);
    if (in->top_p < 1.0f) cut = first_p(s, &cut, in->top_p);
    if (filters) filter(s, &cut);
    return pick(s, level_of(in->seed, in->position, cut.mass));
}
