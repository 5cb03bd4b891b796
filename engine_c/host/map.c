/* See map.h. */
#include "map.h"
#include "fail.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

enum { KNOWN_FLAGS = COLIBRI_MAP_POPULATE | COLIBRI_MAP_HUGEPAGE | COLIBRI_MAP_DONTDUMP | COLIBRI_MAP_INTERLEAVE |
                     COLIBRI_MAP_BIND };

/* ---- NUMA placement: Linux, raw system calls --------------------------------------------------------------------
 * Pages of tmpfs and hugetlbfs files follow mbind; page-cache pages of other files follow the policy of the thread
 * that first reads them. So both are set while the file is populated, and the thread's own policy is restored. */
#if defined(__linux__) && defined(SYS_mbind) && defined(SYS_set_mempolicy) && defined(SYS_getcpu)
enum { MPOL_PREFERRED = 1, MPOL_INTERLEAVE = 3 }; /* <linux/mempolicy.h>, which musl-gcc does not have */
enum { NODE_BITS = 1024, NODE_WORDS = NODE_BITS / (8 * (int)sizeof(unsigned long)) };
typedef struct nodes { unsigned long bits[NODE_WORDS]; } nodes_t;
typedef struct policy {
    int saved, mode;
    nodes_t nodes;
} policy_t;

static void node_add(nodes_t *nodes, unsigned node) {
    unsigned word = 8 * sizeof(unsigned long);
    if (node < NODE_BITS) nodes->bits[node / word] |= 1ul << node % word;
}

/* Online nodes from a list like "0-1,4". Returns how many. */
static unsigned online_nodes(nodes_t *nodes) {
    unsigned count = 0, lo, hi;
    FILE *f = fopen("/sys/devices/system/node/online", "r");
    if (!f) return 1;
    while (fscanf(f, "%u", &lo) == 1) {
        hi = lo;
        int c = fgetc(f);
        if (c == '-' && fscanf(f, "%u", &hi) == 1) c = fgetc(f);
        for (unsigned i = lo; i <= hi && i < NODE_BITS; i++, count++) node_add(nodes, i);
        if (c != ',') break;
    }
    fclose(f);
    return count;
}

static policy_t policy_enter(void *data, size_t size, uint32_t flags) {
    policy_t old = {0};
    nodes_t nodes = {{0}};
    if (!(flags & (COLIBRI_MAP_INTERLEAVE | COLIBRI_MAP_BIND)) || online_nodes(&nodes) < 2) return old;
    int mode = MPOL_INTERLEAVE;
    if (flags & COLIBRI_MAP_BIND) {
        unsigned node = 0;
        if (syscall(SYS_getcpu, NULL, &node, NULL)) return old;
        mode = MPOL_PREFERRED;
        memset(&nodes, 0, sizeof nodes);
        node_add(&nodes, node);
    }
    syscall(SYS_mbind, data, size, mode, nodes.bits, NODE_BITS, 0);
    if (syscall(SYS_get_mempolicy, &old.mode, old.nodes.bits, NODE_BITS, NULL, 0)) return old;
    old.saved = !syscall(SYS_set_mempolicy, mode, nodes.bits, NODE_BITS);
    return old;
}

static void policy_leave(const policy_t *old) {
    if (old->saved) syscall(SYS_set_mempolicy, old->mode, old->nodes.bits, NODE_BITS);
}
#else
typedef int policy_t;
static policy_t policy_enter(void *data, size_t size, uint32_t flags) { return (void)data, (void)size, (void)flags, 0; }
static void policy_leave(const policy_t *old) { (void)old; }
#endif

/* ---- mapping -------------------------------------------------------------------------------------------------- */

static void advise(void *data, size_t size, uint32_t flags) {
#ifdef MADV_HUGEPAGE
    if (flags & COLIBRI_MAP_HUGEPAGE) madvise(data, size, MADV_HUGEPAGE);
#endif
#ifdef MADV_DONTDUMP
    if (flags & COLIBRI_MAP_DONTDUMP) madvise(data, size, MADV_DONTDUMP);
#endif
    (void)data, (void)size, (void)flags;
}

