/* SPDX-License-Identifier: MIT OR Unlicense */
/* Pairs of a chosen and a rejected response, and responses with a label: prompts that are
   shared, ids, padding, what is cut or dropped, and sentences about what is wrong. */
#define STB_DS_IMPLEMENTATION
#include "trainer/data/pairs.h"
#include "support/trainer_documents.h"

/* ---- pairs ---- */

static demo_pair_set pairs;
static demo_labelled_set labelled;

static int load_pairs(const char *path, demo_pair_options how) {
    demo_pairs_free(&pairs);
    message.text[0] = 0;
    return demo_pairs_load(&pairs, path, &how, &message);
}

static int load_labelled(const char *path, demo_labelled_options how) {
    demo_labelled_free(&labelled);
    message.text[0] = 0;
    return demo_labelled_load(&labelled, path, &how, &message);
}

#define EXPECT_PAIR(i, want_chosen, want_rejected) \
    do { \
        EXPECT((i) < arrlen(pairs.pairs)); \
        EXPECT_TEXT(shown_document(&pairs.pairs[i].chosen), want_chosen); \
        EXPECT_TEXT(shown_document(&pairs.pairs[i].rejected), want_rejected); \
    } while (0)

static const demo_pair_options prompted = {
    .prompt_key = "p", .chosen_key = "c", .rejected_key = "r"};

static bool pairs_share_a_prompt(void) {
    const char *path = make_file("p.jsonl",
                                 "{\"p\": \"ab\", \"c\": \"cd\", \"r\": \"e\", \"margin\": 0.5,"
                                 " \"m\": -2}\n");
    demo_pair_options how = prompted;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 1 && pairs.tokens == 6 + 5);
    EXPECT_PAIR(0, "[B]ab|cd[E]", "[B]ab|e[E]");
    EXPECT(pairs.supervised_tokens == 3 + 2 && pairs.pairs[0].margin == 0);
    how.margins = true;
    EXPECT(load_pairs(path, how) == 0 && pairs.pairs[0].margin == 0.5);
    how.margin_key = "m";
    how.data.input_template = "Q: {}\n";
    EXPECT(load_pairs(path, how) == 0 && pairs.pairs[0].margin == -2);
    EXPECT_PAIR(0, "[B]Q: ab\n|cd[E]", "[B]Q: ab\n|e[E]");
    EXPECT(load_pairs(
               make_file(
                   "d.jsonl",
                   "{\"prompt\": \"\", \"chosen\": \"\\u20ac\", \"rejected\": \"\xC3\xA9\"}"),
               (demo_pair_options){.prompt_key = "prompt"}) == 0);
    EXPECT_PAIR(0, "[B]|\xE2\x82\xAC[E]", "[B]|\xC3\xA9[E]");
    return true;
}

/* What two whole texts begin with is the prompt, up to the last turn of the assistant or the first
   word that differs; the shorter text keeps a word as response. */
