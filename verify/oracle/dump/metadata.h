/* SPDX-License-Identifier: MIT OR Unlicense */
/* metadata.h - what the metadata of a dump says: sizes, objective and optimizer, the same in
 * all of its files. */
#ifndef ORACLE_METADATA_H
#define ORACLE_METADATA_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "seqpar_safetensors.h"

enum { DUMP_SFT, DUMP_DPO, DUMP_RM, DUMP_KTO, DUMP_PPO, DUMP_VALUE, DUMP_OTHER, DUMP_GRPO };
enum { DUMP_BY_TOKEN, DUMP_BY_SEQUENCE, DUMP_BY_CONSTANT, DUMP_BY_MICRO, DUMP_BY_REPLICA };
enum {
    DUMP_ADVANTAGE_GIVEN,
    DUMP_ADVANTAGE_GROUP,
    DUMP_ADVANTAGE_GROUP_MEAN,
    DUMP_ADVANTAGE_RLOO,
    DUMP_ADVANTAGE_GAE
};
enum { DUMP_SIGMOID, DUMP_ROBUST, DUMP_HINGE, DUMP_IPO, DUMP_IPO_MEAN, DUMP_SIMPO };
enum { DUMP_RATIO_OF_TOKEN, DUMP_RATIO_OF_SEQUENCE };
enum { DUMP_NO_OPTIMIZER, DUMP_ADAMW, DUMP_SGD };
enum { DUMP_DTYPE_OF_TENSORS, DUMP_F64, DUMP_F32, DUMP_TF32, DUMP_F16, DUMP_BF16 };

/* All fields have 8 bytes, because dump_facts_differ compares them as bytes. */
typedef struct dump_facts {
    int64_t world, sp, accumulation;
    int64_t objective, reduction, advantage, optimizer, dtype; /* DUMP_... */
    int64_t loss_type, importance, kl_ratio, on_policy, grpo;  /* grpo 1: the dump says grpo */
    int64_t step; /* of the optimizer; 1: the first */
    double beta;
    double desirable_weight, undesirable_weight; /* of KTO */
    double reduction_constant, label_smoothing, simpo_gamma, center;
    double gamma, gae_lambda, clip_value; /* of GAE and values */
    double clip_low, clip_high, kl_coef, advantage_eps, dual_clip, cispo; /* of PPO */
    double z_loss, entropy_coef;
    double lr, beta1, beta2, eps, weight_decay, max_norm;
    int64_t window;                /* 0: none */
    double softmax_scale, softcap; /* 0 means 1 / sqrt(head_dim); 0 means no softcap */
} dump_facts;

static const struct {
    const char *key;
    size_t at;
    int64_t low, high, absent; /* absent: the default; -1: the key is required */
} whole_facts[] = {{"world", offsetof(dump_facts, world), 1, 65536, -1},
                   {"sp", offsetof(dump_facts, sp), 1, 65536, 1},
                   {"accumulation", offsetof(dump_facts, accumulation), 1, 65536, 1},
                   {"step", offsetof(dump_facts, step), 1, 1000000000, 1},
                   {"window", offsetof(dump_facts, window), 0, 1000000000, 0}};

enum { FACT_OBJECTIVE, FACT_REDUCTION, FACT_ADVANTAGE, FACT_LOSS, FACT_RATIO, FACT_OPTIMIZER };
static const struct {
    const char *key;
    size_t at;
    const char *words[9]; /* the first is the default */
} word_facts[] = {{"objective",
                   offsetof(dump_facts, objective),
                   {"sft", "dpo", "rm", "kto", "ppo", "value", "other", "grpo"}},
                  {"reduction",
                   offsetof(dump_facts, reduction),
                   {"token", "sequence", "constant", "micro", "replica"}},
                  {"advantage",
                   offsetof(dump_facts, advantage),
                   {"given", "group", "group_mean", "rloo", "gae"}},
                  {"loss_type",
                   offsetof(dump_facts, loss_type),
                   {"sigmoid", "robust", "hinge", "ipo", "ipo_mean", "simpo"}},
                  {"importance", offsetof(dump_facts, importance), {"token", "sequence"}},
                  {"optimizer", offsetof(dump_facts, optimizer), {"none", "adamw", "sgd"}},
                  {"dtype",
                   offsetof(dump_facts, dtype),
                   {"tensors", "float64", "float32", "tf32", "float16", "bfloat16"}},
                  {"kl_ratio", offsetof(dump_facts, kl_ratio), {"none", "token"}},
                  {"on_policy", offsetof(dump_facts, on_policy), {"no", "yes"}}};

