/* See machine.h. Reads /proc and /sys; what is missing there does not limit. */
#include "machine.h"
#include "fail.h"
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __linux__
/* The lowest CPU of `set` on the same core as cpu; cpu itself if the topology is unknown. */
static int first_sibling(int cpu, const cpu_set_t *set) {
    char path[96], list[256];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *f = fopen(path, "r");
    if (!f) return cpu;
    char *s = fgets(list, sizeof list, f);
    fclose(f);
    while (s && *s && *s != '\n') { /* "0,64" or "0-1" */
        char *end;
        long lo = strtol(s, &end, 10), hi = lo;
        if (end == s) break;
        if (*end == '-') hi = strtol(end + 1, &end, 10);
        for (long c = lo; c <= hi && c < CPU_SETSIZE; c++)
            if (CPU_ISSET((int)c, set)) return (int)c;
        s = *end == ',' ? end + 1 : end;
    }
    return cpu;
}

uint32_t colibri_host_cores(uint32_t *cpus, uint32_t capacity) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 0;
    uint32_t n = 0;
    for (int c = 0; c < CPU_SETSIZE; c++) {
        if (!CPU_ISSET(c, &set) || first_sibling(c, &set) != c) continue;
        if (n < capacity) cpus[n] = (uint32_t)c;
        n++;
    }
    return n;
}

/* Whole CPUs that one cgroup folder allows, 0 = no limit. v2: cpu.max "quota period"; v1: two files. */
static uint32_t quota_of(const char *folder) {
    char path[4200];
    long long quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    FILE *f = fopen(path, "r");
    if (f) {
        int got = fscanf(f, "%lld %lld", &quota, &period);
        fclose(f);
        if (got != 2) return 0; /* "max 100000" */
    } else {
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
        if (!(f = fopen(path, "r"))) return 0;
        int got = fscanf(f, "%lld", &quota);
        fclose(f);
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
        if (got != 1 || !(f = fopen(path, "r"))) return 0;
        got = fscanf(f, "%lld", &period);
        fclose(f);
        if (got != 1) return 0;
    }
    if (quota <= 0 || period <= 0) return 0;
    return quota < period ? 1 : (uint32_t)(quota / period);
}

/* The tightest limit from `folder` up to the mount point `root`. */
static uint32_t quota_up(char *folder, size_t root) {
    uint32_t best = 0;
    for (;;) {
        uint32_t q = quota_of(folder);
        if (q && (!best || q < best)) best = q;
        char *slash = strrchr(folder, '/');
        if (!slash || (size_t)(slash - folder) < root) return best;
        *slash = 0;
    }
}

static uint32_t cgroup_quota(void) {
    FILE *f = fopen("/proc/self/cgroup", "r");
    uint32_t best = 0;
    char line[4096], folder[4136];
    while (f && fgets(line, sizeof line, f)) { /* "0::/a/b" (v2) or "4:cpu,cpuacct:/a/b" (v1) */
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        int v2 = !names[1];
        if (!v2 && !strstr(names, "cpu")) continue;
        const char *mount = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
        snprintf(folder, sizeof folder, "%s%s", mount, path);
        uint32_t q = quota_up(folder, strlen(mount));
        if (q && (!best || q < best)) best = q;
    }
    if (f) fclose(f);
    return best;
}

uint32_t colibri_host_threads(void) {
    uint32_t cores = colibri_host_cores(NULL, 0), quota = cgroup_quota();
    if (!cores) cores = 1;
    return quota && quota < cores ? quota : cores;
}
#else
uint32_t colibri_host_cores(uint32_t *cpus, uint32_t capacity) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    for (long c = 0; c < n && c < (long)capacity; c++) cpus[c] = (uint32_t)c;
    return n > 0 ? (uint32_t)n : 1;
}
uint32_t colibri_host_threads(void) { return colibri_host_cores(NULL, 0); }
#endif

colibri_status_t colibri_host_isa(uint32_t *isa, colibri_error_t *err) {
    static const struct { const char *name; uint32_t isa; } known[] = {
        {"", COLIBRI_ISA_AUTO}, {"ref", COLIBRI_ISA_REF}, {"avx2", COLIBRI_ISA_AVX2}, {"avx512", COLIBRI_ISA_AVX512}};
    const char *wanted = getenv("COLIBRI_ISA");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(wanted ? wanted : "", known[i].name)) return *isa = known[i].isa, COLIBRI_OK;
    return host_fail(err, COLIBRI_INVALID_ARGUMENT, "COLIBRI_ISA is \"%.60s\"; it may be ref, avx2 or avx512", wanted);
}
