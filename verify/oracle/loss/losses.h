/* SPDX-License-Identifier: MIT OR Unlicense */
/* losses.h - the loss of a step, by its objective: sums it up row by row, then judges the loss
 * that each rank reports. */
#ifndef ORACLE_LOSSES_H
#define ORACLE_LOSSES_H
#include "advantages.h"
#include "kto.h"
#include "reference_logprobs.h"
#include "tokens.h"

typedef struct loss_parts {
    token_sums tokens;        /* SFT, PPO, value */
    step_documents documents; /* all but SFT */
    pair_ways pairs;          /* DPO, RM */
    kto_step kto;
    step_means means; /* of pairs or documents */
    answers answers;
    double *reported; /* (world) by each rank; NaN: it reports none */
    double tolerance; /* of rewards */
    double widened;   /* relative, of the loss; added to its roundings */
    double apart;     /* absolute, added to the limit: error of log-probs computed by --model */
    int complete;     /* all rows have the tensors that the loss needs */
    int lacks_documents, rewards_lack_documents; /* a row lacks only cu_seqlens */
    const char *lacks_term; /* a row lacks what an option takes; NULL: none does */
    char masked[160];       /* the first NaN or Inf at a token without a label; "": none */
    int no_memory;
    int side_is_wrong;
    verdict side; /* of the first row that has a side tensor of other tokens */
} loss_parts;

static inline int loss_is_of_tokens(const dump_facts *f) {
    return f->objective == DUMP_SFT || f->objective == DUMP_PPO || f->objective == DUMP_VALUE;
}

static inline void loss_begin(loss_parts *p, const dump_facts *f, double tolerance) {
    memset(p, 0, sizeof *p);
    p->tolerance = tolerance;
    p->complete = 1;
    documents_begin(&p->documents, f->sp);
    p->no_memory = tokens_begin(&p->tokens, f) || pairs_begin(&p->pairs, f->sp);
    p->reported = (double *)malloc((size_t)f->world * sizeof *p->reported);
    p->no_memory = p->no_memory || !p->reported;
    for (int64_t r = 0; p->reported && r < f->world; r++) p->reported[r] = NAN;
}

static inline void loss_free(loss_parts *p) {
    free(p->reported);
    tokens_free(&p->tokens);
    free(p->pairs.alone);
    documents_free(&p->documents);
    kto_free(&p->kto);
}

static inline int loss_is_of_documents(const dump_facts *f) {
    return !loss_is_of_tokens(f) || f->reduction == DUMP_BY_SEQUENCE || has_sequence_ratio(f);
}

/* Whether the row has the tensors that the loss needs, cu_seqlens aside. Without cu_seqlens,
   tensors of documents are not read; `unread` says that there are some. */
static inline int loss_has_else(const dump_facts *f, const dump_row *row) {
    int logp = row->logp && row->labels && row->ref_logp;
    if (f->objective == DUMP_DPO)
        return logp || (!preference_has_reference(f) && row->logp && row->labels);
    if (f->objective == DUMP_OTHER) return 0;
    if (f->objective == DUMP_RM) return row->scores || row->values || row->unread;
    if (f->objective == DUMP_KTO) return logp && ((row->desirable && row->kl) || row->unread);
    return row_has_token_losses(f, row);
}

static inline int loss_has(const dump_facts *f, const dump_row *row) {
    return row_is_empty(row) ||
           (loss_has_else(f, row) && (row->docs || !loss_is_of_documents(f)));
}

/* Notes which stages cannot judge this row only because cu_seqlens is missing. */
static inline void loss_note_documents(loss_parts *p, const dump_facts *f,
                                       const dump_row *row) {
    int scores = f->objective == DUMP_RM ||
                 (f->objective == DUMP_PPO && f->advantage != DUMP_ADVANTAGE_GIVEN);
    if (!row->rank || row->docs || row_is_empty(row)) return;
    p->lacks_documents |= loss_is_of_documents(f) && loss_has_else(f, row);
    p->rewards_lack_documents |= scores && row->unread;
}

