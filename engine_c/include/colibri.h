/* libcolibri: a deterministic Mixture-of-Experts inference engine for CPUs.  SPDX-License-Identifier: Apache-2.0
 *
 * Usage sketch (host/ has ready-made mapping and threads; engine_c/bench/generate.c is this sketch, complete):
 *
 *     colibri_config_t cfg = { .struct_size = sizeof cfg, .manifest = json, .manifest_size = n,
 *         .weights = files, .n_weights = 2,            // mapped dense.bin, experts.bin
 *         .max_tokens = 512, .max_sequences = 8, .max_context = 4096, .threads = 2,
 *         .parallel_for = my_parallel_for, .parallel_ctx = pool };
 *     uint64_t bytes;
 *     colibri_init_size(&cfg, &bytes, &err);           // memory for the immutable model view
 *     cfg.view = &view;                                // a 64-byte-aligned WORKSPACE buffer of that size
 *     colibri_init(&cfg, &model, &err);
 *     colibri_workspace_size(model, &bytes);           // scratch for one forward
 *     ... per step: fill colibri_sequence_t per request, then
 *     colibri_forward(model, &batch, &err);            // logits into batch.output
 *     colibri_sample(model, &sampling, logits, &scratch, &sample, &err);   // or sample_rows for all rows at once
 *     ... at the end: colibri_unload(model);
 *
 * Memory.   The library allocates nothing. Every byte comes from a colibri_buffer_t whose ptr is aligned to 64 bytes;
 *           a misaligned or short buffer is an error, never a fault. The caller keeps a buffer's memory valid while
 *           its ref_count, raised and lowered atomically by the library around use, is above the caller's own count.
 * Threads.  The library makes none; it calls config.parallel_for. One colibri_model_t may serve any number of threads
 *           at once as long as each call has its own workspace, output and sequences; sequences that share KV slabs
 *           must not be written by two calls at once. No global state, no errno, no signals, no stdio.
 * Bits.     The logits of a sequence are a function of (model file, tokens, pinned, window, position mode, KV format)
 *           alone: not of batch neighbours, chunking, slab size, thread count or instruction set. See
 * engine_c/README.md. Evolution. Every struct starts with struct_size, set by the caller to its own sizeof; a newer
 * library treats missing tail fields as zero. Status values never change meaning. Same major ABI version = drop-in
 * replacement.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define COLIBRI_API __attribute__((visibility("default")))
#else
#define COLIBRI_API
#endif

#define COLIBRI_VERSION "0.1.0"
#define COLIBRI_ABI_MAJOR 1u
#define COLIBRI_ABI_MINOR 1u
#define COLIBRI_ALIGNMENT 64u
#define COLIBRI_NO_SLAB 0xffffffffu /* slab table entry of a slab that was given back */
#define COLIBRI_MAX_LOGPROBS 20u

/* X(name, value, text) */
#define COLIBRI_STATUS_LIST(X)                                                                      \
    X(OK, 0, "success")                                                                             \
    X(INVALID_ARGUMENT, 1, "an argument is null, zero, out of range or contradicts another")        \
    X(STRUCT_SIZE, 2, "struct_size is missing or too small for this library")                       \
    X(MISALIGNED, 3, "a buffer is not aligned to 64 bytes")                                         \
    X(BUFFER_TOO_SMALL, 4, "a buffer is smaller than required")                                     \
    X(MANIFEST, 5, "the model manifest is malformed")                                               \
    X(UNSUPPORTED, 6, "the model needs something this library does not have")                       \
    X(TENSOR, 7, "a tensor is missing, duplicated, unexpected or of the wrong shape or place")      \
    X(CPU, 8, "the CPU or operating system lacks the requested instruction set")                    \
    X(TOKEN_RANGE, 9, "a token id is outside the vocabulary")                                       \
    X(KV_SLAB, 10, "a slab table lacks a visible position or names a slab outside the arena")       \
    X(CONTEXT, 11, "a position exceeds max_context or the visible keys exceed the workspace")       \
    X(NON_FINITE, 12, "a result was NaN or infinite")                                               \
    X(CANCELLED, 13, "the caller's cancel flag was set; KV written by this step is undefined")      \
    X(CALLBACK, 14, "a callback reported failure")                                                  \
    X(SELFTEST, 15, "the self-test digest differs from the expected numerics fingerprint")          \
    X(NO_TOKEN, 16, "no token is allowed by the mask and biases")                                   \
    X(WEIGHT_RANGE, 17, "a weight is NaN, infinite or too large for the format")