static bool prompts_are_found_in_whole_texts(void) {
    static const char *const cases[][4] = {
        {"Q: 1+1? A: 2", "Q: 1+1? A: 3", "[B]Q: 1+1? A:| 2[E]", "[B]Q: 1+1? A:| 3[E]"},
        {"Q\\nyes", "Q\\nno", "[B]Q\n|yes[E]", "[B]Q\n|no[E]"},
        {"x", "y", "[B]|x[E]", "[B]|y[E]"},
        {" x", " y", "[B]| x[E]", "[B]| y[E]"},
        {"  x", "  y", "[B] | x[E]", "[B] | y[E]"},
        {"a\xC3\xA9", "a\xC3\xA8", "[B]|a\xC3\xA9[E]", "[B]|a\xC3\xA8[E]"},
        {"a.\xC3\xA9", "a.\xC3\xA8", "[B]a.|\xC3\xA9[E]", "[B]a.|\xC3\xA8[E]"},
        {"\xE2\x82\xAC", "\xE2\x82\xAB", "[B]|\xE2\x82\xAC[E]", "[B]|\xE2\x82\xAB[E]"},
        {"\xF0\x9F\x98\x80!", "\xF0\x9F\x98\x81!", "[B]|\xF0\x9F\x98\x80![E]",
         "[B]|\xF0\x9F\x98\x81![E]"},
        {"a \xC3\xA9", "a \xC3\xA8", "[B]a| \xC3\xA9[E]", "[B]a| \xC3\xA8[E]"},
        {"abc", "ab", "[B]|abc[E]", "[B]|ab[E]"},
        {"a b", "a bc", "[B]a| b[E]", "[B]a| bc[E]"},
        {"a\xC3\xA9", "a\xC3\xA9z", "[B]|a\xC3\xA9[E]", "[B]|a\xC3\xA9z[E]"},
        {"same", "same", "[B]|same[E]", "[B]|same[E]"},
        {"the cat", "the car", "[B]the| cat[E]", "[B]the| car[E]"},
        {"so don't", "so don", "[B]so| don't[E]", "[B]so| don[E]"},
        {"1,24", "1,25", "[B]1,|24[E]", "[B]1,|25[E]"},
        {"Human: q\\nAssistant: the cat", "Human: q\\nAssistant: the car",
         "[B]Human: q\nAssistant:| the cat[E]", "[B]Human: q\nAssistant:| the car[E]"},
        {"Human: q\\nAssistant: a", "Human: q\\nAssistant: a\\nHuman: r\\nAssistant: b",
         "[B]Human: q\nAssistant:| a[E]",
         "[B]Human: q\nAssistant:| a\nHuman: r\nAssistant: b[E]"},
        {"Human: q\\nAssistant: a\\nHuman: r\\nAssistant: b",
         "Human: q\\nAssistant: a\\nHuman: s\\nAssistant: bc",
         "[B]Human: q\nAssistant: a\n|Human: r\nAssistant: b[E]",
         "[B]Human: q\nAssistant: a\n|Human: s\nAssistant: bc[E]"},
        {"an Assistant: said this", "an Assistant: said that", "[B]an Assistant: said| this[E]",
         "[B]an Assistant: said| that[E]"},
        {"z", "z", "[B]|z[E]", "[B]|z[E]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[256];
        snprintf(line, sizeof line, "{\"chosen\": \"%s\", \"rejected\": \"%s\"}\n", cases[i][0],
                 cases[i][1]);
        EXPECT(load_pairs(make_file("w.jsonl", line),
                          (demo_pair_options){.data.input_template = "not {} used"}) == 0);
        EXPECT_PAIR(0, cases[i][2], cases[i][3]);
        EXPECT(pairs.counts.identical == !strcmp(cases[i][0], cases[i][1]) &&
               !pairs.counts.two_prompts);
    }
    return true;
}

static bool pair_ids_are_taken_as_they_are(void) {
    EXPECT(load_pairs(
               make_file(
                   "i.jsonl",
                   "{\"prompt_ids\": [0, 65], \"chosen_ids\": [0], \"rejected_ids\": [66, 0]}\n"
                   "{\"prompt_ids\": [], \"chosen_ids\": [1, 2], \"rejected_ids\": [1, 2, 4]}\n"
                   "{\"prompt_ids\": [258], \"chosen_ids\": [258], \"rejected_ids\": [0],"
                   " \"margin\": 3, \"prompt\": 7}\n"),
               (demo_pair_options){.margins = true}) == 0);
    const demo_pair *pair = pairs.pairs;
    EXPECT(arrlen(pairs.pairs) == 3 && pairs.tokens == 3 + 4 + 2 + 3 + 2 + 2 &&
           pairs.supervised_tokens == 3 + 3 + 2);
    EXPECT(pair[0].chosen.tokens == 3 && pair[0].chosen.ids[0] == 0 &&
           pair[0].chosen.ids[2] == 0);
    EXPECT(!pair[0].chosen.loss_mask[1] && pair[0].chosen.loss_mask[2] &&
           pair[0].rejected.loss_mask[3]);
    /* nothing predicts a first token */
    EXPECT(!pair[1].chosen.loss_mask[0] && pair[1].chosen.loss_mask[1]);
    EXPECT(pair[2].margin == 3 && pairs.counts.without_margin == 2);
    EXPECT(!pairs.counts.two_prompts && !pairs.counts.identical);
    return true;
}

/* The same pair without padding, padded left, right, on both sides, and with loss_mask in
   the place of labels. */
static const char padded_pairs[] =
    "{\"chosen_input_ids\": [65, 0, 67], \"chosen_labels\": [-100, 0, 67],"
    " \"rejected_input_ids\": [65, 68], \"rejected_labels\": [-100, 68]}\n"
    "{\"chosen_input_ids\": [5, 65, 0, 67], \"chosen_labels\": [-100, -100, 0, 67],"
    " \"chosen_attention_mask\": [0, 1, 1, 1], \"rejected_input_ids\": [999, -1, 65, 68],"
    " \"rejected_labels\": [-100, -100, -100, 68], \"rejected_attention_mask\": [0, 0, 1, 1]}\n"
    "{\"chosen_input_ids\": [65, 0, 67, 5], \"chosen_labels\": [-100, 0, 67, -100],"
    " \"chosen_attention_mask\": [1, 1, 1, 0], \"rejected_input_ids\": [65, 68, 0, 0],"
    " \"rejected_labels\": [-100, 68, -100, -100], \"rejected_attention_mask\": [true, true, "
    "false, false]}\n"
    "{\"chosen_input_ids\": [0, 65, 0, 67, 0], \"chosen_labels\": [-100, -100, 0, 67, -100],"
    " \"chosen_attention_mask\": [0, 1, 1, 1, 0], \"rejected_input_ids\": [65, 68],"
    " \"rejected_labels\": [-100, 68], \"rejected_attention_mask\": [1, 1]}\n"
    "{\"chosen_input_ids\": [9, 65, 0, 67], \"chosen_loss_mask\": [false, 0, 1, 1],"
    " \"chosen_attention_mask\": [0, 1, 1, 1], \"rejected_input_ids\": [65, 68, 9],"
    " \"rejected_loss_mask\": [0, 1, 0], \"rejected_attention_mask\": [1, 1, 0]}\n";

static bool padding_makes_no_difference(void) {
    EXPECT(load_pairs(make_file("pad.jsonl", padded_pairs),
                      (demo_pair_options){.data.max_len = 3}) == 0);
    EXPECT(arrlen(pairs.pairs) == 5 && pairs.tokens == 5 * (3 + 2) &&
           pairs.supervised_tokens == 5 * (2 + 1));
    for (int i = 0; i < 5; i++) {
        EXPECT(demo_same_document(&pairs.pairs[i].chosen, &pairs.pairs[0].chosen));
        EXPECT(demo_same_document(&pairs.pairs[i].rejected, &pairs.pairs[0].rejected));
    }
    EXPECT(!pairs.counts.two_prompts && !pairs.counts.identical && !pairs.counts.dropped_long);
    EXPECT(
        load(make_file(
                 "one.jsonl",
                 "{\"input_ids\": [7, 65, 66, 7], \"labels\": [-100, -100, 66, -100],"
                 " \"attention_mask\": [0, 1, 1, 0]}\n"
                 "{\"input_ids\": [7, 7], \"attention_mask\": [0, 0], \"loss_mask\": [0, 0]}\n"
                 "{\"input_ids\": [65, 66], \"labels\": [-100, 66]}\n"),
             ask) == 0);
    EXPECT_TEXT(shown(0), "A|B");
    EXPECT_TEXT(shown(1), "A|B");
    EXPECT(set.counts.zero_length == 1);
    return true;
}

static bool long_pairs_are_dropped_or_cut_whole(void) {
    const char *path = make_file("l.jsonl",
                                 "{\"p\": \"ab\", \"c\": \"cdefgh\", \"r\": \"x\"}\n" /* 10 and
                                                                                         5
                                                                                         tokens
                                                                                       */
                                 "{\"p\": \"ab\", \"c\": \"y\", \"r\": \"z\"}\n" /* 5 and 5 */
                                 "{\"p\": \"abcdefg\", \"c\": \"y\", \"r\": \"zz\"}\n" /* 10 and
                                                                                          11 */
                                 "{\"prompt_ids\": [1, 2, 3, 4, 5, 6], \"chosen_ids\": [7, 8],"
                                 " \"rejected_ids\": [7, 9]}\n"); /* 8 and 8, equal when cut to
                                                                     7 */
    demo_pair_options how = prompted;
    how.data.max_len = 7;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 1 &&
           pairs.counts.dropped_long == 3);
    EXPECT_PAIR(0, "[B]ab|y[E]", "[B]ab|z[E]");
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 3 &&
           pairs.counts.dropped_long == 1);
    EXPECT_PAIR(0, "[B]ab|cde[E]", "[B]ab|x[E]");
    EXPECT(pairs.counts.cut == 2 && pairs.counts.identical == 1 &&
           pairs.pairs[2].chosen.ids[6] == 7);
    how.data.max_len =
        10; /* a prompt of eight tokens leaves less than the three that it must */
    EXPECT(load_pairs(path, how) == 0 && pairs.counts.dropped_long == 1 && !pairs.counts.cut);
    how.data.max_len = 11;
    EXPECT(load_pairs(path, how) == 0 && !pairs.counts.dropped_long && !pairs.counts.cut);
    EXPECT_PAIR(2, "[B]abcdefg|y[E]", "[B]abcdefg|zz[E]");
    how.data.max_len = 7; /* a reward model's is cut all the same */
    how.data.long_prompts = true;
    EXPECT(load_pairs(path, how) == 0 && !pairs.counts.dropped_long && pairs.counts.cut == 3);
    EXPECT_PAIR(2, "[B]abcde|[E]", "[B]abcde|[E]");
    how.data.long_prompts = false;
    how.data.long_documents = DEMO_LONG_CUT_BOTH; /* both by the longer response */
    how.data.max_len = 8;
    EXPECT(load_pairs(path, how) == 0 && !pairs.counts.dropped_long && pairs.counts.cut == 2);
    EXPECT_PAIR(0, "[B]ab|cdefg", "[B]ab|x[E]");
    EXPECT_PAIR(2, "[B]abcd|y[E]", "[B]abcd|zz[E]");
    how.data.long_documents = DEMO_LONG_CUT;
    const char *mirrored = make_file("r.jsonl",
                                     "{\"p\": \"ab\", \"c\": \"x\", \"r\": \"cdefgh\"}");
    how.data.max_len = 7;
    EXPECT(load_pairs(mirrored, how) == 0 && pairs.counts.cut == 1);
    EXPECT_PAIR(0, "[B]ab|x[E]", "[B]ab|cde[E]");
    how.data.long_documents = DEMO_LONG_DROP;
    EXPECT(load_pairs(mirrored, how) == -1 && holds(message.text, "1 too long, 0 cut"));
    how.data.max_len = 3;
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_pairs(path, how) == -1 &&
           holds(message.text, "l.jsonl: no pair is left (4 pairs read, 0 kept"));
    EXPECT(holds(message.text, "4 too long, 0 cut, 0 identical); raise --max_len") &&
           !pairs.pairs);
    return true;
}

