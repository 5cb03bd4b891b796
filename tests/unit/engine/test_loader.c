/* The model loader: valid manifests fill the view exactly; every single thing a manifest can have wrong is refused with
 * the right status and a message naming it; truncated and damaged manifests never do harm.
 * Cases are single edits of the text of the manifests in loader_samples.h. */
#include "loader_samples.h"

/* ---- loading ------------------------------------------------------------------------------------------------- */

/* The loader takes addresses within the files but never reads them, so they need not exist. */
static char *const DENSE = (char *)(uintptr_t)0x10000000, *const EXPERTS = (char *)(uintptr_t)0x20000000;

typedef struct load {
    colibri_config_t config;
    colibri_buffer_t weights[CLB_FILES];
    colibri_error_t err;
    struct colibri_model *model; /* filled, or NULL */
    uint64_t bytes;
} load_t;

static void prepare(load_t *l, const uint64_t file_bytes[CLB_FILES]) {
    *l = (load_t){.err = {.struct_size = sizeof l->err}};
    l->weights[0] = (colibri_buffer_t){.struct_size = sizeof(colibri_buffer_t), .ptr = DENSE, .size = file_bytes[0]};
    l->weights[1] = (colibri_buffer_t){.struct_size = sizeof(colibri_buffer_t), .ptr = EXPERTS, .size = file_bytes[1]};
    l->config = (colibri_config_t){.struct_size = sizeof l->config, .weights = l->weights, .n_weights = CLB_FILES,
                                   .slab_tokens = 32};
}

/* Both passes over a copy of exactly `size` bytes, into memory of exactly the size the first one asks for. */
static colibri_status_t load(load_t *l, const char *text, size_t size) {
    char *copy = malloc(size ? size : 1);
    memcpy(copy, text, size);
    l->config.manifest = copy;
    l->config.manifest_size = size;
    colibri_status_t status = clb_load(&l->config, NULL, &l->bytes, &l->err);
    if (!status) {
        uint64_t again = 0;
        CHECK(l->bytes % 64 == 0 && l->bytes >= sizeof *l->model && l->bytes <= sizeof *l->model + 64 * size);
        l->model = aligned_alloc(64, l->bytes);
        memset(l->model, 0xa5, l->bytes);
        status = clb_load(&l->config, l->model, &again, &l->err);
        CHECK(again == l->bytes);
    }
    free(copy);
    return status;
}

static void drop(load_t *l) {
    free(l->model);
    l->model = NULL;
}

/* Loads an edited manifest of sample s and expects a failure. */
static void expect_refused(const sample_t *s, const char *text, size_t size, colibri_status_t status,
                           const char *message, const char *what) {
    load_t l;
    prepare(&l, s->file_bytes);
    colibri_status_t got = load(&l, text, size);
    CHECK_MSG(got == status && l.err.status == (int32_t)status && strstr(l.err.message, message),
              "%s: status %d, expected %d; \"%s\", expected \"%s\"", what, got, status, l.err.message, message);
    drop(&l);
}

/* ---- valid manifests ----------------------------------------------------------------------------------------- */

static void check_matrix(const clb_matrix_t *m, const tensor_t *t) {
    CHECK_MSG(m->format == clb_format((uint32_t)t->format) && m->format_id == (uint32_t)t->format, "%s", t->name);
    CHECK_MSG(m->rows == t->rows && m->cols == t->cols && m->nb == clb_blocks(t->cols), "%s", t->name);
    CHECK_MSG(m->panels == clb_panels(t->rows) && m->panels * m->stride == t->bytes, "%s", t->name);
}

static void check_tensor(const struct colibri_model *m, const tensor_t *t) {
    const clb_layer_t *y = t->layer < 0 ? NULL : &m->layers[t->layer];
    const char *target = (y ? (const char *)y : (const char *)m) + t->rule->target;
    if (!t->cols) {
        CHECK_MSG(*(const float *const *)(const void *)target == (const float *)(const void *)(DENSE + t->offset), "%s",
                  t->name);
        return;
    }
    const clb_matrix_t *w = (const clb_matrix_t *)(const void *)target;
    check_matrix(w, t);
    if (t->rule->place != CLB_PER_EXPERT)
        CHECK_MSG(w->data == (const uint8_t *)DENSE + t->offset && w->offset == 0, "%s", t->name);
    else
        CHECK_MSG(!w->data && y->expert_offset[t->expert] + w->offset == t->offset, "%s", t->name);
}

static void check_view(const sample_t *s, const load_t *l) {
    const struct colibri_model *m = l->model;
    uint64_t largest = 0;
    CHECK(!memcmp(&m->g, &s->g, sizeof m->g) && !strcmp(m->arch->name, s->architecture));
    CHECK(m->files[0] == &l->weights[0] && m->files[1] == &l->weights[1] && m->experts == (const uint8_t *)EXPERTS);
    CHECK(m->hdp == 16 && m->norm_eps == 1e-5f && m->weight_bytes == s->file_bytes[0] + s->file_bytes[1]);
    CHECK(m->slab_bytes == 2u * 2 * 2 * 32 * 16 * 2);
    for (int i = 0; i < s->n; i++) check_tensor(m, &s->tensors[i]);
    for (uint32_t i = 0; i < s->g.layers; i++) {
        const clb_layer_t *y = &m->layers[i];
        CHECK(y->expert_bytes == y->down.offset + y->down.panels * y->down.stride);
        if (y->expert_bytes > largest) largest = y->expert_bytes;
        if (s->g.experts == 1) CHECK(!y->router.data);
    }
    CHECK(m->expert_bytes == largest);
    if (s->g.tied_head) CHECK(!memcmp(&m->head, &m->embed, sizeof m->head));
    CHECK((const char *)(m->layers + s->g.layers) <= (const char *)m + l->bytes);
}

