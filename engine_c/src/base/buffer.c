/* Checks of versioned structs and of buffers. */
#include "buffer.h"
#include <string.h>

static const char *type_name(uint32_t type) {
    static const char *const names[] = {"(none)", "WEIGHTS", "ROUTING_TABLE", "KV_CACHE", "WORKSPACE", "OUTPUT"};
    return type < sizeof names / sizeof *names ? names[type] : "(unknown)";
}

static uint32_t size_of(const void *s) {
    uint32_t size;
    memcpy(&size, s, sizeof size);
    return size;
}

colibri_status_t clb_struct_check(const void *s, uint32_t least, const char *name, colibri_error_t *err) {
    if (!s) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "%s is NULL", name);
    uint32_t size = size_of(s);
    if (size >= least) return COLIBRI_OK;
    return clb_fail(err, COLIBRI_STRUCT_SIZE, "%s: struct_size is %u, at least %u is needed (set it to sizeof)", name,
                    (uint64_t)size, (uint64_t)least);
}

void clb_struct_read(void *own, uint32_t size, const void *s) {
    uint32_t theirs = size_of(s), n = theirs < size ? theirs : size;
    memcpy(own, s, n);
    memset((char *)own + n, 0, size - n);
    memcpy(own, &size, sizeof size);
}

static colibri_status_t check_place(const colibri_buffer_t *b, const char *name, uint64_t need, colibri_error_t *err) {
    uint64_t at = (uint64_t)(uintptr_t)b->ptr, align = b->alignment;
    if (!b->ptr && (need || b->size)) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "%s: ptr is NULL", name);
    if (align < COLIBRI_ALIGNMENT || (align & (align - 1)))
        return clb_fail(err, COLIBRI_MISALIGNED, "%s: alignment is %u, a power of two of at least %u is needed", name,
                        align, (uint64_t)COLIBRI_ALIGNMENT);
    if (at & (align - 1))
        return clb_fail(err, COLIBRI_MISALIGNED, "%s: ptr is not a multiple of its alignment %u", name, align);
    if (b->size < need)
        return clb_fail(err, COLIBRI_BUFFER_TOO_SMALL, "%s: size is %u, at least %u bytes are needed", name, b->size,
                        need);
    if (b->size > UINTPTR_MAX - at)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "%s: ptr + size %u is outside the address space", name, b->size);
    return COLIBRI_OK;
}

colibri_status_t clb_buffer_check(const colibri_buffer_t *b, const char *name, colibri_buffer_type_t type,
                                  uint64_t need, colibri_error_t *err) {
    colibri_status_t status = clb_struct_check(b, CLB_SIZE_TO(colibri_buffer_t, reserved), name, err);
    if (status) return status;
    if (b->type != (uint32_t)type)
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "%s: buffer type is %u %s, %s is needed", name,
                        (uint64_t)b->type, type_name(b->type), type_name((uint32_t)type));
    if (b->device != 0)
        return clb_fail(err, COLIBRI_UNSUPPORTED, "%s: device is %d, only host memory (0) is supported", name,
                        (int64_t)b->device);
    return check_place(b, name, need, err);
}