/* Every length of prompt, response and limit: what is kept is within the limit, supervised
   and ends in EOS. */
static bool pairs_of_every_size_are_sound(void) {
    for (int prompt = 0; prompt < 6; prompt++)
        for (int response = 1; response < 6; response++)
            for (int limit = 1; limit < 16; limit++) {
                char line[128];
                snprintf(line, sizeof line,
                         "{\"p\": \"%.*s\", \"c\": \"%.*s\", \"r\": \"x\"}\n"
                         "{\"p\": \"\", \"c\": \"y\", \"r\": \"x\"}",
                         prompt, "pppppp", response, "cccccc");
                demo_pair_options how = prompted;
                how.data.max_len = limit;
                how.data.long_documents = DEMO_LONG_CUT;
                int failed = load_pairs(make_file("s.jsonl", line), how);
                bool fits = prompt + 3 < limit, cut = fits && prompt + response + 2 > limit;
                EXPECT(failed == (limit < 4 ? -1 : 0));
                if (failed) continue;
                EXPECT(arrlen(pairs.pairs) == 1 + fits && pairs.counts.cut == cut &&
                       pairs.counts.read == 2);
                const demo_document *chosen = &pairs.pairs[0].chosen;
                EXPECT(chosen->tokens <= limit && arrlen(chosen->ids) == chosen->tokens);
                EXPECT(demo_supervised(chosen) >= 2 &&
                       chosen->ids[chosen->tokens - 1] == DEMO_EOS);
                EXPECT(!fits || chosen->ids[prompt + 1] == 'c');
            }
    return true;
}

