/* Log probabilities of the raw logits (step 12). */
#include "sampler.h"

colibri_status_t clb_logits_max(const struct colibri_model *model, const float *logits, float *max,
                                colibri_error_t *err) {
    if (!model->kernels.finite_max(logits, model->g.vocab, max)) return COLIBRI_OK;
    uint32_t i = 0;
    while (clb_finite(logits[i])) i++;
    return clb_fail(err, COLIBRI_NON_FINITE, "logits[%u] is NaN or infinite", (uint64_t)i);
}

/* Ids of the n <= vocab best logits, by (value descending, id ascending). */
static void best(const clb_kernels_t *kernels, const float *logits, uint32_t vocab, uint32_t n, uint32_t *ids) {
    uint32_t have = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (have == n) i = kernels->above(logits, i, vocab, logits[ids[n - 1]]);
        if (i == vocab) break;
        uint32_t j = have < n ? have++ : n - 1;
        for (; j && logits[i] > logits[ids[j - 1]]; j--) ids[j] = ids[j - 1];
        ids[j] = i;
    }
}

void clb_logprobs(const struct colibri_model *model, const float *logits, float max, uint32_t n,
                  colibri_sample_t *sample) {
    uint32_t vocab = model->g.vocab;
    double m = (double)max, lse = clb_log(model->kernels.exp_sum(logits, vocab, max));
    sample->logprob = (float)(((double)logits[sample->token] - m) - lse);
    sample->n_top = n < vocab ? n : vocab;
    if (!sample->n_top) return;
    best(&model->kernels, logits, vocab, sample->n_top, sample->top_ids);
    for (uint32_t i = 0; i < sample->n_top; i++)
        sample->top_logprobs[i] = (float)(((double)logits[sample->top_ids[i]] - m) - lse);
}
