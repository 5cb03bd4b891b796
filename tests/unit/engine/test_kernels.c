/* Every kernel slot of every instruction set this machine can run, compared with ref as bytes: random shapes, odd
 * tails, extreme values. Slots come from kernels.def, formats.def and the KV formats, so a new one is tested by being
 * declared. A build with CLB_EMULATE_AVX512 runs the AVX-512 kernels through an emulation header on any CPU. */
#include "../../../engine_c/include/colibri.h"
#include "../../../engine_c/src/base/fp.h"
#include "../../../engine_c/src/base/fpenv.h"
#include "../../../engine_c/src/cpu/features.h"
#include "../../../engine_c/src/kernels/kernels.h"
#include "test.h"

enum { MAX_N = 224, MAX_HD = 176, MAX_HEADS = 19, MAX_KEYS = 70, ROUNDS = 400 };
enum { MAX_ROWS = 80, MAX_PANELS = 5, MAX_NB = 40, FEW_NB = 9 };
static clb_kernels_t ref, isa;
static const char *isa_name;
static unsigned long long seed = 88172645463325252ull;
static unsigned pick(unsigned n) { return test_random(&seed) % n; }

/* values that find wrong roundings, wrong limits and lost signs */
static const uint32_t extremes[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff, 0x00800000, 0x3f800000,
                                    0x7f7fffff, 0xff7fffff, 0x0d7fffff, 0x0d800000, 0x0d800001, 0x8d800000, 0x42b17217,
                                    0x42b17219, 0xc2aeac4f, 0xc2aeac51, 0x477fefff, 0x477ff000, 0x33000000, 0x33000001,
                                    0x387fc000, 0x387fffff, 0xb8800000, 0x7e800000, 0x5f000000, 0x20000000};
static const uint32_t not_finite[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc01234, 0x7f800001};

typedef enum kind { PLAIN, EXTREME, BROKEN, KINDS } kind_t;
static void fill(float *x, size_t n, kind_t kind) {
    float scale = clb_float((uint32_t)(117 + pick(20)) << 23);
    for (size_t i = 0; i < n; i++) {
        x[i] = test_uniform(&seed) * scale;
        if (kind != PLAIN && pick(3) == 0) x[i] = clb_float(extremes[pick(sizeof extremes / sizeof *extremes)]);
    }
    if (kind == BROKEN && n) x[pick((unsigned)n)] = clb_float(not_finite[pick(5)]);
}

/* equal bits, or both NaN (a NaN's sign and payload are not part of the contract) */
static int same(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (clb_bits(a[i]) != clb_bits(b[i]) && !(a[i] != a[i] && b[i] != b[i])) return 0;
    return 1;
}
static int same64(double a, double b) { return clb_bits64(a) == clb_bits64(b) || (a != a && b != b); }
#define SAME(slot, ok, kind) CHECK_MSG(ok, "%s %s differs from ref (kind %d)", isa_name, slot, (int)(kind))

/* --- scalar slots: one function per entry of kernels.def ------------------------------------------------------- */
static float in[3][MAX_N + 1], got[MAX_N + 1], want[MAX_N + 1];
static void inputs(kind_t kind) {
    for (int i = 0; i < 3; i++) fill(in[i], MAX_N + 1, kind);
    memcpy(got, in[2], sizeof got);
    memcpy(want, in[2], sizeof want);
}
static void compare(const char *slot, kind_t kind) { SAME(slot, same(got, want, MAX_N + 1), kind); }

