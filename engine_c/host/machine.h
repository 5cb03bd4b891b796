/* What the host offers this process: cores, and the instruction set the user allows. */
#ifndef COLIBRI_MACHINE_H
#define COLIBRI_MACHINE_H
#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Physical cores this process may use: its affinity mask, one per core, within its cgroup's CPU quota (rounded down).
 * At least 1. */
uint32_t colibri_host_threads(void);

/* Fills cpus[capacity] with one usable CPU number per physical core, ascending. Returns how many there are. */
uint32_t colibri_host_cores(uint32_t *cpus, uint32_t capacity);

/* config.isa as the environment variable COLIBRI_ISA asks: ref, avx2 or avx512; AUTO if it is unset or empty.
 * Anything else is COLIBRI_INVALID_ARGUMENT with a message that lists the choices. */
colibri_status_t colibri_host_isa(uint32_t *isa, colibri_error_t *err);

#ifdef __cplusplus
}
#endif
#endif
