/* AVX-512 kernels of the sampler: the results of ../ref/sampling.c. */
#if defined(__x86_64__)
#include "avx512.h"
#include "vec.h"

uint32_t clb_avx512_above(const float *x, uint32_t from, uint32_t n, float low) {
    const __m512 k = _mm512_set1_ps(low);
    for (; from < n; from += 16) {
        __mmask16 hit = _mm512_cmp_ps_mask(load16_n(x + from, n - from), k, _CMP_GT_OQ);
        if (n - from < 16) hit &= mask16(n - from);
        if (hit) return from + (uint32_t)__builtin_ctz(hit);
    }
    return n;
}

void clb_avx512_allow(const float *x, const uint32_t *bits, uint32_t n, float *v) {
    const __m512 excluded = _mm512_set1_ps(-CLB_INF);
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 in = (__mmask16)(bits[i / 32] >> i % 32);
        store16_n(v + i, n - i, _mm512_mask_blend_ps(in, excluded, load16_n(x + i, n - i)));
    }
}

/* Weights of 16 p, each plus WEIGHT_BIAS: the bits of p * 2^39 + 2^52, as clb_weight has them. */
typedef struct weights { __m512i lo, hi; } weights_t;
static const uint64_t WEIGHT_BIAS = 0x4330000000000000u;
CLB_INLINE weights_t biased_weights(__m512 p) {
    const __m512d unit = _mm512_set1_pd(0x1p39), bias = _mm512_set1_pd(0x1p52);
    return (weights_t){_mm512_castpd_si512(_mm512_fmadd_pd(_mm512_cvtps_pd(low_half(p)), unit, bias)),
                       _mm512_castpd_si512(_mm512_fmadd_pd(_mm512_cvtps_pd(high_half(p)), unit, bias))};
}

/* Weights on their way into mass, with their buckets: put into a row first, so that how many of a vector are wanted
 * costs no wrong guess of a branch. An entry is the weight, which has 40 bits, above 16 of the bucket. */
enum { QUEUE = 256, WEIGHT_BIT = 16 };
typedef struct queue {
    uint64_t entry[QUEUE + 16];
    uint32_t n;
} queue_t;

CLB_INLINE void drain(queue_t *q, uint64_t *mass) {
    for (uint32_t i = 0; i < q->n; i++) mass[(uint16_t)q->entry[i]] += q->entry[i] >> WEIGHT_BIT;
    q->n = 0;
}

CLB_INLINE void enqueue8(queue_t *q, __mmask8 which, __m256i bucket, __m512i w) {
    __m512i entry = _mm512_or_si512(_mm512_slli_epi64(w, WEIGHT_BIT), _mm512_cvtepi32_epi64(bucket));
    _mm512_storeu_si512(q->entry + q->n, _mm512_maskz_compress_epi64(which, entry));
    q->n += (uint32_t)__builtin_popcount(which);
}

/* of 16 values; buckets are below 2^15 */
CLB_INLINE __m512i buckets(__m512 v, __m512 m) {
    __m512 distance = _mm512_mul_ps(_mm512_sub_ps(m, v), _mm512_set1_ps(CLB_BUCKETS_PER_UNIT));
    return _mm512_cvttps_epi32(_mm512_min_ps(distance, _mm512_set1_ps(CLB_BUCKETS - 1))); /* NaN: the last */
}
CLB_INLINE void store_buckets(uint16_t *bucket, uint32_t n, __m512i b) {
    __m256i narrow = _mm512_cvtepi32_epi16(b);
    if (n >= 16) _mm256_storeu_si256((void *)bucket, narrow);
    else memcpy(bucket, &narrow, n * sizeof *bucket);
}

CLB_INLINE uint64_t sum_lanes(__m512i v) {
    uint64_t lane[8], sum = 0;
    _mm512_storeu_si512(lane, v);
    for (int i = 0; i < 8; i++) sum += lane[i];
    return sum;
}

