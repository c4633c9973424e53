/* SPDX-License-Identifier: MIT OR Unlicense */
/* Documents that a trainer's loader makes of a file, as text to compare. */
#ifndef TRAINER_DOCUMENTS_H
#define TRAINER_DOCUMENTS_H
#include "trainer/data/data.h"
#include "trainer_cases.h"

static demo_dataset set;

__attribute__((unused)) static int load(const char *path, demo_data_options how) {
    demo_data_free(&set);
    message.text[0] = 0;
    return demo_data_load(&set, path, &how, &message);
}

/* A document as text: bytes as they are, special tokens as B and E in brackets, supervised
 * tokens after a bar each time supervision begins and before one when it ends: "[B]ab|c[E]". */
__attribute__((unused)) static const char *shown_document(const demo_document *document) {
    static char text[512];
    size_t used = 0;
    for (int64_t t = 0; t < document->tokens && used < sizeof text - 8; t++) {
        int32_t id = document->ids[t];
        if (t && document->loss_mask[t] != document->loss_mask[t - 1]) text[used++] = '|';
        if (id < 256)
            text[used++] = (char)id;
        else
            used += (size_t)snprintf(text + used, 8, "[%s]",
                                     id == DEMO_BOS   ? "B"
                                     : id == DEMO_EOS ? "E"
                                                      : "?");
    }
    text[used] = 0;
    return text;
}

__attribute__((unused)) static const char *shown(int64_t i) {
    return shown_document(&set.documents[i]);
}

__attribute__((unused)) static const demo_data_options ask = {
    .input_key = "q", .output_key = "a", .input_template = "Q {}? "};

#endif
