/* The sampler against a plain reading of its definition (full sort, no shortcuts), and every way to misuse it. */
#include "base/fp.h"
#include "base/fpenv.h"
#include "cpu/features.h"
#include "host/pool.h"
#include "sampler/sampler.h"
#include "test.h"
#include <float.h>
#include <math.h>

enum { MAX_VOCAB = 49152, TOKENS = 40, GUARD = 64 };

static unsigned long long seed = 88172645463325252ull;
static float logits[MAX_VOCAB];
static uint32_t mask[MAX_VOCAB / 32], history[2][TOKENS], bias_ids[TOKENS];
static float bias[TOKENS];
static struct colibri_model model;
static colibri_buffer_t scratch;

static uint32_t below(uint32_t n) { return test_random(&seed) % n; }
static float normal(void) {
    float s = 0;
    for (int i = 0; i < 12; i++) s += test_uniform(&seed);
    return s / 2;
}

static void use_model(uint32_t vocab, uint32_t isa) {
    uint64_t bytes = 0;
    memset(&model, 0, sizeof model);
    model.magic = CLB_MODEL_MAGIC;
    model.g.vocab = vocab;
    clb_kernels_fill(&model.kernels, isa);
    CHECK(colibri_sample_size(&model, &bytes) == COLIBRI_OK && bytes % 64 == 0);
    free(scratch.ptr);
    void *memory = aligned_alloc(64, bytes + GUARD);
    scratch = (colibri_buffer_t){sizeof scratch, COLIBRI_WORKSPACE, memory, bytes, 64, 0, 3, 0};
    memset(scratch.ptr, 0xff, bytes + GUARD); /* NaN everywhere */
}

static colibri_status_t draw(const colibri_sampling_t *in, colibri_sample_t *out) {
    out->struct_size = sizeof *out;
    return colibri_sample(&model, in, logits, &scratch, out, NULL);
}

/* ---- the definition, read plainly ---------------------------------------------------------------------------- */

typedef struct entry {
    float v, p;
    uint32_t id;
} entry_t;

static int by_value_then_id(const void *a, const void *b) {
    const entry_t *x = a, *y = b;
    if (x->v != y->v) return x->v > y->v ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static uint32_t occurrences(const uint32_t *tokens, uint32_t n, uint32_t id) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++) count += tokens[i] == id;
    return count;
}

static float plain_value(const colibri_sampling_t *in, uint32_t id) {
    float v = logits[id];
    if (in->allowed && !(in->allowed[id / 32] >> (id % 32) & 1)) return -INFINITY;
    for (uint32_t i = 0; i < in->n_bias; i++)
        if (in->bias_ids[i] == id) v += in->bias[i];
    uint32_t made = occurrences(in->generated, in->n_generated, id);
    float r = in->repetition_penalty;
    if (r != 0 && r != 1 && (made || occurrences(in->prompt, in->n_prompt, id))) v = v > 0 ? v / r : v * r;
    if (made) v -= in->presence_penalty;
    if (made) v -= in->frequency_penalty * (float)made;
    return v;
}

/* All tokens in order; returns how many are not excluded. */
static uint32_t plain_order(const colibri_sampling_t *in, entry_t *e) {
    uint32_t n = 0;
    for (uint32_t id = 0; id < model.g.vocab; id++) {
        float v = plain_value(in, id);
        if (in->temperature >= 1e-5f) v /= in->temperature;
        if (v != -INFINITY) e[n++] = (entry_t){v, 0, id};
    }
    qsort(e, n, sizeof *e, by_value_then_id);
    for (uint32_t i = 0; i < n; i++) e[i].p = clb_expf(e[i].v - e[0].v);
    return n;
}

static uint64_t plain_weight(float p) { return (uint64_t)rint(ldexp((double)p, 39)); }

/* u as a fraction of 2^53 */
static uint64_t plain_noise(const colibri_sampling_t *in) {
    uint32_t c[4] = {(uint32_t)in->position, (uint32_t)(in->position >> 32), 0, 0}, x[4];
    uint32_t k[2] = {(uint32_t)in->seed, (uint32_t)(in->seed >> 32)};
    clb_philox(c, k, x);
    return ((uint64_t)x[0] << 32 | x[1]) >> 11;
}

