/* A file that shrinks while it is mapped: inside a watched range the process ends with the range's exit code, elsewhere
 * as it would have without us. Each case is a child process. */
#include "host/fault.h"
#include "host/map.h"
#include "test.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, SIZE = 4 * PAGE, FORMER = 77 };
static char path[] = "/tmp/colibri-test-fault-XXXXXX";

/* Else the sanitizer's handler would be the former one. */
__attribute__((visibility("default"))) const char *__asan_default_options(void) { return "handle_sigbus=0"; }

/* A mapping of SIZE bytes of a file of which only the first page is left. */
static colibri_map_t shrunk(void) {
    colibri_map_t map;
    CHECK(!truncate(path, SIZE));
    CHECK(!colibri_map_open(path, 0, SIZE, &map, NULL));
    CHECK(!truncate(path, PAGE));
    return map;
}

static void touch(colibri_map_t map, size_t at) { (void)*((const volatile char *)map.data + at); }

/* Runs a case in a child with stderr in a pipe: its wait status, and whether it said something. */
static int outcome(void (*run)(void), int *spoke) {
    int ends[2], status = -1;
    char said[256];
    if (pipe(ends)) return -1;
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        dup2(ends[1], STDERR_FILENO);
        run();
        _exit(0);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], said, sizeof said - 1);
    said[n > 0 ? n : 0] = 0;
    *spoke = strstr(said, "by rename") != NULL;
    close(ends[0]);
    waitpid(child, &status, 0);
    return status;
}

static void touches_what_is_left(void) {
    colibri_map_t map = shrunk();
    if (colibri_fault_watch(map.data, map.size, 6, NULL)) _exit(1);
    touch(map, PAGE - 1);
}
static void touches_what_is_gone(void) {
    colibri_map_t map = shrunk();
    if (colibri_fault_watch(map.data, map.size, 6, NULL)) _exit(1);
    touch(map, 3 * PAGE);
}
static void touches_another_map(void) {
    colibri_map_t watched = shrunk(), other = shrunk();
    if (colibri_fault_watch(watched.data, watched.size, 6, NULL)) _exit(1);
    touch(other, 3 * PAGE);
}
static void touches_what_was_forgotten(void) {
    colibri_map_t map = shrunk();
    if (colibri_fault_watch(map.data, map.size, 6, NULL)) _exit(1);
    colibri_fault_forget(map.data);
    touch(map, 3 * PAGE);
}
static void is_sent_the_signal(void) { /* by somebody: there is no address */
    colibri_map_t map = shrunk();
    if (colibri_fault_watch(map.data, map.size, 6, NULL)) _exit(1);
    raise(SIGBUS);
}
static void nobody_reads_stderr(void) {
    int full[2];
    char byte = 0;
    if (pipe(full) || fcntl(full[1], F_SETFL, O_NONBLOCK)) _exit(1);
    while (write(full[1], &byte, 1) == 1) continue;
    fcntl(full[1], F_SETFL, 0);
    dup2(full[1], STDERR_FILENO);
    touches_what_is_gone();
}

static void former_handler(int number) { _exit(number == SIGBUS ? FORMER : 1); }
static void former_action(int number, siginfo_t *info, void *context) {
    _exit(number == SIGBUS && info->si_code == BUS_ADRERR && context ? FORMER : 1);
}
static void goes_to_the_former_handler(void) {
    signal(SIGBUS, former_handler);
    touches_another_map();
}
static void goes_to_the_former_action(void) {
    struct sigaction action = {.sa_sigaction = former_action, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &action, NULL);
    touches_another_map();
}

static void check(void (*run)(void), int code, int speaks) {
    int spoke, status = outcome(run, &spoke);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == code && spoke == speaks, "status %#x, spoke %d", status,
              spoke);
}
static void check_killed(void (*run)(void)) {
    int spoke, status = outcome(run, &spoke);
    CHECK_MSG(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS && !spoke, "status %#x, spoke %d", status, spoke);
}

static void refuses(void) {
    static const char bytes[COLIBRI_FAULT_RANGES + 1];
    colibri_error_t err = {.struct_size = sizeof err};
    CHECK(colibri_fault_watch(NULL, 1, 6, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_fault_watch(bytes, 0, 6, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_fault_watch(bytes, 1, 0, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_fault_watch(bytes, 1, 256, &err) == COLIBRI_INVALID_ARGUMENT && strstr(err.message, "256"));
    for (int round = 0; round < 2; round++) { /* what was forgotten makes room */
        for (uint32_t i = 0; i < COLIBRI_FAULT_RANGES; i++) CHECK(!colibri_fault_watch(bytes + i, 1, 6, &err));
        CHECK(colibri_fault_watch(bytes + COLIBRI_FAULT_RANGES, 1, 6, &err) == COLIBRI_BUFFER_TOO_SMALL);
        for (uint32_t i = 0; i < COLIBRI_FAULT_RANGES; i++) colibri_fault_forget(bytes + i);
    }
    colibri_fault_forget(bytes);
}

int main(void) {
    int fd = mkstemp(path);
    if (fd < 0) return perror(path), 1;
    close(fd);
    check(touches_what_is_left, 0, 0);
    check(touches_what_is_gone, 6, 1);
    check(nobody_reads_stderr, 6, 0);
    check_killed(touches_another_map);
    check_killed(touches_what_was_forgotten);
    check_killed(is_sent_the_signal);
    check(goes_to_the_former_handler, FORMER, 0);
    check(goes_to_the_former_action, FORMER, 0);
    refuses();
    unlink(path);
    return report();
}