static void test_valid(void) {
    for (int i = 0; i < SAMPLES; i++) {
        load_t l;
        prepare(&l, samples[i].file_bytes);
        colibri_status_t status = load(&l, samples[i].text, samples[i].size);
        CHECK_MSG(!status, "sample %d: %s", i, l.err.message);
        if (!status) check_view(&samples[i], &l);
        drop(&l);
    }
}

/* Order of keys and tensors, spacing, escapes and unknown keys do not matter. */
static void test_other_spellings(void) {
    sample_t *s = calloc(1, sizeof *s);
    load_t l;
    prepare(&l, samples[0].file_bytes);
    *s = samples[0];
    s->size = 0;
    print(s, " { \"future\" : [ { \"x\" : [ 1.5e-3 , null ] } ] ,\r\n\t\"tensors\" : [ ");
    for (int i = s->n; i-- > 0;) {
        print_tensor(s, &s->tensors[i]);
        s->size--;
        print(s, ",\"note\":{\"a\":[true]}} %s", i ? "," : "]");
    }
    const char *files = strstr(samples[0].text, "\"files\""), *tensors = strstr(files, "\"tensors\"");
    const char *geometry = strstr(samples[0].text, "\"geometry\"");
    print(s, ", %.*s %.*s \"version\":1,\"architecture\":\"mix\\u0074ral\",\"f\\u006frmat\":\"c\\u006flibri\" }  ",
          (int)(tensors - files), files, (int)(files - geometry), geometry);
    colibri_status_t status = load(&l, s->text, s->size);
    CHECK_MSG(!status, "%s", l.err.message);
    if (!status) check_view(&samples[0], &l);
    drop(&l);
    free(s);
}

/* ---- single edits -------------------------------------------------------------------------------------------- */

static const tensor_t *tensor_named(const sample_t *s, const char *name) {
    for (int i = 0; i < s->n; i++)
        if (!strcmp(s->tensors[i].name, name)) return &s->tensors[i];
    fprintf(stderr, "no tensor %s\n", name);
    exit(2);
}

/* What a value is replaced by may hold @TENSOR@ = the offset of that tensor, or @TENSOR+N@. */
static void expand(const sample_t *s, const char *in, char *out, size_t cap) {
    size_t n = 0;
    while (*in) {
        char name[40];
        unsigned long long plus = 0;
        if (*in != '@' || sscanf(in + 1, "%39[^+@]+%llu", name, &plus) < 1) {
            out[n++] = *in++;
            continue;
        }
        n += (size_t)snprintf(out + n, cap - n, "%llu", (unsigned long long)tensor_named(s, name)->offset + plus);
        in = strchr(in + 1, '@') + 1;
    }
    out[n] = '\0';
}

/* The text of sample s with its first `find` at or after `anchor` replaced; the caller frees it. */
static char *edit(const sample_t *s, const char *anchor, const char *find, const char *replace) {
    const char *at = strstr(s->text, anchor), *hit = at ? strstr(at, find) : NULL;
    if (!hit) {
        fprintf(stderr, "nothing to edit: %s %s\n", anchor, find);
        exit(2);
    }
    char to[512], *out = malloc(MAX_TEXT + sizeof to);
    expand(s, replace, to, sizeof to);
    sprintf(out, "%.*s%s%s", (int)(hit - s->text), s->text, to, hit + strlen(find));
    return out;
}

/* The same for the value of a key, up to the next ',' outside brackets or the closing '}'. */
static char *edit_value(const sample_t *s, const char *anchor, const char *key, const char *value) {
    char start[64], find[256];
    const char *at = strstr(s->text, anchor), *hit;
    snprintf(start, sizeof start, "\"%s\":", key);
    if (!at || !(hit = strstr(at, start))) {
        fprintf(stderr, "no key: %s %s\n", anchor, key);
        exit(2);
    }
    size_t n = strlen(start);
    n += hit[n] == '[' ? strcspn(hit + n, "]") + 1 : strcspn(hit + n, ",}");
    snprintf(find, sizeof find, "%.*s", (int)n, hit);
    snprintf(start, sizeof start, "\"%s\":%s", key, value);
    return edit(s, anchor, find, start);
}