/* How many of the first n survive top-p. */
static uint32_t plain_top_p(const entry_t *e, uint32_t n, float top_p) {
    uint64_t total = 0, cum = 0;
    for (uint32_t i = 0; i < n; i++) total += plain_weight(e[i].p);
    for (uint32_t i = 0; i < n; i++)
        if ((double)(cum += plain_weight(e[i].p)) >= (double)top_p * (double)total) return i + 1;
    return 0;
}

/* -1 if no token is allowed */
static int64_t plain_sample(const colibri_sampling_t *in) {
    static entry_t e[MAX_VOCAB];
    uint32_t n = plain_order(in, e);
    if (!n) return -1;
    if (in->temperature < 1e-5f) return e[0].id;
    if (in->top_k && in->top_k < n) n = in->top_k;
    if (in->top_p != 0 && in->top_p < 1) n = plain_top_p(e, n, in->top_p);
    uint64_t total = 0, cum = 0;
    for (uint32_t i = 0; i < n; i++) total += e[i].p < in->min_p ? 0 : plain_weight(e[i].p);
    __extension__ unsigned __int128 level = (unsigned __int128)plain_noise(in) * total; /* in units of 2^-53 */
    for (uint32_t i = 0; i < n; i++) {
        cum += e[i].p < in->min_p ? 0 : plain_weight(e[i].p);
        if ((__extension__ (unsigned __int128)cum) << 53 > level) return e[i].id;
    }
    return -2;
}

/* ---- random requests ----------------------------------------------------------------------------------------- */

static float logit_of(uint32_t shape, uint32_t id) {
    switch (shape) {
    case 0: return 3 * normal();
    case 1: return rintf(2 * normal());              /* many ties */
    case 2: return 0.125f;                           /* all equal */
    case 3: return id % 97 == 0 ? 20 + normal() : 0.5f * normal(); /* two clusters */
    case 4: return 0.001f * normal();                /* all in one bucket */
    case 5: return 1e4f * test_uniform(&seed);       /* far apart: most p are 0 */
    case 6: return below(2) ? 0.0f : -0.0f;
    default: return ldexpf(test_uniform(&seed), (int)below(200) - 100);
    }
}

static float choice(const float *values, uint32_t n) { return values[below(n)]; }

static void random_lists(colibri_sampling_t *in, uint32_t vocab) {
    in->prompt = history[0], in->generated = history[1];
    in->n_prompt = below(TOKENS), in->n_generated = below(TOKENS);
    for (int i = 0; i < TOKENS; i++) history[0][i] = below(vocab), history[1][i] = below(vocab < 30 ? vocab : 30);
    if (below(3) == 0) {
        in->n_bias = below(vocab < TOKENS ? vocab : TOKENS);
        in->bias_ids = bias_ids, in->bias = bias;
        for (uint32_t i = 0; i < in->n_bias; i++) bias_ids[i] = i * (vocab / (in->n_bias + 1)), bias[i] = 5 * normal();
    }
    if (below(3)) return;
    in->allowed = mask;
    uint32_t density = below(3);
    for (uint32_t i = 0; i < (vocab + 31) / 32; i++)
        mask[i] = density == 0 ? test_random(&seed) : density == 1 ? 1u << below(32) : below(40) ? 0 : 1u << below(32);
}

static colibri_sampling_t random_request(uint32_t vocab) {
    static const float temperatures[] = {0, 9e-6f, 1e-5f, 0.05f, 0.3f, 0.7f, 1, 1.5f, 100},
                       top_ps[] = {0, 1e-9f, 0.1f, 0.5f, 0.9f, 0.95f, 0.9999f, 0.99999994f, 1},
                       min_ps[] = {0, 0, 0, 1e-30f, 0.01f, 0.1f, 1}, repetitions[] = {0, 1, 1.1f, 1.3f, 0.8f, 2},
                       others[] = {0, 0, 0.1f, 1.5f, -0.7f};
    colibri_sampling_t in = {.struct_size = sizeof in};
    in.temperature = choice(temperatures, 9);
    in.top_p = choice(top_ps, 9);
    in.min_p = choice(min_ps, 7);
    in.repetition_penalty = choice(repetitions, 6);
    in.presence_penalty = choice(others, 5);
    in.frequency_penalty = choice(others, 5);
    in.top_k = below(2) ? 0 : below(3) ? 1 + below(50) : 1 + below(vocab + 5);
    in.seed = (uint64_t)test_random(&seed) << 32 | test_random(&seed);
    in.position = below(2) ? below(100000) : (uint64_t)test_random(&seed) << 20;
    in.n_logprobs = below(4) ? 0 : below(21);
    in.want_logprob = below(2);
    random_lists(&in, vocab);
    return in;
}

