/* Failing with a message, for host/ (the engine has its own, without stdio). */
#ifndef COLIBRI_HOST_FAIL_H
#define COLIBRI_HOST_FAIL_H
#include "colibri.h"
#include <stdarg.h>
#include <stdio.h>

__attribute__((format(printf, 3, 4)))
static inline colibri_status_t host_fail(colibri_error_t *err, colibri_status_t status, const char *format, ...) {
    if (!err) return status;
    va_list args;
    va_start(args, format);
    err->status = (int32_t)status;
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    return status;
}
#endif