static void check_rmsnorm(uint32_t n, kind_t kind) {
    isa.rmsnorm(in[0], in[1], 1e-5f, n, got);
    ref.rmsnorm(in[0], in[1], 1e-5f, n, want);
    compare("rmsnorm", kind);
}
static void check_silu_mul(uint32_t n, kind_t kind) {
    isa.silu_mul(got, in[1], n);
    ref.silu_mul(want, in[1], n);
    compare("silu_mul", kind);
}
static void check_rope(uint32_t n, kind_t kind) {
    float scale = pick(2) ? 1.0f : 0.125f;
    n &= ~1u;
    isa.rope(got, in[0], in[1], scale, n);
    ref.rope(want, in[0], in[1], scale, n);
    compare("rope", kind);
}
static void check_softmax(uint32_t n, kind_t kind) {
    n = (n + 15) & ~15u;
    for (uint32_t i = 1; i < n; i++)
        if (pick(8) == 0) got[i] = want[i] = -CLB_INF;
    float a = isa.softmax(got, n), b = ref.softmax(want, n);
    SAME("softmax", same(&a, &b, 1) && same(got, want, MAX_N + 1), kind);
}
static void check_axpy(uint32_t n, kind_t kind) {
    isa.axpy(in[1][0], in[0], n, got);
    ref.axpy(in[1][0], in[0], n, want);
    compare("axpy", kind);
}
static void check_scale(uint32_t n, kind_t kind) {
    isa.scale(in[1][0], n, got);
    ref.scale(in[1][0], n, want);
    compare("scale", kind);
}
static void check_add(uint32_t n, kind_t kind) {
    isa.add(in[0], n, got);
    ref.add(in[0], n, want);
    compare("add", kind);
}
static void check_finite_max(uint32_t n, kind_t kind) {
    float a = 0, b = 0;
    int bad = isa.finite_max(in[0], n, &a), expected = ref.finite_max(in[0], n, &b);
    SAME("finite_max", bad == expected && clb_bits(a) == clb_bits(b), kind);
}
static void check_exp_sum(uint32_t n, kind_t kind) {
    float m = pick(2) ? in[0][0] : 1.5f;
    SAME("exp_sum", same64(isa.exp_sum(in[0], n, m), ref.exp_sum(in[0], n, m)), kind);
}
static void check_above(uint32_t n, kind_t kind) {
    uint32_t from = pick(n + 1);
    float low = pick(8) ? in[0][pick(n)] : pick(2) ? -CLB_INF : in[1][0];
    SAME("above", isa.above(in[0], from, n, low) == ref.above(in[0], from, n, low), kind);
}
static void check_allow(uint32_t n, kind_t kind) {
    uint32_t bits[MAX_N / 32 + 1];
    for (uint32_t i = 0; i <= MAX_N / 32; i++) bits[i] = test_random(&seed);
    isa.allow(in[0], bits, n, got);
    ref.allow(in[0], bits, n, want);
    compare("allow", kind);
}

/* Logits as the sampler has them, in in[0]: ordinary ones, ties, excluded ones, and rarely only those. */
static float logits(uint32_t n, kind_t kind) {
    float most = -CLB_INF, spread = pick(3) ? 4.0f : 40.0f;
    for (uint32_t i = 0; i < n; i++) {
        float x = kind == PLAIN || pick(3) ? test_uniform(&seed) * spread : in[0][i];
        if (!clb_finite(x) || pick(9) == 0) x = -CLB_INF;
        in[0][i] = !i || pick(5) ? x : in[0][pick(i)];
        most = in[0][i] > most ? in[0][i] : most;
    }
    return clb_finite(most) ? most : 0.0f;
}
enum { SENTINEL = 0x5a5a };
static void check_spread(uint32_t n, kind_t kind) {
    static uint16_t bucket[2][MAX_N + 1];
    static uint64_t mass[2][CLB_BUCKETS];
    static const float temperatures[] = {1.0f, 0.7f, 1.3f, 1e-5f, 100.0f};
    float t = temperatures[pick(5)], m = logits(n, kind) / t;
    if (!clb_finite(m)) t = 1.0f, m = logits(n, PLAIN); /* the sampler refuses it */
    uint32_t limit = pick(4) ? pick(CLB_BUCKETS) : CLB_BUCKETS;
    int weighs = pick(4) != 0;
    for (int i = 0; i < CLB_BUCKETS; i++) mass[0][i] = mass[1][i] = (uint64_t)i;
    for (int i = 0; i <= MAX_N; i++) bucket[0][i] = bucket[1][i] = SENTINEL;
    uint64_t a = isa.spread(in[0], n, t, m, limit, bucket[0], weighs ? mass[0] : NULL);
    uint64_t b = ref.spread(in[0], n, t, m, limit, bucket[1], weighs ? mass[1] : NULL);
    SAME("spread", a == b && !memcmp(mass[0], mass[1], sizeof *mass) && !memcmp(bucket[0], bucket[1], sizeof *bucket),
         kind);
}
static void check_members(uint32_t n, kind_t kind) {
    static uint16_t bucket[MAX_N];
    static uint32_t ids[2][MAX_N];
    n &= ~15u;
    uint32_t low = pick(4) ? pick(40) : 65000 + pick(500), count = pick(4) ? pick(30) : 65536 - low;
    for (uint32_t i = 0; i < n; i++) bucket[i] = (uint16_t)(pick(2) ? pick(40) : pick(65536));
    for (int i = 0; i < MAX_N; i++) ids[0][i] = ids[1][i] = SENTINEL;
    uint32_t a = isa.members(bucket, n, low, count, ids[0]), b = ref.members(bucket, n, low, count, ids[1]);
    SAME("members", a == b && !memcmp(ids[0], ids[1], a * sizeof **ids), kind);
}
static void check_weigh(uint32_t n, kind_t kind) {
    static uint64_t w[2][MAX_N + 1];
    float m = logits(n, kind), least = pick(2) ? 0.0f : clb_float((127 - pick(30)) << 23);
    for (int i = 0; i <= MAX_N; i++) w[0][i] = w[1][i] = SENTINEL;
    isa.weigh(in[0], n, m, least, w[0]);
    ref.weigh(in[0], n, m, least, w[1]);
    SAME("weigh", !memcmp(w[0], w[1], sizeof *w), kind);
}
static void check_scalar_slots(void) {
    for (uint32_t n = 1; n <= MAX_N; n++)
        for (int repeat = 0; repeat < 4; repeat++)
            for (kind_t kind = 0; kind < KINDS; kind++) {
#define CLB_KERNEL(slot) inputs(kind), check_##slot(n, kind);
#include "../../../engine_c/src/kernels/kernels.def"
#undef CLB_KERNEL
            }
}