static void check_logprobs(const colibri_sampling_t *in, const colibri_sample_t *out) {
    long double m = -INFINITY, sum = 0;
    uint32_t vocab = model.g.vocab, n = in->n_logprobs < vocab ? in->n_logprobs : vocab;
    CHECK(out->n_top == n);
    if (!n && !in->want_logprob) return;
    for (uint32_t i = 0; i < vocab; i++) m = logits[i] > m ? logits[i] : m;
    for (uint32_t i = 0; i < vocab; i++) sum += expl(logits[i] - m);
    float want = (float)(logits[out->token] - m - logl(sum));
    CHECK_MSG(fabsf(out->logprob - want) <= 1e-6f + 2e-7f * fabsf(want), "logprob %.9g not %.9g", (double)out->logprob,
              (double)want);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = out->top_ids[i], better = 0;
        for (uint32_t j = 0; j < vocab; j++) better += logits[j] > logits[id] || (logits[j] == logits[id] && j < id);
        CHECK_MSG(better == i, "top_ids[%u] = %u has rank %u", i, id, better);
        if (id == out->token) CHECK(out->top_logprobs[i] == out->logprob);
        CHECK(i == 0 || out->top_logprobs[i] <= out->top_logprobs[i - 1]);
    }
}

static uint32_t any_isa(void) { return COLIBRI_ISA_REF + below(clb_cpu_best_isa() - COLIBRI_ISA_REF + 1); }

static void compare_once(uint32_t vocab) {
    clb_kernels_fill(&model.kernels, any_isa());
    colibri_sampling_t in = random_request(vocab);
    colibri_sample_t out;
    int64_t want = plain_sample(&in);
    colibri_status_t status = draw(&in, &out);
    CHECK_MSG(want < 0 ? status == COLIBRI_NO_TOKEN : status == COLIBRI_OK && out.token == want,
              "vocab %u T %g k %u p %g m %g: status %d token %u, not %lld", vocab, (double)in.temperature, in.top_k,
              (double)in.top_p, (double)in.min_p, (int)status, out.token, (long long)want);
    if (!status) check_logprobs(&in, &out);
}

static void against_definition(void) {
    static const uint32_t vocabs[] = {1, 2, 15, 16, 17, 100, 384, 3000};
    for (int v = 0; v < 8; v++) {
        use_model(vocabs[v], COLIBRI_ISA_REF);
        for (int i = 0; i < 1600; i++) {
            uint32_t shape = below(8);
            for (uint32_t id = 0; id < vocabs[v]; id++) logits[id] = logit_of(shape, id);
            for (int j = 0; j < (vocabs[v] > 1000 ? 1 : 4); j++) compare_once(vocabs[v]);
            if (vocabs[v] > 1000) i += 7;
        }
        const unsigned char *guard = (const unsigned char *)scratch.ptr + scratch.size;
        for (int i = 0; i < GUARD; i++) CHECK(guard[i] == 0xff);
        CHECK(scratch.ref_count == 3);
    }
}

static void large_vocabulary(void) {
    use_model(MAX_VOCAB, COLIBRI_ISA_REF);
    for (uint32_t shape = 0; shape < 8; shape++) {
        for (uint32_t id = 0; id < MAX_VOCAB; id++) logits[id] = logit_of(shape, id);
        for (int j = 0; j < 4; j++) compare_once(MAX_VOCAB);
    }
}

/* Every instruction set this machine has: the same bytes. */
static void instruction_sets(void) {
    for (int i = 0; i < 400; i++) {
        uint32_t vocab = 1 + below(3000);
        uint32_t shape = below(8);
        for (uint32_t id = 0; id < vocab; id++) logits[id] = logit_of(shape, id);
        if (below(8) == 0) logits[below(vocab)] = below(2) ? NAN : -INFINITY;
        colibri_sampling_t in = random_request(vocab);
        in.want_logprob = 1, in.n_logprobs = 5;
        colibri_sample_t first, other;
        use_model(vocab, COLIBRI_ISA_REF);
        memset(&first, 0, sizeof first);
        colibri_status_t status = draw(&in, &first);
        for (uint32_t isa = COLIBRI_ISA_AVX2; isa <= clb_cpu_best_isa(); isa++) {
            use_model(vocab, isa);
            memset(&other, 0, sizeof other);
            CHECK(draw(&in, &other) == status && !memcmp(&first, &other, sizeof first));
        }
    }
}

