/* SPDX-License-Identifier: MIT OR Unlicense */
/* checks.h - a dump judged by algebra: what follows from numbers that are in it. One stage
 * after the other, as data flow: places, positions, labels, loss. Gradients are compared with
 * those of another dump (gradients.h). */
#ifndef ORACLE_CHECKS_H
#define ORACLE_CHECKS_H
#include "pairs.h"

enum {
    PLACES,
    POSITIONS,
    LABELS,
    ATTENTION,
    LOG_PROBS,
    REWARDS,
    LOSS,
    REDUCTION,
    GRADIENTS,
    NORM,
    STEP,
    STAGES
};
static const struct {
    const char *name, *needs; /* without which it is not judged */
} stage_names[STAGES] = {
    {"places", "index"},
    {"positions", "index and positions"},
    {"labels", "index, ids and labels"},
    {"attention", "index, cu_seqlens, q, k, v and out"},
    {"log-probs", "--model, a Llama folder, and index, ids, labels and logp"},
    {"rewards", "values and scores of RM, or rewards, groups and advantages of PPO"},
    {"loss", "loss, index, labels, logp and what else the objective takes"},
    {"reduction", "local. and grad. tensors of a parameter"},
    {"gradients", "--model, or --want, a dump of the same step on one rank"},
    {"norm", "norm and grad. tensors of all parameters"},
    {"step", "optimizer and lr in the metadata, grad., param. and after. tensors"}};

typedef struct stage {
    int judged;
    verdict v; /* if judged */
} stage;

static inline verdict *stage_begin(stage *s, verdict_kind kind) {
    memset(&s->v, 0, sizeof s->v);
    s->judged = 1;
    s->v.kind = kind;
    return &s->v;
}

/* Of what several rows or ranks show, wrong counts most, then right. */
static inline int verdict_weight(verdict_kind kind) {
    return kind == VERDICT_WRONG      ? 3
           : kind == VERDICT_MARGINAL ? 2
           : kind == VERDICT_RIGHT    ? 1
                                      : 0;
}

static inline void stage_add(stage *s, const stage *one) {
    if (!one->judged) return;
    if (s->judged && verdict_weight(s->v.kind) >= verdict_weight(one->v.kind)) return;
    s->judged = 1;
    s->v = one->v;
}

/* A token's place, for people. */
static inline const char *place_text(char *text, size_t size, const dump_row *row,
                                     int64_t token) {
    int64_t document = 0;
    while (document + 1 < row->docs && row->cu_seqlens[document + 1] <= token) document++;
    snprintf(text, size, "rank %lld, local row %lld, token %lld, document %lld",
             (long long)row->rank[token], (long long)row->local[token], (long long)token,
             (long long)document);
    return text;
}

/* ---- documents ---- */

static inline int64_t row_document_begin(const dump_row *row, int64_t token) {
    int64_t low = 0, high = row->docs;
    while (low < high) {
        int64_t mid = (low + high) / 2;
        if (row->cu_seqlens[mid + 1] <= token)
            low = mid + 1;
        else
            high = mid;
    }
    return row->docs && low <= row->docs ? row->cu_seqlens[low] : 0;
}

static inline int64_t row_end(const dump_row *row) { /* what is behind is padding */
    return row->docs ? row->cu_seqlens[row->docs] : row->tokens;
}

/* Whether a rank's next row is anything but the next token, anywhere. */
static inline int row_has_cuts(const dump_row *row) {
    for (int64_t t = 0; t + 1 < row_end(row); t++)
        if (row->next[t] != t + 1) return 1;
    return 0;
}

static inline int row_ends_document(const dump_row *row, int64_t token) {
    return token + 1 >= row_end(row) || row_document_begin(row, token + 1) == token + 1;
}

/* ---- places ---- */

static inline void check_places(stage *s, const dump_row *row, const dump_places *found,
                                int64_t sp) {
    verdict *v;
    if (!found->held) return;
    v = stage_begin(s, found->outside + found->twice + found->missing ? VERDICT_WRONG
                                                                      : VERDICT_RIGHT);
    if (v->kind == VERDICT_RIGHT) {
        verdict_say(v, "%lld ranks hold %lld tokens, each of them once", (long long)sp,
                    (long long)row->tokens);
        return;
    }
    verdict_name(v, mistake_named(found->twice ? "token_held_twice" : "token_lost"));
    if (found->outside + found->twice)
        verdict_say(v, "first at rank %lld, local row %lld: token %lld is %s",
                    (long long)found->rank, (long long)found->local, (long long)found->token,
                    found->other >= 0 ? "held by another row already" : "outside of the row");
    else
        verdict_say(v, "token %lld is the first that nobody holds", (long long)found->token);
    verdict_say(v, "%lld tokens are held twice, %lld by nobody, %lld places are outside",
                (long long)found->twice, (long long)found->missing, (long long)found->outside);
}

