/* Mapping of files and model folders: right bytes and sizes, and a clear refusal of everything that is not a file of
 * the right size. Also the COLIBRI_ISA variable. */
#include "host/machine.h"
#include "host/map.h"
#include "test.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/colibri-test-map-XXXXXX";
static char path_buffer[512];
static const char *in_folder(const char *name) {
    snprintf(path_buffer, sizeof path_buffer, "%s/%s", folder, name);
    return path_buffer;
}

static void write_file(const char *name, const void *data, size_t size) {
    FILE *f = fopen(in_folder(name), "wb");
    CHECK(f && fwrite(data, 1, size, f) == size);
    if (f) fclose(f);
}
static void write_text(const char *name, const char *text) { write_file(name, text, strlen(text)); }

/* Opening must fail with this status and a message that has both words. */
static void refused(const char *path, uint64_t expected, colibri_status_t status, const char *word) {
    colibri_map_t map = {"x", 1};
    colibri_error_t err = {.struct_size = sizeof err};
    colibri_status_t got = colibri_map_open(path, COLIBRI_MAP_DEFAULT, expected, &map, &err);
    CHECK_MSG(got == status && err.status == (int32_t)status, "%s: status %d", path, got);
    CHECK_MSG(strstr(err.message, word) && strstr(err.message, path), "%s: message \"%s\"", path, err.message);
    CHECK(!map.data && !map.size);
    CHECK(colibri_map_open(path, COLIBRI_MAP_DEFAULT, expected, &map, NULL) == status);
}

static void maps_what_is_there(void) {
    static unsigned char bytes[3 * 4096 + 5];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i * 31);
    write_file("data.bin", bytes, sizeof bytes);
    for (uint32_t flags = 0; flags < 32; flags++) {
        colibri_map_t map;
        colibri_error_t err = {.struct_size = sizeof err};
        CHECK_MSG(!colibri_map_open(in_folder("data.bin"), flags, sizeof bytes, &map, &err), "%s", err.message);
        CHECK(map.size == sizeof bytes && (uintptr_t)map.data % 64 == 0 && !memcmp(map.data, bytes, sizeof bytes));
        colibri_map_close(&map);
        CHECK(!map.data && !map.size);
        colibri_map_close(&map);
    }
    refused(in_folder("data.bin"), sizeof bytes + 1, COLIBRI_BUFFER_TOO_SMALL, "truncated");
    refused(in_folder("data.bin"), sizeof bytes - 1, COLIBRI_TENSOR, "too long");
}

/* The mapping is shared: a later write to the file shows through, so two processes hold one copy. */
static void is_shared(void) {
    write_text("shared.bin", "before");
    colibri_map_t map;
    CHECK(!colibri_map_open(in_folder("shared.bin"), COLIBRI_MAP_POPULATE, 6, &map, NULL));
    FILE *f = fopen(in_folder("shared.bin"), "r+b");
    CHECK(f && fwrite("AFTER!", 1, 6, f) == 6);
    if (f) fclose(f);
    CHECK(!memcmp(map.data, "AFTER!", 6));
    colibri_map_close(&map);
}

