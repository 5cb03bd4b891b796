/* Speed of the kernels on one thread: bench_kernels [K=4096] [N=4096] [isa ...]
 *   GEMM       one weight matrix [N, K] per format against 1 .. 64 activation rows. GOPS counts 2 per multiply-add;
 * GB/s is weight bytes per second. attention  scores and accumulate of `heads` queries over 1024 keys of 128, GB/s of K
 * or V bytes Best of several runs. Without isa names: every vector set this CPU has (ref only if asked for). */
#include "../include/colibri.h"
#include "../src/base/fpenv.h"
#include "../src/cpu/features.h"
#include "../src/kernels/kernels.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CAP = 65, KEYS = 1024, HEAD = 128, RUNS = 7 }; /* an odd row capacity: a power of two is kinder than life */
static const uint32_t row_counts[] = {1, 2, 4, 8, 16, 24, 32, 33, 64};
static const uint32_t head_counts[] = {1, 4, 8};

static double now(void) { /* of this thread: time given to other programs does not count */
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *memory(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p) {
        fprintf(stderr, "bench_kernels: no memory for %zu bytes; choose a smaller K or N\n", bytes);
        exit(1);
    }
    memset(p, 0, bytes);
    return p;
}

static void random_floats(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

typedef struct job { /* one thing to time */
    const clb_kernels_t *t;
    uint32_t format, n, rows; /* gemm: weight format, outputs; attention: KV format */
    size_t panel_stride, ld;
    clb_act_t act;
    void *w;
    float *x, *y;
} job_t;
typedef void run_fn(const job_t *);

static void run_gemm(const job_t *j) {
    clb_panels_t w = {j->w, j->panel_stride, clb_panels(j->n), j->act.nb};
    j->t->gemm[j->format](&w, &j->act, 0, j->rows, j->y, j->ld);
}
static void run_scores(const job_t *j) {
    j->t->attn_scores[j->format](j->x, j->rows, j->w, KEYS, HEAD, j->y, KEYS);
}
static void run_accumulate(const job_t *j) {
    j->t->attn_accumulate[j->format](j->y, KEYS, j->rows, j->w, KEYS, HEAD, j->x);
}

static double best(run_fn *run, const job_t *j) {
    double least = 1e9;
    for (int i = 0; i < RUNS; i++) {
        double start = now();
        run(j);
        double t = now() - start;
        if (t < least) least = t;
    }
    return least;
}

static void bench_gemm(const clb_kernels_t *t, const char *isa, uint32_t format, uint32_t k, uint32_t n) {
    const clb_format_t *f = clb_format(format);
    uint32_t nb = clb_blocks(k), panels = clb_panels(n);
    job_t j = {
        .t = t, .format = format, .n = n, .ld = (size_t)panels * CLB_PANEL, .panel_stride = clb_panel_stride(f, nb)};
    float *x = memory((size_t)nb * CLB_BLOCK * 4), *w = memory(CLB_BLOCK * CLB_PANEL * 4);
    j.w = memory(j.panel_stride * panels);
    j.y = memory(CAP * j.ld * 4);
    j.act = (clb_act_t){memory((size_t)nb * CAP * CLB_BLOCK * 4), memory((size_t)nb * CAP * 4),
                        memory((size_t)nb * CAP * 4), CAP, nb};
    random_floats(w, CLB_BLOCK * CLB_PANEL);
    for (uint32_t b = 0; b < nb; b++) f->pack(w, (uint8_t *)j.w + (size_t)b * f->block_bytes);
    for (uint32_t p = 1; p < panels; p++) memcpy((uint8_t *)j.w + p * j.panel_stride, j.w, j.panel_stride);
    for (uint32_t r = 0; r < CAP; r++) {
        random_floats(x, k);
        t->pack[f->act](x, k, &j.act, 0, r);
    }
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
        j.rows = row_counts[i];
        double s = best(run_gemm, &j), ops = 2.0 * k * n * j.rows, bytes = (double)j.panel_stride * panels;
        printf("%-7s gemm %-5s %5ux%-6u rows %2u  %7.1f GOPS  %6.1f GB/s\n", isa, f->name, k, n, j.rows, ops / s * 1e-9,
               bytes / s * 1e-9);
    }
    free(x), free(w), free(j.w), free(j.y), free(j.act.q), free(j.act.d), free(j.act.s);
}

static void bench_attention(const clb_kernels_t *t, const char *isa, uint32_t format) {
    job_t j = {
        .t = t, .format = format, .x = memory(8 * HEAD * 4), .y = memory(8 * KEYS * 4), .w = memory(KEYS * HEAD * 4)};
    const char *name = format == COLIBRI_KV_F32 ? "f32" : "f16";
    size_t bytes = (size_t)HEAD * (format == COLIBRI_KV_F32 ? 4 : 2);
    float row[HEAD];
    random_floats(j.x, 8 * HEAD);
    for (uint32_t i = 0; i < KEYS; i++) {
        random_floats(row, HEAD);
        t->kv_store[format](row, HEAD, (uint8_t *)j.w + i * bytes);
    }
    for (size_t i = 0; i < sizeof head_counts / sizeof *head_counts; i++) {
        j.rows = head_counts[i];
        double ops = 2.0 * KEYS * HEAD * j.rows * 1e-9, gb = (double)(KEYS * bytes) * 1e-9;
        double s = best(run_scores, &j), a = best(run_accumulate, &j);
        printf("%-7s attention %s heads %u  scores %6.1f GFLOPS %6.1f GB/s  accumulate %6.1f GFLOPS %6.1f GB/s\n", isa,
               name, j.rows, ops / s, gb / s, ops / a, gb / a);
    }
    free(j.x), free(j.y), free(j.w);
}

static int wanted(const char *isa, int argc, char **argv) {
    for (int i = 3; i < argc; i++)
        if (!strcmp(argv[i], isa)) return 1;
    return argc <= 3 && strcmp(isa, "ref");
}

int main(int argc, char **argv) {
    uint32_t k = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 4096;
    uint32_t n = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 4096;
    if (!k || !n || n % CLB_PANEL) {
        fprintf(stderr, "usage: bench_kernels [K] [N, a multiple of %d] [isa ...]\n", CLB_PANEL);
        return 2;
    }
    clb_fpenv_enter();
    for (uint32_t isa = COLIBRI_ISA_REF; isa <= clb_cpu_best_isa(); isa++) {
        const char *name = clb_isa_name(isa);
        clb_kernels_t t;
        if (!wanted(name, argc, argv)) continue;
        clb_kernels_fill(&t, isa);
        for (uint32_t f = 0; f < CLB_FORMATS; f++)
            if (clb_format(f)) bench_gemm(&t, name, f, k, n);
        for (uint32_t f = 0; f < 2; f++) bench_attention(&t, name, f);
    }
    return 0;
}
