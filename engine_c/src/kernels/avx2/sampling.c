/* AVX2 kernels of the sampler: the results of ../ref/sampling.c. */
#if defined(__x86_64__)
#include "avx2.h"
#include "vec.h"

uint32_t clb_avx2_above(const float *x, uint32_t from, uint32_t n, float low) {
    const __m256 k = _mm256_set1_ps(low);
    for (; from < n; from += 8) {
        unsigned hit = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(load_n(x + from, n - from), k, _CMP_GT_OQ));
        if (n - from < 8) hit &= (1u << (n - from)) - 1;
        if (hit) return from + (uint32_t)__builtin_ctz(hit);
    }
    return n;
}

void clb_avx2_allow(const float *x, const uint32_t *bits, uint32_t n, float *v) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 excluded = _mm256_set1_ps(-CLB_INF);
    for (uint32_t i = 0; i < n; i += 8) {
        __m256i in = _mm256_and_si256(_mm256_set1_epi32((int)(bits[i / 32] >> i % 32)), bit);
        __m256 keep = _mm256_castsi256_ps(_mm256_cmpeq_epi32(in, bit));
        store_n(v + i, n - i, _mm256_blendv_ps(excluded, load_n(x + i, n - i), keep));
    }
}

/* Weights of 8 p, each plus WEIGHT_BIAS: the bits of p * 2^39 + 2^52, as clb_weight has them. */
typedef struct weights { __m256i lo, hi; } weights_t;
static const uint64_t WEIGHT_BIAS = 0x4330000000000000u;
CLB_INLINE weights_t biased_weights(__m256 p) {
    const __m256d unit = _mm256_set1_pd(0x1p39), bias = _mm256_set1_pd(0x1p52);
    __m256d lo = _mm256_cvtps_pd(_mm256_castps256_ps128(p)), hi = _mm256_cvtps_pd(_mm256_extractf128_ps(p, 1));
    return (weights_t){_mm256_castpd_si256(_mm256_fmadd_pd(lo, unit, bias)),
                       _mm256_castpd_si256(_mm256_fmadd_pd(hi, unit, bias))};
}

/* of 8 values; buckets are below 2^15 */
CLB_INLINE __m256i buckets(__m256 v, __m256 m) {
    __m256 distance = _mm256_mul_ps(_mm256_sub_ps(m, v), _mm256_set1_ps(CLB_BUCKETS_PER_UNIT));
    return _mm256_cvttps_epi32(_mm256_min_ps(distance, _mm256_set1_ps(CLB_BUCKETS - 1))); /* NaN: the last */
}
CLB_INLINE void store_buckets(uint16_t *bucket, uint32_t n, __m256i b) {
    __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    if (n >= 8) _mm_storeu_si128((void *)bucket, narrow);
    else memcpy(bucket, &narrow, n * sizeof *bucket);
}

/* Weights on their way into mass, with their buckets: put into a row first, so that how many of a vector are wanted
 * costs no wrong guess of a branch. An entry is the weight, which has 40 bits, above 16 of the bucket. */
enum { QUEUE = 256, WEIGHT_BIT = 16 };
typedef struct queue {
    uint64_t entry[QUEUE + 8];
    uint32_t n;
} queue_t;

CLB_INLINE void drain(queue_t *q, uint64_t *mass) {
    for (uint32_t i = 0; i < q->n; i++) mass[(uint16_t)q->entry[i]] += q->entry[i] >> WEIGHT_BIT;
    q->n = 0;
}

/* the 4-byte halves of those of 4 lanes that a mask has, moved to the front */
static const uint8_t front[16][8] = {
    {0},          {0, 1},             {2, 3},             {0, 1, 2, 3},
    {4, 5},       {0, 1, 4, 5},       {2, 3, 4, 5},       {0, 1, 2, 3, 4, 5},
    {6, 7},       {0, 1, 6, 7},       {2, 3, 6, 7},       {0, 1, 2, 3, 6, 7},
    {4, 5, 6, 7}, {0, 1, 4, 5, 6, 7}, {2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}};

