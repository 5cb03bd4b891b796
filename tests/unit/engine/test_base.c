/* Base arithmetic against libm and long double: fma, halves, exp, log, sin/cos; SHA-256; messages; buffer checks. */
#include "base/buffer.h"
#include "base/checked.h"
#include "base/fp.h"
#include "base/fpenv.h"
#include "base/sha256.h"
#include "test.h"
#include <float.h>
#include <math.h>

static unsigned long long seed = 0x9e3779b97f4a7c15ull;

/* ---- fma ----------------------------------------------------------------------------------------------------- */

static void check_fma(float a, float b, float c) {
    float got = clb_fmaf(a, b, c), want = fmaf(a, b, c);
    CHECK_MSG(clb_bits(got) == clb_bits(want) || (got != got && want != want), "fma(%a, %a, %a) = %a, not %a",
              (double)a, (double)b, (double)c, (double)got, (double)want);
}

static float any_float(void) { return clb_float(test_random(&seed)); }
/* a float with exponent in [low, high] and sometimes few mantissa bits, so that halves and ties are common */
static float float_near(int low, int high) {
    float m = 1.0f + (float)(test_random(&seed) >> 9) * 0x1p-23f;
    if (test_random(&seed) & 1) m = 1.0f + (float)(test_random(&seed) >> 28) * 0x1p-4f;
    int e = low + (int)(test_random(&seed) % (unsigned)(high - low + 1));
    return ldexpf(test_random(&seed) & 1 ? m : -m, e);
}

static void fma_random(void) {
    for (int i = 0; i < 1000000; i++) check_fma(any_float(), any_float(), any_float());
    for (int i = 0; i < 1000000; i++) check_fma(float_near(-3, 3), float_near(-3, 3), float_near(-30, 8));
}

/* Products that meet an addend at every distance, around half of its last bit. */
static void fma_halfway(void) {
    for (int i = 0; i < 1000000; i++) {
        float c = float_near(-4, 4), a = float_near(-2, 2);
        float half = ldexpf(1.0f, ilogbf(c) - 24) * (float)(1 + 2 * (test_random(&seed) % 4));
        float b = half / a;
        check_fma(a, b, c);
        check_fma(a, nextafterf(b, 0.0f), c);
        check_fma(a, -b, c);
        check_fma(half, clb_float(0x3f800001u), c);
        check_fma(half, clb_float(0x3f7fffffu), c);
    }
}

static void fma_edges(void) {
    for (int i = 0; i < 500000; i++) {
        check_fma(float_near(-75, -60), float_near(-80, -60), float_near(-149, -120)); /* subnormal results */
        check_fma(float_near(-75, -74), float_near(-75, -74), 0.0f);
        check_fma(float_near(60, 66), float_near(60, 64), float_near(120, 127)); /* around overflow */
        float a = float_near(-20, 20), b = float_near(-20, 20);
        check_fma(a, b, -(a * b)); /* cancellation */
        check_fma(a, b, nextafterf(-(a * b), 0.0f));
    }
}

static void fma_special(void) {
    const float x[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, FLT_MAX, -FLT_MAX, FLT_MIN, 0x1p-149f,
                       -0x1p-149f, 0x1.fffffep-127f, 0x1.000002p0f, 0x1.fffffep-1f, 0x1p-24f, 0x1p-25f, 0x1p102f};
    const int n = sizeof x / sizeof *x;
    for (int i = 0; i < n * n * n; i++) check_fma(x[i % n], x[i / n % n], x[i / n / n]);
}

/* ---- half and bfloat16 --------------------------------------------------------------------------------------- */

static uint16_t nearest_half(float x) {
    uint16_t sign = signbit(x) ? 0x8000u : 0;
    double a = fabs((double)x);
    if (a >= 65520.0) return sign | 0x7c00u;
    int e = a < 0x1p-14 ? -14 : ilogb(a);
    double q = nearbyint(ldexp(a, 10 - e)); /* 1024 .. 2048, or below for subnormals; carries into the exponent */
    return (uint16_t)(sign | ((e + 14) * 1024 + (int)q));
}

static void half_from_float(float x) {
    uint16_t got = clb_f32_to_f16(x), want = nearest_half(x);
    CHECK_MSG(got == want, "half(%a) = %04x, not %04x", (double)x, got, want);
}

