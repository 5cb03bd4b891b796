/* A step and a draw allocate nothing and make no system call. Two proofs: every allocation of this process is counted,
 * and a child runs them under strict seccomp, where any system call but read, write, exit and sigreturn kills. */
#include "../../../engine_c/host/pool.h"
#include "micro.h"
#include <errno.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned long allocations;
static void count(void) { __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED); }
static unsigned long counted(void) { return __atomic_load_n(&allocations, __ATOMIC_RELAXED); }

#if defined(__has_feature)
#define CLANG_SANITIZES (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define CLANG_SANITIZES 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || CLANG_SANITIZES
/* of sanitizer/allocator_interface.h, which some gcc packages lack */
int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void *, size_t), void (*)(const volatile void *));
static void on_malloc(const volatile void *p, size_t n) { (void)p, (void)n, count(); }
static void on_free(const volatile void *p) { (void)p; }
static void start_counting(void) { CHECK(__sanitizer_install_malloc_and_free_hooks(on_malloc, on_free) != 0); }
#else
/* These definitions stand before the C library's, whose own are reached by their other names. */
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t alignment, size_t n);
void *malloc(size_t n) { count(); return __libc_malloc(n); }
void *calloc(size_t n, size_t size) { count(); return __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { count(); return __libc_realloc(p, n); }
void *memalign(size_t alignment, size_t n) { count(); return __libc_memalign(alignment, n); }
void *aligned_alloc(size_t alignment, size_t n) { count(); return __libc_memalign(alignment, n); }
int posix_memalign(void **p, size_t alignment, size_t n) {
    count();
    *p = __libc_memalign(alignment, n);
    return *p ? 0 : ENOMEM;
}
static void start_counting(void) {}
#endif

static colibri_status_t draw(micro_t *m) {
    colibri_sampling_t how = {.struct_size = sizeof how, .temperature = 0.9f, .top_k = 12, .top_p = 0.9f, .seed = 3,
                              .n_logprobs = 5};
    colibri_sample_t drawn = {.struct_size = sizeof drawn};
    colibri_status_t status = colibri_sample(m->model, &how, m->output.ptr, &m->scratch, &drawn, NULL);
    if (!status) status = colibri_score(m->model, m->output.ptr, drawn.token, 3, &drawn, NULL);
    colibri_draw_t row = {.struct_size = sizeof row, .sampling = &how, .logits = m->output.ptr, .sample = &drawn};
    if (!status) status = colibri_sample_rows(m->model, &row, 1, &m->scratch, NULL);
    return status ? status : (colibri_status_t)row.status;
}

/* Everything a decoding host repeats. */
static colibri_status_t work(micro_t *m) {
    colibri_status_t status = micro_run(m, 0, 0);
    if (!status) status = micro_run(m, 3, 7);
    return status ? status : draw(m);
}

/* ---- the counter ------------------------------------------------------------------------------------------------- */

static void counter_counts(void) {
    unsigned long before = counted();
    void *volatile p = malloc(100);
    void *volatile q = aligned_alloc(64, 128);
    CHECK(counted() == before + 2);
    free(p), free(q);
}

static void nothing_is_allocated(const sample_t *sample, uint32_t isa, uint32_t kv_format, colibri_pool_t *pool) {
    micro_t m;
    micro_open(&m, sample, isa, kv_format, pool ? 3 : 1, pool ? colibri_pool_run : NULL, pool);
    unsigned long before = counted();
    colibri_status_t status = work(&m);
    CHECK(counted() == before);
    CHECK(status == COLIBRI_OK);
    micro_close(&m);
}

/* ---- seccomp ----------------------------------------------------------------------------------------------------- */

enum { FORBIDDEN_CALL = -1, NO_SECCOMP = 77 };

static void leave(int code) { syscall(SYS_exit, code); } /* strict mode knows exit, not exit_group */

static void confined(micro_t *m) {
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) leave(NO_SECCOMP);
    if (!m) syscall(SYS_getppid);
    leave(m ? (int)work(m) : 0);
}

/* Exit code of a child that does the work, or with m NULL one forbidden call; FORBIDDEN_CALL if it was killed. */
static int in_confinement(micro_t *m) {
    int status = 0;
    pid_t child = fork();
    if (child < 0) abort();
    if (!child) confined(m);
    if (waitpid(child, &status, 0) != child) abort();
    return WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status) == SIGKILL ? FORBIDDEN_CALL : -2;
}

static void no_system_calls(const sample_t *sample, uint32_t isa, uint32_t kv_format) {
    micro_t m;
    micro_open(&m, sample, isa, kv_format, 1, NULL, NULL);
    CHECK(in_confinement(&m) == COLIBRI_OK);
    micro_close(&m);
}

static int seccomp_works(void) {
    int code = in_confinement(NULL);
    if (code == NO_SECCOMP) printf("(this system has no seccomp: system calls are not checked) ");
    else CHECK(code == FORBIDDEN_CALL);
    return code == FORBIDDEN_CALL;
}

int main(void) {
    colibri_pool_t *pool = NULL;
    start_counting();
    counter_counts();
    int confine = seccomp_works();
    if (colibri_pool_create(3, 0, &pool)) abort();
    for (int s = 0; s < SAMPLES; s++) {
        build(&samples[s]);
        for (uint32_t isa = COLIBRI_ISA_REF; isa <= colibri_best_isa(); isa++)
            for (uint32_t kv = COLIBRI_KV_F16; kv <= COLIBRI_KV_F32; kv++) {
                nothing_is_allocated(&samples[s], isa, kv, NULL);
                nothing_is_allocated(&samples[s], isa, kv, pool);
                if (confine) no_system_calls(&samples[s], isa, kv);
            }
    }
    colibri_pool_destroy(pool);
    return report();
}
