/* SPDX-License-Identifier: MIT OR Unlicense */
/* Layouts as the library's table has them: tests that need one, or one of a sort, ask here, so
   that a layout is added by its line and its map in verify/tests/test_split.c. */
#ifndef LAYOUTS_H
#define LAYOUTS_H
#include "seqpar.h"

/* Ranks hold whole cells: the bits of one rank. */
static inline int layout_on_grid(int layout) { return seqpar_layout_at(layout)->whole_cells; }

static inline int64_t layouts_on_grid(void) {
    int64_t count = 0;
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        count += layout_on_grid(layout);
    return count;
}

/* Layout number n of those, in the table's order, round and round. */
static inline int layout_of_grid(int64_t n) {
    int layout = 0;
    for (n = n % layouts_on_grid(); !layout_on_grid(layout) || n-- > 0;) layout++;
    return layout;
}
#endif
