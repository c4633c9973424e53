/* SPDX-License-Identifier: MIT OR Unlicense */
/* dump.h - the format of a dump, which is what every rank wrote down of one training step, and
 * functions that open and read it.
 *
 * A dump is a folder with one safetensors file per rank. Rank r is member r % sp of replica
 * r / sp. The metadata of each file is strings (metadata.h reads them); the value of an absent
 * key is in brackets:
 *
 *     seqpar_dump "1", rank, world: always
 *     sp ("1")             ranks that share a sequence
 *     accumulation ("1")   micro-batches of the step
 *     objective ("sft")    sft, dpo, rm, kto, ppo, or value for PPO's critic (values.h), which
 *                          has clip_value ("0": no clip). grpo: ppo, with advantage group and
 *                          reduction sequence where these are absent. other: a loss that is
 *                          not in this list. It is not judged, nor are gradients by --model
 *     reduction ("token")  SFT, PPO and value: how losses of supervised tokens are averaged.
 *                          token: mean over all tokens of the step (TRL: dapo)
 *                          sequence: mean over documents of each document's mean (grpo)
 *                          constant: sum over the step / reduction_constant (dr_grpo:
 *                          documents times the longest completion)
 *                          micro: mean over all replicas' micro-batches of each one's mean
 *                          (bnpo)
 *                          replica: mean over replicas of each one's mean (Trainer of
 *                          transformers without average_tokens_across_devices)
 *                          In micro and replica, a group without a token counts as 0
 *     beta ("0.1")         DPO and KTO
 *     loss_type ("sigmoid") DPO: sigmoid, robust, hinge, ipo (of sums over tokens, as in
 *                          OpenRLHF), ipo_mean (of means over tokens, as in TRL) or simpo, with
 *                          label_smoothing ("0") and simpo_gamma ("0.5"): preferences.h
 *     desirable_weight, undesirable_weight ("1") KTO: factors of the losses of desirable and
 *                          undesirable documents
 *     center ("0")         RM: adds center (chosen score + rejected score)^2 to a pair's loss
 *     clip_low, clip_high ("0.2"), kl_coef ("0"): PPO
 *     label_smoothing, z_loss ("0") SFT: a token's loss is (1 - label_smoothing) (-logp) +
 *                          label_smoothing (-mean_logp) + z_loss logits_lse^2
 *     entropy_coef ("0")   PPO: entropy_coef * entropy is subtracted from each token's loss
 *     dual_clip ("0": none) PPO: the loss of a token with advantage A below 0 is at most
 *                          dual_clip |A|
 *     cispo ("0": none)    PPO: the loss of a token is -min(r, cispo) A logp, with no gradient
 *                          through r, in place of the clip (CISPO): 1 + epsilon_high, or TRL's
 *                          epsilon_high as it is
 *     on_policy ("no")     PPO: yes, old_logp must equal logp up to rounding, as before the
 *                          first update. Judged with the loss, as by `seqpar-verify on_policy`
 *     kl_ratio ("none")    PPO: token, the KL term is multiplied by the token's ratio r, and has a
 *                          gradient through it (TRL: use_bias_correction_kl)
 *     importance ("token") PPO: token, each token has its own ratio r; sequence (GSPO), all
 *                          tokens of a document have r = exp(mean of logp - old_logp over its
 *                          supervised tokens)
 *     advantage ("given")  PPO: given, not judged; group, (reward - mean of the group) /
 *                          (standard deviation of the group + advantage_eps ("1e-4"));
 *                          group_mean, without the division; rloo, reward - mean of the other
 *                          rewards of the group; gae (gae.h), with gamma ("1") and
 *                          gae_lambda ("1")
 *     dtype ("tensors")    what the model computes in: float64, float32, tf32, float16 or
 *                          bfloat16; tensors: the coarsest of parameters, gradients, log-probs.
 *                          Write float32 for transformers with float64 parameters: its
 *                          norms and softmaxes are in float32
 *     optimizer ("none")   adamw or sgd, with lr, beta1 ("0.9"), beta2 ("0.999"), eps ("1e-8"),
 *                          weight_decay ("0"), max_norm ("0": no clip), step ("1": the first)
 *     note, note.ANY       a note of your own, which is not read
 *     lr.NAME, weight_decay.NAME  of parameter NAME, where it has its own
 *     softmax_scale (1 / sqrt(head_dim)), window ("0": none; a token sees itself and window - 1
 *                          before it), softcap ("0": none): of attention
 *     part.TENSOR          "OFFSET TOTAL": this file has the elements from OFFSET on of a
 *                          flattened tensor of TOTAL elements; ranges of ranks may overlap
 *
 * Tensors of micro-batch A, which is one row of packed documents. All are optional. n is the
 * number of tokens on this rank. Tensors of shape (docs) are the same on all ranks of a
 * sequence:
 *
 *     A.index       (n)        index of each token in the row before the split
 *     A.cu_seqlens  (docs + 1) where documents begin in that row, and where the last one ends;
 *                              the same on all ranks. Without it, packing is not judged. A
 *                              replica without a row writes 0 alone, and empty tensors.
 *     A.boundaries  (docs + 1) where documents begin as meant, if the package's cu_seqlens may
 *                              be others. The two are compared, and all else is judged by
 *                              boundaries
 *     A.ids         (n)        tokens
 *     A.positions   (n)        as given to the model
 *     A.labels      (n)        the token to predict here, already shifted; -100: none. Any
 *                              value at the row's last token. Write the labels that the loss
 *                              used: labels recomputed for the dump prove nothing
 *     A.logits      (n, vocab) the input of the softmax
 *     A.logp        (n)        log-prob of the label; any value without a label
 *     A.loss_sum    ()         SFT: the rank's sum of losses
 *     A.loss_count  ()         SFT: the number by which the rank divides that sum before its
 *                              backward pass. Without loss_sum, the sum is taken to be over
 *                              the rank's own tokens
 *     A.ref_logp    (n)        log-prob of the label under the reference model
 *     A.old_logp    (n)        PPO: log-prob of the label when the text was sampled
 *     A.advantages  (n)        PPO, as used
 *     A.mean_logp   (n)        SFT with label_smoothing: mean of the log-probs of all ids
 *     A.logits_lse  (n)        SFT with z_loss: log of the sum of exp of the logits
 *     A.entropy     (n)        PPO with entropy_coef: of the distribution over all ids
 *     A.weights     (n)        SFT and PPO: a factor of each token's loss, for example the
 *                              weight of a data source or a truncated importance ratio. The
 *                              mean's divisor is that of reduction, not the sum of weights
 *     A.rewards     (docs)     PPO
 *     A.groups      (docs)     PPO: which prompt the document answers; equal numbers are one
 *                              group, over all rows and replicas of the step
 *     A.values      (n)        RM: output of the score head at each token. PPO with advantage
 *                              gae: the critic's value, when the text was sampled, at the token
 *                              whose label is rewarded. Objective value: the value in training
 *     A.token_rewards (n)      gae: the whole reward of a token. Absent: the document's reward
 *                              at its last supervised token
 *     A.returns     (n)        gae and value
 *     A.old_values  (n)        value with clip_value: the value when the text was sampled
 *     A.scores      (docs)     RM: the score of the document in the loss
 *     A.margins     (docs)     RM: the margin of a pair, at its chosen document; any value at
 *                              the rejected one. Absent: 0
 *     A.desirable   (docs)     KTO: 1 or 0
 *     A.kl          (docs)     KTO: sum of policy - reference log-probs of the mismatched
 *                              answer
 *     A.q A.out     (n, heads, head_dim)     of one layer's attention, after rotary
 *     A.k A.v       (n, kv_heads, head_dim)
 *     A.lse         (n, heads)               natural logarithm
 *     A.dout A.dq   (n, heads, head_dim)     gradients of the loss
 *     A.dk A.dv     (n, kv_heads, head_dim)
 *     A.part_out    (parts, n, heads, head_dim)  partial attention, each part over some of the
 *     A.part_lse    (parts, n, heads)            keys, as a hop of a ring gives it; -Inf: the
 *                                                part has no key. Not judged: input of
 *                                                `seqpar-verify run merge`
 *
 * Tensors of the step:
 *
 *     loss          ()         as this rank reports it for the whole step
 *     norm          ()         of the gradient before clip, as this rank reports it
 *     local.NAME    (any)      this rank's gradient of parameter NAME, before any reduction; in
 *                              the dump of --want with one row per rank: that row's share of
 *                              the step's gradient
 *     grad.NAME     (any)      after all reductions and before clip
 *     param.NAME    (any)      the parameter before the optimizer's step
 *     after.NAME    (any)      the parameter after the optimizer's step
 *     m.NAME v.NAME (any)      AdamW's moments before the step; absent: 0
 *
 * Types: index, ids, positions, labels, cu_seqlens and groups are integers. All others are F16,
 * BF16, F32 or F64; rewards, scores, margins, desirable and kl may be integers, too. */
