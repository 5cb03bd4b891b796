/* What the files of the sampler share. The order of operations is in sampler.c. */
#ifndef CLB_SAMPLER_H
#define CLB_SAMPLER_H
#include "../base/buffer.h"
#include "../base/fp.h"
#include "../model/model.h"

/* Bucket b holds the values whose distance from the maximum is in [b/64, (b+1)/64), the last one everything farther
 * away, -inf and padding too: all of weight 0. A bucket is a monotone function of the value, so all of bucket b come
 * before all of bucket b + 1 in the order (value descending, id ascending). */
enum { CLB_BUCKETS = 2048, CLB_BUCKETS_PER_UNIT = 64 };

/* One call's state. The arrays live in the scratch buffer; V = vocab rounded up to 16. */
typedef struct clb_sampler {
    const struct colibri_model *model;
    colibri_sampling_t in;  /* defaults filled in */
    uint32_t vocab, padded; /* V = padded */
    float max;              /* largest of v */
    float *v;               /* [V] adjusted logits, -inf = excluded; padding is -inf */
    float *p;               /* [V] exp(v - max); 0 where -inf and where min-p removed the token */
    uint32_t *seen;         /* [V] the same memory as p: counters of the penalties, before p exists */
    uint16_t *bucket;       /* [V] */
    uint32_t *count;        /* [CLB_BUCKETS] members of each bucket */
    uint64_t *mass;         /* [CLB_BUCKETS] sum of their weights, see clb_weight */
    uint64_t *sorted;       /* [V] the members of bucket `current` in order: key << 32 | id */
    uint64_t *spare;        /* [V] */
    uint32_t current;       /* CLB_BUCKETS = none */
} clb_sampler_t;

/* p in units of 2^-39, rounded to nearest even: sums over any vocabulary (<= 2^24) are exact in 64 bits, so no order
 * of summation is needed. p in [0, 1]. */
static inline uint64_t clb_weight(float p) {
    return clb_bits64((double)p * 0x1p39 + 0x1p52) & 0x000fffffffffffffu;
}

/* Lays the arrays out at `base` (64-byte aligned, or NULL) and returns their total size in bytes. */
uint64_t clb_sampler_layout(clb_sampler_t *s, uint32_t vocab, void *base);

/* Copies *sampling into *in, fills in defaults and checks everything that does not need the logits. */
colibri_status_t clb_sampling_check(const colibri_sampling_t *sampling, uint32_t vocab, colibri_sampling_t *in,
                                    colibri_error_t *err);
/* Does the request leave the order of the logits as it is: no mask, bias or penalty? */
int clb_sampling_plain(const colibri_sampling_t *in);

/* v = the logits after mask, bias, penalties and temperature; sets max. NON_FINITE if a value became NaN or +inf,
 * NO_TOKEN if all are -inf. */
colibri_status_t clb_adjust(clb_sampler_t *s, const float *logits, colibri_error_t *err);
/* Lowest id with x[id] == max, which occurs in x[n]. */
uint32_t clb_argmax(const float *x, uint32_t n, float max);

/* Fills bucket[] and count[] from v. */
void clb_order_start(clb_sampler_t *s);
/* Makes `sorted` the members of bucket b, count[b] of them. */
void clb_order_bucket(clb_sampler_t *s, uint32_t b);
static inline uint32_t clb_order_id(const clb_sampler_t *s, uint32_t i) { return (uint32_t)s->sorted[i]; }

/* The token drawn from v by top-k, top-p, min-p and (seed, position). */
uint32_t clb_draw(clb_sampler_t *s);
void clb_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* The exact maximum of logits [vocab]; NON_FINITE naming the first offender. */
colibri_status_t clb_logits_max(const struct colibri_model *model, const float *logits, float *max,
                                colibri_error_t *err);
/* Fills logprob and, if n > 0, the n best of *sample (token is set). */
void clb_logprobs(const struct colibri_model *model, const float *logits, float max, uint32_t n,
                  colibri_sample_t *sample);
#endif
