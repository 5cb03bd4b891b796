/* Reference kernels of the sampler. */
#include "../../base/fp.h"
#include "ref.h"

uint32_t clb_ref_above(const float *x, uint32_t from, uint32_t n, float low) {
    while (from < n && !(x[from] > low)) from++;
    return from;
}

void clb_ref_allow(const float *x, const uint32_t *bits, uint32_t n, float *v) {
    for (uint32_t i = 0; i < n; i++) v[i] = bits[i / 32] >> i % 32 & 1 ? x[i] : -CLB_INF;
}

uint64_t clb_ref_spread(const float *x, uint32_t n, float t, float m, uint32_t limit, uint16_t *bucket,
                        uint64_t *mass) {
    const float last = CLB_BUCKETS - 1;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        float v = x[i] / t, distance = (m - v) * CLB_BUCKETS_PER_UNIT;
        bucket[i] = (uint16_t)(int32_t)(distance < last ? distance : last);
        if (!mass) continue;
        uint64_t w = clb_weight(clb_expf(v - m));
        sum += w;
        if (bucket[i] < limit) mass[bucket[i]] += w;
    }
    return sum;
}

uint32_t clb_ref_members(const uint16_t *bucket, uint32_t n, uint32_t low, uint32_t n_buckets, uint32_t *ids) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++)
        if (bucket[i] - low < n_buckets) ids[found++] = i;
    return found;
}

void clb_ref_weigh(const float *x, uint32_t n, float m, float least, uint64_t *w) {
    for (uint32_t i = 0; i < n; i++) {
        float p = clb_expf(x[i] - m);
        w[i] = p < least ? 0 : clb_weight(p);
    }
}