#ifndef ORACLE_DUMP_H
#define ORACLE_DUMP_H
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "metadata.h"

enum { DUMP_IGNORE = -100 };
#ifndef DUMP_TOKENS_MAX
#define DUMP_TOKENS_MAX (1 << 24)
#endif
typedef struct dump_rank {
    char path[1024];
    seqpar_safetensors_file *file; /* NULL: none of this rank */
} dump_rank;

typedef struct dump {
    dump_rank *ranks;                /* (world) */
    int64_t world, sp, accumulation; /* as in facts */
    dump_facts facts;
    double widened;  /* relative tolerance of the loss, beside its derived limit; 0: none */
    double divisor;  /* the number by which ranks divide their own loss sums, relative to the
                       step's count of supervised tokens; 0: not known */
    int interleaved; /* some row is not its ranks' tokens, one rank's behind another's */
    int tries_all;   /* on a right attention, too, all mistakes are tried: which would show? */
    /* (rows) of (tokens): for pictures, bit t is set where attention's tensor t has a wrong row;
       NULL: none was judged wrong */
    unsigned char **attention_off;
    seqpar_error error;
} dump;

/* A row as it was before the split. Arrays have (tokens) elements; NULL: not in the dump. The
   rank of a token that no rank holds is -1. */
typedef struct dump_row {
    int64_t tokens, docs;
    int64_t *cu_seqlens; /* (docs + 1) as meant: boundaries, or else A.cu_seqlens */
    int64_t *used; /* (used_docs + 1) A.cu_seqlens if there are boundaries, too, or NULL */
    int64_t used_docs;
    int64_t *rank, *local; /* the rank that holds the token; its index on that rank */
    int64_t *next;         /* the next token on the same rank; -1: none */
    int64_t *gathered;     /* its index if all ranks' tokens are concatenated in rank order */
    int64_t *order;        /* inverse of gathered: the token at that index; -1: none */
    int64_t *ids, *positions, *labels;
    double *logp, *ref_logp, *old_logp, *advantages, *values, *weights;
    double *mean_logp, *logits_lse, *entropy;
    double *returns, *old_values, *token_rewards;
    double *scores, *rewards, *desirable, *kl, *margins; /* (docs) */
    int64_t *groups;                                     /* (docs) */
    int unread; /* tensors of documents were not read, as there is no cu_seqlens */
    struct {    /* relative rounding of these numbers in the dump (roundings.h) */
        double logp, ref_logp, old_logp, advantages, values, weights;
        double mean_logp, logits_lse, entropy;
        double returns, old_values, token_rewards;
        double scores, rewards, desirable, kl, margins;
    } unit;
} dump_row;

