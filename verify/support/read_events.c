/* SPDX-License-Identifier: MIT OR Unlicense */
/* read_events.c - reads TensorBoard's event files, for test_logs.sh: shares nothing with what
 * writes them, and trusts nothing. Files as arguments, in the order in which a reader takes
 * them. Prints
 *
 *     version brain.Event:2
 *     start STEP              a reader forgets STEP and what is behind it
 *     STEP TAG VALUE          a number, or the texts of a tensor joined by |
 *     part BYTES              what a killed process left of a record
 *
 * Exit code 1 with a sentence where a checksum or a field is wrong. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const unsigned char *at, *end;
} span;

static const char *path;

static void wrong(const char *what) {
    fprintf(stderr, "%s: %s\n", path, what);
    exit(1);
}

/* ---- checksums, by a table ---- */

static uint32_t crc_table[256];

static uint32_t crc32c(const void *data, size_t size) {
    const unsigned char *bytes = data;
    uint32_t crc = 0xffffffff;
    for (size_t i = 0; i < size; i++) crc = crc_table[(crc ^ bytes[i]) & 255] ^ (crc >> 8);
    return crc ^ 0xffffffff;
}

static void crc_begin(void) {
    for (uint32_t i = 0; i < 256; i++) {
        crc_table[i] = i;
        for (int bit = 0; bit < 8; bit++)
            crc_table[i] = crc_table[i] & 1 ? crc_table[i] >> 1 ^ 0x82f63b78
                                            : crc_table[i] >> 1;
    }
    if (crc32c("123456789", 9) != 0xe3069283) wrong("this reader's CRC-32C is wrong");
}

static uint64_t little(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;) value = value << 8 | at[i];
    return value;
}

static void check(const unsigned char *data, size_t size, const unsigned char *masked) {
    uint32_t turned = (uint32_t)little(masked, 4) - 0xa282ead8;
    if ((turned >> 17 | turned << 15) != crc32c(data, size)) wrong("a checksum is wrong");
}

/* ---- fields ---- */

typedef struct {
    int field, wire;
    uint64_t number; /* of a varint or fixed bytes */
    span bytes;
} item;

static uint64_t varint(span *s) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (s->at == s->end) wrong("a number is cut off");
        value |= (uint64_t)(*s->at & 127) << shift;
        if (!(*s->at++ & 128)) return value;
    }
    wrong("a number has more than 64 bits");
    return 0;
}

static int next(span *s, item *i) {
    if (s->at == s->end) return 0;
    uint64_t key = varint(s), size;
    i->field = (int)(key >> 3);
    i->wire = (int)(key & 7);
    if (i->wire == 0) return i->number = varint(s), 1;
    size = i->wire == 1 ? 8 : i->wire == 5 ? 4 : i->wire == 2 ? varint(s) : UINT64_MAX;
    if (size > (uint64_t)(s->end - s->at)) wrong("a field is longer than its message");
    i->bytes = (span){s->at, s->at + size};
    if (i->wire != 2) i->number = little(s->at, (int)size);
    s->at += size;
    return 1;
}

static void text(span s) { printf("%.*s", (int)(s.end - s.at), (const char *)s.at); }

/* The field of a message, which has to be there. */
static item find(span s, int field, int wire) {
    item i;
    while (next(&s, &i))
        if (i.field == field && i.wire == wire) return i;
    wrong("a field is missing");
    return i;
}

/* ---- messages ---- */

static void tensor(span s) {
    item i;
    uint64_t elements = 1, texts = 0;
    span shape = find(s, 2, 2).bytes, inner = s;
    if (find(s, 1, 0).number != 7) wrong("a tensor is not of strings");
    while (next(&shape, &i)) elements *= find(i.bytes, 1, 0).number;
    while (next(&inner, &i)) {
        if (i.field != 8) continue;
        if (texts++) putchar('|');
        text(i.bytes);
    }
    if (texts != elements) wrong("a tensor has another number of texts than its shape says");
}

static void value(uint64_t step, span s) {
    item i;
    span all = s;
    printf("%llu ", (unsigned long long)step);
    text(find(s, 1, 2).bytes);
    putchar(' ');
    while (next(&s, &i)) {
        if (i.field == 2 && i.wire == 5) {
            float number;
            uint32_t bits = (uint32_t)i.number;
            memcpy(&number, &bits, 4);
            printf("%.9g", (double)number);
        }
        if (i.field == 8) {
            span plugin = find(find(find(all, 9, 2).bytes, 1, 2).bytes, 1, 2).bytes;
            if (plugin.end - plugin.at != 4 || memcmp(plugin.at, "text", 4))
                wrong("texts are not for the plugin that draws them");
            tensor(i.bytes);
        }
    }
    putchar('\n');
}

static void event(span s, int first) {
    item i;
    span all = s;
    uint64_t step = 0, time;
    double seconds;
    time = find(s, 1, 1).number;
    memcpy(&seconds, &time, 8);
    if (!(seconds > 1.6e9 && seconds < 1e10)) wrong("the wall time is none of these days");
    while (next(&s, &i))
        if (i.field == 2) step = i.number;
    for (s = all; next(&s, &i);) {
        if (first != (i.field == 3) && i.field > 2) wrong("the version is not the first event");
        if (i.field == 3) {
            printf("version ");
            text(i.bytes);
            putchar('\n');
        }
        if (i.field == 7 && find(i.bytes, 1, 0).number == 1)
            printf("start %llu\n", (unsigned long long)step);
        span summary = i.bytes;
        item one;
        while (i.field == 5 && next(&summary, &one)) value(step, one.bytes);
    }
}

static void file(const char *name) {
    FILE *in = fopen(path = name, "rb");
    unsigned char *bytes = malloc(1 << 26);
    size_t size = in && bytes ? fread(bytes, 1, 1 << 26, in) : 0, at = 0;
    if (!in || !size) wrong("cannot be read, or is empty");
    while (at < size) {
        size_t left = size - at;
        uint64_t length = left < 12 ? 0 : little(bytes + at, 8);
        if (left >= 12) check(bytes + at, 8, bytes + at + 8);
        if (left < 16 || length > left - 16) {
            printf("part %llu\n", (unsigned long long)left);
            break;
        }
        check(bytes + at + 12, length, bytes + at + 12 + length);
        event((span){bytes + at + 12, bytes + at + 12 + length}, !at);
        at += 16 + length;
    }
    free(bytes);
    fclose(in);
}

int main(int argc, char **argv) {
    crc_begin();
    for (int i = 1; i < argc; i++) file(argv[i]);
    return 0;
}