/* exp through exp_sum of one element: every float around both limits, a dense scan between them */
static void check_exp(float x) {
    SAME("exp", same64(isa.exp_sum(&x, 1, 0.0f), ref.exp_sum(&x, 1, 0.0f)), PLAIN);
}
static void check_exp_range(void) {
    for (uint32_t i = 0; i < 64; i++) {
        check_exp(clb_float(clb_bits(CLB_EXP_LO) - 32 + i));
        check_exp(clb_float(clb_bits(CLB_EXP_HI) - 32 + i));
    }
    for (int i = 0; i < 20000; i++) check_exp(96.0f * test_uniform(&seed));
}

/* only zeros of either sign, then nothing above -0: the largest value must not depend on lanes */
static void check_max_of_zeros(void) {
    for (uint32_t n = 1; n <= 40; n++) {
        for (uint32_t i = 0; i < n; i++) in[0][i] = clb_float((n % 4 && pick(2) ? 0u : 1u) << 31);
        check_finite_max(n, PLAIN);
    }
}

/* --- pack and gemm --------------------------------------------------------------------------------------------- */
typedef struct side { /* one packed copy of the activations */
    _Alignas(64) uint8_t q[MAX_NB * MAX_ROWS * CLB_BLOCK * 4];
    float d[MAX_NB * MAX_ROWS];
    int32_t s[MAX_NB * MAX_ROWS];
    _Alignas(64) float y[MAX_ROWS * (MAX_PANELS * CLB_PANEL + 8)];
} side_t;
static side_t a, b;
static clb_act_t act(side_t *s, uint32_t cap, uint32_t nb) { return (clb_act_t){s->q, s->d, s->s, cap, nb}; }

static int same_act(uint32_t kind, size_t blocks) {
    if (kind == CLB_ACT_F32) return same((float *)(void *)a.q, (float *)(void *)b.q, blocks * CLB_BLOCK);
    return !memcmp(a.q, b.q, blocks * CLB_BLOCK) && !memcmp(a.s, b.s, blocks * sizeof *a.s) && same(a.d, b.d, blocks);
}