/* ---- opening ---- */

static inline void dump_close(dump *d) {
    for (int64_t r = 0; d->ranks && r < d->world; r++)
        seqpar_safetensors_close(d->ranks[r].file);
    for (int64_t i = 0; d->attention_off && i < d->world / d->sp * d->accumulation; i++)
        free(d->attention_off[i]);
    free(d->attention_off);
    free(d->ranks);
}

/* Facts that must be equal in all files. Sets them from the first file, compares the others. */
static inline int dump_agree(dump *d, const seqpar_safetensors_file *file, const char *path) {
    dump_facts facts;
    const char *key;
    if (dump_read_facts(file, path, &facts, &d->error)) return -1;
    if (!d->world) d->facts = facts;
    d->world = d->facts.world;
    d->sp = d->facts.sp;
    d->accumulation = d->facts.accumulation;
    if (!(key = dump_facts_differ(&facts, &d->facts))) return 0;
    seqpar_fail(
        &d->error, SEQPAR_ERR_FILE_FORMAT,
        !strcmp(key, "sp")
            ? "%.300s: metadata %s differs from that of another file; for rows that are "
              "split over different numbers of ranks give the largest on all, a "
              "micro-batch for each row, and empty arrays on ranks that hold nothing "
              "of it"
            : "%.300s: metadata %s differs from that of another file; keep only the "
              "files of one step in the folder",
        path, key);
    return -1;
}

