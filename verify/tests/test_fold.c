/* SPDX-License-Identifier: MIT OR Unlicense */
/* The fold: whoever pushes what when, the value has the bits of one recursive sum over the
   leaves that exist. */
#include "support/counted.h"
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_COUNT_WORK
#include "seqpar.h"
#include "support/test.h"
#include <unistd.h>

#define LEAVES  200
#define PARTIES 8

/* ---- a stack machine on doubles that trusts nobody ---- */

typedef struct machine {
    double stack[LEAVES + 4], store[LEAVES + 4], result;
    int64_t depth, deepest, slots; /* now, most ever, one above the highest place written */
    int finished;
} machine;

static machine *machine_new(void) {
    machine *m = calloc(1, sizeof *m);
    int64_t i;
    for (i = 0; i < LEAVES + 4; i++) m->store[i] = m->stack[i] = NAN;
    return m;
}

static void machine_push(machine *m, double value) {
    if (!test_expect(m->depth < LEAVES + 4, "the stack runs over")) return;
    m->stack[m->depth++] = value;
    if (m->depth > m->deepest) m->deepest = m->depth;
}

static double machine_pop(machine *m) {
    double value;
    if (!test_expect(m->depth > 0, "a pop from an empty stack")) return NAN;
    value = m->stack[--m->depth];
    m->stack[m->depth] = NAN;
    return value;
}

static void machine_step(machine *m, seqpar_fold_op op, const double *operands) {
    double value;
    switch (op.op) {
    case SEQPAR_FOLD_LEAF: machine_push(m, operands[op.index]); break;
    /* a value is used once */
    case SEQPAR_FOLD_LOAD:
        machine_push(m, m->store[op.index]);
        m->store[op.index] = NAN;
        break;
    case SEQPAR_FOLD_COMBINE:
        value = machine_pop(m);
        machine_push(m, machine_pop(m) + value);
        break;
    case SEQPAR_FOLD_STORE:
        test_expect(!(m->store[op.index] == m->store[op.index]),
                    "place %d is overwritten while it is in use", (int)op.index);
        if (op.index >= m->slots) m->slots = op.index + 1;
        m->store[op.index] = machine_pop(m);
        break;
    case SEQPAR_FOLD_FINISH:
        m->result = machine_pop(m);
        m->finished++;
        break;
    default: test_expect(0, "unknown operation %d", (int)op.op);
    }
}

/* Ends the program of a fold and runs it; afterwards nothing is left on the stack. */
static void machine_flush(machine *m, seqpar_fold *fold, const double *operands) {
    int64_t i;
    test_expect(!seqpar_fold_flush(fold), "flush");
    for (i = 0; i < fold->program_count; i++) machine_step(m, fold->program[i], operands);
    fold->program_count = 0;
    test_expect(m->depth == 0, "%lld values are left on the stack", (long long)m->depth);
    test_expect(m->deepest <= fold->depth_high, "%lld stack places are used, %lld are named",
                (long long)m->deepest, (long long)fold->depth_high);
    test_expect(m->slots <= fold->slots_high, "%lld store places are used, %lld are named",
                (long long)m->slots, (long long)fold->slots_high);
    test_expect(m->finished == (fold->done != 0), "finished %d times, done is %d", m->finished,
                fold->done);
}

/* ---- leaves and the naive sum ---- */

typedef struct orchard {
    int64_t count, leaf[LEAVES];
    double value[LEAVES];
} orchard;

/* another order is another sum */
static double rough(void) { return ldexp(test_normal(), (int)test_integer(-30, 30)); }

static void orchard_values(orchard *o) {
    int64_t i;
    for (i = 0; i < o->count; i++) o->value[i] = rough();
}

static orchard orchard_new(int64_t count, int bits, int dense) {
    orchard o = {.count = count};
    int64_t i, at = dense ? test_integer(0, 5) : 0;
    int64_t most = ((INT64_C(1) << bits) - 1) / (count ? count : 1);
    for (i = 0; i < count; i++) {
        at += dense ? 1 : test_integer(1, most > 1 ? most : 1);
        o.leaf[i] = at - 1;
    }
    orchard_values(&o);
    return o;
}

/* The sum of the leaves under node (level, index); *any tells whether there is one. No node
   is skipped, no sum reused. */
