/* Failing with a message. */
#ifndef CLB_STATUS_H
#define CLB_STATUS_H
#include "../../include/colibri.h"

/* Fills err (may be NULL) and returns status. The format knows %s (NUL-terminated), %S (pointer, int length), %u
 * (unsigned 64-bit), %d (signed 64-bit), %%; it never overruns and shortens what does not fit. All integer arguments
 * must be cast to uint64_t / int64_t. */
colibri_status_t clb_fail(colibri_error_t *err, colibri_status_t status, const char *format, ...);
#endif
