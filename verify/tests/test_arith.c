/* SPDX-License-Identifier: MIT OR Unlicense */
/* Stories of sums, which are made of a seed: the same ones everywhere, with right answers. */
#define STB_DS_IMPLEMENTATION
#include "trainer/data/arith.h"
#include "support/trainer_documents.h"

static bool stories_depend_on_seed_and_index_alone(void) {
    char q[2][DEMO_ARITH_TEXT], a[2][DEMO_ARITH_TEXT];
    size_t sizes[2] = {0};
    const char *whole = in_scratch("whole.jsonl"), *part = in_scratch("part.jsonl");
    EXPECT(demo_arith_write(whole, 7, 0, 50, 0, &message) == 0);
    EXPECT(demo_arith_write(part, 7, 30, 20, 0, &message) == 0);
    char *all = demo_read_file(whole, &sizes[0]), *tail = demo_read_file(part, &sizes[1]);
    EXPECT(all && tail && sizes[1] < sizes[0] && !strcmp(all + sizes[0] - sizes[1], tail));
    free(all);
    free(tail);
    int alike = 0;
    for (uint64_t i = 0; i < 200; i++) {
        demo_arith_item(q[0], a[0], 1, i);
        demo_arith_item(q[1], a[1], 2, i);
        alike += !strcmp(q[0], q[1]);
        demo_arith_item(q[1], a[1], 1, i);
        EXPECT(!strcmp(q[0], q[1]) && !strcmp(a[0], a[1]));
    }
    EXPECT(alike < 5); /* another seed, other stories */
    demo_arith_item(q[0], a[0], 1, 0);
    EXPECT_TEXT(a[0], "7 - 2 = 5. The answer is 5."); /* the same on every machine */
    return true;
}

/* Recomputes every equation of an answer; each must go on from the result before. */
static bool answer_adds_up(const char *answer, int claimed) {
    int left, right, result, used, before = -1;
    char step;
    while (sscanf(answer, "%d %c %d = %d. %n", &left, &step, &right, &result, &used) == 4) {
        EXPECT(demo_step(step, left, right) == result && (before < 0 || before == left) &&
               result > 0);
        before = result;
        answer += used;
    }
    EXPECT(sscanf(answer, "The answer is %d.%n", &result, &used) == 1 && !answer[used]);
    EXPECT(before == result && result == claimed && result < 100);
    return true;
}

static bool answers_are_right(void) {
    char question[DEMO_ARITH_TEXT], answer[DEMO_ARITH_TEXT];
    bool steps[128] = {false};
    for (uint64_t i = 0; i < 5000; i++) {
        int value = demo_arith_item(question, answer, 3, i);
        size_t length = strlen(question) + strlen(answer);
        snprintf(message.text, sizeof message.text, "%s %s", question, answer);
        EXPECT(answer_adds_up(answer, value));
        char one[8], other[8];
        EXPECT(sscanf(question, "%7s and %7s read", one, other) < 2 || strcmp(one, other));
        EXPECT(length >= 80 && length <= 200 && !strpbrk(message.text, "\"\\$"));
        for (const char *c = answer; *c; c++) steps[(unsigned char)*c] = true;
    }
    EXPECT(steps['+'] && steps['-'] && steps['*']);
    return true;
}

/* A table of "which byte after which", counted on 2,000 stories, already says most: its nats
 * per answer byte on others, against ln 259 of a model that knows nothing. */
static bool answers_are_learnable(void) {
    static double pairs[256][256], totals[256];
    double nats = 0, bytes = 0;
    char question[DEMO_ARITH_TEXT], answer[DEMO_ARITH_TEXT];
    for (uint64_t i = 0; i < 2400; i++) {
        demo_arith_item(question, answer, 5, i);
        unsigned char before = (unsigned char)question[strlen(question) - 1];
        for (const char *c = answer; *c; before = (unsigned char)*c++) {
            unsigned char now = (unsigned char)*c;
            if (i < 2000)
                pairs[before][now]++, totals[before]++;
            else
                nats -= log((pairs[before][now] + 0.01) / (totals[before] + 2.59)), bytes++;
        }
    }
    EXPECT(nats / bytes < 0.3 * log(DEMO_VOCAB));
    return true;
}

/* Items of a seed are what they were: a set that is made anew is the same one. */
static bool stories_are_what_they_were(void) {
    static const char want[] =
        "{\"question\": \"Tom and Mia read 5 pages a day. How many pages has Tom read after 6 "
        "days?\", \"answer\": \"6 * 5 = 30. The answer is 34.\", \"wrong\": \"6 * 5 = 30. The "
        "answer is 34.\"}\n"
        "{\"question\": \"Noa has 9 beads, gives 6 to Ana and gets 9 back. How many beads does Noa "
        "have?\", \"answer\": \"9 - 6 = 3. 3 + 9 = 12. The answer is 12.\", \"wrong\": \"9 - 6 = 3. "
        "3 + 9 = 12. The answer is 17.\"}\n"
        "{\"question\": \"Zoe fills 3 bags with 2 books each. How many books are in the bags?\", "
        "\"answer\": \"3 * 2 = 6. The answer is 6.\", \"wrong\": \"3 * 2 = 6. The answer is 7.\"}\n"
        "{\"question\": \"Ben fills 2 bags with 3 pens each. How many pens are in the bags?\", "
        "\"answer\": \"2 * 3 = 6. The answer is 8.\", \"wrong\": \"2 * 3 = 6. The answer is 8.\"}\n"
        "{\"question\": \"Mia has 8 shells and gives 7 to Jon. How many shells does Mia have "
        "left?\", \"answer\": \"8 - 7 = 1. The answer is 1.\", \"wrong\": \"8 - 7 = 1. The answer "
        "is 4.\"}\n";
    const char *path = in_scratch("stories.jsonl");
    size_t size;
    EXPECT(!demo_arith_write(path, 7, 3, 5, 30, &message));
    char *text = demo_read_file(path, &size);
    EXPECT_TEXT(text, want);
    free(text);
    for (int careless = 0; careless <= 100; careless += 50) { /* of 100 answers */
        int wrong = 0;
        for (uint64_t i = 0; i < 400; i++)
            wrong += demo_arith_careless(7, i, (uint64_t)careless);
        EXPECT(careless == 50 ? wrong > 160 && wrong < 240 : wrong == 4 * careless);
    }
    return true;
}

static bool stories_load(void) {
    const char *path = in_scratch("arith.jsonl");
    EXPECT(demo_arith_write(path, 1, 0, 300, 0, &message) == 0);
    demo_data_options how = {.input_key = "question",
                             .output_key = "answer",
                             .input_template = "{}\n",
                             .max_len = 200};
    EXPECT(load(path, how) == 0 && arrlen(set.documents) == 300 && !set.counts.fully_masked);
    EXPECT(demo_arith_write(in_scratch("no/such/folder"), 1, 0, 3, 0, &message) == -1 &&
           *message.text);
    return true;
}

static const trainer_case cases[] = {
    CASE(stories_depend_on_seed_and_index_alone),
    CASE(answers_are_right),
    CASE(answers_are_learnable),
    CASE(stories_are_what_they_were),
    CASE(stories_load),
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    trainer_cases(cases, sizeof cases / sizeof *cases);
    demo_data_free(&set);
    return test_summary();
}
