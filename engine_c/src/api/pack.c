/* Packing of matrices into panels, for converters: the one definition of the layouts is quant/. */
#include "../base/checked.h"
#include "../base/fpenv.h"
#include "../quant/format.h"
#include "api.h"
#include <string.h>

enum { LONGEST_NAME = 16 };

static const clb_format_t *find(const char *name) {
    size_t n = 0;
    while (name && n < LONGEST_NAME && name[n]) n++;
    int id = name ? clb_format_find(name, n) : -1;
    return id < 0 ? NULL : clb_format((uint32_t)id);
}

uint64_t colibri_panel_bytes(const char *format, uint64_t rows, uint64_t cols) {
    const clb_format_t *f = find(format);
    uint64_t stride, bytes;
    if (!f || !rows || !cols || rows > UINT32_MAX - CLB_PANEL || cols > UINT32_MAX - CLB_BLOCK) return 0;
    stride = clb_panel_stride(f, clb_blocks((uint32_t)cols));
    return clb_mul(stride, clb_panels((uint32_t)rows), &bytes) ? 0 : bytes;
}

typedef struct matrix {
    const clb_format_t *f;
    uint64_t rows, cols;
    const float *w;
    const int8_t *q;
    const uint16_t *scales;
} matrix_t;

/* Block (panel p, block b) of the source, padded with zeros: [32 k][16 rows]. */
static void take_floats(const matrix_t *m, uint64_t p, uint64_t b, float *out) {
    memset(out, 0, CLB_BLOCK * CLB_PANEL * sizeof *out);
    for (uint64_t l = 0; l < CLB_PANEL && p * CLB_PANEL + l < m->rows; l++)
        for (uint64_t k = 0; k < CLB_BLOCK && b * CLB_BLOCK + k < m->cols; k++)
            out[k * CLB_PANEL + l] = m->w[(p * CLB_PANEL + l) * m->cols + b * CLB_BLOCK + k];
}

static void take_quants(const matrix_t *m, uint64_t p, uint64_t b, int8_t *q, uint16_t *scale) {
    memset(q, 0, CLB_BLOCK * CLB_PANEL);
    memset(scale, 0, CLB_PANEL * sizeof *scale);
    for (uint64_t l = 0; l < CLB_PANEL && p * CLB_PANEL + l < m->rows; l++) {
        uint64_t row = p * CLB_PANEL + l;
        scale[l] = m->scales[row * (m->cols / CLB_BLOCK) + b];
        for (uint64_t k = 0; k < CLB_BLOCK; k++) q[k * CLB_PANEL + l] = m->q[row * m->cols + b * CLB_BLOCK + k];
    }
}

static int pack_block(const matrix_t *m, uint64_t p, uint64_t b, void *block) {
    float w[CLB_BLOCK * CLB_PANEL];
    int8_t q[CLB_BLOCK * CLB_PANEL];
    uint16_t scale[CLB_PANEL];
    if (m->w) {
        take_floats(m, p, b, w);
        return m->f->pack(w, block);
    }
    take_quants(m, p, b, q, scale);
    return m->f->pack_quants(q, scale, block);
}

static colibri_status_t pack_all(const matrix_t *m, uint8_t *out, colibri_error_t *err) {
    uint32_t nb = clb_blocks((uint32_t)m->cols), panels = clb_panels((uint32_t)m->rows);
    size_t stride = clb_panel_stride(m->f, nb);
    for (uint64_t p = 0; p < panels; p++) {
        uint8_t *panel = out + p * stride;
        memset(panel + (size_t)nb * m->f->block_bytes, 0, stride - (size_t)nb * m->f->block_bytes);
        for (uint64_t b = 0; b < nb; b++)
            if (pack_block(m, p, b, panel + b * m->f->block_bytes))
                return clb_fail(err, COLIBRI_WEIGHT_RANGE,
                                "rows %u..%u, columns %u..%u hold a value that is not finite or does not fit %s",
                                p * CLB_PANEL, p * CLB_PANEL + CLB_PANEL - 1, b * CLB_BLOCK,
                                b * CLB_BLOCK + CLB_BLOCK - 1, m->f->name);
    }
    return COLIBRI_OK;
}

static colibri_status_t check(const matrix_t *m, const char *format, const void *source, const void *panels,
                              colibri_error_t *err) {
    if (!m->f) return clb_fail(err, COLIBRI_UNSUPPORTED, "unknown format '%s'", format ? format : "(null)");
    if (!colibri_panel_bytes(format, m->rows, m->cols))
        return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "shape [%u, %u] is empty or too large", m->rows, m->cols);
    if (!source || !panels) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "a pointer is NULL");
    if ((uintptr_t)panels % COLIBRI_ALIGNMENT) return clb_fail(err, COLIBRI_MISALIGNED, "panels are not aligned to 64");
    return COLIBRI_OK;
}

colibri_status_t colibri_panel_pack(const char *format, uint64_t rows, uint64_t cols, const float *w, void *out,
                                    colibri_error_t *err) {
    matrix_t m = {find(format), rows, cols, w, NULL, NULL};
    CLB_TRY(check(&m, format, w, out, err));
    clb_fpenv_t env = clb_fpenv_enter();
    colibri_status_t status = pack_all(&m, out, err);
    clb_fpenv_leave(env);
    return status;
}

colibri_status_t colibri_panel_pack_quants(const char *format, uint64_t rows, uint64_t cols, const int8_t *q,
                                           const uint16_t *scales, void *out, colibri_error_t *err) {
    matrix_t m = {find(format), rows, cols, NULL, q, scales};
    CLB_TRY(check(&m, format, q && scales ? q : NULL, out, err));
    if (!m.f->pack_quants) return clb_fail(err, COLIBRI_UNSUPPORTED, "%s has no quantised blocks", format);
    if (cols % CLB_BLOCK) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "cols is %u, not a multiple of 32", cols);
    return pack_all(&m, out, err);
}

colibri_status_t colibri_panel_unpack(const char *format, uint64_t rows, uint64_t cols, const void *panels, float *w,
                                      colibri_error_t *err) {
    matrix_t m = {find(format), rows, cols, NULL, NULL, NULL};
    CLB_TRY(check(&m, format, w, panels, err));
    size_t stride = clb_panel_stride(m.f, clb_blocks((uint32_t)cols));
    clb_fpenv_t env = clb_fpenv_enter();
    for (uint64_t r = 0; r < rows; r++)
        m.f->row((const uint8_t *)panels + r / CLB_PANEL * stride, (uint32_t)(r % CLB_PANEL), (uint32_t)cols,
                 w + r * cols);
    clb_fpenv_leave(env);
    return COLIBRI_OK;
}