/* ---- many rows ----------------------------------------------------------------------------------------------- */

enum { ROWS = 23, ROW_VOCAB = 700, LANES = 4 };
typedef struct row {
    colibri_sampling_t in;
    colibri_sample_t alone, together;
    colibri_error_t err_alone, err_together;
    colibri_status_t status;
    float logits[ROW_VOCAB];
    uint32_t mask[ROW_VOCAB / 32 + 1], history[2][TOKENS], bias_ids[TOKENS];
    float bias[TOKENS];
} row_t;
static row_t rows[ROWS];
static colibri_draw_t draws[ROWS];

/* A request of its own, some of which fail, and what colibri_sample makes of it. */
static void random_row(row_t *r) {
    uint32_t shape = below(8);
    for (uint32_t id = 0; id < ROW_VOCAB; id++) r->logits[id] = logit_of(shape, id);
    if (below(5) == 0) r->logits[below(ROW_VOCAB)] = below(2) ? NAN : -INFINITY;
    r->in = random_request(ROW_VOCAB);
    if (below(9) == 0) r->in.top_p = 2;
    memcpy(r->history, history, sizeof history), memcpy(r->bias_ids, bias_ids, sizeof bias_ids);
    memcpy(r->bias, bias, sizeof bias), memcpy(r->mask, mask, sizeof r->mask);
    r->in.prompt = r->history[0], r->in.generated = r->history[1];
    r->in.bias_ids = r->bias_ids, r->in.bias = r->bias;
    if (r->in.allowed) r->in.allowed = r->mask;
    r->alone = r->together = (colibri_sample_t){.struct_size = sizeof r->alone};
    r->err_alone = r->err_together = (colibri_error_t){.struct_size = sizeof r->err_alone};
    r->status = colibri_sample(&model, &r->in, r->logits, &scratch, &r->alone, &r->err_alone);
}

static void check_rows(uint32_t n) {
    CHECK(colibri_sample_rows(&model, draws, n, &scratch, NULL) == COLIBRI_OK && scratch.ref_count == 3);
    for (uint32_t i = 0; i < n; i++) {
        row_t *r = &rows[i];
        CHECK(draws[i].status == (int32_t)r->status && !memcmp(&r->alone, &r->together, sizeof r->alone));
        CHECK(!memcmp(&r->err_alone, &r->err_together, sizeof r->err_alone));
    }
}

/* Whatever the threads, the lanes there is scratch for and the instruction set: what each row gives alone. */
static void rows_are_as_alone(void) {
    use_model(ROW_VOCAB, COLIBRI_ISA_REF);
    uint64_t one = scratch.size;
    free(scratch.ptr);
    scratch.ptr = aligned_alloc(64, LANES * one);
    for (uint32_t threads = 1; threads <= LANES; threads++) {
        colibri_pool_t *pool;
        CHECK(!colibri_pool_create(threads, 0, &pool));
        model.config.parallel_for = threads % 2 ? NULL : colibri_pool_run, model.config.parallel_ctx = pool;
        if (threads == 3) model.config.parallel_for = colibri_pool_run;
        model.config.threads = threads;
        for (int i = 0; i < 60; i++) {
            clb_kernels_fill(&model.kernels, any_isa());
            scratch.size = one * (1 + below(LANES));
            for (int j = 0; j < ROWS; j++) {
                random_row(&rows[j]);
                draws[j] = (colibri_draw_t){sizeof *draws, 99, &rows[j].in, rows[j].logits, &rows[j].together,
                                            &rows[j].err_together};
            }
            clb_kernels_fill(&model.kernels, any_isa());
            check_rows(1 + below(ROWS));
        }
        colibri_pool_destroy(pool);
    }
}

