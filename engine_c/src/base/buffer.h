/* Checks that every public function makes on what its caller passes: versioned structs and buffers. */
#ifndef CLB_BUFFER_H
#define CLB_BUFFER_H
#include "status.h"

/* Bytes of a struct up to and including `last`: with the last field of ABI 1.0, the size every caller must have. */
#define CLB_SIZE_TO(type, last) ((uint32_t)(offsetof(type, last) + sizeof(((type *)0)->last)))

/* A struct that starts with struct_size: not NULL (INVALID_ARGUMENT) and at least `least` bytes (STRUCT_SIZE).
 * name is the argument's name in the message. */
colibri_status_t clb_struct_check(const void *s, uint32_t least, const char *name, colibri_error_t *err);

/* Copies a checked struct into this library's own version of it (size = sizeof *own); fields that the caller's
 * version does not have become zero, own->struct_size is size. */
void clb_struct_read(void *own, uint32_t size, const void *s);

/* A buffer of the given colibri_buffer_type_t in host memory, aligned as promised and to 64 bytes, of at least `need`
 * bytes, that does not wrap around the address space. ptr may be NULL only if need and size are 0.
 * INVALID_ARGUMENT (NULL, wrong type, wraps), STRUCT_SIZE, UNSUPPORTED (device), MISALIGNED, BUFFER_TOO_SMALL. */
colibri_status_t clb_buffer_check(const colibri_buffer_t *b, const char *name, colibri_buffer_type_t type,
                                  uint64_t need, colibri_error_t *err);

/* A use of a checked buffer begins and ends. */
static inline void clb_buffer_acquire(colibri_buffer_t *b) { __atomic_fetch_add(&b->ref_count, 1, __ATOMIC_ACQUIRE); }
static inline void clb_buffer_release(colibri_buffer_t *b) { __atomic_fetch_sub(&b->ref_count, 1, __ATOMIC_RELEASE); }
#endif