static void check_pack(uint32_t kind, kind_t values) {
    static float x[MAX_NB * CLB_BLOCK];
    uint32_t nb = 1 + pick(FEW_NB), n = nb * CLB_BLOCK - pick(CLB_BLOCK), cap = 1 + pick(MAX_ROWS),
             spare = pick(FEW_NB - nb + 1);
    clb_act_t to_a = act(&a, cap, FEW_NB), to_b = act(&b, cap, FEW_NB);
    uint32_t row = pick(cap);
    memset(&a, 0x5a, sizeof a);
    memset(&b, 0x5a, sizeof b);
    fill(x, n, values);
    isa.pack[kind](x, n, &to_a, spare, row);
    ref.pack[kind](x, n, &to_b, spare, row);
    SAME(kind == CLB_ACT_Q8 ? "pack q8" : "pack f32", same_act(kind, (size_t)cap * FEW_NB), values);
}

/* random weights through the format's own pack; quantised formats also get every integer their layout can hold */
static void random_panel(const clb_format_t *f, uint32_t nb, uint8_t *panel) {
    static float w[CLB_BLOCK * CLB_PANEL];
    static int8_t q[CLB_BLOCK * CLB_PANEL];
    uint16_t scale[CLB_PANEL];
    for (uint32_t i = 0; i < nb; i++, panel += f->block_bytes) {
        if (f->pack_quants && pick(2)) {
            int low = f == &clb_format_q4 ? -8 : -128, span = f == &clb_format_q4 ? 16 : 256;
            int edge = (int)pick(2);
            for (int k = 0; k < CLB_BLOCK * CLB_PANEL; k++)
                q[k] = (int8_t)(edge ? (pick(2) ? low : low + span - 1) : low + (int)pick((unsigned)span));
            for (int l = 0; l < CLB_PANEL; l++) scale[l] = (uint16_t)(pick(0x7c00) | (pick(2) << 15));
            CHECK(!f->pack_quants(q, scale, panel));
        } else {
            fill(w, CLB_BLOCK * CLB_PANEL, PLAIN);
            CHECK(!f->pack(w, panel));
        }
    }
}

/* x as ref packs it; one case in four has every activation at the edge of its range */
static void random_rows(const clb_format_t *f, uint32_t cap, uint32_t nb, kind_t values) {
    static float x[MAX_NB * CLB_BLOCK];
    clb_act_t to = act(&a, cap, nb);
    for (uint32_t r = 0; r < cap; r++) {
        fill(x, (size_t)nb * CLB_BLOCK, values);
        if (r % 4 == 3)
            for (uint32_t k = 0; k < nb * CLB_BLOCK; k++) x[k] = x[k] < 0 ? -2.0f : 2.0f;
        ref.pack[f->act](x, nb * CLB_BLOCK, &to, 0, r);
    }
}

static void check_gemm(uint32_t id, uint32_t rows, kind_t values) {
    static _Alignas(64) uint8_t panels[MAX_PANELS * MAX_NB * CLB_BLOCK * CLB_PANEL * 4];
    const clb_format_t *f = clb_format(id);
    uint32_t nb = pick(16) ? 1 + pick(FEW_NB) : MAX_NB - pick(8), /* long enough for several spans of blocks */
             cap = rows + pick(MAX_ROWS + 1 - rows), row0 = pick(cap - rows + 1);
    clb_panels_t w = {panels, clb_panel_stride(f, nb), 1 + pick(MAX_PANELS), nb};
    size_t ldy = w.n * CLB_PANEL + pick(8);
    for (uint32_t p = 0; p < w.n; p++) random_panel(f, nb, panels + p * w.stride);
    memset(&a, 0x5a, sizeof a);
    random_rows(f, cap, nb, values);
    memset(b.y, 0x5a, sizeof b.y);
    clb_act_t x = act(&a, cap, nb);
    isa.gemm[id](&w, &x, row0, rows, a.y, ldy);
    ref.gemm[id](&w, &x, row0, rows, b.y, ldy);
    SAME(f->name, same(a.y, b.y, sizeof a.y / sizeof *a.y), values);
}

static void check_formats(void) {
    for (uint32_t id = 0; id < CLB_FORMATS; id++) {
        if (!clb_format(id)) continue;
        for (uint32_t rows = 1; rows <= MAX_ROWS; rows++)
            for (int repeat = 0; repeat < 4; repeat++)
                check_gemm(id, rows, repeat == 3 ? (kind_t)(1 + pick(2)) : PLAIN);
    }
    for (int i = 0; i < ROUNDS; i++)
        for (uint32_t kind = 0; kind < 2; kind++)
            for (kind_t values = 0; values < KINDS; values++) check_pack(kind, values);
}

