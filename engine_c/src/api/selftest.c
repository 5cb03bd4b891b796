/* The numerics fingerprint: a micro-model with awkward sizes (odd panels, padded head dimension, more experts than a
 * power of two) runs through every weight format, both KV formats and every attention mode; the SHA-256 of all logits
 * and drawn tokens is compared with the constant below. Any change of a bit anywhere in the numerics shows here.
 *
 * To change the constant on purpose: run `colibrid selftest`, put its digest here, say why in CHANGELOG.md. */
#include "../base/fp.h"
#include "../base/fpenv.h"
#include "../base/sha256.h"
#include "../cpu/features.h"
#include "../model/decoder.h"
#include "../ops/step.h"
#include "api.h"

static const char fingerprint[] = "868c755be73a7f8cfe3e5a97a876c886e3a647dfa60e19ea471b569dedb35961";
const char *colibri_fingerprint(void) { return fingerprint; }

enum {
    VOCAB = 77, HIDDEN = 96, LAYERS = 2, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 24, INTER = 80, EXPERTS = 5, TOP_K = 2,
    TOKENS = 12, SEQUENCES = 2, CONTEXT = 64, SLAB_TOKENS = 16, SLABS = SEQUENCES * CONTEXT / SLAB_TOKENS, STEPS = 5
};

extern const clb_arch_t clb_arch_mixtral;

typedef struct bench {
    clb_arena_t mem;
    uint64_t seed;
    colibri_model_t *m;
    clb_layer_t *layers;
    uint64_t *offsets;
    colibri_buffer_t kv, workspace, output, scratch, weights, view;
    clb_sha256_t hash;
} bench_t;

/* xorshift64: values in (-1, 1), exactly representable. */
static float noise(bench_t *t) {
    t->seed ^= t->seed << 13;
    t->seed ^= t->seed >> 7;
    t->seed ^= t->seed << 17;
    return (float)(int32_t)(t->seed >> 40) * 0x1p-23f - 1.0f;
}

static clb_matrix_t take_matrix(bench_t *t, uint32_t id, uint32_t rows, uint32_t cols, float scale) {
    const clb_format_t *f = clb_format(id);
    clb_matrix_t w = {
        f, NULL, 0, clb_panel_stride(f, clb_blocks(cols)), id, rows, cols, clb_blocks(cols), clb_panels(rows)};
    uint8_t *data = clb_take(&t->mem, w.panels, w.stride);
    float block[CLB_BLOCK * CLB_PANEL];
    for (uint32_t p = 0; data && p < w.panels; p++) {
        memset(data + p * w.stride, 0, w.stride);
        for (uint32_t b = 0; b < w.nb; b++) {
            for (uint32_t i = 0; i < CLB_BLOCK * CLB_PANEL; i++) {
                int inside = p * CLB_PANEL + i % CLB_PANEL < rows && b * CLB_BLOCK + i / CLB_PANEL < cols;
                block[i] = inside ? noise(t) * scale : 0.0f;
            }
            f->pack(block, data + p * w.stride + (size_t)b * f->block_bytes);
        }
    }
    w.data = data;
    return w;
}

static const float *take_vector(bench_t *t, uint32_t n, float centre, float spread) {
    float *v = CLB_TAKE(&t->mem, float, n);
    for (uint32_t i = 0; v && i < n; i++) v[i] = centre + spread * noise(t);
    return v;
}

static void take_experts(bench_t *t, clb_layer_t *l, uint32_t format, uint64_t *offsets) {
    for (uint32_t e = 0; e < EXPERTS; e++) {
        uint64_t start = t->mem.used;
        l->gate = take_matrix(t, format, INTER, HIDDEN, 0.3f);
        l->up = take_matrix(t, format, INTER, HIDDEN, 0.3f);
        l->down = take_matrix(t, format, HIDDEN, INTER, 0.3f);
        l->up.offset = l->gate.panels * l->gate.stride;
        l->down.offset = l->up.offset + l->up.panels * l->up.stride;
        if (offsets) offsets[e] = start;
        l->expert_bytes = t->mem.used - start;
    }
}

static void take_layer(bench_t *t, clb_layer_t *l, uint32_t format, uint64_t *offsets) {
    l->attn_norm = take_vector(t, HIDDEN, 1.0f, 0.25f);
    l->ffn_norm = take_vector(t, HIDDEN, 1.0f, 0.25f);
    l->q = take_matrix(t, format, HEADS * HEAD_DIM, HIDDEN, 0.4f);
    l->k = take_matrix(t, format, KV_HEADS * HEAD_DIM, HIDDEN, 0.4f);
    l->v = take_matrix(t, format, KV_HEADS * HEAD_DIM, HIDDEN, 0.4f);
    l->o = take_matrix(t, format, HIDDEN, HEADS * HEAD_DIM, 0.3f);
    l->router = take_matrix(t, CLB_FMT_f32, EXPERTS, HIDDEN, 0.5f);
    take_experts(t, l, format, offsets);
    l->expert_offset = offsets;
}