static void rows_misused(void) {
    colibri_sampling_t in = {.struct_size = sizeof in};
    colibri_sample_t out = {.struct_size = sizeof out};
    colibri_error_t e = {.struct_size = sizeof e};
    use_model(64, COLIBRI_ISA_REF);
    for (int i = 0; i < 64; i++) logits[i] = (float)i;
    colibri_draw_t d = {.struct_size = sizeof d, .sampling = &in, .logits = logits, .sample = &out};
    CHECK(colibri_sample_rows(NULL, &d, 1, &scratch, &e) == COLIBRI_INVALID_ARGUMENT && strstr(e.message, "model"));
    CHECK(colibri_sample_rows(&model, NULL, 1, &scratch, &e) == COLIBRI_INVALID_ARGUMENT && strstr(e.message, "draws"));
    CHECK(colibri_sample_rows(&model, NULL, 0, NULL, &e) == COLIBRI_OK); /* nothing to do */
    CHECK(colibri_sample_rows(&model, &d, 1, NULL, &e) == COLIBRI_INVALID_ARGUMENT && strstr(e.message, "scratch"));
    scratch.size--;
    CHECK(colibri_sample_rows(&model, &d, 1, &scratch, &e) == COLIBRI_BUFFER_TOO_SMALL);
    scratch.size++, d.struct_size--;
    CHECK(colibri_sample_rows(&model, &d, 1, &scratch, &e) == COLIBRI_STRUCT_SIZE);
    d.struct_size++;
    CHECK(colibri_sample_rows(&model, &d, 1, &scratch, &e) == COLIBRI_OK && d.status == COLIBRI_OK && out.token == 63);
    d.logits = NULL; /* this row's own failure */
    CHECK(colibri_sample_rows(&model, &d, 1, &scratch, &e) == COLIBRI_OK && d.status == COLIBRI_INVALID_ARGUMENT);
}

/* ---- single properties --------------------------------------------------------------------------------------- */

/* Known answers published with Random123 (kat_vectors, philox4x32 10). */
static void philox(void) {
    static const uint32_t known[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
         0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        clb_philox(known[i], known[i] + 4, out);
        CHECK(!memcmp(out, known[i] + 6, sizeof out));
    }
}

static void weights(void) {
    CHECK(clb_weight(1.0f) == 1ull << 39 && clb_weight(0x1p-39f) == 1 && clb_weight(0.0f) == 0);
    CHECK(clb_weight(0x1p-40f) == 0 && clb_weight(0x1.8p-39f) == 2 && clb_weight(0x1.000002p-40f) == 1);
    for (int i = 0; i < 10000; i++) {
        float p = ldexpf(0.5f + 0.5f * fabsf(test_uniform(&seed)), -(int)below(50));
        CHECK(clb_weight(p) == plain_weight(p));
    }
}

/* 20 000 draws follow the probabilities: every count within 5 standard deviations. */
static void frequencies(void) {
    enum { N = 20000, V = 8 };
    use_model(V, COLIBRI_ISA_REF);
    uint32_t count[V] = {0};
    double p[V], total = 0;
    for (int i = 0; i < V; i++) logits[i] = 0.4f * (float)i, total += p[i] = exp(0.4 * i / 1.3);
    for (uint64_t position = 0; position < N; position++) {
        colibri_sampling_t in = {.struct_size = sizeof in, .temperature = 1.3f, .seed = 7, .position = position};
        colibri_sample_t out;
        CHECK(draw(&in, &out) == COLIBRI_OK);
        count[out.token]++;
    }
    for (int i = 0; i < V; i++) {
        double mean = N * p[i] / total, deviation = sqrt(mean * (1 - p[i] / total));
        CHECK_MSG(fabs(count[i] - mean) < 5 * deviation, "token %d: %u draws, %f expected", i, count[i], mean);
    }
}

