/* See json.h. Strings are validated once, when read; decoding afterwards needs no checks. */
#include "json.h"
#include <string.h>

static int fault(clb_json_t *j, const char *at, const char *what) {
    if (!j->fault) {
        j->fault = what;
        j->fault_at = at;
    }
    return -1;
}

static int is_digit(const char *p, const char *end) { return p < end && *p >= '0' && *p <= '9'; }

static void skip_space(clb_json_t *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t')) j->at++;
}

clb_json_t clb_json_open(const char *text, size_t size) {
    return (clb_json_t){.text = text, .at = text, .end = size ? text + size : text};
}

uint64_t clb_json_offset(const clb_json_t *j) { return (uint64_t)((j->fault ? j->fault_at : j->at) - j->text); }

static clb_json_kind_t kind_of(char c) {
    switch (c) {
    case '{': return CLB_JSON_OBJECT;
    case '[': return CLB_JSON_ARRAY;
    case '"': return CLB_JSON_STRING;
    case 't': case 'f': case 'n': return CLB_JSON_LITERAL;
    case '-': return CLB_JSON_NUMBER;
    default: return c >= '0' && c <= '9' ? CLB_JSON_NUMBER : CLB_JSON_BAD;
    }
}

clb_json_kind_t clb_json_peek(clb_json_t *j) {
    if (j->fault) return CLB_JSON_BAD;
    skip_space(j);
    clb_json_kind_t kind = j->at < j->end ? kind_of(*j->at) : CLB_JSON_BAD;
    if (kind == CLB_JSON_BAD) fault(j, j->at, j->at < j->end ? "expected a value" : "the text ends too early");
    return kind;
}

static int expect(clb_json_t *j, clb_json_kind_t kind, const char *what) {
    clb_json_kind_t found = clb_json_peek(j);
    if (found == CLB_JSON_BAD) return -1;
    return found == kind ? 0 : fault(j, j->at, what);
}

/* ---- strings ------------------------------------------------------------------------------------------------- */

/* Four hex digits at p, or -1. */
static int32_t hex4(const char *p, const char *end) {
    int32_t v = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = p[i], lower = c | 32;
        int digit = c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
        if (digit < 0) return -1;
        v = v << 4 | digit;
    }
    return v;
}

/* Source bytes of the \u escape or surrogate pair at p, and its code point; 0 if malformed. */
static size_t unicode_escape(const char *p, const char *end, uint32_t *code) {
    int32_t high = hex4(p + 2, end);
    if (high < 0 || (high >= 0xdc00 && high < 0xe000)) return 0;
    *code = (uint32_t)high;
    if (high < 0xd800 || high >= 0xe000) return 6;
    if (end - p < 12 || p[6] != '\\' || p[7] != 'u') return 0;
    int32_t low = hex4(p + 8, end);
    if (low < 0xdc00 || low >= 0xe000) return 0;
    *code = 0x10000u + ((uint32_t)(high - 0xd800) << 10) + (uint32_t)(low - 0xdc00);
    return 12;
}

/* Source bytes of the escape at p (*p is a backslash) and what it stands for; 0 if malformed. */
static size_t escape(const char *p, const char *end, uint32_t *code) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (end - p < 2) return 0;
    if (p[1] == 'u') return unicode_escape(p, end, code);
    for (size_t i = 0; i < sizeof names - 1; i++)
        if (p[1] == names[i]) {
            *code = (uint32_t)values[i];
            return 2;
        }
    return 0;
}

/* Bytes of the well-formed UTF-8 sequence at p, 0 if there is none (Unicode, table 3-7). */
static size_t utf8_size(const char *text, const char *end) {
    const unsigned char *p = (const unsigned char *)text;
    unsigned char lead = p[0], low = 0x80, high = 0xbf;
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return 0;
    size_t n = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if ((size_t)(end - text) < n) return 0;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
    if (p[1] < low || p[1] > high) return 0;
    for (size_t i = 2; i < n; i++)
        if (p[i] < 0x80 || p[i] > 0xbf) return 0;
    return n;
}

static size_t utf8_encode(uint32_t c, char *out) {
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n; i-- > 1; c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(lead[n] | c);
    return n;
}

/* Reads the string whose opening quote is at j->at. */
static int scan_string(clb_json_t *j, clb_slice_t *out) {
    const char *p = j->at + 1;
    uint32_t code;
    while (p < j->end && *p != '"') {
        if ((unsigned char)*p < 0x20) return fault(j, p, "control character in a string");
        size_t n = *p == '\\' ? escape(p, j->end, &code) : utf8_size(p, j->end);
        if (!n) return fault(j, p, *p == '\\' ? "malformed escape in a string" : "invalid UTF-8 in a string");
        p += n;
    }
    if (p == j->end) return fault(j, p, "the text ends inside a string");
    *out = (clb_slice_t){j->at + 1, (size_t)(p - j->at - 1)};
    j->at = p + 1;
    return 0;
}

int clb_json_string(clb_json_t *j, clb_slice_t *out) {
    return expect(j, CLB_JSON_STRING, "expected a string") ? -1 : scan_string(j, out);
}

/* Decodes the byte or escape at *p into out[4], steps over it, and returns the decoded size. The slice is valid. */
static size_t decode(const char **p, const char *end, char *out) {
    uint32_t code = 0;
    if (**p != '\\') {
        out[0] = *(*p)++;
        return 1;
    }
    *p += escape(*p, end, &code);
    return utf8_encode(code, out);
}