CLB_INLINE uint64_t spread(const float *x, uint32_t n, float t, float m, uint32_t limit, uint16_t *bucket,
                           uint64_t *mass, int divides) {
    const __m512 divisor = _mm512_set1_ps(t), most = _mm512_set1_ps(m);
    const __m512i bound = _mm512_set1_epi32((int)limit);
    __m512i lo = _mm512_setzero_si512(), hi = lo;
    queue_t q;
    q.n = 0;
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 v = load16_n(x + i, n - i);
        if (divides) v = _mm512_div_ps(v, divisor);
        __m512i b = buckets(v, most);
        store_buckets(bucket + i, n - i, b);
        if (!mass) continue;
        __m512 p = exp16(_mm512_sub_ps(v, most));
        __mmask16 near = _mm512_cmpgt_epi32_mask(bound, b);
        if (n - i < 16) {
            p = _mm512_mask_blend_ps(mask16(n - i), _mm512_setzero_ps(), p);
            near &= mask16(n - i);
        }
        weights_t w = biased_weights(p);
        lo = _mm512_add_epi64(lo, w.lo);
        hi = _mm512_add_epi64(hi, w.hi);
        enqueue8(&q, (__mmask8)near, _mm512_castsi512_si256(b), w.lo);
        enqueue8(&q, (__mmask8)(near >> 8), _mm512_extracti64x4_epi64(b, 1), w.hi);
        if (q.n >= QUEUE) drain(&q, mass);
    }
    if (!mass) return 0;
    drain(&q, mass);
    return sum_lanes(_mm512_add_epi64(lo, hi)) - (n + 15ull) / 16 * 16 * WEIGHT_BIAS;
}

uint64_t clb_avx512_spread(const float *x, uint32_t n, float t, float m, uint32_t limit, uint16_t *bucket,
                           uint64_t *mass) {
    if (!mass) return spread(x, n, t, m, limit, bucket, NULL, 1);
    return t == 1.0f ? spread(x, n, t, m, limit, bucket, mass, 0) : spread(x, n, t, m, limit, bucket, mass, 1);
}

uint32_t clb_avx512_members(const uint16_t *bucket, uint32_t n, uint32_t low, uint32_t n_buckets, uint32_t *ids) {
    if (!n_buckets) return 0;
    const __m512i first = _mm512_set1_epi32((int)low), most = _mm512_set1_epi32((int)n_buckets - 1);
    const __m512i step = _mm512_set1_epi32(16);
    __m512i id = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i += 16, id = _mm512_add_epi32(id, step)) {
        __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(bucket + i)));
        __m512i from = _mm512_sub_epi32(b, first);
        __mmask16 hit = _mm512_cmpeq_epi32_mask(_mm512_min_epu32(from, most), from);
        if (!hit) continue;
        _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(hit, id)); /* found <= i: 16 places are there */
        found += (uint32_t)__builtin_popcount(hit);
    }
    return found;
}

void clb_avx512_weigh(const float *x, uint32_t n, float m, float least, uint64_t *w) {
    const __m512 most = _mm512_set1_ps(m), bound = _mm512_set1_ps(least);
    const __m512i bias = _mm512_set1_epi64((long long)WEIGHT_BIAS);
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 p = exp16(_mm512_sub_ps(load16_n(x + i, n - i), most));
        p = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(p, bound, _CMP_LT_OQ), p, _mm512_setzero_ps());
        weights_t v = biased_weights(p);
        uint64_t out[16];
        uint64_t *to = n - i < 16 ? out : w + i;
        _mm512_storeu_si512(to, _mm512_sub_epi64(v.lo, bias));
        _mm512_storeu_si512(to + 8, _mm512_sub_epi64(v.hi, bias));
        if (n - i < 16) memcpy(w + i, out, (n - i) * sizeof *w);
    }
}
#else
typedef int clb_avx512_sampling_not_x86;
#endif
