/* seqpar_check.h - v0.2.0 - simulates attention plans: is every visible pair computed once,
   does every message arrive, and what does a plan cost - MIT or Unlicense */
/* SPDX-License-Identifier: MIT OR Unlicense */
/*
   A schedule of seqpar.h is data, so it can be checked, and its cost counted, for a thousand
   ranks without running one of them. Training does not need this header. It is for those who
   change, write or choose a schedule.

   Does:      refuse a plan that loses, repeats or mixes up blocks or messages, with the rank
              and the operation; count FLOPs, bytes, overlap and slots.
   Does not:  run anything, or look at a clock.

   #define SEQPAR_IMPLEMENTATION / SEQPAR_CHECK_IMPLEMENTATION in one unit. Options:
   SEQPAR_STATIC as in seqpar.h.

       seqpar_plan plans[P];                       for each rank: seqpar_plan_make(&error, &plans[rank], &desc);
       seqpar_plan_mask mask = {rows, 1, &attn};
       if (seqpar_plan_check(&error, plans, &mask)) puts(error.text);
*/
#ifndef SEQPAR_CHECK_H
#define SEQPAR_CHECK_H
#include "seqpar.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct seqpar_plan_mask {
    const seqpar_row *rows;
    int64_t row_count;
    const seqpar_attn_desc *desc;
} seqpar_plan_mask;

/* Simulates the plans of all SP ranks, plans[rank], together. A fault is refused with
   SEQPAR_ERR_PLAN; the message names the rank and the operation. Faults are:
     - a block that the mask needs (NULL: every pair of positions) is not computed, or any block
       is computed twice;
     - a slot is read before its message has arrived, or overwritten while it is sent;
     - a message is never sent or never received, or is taken for another;
     - a request is not waited for, or a wait never ends;
     - dk and dv do not reach their owner exactly once. */
SEQPAR_DEF seqpar_status seqpar_plan_check(seqpar_error *error, const seqpar_plan *plans,
                                           const seqpar_plan_mask *mask);

/* The FLOPs that this rank computes and the bytes that it sends, forward and backward. FLOPs:
   for each visible pair and head 4 head_dim forward, 10 head_dim backward. per_source
   (sp_size), unless NULL: the forward FLOPs by source, the rank (with Ulysses: the position)
   that owns the keys. */
typedef struct seqpar_attn_cost {
    int64_t forward_flops, backward_flops, forward_bytes, backward_bytes;
} seqpar_attn_cost;

SEQPAR_DEF seqpar_status seqpar_attn_cost_of(const seqpar_ctx *ctx, const seqpar_attn *attn,
                                             seqpar_attn_cost *cost, int64_t *per_source);

/* The cost of a rank's plan, counted without running it. dtype: the storage type. FLOPs: for
   each visible pair and head 4 head_dim forward, 10 head_dim backward. step_flops (steps):
   forward, by the position that owns the keys. Bytes: those that the transport will count.
   Overlap: the share of these bytes that has a computation between begin and wait. slots: k, v
   buffers. The caller frees it with seqpar_plan_cost_free. */
typedef struct seqpar_plan_cost {
    int64_t forward_flops, backward_flops, forward_bytes, backward_bytes, slots, steps;
    int64_t *step_flops;
    double forward_overlap, backward_overlap;
} seqpar_plan_cost;

SEQPAR_DEF seqpar_status seqpar_plan_cost_of(seqpar_error *error, seqpar_plan_cost *cost,
                                             const seqpar_plan_mask *mask, int64_t sp_size,
                                             int64_t sp_rank, int dtype);
SEQPAR_DEF void seqpar_plan_cost_free(seqpar_plan_cost *cost);

#ifdef __cplusplus
}
#endif
#endif /* SEQPAR_CHECK_H */

#if defined(SEQPAR_CHECK_IMPLEMENTATION) && !defined(SEQPAR__CHECK_IMPLEMENTED)
#define SEQPAR__CHECK_IMPLEMENTED
#if !defined(SEQPAR__IMPLEMENTED)
#error \
    "seqpar_check.h: define SEQPAR_IMPLEMENTATION in the same unit; plans are played with the core's parts"
#endif
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-trapping-math", "no-math-errno")
#endif

typedef struct seqpar__note { /* a message in flight */
    int op;
    int64_t source, head_begin, head_count;
    struct seqpar__note *next;
} seqpar__note;

typedef struct seqpar__paper_slot {
    /* readers: number of requests that send from it; filling: 1 while one receives into it */
    int full, readers, filling;
    int64_t source, sources, head_begin, head_count;
} seqpar__paper_slot;

typedef struct seqpar__paper_rank {
    const seqpar_plan *plan;
    int64_t rank, at; /* next operation */
    seqpar__paper_slot slot[3];
    int64_t *flying; /* (requests) 1 + the operation that began it; 0: none */
    uint8_t *computed, *returned, *folded; /* (positions, kv heads of the member) how often */
    int in_flight[2];                      /* returns in flight by buffer */
    /* by outbox: 1 + the position whose dk, dv it holds; if it holds those of all positions,
       1 + their first head; 0: empty */
    int64_t filled[2];
    int gathered, closing, back, placed;
} seqpar__paper_rank;

typedef struct seqpar__paper {
    seqpar_error *error;
    seqpar__paper_rank *ranks;
    int64_t size, positions, heads; /* heads: most kv heads of a member */
    seqpar__note **first, **last;   /* (size, size) messages from, to */
    /* (positions, positions) 1: some query of the first sees some key of the second */
    uint8_t *needed;
    void *notes;
} seqpar__paper;