static void greedy_ties(void) {
    colibri_sampling_t in = {.struct_size = sizeof in};
    colibri_sample_t out;
    use_model(70, COLIBRI_ISA_REF);
    for (uint32_t low = 0; low < 70; low++) {
        for (uint32_t i = 0; i < 70; i++) logits[i] = i < low ? -1.0f : 2.0f;
        CHECK(draw(&in, &out) == COLIBRI_OK && out.token == low && out.logprob == 0 && out.n_top == 0);
    }
    for (uint32_t i = 0; i < 70; i++) logits[i] = i == 3 ? -0.0f : i == 9 ? 0.0f : -5.0f;
    CHECK(draw(&in, &out) == COLIBRI_OK && out.token == 3);
    uint32_t allowed[3] = {1u << 20, 0, 1u << 5 | 1u << 6}; /* bit 70 is beyond the vocabulary */
    in.allowed = allowed;
    CHECK(draw(&in, &out) == COLIBRI_OK && out.token == 20);
    allowed[0] = allowed[2] = 0;
    CHECK(draw(&in, &out) == COLIBRI_NO_TOKEN);
    allowed[2] = 1u << 6;
    in.temperature = 1;
    CHECK(draw(&in, &out) == COLIBRI_NO_TOKEN);
}

/* The seed and the position both matter, and nothing else varies. */
static void noise(void) {
    use_model(1000, COLIBRI_ISA_REF);
    for (int i = 0; i < 1000; i++) logits[i] = 0;
    uint32_t changed = 0;
    for (uint64_t bit = 0; bit < 64; bit++) {
        colibri_sampling_t in = {.struct_size = sizeof in, .temperature = 1, .seed = 5, .position = 9};
        colibri_sample_t a, b, c, again;
        draw(&in, &a);
        draw(&in, &again);
        CHECK(a.token == again.token);
        in.seed ^= 1ull << bit;
        draw(&in, &b);
        in.seed ^= 1ull << bit, in.position ^= 1ull << bit;
        draw(&in, &c);
        changed += (a.token != b.token) + (a.token != c.token);
    }
    CHECK_MSG(changed >= 124, "only %u of 128 single-bit changes moved the token", changed);
}

static void host_environment(void) {
#if defined(__x86_64__)
    use_model(500, COLIBRI_ISA_REF);
    for (int i = 0; i < 500; i++) logits[i] = 3 * normal();
    colibri_sampling_t in = {.struct_size = sizeof in, .temperature = 0.9f, .top_p = 0.9f, .want_logprob = 1};
    colibri_sample_t a, b;
    for (in.position = 0; in.position < 50; in.position++) {
        memset(&a, 0, sizeof a), memset(&b, 0, sizeof b);
        draw(&in, &a);
        unsigned old = _mm_getcsr();
        _mm_setcsr(old | 0xe040u); /* toward zero, FTZ, DAZ */
        draw(&in, &b);
        CHECK((_mm_getcsr() & 0xe040u) == 0xe040u);
        _mm_setcsr(old);
        CHECK(!memcmp(&a, &b, sizeof a));
    }
#endif
}

