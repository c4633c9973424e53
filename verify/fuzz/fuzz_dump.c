/* SPDX-License-Identifier: MIT OR Unlicense */
/* fuzz_dump.c - all of the oracle that reads a dump and needs no model, for fuzz.c, whose names are others. */
#include "oracle/gradient/step.h"

static void put(const char *folder, const char *name, const uint8_t *bytes, size_t size) {
    char path[1024];
    FILE *file;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file)) abort();
}

/* Two ranks' files; the first one's size is in the first three bytes. What is refused is in the error. */
seqpar_error fuzz_files(const char *folder, const uint8_t *bytes, size_t size);
seqpar_error fuzz_files(const char *folder, const uint8_t *bytes, size_t size) {
    size_t first = size > 3 ? bytes[0] + 256u * bytes[1] + 65536u * bytes[2] : 0;
    stage stages[STAGES] = {{0}};
    dump d = {.world = 0};
    if (size < 4) return d.error;
    if (first > size - 3) first = size - 3;
    put(folder, "rank0.safetensors", bytes + 3, first);
    put(folder, "rank1.safetensors", bytes + 3 + first, size - 3 - first);
    if (!dump_open(&d, folder) && !judge_dump(&d, stages, 1e-3)) check_steps(stages, &d, 1e-3);
    dump_close(&d);
    return d.error;
}