#define T(name) "\"name\":\"" name "\""
#define HUGE_INTEGER "9007199254740992" /* 2^53 */
/* {sample, anchor, key, new value, status, message} */
static const struct {
    int sample;
    const char *anchor, *key, *value;
    colibri_status_t status;
    const char *message;
} value_cases[] = {
    {0, "{", "format", "\"gguf\"", COLIBRI_MANIFEST, "\"format\""},
    {0, "{", "format", "7", COLIBRI_MANIFEST, "\"format\", byte 10: expected a string"},
    {0, "{", "version", "2", COLIBRI_UNSUPPORTED, "version 2"},
    {0, "{", "version", "1.0", COLIBRI_MANIFEST, "\"version\""},
    {0, "{", "version", "\"1\"", COLIBRI_MANIFEST, "\"version\""},
    {0, "{", "architecture", "\"mixtra\"", COLIBRI_UNSUPPORTED, "\"mixtra\""},
    {0, "{", "architecture", "\"mixtral2\"", COLIBRI_UNSUPPORTED, "\"mixtral2\""},
    {0, "{", "architecture", "\"\"", COLIBRI_UNSUPPORTED, "architecture"},
    {0, "{", "architecture", "\"llama\"", COLIBRI_UNSUPPORTED, "architecture llama: "},
    {2, "{", "architecture", "\"mixtral\"", COLIBRI_UNSUPPORTED, "architecture mixtral: "},
    /* geometry */
    {0, "geometry", "vocab", "0", COLIBRI_MANIFEST, "geometry: \"vocab\" is 0"},
    {0, "geometry", "vocab", "16777217", COLIBRI_MANIFEST, "\"vocab\" is 16777217"},
    {0, "geometry", "vocab", "41", COLIBRI_TENSOR, "\"embed\": shape is [40, 48], expected [41, 48]"},
    {0, "geometry", "hidden", "-48", COLIBRI_MANIFEST, "\"hidden\" is -48"},
    {0, "geometry", "hidden", "1048577", COLIBRI_MANIFEST, "\"hidden\" is 1048577"},
    {0, "geometry", "hidden", "48.0", COLIBRI_MANIFEST, "\"hidden\", byte"},
    {0, "geometry", "hidden", "4.8e1", COLIBRI_MANIFEST, "\"hidden\", byte"},
    {0, "geometry", "hidden", "048", COLIBRI_MANIFEST, "leading zero"},
    {0, "geometry", "hidden", "null", COLIBRI_MANIFEST, "\"hidden\", byte"},
    {0, "geometry", "hidden", "99999999999999999999999", COLIBRI_MANIFEST, "\"hidden\", byte"},
    {0, "geometry", "layers", "0", COLIBRI_MANIFEST, "\"layers\" is 0"},
    {0, "geometry", "layers", "4097", COLIBRI_MANIFEST, "\"layers\" is 4097"},
    {0, "geometry", "layers", "3", COLIBRI_TENSOR, "missing: role attn_norm, layer 2"},
    {0, "geometry", "layers", "1", COLIBRI_TENSOR, "\"attn_norm.1\": layer 1 does not fit"},
    {0, "geometry", "layers", "4096", COLIBRI_TENSOR, "the geometry needs"},
    {0, "geometry", "heads", "3", COLIBRI_MANIFEST, "heads is not a multiple of kv_heads"},
    {0, "geometry", "heads", "0", COLIBRI_MANIFEST, "\"heads\" is 0"},
    {0, "geometry", "heads", "1048576", COLIBRI_MANIFEST, "heads * head_dim"},
    {0, "geometry", "heads", "1048577", COLIBRI_MANIFEST, "\"heads\" is"},
    {0, "geometry", "kv_heads", "0", COLIBRI_MANIFEST, "\"kv_heads\" is 0"},
    {0, "geometry", "kv_heads", "8", COLIBRI_MANIFEST, "multiple of kv_heads"},
    {0, "geometry", "head_dim", "11", COLIBRI_MANIFEST, "head_dim is odd"},
    {0, "geometry", "head_dim", "1026", COLIBRI_MANIFEST, "\"head_dim\" is 1026"},
    {0, "geometry", "head_dim", "14", COLIBRI_TENSOR, "\"rope_freqs\": shape is [6], expected [7]"},
    {0, "geometry", "inter", "0", COLIBRI_MANIFEST, "\"inter\" is 0"},
    {0, "geometry", "inter", "18446744073709551616", COLIBRI_MANIFEST, "\"inter\", byte"},
    {0, "geometry", "experts", "0", COLIBRI_MANIFEST, "\"experts\" is 0"},
    {0, "geometry", "experts", "65537", COLIBRI_MANIFEST, "\"experts\" is 65537"},
    {0, "geometry", "experts", "65536", COLIBRI_TENSOR, "the geometry needs"},
    {0, "geometry", "experts", "4", COLIBRI_TENSOR, "\"router.0\": shape is [3, 48], expected [4, 48]"},
    {0, "geometry", "top_k", "0", COLIBRI_MANIFEST, "\"top_k\" is 0"},
    {0, "geometry", "top_k", "4", COLIBRI_MANIFEST, "top_k exceeds experts"},
    {0, "geometry", "top_k", "65", COLIBRI_MANIFEST, "\"top_k\" is 65"},
    {0, "geometry", "context", "0", COLIBRI_MANIFEST, "\"context\" is 0"},
    {0, "geometry", "context", "2147483649", COLIBRI_MANIFEST, "\"context\" is 2147483649"},
    {0, "geometry", "window", "-1", COLIBRI_MANIFEST, "\"window\" is -1"},
    {0, "geometry", "norm_eps_bits", "0", COLIBRI_MANIFEST, "\"norm_eps_bits\" is 0"},
    {0, "geometry", "norm_eps_bits", "1065353217", COLIBRI_MANIFEST, "\"norm_eps_bits\""},          /* above 1 */
    {0, "geometry", "norm_eps_bits", "2143289344", COLIBRI_MANIFEST, "\"norm_eps_bits\""},          /* NaN */
    {0, "geometry", "norm_eps_bits", "2147483649", COLIBRI_MANIFEST, "\"norm_eps_bits\""},          /* negative */
    {0, "geometry", "tied_head", "2", COLIBRI_MANIFEST, "\"tied_head\" is 2"},
    {0, "geometry", "tied_head", "true", COLIBRI_MANIFEST, "\"tied_head\", byte"},
    {0, "geometry", "tied_head", "1", COLIBRI_TENSOR, "\"head\": unexpected role head (tied_head is 1)"},
    {1, "geometry", "tied_head", "0", COLIBRI_TENSOR, "missing: role head, layer -1, expert -1"},
    /* files */
    {0, T("dense.bin"), "name", "\"../dense.bin\"", COLIBRI_MANIFEST, "files[0]: \"name\""},
    {0, T("experts.bin"), "name", "\"dense.bin\"", COLIBRI_MANIFEST, "files[1]: \"name\""},
    {0, T("dense.bin"), "bytes", "0", COLIBRI_MANIFEST, "files[0]: \"bytes\" is 0"},
    {0, T("dense.bin"), "bytes", "-1", COLIBRI_MANIFEST, "files[0]: \"bytes\" is -1"},
    {0, T("dense.bin"), "bytes", HUGE_INTEGER, COLIBRI_MANIFEST, "files[0]: \"bytes\""},
    {0, T("dense.bin"), "bytes", "1", COLIBRI_TENSOR, "dense.bin: the file has"},
    {0, T("experts.bin"), "bytes", "4503599627370496", COLIBRI_BUFFER_TOO_SMALL, "experts.bin: the file has"},
    /* kinds and places of tensors */
    {0, T("embed"), "role", "\"embedding\"", COLIBRI_TENSOR, "\"embed\": architecture mixtral has no role \"embe"},
    {0, T("embed"), "role", "\"\"", COLIBRI_TENSOR, "has no role \"\""},
    {0, T("embed"), "role", "\"head\"", COLIBRI_TENSOR, "\"head\": duplicate of role head"},
    {0, T("embed"), "role", "null", COLIBRI_MANIFEST, "tensors[0]: \"role\", byte"},
    {2, T("attn_norm.0"), "role", "\"router\"", COLIBRI_TENSOR, "unexpected role router (experts is 1)"},
    {0, T("embed"), "name", "3", COLIBRI_MANIFEST, "tensors[0]: \"name\""},
    {0, T("embed"), "layer", "0", COLIBRI_TENSOR, "layer 0 does not fit role embed"},
    {0, T("embed"), "expert", "0", COLIBRI_TENSOR, "expert 0 does not fit role embed"},
    {0, T("attn_q.1"), "layer", "-1", COLIBRI_TENSOR, "\"attn_q.1\": layer -1 does not fit role attn_q"},
    {0, T("attn_q.1"), "layer", "-2", COLIBRI_MANIFEST, "\"layer\" is -2"},
    {0, T("attn_q.1"), "layer", "2", COLIBRI_TENSOR, "layer 2 does not fit role attn_q and 2 layers"},
    {0, T("attn_q.1"), "layer", "4294967297", COLIBRI_TENSOR, "layer 4294967297 does not fit"},
    {0, T("attn_q.1"), "layer", "9223372036854775807", COLIBRI_MANIFEST, "\"layer\" is 9223372036854775807"},
    {0, T("attn_q.1"), "layer", "0", COLIBRI_TENSOR, "\"attn_q.1\": duplicate of role attn_q, layer 0, expert -1"},
    {0, T("attn_q.1"), "expert", "0", COLIBRI_TENSOR, "expert 0 does not fit role attn_q"},
    {0, T("ffn_up.1.2"), "expert", "3", COLIBRI_TENSOR, "expert 3 does not fit role ffn_up and 3 experts"},
    {0, T("ffn_up.1.2"), "expert", "-1", COLIBRI_TENSOR, "expert -1 does not fit role ffn_up"},
    {0, T("ffn_up.1.2"), "expert", "0", COLIBRI_TENSOR, "duplicate of role ffn_up, layer 1, expert 0"},
    {0, T("ffn_up.1.2"), "layer", "-1", COLIBRI_TENSOR, "layer -1 does not fit role ffn_up"},
    /* dtype and layout */
    {0, T("attn_q.0"), "dtype", "\"q5\"", COLIBRI_UNSUPPORTED, "\"attn_q.0\": unknown dtype \"q5\""},
    {0, T("attn_q.0"), "dtype", "\"I16\"", COLIBRI_UNSUPPORTED, "unknown dtype \"I16\""},
    {0, T("attn_q.0"), "dtype", "\"F64\"", COLIBRI_UNSUPPORTED, "unknown dtype"},
    {0, T("attn_q.0"), "dtype", "\"q8\\u0000\"", COLIBRI_UNSUPPORTED, "unknown dtype"},
    {0, T("attn_q.0"), "dtype", "\"\"", COLIBRI_UNSUPPORTED, "unknown dtype"},
    {0, T("attn_q.0"), "dtype", "\"f32f32f32f32f32f32f32\"", COLIBRI_UNSUPPORTED, "unknown dtype"},
    {0, T("attn_q.0"), "dtype", "\"q4\"", COLIBRI_TENSOR, "\"attn_q.0\": \"bytes\" is"},
    {0, T("router.0"), "dtype", "\"f16\"", COLIBRI_TENSOR, "\"router.0\": dtype is f16, role router must be f32"},
    {0, T("final_norm"), "dtype", "\"bf16\"", COLIBRI_TENSOR, "role final_norm must be f32"},
    {0, T("attn_q.0"), "layout", "\"row\"", COLIBRI_TENSOR, "layout is \"row\", role attn_q needs \"panel16\""},
    {0, T("attn_q.0"), "layout", "\"panel32\"", COLIBRI_TENSOR, "layout is \"panel32\""},
    {0, T("ffn_norm.0"), "layout", "\"panel16\"", COLIBRI_TENSOR, "role ffn_norm needs \"row\""},
    /* shape and bytes */
    {0, T("attn_q.0"), "shape", "[48,49]", COLIBRI_TENSOR, "\"attn_q.0\": shape is [48, 49], expected [48, 48]"},
    {0, T("attn_k.0"), "shape", "[48,24]", COLIBRI_TENSOR, "shape is [48, 24], expected [24, 48]"},
    {0, T("attn_q.0"), "shape", "[]", COLIBRI_TENSOR, "shape has 0 dimensions, expected 2"},
    {0, T("attn_q.0"), "shape", "[2304]", COLIBRI_TENSOR, "shape has 1 dimensions, expected 2"},
    {0, T("attn_q.0"), "shape", "[48,48,1]", COLIBRI_TENSOR, "shape has 3 dimensions, expected 2"},
    {0, T("attn_q.0"), "shape", "[4294967344,48]", COLIBRI_TENSOR, "shape is [4294967344, 48]"}, /* 48 mod 2^32 */
    {0, T("attn_q.0"), "shape", "[48,-48]", COLIBRI_MANIFEST, "\"shape\" is -48"},
    {0, T("attn_q.0"), "shape", "[48,48.0]", COLIBRI_MANIFEST, "\"shape\", byte"},
    {0, T("attn_q.0"), "shape", "[48," HUGE_INTEGER "]", COLIBRI_MANIFEST, "\"shape\" is"},
    {0, T("attn_q.0"), "shape", "[48,[48]]", COLIBRI_MANIFEST, "\"shape\", byte"},
    {0, T("attn_q.0"), "shape", "48", COLIBRI_MANIFEST, "\"shape\", byte"},
    {0, T("final_norm"), "shape", "[48,1]", COLIBRI_TENSOR, "shape has 2 dimensions, expected 1"},
    {0, T("final_norm"), "shape", "[47]", COLIBRI_TENSOR, "shape is [47], expected [48]"},
    {0, T("attn_q.0"), "bytes", "64", COLIBRI_TENSOR, "\"attn_q.0\": \"bytes\" is 64, shape and dtype make"},
    {0, T("attn_q.0"), "bytes", "0", COLIBRI_MANIFEST, "\"bytes\" is 0"},
    {0, T("attn_q.0"), "bytes", "-64", COLIBRI_MANIFEST, "\"bytes\" is -64"},
    {0, T("final_norm"), "bytes", "256", COLIBRI_TENSOR, "\"bytes\" is 256, shape and dtype make 192"},
    /* extents */
    {0, T("attn_q.0"), "file", "1", COLIBRI_TENSOR, "stands in experts.bin, role attn_q belongs in dense.bin"},
    {0, T("ffn_gate.0.0"), "file", "0", COLIBRI_TENSOR, "stands in dense.bin, role ffn_gate belongs in experts.bin"},
    {0, T("attn_q.0"), "file", "2", COLIBRI_MANIFEST, "\"file\" is 2"},
    {0, T("attn_q.0"), "file", "-1", COLIBRI_MANIFEST, "\"file\" is -1"},
    {0, T("attn_q.0"), "offset", "-64", COLIBRI_MANIFEST, "\"offset\" is -64"},
    {0, T("attn_q.0"), "offset", "@attn_q.0+32@", COLIBRI_TENSOR, "in dense.bin is not a multiple of 64"},
    {0, T("attn_q.0"), "offset", "9007199254740928", COLIBRI_TENSOR, "beyond the end of dense.bin"},
    {0, T("attn_q.0"), "offset", "18446744073709551552", COLIBRI_MANIFEST, "\"offset\", byte"},
    {0, T("ffn_down.1.2"), "offset", "@ffn_down.1.2+64@", COLIBRI_TENSOR, "beyond the end of experts.bin"},
    {0, T("attn_q.0"), "offset", "@attn_o.0@", COLIBRI_TENSOR, "dense.bin: extents overlap: role attn_"},
    {0, T("attn_v.0"), "offset", "@attn_k.0@", COLIBRI_TENSOR, "role attn_v, layer 0, expert -1"},
    {0, T("final_norm"), "offset", "@embed+64@", COLIBRI_TENSOR, "role embed, layer -1, expert -1 and role final_norm"},
    {0, T("ffn_gate.1.1"), "offset", "@ffn_gate.1.1+64@", COLIBRI_TENSOR, "expert 1 starts at"},
    {0, T("ffn_up.1.1"), "offset", "@ffn_down.1.1@", COLIBRI_TENSOR, "role ffn_up, layer 1, expert 1 stands at"},
    {0, T("ffn_up.1.1"), "offset", "@ffn_up.1.1+64@", COLIBRI_TENSOR, "must follow its expert's last tensor"},
    {0, T("ffn_gate.1.1"), "offset", "@ffn_gate.1.0@", COLIBRI_TENSOR, "role ffn_up, layer 1, expert 1 stands at"},
};