/* ---- positions ---- */

/* What a token has instead of its place in its document. */
typedef int64_t (*token_rule)(const dump_row *row, int64_t token);
static inline int64_t position_right(const dump_row *row, int64_t t) {
    return t - row_document_begin(row, t);
}
static inline int64_t position_runs_on(const dump_row *row, int64_t t) {
    return (void)row, t;
}
static inline int64_t position_local(const dump_row *row, int64_t t) { return row->local[t]; }

static inline int token_differs(const dump_row *row, const int64_t *values, token_rule rule,
                                int64_t t) {
    return t < row_end(row) && row->rank[t] >= 0 && values[t] != rule(row, t);
}

/* How many tokens differ from the rule; *first: which is the first. */
static inline int64_t row_differs(const dump_row *row, const int64_t *values, token_rule rule,
                                  int64_t *first) {
    int64_t count = 0;
    for (int64_t t = 0; t < row_end(row); t++) {
        if (token_differs(row, values, rule, t) && !count++) *first = t;
    }
    return count;
}

/* Each goes on from the one before, or begins anew. */
static inline int positions_are_of_documents(const dump_row *row) {
    for (int64_t t = 0; t < row_end(row); t++)
        if (row->positions[t] != (t ? row->positions[t - 1] + 1 : 0) && row->positions[t])
            return 0;
    return 1;
}

static inline void check_positions(stage *s, const dump_row *row) {
    int64_t first = 0, other, wrong;
    char place[160];
    verdict *v;
    if (!row->positions) return;
    wrong = row_differs(row, row->positions, position_right, &first);
    v = stage_begin(s, wrong ? VERDICT_WRONG : VERDICT_RIGHT);
    if (wrong && !row->docs && positions_are_of_documents(row)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "they begin anew within the row, as with packing; give cu_seqlens");
        return;
    }
    if (!wrong) {
        verdict_say(v, "each is the token's place in its document");
        return;
    }
    if (!row_differs(row, row->positions, position_runs_on, &other))
        verdict_name(v, mistake_named("positions_run_on"));
    if (row_has_cuts(row) && !row_differs(row, row->positions, position_local, &other))
        verdict_name(v, mistake_named("positions_local"));
    verdict_say(v, "first at %s: %lld, right %lld; %lld tokens differ",
                place_text(place, sizeof place, row, first), (long long)row->positions[first],
                (long long)position_right(row, first), (long long)wrong);
}

/* ---- labels ---- */

static inline int64_t label_right(const dump_row *row, int64_t t) {
    return row_ends_document(row, t) ? DUMP_IGNORE : row->ids[t + 1];
}
static inline int64_t label_unshifted(const dump_row *row, int64_t t) { return row->ids[t]; }
static inline int64_t label_twice(const dump_row *row, int64_t t) {
    return t + 2 < row_end(row) ? row->ids[t + 2] : DUMP_IGNORE;
}
static inline int64_t label_crosses(const dump_row *row, int64_t t) {
    return t + 1 < row_end(row) ? row->ids[t + 1] : DUMP_IGNORE;
}
static inline int64_t label_after_split(const dump_row *row, int64_t t) {
    return row->next[t] < 0 ? DUMP_IGNORE : row->ids[row->next[t]];
}

/* Whether the token has no label although its neighbours in the document have one. */
static inline int label_gap(const dump_row *row, int64_t t) {
    return row->labels[t] == DUMP_IGNORE && t > 0 && t + 1 < row_end(row) &&
           !row_ends_document(row, t) && !row_ends_document(row, t - 1) &&
           row->labels[t - 1] != DUMP_IGNORE && row->labels[t + 1] != DUMP_IGNORE;
}

static inline int row_is_cut(const dump_row *row, int64_t t) {
    return row->next[t] != t + 1 && !row_ends_document(row, t);
}

/* Of all rows. A shift after the split leaves a gap at every cut; one gap may be a mask. */
typedef struct label_gaps {
    int64_t labels, at_cuts, elsewhere, right_at_cuts;
    int rows, without_documents;
    char first[200];
} label_gaps;

static inline void count_gaps(label_gaps *g, const dump_row *row) {
    g->rows++;
    g->without_documents += !row->docs;
    for (int64_t t = 0; t < row_end(row); t++) {
        int gap = label_gap(row, t), cut = row_is_cut(row, t);
        if (row->rank[t] < 0) continue;
        g->labels += row->labels[t] != DUMP_IGNORE;
        if (gap && cut && !g->at_cuts++) place_text(g->first, sizeof g->first, row, t);
        g->elsewhere += gap && !cut;
        g->right_at_cuts += cut && row->labels[t] == label_right(row, t);
    }
}

