/* The sampler: from raw logits f32 [vocab] to one token, the same on every CPU.
 *
 * Every step is a fixed sequence of IEEE operations; only the way to the result (which part of the vocabulary is ever
 * sorted) is free. tests/reference/sampler.py is the same definition in numpy.
 *
 *   0. A logit that is NaN or infinite: COLIBRI_NON_FINITE.
 *   1. v[i] = logits[i] in float; a token whose bit in `allowed` is clear gets v = -inf.
 *   2. v[i] += bias, in the order of bias_ids.
 *   3. For each distinct token of prompt and generated with v > -inf, in float and in this order
 *        repetition   v > 0 ? v / r : v * r             (tokens of prompt or generated, once)
 *        presence     v -= presence                     (tokens of generated, once)
 *        frequency    v -= frequency * (float)count     (count = occurrences in generated)
 *      A penalty at its neutral value (1, 0, 0) is not applied and does not read its tokens.
 *   4. v = -inf means excluded, be it by the mask or because a finite value fell below the range of float. NaN or +inf
 *      after 2, 3 or 5: COLIBRI_NON_FINITE. Everything excluded: COLIBRI_NO_TOKEN.
 *   5. temperature < 1e-5f: the lowest id with the largest v. Otherwise v = v / temperature.
 *   6. p[i] = clb_expf(v[i] - vmax) in float, so the largest p is 1. Its weight is w[i] = p[i] in units of 2^-39,
 *      rounded to nearest even: sums of weights are exact in 64 bits whatever their order, hence nothing need be sorted
 *      to know a total. The order is (v descending, id ascending); cum of a token is the sum of w up to and with it.
 *   7. top-k keeps the first k. T = the sum of w that are left.
 *   8. top-p (if < 1) keeps the shortest prefix with (double)cum >= (double)top_p * (double)T.
 *   9. min-p removes tokens with p < min_p. total = the sum of w that are left.
 *  10. x = Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) of key
 *      (seed mod 2^32, seed div 2^32) and counter (position mod 2^32, position div 2^32, 0, 0);
 *      u = ((x[0] 2^32 + x[1]) >> 11) 2^-53.
 *  11. The token is the first survivor whose cum, over survivors, exceeds u * total (exact, in 128 bits). There always
 *      is one; tokens of weight 0 are never it.
 *  12. Log probabilities are of the raw logits: lp[i] = (float)(((double)logits[i] - m) - log(exp_sum(logits, m))), m
 *      the exact maximum, log = clb_log. The n best are by (logit descending, id ascending). */
#include "sampler.h"
#include "../base/fpenv.h"

static const float GREEDY_BELOW = 1e-5f;

uint64_t clb_sampler_layout(clb_sampler_t *s, uint32_t vocab, void *base) {
    enum { OWN, SEEN, IDS, BUCKET, PAIRS, WEIGHT, COUNT, MASS, ARRAYS };
    uint64_t padded = ((uint64_t)vocab + 15) / 16 * 16, at[ARRAYS + 1] = {0};
    const uint64_t bytes[ARRAYS] = {
        [OWN] = padded * sizeof *s->own,       [SEEN] = padded * sizeof *s->seen,
        [IDS] = padded * sizeof *s->ids,       [BUCKET] = padded * sizeof *s->bucket,
        [PAIRS] = padded * sizeof *s->pairs,   [WEIGHT] = padded * sizeof *s->weight,
        [COUNT] = CLB_BUCKETS * sizeof *s->count, [MASS] = CLB_BUCKETS * sizeof *s->mass};
    for (int i = 0; i < ARRAYS; i++) at[i + 1] = at[i] + (bytes[i] + 63) / 64 * 64;
    if (!base) return at[ARRAYS];
    char *memory = base;
    s->vocab = vocab;
    s->padded = (uint32_t)padded;
    s->own = (void *)(memory + at[OWN]);
    s->seen = (void *)(memory + at[SEEN]);
    s->value = (void *)(memory + at[SEEN]);
    s->bucket = (void *)(memory + at[BUCKET]);
    s->ids = (void *)(memory + at[IDS]);
    s->pairs = (void *)(memory + at[PAIRS]);
    s->weight = (void *)(memory + at[WEIGHT]);
    s->count = (void *)(memory + at[COUNT]);
    s->mass = (void *)(memory + at[MASS]);
    return at[ARRAYS];
}