/* --- KV and attention ------------------------------------------------------------------------------------------ */
static void check_kv_store(uint32_t format, kind_t kind) {
    static _Alignas(64) uint8_t x[MAX_N * 4 + 64], y[MAX_N * 4 + 64];
    uint32_t n = 1 + pick(MAX_N);
    memset(x, 0x5a, sizeof x);
    memset(y, 0x5a, sizeof y);
    fill(in[0], n, kind);
    int bad = isa.kv_store[format](in[0], n, x), expected = ref.kv_store[format](in[0], n, y);
    SAME("kv_store", bad == expected && (bad || !memcmp(x, y, sizeof x)), kind);
}

static void check_attention(uint32_t format, kind_t kind) {
    static _Alignas(64) float kv[MAX_KEYS * MAX_HD], q[MAX_HEADS * MAX_HD], out[2][MAX_HEADS * MAX_HD];
    static float p[2][MAX_HEADS * (MAX_KEYS + 8)], row[MAX_HD];
    uint32_t hdp = 16 * (1 + pick(MAX_HD / 16)), nq = 1 + pick(MAX_HEADS), n = 1 + pick(MAX_KEYS), ld = n + pick(8);
    uint32_t bytes = hdp * (format == COLIBRI_KV_F32 ? 4 : 2);
    for (uint32_t j = 0; j < n; j++) {
        fill(row, hdp, kind);
        ref.kv_store[format](row, hdp, (uint8_t *)kv + (size_t)j * bytes);
    }
    fill(q, (size_t)nq * hdp, kind);
    memset(p, 0x5a, sizeof p);
    isa.attn_scores[format](q, nq, kv, n, hdp, p[0], ld);
    ref.attn_scores[format](q, nq, kv, n, hdp, p[1], ld);
    SAME("attn_scores", same(p[0], p[1], sizeof *p / sizeof **p), kind);
    fill(p[0], sizeof *p / sizeof **p, kind);
    fill(out[0], sizeof *out / sizeof **out, kind);
    memcpy(out[1], out[0], sizeof *out);
    isa.attn_accumulate[format](p[0], ld, nq, kv, n, hdp, out[0]);
    ref.attn_accumulate[format](p[0], ld, nq, kv, n, hdp, out[1]);
    SAME("attn_accumulate", same(out[0], out[1], sizeof *out / sizeof **out), kind);
}

static void check_kv(void) {
    for (int i = 0; i < ROUNDS; i++)
        for (uint32_t format = 0; format < 2; format++)
            for (kind_t kind = 0; kind < KINDS; kind++) {
                check_kv_store(format, kind);
                if (i % 2) check_attention(format, kind);
            }
}

static void check_no_null(const clb_kernels_t *t) {
    for (int i = 0; i < CLB_FORMATS; i++) CHECK(!clb_format((uint32_t)i) || t->gemm[i]);
    for (int i = 0; i < 2; i++) CHECK(t->pack[i] && t->kv_store[i] && t->attn_scores[i] && t->attn_accumulate[i]);
#define CLB_KERNEL(slot) CHECK(t->slot);
#include "../../../engine_c/src/kernels/kernels.def"
#undef CLB_KERNEL
}

int main(void) {
    uint32_t best = clb_cpu_best_isa();
#if defined(CLB_EMULATE_AVX512)
    best = COLIBRI_ISA_AVX512;
#endif
    clb_fpenv_enter();
    clb_kernels_fill(&ref, COLIBRI_ISA_REF);
    check_no_null(&ref);
    for (uint32_t i = COLIBRI_ISA_AVX2; i <= best; i++) {
        isa_name = clb_isa_name(i);
        memset(&isa, 0, sizeof isa);
        clb_kernels_fill(&isa, i);
        check_no_null(&isa);
        check_scalar_slots();
        check_exp_range();
        check_max_of_zeros();
        check_formats();
        check_kv();
    }
    printf("kernels up to %s: ", clb_isa_name(best));
    return report();
}