static void score(void) {
    colibri_error_t err = {.struct_size = sizeof err};
    colibri_sample_t a = {.struct_size = sizeof a}, b = a;
    use_model(300, COLIBRI_ISA_REF);
    for (int i = 0; i < 300; i++) logits[i] = 3 * normal();
    colibri_sampling_t in = {.struct_size = sizeof in, .n_logprobs = 20};
    CHECK(draw(&in, &a) == COLIBRI_OK);
    CHECK(colibri_score(&model, logits, a.token, 20, &b, &err) == COLIBRI_OK && !memcmp(&a, &b, sizeof a));
    CHECK(colibri_score(&model, logits, 17, 0, &b, &err) == COLIBRI_OK && b.token == 17 && b.n_top == 0);
    CHECK(colibri_score(&model, logits, 300, 0, &b, &err) == COLIBRI_TOKEN_RANGE && strstr(err.message, "token"));
    CHECK(colibri_score(&model, logits, 0, 21, &b, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_score(NULL, logits, 0, 0, &b, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_score(&model, NULL, 0, 0, &b, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_score(&model, logits, 0, 0, NULL, &err) == COLIBRI_INVALID_ARGUMENT);
    b.struct_size = 16;
    CHECK(colibri_score(&model, logits, 0, 0, &b, &err) == COLIBRI_STRUCT_SIZE);
    logits[299] = NAN;
    CHECK(colibri_score(&model, logits, 0, 0, &a, &err) == COLIBRI_NON_FINITE && strstr(err.message, "logits[299]"));
}

/* ---- errors -------------------------------------------------------------------------------------------------- */

static colibri_error_t err;
static void expect(const colibri_sampling_t *in, colibri_status_t want, const char *word) {
    colibri_sample_t out, before;
    memset(&out, 0x5a, sizeof out);
    out.struct_size = sizeof out;
    before = out;
    err = (colibri_error_t){.struct_size = sizeof err};
    colibri_status_t got = colibri_sample(&model, in, logits, &scratch, &out, &err);
    CHECK_MSG(got == want && err.status == (int32_t)want && strstr(err.message, word), "%s: status %d, \"%s\"", word,
              (int)got, err.message);
    CHECK(!memcmp(&out, &before, sizeof out) && scratch.ref_count == 3);
}

#define BAD(change, want, word)                                                          \
    do {                                                                                 \
        colibri_sampling_t in = {.struct_size = sizeof in, .temperature = 1, .top_p = 1}; \
        change;                                                                          \
        expect(&in, COLIBRI_##want, word);                                               \
    } while (0)

static void bad_numbers(void) {
    use_model(64, COLIBRI_ISA_REF);
    for (int i = 0; i < 64; i++) logits[i] = (float)i;
    BAD(in.struct_size -= 1, STRUCT_SIZE, "sampling");
    BAD(in.struct_size = 0, STRUCT_SIZE, "sampling");
    BAD(in.temperature = -0.1f, INVALID_ARGUMENT, "temperature");
    BAD(in.temperature = NAN, INVALID_ARGUMENT, "temperature");
    BAD(in.temperature = INFINITY, INVALID_ARGUMENT, "temperature");
    BAD(in.top_p = 1.0001f, INVALID_ARGUMENT, "top_p");
    BAD(in.top_p = -0.5f, INVALID_ARGUMENT, "top_p");
    BAD(in.top_p = NAN, INVALID_ARGUMENT, "top_p");
    BAD(in.min_p = 1.5f, INVALID_ARGUMENT, "min_p");
    BAD(in.min_p = -1e-9f, INVALID_ARGUMENT, "min_p");
    BAD(in.min_p = NAN, INVALID_ARGUMENT, "min_p");
    BAD(in.repetition_penalty = -1, INVALID_ARGUMENT, "repetition_penalty");
    BAD(in.repetition_penalty = INFINITY, INVALID_ARGUMENT, "repetition_penalty");
    BAD(in.presence_penalty = NAN, INVALID_ARGUMENT, "presence_penalty");
    BAD(in.frequency_penalty = -INFINITY, INVALID_ARGUMENT, "frequency_penalty");
    BAD(in.n_logprobs = 21, INVALID_ARGUMENT, "n_logprobs");
    BAD(in.reserved = 1, INVALID_ARGUMENT, "reserved");
}

static void bad_lists(void) {
    uint32_t ids[2] = {3, 64};
    float values[2] = {1, INFINITY};
    BAD((in.n_bias = 2, in.bias = values), INVALID_ARGUMENT, "bias_ids");
    BAD((in.n_bias = 1, in.bias_ids = ids), INVALID_ARGUMENT, "bias");
    BAD((in.n_bias = 2, in.bias_ids = ids, in.bias = values), TOKEN_RANGE, "bias_ids[1]");
    BAD((in.n_bias = 1, in.bias_ids = ids, in.bias = values + 1), INVALID_ARGUMENT, "bias[0]");
    BAD((in.n_prompt = 1, in.repetition_penalty = 2), INVALID_ARGUMENT, "prompt");
    BAD((in.n_prompt = 2, in.prompt = ids, in.repetition_penalty = 2), TOKEN_RANGE, "prompt[1]");
    BAD((in.n_generated = 2, in.presence_penalty = 2), INVALID_ARGUMENT, "generated");
    BAD((in.n_generated = 2, in.generated = ids, in.frequency_penalty = 2), TOKEN_RANGE, "generated[1]");
    colibri_sampling_t unread = {.struct_size = sizeof unread, .n_prompt = 9, .n_generated = 9};
    colibri_sample_t out;
    CHECK(draw(&unread, &out) == COLIBRI_OK && out.token == 63); /* no penalty is on: the lists are not touched */
    unread.presence_penalty = 100, unread.n_generated = 1, unread.generated = (uint32_t[]){63};
    CHECK(draw(&unread, &out) == COLIBRI_OK && out.token == 62); /* presence does not read the prompt */
}

/* Finite inputs whose adjusted values leave the range of float. */
static void bad_values(void) {
    uint32_t id = 5, list[3] = {5, 5, 5};
    float big = FLT_MAX, small = -FLT_MAX;
    use_model(64, COLIBRI_ISA_REF);
    for (int i = 0; i < 64; i++) logits[i] = i == 5 ? FLT_MAX : (float)i;
    BAD((in.n_bias = 1, in.bias_ids = &id, in.bias = &big), NON_FINITE, "token 5");
    BAD((in.n_generated = 1, in.generated = list, in.repetition_penalty = 0.5f), NON_FINITE, "token 5");
    BAD((in.n_generated = 3, in.generated = list, in.frequency_penalty = small), NON_FINITE, "token 5");
    BAD(in.temperature = 0.5f, NON_FINITE, "temperature");
    colibri_sampling_t in = {.struct_size = sizeof in, .n_generated = 3, .generated = list, .frequency_penalty = big};
    colibri_sample_t out;
    CHECK(draw(&in, &out) == COLIBRI_OK && out.token == 63); /* -inf: excluded, twice in the list or not */
    uint32_t others[2] = {~(1u << 5), ~0u}; /* what is masked is not penalised: no -inf + inf */
    in.allowed = others, in.frequency_penalty = -FLT_MAX;
    CHECK(draw(&in, &out) == COLIBRI_OK && out.token == 63);
    in.frequency_penalty = big;
    uint32_t only[2] = {1u << 5, 0};
    in.allowed = only, in.presence_penalty = big;
    logits[5] = small;
    expect(&in, COLIBRI_NO_TOKEN, "allowed");
}

static void bad_logits(void) {
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (int k = 0; k < 4; k++)
        for (uint32_t at = 0; at < 64; at += 9) {
            for (int i = 0; i < 64; i++) logits[i] = (float)i;
            logits[at] = bad[k];
            uint32_t none[2] = {0, 0};
            char word[32];
            snprintf(word, sizeof word, "logits[%u]", at);
            BAD(in.temperature = 0, NON_FINITE, word);
            BAD((void)0, NON_FINITE, word);
            BAD(in.allowed = none, NON_FINITE, word);
        }
    logits[63] = 0;
}

static void bad_pointers(void) {
    colibri_sampling_t in = {.struct_size = sizeof in};
    colibri_sample_t out = {.struct_size = sizeof out};
    colibri_buffer_t b = scratch;
    uint64_t bytes;
    struct colibri_model other = {0};
    use_model(64, COLIBRI_ISA_REF);
    for (int i = 0; i < 64; i++) logits[i] = (float)i;
    CHECK(colibri_sample_size(NULL, &bytes) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample_size(&other, &bytes) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample_size(&model, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample(NULL, &in, logits, &scratch, &out, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample(&other, &in, logits, &scratch, &out, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample(&model, NULL, logits, &scratch, &out, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample(&model, &in, NULL, &scratch, &out, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample(&model, &in, logits, NULL, &out, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample(&model, &in, logits, &scratch, NULL, NULL) == COLIBRI_INVALID_ARGUMENT);
    out.struct_size = 12;
    CHECK(colibri_sample(&model, &in, logits, &scratch, &out, NULL) == COLIBRI_STRUCT_SIZE);
    out.struct_size = sizeof out;
    b = scratch, b.size--;
    CHECK(colibri_sample(&model, &in, logits, &b, &out, NULL) == COLIBRI_BUFFER_TOO_SMALL);
    b = scratch, b.ptr = (char *)b.ptr + 16;
    CHECK(colibri_sample(&model, &in, logits, &b, &out, NULL) == COLIBRI_MISALIGNED);
    b = scratch, b.type = COLIBRI_OUTPUT;
    CHECK(colibri_sample(&model, &in, logits, &b, &out, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_sample(&model, &in, logits, &scratch, &out, NULL) == COLIBRI_OK && out.token == 63);
}

int main(void) {
    void (*const all[])(void) = {philox,      weights,    against_definition, large_vocabulary, instruction_sets,
                                 frequencies, greedy_ties, noise,             host_environment, score,
                                 bad_numbers, bad_lists,  bad_values,         bad_logits,       bad_pointers,
                                 rows_are_as_alone, rows_misused};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) all[i]();
    free(scratch.ptr);
    return report();
}
