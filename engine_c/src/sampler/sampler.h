/* What the files of the sampler share. The order of operations is in sampler.c. */
#ifndef CLB_SAMPLER_H
#define CLB_SAMPLER_H
#include "../base/buffer.h"
#include "../base/fp.h"
#include "../model/model.h"

/* One call's state. The arrays live in the scratch buffer; V = vocab rounded up to 16. In the order (value descending,
 * id ascending) all members of bucket b (kernels.h) come before all of bucket b + 1. */
typedef struct clb_sampler {
    const struct colibri_model *model;
    colibri_sampling_t in; /* defaults filled in */
    uint32_t vocab, padded; /* V = padded */
    const float *x;         /* [vocab] the logits after steps 1 to 3: the caller's or `own`; value i is x[i] / t */
    float t, max;           /* temperature, largest value */
    float *own;             /* [V] */
    uint32_t *seen;         /* [V] counters of the penalties */
    uint16_t *bucket;       /* [V] of value i; CLB_NO_BUCKET where padding */
    uint32_t *count;        /* [CLB_BUCKETS] members of each bucket, see clb_count_below */
    uint64_t *mass;         /* [CLB_BUCKETS] sum of their weights */
    uint32_t known;         /* mass[] holds for the buckets below it */
    float least;            /* a smaller p has weight 0 (min-p) */
    uint32_t *ids;          /* [V] the members of some buckets */
    float *value;           /* [V] of each of these, in the same memory as seen */
    uint64_t *weight;       /* [V] of each of these; before, sorting's second array */
    uint64_t *pairs;        /* [V] what is sorted: key << 32 | id */
    uint32_t current;       /* the bucket whose members are there in order; CLB_NO_BUCKET = none */
} clb_sampler_t;
enum { CLB_NO_BUCKET = 0xffff };

/* Lays the arrays out at `base` (64-byte aligned, or NULL) and returns their total size in bytes. */
uint64_t clb_sampler_layout(clb_sampler_t *s, uint32_t vocab, void *base);

/* Is it a handle of colibri_init? */
colibri_status_t clb_sampler_model_check(const colibri_model_t *model, colibri_error_t *err);
/* Copies *sampling into *in, fills in defaults and checks everything that does not need the logits. */
colibri_status_t clb_sampling_check(const colibri_sampling_t *sampling, uint32_t vocab, colibri_sampling_t *in,
                                    colibri_error_t *err);
/* Does the request leave the order of the logits as it is: no mask, bias or penalty? */
int clb_sampling_plain(const colibri_sampling_t *in);

/* Sets x, t and max: the logits after mask, bias, penalties and temperature; raw_max is the logits'. NON_FINITE if a
 * value became NaN or +inf, NO_TOKEN if all are -inf. */
colibri_status_t clb_adjust(clb_sampler_t *s, const float *logits, float raw_max, colibri_error_t *err);
/* Lowest id with x[id] == max, which occurs in x[n] and is not -0. */
uint32_t clb_argmax(const clb_kernels_t *kernels, const float *x, uint32_t n, float max);

/* Fills bucket[]; with mass[] filled for the buckets below limit, returns the sum of all weights. */
uint64_t clb_order_start(clb_sampler_t *s, int with_mass, uint32_t limit);
/* Fills count[] for the buckets below limit; returns their members. */
uint32_t clb_count_below(clb_sampler_t *s, uint32_t limit);
/* Fills mass[] for the buckets below limit, of tokens with p >= s->least; that of others is 0. */
void clb_mass_below(clb_sampler_t *s, uint32_t limit);
/* Makes `ids` and `weight` the members of bucket b, in order. */
void clb_order_bucket(clb_sampler_t *s, uint32_t b);

/* The token drawn by top-k, top-p, min-p and (seed, position). */
uint32_t clb_draw(clb_sampler_t *s);
void clb_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* The exact maximum of logits [vocab]; NON_FINITE naming the first offender. */
colibri_status_t clb_logits_max(const struct colibri_model *model, const float *logits, float *max,
                                colibri_error_t *err);
/* Fills logprob and, if n > 0, the n best of *sample (token is set). */
void clb_logprobs(const struct colibri_model *model, const float *logits, float max, uint32_t n,
                  colibri_sample_t *sample);
#endif