typedef enum colibri_status {
#define X(name, value, text) COLIBRI_##name = value,
    COLIBRI_STATUS_LIST(X)
#undef X
} colibri_status_t;

/* Optional detail of a failure, filled by every function that takes one (may be NULL). */
typedef struct colibri_error {
    uint32_t struct_size;
    int32_t status;
    char message[248]; /* NUL-terminated, names the field or tensor */
} colibri_error_t;

/* ---- buffers ------------------------------------------------------------------------------------------------- */

typedef enum colibri_buffer_type {
    COLIBRI_WEIGHTS = 1,       /* read only; one per container file */
    COLIBRI_ROUTING_TABLE = 2, /* int8 routing table, see colibri_routing_build */
    COLIBRI_KV_CACHE = 3,      /* the slab arena, shared by all sequences */
    COLIBRI_WORKSPACE = 4,     /* scratch, exclusive to one call; also the model view */
    COLIBRI_OUTPUT = 5         /* logits */
} colibri_buffer_type_t;

typedef struct colibri_buffer {
    uint32_t struct_size;
    uint32_t type;      /* colibri_buffer_type_t */
    void *ptr;          /* multiple of 64 */
    uint64_t size;      /* bytes */
    uint32_t alignment; /* what the caller promises, a power of two >= 64 */
    int32_t device;     /* 0 = host memory; others are reserved */
    uint32_t ref_count; /* atomic; the library adds one while it uses the buffer. Weights and view: init..unload */
    uint32_t reserved;
} colibri_buffer_t;

/* ---- callbacks ----------------------------------------------------------------------------------------------- */

/* Calls task(arg, i) once for each i in [0, n), on any threads, and returns when all are done and their writes are
 * visible. Serial execution is legal. Called from the thread that called forward or sample_rows, never nested. */
typedef void (*colibri_task_fn)(void *arg, uint32_t i);
typedef void (*colibri_parallel_for_fn)(void *ctx, colibri_task_fn task, void *arg, uint32_t n);

/* level: 0 error, 1 warning, 2 info. Called from init only; message is valid during the call. */
typedef void (*colibri_log_fn)(void *user, int32_t level, const char *message);

/* Range form: sets [*start, *start + *length) to positions of sequence `id` that layer `layer` must not see any more
 * (length 0: none). Asked once per sequence and layer of every step; expert is -1. Return 0, or non-zero to fail. */
typedef int32_t (*colibri_kv_evict_fn)(void *user, uint64_t id, int32_t layer, int32_t expert, uint32_t *start,
                                       uint32_t *length);
/* Keep-list form: clears bits of keep[ceil(n/64)] (all set on entry, bit i = text position i, n = positions before and
 * in this step) for keys that this layer must not see. The step's own tokens and the causal and window masks are
 * applied afterwards, so a cleared bit of the step's own tokens is ignored. */
typedef int32_t (*colibri_kv_keep_fn)(void *user, uint64_t id, int32_t layer, uint32_t n, uint64_t *keep);
/* Attention mass: mass[n] = softmax weight each position received in this step at this layer, summed over heads and
 * the step's queries. For LFU- and score-based policies. */
typedef void (*colibri_kv_mass_fn)(void *user, uint64_t id, int32_t layer, uint32_t n, const float *mass);

/* One leased expert: data = the expert's extent of experts.bin (gate, up, down; see engine_c/CONTAINER.md). */
typedef struct colibri_expert_lease {
    uint32_t struct_size;
    uint32_t expert;  /* set by the library */
    const void *data; /* set by the callback, 64-byte aligned */
    uint64_t size;    /* set by the callback, at least the extent's bytes */
    uint64_t lease;   /* the caller's own handle, handed back on release */
} colibri_expert_lease_t;

/* Called once per MoE layer with the exact set of experts the step's tokens were routed to, ascending, before any of
 * them is read. Every successful fetch is followed by exactly one release with the same array. */
typedef int32_t (*colibri_expert_fetch_fn)(void *user, int32_t layer, colibri_expert_lease_t *leases, uint32_t n);
typedef void (*colibri_expert_release_fn)(void *user, int32_t layer, const colibri_expert_lease_t *leases, uint32_t n);

/* ---- model --------------------------------------------------------------------------------------------------- */

