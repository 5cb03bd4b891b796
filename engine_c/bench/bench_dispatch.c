/* Sorted against masked dispatch of the experts: bench_dispatch [HIDDEN=256] [INTER=512] [EXPERTS=8] [RUNS=2000]
 *   sorted   rows gathered by expert; each expert computes its own rows (what src/ops/moe.c does)
 *   masked   every expert computes every row where it lies; a row takes an expert's output by select, never by a
 *            product with 0, in the same ascending order, so the bits are the same (compared in every run)
 * One thread, q4, top 2, other routing in every run; wall time, mean, p50 and p99 in microseconds. */
#include "../src/base/fpenv.h"
#include "../src/cpu/features.h"
#include "../src/kernels/kernels.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS = 64, CAP = ROWS + 1, TOP_K = 2 };
static const uint32_t row_counts[] = {1, 4, 16, 64};

typedef struct bench {
    clb_kernels_t k;
    uint32_t hidden, inter, experts;
    size_t into, out;                        /* panel strides of gate and up, of down */
    uint8_t **gate, **up, **down;            /* [experts] panels */
    clb_act_t in, gathered, mid;             /* capacity CAP */
    uint32_t picked[ROWS][TOP_K], source[ROWS]; /* ascending experts; token of each gathered row */
    float weight[ROWS][TOP_K];
    float *part, *y[2];                      /* an expert's output; the result of either form, [ROWS][hidden] */
} bench_t;

static void *memory(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 4096 + 63) & ~(size_t)63); /* kernels prefetch past the end */
    if (!p) exit((fprintf(stderr, "bench_dispatch: no memory for %zu bytes\n", bytes), 1));
    return memset(p, 0, bytes);
}

static float uniform(void) { return (float)rand() / (float)RAND_MAX - 0.5f; }

static uint8_t *matrix(uint32_t n_out, uint32_t n_in) {
    const clb_format_t *f = clb_format(CLB_FMT_q4);
    size_t blocks = (size_t)clb_panels(n_out) * clb_blocks(n_in);
    uint8_t *m = memory(blocks * f->block_bytes);
    float w[CLB_BLOCK * CLB_PANEL];
    for (size_t b = 0; b < blocks; b++) {
        for (size_t i = 0; i < sizeof w / sizeof *w; i++) w[i] = uniform();
        f->pack(w, m + b * f->block_bytes);
    }
    return m;
}

static clb_act_t acts(uint32_t n) {
    size_t cells = (size_t)clb_blocks(n) * CAP;
    return (clb_act_t){memory(cells * CLB_BLOCK), memory(cells * 4), memory(cells * 4), CAP, clb_blocks(n)};
}

/* part[r] = expert e of x's first `rows` rows */
static void expert(bench_t *b, uint32_t e, const clb_act_t *x, uint32_t rows) {
    float gate[ROWS * 32], up[ROWS * 32];
    for (uint32_t p = 0; p < b->inter / CLB_PANEL; p += 2) {
        b->k.gemm[CLB_FMT_q4](&(clb_panels_t){b->gate[e] + p * b->into, b->into, 2, x->nb}, x, 0, rows, gate, 32);
        b->k.gemm[CLB_FMT_q4](&(clb_panels_t){b->up[e] + p * b->into, b->into, 2, x->nb}, x, 0, rows, up, 32);
        b->k.silu_mul(gate, up, rows * 32);
        for (uint32_t r = 0; r < rows; r++) b->k.pack[CLB_ACT_Q8](gate + r * 32, 32, &b->mid, p / 2, r);
    }
    clb_panels_t down = {b->down[e], b->out, b->hidden / CLB_PANEL, b->mid.nb};
    b->k.gemm[CLB_FMT_q4](&down, &b->mid, 0, rows, b->part, b->hidden);
}

static uint32_t gather(bench_t *b, uint32_t e, uint32_t rows) {
    uint32_t n = 0;
    for (uint32_t t = 0; t < rows; t++)
        if (b->picked[t][0] == e || b->picked[t][1] == e) b->source[n++] = t;
    for (uint32_t i = 0; i < b->in.nb; i++)
        for (uint32_t r = 0; r < n; r++) {
            size_t to = (size_t)i * CAP + r, from = (size_t)i * CAP + b->source[r];
            memcpy((int8_t *)b->gathered.q + to * CLB_BLOCK, (int8_t *)b->in.q + from * CLB_BLOCK, CLB_BLOCK);
            b->gathered.d[to] = b->in.d[from];
            b->gathered.s[to] = b->in.s[from];
        }
    return n;
}

static void sorted(bench_t *b, uint32_t rows) {
    memset(b->y[0], 0, (size_t)rows * b->hidden * sizeof(float));
    for (uint32_t e = 0; e < b->experts; e++) {
        uint32_t n = gather(b, e, rows);
        if (n) expert(b, e, &b->gathered, n);
        for (uint32_t r = 0; r < n; r++) {
            uint32_t t = b->source[r];
            b->k.axpy(b->weight[t][b->picked[t][1] == e], b->part + (size_t)r * b->hidden, b->hidden,
                      b->y[0] + (size_t)t * b->hidden);
        }
    }
}