static bool pairs_are_counted(void) {
    char summary[320], both[1100];
    const char *one = make_file(
        "1.jsonl", "{\"p\": \"a\", \"c\": \"b\", \"r\": \"b\", \"margin\": 1}\n\n"
                   "{\"p\": \"a\", \"c\": \"b\", \"r\": \"c\", \"margin\": null}\r\n");
    const char *two = make_file(
        "2.jsonl",
        "{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, -100, 3],"
        " \"rejected_input_ids\": [1, 4, 5], \"rejected_labels\": [-100, -100, 5]}\n");
    snprintf(both, sizeof both, "%s,%s", one, two);
    demo_pair_options how = prompted;
    how.data.max_samples = 3;
    how.margins = true;
    EXPECT(load_pairs(both, how) == 0);
    demo_pairs_summary(&pairs, summary, sizeof summary);
    EXPECT_TEXT(summary, "3 pairs read, 3 kept with 22 tokens, 10 of them supervised; 0 too "
                         "long, 0 cut, 1 identical,"
                         " 2 without margin, 1 with two prompts");
    how.margins = false;
    EXPECT(load_pairs(
               make_file(
                   "3.jsonl",
                   "{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, 2, 3],"
                   " \"rejected_input_ids\": [1, 2, 5], \"rejected_labels\": [-100, -100, 5]}"),
               how) == 0 &&
           pairs.counts.two_prompts == 1);
    EXPECT(load_pairs(one, how) == 0);
    demo_pairs_summary(&pairs, summary, sizeof summary);
    EXPECT_TEXT(summary, "2 pairs read, 2 kept with 16 tokens, 8 of them supervised; 0 too "
                         "long, 0 cut, 1 identical");
    how.data.max_samples = 0;
    make_file("2.jsonl", "{\"p\": \"a\", \"c\": \"b\", \"r\": \"c\"}\nnot JSON\n");
    EXPECT(load_pairs(both, how) == -1 && holds(message.text, "2.jsonl:2: broken JSON"));
    EXPECT(!pairs.pairs && !pairs.counts.read && !pairs.tokens); /* nothing half read */
    return true;
}

