/* What the public functions share. */
#ifndef CLB_API_H
#define CLB_API_H
#include "../base/buffer.h"
#include "../model/model.h"

/* Sizes of the public structs in ABI 1.0, the least that a caller may pass. */
#define CLB_MIN_ERROR CLB_SIZE_TO(colibri_error_t, message)
#define CLB_MIN_BUFFER CLB_SIZE_TO(colibri_buffer_t, reserved)
#define CLB_MIN_CONFIG CLB_SIZE_TO(colibri_config_t, expert_tokens)
#define CLB_MIN_INFO CLB_SIZE_TO(colibri_model_info_t, numerics_class)
#define CLB_MIN_SEQUENCE CLB_SIZE_TO(colibri_sequence_t, status)
#define CLB_MIN_BATCH CLB_SIZE_TO(colibri_batch_t, reserved)

/* Returns its status from the calling function if it is not OK. */
#define CLB_TRY(call)                          \
    do {                                       \
        colibri_status_t status_ = (call);     \
        if (status_ != COLIBRI_OK) return status_; \
    } while (0)

colibri_status_t clb_model_check(const colibri_model_t *model, colibri_error_t *err);
uint64_t clb_workspace_bytes(const colibri_model_t *model);
#endif
