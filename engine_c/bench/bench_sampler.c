/* What drawing tokens costs: bench_sampler [vocab [threads]]
 * Logits are normal with deviation 3, flatter than a good language model's. First the cost of one row on one thread, in
 * thread time, then that of a step's rows in one call of colibri_sample_rows, in wall time; microseconds, the least of
 * several runs. */
#include "../include/colibri.h"
#include "../src/cpu/features.h"
#include "../src/model/model.h"
#include "host/pool.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RUNS = 9, ROWS = 32, HISTORY = 256, BIASED = 50, MOST_VOCAB = 1 << 20, MOST_THREADS = 64 };

static uint32_t history[HISTORY], allowed[MOST_VOCAB / 32];
static float bias[BIASED];

#define HOW .struct_size = sizeof(colibri_sampling_t)
#define TOP_P HOW, .temperature = 1.0f, .top_p = 0.95f
static const struct { const char *name; colibri_sampling_t how; } cases[] = {
    {"greedy", {HOW}},
    {"greedy, log probability", {HOW, .want_logprob = 1}},
    {"greedy, 5 log probabilities", {HOW, .n_logprobs = 5}},
    {"temperature 1", {HOW, .temperature = 1.0f}},
    {"temperature 1, top-p 0.95", {TOP_P}},
    {"the same at temperature 0.8", {HOW, .temperature = 0.8f, .top_p = 0.95f}},
    {"the same at 1, 5 log probabilities", {TOP_P, .n_logprobs = 5}},
    {"the same, penalties, 50 biases", {TOP_P, .repetition_penalty = 1.1f, .frequency_penalty = 0.2f,
                                        .generated = history, .n_generated = HISTORY, .bias_ids = history,
                                        .bias = bias, .n_bias = BIASED}},
    {"the same, half the tokens allowed", {TOP_P, .allowed = allowed}},
    {"temperature 1, top-k 40", {HOW, .temperature = 1.0f, .top_k = 40}},
    {"temperature 1, min-p 0.05", {HOW, .temperature = 1.0f, .min_p = 0.05f}},
};

static double now_us(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static float normal(void) {
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += (float)rand() / (float)RAND_MAX;
    return sum;
}

typedef struct rows {
    struct colibri_model *model;
    colibri_buffer_t scratch;
    colibri_sampling_t how[ROWS];
    colibri_sample_t sample[ROWS];
    colibri_draw_t draw[ROWS];
} rows_t;

/* Microseconds of drawing n rows; exits if the sampler refuses. */
static double cost(rows_t *r, colibri_sampling_t how, uint32_t n, clockid_t clock) {
    double best = 0;
    for (int run = 0; run < RUNS; run++) {
        for (uint32_t i = 0; i < n; i++) r->how[i] = how, r->how[i].position = i + (uint64_t)run * n;
        double start = now_us(clock);
        if (colibri_sample_rows(r->model, r->draw, n, &r->scratch, NULL)) exit(1);
        double took = now_us(clock) - start;
        for (uint32_t i = 0; i < n; i++)
            if (r->draw[i].status) exit(1);
        best = !run || took < best ? took : best;
    }
    return best;
}

static void each_row(rows_t *r, const char *isa) {
    r->model->config.threads = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        printf("%-7s %-36s %8.1f us a row\n", isa, cases[i].name,
               cost(r, cases[i].how, ROWS, CLOCK_THREAD_CPUTIME_ID) / ROWS);
}

static void each_step(rows_t *r, const char *isa, uint32_t threads) {
    static const uint32_t streams[] = {1, 8, 16, 32};
    r->model->config.threads = threads;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        printf("%-7s %-36s", isa, cases[i].name);
        for (size_t j = 0; j < sizeof streams / sizeof *streams; j++)
            printf("%9.1f us", cost(r, cases[i].how, streams[j], CLOCK_MONOTONIC));
        puts("");
    }
}

static int prepare(rows_t *r, uint32_t threads) {
    uint32_t vocab = r->model->g.vocab;
    uint64_t bytes = 0;
    float *logits = malloc((size_t)ROWS * vocab * sizeof *logits);
    if (!logits || colibri_sample_size(r->model, &bytes)) return 0;
    r->scratch = (colibri_buffer_t){.struct_size = sizeof r->scratch, .type = COLIBRI_WORKSPACE,
                                    .size = threads * bytes, .ptr = aligned_alloc(64, threads * bytes),
                                    .alignment = 64, .ref_count = 1};
    for (size_t i = 0; i < (size_t)ROWS * vocab; i++) logits[i] = 3.0f * normal();
    for (uint32_t i = 0; i < HISTORY; i++) history[i] = (uint32_t)(i * 97u % vocab);
    for (uint32_t i = 0; i < BIASED; i++) bias[i] = 0.5f;
    memset(allowed, 0x55, sizeof allowed);
    for (uint32_t i = 0; i < ROWS; i++) {
        r->sample[i].struct_size = sizeof *r->sample;
        r->draw[i] = (colibri_draw_t){.struct_size = sizeof *r->draw, .sampling = &r->how[i], .sample = &r->sample[i],
                                      .logits = logits + (size_t)i * vocab};
    }
    return r->scratch.ptr != NULL;
}

int main(int argc, char **argv) {
    unsigned long vocab = argc > 1 ? strtoul(argv[1], NULL, 10) : 49152;
    unsigned long threads = argc > 2 ? strtoul(argv[2], NULL, 10) : 2;
    if (!vocab || vocab > MOST_VOCAB || !threads || threads > MOST_THREADS)
        return fprintf(stderr, "bench_sampler: vocab must be 1...%d, threads 1...%d\n", MOST_VOCAB, MOST_THREADS), 2;
    static struct colibri_model m;
    static rows_t r;
    colibri_pool_t *pool;
    m.magic = CLB_MODEL_MAGIC, m.g.vocab = (uint32_t)vocab, r.model = &m;
    if (!prepare(&r, (uint32_t)threads) || colibri_pool_create((uint32_t)threads, 0, &pool)) return 1;
    m.config.parallel_for = colibri_pool_run, m.config.parallel_ctx = pool;
    printf("vocab %lu, one thread\n", vocab);
    for (uint32_t isa = COLIBRI_ISA_AVX2; isa <= clb_cpu_best_isa(); isa++) {
        clb_kernels_fill(&m.kernels, isa);
        each_row(&r, clb_isa_name(isa));
    }
    printf("vocab %lu, %lu threads, 1, 8, 16 and 32 rows\n", vocab, threads);
    each_step(&r, clb_isa_name(clb_cpu_best_isa()), (uint32_t)threads);
    colibri_pool_destroy(pool);
    return 0;
}
