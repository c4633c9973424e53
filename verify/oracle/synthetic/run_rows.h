/* SPDX-License-Identifier: MIT OR Unlicense */
/* run_rows.h - operations on rows: positions and labels, and those that move tokens: split over
 * ranks, gather, pack. All tensors of a token or document move with it. */
#ifndef ORACLE_RUN_ROWS_H
#define ORACLE_RUN_ROWS_H
#include "run.h"

/* ---- positions, labels ---- */

/* Adds tensor `what` for every row: the value of `rule` at each token. 0, or -1 with the
   error. */
static inline int run_rule(run *r, const char *what, token_rule rule) {
    int status = 0;
    for (int64_t n = 0; !status && n < r->row_count; n++) {
        const dump_row *row = &r->rows[n];
        int64_t *x = (int64_t *)calloc((size_t)row->tokens + 1, sizeof *x);
        for (int64_t t = 0; x && t < row->tokens; t++) x[t] = rule(row, t);
        status = x ? run_put_row(r, row, n / r->d.accumulation, n % r->d.accumulation, what, x,
                                 1, 1, 1)
                   : run_no_memory(r);
        free(x);
    }
    return status;
}

static inline int run_positions(run *r) { return run_rule(r, "positions", position_right); }

/* A token without a label in the dump, as in a prompt, gets none. */
static inline int64_t label_masked(const dump_row *row, int64_t t) {
    return row->labels && row->labels[t] == DUMP_IGNORE ? DUMP_IGNORE : label_right(row, t);
}

static inline int run_labels(run *r) {
    return run_rule(r, "labels", r->desc->unmasked ? label_right : label_masked);
}

/* ---- moving ---- */

/* An output row, and where its tokens and documents come from. */
typedef struct move {
    dump_row row;
    int64_t *from, *token;       /* (tokens) row of the dump, token in that row */
    int64_t *doc_from, *doc;     /* (docs) row of the dump, document in that row */
    int64_t *positions, *labels; /* (tokens) computed; NULL: those of the dump */
} move;

static inline void move_free(move *m) {
    int64_t *all[] = {m->from, m->token, m->doc_from, m->doc, m->positions, m->labels};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    dump_row_free(&m->row);
}

static inline void moves_free(move *moves, int64_t count) {
    for (int64_t i = 0; moves && i < count; i++) move_free(&moves[i]);
    free(moves);
}

/* 0, or -1: no memory. */
static inline int move_alloc(move *m, int64_t tokens, int64_t docs) {
    int64_t **each[] = {&m->from, &m->token, &m->doc_from, &m->doc, &m->row.cu_seqlens};
    m->row.tokens = tokens;
    m->row.docs = docs;
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        size_t room = (size_t)(i < 2 ? tokens : docs) + 1;
        if (!(*each[i] = (int64_t *)calloc(room, sizeof **each[i]))) return -1;
    }
    return write_row_room(&m->row);
}

/* The bytes of one tensor of micro-batches, from all rows and ranks of the dump. */
typedef struct moved {
    char what[32];
    int documents;               /* 1: one number per document; 0: one slice per token */
    seqpar_safetensors_tensor t; /* dtype, and the dimensions after tokens */
    int64_t bytes;               /* per token or document; 0: not known yet */
    char **raw;                  /* (rows, sp) */
} moved;

static inline int64_t moved_dims(const char *what) {
    for (int i = 0; i < ATTENTION_NAMES; i++)
        if (!strcmp(attention_tensors[i].name, what)) return i == ATTENTION_LSE ? 2 : 3;
    return 1;
}

static inline int moved_is_of_documents(const char *what) {
    for (int i = 0; i < ROW_NUMBERS; i++)
        if (!strcmp(row_numbers[i].name, what)) return row_numbers[i].of_documents;
    return !strcmp(what, "groups");
}

/* Whether a rank's tensor has n tokens or documents, and the dtype and shape of the tensors
   that were read before. The first one sets them in m. */
