/* SHA-256 (FIPS 180-4), for the numerics fingerprint. */
#ifndef CLB_SHA256_H
#define CLB_SHA256_H
#include <stddef.h>
#include <stdint.h>

typedef struct clb_sha256 {
    uint32_t state[8];
    uint64_t length; /* bytes hashed so far */
    uint8_t block[64];
} clb_sha256_t;

void clb_sha256_init(clb_sha256_t *h);
void clb_sha256_update(clb_sha256_t *h, const void *data, size_t n);
void clb_sha256_final(clb_sha256_t *h, uint8_t digest[32]); /* h is used up */
#endif
