/* See pool.h. One job at a time lives in the pool record. A lane claims an index by lowering `remaining` with
 * compare-and-swap; whoever succeeds holds one unfinished index, so the job's fields cannot change under it. */
#include "pool.h"
#include "machine.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#ifdef __linux__
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 }; /* <linux/futex.h>, which musl-gcc does not have */
#endif
enum { LINE = 64, SPIN_NS = 20000, PAUSES_PER_CLOCK = 16 };

typedef struct worker {
    _Alignas(LINE) colibri_pool_t *pool;
    pthread_t thread;
    uint32_t lane;
} worker_t;
_Static_assert(sizeof(worker_t) == LINE, "one cache line per worker");

/* Fields are grouped by who writes them; each group has its own cache line. */
struct colibri_pool {
    /* 0: the job, written by the caller before `remaining`; the generation is the word idle lanes watch */
    _Alignas(LINE) colibri_task_fn task;
    void *arg;
    uint32_t n;
    _Atomic uint32_t generation;
    _Atomic uint32_t stop;
    /* 1: indices not yet claimed, written by every lane */
    _Alignas(LINE) _Atomic uint32_t remaining;
    /* 2: indices finished, and whether the caller sleeps on that word */
    _Alignas(LINE) _Atomic uint32_t done;
    _Atomic uint32_t caller_sleeps;
    /* 3: lanes asleep on generation, and whether a job is running */
    _Alignas(LINE) _Atomic uint32_t sleepers;
    _Atomic uint32_t busy;
    /* 4: constant after create */
    _Alignas(LINE) worker_t *workers; /* [n_workers] */
    uint32_t n_workers;
    pid_t owner;
#ifndef __linux__
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
};
_Static_assert(offsetof(struct colibri_pool, remaining) == LINE, "line 1");
_Static_assert(offsetof(struct colibri_pool, done) == 2 * LINE, "line 2");
_Static_assert(offsetof(struct colibri_pool, sleepers) == 3 * LINE, "line 3");
_Static_assert(offsetof(struct colibri_pool, workers) == 4 * LINE, "line 4");

/* ---- sleeping and waking ------------------------------------------------------------------------------------- */

#ifdef __linux__
/* Sleeps while *word == seen; may return early. */
static void word_sleep(colibri_pool_t *p, _Atomic uint32_t *word, uint32_t seen) {
    (void)p;
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void word_wake(colibri_pool_t *p, _Atomic uint32_t *word, uint32_t lanes) {
    (void)p;
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, lanes, NULL, NULL, 0);
}
static int word_init(colibri_pool_t *p) { return (void)p, 0; }
static void word_free(colibri_pool_t *p) { (void)p; }
#else
static void word_sleep(colibri_pool_t *p, _Atomic uint32_t *word, uint32_t seen) {
    pthread_mutex_lock(&p->mutex);
    while (atomic_load(word) == seen) pthread_cond_wait(&p->changed, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}
static void word_wake(colibri_pool_t *p, _Atomic uint32_t *word, uint32_t lanes) {
    (void)word, (void)lanes;
    pthread_mutex_lock(&p->mutex);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
}
static int word_init(colibri_pool_t *p) {
    int e = pthread_mutex_init(&p->mutex, NULL);
    if (e) return e;
    e = pthread_cond_init(&p->changed, NULL);
    if (e) pthread_mutex_destroy(&p->mutex);
    return e;
}
static void word_free(colibri_pool_t *p) {
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->mutex);
}
#endif

static inline void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Watches *word for SPIN_NS. Returns 1 when (*word == value) == wanted. */
static int word_spin(_Atomic uint32_t *word, uint32_t value, int wanted) {
    uint64_t end = 0;
    for (;;) {
        for (int i = 0; i < PAUSES_PER_CLOCK; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) == value) == wanted) return 1;
            cpu_pause();
        }
        uint64_t now = now_ns();
        if (!end) end = now + SPIN_NS;
        else if (now >= end) return 0;
    }
}

/* ---- claiming and finishing ---------------------------------------------------------------------------------- */

/* Takes one unclaimed index: returns how many were left including it, or 0. */
static uint32_t claim(colibri_pool_t *p) {
    uint32_t left = atomic_load_explicit(&p->remaining, memory_order_acquire);
    while (left && !atomic_compare_exchange_weak_explicit(&p->remaining, &left, left - 1, memory_order_acq_rel,
                                                          memory_order_acquire)) {}
    return left;
}

/* Works on the current job until no index is left. The job ends only after the last `done` is added, so its fields
 * hold still between the first claim and that. */
