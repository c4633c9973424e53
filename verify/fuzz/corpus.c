/* SPDX-License-Identifier: MIT OR Unlicense */
/* corpus.c - fuzz.c's targets without libFuzzer: FUZZ_TARGET=data build/parsers/fuzz COUNT FILE...
 * Each file as it is, cut at COUNT places, and COUNT times with some bytes changed. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static uint64_t state = 88172645463325252u;
static uint64_t draw(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

/* A copy of its own length, so that reading behind its end is seen. */
static void run(const uint8_t *bytes, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, bytes, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void change(uint8_t *bytes, size_t size) {
    static const char odd[] = "\0\xff{}[]\",:-0129eE.\\u\x1b";
    for (uint64_t n = 1 + draw(4); n; n--) {
        size_t at = draw(draw(2) && size > 400 ? 400 : size);
        bytes[at] = draw(2) ? (uint8_t)odd[draw(sizeof odd - 1)] : (uint8_t)draw(256);
    }
}

static int run_file(const char *name, int count) {
    FILE *file = fopen(name, "rb");
    uint8_t *bytes, *other;
    size_t size;
    if (!file || fseek(file, 0, SEEK_END)) return 1;
    size = (size_t)ftell(file);
    rewind(file);
    bytes = malloc(size + 1), other = malloc(size + 1);
    if (!size || !bytes || !other || fread(bytes, 1, size, file) != size) return 1;
    fclose(file);
    run(bytes, size);
    for (int i = 0; i < count; i++) run(bytes, size * (size_t)i / (size_t)count);
    for (int i = 0; i < count; i++) {
        memcpy(other, bytes, size);
        change(other, size);
        run(other, size);
    }
    free(bytes), free(other);
    return 0;
}

int main(int argc, char **argv) {
    int failed = argc < 3;
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 2; i < argc; i++) failed |= run_file(argv[i], atoi(argv[1]));
    printf("%d files, %d inputs each\n", argc - 2, 1 + 2 * atoi(argv[1]));
    return failed;
}
