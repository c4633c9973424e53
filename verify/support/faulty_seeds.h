/* SPDX-License-Identifier: MIT OR Unlicense */
/* Faults 71 to 73, planted in seqpar_llama.h: seeds P times too small; a mean of its own for
   every micro-batch; for every rank. */
static int64_t faulty_count(const int32_t *targets, int64_t count) {
    int64_t i, n = 0;
    for (i = 0; i < count; i++) n += targets[i] != SEQPAR_IGNORE;
    return n;
}

static void faulty_seeds(seqpar_ctx *ctx, const seqpar_llama_batch *b, const seqpar_step *step,
                         int64_t micro, const seqpar_vocab_seeds *seeds, int fault) {
    int64_t r, t, first, count, all = 0, here = 0, own = faulty_count(b->targets, b->tokens);
    double factor = 1.0 / (double)ctx->sp_size, seed;
    seqpar__micro_rows(step, ctx->dp_size, ctx->dp_rank, micro, &first, &count);
    for (r = 0; r < step->row_count; r++)
        all += faulty_count(step->rows[r].targets, step->rows[r].tokens);
    for (r = first; r < first + count; r++)
        here += faulty_count(step->rows[r].targets, step->rows[r].tokens);
    if (fault == 72)
        factor = here ? (double)all / (double)(step->accumulation * ctx->dp_size * here) : 1.0;
    if (fault == 73) factor = own ? (double)here / (double)(ctx->sp_size * own) : 1.0;
    for (t = 0; t < b->tokens; t++) {
        seqpar_device_read(ctx->device, &seed, seeds->dlogp, t, 1, ctx->device->accumulator);
        seed *= factor;
        seqpar_device_write(ctx->device, (void *)seeds->dlogp, t, &seed, 1,
                            ctx->device->accumulator);
    }
}
