/* SPDX-License-Identifier: MIT OR Unlicense */
/* operations.h - the table of operations of `seqpar-verify run`. Help, checks of inputs and
 * output are generated from it. */
#ifndef ORACLE_OPERATIONS_H
#define ORACLE_OPERATIONS_H
#include "run_attention.h"
#include "run_rows.h"
#include "run_seeds.h"

typedef struct operation {
    const char *name;
    const char *takes;   /* tensors that each micro-batch must have, with blanks between */
    const char *options; /* names, of those that not every operation takes; the first is
                            required, unless a blank precedes it */
    const char *gives, *help;
    int (*make)(run *r); /* 0, or -1 with the error */
} operation;

static const operation operations[] = {
    {"pack", "index ids", "tokens", "index cu_seqlens ids positions labels",
     "puts the documents of a one-rank dump into rows of at most --tokens", run_pack},
    {"positions", "index cu_seqlens", "", "positions",
     "gives each token its place in its document", run_positions},
    {"labels", "index ids cu_seqlens", " unmasked", "labels",
     "gives each token the next one of its document; masked labels stay masked", run_labels},
    {"split", "index", "sp layout", "index and all tensors of tokens",
     "splits sequences of one rank each over --sp ranks", run_split},
    {"gather", "index", "", "index and all tensors of tokens",
     "puts each sequence on one rank, the reverse of split", run_gather},
    {"attention", "index cu_seqlens q k v", "", "out lse", "computes attention in fp64",
     run_attention},
    {"attention-gradient", "index cu_seqlens q k v dout", "", "dq dk dv",
     "computes its gradient in fp64; out and lse are computed anew", run_attention_gradient},
    {"merge", "part_out part_lse", "", "out lse", "merges attention over parts of the keys",
     run_merge},
    {"log-probs", "index labels logits", "", "logp mean_logp logits_lse entropy",
     "computes log-probs of the labels from logits, and what terms of losses take",
     run_log_probs},
    {"loss", "index", "", "loss; with rm scores, too",
     "computes the loss from labels, logp and what else the objective needs", run_loss},
    {"loss-gradient", "index", "", "loss, and dlogp or dvalues; of terms dentropy and others",
     "computes the loss, and its derivatives by log-probs, values and terms",
     run_loss_gradient},
    {"gae", "index cu_seqlens labels values", "", "advantages returns",
     "computes generalised advantages from values and rewards or token_rewards", run_gae},
    {"advantages", "index cu_seqlens rewards groups", "", "advantages",
     "computes advantages of ppo as the metadata say", run_advantages},
    {"norm", "", "", "norm", "computes the norm of the grad. tensors of all parameters",
     run_norm},
    {"optimizer", "", "", "after.NAME",
     "clips, and steps AdamW or SGD, from grad., param., m. and v.", run_optimizer},
    {"step", "index ids labels", "model", "logp loss norm grad.NAME after.NAME",
     "computes the whole step of sft or dpo in fp64, from --model", run_step}};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static inline const operation *operation_named(const char *name) {
    for (int i = 0; i < OPERATIONS; i++)
        if (!strcmp(operations[i].name, name)) return &operations[i];
    return NULL;
}

static inline void operations_help(void) {
    printf("\n");
    for (int i = 0; i < OPERATIONS; i++) {
        char label[40];
        snprintf(label, sizeof label, "%-18s", operations[i].name);
        printf("    %s %s\n", label, operations[i].help);
        printf("    %-18s takes %s\n", "",
               *operations[i].takes ? operations[i].takes : "tensors of the step");
        printf("    %-18s gives %s\n", "", operations[i].gives);
    }
}

/* ---- running an operation ---- */

/* 0, or -1 with the error, which does not name the operation: the caller does. Call run_close
   in either case. */
static inline int operation_run(run *r, const operation *o, const run_desc *desc) {
    memset(r, 0, sizeof *r);
    r->desc = desc;
    if (dump_open(&r->d, desc->in)) return -1;
    r->world = r->d.world;
    r->sp = r->d.sp;
    r->accumulation = r->d.accumulation;
    run_real(r);
    if (run_make_folder(r)) return -1;
    if (*o->takes && run_needs(r, o->takes)) return -1;
    if (run_listed(o->takes, "index") && run_rows(r)) return -1;
    if (o->make(r)) return -1;
    return run_save(r);
}

/* ---- output ---- */

/* The value of a scalar tensor; NaN if it is neither F64 nor F32. */
static inline double run_value(const run_tensor *m) {
    double x = NAN;
    float f;
    if (m->t.dtype == SEQPAR_SAFETENSORS_F64) memcpy(&x, m->data, 8);
    if (m->t.dtype == SEQPAR_SAFETENSORS_F32) x = (memcpy(&f, m->data, 4), (double)f);
    return x;
}

static inline cJSON *run_tensor_json(const run_tensor *m) {
    cJSON *o = cJSON_CreateObject(), *shape;
    cJSON_AddStringToObject(o, "name", m->t.name);
    cJSON_AddStringToObject(o, "dtype", seqpar_safetensors_dtype_name(m->t.dtype));
    shape = cJSON_AddArrayToObject(o, "shape");
    for (int64_t i = 0; i < m->t.dims; i++)
        cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)m->t.shape[i]));
    cJSON_AddBoolToObject(o, "replaced", m->replaced);
    if (!m->t.dims && !isnan(run_value(m))) cJSON_AddNumberToObject(o, "value", run_value(m));
    return o;
}

/* Appends each of the names, which have blanks between. */
static inline void json_names(cJSON *list, const char *names) {
    char name[256];
    while (*names) {
        size_t length = strcspn(names, " ");
        snprintf(name, sizeof name, "%.*s", (int)length, names);
        cJSON_AddItemToArray(list, cJSON_CreateString(name));
        names += length + strspn(names + length, " ");
    }
}

static inline cJSON *run_json(const run *r, const operation *o) {
    cJSON *all = cJSON_CreateObject(), *ranks;
    cJSON_AddStringToObject(all, "operation", o->name);
    cJSON_AddStringToObject(all, "out", r->out);
    ranks = cJSON_AddArrayToObject(all, "ranks");
    for (int64_t q = 0; q < r->world; q++) {
        cJSON *one = cJSON_CreateObject(), *tensors;
        cJSON_AddNumberToObject(one, "rank", (double)q);
        tensors = cJSON_AddArrayToObject(one, "tensors");
        for (int64_t i = 0; i < r->count; i++)
            if (r->made[i].rank == q)
                cJSON_AddItemToArray(tensors, run_tensor_json(&r->made[i]));
        cJSON_AddItemToArray(ranks, one);
    }
    json_names(cJSON_AddArrayToObject(all, "left_out"), r->left_out);
    return all;
}

static inline void run_print(const run *r, const operation *o) {
    int64_t replaced = 0;
    for (int64_t i = 0; i < r->count; i++) replaced += r->made[i].replaced;
    printf("%s  %s: %lld tensors on %lld ranks, %lld of them in the place of others\n", r->out,
           o->name, (long long)r->count, (long long)r->world, (long long)replaced);
    for (int64_t i = 0; i < r->count && i < 2; i++)
        if (!r->made[i].t.dims && !r->made[i].rank && !isnan(run_value(&r->made[i])))
            printf("    %s %.17g\n", r->made[i].t.name, run_value(&r->made[i]));
    if (*r->left_out) printf("    left out: %s\n", r->left_out);
}
#endif