static void halves(void) {
    for (uint32_t h = 0; h < 0x10000u; h++) {
        uint32_t e = h >> 10 & 31, m = h & 1023;
        double v = e ? ldexp(1024.0 + m, (int)e - 25) : ldexp(m, -24);
        float x = clb_f16_to_f32((uint16_t)h);
        if (e == 31 && m) {
            CHECK(x != x && (clb_bits(x) >> 22 & 1) && clb_bits(x) >> 31 == h >> 15);
            CHECK((clb_f32_to_f16(x) & 0x7fff) == (0x7e00 | m));
            continue;
        }
        CHECK(e == 31 ? isinf(x) : fabs((double)x) == v);
        CHECK(clb_f32_to_f16(x) == h && (signbit(x) != 0) == (h >> 15));
        if (e == 31) continue;
        float next = clb_float(clb_bits(x) + 1), middle = e < 31 ? (float)(v + ldexp(0.5, e ? (int)e - 25 : -24)) : 0;
        half_from_float(next);
        half_from_float(clb_float(clb_bits(middle) - 1));
        half_from_float(middle);
        half_from_float(clb_float(clb_bits(middle) + 1));
        half_from_float(-middle);
    }
    for (uint64_t u = 0; u < 1ull << 32; u += 4099) {
        float x = clb_float((uint32_t)u);
        if (x == x) half_from_float(x);
        else CHECK((clb_f32_to_f16(x) & 0x7e00) == 0x7e00);
    }
    CHECK(clb_f32_to_f16(clb_float(0x7f800001u)) == 0x7e00); /* a NaN whose upper bits look infinite */
}

static void bfloats(void) {
    for (uint32_t h = 0; h < 0x10000u; h++) {
        float x = clb_bf16_to_f32((uint16_t)h);
        CHECK(clb_bits(x) == h << 16);
        if (x != x) {
            CHECK(clb_f32_to_bf16(x) == (h | 0x40));
            continue;
        }
        CHECK(clb_f32_to_bf16(x) == h);
        if (isinf(x)) continue;
        uint32_t u = h << 16, even = h & 1;
        CHECK(clb_f32_to_bf16(clb_float(u | 0x7fff)) == h);
        CHECK(clb_f32_to_bf16(clb_float(u | 0x8000)) == h + even);
        CHECK(clb_f32_to_bf16(clb_float(u | 0x8001)) == h + 1);
    }
    CHECK(clb_f32_to_bf16(clb_float(0x7f800001u)) == 0x7fc0); /* a NaN whose upper half looks infinite */
}

/* ---- exp, log, sin, cos -------------------------------------------------------------------------------------- */

/* error in units of the last place of the result's format: digits bits, smallest exponent low */
static double ulps(long double got, long double want, int digits, int low) {
    if (got == want) return 0;
    int e = want == 0 ? low : ilogbl(want);
    return (double)fabsl(ldexpl(got - want, digits - 1 - (e < low ? low : e)));
}

static void worst_below(const char *what, double worst, double limit) {
    CHECK_MSG(worst < limit, "%s: error of %f ulp, limit %f", what, worst, limit);
}

static void exp_float(void) {
    double worst = 0;
    float before = 0;
    for (uint32_t u = 0; u < 1500000; u++) {
        float x = -87.33f + (float)u * (176.04f / 1500000), y = clb_expf(x);
        double e = ulps(y, expl(x), 24, -126);
        worst = e > worst ? e : worst;
        CHECK(y >= before * (1 - 0x1p-22f));
        before = y;
    }
    worst_below("expf", worst, 1); /* the promise is 2 */
    for (uint32_t u = 0; u < 0x3f800000u; u += 997) { /* probabilities never exceed that of the maximum */
        float y = clb_expf(-clb_float(u));
        CHECK(y <= 1.0f && ulps(y, expl(-clb_float(u)), 24, -126) < 2);
    }
    CHECK(clb_expf(0.0f) == 1.0f && clb_expf(-0.0f) == 1.0f);
    CHECK(clb_expf(-87.34f) == 0 && clb_expf(-FLT_MAX) == 0 && clb_expf(-INFINITY) == 0);
    CHECK(isinf(clb_expf(88.73f)) && isinf(clb_expf(FLT_MAX)) && isinf(clb_expf(INFINITY)));
    CHECK(isfinite(clb_expf(88.7228f)) && clb_expf(-87.336f) > 0 && isnan(clb_expf(NAN)));
}

