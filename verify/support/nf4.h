/* SPDX-License-Identifier: MIT OR Unlicense */
/* Values to be kept in four bits, the same as verify/second/golden/nf4.py makes. */
#ifndef NF4_H
#define NF4_H
#include <stdint.h>

/* Of a number and a kind, 0 to 2: integers alone decide. */
static float nf4_value(uint32_t n, uint32_t kind) {
    static const float sizes[3] = {1, 0.02f, 0.0003f};
    uint32_t h = n * 2654435761u + kind * 40503u + 12345u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    return ((float)((int)(h % 20011) - 10005) / 10005.0f) * sizes[kind];
}
#endif
