/* One forward step: the state every operation works on, and how work is spread over the caller's threads.
 *
 * A step is a series of phases. A phase has n independent chunks; clb_run hands them to config.threads lanes, each lane
 * claims chunks from one atomic counter (so a preempted thread's share is taken by the others) and owns scratch that no
 * other lane touches. A chunk's result depends on its number only, never on the lane or the order. */
#ifndef CLB_STEP_H
#define CLB_STEP_H
#include "../base/arena.h"
#include "../model/model.h"

/* An attention tile has at most CLB_TILE_ROWS rows (queries times heads of a group, at least one query), at most
 * CLB_TILE_QUERIES queries, and where there is a choice at most CLB_TILE_SCORES scores, so that they stay in L2. */
enum { CLB_TILE_ROWS = 64, CLB_TILE_QUERIES = 32, CLB_TILE_SCORES = 384 * 1024 };
enum { CLB_ROW_TILE = 64 }; /* rows that share one pass over a panel; keeps activations in L2 */

typedef struct clb_lane {
    float *row;     /* [max(hidden, heads*head_dim) rounded up to 32] */
    float *gate;    /* [CLB_ROW_TILE][32] */
    float *up;      /* [CLB_ROW_TILE][32] */
    float *q;       /* [2][rows][hdp]: queries for window keys, for pinned keys; rows = tile_queries * group */
    float *out;     /* [rows][hdp] */
    float *scores;  /* [score_floats] */
    float *sums;    /* [rows] softmax denominators */
    float *router;  /* [hidden padded][16]: one dequantised panel of the int8 table */
} clb_lane_t;

/* Rows of packed activations are kept at an odd count: blocks at a power-of-two stride would fall into few L1 sets. */
static inline uint32_t clb_odd(uint32_t rows) { return rows | 1u; }

/* The same rows packed for each dot-product partner that somebody needs. */
typedef struct clb_acts {
    clb_act_t kind[2];
} clb_acts_t;

/* Rows of one expert: activations [nb][odd(rows)][32] of its own, outputs [first, first + rows) of the sorted order. */
typedef struct clb_bucket {
    uint32_t expert, first, rows;
    const uint8_t *data; /* the expert's extent */
} clb_bucket_t;

typedef struct clb_token {
    uint32_t id, seq, pos, out_row; /* out_row: row in logits, or UINT32_MAX */
    int pinned_rope;                /* the query meets pinned keys at another position */
} clb_token_t;

typedef struct clb_tile {
    uint32_t first, n; /* queries [first, first + n) */
    uint32_t shared;   /* keys [0, shared) are in the same slabs for all of them; 0 if they are of one sequence */
} clb_tile_t;

typedef struct clb_step {
    const struct colibri_model *m;
    colibri_batch_t *batch;
    uint8_t *arena;       /* KV */
    float *logits;        /* [n_out, vocab] */
    const uint8_t *routing;
    uint32_t n_tokens, n_out;
    int32_t status;       /* first failure of a callback or cancel; atomic */

    clb_token_t *tokens;  /* [max_tokens] */
    clb_tile_t *tiles;    /* [max_tokens] attention's, n_tiles of them in this step */
    uint32_t *bad;        /* [max_sequences] atomic flags: non-finite seen */
    float *x;             /* [max_tokens][hidden] residual stream */
    float *cos, *sin;     /* [max_tokens][2][head_dim/2]: at t, and at the pinned query position */
    float *q, *k, *v;     /* [max_tokens][ldq], [max_tokens][ldk] x2 */
    float *attn;          /* [max_tokens][ldq] */
    clb_acts_t in;        /* hidden, normalised */
    clb_acts_t mid;       /* attention output */
    float *route;         /* [max_tokens][experts rounded up to 16] */
    uint32_t *picked;     /* [max_tokens][top_k] experts, ascending */
    float *weight;        /* [max_tokens][top_k] */
    uint32_t *slot;       /* [max_tokens][top_k] row in the sorted order */
    uint32_t *count;      /* [experts + 1] */
    uint32_t *source;     /* [max_tokens*top_k] token of each sorted row */
    clb_bucket_t *buckets; /* [experts] */
    colibri_expert_lease_t *leases; /* [experts] */
    uint32_t n_buckets;
    clb_acts_t gathered;  /* hidden, by expert, for buckets of more than one row */
    clb_acts_t act;       /* silu(gate) * up, by expert */
    float *down;          /* [max_tokens*top_k][ldh] */
    uint64_t *keep;       /* [max_sequences][keep_words], only with an eviction callback */
    float *mass;          /* [max_context], only with kv_mass */
    clb_lane_t *lanes;    /* [threads] */
    uint64_t score_floats;
    uint32_t ldq, ldk, ldh, lde, keep_words, tile_queries, n_tiles;
    _Alignas(64) uint32_t next; /* atomic: next chunk of the running phase; on a line that nothing else is read from */
} clb_step_t;

/* Lays the step out in the arena; with base NULL only counts. */
void clb_step_layout(clb_step_t *st, const struct colibri_model *m, clb_arena_t *a);

typedef void clb_chunk_fn(clb_step_t *st, const void *arg, uint32_t chunk, clb_lane_t *lane);
void clb_run(clb_step_t *st, clb_chunk_fn *fn, const void *arg, uint32_t n_chunks);
/* The same for chunks of about a microsecond, such as one per row: claimed several at a time. */
void clb_run_rows(clb_step_t *st, clb_chunk_fn *fn, const void *arg, uint32_t n_rows);

void clb_step_fail(clb_step_t *st, colibri_status_t status); /* first one wins */
static inline int clb_step_ok(const clb_step_t *st) { return __atomic_load_n(&st->status, __ATOMIC_RELAXED) == 0; }
static inline void clb_flag(clb_step_t *st, uint32_t seq) { __atomic_store_n(&st->bad[seq], 1u, __ATOMIC_RELAXED); }
static inline colibri_sequence_t *clb_sequence(const clb_step_t *st, uint32_t i) {
    return (colibri_sequence_t *)(void *)((uint8_t *)st->batch->sequences +
                                          (size_t)i * st->batch->sequences->struct_size);
}

/* ---- operations, in the order of a layer ---- */
void clb_embed(clb_step_t *st);                                /* x, rope tables */
/* in = pack(rmsnorm(x) * w) for the kinds in mask (bit per clb_act_kind) */
void clb_norm(clb_step_t *st, const float *w, uint32_t mask);
void clb_qkv(clb_step_t *st, const clb_layer_t *l);            /* q, k, v from in */
void clb_kv_write(clb_step_t *st, uint32_t layer);             /* rotates k, stores k and v */
void clb_attention_plan(clb_step_t *st);                       /* tiles, once per step */
void clb_attention(clb_step_t *st, uint32_t layer);            /* attn from q and the slabs */
void clb_attn_project(clb_step_t *st, const clb_layer_t *l);   /* x += o(attn) */
void clb_route(clb_step_t *st, uint32_t layer);                /* picked, weight, slot, buckets */
void clb_experts(clb_step_t *st, uint32_t layer);              /* x += sum of weight * expert(in) */
void clb_head(clb_step_t *st);                                 /* logits of the wanted rows */

static inline uint32_t clb_kind_bit(const clb_matrix_t *w) { return 1u << w->format->act; }

#endif
