/* SPDX-License-Identifier: MIT OR Unlicense */
/* drawn_way.h - a way to run an objective (run_objective.h), drawn by the test's numbers. */
#ifndef DRAWN_WAY_H
#define DRAWN_WAY_H
#include "run_objective.h"
#include "test.h"

/* A way on 2 to 8 ranks, drawn. */
static inline objective_way objective_way_drawn(int device) {
    static const int64_t shapes[][2] = {{1, 2}, {1, 3}, {1, 4}, {1, 5}, {1, 8},
                                        {2, 2}, {4, 1}, {2, 3}, {3, 1}};
    int shape = (int)test_integer(0, 8);
    return (objective_way){.dp = shapes[shape][0],
                           .sp = shapes[shape][1],
                           .accumulation = test_integer(1, 4),
                           .threads = test_integer(1, 2),
                           .optimizer = SEQPAR_OPTIM_ADAMW,
                           .layout = layout_of_grid(test_integer(0, layouts_on_grid() - 1)),
                           .schedule = (int)test_integer(0, SEQPAR_SCHEDULE_LLAMA3),
                           .reference_device = device,
                           .zero_stage = (int)test_integer(0, 3),
                           .recompute = (int)test_integer(0, 2)};
}
#endif