/* acc = mine ? fma(w, x, acc) : acc, without a branch */
static void select_add(bench_t *b, uint32_t e, uint32_t t) {
    float *acc = b->y[1] + (size_t)t * b->hidden, *x = b->part + (size_t)t * b->hidden, *both[2] = {x, acc};
    int second = b->picked[t][1] == e, mine = second | (b->picked[t][0] == e);
    b->k.axpy(b->weight[t][second], x, b->hidden, both[mine]); /* not mine: into the part itself, thrown away */
}

static void masked(bench_t *b, uint32_t rows) {
    memset(b->y[1], 0, (size_t)rows * b->hidden * sizeof(float));
    for (uint32_t e = 0; e < b->experts; e++) {
        expert(b, e, &b->in, rows);
        for (uint32_t t = 0; t < rows; t++) select_add(b, e, t);
    }
}

static void route(bench_t *b, uint32_t rows) {
    for (uint32_t t = 0; t < rows; t++) {
        uint32_t i = (uint32_t)rand() % b->experts, j = (uint32_t)rand() % (b->experts - 1);
        if (j >= i) j++;
        b->picked[t][0] = i < j ? i : j;
        b->picked[t][1] = i < j ? j : i;
        b->weight[t][0] = 0.5f + uniform() / 2;
        b->weight[t][1] = 1 - b->weight[t][0];
    }
}

static double microseconds(void (*form)(bench_t *, uint32_t), bench_t *b, uint32_t rows) {
    struct timespec s, e;
    clock_gettime(CLOCK_MONOTONIC, &s);
    form(b, rows);
    clock_gettime(CLOCK_MONOTONIC, &e);
    return (double)(e.tv_sec - s.tv_sec) * 1e6 + (double)(e.tv_nsec - s.tv_nsec) * 1e-3;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *form, uint32_t rows, double *t, size_t n) {
    double sum = 0;
    qsort(t, n, sizeof *t, ascending);
    for (size_t i = 0; i < n; i++) sum += t[i];
    printf("%-7s rows %2u  mean %8.1f us  p50 %8.1f  p99 %8.1f  p99/p50 %5.2f\n", form, rows, sum / (double)n, t[n / 2],
           t[n * 99 / 100], t[n * 99 / 100] / t[n / 2]);
}

static void compare(bench_t *b, uint32_t rows, size_t runs) {
    double *t = memory(2 * runs * sizeof *t);
    for (size_t i = 0; i < runs; i++) {
        route(b, rows);
        t[i] = microseconds(sorted, b, rows);
        t[runs + i] = microseconds(masked, b, rows);
        if (memcmp(b->y[0], b->y[1], (size_t)rows * b->hidden * sizeof(float)))
            exit((fprintf(stderr, "bench_dispatch: the two forms differ at %u rows\n", rows), 1));
    }
    report("sorted", rows, t, runs);
    report("masked", rows, t + runs, runs);
    free(t);
}

static void fill(bench_t *b) {
    b->into = clb_panel_stride(clb_format(CLB_FMT_q4), clb_blocks(b->hidden));
    b->out = clb_panel_stride(clb_format(CLB_FMT_q4), clb_blocks(b->inter));
    uint8_t ***all[] = {&b->gate, &b->up, &b->down};
    for (int m = 0; m < 3; m++) {
        *all[m] = memory(b->experts * sizeof **all[m]);
        for (uint32_t e = 0; e < b->experts; e++)
            (*all[m])[e] = m < 2 ? matrix(b->inter, b->hidden) : matrix(b->hidden, b->inter);
    }
    b->in = acts(b->hidden), b->gathered = acts(b->hidden), b->mid = acts(b->inter);
    b->part = memory(ROWS * b->hidden * sizeof(float));
    for (int i = 0; i < 2; i++) b->y[i] = memory(ROWS * b->hidden * sizeof(float));
    for (uint32_t r = 0; r < ROWS; r++) {
        for (uint32_t i = 0; i < b->hidden; i++) b->part[i] = uniform();
        b->k.pack[CLB_ACT_Q8](b->part, b->hidden, &b->in, 0, r);
    }
}

static uint32_t number(int argc, char **argv, int i, uint32_t otherwise) {
    return argc > i ? (uint32_t)strtoul(argv[i], NULL, 10) : otherwise;
}

int main(int argc, char **argv) {
    static bench_t b;
    b.hidden = number(argc, argv, 1, 256), b.inter = number(argc, argv, 2, 512);
    b.experts = number(argc, argv, 3, 8);
    uint32_t runs = number(argc, argv, 4, 2000);
    if (!b.hidden || b.hidden % 32 || !b.inter || b.inter % 32 || b.experts < TOP_K || !runs) {
        fprintf(stderr, "usage: bench_dispatch [HIDDEN] [INTER] [EXPERTS] [RUNS]; widths are multiples of 32\n");
        return 2;
    }
    clb_fpenv_enter();
    clb_kernels_fill(&b.k, clb_cpu_best_isa());
    fill(&b);
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) compare(&b, row_counts[i], runs);
    return 0;
}
