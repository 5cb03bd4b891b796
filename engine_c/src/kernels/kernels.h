/* Kernel slots. A table per instruction set starts as a copy of ref and overrides what it does better.
 *
 * Contract of every kernel: no allocation, no failure, tails handled inside, and THE SAME BITS AS ref: the order of
 * every floating-point operation on every element is the one written here. "fma" is the fused operation; products and
 * sums that are not written as fma are rounded separately. The tree over 16 lanes is (l + l+8), (l + l+4), (l + l+2),
 * (l + l+1). Callers run kernels under MXCSR 0x1F80 (base/fpenv.h).
 * Panels and KV rows are 64-byte aligned, cells of packed activations to their 32 values; others to a float.
 */
#ifndef CLB_KERNELS_H
#define CLB_KERNELS_H
#include "../quant/format.h"
#include <stddef.h>
#include <stdint.h>

/* Activations of up to `cap` rows, packed block-major so that rows never alias in L1.
 *   CLB_ACT_F32: q = float [nb][cap][32]
 *   CLB_ACT_Q8:  q = int8  [nb][cap][32], d = float [nb][cap] scales, s = int32 [nb][cap] sums of the block's q
 * Padding beyond k is zero. */
typedef struct clb_act {
    void *q;
    float *d;
    int32_t *s;
    uint32_t cap;
    uint32_t nb;
} clb_act_t;

/* n panels of one matrix, `stride` bytes apart, each [nb] blocks of 16 rows and 32 k. */
typedef struct clb_panels {
    const void *data;
    size_t stride;
    uint32_t n, nb;
} clb_panels_t;
static inline const uint8_t *clb_panel_at(const clb_panels_t *w, uint32_t p) {
    return (const uint8_t *)w->data + p * w->stride;
}

/* y[r * ldy + i] = sum over k of w[i][k] * x[row0 + r][k], for r in [0, rows) and the 16 n rows i of the panels.
 *   float formats: per block of 32, sum = fma(w, x, sum) for k ascending, padding included, sum starting at +0; then
 *     acc = acc + sum, blocks ascending, acc starting at +0. One chain over all of k loses enough
 *     accuracy to flip a near tie of the router in the golden texts; a sum per block does not, and its chains overlap.)
 *   q8, q4: per block, i = exact integer dot of w and q; acc = fma((float)i, w_scale * d, acc), blocks ascending. */
typedef void clb_gemm_fn(const clb_panels_t *w, const clb_act_t *x, uint32_t row0, uint32_t rows, float *y, size_t ldy);

/* Packs x[n] into row `row`, from block `block0` on; the tail of the last block is zero.
 * Q8 block: a = max |x| compared as bits; a not finite: d = NaN, q = 0, s = 0; a < 2^-100: d = 0, q = 0, s = 0;
 * else d = a / 127, q = rne(x * (127 / a)), s = sum q. |q| <= 127 follows. */
typedef void clb_pack_fn(const float *x, uint32_t n, const clb_act_t *act, uint32_t block0, uint32_t row);

/* y = (x * inv) * w, inv = 1 / sqrt(ss / n + eps), ss = 16 lanes by index mod 16 of fma(x, x, acc), then the tree. */
typedef void clb_rmsnorm_fn(const float *x, const float *w, float eps, uint32_t n, float *y);

/* g[i] = (g[i] / (1 + exp(-g[i]))) * u[i]; exp as clb_expf (base/math.h). */
typedef void clb_silu_mul_fn(float *g, const float *u, uint32_t n);

/* Rotates the pairs (i, i + n/2) of x[n]: x1' = fma(x1, c, -(x2 * s)), x2' = fma(x2, c, x1 * s), c/s float [n/2];
 * then, if scale is not 1, each result times scale. */
typedef void clb_rope_fn(float *x, const float *c, const float *s, float scale, uint32_t n);

/* Stores x[n] as one KV row of hdp elements (n rounded up to 16, the rest zero). f16 by RNE. Returns 0, or -1 if a
 * stored value is not finite. */
typedef int clb_kv_store_fn(const float *x, uint32_t n, void *row);

/* scores[h * ld + j] = q[h] . k[j] for h in [0, nq), j in [0, n): 16 lanes by d mod 16 of fma(q, k, acc), d ascending,
 * then the tree. q: float [nq][hdp]; k: KV rows [n][hdp]. */
typedef void clb_attn_scores_fn(const float *q, uint32_t nq, const void *k, uint32_t n, uint32_t hdp, float *scores,
                                size_t ld);