/* Notes the first NaN or Inf of a loss's tensors at a token without a label. */
static inline void loss_note_masked(loss_parts *p, const dump_facts *f, const dump_row *row) {
    const struct {
        const char *name;
        const double *of;
    } of_tokens[] = {{"logp", row->logp},         {"ref_logp", row->ref_logp},
                     {"old_logp", row->old_logp}, {"advantages", row->advantages},
                     {"weights", row->weights},   {"mean_logp", row->mean_logp},
                     {"entropy", row->entropy},   {"logits_lse", row->logits_lse}},
      of_values[] = {
          {"values", row->values}, {"returns", row->returns}, {"old_values", row->old_values}};
    int is_value = f->objective == DUMP_VALUE;
    size_t count = is_value ? sizeof of_values / sizeof *of_values
                            : sizeof of_tokens / sizeof *of_tokens;
    for (int64_t t = 0; !*p->masked && row->rank && row->labels && t < row->tokens; t++)
        for (size_t i = 0; i < count && row->rank[t] >= 0 && !row_supervised(row, t); i++) {
            const double *x = is_value ? of_values[i].of : of_tokens[i].of;
            char place[96];
            if (!x || isfinite(x[t]) || *p->masked) continue;
            snprintf(p->masked, sizeof p->masked, "%s of %s, which has no label, is %g",
                     is_value ? of_values[i].name : of_tokens[i].name,
                     place_text(place, sizeof place, row, t), x[t]);
        }
}

static inline void loss_add_row(loss_parts *p, const dump_facts *f, const dump_row *row,
                                int64_t dp, int64_t micro) {
    int has = loss_has(f, row);
    p->complete = p->complete && has;
    loss_note_documents(p, f, row);
    loss_note_masked(p, f, row);
    if (row->rank && row->logp && term_lacking(f, row)) p->lacks_term = term_lacking(f, row);
    if (f->objective != DUMP_SFT && !p->no_memory && row->rank)
        p->no_memory = documents_add_row(&p->documents, row, dp, micro);
    if (has && loss_is_of_tokens(f) && !p->no_memory)
        tokens_add_row(&p->tokens, f, row, dp, micro);
    if (!p->side_is_wrong && f->objective != DUMP_SFT && f->objective != DUMP_RM && row->rank)
        p->side_is_wrong = check_sides(&p->side, row, dp * f->sp);
}

/* 0, or -1: no memory. */
static inline int loss_end(loss_parts *p, const dump_facts *f) {
    const token_sums *t = &p->tokens;
    int status = p->no_memory || t->logp.no_memory || t->old_logp.no_memory ||
                         t->advantages.no_memory || t->reference.no_memory
                     ? -1
                     : 0;
    if (f->objective == DUMP_RM && !p->documents.has_scores && !p->documents.has_values)
        p->complete = 0; /* neither scores nor values are in all rows */
    if (status || !p->complete) return status;
    if (loss_is_of_tokens(f))
        tokens_answers(&p->tokens, &p->answers, f);
    else if (f->objective == DUMP_KTO)
        status = kto_answers(&p->kto, &p->means, &p->documents, &p->answers, f);
    else
        pairs_answers(&p->pairs, &p->means, &p->documents, &p->answers, f);
    answers_add_reports(&p->answers, f);
    return status;
}

/* Names the mistake of a rank that does not combine its part with those of other ranks. */
static inline void loss_name_alone(loss_parts *p, const law *l, const dump_facts *f,
                                   int64_t rank, verdict *v) {
    double *alone = f->objective == DUMP_KTO ? p->kto.alone : p->pairs.alone;
    double x = alone ? alone[rank % f->sp] : NAN;
    if (loss_is_of_tokens(f))
        tokens_name_own(&p->tokens, l, &p->answers, rank, f, v);
    else if ((law_equal(l, l->got, x) && answer_shows(l, x, p->answers.right)) ||
             (f->sp > 1 && law_equal(l, l->got, x / (double)f->sp) &&
              answer_shows(l, x / (double)f->sp, p->answers.right)))
        verdict_name(v, mistake_named(f->objective == DUMP_RM ? "scores_of_one_rank"
                                                              : "log_probs_of_one_rank"));
}

/* Why a right number proves nothing within these limits; NULL: it proves something. */
static inline const char *loss_vacuous(const loss_parts *p, const dump_facts *f, const law *l) {
    const char *why;
    if (loss_is_of_tokens(f)) return tokens_vacuous(&p->tokens, &p->answers, l, f);
    why = f->objective == DUMP_KTO  ? kto_vacuous(&p->kto, &p->answers, l)
          : f->objective == DUMP_RM ? rm_vacuous(&p->answers, l)
                                    : pairs_vacuous(&p->answers, l, &p->means, f);
    return why                                                ? why
           : means_are_hidden(&p->means, l, p->answers.right) ? means_hidden_text
                                                              : NULL;
}

/* How far a rank's number may be off. unit: rounding of its type */
static inline law loss_limits(loss_parts *p, const dump_facts *f, double got, double unit) {
    answers *a = &p->answers;
    law l = {.got = got, .tolerance = p->widened, .right = a->right};
    l.copies = (double)f->world;
    unit = fmax(unit, narrow_unit(got));
    l.slack = a->slack +
              reported_rounding(unit, fmax(fabs(a->right), a->parts),
                                (double)(f->world * f->accumulation)) +
              p->apart;
    a->low_precision |= unit > NARROW;
    a->vacuous = loss_vacuous(p, f, &l);
    return l;
}

