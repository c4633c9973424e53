/* SPDX-License-Identifier: MIT OR Unlicense */
/* keys.h - turns the keys of a yaml file into options of a trainer. Every key is looked up in
 * options.tsv, under its name in the program that the file is for. As in both programs, words
 * after the file on the command line override keys of the file. */
#ifndef PROGRAM_KEYS_H
#define PROGRAM_KEYS_H

#include "yaml.h"

typedef struct {
    const char *name;
    program_node value;
    int line; /* 0: the key is on the command line, after the file */
} program_key;

typedef struct {
    program *p;
    const char *path;
    program_key *keys; /* stb_ds array */
} program_keys;

/* Sets the error message, which begins with the line of the key. Returns -1. */
__attribute__((format(printf, 3, 4))) static int program_key_wrong(const program_keys *k,
                                                                   const program_key *key,
                                                                   const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (key->line)
        demo_fail(k->p->error, "%.300s:%d: ", k->path, key->line);
    else
        demo_fail(k->p->error, "behind %.300s: ", k->path);
    demo_fail_more(k->p->error, format, arguments);
    va_end(arguments);
    return -1;
}

static program_key *program_key_find(const program_keys *k, const char *name) {
    for (int64_t i = 0; i < arrlen(k->keys); i++)
        if (demo_same_name(k->keys[i].name, name)) return &k->keys[i];
    return NULL;
}

/* Removes a key from the list, so that later functions do not see it. Returns false if the key
   is missing or null. */
static bool program_key_take(program_keys *k, const char *name, program_key *taken) {
    program_key *key = program_key_find(k, name);
    if (!key) return false;
    *taken = *key;
    arrdel(k->keys, key - k->keys);
    return !program_is_null(&taken->value);
}

static int program_keys_read(program_keys *k) {
    program_node root;
    if (program_yaml_read(k->p, k->path, &root)) return -1;
    for (int64_t i = 0; i < arrlen(root.items); i += 2) {
        program_key key = {root.items[i].text, root.items[i + 1], root.items[i].line};
        arrput(k->keys, key);
    }
    return 0;
}

/* ---- words after the file on the command line ---- */

static void program_key_override(program_keys *k, const char *name, const char *text) {
    program_key key = {name, {PROGRAM_VALUE, 0, true, program_text("%s", text), NULL}, 0};
    program_key *there = program_key_find(k, name);
    if (there)
        *there = key;
    else
        arrput(k->keys, key);
}

/* LLaMA-Factory accepts only key=value. */
static int program_keys_equals(program_keys *k, char **words, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const char *equals = strchr(words[i], '=');
        int length = equals ? (int)(equals - words[i]) : 0;
        if (!length || words[i][0] == '-')
            return demo_fail(k->p->error,
                             "%.200s follows %.300s, where LLaMA-Factory takes key=value; "
                             "write it so, as in learning_rate=1e-5",
                             words[i], k->path);
        program_key_override(k, program_text("%.*s", length, words[i]), equals + 1);
    }
    return 0;
}

/* axolotl accepts --key value and --key=value. */
static int program_keys_dashes(program_keys *k, char **words, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const char *word = words[i], *equals = strchr(word, '=');
        if (strncmp(word, "--", 2) || !word[2])
            return demo_fail(k->p->error,
                             "%.200s follows %.300s, where axolotl takes --key value; write "
                             "it so, as in --learning_rate 1e-5",
                             word, k->path);
        bool follows = !equals && i + 1 < count && strncmp(words[i + 1], "--", 2);
        char *name = program_text("%.*s", (int)strcspn(word + 2, "="), word + 2);
        program_key_override(k, name, equals ? equals + 1 : follows ? words[++i] : "true");
    }
    return 0;
}

/* ---- a key as an option ---- */

/* Options whose value may be a list: data sets, lists of words, and options that have no effect
   or are refused. */
static bool program_takes_list(const demo_known *known) {
    static const char *const lists[] = {"dataset", "eval_dataset", "dataset_probs"};
    const demo_known *target = demo_known_target(known);
    for (int i = 0; i < 3; i++)
        if (!strcmp(target->name, lists[i])) return true;
    return !strcmp(target->kind, "strings") || strcmp(target->role, "real") != 0;
}

