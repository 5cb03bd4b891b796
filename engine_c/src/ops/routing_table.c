/* Building and reading the int8 routing table. */
#include "routing_table.h"
#include "../base/checked.h"
#include "../base/fp.h"

typedef struct head { float scale[CLB_PANEL], zero[CLB_PANEL]; } head_t;

static size_t panel_bytes(const struct colibri_model *m) {
    return sizeof(head_t) + (size_t)clb_blocks(m->g.hidden) * CLB_BLOCK * CLB_PANEL;
}
static const uint8_t *panel_at(const struct colibri_model *m, const uint8_t *table, uint32_t layer, uint32_t panel) {
    return table + ((size_t)layer * clb_panels(m->g.experts) + panel) * panel_bytes(m);
}

int clb_routing_bytes(const struct colibri_model *m, uint64_t *bytes) {
    if (m->g.experts == 1) return -1;
    return clb_mul((uint64_t)m->g.layers * clb_panels(m->g.experts), panel_bytes(m), bytes);
}

static void fill_lane(const float *w, uint32_t n, uint32_t lane, head_t *head, int8_t *q) {
    float lo = w[lane], hi = w[lane];
    for (uint32_t k = 0; k < n; k++) {
        float x = w[k * CLB_PANEL + lane];
        lo = x < lo ? x : lo;
        hi = x > hi ? x : hi;
    }
    float scale = (hi - lo) / 255.0f;
    head->scale[lane] = scale;
    head->zero[lane] = lo + 128.0f * scale;
    for (uint32_t k = 0; k < n; k++) {
        float s = scale > 0 ? clb_rnef((w[k * CLB_PANEL + lane] - lo) / scale) - 128.0f : -128.0f;
        q[k * CLB_PANEL + lane] = (int8_t)(s > 127.0f ? 127.0f : s);
    }
}

void clb_routing_fill(const struct colibri_model *m, uint8_t *table) {
    for (uint32_t l = 0; l < m->g.layers; l++)
        for (uint32_t p = 0; p < clb_panels(m->g.experts); p++) {
            uint8_t *at = table + (panel_at(m, table, l, p) - table);
            memset(at, 0, panel_bytes(m));
            const float *w = (const float *)(const void *)(m->layers[l].router.data + p * m->layers[l].router.stride);
            for (uint32_t lane = 0; lane < CLB_PANEL; lane++)
                fill_lane(w, m->g.hidden, lane, (head_t *)(void *)at, (int8_t *)at + sizeof(head_t));
        }
}

void clb_routing_panel(const struct colibri_model *m, const uint8_t *table, uint32_t layer, uint32_t panel, float *w) {
    const uint8_t *at = panel_at(m, table, layer, panel);
    const head_t *head = (const head_t *)(const void *)at;
    const int8_t *q = (const int8_t *)at + sizeof(head_t);
    size_t n = (size_t)m->g.hidden * CLB_PANEL, padded = (size_t)clb_blocks(m->g.hidden) * CLB_BLOCK * CLB_PANEL;
    for (size_t i = 0; i < n; i++) w[i] = (float)q[i] * head->scale[i % CLB_PANEL] + head->zero[i % CLB_PANEL];
    memset(w + n, 0, (padded - n) * sizeof *w);
}
