/* SPDX-License-Identifier: MIT OR Unlicense */
/* Layouts from the library's table. Tests choose layouts by these functions, so a new layout
   needs its line in the table and its maps: seqpar.h, TO ADD. */
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

/* Layout n modulo their number of those with whole cells, in the table's order. */
static inline int layout_of_grid(int64_t n) {
    int layout = 0;
    for (n = n % layouts_on_grid(); !layout_on_grid(layout) || n-- > 0;) layout++;
    return layout;
}
#endif