static bool broken_pairs_are_named(void) {
    static const char *const cases[][2] = {
        {"", "x.jsonl: the file is empty; give one with at least one record"},
        {"\n \n", "x.jsonl: only empty lines"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\"}\n[1]",
         "x.jsonl:2: the line is a list, but an object"},
        {"{\"c\": \"b\", \"r\": \"d\"}",
         "x.jsonl:1: no key \"p\"; set --prompt_key to one of those present: \"c\", \"r\""},
        {"{\"p\": \"a\", \"chosen\": \"b\"}",
         "x.jsonl:1: no key \"c\"; set --chosen_key to one of those"},
        {"{\"p\": \"a\", \"c\": \"b\"}",
         "x.jsonl:1: no key \"r\"; set --rejected_key to one of those"},
        {"{\"p\": 1, \"c\": \"b\", \"r\": \"d\"}",
         "x.jsonl:1: \"p\" is a number, but text is needed"},
        {"{\"p\": \"a\", \"c\": [{}], \"r\": \"d\"}",
         "x.jsonl:1: \"c\" is a list, but text is needed; demos/prepare.py makes a token file"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": null}",
         "x.jsonl:1: \"r\" is null, but text is needed"},
        {"{\"p\": \"a\", \"c\": \"\", \"r\": \"d\"}",
         "x.jsonl:1: \"c\" is empty, but a response needs a token; fill it or remove the line"},
        {"\n{\"p\": \"a\", \"c\": \"b\", \"r\": \"\"}",
         "x.jsonl:2: \"r\" is empty, but a response needs a token"},
        {"{\"p\": \"a\", \"c\": \"b\\u0000\", \"r\": \"d\"}",
         "x.jsonl:1: the line has a zero character"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\", \"margin\": \"1\"}",
         "x.jsonl:1: \"margin\" is text, but a number is needed; or set --margin_key"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\", \"margin\": 1e999}",
         "x.jsonl:1: \"margin\" is inf, but a finite"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\"}",
         "x.jsonl: margins are asked for, but no pair has a \"margin\"; set --margin_key"},
        {"{\"prompt_ids\": [1], \"chosen_ids\": [2]}",
         "x.jsonl:1: no key \"rejected_ids\"; a pair of ids is \"prompt_ids\", \"chosen_ids\" "
         "and \"rejected_ids\""},
        {"{\"chosen_ids\": [1], \"rejected_ids\": [2]}",
         "x.jsonl:1: no key \"prompt_ids\"; a pair of ids is"},
        {"{\"prompt_ids\": 1, \"chosen_ids\": [2]}",
         "x.jsonl:1: \"prompt_ids\" is a number, but a list is needed"},
        {"{\"prompt_ids\": [1], \"chosen_ids\": [2], \"rejected_ids\": [259]}",
         "x.jsonl:1: rejected_ids[0] is 259, but it must be a whole number from 0 to 258"},
        {"{\"prompt_ids\": [1, -1], \"chosen_ids\": [2], \"rejected_ids\": [2]}",
         "x.jsonl:1: prompt_ids[1] is -1, but it must be a whole number from 0 to 258"},
        {"{\"prompt_ids\": [1], \"chosen_ids\": [], \"rejected_ids\": [2]}",
         "x.jsonl:1: \"chosen_ids\" leaves no response token in a document of 1 tokens; give one or "
         "remove the line"},
        {"{\"prompt_ids\": [], \"chosen_ids\": [1, 2], \"rejected_ids\": [2]}",
         "x.jsonl:1: \"rejected_ids\" leaves no response token in a document of 1 tokens"},
        {"{\"prompt_ids\": [1], \"chosen_input_ids\": [2]}",
         "x.jsonl:1: ids in two forms, chosen_ids and chosen_input_ids; leave out one of them"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2]}",
         "x.jsonl:1: no key \"rejected_input_ids\"; both halves of a pair are needed"},
        {"{\"chosen_input_ids\": [1, 2], \"rejected_input_ids\": [1, 3]}",
         "x.jsonl:1: no key \"chosen_labels\"; add it, with -100 for the tokens of "
         "\"chosen_input_ids\" that are the"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [2, -100]}",
         "x.jsonl:1: chosen_labels[0] is 2 but chosen_input_ids[0] is 1; a label must be "
         "-100 or the id at the same index"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100]}",
         "x.jsonl:1: 1 chosen_labels for 2 chosen_input_ids; give one for each token"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, -100]}",
         "x.jsonl:1: \"chosen_input_ids\" leaves no response token in a document of 2 tokens"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2], "
         "\"chosen_attention_mask\": [1]}",
         "x.jsonl:1: 1 chosen_attention_mask for 2 chosen_input_ids; give one for each token"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2], "
         "\"chosen_attention_mask\": \"11\"}",
         "x.jsonl:1: \"chosen_attention_mask\" is text, but a list is needed"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2], "
         "\"chosen_attention_mask\": [1, 2]}",
         "x.jsonl:1: chosen_attention_mask[1] is 2, but it must be a whole number from 0 to 1"},
        {"{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, -100, 3], "
         "\"chosen_attention_mask\": [1, 0, 1]}",
         "x.jsonl:1: chosen_attention_mask[1] is 0 and chosen_attention_mask[2] is 1; zeros "
         "are allowed only at the"},
        {"{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, 2, 3], "
         "\"chosen_attention_mask\": [1, 1, 0]}",
         "x.jsonl:1: chosen_labels[2] supervises padding, because chosen_attention_mask[2] "
         "is 0; make it -100"},
        {"{\"chosen_input_ids\": [1, 2, 3], \"chosen_loss_mask\": [1, 1, 1], "
         "\"chosen_attention_mask\": [0, 1, 1]}",
         "x.jsonl:1: chosen_loss_mask[0] supervises padding, because "
         "chosen_attention_mask[0] is 0; make it 0"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, -100], "
         "\"chosen_attention_mask\": [0, 0]}",
         "x.jsonl:1: \"chosen_input_ids\" leaves no response token in a document of 0 tokens"},
    };
    demo_pair_options how = prompted;
    how.margins = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(load_pairs(make_file("x.jsonl", cases[i][0]), how) == -1);
        if (!holds(message.text, cases[i][1])) EXPECT_TEXT(message.text, cases[i][1]);
        EXPECT(!pairs.pairs && !pairs.counts.read);
    }
    EXPECT(load_pairs(make_file("x.txt", "text"), how) == -1 &&
           holds(message.text, "x.txt: plain text holds no records"));
    EXPECT(load_pairs("none.jsonl", how) == -1 &&
           holds(message.text, "none.jsonl: cannot be read: No such file"));
    how.data.vocab_size = 100;
    EXPECT(load_pairs(make_file("v.jsonl", "{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\"}"),
                      how) == -1);
    EXPECT(
        holds(message.text, "v.jsonl:1: text without a tokenizer needs a vocabulary of 259"));
    how.data.input_template = "no hole";
    EXPECT(load_pairs("v.jsonl", how) == -1 &&
           holds(message.text, "input_template must have {} once, in the place of the "
                               "prompt, but has none: no hole"));
    return true;
}