static double unit(void) { return (double)(((uint64_t)test_random(&seed) << 32 | test_random(&seed)) >> 11) * 0x1p-53; }

static void exp_double(void) {
    double worst = 0, deep = 0;
    for (int i = 0; i < 500000; i++) {
        double x = (unit() - 0.5) * (i % 3 == 0 ? 1417.0 : i % 3 == 1 ? 40.0 : 1e-3);
        double e = ulps(clb_exp(x), expl(x), 53, -1022), y = -708.4 - 37.1 * unit();
        worst = e > worst ? e : worst;
        e = ulps(clb_exp(y), expl(y), 53, -1022);
        deep = e > deep ? e : deep;
    }
    worst_below("exp", worst, 1);
    worst_below("exp, subnormal", deep, 1);
    CHECK(clb_exp(0.0) == 1.0 && clb_exp(-INFINITY) == 0 && clb_exp(-746.0) == 0);
    CHECK(isinf(clb_exp(709.79)) && isinf(clb_exp(INFINITY)) && isnan(clb_exp((double)NAN)));
    CHECK(isfinite(clb_exp(709.782712893383973096)) && clb_exp(-745.1) == 0x1p-1074);
}

static void log_double(void) {
    double worst = 0;
    for (int i = 0; i < 1000000; i++) {
        double x = i % 3 == 0   ? 1.0 + (unit() - 0.5) * ldexp(1.0, -(int)(test_random(&seed) % 50))
                   : i % 3 == 1 ? 1.0 + unit() * 1e6
                                : ldexp(1.0 + unit(), (int)(test_random(&seed) % 2046) - 1022);
        double e = ulps(clb_log(x), logl(x), 53, -1022);
        worst = e > worst ? e : worst;
    }
    worst_below("log", worst, 1);
    CHECK(clb_log(1.0) == 0.0 && !signbit(clb_log(1.0)));
}

static void sincos_one(double x, double *worst) {
    double s, c, minus_s, same_c;
    clb_sincos(x, &s, &c);
    clb_sincos(-x, &minus_s, &same_c);
    CHECK_MSG(minus_s == -s && same_c == c, "symmetry at %a", x);
    double e = fmax(ulps(s, sinl(x), 53, -1022), ulps(c, cosl(x), 53, -1022));
    *worst = e > *worst ? e : *worst;
}

static void sincos_double(void) {
    double worst = 0;
    const long double quarter = 1.57079632679489661923132169163975144L;
    for (int i = 0; i < 300000; i++) {
        sincos_one(unit() * 1.647e6, &worst);
        sincos_one(unit() * 7.0, &worst);
        sincos_one(ldexp(unit(), -(int)(test_random(&seed) % 60)), &worst);
        unsigned n = i < 2000 ? (unsigned)i : test_random(&seed) % 0xfffffu;
        double near = (double)(n * quarter); /* where the reduction cancels most */
        sincos_one(near, &worst);
        sincos_one(nextafter(near, 0.0), &worst);
        sincos_one((double)(n * quarter / 2), &worst); /* where the quadrant changes */
    }
    worst_below("sincos", worst, 1);
    double s, c;
    clb_sincos(0.0, &s, &c);
    CHECK(s == 0 && c == 1);
    for (int n = 0; n < 5; n++) {
        clb_sincos(n, &s, &c); /* whole positions */
        CHECK(fabs(s - sin(n)) < 1e-15 && fabs(c - cos(n)) < 1e-15);
    }
}

/* ---- trees, integers ----------------------------------------------------------------------------------------- */

static void trees(void) {
    float f[16];
    double d[16];
    for (int i = 0; i < 16; i++) d[i] = f[i] = (float)(1 << i);
    CHECK(clb_tree16(f) == 65535.0f && clb_tree16d(d) == 65535.0);
    memset(f, 0, sizeof f);
    f[0] = 1.0f, f[8] = 0x1p-24f, f[4] = 0x1p-24f; /* each is lost against 1 in this order, together they are not */
    CHECK(clb_tree16(f) == 1.0f);
    uint64_t x = 0;
    CHECK(clb_mul(1ull << 32, 1ull << 32, &x) && clb_add(UINT64_MAX, 1, &x) && clb_round_up(UINT64_MAX, 64, &x));
    CHECK(!clb_mul(3, 5, &x) && x == 15 && !clb_add(3, 5, &x) && x == 8 && !clb_round_up(65, 64, &x) && x == 128);
}