static void test_values(void) {
    for (size_t i = 0; i < sizeof value_cases / sizeof *value_cases; i++) {
        const sample_t *s = &samples[value_cases[i].sample];
        char what[256], *text = edit_value(s, value_cases[i].anchor, value_cases[i].key, value_cases[i].value);
        snprintf(what, sizeof what, "%s %s = %s", value_cases[i].anchor, value_cases[i].key, value_cases[i].value);
        expect_refused(s, text, strlen(text), value_cases[i].status, value_cases[i].message, what);
        free(text);
    }
}

/* {anchor, find, replace, status, message}, all in sample 0 */
static const struct {
    const char *anchor, *find, *replace;
    colibri_status_t status;
    const char *message;
} text_cases[] = {
    {"{", "\"format\":\"colibri\",", "", COLIBRI_MANIFEST, "top level: key \"format\" is missing"},
    {"{", "\"version\":1,", "", COLIBRI_MANIFEST, "key \"version\" is missing"},
    {"{", "\"architecture\"", "\"arch\"", COLIBRI_MANIFEST, "key \"architecture\" is missing"},
    {"{", "\"geometry\"", "\"geom\"", COLIBRI_MANIFEST, "key \"geometry\" is missing"},
    {"{", "\"files\"", "\"file\"", COLIBRI_MANIFEST, "key \"files\" is missing"},
    {"\"files\"", "\"tensors\"", "\"tensor\"", COLIBRI_MANIFEST, "key \"tensors\" is missing"},
    {"{", "\"version\":1", "\"version\":1,\"version\":1", COLIBRI_MANIFEST, "key \"version\" stands twice"},
    {"{", "\"version\":1", "\"version\":1,\"vers\\u0069on\":1", COLIBRI_MANIFEST, "stands twice"},
    {"{", "\"version\":1", "\"version\":1,\"tensors\":[]", COLIBRI_MANIFEST, "key \"tensors\" stands twice"},
    {"{", "\"name\":\"test\"", "\"name\":\"test\",\"name\":\"b\"", COLIBRI_MANIFEST, "key \"name\" stands twice"},
    {"geometry", "\"vocab\":40,", "", COLIBRI_MANIFEST, "geometry: key \"vocab\" is missing"},
    {"geometry", "\"window\":0,", "", COLIBRI_MANIFEST, "geometry: key \"window\" is missing"},
    {"geometry", "\"vocab\":40", "\"vocab\":40,\"vocab\":40", COLIBRI_MANIFEST, "key \"vocab\" stands twice"},
    {"geometry", "\"vocab\":40", "\"vocab\":40,\"rope\":1", COLIBRI_MANIFEST, "geometry: key \"rope\" is unknown"},
    {"{", "\"geometry\":{", "\"geometry\":[],\"g\":{", COLIBRI_MANIFEST, "geometry: byte"},
    {T("dense.bin"), T("dense.bin") ",", "", COLIBRI_MANIFEST, "files[0]: key \"name\" is missing"},
    {"{", "\"files\":[", "\"files\":[],\"x\":[", COLIBRI_MANIFEST, "exactly dense.bin and experts.bin"},
    {T("experts.bin"), "}]", "},{\"name\":\"c\",\"bytes\":1}]", COLIBRI_MANIFEST, "exactly dense.bin and"},
    {"{", "\"files\":[{", "\"files\":[{\"name\":\"dense.bin\",\"bytes\":1}],\"x\":[{", COLIBRI_MANIFEST, "exactly"},
    {"{", "\"files\":[{", "\"files\":[7,{", COLIBRI_MANIFEST, "files[0]: byte"},
    {"\"tensors\"", "[", "[[],", COLIBRI_MANIFEST, "tensors[0]: byte"},
    {"\"tensors\"", "[", "[{},", COLIBRI_MANIFEST, "tensors[0]: key \"name\" is missing"},
    {"{", "\"files\":[", "\"files\":{},\"x\":[", COLIBRI_MANIFEST, "files: byte"},
    {"{", "\"tensors\":[", "\"tensors\":3,\"x\":[", COLIBRI_MANIFEST, "tensors: byte"},
    {"\"tensors\"", "[", "[],\"x\":[", COLIBRI_TENSOR, "tensor missing: role embed"},
    {T("embed"), "\"shape\":[40,48],", "", COLIBRI_MANIFEST, "tensors[0]: key \"shape\" is missing"},
    {T("head"), "\"offset\":", "\"off\":", COLIBRI_MANIFEST, "tensors[1]: key \"offset\" is missing"},
    {T("head"), "\"layer\":-1", "\"layer\":-1,\"layer\":-1", COLIBRI_MANIFEST, "[1]: key \"layer\" stands twice"},
    {T("head"), "\"sha256\"", "\"sha256\":\"\",\"sha256\"", COLIBRI_MANIFEST, "key \"sha256\" stands twice"},
    {"\"tensors\"", "]}\n", "]} {}", COLIBRI_MANIFEST, "after the end of the document"},
    {"{", "{", "\xef\xbb\xbf{", COLIBRI_MANIFEST, "byte 0"},
    {"{", "{", "[{", COLIBRI_MANIFEST, "top level: byte 0: expected an object"},
    {"{", "\"test\"", "\"te\xff" "st\"", COLIBRI_MANIFEST, "invalid UTF-8"},
    {"{", "\"test\"", "\"te\nst\"", COLIBRI_MANIFEST, "control character"},
    {"{", "\"test\"", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]", COLIBRI_MANIFEST, "32 deep"},
};

