/* The immutable model view that colibri_init builds in the caller's memory, and what an architecture is. */
#ifndef CLB_MODEL_H
#define CLB_MODEL_H
#include "../../include/colibri.h"
#include "../kernels/kernels.h"

typedef struct clb_geometry {
    uint32_t vocab, hidden, layers, heads, kv_heads, head_dim, inter, experts, top_k, context, window;
    uint32_t norm_eps_bits, tied_head;
} clb_geometry_t;

/* A matrix [rows, cols] in panels. For experts data is NULL and offset is relative to the expert's extent. */
typedef struct clb_matrix {
    const clb_format_t *format;
    const uint8_t *data;
    uint64_t offset;
    size_t stride; /* bytes of one panel */
    uint32_t format_id, rows, cols, nb, panels;
} clb_matrix_t;

typedef struct clb_layer {
    const float *attn_norm, *ffn_norm;  /* [hidden] */
    clb_matrix_t q, k, v, o;            /* [heads*hd, hidden] [kv_heads*hd, hidden] x2 [hidden, heads*hd] */
    clb_matrix_t router;                /* [experts, hidden] f32; data NULL if experts is 1 */
    clb_matrix_t gate, up, down;        /* the shape of every expert of this layer, offsets within an extent */
    const uint64_t *expert_offset;      /* [experts] of the extent in experts.bin */
    uint64_t expert_bytes;
} clb_layer_t;

/* What a role's shape is made of; see rules below. */
typedef enum clb_dim {
    CLB_DIM_NONE, CLB_DIM_VOCAB, CLB_DIM_HIDDEN, CLB_DIM_Q, CLB_DIM_KV, CLB_DIM_INTER, CLB_DIM_EXPERTS,
    CLB_DIM_HALF_HEAD
} clb_dim_t;
typedef enum clb_place { CLB_PER_MODEL, CLB_PER_LAYER, CLB_PER_EXPERT } clb_place_t;

/* When a model has a tensor; otherwise the tensor is refused. */
typedef enum clb_need { CLB_ALWAYS, CLB_UNLESS_TIED, CLB_IF_ROUTED /* experts > 1 */ } clb_need_t;

/* One kind of tensor: dim1 NONE = a vector (layout row, f32). */
typedef struct clb_rule {
    const char *role;
    clb_place_t place;
    clb_dim_t dim0, dim1;
    int f32_only;
    clb_need_t need;
    size_t target; /* offsetof in colibri_model (per model) or clb_layer_t (per layer, per expert) */
} clb_rule_t;

struct clb_step;
/* An architecture: which tensors it has, what geometry it allows, and how one layer is computed. */
typedef struct clb_arch {
    const char *name;
    const clb_rule_t *rules;
    uint32_t n_rules;
    /* NULL if the geometry is allowed, else what is wrong */
    const char *(*check)(const clb_geometry_t *g);
    /* residual stream x of all tokens through layer `layer`; errors are recorded in the step */
    void (*layer)(struct clb_step *step, uint32_t layer);
} clb_arch_t;

/* The i-th file's buffer; the caller's struct may be larger than ours. */
static inline colibri_buffer_t *clb_weights_at(const colibri_config_t *c, uint32_t i) {
    return (colibri_buffer_t *)(void *)((uint8_t *)c->weights + (size_t)i * c->weights->struct_size);
}

const clb_arch_t *clb_arch_find(const char *name, size_t n); /* NULL if unknown */

struct colibri_model {
    uint64_t magic;
    clb_geometry_t g;
    const clb_arch_t *arch;
    clb_kernels_t kernels;
    colibri_config_t config; /* normalised copy: defaults filled; manifest and weights pointers cleared */
    colibri_buffer_t *files[2]; /* dense, experts: the caller's buffers, one reference each */
    colibri_buffer_t *view;
    const uint8_t *experts;  /* base of experts.bin, NULL with expert_fetch */
    clb_layer_t *layers;     /* [g.layers] */
    clb_matrix_t embed, head; /* head = embed if tied */
    const float *final_norm; /* [hidden] */
    const float *rope_freqs; /* [head_dim/2] */
    uint64_t weight_bytes, expert_bytes;
    float norm_eps;
    uint32_t hdp;            /* head_dim rounded up to 16 */
    uint64_t slab_bytes;
};
#define CLB_MODEL_MAGIC 0x31304952424c4f43ull /* "COLBRI01" */

/* Parses config->manifest and fills the view (clearing it first; magic, kernels, config and view are left to the
 * caller). With model NULL only the size of the view is computed (*bytes) and neither tensors nor weights are looked
 * at; the size is at most a small multiple of the manifest's. The caller has checked that *model has that many bytes.
 * Tensor data pointers are set from config->weights; nothing behind them is read. The tables the model needs (layers,
 * expert offsets) are carved from memory right after *model; total size is *bytes in both calls. */
colibri_status_t clb_load(const colibri_config_t *config, struct colibri_model *model, uint64_t *bytes,
                          colibri_error_t *err);
#endif