int clb_json_equal(clb_slice_t s, const char *literal) {
    const char *p = s.ptr, *end = s.ptr + s.size;
    char unit[4];
    while (p < end) {
        size_t n = decode(&p, end, unit);
        for (size_t i = 0; i < n; i++, literal++)
            if (!*literal || unit[i] != *literal) return 0;
    }
    return !*literal;
}

int clb_json_copy(clb_slice_t s, char *out, size_t cap) {
    const char *p = s.ptr, *end = s.ptr + s.size;
    char unit[4];
    size_t used = 0;
    while (p < end) {
        size_t n = decode(&p, end, unit);
        if (cap - used < n) return -1;
        memcpy(out + used, unit, n);
        used += n;
    }
    return (int)used;
}

clb_slice_t clb_json_clip(clb_slice_t s, size_t max) {
    if (s.size <= max) return s;
    while (max && ((unsigned char)s.ptr[max] & 0xc0) == 0x80) max--;
    return (clb_slice_t){s.ptr, max};
}

/* ---- numbers and literals ------------------------------------------------------------------------------------ */

static const char *digits(const char *p, const char *end) {
    while (is_digit(p, end)) p++;
    return p;
}

/* Reads a number; *integral = it has neither fraction nor exponent. */
static int scan_number(clb_json_t *j, int *integral) {
    const char *end = j->end, *p = j->at + (*j->at == '-'), *first = p;
    if (!is_digit(p, end)) return fault(j, p, "expected a digit");
    p = digits(p, end);
    if (*first == '0' && p - first > 1) return fault(j, first, "a number with a leading zero");
    *integral = 1;
    if (p < end && *p == '.') {
        *integral = 0;
        if (!is_digit(++p, end)) return fault(j, p, "expected a digit after the point");
        p = digits(p, end);
    }
    if (p < end && (*p | 32) == 'e') {
        *integral = 0;
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        if (!is_digit(p, end)) return fault(j, p, "expected a digit in the exponent");
        p = digits(p, end);
    }
    j->at = p;
    return 0;
}

int clb_json_int(clb_json_t *j, int64_t *out) {
    int integral;
    int64_t v = 0;
    if (expect(j, CLB_JSON_NUMBER, "expected an integer")) return -1;
    const char *start = j->at;
    int negative = *start == '-';
    if (scan_number(j, &integral)) return -1;
    if (!integral) return fault(j, start, "expected an integer, found a number with fraction or exponent");
    for (const char *p = start + negative; p < j->at; p++)
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, *p - '0', &v))
            return fault(j, start, "an integer beyond 64 bits");
    if (negative && !v) return fault(j, start, "expected an integer, found -0");
    *out = negative ? -v : v;
    return 0;
}

static int scan_literal(clb_json_t *j) {
    const char *word = *j->at == 't' ? "true" : *j->at == 'f' ? "false" : "null", *p = j->at;
    for (; *word; word++, p++)
        if (p == j->end || *p != *word) return fault(j, j->at, "expected a value");
    j->at = p;
    return 0;
}

/* ---- containers ---------------------------------------------------------------------------------------------- */

int clb_json_enter(clb_json_t *j, clb_json_kind_t kind) {
    if (expect(j, kind, kind == CLB_JSON_OBJECT ? "expected an object" : "expected an array")) return -1;
    if (j->depth == CLB_JSON_DEPTH) return fault(j, j->at, "nested more than 32 deep");
    uint64_t bit = (uint64_t)1 << j->depth++;
    j->objects = kind == CLB_JSON_OBJECT ? j->objects | bit : j->objects & ~bit;
    j->fresh = 1;
    j->at++;
    return 0;
}

static int read_key(clb_json_t *j, clb_slice_t *key) {
    skip_space(j);
    if (j->at == j->end || *j->at != '"') return fault(j, j->at, "expected a key");
    if (scan_string(j, key)) return -1;
    skip_space(j);
    if (j->at == j->end || *j->at != ':') return fault(j, j->at, "expected ':'");
    j->at++;
    return 1;
}

int clb_json_next(clb_json_t *j, clb_slice_t *key) {
    if (j->fault) return -1;
    skip_space(j);
    if (j->at == j->end) return fault(j, j->at, "the text ends too early");
    int object = j->objects >> (j->depth - 1) & 1;
    if (*j->at == (object ? '}' : ']')) {
        j->at++;
        j->depth--;
        j->fresh = 0;
        return 0;
    }
    if (!j->fresh) {
        if (*j->at != ',') return fault(j, j->at, object ? "expected ',' or '}'" : "expected ',' or ']'");
        j->at++;
    }
    j->fresh = 0;
    return object ? read_key(j, key) : 1;
}

static int skip_scalar(clb_json_t *j, clb_json_kind_t kind) {
    clb_slice_t text;
    int integral;
    if (kind == CLB_JSON_STRING) return scan_string(j, &text);
    return kind == CLB_JSON_NUMBER ? scan_number(j, &integral) : scan_literal(j);
}

int clb_json_skip(clb_json_t *j) {
    uint32_t base = j->depth;
    clb_slice_t key;
    do {
        clb_json_kind_t kind = clb_json_peek(j);
        if (kind == CLB_JSON_BAD) return -1;
        int container = kind == CLB_JSON_OBJECT || kind == CLB_JSON_ARRAY;
        if (container ? clb_json_enter(j, kind) : skip_scalar(j, kind)) return -1;
        int more = 0;
        while (j->depth > base && !more) more = clb_json_next(j, &key);
        if (more < 0) return -1;
    } while (j->depth > base);
    return 0;
}

int clb_json_end(clb_json_t *j) {
    if (j->fault) return -1;
    skip_space(j);
    return j->at == j->end ? 0 : fault(j, j->at, "text after the end of the document");
}
