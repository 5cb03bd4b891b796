/* The regression guard's work: fixed kernels and fixed forwards on fixed input, whose instructions callgrind counts.
 * guard.py runs it under valgrind and compares; alone it does the work and prints the names. Each case runs once before
 * it counts, so that binding and page faults are not in it. Exit code 2: this CPU has no such instruction set. */
#include "../include/colibri.h"
#include "../src/base/fpenv.h"
#include "../src/cpu/features.h"
#include "../src/kernels/kernels.h"
#include "../src/model/model.h"
#include "host/machine.h"
#include "micro.h"
#if defined(__has_include)
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif
#endif
#ifndef CALLGRIND_DUMP_STATS_AT
#define CALLGRIND_ZERO_STATS (void)0
#define CALLGRIND_DUMP_STATS_AT(name) (void)(name)
#endif

enum { K = 1024, PANELS = 2, CAP = 33, HEAD = 64, KEYS = 96, ROWS_MOST = 48, LD = KEYS + 16 };

static clb_kernels_t kernels;
static unsigned long long seed = 5;

static float *floats(size_t n, float scale) {
    float *x = aligned_alloc(64, (n * 4 + 63) / 64 * 64);
    if (!x) abort();
    for (size_t i = 0; i < n; i++) x[i] = scale * test_uniform(&seed);
    return x;
}

static void *zeros(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) abort();
    return memset(p, 0, bytes);
}

static void count(const char *name, void (*run)(void *), void *arg) {
    run(arg);
    CALLGRIND_ZERO_STATS;
    run(arg);
    CALLGRIND_DUMP_STATS_AT(name);
    puts(name);
}

/* ---- kernels --------------------------------------------------------------------------------------------------- */

typedef struct gemm {
    uint32_t format, rows;
    size_t stride;
    uint8_t *w;
    clb_act_t act;
    float *x, *y;
} gemm_t;

static void run_gemm(void *arg) {
    gemm_t *g = arg;
    clb_panels_t w = {g->w, g->stride, PANELS, g->act.nb};
    kernels.gemm[g->format](&w, &g->act, 0, g->rows, g->y, PANELS * CLB_PANEL);
}
static void run_pack(void *arg) {
    gemm_t *g = arg;
    kernels.pack[clb_format(g->format)->act](g->x, K, &g->act, 0, 0);
}

static void count_gemm(uint32_t format) {
    static const uint32_t rows[] = {1, 4, 13, 32};
    const clb_format_t *f = clb_format(format);
    uint32_t nb = clb_blocks(K);
    char name[64];
    gemm_t g = {.format = format, .stride = clb_panel_stride(f, nb), .x = floats(K, 1.0f),
                .y = zeros(CAP * PANELS * CLB_PANEL * 4), .w = zeros(PANELS * clb_panel_stride(f, nb)),
                .act = {zeros(nb * CAP * CLB_BLOCK * 4), zeros(nb * CAP * 4), zeros(nb * CAP * 4), CAP, nb}};
    float *block = floats(CLB_BLOCK * CLB_PANEL, 0.3f);
    for (uint32_t p = 0; p < PANELS; p++)
        for (uint32_t b = 0; b < nb; b++) f->pack(block, g.w + p * g.stride + (size_t)b * f->block_bytes);
    for (uint32_t r = 0; r < CAP; r++) kernels.pack[f->act](g.x, K, &g.act, 0, r);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        g.rows = rows[i];
        snprintf(name, sizeof name, "gemm %s, %u rows", f->name, g.rows);
        count(name, run_gemm, &g);
    }
    snprintf(name, sizeof name, "pack for %s", f->name);
    count(name, run_pack, &g);
    free(block), free(g.x), free(g.y), free(g.w), free(g.act.q), free(g.act.d), free(g.act.s);
}

typedef struct attention {
    uint32_t rows;
    uint16_t *kv;
    float *q, *scores, *out;
} attention_t;

static void run_scores(void *arg) {
    attention_t *a = arg;
    kernels.attn_scores[COLIBRI_KV_F16](a->q, a->rows, a->kv, KEYS, HEAD, a->scores, LD);
}
static void run_values(void *arg) {
    attention_t *a = arg;
    kernels.attn_accumulate[COLIBRI_KV_F16](a->scores, LD, a->rows, a->kv, KEYS, HEAD, a->out);
}