static void test_texts(void) {
    for (size_t i = 0; i < sizeof text_cases / sizeof *text_cases; i++) {
        char *text = edit(&samples[0], text_cases[i].anchor, text_cases[i].find, text_cases[i].replace);
        expect_refused(&samples[0], text, strlen(text), text_cases[i].status, text_cases[i].message,
                       text_cases[i].replace);
        free(text);
    }
}

/* ---- edits of the list of tensors ---------------------------------------------------------------------------- */

/* Sample s's manifest with tensor `i` left out (and put in again at the end `copies` times). */
static char *without(const sample_t *s, int i, int copies) {
    char name[64], *out = malloc(MAX_TEXT + 2048);
    snprintf(name, sizeof name, "{\"name\":\"%s\"", s->tensors[i].name);
    const char *start = strstr(s->text, name), *end = strchr(start, '}') + 1, *tail = strstr(end, "]}\n");
    int comma = *end == ',';
    int n = sprintf(out, "%.*s", (int)(start - s->text) - (comma ? 0 : 2), s->text);
    n += sprintf(out + n, "%.*s", (int)(tail - end) - comma, end + comma);
    while (copies--) n += sprintf(out + n, ",%.*s", (int)(end - start), start);
    sprintf(out + n, "]}\n");
    return out;
}