static void environment(void) {
#if defined(__x86_64__)
    unsigned host = _mm_getcsr();
    _mm_setcsr(0x1F80u | 0x8040u | 0x6000u); /* FTZ, DAZ, toward zero */
    unsigned odd = _mm_getcsr();
    clb_fpenv_t old = clb_fpenv_enter();
    volatile float tiny = 0x1p-149f, one = 1.0f;
    CHECK(tiny * one == 0x1p-149f && one + 0x1.8p-24f == 0x1.000002p0f);
    clb_fpenv_leave(old);
    CHECK((_mm_getcsr() & ~0x3fu) == odd);
    _mm_setcsr(host);
#else
    clb_fpenv_t old = clb_fpenv_enter();
    clb_fpenv_leave(old);
    CHECK(clb_fpenv_enter() == 0 || old != 0);
    clb_fpenv_leave(old);
#endif
}

/* ---- SHA-256 ------------------------------------------------------------------------------------------------- */

static void hash(const char *data, size_t n, size_t piece, uint8_t *digest) {
    clb_sha256_t h;
    clb_sha256_init(&h);
    for (size_t i = 0; i < n; i += piece) clb_sha256_update(&h, data + i, piece < n - i ? piece : n - i);
    clb_sha256_final(&h, digest);
}

static void check_hash(const char *data, size_t n, size_t piece, const char *want) {
    uint8_t digest[32];
    char hex[65];
    hash(data, n, piece, digest);
    for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    CHECK_MSG(!strcmp(hex, want), "sha256 of %zu bytes by %zu: %s", n, piece, hex);
}

