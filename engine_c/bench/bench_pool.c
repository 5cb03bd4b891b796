/* What a fork and join of host/pool.c costs: bench_pool [threads]
 * Empty tasks, one per thread. "warm" forks follow one another, so that lanes still spin; "cold" ones come after a pause
 * of 1 ms, when lanes sleep in the kernel. "loaded" is warm with another program on one core: the share of a lane that
 * is not running is done by the others. Microseconds: median and 99th percentile. */
#include "host/machine.h"
#include "host/pool.h"
#include <signal.h>
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

static void nothing(void *arg, uint32_t i) { ((volatile uint32_t *)arg)[i * 16]++; }

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench(const char *name, colibri_pool_t *pool, uint32_t threads, int forks, long pause_ns) {
    static double took[FORKS];
    uint32_t *cells = calloc(threads * 16, sizeof *cells);
    if (!cells) abort();
    for (int i = 0; i < forks; i++) {
        if (pause_ns) nanosleep(&(struct timespec){0, pause_ns}, NULL);
        double start = now_us();
        colibri_pool_run(pool, nothing, cells, threads);
        took[i] = now_us() - start;
    }
    qsort(took, (size_t)forks, sizeof *took, ascending);
    printf("fork-join, %u threads, %-6s  median %7.2f us  p99 %8.2f us\n", threads, name, took[forks / 2],
           took[forks * 99 / 100]);
    free(cells);
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
    bench("warm", pool, threads, FORKS, 0);
    bench("cold", pool, threads, COLD_FORKS, 1000000);
    pid_t child = load_one_core();
    if (child > 0) {
        bench("loaded", pool, threads, FORKS, 0);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    colibri_pool_destroy(pool);
    return 0;
}