static const float *take_freqs(bench_t *t) {
    float *f = CLB_TAKE(&t->mem, float, HEAD_DIM / 2);
    for (uint32_t i = 0; f && i < HEAD_DIM / 2; i++) f[i] = i ? f[i - 1] * 0.5f : 1.0f;
    return f;
}

static colibri_model_t shape(uint32_t isa, uint32_t format) {
    colibri_model_t m = {
        .magic = CLB_MODEL_MAGIC, .arch = &clb_arch_mixtral, .norm_eps = 1e-5f, .hdp = (HEAD_DIM + 15) / 16 * 16,
        .g = {.vocab = VOCAB, .hidden = HIDDEN, .layers = LAYERS, .heads = HEADS, .kv_heads = KV_HEADS,
              .head_dim = HEAD_DIM, .inter = INTER, .experts = EXPERTS, .top_k = TOP_K, .context = CONTEXT},
        .config = {.struct_size = sizeof(colibri_config_t), .isa = isa, .max_tokens = TOKENS,
                   .max_sequences = SEQUENCES, .max_context = CONTEXT, .max_visible = CONTEXT, .threads = 1,
                   .slab_tokens = SLAB_TOKENS, .kv_format = format % 2 ? COLIBRI_KV_F32 : COLIBRI_KV_F16},
    };
    m.slab_bytes = (uint64_t)LAYERS * 2 * KV_HEADS * SLAB_TOKENS * m.hdp * (format % 2 ? 4 : 2);
    return m;
}

static colibri_buffer_t take_buffer(bench_t *t, uint32_t type, uint64_t bytes) {
    void *ptr = clb_take(&t->mem, bytes, 1);
    return (colibri_buffer_t){sizeof(colibri_buffer_t), type, ptr, bytes, COLIBRI_ALIGNMENT, 0, 1, 0};
}

/* Lays out, and with memory fills, the micro-model of one format and everything a forward needs. */
static void take_all(bench_t *t, uint32_t isa, uint32_t format) {
    colibri_model_t m = shape(isa, format);
    t->seed = 0x9e3779b97f4a7c15u + format;
    t->m = CLB_TAKE(&t->mem, colibri_model_t, 1);
    t->layers = CLB_TAKE(&t->mem, clb_layer_t, LAYERS);
    t->offsets = CLB_TAKE(&t->mem, uint64_t, LAYERS * EXPERTS);
    m.experts = t->mem.base;
    m.layers = t->layers;
    m.embed = take_matrix(t, format, VOCAB, HIDDEN, 1.0f);
    m.head = take_matrix(t, format, VOCAB, HIDDEN, 0.5f);
    m.final_norm = take_vector(t, HIDDEN, 1.0f, 0.25f);
    m.rope_freqs = take_freqs(t);
    for (uint32_t l = 0; l < LAYERS; l++) {
        clb_layer_t layer = {0};
        take_layer(t, &layer, format, t->offsets ? t->offsets + l * EXPERTS : NULL);
        if (t->layers) t->layers[l] = layer;
    }
    t->kv = take_buffer(t, COLIBRI_KV_CACHE, SLABS * m.slab_bytes);
    t->workspace = take_buffer(t, COLIBRI_WORKSPACE, clb_workspace_bytes(&m));
    t->output = take_buffer(t, COLIBRI_OUTPUT, (uint64_t)TOKENS * VOCAB * sizeof(float));
    uint64_t scratch = 0;
    colibri_sample_size(&m, &scratch);
    t->scratch = take_buffer(t, COLIBRI_WORKSPACE, scratch);
    if (!t->m) return;
    clb_kernels_fill(&m.kernels, isa);
    *t->m = m;
}

uint64_t colibri_selftest_size(void) {
    uint64_t most = 0;
    for (uint32_t format = 0; format < CLB_FORMATS; format++) {
        bench_t t = {0};
        take_all(&t, COLIBRI_ISA_REF, format);
        most = t.mem.used > most ? t.mem.used : most;
    }
    return most;
}

static colibri_status_t draw(bench_t *t, const float *logits, uint64_t position, uint32_t *token,
                             colibri_error_t *err) {
    colibri_sampling_t how = {.struct_size = sizeof how, .temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .seed = 7,
                              .position = position, .n_logprobs = 3};
    colibri_sample_t sample = {.struct_size = sizeof sample};
    CLB_TRY(colibri_sample(t->m, &how, logits, &t->scratch, &sample, err));
    clb_sha256_update(&t->hash, &sample.token, sizeof sample.token);
    clb_sha256_update(&t->hash, &sample.logprob, sizeof sample.logprob);
    *token = sample.token;
    return COLIBRI_OK;
}

