/* The pool: every index exactly once, writes visible, any thread count, concurrent and nested callers, clean ends. */
#include "host/machine.h"
#include "host/pool.h"
#include "test.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

enum { MAX_N = 4096 };
typedef struct counts {
    unsigned char seen[MAX_N]; /* plain bytes: run's return must make them visible, and no index may run twice */
    uint32_t n;
    colibri_pool_t *pool;
} counts_t;

static void count_task(void *arg, uint32_t i) { ((counts_t *)arg)->seen[i]++; }

static int all_once(const counts_t *c) {
    for (uint32_t i = 0; i < MAX_N; i++)
        if (c->seen[i] != (i < c->n)) return 0;
    return 1;
}

static colibri_pool_t *make_pool(uint32_t threads, uint32_t flags) {
    colibri_pool_t *pool;
    int e = colibri_pool_create(threads, flags, &pool);
    CHECK_MSG(e == 0 && pool, "create(%u): %d", threads, e);
    return pool;
}

static void random_sizes(void) {
    unsigned long long seed = 1;
    counts_t c;
    for (int round = 0; round < 20; round++) {
        colibri_pool_t *pool = make_pool(1 + test_random(&seed) % 9, round & 1 ? COLIBRI_POOL_PIN : 0);
        for (int run = 0; run < 30; run++) {
            memset(&c, 0, sizeof c);
            c.n = run < 4 ? (uint32_t)run : test_random(&seed) % (MAX_N + 1);
            colibri_pool_run(pool, count_task, &c, c.n);
            CHECK_MSG(all_once(&c), "round %d run %d n %u", round, run, c.n);
        }
        colibri_pool_destroy(pool);
    }
}

/* Each run reads what the run before wrote, at another index: lost visibility breaks the sum. */
typedef struct shift { uint32_t from[64], to[64]; } shift_t;
static void shift_task(void *arg, uint32_t i) {
    shift_t *s = arg;
    s->to[i] = s->from[(i + 1) % 64] + 1;
}
static void swap_task(void *arg, uint32_t i) {
    shift_t *s = arg;
    s->from[i] = s->to[i];
}
static void visibility(colibri_pool_t *pool) {
    static shift_t s;
    for (uint32_t i = 0; i < 64; i++) s.from[i] = i;
    for (int run = 0; run < 640; run++) {
        colibri_pool_run(pool, shift_task, &s, 64);
        colibri_pool_run(pool, swap_task, &s, 64);
    }
    int right = 1;
    for (uint32_t i = 0; i < 64; i++) right &= s.from[i] == i + 640;
    CHECK(right);
}