static double naive_node(const orchard *o, int64_t first, int64_t last, int64_t level,
                         int64_t index, int *any) {
    int64_t middle = first, half;
    int left, right;
    double a, b;
    *any = first < last;
    if (!*any) return 0;
    if (level == 0) return o->value[first];
    half = (2 * index + 1) << (level - 1);
    while (middle < last && o->leaf[middle] < half) middle++;
    a = naive_node(o, first, middle, level - 1, 2 * index, &left);
    b = naive_node(o, middle, last, level - 1, 2 * index + 1, &right);
    return left && right ? a + b : left ? a : b;
}

static double naive_sum(const orchard *o) {
    int any;
    return naive_node(o, 0, o->count, 41, 0, &any);
}

static int same_bits(double a, double b) { return !memcmp(&a, &b, sizeof a); }

static void shuffle(int64_t *order, int64_t count) {
    int64_t i, j, t;
    for (i = 0; i < count; i++) order[i] = i;
    for (i = count - 1; i > 0; i--) {
        j = test_integer(0, i);
        t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

static int by_number(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static void push_leaf(seqpar_fold *fold, const orchard *o, int64_t i) {
    test_expect(
        !seqpar_fold_push(fold, (seqpar_node){0, o->leaf[i]}, SEQPAR_FOLD_LEAF, (int32_t)i),
        "push");
}

/* ---- one party: any order, grouped in any number of programs; within a program leaves rise ---- */

static void fold_in_groups(const orchard *o, int64_t most_in_a_group) {
    machine *m = machine_new();
    seqpar_fold fold;
    int64_t order[LEAVES], at, n, i, pushed = 0;
    shuffle(order, o->count);
    seqpar_fold_init(&fold, o->leaf, o->count);
    for (at = 0; at < o->count; at += n) {
        n = test_integer(1, most_in_a_group);
        n = n < o->count - at ? n : o->count - at;
        qsort(order + at, (size_t)n, sizeof *order, by_number);
        for (i = at; i < at + n; i++, pushed++) {
            test_expect(!fold.done, "done after %lld of %lld leaves", (long long)pushed,
                        (long long)o->count);
            push_leaf(&fold, o, order[i]);
        }
        machine_flush(m, &fold, o->value);
    }
    test_expect(fold.done == (o->count > 0) && fold.pending_count == 0,
                "not done after all leaves");
    test_expect(o->count == 0 || same_bits(m->result, naive_sum(o)),
                "the sum is %.17g, not %.17g", m->result, naive_sum(o));
    seqpar_fold_free(&fold);
    free(m);
}

static void test_orders(void) {
    static const int bits[] = {8, 12, 20, 40};
    int64_t b, n;
    for (b = 0; b < 5; b++) {
        for (n = 0; n < 120; n++) {
            int64_t count = n < 20 ? n : test_integer(1, LEAVES);
            orchard o = orchard_new(count, b ? bits[b - 1] : 8, b == 0);
            fold_in_groups(&o, n % 3 ? test_integer(1, count + 1) : 1);
        }
        if (b)
            test_end("fold_any_order_leaves_to_2^%d", bits[b - 1]);
        else
            test_end("fold_any_order_dense_leaves");
    }
}

/* The test itself would notice another order: most orders give other bits. */
static void test_sensitive(void) {
    int64_t n, i, other = 0;
    for (n = 0; n < 50; n++) {
        orchard o = orchard_new(97, 20, 0);
        double sum = 0;
        for (i = 0; i < o.count; i++) sum += o.value[i];
        other += !same_bits(sum, naive_sum(&o));
    }
    test_expect(other > 25, "only %lld of 50 sums tell one order from another",
                (long long)other);
    test_end("fold_values_tell_orders_apart");
}

/* An absent leaf is skipped, not added as 0: -0 stays -0, and NaN stays where it is. */
static void test_absent_shards(void) {
    orchard o = {.count = 1, .leaf = {INT64_C(1) << 39}, .value = {-0.0}};
    fold_in_groups(&o, 1);
    o = (orchard){.count = 2, .leaf = {3, 70}, .value = {-0.0, -0.0}};
    fold_in_groups(&o, 1);
    test_end("fold_absent_leaves_are_skipped");
}

/* Pushed in rising order, no more values wait than the tree has levels. */
static void test_bounds(void) {
    static const int64_t counts[] = {1, 2, 3, 5, 31, 64, 97, 127, 200};
    size_t c;
    int64_t i, levels;
    for (c = 0; c < sizeof counts / sizeof *counts; c++) {
        orchard o = orchard_new(counts[c], 40, c % 2);
        machine *m = machine_new();
        seqpar_fold fold;
        for (levels = 0; INT64_C(1) << levels < counts[c] + 6; levels++) {
        }
        if (!(c % 2)) levels = counts[c] < 41 ? counts[c] : 41;
        seqpar_fold_init(&fold, o.leaf, o.count);
        for (i = 0; i < o.count; i++) {
            push_leaf(&fold, &o, i);
            test_expect(fold.pending_count <= levels, "%lld values wait after %lld leaves",
                        (long long)fold.pending_count, (long long)i + 1);
            if (i % 3 == 2) machine_flush(m, &fold, o.value);
        }
        machine_flush(m, &fold, o.value);
        test_expect(fold.slots_high <= levels && fold.depth_high <= levels + 2,
                    "%lld places and %lld deep for %lld levels", (long long)fold.slots_high,
                    (long long)fold.depth_high, (long long)levels);
        test_expect(same_bits(m->result, naive_sum(&o)), "the sum differs");
        seqpar_fold_free(&fold);
        free(m);
    }
    test_end("fold_bounds_in_rising_order");
}

/* ---- the same programs as those of a fold that looks through everything at every step ---- */

typedef struct plain_fold {
    const orchard *o;
    seqpar_node node[LEAVES];                 /* values that wait, */
    int64_t at[LEAVES], count, depth, places; /* on the stack (-1 - depth) or in a place */
    seqpar_fold_op op[8 * LEAVES];
    int64_t ops;
} plain_fold;

static int64_t leaves_under(const orchard *o, seqpar_node n) {
    int64_t i, count = 0;
    for (i = 0; i < o->count; i++) count += o->leaf[i] >> n.level == n.index;
    return count;
}

static void plain_op(plain_fold *f, int op, int64_t index) {
    f->op[f->ops++] = (seqpar_fold_op){op, (int32_t)index};
}

static void plain_push(plain_fold *f, seqpar_node node, int64_t operand) {
    int64_t i;
    plain_op(f, SEQPAR_FOLD_LEAF, operand);
    for (f->depth++; leaves_under(f->o, node) < f->o->count; node.level++, node.index /= 2) {
        seqpar_node sibling = {node.level, node.index ^ 1};
        if (!leaves_under(f->o, sibling)) continue;
        for (i = 0; i < f->count &&
                    (f->node[i].level != sibling.level || f->node[i].index != sibling.index);
             i++) {
        }
        if (i == f->count) {
            f->node[f->count] = node;
            f->at[f->count++] = -f->depth;
            return;
        }
        if (f->at[i] >= 0)
            plain_op(f, SEQPAR_FOLD_LOAD, f->at[i]);
        else
            f->depth--;
        f->node[i] = f->node[--f->count];
        f->at[i] = f->at[f->count];
        plain_op(f, SEQPAR_FOLD_COMBINE, 0);
    }
    f->depth = 0;
    plain_op(f, SEQPAR_FOLD_FINISH, 0);
}

static void plain_flush(plain_fold *f) {
    int64_t i, k, place;
    for (; f->depth > 0; f->depth--)
        for (i = 0; i < f->count; i++) {
            if (f->at[i] != -f->depth) continue;
            for (place = k = 0; k < f->count; k++)
                if (f->at[k] == place) {
                    place++;
                    k = -1;
                }
            f->at[i] = place;
            if (place >= f->places) f->places = place + 1;
            plain_op(f, SEQPAR_FOLD_STORE, place);
        }
}

static void test_same_programs(void) {
    plain_fold *f = malloc(sizeof *f);
    int64_t n, at, i;
    for (n = 0; n < 1000; n++) {
        orchard o = orchard_new(test_integer(1, n % 4 ? 60 : LEAVES), n % 3 ? 12 : 40,
                                n % 2 == 0);
        int64_t order[LEAVES], groups = test_integer(1, o.count);
        int64_t stride = n % 5 ? 1 : test_integer(1, 9), done = 0;
        seqpar_fold fold;
        shuffle(order, o.count);
        for (at = i = 0; stride > 1 && i < stride; i++) {
            int64_t leaf;
            for (leaf = i; leaf < o.count; leaf += stride) order[at++] = leaf;
        }
        *f = (plain_fold){.o = &o};
        seqpar_fold_init(&fold, o.leaf, o.count);
        for (at = 0; at < o.count; at = i) {
            int64_t end = at + 1 +
                          (o.count - at - 1 < o.count / groups ? o.count - at - 1
                                                               : o.count / groups);
            qsort(order + at, (size_t)(end - at), sizeof *order, by_number);
            for (i = at; i < end; i++) {
                push_leaf(&fold, &o, order[i]);
                plain_push(f, (seqpar_node){0, o.leaf[order[i]]}, order[i]);
            }
            test_expect(!seqpar_fold_flush(&fold), "flush");
            plain_flush(f);
            test_expect(fold.pending_count == f->count && fold.slots_high == f->places,
                        "%lld values wait in %lld places, not %lld in %lld",
                        (long long)fold.pending_count, (long long)fold.slots_high,
                        (long long)f->count, (long long)f->places);
            done += fold.done;
        }
        test_expect(fold.program_count == f->ops &&
                        !memcmp(fold.program, f->op, (size_t)f->ops * sizeof *f->op),
                    "%lld leaves: another program", (long long)o.count);
        test_expect(done == 1 && f->count == 0, "not done");
        seqpar_fold_free(&fold);
    }
    free(f);
    test_end("fold_same_programs");
}

/* Leaves dealt like stripe's: all of the first party, then all of the next, so that nearly
   everything waits. Steps: 12 n log2 n at most. */
static void test_work(void) {
    enum { PARTS = 64, N = 1 << 15 };
    int64_t *leaf = malloc(N * sizeof *leaf), i, p;
    seqpar_fold fold;
    for (i = 0; i < N; i++) leaf[i] = i + i / 64 * 64;
    seqpar__work = 0;
    seqpar_fold_init(&fold, leaf, N);
    for (p = 0; p < PARTS; p++) {
        for (i = p; i < N; i += PARTS)
            test_expect(!seqpar_fold_push(&fold, (seqpar_node){0, leaf[i]}, SEQPAR_FOLD_LEAF,
                                          (int32_t)i),
                        "push");
        test_expect(!seqpar_fold_flush(&fold), "flush");
    }
    test_expect(fold.done && fold.slots_high == N / PARTS * 6, "%lld places",
                (long long)fold.slots_high);
    test_expect(seqpar__work >= 2 * N && seqpar__work < 12 * 15 * N,
                "%lld leaves take %lld steps", (long long)N, (long long)seqpar__work);
    seqpar_fold_free(&fold);
    free(leaf);
    test_end("fold_work");
}

/* ---- parties: each folds its own leaves, an owner folds what they are left with ---- */

typedef struct letter { /* what a party is left with */
    seqpar_node node[LEAVES];
    double value[LEAVES];
    int64_t count;
} letter;

static int64_t node_begin(seqpar_node n) { return n.index << n.level; }

static void letter_sort(letter *l) {
    int64_t i, j;
    for (i = 1; i < l->count; i++)
        for (j = i; j > 0 && node_begin(l->node[j]) < node_begin(l->node[j - 1]); j--) {
            seqpar_node n = l->node[j];
            double v = l->value[j];
            l->node[j] = l->node[j - 1];
            l->value[j] = l->value[j - 1];
            l->node[j - 1] = n;
            l->value[j - 1] = v;
        }
}

/* The leaves of one party, pushed in rising order in several programs. */
static letter party_fold(const orchard *o, const int *party, int who) {
    machine *m = machine_new();
    letter l = {.count = 0};
    seqpar_fold fold;
    int64_t i;
    seqpar_fold_init(&fold, o->leaf, o->count);
    for (i = 0; i < o->count; i++) {
        if (party[i] != who) continue;
        push_leaf(&fold, o, i);
        if (!test_integer(0, 6)) machine_flush(m, &fold, o->value);
    }
    machine_flush(m, &fold, o->value);
    for (i = 0; i < fold.pending_count; i++, l.count++) {
        l.node[i] = fold.pending[i];
        l.value[i] = m->store[fold.pending_at[i]];
    }
    if (fold.done) l = (letter){.count = 1, .node = {{41, 0}}, .value = {m->result}};
    letter_sort(&l);
    seqpar_fold_free(&fold);
    free(m);
    return l;
}

/* The owner takes the parties in any order, one program each. */
static double owner_fold(const orchard *o, const letter *letters, int64_t parties) {
    machine *m = machine_new();
    seqpar_fold fold;
    int64_t order[PARTIES], p, i;
    double result;
    shuffle(order, parties);
    seqpar_fold_init(&fold, o->leaf, o->count);
    for (p = 0; p < parties; p++) {
        const letter *l = &letters[order[p]];
        for (i = 0; i < l->count; i++) {
            test_expect(!fold.done, "done before all parties have come");
            test_expect(!seqpar_fold_push(&fold, l->node[i], SEQPAR_FOLD_LEAF, (int32_t)i),
                        "push");
        }
        machine_flush(m, &fold, l->value);
    }
    test_expect(fold.done && fold.pending_count == 0, "not done after all parties");
    result = m->result;
    seqpar_fold_free(&fold);
    free(m);
    return result;
}

enum {
    PARTITION_RANDOM,
    PARTITION_RUNS,
    PARTITION_ZIGZAG,
    PARTITION_STRIPES,
    PARTITION_LAST_HAS_ALL,
    PARTITIONS
};

static int party_of(int kind, int64_t i, int64_t count, int64_t parties) {
    int64_t slot;
    if (kind == PARTITION_RUNS) return (int)(i * parties / count);
    if (kind == PARTITION_STRIPES) return (int)(i % parties);
    if (kind == PARTITION_LAST_HAS_ALL) return (int)parties - 1;
    if (kind == PARTITION_RANDOM) return (int)test_integer(0, parties - 1);
    slot = i * 2 * parties / count;
    return (int)(slot < parties ? slot : 2 * parties - 1 - slot);
}

static void expect_partition(int kind, int64_t count, int64_t parties, int dense) {
    orchard o = orchard_new(count, 40, dense);
    letter *letters = calloc(PARTIES, sizeof *letters);
    int party[LEAVES];
    int64_t i, p;
    for (i = 0; i < count; i++) party[i] = party_of(kind, i, count, parties);
    for (p = 0; p < parties; p++) letters[p] = party_fold(&o, party, (int)p);
    for (p = 0; p < parties && kind == PARTITION_RUNS && dense; p++)
        test_expect(letters[p].count <= 16,
                    "a run leaves %lld values, more than 2 log2 of %lld",
                    (long long)letters[p].count, (long long)count);
    test_expect(same_bits(owner_fold(&o, letters, parties), naive_sum(&o)),
                "%lld leaves, %lld parties: the sum differs", (long long)count,
                (long long)parties);
    free(letters);
}

static void test_parties(void) {
    static const char *const names[] = {"random", "runs", "zigzag", "stripes", "last_has_all"};
    static const int64_t parties[] = {1, 2, 3, 4, 5, 8};
    int64_t p, n;
    int kind;
    for (kind = 0; kind < PARTITIONS; kind++) {
        for (p = 0; p < 6; p++)
            for (n = 0; n < 12; n++)
                expect_partition(kind, n < 4 ? n + 1 : test_integer(1, LEAVES), parties[p],
                                 (int)(n % 2));
        test_end("fold_parties_%s", names[kind]);
    }
}

/* seqpar__fold_partial is that, worked out by sender and receiver alike: nodes rise, node n
   is stored at n. */
static void test_partial(void) {
    int64_t n, i, own_count, own[LEAVES];
    for (n = 0; n < 100; n++) {
        orchard o = orchard_new(test_integer(1, LEAVES), 40, (int)(n % 2));
        int party[LEAVES];
        double values[LEAVES];
        machine *m = machine_new();
        seqpar__partial partial;
        letter l;
        for (i = own_count = 0; i < o.count; i++) {
            party[i] = n % 10 == 0 || test_integer(0, 2) == 0;
            if (party[i]) {
                values[own_count] = o.value[i];
                own[own_count++] = o.leaf[i];
            }
        }
        l = party_fold(&o, party, 1);
        test_expect(!seqpar__fold_partial(&partial, o.leaf, o.count, own, own_count),
                    "partial");
        for (i = 0; i < partial.program_count; i++) machine_step(m, partial.program[i], values);
        test_expect(partial.node_count == l.count && m->deepest <= partial.depth &&
                        m->depth == 0,
                    "%lld nodes, not %lld", (long long)partial.node_count, (long long)l.count);
        for (i = 0; i < partial.node_count; i++) {
            test_expect(same_bits(m->store[i], l.value[i]), "node %lld has another value",
                        (long long)i);
            test_expect(own_count == o.count ||
                            node_begin(partial.nodes[i]) == node_begin(l.node[i]),
                        "node %lld is another node", (long long)i);
        }
        seqpar__partial_free(&partial);
        free(m);
    }
    test_end("fold_partial");
}

/* From wherever it begins, a search finds the first that is not less. */
static void test_seek(void) {
    int64_t sorted[40];
    for (int64_t count = 0; count < 40; count++) {
        for (int64_t i = 0; i < count; i++)
            sorted[i] = (i ? sorted[i - 1] : -3) + test_integer(0, 3);
        for (int64_t key = -5; key < (count ? sorted[count - 1] : 0) + 3; key++) {
            int64_t want = 0;
            while (want < count && sorted[want] < key) want++;
            test_expect(seqpar__lower_bound(sorted, count, key) == want, "of %lld: %lld",
                        (long long)count, (long long)key);
            for (int64_t from = 0; from <= count; from++)
                test_expect(seqpar__seek(sorted, count, from, key) == want,
                            "of %lld from %lld on: %lld", (long long)count, (long long)from,
                            (long long)key);
        }
    }
    test_end("fold_search");
}

/* Near its begin a search takes few steps. */
static void test_seek_near(void) {
    enum { MANY = 1 << 16 };
    int64_t *sorted = malloc(MANY * sizeof *sorted);
    for (int64_t i = 0; i < MANY; i++) sorted[i] = 2 * i;
    for (int64_t away = -64; away <= 64; away++) {
        const int64_t from = MANY / 2;
        seqpar__work = 0;
        test_expect(seqpar__seek(sorted, MANY, from, 2 * (from + away)) == from + away, "%lld",
                    (long long)away);
        test_expect(seqpar__work <= 9, "%lld away: %lld steps", (long long)away,
                    (long long)seqpar__work);
    }
    free(sorted);
    test_end("fold_search_near");
}

/* ---- without memory ---- */

static seqpar_status scarce_fold(int level) {
    int64_t leaf[60], i, step = 2;
    seqpar_fold fold;
    seqpar_status status = SEQPAR_OK;
    for (i = 0; i < 60; i++) leaf[i] = i;
    seqpar_fold_init(&fold, leaf, 60);
    fold.running = level;
    for (int64_t first = 0; !status && first < step; first++) {
        for (i = level ? 30 * first : first; !status && i < (level ? 30 * first + 30 : 60);
             i += level ? 1 : step)
            status = seqpar_fold_push(&fold, (seqpar_node){0, i}, SEQPAR_FOLD_LEAF, (int32_t)i);
        if (!status) status = seqpar_fold_flush(&fold);
    }
    test_expect(status || fold.done, "it is not done");
    seqpar_fold_free(&fold);
    return status;
}

static seqpar_status scarce_partial(int level) {
    int64_t leaf[20];
    seqpar__partial partial;
    for (int64_t i = 0; i < 20; i++) leaf[i] = 3 * i;
    (void)level;
    seqpar_status status = seqpar__fold_partial(&partial, leaf, 20, leaf + 3, 9);
    if (!status) seqpar__partial_free(&partial);
    test_expect(!partial.program && !partial.nodes && !partial.node_count,
                "it holds something");
    return status;
}

/* Any allocation may be the one that finds none: the fold says so, and nothing is left. */
static void test_scarce(void) {
    seqpar_status (*const make[])(int level) = {scarce_fold, scarce_fold, scarce_partial};
    for (int way = 0; way < 3; way++) {
        const int64_t live = blocks_live;
        seqpar_status status = SEQPAR_ERR_MEMORY;
        int64_t n;
        for (n = 1; status == SEQPAR_ERR_MEMORY && n < 100; n++) {
            block_refused = blocks_made + n;
            status = make[way](way);
            test_expect(blocks_live == live, "allocation %lld: %lld blocks are left",
                        (long long)n, (long long)(blocks_live - live));
        }
        block_refused = 0;
        test_expect(!status && n > 3, "way %d: status %d after %lld", way, status,
                    (long long)n);
    }
    test_end("fold_without_memory");
}

/* ---- the devices' own machine: vectors longer than a block of columns ---- */

/* Two programs in one: the odd leaves, then the even ones. */
static void push_odd_leaves_first(seqpar_fold *fold, const orchard *o) {
    int64_t i;
    seqpar_fold_init(fold, o->leaf, o->count);
    for (i = 1; i < o->count; i += 2) push_leaf(fold, o, i);
    test_expect(!seqpar_fold_flush(fold), "flush");
    for (i = 0; i < o->count; i += 2) push_leaf(fold, o, i);
    test_expect(!seqpar_fold_flush(fold), "flush");
}

/* fp64 must be the naive sum to the bit, fp32 near it. */
static void expect_column(orchard *o, const double *column, int64_t stride, int dtype,
                          double got) {
    double terms = 0;
    int64_t i;
    for (i = 0; i < o->count; i++) terms += fabs(o->value[i] = column[i * stride]);
    if (dtype == SEQPAR_DTYPE_F64)
        test_expect(same_bits(got, naive_sum(o)), "%.17g, not %.17g", got, naive_sum(o));
    else
        test_expect(fabs(got - naive_sum(o)) <= 1e-6 * terms, "%g, not %g", got, naive_sum(o));
}

static void expect_device_fold(seqpar_device *device, int64_t leaves, int64_t count) {
    orchard o = orchard_new(leaves, 20, 0);
    int64_t size = seqpar_dtype_bytes(device->storage), i;
    double *in = malloc((size_t)(leaves * count) * sizeof *in);
    double *out = malloc((size_t)count * sizeof *out);
    void *leaf = device->alloc(device, leaves * count * size);
    void *store = device->alloc(device, leaves * count * size);
    void *finish = device->alloc(device, count * size);
    seqpar_fold fold;
    seqpar_fold_args args = {.fold = {.store = store, .store_stride = count, .finish = finish},
                             .leaf_data = leaf,
                             .leaf_stride = count,
                             .count = count};
    for (i = 0; i < leaves * count; i++) in[i] = (double)(float)rough();
    seqpar_device_write(device, leaf, 0, in, leaves * count, device->accumulator);
    push_odd_leaves_first(&fold, &o);
    args.fold.program = fold.program;
    args.fold.program_count = fold.program_count;
    args.fold.depth = fold.depth_high;
    test_expect(!device->fold(device, &args, NULL), "refused");
    seqpar_device_read(device, out, finish, 0, count, device->accumulator);
    for (i = 0; i < count; i++) expect_column(&o, in + i, count, device->storage, out[i]);
    seqpar_fold_free(&fold);
    device->free(device, leaf);
    device->free(device, store);
    device->free(device, finish);
    free(in);
    free(out);
}

static void test_devices(void) {
    seqpar_device *reference = seqpar_device_reference(), *cpu = seqpar_device_cpu(1);
    expect_device_fold(reference, 13, 4099);
    expect_device_fold(reference, 2, 1);
    test_end("fold_device_reference");
    expect_device_fold(cpu, 13, 4099);
    test_end("fold_device_cpu");
    seqpar_device_close(reference);
    seqpar_device_close(cpu);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    test_limit(20); /* a fold that never ends is a failure */
    TEST(test_orders());
    TEST(test_sensitive());
    TEST(test_absent_shards());
    TEST(test_bounds());
    TEST(test_same_programs());
    TEST(test_work());
    TEST(test_parties());
    TEST(test_partial());
    TEST(test_seek());
    TEST(test_seek_near());
    TEST(test_scarce());
    TEST(test_devices());
    return test_summary();
}