static const char *seqpar__plan_op_name(int op) {
    static const char *const names[] = {"HEADS",   "PACK",   "SHIFT", "GATHER", "WAIT",
                                        "COMPUTE", "RETURN", "FOLD",  "TOKENS", "UNPACK"};
    return op >= 0 && op <= SEQPAR_PLAN_PLACE ? names[op] : "?";
}

static seqpar_status seqpar__plan_fail(seqpar__paper *paper, const seqpar__paper_rank *r,
                                       const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return seqpar_fail(
        paper->error, SEQPAR_ERR_PLAN, "rank %lld, operation %lld (%s): %s", (long long)r->rank,
        (long long)r->at,
        r->at < r->plan->count ? seqpar__plan_op_name(r->plan->ops[r->at].op) : "end", text);
}

static int64_t seqpar__paper_peer(const seqpar__paper_rank *r, int64_t position) {
    return position * r->plan->ulysses_size + r->plan->member;
}

static seqpar_status seqpar__paper_send(seqpar__paper *paper, seqpar__paper_rank *r, int64_t to,
                                        const seqpar_plan_op *op, int64_t source) {
    seqpar__note *note;
    int64_t cell = r->rank * paper->size + to;
    if (to < 0 || to >= paper->size || to == r->rank)
        return seqpar__plan_fail(paper, r, "sends to rank %lld of %lld", (long long)to,
                                 (long long)paper->size);
    note = (seqpar__note *)seqpar__list_calloc(&paper->notes, (int64_t)sizeof *note);
    if (!note) return seqpar__no_memory(paper->error, "a plan on paper");
    note->op = op->op;
    note->source = source;
    note->head_begin = op->head_begin;
    note->head_count = op->head_count;
    if (paper->first[cell])
        paper->last[cell]->next = note;
    else
        paper->first[cell] = note;
    paper->last[cell] = note;
    return SEQPAR_OK;
}

static const seqpar__note *seqpar__paper_waiting(const seqpar__paper *paper,
                                                 const seqpar__paper_rank *r, int64_t from) {
    return from < 0 || from >= paper->size ? NULL : paper->first[from * paper->size + r->rank];
}