/* p[n], n a multiple of 16: m = max p; p = exp(p - m), exactly 0 where p was -inf; returns the sum in 16 lanes by
 * index mod 16, ascending, then the tree. At least one p is finite, unless all are NaN or some +inf (result NaN). */
typedef float clb_softmax_fn(float *p, uint32_t n);

/* acc[h * hdp + d] = fma(p[h * ld + j], v[j][d], acc) for j ascending. acc: float [nq][hdp]; v: KV rows [n][hdp]. */
typedef void clb_attn_accumulate_fn(const float *p, size_t ld, uint32_t nq, const void *v, uint32_t n, uint32_t hdp,
                                    float *acc);

/* acc[i] = fma(w, x[i], acc[i]) */
typedef void clb_axpy_fn(float w, const float *x, uint32_t n, float *acc);
/* x[i] *= w */
typedef void clb_scale_fn(float w, uint32_t n, float *x);
/* acc[i] += x[i] */
typedef void clb_add_fn(const float *x, uint32_t n, float *acc);

/* *m = the largest x that is not NaN, a zero being +0, or -inf. Returns 0, or -1 if an x is not finite. */
typedef int clb_finite_max_fn(const float *x, uint32_t n, float *m);
/* sum of (double)exp(x[i] - m) in 16 double lanes by index mod 16 (the tail adds nothing), then the tree. */
typedef double clb_exp_sum_fn(const float *x, uint32_t n, float m);

/* ---- the sampler's (sampler/sampler.c has the definition) ---- */

/* The first i in [from, n) with x[i] > low; n if there is none. */
typedef uint32_t clb_above_fn(const float *x, uint32_t from, uint32_t n, float low);

/* v[i] = x[i] where bit i % 32 of bits[i / 32] is set, else -inf. */
typedef void clb_allow_fn(const float *x, const uint32_t *bits, uint32_t n, float *v);

/* Bucket b holds the values whose distance from the maximum is in [b/64, (b+1)/64), the last one everything farther
 * away and -inf, all of weight 0. A bucket is a monotone function of the value. */
enum { CLB_BUCKETS = 2048, CLB_BUCKETS_PER_UNIT = 64 };

/* bucket[i] = (int)(64 * (m - x[i] / t)), at most CLB_BUCKETS - 1. With mass not NULL also: w = clb_weight(clb_expf(
 * x[i] / t - m)), mass[bucket[i]] += w for buckets below limit; returns the sum of all w (0 if mass is NULL).
 * m >= every x / t; x not NaN. */
typedef uint64_t clb_spread_fn(const float *x, uint32_t n, float t, float m, uint32_t limit, uint16_t *bucket,
                               uint64_t *mass);

/* Writes the i with low <= bucket[i] < low + n_buckets to ids, ascending, and returns how many there are. ids has room
 * for n, and n is a multiple of 16. low + n_buckets <= 2^16. */
typedef uint32_t clb_members_fn(const uint16_t *bucket, uint32_t n, uint32_t low, uint32_t n_buckets, uint32_t *ids);

/* p = clb_expf(x[i] - m); w[i] = p < least ? 0 : clb_weight(p). m >= every x, least >= 0. */
typedef void clb_weigh_fn(const float *x, uint32_t n, float m, float least, uint64_t *w);

/* CLB_KERNEL(slot, type): a scalar slot. Format- and KV-indexed slots are declared by their own lists. */
typedef struct clb_kernels {
    clb_gemm_fn *gemm[CLB_FORMATS];
    clb_pack_fn *pack[2];                        /* by clb_act_kind */
    clb_kv_store_fn *kv_store[2];                /* by colibri_kv_format_t */
    clb_attn_scores_fn *attn_scores[2];
    clb_attn_accumulate_fn *attn_accumulate[2];
#define CLB_KERNEL(slot) clb_##slot##_fn *slot;
#include "kernels.def"
#undef CLB_KERNEL
} clb_kernels_t;

/* Fills *table for instruction set `isa` (colibri_isa_t, not AUTO): ref first, then each lower set's overrides. */
void clb_kernels_fill(clb_kernels_t *table, uint32_t isa);

void clb_kernels_ref(clb_kernels_t *table);    /* fills every slot */
void clb_kernels_avx2(clb_kernels_t *table);   /* overrides; empty where the compiler's target is not x86-64 */
void clb_kernels_avx512(clb_kernels_t *table);
#endif