/* Whether each rank reports its own share of the loss times the number of ranks. That is right
   if gradients are averaged afterwards, as in training_step of transformers' Trainer. If counts
   are equal, the number may also be the rank's own mean, a mistake: then 0. */
static inline int loss_is_of_shares(loss_parts *p, const dump_facts *f, double unit) {
    const law *by = &p->tokens.means.by[BY_RANK];
    double count = 0;
    int differ = 0;
    if (!loss_is_of_tokens(f) || f->reduction != DUMP_BY_TOKEN || by->groups < 2) return 0;
    for (int64_t r = 0; r < by->groups; r++) {
        count += by->counts[r];
        differ |= by->counts[r] != by->counts[0];
    }
    for (int64_t r = 0; r < by->groups; r++) {
        law l = loss_limits(p, f, p->reported[r], unit);
        if (!law_equal(&l, l.got, by->sums[r] * (double)f->world / count)) return 0;
    }
    return differ;
}

/* Whether every rank that reports a loss reports this one. A count of other tokens, or another
   window, changes the loss of the whole step, so all ranks report it. */
static inline int loss_is_of_all(const loss_parts *p, const dump_facts *f, const law *l) {
    for (int64_t r = 0; r < f->world; r++)
        if (!isnan(p->reported[r]) && !law_equal(l, p->reported[r], l->got)) return 0;
    return 1;
}

/* Options of a loss, by objective; a tensor is an option, too. */
static const struct {
    const char *keys[5], *tensor;
} loss_options[] = {
    [DUMP_SFT] = {{"label_smoothing", "z_loss"}, "weights"},
    [DUMP_DPO] = {{"label_smoothing"}, NULL},
    [DUMP_RM] = {{"center"}, "margins"},
    [DUMP_KTO] = {{"desirable_weight", "undesirable_weight"}, NULL},
    [DUMP_PPO] = {{"entropy_coef", "dual_clip", "cispo", "kl_coef"}, "weights"},
    [DUMP_VALUE] = {{"clip_value"}, NULL},
};

/* A right step with an option is wrong here if the dump does not say the option. */
static inline void loss_say_options(const loss_parts *p, const dump_facts *f, verdict *v) {
    const char *tensor = loss_options[f->objective].tensor;
    char list[160] = "";
    for (const char *const *key = loss_options[f->objective].keys; *key; key++)
        if (dump_number_is_absent(f, *key))
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", *list ? ", " : "",
                     *key);
    if (!tensor || p->tokens.has_weights) tensor = "";
    if (*list || *tensor)
        verdict_say(v, "or the loss has an option that the dump does not say: %s%s%s%s%s", list,
                    *list ? " of the metadata" : "", *list && *tensor ? ", or " : "",
                    *tensor ? "a tensor " : "", tensor);
}

/* unit: rounding of the number's own type */
static inline void judge_loss(loss_parts *p, const dump_facts *f, double got, double unit,
                              int64_t rank, verdict *v) {
    law l = loss_limits(p, f, got, unit);
    step_means *means = loss_is_of_tokens(f) ? &p->tokens.means : &p->means;
    answers_judge(&p->answers, &l, v);
    if (f->grpo)
        verdict_say(v, "objective grpo stands for ppo, with advantage %s and reduction %s",
                    word_facts[FACT_ADVANTAGE].words[f->advantage],
                    word_facts[FACT_REDUCTION].words[f->reduction]);
    if (v->kind == VERDICT_RIGHT) means_try(means, &l, rank, f, v);
    if (v->kind != VERDICT_WRONG) return;
    means_name(means, &l, rank, f, v);
    answers_name(&p->answers, &l, v);
    loss_name_alone(p, &l, f, rank, v);
    if (loss_is_of_tokens(f) && loss_is_of_all(p, f, &l))
        tokens_name_rest(&p->tokens, &l, &p->answers, f, v);
    if (f->objective == DUMP_KTO && !v->count && rank % f->sp == 0 && /* once per sequence */
        kto_is_of_parts(&p->kto, &p->reported[rank / f->sp * f->sp], &l, v))
        verdict_name(v, mistake_named("kl_of_own_part"));
    if (isnan(got) && *p->masked) {
        verdict_name(v, mistake_named("nan_times_mask"));
        verdict_say(v, "%s", p->masked);
    }
    answers_end(&p->answers, &l, v);
    if (v->kind == VERDICT_WRONG && !v->count && isfinite(got)) loss_say_options(p, f, v);
}
#endif