static inline int dump_is_one_of(const char *const *names, const char *name) {
    while (*names && strcmp(*names, name)) names++;
    return *names != NULL;
}

/* Whether the tensor is of the step: loss, norm, or a parameter's. */
static inline int dump_is_of_step(const char *name) {
    static const char *const of_parameters[] = {"local.", "grad.", "param.",
                                                "after.", "m.",    "v."};
    for (size_t i = 0; i < sizeof of_parameters / sizeof *of_parameters; i++)
        if (!strncmp(name, of_parameters[i], strlen(of_parameters[i]))) return 1;
    return !strcmp(name, "loss") || !strcmp(name, "norm");
}

/* Splits "3.ids" into micro-batch 3 and "ids". -1: not a tensor of a micro-batch, and also
   "03.ids", because dump_find looks for "3.ids". */
static inline long long dump_micro_of(const char *name, const char **what) {
    char own[32], *rest;
    long long micro = strtoll(name, &rest, 10);
    *what = rest + (*rest == '.');
    snprintf(own, sizeof own, "%lld.", micro);
    return micro < 0 || strncmp(name, own, strlen(own)) ? -1 : micro;
}

/* Refuses unknown names and micro-batches: tensors are optional, so that a misspelt one would
   pass for an absent one, and its check would be skipped. */
static inline int dump_names(dump *d, const seqpar_safetensors_file *file, const char *path) {
    static const char *const known[] = {"index",      "ids",        "positions",
                                        "labels",     "logits",     "loss_sum",
                                        "loss_count", "logp",       "ref_logp",
                                        "old_logp",   "values",     "scores",
                                        "rewards",    "groups",     "desirable",
                                        "kl",         "advantages", "q",
                                        "k",          "v",          "out",
                                        "lse",        "dout",       "dq",
                                        "dk",         "dv",         "cu_seqlens",
                                        "part_out",   "part_lse",   "margins",
                                        "returns",    "old_values", "token_rewards",
                                        "weights",    "mean_logp",  "logits_lse",
                                        "entropy",    "boundaries", NULL};
    for (int64_t i = 0; i < seqpar_safetensors_count(file); i++) {
        const char *name = seqpar_safetensors_at(file, i)->name;
        const char *what;
        long long micro = dump_micro_of(name, &what);
        int numbered = micro >= 0 && dump_is_one_of(known, what);
        if (numbered && micro < d->accumulation) continue;
        if (dump_is_of_step(name)) continue;
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    numbered
                        ? "%.300s: the micro-batch of tensor %.100s is not below metadata "
                          "accumulation, %lld; count micro-batches from 0, or write a "
                          "larger accumulation"
                        : "%.300s: the name of tensor %.100s is unknown; write loss, "
                          "norm, grad.NAME and others for the step, A.index, A.ids and "
                          "others for each micro-batch A below %lld: "
                          "help(seqpar_dump.Dump) or verify/oracle/dump/dump.h lists all names",
                    path, name, (long long)d->accumulation);
        return -1;
    }
    return 0;
}

