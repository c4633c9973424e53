/* SPDX-License-Identifier: MIT OR Unlicense */
/* dump_page.h - tensors as the file of a rank, and what the oracle says of its folder,
   whatever the scene is. FOLDER: where dumps are written, another one in each suite. */
#ifndef DUMP_PAGE_H
#define DUMP_PAGE_H
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "deal.h"
#include "seqpar_safetensors.h"
#include "oracle_says.h"

typedef struct page {
    seqpar_safetensors_tensor tensors[40];
    const void *data[40];
    char names[40][32];
    int64_t count;
} page;

/* Adds a tensor to the page, named "micro.name"; micro -1: named "name". */
static inline void put(page *p, int64_t micro, const char *name, const void *data,
                       seqpar_safetensors_dtype dtype, int dims, const int64_t *shape) {
    seqpar_safetensors_tensor *t = &p->tensors[p->count];
    char *own = p->names[p->count];
    int digits = micro < 0 ? 0 : snprintf(own, sizeof p->names[0], "%lld.", (long long)micro);
    snprintf(own + digits, sizeof p->names[0] - (size_t)digits, "%s", name);
    *t = (seqpar_safetensors_tensor){.name = own, .dtype = dtype, .dims = dims};
    for (int d = 0; d < dims; d++) t->shape[d] = shape[d];
    p->data[p->count++] = data;
}

static inline void save(const page *p, int64_t rank, const seqpar_safetensors_pair *pairs,
                        int64_t count) {
    char path[80];
    seqpar_error error = {0};
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p->tensors,
                                    .count = p->count,
                                    .metadata = pairs,
                                    .metadata_count = count};
    snprintf(path, sizeof path, FOLDER "/rank%lld.safetensors", (long long)rank);
    test_expect(!seqpar_safetensors_save(&desc, p->data, &error), "%s", error.text);
}

static inline void free_data(page *p) {
    for (int64_t i = 0; i < p->count; i++) free((void *)p->data[i]);
}

static inline void write_ranks(int64_t world, void (*write_rank)(int64_t rank)) {
    if (system("rm -rf " FOLDER)) exit(1);
    mkdir(FOLDER, 0777);
    for (int64_t r = 0; r < world; r++) write_rank(r);
}

static const char *asked_verb = "ver";

/* All that the oracle prints, and its exit code. */
static inline int ask_with(const char *options, char *said, size_t size) {
    char command[200];
    snprintf(command, sizeof command, "build/seqpar-verify %s " FOLDER " 2>&1 %s", asked_verb,
             options);
    return said_by(command, said, size);
}
#endif