static inline int moved_matches(moved *m, const seqpar_safetensors_tensor *t, int64_t n) {
    int64_t wants = moved_dims(m->what), lead = t->dims - wants, inner = 1;
    int fits = m->documents ? t->count == n : lead >= 0 && t->shape[lead] == n;
    for (int64_t i = 0; i < lead && !m->documents; i++) fits = fits && t->shape[i] == 1;
    for (int64_t i = 1; fits && i < wants; i++) {
        inner *= t->shape[lead + i];
        if (!m->bytes) m->t.shape[i] = t->shape[lead + i];
        fits = m->t.shape[i] == t->shape[lead + i];
    }
    if (!m->bytes) m->t.dtype = t->dtype;
    m->t.dims = m->documents ? 1 : wants;
    if (fits) m->bytes = inner * seqpar_safetensors_dtype_bytes(t->dtype);
    return fits && t->dtype == m->t.dtype;
}

/* Reads one rank's tensor of row n into *to, which stays NULL if the rank has none. 0, or -1
   with the error. */
static inline int moved_read(run *r, moved *m, int64_t n, int64_t rank, char **to) {
    const dump_row *row = &r->rows[n];
    const seqpar_safetensors_tensor *t = dump_find(&r->d, rank, n % r->d.accumulation, m->what);
    int64_t held = m->documents ? row->docs : write_held(row, rank);
    seqpar_safetensors_part all;
    if (!t || !held) return 0;
    if (!moved_matches(m, t, held)) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %s has another type or shape than on another rank or "
                    "micro-batch, or not one row for each of its %lld %s; write the same type "
                    "and shape everywhere, one row each",
                    r->d.ranks[rank].path, t->name, (long long)held,
                    m->documents ? "documents" : "tokens");
        return -1;
    }
    all = seqpar_safetensors_whole(t);
    if (!(*to = (char *)malloc((size_t)t->bytes + 1))) return run_no_memory(r);
    return seqpar_safetensors_read(r->d.ranks[rank].file, *to, &all, &r->d.error) ? -1 : 0;
}

static inline int moved_read_all(run *r, moved *m) {
    m->raw = (char **)calloc((size_t)(r->row_count * r->d.sp), sizeof *m->raw);
    if (!m->raw) return run_no_memory(r);
    for (int64_t i = 0; i < r->row_count * r->d.sp; i++) {
        int64_t n = i / r->d.sp, rank = n / r->d.accumulation * r->d.sp + i % r->d.sp;
        if (moved_read(r, m, n, rank, &m->raw[i])) return -1;
    }
    return 0;
}

static inline void moved_free(run *r, moved *m) {
    for (int64_t i = 0; m->raw && i < r->row_count * r->d.sp; i++) free(m->raw[i]);
    free(m->raw);
}

/* A token's bytes; NULL: its rank does not have the tensor. */
static inline const char *moved_token(const run *r, const moved *m, int64_t n, int64_t t) {
    const dump_row *row = &r->rows[n];
    const char *raw = m->raw[n * r->d.sp + row->rank[t] % r->d.sp];
    return raw ? raw + row->local[t] * m->bytes : NULL;
}

/* A document's bytes, from the first rank that has the tensor; NULL: none has. */
static inline const char *moved_document(const run *r, const moved *m, int64_t n, int64_t i) {
    for (int64_t q = 0; q < r->d.sp; q++)
        if (m->raw[n * r->d.sp + q]) return m->raw[n * r->d.sp + q] + i * m->bytes;
    return NULL;
}

static inline const char *moved_bytes(const run *r, const moved *m, const move *to, int64_t i) {
    return m->documents ? moved_document(r, m, to->doc_from[i], to->doc[i])
                        : moved_token(r, m, to->from[i], to->token[i]);
}

/* How many tokens or documents of an output row have the tensor; *count: how many it has in
   all. */
static inline int64_t moved_have(const run *r, const moved *m, const move *to, int64_t *count) {
    int64_t have = 0;
    *count = m->documents ? to->row.docs : to->row.tokens;
    for (int64_t i = 0; i < *count; i++) have += moved_bytes(r, m, to, i) != NULL;
    return have;
}