/* Stores the file under its rank. 0: the dump owns the file; -1: the caller still does. */
static inline int dump_take(dump *d, seqpar_safetensors_file *file, const char *path) {
    int64_t rank;
    if (dump_agree(d, file, path)) return -1;
    if (!d->ranks) d->ranks = (dump_rank *)calloc((size_t)d->world, sizeof *d->ranks);
    if (!d->ranks) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a dump");
    rank = dump_whole(file, path, "rank", 0, 65535, -1, &d->error);
    if (!d->ranks || rank < 0 || dump_names(d, file, path) || dump_keys(file, path, &d->error))
        return -1;
    if (rank >= d->world || d->ranks[rank].file) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata rank is %lld and world %lld; %s", path, (long long)rank,
                    (long long)d->world,
                    rank >= d->world ? "write a rank below world"
                                     : "another file has this rank, so write each rank once");
        return -1;
    }
    snprintf(d->ranks[rank].path, sizeof d->ranks[rank].path, "%s", path);
    d->ranks[rank].file = file;
    return 0;
}

static inline int dump_open_file(dump *d, const char *folder, const char *name) {
    seqpar_safetensors_file *file = NULL;
    const char *version;
    char path[1024];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_OPEN, "%.300s/...: the path is too long",
                    folder);
        return -1;
    }
    if (seqpar_safetensors_open(&file, path, &d->error)) return -1;
    version = seqpar_safetensors_metadata(file, "seqpar_dump");
    if (!version || strcmp(version, "1"))
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata seqpar_dump is '%.40s', not '1'; remove the file if it "
                    "is no dump, or write it again with seqpar_dump.py of this version",
                    path, version ? version : "missing");
    else if (!dump_take(d, file, path))
        return 0;
    seqpar_safetensors_close(file);
    return -1;
}

static inline int is_safetensors(const char *name) {
    size_t length = strlen(name), ending = strlen(".safetensors");
    return length > ending && !strcmp(name + length - ending, ".safetensors");
}

/* Whether the folder has at least one file of a dump. */
static inline int folder_is_dump(const char *folder) {
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int found = 0;
    while (dir && !found && (entry = readdir(dir))) {
        seqpar_safetensors_file *file = NULL;
        seqpar_error ignored = {0};
        char path[1024];
        if (!is_safetensors(entry->d_name) ||
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) >= (int)sizeof path ||
            seqpar_safetensors_open(&file, path, &ignored))
            continue;
        found = seqpar_safetensors_metadata(file, "seqpar_dump") != NULL;
        seqpar_safetensors_close(file);
    }
    if (dir) closedir(dir);
    return found;
}

/* Writes the subfolders that are dumps to text: "d/got or d/want"; "": none. */
static inline void dumps_inside(const char *folder, char *text, size_t size) {
    struct dirent **list = NULL;
    int count = scandir(folder, &list, NULL, alphasort);
    *text = 0;
    for (int i = 0; i < count; i++) {
        size_t used = strlen(text);
        char path[1024];
        int fits = snprintf(path, sizeof path, "%s/%s", folder, list[i]->d_name) <
                   (int)sizeof path;
        if (fits && *list[i]->d_name != '.' && used + strlen(path) + 5 < size &&
            folder_is_dump(path))
            snprintf(text + used, size - used, "%s%s", used ? " or " : "", path);
        free(list[i]);
    }
    free(list);
}

/* Always -1, with d->error, whose message names the dumps in subfolders. */
static inline int dump_is_empty(dump *d, const char *folder) {
    char inside[400];
    dumps_inside(folder, inside, sizeof inside);
    seqpar_fail(&d->error, SEQPAR_ERR_FILE_OPEN,
                *inside ? "%.300s: no .safetensors file, but there are dumps inside; give %s"
                        : "%.300s: no .safetensors file%s",
                folder, inside);
    return -1;
}

/* 0, or -1 with d->error. To be closed in either case. */
static inline int dump_open(dump *d, const char *folder) {
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int status = 0;
    memset(d, 0, sizeof *d);
    if (!dir) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_OPEN,
                    "%.300s: cannot be opened as a folder; give the folder of the dump",
                    folder);
        return -1;
    }
    while (!status && (entry = readdir(dir)))
        if (is_safetensors(entry->d_name)) status = dump_open_file(d, folder, entry->d_name);
    closedir(dir);
    if (!status && !d->world) return dump_is_empty(d, folder);
    for (int64_t r = 0; !status && r < d->world; r++)
        if (!d->ranks[r].file) {
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_OPEN, "%.300s: no file of rank %lld of %lld",
                        folder, (long long)r, (long long)d->world);
            status = -1;
        }
    if (!status && d->world % d->sp) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: world %lld is not divisible by sp %lld", folder,
                    (long long)d->world, (long long)d->sp);
        status = -1;
    }
    return status;
}