/* A label that is there and differs from the rule. An ignored one is right anywhere: it may be
   a prompt's; so is that of the row's last token. */
static inline int label_differs(const dump_row *row, token_rule rule, int64_t t) {
    return t + 1 < row_end(row) && row->labels[t] != DUMP_IGNORE &&
           token_differs(row, row->labels, rule, t);
}

static inline int64_t labels_differ(const dump_row *row, token_rule rule, int64_t *first) {
    int64_t count = 0;
    for (int64_t t = 0; t + 1 < row_end(row); t++)
        if (label_differs(row, rule, t) && !count++) *first = t;
    return count;
}

static inline int64_t label_twice_apart(const dump_row *row, int64_t t) {
    return row->next[t] < 0 ? DUMP_IGNORE : label_right(row, row->next[t]);
}

/* Of a row whose labels are wrong; lost: and missing at all cuts. */
static inline void name_label_mistakes(verdict *v, const dump_row *row, int lost) {
    static const struct {
        const char *name;
        token_rule rule;
        int loses, cuts; /* leaves cuts without a label; shows only where there are cuts */
    } known[] = {{"shift_after_split", label_after_split, 1, 1},
                 {"labels_not_shifted", label_unshifted, 0, 0},
                 {"labels_shifted_twice", label_twice, 0, 0},
                 {"labels_shifted_twice", label_twice_apart, 1, 1},
                 {"labels_cross_documents", label_crosses, 0, 0}};
    int cuts = row_has_cuts(row);
    int64_t first;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].loses >= lost && cuts >= known[i].cuts &&
            !labels_differ(row, known[i].rule, &first))
            verdict_name(v, mistake_named(known[i].name));
}

/* Labels that are there, row by row; what is missing is judged at the end. */
static inline void check_labels(stage *s, const dump_row *row, label_gaps *all) {
    label_gaps gaps = {0};
    int64_t first = 0, wrong;
    char place[160];
    verdict *v;
    if (!row->labels || !row->ids) return;
    count_gaps(&gaps, row);
    count_gaps(all, row);
    wrong = labels_differ(row, label_right, &first);
    if (!wrong) return;
    v = stage_begin(s, VERDICT_WRONG);
    name_label_mistakes(v, row, gaps.at_cuts && !gaps.right_at_cuts);
    verdict_say(v,
                "first at %s: label %lld, right %lld; of %lld tokens %lld have a wrong label",
                place_text(place, sizeof place, row, first), (long long)row->labels[first],
                (long long)label_right(row, first), (long long)row_end(row), (long long)wrong);
}

static inline void check_gaps(stage *s, const label_gaps *g, int64_t sp) {
    verdict *v;
    if (s->judged || !g->rows) return;
    v = stage_begin(s, VERDICT_INSUFFICIENT);
    if (!g->labels) {
        verdict_say(v, "no label is there");
    } else if (g->right_at_cuts || sp == 1) {
        v->kind = VERDICT_RIGHT;
        verdict_say(v, "%lld labels, each the next token of its document",
                    (long long)g->labels);
    } else if (!g->at_cuts) {
        verdict_say(v, "no cut between two ranks has a label, so a shift after the split would "
                       "not show; give a step whose cuts lie in answers");
    } else if (g->elsewhere || g->without_documents) {
        verdict_say(v, g->elsewhere ? "labels are missing at cuts and elsewhere: they may be "
                                      "masks; give a step without"
                                    : "labels are missing at cuts: documents may end there; "
                                      "give cu_seqlens");
    } else {
        v->kind = VERDICT_WRONG;
        verdict_name(v, mistake_named("shift_after_split"));
        verdict_say(v, "none of %lld cuts within trained text has a label, first at %s",
                    (long long)g->at_cuts, g->first);
    }
}

/* ---- loss ---- */

/* Sums and counts of losses, by ranks, replicas and micro-batches. */
enum { BY_RANK_MICRO, BY_RANK, BY_MICRO, BY_REPLICA, BY_REPLICA_MICRO, GROUPINGS };
typedef struct loss_parts {
    law by[GROUPINGS];
    pair_ways pairs; /* of DPO */
    label_gaps gaps;
    int complete;    /* all rows have what the loss is made of */
} loss_parts;