static const struct {
    const char *key;
    size_t at;
    double low, high, absent;
} number_facts[] = {
    {"beta", offsetof(dump_facts, beta), 1e-30, 1e6, 0.1},
    {"reduction_constant", offsetof(dump_facts, reduction_constant), 0, 1e15, 0},
    {"label_smoothing", offsetof(dump_facts, label_smoothing), 0, 0.499, 0},
    {"desirable_weight", offsetof(dump_facts, desirable_weight), 0, 1e6, 1},
    {"undesirable_weight", offsetof(dump_facts, undesirable_weight), 0, 1e6, 1},
    {"simpo_gamma", offsetof(dump_facts, simpo_gamma), 0, 1e6, 0.5},
    {"center", offsetof(dump_facts, center), 0, 1e6, 0},
    {"gamma", offsetof(dump_facts, gamma), 0, 1, 1},
    {"gae_lambda", offsetof(dump_facts, gae_lambda), 0, 1, 1},
    {"clip_value", offsetof(dump_facts, clip_value), 0, 1e30, 0},
    {"clip_low", offsetof(dump_facts, clip_low), 0, 1e6, 0.2},
    {"clip_high", offsetof(dump_facts, clip_high), 0, 1e6, 0.2},
    {"kl_coef", offsetof(dump_facts, kl_coef), 0, 1e6, 0},
    {"z_loss", offsetof(dump_facts, z_loss), 0, 1e6, 0},
    {"entropy_coef", offsetof(dump_facts, entropy_coef), 0, 1e6, 0},
    {"dual_clip", offsetof(dump_facts, dual_clip), 0, 1e6, 0},
    {"cispo", offsetof(dump_facts, cispo), 0, 1e6, 0},
    {"advantage_eps", offsetof(dump_facts, advantage_eps), 0, 1, 1e-4},
    {"lr", offsetof(dump_facts, lr), 0, 1e6, 0},
    {"beta1", offsetof(dump_facts, beta1), 0, 0.999999999, 0.9},
    {"beta2", offsetof(dump_facts, beta2), 0, 0.999999999, 0.999},
    {"eps", offsetof(dump_facts, eps), 0, 1, 1e-8},
    {"weight_decay", offsetof(dump_facts, weight_decay), 0, 1e6, 0},
    {"max_norm", offsetof(dump_facts, max_norm), 0, 1e30, 0},
    {"softmax_scale", offsetof(dump_facts, softmax_scale), 0, 1e6, 0},
    {"softcap", offsetof(dump_facts, softcap), 0, 1e30, 0}};
enum {
    WHOLE_FACTS = sizeof whole_facts / sizeof *whole_facts,
    WORD_FACTS = sizeof word_facts / sizeof *word_facts,
    NUMBER_FACTS = sizeof number_facts / sizeof *number_facts
};

/* Whether the number of this key is what it is where the metadata does not have it. */
static inline int dump_number_is_absent(const dump_facts *f, const char *key) {
    int i = 0;
    while (strcmp(number_facts[i].key, key)) i++;
    return *(const double *)((const char *)f + number_facts[i].at) == number_facts[i].absent;
}

/* An integer of the metadata, or -1 with the error set. absent: see whole_facts. */
static inline int64_t dump_whole(const seqpar_safetensors_file *file, const char *path,
                                 const char *key, int64_t low, int64_t high, int64_t absent,
                                 seqpar_error *error) {
    const char *text = seqpar_safetensors_metadata(file, key);
    char *end;
    long long x;
    if (!text && absent >= 0) return absent;
    x = text ? strtoll(text, &end, 10) : -1;
    if (text && end != text && !*end && x >= low && x <= high) return x;
    seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: metadata %s is '%.40s'; write a whole number from %lld to %lld", path,
                key, text ? text : "missing", (long long)low, (long long)high);
    return -1;
}

