/* A host that set flush-to-zero, denormals-are-zero, another rounding or traps gets the bits of one that did not, and
 * finds its floating-point environment as it left it. */
#include "micro.h"
#if defined(__x86_64__)
#include <xmmintrin.h>

/* MXCSR: masks of the six exceptions in 0x1f80, DAZ 0x40, rounding 0x6000, FTZ 0x8000. */
static const struct { const char *name; unsigned csr; } hosts[] = {
    {"FTZ and DAZ", 0x9fc0},        {"toward zero", 0x7f80}, {"up", 0x5f80},
    {"FTZ, DAZ, down, all exceptions unmasked", 0xa040},
};
enum { HOSTS = sizeof hosts / sizeof *hosts, MAX_LOGITS = 64 };

/* Runs `call` (an expression without floating point of its own) in host h's environment. */
#define IN_HOST(h, call)                                                          \
    do {                                                                          \
        unsigned own_csr = _mm_getcsr();                                          \
        _mm_setcsr(hosts[h].csr);                                                 \
        call;                                                                     \
        unsigned after_csr = _mm_getcsr();                                        \
        _mm_setcsr(own_csr);                                                      \
        CHECK_MSG(after_csr == hosts[h].csr, "%s: %x afterwards", hosts[h].name, after_csr); \
    } while (0)

/* Lanes that a host left in its own environment, one after another. */
typedef struct lanes { unsigned csr; int changed; } lanes_t;

static void odd_lanes(void *ctx, colibri_task_fn task, void *arg, uint32_t n) {
    lanes_t *l = ctx;
    unsigned own = _mm_getcsr();
    for (uint32_t i = 0; i < n; i++) {
        _mm_setcsr(l->csr);
        task(arg, i);
        l->changed |= _mm_getcsr() != l->csr;
    }
    _mm_setcsr(own);
}

typedef struct result { float logits[MAX_LOGITS]; colibri_sample_t drawn, scored; } result_t;

static colibri_status_t run(micro_t *m, result_t *r) {
    colibri_sampling_t how = {.struct_size = sizeof how, .top_k = 12, .top_p = 0x1p-1f, .temperature = 0x1p0f,
                              .seed = 3, .n_logprobs = 5};
    memset(r, 0, sizeof *r);
    r->drawn.struct_size = r->scored.struct_size = sizeof r->drawn;
    memset(m->kv.ptr, 0xff, m->kv.size);
    colibri_status_t status = micro_run(m, 3, 7);
    memcpy(r->logits, m->output.ptr, m->sample->g.vocab * sizeof(float));
    if (!status) status = colibri_sample(m->model, &how, r->logits, &m->scratch, &r->drawn, NULL);
    return status ? status : colibri_score(m->model, r->logits, 1, 3, &r->scored, NULL);
}

static void a_step(const sample_t *sample, uint32_t isa, uint32_t kv_format) {
    micro_t m;
    lanes_t lanes = {_mm_getcsr(), 0};
    result_t expected, got;
    colibri_status_t status = COLIBRI_OK;
    micro_open(&m, sample, isa, kv_format, 3, odd_lanes, &lanes);
    CHECK(run(&m, &expected) == COLIBRI_OK);
    for (int h = 0; h < HOSTS; h++) {
        lanes = (lanes_t){hosts[h].csr, 0};
        IN_HOST(h, status = run(&m, &got));
        CHECK(status == COLIBRI_OK);
        CHECK_MSG(!memcmp(&got, &expected, sizeof got), "%s, %s: other bits", sample->architecture, hosts[h].name);
        CHECK(!lanes.changed);
    }
    micro_close(&m);
}

static void packing(const char *format) {
    enum { ROWS = 20, COLS = 70 };
    static float w[ROWS * COLS], back[2][ROWS * COLS];
    _Alignas(64) static uint8_t panels[2][1 << 14];
    unsigned long long seed = 5;
    for (int i = 0; i < ROWS * COLS; i++) w[i] = test_uniform(&seed) * (i % 3 ? 1.0f : 0x1p-130f);
    CHECK(colibri_panel_bytes(format, ROWS, COLS) <= sizeof panels[0]);
    colibri_status_t first = colibri_panel_pack(format, ROWS, COLS, w, panels[0], NULL), second = COLIBRI_OK;
    CHECK(first == COLIBRI_OK && colibri_panel_unpack(format, ROWS, COLS, panels[0], back[0], NULL) == COLIBRI_OK);
    for (int h = 0; h < HOSTS; h++) {
        IN_HOST(h, second = colibri_panel_pack(format, ROWS, COLS, w, panels[1], NULL));
        CHECK_MSG(second == first && !memcmp(panels[0], panels[1], sizeof panels[0]), "%s: %s", format, hosts[h].name);
        IN_HOST(h, second = colibri_panel_unpack(format, ROWS, COLS, panels[0], back[1], NULL));
        CHECK_MSG(second == first && !memcmp(back[0], back[1], sizeof back[0]), "%s: %s", format, hosts[h].name);
    }
}

static void selftest(void) {
    uint8_t expected[32], got[32];
    colibri_buffer_t memory = micro_buffer(COLIBRI_WORKSPACE, colibri_selftest_size());
    colibri_status_t first = colibri_selftest(COLIBRI_ISA_AUTO, &memory, expected, NULL), second = first;
    for (int h = 0; h < HOSTS; h++) {
        IN_HOST(h, second = colibri_selftest(COLIBRI_ISA_AUTO, &memory, got, NULL));
        CHECK(second == first);
        CHECK_MSG(!memcmp(got, expected, sizeof got), "self-test: %s", hosts[h].name);
    }
    free(memory.ptr);
}

/* The environments do what they say here; otherwise the rest would prove nothing. */
static void hosts_differ(void) {
    volatile float tiny = 0x1p-126f, half = 0x1p-1f, one = 0x1p0f, least = 0x1p-24f, flushed = 1, sum = 0;
    unsigned own = _mm_getcsr();
    _mm_setcsr(hosts[0].csr);
    flushed = tiny * half;
    _mm_setcsr(hosts[2].csr);
    sum = one + least;
    _mm_setcsr(own);
    CHECK(flushed == 0.0f && tiny * half != 0.0f);
    CHECK(sum != 1.0f && one + least == 1.0f);
}

int main(void) {
    static const char *const formats[] = {"f32", "f16", "bf16", "q8", "q4"};
    hosts_differ();
    for (int s = 0; s < SAMPLES; s++) {
        build(&samples[s]);
        for (uint32_t isa = COLIBRI_ISA_REF; isa <= colibri_best_isa(); isa++)
            for (uint32_t kv = COLIBRI_KV_F16; kv <= COLIBRI_KV_F32; kv++) a_step(&samples[s], isa, kv);
    }
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) packing(formats[f]);
    selftest();
    return report();
}
#else
int main(void) {
    puts("this test knows x86-64 only");
    return report();
}
#endif
