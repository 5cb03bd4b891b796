/* See probe.h. Each kernel is the densest loop of its instruction: enough independent accumulators to hide latency and
 * operands in registers. Int8 is vpdpbusd on AVX-512; on AVX2 it is vpmaddubsw and, once per block of 32, vpmaddwd.
 * That is for 4-bit weights; with 8 bits every product must be widened, which leaves AVX2 about half of this rate. */
#include "probe.h"
#include "pool.h"
#include <errno.h>
#include <sys/mman.h>
#include <time.h>

enum { READ_BYTES = 512 << 20, READ_STEP = 512 };

/* One thread's share: reads `bytes` at data (a multiple of READ_STEP), or computes `steps` steps. Returns something
 * that depends on all of it. */
typedef uint64_t kernel_fn(const uint8_t *data, uint64_t bytes, uint64_t steps);
typedef struct probe {
    kernel_fn *run;
    uint32_t ops, steps; /* operations of a step, steps of a run; 0 for READ */
} probe_t;

/* ---- plain C --------------------------------------------------------------------------------------------------- */

static uint64_t read_c(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    const uint64_t *p = (const uint64_t *)(const void *)data;
    uint64_t a[8] = {0};
    (void)steps;
    for (uint64_t i = 0; i < bytes / 8; i += 8)
        for (int j = 0; j < 8; j++) a[j] += p[i + (uint64_t)j];
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

enum { C_WIDTH = 16 };
static uint64_t int8_c(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    const volatile uint8_t *seed = data; /* operands the compiler cannot know */
    uint8_t w[C_WIDTH];
    int8_t x[C_WIDTH];
    int32_t sum[C_WIDTH] = {0};
    (void)bytes;
    for (int i = 0; i < C_WIDTH; i++) w[i] = seed[i], x[i] = (int8_t)seed[i + C_WIDTH];
    for (uint64_t s = 0; s < steps; s++)
        for (int i = 0; i < C_WIDTH; i++) sum[i] += w[i] * x[i], x[i] = (int8_t)(x[i] ^ (int8_t)s);
    uint64_t all = 0;
    for (int i = 0; i < C_WIDTH; i++) all += (uint64_t)sum[i];
    return all;
}

static uint64_t f32_c(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    const volatile uint8_t *seed = data;
    float sum[C_WIDTH], w = (float)seed[0] * 1e-3f, x = (float)seed[1] * 1e-3f;
    (void)bytes;
    for (int i = 0; i < C_WIDTH; i++) sum[i] = (float)seed[i];
    for (uint64_t s = 0; s < steps; s++)
        for (int i = 0; i < C_WIDTH; i++) sum[i] = sum[i] * w + x;
    float all = 0;
    for (int i = 0; i < C_WIDTH; i++) all += sum[i];
    return all > 1;
}

#if defined(__x86_64__)
#include <immintrin.h>
/* ---- AVX2 ------------------------------------------------------------------------------------------------------ */
#define AVX2 __attribute__((target("avx2,fma")))
#define FOUR(X) X(0) X(1) X(2) X(3)
#define TWELVE(X) FOUR(X) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

AVX2 static uint64_t read_avx2(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    __m256i a[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    (void)steps;
    for (uint64_t i = 0; i < bytes; i += READ_STEP)
        for (uint64_t j = 0; j < READ_STEP; j += 32)
            a[j / 32 % 4] = _mm256_add_epi64(a[j / 32 % 4], _mm256_load_si256((const void *)(data + i + j)));
    __m256i s = _mm256_add_epi64(_mm256_add_epi64(a[0], a[1]), _mm256_add_epi64(a[2], a[3]));
    return (uint64_t)_mm256_extract_epi64(s, 0) ^ (uint64_t)_mm256_extract_epi64(s, 2);
}

/* Sums as 4-bit weights allow, exactly: eight byte products fit 16 bits, then one vpmaddwd widens them. */
AVX2 static uint64_t int8_avx2(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    __m256i w = _mm256_set1_epi8((char)(data[0] & 15)), x = _mm256_set1_epi8((char)(data[1] | 1));
    const __m256i one = _mm256_set1_epi16(1);
    (void)bytes;
#define DECLARE(i) __m256i a##i = _mm256_set1_epi32(i), p##i;
    FOUR(DECLARE)
    for (uint64_t s = 0; s < steps; s++) {
#define CLEAR(i) p##i = _mm256_setzero_si256();
        FOUR(CLEAR)
        for (int j = 0; j < 8; j++) {
#define PRODUCT(i)                                              \
    p##i = _mm256_add_epi16(p##i, _mm256_maddubs_epi16(w, x)); \
    __asm__ volatile("" : "+x"(w), "+x"(p##i)); /* w is new for all the compiler knows: each product is computed */
            FOUR(PRODUCT)
        }
#define WIDEN(i) a##i = _mm256_add_epi32(a##i, _mm256_madd_epi16(p##i, one));
        FOUR(WIDEN)
    }
    __m256i sum = _mm256_setzero_si256();
#define GATHER(i) sum = _mm256_add_epi32(sum, a##i);
    FOUR(GATHER)
    return (uint64_t)_mm256_extract_epi64(sum, 0);
}

AVX2 static uint64_t f32_avx2(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    __m256 w = _mm256_set1_ps((float)data[0] * 1e-3f), x = _mm256_set1_ps((float)data[1] * 1e-3f);
    (void)bytes;
#define DECLARE_F(i) __m256 a##i = _mm256_set1_ps(i);
    TWELVE(DECLARE_F)
    for (uint64_t s = 0; s < steps; s++) {
#define FMA(i) a##i = _mm256_fmadd_ps(a##i, w, x);
        TWELVE(FMA)
    }
    __m256 sum = _mm256_setzero_ps();
#define GATHER_F(i) sum = _mm256_add_ps(sum, a##i);
    TWELVE(GATHER_F)
    return (uint64_t)_mm256_extract_epi64(_mm256_castps_si256(sum), 0);
}

/* ---- AVX-512 with VNNI ----------------------------------------------------------------------------------------- */
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

AVX512 static uint64_t read_avx512(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    __m512i a[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    (void)steps;
    for (uint64_t i = 0; i < bytes; i += READ_STEP)
        for (uint64_t j = 0; j < READ_STEP; j += 64)
            a[j / 64 % 4] = _mm512_add_epi64(a[j / 64 % 4], _mm512_load_si512(data + i + j));
    __m512i s = _mm512_add_epi64(_mm512_add_epi64(a[0], a[1]), _mm512_add_epi64(a[2], a[3]));
    return (uint64_t)_mm512_reduce_add_epi64(s);
}

AVX512 static uint64_t int8_avx512(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    __m512i w = _mm512_set1_epi8((char)data[0]), x = _mm512_set1_epi8((char)(data[1] | 1));
    (void)bytes;
#define DECLARE_W(i) __m512i a##i = _mm512_set1_epi32(i);
    TWELVE(DECLARE_W)
    for (uint64_t s = 0; s < steps; s++) {
        __asm__ volatile("" : "+v"(w), "+v"(x));
#define DOT(i) a##i = _mm512_dpbusd_epi32(a##i, w, x);
        TWELVE(DOT)
    }
    __m512i sum = _mm512_setzero_si512();
#define GATHER_W(i) sum = _mm512_add_epi32(sum, a##i);
    TWELVE(GATHER_W)
    return (uint64_t)_mm512_reduce_add_epi64(sum);
}

AVX512 static uint64_t f32_avx512(const uint8_t *data, uint64_t bytes, uint64_t steps) {
    __m512 w = _mm512_set1_ps((float)data[0] * 1e-3f), x = _mm512_set1_ps((float)data[1] * 1e-3f);
    (void)bytes;
#define DECLARE_G(i) __m512 a##i = _mm512_set1_ps(i);
    TWELVE(DECLARE_G)
    for (uint64_t s = 0; s < steps; s++) {
#define FMA_W(i) a##i = _mm512_fmadd_ps(a##i, w, x);
        TWELVE(FMA_W)
    }
    __m512 sum = _mm512_setzero_ps();
#define GATHER_G(i) sum = _mm512_add_ps(sum, a##i);
    TWELVE(GATHER_G)
    return (uint64_t)(int64_t)_mm512_reduce_add_ps(sum);
}

static int cpu_has(uint32_t isa) {
    if (isa == COLIBRI_ISA_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return isa < COLIBRI_ISA_AVX2 ||
           (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni"));
}
#else
#define read_avx2 read_c
#define int8_avx2 int8_c
#define f32_avx2 f32_c
#define read_avx512 read_c
#define int8_avx512 int8_c
#define f32_avx512 f32_c
static int cpu_has(uint32_t isa) { return isa < COLIBRI_ISA_AVX2; }
#endif

#define PLAIN_C {{read_c, 0, 0}, {int8_c, 2 * C_WIDTH, 1 << 19}, {f32_c, 2 * C_WIDTH, 1 << 20}}
/* [isa][kind] */
static const probe_t probes[][3] = {
    [COLIBRI_ISA_AUTO] = PLAIN_C,
    [COLIBRI_ISA_REF] = PLAIN_C,
    [COLIBRI_ISA_AVX2] = {{read_avx2, 0, 0}, {int8_avx2, 2 * 4 * 8 * 32, 1 << 20}, {f32_avx2, 2 * 12 * 8, 1 << 21}},
    [COLIBRI_ISA_AVX512] = {{read_avx512, 0, 0}, {int8_avx512, 2 * 12 * 64, 1 << 21},
                            {f32_avx512, 2 * 12 * 16, 1 << 21}},
};

/* ---- running --------------------------------------------------------------------------------------------------- */

typedef struct job {
    const probe_t *probe;
    const uint8_t *data;
    uint64_t slice; /* bytes per thread */
    uint64_t result[COLIBRI_POOL_MAX_THREADS];
} job_t;

static void share(void *arg, uint32_t i) {
    job_t *j = arg;
    const uint8_t *data = j->data + (j->probe->ops ? 0 : i * j->slice);
    j->result[i] = j->probe->run(data, j->slice, j->probe->steps);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double best_rate(job_t *j, colibri_pool_t *pool, uint32_t threads, uint32_t runs) {
    double share_work = j->probe->ops ? (double)j->probe->ops * j->probe->steps : (double)j->slice, best = 0;
    for (uint32_t run = 0; run < runs; run++) {
        double start = now();
        colibri_pool_run(pool, share, j, threads);
        double rate = threads * share_work / (now() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

int colibri_probe(uint32_t kind, uint32_t isa, uint32_t threads, uint32_t runs, double *per_second) {
    if (kind > COLIBRI_PROBE_F32 || isa > COLIBRI_ISA_AVX512 || !threads || !runs) return EINVAL;
    if (!cpu_has(isa)) return ENOTSUP;
    colibri_pool_t *pool;
    int failed = colibri_pool_create(threads, 0, &pool);
    if (failed) return failed;
    size_t bytes = kind == COLIBRI_PROBE_READ ? READ_BYTES : 4096;
    uint8_t *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        colibri_pool_destroy(pool);
        return ENOMEM;
    }
    madvise(data, bytes, MADV_HUGEPAGE);
    for (size_t i = 0; i < bytes; i += 4096) data[i] = (uint8_t)(i >> 12) | 1; /* pages of its own, not the zero page */
    job_t job = {.probe = &probes[isa][kind], .data = data, .slice = bytes / threads / READ_STEP * READ_STEP};
    *per_second = best_rate(&job, pool, threads, runs);
    munmap(data, bytes);
    colibri_pool_destroy(pool);
    return 0;
}