static void test_each_tensor(void) {
    for (int k = 0; k < SAMPLES; k++)
        for (int i = 0; i < samples[k].n; i++) {
            const tensor_t *t = &samples[k].tensors[i];
            char message[128], *text = without(&samples[k], i, 0);
            snprintf(message, sizeof message, "tensor missing: role %s, layer %d, expert %d", t->rule->role, t->layer,
                     t->expert);
            expect_refused(&samples[k], text, strlen(text), COLIBRI_TENSOR, message, "a tensor left out");
            free(text);
            snprintf(message, sizeof message, "\"%s\": duplicate of role %s", t->name, t->rule->role);
            text = without(&samples[k], i, 2);
            expect_refused(&samples[k], text, strlen(text), COLIBRI_TENSOR, message, "a tensor twice");
            free(text);
        }
}

/* Builds sample 0 anew with experts' formats changed by `change`, and expects a failure. */
static void expect_formats(void (*change)(sample_t *), const char *message) {
    sample_t *s = calloc(1, sizeof *s);
    s->architecture = "mixtral";
    s->g = samples[0].g;
    s->dense_format = s->gate_format = s->down_format = "f16";
    build(s);
    change(s);
    char *text = strdup(s->text);
    expect_refused(s, text, strlen(text), COLIBRI_TENSOR, message, message);
    free(text);
    free(s);
}

