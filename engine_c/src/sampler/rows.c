/* Many rows over the caller's threads. */
#include "sampler.h"

typedef struct clb_rows {
    const struct colibri_model *model;
    uint8_t *draws; /* [n], `stride` apart */
    uint64_t stride, bytes; /* bytes of a lane's scratch */
    uint8_t *scratch;
    uint32_t n, next;
} clb_rows_t;

/* Lanes claim rows one by one, so a preempted lane's share is taken by the others; the scratch is the lane's. */
static void run_lane(void *arg, uint32_t lane) {
    clb_rows_t *rows = arg;
    colibri_buffer_t scratch = {.struct_size = sizeof scratch, .type = COLIBRI_WORKSPACE, .size = rows->bytes,
                                .ptr = rows->scratch + lane * rows->bytes, .alignment = COLIBRI_ALIGNMENT};
    for (uint32_t i; (i = __atomic_fetch_add(&rows->next, 1, __ATOMIC_RELAXED)) < rows->n;) {
        colibri_draw_t *draw = (void *)(rows->draws + i * rows->stride);
        draw->status = (int32_t)colibri_sample(rows->model, draw->sampling, draw->logits, &scratch, draw->sample,
                                               draw->error);
    }
}

static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

colibri_status_t colibri_sample_rows(const colibri_model_t *model, colibri_draw_t *draws, uint32_t n,
                                     colibri_buffer_t *scratch, colibri_error_t *err) {
    uint64_t bytes;
    colibri_status_t status = clb_sampler_model_check(model, err);
    if (status || !n) return status;
    if ((status = clb_struct_check(draws, CLB_SIZE_TO(colibri_draw_t, error), "draws", err))) return status;
    colibri_sample_size(model, &bytes);
    if ((status = clb_buffer_check(scratch, "scratch", COLIBRI_WORKSPACE, bytes, err))) return status;
    const colibri_config_t *c = &model->config;
    uint32_t lanes = (uint32_t)least_of(least_of(n, c->threads), scratch->size / bytes);
    clb_rows_t rows = {model, (void *)draws, draws->struct_size, bytes, scratch->ptr, n, 0};
    clb_buffer_acquire(scratch);
    if (lanes > 1 && c->parallel_for) c->parallel_for(c->parallel_ctx, run_lane, &rows, lanes);
    else run_lane(&rows, 0);
    clb_buffer_release(scratch);
    return COLIBRI_OK;
}