/* The key's value as text for the command line; NULL with a message. */
static char *program_key_value(const program_keys *k, const program_key *key,
                               const demo_known *known) {
    const program_node *value = &key->value;
    static const char *const shapes[] = {"a value", "a list", "a map"};
    bool idle = strcmp(demo_known_target(known)->role, "real") != 0;
    char *text = value->shape == PROGRAM_VALUE || program_takes_list(known)
                     ? program_joined(value)
                     : NULL;
    if (!text && value->shape == PROGRAM_MAP && idle)
        text = program_text(arrlen(value->items) ? "{...}" : "{}");
    if (!text)
        program_key_wrong(k, key,
                          "%.100s is %s, but must be a single value; write %.100s: "
                          "value",
                          key->name, shapes[value->shape], key->name);
    else if (value->shape == PROGRAM_VALUE && program_is_octal(value))
        program_key_wrong(k, key,
                          "%.100s is %.60s, which YAML reads as an octal number; leave out "
                          "its leading zeros",
                          key->name, text);
    else
        return text;
    return NULL;
}

/* Makes the checks that the trainer will make, so that the error can name the line. */
static int program_option_check(program *p, const demo_known *known, const char *text) {
    static demo_options options;
    double scratch[2];
    const demo_known *target = demo_known_target(known);
    options.tool = p->tool;
    options.error = p->error;
    options.pool_used = 0;
    if (!demo_list_has(known->tools, p->tool)) return demo_options_elsewhere(&options, known);
    if (demo_store(&options, scratch, known, text, (demo_range)DEMO_ANY)) return -1;
    return demo_is_role(target, "refused") ? demo_options_undone(&options, known, target, text)
                                           : 0;
}

static int program_key_unknown(const program_keys *k, const program_key *key) {
    const demo_known *nearest = demo_known_nearest(key->name, k->p->tool);
    return program_key_wrong(k, key,
                             "%.100s is an unknown key%s%s; seqpar --help %s lists all keys",
                             key->name, nearest ? ", perhaps you mean " : "",
                             nearest ? nearest->name : "", demo_from_name[k->p->from]);
}

/* Adds an option of the trainer and records the line that it comes from. */
static void program_said(program *p, const char *name, const char *text,
                         const program_origin *origin) {
    program_origin place = {name, origin->path, origin->line};
    arrput(p->options, program_text("--%s=%s", name, text));
    arrput(p->origins, place);
}

/* Is it an option that seqpar itself reads and does not pass to the trainer? */
static bool program_is_own(const char *name) {
    return demo_same_name(name, "deepspeed") || demo_same_name(name, "dataset_dir");
}

static int program_key_option(program_keys *k, const program_key *key) {
    const demo_known *known = demo_known_find(key->name);
    const program_origin origin = {key->name, k->path, key->line};
    if (!known) return program_key_unknown(k, key);
    if (program_is_null(&key->value)) return 0;
    char *text = program_key_value(k, key, known);
    if (!text) return -1;
    program_said(k->p, known->name, text, &origin);
    if (program_is_own(known->name) || !program_option_check(k->p, known, text)) return 0;
    program_error_placed(k->p);
    (void)arrpop(k->p->options);
    return -1;
}

/* Joins adam_beta1 and adam_beta2 into the one option adam_betas. */
static void program_betas(program_keys *k) {
    program_key one = {0}, two = {0};
    bool has_one = program_key_take(k, "adam_beta1", &one),
         has_two = program_key_take(k, "adam_beta2", &two);
    if (!has_one && !has_two) return;
    program_key both = has_two ? two : one;
    const char *a = has_one ? one.value.text : "0.9", *b = has_two ? two.value.text : "0.999";
    both.name = "adam_betas";
    both.value = (program_node){.shape = PROGRAM_VALUE, .line = both.line};
    both.value.text = program_text("%s,%s", a ? a : "a list", b ? b : "a list");
    arrput(k->keys, both);
}

/* Turns all remaining keys into options. */
static void program_keys_options(program_keys *k) {
    for (int64_t i = 0; i < arrlen(k->keys); i++)
        if (program_key_option(k, &k->keys[i])) program_complain(k->p, k->keys[i].name);
}

#endif
