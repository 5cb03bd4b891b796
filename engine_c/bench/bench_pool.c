/* What a fork and join of host/pool.c costs: bench_pool [threads]
 * One task per thread. In "warm" and "cold" each waits until all have begun, so every lane takes part: warm forks
 * follow one another and find the lanes spinning, cold ones come after a pause of 1 ms and find them asleep in the
 * kernel. In "loaded" another program keeps one core busy and tasks are empty: a lane that does not run has its share
 * done by the others. Microseconds: median and 99th percentile. */
#include "host/machine.h"
#include "host/pool.h"
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FORKS = 4001, COLD_FORKS = 401 };

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

typedef struct job {
    _Atomic uint32_t begun;
    uint32_t wanted;
} job_t;

static void task(void *arg, uint32_t i) {
    job_t *j = arg;
    (void)i;
    atomic_fetch_add(&j->begun, 1);
    while (atomic_load(&j->begun) < j->wanted) {}
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench(const char *name, colibri_pool_t *pool, uint32_t threads, int forks, long pause_ns, int meet) {
    static double took[FORKS];
    for (int i = 0; i < forks; i++) {
        if (pause_ns) nanosleep(&(struct timespec){0, pause_ns}, NULL);
        job_t job = {0, meet ? threads : 0};
        double start = now_us();
        colibri_pool_run(pool, task, &job, threads);
        took[i] = now_us() - start;
    }
    qsort(took, (size_t)forks, sizeof *took, ascending);
    printf("fork-join, %u threads, %-6s  median %7.2f us  p99 %8.2f us\n", threads, name, took[forks / 2],
           took[forks * 99 / 100]);
}

static pid_t load_one_core(void) {
    pid_t child = fork();
    if (!child)
        for (;;) {}
    return child;
}

int main(int argc, char **argv) {
    uint32_t threads = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : colibri_host_threads();
    colibri_pool_t *pool;
    int failed = colibri_pool_create(threads, 0, &pool);
    if (failed) return fprintf(stderr, "bench_pool: %u threads: %s\n", threads, strerror(failed)), 2;
    bench("warm", pool, threads, FORKS, 0, 1);
    bench("cold", pool, threads, COLD_FORKS, 1000000, 1);
    pid_t child = load_one_core();
    if (child > 0) {
        bench("loaded", pool, threads, FORKS, 0, 0);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    colibri_pool_destroy(pool);
    return 0;
}