static inline int moved_put(run *r, const moved *m, const move *to, int64_t rank,
                            int64_t micro) {
    seqpar_safetensors_tensor t = m->t;
    run_name name;
    int64_t n = m->documents ? to->row.docs : write_held(&to->row, rank);
    int64_t count = m->documents ? n : to->row.tokens;
    char *data = (char *)malloc((size_t)(n * m->bytes) + 1);
    for (int64_t i = 0; data && i < count; i++)
        if (m->documents || to->row.rank[i] == rank)
            memcpy(data + (m->documents ? i : to->row.local[i]) * m->bytes,
                   moved_bytes(r, m, to, i), (size_t)m->bytes);
    t.name = run_tensor_of(&name, micro, m->what, 1, n, 1, 1).name;
    t.shape[0] = n;
    return run_keep(r, rank, &t, data);
}

/* Adds one tensor for every output row. 0, or -1 with the error. */
static inline int move_tensor(run *r, const move *moves, int64_t count, const char *what) {
    moved m = {.documents = moved_is_of_documents(what)};
    int status;
    snprintf(m.what, sizeof m.what, "%s", what);
    status = moved_read_all(r, &m);
    for (int64_t n = 0; !status && n < count; n++) {
        int64_t of, have = moved_have(r, &m, &moves[n], &of);
        int64_t first = n / r->accumulation * r->sp;
        if (have && have < of) {
            seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %s is missing on some of the ranks and micro-batches "
                        "that %s joins; write it on all of them, or on none",
                        r->desc->in, what, r->desc->operation);
            status = -1;
        }
        for (int64_t q = first; have && !status && q < first + r->sp; q++)
            status = moved_put(r, &m, &moves[n], q, n % r->accumulation);
    }
    moved_free(r, &m);
    return status;
}

/* ---- which tensors ---- */

/* "3.logp" -> "logp"; NULL: a tensor of the step */
static inline const char *run_what(const char *name) {
    char *rest;
    strtoll(name, &rest, 10);
    return rest == name ? NULL : rest + 1;
}

/* Whether a list of names with blanks between has this name. */
static inline int run_listed(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += length)
        if ((at == list || at[-1] == ' ') && (!at[length] || at[length] == ' ')) return 1;
    return 0;
}

/* Moves all tensors of micro-batches, except those in `made`, which the operation computes. */
static inline int move_tensors(run *r, const move *moves, int64_t count, const char *made) {
    char done[1000] = "";
    int status = 0;
    for (int64_t q = 0; q < r->d.world; q++)
        for (int64_t i = 0; !status && i < seqpar_safetensors_count(r->d.ranks[q].file); i++) {
            const char *what = run_what(seqpar_safetensors_at(r->d.ranks[q].file, i)->name);
            size_t used = strlen(done);
            if (!what || run_listed(made, what) || run_listed(done, what)) continue;
            if (!strncmp(what, "part_", 5)) continue;  /* several slices per token */
            if (!strcmp(what, "boundaries")) continue; /* the output's cu_seqlens */
            snprintf(done + used, sizeof done - used, "%s%s", used ? " " : "", what);
            status = move_tensor(r, moves, count, what);
        }
    return status;
}

/* Adds index and cu_seqlens of every output row, and positions and labels if computed. */
static inline int move_rows(run *r, const move *moves, int64_t count) {
    int status = 0;
    for (int64_t n = 0; !status && n < count; n++) {
        const dump_row *row = &moves[n].row;
        int64_t dp = n / r->accumulation, micro = n % r->accumulation;
        int64_t *places = (int64_t *)malloc(((size_t)row->tokens + 1) * sizeof *places);
        for (int64_t t = 0; places && t < row->tokens; t++) places[t] = t;
        status = places ? run_put_row(r, row, dp, micro, "index", places, 1, 1, 1)
                        : run_no_memory(r);
        free(places);
        if (!status && row->docs)
            status = run_put_documents(r, dp, micro, "cu_seqlens", row->cu_seqlens,
                                       row->docs + 1);
        if (!status && moves[n].positions)
            status = run_put_row(r, row, dp, micro, "positions", moves[n].positions, 1, 1, 1);
        if (!status && moves[n].labels)
            status = run_put_row(r, row, dp, micro, "labels", moves[n].labels, 1, 1, 1);
    }
    return status;
}

