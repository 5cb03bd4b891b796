/* Reference attention kernels: KV rows as stored, f16 or f32. */
#include "../../base/fp.h"
#include "ref.h"

int clb_ref_kv_store_f16(const float *x, uint32_t n, void *row) {
    uint16_t *out = row;
    int bad = 0;
    for (uint32_t i = 0; i < ((n + 15) & ~15u); i++) {
        out[i] = i < n ? clb_f32_to_f16(x[i]) : 0;
        bad |= (out[i] & 0x7c00u) == 0x7c00u;
    }
    return -bad;
}

int clb_ref_kv_store_f32(const float *x, uint32_t n, void *row) {
    float *out = row;
    int bad = 0;
    for (uint32_t i = 0; i < ((n + 15) & ~15u); i++) {
        out[i] = i < n ? x[i] : 0.0f;
        bad |= !clb_finite(out[i]);
    }
    return -bad;
}

typedef float load_fn(const void *row, uint32_t i);
static float load_f16(const void *row, uint32_t i) { return clb_f16_to_f32(((const uint16_t *)row)[i]); }
static float load_f32(const void *row, uint32_t i) { return ((const float *)row)[i]; }

static void scores(load_fn *load, size_t row_bytes, const float *q, uint32_t nq, const void *k, uint32_t n,
                   uint32_t hdp, float *out, size_t ld) {
    for (uint32_t h = 0; h < nq; h++)
        for (uint32_t j = 0; j < n; j++) {
            const void *row = (const uint8_t *)k + j * row_bytes;
            float lanes[16] = {0};
            for (uint32_t d = 0; d < hdp; d++) lanes[d & 15] = clb_fmaf(q[h * hdp + d], load(row, d), lanes[d & 15]);
            out[h * ld + j] = clb_tree16(lanes);
        }
}

static void accumulate(load_fn *load, size_t row_bytes, const float *p, size_t ld, uint32_t nq, const void *v,
                       uint32_t n, uint32_t hdp, float *acc) {
    for (uint32_t h = 0; h < nq; h++)
        for (uint32_t j = 0; j < n; j++) {
            const void *row = (const uint8_t *)v + j * row_bytes;
            for (uint32_t d = 0; d < hdp; d++)
                acc[h * hdp + d] = clb_fmaf(p[h * ld + j], load(row, d), acc[h * hdp + d]);
        }
}

void clb_ref_attn_scores_f16(const float *q, uint32_t nq, const void *k, uint32_t n, uint32_t hdp, float *s,
                             size_t ld) {
    scores(load_f16, hdp * 2u, q, nq, k, n, hdp, s, ld);
}
void clb_ref_attn_scores_f32(const float *q, uint32_t nq, const void *k, uint32_t n, uint32_t hdp, float *s,
                             size_t ld) {
    scores(load_f32, hdp * 4u, q, nq, k, n, hdp, s, ld);
}
void clb_ref_attn_accumulate_f16(const float *p, size_t ld, uint32_t nq, const void *v, uint32_t n, uint32_t hdp,
                                 float *acc) {
    accumulate(load_f16, hdp * 2u, p, ld, nq, v, n, hdp, acc);
}
void clb_ref_attn_accumulate_f32(const float *p, size_t ld, uint32_t nq, const void *v, uint32_t n, uint32_t hdp,
                                 float *acc) {
    accumulate(load_f32, hdp * 4u, p, ld, nq, v, n, hdp, acc);
}
