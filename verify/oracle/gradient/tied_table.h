/* SPDX-License-Identifier: MIT OR Unlicense */
/* tied_table.h - names a table that is embedding and head at once, and whose two gradients were
 * not added: the dump has them as two tensors, the wanted step has their sum. */
#ifndef ORACLE_TIED_TABLE_H
#define ORACLE_TIED_TABLE_H
#include "gradient_pairs.h"

static inline int is_in_no_file(const dump *d, const char *name) {
    for (int64_t r = 0; r < d->world; r++)
        if (seqpar_safetensors_find(d->ranks[r].file, name)) return 0;
    return 1;
}

/* A wrong gradient, while another tensor is looked for that added to it gives the wanted one. */
typedef struct tied_search {
    gradient_check *c;
    const char *name;
    whole got, wanted;
    int found;
} tied_search;

/* Tries the sum of s->got and one tensor that only the dump has. 0, or -1 with d->error. */
static inline int try_tied(void *user, const char *parameter) {
    tied_search *s = (tied_search *)user;
    gradient_check *c = s->c;
    tensor_name name;
    whole other;
    likeness like = {0};
    if (s->found || !is_in_no_file(c->want, tensor_of(&name, "grad.", parameter))) return 0;
    if (whole_read(c->d, name.text, 0, c->d->world, &other)) return -1;
    if (other.count == s->wanted.count)
        for (int64_t i = 0; i < other.count; i++) {
            double sum = s->got.values[i] + other.values[i];
            liken(&like, &sum, &s->wanted.values[i], 1);
        }
    if (like.want_want > 0 && distance_from(&like, 1) <= c->tolerance) {
        s->found = 1;
        verdict_name(&c->s->v, mistake_named("tables_untied"));
        verdict_say(&c->s->v, "%.80s and %.80s together are the wanted %.80s", s->name,
                    name.text, s->name);
    }
    whole_free(&other);
    return 0;
}

/* After a wrong verdict that no factor explains. 0, or -1 with the error of one of the dumps. */
static inline int name_tied_table(gradient_check *c) {
    int status = 0;
    for (int64_t i = 0; i < c->n && !status; i++) {
        tied_search s = {.c = c, .name = c->each[i].name};
        if (distance_from(&c->each[i].like, 1) <= c->tolerance) continue;
        s.wanted = (whole){.copy = -1};
        status = whole_read(c->d, s.name, 0, c->d->world, &s.got) ||
                 whole_read(c->want, s.name, 0, c->want->world, &s.wanted) ||
                 each_parameter(c->d, "grad.", try_tied, &s);
        whole_free(&s.got);
        whole_free(&s.wanted);
    }
    return status ? -1 : 0;
}
#endif
