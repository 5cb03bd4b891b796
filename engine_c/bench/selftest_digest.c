/* Prints "digest <64 hex> <isa>" of colibri_selftest for every instruction set this CPU has, or COLIBRI_ISA's alone.
 * `make portability` builds it with each compiler and level and compares the lines. Exit code 1: a self-test failed,
 * 2: it could not run. */
#include "colibri.h"
#include "host/machine.h"
#include <stdio.h>
#include <stdlib.h>

static int print_digest(uint32_t isa, colibri_buffer_t *workspace) {
    uint8_t digest[32] = {0};
    colibri_error_t err = {.struct_size = sizeof err};
    colibri_status_t status = colibri_selftest(isa, workspace, digest, &err);
    if (status && status != COLIBRI_SELFTEST) {
        fprintf(stderr, "%s: %s\n", colibri_isa_name(isa), err.message);
        return 2;
    }
    printf("digest ");
    for (int i = 0; i < 32; i++) printf("%02x", digest[i]);
    printf(" %s\n", colibri_isa_name(isa));
    if (status) fprintf(stderr, "%s: %s\n", colibri_isa_name(isa), err.message);
    return status ? 1 : 0;
}

int main(void) {
    uint64_t size = (colibri_selftest_size() + 63) / 64 * 64;
    colibri_buffer_t workspace = {.struct_size = sizeof workspace, .type = COLIBRI_WORKSPACE, .size = size,
                                  .ptr = aligned_alloc(64, size), .alignment = 64, .ref_count = 1};
    if (!workspace.ptr) return 2;
    int worst = 0;
    uint32_t only = COLIBRI_ISA_AUTO;
    if (colibri_host_isa(&only, NULL)) return 2;
    for (uint32_t isa = COLIBRI_ISA_REF; isa <= colibri_best_isa(); isa++) {
        if (only != COLIBRI_ISA_AUTO && isa != only) continue;
        int result = print_digest(isa, &workspace);
        worst = result > worst ? result : worst;
    }
    free(workspace.ptr);
    return worst;
}