/* ---- labelled responses ---- */

static const demo_labelled_options judged = {.data = {.input_key = "q", .output_key = "a"},
                                             .label_key = "l"};

static bool labels_are_read_in_every_spelling(void) {
    static const char *const labels[] = {"true",  "1", "\"1\"", "1.0",
                                         "false", "0", "\"0\"", "-0"};
    for (int i = 0; i < 8; i++) {
        char line[256];
        snprintf(line, sizeof line,
                 "{\"q\": \"ab\", \"a\": \"c\", \"l\": %s}\n"
                 "{\"input_ids\": [0, 65, 0], \"labels\": [-100, -100, 0], \"l\": %s}",
                 labels[i], labels[i]);
        EXPECT(load_labelled(make_file("k.jsonl", line), judged) == 0 &&
               arrlen(labelled.records) == 2);
        EXPECT(labelled.records[0].desirable == (i < 4) &&
               labelled.records[1].desirable == (i < 4));
        EXPECT(labelled.counts.desirable == (i < 4 ? 2 : 0) &&
               labelled.counts.undesirable == (i < 4 ? 0 : 2));
        EXPECT_TEXT(shown_document(&labelled.records[0].document), "[B]ab|c[E]");
        EXPECT(labelled.records[0].prompt_tokens == 3 &&
               labelled.records[1].prompt_tokens == 2);
        EXPECT(labelled.records[1].document.ids[2] == 0 &&
               labelled.records[1].document.loss_mask[2] == 1);
    }
    EXPECT(load_labelled(
               make_file("d.jsonl",
                         "{\"input\": \"\xC3\xA9\", \"output\": \"b\", \"label\": true}"),
               (demo_labelled_options){.data.input_template = "<{}>"}) == 0);
    EXPECT_TEXT(shown_document(&labelled.records[0].document), "[B]<\xC3\xA9>|b[E]");
    return true;
}

