/* SPDX-License-Identifier: MIT OR Unlicense */
/* arith.h - generates a small data set: arithmetic stories with one right answer.
 *
 *     {"question": "Mia has 3 pens and finds 4 more. How many pens does Mia have now?",
 *      "answer": "3 + 4 = 7. The answer is 7.", "wrong": "3 + 4 = 7. The answer is 9."}
 *
 * is one line of the file. Item i of seed s depends on (s, i) alone, so any range of items can
 * be generated in any order. Answers follow one pattern and numbers stay small, so that a tiny
 * byte-level model learns them within a hundred steps. */
#ifndef DEMO_ARITH_H
#define DEMO_ARITH_H

#include "data.h" /* demo_write_atomically */

/* $N and $M are two names, $T is a thing, $0 the first number, $1 and $2 the operands of the
   steps. `steps` has one operator for each step. */
typedef struct {
    const char *story, *steps;
} demo_story;

static const demo_story demo_stories[] = {
    {"$N has $0 $T and finds $1 more. How many $T does $N have now?", "+"},
    {"There are $0 $T in one box and $1 in another box. How many $T are there?", "+"},
    {"$N picks $0 $T and $M picks $1. How many $T do they have together?", "+"},
    {"$N has $0 $T and gives $1 to $M. How many $T does $N have left?", "-"},
    {"There are $0 $T on the table. $N takes $1 away. How many $T are left?", "-"},
    {"$N fills $0 bags with $1 $T each. How many $T are in the bags?", "*"},
    {"$N and $M read $1 pages a day. How many pages has $N read after $0 days?", "*"},
    {"$N has $0 $T, buys $1 more and then loses $2. How many $T are left?", "+-"},
    {"$N has $0 $T, gives $1 to $M and gets $2 back. How many $T does $N have?", "-+"},
    {"$N has $0 boxes with $1 $T each and $2 more on a shelf. How many $T are there?", "*+"},
    {"$N packs $0 boxes with $1 $T each and sells $2 $T. How many $T are left?", "*-"},
};

static const char *const demo_names[] = {"Mia", "Ben", "Zoe", "Tom", "Ana", "Leo",
                                         "Ida", "Max", "Eva", "Sam", "Noa", "Jon"};
static const char *const demo_things[] = {"pens",  "coins", "apples", "shells", "books",
                                          "cards", "beads", "nuts",   "plums",  "stamps"};

enum {
    DEMO_STORY_COUNT = 11,
    DEMO_NAME_COUNT = 12,
    DEMO_THING_COUNT = 10,
    DEMO_ARITH_TEXT = 256
};

/* The state of an item's random number generator. */
typedef struct {
    uint64_t key, counter;
} demo_draws;

/* SplitMix64's mixing function: every bit of the result depends on every bit of x. */
static inline uint64_t demo_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static inline demo_draws demo_draws_of(uint64_t seed, uint64_t index) {
    return (demo_draws){demo_mix(demo_mix(seed + UINT64_C(0x9E3779B97F4A7C15)) ^ index), 0};
}

/* A random number from low to high, both included. */
static inline int demo_draw(demo_draws *draws, int low, int high) {
    uint64_t top = demo_mix(draws->key + ++draws->counter * UINT64_C(0x9E3779B97F4A7C15)) >> 32;
    return low + (int)(top * (uint64_t)(high - low + 1) >> 32);
}

/* Draws the operand of a step, so that products stay below 40 and differences above 0. */
static inline int demo_draw_operand(demo_draws *draws, char step, int value) {
    if (step == '*') return demo_draw(draws, 2, 6);
    if (step == '+') return demo_draw(draws, 2, 9);
    return demo_draw(draws, 2, value - 1 < 9 ? value - 1 : 9);
}

static inline int demo_step(char step, int value, int operand) {
    return step == '+' ? value + operand : step == '-' ? value - operand : value * operand;
}