/* One step: a full-attention and a pinned + window sequence together; every logit goes into the hash. */
static colibri_status_t step(bench_t *t, colibri_sequence_t *seq, colibri_error_t *err) {
    colibri_batch_t batch = {.struct_size = sizeof batch, .n_sequences = SEQUENCES, .sequences = seq, .kv = &t->kv,
                             .workspace = &t->workspace, .output = &t->output};
    CLB_TRY(colibri_forward(t->m, &batch, err));
    clb_sha256_update(&t->hash, t->output.ptr, (size_t)batch.logits_rows * VOCAB * sizeof(float));
    for (uint32_t i = 0; i < SEQUENCES; i++)
        if (seq[i].status) return clb_fail(err, (colibri_status_t)seq[i].status, "self-test: non-finite logits");
    return COLIBRI_OK;
}

static colibri_status_t run_format(bench_t *t, uint32_t positions, colibri_error_t *err) {
    uint32_t tokens[SEQUENCES][6], slabs[SEQUENCES][CONTEXT / SLAB_TOKENS], counts[SEQUENCES] = {6, 3};
    colibri_sequence_t seq[SEQUENCES] = {{0}};
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        for (uint32_t i = 0; i < CONTEXT / SLAB_TOKENS; i++) slabs[s][i] = SLABS - 1 - s - i * SEQUENCES;
        for (uint32_t i = 0; i < counts[s]; i++) tokens[s][i] = (i * 31 + s * 17) % VOCAB;
        seq[s] = (colibri_sequence_t){.struct_size = sizeof *seq, .n_tokens = counts[s], .tokens = tokens[s],
                                      .n_slabs = CONTEXT / SLAB_TOKENS, .slabs = slabs[s], .positions = positions,
                                      .pinned = s ? 3 : 0, .window = s ? 4 : 0};
    }
    for (uint32_t n = 0; n < STEPS; n++) {
        CLB_TRY(step(t, seq, err));
        const float *logits = t->output.ptr;
        for (uint32_t s = 0, row = 0; s < SEQUENCES; row += seq[s].n_tokens, s++) {
            seq[s].position += seq[s].n_tokens;
            CLB_TRY(draw(t, logits + (size_t)(row + seq[s].n_tokens - 1) * VOCAB, seq[s].position, &tokens[s][0], err));
        }
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            seq[s].n_tokens = 1 + (n == 1);
            tokens[s][1] = (tokens[s][0] + 1) % VOCAB;
        }
    }
    return COLIBRI_OK;
}

static int differs(const uint8_t *digest) {
    static const char hex[] = "0123456789abcdef";
    for (int i = 0; i < 32; i++)
        if (fingerprint[2 * i] != hex[digest[i] >> 4] || fingerprint[2 * i + 1] != hex[digest[i] & 15]) return 1;
    return 0;
}

static colibri_status_t run_all(bench_t *t, uint32_t isa, void *memory, colibri_error_t *err) {
    for (uint32_t format = 0; format < CLB_FORMATS; format++) {
        t->mem = (clb_arena_t){memory, 0};
        clb_fpenv_t env = clb_fpenv_enter();
        take_all(t, isa, format);
        clb_fpenv_leave(env);
        memset(t->kv.ptr, 0xff, t->kv.size); /* NaN: what is not written must not be read */
        for (uint32_t positions = 0; positions < 2; positions++) CLB_TRY(run_format(t, positions, err));
    }
    return COLIBRI_OK;
}

colibri_status_t colibri_selftest(uint32_t isa, colibri_buffer_t *workspace, uint8_t *digest, colibri_error_t *err) {
    uint32_t best = clb_cpu_best_isa();
    isa = isa == COLIBRI_ISA_AUTO ? best : isa;
    if (isa > best) return clb_fail(err, COLIBRI_CPU, "isa is above what this CPU supports (%s)", clb_isa_name(best));
    if (!digest) return clb_fail(err, COLIBRI_INVALID_ARGUMENT, "digest is NULL");
    CLB_TRY(clb_buffer_check(workspace, "workspace", COLIBRI_WORKSPACE, colibri_selftest_size(), err));
    bench_t t = {0};
    clb_buffer_acquire(workspace);
    clb_sha256_init(&t.hash);
    colibri_status_t status = run_all(&t, isa, workspace->ptr, err);
    clb_sha256_final(&t.hash, digest);
    clb_buffer_release(workspace);
    if (status != COLIBRI_OK) return status;
    return differs(digest)
               ? clb_fail(err, COLIBRI_SELFTEST, "the digest differs from the numerics fingerprint %s", fingerprint)
               : COLIBRI_OK;
}