/* Takes the oldest message of a rank, which must be what this operation expects. */
static seqpar_status seqpar__paper_take(seqpar__paper *paper, seqpar__paper_rank *r,
                                        int64_t from, const seqpar_plan_op *op,
                                        int64_t *source) {
    seqpar__note *note = paper->first[from * paper->size + r->rank];
    paper->first[from * paper->size + r->rank] = note->next;
    if (note->op != op->op || note->head_begin != op->head_begin ||
        note->head_count != op->head_count)
        return seqpar__plan_fail(
            paper, r,
            "rank %lld sends %s of heads %lld + %lld where %s of heads %lld + %lld is expected",
            (long long)from, seqpar__plan_op_name(note->op), (long long)note->head_begin,
            (long long)note->head_count, seqpar__plan_op_name(op->op),
            (long long)op->head_begin, (long long)op->head_count);
    *source = note->source;
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_begin(seqpar__paper *paper, seqpar__paper_rank *r,
                                         const seqpar_plan_op *op) {
    if (op->request < 0 || op->request >= r->plan->requests)
        return seqpar__plan_fail(paper, r, "request %d of %lld", op->request,
                                 (long long)r->plan->requests);
    if (r->flying[op->request])
        return seqpar__plan_fail(paper, r, "request %d begins again before it was waited for",
                                 op->request);
    r->flying[op->request] = r->at + 1;
    return SEQPAR_OK;
}

/* Finds a slot, and checks that it may be written now (writes 1) or read. */
static seqpar_status seqpar__paper_slot_of(seqpar__paper *paper, seqpar__paper_rank *r,
                                           int32_t number, int writes,
                                           seqpar__paper_slot **slot) {
    *slot = &r->slot[number < 0 || number >= r->plan->slots ? 0 : number];
    if (number < 0 || number >= r->plan->slots)
        return seqpar__plan_fail(paper, r, "slot %d of %lld", number,
                                 (long long)r->plan->slots);
    if ((*slot)->filling)
        return seqpar__plan_fail(
            paper, r, "slot %d is used while a message arrives in it; wait for it first",
            number);
    if (writes && (*slot)->readers)
        return seqpar__plan_fail(paper, r, "slot %d is overwritten while it is being sent",
                                 number);
    if (!writes && !(*slot)->full)
        return seqpar__plan_fail(paper, r, "slot %d is read but was never filled", number);
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_shift(seqpar__paper *paper, seqpar__paper_rank *r,
                                         const seqpar_plan_op *op) {
    seqpar__paper_slot *from, *to;
    SEQPAR__TRY(seqpar__paper_begin(paper, r, op));
    SEQPAR__TRY(seqpar__paper_slot_of(paper, r, op->from, 0, &from));
    SEQPAR__TRY(seqpar__paper_slot_of(paper, r, op->to, 1, &to));
    if (from == to || op->to == 0)
        return seqpar__plan_fail(paper, r, "slot %d cannot receive: it is %s", op->to,
                                 op->to ? "being sent" : "the own k and v");
    if (from->source != op->source || from->head_begin != op->head_begin ||
        from->head_count != op->head_count)
        return seqpar__plan_fail(paper, r,
                                 "slot %d holds position %lld, the operation sends %lld",
                                 op->from, (long long)from->source, (long long)op->source);
    from->readers++;
    to->filling = 1;
    return seqpar__paper_send(paper, r, seqpar__paper_peer(r, op->send_to), op, op->source);
}

static seqpar_status seqpar__paper_gather(seqpar__paper *paper, seqpar__paper_rank *r,
                                          const seqpar_plan_op *op) {
    seqpar__paper_slot *to;
    SEQPAR__TRY(seqpar__paper_begin(paper, r, op));
    SEQPAR__TRY(seqpar__paper_slot_of(paper, r, op->to, 0, &to));
    if (to->readers || to->sources != 1 || to->source != r->plan->position ||
        to->head_begin != op->head_begin || to->head_count != op->head_count)
        return seqpar__plan_fail(paper, r,
                                 "slot %d was not packed with the own heads %lld + %lld",
                                 op->to, (long long)op->head_begin, (long long)op->head_count);
    to->filling = 1;
    for (int64_t q = 0; q < paper->positions; q++)
        if (q != r->plan->position)
            SEQPAR__TRY(
                seqpar__paper_send(paper, r, seqpar__paper_peer(r, q), op, r->plan->position));
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_members(seqpar__paper *paper, seqpar__paper_rank *r,
                                           const seqpar_plan_op *op) {
    SEQPAR__TRY(seqpar__paper_begin(paper, r, op));
    if (op->op == SEQPAR_PLAN_TOKENS) r->closing = 1;
    for (int64_t m = 0; m < r->plan->ulysses_size; m++)
        if (m != r->plan->member)
            SEQPAR__TRY(seqpar__paper_send(
                paper, r, r->plan->position * r->plan->ulysses_size + m, op, r->rank));
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_copy(seqpar__paper *paper, seqpar__paper_rank *r,
                                        const seqpar_plan_op *op) {
    seqpar__paper_slot *to;
    SEQPAR__TRY(seqpar__paper_slot_of(paper, r, op->to, 1, &to));
    to->full = 1;
    to->source = r->plan->position;
    to->sources = 1;
    to->head_begin = op->head_begin;
    to->head_count = op->head_count;
    return SEQPAR_OK;
}

/* Counts the heads of a block in one of the tables, and refuses a head counted twice. */
static seqpar_status seqpar__paper_count(seqpar__paper *paper, seqpar__paper_rank *r,
                                         uint8_t *table, int64_t position,
                                         const seqpar_plan_op *op, const char *what) {
    if (position < 0 || position >= paper->positions || op->head_begin < 0 ||
        op->head_begin + op->head_count > r->plan->kv_count)
        return seqpar__plan_fail(paper, r, "position %lld, heads %lld + %lld do not exist",
                                 (long long)position, (long long)op->head_begin,
                                 (long long)op->head_count);
    for (int64_t h = op->head_begin; h < op->head_begin + op->head_count; h++)
        if (table[position * r->plan->kv_count + h]++)
            return seqpar__plan_fail(
                paper, r, "the block with the keys of position %lld, head %lld is %s twice",
                (long long)position, (long long)h, what);
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_compute(seqpar__paper *paper, seqpar__paper_rank *r,
                                           const seqpar_plan_op *op) {
    seqpar__paper_slot *slot;
    if (r->closing || (r->plan->ulysses_size > 1 && !r->gathered))
        return seqpar__plan_fail(paper, r, "computes %s",
                                 r->closing ? "after results were sent"
                                            : "before the heads have come");
    SEQPAR__TRY(seqpar__paper_slot_of(paper, r, op->from, 0, &slot));
    if (slot->source != op->source || slot->sources != op->sources ||
        slot->head_begin != op->head_begin || slot->head_count != op->head_count)
        return seqpar__plan_fail(
            paper, r, "slot %d holds the keys of position %lld, the operation names %lld",
            op->from, (long long)slot->source, (long long)op->source);
    for (int64_t s = op->source; s < op->source + op->sources; s++)
        SEQPAR__TRY(seqpar__paper_count(paper, r, r->computed, s, op, "computed"));
    if (!r->plan->backward || (op->sources == 1 && op->source == r->plan->position))
        return SEQPAR_OK; /* it fills no outbox */
    if (r->in_flight[op->buffer])
        return seqpar__plan_fail(
            paper, r, "computes into outbox %d, whose return is still in flight", op->buffer);
    r->filled[op->buffer] = 1 + (op->sources > 1 ? op->head_begin : op->source);
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_return(seqpar__paper *paper, seqpar__paper_rank *r,
                                          const seqpar_plan_op *op) {
    SEQPAR__TRY(seqpar__paper_begin(paper, r, op));
    if (r->filled[op->buffer] != 1 + (op->send_to < 0 ? op->head_begin : op->send_to))
        return seqpar__plan_fail(
            paper, r, "returns outbox %d, which holds the dk, dv of others", op->buffer);
    if (r->in_flight[op->buffer]++)
        return seqpar__plan_fail(
            paper, r, "the buffer of a return that is still in flight is used again");
    for (int64_t q = op->send_to < 0 ? 0 : op->send_to;
         q < (op->send_to < 0 ? paper->positions : op->send_to + 1); q++) {
        if (q == r->plan->position && op->send_to < 0) continue;
        SEQPAR__TRY(seqpar__paper_count(paper, r, r->returned, q, op, "returned"));
        if (r->computed[q * r->plan->kv_count + op->head_begin] == 0)
            return seqpar__plan_fail(
                paper, r, "returns dk, dv of position %lld, which it has not computed",
                (long long)q);
        SEQPAR__TRY(
            seqpar__paper_send(paper, r, seqpar__paper_peer(r, q), op, r->plan->position));
    }
    return SEQPAR_OK;
}

/* Takes the messages of all peers of a request. *blocked 1: not all have sent yet. */
static seqpar_status seqpar__paper_collect(seqpar__paper *paper, seqpar__paper_rank *r,
                                           const seqpar_plan_op *began, int64_t *source,
                                           int *blocked) {
    /* among members, not positions */
    int across = began->op == SEQPAR_PLAN_HEADS || began->op == SEQPAR_PLAN_TOKENS;
    int64_t count = across ? r->plan->ulysses_size : paper->positions;
    int64_t own = across ? r->plan->member : r->plan->position;
    int64_t low = began->recv_from >= 0 ? began->recv_from : 0;
    int64_t high = began->recv_from >= 0 ? began->recv_from + 1 : count;
    if (began->recv_from >= count)
        return seqpar__plan_fail(paper, r, "receives from position %lld",
                                 (long long)began->recv_from);
    *blocked = 0;
    for (int64_t q = low; q < high; q++)
        if (q != own && !seqpar__paper_waiting(paper, r,
                                               across ? r->plan->position * count + q
                                                      : seqpar__paper_peer(r, q)))
            *blocked = 1;
    for (int64_t q = low; q < high && !*blocked; q++) {
        if (q == own) continue;
        SEQPAR__TRY(seqpar__paper_take(
            paper, r, across ? r->plan->position * count + q : seqpar__paper_peer(r, q), began,
            source));
        if (began->op != SEQPAR_PLAN_RETURN) continue;
        if (*source != q)
            return seqpar__plan_fail(paper, r, "folds what position %lld made as that of %lld",
                                     (long long)*source, (long long)q);
        SEQPAR__TRY(seqpar__paper_count(paper, r, r->folded, q, began, "folded"));
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_wait(seqpar__paper *paper, seqpar__paper_rank *r,
                                        const seqpar_plan_op *op, int *blocked) {
    const seqpar_plan_op *began;
    seqpar__paper_slot *to;
    int64_t source = -1;
    if (op->request < 0 || op->request >= r->plan->requests || !r->flying[op->request])
        return seqpar__plan_fail(paper, r, "request %d was not begun", op->request);
    began = &r->plan->ops[r->flying[op->request] - 1];
    if ((began->op == SEQPAR_PLAN_RETURN) != (op->op == SEQPAR_PLAN_FOLD))
        return seqpar__plan_fail(paper, r, "request %d is a %s", op->request,
                                 seqpar__plan_op_name(began->op));
    if (r->closing && began->op != SEQPAR_PLAN_TOKENS)
        return seqpar__plan_fail(paper, r, "waits for %s after results were sent",
                                 seqpar__plan_op_name(began->op));
    if (op->op == SEQPAR_PLAN_FOLD && op->buffer != began->buffer)
        return seqpar__plan_fail(paper, r, "folds inbox %d; request %d fills inbox %d",
                                 op->buffer, op->request, began->buffer);
    SEQPAR__TRY(seqpar__paper_collect(paper, r, began, &source, blocked));
    if (*blocked) return SEQPAR_OK;
    r->flying[op->request] = 0;
    if (began->op == SEQPAR_PLAN_HEADS) r->gathered = 1;
    if (began->op == SEQPAR_PLAN_TOKENS) r->back = 1;
    if (began->op == SEQPAR_PLAN_RETURN) r->in_flight[began->buffer]--;
    if (began->op != SEQPAR_PLAN_SHIFT && began->op != SEQPAR_PLAN_GATHER) return SEQPAR_OK;
    to = &r->slot[began->to];
    to->full = 1;
    to->filling = 0;
    to->source = began->op == SEQPAR_PLAN_SHIFT ? source : 0;
    to->sources = began->op == SEQPAR_PLAN_SHIFT ? 1 : paper->positions;
    to->head_begin = began->head_begin;
    to->head_count = began->head_count;
    if (began->op == SEQPAR_PLAN_SHIFT) r->slot[began->from].readers--;
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_op(seqpar__paper *paper, seqpar__paper_rank *r,
                                      int *blocked) {
    const seqpar_plan_op *op = &r->plan->ops[r->at];
    *blocked = 0;
    switch (op->op) {
    case SEQPAR_PLAN_HEADS:
    case SEQPAR_PLAN_TOKENS: return seqpar__paper_members(paper, r, op);
    case SEQPAR_PLAN_COPY: return seqpar__paper_copy(paper, r, op);
    case SEQPAR_PLAN_SHIFT: return seqpar__paper_shift(paper, r, op);
    case SEQPAR_PLAN_GATHER: return seqpar__paper_gather(paper, r, op);
    case SEQPAR_PLAN_COMPUTE: return seqpar__paper_compute(paper, r, op);
    case SEQPAR_PLAN_RETURN: return seqpar__paper_return(paper, r, op);
    case SEQPAR_PLAN_WAIT:
    case SEQPAR_PLAN_FOLD: return seqpar__paper_wait(paper, r, op, blocked);
    case SEQPAR_PLAN_PLACE:
        r->placed = 1;
        return r->back
                   ? SEQPAR_OK
                   : seqpar__plan_fail(paper, r, "results are placed before they have come");
    default: return seqpar__plan_fail(paper, r, "operation %d is unknown", op->op);
    }
}

/* Checks a rank that has done its last operation. */
static seqpar_status seqpar__paper_end(seqpar__paper *paper, seqpar__paper_rank *r) {
    int64_t own = r->plan->position;
    for (int64_t i = 0; i < r->plan->requests; i++)
        if (r->flying[i])
            return seqpar__plan_fail(paper, r, "request %lld is never waited for",
                                     (long long)i);
    if (r->plan->ulysses_size > 1 && !r->placed)
        return seqpar__plan_fail(paper, r, "results never come back to their tokens");
    for (int64_t k = 0; k < paper->positions; k++)
        for (int64_t h = 0; h < r->plan->kv_count; h++) {
            int64_t cell = k * r->plan->kv_count + h;
            if (paper->needed[own * paper->positions + k] && !r->computed[cell])
                return seqpar__plan_fail(
                    paper, r, "the keys of position %lld, head %lld are never computed with",
                    (long long)k, (long long)h);
            if (!r->plan->backward || k == own) continue;
            if (r->computed[cell] && !r->returned[cell])
                return seqpar__plan_fail(
                    paper, r, "dk, dv of position %lld, head %lld are never returned",
                    (long long)k, (long long)h);
            if (paper->needed[k * paper->positions + own] && !r->folded[cell])
                return seqpar__plan_fail(
                    paper, r,
                    "what position %lld made of the own dk, dv, head %lld is never folded",
                    (long long)k, (long long)h);
        }
    return SEQPAR_OK;
}

static seqpar_status seqpar__paper_play(seqpar__paper *paper) {
    int64_t r, done = 0, moved = 1;
    while (moved && done < paper->size)
        for (moved = 0, done = 0, r = 0; r < paper->size; r++) {
            seqpar__paper_rank *p = &paper->ranks[r];
            int blocked = 0;
            while (p->at < p->plan->count && !blocked) {
                SEQPAR__TRY(seqpar__paper_op(paper, p, &blocked));
                if (!blocked) {
                    p->at++;
                    moved++;
                }
            }
            done += p->at == p->plan->count;
        }
    for (r = 0; r < paper->size; r++)
        if (paper->ranks[r].at < paper->ranks[r].plan->count)
            return seqpar__plan_fail(paper, &paper->ranks[r],
                                     "waits for ever: what it receives is never sent");
    for (r = 0; r < paper->size; r++) SEQPAR__TRY(seqpar__paper_end(paper, &paper->ranks[r]));
    for (int64_t i = 0; i < paper->size * paper->size; i++)
        if (paper->first[i])
            return seqpar__plan_fail(paper, &paper->ranks[i % paper->size],
                                     "never receives the %s that rank %lld sends",
                                     seqpar__plan_op_name(paper->first[i]->op),
                                     (long long)(i / paper->size));
    return SEQPAR_OK;
}

/* Marks the positions whose keys are seen by any of these queries. It begins with the last
   ones, which see the most. */
static void seqpar__paper_sees(uint8_t *needed, const seqpar__sight *sight,
                               const int32_t *queries, int64_t count) {
    const seqpar_attn *attn = sight->attn;
    int64_t left = attn->size;
    while (count-- > 0)
        for (int32_t k = sight->keys[queries[count]].begin;
             left > 0 && k < sight->keys[queries[count]].end; k++) {
            uint8_t *cell = &needed[attn->order[k].source];
            if (*cell || !seqpar__sees(sight, queries[count], k)) continue;
            *cell = 1;
            left--;
        }
}

/* Fills paper->needed: which positions' keys the queries of each position see. */
static seqpar_status seqpar__paper_needed(seqpar__paper *paper, const seqpar_plan *plan,
                                          const seqpar_plan_mask *mask) {
    seqpar_ctx ctx; /* of a rank that never runs */
    seqpar__sight sight;
    seqpar_attn *attn = SEQPAR__NEW(seqpar_attn, 1);
    seqpar_status status;
    memset(&ctx, 0, sizeof ctx);
    ctx.error = paper->error;
    if (!attn) return seqpar__no_memory(paper->error, "a plan on paper");
    attn->desc = *mask->desc;
    attn->desc.schedule = SEQPAR_SCHEDULE_LLAMA3; /* does not compute how far keys travel */
    attn->rows = mask->rows;
    attn->row_count = mask->row_count;
    attn->forward = *plan;
    attn->forward.ops = NULL;
    attn->size = paper->positions;
    status = seqpar__attn_shares(&ctx, attn, &sight);
    for (int64_t q = 0; q < paper->positions && !status; q++)
        seqpar__paper_sees(paper->needed + q * paper->positions, &sight,
                           sight.number + sight.begin[q], attn->shares[q].count);
    seqpar__sight_close(&sight);
    seqpar_attn_close(&ctx, attn);
    return status;
}

static seqpar_status seqpar__paper_open(seqpar__paper *paper, const seqpar_plan *plans) {
    int64_t size = plans[0].sp_size, own;
    paper->size = size;
    paper->positions = plans[0].ring_size;
    paper->ranks = (seqpar__paper_rank *)seqpar__list_calloc(
        &paper->notes, size * (int64_t)sizeof *paper->ranks);
    paper->first = (seqpar__note **)seqpar__list_calloc(
        &paper->notes, 2 * size * size * (int64_t)sizeof *paper->first);
    paper->needed = (uint8_t *)seqpar__list_calloc(&paper->notes,
                                                   paper->positions * paper->positions);
    if (!paper->ranks || !paper->first || !paper->needed)
        return seqpar__no_memory(paper->error, "a plan on paper");
    paper->last = paper->first + size * size;
    for (int64_t r = 0; r < size; r++) {
        seqpar__paper_rank *p = &paper->ranks[r];
        int64_t cells = paper->positions * plans[r].kv_count, i;
        p->plan = &plans[r];
        p->rank = r;
        if (plans[r].sp_rank != r || plans[r].sp_size != size ||
            plans[r].ring_size != paper->positions || plans[r].backward != plans[0].backward ||
            plans[r].slots > 3)
            return seqpar__plan_fail(paper, p, "the plan is that of rank %lld of %lld",
                                     (long long)plans[r].sp_rank, (long long)plans[r].sp_size);
        p->flying = (int64_t *)seqpar__list_calloc(&paper->notes, plans[r].requests * 8);
        p->computed = (uint8_t *)seqpar__list_calloc(&paper->notes, 3 * cells);
        if (!p->flying || !p->computed)
            return seqpar__no_memory(paper->error, "a plan on paper");
        p->returned = p->computed + cells;
        p->folded = p->returned + cells;
        /* an all-gather fills its slots by COPY; in a ring slot 0 is this position's k and v */
        for (own = 1, i = 0; i < plans[r].count; i++)
            if (plans[r].ops[i].op == SEQPAR_PLAN_GATHER) own = 0;
        if (own) {
            p->slot[0].full = 1;
            p->slot[0].source = plans[r].position;
            p->slot[0].sources = 1;
            p->slot[0].head_count = plans[r].kv_count;
        }
    }
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_plan_check(seqpar_error *error, const seqpar_plan *plans,
                                           const seqpar_plan_mask *mask) {
    seqpar__paper paper;
    seqpar_status status;
    memset(&paper, 0, sizeof paper);
    paper.error = error;
    status = seqpar__paper_open(&paper, plans);
    if (!status && mask) status = seqpar__paper_needed(&paper, plans, mask);
    if (!status && !mask) memset(paper.needed, 1, (size_t)(paper.positions * paper.positions));
    if (!status) status = seqpar__paper_play(&paper);
    seqpar__list_free(&paper.notes);
    return status;
}

/* The share of the bytes that has a computation between the begin of its transfer and the
   wait. */
static double seqpar__plan_overlap(const seqpar_plan *plan) {
    int64_t all = 0, hidden = 0;
    for (int64_t i = 0; i < plan->count; i++) {
        const seqpar_plan_op *op = &plan->ops[i];
        int covered = 0;
        if (op->op != SEQPAR_PLAN_SHIFT && op->op != SEQPAR_PLAN_GATHER &&
            op->op != SEQPAR_PLAN_RETURN)
            continue;
        for (int64_t j = i + 1; j < plan->count; j++) {
            covered |= plan->ops[j].op == SEQPAR_PLAN_COMPUTE;
            if ((plan->ops[j].op == SEQPAR_PLAN_WAIT || plan->ops[j].op == SEQPAR_PLAN_FOLD) &&
                plan->ops[j].request == op->request)
                break;
        }
        all += op->head_count;
        hidden += covered ? op->head_count : 0;
    }
    return all ? (double)hidden / (double)all : 0.0;
}

/* ---- sizes of the dk, dv messages, without making the fold programs ---- */

/* The fold's tree over the query pieces of all ranks, without nodes that have one child. The
   pieces come first, in order of leaves, then the nodes with two children. If all pieces
   present under a node are this rank's, they make one partial sum of a message. */
typedef struct seqpar__outbox_node {
    int32_t parent, sibling; /* -1: the root */
    int32_t sums;            /* partial sums of this rank's pieces under it */
    /* others: 1 if pieces of other ranks are present under it; visits (pieces only): 1 while
       the piece is present */
    int16_t others, visits;
} seqpar__outbox_node;

typedef struct seqpar__outbox {
    const seqpar_attn *attn;
    int64_t count;                    /* pieces of all ranks */
    const seqpar__sorted_key *pieces; /* (count) by leaf */
    seqpar__outbox_node *tree;        /* (2 count) */
    /* (count) pieces in order of their first and of their last tokens */
    int32_t *first, *last;
    int32_t root;
} seqpar__outbox;

static const seqpar_piece *seqpar__outbox_piece(const seqpar__outbox *c, int64_t i) {
    return &c->attn->shares[c->pieces[i].source].pieces[c->pieces[i].piece];
}

static const seqpar__bounds *seqpar__outbox_bounds(const seqpar__outbox *c, int64_t i) {
    return &c->attn->bounds[c->pieces[i].source][c->pieces[i].piece];
}

static void seqpar__outbox_join(seqpar__outbox_node *tree, int32_t parent, int32_t left,
                                int32_t right) {
    tree[left].parent = tree[right].parent = parent;
    tree[left].sibling = right;
    tree[right].sibling = left;
}

/* The higher the first bit in which the leaves of two adjacent pieces differ, the higher is the
   node that joins them. Nodes that still lack their right child wait on a stack, the lowest on
   top. */
static void seqpar__outbox_tree(seqpar__outbox *c) {
    int64_t height[64];
    int32_t left[64], waiting[64], top = 0;
    for (int64_t i = 0; i < c->count; i++) {
        int64_t differ = i + 1 < c->count ? c->pieces[i].leaf ^ c->pieces[i + 1].leaf
                                          : INT64_MAX;
        c->root = (int32_t)i;
        for (; top > 0 && height[top - 1] < differ; c->root = waiting[top]) {
            top--;
            seqpar__outbox_join(c->tree, waiting[top], left[top], c->root);
        }
        left[top] = c->root;
        height[top] = differ;
        waiting[top++] = (int32_t)(c->count + i);
    }
    c->tree[c->root].parent = -1;
}

/* Adds (step 1) or removes (-1) a piece, and updates the nodes above it that change. */
static void seqpar__outbox_visit(seqpar__outbox *c, int32_t i, int step) {
    seqpar__outbox_node *n = &c->tree[i];
    int present = (n->visits = (int16_t)(n->visits + step)) == 1;
    int own = c->pieces[i].source == c->attn->position;
    n->sums = present && own;
    n->others = (int16_t)(present && !own);
    for (; n->parent >= 0; n = &c->tree[n->parent]) {
        const seqpar__outbox_node *s = &c->tree[n->sibling];
        seqpar__outbox_node *up = &c->tree[n->parent];
        int16_t others = (int16_t)(n->others | s->others);
        int32_t sums = others ? n->sums + s->sums : n->sums + s->sums > 0;
        if (up->others == others && up->sums == sums) return;
        up->others = others;
        up->sums = sums;
    }
}

/* Sorts pieces by their first or last tokens: each goes to an array with one entry per token of
   all rows, whose empty entries are then skipped. No two pieces share a token. */
static int seqpar__outbox_order(const seqpar__outbox *c, int32_t *order, int last) {
    const seqpar_row *rows = c->attn->rows;
    int64_t tokens = 0, row_begin = 0, i, r;
    int32_t *at;
    for (r = 0; r < c->attn->row_count; r++) tokens += rows[r].tokens;
    at = SEQPAR__NEW(int32_t, tokens);
    if (!at) return 0;
    for (i = 0, r = 0; i < c->count; i++) { /* leaves rise with the rows */
        const seqpar_piece *p = seqpar__outbox_piece(c, i);
        while (r < p->row) row_begin += rows[r++].tokens;
        at[row_begin + p->start + (last ? (p->count - 1) * p->stride : 0)] = (int32_t)i + 1;
    }
    for (i = 0; i < tokens; i++)
        if (at[i]) *order++ = at[i] - 1;
    SEQPAR_FREE(at);
    return 1;
}

static int seqpar__outbox_begun(const seqpar__outbox *c, int32_t query,
                                const seqpar_piece *key) {
    int64_t row = seqpar__outbox_piece(c, query)->row;
    return row < key->row ||
           (row == key->row && seqpar__outbox_bounds(c, query)->begin <=
                                   key->start + (key->count - 1) * key->stride);
}

static int seqpar__outbox_ended(const seqpar__outbox *c, int32_t query,
                                const seqpar_piece *key) {
    int64_t row = seqpar__outbox_piece(c, query)->row;
    return row < key->row ||
           (row == key->row && seqpar__outbox_bounds(c, query)->end <= key->start);
}

/* Walks through the key pieces in order of their first tokens. A query piece is present while
   the range that it sees overlaps the key piece: query pieces are added in order of their first
   tokens and removed in order of their last tokens. With strides, the last token of the next
   key piece may be a little lower; then query pieces that were added are taken out again. */
static void seqpar__outbox_sweep(seqpar__outbox *c, seqpar_attn *attn) {
    int64_t came = 0, gone = 0, sums;
    for (int64_t k = 0; k < c->count; k++) {
        const seqpar__sorted_key *at = &c->pieces[c->first[k]];
        const seqpar_piece *key = seqpar__outbox_piece(c, c->first[k]);
        while (came < c->count && seqpar__outbox_begun(c, c->first[came], key))
            seqpar__outbox_visit(c, c->first[came++], 1);
        while (came > 0 && !seqpar__outbox_begun(c, c->first[came - 1], key))
            seqpar__outbox_visit(c, c->first[--came], -1);
        while (gone < c->count && seqpar__outbox_ended(c, c->last[gone], key))
            seqpar__outbox_visit(c, c->last[gone++], -1);
        sums = c->tree[c->root].sums;
        if (attn->desc.relaxed && sums > 1) sums = 1;
        if (at->source != attn->position)
            attn->outbox_rows[at->source] += 2 * key->count * sums;
    }
}

static seqpar_status seqpar__outbox_open(seqpar__outbox *c, seqpar_attn *attn) {
    int64_t total = attn->total;
    memset(c, 0, sizeof *c);
    c->attn = attn;
    c->count = total;
    c->pieces = attn->order;
    c->tree = (seqpar__outbox_node *)seqpar__list_calloc(&attn->lists,
                                                         2 * total * (int64_t)sizeof *c->tree);
    c->first = (int32_t *)seqpar__list_calloc(&attn->lists, total * 4);
    c->last = (int32_t *)seqpar__list_calloc(&attn->lists, total * 4);
    if (!c->tree || !c->first || !c->last) return SEQPAR_ERR_MEMORY;
    return SEQPAR_OK;
}

static seqpar_status seqpar__outbox_count(seqpar_attn *attn) {
    seqpar__outbox c;
    SEQPAR__TRY(seqpar__outbox_open(&c, attn));
    if (c.count == 0) return SEQPAR_OK;
    seqpar__outbox_tree(&c);
    if (!seqpar__outbox_order(&c, c.first, 0) || !seqpar__outbox_order(&c, c.last, 1))
        return SEQPAR_ERR_MEMORY;
    seqpar__outbox_sweep(&c, attn);
    return SEQPAR_OK;
}

/* Adds the bytes of the all-to-alls: this rank sends its tokens for the other members' heads,
   and sends back the results of the other members' tokens. */
static void seqpar__heads_cost(const seqpar_ctx *ctx, const seqpar_attn *attn,
                               seqpar_attn_cost *cost) {
    const seqpar_plan *plan = &attn->forward;
    int64_t d = attn->desc.head_dim * seqpar_dtype_bytes(ctx->device->storage);
    int64_t statistic = seqpar_dtype_bytes(ctx->device->accumulator);
    int64_t begin;
    int64_t own = attn->parts[plan->member].tokens;
    for (int64_t m = 0; m < plan->ulysses_size; m++) {
        int64_t heads = seqpar__member_heads(plan, &attn->desc, m, 0, &begin);
        int64_t kv = seqpar__member_heads(plan, &attn->desc, m, 1, &begin);
        if (m == plan->member) continue;
        cost->forward_bytes += own * (heads + 2 * kv) * d +
                               attn->parts[m].tokens * attn->heads * (d + statistic);
        cost->backward_bytes += own * (2 * (heads + kv) * d + 2 * heads * statistic) +
                                attn->parts[m].tokens * (attn->heads + 2 * attn->kv_heads) * d;
    }
}

SEQPAR_DEF seqpar_status seqpar_attn_cost_of(const seqpar_ctx *ctx, const seqpar_attn *attn,
                                             seqpar_attn_cost *cost, int64_t *per_source) {
    const seqpar_share *mine = &attn->shares[attn->position];
    int64_t unit = 4 * attn->desc.head_dim * attn->heads;
    int64_t row = attn->kv_heads * attn->desc.head_dim *
                  seqpar_dtype_bytes(ctx->device->storage);
    int64_t *seen = seqpar__attn_seen(attn), others = 0;
    memset(cost, 0, sizeof *cost);
    if (!seen) return seqpar__no_memory(ctx->error, "the cost of attention");
    for (int64_t s = 0; s < attn->size; s++) {
        int64_t flops = unit * seqpar__pairs(seen, &attn->shares[s]);
        if (per_source) per_source[s] = flops;
        cost->forward_flops += flops;
        if (s != attn->position) others += attn->outbox_rows[s];
    }
    SEQPAR_FREE(seen);
    /* 5 products (scores, their gradients, dq, dk, dv) for forward's 2 (scores, out) */
    cost->backward_flops = cost->forward_flops / 4 * 10;
    /* ring: the keys that later positions on the way still need; llama3: this position's keys,
       to all */
    for (int64_t s = 0; s < attn->size; s++)
        cost->forward_bytes += 2 * row *
                               (seqpar__gathers(attn) ? (s != attn->position) * mine->tokens
                                                      : seqpar__rows_in(&attn->send_rows[s]));
    cost->backward_bytes = cost->forward_bytes +
                           others * attn->kv_heads * attn->desc.head_dim *
                               seqpar_dtype_bytes(ctx->device->accumulator);
    seqpar__heads_cost(ctx, attn, cost);
    return SEQPAR_OK;
}

/* Prepares the parts of attention that its cost depends on: shares, ranges, and the sizes of
   the dk, dv messages. */
static seqpar_status seqpar__cost_prepare(seqpar_ctx *ctx, seqpar_attn *attn) {
    int64_t i = 0;
    seqpar__sight sight;
    seqpar_status status = seqpar__attn_shares(ctx, attn, &sight);
    seqpar__sight_close(&sight);
    if (status) return status;
    SEQPAR__TRY(seqpar__attn_visible(attn));
    while (attn->backward.ops[i].op != SEQPAR_PLAN_COMPUTE) i++;
    attn->steps[0].sources = attn->backward.ops[i].sources;
    return attn->size > 1 ? seqpar__outbox_count(attn) : SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_plan_cost_of(seqpar_error *error, seqpar_plan_cost *cost,
                                             const seqpar_plan_mask *mask, int64_t sp_size,
                                             int64_t sp_rank, int dtype) {
    seqpar_ctx ctx; /* of a rank that never runs */
    seqpar_device device;
    seqpar_attn *attn;
    seqpar_status status;
    seqpar_attn_cost c, exposed; /* exposed: all-to-alls, which nothing overlaps */
    memset(cost, 0, sizeof *cost);
    memset(&exposed, 0, sizeof exposed);
    memset(&ctx, 0, sizeof ctx);
    memset(&device, 0, sizeof device);
    device.storage = dtype;
    device.accumulator = dtype == SEQPAR_DTYPE_BF16 ? SEQPAR_DTYPE_F32 : dtype;
    ctx.error = error;
    ctx.device = &device;
    ctx.sp_size = sp_size;
    ctx.sp_rank = sp_rank;
    SEQPAR__TRY(seqpar__attn_open(&ctx, &attn, mask->rows, mask->row_count, mask->desc,
                                  seqpar__cost_prepare));
    cost->step_flops = SEQPAR__NEW(int64_t, attn->size);
    status = cost->step_flops ? seqpar_attn_cost_of(&ctx, attn, &c, cost->step_flops)
                              : seqpar__no_memory(error, "a plan's cost");
    if (status) {
        seqpar_attn_close(&ctx, attn);
        seqpar_plan_cost_free(cost);
        return status;
    }
    cost->steps = attn->size;
    cost->forward_flops = c.forward_flops;
    cost->backward_flops = c.backward_flops;
    cost->forward_bytes = c.forward_bytes;
    cost->backward_bytes = c.backward_bytes;
    seqpar__heads_cost(&ctx, attn, &exposed);
    if (c.forward_bytes)
        cost->forward_overlap = seqpar__plan_overlap(&attn->forward) *
                                (double)(c.forward_bytes - exposed.forward_bytes) /
                                (double)c.forward_bytes;
    if (c.backward_bytes)
        cost->backward_overlap = seqpar__plan_overlap(&attn->backward) *
                                 (double)(c.backward_bytes - exposed.backward_bytes) /
                                 (double)c.backward_bytes;
    cost->slots = attn->backward.slots;
    seqpar_attn_close(&ctx, attn);
    return SEQPAR_OK;
}

SEQPAR_DEF void seqpar_plan_cost_free(seqpar_plan_cost *cost) {
    SEQPAR_FREE(cost->step_flops);
    memset(cost, 0, sizeof *cost);
}

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif
#endif /* SEQPAR_CHECK_IMPLEMENTATION */
