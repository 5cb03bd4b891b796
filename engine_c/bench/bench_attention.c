/* Speed of the attention and softmax kernels on one thread: bench_attention [isa ...]
 * `rows` queries (heads of a group times query positions) share each pass over KEYS keys of f16; 4 and 3 rows are a
 * decode step of group 4 and 3, 48 and 64 a prefill tile. GFLOPS counts 2 per multiply-add, GB/s is K or V bytes.
 * Without isa names: every vector set this CPU has. */
#include "../include/colibri.h"
#include "../src/base/fpenv.h"
#include "../src/cpu/features.h"
#include "../src/kernels/kernels.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { KEYS = 512, MOST_ROWS = 64, MOST_DIM = 128, LD = KEYS + 16, RUNS = 15, REPEATS = 4 };
static const uint32_t dims[] = {64, 128}, rows_of[] = {1, 2, 3, 4, 6, 8, 48, 64};

static double now(void) { /* of this thread: time given to other programs does not count */
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct job {
    const clb_kernels_t *t;
    uint32_t rows, dim;
    uint16_t *kv;
    float *q, *scores, *out;
} job_t;
typedef void run_fn(const job_t *);

static void run_scores(const job_t *j) {
    j->t->attn_scores[COLIBRI_KV_F16](j->q, j->rows, j->kv, KEYS, j->dim, j->scores, LD);
}
static void run_accumulate(const job_t *j) {
    j->t->attn_accumulate[COLIBRI_KV_F16](j->scores, LD, j->rows, j->kv, KEYS, j->dim, j->out);
}
static void run_softmax(const job_t *j) {
    for (uint32_t r = 0; r < j->rows; r++) j->t->softmax(j->scores + (size_t)r * LD, KEYS);
}

static double best(run_fn *run, const job_t *j) {
    double least = 1e9;
    for (int i = 0; i < RUNS; i++) {
        double start = now();
        for (int k = 0; k < REPEATS; k++) run(j);
        double t = (now() - start) / REPEATS;
        if (t < least) least = t;
    }
    return least;
}

static void bench(job_t *j, const char *isa) {
    double scores = best(run_scores, j), softmax = best(run_softmax, j), accumulate = best(run_accumulate, j);
    double gflop = 2e-9 * KEYS * j->dim * j->rows, gb = 2e-9 * KEYS * j->dim;
    printf("%-7s dim %3u rows %2u  scores %6.1f GFLOPS %5.1f GB/s  accumulate %6.1f GFLOPS %5.1f GB/s  "
           "softmax %5.2f ns/key\n",
           isa, j->dim, j->rows, gflop / scores, gb / scores, gflop / accumulate, gb / accumulate,
           1e9 * softmax / j->rows / KEYS);
}

static int wanted(const char *isa, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], isa)) return 1;
    return argc <= 1 && strcmp(isa, "ref");
}

int main(int argc, char **argv) {
    static _Alignas(64) uint16_t kv[KEYS * MOST_DIM];
    static _Alignas(64) float q[MOST_ROWS * MOST_DIM], scores[MOST_ROWS * LD], out[MOST_ROWS * MOST_DIM];
    for (size_t i = 0; i < KEYS * MOST_DIM; i++) kv[i] = (uint16_t)(0x3000 + rand() % 0x800);
    for (size_t i = 0; i < MOST_ROWS * MOST_DIM; i++) q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    clb_fpenv_enter();
    for (uint32_t isa = COLIBRI_ISA_REF; isa <= clb_cpu_best_isa(); isa++) {
        clb_kernels_t t;
        if (!wanted(clb_isa_name(isa), argc, argv)) continue;
        clb_kernels_fill(&t, isa);
        for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
            for (size_t r = 0; r < sizeof rows_of / sizeof *rows_of; r++)
                bench(&(job_t){&t, rows_of[r], dims[d], kv, q, scores, out}, clb_isa_name(isa));
    }
    return 0;
}