/* Brings every page in. MADV_POPULATE_READ (Linux 5.14) reports an error where touching a page would raise SIGBUS. */
static int populate(const void *data, size_t size, size_t page) {
#ifdef MADV_POPULATE_READ
    if (!madvise((void *)data, size, MADV_POPULATE_READ)) return 0;
    if (errno != EINVAL && errno != ENOSYS) return -1;
#endif
    const volatile char *p = data;
    for (size_t i = 0; i < size; i += page) (void)p[i];
    return 0;
}

static colibri_status_t check_regular(int fd, const char *path, struct stat *st, colibri_error_t *err) {
    if (fstat(fd, st))
        return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: cannot open: %s", path, strerror(errno));
    if (S_ISDIR(st->st_mode))
        return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: is a directory; a file is expected", path);
    if (!S_ISREG(st->st_mode)) return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: not a regular file", path);
    return COLIBRI_OK;
}

static colibri_status_t check_size(const char *path, uint64_t size, uint64_t expected, colibri_error_t *err) {
    if (size == 0) return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: the file is empty", path);
    if (size > SIZE_MAX / 2) return host_fail(err, COLIBRI_UNSUPPORTED, "%.180s: too large to map", path);
    if (expected == COLIBRI_MAP_ANY_SIZE || size == expected) return COLIBRI_OK;
    if (size < expected)
        return host_fail(err, COLIBRI_BUFFER_TOO_SMALL, "%.150s: truncated: %llu bytes, %llu expected", path,
                         (unsigned long long)size, (unsigned long long)expected);
    return host_fail(err, COLIBRI_TENSOR, "%.150s: too long: %llu bytes, %llu expected", path,
                     (unsigned long long)size, (unsigned long long)expected);
}

static colibri_status_t map_whole(int fd, const char *path, uint64_t size, uint32_t flags, colibri_map_t *map,
                                  colibri_error_t *err) {
    void *data = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
        return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: cannot map: %s", path, strerror(errno));
    advise(data, (size_t)size, flags);
    if (flags & COLIBRI_MAP_POPULATE) {
        policy_t old = policy_enter(data, (size_t)size, flags);
        int failed = populate(data, (size_t)size, (size_t)sysconf(_SC_PAGESIZE));
        policy_leave(&old);
        if (failed) {
            host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: cannot read: %s", path, strerror(errno));
            munmap(data, (size_t)size);
            return COLIBRI_INVALID_ARGUMENT;
        }
    } else {
        posix_madvise(data, (size_t)size, POSIX_MADV_WILLNEED);
    }
    map->data = data, map->size = size;
    return COLIBRI_OK;
}

colibri_status_t colibri_map_fd(int fd, const char *path, uint32_t flags, uint64_t expected, colibri_map_t *map,
                                colibri_error_t *err) {
    *map = (colibri_map_t){0};
    if (!path || (flags & ~(uint32_t)KNOWN_FLAGS))
        return host_fail(err, COLIBRI_INVALID_ARGUMENT, "colibri_map: no path or unknown flags %#x", flags);
    struct stat st;
    colibri_status_t status = check_regular(fd, path, &st, err);
    if (!status) status = check_size(path, (uint64_t)st.st_size, expected, err);
    return status ? status : map_whole(fd, path, (uint64_t)st.st_size, flags, map, err);
}

colibri_status_t colibri_map_open(const char *path, uint32_t flags, uint64_t expected, colibri_map_t *map,
                                  colibri_error_t *err) {
    *map = (colibri_map_t){0};
    if (!path) return host_fail(err, COLIBRI_INVALID_ARGUMENT, "colibri_map_open: no path");
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* a FIFO must not be waited for */
    if (fd < 0) return host_fail(err, COLIBRI_INVALID_ARGUMENT, "%.180s: cannot open: %s", path, strerror(errno));
    colibri_status_t status = colibri_map_fd(fd, path, flags, expected, map, err);
    close(fd);
    return status;
}

void colibri_map_close(colibri_map_t *map) {
    if (map->data) munmap((void *)map->data, (size_t)map->size);
    *map = (colibri_map_t){0};
}
