/* The floating-point environment of every computation: round to nearest, no flush to zero, no traps. */
#ifndef CLB_FPENV_H
#define CLB_FPENV_H
#include <stdint.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
typedef uint32_t clb_fpenv_t;
static inline clb_fpenv_t clb_fpenv_enter(void) {
    clb_fpenv_t old = _mm_getcsr();
    if (old != 0x1F80u) _mm_setcsr(0x1F80u);
    return old;
}
static inline void clb_fpenv_leave(clb_fpenv_t old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t clb_fpenv_t;
static inline clb_fpenv_t clb_fpenv_enter(void) {
    clb_fpenv_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return old;
}
static inline void clb_fpenv_leave(clb_fpenv_t old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
#error "unknown floating-point environment"
#endif
#endif
