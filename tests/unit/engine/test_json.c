/* The JSON reader: what RFC 8259 allows is read, everything else is refused at the right byte, and nothing is read
 * beyond the end of the text (each text is copied into memory of exactly its size, for the sanitizers). */
#include "base/json.h"
#include "test.h"

static char *exact(const char *text, size_t n) {
    char *p = malloc(n ? n : 1);
    memcpy(p, text, n);
    return p;
}

/* Skips one whole document: the fault and where it is, or NULL. */
static const char *skip_document(const char *text, size_t n, uint64_t *at) {
    char *p = exact(text, n);
    clb_json_t j = clb_json_open(p, n);
    if (!clb_json_skip(&j)) clb_json_end(&j);
    *at = clb_json_offset(&j);
    free(p);
    return j.fault;
}

static void test_accepts(void) {
    static const char *const texts[] = {
        "null", " true ", "false", "0", "-0", "-0.0e-0", "1E+5", "123456789012345678901234567890", "\"\"", "[]", "{}",
        "[[],{}]", "{\"a\":[1,2,{\"b\":null}],\"a\":\"x\"}", "\t\r\n[ 1 , 2 ]\n",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0000\"",
        "\"\\ud83d\\ude00\"",
        "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf\"", "\"\x7f\"",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        uint64_t at;
        const char *fault = skip_document(texts[i], strlen(texts[i]), &at);
        CHECK_MSG(!fault, "%s: %s at %d", texts[i], fault, (int)at);
    }
}

