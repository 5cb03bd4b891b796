/* Status texts and the formatter of error messages (the library has no stdio). */
#include "status.h"
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

/* The message under construction: n characters written, never more than cap. */
typedef struct clb_out {
    char *text;
    size_t n, cap;
} clb_out_t;

static void put(clb_out_t *o, const char *s, size_t n) {
    size_t room = o->cap - o->n;
    if (n > room) n = room;
    memcpy(o->text + o->n, s, n);
    o->n += n;
}

static void put_text(clb_out_t *o, const char *s) {
    for (s = s ? s : "(null)"; *s; s++) put(o, s, 1);
}

static void put_unsigned(clb_out_t *o, uint64_t v) {
    char digits[20];
    size_t i = sizeof digits;
    do digits[--i] = (char)('0' + v % 10);
    while (v /= 10);
    put(o, digits + i, sizeof digits - i);
}

static void put_signed(clb_out_t *o, int64_t v) {
    if (v < 0) put(o, "-", 1);
    put_unsigned(o, v < 0 ? 0 - (uint64_t)v : (uint64_t)v);
}

static void format_message(clb_out_t *o, const char *f, va_list args) {
    for (; *f; f++) {
        if (*f != '%') {
            put(o, f, 1);
            continue;
        }
        switch (*++f) {
        case 's': put_text(o, va_arg(args, const char *)); break;
        case 'S': {
            const char *s = va_arg(args, const char *);
            int n = va_arg(args, int);
            if (s && n > 0) put(o, s, (size_t)n);
            break;
        }
        case 'u': put_unsigned(o, va_arg(args, uint64_t)); break;
        case 'd': put_signed(o, va_arg(args, int64_t)); break;
        case '\0': return;
        default: put(o, f, 1);
        }
    }
}

colibri_status_t clb_fail(colibri_error_t *err, colibri_status_t status, const char *format, ...) {
    const size_t head = offsetof(colibri_error_t, message);
    if (!err || err->struct_size < head) return status; /* no room even for the status */
    err->status = (int32_t)status;
    size_t size = err->struct_size < sizeof *err ? err->struct_size : sizeof *err;
    if (size <= head) return status;
    clb_out_t o = {err->message, 0, size - head < sizeof err->message ? size - head - 1 : sizeof err->message - 1};
    va_list args;
    va_start(args, format);
    format_message(&o, format, args);
    va_end(args);
    o.text[o.n] = '\0';
    return status;
}

const char *colibri_status_text(int32_t status) {
    static const char *const texts[] = {
#define X(name, value, text) [value] = text,
        COLIBRI_STATUS_LIST(X)
#undef X
    };
    if (status < 0 || (size_t)status >= sizeof texts / sizeof *texts || !texts[status]) return "unknown status";
    return texts[status];
}
