/* Reference row kernels. */
#include "../../base/fp.h"
#include "ref.h"

void clb_ref_rmsnorm(const float *x, const float *w, float eps, uint32_t n, float *y) {
    float lanes[16] = {0};
    for (uint32_t i = 0; i < n; i++) lanes[i & 15] = clb_fmaf(x[i], x[i], lanes[i & 15]);
    float inv = 1.0f / clb_sqrtf(clb_tree16(lanes) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) y[i] = (x[i] * inv) * w[i];
}

void clb_ref_silu_mul(float *g, const float *u, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) g[i] = (g[i] / (1.0f + clb_expf(-g[i]))) * u[i];
}

void clb_ref_rope(float *x, const float *c, const float *s, float scale, uint32_t n) {
    uint32_t half = n / 2;
    for (uint32_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        float p = clb_fmaf(a, c[i], -(b * s[i])), q = clb_fmaf(b, c[i], a * s[i]);
        x[i] = scale != 1.0f ? p * scale : p;
        x[i + half] = scale != 1.0f ? q * scale : q;
    }
}

float clb_ref_softmax(float *p, uint32_t n) {
    float m = -CLB_INF, lanes[16] = {0};
    for (uint32_t i = 0; i < n; i++) m = p[i] > m ? p[i] : m;
    for (uint32_t i = 0; i < n; i++) {
        p[i] = clb_expf(p[i] - m);
        lanes[i & 15] += p[i];
    }
    return clb_tree16(lanes);
}

void clb_ref_axpy(float w, const float *x, uint32_t n, float *acc) {
    for (uint32_t i = 0; i < n; i++) acc[i] = clb_fmaf(w, x[i], acc[i]);
}
void clb_ref_scale(float w, uint32_t n, float *x) {
    for (uint32_t i = 0; i < n; i++) x[i] *= w;
}
void clb_ref_add(const float *x, uint32_t n, float *acc) {
    for (uint32_t i = 0; i < n; i++) acc[i] += x[i];
}

int clb_ref_finite_max(const float *x, uint32_t n, float *m) {
    int bad = 0;
    float best = -CLB_INF;
    for (uint32_t i = 0; i < n; i++) {
        bad |= !clb_finite(x[i]);
        best = x[i] > best ? x[i] : best;
    }
    *m = best + 0.0f; /* never -0, so that it does not matter which zero came first */
    return -bad;
}

double clb_ref_exp_sum(const float *x, uint32_t n, float m) {
    double lanes[16] = {0};
    for (uint32_t i = 0; i < n; i++) lanes[i & 15] += (double)clb_expf(x[i] - m);
    return clb_tree16d(lanes);
}
