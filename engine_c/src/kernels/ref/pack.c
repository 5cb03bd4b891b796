/* Reference packing of activations. */
#include "../../base/fp.h"
#include "ref.h"

void clb_ref_pack_f32(const float *x, uint32_t n, const clb_act_t *act, uint32_t block0, uint32_t row) {
    for (uint32_t b = 0, k = 0; k < n; b++, k += CLB_BLOCK) {
        float *q = (float *)act->q + ((size_t)(block0 + b) * act->cap + row) * CLB_BLOCK;
        for (uint32_t i = 0; i < CLB_BLOCK; i++) q[i] = k + i < n ? x[k + i] : 0.0f;
    }
}

static uint32_t max_bits(const float *x, uint32_t n) {
    uint32_t m = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t a = clb_bits(x[i]) & 0x7fffffffu;
        m = a > m ? a : m;
    }
    return m;
}

static int32_t quantise(const float *x, uint32_t n, float inv, int8_t *q) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        q[i] = (int8_t)(int32_t)clb_rnef(x[i] * inv);
        sum += q[i];
    }
    return sum;
}

void clb_ref_pack_q8(const float *x, uint32_t n, const clb_act_t *act, uint32_t block0, uint32_t row) {
    for (uint32_t b = 0, k = 0; k < n; b++, k += CLB_BLOCK) {
        size_t at = (size_t)(block0 + b) * act->cap + row;
        int8_t *q = (int8_t *)act->q + at * CLB_BLOCK;
        uint32_t len = n - k < CLB_BLOCK ? n - k : CLB_BLOCK, bits = max_bits(x + k, len);
        float amax = clb_float(bits);
        memset(q, 0, CLB_BLOCK);
        act->s[at] = 0;
        act->d[at] = bits >= 0x7f800000u ? CLB_NAN : 0.0f;
        if (bits >= 0x7f800000u || amax < 0x1p-100f) continue;
        act->d[at] = amax / 127.0f;
        act->s[at] = quantise(x + k, len, 127.0f / amax, q);
    }
}