/* Vectors of FIPS 180-4 and the NIST examples. */
static void sha256(void) {
    static char million[1000000];
    const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    memset(million, 'a', sizeof million);
    check_hash("", 0, 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_hash("abc", 3, 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    for (size_t piece = 1; piece < 60; piece += 11)
        check_hash(two, 56, piece, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    for (size_t piece = 63; piece < 1000000; piece = piece * 5 + 1)
        check_hash(million, sizeof million, piece, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    for (size_t n = 0; n < 200; n++) { /* padding at every length: any split gives the same digest */
        uint8_t whole[32], parts[32];
        hash(million, n, 200, whole);
        hash(million, n, 1 + n % 7, parts);
        CHECK(!memcmp(whole, parts, 32));
    }
}

/* ---- messages, structs, buffers ------------------------------------------------------------------------------ */

static void messages(void) {
    colibri_error_t err = {.struct_size = sizeof err};
    CHECK(clb_fail(&err, COLIBRI_TENSOR, "%s[%u]: %d %S%% %u", "w", (uint64_t)7, INT64_MIN, "abcdef", 3, UINT64_MAX) ==
          COLIBRI_TENSOR);
    CHECK_MSG(!strcmp(err.message, "w[7]: -9223372036854775808 abc% 18446744073709551615"), "%s", err.message);
    CHECK(err.status == COLIBRI_TENSOR);
    clb_fail(&err, COLIBRI_CPU, "%d %s", (int64_t)-5, (const char *)NULL);
    CHECK(!strcmp(err.message, "-5 (null)"));
    CHECK(clb_fail(NULL, COLIBRI_CPU, "x") == COLIBRI_CPU);
    char text[400];
    memset(text, 'x', sizeof text);
    clb_fail(&err, COLIBRI_CPU, "%S", text, 400);
    CHECK(strlen(err.message) == sizeof err.message - 1);
}

/* A caller with a smaller error struct: nothing behind its end is written. */
static void short_error(void) {
    for (uint32_t size = 0; size <= sizeof(colibri_error_t); size++) {
        colibri_error_t err;
        memset(&err, 0x55, sizeof err);
        err.struct_size = size;
        clb_fail(&err, COLIBRI_CPU, "a message of some length, %s", "long enough to be cut");
        const unsigned char *end = (const unsigned char *)&err + (size < 4 ? 4 : size);
        for (const unsigned char *p = end; p < (const unsigned char *)(&err + 1); p++) CHECK(*p == 0x55);
        if (size > 8) CHECK(memchr(err.message, 0, size - 8) != NULL);
        if (size >= 8) CHECK(err.status == COLIBRI_CPU);
    }
}

static void status_texts(void) {
#define X(name, value, text) CHECK(!strcmp(colibri_status_text(value), text));
    COLIBRI_STATUS_LIST(X)
#undef X
    CHECK(!strcmp(colibri_status_text(-1), "unknown status") && !strcmp(colibri_status_text(9999), "unknown status"));
}

static void structs(void) {
    struct { uint32_t struct_size, a, b; } in = {8, 1, 2}, own = {0, 9, 9};
    colibri_error_t err = {.struct_size = sizeof err};
    CHECK(clb_struct_check(NULL, 8, "thing", &err) == COLIBRI_INVALID_ARGUMENT && strstr(err.message, "thing"));
    CHECK(clb_struct_check(&in, 12, "thing", &err) == COLIBRI_STRUCT_SIZE && strstr(err.message, "thing"));
    CHECK(clb_struct_check(&in, 8, "thing", &err) == COLIBRI_OK);
    clb_struct_read(&own, sizeof own, &in);
    CHECK(own.struct_size == sizeof own && own.a == 1 && own.b == 0);
    in.struct_size = 400; /* a newer caller */
    clb_struct_read(&own, sizeof own, &in);
    CHECK(own.struct_size == sizeof own && own.b == 2);
}

static void buffers(void) {
    static _Alignas(64) char memory[256];
    const colibri_buffer_t good = {sizeof good, COLIBRI_OUTPUT, memory, 256, 64, 0, 5, 0};
    colibri_error_t err = {.struct_size = sizeof err};
#define BUFFER(change, need, want)                                                          \
    do {                                                                                    \
        colibri_buffer_t b = good;                                                          \
        change;                                                                             \
        CHECK(clb_buffer_check(&b, "logits", COLIBRI_OUTPUT, need, &err) == COLIBRI_##want); \
        if (COLIBRI_##want) CHECK(strstr(err.message, "logits") && err.status == COLIBRI_##want); \
    } while (0)
    BUFFER((void)0, 256, OK);
    BUFFER((void)0, 257, BUFFER_TOO_SMALL);
    BUFFER(b.struct_size--, 1, STRUCT_SIZE);
    BUFFER(b.type = COLIBRI_WEIGHTS, 1, INVALID_ARGUMENT);
    BUFFER(b.type = 77, 1, INVALID_ARGUMENT);
    BUFFER(b.device = 1, 1, UNSUPPORTED);
    BUFFER(b.ptr = NULL, 0, INVALID_ARGUMENT);
    BUFFER((b.ptr = NULL, b.size = 0), 0, OK);
    BUFFER((b.ptr = NULL, b.size = 0), 1, INVALID_ARGUMENT);
    BUFFER(b.ptr = memory + 4, 1, MISALIGNED);
    BUFFER(b.alignment = 32, 1, MISALIGNED);
    BUFFER(b.alignment = 96, 1, MISALIGNED);
    BUFFER(b.alignment = 0, 1, MISALIGNED);
    BUFFER(b.alignment = 1u << 31, 1, MISALIGNED);
    BUFFER(b.size = UINT64_MAX, 1, INVALID_ARGUMENT);
#undef BUFFER
    CHECK(clb_buffer_check(NULL, "logits", COLIBRI_OUTPUT, 1, &err) == COLIBRI_INVALID_ARGUMENT);
    colibri_buffer_t b = good;
    clb_buffer_acquire(&b);
    CHECK(b.ref_count == 6);
    clb_buffer_release(&b);
    CHECK(b.ref_count == 5);
}

int main(void) {
    void (*const all[])(void) = {fma_random,   fma_halfway, fma_edges,   fma_special, halves,        bfloats,
                                 exp_float,    exp_double,  log_double,  sincos_double, trees,       environment,
                                 sha256,       messages,    short_error, status_texts,  structs,     buffers};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) all[i]();
    return report();
}