static void refuses_what_is_no_file(void) {
    refused(folder, 0, COLIBRI_INVALID_ARGUMENT, "directory");
    refused(in_folder("missing"), 0, COLIBRI_INVALID_ARGUMENT, "No such file");
    write_text("empty", "");
    refused(in_folder("empty"), 0, COLIBRI_INVALID_ARGUMENT, "empty");
    CHECK(!mkfifo(in_folder("fifo"), 0600));
    refused(in_folder("fifo"), 0, COLIBRI_INVALID_ARGUMENT, "not a regular file");
    CHECK(!symlink("loop", in_folder("loop")));
    refused(in_folder("loop"), 0, COLIBRI_INVALID_ARGUMENT, "symbolic links");
    write_text("secret", "x");
    CHECK(!chmod(in_folder("secret"), 0));
    if (geteuid() != 0) {
        refused(in_folder("secret"), 0, COLIBRI_INVALID_ARGUMENT, "Permission denied");
    } else if (!seteuid(65534)) { /* root reads everything: try as nobody */
        colibri_map_t map;
        colibri_error_t err = {.struct_size = sizeof err};
        CHECK(colibri_map_open(in_folder("secret"), 0, 0, &map, &err) == COLIBRI_INVALID_ARGUMENT);
        CHECK_MSG(strstr(err.message, "Permission denied"), "%s", err.message);
        CHECK(!seteuid(0));
    }
    colibri_map_t map;
    CHECK(colibri_map_open(NULL, 0, 0, &map, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_map_open(in_folder("data.bin"), 1u << 31, 0, &map, NULL) == COLIBRI_INVALID_ARGUMENT);
}

static const char good_manifest[] =
    " {\"format\": \"colibri\", \"name\": \"a \\\"files\\\": [ \", \"geometry\": {\"files\": [1, {}], \"x\": -1.5e3},\n"
    "  \"files\": [{\"name\": \"dense.bin\", \"bytes\": 100, \"note\": [[], {}]},\n"
    "             {\"bytes\": 8192, \"name\": \"experts.bin\"}], \"tensors\": [";

static void loads_a_folder(void) {
    static char dense[100], experts[8192];
    memset(dense, 'd', sizeof dense), memset(experts, 'e', sizeof experts);
    write_file("dense.bin", dense, sizeof dense);
    write_file("experts.bin", experts, sizeof experts);
    write_text("manifest.json", good_manifest);
    colibri_host_model_t m;
    colibri_error_t err = {.struct_size = sizeof err};
    CHECK_MSG(!colibri_host_load(folder, COLIBRI_MAP_DEFAULT, &m, &err), "%s", err.message);
    CHECK(m.manifest_size == strlen(good_manifest) && !memcmp(m.manifest, good_manifest, m.manifest_size));
    CHECK(m.n_weights == 2 && m.weights == m.buffers);
    CHECK(m.weights[0].size == 100 && m.weights[1].size == 8192);
    for (int i = 0; i < 2; i++)
        CHECK(m.weights[i].struct_size == sizeof(colibri_buffer_t) && m.weights[i].type == COLIBRI_WEIGHTS &&
              m.weights[i].alignment == 64 && m.weights[i].ref_count == 1 && m.weights[i].device == 0);
    CHECK(!memcmp(m.weights[0].ptr, dense, 100) && !memcmp(m.weights[1].ptr, experts, 8192));

    m.weights[1].ref_count = 2; /* as if a model still used it */
    CHECK(colibri_host_unload(&m, &err) == COLIBRI_INVALID_ARGUMENT && strstr(err.message, "file 1"));
    CHECK(m.weights && *(const char *)m.weights[1].ptr == 'e');
    m.weights[1].ref_count = 1;
    CHECK(!colibri_host_unload(&m, &err) && !m.weights && !m.manifest);
    CHECK(!colibri_host_unload(&m, &err));
}

/* Open files are what is loaded, whatever the folder has by now; one that is missing is named. */
static void loads_open_files(void) {
    static const char *const names[] = {"manifest.json", "dense.bin", "experts.bin"};
    colibri_host_file_t opened[3];
    for (int i = 0; i < 3; i++) {
        opened[i] = (colibri_host_file_t){names[i], open(in_folder(names[i]), O_RDONLY), 0};
        CHECK(opened[i].fd >= 0 && !unlink(in_folder(names[i])));
    }
    static char other[100];
    write_file("dense.bin", other, sizeof other);
    colibri_host_model_t m;
    colibri_error_t err = {.struct_size = sizeof err};
    CHECK_MSG(!colibri_host_load_opened(folder, opened, 3, COLIBRI_MAP_POPULATE, &m, &err), "%s", err.message);
    CHECK(m.n_weights == 2 && m.manifest_size == strlen(good_manifest));
    CHECK(*(const char *)m.weights[0].ptr == 'd' && *(const char *)m.weights[1].ptr == 'e');
    CHECK(!colibri_host_unload(&m, &err));
    for (uint32_t n = 0; n < 3; n++) {
        CHECK(colibri_host_load_opened(folder, n ? opened : NULL, n, 0, &m, &err) == COLIBRI_INVALID_ARGUMENT);
        CHECK_MSG(strstr(err.message, names[n]) && strstr(err.message, "not among"), "%s", err.message);
    }
    int good = opened[2].fd;
    opened[2].fd = -1;
    CHECK(colibri_host_load_opened(folder, opened, 3, 0, &m, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK_MSG(strstr(err.message, "experts.bin: cannot open"), "%s", err.message);
    opened[2].fd = opened[1].fd; /* a file of another size */
    CHECK(colibri_host_load_opened(folder, opened, 3, 0, &m, &err) == COLIBRI_BUFFER_TOO_SMALL && !m.weights);
    close(opened[0].fd), close(opened[1].fd), close(good);
    CHECK(!unlink(in_folder("dense.bin")));
}

static void load_refused(const char *manifest, colibri_status_t status, const char *word) {
    colibri_host_model_t m;
    colibri_error_t err = {.struct_size = sizeof err};
    if (manifest) write_text("manifest.json", manifest);
    colibri_status_t got = colibri_host_load(folder, 0, &m, &err);
    CHECK_MSG(got == status, "%s: %d", manifest, got);
    CHECK_MSG(strstr(err.message, word), "\"%s\" lacks \"%s\"", err.message, word);
    CHECK(!m.weights && !m.manifest && !m.maps[0].data && !m.maps[1].data);
}

static void refuses_bad_folders(void) {
    static const char *const malformed[] = {
        "[]",
        "{",
        "{}",
        "nonsense",
        "{\"files\"",
        "{\"files\":",
        "{\"files\": 3}",
        "{\"files\": []}",
        "{\"files\": [1]}",
        "{\"files\": [{}]}",
        "{\"files\": [{\"name\": \"dense.bin\"}]}",
        "{\"files\": [{\"bytes\": 100}]}",
        "{\"files\": [{\"name\": \"dense.bin\", \"bytes\": -1}]}",
        "{\"files\": [{\"name\": \"dense.bin\", \"bytes\": 0}]}",
        "{\"files\": [{\"name\": \"dense.bin\", \"bytes\": 99999999999999999999}]}",
        "{\"files\": [{\"name\": \"dense.bin\", \"bytes\": 1e2}]}",
        "{\"files\": [{\"name\": 5, \"bytes\": 100}]}",
        "{\"files\": [{\"name\": \"dense.bin\", \"bytes\": 100}",
        "{\"files\": [{\"name\": \"dense.bin\", \"bytes\": 100},]}",
        "{\"a\": ]}",
        "{\"a\": [[[[",
        "{\"a\": \"\\",
        "{\"a\" 1, \"files\": []}",
    };
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++)
        load_refused(malformed[i], COLIBRI_MANIFEST, "files");
    for (size_t n = 1; n < strlen(good_manifest); n++) { /* every truncation: refused, or complete up to "files" */
        colibri_host_model_t m;
        write_file("manifest.json", good_manifest, n);
        if (!colibri_host_load(folder, 0, &m, NULL)) CHECK(m.n_weights == 2 && !colibri_host_unload(&m, NULL));
        else CHECK(!m.weights);
    }
    load_refused("{\"files\": [{\"name\": \"../dense.bin\", \"bytes\": 100}]}", COLIBRI_MANIFEST, "bad file name");
    load_refused("{\"files\": [{\"name\": \"a/b\", \"bytes\": 100}]}", COLIBRI_MANIFEST, "bad file name");
    load_refused("{\"files\": [{\"name\": \"\", \"bytes\": 100}]}", COLIBRI_MANIFEST, "bad file name");
    load_refused("{\"files\": [{\"name\": \"gone.bin\", \"bytes\": 100}]}", COLIBRI_INVALID_ARGUMENT, "gone.bin");
    load_refused("{\"files\": [{\"name\": \"dense.bin\", \"bytes\": 101}]}", COLIBRI_BUFFER_TOO_SMALL, "truncated");
    load_refused("{\"files\": [{\"name\": \"dense.bin\", \"bytes\": 99}]}", COLIBRI_TENSOR, "too long");
    load_refused("", COLIBRI_INVALID_ARGUMENT, "empty");
    CHECK(!unlink(in_folder("manifest.json")));
    load_refused(NULL, COLIBRI_INVALID_ARGUMENT, "manifest.json");
    colibri_host_model_t m;
    CHECK(colibri_host_load(in_folder("dense.bin"), 0, &m, NULL) == COLIBRI_INVALID_ARGUMENT);
    CHECK(colibri_host_load(NULL, 0, &m, NULL) == COLIBRI_INVALID_ARGUMENT);
}

static void isa_variable(void) {
    static const struct { const char *text; uint32_t isa; } known[] = {
        {"", COLIBRI_ISA_AUTO}, {"ref", COLIBRI_ISA_REF}, {"avx2", COLIBRI_ISA_AVX2}, {"avx512", COLIBRI_ISA_AVX512}};
    uint32_t isa = 99;
    colibri_error_t err = {.struct_size = sizeof err};
    unsetenv("COLIBRI_ISA");
    CHECK(!colibri_host_isa(&isa, &err) && isa == COLIBRI_ISA_AUTO);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        setenv("COLIBRI_ISA", known[i].text, 1);
        CHECK(!colibri_host_isa(&isa, &err) && isa == known[i].isa);
    }
    setenv("COLIBRI_ISA", "AVX", 1);
    CHECK(colibri_host_isa(&isa, &err) == COLIBRI_INVALID_ARGUMENT);
    CHECK(strstr(err.message, "\"AVX\"") && strstr(err.message, "avx512"));
    unsetenv("COLIBRI_ISA");
}

static void remove_folder(void) {
    static const char *const names[] = {"data.bin", "shared.bin", "empty", "fifo", "loop", "secret", "dense.bin",
                                        "experts.bin"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(in_folder(names[i]));
    CHECK(!rmdir(folder));
}

int main(void) {
    if (!mkdtemp(folder) || chmod(folder, 0755)) return perror(folder), 1;
    maps_what_is_there();
    is_shared();
    refuses_what_is_no_file();
    loads_a_folder();
    loads_open_files();
    write_file("dense.bin", good_manifest, 100);
    static char experts[8192];
    write_file("experts.bin", experts, sizeof experts);
    refuses_bad_folders();
    isa_variable();
    remove_folder();
    return report();
}
