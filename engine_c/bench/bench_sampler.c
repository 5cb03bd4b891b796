/* What drawing a token costs, on one thread: bench_sampler [vocab]
 * Logits are normal with deviation 3, as a language model's roughly are. Microseconds per row, the least of several
 * runs; a decode step draws one row per stream, in the caller's thread. */
#include "../include/colibri.h"
#include "../src/cpu/features.h"
#include "../src/model/model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RUNS = 9, ROWS = 16, HISTORY = 256, MOST_VOCAB = 1 << 20 };

static const struct { const char *name; colibri_sampling_t how; } cases[] = {
    {"greedy", {.struct_size = sizeof(colibri_sampling_t)}},
    {"greedy, log probability", {.struct_size = sizeof(colibri_sampling_t), .want_logprob = 1}},
    {"greedy, 5 log probabilities", {.struct_size = sizeof(colibri_sampling_t), .n_logprobs = 5}},
    {"temperature 0.8", {.struct_size = sizeof(colibri_sampling_t), .temperature = 0.8f}},
    {"temperature 0.8, top-p 0.95", {.struct_size = sizeof(colibri_sampling_t), .temperature = 0.8f, .top_p = 0.95f}},
    {"temperature 0.8, top-k 40", {.struct_size = sizeof(colibri_sampling_t), .temperature = 0.8f, .top_k = 40}},
    {"the same, penalty of 256 tokens", {.struct_size = sizeof(colibri_sampling_t), .temperature = 0.8f, .top_k = 40,
                                         .repetition_penalty = 1.1f, .n_generated = HISTORY}},
};

static double now_us(void) { /* of this thread: time given to other programs does not count */
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static float normal(void) {
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += (float)rand() / (float)RAND_MAX;
    return sum;
}

/* Microseconds of one row; exits if the sampler refuses. */
static double cost(const struct colibri_model *m, colibri_sampling_t how, const float *logits,
                   colibri_buffer_t *scratch, const uint32_t *history) {
    double best = 0;
    how.generated = history;
    for (int run = 0; run < RUNS; run++) {
        double start = now_us();
        for (uint32_t row = 0; row < ROWS; row++) {
            colibri_sample_t out = {.struct_size = sizeof out};
            how.position = row;
            if (colibri_sample(m, &how, logits + (size_t)row * m->g.vocab, scratch, &out, NULL)) exit(1);
        }
        double took = (now_us() - start) / ROWS;
        best = !run || took < best ? took : best;
    }
    return best;
}

int main(int argc, char **argv) {
    unsigned long vocab = argc > 1 ? strtoul(argv[1], NULL, 10) : 49152;
    if (!vocab || vocab > MOST_VOCAB) return fprintf(stderr, "bench_sampler: vocab must be 1...%d\n", MOST_VOCAB), 2;
    static struct colibri_model m;
    uint32_t history[HISTORY];
    uint64_t bytes = 0;
    m.magic = CLB_MODEL_MAGIC, m.g.vocab = (uint32_t)vocab;
    float *logits = malloc(ROWS * vocab * sizeof *logits);
    if (!logits || colibri_sample_size(&m, &bytes)) return 1;
    colibri_buffer_t scratch = {.struct_size = sizeof scratch, .type = COLIBRI_WORKSPACE, .size = bytes,
                                .ptr = aligned_alloc(64, bytes), .alignment = 64, .ref_count = 1};
    if (!scratch.ptr) return 1;
    for (size_t i = 0; i < ROWS * vocab; i++) logits[i] = 3.0f * normal();
    for (uint32_t i = 0; i < HISTORY; i++) history[i] = (uint32_t)(i * 97u % vocab);
    for (uint32_t isa = COLIBRI_ISA_AVX2; isa <= clb_cpu_best_isa(); isa++) {
        clb_kernels_fill(&m.kernels, isa);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            printf("%-7s vocab %lu  %-32s %8.1f us a row\n", isa == COLIBRI_ISA_AVX2 ? "avx2" : "avx512", vocab,
                   cases[i].name, cost(&m, cases[i].how, logits, &scratch, history));
    }
    free(logits), free(scratch.ptr);
    return 0;
}