/* ---- the step's tensors ---- */

/* Adds a name to left_out: "loss" as it is, "grad.w" as "grad.NAME", "0.part_out" as
   "part_out". */
static inline void run_leave_out(run *r, const char *name) {
    const char *what = run_what(name), *dot = what ? NULL : strchr(name, '.');
    size_t used = strlen(r->left_out);
    char text[64];
    if (dot)
        snprintf(text, sizeof text, "%.*sNAME", (int)(dot + 1 - name), name);
    else
        snprintf(text, sizeof text, "%s", what ? what : name);
    if (run_listed(r->left_out, text) || used + strlen(text) + 2 > sizeof r->left_out) return;
    snprintf(r->left_out + used, sizeof r->left_out - used, "%s%s", used ? " " : "", text);
}

/* Lists in left_out the dump's tensors that are not written. Call it when all output tensors
   are made. */
static inline void move_leave_out(run *r) {
    for (int64_t q = 0; q < r->d.world; q++)
        for (int64_t i = 0; i < seqpar_safetensors_count(r->d.ranks[q].file); i++) {
            const char *name = seqpar_safetensors_at(r->d.ranks[q].file, i)->name;
            const char *what = run_what(name);
            int written = what ? strncmp(what, "part_", 5) != 0
                               : run_is_copied(r, name) || run_find(r, 0, name);
            if (!written) run_leave_out(r, name);
        }
}

/* For move_whole, which assembles a parameter's tensor from all ranks' ranges and adds it to
   every output rank. */
typedef struct whole_move {
    run *r;
    const char *prefix;
} whole_move;

static inline int move_whole(void *user, const char *parameter) {
    const whole_move *m = (const whole_move *)user;
    run *r = m->r;
    tensor_name name;
    seqpar_safetensors_tensor t = {.dims = 0};
    whole w;
    int status;
    tensor_of(&name, m->prefix, parameter);
    for (int64_t q = r->d.world - 1; q >= 0; q--)
        if (seqpar_safetensors_find(r->d.ranks[q].file, name.text))
            t = *seqpar_safetensors_find(r->d.ranks[q].file, name.text);
    status = whole_read(&r->d, name.text, 0, r->d.world, &w);
    if (!status && w.count != t.count) t.dims = 1;
    if (!status && w.count != t.count) t.shape[0] = w.count;
    for (int64_t q = 0; !status && q < r->world; q++) {
        char *data = (char *)malloc((size_t)(8 * w.count) + 1);
        if (data) write_numbers(data, w.values, w.count, t.dtype);
        status = run_keep(r, q, &t, data);
    }
    whole_free(&w);
    return status;
}

/* Assembles all parameters' tensors. Ranks then hold them whole, so part. metadata are
   removed. */
static inline int move_whole_parameters(run *r) {
    static const char *const prefixes[] = {"grad.", "param.", "after.", "m.", "v."};
    int status = 0;
    for (size_t i = 0; !status && i < sizeof prefixes / sizeof *prefixes; i++)
        status = each_parameter(&r->d, prefixes[i], move_whole, &(whole_move){r, prefixes[i]});
    for (int64_t q = 0; q < r->d.world; q++)
        for (int64_t i = 0; i < seqpar_safetensors_metadata_count(r->d.ranks[q].file); i++) {
            const char *key = seqpar_safetensors_metadata_at(r->d.ranks[q].file, i)->key;
            if (!status && after_prefix(key, "part.") && !run_noted(r, -1, key))
                status = run_note_down(r, -1, key, NULL);
        }
    return status;
}

