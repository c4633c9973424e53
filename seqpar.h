/* seqpar.h - v0.2.0 - sequence-parallel training of language models, N ranks equal to one - MIT or Unlicense */
/* SPDX-License-Identifier: MIT OR Unlicense */
/* =============================================================================================
   >>doc

   A sequence too long for one machine is split over several ranks. Attention then needs keys of
   other ranks, the target of a rank's last token lies on another rank, and losses and gradients
   are summed over sequence-parallel ranks, data-parallel ranks, micro-batches and optimizer
   shards. This header does all of it, and the split changes nothing: logits, log-probs, loss,
   every gradient, the gradient norm and the updated parameters of N ranks equal those of one
   rank by memcmp.

   In exactly one C or C++ file:

       #define SEQPAR_IMPLEMENTATION
       #include "seqpar.h"

   and link with -lm -lpthread (-fopenmp for threads within a rank). For speed: -O3
   -march=native.

   WHY THE BITS ARE EQUAL
       Additions round, so (a + b) + c and a + (b + c) differ: the bits of a sum depend on the
       order of its additions. A ring that adds as keys arrive, or an all-reduce, adds in an
       order that depends on the number of ranks. Here the order depends on positions in
       documents alone. A document is cut at fixed positions into cells. Each sum over tokens
       (softmax, dk and dv, weight gradients, losses) takes one partial sum of every cell, and a
       binary tree over the cell numbers adds them:

           cell      0     1     2     3     held by ranks 0 1 1 0, or all by one rank:
                      \   /       \   /
                      0+1         2+3
                         \       /
                        (0+1)+(2+3)          these additions, on any rank, at any time

       One tree spans an optimizer step: above the cells it joins documents by their numbers. So
       no bit depends on the number of ranks, on which documents share a row, or on the
       micro-batches.

       Operations that work row by row on a matrix (products, norms) compute a row to the same
       bits whatever other rows are in the call. Transports move bytes and never add
       floating-point numbers: no all-reduce of NCCL or MPI is used. demos/00_by_hand.c shows
       all this in 150 lines, without the library.

   ZERO-INITIALISE EVERY DESC; 0 MEANS ITS DEFAULT
       Set every desc, io and row to zero ("= {0}", in C++ "= {}", or static), then set the
       fields you want. 0 or NULL selects a field's default, which its comment names. A field
       without a default, such as heads, is refused at 0 by a message that names it. In a few
       fields 0 means the number 0, and their comment says so (beta1).

   CHAPTERS (search for the tag)
       Part I, the subject
       >>api        types and prototypes: errors, messages, folds, rows, shares
       >>table      types and prototypes: what a device does
       >>calls      types and prototypes: what a rank calls
       >>util       errors, random numbers, exp and log
       >>fold       one order for every sum
       >>pack       documents to rows
       >>split      who holds which token
       >>comm       how bytes move: one rank, threads
       >>ctx        the context of one rank: mesh, device, memory
       >>plan       schedules as lists of operations
       >>attn       attention over ranks: overview and structures
       >>sight      which queries see which keys
       >>program    what each rank adds, and in which order
       >>exec       runs a plan: ring and llama3
       >>kernel     an attention kernel written by the user
       >>ulysses    all-to-all: tokens for heads, and back
       >>call       attention: open, forward, backward
       >>loss       token log-probs from hidden states
       >>objective  sums per document, and losses from them
       >>blocks     parameter blocks and their owners
       >>gradient   sums a step's gradients at their owners
       >>update     norm, clip, AdamW and SGD
       >>state      reading and writing parameters and moments
       >>shards     parameters stored at their owners only (ZeRO 3)
       Part II, devices
       >>device     what devices share: folds, attention
       >>ref        reference device: naive
       >>cpu        fast device: vectors
       >>product    fast device: products, and weight gradients
       >>pass       fast device: passes over rows; exp
       >>tile       fast device: attention in tiles
       >>rows       fast device: norm, SwiGLU, loss, update
       >>half       fast device: bf16, widened and rounded
       >>user       a block kernel or product written by the user
       >>licence

   DOES
       - pack documents into rows (cu_seqlens, position ids, targets shifted once, before any
         split)
       - split rows contiguous, zigzag, striped or zigzag by document; any length, any number
         of ranks, empty ranks included
       - attention as a ring, llama3-style KV all-gather, Ulysses all-to-all or 2D: packed
         documents, causal, full, sliding window, prefix-LM, softcap, learnt sinks, dropout,
         GQA; forward and backward
       - check a schedule, and count its FLOPs and bytes, without running it
         (verify/seqpar_check.h)
       - use an attention kernel (per block or per source), a matrix product and a transport
         that you write
       - compute log-probs, entropy, label smoothing and z-loss from hidden states, some tokens
         at a time: the logits of all tokens are never in memory together
       - sum values per document over all ranks, and compute from the sums the SFT, DPO (cDPO,
         IPO, hinge, SimPO, RPO), KTO, reward-model, PPO and GRPO objectives, each with value
         and derivative
       - update by AdamW or SGD, sharded over owners (ZeRO 0 to 3), with fp32 masters of bf16
         weights, global norm clip and learning-rate schedules; gather parameters one layer
         ahead
       - refuse bad input by a message with the values and the fix; end all ranks when one
         fails; report a deadlock with the rank that each rank waits for

   DOES NOT
       - move bytes between machines (seqpar_nccl.h does, or a seqpar_comm_table of your own),
         compute on a GPU (seqpar_cuda.cu does, or a seqpar_device of your own), do tensor,
         pipeline or expert parallelism, serve models
       - promise equal bits across instruction sets, compilers or cell sizes: bits are equal for
         one binary, device, cell size and list of documents. The stripe layout (which cuts
         through cells), replicated kv heads, relaxed attention and kernels that you write keep
         an error bound instead (WORDS, error rule).
       - work if the file with the implementation is compiled with -ffast-math or for x87
         registers (each is an #error; with -m32 add -msse2 -mfpmath=sse). Opening a context
         refuses a program that is linked with -ffast-math or compiled with clang's
         -ffp-contract=fast. Files that only call the library may be compiled with any flags.

   OPTIONS
       SEQPAR_STATIC        everywhere: all functions become static
       SEQPAR_NO_THREADS    implementation: no POSIX threads; one rank
       SEQPAR_MALLOC(size), SEQPAR_FREE(ptr)
                            every unit with an implementation: allocator (both or none)
       SEQPAR_NO_FMA        implementation: two roundings even where the machine has fused
                            multiply-add

   RULES
       - Keep sums and counts separate and divide once: seqpar_sft_desc.count is the global
         count of supervised tokens of the optimizer step.
       - Parameter gradients over sp are summed, never averaged; seqpar_step_gradient does it.
       - Functions marked collective are called by all ranks of the comm, in the same order,
         also by ranks without a token.
       - One seqpar_ctx and one device per rank, used by one thread at a time. No global mutable
         state.
       - Give each rank of a machine cores / ranks threads. If ranks have more threads than
         that, start the program with OMP_WAIT_POLICY=passive: otherwise waiting OpenMP threads
         spin and take cores from other ranks (with it, a small model on four ranks of two
         threads on two cores takes 0.92 of the time). In other cases do not set it: sleeping
         threads wake late, above all if other programs use the cores. The trainers set it, this
         header never does.

   WORDS (one word for one thing; a second meaning is marked by a word before it)
       row            documents packed one after the other; rows are split over the SP ranks
       unit           documents that must share a row (a preference pair, a prompt's group)
       cell           one of the runs of tokens into which a document is cut at fixed positions;
                      a rank holds whole cells
       piece, share   a piece: the tokens of one cell that one rank holds; a share: all pieces
                      of a rank
       leaf, node     the sum over one piece; the sum of all leaves below a point of the binary
                      tree in which every sum over tokens is taken
       fold           a sum taken in that tree. A program is the part of a fold that one rank
                      computes, as a list of operations of a stack machine
       block          a query piece x a key piece, in attention. A parameter block is 1,024
                      neighbouring elements, which have one owner
       owner          of a token's keys: the rank that holds the token. Of a parameter block:
                      the rank that sums its gradient and updates it
       seed           the derivative of the loss with respect to one value of a token (its
                      log-prob, entropy, ..., score). A backward pass begins with seeds
       storage type, accumulator type
                      of weights and activations; of sums, statistics and optimizer state
       vocab          the projection of hidden states to logits over the vocabulary (also called
                      the LM head), and the log-probs computed from them
       head           an attention head, unless a word stands before it: a score head projects
                      to a reward or value
       step           an optimizer step. A compute step is the part of a plan that computes with
                      the keys of one source
       source         the rank (with Ulysses: the position) that owns the keys of a compute step
       segment        a document of the step, in functions that sum over its tokens
       group          sends and receives that begin together; a request is a group in flight. A
                      tensor's group: the tensors that are exchanged together, such as those of
                      a layer. A prompt's group: its responses
       dp, sp         data-parallel and sequence-parallel; world = dp x sp. The sp ranks of a
                      sequence have consecutive world ranks
       2D             sp ranks as positions x members: the members of a position exchange
                      tokens for heads (Ulysses), positions form a ring or gather (llama3).
                      Without Ulysses a position is a rank
       lse            log-sum-exp of a query's scores
       error rule     the bound where bits are not equal: the relative L2 error against fp64 is
                      at most twice that of one rank
       host device    a device that computes on the CPU
       own            in messages, "own kernel", "own product", "own transport": one that the
                      caller wrote

   WHAT A STEP COSTS, in device memory. T: local tokens, W: number of ranks, s: bytes of the
   storage type, c: bytes of the accumulator type. ctx->memory counts the bytes of each kind,
   current and peak; verify/tests/test_memory.c checks these bounds.
       weights        allocated by you or seqpar_llama: s for each parameter, on every rank;
                      once if ranks are threads that share them (params_shared); at zero_stage 3
                      divided by W, plus two groups of tensors (seqpar_shards)
       optimizer      AdamW: 2 c for each parameter, from zero_stage 1 on divided by W; another
                      c (the masters) where storage is not the accumulator type
       gradients      c / W for each parameter, and the nodes of one group (seqpar_optim_open)
       activations    allocated by you or the model: proportional to T
       exchange       ring: two slots of T keys and values; backward also two messages of dk
                      and dv each way. llama3: twice the keys and values of all tokens, for
                      heads_k_stride heads. Ulysses: q, k, v and results of all tokens, for a
                      share of the heads
       scratch        values that wait for their sibling in a tree, at most 4 log2(sp) for each
                      query and key; logits of rows_max tokens
       bytes sent     seqpar_plan_cost_of (verify/seqpar_check.h) counts them, and FLOPs, for
                      any plan without running it
   Cells have 128 tokens, and more beyond token 16,384 of a document (seqpar_cell_begin). A
   document with fewer cells than twice the ranks cannot be balanced by itself. Below 96 tokens
   a cell, attention of long documents gets slower (make bench). Another cell size changes the
   order of sums, and so the bits. The threads of a device split work inside a rank and change
   no bit; ranks of one machine share its cores (RULES).

   TO ADD
       a layout       a line of SEQPAR_LAYOUTS (>>api), and seqpar__deal_X in >>split unless its
                      pieces are dealt like those of another layout. Add its map to table_owner,
                      slow_rank and expect_edges of verify/tests/test_split.c, to deal_rank in
                      verify/support/deal.h and to write_holder in verify/oracle/dump/write.h:
                      each fails without one. make check SUITES="split refusals dump dump_run
                      oracle oracle_manual oracle_refused" names the sentences that list layouts.
                      All else reads the table.
       a schedule     a line of SEQPAR_SCHEDULES (>>calls) and seqpar__plan_X in >>plan, which
                      writes the list of a rank's operations. verify/tests/test_plan.c simulates it
                      for all ranks.
       an objective   a function in >>objective from plain numbers to value and derivative, with
                      its prototype in >>calls; its seeds go to the vocab or to a score head. A
                      variant of DPO is a line of SEQPAR_PREFERENCES (>>calls), which the
                      trainer's --pref_loss and the tests read too, and code in
                      seqpar__preference_of, or in seqpar_preference_loss if it is not a
                      function of the margin. Tests of a variant of DPO: a vector in
                      verify/second/golden.tsv and a reference in slow_pair_losses of
                      verify/second/slow_loss.h, both under its name. Tests of any other objective: a
                      line of verify/support/run_objective.h and a reference in verify/tests/test_objective.c.
                      All objectives in run_objective.h are run on 1 to 8 ranks and printed by
                      verify_sp.
       a transport    the functions of seqpar_comm_table, in a file of your own: nothing here
                      changes. demos/04_own_transport.c; verify/support/transport.h tests it.
       an operation   a line of SEQPAR_DEVICE_OPS_EACH or _HOST and seqpar_X_args (>>table), then
                      its function in each device: SEQPAR__ANY(X) in >>ref and seqpar__cpu_X
                      in >>product to >>rows, or seqpar__host_X for both; op_X in seqpar_cuda.cu.
                      The line registers it; opening a context refuses a user's device that
                      lacks it. Its test: a line of a list of verify/support/device_ops.h, and a
                      check in the suite of that list; verify/tests/test_device.c counts them.
                      One that works row by row also needs a line of row_ops in
                      verify/tests/test_numerics.c.
       a model        on the public API alone, as seqpar_llama.h is.

   SAMPLES: demos/snippet.c, attention in one call; demos/10_loss_and_optimizer.c, losses and
   optimizer alone; demos/08_own_trainer.c, a trainer with layers of its own: packing,
   attention, loss, backward and optimizer on P ranks. demos/01_ring.c, ring attention alone,
   follows in full; attend(), 24 lines, is the attention of a rank. The program prints

       1 rank : out[999] = 0.064213 ..., rank 0 sent 0 bytes
       4 ranks: out[999] = 0.064213 ..., rank 0 sent 196632 bytes
       identical bits: yes
   ========================================================================================== */
#if 0 /* SAMPLE */
/* SPDX-License-Identifier: MIT OR Unlicense */
/* 01_ring.c - ring attention over four ranks of this process, and the bits of one rank.  cc
   01_ring.c -lm -lpthread */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"

enum {
    TOKENS = 1000,
    HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 32,
    WIDE = HEADS * HEAD_DIM,
    NARROW = KV_HEADS * HEAD_DIM
};

typedef struct { /* global tensors: (tokens, heads, head_dim) */
    float q[TOKENS * WIDE], k[TOKENS * NARROW], v[TOKENS * NARROW], out[TOKENS * WIDE];
    int64_t ranks, sent;
} problem;

/* three documents, one of a single token */
static const int64_t cu_seqlens[] = {0, 420, 421, 1000};
static const seqpar_row row = {
    .tokens = TOKENS, .cell = 32, .docs = 3, .cu_seqlens = cu_seqlens};

static seqpar_status attend(seqpar_ctx *ctx, problem *p) {
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = HEAD_DIM,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = SEQPAR_SCHEDULE_RING};
    seqpar_attn *attn;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &row, 1, &desc);
    if (status) return status;
    const seqpar_share *mine = seqpar_attn_share(attn); /* the tokens this rank holds */
    float *q = (float *)malloc((size_t)mine->tokens * (2 * WIDE + 2 * NARROW + HEADS) *
                               sizeof *q);
    float *k = q + mine->tokens * WIDE, *v = k + mine->tokens * NARROW;
    float *out = v + mine->tokens * NARROW, *lse = out + mine->tokens * WIDE;
    seqpar_scatter(q, p->q, mine, 0, WIDE * sizeof *q);
    seqpar_scatter(k, p->k, mine, 0, NARROW * sizeof *k);
    seqpar_scatter(v, p->v, mine, 0, NARROW * sizeof *v);
    seqpar_attn_io io = {.q = q, .k = k, .v = v, .out = out, .lse = lse};
    status = seqpar_attn_forward(ctx, attn, &io);
    seqpar_gather(p->out, out, mine, 0, WIDE * sizeof *out);
    free(q);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    problem *p = (problem *)user;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, p->ranks);
    if (!status) status = attend(&ctx, p);
    if (!status && world->rank == 0) p->sent = ctx.sp->bytes_sent;
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static int run(problem *p, int64_t ranks) {
    seqpar_error error;
    p->ranks = ranks;
    if (seqpar_run_threads(ranks, rank_main, p, &error))
        return fprintf(stderr, "%s\n", error.text), 1;
    printf("%lld rank%s: out[999] = %.5g ..., rank 0 sent %lld bytes\n", (long long)ranks,
           ranks > 1 ? "s" : " ", (double)p->out[999 * WIDE], (long long)p->sent);
    return 0;
}

int main(void) {
    static problem one, four;
    for (int64_t i = 0; i < TOKENS * WIDE; i++)
        one.q[i] = (float)seqpar_random_normal(1, 0, (uint64_t)i);
    for (int64_t i = 0; i < TOKENS * NARROW; i++)
        one.k[i] = (float)seqpar_random_normal(1, 1, (uint64_t)i);
    for (int64_t i = 0; i < TOKENS * NARROW; i++)
        one.v[i] = (float)seqpar_random_normal(1, 2, (uint64_t)i);
    four = one;
    if (run(&one, 1) || run(&four, 4)) return 1;
    int same = !memcmp(one.out, four.out, sizeof one.out);
    printf("identical bits: %s\n", same ? "yes" : "no");
    return !same;
}
#endif /* SAMPLE */

/* =============================================================================================
   >>api  types and prototypes: errors, messages, folds, rows, shares

   Everything that needs no device: errors, transports of bytes between ranks, folds (sums in
   one order), packing of documents into rows, and the split of rows over ranks. >>table
   declares what a device does, >>calls the functions that a rank calls.
   ========================================================================================== */
#ifndef SEQPAR_H
#define SEQPAR_H

#define SEQPAR_VERSION_MAJOR 0
#define SEQPAR_VERSION_MINOR 2
#define SEQPAR_VERSION_PATCH 0
#define SEQPAR_VERSION       "0.2.0"

#include <stddef.h>
#include <stdint.h>

/* The largest sizes that are accepted. Positions and token ids have 32 bits. A width is the
   hidden size, the intermediate size or heads x head_dim; its limit is far beyond any model.
   With these limits all products of sizes stay below 2^63. */
#define SEQPAR_MAX_TOKENS    INT64_C(2147483647) /* of a row */
#define SEQPAR_MAX_WIDTH     (INT64_C(1) << 20)
#define SEQPAR_MAX_VOCAB     (INT64_C(1) << 24)
#define SEQPAR_MAX_LAYERS    (INT64_C(1) << 16)
#define SEQPAR_MAX_DOCUMENTS (INT64_C(1) << 31) /* of a step */
#define SEQPAR_MAX_PARTS     (INT64_C(1) << 24) /* of a step: micro-batches x dp_size */
#define SEQPAR_MAX_RANKS     (INT64_C(1) << 12) /* that are threads of one process */
#define SEQPAR_MAX_CHOICES   16                 /* tokens of a seqpar_vocab_choices */

/* The prefix of every function declaration. Define it to export the functions from a shared
   library. */
#ifndef SEQPAR_DEF
#if defined(SEQPAR_STATIC) && (defined(__GNUC__) || defined(__clang__))
#define SEQPAR_DEF static __attribute__((unused))
#elif defined(SEQPAR_STATIC)
#define SEQPAR_DEF static
#else
#define SEQPAR_DEF extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors ---------------------------------------------------------------------------------
   Functions return 0 or one of these negative codes. The message, with the values and the fix,
   is in the seqpar_error of the context (or the one passed in); a rank keeps its first error.
   Comments write a code without its prefix SEQPAR_ERR_.
   Pointers. A pointer may be NULL only where its declaration says so, or if it is an array of
   no elements. A function refuses NULL with POINTER and the name of the pointer. A function
   that returns no status prints the name to stderr and aborts. A function that is given no
   context, comm or error returns the status alone. */
#define SEQPAR_ERRORS(X) \
    X(PEER, -1, "another rank failed; its message is repeated") \
    X(MEMORY, -2, "out of memory") \
    X(DEADLOCK, -3, "every rank waits and nothing is in flight") \
    X(DIED, -4, "a rank ended without a word (injected)") \
    X(INJECTED, -5, "a transport failure was injected") \
    X(MESSAGE_SIZE, -6, "a message has another size than its receiver expects") \
    X(TRANSPORT, -7, "the library that moves bytes failed, or cannot run here") \
    X(TIMEOUT, -8, "something did not finish within its time limit") \
    X(WORLD, -10, "the world size does not fit data_parallel x sequence_parallel") \
    X(RANKS, -11, "the number of ranks is not positive or too large") \
    X(THREAD, -12, "a thread could not be started") \
    X(PACK_LEN, -20, "pack_len is not positive or too large") \
    X(NO_DOCUMENTS, -21, "there is no document to pack") \
    X(NO_TARGET, -22, "no document has a supervised token") \
    X(DOCUMENT_TOKENS, -23, "a document has a negative length or no token array") \
    X(TOKEN_ID, -24, "a token id lies outside the vocabulary") \
    X(UNIT_ORDER, -25, "documents of one unit are not neighbours") \
    X(UNIT_TOO_LONG, -26, "a unit does not fit into one row") \
    X(CELL, -27, "the tokens of a cell are negative or too many") \
    X(CU_SEQLENS, -28, "cu_seqlens does not rise from 0 to the number of tokens") \
    X(ROW_ORDER, -29, "row numbers do not rise") \
    X(LAYOUT, -30, "unknown layout") \
    X(SCHEDULE, -31, "unknown schedule") \
    X(RANK, -32, "a rank lies outside its group") \
    X(PLAN, -34, "a plan drops, doubles or mixes up blocks or messages") \
    X(TOKEN_RANGE, -33, "a token index lies outside its row") \
    X(HEADS, -40, "heads is not a positive multiple of kv_heads") \
    X(HEAD_DIM, -41, "head_dim is not positive (rotary embedding: even)") \
    X(HEAD_STRIDE, -42, "heads_k_stride does not divide kv_heads") \
    X(SIZE, -43, "a size is zero, negative or too large") \
    X(MASK, -45, "a window, prefix, softcap or dropout lies outside its range") \
    X(ULYSSES, -46, "ulysses_size does not divide the ranks or does not fit the heads") \
    X(DTYPE, -44, "the device does not store this type") \
    X(KERNEL, -47, "a block kernel of the user's own fails or returns nonsense") \
    X(DEVICE, -48, "a device is missing, too old or fails") \
    X(SEED_COUNT, -50, "the global token count is not positive") \
    X(OPTION, -51, "an option lies outside its range") \
    X(NOT_FINITE, -52, "a value is NaN or infinite") \
    X(STEP, -53, "two calls that must agree do not, or one is missing or comes twice") \
    X(ARITHMETIC, -54, \
      "the process computes otherwise than promised: flushed denormals, another rounding") \
    X(POINTER, -55, "a pointer is NULL that must not be") \
    X(FILE_OPEN, -60, "a file cannot be opened") \
    X(FILE_READ, -61, "a file cannot be read") \
    X(FILE_WRITE, -62, "a file cannot be written; what was there before is untouched") \
    X(FILE_FORMAT, -63, "a file is not what its name says") \
    X(FILE_TENSOR, -64, "a tensor is missing or has another shape or type")

typedef int seqpar_status;
enum seqpar_status_code {
    SEQPAR_OK = 0,
#define SEQPAR__X(name, code, text) SEQPAR_ERR_##name = code,
    SEQPAR_ERRORS(SEQPAR__X)
#undef SEQPAR__X
        SEQPAR__ERR_END = -1000
};

typedef struct seqpar_error {
    seqpar_status status;
    int64_t rank; /* world rank it happened on */
    char text[512];
} seqpar_error;

/* Stores the code and the printf-style message, escaped, unless *error holds an earlier error.
   error may be NULL. Returns status. */
SEQPAR_DEF seqpar_status seqpar_fail(seqpar_error *error, seqpar_status status,
                                     const char *format, ...);
/* How functions refuse NULL. SEQPAR_NEED makes the calling function return POINTER, with a
   message that names the first of these pointers that is NULL; in SEQPAR_NEED_BY the message
   names another function. SEQPAR_MUST aborts instead. names: "desc, io->q", in the order of the
   pointers. Pass a function pointer as SEQPAR_THERE(fn), and a pointer that is needed only
   under a condition as SEQPAR_IF(c, p). */
SEQPAR_DEF seqpar_status seqpar_need(seqpar_error *error, const char *function,
                                     const char *names, const void *const *pointers,
                                     int64_t count);
SEQPAR_DEF void seqpar_must(const char *function, const char *names,
                            const void *const *pointers, int64_t count);
#define SEQPAR_NEED_BY(function, error, names, ...) \
    do { \
        const void *const need_[] = {__VA_ARGS__}; \
        seqpar_status found_ = seqpar_need(error, function, names, need_, \
                                           (int64_t)(sizeof need_ / sizeof *need_)); \
        if (found_) return found_; \
    } while (0)
#define SEQPAR_NEED(error, names, ...) SEQPAR_NEED_BY(__func__, error, names, __VA_ARGS__)
#define SEQPAR_MUST(names, ...) \
    do { \
        const void *const need_[] = {__VA_ARGS__}; \
        seqpar_must(__func__, names, need_, (int64_t)(sizeof need_ / sizeof *need_)); \
    } while (0)
#define SEQPAR_ERROR_OF(owner)  ((owner) ? (owner)->error : NULL)
#define SEQPAR_THERE(p)         ((const void *)((p) ? "" : NULL))
#define SEQPAR_IF(condition, p) ((condition) ? (const void *)(p) : (const void *)"")
/* "SEQPAR_ERR_HEADS" and its one-line meaning; "?" for an unknown code. Static strings. */
SEQPAR_DEF const char *seqpar_status_name(seqpar_status status);
SEQPAR_DEF const char *seqpar_status_text(seqpar_status status);

/* ---- util: random numbers, exp, log ---------------------------------------------------------
   Counter-based (Philox 4x32-10, Salmon et al. 2011): a value depends on its key and index
   alone, so all ranks draw the same numbers. */
SEQPAR_DEF void seqpar_random(uint32_t out[4], uint64_t key, uint64_t index_high,
                              uint64_t index_low);
/* in (0, 1) */
SEQPAR_DEF double seqpar_random_uniform(uint64_t key, uint64_t stream, uint64_t index);
SEQPAR_DEF double seqpar_random_normal(uint64_t key, uint64_t stream, uint64_t index);
/* order[i] (count) becomes the shuffle of 0..count-1 that belongs to (seed, epoch). */
SEQPAR_DEF void seqpar_shuffle(int64_t *order, int64_t count, uint64_t seed, uint64_t epoch);
/* Polynomials in explicit fma, so the bits are the same on every machine with the same
   instructions; exp(0) = 1. */
SEQPAR_DEF double seqpar_exp(double x);
SEQPAR_DEF double seqpar_log(double x);

/* ---- comm: how bytes move -------------------------------------------------------------------
   A comm (communicator) is one rank's view of a group of ranks; the world is the comm of all
   ranks. A transport implements comms by the five functions of a seqpar_comm_table. It only
   moves bytes: floating-point numbers are exchanged as bytes and then summed by folds. The
   library calls a transport through seqpar_comm_begin, _wait, _split, _abort and _free;
   gathers, broadcasts and integer sums are built on these.

   THE CONTRACT of a transport. verify/support/transport.h tests any transport for all of it;
   demos/unix_sockets.h is one, used by demos/04_own_transport.c.

   Calls. A rank is a thread or a process. Only one thread at a time calls the comms of a rank.
   A group is a list of sends and receives that begin together. Several groups may be in flight,
   on one comm or on several. Each group is waited for once; the order of the waits is free.

   Messages. Within a comm, the n-th receive of rank b from rank a takes the n-th message that a
   sends to b, whatever groups they are in. A receive never takes a message of another comm,
   even if both comms have the same ranks. A message to oneself is sent and received in the same
   group. A message of 0 bytes is a message; its data may be NULL. The sizes of messages and
   groups have no limit. begin may block until its sends are done, provided that it receives
   meanwhile what others send to this rank: two ranks may begin large sends to each other.

   Buffers. The lists of a group need not outlive begin; only `name` is static. The data belongs
   to the caller. Between begin and the end of wait the caller may read the send buffers and
   does not touch the receive buffers. When wait returns, also with an error, the transport no
   longer uses the buffers. A finished send means that its buffer is free, not that the message
   has been received.

   Memory. If comm->device is NULL, or its own_memory is 0, buffers are host memory. Otherwise
   each buffer may be host memory or the device's, and a transport that is not `queued` accesses
   buffers only by device->copy(device, to, from, bytes, NULL), which accepts both. Its queue
   argument is always NULL: the device has finished its work on the buffers when begin is
   called, and after wait the received bytes are in place.

   Queues. A `queued` transport (NCCL) is given the device's queue, enqueues its work there, and
   does not block the host; with queue NULL it works like the other transports. Such a transport
   finishes one group before it starts the next. Each rank numbers the groups that it begins on
   queues of the comm. So both ends of a message must be in groups with the same number.

   Errors. A function that fails writes a message to comm->error by seqpar_fail, which keeps the
   first error, and returns its code. The message names the group, its step and both ranks.
   - A begin that fails leaves request->state NULL and nothing in flight.
   - STEP: the groups of a message and of its receive differ in name or step. The receiver
     detects it, names both groups, and writes nothing. On a queue a transport need not check:
     the library checks there, before it updates anything.
   - MESSAGE_SIZE: sizes differ. The receiver detects it, names both sizes, and writes nothing
     beyond its buffer.
   - abort ends the world. It does not block. The first abort counts, on whichever comm of the
     world; its code is comm->error->status, or PEER if that is 0. From then on every wait of
     another rank that lacks a message returns PEER at once, with "rank R failed: " and the
     text, even if its peer is still computing. The failing rank's own waits return as well: the
     library aborts, waits for all its requests, and frees their buffers.
   - A rank Q may end normally or by a crash. Messages that it sent before can still be
     received. A rank R that waits for any other message from Q, or for Q to receive one, fails
     with "rank R waits in 'NAME' step S for rank Q, which has ended". This ends the world,
     too.
   - A hang fails with DEADLOCK, on all ranks, if the transport detects that no rank can
     continue, or with TIMEOUT if nothing arrived within its time limit. Either message says
     "rank R waits in 'NAME' step S for rank Q".

   Start and end. The transport's function that starts the ranks has the form of
   seqpar_run_threads. It gives each rank a world comm with an error of that rank's own, with
   error->rank set. If a rank returns an error, it aborts the world with that rank's text, or
   with seqpar_status_text if there is none. It waits for all ranks, and returns code, rank and
   text of the first abort. A comm made by split may outlive its parent and has the same
   error. */
typedef struct seqpar_transfer {
    int64_t peer; /* rank within the comm */
    void *data;
    int64_t bytes;
} seqpar_transfer;

typedef struct seqpar_group {
    const char *name; /* static string, named in messages: "kv ring" */
    int64_t step;
    const seqpar_transfer *sends;
    int64_t send_count;
    const seqpar_transfer *recvs;
    int64_t recv_count;
} seqpar_group;

/* {NULL}: complete, or never begun; seqpar_comm_wait then returns 0 at once. */
typedef struct seqpar_request {
    void *state; /* the transport's; freed by its wait */
} seqpar_request;

typedef struct seqpar_comm seqpar_comm;
typedef struct seqpar_comm_table {
    const char *name;
    /* Begins a group; its messages are sent while the caller computes. Sets request->state
       unless nothing is left to wait for. queue: see Queues; NULL: none. Like MPI_Isend and
       MPI_Irecv, or ncclGroupStart to ncclGroupEnd. */
    seqpar_status (*begin)(seqpar_comm *comm, const seqpar_group *group, void *queue,
                           seqpar_request *request);
    /* Completes a group, and frees request->state, even if it fails. queue NULL: blocks until
       all messages have arrived. Otherwise later work on the queue waits for the group. */
    seqpar_status (*wait)(seqpar_comm *comm, seqpar_request *request, void *queue);
    /* *sub becomes a comm of the ranks that gave the same color, ordered by key, then by rank.
       All ranks of comm call it, in the same order. As MPI_Comm_split. */
    seqpar_status (*split)(seqpar_comm *comm, int64_t color, int64_t key, seqpar_comm **sub);
    /* Ends every rank of the world with this text. Never blocks. */
    void (*abort)(seqpar_comm *comm, const char *text);
    /* Frees what belongs to this comm alone. Not collective. */
    void (*free)(seqpar_comm *comm);
    int queued; /* 1: begin and wait are given the queue; 0: always NULL */
} seqpar_comm_table;

struct seqpar_comm { /* the transport sets table, rank, size, error, state; the rest to 0 */
    const seqpar_comm_table *table;
    int64_t rank, size;
    seqpar_error *error; /* of this rank, one for all its comms of a world */
    /* to other ranks; seqpar_comm_begin counts them */
    int64_t bytes_sent, messages_sent;
    /* on queues: the number of groups begun, and a checksum of their messages;
       seqpar_comm_begin updates both. The checksums of all ranks add up to 0 if the two ends of
       each message are in groups of the same number, name and step */
    int64_t queue_groups;
    uint64_t queue_sum;
    /* buffers may lie in the memory of this device; NULL: only in the host's. seqpar_ctx_open
       sets it; the last seqpar_ctx_close sets it to NULL. contexts: how many are open on this
       comm */
    struct seqpar_device *device;
    int64_t contexts;
    void *state; /* the transport's */
};

/* Begin a group, and wait for it, by the contract. seqpar_comm_begin also counts what is sent,
   and for a transport that is not `queued` first waits for the work on the queue. */
SEQPAR_DEF seqpar_status seqpar_comm_begin(seqpar_comm *comm, const seqpar_group *group,
                                           void *queue, seqpar_request *request);
SEQPAR_DEF seqpar_status seqpar_comm_wait(seqpar_comm *comm, seqpar_request *request,
                                          void *queue);
/* Collective over the comm, as are the next four; buffers are host memory. recv holds the parts
   of all ranks one after the other; bytes[r] is the size of rank r's part. send may be this
   rank's part of recv. */
SEQPAR_DEF seqpar_status seqpar_comm_all_gather(seqpar_comm *comm, void *recv, const void *send,
                                                const int64_t *bytes, const char *name);
/* Returns when all ranks have called it. */
SEQPAR_DEF seqpar_status seqpar_comm_barrier(seqpar_comm *comm);
/* Copies data (bytes) of rank `root` to all ranks. */
SEQPAR_DEF seqpar_status seqpar_comm_broadcast(seqpar_comm *comm, void *data, int64_t bytes,
                                               int64_t root);
/* Replaces values (count) by their sums or maxima over the ranks. */
SEQPAR_DEF seqpar_status seqpar_comm_sum_i64(seqpar_comm *comm, int64_t *values, int64_t count);
SEQPAR_DEF seqpar_status seqpar_comm_max_i64(seqpar_comm *comm, int64_t *values, int64_t count);
/* The caller frees *sub with seqpar_comm_free; NULL may be freed. */
SEQPAR_DEF seqpar_status seqpar_comm_split(seqpar_comm *comm, int64_t color, int64_t key,
                                           seqpar_comm **sub);
SEQPAR_DEF void seqpar_comm_abort(seqpar_comm *comm, const char *text);
SEQPAR_DEF void seqpar_comm_free(seqpar_comm *comm);

/* A message and its receive, as a transport compared them: names and steps of the two groups,
   the ranks, the sizes. seqpar_comm_mismatch writes what differs to *error, as STEP or
   MESSAGE_SIZE. */
typedef struct seqpar_mismatch {
    const char *name, *sent_name; /* of the receiver's group, of the sender's */
    int64_t step, sent_step, to, from, bytes, sent_bytes;
} seqpar_mismatch;
SEQPAR_DEF seqpar_status seqpar_comm_mismatch(seqpar_error *error, const seqpar_mismatch *m);

/* A world of one rank, which sends only to itself. The caller frees it with
   seqpar_comm_free. NULL: out of memory. */
SEQPAR_DEF seqpar_comm *seqpar_comm_self(void);

/* Runs fn on `ranks` threads that share a world, and returns when all have ended. If a rank
   returns an error, all others end, and *error gets its message. If every rank waits and
   nothing is in flight, the world ends with SEQPAR_ERR_DEADLOCK, and the message says which
   rank waits for which. With SEQPAR_NO_THREADS only ranks == 1 is possible (fn runs on the
   calling thread). */
typedef seqpar_status (*seqpar_rank_fn)(seqpar_comm *world, void *user);
SEQPAR_DEF seqpar_status seqpar_run_threads(int64_t ranks, seqpar_rank_fn fn, void *user,
                                            seqpar_error *error);

/* ---- fold: one order for every sum ----------------------------------------------------------
   A fold is a sum in a binary tree over numbered leaves: node (level, index) is the sum of the
   leaves [index << level, (index + 1) << level). All ranks know beforehand which leaves exist.
   If a leaf is absent, its sibling takes the place of their parent. So the order of additions
   never depends on the order of arrival. The additions of a rank are a program for a stack
   machine, which a device runs. */
typedef struct seqpar_node {
    int64_t level, index;
} seqpar_node;

enum seqpar_fold_op_code {
    SEQPAR_FOLD_LEAF,    /* compute leaf `index` and push it */
    SEQPAR_FOLD_EXTEND,  /* compute leaf `index` as a continuation of the value on top */
    SEQPAR_FOLD_LOAD,    /* push the value in slot `index` of the store */
    SEQPAR_FOLD_COMBINE, /* pop two values, push their sum; their order does not matter */
    SEQPAR_FOLD_STORE,   /* pop a value into slot `index` of the store */
    SEQPAR_FOLD_FINISH   /* pop into the result */
};

typedef struct seqpar_fold_op {
    int32_t op, index;
} seqpar_fold_op;

typedef struct seqpar_fold {
    /* (leaf_count) the numbers of all leaves that exist, rising; borrowed */
    const int64_t *leaves;
    int64_t leaf_count;
    seqpar_node *pending; /* (pending_count) stored values that wait for their sibling */
    int32_t *pending_at;  /* (pending_count) their slots in the store */
    int64_t pending_count, pending_capacity;
    int64_t slots_high, depth_high; /* peak number of store slots, of stack entries */
    seqpar_fold_op *program;
    int64_t program_count, program_capacity;
    int done; /* everything is combined into one value */
    /* set to 1 by the caller after init: there is no tree. Leaves are added to one value in the
       order in which they are pushed; the fold is done after leaf_count leaves */
    int running;
    int64_t taken;                      /* running: pushed so far */
    struct seqpar__span *stack, *spans; /* leaf ranges of stack values, of pending ones */
    int64_t stack_count, stack_capacity, spans_capacity;
    /* (leaf_count) waiting[i]: 1 + the index in pending of the value that meets its sibling at
       leaf i; 0: no value does. NULL until a value is stored */
    int32_t *waiting;
    int32_t *vacant; /* free slots below slots_high: a min-heap */
    int64_t vacant_count, vacant_capacity;
    int64_t next; /* index in leaves: behind the last leaf pushed */
} seqpar_fold;

/* leaves (leaf_count, rising): borrowed until seqpar_fold_free. */
SEQPAR_DEF void seqpar_fold_init(seqpar_fold *fold, const int64_t *leaves, int64_t leaf_count);
SEQPAR_DEF void seqpar_fold_free(seqpar_fold *fold);
/* Appends to the program: push the value of `node` by `op` (LEAF, EXTEND or LOAD) with index
   `operand`; then, while the sibling of the result is on the stack or stored, add the two. The
   nodes of one program are pushed in rising order. MEMORY. */
SEQPAR_DEF seqpar_status seqpar_fold_push(seqpar_fold *fold, seqpar_node node, int32_t op,
                                          int32_t operand);
/* Ends one program: stores what is left on the stack. The caller then runs fold->program, and
   sets program_count to 0 before the next push. MEMORY. */
SEQPAR_DEF seqpar_status seqpar_fold_flush(seqpar_fold *fold);

/* ---- pack: documents to rows --------------------------------------------------------------*/
#define SEQPAR_IGNORE (-100) /* target of a position that has none */

typedef struct seqpar_document {
    const int32_t *ids; /* (tokens) */
    /* (tokens) 1: this token is to be predicted; NULL: all but the first */
    const uint8_t *loss_mask;
    int64_t tokens;
    /* documents of one unit (a pair, a group) are neighbours and share a row */
    int64_t unit;
    /* prefix-LM: the number of first tokens that the whole document sees; 0: causal */
    int64_t prefix;
    /* (tokens) the target of each token in place of the next token, an id or SEQPAR_IGNORE:
       labels that are not shifted, such as those of process reward models. NULL: the next
       token. If set, loss_mask is NULL */
    const int32_t *targets;
} seqpar_document;

typedef struct seqpar_row {
    int64_t index; /* number within the optimizer step; rises from row to row */
    int64_t tokens;
    int64_t cell;              /* tokens of a cell; 0: the default of seqpar_cell_begin */
    int64_t docs;              /* 0: all of the row is one document */
    const int64_t *cu_seqlens; /* (docs + 1) from 0 to tokens; NULL where docs is 0 */
    const int32_t *ids;        /* (tokens) */
    /* (tokens) id of the next token of the same document, or its seqpar_document.targets, or
       SEQPAR_IGNORE */
    const int32_t *targets;
    const int32_t *position_ids; /* (tokens) position within the document */
    /* (docs) number of each document within the optimizer step: the order of documents in every
       fold. Numbers rise within a row and from row to row. NULL: documents are numbered by
       their rows */
    const int64_t *doc_source;
    /* (docs) the number of first tokens of a document that all of it sees; NULL: none */
    const int64_t *prefix_lens;
} seqpar_row;

enum seqpar_pack_order { SEQPAR_PACK_IN_ORDER, SEQPAR_PACK_UNIT_PER_ROW };
enum seqpar_truncation { SEQPAR_TRUNCATION_DROP, SEQPAR_TRUNCATION_CUT };
typedef struct seqpar_pack_desc {
    int64_t pack_len; /* most tokens in a row; required */
    int64_t cell;     /* seqpar_row.cell of all rows */
    int order;        /* SEQPAR_PACK_*; 0: units in order, as many in a row as fit */
    int truncation;   /* SEQPAR_TRUNCATION_*: what happens to a unit longer than pack_len */
    /* The units of a step are divided in order, evenly by tokens, over micro-batches, and in
       each over dp_size data-parallel ranks (0: 1). No row has units of two parts
       (seqpar_part). If micro_batches is 0, it is the smallest number for which a part has
       about micro_rows rows, or 1 if micro_rows is 0, too */
    int64_t dp_size, micro_batches, micro_rows;
    /* keep units without a supervised token (a batch may then have none at all) */
    int keep_masked;
    int64_t vocab; /* 0: ids are not checked */
} seqpar_pack_desc;

typedef struct seqpar_pack_counts {
    /* all input documents; then those left out or shortened, by reason */
    int64_t documents, zero_length, dropped, cut, masked;
    int64_t tokens, supervised; /* of the rows */
} seqpar_pack_counts;

typedef struct seqpar_batch {
    seqpar_row *row; /* (rows) */
    int64_t rows, micro_batches;
    seqpar_pack_counts counts;
    void *storage;
} seqpar_batch;

/* Packs the documents of one optimizer step (read only during the call). Targets are shifted
   here, once, before any split; the last position of every document has no target. Takes O(n
   log n) time in the number of documents. The caller frees *batch with seqpar_batch_free; after
   an error it is empty. NO_TARGET: no unit is left. */
SEQPAR_DEF seqpar_status seqpar_pack(seqpar_error *error, seqpar_batch *batch,
                                     const seqpar_document *documents, int64_t count,
                                     const seqpar_pack_desc *desc);
SEQPAR_DEF void seqpar_batch_free(seqpar_batch *batch);
/* One part of a step: micro-batch micro_batch of micro_batches, in it data-parallel rank dp_rank of
   dp_size, both from 0. */
typedef struct seqpar_part {
    int64_t micro_batches, dp_size, micro_batch, dp_rank;
} seqpar_part;

/* Finds the rows of a part: rows[*first .. *first + *count). A joint is a boundary between two
   leaves; its height is the level of the node that joins them (>>fold). Ideally all parts have
   equally many tokens. A part begins at the highest joint between rows that is near its ideal
   begin, or else at the nearest joint. Near means, for a micro-batch, within 1/8 of its tokens,
   so that few sums wait for the next micro-batch; for a rank's part within 1/64 of its tokens,
   so that ranks are balanced. The parts are those that seqpar_pack made.
   rows may be NULL if row_count is 0. OPTION: there is no such part; other codes as for
   seqpar_split. */
SEQPAR_DEF seqpar_status seqpar_part_rows(seqpar_error *error, int64_t *first, int64_t *count,
                                          const seqpar_row *rows, int64_t row_count,
                                          const seqpar_part *part);
/* Cells. A document is cut into cells at fixed positions: every `cell` tokens, or if cell is 0
   every 128 up to token 16,384, every 256 up to 131,072, every 512 from there on. The sum over
   a cell is a leaf of a fold (>>fold). So a document that grows keeps its cells, and neither
   the row it is packed into nor the number of ranks changes them.
   seqpar_cell_begin: the first token of cell `number` of a document. seqpar_cell_of: the number
   of the cell that has `token`. */
SEQPAR_DEF int64_t seqpar_cell_begin(int64_t cell, int64_t number);
SEQPAR_DEF int64_t seqpar_cell_of(int64_t cell, int64_t token);
/* The number of a cell's leaf in its document: the number of the cell, or if cell is 0 its
   first token / 128. So high joints of the tree lie at tokens that are multiples of high powers
   of two. With many numbers of ranks, a split cuts a document at such tokens. */
SEQPAR_DEF int64_t seqpar_cell_leaf(int64_t cell, int64_t number);
/* floor(part * total / parts): where part `part` of `parts` nearly equal ones begins. */
SEQPAR_DEF int64_t seqpar_part_begin(int64_t total, int64_t parts, int64_t part);

/* ---- split: who holds which token ---------------------------------------------------------*/
/* Each line is a layout. Everything that differs between layouts is in its line or in the
   function seqpar__deal_* that the line names (chapter >>split), which hands the pieces of the
   rows to ranks.
     whole cells  1: ranks hold whole cells, and bits are equal; 0: the error rule
     slots        number of runs of cells that each rank gets, if whole cells are dealt. The
                  second runs go to the ranks in reverse order. `cells` cuts the runs from all
                  rows together, `documents` from each long document
     down         1: in a ring keys go to the previous position, which saves bytes (>>plan) */
#define SEQPAR_LAYOUTS(X) \
    /* name, text, whole cells, slots, down, dealt by */ \
    X(CONTIGUOUS, "contiguous", 1, 1, 0, cells) \
    X(ZIGZAG, "zigzag", 1, 2, 1, cells) \
    X(STRIPE, "stripe", 0, 0, 0, stripe) \
    X(ZIGZAG_DOC, "zigzag-doc", 1, 2, 1, documents)
enum seqpar_layout_id {
#define SEQPAR__X(name, text, whole_cells, slots, down, deal) SEQPAR_LAYOUT_##name,
    SEQPAR_LAYOUTS(SEQPAR__X)
#undef SEQPAR__X
        SEQPAR_LAYOUT_COUNT
};

typedef struct seqpar_layout {
    const char *name;
    int whole_cells, slots, down;
} seqpar_layout;

/* The line of a layout; NULL: there is no such layout. */
SEQPAR_DEF const seqpar_layout *seqpar_layout_at(int layout);
SEQPAR_DEF const char *seqpar_layout_name(int layout); /* "?" */

/* Tokens start, start + stride, ... (count) of one cell. They are rows `local`, local + 1, ...
   of the rank's tensors. With stripe, the time of planning grows with n^2 sp_size for a
   document of n cells. Where that is more than 2^23, a piece covers several cells instead of
   one: from `cell` up to the cell of the rank's next piece. */
typedef struct seqpar_piece {
    int64_t row;      /* index into the rows it was made from */
    int64_t document; /* number of its document within the step */
    int64_t origin;   /* the token of the row where the document begins */
    int64_t cell;     /* number of the cell within the document */
    int64_t leaf;     /* number in the folds over tokens: rises with document and cell */
    int64_t start, stride, count;
    int64_t local;
} seqpar_piece;

typedef struct seqpar_share { /* what one rank of an SP group holds of some rows */
    seqpar_piece *pieces;
    int64_t count;
    int64_t tokens;
    const seqpar_row *rows; /* (row_count) the rows that were split; borrowed */
    int64_t row_count;
    int layout;
    int64_t sp_size, sp_rank;
} seqpar_share;

/* How P ranks split the rows, as one list of S tokens. Contiguous: P slots; rank r has slot r.
   Zigzag: 2P slots; rank r has slots r and 2P-1-r. Slot i begins near token floor(i S/slots),
   where a cell begins: at the highest joint of the fold's tree (>>fold) within 1/8 of a slot,
   so that few sums wait for another rank; if there is none, at the nearest cell. Zigzag-doc: a
   document of 2P cells or more is split by zigzag as a list of its own; shorter ones go whole
   to the ranks, in order, evenly by tokens. Stripe: rank r has the tokens of each cell that are
   congruent to r modulo P (the error rule). The caller frees the share with
   seqpar_share_free. */
typedef struct seqpar_split_desc {
    int layout;
    int64_t sp_size, sp_rank;
} seqpar_split_desc;

SEQPAR_DEF seqpar_status seqpar_split(seqpar_error *error, seqpar_share *share,
                                      const seqpar_row *rows, int64_t row_count,
                                      const seqpar_split_desc *desc);
SEQPAR_DEF void seqpar_share_free(seqpar_share *share);
/* Where token `token` of a row lies: rank and local row (as if this row were the only one). */
SEQPAR_DEF seqpar_status seqpar_split_owner(seqpar_error *error, int64_t *sp_rank,
                                            int64_t *local, const seqpar_row *row,
                                            int64_t token, const seqpar_split_desc *desc);
/* How evenly the tokens of some rows are spread over the ranks, and which smaller cells would
   spread them evenly. Large cells can spread them unevenly, as a rank gets whole cells. */
typedef struct seqpar_balance {
    int64_t tokens;     /* of all rows */
    int64_t most, idle; /* tokens of the busiest rank, ranks without any */
    /* the largest cell size, a power of two below the present size, that would spread the
       tokens evenly; 0: none */
    int64_t better_cell;
} seqpar_balance;

SEQPAR_DEF seqpar_status seqpar_split_balance(seqpar_error *error, seqpar_balance *balance,
                                              const seqpar_row *rows, int64_t row_count,
                                              int layout, int64_t sp_size);
/* Is a rank idle, or does one hold more than 5/4 of the mean? */
SEQPAR_DEF int seqpar_balance_poor(const seqpar_balance *balance, int64_t sp_size);
/* local (share->tokens, width) <- global (row tokens, width) of one row, and back; width in
   bytes. */
SEQPAR_DEF void seqpar_scatter(void *local, const void *global, const seqpar_share *share,
                               int64_t row, int64_t width);
SEQPAR_DEF void seqpar_gather(void *global, const void *local, const seqpar_share *share,
                              int64_t row, int64_t width);

/* =============================================================================================
   >>table  types and prototypes: what a device does

   A device is a table of functions: memory, copies, queues, and one function for each operation.
   It knows of no ranks. To add a device, fill a table; to train on the CPU, read
   seqpar_device_cpu and go on with >>calls.
   ========================================================================================== */

/* ---- device: who computes -------------------------------------------------------------------
   Operations work on opaque pointers. Activations and weights have the device's storage type;
   statistics, sums over tokens, gradients and optimizer state have its accumulator type.
   Matrices carry their row stride. An operation that works row by row computes a row to the
   same bits whatever other rows are in the call. An operation that sums over tokens runs the
   fold program that it is given.

   A host device computes inside the call, and its queue is NULL. A GPU has one queue, a CUDA
   stream. A call with that queue returns at once; its work runs in the order of calls, and its
   lists (pieces, tasks, programs) are copied before it returns. sumsq, route and sample wait
   for their work, as their results are host memory. A call with queue NULL runs in the same
   order, and returns when its work is done: so the host reads and writes device memory by
   copies with queue NULL. seqpar_device_settle waits for all earlier calls. Freed memory is
   reused in queue order, so free does not wait. The comment of each entry names the CUDA call
   that implements it. */
enum seqpar_dtype { SEQPAR_DTYPE_F64, SEQPAR_DTYPE_F32, SEQPAR_DTYPE_BF16 };

typedef struct seqpar_mat {
    void *data;
    int64_t stride; /* elements from row to row */
} seqpar_mat;

typedef struct seqpar_fold_call { /* a fold program and where its values live */
    const seqpar_fold_op *program;
    int64_t program_count;
    int64_t depth; /* stack entries it needs */
    /* slot n of the store begins at element n * store_stride; a weight gradient stores its
       nodes there */
    void *store;
    int64_t store_stride;
    void *finish; /* result; may be NULL if the program has no FINISH, as in a step's folds */
} seqpar_fold_call;

/* y (rows, out) = x (rows, in) . W^T with w (out, in); transposed: w is (in, out) and y = x
   . W. accumulate: the sum over `in` starts from the old y. Each element is one fma chain,
   `in` rising. */
typedef struct seqpar_matmul_args {
    seqpar_mat y, x, w;
    int64_t rows, out, in;
    int transposed, accumulate;
} seqpar_matmul_args;

/* Leaf i: dw (out, in) = sum over the tokens t of leaves[i] (local .. local + count) of dy (t,
   out)^T x (t, in), t rising. */
typedef struct seqpar_weight_grad_args {
    seqpar_fold_call fold;
    const seqpar_piece *leaves; /* local and count are used */
    seqpar_mat dy, x;
    int64_t out, in;
} seqpar_weight_grad_args;

/* x (rows, width) = table (vocab, width) [ids (rows)] */
typedef struct seqpar_embedding_args {
    seqpar_mat x, table;
    const int32_t *ids;
    int64_t rows, width;
} seqpar_embedding_args;

/* Leaf i: (rows, width) sums of dx over the tokens of each id, in token order. Row r belongs to
   id first + r; other ids are left out. */
typedef struct seqpar_embedding_grad_args {
    seqpar_fold_call fold;
    const seqpar_piece *leaves;
    seqpar_mat dx;
    const int32_t *ids;
    int64_t rows, width, first;
} seqpar_embedding_grad_args;

/* y = x / sqrt(mean(x^2) + eps) * gain; rstd (rows) is kept for the gradient. */
typedef struct seqpar_rmsnorm_args {
    seqpar_mat y, x;
    void *rstd;
    const void *gain;
    int64_t rows, width;
    double eps;
} seqpar_rmsnorm_args;

/* dx += the gradient of rmsnorm; leaf i of the fold: dgain (width) over its tokens. */
typedef struct seqpar_rmsnorm_grad_args {
    seqpar_fold_call fold;
    const seqpar_piece *leaves;
    seqpar_mat dx, dy, x;
    const void *rstd, *gain;
    int64_t rows, width;
} seqpar_rmsnorm_grad_args;

/* In place on x (rows, heads, head_dim): rotates the elements i and i + head_dim/2 by the angle
   position * theta^(-2i/head_dim). cosine and sine (positions, head_dim/2), accumulator type,
   are computed in fp64. inverse: rotates back (the gradient). */
typedef struct seqpar_rope_args {
    seqpar_mat x;
    const void *cosine, *sine;
    const int32_t *positions;
    int64_t rows, heads, head_dim;
    int inverse;
} seqpar_rope_args;

/* y = silu(gate) * up, all (rows, width). The gradient takes dy in y, and overwrites gate and
   up with their gradients. */
typedef struct seqpar_swiglu_args {
    seqpar_mat y, gate, up;
    int64_t rows, width;
} seqpar_swiglu_args;

/* y = a + b, count elements of the storage type; with `accumulators` of the accumulator type */
typedef struct seqpar_add_args {
    void *y;
    const void *a, *b;
    int64_t count;
    int accumulators;
} seqpar_add_args;

/* Leaf i is the vector at leaf_data + i * leaf_stride; count elements, accumulator type. */
typedef struct seqpar_fold_args {
    seqpar_fold_call fold;
    const void *leaf_data;
    int64_t leaf_stride, count;
} seqpar_fold_args;

/* A key piece of one compute step. k_row, v_row: its first row in the k and v of the args. Key
   n has the position start + n stride. */
typedef struct seqpar_attn_keys {
    int64_t k_row, v_row, start, stride, count;
} seqpar_attn_keys;

typedef struct seqpar_attn_task {
    /* index in q_pieces of the piece whose result is folded: queries (forward, dq) or keys
       (dkv, return) */
    int64_t piece;
    /* its leaves: key pieces (forward, dq), query pieces (dkv), nodes in the inbox (return) */
    const seqpar_fold_op *program;
    int64_t program_count;
    /* dkv, return: in elements. Slot n is at store_base + n * store_stride: for each head dk,
       then dv */
    int64_t store_base, store_stride;
    /* return: node i is at inbox_base + i * 2 * count * head_count * head_dim, laid out like a
       slot */
    int64_t inbox_base;
    /* dkv: the index that the programs of the query tasks use for its key piece; each program
       uses these indices in rising order */
    int64_t order;
} seqpar_attn_task;

/* Attention of one compute step over kv heads head_begin .. + head_count of kv_heads. Query t
   sees the keys of its row at positions [visible_begin[t], visible_end[t]). Scores are s =
   scale * q.k, with softcap c: c tanh(s / c). Statistics of each query and head: lse = log sum
   exp(scores), the sink included; delta = dout . out. Dropout sets a probability to 0 or
   divides it by 1 - dropout in the sum of out, but not in lse. All tensors are (tokens, heads,
   head_dim) without gaps; the k, v of a step are (tokens, head_count, head_dim). A leaf is one
   block (query piece x key piece). */
typedef struct seqpar_attn_args {
    int64_t heads, kv_heads, head_dim, head_begin, head_count, q_tokens;
    double scale, softcap; /* softcap 0: none */
    const void *sinks;     /* (heads) or NULL */
    double dropout;
    uint64_t dropout_seed, dropout_stream;
    /* number of head 0 among the heads of all ranks */
    int64_t dropout_head;
    const seqpar_piece *q_pieces;
    const seqpar_attn_keys *k_pieces;
    const seqpar_attn_task *tasks;
    int64_t task_count, depth;
    const int32_t *visible_begin, *visible_end; /* (q_tokens) */
    const void *q, *k, *v;
    /* lse (q_tokens, heads), delta and sinks: accumulator type */
    void *out, *lse;
    const void *dout, *delta; /* delta like lse */
    void *dq, *dk, *dv;       /* gradients of this rank's tokens; all kv heads */
    /* query tasks: a slot holds for each piece and head, in forward, the state of an online
       softmax: o (count, head_dim), m and l (count); in backward, dq */
    void *store;
    const void *inbox;
} seqpar_attn_args;

/* The backward pass of all blocks of a compute step: the query tasks give dq, the key tasks dk
   and dv. Both name the same blocks. q_pieces of the key tasks: the key pieces of those tasks,
   then the query pieces. */
typedef struct seqpar_attn_backward_args {
    seqpar_attn_args queries;
    const seqpar_attn_args *keys; /* (groups) this rank's keys, then those of each source */
    int64_t groups;
} seqpar_attn_backward_args;

/* dsinks (piece_count, heads), accumulator type: sums of -exp(sink - lse) delta over the
   tokens of each piece */
typedef struct seqpar_attn_sinks_args {
    void *dsinks;
    const void *sinks, *lse, *delta; /* lse, delta (tokens, heads) */
    const seqpar_piece *pieces;
    int64_t piece_count, heads;
} seqpar_attn_sinks_args;

/* delta (tokens, heads) = sum over head_dim of dout * out */
typedef struct seqpar_attn_delta_args {
    void *delta;
    const void *dout, *out;
    int64_t tokens, heads, head_dim;
} seqpar_attn_delta_args;

/* Merges attention over two sets of keys, part into sum: results (tokens, heads, head_dim) and
   lse (tokens, heads), all accumulators. sum becomes the attention over all these keys, sum_lse
   its lse. A result of part with lse -inf is not read. With sum_lse NULL, part is simply added
   to sum (gradients). If out is not NULL, sum is also written there, in the storage type with
   out_heads heads a token, and its lse to lse; sinks are then included. A host device refuses a
   NaN in part_lse, a GPU passes it on. */
typedef struct seqpar_attn_merge_args {
    void *sum, *sum_lse;
    const void *part, *part_lse; /* NULL: nothing is added */
    void *out, *lse;             /* NULL: not written */
    const void *sinks;           /* (heads) or NULL; set only together with out */
    int64_t tokens, heads, head_dim, out_heads;
    int begin; /* 1: sum and sum_lse begin as 0 and -inf, and are not read */
} seqpar_attn_merge_args;

/* Statistics of logits x (rows, vocab) and, with `gradient`, the gradient, which overwrites x:
     dx_j = dlogp (1[j=y] - p_j) - dentropy p_j (log p_j + H)
          + dsmooth (p_j - 1/V) + dzloss 2 lse p_j
   for logp = x_y - lse, H = entropy, smooth = lse - mean(x), zloss = lse^2. A row whose target
   is SEQPAR_IGNORE has logp 0, and dlogp, dsmooth, dzloss do not act on it. Outputs and seeds
   may be NULL. A logit of -inf has p 0, adds nothing to the entropy and has the gradient 0,
   but smooth is infinite. */
typedef struct seqpar_vocab_softmax_args {
    seqpar_mat logits;
    int64_t rows, vocab;
    const int32_t *targets;
    void *logp, *entropy, *lse, *smooth;             /* (rows) accumulator type */
    const void *dlogp, *dentropy, *dsmooth, *dzloss; /* (rows) accumulator type */
    /* x is first multiplied by scale, 1 / temperature; 0: 1 */
    double scale;
    int gradient;
} seqpar_vocab_softmax_args;

/* KL divergence between the softmax p of a student's logits x (rows, vocab) and the softmax t
   of a teacher's logits, both first multiplied by scale (0: 1). kl = sum t (log t - log p), or
   with reverse 1 sum p (log p - log t); a term whose first factor is 0 is 0. entropy = - sum t
   log t, the teacher's. With gradient, dL/dx overwrites the teacher's logits: dkl (p - t)
   times scale, or with reverse dkl p (log p - log t - kl) times scale. Forward as in Hinton et
   al. 2015, reverse as in MiniLLM (Gu et al. 2024). kl, entropy, dkl may be NULL. */
typedef struct seqpar_distill_args {
    seqpar_mat logits, teacher;
    int64_t rows, vocab;
    void *kl, *entropy; /* (rows) accumulator type */
    const void *dkl;    /* the same */
    double scale;
    int reverse, gradient;
} seqpar_distill_args;

/* Softmax over `count` tokens only: logq (rows, count) = log softmax over k of a row's logits
   ids[k], first multiplied by scale (0: 1). With gradient, dL/dlogits overwrites the row: scale
   (dlogq_k - q_k sum over i of dlogq_i) at ids[k], and 0 elsewhere. logq and dlogq may be
   NULL. */
typedef struct seqpar_choose_args {
    seqpar_mat logits; /* (rows, vocab) */
    int64_t rows, vocab, count;
    int32_t ids[SEQPAR_MAX_CHOICES];
    void *logq;        /* accumulator type */
    const void *dlogq; /* the same */
    double scale;
    int gradient;
} seqpar_choose_args;

/* ids[t]: a token sampled from the softmax of row t at `temperature` (0: the most likely token,
   of equal ones the one with the lowest id). Candidates are the top_k most likely tokens (0:
   all), and of those the smallest set of most likely tokens that holds top_p of their
   probability (1: all). u[t] in (0, 1) selects by cumulative probability among the candidates.
   They are in order of likelihood if top_k is 1 to vocab - 1 or top_p is below 1, otherwise in
   order of id. u and ids are host memory. A row with a logit that is not finite gets -1 - i,
   where i is the first such token. */
typedef struct seqpar_sample_args {
    seqpar_mat logits;
    int64_t rows, vocab, top_k;
    double temperature, top_p;
    const double *u; /* (rows); NULL with temperature 0 */
    int32_t *ids;    /* (rows) */
} seqpar_sample_args;

/* Selects the experts of each token. probs: softmax of the logits over all experts. ids: the
   `chosen` most likely experts, the most likely first; of two equally likely ones, the lower
   number first. weights: their probabilities, with `normed` divided by their sum. probs (rows,
   experts) and weights (rows, chosen) are accumulators, ids (rows, chosen) host memory.
   Probabilities are compared after rounding to the accumulator type. */
typedef struct seqpar_route_args {
    seqpar_mat logits; /* (rows, experts) */
    int64_t rows, experts, chosen;
    int normed;
    void *probs, *weights;
    int32_t *ids;
} seqpar_route_args;

/* dlogits (rows, experts) from dweights (rows, chosen) and balance (experts), which is
   dL/dprobs of every row, in host memory. loss (rows) += sum over experts of balance x probs.
   balance and loss may be NULL. */
typedef struct seqpar_route_grad_args {
    seqpar_mat dlogits;
    int64_t rows, experts, chosen;
    int normed;
    const void *probs, *weights, *dweights; /* accumulators, like loss */
    const int32_t *ids;                     /* the host's, as from route */
    const double *balance;
    void *loss;
} seqpar_route_grad_args;

/* y[t] = sum over j of weights[at[t, j]] x[from[t, j]], j rising. accumulate: the sum starts
   from the old y. from, at (rows, terms) are host memory; at NULL: weights[t, j]. weights are
   accumulators; NULL: 1. x may be y if row t is made of row t alone. */
typedef struct seqpar_mix_args {
    seqpar_mat y, x;
    int64_t rows, terms, width;
    const int32_t *from, *at;
    const void *weights;
    int accumulate;
} seqpar_mix_args;

/* y[t, i] = x[t, i] times seqpar_attn_dropout(document[t], head 0, query position[t], key i);
   accumulate: this is added to y. document, position (rows): host memory. y may be x. */
typedef struct seqpar_drop_args {
    seqpar_mat y, x;
    int64_t rows, width;
    const int64_t *document;
    const int32_t *position;
    double dropout;
    uint64_t seed, stream;
    int accumulate;
} seqpar_drop_args;

/* out[to[t]] = a[t] . b[t]; out: accumulators, to (rows): host memory */
typedef struct seqpar_dots_args {
    seqpar_mat a, b;
    int64_t rows, width;
    const int32_t *to;
    void *out;
} seqpar_dots_args;

/* A frozen matrix in NF4, four bits a value, with scales in 8 bits, as bitsandbytes stores it
   (QLoRA, Dettmers et al. 2023). Element n, counted row by row, is level[code n] * scale, an
   fp32 product. A scale is shared by SEQPAR_NF4_GROUP elements; it is mark[byte] * step +
   offset, an fp32 product and an fp32 sum. A step is shared by SEQPAR_NF4_STEP scales. level
   and mark are fixed tables. */
typedef struct seqpar_nf4 {
    const float *steps, *offset; /* (scales / SEQPAR_NF4_STEP, rounded up), (1) */
    const uint8_t *scales;       /* (elements / SEQPAR_NF4_GROUP, rounded up) bytes */
    const uint8_t *codes;        /* two a byte, the first one in the high bits */
} seqpar_nf4;
enum seqpar_nf4_sizes { SEQPAR_NF4_GROUP = 64, SEQPAR_NF4_STEP = 256 };

/* out (rows, cols) = the rows from `row` and columns from `col` on of a matrix of `width` columns,
   rounded to the storage type. from: the device's memory */
typedef struct seqpar_nf4_rows_args {
    seqpar_mat out;
    int64_t rows, cols, row, col, width;
    seqpar_nf4 from;
} seqpar_nf4_rows_args;

/* out[b] = sum of x^2 over block b of accumulators, rising; out is host memory */
typedef struct seqpar_sumsq_args {
    double *out;
    const void *x;
    int64_t blocks, block_size;
} seqpar_sumsq_args;

/* Step t of AdamW in the order of PyTorch's operations, or of SGD, p -= lr (clip g + decay p).
   AdamW scales g by clip, too. p, m, v and g are accumulators. working, unless NULL, holds the
   weights in the storage type: at t = 1 p begins with their values, and every step stores p,
   rounded, there. */
typedef struct seqpar_update_args {
    void *p, *m, *v;
    const void *g;
    int64_t count, t;
    double lr, beta1, beta2, eps, decay, clip;
    void *working;
} seqpar_update_args;

/* Quantizes x (count), accumulators, to codes (count); with `back`, codes to x.
     SIGNED, POSITIVE   codes are bytes. Each group of SEQPAR_QUANTIZE_GROUP values (the last
                        one may be shorter) has a scale, an accumulator: its largest |x|.
                        SIGNED: round(127 sqrt(|x| / scale)) with the sign of x. POSITIVE:
                        round(255 sqrt(sqrt(x / scale))), at least 1 if x > 0. Values that are
                        read back and quantized again give the same bytes
     STOCHASTIC         stochastic rounding to the storage type, bf16: x becomes one of its two
                        neighbours, the nearer one more likely, so that the mean is x. Number i
                        takes 16 bits of seqpar_random(seed, stream, (first + i) / 8) */
enum seqpar_quantize_form {
    SEQPAR_QUANTIZE_SIGNED,
    SEQPAR_QUANTIZE_POSITIVE,
    SEQPAR_QUANTIZE_STOCHASTIC,
    SEQPAR_QUANTIZE_GROUP = 256
};
typedef struct seqpar_quantize_args {
    int form, back;
    void *x, *codes, *scales;
    int64_t count, first;
    uint64_t seed, stream;
} seqpar_quantize_args;

/* The operations of a device; a line here registers one. EACH: every device has its own
   function, seqpar__ref_X, seqpar__cpu_X. HOST: host devices share one, seqpar__host_X. The
   comments say how op_X of seqpar_cuda.cu does it: "own kernel" is a CUDA kernel of that file,
   "a block a row" one CUDA block for each row. */
#define SEQPAR_DEVICE_OPS_EACH(X) \
    X(matmul)        /* cublasGemmEx, fixed row tile, pinned algorithm */ \
    X(weight_grad)   /* own kernel: tile of dw, fold inside */ \
    X(rmsnorm)       /* own kernel, a warp a row */ \
    X(rmsnorm_grad)  /* own kernel */ \
    X(rope)          /* own kernel */ \
    X(swiglu)        /* own kernel */ \
    X(swiglu_grad)   /* own kernel */ \
    X(add)           /* own kernel */ \
    X(attn_forward)  /* own kernel: a block a (task, head) */ \
    X(attn_backward) /* own kernels: dq; dk and dv */ \
    X(attn_delta)    /* own kernel */ \
    X(attn_sinks)    /* own kernel, a block a piece */ \
    X(vocab_softmax) /* own kernel, in place */ \
    X(distill)       /* own kernel, in place of the teacher's logits */ \
    X(choose)        /* own kernel, in place */ \
    X(nf4_rows)      /* own kernel, a block a row */ \
    X(sumsq)         /* own kernel + cudaMemcpyAsync */ \
    X(adamw)         /* own kernel, multi-tensor */ \
    X(sgd)           /* own kernel */
#define SEQPAR_DEVICE_OPS_HOST(X) \
    X(embedding)      /* own kernel */ \
    X(embedding_grad) /* own kernel over ids sorted on the host */ \
    X(fold)           /* own kernel */ \
    X(attn_return)    /* own kernel: folds the dk, dv received */ \
    X(attn_merge)     /* own kernel, a warp a (token, head) */ \
    X(route)          /* own kernel, a warp a row, + cudaMemcpyAsync */ \
    X(route_grad)     /* own kernel, a warp a row */ \
    X(mix)            /* own kernel, a block a row */ \
    X(drop)           /* own kernel, a block a row */ \
    X(dots)           /* own kernel, a warp a row */ \
    X(quantize)       /* own kernel, a warp a group */ \
    X(sample)         /* own kernel, a block a row, + cudaMemcpyAsync */
#define SEQPAR_DEVICE_OPS(X) SEQPAR_DEVICE_OPS_EACH(X) SEQPAR_DEVICE_OPS_HOST(X)

typedef seqpar_swiglu_args seqpar_swiglu_grad_args;
typedef seqpar_attn_args seqpar_attn_forward_args;
typedef seqpar_attn_args seqpar_attn_return_args;
typedef seqpar_update_args seqpar_adamw_args;
typedef seqpar_update_args seqpar_sgd_args;

struct seqpar_block_kernel;
typedef void (*seqpar_sgemm)(int order, int trans_a, int trans_b, int m, int n, int k,
                             float alpha, const float *a, int lda, const float *b, int ldb,
                             float beta, float *c, int ldc);
typedef struct seqpar_device seqpar_device;
struct seqpar_device {
    const char *name;
    int storage, accumulator; /* F64 and F64, F32 and F32, or BF16 and F32 */
    int64_t threads;          /* split output tiles only; never change a bit */
    int64_t workspace_bytes;  /* scratch the operations keep */
    /* FLOPs of attention: for each visible pair 4 head_dim forward and 10 head_dim backward,
       even if scores are computed twice. A GPU updates it in seqpar_device_settle */
    int64_t attn_flops;
    void *workspace;
    void *queue;                                    /* cudaStream_t; NULL: the host computes */
    const struct seqpar_block_kernel *block_kernel; /* the user's own, or NULL */
    seqpar_sgemm sgemm;
    seqpar_error *error;
    int64_t contexts; /* number of contexts open on it, all of one rank */
    int own_memory;   /* 1: the host accesses memory of alloc only by copy; 0: host memory */
    int plans;        /* 1: computes nothing; a step then skips the gradient norm, whose sums of
                  squares would take memory on every rank */
    /* weight_grad adds this many tokens of a leaf at once. If a leaf is computed in parts, all
       parts but the last must be multiples of it, or the bits change; 0: 1 */
    int64_t sum_step;
    /* returns cached memory, else calls cudaMalloc */
    void *(*alloc)(seqpar_device *device, int64_t bytes);
    /* caches the memory for alloc, which reuses it in queue order */
    void (*free)(seqpar_device *device, void *data);
    /* cudaMemcpyAsync */
    void (*copy)(seqpar_device *device, void *to, const void *from, int64_t bytes, void *queue);
    /* copies rows of `bytes` bytes; strides are in bytes: cudaMemcpy2DAsync */
    void (*copy_rows)(seqpar_device *device, void *to, int64_t to_stride, const void *from,
                      int64_t from_stride, int64_t bytes, int64_t rows, void *queue);
    /* cudaMemsetAsync */
    void (*zero)(seqpar_device *device, void *data, int64_t bytes, void *queue);
    /* cudaStreamSynchronize; NULL: nothing to wait for */
    seqpar_status (*settle)(seqpar_device *device, void *queue);
    /* A second memory pool, larger and slower, which copy can access. GPU: pinned host memory
       (cudaMallocHost). Host device: ordinary memory; if pool_path (borrowed) names a folder,
       mapped files in it, unlinked at once. Functions NULL: there is no second pool. */
    const char *pool_path;
    void *(*pool_alloc)(seqpar_device *device, int64_t bytes); /* zeros */
    void (*pool_free)(seqpar_device *device, void *data, int64_t bytes);
    /* Starts a copy that runs beside the queue, after the work now on the queue and after
       earlier moves. Returns the number of moves begun so far. cudaMemcpyAsync on a second
       stream */
    int64_t (*move)(seqpar_device *device, void *to, const void *from, int64_t bytes,
                    void *queue);
    /* Later work on the queue waits for the first `moves` moves: cudaStreamWaitEvent. DEVICE: a
       move or an earlier copy has failed */
    seqpar_status (*moved)(seqpar_device *device, int64_t moves, void *queue);
    struct seqpar__mover *mover; /* host device: the thread that moves */
    void (*close)(seqpar_device *device);
#define SEQPAR__X(op) \
    seqpar_status (*op)(seqpar_device * device, const seqpar_##op##_args *args, void *queue);
    SEQPAR_DEVICE_OPS(SEQPAR__X)
#undef SEQPAR__X
};

/* The reference device: naive loops, to be read beside the fast one, in fp64 or in bf16 with
   fp32 sums. */
SEQPAR_DEF seqpar_device *seqpar_device_reference(void);
SEQPAR_DEF seqpar_device *seqpar_device_reference_bf16(void);
/* The fast device, blocked and vectorised, in fp32 or bf16; `threads` 0 means all OpenMP
   threads. Close either with seqpar_device_close. In bf16 weights and activations take half the
   memory, sums and masters are fp32; values are widened to fp32 for computation. */
SEQPAR_DEF seqpar_device *seqpar_device_cpu(int64_t threads);
SEQPAR_DEF seqpar_device *seqpar_device_cpu_bf16(int64_t threads);
/* A GPU. Compile seqpar_cuda.cu by nvcc and link it. Storage is fp32, with products computed
   from tf32 parts, or bf16. Open one device per rank; all may share a GPU. Returns NULL and
   sets *error if there is no GPU, or it is too old or out of memory. After a call has run once,
   the same call can be captured from device->queue into a CUDA graph; it then only launches
   kernels. Memory that a captured call uses is held until the device is closed. */
typedef struct seqpar_cuda_desc {
    int64_t ordinal; /* number of the GPU */
    int storage;     /* SEQPAR_DTYPE_BF16; 0 or SEQPAR_DTYPE_F32: fp32 */
    void *stream;    /* the caller's stream, used as the queue; NULL: creates one */
    int cublas; /* 1: products of rows by cuBLAS, 256 rows at a time (seqpar_cuda.cu compiled
                   with SEQPAR_CUBLAS); weight gradients stay folds. SP=N then equals SP=1
                   if cuBLAS always uses one kernel for one shape */
} seqpar_cuda_desc;

extern seqpar_device *seqpar_device_cuda(seqpar_error *error, const seqpar_cuda_desc *desc);
SEQPAR_DEF void seqpar_device_close(seqpar_device *device);
/* Returns when all work on the queue is done. Its results are then in memory, an error in it is
   returned, and attn_flops is up to date. */
SEQPAR_DEF seqpar_status seqpar_device_settle(seqpar_device *device, void *queue);
SEQPAR_DEF int64_t seqpar_dtype_bytes(int dtype);
/* A block kernel that you write: set on a host device, it computes every block of attention, in
   its own storage type. The library still does schedules, masks, merging, sinks and all other
   operations (the error rule; no dropout). A block is the queries of one cell, the keys of one
   cell and one query head; query r sees keys [visible_begin[r], visible_end[r]) of it. All
   arrays are dense, rows of head_dim elements of `storage`; lse and delta are doubles. The
   kernel is called for one block at a time. forward writes out, the attention over this block's
   keys alone, and lse (a query that sees no key: 0 and -inf). backward is given the global lse
   and delta = dout . out and writes dq, dk and dv. Both return 0, or anything else to fail.
   Results that are not finite are refused, but for this -inf. */
typedef struct seqpar_block {
    int64_t queries, keys, head_dim, head;
    double scale, softcap;
    const int32_t *visible_begin, *visible_end; /* (queries) */
    const void *q, *k, *v, *dout;
    const double *lse, *delta;
} seqpar_block;

typedef struct seqpar_block_kernel {
    int storage; /* SEQPAR_DTYPE_F64, SEQPAR_DTYPE_F32 or SEQPAR_DTYPE_BF16 */
    int (*forward)(void *user, const seqpar_block *block, void *out, double *lse);
    int (*backward)(void *user, const seqpar_block *block, void *dq, void *dk, void *dv);
    void *user;
} seqpar_block_kernel;

/* Sets the block kernel of a host device; kernel is borrowed. */
SEQPAR_DEF void seqpar_device_user_kernel(seqpar_device *device,
                                          const seqpar_block_kernel *kernel);
/* A matrix product that you write: the forward and input-gradient products of the fast device
   call it like cblas_sgemm, row-major; weight gradients stay folds. A library may round a row
   differently with other rows in the call: the error rule. */
SEQPAR_DEF void seqpar_device_user_product(seqpar_device *device, seqpar_sgemm sgemm);
/* Rounds to nearest, ties to even; a NaN stays a NaN. */
SEQPAR_DEF uint16_t seqpar_bf16_from_float(float x);
SEQPAR_DEF float seqpar_bf16_to_float(uint16_t x);
/* Copies elements of a device buffer to doubles, and back, through host memory. dtype:
   device->storage or device->accumulator. */
SEQPAR_DEF void seqpar_device_read(seqpar_device *device, double *to, const void *from,
                                   int64_t first, int64_t count, int dtype);
SEQPAR_DEF void seqpar_device_write(seqpar_device *device, void *to, int64_t first,
                                    const double *from, int64_t count, int dtype);

/* =============================================================================================
   >>calls  types and prototypes: what a rank calls

   In the order of a step: a context; a plan and an attention; log-probs from hidden states; sums
   per document and objectives; an optimizer's step; parameters at their owners.
   ========================================================================================== */

/* ---- ctx: one rank ------------------------------------------------------------------------*/
enum seqpar_memory_kind {
    SEQPAR_MEM_WEIGHTS,
    SEQPAR_MEM_OPTIMIZER,
    SEQPAR_MEM_ACTIVATIONS,
    SEQPAR_MEM_SCRATCH,
    SEQPAR_MEM_EXCHANGE,
    SEQPAR_MEM_GRADIENTS,
    SEQPAR_MEM_OFFLOADED, /* in the device's second pool; not in total */
    SEQPAR_MEM_KINDS
};

typedef struct seqpar_memory {
    int64_t now[SEQPAR_MEM_KINDS], peak[SEQPAR_MEM_KINDS], total, total_peak;
} seqpar_memory;

typedef struct seqpar_event { /* what the executor does, in order (tests, drawings) */
    const char *what;         /* "begin", "wait", "compute", "fold" */
    int64_t step, request, source;
    double cost; /* FLOPs of a compute */
} seqpar_event;

/* The largest number of freed buffers that a context caches. A step has one gradient buffer for
   each slice, and these are cached between two steps. */
#ifdef SEQPAR_KEPT_BUFFERS
#error "seqpar: SEQPAR_KEPT_BUFFERS is called SEQPAR_CACHED_BUFFERS now"
#endif
#ifndef SEQPAR_CACHED_BUFFERS
#define SEQPAR_CACHED_BUFFERS 256
#endif

typedef struct seqpar_ctx {
    seqpar_error *error; /* of the world comm */
    seqpar_device *device;
    void *queue;             /* the device's; this rank's operations are issued on it */
    seqpar_comm *world, *sp; /* sp: the ranks that share this rank's sequences */
    int64_t dp_size, dp_rank, sp_size, sp_rank;
    seqpar_memory memory;
    /* freed buffers, reused for the next request of the same size; cached and used memory
       together never exceed the peak */
    struct {
        void *data;
        int64_t bytes;
    } cached[SEQPAR_CACHED_BUFFERS];
    int64_t cached_count, cached_bytes;
    void (*trace)(void *user, const seqpar_event *event);
    void *trace_user;
} seqpar_ctx;

/* The world has data_parallel x sequence_parallel ranks; the ranks of a sequence are
   neighbours. World and device are borrowed until seqpar_ctx_close, which must be called after
   an error, too. All contexts that are open on a world use one device. Collective over the
   world. RANKS: sp_size is not positive; WORLD: it does not divide the world size; DEVICE:
   another rank uses the device, or it lacks an operation; ARITHMETIC; STEP: sp_size or the
   device's types differ between ranks. */
SEQPAR_DEF seqpar_status seqpar_ctx_open(seqpar_ctx *ctx, seqpar_comm *world,
                                         seqpar_device *device, int64_t sp_size);
/* Call it after closing all that was opened with ctx, and before closing its device. Not
   collective. */
SEQPAR_DEF void seqpar_ctx_close(seqpar_ctx *ctx);

typedef struct seqpar_buffer {
    void *data;
    int64_t bytes;
    int kind;
} seqpar_buffer;

/* Allocates device memory, which ctx->memory counts under `kind` (SEQPAR_MEM_*). The caller
   frees it with seqpar_buffer_free. bytes 0: no memory and no error. */
SEQPAR_DEF seqpar_status seqpar_buffer_new(seqpar_ctx *ctx, seqpar_buffer *buffer,
                                           int64_t bytes, int kind);
SEQPAR_DEF void seqpar_buffer_free(seqpar_ctx *ctx, seqpar_buffer *buffer);

/* ---- plan: a schedule is data -------------------------------------------------------------*/
/* A schedule is a line of this table and the function seqpar__plan_* it names (chapter
   >>plan). That function writes the part of a plan that lies between HEADS and TOKENS.
     members   1: ulysses_size defaults to as many members as kv_heads allow; 0: to one
     strided   1: kv heads are gathered heads_k_stride at a time
     arrivals  1: keys travel only as far as a query sees them (ring); 0: all keys travel */
#define SEQPAR_SCHEDULES(X) \
    /* name, text, members, strided, arrivals, plan */ \
    X(RING, "ring", 0, 0, 1, ring) \
    X(LLAMA3, "llama3", 0, 1, 0, llama3) \
    X(ULYSSES, "ulysses", 1, 0, 1, ring)
enum seqpar_schedule_id {
#define SEQPAR__X(name, text, members, strided, arrivals, plan) SEQPAR_SCHEDULE_##name,
    SEQPAR_SCHEDULES(SEQPAR__X)
#undef SEQPAR__X
        SEQPAR_SCHEDULE_COUNT
};

SEQPAR_DEF const char *seqpar_schedule_name(int schedule);

/* SP ranks are a grid: rank = position * ulysses_size + member. The members of one position
   exchange tokens for heads (all-to-all). The ranks with the same member number form a ring, or
   all-gather, for that member's heads. Either side of the grid may be 1. */
enum seqpar_plan_op_code {
    /* begin request, all-to-all: send this rank's tokens of all heads, receive all tokens of
       the position for this member's heads */
    SEQPAR_PLAN_HEADS,
    SEQPAR_PLAN_COPY, /* copy this position's k, v of some heads to slot `to` */
    /* begin request: send slot `from` to position send_to, receive slot `to` from recv_from */
    SEQPAR_PLAN_SHIFT,
    /* begin request: send this position's part of slot `to` to all, receive theirs into it */
    SEQPAR_PLAN_GATHER,
    SEQPAR_PLAN_WAIT, /* wait for request */
    /* this position's queries x the keys of positions source .. source + sources, in slot
       `from` */
    SEQPAR_PLAN_COMPUTE,
    /* begin request: send the dk, dv partials of send_to's keys to it, receive those that
       recv_from computed for this position's keys; -1: to and from all */
    SEQPAR_PLAN_RETURN,
    SEQPAR_PLAN_FOLD, /* wait for request, fold the partials it received */
    /* begin request: send the results of this member's heads to the ranks that hold the
       tokens */
    SEQPAR_PLAN_TOKENS,
    SEQPAR_PLAN_PLACE /* put the heads that TOKENS received side by side */
};

typedef struct seqpar_plan_op {
    int op;
    int32_t request, from, to;
    /* backward, 0 or 1: the outbox that COMPUTE fills and RETURN sends; the inbox that RETURN
       fills and FOLD reads */
    int32_t buffer;
    int64_t head_begin, head_count; /* among the heads of this member */
    int64_t source, sources;        /* a range of positions */
    int64_t send_to, recv_from;     /* positions */
} seqpar_plan_op;

typedef struct seqpar_plan_desc {
    int schedule;
    int64_t sp_size, sp_rank, kv_heads;
    int64_t heads_k_stride; /* llama3: kv heads gathered at a time; 0: 1 */
    /* 0 means 1; with SEQPAR_SCHEDULE_ULYSSES it means sp_size, or gcd(sp_size, kv_heads) if
       kv_heads are fewer than sp_size and may not be replicated */
    int64_t ulysses_size;
    /* 1: ulysses_size may be a larger multiple of kv_heads. Members then hold copies of a kv
       head, and the copies' dk, dv are added (the error rule) */
    int ulysses_replicate;
    /* 1: in a ring, keys are sent to the previous position, not to the next one. With zigzag,
       fewer keys then travel the whole ring */
    int down;
    int backward;
} seqpar_plan_desc;

typedef struct seqpar_plan {
    int64_t sp_size, sp_rank, ulysses_size, member, ring_size, position;
    /* ring: keys go on to position + next, modulo ring_size: 1 or ring_size - 1 */
    int64_t next;
    /* kv heads of this member; uneven shares where ulysses_size does not divide them */
    int64_t kv_begin, kv_count;
    int backward, replicate;
    int64_t slots, requests;
    seqpar_plan_op *ops;
    int64_t count;
} seqpar_plan;

/* Writes the plan of one rank; the caller frees it with seqpar_plan_free. A desc that cannot
   work is refused here, before any message is sent: RANKS, RANK, HEADS, SCHEDULE, ULYSSES,
   HEAD_STRIDE. In a ring, slot 0 is this position's k and v themselves, not a copy. */
SEQPAR_DEF seqpar_status seqpar_plan_make(seqpar_error *error, seqpar_plan *plan,
                                          const seqpar_plan_desc *desc);
SEQPAR_DEF void seqpar_plan_free(seqpar_plan *plan);

/* ---- attn: the executor -------------------------------------------------------------------*/

/* Bring your own attention. A kernel in seqpar_attn_desc.kernel computes this rank's queries x
   all keys of one source (a rank, with Ulysses a position) in one call, on any device. The
   library still splits, sends, merges the sources, applies sinks and sums the gradients. All
   layouts and schedules work, but no dropout. The error rule holds.
   q, k, v, dout are of the device's storage type, all else of its accumulator type. Rows are
   `stride` elements apart, heads side by side; query head h reads kv head h / (heads /
   kv_heads). On a GPU the tensors are device memory, and the kernel issues its work on `queue`.
   The lists (pieces, visible_*) are host memory and do not change until seqpar_attn_close, so a
   kernel may cache a copy on the device.
   Query local + i of a piece has the position start + i stride in row `row`; keys likewise.
   Query t sees the keys of its row at positions [visible_begin[t], visible_end[t]). These
   bounds already account for documents, causality, window and prefix. */
typedef struct seqpar_attn_source {
    int64_t source, heads, kv_heads, head_dim;
    int64_t head; /* number of query head 0 among the heads of all ranks */
    double scale, softcap;
    int full;       /* as in the desc, for kernels that have masks of their own */
    int64_t window; /* likewise */
    int64_t q_tokens, k_tokens, q_stride, k_stride, v_stride, dout_stride;
    int64_t lse_stride; /* of lse and delta */
    const seqpar_piece *q_pieces, *k_pieces;
    int64_t q_piece_count, k_piece_count;
    const int32_t *visible_begin, *visible_end; /* (q_tokens) */
    const void *q, *k, *v;
    const void *dout, *lse, *delta; /* backward: lse over all keys; delta = dout . out */
} seqpar_attn_source;

/* forward writes out (q_tokens, heads, head_dim), the softmax over this source's keys alone,
   and lse (q_tokens, heads). For a query that sees none of them it writes lse -inf; out of that
   query is not read. backward writes dq (as out), dk and dv (k_tokens, kv_heads, head_dim): the
   contributions of these queries and these keys. All of these are of the accumulator type and
   without gaps, hold 0 when the function is called, and belong to the library. Neither function
   is called for a source of which no key is seen. Both return 0, or anything else to fail:
   SEQPAR_ERR_KERNEL on this rank, and PEER on the others. */
typedef struct seqpar_attn_kernel {
    int (*forward)(void *user, const seqpar_attn_source *source, void *out, void *lse,
                   void *queue);
    int (*backward)(void *user, const seqpar_attn_source *source, void *dq, void *dk, void *dv,
                    void *queue);
    void *user;
} seqpar_attn_kernel;

typedef struct seqpar_attn_desc {
    int64_t heads, kv_heads, head_dim;
    double scale; /* 0: 1/sqrt(head_dim) */
    int layout, schedule;
    int64_t heads_k_stride; /* llama3; 0: 1 */
    int64_t ulysses_size;   /* ranks that exchange tokens for heads; as in seqpar_plan_desc */
    int ulysses_replicate;
    int full; /* 0: causal within documents; 1: every key of the document */
    /* 0: none; W: keys less than W positions away (as Mistral's sliding window, which counts
       the query's position, too) */
    int64_t window;
    double softcap; /* 0: none; c: scores become c tanh(s / c) (Gemma 2) */
    double dropout; /* probability with which a softmax probability becomes 0 */
    int relaxed;    /* 1: the usual ring attention, to measure what equal bits cost: one running
                    sum per token in order of arrival, tiles that ignore cells. Error rule
                    instead of equal bits */
    /* borrowed; NULL: the device's. A kernel of your own takes its place; all ranks or none
       must have one. Implies relaxed. A GPU's attn_flops do not count its work */
    const seqpar_attn_kernel *kernel;
} seqpar_attn_desc;

/* Tensors of one call, all of the local tokens: q, out, dout, dq (tokens, heads, head_dim);
   k, v, dk, dv (tokens, kv_heads, head_dim); lse (tokens, heads), accumulator type. Forward
   reads q, k, v and writes out, lse; backward reads dout, out, lse, q, k, v and writes dq,
   dk, dv. */
typedef struct seqpar_attn_io {
    const void *q, *k, *v;
    void *out, *lse;
    const void *dout;
    void *dq, *dk, *dv;
    /* (heads), accumulator type: a learnt score beside those of the keys, with no value
       (GPT-OSS); NULL: none */
    const void *sinks;
    /* backward, with sinks: (pieces of the share, heads), accumulator type: leaves of a
       token fold */
    void *dsinks;
    uint64_t dropout_seed, dropout_stream; /* a different stream for every layer and step */
    /* Elements from one token to the next, for a tensor that is a slice of a wider one, such as
       one projection (tokens, (heads + 2 kv_heads) head_dim); 0: no gaps. The device copies an
       input with gaps into exchange memory before the call, and a result out of it after the
       call; the gaps are not written. Less than a token's elements: SEQPAR_ERR_SIZE */
    int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride;
} seqpar_attn_io;

/* Dropout factor of one probability, 0 or 1 / (1 - dropout). It is drawn by coordinates that no
   split changes: the document's number in the step (seqpar_piece.document), the head, and the
   positions of query and key in the document. So every layout and every packing drops the same.
   Four neighbouring keys use the four words of one call of Philox. */
typedef struct seqpar_dropout {
    double dropout;
    uint64_t seed, stream;
} seqpar_dropout;

SEQPAR_DEF double seqpar_attn_dropout(const seqpar_dropout *from, int64_t document,
                                      int64_t head, int64_t query, int64_t key);
/* The Philox key of those draws, for seqpar_random. */
SEQPAR_DEF uint64_t seqpar_attn_dropout_key(uint64_t seed, uint64_t stream);

typedef struct seqpar_attn seqpar_attn;
/* Works out shares, masks, plans and fold programs for these rows. rows is borrowed, desc
   copied; the caller frees *attn with seqpar_attn_close. Collective over ctx->sp, whose ranks
   compare rows and desc (STEP). HEADS, HEAD_DIM, HEAD_STRIDE, SIZE, MASK, ULYSSES, LAYOUT,
   SCHEDULE, KERNEL: a value does not fit. */
SEQPAR_DEF seqpar_status seqpar_attn_open(seqpar_ctx *ctx, seqpar_attn **attn,
                                          const seqpar_row *rows, int64_t row_count,
                                          const seqpar_attn_desc *desc);
SEQPAR_DEF void seqpar_attn_close(seqpar_ctx *ctx, seqpar_attn *attn);
/* This rank's share: pieces and number of local tokens. Belongs to attn. */
SEQPAR_DEF const seqpar_share *seqpar_attn_share(const seqpar_attn *attn);
/* Forward. A query that sees no key has out 0 and lse -inf (with a sink, lse is the sink).
   Collective over ctx->sp. */
SEQPAR_DEF seqpar_status seqpar_attn_forward(seqpar_ctx *ctx, seqpar_attn *attn,
                                             const seqpar_attn_io *io);
/* Backward. Reads out and lse of forward, which cover the keys of all ranks. Collective over
   ctx->sp. */
SEQPAR_DEF seqpar_status seqpar_attn_backward(seqpar_ctx *ctx, seqpar_attn *attn,
                                              const seqpar_attn_io *io);
/* Attention over one row in one call, on `ranks` threads of this process: to try a layout, a
   schedule or a mask, to compare with attention of your own, or to call from another language.
   The tensors of io hold all of the row's tokens, fp32 and without gaps. Every rank opens a
   context on a CPU device of one thread, takes its share, runs forward and, where dout is
   given, backward. Results that are NULL are not returned. A program with ranks of its own
   makes the calls above instead: demos/05_attention.c. Errors: those of seqpar_run_threads
   and seqpar_attn_open; OPTION: io has strides or dsinks. */
SEQPAR_DEF seqpar_status seqpar_attn_run_threads(seqpar_error *error, const seqpar_attn_io *io,
                                                 const seqpar_row *row,
                                                 const seqpar_attn_desc *desc, int64_t ranks);

/* ---- matrices in four bits -----------------------------------------------------------------*/
/* Bytes of a matrix of so many elements, about 0.516 for each. seqpar_nf4_at: where its parts
   lie in `bytes`, which is aligned to 4 bytes. */
SEQPAR_DEF int64_t seqpar_nf4_bytes(int64_t elements);
SEQPAR_DEF seqpar_nf4 seqpar_nf4_at(const void *bytes, int64_t elements);
/* Quantizes values (elements) to bytes (seqpar_nf4_bytes), host memory. NOT_FINITE: a value is
   NaN or infinite. MEMORY. */
SEQPAR_DEF seqpar_status seqpar_nf4_quantize(seqpar_error *error, void *bytes,
                                             const float *values, int64_t elements);

/* ---- loss: token log-probs from hidden states ---------------------------------------------*/
typedef struct seqpar_vocab_seeds { /* per local token, accumulator type; NULL is zero */
    const void *dlogp, *dentropy, *dsmooth, *dzloss;
} seqpar_vocab_seeds;

/* per local token, accumulator type; NULL: not computed */
typedef struct seqpar_vocab_values {
    void *logp, *entropy, *lse, *smooth;
} seqpar_vocab_values;

/* Another model's projection of the same tokens and vocabulary, from which a student learns.
   The logits of both models are divided by the temperature. */
typedef struct seqpar_vocab_teacher {
    const void *hidden, *table; /* (tokens, width), (vocab, width) */
    int64_t width;
    int reverse;        /* KL(student, teacher) in place of KL(teacher, student) */
    void *kl, *entropy; /* (tokens) accumulator type, as in seqpar_distill_args; or NULL */
    const void *dkl;    /* the same: dL/dkl, which backward takes; NULL is zero */
} seqpar_vocab_teacher;

/* Log-probs normalized over a few tokens only, such as the labels of a process reward model. */
typedef struct seqpar_vocab_choices {
    int32_t ids[SEQPAR_MAX_CHOICES]; /* each once */
    int64_t count;                   /* 2 or more */
    void *logq;        /* (tokens, count) accumulator type, as in seqpar_choose_args; or NULL */
    const void *dlogq; /* the same: dL/dlogq, which backward takes; NULL is zero */
} seqpar_vocab_choices;

typedef struct seqpar_token_fold seqpar_token_fold;

/* A range of a rank's tokens, and the part of a step's fold that sums over them. Only one
   tile's activations at a time need to be in memory. */
typedef struct seqpar_token_tile {
    int64_t first, rows;           /* the tokens */
    const seqpar_fold_op *program; /* as in seqpar_fold_call */
    int64_t program_count, depth;
    const seqpar_piece *leaves; /* of seqpar_weight_grad_args; row 0 is token `first` */
} seqpar_token_tile;
typedef seqpar_status (*seqpar_token_tile_fn)(void *user, const seqpar_token_tile *tile);

/* Calls fn for each tile of the rank's tokens, first to last, and returns the first status that
   is not SEQPAR_OK. fold is that of seqpar_step_fold for this share. Between two tiles the
   unfinished sums stay in seqpar_fold_call.store, which needs space for seqpar_token_node_count
   values. After the last tile the store begins with the fold->node_count nodes, with the same
   bits as without tiles. most: tokens of a tile, 1 or more. A piece longer than `most` is cut
   at multiples of step, the device's sum_step, so a tile has up to seqpar_token_tile_rows
   tokens. SIZE: most is below 1. STEP: the fold is not of this share. */
SEQPAR_DEF seqpar_status seqpar_token_tiles(seqpar_error *error, const seqpar_share *share,
                                            const seqpar_token_fold *fold, int64_t most,
                                            int64_t step, seqpar_token_tile_fn fn, void *user);
SEQPAR_DEF int64_t seqpar_token_tile_rows(const seqpar_share *share, int64_t most,
                                          int64_t step);
/* Values that the store must hold: about node_count + log2(tokens / most). */
SEQPAR_DEF int64_t seqpar_token_node_count(const seqpar_share *share,
                                           const seqpar_token_fold *fold, int64_t most);

typedef struct seqpar_vocab_desc {
    int64_t hidden, vocab;
    /* tokens whose logits are in memory at a time; backward takes at least the device's
       sum_step. 0: 256, or hidden if that is more: then the logits have as many elements as a
       node of dtable */
    int64_t rows_max;
    double temperature; /* logits are divided by it before anything else; 0: 1 */
} seqpar_vocab_desc;

/* Tensors of one call, all of the local tokens. Forward reads hidden, table and targets and
   writes the values; backward reads the seeds, too, and writes dhidden and nodes. */
typedef struct seqpar_vocab_io {
    const void *hidden, *table; /* (tokens, hidden), (vocab, hidden) */
    const int32_t *targets;     /* (tokens) or SEQPAR_IGNORE */
    int64_t tokens;
    seqpar_vocab_values values;
    seqpar_vocab_seeds seeds;
    void *dhidden;       /* (tokens, hidden) */
    void *nodes;         /* of dtable: (seqpar_vocab_node_count) of (vocab, hidden) */
    int64_t node_stride; /* accumulators from one node to the next */
    /* NULL, or (tokens, vocab), storage type. Unless NULL, backward writes dlogits here and
       computes no nodes; seqpar_vocab_nodes then does */
    void *dlogits;
    int frozen; /* 1: backward makes no gradient of the table; nodes and dlogits may be NULL */
    /* NULL, or a teacher; its logits, too, are computed rows_max tokens at a time */
    const seqpar_vocab_teacher *teacher;
    /* NULL, or the tokens to choose among. Then values, seeds and teacher are NULL, since their
       probabilities are over the whole vocabulary; targets are not read */
    const seqpar_vocab_choices *choices;
    /* NULL, or (tokens), host memory: the likeliest token of each row, as seqpar_sample_args
       picks it at temperature 0 */
    int32_t *best;
} seqpar_vocab_io;

/* Entry A: computes the values only, with one matrix product. */
SEQPAR_DEF seqpar_status seqpar_vocab_forward(seqpar_ctx *ctx, const seqpar_vocab_io *io,
                                              const seqpar_vocab_desc *desc);
/* Entry B: computes the values, dhidden, and the nodes of dtable by the fold of
   seqpar_step_fold for this share. Three matrix products. io->nodes needs space for
   seqpar_vocab_node_count values. The first fold->node_count become the nodes. The others,
   about log2(tokens / rows_max), are scratch: sums that wait while logits are computed rows_max
   tokens at a time. With share and fold NULL there is one node, the plain sum over the tokens
   (seqpar_step_begin_plain). */
SEQPAR_DEF int64_t seqpar_vocab_node_count(const seqpar_share *share,
                                           const seqpar_token_fold *fold,
                                           const seqpar_vocab_desc *desc);
SEQPAR_DEF seqpar_status seqpar_vocab_backward(seqpar_ctx *ctx, const seqpar_vocab_io *io,
                                               const seqpar_share *share,
                                               const seqpar_token_fold *fold,
                                               const seqpar_vocab_desc *desc);
/* Computes the nodes of rows first .. first + rows of dtable only, from io->hidden and from the
   io->dlogits that seqpar_vocab_backward wrote: (fold->node_count) of (rows, hidden), to
   io->nodes. They have the bits of the whole table's nodes, so dtable can be computed and sent
   in slices (seqpar_optim_slice). This saves memory where a rank has fewer tokens than
   node_count x hidden. */
SEQPAR_DEF seqpar_status seqpar_vocab_nodes(seqpar_ctx *ctx, const seqpar_vocab_io *io,
                                            const seqpar_share *share,
                                            const seqpar_token_fold *fold,
                                            const seqpar_vocab_desc *desc, int64_t first,
                                            int64_t rows);

/* SFT, token mean over the whole optimizer step: L = 1/N sum_t w_t [(1 - e) (-logp) + e
   smooth + z lse^2] over the tokens that have a target; w NULL is 1. N is the global count
   of the step (batch.counts.supervised), never a local one. seqpar_sft_seeds: the seeds for
   seqpar_vocab_backward. seqpar_sft_token_loss: N times the loss of one token of weight 1, from
   its values. As in transformers, Liger and Megatron. */
typedef struct seqpar_sft_desc {
    int64_t count;
    double label_smoothing, z_loss;
} seqpar_sft_desc;

typedef struct seqpar_host_seeds {
    /* (tokens); dsmooth may be NULL without label smoothing, dzloss without z loss */
    double *dlogp, *dsmooth, *dzloss;
} seqpar_host_seeds;

SEQPAR_DEF seqpar_status seqpar_sft_seeds(seqpar_error *error, const seqpar_host_seeds *seeds,
                                          const int32_t *targets, const double *weights,
                                          int64_t tokens, const seqpar_sft_desc *desc);
SEQPAR_DEF double seqpar_sft_token_loss(double logp, double smooth, double lse,
                                        const seqpar_sft_desc *desc);

/* Sums over all tokens of a step, the same bits on every rank. values (count, width): one row
   for each piece this rank holds, leaf[i] its leaf. sum (width). Collective over the world. */
SEQPAR_DEF seqpar_status seqpar_sum_pieces(seqpar_ctx *ctx, double *sum, const int64_t *leaf,
                                           const double *values, int64_t count, int64_t width);

/* ---- segment: sums per document, complete over all ranks before any nonlinear function ------
   A segment is an input document of the step, row->doc_source. Its sum is a fold whose leaves
   are the sums over its cells. So it is the same number for every split and every packing. */
typedef struct seqpar_segments {
    /* numbers per token; the caller sets it. seqpar_segments_add fills the other fields */
    int64_t width;
    int64_t count, capacity;
    int64_t *place; /* (count, 2) segment and leaf */
    double *values; /* (count, width) */
} seqpar_segments;

/* Adds the local tokens of a share: values (share->tokens, width), 0 where a token does not
   count. */
SEQPAR_DEF seqpar_status seqpar_segments_add(seqpar_error *error, seqpar_segments *segments,
                                             const double *values, const seqpar_share *share);
/* Adds one leaf by hand: values (width). */
SEQPAR_DEF seqpar_status seqpar_segments_push(seqpar_error *error, seqpar_segments *segments,
                                              int64_t segment, int64_t leaf,
                                              const double *values);
/* sums (documents, width) over the ranks of comm, equal to the bit on all of them; 0 for a
   document of which no rank holds a token. Collective, also for ranks that added nothing.
   `segments` does not change. */
SEQPAR_DEF seqpar_status seqpar_segments_sum(seqpar_comm *comm, double *sums, int64_t documents,
                                             const seqpar_segments *segments);
SEQPAR_DEF void seqpar_segments_free(seqpar_segments *segments);
/* values (share->tokens) = per_document[doc_source of the token]: hands dL/d(sum) back to
   the tokens. */
SEQPAR_DEF void seqpar_segments_spread(double *values, const double *per_document,
                                       const seqpar_share *share);

/* ---- objective: plain numbers in, value and derivative out ----------------------------------
   None of these knows of ranks, rows or models. Losses are those of one pair, document or
   token: the caller divides by the counts of the whole optimizer step. Derivatives are with
   respect to the first inputs named. All are computed in fp64, by softplus and
   sigmoid, which take arguments of either sign: large margins neither overflow nor cancel. */
SEQPAR_DEF double seqpar_softplus(double x); /* log(1 + e^x); -log(sigmoid(x)) = softplus(-x) */
SEQPAR_DEF double seqpar_sigmoid(double x);
/* x0 + sum(x_i - x0) / count, in order: a mean of equal numbers is that number. 0 for count
   0. */
SEQPAR_DEF double seqpar_mean(const double *x, int64_t count);

/* Preference pairs. h = log-prob of the response under the policy minus that under the
   reference, as sums over its tokens, or with length_normalized as means; D = h_chosen -
   h_rejected, z = beta D:
     SEQPAR_PREFERENCE_DPO    (1 - e) softplus(-z) + e softplus(z), e = label_smoothing: cDPO
                              (Rafailov et al. 2023; Mitchell 2023)
     SEQPAR_PREFERENCE_IPO    (D - 1 / (2 beta))^2 (Azar et al. 2023; with means, TRL's ipo)
     SEQPAR_PREFERENCE_HINGE  max(0, 1 - z) (SLiC, Zhao et al. 2023)
     SEQPAR_PREFERENCE_SIMPO  as DPO with z = beta D - gamma, no reference, always means
                              (Meng et al. 2024)
     SEQPAR_PREFERENCE_ROBUST ((1 - e) softplus(-z) - e softplus(z)) / (1 - 2 e), e below 0.5:
                              if labels are wrong with probability e, its expected value is
                              DPO's loss on the correct label (Chowdhury et al. 2024; TRL's
                              robust)
   A kind's value is the paper's whole loss; nll_coef adds nll_coef (-logp_chosen) /
   nll_tokens: RPO. The columns reference, means, smoothing say whether a kind has a reference,
   always takes means over tokens, and accepts label smoothing. */
#define SEQPAR_PREFERENCES(X) \
    /* name, text, reference, means, smoothing */ \
    X(DPO, "sigmoid", 1, 0, 1) \
    X(IPO, "ipo", 1, 0, 0) \
    X(HINGE, "hinge", 1, 0, 0) \
    X(SIMPO, "simpo", 0, 1, 1) \
    X(ROBUST, "robust", 1, 0, 1)
enum seqpar_preference_id {
#define SEQPAR__X(name, text, reference, means, smoothing) SEQPAR_PREFERENCE_##name,
    SEQPAR_PREFERENCES(SEQPAR__X)
#undef SEQPAR__X
        SEQPAR_PREFERENCE_COUNT
};
typedef struct seqpar_preference_kind {
    const char *name;
    int reference, means, smoothing;
} seqpar_preference_kind;

/* NULL: no kind has this number */
SEQPAR_DEF const seqpar_preference_kind *seqpar_preference_at(int kind);
typedef struct seqpar_preference_desc {
    int kind;
    double beta, label_smoothing; /* OpenRLHF, TRL: 0.1, 0; SimPO: 2 */
    double gamma;                 /* SimPO: 0.5 */
    int length_normalized, reference_free;
    double nll_coef;
    /* What the nll term is divided by. 0: the number of tokens of the chosen response
       (OpenRLHF, LLaMA-Factory). Pass the step's mean of these numbers for a token mean
       (TRL) */
    double nll_tokens;
} seqpar_preference_desc;

/* sums of log-probs over the tokens of each response, and the numbers of these tokens */
typedef struct seqpar_preference {
    double chosen, rejected, ref_chosen, ref_rejected;
    int64_t chosen_tokens, rejected_tokens;
} seqpar_preference;

typedef struct seqpar_pair_result {
    /* derivatives with respect to the sums (a reward model: the scores) */
    double loss, dchosen, drejected;
    /* beta h; if the kind has no reference, or with reference_free, h is the policy's log-prob
       alone. A pair counts as accurate if reward_chosen > reward_rejected; its margin is their
       difference */
    double reward_chosen, reward_rejected;
} seqpar_pair_result;

SEQPAR_DEF seqpar_status seqpar_preference_loss(seqpar_error *error, seqpar_pair_result *result,
                                                const seqpar_preference *pair,
                                                const seqpar_preference_desc *desc);

/* KTO (Ethayarajh et al. 2024): weight sigmoid(-beta (h - kl)) for a desirable response, weight
   sigmoid(beta (h - kl)) for an undesirable one; h = logp - ref_logp of the whole response. The
   desc has one weight for each case. kl comes from mismatched pairs of prompt and response over
   the whole optimizer step: seqpar_kto_kl of their h, never a local mean. */
/* OpenRLHF: beta 0.01, both weights 1. */
typedef struct seqpar_kto_desc {
    double beta, desirable_weight, undesirable_weight, kl;
} seqpar_kto_desc;

typedef struct seqpar_kto_result {
    double loss, dlogp, reward;
} seqpar_kto_result;

SEQPAR_DEF double seqpar_kto_kl(const double *h, int64_t count); /* max(0, mean) */
SEQPAR_DEF seqpar_status seqpar_kto_loss(seqpar_error *error, seqpar_kto_result *result,
                                         double logp, double ref_logp, int desirable,
                                         const seqpar_kto_desc *desc);

/* Reward model: softplus(-(r_chosen - r_rejected - margin)) + center (r_chosen +
   r_rejected)^2 (Ouyang et al. 2022; the second term TRL's). OpenRLHF's logexp, log(1 +
   e^(r_rejected - r_chosen)), is the same function without a margin. */
SEQPAR_DEF seqpar_pair_result seqpar_reward_loss(double chosen, double rejected, double margin,
                                                 double center);

/* PPO's policy loss of one token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r =
   exp(logp - old_logp); for A < 0 never above -dual_clip A (Schulman et al. 2017;
   asymmetric: DAPO; dual: Ye et al. 2020). The log-ratio is clamped to +-20. */
/* Typical values: 0.2, 0.2, 0 (no dual clip). */
typedef struct seqpar_policy_desc {
    double clip_low, clip_high, dual_clip;
    /* 1: the loss is -min(min(r, dual_clip) A, clip(r) A) for A of either sign: TRL's delta.
       For dual_clip above 1 + clip_high both formulas have the same value. */
    int both_signs;
    int uncut; /* 1: the log-ratio is not clamped, so the ratio may be inf: TRL */
} seqpar_policy_desc;

typedef struct seqpar_policy_result {
    double loss, dlogp, ratio;
    int clipped;
} seqpar_policy_result;

SEQPAR_DEF seqpar_policy_result seqpar_policy_loss(double logp, double old_logp,
                                                   double advantage,
                                                   const seqpar_policy_desc *desc);
/* PPO's value loss of one token: 1/2 max((v - g)^2, (old_v + clip(v - old_v, +-c) - g)^2).
   v = value, old_v = old_value, g = target, c = clip; c 0: no clip. */
typedef struct seqpar_value_result {
    double loss, dvalue;
    int clipped;
} seqpar_value_result;

SEQPAR_DEF seqpar_value_result seqpar_value_loss(double value, double old_value, double target,
                                                 double clip);

/* Estimates of KL(policy || reference) from one token, d = logp - ref_logp (Schulman 2020):
   d, d^2 / 2, e^-d - 1 + d; *dlogp (may be NULL) is the derivative, for use as a loss. */
enum seqpar_kl_kind { SEQPAR_KL_K1, SEQPAR_KL_K2, SEQPAR_KL_K3 };
SEQPAR_DEF double seqpar_kl(double logp, double ref_logp, int kind, double *dlogp);
/* The weight of a token's loss. The loss of the step is the sum of weight x loss over the
   tokens of all ranks. The counts are those of the whole step. */
enum seqpar_aggregate_kind {
    SEQPAR_AGGREGATE_TOKEN_MEAN,
    SEQPAR_AGGREGATE_SEQUENCE_MEAN,
    SEQPAR_AGGREGATE_SEQUENCE_SUM,
    SEQPAR_AGGREGATE_SEQUENCE_SUM_NORM
};
/* length_max: for SEQUENCE_SUM_NORM alone (Dr. GRPO) */
typedef struct seqpar_aggregate {
    int kind;
    int64_t tokens, documents, length_max;
} seqpar_aggregate;

SEQPAR_DEF double seqpar_token_weight(const seqpar_aggregate *aggregate,
                                      int64_t tokens_of_document);

/* ---- optim: gradients to owners, clip, update ---------------------------------------------*/
#define SEQPAR_PARAM_BLOCK \
    1024 /* elements of a parameter block; the same for any number of ranks */

typedef struct seqpar_tensor {
    const char *name;
    int64_t rows, cols;
    /* of its first element in the array of parameters; gaps between tensors are never
       touched */
    int64_t offset;
    int decay;     /* weight decay applies */
    int64_t group; /* tensors of one group, such as a layer, are exchanged together */
} seqpar_tensor;

/* How tensors are distributed over the W ranks of a world. Groups are exchanged in slices:
   whole tensors while they fit, a larger tensor cut between rows. A slice is dealt in blocks,
   each to its owner. Elements are counted as owners store them, each tensor padded to whole
   blocks. */
typedef struct seqpar_blocks {
    const seqpar_tensor *tensors; /* borrowed */
    int64_t tensor_count, groups, slices, elements;
    int64_t *group_tensor; /* (groups + 1) the first tensor of a group */
    int64_t *group_slice;  /* (groups + 1) the first slice of a group */
    int64_t *tensor_begin; /* (tensor_count) where a tensor begins */
    int64_t *slice_begin;  /* (slices + 1) where a slice does */
    int64_t *slice_tensor; /* (slices) the tensor it begins in */
    int64_t own_elements;  /* those that this rank owns */
} seqpar_blocks;

/* The next range of a tensor's elements, from `from` on, that this rank owns: *first .. *first +
   *count. 0: there is none. */
SEQPAR_DEF int seqpar_blocks_own(const seqpar_ctx *ctx, const seqpar_blocks *blocks,
                                 int64_t tensor, int64_t from, int64_t *first, int64_t *count);

/* How this rank folds its leaves of a micro-batch: the program, and the nodes that are left
   and have to be sent. */
struct seqpar_token_fold {
    const seqpar_fold_op *program;
    int64_t program_count, depth;
    int64_t node_count;
    const seqpar_node *nodes;
    const int64_t *leaves;
    int64_t leaf_count;
};

enum seqpar_optim_kind { SEQPAR_OPTIM_ADAMW, SEQPAR_OPTIM_SGD };
/* STATE: moments and masters. PARAMS: the parameters of seqpar_shards, which must then be
   opened with offload, too. */
enum seqpar_offload { SEQPAR_OFFLOAD_STATE = 1, SEQPAR_OFFLOAD_PARAMS = 2 };
typedef struct seqpar_optim_desc {
    int kind;
    /* 0: moments and masters everywhere; 1, 2: at their owners; 3: parameters, too (>>shards) */
    int zero_stage;
    double beta1, beta2, eps, decay; /* 0 is the number 0, no default */
    double max_norm;                 /* 0: no clip */
    /* most elements of a slice (seqpar_optim_slice); 0: 1 Mi, or 1/256 of all where that is more.
       Changes no bit */
    int64_t slice;
    /* 1: all ranks are threads of one process and pass the same array of parameters to
       seqpar_step_end, in which each owner updates its blocks; zero_stage 1 or 2 */
    int params_shared;
    /* SEQPAR_OFFLOAD_*: what is stored in the device's second pool. It is loaded slice by
       slice; the next slice is loaded while one is updated. Changes no bit */
    int offload;
    /* 8: moments quantized to 8 bits (SEQPAR_QUANTIZE_SIGNED, _POSITIVE), which cannot be
       offloaded; 0: accumulators. The error rule, but the same bits on any number of ranks */
    int state_bits;
    /* 1: bf16 weights have no masters and are rounded stochastically (SEQPAR_QUANTIZE_STOCHASTIC
       with this seed, stream t) */
    int stochastic;
    uint64_t seed;
} seqpar_optim_desc;

/* gradients of one optimizer step on their way to the owners */
typedef struct seqpar_step seqpar_step;
typedef struct seqpar_optim {
    seqpar_optim_desc desc;
    seqpar_blocks blocks;
    seqpar_buffer *gradient; /* (2 slices): [slice + slices * source]; this rank's part, and
                                behind it sums that wait for later micro-batches */
    seqpar_buffer m, v;      /* moments: accumulators; in 8 bits: bytes, then the scales */
    seqpar_buffer master;    /* parameters as accumulators, if stored in another type */
    int64_t t;               /* steps taken */
    double norm, clip;       /* of the last step: the norm before clipping, and the factor */
    int complete;            /* 1: the gradient of the step can be read */
    int pending;             /* 1: the parameters are still to be updated with it */
    seqpar_step *step;
} seqpar_optim;

/* tensors (borrowed) in order of offset, without overlap, groups rising from 0.

   Memory, in accumulators, of E elements on W ranks with A micro-batches; G is the largest
   group, S the largest slice. At every stage only the owner of a block stores its gradient, so
   gradients take 1/W:
     gradients   E/W, allocated group by group in backward
                 the caller's nodes of one group, node_count x G, until seqpar_step_gradient
                 returns. node_count is 1 for W = 1, else about log2 of the rank's leaves;
                 of the vocab it is seqpar_vocab_node_count. A caller that computes nodes
                 slice by slice needs node_count x S
                 the nodes of a slice that all ranks send: W x node_count x S/W, until they are
                 folded
                 with A > 1 sums that wait for later micro-batches: at most ceil(log2 A) E/W if
                 every micro-batch has a power of two of documents, up to log2(m) E/W more for m
                 documents; a tied table has two such sums
     moments     2 E at stage 0, 2 E/W from stage 1 on; masters E or E/W. State that is
                 offloaded, in 8 bits or rounded stochastically takes, in place of these, two
                 staging buffers: accumulators for two slices. 8-bit state also takes its
                 bytes
   At stage 0 owners send the gradient to all ranks slice by slice at the end of a step (S
   more). Collective over the world. MEMORY; SIZE: a tensor overlaps another or is out of
   order. */
SEQPAR_DEF seqpar_status seqpar_optim_open(seqpar_ctx *ctx, seqpar_optim *optim,
                                           const seqpar_tensor *tensors, int64_t tensor_count,
                                           const seqpar_optim_desc *desc);
SEQPAR_DEF void seqpar_optim_close(seqpar_ctx *ctx, seqpar_optim *optim);
/* Begins a step over these rows (borrowed until the step ends). The rows are one list, which is
   dealt by tokens to `accumulation` micro-batches, and each of these to the data-parallel ranks
   (seqpar_part_rows). The parts are even if the rows were packed for these numbers. Every rank
   passes all rows, and the layout they are split by. A step that was begun before and not ended
   is discarded. OPTION: more than SEQPAR_MAX_PARTS parts; STEP: the ranks' arguments differ.
   Collective over the world. */
SEQPAR_DEF seqpar_status seqpar_step_begin(seqpar_ctx *ctx, seqpar_optim *optim,
                                           const seqpar_row *rows, int64_t row_count,
                                           int layout, int64_t accumulation);
/* The same without rows, for gradients that are plain sums over a rank's tokens: every rank
   gives one node for each group and micro-batch, a whole gradient. They are added in a tree
   over micro-batches and ranks, so the bits depend on how many there are (error rule). On one
   rank nothing is exchanged; only the optimizer is used. Collective over the world. */
SEQPAR_DEF seqpar_status seqpar_step_begin_plain(seqpar_ctx *ctx, seqpar_optim *optim,
                                                 int64_t accumulation);
/* Rows of micro-batch `index` of this data-parallel rank: rows[*first .. *first + *count);
   count may be 0. */
SEQPAR_DEF seqpar_status seqpar_step_rows(const seqpar_ctx *ctx, const seqpar_optim *optim,
                                          int64_t index, int64_t *first, int64_t *count);
/* How the token sums of micro-batch `index` are folded; its leaves are the pieces of
   `share`, in order. STEP: the share is not that of the rows and layout the step was begun
   with. */
SEQPAR_DEF seqpar_status seqpar_step_fold(seqpar_ctx *ctx, const seqpar_optim *optim,
                                          const seqpar_token_fold **fold,
                                          const seqpar_share *share, int64_t index);
/* Groups are exchanged in slices: whole tensors while they fit into desc.slice elements; a
   larger tensor is cut between rows. Slice `index` of a group has *count elements from *first
   on, counted in the array of parameters from the group's first tensor. Returns 0 if there is
   no such slice. */
SEQPAR_DEF int seqpar_optim_slice(const seqpar_optim *optim, int64_t group, int64_t index,
                                  int64_t *first, int64_t *count);
/* The nodes of one group (fold->node_count of them), which backward made. Tensors lie in a node
   as in the array of parameters: the group's first at 0, the others at their distance from it;
   gaps between them are not read. If count is not 0, the nodes hold only the elements first ..
   first + count of the group, which are whole slices; element `first` is then at 0. */
typedef struct seqpar_step_nodes {
    const void *nodes;             /* (node_count) at node_stride, accumulators */
    int64_t node_stride, elements; /* from one node to the next; of all `nodes` */
    int64_t micro_batch, group;
    /* distinguishes two sums of one group (a tied table: embedding 0, vocab 1). Each is folded
       by itself; the two results are added once */
    int source;
    int64_t first, count; /* count 0: the whole group */
} seqpar_step_nodes;

/* seqpar_fold_leaves computes the nodes of a sum. The caller's leaf() computes one leaf at a
   time: it writes the whole sum over the tokens of share->pieces[leaf] to value (elements),
   accumulators of the device. The results lie in nodes: fold->node_count values, node_stride
   accumulators apart. Scratch is about fold->depth values, never all leaves. An error of leaf()
   is returned. */
typedef struct seqpar_leaves {
    seqpar_status (*leaf)(void *user, void *value, int64_t leaf);
    void *user;
    int64_t elements;
} seqpar_leaves;

SEQPAR_DEF seqpar_status seqpar_fold_leaves(seqpar_ctx *ctx, void *nodes, int64_t node_stride,
                                            const seqpar_token_fold *fold,
                                            const seqpar_leaves *leaves);
/* Sends the nodes to their owners, which fold them. Collective over the world, also for ranks
   without rows. All ranks pass the slices in the same order, one or several in a call. Every
   group needs source 0 of every micro-batch, in order of micro-batches, and source 1 of all
   micro-batches or of none. SIZE: a tensor of the group ends beyond `elements`, or nodes
   overlap; STEP: a micro-batch is missing, comes twice or too early, or the elements are not
   whole slices. */
SEQPAR_DEF seqpar_status seqpar_step_gradient(seqpar_ctx *ctx, seqpar_optim *optim,
                                              const seqpar_step_nodes *nodes);
/* Completes the gradient and computes its norm: optim->norm, ->clip. seqpar_step_end does so if
   the caller did not. Between the two calls the gradient can be read (seqpar_optim_read), and
   the step can be discarded by beginning another. NOT_FINITE: the norm is NaN or infinite.
   Collective. */
SEQPAR_DEF seqpar_status seqpar_step_norm(seqpar_ctx *ctx, seqpar_optim *optim);
/* Clips, updates the owned blocks of params (elements) and sends them to all ranks; with
   params_shared it waits until all ranks are done instead. At zero_stage 0 every rank updates
   everything. At zero_stage 3 params are seqpar_shards.own, and nothing is sent. SIZE: a tensor
   ends beyond `elements`, or at zero_stage 3 elements are not blocks.own_elements; STEP: shared
   parameters are not one array. Collective. */
SEQPAR_DEF seqpar_status seqpar_step_end(seqpar_ctx *ctx, seqpar_optim *optim, void *params,
                                         int64_t elements, double lr);
/* Optimizer state as doubles, read or written a part of a tensor at a time; any world, any
   zero_stage.
     GRADIENT   before clipping; from seqpar_step_norm or seqpar_step_end to the next step
     M, V       the moments; SGD has none
     MASTER     the parameters before rounding, if the storage type is not the accumulator type;
                they begin as the weights that the first step is given
   values (part->count). Reading is collective and gives all ranks the values. To resume, every
   rank writes all of the state and sets optim->t. OPTION: this optimizer does not have the
   state; SIZE: the part is not within its tensor, or cuts a group of 8-bit moments. */
enum seqpar_optim_state {
    SEQPAR_STATE_GRADIENT,
    SEQPAR_STATE_M,
    SEQPAR_STATE_V,
    SEQPAR_STATE_MASTER
};
typedef struct seqpar_optim_part {
    int state;
    int64_t tensor, first, count;
} seqpar_optim_part;

SEQPAR_DEF int seqpar_optim_keeps(const seqpar_ctx *ctx, const seqpar_optim *optim, int state);
SEQPAR_DEF seqpar_status seqpar_optim_read(seqpar_ctx *ctx, const seqpar_optim *optim,
                                           double *values, const seqpar_optim_part *part);
SEQPAR_DEF seqpar_status seqpar_optim_write(seqpar_ctx *ctx, seqpar_optim *optim,
                                            const double *values,
                                            const seqpar_optim_part *part);
/* Reads what this rank stores of a part; not collective. The rest of values does not change. */
SEQPAR_DEF seqpar_status seqpar_optim_read_own(seqpar_ctx *ctx, const seqpar_optim *optim,
                                               double *values, const seqpar_optim_part *part);

/* ---- shards: parameters at their owners alone (ZeRO 3) ---------------------------------------*/
typedef struct seqpar_shards {
    seqpar_blocks blocks;
    /* (blocks.own_elements) storage type: the blocks that this rank owns, slice by slice */
    seqpar_buffer own;
    struct {
        int64_t group; /* -1: none */
        seqpar_buffer whole;
        int64_t moves;          /* number of moves after which this rank's blocks are loaded */
        seqpar_request request; /* receives the other ranks' blocks */
    } held[2];
} seqpar_shards;

/* Allocates this rank's blocks of the tensors (borrowed; as in seqpar_optim_open) and sets them
   to zero. `slice` must be the seqpar_optim_desc.slice of the optimizer that updates them.
   Memory: E/W, with offload 1 in the device's second pool, and the two groups in use.
   Collective over the world. MEMORY, SIZE, OPTION. */
SEQPAR_DEF seqpar_status seqpar_shards_open(seqpar_ctx *ctx, seqpar_shards *shards,
                                            const seqpar_tensor *tensors, int64_t tensor_count,
                                            int64_t slice, int offload);
/* To be called after an error, too; waits for messages in flight. */
SEQPAR_DEF void seqpar_shards_close(seqpar_ctx *ctx, seqpar_shards *shards);
/* Gathers the parameters of a group; *params (storage type) points to them, laid out as in its
   nodes (seqpar_step_nodes). Begins to gather group `next` (-1: none), which travels while the
   caller computes. All other groups are released. Pass -1, -1 to release all, before
   seqpar_step_end, which changes the owners' parameters. Collective over the world. */
SEQPAR_DEF seqpar_status seqpar_shards_use(seqpar_ctx *ctx, seqpar_shards *shards,
                                           int64_t group, int64_t next, void **params);
/* Gathers all tensors into params (elements), each at its offset. SIZE: a tensor ends beyond
   `elements`. Collective over the world. */
SEQPAR_DEF seqpar_status seqpar_shards_gather(seqpar_ctx *ctx, const seqpar_shards *shards,
                                              void *params, int64_t elements);
/* values (count) of a tensor, from its element `first` on. Writing stores only what this rank
   owns, so every rank writes all values; reading is collective over the world.
   seqpar_shards_owns: does this rank own any of these elements? SIZE: they are not within the
   tensor. */
SEQPAR_DEF int seqpar_shards_owns(const seqpar_ctx *ctx, const seqpar_shards *shards,
                                  int64_t tensor, int64_t first, int64_t count);
SEQPAR_DEF seqpar_status seqpar_shards_read(seqpar_ctx *ctx, const seqpar_shards *shards,
                                            double *values, int64_t tensor, int64_t first,
                                            int64_t count);
SEQPAR_DEF seqpar_status seqpar_shards_write(seqpar_ctx *ctx, seqpar_shards *shards,
                                             const double *values, int64_t tensor,
                                             int64_t first, int64_t count);
/* As seqpar_optim_read_own. */
SEQPAR_DEF seqpar_status seqpar_shards_read_own(seqpar_ctx *ctx, const seqpar_shards *shards,
                                                double *values, int64_t tensor, int64_t first,
                                                int64_t count);

/* The schedules of transformers' optimization module: the factor on the learning rate after
   `step` steps. */
enum seqpar_lr_kind {
    SEQPAR_LR_CONSTANT,
    SEQPAR_LR_LINEAR,
    SEQPAR_LR_COSINE,
    SEQPAR_LR_COSINE_MIN
};
SEQPAR_DEF double seqpar_lr_factor(int kind, int64_t step, int64_t warmup, int64_t total,
                                   double min_ratio);

/* ---- version: does this header match the compiled library ----------------------------------
   A program that calls a shared library, from another language for instance, compares these
   with what it was written for. */
/* SEQPAR_VERSION of the implementation. Static string. */
SEQPAR_DEF const char *seqpar_version(void);
/* seqpar_sizeof_X: sizeof(seqpar_X) in the implementation. There is one for each struct
   except seqpar_..._args, which only devices are given, and structs that occur only in
   these. */
/* clang-format off */
#define SEQPAR_STRUCTS(X) \
    X(error) X(transfer) X(group) X(request) X(comm_table) X(comm) X(mismatch) X(node) \
    X(fold_op) X(fold) X(document) X(row) X(pack_desc) X(part) X(pack_counts) X(batch) \
    X(layout) X(piece) X(share) X(split_desc) X(balance) X(device) X(cuda_desc) \
    X(block) X(block_kernel) X(memory) X(event) X(ctx) X(buffer) X(plan_op) \
    X(plan_desc) X(plan) X(attn_source) X(attn_kernel) X(attn_desc) X(attn_io) \
    X(dropout) X(vocab_seeds) X(vocab_values) X(vocab_desc) X(vocab_teacher) \
    X(vocab_choices) X(nf4) X(vocab_io) X(sft_desc) \
    X(host_seeds) X(segments) X(preference_kind) X(preference_desc) X(preference) \
    X(pair_result) X(kto_desc) X(kto_result) X(policy_desc) X(policy_result) \
    X(value_result) X(aggregate) X(tensor) X(blocks) X(token_fold) X(token_tile) X(optim_desc) \
    X(optim) X(step_nodes) X(leaves) X(optim_part) X(shards)
/* clang-format on */
#define SEQPAR__X(name) SEQPAR_DEF int64_t seqpar_sizeof_##name(void);
SEQPAR_STRUCTS(SEQPAR__X)
#undef SEQPAR__X

/* ---- no part of the API: shared by seqpar's own headers and programs ---- */

/* Untrusted text (file names, keys, answers) on one line of a terminal: control characters,
   marks that change the direction of writing, and bytes that are not UTF-8 become \n, \x1b, ...
   A result longer than out (size) loses its middle. Returns out; escaping twice changes
   nothing. */
SEQPAR_DEF const char *seqpar__escape(char *out, int64_t size, const char *text);
/* Bytes of the UTF-8 character at text, 1 to 4; 0: overlong, a surrogate, too large, or cut
   off after `left` bytes. */
SEQPAR_DEF int64_t seqpar__utf8_length(const char *text, int64_t left);

#ifdef __cplusplus
}
#endif
#endif /* SEQPAR_H */

/* =============================================================================================
   Everything below is implementation.
   ========================================================================================== */
#if defined(SEQPAR_IMPLEMENTATION) && !defined(SEQPAR__IMPLEMENTED)
#define SEQPAR__IMPLEMENTED

#if defined(__FAST_MATH__)
#error \
    "seqpar: -ffast-math and -Ofast let the compiler reorder sums; seqpar promises equal bits. Drop the flag where SEQPAR_IMPLEMENTATION is."
#endif
/* 16: only _Float16 is computed in a wider type, and seqpar does not use _Float16. */
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error \
    "seqpar: this build computes floats in wider registers (x87, the default of -m32) and rounds them when they are stored, which differs from place to place; seqpar promises equal bits. Add -msse2 -mfpmath=sse."
#endif

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef SEQPAR_NO_THREADS
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#ifndef SEQPAR_MALLOC
#define SEQPAR_MALLOC(size) malloc(size)
#define SEQPAR_FREE(ptr)    free(ptr)
#endif

/* Whether a * b + c is rounded once or twice is decided by this source, not by the optimiser.
   no-trapping-math and no-math-errno change no bit; they let the compiler vectorize. */
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-trapping-math", "no-math-errno")
#endif

#define SEQPAR__TRY(call) \
    do { \
        seqpar_status try_ = (call); \
        if (try_) return try_; \
    } while (0)
#define SEQPAR__NEW(type, count) \
    ((type *)seqpar__calloc((int64_t)(count), (int64_t)sizeof(type)))
#define SEQPAR__MIN(a, b) ((a) < (b) ? (a) : (b))
#define SEQPAR__MAX(a, b) ((a) > (b) ? (a) : (b))

#ifdef SEQPAR_COUNT_WORK /* tests: elementary steps of packing, splitting and planning, of one \
                            thread */
__thread int64_t seqpar__work = 0;
#define SEQPAR__WORK(steps) ((void)(seqpar__work += (steps)))
#else
#define SEQPAR__WORK(steps) ((void)0)
#endif

/* =============================================================================================
   >>util  errors, memory, random numbers, exp and log

   This chapter implements what libc or the compiler would do differently from machine to
   machine. Random numbers are counter-based (Philox), so a number depends on its key and index,
   not on how many were drawn before. exp and log have bits that every rank must agree on.
   Errors are written by seqpar_fail alone. It keeps the first error of a rank, since later ones
   follow from it.
   ========================================================================================== */

SEQPAR_DEF seqpar_status seqpar_fail(seqpar_error *error, seqpar_status status,
                                     const char *format, ...) {
    va_list args;
    char sentence[8192]; /* a path may have 4,096 bytes */
    if (!error || error->status) return status;
    error->status = status;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    seqpar__escape(error->text, (int64_t)sizeof error->text, sentence);
    return status;
}

/* *name: the name of the first pointer that is NULL, within names, such as "desc, io->q".
   Returns the length of that name; 0: no pointer is NULL. */
static int seqpar__null_name(const char **name, const char *names, const void *const *pointers,
                             int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int length = (int)strcspn(names, ",");
        *name = names;
        if (!pointers[i]) return length;
        names += length + 2 * (names[length] != 0);
    }
    return 0;
}

SEQPAR_DEF seqpar_status seqpar_need(seqpar_error *error, const char *function,
                                     const char *names, const void *const *pointers,
                                     int64_t count) {
    const char *name;
    int length = seqpar__null_name(&name, names, pointers, count);
    if (!length) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_POINTER,
                       "%s: %.*s is NULL; seqpar.h says where NULL is allowed, and here it is "
                       "not",
                       function, length, name);
}

SEQPAR_DEF void seqpar_must(const char *function, const char *names,
                            const void *const *pointers, int64_t count) {
    const char *name;
    int length = seqpar__null_name(&name, names, pointers, count);
    if (!length) return;
    fprintf(stderr,
            "%s: %.*s is NULL; seqpar.h says where NULL is allowed, and here it is not\n",
            function, length, name);
    abort();
}

/* Bytes of a UTF-8 character whose first byte this is; 0: no character begins with it. */
static int64_t seqpar__utf8_bytes(unsigned char first) {
    if (first < 0x80) return 1;
    if (first >= 0xC2 && first <= 0xDF) return 2;
    if (first >= 0xE0 && first <= 0xEF) return 3;
    return first >= 0xF0 && first <= 0xF4 ? 4 : 0;
}

SEQPAR_DEF int64_t seqpar__utf8_length(const char *text, int64_t left) {
    SEQPAR_MUST("text", text);
    const unsigned char *s = (const unsigned char *)text;
    int64_t length = seqpar__utf8_bytes(s[0]);
    if (length == 0 || length > left) return 0;
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) ||
        (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))
        return 0;
    for (int64_t i = 1; i < length; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    return length;
}

/* C0 and DEL; C1; line and paragraph separators; marks that change the direction of writing. */
static int seqpar__is_control(const unsigned char *s, int64_t length) {
    if (length == 1) return s[0] < 0x20 || s[0] == 0x7F;
    if (length == 2) return s[0] == 0xC2 && s[1] < 0xA0;
    return length == 3 && s[0] == 0xE2 &&
           ((s[1] == 0x80 && s[2] >= 0xA8 && s[2] <= 0xAE) ||
            (s[1] == 0x81 && s[2] >= 0xA6 && s[2] <= 0xA9));
}

/* The letter after the backslash in the character's escape; 0: it has no such escape. */
static char seqpar__escape_letter(char c) {
    if (c == '\n') return 'n';
    if (c == '\r') return 'r';
    return c == '\t' ? 't' : 0;
}

/* Writes the next character, or a byte that belongs to none, to `shown` in its escaped form,
   and advances *text. Returns the bytes written. */
static int64_t seqpar__escape_next(char shown[24], const char **text, int64_t *left) {
    int64_t length = seqpar__utf8_length(*text, *left), used = length, i;
    char letter = seqpar__escape_letter(**text);
    if (letter)
        used = snprintf(shown, 24, "\\%c", letter);
    else if (length && !seqpar__is_control((const unsigned char *)*text, length))
        memcpy(shown, *text, (size_t)length);
    else
        for (i = used = 0, length = length ? length : 1; i < length; i++)
            used += snprintf(shown + used, (size_t)(24 - used), "\\x%02x",
                             (unsigned char)(*text)[i]);
    *text += length;
    *left -= length;
    return used;
}

/* Escapes as many whole characters as fit into `space` bytes; returns the bytes they take. out
   NULL: only counts. */
static int64_t seqpar__escape_some(char *out, int64_t space, const char *text, int64_t left) {
    char shown[24];
    int64_t used = 0, n;
    for (; left > 0 && used + (n = seqpar__escape_next(shown, &text, &left)) <= space;
         used += n)
        if (out) memcpy(out + used, shown, (size_t)n);
    return used;
}

SEQPAR_DEF const char *seqpar__escape(char *out, int64_t size, const char *text) {
    SEQPAR_MUST("out, text", out, text);
    char shown[24];
    int64_t left = (int64_t)strlen(text);
    int64_t rest = seqpar__escape_some(NULL, INT64_MAX, text, left);
    int64_t used = 0;
    if (size <= 0) return out;
    if (rest >= size && size > 8) { /* drop the middle: the end says what to do */
        used = seqpar__escape_some(out, (size - 4) / 2, text, left);
        memcpy(out + used, "...", 3);
        for (used += 3; used + rest >= size;) rest -= seqpar__escape_next(shown, &text, &left);
    }
    used += seqpar__escape_some(out + used, size - 1 - used, text, left);
    out[used] = 0;
    return out;
}

SEQPAR_DEF const char *seqpar_version(void) { return SEQPAR_VERSION; }
#define SEQPAR__X(name) \
    SEQPAR_DEF int64_t seqpar_sizeof_##name(void) { return (int64_t)sizeof(seqpar_##name); }
SEQPAR_STRUCTS(SEQPAR__X)
#undef SEQPAR__X

SEQPAR_DEF const char *seqpar_status_name(seqpar_status status) {
#define SEQPAR__X(name, code, text) \
    if (status == (code)) return "SEQPAR_ERR_" #name;
    SEQPAR_ERRORS(SEQPAR__X)
#undef SEQPAR__X
    return status == SEQPAR_OK ? "SEQPAR_OK" : "?";
}

SEQPAR_DEF const char *seqpar_status_text(seqpar_status status) {
#define SEQPAR__X(name, code, text) \
    if (status == (code)) return text;
    SEQPAR_ERRORS(SEQPAR__X)
#undef SEQPAR__X
    return status == SEQPAR_OK ? "no error" : "?";
}

/* Product of sizes (>= 0), at most 2^60, which is more than any machine has bytes. A few such
   products can still be added without overflow. */
#define SEQPAR__TOO_MANY (INT64_C(1) << 60)
static int64_t seqpar__times(int64_t a, int64_t b) {
    return a > 0 && b > SEQPAR__TOO_MANY / a ? SEQPAR__TOO_MANY : a * b;
}

static void *seqpar__calloc(int64_t count, int64_t size) {
    int64_t bytes = seqpar__times(count > 0 ? count : 1, size);
    void *data = bytes < SEQPAR__TOO_MANY ? SEQPAR_MALLOC((size_t)bytes) : NULL;
    if (data) memset(data, 0, (size_t)bytes);
    return data;
}

static seqpar_status seqpar__no_memory(seqpar_error *error, const char *what) {
    return seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for %s", what);
}

#ifndef SEQPAR__GROW_FROM
#define SEQPAR__GROW_FROM 16 /* first capacity of a growing list, in elements */
#endif
/* Grows *data to hold at least `need` elements of `size`; contents stay. */
static int seqpar__grow(void **data, int64_t *capacity, int64_t need, int64_t size) {
    int64_t wanted = *capacity ? *capacity : SEQPAR__GROW_FROM;
    void *bigger;
    if (need <= *capacity) return 1;
    while (wanted < need) wanted *= 2;
    bigger = seqpar__calloc(wanted, size);
    if (!bigger) return 0;
    if (*data) memcpy(bigger, *data, (size_t)(*capacity * size));
    SEQPAR_FREE(*data);
    *data = bigger;
    *capacity = wanted;
    return 1;
}

static uint64_t seqpar__mix(uint64_t x) { /* finaliser of splitmix64 */
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

SEQPAR_DEF void seqpar_random(uint32_t out[4], uint64_t key, uint64_t index_high,
                              uint64_t index_low) {
    uint32_t x[4], k[2];
    x[0] = (uint32_t)index_low;
    x[1] = (uint32_t)(index_low >> 32);
    x[2] = (uint32_t)index_high;
    x[3] = (uint32_t)(index_high >> 32);
    k[0] = (uint32_t)key;
    k[1] = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * x[0], b = (uint64_t)0xCD9E8D57u * x[2];
        uint32_t y0 = (uint32_t)(b >> 32) ^ x[1] ^ k[0], y2 = (uint32_t)(a >> 32) ^ x[3] ^ k[1];
        x[1] = (uint32_t)b;
        x[3] = (uint32_t)a;
        x[0] = y0;
        x[2] = y2;
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    for (int i = 0; i < 4; i++) out[i] = x[i];
}

SEQPAR_DEF double seqpar_random_uniform(uint64_t key, uint64_t stream, uint64_t index) {
    uint32_t r[4];
    seqpar_random(r, key, stream, index);
    /* 52 random bits plus 1/2: exact, never 0 or 1 */
    return ((double)(((uint64_t)r[1] << 20) ^ (r[0] >> 12)) + 0.5) * (1.0 / 4503599627370496.0);
}

SEQPAR_DEF double seqpar_random_normal(uint64_t key, uint64_t stream, uint64_t index) {
    uint32_t r[4];
    double u, v;
    seqpar_random(r, key, stream, index);
    u = ((double)r[0] + 0.5) * (1.0 / 4294967296.0);
    v = ((double)r[1] + 0.5) * (1.0 / 4294967296.0);
    return sqrt(-2.0 * seqpar_log(u)) * cos(6.283185307179586477 * v); /* Box and Muller */
}

SEQPAR_DEF void seqpar_shuffle(int64_t *order, int64_t count, uint64_t seed, uint64_t epoch) {
    SEQPAR_MUST("order", SEQPAR_IF(count > 0, order));
    SEQPAR__WORK(count);
    for (int64_t i = 0; i < count; i++) order[i] = i;
    for (int64_t i = count - 1; i > 0; i--) { /* Fisher and Yates; draw i is keyed by i */
        int64_t j = (int64_t)(seqpar_random_uniform(seed, epoch, (uint64_t)i) *
                              (double)(i + 1));
        int64_t t = order[i];
        if (j > i) j = i;
        order[i] = order[j];
        order[j] = t;
    }
}

SEQPAR_DEF uint16_t seqpar_bf16_from_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

SEQPAR_DEF float seqpar_bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Rounds once if the machine has fused multiply-add, else twice; the compiler never decides. */
#if !defined(SEQPAR_NO_FMA) && \
    (defined(__FMA__) || defined(__aarch64__) || defined(__ARM_FEATURE_FMA))
#define SEQPAR__FMA(a, b, c)  __builtin_fma((a), (b), (c))
#define SEQPAR__FMAF(a, b, c) __builtin_fmaf((a), (b), (c))
#define SEQPAR__HAS_FMA       1
#else
#define SEQPAR__FMA(a, b, c)  ((a) * (b) + (c))
#define SEQPAR__FMAF(a, b, c) ((a) * (b) + (c))
#define SEQPAR__HAS_FMA       0
#endif

static double seqpar__power2(int64_t n) { /* 2^n, -1022 <= n <= 1023 */
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

/* exp(x) = 2^n exp(r), |r| <= ln2/2, Taylor to r^13 (truncation 4e-18). */
SEQPAR_DEF double seqpar_exp(double x) {
    static const double c[14] = {1.0,
                                 1.0,
                                 1.0 / 2,
                                 1.0 / 6,
                                 1.0 / 24,
                                 1.0 / 120,
                                 1.0 / 720,
                                 1.0 / 5040,
                                 1.0 / 40320,
                                 1.0 / 362880,
                                 1.0 / 3628800,
                                 1.0 / 39916800,
                                 1.0 / 479001600,
                                 1.0 / 6227020800.0};
    double n, r, p;
    int64_t e;
    if (!(x == x)) return x;
    if (x > 709.79) return HUGE_VAL; /* from 709.783 on the last product overflows */
    if (x < -745.2) return 0.0;
    n = floor(SEQPAR__FMA(x, 1.4426950408889634074, 0.5));
    r = SEQPAR__FMA(n, -6.93147180369123816490e-01, x);
    r = SEQPAR__FMA(n, -1.90821492927058770002e-10, r);
    p = c[13];
    for (int i = 12; i >= 0; i--) p = SEQPAR__FMA(p, r, c[i]);
    e = (int64_t)n;
    if (e < -1021) return p * seqpar__power2(e + 1000) * seqpar__power2(-1000);
    if (e > 1023) return p * seqpar__power2(e - 1) * 2.0;
    return p * seqpar__power2(e);
}

/* log(x) = n ln2 + 2 atanh((m-1)/(m+1)), m in [sqrt(1/2), sqrt(2)). */
SEQPAR_DEF double seqpar_log(double x) {
    uint64_t bits;
    double m, s, z, p;
    int64_t n = 0;
    if (!(x == x) || x < 0) return x == x ? (double)NAN : x;
    if (x == 0) return -HUGE_VAL;
    if (x > 1.7976931348623157e308) return x;
    if (x < 2.2250738585072014e-308) {
        x *= 18014398509481984.0;
        n = -54;
    }
    memcpy(&bits, &x, 8);
    n += (int64_t)(bits >> 52) - 1023;
    bits = (bits & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000);
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        n++;
    }
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    p = 1.0 / 23;
    for (int i = 21; i >= 3; i -= 2) p = SEQPAR__FMA(p, z, 1.0 / i);
    p = SEQPAR__FMA(p * z, s, s);
    return SEQPAR__FMA((double)n, 6.93147180369123816490e-01,
                       SEQPAR__FMA((double)n, 1.90821492927058770002e-10, 2.0 * p));
}

/* The header of an allocation in a list of allocations that are freed together. The data follow
   it, 8-byte aligned. */
typedef struct seqpar__block {
    struct seqpar__block *next;
} seqpar__block;
enum { SEQPAR__BLOCK_BYTES = (sizeof(seqpar__block) + 7) & ~(size_t)7 };

/* Memory is not zeroed, since most callers write all of it. */
static void *seqpar__list_malloc(void **list, int64_t bytes) {
    seqpar__block *block = (seqpar__block *)SEQPAR_MALLOC(SEQPAR__BLOCK_BYTES + (size_t)bytes);
    if (!block) return NULL;
    block->next = (seqpar__block *)*list;
    *list = block;
    return (char *)block + SEQPAR__BLOCK_BYTES;
}

static void *seqpar__list_calloc(void **list, int64_t bytes) {
    void *data = seqpar__list_malloc(list, bytes);
    if (data) memset(data, 0, (size_t)bytes);
    return data;
}

static void seqpar__list_free(void **list) {
    seqpar__block *block = (seqpar__block *)*list;
    while (block) {
        seqpar__block *next = block->next;
        SEQPAR_FREE(block);
        block = next;
    }
    *list = NULL;
}

/* =============================================================================================
   >>fold  one order for every sum

   The result of a sum of floating-point numbers depends on the order of its additions. That
   order must not depend on the number of ranks, on which rank holds a token, or on which
   message arrives first. So every sum over tokens - a weight gradient, dK and dV, a loss - is
   taken in one binary tree.

   A document is cut at fixed positions into cells (seqpar_cell_begin). The sum over the tokens
   of one cell, in token order, is a leaf; seqpar_cell_leaf gives its number. Two siblings are
   added as soon as both are available. A leaf may be absent, because a mask hides a block or
   the document ends before it. Then its sibling takes the place of their parent, and no 0 is
   added. Every rank knows in advance which leaves exist. Cells depend neither on the number of
   ranks nor on the row that the document is packed into.

       cell (leaf)    0   1   2   3   4   5   6   7     a rank that holds the cells 2 to 5
                       \ /     \ /     \ /     \ /      is left with the nodes 1 and 2 of
       level 1          0       1       2       3       level 1: their siblings are elsewhere.
                         \     /         \     /        The owner of the sum adds 0 + 1, then
       level 2             0               1            2 + 3, then both, whoever sends what
                            \             /             first.
       level 3                     0

   An optimizer step has one tree. The high bits of a leaf's number are its document, the low
   bits its cell. Rows, data-parallel ranks and micro-batches only decide which rank computes
   which leaf. A step's documents are divided in order into micro-batches, and each micro-batch
   in order into data-parallel ranks. So few nodes are unfinished at the end of a micro-batch.

   The additions of a rank are a program for a small stack machine. The rank in the picture
   counts its own leaves from 0 and runs

       LEAF 0  LEAF 1  COMBINE  LEAF 2  LEAF 3  COMBINE  STORE 1  STORE 0

   The host writes programs (seqpar_fold_push, seqpar_fold_flush) and a device runs them. So the
   kernel that computes leaves adds in the right order and knows nothing of trees and ranks.
   Sender and receiver derive the same list of nodes from the same mask, so messages need no
   headers.
   ========================================================================================== */

static int64_t seqpar__lower_bound(const int64_t *sorted, int64_t count, int64_t key) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        if (sorted[mid] < key)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* Galloping search from `from`: returns what seqpar__lower_bound returns, and is fast if that
   is near. The step doubles until it is past the result; a binary search finishes. */
static int64_t seqpar__seek(const int64_t *sorted, int64_t count, int64_t from, int64_t key) {
    int64_t low = from, high = from;
    for (int64_t step = 1; high < count && sorted[high] < key; step *= 2) {
        SEQPAR__WORK(1);
        low = high + 1;
        high += step;
    }
    for (int64_t step = 1; low > 0 && sorted[low - 1] >= key; step *= 2) {
        SEQPAR__WORK(1);
        high = low - 1;
        low = SEQPAR__MAX(low - step, (int64_t)0);
    }
    SEQPAR__WORK(1);
    return low + seqpar__lower_bound(sorted + low, SEQPAR__MIN(high, count) - low, key);
}

/* A value in a fold: the sum of the leaves [begin, end) of the leaf list. `before` is
   leaves[begin - 1] ^ leaves[begin], `after` is leaves[end - 1] ^ leaves[end]. Their highest
   set bit gives the level at which the tree joins the two leaves. So the value is joined next
   at the end with the smaller of the two numbers. At an end of the list the number is
   INT64_MAX. If both are, the value is the whole sum. */
typedef struct seqpar__span {
    int64_t begin, end;
    int64_t leaf; /* number of leaf `begin` */
    int64_t before, after;
} seqpar__span;

static int64_t seqpar__leaves_differ(const int64_t *leaves, int64_t count, int64_t i) {
    return i > 0 && i < count ? leaves[i - 1] ^ leaves[i] : INT64_MAX;
}

static void seqpar__span_of(seqpar__span *s, const int64_t *leaves, int64_t count,
                            int64_t begin, int64_t end) {
    s->begin = begin;
    s->end = end;
    s->leaf = leaves[begin];
    s->before = seqpar__leaves_differ(leaves, count, begin);
    s->after = seqpar__leaves_differ(leaves, count, end);
}

static int seqpar__spans_meet(const seqpar__span *a, const seqpar__span *b) {
    return a->end == b->begin && a->after < a->before && b->before < b->after;
}

static void seqpar__spans_join(seqpar__span *a, const seqpar__span *b) {
    a->end = b->end;
    a->after = b->after;
}

/* The highest node that has these leaves under it and no others. Its sibling has leaves, too,
   unless these are all the leaves of the sum. */
static seqpar_node seqpar__span_node(const seqpar__span *s) {
    int64_t differ = SEQPAR__MIN(s->before, s->after);
    seqpar_node node;
    for (node.level = 0; differ >> node.level > 1; node.level++) {
    }
    node.index = s->leaf >> node.level;
    return node;
}

SEQPAR_DEF void seqpar_fold_init(seqpar_fold *fold, const int64_t *leaves, int64_t leaf_count) {
    SEQPAR_MUST("fold, leaves", fold, SEQPAR_IF(leaf_count > 0, leaves));
    memset(fold, 0, sizeof *fold);
    fold->leaves = leaves;
    fold->leaf_count = leaf_count;
}

SEQPAR_DEF void seqpar_fold_free(seqpar_fold *fold) {
    SEQPAR_MUST("fold", fold);
    SEQPAR_FREE(fold->pending);
    SEQPAR_FREE(fold->pending_at);
    SEQPAR_FREE(fold->program);
    SEQPAR_FREE(fold->stack);
    SEQPAR_FREE(fold->spans);
    SEQPAR_FREE(fold->waiting);
    SEQPAR_FREE(fold->vacant);
    memset(fold, 0, sizeof *fold);
}

static int seqpar__fold_longer(seqpar_fold *fold) {
    void *program = fold->program;
    int ok = seqpar__grow(&program, &fold->program_capacity, fold->program_count + 1,
                          (int64_t)sizeof *fold->program);
    fold->program = (seqpar_fold_op *)program;
    return ok;
}

static int seqpar__fold_emit(seqpar_fold *fold, int32_t op, int32_t index) {
    if (fold->program_count == fold->program_capacity && !seqpar__fold_longer(fold)) return 0;
    SEQPAR__WORK(1);
    fold->program[fold->program_count].op = op;
    fold->program[fold->program_count].index = index;
    fold->program_count++;
    return 1;
}

/* Takes the lowest free slot of the store, or a new slot if none is free. */
static int32_t seqpar__fold_slot(seqpar_fold *fold) {
    int32_t slot, *heap = fold->vacant, last;
    int64_t i = 0, child;
    if (!fold->vacant_count) return (int32_t)fold->slots_high++;
    slot = heap[0];
    last = heap[--fold->vacant_count];
    for (; (child = 2 * i + 1) < fold->vacant_count; i = child) {
        SEQPAR__WORK(1);
        child += child + 1 < fold->vacant_count && heap[child + 1] < heap[child];
        if (heap[child] >= last) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return slot;
}

static int seqpar__fold_vacate(seqpar_fold *fold, int32_t slot) {
    void *vacant = fold->vacant;
    int ok = seqpar__grow(&vacant, &fold->vacant_capacity, fold->vacant_count + 1,
                          (int64_t)sizeof *fold->vacant);
    int64_t i = fold->vacant_count;
    fold->vacant = (int32_t *)vacant;
    if (!ok) return 0;
    for (fold->vacant_count++; i > 0 && fold->vacant[(i - 1) / 2] > slot; i = (i - 1) / 2) {
        SEQPAR__WORK(1);
        fold->vacant[i] = fold->vacant[(i - 1) / 2];
    }
    fold->vacant[i] = slot;
    return 1;
}

/* The index in the leaf list at which a value and its sibling meet. Both siblings give the same
   index, so it is the key of fold->waiting. */
static int64_t seqpar__span_joint(const seqpar__span *s) {
    return s->before < s->after ? s->begin : s->end;
}

static int seqpar__fold_keep(seqpar_fold *fold, seqpar_node node, int32_t at) {
    if (fold->pending_count == fold->pending_capacity) {
        int64_t capacity = fold->pending_capacity;
        void *pending = fold->pending, *pending_at = fold->pending_at;
        if (!seqpar__grow(&pending, &capacity, fold->pending_count + 1,
                          (int64_t)sizeof(seqpar_node)))
            return 0;
        fold->pending = (seqpar_node *)pending;
        capacity = fold->pending_capacity;
        if (!seqpar__grow(&pending_at, &capacity, fold->pending_count + 1,
                          (int64_t)sizeof(int32_t)))
            return 0;
        fold->pending_at = (int32_t *)pending_at;
        fold->pending_capacity = capacity;
    }
    fold->pending[fold->pending_count] = node;
    fold->pending_at[fold->pending_count++] = at;
    return 1;
}

/* Moves a value from the stack to the store, to wait for its sibling. */
static seqpar_status seqpar__fold_store(seqpar_fold *fold, const seqpar__span *value) {
    int32_t slot = seqpar__fold_slot(fold);
    void *spans = fold->spans;
    if (!fold->waiting) fold->waiting = SEQPAR__NEW(int32_t, fold->leaf_count);
    if (!fold->waiting || !seqpar__grow(&spans, &fold->spans_capacity, fold->pending_count + 1,
                                        (int64_t)sizeof *fold->spans))
        return SEQPAR_ERR_MEMORY;
    fold->spans = (seqpar__span *)spans;
    fold->spans[fold->pending_count] = *value;
    if (!seqpar__fold_keep(fold, seqpar__span_node(value), slot)) return SEQPAR_ERR_MEMORY;
    fold->waiting[seqpar__span_joint(value)] = (int32_t)fold->pending_count;
    return seqpar__fold_emit(fold, SEQPAR_FOLD_STORE, slot) ? SEQPAR_OK : SEQPAR_ERR_MEMORY;
}

/* Loads a stored value, whose sibling is on the stack. The last pending value moves into the
   freed entry. */
static seqpar_status seqpar__fold_load(seqpar_fold *fold, int64_t joint, seqpar__span *value) {
    int64_t i = fold->waiting[joint] - 1, last = --fold->pending_count;
    int32_t slot = fold->pending_at[i];
    *value = fold->spans[i];
    fold->waiting[joint] = 0;
    if (i < last) fold->waiting[seqpar__span_joint(&fold->spans[last])] = (int32_t)i + 1;
    fold->spans[i] = fold->spans[last];
    fold->pending[i] = fold->pending[last];
    fold->pending_at[i] = fold->pending_at[last];
    return seqpar__fold_vacate(fold, slot) && seqpar__fold_emit(fold, SEQPAR_FOLD_LOAD, slot)
               ? SEQPAR_OK
               : SEQPAR_ERR_MEMORY;
}

/* For a fold without a tree (fold->running): adds each leaf to one value. It is the only
   pending value; pending_at[0] is -1 while it is on the stack. */
static seqpar_status seqpar__fold_extend(seqpar_fold *fold, seqpar_node node, int32_t operand) {
    int first = fold->taken++ == 0;
    fold->depth_high = 2; /* entry 2: the leaf, for a kernel that cannot extend a value */
    if (first && !seqpar__fold_keep(fold, node, -1)) return SEQPAR_ERR_MEMORY;
    if (fold->pending_at[0] >= 0 &&
        !seqpar__fold_emit(fold, SEQPAR_FOLD_LOAD, fold->pending_at[0]))
        return SEQPAR_ERR_MEMORY;
    fold->pending_at[0] = -1;
    if (!seqpar__fold_emit(fold, first ? SEQPAR_FOLD_LEAF : SEQPAR_FOLD_EXTEND, operand))
        return SEQPAR_ERR_MEMORY;
    if (fold->taken < fold->leaf_count) return SEQPAR_OK;
    fold->pending_count = 0;
    fold->done = 1;
    return seqpar__fold_emit(fold, SEQPAR_FOLD_FINISH, 0) ? SEQPAR_OK : SEQPAR_ERR_MEMORY;
}

/* Returns where to write the span of the next value, before seqpar__fold_add pushes it. NULL:
   out of memory. */
static seqpar__span *seqpar__fold_next(seqpar_fold *fold) {
    void *stack = fold->stack;
    if (fold->stack_count == fold->stack_capacity) {
        if (!seqpar__grow(&stack, &fold->stack_capacity, fold->stack_count + 1,
                          (int64_t)sizeof *fold->stack))
            return NULL;
        fold->stack = (seqpar__span *)stack;
    }
    return &fold->stack[fold->stack_count];
}

/* Pushes a value. While the sibling of the top value is available, combines the two. The
   sibling is the next value on the stack, or was stored at the end of an earlier program. Two
   spans are siblings if the tree joins them next, so any order of pushes leads to the same
   additions. */
static seqpar_status seqpar__fold_add(seqpar_fold *fold, int32_t op, int32_t operand) {
    seqpar__span *top = &fold->stack[fold->stack_count++], other;
    fold->depth_high = SEQPAR__MAX(fold->depth_high, fold->stack_count + 1);
    if (!seqpar__fold_emit(fold, op, operand)) return SEQPAR_ERR_MEMORY;
    while (top->before != top->after) { /* it is not the whole sum */
        int64_t joint = seqpar__span_joint(top);
        /* values of one program are pushed in rising order */
        if (fold->stack_count > 1 && seqpar__spans_meet(top - 1, top)) {
            seqpar__spans_join(top - 1, top);
            top--;
            fold->stack_count--;
        } else if (fold->waiting && fold->waiting[joint]) {
            SEQPAR__TRY(seqpar__fold_load(fold, joint, &other));
            if (other.begin > top->begin)
                seqpar__spans_join(top, &other);
            else {
                seqpar__spans_join(&other, top);
                *top = other;
            }
        } else
            return SEQPAR_OK;
        if (!seqpar__fold_emit(fold, SEQPAR_FOLD_COMBINE, 0)) return SEQPAR_ERR_MEMORY;
    }
    fold->stack_count--;
    fold->done = 1;
    return seqpar__fold_emit(fold, SEQPAR_FOLD_FINISH, 0) ? SEQPAR_OK : SEQPAR_ERR_MEMORY;
}

SEQPAR_DEF seqpar_status seqpar_fold_push(seqpar_fold *fold, seqpar_node node, int32_t op,
                                          int32_t operand) {
    SEQPAR_NEED(NULL, "fold", fold);
    int64_t begin;
    seqpar__span *value;
    if (fold->running) return seqpar__fold_extend(fold, node, operand);
    begin = seqpar__seek(fold->leaves, fold->leaf_count, fold->next, node.index << node.level);
    fold->next = node.level ? seqpar__seek(fold->leaves, fold->leaf_count, begin,
                                           (node.index + 1) << node.level)
                            : SEQPAR__MIN(begin + 1, fold->leaf_count);
    if (!(value = seqpar__fold_next(fold))) return SEQPAR_ERR_MEMORY;
    seqpar__span_of(value, fold->leaves, fold->leaf_count, begin, fold->next);
    return seqpar__fold_add(fold, op, operand);
}

SEQPAR_DEF seqpar_status seqpar_fold_flush(seqpar_fold *fold) {
    SEQPAR_NEED(NULL, "fold", fold);
    for (; fold->stack_count > 0; fold->stack_count--)
        SEQPAR__TRY(seqpar__fold_store(fold, &fold->stack[fold->stack_count - 1]));
    if (!fold->running || !fold->pending_count || fold->pending_at[0] >= 0) return SEQPAR_OK;
    fold->pending_at[0] = 0;
    fold->slots_high = 1;
    return seqpar__fold_emit(fold, SEQPAR_FOLD_STORE, 0) ? SEQPAR_OK : SEQPAR_ERR_MEMORY;
}

/* Hands the program written so far to the caller and starts a new one. */
static void seqpar__fold_take(seqpar_fold *fold, seqpar_fold_op **program, int64_t *count) {
    *program = fold->program;
    *count = fold->program_count;
    fold->program = NULL;
    fold->program_count = fold->program_capacity = 0;
}

static seqpar_node seqpar__leaf_node(int64_t leaf) {
    seqpar_node node;
    node.level = 0;
    node.index = leaf;
    return node;
}

/* What one rank adds from its own leaves alone, and the nodes that remain. Both follow from the
   leaves, so sender and receiver agree on the message. In the program, leaf i is own[i]. The
   nodes are in rising order, and node n is stored in slot n, even if it is the whole sum. */
typedef struct seqpar__partial {
    seqpar_fold_op *program;
    int64_t program_count, depth;
    seqpar_node *nodes;
    int64_t node_count;
} seqpar__partial;

static void seqpar__partial_free(seqpar__partial *p) {
    SEQPAR_FREE(p->program);
    SEQPAR_FREE(p->nodes);
    memset(p, 0, sizeof *p);
}

/* Combines leaves, which are in rising order, until no two neighbours are siblings. The operand
   of leaf i is operands[i] (NULL: i). Writes 2 * count operations. Moves the remaining nodes to
   the front of `leaves` and returns their number. */
static int64_t seqpar__spans_fold(seqpar__span *leaves, int64_t count, const int32_t *operands,
                                  seqpar_fold_op *program, int64_t *depth) {
    int64_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        leaves[top++] = leaves[i];
        program->op = SEQPAR_FOLD_LEAF;
        program++->index = operands ? operands[i] : (int32_t)i;
        *depth = SEQPAR__MAX(*depth, top + 1);
        for (; top > 1 && seqpar__spans_meet(&leaves[top - 2], &leaves[top - 1]); top--) {
            seqpar__spans_join(&leaves[top - 2], &leaves[top - 1]);
            program->op = SEQPAR_FOLD_COMBINE;
            program++->index = 0;
        }
    }
    SEQPAR__WORK(2 * count);
    for (int64_t n = top; n > 0; program++) {
        program->op = SEQPAR_FOLD_STORE;
        program->index = (int32_t)--n;
    }
    return top;
}

/* The lowest node over all leaves. */
static seqpar_node seqpar__whole_node(const int64_t *leaves, int64_t count) {
    seqpar_node node = seqpar__leaf_node(leaves[0]);
    for (; (leaves[0] ^ leaves[count - 1]) >> node.level; node.level++) node.index >>= 1;
    return node;
}

/* Writes to *p the program that combines a rank's own leaves (own) as far as possible, and the
   nodes that remain. present: all leaves of the sum. If the rank has all of them, one node
   remains, that of seqpar__whole_node. */
static seqpar_status seqpar__fold_partial(seqpar__partial *p, const int64_t *present,
                                          int64_t present_count, const int64_t *own,
                                          int64_t own_count) {
    seqpar__span *spans = SEQPAR__NEW(seqpar__span, own_count);
    int64_t at = 0;
    memset(p, 0, sizeof *p);
    p->program = SEQPAR__NEW(seqpar_fold_op, 2 * own_count);
    p->nodes = SEQPAR__NEW(seqpar_node, own_count);
    if (!spans || !p->program || !p->nodes) {
        SEQPAR_FREE(spans);
        seqpar__partial_free(p);
        return SEQPAR_ERR_MEMORY;
    }
    for (int64_t i = 0; i < own_count; i++) {
        at = seqpar__seek(present, present_count, at, own[i]);
        seqpar__span_of(&spans[i], present, present_count, at, at + 1);
    }
    p->program_count = 2 * own_count;
    p->node_count = seqpar__spans_fold(spans, own_count, NULL, p->program, &p->depth);
    for (int64_t i = 0; i < p->node_count; i++) p->nodes[i] = seqpar__span_node(&spans[i]);
    if (own_count && own_count == present_count)
        p->nodes[0] = seqpar__whole_node(present, present_count);
    SEQPAR_FREE(spans);
    return SEQPAR_OK;
}

/* The sum that a fold gives, by recursion over the tree, for a caller that has all values. Adds
   the values of the leaves [low, high), which are in rising order and lie under one node of
   `level`. */
static double seqpar__tree_sum(const int64_t *leaves, const double *values, int64_t stride,
                               int64_t low, int64_t high, int level) {
    int64_t half, mid;
    if (high - low == 1) return values[low * stride];
    half = (leaves[low] >> level << level) + (INT64_C(1) << (level - 1));
    mid = low + seqpar__lower_bound(leaves + low, high - low, half);
    if (mid == low || mid == high)
        return seqpar__tree_sum(leaves, values, stride, low, high, level - 1);
    return seqpar__tree_sum(leaves, values, stride, low, mid, level - 1) +
           seqpar__tree_sum(leaves, values, stride, mid, high, level - 1);
}

/* =============================================================================================
   >>pack  documents to rows

   Packing fills each row with as many whole units as fit, in order. A rank computes the
   documents of a row together. Which documents share a row changes no bit, since the order of
   every sum depends on documents, not on rows.

       documents   A A A A A   B B B   C C          row 0    A A A A A B B B
       targets     A A A A -   B B -   C -          row 1    C C

   Targets are shifted here, once, before any split: the target of a token is the next token of
   its document, and the last token has none (-). A split then deals each token with its target,
   so it loses no target where it cuts. If a document has targets of its own (labels at the
   tokens that they describe), they are not shifted.
   ========================================================================================== */

/* Default cell sizes. They grow with the position in the document: many short cells make
   planning slow, and a few long ones cannot be balanced over ranks. Each size begins at a token
   that all sizes divide. */
typedef struct seqpar__cell_size {
    int64_t tokens, from, cells; /* from: first token of this size; cells: number before it */
} seqpar__cell_size;
static const seqpar__cell_size seqpar__cell_sizes[3] = {
    {128, 0, 0}, {256, INT64_C(1) << 14, 128}, {512, INT64_C(1) << 17, 576}};

SEQPAR_DEF int64_t seqpar_cell_begin(int64_t cell, int64_t number) {
    const seqpar__cell_size *size = &seqpar__cell_sizes[2];
    if (cell) return number * cell;
    while (number < size->cells) size--;
    return size->from + (number - size->cells) * size->tokens;
}

SEQPAR_DEF int64_t seqpar_cell_of(int64_t cell, int64_t token) {
    const seqpar__cell_size *size = &seqpar__cell_sizes[2];
    if (cell) return token / cell;
    while (token < size->from) size--;
    return size->cells + (token - size->from) / size->tokens;
}

SEQPAR_DEF int64_t seqpar_cell_leaf(int64_t cell, int64_t number) {
    return cell ? number : seqpar_cell_begin(0, number) / seqpar__cell_sizes[0].tokens;
}

SEQPAR_DEF int64_t seqpar_part_begin(int64_t total, int64_t parts, int64_t part) {
    /* floor(part * total / parts) without overflow */
    int64_t q = total / parts, r = total % parts;
    return part * q + (int64_t)((uint64_t)part * (uint64_t)r / (uint64_t)parts);
}

/* The last part that begins at `limit` or before. */
static int64_t seqpar__last_part(int64_t total, int64_t parts, int64_t limit) {
    int64_t low = 0, high = parts - 1;
    while (low < high) {
        int64_t part = low + (high - low + 1) / 2;
        if (seqpar_part_begin(total, parts, part) <= limit)
            low = part;
        else
            high = part - 1;
    }
    return low;
}

/* `all` tokens are divided into `parts` equal parts. Returns the part that contains the middle
   of [before, before + tokens). */
static int64_t seqpar__part_of(int64_t parts, int64_t all, int64_t before, int64_t tokens) {
    return seqpar__last_part(2 * all, parts, 2 * before + tokens); /* in half tokens */
}

static int64_t seqpar__rows_tokens(const seqpar_row *rows, int64_t row_count) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < row_count; i++) tokens += rows[i].tokens;
    return tokens;
}

#define SEQPAR__CELL_BITS \
    32 /* low bits of a leaf's number: its cell; bits above: its document (>>split) */

/* ---- where parts and slots begin ---- */

/* A boundary at which a part (seqpar_part) or a slot (>>split) may begin. token: the first
   token of a cell; level: of the node that joins the leaves on both sides; at: index of the row
   or unit. */
typedef struct seqpar__joint {
    int64_t token, level, at;
} seqpar__joint;

/* Joints in rising order. */
typedef struct seqpar__joints {
    void *list;                      /* seqpar__joint */
    int64_t count, capacity, before; /* before: the leaf before the next joint */
} seqpar__joints;

static int seqpar__joints_add(seqpar__joints *j, int64_t token, int64_t leaf, int64_t at) {
    seqpar__joint *joint;
    int64_t level = 0;
    if (!seqpar__grow(&j->list, &j->capacity, j->count + 1, (int64_t)sizeof *joint)) return 0;
    if (!j->count) level = 63;
    while (level < 63 && (j->before ^ leaf) >> level) level++;
    joint = (seqpar__joint *)j->list + j->count++;
    joint->token = token;
    joint->level = level;
    joint->at = at;
    j->before = leaf;
    return 1;
}

/* An edge is where a part or a slot begins. Ideally it is at `token`. Returns whether joint a
   is a better edge than joint b. If there are joints within `reach` tokens of `token`, the one
   highest in the tree is best, else the nearest joint. */
static int seqpar__joint_better(const seqpar__joint *a, const seqpar__joint *b, int64_t token,
                                int64_t reach) {
    int64_t near_a = a->token < token ? token - a->token : a->token - token;
    int64_t near_b = b->token < token ? token - b->token : b->token - token;
    if ((near_a <= reach) != (near_b <= reach)) return near_a <= reach;
    if (near_a <= reach && a->level != b->level) return a->level > b->level;
    return near_a < near_b;
}

/* Returns the token of the best joint for a slot that should begin at `token`. The search
   begins at joint *at, because edges are found in rising order, and *at is set to the best
   joint. */
static int64_t seqpar__edge(const seqpar__joints *j, int64_t *at, int64_t token,
                            int64_t reach) {
    const seqpar__joint *list = (const seqpar__joint *)j->list;
    int64_t best = *at;
    for (int64_t i = *at + 1; i < j->count; i++) {
        SEQPAR__WORK(1);
        if (seqpar__joint_better(&list[i], &list[best], token, reach)) best = i;
        if (list[i].token > token + reach) break;
    }
    *at = best;
    return list[best].token;
}

static int64_t seqpar__joint_token(const seqpar__joints *j, int64_t index, int64_t all) {
    return index < j->count ? ((const seqpar__joint *)j->list)[index].token : all;
}

/* A micro-batch has the joints [from, to). Sets begin[d] to the joint at which its
   data-parallel rank d begins. */
static void seqpar__rank_edges(const seqpar__joints *j, int64_t all, int64_t from, int64_t to,
                               int64_t dp_size, int64_t *begin) {
    int64_t token = seqpar__joint_token(j, from, all), at = from;
    int64_t tokens = seqpar__joint_token(j, to, all) - token;
    for (int64_t d = 0; d < dp_size; d++) {
        begin[d] = at;
        if (at < to)
            seqpar__edge(j, &at, token + seqpar_part_begin(tokens, dp_size, d + 1),
                         tokens / dp_size / 64);
        at = SEQPAR__MIN(at, to);
    }
}

/* Sets begin (micro_batches * dp_size + 1) to the row or unit at which each part begins. The
   last entry is `end`, the number of rows or units. */
static void seqpar__part_edges(const seqpar__joints *j, int64_t all, int64_t end,
                               int64_t micro_batches, int64_t dp_size, int64_t *begin) {
    int64_t from = 0, to = 0, parts = micro_batches * dp_size;
    for (int64_t m = 0; m < micro_batches; m++, from = to) {
        if (m + 1 == micro_batches)
            to = j->count;
        else if (to < j->count)
            seqpar__edge(j, &to, seqpar_part_begin(all, micro_batches, m + 1),
                         all / micro_batches / 8);
        seqpar__rank_edges(j, all, from, to, dp_size, begin + m * dp_size);
    }
    for (int64_t i = 0; i < parts; i++)
        begin[i] = begin[i] < j->count ? ((const seqpar__joint *)j->list)[begin[i]].at : end;
    begin[parts] = end;
}

/* cap: most tokens kept of a document; head, tail: the first and last document with tokens */
typedef struct seqpar__unit {
    int64_t first, docs, tokens, cap, row, head, tail;
} seqpar__unit;

/* The target of token t, if only the first `tokens` tokens of the document are kept. */
static int32_t seqpar__target(const seqpar_document *d, int64_t t, int64_t tokens) {
    if (d->targets) return d->targets[t];
    return t + 1 < tokens && (!d->loss_mask || d->loss_mask[t + 1]) ? d->ids[t + 1]
                                                                    : SEQPAR_IGNORE;
}

static int seqpar__has_target(const seqpar_document *d, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        if (seqpar__target(d, t, tokens) != SEQPAR_IGNORE) return 1;
    return 0;
}

static seqpar_status seqpar__check_targets(seqpar_error *error, const seqpar_document *d,
                                           int64_t number, int64_t vocab) {
    if (d->targets && d->loss_mask)
        return seqpar_fail(error, SEQPAR_ERR_MASK,
                           "document %lld has targets and a loss_mask, which both say what is "
                           "learnt; leave out one of them",
                           (long long)number);
    for (int64_t t = 0; d->targets && t < d->tokens; t++)
        if (d->targets[t] != SEQPAR_IGNORE &&
            (d->targets[t] < 0 || (vocab > 0 && d->targets[t] >= vocab)))
            return seqpar_fail(error, SEQPAR_ERR_TOKEN_ID,
                               "document %lld, token %lld has target %d; give an id from 0 to "
                               "%lld, or SEQPAR_IGNORE",
                               (long long)number, (long long)t, (int)d->targets[t],
                               (long long)(vocab > 0 ? vocab - 1 : INT32_MAX));
    return SEQPAR_OK;
}

/* of: the name of the row or desc that has the cell, for the message. */
static seqpar_status seqpar__check_cell(seqpar_error *error, const char *of, int64_t cell) {
    if (cell >= 0 && cell <= SEQPAR_MAX_TOKENS) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_CELL,
                       "%s: cell is %lld; give the tokens of a cell, 1 to %lld, or 0 for the "
                       "default",
                       of, (long long)cell, (long long)SEQPAR_MAX_TOKENS);
}

static seqpar_status seqpar__check_pack_desc(seqpar_error *error,
                                             const seqpar_pack_desc *desc) {
    if (desc->pack_len <= 0 || desc->pack_len > SEQPAR_MAX_TOKENS)
        return seqpar_fail(error, SEQPAR_ERR_PACK_LEN,
                           "pack_len is %lld; give the most tokens a row may have, 1 to %lld",
                           (long long)desc->pack_len, (long long)SEQPAR_MAX_TOKENS);
    SEQPAR__TRY(seqpar__check_cell(error, "pack_desc", desc->cell));
    if (desc->dp_size < 0 || desc->micro_batches < 0 || desc->micro_rows < 0 ||
        SEQPAR__MAX(desc->dp_size, (int64_t)1) >
            SEQPAR_MAX_PARTS / SEQPAR__MAX(desc->micro_batches, (int64_t)1))
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "pack_desc: dp_size is %lld, micro_batches %lld and micro_rows %lld; "
            "give 0 or more, and at most %lld parts",
            (long long)desc->dp_size, (long long)desc->micro_batches,
            (long long)desc->micro_rows, (long long)SEQPAR_MAX_PARTS);
    return SEQPAR_OK;
}

/* Checks everything before packing starts, so that a refused document leaves no half batch. */
static seqpar_status seqpar__check_documents(seqpar_error *error, const seqpar_document *docs,
                                             int64_t count, const seqpar_pack_desc *desc) {
    SEQPAR__TRY(seqpar__check_pack_desc(error, desc));
    if (count <= 0 || count > SEQPAR_MAX_DOCUMENTS)
        return seqpar_fail(error, SEQPAR_ERR_NO_DOCUMENTS,
                           "there are %lld documents to pack; give 1 to %lld", (long long)count,
                           (long long)SEQPAR_MAX_DOCUMENTS);
    for (int64_t i = 0; i < count; i++) {
        if (docs[i].tokens < 0 || (docs[i].tokens > 0 && !docs[i].ids))
            return seqpar_fail(error, SEQPAR_ERR_DOCUMENT_TOKENS,
                               "document %lld has %lld tokens%s", (long long)i,
                               (long long)docs[i].tokens,
                               docs[i].tokens < 0 ? "; lengths start at 0" : " but no ids");
        if (docs[i].prefix < 0 || docs[i].prefix > docs[i].tokens)
            return seqpar_fail(
                error, SEQPAR_ERR_MASK,
                "document %lld has %lld tokens and a prefix of %lld; give 0 to its "
                "tokens",
                (long long)i, (long long)docs[i].tokens, (long long)docs[i].prefix);
        for (int64_t t = 0; desc->vocab > 0 && t < docs[i].tokens; t++)
            if (docs[i].ids[t] < 0 || docs[i].ids[t] >= desc->vocab)
                return seqpar_fail(
                    error, SEQPAR_ERR_TOKEN_ID,
                    "document %lld, token %lld has id %d; the vocabulary has ids 0..%lld",
                    (long long)i, (long long)t, (int)docs[i].ids[t],
                    (long long)desc->vocab - 1);
        SEQPAR__TRY(seqpar__check_targets(error, &docs[i], i, desc->vocab));
    }
    return SEQPAR_OK;
}

/* Sorted by key, then by index. */
typedef struct seqpar__keyed {
    int64_t key, at;
} seqpar__keyed;

static int seqpar__by_key(const void *a, const void *b) {
    const seqpar__keyed *x = (const seqpar__keyed *)a, *y = (const seqpar__keyed *)b;
    SEQPAR__WORK(1);
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return (x->at > y->at) - (x->at < y->at);
}

/* The documents of a unit must be adjacent, else rows would separate them. Returns the first
   document whose unit also has an earlier document, with another unit in between; or -1. */
static int64_t seqpar__torn_unit(const seqpar_document *docs, int64_t count,
                                 seqpar__keyed *unit) {
    int64_t n = 0, torn = -1, rising = 1;
    for (int64_t i = 0; i < count; i++) {
        if (i && docs[i].unit == docs[i - 1].unit) continue;
        if (n) rising &= docs[i].unit > unit[n - 1].key;
        unit[n].key = docs[i].unit;
        unit[n++].at = i;
    }
    if (rising) return -1;
    qsort(unit, (size_t)n, sizeof *unit, seqpar__by_key);
    for (int64_t i = 1; i < n; i++)
        if (unit[i].key == unit[i - 1].key && (torn < 0 || unit[i].at < torn))
            torn = unit[i].at;
    return torn;
}

/* Groups the documents into units. Leaves out empty units. Drops or cuts those that are too
   long (desc->truncation). Leaves out those without a target, unless desc->keep_masked is set.
   Counts the documents concerned. */
static void seqpar__gather_units(seqpar__unit *units, int64_t *unit_count,
                                 const seqpar_document *docs, int64_t count,
                                 const seqpar_pack_desc *desc, seqpar_pack_counts *counts) {
    int64_t i;
    *unit_count = 0;
    counts->documents = count;
    for (int64_t first = 0; first < count; first = i) {
        seqpar__unit u;
        int64_t targets = 0, live = 0;
        u.first = first;
        u.tokens = 0;
        u.row = -1;
        u.head = u.tail = first;
        u.cap = desc->pack_len;
        for (i = first; i < count && docs[i].unit == docs[first].unit; i++) {
            u.tokens += docs[i].tokens;
            if (!docs[i].tokens) continue;
            if (!live++) u.head = i;
            u.tail = i;
        }
        u.docs = i - first;
        for (int64_t j = first; j < i; j++) counts->zero_length += docs[j].tokens == 0;
        if (live == 0) continue;
        if (u.tokens > desc->pack_len) {
            if (desc->truncation == SEQPAR_TRUNCATION_DROP || desc->pack_len < live) {
                counts->dropped += live;
                continue;
            }
            u.cap = desc->pack_len / live;
            u.tokens = 0;
            for (int64_t j = first; j < i; j++) {
                counts->cut += docs[j].tokens > u.cap;
                u.tokens += SEQPAR__MIN(docs[j].tokens, u.cap);
            }
        }
        for (int64_t j = first; j < i; j++)
            targets += seqpar__has_target(&docs[j], SEQPAR__MIN(docs[j].tokens, u.cap));
        if (!targets && !desc->keep_masked) {
            counts->masked += live;
            continue;
        }
        units[(*unit_count)++] = u;
    }
}

/* Assigns a row to every unit; no row gets units of two parts. begin (parts): the first unit of
   each part. Returns the number of rows. */
static int64_t seqpar__units_to_rows(seqpar__unit *units, int64_t count, const int64_t *begin,
                                     int64_t parts, const seqpar_pack_desc *desc) {
    int64_t rows = 0, left = 0, part = 0;
    for (int64_t i = 0; i < count; i++) {
        int edge = 0;
        for (; part < parts && begin[part] <= i; part++) edge = 1;
        SEQPAR__WORK(1);
        if (desc->order == SEQPAR_PACK_UNIT_PER_ROW || units[i].tokens > left || edge) {
            rows++;
            left = desc->pack_len;
        }
        units[i].row = rows - 1;
        left -= units[i].tokens;
    }
    return rows;
}

static int seqpar__joints_units(seqpar__joints *j, const seqpar__unit *units, int64_t count,
                                int64_t *all) {
    for (int64_t i = 0; i < count; *all += units[i++].tokens) {
        if (!seqpar__joints_add(j, *all, units[i].head << SEQPAR__CELL_BITS, i)) return 0;
        j->before = units[i].tail << SEQPAR__CELL_BITS;
    }
    return 1;
}

static seqpar_status seqpar__parts_to_rows(seqpar_error *error, seqpar_batch *batch,
                                           seqpar__unit *units, int64_t count,
                                           const seqpar_pack_desc *desc) {
    int64_t dp_size = SEQPAR__MAX(desc->dp_size, (int64_t)1), all = 0, *begin;
    seqpar__joints joints;
    int allocated;
    batch->micro_batches = SEQPAR__MAX(desc->micro_batches, (int64_t)1);
    if (!desc->micro_batches && desc->micro_rows) {
        int64_t rows = seqpar__units_to_rows(units, count, NULL, 0, desc);
        int64_t most = (rows + dp_size - 1) / dp_size;
        batch->micro_batches = 1 + (most - 1) / desc->micro_rows;
    }
    memset(&joints, 0, sizeof joints);
    begin = SEQPAR__NEW(int64_t, batch->micro_batches * dp_size + 1);
    allocated = begin && seqpar__joints_units(&joints, units, count, &all);
    if (allocated) {
        seqpar__part_edges(&joints, all, count, batch->micro_batches, dp_size, begin);
        batch->rows = seqpar__units_to_rows(units, count, begin, batch->micro_batches * dp_size,
                                            desc);
    }
    SEQPAR_FREE(joints.list);
    SEQPAR_FREE(begin);
    return allocated ? SEQPAR_OK : seqpar__no_memory(error, "parts");
}

/* Appends a document to a row, at most its first `cap` tokens. source: its number. */
static void seqpar__append_document(seqpar_row *row, const seqpar_document *d, int64_t cap,
                                    int64_t source, seqpar_pack_counts *counts) {
    int64_t n = SEQPAR__MIN(d->tokens, cap), at = row->tokens, count = 0;
    int32_t *ids = (int32_t *)row->ids, *targets = (int32_t *)row->targets;
    int32_t *position_ids = (int32_t *)row->position_ids;
    if (n == 0) return;
    for (int64_t t = 0; t < n; t++) {
        ids[at + t] = d->ids[t];
        targets[at + t] = seqpar__target(d, t, n);
        position_ids[at + t] = (int32_t)t;
        count += targets[at + t] != SEQPAR_IGNORE;
    }
    counts->supervised += count;
    row->tokens += n;
    ((int64_t *)row->prefix_lens)[row->docs] = SEQPAR__MIN(d->prefix, n);
    ((int64_t *)row->doc_source)[row->docs++] = source;
    ((int64_t *)row->cu_seqlens)[row->docs] = row->tokens;
}

static int seqpar__row_alloc(void **list, seqpar_row *row, int64_t tokens, int64_t docs) {
    int64_t *numbers = (int64_t *)seqpar__list_malloc(list,
                                                      (3 * docs + 1) * 8 + 3 * tokens * 4);
    int32_t *ids = (int32_t *)(numbers + 3 * docs + 1);
    if (!numbers) return 0;
    row->cu_seqlens = numbers;
    numbers[0] = 0;
    row->doc_source = numbers + docs + 1;
    row->prefix_lens = numbers + 2 * docs + 1;
    row->ids = ids;
    row->targets = ids + tokens;
    row->position_ids = ids + 2 * tokens;
    return 1;
}

/* Fills row r with its units, which begin with unit *next. Sets *next to the first unit of the
   next row. */
static seqpar_status seqpar__fill_row(seqpar_error *error, seqpar_batch *batch, int64_t r,
                                      const seqpar_document *docs, const seqpar__unit *units,
                                      int64_t unit_count, int64_t *next) {
    seqpar_row *row = &batch->row[r];
    int64_t end = *next, tokens = 0, row_docs = 0;
    for (; end < unit_count && units[end].row == r; end++) {
        tokens += units[end].tokens;
        row_docs += units[end].docs;
    }
    row->index = r;
    if (!seqpar__row_alloc(&batch->storage, row, tokens, row_docs))
        return seqpar__no_memory(error, "rows");
    for (; *next < end; ++*next)
        for (int64_t d = 0; d < units[*next].docs; d++) {
            int64_t source = units[*next].first + d;
            SEQPAR__WORK(1);
            seqpar__append_document(row, &docs[source], units[*next].cap, source,
                                    &batch->counts);
        }
    batch->counts.tokens += row->tokens;
    return SEQPAR_OK;
}

static seqpar_status seqpar__fill_rows(seqpar_error *error, seqpar_batch *batch,
                                       const seqpar_document *docs, const seqpar__unit *units,
                                       int64_t unit_count, const seqpar_pack_desc *desc) {
    int64_t next = 0;
    batch->row = (seqpar_row *)seqpar__list_calloc(&batch->storage,
                                                   batch->rows * (int64_t)sizeof(seqpar_row));
    if (!batch->row) return seqpar__no_memory(error, "rows");
    for (int64_t r = 0; r < batch->rows; r++) {
        SEQPAR__TRY(seqpar__fill_row(error, batch, r, docs, units, unit_count, &next));
        batch->row[r].cell = desc->cell;
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__pack_units(seqpar_error *error, seqpar_batch *batch,
                                        seqpar__unit *units, seqpar__keyed *order,
                                        const seqpar_document *documents, int64_t count,
                                        const seqpar_pack_desc *desc) {
    int64_t unit_count;
    int64_t torn = seqpar__torn_unit(documents, count, order);
    if (torn >= 0)
        return seqpar_fail(error, SEQPAR_ERR_UNIT_ORDER,
                           "documents of unit %lld are not neighbours; sort documents by unit",
                           (long long)documents[torn].unit);
    seqpar__gather_units(units, &unit_count, documents, count, desc, &batch->counts);
    if (unit_count == 0)
        return seqpar_fail(
            error, SEQPAR_ERR_NO_TARGET,
            "of %lld documents none is left with a supervised token (%lld empty, %lld too "
            "long, %lld fully masked); check keys, masks and pack_len %lld",
            (long long)count, (long long)batch->counts.zero_length,
            (long long)batch->counts.dropped, (long long)batch->counts.masked,
            (long long)desc->pack_len);
    SEQPAR__TRY(seqpar__parts_to_rows(error, batch, units, unit_count, desc));
    return seqpar__fill_rows(error, batch, documents, units, unit_count, desc);
}

SEQPAR_DEF seqpar_status seqpar_pack(seqpar_error *error, seqpar_batch *batch,
                                     const seqpar_document *documents, int64_t count,
                                     const seqpar_pack_desc *desc) {
    SEQPAR_NEED(error, "batch, documents, desc", batch, SEQPAR_IF(count > 0, documents), desc);
    seqpar__unit *units;
    seqpar__keyed *order;
    seqpar_status status;
    memset(batch, 0, sizeof *batch);
    SEQPAR__TRY(seqpar__check_documents(error, documents, count, desc));
    units = SEQPAR__NEW(seqpar__unit, count);
    order = SEQPAR__NEW(seqpar__keyed, count);
    status = units && order
                 ? seqpar__pack_units(error, batch, units, order, documents, count, desc)
                 : seqpar__no_memory(error, "packing");
    SEQPAR_FREE(units);
    SEQPAR_FREE(order);
    if (status) seqpar_batch_free(batch);
    return status;
}

SEQPAR_DEF void seqpar_batch_free(seqpar_batch *batch) {
    SEQPAR_MUST("batch", batch);
    seqpar__list_free(&batch->storage);
    memset(batch, 0, sizeof *batch);
}

/* =============================================================================================
   >>split  who holds which token

   A layout deals the cells of all documents to the sequence-parallel ranks. A rank holds whole
   cells, so that one rank computes the whole leaf of a cell. With 16 cells and 4 ranks:

       contiguous   0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
       zigzag       0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0

   Under a causal mask late tokens need more work than early ones. A zigzag gives each rank
   early and late tokens, so all ranks have about the same work. Zigzag-doc makes a separate
   zigzag of each document that has at least two cells for each rank. Stripe deals single tokens
   (0 1 2 3 0 1 2 3 ...). It cuts through cells, so only the error rule holds.

   A piece is the tokens of one cell that a rank holds. A share is the list of a rank's pieces;
   it may be empty.
   ========================================================================================== */

SEQPAR_DEF const seqpar_layout *seqpar_layout_at(int layout) {
    static const seqpar_layout table[] = {
#define SEQPAR__X(name, text, whole_cells, slots, down, deal) {text, whole_cells, slots, down},
        SEQPAR_LAYOUTS(SEQPAR__X)
#undef SEQPAR__X
    };
    return layout >= 0 && layout < SEQPAR_LAYOUT_COUNT ? &table[layout] : NULL;
}

SEQPAR_DEF const char *seqpar_layout_name(int layout) {
    const seqpar_layout *l = seqpar_layout_at(layout);
    return l ? l->name : "?";
}

/* Lists the names for a message, as in "ring, llama3 or ulysses". */
static const char *seqpar__choices(char *text, size_t size, const char *name(int), int count) {
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        const char *before = i + 1 < count ? ", " : " or ";
        if (i == 0) before = "";
        used += (size_t)snprintf(text + used, size - used, "%s%s", before, name(i));
    }
    return text;
}

/* In the folds over tokens, the high bits of a leaf's number are its document, the low bits its
   cell. Documents without numbers (doc_source is NULL) are numbered within their row. The
   first leaf of such a document is a multiple of a power of two that is at least as large as
   the document's count of leaf numbers. So the document has the same tree in every row. Without
   stripe such a row takes fewer than four leaf numbers for each token. Other chapters read a
   leaf's number from a piece. */
#define SEQPAR__ROW_BITS 34
#define SEQPAR__MAX_ROWS (INT64_C(1) << 20) /* without doc_source: most rows, most docs a row */

typedef struct seqpar__doc { /* document `at` of a row */
    int64_t at, begin, end, cells, number, leaf, next_leaf;
    /* leaf numbers it takes: the last cell's + 1; with stripe, those of all its parts */
    int64_t leaves;
    int64_t stripe; /* with stripe: the number of ranks; 0: whole cells */
} seqpar__doc;

/* Stripe deals every cell to all ranks, so a rank's attention would plan about cells^2 sp_size
   / 2 pairs of pieces of a document. If cells^2 sp_size is above SEQPAR__STRIPE_PAIRS,
   neighbouring cells form larger parts. Returns the number of parts. */
#ifndef SEQPAR__STRIPE_PAIRS
#define SEQPAR__STRIPE_PAIRS (INT64_C(1) << 23)
#endif
static int64_t seqpar__stripe_parts(int64_t cells, int64_t sp_size) {
    while (sp_size > 1 && cells > 1 && cells > SEQPAR__STRIPE_PAIRS / sp_size / cells)
        cells = (cells + 1) / 2;
    return cells;
}

/* Leaf numbers of a part that is dealt by stripe: one for each rank, rounded up to a power of
   two. */
static int64_t seqpar__stripe_leaves(int64_t sp_size) {
    int64_t fine = 1;
    while (fine < sp_size) fine *= 2;
    return fine;
}

static void seqpar__doc_number(const seqpar_row *row, seqpar__doc *d) {
    int64_t room = 1;
    if (row->doc_source) {
        d->number = row->doc_source[d->at];
        d->leaf = d->number << SEQPAR__CELL_BITS;
        return;
    }
    while (room < d->leaves) room *= 2;
    d->number = row->index << 20 | d->at;
    d->leaf = (d->next_leaf + room - 1) / room * room;
    d->next_leaf = d->leaf + d->leaves;
    d->leaf += row->index << SEQPAR__ROW_BITS;
}

/* Moves d to the next document that has tokens. Before the first call d->at is -1. Returns 0 if
   there is none. */
static int seqpar__doc_next(const seqpar_row *row, seqpar__doc *d) {
    while (++d->at < SEQPAR__MAX(row->docs, (int64_t)1)) {
        d->begin = row->docs ? row->cu_seqlens[d->at] : 0;
        d->end = row->docs ? row->cu_seqlens[d->at + 1] : row->tokens;
        SEQPAR__WORK(1);
        if (d->end == d->begin) continue;
        d->cells = seqpar_cell_of(row->cell, d->end - d->begin - 1) + 1;
        d->leaves = seqpar_cell_leaf(row->cell, d->cells - 1) + 1;
        if (d->stripe)
            d->leaves = seqpar__stripe_parts(d->cells, d->stripe) *
                        seqpar__stripe_leaves(d->stripe);
        seqpar__doc_number(row, d);
        return 1;
    }
    return 0;
}

static seqpar__doc seqpar__doc_first(int64_t stripe) {
    seqpar__doc d;
    memset(&d, 0, sizeof d);
    d.at = -1;
    d.stripe = stripe;
    return d;
}

/* Iterates over the documents of several rows. d is the current document, in row of[row];
   `before` is the number of tokens in the rows before that one. */
typedef struct seqpar__walk {
    const seqpar_row *of;
    int64_t row_count, row, before;
    seqpar__doc d;
} seqpar__walk;

static seqpar__walk seqpar__walk_of(const seqpar_row *rows, int64_t row_count, int64_t stripe) {
    seqpar__walk w;
    memset(&w, 0, sizeof w);
    w.of = rows;
    w.row_count = row_count;
    w.d = seqpar__doc_first(stripe);
    return w;
}

static int seqpar__walk_next(seqpar__walk *w) {
    for (; w->row < w->row_count; w->row++) {
        if (seqpar__doc_next(&w->of[w->row], &w->d)) return 1;
        w->before += w->of[w->row].tokens;
        w->d = seqpar__doc_first(w->d.stripe);
    }
    return 0;
}

/* Adds a joint for each row that has tokens. */
static int seqpar__joints_rows(seqpar__joints *j, const seqpar_row *rows, int64_t row_count) {
    int64_t last = -1;
    for (seqpar__walk w = seqpar__walk_of(rows, row_count, 0); seqpar__walk_next(&w);) {
        if (w.row != last && !seqpar__joints_add(j, w.before, w.d.leaf, w.row)) return 0;
        j->before = w.d.leaf + seqpar_cell_leaf(rows[w.row].cell, w.d.cells - 1);
        last = w.row;
    }
    return 1;
}

/* Returns begin (micro_batches * dp_size + 1) as seqpar__part_edges sets it. The caller frees
   it. NULL: out of memory. */
static int64_t *seqpar__part_begins(const seqpar_row *rows, int64_t row_count,
                                    int64_t micro_batches, int64_t dp_size) {
    int64_t *begin = SEQPAR__NEW(int64_t, micro_batches * dp_size + 1);
    seqpar__joints joints;
    memset(&joints, 0, sizeof joints);
    if (begin && seqpar__joints_rows(&joints, rows, row_count))
        seqpar__part_edges(&joints, seqpar__rows_tokens(rows, row_count), row_count,
                           micro_batches, dp_size, begin);
    else {
        SEQPAR_FREE(begin);
        begin = NULL;
    }
    SEQPAR_FREE(joints.list);
    return begin;
}

/* Slots 0 to P - 1 go to the ranks 0 to P - 1, slots P to 2 P - 1 to the ranks P - 1 to 0. */
static int64_t seqpar__slot_rank(int64_t slot, int64_t sp_size) {
    int64_t mirror = 2 * sp_size - 1 - slot;
    return slot < sp_size ? slot : mirror;
}

/* Checks the numbers of documents. Without numbers, checks that rows and documents are few
   enough to be numbered by rows. */
static seqpar_status seqpar__check_numbers(seqpar_error *error, const seqpar_row *row) {
    if (!row->doc_source &&
        (row->index < 0 || row->index >= SEQPAR__MAX_ROWS || row->docs > SEQPAR__MAX_ROWS))
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "row %lld has %lld documents without numbers; number them "
                           "(doc_source) where rows or documents of a row are more than %lld",
                           (long long)row->index, (long long)row->docs,
                           (long long)SEQPAR__MAX_ROWS);
    for (int64_t d = 0; row->doc_source && d < SEQPAR__MAX(row->docs, (int64_t)1); d++)
        if (row->doc_source[d] < (d ? row->doc_source[d - 1] + 1 : 0) ||
            row->doc_source[d] >= SEQPAR_MAX_DOCUMENTS)
            return seqpar_fail(
                error, SEQPAR_ERR_ROW_ORDER,
                "row %lld: document %lld has the number %lld%s; numbers rise "
                "within a step, from 0 to %lld",
                (long long)row->index, (long long)d, (long long)row->doc_source[d],
                d && row->doc_source[d] == row->doc_source[d - 1] ? " again" : "",
                (long long)SEQPAR_MAX_DOCUMENTS - 1);
    return SEQPAR_OK;
}

/* Checks shape, documents and prefixes of a row. Row numbers must rise, since leaf numbers can
   depend on them. */
static seqpar_status seqpar__check_row(seqpar_error *error, const seqpar_row *row,
                                       int64_t previous_index) {
    char of[40];
    snprintf(of, sizeof of, "row %lld", (long long)row->index);
    SEQPAR__TRY(seqpar__check_cell(error, of, row->cell));
    if (row->tokens < 0 || row->tokens > SEQPAR_MAX_TOKENS)
        return seqpar_fail(error, SEQPAR_ERR_SIZE, "row %lld has %lld tokens; give 0 to %lld",
                           (long long)row->index, (long long)row->tokens,
                           (long long)SEQPAR_MAX_TOKENS);
    if (row->index <= previous_index)
        return seqpar_fail(error, SEQPAR_ERR_ROW_ORDER,
                           "row number %lld follows %lld; rows must rise",
                           (long long)row->index, (long long)previous_index);
    if (row->docs < 0 || (row->docs > 0 && !row->cu_seqlens))
        return seqpar_fail(error, SEQPAR_ERR_CU_SEQLENS,
                           "row %lld has %lld documents%s; give 0 or more, and cu_seqlens with "
                           "docs + 1 entries",
                           (long long)row->index, (long long)row->docs,
                           row->cu_seqlens ? "" : " and no cu_seqlens");
    for (int64_t d = 0; d < row->docs; d++)
        if (row->cu_seqlens[d + 1] < row->cu_seqlens[d])
            return seqpar_fail(error, SEQPAR_ERR_CU_SEQLENS,
                               "row %lld: cu_seqlens falls from %lld to %lld at document %lld",
                               (long long)row->index, (long long)row->cu_seqlens[d],
                               (long long)row->cu_seqlens[d + 1], (long long)d);
    if (row->docs > 0 && (row->cu_seqlens[0] != 0 || row->cu_seqlens[row->docs] != row->tokens))
        return seqpar_fail(
            error, SEQPAR_ERR_CU_SEQLENS,
            "row %lld: cu_seqlens runs from %lld to %lld; it must run from 0 to %lld",
            (long long)row->index, (long long)row->cu_seqlens[0],
            (long long)row->cu_seqlens[row->docs], (long long)row->tokens);
    SEQPAR__TRY(seqpar__check_numbers(error, row));
    for (int64_t d = 0; row->prefix_lens && d < row->docs; d++)
        if (row->prefix_lens[d] < 0 ||
            row->prefix_lens[d] > row->cu_seqlens[d + 1] - row->cu_seqlens[d])
            return seqpar_fail(error, SEQPAR_ERR_MASK,
                               "row %lld: document %lld has %lld tokens and a prefix of %lld; "
                               "give 0 to all of them",
                               (long long)row->index, (long long)d,
                               (long long)(row->cu_seqlens[d + 1] - row->cu_seqlens[d]),
                               (long long)row->prefix_lens[d]);
    return SEQPAR_OK;
}

/* Checks that document numbers rise from row to row. Otherwise the fold's leaves would not be
   in order, or two documents would have the same leaves. */
static seqpar_status seqpar__check_rising(seqpar_error *error, const seqpar_row *rows,
                                          int64_t row_count, int64_t stripe) {
    int64_t last = -1, of = 0;
    for (seqpar__walk w = seqpar__walk_of(rows, row_count, stripe); seqpar__walk_next(&w);) {
        const seqpar_row *row = &rows[w.row];
        if (w.d.next_leaf > INT64_C(1) << SEQPAR__ROW_BITS)
            return seqpar_fail(error, SEQPAR_ERR_SIZE,
                               "row %lld: its documents have no numbers, and %lld striped "
                               "ranks need more than 2^%d leaves of it; number them "
                               "(doc_source)",
                               (long long)row->index, (long long)stripe, SEQPAR__ROW_BITS);
        if (w.d.leaf <= last)
            return seqpar_fail(error, SEQPAR_ERR_ROW_ORDER,
                               "row %lld has document %lld behind those of row %lld; "
                               "numbers of documents (doc_source) rise from row to row, "
                               "and each stands there once",
                               (long long)row->index, (long long)w.d.number, (long long)of);
        last = w.d.leaf + (row->doc_source ? 0 : w.d.leaves - 1);
        of = row->index;
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__check_split(seqpar_error *error, const seqpar_row *rows,
                                         int64_t row_count, int layout, int64_t sp_size,
                                         int64_t sp_rank) {
    char names[160];
    if (!seqpar_layout_at(layout))
        return seqpar_fail(
            error, SEQPAR_ERR_LAYOUT, "layout %d is unknown; use %s", layout,
            seqpar__choices(names, sizeof names, seqpar_layout_name, SEQPAR_LAYOUT_COUNT));
    if (sp_size <= 0)
        return seqpar_fail(error, SEQPAR_ERR_RANKS,
                           "sequence_parallel_size is %lld; give at least 1",
                           (long long)sp_size);
    if (sp_size > INT32_MAX)
        return seqpar_fail(error, SEQPAR_ERR_RANKS,
                           "sequence_parallel_size is %lld; give at most %lld",
                           (long long)sp_size, (long long)INT32_MAX);
    if (sp_rank < 0 || sp_rank >= sp_size)
        return seqpar_fail(error, SEQPAR_ERR_RANK,
                           "sp_rank is %lld; with sequence_parallel_size %lld give 0 to %lld",
                           (long long)sp_rank, (long long)sp_size, (long long)sp_size - 1);
    for (int64_t i = 0; i < row_count; i++)
        SEQPAR__TRY(seqpar__check_row(error, &rows[i], i ? rows[i - 1].index : -1));
    return seqpar__check_rising(error, rows, row_count,
                                layout == SEQPAR_LAYOUT_STRIPE && sp_size > 1 ? sp_size : 0);
}

/* of: the word that the message begins with, part or step. */
static seqpar_status seqpar__check_parts(seqpar_error *error, const char *of,
                                         int64_t micro_batches, int64_t dp_size) {
    if (micro_batches > 0 && dp_size > 0 && dp_size <= SEQPAR_MAX_PARTS / micro_batches)
        return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_OPTION,
                       "%s: %lld micro-batches on %lld data-parallel ranks; give at least 1 of "
                       "each, and at most %lld parts",
                       of, (long long)micro_batches, (long long)dp_size,
                       (long long)SEQPAR_MAX_PARTS);
}

static seqpar_status seqpar__check_part_rank(seqpar_error *error, const seqpar_part *p) {
    SEQPAR__TRY(seqpar__check_parts(error, "part", p->micro_batches, p->dp_size));
    if (p->micro_batch >= 0 && p->micro_batch < p->micro_batches && p->dp_rank >= 0 &&
        p->dp_rank < p->dp_size)
        return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_OPTION,
                       "part: micro-batch %lld of %lld, data-parallel rank %lld of %lld; count "
                       "both from 0",
                       (long long)p->micro_batch, (long long)p->micro_batches,
                       (long long)p->dp_rank, (long long)p->dp_size);
}

SEQPAR_DEF seqpar_status seqpar_part_rows(seqpar_error *error, int64_t *first, int64_t *count,
                                          const seqpar_row *rows, int64_t row_count,
                                          const seqpar_part *part) {
    SEQPAR_NEED(error, "first, count, rows, part", first, count, SEQPAR_IF(row_count > 0, rows),
                part);
    int64_t *begin, at;
    *first = *count = 0;
    SEQPAR__TRY(seqpar__check_part_rank(error, part));
    SEQPAR__TRY(seqpar__check_split(error, rows, row_count, SEQPAR_LAYOUT_CONTIGUOUS, 1, 0));
    at = part->micro_batch * part->dp_size + part->dp_rank;
    begin = seqpar__part_begins(rows, row_count, part->micro_batches, part->dp_size);
    if (!begin) return seqpar__no_memory(error, "parts");
    *first = begin[at];
    *count = begin[at + 1] - *first;
    SEQPAR_FREE(begin);
    return SEQPAR_OK;
}

/* The tokens of the cells [cell, cell_end) of document w->d. */
static seqpar_piece seqpar__cells_piece(const seqpar__walk *w, int64_t cell, int64_t cell_end) {
    const seqpar__doc *d = &w->d;
    int64_t size = w->of[w->row].cell;
    seqpar_piece p;
    memset(&p, 0, sizeof p);
    p.row = w->row;
    p.document = d->number;
    p.origin = d->begin;
    p.cell = cell;
    p.leaf = d->leaf + seqpar_cell_leaf(size, cell);
    p.start = d->begin + seqpar_cell_begin(size, cell);
    p.stride = 1;
    p.count = SEQPAR__MIN(d->begin + seqpar_cell_begin(size, cell_end), d->end) - p.start;
    return p;
}

/* The part of `whole` that rank sp_rank holds: those tokens whose number in the row is
   congruent to sp_rank modulo sp_size. Its leaf is whole.leaf + sp_rank. */
static seqpar_piece seqpar__stripe_piece(seqpar_piece whole, int64_t sp_size, int64_t sp_rank) {
    seqpar_piece p = whole;
    int64_t end = whole.start + whole.count;
    p.leaf += sp_rank;
    p.start += (sp_rank - p.start % sp_size + sp_size) % sp_size;
    p.stride = sp_size;
    p.count = p.start < end ? (end - p.start + sp_size - 1) / sp_size : 0;
    return p;
}

static int seqpar__share_reserve(seqpar_share *share, int64_t *capacity, int64_t count) {
    void *pieces = share->pieces;
    int ok = seqpar__grow(&pieces, capacity, count, (int64_t)sizeof *share->pieces);
    share->pieces = (seqpar_piece *)pieces;
    return ok;
}

static int seqpar__share_add(seqpar_share *share, int64_t *capacity, seqpar_piece piece) {
    if (piece.count <= 0) return 1;
    if (share->count == *capacity && !seqpar__share_reserve(share, capacity, share->count + 1))
        return 0;
    piece.local = share->tokens;
    share->pieces[share->count++] = piece;
    share->tokens += piece.count;
    return 1;
}

/* Sorts pieces by leaf. The piece has number `piece` in the share of rank `source`; in
   attention, in the share of position `source`. */
typedef struct seqpar__sorted_key {
    int64_t leaf;
    int32_t source, piece;
} seqpar__sorted_key;

/* A split in progress. It fills the shares of all ranks, or that of rank `only` alone. */
typedef struct seqpar__splitting {
    seqpar_share *shares;
    int64_t *capacity, sp_size, only; /* only: -1 for all ranks */
    const seqpar_layout *layout;
    /* (count) seqpar__sorted_key of all pieces if only is -1; they are dealt in leaf order */
    void *order;
    int64_t count, order_capacity, expected; /* expected: estimated pieces of all ranks */
} seqpar__splitting;

static int seqpar__split_add(seqpar__splitting *to, int64_t sp_rank, seqpar_piece piece) {
    seqpar__sorted_key *key;
    SEQPAR__WORK(1);
    if (to->only >= 0)
        return sp_rank != to->only || seqpar__share_add(to->shares, to->capacity, piece);
    if (piece.count <= 0) return 1;
    if (!seqpar__grow(&to->order, &to->order_capacity, SEQPAR__MAX(to->count + 1, to->expected),
                      (int64_t)sizeof *key))
        return 0;
    if (!to->shares[sp_rank].pieces &&
        !seqpar__share_reserve(&to->shares[sp_rank], &to->capacity[sp_rank],
                               to->expected / to->sp_size + 1))
        return 0;
    key = (seqpar__sorted_key *)to->order + to->count++;
    key->leaf = piece.leaf;
    key->source = (int32_t)sp_rank;
    key->piece = (int32_t)to->shares[sp_rank].count;
    return seqpar__share_add(&to->shares[sp_rank], &to->capacity[sp_rank], piece);
}

/* ---- where slots begin ---- */

/* Adds a joint for each cell of document w->d. */
static int seqpar__joints_document(seqpar__joints *j, const seqpar__walk *w) {
    int64_t cell = w->of[w->row].cell;
    for (int64_t c = 0; c < w->d.cells; c++) {
        SEQPAR__WORK(1);
        if (!seqpar__joints_add(j, w->before + w->d.begin + seqpar_cell_begin(cell, c),
                                w->d.leaf + seqpar_cell_leaf(cell, c), w->row))
            return 0;
    }
    return 1;
}

/* ---- dealing: seqpar__deal_* deal the pieces of rows to ranks, in token order ---- */

/* The state of dealing the tokens [begin, end) into slots, cell by cell. A slot is a run of
   cells; seqpar__slot_rank gives its rank. */
typedef struct seqpar__slots {
    const seqpar__joints *joints;
    int64_t begin, end, slots; /* tokens; number of slots */
    int64_t reach;             /* an edge takes the highest joint within so many tokens */
    int64_t slot, at, edge;    /* at: joint of `edge`, where the next slot begins */
    int64_t joint;             /* index of the next cell's joint */
} seqpar__slots;

static void seqpar__slots_edge(seqpar__slots *r) {
    r->slot++;
    r->edge = r->end;
    if (r->slot + 1 < r->slots)
        r->edge = seqpar__edge(
            r->joints, &r->at,
            r->begin + seqpar_part_begin(r->end - r->begin, r->slots, r->slot + 1), r->reach);
}

/* If reach is 0, each slot begins at the nearest joint, and many may begin at the same one.
   Returns the slot of the next cell: the last slot that begins no later than the cell's joint.
   There may be 2^32 slots, so a binary search finds it. */
static int64_t seqpar__narrow_slot(const seqpar__slots *r) {
    const seqpar__joint *cell = (const seqpar__joint *)r->joints->list + r->joint;
    if (r->joint + 1 == r->joints->count) return r->slots - 1;
    return seqpar__last_part(r->end - r->begin, r->slots,
                             (cell[0].token + cell[1].token) / 2 - r->begin);
}

static int seqpar__deal_document(seqpar__splitting *to, const seqpar__walk *w,
                                 seqpar__slots *r) {
    for (int64_t c = 0; c < w->d.cells; c++) {
        seqpar_piece p = seqpar__cells_piece(w, c, c + 1);
        if (!r->reach && r->slots > 1) r->slot = seqpar__narrow_slot(r);
        while (r->slot < 0 ||
               (r->reach && w->before + p.start >= r->edge && r->slot + 1 < r->slots))
            seqpar__slots_edge(r);
        r->joint++;
        if (!seqpar__split_add(to, seqpar__slot_rank(r->slot, to->sp_size), p)) return 0;
    }
    return 1;
}

static seqpar__slots seqpar__slots_of(const seqpar__joints *joints, int64_t begin, int64_t end,
                                      int64_t slots) {
    seqpar__slots r;
    memset(&r, 0, sizeof r);
    r.joints = joints;
    r.begin = begin;
    r.end = end;
    r.slots = slots;
    r.reach = (end - begin) / slots / 8;
    r.slot = -1;
    return r;
}

static int seqpar__deal_cells(seqpar__splitting *to, const seqpar_row *rows,
                              int64_t row_count) {
    seqpar__joints joints;
    seqpar__walk w = seqpar__walk_of(rows, row_count, 0);
    seqpar__slots run;
    int allocated = 1;
    memset(&joints, 0, sizeof joints);
    run = seqpar__slots_of(&joints, 0, seqpar__rows_tokens(rows, row_count),
                           to->sp_size > 1 ? to->layout->slots * to->sp_size : 1);
    while (allocated && to->sp_size > 1 && seqpar__walk_next(&w))
        allocated = seqpar__joints_document(&joints, &w);
    for (w = seqpar__walk_of(rows, row_count, 0); allocated && seqpar__walk_next(&w);)
        allocated = seqpar__deal_document(to, &w, &run);
    SEQPAR_FREE(joints.list);
    return allocated;
}

/* Zigzag-doc: a document of at least two cells for each rank is dealt to slots of its own. The
   tokens of the shorter documents are divided evenly over ranks; a shorter document goes whole
   to the rank whose part contains its middle. */
static int seqpar__is_long(const seqpar__doc *d, int64_t sp_size) {
    return d->cells >= 2 * sp_size;
}

static int seqpar__deal_long(seqpar__splitting *to, const seqpar__walk *w) {
    seqpar__joints joints;
    seqpar__slots run;
    int allocated;
    memset(&joints, 0, sizeof joints);
    run = seqpar__slots_of(&joints, w->before + w->d.begin, w->before + w->d.end,
                           2 * to->sp_size);
    allocated = seqpar__joints_document(&joints, w) && seqpar__deal_document(to, w, &run);
    SEQPAR_FREE(joints.list);
    return allocated;
}

static int seqpar__deal_short(seqpar__splitting *to, const seqpar__walk *w, int64_t rank) {
    for (int64_t c = 0; c < w->d.cells; c++)
        if (!seqpar__split_add(to, rank, seqpar__cells_piece(w, c, c + 1))) return 0;
    return 1;
}

static int seqpar__deal_documents(seqpar__splitting *to, const seqpar_row *rows,
                                  int64_t row_count) {
    int64_t all = 0, before = 0;
    seqpar__walk w = seqpar__walk_of(rows, row_count, 0);
    if (to->sp_size == 1) return seqpar__deal_cells(to, rows, row_count);
    while (seqpar__walk_next(&w))
        if (!seqpar__is_long(&w.d, to->sp_size)) all += w.d.end - w.d.begin;
    for (w = seqpar__walk_of(rows, row_count, 0); seqpar__walk_next(&w);) {
        int64_t tokens = w.d.end - w.d.begin;
        if (seqpar__is_long(&w.d, to->sp_size)) {
            if (!seqpar__deal_long(to, &w)) return 0;
            continue;
        }
        if (!seqpar__deal_short(to, &w, seqpar__part_of(to->sp_size, all, before, tokens)))
            return 0;
        before += tokens;
    }
    return 1;
}

static int seqpar__deal_striped(seqpar__splitting *to, const seqpar__walk *w) {
    int64_t cells = w->d.cells, parts = seqpar__stripe_parts(cells, to->sp_size);
    int64_t first = to->only >= 0 ? to->only : 0;
    int64_t end = to->only >= 0 ? first + 1 : to->sp_size;
    for (int64_t c = 0; c < parts; c++)
        for (int64_t r = first; r < end; r++) {
            seqpar_piece p = seqpar__cells_piece(w, seqpar_part_begin(cells, parts, c),
                                                 seqpar_part_begin(cells, parts, c + 1));
            p.leaf = w->d.leaf + c * seqpar__stripe_leaves(to->sp_size);
            if (!seqpar__split_add(to, r, seqpar__stripe_piece(p, to->sp_size, r))) return 0;
        }
    return 1;
}

static int seqpar__deal_stripe(seqpar__splitting *to, const seqpar_row *rows,
                               int64_t row_count) {
    if (to->sp_size == 1) return seqpar__deal_cells(to, rows, row_count);
    for (seqpar__walk w = seqpar__walk_of(rows, row_count, to->sp_size); seqpar__walk_next(&w);)
        if (!seqpar__deal_striped(to, &w)) return 0;
    return 1;
}

/* Estimates the number of pieces: one for each cell; with stripe, parts x ranks. */
static int64_t seqpar__expected_pieces(const seqpar_row *rows, int64_t row_count, int layout,
                                       int64_t sp_size) {
    int64_t n = 0;
    for (seqpar__walk w = seqpar__walk_of(rows, row_count, 0); seqpar__walk_next(&w);)
        n += layout == SEQPAR_LAYOUT_STRIPE ? seqpar__stripe_parts(w.d.cells, sp_size) * sp_size
                                            : w.d.cells;
    return SEQPAR__MIN(n, seqpar__rows_tokens(rows, row_count));
}

typedef int (*seqpar__dealer)(seqpar__splitting *to, const seqpar_row *rows, int64_t row_count);

static const seqpar__dealer seqpar__dealers[] = {
#define SEQPAR__X(name, text, whole_cells, slots, down, how) seqpar__deal_##how,
    SEQPAR_LAYOUTS(SEQPAR__X)
#undef SEQPAR__X
};

static void seqpar__shares_free(seqpar_share *shares, int64_t count) {
    for (int64_t r = 0; shares && r < count; r++) seqpar_share_free(&shares[r]);
}

/* If only < 0, makes the shares of all ranks (sp_size) and, unless order is NULL, *order: all
   pieces by leaf. Else makes the one share of rank `only`, and no order. */
static seqpar_status seqpar__split_rows(seqpar_error *error, seqpar_share *shares,
                                        seqpar__sorted_key **order, const seqpar_row *rows,
                                        int64_t row_count, int layout, int64_t sp_size,
                                        int64_t only) {
    int64_t count = only < 0 ? sp_size : 1;
    seqpar__splitting to;
    int allocated;
    memset(shares, 0, (size_t)count * sizeof *shares);
    memset(&to, 0, sizeof to);
    to.shares = shares;
    to.sp_size = sp_size;
    to.only = only;
    to.layout = seqpar_layout_at(layout);
    to.capacity = SEQPAR__NEW(int64_t, count);
    allocated = to.capacity != NULL;
    to.expected = seqpar__expected_pieces(rows, row_count, layout, sp_size);
    for (int64_t i = 0; i < count; i++) {
        shares[i].rows = rows;
        shares[i].row_count = row_count;
        shares[i].layout = layout;
        shares[i].sp_size = sp_size;
        shares[i].sp_rank = only < 0 ? i : only;
    }
    if (allocated) allocated = seqpar__dealers[layout](&to, rows, row_count);
    SEQPAR_FREE(to.capacity);
    if (allocated && order)
        *order = (seqpar__sorted_key *)to.order;
    else
        SEQPAR_FREE(to.order);
    if (allocated) return SEQPAR_OK;
    seqpar__shares_free(shares, count);
    return seqpar__no_memory(error, "pieces");
}

/* Makes the shares of all ranks in one pass and, unless order is NULL, *order: all pieces by
   leaf. The caller frees both. */
static seqpar_status seqpar__split_all(seqpar_error *error, seqpar_share **shares,
                                       seqpar__sorted_key **order, const seqpar_row *rows,
                                       int64_t row_count, int layout, int64_t sp_size) {
    seqpar_status status;
    *shares = NULL;
    SEQPAR__TRY(seqpar__check_split(error, rows, row_count, layout, sp_size, 0));
    *shares = SEQPAR__NEW(seqpar_share, sp_size);
    status = *shares ? seqpar__split_rows(error, *shares, order, rows, row_count, layout,
                                          sp_size, -1)
                     : seqpar__no_memory(error, "pieces");
    if (!status) return SEQPAR_OK;
    SEQPAR_FREE(*shares);
    *shares = NULL;
    return status;
}

SEQPAR_DEF seqpar_status seqpar_split(seqpar_error *error, seqpar_share *share,
                                      const seqpar_row *rows, int64_t row_count,
                                      const seqpar_split_desc *d) {
    SEQPAR_NEED(error, "share, rows, desc", share, SEQPAR_IF(row_count > 0, rows), d);
    memset(share, 0, sizeof *share);
    SEQPAR__TRY(seqpar__check_split(error, rows, row_count, d->layout, d->sp_size, d->sp_rank));
    return seqpar__split_rows(error, share, NULL, rows, row_count, d->layout, d->sp_size,
                              d->sp_rank);
}

SEQPAR_DEF void seqpar_share_free(seqpar_share *share) {
    SEQPAR_MUST("share", share);
    SEQPAR_FREE(share->pieces);
    memset(share, 0, sizeof *share);
}

SEQPAR_DEF seqpar_status seqpar_split_owner(seqpar_error *error, int64_t *sp_rank,
                                            int64_t *local, const seqpar_row *row,
                                            int64_t token, const seqpar_split_desc *desc) {
    SEQPAR_NEED(error, "sp_rank, local, row, desc", sp_rank, local, row, desc);
    int64_t found = 0, sp_size = desc->sp_size;
    seqpar_share *shares;
    SEQPAR__TRY(seqpar__check_split(error, row, 1, desc->layout, sp_size, 0));
    if (token < 0 || token >= row->tokens)
        return seqpar_fail(error, SEQPAR_ERR_TOKEN_RANGE,
                           "token %lld is outside a row of %lld tokens", (long long)token,
                           (long long)row->tokens);
    SEQPAR__TRY(seqpar__split_all(error, &shares, NULL, row, 1, desc->layout, sp_size));
    for (int64_t r = 0; r < sp_size; r++)
        for (int64_t i = 0; i < shares[r].count && !found; i++) {
            const seqpar_piece *p = &shares[r].pieces[i];
            int64_t at = token - p->start;
            if (at < 0 || at % p->stride || at / p->stride >= p->count) continue;
            *sp_rank = r;
            *local = p->local + at / p->stride;
            found = 1;
        }
    seqpar__shares_free(shares, sp_size);
    SEQPAR_FREE(shares);
    return found ? SEQPAR_OK
                 : seqpar_fail(error, SEQPAR_ERR_TOKEN_RANGE, "token %lld is held by no rank",
                               (long long)token);
}

static seqpar_status seqpar__balance_tokens(seqpar_error *error, seqpar_balance *b,
                                            const seqpar_row *rows, int64_t row_count,
                                            int layout, int64_t sp_size) {
    seqpar_share *shares;
    b->tokens = b->most = b->idle = 0;
    SEQPAR__TRY(seqpar__split_all(error, &shares, NULL, rows, row_count, layout, sp_size));
    for (int64_t r = 0; r < sp_size; r++) {
        b->tokens += shares[r].tokens;
        b->most = SEQPAR__MAX(b->most, shares[r].tokens);
        b->idle += shares[r].tokens == 0;
    }
    seqpar__shares_free(shares, sp_size);
    SEQPAR_FREE(shares);
    return SEQPAR_OK;
}

SEQPAR_DEF int seqpar_balance_poor(const seqpar_balance *b, int64_t sp_size) {
    SEQPAR_MUST("balance", b);
    return b->idle > 0 || 4 * sp_size * b->most > 5 * b->tokens;
}

/* The size in tokens of the largest cell in the rows. Sizes do not fall within a document, so
   it is the last cell of a document. */
static int64_t seqpar__widest_cell(const seqpar_row *rows, int64_t row_count) {
    int64_t widest = 1;
    for (seqpar__walk w = seqpar__walk_of(rows, row_count, 0); seqpar__walk_next(&w);) {
        int64_t cell = rows[w.row].cell, last = w.d.cells - 1;
        widest = SEQPAR__MAX(widest,
                             seqpar_cell_begin(cell, last + 1) - seqpar_cell_begin(cell, last));
    }
    return widest;
}

/* Finds the largest power of two below the widest cell that, as cell size, deals the rows
   evenly. If there is none, *better stays 0. Changes rows[].cell, so pass a copy. */
static seqpar_status seqpar__better_cell(seqpar_error *error, int64_t *better, seqpar_row *rows,
                                         int64_t row_count, int layout, int64_t sp_size) {
    int64_t widest = seqpar__widest_cell(rows, row_count), cell = 1;
    seqpar_balance b;
    while (2 * cell < widest) cell *= 2;
    for (; cell > 0 && cell < widest && !*better; cell /= 2) {
        for (int64_t i = 0; i < row_count; i++) rows[i].cell = cell;
        SEQPAR__TRY(seqpar__balance_tokens(error, &b, rows, row_count, layout, sp_size));
        if (!seqpar_balance_poor(&b, sp_size)) *better = cell;
    }
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_split_balance(seqpar_error *error, seqpar_balance *b,
                                              const seqpar_row *rows, int64_t row_count,
                                              int layout, int64_t sp_size) {
    SEQPAR_NEED(error, "balance, rows", b, SEQPAR_IF(row_count > 0, rows));
    seqpar_status status;
    seqpar_row *other;
    memset(b, 0, sizeof *b);
    SEQPAR__TRY(seqpar__balance_tokens(error, b, rows, row_count, layout, sp_size));
    if (row_count <= 0 || !seqpar_layout_at(layout)->whole_cells) return SEQPAR_OK;
    other = SEQPAR__NEW(seqpar_row, row_count);
    if (!other) return seqpar__no_memory(error, "rows");
    memcpy(other, rows, (size_t)row_count * sizeof *other);
    status = seqpar__better_cell(error, &b->better_cell, other, row_count, layout, sp_size);
    SEQPAR_FREE(other);
    return status;
}

static void seqpar__move_rows(char *local, char *global, const seqpar_share *share, int64_t row,
                              int64_t width, int to_local) {
    int64_t low = 0, high = share->count; /* pieces are sorted by row */
    while (low < high) {
        int64_t mid = (low + high) / 2;
        if (share->pieces[mid].row < row)
            low = mid + 1;
        else
            high = mid;
    }
    for (; low < share->count && share->pieces[low].row == row; low++) {
        const seqpar_piece *p = &share->pieces[low];
        for (int64_t t = 0; t < p->count; t++) {
            char *l = local + (p->local + t) * width;
            char *g = global + (p->start + t * p->stride) * width;
            if (to_local)
                memcpy(l, g, (size_t)width);
            else
                memcpy(g, l, (size_t)width);
        }
    }
}

SEQPAR_DEF void seqpar_scatter(void *local, const void *global, const seqpar_share *share,
                               int64_t row, int64_t width) {
    SEQPAR_MUST("share", share);
    SEQPAR_MUST("local, global", SEQPAR_IF(share->tokens > 0, local),
                SEQPAR_IF(share->tokens > 0, global));
    seqpar__move_rows((char *)local, (char *)global, share, row, width, 1);
}

SEQPAR_DEF void seqpar_gather(void *global, const void *local, const seqpar_share *share,
                              int64_t row, int64_t width) {
    SEQPAR_MUST("share", share);
    SEQPAR_MUST("global, local", SEQPAR_IF(share->tokens > 0, global),
                SEQPAR_IF(share->tokens > 0, local));
    seqpar__move_rows((char *)local, (char *)global, share, row, width, 0);
}

/* =============================================================================================
   >>comm  how bytes move: one rank, threads

   This chapter has the code that all transports share, and two transports. >>api has the
   contract between library and transport. Gathers, broadcasts, and sums and maxima of integers
   are built here, once, on begin and wait.

   The first transport, self, is a world of one rank: a message can only go to oneself, so
   begin copies it. The second, threads, runs ranks as threads of one process around a hub:

       seat of rank 0    inbox:  messages sent to it that no receive has taken yet
                         posted: its groups in flight, with receives that wait
       seat of rank 1    ...
       hub               one lock for all of it; the first error of the world

   A send and its receive meet in the hub. The rank that posts second copies the bytes from the
   sender's buffer to the receiver's. Nothing is stored in between, and the copy does not depend
   on when the other rank's thread gets a core. The hub knows what every rank waits for, so it
   finds a deadlock exactly: all ranks that have not ended wait, and no copy is under way.
   ========================================================================================== */

/* On a queue, both ends of a message must be in groups of the same number, name and step
   (>>api, Queues). The sender adds a hash of these and of both ranks, the receiver subtracts
   it. If the sum over all ranks is not 0, two ends differ. */
static void seqpar__count_queue_group(seqpar_comm *comm, const seqpar_group *g) {
    uint64_t about = seqpar__mix((uint64_t)comm->queue_groups++), pair;
    for (const char *c = g->name; *c; c++) about = seqpar__mix(about + (unsigned char)*c);
    about = seqpar__mix(about + (uint64_t)g->step);
    for (int64_t i = 0; i < g->send_count; i++) {
        pair = (uint64_t)(comm->rank * comm->size + g->sends[i].peer);
        comm->queue_sum += seqpar__mix(about ^ seqpar__mix(pair));
    }
    for (int64_t i = 0; i < g->recv_count; i++) {
        pair = (uint64_t)(g->recvs[i].peer * comm->size + comm->rank);
        comm->queue_sum -= seqpar__mix(about ^ seqpar__mix(pair));
    }
}

SEQPAR_DEF seqpar_status seqpar_comm_begin(seqpar_comm *comm, const seqpar_group *group,
                                           void *queue, seqpar_request *request) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, group, request", comm, group, request);
    SEQPAR_NEED(comm->error, "group->name, group->sends, group->recvs", group->name,
                SEQPAR_IF(group->send_count > 0, group->sends),
                SEQPAR_IF(group->recv_count > 0, group->recvs));
    request->state = NULL;
    for (int64_t i = 0; i < group->send_count; i++)
        if (group->sends[i].peer != comm->rank) {
            comm->bytes_sent += group->sends[i].bytes;
            comm->messages_sent++;
        }
    /* the host accesses the buffers from here on, so kernels that use them must have ended */
    if (!comm->table->queued) {
        SEQPAR__TRY(seqpar_device_settle(comm->device, queue));
        queue = NULL;
    }
    if (queue) seqpar__count_queue_group(comm, group);
    return comm->table->begin(comm, group, queue, request);
}

SEQPAR_DEF seqpar_status seqpar_comm_wait(seqpar_comm *comm, seqpar_request *request,
                                          void *queue) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, request", comm, request);
    seqpar_status status = SEQPAR_OK;
    if (!comm->table->queued) queue = NULL;
    if (request->state) status = comm->table->wait(comm, request, queue);
    request->state = NULL;
    return status;
}

SEQPAR_DEF seqpar_status seqpar_comm_split(seqpar_comm *comm, int64_t color, int64_t key,
                                           seqpar_comm **sub) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, sub", comm, sub);
    return comm->table->split(comm, color, key, sub);
}

SEQPAR_DEF void seqpar_comm_abort(seqpar_comm *comm, const char *text) {
    SEQPAR_MUST("comm, text", comm, text);
    comm->table->abort(comm, text);
}

SEQPAR_DEF void seqpar_comm_free(seqpar_comm *comm) {
    if (comm) comm->table->free(comm);
}

static seqpar_status seqpar__exchange(seqpar_comm *comm, const seqpar_group *group,
                                      void *queue) {
    seqpar_request request;
    SEQPAR__TRY(seqpar_comm_begin(comm, group, queue, &request));
    return seqpar_comm_wait(comm, &request, queue);
}

/* A group's lists of messages while they are filled. */
typedef struct seqpar__messages {
    seqpar_transfer *sends, *recvs; /* lengths: see seqpar__messages_new */
    int64_t send_count, recv_count;
} seqpar__messages;

/* Makes lists for `sends` and `recvs` messages in one allocation: the caller frees m->sends. */
static int seqpar__messages_new(seqpar__messages *m, int64_t sends, int64_t recvs) {
    memset(m, 0, sizeof *m);
    m->sends = SEQPAR__NEW(seqpar_transfer, sends + recvs);
    if (m->sends) m->recvs = m->sends + sends;
    return m->sends != NULL;
}

static seqpar_transfer seqpar__transfer(int64_t peer, const void *data, int64_t bytes) {
    seqpar_transfer t;
    t.peer = peer;
    t.data = (void *)data;
    t.bytes = bytes;
    return t;
}

static void seqpar__add_send(seqpar__messages *m, int64_t peer, const void *data,
                             int64_t bytes) {
    m->sends[m->send_count++] = seqpar__transfer(peer, data, bytes);
}

static void seqpar__add_recv(seqpar__messages *m, int64_t peer, void *data, int64_t bytes) {
    m->recvs[m->recv_count++] = seqpar__transfer(peer, data, bytes);
}

static seqpar_group seqpar__group(const char *name, int64_t step, const seqpar__messages *m) {
    seqpar_group group;
    group.name = name;
    group.step = step;
    group.sends = m->sends;
    group.send_count = m->send_count;
    group.recvs = m->recvs;
    group.recv_count = m->recv_count;
    return group;
}

SEQPAR_DEF seqpar_status seqpar_comm_all_gather(seqpar_comm *comm, void *recv, const void *send,
                                                const int64_t *bytes, const char *name) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, bytes, name", comm, bytes, name);
    int64_t at = 0;
    for (int64_t r = 0; r < comm->size; r++) at += bytes[r];
    SEQPAR_NEED(comm->error, "recv, send", SEQPAR_IF(at > 0, recv),
                SEQPAR_IF(bytes[comm->rank] > 0, send));
    seqpar__messages m;
    seqpar_status status = SEQPAR_OK;
    seqpar_group group;
    at = 0;
    if (!seqpar__messages_new(&m, comm->size, comm->size))
        return seqpar__no_memory(comm->error, "an all-gather");
    for (int64_t r = 0; r < comm->size; at += bytes[r++]) {
        if (r == comm->rank && bytes[r]) memmove((char *)recv + at, send, (size_t)bytes[r]);
        if (r == comm->rank) continue;
        seqpar__add_send(&m, r, send, bytes[comm->rank]);
        seqpar__add_recv(&m, r, (char *)recv + at, bytes[r]);
    }
    group = seqpar__group(name, 0, &m);
    if (m.send_count) status = seqpar__exchange(comm, &group, NULL);
    SEQPAR_FREE(m.sends);
    return status;
}

static seqpar_status seqpar__gather_i64(seqpar_comm *comm, int64_t **all, const int64_t *values,
                                        int64_t count, const char *name) {
    int64_t *bytes = SEQPAR__NEW(int64_t, comm->size);
    seqpar_status status = SEQPAR_OK;
    *all = SEQPAR__NEW(int64_t, comm->size * count);
    if (!bytes || !*all) status = seqpar__no_memory(comm->error, name);
    for (int64_t r = 0; !status && r < comm->size; r++) bytes[r] = count * 8;
    if (!status) status = seqpar_comm_all_gather(comm, *all, values, bytes, name);
    SEQPAR_FREE(bytes);
    if (!status) return SEQPAR_OK;
    SEQPAR_FREE(*all);
    *all = NULL;
    return status;
}

static seqpar_status seqpar__reduce_i64(seqpar_comm *comm, int64_t *values, int64_t count,
                                        int max) {
    int64_t *all = NULL;
    seqpar_status status;
    if (comm->size == 1) return SEQPAR_OK;
    status = seqpar__gather_i64(comm, &all, values, count, max ? "integer max" : "integer sum");
    for (int64_t i = 0; !status && i < count; i++) {
        int64_t total = all[i];
        for (int64_t r = 1; r < comm->size; r++) {
            int64_t x = all[r * count + i];
            total = max ? SEQPAR__MAX(total, x) : total + x;
        }
        values[i] = total;
    }
    SEQPAR_FREE(all);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_comm_sum_i64(seqpar_comm *comm, int64_t *values,
                                             int64_t count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, values", comm, SEQPAR_IF(count > 0, values));
    return seqpar__reduce_i64(comm, values, count, 0);
}

SEQPAR_DEF seqpar_status seqpar_comm_max_i64(seqpar_comm *comm, int64_t *values,
                                             int64_t count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, values", comm, SEQPAR_IF(count > 0, values));
    return seqpar__reduce_i64(comm, values, count, 1);
}

SEQPAR_DEF seqpar_status seqpar_comm_barrier(seqpar_comm *comm) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm", comm);
    int64_t one = 1;
    return seqpar_comm_sum_i64(comm, &one, 1);
}

SEQPAR_DEF seqpar_status seqpar_comm_broadcast(seqpar_comm *comm, void *data, int64_t bytes,
                                               int64_t root) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, data", comm, SEQPAR_IF(bytes > 0, data));
    seqpar__messages m;
    seqpar_group group;
    seqpar_status status;
    if (comm->size == 1) return SEQPAR_OK;
    if (!seqpar__messages_new(&m, comm->size, 1))
        return seqpar__no_memory(comm->error, "a broadcast");
    if (comm->rank != root) seqpar__add_recv(&m, root, data, bytes);
    for (int64_t r = 0; comm->rank == root && r < comm->size; r++)
        if (r != root) seqpar__add_send(&m, r, data, bytes);
    group = seqpar__group("broadcast", 0, &m);
    status = seqpar__exchange(comm, &group, NULL);
    SEQPAR_FREE(m.sends);
    return status;
}

/* Reports a message that does not match its receive: another group, step or size. All
   transports use this text. */
SEQPAR_DEF seqpar_status seqpar_comm_mismatch(seqpar_error *error, const seqpar_mismatch *m) {
    SEQPAR_NEED(error, "m", m);
    SEQPAR_NEED(error, "m->name, m->sent_name", m->name, m->sent_name);
    if (m->sent_step != m->step || strcmp(m->sent_name, m->name))
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "rank %lld is in '%s' step %lld, but rank %lld sent a message of "
                           "'%s' step %lld; all ranks must make the same calls in the same "
                           "order",
                           (long long)m->to, m->name, (long long)m->step, (long long)m->from,
                           m->sent_name, (long long)m->sent_step);
    return seqpar_fail(error, SEQPAR_ERR_MESSAGE_SIZE,
                       "'%s' step %lld: rank %lld sent %lld bytes, rank %lld expects %lld",
                       m->name, (long long)m->step, (long long)m->from,
                       (long long)m->sent_bytes, (long long)m->to, (long long)m->bytes);
}

/* Copies between ranks of one process. With a device, each buffer may lie in device memory or
   in host memory. */
static void seqpar__comm_copy(seqpar_device *device, void *to, const void *from,
                              int64_t bytes) {
    if (bytes && device)
        device->copy(device, to, from, bytes, NULL);
    else if (bytes)
        memcpy(to, from, (size_t)bytes);
}

/* ---- self ---- */

typedef struct seqpar__self {
    seqpar_comm comm;
    seqpar_error error;
    struct seqpar__self *world;
    int aborted; /* used in *world only */
} seqpar__self;

static seqpar_comm *seqpar__self_new(seqpar_error *error);

static seqpar_status seqpar__self_begin(seqpar_comm *comm, const seqpar_group *group,
                                        void *queue, seqpar_request *request) {
    (void)queue;
    (void)request;
    if (group->send_count != group->recv_count)
        return seqpar_fail(comm->error, SEQPAR_ERR_DEADLOCK,
                           "'%s': rank 0 is alone, sends %lld messages and expects %lld",
                           group->name, (long long)group->send_count,
                           (long long)group->recv_count);
    for (int64_t i = 0; i < group->send_count; i++) {
        if (group->sends[i].bytes != group->recvs[i].bytes)
            return seqpar_fail(comm->error, SEQPAR_ERR_MESSAGE_SIZE,
                               "'%s': %lld bytes were sent where %lld were expected",
                               group->name, (long long)group->sends[i].bytes,
                               (long long)group->recvs[i].bytes);
        seqpar__comm_copy(comm->device, group->recvs[i].data, group->sends[i].data,
                          group->sends[i].bytes);
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__self_wait(seqpar_comm *comm, seqpar_request *request,
                                       void *queue) {
    (void)comm;
    (void)request;
    (void)queue;
    return SEQPAR_OK;
}

static seqpar_status seqpar__self_split(seqpar_comm *comm, int64_t color, int64_t key,
                                        seqpar_comm **sub) {
    (void)color;
    (void)key;
    *sub = seqpar__self_new(comm->error);
    if (!*sub) return seqpar__no_memory(comm->error, "a comm");
    ((seqpar__self *)(*sub)->state)->world = ((seqpar__self *)comm->state)->world;
    return SEQPAR_OK;
}

static void seqpar__self_abort(seqpar_comm *comm, const char *text) {
    ((seqpar__self *)comm->state)->world->aborted = 1;
    seqpar_fail(comm->error, SEQPAR_ERR_PEER, "%s", text);
}

static void seqpar__self_free(seqpar_comm *comm) { SEQPAR_FREE(comm->state); }

static seqpar_comm *seqpar__self_new(seqpar_error *error) {
    static const seqpar_comm_table table = {"self",
                                            seqpar__self_begin,
                                            seqpar__self_wait,
                                            seqpar__self_split,
                                            seqpar__self_abort,
                                            seqpar__self_free,
                                            0};
    seqpar__self *self = SEQPAR__NEW(seqpar__self, 1);
    if (!self) return NULL;
    self->comm.table = &table;
    self->comm.size = 1;
    self->comm.error = error ? error : &self->error;
    self->comm.state = self;
    self->world = self;
    return &self->comm;
}

SEQPAR_DEF seqpar_comm *seqpar_comm_self(void) { return seqpar__self_new(NULL); }

/* ---- threads: ranks of one process; bytes go from buffer to buffer in one copy ---- */

#ifndef SEQPAR_NO_THREADS
enum seqpar__message_state {
    SEQPAR__MESSAGE_WAITS,
    SEQPAR__MESSAGE_COPYING,
    SEQPAR__MESSAGE_DONE,
    SEQPAR__MESSAGE_WRONG
};

typedef struct seqpar__message {
    struct seqpar__message *next; /* in the inbox of its receiver */
    uint64_t comm_id;
    int64_t from, to; /* world ranks */
    int64_t sequence; /* counts messages of (comm, from, to); if WRONG: the expected bytes */
    void *data;
    int64_t bytes;
    const char *name; /* of its group; if WRONG, name, bytes and step are the sender's */
    int64_t step;
    enum seqpar__message_state state;
} seqpar__message;

typedef struct seqpar__posted { /* a request in flight */
    struct seqpar__posted *next;
    seqpar__message *sends, *recvs;
    int64_t send_count, recv_count;
    const char *name;
    int64_t step;
} seqpar__posted;

typedef struct seqpar__seat { /* one rank */
    pthread_cond_t wake;
    seqpar__message *inbox;
    seqpar__posted *posted;      /* all requests of this rank */
    const seqpar__posted *waits; /* the one it is blocked in; NULL: it runs */
    int ended;
} seqpar__seat;

typedef struct seqpar__hub {
    pthread_mutex_t lock;
    seqpar__seat *seats;
    int64_t size;
    int aborted, died;    /* died: 1 + a rank that died; 0: none */
    seqpar_status status; /* status, rank, text: the first error of the world */
    int64_t rank;
    char text[512];
} seqpar__hub;

typedef struct seqpar__threads_comm { /* state of a comm */
    seqpar_comm comm;
    seqpar__hub *hub;
    uint64_t id;
    int64_t splits;
    /* (size) for each rank of the comm: its world rank; sends to it, receives from it so far */
    int64_t *world_rank, *sent, *received;
} seqpar__threads_comm;

static int64_t seqpar__world_rank(const seqpar__threads_comm *m) {
    return m->world_rank[m->comm.rank];
}

/* locked: here and below, the caller holds hub->lock */
static void seqpar__hub_stop(seqpar__hub *hub, seqpar_status status, int64_t rank,
                             const char *text) {
    if (hub->aborted) return;
    hub->aborted = 1;
    hub->status = status;
    hub->rank = rank;
    snprintf(hub->text, sizeof hub->text, "%s", text);
    for (int64_t r = 0; r < hub->size; r++) pthread_cond_broadcast(&hub->seats[r].wake);
}

static int64_t seqpar__missing_peer(const seqpar__posted *p) {
    for (int64_t i = 0; i < p->recv_count; i++)
        if (p->recvs[i].state < SEQPAR__MESSAGE_DONE) return p->recvs[i].from;
    for (int64_t i = 0; i < p->send_count; i++)
        if (p->sends[i].state < SEQPAR__MESSAGE_DONE) return p->sends[i].to;
    return -1;
}

/* Stops the world with DEADLOCK if every rank that has not ended is blocked. Called with the
   lock held whenever a rank blocks or ends. A rank that was woken counts as running. */
static void seqpar__hub_watch(seqpar__hub *hub) {
    int64_t waiting = 0, first = -1;
    char text[512];
    int at = 0;
    for (int64_t r = 0; r < hub->size; r++) {
        if (!hub->seats[r].waits && !hub->seats[r].ended) return;
        waiting += !hub->seats[r].ended;
    }
    if (!waiting || hub->aborted) return;
    at += snprintf(text, sizeof text, "deadlock: ");
    for (int64_t r = 0; r < hub->size && at < (int)sizeof text - 120; r++) {
        const seqpar__posted *p = hub->seats[r].ended ? NULL : hub->seats[r].waits;
        const char *between = first < 0 ? "" : "; ", *ended;
        int64_t peer;
        if (!p) continue;
        if (first < 0) first = r;
        peer = seqpar__missing_peer(p);
        ended = peer >= 0 && hub->seats[peer].ended ? ", which has ended" : "";
        at += snprintf(text + at, sizeof text - (size_t)at,
                       "%srank %lld waits in '%s' step %lld for rank %lld%s", between,
                       (long long)r, p->name, (long long)p->step, (long long)peer, ended);
    }
    seqpar__hub_stop(hub, SEQPAR_ERR_DEADLOCK, first, text);
}

static void seqpar__hub_wake(seqpar__hub *hub, int64_t rank) { /* locked */
    if (!hub->seats[rank].waits) return;
    hub->seats[rank].waits = NULL;
    pthread_cond_signal(&hub->seats[rank].wake);
}

/* Locked. Writes the hub's error as this rank's, after an abort, and returns its code. */
static seqpar_status seqpar__hub_failed(seqpar__threads_comm *m) {
    seqpar__hub *hub = m->hub;
    if (hub->status == SEQPAR_ERR_DEADLOCK)
        return seqpar_fail(m->comm.error, SEQPAR_ERR_DEADLOCK, "%s", hub->text);
    return seqpar_fail(m->comm.error, SEQPAR_ERR_PEER, "rank %lld failed: %s",
                       (long long)hub->rank, hub->text);
}

static void seqpar__post_messages(seqpar__threads_comm *m, seqpar__message *to,
                                  const seqpar_group *group, int sending) {
    const seqpar_transfer *list = sending ? group->sends : group->recvs;
    int64_t count = sending ? group->send_count : group->recv_count;
    for (int64_t i = 0; i < count; i++) {
        int64_t peer = m->world_rank[list[i].peer];
        to[i].name = group->name;
        to[i].step = group->step;
        to[i].comm_id = m->id;
        to[i].from = sending ? seqpar__world_rank(m) : peer;
        to[i].to = sending ? peer : seqpar__world_rank(m);
        to[i].sequence = sending ? m->sent[list[i].peer]++ : m->received[list[i].peer]++;
        to[i].data = list[i].data;
        to[i].bytes = list[i].bytes;
    }
}

static int seqpar__same_message(const seqpar__message *a, const seqpar__message *b) {
    return a->comm_id == b->comm_id && a->from == b->from && a->sequence == b->sequence;
}

/* locked */
static seqpar__message *seqpar__take(seqpar__seat *seat, const seqpar__message *recv) {
    seqpar__message **at;
    for (at = &seat->inbox; *at; at = &(*at)->next)
        if (seqpar__same_message(*at, recv)) {
            seqpar__message *found = *at;
            *at = found->next;
            return found;
        }
    return NULL;
}

/* locked */
static seqpar__message *seqpar__awaited(const seqpar__seat *seat, const seqpar__message *send) {
    const seqpar__posted *p;
    for (p = seat->ended ? NULL : seat->posted; p; p = p->next)
        for (int64_t i = 0; i < p->recv_count; i++)
            if (p->recvs[i].state == SEQPAR__MESSAGE_WAITS &&
                seqpar__same_message(&p->recvs[i], send))
                return &p->recvs[i];
    return NULL;
}

/* Locked; unlocks while it copies. Wakes a rank when its request is complete or mismatched. */
static void seqpar__hub_copy(seqpar__threads_comm *m, seqpar__message *send,
                             seqpar__message *recv) {
    seqpar__hub *hub = m->hub;
    int64_t ends[2];
    ends[0] = send->from;
    ends[1] = recv->to;
    /* seqpar__threads_wait reports the mismatch; `sequence` then has the expected bytes */
    if (send->bytes != recv->bytes || send->step != recv->step ||
        strcmp(send->name, recv->name)) {
        recv->state = SEQPAR__MESSAGE_WRONG;
        recv->sequence = recv->bytes;
        recv->bytes = send->bytes;
        recv->name = send->name;
        recv->step = send->step;
        seqpar__hub_wake(hub, recv->to);
        return;
    }
    send->state = recv->state = SEQPAR__MESSAGE_COPYING;
    pthread_mutex_unlock(&hub->lock);
    seqpar__comm_copy(m->comm.device, recv->data, send->data, recv->bytes);
    pthread_mutex_lock(&hub->lock);
    send->state = recv->state = SEQPAR__MESSAGE_DONE;
    for (int64_t i = 0; i < 2; i++) {
        const seqpar__posted *waits = hub->seats[ends[i]].waits;
        if (waits && seqpar__missing_peer(waits) < 0) seqpar__hub_wake(hub, ends[i]);
        if (hub->aborted) pthread_cond_broadcast(&hub->seats[ends[i]].wake);
    }
}

/* Locked. Copies each message whose other end is posted already. Puts the other sends into the
   inboxes of their receivers. */
static void seqpar__meet(seqpar__threads_comm *m, seqpar__posted *p) {
    seqpar__hub *hub = m->hub;
    seqpar__message *other;
    for (int64_t i = 0; i < p->send_count && !hub->aborted; i++) {
        seqpar__seat *seat = &hub->seats[p->sends[i].to];
        if ((other = seqpar__awaited(seat, &p->sends[i])) != NULL) {
            seqpar__hub_copy(m, &p->sends[i], other);
            continue;
        }
        p->sends[i].next = seat->inbox;
        seat->inbox = &p->sends[i];
    }
    for (int64_t i = 0; i < p->recv_count && !hub->aborted; i++)
        if (p->recvs[i].state == SEQPAR__MESSAGE_WAITS &&
            (other = seqpar__take(&hub->seats[seqpar__world_rank(m)], &p->recvs[i])) != NULL)
            seqpar__hub_copy(m, other, &p->recvs[i]);
}

/* Posts a group of messages at this rank's seat, and copies each whose other end is posted
   already. The rank that posts second copies, so ranks that share a core need not wait until
   the other's thread runs. */
static seqpar_status seqpar__threads_begin(seqpar_comm *comm, const seqpar_group *group,
                                           void *queue, seqpar_request *request) {
    seqpar__threads_comm *m = (seqpar__threads_comm *)comm->state;
    seqpar__hub *hub = m->hub;
    seqpar__posted *p = SEQPAR__NEW(seqpar__posted, 1);
    (void)queue;
    if (p) p->sends = SEQPAR__NEW(seqpar__message, group->send_count + group->recv_count);
    if (!p || !p->sends) {
        SEQPAR_FREE(p);
        return seqpar__no_memory(comm->error, "messages");
    }
    p->recvs = p->sends + group->send_count;
    p->send_count = group->send_count;
    p->recv_count = group->recv_count;
    p->name = group->name;
    p->step = group->step;
    seqpar__post_messages(m, p->sends, group, 1);
    seqpar__post_messages(m, p->recvs, group, 0);
    pthread_mutex_lock(&hub->lock);
    p->next = hub->seats[seqpar__world_rank(m)].posted;
    hub->seats[seqpar__world_rank(m)].posted = p;
    seqpar__meet(m, p);
    pthread_mutex_unlock(&hub->lock);
    request->state = p;
    return SEQPAR_OK;
}

/* Locked. Reports a mismatched message of any request of this rank. */
static seqpar_status seqpar__wrong_message(seqpar__threads_comm *m) {
    const seqpar__posted *p;
    for (p = m->hub->seats[seqpar__world_rank(m)].posted; p; p = p->next)
        for (int64_t i = 0; i < p->recv_count; i++) {
            const seqpar__message *r = &p->recvs[i];
            const seqpar_mismatch said = {p->name, r->name, p->step,     r->step,
                                          r->to,   r->from, r->sequence, r->bytes};
            if (r->state == SEQPAR__MESSAGE_WRONG)
                return seqpar_comm_mismatch(m->comm.error, &said);
        }
    return SEQPAR_OK;
}

/* locked */
static void seqpar__unpost(seqpar__hub *hub, seqpar__seat *seat, seqpar__posted *p) {
    seqpar__posted **at;
    /* after an abort another rank may still be copying from or to these buffers */
    for (int64_t i = 0; i < p->send_count + p->recv_count; i++)
        while (p->sends[i].state == SEQPAR__MESSAGE_COPYING)
            pthread_cond_wait(&seat->wake, &hub->lock);
    for (at = &seat->posted; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    SEQPAR_FREE(p->sends);
    SEQPAR_FREE(p);
}

/* Sleeps until every message of the request is copied. If all other ranks already wait or have
   ended, no rank could wake it, so it stops the world with DEADLOCK instead. */
static seqpar_status seqpar__threads_wait(seqpar_comm *comm, seqpar_request *request,
                                          void *queue) {
    seqpar__threads_comm *m = (seqpar__threads_comm *)comm->state;
    seqpar__hub *hub = m->hub;
    seqpar__seat *seat = &hub->seats[seqpar__world_rank(m)];
    seqpar__posted *p = (seqpar__posted *)request->state;
    seqpar_status status;
    (void)queue;
    pthread_mutex_lock(&hub->lock);
    for (;;) {
        status = seqpar__wrong_message(m);
        if (status || seqpar__missing_peer(p) < 0) break;
        if (hub->aborted) {
            status = seqpar__hub_failed(m);
            break;
        }
        seat->waits = p;
        seqpar__hub_watch(hub);
        while (seat->waits && !hub->aborted) pthread_cond_wait(&seat->wake, &hub->lock);
        seat->waits = NULL;
    }
    if (status) seqpar__hub_stop(hub, status, seqpar__world_rank(m), comm->error->text);
    seqpar__unpost(hub, seat, p);
    pthread_mutex_unlock(&hub->lock);
    return status;
}

static void seqpar__threads_abort(seqpar_comm *comm, const char *text) {
    seqpar__threads_comm *m = (seqpar__threads_comm *)comm->state;
    pthread_mutex_lock(&m->hub->lock);
    seqpar__hub_stop(m->hub, comm->error->status ? comm->error->status : SEQPAR_ERR_PEER,
                     seqpar__world_rank(m), text);
    pthread_mutex_unlock(&m->hub->lock);
}

static void seqpar__threads_free(seqpar_comm *comm) {
    seqpar__threads_comm *m = (seqpar__threads_comm *)comm->state;
    SEQPAR_FREE(m->world_rank);
    SEQPAR_FREE(m);
}

static seqpar__threads_comm *seqpar__threads_comm_new(seqpar__hub *hub, int64_t size,
                                                      seqpar_error *error);
/* Makes a comm of the ranks of one color, in order of (key, rank). An all-gather gives every
   rank all colors and keys, from which it computes the ranks of its new comm. The id tells
   messages of this comm from those of other comms. */
static seqpar_status seqpar__threads_split(seqpar_comm *comm, int64_t color, int64_t key,
                                           seqpar_comm **sub) {
    seqpar__threads_comm *m = (seqpar__threads_comm *)comm->state, *s;
    int64_t mine[2], *all = NULL, size = 0;
    mine[0] = color;
    mine[1] = key;
    SEQPAR__TRY(seqpar__gather_i64(comm, &all, mine, 2, "split"));
    for (int64_t r = 0; r < comm->size; r++) size += all[2 * r] == color;
    s = seqpar__threads_comm_new(m->hub, size, comm->error);
    if (!s) {
        SEQPAR_FREE(all);
        return seqpar__no_memory(comm->error, "a comm");
    }
    s->id = seqpar__mix(m->id * 31 + (uint64_t)++m->splits) + seqpar__mix((uint64_t)color + 1);
    for (int64_t r = 0; r < comm->size; r++) {
        int64_t place = 0;
        if (all[2 * r] != color) continue;
        for (int64_t q = 0; q < comm->size; q++)
            place += all[2 * q] == color && (all[2 * q + 1] < all[2 * r + 1] ||
                                             (all[2 * q + 1] == all[2 * r + 1] && q < r));
        s->world_rank[place] = m->world_rank[r];
        if (r == comm->rank) s->comm.rank = place;
    }
    SEQPAR_FREE(all);
    *sub = &s->comm;
    return SEQPAR_OK;
}

static seqpar__threads_comm *seqpar__threads_comm_new(seqpar__hub *hub, int64_t size,
                                                      seqpar_error *error) {
    static const seqpar_comm_table table = {"threads",
                                            seqpar__threads_begin,
                                            seqpar__threads_wait,
                                            seqpar__threads_split,
                                            seqpar__threads_abort,
                                            seqpar__threads_free,
                                            0};
    seqpar__threads_comm *m = SEQPAR__NEW(seqpar__threads_comm, 1);
    if (m) m->world_rank = SEQPAR__NEW(int64_t, 3 * size);
    if (!m || !m->world_rank) {
        SEQPAR_FREE(m);
        return NULL;
    }
    m->sent = m->world_rank + size;
    m->received = m->sent + size;
    m->hub = hub;
    m->comm.table = &table;
    m->comm.size = size;
    m->comm.error = error;
    m->comm.state = m;
    return m;
}

typedef struct seqpar__thread {
    pthread_t thread;
    seqpar__hub *hub;
    int64_t rank;
    seqpar_rank_fn fn;
    void *user;
    int started;
} seqpar__thread;

/* The thread of one rank: runs fn. When the rank ends, others may still wait for messages from
   it, so the thread then checks for a deadlock. */
static void *seqpar__thread_main(void *argument) {
    seqpar__thread *t = (seqpar__thread *)argument;
    seqpar__hub *hub = t->hub;
    seqpar_error error;
    seqpar__threads_comm *m;
    seqpar_status status = SEQPAR_ERR_MEMORY;
    memset(&error, 0, sizeof error);
    error.rank = t->rank;
    m = seqpar__threads_comm_new(hub, hub->size, &error);
    if (m) {
        m->id = 1;
        m->comm.rank = t->rank;
        for (int64_t r = 0; r < hub->size; r++) m->world_rank[r] = r;
        status = t->fn(&m->comm, t->user);
        seqpar__threads_free(&m->comm);
    }
    pthread_mutex_lock(&hub->lock);
    hub->seats[t->rank].ended = 1;
    if (status == SEQPAR_ERR_DIED)
        hub->died = (int)t->rank + 1;
    else if (status)
        seqpar__hub_stop(hub, status, t->rank,
                         error.text[0] ? error.text : seqpar_status_text(status));
    seqpar__hub_watch(hub);
    pthread_mutex_unlock(&hub->lock);
    return NULL;
}

static seqpar_status seqpar__hub_run(seqpar__hub *hub, seqpar__thread *threads,
                                     seqpar_rank_fn fn, void *user) {
    for (int64_t r = 0; r < hub->size; r++) {
        threads[r].hub = hub;
        threads[r].rank = r;
        threads[r].fn = fn;
        threads[r].user = user;
        threads[r].started = !pthread_create(&threads[r].thread, NULL, seqpar__thread_main,
                                             &threads[r]);
        if (threads[r].started) continue;
        pthread_mutex_lock(&hub->lock);
        hub->seats[r].ended = 1;
        seqpar__hub_stop(hub, SEQPAR_ERR_THREAD, r,
                         "a thread could not be started; use fewer ranks");
        pthread_mutex_unlock(&hub->lock);
    }
    for (int64_t r = 0; r < hub->size; r++)
        if (threads[r].started) pthread_join(threads[r].thread, NULL);
    /* a rank died, but no other rank waited for it */
    if (hub->died)
        seqpar__hub_stop(hub, SEQPAR_ERR_DIED, hub->died - 1,
                         seqpar_status_text(SEQPAR_ERR_DIED));
    return hub->aborted ? hub->status : SEQPAR_OK;
}

/* Runs all ranks. *error becomes the first error of any rank, with that rank's number. */
static seqpar_status seqpar__run_hub(int64_t ranks, seqpar_rank_fn fn, void *user,
                                     seqpar_error *error) {
    seqpar__hub hub;
    seqpar__thread *threads = SEQPAR__NEW(seqpar__thread, ranks);
    seqpar_status status;
    memset(&hub, 0, sizeof hub);
    hub.size = ranks;
    hub.seats = SEQPAR__NEW(seqpar__seat, ranks);
    if (!threads || !hub.seats) {
        SEQPAR_FREE(threads);
        SEQPAR_FREE(hub.seats);
        return seqpar__no_memory(error, "ranks");
    }
    pthread_mutex_init(&hub.lock, NULL);
    for (int64_t r = 0; r < ranks; r++) pthread_cond_init(&hub.seats[r].wake, NULL);
    status = seqpar__hub_run(&hub, threads, fn, user);
    if (status) {
        seqpar_fail(error, status, "%s", hub.text);
        if (error) error->rank = hub.rank;
    }
    for (int64_t r = 0; r < ranks; r++) pthread_cond_destroy(&hub.seats[r].wake);
    pthread_mutex_destroy(&hub.lock);
    SEQPAR_FREE(hub.seats);
    SEQPAR_FREE(threads);
    return status;
}
#endif /* SEQPAR_NO_THREADS */

static seqpar_status seqpar__run_self(seqpar_rank_fn fn, void *user, seqpar_error *error) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_status status;
    if (!self) return seqpar__no_memory(error, "a comm");
    status = fn(self, user);
    if (!status && ((seqpar__self *)self->state)->aborted) status = self->error->status;
    if (status)
        seqpar_fail(error, status, "%s",
                    self->error->text[0] ? self->error->text : seqpar_status_text(status));
    seqpar_comm_free(self);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_run_threads(int64_t ranks, seqpar_rank_fn fn, void *user,
                                            seqpar_error *error) {
    if (error) memset(error, 0, sizeof *error);
    SEQPAR_NEED(error, "fn", SEQPAR_THERE(fn));
    if (ranks <= 0 || ranks > SEQPAR_MAX_RANKS)
        return seqpar_fail(error, SEQPAR_ERR_RANKS,
                           "%lld ranks cannot run as threads of one process; give 1 to %lld",
                           (long long)ranks, (long long)SEQPAR_MAX_RANKS);
    if (ranks == 1) return seqpar__run_self(fn, user, error);
#ifdef SEQPAR_NO_THREADS
    return seqpar_fail(error, SEQPAR_ERR_RANKS,
                       "%lld ranks need threads; build without SEQPAR_NO_THREADS or run 1",
                       (long long)ranks);
#else
    return seqpar__run_hub(ranks, fn, user, error);
#endif
}

/* =============================================================================================
   >>ctx  one rank: its mesh, its device, its memory

   A context holds what a rank works with: the world; sp, the ranks that share its sequences; a
   device; counters of the device memory in use. Ranks of one sequence are neighbours:

       world rank   0 1 2 3   4 5 6 7        sp_size 4, dp_size 2
       dp_rank      0 0 0 0   1 1 1 1
       sp_rank      0 1 2 3   0 1 2 3

   Ranks with different settings would deadlock, or compute wrong results. So opening a context,
   an attention, an optimizer or a step compares an 8-byte hash of the settings over the ranks.
   If hashes differ, a second exchange finds which setting differs (rows, layout, window, ...)
   and on which rank. A single rank exchanges nothing.

   A step allocates buffers of the same sizes as the step before. So the context caches freed
   buffers, and the next allocation of the same size takes one. Cached and used memory together
   never exceed the peak of used memory. A device with a queue (GPU) caches them itself.
   ========================================================================================== */

/* Something that must be equal on all ranks of a comm. */
typedef struct seqpar__setting {
    const char *name;
    int64_t value;
    int digest; /* 1: a hash or the bits of a double, which messages do not show */
} seqpar__setting;

static int64_t seqpar__setting_real(double x) { /* so that numbers are compared by their bits */
    int64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

static seqpar_status seqpar__ranks_differ(seqpar_comm *comm, const char *what,
                                          const seqpar__setting *settings, int64_t count) {
    int64_t *own = SEQPAR__NEW(int64_t, count), *all = NULL;
    seqpar_status status = own ? SEQPAR_OK : seqpar__no_memory(comm->error, what);
    for (int64_t i = 0; own && i < count; i++) own[i] = settings[i].value;
    if (!status) status = seqpar__gather_i64(comm, &all, own, count, what);
    for (int64_t i = count; !status && i < comm->size * count; i++) {
        const seqpar__setting *g = &settings[i % count];
        if (all[i] == all[i % count]) continue;
        if (g->digest)
            status = seqpar_fail(
                comm->error, SEQPAR_ERR_STEP,
                "%s: the %s of rank %lld are not those of rank 0; give all ranks the same",
                what, g->name, (long long)(i / count));
        else
            status = seqpar_fail(
                comm->error, SEQPAR_ERR_STEP,
                "%s: %s is %lld on rank %lld and %lld on rank 0; give all ranks the same", what,
                g->name, (long long)all[i], (long long)(i / count), (long long)all[i % count]);
    }
    SEQPAR_FREE(own);
    SEQPAR_FREE(all);
    return status;
}

/* Compares an 8-byte hash of the settings over the ranks. If it differs, a second exchange
   finds which setting differs, and on which rank. */
static seqpar_status seqpar__ranks_agree(seqpar_comm *comm, const char *what,
                                         const seqpar__setting *settings, int64_t count) {
    int64_t own = 0, *all = NULL, differ = 0;
    if (comm->size == 1) return SEQPAR_OK;
    for (int64_t i = 0; i < count; i++)
        own = (int64_t)seqpar__mix((uint64_t)own ^
                                   seqpar__mix((uint64_t)settings[i].value + (uint64_t)i));
    SEQPAR__TRY(seqpar__gather_i64(comm, &all, &own, 1, what));
    for (int64_t i = 1; i < comm->size; i++) differ |= all[i] != all[0];
    SEQPAR_FREE(all);
    return differ ? seqpar__ranks_differ(comm, what, settings, count) : SEQPAR_OK;
}

static uint64_t seqpar__digest(uint64_t digest, const void *data, int64_t bytes) {
    const char *at = (const char *)data;
    uint64_t word;
    for (digest ^= (uint64_t)bytes + (data ? 1 : 0); data && bytes > 0; bytes -= 8, at += 8) {
        word = 0;
        memcpy(&word, at, (size_t)SEQPAR__MIN(bytes, (int64_t)8));
        digest = (digest ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        digest ^= digest >> 29;
    }
    return digest;
}

static int64_t seqpar__digest_rows(const seqpar_row *rows, int64_t count) {
    uint64_t digest = 0;
    for (int64_t i = 0; i < count; i++) {
        const seqpar_row *r = &rows[i];
        const int64_t numbers[4] = {r->index, r->tokens, r->cell, r->docs};
        digest = seqpar__digest(digest, numbers, sizeof numbers);
        digest = seqpar__digest(digest, r->cu_seqlens, r->docs ? (r->docs + 1) * 8 : 0);
        digest = seqpar__digest(digest, r->prefix_lens, r->docs * 8);
        digest = seqpar__digest(digest, r->doc_source, SEQPAR__MAX(r->docs, (int64_t)1) * 8);
        digest = seqpar__digest(digest, r->ids, r->tokens * 4);
        digest = seqpar__digest(digest, r->targets, r->tokens * 4);
        digest = seqpar__digest(digest, r->position_ids, r->tokens * 4);
    }
    return (int64_t)digest;
}

/* Refuses a process whose arithmetic would give other bits. A program linked with -ffast-math
   flushes denormals in all of its code. A program may have set another rounding mode. clang's
   -ffp-contract=fast overrides the pragma at the start of the implementation. The numbers are
   volatile so that they are computed at run time, not by the compiler. */
static seqpar_status seqpar__check_arithmetic(seqpar_error *error) {
    volatile float tiny = 1.17549435e-38f, half = 0.5f;
    volatile double one = 1.0, small = 1e-30, third = 1.0 / 3.0, product = third * third;
    volatile float denormal = tiny * half;
    volatile double up = one + small, down = one - small, rest = third * third - product;
    if (!(denormal > 0))
        return seqpar_fail(error, SEQPAR_ERR_ARITHMETIC,
                           "this process flushes denormal numbers to 0, so its bits differ "
                           "from those of other processes; link without -ffast-math and "
                           "-Ofast, or clear FTZ and DAZ before a context is opened");
    if (up != one || down != one)
        return seqpar_fail(error, SEQPAR_ERR_ARITHMETIC,
                           "this process does not round to nearest; call "
                           "fesetround(FE_TONEAREST) before a context is opened");
    if (rest != 0)
        return seqpar_fail(error, SEQPAR_ERR_ARITHMETIC,
                           "this build fuses products and sums that the source keeps apart; "
                           "compile the implementation without -ffp-contract=fast");
    return SEQPAR_OK;
}

/* A user's device may lack an operation: refuse it by name, before a NULL is called. */
static seqpar_status seqpar__check_operations(seqpar_error *error, const seqpar_device *d) {
    const char *missing = NULL;
#define SEQPAR__X(op) \
    if (!d->op) missing = #op;
    SEQPAR_DEVICE_OPS(SEQPAR__X)
#undef SEQPAR__X
    return missing ? seqpar_fail(error, SEQPAR_ERR_DEVICE,
                                 "the device '%s' has no operation %s; set a function for "
                                 "every line of SEQPAR_DEVICE_OPS",
                                 d->name, missing)
                   : SEQPAR_OK;
}

/* A device holds the error pointer of the rank that claimed it. If ranks share a device by
   mistake, only one of them finds its own pointer there; the others are refused. */
static seqpar_status seqpar__check_claim(const seqpar_ctx *ctx, const seqpar_comm *world,
                                         const seqpar_device *device) {
    if (device->error != ctx->error)
        return seqpar_fail(ctx->error, SEQPAR_ERR_DEVICE,
                           "the device '%s' belongs to another context that is open; open a "
                           "device for each rank",
                           device->name);
    if (world->contexts && world->device != device)
        return seqpar_fail(ctx->error, SEQPAR_ERR_DEVICE,
                           "another context is open on this world with a device other than "
                           "'%s'; open both with one device, or close the other context first",
                           device->name);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_ctx_open(seqpar_ctx *ctx, seqpar_comm *world,
                                         seqpar_device *device, int64_t sp_size) {
    SEQPAR_NEED(NULL, "ctx, world", ctx, world);
    seqpar__setting settings[] = {
        {"sequence_parallel_size", sp_size, 0},
        {"the storage type", device ? device->storage : -1, 0},
        {"the accumulator type", device ? device->accumulator : -1, 0}};
    seqpar_status status;
    memset(ctx, 0, sizeof *ctx);
    ctx->error = world->error;
    SEQPAR__TRY(seqpar__check_arithmetic(ctx->error));
    if (sp_size <= 0)
        return seqpar_fail(ctx->error, SEQPAR_ERR_RANKS,
                           "sequence_parallel_size is %lld; give at least 1",
                           (long long)sp_size);
    if (world->size % sp_size)
        return seqpar_fail(ctx->error, SEQPAR_ERR_WORLD,
                           "world size %lld is not divisible by sequence_parallel_size %lld; "
                           "use a multiple of %lld ranks",
                           (long long)world->size, (long long)sp_size, (long long)sp_size);
    if (!device)
        return ctx->error->status ? ctx->error->status
                                  : seqpar__no_memory(ctx->error, "a device");
    SEQPAR__TRY(seqpar__check_operations(ctx->error, device));
    if (!device->contexts) device->error = ctx->error; /* claim it; checked below */
    status = seqpar__ranks_agree(world, "a context", settings, 3);
    if (!status) status = seqpar__check_claim(ctx, world, device);
    if (status) {
        if (device->error == ctx->error && !device->contexts) device->error = NULL;
        return status;
    }
    ctx->world = world;
    ctx->device = world->device = device;
    ctx->queue = device->queue;
    device->contexts++;
    world->contexts++;
    ctx->sp_size = sp_size;
    ctx->dp_size = world->size / sp_size;
    ctx->sp_rank = world->rank % sp_size;
    ctx->dp_rank = world->rank / sp_size;
    SEQPAR__TRY(seqpar_comm_split(world, ctx->dp_rank, ctx->sp_rank, &ctx->sp));
    ctx->sp->device = device;
    return SEQPAR_OK;
}

/* Frees the oldest cached buffers until at most `leave` bytes are cached. */
static void seqpar__cache_free(seqpar_ctx *ctx, int64_t leave) {
    int64_t n = 0;
    while (ctx->cached_bytes > leave) {
        ctx->device->free(ctx->device, ctx->cached[n].data);
        ctx->cached_bytes -= ctx->cached[n++].bytes;
    }
    ctx->cached_count -= n;
    for (int64_t i = 0; n && i < ctx->cached_count; i++) ctx->cached[i] = ctx->cached[i + n];
}

static void *seqpar__cache_take(seqpar_ctx *ctx, int64_t bytes) {
    int64_t i = ctx->cached_count - 1;
    void *data;
    while (i >= 0 && ctx->cached[i].bytes != bytes) i--;
    if (i < 0) return NULL;
    data = ctx->cached[i].data;
    for (ctx->cached_count--; i < ctx->cached_count; i++) ctx->cached[i] = ctx->cached[i + 1];
    ctx->cached_bytes -= bytes;
    return data;
}

SEQPAR_DEF void seqpar_ctx_close(seqpar_ctx *ctx) {
    SEQPAR_MUST("ctx", ctx);
    if (ctx->device) seqpar__cache_free(ctx, 0);
    /* keep world->device while another open context may send from device memory */
    if (ctx->world && --ctx->world->contexts == 0) ctx->world->device = NULL;
    /* wait for the last kernels, so that their error is recorded before the rank ends */
    (void)seqpar_device_settle(ctx->device, ctx->queue);
    /* release the claim: the next context may be another rank's */
    if (ctx->world && --ctx->device->contexts == 0) ctx->device->error = NULL;
    seqpar_comm_free(ctx->sp);
    ctx->sp = NULL;
}

static void seqpar__count_memory(seqpar_ctx *ctx, int kind, int64_t bytes) {
    seqpar_memory *m = &ctx->memory;
    m->now[kind] += bytes;
    m->total += kind == SEQPAR_MEM_OFFLOADED ? 0 : bytes;
    m->peak[kind] = SEQPAR__MAX(m->peak[kind], m->now[kind]);
    m->total_peak = SEQPAR__MAX(m->total_peak, m->total);
}

/* Allocates from the device's second pool. Its memory is not cached when it is freed. */
static seqpar_status seqpar__pool_new(seqpar_ctx *ctx, seqpar_buffer *buffer, int64_t bytes) {
    seqpar_device *d = ctx->device;
    if (!d->pool_alloc || !d->pool_free || !d->move || !d->moved)
        return seqpar_fail(ctx->error, SEQPAR_ERR_DEVICE,
                           "the device '%s' has no second memory pool to offload to; offload "
                           "nothing, or use a device that has one",
                           d->name);
    buffer->data = d->pool_alloc(d, bytes);
    if (!buffer->data)
        return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY,
                           "out of memory: %lld bytes to offload from device %s (%lld are "
                           "offloaded already)",
                           (long long)bytes, d->name,
                           (long long)ctx->memory.now[SEQPAR_MEM_OFFLOADED]);
    buffer->bytes = bytes;
    buffer->kind = SEQPAR_MEM_OFFLOADED;
    seqpar__count_memory(ctx, buffer->kind, bytes);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_buffer_new(seqpar_ctx *ctx, seqpar_buffer *buffer,
                                           int64_t bytes, int kind) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, buffer", ctx, buffer);
    memset(buffer, 0, sizeof *buffer);
    if (bytes <= 0) return SEQPAR_OK;
    if (kind == SEQPAR_MEM_OFFLOADED) return seqpar__pool_new(ctx, buffer, bytes);
    buffer->data = seqpar__cache_take(ctx, bytes);
    if (!buffer->data) {
        seqpar__cache_free(ctx,
                           SEQPAR__MAX(ctx->memory.total_peak - ctx->memory.total - bytes, 0));
        buffer->data = ctx->device->alloc(ctx->device, bytes);
    }
    if (!buffer->data)
        return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY,
                           "out of memory: %lld bytes on device %s (%lld in use)",
                           (long long)bytes, ctx->device->name, (long long)ctx->memory.total);
    buffer->bytes = bytes;
    buffer->kind = kind;
    seqpar__count_memory(ctx, kind, bytes);
    return SEQPAR_OK;
}

SEQPAR_DEF void seqpar_buffer_free(seqpar_ctx *ctx, seqpar_buffer *buffer) {
    SEQPAR_MUST("ctx, buffer", ctx, buffer);
    if (!buffer->data) return;
    if (buffer->kind == SEQPAR_MEM_OFFLOADED)
        ctx->device->pool_free(ctx->device, buffer->data, buffer->bytes);
    /* a device with a queue caches buffers itself: it knows which ones a graph still uses */
    else if (ctx->queue)
        ctx->device->free(ctx->device, buffer->data);
    else {
        if (ctx->cached_count == SEQPAR_CACHED_BUFFERS)
            seqpar__cache_free(ctx, ctx->cached_bytes - 1);
        ctx->cached[ctx->cached_count].data = buffer->data;
        ctx->cached[ctx->cached_count++].bytes = buffer->bytes;
        ctx->cached_bytes += buffer->bytes;
    }
    seqpar__count_memory(ctx, buffer->kind, -buffer->bytes);
    memset(buffer, 0, sizeof *buffer);
}

static void *seqpar__at(const void *base, int64_t element, int dtype) {
    return (char *)base + element * seqpar_dtype_bytes(dtype);
}

static void *seqpar__at_or_null(const void *base, int64_t element, int dtype) {
    return base ? seqpar__at(base, element, dtype) : NULL;
}

/* =============================================================================================
   >>plan  schedules as lists of operations

   A plan lists the operations of one rank in an attention: begin an exchange, wait for it,
   compute with the keys of one source, send gradients back. A schedule is a function that
   writes plans. One executor (>>exec) runs all of them. A checker (verify/seqpar_check.h)
   simulates the plans of all ranks. It refuses a block that is missing or computed twice, a
   slot that is read before its message has arrived, and a message that no rank receives.

   The forward plan of rank 0 of 3 in a ring that runs upwards, from rank r to r + 1:

       SHIFT    slot 0 to rank 1, slot 1 from rank 2      slot 0: keys of rank 0
       COMPUTE  own queries x slot 0, keys of rank 0      meanwhile the bytes travel
       WAIT
       SHIFT    slot 1 to rank 1, slot 2 from rank 2
       COMPUTE  own queries x slot 1, keys of rank 2
       WAIT
       COMPUTE  own queries x slot 2, keys of rank 1

   In backward, RETURN follows each COMPUTE with another rank's keys. It sends the nodes of dk
   and dv that this rank computed for these keys straight to their owner. FOLD waits for the
   nodes that other ranks return to this one, and sums them.

   SP ranks are a grid of positions and members. Members exchange tokens for heads (Ulysses);
   positions pass keys round (ring) or gather them (llama3). 2D is both.

   In a ring, a rank sends keys on only if some rank further along the ring sees them. All ranks
   know the mask, so sender and receiver agree. The direction matters. Under a causal mask the
   ranks below a zigzag rank need all of its keys; the ranks above it need only the early half.
   A ring that runs downwards, from rank r to r - 1, reaches the ranks below first, and the late
   half stops at position 0: a quarter of all bytes is never sent. Contiguous and stripe run
   upwards. With contiguous, a causal mask then saves half of the bytes; a window saves more.
   ========================================================================================== */

SEQPAR_DEF const char *seqpar_schedule_name(int schedule) {
#define SEQPAR__X(name, text, members, strided, arrivals, plan) text,
    static const char *const names[] = {SEQPAR_SCHEDULES(SEQPAR__X)};
#undef SEQPAR__X
    return schedule >= 0 && schedule < SEQPAR_SCHEDULE_COUNT ? names[schedule] : "?";
}

static seqpar_plan_op *seqpar__plan_add(seqpar_plan *plan, int op) {
    seqpar_plan_op *o = &plan->ops[plan->count++];
    memset(o, 0, sizeof *o);
    o->op = op;
    o->sources = 1;
    o->send_to = o->recv_from = -1;
    return o;
}

/* Adds the FOLD of the dk and dv that arrive by the RETURN of ring step s. */
static void seqpar__plan_fold(seqpar_plan *plan, int64_t s) {
    seqpar_plan_op *o = seqpar__plan_add(plan, SEQPAR_PLAN_FOLD);
    o->request = (int32_t)(plan->ring_size + s);
    o->buffer = (int32_t)(s % 2);
}

/* Request numbers, here and in seqpar__plan_llama3: SHIFT or GATHER of step s is s, its RETURN
   is steps + s. In a ring, steps is ring_size. */
static void seqpar__plan_ring(seqpar_plan *plan, int64_t kv_heads, int64_t stride) {
    int64_t size = plan->ring_size, rank = plan->position, on = plan->next, back = size - on;
    int64_t first = plan->count;
    seqpar_plan_op *o;
    (void)stride;                   /* all kv heads travel together */
    plan->slots = size > 1 ? 3 : 1; /* this rank's k, v; a double buffer */
    plan->requests = 2 * size;
    for (int64_t s = 0; s < size; s++) {
        int32_t here = (int32_t)(s ? 1 + (s - 1) % 2 : 0), next = (int32_t)(1 + s % 2);
        if (s + 1 < size) {
            o = seqpar__plan_add(plan, SEQPAR_PLAN_SHIFT);
            o->request = (int32_t)s;
            o->from = here;
            o->to = next;
            o->send_to = (rank + on) % size;
            o->recv_from = (rank + back) % size;
            o->source = (rank + s * back) % size;
        }
        o = seqpar__plan_add(plan, SEQPAR_PLAN_COMPUTE);
        o->from = here;
        o->source = (rank + s * back) % size;
        o->buffer = (int32_t)(s % 2);
        if (plan->backward && s > 1) seqpar__plan_fold(plan, s - 1);
        if (plan->backward && s > 0) {
            o = seqpar__plan_add(plan, SEQPAR_PLAN_RETURN);
            o->request = (int32_t)(size + s);
            o->buffer = (int32_t)(s % 2);
            o->send_to = (rank + s * back) % size;
            o->recv_from = (rank + s * on) % size;
        }
        if (s + 1 < size) seqpar__plan_add(plan, SEQPAR_PLAN_WAIT)->request = (int32_t)s;
    }
    if (plan->backward && size > 1) seqpar__plan_fold(plan, size - 1);
    for (; first < plan->count; first++) plan->ops[first].head_count = kv_heads;
}

static seqpar_plan_op *seqpar__plan_add_range(seqpar_plan *plan, int op, int64_t stride_index,
                                              int64_t stride, int64_t request) {
    seqpar_plan_op *o = seqpar__plan_add(plan, op);
    o->head_begin = stride_index * stride;
    o->head_count = stride;
    o->from = o->to = o->buffer = (int32_t)(stride_index % 2);
    o->request = (int32_t)request;
    o->sources = plan->ring_size;
    return o;
}

static void seqpar__plan_llama3(seqpar_plan *plan, int64_t kv_heads, int64_t stride) {
    int64_t steps = kv_heads / stride;
    if (plan->ring_size == 1) {
        seqpar__plan_ring(plan, kv_heads, stride);
        return;
    }
    plan->slots = 2;
    plan->requests = 2 * steps;
    seqpar__plan_add_range(plan, SEQPAR_PLAN_COPY, 0, stride, 0);
    seqpar__plan_add_range(plan, SEQPAR_PLAN_GATHER, 0, stride, 0);
    for (int64_t g = 0; g < steps; g++) {
        seqpar__plan_add_range(plan, SEQPAR_PLAN_WAIT, g, stride, g);
        if (g + 1 < steps) { /* the next heads travel while these are computed */
            seqpar__plan_add_range(plan, SEQPAR_PLAN_COPY, g + 1, stride, g + 1);
            seqpar__plan_add_range(plan, SEQPAR_PLAN_GATHER, g + 1, stride, g + 1);
        }
        seqpar__plan_add_range(plan, SEQPAR_PLAN_COMPUTE, g, stride, g);
        if (!plan->backward) continue;
        if (g > 0) seqpar__plan_add_range(plan, SEQPAR_PLAN_FOLD, g - 1, stride, steps + g - 1);
        seqpar__plan_add_range(plan, SEQPAR_PLAN_RETURN, g, stride, steps + g);
    }
    if (plan->backward)
        seqpar__plan_add_range(plan, SEQPAR_PLAN_FOLD, steps - 1, stride, 2 * steps - 1);
}

/* A line of SEQPAR_SCHEDULES (>>calls), which explains the fields. */
typedef struct seqpar__schedule {
    int members, strided, arrivals;
    void (*plan)(seqpar_plan *plan, int64_t kv_heads, int64_t stride);
} seqpar__schedule;

static const seqpar__schedule seqpar__schedules[] = {
#define SEQPAR__X(name, text, members, strided, arrivals, how) \
    {members, strided, arrivals, seqpar__plan_##how},
    SEQPAR_SCHEDULES(SEQPAR__X)
#undef SEQPAR__X
};

static int64_t seqpar__gcd(int64_t a, int64_t b) {
    while (b) {
        int64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

/* Returns the number of kv heads of a member, and sets *begin to the first of them. */
static int64_t seqpar__member_kv(const seqpar_plan *plan, int64_t kv_heads, int64_t member,
                                 int64_t *begin) {
    int64_t members = plan->ulysses_size;
    *begin = member * kv_heads / members;
    return plan->replicate ? 1 : (member + 1) * kv_heads / members - *begin;
}

/* Sets the grid of positions and members, the direction of the ring, and the kv heads of this
   member. */
static seqpar_status seqpar__plan_grid(seqpar_error *error, seqpar_plan *plan,
                                       const seqpar_plan_desc *d) {
    int enough = d->kv_heads >= d->sp_size || d->ulysses_replicate;
    int64_t u = d->ulysses_size;
    if (!u && !seqpar__schedules[d->schedule].members) u = 1;
    if (!u) u = enough ? d->sp_size : seqpar__gcd(d->sp_size, d->kv_heads);
    if (u < 0 || d->sp_size % u)
        return seqpar_fail(
            error, SEQPAR_ERR_ULYSSES,
            "ulysses_size %lld does not divide sequence_parallel_size %lld; use a divisor",
            (long long)u, (long long)d->sp_size);
    if (u > d->kv_heads && !d->ulysses_replicate)
        return seqpar_fail(error, SEQPAR_ERR_ULYSSES,
                           "ulysses_size %lld is more than the %lld kv_heads; use at most "
                           "%lld (positions then form a ring), or ulysses_replicate",
                           (long long)u, (long long)d->kv_heads,
                           (long long)seqpar__gcd(d->sp_size, d->kv_heads));
    if (u > d->kv_heads && u % d->kv_heads)
        return seqpar_fail(error, SEQPAR_ERR_ULYSSES,
                           "ulysses_size %lld is no multiple of the %lld kv_heads; "
                           "ulysses_replicate needs a multiple",
                           (long long)u, (long long)d->kv_heads);
    plan->ulysses_size = u;
    plan->member = d->sp_rank % u;
    plan->ring_size = d->sp_size / u;
    plan->position = d->sp_rank / u;
    plan->next = d->down && plan->ring_size > 1 ? plan->ring_size - 1 : 1;
    plan->replicate = u > d->kv_heads;
    plan->kv_count = seqpar__member_kv(plan, d->kv_heads, plan->member, &plan->kv_begin);
    return SEQPAR_OK;
}

static seqpar_status seqpar__check_plan(seqpar_error *error, const seqpar_plan_desc *d) {
    char names[160];
    if (d->sp_size <= 0)
        return seqpar_fail(error, SEQPAR_ERR_RANKS,
                           "sequence_parallel_size is %lld; give at least 1",
                           (long long)d->sp_size);
    if (d->sp_rank < 0 || d->sp_rank >= d->sp_size)
        return seqpar_fail(error, SEQPAR_ERR_RANK,
                           "sp_rank is %lld; with sequence_parallel_size %lld give 0 to %lld",
                           (long long)d->sp_rank, (long long)d->sp_size,
                           (long long)d->sp_size - 1);
    if (d->kv_heads <= 0)
        return seqpar_fail(error, SEQPAR_ERR_HEADS, "kv_heads is %lld; give at least 1",
                           (long long)d->kv_heads);
    if (d->schedule < 0 || d->schedule >= SEQPAR_SCHEDULE_COUNT)
        return seqpar_fail(
            error, SEQPAR_ERR_SCHEDULE, "schedule %d is unknown; use %s", d->schedule,
            seqpar__choices(names, sizeof names, seqpar_schedule_name, SEQPAR_SCHEDULE_COUNT));
    return SEQPAR_OK;
}

/* heads_k_stride must divide the number of kv heads of every member. Each rank checks all
   members, so that all ranks refuse alike. */
static seqpar_status seqpar__check_stride(seqpar_error *error, const seqpar_plan *plan,
                                          const seqpar_plan_desc *d, int64_t stride) {
    for (int64_t m = 0; m < plan->ulysses_size; m++) {
        int64_t begin, heads = seqpar__member_kv(plan, d->kv_heads, m, &begin);
        if (stride > 0 && heads % stride == 0) continue;
        return seqpar_fail(error, SEQPAR_ERR_HEAD_STRIDE,
                           "heads_k_stride %lld does not divide kv_heads %lld%s; use a divisor",
                           (long long)stride, (long long)heads,
                           plan->ulysses_size > 1 ? " of a member of the Ulysses group" : "");
    }
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_plan_make(seqpar_error *error, seqpar_plan *plan,
                                          const seqpar_plan_desc *desc) {
    SEQPAR_NEED(error, "plan, desc", plan, desc);
    int64_t stride = desc->heads_k_stride ? desc->heads_k_stride : 1;
    memset(plan, 0, sizeof *plan);
    SEQPAR__TRY(seqpar__check_plan(error, desc));
    SEQPAR__TRY(seqpar__plan_grid(error, plan, desc));
    if (seqpar__schedules[desc->schedule].strided || plan->ulysses_size == 1)
        SEQPAR__TRY(seqpar__check_stride(error, plan, desc, stride));
    plan->sp_size = desc->sp_size;
    plan->sp_rank = desc->sp_rank;
    plan->backward = desc->backward;
    plan->ops = SEQPAR__NEW(seqpar_plan_op, 8 * (plan->ring_size + plan->kv_count) + 16);
    if (!plan->ops) return seqpar__no_memory(error, "a plan");
    if (plan->ulysses_size > 1) {
        seqpar__plan_add(plan, SEQPAR_PLAN_HEADS);
        seqpar__plan_add(plan, SEQPAR_PLAN_WAIT);
    }
    seqpar__schedules[desc->schedule].plan(plan, plan->kv_count, stride);
    if (plan->ulysses_size > 1) { /* requests of HEADS and TOKENS follow the ring's */
        plan->ops[0].request = plan->ops[1].request = (int32_t)plan->requests++;
        seqpar__plan_add(plan, SEQPAR_PLAN_TOKENS)->request = (int32_t)plan->requests;
        seqpar__plan_add(plan, SEQPAR_PLAN_WAIT)->request = (int32_t)plan->requests++;
        seqpar__plan_add(plan, SEQPAR_PLAN_PLACE);
    }
    return SEQPAR_OK;
}

SEQPAR_DEF void seqpar_plan_free(seqpar_plan *plan) {
    SEQPAR_MUST("plan", plan);
    SEQPAR_FREE(plan->ops);
    memset(plan, 0, sizeof *plan);
}

/* =============================================================================================
   >>attn  attention over ranks: overview and structures

   These chapters compute attention and its gradients. This rank's queries attend to all keys
   that they see; any rank may hold these keys. seqpar_attn_open prepares masks, sums and
   messages on the host. Forward and backward then run a plan (>>plan), which only moves bytes
   and calls the device.

       >>sight     which queries see which keys, and so which keys travel
       >>program   what each rank adds, and in which order
       >>exec      the plan is executed: ring and llama3
       >>kernel    an attention kernel written by the user replaces the device's
       >>ulysses   tokens for heads, and back
       >>call      open, forward, backward

   Sums. A block is a query piece x a key piece. Three sums run over blocks. Each is a fold
   (>>fold). Its leaves are the blocks in which the mask lets some query see some key:

       forward    of a query piece, over key pieces: the states m, l, o of an online softmax
                  (highest score; sum of exp(score - m); sum of exp(score - m) v)
       dQ         of a query piece, over key pieces
       dK, dV     of a key piece, over query pieces

   Positions. If Ulysses is used, a ring or llama3 runs over positions, not ranks. A position
   is a set of ranks, its members. Together they hold its tokens; each computes some of the
   heads for all of these tokens. Without Ulysses, a position is one rank.

   seqpar_attn_desc.relaxed selects the baseline for speed: the usual ring attention, on the
   same kernels. Each query has one running state. The keys of each source are added to it as
   they arrive, in tiles that ignore cells. The result satisfies the error rule. Equal bits take
   a few per cent more time than this baseline, with cells of at least 96 tokens (make bench).
   ========================================================================================== */

/* [begin, end): token positions that a piece's queries see, or rows of a share. */
typedef struct seqpar__bounds {
    int64_t begin, end;
} seqpar__bounds;

typedef struct seqpar__tasks { /* of one device call */
    seqpar_attn_task *task;
    int64_t count;
    seqpar_piece *pieces; /* pieces of the tasks; for dk, dv the query pieces follow */
    seqpar_attn_keys *keys;
} seqpar__tasks;

/* A compute step: the tasks of a COMPUTE, with the keys of some sources. They are the same for
   every range of heads. */
typedef struct seqpar__attn_step {
    int64_t source, sources;
    seqpar__tasks queries;  /* forward and dq */
    seqpar__tasks own;      /* dk, dv of own keys, into pending */
    seqpar__tasks *foreign; /* (sources) dk, dv of others' keys, into the outbox */
} seqpar__attn_step;

/* For a user's kernel: the pieces in rows [begin, begin + tokens) of a share, with neighbours
   joined. pairs: the number of pairs (q, k) where q is a query of this position, k is a key in
   these pieces, and q sees k. */
typedef struct seqpar__joined {
    seqpar_piece *pieces;
    int64_t count, begin, tokens, pairs;
} seqpar__joined;

struct seqpar_attn {
    seqpar_attn_desc desc;               /* of the whole call */
    int64_t size, position;              /* positions of the ring; this rank's position */
    int64_t heads, kv_heads, head_begin; /* of this member; head_begin: its first query head */
    /* requests of the backward plan, without HEADS and TOKENS; the second half are RETURNs */
    int64_t ring_requests;
    /* (ulysses_size) shares of the position's members; parts[member] is this rank's */
    seqpar_share *parts;
    /* (ulysses_size + 1) first row of each member's tokens in the buffer that HEADS fills */
    int64_t *part_begin;
    const seqpar_row *rows;
    int64_t row_count;
    seqpar_share *shares;      /* (size) share of each position: tokens of all members */
    seqpar__bounds **bounds;   /* (size) of each share's pieces */
    int64_t total;             /* pieces of all positions */
    seqpar__sorted_key *order; /* (total) those pieces, in order of leaves */
    int64_t *leaves;           /* (total) their leaves */
    /* (size + 1) first row of a position's keys in a slot that holds the keys of all */
    int64_t *slot_row;
    /* (size) ring, for each position's keys: the rows received here; the rows sent from here */
    seqpar__bounds *recv_rows, *send_rows;
    seqpar_plan forward, backward;
    seqpar__attn_step *steps;
    int64_t step_count, *step_of; /* (size) by position: the step that computes with its keys */
    seqpar__tasks *returns; /* (size) fold the dk, dv that position q returns to this one */
    /* (size) rows of dk and dv that are received from position q; that are sent to it. A row is
       head_dim elements of each head */
    int64_t *return_rows, *outbox_rows;
    /* slots in `store` for each query piece; slots in `pending` (>>exec) for each key piece */
    int64_t query_slots, key_slots;
    int64_t depth; /* of the stack that programs need */
    int32_t *visible_begin, *visible_end;
    /* (size + 1) user's kernel: each source's keys; last, this position's queries */
    seqpar__joined *runs;
    seqpar_fold_op *free_ops; /* where the next program is written */
    int64_t free_op_count;
    void *lists; /* the memory that seqpar__list_free frees, all at once */
};

/* Whether one step has the keys of all positions (llama3). In a ring each step has the keys of
   one position. */
static int seqpar__gathers(const seqpar_attn *attn) { return attn->steps[0].sources > 1; }

SEQPAR_DEF const seqpar_share *seqpar_attn_share(const seqpar_attn *attn) {
    SEQPAR_MUST("attn", attn);
    return &attn->parts[attn->forward.member];
}

/* =============================================================================================
   >>sight  which queries see which keys

   A query sees the keys in one range of token positions of its row, [begin, end). The range
   lies in the query's document. A window limits how far back it goes, a prefix extends it
   ahead. Softcap changes scores. A sink is one more score, added when a query's sum is
   finished. Dropout is drawn by (document, head, query, key). None of them depends on ranks, so
   all layouts and schedules support all of them.

   Three things follow from these ranges: which pieces see which (seqpar__sight), how far rows
   of keys travel in a ring, and which rows of each source a user's kernel gets. An example:

       pieces in order of leaves   0  1  2  3  4  5        causal, window of two pieces
       keys of query piece 4             2  3  4           each is one range of numbers
       queries of key piece 2            2  3  4
   ========================================================================================== */

static int64_t seqpar__document_of(const seqpar_row *row, int64_t token) {
    /* last document that begins at or before the token and is not empty */
    int64_t low = 0, high = row->docs;
    while (high - low > 1) {
        int64_t mid = (low + high) / 2;
        if (row->cu_seqlens[mid] <= token)
            low = mid;
        else
            high = mid;
    }
    return low;
}

/* The range that a token sees. If the mask is full, a window also limits how far ahead. */
static void seqpar__token_visible(const seqpar_row *row, int64_t token,
                                  const seqpar_attn_desc *mask, int64_t *begin, int64_t *end) {
    int64_t d = seqpar__document_of(row, token);
    int64_t doc_begin = row->docs ? row->cu_seqlens[d] : 0;
    int64_t doc_end = row->docs ? row->cu_seqlens[d + 1] : row->tokens;
    *begin = doc_begin;
    *end = mask->full ? doc_end : token + 1;
    if (row->prefix_lens && row->docs && !mask->full)
        *end = SEQPAR__MAX(*end, doc_begin + row->prefix_lens[d]);
    if (mask->window) *begin = SEQPAR__MAX(*begin, token - mask->window + 1);
    if (mask->window && mask->full) *end = SEQPAR__MIN(*end, token + mask->window);
}

/* Later tokens have ranges that begin and end no earlier. So a piece's range begins where its
   first token's range begins, and ends where its last token's range ends. */
static seqpar__bounds seqpar__piece_bounds(const seqpar_row *row, const seqpar_piece *p,
                                           const seqpar_attn_desc *mask) {
    seqpar__bounds b;
    int64_t unused;
    seqpar__token_visible(row, p->start, mask, &b.begin, &unused);
    seqpar__token_visible(row, p->start + (p->count - 1) * p->stride, mask, &unused, &b.end);
    return b;
}

static int seqpar__by_number(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static const seqpar_piece *seqpar__ordered_piece(const seqpar_attn *attn, int64_t i) {
    return &attn->shares[attn->order[i].source].pieces[attn->order[i].piece];
}

/* Piece numbers [begin, end), as seqpar__sight explains. */
typedef struct seqpar__range {
    int32_t begin, end;
} seqpar__range;

/* First and last token of a piece, and the range it sees; tokens are counted through all
   rows. */
typedef struct seqpar__view {
    int64_t first, last, begin, end;
} seqpar__view;

/* Which pieces see which. The pieces of all positions are numbered in order of leaves. In that
   order the first and last token of a piece rise, and so do both ends of the range that it
   sees, except within a cell dealt by stripe. So the pieces that a piece sees, or that see it,
   lie in one range of numbers. Two binary searches find it, over running maxima from the first
   piece and running minima from the last piece, which are monotone for every layout. If the
   values themselves are not monotone, the range is a superset; test each piece with
   seqpar__sees(). */
typedef struct seqpar__sight {
    const seqpar_attn *attn;
    int exact;          /* all of view is monotone: each piece of a range is seen */
    seqpar__view *view; /* (total) */
    /* (total) ranges that hold all keys a query piece sees, all queries that see a key piece */
    seqpar__range *keys, *queries;
    /* number of piece i of position s: number[begin[s] + i] */
    int64_t *begin;  /* (size + 1) */
    int32_t *number; /* (total) */
} seqpar__sight;

/* Whether a query piece sees a key piece of its range. */
static int seqpar__sees(const seqpar__sight *s, int64_t query, int64_t key) {
    SEQPAR__WORK(1);
    if (s->exact) return 1;
    return s->view[query].end > s->view[key].first && s->view[query].begin <= s->view[key].last;
}

static void seqpar__sight_close(seqpar__sight *s) {
    SEQPAR_FREE(s->view);
    SEQPAR_FREE(s->keys);
    SEQPAR_FREE(s->begin);
    SEQPAR_FREE(s->number);
}

static void seqpar__sight_views(seqpar__sight *s) {
    const seqpar_attn *attn = s->attn;
    int64_t row = 0, row_begin = 0;
    s->exact = 1;
    for (int64_t i = 0; i < attn->total; i++) {
        const seqpar_piece *p = seqpar__ordered_piece(attn, i);
        const seqpar__bounds *b = &attn->bounds[attn->order[i].source][attn->order[i].piece];
        while (row < p->row) row_begin += attn->rows[row++].tokens;
        s->view[i].first = row_begin + p->start;
        s->view[i].last = row_begin + p->start + (p->count - 1) * p->stride;
        s->view[i].begin = row_begin + b->begin;
        s->view[i].end = row_begin + b->end;
        s->exact &= !i || (s->view[i].first >= s->view[i - 1].first &&
                           s->view[i].last >= s->view[i - 1].last &&
                           s->view[i].begin >= s->view[i - 1].begin &&
                           s->view[i].end >= s->view[i - 1].end);
    }
}

/* numbers (4, total): scratch for the four monotone lists that are searched. */
static void seqpar__sight_ranges(seqpar__sight *s, int64_t *numbers) {
    int64_t n = s->attn->total, *first = numbers, *last = first + n, *begin = last + n;
    int64_t *end = begin + n, near[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < n; i++) {
        last[i] = i ? SEQPAR__MAX(last[i - 1], s->view[i].last) : s->view[i].last;
        end[i] = i ? SEQPAR__MAX(end[i - 1], s->view[i].end) : s->view[i].end;
    }
    for (int64_t i = n; i-- > 0;) {
        first[i] = i + 1 < n ? SEQPAR__MIN(first[i + 1], s->view[i].first) : s->view[i].first;
        begin[i] = i + 1 < n ? SEQPAR__MIN(begin[i + 1], s->view[i].begin) : s->view[i].begin;
    }
    for (int64_t i = 0; i < n; i++) {
        s->keys[i].begin = (int32_t)(near[0] = seqpar__seek(last, n, near[0],
                                                            s->view[i].begin));
        s->keys[i].end = (int32_t)(near[1] = seqpar__seek(first, n, near[1], s->view[i].end));
        s->queries[i].begin = (int32_t)(near[2] = seqpar__seek(end, n, near[2],
                                                               s->view[i].first + 1));
        s->queries[i].end = (int32_t)(near[3] = seqpar__seek(begin, n, near[3],
                                                             s->view[i].last + 1));
    }
    SEQPAR__WORK(4 * n);
}

static seqpar_status seqpar__sight_open(seqpar__sight *s, const seqpar_attn *attn) {
    int64_t *numbers = SEQPAR__NEW(int64_t, 4 * attn->total);
    memset(s, 0, sizeof *s);
    s->attn = attn;
    s->view = SEQPAR__NEW(seqpar__view, attn->total);
    s->keys = SEQPAR__NEW(seqpar__range, 2 * attn->total);
    s->begin = SEQPAR__NEW(int64_t, attn->size + 1);
    s->number = SEQPAR__NEW(int32_t, attn->total);
    if (!numbers || !s->view || !s->keys || !s->begin || !s->number) {
        SEQPAR_FREE(numbers);
        return SEQPAR_ERR_MEMORY;
    }
    for (int64_t i = 0; i < attn->size; i++)
        s->begin[i + 1] = s->begin[i] + attn->shares[i].count;
    for (int64_t i = 0; i < attn->total; i++)
        s->number[s->begin[attn->order[i].source] + attn->order[i].piece] = (int32_t)i;
    s->queries = s->keys + attn->total;
    seqpar__sight_views(s);
    seqpar__sight_ranges(s, numbers);
    SEQPAR_FREE(numbers);
    return SEQPAR_OK;
}

static seqpar_status seqpar__attn_visible(seqpar_attn *attn) {
    const seqpar_share *mine = &attn->shares[attn->position];
    int64_t begin, end;
    attn->visible_begin = (int32_t *)seqpar__list_calloc(&attn->lists, mine->tokens * 4);
    attn->visible_end = (int32_t *)seqpar__list_calloc(&attn->lists, mine->tokens * 4);
    if (!attn->visible_begin || !attn->visible_end) return SEQPAR_ERR_MEMORY;
    for (int64_t i = 0; i < mine->count; i++)
        for (int64_t t = 0; t < mine->pieces[i].count; t++) {
            seqpar__token_visible(&attn->rows[mine->pieces[i].row],
                                  mine->pieces[i].start + t * mine->pieces[i].stride,
                                  &attn->desc, &begin, &end);
            attn->visible_begin[mine->pieces[i].local + t] = (int32_t)begin;
            attn->visible_end[mine->pieces[i].local + t] = (int32_t)end;
        }
    return SEQPAR_OK;
}

/* Lists the share's pieces that lie inside `rows`, counts their rows from rows.begin, and joins
   those that are neighbours in the row and in memory. */
static int seqpar__join_pieces(seqpar_attn *attn, seqpar__joined *runs,
                               const seqpar_share *share, seqpar__bounds rows) {
    seqpar_piece *last = NULL;
    runs->begin = rows.begin;
    runs->tokens = SEQPAR__MAX(rows.end - rows.begin, (int64_t)0);
    runs->pieces = (seqpar_piece *)seqpar__list_malloc(
        &attn->lists, share->count * (int64_t)sizeof *runs->pieces);
    for (int64_t i = 0; runs->pieces && i < share->count; i++) {
        seqpar_piece p = share->pieces[i];
        if (p.local < rows.begin || p.local + p.count > rows.end) continue;
        p.local -= rows.begin;
        if (last && last->row == p.row && last->stride == p.stride &&
            last->local + last->count == p.local &&
            last->start + last->count * last->stride == p.start)
            last->count += p.count;
        else
            *(last = &runs->pieces[runs->count++]) = p;
    }
    return runs->pieces != NULL;
}

/* Counts how many of this position's queries see each token. The counts of row r begin at
   seen[seen[r]]. Each query adds 1 where its range begins and subtracts 1 where it ends; the
   prefix sums are the counts. Each row has one count more than it has tokens: ranges that end
   with the row subtract there, and the count is 0. */
static int64_t *seqpar__attn_seen(const seqpar_attn *attn) {
    const seqpar_share *mine = &attn->shares[attn->position];
    int64_t size = attn->row_count, i, *seen;
    for (i = 0; i < attn->row_count; i++) size += attn->rows[i].tokens + 1;
    seen = SEQPAR__NEW(int64_t, size);
    if (!seen) return NULL;
    for (size = attn->row_count, i = 0; i < attn->row_count; size += attn->rows[i++].tokens + 1)
        seen[i] = size;
    for (i = 0; i < mine->count; i++)
        for (int64_t t = mine->pieces[i].local;
             t < mine->pieces[i].local + mine->pieces[i].count; t++) {
            int64_t *row = seen + seen[mine->pieces[i].row];
            if (attn->visible_begin[t] >= attn->visible_end[t]) continue;
            row[attn->visible_begin[t]]++;
            row[attn->visible_end[t]]--;
        }
    for (i = attn->row_count + 1; i < size; i++) seen[i] += seen[i - 1];
    return seen;
}

/* Counts the pairs of a query of this position and a key of the share that the query sees. */
static int64_t seqpar__pairs(const int64_t *seen, const seqpar_share *share) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < share->count; i++) {
        const seqpar_piece *p = &share->pieces[i];
        for (int64_t t = 0; t < p->count; t++)
            pairs += seen[seen[p->row] + p->start + t * p->stride];
    }
    return pairs;
}

/* Lists the pieces of each source that a user's kernel gets. In a ring these are only the
   pieces in the rows that this position receives. */
static seqpar_status seqpar__attn_sources(seqpar_attn *attn) {
    int64_t *seen = seqpar__attn_seen(attn), ok = seen != NULL;
    attn->runs = (seqpar__joined *)seqpar__list_calloc(
        &attn->lists, (attn->size + 1) * (int64_t)sizeof *attn->runs);
    for (int64_t i = 0; ok && attn->runs && i <= attn->size; i++) {
        int64_t s = i < attn->size ? i : attn->position;
        seqpar__bounds rows = {0, attn->shares[s].tokens};
        if (s != attn->position && !seqpar__gathers(attn)) rows = attn->recv_rows[s];
        ok = seqpar__join_pieces(attn, &attn->runs[i], &attn->shares[s], rows);
        attn->runs[i].pairs = seqpar__pairs(seen, &attn->shares[s]);
    }
    SEQPAR_FREE(seen);
    return ok && attn->runs ? SEQPAR_OK : SEQPAR_ERR_MEMORY;
}

static int seqpar__by_leaf(const void *a, const void *b) {
    int64_t x = ((const seqpar_piece *)a)->leaf, y = ((const seqpar_piece *)b)->leaf;
    return x < y ? -1 : x > y;
}

/* Relaxed: joins pieces of a document that are neighbours in the row and in memory, and cuts
   the result into tiles of at most SEQPAR__RELAXED_TILE tokens. A tile's leaf number is made of
   its row and its first token. */
#ifndef SEQPAR__RELAXED_TILE
#define SEQPAR__RELAXED_TILE 128
#endif
static seqpar_status seqpar__relaxed_tiles(seqpar_share *share) {
    seqpar_share cut;
    int64_t capacity = 0;
    memset(&cut, 0, sizeof cut);
    for (int64_t i = 0; i < share->count; i++) {
        seqpar_piece run = share->pieces[i], tile;
        const seqpar_piece *next = &share->pieces[i + 1];
        for (; i + 1 < share->count && next->row == run.row && next->stride == run.stride &&
               next->start == run.start + run.count * run.stride &&
               next->local == run.local + run.count && next->document == run.document;
             i++)
            run.count += next++->count;
        for (int64_t at = 0; at < run.count; at += SEQPAR__RELAXED_TILE) {
            tile = run;
            tile.start += at * run.stride;
            tile.count = SEQPAR__MIN((int64_t)SEQPAR__RELAXED_TILE, run.count - at);
            tile.leaf = (tile.row << SEQPAR__CELL_BITS) + tile.start;
            if (!seqpar__share_add(&cut, &capacity, tile)) {
                SEQPAR_FREE(cut.pieces);
                return SEQPAR_ERR_MEMORY;
            }
            cut.pieces[cut.count - 1].local = run.local + at;
        }
    }
    SEQPAR_FREE(share->pieces);
    share->pieces = cut.pieces;
    share->count = cut.count;
    return SEQPAR_OK;
}

/* Makes the shares of positions from those of ranks. In memory, a position's tokens lie member
   after member; its pieces are listed in order of leaves. attn->order then refers to positions
   and their pieces. begin (ranks): the first row of a rank's tokens in its position. */
static seqpar_status seqpar__position_shares(seqpar_attn *attn, seqpar_share *ranks,
                                             int64_t *begin) {
    int64_t members = attn->forward.ulysses_size;
    for (int64_t r = 0; r < attn->size; r++) {
        seqpar_share *whole = &attn->shares[r];
        int64_t count = 0;
        for (int64_t m = r * members; m < (r + 1) * members; m++) {
            begin[m] = whole->tokens;
            whole->tokens += ranks[m].tokens;
            count += ranks[m].count;
        }
        attn->total += count;
        if (members == 1 && r != attn->position) {
            *whole = ranks[r];
            memset(&ranks[r], 0, sizeof ranks[r]);
        } else if (!(whole->pieces = SEQPAR__NEW(seqpar_piece, count)))
            return SEQPAR_ERR_MEMORY;
    }
    for (int64_t i = 0; i < attn->total; i++) {
        seqpar__sorted_key *key = &attn->order[i];
        const seqpar_share *part = &ranks[key->source];
        seqpar_share *whole = &attn->shares[key->source / members];
        if (part->count) { /* else the loop above has moved the whole share */
            whole->pieces[whole->count] = part->pieces[key->piece];
            whole->pieces[whole->count].local += begin[key->source];
            key->piece = (int32_t)whole->count++;
        }
        key->source /= (int32_t)members;
    }
    for (int64_t m = 0; m < members; m++) {
        attn->parts[m] = ranks[attn->position * members + m];
        attn->part_begin[m + 1] = attn->part_begin[m] + attn->parts[m].tokens;
        memset(&ranks[attn->position * members + m], 0, sizeof *ranks);
    }
    SEQPAR__WORK(attn->total + attn->forward.sp_size);
    return SEQPAR_OK;
}

/* Relaxed: tiles replace pieces. They must be sorted by leaf: with stripe, the first tokens of
   a position's members may be out of order. */
static seqpar_status seqpar__relaxed_shares(seqpar_attn *attn) {
    int64_t s, n = 0;
    for (attn->total = s = 0; s < attn->size; s++) {
        seqpar_share *share = &attn->shares[s];
        SEQPAR__TRY(seqpar__relaxed_tiles(share));
        if (share->count)
            qsort(share->pieces, (size_t)share->count, sizeof *share->pieces, seqpar__by_leaf);
        attn->total += share->count;
    }
    SEQPAR_FREE(attn->order);
    attn->order = SEQPAR__NEW(seqpar__sorted_key, attn->total);
    if (!attn->order) return SEQPAR_ERR_MEMORY;
    for (s = 0; s < attn->size; s++)
        for (int64_t i = 0; i < attn->shares[s].count; i++, n++) {
            attn->order[n].leaf = attn->shares[s].pieces[i].leaf;
            attn->order[n].source = (int32_t)s;
            attn->order[n].piece = (int32_t)i;
        }
    qsort(attn->order, (size_t)n, sizeof *attn->order, seqpar__by_number);
    return SEQPAR_OK;
}

static int64_t seqpar__rows_in(const seqpar__bounds *rows) {
    return SEQPAR__MAX(rows->end - rows->begin, (int64_t)0);
}

/* In a ring, this position sends a key piece on if a position further along, before the owner
   of the keys, sees it. So it is enough to know the nearest position that sees it. The caller
   visits positions from near to far and skips a piece whose nearest position is known. `next`
   is a union-find forest: the root of i is the first piece from i on whose nearest position is
   unknown. Paths are compressed, so all calls together cost little more than one pass. */
static int64_t seqpar__next_unknown(int32_t *next, int64_t i) {
    int64_t end = i;
    while (next[end] != end) {
        SEQPAR__WORK(1);
        end = next[end];
    }
    while (next[i] != end) {
        int32_t on = next[i];
        next[i] = (int32_t)end;
        i = on;
    }
    return end;
}

static void seqpar__note_seen(const seqpar__sight *sight, int64_t query, int32_t hops,
                              int32_t *next, int32_t *nearest) {
    int64_t k = sight->keys[query].begin, end = sight->keys[query].end;
    for (k = seqpar__next_unknown(next, k); k < end; k = seqpar__next_unknown(next, k + 1))
        if (seqpar__sees(sight, query, k)) {
            nearest[k] = hops;
            next[k] = (int32_t)k + 1;
        }
}

static void seqpar__widen(seqpar__bounds *rows, const seqpar_piece *p) {
    rows->begin = SEQPAR__MIN(rows->begin, p->local);
    rows->end = SEQPAR__MAX(rows->end, p->local + p->count);
}

/* Ring hops until these keys are back at their owner. */
static int64_t seqpar__hops_home(const seqpar_attn *attn, int64_t source) {
    int64_t way = source - attn->position;
    if (way == 0) return attn->size;
    return ((attn->forward.next == 1 ? way : -way) + attn->size) % attn->size;
}

/* Ring: computes the rows of each source that this position receives, and those that it sends
   on. Rows are not sent back to their owner. In 2D all rows travel, because a position's rows
   lie member after member. */
static seqpar_status seqpar__attn_travels(seqpar_attn *attn, const seqpar__sight *sight) {
    int64_t on = attn->forward.next, size = attn->size, total = attn->total, s, k, i;
    const int64_t *begin = sight->begin;
    int32_t *next = SEQPAR__NEW(int32_t, 3 * (total + 1)), *nearest, *here;
    if (!next) return SEQPAR_ERR_MEMORY;
    /* nearest: hops to the nearest position that sees a piece; here: 1 if this position does */
    nearest = next + total + 1;
    here = nearest + total + 1;
    for (k = 0; k <= total; k++) {
        next[k] = (int32_t)k;
        nearest[k] = INT32_MAX;
    }
    for (i = 1; i < size && attn->forward.ulysses_size == 1; i++)
        for (s = (attn->position + i * on) % size, k = begin[s]; k < begin[s + 1]; k++)
            seqpar__note_seen(sight, sight->number[k], (int32_t)i, next, nearest);
    for (k = 0; k <= total; k++) next[k] = (int32_t)k;
    for (k = begin[attn->position]; k < begin[attn->position + 1]; k++)
        seqpar__note_seen(sight, sight->number[k], 1, next, here);
    for (s = 0; s < size; s++) {
        attn->send_rows[s].begin = attn->recv_rows[s].begin = attn->shares[s].tokens;
        attn->send_rows[s].end = attn->recv_rows[s].end = 0;
    }
    for (k = 0; k < total; k++) {
        const seqpar_piece *p = seqpar__ordered_piece(attn, k);
        s = attn->order[k].source;
        i = seqpar__hops_home(attn, s);
        if (attn->forward.ulysses_size > 1) nearest[k] = here[k] = 1;
        if (nearest[k] < i) seqpar__widen(&attn->send_rows[s], p);
        if (nearest[k] < i || (here[k] && s != attn->position))
            seqpar__widen(&attn->recv_rows[s], p);
    }
    SEQPAR_FREE(next);
    return SEQPAR_OK;
}

static seqpar_status seqpar__attn_split(seqpar_ctx *ctx, seqpar_attn *attn) {
    int64_t *begin = SEQPAR__NEW(int64_t, attn->forward.sp_size);
    seqpar_share *ranks = NULL;
    seqpar_status status = begin ? seqpar__split_all(ctx->error, &ranks, &attn->order,
                                                     attn->rows, attn->row_count,
                                                     attn->desc.layout, attn->forward.sp_size)
                                 : SEQPAR_ERR_MEMORY;
    if (!status) status = seqpar__position_shares(attn, ranks, begin);
    if (!status && attn->desc.relaxed) status = seqpar__relaxed_shares(attn);
    seqpar__shares_free(ranks, attn->forward.sp_size);
    SEQPAR_FREE(ranks);
    SEQPAR_FREE(begin);
    if (status ||
        !(attn->leaves = (int64_t *)seqpar__list_malloc(&attn->lists, attn->total * 8)))
        return status ? status : SEQPAR_ERR_MEMORY;
    for (int64_t i = 0; i < attn->total; i++) attn->leaves[i] = attn->order[i].leaf;
    for (int64_t s = 0; s < attn->size; s++)
        attn->slot_row[s + 1] = attn->slot_row[s] + 2 * attn->shares[s].tokens;
    return SEQPAR_OK;
}

/* Computes the shares, their bounds, *sight, and the rows that travel. The caller closes
   *sight, also after an error. */
static seqpar_status seqpar__attn_shares(seqpar_ctx *ctx, seqpar_attn *attn,
                                         seqpar__sight *sight) {
    memset(sight, 0, sizeof *sight);
    attn->parts = (seqpar_share *)seqpar__list_calloc(
        &attn->lists, attn->forward.ulysses_size * (int64_t)sizeof *attn->parts);
    attn->part_begin = (int64_t *)seqpar__list_calloc(&attn->lists,
                                                      (attn->forward.ulysses_size + 1) * 8);
    if (!attn->parts || !attn->part_begin) return SEQPAR_ERR_MEMORY;
    attn->shares = (seqpar_share *)seqpar__list_calloc(
        &attn->lists, attn->size * (int64_t)sizeof *attn->shares);
    attn->bounds = (seqpar__bounds **)seqpar__list_calloc(
        &attn->lists, attn->size * (int64_t)sizeof *attn->bounds);
    attn->recv_rows = (seqpar__bounds *)seqpar__list_calloc(
        &attn->lists, 2 * attn->size * (int64_t)sizeof *attn->recv_rows);
    attn->steps = (seqpar__attn_step *)seqpar__list_calloc(
        &attn->lists, (attn->size + 1) * (int64_t)sizeof *attn->steps);
    attn->returns = (seqpar__tasks *)seqpar__list_calloc(
        &attn->lists, attn->size * (int64_t)sizeof *attn->returns);
    attn->return_rows = (int64_t *)seqpar__list_calloc(&attn->lists, attn->size * 8);
    attn->outbox_rows = (int64_t *)seqpar__list_calloc(&attn->lists, attn->size * 8);
    attn->slot_row = (int64_t *)seqpar__list_calloc(&attn->lists, (attn->size + 1) * 8);
    attn->step_of = (int64_t *)seqpar__list_calloc(&attn->lists, attn->size * 8);
    if (!attn->shares || !attn->bounds || !attn->recv_rows || !attn->steps || !attn->returns ||
        !attn->return_rows || !attn->outbox_rows || !attn->slot_row || !attn->step_of)
        return SEQPAR_ERR_MEMORY;
    SEQPAR__TRY(seqpar__attn_split(ctx, attn));
    for (int64_t r = 0; r < attn->size; r++) {
        attn->bounds[r] = (seqpar__bounds *)seqpar__list_calloc(
            &attn->lists, attn->shares[r].count * (int64_t)sizeof **attn->bounds);
        if (!attn->bounds[r]) return SEQPAR_ERR_MEMORY;
        for (int64_t i = 0; i < attn->shares[r].count; i++)
            attn->bounds[r][i] = seqpar__piece_bounds(
                &attn->rows[attn->shares[r].pieces[i].row], &attn->shares[r].pieces[i],
                &attn->desc);
        SEQPAR__WORK(attn->shares[r].count + 1);
    }
    SEQPAR__TRY(seqpar__sight_open(sight, attn));
    attn->send_rows = attn->recv_rows + attn->size;
    if (!seqpar__schedules[attn->desc.schedule].arrivals) return SEQPAR_OK;
    return seqpar__attn_travels(attn, sight);
}

SEQPAR_DEF uint64_t seqpar_attn_dropout_key(uint64_t seed, uint64_t stream) {
    return seed ^ seqpar__mix(stream);
}

SEQPAR_DEF double seqpar_attn_dropout(const seqpar_dropout *from, int64_t document,
                                      int64_t head, int64_t query, int64_t key) {
    SEQPAR_MUST("from", from);
    uint32_t draw[4];
    if (from->dropout == 0) return 1.0;
    seqpar_random(draw, seqpar_attn_dropout_key(from->seed, from->stream),
                  (uint64_t)document << 24 | (uint64_t)head,
                  (uint64_t)query << 32 | (uint64_t)key >> 2);
    return draw[key & 3] < from->dropout * 4294967296.0 ? 0.0 : 1.0 / (1.0 - from->dropout);
}

/* =============================================================================================
   >>program  what each rank adds, and in which order

   In a ring, the keys of other ranks arrive source by source, in an order that depends on the
   number of ranks. The tree of a fold does not depend on it. So at each source a query piece
   combines the values whose siblings it has, and stores the others until their siblings arrive.
   seqpar_attn_open knows which values these are. It writes one program for each query piece and
   compute step; a task is such a program and its piece. With 8 cells, rank 0 of a zigzag over 2
   ranks holds the cells 0, 1, 6 and 7, and rank 1 the others. Rank 0 computes query cell 7 with
   its own keys first; 6..7 stands for the sum of the cells 6 and 7:

       step 0, own keys         LEAF 0  LEAF 1  COMBINE
                                LEAF 6  LEAF 7  COMBINE      STORE 6..7  STORE 0..1
       step 1, keys of rank 1   LEAF 2  LEAF 3  COMBINE      LOAD 0..1   COMBINE
                                LEAF 4  LEAF 5  COMBINE      LOAD 6..7   COMBINE
                                COMBINE                      FINISH

   One rank makes the same seven additions in one step, so the bits are equal.

   Gradients of keys. For the keys that it receives, a rank computes the leaves of dK and dV
   over its own queries. It combines what it can, and sends the remaining nodes to the owner of
   the keys, which folds them with its own. A buffer that travelled round the ring and collected
   sums would add them in the order of its route.
   ========================================================================================== */

#ifndef SEQPAR__PROGRAM_BLOCK
#define SEQPAR__PROGRAM_BLOCK 8192 /* operations */
#endif
/* Allocates `count` operations, from large blocks, since there are many short programs. */
static seqpar_fold_op *seqpar__program_alloc(seqpar_attn *attn, int64_t count) {
    seqpar_fold_op *program;
    if (count > attn->free_op_count) {
        attn->free_op_count = SEQPAR__MAX(count, (int64_t)SEQPAR__PROGRAM_BLOCK);
        attn->free_ops = (seqpar_fold_op *)seqpar__list_malloc(
            &attn->lists, attn->free_op_count * (int64_t)sizeof *attn->free_ops);
        if (!attn->free_ops) {
            attn->free_op_count = 0;
            return NULL;
        }
    }
    program = attn->free_ops;
    attn->free_ops += count;
    attn->free_op_count -= count;
    return program;
}

/* Flushes a fold and copies its program to a task. The fold's next program starts empty. */
static seqpar_status seqpar__task_take(seqpar_attn *attn, seqpar_attn_task *task,
                                       seqpar_fold *fold) {
    seqpar_status status = seqpar_fold_flush(fold);
    seqpar_fold_op *program = status ? NULL : seqpar__program_alloc(attn, fold->program_count);
    if (!program) return SEQPAR_ERR_MEMORY;
    if (fold->program_count)
        memcpy(program, fold->program, (size_t)fold->program_count * sizeof *program);
    task->program = program;
    task->program_count = fold->program_count;
    fold->program_count = 0;
    attn->depth = SEQPAR__MAX(attn->depth, fold->depth_high);
    return SEQPAR_OK;
}

/* Allocates for at most `count` tasks, `pieces` pieces and `keys` keys. */
static int seqpar__tasks_new(seqpar_attn *attn, seqpar__tasks *tasks, int64_t count,
                             int64_t pieces, int64_t keys) {
    tasks->task = (seqpar_attn_task *)seqpar__list_malloc(&attn->lists,
                                                          count * (int64_t)sizeof *tasks->task);
    tasks->pieces = (seqpar_piece *)seqpar__list_malloc(
        &attn->lists, pieces * (int64_t)sizeof *tasks->pieces);
    tasks->keys = (seqpar_attn_keys *)seqpar__list_malloc(&attn->lists,
                                                          keys * (int64_t)sizeof *tasks->keys);
    return tasks->task && tasks->pieces && tasks->keys;
}

static seqpar_attn_task *seqpar__task_add(seqpar__tasks *tasks, int64_t piece) {
    seqpar_attn_task *task = &tasks->task[tasks->count++];
    memset(task, 0, sizeof *task);
    task->piece = piece;
    return task;
}

/* Finds the rows of a piece's keys in a slot. A slot holds the k rows of a source, then its v
   rows, then those of the next source. Slot 0 of a ring is this position's own k and v: two
   tensors, each from row 0. */
static seqpar_attn_keys seqpar__keys_of(const seqpar_attn *attn, const seqpar__attn_step *step,
                                        int64_t source, const seqpar_piece *p) {
    seqpar_attn_keys k;
    int64_t base = attn->slot_row[source] - attn->slot_row[step->source];
    int own_slot = step->sources == 1 && source == attn->position;
    k.k_row = base + p->local;
    k.v_row = base + p->local + (own_slot ? 0 : attn->shares[source].tokens);
    k.start = p->start;
    k.stride = p->stride;
    k.count = p->count;
    return k;
}

/* Scratch memory for writing programs. `list` holds the leaves of the current fold: the numbers
   of the key pieces that a query piece sees, or of the query pieces that see a key piece. */
typedef struct seqpar__writer {
    seqpar__sight sight;
    int64_t own;   /* pieces of this position */
    int64_t *mine; /* (own) their numbers */
    int32_t *list; /* (total) */
    /* indices into `list`, sorted by source; those of source q are by[at[q] .. at[q + 1]) */
    int32_t *by;               /* (total) */
    int64_t *at;               /* (size + 2) */
    int64_t *leaves;           /* (total) leaf numbers of a list that is not consecutive */
    seqpar__span *spans;       /* (pieces of the position that has most) */
    int32_t *operands;         /* (own) of each span: index of its query piece in own pieces */
    seqpar_fold_op *discarded; /* (2 per span) another position's program, which is not used */
} seqpar__writer;

static int64_t seqpar__list_keys(seqpar__writer *p, int64_t query) {
    int32_t n = 0;
    for (int32_t k = p->sight.keys[query].begin; k < p->sight.keys[query].end; k++)
        if (seqpar__sees(&p->sight, query, k)) p->list[n++] = k;
    return n;
}

static int64_t seqpar__list_queries(seqpar__writer *p, int64_t key) {
    int32_t n = 0;
    for (int32_t q = p->sight.queries[key].begin; q < p->sight.queries[key].end; q++)
        if (seqpar__sees(&p->sight, q, key)) p->list[n++] = q;
    return n;
}

/* Leaf numbers of the list. Consecutive pieces, the usual case, are not copied. */
static const int64_t *seqpar__list_leaves(seqpar__writer *p, int64_t n) {
    if (n && p->list[n - 1] - p->list[0] == n - 1) return p->sight.attn->leaves + p->list[0];
    for (int64_t i = 0; i < n; i++) p->leaves[i] = p->sight.attn->leaves[p->list[i]];
    return p->leaves;
}

static void seqpar__sort_by_source(seqpar__writer *p, int64_t n) {
    const seqpar_attn *attn = p->sight.attn;
    for (int64_t s = 0; s < attn->size + 2; s++) p->at[s] = 0;
    for (int64_t i = 0; i < n; i++) p->at[attn->order[p->list[i]].source + 2]++;
    for (int64_t s = 2; s < attn->size + 2; s++) p->at[s] += p->at[s - 1];
    for (int64_t i = 0; i < n; i++)
        p->by[p->at[attn->order[p->list[i]].source + 1]++] = (int32_t)i;
    SEQPAR__WORK(n + attn->size);
}

/* Writes this position's query pieces that see a key piece to p->spans and p->operands. The
   key's fold runs over the query pieces of all positions, so the neighbours of a span may be
   pieces of other positions. Here begin and end of a span are piece numbers; end is that of the
   next piece that sees the key. *near: where the last search ended; the next begins there. */
static int64_t seqpar__local_queries(seqpar__writer *p, int64_t key, int64_t *near) {
    const seqpar__sight *s = &p->sight;
    seqpar__range range = s->queries[key];
    int64_t n = 0, i = *near = seqpar__seek(p->mine, p->own, *near, range.begin), before, after;
    for (; i < p->own && p->mine[i] < range.end; i++) {
        seqpar__span *span = &p->spans[n];
        if (!seqpar__sees(s, p->mine[i], key)) continue;
        for (before = p->mine[i] - 1; before >= range.begin && !seqpar__sees(s, before, key);
             before--) {
        }
        for (after = p->mine[i] + 1; after < range.end && !seqpar__sees(s, after, key);
             after++) {
        }
        span->begin = p->mine[i];
        span->end = after;
        span->leaf = s->attn->leaves[p->mine[i]];
        span->before = before < range.begin ? INT64_MAX : s->attn->leaves[before] ^ span->leaf;
        span->after = after >= range.end ? INT64_MAX : s->attn->leaves[after] ^ span->leaf;
        p->operands[n++] = (int32_t)i;
    }
    return n;
}

/* Pushes the i-th leaf of the fold's list. A running fold does not use i. */
static seqpar_status seqpar__push_leaf(seqpar_fold *fold, int64_t i, int64_t operand) {
    seqpar__span *value;
    if (fold->running) return seqpar__fold_extend(fold, seqpar__leaf_node(0), (int32_t)operand);
    if (!(value = seqpar__fold_next(fold))) return SEQPAR_ERR_MEMORY;
    seqpar__span_of(value, fold->leaves, fold->leaf_count, i, i + 1);
    return seqpar__fold_add(fold, SEQPAR_FOLD_LEAF, (int32_t)operand);
}

/* Writes the programs of one of this position's query pieces: one for each compute step with
   keys that the piece sees. */
static seqpar_status seqpar__program_query(seqpar_attn *attn, seqpar__writer *p,
                                           int64_t piece) {
    int64_t n = seqpar__list_keys(p, p->mine[piece]);
    int gathers = seqpar__gathers(attn);
    seqpar_status status = SEQPAR_OK;
    seqpar_fold fold;
    seqpar_fold_init(&fold, seqpar__list_leaves(p, n), n);
    fold.running = attn->desc.relaxed;
    if (!gathers) seqpar__sort_by_source(p, n);
    for (int64_t s = 0; s < attn->step_count && !status; s++) {
        seqpar__attn_step *step = &attn->steps[s];
        int64_t begin = gathers ? 0 : p->at[step->source];
        int64_t end = gathers ? n : p->at[step->source + 1];
        SEQPAR__WORK(1);
        for (int64_t i = begin; i < end && !status; i++) {
            int64_t at = gathers ? i : p->by[i], key = p->list[at];
            status = seqpar__push_leaf(&fold, at, gathers ? key : attn->order[key].piece);
        }
        if (begin == end || status) continue;
        status = seqpar__task_take(attn, seqpar__task_add(&step->queries, piece), &fold);
    }
    attn->query_slots = SEQPAR__MAX(attn->query_slots, fold.slots_high);
    seqpar_fold_free(&fold);
    return status;
}

/* Adds the task for dk and dv of a key piece to the tasks of its source. */
static seqpar_attn_task *seqpar__key_task(seqpar_attn *attn, int64_t key) {
    int64_t source = attn->order[key].source;
    seqpar__attn_step *step = &attn->steps[attn->step_of[source]];
    seqpar__tasks *tasks = source == attn->position ? &step->own
                                                    : &step->foreign[source - step->source];
    seqpar_attn_task *task = seqpar__task_add(tasks, tasks->count);
    task->order = step->sources > 1 ? key : attn->order[key].piece;
    tasks->pieces[task->piece] = *seqpar__ordered_piece(attn, key);
    tasks->keys[task->piece] = seqpar__keys_of(attn, step, source,
                                               seqpar__ordered_piece(attn, key));
    return task;
}

/* Writes the program for dk and dv of another position's key piece. The sums over this
   position's queries become nodes of the message to the owner of the keys. */
static seqpar_status seqpar__program_foreign_key(seqpar_attn *attn, seqpar__writer *p,
                                                 int64_t key, int64_t *near) {
    int64_t n = seqpar__local_queries(p, key, near), source = attn->order[key].source,
            depth = 2;
    int64_t nodes = 1;
    seqpar_attn_task *task;
    seqpar_fold_op *program;
    if (n == 0) return SEQPAR_OK;
    task = seqpar__key_task(attn, key);
    task->program_count = attn->desc.relaxed ? n + 1 : 2 * n;
    program = seqpar__program_alloc(attn, task->program_count);
    task->program = program;
    if (!program) return SEQPAR_ERR_MEMORY;
    if (!attn->desc.relaxed)
        nodes = seqpar__spans_fold(p->spans, n, p->operands, program, &depth);
    else { /* one running value */
        for (int64_t i = 0; i < n; i++) {
            program[i].op = i ? SEQPAR_FOLD_EXTEND : SEQPAR_FOLD_LEAF;
            program[i].index = p->operands[i];
        }
        program[n].op = SEQPAR_FOLD_STORE;
        program[n].index = 0;
    }
    attn->depth = SEQPAR__MAX(attn->depth, depth);
    task->store_base = attn->outbox_rows[source];
    task->store_stride = 2 * seqpar__ordered_piece(attn, key)->count;
    attn->outbox_rows[source] += nodes * task->store_stride;
    return SEQPAR_OK;
}

/* Writes the program that folds the nodes of position q into dk and dv of one of this
   position's key pieces. p->list has the n query pieces that see the key piece. q's own program
   is written to p->discarded, only to learn which nodes q sends. */
static seqpar_status seqpar__program_return(seqpar_attn *attn, seqpar__writer *p, int64_t q,
                                            int64_t piece, const int64_t *leaves, int64_t n,
                                            seqpar_fold *fold) {
    const seqpar_share *mine = &attn->shares[attn->position];
    seqpar__tasks *tasks = &attn->returns[q];
    seqpar_attn_task *task;
    seqpar__span *value;
    int64_t count = p->at[q + 1] - p->at[q], nodes = 1, depth = 0;
    SEQPAR__WORK(1);
    if (count == 0) return SEQPAR_OK;
    for (int64_t i = 0; i < count && !fold->running; i++)
        seqpar__span_of(&p->spans[i], leaves, n, p->by[p->at[q] + i], p->by[p->at[q] + i] + 1);
    if (!fold->running) nodes = seqpar__spans_fold(p->spans, count, NULL, p->discarded, &depth);
    for (int64_t i = 0; i < nodes; i++) {
        if (!fold->running && !(value = seqpar__fold_next(fold))) return SEQPAR_ERR_MEMORY;
        if (!fold->running) *value = p->spans[i];
        SEQPAR__TRY(fold->running ? seqpar__push_leaf(fold, 0, 0)
                                  : seqpar__fold_add(fold, SEQPAR_FOLD_LEAF, (int32_t)i));
    }
    task = seqpar__task_add(tasks, tasks->count);
    tasks->pieces[task->piece] = mine->pieces[piece];
    task->inbox_base = attn->return_rows[q];
    attn->return_rows[q] += nodes * 2 * mine->pieces[piece].count;
    SEQPAR__TRY(seqpar__task_take(attn, task, fold));
    task->store_base = 2 * mine->pieces[piece].local;
    task->store_stride = 2 * mine->tokens;
    return SEQPAR_OK;
}

/* Writes the programs for dk and dv of one of this position's key pieces. The sums over this
   position's queries come first, then the sums that other positions return. In a ring, they
   arrive in the order in which the keys reach the positions. With llama3 they arrive together,
   and are folded in order of positions. */
static seqpar_status seqpar__program_local_key(seqpar_attn *attn, seqpar__writer *p,
                                               int64_t piece, seqpar_fold *fold) {
    const seqpar_share *mine = &attn->shares[attn->position];
    int64_t n = seqpar__list_queries(p, p->mine[piece]), q, own;
    const int64_t *leaves = seqpar__list_leaves(p, n);
    seqpar__sort_by_source(p, n);
    own = p->at[attn->position + 1] - p->at[attn->position];
    if (attn->desc.kernel) own = own > 0; /* a user's kernel returns one sum over all of them */
    seqpar_fold_init(fold, leaves, n);
    fold->running = attn->desc.relaxed;
    if (fold->running) /* each other position that sees the key returns one value */
        for (fold->leaf_count = own, q = 0; q < attn->size; q++)
            fold->leaf_count += q != attn->position && p->at[q + 1] > p->at[q];
    for (int64_t i = p->at[attn->position]; i < p->at[attn->position] + own; i++)
        SEQPAR__TRY(seqpar__push_leaf(
            fold, p->by[i], attn->desc.kernel ? 0 : attn->order[p->list[p->by[i]]].piece));
    if (own) {
        seqpar_attn_task *task = seqpar__key_task(attn, p->mine[piece]);
        task->inbox_base = 2 * mine->pieces[piece].local; /* in USER_PIECES (user's kernel) */
        SEQPAR__TRY(seqpar__task_take(attn, task, fold));
        task->store_base = 2 * mine->pieces[piece].local;
        task->store_stride = 2 * mine->tokens;
    }
    for (q = 1; q < attn->size; q++) {
        int64_t from = seqpar__gathers(attn)
                           ? q - (q <= attn->position)
                           : (attn->position + q * attn->backward.next) % attn->size;
        SEQPAR__TRY(seqpar__program_return(attn, p, from, piece, leaves, n, fold));
    }
    return SEQPAR_OK;
}

/* Makes the compute steps and allocates their tasks. It reads the backward plan; the forward
   plan has the same COMPUTEs. COMPUTEs of different heads share a step. */
static seqpar_status seqpar__program_steps(seqpar_attn *attn, seqpar__writer *p) {
    const seqpar_share *mine = &attn->shares[attn->position];
    for (int64_t i = 0; i < attn->backward.count; i++) {
        const seqpar_plan_op *op = &attn->backward.ops[i];
        seqpar__attn_step *step;
        /* all ranges of heads have the same tasks */
        if (op->op != SEQPAR_PLAN_COMPUTE || op->head_begin > 0) continue;
        step = &attn->steps[attn->step_count];
        step->source = op->source;
        step->sources = op->sources;
        step->foreign = (seqpar__tasks *)seqpar__list_calloc(
            &attn->lists, op->sources * (int64_t)sizeof *step->foreign);
        if (!step->foreign ||
            !seqpar__tasks_new(attn, &step->queries, p->own, 0,
                               op->sources > 1 ? attn->total : attn->shares[op->source].count))
            return SEQPAR_ERR_MEMORY;
        step->queries.pieces = mine->pieces;
        for (int64_t s = op->source; s < op->source + op->sources; s++) {
            seqpar__tasks *keys = s == attn->position ? &step->own
                                                      : &step->foreign[s - op->source];
            attn->step_of[s] = attn->step_count;
            if (!seqpar__tasks_new(attn, keys, attn->shares[s].count,
                                   attn->shares[s].count + p->own, attn->shares[s].count))
                return SEQPAR_ERR_MEMORY;
        }
        attn->step_count++;
    }
    /* programs of queries refer to keys by piece number (llama3) or by piece of the source */
    for (int64_t s = 0; s < attn->size; s++)
        for (int64_t i = 0; i < attn->shares[s].count; i++) {
            const seqpar__attn_step *step = &attn->steps[attn->step_of[s]];
            step->queries.keys[step->sources > 1 ? p->sight.number[p->sight.begin[s] + i] : i] =
                seqpar__keys_of(attn, step, s, &attn->shares[s].pieces[i]);
        }
    for (int64_t s = 0; s < attn->size; s++)
        if (s != attn->position &&
            !seqpar__tasks_new(attn, &attn->returns[s], p->own, p->own, 0))
            return SEQPAR_ERR_MEMORY;
    return SEQPAR_OK;
}

/* Writes every program that the plan needs. */
static seqpar_status seqpar__programs_write(seqpar_attn *attn, seqpar__writer *p) {
    int64_t near = 0;
    seqpar_status status;
    SEQPAR__TRY(seqpar__program_steps(attn, p));
    for (int64_t i = 0; i < p->own && !attn->desc.kernel; i++)
        SEQPAR__TRY(seqpar__program_query(attn, p, i));
    for (int64_t i = 0; i < p->own; i++) {
        seqpar_fold fold;
        status = seqpar__program_local_key(attn, p, i, &fold);
        attn->key_slots = SEQPAR__MAX(attn->key_slots, fold.slots_high);
        seqpar_fold_free(&fold);
        if (status) return status;
    }
    for (int64_t s = 0; s < attn->size; s++) {
        seqpar__attn_step *step = &attn->steps[attn->step_of[s]];
        seqpar__tasks *keys = s == attn->position ? &step->own
                                                  : &step->foreign[s - step->source];
        for (int64_t k = p->sight.begin[s]; s != attn->position && k < p->sight.begin[s + 1];
             k++)
            SEQPAR__TRY(seqpar__program_foreign_key(attn, p, p->sight.number[k], &near));
        /* the query pieces follow the tasks' pieces, as seqpar_attn_backward_args needs them */
        if (keys->count)
            memcpy(keys->pieces + keys->count, attn->shares[attn->position].pieces,
                   (size_t)p->own * sizeof *keys->pieces);
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__writer_open(seqpar_attn *attn, seqpar__writer *p) {
    int64_t most = 0;
    p->own = attn->shares[attn->position].count;
    for (int64_t s = 0; s < attn->size; s++) most = SEQPAR__MAX(most, attn->shares[s].count);
    p->mine = SEQPAR__NEW(int64_t, p->own + attn->size + 2 + attn->total);
    p->list = SEQPAR__NEW(int32_t, 2 * attn->total + p->own);
    p->spans = SEQPAR__NEW(seqpar__span, most);
    p->discarded = SEQPAR__NEW(seqpar_fold_op, 2 * most);
    if (!p->mine || !p->list || !p->spans || !p->discarded) return SEQPAR_ERR_MEMORY;
    p->at = p->mine + p->own;
    p->leaves = p->at + attn->size + 2;
    p->by = p->list + attn->total;
    p->operands = p->by + attn->total;
    for (int64_t i = 0; i < p->own; i++)
        p->mine[i] = p->sight.number[p->sight.begin[attn->position] + i];
    return SEQPAR_OK;
}

/* =============================================================================================
   >>exec  runs a plan: ring and llama3

   The executor runs the operations of a plan in order. It begins messages, waits for them, and
   hands tasks to the device. These buffers carry data from one operation to a later one:

       slot            keys and values, of one source in a ring, of all with llama3
       store           states of queries (backward: dQ) that wait for siblings
       pending         dK and dV of this position's keys that wait for siblings; two with
                       llama3: some heads are folded after the next heads are computed
       outbox, inbox   nodes of dK and dV on their way to owners; two of each, so that one is
                       filled while the other travels
   ========================================================================================== */

typedef struct seqpar__attn_exec {
    seqpar_ctx *ctx;
    seqpar_attn *attn;
    const seqpar_plan *plan;
    /* args: the tensors that ring and llama3 work on; own: those of the call. Without Ulysses
       they are the same */
    seqpar_attn_args args, caller;
    /* Ulysses. gathered, results: inputs and results of all the position's tokens, for this
       member's heads. staging: messages that HEADS sends or TOKENS receives */
    seqpar_buffer gathered, results, staging;
    const void *k, *v; /* of this position; in a ring they are slot 0 */
    seqpar_buffer slot[3], outbox[2], inbox[2], store, pending[2];
    seqpar_buffer user_results; /* of a user's kernel: seqpar__user_offset */
    seqpar_request *requests;
    int64_t compute;               /* COMPUTEs so far */
    int64_t *out_begin, *in_begin; /* (size + 1) first row to and from each position (llama3) */
} seqpar__attn_exec;

static void seqpar__trace(seqpar_ctx *ctx, const char *what, int64_t step, int64_t request,
                          int64_t source, double cost) {
    seqpar_event e;
    if (!ctx->trace) return;
    e.what = what;
    e.step = step;
    e.request = request;
    e.source = source;
    e.cost = cost;
    ctx->trace(ctx->trace_user, &e);
}

/* How many kv heads a COMPUTE has; the number is the same for all COMPUTEs of a plan. */
static int64_t seqpar__heads_of(const seqpar__attn_exec *r) {
    int64_t i = 0;
    while (r->plan->ops[i].op != SEQPAR_PLAN_COMPUTE) i++;
    return r->plan->ops[i].head_count;
}

static int64_t seqpar__slot_rows(const seqpar__attn_exec *r) {
    int64_t most = 0, sum = 0;
    for (int64_t s = 0; s < r->attn->size; s++) {
        most = SEQPAR__MAX(most, r->attn->shares[s].tokens);
        sum += r->attn->shares[s].tokens;
    }
    return 2 * (seqpar__gathers(r->attn) ? sum : most);
}

/* Sections of r->user_results; seqpar__user_offset returns the first element of each. PART is
   the kernel's out (backward: dq) for one source, SUM the parts of all sources merged; each is
   followed by its lse. DK and DV are dk and dv of one source. PIECES are dk and dv of this
   position's keys, piece after piece. */
enum {
    SEQPAR__USER_SUM,
    SEQPAR__USER_PART,
    SEQPAR__USER_DK,
    SEQPAR__USER_DV,
    SEQPAR__USER_PIECES,
    SEQPAR__USER_END
};
static int64_t seqpar__user_offset(const seqpar__attn_exec *r, int64_t kv_heads, int what) {
    const seqpar_attn *attn = r->attn;
    int64_t d = attn->desc.head_dim, tokens = attn->shares[attn->position].tokens, most = 0;
    int64_t sum = tokens * kv_heads * (attn->heads / attn->kv_heads) * (d + 1);
    for (int64_t s = 0; r->plan->backward && s < attn->size; s++)
        most = SEQPAR__MAX(most, attn->shares[s].tokens);
    if (what <= SEQPAR__USER_DK) return what * sum;
    if (what <= SEQPAR__USER_PIECES)
        return 2 * sum + (what - SEQPAR__USER_DK) * most * kv_heads * d;
    return 2 * sum + 2 * (most + (r->plan->backward ? tokens : 0)) * kv_heads * d;
}

/* Allocates the buffers of one execution. In a ring, outbox and inbox hold the message of one
   position; with llama3, those of all positions. */
static seqpar_status seqpar__exec_buffers(seqpar__attn_exec *r) {
    seqpar_attn *attn = r->attn;
    const seqpar_share *mine = &attn->shares[attn->position];
    int64_t size = seqpar_dtype_bytes(r->ctx->device->storage);
    int64_t acc = seqpar_dtype_bytes(r->ctx->device->accumulator);
    int64_t kv_heads = seqpar__heads_of(r), d = attn->desc.head_dim;
    int64_t query_heads = kv_heads * (attn->heads / attn->kv_heads), out = 0, in = 0;
    int gathers = seqpar__gathers(attn);
    for (int64_t i = gathers ? 0 : 1; i < r->plan->slots; i++)
        SEQPAR__TRY(seqpar_buffer_new(r->ctx, &r->slot[i],
                                      seqpar__slot_rows(r) * kv_heads * d * size,
                                      SEQPAR_MEM_EXCHANGE));
    SEQPAR__TRY(seqpar_buffer_new(
        r->ctx, &r->store, attn->query_slots * mine->tokens * query_heads * (d + 2) * acc,
        SEQPAR_MEM_SCRATCH));
    if (attn->desc.kernel)
        SEQPAR__TRY(seqpar_buffer_new(r->ctx, &r->user_results,
                                      seqpar__user_offset(r, kv_heads, SEQPAR__USER_END) * acc,
                                      SEQPAR_MEM_SCRATCH));
    if (!r->plan->backward) return SEQPAR_OK;
    for (int64_t i = 0; i < (gathers ? 2 : 1); i++)
        SEQPAR__TRY(seqpar_buffer_new(r->ctx, &r->pending[i],
                                      attn->key_slots * 2 * mine->tokens * kv_heads * d * acc,
                                      SEQPAR_MEM_SCRATCH));
    for (int64_t q = 0; q < attn->size; q++) {
        r->out_begin[q + 1] = r->out_begin[q] + attn->outbox_rows[q];
        r->in_begin[q + 1] = r->in_begin[q] + attn->return_rows[q];
        out = SEQPAR__MAX(out, attn->outbox_rows[q]);
        in = SEQPAR__MAX(in, attn->return_rows[q]);
    }
    if (gathers) {
        out = r->out_begin[attn->size];
        in = r->in_begin[attn->size];
    }
    for (int64_t i = 0; i < 2; i++) {
        SEQPAR__TRY(seqpar_buffer_new(r->ctx, &r->outbox[i], out * kv_heads * d * acc,
                                      SEQPAR_MEM_EXCHANGE));
        SEQPAR__TRY(seqpar_buffer_new(r->ctx, &r->inbox[i], in * kv_heads * d * acc,
                                      SEQPAR_MEM_EXCHANGE));
    }
    return SEQPAR_OK;
}

/* SP rank of the same member at another position. */
static int64_t seqpar__peer(const seqpar__attn_exec *r, int64_t position) {
    return position * r->plan->ulysses_size + r->plan->member;
}

static seqpar_status seqpar__exec_shift(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    const seqpar_attn *attn = r->attn;
    int64_t row = op->head_count * attn->desc.head_dim *
                  seqpar_dtype_bytes(r->ctx->device->storage);
    int64_t arriving = (op->source + attn->size - r->plan->next) % attn->size;
    const seqpar__bounds *out = &attn->send_rows[op->source], *in = &attn->recv_rows[arriving];
    const char *k = op->from ? (const char *)r->slot[op->from].data : (const char *)r->k;
    const char *v = op->from ? k + attn->shares[op->source].tokens * row : (const char *)r->v;
    char *to = (char *)r->slot[op->to].data + in->begin * row;
    int64_t send_to = seqpar__peer(r, op->send_to), recv_from = seqpar__peer(r, op->recv_from);
    int64_t sent = seqpar__rows_in(out) * row, received = seqpar__rows_in(in) * row;
    seqpar_transfer sends[2], recvs[2];
    seqpar__messages m = {sends, recvs, 0, 0};
    seqpar_group group;
    seqpar__add_send(&m, send_to, k + out->begin * row, sent);
    seqpar__add_send(&m, send_to, v + out->begin * row, sent);
    seqpar__add_recv(&m, recv_from, to, received);
    seqpar__add_recv(&m, recv_from, to + attn->shares[arriving].tokens * row, received);
    group = seqpar__group(r->plan->backward ? "kv ring, backward" : "kv ring", op->request, &m);
    return seqpar_comm_begin(r->ctx->sp, &group, r->ctx->queue, &r->requests[op->request]);
}

static seqpar_status seqpar__exec_copy(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    seqpar_device *dev = r->ctx->device;
    int64_t d = r->attn->desc.head_dim, size = seqpar_dtype_bytes(dev->storage);
    int64_t tokens = r->attn->shares[r->attn->position].tokens;
    int64_t from_row = r->attn->kv_heads * d * size, to_row = op->head_count * d * size;
    int64_t head = op->head_begin * d * size;
    char *to = (char *)r->slot[op->to].data + r->attn->slot_row[r->attn->position] * to_row;
    dev->copy_rows(dev, to, to_row, (const char *)r->k + head, from_row, to_row, tokens,
                   r->ctx->queue);
    dev->copy_rows(dev, to + tokens * to_row, to_row, (const char *)r->v + head, from_row,
                   to_row, tokens, r->ctx->queue);
    return SEQPAR_OK;
}

/* Rows out_begin[q] .. out_begin[q + 1] go to position q; its rows arrive at in_begin[q] ..
   in_begin[q + 1]. */
typedef struct seqpar__all_to_all {
    const char *name;
    const char *out;
    const int64_t *out_begin; /* (size + 1) rows */
    char *in;
    const int64_t *in_begin;
    int64_t row;  /* bytes */
    int same_out; /* 1: this position's rows go to all positions; 0: the rows of q go to q */
} seqpar__all_to_all;

/* One message to and from the same member of every other position. */
static seqpar_status seqpar__exec_all_to_all(seqpar__attn_exec *r, int64_t request,
                                             const seqpar__all_to_all *a) {
    int64_t size = r->attn->size;
    seqpar__messages m;
    seqpar_group group;
    seqpar_status status;
    if (!seqpar__messages_new(&m, size, size)) return seqpar__no_memory(r->ctx->error, a->name);
    for (int64_t q = 0; q < size; q++) {
        const int64_t *out = a->out_begin + (a->same_out ? r->attn->position : q);
        const int64_t *in = a->in_begin + q;
        if (q == r->attn->position) continue;
        seqpar__add_send(&m, seqpar__peer(r, q), a->out + out[0] * a->row,
                         (out[1] - out[0]) * a->row);
        seqpar__add_recv(&m, seqpar__peer(r, q), a->in + in[0] * a->row,
                         (in[1] - in[0]) * a->row);
    }
    group = seqpar__group(a->name, request, &m);
    status = seqpar_comm_begin(r->ctx->sp, &group, r->ctx->queue, &r->requests[request]);
    SEQPAR_FREE(m.sends);
    return status;
}

static seqpar_status seqpar__exec_gather(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    seqpar__all_to_all a;
    a.name = "kv all-gather";
    a.out = a.in = (char *)r->slot[op->to].data;
    a.out_begin = a.in_begin = r->attn->slot_row;
    a.row = op->head_count * r->attn->desc.head_dim *
            seqpar_dtype_bytes(r->ctx->device->storage);
    a.same_out = 1;
    return seqpar__exec_all_to_all(r, op->request, &a);
}

static seqpar_status seqpar__exec_return(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    int64_t row = op->head_count * r->attn->desc.head_dim *
                  seqpar_dtype_bytes(r->ctx->device->accumulator);
    seqpar_transfer send, recv;
    seqpar__messages m = {&send, &recv, 0, 0};
    seqpar_group group;
    if (op->send_to < 0) {
        seqpar__all_to_all a = {"dk, dv to owners",
                                (const char *)r->outbox[op->buffer].data,
                                r->out_begin,
                                (char *)r->inbox[op->buffer].data,
                                r->in_begin,
                                row,
                                0};
        return seqpar__exec_all_to_all(r, op->request, &a);
    }
    seqpar__add_send(&m, seqpar__peer(r, op->send_to), r->outbox[op->buffer].data,
                     r->attn->outbox_rows[op->send_to] * row);
    seqpar__add_recv(&m, seqpar__peer(r, op->recv_from), r->inbox[op->buffer].data,
                     r->attn->return_rows[op->recv_from] * row);
    group = seqpar__group("dk, dv to owners", op->request, &m);
    return seqpar_comm_begin(r->ctx->sp, &group, r->ctx->queue, &r->requests[op->request]);
}

/* Copies tasks, with their offsets converted from rows to elements, as a device needs them.
   width: elements of a row, which has all heads of this COMPUTE. */
static seqpar_attn_task *seqpar__scaled_tasks(const seqpar__tasks *tasks, int64_t width,
                                              int64_t store_row, int64_t inbox_row) {
    seqpar_attn_task *t = SEQPAR__NEW(seqpar_attn_task, tasks->count);
    for (int64_t i = 0; t && i < tasks->count; i++) {
        t[i] = tasks->task[i];
        t[i].store_base = (t[i].store_base + store_row) * width;
        t[i].store_stride *= width;
        t[i].inbox_base = (t[i].inbox_base + inbox_row) * width;
    }
    return t;
}

/* Memory that tasks read and write. All other tensors are in r->args. */
typedef struct seqpar__task_memory {
    const void *k, *v, *inbox;
    void *store;
    int64_t inbox_row, store_row; /* the tasks' first row in inbox and store */
} seqpar__task_memory;

/* Sets the heads of a COMPUTE. dk and dv of a user's kernel have all heads of a token side by
   side, so attn_return, the only device call here in that case, folds them as one wide head. */
static void seqpar__op_heads(const seqpar__attn_exec *r, const seqpar_plan_op *op,
                             seqpar_attn_args *a) {
    int64_t wide = r->attn->desc.kernel ? op->head_count : 1;
    a->head_begin = op->head_begin / wide;
    a->head_count = op->head_count / wide;
    a->kv_heads /= wide;
    a->head_dim *= wide;
}

/* Arguments of a device call. The caller frees a->tasks. */
static seqpar_status seqpar__tasks_args(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                        const seqpar__tasks *tasks,
                                        const seqpar__task_memory *m, seqpar_attn_args *a) {
    *a = r->args;
    a->tasks = seqpar__scaled_tasks(tasks, op->head_count * a->head_dim, m->store_row,
                                    m->inbox_row);
    if (!a->tasks) return seqpar__no_memory(r->ctx->error, "attention tasks");
    seqpar__op_heads(r, op, a);
    a->q_pieces = tasks->pieces;
    a->k_pieces = tasks->keys;
    a->task_count = tasks->count;
    a->k = m->k;
    a->v = m->v;
    a->store = m->store;
    a->inbox = m->inbox;
    return SEQPAR_OK;
}

typedef seqpar_status (*seqpar__attn_op)(seqpar_device *device, const seqpar_attn_args *args,
                                         void *queue);
static seqpar_status seqpar__exec_tasks(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                        const seqpar__tasks *tasks, seqpar__attn_op run,
                                        const seqpar__task_memory *m) {
    seqpar_attn_args a;
    seqpar_status status;
    if (tasks->count == 0) return SEQPAR_OK;
    SEQPAR__TRY(seqpar__tasks_args(r, op, tasks, m, &a));
    status = run(r->ctx->device, &a, r->ctx->queue);
    SEQPAR_FREE((void *)a.tasks);
    return status;
}

/* Computes dq, and dk and dv of every source of the COMPUTE. It is one device call, so that a
   device can compute the scores of a block once for all three. Key group 0 has this rank's keys
   and writes to pending; the other groups write to the outbox. */
static seqpar_status seqpar__exec_backward(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                           const seqpar__attn_step *step, const void *k,
                                           const void *v) {
    int64_t groups = op->sources + 1, gathers = op->sources > 1;
    seqpar_attn_args *keys = SEQPAR__NEW(seqpar_attn_args, groups);
    seqpar__task_memory m = {k, v, NULL, r->store.data, 0, 0};
    seqpar_attn_backward_args a;
    seqpar_status status;
    if (!keys) return seqpar__no_memory(r->ctx->error, "attention tasks");
    a.keys = keys;
    a.groups = groups;
    a.queries.tasks = NULL;
    status = seqpar__tasks_args(r, op, &step->queries, &m, &a.queries);
    m.store = r->pending[gathers ? op->buffer : 0].data;
    if (!status) status = seqpar__tasks_args(r, op, &step->own, &m, &keys[0]);
    m.store = r->outbox[op->buffer].data;
    for (int64_t g = 1; !status && g < groups; g++) {
        m.store_row = gathers ? r->out_begin[op->source + g - 1] : 0;
        status = seqpar__tasks_args(r, op, &step->foreign[g - 1], &m, &keys[g]);
    }
    if (!status && a.queries.task_count > 0)
        status = r->ctx->device->attn_backward(r->ctx->device, &a, r->ctx->queue);
    for (int64_t g = 0; g < groups; g++) SEQPAR_FREE((void *)keys[g].tasks);
    SEQPAR_FREE((void *)a.queries.tasks);
    SEQPAR_FREE(keys);
    return status;
}

/* =============================================================================================
   >>kernel  an attention kernel written by the user

   seqpar_attn_desc.kernel computes a rank's queries x all keys of one source; the result is the
   source's part. The executor still splits, sends and sums. It merges the parts of all sources
   by their lse, as other implementations of ring attention do, and sends dk and dv to their
   owners. A part is a sum over a source, not over a cell. So bits are not equal, and the error
   rule holds.

       sum  <- nothing;  for each source: part <- kernel(source), sum <- merge(sum, part)
   ========================================================================================== */

static void *seqpar__user_results(const seqpar__attn_exec *r, const seqpar_plan_op *op,
                                  int what) {
    return r->user_results.data
               ? seqpar__at(r->user_results.data, seqpar__user_offset(r, op->head_count, what),
                            r->ctx->device->accumulator)
               : NULL;
}

/* With neither flag, begins the sum over sources. `part` merges the part of one source into
   the sum; `end` writes the sum to out and lse (backward: dq) of r->args. */
static seqpar_status seqpar__user_merge(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                        int part, int end) {
    seqpar_device *dev = r->ctx->device;
    seqpar_attn_merge_args a;
    int64_t group = r->attn->heads / r->attn->kv_heads, first = op->head_begin * group;
    int64_t values;
    int accumulator = dev->accumulator, backward = r->plan->backward;
    void *out = backward ? r->args.dq : r->args.out;
    memset(&a, 0, sizeof a);
    a.tokens = r->args.q_tokens;
    a.heads = op->head_count * group;
    a.head_dim = r->args.head_dim;
    a.out_heads = r->attn->heads;
    if (a.tokens * a.heads == 0) return SEQPAR_OK;
    values = a.tokens * a.heads * a.head_dim;
    a.begin = !part && !end;
    a.sum = seqpar__user_results(r, op, SEQPAR__USER_SUM);
    a.part = part ? seqpar__user_results(r, op, SEQPAR__USER_PART) : NULL;
    if (!backward) a.sum_lse = seqpar__at(a.sum, values, accumulator);
    if (!backward && part) a.part_lse = seqpar__at(a.part, values, accumulator);
    if (end) a.out = seqpar__at(out, first * a.head_dim, dev->storage);
    if (end && !backward) a.lse = seqpar__at(r->args.lse, first, accumulator);
    if (end && !backward && r->args.sinks)
        a.sinks = seqpar__at(r->args.sinks, first, accumulator);
    return dev->attn_merge(dev, &a, r->ctx->queue);
}

/* The arguments of the user's kernel for one source: this rank's queries, the source's keys,
   and the positions of both in their rows. */
static seqpar_attn_source seqpar__user_source(const seqpar__attn_exec *r,
                                              const seqpar_plan_op *op, int64_t s,
                                              const void *k, const void *v) {
    const seqpar_attn *attn = r->attn;
    const seqpar__joined *keys = &attn->runs[s], *queries = &attn->runs[attn->size];
    int64_t first = op->head_begin * (attn->heads / attn->kv_heads), d = attn->desc.head_dim;
    int64_t row = attn->slot_row[s] - attn->slot_row[op->source] + keys->begin;
    int storage = r->ctx->device->storage, accumulator = r->ctx->device->accumulator;
    seqpar_attn_source a;
    memset(&a, 0, sizeof a);
    a.source = s;
    a.heads = op->head_count * (attn->heads / attn->kv_heads);
    a.kv_heads = op->head_count;
    a.head_dim = d;
    a.head = attn->head_begin + first;
    a.scale = attn->desc.scale;
    a.softcap = attn->desc.softcap;
    a.full = attn->desc.full;
    a.window = attn->desc.window;
    a.q_tokens = queries->tokens;
    a.k_tokens = keys->tokens;
    a.q_stride = a.dout_stride = attn->heads * d;
    a.k_stride = a.v_stride = op->head_count * d;
    a.lse_stride = attn->heads;
    a.q_pieces = queries->pieces;
    a.q_piece_count = queries->count;
    a.k_pieces = keys->pieces;
    a.k_piece_count = keys->count;
    a.visible_begin = attn->visible_begin;
    a.visible_end = attn->visible_end;
    a.q = seqpar__at(r->args.q, first * d, storage);
    a.k = seqpar__at(k, row * a.k_stride, storage);
    if (op->sources > 1 || s != attn->position) row += attn->shares[s].tokens; /* v behind k */
    a.v = seqpar__at(v, row * a.v_stride, storage);
    if (!r->plan->backward) return a;
    a.dout = seqpar__at(r->args.dout, first * d, storage);
    a.lse = seqpar__at(r->args.lse, first, accumulator);
    a.delta = seqpar__at(r->args.delta, first, accumulator);
    return a;
}

/* Copies dk and dv of a source into the order of messages: piece after piece, dk of a piece
   before its dv. */
static void seqpar__user_copy_dkv(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                  const seqpar__tasks *tasks, int64_t s, void *to) {
    seqpar_device *dev = r->ctx->device;
    int64_t row = op->head_count * r->attn->desc.head_dim *
                  seqpar_dtype_bytes(dev->accumulator);
    const char *dk = (const char *)seqpar__user_results(r, op, SEQPAR__USER_DK);
    const char *dv = (const char *)seqpar__user_results(r, op, SEQPAR__USER_DV);
    for (int64_t i = 0; i < tasks->count; i++) {
        const seqpar_piece *p = &tasks->pieces[tasks->task[i].piece];
        int64_t from = (p->local - r->attn->runs[s].begin) * row, bytes = p->count * row;
        char *at = (char *)to + row * (s == r->attn->position ? tasks->task[i].inbox_base
                                                              : tasks->task[i].store_base);
        dev->copy(dev, at, dk + from, bytes, r->ctx->queue);
        dev->copy(dev, at + bytes, dv + from, bytes, r->ctx->queue);
    }
}

/* Zeroes the results, then calls the user's kernel. So for a query that sees no key the kernel
   need not write out or dq, but it must set lse to -inf. */
static seqpar_status seqpar__user_kernel_call(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                              const seqpar_attn_source *a) {
    const seqpar_attn_kernel *kernel = r->attn->desc.kernel;
    seqpar_device *dev = r->ctx->device;
    char *part = (char *)seqpar__user_results(r, op, SEQPAR__USER_PART), *dk, *dv;
    int64_t acc = seqpar_dtype_bytes(dev->accumulator), pairs = r->attn->runs[a->source].pairs;
    int64_t out = a->q_tokens * a->heads * a->head_dim * acc;
    int64_t keys = a->k_tokens * a->kv_heads * a->head_dim * acc;
    int failed;
    dev->zero(dev, part, out + a->q_tokens * a->heads * acc, r->ctx->queue);
    if (!r->plan->backward)
        failed = kernel->forward(kernel->user, a, part, part + out, r->ctx->queue);
    else {
        dk = (char *)seqpar__user_results(r, op, SEQPAR__USER_DK);
        dv = (char *)seqpar__user_results(r, op, SEQPAR__USER_DV);
        dev->zero(dev, dk, keys, r->ctx->queue);
        dev->zero(dev, dv, keys, r->ctx->queue);
        failed = kernel->backward(kernel->user, a, part, dk, dv, r->ctx->queue);
    }
    dev->attn_flops += (r->plan->backward ? 10 : 4) * a->head_dim * a->heads * pairs;
    if (!failed) return SEQPAR_OK;
    return seqpar_fail(r->ctx->error, SEQPAR_ERR_KERNEL,
                       "the %s of the own attention kernel returned %d, not 0: %lld queries, "
                       "%lld keys of source %lld, %lld heads from head %lld",
                       r->plan->backward ? "backward" : "forward", failed,
                       (long long)a->q_tokens, (long long)a->k_tokens, (long long)a->source,
                       (long long)a->heads, (long long)a->head);
}

/* Calls the user's kernel for each source of a COMPUTE, and merges each part before the next
   call. So memory for one part is enough, whatever the number of sources. */
static seqpar_status seqpar__exec_user_kernel(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                              const seqpar__attn_step *step, const void *k,
                                              const void *v) {
    const seqpar_attn *attn = r->attn;
    int gathers = op->sources > 1;
    void *own_dkv = seqpar__user_results(r, op, SEQPAR__USER_PIECES);
    seqpar__task_memory memory = {NULL, NULL, NULL, NULL, 0, 0};
    if (step == attn->steps) SEQPAR__TRY(seqpar__user_merge(r, op, 0, 0));
    for (int64_t s = op->source; s < op->source + op->sources; s++) {
        const seqpar__tasks *tasks = s == attn->position ? &step->own
                                                         : &step->foreign[s - op->source];
        int64_t row = gathers ? r->out_begin[s] : 0;
        seqpar_attn_source a;
        if (tasks->count == 0) continue; /* no query sees a key of this source */
        a = seqpar__user_source(r, op, s, k, v);
        SEQPAR__TRY(seqpar__user_kernel_call(r, op, &a));
        SEQPAR__TRY(seqpar__user_merge(r, op, 1, 0));
        if (!r->plan->backward) continue;
        seqpar__user_copy_dkv(r, op, tasks, s,
                              s == attn->position
                                  ? own_dkv
                                  : seqpar__at(r->outbox[op->buffer].data,
                                               row * op->head_count * a.head_dim,
                                               r->ctx->device->accumulator));
    }
    if (step == attn->steps + attn->step_count - 1)
        SEQPAR__TRY(seqpar__user_merge(r, op, 0, 1));
    if (!r->plan->backward) return SEQPAR_OK;
    /* the kernel's dk and dv of this position's keys are folded as if another had sent them */
    memory.inbox = own_dkv;
    memory.store = r->pending[gathers ? op->buffer : 0].data;
    return seqpar__exec_tasks(r, op, &step->own, r->ctx->device->attn_return, &memory);
}

/* =============================================================================================
   >>ulysses  tokens for heads, and back

   The members of a position do an all-to-all. Before it, a member has all heads of its tokens.
   After it, the member has all tokens of the position, for its share of the heads. Ring or
   llama3 works on these. A second all-to-all sends the results back. Two members with 4 heads,
   and 5 and 3 tokens:

       member 0   tokens 0..4, heads 0..3   HEADS ->    tokens 0..7, heads 0..1
       member 1   tokens 5..7, heads 0..3   <- TOKENS   tokens 0..7, heads 2..3

   With fewer kv heads than members (ulysses_replicate), several members compute with copies of
   one kv head. The dk and dv of the copies are added in order of members.
   ========================================================================================== */

/* Returns how many heads a member has (kv: kv heads, else query heads). *begin: its first. */
static int64_t seqpar__member_heads(const seqpar_plan *plan, const seqpar_attn_desc *d,
                                    int64_t member, int kv, int64_t *begin) {
    int64_t group = d->heads / d->kv_heads, each = d->heads / plan->ulysses_size;
    int64_t count = seqpar__member_kv(plan, d->kv_heads, member, begin);
    if (kv) return count;
    *begin = plan->replicate ? member * each : *begin * group;
    return plan->replicate ? each : count * group;
}

/* An argument of attention that HEADS or TOKENS moves. scalar 1: a head has one value of the
   accumulator type (lse, delta); 0: head_dim values of the storage type. kv 1: of kv heads. */
typedef struct seqpar__heads_field {
    size_t offset; /* of its pointer in seqpar_attn_args */
    int scalar, kv;
} seqpar__heads_field;

typedef struct seqpar__heads_tensor {
    const seqpar__heads_field *field;
    /* local: of r->caller, (tokens of this member, all heads); gathered: of r->args, (tokens of
       the position, heads of this member) */
    char *local, *gathered;
    int64_t unit; /* bytes of one head of one token */
} seqpar__heads_tensor;

enum { SEQPAR__HEADS_TENSORS = 6 };

static char *seqpar__heads_pointer(const seqpar_attn_args *a, const seqpar__heads_field *f) {
    char *pointer;
    memcpy(&pointer, (const char *)a + f->offset, sizeof pointer);
    return pointer;
}

/* Lists the tensors of an exchange, inputs or results, in the order that all members send them
   in. Returns how many there are. */
static int64_t seqpar__heads_tensors(const seqpar__attn_exec *r, int results,
                                     seqpar__heads_tensor *t) {
    static const seqpar__heads_field inputs[] = {
        {offsetof(seqpar_attn_args, q), 0, 0},   {offsetof(seqpar_attn_args, k), 0, 1},
        {offsetof(seqpar_attn_args, v), 0, 1},   {offsetof(seqpar_attn_args, dout), 0, 0},
        {offsetof(seqpar_attn_args, lse), 1, 0}, {offsetof(seqpar_attn_args, delta), 1, 0}};
    static const seqpar__heads_field out[] = {{offsetof(seqpar_attn_args, out), 0, 0},
                                              {offsetof(seqpar_attn_args, lse), 1, 0}};
    static const seqpar__heads_field gradients[] = {{offsetof(seqpar_attn_args, dq), 0, 0},
                                                    {offsetof(seqpar_attn_args, dk), 0, 1},
                                                    {offsetof(seqpar_attn_args, dv), 0, 1}};
    const seqpar_device *dev = r->ctx->device;
    int backward = r->plan->backward;
    int64_t count = !results ? (backward ? 6 : 3) : backward ? 3 : 2;
    const seqpar__heads_field *fields = !results ? inputs : backward ? gradients : out;
    for (int64_t i = 0; i < count; i++) {
        t[i].field = &fields[i];
        t[i].local = seqpar__heads_pointer(&r->caller, &fields[i]);
        t[i].gathered = seqpar__heads_pointer(&r->args, &fields[i]);
        t[i].unit = fields[i].scalar ? seqpar_dtype_bytes(dev->accumulator)
                                     : r->caller.head_dim * seqpar_dtype_bytes(dev->storage);
    }
    return count;
}

/* Bytes of a gathered tensor, rounded up to cache lines of 64. */
static int64_t seqpar__gathered_bytes(const seqpar__attn_exec *r,
                                      const seqpar__heads_tensor *t) {
    int64_t heads = t->field->kv ? r->attn->kv_heads : r->attn->heads;
    return (r->attn->shares[r->attn->position].tokens * heads * t->unit + 63) & ~(int64_t)63;
}

/* Bytes of this member's tokens of a tensor, for the heads of all members. */
static int64_t seqpar__staged_bytes(const seqpar__attn_exec *r, const seqpar__heads_tensor *t) {
    int64_t heads = 0, begin;
    for (int64_t m = 0; m < r->plan->ulysses_size; m++)
        heads += seqpar__member_heads(r->plan, &r->attn->desc, m, t->field->kv, &begin);
    return r->attn->parts[r->plan->member].tokens * heads * t->unit;
}

/* Allocates the gathered tensors of an exchange, and lets r->args point to them. Returns in
   *stage how many bytes the exchange stages. */
static seqpar_status seqpar__heads_gathered(seqpar__attn_exec *r, int results, int64_t *stage) {
    seqpar__heads_tensor t[SEQPAR__HEADS_TENSORS];
    seqpar_buffer *buffer = results ? &r->results : &r->gathered;
    int64_t count = seqpar__heads_tensors(r, results, t), bytes = 0;
    char *at;
    *stage = 0;
    for (int64_t i = 0; i < count; i++) {
        bytes += seqpar__gathered_bytes(r, &t[i]);
        *stage += seqpar__staged_bytes(r, &t[i]);
    }
    SEQPAR__TRY(seqpar_buffer_new(r->ctx, buffer, bytes, SEQPAR_MEM_EXCHANGE));
    at = (char *)buffer->data;
    for (int64_t i = 0; i < count; at += seqpar__gathered_bytes(r, &t[i++]))
        memcpy((char *)&r->args + t[i].field->offset, &at, sizeof at);
    return SEQPAR_OK;
}

/* Allocates the gathered inputs and results, and one staging buffer: HEADS is over before
   TOKENS begins. From here on ring and llama3 work on the gathered tensors (r->args) instead of
   the caller's (r->caller). */
static seqpar_status seqpar__heads_buffers(seqpar__attn_exec *r) {
    int64_t inputs, results;
    SEQPAR__TRY(seqpar__heads_gathered(r, 0, &inputs));
    SEQPAR__TRY(seqpar__heads_gathered(r, 1, &results));
    r->k = r->args.k;
    r->v = r->args.v;
    return seqpar_buffer_new(r->ctx, &r->staging, SEQPAR__MAX(inputs, results),
                             SEQPAR_MEM_EXCHANGE);
}

/* A block of the staging buffer holds this rank's tokens of one tensor, for the heads of one
   member. width: bytes of a token in the block; begin: the member's first head. */
typedef struct seqpar__heads_block {
    int64_t member, width;
    char *stage;
    const seqpar__heads_tensor *tensor;
    int64_t begin;
} seqpar__heads_block;

static int64_t seqpar__heads_blocks(const seqpar__attn_exec *r, const seqpar__heads_tensor *t,
                                    int64_t count, seqpar__heads_block *blocks) {
    int64_t own = r->attn->parts[r->plan->member].tokens, n = 0;
    char *at = (char *)r->staging.data;
    for (int64_t m = 0; m < r->plan->ulysses_size; m++)
        for (int64_t i = 0; i < count; i++, n++) {
            blocks[n].member = m;
            blocks[n].tensor = &t[i];
            blocks[n].width = seqpar__member_heads(r->plan, &r->attn->desc, m, t[i].field->kv,
                                                   &blocks[n].begin) *
                              t[i].unit;
            blocks[n].stage = at;
            at += own * blocks[n].width;
        }
    return n;
}

static int64_t seqpar__row_bytes(const seqpar__attn_exec *r, const seqpar__heads_tensor *t) {
    return (t->field->kv ? r->attn->desc.kv_heads : r->attn->desc.heads) * t->unit;
}

/* HEADS: copies this member's block to the gathered tensor, those of the others to the staging
   buffer. TOKENS: copies this member's block from the gathered tensor to the staging buffer.
   gathered_row: its bytes. */
static void seqpar__exec_copies(seqpar__attn_exec *r, int results, const seqpar__heads_block *b,
                                char *gathered, int64_t gathered_row) {
    seqpar_device *dev = r->ctx->device;
    int64_t member = r->plan->member, own = r->attn->parts[member].tokens;
    const char *local = b->tensor->local + b->begin * b->tensor->unit;
    if (b->member == member && results)
        dev->copy_rows(dev, b->stage, b->width, gathered, gathered_row, gathered_row, own,
                       r->ctx->queue);
    else if (b->member == member)
        dev->copy_rows(dev, gathered, gathered_row, local, seqpar__row_bytes(r, b->tensor),
                       gathered_row, own, r->ctx->queue);
    else if (!results)
        dev->copy_rows(dev, b->stage, b->width, local, seqpar__row_bytes(r, b->tensor),
                       b->width, own, r->ctx->queue);
}

/* HEADS sends the blocks of the staging buffer; TOKENS (results 1) receives into them. */
static seqpar_status seqpar__exec_exchange(seqpar__attn_exec *r, const seqpar_plan_op *op,
                                           int results, seqpar__heads_tensor *t,
                                           seqpar__heads_block *blocks, seqpar__messages *m) {
    int64_t n = seqpar__heads_blocks(r, t, seqpar__heads_tensors(r, results, t), blocks);
    int64_t own = r->attn->parts[r->plan->member].tokens;
    seqpar_group group;
    for (int64_t i = 0; i < n; i++) {
        const seqpar__heads_block *b = &blocks[i];
        int64_t heads = b->tensor->field->kv ? r->attn->kv_heads : r->attn->heads;
        int64_t gathered_row = heads * b->tensor->unit,
                tokens = r->attn->parts[b->member].tokens;
        int64_t peer = r->plan->position * r->plan->ulysses_size + b->member;
        char *rows = b->tensor->gathered + r->attn->part_begin[b->member] * gathered_row;
        seqpar__exec_copies(r, results, b, rows, gathered_row);
        if (b->member == r->plan->member) continue;
        if (results) {
            seqpar__add_send(m, peer, rows, tokens * gathered_row);
            seqpar__add_recv(m, peer, b->stage, own * b->width);
        } else {
            seqpar__add_send(m, peer, b->stage, own * b->width);
            seqpar__add_recv(m, peer, rows, tokens * gathered_row);
        }
    }
    /* The group's step must be equal on all members. A request number may differ: with llama3
       it depends on the member's number of kv heads. So the step is 0 in a forward, 1 in a
       backward */
    group = seqpar__group(results ? "heads to tokens" : "tokens to heads", r->plan->backward,
                          m);
    return seqpar_comm_begin(r->ctx->sp, &group, r->ctx->queue, &r->requests[op->request]);
}

/* PLACE: puts the heads of all members side by side. Copies of a kv head are added, in order of
   members. */
static seqpar_status seqpar__exec_place(seqpar__attn_exec *r, seqpar__heads_tensor *t,
                                        seqpar__heads_block *blocks) {
    seqpar_device *dev = r->ctx->device;
    int64_t count = seqpar__heads_tensors(r, 1, t);
    int64_t n = seqpar__heads_blocks(r, t, count, blocks);
    int64_t own = r->attn->parts[r->plan->member].tokens;
    int64_t copies = r->plan->replicate ? r->plan->ulysses_size / r->attn->desc.kv_heads : 1;
    for (int64_t i = 0; i < n; i++) {
        const seqpar__heads_block *b = &blocks[i];
        if (b->tensor->field->kv && b->member % copies) continue;
        for (int64_t c = 1; b->tensor->field->kv && c < copies; c++) {
            seqpar_add_args add;
            add.accumulators = 0;
            add.y = b->stage;
            add.a = b->stage;
            add.b = blocks[i + c * count].stage;
            add.count = own * r->attn->desc.head_dim;
            SEQPAR__TRY(dev->add(dev, &add, r->ctx->queue));
        }
        dev->copy_rows(dev, b->tensor->local + b->begin * b->tensor->unit,
                       seqpar__row_bytes(r, b->tensor), b->stage, b->width, b->width, own,
                       r->ctx->queue);
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__exec_heads(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    seqpar__heads_tensor t[SEQPAR__HEADS_TENSORS];
    int64_t most = SEQPAR__HEADS_TENSORS * r->plan->ulysses_size;
    seqpar__heads_block *blocks = SEQPAR__NEW(seqpar__heads_block, most);
    seqpar__messages list;
    seqpar_status status;
    if (!seqpar__messages_new(&list, most, most) || !blocks)
        status = seqpar__no_memory(r->ctx->error, "an all-to-all");
    else if (op->op == SEQPAR_PLAN_PLACE)
        status = seqpar__exec_place(r, t, blocks);
    else
        status = seqpar__exec_exchange(r, op, op->op == SEQPAR_PLAN_TOKENS, t, blocks, &list);
    SEQPAR_FREE(blocks);
    SEQPAR_FREE(list.sends);
    return status;
}

/* =============================================================================================
   >>call  open, forward, backward

   seqpar_attn_open checks the description, compares it across the ranks, and makes both plans
   and all that they need. A forward or backward call allocates buffers, runs the plan, and
   frees the buffers. After an error it aborts the other ranks and waits for messages in flight
   before it frees the buffers, so that no message is written into freed memory.
   ========================================================================================== */

static seqpar_status seqpar__attn_prepare(seqpar_ctx *ctx, seqpar_attn *attn) {
    seqpar__writer p;
    seqpar_status status;
    memset(&p, 0, sizeof p);
    status = seqpar__attn_shares(ctx, attn, &p.sight);
    if (!status) status = seqpar__attn_visible(attn);
    if (!status) status = seqpar__writer_open(attn, &p);
    if (!status) status = seqpar__programs_write(attn, &p);
    if (!status && attn->desc.kernel) status = seqpar__attn_sources(attn);
    seqpar__sight_close(&p.sight);
    SEQPAR_FREE(p.mine);
    SEQPAR_FREE(p.list);
    SEQPAR_FREE(p.spans);
    SEQPAR_FREE(p.discarded);
    return status;
}

/* Checks this rank's description by itself, before the ranks compare theirs. */
static seqpar_status seqpar__check_attn(seqpar_error *error, const seqpar_attn_desc *d) {
    if (d->kv_heads <= 0 || d->heads <= 0 || d->heads % d->kv_heads)
        return seqpar_fail(
            error, SEQPAR_ERR_HEADS,
            "%lld heads over %lld kv_heads; heads must be a positive multiple of kv_heads",
            (long long)d->heads, (long long)d->kv_heads);
    if (d->head_dim <= 0)
        return seqpar_fail(error, SEQPAR_ERR_HEAD_DIM, "head_dim is %lld; give at least 1",
                           (long long)d->head_dim);
    if (seqpar__times(d->heads, d->head_dim) > SEQPAR_MAX_WIDTH)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "%lld heads of head_dim %lld are wider than %lld, the most a token "
                           "may have; check both",
                           (long long)d->heads, (long long)d->head_dim,
                           (long long)SEQPAR_MAX_WIDTH);
    if (d->window < 0)
        return seqpar_fail(error, SEQPAR_ERR_MASK,
                           "window is %lld; give 0 for none or at least 1",
                           (long long)d->window);
    if (!(d->softcap >= 0) || d->softcap > 1e30)
        return seqpar_fail(error, SEQPAR_ERR_MASK,
                           "softcap is %g; give 0 for none or a positive number up to 1e30",
                           d->softcap);
    if (!(d->dropout >= 0 && d->dropout < 1))
        return seqpar_fail(error, SEQPAR_ERR_MASK,
                           "dropout is %g; give at least 0 and less than 1", d->dropout);
    if (d->kernel && d->dropout > 0)
        return seqpar_fail(error, SEQPAR_ERR_KERNEL,
                           "an own attention kernel has no dropout; set it to 0 (it is %g)",
                           d->dropout);
    if (d->kernel && !(d->kernel->forward && d->kernel->backward))
        return seqpar_fail(error, SEQPAR_ERR_KERNEL,
                           "an own attention kernel has no %s; give both functions",
                           d->kernel->forward ? "backward" : "forward");
    if (!(d->scale == d->scale) || d->scale > 1e30 || d->scale < -1e30)
        return seqpar_fail(
            error, SEQPAR_ERR_MASK,
            "the attention scale is %g; give a number from -1e30 to 1e30, 0 for 1/sqrt(head_dim)",
            d->scale);
    return SEQPAR_OK;
}

/* Makes the forward and the backward plan, and sets this rank's position and heads. With
   replicated kv heads, ulysses_size must divide the query heads. This is checked last, because
   the plan says whether kv heads are replicated. */
static seqpar_status seqpar__attn_plans(seqpar_ctx *ctx, seqpar_attn *attn) {
    const seqpar_attn_desc *d = &attn->desc;
    seqpar_plan_desc p;
    memset(&p, 0, sizeof p);
    p.schedule = d->schedule;
    p.sp_size = ctx->sp_size;
    p.sp_rank = ctx->sp_rank;
    p.kv_heads = d->kv_heads;
    p.heads_k_stride = d->heads_k_stride;
    p.ulysses_size = d->ulysses_size;
    p.ulysses_replicate = d->ulysses_replicate;
    p.down = seqpar_layout_at(d->layout)->down;
    SEQPAR__TRY(seqpar_plan_make(ctx->error, &attn->forward, &p));
    p.backward = 1;
    SEQPAR__TRY(seqpar_plan_make(ctx->error, &attn->backward, &p));
    attn->size = attn->forward.ring_size;
    attn->position = attn->forward.position;
    attn->ring_requests = attn->backward.requests - (attn->forward.ulysses_size > 1 ? 2 : 0);
    attn->kv_heads = attn->forward.kv_count;
    attn->heads = seqpar__member_heads(&attn->forward, d, attn->forward.member, 0,
                                       &attn->head_begin);
    if (attn->forward.replicate && d->heads % attn->forward.ulysses_size)
        return seqpar_fail(ctx->error, SEQPAR_ERR_ULYSSES,
                           "ulysses_size %lld does not divide %lld heads; with replicated kv "
                           "heads use a divisor",
                           (long long)attn->forward.ulysses_size, (long long)d->heads);
    return SEQPAR_OK;
}

/* Runs after the plans are made. Prepares all that an execution needs, or only what a count of
   FLOPs and bytes needs (verify/seqpar_check.h). */
typedef seqpar_status (*seqpar__attn_preparation)(seqpar_ctx *ctx, seqpar_attn *attn);

/* Checks desc, makes the plans and calls `prepare`. If one of them fails, frees everything. */
static seqpar_status seqpar__attn_open(seqpar_ctx *ctx, seqpar_attn **out,
                                       const seqpar_row *rows, int64_t row_count,
                                       const seqpar_attn_desc *desc,
                                       seqpar__attn_preparation prepare) {
    seqpar_attn *attn;
    seqpar_status status;
    *out = NULL;
    SEQPAR__TRY(seqpar__check_attn(ctx->error, desc));
    attn = SEQPAR__NEW(seqpar_attn, 1);
    if (!attn) return seqpar__no_memory(ctx->error, "attention");
    attn->desc = *desc;
    if (desc->kernel) attn->desc.relaxed = 1; /* its sums are over sources, not over cells */
    if (attn->desc.scale == 0) attn->desc.scale = 1.0 / sqrt((double)desc->head_dim);
    attn->rows = rows;
    attn->row_count = row_count;
    status = seqpar__attn_plans(ctx, attn);
    if (!status) status = prepare(ctx, attn);
    if (status) {
        seqpar_attn_close(ctx, attn);
        return seqpar_fail(ctx->error, status, "attention could not be set up: %s",
                           seqpar_status_text(status));
    }
    *out = attn;
    return SEQPAR_OK;
}

static seqpar_status seqpar__attn_agree(seqpar_ctx *ctx, const seqpar_row *rows,
                                        int64_t row_count, const seqpar_attn_desc *d) {
    const seqpar__setting settings[] = {{"the number of rows", row_count, 0},
                                        {"rows", seqpar__digest_rows(rows, row_count), 1},
                                        {"layout", d->layout, 0},
                                        {"schedule", d->schedule, 0},
                                        {"heads", d->heads, 0},
                                        {"kv_heads", d->kv_heads, 0},
                                        {"head_dim", d->head_dim, 0},
                                        {"heads_k_stride", d->heads_k_stride, 0},
                                        {"ulysses_size", d->ulysses_size, 0},
                                        {"ulysses_replicate", d->ulysses_replicate, 0},
                                        {"full", d->full, 0},
                                        {"window", d->window, 0},
                                        {"relaxed", d->relaxed, 0},
                                        {"own kernels", d->kernel != NULL, 0},
                                        {"scales", seqpar__setting_real(d->scale), 1},
                                        {"softcaps", seqpar__setting_real(d->softcap), 1},
                                        {"dropout rates", seqpar__setting_real(d->dropout), 1}};
    return seqpar__ranks_agree(ctx->sp, "attention", settings,
                               (int64_t)(sizeof settings / sizeof *settings));
}

SEQPAR_DEF seqpar_status seqpar_attn_open(seqpar_ctx *ctx, seqpar_attn **out,
                                          const seqpar_row *rows, int64_t row_count,
                                          const seqpar_attn_desc *desc) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, attn, rows, desc", ctx, out,
                SEQPAR_IF(row_count > 0, rows), desc);
    *out = NULL;
    SEQPAR__TRY(seqpar__check_attn(ctx->error, desc));
    SEQPAR__TRY(seqpar__check_split(ctx->error, rows, row_count, desc->layout, ctx->sp_size,
                                    ctx->sp_rank));
    SEQPAR__TRY(seqpar__attn_agree(ctx, rows, row_count, desc));
    return seqpar__attn_open(ctx, out, rows, row_count, desc, seqpar__attn_prepare);
}

SEQPAR_DEF void seqpar_attn_close(seqpar_ctx *ctx, seqpar_attn *attn) {
    (void)ctx;
    if (!attn) return;
    for (int64_t r = 0; attn->shares && r < attn->size; r++)
        seqpar_share_free(&attn->shares[r]);
    for (int64_t r = 0; attn->parts && r < attn->forward.ulysses_size; r++)
        seqpar_share_free(&attn->parts[r]);
    seqpar_plan_free(&attn->forward);
    seqpar_plan_free(&attn->backward);
    SEQPAR_FREE(attn->order);
    seqpar__list_free(&attn->lists);
    SEQPAR_FREE(attn);
}

/* ---- running a plan ---- */

static seqpar_status seqpar__exec_compute(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    seqpar_device *dev = r->ctx->device;
    const seqpar__attn_step *step = &r->attn->steps[r->attn->step_of[op->source]];
    int own_slot = op->sources == 1 && op->source == r->attn->position;
    const void *k = own_slot ? r->k : r->slot[op->from].data;
    const void *v = own_slot ? r->v : r->slot[op->from].data;
    int64_t before = dev->attn_flops, number = r->compute++;
    seqpar__task_memory memory = {k, v, NULL, r->store.data, 0, 0};
    seqpar_status status;
    if (r->attn->desc.kernel)
        status = seqpar__exec_user_kernel(r, op, step, k, v);
    else if (r->plan->backward)
        status = seqpar__exec_backward(r, op, step, k, v);
    else
        status = seqpar__exec_tasks(r, op, &step->queries, dev->attn_forward, &memory);
    /* attn_flops is valid only after the device has settled */
    if (!status && r->ctx->trace) status = seqpar_device_settle(dev, r->ctx->queue);
    seqpar__trace(r->ctx, "compute", number, -1, op->source,
                  (double)(dev->attn_flops - before));
    return status;
}

static seqpar_status seqpar__exec_fold(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    int64_t step = op->request - r->attn->ring_requests / 2;
    seqpar__task_memory memory = {NULL, NULL, NULL, NULL, 0, 0};
    SEQPAR__TRY(seqpar_comm_wait(r->ctx->sp, &r->requests[op->request], r->ctx->queue));
    seqpar__trace(r->ctx, "fold", step, op->request, -1, 0);
    memory.inbox = r->inbox[op->buffer].data;
    if (!seqpar__gathers(r->attn)) { /* ring: this position + step * next returned them */
        memory.store = r->pending[0].data;
        return seqpar__exec_tasks(
            r, op,
            &r->attn->returns[(r->attn->position + step * r->plan->next) % r->attn->size],
            r->ctx->device->attn_return, &memory);
    }
    memory.store = r->pending[op->buffer].data;
    for (int64_t q = 0; q < r->attn->size; q++) {
        memory.inbox_row = r->in_begin[q];
        SEQPAR__TRY(seqpar__exec_tasks(r, op, &r->attn->returns[q], r->ctx->device->attn_return,
                                       &memory));
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__exec_op(seqpar__attn_exec *r, const seqpar_plan_op *op) {
    switch (op->op) {
    case SEQPAR_PLAN_HEADS:
    case SEQPAR_PLAN_TOKENS:
        seqpar__trace(r->ctx, "begin", r->compute, op->request, -1, 0);
        return seqpar__exec_heads(r, op);
    case SEQPAR_PLAN_PLACE: return seqpar__exec_heads(r, op);
    case SEQPAR_PLAN_COPY: return seqpar__exec_copy(r, op);
    case SEQPAR_PLAN_SHIFT:
        seqpar__trace(r->ctx, "begin", r->compute, op->request, op->source, 0);
        return seqpar__exec_shift(r, op);
    case SEQPAR_PLAN_GATHER:
        seqpar__trace(r->ctx, "begin", r->compute, op->request, op->source, 0);
        return seqpar__exec_gather(r, op);
    case SEQPAR_PLAN_RETURN:
        seqpar__trace(r->ctx, "begin", r->compute, op->request, op->source, 0);
        return seqpar__exec_return(r, op);
    case SEQPAR_PLAN_WAIT:
        seqpar__trace(r->ctx, "wait", r->compute, op->request, -1, 0);
        return seqpar_comm_wait(r->ctx->sp, &r->requests[op->request], r->ctx->queue);
    case SEQPAR_PLAN_COMPUTE: return seqpar__exec_compute(r, op);
    default: return seqpar__exec_fold(r, op);
    }
}

/* Executes a plan once: allocates buffers, runs the operations, and frees the buffers,
   also after an error. */
static seqpar_status seqpar__exec_plan(seqpar_ctx *ctx, seqpar_attn *attn,
                                       const seqpar_plan *plan, const seqpar_attn_args *args) {
    seqpar__attn_exec r;
    seqpar_status status;
    memset(&r, 0, sizeof r);
    r.ctx = ctx;
    r.attn = attn;
    r.plan = plan;
    r.args = r.caller = *args;
    r.k = args->k;
    r.v = args->v;
    r.requests = SEQPAR__NEW(seqpar_request, plan->requests);
    r.out_begin = SEQPAR__NEW(int64_t, 2 * (attn->size + 1));
    r.in_begin = r.out_begin ? r.out_begin + attn->size + 1 : NULL;
    status = r.requests && r.out_begin ? seqpar__exec_buffers(&r)
                                       : seqpar__no_memory(ctx->error, "attention");
    if (!status && plan->ulysses_size > 1) status = seqpar__heads_buffers(&r);
    for (int64_t i = 0; !status && i < plan->count; i++)
        status = seqpar__exec_op(&r, &plan->ops[i]);
    /* abort and wait: no message may still use these buffers when they are freed */
    if (status && r.requests) {
        if (status != SEQPAR_ERR_DIED) seqpar_comm_abort(ctx->world, ctx->error->text);
        for (int64_t i = 0; i < plan->requests; i++)
            seqpar_comm_wait(ctx->sp, &r.requests[i], NULL);
    }
    for (int64_t i = 0; i < 3; i++) seqpar_buffer_free(ctx, &r.slot[i]);
    for (int64_t i = 0; i < 2; i++) {
        seqpar_buffer_free(ctx, &r.outbox[i]);
        seqpar_buffer_free(ctx, &r.inbox[i]);
        seqpar_buffer_free(ctx, &r.pending[i]);
    }
    seqpar_buffer_free(ctx, &r.store);
    seqpar_buffer_free(ctx, &r.user_results);
    seqpar_buffer_free(ctx, &r.gathered);
    seqpar_buffer_free(ctx, &r.results);
    seqpar_buffer_free(ctx, &r.staging);
    SEQPAR_FREE(r.requests);
    SEQPAR_FREE(r.out_begin);
    return status;
}

/* Returns the arguments of all device calls; seqpar__tasks_args sets those of one call. */
static seqpar_attn_args seqpar__attn_args(const seqpar_ctx *ctx, const seqpar_attn *attn,
                                          const seqpar_attn_io *io) {
    seqpar_attn_args a;
    memset(&a, 0, sizeof a);
    a.heads = attn->heads;
    a.kv_heads = attn->kv_heads;
    a.head_dim = attn->desc.head_dim;
    a.q_tokens = attn->shares[attn->position].tokens;
    a.scale = attn->desc.scale;
    a.softcap = attn->desc.softcap;
    a.sinks = io->sinks ? seqpar__at(io->sinks, attn->head_begin, ctx->device->accumulator)
                        : NULL;
    a.dropout_head = attn->head_begin;
    a.dropout = attn->desc.dropout;
    a.dropout_seed = io->dropout_seed;
    a.dropout_stream = io->dropout_stream;
    a.depth = attn->depth + 1;
    a.visible_begin = attn->visible_begin;
    a.visible_end = attn->visible_end;
    a.q = io->q;
    a.k = io->k;
    a.v = io->v;
    a.out = io->out;
    a.lse = io->lse;
    a.dout = io->dout;
    a.dq = io->dq;
    a.dk = io->dk;
    a.dv = io->dv;
    return a;
}

/* Tensors that the caller gives with gaps between tokens: q, k, v, dq, dk, dv. The executor
   works on copies without gaps. */
enum { SEQPAR__GAPPED = 6 };
typedef struct seqpar__gapped {
    void *data; /* NULL: it has no gaps */
    seqpar_buffer copy;
    int64_t stride, width; /* bytes */
} seqpar__gapped;

static void **seqpar__gapped_tensor(seqpar_attn_io *io, int i) {
    void **const tensors[SEQPAR__GAPPED] = {(void **)&io->q, (void **)&io->k, (void **)&io->v,
                                            &io->dq,         &io->dk,         &io->dv};
    return tensors[i];
}

/* Looks at the first `count` of q, k, v, dq, dk, dv. Replaces each that has gaps by a buffer
   without gaps, and copies q, k and v into theirs. */
static seqpar_status seqpar__gaps_open(seqpar_ctx *ctx, const seqpar_attn *attn, int count,
                                       seqpar_attn_io *io, seqpar__gapped *gapped) {
    static const char *const names[SEQPAR__GAPPED] = {"q", "k", "v", "dq", "dk", "dv"};
    const int64_t strides[SEQPAR__GAPPED] = {io->q_stride,  io->k_stride,  io->v_stride,
                                             io->dq_stride, io->dk_stride, io->dv_stride};
    int64_t size = seqpar_dtype_bytes(ctx->device->storage);
    int64_t tokens = attn->parts[attn->forward.member].tokens;
    for (int i = 0; i < count; i++) {
        seqpar__gapped *g = &gapped[i];
        void **data = seqpar__gapped_tensor(io, i);
        int64_t width = (i % 3 ? attn->desc.kv_heads : attn->desc.heads) * attn->desc.head_dim;
        if (strides[i] == 0 || strides[i] == width) continue;
        if (strides[i] < width || strides[i] > SEQPAR_MAX_WIDTH * 4)
            return seqpar_fail(
                ctx->error, SEQPAR_ERR_SIZE,
                "%s_stride is %lld; give 0, or at least %lld (a token's elements) and at "
                "most %lld",
                names[i], (long long)strides[i], (long long)width,
                (long long)SEQPAR_MAX_WIDTH * 4);
        g->stride = strides[i] * size;
        g->width = width * size;
        SEQPAR__TRY(seqpar_buffer_new(ctx, &g->copy, tokens * g->width, SEQPAR_MEM_EXCHANGE));
        g->data = *data;
        if (i < 3)
            ctx->device->copy_rows(ctx->device, g->copy.data, g->width, g->data, g->stride,
                                   g->width, tokens, ctx->queue);
        *data = g->copy.data;
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__gaps_close(seqpar_ctx *ctx, const seqpar_attn *attn,
                                        seqpar__gapped *gapped, seqpar_status status) {
    int64_t tokens = attn->parts[attn->forward.member].tokens;
    for (int i = 0; i < SEQPAR__GAPPED; i++) {
        seqpar__gapped *g = &gapped[i];
        if (!status && i >= 3 && g->data)
            ctx->device->copy_rows(ctx->device, g->data, g->stride, g->copy.data, g->width,
                                   g->width, tokens, ctx->queue);
        seqpar_buffer_free(ctx, &g->copy);
    }
    return status;
}

/* Refuses tensors that are NULL. A rank without tokens needs none. */
static seqpar_status seqpar__need_tensors(const char *function, seqpar_ctx *ctx,
                                          const seqpar_attn *attn, const seqpar_attn_io *io,
                                          int backward) {
    if (!seqpar_attn_share(attn)->tokens) return SEQPAR_OK;
    SEQPAR_NEED_BY(function, ctx->error, "io->q, io->k, io->v, io->out, io->lse", io->q, io->k,
                   io->v, io->out, io->lse);
    if (!backward) return SEQPAR_OK;
    SEQPAR_NEED_BY(function, ctx->error, "io->dout, io->dq, io->dk, io->dv", io->dout, io->dq,
                   io->dk, io->dv);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_attn_forward(seqpar_ctx *ctx, seqpar_attn *attn,
                                             const seqpar_attn_io *io) {
    seqpar__gapped gapped[SEQPAR__GAPPED];
    seqpar_attn_io dense;
    seqpar_status status;
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, attn, io", ctx, attn, io);
    SEQPAR__TRY(seqpar__need_tensors(__func__, ctx, attn, io, 0));
    dense = *io;
    memset(gapped, 0, sizeof gapped);
    status = seqpar__gaps_open(ctx, attn, 3, &dense, gapped);
    if (!status) {
        seqpar_attn_args a = seqpar__attn_args(ctx, attn, &dense);
        status = seqpar__exec_plan(ctx, attn, &attn->forward, &a);
    }
    return seqpar__gaps_close(ctx, attn, gapped, status);
}

/* Computes delta = dout . out, and from it the gradient of the sinks, which needs no keys. */
static seqpar_status seqpar__attn_statistics(seqpar_ctx *ctx, const seqpar_attn *attn,
                                             const seqpar_attn_io *io, void *delta) {
    seqpar_attn_delta_args d;
    seqpar_attn_sinks_args s;
    const seqpar_share *mine = seqpar_attn_share(attn);
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.delta = delta;
    d.dout = io->dout;
    d.out = io->out;
    d.tokens = mine->tokens;
    d.heads = attn->desc.heads;
    d.head_dim = attn->desc.head_dim;
    SEQPAR__TRY(ctx->device->attn_delta(ctx->device, &d, ctx->queue));
    if (!io->sinks || !io->dsinks) return SEQPAR_OK;
    s.dsinks = io->dsinks;
    s.sinks = io->sinks;
    s.lse = io->lse;
    s.delta = delta;
    s.pieces = mine->pieces;
    s.piece_count = mine->count;
    s.heads = attn->desc.heads;
    return ctx->device->attn_sinks(ctx->device, &s, ctx->queue);
}

static seqpar_status seqpar__attn_backward(seqpar_ctx *ctx, seqpar_attn *attn,
                                           const seqpar_attn_io *io) {
    seqpar_attn_args a = seqpar__attn_args(ctx, attn, io);
    seqpar_buffer delta;
    seqpar_status status = seqpar_buffer_new(ctx, &delta,
                                             seqpar_attn_share(attn)->tokens *
                                                 attn->desc.heads *
                                                 seqpar_dtype_bytes(ctx->device->accumulator),
                                             SEQPAR_MEM_SCRATCH);
    if (!status) status = seqpar__attn_statistics(ctx, attn, io, delta.data);
    a.delta = delta.data;
    if (!status) status = seqpar__exec_plan(ctx, attn, &attn->backward, &a);
    seqpar_buffer_free(ctx, &delta);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_attn_backward(seqpar_ctx *ctx, seqpar_attn *attn,
                                              const seqpar_attn_io *io) {
    seqpar__gapped gapped[SEQPAR__GAPPED];
    seqpar_attn_io dense;
    seqpar_status status;
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, attn, io", ctx, attn, io);
    SEQPAR__TRY(seqpar__need_tensors(__func__, ctx, attn, io, 1));
    dense = *io;
    memset(gapped, 0, sizeof gapped);
    status = seqpar__gaps_open(ctx, attn, SEQPAR__GAPPED, &dense, gapped);
    if (!status) status = seqpar__attn_backward(ctx, attn, &dense);
    return seqpar__gaps_close(ctx, attn, gapped, status);
}

/* ---- whole tensors, ranks that are threads ---- */

typedef struct seqpar__attn_whole {
    const seqpar_attn_io *io;
    const seqpar_row *row;
    const seqpar_attn_desc *desc;
} seqpar__attn_whole;

/* Scatters the inputs, runs forward and (with dout) backward, and gathers the results that are
   not NULL. `memory` holds this rank's tokens of all nine tensors. */
static seqpar_status seqpar__attn_whole_compute(seqpar_ctx *ctx, seqpar_attn *attn,
                                                const seqpar_attn_io *io, char *memory) {
    const seqpar_share *mine = seqpar_attn_share(attn);
    const int64_t q = attn->desc.heads * attn->desc.head_dim * 4,
                  kv = attn->desc.kv_heads * attn->desc.head_dim * 4;
    const int64_t width[9] = {q, kv, kv, q, q, attn->desc.heads * 4, q, kv, kv};
    const void *in[9] = {io->q, io->k, io->v, io->dout};
    void *out[9] = {NULL, NULL, NULL, NULL, io->out, io->lse, io->dq, io->dk, io->dv};
    seqpar_attn_io local = *io;
    char *x[9];
    for (int i = 0; i < 9; memory += mine->tokens * width[i++]) {
        x[i] = memory;
        if (in[i]) seqpar_scatter(x[i], in[i], mine, 0, width[i]);
    }
    local.q = x[0], local.k = x[1], local.v = x[2], local.dout = x[3];
    local.out = x[4], local.lse = x[5], local.dq = x[6], local.dk = x[7], local.dv = x[8];
    SEQPAR__TRY(seqpar_attn_forward(ctx, attn, &local));
    if (io->dout) SEQPAR__TRY(seqpar_attn_backward(ctx, attn, &local));
    for (int i = 0; i < 9; i++)
        if (out[i]) seqpar_gather(out[i], x[i], mine, 0, width[i]);
    return SEQPAR_OK;
}

static seqpar_status seqpar__attn_whole_once(seqpar_ctx *ctx, const seqpar__attn_whole *job) {
    const seqpar_attn_desc *d = job->desc;
    seqpar_attn *attn;
    SEQPAR__TRY(seqpar_attn_open(ctx, &attn, job->row, 1, d));
    char *memory = (char *)seqpar__calloc(
        seqpar_attn_share(attn)->tokens,
        4 * (4 * (d->heads + d->kv_heads) * d->head_dim + d->heads));
    seqpar_status status = memory ? seqpar__attn_whole_compute(ctx, attn, job->io, memory)
                                  : seqpar__no_memory(ctx->error,
                                                      "a rank's share of q, k, v and results");
    SEQPAR_FREE(memory);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status seqpar__attn_whole_rank(seqpar_comm *world, void *user) {
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar__attn_whole_once(&ctx, (const seqpar__attn_whole *)user);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static seqpar_status seqpar__check_whole(seqpar_error *error, const seqpar_attn_io *io) {
    if (io->dsinks || io->q_stride || io->k_stride || io->v_stride || io->dq_stride ||
        io->dk_stride || io->dv_stride)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "attention in one call takes tensors without gaps and makes no "
                           "dsinks; leave strides and dsinks 0, or call seqpar_attn_open and "
                           "seqpar_attn_backward on each rank");
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_attn_run_threads(seqpar_error *error, const seqpar_attn_io *io,
                                                 const seqpar_row *row,
                                                 const seqpar_attn_desc *desc, int64_t ranks) {
    seqpar__attn_whole job = {io, row, desc};
    if (error) memset(error, 0, sizeof *error);
    SEQPAR_NEED(error, "io, row, desc", io, row, desc);
    SEQPAR_NEED(error, "io->q, io->k, io->v", SEQPAR_IF(row->tokens > 0, io->q),
                SEQPAR_IF(row->tokens > 0, io->k), SEQPAR_IF(row->tokens > 0, io->v));
    SEQPAR__TRY(seqpar__check_whole(error, io));
    return seqpar_run_threads(ranks, seqpar__attn_whole_rank, &job, error);
}

/* =============================================================================================
   >>loss  token log-probs from hidden states

   A loss has three layers. This is the first. Forward, it computes values of each token from
   hidden states. Backward, it takes the seeds: the derivatives of the loss with respect to
   these values.

                     forward                                    backward
       >>loss        hidden -> logits -> logp, entropy, lse     dhidden, dtable <- seeds
       >>objective   logp -> sums per document                  seeds of its tokens <- d/dsum
                     sums -> value                              d/dsum

   There are two calls. seqpar_vocab_forward computes the values. seqpar_vocab_backward takes
   the seeds dL/dlogp (and those of entropy, smoothing and z-loss) and computes dhidden and
   dtable. It recomputes the logits and returns the values, too. SFT needs the backward call
   only, because its seeds are known beforehand: -1/N for every supervised token, where N is the
   number of supervised tokens of the optimizer step. Losses whose seeds depend on the log-probs
   (DPO, PPO) need both calls. The logits of a long row would fill the memory, so they are
   computed for rows_max tokens at a time.
   ========================================================================================== */

/* logits (rows, vocab) = hidden (from token `first` on) . table^T */
static seqpar_status seqpar__vocab_logits(seqpar_ctx *ctx, void *logits, const void *hidden,
                                          const void *table, int64_t width, int64_t first,
                                          int64_t rows, const seqpar_vocab_desc *desc) {
    seqpar_device *dev = ctx->device;
    seqpar_matmul_args m;
    memset(&m, 0, sizeof m);
    m.y.data = logits;
    m.y.stride = desc->vocab;
    m.x.data = seqpar__at(hidden, first * width, dev->storage);
    m.x.stride = width;
    m.w.data = (void *)table;
    m.w.stride = width;
    m.rows = rows;
    m.out = desc->vocab;
    m.in = width;
    return dev->matmul(dev, &m, ctx->queue);
}

static double seqpar__vocab_scale_of(const seqpar_vocab_desc *desc) {
    return desc->temperature == 0 ? 0 : 1.0 / desc->temperature;
}

/* Writes the teacher's logits of these tokens to `teacher_logits`, and computes the teacher's entropy
   and the KL divergence between teacher and student. With `gradient`, `teacher_logits` becomes the
   gradient of this divergence with respect to the student's logits, times dkl. */
static seqpar_status seqpar__vocab_teach(seqpar_ctx *ctx, void *logits, void *teacher_logits,
                                         int64_t first, int64_t rows, const seqpar_vocab_io *io,
                                         int gradient, const seqpar_vocab_desc *desc) {
    const seqpar_vocab_teacher *from = io->teacher;
    int acc = ctx->device->accumulator;
    seqpar_distill_args d;
    memset(&d, 0, sizeof d);
    SEQPAR__TRY(seqpar__vocab_logits(ctx, teacher_logits, from->hidden, from->table,
                                     from->width, first, rows, desc));
    d.logits.data = logits;
    d.teacher.data = teacher_logits;
    d.logits.stride = d.teacher.stride = desc->vocab;
    d.rows = rows;
    d.vocab = desc->vocab;
    d.kl = seqpar__at_or_null(from->kl, first, acc);
    d.entropy = seqpar__at_or_null(from->entropy, first, acc);
    if (gradient) d.dkl = seqpar__at_or_null((void *)from->dkl, first, acc);
    d.scale = seqpar__vocab_scale_of(desc);
    d.reverse = from->reverse;
    d.gradient = gradient;
    return ctx->device->distill(ctx->device, &d, ctx->queue);
}

/* Computes log-probs by the softmax over the tokens of io->choices alone. With `gradient` the
   logits become dL/dlogits. */
static seqpar_status seqpar__vocab_choose(seqpar_ctx *ctx, void *logits, int64_t first,
                                          int64_t rows, const seqpar_vocab_io *io, int gradient,
                                          const seqpar_vocab_desc *desc) {
    const seqpar_vocab_choices *c = io->choices;
    int acc = ctx->device->accumulator;
    seqpar_choose_args a;
    memset(&a, 0, sizeof a);
    a.logits.data = logits;
    a.logits.stride = desc->vocab;
    a.rows = rows;
    a.vocab = desc->vocab;
    a.count = c->count;
    memcpy(a.ids, c->ids, sizeof a.ids);
    a.logq = seqpar__at_or_null(c->logq, first * c->count, acc);
    if (gradient) a.dlogq = seqpar__at_or_null((void *)c->dlogq, first * c->count, acc);
    a.scale = seqpar__vocab_scale_of(desc);
    a.gradient = gradient;
    return ctx->device->choose(ctx->device, &a, ctx->queue);
}

/* Writes the likeliest token of each row to io->best, unless that is NULL. */
static seqpar_status seqpar__vocab_best(seqpar_ctx *ctx, void *logits, int64_t first,
                                        int64_t rows, const seqpar_vocab_io *io,
                                        const seqpar_vocab_desc *desc) {
    seqpar_sample_args a;
    if (!io->best) return SEQPAR_OK;
    memset(&a, 0, sizeof a);
    a.logits.data = logits;
    a.logits.stride = desc->vocab;
    a.rows = rows;
    a.vocab = desc->vocab;
    a.top_p = 1;
    a.ids = io->best + first;
    return ctx->device->sample(ctx->device, &a, ctx->queue);
}

/* Computes the logits of `rows` tokens from `first` on and their statistics. With `gradient`
   the logits become dL/dlogits. teacher_logits: memory for the teacher's logits of these tokens. */
static seqpar_status seqpar__vocab_rows(seqpar_ctx *ctx, void *logits, void *teacher_logits,
                                        int64_t first, int64_t rows, const seqpar_vocab_io *io,
                                        int gradient, const seqpar_vocab_desc *desc) {
    const seqpar_vocab_values *values = &io->values;
    const seqpar_vocab_seeds *seeds = &io->seeds;
    seqpar_device *dev = ctx->device;
    seqpar_vocab_softmax_args s;
    int acc = dev->accumulator;
    memset(&s, 0, sizeof s);
    SEQPAR__TRY(seqpar__vocab_logits(ctx, logits, io->hidden, io->table, desc->hidden, first,
                                     rows, desc));
    SEQPAR__TRY(seqpar__vocab_best(ctx, logits, first, rows, io, desc));
    if (io->choices) return seqpar__vocab_choose(ctx, logits, first, rows, io, gradient, desc);
    if (io->teacher)
        SEQPAR__TRY(
            seqpar__vocab_teach(ctx, logits, teacher_logits, first, rows, io, gradient, desc));
    s.logits.data = logits;
    s.logits.stride = desc->vocab;
    s.rows = rows;
    s.vocab = desc->vocab;
    s.scale = seqpar__vocab_scale_of(desc);
    s.targets = io->targets + first;
    s.logp = seqpar__at_or_null(values->logp, first, acc);
    s.entropy = seqpar__at_or_null(values->entropy, first, acc);
    s.lse = seqpar__at_or_null(values->lse, first, acc);
    s.smooth = seqpar__at_or_null(values->smooth, first, acc);
    if (gradient) {
        s.gradient = 1;
        s.dlogp = seqpar__at_or_null((void *)seeds->dlogp, first, acc);
        s.dentropy = seqpar__at_or_null((void *)seeds->dentropy, first, acc);
        s.dsmooth = seqpar__at_or_null((void *)seeds->dsmooth, first, acc);
        s.dzloss = seqpar__at_or_null((void *)seeds->dzloss, first, acc);
    }
    SEQPAR__TRY(dev->vocab_softmax(dev, &s, ctx->queue));
    if (!gradient || !io->teacher) return SEQPAR_OK;
    seqpar_add_args sum;
    sum.y = logits;
    sum.a = logits;
    sum.b = teacher_logits;
    sum.count = rows * desc->vocab;
    sum.accumulators = 0;
    return dev->add(dev, &sum, ctx->queue);
}

static int64_t seqpar__vocab_rows_max(const seqpar_vocab_desc *desc) {
    return desc->rows_max > 0 ? desc->rows_max : SEQPAR__MAX(256, desc->hidden);
}

static seqpar_status seqpar__check_teacher(const char *function, seqpar_error *error,
                                           const seqpar_vocab_io *io) {
    const seqpar_vocab_teacher *from = io->teacher;
    SEQPAR_NEED_BY(function, error, "io->teacher->hidden, io->teacher->table",
                   SEQPAR_IF(io->tokens > 0, from->hidden),
                   SEQPAR_IF(io->tokens > 0, from->table));
    if (from->width >= 1 && from->width <= SEQPAR_MAX_WIDTH) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_SIZE,
                       "the teacher's hidden states have width %lld; give 1 to %lld",
                       (long long)from->width, (long long)SEQPAR_MAX_WIDTH);
}

static seqpar_status seqpar__check_choices(seqpar_error *error, const seqpar_vocab_io *io,
                                           int64_t vocab) {
    const seqpar_vocab_choices *c = io->choices;
    const seqpar_vocab_values *v = &io->values;
    const seqpar_vocab_seeds *s = &io->seeds;
    if (c->count < 2 || c->count > SEQPAR_MAX_CHOICES)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "a choice among %lld tokens is asked for; give 2 to %d",
                           (long long)c->count, SEQPAR_MAX_CHOICES);
    for (int64_t i = 0; i < c->count; i++) {
        int64_t same = 0;
        while (same < i && c->ids[same] != c->ids[i]) same++;
        if (c->ids[i] < 0 || c->ids[i] >= vocab || same < i)
            return seqpar_fail(error, SEQPAR_ERR_TOKEN_ID,
                               "choice %lld is token %d%s; give ids from 0 to %lld, each once",
                               (long long)i, (int)c->ids[i],
                               same < i ? ", as an earlier choice is" : "",
                               (long long)vocab - 1);
    }
    if (io->teacher || v->logp || v->entropy || v->lse || v->smooth || s->dlogp ||
        s->dentropy || s->dsmooth || s->dzloss)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "choices are given with values, seeds or a teacher, which use the "
                           "whole vocabulary; leave those NULL, or the choices");
    return SEQPAR_OK;
}

static seqpar_status seqpar__check_vocab(const char *function, seqpar_error *error,
                                         const seqpar_vocab_io *io,
                                         const seqpar_vocab_desc *desc) {
    int any = io->tokens > 0;
    SEQPAR_NEED_BY(function, error, "io->hidden, io->table, io->targets",
                   SEQPAR_IF(any, io->hidden), SEQPAR_IF(any, io->table),
                   SEQPAR_IF(any && !io->choices, io->targets));
    if (desc->hidden <= 0 || desc->vocab <= 0)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "the vocabulary projection has hidden %lld and vocab %lld; both "
                           "must be positive",
                           (long long)desc->hidden, (long long)desc->vocab);
    if (desc->hidden > SEQPAR_MAX_WIDTH || desc->vocab > SEQPAR_MAX_VOCAB)
        return seqpar_fail(
            error, SEQPAR_ERR_SIZE,
            "the vocabulary projection has hidden %lld and vocab %lld; at most %lld and %lld "
            "are possible",
            (long long)desc->hidden, (long long)desc->vocab, (long long)SEQPAR_MAX_WIDTH,
            (long long)SEQPAR_MAX_VOCAB);
    if (!(desc->temperature >= 0) || desc->temperature > 1e30)
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "the temperature of logits is %g; give a number above 0, up to 1e30, or 0 for 1",
            desc->temperature);
    if (io->choices) return seqpar__check_choices(error, io, desc->vocab);
    return io->teacher ? seqpar__check_teacher(function, error, io) : SEQPAR_OK;
}

/* Memory for the logits of `tokens` tokens. */
static seqpar_status seqpar__vocab_scratch(seqpar_ctx *ctx, seqpar_buffer *scratch,
                                           int64_t tokens, const seqpar_vocab_desc *desc) {
    return seqpar_buffer_new(ctx, scratch,
                             tokens * desc->vocab * seqpar_dtype_bytes(ctx->device->storage),
                             SEQPAR_MEM_SCRATCH);
}

SEQPAR_DEF seqpar_status seqpar_vocab_forward(seqpar_ctx *ctx, const seqpar_vocab_io *io,
                                              const seqpar_vocab_desc *desc) {
    int64_t most;
    seqpar_buffer logits, teacher_logits;
    seqpar_status status;
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, io, desc", ctx, io, desc);
    SEQPAR__TRY(seqpar__check_vocab(__func__, ctx->error, io, desc));
    most = SEQPAR__MIN(seqpar__vocab_rows_max(desc), io->tokens);
    memset(&teacher_logits, 0, sizeof teacher_logits);
    status = seqpar__vocab_scratch(ctx, &logits, most, desc);
    if (!status && io->teacher)
        status = seqpar__vocab_scratch(ctx, &teacher_logits, most, desc);
    for (int64_t first = 0; !status && first < io->tokens; first += most)
        status = seqpar__vocab_rows(ctx, logits.data, teacher_logits.data, first,
                                    SEQPAR__MIN(most, io->tokens - first), io, 0, desc);
    seqpar_buffer_free(ctx, &teacher_logits);
    seqpar_buffer_free(ctx, &logits);
    return status;
}

/* ---- a fold in tiles: the program is cut into tiles, ranges of at most `most` tokens. A
   longer leaf is cut into tiles of at most `part` tokens. Each tile ends by storing its stack,
   value n (from the bottom) in slot n. So after the last tile the nodes are in the store in
   rising order, node n in slot n. ---- */

typedef struct seqpar__tiler {
    seqpar_fold_op *ops;
    int64_t count; /* operations in this tile's program */
    /* values on the whole program's stack; how many of the top ones this tile has */
    int64_t stack, loaded;
    int64_t slots; /* slots that the store needs: the most values left at the end of a tile */
    int64_t most;  /* most tokens of a tile */
    int64_t part;  /* most tokens of a tile that holds only a part of a longer leaf */
    int alone;     /* 1: this is such a tile */
    seqpar_piece *leaves;
    int64_t leaf_count;
    int64_t first, rows; /* tokens of this tile */
    const seqpar_token_fold *fold;
    seqpar_token_tile_fn fn; /* NULL: only `slots` is counted */
    void *user;
} seqpar__tiler;

static void seqpar__tiler_emit(seqpar__tiler *r, int32_t op, int64_t index) {
    r->ops[r->count].op = op;
    r->ops[r->count++].index = (int32_t)index;
}

/* Loads values until the top `need` values of the whole stack are on this tile's stack. */
static void seqpar__tiler_load(seqpar__tiler *r, int64_t need) {
    int64_t missing = need - r->loaded;
    for (int64_t i = missing; i > 0; i--)
        seqpar__tiler_emit(r, SEQPAR_FOLD_LOAD, r->stack - r->loaded - i);
    if (missing > 0) r->loaded = need;
}

static void seqpar__tiler_close(seqpar__tiler *r) {
    int64_t at = r->stack;
    r->slots = SEQPAR__MAX(r->slots, at);
    for (; r->loaded > 0; r->loaded--) seqpar__tiler_emit(r, SEQPAR_FOLD_STORE, --at);
}

/* Ends a tile, and computes it. */
static seqpar_status seqpar__tiler_end(seqpar__tiler *r) {
    seqpar_token_tile tile;
    seqpar__tiler_close(r);
    tile.first = r->first;
    tile.rows = r->rows;
    tile.program = r->ops;
    tile.program_count = r->count;
    tile.depth = r->fold->depth + 2;
    tile.leaves = r->leaves;
    if (r->fn) SEQPAR__TRY(r->fn(r->user, &tile));
    r->first += r->rows;
    r->rows = r->count = r->leaf_count = 0;
    r->alone = 0;
    return SEQPAR_OK;
}

/* A leaf longer than a tile is computed in parts, in tiles that hold nothing else. So the
   length of a part, which depends on the device's sum_step, does not move the ends of the other
   tiles, and sum_step 1 needs the most slots (r->slots). seqpar_token_node_count takes 1. */
static seqpar_status seqpar__tiler_leaf(seqpar__tiler *r, const seqpar_piece *piece) {
    int alone = piece->count > r->most;
    int64_t most = alone ? r->part : r->most, at = 0, n;
    if (r->rows > 0 && (r->alone || r->rows + piece->count > r->most))
        SEQPAR__TRY(seqpar__tiler_end(r));
    for (; at < piece->count; at += n) {
        if (at > 0) SEQPAR__TRY(seqpar__tiler_end(r));
        r->alone = alone;
        n = SEQPAR__MIN(piece->count - at, most);
        r->leaves[r->leaf_count] = *piece;
        r->leaves[r->leaf_count].local = r->rows;
        r->leaves[r->leaf_count].count = n;
        if (at > 0)
            seqpar__tiler_load(r, 1);
        else {
            r->stack++;
            r->loaded++;
        }
        seqpar__tiler_emit(r, at > 0 ? SEQPAR_FOLD_EXTEND : SEQPAR_FOLD_LEAF, r->leaf_count++);
        r->rows += n;
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__tiler_tiles(seqpar__tiler *r, const seqpar_share *share) {
    for (int64_t i = 0; i < r->fold->program_count; i++) {
        seqpar_fold_op op = r->fold->program[i];
        if (op.op == SEQPAR_FOLD_LEAF) {
            SEQPAR__TRY(seqpar__tiler_leaf(r, &share->pieces[op.index]));
            continue;
        }
        if (op.op == SEQPAR_FOLD_STORE) break; /* seqpar__tiler_close stores all nodes */
        seqpar__tiler_load(r, 2);
        seqpar__tiler_emit(r, op.op, op.index);
        r->stack--;
        r->loaded--;
    }
    return r->rows ? seqpar__tiler_end(r) : SEQPAR_OK;
}

/* Returns the most tokens of a tile: all tokens if `most` allows; else the length of the
   longest leaf times the largest power of two that fits into `most`, or `most` if the leaf
   alone is longer. With equal leaves such a tile is a whole subtree, which leaves fewer values
   on the stack than a slightly longer tile. */
static int64_t seqpar__tiler_rows(const seqpar_share *share, int64_t most) {
    int64_t longest = 1, leaves = 1;
    if (most >= share->tokens) return SEQPAR__MAX(share->tokens, 1);
    for (int64_t i = 0; i < share->count; i++)
        longest = SEQPAR__MAX(longest, share->pieces[i].count);
    while (2 * leaves * longest <= most) leaves *= 2;
    return SEQPAR__MIN(most, leaves * longest);
}

static int64_t seqpar__tiler_part(int64_t rows, int64_t step) {
    step = SEQPAR__MAX(step, 1);
    return SEQPAR__MAX(rows / step, 1) * step;
}

static int seqpar__tiler_new(seqpar__tiler *r, const seqpar_share *share,
                             const seqpar_token_fold *fold, int64_t most, int64_t step) {
    memset(r, 0, sizeof *r);
    r->fold = fold;
    r->most = seqpar__tiler_rows(share, most);
    r->part = seqpar__tiler_part(r->most, step);
    r->ops = SEQPAR__NEW(seqpar_fold_op,
                         4 * (fold->program_count + fold->depth + 8) + 4 * share->count);
    r->leaves = SEQPAR__NEW(seqpar_piece, share->count + 4);
    return r->ops && r->leaves;
}

static void seqpar__tiler_free(seqpar__tiler *r) {
    SEQPAR_FREE(r->ops);
    SEQPAR_FREE(r->leaves);
}

static seqpar_status seqpar__check_tiles(seqpar_error *error, const seqpar_share *share,
                                         const seqpar_token_fold *fold, int64_t most) {
    int64_t leaves = 0;
    for (int64_t i = 0; i < fold->program_count; i++)
        leaves += fold->program[i].op == SEQPAR_FOLD_LEAF;
    if (leaves != share->count)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "the share has %lld pieces, the fold wants %lld; give the fold "
                           "that seqpar_step_fold made for this share",
                           (long long)share->count, (long long)leaves);
    return most >= 1 ? SEQPAR_OK
                     : seqpar_fail(error, SEQPAR_ERR_SIZE,
                                   "a tile of %lld tokens is asked for; give 1 or more",
                                   (long long)most);
}

SEQPAR_DEF seqpar_status seqpar_token_tiles(seqpar_error *error, const seqpar_share *share,
                                            const seqpar_token_fold *fold, int64_t most,
                                            int64_t step, seqpar_token_tile_fn fn, void *user) {
    seqpar__tiler r;
    seqpar_status status = SEQPAR_OK;
    SEQPAR_NEED(error, "share, fold, fn", share, fold, SEQPAR_THERE(fn));
    SEQPAR__TRY(seqpar__check_tiles(error, share, fold, most));
    if (!seqpar__tiler_new(&r, share, fold, most, step))
        status = seqpar__no_memory(error, "tiles of tokens");
    r.fn = fn;
    r.user = user;
    if (!status) status = seqpar__tiler_tiles(&r, share);
    seqpar__tiler_free(&r);
    return status;
}

SEQPAR_DEF int64_t seqpar_token_tile_rows(const seqpar_share *share, int64_t most,
                                          int64_t step) {
    SEQPAR_MUST("share", share);
    int64_t rows = seqpar__tiler_rows(share, SEQPAR__MAX(most, 1));
    return SEQPAR__MIN(SEQPAR__MAX(rows, seqpar__tiler_part(rows, step)), share->tokens);
}

/* Counts with step 1, which gives an upper bound: a device with a larger step may compute a
   long leaf in one part, and then needs no slot for its unfinished sum. */
SEQPAR_DEF int64_t seqpar_token_node_count(const seqpar_share *share,
                                           const seqpar_token_fold *fold, int64_t most) {
    SEQPAR_MUST("share, fold", share, fold);
    seqpar__tiler r;
    if (seqpar__tiler_new(&r, share, fold, SEQPAR__MAX(most, 1), 1))
        (void)seqpar__tiler_tiles(&r, share);
    else
        r.slots = fold->depth; /* no memory: an upper bound; seqpar_token_tiles fails too */
    seqpar__tiler_free(&r);
    return r.slots;
}

typedef struct seqpar__vocab_call {
    seqpar_ctx *ctx;
    const seqpar_vocab_io *io;
    const seqpar_vocab_desc *desc;
    void *logits;         /* a tile's; with io->dlogits, those of all tokens */
    void *teacher_logits; /* a tile's teacher logits */
    /* The rows of the table whose nodes seqpar_vocab_nodes computes from io->dlogits. In
       seqpar_vocab_backward, which computes the dlogits, table_rows is 0 */
    int64_t table_first, table_rows;
} seqpar__vocab_call;

/* Computes the logits of a tile, overwrites them with dL/dlogits, and computes dhidden. */
static seqpar_status seqpar__vocab_tokens(const seqpar__vocab_call *c, void *logits,
                                          const seqpar_token_tile *r) {
    seqpar_device *dev = c->ctx->device;
    seqpar_matmul_args m;
    memset(&m, 0, sizeof m);
    SEQPAR__TRY(seqpar__vocab_rows(c->ctx, logits, c->teacher_logits, r->first, r->rows, c->io,
                                   1, c->desc));
    m.y.data = seqpar__at(c->io->dhidden, r->first * c->desc->hidden, dev->storage);
    m.y.stride = c->desc->hidden;
    m.x.data = logits;
    m.x.stride = c->desc->vocab;
    m.w.data = (void *)c->io->table;
    m.w.stride = c->desc->hidden;
    m.rows = r->rows;
    m.out = c->desc->hidden;
    m.in = c->desc->vocab;
    m.transposed = 1;
    return dev->matmul(dev, &m, c->ctx->queue);
}

static seqpar_status seqpar__vocab_tile(void *user, const seqpar_token_tile *t) {
    const seqpar__vocab_call *c = (const seqpar__vocab_call *)user;
    seqpar_device *dev = c->ctx->device;
    seqpar_weight_grad_args w;
    int64_t offset = c->io->dlogits ? t->first * c->desc->vocab : 0;
    void *logits = seqpar__at(c->logits, offset, dev->storage);
    memset(&w, 0, sizeof w);
    if (!c->table_rows) SEQPAR__TRY(seqpar__vocab_tokens(c, logits, t));
    if (!c->table_rows && (c->io->dlogits || c->io->frozen)) return SEQPAR_OK;
    w.fold.program = t->program;
    w.fold.program_count = t->program_count;
    w.fold.depth = t->depth;
    w.fold.store = c->io->nodes;
    w.fold.store_stride = c->io->node_stride;
    w.leaves = t->leaves;
    w.dy.data = seqpar__at(logits, c->table_first, dev->storage);
    w.dy.stride = c->desc->vocab;
    w.x.data = seqpar__at(c->io->hidden, t->first * c->desc->hidden, dev->storage);
    w.x.stride = c->desc->hidden;
    w.out = c->table_rows ? c->table_rows : c->desc->vocab;
    w.in = c->desc->hidden;
    return dev->weight_grad(dev, &w, c->ctx->queue);
}

/* For a caller without share and fold: all tokens are one piece, and its sum is the node. */
typedef struct seqpar__vocab_plain {
    seqpar_piece piece;
    seqpar_share share;
    seqpar_fold_op leaf;
    seqpar_token_fold fold;
} seqpar__vocab_plain;

static void seqpar__vocab_plain_init(seqpar__vocab_plain *p, int64_t tokens) {
    memset(p, 0, sizeof *p);
    p->piece.count = p->share.tokens = tokens;
    p->share.pieces = &p->piece;
    p->share.count = 1;
    p->leaf.op = SEQPAR_FOLD_LEAF;
    p->fold.program = &p->leaf;
    p->fold.program_count = p->fold.node_count = p->fold.depth = 1;
}

/* If neither share nor fold is given, sets both to those of `plain`. Without tokens there is no
   tile, so nothing would write the node. Then this zeroes the first `elements` elements of the
   node. */
static void seqpar__vocab_plain_take(seqpar_ctx *ctx, const seqpar_vocab_io *io,
                                     seqpar__vocab_plain *plain, const seqpar_share **share,
                                     const seqpar_token_fold **fold, int64_t elements) {
    if (*share || *fold) return;
    seqpar__vocab_plain_init(plain, io->tokens);
    *share = &plain->share;
    *fold = &plain->fold;
    if (io->tokens == 0 && elements > 0)
        ctx->device->zero(ctx->device, io->nodes,
                          elements * seqpar_dtype_bytes(ctx->device->accumulator), ctx->queue);
}

SEQPAR_DEF int64_t seqpar_vocab_node_count(const seqpar_share *share,
                                           const seqpar_token_fold *fold,
                                           const seqpar_vocab_desc *desc) {
    SEQPAR_MUST("desc", desc);
    if (!share && !fold) return 1;
    return seqpar_token_node_count(share, fold, seqpar__vocab_rows_max(desc));
}

static seqpar_status seqpar__check_vocab_fold(seqpar_error *error, const seqpar_share *share,
                                              const seqpar_token_fold *fold) {
    if (!share || !fold)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "one of share and fold is NULL; give both, or neither for a plain "
                           "sum of the vocabulary's gradient over the tokens");
    return seqpar__check_tiles(error, share, fold, 1);
}

SEQPAR_DEF seqpar_status seqpar_vocab_backward(seqpar_ctx *ctx, const seqpar_vocab_io *io,
                                               const seqpar_share *share,
                                               const seqpar_token_fold *fold,
                                               const seqpar_vocab_desc *desc) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, io, desc", ctx, io, desc);
    seqpar__vocab_call c;
    seqpar__vocab_plain plain;
    seqpar_buffer logits, teacher_logits;
    seqpar_status status = SEQPAR_OK;
    SEQPAR__TRY(seqpar__check_vocab(__func__, ctx->error, io, desc));
    SEQPAR_NEED(ctx->error, "io->dhidden", SEQPAR_IF(io->tokens > 0, io->dhidden));
    seqpar__vocab_plain_take(ctx, io, &plain, &share, &fold,
                             io->dlogits || io->frozen ? 0 : desc->vocab * desc->hidden);
    SEQPAR__TRY(seqpar__check_vocab_fold(ctx->error, share, fold));
    SEQPAR_NEED(ctx->error, "io->nodes",
                SEQPAR_IF(!io->dlogits && !io->frozen && fold->node_count > 0, io->nodes));
    memset(&c, 0, sizeof c);
    memset(&logits, 0, sizeof logits);
    memset(&teacher_logits, 0, sizeof teacher_logits);
    c.ctx = ctx;
    c.io = io;
    c.desc = desc;
    int64_t rows = seqpar__vocab_rows_max(desc), step = ctx->device->sum_step;
    int64_t most = seqpar_token_tile_rows(share, rows, step);
    if (!status && !io->dlogits) status = seqpar__vocab_scratch(ctx, &logits, most, desc);
    if (!status && io->teacher)
        status = seqpar__vocab_scratch(ctx, &teacher_logits, most, desc);
    c.logits = io->dlogits ? io->dlogits : logits.data;
    c.teacher_logits = teacher_logits.data;
    if (!status)
        status = seqpar_token_tiles(ctx->error, share, fold, rows, step, seqpar__vocab_tile,
                                    &c);
    seqpar_buffer_free(ctx, &teacher_logits);
    seqpar_buffer_free(ctx, &logits);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_vocab_nodes(seqpar_ctx *ctx, const seqpar_vocab_io *io,
                                            const seqpar_share *share,
                                            const seqpar_token_fold *fold,
                                            const seqpar_vocab_desc *desc, int64_t first,
                                            int64_t rows) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, io, desc", ctx, io, desc);
    seqpar__vocab_call c;
    seqpar__vocab_plain plain;
    SEQPAR__TRY(seqpar__check_vocab(__func__, ctx->error, io, desc));
    if (first < 0 || rows < 1 || first > desc->vocab - rows || (!io->dlogits && io->tokens))
        return seqpar_fail(
            ctx->error, SEQPAR_ERR_SIZE,
            "first is %lld and rows %lld, of a vocab of %lld%s; give rows within it, and the "
            "io->dlogits that seqpar_vocab_backward wrote",
            (long long)first, (long long)rows, (long long)desc->vocab,
            io->dlogits ? "" : ", and dlogits are NULL");
    seqpar__vocab_plain_take(ctx, io, &plain, &share, &fold, rows * desc->hidden);
    SEQPAR__TRY(seqpar__check_vocab_fold(ctx->error, share, fold));
    SEQPAR_NEED(ctx->error, "io->nodes", SEQPAR_IF(fold->node_count > 0, io->nodes));
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    c.io = io;
    c.desc = desc;
    c.logits = io->dlogits;
    c.table_first = first;
    c.table_rows = rows;
    /* one tile of all tokens: no sum waits in the store for a later tile */
    return seqpar_token_tiles(ctx->error, share, fold, SEQPAR__MAX(share->tokens, 1),
                              ctx->device->sum_step, seqpar__vocab_tile, &c);
}

SEQPAR_DEF seqpar_status seqpar_sft_seeds(seqpar_error *error, const seqpar_host_seeds *seeds,
                                          const int32_t *targets, const double *weights,
                                          int64_t tokens, const seqpar_sft_desc *desc) {
    double scale;
    int64_t live = 0;
    SEQPAR_NEED(error, "seeds, targets, desc", seeds, SEQPAR_IF(tokens > 0, targets), desc);
    SEQPAR_NEED(error, "seeds->dlogp, seeds->dsmooth, seeds->dzloss",
                SEQPAR_IF(tokens > 0, seeds->dlogp),
                SEQPAR_IF(tokens > 0 && desc->label_smoothing != 0, seeds->dsmooth),
                SEQPAR_IF(tokens > 0 && desc->z_loss != 0, seeds->dzloss));
    scale = 1.0 / (double)desc->count;
    for (int64_t t = 0; t < tokens; t++) live += targets[t] != SEQPAR_IGNORE;
    if (desc->count <= 0)
        return seqpar_fail(error, SEQPAR_ERR_SEED_COUNT,
                           "the step has %lld supervised tokens; a mean needs at least 1",
                           (long long)desc->count);
    if (live > desc->count)
        return seqpar_fail(error, SEQPAR_ERR_SEED_COUNT,
                           "count is %lld, but this call alone has %lld supervised tokens; "
                           "give the count of the whole step (batch.counts.supervised)",
                           (long long)desc->count, (long long)live);
    if (!(desc->label_smoothing >= 0 && desc->label_smoothing < 1) || !(desc->z_loss >= 0))
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "label_smoothing %g must lie in [0, 1) and z_loss %g must not be negative",
            desc->label_smoothing, desc->z_loss);
    for (int64_t t = 0; t < tokens; t++) {
        double w = 0.0;
        if (targets[t] != SEQPAR_IGNORE) w = (weights ? weights[t] : 1.0) * scale;
        seeds->dlogp[t] = -(1.0 - desc->label_smoothing) * w;
        if (seeds->dsmooth) seeds->dsmooth[t] = desc->label_smoothing * w;
        if (seeds->dzloss) seeds->dzloss[t] = desc->z_loss * w;
    }
    return SEQPAR_OK;
}

SEQPAR_DEF double seqpar_sft_token_loss(double logp, double smooth, double lse,
                                        const seqpar_sft_desc *desc) {
    SEQPAR_MUST("desc", desc);
    return (1.0 - desc->label_smoothing) * -logp + desc->label_smoothing * smooth +
           desc->z_loss * lse * lse;
}

/* =============================================================================================
   >>objective  sums per document, and the objectives computed from them

   The second and third layer of a loss (>>loss).

   A preference loss needs the log-prob of a whole response. A rank may hold only some of its
   tokens, and the sigmoid of a partial sum means nothing. So values are first summed per
   document over all ranks. A segment is one such document. The leaves of its fold are its
   partial sums, one for each of its cells. The sum is the same number on every rank, however
   the row was split and whatever it is packed with.

   An objective is a function of plain numbers and knows nothing of ranks. It returns its value
   and its derivative, which becomes the seed of the document's tokens.

   A mean is x0 + sum(xi - x0) / N, so that the mean of equal numbers is exactly that number.
   Before the first DPO update policy and reference are equal, so the loss is -log(sigmoid(0))
   to the bit.
   ========================================================================================== */

static int seqpar__segments_reserve(seqpar_segments *s, int64_t count) {
    void *place = s->place, *values = s->values;
    int64_t capacity = s->capacity;
    int ok = seqpar__grow(&place, &capacity, count, 16);
    s->place = (int64_t *)place;
    capacity = s->capacity;
    ok = ok && seqpar__grow(&values, &capacity, count, s->width * 8);
    s->values = (double *)values;
    if (ok) s->capacity = capacity;
    return ok;
}

SEQPAR_DEF seqpar_status seqpar_segments_push(seqpar_error *error, seqpar_segments *s,
                                              int64_t segment, int64_t leaf,
                                              const double *values) {
    SEQPAR_NEED(error, "segments", s);
    SEQPAR_NEED(error, "values", SEQPAR_IF(s->width > 0, values));
    if (!seqpar__segments_reserve(s, s->count + 1))
        return seqpar__no_memory(error, "sums per document");
    s->place[2 * s->count] = segment;
    s->place[2 * s->count + 1] = leaf;
    memcpy(s->values + s->count++ * s->width, values, (size_t)s->width * 8);
    return SEQPAR_OK;
}

/* A piece lies in one document. The sum over its tokens is added as one leaf. */
static int seqpar__segments_piece(seqpar_segments *s, const double *values,
                                  const seqpar_row *row, const seqpar_piece *p) {
    int64_t last = -1;
    for (int64_t t = 0; t < p->count; t++) {
        int64_t d = seqpar__document_of(row, p->start + t * p->stride);
        const double *token = values + (p->local + t) * s->width;
        if (d != last && seqpar_segments_push(NULL, s, row->doc_source ? row->doc_source[d] : d,
                                              p->leaf, token))
            return 0;
        for (int64_t w = 0; d == last && w < s->width; w++)
            s->values[(s->count - 1) * s->width + w] += token[w];
        last = d;
    }
    return 1;
}

SEQPAR_DEF seqpar_status seqpar_segments_add(seqpar_error *error, seqpar_segments *s,
                                             const double *values, const seqpar_share *share) {
    SEQPAR_NEED(error, "segments, share", s, share);
    SEQPAR_NEED(error, "values", SEQPAR_IF(share->tokens > 0, values));
    for (int64_t i = 0; i < share->count; i++)
        if (!seqpar__segments_piece(s, values, &share->rows[share->pieces[i].row],
                                    &share->pieces[i]))
            return seqpar__no_memory(error, "sums per document");
    return SEQPAR_OK;
}

SEQPAR_DEF void seqpar_segments_free(seqpar_segments *s) {
    SEQPAR_MUST("segments", s);
    SEQPAR_FREE(s->place);
    SEQPAR_FREE(s->values);
    memset(s, 0, sizeof *s);
}

/* The error for a leaf that was given twice. */
static seqpar_status seqpar__leaf_twice(seqpar_error *error, int64_t document, int64_t leaf) {
    char of[40] = "step";
    if (document >= 0) snprintf(of, sizeof of, "document %lld", (long long)document);
    return seqpar_fail(error, SEQPAR_ERR_STEP,
                       "the sum of the %s was given leaf %lld twice; every cell of a document "
                       "counts once, on one rank",
                       of, (long long)leaf);
}

typedef struct seqpar__segment_leaf {
    int64_t segment, leaf, at;
} seqpar__segment_leaf;

static int seqpar__by_segment(const void *a, const void *b) {
    const seqpar__segment_leaf *x = (const seqpar__segment_leaf *)a;
    const seqpar__segment_leaf *y = (const seqpar__segment_leaf *)b;
    if (x->segment != y->segment) return x->segment < y->segment ? -1 : 1;
    return x->leaf < y->leaf ? -1 : x->leaf > y->leaf;
}

/* Folds the entries s of all ranks into sums (documents, width). documents -1: all entries are
   of segment 0, which stands for the whole step. */
static seqpar_status seqpar__segments_fold(seqpar_error *error, double *sums, int64_t documents,
                                           const seqpar_segments *s) {
    int64_t count = s->count, width = s->width;
    seqpar__segment_leaf *order = SEQPAR__NEW(seqpar__segment_leaf, count);
    int64_t *leaves = SEQPAR__NEW(int64_t, count), n;
    double *column = SEQPAR__NEW(double, count);
    seqpar_status status = order && leaves && column
                               ? SEQPAR_OK
                               : seqpar__no_memory(error, "sums per document");
    for (int64_t i = 0; !status && i < count; i++) {
        order[i].segment = s->place[2 * i];
        order[i].leaf = s->place[2 * i + 1];
        order[i].at = i;
    }
    if (!status) qsort(order, (size_t)count, sizeof *order, seqpar__by_segment);
    for (int64_t i = 0; !status && i < count; i++) leaves[i] = order[i].leaf;
    for (int64_t i = 0; !status && i < count; i += n) {
        for (n = 1; i + n < count && order[i + n].segment == order[i].segment; n++)
            if (leaves[i + n] == leaves[i + n - 1])
                status = seqpar__leaf_twice(error, documents < 0 ? -1 : order[i].segment,
                                            leaves[i + n]);
        if (order[i].segment < 0 || order[i].segment >= (documents < 0 ? 1 : documents))
            status = seqpar_fail(error, SEQPAR_ERR_SIZE,
                                 "a sum is for document %lld, but there are %lld documents, "
                                 "counted from 0",
                                 (long long)order[i].segment, (long long)documents);
        for (int64_t w = 0; !status && w < width; w++) {
            for (int64_t k = 0; k < n; k++) column[k] = s->values[order[i + k].at * width + w];
            sums[order[i].segment * width + w] = seqpar__tree_sum(leaves + i, column, 1, 0, n,
                                                                  62);
        }
    }
    SEQPAR_FREE(order);
    SEQPAR_FREE(leaves);
    SEQPAR_FREE(column);
    return status;
}

/* Gathers the entries of all ranks, in order of ranks. */
static seqpar_status seqpar__segments_gather(seqpar_comm *comm, seqpar_segments *all,
                                             const seqpar_segments *s) {
    int64_t *counts = NULL, *bytes = SEQPAR__NEW(int64_t, comm->size);
    seqpar_status status = bytes ? seqpar__gather_i64(comm, &counts, &s->count, 1,
                                                      "segment counts")
                                 : seqpar__no_memory(comm->error, "sums per document");
    for (int64_t r = 0; !status && r < comm->size; r++) {
        bytes[r] = counts[r] * 16;
        all->count += counts[r];
    }
    if (!status && !((all->place = SEQPAR__NEW(int64_t, 2 * all->count)) &&
                     (all->values = SEQPAR__NEW(double, all->count * s->width))))
        status = seqpar__no_memory(comm->error, "sums per document");
    if (!status)
        status = seqpar_comm_all_gather(comm, all->place, s->place, bytes, "segment places");
    for (int64_t r = 0; !status && r < comm->size; r++) bytes[r] = counts[r] * s->width * 8;
    if (!status)
        status = seqpar_comm_all_gather(comm, all->values, s->values, bytes, "segment sums");
    SEQPAR_FREE(counts);
    SEQPAR_FREE(bytes);
    return status;
}

static seqpar_status seqpar__segments_sum(seqpar_comm *comm, double *sums, int64_t documents,
                                          const seqpar_segments *s) {
    seqpar_segments all;
    seqpar_status status;
    memset(&all, 0, sizeof all);
    all.width = s->width;
    status = seqpar__segments_gather(comm, &all, s);
    if (!status) status = seqpar__segments_fold(comm->error, sums, documents, &all);
    seqpar_segments_free(&all);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_segments_sum(seqpar_comm *comm, double *sums, int64_t documents,
                                             const seqpar_segments *s) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(comm), "comm, segments, sums", comm, s,
                SEQPAR_IF(documents > 0, sums));
    if (documents > 0) memset(sums, 0, (size_t)(documents * s->width) * 8);
    return seqpar__segments_sum(comm, sums, documents, s);
}

/* Sums over the whole step: all leaves are pushed to segment 0. */
SEQPAR_DEF seqpar_status seqpar_sum_pieces(seqpar_ctx *ctx, double *sum, const int64_t *leaf,
                                           const double *values, int64_t count, int64_t width) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, sum, leaf, values", ctx, SEQPAR_IF(width > 0, sum),
                SEQPAR_IF(count > 0, leaf), SEQPAR_IF(count > 0, values));
    seqpar_segments step;
    seqpar_status status;
    memset(&step, 0, sizeof step);
    memset(sum, 0, (size_t)width * 8);
    step.width = width;
    for (int64_t i = 0; i < count; i++)
        if (seqpar_segments_push(ctx->error, &step, 0, leaf[i], values + i * width))
            return seqpar_segments_free(&step), SEQPAR_ERR_MEMORY;
    status = seqpar__segments_sum(ctx->world, sum, -1, &step);
    seqpar_segments_free(&step);
    return status;
}

SEQPAR_DEF void seqpar_segments_spread(double *values, const double *per_document,
                                       const seqpar_share *share) {
    SEQPAR_MUST("share", share);
    SEQPAR_MUST("values, per_document", SEQPAR_IF(share->tokens > 0, values),
                SEQPAR_IF(share->tokens > 0, per_document));
    for (int64_t i = 0; i < share->count; i++) {
        const seqpar_piece *p = &share->pieces[i];
        const seqpar_row *row = &share->rows[p->row];
        for (int64_t t = 0; t < p->count; t++) {
            int64_t d = seqpar__document_of(row, p->start + t * p->stride);
            values[p->local + t] = per_document[row->doc_source ? row->doc_source[d] : d];
        }
    }
}

/* log(1 + e) for 0 <= e <= 1, also where 1 + e rounds e away */
static double seqpar__log1p(double e) {
    double u = 1.0 + e;
    return seqpar_log(u) + (e - (u - 1.0)) / u;
}

SEQPAR_DEF double seqpar_softplus(double x) {
    double e = seqpar_exp(x > 0 ? -x : x);
    return (x > 0 ? x : 0.0) + seqpar__log1p(e);
}

SEQPAR_DEF double seqpar_sigmoid(double x) {
    double e = seqpar_exp(x > 0 ? -x : x);
    return (x > 0 ? 1.0 : e) / (1.0 + e);
}

SEQPAR_DEF double seqpar_mean(const double *x, int64_t count) {
    SEQPAR_MUST("x", SEQPAR_IF(count > 0, x));
    double sum = 0;
    for (int64_t i = 1; i < count; i++) sum += x[i] - x[0];
    return count > 0 ? x[0] + sum / (double)count : 0.0;
}

SEQPAR_DEF const seqpar_preference_kind *seqpar_preference_at(int kind) {
    static const seqpar_preference_kind table[] = {
#define SEQPAR__X(name, text, reference, means, smoothing) {text, reference, means, smoothing},
        SEQPAR_PREFERENCES(SEQPAR__X)
#undef SEQPAR__X
    };
    return kind >= 0 && kind < SEQPAR_PREFERENCE_COUNT ? &table[kind] : NULL;
}

/* Checks the options against the limits of the kind. label_smoothing is refused, not ignored,
   for a kind that has none. */
static seqpar_status seqpar__check_preference(seqpar_error *error, const seqpar_preference *p,
                                              const seqpar_preference_desc *d) {
    const seqpar_preference_kind *kind = seqpar_preference_at(d->kind);
    if (!kind)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "preference loss %d is unknown; SEQPAR_PREFERENCES has 0 to %d",
                           d->kind, SEQPAR_PREFERENCE_COUNT - 1);
    if (!(d->beta > 0))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "beta is %g; give more than 0, usually 0.1", d->beta);
    if (!(d->label_smoothing >= 0 && d->label_smoothing <= 0.5))
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "label_smoothing is %g; it is the fraction of wrong labels, give 0 to 0.5",
            d->label_smoothing);
    if (d->label_smoothing > 0 && !kind->smoothing)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "label_smoothing %g has no meaning for %s; set it to 0",
                           d->label_smoothing, kind->name);
    if (d->kind == SEQPAR_PREFERENCE_ROBUST && !(d->label_smoothing < 0.5))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "label_smoothing is %g, where robust would divide by 0; give less "
                           "than 0.5",
                           d->label_smoothing);
    if (!(d->nll_coef >= 0) || !(d->nll_tokens >= 0))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "nll_coef is %g and nll_tokens %g; neither may be negative",
                           d->nll_coef, d->nll_tokens);
    if (p->chosen_tokens <= 0 || p->rejected_tokens <= 0)
        return seqpar_fail(
            error, SEQPAR_ERR_NO_TARGET,
            "a pair has %lld chosen and %lld rejected response tokens; both need at least 1",
            (long long)p->chosen_tokens, (long long)p->rejected_tokens);
    return SEQPAR_OK;
}

/* Returns the loss of a pair as a function of the margin, and the derivative in *slope. The
   margin is chosen - rejected. Each is a sum or a mean of log-probs, minus that of the
   reference unless the kind has none. */
static double seqpar__preference_of(const seqpar_preference_desc *d, double margin,
                                    double *slope) {
    double z = d->beta * margin - (d->kind == SEQPAR_PREFERENCE_SIMPO ? d->gamma : 0.0);
    double e = d->label_smoothing, u = margin - 0.5 / d->beta;
    if (d->kind == SEQPAR_PREFERENCE_IPO) {
        *slope = 2.0 * u;
        return u * u;
    }
    if (d->kind == SEQPAR_PREFERENCE_HINGE) {
        if (z < 1.0) {
            *slope = -d->beta;
            return 1.0 - z;
        }
        *slope = z >= 1.0 ? 0.0 : z; /* a NaN stays NaN */
        return *slope;
    }
    if (d->kind == SEQPAR_PREFERENCE_ROBUST) {
        *slope = -d->beta * ((1.0 - e) * seqpar_sigmoid(-z) + e * seqpar_sigmoid(z)) /
                 (1.0 - 2.0 * e);
        return ((1.0 - e) * seqpar_softplus(-z) - e * seqpar_softplus(z)) / (1.0 - 2.0 * e);
    }
    *slope = -d->beta * (seqpar_sigmoid(-z) - e);
    return e == 0.0 ? seqpar_softplus(-z)
                    : (1.0 - e) * seqpar_softplus(-z) + e * seqpar_softplus(z);
}

SEQPAR_DEF seqpar_status seqpar_preference_loss(seqpar_error *error, seqpar_pair_result *r,
                                                const seqpar_preference *p,
                                                const seqpar_preference_desc *d) {
    SEQPAR_NEED(error, "result, pair, desc", r, p, d);
    double chosen, rejected, slope, nll_tokens;
    int alone, means;
    SEQPAR__TRY(seqpar__check_preference(error, p, d));
    alone = !seqpar_preference_at(d->kind)->reference || d->reference_free;
    means = seqpar_preference_at(d->kind)->means || d->length_normalized;
    chosen = p->chosen - (alone ? 0.0 : p->ref_chosen);
    rejected = p->rejected - (alone ? 0.0 : p->ref_rejected);
    r->dchosen = means ? 1.0 / (double)p->chosen_tokens : 1.0;
    r->drejected = means ? 1.0 / (double)p->rejected_tokens : 1.0;
    if (means) {
        chosen /= (double)p->chosen_tokens;
        rejected /= (double)p->rejected_tokens;
    }
    r->loss = seqpar__preference_of(d, chosen - rejected, &slope);
    r->dchosen *= slope;
    r->drejected *= -slope;
    r->reward_chosen = d->beta * chosen;
    r->reward_rejected = d->beta * rejected;
    if (d->nll_coef == 0.0) return SEQPAR_OK;
    nll_tokens = d->nll_tokens > 0 ? d->nll_tokens : (double)p->chosen_tokens;
    r->loss -= d->nll_coef * p->chosen / nll_tokens;
    r->dchosen -= d->nll_coef / nll_tokens;
    return SEQPAR_OK;
}

SEQPAR_DEF double seqpar_kto_kl(const double *h, int64_t count) {
    SEQPAR_MUST("h", SEQPAR_IF(count > 0, h));
    double mean = seqpar_mean(h, count);
    return mean < 0 ? 0.0 : mean; /* a NaN stays NaN */
}

SEQPAR_DEF seqpar_status seqpar_kto_loss(seqpar_error *error, seqpar_kto_result *r, double logp,
                                         double ref_logp, int desirable,
                                         const seqpar_kto_desc *d) {
    SEQPAR_NEED(error, "result, desc", r, d);
    double h = logp - ref_logp, z = d->beta * (h - d->kl);
    double weight = desirable ? d->desirable_weight : d->undesirable_weight;
    double sign = desirable ? 1.0 : -1.0;
    if (!(d->beta > 0))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "beta is %g; give more than 0, usually 0.01 to 0.1", d->beta);
    if (!(d->desirable_weight >= 0) || !(d->undesirable_weight >= 0))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "the weights of desirable and undesirable answers are %g and %g; "
                           "neither may be negative",
                           d->desirable_weight, d->undesirable_weight);
    if (!(d->kl >= 0))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "kl is %g; give the result of seqpar_kto_kl, which is at least 0",
                           d->kl);
    r->loss = weight * seqpar_sigmoid(-sign * z);
    r->dlogp = -sign * weight * d->beta * seqpar_sigmoid(z) * seqpar_sigmoid(-z);
    r->reward = d->beta * h;
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_pair_result seqpar_reward_loss(double chosen, double rejected, double margin,
                                                 double center) {
    double z = chosen - rejected - margin, sum = chosen + rejected, slope = seqpar_sigmoid(-z);
    seqpar_pair_result r;
    r.loss = seqpar_softplus(-z) + (center == 0.0 ? 0.0 : center * sum * sum);
    r.dchosen = -slope + (center == 0.0 ? 0.0 : 2.0 * center * sum);
    r.drejected = slope + (center == 0.0 ? 0.0 : 2.0 * center * sum);
    r.reward_chosen = chosen;
    r.reward_rejected = rejected;
    return r;
}

/* x limited to low .. high; a NaN stays NaN */
static double seqpar__clamp(double x, double low, double high) {
    if (x < low) return low;
    return x > high ? high : x;
}

SEQPAR_DEF seqpar_policy_result seqpar_policy_loss(double logp, double old_logp,
                                                   double advantage,
                                                   const seqpar_policy_desc *d) {
    SEQPAR_MUST("desc", d);
    double change = logp - old_logp;
    double cut = d->uncut ? change : seqpar__clamp(change, -20.0, 20.0);
    double ratio = seqpar_exp(cut), bounded = ratio, taken;
    double clipped = seqpar__clamp(ratio, 1.0 - d->clip_low, 1.0 + d->clip_high);
    seqpar_policy_result r;
    if (d->both_signs && d->dual_clip > 0 && ratio > d->dual_clip) bounded = d->dual_clip;
    r.ratio = ratio;
    r.clipped = clipped * advantage < bounded * advantage;
    taken = r.clipped ? clipped : bounded;
    r.loss = -taken * advantage;
    r.dlogp = taken != ratio || cut != change ? 0.0 : r.loss;
    if (change != change) r.dlogp = change;
    if (!(d->dual_clip > 0 && !d->both_signs && advantage < 0 &&
          r.loss > -d->dual_clip * advantage))
        return r;
    r.loss = -d->dual_clip * advantage;
    r.dlogp = 0.0;
    return r;
}

SEQPAR_DEF seqpar_value_result seqpar_value_loss(double value, double old_value, double target,
                                                 double clip) {
    double change = value - old_value;
    double inside = seqpar__clamp(change, -clip, clip);
    double error = value - target, held = old_value + inside - target;
    seqpar_value_result r;
    r.clipped = clip > 0 && held * held > error * error;
    r.loss = 0.5 * (r.clipped ? held * held : error * error);
    r.dvalue = error;
    if (r.clipped) r.dvalue = inside == change ? held : 0.0;
    return r;
}

SEQPAR_DEF double seqpar_kl(double logp, double ref_logp, int kind, double *dlogp) {
    double d = logp - ref_logp, series = 0;
    if (kind == SEQPAR_KL_K1) {
        if (dlogp) *dlogp = 1.0;
        return d;
    }
    if (kind == SEQPAR_KL_K2) {
        if (dlogp) *dlogp = d;
        return 0.5 * d * d;
    }
    if (dlogp) *dlogp = 1.0 - seqpar_exp(-d);
    if (!(d > -0.5 && d < 0.5)) return seqpar_exp(-d) - 1.0 + d;
    /* e^-d - 1 + d = d^2/2 (1 - d/3 (1 - d/4 (...))) without cancelling */
    for (int n = 16; n > 2; n--) series = (1.0 + series) * -d / n;
    if (dlogp) *dlogp = d - 0.5 * d * d * (1.0 + series);
    return 0.5 * d * d * (1.0 + series);
}

SEQPAR_DEF double seqpar_token_weight(const seqpar_aggregate *a, int64_t tokens_of_document) {
    SEQPAR_MUST("aggregate", a);
    int64_t documents = SEQPAR__MAX(a->documents, 1);
    if (a->kind == SEQPAR_AGGREGATE_TOKEN_MEAN) return 1.0 / (double)SEQPAR__MAX(a->tokens, 1);
    if (a->kind == SEQPAR_AGGREGATE_SEQUENCE_MEAN)
        return 1.0 / ((double)documents * (double)SEQPAR__MAX(tokens_of_document, 1));
    return 1.0 / ((double)documents * (a->kind == SEQPAR_AGGREGATE_SEQUENCE_SUM
                                           ? 1.0
                                           : (double)SEQPAR__MAX(a->length_max, 1)));
}

/* =============================================================================================
   >>blocks  parameter blocks and their owners

   Tensors are exchanged in groups, such as those of a layer, and a group in slices. A slice
   holds whole tensors while they fit; a larger tensor is cut between rows. A slice is cut into
   blocks of 1,024 elements, which are dealt over all W ranks. The owner of a block sums its
   gradient and, from ZeRO stage 1 on, updates it. At every stage only the owner keeps the
   gradient of a block. From stage 1 on only the owner keeps its moments and masters. At stage 3
   only the owner keeps its parameters (>>shards).

       tensor   a: 2,500 elements                b: 900
       blocks   a0 [0, 1024)  a1 [1024, 2048)    a2 [2048, 2500) and a gap    b0 [0, 900) and a gap
       owners   rank 0        rank 0             rank 1                       rank 1       W = 2

   State (gradients, moments, masters) is laid out in blocks. Every tensor begins at a block, so
   its last block may end with a gap; the caller's arrays have no such gaps. Elements of state
   are counted over the blocks of all ranks. An owner stores only its blocks, slice by slice.
   ========================================================================================== */

/* Each rank owns one run of a slice's blocks, [*begin, *begin + *count) in elements of the
   slice. Slice s is dealt from rank s % world on, so that the blocks of small slices are spread
   over the ranks. */
static void seqpar__owned_blocks(const seqpar_blocks *b, int64_t slice, int64_t world,
                                 int64_t rank, int64_t *begin, int64_t *count) {
    int64_t blocks = (b->slice_begin[slice + 1] - b->slice_begin[slice]) / SEQPAR_PARAM_BLOCK;
    int64_t turn = ((rank - slice) % world + world) % world;
    *begin = seqpar_part_begin(blocks, world, turn) * SEQPAR_PARAM_BLOCK;
    *count = seqpar_part_begin(blocks, world, turn + 1) * SEQPAR_PARAM_BLOCK - *begin;
}

/* Where this rank's blocks of a slice begin, in elements of an array that holds only the blocks
   that this rank owns. */
static int64_t seqpar__compact_begin(const seqpar_blocks *b, const seqpar_ctx *ctx,
                                     int64_t slice) {
    int64_t begin, count, at = 0;
    for (int64_t s = 0; s < slice; s++) {
        seqpar__owned_blocks(b, s, ctx->world->size, ctx->world->rank, &begin, &count);
        at += count;
    }
    return at;
}

static int64_t seqpar__tensor_elements(const seqpar_tensor *t) { return t->rows * t->cols; }
static int64_t seqpar__block_elements(const seqpar_tensor *t) {
    return (seqpar__tensor_elements(t) + SEQPAR_PARAM_BLOCK - 1) / SEQPAR_PARAM_BLOCK *
           SEQPAR_PARAM_BLOCK;
}

static seqpar_status seqpar__check_tensors(const char *function, seqpar_error *error,
                                           const seqpar_tensor *t, int64_t count) {
    int64_t end = 0, lowest, highest;
    for (int64_t i = 0; i < count; i++) {
        SEQPAR_NEED_BY(function, error, "tensors[].name", t[i].name);
        if (t[i].rows <= 0 || t[i].cols <= 0)
            return seqpar_fail(error, SEQPAR_ERR_SIZE,
                               "tensor %s is %lld x %lld; both must be positive", t[i].name,
                               (long long)t[i].rows, (long long)t[i].cols);
        if (t[i].offset < end || t[i].rows > (INT64_MAX / 16 - t[i].offset) / t[i].cols)
            return seqpar_fail(error, SEQPAR_ERR_SIZE,
                               "tensor %s of %lld x %lld begins at %lld; it must begin at %lld "
                               "or later, and end below 2^59",
                               t[i].name, (long long)t[i].rows, (long long)t[i].cols,
                               (long long)t[i].offset, (long long)end);
        lowest = i ? t[i - 1].group : 0;
        highest = i ? lowest + 1 : 0;
        if (t[i].group < lowest || t[i].group > highest)
            return seqpar_fail(error, SEQPAR_ERR_SIZE,
                               "tensor %s is in group %lld; groups begin at 0 and never fall "
                               "or skip a number",
                               t[i].name, (long long)t[i].group);
        end = t[i].offset + seqpar__tensor_elements(&t[i]);
    }
    return count > 0
               ? SEQPAR_OK
               : seqpar_fail(error, SEQPAR_ERR_SIZE, "there is no tensor; give at least 1");
}

/* Refuses parameters that do not hold all tensors. */
static seqpar_status seqpar__check_elements(seqpar_error *error, const seqpar_blocks *b,
                                            int64_t elements) {
    const seqpar_tensor *t = &b->tensors[b->tensor_count - 1];
    int64_t end = t->offset + seqpar__tensor_elements(t);
    if (end <= elements) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_SIZE,
                       "the parameters are %lld elements, but tensor %s ends at %lld; pass the "
                       "whole array and its size",
                       (long long)elements, t->name, (long long)end);
}

/* A range of `count` elements of a tensor. It begins at element `at` of state, where every
   tensor fills whole blocks, and at element `offset` of the caller's arrays, where elements
   between tensors must not be touched. */
typedef struct seqpar__tensor_range {
    int64_t tensor, at, offset, count;
} seqpar__tensor_range;

/* Iterates over the ranges of tensors within elements [begin, end) of state, all in one slice:
   call seqpar__tensor_range_begin once, then seqpar__tensor_range_next until it returns 0. */
static seqpar__tensor_range seqpar__tensor_range_begin(const seqpar_blocks *b, int64_t slice,
                                                       int64_t begin) {
    seqpar__tensor_range s;
    s.tensor = b->slice_tensor[slice];
    s.at = begin;
    s.offset = s.count = 0;
    return s;
}

static int seqpar__tensor_range_next(const seqpar_blocks *b, seqpar__tensor_range *s,
                                     int64_t end) {
    int64_t begin = s->at + s->count, first, last;
    for (; s->tensor < b->tensor_count && b->tensor_begin[s->tensor] < end; s->tensor++) {
        const seqpar_tensor *t = &b->tensors[s->tensor];
        first = SEQPAR__MAX(begin, b->tensor_begin[s->tensor]);
        last = SEQPAR__MIN(end, b->tensor_begin[s->tensor] + seqpar__tensor_elements(t));
        if (first >= last) continue;
        s->at = first;
        s->count = last - first;
        s->offset = t->offset + first - b->tensor_begin[s->tensor];
        return 1;
    }
    return 0;
}

/* Returns the elements of a slice when a tensor is cut into several. Take the fewest rows, 64
   times a power of two, that fill whole blocks: owners need whole blocks, and slices of 64 rows
   begin at aligned columns of dlogits. A slice is the largest multiple of these rows that
   `most` elements hold, at least one. */
static int64_t seqpar__slice_elements(const seqpar_tensor *t, int64_t most) {
    int64_t rows = 64;
    while (rows * t->cols % SEQPAR_PARAM_BLOCK) rows *= 2;
    return SEQPAR__MAX(1, most / (rows * t->cols)) * rows * t->cols;
}

/* Begins the next slice at `element` of state, in `tensor`, and returns `element`. With
   slice_begin NULL the slice is only counted. */
static int64_t seqpar__slice_begins(seqpar_blocks *b, int64_t element, int64_t tensor) {
    if (b->slice_begin) {
        b->slice_begin[b->slices] = element;
        b->slice_tensor[b->slices] = tensor;
    }
    b->slices++;
    return element;
}

static void seqpar__slices(seqpar_blocks *b, int64_t most) {
    int64_t begin = 0;
    if (most == 0) most = SEQPAR__MAX(INT64_C(1) << 20, b->elements / 256);
    b->slices = 0;
    for (int64_t i = 0; i < b->tensor_count; i++) {
        const seqpar_tensor *t = &b->tensors[i];
        int64_t at = b->tensor_begin[i], end = at + seqpar__block_elements(t);
        int64_t piece = seqpar__slice_elements(t, most);
        int first = i == 0 || t->group != b->tensors[i - 1].group;
        if (first) b->group_slice[t->group] = b->slices;
        if (first || end - begin > most) begin = seqpar__slice_begins(b, at, i);
        while (end - begin > SEQPAR__MAX(most, piece))
            begin = seqpar__slice_begins(b, begin + piece, i);
    }
    b->group_slice[b->groups] = b->slices;
}

/* Slices are counted first, with slice_begin NULL, then written. */
static seqpar_status seqpar__blocks_open(seqpar_ctx *ctx, seqpar_blocks *b,
                                         const seqpar_tensor *tensors, int64_t tensor_count,
                                         int64_t slice) {
    memset(b, 0, sizeof *b);
    b->tensors = tensors;
    b->tensor_count = tensor_count;
    b->groups = tensors[tensor_count - 1].group + 1;
    b->group_tensor = SEQPAR__NEW(int64_t, 2 * (b->groups + 1) + tensor_count);
    if (!b->group_tensor) return seqpar__no_memory(ctx->error, "the blocks of tensors");
    b->group_slice = b->group_tensor + b->groups + 1;
    b->tensor_begin = b->group_slice + b->groups + 1;
    for (int64_t i = 0; i < tensor_count; i++) {
        b->tensor_begin[i] = b->elements;
        b->elements += seqpar__block_elements(&tensors[i]);
        b->group_tensor[tensors[i].group + 1] = i + 1;
    }
    seqpar__slices(b, slice);
    b->slice_begin = SEQPAR__NEW(int64_t, 2 * b->slices + 1);
    if (!b->slice_begin) return seqpar__no_memory(ctx->error, "the blocks of tensors");
    b->slice_tensor = b->slice_begin + b->slices + 1;
    seqpar__slices(b, slice);
    b->slice_begin[b->slices] = b->elements;
    b->own_elements = seqpar__compact_begin(b, ctx, b->slices);
    return SEQPAR_OK;
}

static void seqpar__blocks_close(seqpar_blocks *b) {
    SEQPAR_FREE(b->group_tensor);
    SEQPAR_FREE(b->slice_begin);
    memset(b, 0, sizeof *b);
}

/* The tensor that a slice ends in. */
static const seqpar_tensor *seqpar__slice_last(const seqpar_blocks *b, int64_t slice) {
    int64_t i = b->slice_tensor[slice];
    while (i + 1 < b->tensor_count && b->tensor_begin[i + 1] < b->slice_begin[slice + 1]) i++;
    return &b->tensors[i];
}

/* Offset of a slice's end in the caller's parameters. */
static int64_t seqpar__slice_end(const seqpar_blocks *b, int64_t slice) {
    const seqpar_tensor *t = seqpar__slice_last(b, slice);
    int64_t left = b->slice_begin[slice + 1] - b->tensor_begin[t - b->tensors];
    return t->offset + SEQPAR__MIN(left, seqpar__tensor_elements(t));
}

SEQPAR_DEF int seqpar_blocks_own(const seqpar_ctx *ctx, const seqpar_blocks *b, int64_t tensor,
                                 int64_t from, int64_t *first, int64_t *count) {
    SEQPAR_MUST("ctx, blocks, first, count", ctx, b, first, count);
    int64_t begin = b->tensor_begin[tensor], group = b->tensors[tensor].group, own, n;
    int64_t end = begin + seqpar__tensor_elements(&b->tensors[tensor]);
    for (int64_t s = b->group_slice[group]; s < b->group_slice[group + 1]; s++) {
        seqpar__owned_blocks(b, s, ctx->world->size, ctx->world->rank, &own, &n);
        own += b->slice_begin[s];
        *first = SEQPAR__MAX(begin + from, own) - begin;
        *count = SEQPAR__MIN(end, own + n) - begin - *first;
        if (*count > 0) return 1;
    }
    return 0;
}

/* =============================================================================================
   >>gradient  sums a step's gradients at their owners

   Gradients are summed over tokens, sequence-parallel ranks, micro-batches and data-parallel
   ranks. All of that is one fold (>>fold), whose leaves are the cells of all documents of the
   step. So the number of ranks and the number of micro-batches change no bit.

       backward of a group      every rank has the nodes of its own leaves
       seqpar_step_gradient     slice by slice, sends each owner its blocks of these nodes;
                                owners fold the nodes of all ranks
       seqpar_step_norm         sums of squares, block by block, folded over block numbers
       seqpar_step_end          clips and updates, exchanges by ZeRO stage (>>update)

   Memory. A rank holds
   - 1/W of the gradient, allocated slice by slice during backward;
   - the nodes of one group, or of one slice: one node for W = A = 1, else about log2 of the
     rank's leaves (A: micro-batches);
   - sums that wait for the next micro-batch: about log2(A) times its 1/W (seqpar_optim_open).
   For the 135 million parameters of SmolLM2 on one rank that is 527 MiB, 1.03 times the
   weights.
   ========================================================================================== */

typedef struct seqpar__micro { /* one micro-batch on all ranks */
    seqpar__partial own;       /* program over this rank's leaves, and the nodes it sends */
    seqpar_token_fold fold;    /* points into own: what seqpar_step_fold returns */
    int64_t *nodes;            /* (world) how many nodes each rank sends */
    seqpar_fold_op *program;   /* the owner's; its leaf i is node i of its inbox */
    int64_t program_count;
} seqpar__micro;

struct seqpar_step {
    const seqpar_row *rows;
    int64_t row_count, accumulation;
    /* (accumulation x dp_size + 1) first row of each data-parallel rank in each micro-batch;
       NULL: the step has no rows */
    int64_t *part_begin;
    int layout;
    int64_t *leaves, leaf_count;
    seqpar__micro *micro; /* (accumulation) */
    int64_t slots, depth; /* of the owner's fold */
    /* (2 slices), indexed as optim->gradient; 1: the sum is complete */
    unsigned char *done;
    int64_t *taken; /* (2 slices): how many micro-batches' gradients were passed in */
};

static void seqpar__step_free(seqpar_optim *o) {
    seqpar_step *s = o->step;
    o->pending = 0;
    if (!s) return;
    for (int64_t i = 0; s->micro && i < s->accumulation; i++) {
        seqpar__partial_free(&s->micro[i].own);
        SEQPAR_FREE(s->micro[i].nodes);
        SEQPAR_FREE(s->micro[i].program);
    }
    SEQPAR_FREE(s->micro);
    SEQPAR_FREE(s->done);
    SEQPAR_FREE(s->taken);
    SEQPAR_FREE(s->leaves);
    SEQPAR_FREE(s->part_begin);
    SEQPAR_FREE(s);
    o->step = NULL;
}

static void seqpar__gradient_free(seqpar_ctx *ctx, seqpar_optim *o) {
    for (int64_t i = 0; o->gradient && i < 2 * o->blocks.slices; i++)
        seqpar_buffer_free(ctx, &o->gradient[i]);
    o->complete = o->pending = 0;
}

/* Finds the rows of one data-parallel rank in a micro-batch. A micro-batch's rows, over all
   data-parallel ranks, are contiguous, so only a few sums wait for the next micro-batch. */
static void seqpar__micro_rows(const seqpar_step *s, int64_t dp_size, int64_t dp_rank,
                               int64_t index, int64_t *first, int64_t *count) {
    int64_t part = index * dp_size + dp_rank;
    *first = s->part_begin[part];
    *count = s->part_begin[part + 1] - *first;
}

static seqpar_status seqpar__check_micro(seqpar_error *error, const seqpar_optim *o,
                                         int64_t index) {
    if (!o->step)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "no step was begun; call seqpar_step_begin first");
    if (index < 0 || index >= o->step->accumulation)
        return seqpar_fail(
            error, SEQPAR_ERR_STEP,
            "micro-batch %lld is not in the step, which was begun with %lld; give 0 to %lld",
            (long long)index, (long long)o->step->accumulation,
            (long long)o->step->accumulation - 1);
    return SEQPAR_OK;
}

static seqpar_status seqpar__check_has_rows(seqpar_error *error, const seqpar_optim *o) {
    if (o->step->rows) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_STEP,
                       "the step was begun without rows (seqpar_step_begin_plain) and takes "
                       "whole gradients; for rows and folds call seqpar_step_begin");
}

SEQPAR_DEF seqpar_status seqpar_step_rows(const seqpar_ctx *ctx, const seqpar_optim *optim,
                                          int64_t index, int64_t *first, int64_t *count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, first, count", ctx, optim, first, count);
    *first = *count = 0;
    SEQPAR__TRY(seqpar__check_micro(ctx->error, optim, index));
    SEQPAR__TRY(seqpar__check_has_rows(ctx->error, optim));
    seqpar__micro_rows(optim->step, ctx->dp_size, ctx->dp_rank, index, first, count);
    return SEQPAR_OK;
}

static seqpar_status seqpar__step_leaves(seqpar_ctx *ctx, seqpar_step *s) {
    seqpar__sorted_key *order = NULL;
    seqpar_share *shares;
    SEQPAR__TRY(seqpar__split_all(ctx->error, &shares, &order, s->rows, s->row_count, s->layout,
                                  ctx->sp_size));
    for (int64_t p = 0; p < ctx->sp_size; p++) s->leaf_count += shares[p].count;
    s->leaves = SEQPAR__NEW(int64_t, s->leaf_count);
    for (int64_t i = 0; s->leaves && i < s->leaf_count; i++) s->leaves[i] = order[i].leaf;
    seqpar__shares_free(shares, ctx->sp_size);
    SEQPAR_FREE(shares);
    SEQPAR_FREE(order);
    return s->leaves ? SEQPAR_OK : seqpar__no_memory(ctx->error, "leaves");
}

/* Without rows: a leaf for every micro-batch of every rank. */
static seqpar_status seqpar__plain_leaves(seqpar_ctx *ctx, seqpar_step *s) {
    s->leaf_count = s->accumulation * ctx->world->size;
    s->leaves = SEQPAR__NEW(int64_t, s->leaf_count);
    for (int64_t i = 0; s->leaves && i < s->leaf_count; i++) s->leaves[i] = i;
    return s->leaves ? SEQPAR_OK : seqpar__no_memory(ctx->error, "leaves");
}

/* Writes the program by which a rank folds the leaves of its share, and lists the nodes that
   the rank sends. */
static seqpar_status seqpar__share_partial(seqpar__partial *p, const seqpar_step *s,
                                           const seqpar_share *share) {
    int64_t *leaves = SEQPAR__NEW(int64_t, share->count);
    seqpar_status status;
    for (int64_t i = 0; leaves && i < share->count; i++) leaves[i] = share->pieces[i].leaf;
    status = leaves ? seqpar__fold_partial(p, s->leaves, s->leaf_count, leaves, share->count)
                    : SEQPAR_ERR_MEMORY;
    SEQPAR_FREE(leaves);
    return status;
}

/* An entry in the list of all ranks' nodes. */
typedef struct seqpar__node_from {
    int64_t begin; /* its first leaf: the sort key of seqpar__by_number, so the first member */
    int64_t order; /* its number in the owner's inbox */
    seqpar_node node;
} seqpar__node_from;

/* Computes what rank w sends for a micro-batch. *shares are the shares of w's sequence-parallel
   group. They are computed for the first rank of the group, so call this for w in order. */
static seqpar_status seqpar__rank_partial(seqpar_ctx *ctx, const seqpar_step *s, int64_t index,
                                          int64_t w, seqpar_share **shares,
                                          seqpar__partial *p) {
    int64_t first, count, leaf = index * ctx->world->size + w;
    if (!s->rows) return seqpar__fold_partial(p, s->leaves, s->leaf_count, &leaf, 1);
    if (w % ctx->sp_size == 0) {
        seqpar__shares_free(*shares, ctx->sp_size);
        SEQPAR_FREE(*shares);
        *shares = NULL;
        seqpar__micro_rows(s, ctx->dp_size, w / ctx->sp_size, index, &first, &count);
        SEQPAR__TRY(seqpar__split_all(ctx->error, shares, NULL, s->rows + first, count,
                                      s->layout, ctx->sp_size));
    }
    return seqpar__share_partial(p, s, &(*shares)[w % ctx->sp_size]);
}

/* Lists the nodes that all ranks send for a micro-batch, in order of ranks: *nodes (*total),
   which the caller frees. m->nodes[w] becomes the number of rank w's nodes. */
static seqpar_status seqpar__micro_nodes(seqpar_ctx *ctx, seqpar_step *s, int64_t index,
                                         void **nodes, int64_t *total) {
    seqpar__micro *m = &s->micro[index];
    int64_t capacity = 0;
    seqpar_share *shares = NULL;
    seqpar_status status = SEQPAR_OK;
    for (int64_t w = 0; !status && w < ctx->world->size; w++) {
        seqpar__partial p;
        status = seqpar__rank_partial(ctx, s, index, w, &shares, &p);
        if (status) break;
        m->nodes[w] = p.node_count;
        if (!seqpar__grow(nodes, &capacity, *total + p.node_count,
                          (int64_t)sizeof(seqpar__node_from)))
            status = SEQPAR_ERR_MEMORY;
        for (int64_t i = 0; !status && i < p.node_count; i++, ++*total) {
            seqpar__node_from *n = &((seqpar__node_from *)*nodes)[*total];
            n->begin = p.nodes[i].index << p.nodes[i].level;
            n->order = *total;
            n->node = p.nodes[i];
        }
        if (w == ctx->world->rank)
            m->own = p;
        else
            seqpar__partial_free(&p);
    }
    seqpar__shares_free(shares, ctx->sp_size);
    SEQPAR_FREE(shares);
    return status;
}

/* Writes the owner's program, which folds the nodes of all ranks. It continues the program of
   the micro-batch before. */
static seqpar_status seqpar__micro_program(seqpar__micro *m, seqpar__node_from *nodes,
                                           int64_t total, seqpar_fold *owner) {
    seqpar_status status = SEQPAR_OK;
    if (total) qsort(nodes, (size_t)total, sizeof *nodes, seqpar__by_number);
    for (int64_t i = 0; !status && i < total; i++)
        status = seqpar_fold_push(owner, nodes[i].node, SEQPAR_FOLD_LEAF,
                                  (int32_t)nodes[i].order);
    if (!status) status = seqpar_fold_flush(owner);
    if (!status) seqpar__fold_take(owner, &m->program, &m->program_count);
    return status;
}

/* Computes which nodes every rank will send for this micro-batch, and the program by which the
   owners fold them. */
static seqpar_status seqpar__micro_prepare(seqpar_ctx *ctx, seqpar_step *s, int64_t index,
                                           seqpar_fold *owner) {
    seqpar__micro *m = &s->micro[index];
    int64_t total = 0;
    void *nodes = NULL;
    seqpar_status status;
    m->nodes = SEQPAR__NEW(int64_t, ctx->world->size);
    if (!m->nodes) return seqpar__no_memory(ctx->error, "a micro-batch");
    status = seqpar__micro_nodes(ctx, s, index, &nodes, &total);
    if (!status) status = seqpar__micro_program(m, (seqpar__node_from *)nodes, total, owner);
    SEQPAR_FREE(nodes);
    m->fold.program = m->own.program;
    m->fold.program_count = m->own.program_count;
    m->fold.depth = m->own.depth + 1;
    m->fold.nodes = m->own.nodes;
    m->fold.node_count = m->own.node_count;
    m->fold.leaves = s->leaves;
    m->fold.leaf_count = s->leaf_count;
    return status;
}

static seqpar_status seqpar__step_agree(seqpar_ctx *ctx, const seqpar_row *rows,
                                        int64_t row_count, int layout, int64_t accumulation) {
    const seqpar__setting settings[] = {{"the number of rows", row_count, 0},
                                        {"rows", seqpar__digest_rows(rows, row_count), 1},
                                        {"layout", layout, 0},
                                        {"accumulation", accumulation, 0}};
    return seqpar__ranks_agree(ctx->world, "a step", settings, 4);
}

static seqpar_status seqpar__micros_prepare(seqpar_ctx *ctx, seqpar_step *s) {
    seqpar_fold owner;
    seqpar_status status = SEQPAR_OK;
    seqpar_fold_init(&owner, s->leaves, s->leaf_count);
    for (int64_t i = 0; !status && i < s->accumulation; i++)
        status = seqpar__micro_prepare(ctx, s, i, &owner);
    s->slots = owner.slots_high;
    s->depth = owner.depth_high + 1;
    seqpar_fold_free(&owner);
    if (!status) return SEQPAR_OK;
    return seqpar_fail(ctx->error, status, "a step could not be set up: %s",
                       seqpar_status_text(status));
}

/* Sets up a step with the rows (NULL: none), layout and accumulation of `of`. */
static seqpar_status seqpar__step_new(seqpar_ctx *ctx, seqpar_optim *o, const seqpar_step *of) {
    seqpar_step *s = o->step = SEQPAR__NEW(seqpar_step, 1);
    if (!s) return seqpar__no_memory(ctx->error, "a step");
    *s = *of;
    s->micro = SEQPAR__NEW(seqpar__micro, s->accumulation);
    s->done = SEQPAR__NEW(unsigned char, 2 * o->blocks.slices);
    s->taken = SEQPAR__NEW(int64_t, 2 * o->blocks.slices);
    if (s->rows)
        s->part_begin = seqpar__part_begins(s->rows, s->row_count, s->accumulation,
                                            ctx->dp_size);
    if (!s->micro || !s->done || !s->taken || (s->rows && !s->part_begin))
        return seqpar__no_memory(ctx->error, "a step");
    SEQPAR__TRY(s->rows ? seqpar__step_leaves(ctx, s) : seqpar__plain_leaves(ctx, s));
    SEQPAR__TRY(seqpar__micros_prepare(ctx, s));
    seqpar__gradient_free(ctx, o);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_step_begin(seqpar_ctx *ctx, seqpar_optim *o,
                                           const seqpar_row *rows, int64_t row_count,
                                           int layout, int64_t accumulation) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, rows", ctx, o,
                SEQPAR_IF(row_count > 0, rows));
    seqpar_step s;
    seqpar__step_free(o);
    SEQPAR__TRY(seqpar__check_parts(ctx->error, "step", accumulation, ctx->dp_size));
    if (row_count <= 0)
        return seqpar_fail(ctx->error, SEQPAR_ERR_NO_DOCUMENTS,
                           "a step has %lld rows; give at least 1", (long long)row_count);
    SEQPAR__TRY(
        seqpar__check_split(ctx->error, rows, row_count, layout, ctx->sp_size, ctx->sp_rank));
    SEQPAR__TRY(seqpar__step_agree(ctx, rows, row_count, layout, accumulation));
    memset(&s, 0, sizeof s);
    s.rows = rows;
    s.row_count = row_count;
    s.layout = layout;
    s.accumulation = accumulation;
    return seqpar__step_new(ctx, o, &s);
}

SEQPAR_DEF seqpar_status seqpar_step_begin_plain(seqpar_ctx *ctx, seqpar_optim *o,
                                                 int64_t accumulation) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim", ctx, o);
    seqpar_step s;
    seqpar__step_free(o);
    SEQPAR__TRY(seqpar__check_parts(ctx->error, "step", accumulation, ctx->dp_size));
    SEQPAR__TRY(seqpar__step_agree(ctx, NULL, 0, 0, accumulation));
    memset(&s, 0, sizeof s);
    s.accumulation = accumulation;
    return seqpar__step_new(ctx, o, &s);
}

static seqpar_status seqpar__check_share_row(seqpar_error *error, int64_t index,
                                             const seqpar_row *has, const seqpar_row *wanted) {
    int64_t docs = wanted->docs;
    if (has->index != wanted->index)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "micro-batch %lld: the share holds row %lld where the step has row "
                           "%lld; seqpar_step_rows says which",
                           (long long)index, (long long)has->index, (long long)wanted->index);
    if (has->tokens != wanted->tokens || has->cell != wanted->cell)
        return seqpar_fail(
            error, SEQPAR_ERR_STEP,
            "micro-batch %lld: row %lld of the share has %lld tokens in cells of %lld, in the "
            "step %lld in cells of %lld; give both the same row",
            (long long)index, (long long)has->index, (long long)has->tokens,
            (long long)has->cell, (long long)wanted->tokens, (long long)wanted->cell);
    if (has->docs != docs ||
        (docs && memcmp(has->cu_seqlens, wanted->cu_seqlens, (size_t)(docs + 1) * 8)))
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "micro-batch %lld: row %lld of the share has other documents than "
                           "in the step; give both the same row",
                           (long long)index, (long long)has->index);
    docs = SEQPAR__MAX(docs, (int64_t)1);
    if (!has->doc_source != !wanted->doc_source ||
        (wanted->doc_source &&
         memcmp(has->doc_source, wanted->doc_source, (size_t)docs * sizeof(int64_t))))
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "micro-batch %lld: row %lld of the share has documents of other "
                           "numbers (doc_source) than in the step; give both the same row",
                           (long long)index, (long long)has->index);
    return SEQPAR_OK;
}

/* Compares the share's rows, layout and rank with the step's. Its pieces follow from these. */
static seqpar_status seqpar__check_share(const seqpar_ctx *ctx, const seqpar_step *s,
                                         int64_t index, const seqpar_share *share) {
    int64_t first, count;
    seqpar__micro_rows(s, ctx->dp_size, ctx->dp_rank, index, &first, &count);
    if (share->layout != s->layout)
        return seqpar_fail(ctx->error, SEQPAR_ERR_STEP,
                           "micro-batch %lld is split %s, but the step was begun with %s; give "
                           "both the same layout",
                           (long long)index, seqpar_layout_name(share->layout),
                           seqpar_layout_name(s->layout));
    if (share->sp_size != ctx->sp_size || share->sp_rank != ctx->sp_rank)
        return seqpar_fail(ctx->error, SEQPAR_ERR_STEP,
                           "micro-batch %lld: the share is that of rank %lld of %lld, this is "
                           "rank %lld of %lld; give the share of this rank",
                           (long long)index, (long long)share->sp_rank,
                           (long long)share->sp_size, (long long)ctx->sp_rank,
                           (long long)ctx->sp_size);
    if (share->row_count != count)
        return seqpar_fail(ctx->error, SEQPAR_ERR_STEP,
                           "micro-batch %lld: the share is of %lld rows, in the step it has "
                           "%lld; seqpar_step_rows says which",
                           (long long)index, (long long)share->row_count, (long long)count);
    for (int64_t i = 0; i < count; i++)
        SEQPAR__TRY(
            seqpar__check_share_row(ctx->error, index, &share->rows[i], &s->rows[first + i]));
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_step_fold(seqpar_ctx *ctx, const seqpar_optim *o,
                                          const seqpar_token_fold **fold,
                                          const seqpar_share *share, int64_t index) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, fold, share", ctx, o, fold, share);
    *fold = NULL;
    SEQPAR__TRY(seqpar__check_micro(ctx->error, o, index));
    SEQPAR__TRY(seqpar__check_has_rows(ctx->error, o));
    SEQPAR__TRY(seqpar__check_share(ctx, o->step, index, share));
    *fold = &o->step->micro[index].fold;
    return SEQPAR_OK;
}

/* Offset, among the parameters, of a node's first element. */
static int64_t seqpar__nodes_offset(const seqpar_optim *o, const seqpar_step_nodes *nodes) {
    return o->blocks.tensors[o->blocks.group_tensor[nodes->group]].offset + nodes->first;
}

/* Sends every owner its blocks of a slice, from every node of this rank. The inbox receives
   this rank's blocks of the nodes of all ranks: one node after the other, in order of ranks,
   each laid out as state. */
static seqpar_status seqpar__send_nodes(seqpar_ctx *ctx, const seqpar_optim *o,
                                        const seqpar__micro *m, const seqpar_step_nodes *from,
                                        int64_t slice, void *inbox) {
    int64_t size = seqpar_dtype_bytes(ctx->device->accumulator);
    int64_t world = ctx->world->size, base = o->blocks.slice_begin[slice], w;
    int64_t at = 0, total = 0, begin, count, own, mine;
    int64_t tensors = o->blocks.group_tensor[from->group + 1] - o->blocks.slice_tensor[slice];
    int64_t first = seqpar__nodes_offset(o, from);
    seqpar__messages list;
    seqpar_group g;
    seqpar_status status;
    seqpar__tensor_range s;
    for (w = 0; w < world; w++) total += m->nodes[w];
    if (!seqpar__messages_new(&list, (world + tensors) * m->own.node_count, tensors * total))
        return seqpar__no_memory(ctx->error, "a gradient exchange");
    seqpar__owned_blocks(&o->blocks, slice, world, ctx->world->rank, &own, &mine);
    for (w = 0; w < world; at += m->nodes[w++]) {
        seqpar__owned_blocks(&o->blocks, slice, world, w, &begin, &count);
        for (int64_t n = 0; n < m->own.node_count; n++)
            for (s = seqpar__tensor_range_begin(&o->blocks, slice, base + begin);
                 seqpar__tensor_range_next(&o->blocks, &s, base + begin + count);) {
                const char *data = (const char *)from->nodes +
                                   (n * from->node_stride + s.offset - first) * size;
                char *to = (char *)inbox + ((at + n) * mine + s.at - base - begin) * size;
                if (w != ctx->world->rank)
                    seqpar__add_send(&list, w, data, s.count * size);
                else
                    ctx->device->copy(ctx->device, to, data, s.count * size, ctx->queue);
            }
    }
    for (at = w = 0; w < world; at += m->nodes[w++])
        for (int64_t n = 0; n < m->nodes[w] && w != ctx->world->rank; n++)
            for (s = seqpar__tensor_range_begin(&o->blocks, slice, base + own);
                 seqpar__tensor_range_next(&o->blocks, &s, base + own + mine);)
                seqpar__add_recv(&list, w,
                                 (char *)inbox + ((at + n) * mine + s.at - base - own) * size,
                                 s.count * size);
    /* The step number of the message group identifies slice and source. Micro-batches can
       share it, because they are sent in order */
    g = seqpar__group("gradients to owners", slice + from->source * o->blocks.slices, &list);
    /* Waits here, because the caller may overwrite `from` when this returns. If the transport
       is queued, only the queue waits: the host goes on to the backward pass of the layer
       before. */
    status = seqpar__exchange(ctx->world, &g, ctx->queue);
    SEQPAR_FREE(list.sends);
    return status;
}

static seqpar_status seqpar__check_gradient(seqpar_error *error, const seqpar_optim *o,
                                            const seqpar_step_nodes *n) {
    SEQPAR__TRY(seqpar__check_micro(error, o, n->micro_batch));
    if (n->group < 0 || n->group >= o->blocks.groups || n->source < 0 || n->source > 1)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "the gradient of group %lld, source %d was given; there are groups "
                           "0 to %lld and sources 0 and 1",
                           (long long)n->group, n->source, (long long)o->blocks.groups - 1);
    return SEQPAR_OK;
}

/* The owner's fold continues from one micro-batch to the next. A micro-batch that is left out,
   repeated or too early would change the sum. */
static seqpar_status seqpar__check_order(seqpar_error *error, const seqpar_optim *o,
                                         const seqpar_step_nodes *n, int64_t slice) {
    int64_t taken = o->step->taken[slice + n->source * o->blocks.slices];
    if (n->micro_batch == taken) return SEQPAR_OK;
    return seqpar_fail(
        error, SEQPAR_ERR_STEP,
        "group %lld was given the gradient of micro-batch %lld when it had those of %lld "
        "micro-batches; give each once, in order",
        (long long)n->group, (long long)n->micro_batch, (long long)taken);
}

/* Checks that every slice of a group was given source 0 of all micro-batches, and source 1 of
   all or of none. */
static seqpar_status seqpar__check_group_complete(seqpar_error *error, const seqpar_optim *o,
                                                  int64_t group) {
    int64_t wanted = o->step->accumulation, first = o->blocks.group_slice[group];
    for (int source = 0; source < 2; source++) {
        const int64_t *taken = o->step->taken + source * o->blocks.slices;
        int needed = source == 0;
        for (int64_t s = first; s < o->blocks.group_slice[group + 1]; s++)
            needed |= taken[s] > 0;
        for (int64_t s = first; s < o->blocks.group_slice[group + 1]; s++)
            if (needed && taken[s] != wanted)
                return seqpar_fail(
                    error, SEQPAR_ERR_STEP,
                    "the step ends, but group %lld was given the gradients of %lld of %lld "
                    "micro-batches; run all of them, also those without rows, and all slices",
                    (long long)group, (long long)taken[s], (long long)wanted);
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__check_complete(seqpar_error *error, const seqpar_optim *o) {
    if (!o->step)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "no step was begun; call seqpar_step_begin first");
    for (int64_t g = 0; g < o->blocks.groups; g++)
        SEQPAR__TRY(seqpar__check_group_complete(error, o, g));
    return SEQPAR_OK;
}

static seqpar_status seqpar__add_into(seqpar_ctx *ctx, void *y, const void *x, int64_t count) {
    seqpar_add_args a;
    a.y = y;
    a.a = y;
    a.b = x;
    a.count = count;
    a.accumulators = 1;
    return count > 0 ? ctx->device->add(ctx->device, &a, ctx->queue) : SEQPAR_OK;
}

/* The owner's fold of a micro-batch for its blocks of a slice */
typedef struct seqpar__owner_fold {
    const seqpar_step *step;
    const seqpar__micro *micro;
    /* the store (seqpar__gradient_new); NULL: leaf 0 is the complete sum and is added to sum */
    void *store;
    void *sum;     /* the gradient of the other source */
    int64_t owned; /* elements of the owner's blocks in the slice */
} seqpar__owner_fold;

/* Folds the elements first .. first + count of the owner's blocks. `leaves` points to element
   `first` of leaf 0. */
static seqpar_status seqpar__fold_owned(seqpar_ctx *ctx, const seqpar__owner_fold *w,
                                        const void *leaves, int64_t leaf_stride, int64_t first,
                                        int64_t count) {
    seqpar_fold_args f;
    int acc = ctx->device->accumulator;
    if (!w->store) return seqpar__add_into(ctx, seqpar__at(w->sum, first, acc), leaves, count);
    memset(&f, 0, sizeof f);
    f.leaf_data = leaves;
    f.leaf_stride = leaf_stride;
    f.count = count;
    f.fold.program = w->micro->program;
    f.fold.program_count = w->micro->program_count;
    f.fold.depth = w->step->depth;
    /* FINISH may overwrite slot 0: once the sum is complete, no value waits there */
    f.fold.store = f.fold.finish = seqpar__at(w->store, first, acc);
    f.fold.store_stride = w->owned;
    return ctx->device->fold(ctx->device, &f, ctx->queue);
}

/* Allocates the store of an owner's fold: `slots` slots, at least one. A slot holds `elements`
   values, those of this rank's blocks of a slice. Sums wait in slots for later micro-batches;
   the complete gradient ends up in slot 0. */
static seqpar_status seqpar__gradient_new(seqpar_ctx *ctx, seqpar_buffer *gradient,
                                          int64_t elements, int64_t slots) {
    int64_t bytes = elements * seqpar_dtype_bytes(ctx->device->accumulator);
    SEQPAR__TRY(
        seqpar_buffer_new(ctx, gradient, SEQPAR__MAX(slots, 1) * bytes, SEQPAR_MEM_GRADIENTS));
    /* nothing writes the gap in a tensor's last block, but the norm reads it */
    ctx->device->zero(ctx->device, gradient->data, bytes, ctx->queue);
    return SEQPAR_OK;
}

/* Finds the slices [*first, *past) that these nodes cover. */
static seqpar_status seqpar__nodes_slices(seqpar_error *error, const seqpar_optim *o,
                                          const seqpar_step_nodes *n, int64_t *first,
                                          int64_t *past) {
    int64_t at, count;
    *first = *past = -1;
    for (int64_t i = 0; seqpar_optim_slice(o, n->group, i, &at, &count); i++) {
        int64_t slice = o->blocks.group_slice[n->group] + i;
        if (at == n->first) *first = slice;
        if (!n->count || (at >= n->first && at - n->first + count == n->count))
            *past = slice + 1;
    }
    if (*first >= 0 && *past > *first) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_STEP,
                       "first %lld and count %lld of group %lld are not whole slices; take "
                       "both from seqpar_optim_slice",
                       (long long)n->first, (long long)n->count, (long long)n->group);
}

/* Checks that the nodes' array reaches to the end of the slice `last`. */
static seqpar_status seqpar__check_nodes(seqpar_error *error, const seqpar_optim *o,
                                         const seqpar_step_nodes *n, int64_t last) {
    int64_t end = seqpar__slice_end(&o->blocks, last) - seqpar__nodes_offset(o, n);
    int64_t count = o->step->micro[n->micro_batch].own.node_count;
    SEQPAR_NEED(error, "nodes->nodes", SEQPAR_IF(count > 0, n->nodes));
    if (count > 0 && (n->elements < end ||
                      (count > 1 && (n->node_stride < end ||
                                     (n->elements - end) / n->node_stride < count - 1))))
        return seqpar_fail(
            error, SEQPAR_ERR_SIZE,
            "group %lld has %lld nodes of %lld elements (to the end of tensor %s), but "
            "elements is %lld and node_stride %lld; pass the whole array and its size",
            (long long)n->group, (long long)count, (long long)end,
            seqpar__slice_last(&o->blocks, last)->name, (long long)n->elements,
            (long long)n->node_stride);
    return SEQPAR_OK;
}

/* Folds this rank's blocks of a slice. In a world of one rank the leaves are the caller's
   nodes. Else they are the nodes that all ranks send, in an inbox laid out as state. */
static seqpar_status seqpar__fold_slice(seqpar_ctx *ctx, const seqpar_optim *o,
                                        const seqpar__owner_fold *f,
                                        const seqpar_step_nodes *nodes, int64_t slice,
                                        int64_t begin) {
    int64_t total = 0, first = seqpar__nodes_offset(o, nodes);
    int acc = ctx->device->accumulator, one = ctx->world->size == 1;
    int64_t stride = one ? nodes->node_stride : f->owned;
    seqpar__tensor_range s;
    seqpar_buffer inbox;
    seqpar_status status = SEQPAR_OK;
    memset(&inbox, 0, sizeof inbox);
    for (int64_t w = 0; w < ctx->world->size; w++) total += f->micro->nodes[w];
    if (!one)
        status = seqpar_buffer_new(ctx, &inbox, total * f->owned * seqpar_dtype_bytes(acc),
                                   SEQPAR_MEM_EXCHANGE);
    if (!one && !status)
        status = seqpar__send_nodes(ctx, o, f->micro, nodes, slice, inbox.data);
    for (s = seqpar__tensor_range_begin(&o->blocks, slice, begin);
         !status && total > 0 && seqpar__tensor_range_next(&o->blocks, &s, begin + f->owned);) {
        const void *from = one ? seqpar__at(nodes->nodes, s.offset - first, acc)
                               : seqpar__at(inbox.data, s.at - begin, acc);
        status = seqpar__fold_owned(ctx, f, from, stride, s.at - begin, s.count);
    }
    seqpar_buffer_free(ctx, &inbox);
    return status;
}

/* Runs one operation of a fold program. leaves->leaf computes the leaves. */
static seqpar_status seqpar__leaves_op(seqpar_ctx *ctx, char **top, char *stored,
                                       const seqpar_fold_op *op, const seqpar_leaves *leaves) {
    seqpar_device *d = ctx->device;
    int64_t bytes = leaves->elements * seqpar_dtype_bytes(d->accumulator);
    seqpar_add_args sum;
    switch (op->op) {
    case SEQPAR_FOLD_LEAF:
        *top += bytes;
        return leaves->leaf(leaves->user, *top - bytes, op->index);
    case SEQPAR_FOLD_LOAD:
        d->copy(d, *top, stored, bytes, ctx->queue);
        *top += bytes;
        return SEQPAR_OK;
    case SEQPAR_FOLD_STORE:
        *top -= bytes;
        d->copy(d, stored, *top, bytes, ctx->queue);
        return SEQPAR_OK;
    default: /* COMBINE; a token fold has no other operation */
        *top -= bytes;
        sum.y = *top - bytes;
        sum.a = *top - bytes;
        sum.b = *top;
        sum.count = leaves->elements;
        sum.accumulators = 1;
        return d->add(d, &sum, ctx->queue);
    }
}

SEQPAR_DEF seqpar_status seqpar_fold_leaves(seqpar_ctx *ctx, void *nodes, int64_t node_stride,
                                            const seqpar_token_fold *fold,
                                            const seqpar_leaves *leaves) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, fold, leaves", ctx, fold, leaves);
    SEQPAR_NEED(ctx->error, "leaves->leaf, nodes", SEQPAR_THERE(leaves->leaf),
                SEQPAR_IF(fold->node_count > 0 && leaves->elements > 0, nodes));
    int acc = ctx->device->accumulator;
    int64_t bytes = leaves->elements * seqpar_dtype_bytes(acc);
    seqpar_buffer stack;
    seqpar_status status = seqpar_buffer_new(ctx, &stack, (fold->depth + 1) * bytes,
                                             SEQPAR_MEM_SCRATCH);
    char *top = (char *)stack.data;
    for (int64_t i = 0; !status && i < fold->program_count; i++) {
        const seqpar_fold_op *op = &fold->program[i];
        status = seqpar__leaves_op(
            ctx, &top, (char *)seqpar__at(nodes, op->index * node_stride, acc), op, leaves);
    }
    seqpar_buffer_free(ctx, &stack);
    if (!status) return SEQPAR_OK;
    return seqpar_fail(ctx->error, status, "a leaf of a token sum could not be computed");
}

/* Folds the nodes of a slice into this rank's blocks of the gradient. A tied table has two
   sums, of the embedding (source 0) and of the vocab (source 1), each with its own fold. The
   one that is complete last is added to the other. a + b is b + a, so the gradient does not
   depend on which one that is. */
static seqpar_status seqpar__slice_gradient(seqpar_ctx *ctx, seqpar_optim *o,
                                            const seqpar_step_nodes *nodes, int64_t slice) {
    seqpar_step *s = o->step;
    seqpar__owner_fold f;
    seqpar_buffer *store;
    int64_t mine = slice + (nodes->source ? o->blocks.slices : 0);
    int64_t other = slice + (nodes->source ? 0 : o->blocks.slices);
    int64_t begin;
    int done, add;
    store = &o->gradient[mine];
    s->taken[mine]++;
    f.step = s;
    f.micro = &s->micro[nodes->micro_batch];
    seqpar__owned_blocks(&o->blocks, slice, ctx->world->size, ctx->world->rank, &begin,
                         &f.owned);
    done = f.micro->program_count > 0 &&
           f.micro->program[f.micro->program_count - 1].op == SEQPAR_FOLD_FINISH;
    /* of the two sums of a tied table this is the second to be complete */
    add = done && s->done[other];
    /* LEAF, FINISH: seqpar__fold_owned adds the leaf to the other sum and needs no store */
    if (!store->data && f.owned > 0 && f.micro->program_count > 0 &&
        !(add && f.micro->program_count == 2))
        SEQPAR__TRY(seqpar__gradient_new(ctx, store, f.owned, s->slots));
    f.store = store->data;
    f.sum = o->gradient[other].data;
    SEQPAR__TRY(
        seqpar__fold_slice(ctx, o, &f, nodes, slice, o->blocks.slice_begin[slice] + begin));
    if (add && f.store) SEQPAR__TRY(seqpar__add_into(ctx, f.sum, f.store, f.owned));
    if (add) seqpar_buffer_free(ctx, store);
    s->done[mine] |= (unsigned char)done;
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_step_gradient(seqpar_ctx *ctx, seqpar_optim *o,
                                              const seqpar_step_nodes *nodes) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, nodes", ctx, o, nodes);
    int64_t first, past;
    SEQPAR__TRY(seqpar__check_gradient(ctx->error, o, nodes));
    SEQPAR__TRY(seqpar__nodes_slices(ctx->error, o, nodes, &first, &past));
    SEQPAR__TRY(seqpar__check_nodes(ctx->error, o, nodes, past - 1));
    for (int64_t s = first; s < past; s++)
        SEQPAR__TRY(seqpar__check_order(ctx->error, o, nodes, s));
    for (int64_t s = first; s < past; s++)
        SEQPAR__TRY(seqpar__slice_gradient(ctx, o, nodes, s));
    return SEQPAR_OK;
}

/* Makes source 0 hold the gradient of every slice: moves it there if only source 1 has one, and
   allocates a zero gradient if neither has one, because no row has a token. */
static seqpar_status seqpar__gradient_end(seqpar_ctx *ctx, seqpar_optim *o) {
    int64_t begin, count;
    for (int64_t s = 0; s < o->blocks.slices; s++) {
        seqpar_buffer *one = &o->gradient[s], *two = &o->gradient[s + o->blocks.slices];
        if (!one->data) {
            *one = *two;
            memset(two, 0, sizeof *two);
        }
        seqpar__owned_blocks(&o->blocks, s, ctx->world->size, ctx->world->rank, &begin, &count);
        if (!one->data) SEQPAR__TRY(seqpar__gradient_new(ctx, one, count, 1));
    }
    return SEQPAR_OK;
}

/* =============================================================================================
   >>update  norm, clip, AdamW and SGD

   Owners compute the sum of squares of each of their blocks and send it to all ranks. Every
   rank folds the sums over the block numbers, so that all ranks have the same norm. From ZeRO
   stage 1 on owners then update their blocks; at ZeRO stages 1 and 2 they send the parameters
   to all ranks. At ZeRO stage 0 they send the gradient to all ranks, slice by slice, and every
   rank updates everything.

   Moments and masters are accumulators in the device's memory, or are offloaded to its second
   pool; moments may be quantized instead. State that is not stored as accumulators in the
   device's memory goes through two staging buffers. The code calls them stages; they are not
   the ZeRO stages. Slice s uses stage s % 2; what stands in one column runs at the same time:

       stage 0     load 0   update 0   store 0, load 2   update 2
       stage 1              load 1     update 1          store 1, load 3   ...
   ========================================================================================== */

/* Elements [begin, end) of state, which owners send to all ranks. `data` holds these elements,
   block_bytes for each block. With params set, `data` is laid out as the caller's parameters
   instead. With a queue `data` is device memory; with queue NULL it is host memory. */
typedef struct seqpar__owned_span {
    void *data;
    int64_t begin, end, block_bytes;
    int params;
    void *queue;
    const char *name;
    int64_t first; /* with params: the offset of the parameter that `data` begins with */
} seqpar__owned_span;

/* Lists a message of `count` elements, which begin at element `at` of h->data. */
static void seqpar__owned_message(const seqpar__owned_span *h, int sending, int64_t peer,
                                  int64_t at, int64_t count, seqpar__messages *m) {
    char *data = (char *)h->data + at * h->block_bytes / SEQPAR_PARAM_BLOCK;
    int64_t bytes = count * h->block_bytes / SEQPAR_PARAM_BLOCK;
    if (sending)
        seqpar__add_send(m, peer, data, bytes);
    else
        seqpar__add_recv(m, peer, data, bytes);
}

/* If sending, lists a message to `peer` for each range of the span that this rank owns; else
   one from `peer` for each range that `peer` owns. */
static void seqpar__owned_messages(const seqpar_ctx *ctx, const seqpar_blocks *b,
                                   const seqpar__owned_span *h, int sending, int64_t peer,
                                   seqpar__messages *m) {
    int64_t owner = sending ? ctx->world->rank : peer, begin, end, count;
    seqpar__tensor_range s;
    for (int64_t i = 0; i < b->slices; i++) {
        seqpar__owned_blocks(b, i, ctx->world->size, owner, &begin, &count);
        end = SEQPAR__MIN(h->end, b->slice_begin[i] + begin + count);
        begin = SEQPAR__MAX(h->begin, b->slice_begin[i] + begin);
        if (begin >= end) continue;
        if (!h->params)
            seqpar__owned_message(h, sending, peer, begin - h->begin, end - begin, m);
        else
            for (s = seqpar__tensor_range_begin(b, i, begin);
                 seqpar__tensor_range_next(b, &s, end);)
                seqpar__owned_message(h, sending, peer, s.offset - h->first, s.count, m);
    }
}

static seqpar_status seqpar__gather_owned_begin(seqpar_ctx *ctx, const seqpar_blocks *b,
                                                const seqpar__owned_span *h,
                                                seqpar_request *request) {
    int64_t world = ctx->world->size, rank = ctx->world->rank;
    int64_t most = world * (b->tensor_count + b->slices);
    seqpar__messages m;
    seqpar_group group;
    seqpar_status status;
    request->state = NULL;
    if (world == 1) return SEQPAR_OK;
    if (!seqpar__messages_new(&m, most, most)) return seqpar__no_memory(ctx->error, h->name);
    for (int64_t w = 0; w < world; w++)
        if (w != rank) {
            seqpar__owned_messages(ctx, b, h, 1, w, &m);
            seqpar__owned_messages(ctx, b, h, 0, w, &m);
        }
    group = seqpar__group(h->name, 0, &m);
    status = seqpar_comm_begin(ctx->world, &group, h->queue, request);
    SEQPAR_FREE(m.sends);
    return status;
}

static seqpar_status seqpar__gather_owned(seqpar_ctx *ctx, const seqpar_blocks *b,
                                          const seqpar__owned_span *h) {
    seqpar_request request;
    SEQPAR__TRY(seqpar__gather_owned_begin(ctx, b, h, &request));
    return seqpar_comm_wait(ctx->world, &request, h->queue);
}

/* A queued transport need not check which group a message belongs to. So this checks that all
   ranks made the same calls in the same order: if so, queue_sum adds up to 0 over all ranks. */
static seqpar_status seqpar__check_queue_groups(seqpar_ctx *ctx) {
    uint64_t sum = ctx->world->queue_sum + ctx->sp->queue_sum;
    int64_t halves[2];
    if (!ctx->world->table->queued) return SEQPAR_OK;
    halves[0] = (int64_t)(sum & 0xffffffff);
    halves[1] = (int64_t)(sum >> 32);
    SEQPAR__TRY(seqpar_comm_sum_i64(ctx->world, halves, 2));
    if ((uint64_t)halves[0] + ((uint64_t)halves[1] << 32) == 0) return SEQPAR_OK;
    return seqpar_fail(ctx->error, SEQPAR_ERR_STEP,
                       "a message was sent in one exchange and received in another; all ranks "
                       "must make the same calls in the same order, above all of "
                       "seqpar_step_gradient");
}

/* Computes o->norm, on every rank. It is 0 on a device that only plans: its sums of squares,
   one for each block, would take memory on all ranks. */
static seqpar_status seqpar__gradient_norm(seqpar_ctx *ctx, seqpar_optim *o) {
    int64_t blocks = ctx->device->plans ? 0 : o->blocks.elements / SEQPAR_PARAM_BLOCK, begin,
            count;
    double *sums = SEQPAR__NEW(double, blocks);
    int64_t *leaves = SEQPAR__NEW(int64_t, blocks);
    seqpar__owned_span handed = {sums, 0, o->blocks.elements, 8, 0, NULL, "gradient norm", 0};
    seqpar_status status = sums && leaves ? SEQPAR_OK
                                          : seqpar__no_memory(ctx->error, "the gradient norm");
    for (int64_t s = 0; !status && blocks && s < o->blocks.slices; s++) {
        seqpar_sumsq_args a;
        seqpar__owned_blocks(&o->blocks, s, ctx->world->size, ctx->world->rank, &begin, &count);
        a.out = sums + (o->blocks.slice_begin[s] + begin) / SEQPAR_PARAM_BLOCK;
        a.x = o->gradient[s].data;
        a.blocks = count / SEQPAR_PARAM_BLOCK;
        a.block_size = SEQPAR_PARAM_BLOCK;
        if (count > 0) status = ctx->device->sumsq(ctx->device, &a, ctx->queue);
    }
    if (!status) status = seqpar__check_queue_groups(ctx);
    if (!status && blocks) status = seqpar__gather_owned(ctx, &o->blocks, &handed);
    for (int64_t b = 0; !status && b < blocks; b++) leaves[b] = b;
    if (!status) o->norm = blocks ? sqrt(seqpar__tree_sum(leaves, sums, 1, 0, blocks, 62)) : 0;
    if (!status && !(o->norm <= 1.7976931348623157e308))
        status = seqpar_fail(ctx->error, SEQPAR_ERR_NOT_FINITE,
                             "the gradient norm of step %lld is %g; lower the learning rate or "
                             "look for a NaN in the data",
                             (long long)o->t + 1, o->norm);
    SEQPAR_FREE(sums);
    SEQPAR_FREE(leaves);
    return status;
}

enum {
    SEQPAR__STATE_M,
    SEQPAR__STATE_V,
    SEQPAR__STATE_MASTER,
    SEQPAR__STATE_PARAMS,
    SEQPAR__STATES
};
/* The elements of a slice that this rank updates: begin .. begin + count of state, counted over
   the blocks of all ranks. */
typedef struct seqpar__update_part {
    void *params; /* the caller's, by offset */
    int64_t slice, begin, count;
    int64_t at; /* where they begin in m, v, master, which from stage 1 on hold owned blocks */
    /* The gradient and the states of these elements; a state that does not exist is NULL.
       SEQPAR__STATE_PARAMS exists at zero_stage 3 only: the parameters that this rank owns */
    void *gradient, *state[SEQPAR__STATES];
    double lr;
} seqpar__update_part;

/* At ZeRO stage 0 a rank updates all of a slice, else the blocks that it owns. */
static seqpar__update_part seqpar__update_part_of(const seqpar_ctx *ctx, const seqpar_optim *o,
                                                  void *params, int64_t slice, double lr) {
    int acc = ctx->device->accumulator, storage = ctx->device->storage;
    int quantized = o->desc.state_bits == 8;
    int64_t first = o->blocks.slice_begin[slice], at = first;
    seqpar__update_part part;
    memset(&part, 0, sizeof part);
    part.params = params;
    part.slice = slice;
    part.begin = 0;
    part.count = o->blocks.slice_begin[slice + 1] - first;
    if (o->desc.zero_stage > 0) {
        seqpar__owned_blocks(&o->blocks, slice, ctx->world->size, ctx->world->rank, &part.begin,
                             &part.count);
        at = seqpar__compact_begin(&o->blocks, ctx, slice);
    }
    part.begin += first;
    part.at = at;
    part.gradient = o->gradient[slice].data;
    /* seqpar__quantized_state says where quantized state lies */
    part.state[SEQPAR__STATE_M] = seqpar__at_or_null(o->m.data, quantized ? 0 : at, acc);
    part.state[SEQPAR__STATE_V] = seqpar__at_or_null(o->v.data, quantized ? 0 : at, acc);
    part.state[SEQPAR__STATE_MASTER] = seqpar__at_or_null(o->master.data, at, acc);
    if (o->desc.zero_stage == 3)
        part.state[SEQPAR__STATE_PARAMS] = seqpar__at(params, at, storage);
    part.lr = lr;
    return part;
}

static int seqpar__update_type(const seqpar_ctx *ctx, int which) {
    return which == SEQPAR__STATE_PARAMS ? ctx->device->storage : ctx->device->accumulator;
}

static void *seqpar__update_at(const seqpar_ctx *ctx, const seqpar__update_part *part,
                               int which, int64_t element) {
    return seqpar__at_or_null(part->state[which], element, seqpar__update_type(ctx, which));
}

/* For weights without masters. With `back`, before the update, widens params into master; else,
   after it, rounds master stochastically into params. */
static seqpar_status seqpar__update_stochastic(seqpar_ctx *ctx, const seqpar_optim *o,
                                               void *master, void *params, int64_t first,
                                               int64_t count, int back) {
    seqpar_quantize_args a;
    memset(&a, 0, sizeof a);
    a.form = SEQPAR_QUANTIZE_STOCHASTIC;
    a.back = back;
    a.x = master;
    a.codes = params;
    a.count = count;
    a.first = first;
    a.seed = o->desc.seed;
    a.stream = (uint64_t)o->t;
    return ctx->device->quantize(ctx->device, &a, ctx->queue);
}

/* Updates a part, tensor by tensor. If there are masters, they are updated, and the parameters
   become the rounded masters. */
static seqpar_status seqpar__update_range(seqpar_ctx *ctx, const seqpar_optim *o,
                                          const seqpar__update_part *part) {
    seqpar_device *dev = ctx->device;
    seqpar__tensor_range s;
    for (s = seqpar__tensor_range_begin(&o->blocks, part->slice, part->begin);
         seqpar__tensor_range_next(&o->blocks, &s, part->begin + part->count);) {
        int64_t at = s.at - part->begin;
        void *params = seqpar__update_at(ctx, part, SEQPAR__STATE_PARAMS, at);
        seqpar_update_args a;
        if (!params) params = seqpar__at(part->params, s.offset, dev->storage);
        a.p = seqpar__update_at(ctx, part, SEQPAR__STATE_MASTER, at);
        a.working = a.p && !o->desc.stochastic ? params : NULL;
        if (!a.p) a.p = params;
        if (o->desc.stochastic)
            SEQPAR__TRY(seqpar__update_stochastic(ctx, o, a.p, params, s.at, s.count, 1));
        a.g = seqpar__at(part->gradient, at, dev->accumulator);
        a.m = seqpar__update_at(ctx, part, SEQPAR__STATE_M, at);
        a.v = seqpar__update_at(ctx, part, SEQPAR__STATE_V, at);
        a.count = s.count;
        a.t = o->t;
        a.lr = part->lr;
        a.beta1 = o->desc.beta1;
        a.beta2 = o->desc.beta2;
        a.eps = o->desc.eps;
        a.decay = o->blocks.tensors[s.tensor].decay ? o->desc.decay : 0.0;
        a.clip = o->clip;
        SEQPAR__TRY(
            (o->desc.kind == SEQPAR_OPTIM_SGD ? dev->sgd : dev->adamw)(dev, &a, ctx->queue));
        if (o->desc.stochastic)
            SEQPAR__TRY(seqpar__update_stochastic(ctx, o, a.p, params, s.at, s.count, 0));
    }
    return SEQPAR_OK;
}

/* ZeRO stage 0: every rank updates everything. The whole gradient of a slice is in memory only
   during its update. */
static seqpar_status seqpar__update_everywhere(seqpar_ctx *ctx, const seqpar_optim *o,
                                               seqpar__update_part part) {
    int64_t size = seqpar_dtype_bytes(ctx->device->accumulator), begin, count;
    seqpar_buffer whole;
    seqpar_status status = seqpar_buffer_new(ctx, &whole, part.count * size,
                                             SEQPAR_MEM_GRADIENTS);
    seqpar__owned_blocks(&o->blocks, part.slice, ctx->world->size, ctx->world->rank, &begin,
                         &count);
    if (!status) {
        seqpar__owned_span owned = {
            whole.data, part.begin, part.begin + part.count, SEQPAR_PARAM_BLOCK * size,
            0,          ctx->queue, "gradients from owners", 0};
        ctx->device->copy(ctx->device, (char *)whole.data + begin * size, part.gradient,
                          count * size, ctx->queue);
        status = seqpar__gather_owned(ctx, &o->blocks, &owned);
    }
    part.gradient = whole.data;
    if (!status) status = seqpar__update_range(ctx, o, &part);
    seqpar_buffer_free(ctx, &whole);
    return status;
}

/* Double-buffers optimizer state that is not stored as accumulators in the device's memory:
   offloaded state of slice s + 1 is loaded while s is updated, and s is stored while s + 1 is
   updated. Moves run in the order in which they were begun, so s is stored before s + 2 is
   loaded into the same stage. Quantized state is dequantized into the stage and quantized from
   it. With stochastic rounding masters exist only during the update, in the stage. */
typedef struct seqpar__stages {
    seqpar_buffer buffer[2];
    int64_t loaded[2], stored[2]; /* number of moves after which a stage is loaded, stored */
    int64_t last;                 /* moves begun so far */
} seqpar__stages;

static int seqpar__is_quantized(const seqpar_optim *o, int which) {
    return o->desc.state_bits == 8 && (which == SEQPAR__STATE_M || which == SEQPAR__STATE_V);
}

/* Whether this state goes through a stage. */
static int seqpar__is_staged(const seqpar_optim *o, const seqpar__update_part *part,
                             int which) {
    if (which == SEQPAR__STATE_MASTER && o->desc.stochastic) return 1;
    if (!part->state[which]) return 0;
    return seqpar__is_quantized(o, which) ||
           (o->desc.offload &
            (which == SEQPAR__STATE_PARAMS ? SEQPAR_OFFLOAD_PARAMS : SEQPAR_OFFLOAD_STATE));
}

/* Sets stage[i] to where state i of a part lies in the stage at `data`, in which the staged
   states follow each other. stage[i] is NULL if state i is not staged, or data is NULL. Returns
   the bytes of all staged states. */
static int64_t seqpar__stage_layout(const seqpar_ctx *ctx, const seqpar_optim *o,
                                    const seqpar__update_part *part, void *data,
                                    void *stage[SEQPAR__STATES]) {
    int64_t bytes = 0;
    for (int i = 0; i < SEQPAR__STATES; i++) {
        int staged = seqpar__is_staged(o, part, i);
        stage[i] = staged && data ? (char *)data + bytes : NULL;
        if (staged) bytes += part->count * seqpar_dtype_bytes(seqpar__update_type(ctx, i));
    }
    return bytes;
}

/* The codes of an 8-bit state from element `at` on, and the scales of their groups, which lie
   behind all codes. */
static seqpar_quantize_args seqpar__quantized_state(const seqpar_ctx *ctx,
                                                    const seqpar_optim *o, const void *state,
                                                    int64_t at, int64_t count) {
    int64_t all = o->desc.zero_stage ? o->blocks.own_elements : o->blocks.elements;
    seqpar_quantize_args a;
    memset(&a, 0, sizeof a);
    a.form = state == o->v.data ? SEQPAR_QUANTIZE_POSITIVE : SEQPAR_QUANTIZE_SIGNED;
    a.codes = (char *)state + at;
    a.scales = seqpar__at((char *)state + all, at / SEQPAR_QUANTIZE_GROUP,
                          ctx->device->accumulator);
    a.count = count;
    return a;
}

static seqpar_status seqpar__stage_quantize(seqpar_ctx *ctx, const seqpar_optim *o,
                                            const seqpar__update_part *part, int which,
                                            void *stage, int back) {
    seqpar_quantize_args a = seqpar__quantized_state(
        ctx, o, which == SEQPAR__STATE_M ? o->m.data : o->v.data, part->at, part->count);
    a.x = stage;
    a.back = back;
    return part->count > 0 ? ctx->device->quantize(ctx->device, &a, ctx->queue) : SEQPAR_OK;
}

static seqpar_status seqpar__moved(const seqpar_ctx *ctx, int64_t moves) {
    return moves > 0 ? ctx->device->moved(ctx->device, moves, ctx->queue) : SEQPAR_OK;
}

/* With `storing` stores a stage, else loads it. Quantized state is quantized from it, or
   dequantized into it. */
static seqpar_status seqpar__stage_move(seqpar_ctx *ctx, const seqpar_optim *o,
                                        seqpar__stages *stages, const seqpar__update_part *part,
                                        int storing) {
    seqpar_device *d = ctx->device;
    void *stage[SEQPAR__STATES];
    seqpar__stage_layout(ctx, o, part, stages->buffer[part->slice % 2].data, stage);
    for (int i = 0; i < SEQPAR__STATES; i++) {
        if (!stage[i] || !part->state[i]) continue;
        if (seqpar__is_quantized(o, i)) {
            /* quantize is not queued behind moves: first wait for this stage's stores */
            if (!storing) SEQPAR__TRY(seqpar__moved(ctx, stages->stored[part->slice % 2]));
            SEQPAR__TRY(seqpar__stage_quantize(ctx, o, part, i, stage[i], !storing));
        } else
            stages->last = d->move(
                d, storing ? part->state[i] : stage[i], storing ? stage[i] : part->state[i],
                part->count * seqpar_dtype_bytes(seqpar__update_type(ctx, i)), ctx->queue);
    }
    *(storing ? &stages->stored[part->slice % 2]
              : &stages->loaded[part->slice % 2]) = stages->last;
    return SEQPAR_OK;
}

/* Allocates two stages, each large enough for any slice, and begins to load the first slice. */
static seqpar_status seqpar__stages_open(seqpar_ctx *ctx, const seqpar_optim *o,
                                         seqpar__stages *stages, void *params) {
    seqpar__update_part part;
    void *stage[SEQPAR__STATES];
    int64_t most = 0;
    memset(stages, 0, sizeof *stages);
    for (int64_t s = 0; s < o->blocks.slices; s++) {
        part = seqpar__update_part_of(ctx, o, params, s, 0);
        most = SEQPAR__MAX(most, seqpar__stage_layout(ctx, o, &part, NULL, stage));
    }
    for (int i = 0; i < 2; i++)
        SEQPAR__TRY(seqpar_buffer_new(ctx, &stages->buffer[i], most, SEQPAR_MEM_OPTIMIZER));
    if (most == 0) return SEQPAR_OK;
    part = seqpar__update_part_of(ctx, o, params, 0, 0);
    return seqpar__stage_move(ctx, o, stages, &part, 0);
}

static seqpar_status seqpar__stages_close(seqpar_ctx *ctx, seqpar__stages *stages) {
    seqpar_status status = seqpar__moved(ctx, stages->last);
    for (int i = 0; i < 2; i++) seqpar_buffer_free(ctx, &stages->buffer[i]);
    return status;
}

/* Starts loading the next slice and waits for this one. */
static seqpar_status seqpar__stage_begin(seqpar_ctx *ctx, const seqpar_optim *o,
                                         seqpar__stages *stages,
                                         const seqpar__update_part *part,
                                         seqpar__update_part *in_stage) {
    void *stage[SEQPAR__STATES];
    *in_stage = *part;
    if (!stages->buffer[0].data) return SEQPAR_OK;
    if (part->slice + 1 < o->blocks.slices) {
        seqpar__update_part next = seqpar__update_part_of(ctx, o, part->params, part->slice + 1,
                                                          0);
        SEQPAR__TRY(seqpar__stage_move(ctx, o, stages, &next, 0));
    }
    SEQPAR__TRY(seqpar__moved(ctx, stages->loaded[part->slice % 2]));
    seqpar__stage_layout(ctx, o, part, stages->buffer[part->slice % 2].data, stage);
    for (int i = 0; i < SEQPAR__STATES; i++)
        if (stage[i]) in_stage->state[i] = stage[i];
    return SEQPAR_OK;
}

static seqpar_status seqpar__update_slices(seqpar_ctx *ctx, const seqpar_optim *o,
                                           seqpar__stages *stages, void *params, double lr) {
    for (int64_t s = 0; s < o->blocks.slices; s++) {
        seqpar__update_part part = seqpar__update_part_of(ctx, o, params, s, lr), in_stage;
        SEQPAR__TRY(seqpar__stage_begin(ctx, o, stages, &part, &in_stage));
        if (o->desc.zero_stage == 0 && ctx->world->size > 1)
            SEQPAR__TRY(seqpar__update_everywhere(ctx, o, in_stage));
        else
            SEQPAR__TRY(seqpar__update_range(ctx, o, &in_stage));
        if (stages->buffer[0].data) SEQPAR__TRY(seqpar__stage_move(ctx, o, stages, &part, 1));
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__update(seqpar_ctx *ctx, seqpar_optim *o, void *params, double lr) {
    seqpar__owned_span owned = {params,
                                0,
                                o->blocks.elements,
                                SEQPAR_PARAM_BLOCK * seqpar_dtype_bytes(ctx->device->storage),
                                1,
                                ctx->queue,
                                "parameters from owners",
                                0};
    seqpar__stages stages;
    seqpar_status ended, status = seqpar__stages_open(ctx, o, &stages, params);
    if (!status) status = seqpar__update_slices(ctx, o, &stages, params, lr);
    ended = seqpar__stages_close(ctx, &stages);
    if (!status) status = ended;
    if (status || o->desc.zero_stage == 0 || o->desc.zero_stage == 3) return status;
    if (!o->desc.params_shared) return seqpar__gather_owned(ctx, &o->blocks, &owned);
    SEQPAR__TRY(seqpar_device_settle(ctx->device, ctx->queue));
    return seqpar_comm_barrier(ctx->world);
}

static seqpar_status seqpar__check_params(seqpar_error *error, const seqpar_optim *o,
                                          int64_t elements) {
    if (o->desc.zero_stage < 3) return seqpar__check_elements(error, &o->blocks, elements);
    if (elements == o->blocks.own_elements) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_SIZE,
                       "the parameters are %lld elements, but at zero_stage 3 this rank owns "
                       "%lld; pass seqpar_shards.own of shards with the same tensors and slice",
                       (long long)elements, (long long)o->blocks.own_elements);
}

/* Ends the sums of the gradient and takes their norm. */
static seqpar_status seqpar__gradient_complete(seqpar_ctx *ctx, seqpar_optim *o) {
    SEQPAR__TRY(seqpar__gradient_end(ctx, o));
    seqpar__step_free(o);
    SEQPAR__TRY(seqpar__gradient_norm(ctx, o));
    o->clip = o->desc.max_norm > 0 ? SEQPAR__MIN(1.0, o->desc.max_norm / (o->norm + 1e-6))
                                   : 1.0;
    o->complete = o->pending = 1;
    return SEQPAR_OK;
}

/* Refuses a step that ranks end differently: in other functions (`ends` is 0 in
   seqpar_step_norm, 1 in seqpar_step_end), or with another lr, shared params or o->t. */
static seqpar_status seqpar__end_agree(seqpar_ctx *ctx, const seqpar_optim *o, int ends,
                                       const void *params, double lr) {
    int64_t shared = o->desc.params_shared ? (int64_t)(intptr_t)params : 0;
    const seqpar__setting settings[] = {
        {"the number of calls of seqpar_step_norm", o->pending + !ends, 0},
        {"the number of calls of seqpar_step_end", ends, 0},
        {"learning rates", seqpar__setting_real(lr), 1},
        {"shared parameters", shared, 1},
        {"the number of steps done", o->t, 0}};
    return seqpar__ranks_agree(ctx->world, "the end of a step", settings, 5);
}

SEQPAR_DEF seqpar_status seqpar_step_norm(seqpar_ctx *ctx, seqpar_optim *o) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim", ctx, o);
    SEQPAR__TRY(seqpar__check_complete(ctx->error, o));
    SEQPAR__TRY(seqpar__end_agree(ctx, o, 0, NULL, 0));
    return seqpar__gradient_complete(ctx, o);
}

SEQPAR_DEF seqpar_status seqpar_step_end(seqpar_ctx *ctx, seqpar_optim *o, void *params,
                                         int64_t elements, double lr) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, params", ctx, o,
                SEQPAR_IF(elements > 0, params));
    if (!(fabs(lr) <= 1.7976931348623157e308))
        return seqpar_fail(ctx->error, SEQPAR_ERR_NOT_FINITE,
                           "the learning rate of step %lld is %g; give a number",
                           (long long)o->t + 1, lr);
    if (o->t < 0)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "optim.t is %lld, but steps are counted from 0", (long long)o->t);
    if (!o->pending) SEQPAR__TRY(seqpar__check_complete(ctx->error, o));
    /* all ranks finish reading shared parameters before they agree; owners write them after */
    if (o->desc.params_shared) SEQPAR__TRY(seqpar_device_settle(ctx->device, ctx->queue));
    SEQPAR__TRY(seqpar__end_agree(ctx, o, 1, params, lr));
    SEQPAR__TRY(seqpar__check_params(ctx->error, o, elements));
    if (!o->pending) SEQPAR__TRY(seqpar__gradient_complete(ctx, o));
    o->pending = 0;
    o->t++;
    return seqpar__update(ctx, o, params, lr);
}

/* ---- open and close ---- */

static seqpar_status seqpar__check_slice(seqpar_error *error, int64_t slice) {
    if (slice >= 0) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_OPTION,
                       "slices of %lld elements are wanted; give at least 1, or 0 for "
                       "the default",
                       (long long)slice);
}

static seqpar_status seqpar__check_optim(seqpar_error *error, const seqpar_optim_desc *d) {
    if (d->zero_stage < 0 || d->zero_stage > 3)
        return seqpar_fail(error, SEQPAR_ERR_OPTION, "zero_stage is %d; use 0, 1, 2 or 3",
                           d->zero_stage);
    SEQPAR__TRY(seqpar__check_slice(error, d->slice));
    if (d->params_shared && (d->zero_stage == 0 || d->zero_stage == 3))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "params_shared wants owners that update one array for all, but "
                           "zero_stage is %d; use 1 or 2",
                           d->zero_stage);
    if (d->offload & ~(SEQPAR_OFFLOAD_STATE | SEQPAR_OFFLOAD_PARAMS) ||
        ((d->offload & SEQPAR_OFFLOAD_PARAMS) && d->zero_stage != 3))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "offload is %d at zero_stage %d; use SEQPAR_OFFLOAD_STATE at any "
                           "stage, SEQPAR_OFFLOAD_PARAMS at stage 3",
                           d->offload, d->zero_stage);
    if ((d->state_bits && d->state_bits != 8) ||
        (d->state_bits && d->offload & SEQPAR_OFFLOAD_STATE))
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "state_bits is %d and offload %d; use 0 for accumulators, or 8 without "
            "SEQPAR_OFFLOAD_STATE",
            d->state_bits, d->offload);
    if (d->kind != SEQPAR_OPTIM_ADAMW && d->kind != SEQPAR_OPTIM_SGD)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "optimizer %d is unknown; use adamw or sgd", d->kind);
    if (!(d->beta1 >= 0 && d->beta1 < 1 && d->beta2 >= 0 && d->beta2 < 1))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "adam_betas are %g and %g; both must lie in [0, 1)", d->beta1,
                           d->beta2);
    if (!(d->eps >= 0) || !(d->decay >= 0) || !(d->max_norm >= 0))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "eps %g, weight decay %g and max_norm %g must not be negative",
                           d->eps, d->decay, d->max_norm);
    return SEQPAR_OK;
}

static int64_t seqpar__digest_tensors(const seqpar_tensor *t, int64_t count) {
    uint64_t digest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t numbers[5] = {t[i].rows, t[i].cols, t[i].offset, t[i].decay, t[i].group};
        digest = seqpar__digest(digest, numbers, sizeof numbers);
    }
    return (int64_t)digest;
}

static seqpar_status seqpar__optim_agree(seqpar_ctx *ctx, const seqpar_tensor *t, int64_t count,
                                         const seqpar_optim_desc *d) {
    seqpar__setting settings[] = {{"the number of tensors", count, 0},
                                  {"tensors", 0, 1},
                                  {"the kind", d->kind, 0},
                                  {"zero_stage", d->zero_stage, 0},
                                  {"beta1", seqpar__setting_real(d->beta1), 1},
                                  {"beta2", seqpar__setting_real(d->beta2), 1},
                                  {"eps", seqpar__setting_real(d->eps), 1},
                                  {"weight decays", seqpar__setting_real(d->decay), 1},
                                  {"max_norm", seqpar__setting_real(d->max_norm), 1},
                                  {"slice", d->slice, 0},
                                  {"params_shared", d->params_shared, 0},
                                  {"offload", d->offload, 0},
                                  {"state_bits", d->state_bits, 0},
                                  {"stochastic rounding", d->stochastic, 0},
                                  {"its seed", (int64_t)d->seed, 0}};
    settings[1].value = seqpar__digest_tensors(t, count);
    return seqpar__ranks_agree(ctx->world, "an optimizer", settings,
                               (int64_t)(sizeof settings / sizeof *settings));
}

SEQPAR_DEF int seqpar_optim_slice(const seqpar_optim *o, int64_t group, int64_t index,
                                  int64_t *first, int64_t *count) {
    SEQPAR_MUST("optim, first, count", o, first, count);
    const seqpar_blocks *b = &o->blocks;
    int64_t slice, tensor, begin;
    *first = *count = 0;
    if (group < 0 || group >= b->groups || index < 0 ||
        index >= b->group_slice[group + 1] - b->group_slice[group])
        return 0;
    slice = b->group_slice[group] + index;
    tensor = b->slice_tensor[slice];
    begin = b->tensors[tensor].offset + b->slice_begin[slice] - b->tensor_begin[tensor];
    *first = begin - b->tensors[b->group_tensor[group]].offset;
    *count = seqpar__slice_end(b, slice) - begin;
    return 1;
}

static seqpar_status seqpar__state_new(seqpar_ctx *ctx, const seqpar_optim *o,
                                       seqpar_buffer *state, int64_t elements) {
    int offload = o->desc.offload & SEQPAR_OFFLOAD_STATE;
    int64_t bytes = elements * seqpar_dtype_bytes(ctx->device->accumulator);
    if (o->desc.state_bits == 8 && state != &o->master)
        bytes = elements + bytes / SEQPAR_QUANTIZE_GROUP;
    SEQPAR__TRY(seqpar_buffer_new(ctx, state, bytes,
                                  offload ? SEQPAR_MEM_OFFLOADED : SEQPAR_MEM_OPTIMIZER));
    if (!offload) ctx->device->zero(ctx->device, state->data, bytes, ctx->queue);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_optim_open(seqpar_ctx *ctx, seqpar_optim *o,
                                           const seqpar_tensor *tensors, int64_t tensor_count,
                                           const seqpar_optim_desc *desc) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, tensors, desc", ctx, o,
                SEQPAR_IF(tensor_count > 0, tensors), desc);
    int masters = ctx->device->storage != ctx->device->accumulator && !desc->stochastic;
    int64_t state;
    memset(o, 0, sizeof *o);
    SEQPAR__TRY(seqpar__check_optim(ctx->error, desc));
    if (desc->stochastic && ctx->device->storage != SEQPAR_DTYPE_BF16)
        return seqpar_fail(
            ctx->error, SEQPAR_ERR_OPTION,
            "stochastic rounding is for weights in bf16; the device '%s' has others",
            ctx->device->name);
    SEQPAR__TRY(seqpar__check_tensors(__func__, ctx->error, tensors, tensor_count));
    SEQPAR__TRY(seqpar__optim_agree(ctx, tensors, tensor_count, desc));
    o->desc = *desc;
    SEQPAR__TRY(seqpar__blocks_open(ctx, &o->blocks, tensors, tensor_count, desc->slice));
    o->gradient = SEQPAR__NEW(seqpar_buffer, 2 * o->blocks.slices);
    if (!o->gradient) return seqpar__no_memory(ctx->error, "the optimizer");
    state = desc->zero_stage == 0 ? o->blocks.elements : o->blocks.own_elements;
    if (masters) SEQPAR__TRY(seqpar__state_new(ctx, o, &o->master, state));
    if (desc->kind == SEQPAR_OPTIM_SGD) return SEQPAR_OK;
    SEQPAR__TRY(seqpar__state_new(ctx, o, &o->m, state));
    return seqpar__state_new(ctx, o, &o->v, state);
}

SEQPAR_DEF void seqpar_optim_close(seqpar_ctx *ctx, seqpar_optim *o) {
    SEQPAR_MUST("ctx, optim", ctx, o);
    seqpar__step_free(o);
    seqpar__gradient_free(ctx, o);
    SEQPAR_FREE(o->gradient);
    seqpar_buffer_free(ctx, &o->m);
    seqpar_buffer_free(ctx, &o->v);
    seqpar_buffer_free(ctx, &o->master);
    seqpar__blocks_close(&o->blocks);
    memset(o, 0, sizeof *o);
}

SEQPAR_DEF double seqpar_lr_factor(int kind, int64_t step, int64_t warmup, int64_t total,
                                   double min_ratio) {
    double p, wave;
    if (step < warmup) return (double)step / (double)SEQPAR__MAX(1, warmup);
    p = (double)(step - warmup) / (double)SEQPAR__MAX(1, total - warmup);
    wave = 0.5 * (1.0 + cos(3.14159265358979323846 * p));
    if (kind == SEQPAR_LR_CONSTANT) return 1.0;
    if (kind == SEQPAR_LR_LINEAR)
        return SEQPAR__MAX(0.0,
                           (double)(total - step) / (double)SEQPAR__MAX(1, total - warmup));
    if (kind == SEQPAR_LR_COSINE) return SEQPAR__MAX(0.0, wave);
    return wave * (1.0 - min_ratio) + min_ratio;
}

/* =============================================================================================
   >>state  reading and writing parameters and moments

   Checkpoints read and write a tensor one range at a time, as doubles in the order of its
   elements, so their format does not depend on the ZeRO stage, the number of ranks, the type or
   the device. Each rank copies the elements that it stores. seqpar_optim_read is collective,
   because owners then send their elements to all other ranks; seqpar_optim_read_own is not.
   ========================================================================================== */

SEQPAR_DEF int seqpar_optim_keeps(const seqpar_ctx *ctx, const seqpar_optim *o, int state) {
    SEQPAR_MUST("ctx, optim", ctx, o);
    if (state == SEQPAR_STATE_MASTER)
        return ctx->device->storage != ctx->device->accumulator && !o->desc.stochastic;
    return state == SEQPAR_STATE_GRADIENT ||
           ((state == SEQPAR_STATE_M || state == SEQPAR_STATE_V) &&
            o->desc.kind != SEQPAR_OPTIM_SGD);
}

/* State or parameters that a rank stores: all blocks if `all`, else only the blocks that it
   owns, in order of slices. */
typedef struct seqpar__stored {
    const seqpar_blocks *blocks;
    void *data;
    const seqpar_buffer *by_slice; /* not NULL: one buffer for each slice, instead of data */
    int all, dtype;
    const seqpar_optim *quantized; /* not NULL: data is quantized state of this optimizer */
} seqpar__stored;

static seqpar__stored seqpar__stored_state(const seqpar_ctx *ctx, const seqpar_optim *o,
                                           int state) {
    seqpar__stored k;
    k.blocks = &o->blocks;
    k.data = state == SEQPAR_STATE_M   ? o->m.data
             : state == SEQPAR_STATE_V ? o->v.data
                                       : o->master.data;
    k.by_slice = state == SEQPAR_STATE_GRADIENT ? o->gradient : NULL;
    k.all = !k.by_slice && o->desc.zero_stage == 0;
    k.dtype = ctx->device->accumulator;
    k.quantized = o->desc.state_bits == 8 &&
                          (state == SEQPAR_STATE_M || state == SEQPAR_STATE_V)
                      ? o
                      : NULL;
    return k;
}

/* Cuts [*begin, *end) to the elements of a slice that this rank has. Returns where the first of
   them is in the stored data. */
static int64_t seqpar__stored_at(const seqpar_ctx *ctx, const seqpar__stored *k, int64_t slice,
                                 int64_t *begin, int64_t *end) {
    const seqpar_blocks *b = k->blocks;
    int64_t own = b->slice_begin[slice], count = b->slice_begin[slice + 1] - own, at = own;
    if (!k->all) {
        seqpar__owned_blocks(b, slice, ctx->world->size, ctx->world->rank, &own, &count);
        own += b->slice_begin[slice];
        at = k->by_slice ? 0 : seqpar__compact_begin(b, ctx, slice);
    }
    *begin = SEQPAR__MAX(*begin, own);
    *end = SEQPAR__MIN(*end, own + count);
    return at + *begin - own;
}

/* Reads (into) or writes (from) the elements at .. at + count of an 8-bit state. */
static seqpar_status seqpar__quantized_move(seqpar_ctx *ctx, const seqpar__stored *k,
                                            int64_t at, int64_t count, double *into,
                                            const double *from) {
    seqpar_quantize_args a = seqpar__quantized_state(ctx, k->quantized, k->data, at, count);
    seqpar_buffer room;
    seqpar_status status = seqpar_buffer_new(ctx, &room, count * seqpar_dtype_bytes(k->dtype),
                                             SEQPAR_MEM_SCRATCH);
    a.x = room.data;
    a.back = into != NULL;
    if (!status && from) seqpar_device_write(ctx->device, room.data, 0, from, count, k->dtype);
    if (!status) status = ctx->device->quantize(ctx->device, &a, ctx->queue);
    if (!status && into) seqpar_device_read(ctx->device, into, room.data, 0, count, k->dtype);
    seqpar_buffer_free(ctx, &room);
    return status;
}

/* Reads a part to `into` or, if that is NULL, writes it from `from` (part->count values). Skips
   the elements that this rank does not store. */
static seqpar_status seqpar__stored_move(seqpar_ctx *ctx, const seqpar__stored *k, double *into,
                                         const double *from, const seqpar_optim_part *part) {
    const seqpar_blocks *b = k->blocks;
    int64_t first = b->tensor_begin[part->tensor] + part->first, begin, end;
    int64_t group = b->tensors[part->tensor].group;
    for (int64_t s = b->group_slice[group]; s < b->group_slice[group + 1]; s++) {
        void *data = k->by_slice ? k->by_slice[s].data : k->data;
        int64_t at;
        begin = first;
        end = first + part->count;
        at = seqpar__stored_at(ctx, k, s, &begin, &end);
        if (begin >= end) continue;
        if (k->quantized)
            SEQPAR__TRY(seqpar__quantized_move(ctx, k, at, end - begin,
                                               into ? into + (begin - first) : NULL,
                                               into ? NULL : from + (begin - first)));
        else if (into)
            seqpar_device_read(ctx->device, into + (begin - first), data, at, end - begin,
                               k->dtype);
        else
            seqpar_device_write(ctx->device, data, at, from + (begin - first), end - begin,
                                k->dtype);
    }
    return seqpar_device_settle(ctx->device, ctx->queue); /* says if a copy failed */
}

static seqpar_status seqpar__stored_read(seqpar_ctx *ctx, const seqpar__stored *k,
                                         double *values, const seqpar_optim_part *part,
                                         const char *name) {
    int64_t first = k->blocks->tensor_begin[part->tensor] + part->first;
    seqpar__owned_span handed = {
        values, first, first + part->count, 8 * SEQPAR_PARAM_BLOCK, 0, NULL, name, 0};
    SEQPAR__TRY(seqpar__stored_move(ctx, k, values, NULL, part));
    return k->all ? SEQPAR_OK : seqpar__gather_owned(ctx, k->blocks, &handed);
}

static seqpar_status seqpar__check_within(seqpar_error *error, const seqpar_blocks *b,
                                          const seqpar_optim_part *part) {
    const seqpar_tensor *t = part->tensor >= 0 && part->tensor < b->tensor_count
                                 ? &b->tensors[part->tensor]
                                 : NULL;
    if (t && part->first >= 0 && part->count >= 0 &&
        part->first <= seqpar__tensor_elements(t) - part->count)
        return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_SIZE,
                       "first %lld, count %lld of tensor %lld are out of range; there are %lld "
                       "tensors, and this one has %lld elements",
                       (long long)part->first, (long long)part->count, (long long)part->tensor,
                       (long long)b->tensor_count,
                       (long long)(t ? seqpar__tensor_elements(t) : 0));
}

/* The 8-bit moments of a group share a scale, so a group is read and written as a whole. */
static seqpar_status seqpar__check_groups(seqpar_error *error, const seqpar_optim *o,
                                          const seqpar_optim_part *part) {
    const seqpar_tensor *t = &o->blocks.tensors[part->tensor];
    int64_t end = part->first + part->count;
    if (o->desc.state_bits != 8 ||
        (part->state != SEQPAR_STATE_M && part->state != SEQPAR_STATE_V) ||
        (part->first % SEQPAR_QUANTIZE_GROUP == 0 &&
         (end % SEQPAR_QUANTIZE_GROUP == 0 || end == seqpar__tensor_elements(t))))
        return SEQPAR_OK;
    return seqpar_fail(
        error, SEQPAR_ERR_SIZE,
        "first %lld, count %lld cut a group of 8-bit moments; give multiples of %d, "
        "or end with the tensor",
        (long long)part->first, (long long)part->count, SEQPAR_QUANTIZE_GROUP);
}

static seqpar_status seqpar__check_part(const seqpar_ctx *ctx, const seqpar_optim *o,
                                        const seqpar_optim_part *part) {
    static const char *const names[] = {"gradient", "first moments", "second moments",
                                        "master parameters"};
    if (part->state == SEQPAR_STATE_GRADIENT && o->step)
        return seqpar_fail(ctx->error, SEQPAR_ERR_STEP,
                           "a step is under way; read its gradient after seqpar_step_norm or "
                           "seqpar_step_end");
    if (!seqpar_optim_keeps(ctx, o, part->state) ||
        (part->state == SEQPAR_STATE_GRADIENT && !o->complete))
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "this optimizer keeps no %s now: SGD has no moments, only bf16 that "
                           "is not stochastic has masters, a gradient needs seqpar_step_norm",
                           part->state >= 0 && part->state <= SEQPAR_STATE_MASTER
                               ? names[part->state]
                               : "such state");
    SEQPAR__TRY(seqpar__check_within(ctx->error, &o->blocks, part));
    return seqpar__check_groups(ctx->error, o, part);
}

SEQPAR_DEF seqpar_status seqpar_optim_read(seqpar_ctx *ctx, const seqpar_optim *o,
                                           double *values, const seqpar_optim_part *part) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, part", ctx, o, part);
    SEQPAR_NEED(ctx->error, "values", SEQPAR_IF(part->count > 0, values));
    seqpar__stored stored = seqpar__stored_state(ctx, o, part->state);
    SEQPAR__TRY(seqpar__check_part(ctx, o, part));
    return seqpar__stored_read(ctx, &stored, values, part, "state from owners");
}

SEQPAR_DEF seqpar_status seqpar_optim_read_own(seqpar_ctx *ctx, const seqpar_optim *o,
                                               double *values, const seqpar_optim_part *part) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, part", ctx, o, part);
    SEQPAR_NEED(ctx->error, "values", SEQPAR_IF(part->count > 0, values));
    seqpar__stored stored = seqpar__stored_state(ctx, o, part->state);
    SEQPAR__TRY(seqpar__check_part(ctx, o, part));
    return seqpar__stored_move(ctx, &stored, values, NULL, part);
}

SEQPAR_DEF seqpar_status seqpar_optim_write(seqpar_ctx *ctx, seqpar_optim *o,
                                            const double *values,
                                            const seqpar_optim_part *part) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, optim, part", ctx, o, part);
    SEQPAR_NEED(ctx->error, "values", SEQPAR_IF(part->count > 0, values));
    seqpar__stored stored = seqpar__stored_state(ctx, o, part->state);
    SEQPAR__TRY(seqpar__check_part(ctx, o, part));
    return seqpar__stored_move(ctx, &stored, NULL, values, part);
}

/* =============================================================================================
   >>shards  parameters stored at their owners only (ZeRO 3)

   A rank stores only the blocks that it owns, so its memory for parameters falls as 1/W. All
   parameters of a group (a layer) are in memory only while the
   group is used: seqpar_shards_use gathers it and begins to gather the next one, whose blocks
   travel while this one computes. So at most two groups are gathered at a time. Parameters are
   only copied, so results cannot change.
   ========================================================================================== */

static seqpar_status seqpar__shards_agree(seqpar_ctx *ctx, const seqpar_tensor *t,
                                          int64_t count, int64_t slice, int offload) {
    const seqpar__setting settings[] = {{"the number of tensors", count, 0},
                                        {"tensors", seqpar__digest_tensors(t, count), 1},
                                        {"slice", slice, 0},
                                        {"offload", offload, 0}};
    return seqpar__ranks_agree(ctx->world, "sharded parameters", settings, 4);
}

SEQPAR_DEF seqpar_status seqpar_shards_open(seqpar_ctx *ctx, seqpar_shards *s,
                                            const seqpar_tensor *tensors, int64_t tensor_count,
                                            int64_t slice, int offload) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, shards, tensors", ctx, s,
                SEQPAR_IF(tensor_count > 0, tensors));
    memset(s, 0, sizeof *s);
    s->held[0].group = s->held[1].group = -1;
    SEQPAR__TRY(seqpar__check_slice(ctx->error, slice));
    SEQPAR__TRY(seqpar__check_tensors(__func__, ctx->error, tensors, tensor_count));
    SEQPAR__TRY(seqpar__shards_agree(ctx, tensors, tensor_count, slice, offload));
    SEQPAR__TRY(seqpar__blocks_open(ctx, &s->blocks, tensors, tensor_count, slice));
    SEQPAR__TRY(seqpar_buffer_new(
        ctx, &s->own, s->blocks.own_elements * seqpar_dtype_bytes(ctx->device->storage),
        offload ? SEQPAR_MEM_OFFLOADED : SEQPAR_MEM_WEIGHTS));
    if (s->own.data && !offload)
        ctx->device->zero(ctx->device, s->own.data, s->own.bytes, ctx->queue);
    return SEQPAR_OK;
}

static seqpar_status seqpar__shards_drop(seqpar_ctx *ctx, seqpar_shards *s, int index) {
    seqpar_status moved = seqpar__moved(ctx, s->held[index].moves);
    seqpar_status status = seqpar_comm_wait(ctx->world, &s->held[index].request, ctx->queue);
    if (!status) status = moved;
    seqpar_buffer_free(ctx, &s->held[index].whole);
    s->held[index].group = -1;
    return status;
}

SEQPAR_DEF void seqpar_shards_close(seqpar_ctx *ctx, seqpar_shards *s) {
    SEQPAR_MUST("ctx, shards", ctx, s);
    int failed = ctx->error->status && ctx->error->status != SEQPAR_ERR_DIED;
    /* the other ranks may never send: without the abort the waits below could hang */
    if (failed && (s->held[0].request.state || s->held[1].request.state))
        seqpar_comm_abort(ctx->world, ctx->error->text);
    for (int i = 0; i < 2; i++) seqpar__shards_drop(ctx, s, i);
    seqpar_buffer_free(ctx, &s->own);
    seqpar__blocks_close(&s->blocks);
}

static int64_t seqpar__shards_copy(const seqpar_ctx *ctx, const seqpar_shards *s, void *to,
                                   const void *from, int64_t bytes) {
    seqpar_device *d = ctx->device;
    if (s->own.kind == SEQPAR_MEM_OFFLOADED) return d->move(d, to, from, bytes, ctx->queue);
    d->copy(d, to, from, bytes, ctx->queue);
    return 0;
}

/* Copies this rank's blocks of the slices [slice, past) to where h->data holds their
   parameters. Returns how many moves to wait for. */
static int64_t seqpar__shards_copy_own(const seqpar_ctx *ctx, const seqpar_shards *s,
                                       const seqpar__owned_span *h, int64_t slice,
                                       int64_t past) {
    int64_t size = seqpar_dtype_bytes(ctx->device->storage), begin, count, moves = 0;
    int64_t own = seqpar__compact_begin(&s->blocks, ctx, slice);
    seqpar__tensor_range part;
    for (; slice < past; slice++, own += count) {
        seqpar__owned_blocks(&s->blocks, slice, ctx->world->size, ctx->world->rank, &begin,
                             &count);
        begin += s->blocks.slice_begin[slice];
        for (part = seqpar__tensor_range_begin(&s->blocks, slice, begin);
             seqpar__tensor_range_next(&s->blocks, &part, begin + count);)
            moves = seqpar__shards_copy(
                ctx, s, (char *)h->data + (part.offset - h->first) * size,
                (char *)s->own.data + (own + part.at - begin) * size, part.count * size);
    }
    return moves;
}

/* Begins to gather the slices [slice, past) into `data`, which begins with the parameter at
   offset `first`. If parameters are offloaded, waits until this rank's blocks are loaded, since
   they are sent to other ranks. */
static seqpar_status seqpar__shards_gather_begin(seqpar_ctx *ctx, const seqpar_shards *s,
                                                 void *data, int64_t first, int64_t slice,
                                                 int64_t past, int64_t *moves,
                                                 seqpar_request *request) {
    seqpar__owned_span h;
    h.data = data;
    h.begin = s->blocks.slice_begin[slice];
    h.end = s->blocks.slice_begin[past];
    h.block_bytes = SEQPAR_PARAM_BLOCK * seqpar_dtype_bytes(ctx->device->storage);
    h.params = 1;
    h.queue = ctx->queue;
    h.name = "parameters from owners";
    h.first = first;
    *moves = seqpar__shards_copy_own(ctx, s, &h, slice, past);
    if (ctx->world->size > 1) SEQPAR__TRY(seqpar__moved(ctx, *moves));
    return seqpar__gather_owned_begin(ctx, &s->blocks, &h, request);
}

/* Begins to gather a group, unless s->held already has it, complete or in flight. *index is its
   entry there. */
static seqpar_status seqpar__shards_fetch(seqpar_ctx *ctx, seqpar_shards *s, int64_t group,
                                          int *index) {
    const seqpar_blocks *b = &s->blocks;
    int64_t first, elements;
    for (*index = 0; *index < 2; ++*index)
        if (s->held[*index].group == group) return SEQPAR_OK;
    *index = s->held[0].group < 0 ? 0 : 1;
    SEQPAR__TRY(seqpar__shards_drop(ctx, s, *index)); /* makes sure the entry is empty */
    first = b->tensors[b->group_tensor[group]].offset;
    elements = seqpar__slice_end(b, b->group_slice[group + 1] - 1) - first;
    SEQPAR__TRY(seqpar_buffer_new(ctx, &s->held[*index].whole,
                                  elements * seqpar_dtype_bytes(ctx->device->storage),
                                  SEQPAR_MEM_WEIGHTS));
    s->held[*index].group = group;
    return seqpar__shards_gather_begin(ctx, s, s->held[*index].whole.data, first,
                                       b->group_slice[group], b->group_slice[group + 1],
                                       &s->held[*index].moves, &s->held[*index].request);
}

SEQPAR_DEF seqpar_status seqpar_shards_use(seqpar_ctx *ctx, seqpar_shards *s, int64_t group,
                                           int64_t next, void **params) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, shards, params", ctx, s, params);
    int index = 0, ahead;
    *params = NULL;
    if (group < -1 || next < -1 || group >= s->blocks.groups || next >= s->blocks.groups)
        return seqpar_fail(ctx->error, SEQPAR_ERR_SIZE,
                           "group %lld, next %lld: give 0 to %lld, or -1 for none",
                           (long long)group, (long long)next, (long long)s->blocks.groups - 1);
    for (int i = 0; i < 2; i++)
        if (s->held[i].group >= 0 && s->held[i].group != group && s->held[i].group != next)
            SEQPAR__TRY(seqpar__shards_drop(ctx, s, i));
    if (group >= 0) SEQPAR__TRY(seqpar__shards_fetch(ctx, s, group, &index));
    if (next >= 0) SEQPAR__TRY(seqpar__shards_fetch(ctx, s, next, &ahead));
    if (group < 0) return SEQPAR_OK;
    SEQPAR__TRY(seqpar__moved(ctx, s->held[index].moves));
    SEQPAR__TRY(seqpar_comm_wait(ctx->world, &s->held[index].request, ctx->queue));
    *params = s->held[index].whole.data;
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_shards_gather(seqpar_ctx *ctx, const seqpar_shards *s,
                                              void *params, int64_t elements) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, shards, params", ctx, s,
                SEQPAR_IF(elements > 0, params));
    seqpar_request request;
    int64_t moves;
    SEQPAR__TRY(seqpar__check_elements(ctx->error, &s->blocks, elements));
    SEQPAR__TRY(
        seqpar__shards_gather_begin(ctx, s, params, 0, 0, s->blocks.slices, &moves, &request));
    SEQPAR__TRY(seqpar__moved(ctx, moves));
    return seqpar_comm_wait(ctx->world, &request, ctx->queue);
}

static seqpar__stored seqpar__stored_shards(const seqpar_ctx *ctx, const seqpar_shards *s) {
    seqpar__stored k;
    k.blocks = &s->blocks;
    k.data = s->own.data;
    k.by_slice = NULL;
    k.all = 0;
    k.dtype = ctx->device->storage;
    k.quantized = NULL;
    return k;
}

static seqpar_optim_part seqpar__shards_part(int64_t tensor, int64_t first, int64_t count) {
    seqpar_optim_part part;
    part.state = -1; /* none: a part of the parameters */
    part.tensor = tensor;
    part.first = first;
    part.count = count;
    return part;
}

SEQPAR_DEF int seqpar_shards_owns(const seqpar_ctx *ctx, const seqpar_shards *s, int64_t tensor,
                                  int64_t first, int64_t count) {
    SEQPAR_MUST("ctx, shards", ctx, s);
    int64_t own, n;
    return seqpar_blocks_own(ctx, &s->blocks, tensor, first, &own, &n) && own < first + count;
}

SEQPAR_DEF seqpar_status seqpar_shards_read(seqpar_ctx *ctx, const seqpar_shards *s,
                                            double *values, int64_t tensor, int64_t first,
                                            int64_t count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, shards, values", ctx, s,
                SEQPAR_IF(count > 0, values));
    seqpar__stored stored = seqpar__stored_shards(ctx, s);
    seqpar_optim_part part = seqpar__shards_part(tensor, first, count);
    SEQPAR__TRY(seqpar__check_within(ctx->error, &s->blocks, &part));
    return seqpar__stored_read(ctx, &stored, values, &part, "parameters from owners");
}

/* Reads (into) or writes (from) the elements that this rank owns of a part. */
static seqpar_status seqpar__shards_move(seqpar_ctx *ctx, const seqpar_shards *s, double *into,
                                         const double *from, const seqpar_optim_part *part) {
    seqpar__stored stored = seqpar__stored_shards(ctx, s);
    SEQPAR__TRY(seqpar__check_within(ctx->error, &s->blocks, part));
    return seqpar__stored_move(ctx, &stored, into, from, part);
}

SEQPAR_DEF seqpar_status seqpar_shards_read_own(seqpar_ctx *ctx, const seqpar_shards *s,
                                                double *values, int64_t tensor, int64_t first,
                                                int64_t count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, shards, values", ctx, s,
                SEQPAR_IF(count > 0, values));
    seqpar_optim_part part = seqpar__shards_part(tensor, first, count);
    return seqpar__shards_move(ctx, s, values, NULL, &part);
}

SEQPAR_DEF seqpar_status seqpar_shards_write(seqpar_ctx *ctx, seqpar_shards *s,
                                             const double *values, int64_t tensor,
                                             int64_t first, int64_t count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, shards, values", ctx, s,
                SEQPAR_IF(count > 0, values));
    seqpar_optim_part part = seqpar__shards_part(tensor, first, count);
    return seqpar__shards_move(ctx, s, NULL, values, &part);
}

/* #############################################################################################

   You may stop here. That was the subject: from a list of documents to an updated parameter,
   on any number of ranks. What follows is how a device does its arithmetic: what devices
   share, a slow one to compare with, the fast one. It knows nothing of ranks. The code above
   calls it only by the functions in seqpar_device (>>table).

   ########################################################################################## */

/* =============================================================================================
   >>device  what host devices share: memory, fold machine, attention driver

   A device is a table of operations on opaque pointers. seqpar_llama.h never reads a device
   buffer and calls only what seqpar.h declares, so your own model can do the same. The
   reference device (naive loops, fp64) runs the same plans as the fast device (fp32), for
   comparison.

   On a GPU each rank has one queue, a CUDA stream: a call enqueues its work and returns. The
   host waits only in copies with queue NULL, for results that it reads (sums of squares,
   sampled tokens, routed experts), in seqpar_device_settle, and before a transport without
   queues. Freed memory is reused by later work of the same queue, so free does not wait. Task
   lists are uploaded from pinned memory and stay on the device. So attention over NCCL never
   makes the host wait, and a call that has been made once
   can be captured into a CUDA graph. Tests without a GPU emulate streams that run late:
   launches, copies and events are deferred until the host waits, then executed in an order
   drawn from a seed. If a wait is missing, the bits of the result differ.

   bf16. Storage type and accumulator type are separate. With bf16 storage, activations and
   the weights that multiply them are rounded to bf16. Statistics, sums over tokens (gradients,
   and the dK and dV sent between ranks), moments and master parameters stay fp32: the owner
   of a block updates its masters and sends out the rounded weights. Every sum is still a fold,
   so SP=N gives the bits of SP=1. A checkpoint holds masters and weights; resumed at another
   world size, it gives the bits of the uninterrupted run. The reference device computes bf16
   in naive loops (--device reference --param_dtype bf16), the CUDA device on tensor cores
   (--device cuda). The gradient is about 1 % off that of fp64 on the same weights
   (verify/tests/test_bits.c), on any number of ranks.

   Backward is fused on a host device. dq is a sum over keys, dk and dv are sums over queries,
   and all three need the same scores. So a host device goes through the keys in order and
   computes a block's contribution to all three at once: five products, where two passes take
   seven. The fold of a dq is suspended until the job of its next keys resumes it; its partial
   sums occupy memory meanwhile. Threads take key jobs in order. A job that needs a dq waits
   until its fold has reached the job's keys, so the order of a sum does not depend on which
   thread computes it. The fast CPU device sums up to 128 tokens of a block in registers and
   then adds the sum to memory. So the second block of a pair, if it has no more tokens, is
   added directly to the value of the first. That gives the bits of two leaves combined, and the
   second leaf needs no memory. The
   GPU runs two passes.
   ========================================================================================== */

SEQPAR_DEF int64_t seqpar_dtype_bytes(int dtype) {
    if (dtype == SEQPAR_DTYPE_F64) return 8;
    return dtype == SEQPAR_DTYPE_F32 ? 4 : 2;
}

#if defined(__GNUC__)
#define SEQPAR__TEMPLATE \
    static inline __attribute__((always_inline)) /* specialized for its constant arguments */
#else
#define SEQPAR__TEMPLATE static inline
#endif

SEQPAR__TEMPLATE double seqpar__element(const void *x, int64_t i, const int type) {
    if (type == SEQPAR_DTYPE_F64) return ((const double *)x)[i];
    if (type == SEQPAR_DTYPE_F32) return (double)((const float *)x)[i];
    return (double)seqpar_bf16_to_float(((const uint16_t *)x)[i]);
}

SEQPAR__TEMPLATE void seqpar__element_set(void *x, int64_t i, const int type, double value) {
    if (type == SEQPAR_DTYPE_F64)
        ((double *)x)[i] = value;
    else if (type == SEQPAR_DTYPE_F32)
        ((float *)x)[i] = (float)value;
    else
        ((uint16_t *)x)[i] = seqpar_bf16_from_float((float)value);
}

static void seqpar__bf16_widen(float *to, const uint16_t *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, 4);
    }
}

static void seqpar__bf16_narrow(uint16_t *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = seqpar_bf16_from_float(from[i]);
}

/* Copies `rows` rows of d elements, `stride` apart in `from` and without gaps in `to`. */
static void seqpar__convert(void *to, int to_type, const void *from, int from_type,
                            int64_t rows, int64_t d, int64_t stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < d; i++)
            seqpar__element_set(to, r * d + i, to_type,
                                seqpar__element(from, r * stride + i, from_type));
}

SEQPAR_DEF void seqpar_device_read(seqpar_device *device, double *to, const void *from,
                                   int64_t first, int64_t count, int dtype) {
    SEQPAR_MUST("device, to, from", device, SEQPAR_IF(count > 0, to),
                SEQPAR_IF(count > 0, from));
    int64_t size = seqpar_dtype_bytes(dtype);
    /* narrow elements go to the end of `to` and are widened in place from the first on: none is
       overwritten before it is read */
    char *narrow = (char *)to + count * (8 - size);
    float x;
    uint16_t half;
    device->copy(device, narrow, (const char *)from + first * size, count * size, NULL);
    for (int64_t i = 0; dtype == SEQPAR_DTYPE_F32 && i < count; i++) {
        memcpy(&x, narrow + 4 * i, 4);
        to[i] = (double)x;
    }
    for (int64_t i = 0; dtype == SEQPAR_DTYPE_BF16 && i < count; i++) {
        memcpy(&half, narrow + 2 * i, 2);
        to[i] = (double)seqpar_bf16_to_float(half);
    }
}

/* Elements converted at a time: FEW in a buffer on the stack, MANY in an allocated one. */
#ifndef SEQPAR__WRITE_FEW
#define SEQPAR__WRITE_FEW 256
#endif
#ifndef SEQPAR__WRITE_MANY
#define SEQPAR__WRITE_MANY 65536
#endif
SEQPAR_DEF void seqpar_device_write(seqpar_device *device, void *to, int64_t first,
                                    const double *from, int64_t count, int dtype) {
    SEQPAR_MUST("device, to, from", device, SEQPAR_IF(count > 0, to),
                SEQPAR_IF(count > 0, from));
    double few[SEQPAR__WRITE_FEW];
    double *many = count > SEQPAR__WRITE_FEW
                       ? (double *)SEQPAR_MALLOC(SEQPAR__WRITE_MANY * sizeof *many)
                       : NULL;
    double *part = many ? many : few;
    /* each chunk is copied with queue NULL, so on a GPU the host waits for each */
    int64_t most = many ? SEQPAR__WRITE_MANY : SEQPAR__WRITE_FEW, n;
    for (; count > 0; count -= n, from += n, first += n) {
        n = SEQPAR__MIN(count, most);
        seqpar__convert(part, dtype, from, SEQPAR_DTYPE_F64, 1, n, n);
        device->copy(device, seqpar__at(to, first, dtype), part, n * seqpar_dtype_bytes(dtype),
                     NULL);
    }
    SEQPAR_FREE(many);
}

SEQPAR_DEF void seqpar_device_close(seqpar_device *device) {
    if (device) device->close(device);
}

SEQPAR_DEF seqpar_status seqpar_device_settle(seqpar_device *device, void *queue) {
    return queue && device && device->settle ? device->settle(device, queue) : SEQPAR_OK;
}

static void *seqpar__host_alloc(seqpar_device *device, int64_t bytes) {
    /* 64-byte aligned, so that vectors do not straddle cache lines. The byte before the data
       holds its offset within the allocation */
    char *raw = (char *)SEQPAR_MALLOC((size_t)bytes + 64), *data;
    (void)device;
    if (!raw) return NULL;
    data = raw + 64 - (int)((uintptr_t)raw % 64);
    data[-1] = (char)(data - raw);
    return data;
}

static void seqpar__host_free(seqpar_device *device, void *data) {
    (void)device;
    if (data) SEQPAR_FREE((char *)data - ((char *)data)[-1]);
}

static void seqpar__host_copy(seqpar_device *device, void *to, const void *from, int64_t bytes,
                              void *queue) {
    (void)device;
    (void)queue;
    if (bytes > 0) memmove(to, from, (size_t)bytes);
}

static void seqpar__host_copy_rows(seqpar_device *device, void *to, int64_t to_stride,
                                   const void *from, int64_t from_stride, int64_t bytes,
                                   int64_t rows, void *queue) {
    (void)device;
    (void)queue;
    for (int64_t i = 0; bytes && i < rows; i++)
        memcpy((char *)to + i * to_stride, (const char *)from + i * from_stride, (size_t)bytes);
}

static void seqpar__host_zero(seqpar_device *device, void *data, int64_t bytes, void *queue) {
    (void)device;
    (void)queue;
    if (bytes > 0) memset(data, 0, (size_t)bytes);
}

/* ---- the second pool of a host device, and its copy thread ---- */

#ifdef SEQPAR_NO_THREADS
static void *seqpar__host_pool_alloc(seqpar_device *device, int64_t bytes) {
    if (!device->pool_path) return seqpar__calloc(bytes, 1);
    seqpar_fail(device->error, SEQPAR_ERR_OPTION,
                "files in %.400s cannot be mapped with SEQPAR_NO_THREADS; set no pool_path",
                device->pool_path);
    return NULL;
}

static void seqpar__host_pool_free(seqpar_device *device, void *data, int64_t bytes) {
    (void)device;
    (void)bytes;
    SEQPAR_FREE(data);
}

static int64_t seqpar__host_move(seqpar_device *device, void *to, const void *from,
                                 int64_t bytes, void *queue) {
    seqpar__host_copy(device, to, from, bytes, queue);
    return 0;
}

static seqpar_status seqpar__host_wait_moves(seqpar_device *device, int64_t moves,
                                             void *queue) {
    (void)device;
    (void)moves;
    (void)queue;
    return SEQPAR_OK;
}

static void seqpar__mover_close(seqpar_device *device) { (void)device; }
#else
static void *seqpar__no_file(seqpar_device *device, int file, const char *what, int64_t bytes) {
    seqpar_fail(
        device->error, SEQPAR_ERR_MEMORY,
        "%lld bytes to offload cannot be %s in %.400s: %s; give another folder, or none",
        (long long)bytes, what, device->pool_path, strerror(errno));
    if (file >= 0) close(file);
    return NULL;
}

#ifndef SEQPAR__ZEROS_BYTES
#define SEQPAR__ZEROS_BYTES 65536
#endif
/* Allocates the file's disk blocks. Without them, touching a mapped page on a full disk would
   kill the process. */
static int seqpar__write_zeros(int file, int64_t bytes) {
    static const char zeros[SEQPAR__ZEROS_BYTES] = {0};
    while (bytes > 0) {
        ssize_t n = write(file, zeros, (size_t)SEQPAR__MIN(bytes, (int64_t)sizeof zeros));
        if (n < 0 && errno != EINTR) return 0;
        if (n > 0) bytes -= n;
    }
    return 1;
}

/* Unlinks the file at once, so that the system frees it when the process ends, even by a
   crash. */
static void *seqpar__map_file(seqpar_device *device, int64_t bytes) {
    char path[1200];
    void *data;
    int file;
    snprintf(path, sizeof path, "%.1000s/offloaded.%lld.%llx", device->pool_path,
             (long long)getpid(), (unsigned long long)(uintptr_t)device);
    file = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0) return seqpar__no_file(device, -1, "kept in a file", bytes);
    unlink(path);
    if (!seqpar__write_zeros(file, bytes))
        return seqpar__no_file(device, file, "written to a file", bytes);
    data = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (data == MAP_FAILED) return seqpar__no_file(device, file, "mapped from a file", bytes);
    close(file);
    return data;
}

static void *seqpar__host_pool_alloc(seqpar_device *device, int64_t bytes) {
    return device->pool_path ? seqpar__map_file(device, bytes) : seqpar__calloc(bytes, 1);
}

static void seqpar__host_pool_free(seqpar_device *device, void *data, int64_t bytes) {
    if (device->pool_path)
        munmap(data, (size_t)bytes);
    else
        SEQPAR_FREE(data);
}

/* Slots of the ring buffer of moves: move n is in slot n % SEQPAR__MOVES. `begun` counts the
   moves enqueued so far, `done` those the thread has finished. */
#ifndef SEQPAR__MOVES
#define SEQPAR__MOVES 32
#endif
struct seqpar__mover {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* a move was begun or done, or `over` was set */
    int64_t begun, done;
    int over;
    struct {
        void *to;
        const void *from;
        int64_t bytes;
    } moves[SEQPAR__MOVES];
};

static void *seqpar__mover_main(void *user) {
    struct seqpar__mover *m = (struct seqpar__mover *)user;
    pthread_mutex_lock(&m->lock);
    while (!m->over || m->done < m->begun) {
        int64_t next = m->done % SEQPAR__MOVES;
        if (m->done == m->begun) {
            pthread_cond_wait(&m->wake, &m->lock);
            continue;
        }
        pthread_mutex_unlock(&m->lock);
        memcpy(m->moves[next].to, m->moves[next].from, (size_t)m->moves[next].bytes);
        pthread_mutex_lock(&m->lock);
        m->done++;
        pthread_cond_broadcast(&m->wake);
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

/* Starts the thread on first use. NULL: out of memory, or no thread can be created. */
static struct seqpar__mover *seqpar__mover(seqpar_device *device) {
    struct seqpar__mover *m = device->mover;
    if (m || !(m = SEQPAR__NEW(struct seqpar__mover, 1))) return m;
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->wake, NULL);
    if (!pthread_create(&m->thread, NULL, seqpar__mover_main, m)) return device->mover = m;
    pthread_cond_destroy(&m->wake);
    pthread_mutex_destroy(&m->lock);
    SEQPAR_FREE(m);
    return NULL;
}

static seqpar_status seqpar__host_wait_moves(seqpar_device *device, int64_t moves,
                                             void *queue) {
    struct seqpar__mover *m = device->mover;
    (void)queue;
    if (!m) return SEQPAR_OK;
    pthread_mutex_lock(&m->lock);
    while (m->done < moves) pthread_cond_wait(&m->wake, &m->lock);
    pthread_mutex_unlock(&m->lock);
    return SEQPAR_OK;
}

/* Copies at once if there is no thread. */
static int64_t seqpar__host_move(seqpar_device *device, void *to, const void *from,
                                 int64_t bytes, void *queue) {
    struct seqpar__mover *m = bytes > 0 ? seqpar__mover(device) : device->mover;
    int64_t begun = m ? m->begun : 0;
    if (!m) seqpar__host_copy(device, to, from, bytes, queue);
    if (!m || bytes <= 0) return begun;
    (void)seqpar__host_wait_moves(device, begun + 1 - SEQPAR__MOVES, queue);
    pthread_mutex_lock(&m->lock);
    m->moves[begun % SEQPAR__MOVES].to = to;
    m->moves[begun % SEQPAR__MOVES].from = from;
    m->moves[begun % SEQPAR__MOVES].bytes = bytes;
    m->begun = begun + 1;
    pthread_cond_broadcast(&m->wake);
    pthread_mutex_unlock(&m->lock);
    return begun + 1;
}

static void seqpar__mover_close(seqpar_device *device) {
    struct seqpar__mover *m = device->mover;
    if (!m) return;
    pthread_mutex_lock(&m->lock);
    m->over = 1;
    pthread_cond_broadcast(&m->wake);
    pthread_mutex_unlock(&m->lock);
    pthread_join(m->thread, NULL);
    pthread_cond_destroy(&m->wake);
    pthread_mutex_destroy(&m->lock);
    SEQPAR_FREE(m);
}
#endif

static void seqpar__host_close(seqpar_device *device) {
    seqpar__mover_close(device);
    seqpar__host_free(device, device->workspace);
    SEQPAR_FREE(device);
}

/* Scratch of at least `bytes` per thread; kept by the device between calls. */
static char *seqpar__workspace(seqpar_device *device, int64_t bytes) {
    int64_t need = ((bytes + 63) & ~(int64_t)63) * device->threads;
    if (need > device->workspace_bytes) {
        seqpar__host_free(device, device->workspace);
        device->workspace = seqpar__host_alloc(device, need);
        device->workspace_bytes = device->workspace ? need : 0;
        if (!device->workspace) seqpar__no_memory(device->error, "device scratch");
    }
    return (char *)device->workspace;
}

/* Calls job(user, i, scratch of this thread) for i in 0..jobs-1. Each thread takes its jobs in
   rising order, so a job may wait for lower ones. */
typedef void (*seqpar__job_fn)(void *user, int64_t i, char *scratch);
static seqpar_status seqpar__parallel(seqpar_device *device, int64_t jobs,
                                      int64_t scratch_bytes, seqpar__job_fn job, void *user) {
    char *scratch = seqpar__workspace(device, scratch_bytes + 64);
    int64_t each = (scratch_bytes + 64 + 63) & ~(int64_t)63, i;
    if (!scratch) return SEQPAR_ERR_MEMORY;
#ifdef _OPENMP
    if (device->threads > 1 && jobs > 1) {
#pragma omp parallel for schedule(monotonic : dynamic, 1) num_threads((int)device->threads)
        for (i = 0; i < jobs; i++) job(user, i, scratch + each * omp_get_thread_num());
        return SEQPAR_OK;
    }
#endif
    for (i = 0; i < jobs; i++) job(user, i, scratch);
    (void)each;
    return SEQPAR_OK;
}

/* The same for jobs of equal cost that access memory in job order. Each thread gets a
   contiguous range of jobs: the data of this range may still be in its cache from an earlier
   call, and it does not prefetch lines that another thread writes. A thread that has finished
   its range helps with the others, because another thread may have lost its core. */
static seqpar_status seqpar__parallel_runs(seqpar_device *device, int64_t jobs,
                                           int64_t scratch_bytes, seqpar__job_fn job,
                                           void *user) {
#ifdef _OPENMP
    if (device->threads > 1 && jobs > 1) {
        int64_t each = (scratch_bytes + 64 + 63) & ~(int64_t)63, threads = device->threads, t;
        /* the next job of a thread's range is stored behind that thread's scratch */
        char *scratch = seqpar__workspace(device, scratch_bytes + 64), *next;
        if (!scratch) return SEQPAR_ERR_MEMORY;
        for (t = 0, next = scratch + each - 64; t < threads; t++)
            *(int64_t *)(void *)(next + t * each) = jobs * t / threads;
#pragma omp parallel num_threads((int)threads)
        {
            int64_t me = omp_get_thread_num(), k, i;
            for (k = 0; k < threads; k++) {
                int64_t owner = (me + k) % threads, end = jobs * (owner + 1) / threads;
                int64_t *at = (int64_t *)(void *)(next + owner * each);
                for (;;) {
#pragma omp atomic capture
                    i = (*at)++;
                    if (i >= end) break;
                    job(user, i, scratch + each * me);
                }
            }
        }
        return SEQPAR_OK;
    }
#endif
    return seqpar__parallel(device, jobs, scratch_bytes, job, user);
}

/* ---- the stack machine that runs fold programs ---- */

/* Does the operation compute a leaf (op->index)? */
static int seqpar__fold_computes(const seqpar_fold_op *op) {
    return op->op == SEQPAR_FOLD_LEAF || op->op == SEQPAR_FOLD_EXTEND;
}

/* Computes leaf `index` into `value`; with `extend`, as a continuation of `value`. */
typedef void (*seqpar__leaf_fn)(void *user, void *value, int64_t index, int extend);
typedef struct seqpar__machine {
    void *user;
    char *stack;
    int64_t value_bytes;
    seqpar__leaf_fn leaf;
    void (*combine)(void *user, void *into, const void *other);
    void (*move)(void *user, void *value, int64_t slot, int to_store);
    void (*finish)(void *user, void *value);
    /* address of a stored value; NULL: they are not contiguous, and are only copied */
    char *(*slot_at)(void *user, int64_t slot);
    /* address of a leaf that is already in memory; NULL: `leaf` computes all leaves */
    const char *(*ready)(void *user, int64_t index);
    int extends; /* `leaf` supports extend */
    /* does extending by the leaf give the bits of computing it alone and combining? NULL: no */
    int (*single)(void *user, int64_t index);
    /* (depth) addresses of the values on the stack. Values wait on the stack until their
       siblings are pushed, so it can be deeper than the tree */
    char **values;
    int64_t top, at; /* index of the top value, -1: none; index of the next operation */
} seqpar__machine;

static int64_t seqpar__machine_stack_bytes(int64_t depth) {
    return (depth * (int64_t)sizeof(char *) + 63) & ~(int64_t)63;
}

static int64_t seqpar__machine_bytes(int64_t depth, int64_t value_bytes) {
    return seqpar__machine_stack_bytes(depth) + depth * value_bytes;
}

static void seqpar__machine_memory(seqpar__machine *m, char *memory, int64_t depth,
                                   int64_t value_bytes) {
    memset(m, 0, sizeof *m);
    m->values = (char **)(void *)memory;
    m->stack = memory + seqpar__machine_stack_bytes(depth);
    m->value_bytes = value_bytes;
}

/* The address where the value that p[0] pushes will finally be stored, so that it can be
   computed in place. NULL: it is not stored, stored values have no address, or the old value
   there is still to be loaded. */
static char *seqpar__machine_home(const seqpar__machine *m, const seqpar_fold_op *p,
                                  int64_t count) {
    int64_t depth = 0, i;
    for (i = 0; m->slot_at && i < count; i++) {
        if (p[i].op == SEQPAR_FOLD_LEAF || p[i].op == SEQPAR_FOLD_LOAD) {
            depth++;
            continue;
        }
        if (p[i].op == SEQPAR_FOLD_EXTEND) continue;
        if (depth == 1) break;
        depth--;
    }
    if (!m->slot_at || i == count || p[i].op != SEQPAR_FOLD_STORE) return NULL;
    for (int64_t k = 0; k < i; k++)
        if (p[k].op == SEQPAR_FOLD_LOAD && p[k].index == p[i].index) return NULL;
    return m->slot_at(m->user, p[i].index);
}

/* Computes the leaf, or loads the stored value, that p[0] pushes at depth `top`; returns its
   address. */
static char *seqpar__machine_push(const seqpar__machine *m, const seqpar_fold_op *p,
                                  int64_t count, int64_t top) {
    char *value = seqpar__machine_home(m, p, count);
    if (!value) value = m->stack + top * m->value_bytes;
    if (p->op == SEQPAR_FOLD_LEAF)
        m->leaf(m->user, value, p->index, 0);
    else
        m->move(m->user, value, p->index, 0);
    return value;
}

static void seqpar__machine_extend(const seqpar__machine *m, char *value, char *scratch,
                                   int64_t index) {
    if (m->extends) {
        m->leaf(m->user, value, index, 1);
        return;
    }
    if (m->ready) {
        m->combine(m->user, value, m->ready(m->user, index));
        return;
    }
    m->leaf(m->user, scratch, index, 0);
    m->combine(m->user, value, scratch);
}

/* Saves copies and stack space where the next operations push a value and combine it. A leaf
   for which m->single holds extends the top value. A leaf whose address m->ready returns, or a
   contiguous stored value, is combined from its address. If the next operation would store the
   result at that same address, the top value is combined into the stored one instead (combine
   is commutative to the bit). Returns the number of operations done; 0: no such case. */
static int64_t seqpar__machine_in_place(const seqpar__machine *m, char *top,
                                        const seqpar_fold_op *p, int64_t count) {
    if (count < 2 || p[1].op != SEQPAR_FOLD_COMBINE) return 0;
    if (m->single && p[0].op == SEQPAR_FOLD_LEAF && m->single(m->user, p[0].index)) {
        m->leaf(m->user, top, p[0].index, 1);
        return 2;
    }
    if (m->ready && p[0].op == SEQPAR_FOLD_LEAF) {
        m->combine(m->user, top, m->ready(m->user, p[0].index));
        return 2;
    }
    if (!m->slot_at || p[0].op != SEQPAR_FOLD_LOAD) return 0;
    if (count < 3 || p[2].op != SEQPAR_FOLD_STORE || p[2].index != p[0].index) {
        m->combine(m->user, top, m->slot_at(m->user, p[0].index));
        return 2;
    }
    m->combine(m->user, m->slot_at(m->user, p[0].index), top);
    return 3;
}

/* Resumes a program and runs it to its end or, if until >= 0, up to the first operation that
   computes a leaf other than `until`. */
static void seqpar__machine_step(seqpar__machine *m, const seqpar_fold_op *program,
                                 int64_t count, int64_t until) {
    int64_t taken;
    while (m->at < count) {
        const seqpar_fold_op *p = program + m->at;
        char **top = m->values + m->top;
        if (until >= 0 && seqpar__fold_computes(p) && p->index != until) return;
        if (m->top >= 0 && (taken = seqpar__machine_in_place(m, *top, p, count - m->at)) > 0) {
            m->at += taken;
            m->top -= taken == 3;
            continue;
        }
        m->at++;
        switch (p->op) {
        case SEQPAR_FOLD_LEAF:
        case SEQPAR_FOLD_LOAD:
            top[1] = seqpar__machine_push(m, p, count - (m->at - 1), ++m->top);
            break;
        case SEQPAR_FOLD_EXTEND:
            seqpar__machine_extend(m, *top, m->stack + (m->top + 1) * m->value_bytes, p->index);
            break;
        case SEQPAR_FOLD_COMBINE:
            m->top--;
            m->combine(m->user, top[-1], *top);
            break;
        case SEQPAR_FOLD_STORE:
            m->top--;
            m->move(m->user, *top, p->index, 1);
            break;
        case SEQPAR_FOLD_FINISH:
            m->top--;
            m->finish(m->user, *top);
            break;
        }
    }
}

static void seqpar__machine_exec(seqpar__machine *m, const seqpar_fold_op *program,
                                 int64_t count) {
    m->top = -1;
    m->at = 0;
    seqpar__machine_step(m, program, count, -1);
}

/* ---- folds of vectors, a block of columns at a time ---- */
typedef struct seqpar__columns {
    seqpar_device *device;
    const seqpar_fold_call *fold;
    const void *args;
    int64_t count, block; /* columns in all, and per job */
    int64_t begin, width; /* of the current job */
    seqpar__leaf_fn leaf;
} seqpar__columns;

static void seqpar__columns_combine(void *user, void *into, const void *other) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    if (c->device->accumulator == SEQPAR_DTYPE_F64)
        for (int64_t i = 0; i < c->width; i++)
            ((double *)into)[i] += ((const double *)other)[i];
    else
        for (int64_t i = 0; i < c->width; i++) ((float *)into)[i] += ((const float *)other)[i];
}

static void seqpar__columns_move(void *user, void *value, int64_t slot, int to_store) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    void *stored = seqpar__at(c->fold->store, slot * c->fold->store_stride + c->begin,
                              c->device->accumulator);
    size_t bytes = (size_t)(c->width * seqpar_dtype_bytes(c->device->accumulator));
    if (to_store)
        memcpy(stored, value, bytes);
    else
        memcpy(value, stored, bytes);
}

static void seqpar__columns_finish(void *user, void *value) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    memcpy(seqpar__at(c->fold->finish, c->begin, c->device->accumulator), value,
           (size_t)(c->width * seqpar_dtype_bytes(c->device->accumulator)));
}

static void seqpar__columns_job(void *user, int64_t i, char *scratch) {
    seqpar__columns c = *(const seqpar__columns *)user;
    seqpar__machine m;
    c.begin = i * c.block;
    c.width = SEQPAR__MIN(c.block, c.count - c.begin);
    /* m.slot_at stays NULL: a job has only some columns of a stored value */
    seqpar__machine_memory(&m, scratch, c.fold->depth,
                           c.block * seqpar_dtype_bytes(c.device->accumulator));
    m.user = &c;
    m.leaf = c.leaf;
    m.combine = seqpar__columns_combine;
    m.move = seqpar__columns_move;
    m.finish = seqpar__columns_finish;
    m.extends = 1;
    seqpar__machine_exec(&m, c.fold->program, c.fold->program_count);
}

static seqpar_status seqpar__for_columns(seqpar_device *device, const seqpar_fold_call *fold,
                                         const void *args, int64_t count, int64_t block,
                                         seqpar__leaf_fn leaf) {
    seqpar__columns c;
    memset(&c, 0, sizeof c);
    c.device = device;
    c.fold = fold;
    c.args = args;
    c.count = count;
    c.block = block;
    c.leaf = leaf;
    return seqpar__parallel(
        device, (count + block - 1) / block,
        seqpar__machine_bytes(fold->depth, block * seqpar_dtype_bytes(device->accumulator)),
        seqpar__columns_job, &c);
}

#ifndef SEQPAR__FOLD_COLUMNS
#define SEQPAR__FOLD_COLUMNS 4096 /* elements of a job */
#endif
static void seqpar__fold_leaf(void *user, void *value, int64_t index, int extend) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    const seqpar_fold_args *a = (const seqpar_fold_args *)c->args;
    (void)extend; /* always 0: programs of owners have no EXTEND */
    memcpy(value,
           seqpar__at(a->leaf_data, index * a->leaf_stride + c->begin, c->device->accumulator),
           (size_t)(c->width * seqpar_dtype_bytes(c->device->accumulator)));
}

/* Defines a device operation that returns `call`. Its work is done when it returns, so it
   ignores the queue. */
#define SEQPAR__OP(function, op, call) \
    static seqpar_status function(seqpar_device *device, const seqpar_##op##_args *a, \
                                  void *queue) { \
        (void)queue; \
        return call; \
    }

SEQPAR__OP(seqpar__host_fold, fold,
           seqpar__for_columns(device, &a->fold, a, a->count, SEQPAR__FOLD_COLUMNS,
                               seqpar__fold_leaf))

/* ---- attention driver: a job is a (task, head); a device's kernels do the arithmetic ---- */
typedef struct seqpar__attn_job {
    seqpar_device *device;
    const seqpar_attn_args *args;
    const struct seqpar__attn_kernel *kernel;
    const seqpar_attn_task *task;
    int64_t count; /* rows of the task's piece */
    int64_t local; /* row of the piece's first token in the tensors of its rank */
    /* forward, dq: query head among all heads; dkv, return: kv head within the step's range */
    int64_t head;
    char *scratch; /* the kernel's, behind the machine's stack; shared by the job's leaves */
    int packed;    /* how many leaves have used `scratch`; 0: nothing is packed there yet */
    int64_t flops;
    /* for a kernel that prefetches: memory that this job or the next one will use */
    struct {
        const char *at;
        int64_t bytes, stride, rows;
    } prefetch[8];
    int prefetch_count;
    /* fused backward only: */
    struct seqpar__backward *backward;
    struct seqpar__attn_job *keys; /* of a query job: the job of the current keys */
    void *gradients;               /* of a key job: its dk, then dv */
    /* of a key job: `gradients` holds no sums yet, so the kernel must start them from 0 */
    int fresh;
} seqpar__attn_job;

/* What an attention fold computes. The first two have a row for each query of a query piece,
   the others for each key of a key piece. */
enum seqpar__fold_kind {
    SEQPAR__FOLD_STATE,  /* o, then m, then l */
    SEQPAR__FOLD_DQ,     /* dq */
    SEQPAR__FOLD_DKV,    /* dk, then dv */
    SEQPAR__FOLD_RETURNS /* dk, then dv; its leaves are partial sums from other ranks */
};

static int seqpar__fold_of_queries(enum seqpar__fold_kind kind) {
    return kind == SEQPAR__FOLD_STATE || kind == SEQPAR__FOLD_DQ;
}

typedef struct seqpar__attn_kernel {
    enum seqpar__fold_kind kind;
    int64_t scratch_bytes;
    seqpar__leaf_fn leaf;
    void (*combine)(void *job, void *into, const void *other);
    /* forward: divides by l, writes out and lse */
    void (*finish_state)(seqpar__attn_job *job, void *value);
    int extends; /* leaf supports extend */
    /* a leaf of at most this many keys (dq) or queries (dk, dv) adds a single sum to each
       element, so extending gives the bits of combining */
    int64_t single;
    /* NULL, or: adds to job->prefetch the memory to prefetch: if `next` is a job (on `machine`),
       the memory it will read and write; if `next` is NULL, the values that `job` will load */
    void (*prefetch)(seqpar__attn_job *job, const seqpar__attn_job *next,
                     const seqpar__machine *machine);
} seqpar__attn_kernel;

/* elements of a value of `count` rows */
static int64_t seqpar__attn_value(const seqpar__attn_job *j, int64_t count) {
    int64_t d = j->args->head_dim;
    if (j->kernel->kind == SEQPAR__FOLD_STATE) return count * (d + 2);
    return j->kernel->kind == SEQPAR__FOLD_DQ ? count * d : 2 * count * d;
}

/* Copies the rows of a dense value, from its element `first` on, to a result (tokens, heads,
   head_dim), rounded once to the storage type. */
static void seqpar__attn_rows(const seqpar__attn_job *j, const void *value, int64_t first,
                              void *result, int64_t heads, int64_t head) {
    int64_t d = j->args->head_dim;
    int sum = j->device->accumulator, type = j->device->storage;
    for (int64_t t = 0; t < j->count; t++) {
        void *to = seqpar__at(result, ((j->local + t) * heads + head) * d, type);
        void *from = seqpar__at(value, first + t * d, sum);
        if (sum == type)
            memcpy(to, from, (size_t)(d * seqpar_dtype_bytes(type)));
        else if (sum == SEQPAR_DTYPE_F32 && type == SEQPAR_DTYPE_BF16)
            seqpar__bf16_narrow((uint16_t *)to, (const float *)from, d);
        else
            seqpar__convert(to, type, from, sum, 1, d, d);
    }
}

/* Address of slot n of the store, which outlives device calls. The value is contiguous, and
   next to those of the other heads of its piece. */
static char *seqpar__attn_stored(void *user, int64_t n) {
    const seqpar__attn_job *j = (const seqpar__attn_job *)user;
    const seqpar_attn_args *a = j->args;
    int64_t size = seqpar_dtype_bytes(j->device->accumulator);
    int64_t value = seqpar__attn_value(j, j->count), group = a->heads / a->kv_heads;
    int64_t width = value / j->count;
    if (!seqpar__fold_of_queries(j->kernel->kind))
        return (char *)a->store +
               (j->task->store_base + n * j->task->store_stride + j->head * value) * size;
    return (char *)a->store + ((n * a->q_tokens + j->local) * a->head_count * group * width +
                               (j->head - a->head_begin * group) * value) *
                                  size;
}

static void seqpar__attn_move(void *user, void *value, int64_t n, int to_store) {
    const seqpar__attn_job *j = (const seqpar__attn_job *)user;
    int64_t size = seqpar_dtype_bytes(j->device->accumulator);
    int64_t count = seqpar__attn_value(j, j->count);
    char *stored = seqpar__attn_stored(user, n);
    if (stored == (char *)value) return;
    if (to_store)
        memcpy(stored, value, (size_t)(count * size));
    else
        memcpy(value, stored, (size_t)(count * size));
}

static void seqpar__attn_finish(void *user, void *value) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    const seqpar_attn_args *a = j->args;
    int64_t head = a->head_begin + j->head;
    switch (j->kernel->kind) {
    case SEQPAR__FOLD_STATE: j->kernel->finish_state(j, value); break;
    case SEQPAR__FOLD_DQ: seqpar__attn_rows(j, value, 0, a->dq, a->heads, j->head); break;
    case SEQPAR__FOLD_DKV:
    case SEQPAR__FOLD_RETURNS:
        seqpar__attn_rows(j, value, 0, a->dk, a->kv_heads, head);
        seqpar__attn_rows(j, value, j->count * a->head_dim, a->dv, a->kv_heads, head);
        break;
    }
}

/* Address in the inbox of a partial sum that another rank has sent. */
static const char *seqpar__attn_inbox(void *user, int64_t index) {
    const seqpar__attn_job *j = (const seqpar__attn_job *)user;
    int64_t size = seqpar_dtype_bytes(j->device->accumulator);
    int64_t count = seqpar__attn_value(j, j->count);
    return (const char *)j->args->inbox +
           (j->task->inbox_base + (index * j->args->head_count + j->head) * count) * size;
}

static void seqpar__attn_return_leaf(void *user, void *value, int64_t index, int extend) {
    const seqpar__attn_job *j = (const seqpar__attn_job *)user;
    (void)extend;
    memcpy(
        value, seqpar__attn_inbox(user, index),
        (size_t)(seqpar__attn_value(j, j->count) * seqpar_dtype_bytes(j->device->accumulator)));
}

static void seqpar__attn_add(void *user, void *into, const void *other) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    int64_t n = seqpar__attn_value(j, j->count);
    if (j->device->accumulator == SEQPAR_DTYPE_F64)
        for (int64_t i = 0; i < n; i++) ((double *)into)[i] += ((const double *)other)[i];
    else
        for (int64_t i = 0; i < n; i++) ((float *)into)[i] += ((const float *)other)[i];
}

/* rows of the longest piece of a task */
static int64_t seqpar__attn_rows_max(const seqpar_attn_args *a) {
    int64_t rows = 0;
    for (int64_t t = 0; t < a->task_count; t++)
        rows = SEQPAR__MAX(rows, a->q_pieces[a->tasks[t].piece].count);
    return rows;
}

typedef struct seqpar__attn_work {
    seqpar_device *device;
    const seqpar_attn_args *args;
    const seqpar__attn_kernel *kernel;
    int64_t heads, value_bytes, flops;
} seqpar__attn_work;

static int64_t seqpar__attn_value_bytes(seqpar_device *device, const seqpar_attn_args *a,
                                        const seqpar__attn_kernel *kernel) {
    seqpar__attn_job sizes;
    sizes.args = a;
    sizes.kernel = kernel;
    return (seqpar__attn_value(&sizes, seqpar__attn_rows_max(a)) *
                seqpar_dtype_bytes(device->accumulator) +
            63) &
           ~(int64_t)63;
}

/* Initializes a job and its machine; stack and scratch are in `memory`. `head` is numbered from
   the first head of the step. */
static void seqpar__attn_job_new(seqpar__attn_job *j, seqpar__machine *m,
                                 const seqpar__attn_work *w, const seqpar_attn_args *a,
                                 const seqpar_attn_task *task, int64_t head, char *memory) {
    memset(j, 0, sizeof *j);
    j->device = w->device;
    j->args = a;
    j->kernel = w->kernel;
    j->task = task;
    j->head = head;
    if (seqpar__fold_of_queries(w->kernel->kind))
        j->head += a->head_begin * (a->heads / a->kv_heads);
    j->count = a->q_pieces[task->piece].count;
    j->local = a->q_pieces[task->piece].local;
    j->scratch = memory + seqpar__machine_bytes(a->depth, w->value_bytes);
    seqpar__machine_memory(m, memory, a->depth, w->value_bytes);
    m->user = j;
    m->leaf = w->kernel->leaf;
    m->combine = w->kernel->combine;
    m->move = seqpar__attn_move;
    m->finish = seqpar__attn_finish;
    m->extends = w->kernel->extends;
    m->slot_at = seqpar__attn_stored;
    m->ready = w->kernel->kind == SEQPAR__FOLD_RETURNS ? seqpar__attn_inbox : NULL;
    m->top = -1;
}

static void seqpar__attn_count(int64_t *total, int64_t flops) {
#ifdef _OPENMP
#pragma omp atomic
#endif
    *total += flops;
}

static void seqpar__attn_prefetch(seqpar__attn_job *j, const seqpar__attn_work *w,
                                  const seqpar_attn_args *a, const seqpar_attn_task *task,
                                  int64_t head, char *memory) {
    seqpar__attn_job next;
    seqpar__machine m;
    seqpar__attn_job_new(&next, &m, w, a, task, head, memory);
    w->kernel->prefetch(j, &next, &m);
}

static void seqpar__attn_job_compute(void *user, int64_t i, char *scratch) {
    seqpar__attn_work *w = (seqpar__attn_work *)user;
    const seqpar_attn_args *a = w->args;
    seqpar__attn_job j;
    seqpar__machine m;
    int64_t n = i + 1;
    seqpar__attn_job_new(&j, &m, w, a, &a->tasks[i / w->heads], i % w->heads, scratch);
    if (w->kernel->prefetch) {
        if (n < a->task_count * w->heads)
            seqpar__attn_prefetch(&j, w, a, &a->tasks[n / w->heads], n % w->heads, scratch);
        w->kernel->prefetch(&j, NULL, NULL);
    }
    seqpar__machine_exec(&m, j.task->program, j.task->program_count);
    seqpar__attn_count(&w->flops, j.flops);
}

/* Forward, or returns: then a->q_pieces are the key pieces whose gradient is folded. */
static seqpar_status seqpar__attn_compute(seqpar_device *device, const seqpar_attn_args *a,
                                          const seqpar__attn_kernel *kernel) {
    seqpar__attn_work w;
    seqpar_status status;
    w.device = device;
    w.args = a;
    w.kernel = kernel;
    w.heads = a->head_count;
    if (seqpar__fold_of_queries(kernel->kind)) w.heads *= a->heads / a->kv_heads;
    w.value_bytes = seqpar__attn_value_bytes(device, a, kernel);
    w.flops = 0;
    status = seqpar__parallel(device, a->task_count * w.heads,
                              seqpar__machine_bytes(a->depth, w.value_bytes) +
                                  kernel->scratch_bytes,
                              seqpar__attn_job_compute, &w);
    device->attn_flops += w.flops;
    return status;
}

/* Fused backward: dq, dk and dv in one pass, so that scores are computed once. A job is one
   (key task, kv head), in the order of the keys. A fold of dq is suspended after each block
   until the job of its next keys resumes it, so of two threads at one head one follows the
   other through the queries. */
/* A suspended fold of dq. `next` is the `order` of the key task whose job resumes it, or -1
   when the fold is done. */
typedef struct seqpar__backward_query {
    seqpar__attn_job job;
    seqpar__machine machine;
    int64_t next;
} seqpar__backward_query;

typedef struct seqpar__backward_key {
    const seqpar_attn_args *args;
    const seqpar_attn_task *task;
} seqpar__backward_key;

typedef struct seqpar__backward {
    seqpar_device *device;
    const seqpar_attn_args *a; /* of the query tasks */
    seqpar__attn_work queries, keys;
    /* (key_count) indexed by task->order; if `task` is NULL, no query sees those keys */
    seqpar__backward_key *key;
    int64_t key_count, head, heads; /* kv heads at work: [head, head + heads) */
    seqpar__backward_query *query;  /* (heads, query heads of each, query tasks) */
    int64_t *task_of, pieces;       /* (pieces) query task of each query piece, -1: none */
} seqpar__backward;

/* Does leaf `index` add a single sum to each element? A leaf of dk and dv adds one sum for each
   query head of its kv head, so it does not if several query heads share a kv head. */
static int seqpar__backward_query_single(void *user, int64_t index) {
    const seqpar__attn_job *j = (const seqpar__attn_job *)user;
    return j->args->k_pieces[index].count <= j->kernel->single;
}

static int seqpar__backward_key_single(void *user, int64_t index) {
    const seqpar__attn_job *j = (const seqpar__attn_job *)user;
    return j->args->heads == j->args->kv_heads &&
           j->backward->a->q_pieces[index].count <= j->kernel->single;
}

static int64_t seqpar__backward_next(const seqpar__backward_query *q) {
    for (int64_t i = q->machine.at; i < q->job.task->program_count; i++)
        if (seqpar__fold_computes(&q->job.task->program[i]))
            return q->job.task->program[i].index;
    return -1;
}

static void seqpar__yield(void) {
#ifndef SEQPAR_NO_THREADS
    sched_yield();
#endif
}

/* Waits until the fold of a dq has come to these keys. */
static void seqpar__backward_wait(const int64_t *next, int64_t keys) {
    int64_t now;
    for (;;) {
#ifdef _OPENMP
#pragma omp atomic read seq_cst
#endif
        now = *next;
        if (now == keys) return;
        seqpar__yield();
    }
}

static void seqpar__backward_publish(seqpar__backward_query *q) {
#ifdef _OPENMP
#pragma omp atomic write seq_cst
#endif
    q->next = seqpar__backward_next(q);
}

static void seqpar__backward_key_leaf(void *user, void *value, int64_t index, int extend) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    const seqpar__backward *b = j->backward;
    int64_t group = b->a->heads / b->a->kv_heads;
    j->gradients = value;
    j->fresh = !extend;
    for (int64_t h = 0; h < group; h++) {
        seqpar__backward_query *q =
            &b->query[((j->head - b->head) * group + h) * b->a->task_count + b->task_of[index]];
        seqpar__backward_wait(&q->next, j->task->order);
        q->job.keys = j;
        seqpar__machine_step(&q->machine, q->job.task->program, q->job.task->program_count,
                             j->task->order);
        seqpar__backward_publish(q);
    }
}

static void seqpar__backward_job(void *user, int64_t i, char *scratch) {
    seqpar__backward *b = (seqpar__backward *)user;
    const seqpar__backward_key *key = &b->key[i / b->heads];
    const seqpar__backward_key *next = key + (i % b->heads + 1) / b->heads;
    seqpar__attn_job j;
    seqpar__machine m;
    if (!key->task) return;
    seqpar__attn_job_new(&j, &m, &b->keys, key->args, key->task, b->head + i % b->heads,
                         scratch);
    j.backward = b;
    m.single = seqpar__backward_key_single;
    if (b->keys.kernel->prefetch) {
        if (next < b->key + b->key_count && next->args == key->args)
            seqpar__attn_prefetch(&j, &b->keys, next->args, next->task,
                                  b->head + (i + 1) % b->heads, scratch);
        b->keys.kernel->prefetch(&j, NULL, NULL);
    }
    seqpar__machine_exec(&m, j.task->program, j.task->program_count);
    seqpar__attn_count(&b->keys.flops, j.flops);
}

static void seqpar__backward_heads(seqpar__backward *b, char *stacks) {
    int64_t group = b->a->heads / b->a->kv_heads, n = b->heads * group * b->a->task_count;
    for (int64_t i = 0; i < n;
         i++, stacks += seqpar__machine_bytes(b->a->depth, b->queries.value_bytes)) {
        seqpar__backward_query *q = &b->query[i];
        seqpar__attn_job_new(&q->job, &q->machine, &b->queries, b->a,
                             &b->a->tasks[i % b->a->task_count],
                             b->head * group + i / b->a->task_count, stacks);
        q->machine.single = seqpar__backward_query_single;
        q->next = seqpar__backward_next(q);
    }
}

/* Do the key tasks name the same blocks as the query tasks, in the same order? If not, a job
   would wait for ever. Advances the machines; seqpar__backward_heads resets them. */
static int seqpar__backward_agrees(seqpar__backward *b) {
    for (int64_t k = 0; k < b->key_count; k++)
        for (int64_t i = 0; b->key[k].task && i < b->key[k].task->program_count; i++) {
            const seqpar_fold_op *op = &b->key[k].task->program[i];
            seqpar__backward_query *q = b->query;
            if (!seqpar__fold_computes(op)) continue;
            if (op->index >= b->pieces || b->task_of[op->index] < 0) return 0;
            q += b->task_of[op->index];
            if (q->next != k) return 0;
            while (!seqpar__fold_computes(&q->job.task->program[q->machine.at]))
                q->machine.at++;
            q->machine.at++;
            q->next = seqpar__backward_next(q);
        }
    for (int64_t i = 0; i < b->a->task_count; i++)
        if (b->query[i].next >= 0) return 0;
    return 1;
}

/* Computes at most `threads` kv heads at a time, because every suspended fold of dq holds a
   stack in memory. */
static seqpar_status seqpar__backward_compute(seqpar__backward *b,
                                              const seqpar_attn_backward_args *a) {
    int64_t heads = SEQPAR__MIN(a->queries.head_count, b->device->threads);
    int64_t group = b->a->heads / b->a->kv_heads, scratch, each, stacks;
    for (int64_t i = 0; i < b->pieces; i++) b->task_of[i] = -1;
    for (int64_t i = 0; i < b->a->task_count; i++) b->task_of[b->a->tasks[i].piece] = i;
    b->keys.value_bytes = 0;
    for (int64_t g = 0; g < a->groups; g++) {
        b->keys.value_bytes = SEQPAR__MAX(
            b->keys.value_bytes,
            seqpar__attn_value_bytes(b->device, &a->keys[g], b->keys.kernel));
        for (int64_t i = 0; i < a->keys[g].task_count; i++) {
            b->key[a->keys[g].tasks[i].order].args = &a->keys[g];
            b->key[a->keys[g].tasks[i].order].task = &a->keys[g].tasks[i];
        }
    }
    scratch = b->keys.kernel->scratch_bytes +
              seqpar__machine_bytes(b->a->depth, b->keys.value_bytes);
    /* bytes that seqpar__parallel gives to each thread; the stacks of the folds of dq follow
       the scratch of all threads */
    each = (scratch + 127) & ~(int64_t)63;
    stacks = heads * group * b->a->task_count *
             seqpar__machine_bytes(b->a->depth, b->queries.value_bytes);
    for (b->head = 0; b->head < a->queries.head_count; b->head += heads) {
        char *shared = seqpar__workspace(b->device, each + (stacks + b->device->threads - 1) /
                                                               b->device->threads);
        if (!shared) return SEQPAR_ERR_MEMORY;
        b->heads = SEQPAR__MIN(heads, a->queries.head_count - b->head);
        if (b->head == 0) seqpar__backward_heads(b, shared);
        if (b->head == 0 && !seqpar__backward_agrees(b))
            return seqpar_fail(b->device->error, SEQPAR_ERR_PLAN,
                               "the blocks of dk and dv are not those of dq in the same order");
        seqpar__backward_heads(b, shared + each * b->device->threads);
        SEQPAR__TRY(seqpar__parallel(b->device, b->key_count * b->heads, scratch,
                                     seqpar__backward_job, b));
    }
    b->device->attn_flops += b->keys.flops;
    return SEQPAR_OK;
}

/* kernel: of kind DQ. Its leaf computes the dq of a block and adds to the dk and dv of
   job->keys; scratch_bytes is the scratch of a key job. */
static seqpar_status seqpar__attn_backward_compute(seqpar_device *device,
                                                   const seqpar_attn_backward_args *a,
                                                   const seqpar__attn_kernel *kernel) {
    seqpar__attn_kernel keys = *kernel;
    seqpar__backward b;
    seqpar_status status;
    memset(&b, 0, sizeof b);
    keys.kind = SEQPAR__FOLD_DKV;
    keys.leaf = seqpar__backward_key_leaf;
    b.device = b.queries.device = b.keys.device = device;
    b.a = &a->queries;
    b.queries.kernel = kernel;
    b.keys.kernel = &keys;
    b.queries.value_bytes = seqpar__attn_value_bytes(device, b.a, kernel);
    for (int64_t g = 0; g < a->groups; g++)
        for (int64_t i = 0; i < a->keys[g].task_count; i++)
            b.key_count = SEQPAR__MAX(b.key_count, a->keys[g].tasks[i].order + 1);
    for (int64_t i = 0; i < b.a->task_count; i++)
        b.pieces = SEQPAR__MAX(b.pieces, b.a->tasks[i].piece + 1);
    b.key = SEQPAR__NEW(seqpar__backward_key, b.key_count);
    b.query = SEQPAR__NEW(seqpar__backward_query,
                          SEQPAR__MIN(b.a->head_count, device->threads) *
                              (b.a->heads / b.a->kv_heads) * b.a->task_count);
    b.task_of = SEQPAR__NEW(int64_t, b.pieces);
    status = b.key && b.query && b.task_of ? seqpar__backward_compute(&b, a)
                                           : seqpar__no_memory(device->error, "attention");
    SEQPAR_FREE(b.key);
    SEQPAR_FREE(b.query);
    SEQPAR_FREE(b.task_of);
    return status;
}

/* Finds the keys of piece k that a query sees: the keys [*first, *past) of the piece. Returns 0
   if it sees none. */
static int seqpar__visible(const seqpar_attn_args *a, int64_t query, const seqpar_attn_keys *k,
                           int64_t *first, int64_t *past) {
    int64_t begin = a->visible_begin[query] - k->start, end = a->visible_end[query] - k->start;
    if (k->stride > 1) {
        begin = begin > 0 ? (begin + k->stride - 1) / k->stride : 0;
        end = end > 0 ? (end + k->stride - 1) / k->stride : 0;
    }
    *first = SEQPAR__MAX(begin, 0);
    *past = SEQPAR__MIN(end, k->count);
    return *first < *past;
}

/* ---- matrices in four bits ---- */

/* The levels of NF4, quantiles of a normal distribution, as bitsandbytes has them. */
static const float seqpar__nf4_levels[16] = {
    -1.0f,          -0.696192801f, -0.525073051f, -0.394917488f, -0.284441382f, -0.184773430f,
    -0.0910500363f, 0.0f,          0.0795802996f, 0.160930201f,  0.246112302f,  0.337915242f,
    0.440709829f,   0.562617004f,  0.722956836f,  1.0f};

/* Point i of n + 1 equally spaced points in [0.1, 1]: 0.1 + i step in the lower half, 1 -
   (n - i) step in the upper half, which decides the rounding. */
static float seqpar__nf4_point(int n, int i) {
    double step = (double)((1.0f - 0.1f) / (float)n);
    return i < (n + 1) / 2 ? (float)((double)0.1f + step * i) : (float)(1.0 - step * (n - i));
}

/* Value of a scale's byte (Dettmers et al. 2016, 8-bit approximations). Decade e of 0 to 6 has
   2^e values: the centres of 2^e equal parts of [0.1, 1], times 10^(e - 6). Bytes 128 to 254
   are these values, rising; bytes 126 down to 0 are their negatives; 127 is 0 and 255 is 1. */
static float seqpar__nf4_byte_value(int byte) {
    static const float decades[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    int n = byte < 127 ? 126 - byte : byte - 128, e = 0;
    if (byte == 127 || byte == 255) return byte == 127 ? 0.0f : 1.0f;
    while (n + 1 >= 2 << e) e++;
    n += 1 - (1 << e);
    float mark = decades[e] *
                 ((seqpar__nf4_point(1 << e, n) + seqpar__nf4_point(1 << e, n + 1)) / 2.0f);
    return byte < 127 ? -mark : mark;
}

static float seqpar__nf4_scale(const seqpar_nf4 *m, int64_t group) {
    float product = seqpar__nf4_byte_value(m->scales[group]) *
                    m->steps[group / SEQPAR_NF4_STEP];
    return product + *m->offset;
}

static float seqpar__nf4_level(const seqpar_nf4 *m, int64_t n) {
    return seqpar__nf4_levels[n & 1 ? m->codes[n / 2] & 15 : m->codes[n / 2] >> 4];
}

SEQPAR_DEF int64_t seqpar_nf4_bytes(int64_t elements) {
    int64_t scales = (elements + SEQPAR_NF4_GROUP - 1) / SEQPAR_NF4_GROUP;
    int64_t steps = (scales + SEQPAR_NF4_STEP - 1) / SEQPAR_NF4_STEP;
    return ((steps + 1) * 4 + scales + (elements + 1) / 2 + 3) / 4 * 4;
}

SEQPAR_DEF seqpar_nf4 seqpar_nf4_at(const void *bytes, int64_t elements) {
    int64_t scales = (elements + SEQPAR_NF4_GROUP - 1) / SEQPAR_NF4_GROUP;
    int64_t steps = (scales + SEQPAR_NF4_STEP - 1) / SEQPAR_NF4_STEP;
    seqpar_nf4 m;
    SEQPAR_MUST("bytes", bytes);
    m.steps = (const float *)bytes;
    m.offset = m.steps + steps;
    m.scales = (const uint8_t *)(m.offset + 1);
    m.codes = m.scales + scales;
    return m;
}

/* Index of the nearest level; if two are equally near, the lower. level (count) ascends. */
static int seqpar__nf4_nearest(const float *level, int count, float x) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((level[middle] + level[middle + 1]) / 2.0f < x)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* x / most, computed as x * inverse with inverse = 1 / most. Rounding can take the product
   beyond 1 or -1, so it is clamped. */
static float seqpar__nf4_ratio(float x, float inverse) {
    float share = x * inverse;
    return share > 1 ? 1 : share < -1 ? -1 : share;
}

static float seqpar__nf4_largest(const float *x, int64_t count) {
    float most = 0;
    for (int64_t i = 0; i < count; i++) {
        float size = x[i] < 0 ? -x[i] : x[i];
        if (size > most) most = size;
    }
    return most;
}

/* Quantizes a group and returns its scale, the largest |x|; for a shorter last group at least
   1e-38. A full group is multiplied by the inverse of that, a shorter one divided by it. */
static float seqpar__nf4_group(uint8_t *codes, const float *x, int64_t first, int64_t count) {
    float most = seqpar__nf4_largest(x + first, count);
    float divisor = most > 1e-38f ? most : 1e-38f, inverse = 1.0f / divisor;
    for (int64_t i = first; i < first + count; i++) {
        float ratio = count == SEQPAR_NF4_GROUP ? seqpar__nf4_ratio(x[i], inverse)
                                                : x[i] / divisor;
        int code = seqpar__nf4_nearest(seqpar__nf4_levels, 16, ratio);
        /* 7, the code of 0, pads the last byte if the number of elements is odd */
        codes[i / 2] = (uint8_t)(i & 1 ? (codes[i / 2] & 0xF0) | code : code << 4 | 7);
    }
    return count == SEQPAR_NF4_GROUP ? most : divisor;
}

/* Stores scale (count) in 8 bits each, as differences from their mean. */
static void seqpar__nf4_scales(const seqpar_nf4 *m, const float *scale, int64_t count) {
    float marks[UINT8_MAX + 1], around[SEQPAR_NF4_STEP];
    double sum = 0;
    for (int i = 0; i <= UINT8_MAX; i++) marks[i] = seqpar__nf4_byte_value(i);
    for (int64_t i = 0; i < count; i++) sum += (double)scale[i];
    float mean = count ? (float)(sum / (double)count) : 0.0f;
    *(float *)m->offset = mean;
    for (int64_t first = 0; first < count; first += SEQPAR_NF4_STEP) {
        int64_t n = SEQPAR__MIN(count - first, (int64_t)SEQPAR_NF4_STEP);
        for (int64_t i = 0; i < n; i++) around[i] = scale[first + i] - mean;
        float most = seqpar__nf4_largest(around, n), inverse = most > 0 ? 1.0f / most : 0.0f;
        ((float *)m->steps)[first / SEQPAR_NF4_STEP] = most;
        for (int64_t i = 0; i < n; i++)
            ((uint8_t *)m->scales)[first + i] = (uint8_t)seqpar__nf4_nearest(
                marks, UINT8_MAX + 1, seqpar__nf4_ratio(around[i], inverse));
    }
}

SEQPAR_DEF seqpar_status seqpar_nf4_quantize(seqpar_error *error, void *bytes,
                                             const float *values, int64_t elements) {
    int64_t groups = (elements + SEQPAR_NF4_GROUP - 1) / SEQPAR_NF4_GROUP;
    seqpar_nf4 m;
    float *scale;
    SEQPAR_NEED(error, "bytes, values", bytes, SEQPAR_IF(elements > 0, values));
    for (int64_t i = 0; i < elements; i++)
        if (!(values[i] - values[i] == 0))
            return seqpar_fail(error, SEQPAR_ERR_NOT_FINITE,
                               "value %lld is %g; only finite values can be quantized to NF4",
                               (long long)i, (double)values[i]);
    m = seqpar_nf4_at(bytes, elements);
    memset(bytes, 0, (size_t)seqpar_nf4_bytes(elements));
    scale = SEQPAR__NEW(float, groups);
    if (!scale) return seqpar__no_memory(error, "a matrix in four bits");
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * SEQPAR_NF4_GROUP;
        scale[g] = seqpar__nf4_group((uint8_t *)m.codes, values, first,
                                     SEQPAR__MIN(elements - first, (int64_t)SEQPAR_NF4_GROUP));
    }
    seqpar__nf4_scales(&m, scale, groups);
    SEQPAR_FREE(scale);
    return SEQPAR_OK;
}

/* =============================================================================================
   >>ref  the reference device: naive loops, in fp64 or in bf16

   The reference device defines each operation in as few lines as possible; the fast devices
   are compared with it. The same code serves fp64, and bf16 with fp32 sums.
   ========================================================================================== */

/* One loop nest per formula, to be read beside the fast device. Stored numbers have type S,
   accumulators type A: both double, or bf16 and float. Arithmetic is in doubles. A sum over
   tokens in memory (o, dq, dk, dv, dw, dgain) is rounded to A at each addition, a running
   maximum before it is used; everything else is rounded once, when it is stored. */
#define SEQPAR__BY_TYPE(device, function, ...) \
    ((device)->storage == SEQPAR_DTYPE_F64 \
         ? function(__VA_ARGS__, SEQPAR_DTYPE_F64, SEQPAR_DTYPE_F64) \
         : function(__VA_ARGS__, SEQPAR_DTYPE_BF16, SEQPAR_DTYPE_F32))
#define SEQPAR__ANY(op) \
    SEQPAR__TEMPLATE seqpar_status seqpar__any_##op( \
        seqpar_device *device, const seqpar_##op##_args *a, const int S, const int A)

SEQPAR__TEMPLATE double seqpar__of(seqpar_mat m, int64_t row, int64_t column, const int type) {
    return seqpar__element(m.data, row * m.stride + column, type);
}

SEQPAR__TEMPLATE void seqpar__put(seqpar_mat m, int64_t row, int64_t column, const int type,
                                  double value) {
    seqpar__element_set(m.data, row * m.stride + column, type, value);
}

SEQPAR__TEMPLATE double seqpar__rounded(double x, const int type) {
    return type == SEQPAR_DTYPE_F64 ? x : (double)(float)x;
}

SEQPAR__ANY(matmul) {
    (void)device;
    (void)A;
    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t o = 0; o < a->out; o++) {
            double sum = a->accumulate ? seqpar__of(a->y, t, o, S) : 0.0;
            for (int64_t i = 0; i < a->in; i++)
                sum = SEQPAR__FMA(
                    seqpar__of(a->x, t, i, S),
                    a->transposed ? seqpar__of(a->w, i, o, S) : seqpar__of(a->w, o, i, S), sum);
            seqpar__put(a->y, t, o, S, sum);
        }
    return SEQPAR_OK;
}

/* columns are those of the flat (out, in) matrix */
SEQPAR__TEMPLATE void seqpar__any_weight_leaf(const seqpar__columns *c, void *value,
                                              int64_t index, int extend, const int S,
                                              const int A) {
    const seqpar_weight_grad_args *a = (const seqpar_weight_grad_args *)c->args;
    for (int64_t i = 0; i < c->width; i++) {
        int64_t out = (c->begin + i) / a->in, in = (c->begin + i) % a->in;
        double sum = extend ? seqpar__element(value, i, A) : 0.0;
        for (int64_t t = a->leaves[index].local;
             t < a->leaves[index].local + a->leaves[index].count; t++)
            sum = seqpar__rounded(
                SEQPAR__FMA(seqpar__of(a->dy, t, out, S), seqpar__of(a->x, t, in, S), sum), A);
        seqpar__element_set(value, i, A, sum);
    }
}

static void seqpar__ref_weight_leaf(void *user, void *value, int64_t index, int extend) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    SEQPAR__BY_TYPE(c->device, seqpar__any_weight_leaf, c, value, index, extend);
}

#ifndef SEQPAR__REF_WEIGHTS
#define SEQPAR__REF_WEIGHTS 1024 /* elements of a job */
#endif
SEQPAR__ANY(weight_grad) {
    (void)S;
    (void)A;
    return seqpar__for_columns(device, &a->fold, a, a->out * a->in, SEQPAR__REF_WEIGHTS,
                               seqpar__ref_weight_leaf);
}

static seqpar_status seqpar__host_embedding(seqpar_device *device,
                                            const seqpar_embedding_args *a, void *queue) {
    int64_t size = seqpar_dtype_bytes(device->storage);
    (void)queue;
    for (int64_t t = 0; t < a->rows; t++)
        memcpy((char *)a->x.data + t * a->x.stride * size,
               (const char *)a->table.data + a->ids[t] * a->table.stride * size,
               (size_t)(a->width * size));
    return SEQPAR_OK;
}

/* The fold's columns are the elements of the (rows, width) sums, row by row; a job has whole
   rows. */
static void seqpar__host_embedding_leaf(void *user, void *value, int64_t index, int extend) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    const seqpar_embedding_grad_args *a = (const seqpar_embedding_grad_args *)c->args;
    int64_t first = a->first + c->begin / a->width, rows = c->width / a->width;
    if (!extend)
        memset(value, 0, (size_t)(c->width * seqpar_dtype_bytes(c->device->accumulator)));
    for (int64_t t = a->leaves[index].local;
         t < a->leaves[index].local + a->leaves[index].count; t++) {
        int64_t row = a->ids[t] - first;
        if (row < 0 || row >= rows) continue;
        if (c->device->storage == SEQPAR_DTYPE_F64)
            for (int64_t i = 0; i < a->width; i++)
                ((double *)value)[row * a->width + i] +=
                    ((const double *)a->dx.data)[t * a->dx.stride + i];
        else if (c->device->storage == SEQPAR_DTYPE_F32)
            for (int64_t i = 0; i < a->width; i++)
                ((float *)value)[row * a->width + i] +=
                    ((const float *)a->dx.data)[t * a->dx.stride + i];
        else
            for (int64_t i = 0; i < a->width; i++)
                ((float *)value)[row * a->width + i] += seqpar_bf16_to_float(
                    ((const uint16_t *)a->dx.data)[t * a->dx.stride + i]);
    }
}

#ifndef SEQPAR__TABLE_ROWS
#define SEQPAR__TABLE_ROWS 32 /* of a job */
#endif
SEQPAR__OP(seqpar__host_embedding_grad, embedding_grad,
           seqpar__for_columns(device, &a->fold, a, a->rows * a->width,
                               SEQPAR__TABLE_ROWS * a->width, seqpar__host_embedding_leaf))

SEQPAR__ANY(rmsnorm) {
    (void)device;
    for (int64_t t = 0; t < a->rows; t++) {
        double sum = 0, rstd;
        for (int64_t i = 0; i < a->width; i++) {
            double x = seqpar__of(a->x, t, i, S);
            sum = SEQPAR__FMA(x, x, sum);
        }
        rstd = 1.0 / sqrt(sum / (double)a->width + a->eps);
        for (int64_t i = 0; i < a->width; i++)
            seqpar__put(a->y, t, i, S,
                        seqpar__of(a->x, t, i, S) * rstd * seqpar__element(a->gain, i, S));
        if (a->rstd) seqpar__element_set(a->rstd, t, A, rstd);
    }
    return SEQPAR_OK;
}

SEQPAR__TEMPLATE void seqpar__any_gain_leaf(const seqpar__columns *c, void *value,
                                            int64_t index, int extend, const int S,
                                            const int A) {
    const seqpar_rmsnorm_grad_args *a = (const seqpar_rmsnorm_grad_args *)c->args;
    for (int64_t i = 0; i < c->width; i++) {
        double sum = extend ? seqpar__element(value, i, A) : 0.0;
        for (int64_t t = a->leaves[index].local;
             t < a->leaves[index].local + a->leaves[index].count; t++)
            sum = seqpar__rounded(SEQPAR__FMA(seqpar__of(a->dy, t, c->begin + i, S),
                                              seqpar__of(a->x, t, c->begin + i, S) *
                                                  seqpar__element(a->rstd, t, A),
                                              sum),
                                  A);
        seqpar__element_set(value, i, A, sum);
    }
}

static void seqpar__ref_gain_leaf(void *user, void *value, int64_t index, int extend) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    SEQPAR__BY_TYPE(c->device, seqpar__any_gain_leaf, c, value, index, extend);
}

/* y = g x r, r = (mean x^2 + eps)^-1/2:  dx += r g dy - x r^3 / n sum(g dy x) */
#ifndef SEQPAR__GAIN_COLUMNS
#define SEQPAR__GAIN_COLUMNS 256 /* elements of a job */
#endif
SEQPAR__ANY(rmsnorm_grad) {
    for (int64_t t = 0; t < a->rows; t++) {
        double r = seqpar__element(a->rstd, t, A), sum = 0;
        for (int64_t i = 0; i < a->width; i++)
            sum = SEQPAR__FMA(seqpar__element(a->gain, i, S) * seqpar__of(a->dy, t, i, S),
                              seqpar__of(a->x, t, i, S), sum);
        for (int64_t i = 0; i < a->width; i++) {
            double slope = r * seqpar__element(a->gain, i, S) * seqpar__of(a->dy, t, i, S) -
                           seqpar__of(a->x, t, i, S) * (r * r * r * sum / (double)a->width);
            seqpar__put(a->dx, t, i, S, seqpar__of(a->dx, t, i, S) + slope);
        }
    }
    return seqpar__for_columns(device, &a->fold, a, a->width, SEQPAR__GAIN_COLUMNS,
                               seqpar__ref_gain_leaf);
}

SEQPAR__ANY(rope) {
    int64_t half = a->head_dim / 2;
    (void)device;
    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t h = 0; h < a->heads; h++)
            for (int64_t i = 0; i < half; i++) {
                int64_t at = h * a->head_dim + i;
                double p = seqpar__of(a->x, t, at, S), q = seqpar__of(a->x, t, at + half, S);
                double c = seqpar__element(a->cosine, a->positions[t] * half + i, A);
                double s = seqpar__element(a->sine, a->positions[t] * half + i, A);
                if (a->inverse) s = -s;
                seqpar__put(a->x, t, at, S, p * c - q * s);
                seqpar__put(a->x, t, at + half, S, q * c + p * s);
            }
    return SEQPAR_OK;
}

/* The plain formula, which every device uses. It gives 0 where exp(-x) overflows;
   seqpar_sigmoid keeps the tiny values there. */
static double seqpar__ref_sigmoid(double x) { return 1.0 / (1.0 + seqpar_exp(-x)); }

SEQPAR__ANY(swiglu) {
    (void)device;
    (void)A;
    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t i = 0; i < a->width; i++) {
            double g = seqpar__of(a->gate, t, i, S);
            seqpar__put(a->y, t, i, S, g * seqpar__ref_sigmoid(g) * seqpar__of(a->up, t, i, S));
        }
    return SEQPAR_OK;
}

SEQPAR__ANY(swiglu_grad) {
    (void)device;
    (void)A;
    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t i = 0; i < a->width; i++) {
            double gate = seqpar__of(a->gate, t, i, S), dy = seqpar__of(a->y, t, i, S);
            double s = seqpar__ref_sigmoid(gate);
            seqpar__put(a->gate, t, i, S,
                        dy * seqpar__of(a->up, t, i, S) * (s * (1.0 + gate * (1.0 - s))));
            seqpar__put(a->up, t, i, S, dy * (gate * s));
        }
    return SEQPAR_OK;
}

SEQPAR__ANY(add) {
    int type = a->accumulators ? A : S;
    (void)device;
    for (int64_t i = 0; i < a->count; i++)
        seqpar__element_set(a->y, i, type,
                            seqpar__element(a->a, i, type) + seqpar__element(a->b, i, type));
    return SEQPAR_OK;
}

static double seqpar__dropout(const seqpar_attn_args *a, const seqpar_piece *queries, int64_t r,
                              int64_t head, int64_t key) {
    seqpar_dropout from;
    from.dropout = a->dropout;
    from.seed = a->dropout_seed;
    from.stream = a->dropout_stream;
    return seqpar_attn_dropout(&from, queries->document, a->dropout_head + head,
                               queries->start + r * queries->stride - queries->origin,
                               key - queries->origin);
}

/* Offset of the first element of a key or value; below, of a query. */
static int64_t seqpar__key_at(const seqpar_attn_args *a, int64_t row, int64_t head) {
    return (row * a->head_count + head) * a->head_dim;
}

static int64_t seqpar__query_at(const seqpar_attn_args *a, int64_t t, int64_t head) {
    return (t * a->heads + head) * a->head_dim;
}

SEQPAR__TEMPLATE double seqpar__any_dot(const void *x, int64_t x_at, const void *y,
                                        int64_t y_at, int64_t count, const int S) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum = SEQPAR__FMA(seqpar__element(x, x_at + i, S), seqpar__element(y, y_at + i, S),
                          sum);
    return sum;
}

SEQPAR__TEMPLATE double seqpar__any_score(const seqpar_attn_args *a, int64_t q, int64_t k,
                                          const int S) {
    double s = seqpar__any_dot(a->q, q, a->k, k, a->head_dim, S) * a->scale;
    return a->softcap > 0 ? a->softcap * tanh(s / a->softcap) : s;
}

/* State of a block: m = max score, l = sum exp(score - m), o = sum exp(score - m) v; nothing
   visible: -inf, 0, 0. */
SEQPAR__TEMPLATE void seqpar__any_forward_leaf(seqpar__attn_job *j, void *o, int64_t index,
                                               const int S, const int A) {
    const seqpar_attn_args *a = j->args;
    const seqpar_attn_keys *k = &a->k_pieces[index];
    int64_t d = a->head_dim;
    int64_t head = j->head / (a->heads / a->kv_heads) - a->head_begin;
    int64_t first = 0, last = 0;
    for (int64_t r = 0; r < j->count; r++) {
        int64_t q = seqpar__query_at(a, j->local + r, j->head);
        double top = -HUGE_VAL, sum = 0;
        for (int64_t i = 0; i < d; i++) seqpar__element_set(o, r * d + i, A, 0);
        if (!seqpar__visible(a, j->local + r, k, &first, &last)) last = first;
        j->flops += 4 * d * (last - first);
        for (int64_t n = first; n < last; n++)
            top = fmax(top, seqpar__any_score(a, q, seqpar__key_at(a, k->k_row + n, head), S));
        top = seqpar__rounded(top, A);
        for (int64_t n = first; n < last; n++) {
            double p = seqpar_exp(
                seqpar__any_score(a, q, seqpar__key_at(a, k->k_row + n, head), S) - top);
            int64_t v = seqpar__key_at(a, k->v_row + n, head);
            sum += p;
            p *= seqpar__dropout(a, &a->q_pieces[j->task->piece], r, j->head,
                                 k->start + n * k->stride);
            for (int64_t i = 0; i < d; i++)
                seqpar__element_set(o, r * d + i, A,
                                    SEQPAR__FMA(p, seqpar__element(a->v, v + i, S),
                                                seqpar__element(o, r * d + i, A)));
        }
        seqpar__element_set(o, j->count * d + r, A, top);
        seqpar__element_set(o, j->count * (d + 1) + r, A, sum);
    }
}

/* Commutative to the bit: products are rounded before they are added. */
SEQPAR__TEMPLATE void seqpar__any_state_combine(const seqpar__attn_job *j, void *into,
                                                const void *other, const int S, const int A) {
    int64_t d = j->args->head_dim, size = seqpar_dtype_bytes(A);
    (void)S;
    for (int64_t r = 0; r < j->count; r++) {
        int64_t mr = j->count * d + r, lr = mr + j->count;
        double m = seqpar__element(into, mr, A), l = seqpar__element(into, lr, A);
        double m2 = seqpar__element(other, mr, A), l2 = seqpar__element(other, lr, A);
        double top = fmax(m, m2), a, b;
        /* if one state is empty, the result is exactly the other; a NaN is not empty */
        if (!(l2 > 0) && l2 == l2) continue;
        a = l > 0 || l != l ? seqpar_exp(m - top) : 0.0;
        b = seqpar_exp(m2 - top);
        if (a == 0.0 && !(l > 0)) {
            memcpy((char *)into + r * d * size, (const char *)other + r * d * size,
                   (size_t)(d * size));
            top = m2;
            a = 0;
            b = 1;
            l = 0;
        } else
            for (int64_t i = r * d; i < (r + 1) * d; i++)
                seqpar__element_set(into, i, A,
                                    seqpar__element(into, i, A) * a +
                                        seqpar__element(other, i, A) * b);
        seqpar__element_set(into, lr, A, l * a + l2 * b);
        seqpar__element_set(into, mr, A, top);
    }
}

static void seqpar__ref_state_combine(void *user, void *into, const void *other) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    SEQPAR__BY_TYPE(j->device, seqpar__any_state_combine, j, into, other);
}

SEQPAR__TEMPLATE void seqpar__any_state_finish(const seqpar__attn_job *j, const void *value,
                                               const int S, const int A) {
    const seqpar_attn_args *a = j->args;
    int64_t d = a->head_dim;
    for (int64_t r = 0; r < j->count; r++) {
        int64_t out = seqpar__query_at(a, j->local + r, j->head);
        double m = seqpar__element(value, j->count * d + r, A);
        double l = seqpar__element(value, j->count * (d + 1) + r, A);
        double total = l, top = m, factor = 1.0;
        int empty = l == 0.0;
        if (a->sinks) { /* one more score, without a value */
            double sink = seqpar__element(a->sinks, j->head, A);
            top = empty ? sink : fmax(m, sink);
            factor = empty ? 0.0 : seqpar_exp(m - top);
            total = l * factor + seqpar_exp(sink - top);
        }
        for (int64_t i = 0; i < d; i++)
            seqpar__element_set(a->out, out + i, S,
                                empty ? 0.0
                                      : seqpar__element(value, r * d + i, A) * factor / total);
        seqpar__element_set(a->lse, (j->local + r) * a->heads + j->head, A,
                            empty && !a->sinks ? -HUGE_VAL : top + seqpar_log(total));
    }
}

static void seqpar__ref_state_finish(seqpar__attn_job *j, void *value) {
    SEQPAR__BY_TYPE(j->device, seqpar__any_state_finish, j, value);
}

/* Zeroes the keys' dk and dv before the first leaf is added. */
static void seqpar__gradients_begin(seqpar__attn_job *keys) {
    if (keys->fresh)
        memset(keys->gradients, 0,
               (size_t)(seqpar__attn_value(keys, keys->count) *
                        seqpar_dtype_bytes(keys->device->accumulator)));
    keys->fresh = 0;
}

/* For query r of a piece and one key, with dropout factor z and p = exp(s - lse): sets *p to
   z p and returns ds = p (z dout . v - delta) scale. With a softcap, ds is also multiplied by
   the derivative of the cap. */
SEQPAR__TEMPLATE double seqpar__any_ds(const seqpar_attn_args *a, const seqpar_piece *queries,
                                       int64_t r, int64_t head, int64_t position, int64_t k,
                                       int64_t v, double *p, const int S, const int A) {
    int64_t t = queries->local + r, q = seqpar__query_at(a, t, head);
    double dp = seqpar__any_dot(a->dout, q, a->v, v, a->head_dim, S);
    double s = seqpar__any_score(a, q, k, S);
    double z = seqpar__dropout(a, queries, r, head, position);
    double ds;
    *p = seqpar_exp(s - seqpar__element(a->lse, t * a->heads + head, A));
    ds = *p * (z * dp - seqpar__element(a->delta, t * a->heads + head, A)) * a->scale;
    *p *= z;
    return a->softcap > 0 ? ds * (1.0 - s / a->softcap * (s / a->softcap)) : ds;
}

/* Computes dq of the task's queries from one key piece, and adds their contribution to dk and
   dv of those keys. */
SEQPAR__TEMPLATE void seqpar__any_backward_leaf(seqpar__attn_job *j, void *dq, int64_t index,
                                                const int S, const int A) {
    const seqpar_attn_args *a = j->args;
    const seqpar_attn_keys *k = &a->k_pieces[index];
    int64_t d = a->head_dim, head = j->keys->head, first, last;
    void *dk = j->keys->gradients, *dv = seqpar__at(dk, j->keys->count * d, A);
    double p;
    memset(dq, 0, (size_t)(j->count * d * seqpar_dtype_bytes(A)));
    seqpar__gradients_begin(j->keys);
    for (int64_t r = 0; r < j->count; r++) {
        int64_t q = seqpar__query_at(a, j->local + r, j->head);
        if (!seqpar__visible(a, j->local + r, k, &first, &last)) continue;
        j->keys->flops += 10 * d * (last - first);
        for (int64_t n = first; n < last; n++) {
            int64_t key = seqpar__key_at(a, k->k_row + n, head);
            double ds = seqpar__any_ds(a, &a->q_pieces[j->task->piece], r, j->head,
                                       k->start + n * k->stride, key,
                                       seqpar__key_at(a, k->v_row + n, head), &p, S, A);
            for (int64_t i = 0; i < d; i++)
                seqpar__element_set(dq, r * d + i, A,
                                    SEQPAR__FMA(ds, seqpar__element(a->k, key + i, S),
                                                seqpar__element(dq, r * d + i, A)));
            for (int64_t i = 0; i < d; i++)
                seqpar__element_set(dk, n * d + i, A,
                                    SEQPAR__FMA(ds, seqpar__element(a->q, q + i, S),
                                                seqpar__element(dk, n * d + i, A)));
            for (int64_t i = 0; i < d; i++)
                seqpar__element_set(dv, n * d + i, A,
                                    SEQPAR__FMA(p, seqpar__element(a->dout, q + i, S),
                                                seqpar__element(dv, n * d + i, A)));
        }
    }
}

static void seqpar__ref_leaf(void *user, void *value, int64_t index, int extend) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    (void)extend;
    if (j->kernel->kind == SEQPAR__FOLD_STATE)
        SEQPAR__BY_TYPE(j->device, seqpar__any_forward_leaf, j, value, index);
    else
        SEQPAR__BY_TYPE(j->device, seqpar__any_backward_leaf, j, value, index);
}

static const seqpar__attn_kernel seqpar__ref_forward = {SEQPAR__FOLD_STATE,
                                                        0,
                                                        seqpar__ref_leaf,
                                                        seqpar__ref_state_combine,
                                                        seqpar__ref_state_finish,
                                                        0,
                                                        0,
                                                        NULL};
static const seqpar__attn_kernel seqpar__ref_backward = {
    SEQPAR__FOLD_DQ, 0, seqpar__ref_leaf, seqpar__attn_add, NULL, 0, 0, NULL};
static const seqpar__attn_kernel seqpar__host_returns = {
    SEQPAR__FOLD_RETURNS, 0, seqpar__attn_return_leaf, seqpar__attn_add, NULL, 0, 0, NULL};

SEQPAR__ANY(attn_forward) {
    (void)S;
    (void)A;
    return seqpar__attn_compute(device, a, &seqpar__ref_forward);
}

SEQPAR__ANY(attn_backward) {
    (void)S;
    (void)A;
    return seqpar__attn_backward_compute(device, a, &seqpar__ref_backward);
}

SEQPAR__OP(seqpar__host_attn_return, attn,
           seqpar__attn_compute(device, a, &seqpar__host_returns))

SEQPAR__ANY(attn_delta) {
    (void)device;
    for (int64_t n = 0; n < a->tokens * a->heads; n++)
        seqpar__element_set(
            a->delta, n, A,
            seqpar__any_dot(a->dout, n * a->head_dim, a->out, n * a->head_dim, a->head_dim, S));
    return SEQPAR_OK;
}

SEQPAR__ANY(attn_sinks) {
    (void)device;
    (void)S;
    for (int64_t i = 0; i < a->piece_count; i++)
        for (int64_t h = 0; h < a->heads; h++) {
            double sum = 0;
            for (int64_t t = a->pieces[i].local; t < a->pieces[i].local + a->pieces[i].count;
                 t++)
                sum -= seqpar_exp(seqpar__element(a->sinks, h, A) -
                                  seqpar__element(a->lse, t * a->heads + h, A)) *
                       seqpar__element(a->delta, t * a->heads + h, A);
            seqpar__element_set(a->dsinks, i * a->heads + h, A, sum);
        }
    return SEQPAR_OK;
}

/* Weight of a part whose lse is `log`, in a total whose lse is `whole`. */
static double seqpar__merge_weight(double log, double whole) {
    return log == -HUGE_VAL ? 0 : seqpar_exp(log - whole);
}

static double seqpar__merge_lse(double a, double b) {
    double top = SEQPAR__MAX(a, b), low = SEQPAR__MIN(a, b);
    return low == -HUGE_VAL ? top : top + seqpar_log(1 + seqpar_exp(low - top));
}

/* Merges row n = token * heads + head of a->part into a->sum, and writes a->out if set. */
static void seqpar__merge_row(const seqpar_device *device, const seqpar_attn_merge_args *a,
                              int64_t n) {
    int sum = device->accumulator;
    int64_t d = a->head_dim, head = n % a->heads, at = n / a->heads * a->out_heads + head;
    double part = a->part_lse ? seqpar__element(a->part_lse, n, sum) : -HUGE_VAL;
    double sink = a->sinks ? seqpar__element(a->sinks, head, sum) : -HUGE_VAL;
    double old = -HUGE_VAL, whole, keep = 0, take = 0;
    if (!a->begin) old = a->sum_lse ? seqpar__element(a->sum_lse, n, sum) : 0;
    whole = seqpar__merge_lse(seqpar__merge_lse(old, part), sink);
    if (!a->begin) keep = a->sum_lse ? seqpar__merge_weight(old, whole) : 1;
    if (a->part) take = a->sum_lse ? seqpar__merge_weight(part, whole) : 1;
    for (int64_t i = n * d; i < (n + 1) * d; i++) {
        double x = keep > 0 ? keep * seqpar__element(a->sum, i, sum) : 0;
        if (take > 0) x += take * seqpar__element(a->part, i, sum);
        seqpar__element_set(a->sum, i, sum, x);
        if (a->out) seqpar__element_set(a->out, at * d + i - n * d, device->storage, x);
    }
    if (a->sum_lse) seqpar__element_set(a->sum_lse, n, sum, whole);
    if (a->lse) seqpar__element_set(a->lse, at, sum, whole);
}

static seqpar_status seqpar__host_attn_merge(seqpar_device *device,
                                             const seqpar_attn_merge_args *a, void *queue) {
    (void)queue;
    for (int64_t n = 0; n < a->tokens * a->heads; n++) {
        double part = a->part_lse ? seqpar__element(a->part_lse, n, device->accumulator) : 0;
        if (!(part < HUGE_VAL))
            return seqpar_fail(device->error, SEQPAR_ERR_KERNEL,
                               "an own attention kernel gives query %lld, head %lld the lse "
                               "%g; give a finite one, or -inf",
                               (long long)(n / a->heads), (long long)(n % a->heads), part);
        seqpar__merge_row(device, a, n);
    }
    return SEQPAR_OK;
}

SEQPAR__TEMPLATE double seqpar__any_seed(const void *seeds, int64_t t, const int A) {
    return seeds ? seqpar__element(seeds, t, A) : 0.0;
}

/* The formulas are those at seqpar_vocab_softmax_args, in fp64; p log p is 0 where p is 0. */
SEQPAR__ANY(vocab_softmax) {
    double scale = a->scale != 0 ? a->scale : 1.0;
    (void)device;
    for (int64_t t = 0; t < a->rows; t++) {
        double top = seqpar__of(a->logits, t, 0, S) * scale, sum = 0, mean = 0, px = 0, lse;
        double entropy;
        int live = a->targets[t] != SEQPAR_IGNORE;
        double c = live ? seqpar__any_seed(a->dlogp, t, A) : 0;
        double e = seqpar__any_seed(a->dentropy, t, A);
        double s = live ? seqpar__any_seed(a->dsmooth, t, A) : 0;
        double z = live ? seqpar__any_seed(a->dzloss, t, A) : 0;
        for (int64_t j = 1; j < a->vocab; j++)
            top = fmax(top, seqpar__of(a->logits, t, j, S) * scale);
        for (int64_t j = 0; j < a->vocab; j++) {
            double x = seqpar__of(a->logits, t, j, S) * scale, p = seqpar_exp(x - top);
            sum += p;
            mean += x;
            px += p != 0 ? p * x : 0.0;
        }
        lse = top + seqpar_log(sum);
        mean /= (double)a->vocab;
        entropy = lse - px / sum;
        if (a->logp)
            seqpar__element_set(a->logp, t, A,
                                live ? seqpar__of(a->logits, t, a->targets[t], S) * scale - lse
                                     : 0.0);
        if (a->lse) seqpar__element_set(a->lse, t, A, lse);
        if (a->entropy) seqpar__element_set(a->entropy, t, A, entropy);
        if (a->smooth) seqpar__element_set(a->smooth, t, A, lse - mean);
        for (int64_t j = 0; a->gradient && j < a->vocab; j++) {
            double x = seqpar__of(a->logits, t, j, S) * scale, p = seqpar_exp(x - lse);
            double hit = live && j == a->targets[t];
            x = c * (hit - p) - (p != 0 ? e * p * ((x - lse) + entropy) : 0.0) +
                s * (p - 1.0 / (double)a->vocab) + z * 2.0 * lse * p;
            seqpar__put(a->logits, t, j, S, x * scale);
        }
    }
    return SEQPAR_OK;
}

/* log sum exp of row t, whose elements are multiplied by `scale` first */
SEQPAR__TEMPLATE double seqpar__any_lse(seqpar_mat x, int64_t t, int64_t n, double scale,
                                        const int S) {
    double top = -HUGE_VAL, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        double y = seqpar__of(x, t, j, S) * scale;
        top = y > top || y != y ? y : top;
    }
    for (int64_t j = 0; j < n; j++) sum += seqpar_exp(seqpar__of(x, t, j, S) * scale - top);
    return top + seqpar_log(sum);
}

/* KL(q | p) of teacher q and student p; with `reverse`, KL(p | q). x is log p, y is log q. The
   gradient overwrites the teacher's logits. */
SEQPAR__ANY(distill) {
    double scale = a->scale != 0 ? a->scale : 1.0;
    (void)device;
    for (int64_t t = 0; t < a->rows; t++) {
        double lse = seqpar__any_lse(a->logits, t, a->vocab, scale, S), kl = 0, entropy = 0;
        double teacher = seqpar__any_lse(a->teacher, t, a->vocab, scale, S);
        double d = seqpar__any_seed(a->dkl, t, A) * scale;
        for (int64_t j = 0; j < a->vocab; j++) {
            double x = seqpar__of(a->logits, t, j, S) * scale - lse, p = seqpar_exp(x);
            double y = seqpar__of(a->teacher, t, j, S) * scale - teacher, q = seqpar_exp(y);
            double own = a->reverse ? p : q;
            if (own != 0) kl += own * (a->reverse ? x - y : y - x);
            if (q != 0) entropy -= q * y;
        }
        for (int64_t j = 0; a->gradient && j < a->vocab; j++) {
            double x = seqpar__of(a->logits, t, j, S) * scale - lse, p = seqpar_exp(x);
            double y = seqpar__of(a->teacher, t, j, S) * scale - teacher;
            double g = !a->reverse ? p - seqpar_exp(y) : p != 0 ? p * (x - y - kl) : 0;
            seqpar__put(a->teacher, t, j, S, d * g);
        }
        if (a->kl) seqpar__element_set(a->kl, t, A, kl);
        if (a->entropy) seqpar__element_set(a->entropy, t, A, entropy);
    }
    return SEQPAR_OK;
}

SEQPAR__ANY(choose) {
    double scale = a->scale != 0 ? a->scale : 1.0, y[SEQPAR_MAX_CHOICES];
    (void)device;
    for (int64_t t = 0; t < a->rows; t++) {
        double top = -INFINITY, sum = 0, seeds = 0;
        for (int64_t k = 0; k < a->count; k++) {
            y[k] = seqpar__of(a->logits, t, a->ids[k], S) * scale;
            top = y[k] > top || y[k] != y[k] ? y[k] : top;
            seeds += seqpar__any_seed(a->dlogq, t * a->count + k, A);
        }
        for (int64_t k = 0; k < a->count; k++) sum += seqpar_exp(y[k] - top);
        for (int64_t j = 0; a->gradient && j < a->vocab; j++)
            seqpar__put(a->logits, t, j, S, 0);
        for (int64_t k = 0; k < a->count; k++) {
            double logq = y[k] - (top + seqpar_log(sum)), q = seqpar_exp(logq);
            double d = seqpar__any_seed(a->dlogq, t * a->count + k, A) - q * seeds;
            if (a->logq) seqpar__element_set(a->logq, t * a->count + k, A, logq);
            if (a->gradient) seqpar__put(a->logits, t, a->ids[k], S, scale * d);
        }
    }
    return SEQPAR_OK;
}

SEQPAR__ANY(nf4_rows) {
    (void)device;
    (void)A;
    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t j = 0; j < a->cols; j++) {
            int64_t n = (a->row + t) * a->width + a->col + j;
            float x = seqpar__nf4_level(&a->from, n) *
                      seqpar__nf4_scale(&a->from, n / SEQPAR_NF4_GROUP);
            seqpar__put(a->out, t, j, S, (double)x);
        }
    return SEQPAR_OK;
}

SEQPAR__ANY(sumsq) {
    (void)device;
    (void)S;
    for (int64_t b = 0; b < a->blocks; b++) {
        double sum = 0;
        for (int64_t i = 0; i < a->block_size; i++) {
            double x = seqpar__element(a->x, b * a->block_size + i, A);
            sum = SEQPAR__FMA(x, x, sum);
        }
        a->out[b] = sum;
    }
    return SEQPAR_OK;
}

/* Reads parameter i before its update: at t = 1 from `working`, if there is one. Below: stores
   the updated value in `p` and, rounded, in `working`. */
SEQPAR__TEMPLATE double seqpar__any_old(const seqpar_update_args *a, int64_t i, const int S,
                                        const int A) {
    return a->working && a->t == 1 ? seqpar__element(a->working, i, S)
                                   : seqpar__element(a->p, i, A);
}

SEQPAR__TEMPLATE void seqpar__any_new(const seqpar_update_args *a, int64_t i, double p,
                                      const int S, const int A) {
    seqpar__element_set(a->p, i, A, p);
    if (a->working) seqpar__element_set(a->working, i, S, p);
}

/* PyTorch's order: decays p, updates m (by lerp) and v, then p -= lr / bc1 * m / (sqrt(v) / bc2
   + eps), with bc1 = 1 - beta1^t and bc2 = sqrt(1 - beta2^t) */
SEQPAR__ANY(adamw) {
    double bc1 = 1.0 - pow(a->beta1, (double)a->t);
    double bc2 = sqrt(1.0 - pow(a->beta2, (double)a->t));
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        double g = seqpar__element(a->g, i, A) * a->clip;
        double p = seqpar__any_old(a, i, S, A) * (1.0 - a->lr * a->decay);
        double m = seqpar__element(a->m, i, A), v = seqpar__element(a->v, i, A);
        m = m + (1.0 - a->beta1) * (g - m);
        v = a->beta2 * v + (1.0 - a->beta2) * g * g;
        seqpar__element_set(a->m, i, A, m);
        seqpar__element_set(a->v, i, A, v);
        seqpar__any_new(a, i, p - (a->lr / bc1) * (m / (sqrt(v) / bc2 + a->eps)), S, A);
    }
    return SEQPAR_OK;
}

SEQPAR__ANY(sgd) {
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        double p = seqpar__any_old(a, i, S, A);
        seqpar__any_new(
            a, i, p - a->lr * (seqpar__element(a->g, i, A) * a->clip + a->decay * p), S, A);
    }
    return SEQPAR_OK;
}

/* ---- sample: a token from its logits ---- */
/* The choice of a token from one row: logits, weights (see seqpar__weight) and a heap of ids,
   (vocab) each */
typedef struct seqpar__sampler {
    const seqpar_sample_args *a;
    double *x, *weight;
    int32_t *heap;
} seqpar__sampler;

/* Sifts down entry i of a max-heap of ids ordered by x; of equal x, the lower id is on top. */
static void seqpar__heap_sink(const double *x, int32_t *heap, int64_t count, int64_t i) {
    int32_t id = heap[i], a, b;
    int64_t child;
    for (; (child = 2 * i + 1) < count; i = child) {
        a = heap[child];
        b = child + 1 < count ? heap[child + 1] : a;
        if (x[b] > x[a] || (x[b] == x[a] && b < a)) {
            child++;
            a = b;
        }
        if (x[id] > x[a] || (x[id] == x[a] && id < a)) break;
        heap[i] = a;
    }
    heap[i] = id;
}

/* Unnormalized probability of an id at the temperature; 1 for the likeliest id, `best` */
static double seqpar__weight(const seqpar__sampler *s, int32_t id, int32_t best) {
    return seqpar_exp((s->x[id] - s->x[best]) / s->a->temperature);
}

/* Builds the heap, then pops the likeliest ids and computes their weights, until there are
   `limit` or their weights sum to `goal`. Popped ids are stored from the end of the heap's
   array backwards. Returns how many. */
static int64_t seqpar__heap_take(seqpar__sampler *s, int32_t best, int64_t limit, double goal) {
    int64_t vocab = s->a->vocab, taken;
    double sum = 0;
    for (int64_t i = 0; i < vocab; i++) s->heap[i] = (int32_t)i;
    for (int64_t i = vocab / 2 - 1; i >= 0; i--) seqpar__heap_sink(s->x, s->heap, vocab, i);
    for (taken = 0; taken < limit && sum < goal; taken++) {
        int32_t top = s->heap[0];
        s->heap[0] = s->heap[vocab - 1 - taken];
        s->heap[vocab - 1 - taken] = top;
        seqpar__heap_sink(s->x, s->heap, vocab - 1 - taken, 0);
        sum += s->weight[top] = seqpar__weight(s, top, best);
    }
    return taken;
}

/* With `ranked`, the id that was popped as number `number` (0: the likeliest); else `number` */
static int32_t seqpar__ranked(const seqpar__sampler *s, int64_t number, int ranked) {
    return ranked ? s->heap[s->a->vocab - 1 - number] : (int32_t)number;
}

/* The fewest likeliest ids whose weights sum to at least `goal`; at most `count` */
static int64_t seqpar__ranked_until(const seqpar__sampler *s, int64_t count, double goal) {
    double sum = 0;
    int64_t i;
    for (i = 0; i < count && sum < goal; i++) sum += s->weight[seqpar__ranked(s, i, 1)];
    return i;
}

static double seqpar__ranked_sum(const seqpar__sampler *s, int64_t count, int ranked) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += s->weight[seqpar__ranked(s, i, ranked)];
    return sum;
}

/* Applies temperature, then top_k, then top_p. Adds the weights of the remaining ids, by
   likelihood if top_k or top_p is in use, else by id. Returns the first id at which the sum
   exceeds u times the total, u in (0, 1). */
static int32_t seqpar__draw(seqpar__sampler *s, int32_t best, double u) {
    const seqpar_sample_args *d = s->a;
    int64_t vocab = s->a->vocab, left = vocab, i;
    int few = d->top_k > 0 && d->top_k < vocab, ranked = few || d->top_p < 1;
    double sum;
    for (i = 0; !few && i < vocab; i++) s->weight[i] = seqpar__weight(s, (int32_t)i, best);
    if (few) left = seqpar__heap_take(s, best, d->top_k, HUGE_VAL);
    if (d->top_p < 1) {
        double goal = d->top_p * seqpar__ranked_sum(s, left, few);
        left = few ? seqpar__ranked_until(s, left, goal)
                   : seqpar__heap_take(s, best, vocab, goal);
    }
    u *= seqpar__ranked_sum(s, left, ranked);
    for (i = 0, sum = 0; i + 1 < left; i++) {
        sum += s->weight[seqpar__ranked(s, i, ranked)];
        if (sum > u) break;
    }
    return seqpar__ranked(s, i, ranked);
}

/* Returns the token of row t; -1 - i if the logit of token i is not finite. */
static int32_t seqpar__sample_row(seqpar__sampler *s, int64_t t) {
    int32_t best = 0;
    for (int32_t i = 0; i < (int32_t)s->a->vocab; i++) {
        if (!(fabs(s->x[i]) <= 1e300)) return -1 - i;
        if (s->x[i] > s->x[best]) best = i;
    }
    return s->a->temperature > 0 ? seqpar__draw(s, best, s->a->u[t]) : best;
}

static seqpar_status seqpar__host_sample(seqpar_device *device, const seqpar_sample_args *a,
                                         void *queue) {
    seqpar__sampler s;
    int64_t t;
    (void)queue;
    s.a = a;
    s.x = SEQPAR__NEW(double, 2 * a->vocab);
    s.heap = SEQPAR__NEW(int32_t, a->vocab);
    for (t = 0; s.x && s.heap && t < a->rows; t++) {
        s.weight = s.x + a->vocab;
        seqpar_device_read(device, s.x, a->logits.data, t * a->logits.stride, a->vocab,
                           device->storage);
        a->ids[t] = seqpar__sample_row(&s, t);
    }
    t = s.x && s.heap;
    SEQPAR_FREE(s.x);
    SEQPAR_FREE(s.heap);
    return t ? SEQPAR_OK : seqpar__no_memory(device->error, "choosing tokens");
}

/* ---- experts and adapters' dropout: a job is a range of rows ---- */

#ifndef SEQPAR__ROW_JOB
#define SEQPAR__ROW_JOB 32
#endif

typedef struct seqpar__row_jobs {
    const seqpar_device *device;
    const void *args;
    int64_t rows;
} seqpar__row_jobs;

/* The likeliest expert that is not among the first `before` ids; of equals, the lowest. If all
   are NaN, it is the lowest expert left, so the result can be an index. */
static int32_t seqpar__likeliest(const double *p, int64_t experts, const int32_t *ids,
                                 int64_t before) {
    int32_t best = -1;
    for (int32_t e = 0; e < (int32_t)experts; e++) {
        int64_t j = 0;
        while (j < before && ids[j] != e) j++;
        if (j == before && (best < 0 || p[e] > p[best])) best = e;
    }
    return best;
}

/* p (experts): logits on entry; on return, probabilities rounded as they are stored */
static void seqpar__route_softmax(double *p, int64_t experts, int A) {
    double top = p[0], sum = 0;
    for (int64_t e = 1; e < experts; e++) top = SEQPAR__MAX(top, p[e]);
    for (int64_t e = 0; e < experts; e++) sum += p[e] = seqpar_exp(p[e] - top);
    for (int64_t e = 0; e < experts; e++) p[e] = seqpar__rounded(p[e] / sum, A);
}

static void seqpar__route_row(const seqpar__row_jobs *w, int64_t t, double *p) {
    const seqpar_route_args *a = (const seqpar_route_args *)w->args;
    int S = w->device->storage, A = w->device->accumulator;
    int32_t *ids = a->ids + t * a->chosen;
    double sum = 0;
    for (int64_t e = 0; e < a->experts; e++) p[e] = seqpar__of(a->logits, t, e, S);
    seqpar__route_softmax(p, a->experts, A);
    for (int64_t e = 0; e < a->experts; e++)
        seqpar__element_set(a->probs, t * a->experts + e, A, p[e]);
    for (int64_t j = 0; j < a->chosen; j++) {
        ids[j] = seqpar__likeliest(p, a->experts, ids, j);
        sum += p[ids[j]];
    }
    for (int64_t j = 0; j < a->chosen; j++)
        seqpar__element_set(a->weights, t * a->chosen + j, A,
                            a->normed ? p[ids[j]] / sum : p[ids[j]]);
}

/* normed: w_j = p_j / s, s the sum of the chosen p, so dp_j = (dw_j - sum of dw w) / s; else
   dp_j = dw_j. Then balance is added. Softmax: dx = p (dp - sum of p dp). */
static void seqpar__route_grad_row(const seqpar__row_jobs *w, int64_t t, double *dp) {
    const seqpar_route_grad_args *a = (const seqpar_route_grad_args *)w->args;
    int S = w->device->storage, A = w->device->accumulator;
    int64_t row = t * a->experts, pair = t * a->chosen;
    double sum = 0, mean = 0, loss = 0, whole = 0;
    for (int64_t e = 0; e < a->experts; e++) {
        dp[e] = a->balance ? a->balance[e] : 0;
        loss = SEQPAR__FMA(dp[e], seqpar__element(a->probs, row + e, A), loss);
    }
    for (int64_t j = 0; j < a->chosen; j++) {
        sum += seqpar__element(a->probs, row + a->ids[pair + j], A);
        mean = SEQPAR__FMA(seqpar__element(a->dweights, pair + j, A),
                           seqpar__element(a->weights, pair + j, A), mean);
    }
    for (int64_t j = 0; j < a->chosen; j++) {
        double d = seqpar__element(a->dweights, pair + j, A);
        dp[a->ids[pair + j]] += a->normed ? (d - mean) / sum : d;
    }
    for (int64_t e = 0; e < a->experts; e++)
        whole = SEQPAR__FMA(seqpar__element(a->probs, row + e, A), dp[e], whole);
    for (int64_t e = 0; e < a->experts; e++)
        seqpar__put(a->dlogits, t, e, S,
                    seqpar__element(a->probs, row + e, A) * (dp[e] - whole));
    if (a->loss) seqpar__element_set(a->loss, t, A, seqpar__element(a->loss, t, A) + loss);
}

static void seqpar__mix_row(const seqpar__row_jobs *w, int64_t t, double *sums) {
    const seqpar_mix_args *a = (const seqpar_mix_args *)w->args;
    int S = w->device->storage, A = w->device->accumulator;
    for (int64_t i = 0; i < a->width; i++)
        sums[i] = a->accumulate ? seqpar__of(a->y, t, i, S) : 0;
    for (int64_t j = t * a->terms; j < (t + 1) * a->terms; j++) {
        double weight = a->weights ? seqpar__element(a->weights, a->at ? a->at[j] : j, A) : 1;
        for (int64_t i = 0; i < a->width; i++)
            sums[i] = SEQPAR__FMA(weight, seqpar__of(a->x, a->from[j], i, S), sums[i]);
    }
    for (int64_t i = 0; i < a->width; i++) seqpar__put(a->y, t, i, S, sums[i]);
}

static void seqpar__drop_row(const seqpar__row_jobs *w, int64_t t, double *scratch) {
    const seqpar_drop_args *a = (const seqpar_drop_args *)w->args;
    int S = w->device->storage;
    seqpar_dropout from;
    (void)scratch;
    from.dropout = a->dropout;
    from.seed = a->seed;
    from.stream = a->stream;
    for (int64_t i = 0; i < a->width; i++) {
        double z = seqpar_attn_dropout(&from, a->document[t], 0, a->position[t], i);
        double y = a->accumulate ? seqpar__of(a->y, t, i, S) : 0;
        seqpar__put(a->y, t, i, S, SEQPAR__FMA(z, seqpar__of(a->x, t, i, S), y));
    }
}

static void seqpar__dots_row(const seqpar__row_jobs *w, int64_t t, double *scratch) {
    const seqpar_dots_args *a = (const seqpar_dots_args *)w->args;
    int S = w->device->storage;
    double sum = 0;
    (void)scratch;
    for (int64_t i = 0; i < a->width; i++)
        sum = SEQPAR__FMA(seqpar__of(a->a, t, i, S), seqpar__of(a->b, t, i, S), sum);
    seqpar__element_set(a->out, a->to[t], w->device->accumulator, sum);
}

/* Defines the job and the operation of a row function with `width` doubles of scratch. */
#define SEQPAR__ROW_OP(op, width) \
    static void seqpar__##op##_job(void *user, int64_t i, char *scratch) { \
        const seqpar__row_jobs *w = (const seqpar__row_jobs *)user; \
        int64_t end = SEQPAR__MIN(w->rows, (i + 1) * SEQPAR__ROW_JOB); \
        for (int64_t t = i * SEQPAR__ROW_JOB; t < end; t++) \
            seqpar__##op##_row(w, t, (double *)scratch); \
    } \
    static seqpar_status seqpar__host_##op(seqpar_device *device, const seqpar_##op##_args *a, \
                                           void *queue) { \
        seqpar__row_jobs w; \
        (void)queue; \
        w.device = device; \
        w.args = a; \
        w.rows = a->rows; \
        return seqpar__parallel_runs( \
            device, (a->rows + SEQPAR__ROW_JOB - 1) / SEQPAR__ROW_JOB, \
            (width) * (int64_t)sizeof(double), seqpar__##op##_job, &w); \
    }
SEQPAR__ROW_OP(route, a->experts)
SEQPAR__ROW_OP(route_grad, a->experts)
SEQPAR__ROW_OP(mix, a->width)
SEQPAR__ROW_OP(drop, 1)
SEQPAR__ROW_OP(dots, 1)

/* ---- quantization: groups in 8 bits, bf16 by stochastic rounding ---- */

/* Quantizes and dequantizes a group, in floats or doubles. If the scale is NaN or infinite, all
   codes are 0, and all of the group is dequantized as NaN; this is intended. */
#define SEQPAR__QUANTIZE(real, root) \
    static void seqpar__quantize_##real(uint8_t *bytes, real *scale, const real *x, \
                                        int64_t count, int positive) { \
        real top = 0; \
        for (int64_t i = 0; i < count; i++) { \
            real y = x[i] < 0 ? -x[i] : x[i]; \
            if (!(y <= top) && top == top) top = y; \
        } \
        *scale = top; \
        for (int64_t i = 0; i < count; i++) { \
            int finite = top > 0 && top - top == 0; \
            real y = finite ? (x[i] < 0 ? -x[i] : x[i]) / top : 0; \
            int code = positive ? (int)(255 * root(root(y)) + (real)0.5) \
                                : (int)(127 * root(y) + (real)0.5); \
            if (finite && positive && code == 0 && x[i] > 0) code = 1; \
            bytes[i] = (uint8_t)(x[i] < 0 ? -code : code); \
        } \
    } \
    static void seqpar__dequantize_##real(real *x, const uint8_t *bytes, real scale, \
                                          int64_t count, int positive) { \
        for (int64_t i = 0; i < count; i++) { \
            real y = positive ? (real)bytes[i] / 255 : (real)(int8_t)bytes[i] / 127; \
            y = positive ? y * y : y; \
            x[i] = y * (y < 0 ? -y : y) * scale; \
        } \
    }
SEQPAR__QUANTIZE(float, sqrtf)
SEQPAR__QUANTIZE(double, sqrt)

static void seqpar__quantize_group(const seqpar_quantize_args *a, int64_t begin, int64_t count,
                                   int doubles) {
    int64_t group = begin / SEQPAR_QUANTIZE_GROUP;
    uint8_t *bytes = (uint8_t *)a->codes + begin;
    double *x64 = (double *)a->x + begin, *s64 = (double *)a->scales + group;
    float *x32 = (float *)a->x + begin, *s32 = (float *)a->scales + group;
    int positive = a->form == SEQPAR_QUANTIZE_POSITIVE;
    if (doubles && a->back)
        seqpar__dequantize_double(x64, bytes, *s64, count, positive);
    else if (doubles)
        seqpar__quantize_double(bytes, s64, x64, count, positive);
    else if (a->back)
        seqpar__dequantize_float(x32, bytes, *s32, count, positive);
    else
        seqpar__quantize_float(bytes, s32, x32, count, positive);
}

/* Stochastic rounding: adds the 16 random bits `draw` to the low 16 bits of x, then drops
   those; a carry rounds |x| up. Infinity and NaN stay what they are. */
static uint16_t seqpar__bf16_stochastic(float x, uint32_t draw) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return seqpar_bf16_from_float(x);
    return (uint16_t)((bits + draw) >> 16);
}

static void seqpar__quantize_stochastic(const seqpar_quantize_args *a, int64_t begin,
                                        int64_t count) {
    float *x = (float *)a->x;
    uint16_t *half = (uint16_t *)a->codes;
    uint32_t r[4] = {0, 0, 0, 0};
    for (int64_t i = begin; i < begin + count; i++) {
        uint64_t n = (uint64_t)(a->first + i);
        if (i == begin || n % 8 == 0) seqpar_random(r, a->seed, a->stream, n / 8);
        half[i] = seqpar__bf16_stochastic(x[i], r[n / 2 % 4] >> 16 * (n % 2) & 0xffff);
    }
}

typedef struct seqpar__quantize_work {
    const seqpar_quantize_args *args;
    int storage, accumulator;
} seqpar__quantize_work;

#ifndef SEQPAR__QUANTIZE_JOB
#define SEQPAR__QUANTIZE_JOB (16 * SEQPAR_QUANTIZE_GROUP) /* whole groups */
#endif
static void seqpar__quantize_job(void *user, int64_t job, char *scratch) {
    const seqpar__quantize_work *w = (const seqpar__quantize_work *)user;
    const seqpar_quantize_args *a = w->args;
    int64_t end = SEQPAR__MIN(a->count, (job + 1) * SEQPAR__QUANTIZE_JOB), n;
    (void)scratch;
    for (int64_t i = job * SEQPAR__QUANTIZE_JOB; i < end; i += n) {
        n = SEQPAR__MIN(end - i, (int64_t)SEQPAR_QUANTIZE_GROUP);
        if (a->form != SEQPAR_QUANTIZE_STOCHASTIC)
            seqpar__quantize_group(a, i, n, w->accumulator == SEQPAR_DTYPE_F64);
        else if (!a->back && w->storage == SEQPAR_DTYPE_BF16)
            seqpar__quantize_stochastic(a, i, n);
        else
            for (int64_t k = i; k < i + n; k++)
                seqpar__element_set(a->back ? a->x : a->codes, k,
                                    a->back ? w->accumulator : w->storage,
                                    seqpar__element(a->back ? a->codes : a->x, k,
                                                    a->back ? w->storage : w->accumulator));
    }
}

static seqpar_status seqpar__host_quantize(seqpar_device *device, const seqpar_quantize_args *a,
                                           void *queue) {
    seqpar__quantize_work w;
    (void)queue;
    w.args = a;
    w.storage = device->storage;
    w.accumulator = device->accumulator;
    return seqpar__parallel_runs(device,
                                 (a->count + SEQPAR__QUANTIZE_JOB - 1) / SEQPAR__QUANTIZE_JOB,
                                 0, seqpar__quantize_job, &w);
}

static void seqpar__host_table(seqpar_device *d, const char *name, int storage,
                               int accumulator) {
    d->name = name;
    d->storage = storage;
    d->accumulator = accumulator;
    d->threads = 1;
    d->alloc = seqpar__host_alloc;
    d->free = seqpar__host_free;
    d->copy = seqpar__host_copy;
    d->copy_rows = seqpar__host_copy_rows;
    d->zero = seqpar__host_zero;
    d->pool_alloc = seqpar__host_pool_alloc;
    d->pool_free = seqpar__host_pool_free;
    d->move = seqpar__host_move;
    d->moved = seqpar__host_wait_moves;
    d->close = seqpar__host_close;
#define SEQPAR__X(op) d->op = seqpar__host_##op;
    SEQPAR_DEVICE_OPS_HOST(SEQPAR__X)
#undef SEQPAR__X
}

static seqpar_device *seqpar__host_device(const char *name, int storage, int accumulator) {
    seqpar_device *d = SEQPAR__NEW(seqpar_device, 1);
    if (d) seqpar__host_table(d, name, storage, accumulator);
    return d;
}

#define SEQPAR__X(op) \
    static seqpar_status seqpar__ref_##op(seqpar_device *device, \
                                          const seqpar_##op##_args *args, void *queue) { \
        (void)queue; \
        return SEQPAR__BY_TYPE(device, seqpar__any_##op, device, args); \
    }
SEQPAR_DEVICE_OPS_EACH(SEQPAR__X)
#undef SEQPAR__X

static seqpar_device *seqpar__reference(seqpar_device *d) {
#define SEQPAR__X(op) d->op = seqpar__ref_##op;
    if (d) {
        SEQPAR_DEVICE_OPS_EACH(SEQPAR__X)
    }
#undef SEQPAR__X
    return d;
}

SEQPAR_DEF seqpar_device *seqpar_device_reference(void) {
    return seqpar__reference(
        seqpar__host_device("reference", SEQPAR_DTYPE_F64, SEQPAR_DTYPE_F64));
}

SEQPAR_DEF seqpar_device *seqpar_device_reference_bf16(void) {
    return seqpar__reference(
        seqpar__host_device("reference in bf16", SEQPAR_DTYPE_BF16, SEQPAR_DTYPE_F32));
}

/* =============================================================================================
   >>cpu  the fast device: fp32 in vectors

   A row operation does not depend on the rows beside it. Each product element is one chain of
   fused multiply-adds over the inner dimension; edge tiles run the same kernel on padded
   operands. Threads split output tiles only. In a pass over rows each thread takes a range of
   adjacent rows, then takes jobs from threads that are not done. exp and log are implemented in
   this file. Contraction is off and fma is explicit, so the compiler cannot change a rounding.

       >>cpu       vector functions of each instruction set
       >>product   products, and weight gradients
       >>pass      passes over rows; exp
       >>tile      attention in tiles
       >>rows      norm, rotation, SwiGLU, loss, optimizer
       >>half      bf16, widened and rounded
   ========================================================================================== */

/* Entry i: the bits of 2^(i/16) minus i << 19. Adding (16 n + i) << 19 to it gives the bits of
   2^(n + i/16). */
static const uint32_t seqpar__pow2_sixteenths[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
    0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
    0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

/* One set of functions for each vector instruction set. A seqpar__v holds SEQPAR__VL floats and
   has + - * / from the compiler. A product tile has SEQPAR__MR rows of two vectors. The
   functions are
       vload, vstore      unaligned
       vsplat             a float in every lane
       vfma               a b + c, rounded once where the machine can
       vmax               the greater; b where one of the two is a NaN
       vsqrt
       vless              x where a < b, else y
       vany_less          whether a < b in any lane
       vexponent          the float whose bits are those of t shifted left by 23
       vpow2              with u the bits of t: the float whose bits are
                          seqpar__pow2_sixteenths[u & 15] + (u << 19)
   The sets with more than four lanes have functions to transpose, see seqpar__transpose:
       vload4             4 adjacent floats of each of the VL / 4 rows 0, 4, 8, ...; `row`: the
                          floats from one row to the next
       vlow, vhigh        of every four lanes of a and b: a0 b0 a1 b1, and a2 b2 a3 b3
       vlow2, vhigh2      of every four lanes of a and b: a0 a1 b0 b1, and a2 a3 b2 b3 */
#if defined(__AVX512F__) && SEQPAR__HAS_FMA
#include <immintrin.h>
typedef __m512 seqpar__v;
#define SEQPAR__VL 16
#define SEQPAR__MR 12
SEQPAR__TEMPLATE seqpar__v seqpar__vload(const float *p) { return _mm512_loadu_ps(p); }
SEQPAR__TEMPLATE void seqpar__vstore(float *p, seqpar__v v) { _mm512_storeu_ps(p, v); }
SEQPAR__TEMPLATE seqpar__v seqpar__vsplat(float x) { return _mm512_set1_ps(x); }
SEQPAR__TEMPLATE seqpar__v seqpar__vsqrt(seqpar__v a) { return _mm512_sqrt_ps(a); }
SEQPAR__TEMPLATE seqpar__v seqpar__vmax(seqpar__v a, seqpar__v b) {
    return _mm512_max_ps(a, b);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vfma(seqpar__v a, seqpar__v b, seqpar__v c) {
    return _mm512_fmadd_ps(a, b, c);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vless(seqpar__v a, seqpar__v b, seqpar__v x, seqpar__v y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

SEQPAR__TEMPLATE int seqpar__vany_less(seqpar__v a, seqpar__v b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vexponent(seqpar__v t) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23));
}

SEQPAR__TEMPLATE seqpar__v seqpar__vpow2(seqpar__v t) {
    __m512i bits = _mm512_castps_si512(t);
    __m512i entry = _mm512_permutexvar_epi32(bits, _mm512_loadu_si512(seqpar__pow2_sixteenths));
    return _mm512_castsi512_ps(_mm512_add_epi32(entry, _mm512_slli_epi32(bits, 19)));
}

SEQPAR__TEMPLATE seqpar__v seqpar__vload4(const float *p, int64_t row) {
    seqpar__v v = _mm512_castps128_ps512(_mm_loadu_ps(p));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 4 * row), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 8 * row), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(p + 12 * row), 3);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vlow(seqpar__v a, seqpar__v b) {
    return _mm512_unpacklo_ps(a, b);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vhigh(seqpar__v a, seqpar__v b) {
    return _mm512_unpackhi_ps(a, b);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vlow2(seqpar__v a, seqpar__v b) {
    return _mm512_shuffle_ps(a, b, 0x44);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vhigh2(seqpar__v a, seqpar__v b) {
    return _mm512_shuffle_ps(a, b, 0xee);
}
#elif defined(__AVX2__) && SEQPAR__HAS_FMA
#include <immintrin.h>
typedef __m256 seqpar__v;
#define SEQPAR__VL 8
#define SEQPAR__MR 6
SEQPAR__TEMPLATE seqpar__v seqpar__vload(const float *p) { return _mm256_loadu_ps(p); }
SEQPAR__TEMPLATE void seqpar__vstore(float *p, seqpar__v v) { _mm256_storeu_ps(p, v); }
SEQPAR__TEMPLATE seqpar__v seqpar__vsplat(float x) { return _mm256_set1_ps(x); }
SEQPAR__TEMPLATE seqpar__v seqpar__vsqrt(seqpar__v a) { return _mm256_sqrt_ps(a); }
SEQPAR__TEMPLATE seqpar__v seqpar__vmax(seqpar__v a, seqpar__v b) {
    return _mm256_max_ps(a, b);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vfma(seqpar__v a, seqpar__v b, seqpar__v c) {
    return _mm256_fmadd_ps(a, b, c);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vless(seqpar__v a, seqpar__v b, seqpar__v x, seqpar__v y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

SEQPAR__TEMPLATE int seqpar__vany_less(seqpar__v a, seqpar__v b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) != 0;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vexponent(seqpar__v t) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
}

/* The table is two vectors; bit 3 of t, shifted to the sign, chooses between them. */
SEQPAR__TEMPLATE seqpar__v seqpar__vpow2(seqpar__v t) {
    const float *table = (const float *)seqpar__pow2_sixteenths;
    __m256i bits = _mm256_castps_si256(t), entry;
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), bits);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), bits);
    __m256 choice = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 28));
    entry = _mm256_castps_si256(_mm256_blendv_ps(low, high, choice));
    return _mm256_castsi256_ps(_mm256_add_epi32(entry, _mm256_slli_epi32(bits, 19)));
}

SEQPAR__TEMPLATE seqpar__v seqpar__vload4(const float *p, int64_t row) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)),
                                _mm_loadu_ps(p + 4 * row), 1);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vlow(seqpar__v a, seqpar__v b) {
    return _mm256_unpacklo_ps(a, b);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vhigh(seqpar__v a, seqpar__v b) {
    return _mm256_unpackhi_ps(a, b);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vlow2(seqpar__v a, seqpar__v b) {
    return _mm256_shuffle_ps(a, b, 0x44);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vhigh2(seqpar__v a, seqpar__v b) {
    return _mm256_shuffle_ps(a, b, 0xee);
}
#elif defined(__aarch64__) && SEQPAR__HAS_FMA
#include <arm_neon.h>
typedef float32x4_t seqpar__v;
#define SEQPAR__VL 4
#define SEQPAR__MR 8
SEQPAR__TEMPLATE seqpar__v seqpar__vload(const float *p) { return vld1q_f32(p); }
SEQPAR__TEMPLATE void seqpar__vstore(float *p, seqpar__v v) { vst1q_f32(p, v); }
SEQPAR__TEMPLATE seqpar__v seqpar__vsplat(float x) { return vdupq_n_f32(x); }
SEQPAR__TEMPLATE seqpar__v seqpar__vsqrt(seqpar__v a) { return vsqrtq_f32(a); }
SEQPAR__TEMPLATE seqpar__v seqpar__vfma(seqpar__v a, seqpar__v b, seqpar__v c) {
    return vfmaq_f32(c, a, b);
}

/* vmaxq_f32 would return NaN if either operand is NaN. */
SEQPAR__TEMPLATE seqpar__v seqpar__vmax(seqpar__v a, seqpar__v b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vless(seqpar__v a, seqpar__v b, seqpar__v x, seqpar__v y) {
    return vbslq_f32(vcltq_f32(a, b), x, y);
}

SEQPAR__TEMPLATE int seqpar__vany_less(seqpar__v a, seqpar__v b) {
    return vmaxvq_u32(vcltq_f32(a, b)) != 0;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vexponent(seqpar__v t) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23));
}

/* The table is 64 bytes; entry i is the four bytes from 4 i on. */
SEQPAR__TEMPLATE seqpar__v seqpar__vpow2(seqpar__v t) {
    uint8x16x4_t table = vld1q_u8_x4((const uint8_t *)seqpar__pow2_sixteenths);
    uint32x4_t bits = vreinterpretq_u32_f32(t), first = vdupq_n_u32(0x03020100), byte, entry;
    byte = vmlaq_n_u32(first, vandq_u32(bits, vdupq_n_u32(15)), 0x04040404);
    entry = vreinterpretq_u32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(byte)));
    return vreinterpretq_f32_u32(vaddq_u32(entry, vshlq_n_u32(bits, 19)));
}
#elif defined(__GNUC__)
typedef float seqpar__v __attribute__((vector_size(16)));
typedef uint32_t seqpar__vbits __attribute__((vector_size(16)));
#define SEQPAR__VL 4
#define SEQPAR__MR 4
SEQPAR__TEMPLATE void seqpar__vstore(float *p, seqpar__v v) { memcpy(p, &v, 16); }
SEQPAR__TEMPLATE seqpar__v seqpar__vload(const float *p) {
    seqpar__v v;
    memcpy(&v, p, 16);
    return v;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vsplat(float x) {
    seqpar__v v = {x, x, x, x};
    return v;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vfma(seqpar__v a, seqpar__v b, seqpar__v c) {
    return a * b + c;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vsqrt(seqpar__v a) {
    for (int i = 0; i < 4; i++) a[i] = sqrtf(a[i]);
    return a;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vless(seqpar__v a, seqpar__v b, seqpar__v x, seqpar__v y) {
    seqpar__vbits mask = (seqpar__vbits)(a < b);
    return (seqpar__v)(((seqpar__vbits)x & mask) | ((seqpar__vbits)y & ~mask));
}

SEQPAR__TEMPLATE seqpar__v seqpar__vmax(seqpar__v a, seqpar__v b) {
    return seqpar__vless(b, a, a, b);
}

SEQPAR__TEMPLATE int seqpar__vany_less(seqpar__v a, seqpar__v b) {
    return (a[0] < b[0]) | (a[1] < b[1]) | (a[2] < b[2]) | (a[3] < b[3]);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vexponent(seqpar__v t) {
    return (seqpar__v)((seqpar__vbits)t << 23);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vpow2(seqpar__v t) {
    seqpar__vbits bits = (seqpar__vbits)t, entry;
    for (int i = 0; i < 4; i++) entry[i] = seqpar__pow2_sixteenths[bits[i] & 15];
    return (seqpar__v)(entry + (bits << 19));
}
#else
typedef float seqpar__v;
#define SEQPAR__VL 1
#define SEQPAR__MR 4
SEQPAR__TEMPLATE seqpar__v seqpar__vload(const float *p) { return *p; }
SEQPAR__TEMPLATE void seqpar__vstore(float *p, seqpar__v v) { *p = v; }
SEQPAR__TEMPLATE seqpar__v seqpar__vsplat(float x) { return x; }
SEQPAR__TEMPLATE seqpar__v seqpar__vmax(seqpar__v a, seqpar__v b) { return a > b ? a : b; }
SEQPAR__TEMPLATE seqpar__v seqpar__vsqrt(seqpar__v a) { return sqrtf(a); }
SEQPAR__TEMPLATE int seqpar__vany_less(seqpar__v a, seqpar__v b) { return a < b; }
SEQPAR__TEMPLATE seqpar__v seqpar__vfma(seqpar__v a, seqpar__v b, seqpar__v c) {
    return SEQPAR__FMAF(a, b, c);
}

SEQPAR__TEMPLATE seqpar__v seqpar__vless(seqpar__v a, seqpar__v b, seqpar__v x, seqpar__v y) {
    return a < b ? x : y;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vexponent(seqpar__v t) {
    uint32_t bits;
    memcpy(&bits, &t, 4);
    bits <<= 23;
    memcpy(&t, &bits, 4);
    return t;
}

SEQPAR__TEMPLATE seqpar__v seqpar__vpow2(seqpar__v t) {
    uint32_t bits;
    memcpy(&bits, &t, 4);
    bits = seqpar__pow2_sixteenths[bits & 15] + (bits << 19);
    memcpy(&t, &bits, 4);
    return t;
}
#endif
#define SEQPAR__NR (2 * SEQPAR__VL)
#if defined(__clang__)
#define SEQPAR__UNROLL _Pragma("clang loop unroll(full)")
#define SEQPAR__ROLLED _Pragma("clang loop unroll(disable)")
#elif defined(__GNUC__)
#define SEQPAR__UNROLL _Pragma("GCC unroll 48")
#define SEQPAR__ROLLED _Pragma("GCC unroll 1")
#else
#define SEQPAR__UNROLL
#define SEQPAR__ROLLED
#endif

/* =============================================================================================
   >>product  products, and weight gradients

   c (rows, columns) = a (rows, depth) . b (depth, columns). b is copied into panels of NR
   columns, and a panel is read row by row. a is read in place, from a copy or from panels of MR
   rows (seqpar__product_compute). One kernel computes a tile of MR x NR in registers, over at most KC of the depth at a time. An
   element has the same bits in any tile: it is always one chain over the depth.

   A weight gradient is a fold: its leaves are products over a cell's tokens, and the fold runs
   inside the loop over output tiles, so that partial sums stay in the cache.
   ========================================================================================== */

/* The operands of tiles: c (rows, NR) = a (rows, depth) . b (depth, NR). */
typedef struct seqpar__strip {
    float *c;
    int64_t ldc;
    const float *a; /* element (i, k) at a[i * a_row + k * a_step] */
    int64_t a_row, a_step;
    const float *b; /* row k at b + k * ldb */
    int64_t ldb, depth;
    int on;            /* sums begin with c, else with 0 */
    const float *keep; /* NULL, or (rows): keep[i] times the old row i of c is added last */
} seqpar__strip;

/* `count` rows of a strip: one fma chain per element, whatever `count` is. half: VL columns,
   not NR. */
SEQPAR__TEMPLATE void seqpar__tile(const int half, const int count, const seqpar__strip *s) {
    const float *a = s->a, *b = s->b;
    seqpar__v left[SEQPAR__MR], right[SEQPAR__MR];
    SEQPAR__UNROLL
    for (int i = 0; i < count; i++) {
        left[i] = right[i] = seqpar__vsplat(0.0f);
        if (!s->on) continue;
        left[i] = seqpar__vload(s->c + i * s->ldc);
        if (!half) right[i] = seqpar__vload(s->c + i * s->ldc + SEQPAR__VL);
    }
    /* not unrolled: the values of more than one iteration would not fit into the registers */
    SEQPAR__ROLLED
    for (int64_t k = 0; k < s->depth; k++, a += s->a_step, b += s->ldb) {
        seqpar__v b0 = seqpar__vload(b), b1 = half ? b0 : seqpar__vload(b + SEQPAR__VL);
        SEQPAR__UNROLL
        for (int i = 0; i < count; i++) {
            seqpar__v x = seqpar__vsplat(a[i * s->a_row]);
            left[i] = seqpar__vfma(x, b0, left[i]);
            if (!half) right[i] = seqpar__vfma(x, b1, right[i]);
        }
    }
    SEQPAR__UNROLL
    for (int i = 0; i < count; i++) {
        float *c = s->c + i * s->ldc;
        if (s->keep)
            left[i] = seqpar__vfma(seqpar__vload(c), seqpar__vsplat(s->keep[i]), left[i]);
        seqpar__vstore(c, left[i]);
        if (half) continue;
        if (s->keep)
            right[i] = seqpar__vfma(seqpar__vload(c + SEQPAR__VL), seqpar__vsplat(s->keep[i]),
                                    right[i]);
        seqpar__vstore(c + SEQPAR__VL, right[i]);
    }
}

/* Rows of the next tile, when `left` rows remain. With MR 6, full tiles could leave a single
   row, and a tile of one row is slow: each fma waits for the one before it. So with MR 6 tiles
   are made as equal as possible. */
static int64_t seqpar__tile_rows(int64_t left) {
    int64_t tiles = (left + SEQPAR__MR - 1) / SEQPAR__MR;
    if (SEQPAR__MR == 6) return left < 3 ? 1 : (left + tiles - 1) / tiles;
    if (left >= SEQPAR__MR) return SEQPAR__MR;
    if (left >= 8) return 8;
    return left >= 4 ? 4 : 1;
}

/* Computes any number of rows, in tiles of seqpar__tile_rows rows. */
SEQPAR__TEMPLATE void seqpar__tiles(int64_t rows, seqpar__strip s) {
    int64_t n;
    for (; rows > 0; rows -= n, s.a += n * s.a_row, s.c += n * s.ldc) {
        n = seqpar__tile_rows(rows);
        if (n == SEQPAR__MR)
            seqpar__tile(0, SEQPAR__MR, &s);
        else if (SEQPAR__MR > 8 && n == 8)
            seqpar__tile(0, 8, &s);
        else if (SEQPAR__MR == 6 && n == 5)
            seqpar__tile(0, 5, &s);
        else if (SEQPAR__MR == 6 && n == 3)
            seqpar__tile(0, 3, &s);
        else if (SEQPAR__MR > 4 && n == 4)
            seqpar__tile(0, 4, &s);
        else
            seqpar__tile(0, 1, &s);
        s.keep = s.keep ? s.keep + n : NULL;
    }
}

/* seqpar__tiles compiled once for a stored by rows (its elements adjacent in a row), and once
   for a stored by columns; other callers of seqpar__tiles inline it. */
static void seqpar__tiles_rows(int64_t rows, int64_t depth, const float *a, int64_t row,
                               const float *b, int64_t ldb, float *c, int64_t ldc, int on,
                               const float *keep) {
    seqpar__strip s = {c, ldc, a, row, 1, b, ldb, depth, on, keep};
    seqpar__tiles(rows, s);
}

static void seqpar__tiles_columns(int64_t rows, int64_t depth, const float *a, int64_t step,
                                  const float *b, int64_t ldb, float *c, int64_t ldc, int on,
                                  const float *keep) {
    seqpar__strip s = {c, ldc, a, 1, step, b, ldb, depth, on, keep};
    seqpar__tiles(rows, s);
}

/* Transposes: VL rows of 4 columns at `from` become 4 rows of VL at `to`, times the factor. */
SEQPAR__TEMPLATE void seqpar__transpose(float *to, int64_t ld, const float *from, int64_t row,
                                        float factor) {
#if SEQPAR__VL > 4
    seqpar__v f = seqpar__vsplat(factor), a = seqpar__vload4(from, row);
    seqpar__v b = seqpar__vload4(from + row, row), c = seqpar__vload4(from + 2 * row, row);
    seqpar__v d = seqpar__vload4(from + 3 * row, row);
    seqpar__v ab = seqpar__vlow(a, b), cd = seqpar__vlow(c, d), ab2 = seqpar__vhigh(a, b);
    seqpar__v cd2 = seqpar__vhigh(c, d);
    seqpar__vstore(to, seqpar__vlow2(ab, cd) * f);
    seqpar__vstore(to + ld, seqpar__vhigh2(ab, cd) * f);
    seqpar__vstore(to + 2 * ld, seqpar__vlow2(ab2, cd2) * f);
    seqpar__vstore(to + 3 * ld, seqpar__vhigh2(ab2, cd2) * f);
#else
    int i, k;
    for (k = 0; k < 4; k++)
        for (i = 0; i < SEQPAR__VL; i++) to[k * ld + i] = from[i * row + k] * factor;
#endif
}

/* Copies b (depth, columns), times the factor, into panels of NR columns; the last panel is
   padded with 0. Element (k, j) is b[k * row + j * column]. */
static void seqpar__panel_fill(float *to, const float *b, int64_t row, int64_t column,
                               int64_t depth, int64_t columns, float factor) {
    int64_t k;
    for (int64_t j = 0; j < columns; j += SEQPAR__NR, to += depth * SEQPAR__NR) {
        const float *from = b + j * column;
        int64_t n = SEQPAR__MIN(columns - j, SEQPAR__NR);
        if (n < SEQPAR__NR) memset(to, 0, (size_t)(depth * SEQPAR__NR) * sizeof *to);
        k = 0;
        if (n == SEQPAR__NR && row == 1)
            for (; k + 4 <= depth; k += 4) {
                seqpar__transpose(to + k * SEQPAR__NR, SEQPAR__NR, from + k, column, factor);
                seqpar__transpose(to + k * SEQPAR__NR + SEQPAR__VL, SEQPAR__NR,
                                  from + SEQPAR__VL * column + k, column, factor);
            }
        if (n == SEQPAR__NR && column == 1)
            for (; k < depth; k++)
                for (int64_t i = 0; i < SEQPAR__NR; i++)
                    to[k * SEQPAR__NR + i] = from[k * row + i] * factor;
        for (; k < depth; k++)
            for (int64_t i = 0; i < n; i++)
                to[k * SEQPAR__NR + i] = from[k * row + i * column] * factor;
    }
}

/* Copies a (rows, depth) into panels of MR rows. In a panel the elements of one k are adjacent.
   The last panel may have fewer rows. Element (i, k) is a[i * row + k * step]. */
static void seqpar__panel_rows(float *to, const float *a, int64_t row, int64_t step,
                               int64_t rows, int64_t depth) {
    int64_t k;
    for (int64_t i = 0; i < rows; i += SEQPAR__MR, to += depth * SEQPAR__MR) {
        const float *from = a + i * row;
        int64_t m = SEQPAR__MIN(rows - i, SEQPAR__MR);
        k = 0;
        if (m == SEQPAR__MR && row == 1)
            for (; k < depth; k++)
                for (int64_t x = 0; x < SEQPAR__MR; x++)
                    to[k * SEQPAR__MR + x] = from[k * step + x];
        for (; k < depth; k++)
            for (int64_t x = 0; x < m; x++) to[k * SEQPAR__MR + x] = from[x * row + k * step];
    }
}

/* KC, NC: depth and columns of b that are packed at a time. MC: rows of a at a time. */
#ifndef SEQPAR__KC
#define SEQPAR__KC 512
#endif
#ifndef SEQPAR__NC
#define SEQPAR__NC 320 /* a multiple of NR */
#endif
#ifndef SEQPAR__MC
#define SEQPAR__MC (8 * SEQPAR__MR) /* a multiple of MR */
#endif
/* With a row stride of at least so many floats, rows of a may be copied
   (seqpar__product_compute). */
#ifndef SEQPAR__FAR_ROWS
#define SEQPAR__FAR_ROWS 256
#endif
/* Row stride of the copy. With a power of two, all rows would fall into a few cache sets. */
#define SEQPAR__AC (SEQPAR__KC + 16)

typedef struct seqpar__product {
    float *c;
    int64_t ldc;
    const float *a;
    int64_t a_row, a_step;
    const float *b;
    int64_t b_row, b_column;
    int64_t rows, columns, depth;
    int accumulate;
} seqpar__product;

static void seqpar__product_tile(int64_t rows, int64_t depth, const float *a, int64_t row,
                                 const float *b, float *c, int64_t ldc, int on) {
    /* a constant stride becomes part of the load addresses */
    seqpar__strip copied = {c, ldc, a, SEQPAR__AC, 1, b, SEQPAR__NR, depth, on, NULL};
    if (row == SEQPAR__AC)
        seqpar__tiles(rows, copied);
    else if (row)
        seqpar__tiles_rows(rows, depth, a, row, b, SEQPAR__NR, c, ldc, on, NULL);
    else
        seqpar__tiles_columns(rows, depth, a, SEQPAR__MR, b, SEQPAR__NR, c, ldc, on, NULL);
}

/* c (rows, columns) = a . b or, if `on`, c += a . b. b is packed in panels. If `row` is 0, a is
   packed in panels, too; otherwise its rows are `row` floats apart. A last panel with fewer
   than NR columns of c is computed in a buffer. */
static void seqpar__product_panels(float *c, int64_t ldc, const float *a, int64_t row,
                                   const float *b, int64_t rows, int64_t columns, int64_t depth,
                                   int on) {
    float edge[SEQPAR__MR * SEQPAR__NR];
    for (int64_t j = 0; j < columns; j += SEQPAR__NR)
        for (int64_t i = 0; i < rows; i += SEQPAR__MR) {
            int64_t m = SEQPAR__MIN(rows - i, SEQPAR__MR);
            int64_t n = SEQPAR__MIN(columns - j, SEQPAR__NR);
            const float *from = a + i * (row ? row : depth);
            float *to = c + i * ldc + j;
            if (n == SEQPAR__NR) {
                seqpar__product_tile(m, depth, from, row, b + j * depth, to, ldc, on);
                continue;
            }
            for (int64_t x = 0; on && x < m; x++)
                memcpy(edge + x * SEQPAR__NR, to + x * ldc, (size_t)n * sizeof *c);
            for (int64_t x = 0; on && x < m; x++)
                memset(edge + x * SEQPAR__NR + n, 0, (size_t)(SEQPAR__NR - n) * sizeof *c);
            seqpar__product_tile(m, depth, from, row, b + j * depth, edge, SEQPAR__NR, on);
            for (int64_t x = 0; x < m; x++)
                memcpy(to + x * ldc, edge + x * SEQPAR__NR, (size_t)n * sizeof *c);
        }
}

/* With a_step 1, rows of a are read in place, or from a copy if their stride is large and the
   product has enough columns to repay the copy. With another step a is packed in panels. */
static void seqpar__product_compute(const seqpar__product *p, float *packed_a) {
    float *packed_b = packed_a + SEQPAR__AC * SEQPAR__MC;
    int copied = p->a_step == 1 && p->a_row >= SEQPAR__FAR_ROWS && p->columns >= 4 * SEQPAR__NR;
    int64_t row = p->a_step == 1 ? p->a_row : 0;
    if (copied) row = SEQPAR__AC;
    /* an empty sum */
    for (int64_t j = 0; p->depth == 0 && !p->accumulate && j < p->rows; j++)
        memset(p->c + j * p->ldc, 0, (size_t)p->columns * sizeof *p->c);
    for (int64_t j = 0; j < p->columns; j += SEQPAR__NC)
        for (int64_t k = 0; k < p->depth; k += SEQPAR__KC) {
            int64_t n = SEQPAR__MIN(p->columns - j, SEQPAR__NC);
            int64_t d = SEQPAR__MIN(p->depth - k, SEQPAR__KC);
            seqpar__panel_fill(packed_b, p->b + k * p->b_row + j * p->b_column, p->b_row,
                               p->b_column, d, n, 1.0f);
            for (int64_t i = 0; i < p->rows; i += SEQPAR__MC) {
                int64_t m = SEQPAR__MIN(p->rows - i, SEQPAR__MC);
                const float *a = p->a + i * p->a_row + k * p->a_step;
                for (int64_t x = 0; copied && x < m; x++)
                    memcpy(packed_a + x * row, a + x * p->a_row, (size_t)d * sizeof *a);
                if (!row) seqpar__panel_rows(packed_a, a, p->a_row, p->a_step, m, d);
                seqpar__product_panels(p->c + i * p->ldc + j, p->ldc,
                                       copied || !row ? packed_a : a, row, packed_b, m, n, d,
                                       p->accumulate || k > 0);
            }
        }
}
#define SEQPAR__PANEL_BYTES \
    ((SEQPAR__AC * SEQPAR__MC + SEQPAR__KC * (SEQPAR__NC + SEQPAR__NR)) * \
     (int64_t)sizeof(float))

/* Computes up to NR rows of a . W^T, from column `j` on. The rows of a are the lanes of one
   vector, or of two; so W, by far the larger, is read once and in place. x: scratch for a,
   transposed. */
static void seqpar__product_lanes(const seqpar__product *p, float *x, int64_t j) {
    float c[SEQPAR__MR * SEQPAR__NR] = {0};
    int64_t lanes = p->rows > SEQPAR__VL ? SEQPAR__NR : SEQPAR__VL, n;
    for (int64_t k = 0; j < p->columns && k < p->depth; k++)
        for (int64_t i = 0; i < lanes; i++)
            x[k * lanes + i] = i < p->rows ? p->a[i * p->a_row + k] : 0.0f;
    for (; j < p->columns; j += n) {
        const float *w = p->b + j * p->b_column;
        seqpar__strip s = {c, lanes, w,        p->b_column,   1,
                           x, lanes, p->depth, p->accumulate, NULL};
        n = j + SEQPAR__MR <= p->columns ? SEQPAR__MR : 1;
        for (int64_t k = 0; p->accumulate && k < n; k++)
            for (int64_t i = 0; i < p->rows; i++) c[k * lanes + i] = p->c[i * p->ldc + j + k];
        if (lanes > SEQPAR__VL)
            seqpar__tiles_rows(n, p->depth, w, p->b_column, x, lanes, c, lanes, p->accumulate,
                               NULL);
        else if (n > 1)
            seqpar__tile(1, SEQPAR__MR, &s);
        else
            seqpar__tile(1, 1, &s);
        for (int64_t k = 0; k < n; k++)
            for (int64_t i = 0; i < p->rows; i++) p->c[i * p->ldc + j + k] = c[k * lanes + i];
    }
}

/* One row of a . W^T: here VL rows of W are the lanes, transposed in registers. Returns how
   many columns are done; the rest is for seqpar__product_lanes. */
static int64_t seqpar__product_row(const seqpar__product *p) {
    int64_t j;
    for (j = 0; p->depth % 4 == 0 && j + SEQPAR__VL <= p->columns; j += SEQPAR__VL) {
        const float *w = p->b + j * p->b_column;
        seqpar__v sum = p->accumulate ? seqpar__vload(p->c + j) : seqpar__vsplat(0.0f);
        for (int64_t k = 0; k < p->depth; k += 4) {
            float turned[4 * SEQPAR__VL];
            seqpar__transpose(turned, SEQPAR__VL, w + k, p->b_column, 1.0f);
            SEQPAR__UNROLL
            for (int64_t i = 0; i < 4; i++)
                sum = seqpar__vfma(seqpar__vsplat(p->a[k + i]),
                                   seqpar__vload(turned + i * SEQPAR__VL), sum);
        }
        seqpar__vstore(p->c + j, sum);
    }
    return j;
}

/* A job is a range of rows. If that makes too few jobs, it is a range of columns, too. Ranges
   are whole tiles, except at the end of the matrix. */
typedef struct seqpar__matmul_work {
    const seqpar_matmul_args *args;
    int64_t rows, columns; /* of a job, at most */
    int64_t across;        /* jobs side by side: ranges of columns */
} seqpar__matmul_work;

static void seqpar__cpu_matmul_job(void *user, int64_t i, char *scratch) {
    const seqpar__matmul_work *w = (const seqpar__matmul_work *)user;
    const seqpar_matmul_args *a = w->args;
    seqpar__product p;
    int64_t first = i / w->across * w->rows, column = i % w->across * w->columns;
    p.c = (float *)a->y.data + first * a->y.stride + column;
    p.ldc = a->y.stride;
    p.a = (const float *)a->x.data + first * a->x.stride;
    p.a_row = a->x.stride;
    p.a_step = 1;
    p.b_row = a->transposed ? a->w.stride : 1;
    p.b_column = a->transposed ? 1 : a->w.stride;
    p.b = (const float *)a->w.data + column * p.b_column;
    p.rows = SEQPAR__MIN(w->rows, a->rows - first);
    p.columns = SEQPAR__MIN(w->columns, a->out - column);
    p.depth = a->in;
    p.accumulate = a->accumulate;
    if (a->transposed || a->rows > SEQPAR__NR)
        seqpar__product_compute(&p, (float *)scratch);
    else
        seqpar__product_lanes(&p, (float *)scratch, p.rows == 1 ? seqpar__product_row(&p) : 0);
}

/* More jobs than threads: a thread that loses its core does not hold up the rest. */
static int64_t seqpar__jobs_wanted(const seqpar_device *device) {
    return device->threads > 1 ? 4 * device->threads : 1;
}

/* The least rows of a job, in a narrow and in a wide product. The columns of a job are a
   multiple of SEQPAR__JOB_COLUMNS. */
#ifndef SEQPAR__JOB_ROWS
#define SEQPAR__JOB_ROWS 64
#endif
#ifndef SEQPAR__JOB_ROWS_WIDE
#define SEQPAR__JOB_ROWS_WIDE 256
#endif
#ifndef SEQPAR__JOB_COLUMNS
#define SEQPAR__JOB_COLUMNS (8 * SEQPAR__MR)
#endif
static seqpar_status seqpar__cpu_matmul(seqpar_device *device, const seqpar_matmul_args *a,
                                        void *queue) {
    seqpar__matmul_work w;
    int64_t jobs = seqpar__jobs_wanted(device), bytes = SEQPAR__PANEL_BYTES, share, runs;
    (void)queue;
    if (a->rows <= 0 || a->out <= 0) return SEQPAR_OK;
    w.args = a;
    /* each range of rows packs w again, so a wide product takes larger ranges */
    share = a->out >= SEQPAR__JOB_ROWS_WIDE * jobs ? SEQPAR__JOB_ROWS_WIDE : SEQPAR__JOB_ROWS;
    share = SEQPAR__MAX((a->rows + jobs - 1) / jobs, share);
    w.rows = (share + SEQPAR__MR - 1) / SEQPAR__MR * SEQPAR__MR;
    runs = (a->rows + w.rows - 1) / w.rows;
    w.across = SEQPAR__MAX(jobs / runs, 1);
    w.columns = SEQPAR__JOB_COLUMNS * w.across;
    w.columns = (a->out + w.columns - 1) / w.columns * SEQPAR__JOB_COLUMNS;
    w.across = (a->out + w.columns - 1) / w.columns;
    if (a->rows <= SEQPAR__NR)
        bytes = SEQPAR__MAX(bytes, a->in * SEQPAR__NR * (int64_t)sizeof(float));
    return seqpar__parallel(device, runs * w.across, bytes, seqpar__cpu_matmul_job, &w);
}

/* Weight gradient: a job is a block of dw, and its fold runs inside it, so that partial sums
   stay in the cache. The more rows a block has, the less often x is read. The number of rows is
   halved while there are too few jobs. */
#ifndef SEQPAR__WB_OUT
#define SEQPAR__WB_OUT 192
#endif
#ifndef SEQPAR__WB_LEAST
#define SEQPAR__WB_LEAST 48 /* blocks of so many rows or fewer are not halved */
#endif
#ifndef SEQPAR__WB_IN
#define SEQPAR__WB_IN 256
#endif
typedef struct seqpar__weight_work {
    const seqpar_weight_grad_args *args;
    int64_t rows;
} seqpar__weight_work;

typedef struct seqpar__weight_job { /* the block of dw from element (out, in) on */
    const seqpar_weight_grad_args *args;
    int64_t out, in, rows, columns;
    float *packed; /* scratch of seqpar__product_compute */
} seqpar__weight_job;

static void seqpar__cpu_weight_leaf(void *user, void *value, int64_t index, int extend) {
    const seqpar__weight_job *j = (const seqpar__weight_job *)user;
    const seqpar_weight_grad_args *a = j->args;
    int64_t first = a->leaves[index].local;
    seqpar__product p;
    p.c = (float *)value;
    p.ldc = SEQPAR__WB_IN;
    p.a = (const float *)a->dy.data + first * a->dy.stride + j->out;
    p.a_row = 1;
    p.a_step = a->dy.stride;
    p.b = (const float *)a->x.data + first * a->x.stride + j->in;
    p.b_row = a->x.stride;
    p.b_column = 1;
    p.rows = j->rows;
    p.columns = j->columns;
    p.depth = a->leaves[index].count;
    p.accumulate = extend;
    seqpar__product_compute(&p, j->packed);
}

static void seqpar__cpu_weight_combine(void *user, void *into, const void *other) {
    const seqpar__weight_job *j = (const seqpar__weight_job *)user;
    for (int64_t r = 0; r < j->rows; r++)
        for (int64_t i = 0; i < j->columns; i++)
            ((float *)into)[r * SEQPAR__WB_IN + i] +=
                ((const float *)other)[r * SEQPAR__WB_IN + i];
}

static void seqpar__cpu_weight_copy(const seqpar__weight_job *j, float *value, float *matrix,
                                    int to_matrix) {
    matrix += j->out * j->args->in + j->in;
    for (int64_t r = 0; r < j->rows; r++, matrix += j->args->in, value += SEQPAR__WB_IN)
        if (to_matrix)
            memcpy(matrix, value, (size_t)j->columns * sizeof *value);
        else
            memcpy(value, matrix, (size_t)j->columns * sizeof *value);
}

static void seqpar__cpu_weight_move(void *user, void *value, int64_t slot, int to_store) {
    const seqpar__weight_job *j = (const seqpar__weight_job *)user;
    seqpar__cpu_weight_copy(j, (float *)value,
                            (float *)j->args->fold.store + slot * j->args->fold.store_stride,
                            to_store);
}

static void seqpar__cpu_weight_finish(void *user, void *value) {
    const seqpar__weight_job *j = (const seqpar__weight_job *)user;
    seqpar__cpu_weight_copy(j, (float *)value, (float *)j->args->fold.finish, 1);
}

static void seqpar__cpu_weight_job(void *user, int64_t i, char *scratch) {
    const seqpar__weight_work *w = (const seqpar__weight_work *)user;
    const seqpar_weight_grad_args *a = w->args;
    int64_t blocks = (a->in + SEQPAR__WB_IN - 1) / SEQPAR__WB_IN;
    seqpar__weight_job j;
    seqpar__machine m;
    j.args = a;
    j.out = i / blocks * w->rows;
    j.in = i % blocks * SEQPAR__WB_IN;
    j.rows = SEQPAR__MIN(w->rows, a->out - j.out);
    j.columns = SEQPAR__MIN(SEQPAR__WB_IN, a->in - j.in);
    j.packed = (float *)scratch;
    seqpar__machine_memory(&m, scratch + SEQPAR__PANEL_BYTES, a->fold.depth,
                           w->rows * SEQPAR__WB_IN * (int64_t)sizeof(float));
    m.user = &j;
    m.leaf = seqpar__cpu_weight_leaf;
    m.combine = seqpar__cpu_weight_combine;
    m.move = seqpar__cpu_weight_move;
    m.finish = seqpar__cpu_weight_finish;
    m.extends = 1;
    seqpar__machine_exec(&m, a->fold.program, a->fold.program_count);
}

static seqpar_status seqpar__cpu_weight_grad(seqpar_device *device,
                                             const seqpar_weight_grad_args *a, void *queue) {
    int64_t across = (a->in + SEQPAR__WB_IN - 1) / SEQPAR__WB_IN;
    int64_t wanted = seqpar__jobs_wanted(device);
    seqpar__weight_work w;
    (void)queue;
    w.args = a;
    for (w.rows = SEQPAR__WB_OUT;
         w.rows > SEQPAR__WB_LEAST && (a->out + w.rows - 1) / w.rows * across < wanted;)
        w.rows /= 2;
    return seqpar__parallel(
        device, (a->out + w.rows - 1) / w.rows * across,
        SEQPAR__PANEL_BYTES + seqpar__machine_bytes(a->fold.depth, w.rows * SEQPAR__WB_IN *
                                                                       (int64_t)sizeof(float)),
        seqpar__cpu_weight_job, &w);
}

/* =============================================================================================
   >>pass  passes over rows; exp

   An operation on single rows is a function of one row; each thread calls it for runs of rows.
   An operation on the elements of a row is a step function on one vector of each array. Its
   sums are vectors, which are added in a fixed order at the end; the last vector is padded with
   a value that changes no sum. exp is a polynomial, and exp(0) is exactly 1. tanh is a
   polynomial near 0 and is computed from exp elsewhere.
   ========================================================================================== */

/* Operations on single rows: a job is a run of SEQPAR__ROW_JOB rows. */
typedef struct seqpar__rows_work {
    const void *args;
    int64_t rows;
    void (*row)(const void *args, int64_t t);
} seqpar__rows_work;

static void seqpar__rows_job(void *user, int64_t i, char *scratch) {
    const seqpar__rows_work *w = (const seqpar__rows_work *)user;
    (void)scratch;
    for (int64_t t = i * SEQPAR__ROW_JOB; t < SEQPAR__MIN(w->rows, (i + 1) * SEQPAR__ROW_JOB);
         t++)
        w->row(w->args, t);
}

static seqpar_status seqpar__for_rows(seqpar_device *device, int64_t rows, const void *args,
                                      void (*row)(const void *args, int64_t t)) {
    seqpar__rows_work w;
    w.args = args;
    w.rows = rows;
    w.row = row;
    return seqpar__parallel_runs(device, (rows + SEQPAR__ROW_JOB - 1) / SEQPAR__ROW_JOB, 0,
                                 seqpar__rows_job, &w);
}

/* Calls step for the n elements of some arrays, one vector of each array at a time, with the
   constants k. A step has up to three sums. Each is 64 partial sums, so the order of additions
   does not depend on the vector length: element i goes to partial sum i % 64, or to i % 16
   after the last whole 64 elements, and a fixed tree adds the 64 (seqpar__sum_of). sums[3 u],
   sums[3 u + 1] and sums[3 u + 2] belong to vector u of the 64 elements. A last part of fewer
   than 16 elements is padded with `fill` in a buffer; of it, only the first `written` arrays
   are copied back. */
typedef void (*seqpar__step_fn)(const seqpar__v *k, seqpar__v *sums, float *const *x);
#define SEQPAR__SUMS   (3 * 64 / SEQPAR__VL)
#define SEQPAR__ARRAYS 7
SEQPAR__TEMPLATE void seqpar__vectors(seqpar__step_fn step, const seqpar__v *k, seqpar__v *sums,
                                      const int arrays, float *const *x, int64_t from,
                                      const int count) {
    float *at[SEQPAR__ARRAYS];
    SEQPAR__UNROLL
    for (int u = 0; u < count / SEQPAR__VL; u++) {
        SEQPAR__UNROLL
        for (int j = 0; j < arrays; j++) at[j] = x[j] + from + u * SEQPAR__VL;
        step(k, sums + 3 * u, at);
    }
}

SEQPAR__TEMPLATE void seqpar__each(seqpar__step_fn step, const seqpar__v *k, seqpar__v *sums,
                                   const int arrays, const int written, float *const *x,
                                   int64_t n, float fill) {
    seqpar__v own[SEQPAR__SUMS]; /* a local copy, so that it stays in registers */
    float edge[SEQPAR__ARRAYS * 16], *at[SEQPAR__ARRAYS];
    int64_t i = 0;
    SEQPAR__UNROLL
    for (int j = 0; j < SEQPAR__SUMS; j++)
        if (sums) own[j] = sums[j];
    /* without sums an element may go to any lane: the loop in steps of 16 takes all */
    for (; sums && i + 64 <= n; i += 64) seqpar__vectors(step, k, own, arrays, x, i, 64);
    for (; i + 16 <= n; i += 16) seqpar__vectors(step, k, own, arrays, x, i, 16);
    if (i < n) {
        for (int j = 0; j < 16 * arrays; j++)
            edge[j] = j % 16 < n - i ? x[j / 16][i + j % 16] : fill;
        for (int j = 0; j < arrays; j++) at[j] = edge + 16 * j;
        seqpar__vectors(step, k, own, arrays, at, 0, 16);
        for (int j = 0; j < written; j++)
            memcpy(x[j] + i, at[j], (size_t)(n - i) * sizeof *edge);
    }
    SEQPAR__UNROLL
    for (int j = 0; j < SEQPAR__SUMS; j++)
        if (sums) sums[j] = own[j];
}

/* The total of sums[which], sums[3 + which], ... The tree adds partial sums j and j + 32, then
   j and j + 16, and so on. */
static float seqpar__sum_of(const seqpar__v *sums, int which) {
    seqpar__v total[64 / SEQPAR__VL];
    float lane[SEQPAR__VL];
    for (int u = 0; u < 64 / SEQPAR__VL; u++) total[u] = sums[3 * u + which];
    for (int w = 32 / SEQPAR__VL; w; w /= 2)
        for (int u = 0; u < w; u++) total[u] = total[u] + total[u + w];
    seqpar__vstore(lane, total[0]);
    for (int w = SEQPAR__VL / 2; w; w /= 2)
        for (int u = 0; u < w; u++) lane[u] += lane[u + w];
    return lane[0];
}

static void seqpar__zero_sums(seqpar__v *sums) {
    for (int u = 0; u < SEQPAR__SUMS; u++) sums[u] = seqpar__vsplat(0.0f);
}

SEQPAR__TEMPLATE void seqpar__dot_step(const seqpar__v *k, seqpar__v *sums, float *const *x) {
    (void)k;
    sums[0] = seqpar__vfma(seqpar__vload(x[0]), seqpar__vload(x[1]), sums[0]);
}

SEQPAR__TEMPLATE void seqpar__total_step(const seqpar__v *k, seqpar__v *sums, float *const *x) {
    (void)k;
    sums[0] = sums[0] + seqpar__vload(x[0]);
}

static float seqpar__dot(const float *a, const float *b, int64_t n) {
    float *x[2];
    seqpar__v sums[SEQPAR__SUMS];
    x[0] = (float *)a;
    x[1] = (float *)b;
    seqpar__zero_sums(sums);
    seqpar__each(seqpar__dot_step, NULL, sums, 2, 0, x, n, 0.0f);
    return seqpar__sum_of(sums, 0);
}

/* order does not matter to a maximum */
static float seqpar__highest(const float *a, int64_t n) {
    seqpar__v top[4];
    float lane[SEQPAR__VL], best = a[0];
    int64_t i = 0;
    for (int64_t j = 0; j < 4; j++) top[j] = seqpar__vsplat(best);
    for (; i + 4 * SEQPAR__VL <= n; i += 4 * SEQPAR__VL) {
        SEQPAR__UNROLL
        for (int64_t j = 0; j < 4; j++)
            top[j] = seqpar__vmax(seqpar__vload(a + i + j * SEQPAR__VL), top[j]);
    }
    seqpar__vstore(lane,
                   seqpar__vmax(seqpar__vmax(top[0], top[1]), seqpar__vmax(top[2], top[3])));
    for (int64_t j = 0; j < SEQPAR__VL; j++) best = lane[j] > best ? lane[j] : best;
    for (; i < n; i++) best = a[i] > best ? a[i] : best;
    return best;
}

#define SEQPAR__LOG2E 1.44269504088896341f
/* exp in fp32: 2^n exp(r), where exp(r) is a polynomial of degree 7. The error is about 1 ulp;
   the result is 0 below -87.3, and that of 88 above 88; exp(0) = 1. NaN gives NaN. */
static inline float seqpar__expf(float x) {
    float y = x < -87.3f ? -87.3f : x, t, n, r, p;
    uint32_t shift, bits;
    y = y > 88.0f ? 88.0f : y;
    /* adding 1.5 2^23 rounds to an integer, which is in the low bits of t */
    t = SEQPAR__FMAF(y, 1.44269504088896341f, 12582912.0f);
    n = t - 12582912.0f;
    r = SEQPAR__FMAF(n, -0.693359375f, y);
    r = SEQPAR__FMAF(n, 2.12194440e-4f, r);
    p = SEQPAR__FMAF(1.9875691500e-4f, r, 1.3981999507e-3f);
    p = SEQPAR__FMAF(p, r, 8.3334519073e-3f);
    p = SEQPAR__FMAF(p, r, 4.1665795894e-2f);
    p = SEQPAR__FMAF(p, r, 1.6666665459e-1f);
    p = SEQPAR__FMAF(p, r, 5.0000001201e-1f);
    p = SEQPAR__FMAF(p * r, r, r) + 1.0f;
    memcpy(&shift, &t, 4);
    memcpy(&bits, &p, 4);
    bits += shift << 23;
    memcpy(&p, &bits, 4);
    return x < -87.3f ? 0.0f : p;
}

#define SEQPAR__SIXTEENTHS \
    786432.0f /* 1.5 2^19: added to x, the low bits of the sum count sixteenths of x */
/* 2^(k/16 + r) in fp32 for t = 1.5 2^19 + k/16 and r in [-1/32, 1/32]: an entry of a table
   times a polynomial that is 1.7e-9 off. */
SEQPAR__TEMPLATE seqpar__v seqpar__vpow2_of(seqpar__v t, seqpar__v r) {
    seqpar__v s = seqpar__vpow2(t);
    seqpar__v p = seqpar__vfma(seqpar__vsplat(5.550410971e-2f), r,
                               seqpar__vsplat(2.402342856e-1f));
    p = seqpar__vfma(p, r, seqpar__vsplat(6.931471825e-1f)) * r;
    return seqpar__vfma(p, s, s);
}

/* 2^x in fp32 for x from -127 to 127.9 (seqpar__vexp2: for any x up to 127.9). The error is
   about 1 ulp, but a result below 2^-126 is right only in its magnitude. x = -127 gives 0, and
   x = 0 gives 1. NaN gives NaN. */
SEQPAR__TEMPLATE seqpar__v seqpar__vexp2_unclamped(seqpar__v x) {
    seqpar__v magic = seqpar__vsplat(SEQPAR__SIXTEENTHS), t = x + magic;
    return seqpar__vpow2_of(t, x - (t - magic));
}

SEQPAR__TEMPLATE seqpar__v seqpar__vexp2(seqpar__v x) {
    return seqpar__vexp2_unclamped(seqpar__vmax(seqpar__vsplat(-127.0f), x));
}

/* exp in fp32 by vectors, for x in [-88, 88]: 2^n exp(r), where exp(r) is a polynomial of
   degree 6 that is 3e-9 off. The error is about 1 ulp; the result is 0 below -87.7; exp(0) = 1.
   NaN gives NaN. */
SEQPAR__TEMPLATE seqpar__v seqpar__vexp(seqpar__v x) {
    seqpar__v magic = seqpar__vsplat(12583039.0f);
    seqpar__v t = seqpar__vfma(x, seqpar__vsplat(SEQPAR__LOG2E), magic);
    seqpar__v n = t - magic, r, p;
    r = seqpar__vfma(n, seqpar__vsplat(-0.693359375f), x);
    r = seqpar__vfma(n, seqpar__vsplat(2.12194440e-4f), r);
    p = seqpar__vfma(seqpar__vsplat(1.381453994e-3f), r, seqpar__vsplat(8.368745127e-3f));
    p = seqpar__vfma(p, r, seqpar__vsplat(4.166839079e-2f));
    p = seqpar__vfma(p, r, seqpar__vsplat(1.666652040e-1f));
    p = seqpar__vfma(p, r, seqpar__vsplat(4.999999343e-1f));
    p = seqpar__vfma(p, r, seqpar__vsplat(1.0f));
    p = seqpar__vfma(p, r, seqpar__vsplat(1.0f));
    return p * seqpar__vexponent(t);
}

/* tanh in fp32: odd polynomial to x^11 below 0.6 (3e-9), 1 - 2 / (exp(2x) + 1) above. */
static inline float seqpar__tanhf(float x) {
    float a = x < 0 ? -x : x, z = x * x, p, far;
    far = 1.0f - 2.0f / (seqpar__expf(2.0f * (a < 10.0f ? a : 10.0f)) + 1.0f);
    p = SEQPAR__FMAF(-0.0058951515f, z, 0.0207959657f);
    p = SEQPAR__FMAF(p, z, -0.0537838284f);
    p = SEQPAR__FMAF(p, z, 0.133319241f);
    p = SEQPAR__FMAF(p, z, -0.33333298f);
    p = SEQPAR__FMAF(x * z, p, x);
    if (x < 0) far = -far;
    return a >= 0.6f ? far : p;
}

#ifndef SEQPAR__ADD_JOB
#define SEQPAR__ADD_JOB 65536
#endif
static void seqpar__cpu_add_job(void *user, int64_t i, char *scratch) {
    const seqpar_add_args *a = (const seqpar_add_args *)user;
    int64_t begin = i * SEQPAR__ADD_JOB, end = SEQPAR__MIN(a->count, begin + SEQPAR__ADD_JOB);
    (void)scratch;
    for (int64_t n = begin; n < end; n++)
        ((float *)a->y)[n] = ((const float *)a->a)[n] + ((const float *)a->b)[n];
}

SEQPAR__OP(seqpar__cpu_add, add,
           seqpar__parallel_runs(device, (a->count + SEQPAR__ADD_JOB - 1) / SEQPAR__ADD_JOB, 0,
                                 seqpar__cpu_add_job, (void *)a))

/* =============================================================================================
   >>tile  attention in tiles

   A leaf is computed in tiles of KT rows x QT columns. Columns are tokens of the task's piece
   (queries forward, keys backward), copied into panels once per job. Rows are tokens of the
   leaf (keys, or queries), read in place. So the lanes of a tile of scores are its columns, and
   the same tile, read by columns, is the left operand of the next product. Scores, and the m of
   a state, are stored times log2(e), so that 2^x replaces e^x. Tiles are counted from
   the start of their piece, so the contents of a tile do not depend on ranks.

       forward    rows keys, columns queries     S = K Q^T, P = 2^(S - m), o += P^T V
       backward   rows queries, columns keys     S = Q K^T, dP = dO V^T, dS = P (dP - delta),
                                                 dk += dS^T Q, dv += P^T dO, dq += dS K
   ========================================================================================== */

#ifndef SEQPAR__QT
#define SEQPAR__QT 32 /* a multiple of NR */
#endif
#ifndef SEQPAR__KT
#define SEQPAR__KT 128 /* a multiple of QT */
#endif

typedef struct seqpar__attn_tile {
    const seqpar_attn_args *args;
    const seqpar_attn_keys *keys; /* the key piece */
    const seqpar_piece *queries;  /* the query piece */
    int64_t key, key_count;       /* the tile's first key in its piece; how many */
    int64_t query, query_count;
    int64_t head, kv_head; /* query head among all heads; kv head within the step's range */
    /* the tile's queries see only keys in [key_low, key_high); key 0 is the tile's first */
    int64_t key_low, key_high;
    int64_t query_low, query_high; /* all queries that see a key are in this range */
    int64_t pairs;                 /* visible pairs of all tiles so far */
    /* 1: not all pairs are visible; query r sees keys [low[r], high[r]) */
    int masked;
    /* fresh: nothing has been added to o or dq yet; fresh_keys: nothing to dk and dv yet */
    int fresh, fresh_keys;
    float low[SEQPAR__KT], high[SEQPAR__KT], lse[SEQPAR__KT], delta[SEQPAR__KT];
    float *columns[2], *rows[3]; /* packed operands */
    float *wide[3];              /* rows of bf16, widened */
    seqpar__attn_job *job;
    /* s (KT, QT): scores, later probabilities; z (KT, QT): dropout factors; ds: gradients of
       scores, in rows of KT */
    float *s, *z, *ds;
} seqpar__attn_tile;

/* The right operand of a product: tokens are rows, cut into panels of NR columns. row, panel:
   floats from row to row, from panel to panel. */
typedef struct seqpar__operand {
    const float *at;
    int64_t row, panel;
} seqpar__operand;

static int64_t seqpar__round_up(int64_t x, int64_t unit) {
    return (x + unit - 1) / unit * unit;
}
static int64_t seqpar__attn_column_floats(const seqpar_attn_args *a) {
    return seqpar__round_up(seqpar__attn_rows_max(a), SEQPAR__QT) * a->head_dim;
}

/* Floats in a buffer of widened rows: those of a tile or of a task, whichever are more. */
static int64_t seqpar__attn_wide(const seqpar_attn_args *a) {
    return SEQPAR__MAX((int64_t)SEQPAR__KT, seqpar__attn_rows_max(a)) * a->head_dim;
}

/* Bytes of scratch: two column operands, three row operands, three tiles and, unless storage is
   fp32, three buffers of widened rows. */
static int64_t seqpar__attn_scratch(const seqpar_device *device, const seqpar_attn_args *a) {
    int64_t wide = seqpar__round_up(a->head_dim, SEQPAR__NR);
    int64_t widened = device->storage == SEQPAR_DTYPE_F32 ? 0 : 3 * seqpar__attn_wide(a);
    return (2 * seqpar__attn_column_floats(a) +
            (2 * SEQPAR__KT + seqpar__attn_rows_max(a)) * wide +
            SEQPAR__KT * (2 * SEQPAR__QT + SEQPAR__KT) + widened) *
               (int64_t)sizeof(float) +
           64;
}

/* Cuts the scratch of the job, from a multiple of 64 bytes on, into the arrays of a tile. */
static seqpar__attn_tile seqpar__tile_new(seqpar__attn_job *j, const seqpar_attn_keys *keys,
                                          const seqpar_piece *queries) {
    const seqpar_attn_args *a = j->args;
    int64_t row_floats = SEQPAR__KT * seqpar__round_up(a->head_dim, SEQPAR__NR);
    seqpar__attn_tile t;
    t.args = a;
    t.keys = keys;
    t.queries = queries;
    t.job = j;
    t.key = t.query = t.pairs = 0;
    t.fresh = t.fresh_keys = 0;
    t.s = (float *)(((uintptr_t)j->scratch + 63) & ~(uintptr_t)63);
    t.z = t.s + SEQPAR__KT * SEQPAR__QT;
    t.ds = t.z + SEQPAR__KT * SEQPAR__QT;
    t.rows[0] = t.ds + SEQPAR__KT * SEQPAR__KT;
    t.rows[1] = t.rows[0] + row_floats;
    t.columns[0] = t.rows[1] + row_floats;
    t.columns[1] = t.columns[0] + seqpar__attn_column_floats(a);
    t.rows[2] = t.columns[1] + seqpar__attn_column_floats(a);
    t.wide[0] = t.rows[2] +
                seqpar__attn_rows_max(a) * seqpar__round_up(a->head_dim, SEQPAR__NR);
    t.wide[1] = t.wide[0] + seqpar__attn_wide(a);
    t.wide[2] = t.wide[1] + seqpar__attn_wide(a);
    return t;
}

/* Rows of head_dim floats, `stride` floats from row to row. */
typedef struct seqpar__floats {
    const float *at;
    int64_t stride;
} seqpar__floats;

/* `count` rows of one of `heads` heads. fp32 rows are read in place; bf16 rows are widened into
   the buffer wide[which]. */
static seqpar__floats seqpar__tile_floats(const seqpar__attn_tile *t, const void *base,
                                          int64_t row, int64_t heads, int64_t head,
                                          int64_t count, int which) {
    int64_t d = t->args->head_dim;
    const uint16_t *half = (const uint16_t *)base + (row * heads + head) * d;
    seqpar__floats f;
    f.at = (const float *)base + (row * heads + head) * d;
    f.stride = heads * d;
    if (t->job->device->storage == SEQPAR_DTYPE_F32) return f;
    for (int64_t r = 0; r < count; r++)
        seqpar__bf16_widen(t->wide[which] + r * d, half + r * heads * d, d);
    f.at = t->wide[which];
    f.stride = d;
    return f;
}

static seqpar__floats seqpar__tile_keys(const seqpar__attn_tile *t, const void *base,
                                        int64_t piece_row, int64_t count, int which) {
    return seqpar__tile_floats(t, base, piece_row + t->key, t->args->head_count, t->kv_head,
                               count, which);
}

static seqpar__floats seqpar__tile_queries(const seqpar__attn_tile *t, const void *base,
                                           int64_t count, int which) {
    return seqpar__tile_floats(t, base, t->queries->local + t->query, t->args->heads, t->head,
                               count, which);
}

/* Packs the task's tokens as columns, times a factor; the last tile is padded with zeros. */
static void seqpar__panel_columns(float *to, seqpar__floats from, int64_t count, int64_t d,
                                  double factor) {
    int64_t whole = count / SEQPAR__QT * SEQPAR__QT;
    if (whole < count) memset(to + whole * d, 0, (size_t)(SEQPAR__QT * d) * sizeof *to);
    seqpar__panel_fill(to, from.at, 1, from.stride, d, count, (float)factor);
}

/* The factor that turns q . k into a score in base 2 or, with a softcap, into the argument of
   tanh. */
static double seqpar__score_factor(const seqpar_attn_args *a) {
    return a->softcap > 0 ? a->scale / a->softcap : a->scale * (double)SEQPAR__LOG2E;
}

/* Rows are read in place, unless the last panel would reach beyond the end of a row: then they
   are packed. */
static seqpar__operand seqpar__row_operand(float *packed, seqpar__floats from, int64_t count,
                                           int64_t d) {
    seqpar__operand o;
    if (d % SEQPAR__NR == 0) {
        o.at = from.at;
        o.row = from.stride;
        o.panel = SEQPAR__NR;
        return o;
    }
    seqpar__panel_fill(packed, from.at, from.stride, 1, count, d, 1.0f);
    o.at = packed;
    o.row = SEQPAR__NR;
    o.panel = count * SEQPAR__NR;
    return o;
}

/* Finds which keys of the tile each query sees, and counts the visible pairs. */
static void seqpar__tile_ranges(seqpar__attn_tile *t) {
    const seqpar_attn_args *a = t->args;
    const int32_t *begin = a->visible_begin + t->queries->local + t->query;
    const int32_t *end = a->visible_end + t->queries->local + t->query;
    int32_t latest = begin[0], earliest = end[0];
    int64_t first, last;
    for (int64_t r = 1; r < t->query_count; r++) {
        latest = SEQPAR__MAX(latest, begin[r]);
        earliest = SEQPAR__MIN(earliest, end[r]);
    }
    t->key_low = t->query_low = 0;
    t->key_high = t->key_count;
    t->query_high = t->query_count;
    t->masked = latest > t->keys->start + t->key * t->keys->stride ||
                earliest <= t->keys->start + (t->key + t->key_count - 1) * t->keys->stride;
    if (!t->masked) {
        t->pairs += t->query_count * t->key_count;
        return;
    }
    t->key_low = t->key_count;
    t->query_low = t->query_count;
    t->key_high = t->query_high = 0;
    for (int64_t r = 0; r < SEQPAR__KT; r++) t->low[r] = t->high[r] = 0.0f;
    for (int64_t r = 0; r < t->query_count; r++) {
        if (!seqpar__visible(a, t->queries->local + t->query + r, t->keys, &first, &last))
            continue;
        first = SEQPAR__MAX(first - t->key, 0);
        last = SEQPAR__MIN(last - t->key, t->key_count);
        if (first >= last) continue;
        t->low[r] = (float)first;
        t->high[r] = (float)last;
        t->key_low = SEQPAR__MIN(t->key_low, first);
        t->key_high = SEQPAR__MAX(t->key_high, last);
        t->query_low = SEQPAR__MIN(t->query_low, r);
        t->query_high = r + 1;
        t->pairs += last - first;
    }
}

#ifdef __GNUC__
#define SEQPAR__FETCH(p) __builtin_prefetch(p, 0, 2)
#else
#define SEQPAR__FETCH(p) ((void)(p))
#endif

/* If ranks share a machine, other ranks run between two calls of one rank and fill the cache
   with their own data. So a job lists the memory that it will combine with, that the next job
   will pack, and that the next job will write. Its kernel prefetches these cache lines
   between products, a few at a time: if it requested more at once, it would have to wait. */
static void seqpar__prefetch_add(seqpar__attn_job *j, const void *at, int64_t bytes,
                                 int64_t stride, int64_t rows) {
    int n = j->prefetch_count;
    if (n == 8 || rows == 0) return;
    j->prefetch[n].at = (const char *)at;
    j->prefetch[n].bytes = bytes;
    j->prefetch[n].stride = stride;
    j->prefetch[n].rows = rows;
    j->prefetch_count++;
}

static void seqpar__prefetch_fetch(seqpar__attn_job *j) {
    int64_t lines = 0;
    while (j->prefetch_count && lines < 16) {
        int n = j->prefetch_count - 1;
        for (int64_t b = 0; b < j->prefetch[n].bytes; b += 64, lines++)
            SEQPAR__FETCH(j->prefetch[n].at + b);
        j->prefetch[n].at += j->prefetch[n].stride;
        if (--j->prefetch[n].rows == 0) j->prefetch_count--;
    }
}

static void seqpar__prefetch_next(seqpar__attn_job *j, const seqpar__attn_job *next) {
    const seqpar_attn_args *a = next->args;
    const seqpar_attn_keys *keys = &a->k_pieces[next->task->piece];
    int64_t row = a->head_dim * seqpar_dtype_bytes(j->device->storage);
    if (j->kernel->kind == SEQPAR__FOLD_DKV) {
        seqpar__prefetch_add(
            j, (const char *)a->v + (keys->v_row * a->head_count + next->head) * row, row,
            a->head_count * row, keys->count);
        seqpar__prefetch_add(
            j, (const char *)a->k + (keys->k_row * a->head_count + next->head) * row, row,
            a->head_count * row, keys->count);
        return;
    }
    seqpar__prefetch_add(j, (const char *)a->q + (next->local * a->heads + next->head) * row,
                         row, a->heads * row, next->count);
}

/* Lists a stored value for prefetching; it is contiguous. */
static void seqpar__prefetch_value(seqpar__attn_job *j, const char *at, int64_t count) {
    int64_t run = 1024;
    seqpar__prefetch_add(j, at, run, run,
                         seqpar__attn_value(j, count) * (int64_t)sizeof(float) / run);
}

static void seqpar__prefetch_loads(seqpar__attn_job *j) {
    for (int64_t i = j->task->program_count - 1; i >= 0; i--)
        if (j->task->program[i].op == SEQPAR_FOLD_LOAD)
            seqpar__prefetch_value(j, seqpar__attn_stored(j, j->task->program[i].index),
                                   j->count);
}

/* Lists the memory that the next job will read, and the memory that it will write, because a
   write also fetches its line. With next NULL, lists the stored values that this job will load.
   The driver makes that call last, and the list is fetched from its end: these come first. */
static void seqpar__cpu_prefetch(seqpar__attn_job *j, const seqpar__attn_job *next,
                                 const seqpar__machine *machine) {
    const seqpar_fold_op *program;
    if (!next) {
        seqpar__prefetch_loads(j);
        return;
    }
    program = next->task->program;
    for (int64_t i = next->task->program_count - 1; i >= 0; i--) {
        const char *home = program[i].op == SEQPAR_FOLD_LEAF
                               ? seqpar__machine_home(machine, program + i,
                                                      next->task->program_count - i)
                               : NULL;
        if (home) seqpar__prefetch_value(j, home, next->count);
    }
    seqpar__prefetch_next(j, next);
}

/* Computes rows first .. last of the tile s: each row token times QT column tokens. */
static void seqpar__tile_products(const seqpar__attn_tile *t, float *s, int64_t ld,
                                  seqpar__floats rows, const float *columns, int64_t first,
                                  int64_t last) {
    int64_t d = t->args->head_dim, n;
    for (int64_t c = 0; c < SEQPAR__QT; c += SEQPAR__NR)
        for (int64_t r = first; r < last; r += n) {
            n = seqpar__tile_rows(last - r);
            seqpar__prefetch_fetch(t->job);
            seqpar__tiles_rows(n, d, rows.at + r * rows.stride, rows.stride, columns + c * d,
                               SEQPAR__NR, s + r * ld + c, ld, 0, NULL);
        }
}

static const float seqpar__ones[32] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* to (count, d) = keep * to + s . b; with keep NULL, s . b alone. The depth runs over first ..
   last, rising. Element (i, k) of s is s[i * row + k * step]: the tile is read by columns if
   row is 1, by rows if step is 1. */
static void seqpar__tile_add(float *to, int64_t d, const float *s, int64_t row, int64_t step,
                             seqpar__operand b, int64_t count, int64_t first, int64_t last,
                             const float *keep) {
    float edge[SEQPAR__QT * SEQPAR__NR];
    int64_t i;
    s += first * step;
    b.at += first * b.row;
    for (i = 0; i + SEQPAR__NR <= d; i += SEQPAR__NR, b.at += b.panel)
        if (step == 1)
            seqpar__tiles_rows(count, last - first, s, row, b.at, b.row, to + i, d, 0, keep);
        else
            seqpar__tiles_columns(count, last - first, s, step, b.at, b.row, to + i, d, 0,
                                  keep);
    if (i == d) return;
    memset(edge, 0, sizeof edge);
    for (int64_t x = 0; keep && x < count; x++)
        memcpy(edge + x * SEQPAR__NR, to + x * d + i, (size_t)(d - i) * sizeof *to);
    if (step == 1)
        seqpar__tiles_rows(count, last - first, s, row, b.at, b.row, edge, SEQPAR__NR, 0, keep);
    else
        seqpar__tiles_columns(count, last - first, s, step, b.at, b.row, edge, SEQPAR__NR, 0,
                              keep);
    for (int64_t x = 0; x < count; x++)
        memcpy(to + x * d + i, edge + x * SEQPAR__NR, (size_t)(d - i) * sizeof *to);
}

/* Softcap: products q.k scale / cap become scores. */
static void seqpar__tile_cap(const seqpar__attn_tile *t, int64_t first, int64_t last) {
    float cap = (float)t->args->softcap * SEQPAR__LOG2E;
    for (int64_t n = first * SEQPAR__QT; n < last * SEQPAR__QT; n++)
        t->s[n] = cap * seqpar__tanhf(t->s[n]);
}

/* Computes the dropout factors of the tile; they are 0 for pairs that are not visible. The rows
   of the tile are keys (forward) or queries (backward). */
static void seqpar__tile_dropout(const seqpar__attn_tile *t, int rows_are_queries) {
    const seqpar_attn_args *a = t->args;
    memset(t->z, 0, SEQPAR__KT * SEQPAR__QT * sizeof *t->z);
    for (int64_t q = 0; q < t->query_count; q++)
        for (int64_t k = t->masked ? (int64_t)t->low[q] : 0;
             k < (t->masked ? (int64_t)t->high[q] : t->key_count); k++)
            t->z[rows_are_queries ? q * SEQPAR__QT + k : k * SEQPAR__QT + q] =
                (float)seqpar__dropout(a, t->queries, t->query + q, t->head,
                                       t->keys->start + (t->key + k) * t->keys->stride);
}

static void seqpar__tile_times(float *s, int64_t ld, const float *z, int64_t first,
                               int64_t last) {
    for (int64_t n = first; n < last; n++)
        for (int64_t i = 0; i < SEQPAR__QT; i++) s[n * ld + i] *= z[n * SEQPAR__QT + i];
}

/* x where the query sees the key, else `other` */
SEQPAR__TEMPLATE seqpar__v seqpar__seen(seqpar__v x, seqpar__v key, seqpar__v low,
                                        seqpar__v high, seqpar__v other) {
    return seqpar__vless(key, low, other, seqpar__vless(key, high, x, other));
}

/* NR columns of scores become probabilities, relative to the running maximum m. The earlier o
   is to be multiplied by `factor`; l is multiplied by it here. A sum over keys is a sum of sums
   over 16 keys each. A NaN score is never the maximum, but its sum becomes NaN. */
SEQPAR__TEMPLATE void seqpar__softmax_panel(const int masked, const seqpar__attn_tile *t,
                                            int64_t c, float *m, float *l, float *factor) {
    const seqpar__v zero = seqpar__vsplat(0.0f), least = seqpar__vsplat((float)-HUGE_VAL);
    seqpar__v low[2], high[2], top[2], sum[2], part[2], x;
    const int64_t first = t->key_low, last = t->key_high;
    float *const scores = t->s + c;
    for (int i = 0; i < 2; i++) {
        low[i] = masked ? seqpar__vload(t->low + c + i * SEQPAR__VL) : zero;
        high[i] = masked ? seqpar__vload(t->high + c + i * SEQPAR__VL) : zero;
        top[i] = seqpar__vload(m + c + i * SEQPAR__VL);
        sum[i] = zero;
    }
    for (int64_t n = first; n < last; n++) {
        SEQPAR__UNROLL
        for (int i = 0; i < 2; i++) {
            x = seqpar__vload(scores + n * SEQPAR__QT + i * SEQPAR__VL);
            if (masked) x = seqpar__seen(x, seqpar__vsplat((float)n), low[i], high[i], least);
            top[i] = seqpar__vmax(x, top[i]);
        }
    }
    for (int64_t block = first / 16 * 16; block < last; block += 16) {
        part[0] = part[1] = zero;
        for (int64_t n = SEQPAR__MAX(block, first); n < SEQPAR__MIN(block + 16, last); n++) {
            SEQPAR__UNROLL
            for (int i = 0; i < 2; i++) {
                float *s = scores + n * SEQPAR__QT + i * SEQPAR__VL;
                x = seqpar__vexp2(seqpar__vload(s) - top[i]);
                if (masked)
                    x = seqpar__seen(x, seqpar__vsplat((float)n), low[i], high[i], zero);
                seqpar__vstore(s, x);
                part[i] = part[i] + x;
            }
        }
        sum[0] = sum[0] + part[0];
        sum[1] = sum[1] + part[1];
    }
    for (int i = 0; i < 2; i++) {
        seqpar__v before = seqpar__vload(l + c + i * SEQPAR__VL);
        x = seqpar__vless(zero, before,
                          seqpar__vexp2(seqpar__vload(m + c + i * SEQPAR__VL) - top[i]), zero);
        seqpar__vstore(factor + c + i * SEQPAR__VL, x);
        seqpar__vstore(l + c + i * SEQPAR__VL, before * x + sum[i]);
        seqpar__vstore(m + c + i * SEQPAR__VL, top[i]);
    }
}

static void seqpar__tile_softmax(const seqpar__attn_tile *t, float *m, float *l,
                                 float *factor) {
    float tops[SEQPAR__QT] = {0}, sums[SEQPAR__QT] = {0};
    size_t bytes = (size_t)t->query_count * sizeof *m;
    memcpy(tops, m, bytes);
    memcpy(sums, l, bytes);
    for (int64_t c = 0; c < SEQPAR__QT; c += SEQPAR__NR)
        if (t->masked)
            seqpar__softmax_panel(1, t, c, tops, sums, factor);
        else
            seqpar__softmax_panel(0, t, c, tops, sums, factor);
    memcpy(m, tops, bytes);
    memcpy(l, sums, bytes);
}

static void seqpar__cpu_forward_tile(seqpar__attn_tile *t, seqpar__floats keys,
                                     seqpar__operand values, float *o, float *m, float *l) {
    const seqpar_attn_args *a = t->args;
    int64_t d = a->head_dim;
    float factor[SEQPAR__QT];
    seqpar__tile_ranges(t);
    if (t->key_low >= t->key_high) {
        if (t->fresh) memset(o, 0, (size_t)(t->query_count * d) * sizeof *o);
        return;
    }
    seqpar__tile_products(t, t->s, SEQPAR__QT, keys, t->columns[0] + t->query * d, t->key_low,
                          t->key_high);
    if (a->softcap > 0) seqpar__tile_cap(t, t->key_low, t->key_high);
    seqpar__tile_softmax(t, m, l, factor);
    if (a->dropout > 0) {
        seqpar__tile_dropout(t, 0);
        seqpar__tile_times(t->s, SEQPAR__QT, t->z, t->key_low, t->key_high);
    }
    seqpar__tile_add(o, d, t->s, 1, SEQPAR__QT, values, t->query_count, t->key_low, t->key_high,
                     t->fresh ? NULL : factor);
}

/* One leaf: the block of a query piece and a key piece, tile by tile. Keys are the outer loop,
   so that a tile of values is laid out once for all queries. */
static void seqpar__cpu_forward_leaf(void *user, void *value, int64_t index, int extend) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    const seqpar_attn_args *a = j->args;
    int64_t d = a->head_dim;
    float *o = (float *)value, *m = o + j->count * d, *l = m + j->count;
    seqpar__attn_tile t = seqpar__tile_new(j, &a->k_pieces[index],
                                           &a->q_pieces[j->task->piece]);
    t.head = j->head;
    t.kv_head = j->head / (a->heads / a->kv_heads) - a->head_begin;
    for (int64_t r = 0; r < j->count && !extend; r++) {
        m[r] = (float)-HUGE_VAL;
        l[r] = 0.0f;
    }
    if (!j->packed++)
        seqpar__panel_columns(t.columns[0], seqpar__tile_queries(&t, a->q, j->count, 0),
                              j->count, d, seqpar__score_factor(a));
    for (t.key = 0; t.key < t.keys->count; t.key += SEQPAR__KT) {
        seqpar__floats keys;
        seqpar__operand values;
        t.key_count = SEQPAR__MIN(SEQPAR__KT, t.keys->count - t.key);
        t.fresh = !extend && t.key == 0;
        keys = seqpar__tile_keys(&t, a->k, t.keys->k_row, t.key_count, 0);
        values = seqpar__row_operand(t.rows[0],
                                     seqpar__tile_keys(&t, a->v, t.keys->v_row, t.key_count, 1),
                                     t.key_count, d);
        for (t.query = 0; t.query < j->count; t.query += SEQPAR__QT) {
            t.query_count = SEQPAR__MIN(SEQPAR__QT, j->count - t.query);
            seqpar__cpu_forward_tile(&t, keys, values, o + t.query * d, m + t.query,
                                     l + t.query);
        }
    }
    j->flops += 4 * d * t.pairs;
}

/* For up to QT rows of two states: computes the factors a and b by which o and l of the first
   and of the second state are multiplied before they are added, and the new maxima. These
   hold only for rows that have seen a key in both states. */
static void seqpar__state_factors(int64_t rows, const float *m, const float *m2, float *a,
                                  float *b, float *top) {
    for (int64_t c = 0; c < SEQPAR__QT; c++) {
        a[c] = c < rows ? m[c] : 0.0f;
        b[c] = c < rows ? m2[c] : 0.0f;
    }
    for (int64_t c = 0; c < SEQPAR__QT; c += SEQPAR__VL) {
        seqpar__v x = seqpar__vload(a + c), y = seqpar__vload(b + c), high = seqpar__vmax(x, y);
        seqpar__vstore(a + c, seqpar__vexp2(x - high));
        seqpar__vstore(b + c, seqpar__vexp2(y - high));
        seqpar__vstore(top + c, high);
    }
}

static void seqpar__cpu_state_combine(void *user, void *into, const void *other) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    int64_t d = j->args->head_dim, c;
    float *o = (float *)into, *m = o + j->count * d, *l = m + j->count, a[SEQPAR__QT];
    float b[SEQPAR__QT], top[SEQPAR__QT];
    const float *o2 = (const float *)other, *m2 = o2 + j->count * d, *l2 = m2 + j->count;
    for (int64_t r = 0; r < j->count; r++, o += d, o2 += d) {
        c = r % SEQPAR__QT;
        if (c == 0)
            seqpar__state_factors(SEQPAR__MIN(SEQPAR__QT, j->count - r), m + r, m2 + r, a, b,
                                  top);
        if (l2[r] == 0.0f) continue;
        if (l[r] == 0.0f) {
            memcpy(o, o2, (size_t)d * sizeof *o);
            m[r] = m2[r];
            l[r] = l2[r];
            continue;
        }
        l[r] = l[r] * a[c] + l2[r] * b[c];
        for (int64_t i = 0; i < d; i++) o[i] = o[i] * a[c] + o2[i] * b[c];
        m[r] = top[c];
    }
}

/* out = o / l and lse = m ln 2 + log l; a sink adds exp(sink - m ln 2) to l. A row that sees no
   key has out 0 and lse -inf; with a sink, its lse is the sink. */
static void seqpar__cpu_state_finish(seqpar__attn_job *j, void *value) {
    const seqpar_attn_args *a = j->args;
    int64_t d = a->head_dim;
    const float *o = (const float *)value, *m = o + j->count * d, *l = m + j->count;
    for (int64_t r = 0; r < j->count; r++) {
        int64_t at = ((j->local + r) * a->heads + j->head) * d;
        float *out = (float *)a->out + at;
        float *lse = (float *)a->lse + (j->local + r) * a->heads + j->head;
        int empty = l[r] == 0.0f;
        double top = (double)m[r] * 0.693147180559945309;
        float total = l[r], factor = 1.0f;
        if (a->sinks) { /* one more score, without a value */
            double sink = (double)((const float *)a->sinks)[j->head], old = top;
            top = !empty && (old > sink || old != old) ? old : sink;
            factor = empty ? 0.0f : seqpar__expf((float)(old - top));
            total = l[r] * factor + seqpar__expf((float)(sink - top));
        }
        factor = empty ? 0.0f : factor / total;
        if (j->device->storage == SEQPAR_DTYPE_F32)
            for (int64_t i = 0; i < d; i++) out[i] = o[r * d + i] * factor;
        else
            for (int64_t i = 0; i < d; i++)
                ((uint16_t *)a->out)[at + i] = seqpar_bf16_from_float(o[r * d + i] * factor);
        *lse = empty && !a->sinks ? (float)-HUGE_VAL : (float)(top + seqpar_log((double)total));
    }
}

/* lse and delta of the tile's queries, delta times the scale */
static void seqpar__tile_statistics(seqpar__attn_tile *t) {
    const seqpar_attn_args *a = t->args;
    int64_t at = (t->queries->local + t->query) * a->heads + t->head;
    for (int64_t r = 0; r < SEQPAR__KT; r++) t->lse[r] = t->delta[r] = 0.0f;
    for (int64_t r = 0; r < t->query_count; r++) {
        t->lse[r] = ((const float *)a->lse)[at + r * a->heads];
        t->delta[r] = ((const float *)a->delta)[at + r * a->heads] * (float)a->scale;
    }
}

/* NR columns of a tile. s becomes p = exp(score - lse). dp becomes ds = p (dp - delta), where
   dp and delta are already multiplied by scale. With a softcap, ds is also multiplied by the
   slope of the cap, 1 - (score / cap)^2. Masked elements become 0. */
SEQPAR__TEMPLATE void seqpar__backward_panel(const int masked, const seqpar__attn_tile *t,
                                             float *gradients, int64_t c) {
    const float cap = (float)(1.0 / (t->args->softcap * (double)SEQPAR__LOG2E));
    const seqpar__v zero = seqpar__vsplat(0.0f), unit = seqpar__vsplat(-SEQPAR__LOG2E);
    const int capped = t->args->softcap > 0;
    float number[SEQPAR__QT];
    for (int64_t i = 0; i < SEQPAR__QT; i++) number[i] = (float)i;
    for (int64_t n = t->query_low; n < t->query_high; n++) {
        SEQPAR__UNROLL
        for (int64_t i = c; i < c + SEQPAR__NR; i += SEQPAR__VL) {
            float *s = t->s + n * SEQPAR__QT + i, *dp = gradients + n * SEQPAR__KT + i;
            seqpar__v score = seqpar__vload(s);
            seqpar__v p = seqpar__vexp2(seqpar__vfma(seqpar__vsplat(t->lse[n]), unit, score));
            seqpar__v ds = p * (seqpar__vload(dp) - seqpar__vsplat(t->delta[n]));
            if (capped) {
                seqpar__v x = score * seqpar__vsplat(cap);
                ds = ds * (seqpar__vsplat(1.0f) - x * x);
            }
            if (masked) {
                p = seqpar__seen(p, seqpar__vload(number + i), seqpar__vsplat(t->low[n]),
                                 seqpar__vsplat(t->high[n]), zero);
                ds = seqpar__seen(ds, seqpar__vload(number + i), seqpar__vsplat(t->low[n]),
                                  seqpar__vsplat(t->high[n]), zero);
            }
            seqpar__vstore(s, p);
            seqpar__vstore(dp, ds);
        }
    }
}

/* Products q.k (t->s) and dout.v (ds) become probabilities and gradients of scores. With
   dropout factors z, p becomes z p at the end, as ds is computed from p without z. */
static void seqpar__tile_backward(const seqpar__attn_tile *t, float *ds) {
    int64_t first = t->query_low, last = t->query_high;
    if (t->args->softcap > 0) seqpar__tile_cap(t, first, last);
    if (t->args->dropout > 0) {
        seqpar__tile_dropout(t, 1);
        seqpar__tile_times(ds, SEQPAR__KT, t->z, first, last);
    }
    for (int64_t c = 0; c < SEQPAR__QT; c += SEQPAR__NR)
        if (t->masked)
            seqpar__backward_panel(1, t, ds, c);
        else
            seqpar__backward_panel(0, t, ds, c);
    if (t->args->dropout > 0) seqpar__tile_times(t->s, SEQPAR__QT, t->z, first, last);
}

/* q and dout of a tile's queries. The _depth fields are right operands: q_depth and dout_depth
   of the products that sum over these queries, k_depth of the one that sums over keys. */
typedef struct seqpar__backward_rows {
    seqpar__floats q, dout;
    seqpar__operand q_depth, dout_depth, k_depth;
} seqpar__backward_rows;

/* Up to KT queries and QT keys. dk += ds^T q, dv += p^T dout: both products sum over queries,
   in rising order. */
static void seqpar__backward_tile(const seqpar__attn_tile *t, float *ds,
                                  const seqpar__backward_rows *of, float *dk, float *dv) {
    int64_t d = t->args->head_dim;
    const float *keep = t->fresh_keys ? NULL : seqpar__ones;
    seqpar__tile_products(t, t->s, SEQPAR__QT, of->q, t->columns[0] + t->key * d, t->query_low,
                          t->query_high);
    seqpar__tile_products(t, ds, SEQPAR__KT, of->dout, t->columns[1] + t->key * d, t->query_low,
                          t->query_high);
    seqpar__tile_backward(t, ds);
    seqpar__tile_add(dk + t->key * d, d, ds, 1, SEQPAR__KT, of->q_depth, t->key_count,
                     t->query_low, t->query_high, keep);
    seqpar__tile_add(dv + t->key * d, d, t->s, 1, SEQPAR__QT, of->dout_depth, t->key_count,
                     t->query_low, t->query_high, keep);
}

/* A tile without a visible pair adds zeros. The addition is not skipped: it turns a sum of -0
   into 0, as combining with a leaf of zeros does. */
static void seqpar__add_nothing(float *to, int64_t count, int fresh) {
    if (fresh)
        memset(to, 0, (size_t)count * sizeof *to);
    else
        for (int64_t i = 0; i < count; i++) to[i] += 0.0f;
}

/* Up to KT queries and KT keys, tile by tile. The tiles store their ds side by side. At the end
   dq += ds k, which sums over keys in rising order. */
static void seqpar__backward_tiles(seqpar__attn_tile *t, const seqpar__backward_rows *of,
                                   float *dq, float *dk, float *dv) {
    seqpar__operand k = of->k_depth;
    int64_t begin = t->key;
    int64_t end = SEQPAR__MIN(begin + SEQPAR__KT, t->keys->count);
    int64_t first = SEQPAR__KT, last = 0, d = t->args->head_dim;
    const int64_t whole = SEQPAR__QT / SEQPAR__MR * SEQPAR__MR; /* rows of whole tiles */
    for (; t->key < end; t->key += SEQPAR__QT) {
        float *ds = t->ds + (t->key - begin);
        t->key_count = SEQPAR__MIN(SEQPAR__QT, end - t->key);
        seqpar__tile_ranges(t);
        for (int64_t r = 0; t->masked && r < t->query_count; r++)
            memset(ds + r * SEQPAR__KT, 0, SEQPAR__QT * sizeof *ds);
        if (t->query_low >= t->query_high) {
            seqpar__add_nothing(dk + t->key * d, t->key_count * d, t->fresh_keys);
            seqpar__add_nothing(dv + t->key * d, t->key_count * d, t->fresh_keys);
            continue;
        }
        first = SEQPAR__MIN(first, t->key - begin);
        last = t->key - begin + t->key_count;
        seqpar__backward_tile(t, ds, of, dk, dv);
    }
    t->key = begin;
    k.at += begin * k.row;
    if (first >= last) seqpar__add_nothing(dq, t->query_count * d, t->fresh);
    for (int64_t r = 0; first < last && r < t->query_count; r += whole)
        seqpar__tile_add(dq + r * d, d, t->ds + r * SEQPAR__KT, SEQPAR__KT, 1, k,
                         SEQPAR__MIN(t->query_count - r, whole), first, last,
                         t->fresh ? NULL : seqpar__ones);
}

/* Computes a leaf of dq, and adds the contribution of its queries to dk and dv of the current
   keys. */
static void seqpar__cpu_backward_leaf(void *user, void *value, int64_t index, int extend) {
    seqpar__attn_job *j = (seqpar__attn_job *)user, *keys = j->keys;
    const seqpar_attn_args *a = j->args;
    int64_t d = a->head_dim;
    float *dq = (float *)value, *dk = (float *)keys->gradients, *dv = dk + keys->count * d;
    seqpar__attn_tile t = seqpar__tile_new(keys, &a->k_pieces[index],
                                           &a->q_pieces[j->task->piece]);
    seqpar__backward_rows of;
    seqpar__floats k;
    t.head = j->head;
    t.kv_head = keys->head;
    k = seqpar__tile_keys(&t, a->k, t.keys->k_row, keys->count, 2);
    if (!keys->packed++) {
        seqpar__panel_columns(t.columns[0], k, keys->count, d, seqpar__score_factor(a));
        seqpar__panel_columns(t.columns[1],
                              seqpar__tile_keys(&t, a->v, t.keys->v_row, keys->count, 1),
                              keys->count, d, a->scale);
    }
    of.k_depth = seqpar__row_operand(t.rows[2], k, keys->count, d);
    for (t.query = 0; t.query < j->count; t.query += SEQPAR__KT) {
        t.query_count = SEQPAR__MIN(SEQPAR__KT, j->count - t.query);
        of.q = seqpar__tile_queries(&t, a->q, t.query_count, 0);
        of.dout = seqpar__tile_queries(&t, a->dout, t.query_count, 1);
        of.q_depth = seqpar__row_operand(t.rows[0], of.q, t.query_count, d);
        of.dout_depth = seqpar__row_operand(t.rows[1], of.dout, t.query_count, d);
        seqpar__tile_statistics(&t);
        t.fresh_keys = keys->fresh && t.query == 0;
        for (t.key = 0; t.key < keys->count; t.key += SEQPAR__KT) {
            t.fresh = !extend && t.key == 0;
            seqpar__backward_tiles(&t, &of, dq + t.query * d, dk, dv);
        }
    }
    keys->fresh = 0;
    keys->flops += 10 * d * t.pairs;
}

static seqpar_status seqpar__cpu_attn_backward(seqpar_device *device,
                                               const seqpar_attn_backward_args *a,
                                               void *queue) {
    seqpar__attn_kernel kernel = {SEQPAR__FOLD_DQ,
                                  0,
                                  seqpar__cpu_backward_leaf,
                                  seqpar__attn_add,
                                  NULL,
                                  1,
                                  SEQPAR__KT,
                                  seqpar__cpu_prefetch};
    (void)queue;
    for (int64_t g = 0; g < a->groups; g++)
        kernel.scratch_bytes = SEQPAR__MAX(kernel.scratch_bytes,
                                           seqpar__attn_scratch(device, &a->keys[g]));
    return seqpar__attn_backward_compute(device, a, &kernel);
}

static seqpar_status seqpar__cpu_attn_forward(seqpar_device *device, const seqpar_attn_args *a,
                                              void *queue) {
    seqpar__attn_kernel kernel = {SEQPAR__FOLD_STATE,
                                  0,
                                  seqpar__cpu_forward_leaf,
                                  seqpar__cpu_state_combine,
                                  seqpar__cpu_state_finish,
                                  1,
                                  0,
                                  seqpar__cpu_prefetch};
    (void)queue;
    kernel.scratch_bytes = seqpar__attn_scratch(device, a);
    return seqpar__attn_compute(device, a, &kernel);
}

static void seqpar__cpu_delta_row(const void *args, int64_t t) {
    const seqpar_attn_delta_args *a = (const seqpar_attn_delta_args *)args;
    for (int64_t n = t * a->heads; n < (t + 1) * a->heads; n++)
        ((float *)a->delta)[n] = seqpar__dot((const float *)a->dout + n * a->head_dim,
                                             (const float *)a->out + n * a->head_dim,
                                             a->head_dim);
}

SEQPAR__OP(seqpar__cpu_attn_delta, attn_delta,
           seqpar__for_rows(device, a->tokens, a, seqpar__cpu_delta_row))

static void seqpar__cpu_sinks_job(void *user, int64_t i, char *scratch) {
    const seqpar_attn_sinks_args *a = (const seqpar_attn_sinks_args *)user;
    const float *sink = (const float *)a->sinks, *lse = (const float *)a->lse;
    const float *delta = (const float *)a->delta;
    float *sum = (float *)a->dsinks + i * a->heads;
    (void)scratch;
    memset(sum, 0, (size_t)a->heads * sizeof *sum);
    for (int64_t t = a->pieces[i].local; t < a->pieces[i].local + a->pieces[i].count; t++)
        for (int64_t h = 0; h < a->heads; h++)
            sum[h] = SEQPAR__FMAF(-seqpar__expf(sink[h] - lse[t * a->heads + h]),
                                  delta[t * a->heads + h], sum[h]);
}

SEQPAR__OP(seqpar__cpu_attn_sinks, attn_sinks,
           seqpar__parallel(device, a->piece_count, 0, seqpar__cpu_sinks_job, (void *)a))

/* =============================================================================================
   >>rows  the fast device, row by row: norm, rotation, SwiGLU, loss, optimizer

   A job is a range of rows. Vectors go along a row, and the order of its sums depends only on
   its length (seqpar__each). So a row's bits do not depend on the job it is in.
   ========================================================================================== */

SEQPAR__TEMPLATE void seqpar__norm_step(const seqpar__v *k, seqpar__v *sums, float *const *x) {
    (void)sums;
    seqpar__vstore(x[0], seqpar__vload(x[1]) * k[0] * seqpar__vload(x[2]));
}

static void seqpar__cpu_rmsnorm_row(const void *args, int64_t t) {
    const seqpar_rmsnorm_args *a = (const seqpar_rmsnorm_args *)args;
    float *x[3], *row = (float *)a->x.data + t * a->x.stride;
    float r = (float)(1.0 / sqrt((double)seqpar__dot(row, row, a->width) / (double)a->width +
                                 a->eps));
    seqpar__v k = seqpar__vsplat(r);
    /* set after the call of seqpar__dot: gcc then increments one index instead of three
       pointers, which is a third faster */
    x[0] = (float *)a->y.data + t * a->y.stride;
    x[1] = row;
    x[2] = (float *)a->gain;
    seqpar__each(seqpar__norm_step, &k, NULL, 3, 1, x, a->width, 0.0f);
    if (a->rstd) ((float *)a->rstd)[t] = r;
}

SEQPAR__OP(seqpar__cpu_rmsnorm, rmsnorm,
           seqpar__for_rows(device, a->rows, a, seqpar__cpu_rmsnorm_row))

/* If the leaves together are all rows, in order, memory is read once: a job is a leaf, computes
   dx of its rows and the gain's gradient of the leaf, and the fold copies the latter from
   `leaf`. Otherwise `leaf` is NULL, a job is a range of rows, and the fold computes its leaves
   itself. A row takes two passes. The first prefetches dx for the second, and the second
   prefetches x and dy of the row after next; without that, memory would be idle in between. */
typedef struct seqpar__norm_work {
    const seqpar_rmsnorm_grad_args *args;
    float *leaf;
} seqpar__norm_work;

SEQPAR__TEMPLATE void seqpar__norm_dot_step(const seqpar__v *k, seqpar__v *sums,
                                            float *const *x) {
    (void)k;
    SEQPAR__FETCH(x[3]); /* dx */
    sums[0] = seqpar__vfma(seqpar__vload(x[2]) * seqpar__vload(x[1]), seqpar__vload(x[0]),
                           sums[0]);
}

SEQPAR__TEMPLATE void seqpar__norm_grad_step(const seqpar__v *k, seqpar__v *sums,
                                             float *const *at) {
    seqpar__v x = seqpar__vload(at[2]), dy = seqpar__vload(at[3]);
    (void)sums;
    SEQPAR__FETCH(at[5]);
    SEQPAR__FETCH(at[6]); /* x and dy, two rows on */
    seqpar__vstore(at[0], seqpar__vload(at[0]) +
                              seqpar__vfma(x, k[1], k[0] * seqpar__vload(at[4]) * dy));
    seqpar__vstore(at[1], seqpar__vfma(dy, x * k[0], seqpar__vload(at[1])));
}

/* Adds to dx of some rows, and sums their gradient of the gain. The rows are a leaf or, without
   w->leaf, a range whose sum is discarded. */
static void seqpar__cpu_norm_grad_job(void *user, int64_t i, char *scratch) {
    const seqpar__norm_work *w = (const seqpar__norm_work *)user;
    const seqpar_rmsnorm_grad_args *a = w->args;
    float *sum = w->leaf ? w->leaf + i * a->width : (float *)scratch, *at[SEQPAR__ARRAYS], r;
    int64_t t = w->leaf ? a->leaves[i].local : i * SEQPAR__ROW_JOB;
    int64_t end = w->leaf ? t + a->leaves[i].count : SEQPAR__MIN(a->rows, t + SEQPAR__ROW_JOB);
    seqpar__v sums[SEQPAR__SUMS], k[2];
    memset(sum, 0, (size_t)a->width * sizeof *sum);
    for (; t < end; t++) {
        int64_t ahead = SEQPAR__MIN(t + 2, a->rows - 1);
        r = ((const float *)a->rstd)[t];
        at[0] = at[5] = (float *)a->dx.data + t * a->dx.stride;
        at[1] = sum;
        at[4] = (float *)a->gain;
        at[2] = (float *)a->x.data + t * a->x.stride;
        at[3] = (float *)a->dy.data + t * a->dy.stride;
        seqpar__zero_sums(sums);
        seqpar__each(seqpar__norm_dot_step, NULL, sums, 4, 0, at + 2, a->width, 0.0f);
        at[5] = (float *)a->x.data + ahead * a->x.stride;
        at[6] = (float *)a->dy.data + ahead * a->dy.stride;
        k[0] = seqpar__vsplat(r);
        k[1] = seqpar__vsplat(-(r * r * r * seqpar__sum_of(sums, 0) / (float)a->width));
        seqpar__each(seqpar__norm_grad_step, k, NULL, 7, 2, at, a->width, 0.0f);
    }
}

#ifndef SEQPAR__CPU_GAIN_COLUMNS
#define SEQPAR__CPU_GAIN_COLUMNS 64 /* elements of a job */
#endif
static void seqpar__cpu_gain_leaf(void *user, void *value, int64_t index, int extend) {
    const seqpar__columns *c = (const seqpar__columns *)user;
    const seqpar__norm_work *w = (const seqpar__norm_work *)c->args;
    const seqpar_rmsnorm_grad_args *a = w->args;
    float *sum = (float *)value;
    if (w->leaf) {
        memcpy(sum, w->leaf + index * a->width + c->begin, (size_t)c->width * sizeof *sum);
        return;
    }
    if (!extend) memset(value, 0, (size_t)c->width * sizeof *sum);
    for (int64_t t = a->leaves[index].local;
         t < a->leaves[index].local + a->leaves[index].count; t++) {
        const float *x = (const float *)a->x.data + t * a->x.stride + c->begin;
        const float *dy = (const float *)a->dy.data + t * a->dy.stride + c->begin;
        float r = ((const float *)a->rstd)[t];
        for (int64_t i = 0; i < c->width; i++) sum[i] = SEQPAR__FMAF(dy[i], x[i] * r, sum[i]);
    }
}

/* The number of leaves if they together are all rows, in order; else 0. */
static int64_t seqpar__leaves_in_order(const seqpar_rmsnorm_grad_args *a) {
    int64_t count = 0, rows = 0;
    for (int64_t i = 0; i < a->fold.program_count; i++) {
        int64_t n = a->fold.program[i].index;
        if (a->fold.program[i].op == SEQPAR_FOLD_EXTEND) return 0;
        if (a->fold.program[i].op != SEQPAR_FOLD_LEAF) continue;
        if (n != count++ || a->leaves[n].local != rows) return 0;
        rows += a->leaves[n].count;
    }
    return rows == a->rows ? count : 0;
}

static seqpar_status seqpar__cpu_rmsnorm_grad(seqpar_device *device,
                                              const seqpar_rmsnorm_grad_args *a, void *queue) {
    int64_t leaves = seqpar__leaves_in_order(a);
    seqpar__norm_work w;
    seqpar_status status;
    (void)queue;
    w.args = a;
    /* if this allocation fails, jobs are ranges of rows */
    w.leaf = leaves ? (float *)SEQPAR_MALLOC((size_t)(leaves * a->width) * sizeof *w.leaf)
                    : NULL;
    status = seqpar__parallel_runs(
        device, w.leaf ? leaves : (a->rows + SEQPAR__ROW_JOB - 1) / SEQPAR__ROW_JOB,
        a->width * (int64_t)sizeof(float), seqpar__cpu_norm_grad_job, &w);
    if (!status)
        status = seqpar__for_columns(device, &a->fold, &w, a->width, SEQPAR__CPU_GAIN_COLUMNS,
                                     seqpar__cpu_gain_leaf);
    SEQPAR_FREE(w.leaf);
    return status;
}

static void seqpar__cpu_rope_row(const void *args, int64_t t) {
    const seqpar_rope_args *a = (const seqpar_rope_args *)args;
    int64_t half = a->head_dim / 2;
    const float *c = (const float *)a->cosine + a->positions[t] * half;
    const float *s = (const float *)a->sine + a->positions[t] * half;
    float sign = a->inverse ? -1.0f : 1.0f;
    for (int64_t h = 0; h < a->heads; h++) {
        float *x = (float *)a->x.data + t * a->x.stride + h * a->head_dim, *y = x + half;
        for (int64_t i = 0; i < half; i++) {
            float p = x[i], q = y[i];
            x[i] = p * c[i] - q * (sign * s[i]);
            y[i] = q * c[i] + p * (sign * s[i]);
        }
    }
}

SEQPAR__OP(seqpar__cpu_rope, rope, seqpar__for_rows(device, a->rows, a, seqpar__cpu_rope_row))

/* 1 / (1 + exp(-x)), with x clamped to [-88, 88] */
SEQPAR__TEMPLATE seqpar__v seqpar__vsigmoid(seqpar__v x) {
    seqpar__v low = seqpar__vsplat(-88.0f), one = seqpar__vsplat(1.0f);
    return one /
           (one + seqpar__vexp(seqpar__vmax(low, seqpar__vsplat(0.0f) - seqpar__vmax(low, x))));
}

SEQPAR__TEMPLATE void seqpar__swiglu_step(const seqpar__v *k, seqpar__v *sums,
                                          float *const *x) {
    seqpar__v gate = seqpar__vload(x[1]);
    (void)k;
    (void)sums;
    seqpar__vstore(x[0], gate * seqpar__vsigmoid(gate) * seqpar__vload(x[2]));
}

static void seqpar__cpu_swiglu_row(const void *args, int64_t t) {
    const seqpar_swiglu_args *a = (const seqpar_swiglu_args *)args;
    float *x[3];
    x[0] = (float *)a->y.data + t * a->y.stride;
    x[1] = (float *)a->gate.data + t * a->gate.stride;
    x[2] = (float *)a->up.data + t * a->up.stride;
    seqpar__each(seqpar__swiglu_step, NULL, NULL, 3, 1, x, a->width, 0.0f);
}

SEQPAR__OP(seqpar__cpu_swiglu, swiglu,
           seqpar__for_rows(device, a->rows, a, seqpar__cpu_swiglu_row))
SEQPAR__TEMPLATE void seqpar__swiglu_grad_step(const seqpar__v *k, seqpar__v *sums,
                                               float *const *x) {
    seqpar__v gate = seqpar__vload(x[0]), dy = seqpar__vload(x[2]), s = seqpar__vsigmoid(gate);
    seqpar__v one = seqpar__vsplat(1.0f);
    (void)k;
    (void)sums;
    seqpar__vstore(x[0], dy * seqpar__vload(x[1]) * (s * seqpar__vfma(gate, one - s, one)));
    seqpar__vstore(x[1], dy * (gate * s));
}

static void seqpar__cpu_swiglu_grad_row(const void *args, int64_t t) {
    const seqpar_swiglu_args *a = (const seqpar_swiglu_args *)args;
    float *x[3];
    x[0] = (float *)a->gate.data + t * a->gate.stride;
    x[1] = (float *)a->up.data + t * a->up.stride;
    x[2] = (float *)a->y.data + t * a->y.stride;
    seqpar__each(seqpar__swiglu_grad_step, NULL, NULL, 3, 2, x, a->width, 0.0f);
}

SEQPAR__OP(seqpar__cpu_swiglu_grad, swiglu,
           seqpar__for_rows(device, a->rows, a, seqpar__cpu_swiglu_grad_row))

/* ---- vocab ---- */
static float seqpar__seed32(const void *seeds, int64_t t) {
    return seeds ? ((const float *)seeds)[t] : 0.0f;
}

/* A row is processed in blocks. The exponential of a logit x is 2^(x log2(e) - from), where
   `from` is the highest x log2(e) so far, rounded, or up to 2 less; any number near it would
   do. Neighbouring blocks with the same `from` are a part. While a block is processed, the
   highest logit of the next block is found, so the maximum needs no pass of its own. For a
   gradient without a seed for the entropy, exponentials overwrite the logits. They become the
   gradient while the exponentials of the next row are computed: otherwise memory would wait for
   arithmetic, then arithmetic for memory. */
#ifndef SEQPAR__VOCAB_BLOCK
#define SEQPAR__VOCAB_BLOCK 128 /* a multiple of 64 */
#endif
#define SEQPAR__VOCAB_PARTS(vocab) ((vocab) / SEQPAR__VOCAB_BLOCK + 1) /* most parts of a row */
#define SEQPAR__VOCAB_AHEAD \
    4096 /* prefetch distance in floats; the hardware prefetcher is not enough, as a second \
            stream confuses it */
typedef struct seqpar__vocab_part {
    int64_t begin;
    float from;
} seqpar__vocab_part;

typedef struct seqpar__vocab {
    float *x, *own; /* the row; the target's element or NULL */
    int64_t vocab, parts;
    seqpar__vocab_part *part; /* (parts): where each begins, and the `from` of its exponents */
    /* keep: exponentials overwrite the logits; entropy: the second sum is needed */
    int keep, entropy;
    float from, sum; /* the `from` of the last part; the sum of exponentials relative to it */
    /* the gradient is factor * probability - flat, and + seed at the target */
    float factor, flat, seed;
    /* the row before, whose exponentials become its gradient meanwhile; or NULL */
    const struct seqpar__vocab *before;
    /* sums of 2^y and of 2^y y, for y = x log2(e) - from; highest logit of the next block */
    seqpar__v sums[SEQPAR__SUMS];
} seqpar__vocab;

/* Processes the vector of the row at x, and takes `next` into the maximum of the next block. k:
   log2(e), SIXTEENTHS - from, the least logit that is not clamped, -from (seqpar__vocab_advance).
   far: `from` is so large that k[1] is rounded. */
SEQPAR__TEMPLATE void seqpar__vocab_step(const seqpar__v *k, seqpar__v *sums, float *x,
                                         const float *next, const int keep, const int entropy,
                                         const int far) {
    seqpar__v z = seqpar__vmax(k[2], seqpar__vload(x)), y = seqpar__vfma(z, k[0], k[3]);
    seqpar__v t = seqpar__vfma(z, k[0], k[1]), p;
    p = far ? seqpar__vexp2(y) : seqpar__vpow2_of(t, seqpar__vfma(z, k[0], k[1] - t));
    sums[2] = seqpar__vmax(seqpar__vload(next), sums[2]);
    sums[0] = sums[0] + p;
    if (entropy) sums[1] = seqpar__vfma(p, y, sums[1]);
    if (keep) seqpar__vstore(x, p);
}

SEQPAR__TEMPLATE void seqpar__vocab_scale_step(const seqpar__v *k, seqpar__v *sums,
                                               float *const *x) {
    (void)sums;
    seqpar__vstore(x[0], seqpar__vload(x[0]) * k[0] - k[1]);
}

/* A logit becomes its gradient, with a seed for the entropy. k: flat, factor, dentropy, lse,
   entropy. */
SEQPAR__TEMPLATE void seqpar__vocab_entropy_step(const seqpar__v *k, seqpar__v *sums,
                                                 float *const *x) {
    seqpar__v y = seqpar__vmax(seqpar__vsplat(-88.0f), seqpar__vload(x[0]) - k[3]);
    (void)sums;
    seqpar__vstore(x[0], seqpar__vexp(y) * (k[1] - k[2] * (y + k[4])) - k[0]);
}

static float seqpar__pow2f(float x) {
    return x == 0.0f ? 1.0f : (float)seqpar_exp(0.69314718055994531 * (double)x);
}

static seqpar__v seqpar__vocab_top(const seqpar__v *sums) {
    seqpar__v top = sums[2];
    SEQPAR__UNROLL
    for (int u = 5; u < SEQPAR__SUMS; u += 3) top = seqpar__vmax(sums[u], top);
    return top;
}

/* Computes the exponentials of whole blocks from x on, and turns those of the row before into
   its gradient at the same elements, unless `before` is NULL. Stops when the next block has a logit above k[4], when `stop` elements are done, or
   when fewer than two blocks of the n elements are left. Returns the number of elements done.
   Only four vectors are unrolled: the sums of all 64 lanes would not fit into the registers. */
SEQPAR__TEMPLATE int64_t seqpar__vocab_blocks(const seqpar__v *k, seqpar__v *sums, float *x,
                                              float *before, int64_t n, int64_t stop,
                                              const int keep, const int entropy,
                                              const int far) {
    seqpar__v own[SEQPAR__SUMS];
    int64_t i = 0;
    SEQPAR__UNROLL
    for (int64_t j = 0; j < SEQPAR__SUMS; j++) own[j] = sums[j];
    do {
        for (int64_t end = i + SEQPAR__VOCAB_BLOCK; i < end; i += 64) {
            for (int64_t j = 0; j < 64; j += 16) SEQPAR__FETCH(x + i + j + SEQPAR__VOCAB_AHEAD);
            for (int64_t lane = 0; lane < 64; lane += 4 * SEQPAR__VL) {
                float *at = x + i + lane;
                SEQPAR__UNROLL
                for (int64_t u = 0; u < 4; u++)
                    seqpar__vocab_step(
                        k, own + 3 * (lane / SEQPAR__VL + u), at + u * SEQPAR__VL,
                        at + u * SEQPAR__VL + SEQPAR__VOCAB_BLOCK, keep, entropy, far);
            }
            for (int64_t j = i; before && j < i + 64; j += SEQPAR__VL)
                seqpar__vstore(before + j, seqpar__vload(before + j) * k[5] - k[6]);
        }
    } while (i < stop && n - i >= 2 * SEQPAR__VOCAB_BLOCK &&
             !seqpar__vany_less(k[4], seqpar__vocab_top(own)));
    SEQPAR__UNROLL
    for (int64_t j = 0; j < SEQPAR__SUMS; j++) sums[j] = own[j];
    return i;
}

/* Processes the last n elements, fewer than two blocks. Each is added in the lane that
   seqpar__each would use. The elements are too few to need variants for keep and entropy. */
static int64_t seqpar__vocab_last(seqpar__vocab *h, const seqpar__v *k, float *x, int64_t n,
                                  int far) {
    float edge[16], *at;
    for (int64_t i = 0; i < n; i += 16, x += 16) {
        seqpar__v *sums = h->sums + (i < n / 64 * 64 ? i % 64 / SEQPAR__VL * 3 : 0);
        at = n - i < 16 ? edge : x;
        for (int64_t j = 0; at == edge && j < 16; j++) edge[j] = j < n - i ? x[j] : -INFINITY;
        for (int64_t j = 0; j < 16; j += SEQPAR__VL, sums += 3)
            seqpar__vocab_step(k, sums, at + j, at + j, h->keep, h->entropy, far);
        if (at == edge && h->keep) memcpy(x, edge, (size_t)(n - i) * sizeof *x);
    }
    return n;
}

static const seqpar__vocab_part *seqpar__vocab_part_at(const seqpar__vocab *h, int64_t begin) {
    const seqpar__vocab_part *part = h->part + h->parts - 1;
    while (part->begin > begin) part--;
    return part;
}

static int64_t seqpar__vocab_part_end(const seqpar__vocab *h, const seqpar__vocab_part *part) {
    return part + 1 < h->part + h->parts ? part[1].begin : h->vocab;
}

/* The factor that turns exponentials of this part into the gradient. */
static seqpar__v seqpar__vocab_factor(const seqpar__vocab *h, const seqpar__vocab_part *part) {
    return seqpar__vsplat(h->factor * (seqpar__pow2f(part->from - h->from) / h->sum));
}

static void seqpar__vocab_to_gradient(const seqpar__vocab *h, int64_t begin, int64_t end) {
    while (begin < end) {
        const seqpar__vocab_part *part = seqpar__vocab_part_at(h, begin);
        int64_t count = SEQPAR__MIN(end, seqpar__vocab_part_end(h, part)) - begin;
        float *x = h->x + begin;
        seqpar__v k[2];
        k[0] = seqpar__vocab_factor(h, part);
        k[1] = seqpar__vsplat(h->flat);
        seqpar__each(seqpar__vocab_scale_step, k, NULL, 1, 1, &x, count, 0.0f);
        begin += count;
    }
}

/* A block with a logit above this limit gets a higher `from`, so seqpar__vocab_blocks stops
   before it. It also stops where a part of the row before ends; seqpar__vocab_sums then tests
   the same limit, so that such a stop changes no bit. */
static float seqpar__vocab_limit(float from) { return (from + 2.0f) / SEQPAR__LOG2E; }
/* Processes elements of the row from `begin` on, and the same elements of the row before.
   Returns the number of elements done. */
static int64_t seqpar__vocab_advance(seqpar__vocab *h, int64_t begin, float from) {
    float *x = h->x + begin, *before = NULL;
    int64_t n = h->vocab - begin, stop = n, done;
    int far = !(fabsf(from) < 65536.0f), few = n < 2 * SEQPAR__VOCAB_BLOCK;
    seqpar__v k[7];
    k[0] = seqpar__vsplat(SEQPAR__LOG2E);
    k[1] = seqpar__vsplat(SEQPAR__SIXTEENTHS - from);
    k[2] = seqpar__vsplat((from - 127.0f) / SEQPAR__LOG2E);
    k[3] = seqpar__vsplat(-from);
    k[4] = seqpar__vsplat(seqpar__vocab_limit(from));
    k[5] = k[6] = k[3];
    if (h->before && h->keep && !far && !few) {
        /* the same loop also scales the row before, up to the end of a part of that row */
        const seqpar__vocab_part *part = seqpar__vocab_part_at(h->before, begin);
        before = h->before->x + begin;
        stop = seqpar__vocab_part_end(h->before, part) - begin;
        k[5] = seqpar__vocab_factor(h->before, part);
        k[6] = seqpar__vsplat(h->before->flat);
    }
    if (few)
        done = seqpar__vocab_last(h, k, x, n, far);
    else if (far)
        done = seqpar__vocab_blocks(k, h->sums, x, NULL, n, n, h->keep, 1, 1);
    else if (h->keep && h->entropy)
        done = seqpar__vocab_blocks(k, h->sums, x, before, n, stop, 1, 1, 0);
    else if (h->keep)
        done = seqpar__vocab_blocks(k, h->sums, x, before, n, stop, 1, 0, 0);
    else if (h->entropy)
        done = seqpar__vocab_blocks(k, h->sums, x, NULL, n, n, 0, 1, 0);
    else
        done = seqpar__vocab_blocks(k, h->sums, x, NULL, n, n, 0, 0, 0);
    if (h->before && !before) seqpar__vocab_to_gradient(h->before, begin, begin + done);
    return done;
}

/* Converts the sums from exponents relative to `from` to exponents relative to `to`. */
static void seqpar__vocab_rescale(seqpar__vocab *h, float from, float to) {
    seqpar__v *sums = h->sums;
    seqpar__v factor = seqpar__vsplat(seqpar__pow2f(from - to));
    seqpar__v fall = seqpar__vsplat(from - to);
    for (; sums < h->sums + SEQPAR__SUMS; sums += 3) {
        sums[1] = factor * seqpar__vfma(fall, sums[0], sums[1]);
        sums[0] = factor * sums[0];
    }
}

/* The integer to which exponents are relative. It is finite even if all logits are -inf. Above
   1e9, where adjacent fp32 numbers are 64 apart, it is infinite and all results become NaN. */
static float seqpar__vocab_from(float high) {
    float from = rintf(high * SEQPAR__LOG2E);
    if (from > 1e9f) return INFINITY;
    return from < -1e9f ? -1e9f : from;
}

static void seqpar__vocab_sums(seqpar__vocab *h) {
    float lane[SEQPAR__VL];
    float high = seqpar__highest(h->x, SEQPAR__MIN(SEQPAR__VOCAB_BLOCK, h->vocab));
    float from = 0;
    seqpar__zero_sums(h->sums);
    for (int u = 2; u < SEQPAR__SUMS; u += 3) h->sums[u] = seqpar__vsplat(-INFINITY);
    for (int64_t at = h->parts = 0; at < h->vocab;) {
        int last = h->vocab - at < 2 * SEQPAR__VOCAB_BLOCK;
        float to;
        if (last) high = SEQPAR__MAX(high, seqpar__highest(h->x + at, h->vocab - at));
        to = seqpar__vocab_from(high);
        if (!at || (last ? !(to <= from + 1.0f) : !(high <= seqpar__vocab_limit(from)))) {
            if (at) seqpar__vocab_rescale(h, from, to);
            from = h->part[h->parts].from = to;
            h->part[h->parts++].begin = at;
        }
        at += seqpar__vocab_advance(h, at, from);
        seqpar__vstore(lane, seqpar__vocab_top(h->sums));
        high = seqpar__highest(lane, SEQPAR__VL);
    }
    h->from = from;
    h->sum = seqpar__sum_of(h->sums, 0);
}

static void seqpar__cpu_vocab_scale(const seqpar_vocab_softmax_args *a, float *x) {
    float scale = (float)a->scale;
    for (int64_t j = 0; scale != 0.0f && j < a->vocab; j++) x[j] *= scale;
}

static void seqpar__cpu_vocab_finish(const seqpar_vocab_softmax_args *a,
                                     const seqpar__vocab *h) {
    if (h->own) *h->own += h->seed;
    seqpar__cpu_vocab_scale(a, h->x);
}

/* Sets the numbers that turn the exponentials into the gradient. With a seed for the entropy
   (h->keep is 0), computes the gradient itself from the logits. */
static void seqpar__cpu_vocab_gradient(const seqpar_vocab_softmax_args *a, int64_t t,
                                       seqpar__vocab *h, float lse, float entropy) {
    int live = a->targets[t] != SEQPAR_IGNORE;
    float c = live ? seqpar__seed32(a->dlogp, t) : 0.0f;
    float s = live ? seqpar__seed32(a->dsmooth, t) : 0.0f;
    float z = live ? seqpar__seed32(a->dzloss, t) : 0.0f;
    float keep = s + 2.0f * z * lse - c, flat = s / (float)a->vocab;
    float *x = h->x;
    seqpar__v k[5];
    h->own = live ? x + a->targets[t] : NULL;
    h->seed = c;
    h->flat = flat;
    h->factor = keep;
    if (h->keep) return;
    k[0] = seqpar__vsplat(flat);
    k[1] = seqpar__vsplat(keep);
    k[2] = seqpar__vsplat(seqpar__seed32(a->dentropy, t));
    k[3] = seqpar__vsplat(lse);
    k[4] = seqpar__vsplat(entropy);
    seqpar__each(seqpar__vocab_entropy_step, k, NULL, 1, 1, &x, h->vocab, 0.0f);
    seqpar__cpu_vocab_finish(a, h);
}

/* Computes the sums and statistics of a row, then its gradient, in place. With h->keep the
   exponentials stay in the row. They become the gradient while the next row is computed, or at
   the end of the job. */
static void seqpar__cpu_vocab_row(const seqpar_vocab_softmax_args *a, int64_t t,
                                  seqpar__vocab *h) {
    float *x = (float *)a->logits.data + t * a->logits.stride, own, total;
    double lse, entropy;
    seqpar__cpu_vocab_scale(a, x);
    own = a->targets[t] == SEQPAR_IGNORE ? 0.0f : x[a->targets[t]];
    h->x = x;
    h->vocab = a->vocab;
    h->keep = a->gradient && seqpar__seed32(a->dentropy, t) == 0;
    h->entropy = a->entropy || (a->gradient && !h->keep);
    seqpar__zero_sums(h->sums);
    if (a->smooth) seqpar__each(seqpar__total_step, NULL, h->sums, 1, 0, &x, a->vocab, 0.0f);
    total = seqpar__sum_of(h->sums, 0);
    seqpar__vocab_sums(h);
    entropy = seqpar_log((double)h->sum);
    lse = (double)h->from / (double)SEQPAR__LOG2E + entropy;
    entropy -= 0.69314718055994531 * (double)seqpar__sum_of(h->sums, 1) / (double)h->sum;
    if (a->logp)
        ((float *)a->logp)[t] = a->targets[t] == SEQPAR_IGNORE ? 0.0f
                                                               : (float)((double)own - lse);
    if (a->lse) ((float *)a->lse)[t] = (float)lse;
    if (a->entropy) ((float *)a->entropy)[t] = (float)entropy;
    if (a->smooth) ((float *)a->smooth)[t] = (float)(lse - (double)total / (double)a->vocab);
    if (a->gradient) seqpar__cpu_vocab_gradient(a, t, h, (float)lse, (float)entropy);
}

static void seqpar__cpu_vocab_job(void *user, int64_t i, char *scratch) {
    const seqpar_vocab_softmax_args *a = (const seqpar_vocab_softmax_args *)user;
    const seqpar__vocab *before = NULL;
    seqpar__vocab row[2];
    row[0].part = (seqpar__vocab_part *)scratch;
    row[1].part = row[0].part + SEQPAR__VOCAB_PARTS(a->vocab);
    for (int64_t t = i * SEQPAR__ROW_JOB; t < SEQPAR__MIN(a->rows, (i + 1) * SEQPAR__ROW_JOB);
         t++) {
        seqpar__vocab *h = &row[t % 2];
        h->before = before;
        seqpar__cpu_vocab_row(a, t, h);
        if (before) seqpar__cpu_vocab_finish(a, before);
        before = h->keep ? h : NULL;
    }
    if (before) {
        seqpar__vocab_to_gradient(before, 0, a->vocab);
        seqpar__cpu_vocab_finish(a, before);
    }
}

static seqpar_status seqpar__cpu_vocab_softmax(seqpar_device *device,
                                               const seqpar_vocab_softmax_args *a,
                                               void *queue) {
    (void)queue;
    return seqpar__parallel_runs(device, (a->rows + SEQPAR__ROW_JOB - 1) / SEQPAR__ROW_JOB,
                                 2 * SEQPAR__VOCAB_PARTS(a->vocab) *
                                     (int64_t)sizeof(seqpar__vocab_part),
                                 seqpar__cpu_vocab_job, (void *)a);
}

/* ---- distillation ---- */

/* e^(scale x - high), but exactly 0 below e^-87: the difference of logits that it is multiplied
   by is up to 1e38 where a logit is -inf (seqpar__distill_at). In the steps below k[0] is the scale; k[1] and k[2] are the highest scaled logits
   of student and teacher. */
SEQPAR__TEMPLATE seqpar__v seqpar__distill_exp(seqpar__v x, seqpar__v scale, seqpar__v high) {
    seqpar__v y = x * scale - high, low = seqpar__vsplat(-87.0f);
    seqpar__v e = seqpar__vexp(seqpar__vmax(low, y));
    return seqpar__vless(y, low, seqpar__vsplat(0.0f), e);
}

/* scale x, but at least -1e38: so the difference of two -inf is not NaN. */
SEQPAR__TEMPLATE seqpar__v seqpar__distill_at(seqpar__v x, seqpar__v scale) {
    return seqpar__vmax(seqpar__vsplat(-1e38f), x * scale);
}

/* Sums of both exponentials, and of the teacher's times (teacher's - student's scaled logit).
   x[0], x[1]: logits of student and teacher. */
SEQPAR__TEMPLATE void seqpar__distill_step(const seqpar__v *k, seqpar__v *sums,
                                           float *const *x) {
    seqpar__v p = seqpar__distill_exp(seqpar__vload(x[0]), k[0], k[1]);
    seqpar__v q = seqpar__distill_exp(seqpar__vload(x[1]), k[0], k[2]);
    seqpar__v apart = seqpar__distill_at(seqpar__vload(x[1]), k[0]) -
                      seqpar__distill_at(seqpar__vload(x[0]), k[0]);
    sums[0] = sums[0] + p;
    sums[1] = sums[1] + q;
    sums[2] = seqpar__vfma(q, apart, sums[2]);
}

/* The same for the reverse KL: the third sum is of the student's exponentials times (student's
   - teacher's scaled logit). */
SEQPAR__TEMPLATE void seqpar__distill_reverse_step(const seqpar__v *k, seqpar__v *sums,
                                                   float *const *x) {
    seqpar__v p = seqpar__distill_exp(seqpar__vload(x[0]), k[0], k[1]);
    seqpar__v q = seqpar__distill_exp(seqpar__vload(x[1]), k[0], k[2]);
    seqpar__v apart = seqpar__distill_at(seqpar__vload(x[0]), k[0]) -
                      seqpar__distill_at(seqpar__vload(x[1]), k[0]);
    sums[0] = sums[0] + p;
    sums[1] = sums[1] + q;
    sums[2] = seqpar__vfma(p, apart, sums[2]);
}

/* Sum of e^y y with y = scale x - highest. x[0]: the teacher's logits; k: scale, highest. */
SEQPAR__TEMPLATE void seqpar__distill_entropy_step(const seqpar__v *k, seqpar__v *sums,
                                                   float *const *x) {
    seqpar__v y = seqpar__distill_at(seqpar__vload(x[0]), k[0]) - k[1];
    seqpar__v e = seqpar__distill_exp(seqpar__vload(x[0]), k[0], k[1]);
    sums[0] = seqpar__vfma(e, y, sums[0]);
}

/* k[3], k[4]: the factors that turn exponentials into dkl p and dkl t, where p and t are the
   softmaxes of student and teacher. x[0]: the teacher's logits, which the gradient
   overwrites. */
SEQPAR__TEMPLATE void seqpar__distill_grad_step(const seqpar__v *k, seqpar__v *sums,
                                                float *const *x) {
    (void)sums;
    seqpar__vstore(x[0], seqpar__distill_exp(seqpar__vload(x[1]), k[0], k[1]) * k[3] -
                             seqpar__distill_exp(seqpar__vload(x[0]), k[0], k[2]) * k[4]);
}

/* The gradient of the reverse KL, dkl p (log p - log t - kl). k[3]: the factor that turns
   exponentials into dkl p. The bracket is student's - teacher's scaled logit - k[4]. */
SEQPAR__TEMPLATE void seqpar__distill_reverse_grad_step(const seqpar__v *k, seqpar__v *sums,
                                                        float *const *x) {
    seqpar__v apart = seqpar__distill_at(seqpar__vload(x[1]), k[0]) -
                      seqpar__distill_at(seqpar__vload(x[0]), k[0]);
    (void)sums;
    seqpar__vstore(x[0], seqpar__distill_exp(seqpar__vload(x[1]), k[0], k[1]) * k[3] *
                             (apart - k[4]));
}

/* Statistics of a row: highest scaled logits and sums of exponentials, and kl. */
typedef struct seqpar__distilled {
    float high[2], sum[2]; /* student, teacher */
    double kl;
    double apart; /* the student's log-sum-exp minus the teacher's */
} seqpar__distilled;

static void seqpar__cpu_distill_sums(const seqpar_distill_args *a, float *const *x,
                                     seqpar__v *k, seqpar__distilled *r) {
    float scale = a->scale != 0 ? (float)a->scale : 1.0f;
    seqpar__v sums[SEQPAR__SUMS];
    seqpar__zero_sums(sums);
    k[0] = seqpar__vsplat(scale);
    for (int i = 0; i < 2; i++) {
        r->high[i] = seqpar__highest(x[i], a->vocab) * scale;
        k[1 + i] = seqpar__vsplat(r->high[i]);
    }
    seqpar__each(a->reverse ? seqpar__distill_reverse_step : seqpar__distill_step, k, sums, 2,
                 0, x, a->vocab, -INFINITY);
    for (int i = 0; i < 2; i++) r->sum[i] = seqpar__sum_of(sums, i);
    r->apart = ((double)r->high[0] - (double)r->high[1]) +
               (seqpar_log((double)r->sum[0]) - seqpar_log((double)r->sum[1]));
    r->kl = (double)seqpar__sum_of(sums, 2) / (double)r->sum[!a->reverse] +
            (a->reverse ? -r->apart : r->apart);
}

/* Computes the sums of both softmaxes, then overwrites the teacher's logits with the
   gradient. */
static void seqpar__cpu_distill_row(const void *args, int64_t t) {
    const seqpar_distill_args *a = (const seqpar_distill_args *)args;
    float *x[2], *both[2], d = seqpar__seed32(a->dkl, t);
    seqpar__v k[5], sums[SEQPAR__SUMS];
    seqpar__distilled r;
    x[0] = both[1] = (float *)a->logits.data + t * a->logits.stride;
    x[1] = both[0] = (float *)a->teacher.data + t * a->teacher.stride;
    seqpar__cpu_distill_sums(a, x, k, &r);
    if (a->kl) ((float *)a->kl)[t] = (float)r.kl;
    if (a->entropy) {
        seqpar__v own[2];
        own[0] = k[0];
        own[1] = k[2];
        seqpar__zero_sums(sums);
        seqpar__each(seqpar__distill_entropy_step, own, sums, 1, 0, x + 1, a->vocab, -INFINITY);
        ((float *)a->entropy)[t] = (float)(seqpar_log((double)r.sum[1]) -
                                           (double)seqpar__sum_of(sums, 0) / (double)r.sum[1]);
    }
    if (!a->gradient) return;
    d *= a->scale != 0 ? (float)a->scale : 1.0f;
    k[3] = seqpar__vsplat(d / r.sum[0]);
    k[4] = seqpar__vsplat(a->reverse ? (float)(r.apart + r.kl) : d / r.sum[1]);
    seqpar__each(a->reverse ? seqpar__distill_reverse_grad_step : seqpar__distill_grad_step, k,
                 NULL, 2, 1, both, a->vocab, 0.0f);
}

SEQPAR__OP(seqpar__cpu_distill, distill,
           seqpar__for_rows(device, a->rows, a, seqpar__cpu_distill_row))

/* ---- choice ---- */

/* Computes y (count), the log-probs of the choices, from their scaled logits. */
static void seqpar__cpu_choose_logs(const seqpar_choose_args *a, const float *x, double *y) {
    double scale = a->scale != 0 ? a->scale : 1.0, top = -INFINITY, sum = 0;
    for (int64_t k = 0; k < a->count; k++) {
        y[k] = (double)x[a->ids[k]] * scale;
        top = y[k] > top || y[k] != y[k] ? y[k] : top;
    }
    for (int64_t k = 0; k < a->count; k++) sum += seqpar_exp(y[k] - top);
    sum = top + seqpar_log(sum);
    for (int64_t k = 0; k < a->count; k++) y[k] -= sum;
}

static void seqpar__cpu_choose_row(const void *args, int64_t t) {
    const seqpar_choose_args *a = (const seqpar_choose_args *)args;
    float *x = (float *)a->logits.data + t * a->logits.stride;
    double y[SEQPAR_MAX_CHOICES], scale = a->scale != 0 ? a->scale : 1.0, seeds = 0;
    seqpar__cpu_choose_logs(a, x, y);
    for (int64_t k = 0; k < a->count; k++) {
        if (a->logq) ((float *)a->logq)[t * a->count + k] = (float)y[k];
        seeds += (double)seqpar__seed32(a->dlogq, t * a->count + k);
    }
    if (!a->gradient) return;
    memset(x, 0, (size_t)a->vocab * sizeof *x);
    for (int64_t k = 0; k < a->count; k++)
        x[a->ids[k]] = (float)(scale * ((double)seqpar__seed32(a->dlogq, t * a->count + k) -
                                        seqpar_exp(y[k]) * seeds));
}

SEQPAR__OP(seqpar__cpu_choose, choose,
           seqpar__for_rows(device, a->rows, a, seqpar__cpu_choose_row))

/* ---- four bits ---- */
static void seqpar__cpu_nf4_rows_row(const void *args, int64_t t) {
    const seqpar_nf4_rows_args *a = (const seqpar_nf4_rows_args *)args;
    float *out = (float *)a->out.data + t * a->out.stride;
    int64_t n = (a->row + t) * a->width + a->col, end = n + a->cols, next;
    for (; n < end; n = next) {
        float scale = seqpar__nf4_scale(&a->from, n / SEQPAR_NF4_GROUP);
        next = SEQPAR__MIN((n / SEQPAR_NF4_GROUP + 1) * SEQPAR_NF4_GROUP, end);
        for (int64_t i = n; i < next; i++) *out++ = seqpar__nf4_level(&a->from, i) * scale;
    }
}

SEQPAR__OP(seqpar__cpu_nf4_rows, nf4_rows,
           seqpar__for_rows(device, a->rows, a, seqpar__cpu_nf4_rows_row))

/* ---- optimizer ---- */
static void seqpar__cpu_sumsq_job(void *user, int64_t b, char *scratch) {
    const seqpar_sumsq_args *a = (const seqpar_sumsq_args *)user;
    const float *x = (const float *)a->x + b * a->block_size;
    double lane[8] = {0};
    int64_t i;
    (void)scratch;
    for (i = 0; i + 8 <= a->block_size; i += 8)
        for (int64_t j = 0; j < 8; j++) lane[j] += (double)x[i + j] * (double)x[i + j];
    for (int64_t j = 0; i + j < a->block_size; j++)
        lane[j] += (double)x[i + j] * (double)x[i + j];
    a->out[b] = ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
                ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

SEQPAR__OP(seqpar__cpu_sumsq, sumsq,
           seqpar__parallel_runs(device, a->blocks, 0, seqpar__cpu_sumsq_job, (void *)a))

typedef struct seqpar__update_work {
    const seqpar_update_args *args;
    float step, rbc2; /* lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t) */
} seqpar__update_work;

SEQPAR__TEMPLATE void seqpar__adamw_step(const seqpar__v *k, seqpar__v *sums, float *const *x) {
    seqpar__v g = seqpar__vload(x[3]) * k[0], m = seqpar__vload(x[1]), v;
    (void)sums;
    m = seqpar__vfma(k[1], g - m, m);
    v = seqpar__vfma(k[2] * g, g, k[3] * seqpar__vload(x[2]));
    seqpar__vstore(x[1], m);
    seqpar__vstore(x[2], v);
    seqpar__vstore(x[0], seqpar__vfma(k[4], m / seqpar__vfma(seqpar__vsqrt(v), k[5], k[6]),
                                      seqpar__vload(x[0]) * k[7]));
}

static void seqpar__cpu_adamw_job(void *user, int64_t job, char *scratch) {
    const seqpar__update_work *w = (const seqpar__update_work *)user;
    const seqpar_update_args *a = w->args;
    int64_t begin = job * 16384;
    float *x[4];
    seqpar__v k[8];
    (void)scratch;
    x[0] = (float *)a->p + begin;
    x[1] = (float *)a->m + begin;
    x[2] = (float *)a->v + begin;
    x[3] = (float *)a->g + begin;
    k[0] = seqpar__vsplat((float)a->clip);
    k[1] = seqpar__vsplat((float)(1.0 - a->beta1));
    k[2] = seqpar__vsplat((float)(1.0 - a->beta2));
    k[3] = seqpar__vsplat((float)a->beta2);
    k[4] = seqpar__vsplat(-w->step);
    k[5] = seqpar__vsplat(w->rbc2);
    k[6] = seqpar__vsplat((float)a->eps);
    k[7] = seqpar__vsplat((float)(1.0 - a->lr * a->decay));
    seqpar__each(seqpar__adamw_step, k, NULL, 4, 3, x, SEQPAR__MIN(a->count - begin, 16384),
                 0.0f);
}

static seqpar_status seqpar__cpu_adamw(seqpar_device *device, const seqpar_update_args *a,
                                       void *queue) {
    seqpar__update_work w;
    (void)queue;
    w.args = a;
    w.step = (float)(a->lr / (1.0 - pow(a->beta1, (double)a->t)));
    w.rbc2 = (float)(1.0 / sqrt(1.0 - pow(a->beta2, (double)a->t)));
    return seqpar__parallel_runs(device, (a->count + 16383) / 16384, 0, seqpar__cpu_adamw_job,
                                 &w);
}

static void seqpar__cpu_sgd_job(void *user, int64_t job, char *scratch) {
    const seqpar_update_args *a = (const seqpar_update_args *)user;
    float *p = (float *)a->p, lr = (float)a->lr, decay = (float)a->decay, clip = (float)a->clip;
    int64_t end = SEQPAR__MIN(a->count, (job + 1) * 16384);
    (void)scratch;
    for (int64_t i = job * 16384; i < end; i++)
        p[i] = SEQPAR__FMAF(-lr, SEQPAR__FMAF(((const float *)a->g)[i], clip, decay * p[i]),
                            p[i]);
}

SEQPAR__OP(seqpar__cpu_sgd, sgd,
           seqpar__parallel_runs(device, (a->count + 16383) / 16384, 0, seqpar__cpu_sgd_job,
                                 (void *)a))

SEQPAR_DEF seqpar_device *seqpar_device_cpu(int64_t threads) {
    seqpar_device *d = seqpar__host_device("cpu", SEQPAR_DTYPE_F32, SEQPAR_DTYPE_F32);
    if (!d) return NULL;
#ifdef _OPENMP
    d->threads = threads > 0 ? threads : omp_get_max_threads();
#else
    d->threads = threads > 0 ? 1 : 1;
#endif
#define SEQPAR__X(op) d->op = seqpar__cpu_##op;
    SEQPAR_DEVICE_OPS_EACH(SEQPAR__X)
#undef SEQPAR__X
    return d;
}

/* =============================================================================================
   >>half  the fast device in bf16: storage is bf16, sums are fp32

   Attention widens tokens as it packs them (>>tile). Most other operations call the fp32
   device for a block of rows at a time. They widen the rows before the call and round them
   after it. Nothing is computed in bf16, so bf16 instructions of a machine do not change the
   bits.
   ========================================================================================== */

/* HALF_BLOCK: elements that are widened at a time. Even if they are more elements than that, a
   block has at least HALF_LEAST rows per thread in an operation on rows, HALF_COLUMNS columns
   of W in a product, and HALF_WEIGHTS rows of dw in a weight gradient. */
#ifndef SEQPAR__HALF_BLOCK
#define SEQPAR__HALF_BLOCK (1 << 19)
#endif
#ifndef SEQPAR__HALF_LEAST
#define SEQPAR__HALF_LEAST 32
#endif
#ifndef SEQPAR__HALF_COLUMNS
#define SEQPAR__HALF_COLUMNS 32
#endif
#ifndef SEQPAR__HALF_WEIGHTS
#define SEQPAR__HALF_WEIGHTS 64
#endif
/* Rows of a job that widens or rounds. */
#ifndef SEQPAR__HALF_RUN
#define SEQPAR__HALF_RUN 16
#endif
enum { SEQPAR__HALF_SCRATCHES = 3 };
typedef struct seqpar__half {
    seqpar_device base; /* first: the two are cast to each other */
    seqpar_device *wide;
    float *room[SEQPAR__HALF_SCRATCHES];
    int64_t elements[SEQPAR__HALF_SCRATCHES];
} seqpar__half;

/* Casts the device to seqpar__half; its fp32 device gets the device's error pointer. */
static seqpar__half *seqpar__half_of(seqpar_device *device) {
    seqpar__half *h = (seqpar__half *)device;
    h->wide->error = device->error;
    return h;
}

/* Scratch buffer `which`, of at least `elements` floats. NULL: no memory, and the error is
   set. */
static float *seqpar__half_scratch(seqpar__half *h, int which, int64_t elements) {
    elements = SEQPAR__MAX(elements, 1);
    if (elements > h->elements[which]) {
        seqpar__host_free(&h->base, h->room[which]);
        h->room[which] = (float *)seqpar__host_alloc(&h->base, elements * 4);
        h->elements[which] = h->room[which] ? elements : 0;
    }
    if (!h->room[which]) seqpar__no_memory(h->base.error, "widened rows");
    return h->room[which];
}

/* Converts rows: with `narrow` fp32 to bf16, else bf16 to fp32. */
typedef struct seqpar__half_copy {
    void *to;
    const void *from;
    int64_t to_stride, from_stride, rows, width;
    int narrow;
} seqpar__half_copy;

static void seqpar__half_copy_job(void *user, int64_t job, char *scratch) {
    const seqpar__half_copy *c = (const seqpar__half_copy *)user;
    int64_t end = SEQPAR__MIN(c->rows, (job + 1) * SEQPAR__HALF_RUN);
    (void)scratch;
    for (int64_t t = job * SEQPAR__HALF_RUN; t < end; t++)
        if (c->narrow)
            seqpar__bf16_narrow((uint16_t *)c->to + t * c->to_stride,
                                (const float *)c->from + t * c->from_stride, c->width);
        else
            seqpar__bf16_widen((float *)c->to + t * c->to_stride,
                               (const uint16_t *)c->from + t * c->from_stride, c->width);
}

/* to (rows, width) without gaps <- rows `first`, ... of bf16 */
static seqpar_status seqpar__half_widen(seqpar__half *h, float *to, seqpar_mat from,
                                        int64_t first, int64_t rows, int64_t width) {
    seqpar__half_copy c = {to, NULL, width, 0, 0, 0, 0};
    c.from = (const uint16_t *)from.data + first * from.stride;
    c.from_stride = from.stride;
    c.rows = rows;
    c.width = width;
    return seqpar__parallel(h->wide, (rows + SEQPAR__HALF_RUN - 1) / SEQPAR__HALF_RUN, 0,
                            seqpar__half_copy_job, &c);
}

/* rows `first`, ... of bf16 <- from (rows, width) without gaps */
static seqpar_status seqpar__half_narrow(seqpar__half *h, seqpar_mat to, int64_t first,
                                         const float *from, int64_t rows, int64_t width) {
    seqpar__half_copy c = {NULL, from, 0, width, 0, 0, 1};
    c.to = (uint16_t *)to.data + first * to.stride;
    c.to_stride = to.stride;
    c.rows = rows;
    c.width = width;
    return seqpar__parallel(h->wide, (rows + SEQPAR__HALF_RUN - 1) / SEQPAR__HALF_RUN, 0,
                            seqpar__half_copy_job, &c);
}

/* One matrix of an operation, processed a block of rows at a time. */
typedef struct seqpar__half_mat {
    seqpar_mat *mat; /* in a copy of the arguments: the current rows, in fp32 */
    int64_t width;
    int reads, writes; /* the operation reads it; writes it */
    seqpar_mat whole;  /* the caller's matrix, in bf16 */
} seqpar__half_mat;

/* Rows first .. first + count of `rows` are the current ones; `most`: the most of a block. */
typedef struct seqpar__half_walk {
    seqpar__half *half;
    seqpar__half_mat *mats;
    int mat_count;
    int64_t rows, most, first, count;
    seqpar_status status;
} seqpar__half_walk;

static seqpar__half_walk seqpar__half_begin(seqpar_device *device, seqpar__half_mat *mats,
                                            int mat_count, int64_t rows) {
    seqpar__half_walk w;
    int64_t widest = 1;
    w.half = seqpar__half_of(device);
    w.mats = mats;
    w.mat_count = mat_count;
    w.rows = rows;
    for (int i = 0; i < mat_count; i++) {
        mats[i].whole = *mats[i].mat;
        widest = SEQPAR__MAX(widest, mats[i].width);
    }
    w.most = SEQPAR__MAX(SEQPAR__HALF_BLOCK / widest, SEQPAR__HALF_LEAST * device->threads);
    w.first = w.count = 0;
    w.status = SEQPAR_OK;
    return w;
}

/* Rounds and stores the current rows of written matrices, then widens the next rows of those
   that are read. Returns 0 if no rows are left, or if w->status is an error. */
static int seqpar__half_next(seqpar__half_walk *w) {
    for (int i = 0; i < w->mat_count; i++)
        if (!w->status && w->count > 0 && w->mats[i].writes)
            w->status = seqpar__half_narrow(w->half, w->mats[i].whole, w->first,
                                            (const float *)w->mats[i].mat->data, w->count,
                                            w->mats[i].width);
    w->first += w->count;
    w->count = SEQPAR__MIN(w->most, w->rows - w->first);
    for (int i = 0; !w->status && w->count > 0 && i < w->mat_count; i++) {
        seqpar__half_mat *m = &w->mats[i];
        float *room = seqpar__half_scratch(w->half, i, w->count * m->width);
        if (!room) w->status = SEQPAR_ERR_MEMORY;
        m->mat->data = room;
        m->mat->stride = m->width;
        if (room && m->reads)
            w->status = seqpar__half_widen(w->half, room, m->whole, w->first, w->count,
                                           m->width);
    }
    return !w->status && w->count > 0;
}

static void *seqpar__half_at(const void *accumulators, int64_t element) {
    return seqpar__at_or_null(accumulators, element, SEQPAR_DTYPE_F32);
}

static seqpar_status seqpar__half_rmsnorm(seqpar_device *device, const seqpar_rmsnorm_args *a,
                                          void *queue) {
    seqpar_rmsnorm_args b = *a;
    seqpar__half_mat mats[2] = {{&b.y, a->width, 0, 1, {NULL, 0}},
                                {&b.x, a->width, 1, 0, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 2, a->rows);
    float *gain = seqpar__half_scratch(w.half, 2, a->width);
    if (!gain) return SEQPAR_ERR_MEMORY;
    seqpar__bf16_widen(gain, (const uint16_t *)a->gain, a->width);
    b.gain = gain;
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        b.rstd = seqpar__half_at(a->rstd, w.first);
        w.status = w.half->wide->rmsnorm(w.half->wide, &b, queue);
    }
    return w.status;
}

static seqpar_status seqpar__half_rope(seqpar_device *device, const seqpar_rope_args *a,
                                       void *queue) {
    seqpar_rope_args b = *a;
    seqpar__half_mat mat = {&b.x, a->heads * a->head_dim, 1, 1, {NULL, 0}};
    seqpar__half_walk w = seqpar__half_begin(device, &mat, 1, a->rows);
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        b.positions = a->positions + w.first;
        w.status = w.half->wide->rope(w.half->wide, &b, queue);
    }
    return w.status;
}

static seqpar_status seqpar__half_swiglu(seqpar_device *device, const seqpar_swiglu_args *a,
                                         void *queue) {
    seqpar_swiglu_args b = *a;
    seqpar__half_mat mats[3] = {{&b.y, a->width, 0, 1, {NULL, 0}},
                                {&b.gate, a->width, 1, 0, {NULL, 0}},
                                {&b.up, a->width, 1, 0, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 3, a->rows);
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        w.status = w.half->wide->swiglu(w.half->wide, &b, queue);
    }
    return w.status;
}

static seqpar_status seqpar__half_swiglu_grad(seqpar_device *device,
                                              const seqpar_swiglu_args *a, void *queue) {
    seqpar_swiglu_args b = *a;
    seqpar__half_mat mats[3] = {{&b.y, a->width, 1, 0, {NULL, 0}},
                                {&b.gate, a->width, 1, 1, {NULL, 0}},
                                {&b.up, a->width, 1, 1, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 3, a->rows);
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        w.status = w.half->wide->swiglu_grad(w.half->wide, &b, queue);
    }
    return w.status;
}

static void seqpar__half_add_job(void *user, int64_t job, char *scratch) {
    const seqpar_add_args *a = (const seqpar_add_args *)user;
    const uint16_t *x = (const uint16_t *)a->a, *y = (const uint16_t *)a->b;
    int64_t end = SEQPAR__MIN(a->count, (job + 1) * 16384);
    (void)scratch;
    for (int64_t i = job * 16384; i < end; i++)
        ((uint16_t *)a->y)[i] = seqpar_bf16_from_float(seqpar_bf16_to_float(x[i]) +
                                                       seqpar_bf16_to_float(y[i]));
}

static seqpar_status seqpar__half_add(seqpar_device *device, const seqpar_add_args *a,
                                      void *queue) {
    seqpar_device *wide = seqpar__half_of(device)->wide;
    if (a->accumulators) return wide->add(wide, a, queue);
    return seqpar__parallel_runs(wide, (a->count + 16383) / 16384, 0, seqpar__half_add_job,
                                 (void *)a);
}

static seqpar_status seqpar__half_attn_delta(seqpar_device *device,
                                             const seqpar_attn_delta_args *a, void *queue) {
    seqpar_attn_delta_args b = *a;
    int64_t width = a->heads * a->head_dim;
    seqpar_mat dout = {(void *)a->dout, width}, out = {(void *)a->out, width};
    seqpar__half_mat mats[2] = {{&dout, width, 1, 0, {NULL, 0}},
                                {&out, width, 1, 0, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 2, a->tokens);
    while (seqpar__half_next(&w)) {
        b.tokens = w.count;
        b.dout = dout.data;
        b.out = out.data;
        b.delta = seqpar__half_at(a->delta, w.first * a->heads);
        w.status = w.half->wide->attn_delta(w.half->wide, &b, queue);
    }
    return w.status;
}

static seqpar_status seqpar__half_vocab_softmax(seqpar_device *device,
                                                const seqpar_vocab_softmax_args *a,
                                                void *queue) {
    seqpar_vocab_softmax_args b = *a;
    seqpar__half_mat mat = {&b.logits, a->vocab, 1, a->gradient, {NULL, 0}};
    seqpar__half_walk w = seqpar__half_begin(device, &mat, 1, a->rows);
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        b.targets = a->targets + w.first;
        b.logp = seqpar__half_at(a->logp, w.first);
        b.entropy = seqpar__half_at(a->entropy, w.first);
        b.lse = seqpar__half_at(a->lse, w.first);
        b.smooth = seqpar__half_at(a->smooth, w.first);
        b.dlogp = seqpar__half_at(a->dlogp, w.first);
        b.dentropy = seqpar__half_at(a->dentropy, w.first);
        b.dsmooth = seqpar__half_at(a->dsmooth, w.first);
        b.dzloss = seqpar__half_at(a->dzloss, w.first);
        w.status = w.half->wide->vocab_softmax(w.half->wide, &b, queue);
    }
    return w.status;
}

static seqpar_status seqpar__half_distill(seqpar_device *device, const seqpar_distill_args *a,
                                          void *queue) {
    seqpar_distill_args b = *a;
    seqpar__half_mat mats[2] = {{&b.logits, a->vocab, 1, 0, {NULL, 0}},
                                {&b.teacher, a->vocab, 1, a->gradient, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 2, a->rows);
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        b.kl = seqpar__half_at(a->kl, w.first);
        b.entropy = seqpar__half_at(a->entropy, w.first);
        b.dkl = seqpar__half_at(a->dkl, w.first);
        w.status = w.half->wide->distill(w.half->wide, &b, queue);
    }
    return w.status;
}

static seqpar_status seqpar__half_choose(seqpar_device *device, const seqpar_choose_args *a,
                                         void *queue) {
    seqpar_choose_args b = *a;
    seqpar__half_mat mats[1] = {{&b.logits, a->vocab, 1, a->gradient, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 1, a->rows);
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        b.logq = seqpar__half_at(a->logq, w.first * a->count);
        b.dlogq = seqpar__half_at(a->dlogq, w.first * a->count);
        w.status = w.half->wide->choose(w.half->wide, &b, queue);
    }
    return w.status;
}

static seqpar_status seqpar__half_nf4_rows(seqpar_device *device, const seqpar_nf4_rows_args *a,
                                           void *queue) {
    seqpar_nf4_rows_args b = *a;
    seqpar__half_mat mats[1] = {{&b.out, a->cols, 0, 1, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 1, a->rows);
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        b.row = a->row + w.first;
        w.status = w.half->wide->nf4_rows(w.half->wide, &b, queue);
    }
    return w.status;
}

/* Columns of a matrix from `first` on. */
static seqpar_mat seqpar__half_columns(seqpar_mat m, int64_t first) {
    m.data = (uint16_t *)m.data + first;
    return m;
}

/* Computes columns out .. out + b->out of the product, for the current rows, which start at
   `first`. b->x is already widened. */
static seqpar_status seqpar__half_product(seqpar__half *h, const seqpar_matmul_args *a,
                                          seqpar_matmul_args *b, int64_t first, int64_t out) {
    float *w = seqpar__half_scratch(h, 1, b->out * a->in);
    float *y = seqpar__half_scratch(h, 2, b->rows * b->out);
    seqpar_mat to = seqpar__half_columns(a->y, out);
    if (!w || !y) return SEQPAR_ERR_MEMORY;
    b->w.data = w;
    b->w.stride = a->transposed ? b->out : a->in;
    b->y.data = y;
    b->y.stride = b->out;
    if (a->transposed)
        SEQPAR__TRY(
            seqpar__half_widen(h, w, seqpar__half_columns(a->w, out), 0, a->in, b->out));
    else
        SEQPAR__TRY(seqpar__half_widen(h, w, a->w, out, b->out, a->in));
    if (a->accumulate) SEQPAR__TRY(seqpar__half_widen(h, y, to, first, b->rows, b->out));
    SEQPAR__TRY(h->wide->matmul(h->wide, b, NULL));
    return seqpar__half_narrow(h, to, first, y, b->rows, b->out);
}

static seqpar_status seqpar__half_matmul(seqpar_device *device, const seqpar_matmul_args *a,
                                         void *queue) {
    seqpar_matmul_args b = *a;
    seqpar__half_mat x = {&b.x, a->in, 1, 0, {NULL, 0}};
    seqpar__half_walk w = seqpar__half_begin(device, &x, 1, a->rows);
    int64_t least = SEQPAR__HALF_COLUMNS;
    int64_t most = SEQPAR__MAX(SEQPAR__HALF_BLOCK / SEQPAR__MAX(a->in, 1) / least * least,
                               least);
    (void)queue;
    while (seqpar__half_next(&w)) {
        b.rows = w.count;
        for (int64_t out = 0; !w.status && out < a->out; out += b.out) {
            b.out = SEQPAR__MIN(most, a->out - out);
            w.status = seqpar__half_product(w.half, a, &b, w.first, out);
        }
    }
    return w.status;
}

/* The leaves that a fold takes are in rows [*first, *past); *leaf_count is one more than the
   highest leaf number. */
static void seqpar__half_leaf_rows(const seqpar_fold_call *fold, const seqpar_piece *leaves,
                                   int64_t *first, int64_t *past, int64_t *leaf_count) {
    *first = INT64_MAX;
    *past = *leaf_count = 0;
    for (int64_t i = 0; i < fold->program_count; i++) {
        const seqpar_fold_op *op = &fold->program[i];
        const seqpar_piece *leaf = leaves + op->index;
        if (op->op != SEQPAR_FOLD_LEAF && op->op != SEQPAR_FOLD_EXTEND) continue;
        *leaf_count = SEQPAR__MAX(*leaf_count, op->index + 1);
        *first = SEQPAR__MIN(*first, leaf->local);
        *past = SEQPAR__MAX(*past, leaf->local + leaf->count);
    }
    *first = SEQPAR__MIN(*first, *past);
}

/* Computes rows out .. out + b->out of the gradient. b->x is already widened. */
static seqpar_status seqpar__half_weight_rows(seqpar__half *h, const seqpar_weight_grad_args *a,
                                              seqpar_weight_grad_args *b, int64_t first,
                                              int64_t rows, int64_t out) {
    float *dy = seqpar__half_scratch(h, 1, rows * b->out);
    if (!dy) return SEQPAR_ERR_MEMORY;
    b->dy.data = dy;
    b->dy.stride = b->out;
    b->fold.store = seqpar__half_at(a->fold.store, out * a->in);
    b->fold.finish = seqpar__half_at(a->fold.finish, out * a->in);
    SEQPAR__TRY(
        seqpar__half_widen(h, dy, seqpar__half_columns(a->dy, out), first, rows, b->out));
    return h->wide->weight_grad(h->wide, b, NULL);
}

/* Widens the leaves' rows of x once, and dy some columns at a time, to save memory. For each
   such block of rows of dw the fp32 device folds the same leaves. */
static seqpar_status seqpar__half_weight_grad(seqpar_device *device,
                                              const seqpar_weight_grad_args *a, void *queue) {
    seqpar__half *h = seqpar__half_of(device);
    seqpar_weight_grad_args b = *a;
    int64_t first, past, count, most;
    seqpar_piece *leaves;
    float *x;
    seqpar_status status;
    (void)queue;
    seqpar__half_leaf_rows(&a->fold, a->leaves, &first, &past, &count);
    x = seqpar__half_scratch(h, 0, (past - first) * a->in);
    leaves = SEQPAR__NEW(seqpar_piece, count + 1);
    if (!x || !leaves) {
        SEQPAR_FREE(leaves);
        return seqpar__no_memory(device->error, "widened rows");
    }
    if (count > 0) memcpy(leaves, a->leaves, (size_t)count * sizeof *leaves);
    for (int64_t i = 0; i < count; i++) leaves[i].local -= first;
    b.leaves = leaves;
    b.x.data = x;
    b.x.stride = a->in;
    most = SEQPAR__HALF_BLOCK / SEQPAR__MAX(past - first, 1) / SEQPAR__HALF_WEIGHTS;
    most = SEQPAR__MAX(most, 1) * SEQPAR__HALF_WEIGHTS;
    status = seqpar__half_widen(h, x, a->x, first, past - first, a->in);
    for (int64_t out = 0; !status && out < a->out; out += b.out) {
        b.out = SEQPAR__MIN(most, a->out - out);
        status = seqpar__half_weight_rows(h, a, &b, first, past - first, out);
    }
    SEQPAR_FREE(leaves);
    return status;
}

/* All rows at once: the gain's gradient is a fold over them. */
static seqpar_status seqpar__half_rmsnorm_grad(seqpar_device *device,
                                               const seqpar_rmsnorm_grad_args *a, void *queue) {
    seqpar_rmsnorm_grad_args b = *a;
    seqpar__half_mat mats[3] = {{&b.dx, a->width, 1, 1, {NULL, 0}},
                                {&b.dy, a->width, 1, 0, {NULL, 0}},
                                {&b.x, a->width, 1, 0, {NULL, 0}}};
    seqpar__half_walk w = seqpar__half_begin(device, mats, 3, a->rows);
    float *gain = (float *)seqpar__host_alloc(device, a->width * 4 + 4);
    if (!gain) return seqpar__no_memory(device->error, "widened rows");
    seqpar__bf16_widen(gain, (const uint16_t *)a->gain, a->width);
    b.gain = gain;
    w.most = SEQPAR__MAX(a->rows, 1);
    while (seqpar__half_next(&w))
        w.status = w.half->wide->rmsnorm_grad(w.half->wide, &b, queue);
    if (!w.status && a->rows == 0)
        w.status = w.half->wide->rmsnorm_grad(w.half->wide, &b, queue);
    seqpar__host_free(device, gain);
    return w.status;
}

/* At step 1 the fp32 masters (p) start as the working weights, which are bf16. After each
   update the working weights are the masters, rounded. */
static seqpar_status seqpar__half_update(seqpar_device *device, const seqpar_update_args *a,
                                         int sgd) {
    seqpar_device *wide = seqpar__half_of(device)->wide;
    for (int64_t i = 0, n; i < a->count; i += n) {
        seqpar_update_args b = *a;
        uint16_t *working = a->working ? (uint16_t *)a->working + i : NULL;
        n = SEQPAR__MIN(a->count - i, (int64_t)SEQPAR__HALF_BLOCK);
        b.p = seqpar__half_at(a->p, i);
        b.m = seqpar__half_at(a->m, i);
        b.v = seqpar__half_at(a->v, i);
        b.g = seqpar__half_at(a->g, i);
        b.count = n;
        if (working && a->t == 1) seqpar__bf16_widen((float *)b.p, working, n);
        SEQPAR__TRY((sgd ? wide->sgd : wide->adamw)(wide, &b, NULL));
        if (working) seqpar__bf16_narrow(working, (const float *)b.p, n);
    }
    return SEQPAR_OK;
}

SEQPAR__OP(seqpar__half_adamw, adamw, seqpar__half_update(device, a, 0))
SEQPAR__OP(seqpar__half_sgd, sgd, seqpar__half_update(device, a, 1))

static void seqpar__half_close(seqpar_device *device) {
    seqpar__half *h = (seqpar__half *)device;
    for (int i = 0; i < SEQPAR__HALF_SCRATCHES; i++) seqpar__host_free(device, h->room[i]);
    seqpar_device_close(h->wide);
    seqpar__host_close(device);
}

SEQPAR_DEF seqpar_device *seqpar_device_cpu_bf16(int64_t threads) {
    seqpar_device *wide = seqpar_device_cpu(threads);
    seqpar__half *h = wide ? SEQPAR__NEW(seqpar__half, 1) : NULL;
    seqpar_device *d = h ? &h->base : NULL;
    if (!d) {
        seqpar_device_close(wide);
        return NULL;
    }
    seqpar__host_table(d, "cpu in bf16", SEQPAR_DTYPE_BF16, SEQPAR_DTYPE_F32);
    h->wide = wide;
    d->threads = wide->threads;
    d->matmul = seqpar__half_matmul;
    d->weight_grad = seqpar__half_weight_grad;
    d->rmsnorm = seqpar__half_rmsnorm;
    d->rmsnorm_grad = seqpar__half_rmsnorm_grad;
    d->rope = seqpar__half_rope;
    d->swiglu = seqpar__half_swiglu;
    d->swiglu_grad = seqpar__half_swiglu_grad;
    d->add = seqpar__half_add;
    d->attn_forward = seqpar__cpu_attn_forward;
    d->attn_backward = seqpar__cpu_attn_backward;
    d->attn_delta = seqpar__half_attn_delta;
    d->attn_sinks = seqpar__cpu_attn_sinks;
    d->vocab_softmax = seqpar__half_vocab_softmax;
    d->distill = seqpar__half_distill;
    d->choose = seqpar__half_choose;
    d->nf4_rows = seqpar__half_nf4_rows;
    d->sumsq = seqpar__cpu_sumsq;
    d->adamw = seqpar__half_adamw;
    d->sgd = seqpar__half_sgd;
    d->close = seqpar__half_close;
    return d;
}

/* =============================================================================================
   >>user  a user's block kernel or matrix product replaces the device's
   ========================================================================================== */

static int64_t seqpar__count_visible(const seqpar_attn_args *a, int64_t query, int64_t rows,
                                     const seqpar_attn_keys *k) {
    int64_t first, last, pairs = 0;
    for (int64_t r = 0; r < rows; r++)
        if (seqpar__visible(a, query + r, k, &first, &last)) pairs += last - first;
    return pairs;
}

typedef struct seqpar__user_block { /* dense copies of a block, in the job's scratch */
    seqpar_block block;
    char *q, *k, *v, *dout, *result[3];
    double *lse, *delta;
    int32_t *begin, *end;
} seqpar__user_block;

/* Lays a block out for the kernel: queries of a piece, keys of a piece, one head. */
static seqpar__user_block seqpar__user_block_make(const seqpar__attn_job *j,
                                                  const seqpar_piece *queries,
                                                  const seqpar_attn_keys *keys, int64_t head,
                                                  int64_t kv_head) {
    const seqpar_attn_args *a = j->args;
    int64_t d = a->head_dim, first, last;
    int64_t rows = SEQPAR__MAX(queries->count, keys->count);
    int64_t step = (rows * d * 8 + 63) & ~(int64_t)63;
    int backward = j->kernel->kind != SEQPAR__FOLD_STATE, storage = j->device->storage;
    int type = j->device->block_kernel->storage, statistic = j->device->accumulator;
    seqpar__user_block o;
    memset(&o, 0, sizeof o);
    o.q = j->scratch;
    o.k = o.q + step;
    o.v = o.k + step;
    o.dout = o.v + step;
    o.result[0] = o.dout + step;
    o.result[1] = o.result[0] + step;
    o.result[2] = o.result[1] + step;
    o.lse = (double *)(o.result[2] + step);
    o.delta = o.lse + rows;
    o.begin = (int32_t *)(o.delta + rows);
    o.end = o.begin + rows;
    seqpar__convert(o.q, type,
                    seqpar__at(a->q, (queries->local * a->heads + head) * d, storage), storage,
                    queries->count, d, a->heads * d);
    seqpar__convert(o.k, type,
                    seqpar__at(a->k, (keys->k_row * a->head_count + kv_head) * d, storage),
                    storage, keys->count, d, a->head_count * d);
    seqpar__convert(o.v, type,
                    seqpar__at(a->v, (keys->v_row * a->head_count + kv_head) * d, storage),
                    storage, keys->count, d, a->head_count * d);
    if (backward)
        seqpar__convert(o.dout, type,
                        seqpar__at(a->dout, (queries->local * a->heads + head) * d, storage),
                        storage, queries->count, d, a->heads * d);
    for (int64_t r = 0; r < queries->count; r++) {
        int64_t at = (queries->local + r) * a->heads + head;
        if (!seqpar__visible(a, queries->local + r, keys, &first, &last)) first = last = 0;
        o.begin[r] = (int32_t)first;
        o.end[r] = (int32_t)last;
        if (backward) {
            o.lse[r] = seqpar__element(a->lse, at, statistic);
            o.delta[r] = seqpar__element(a->delta, at, statistic);
        }
    }
    o.block.queries = queries->count;
    o.block.keys = keys->count;
    o.block.head_dim = d;
    o.block.head = a->dropout_head + head;
    o.block.scale = a->scale;
    o.block.softcap = a->softcap;
    o.block.visible_begin = o.begin;
    o.block.visible_end = o.end;
    o.block.q = o.q;
    o.block.k = o.k;
    o.block.v = o.v;
    o.block.dout = backward ? o.dout : NULL;
    o.block.lse = o.lse;
    o.block.delta = o.delta;
    return o;
}

/* Unless `good`: an error that names the block. seqpar__user_end returns it. */
static void seqpar__user_expect(const seqpar__attn_job *j, int good,
                                const seqpar__user_block *o, const seqpar_piece *queries,
                                const char *what) {
    if (good) return;
    seqpar_fail(j->device->error, SEQPAR_ERR_KERNEL,
                "the own block kernel %s (head %lld, %lld queries from position %lld, %lld "
                "keys); its results are discarded",
                what, (long long)o->block.head, (long long)o->block.queries,
                (long long)queries->start, (long long)o->block.keys);
}

static int seqpar__all_finite(const void *x, int type, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(seqpar__element(x, i, type)) <= 1e300)) return 0;
    return 1;
}

/* (out, lse) of a block becomes a state with o = out, m = lse and l = 1, or l = 0 for a query
   that sees nothing. The fast device (fp32 storage) has m in base 2: lse times log2(e). */
static void seqpar__user_forward_leaf(void *user, void *value, int64_t index, int extend) {
    seqpar__attn_job *j = (seqpar__attn_job *)user;
    const seqpar_attn_args *a = j->args;
    const seqpar_block_kernel *kernel = j->device->block_kernel;
    const seqpar_piece *queries = &a->q_pieces[j->task->piece];
    int64_t d = a->head_dim, n = j->count;
    int type = j->device->accumulator, failed;
    seqpar__user_block o = seqpar__user_block_make(j, queries, &a->k_pieces[index], j->head,
                                                   j->head / (a->heads / a->kv_heads) -
                                                       a->head_begin);
    (void)extend;
    failed = kernel->forward(kernel->user, &o.block, o.result[0], o.lse);
    seqpar__user_expect(j, !failed, &o, queries, "fails");
    seqpar__user_expect(j, failed || seqpar__all_finite(o.result[0], kernel->storage, n * d),
                        &o, queries, "returns an out that is not finite");
    for (int64_t r = 0; r < n; r++) {
        int sees = o.end[r] > o.begin[r];
        int good = sees ? fabs(o.lse[r]) <= 1e300 : o.lse[r] == -HUGE_VAL;
        j->flops += 4 * d * (o.end[r] - o.begin[r]);
        seqpar__user_expect(j, failed || good, &o, queries,
                            sees ? "returns an lse that is not finite"
                                 : "returns an lse that is not -inf for a query without keys");
        for (int64_t i = 0; i < d; i++)
            seqpar__element_set(value, r * d + i, type,
                                seqpar__element(o.result[0], r * d + i, kernel->storage));
        seqpar__element_set(value, n * d + r, type,
                            j->device->storage == SEQPAR_DTYPE_F32
                                ? o.lse[r] * (double)SEQPAR__LOG2E
                                : o.lse[r]);
        seqpar__element_set(value, n * (d + 1) + r, type, sees);
    }
}

/* Sets dq of a block, and adds dk and dv of the block to those of the keys. */
static void seqpar__user_backward_leaf(void *user, void *dq, int64_t index, int extend) {
    seqpar__attn_job *j = (seqpar__attn_job *)user, *keys = j->keys;
    const seqpar_attn_args *a = j->args;
    const seqpar_block_kernel *kernel = j->device->block_kernel;
    const seqpar_piece *queries = &a->q_pieces[j->task->piece];
    int64_t d = a->head_dim, n = keys->count * d;
    int type = j->device->accumulator, failed;
    seqpar__user_block o = seqpar__user_block_make(keys, queries, &a->k_pieces[index], j->head,
                                                   keys->head);
    (void)extend;
    seqpar__gradients_begin(keys);
    failed = kernel->backward(kernel->user, &o.block, o.result[0], o.result[1], o.result[2]);
    keys->flops += 10 * d * seqpar__count_visible(a, j->local, j->count, &a->k_pieces[index]);
    seqpar__user_expect(j, !failed, &o, queries, "fails backward");
    seqpar__user_expect(
        j, failed || seqpar__all_finite(o.result[0], kernel->storage, j->count * d), &o,
        queries, "returns a dq that is not finite");
    seqpar__user_expect(j,
                        failed || (seqpar__all_finite(o.result[1], kernel->storage, n) &&
                                   seqpar__all_finite(o.result[2], kernel->storage, n)),
                        &o, queries, "returns a dk or dv that is not finite");
    seqpar__convert(dq, type, o.result[0], kernel->storage, j->count, d, d);
    for (int64_t i = 0; i < 2 * n; i++)
        seqpar__element_set(keys->gradients, i, type,
                            seqpar__element(keys->gradients, i, type) +
                                seqpar__element(o.result[1 + i / n], i % n, kernel->storage));
}

/* Refuses dropout, sizes the scratch by the longest piece of queries or keys that the tasks and
   their programs name, and sets the device to one thread until seqpar__user_end. */
static seqpar_status seqpar__user_start(seqpar_device *device, const seqpar_attn_args *a,
                                        seqpar__attn_kernel *kernel) {
    int64_t rows = 1;
    if (a->dropout > 0)
        return seqpar_fail(device->error, SEQPAR_ERR_KERNEL,
                           "an own block kernel has no dropout; set it to 0 (it is %g)",
                           a->dropout);
    for (int64_t t = 0; t < a->task_count; t++) {
        rows = SEQPAR__MAX(rows, a->q_pieces[a->tasks[t].piece].count);
        for (int64_t p = 0; p < a->tasks[t].program_count; p++)
            if (seqpar__fold_computes(&a->tasks[t].program[p]))
                rows = SEQPAR__MAX(rows, a->k_pieces[a->tasks[t].program[p].index].count);
    }
    kernel->scratch_bytes = 7 * ((rows * a->head_dim * 8 + 63) & ~(int64_t)63) + rows * 24 + 64;
    device->threads = 1; /* the user's kernel may start threads, and need not be thread-safe */
    return SEQPAR_OK;
}

static seqpar_status seqpar__user_end(seqpar_device *device, int64_t threads,
                                      seqpar_status status) {
    device->threads = threads;
    if (status || !device->error) return status;
    return device->error->status;
}

static seqpar_status seqpar__user_forward(seqpar_device *device, const seqpar_attn_args *a,
                                          void *queue) {
    seqpar__attn_kernel kernel = {SEQPAR__FOLD_STATE,
                                  0,
                                  seqpar__user_forward_leaf,
                                  seqpar__cpu_state_combine,
                                  seqpar__cpu_state_finish,
                                  0,
                                  0,
                                  NULL};
    int64_t threads = device->threads;
    (void)queue;
    if (device->storage != SEQPAR_DTYPE_F32) {
        kernel.combine = seqpar__ref_state_combine;
        kernel.finish_state = seqpar__ref_state_finish;
    }
    SEQPAR__TRY(seqpar__user_start(device, a, &kernel));
    return seqpar__user_end(device, threads, seqpar__attn_compute(device, a, &kernel));
}

static seqpar_status seqpar__user_backward(seqpar_device *device,
                                           const seqpar_attn_backward_args *a, void *queue) {
    seqpar__attn_kernel kernel = {
        SEQPAR__FOLD_DQ, 0, seqpar__user_backward_leaf, seqpar__attn_add, NULL, 0, 0, NULL};
    int64_t threads = device->threads;
    (void)queue;
    SEQPAR__TRY(seqpar__user_start(device, &a->queries, &kernel));
    return seqpar__user_end(device, threads, seqpar__attn_backward_compute(device, a, &kernel));
}

SEQPAR_DEF void seqpar_device_user_kernel(seqpar_device *device,
                                          const seqpar_block_kernel *kernel) {
    SEQPAR_MUST("device, kernel", device, kernel);
    SEQPAR_MUST("kernel->forward, kernel->backward", SEQPAR_THERE(kernel->forward),
                SEQPAR_THERE(kernel->backward));
    device->block_kernel = kernel;
    device->attn_forward = seqpar__user_forward;
    device->attn_backward = seqpar__user_backward;
}

#ifndef SEQPAR__USER_ROWS
#define SEQPAR__USER_ROWS (1 << 20) /* the most rows of a call */
#endif
/* CBLAS takes sizes as int, so rows are passed in runs of SEQPAR__USER_ROWS. */
static seqpar_status seqpar__user_matmul(seqpar_device *device, const seqpar_matmul_args *a,
                                         void *queue) {
    enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
    int64_t widest = SEQPAR__MAX(SEQPAR__MAX(a->y.stride, a->x.stride),
                                 SEQPAR__MAX(a->w.stride, a->out));
    int w_order = a->transposed ? NO_TRANS : TRANS;
    float keep = a->accumulate ? 1.0f : 0.0f;
    (void)queue;
    if (device->storage != SEQPAR_DTYPE_F32)
        return seqpar_fail(
            device->error, SEQPAR_ERR_KERNEL,
            "an own product needs fp32 storage, which the device '%s' does not have; use "
            "seqpar_device_cpu",
            device->name);
    if (widest > INT32_MAX)
        return seqpar_fail(
            device->error, SEQPAR_ERR_KERNEL,
            "an own product takes rows of at most 2147483647 elements; these have %lld",
            (long long)widest);
    for (int64_t row = 0; row < a->rows; row += SEQPAR__USER_ROWS)
        device->sgemm(ROW_MAJOR, NO_TRANS, w_order,
                      (int)SEQPAR__MIN((int64_t)SEQPAR__USER_ROWS, a->rows - row), (int)a->out,
                      (int)a->in, 1.0f, (const float *)a->x.data + row * a->x.stride,
                      (int)a->x.stride, (const float *)a->w.data, (int)a->w.stride, keep,
                      (float *)a->y.data + row * a->y.stride, (int)a->y.stride);
    return SEQPAR_OK;
}

SEQPAR_DEF void seqpar_device_user_product(seqpar_device *device, seqpar_sgemm sgemm) {
    SEQPAR_MUST("device", device);
    device->sgemm = sgemm;
    device->matmul = seqpar__user_matmul;
}

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif
#endif /* SEQPAR_IMPLEMENTATION */

/* >>licence

seqpar is available under two licences; choose the one you prefer.

------------------------------------------------------------------------------
ALTERNATIVE A - MIT License

Copyright (c) 2026 the seqpar authors

Permission is hereby granted, free of charge, to any person obtaining a copy of
this software and associated documentation files (the "Software"), to deal in
the Software without restriction, including without limitation the rights to
use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies
of the Software, and to permit persons to whom the Software is furnished to do
so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.

------------------------------------------------------------------------------
ALTERNATIVE B - Public Domain (www.unlicense.org)

This is free and unencumbered software released into the public domain.

Anyone is free to copy, modify, publish, use, compile, sell, or distribute this
software, either in source code form or as a compiled binary, for any purpose,
commercial or non-commercial, and by any means.

In jurisdictions that recognize copyright laws, the author or authors of this
software dedicate any and all copyright interest in the software to the public
domain. We make this dedication for the benefit of the public at large and to
the detriment of our heirs and successors. We intend this dedication to be an
overt act of relinquishment in perpetuity of all present and future rights to
this software under copyright law.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION
WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*/