CLB_INLINE void enqueue4(queue_t *q, unsigned which, __m128i bucket, __m256i w) {
    __m256i entry = _mm256_or_si256(_mm256_slli_epi64(w, WEIGHT_BIT), _mm256_cvtepi32_epi64(bucket));
    __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)front[which]));
    _mm256_storeu_si256((void *)(q->entry + q->n), _mm256_permutevar8x32_epi32(entry, order));
    q->n += (uint32_t)__builtin_popcount(which);
}

CLB_INLINE uint64_t sum_lanes(__m256i v) {
    uint64_t lane[4];
    _mm256_storeu_si256((void *)lane, v);
    return lane[0] + lane[1] + lane[2] + lane[3];
}

CLB_INLINE uint64_t spread(const float *x, uint32_t n, float t, float m, uint32_t limit, uint16_t *bucket,
                           uint64_t *mass) {
    const __m256 divisor = _mm256_set1_ps(t), most = _mm256_set1_ps(m);
    const __m256i bound = _mm256_set1_epi32((int)limit);
    __m256i lo = _mm256_setzero_si256(), hi = lo;
    queue_t q;
    q.n = 0;
    for (uint32_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_div_ps(load_n(x + i, n - i), divisor);
        __m256i b = buckets(v, most);
        store_buckets(bucket + i, n - i, b);
        if (!mass) continue;
        __m256 p = exp8(_mm256_sub_ps(v, most));
        __m256i near = _mm256_cmpgt_epi32(bound, b);
        if (n - i < 8) {
            p = _mm256_and_ps(p, _mm256_castsi256_ps(mask8(n - i)));
            near = _mm256_and_si256(near, mask8(n - i));
        }
        weights_t w = biased_weights(p);
        lo = _mm256_add_epi64(lo, w.lo);
        hi = _mm256_add_epi64(hi, w.hi);
        unsigned which = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(near));
        enqueue4(&q, which & 15, _mm256_castsi256_si128(b), w.lo);
        enqueue4(&q, which >> 4, _mm256_extracti128_si256(b, 1), w.hi);
        if (q.n >= QUEUE) drain(&q, mass);
    }
    if (mass) drain(&q, mass);
    return mass ? sum_lanes(_mm256_add_epi64(lo, hi)) - (n + 7ull) / 8 * 8 * WEIGHT_BIAS : 0;
}

uint64_t clb_avx2_spread(const float *x, uint32_t n, float t, float m, uint32_t limit, uint16_t *bucket,
                         uint64_t *mass) {
    return mass ? spread(x, n, t, m, limit, bucket, mass) : spread(x, n, t, m, limit, bucket, NULL);
}

uint32_t clb_avx2_members(const uint16_t *bucket, uint32_t n, uint32_t low, uint32_t n_buckets, uint32_t *ids) {
    if (!n_buckets) return 0;
    const __m256i first = _mm256_set1_epi16((short)low), most = _mm256_set1_epi16((short)(n_buckets - 1));
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i += 16) {
        __m256i from = _mm256_sub_epi16(_mm256_loadu_si256((const void *)(bucket + i)), first);
        unsigned hit = (unsigned)_mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_min_epu16(from, most), from));
        for (hit &= 0x55555555u; hit; hit &= hit - 1) ids[found++] = i + (uint32_t)__builtin_ctz(hit) / 2;
    }
    return found;
}

void clb_avx2_weigh(const float *x, uint32_t n, float m, float least, uint64_t *w) {
    const __m256 most = _mm256_set1_ps(m), bound = _mm256_set1_ps(least);
    const __m256i bias = _mm256_set1_epi64x((long long)WEIGHT_BIAS);
    for (uint32_t i = 0; i < n; i += 8) {
        __m256 p = exp8(_mm256_sub_ps(load_n(x + i, n - i), most));
        p = _mm256_andnot_ps(_mm256_cmp_ps(p, bound, _CMP_LT_OQ), p);
        weights_t v = biased_weights(p);
        uint64_t out[8];
        uint64_t *to = n - i < 8 ? out : w + i;
        _mm256_storeu_si256((void *)to, _mm256_sub_epi64(v.lo, bias));
        _mm256_storeu_si256((void *)(to + 4), _mm256_sub_epi64(v.hi, bias));
        if (n - i < 8) memcpy(w + i, out, (n - i) * sizeof *w);
    }
}
#else
typedef int clb_avx2_sampling_not_x86;
#endif
