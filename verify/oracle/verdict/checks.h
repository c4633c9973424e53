/* SPDX-License-Identifier: MIT OR Unlicense */
/* checks.h - judges a dump by its own numbers, without a model. The stages follow the data
 * flow: places, positions, labels, loss. Gradients are judged in gradients.h. */
#ifndef ORACLE_CHECKS_H
#define ORACLE_CHECKS_H
#include "oracle/attention/attention.h"
#include "oracle/loss/counts.h"
#include "oracle/loss/gae.h"
#include "oracle/loss/logits.h"
#include "oracle/loss/losses.h"
#include "stages.h"

/* ---- documents ---- */

/* Whether some token is not followed, in its rank's next row, by the next token. */
static inline int row_has_cuts(const dump_row *row) {
    for (int64_t t = 0; t + 1 < row_end(row); t++)
        if (row->next[t] != t + 1) return 1;
    return 0;
}

static inline int row_ends_document(const dump_row *row, int64_t token) {
    return token + 1 >= row_end(row) || row_document_begin(row, token + 1) == token + 1;
}

/* ---- places ---- */

/* A token that is held twice usually leaves another one without a holder, so token_lost is
   named only if no token is held twice. */
static inline void check_places(stage *s, const dump_row *row, const dump_places *found,
                                int64_t sp) {
    verdict *v;
    if (!found->held) return;
    v = stage_begin(s, found->outside + found->twice + found->missing ? VERDICT_WRONG
                                                                      : VERDICT_RIGHT);
    if (v->kind == VERDICT_RIGHT) {
        if (sp == 1)
            verdict_say(v, "each rank has a row of its own, and all of it: %lld tokens",
                        (long long)row->tokens);
        else
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

/* The first offset of `one` that is not in `other`; -1: all are. *count: how many. */
static inline int64_t offset_lacks(const int64_t *one, int64_t docs, const int64_t *other,
                                   int64_t other_docs, int64_t *count) {
    int64_t first = -1;
    *count = 0;
    for (int64_t i = 0, k = 0; i <= docs; i++) {
        while (k <= other_docs && other[k] < one[i]) k++;
        if (k <= other_docs && other[k] == one[i]) continue;
        if (!(*count)++) first = one[i];
    }
    return first;
}

/* Compares the documents that the package used with those that are meant. */
static inline void check_boundaries(stage *s, const dump_row *row) {
    int64_t lacking, more, ends, begins;
    verdict *v = &s->v;
    if (!row->used) return;
    ends = offset_lacks(row->cu_seqlens, row->docs, row->used, row->used_docs, &lacking);
    begins = offset_lacks(row->used, row->used_docs, row->cu_seqlens, row->docs, &more);
    if (lacking + more == 0) {
        verdict_say(v, "cu_seqlens has the %lld documents of boundaries", (long long)row->docs);
        return;
    }
    if (v->kind == VERDICT_RIGHT) v = stage_begin(s, VERDICT_WRONG);
    if (lacking && !more) verdict_name(v, mistake_named("documents_ignored"));
    if (lacking)
        verdict_say(v, "cu_seqlens lacks %lld offsets of boundaries, first %lld",
                    (long long)lacking, (long long)ends);
    if (more)
        verdict_say(v, "cu_seqlens has %lld offsets that boundaries has not, first %lld",
                    (long long)more, (long long)begins);
}

/* ---- positions ---- */

/* A token's position or label, as it is right or as a mistake makes it. */
typedef int64_t (*token_rule)(const dump_row *row, int64_t token);
static inline int64_t position_right(const dump_row *row, int64_t t) {
    return t - row_document_begin(row, t);
}
static inline int64_t position_runs_on(const dump_row *row, int64_t t) { return (void)row, t; }
static inline int64_t position_local(const dump_row *row, int64_t t) { return row->local[t]; }

static inline int token_differs(const dump_row *row, const int64_t *values, token_rule rule,
                                int64_t t) {
    return t < row_end(row) && row->rank[t] >= 0 && values[t] != rule(row, t);
}

/* How many tokens differ from the rule; *first: which is the first. */
static inline int64_t row_differs(const dump_row *row, const int64_t *values, token_rule rule,
                                  int64_t *first) {
    int64_t count = 0;
    for (int64_t t = 0; t < row_end(row); t++)
        if (token_differs(row, values, rule, t) && !count++) *first = t;
    return count;
}

/* Whether each position is one more than the last, or 0, as with packed documents. */
static inline int positions_are_of_documents(const dump_row *row) {
    for (int64_t t = 0; t < row_end(row); t++)
        if (row->positions[t] != (t ? row->positions[t - 1] + 1 : 0) && row->positions[t])
            return 0;
    return 1;
}

/* Whether each position is the number of the document's earlier tokens on the same rank. */
static inline int positions_count_own(const dump_row *row) {
    int64_t most = 0, *own;
    int same;
    for (int64_t t = 0; t < row_end(row); t++) most = row->rank[t] > most ? row->rank[t] : most;
    own = (int64_t *)calloc((size_t)most + 1, sizeof *own);
    same = own != NULL;
    for (int64_t t = 0; t < row_end(row) && same; t++) {
        if (row_document_begin(row, t) == t) memset(own, 0, ((size_t)most + 1) * sizeof *own);
        if (row->rank[t] >= 0) same = row->positions[t] == own[row->rank[t]]++;
    }
    free(own);
    return same;
}

/* Without cu_seqlens, positions that restart may be right: documents may be packed. Without
   cuts, local rows equal tokens' places in the row, so only positions_run_on is named. */
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
        verdict_try(v, "positions_run_on", NULL,
                    row_differs(row, row->positions, position_runs_on, &other) > 0);
        if (row_has_cuts(row))
            verdict_try(v, "positions_local", NULL,
                        row_differs(row, row->positions, position_local, &other) > 0);
        return;
    }
    if (!row_differs(row, row->positions, position_runs_on, &other))
        verdict_name(v, mistake_named("positions_run_on"));
    if (row_has_cuts(row) &&
        (!row_differs(row, row->positions, position_local, &other) || positions_count_own(row)))
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

/* Each rank has the whole row's labels and takes the first n, or those of a contiguous share,
   instead of its tokens' labels. */
static inline int64_t label_of_row_begin(const dump_row *row, int64_t t) {
    return label_right(row, row->local[t]);
}
static inline int64_t label_of_contiguous(const dump_row *row, int64_t t) {
    return label_right(row, row->gathered[t]);
}

static inline int64_t label_twice_apart(const dump_row *row, int64_t t) {
    return row->next[t] < 0 ? DUMP_IGNORE : label_right(row, row->next[t]);
}

static const struct {
    const char *name, *how;
    token_rule rule;
    int loses, cuts; /* leaves cuts without a label; shows only where there are cuts */
} label_rules[] = {
    {"shift_after_split", NULL, label_after_split, 1, 1},
    {"labels_not_shifted", NULL, label_unshifted, 0, 0},
    {"labels_shifted_twice", "before the split", label_twice, 0, 0},
    {"labels_shifted_twice", "before and behind the split", label_twice_apart, 1, 1},
    {"labels_cross_documents", NULL, label_crosses, 0, 0},
    {"side_tensor_not_split", "labels of the row's begin", label_of_row_begin, 0, 1},
    {"side_tensor_not_split", "labels of a contiguous share", label_of_contiguous, 0, 1}};
enum { LABEL_RULES = sizeof label_rules / sizeof *label_rules };

/* Whether the token has no label although its neighbours in the document have one. */
static inline int label_gap(const dump_row *row, int64_t t) {
    return row->labels[t] == DUMP_IGNORE && t > 0 && t + 1 < row_end(row) &&
           !row_ends_document(row, t) && !row_ends_document(row, t - 1) &&
           row->labels[t - 1] != DUMP_IGNORE && row->labels[t + 1] != DUMP_IGNORE;
}

static inline int row_is_cut(const dump_row *row, int64_t t) {
    return row->next[t] != t + 1 && !row_ends_document(row, t);
}

/* Gaps (label_gap) of all rows. A shift after the split leaves a gap at every cut (row_is_cut);
   a single gap may be a mask. */
typedef struct label_gaps {
    int64_t labels, at_cuts, elsewhere, right_at_cuts;
    int rows, without_documents;
    int cuts, shows[LABEL_RULES]; /* some row has cuts; a rule gives some other label */
    char first[200];
} label_gaps;

static inline void count_gaps(label_gaps *g, const dump_row *row) {
    g->rows++;
    g->without_documents += !row->docs && !row_is_empty(row);
    for (int64_t t = 0; t < row_end(row); t++) {
        int gap = label_gap(row, t), cut = row_is_cut(row, t);
        if (row->rank[t] < 0) continue;
        g->labels += row->labels[t] != DUMP_IGNORE;
        if (gap && cut && !g->at_cuts++) place_text(g->first, sizeof g->first, row, t);
        g->elsewhere += gap && !cut;
        g->right_at_cuts += cut && row->labels[t] == label_right(row, t);
    }
}

/* Whether the token's label differs from the rule. An ignored label never does, as it may be a
   prompt's; nor does that of the row's last token, which may be any. */
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

/* Whether a later document is trained from its first label on. Elsewhere its first token may be
   of a prompt, whose mask hides a label that crosses into it. */
static inline int row_begins_trained(const dump_row *row) {
    for (int64_t t = 0; t + 2 < row_end(row); t++)
        if (row_ends_document(row, t) && !row_ends_document(row, t + 1) &&
            row->labels[t + 1] != DUMP_IGNORE)
            return 1;
    return 0;
}

/* Names the mistakes that explain a row's wrong labels. lost: labels are also missing at all
   cuts. */
static inline void name_label_mistakes(verdict *v, const dump_row *row, int lost) {
    int cuts = row_has_cuts(row);
    int64_t first;
    for (int i = 0; i < LABEL_RULES; i++)
        if (label_rules[i].loses >= lost && cuts >= label_rules[i].cuts &&
            !labels_differ(row, label_rules[i].rule, &first))
            verdict_name(v, mistake_named(label_rules[i].name));
}

/* Notes which mistakes would give other labels than the right ones of all rows. */
static inline void try_labels(verdict *v, const label_gaps *g) {
    for (int i = 0; i < LABEL_RULES; i++)
        if (g->cuts >= label_rules[i].cuts)
            verdict_try(v, label_rules[i].name, label_rules[i].how, g->shows[i]);
}

/* Judges the labels of one row. check_gaps judges missing ones after the last row. */
static inline void check_labels(stage *s, const dump_row *row, label_gaps *all) {
    label_gaps gaps = {0};
    int64_t first = 0, wrong;
    char place[160];
    verdict *v;
    if (!row->labels || !row->ids) return;
    count_gaps(&gaps, row);
    count_gaps(all, row);
    wrong = labels_differ(row, label_right, &first);
    all->cuts |= row_has_cuts(row);
    for (int i = 0; !wrong && i < LABEL_RULES; i++)
        all->shows[i] |= label_rules[i].rule == label_crosses
                             ? row_begins_trained(row)
                             : labels_differ(row, label_rules[i].rule, &first) > 0;
    if (!wrong) return;
    v = stage_begin(s, VERDICT_WRONG);
    name_label_mistakes(v, row, gaps.at_cuts && !gaps.right_at_cuts);
    verdict_say(v,
                "first at %s: label %lld, right %lld; of %lld tokens %lld have a wrong label",
                place_text(place, sizeof place, row, first), (long long)row->labels[first],
                (long long)label_right(row, first), (long long)row_end(row), (long long)wrong);
}

/* One right label at a cut shows that the shift came before the split. Missing labels prove the
   contrary only if they are missing at cuts alone: others may be masks or documents' ends. */
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
        try_labels(v, g);
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

/* The loss that a rank reports; *unit: its type's rounding. NaN and -1: it reports none. */
static inline double reported_loss(dump *d, int64_t rank, double *unit) {
    const seqpar_safetensors_tensor *t = seqpar_safetensors_find(d->ranks[rank].file, "loss");
    double *loss = t && t->count == 1 ? dump_doubles(d, rank, t) : NULL, x = loss ? *loss : NAN;
    *unit = loss ? dump_unit_of(t->dtype) : -1;
    free(loss);
    return x;
}

static inline void check_loss(stage *s, dump *d, loss_parts *p) {
    stage side = {.judged = p->side_is_wrong, .v = p->side};
    double unit = -1;
    stage_add(s, &side);
    for (int64_t r = 0; r < d->world; r++) p->reported[r] = reported_loss(d, r, &unit);
    if (p->complete && !side.judged && unit >= 0 && loss_is_of_shares(p, &d->facts, unit)) {
        verdict_say(stage_begin(s, VERDICT_RIGHT),
                    "each rank reports its own share times the number of ranks; the mean of "
                    "these, %.9g, is that over all tokens",
                    p->answers.right);
        return;
    }
    for (int64_t r = 0; p->complete && r < d->world; r++) {
        stage one = {.judged = 1};
        double loss = reported_loss(d, r, &unit);
        if (unit < 0) continue;
        judge_loss(p, &d->facts, loss, unit, r, &one.v);
        verdict_say(&one.v,
                    "as rank %lld reports it; right is what the numbers of all ranks give",
                    (long long)r);
        stage_add(s, &one);
    }
}

/* ---- rewards ---- */

/* Where the first wrong advantage is, and whether tokens have the advantages of wrong tokens:
   those that row_source gives, the sources. off: tokens that contradict a kind of source;
   shown: tokens that can show it. */
typedef struct advantage_search {
    const reward_table *t;
    int64_t document; /* the row's first document, numbered within the step */
    int found;        /* 1: `first` says where */
    char first[240];
    int64_t off[SOURCES], shown[SOURCES];
} advantage_search;

static inline int is_near(const reward_table *t, int64_t i, double x, double want) {
    return fabs(x - want) <= reward_limit(t, i, want);
}

/* Counts token t in off if its advantage is not that of its source (row_source), and in shown
   if the source has a label and its advantage is not t's right one. A source without a label
   has its document's advantage, or 0. */
static inline void search_source(advantage_search *s, const dump_row *row, int64_t t,
                                 int source) {
    int64_t from = row_source(row, source, t), own = s->document + row_document(row, t), other;
    double x = row->advantages[t], want;
    if (from < 0 || from >= row_end(row)) return;
    other = s->document + row_document(row, from);
    want = s->t->way(s->t, other, 0, 0);
    if (!is_near(s->t, other, x, want) && (row_supervised(row, from) || x != 0))
        s->off[source]++;
    if (row_supervised(row, from) && !is_near(s->t, own, want, s->t->way(s->t, own, 0, 0)))
        s->shown[source]++;
}

static inline void search_row(advantage_search *s, const dump_row *row, int64_t micro) {
    char place[160];
    for (int64_t t = 0; t < row_end(row); t++) {
        int64_t own;
        double want;
        if (!row_supervised(row, t)) continue;
        for (int source = 0; source < SOURCES; source++) search_source(s, row, t, source);
        own = s->document + row_document(row, t);
        want = s->t->way(s->t, own, 0, 0);
        if (s->found || is_near(s->t, own, row->advantages[t], want)) continue;
        s->found = 1;
        snprintf(s->first, sizeof s->first,
                 "first at %s of micro-batch %lld: advantage %.9g, right %.9g",
                 place_text(place, sizeof place, row, t), (long long)micro, row->advantages[t],
                 want);
    }
}

/* Reads all rows once more. 0, or -1 with d->error. */
static inline int search_advantages(dump *d, advantage_search *s) {
    for (int64_t n = 0; n < d->world / d->sp * d->accumulation; n++) {
        dump_row row;
        dump_places found;
        int status = dump_read_row(d, n / d->accumulation, n % d->accumulation, &row, &found);
        if (!status) search_row(s, &row, n % d->accumulation);
        s->document += row.docs;
        dump_row_free(&row);
        if (status) return -1;
    }
    return 0;
}

static inline int say_wrong_advantages(verdict *v, dump *d, const reward_table *t) {
    advantage_search s = {.t = t};
    if (search_advantages(d, &s)) return -1;
    for (int source = 0; source < SOURCES; source++) {
        if (s.off[source] || !s.shown[source]) continue;
        verdict_name(v, mistake_named("side_tensor_not_split"));
        verdict_say(v, "advantages: %s", source_texts[source]);
    }
    if (s.found) verdict_say(v, "%s", s.first);
    return 0;
}

/* 0, or -1 with d->error. */
static inline int check_advantages(stage *s, dump *d, const loss_parts *p) {
    static advantage_step step;
    reward_table t;
    int status = advantages_begin(&step, &t, &p->documents, &d->facts, p->tolerance);
    if (status) {
        seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for advantages");
    } else {
        judge_advantages(stage_begin(s, VERDICT_RIGHT), &t, &step);
        if (s->v.kind == VERDICT_WRONG || s->v.kind == VERDICT_MARGINAL)
            status = say_wrong_advantages(&s->v, d, &t);
    }
    advantages_free(&step);
    return status;
}

/* Reads all rows once more. 0, or -1 with d->error. */
static inline int gae_add_rows(gae_step *g, dump *d) {
    for (int64_t n = 0; n < d->world / d->sp * d->accumulation; n++) {
        int64_t dp = n / d->accumulation, micro = n % d->accumulation;
        dump_row row;
        dump_places found;
        int status = dump_read_row(d, dp, micro, &row, &found);
        if (!status && gae_add_row(g, &row, dp, micro))
            status = (seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a step"), -1);
        dump_row_free(&row);
        if (status) return -1;
    }
    return 0;
}

/* 0, or -1 with d->error. */
static inline int check_gae(stage *s, dump *d, double tolerance) {
    gae_step g;
    stage returns = {.judged = 1};
    int status = gae_begin(&g, &d->facts, tolerance);
    if (status) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a step");
    if (!status) status = gae_add_rows(&g, d);
    if (!status && g.lacks)
        snprintf(s->lacks, sizeof s->lacks,
                 "index, cu_seqlens, labels, values, advantages, and token_rewards or "
                 "rewards");
    if (!status && !g.lacks && g.count) {
        gae_judge(&g, stage_begin(s, VERDICT_RIGHT), 0);
        if (g.has_returns) gae_judge(&g, &returns.v, 1);
        if (g.has_returns) stage_add(s, &returns);
    }
    gae_free(&g);
    return status;
}

/* 0, or -1 with d->error. */
static inline int check_rewards(stage *s, dump *d, const loss_parts *p) {
    const step_documents *documents = &p->documents;
    if (d->facts.objective == DUMP_PPO && d->facts.advantage == DUMP_ADVANTAGE_GAE)
        return check_gae(s, d, p->tolerance);
    if (!documents->count) return 0;
    if (d->facts.objective == DUMP_RM && documents->has_scores && documents->has_values)
        judge_scores(stage_begin(s, VERDICT_RIGHT), documents, &d->facts, p->tolerance);
    if (d->facts.objective != DUMP_PPO || !documents->has_groups ||
        d->facts.advantage == DUMP_ADVANTAGE_GIVEN)
        return 0;
    return check_advantages(s, d, p);
}

/* ---- all of it ---- */

typedef struct step_parts {
    loss_parts loss;
    label_gaps gaps;
    step_counts counts;
} step_parts;

static inline void judge_row(dump *d, stage *stages, step_parts *p, const dump_row *row,
                             const dump_places *found, int64_t dp, int64_t micro) {
    stage one[STAGES] = {{0}};
    for (int64_t t = 0; t < row_end(row); t++) d->interleaved |= row->gathered[t] != t;
    check_places(&one[PLACES], row, found, d->sp);
    if (one[PLACES].judged) check_boundaries(&one[PLACES], row);
    check_positions(&one[POSITIONS], row);
    check_labels(&one[LABELS], row, &p->gaps);
    check_attention(&one[ATTENTION], d, row, found, dp, micro);
    for (int i = 0; i < STAGES; i++) stage_add(&stages[i], &one[i]);
    loss_add_row(&p->loss, &d->facts, row, dp, micro);
}

static inline int judge_logits(dump *d, stage *stages, dump_row *row, int64_t dp,
                               int64_t micro) {
    stage one = {0};
    int status = check_logits(&one, d, row, dp, micro);
    stage_add(&stages[LOGITS], &one);
    return status;
}

static inline int dump_has_gradients(const dump *d) {
    for (int64_t r = 0; r < d->world; r++)
        for (int64_t i = 0; i < seqpar_safetensors_count(d->ranks[r].file); i++)
            if (!strncmp(seqpar_safetensors_at(d->ranks[r].file, i)->name, "grad.", 5))
                return 1;
    return 0;
}

static inline void begin_stages(const dump *d, stage *stages) {
    for (int i = 0; i < STAGES; i++) stages[i].foreign = !stage_is_of(i, &d->facts);
    if (!dump_has_gradients(d))
        strcpy(stages[GRADIENTS].lacks, "grad. tensors of parameters, and --want or --model");
}

/* Holds one row in memory at a time: gaps, rewards, counts and loss are summed up and judged
   after the last row. 0, or -1 with d->error. */
static inline int judge_dump(dump *d, stage *stages, double tolerance) {
    static step_parts parts;
    int status = 0;
    begin_stages(d, stages);
    memset(&parts.gaps, 0, sizeof parts.gaps);
    loss_begin(&parts.loss, &d->facts, tolerance);
    counts_begin(&parts.counts, &d->facts);
    parts.loss.widened = d->widened;
    bar_begin("rows", d->world / d->sp * d->accumulation);
    for (int64_t n = 0; !status && n < d->world / d->sp * d->accumulation; n++) {
        int64_t dp = n / d->accumulation, micro = n % d->accumulation;
        dump_row row;
        dump_places found;
        status = dump_read_row(d, dp, micro, &row, &found);
        if (!status) status = judge_logits(d, stages, &row, dp, micro);
        if (!status) status = counts_add_row(&parts.counts, d, &row, dp, micro);
        if (!status) judge_row(d, stages, &parts, &row, &found, dp, micro);
        dump_row_free(&row);
        bar_step(1);
    }
    bar_end();
    check_gaps(&stages[LABELS], &parts.gaps, d->sp);
    if (!status && (status = loss_end(&parts.loss, &d->facts)))
        seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a step");
    if (!status) status = check_rewards(&stages[REWARDS], d, &parts.loss);
    if (!status) d->divisor = check_divisors(&stages[COUNTS], &parts.counts);
    if (!status) check_loss(&stages[LOSS], d, &parts.loss);
    counts_free(&parts.counts);
    if (parts.loss.lacks_documents) strcpy(stages[LOSS].lacks, "cu_seqlens");
    if (parts.loss.lacks_term)
        snprintf(stages[LOSS].lacks, sizeof stages[LOSS].lacks, "%s", parts.loss.lacks_term);
    if (parts.loss.rewards_lack_documents) strcpy(stages[REWARDS].lacks, "cu_seqlens");
    loss_free(&parts.loss);
    return d->error.status ? -1 : 0;
}
#endif
