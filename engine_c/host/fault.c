/* See fault.h. The handler reads the table while another thread may change it: a range is published by its exit code,
 * which is written last and cleared first. */
#include "fault.h"
#include "fail.h"
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

typedef struct range {
    _Atomic uintptr_t begin, end;
    _Atomic int exit_code; /* 0: free */
} range_t;

static range_t ranges[COLIBRI_FAULT_RANGES];
static struct sigaction former;
static int installed;

static const char text[] = "colibri: a mapped weight file was cut short by someone; this process ends. "
                           "Replace model files by rename, never in place\n";

/* Only what POSIX allows in a handler. One thread speaks; others that strike too wait for the end. */
static void tell_and_exit(int exit_code) {
    static atomic_flag spoken = ATOMIC_FLAG_INIT;
    while (atomic_flag_test_and_set(&spoken)) pause();
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&out, 1, 0) == 1 && (out.revents & POLLOUT)) {
        ssize_t ignored = write(STDERR_FILENO, text, sizeof text - 1);
        (void)ignored;
    }
    _exit(exit_code);
}

static void pass_on(int number, siginfo_t *info, void *context) {
    if (former.sa_flags & SA_SIGINFO) {
        former.sa_sigaction(number, info, context);
    } else if (former.sa_handler == SIG_DFL || former.sa_handler == SIG_IGN) {
        signal(number, SIG_DFL);
        raise(number);
    } else {
        former.sa_handler(number);
    }
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
    uintptr_t address = (uintptr_t)info->si_addr;
    if (info->si_code > 0) /* raised by the kernel, so that there is an address */
        for (uint32_t i = 0; i < COLIBRI_FAULT_RANGES; i++) {
            int exit_code = atomic_load(&ranges[i].exit_code);
            if (exit_code && address >= atomic_load(&ranges[i].begin) && address < atomic_load(&ranges[i].end))
                tell_and_exit(exit_code);
        }
    pass_on(number, info, context);
}

static int install(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER; /* the former handler may raise it again */
    return sigaction(SIGBUS, &action, &former);
}

colibri_status_t colibri_fault_watch(const void *data, uint64_t size, int32_t exit_code, colibri_error_t *err) {
    if (!data || !size || exit_code < 1 || exit_code > 255)
        return host_fail(err, COLIBRI_INVALID_ARGUMENT, "colibri_fault_watch: no range, or exit code %d", exit_code);
    if (!installed && install()) return host_fail(err, COLIBRI_INVALID_ARGUMENT, "colibri_fault_watch: no handler");
    installed = 1;
    for (uint32_t i = 0; i < COLIBRI_FAULT_RANGES; i++)
        if (!atomic_load(&ranges[i].exit_code)) {
            atomic_store(&ranges[i].begin, (uintptr_t)data);
            atomic_store(&ranges[i].end, (uintptr_t)data + size);
            atomic_store(&ranges[i].exit_code, exit_code);
            return COLIBRI_OK;
        }
    return host_fail(err, COLIBRI_BUFFER_TOO_SMALL, "over %u mapped files are watched", COLIBRI_FAULT_RANGES);
}

void colibri_fault_forget(const void *data) {
    for (uint32_t i = 0; i < COLIBRI_FAULT_RANGES; i++)
        if (atomic_load(&ranges[i].begin) == (uintptr_t)data) atomic_store(&ranges[i].exit_code, 0);
}