/* ---- tensors ---- */

/* NULL: the file has none of this name. */
static inline const seqpar_safetensors_tensor *dump_find(const dump *d, int64_t rank,
                                                         int64_t micro, const char *what) {
    char name[64];
    snprintf(name, sizeof name, "%lld.%s", (long long)micro, what);
    return seqpar_safetensors_find(d->ranks[rank].file, name);
}

static inline int dump_wrong_dtype(dump *d, int64_t rank, const char *name, const char *wanted,
                                   seqpar_safetensors_dtype dtype) {
    seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT, "%.300s: tensor %s is %s; write %s",
                d->ranks[rank].path, name, seqpar_safetensors_dtype_name(dtype), wanted);
    return -1;
}

static inline int64_t dump_integer(const char *at, seqpar_safetensors_dtype dtype) {
    int64_t i64;
    int32_t i32;
    int16_t i16;
    if (dtype == SEQPAR_SAFETENSORS_I64) return memcpy(&i64, at, 8), i64;
    if (dtype == SEQPAR_SAFETENSORS_I32) return memcpy(&i32, at, 4), i32;
    if (dtype == SEQPAR_SAFETENSORS_I16) return memcpy(&i16, at, 2), i16;
    return dtype == SEQPAR_SAFETENSORS_I8 ? *(const signed char *)at
                                          : *(const unsigned char *)at;
}

/* Checks that a tensor is one row: (n), or (1, n). 0, or -1 with d->error. */
static inline int dump_check_row(dump *d, int64_t rank, const seqpar_safetensors_tensor *t) {
    for (int64_t i = 0; i + 1 < t->dims; i++)
        if (t->shape[i] != 1)
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %s has %lld rows; a micro-batch is one row, so write "
                        "several as micro-batches",
                        d->ranks[rank].path, t->name, (long long)t->shape[i]);
    return d->error.status ? -1 : 0;
}

/* All of a tensor, to be freed; NULL with d->error. */
static inline int64_t *dump_integers(dump *d, int64_t rank,
                                     const seqpar_safetensors_tensor *t) {
    seqpar_safetensors_part part = seqpar_safetensors_whole(t);
    int64_t bytes = seqpar_safetensors_dtype_bytes(t->dtype), i;
    int64_t *out = (int64_t *)malloc((size_t)(t->count + 1) * sizeof *out);
    char *raw = (char *)malloc((size_t)(t->bytes + 1));
    int known = t->dtype == SEQPAR_SAFETENSORS_I64 || t->dtype == SEQPAR_SAFETENSORS_I32 ||
                t->dtype == SEQPAR_SAFETENSORS_I16 || bytes == 1;
    dump_check_row(d, rank, t);
    if (!known) dump_wrong_dtype(d, rank, t->name, "I64 or I32", t->dtype);
    if (!out || !raw) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a dump");
    if (!d->error.status) seqpar_safetensors_read(d->ranks[rank].file, raw, &part, &d->error);
    for (i = 0; !d->error.status && i < t->count; i++)
        out[i] = dump_integer(raw + i * bytes, t->dtype);
    free(raw);
    if (!d->error.status) return out;
    free(out);
    return NULL;
}

static inline double *dump_doubles(dump *d, int64_t rank, const seqpar_safetensors_tensor *t) {
    seqpar_safetensors_part part = seqpar_safetensors_whole(t);
    double *out = (double *)malloc((size_t)(t->count + 1) * sizeof *out);
    if (!out) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a dump");
    if (out && !seqpar_safetensors_read_f64(d->ranks[rank].file, out, &part, &d->error))
        return out;
    free(out);
    return NULL;
}
#endif