static inline int64_t dump_word(const char *const *words, const char *text) {
    int64_t i = 0;
    while (text && words[i] && strcmp(words[i], text)) i++;
    return words[i] ? i : -1;
}

static inline int dump_unknown_word(const char *const *words, const char *path, const char *key,
                                    const char *text, seqpar_error *error) {
    char list[120] = "";
    for (int i = 0; words[i]; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s",
                 !i             ? ""
                 : words[i + 1] ? ", "
                                : " or ",
                 words[i]);
    seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT, "%.300s: metadata %s is '%.40s'; write %s", path,
                key, text, list);
    return -1;
}

static inline double dump_real(const char *text, double low, double high, double absent) {
    char *end = NULL;
    double x = text ? strtod(text, &end) : absent;
    return text && (end == text || *end || !(x >= low && x <= high)) ? NAN : x;
}

/* Reads number i of number_facts from the key, which may be that of one parameter. 0, or -1 with
   the error set. */
static inline int dump_read_number(const seqpar_safetensors_file *file, const char *path, int i,
                                   const char *key, double *to, seqpar_error *error) {
    const char *text = seqpar_safetensors_metadata(file, key);
    *to = dump_real(text, number_facts[i].low, number_facts[i].high, number_facts[i].absent);
    if (!isnan(*to)) return 0;
    seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: metadata %.200s is '%.40s'; write a number from %.10g to %.10g", path,
                key, text, number_facts[i].low, number_facts[i].high);
    return -1;
}

/* CISPO allows no dual_clip. CISPO and kl_ratio allow no ratio of a document. on_policy is PPO's
   alone. 0, or -1 with the error set. */
static inline int dump_facts_disagree(const dump_facts *f, const char *path,
                                      seqpar_error *error) {
    if (f->on_policy && f->objective != DUMP_PPO) {
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata on_policy is 'yes' and objective %s, which has no "
                    "old_logp; leave on_policy out",
                    path, word_facts[FACT_OBJECTIVE].words[f->objective]);
        return -1;
    }
    if (f->kl_ratio && f->importance == DUMP_RATIO_OF_SEQUENCE) {
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata kl_ratio is 'token' and importance is 'sequence', but a "
                    "KL term times a document's ratio is not computed; leave one of them out",
                    path);
        return -1;
    }
    if (!(f->cispo > 0) || (f->dual_clip == 0 && f->importance == DUMP_RATIO_OF_TOKEN))
        return 0;
    seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                f->dual_clip > 0
                    ? "%.300s: metadata cispo is %g and dual_clip is %g, two clips of one "
                      "ratio; write one of them"
                    : "%.300s: metadata cispo is %g and importance is 'sequence', but CISPO's "
                      "ratio is a token's; leave one of them out",
                path, f->cispo, f->dual_clip);
    return -1;
}

/* reduction constant requires reduction_constant. 0, or -1 with the error set. */
static inline int dump_facts_lack(const dump_facts *f, const char *path, seqpar_error *error) {
    if (dump_facts_disagree(f, path, error)) return -1;
    if (f->reduction != DUMP_BY_CONSTANT || f->reduction_constant > 0) return 0;
    seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: metadata reduction is 'constant' and reduction_constant is %g; write "
                "the divisor of the sum over the whole step, a number above 0",
                path, f->reduction_constant);
    return -1;
}

/* Objective grpo is ppo, with the advantages and the mean of GRPO's paper (arXiv 2402.03300)
   where the metadata does not say others. */
static inline void dump_facts_of_grpo(const seqpar_safetensors_file *file, dump_facts *f) {
    if (f->objective != DUMP_GRPO) return;
    f->objective = DUMP_PPO;
    f->grpo = 1;
    if (!seqpar_safetensors_metadata(file, "advantage")) f->advantage = DUMP_ADVANTAGE_GROUP;
    if (!seqpar_safetensors_metadata(file, "reduction")) f->reduction = DUMP_BY_SEQUENCE;
}

