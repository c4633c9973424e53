/* SPDX-License-Identifier: MIT OR Unlicense */
/* lesson.c - the numbers and pictures of the lessons, computed with seqpar.h.
 *
 *     build/lesson             their names
 *     build/lesson labels      numbers, as text
 *     build/lesson labels.svg  a picture
 *
 * `make lessons` puts them into the pages of demos/lessons and makes build/lessons.html. */
#define SEQPAR_IMPLEMENTATION
#include "rows.h"
#include "ring.h"
#include "sums.h"
#include "trainer/base/files.h"
#include "trainer/base/escape.h"

typedef struct lesson_part {
    const char *name;
    void (*print)(void);
} lesson_part;

static const lesson_part parts[] = {
    {"work", lesson_work},          {"holders.svg", picture_holders},
    {"ring.svg", picture_ring},     {"positions", lesson_positions},
    {"pairs", lesson_packed_pairs}, {"packing.svg", picture_packing},
    {"labels", lesson_labels},      {"labels.svg", picture_labels},
    {"long_row", lesson_long_row},  {"counts", lesson_counts},
    {"counts.svg", picture_counts}, {"factor", lesson_factor},
    {"merge", lesson_merge},        {"merge.svg", picture_merge},
    {"two_keys", lesson_two_keys},  {"dv", lesson_dv},
    {"dv.svg", picture_dv},         {"back.svg", picture_back},
    {"digits", lesson_digits},      {"order", lesson_order},
    {"tree.svg", picture_tree},     {"pair", lesson_pair},
    {"first", lesson_first_pair},   {"pair.svg", picture_pair},
};
enum { PARTS = sizeof parts / sizeof *parts };

int main(int argc, char **argv) {
    char shown[64];
    for (int i = 0; argc == 2 && i < PARTS; i++)
        if (!strcmp(argv[1], parts[i].name)) {
            parts[i].print();
            return demo_print_failed("the part");
        }
    for (int i = 0; argc == 1 && i < PARTS; i++) printf("%s\n", parts[i].name);
    if (argc == 1) return demo_print_failed("the names");
    fprintf(stderr, "error: no part is called '%s'; build/lesson lists them\n",
            demo_escape(shown, sizeof shown, argv[argc - 1]));
    return 2;
}
