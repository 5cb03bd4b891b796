/* Weight formats. Everything that knows how a weight is stored goes through this descriptor.
 *
 * A matrix [n_out, n_in] is stored as panels of 16 output rows; a panel is nb = ceil(n_in/32) blocks in k order, each
 * block holding 32 k of its 16 rows; the panel is padded to 64 bytes. n_out is padded to 16 and n_in to 32 with zeros.
 * Inside a block:
 *   f32, f16, bf16   [32 k][16 rows]
 *   q8               [8 groups][16 rows][4 k] u8 = w + 128, then f16 scale [16]
 *   q4               [4 groups][16 rows][4 bytes]; byte j of group i: low nibble k = 8i+j, high nibble k = 8i+4+j,
 *                    u4 = w + 8; then f16 scale [16]
 */
#ifndef CLB_FORMAT_H
#define CLB_FORMAT_H
#include <stddef.h>
#include <stdint.h>

enum { CLB_PANEL = 16, CLB_BLOCK = 32 };

typedef enum clb_format_id {
#define CLB_FORMAT(name, id) CLB_FMT_##name = id,
#include "formats.def"
#undef CLB_FORMAT
    CLB_FORMATS
} clb_format_id;

typedef enum clb_act_kind { CLB_ACT_F32 = 0, CLB_ACT_Q8 = 1 } clb_act_kind; /* what the dot product partner is */

typedef struct clb_format {
    const char *name;
    uint32_t block_bytes; /* of one block: 32 k x 16 rows */
    clb_act_kind act;
    /* w: f32 [32 k][16 rows] -> block. Returns 0, or -1 if a value is not finite or out of the format's range. */
    int (*pack)(const float *w, void *block);
    /* q: int8 [32 k][16 rows], scale: f16 bits [16] -> block; NULL for formats without scales. */
    int (*pack_quants)(const int8_t *q, const uint16_t *scale, void *block);
    /* block -> f32 [32 k][16 rows] */
    void (*unpack)(const void *block, float *w);
    /* dequantises row `lane` of a panel: f32 [n] */
    void (*row)(const void *panel, uint32_t lane, uint32_t n, float *out);
} clb_format_t;

extern const clb_format_t clb_format_f32, clb_format_f16, clb_format_bf16, clb_format_q8, clb_format_q4;

const clb_format_t *clb_format(uint32_t id);             /* NULL if unknown */
int clb_format_find(const char *name, size_t n);         /* id, or -1 */
static inline uint32_t clb_blocks(uint32_t k) { return (k + CLB_BLOCK - 1) / CLB_BLOCK; }
static inline uint32_t clb_panels(uint32_t rows) { return (rows + CLB_PANEL - 1) / CLB_PANEL; }
static inline size_t clb_panel_stride(const clb_format_t *f, uint32_t nb) {
    return ((size_t)nb * f->block_bytes + 63) & ~(size_t)63;
}
#endif
