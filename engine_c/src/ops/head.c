/* Final norm and logits, only for the rows that want them. */
#include "linear.h"

static void pack_row(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)arg;
    const struct colibri_model *m = st->m;
    uint32_t row = st->tokens[t].out_row, kind = m->head.format->act;
    if (row == UINT32_MAX) return;
    m->kernels.rmsnorm(st->x + (size_t)t * m->g.hidden, m->final_norm, m->norm_eps, m->g.hidden, lane->row);
    m->kernels.pack[kind](lane->row, m->g.hidden, &st->in.kind[kind], 0, row);
}

static void check_row(clb_step_t *st, const void *arg, uint32_t t, clb_lane_t *lane) {
    (void)arg, (void)lane;
    const clb_token_t *tok = &st->tokens[t];
    float max;
    if (tok->out_row == UINT32_MAX) return;
    if (st->m->kernels.finite_max(st->logits + (size_t)tok->out_row * st->m->g.vocab, st->m->g.vocab, &max))
        clb_flag(st, tok->seq);
}

void clb_head(clb_step_t *st) {
    const clb_matrix_t *w = &st->m->head;
    if (!st->n_out) return;
    clb_run_rows(st, pack_row, NULL, st->n_tokens);
    clb_linears(st, &(clb_linear_t){w, &st->in, st->n_out, st->logits, st->m->g.vocab, 0}, 1);
    clb_run(st, check_row, NULL, st->n_tokens);
}