/* Many tiny runs, some after the lanes have gone to sleep. */
static void add_task(void *arg, uint32_t i) {
    atomic_fetch_add_explicit((_Atomic uint64_t *)arg, i + 1, memory_order_relaxed);
}
static void stress(colibri_pool_t *pool, int runs) {
    _Atomic uint64_t sum = 0;
    uint64_t expected = 0;
    for (int run = 0; run < runs; run++) {
        uint32_t n = 2 + (uint32_t)run % 5;
        colibri_pool_run(pool, add_task, &sum, n);
        expected += n * (n + 1) / 2;
        if (run % 1000 == 0) nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    CHECK(sum == expected);
}

/* A task that calls run itself gets it done, alone. */
static void inner_task(void *arg, uint32_t i) { (void)i, atomic_fetch_add((_Atomic uint32_t *)arg, 1); }
typedef struct nested { colibri_pool_t *pool; _Atomic uint32_t inner; } nested_t;
static void nested_task(void *arg, uint32_t i) {
    nested_t *s = arg;
    colibri_pool_run(s->pool, inner_task, &s->inner, i);
}
static void nested(colibri_pool_t *pool) {
    nested_t s = {.pool = pool};
    colibri_pool_run(pool, nested_task, &s, 10);
    CHECK(s.inner == 45);
}

/* Several threads share one pool. */
static void *caller_main(void *arg) {
    counts_t *c = arg;
    for (int run = 0; run < 200; run++) {
        memset(c->seen, 0, sizeof c->seen);
        colibri_pool_run(c->pool, count_task, c, c->n);
        if (!all_once(c)) return c;
    }
    return NULL;
}
static void concurrent_callers(colibri_pool_t *pool) {
    static counts_t c[4];
    pthread_t threads[4];
    for (uint32_t i = 0; i < 4; i++) {
        c[i].n = 100 * i + 3, c[i].pool = pool;
        CHECK(!pthread_create(&threads[i], NULL, caller_main, &c[i]));
    }
    for (int i = 0; i < 4; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        CHECK_MSG(!bad, "caller %d", i);
    }
}

static void bad_arguments(void) {
    colibri_pool_t *pool = (colibri_pool_t *)1;
    CHECK(colibri_pool_create(0, 0, &pool) == EINVAL && !pool);
    CHECK(colibri_pool_create(COLIBRI_POOL_MAX_THREADS + 1, 0, &pool) == EINVAL && !pool);
    CHECK(colibri_pool_create(2, 1u << 31, &pool) == EINVAL && !pool);
    colibri_pool_destroy(NULL);
}

/* Address space for some thread stacks but not for all: create must fail, leave nothing, and work afterwards. */
static void fails_half_way(void) {
    if (SANITIZED) return; /* sanitizers reserve the address space themselves */
    struct rlimit old, tight;
    getrlimit(RLIMIT_AS, &old);
    tight = old;
    tight.rlim_cur = 256u << 20;
    CHECK(!setrlimit(RLIMIT_AS, &tight));
    colibri_pool_t *pool;
    int e = colibri_pool_create(COLIBRI_POOL_MAX_THREADS, 0, &pool);
    CHECK_MSG((e == EAGAIN || e == ENOMEM) && !pool, "%d", e);
    CHECK(!setrlimit(RLIMIT_AS, &old));
    pool = make_pool(3, 0);
    nested(pool);
    colibri_pool_destroy(pool);
}

/* The forked child has none of the workers; its own runs still finish and so does destroy. */
static void forked_child(colibri_pool_t *pool) {
    pid_t child = fork();
    if (!child) {
        counts_t c = {.n = 77};
        colibri_pool_run(pool, count_task, &c, c.n);
        colibri_pool_destroy(pool);
        _exit(all_once(&c) ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
}

static void idle_ends(void) {
    for (int i = 0; i < 50; i++) { /* at once, and after falling asleep */
        colibri_pool_t *pool = make_pool(4, 0);
        if (i & 1) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        colibri_pool_destroy(pool);
    }
}

/* Lanes that wait burn no CPU: 0.2 s of idling costs far less than one lane spinning would. */
static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
static void idle_is_free(colibri_pool_t *pool) {
    _Atomic uint64_t sum = 0;
    colibri_pool_run(pool, add_task, &sum, 8);
    double before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    double used = cpu_seconds() - before;
    CHECK_MSG(used < 0.05, "%.3f s of CPU while idle", used);
}

/* A lane that gets no further, as if preempted in the middle of task `held`: that task ends only after all others, so
 * the other lanes must have done them, whatever would have been this lane's share. The limit only ends a broken pool's
 * wait. */
typedef struct preempted {
    uint32_t n, held;
    _Atomic uint32_t done;
    uint32_t done_before_held;
} preempted_t;
static void preempted_task(void *arg, uint32_t i) {
    preempted_t *p = arg;
    if (i == p->held) {
        for (int spin = 0; atomic_load(&p->done) < p->n - 1 && spin < 10000000; spin++) sched_yield();
        p->done_before_held = p->done;
        return;
    }
    atomic_fetch_add(&p->done, 1);
}
static void preempted_lane(colibri_pool_t *pool) {
    for (uint32_t held = 0; held < 64; held += 9) {
        preempted_t p = {.n = 64, .held = held};
        colibri_pool_run(pool, preempted_task, &p, p.n);
        CHECK_MSG(p.done_before_held == 63, "held %u: the others did %u", held, p.done_before_held);
    }
}

static void print_fork_join(colibri_pool_t *pool) {
    enum { RUNS = 2000 };
    double best = 1, total = 0;
    _Atomic uint64_t sum = 0;
    for (int run = 0; run < RUNS; run++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        colibri_pool_run(pool, add_task, &sum, 2);
        clock_gettime(CLOCK_MONOTONIC, &b);
        double t = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
        total += t;
        best = t < best ? t : best;
    }
    printf("fork-join: best %.2f us, mean %.2f us; ", best * 1e6, total / RUNS * 1e6);
}

/* Both lanes must take part: each task waits until the other has begun, which one lane alone could not do. The time
 * limit only ends a broken pool's wait. */
static void meet_task(void *arg, uint32_t i) {
    _Atomic uint32_t *arrived = arg;
    (void)i;
    atomic_fetch_add(arrived, 1);
    for (int spin = 0; atomic_load(arrived) < 2 && spin < 100000; spin++) sched_yield();
}
static void print_rendezvous(colibri_pool_t *pool) {
    enum { RUNS = 500 };
    double best = 1;
    for (int run = 0; run < RUNS; run++) {
        _Atomic uint32_t arrived = 0;
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        colibri_pool_run(pool, meet_task, &arrived, 2);
        clock_gettime(CLOCK_MONOTONIC, &b);
        CHECK(arrived == 2);
        double t = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
        best = t < best ? t : best;
    }
    printf("with both lanes in it: best %.2f us\n", best * 1e6);
}

static void host_threads(void) {
    uint32_t cores = colibri_host_cores(NULL, 0), threads = colibri_host_threads(), cpus[COLIBRI_POOL_MAX_THREADS];
    CHECK(threads >= 1 && threads <= (cores ? cores : 1));
    CHECK(colibri_host_cores(cpus, COLIBRI_POOL_MAX_THREADS) == cores);
    cpu_set_t all, one;
    CHECK(!sched_getaffinity(0, sizeof all, &all));
    for (uint32_t i = 0; i < cores; i++) CHECK(CPU_ISSET(cpus[i], &all) && (!i || cpus[i] > cpus[i - 1]));
    CPU_ZERO(&one);
    CPU_SET(cpus[0], &one);
    CHECK(!sched_setaffinity(0, sizeof one, &one));
    CHECK(colibri_host_threads() == 1);
    CHECK(!sched_setaffinity(0, sizeof all, &all));
}

int main(void) {
    bad_arguments();
    host_threads();
    random_sizes();
    fails_half_way();
    idle_ends();
    for (uint32_t threads = 1; threads <= 4; threads++) {
        colibri_pool_t *pool = make_pool(threads, 0);
        visibility(pool);
        nested(pool);
        concurrent_callers(pool);
        if (threads > 1) preempted_lane(pool);
        stress(pool, SANITIZED ? 5000 : 25000);
        idle_is_free(pool);
        if (!SANITIZED) forked_child(pool);
        colibri_pool_destroy(pool);
    }
    colibri_pool_t *pool = make_pool(2, 0);
    print_fork_join(pool);
    print_rendezvous(pool);
    colibri_pool_destroy(pool);
    return report();
}