typedef enum colibri_isa {
    COLIBRI_ISA_AUTO = 0,
    COLIBRI_ISA_REF = 1,
    COLIBRI_ISA_AVX2 = 2,  /* AVX2, FMA, F16C */
    COLIBRI_ISA_AVX512 = 3 /* AVX-512 F/BW/DQ/VL and VNNI */
} colibri_isa_t;

typedef enum colibri_kv_format { COLIBRI_KV_F16 = 0, COLIBRI_KV_F32 = 1 } colibri_kv_format_t;

typedef struct colibri_config {
    uint32_t struct_size;
    uint32_t isa;           /* highest instruction set to use (colibri_isa_t); AUTO = best of this CPU */
    const char *manifest;   /* manifest.json, read during init only; need not be NUL-terminated */
    uint64_t manifest_size; /* bytes */
    colibri_buffer_t *weights; /* [n_weights], stride weights[0].struct_size, in the order of manifest "files";
                                  experts.bin may have ptr NULL and size 0 if expert_fetch is set */
    uint32_t n_weights;
    uint32_t max_tokens;    /* tokens of one step, over all sequences, >= 1 */
    uint32_t max_sequences; /* sequences of one step, >= 1 */
    uint32_t max_context;   /* highest position + 1 that a sequence may reach */
    uint32_t threads;       /* parallel_for fan-out, >= 1; 0 means 1 */
    uint32_t slab_tokens;   /* T, a multiple of 16; 0 means 64 */
    uint32_t kv_format;     /* colibri_kv_format_t */
    uint32_t max_visible;   /* most keys one query sees; 0 means max_context. Bounds the workspace of long runs */
    colibri_buffer_t *view; /* memory of colibri_init_size bytes for the model view */

    colibri_parallel_for_fn parallel_for; /* NULL = serial */
    void *parallel_ctx;
    colibri_log_fn log;
    colibri_kv_evict_fn kv_evict;
    colibri_kv_keep_fn kv_keep;
    colibri_kv_mass_fn kv_mass;
    colibri_expert_fetch_fn expert_fetch;
    colibri_expert_release_fn expert_release;
    void *user;                 /* first argument of log, kv_* and expert_* */
    uint64_t *progress;         /* bumped atomically per layer and expert block, or NULL */
    const uint32_t *cancel;     /* read at the same places; non-zero = return COLIBRI_CANCELLED, or NULL */
    uint64_t *expert_tokens;    /* [layers, experts] counters: tokens routed, added to by forward, or NULL */
} colibri_config_t;

typedef struct colibri_model colibri_model_t; /* opaque, lives in config.view */

typedef struct colibri_model_info {
    uint32_t struct_size;
    uint32_t vocab, hidden, layers, heads, kv_heads, head_dim, inter, experts, top_k;
    uint32_t context;      /* trained length L */
    uint32_t pinned;       /* the model's own attention: P */
    uint32_t window;       /* and W; 0 = full */
    uint32_t slab_tokens;
    uint32_t isa;          /* the one in use */
    uint64_t slab_bytes;   /* one slab: T tokens x all layers, K and V */
    uint64_t weight_bytes; /* sum of the container's files */
    uint64_t expert_bytes; /* one expert's extent; the largest over layers */
    const char *architecture, *isa_name;
    const char *numerics_class; /* "exact", or "evicting" with a kv_evict or kv_keep callback: then prefix sharing
                                   and resume are not allowed */
} colibri_model_info_t;

COLIBRI_API uint32_t colibri_abi_version(void);             /* major << 16 | minor */
COLIBRI_API const char *colibri_version(void);              /* "0.1.0" */
COLIBRI_API const char *colibri_status_text(int32_t status); /* never NULL */
COLIBRI_API uint32_t colibri_best_isa(void);                /* highest colibri_isa_t this CPU and OS support */
COLIBRI_API const char *colibri_isa_name(uint32_t isa);     /* "avx2"; NULL if unknown */

/* Bytes of config.view that colibri_init needs. Reads the manifest only. */
COLIBRI_API colibri_status_t colibri_init_size(const colibri_config_t *config, uint64_t *bytes, colibri_error_t *err);
/* Checks everything (manifest, extents, shapes, buffers, CPU) and builds the view; touches no weight. The config and
 * the manifest may be freed afterwards; buffers and what the callback and progress pointers name may not. */
COLIBRI_API colibri_status_t colibri_init(const colibri_config_t *config, colibri_model_t **model,
                                          colibri_error_t *err);
/* Drops the references on weights and view. No call may be running. NULL is allowed. */
COLIBRI_API void colibri_unload(colibri_model_t *model);
COLIBRI_API colibri_status_t colibri_describe(const colibri_model_t *model, colibri_model_info_t *info);