static inline void loss_begin(loss_parts *p, const dump *d, double tolerance) {
    int64_t dp = d->world / d->sp;
    int64_t groups[] = {d->world * d->accumulation, d->world, d->accumulation, dp,
                        dp * d->accumulation};
    memset(p, 0, sizeof *p);
    p->pairs.alone = (double *)calloc((size_t)d->sp, sizeof *p->pairs.alone);
    p->complete = groups[BY_RANK_MICRO] <= LAW_GROUPS && p->pairs.alone;
    for (int i = 0; i < GROUPINGS; i++) {
        p->by[i].groups = groups[i];
        p->by[i].tolerance = tolerance;
        p->by[i].own_of = i <= BY_RANK ? d->world : -1;
    }
}

static inline void loss_add_pairs(loss_parts *p, const dump *d, const dump_row *row,
                                  int64_t dp) {
    p->complete = p->complete && row->ref_logp && row->docs > 1 && row->docs % 2 == 0 &&
                  !add_pairs(&p->pairs, row, dp * d->sp, d->sp, d->facts.beta);
}

static inline void loss_add_row(loss_parts *p, const dump *d, const dump_row *row, int64_t dp,
                                int64_t micro) {
    p->complete = p->complete && row->logp && row->labels;
    if (d->facts.objective == DUMP_DPO) {
        loss_add_pairs(p, d, row, dp);
        return;
    }
    for (int64_t t = 0; p->complete && t < row_end(row); t++) {
        int64_t rank = row->rank[t];
        int64_t group[] = {micro * d->world + rank, rank, micro, dp,
                           dp * d->accumulation + micro};
        if (rank < 0 || row->labels[t] == DUMP_IGNORE) continue;
        for (int i = 0; i < GROUPINGS; i++) {
            p->by[i].sums[group[i]] -= row->logp[t];
            p->by[i].counts[group[i]]++;
        }
    }
    for (int i = 0; i < GROUPINGS; i++) p->by[i].all_tokens += (double)row->tokens;
}

/* By ranks and micro-batches; if no known mistake gives that number, by coarser groups. */
static inline void judge_loss(loss_parts *p, double got, int64_t rank, verdict *v) {
    static const char *const groups[] = {"ranks' micro-batches", "ranks", "micro-batches",
                                         "replicas", "replicas' micro-batches"};
    for (int i = 0; i < GROUPINGS; i++) {
        verdict one;
        p->by[i].got = got;
        p->by[i].own = rank;
        law_judge(&p->by[i], &one);
        if (i == 0 || one.count) *v = one;
        if (one.count) verdict_say(v, "groups are %s", groups[i]);
        if (v->kind != VERDICT_WRONG || one.count) return;
    }
}

static inline void check_loss(stage *s, dump *d, loss_parts *p) {
    for (int64_t r = 0; p->complete && r < d->world; r++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_find(d->ranks[r].file, "loss");
        double *loss = t && t->count == 1 ? dump_doubles(d, r, t) : NULL;
        stage one = {.judged = 1};
        if (!loss) continue;
        if (d->facts.objective == DUMP_DPO)
            judge_pairs(&one.v, *loss, &p->pairs, d->sp, r % d->sp, p->by[0].tolerance);
        else
            judge_loss(p, *loss, r, &one.v);
        verdict_say(&one.v,
                    "as rank %lld reports it; right is what logp and labels of all give",
                    (long long)r);
        stage_add(s, &one);
        free(loss);
    }
}

/* ---- all of it ---- */

static inline void judge_row(dump *d, stage *stages, loss_parts *p, const dump_row *row,
                             const dump_places *found, int64_t dp, int64_t micro) {
    stage one[STAGES] = {{0}};
    check_places(&one[PLACES], row, found, d->sp);
    check_positions(&one[POSITIONS], row);
    check_labels(&one[LABELS], row, &p->gaps);
    for (int i = 0; i < STAGES; i++) stage_add(&stages[i], &one[i]);
    loss_add_row(p, d, row, dp, micro);
}

/* 0, or -1 with d->error. */
static inline int judge_dump(dump *d, stage *stages, double tolerance) {
    static loss_parts parts;
    loss_begin(&parts, d, tolerance);
    for (int64_t n = 0; n < d->world / d->sp * d->accumulation; n++) {
        int64_t dp = n / d->accumulation, micro = n % d->accumulation;
        dump_row row;
        dump_places found;
        int status = dump_read_row(d, dp, micro, &row, &found);
        if (!status) judge_row(d, stages, &parts, &row, &found, dp, micro);
        dump_row_free(&row);
        if (status) break;
    }
    check_gaps(&stages[LABELS], &parts.gaps, d->sp);
    if (!d->error.status) check_loss(&stages[LOSS], d, &parts);
    free(parts.pairs.alone);
    return d->error.status ? -1 : 0;
}
#endif
