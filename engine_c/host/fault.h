/* What happens when a mapped file is cut short: the next touch of a page behind its end raises SIGBUS, in the middle of
 * whatever computes. For ranges that are watched this ends the process with an exit code of its own, so that whoever
 * started it can tell a changed file from a fault of ours, and does not start it again on the same file.
 *
 *     colibri_fault_watch(map.data, map.size, 6, &err);
 *     ... colibri_fault_forget(map.data), then colibri_map_close(&map) ...
 *
 * Any other SIGBUS goes to the handler that was there before the first watch.
 */
#ifndef COLIBRI_FAULT_H
#define COLIBRI_FAULT_H
#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLIBRI_FAULT_RANGES 64u /* most ranges watched at a time */

/* From now on a SIGBUS at an address in [data, data + size), in any thread, writes a line to stderr if that takes one
 * at once, and ends the process with exit_code (1 to 255): no exit handlers, no core. The first call installs the
 * handler, which stays. To be called, like colibri_fault_forget, by one thread at a time. BUFFER_TOO_SMALL if there are
 * too many ranges. */
colibri_status_t colibri_fault_watch(const void *data, uint64_t size, int32_t exit_code, colibri_error_t *err);
void colibri_fault_forget(const void *data); /* what is not watched is ignored */

#ifdef __cplusplus
}
#endif
#endif