/* Replaces $N, $M, $T and $0..$2 in a story. */
static inline void demo_tell(char *text, size_t size, const char *story,
                             const char *const *words, const int *numbers) {
    size_t used = 0;
    for (; *story && used + 1 < size; story++) {
        if (*story != '$')
            text[used++] = *story;
        else if (*++story >= '0' && *story <= '2')
            used += (size_t)snprintf(text + used, size - used, "%d", numbers[*story - '0']);
        else
            used += (size_t)snprintf(text + used, size - used, "%s",
                                     words[*story == 'N'   ? 0
                                           : *story == 'M' ? 1
                                                           : 2]);
    }
    text[used < size ? used : size - 1] = 0;
}

/* Writes question and answer of item (seed, index), each of DEMO_ARITH_TEXT bytes, and returns
   the final number of the answer. */
static inline int demo_arith_item(char *question, char *answer, uint64_t seed, uint64_t index) {
    demo_draws draws = demo_draws_of(seed, index);
    const demo_story *story = &demo_stories[demo_draw(&draws, 0, DEMO_STORY_COUNT - 1)];
    int name = demo_draw(&draws, 0, DEMO_NAME_COUNT - 1);
    int other = demo_draw(&draws, 1, DEMO_NAME_COUNT - 1);
    const char *words[3] = {demo_names[name], demo_names[(name + other) % DEMO_NAME_COUNT],
                            demo_things[demo_draw(&draws, 0, DEMO_THING_COUNT - 1)]};
    int low = story->steps[0] == '-' ? 6 : 2;
    int high = story->steps[0] == '*' ? 6 : story->steps[0] == '-' ? 15 : 9;
    int numbers[3] = {demo_draw(&draws, low, high), 0, 0}, value = numbers[0], used = 0;
    for (int i = 0; story->steps[i]; i++) {
        int operand = numbers[i + 1] = demo_draw_operand(&draws, story->steps[i], value);
        int result = demo_step(story->steps[i], value, operand);
        used += snprintf(answer + used, (size_t)(DEMO_ARITH_TEXT - used), "%d %c %d = %d. ",
                         value, story->steps[i], operand, result);
        value = result;
    }
    snprintf(answer + used, (size_t)(DEMO_ARITH_TEXT - used), "The answer is %d.", value);
    demo_tell(question, DEMO_ARITH_TEXT, story->story, words, numbers);
    return value;
}

/* Writes the same steps with a wrong final number: the rejected response of a preference
   pair. */
static inline void demo_arith_wrong(char *wrong, const char *answer, int value,
                                    uint64_t index) {
    int kept = (int)(strstr(answer, "The answer is ") - answer);
    snprintf(wrong, DEMO_ARITH_TEXT, "%.*sThe answer is %d.", kept, answer,
             value + 1 + (int)(index % 5));
}

/* Does the data set give this item the wrong answer? The probability is of_100 percent. */
static inline bool demo_arith_careless(uint64_t seed, uint64_t index, uint64_t of_100) {
    demo_draws draws = demo_draws_of(~seed, index);
    return (uint64_t)demo_draw(&draws, 0, 99) < of_100;
}

/* Writes items first .. first + count - 1 as JSON lines; about `careless` percent of them have
 * the wrong answer. Writes the whole file or none. Returns 0, or -1 with one sentence. */
static inline int demo_arith_write(const char *path, uint64_t seed, uint64_t first,
                                   uint64_t count, uint64_t careless, demo_error *error) {
    char question[DEMO_ARITH_TEXT], answer[DEMO_ARITH_TEXT], wrong[DEMO_ARITH_TEXT];
    char *text = NULL;
    size_t size = 0;
    FILE *lines = open_memstream(&text, &size);
    for (uint64_t i = 0; lines && i < count; i++) {
        demo_arith_wrong(wrong, answer, demo_arith_item(question, answer, seed, first + i),
                         first + i);
        /* no text has a character that JSON escapes */
        fprintf(lines, "{\"question\": \"%s\", \"answer\": \"%s\", \"wrong\": \"%s\"}\n",
                question, demo_arith_careless(seed, first + i, careless) ? wrong : answer,
                wrong);
    }
    bool whole = lines && !ferror(lines);
    if (lines && fclose(lines)) whole = false;
    int failed = whole ? demo_write_atomically(path, text, size, error) : -1;
    if (!whole)
        demo_fail(error, "no memory for %llu items; make them in parts",
                  (unsigned long long)count);
    free(text);
    return failed;
}

#endif
