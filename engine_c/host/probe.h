/* What this machine can do at best: the ceilings that benchmarks are compared with. Independent of the engine.
 *
 *     double rate;
 *     if (colibri_probe(COLIBRI_PROBE_READ, colibri_best_isa(), 2, 5, &rate)) ...
 *
 * Rates are the best of several runs of a few milliseconds, all threads together. On a busy machine they are what was
 * left of it, so a comparison probes right beside what it measures.
 */
#ifndef COLIBRI_PROBE_H
#define COLIBRI_PROBE_H
#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum colibri_probe_kind {
    COLIBRI_PROBE_READ = 0, /* bytes/s read in order from memory far larger than the caches, a slice per thread */
    COLIBRI_PROBE_INT8 = 1, /* operations/s of u8 x s8 products summed in int32; 1 multiply-add = 2 operations */
    COLIBRI_PROBE_F32 = 2   /* operations/s of float fma, likewise */
} colibri_probe_kind_t;

/* isa: colibri_isa_t whose instructions are used (AUTO = ref = plain C). Returns 0 and sets *per_second, or an errno
 * value: EINVAL (kind, threads or runs), ENOTSUP (this CPU lacks isa), ENOMEM, EAGAIN (no threads). */
int colibri_probe(uint32_t kind, uint32_t isa, uint32_t threads, uint32_t runs, double *per_second);

#ifdef __cplusplus
}
#endif
#endif