static inline int move_metadata(run *r) {
    int status = run_note_number(r, -1, "world", r->world) ||
                 run_note_number(r, -1, "sp", r->sp) ||
                 run_note_number(r, -1, "accumulation", r->accumulation);
    for (int64_t q = 0; !status && q < r->world; q++) status = run_note_number(r, q, "rank", q);
    return status ? -1 : 0;
}

/* ---- split, gather ---- */

static inline int move_same(run *r, move *m, int64_t n, int layout) {
    const dump_row *row = &r->rows[n];
    if (move_alloc(m, row->tokens, row->docs)) return run_no_memory(r);
    if (row->docs)
        memcpy(m->row.cu_seqlens, row->cu_seqlens, ((size_t)row->docs + 1) * sizeof *row->rank);
    for (int64_t t = 0; t < row->tokens; t++) m->from[t] = n;
    for (int64_t t = 0; t < row->tokens; t++) m->token[t] = t;
    for (int64_t i = 0; i < row->docs; i++) m->doc_from[i] = n;
    for (int64_t i = 0; i < row->docs; i++) m->doc[i] = i;
    return write_deal(&r->d.error, &m->row, n / r->accumulation * r->sp, r->sp, layout);
}

/* The output has sp ranks per sequence. copied: as in struct run. */
static inline void run_move(run *r, int64_t sp, const char *const *copied) {
    r->moved = 1;
    r->sp = sp;
    r->world = r->d.world / r->d.sp * sp;
    r->copied = copied;
}

/* Distributes every row's tokens over r->sp ranks. 0, or -1 with the error. */
static inline int run_deal(run *r, int layout) {
    move *moves = (move *)calloc((size_t)r->row_count, sizeof *moves);
    int status = moves ? 0 : run_no_memory(r);
    for (int64_t n = 0; !status && n < r->row_count; n++)
        status = move_same(r, &moves[n], n, layout);
    if (!status) status = move_metadata(r) || move_rows(r, moves, r->row_count);
    if (!status) status = move_tensors(r, moves, r->row_count, "index cu_seqlens");
    move_leave_out(r);
    moves_free(moves, r->row_count);
    return status ? -1 : 0;
}

static inline int run_option(run *r, const char *text) {
    seqpar_fail(&r->d.error, SEQPAR_ERR_OPTION, "%s", text);
    return -1;
}

/* Refuses an --sp with which some rank holds no token of any row; also a dump that is split
   already, and more than 65536 ranks. 0, or -1 with the error. */
static inline int run_check_sp(run *r) {
    char text[200];
    int64_t most = 0, replicas = r->d.world;
    for (int64_t n = 0; n < r->row_count; n++)
        if (r->rows[n].tokens > most) most = r->rows[n].tokens;
    if (r->d.sp > 1)
        snprintf(text, sizeof text, "%.100s: its sp is %lld already; run gather first",
                 r->desc->in, (long long)r->d.sp);
    else if (r->desc->sp > most)
        snprintf(text, sizeof text,
                 "--sp is %lld, and the longest row of index has %lld "
                 "tokens; give at most as many",
                 (long long)r->desc->sp, (long long)most);
    else if (replicas * r->desc->sp > 65536)
        snprintf(text, sizeof text,
                 "--sp %lld with %lld replicas are more than 65536 ranks; "
                 "give less",
                 (long long)r->desc->sp, (long long)replicas);
    else
        return 0;
    return run_option(r, text);
}

static inline int run_split(run *r) {
    static const char *const prefixes[] = {"loss",   "norm", "grad.", "param.",
                                           "after.", "m.",   "v.",    NULL};
    int layout = 0; /* the option accepts names of layouts alone */
    while (layout < SEQPAR_LAYOUT_COUNT && strcmp(seqpar_layout_name(layout), r->desc->layout))
        layout++;
    if (run_check_sp(r)) return -1;
    run_move(r, r->desc->sp, prefixes);
    return run_deal(r, layout);
}

static inline int run_gather(run *r) {
    static const char *const prefixes[] = {"loss", "norm", NULL};
    run_move(r, 1, prefixes);
    return move_whole_parameters(r) || run_deal(r, SEQPAR_LAYOUT_CONTIGUOUS) ? -1 : 0;
}

