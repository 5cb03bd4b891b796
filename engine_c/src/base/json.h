/* A strict, non-allocating pull reader of JSON (RFC 8259) over a pointer and a length; the text need not end in NUL.
 *
 *     clb_json_t j = clb_json_open(text, size);
 *     clb_slice_t key;
 *     if (clb_json_enter(&j, CLB_JSON_OBJECT)) fail;
 *     while ((more = clb_json_next(&j, &key)) > 0)
 *         if (clb_json_equal(key, "n") ? clb_json_int(&j, &n) : clb_json_skip(&j)) break;
 *     if (more < 0 || j.fault || clb_json_end(&j)) the fault is j.fault at byte clb_json_offset(&j);
 *
 * Every call reads forward only, so a document costs linear time whatever it holds. Copying the struct is a bookmark:
 * the copy reads the same value again. Refused: anything RFC 8259 does not allow (leading zeros, trailing commas,
 * control characters in strings), UTF-8 that is not well-formed, lone surrogate escapes, more than 32 open containers.
 */
#ifndef CLB_JSON_H
#define CLB_JSON_H
#include <stddef.h>
#include <stdint.h>

enum { CLB_JSON_DEPTH = 32 };

/* A piece of the text. Of a string: what stands between the quotes, well-formed, escapes not yet decoded. */
typedef struct clb_slice {
    const char *ptr;
    size_t size;
} clb_slice_t;

typedef enum clb_json_kind {
    CLB_JSON_BAD, CLB_JSON_OBJECT, CLB_JSON_ARRAY, CLB_JSON_STRING, CLB_JSON_NUMBER, CLB_JSON_LITERAL
} clb_json_kind_t;

typedef struct clb_json {
    const char *text, *at, *end;
    const char *fault;    /* the first thing found wrong, a static text; NULL while all is well */
    const char *fault_at;
    uint64_t objects;     /* bit d: the container open at depth d is an object */
    uint32_t depth;       /* open containers */
    uint32_t fresh;       /* the innermost container was entered and nothing in it read yet */
} clb_json_t;

clb_json_t clb_json_open(const char *text, size_t size);
/* Kind of the value that comes next, without reading it; BAD records a fault if there is none. */
clb_json_kind_t clb_json_peek(clb_json_t *j);

/* The calls below return 0 (next: 1 or 0), or -1 with a fault recorded; after a fault every call returns -1. */

/* Opens the object or array that comes next. */
int clb_json_enter(clb_json_t *j, clb_json_kind_t kind);
/* Steps to the next member or element of the innermost container: 1 and (in an object) its key, or 0 after closing the
 * container. The value must then be read or skipped. key may be NULL in an array. */
int clb_json_next(clb_json_t *j, clb_slice_t *key);
int clb_json_string(clb_json_t *j, clb_slice_t *out);
/* An integer that fits int64 and is written as one: no fraction, no exponent, not -0. */
int clb_json_int(clb_json_t *j, int64_t *out);
/* Passes over a value of any kind, checking all of it; no recursion. */
int clb_json_skip(clb_json_t *j);
/* Nothing but white space may follow. */
int clb_json_end(clb_json_t *j);
/* Byte offset of the fault, or of the reading position. */
uint64_t clb_json_offset(const clb_json_t *j);

/* The decoded string equals the NUL-terminated literal. Stops at the first difference. */
int clb_json_equal(clb_slice_t s, const char *literal);
/* Decodes into out[cap], not NUL-terminated: the decoded size, or -1 if it does not fit. */
int clb_json_copy(clb_slice_t s, char *out, size_t cap);
/* At most `max` bytes from the start of s, cut between characters; for messages. */
clb_slice_t clb_json_clip(clb_slice_t s, size_t max);
#endif