/* ---- one step ------------------------------------------------------------------------------------------------ */

typedef enum colibri_positions {
    COLIBRI_POSITIONS_CACHE = 0,   /* distance to a pinned key is counted inside the cache */
    COLIBRI_POSITIONS_ABSOLUTE = 1 /* text positions */
} colibri_positions_t;

/* A query at position t sees [0, pinned) and (t - window, t]; window 0 is full attention. Sequences whose tables begin
 * with the same slabs had best be neighbours in the batch: what all of them see of these is read once. */
typedef struct colibri_sequence {
    uint32_t struct_size;
    uint32_t n_tokens;      /* >= 1 new tokens, at positions position .. position + n_tokens - 1 */
    const uint32_t *tokens; /* [n_tokens] */
    uint32_t position;
    uint32_t pinned;
    uint32_t window;
    uint32_t positions;     /* colibri_positions_t */
    uint32_t logits_from;   /* logits wanted for tokens [logits_from, n_tokens); n_tokens = none */
    uint32_t n_slabs;
    const uint32_t *slabs;  /* [n_slabs] arena index of positions [i*T, (i+1)*T); COLIBRI_NO_SLAB where out of view */
    uint64_t id;            /* passed to callbacks */
    uint32_t logits_row;    /* out: first row in output */
    int32_t status;         /* out: COLIBRI_OK or COLIBRI_NON_FINITE for this sequence alone */
} colibri_sequence_t;

typedef struct colibri_batch {
    uint32_t struct_size;
    uint32_t n_sequences;
    colibri_sequence_t *sequences; /* [n_sequences]; element stride is sequences[0].struct_size */
    colibri_buffer_t *kv;          /* KV_CACHE arena of k * slab_bytes */
    colibri_buffer_t *workspace;
    colibri_buffer_t *output;      /* f32 [rows with logits, vocab], rows in sequence order; NULL if none is wanted */
    colibri_buffer_t *routing_table; /* NULL = float router */
    uint32_t logits_rows;          /* out */
    uint32_t reserved;
} colibri_batch_t;

/* Scratch for one forward of up to max_tokens, max_sequences: a pure function of the config. */
COLIBRI_API colibri_status_t colibri_workspace_size(const colibri_model_t *model, uint64_t *bytes);
/* Computes one step: reads and writes KV slabs, writes logits. On an error other than a sequence's own status nothing
 * in the arena but the step's own positions has changed. */
COLIBRI_API colibri_status_t colibri_forward(const colibri_model_t *model, colibri_batch_t *batch,
                                             colibri_error_t *err);

/* Optional int8 routing table: per layer the router's rows in min/max affine int8. Off unless a batch carries it. */
COLIBRI_API colibri_status_t colibri_routing_size(const colibri_model_t *model, uint64_t *bytes);
COLIBRI_API colibri_status_t colibri_routing_build(const colibri_model_t *model, colibri_buffer_t *table,
                                                   colibri_error_t *err);

/* ---- sampler ------------------------------------------------------------------------------------------------- */

/* Applied in this order: allowed mask, logit bias, repetition penalty (prompt and generated), presence and frequency
 * (generated), temperature (< 1e-5: argmax, lowest id), sort by (value descending, id ascending), top_k, top_p, min_p,
 * draw. The noise is Philox4x32-10 keyed by (seed, position). */
typedef struct colibri_sampling {
    uint32_t struct_size;
    uint32_t top_k;           /* 0 = off */
    float temperature;        /* 0 = greedy */
    float top_p;              /* (0, 1]; 0 means 1 */
    float min_p;              /* [0, 1] */
    float repetition_penalty; /* > 0; 0 means 1 */
    float presence_penalty;   /* 0 = off */
    float frequency_penalty;  /* 0 = off */
    uint64_t seed;
    uint64_t position;        /* of the token to be drawn */
    const uint32_t *prompt;   /* [n_prompt], only read if a penalty is on */
    const uint32_t *generated; /* [n_generated] */
    uint32_t n_prompt, n_generated;
    const uint32_t *bias_ids; /* [n_bias] distinct ids below vocab */
    const float *bias;        /* [n_bias] finite */
    const uint32_t *allowed;  /* [ceil(vocab/32)] bit i%32 of word i/32, or NULL = all */
    uint32_t n_bias;
    uint32_t n_logprobs;      /* top-n wanted, <= COLIBRI_MAX_LOGPROBS */
    uint32_t want_logprob;    /* non-zero: fill sample.logprob (implied by n_logprobs) */
    uint32_t reserved;
} colibri_sampling_t;