/* ---- pack ---- */

/* Documents of all rows, as seqpar_pack takes them. */
typedef struct packing {
    seqpar_document *docs; /* (count) */
    int64_t *row, *number; /* (count) row of the dump, document in that row */
    int32_t *ids;          /* (tokens) */
    uint8_t *mask;
    int64_t count;
} packing;

static inline void packing_free(packing *p) {
    free(p->docs);
    free(p->row);
    free(p->number);
    free(p->ids);
    free(p->mask);
}

static inline int64_t pack_documents(const dump_row *row) { return row->docs ? row->docs : 1; }
static inline int64_t pack_begin(const dump_row *row, int64_t i) {
    return row->docs ? row->cu_seqlens[i] : i * row->tokens;
}

static inline int run_is_of_pairs(const run *r) {
    return r->d.facts.objective == DUMP_DPO || r->d.facts.objective == DUMP_RM;
}

static inline int packing_alloc(run *r, packing *p) {
    int64_t tokens = 0;
    for (int64_t n = 0; n < r->row_count; n++) {
        p->count += pack_documents(&r->rows[n]);
        tokens += r->rows[n].tokens;
    }
    p->docs = (seqpar_document *)calloc((size_t)p->count, sizeof *p->docs);
    p->row = (int64_t *)calloc((size_t)p->count, sizeof *p->row);
    p->number = (int64_t *)calloc((size_t)p->count, sizeof *p->number);
    p->ids = (int32_t *)calloc((size_t)tokens + 1, sizeof *p->ids);
    p->mask = (uint8_t *)calloc((size_t)tokens + 2, 1);
    return p->docs && p->row && p->number && p->ids && p->mask ? 0 : run_no_memory(r);
}

/* Copies a row's ids and sets the mask. The mask is at the predicted token, the label at the
   token before it: hence t + 1. 0, or -1 with the error. */
static inline int pack_tokens(run *r, packing *p, int64_t n, int64_t base) {
    const dump_row *row = &r->rows[n];
    for (int64_t t = 0; t < row->tokens; t++) {
        p->ids[base + t] = (int32_t)row->ids[t];
        p->mask[base + t + 1] = !row->labels || row->labels[t] != DUMP_IGNORE;
        if (row->ids[t] >= 0 && row->ids[t] <= INT32_MAX) continue;
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %lld.ids has %lld at %lld; ids are from 0 to %d",
                    r->d.ranks[0].path, (long long)n, (long long)row->ids[t], (long long)t,
                    INT32_MAX);
        return -1;
    }
    return 0;
}

/* Checks that both documents of a pair have tokens, or neither has. 0, or -1 with the error. */
static inline int pack_pairs(run *r, const packing *p) {
    for (int64_t i = 0; run_is_of_pairs(r) && i < p->count; i++) {
        int64_t last = i + 1 == p->count || p->row[i + 1] != p->row[i];
        int64_t partner = last ? 0 : p->docs[i + 1].tokens;
        if (p->number[i] % 2 || !p->docs[i].tokens == !partner) continue;
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: of document %lld of tensor %lld.cu_seqlens and its partner, one "
                    "has no tokens; documents 2i and 2i + 1 of a row are a pair, so write "
                    "tokens for both",
                    r->desc->in, (long long)p->number[i], (long long)p->row[i]);
        return -1;
    }
    return 0;
}

static inline int packing_fill(run *r, packing *p) {
    int64_t base = 0, at = 0, unit = 0;
    for (int64_t n = 0; n < r->row_count; n++) {
        const dump_row *row = &r->rows[n];
        if (pack_tokens(r, p, n, base)) return -1;
        for (int64_t i = 0; i < pack_documents(row); i++, at++) {
            int64_t begin = pack_begin(row, i), end = pack_begin(row, i + 1);
            if (!run_is_of_pairs(r) || i % 2 == 0) unit++;
            p->row[at] = n;
            p->number[at] = i;
            p->docs[at] = (seqpar_document){.ids = p->ids + base + begin,
                                            .loss_mask = p->mask + base + begin,
                                            .tokens = end - begin,
                                            .unit = unit};
        }
        base += row->tokens;
    }
    return pack_pairs(r, p);
}