static bool labelled_responses_are_counted(void) {
    char summary[320];
    const char *path = make_file(
        "c.jsonl", "{\"q\": \"ab\", \"a\": \"cdef\", \"l\": 1}\n"
                   "{\"q\": \"abcd\", \"a\": \"c\", \"l\": 0}\n"
                   "{\"q\": \"\", \"a\": \"c\", \"l\": 0}\n"
                   "{\"input_ids\": [9, 1, 2, 9], \"labels\": [-100, -100, 2, -100],"
                   " \"attention_mask\": [0, 1, 1, 0], \"l\": true}\n");
    demo_labelled_options how = judged;
    how.data.max_len = 6;
    EXPECT(load_labelled(path, how) == 0);
    demo_labelled_summary(&labelled, summary, sizeof summary);
    EXPECT_TEXT(summary, "4 read, 2 kept with 5 tokens, 3 of them supervised; 1 desirable, 1 "
                         "undesirable; 2 too long, 0 cut");
    EXPECT(labelled.records[1].document.tokens == 2 &&
           labelled.records[1].document.ids[0] == 1);
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_labelled(path, how) == 0);
    demo_labelled_summary(&labelled, summary, sizeof summary);
    EXPECT_TEXT(summary, "4 read, 3 kept with 11 tokens, 6 of them supervised; 2 desirable, 1 "
                         "undesirable; 1 too long, 1 cut");
    EXPECT_TEXT(shown_document(&labelled.records[0].document), "[B]ab|cd[E]");
    how.data.max_len = 1;
    EXPECT(load_labelled(path, how) == -1 &&
           holds(message.text, "c.jsonl: no response is left (4 read, 0 kept"));
    how.data.max_len = 0;
    how.data.max_samples = 3;
    EXPECT(load_labelled(path, how) == 0 && arrlen(labelled.records) == 3 &&
           labelled.counts.read == 3);
    return true;
}

static bool broken_labels_are_named(void) {
    static const char *const cases[][2] = {
        {"{\"q\": \"a\", \"a\": \"b\"}",
         "x.jsonl:1: no key \"l\"; set --label_key to one of those present: \"q\", \"a\""},
        {"{\"a\": \"b\", \"l\": 1}", "x.jsonl:1: no key \"q\"; set --input_key to one of"},
        {"{\"q\": \"b\", \"l\": 1}", "x.jsonl:1: no key \"a\"; set --output_key to one of"},
        {"{\"q\": \"a\", \"a\": 3, \"l\": 1}",
         "x.jsonl:1: \"a\" is a number, but text is needed"},
        {"{\"q\": \"a\", \"a\": \"\", \"l\": 1}",
         "x.jsonl:1: \"a\" is empty, but a response needs a token"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": 2}",
         "x.jsonl:1: \"l\" is 2, but it must be true or false, 1 or 0"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": -1}",
         "x.jsonl:1: \"l\" is -1, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": 0.5}",
         "x.jsonl:1: \"l\" is 0.5, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": \"good\"}",
         "x.jsonl:1: \"l\" is \"good\", but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": \"\"}",
         "x.jsonl:1: \"l\" is \"\", but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": null}",
         "x.jsonl:1: \"l\" is null, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": [1]}",
         "x.jsonl:1: \"l\" is a list, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": 1}\n{\"input_ids\": [1, 2], \"l\": 1}",
         "x.jsonl:2: no key \"labels\"; add it, with -100 for the tokens of \"input_ids\" that "
         "are the prompt"},
        {"{\"input_ids\": [1, 2], \"labels\": [-100, -100], \"l\": 1}",
         "x.jsonl:1: \"input_ids\" leaves no response token in a document of 2 tokens"},
        {"{\"input_ids\": [1], \"labels\": [1], \"l\": 1}",
         "x.jsonl:1: \"input_ids\" leaves no response token"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(load_labelled(make_file("x.jsonl", cases[i][0]), judged) == -1);
        if (!holds(message.text, cases[i][1])) EXPECT_TEXT(message.text, cases[i][1]);
        EXPECT(!labelled.records && !labelled.counts.read);
    }
    return true;
}

/* Loads three records and pairs them up in the order 2, 0, 1. */
static bool mismatches_are(const char *lines, int64_t max_len, const char *const want[3]) {
    static const int64_t step[] = {2, 0, 1};
    demo_document documents[3];
    demo_labelled_options how = judged;
    how.data.max_len = max_len;
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_labelled(make_file("m.jsonl", lines), how) == 0 &&
           arrlen(labelled.records) == 3);
    EXPECT(demo_mismatched_step(documents, &labelled, step, 3, &how.data, &message) == 0);
    for (int i = 0; i < 3; i++) {
        EXPECT_TEXT(shown_document(&documents[i]), want[i]);
        EXPECT(arrlen(documents[i].ids) == documents[i].tokens);
        EXPECT(arrlen(documents[i].loss_mask) == documents[i].tokens);
        demo_document_free(&documents[i]);
    }
    return true;
}