/* f16 and bf16 have the same size, so only the dtype is wrong. */
static void rename_dtype(sample_t *s, const char *name) {
    char anchor[64];
    snprintf(anchor, sizeof anchor, "\"name\":\"%s\"", name);
    char *text = edit(s, anchor, "\"f16\"", "\"bf16\"");
    strcpy(s->text, text);
    free(text);
}

static void other_expert(sample_t *s) { rename_dtype(s, "ffn_down.1.2"); }
static void gate_and_up(sample_t *s) {
    for (int e = 0; e < 3; e++) {
        char name[32];
        snprintf(name, sizeof name, "ffn_up.1.%d", e);
        rename_dtype(s, name);
    }
}

static void test_expert_formats(void) {
    expect_formats(other_expert, "\"ffn_down.1.2\": dtype is bf16, other experts of layer 1 have f16");
    expect_formats(gate_and_up, "layer 1: ffn_gate is f16 and ffn_up is bf16");
}

/* Two whole experts over each other: each is one extent, but not its own. */
static void test_aliased_experts(void) {
    sample_t *s = calloc(1, sizeof *s);
    *s = samples[0];
    s->size = 0;
    s->n = 0;
    s->file_bytes[0] = s->file_bytes[1] = 0;
    build(s);
    for (const char *const *role = (const char *const[]){"ffn_gate", "ffn_up", "ffn_down", NULL}; *role; role++) {
        char anchor[64], value[64];
        snprintf(anchor, sizeof anchor, "\"name\":\"%s.1.2\"", *role);
        snprintf(value, sizeof value, "@%s.0.1@", *role);
        char *text = edit_value(s, anchor, "offset", value);
        strcpy(s->text, text);
        free(text);
    }
    expect_refused(s, s->text, strlen(s->text), COLIBRI_TENSOR, "experts.bin: extents overlap: role ffn_gate, layer",
                   "aliased experts");
    free(s);
}

/* ---- buffers and configuration ------------------------------------------------------------------------------- */

static int32_t fetch(void *user, int32_t layer, colibri_expert_lease_t *leases, uint32_t n) {
    (void)user, (void)layer, (void)leases, (void)n;
    return 0;
}

static void with_fetch(load_t *l) {
    l->config.expert_fetch = fetch;
    l->weights[1].ptr = NULL;
    l->weights[1].size = 0;
}
static void no_experts(load_t *l) { l->weights[1].ptr = NULL, l->weights[1].size = 0; }
static void null_experts(load_t *l) { l->weights[1].ptr = NULL; }
static void null_dense(load_t *l) { l->weights[0].ptr = NULL; }
static void short_dense(load_t *l) { l->weights[0].size--; }
static void long_experts(load_t *l) { l->weights[1].size++; }
static void fetch_short(load_t *l) { with_fetch(l), l->weights[1].size = 64, l->weights[1].ptr = EXPERTS; }
static void one_file(load_t *l) { l->config.n_weights = 1; }
static void three_files(load_t *l) { l->config.n_weights = 3; }
static void no_files(load_t *l) { l->config.weights = NULL; }