typedef struct colibri_sample {
    uint32_t struct_size;
    uint32_t token;
    float logprob; /* log-softmax of the raw logits at token */
    uint32_t n_top;
    uint32_t top_ids[COLIBRI_MAX_LOGPROBS];   /* by (log probability descending, id ascending) */
    float top_logprobs[COLIBRI_MAX_LOGPROBS];
} colibri_sample_t;

COLIBRI_API colibri_status_t colibri_sample_size(const colibri_model_t *model, uint64_t *bytes);
/* logits: f32 [vocab], not changed. scratch: WORKSPACE of colibri_sample_size bytes, exclusive to the call. */
COLIBRI_API colibri_status_t colibri_sample(const colibri_model_t *model, const colibri_sampling_t *sampling,
                                            const float *logits, colibri_buffer_t *scratch, colibri_sample_t *sample,
                                            colibri_error_t *err);

/* One row of colibri_sample_rows. */
typedef struct colibri_draw {
    uint32_t struct_size;
    int32_t status;      /* out: what colibri_sample returned */
    const colibri_sampling_t *sampling;
    const float *logits; /* f32 [vocab], not changed */
    colibri_sample_t *sample; /* out; no other row's */
    colibri_error_t *error;   /* out, or NULL; no other row's */
} colibri_draw_t;

/* colibri_sample for each of draws [n], stride draws[0].struct_size, spread over parallel_for. A row's result depends
 * on nothing but the row. scratch: WORKSPACE; as many rows are drawn at once as it holds colibri_sample_size bytes (one
 * at least), config.threads of them at most. A row that fails says so in its status alone; the call fails only for the
 * other arguments, and then no row was drawn. */
COLIBRI_API colibri_status_t colibri_sample_rows(const colibri_model_t *model, colibri_draw_t *draws, uint32_t n,
                                                 colibri_buffer_t *scratch, colibri_error_t *err);
/* Log probability of `token` and the n best under raw logits f32 [vocab]; sample->token = token. Needs no scratch. */
COLIBRI_API colibri_status_t colibri_score(const colibri_model_t *model, const float *logits, uint32_t token,
                                           uint32_t n_logprobs, colibri_sample_t *sample, colibri_error_t *err);

/* ---- packing (converters) ------------------------------------------------------------------------------------ */

/* Format names: "f32" "f16" "bf16" "q8" "q4". */
/* Bytes of a matrix [rows, cols] in panels; 0 if the format is unknown or the size overflows. */
COLIBRI_API uint64_t colibri_panel_bytes(const char *format, uint64_t rows, uint64_t cols);
/* Packs w f32 [rows, cols] (row stride cols) into panels at out (64-byte aligned, colibri_panel_bytes). */
COLIBRI_API colibri_status_t colibri_panel_pack(const char *format, uint64_t rows, uint64_t cols, const float *w,
                                                void *out, colibri_error_t *err);
/* Packs already quantised blocks without requantising: q int8 [rows, cols] (q8: -128..127, q4: -8..7), scales f16
 * [rows, cols/32] as bits; cols a multiple of 32; scales finite. */
COLIBRI_API colibri_status_t colibri_panel_pack_quants(const char *format, uint64_t rows, uint64_t cols,
                                                       const int8_t *q, const uint16_t *scales, void *out,
                                                       colibri_error_t *err);
/* The inverse: f32 [rows, cols]. */
COLIBRI_API colibri_status_t colibri_panel_unpack(const char *format, uint64_t rows, uint64_t cols, const void *panels,
                                                  float *w, colibri_error_t *err);

/* ---- numerics ------------------------------------------------------------------------------------------------ */

COLIBRI_API uint64_t colibri_selftest_size(void);
/* Runs a built-in micro-model through every kernel family and format with instruction set `isa` and hashes the
 * results. digest: SHA-256 [32]. COLIBRI_OK if it equals colibri_fingerprint(), else COLIBRI_SELFTEST. */
COLIBRI_API colibri_status_t colibri_selftest(uint32_t isa, colibri_buffer_t *workspace, uint8_t *digest,
                                              colibri_error_t *err);
COLIBRI_API const char *colibri_fingerprint(void); /* 64 hex digits, compiled in */

#ifdef __cplusplus
}
#endif
#endif