colibri_status_t clb_sampler_model_check(const colibri_model_t *model, colibri_error_t *err) {
    if (!model) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "model is NULL");
    if (model->magic != CLB_MODEL_MAGIC)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "model is not a handle of colibri_init");
    return COLIBRI_OK;
}

static colibri_status_t check_results(const float *logits, const colibri_sample_t *sample, colibri_error_t *err) {
    if (!logits) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "logits is NULL");
    return clb_struct_check(sample, CLB_SIZE_TO(colibri_sample_t, top_logprobs), "sample", err);
}

colibri_status_t colibri_sample_size(const colibri_model_t *model, uint64_t *bytes) {
    colibri_status_t status = clb_sampler_model_check(model, NULL);
    if (status || !bytes) return COLIBRI_INVALID_ARGUMENT;
    *bytes = clb_sampler_layout(NULL, model->g.vocab, NULL);
    return COLIBRI_OK;
}

/* Steps 0 to 11. *max is the raw maximum. */
static colibri_status_t choose(clb_sampler_t *s, const float *logits, float *max, uint32_t *token,
                               colibri_error_t *err) {
    int greedy = s->in.temperature < GREEDY_BELOW;
    colibri_status_t status = clb_logits_max(s->model, logits, max, err);
    if (status) return status;
    if (greedy && clb_sampling_plain(&s->in)) {
        *token = clb_argmax(&s->model->kernels, logits, s->vocab, *max);
        return COLIBRI_OK;
    }
    if (greedy) s->in.temperature = 1.0f;
    status = clb_adjust(s, logits, *max, err);
    if (status) return status;
    *token = greedy ? clb_argmax(&s->model->kernels, s->x, s->vocab, s->max) : clb_draw(s);
    return COLIBRI_OK;
}

static colibri_status_t sample_checked(clb_sampler_t *s, const float *logits, colibri_sample_t *sample,
                                       colibri_error_t *err) {
    float max;
    uint32_t token;
    colibri_status_t status = choose(s, logits, &max, &token, err);
    if (status) return status;
    sample->token = token;
    sample->logprob = 0.0f;
    sample->n_top = 0;
    if (s->in.want_logprob || s->in.n_logprobs) clb_logprobs(s->model, logits, max, s->in.n_logprobs, sample);
    return COLIBRI_OK;
}

colibri_status_t colibri_sample(const colibri_model_t *model, const colibri_sampling_t *sampling, const float *logits,
                                colibri_buffer_t *scratch, colibri_sample_t *sample, colibri_error_t *err) {
    colibri_status_t status = clb_sampler_model_check(model, err);
    if (status) return status;
    if ((status = check_results(logits, sample, err))) return status;
    clb_sampler_t s = {.model = model};
    uint64_t need = clb_sampler_layout(&s, model->g.vocab, NULL);
    if ((status = clb_buffer_check(scratch, "scratch", COLIBRI_WORKSPACE, need, err))) return status;
    if ((status = clb_sampling_check(sampling, model->g.vocab, &s.in, err))) return status;
    clb_sampler_layout(&s, model->g.vocab, scratch->ptr);
    clb_buffer_acquire(scratch);
    clb_fpenv_t env = clb_fpenv_enter();
    status = sample_checked(&s, logits, sample, err);
    clb_fpenv_leave(env);
    clb_buffer_release(scratch);
    return status;
}

colibri_status_t colibri_score(const colibri_model_t *model, const float *logits, uint32_t token, uint32_t n_logprobs,
                               colibri_sample_t *sample, colibri_error_t *err) {
    colibri_status_t status = clb_sampler_model_check(model, err);
    if (status) return status;
    if ((status = check_results(logits, sample, err))) return status;
    if (token >= model->g.vocab)
        return clb_fail(err, COLIBRI_TOKEN_RANGE, "token is %u, the vocabulary has %u", (uint64_t)token,
                        (uint64_t)model->g.vocab);
    if (n_logprobs > COLIBRI_MAX_LOGPROBS)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "n_logprobs is %u, at most %u are kept", (uint64_t)n_logprobs,
                        (uint64_t)COLIBRI_MAX_LOGPROBS);
    clb_fpenv_t env = clb_fpenv_enter();
    float max;
    status = clb_logits_max(model, logits, &max, err);
    if (!status) {
        sample->token = token;
        clb_logprobs(model, logits, max, n_logprobs, sample);
    }
    clb_fpenv_leave(env);
    return status;
}