static void test_buffers(void) {
    static const struct {
        void (*change)(load_t *);
        colibri_status_t status;
        const char *message;
    } cases[] = {
        {no_experts, COLIBRI_BUFFER_TOO_SMALL, "experts.bin: the file has 0 bytes"},
        {null_experts, COLIBRI_INVALID_ARGUMENT, "experts.bin: the buffer's ptr is NULL"},
        {null_dense, COLIBRI_INVALID_ARGUMENT, "dense.bin: the buffer's ptr is NULL"},
        {short_dense, COLIBRI_BUFFER_TOO_SMALL, "dense.bin: the file has"},
        {long_experts, COLIBRI_TENSOR, "experts.bin: the file has"},
        {fetch_short, COLIBRI_BUFFER_TOO_SMALL, "experts.bin: the file has 64 bytes"},
        {one_file, COLIBRI_INVALID_ARGUMENT, "config.weights has 1 buffers"},
        {three_files, COLIBRI_INVALID_ARGUMENT, "config.weights has 3 buffers"},
        {no_files, COLIBRI_INVALID_ARGUMENT, "config.weights"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        load_t l;
        prepare(&l, samples[0].file_bytes);
        cases[i].change(&l);
        colibri_status_t status = load(&l, samples[0].text, samples[0].size);
        CHECK_MSG(status == cases[i].status && strstr(l.err.message, cases[i].message), "%s: %d %s", cases[i].message,
                  status, l.err.message);
        drop(&l);
    }
}

static void test_configurations(void) {
    load_t l;
    prepare(&l, samples[0].file_bytes);
    with_fetch(&l);
    CHECK(!load(&l, samples[0].text, samples[0].size) && !l.model->experts);
    CHECK(l.model->layers[1].expert_offset[2] == tensor_named(&samples[0], "ffn_gate.1.2")->offset);
    drop(&l);
    prepare(&l, samples[0].file_bytes);
    l.config.kv_format = COLIBRI_KV_F32;
    l.config.slab_tokens = 0;
    CHECK(!load(&l, samples[0].text, samples[0].size) && l.model->slab_bytes == 2u * 2 * 2 * 64 * 16 * 4);
    drop(&l);
    prepare(&l, samples[0].file_bytes);
    CHECK(load(&l, "", 0) == COLIBRI_MANIFEST && strstr(l.err.message, "empty"));
    l.config.manifest = NULL;
    l.config.manifest_size = 5;
    CHECK(clb_load(&l.config, NULL, &l.bytes, &l.err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(clb_load(&l.config, NULL, &l.bytes, NULL) == COLIBRI_INVALID_ARGUMENT); /* no error struct wanted */
}

/* One slab of the largest geometry and slab_tokens is beyond 2^64 bytes. Padding makes the manifest large enough to be
 * believed about its number of layers. */
static void test_slab_overflow(void) {
    static const char wide[] = "\"layers\":4096,\"heads\":524288,\"kv_heads\":524288,\"head_dim\":2";
    const size_t padded = 8u << 20;
    char *text = edit(&samples[2], "geometry", "\"layers\":2,\"heads\":4,\"kv_heads\":2,\"head_dim\":12", wide);
    char *large = malloc(padded);
    load_t l;
    memset(large, ' ', padded);
    memcpy(large, text, strlen(text));
    prepare(&l, samples[2].file_bytes);
    l.config.slab_tokens = 0xfffffff0u;
    l.config.manifest = large;
    l.config.manifest_size = padded;
    CHECK(!clb_load(&l.config, NULL, &l.bytes, &l.err));
    l.model = aligned_alloc(64, l.bytes);
    colibri_status_t status = clb_load(&l.config, l.model, &l.bytes, &l.err);
    CHECK_MSG(status == COLIBRI_INVALID_ARGUMENT && strstr(l.err.message, "slab_tokens"), "%s", l.err.message);
    drop(&l);
    free(large);
    free(text);
}

/* ---- damage -------------------------------------------------------------------------------------------------- */

static void test_truncated(void) {
    for (int k = 0; k < SAMPLES; k += 3)
        for (size_t n = 0; n < samples[k].size - 1; n++) /* the last byte is a line feed */
            expect_refused(&samples[k], samples[k].text, n, COLIBRI_MANIFEST, "manifest.json", "truncated");
}

/* Damage that leaves JSON valid is the interesting kind: digits, letters and structure exchanged for one another. */
static void test_flipped(void) {
    static const char likely[] = "0123456789-.eE\"\\{}[],: aun";
    unsigned long long seed = 88172645463325252ull;
    int refused = 0, accepted = 0;
    for (int i = 0; i < 100000; i++) {
        const sample_t *s = &samples[test_random(&seed) % SAMPLES];
        char text[MAX_TEXT];
        load_t l;
        memcpy(text, s->text, s->size);
        for (unsigned n = 1 + test_random(&seed) % 3; n--;) {
            unsigned r = test_random(&seed);
            text[test_random(&seed) % s->size] = r & 1 ? likely[(r >> 8) % (sizeof likely - 1)] : (char)(r >> 8);
        }
        prepare(&l, s->file_bytes);
        colibri_status_t status = load(&l, text, s->size);
        if (status) CHECK(status == (colibri_status_t)l.err.status && l.err.message[0]);
        *(status ? &refused : &accepted) += 1;
        drop(&l);
    }
    CHECK_MSG(refused > 50000 && accepted > 1000, "%d refused, %d accepted", refused, accepted);
}

int main(void) {
    for (int i = 0; i < SAMPLES; i++) build(&samples[i]);
    test_valid();
    test_other_spellings();
    test_values();
    test_texts();
    test_each_tensor();
    test_expert_formats();
    test_aliased_experts();
    test_buffers();
    test_configurations();
    test_slab_overflow();
    test_truncated();
    test_flipped();
    return report();
}
