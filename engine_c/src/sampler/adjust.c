/* Mask, bias, penalties and temperature (steps 1 to 5), and argmax. */
#include "sampler.h"
#include <string.h>

enum { LANES = 16 };
static const uint32_t DONE = 0xffffffffu; /* in seen[]: this token's penalties have been applied */

static void apply_mask(clb_sampler_t *s, const float *logits) {
    const uint32_t *allowed = s->in.allowed;
    memcpy(s->v, logits, s->vocab * sizeof *s->v);
    for (uint32_t i = s->vocab; i < s->padded; i++) s->v[i] = -CLB_INF;
    if (!allowed) return;
    for (uint32_t i = 0; i < s->vocab; i++)
        if (!(allowed[i / 32] >> i % 32 & 1)) s->v[i] = -CLB_INF;
}

/* Stores a changed value. */
static colibri_status_t change(clb_sampler_t *s, uint32_t id, float value, const char *by, colibri_error_t *err) {
    s->v[id] = value;
    if (value < CLB_INF) return COLIBRI_OK;
    return clb_fail(err, COLIBRI_NON_FINITE, "the logit of token %u is not finite after %s", (uint64_t)id, by);
}

static colibri_status_t apply_bias(clb_sampler_t *s, colibri_error_t *err) {
    for (uint32_t i = 0; i < s->in.n_bias; i++) {
        uint32_t id = s->in.bias_ids[i];
        colibri_status_t status = change(s, id, s->v[id] + s->in.bias[i], "sampling.bias", err);
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
        if (count == DONE || s->v[id] == -CLB_INF) continue;
        s->seen[id] = DONE;
        colibri_status_t status = change(s, id, penalised(&s->in, s->v[id], count), "the penalties", err);
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

/* v /= temperature, and its maximum */
static float cool(clb_sampler_t *s) {
    float t = s->in.temperature, lane[LANES];
    for (int j = 0; j < LANES; j++) lane[j] = -CLB_INF;
    for (uint32_t i = 0; i < s->padded; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float x = s->v[i + j] / t;
            s->v[i + j] = x;
            lane[j] = x > lane[j] ? x : lane[j];
        }
    for (int j = 1; j < LANES; j++) lane[0] = lane[j] > lane[0] ? lane[j] : lane[0];
    return lane[0];
}

colibri_status_t clb_adjust(clb_sampler_t *s, const float *logits, colibri_error_t *err) {
    apply_mask(s, logits);
    colibri_status_t status = apply_bias(s, err);
    if (status) return status;
    if ((status = apply_penalties(s, err))) return status;
    s->max = cool(s);
    if (s->max == -CLB_INF)
        return clb_fail(err, COLIBRI_NO_TOKEN, "sampling.allowed and the penalties leave no token of %u",
                        (uint64_t)s->vocab);
    if (s->max == CLB_INF)
        return clb_fail(err, COLIBRI_NON_FINITE, "the largest logit is not finite after sampling.temperature");
    return COLIBRI_OK;
}

uint32_t clb_argmax(const float *x, uint32_t n, float max) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        int hit = 0;
        for (int j = 0; j < LANES; j++) hit |= x[i + j] == max;
        if (hit) break;
    }
    while (x[i] != max) i++;
    return i;
}
