/* Token embedding and the rotary angles of this step's positions. */
#include "../base/fp.h"
#include "step.h"

/* cos, sin of (double)pos * f32 frequency (RoFormer, Su et al. 2021). */
static void angles(const struct colibri_model *m, uint32_t pos, float *c, float *s) {
    for (uint32_t i = 0; i < m->g.head_dim / 2; i++) {
        double sin, cos;
        clb_sincos((double)pos * (double)m->rope_freqs[i], &sin, &cos);
        c[i] = (float)cos;
        s[i] = (float)sin;
    }
}

static void chunk_fn(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)arg, (void)lane;
    const struct colibri_model *m = st->m;
    const clb_token_t *tok = &st->tokens[t];
    const colibri_sequence_t *seq = clb_sequence(st, tok->seq);
    const clb_matrix_t *e = &m->embed;
    size_t half = m->g.head_dim / 2, at = t * 2 * half;
    e->format->row(e->data + tok->id / CLB_PANEL * e->stride, tok->id % CLB_PANEL, m->g.hidden,
                   st->x + (size_t)t * m->g.hidden);
    angles(m, tok->pos, st->cos + at, st->sin + at);
    if (tok->pinned_rope) angles(m, seq->pinned + seq->window - 1, st->cos + at + half, st->sin + at + half);
}

void clb_embed(clb_step_t *st) { clb_run_rows(st, chunk_fn, NULL, st->n_tokens); }
