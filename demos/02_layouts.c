/* SPDX-License-Identifier: MIT OR Unlicense */
/* 02_layouts.c - which rank holds which token, and how much work each step of the ring has.
 *
 *     02_layouts [S] [P] [C]     tokens, ranks, tokens of a cell; default 16 4 1 */
#include <stdio.h>
#include <stdlib.h>
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_CHECK_IMPLEMENTATION
#include "seqpar_check.h"
#include "trainer/base/files.h"
#include "trainer/base/escape.h"

typedef struct {
    seqpar_row row;
    int64_t cu[2];
    int64_t ranks;
    int layout;
    int64_t *work;
} drawing;

/* One line a rank: its tokens as runs "0-1 14-15" or, for stripe, "0 4 8 12". */
static void draw_tokens(const drawing *d, int64_t rank) {
    seqpar_share share;
    seqpar_error error = {0};
    seqpar_split_desc split = {d->layout, d->ranks, rank};
    if (seqpar_split(&error, &share, &d->row, 1, &split)) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
    printf("  rank %-3lld %5lld tokens:", (long long)rank, (long long)share.tokens);
    int64_t first = -1, last = -2, shown = 0;
    for (int64_t i = 0; i < share.count; i++)
        for (int64_t t = 0; t < share.pieces[i].count; t++) {
            int64_t token = share.pieces[i].start + t * share.pieces[i].stride;
            if (token == last + 1) {
                last = token;
                continue;
            }
            if (first >= 0 && shown++ < 12) {
                if (last > first)
                    printf(" %lld-%lld", (long long)first, (long long)last);
                else
                    printf(" %lld", (long long)first);
            }
            first = last = token;
        }
    if (first >= 0) {
        if (last > first)
            printf(" %lld-%lld", (long long)first, (long long)last);
        else
            printf(" %lld", (long long)first);
    }
    printf(shown > 12 ? " (and more)\n" : "\n");
    seqpar_share_free(&share);
}

/* Every rank asks its plan what each step of the ring costs it. */
static seqpar_status measure(seqpar_comm *world, void *user) {
    drawing *d = (drawing *)user;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_attn_desc desc = {.heads = 1, .kv_heads = 1, .head_dim = 1, .layout = d->layout};
    seqpar_attn *attn = NULL;
    seqpar_attn_cost cost;
    seqpar_ctx ctx;
    int64_t *by_source = (int64_t *)calloc((size_t)d->ranks, sizeof *by_source);
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, d->ranks);
    if (!status) status = seqpar_attn_open(&ctx, &attn, &d->row, 1, &desc);
    if (!status) status = seqpar_attn_cost_of(&ctx, attn, &cost, by_source);
    for (int64_t s = 0; !status && s < d->ranks; s++) /* which way its keys come from */
        d->work[ctx.sp_rank * d->ranks + s] =
            by_source[(ctx.sp_rank + (seqpar_layout_at(d->layout)->down ? s : d->ranks - s)) %
                      d->ranks] /
            4;
    seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    free(by_source);
    return status;
}

static void draw_work(const drawing *d) {
    int64_t total = 0, slowest = 0;
    printf("  query-key pairs by step of the ring:\n");
    for (int64_t r = 0; r < d->ranks; r++) {
        int64_t sum = 0;
        printf("  rank %-3lld", (long long)r);
        for (int64_t s = 0; s < d->ranks; s++) {
            sum += d->work[r * d->ranks + s];
            if (s < 12) printf(" %9lld", (long long)d->work[r * d->ranks + s]);
        }
        printf("  | %lld\n", (long long)sum);
        total += sum;
    }
    for (int64_t s = 0; s < d->ranks; s++) { /* everybody waits for the slowest of a step */
        int64_t most = 0;
        for (int64_t r = 0; r < d->ranks; r++)
            if (d->work[r * d->ranks + s] > most) most = d->work[r * d->ranks + s];
        slowest += most;
    }
    printf("  useful share of the critical path: %.3f\n\n",
           (double)total / ((double)slowest * (double)d->ranks));
}

int main(int argc, char **argv) {
    static const char *const names[] = {"S, the tokens", "P, the ranks",
                                        "C, the tokens of a cell"};
    /* cells x cells x P: about a second */
    static const int64_t most[] = {1000000, 64, 1000000}, most_work = 1 << 27;
    int64_t sizes[3] = {16, 4, 1};
    char shown[256];
    if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")))
        return printf(
                   "usage: 02_layouts [S] [P] [C]   (tokens, ranks, tokens of a cell; default "
                   "16 4 1)\n"),
               demo_print_failed("the usage");
    if (argc > 4)
        return fprintf(stderr, "error: '%s' is one too many; give S, P and C, or fewer\n",
                       demo_escape(shown, sizeof shown, argv[4])),
               2;
    for (int i = 1; i < argc; i++) {
        char *end;
        sizes[i - 1] = strtoll(argv[i], &end, 10);
        if (*end || sizes[i - 1] < 1 || sizes[i - 1] > most[i - 1])
            return fprintf(stderr, "error: %s, is '%s'; give a whole number from 1 to %lld\n",
                           names[i - 1], demo_escape(shown, sizeof shown, argv[i]),
                           (long long)most[i - 1]),
                   2;
    }
    int64_t cells = (sizes[0] + sizes[2] - 1) / sizes[2];
    if (cells * cells * sizes[1] > most_work)
        return fprintf(stderr,
                       "error: %lld cells for %lld ranks take too long to draw; lower S or P, "
                       "or raise C\n",
                       (long long)cells, (long long)sizes[1]),
               2;
    drawing d = {.ranks = sizes[1]};
    d.row = (seqpar_row){.tokens = sizes[0], .cell = sizes[2], .docs = 1, .cu_seqlens = d.cu};
    d.cu[1] = sizes[0];
    d.work = (int64_t *)calloc((size_t)(sizes[1] * sizes[1]), sizeof *d.work);
    if (!d.work)
        return fprintf(stderr, "error: no memory for %lld ranks\n", (long long)sizes[1]), 1;
    for (d.layout = 0; d.layout < SEQPAR_LAYOUT_COUNT; d.layout++) {
        seqpar_error error;
        printf("%s, S = %lld, P = %lld, C = %lld\n", seqpar_layout_name(d.layout),
               (long long)sizes[0], (long long)sizes[1], (long long)sizes[2]);
        for (int64_t r = 0; r < d.ranks; r++) draw_tokens(&d, r);
        if (seqpar_run_threads(d.ranks, measure, &d, &error))
            return fprintf(stderr, "error: %s\n", error.text), 1;
        draw_work(&d);
    }
    free(d.work);
    return demo_print_failed("the drawing");
}