/* Refuses a unit (a document, or the two of a pair) that is longer than an output row. 0, or -1
   with the error. */
static inline int pack_too_long(run *r, const packing *p) {
    char text[200];
    int64_t sum = 0;
    for (int64_t i = 0; i < p->count; i++) {
        sum = i && p->docs[i].unit == p->docs[i - 1].unit ? sum + p->docs[i].tokens
                                                          : p->docs[i].tokens;
        if (sum <= r->desc->tokens) continue;
        snprintf(text, sizeof text,
                 "--tokens is %lld, and %sdocument %lld of %lld.cu_seqlens has %lld tokens; "
                 "give at least as many",
                 (long long)r->desc->tokens,
                 p->docs[i].tokens < sum ? "the pair that ends with " : "",
                 (long long)p->number[i], (long long)p->row[i], (long long)sum);
        return run_option(r, text);
    }
    return 0;
}

static inline int move_packed(run *r, move *m, const seqpar_row *row, const packing *p) {
    if (move_alloc(m, row->tokens, row->docs)) return run_no_memory(r);
    m->positions = (int64_t *)calloc((size_t)row->tokens + 1, sizeof *m->positions);
    m->labels = (int64_t *)calloc((size_t)row->tokens + 1, sizeof *m->labels);
    if (!m->positions || !m->labels) return run_no_memory(r);
    for (int64_t i = 0; i < row->docs; i++) {
        int64_t source = row->doc_source[i];
        m->row.cu_seqlens[i + 1] = row->cu_seqlens[i + 1];
        m->doc_from[i] = p->row[source];
        m->doc[i] = p->number[source];
        for (int64_t t = row->cu_seqlens[i]; t < row->cu_seqlens[i + 1]; t++) {
            m->from[t] = p->row[source];
            m->token[t] = pack_begin(&r->rows[p->row[source]], p->number[source]) + t -
                          row->cu_seqlens[i];
            m->positions[t] = row->position_ids[t];
            m->labels[t] = row->targets[t];
        }
    }
    return write_deal(&r->d.error, &m->row, 0, 1, SEQPAR_LAYOUT_CONTIGUOUS);
}

static inline int pack_put(run *r, const seqpar_batch *batch, const packing *p) {
    static const char *const prefixes[] = {"param.", "m.", "v.", NULL};
    move *moves = (move *)calloc((size_t)batch->rows, sizeof *moves);
    int status = moves ? 0 : run_no_memory(r);
    r->moved = 1;
    r->accumulation = batch->rows;
    for (int64_t n = 0; !status && n < batch->rows; n++)
        status = move_packed(r, &moves[n], &batch->row[n], p);
    if (!status) status = move_metadata(r) || move_rows(r, moves, batch->rows);
    if (!status)
        status = move_tensors(r, moves, batch->rows, "index cu_seqlens positions labels");
    r->copied = prefixes;
    move_leave_out(r);
    moves_free(moves, batch->rows);
    return status ? -1 : 0;
}

static inline int run_pack(run *r) {
    packing p = {.count = 0};
    seqpar_batch batch = {.rows = 0};
    seqpar_pack_desc desc = {.pack_len = r->desc->tokens, .keep_masked = 1};
    int status = 0;
    if (r->d.world > 1)
        return run_option(r, "it packs the rows of one rank; run gather first, or give the "
                             "dump before the split");
    status = packing_alloc(r, &p) || packing_fill(r, &p) || pack_too_long(r, &p);
    if (!status) status = seqpar_pack(&r->d.error, &batch, p.docs, p.count, &desc) ? -1 : 0;
    if (!status && batch.rows > 65536)
        status = run_option(r, "more than 65536 rows; give more --tokens");
    if (!status) status = pack_put(r, &batch, &p);
    seqpar_batch_free(&batch);
    packing_free(&p);
    return status ? -1 : 0;
}
#endif
