/* Mask, bias, penalties and temperature (steps 1 to 5), and argmax. */
#include "sampler.h"
#include <string.h>

static const uint32_t DONE = 0xffffffffu; /* in seen[]: this token's penalties have been applied */

static void apply_mask(clb_sampler_t *s, const float *logits) {
    if (s->in.allowed) s->model->kernels.allow(logits, s->in.allowed, s->vocab, s->own);
    else memcpy(s->own, logits, s->vocab * sizeof *s->own);
}

/* Stores a changed value. */
static colibri_status_t change(clb_sampler_t *s, uint32_t id, float value, const char *by, colibri_error_t *err) {
    s->own[id] = value;
    if (value < CLB_INF) return COLIBRI_OK;
    return clb_fail(err, COLIBRI_NON_FINITE, "the logit of token %u is not finite after %s", (uint64_t)id, by);
}

static colibri_status_t apply_bias(clb_sampler_t *s, colibri_error_t *err) {
    for (uint32_t i = 0; i < s->in.n_bias; i++) {
        uint32_t id = s->in.bias_ids[i];
        colibri_status_t status = change(s, id, s->own[id] + s->in.bias[i], "sampling.bias", err);
        if (status) return status;
    }
    return COLIBRI_OK;
}

static float penalised(const colibri_sampling_t *in, float v, uint32_t count) {
    float r = in->repetition_penalty;
    if (r != 1.0f) v = v > 0.0f ? v / r : v * r;
    if (count && in->presence_penalty != 0.0f) v -= in->presence_penalty;
    if (count && in->frequency_penalty != 0.0f) v -= in->frequency_penalty * (float)count;
    return v;
}

static colibri_status_t penalise(clb_sampler_t *s, const uint32_t *tokens, uint32_t n, colibri_error_t *err) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = tokens[i], count = s->seen[id];
        if (count == DONE || s->own[id] == -CLB_INF) continue;
        s->seen[id] = DONE;
        colibri_status_t status = change(s, id, penalised(&s->in, s->own[id], count), "the penalties", err);
        if (status) return status;
    }
    return COLIBRI_OK;
}

/* Only the counters of tokens that occur are ever touched. */
static colibri_status_t apply_penalties(clb_sampler_t *s, colibri_error_t *err) {
    const colibri_sampling_t *in = &s->in;
    for (uint32_t i = 0; i < in->n_prompt; i++) s->seen[in->prompt[i]] = 0;
    for (uint32_t i = 0; i < in->n_generated; i++) s->seen[in->generated[i]] = 0;
    for (uint32_t i = 0; i < in->n_generated; i++) s->seen[in->generated[i]]++;
    colibri_status_t status = penalise(s, in->prompt, in->n_prompt, err);
    return status ? status : penalise(s, in->generated, in->n_generated, err);
}

/* Steps 1 to 3; *max is the largest value after them. */
static colibri_status_t change_all(clb_sampler_t *s, const float *logits, float *max, colibri_error_t *err) {
    apply_mask(s, logits);
    colibri_status_t status = apply_bias(s, err);
    if (status) return status;
    if ((status = apply_penalties(s, err))) return status;
    s->x = s->own;
    s->model->kernels.finite_max(s->own, s->vocab, max); /* -inf is no failure here */
    return COLIBRI_OK;
}

colibri_status_t clb_adjust(clb_sampler_t *s, const float *logits, float raw_max, colibri_error_t *err) {
    float max = raw_max;
    s->x = logits;
    s->t = s->in.temperature;
    colibri_status_t status = clb_sampling_plain(&s->in) ? COLIBRI_OK : change_all(s, logits, &max, err);
    if (status) return status;
    s->max = max / s->t; /* division by one number keeps the order */
    if (s->max == -CLB_INF)
        return clb_fail(err, COLIBRI_NO_TOKEN, "sampling.allowed and the penalties leave no token of %u",
                        (uint64_t)s->vocab);
    if (s->max == CLB_INF)
        return clb_fail(err, COLIBRI_NON_FINITE, "the largest logit is not finite after sampling.temperature");
    return COLIBRI_OK;
}

/* the next float below x, which is finite and not -0 */
static float below(float x) {
    uint32_t u = clb_bits(x);
    return clb_float(u == 0 ? 0x80000001u : u >> 31 ? u + 1 : u - 1);
}

uint32_t clb_argmax(const clb_kernels_t *kernels, const float *x, uint32_t n, float max) {
    return kernels->above(x, 0, n, below(max));
}