/* Reads all keys of the three tables; an absent key gets its default. 0, or -1 with the error
   set. */
static inline int dump_read_facts(const seqpar_safetensors_file *file, const char *path,
                                  dump_facts *facts, seqpar_error *error) {
    char *to = (char *)memset(facts, 0, sizeof *facts);
    for (int i = 0; i < WHOLE_FACTS; i++) {
        int64_t x = dump_whole(file, path, whole_facts[i].key, whole_facts[i].low,
                               whole_facts[i].high, whole_facts[i].absent, error);
        if (x < 0) return -1;
        memcpy(to + whole_facts[i].at, &x, sizeof x);
    }
    for (int i = 0; i < WORD_FACTS; i++) {
        const char *text = seqpar_safetensors_metadata(file, word_facts[i].key);
        int64_t x = dump_word(word_facts[i].words, text ? text : word_facts[i].words[0]);
        if (x < 0)
            return dump_unknown_word(word_facts[i].words, path, word_facts[i].key, text, error);
        memcpy(to + word_facts[i].at, &x, sizeof x);
    }
    for (int i = 0; i < NUMBER_FACTS; i++) {
        double x;
        if (dump_read_number(file, path, i, number_facts[i].key, &x, error)) return -1;
        memcpy(to + number_facts[i].at, &x, sizeof x);
    }
    dump_facts_of_grpo(file, facts);
    return dump_facts_lack(facts, path, error);
}

/* Whether the key is in a table above, of one tensor or parameter, a note, or safetensors' own
   `format`. */
static inline int dump_key_is_known(const char *key) {
    static const char *const others[] = {"seqpar_dump", "rank", "format", "note"};
    static const char *const prefixes[] = {"part.", "lr.", "weight_decay.", "note."};
    for (int i = 0; i < 4; i++)
        if (!strcmp(key, others[i]) || !strncmp(key, prefixes[i], strlen(prefixes[i])))
            return 1;
    for (int i = 0; i < WHOLE_FACTS; i++)
        if (!strcmp(key, whole_facts[i].key)) return 1;
    for (int i = 0; i < WORD_FACTS; i++)
        if (!strcmp(key, word_facts[i].key)) return 1;
    for (int i = 0; i < NUMBER_FACTS; i++)
        if (!strcmp(key, number_facts[i].key)) return 1;
    return 0;
}

/* Refuses unknown keys: a misspelt one would pass for an absent one. 0, or -1 with the error
   set. */
static inline int dump_keys(const seqpar_safetensors_file *file, const char *path,
                            seqpar_error *error) {
    for (int64_t i = 0; i < seqpar_safetensors_metadata_count(file); i++) {
        const char *key = seqpar_safetensors_metadata_at(file, i)->key;
        if (dump_key_is_known(key)) continue;
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata key '%.100s' is unknown; write one that "
                    "help(seqpar_dump.Dump) or verify/oracle/dump/dump.h lists, or note.%.100s "
                    "for a note of your own",
                    path, key, key);
        return -1;
    }
    return 0;
}

/* The first key whose value differs between two files; NULL: none. */
static inline const char *dump_facts_differ(const dump_facts *a, const dump_facts *b) {
    const char *one = (const char *)a, *two = (const char *)b;
    for (int i = 0; i < WHOLE_FACTS; i++)
        if (memcmp(one + whole_facts[i].at, two + whole_facts[i].at, 8))
            return whole_facts[i].key;
    for (int i = 0; i < WORD_FACTS; i++)
        if (memcmp(one + word_facts[i].at, two + word_facts[i].at, 8)) return word_facts[i].key;
    for (int i = 0; i < NUMBER_FACTS; i++)
        if (memcmp(one + number_facts[i].at, two + number_facts[i].at, 8))
            return number_facts[i].key;
    return NULL;
}
#endif
