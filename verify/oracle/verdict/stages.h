/* SPDX-License-Identifier: MIT OR Unlicense */
/* stages.h - the stages of a verdict, in the order of data flow: what each needs of a dump, and
 * its verdict. */
#ifndef ORACLE_STAGES_H
#define ORACLE_STAGES_H
#include "oracle/dump/rows.h"
#include "verdict.h"

enum {
    PLACES,
    POSITIONS,
    LABELS,
    ATTENTION,
    LOGITS,
    LOG_PROBS,
    REWARDS,
    COUNTS,
    LOSS,
    REDUCTION,
    GRADIENTS,
    NORM,
    STEP,
    STAGES
};
static const struct {
    const char *name, *needs; /* needs: tensors, metadata and options that the stage requires */
} stage_names[STAGES] = {
    {"places", "index"},
    {"positions", "index and positions"},
    {"labels", "index, ids and labels"},
    {"attention", "index, cu_seqlens, q, k, v and out"},
    {"logits", "logits, index, labels and logp"},
    {"log-probs", "--model, a Llama folder, and index, ids, labels and logp"},
    {"rewards", "index and cu_seqlens, with values and scores of RM; or labels, rewards, "
                "groups and advantages of PPO, and advantage in the metadata"},
    {"counts", "loss_count or loss_sum of SFT, index and labels"},
    {"loss",
     "loss, index, labels, logp and what else the objective takes (help(seqpar_dump.Dump))"},
    {"reduction", "local. and grad. tensors of a parameter"},
    {"gradients", "--model, or --want, a dump of the same step on one rank"},
    {"norm", "norm and grad. tensors of all parameters"},
    {"step", "optimizer and lr in the metadata, grad., param. and after. tensors"}};

typedef struct stage {
    int judged;
    verdict v;       /* if judged */
    char lacks[200]; /* if not judged: what this dump lacks; "": stage_names says it */
    int foreign;     /* 1: the dump's objective does not have this stage */
} stage;

/* Whether the objective has the stage at all. */
static inline int stage_is_of(int i, const dump_facts *f) {
    int values = f->objective == DUMP_RM || f->objective == DUMP_VALUE;
    switch (i) {
    case LABELS: return f->objective != DUMP_RM;
    case LOGITS: return !values;
    case LOG_PROBS: return f->objective != DUMP_VALUE;
    case REWARDS: return f->objective == DUMP_RM || f->objective == DUMP_PPO;
    case LOSS: return f->objective != DUMP_OTHER;
    case COUNTS: return f->objective == DUMP_SFT && f->reduction == DUMP_BY_TOKEN;
    default: return 1;
    }
}

/* Reports list a stage that was not judged only if the dump's objective has it. */
static inline int stage_is_listed(const stage *s) { return s->judged || !s->foreign; }

static inline int stages_listed(const stage *stages) {
    int count = 0;
    for (int i = 0; i < STAGES; i++) count += stage_is_listed(&stages[i]);
    return count;
}

static inline int stages_judged(const stage *stages) {
    int count = 0;
    for (int i = 0; i < STAGES; i++) count += stages[i].judged;
    return count;
}

static inline const char *stage_needs(const stage *s, int i) {
    return *s->lacks ? s->lacks : stage_names[i].needs;
}

static inline verdict *stage_begin(stage *s, verdict_kind kind) {
    memset(&s->v, 0, sizeof s->v);
    s->judged = 1;
    s->v.kind = kind;
    return &s->v;
}

/* The greatest weight wins among several rows, ranks or stages. */
static inline int verdict_weight(verdict_kind kind) {
    return kind == VERDICT_WRONG      ? 3
           : kind == VERDICT_MARGINAL ? 2
           : kind == VERDICT_RIGHT    ? 1
                                      : 0;
}

static inline void stage_add(stage *s, const stage *one) {
    if (!one->judged && *one->lacks && !*s->lacks)
        memcpy(s->lacks, one->lacks, sizeof s->lacks);
    if (!one->judged) return;
    if (s->judged && verdict_weight(s->v.kind) >= verdict_weight(one->v.kind)) {
        if (s->v.kind == one->v.kind) verdict_take_tried(&s->v, &one->v);
        return;
    }
    s->judged = 1;
    s->v = one->v;
}
#endif