static void work(colibri_pool_t *p) {
    uint32_t finished = 0, n = 0;
    for (uint32_t left; (left = claim(p)) != 0; finished++) {
        n = p->n;
        p->task(p->arg, n - left);
    }
    if (!finished) return;
    uint32_t done = atomic_fetch_add(&p->done, finished) + finished;
    if (done == n && atomic_load(&p->caller_sleeps)) word_wake(p, &p->done, 1);
}

static void wait_done(colibri_pool_t *p, uint32_t n) {
    if (word_spin(&p->done, n, 1)) return;
    atomic_store(&p->caller_sleeps, 1);
    for (uint32_t done; (done = atomic_load(&p->done)) != n;) word_sleep(p, &p->done, done);
    atomic_store(&p->caller_sleeps, 0);
}

static void run_alone(colibri_task_fn task, void *arg, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) task(arg, i);
}

void colibri_pool_run(void *ctx, colibri_task_fn task, void *arg, uint32_t n) {
    colibri_pool_t *p = ctx;
    if (n <= 1 || !p->n_workers || atomic_exchange_explicit(&p->busy, 1, memory_order_acquire)) {
        run_alone(task, arg, n);
        return;
    }
    p->task = task, p->arg = arg, p->n = n;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    atomic_store_explicit(&p->remaining, n, memory_order_release);
    atomic_fetch_add(&p->generation, 1); /* seq_cst against sleepers: a lane either sees this or is counted there */
    uint32_t asleep = atomic_load(&p->sleepers);
    if (asleep) word_wake(p, &p->generation, asleep < n - 1 ? asleep : n - 1);
    work(p);
    wait_done(p, n);
    atomic_store_explicit(&p->busy, 0, memory_order_release);
}

/* ---- lanes --------------------------------------------------------------------------------------------------- */

/* Returns the generation that follows `seen`. */
static uint32_t wait_generation(colibri_pool_t *p, uint32_t seen) {
    if (!word_spin(&p->generation, seen, 0)) {
        atomic_fetch_add(&p->sleepers, 1);
        while (atomic_load(&p->generation) == seen) word_sleep(p, &p->generation, seen);
        atomic_fetch_sub(&p->sleepers, 1);
    }
    return atomic_load(&p->generation);
}

static void *lane_main(void *arg) {
    colibri_pool_t *p = ((worker_t *)arg)->pool;
    for (uint32_t seen = 0; !atomic_load(&p->stop);) {
        seen = wait_generation(p, seen);
        work(p);
    }
    return NULL;
}

static void pin(worker_t *w) {
#ifdef __linux__
    uint32_t cpus[COLIBRI_POOL_MAX_THREADS];
    uint32_t n = colibri_host_cores(cpus, COLIBRI_POOL_MAX_THREADS);
    if (n < 2) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[w->lane % (n < COLIBRI_POOL_MAX_THREADS ? n : COLIBRI_POOL_MAX_THREADS)], &set);
    pthread_setaffinity_np(w->thread, sizeof set, &set); /* best effort */
#else
    (void)w;
#endif
}

static int start_workers(colibri_pool_t *p, uint32_t count, uint32_t flags) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP}; /* strike whoever is at fault */
    sigset_t others, old;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &old);
    int e = 0;
    while (!e && p->n_workers < count) {
        worker_t *w = &p->workers[p->n_workers];
        w->pool = p, w->lane = p->n_workers + 1;
        e = pthread_create(&w->thread, NULL, lane_main, w);
        if (e) break;
        if (flags & COLIBRI_POOL_PIN) pin(w);
        p->n_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return e;
}

static void *line_alloc(size_t size) {
    void *m = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    return m ? memset(m, 0, size) : NULL;
}

int colibri_pool_create(uint32_t threads, uint32_t flags, colibri_pool_t **pool) {
    *pool = NULL;
    if (threads < 1 || threads > COLIBRI_POOL_MAX_THREADS || (flags & ~COLIBRI_POOL_PIN)) return EINVAL;
    colibri_pool_t *p = line_alloc(sizeof *p);
    if (!p) return ENOMEM;
    p->owner = getpid();
    p->workers = line_alloc(threads * sizeof(worker_t));
    int e = p->workers ? word_init(p) : ENOMEM;
    if (e) {
        free(p->workers);
        free(p);
        return e;
    }
    e = start_workers(p, threads - 1, flags);
    if (e) {
        colibri_pool_destroy(p);
        return e;
    }
    *pool = p;
    return 0;
}

void colibri_pool_destroy(colibri_pool_t *p) {
    if (!p) return;
    atomic_store(&p->stop, 1);
    atomic_fetch_add(&p->generation, 1);
    word_wake(p, &p->generation, p->n_workers);
    for (uint32_t i = 0; p->owner == getpid() && i < p->n_workers; i++) pthread_join(p->workers[i].thread, NULL);
    word_free(p);
    free(p->workers);
    free(p);
}