static void count_attention(uint32_t rows) {
    attention_t a = {rows, zeros(KEYS * HEAD * 2), floats(ROWS_MOST * HEAD, 1.0f), floats(ROWS_MOST * LD, 1.0f),
                     floats(ROWS_MOST * HEAD, 1.0f)};
    char name[64];
    for (uint32_t j = 0; j < KEYS; j++) kernels.kv_store[COLIBRI_KV_F16](a.q, HEAD, a.kv + j * HEAD);
    snprintf(name, sizeof name, "attention scores, %u rows", rows);
    count(name, run_scores, &a);
    snprintf(name, sizeof name, "attention values, %u rows", rows);
    count(name, run_values, &a);
    free(a.kv), free(a.q), free(a.scores), free(a.out);
}

typedef struct rows { float *x, *y; } rows_t;
static void run_rmsnorm(void *arg) {
    rows_t *r = arg;
    kernels.rmsnorm(r->x, r->y, 1e-5f, K, r->y);
}
static void run_silu(void *arg) { kernels.silu_mul(((rows_t *)arg)->x, ((rows_t *)arg)->y, K); }
static void run_softmax(void *arg) { kernels.softmax(((rows_t *)arg)->x, K); }
static void run_axpy(void *arg) { kernels.axpy(0.5f, ((rows_t *)arg)->x, K, ((rows_t *)arg)->y); }
static void run_rope(void *arg) { kernels.rope(((rows_t *)arg)->x, ((rows_t *)arg)->y, ((rows_t *)arg)->y, 1.0f, K); }

static void count_rows(void) {
    rows_t r = {floats(K, 1.0f), floats(K, 1.0f)};
    count("rmsnorm", run_rmsnorm, &r), count("silu_mul", run_silu, &r), count("softmax", run_softmax, &r);
    count("axpy", run_axpy, &r), count("rope", run_rope, &r);
    free(r.x), free(r.y);
}

/* ---- sampler ---------------------------------------------------------------------------------------------------- */

enum { VOCAB = 32768 };
typedef struct draw {
    struct colibri_model *model;
    colibri_sampling_t how;
    colibri_buffer_t scratch;
    float *logits;
} draw_t;

static void run_draw(void *arg) {
    draw_t *d = arg;
    colibri_sample_t out = {.struct_size = sizeof out};
    if (colibri_sample(d->model, &d->how, d->logits, &d->scratch, &out, NULL)) abort();
}

static void count_sampler(void) {
    draw_t d = {.model = zeros(sizeof *d.model), .how = {.struct_size = sizeof d.how}, .logits = floats(VOCAB, 10.0f)};
    uint64_t bytes = 0;
    d.model->magic = CLB_MODEL_MAGIC, d.model->g.vocab = VOCAB, d.model->kernels = kernels;
    if (colibri_sample_size(d.model, &bytes)) abort();
    d.scratch = micro_buffer(COLIBRI_WORKSPACE, bytes);
    count("sampler, greedy", run_draw, &d);
    d.how.temperature = 0.8f, d.how.top_p = 0.95f;
    count("sampler, temperature and top-p", run_draw, &d);
    free(d.scratch.ptr), free(d.logits), free(d.model);
}

/* ---- the whole engine ------------------------------------------------------------------------------------------ */

static void run_forward(void *arg) {
    if (micro_run(arg, 0, 0)) abort();
}
static void run_windowed(void *arg) {
    if (micro_run(arg, 3, 7)) abort();
}

static void count_forward(sample_t *s, uint32_t isa) {
    micro_t m;
    build(s);
    micro_open(&m, s, isa, COLIBRI_KV_F16, 1, NULL, NULL);
    count("forward of the micro model", run_forward, &m);
    count("forward, pinned and window", run_windowed, &m);
    micro_close(&m);
}

int main(void) {
    uint32_t isa;
    if (colibri_host_isa(&isa, NULL) || isa > clb_cpu_best_isa()) return 2;
    if (isa == COLIBRI_ISA_AUTO) isa = clb_cpu_best_isa();
    clb_kernels_fill(&kernels, isa);
    clb_fpenv_t env = clb_fpenv_enter();
    for (uint32_t f = 0; f < CLB_FORMATS; f++)
        if (clb_format(f)) count_gemm(f);
    count_attention(3), count_attention(ROWS_MOST);
    count_rows();
    clb_fpenv_leave(env);
    count_sampler();
    count_forward(&samples[0], isa);
    return test_failed != 0;
}
