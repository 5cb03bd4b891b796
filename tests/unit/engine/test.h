/* The whole test framework of the C programs: each tests/unit/engine/test_<topic>.c is a program that runs its checks
 * and ends with report(). It is linked with every engine and host object, so it sees internals too. */
#ifndef TEST_H
#define TEST_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int test_passed, test_failed;
#define CHECK(cond) CHECK_MSG(cond, "%s", #cond)
#define CHECK_MSG(cond, ...)                                                                   \
    do {                                                                                       \
        if (cond) test_passed++;                                                               \
        else if (test_failed++ < 20) {                                                         \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                    \
            fprintf(stderr, __VA_ARGS__);                                                      \
            fputc('\n', stderr);                                                               \
        }                                                                                      \
    } while (0)
static inline int report(void) {
    printf("%d passed, %d failed\n", test_passed, test_failed);
    return test_failed != 0;
}
/* xorshift for reproducible inputs */
static inline unsigned test_random(unsigned long long *s) {
    *s ^= *s << 13; *s ^= *s >> 7; *s ^= *s << 17;
    return (unsigned)(*s >> 32);
}
static inline float test_uniform(unsigned long long *s) { return (float)(test_random(s) >> 8) * 0x1p-23f - 1.0f; }
#endif
