/* Checks of sampling parameters. */
#include "sampler.h"
#include <float.h>

/* A float parameter: its place, its allowed range and the range in words. */
typedef struct clb_range {
    const char *name, *words;
    size_t offset;
    float low, high;
} clb_range_t;

#define FIELD(field) .name = #field, .offset = offsetof(colibri_sampling_t, field)
static const clb_range_t ranges[] = {
    {FIELD(temperature), .low = 0.0f, .high = FLT_MAX, .words = "finite and at least 0"},
    {FIELD(top_p), .low = 0.0f, .high = 1.0f, .words = "in (0, 1], or 0 for off"},
    {FIELD(min_p), .low = 0.0f, .high = 1.0f, .words = "in [0, 1]"},
    {FIELD(repetition_penalty), .low = 0.0f, .high = FLT_MAX, .words = "finite and above 0, or 0 for off"},
    {FIELD(presence_penalty), .low = -FLT_MAX, .high = FLT_MAX, .words = "finite"},
    {FIELD(frequency_penalty), .low = -FLT_MAX, .high = FLT_MAX, .words = "finite"},
};
#undef FIELD

static colibri_status_t check_floats(const colibri_sampling_t *in, colibri_error_t *err) {
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const clb_range_t *r = ranges + i;
        float x = *(const float *)(const void *)((const char *)in + r->offset);
        if (!(x >= r->low && x <= r->high)) /* NaN fails too */
            return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "sampling.%s must be %s", r->name, r->words);
    }
    return COLIBRI_OK;
}

static colibri_status_t check_ids(const char *name, const uint32_t *ids, uint32_t n, uint32_t vocab,
                                  colibri_error_t *err) {
    if (n && !ids)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "sampling.%s is NULL with a count of %u", name, (uint64_t)n);
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] >= vocab)
            return clb_fail(err, COLIBRI_TOKEN_RANGE, "sampling.%s[%u] is %u, the vocabulary has %u", name, (uint64_t)i,
                            (uint64_t)ids[i], (uint64_t)vocab);
    return COLIBRI_OK;
}

static colibri_status_t check_bias(const colibri_sampling_t *in, uint32_t vocab, colibri_error_t *err) {
    colibri_status_t status = check_ids("bias_ids", in->bias_ids, in->n_bias, vocab, err);
    if (status) return status;
    if (in->n_bias && !in->bias)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "sampling.bias is NULL with a count of %u",
                        (uint64_t)in->n_bias);
    for (uint32_t i = 0; i < in->n_bias; i++)
        if (!(in->bias[i] >= -FLT_MAX && in->bias[i] <= FLT_MAX))
            return clb_fail(err, COLIBRI_INVALID_ARGUMENT,
                            "sampling.bias[%u] is not finite (use `allowed` to exclude a token)", (uint64_t)i);
    return COLIBRI_OK;
}

/* Defaults, and the token lists that no penalty reads made empty. */
static void normalise(colibri_sampling_t *in) {
    if (in->top_p == 0.0f) in->top_p = 1.0f;
    if (in->repetition_penalty == 0.0f) in->repetition_penalty = 1.0f;
    if (in->repetition_penalty == 1.0f) in->n_prompt = 0;
    if (in->repetition_penalty == 1.0f && in->presence_penalty == 0.0f && in->frequency_penalty == 0.0f)
        in->n_generated = 0;
}

colibri_status_t clb_sampling_check(const colibri_sampling_t *sampling, uint32_t vocab, colibri_sampling_t *in,
                                    colibri_error_t *err) {
    uint32_t least = CLB_SIZE_TO(colibri_sampling_t, reserved);
    colibri_status_t status = clb_struct_check(sampling, least, "sampling", err);
    if (status) return status;
    clb_struct_read(in, sizeof *in, sampling);
    if (in->reserved) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "sampling.reserved must be 0");
    if (in->n_logprobs > COLIBRI_MAX_LOGPROBS)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "sampling.n_logprobs is %u, at most %u are kept",
                        (uint64_t)in->n_logprobs, (uint64_t)COLIBRI_MAX_LOGPROBS);
    if ((status = check_floats(in, err))) return status;
    normalise(in);
    if ((status = check_bias(in, vocab, err))) return status;
    if ((status = check_ids("prompt", in->prompt, in->n_prompt, vocab, err))) return status;
    return check_ids("generated", in->generated, in->n_generated, vocab, err);
}

int clb_sampling_plain(const colibri_sampling_t *in) {
    return !in->allowed && !in->n_bias && !in->n_prompt && !in->n_generated;
}