static void test_refuses(void) {
    static const struct {
        const char *text;
        uint64_t at;
        const char *fault;
    } cases[] = {
        {"", 0, "ends too early"}, {"  ", 2, "ends too early"}, {"1 2", 2, "after the end"}, {"nul", 0, "a value"},
        {"tru", 0, "a value"}, {"nulL", 0, "a value"}, {"True", 0, "a value"}, {"NaN", 0, "a value"},
        {"+1", 0, "a value"}, {".5", 0, "a value"}, {"'a'", 0, "a value"}, {"01", 0, "leading zero"},
        {"-01", 1, "leading zero"}, {"-", 1, "a digit"}, {"-x", 1, "a digit"}, {"1.", 2, "after the point"},
        {"1.e5", 2, "after the point"}, {"1e", 2, "exponent"}, {"1e+", 3, "exponent"}, {"0x10", 1, "after the end"},
        {"[", 1, "ends too early"}, {"[1", 2, "ends too early"}, {"[1,", 3, "ends too early"}, {"[1,]", 3, "a value"},
        {"[,1]", 1, "a value"}, {"[1 2]", 3, "',' or ']'"}, {"[1}", 2, "',' or ']'"}, {"{1:2}", 1, "a key"},
        {"{\"a\"}", 4, "':'"}, {"{\"a\" 1}", 5, "':'"}, {"{\"a\":}", 5, "a value"}, {"{\"a\":1,}", 7, "a key"},
        {"{\"a\":1 \"b\":2}", 7, "',' or '}'"}, {"{\"a\":1]", 6, "',' or '}'"}, {"{", 1, "ends too early"},
        {"{\"a", 3, "inside a string"}, {"]", 0, "a value"}, {"[]]", 2, "after the end"}, {"\"a\nb\"", 2, "control"},
        {"\"\x1f\"", 1, "control"}, {"\"\\x\"", 1, "escape"}, {"\"\\", 1, "escape"}, {"\"\\u12", 1, "escape"},
        {"\"\\u12g4\"", 1, "escape"}, {"\"\\ud800\"", 1, "escape"}, {"\"\\ud800\\u0041\"", 1, "escape"},
        {"\"\\udc00\"", 1, "escape"}, {"\"\\ud800\\ud800\"", 1, "escape"}, {"\"\x80\"", 1, "UTF-8"},
        {"\"\xc0\xaf\"", 1, "UTF-8"}, {"\"\xe0\x9f\xbf\"", 1, "UTF-8"}, {"\"\xed\xa0\x80\"", 1, "UTF-8"},
        {"\"\xf0\x8f\xbf\xbf\"", 1, "UTF-8"}, {"\"\xf4\x90\x80\x80\"", 1, "UTF-8"},
        {"\"\xf5\x80\x80\x80\"", 1, "UTF-8"},
        {"\"\xe2\x82\"", 1, "UTF-8"}, {"\"\xe2\x82", 1, "UTF-8"}, {"\"\xc3", 1, "UTF-8"},
        {"\xef\xbb\xbf{}", 0, "a value"},
        {"/* c */ 1", 0, "a value"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t at;
        const char *fault = skip_document(cases[i].text, strlen(cases[i].text), &at);
        CHECK_MSG(fault && strstr(fault, cases[i].fault) && at == cases[i].at, "%s: %s at %d", cases[i].text,
                  fault ? fault : "accepted", (int)at);
    }
    uint64_t at;
    CHECK(skip_document("\"a\0b\"", 5, &at) && at == 2);
    CHECK(skip_document("[1]\0", 4, &at) && at == 3);
}

static void test_depth(void) {
    char text[2 * CLB_JSON_DEPTH + 2];
    uint64_t at;
    for (int depth = CLB_JSON_DEPTH; depth <= CLB_JSON_DEPTH + 1; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        const char *fault = skip_document(text, 2 * (size_t)depth, &at);
        CHECK(depth <= CLB_JSON_DEPTH ? !fault : fault && at == CLB_JSON_DEPTH);
    }
}

static void test_integers(void) {
    static const struct {
        const char *text;
        int ok;
        int64_t value;
    } cases[] = {
        {"0", 1, 0}, {"-1", 1, -1}, {" 42", 1, 42}, {"9223372036854775807", 1, INT64_MAX},
        {"-9223372036854775807", 1, -INT64_MAX}, {"9223372036854775808", 0, 0}, {"99999999999999999999999", 0, 0},
        {"-0", 0, 0}, {"1.0", 0, 0}, {"1e3", 0, 0}, {"007", 0, 0}, {"\"1\"", 0, 0}, {"true", 0, 0}, {"null", 0, 0},
        {"[1]", 0, 0}, {"", 0, 0}, {"-", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n = strlen(cases[i].text);
        char *p = exact(cases[i].text, n);
        clb_json_t j = clb_json_open(p, n);
        int64_t v = 0;
        int ok = !clb_json_int(&j, &v);
        CHECK_MSG(ok == cases[i].ok && v == cases[i].value, "%s", cases[i].text);
        CHECK(ok == !j.fault);
        free(p);
    }
}

static clb_slice_t string_of(clb_json_t *j) {
    clb_slice_t s = {0};
    CHECK(!clb_json_string(j, &s));
    return s;
}

static void test_strings(void) {
    static const char text[] =
        "[\"plain\",\"\\u0061\\n\\u00e9\\u20ac\\ud83d\\ude00\",\"a\\u0000b\",\"\",\"\xc3\xa9t\xc3\xa9\"]";
    static const char decoded[] = "a\n\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80";
    char out[16];
    clb_json_t j = clb_json_open(text, sizeof text - 1);
    clb_slice_t s;
    CHECK(!clb_json_enter(&j, CLB_JSON_ARRAY) && clb_json_next(&j, NULL) == 1);
    s = string_of(&j);
    CHECK(clb_json_equal(s, "plain") && !clb_json_equal(s, "plai") && !clb_json_equal(s, "plains"));
    CHECK(clb_json_copy(s, out, 5) == 5 && !memcmp(out, "plain", 5) && clb_json_copy(s, out, 4) == -1);
    clb_json_next(&j, NULL);
    s = string_of(&j);
    CHECK(clb_json_equal(s, decoded));
    CHECK(clb_json_copy(s, out, sizeof out) == 11 && !memcmp(out, decoded, 11) && clb_json_copy(s, out, 10) == -1);
    clb_json_next(&j, NULL);
    s = string_of(&j);
    CHECK(!clb_json_equal(s, "a") && clb_json_copy(s, out, 3) == 3 && !memcmp(out, "a\0b", 3));
    clb_json_next(&j, NULL);
    s = string_of(&j);
    CHECK(clb_json_equal(s, "") && !clb_json_equal(s, "x") && clb_json_copy(s, out, 0) == 0);
    clb_json_next(&j, NULL);
    s = string_of(&j);
    CHECK(clb_json_clip(s, 9).size == 5 && clb_json_clip(s, 4).size == 3 && clb_json_clip(s, 1).size == 0);
    CHECK(!clb_json_next(&j, NULL) && !clb_json_end(&j));
}

static void test_walk(void) {
    static const char text[] = "{\"a\":{\"n\":[1,2,3]},\"b\":7}";
    clb_json_t j = clb_json_open(text, sizeof text - 1), again;
    clb_slice_t key;
    int64_t v = 0, sum = 0;
    CHECK(!clb_json_enter(&j, CLB_JSON_OBJECT) && clb_json_next(&j, &key) == 1 && clb_json_equal(key, "a"));
    again = j;
    CHECK(clb_json_peek(&j) == CLB_JSON_OBJECT && !clb_json_skip(&j));
    CHECK(clb_json_next(&j, &key) == 1 && clb_json_equal(key, "b") && !clb_json_int(&j, &v) && v == 7);
    CHECK(!clb_json_next(&j, &key) && !clb_json_end(&j));
    CHECK(!clb_json_enter(&again, CLB_JSON_OBJECT) && clb_json_next(&again, &key) == 1);
    CHECK(!clb_json_enter(&again, CLB_JSON_ARRAY));
    while (clb_json_next(&again, NULL) == 1 && !clb_json_int(&again, &v)) sum += v;
    CHECK(sum == 6 && !clb_json_next(&again, &key));
    CHECK(clb_json_enter(&again, CLB_JSON_ARRAY) && again.fault); /* what comes next is ',' */
    CHECK(clb_json_next(&again, &key) == -1 && clb_json_skip(&again) == -1 && clb_json_peek(&again) == CLB_JSON_BAD);
}

int main(void) {
    test_accepts();
    test_refuses();
    test_depth();
    test_integers();
    test_strings();
    test_walk();
    return report();
}