static bool prompts_meet_the_next_response(void) {
    static const char lines[] =
        "{\"q\": \"a\", \"a\": \"1\", \"l\": 1}\n{\"q\": \"bb\", \"a\": \"22\", \"l\": 0}\n"
        "{\"q\": \"cccc\", \"a\": \"3\", \"l\": 0}\n";
    static const char *const whole[] = {"[B]cccc|1[E]", "[B]a|22[E]", "[B]bb|3[E]"};
    static const char *const tight[] = {"[B]cccc|1[E]", "[B]a|2222[E]", "[B]bb|3[E]"};
    static const char ids[] =
        "{\"input_ids\": [65, 66], \"labels\": [-100, 66], \"l\": 1}\n"
        "{\"input_ids\": [65, 66, 67, 68], \"labels\": [-100, 66, -100, 68], \"l\": 1}\n"
        "{\"input_ids\": [88, 89, 90], \"labels\": [-100, -100, 90], \"l\": 0}\n";
    static const char *const mixed[] = {"XY|B", "A|B|C|D", "A|Z"};
    static const char longer[] =
        "{\"q\": \"a\", \"a\": \"1\", \"l\": 1}\n{\"q\": \"bb\", \"a\": \"2222\", \"l\": 0}\n"
        "{\"q\": \"cccc\", \"a\": \"3\", \"l\": 0}\n";
    static const char swapped[] = "{\"q\": \"a\", \"a\": \"11111\", \"l\": 1}\n"
                                  "{\"q\": \"bb\", \"a\": \"2\", \"l\": 0}\n"
                                  "{\"q\": \"cccc\", \"a\": \"3\", \"l\": 0}\n";
    /* the first has room for two */
    static const char *const cut[] = {"[B]cccc|11[E]", "[B]a|2[E]", "[B]bb|3[E]"};
    EXPECT(mismatches_are(lines, 0, whole) && mismatches_are(longer, 8, tight) &&
           mismatches_are(ids, 0, mixed));
    EXPECT(mismatches_are(swapped, 8, cut));
    demo_document alone;
    int64_t first = 0;
    EXPECT(demo_mismatched_step(&alone, &labelled, &first, 1, &judged.data, &message) == -1);
    EXPECT_TEXT(message.text,
                "KTO's KL term pairs each prompt with another document's response, but a "
                "step has 1 document; set --train_batch_size to 2 or more");
    return true;
}

/* ---- real data ---- */

/* Counts from another reader of the same files: Python's json, and prepare.py's search for the
   prompt, on characters. */
static bool real_pairs_load(void) {
    demo_pair_options how = {.prompt_key = "prompt",
                             .data.input_template = "User: {}\nAssistant: "};
    const char *path = real_path("gsm8k_preferences.jsonl");
    EXPECT(load_pairs(path, how) == 0 && pairs.counts.read == 3275 &&
           arrlen(pairs.pairs) == 3275);
    EXPECT(pairs.tokens == 3901497 && pairs.supervised_tokens == 2096829 &&
           pairs.counts.identical == 0);
    how.data.max_len = 512;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 970 &&
           pairs.counts.dropped_long == 3275 - 970);
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 3178 &&
           pairs.counts.cut == 2208);
    EXPECT(load_pairs(path, (demo_pair_options){0}) == 0 && arrlen(pairs.pairs) == 3275);
    EXPECT(pairs.tokens == 2103379 && pairs.supervised_tokens == 2063093);
    return true;
}

static bool real_labels_load(void) {
    demo_labelled_options how = {.data = {.input_key = "prompt", .output_key = "completion"}};
    const char *path = real_path("gsm8k_labeled.jsonl");
    EXPECT(load_labelled(path, how) == 0 && labelled.counts.read == 5276 &&
           arrlen(labelled.records) == 5276);
    EXPECT(labelled.counts.desirable == 2001 && labelled.counts.undesirable == 3275);
    EXPECT(labelled.tokens == 2762218 && labelled.supervised_tokens == 1490734);
    how.data.max_len = 512;
    EXPECT(load_labelled(path, how) == 0 && arrlen(labelled.records) == 2902);
    for (int64_t i = 1; i < arrlen(labelled.records); i++) {
        demo_document document = demo_mismatched(&labelled.records[i - 1], &labelled.records[i],
                                                 &how.data);
        EXPECT(document.tokens <= 512 && demo_supervised(&document) >= 2);
        EXPECT(document.ids[0] == DEMO_BOS && document.ids[document.tokens - 1] == DEMO_EOS);
        demo_document_free(&document);
    }
    return true;
}

static const trainer_case cases[] = {
    CASE(pairs_share_a_prompt),
    CASE(prompts_are_found_in_whole_texts),
    CASE(pair_ids_are_taken_as_they_are),
    CASE(padding_makes_no_difference),
    CASE(long_pairs_are_dropped_or_cut_whole),
    CASE(pairs_of_every_size_are_sound),
    CASE(pairs_are_counted),
    CASE(broken_pairs_are_named),
    CASE(labels_are_read_in_every_spelling),
    CASE(labelled_responses_are_counted),
    CASE(broken_labels_are_named),
    CASE(prompts_meet_the_next_response),
    CASE_ON(real_pairs_load, "gsm8k_preferences.jsonl"),
    CASE_ON(real_labels_load, "gsm8k_labeled.jsonl"),
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    trainer_cases(cases, sizeof cases / sizeof *cases);
    demo_pairs_free(&pairs);
    demo_labelled_free(&labelled);
    return test_summary();
}
