/* SPDX-License-Identifier: MIT OR Unlicense */
/* Records, texts and streams as documents of tokens: what is supervised, what is cut or
   dropped, what is counted, and sentences about what is wrong in a line. */
#define STB_DS_IMPLEMENTATION
#include "trainer/data/holdout.h"
#include "support/trainer_documents.h"

static bool text_is_masked(void) {
    const char *path = make_file("a.jsonl", "{\"q\": \"ab\", \"a\": \"cd\"}\n");
    EXPECT(load(path, ask) == 0 && arrlen(set.documents) == 1);
    EXPECT_TEXT(shown(0), "[B]Q ab? |cd[E]");
    const demo_document *document = &set.documents[0];
    EXPECT(document->tokens == 10 && set.tokens == 10 && set.supervised_tokens == 3);
    EXPECT(document->ids[0] == 256 && document->ids[1] == 'Q' && document->ids[9] == 257);
    EXPECT(load(path, (demo_data_options){.input_key = "q", .output_key = "a"}) == 0);
    EXPECT_TEXT(shown(0), "[B]ab|cd[E]");
    /* without output_key the text itself */
    EXPECT(load(path, (demo_data_options){.input_key = "q"}) == 0);
    EXPECT_TEXT(shown(0), "[B]|ab[E]");
    EXPECT(load(path, (demo_data_options){
                          .input_key = "q", .output_key = "a", .pretrain_mode = true}) == 0);
    EXPECT_TEXT(shown(0), "[B]|ab");
    EXPECT(load(path, (demo_data_options){
                          .input_key = "q", .output_key = "a", .train_on_inputs = true}) == 0);
    EXPECT_TEXT(shown(0), "[B]|abcd[E]");
    EXPECT(load(path, (demo_data_options){
                          .input_key = "q", .output_key = "a", .input_template = "-{}:"}) == 0);
    EXPECT_TEXT(shown(0), "[B]-ab:|cd[E]");
    return true;
}

static bool line_ends_and_marks_do_not_matter(void) {
    EXPECT(load(make_file("b.jsonl", "\xEF\xBB\xBF{\"q\": \"a\", \"a\": \"b\"}\r\n\r\n  "
                                     "\n{\"q\": \"c\", \"a\": \"d\"}"),
                ask) == 0);
    EXPECT(arrlen(set.documents) == 2 && set.counts.read == 2);
    EXPECT_TEXT(shown(0), "[B]Q a? |b[E]");
    EXPECT_TEXT(shown(1), "[B]Q c? |d[E]");
    return true;
}

static bool text_is_utf8(void) {
    EXPECT(load(make_file("u.jsonl", "{\"q\": \"\\u00e9\\n\", \"a\": \"\xE2\x82\xAC\"}\n"),
                ask) == 0);
    EXPECT_TEXT(shown(0), "[B]Q \xC3\xA9\n? |\xE2\x82\xAC[E]");
    return true;
}

static bool ids_carry_their_own_mask(void) {
    EXPECT(
        load(make_file("i.jsonl",
                       "{\"input_ids\": [65, 66, 67, 68], \"labels\": [-100, -100, 67, 68]}\n"
                       "{\"input_ids\": [65, 66, 67], \"loss_mask\": [1, 0, 1]}\n"
                       "{\"input_ids\": [65, 66, 67], \"loss_mask\": [true, true, false]}\n"
                       "{\"input_ids\": [256, 65, 257]}\n"),
             ask) == 0);
    EXPECT_TEXT(shown(0), "AB|CD");
    EXPECT_TEXT(shown(1), "AB|C"); /* nothing predicts a first token */
    EXPECT_TEXT(shown(2), "A|B|C");
    EXPECT_TEXT(shown(3), "[B]|A[E]");
    EXPECT(set.supervised_tokens == 2 + 1 + 1 + 2);
    return true;
}

static bool long_documents_are_dropped_or_cut(void) {
    const char *path = make_file("long.jsonl",
                                 "{\"q\": \"ab\", \"a\": \"cdefgh\"}\n" /* [B] 2 + 6 [E] = 10
                                                                           tokens */
                                 "{\"q\": \"ab\", \"a\": \"c\"}\n"      /* 5 */
                                 "{\"q\": \"abcdefg\", \"a\": \"c\"}\n" /* 10, of which 8 are
                                                                           prompt */
                                 "{\"input_ids\": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n");
    demo_data_options how = {.input_key = "q", .output_key = "a", .max_len = 7};
    EXPECT(load(path, how) == 0 && set.counts.read == 4 && set.counts.dropped_long == 3 &&
           arrlen(set.documents) == 1);
    EXPECT_TEXT(shown(0), "[B]ab|c[E]");
    how.long_documents = DEMO_LONG_CUT;
    EXPECT(load(path, how) == 0 && set.counts.dropped_long == 1 && set.counts.cut == 2 &&
           arrlen(set.documents) == 3);
    EXPECT_TEXT(shown(0), "[B]ab|cde[E]");
    EXPECT(set.documents[0].tokens == 7 && arrlen(set.documents[0].ids) == 7);
    /* ids are cut as they are */
    EXPECT(set.documents[2].tokens == 7 && set.documents[2].ids[6] == 7);
    how.max_len = 10; /* a prompt of eight tokens leaves less than the three that it must */
    EXPECT(load(path, how) == 0 && set.counts.cut == 0 && set.counts.dropped_long == 1);
    how.max_len = 11;
    EXPECT(load(path, how) == 0 && set.counts.cut == 0 && set.counts.dropped_long == 0);
    how.long_documents = DEMO_LONG_CUT_BOTH;
    how.max_len = 7;
    EXPECT(load(path, how) == 0 && set.counts.cut == 3 && set.counts.dropped_long == 0);
    EXPECT_TEXT(shown(0), "[B]ab|cdef");
    EXPECT_TEXT(shown(2), "[B]abcd|c[E]");
    EXPECT(set.documents[2].loss_mask[4] == 0 && set.documents[2].loss_mask[5] == 1);
    EXPECT(set.documents[3].tokens == 7 && set.documents[3].ids[6] == 7);
    how.long_documents = DEMO_LONG_CUT;
    how.pretrain_mode = true;
    how.max_len = 3;
    EXPECT(load(path, how) == 0 && set.counts.cut == 2);
    EXPECT_TEXT(shown(2), "[B]|ab"); /* no EOS is forced on plain text */
    return true;
}

static bool empty_and_masked_documents_are_counted(void) {
    EXPECT(load(make_file("z.jsonl", "{\"q\": \"a\", \"a\": \"\"}\n{\"input_ids\": "
                                     "[]}\n{\"q\": \"\", \"a\": \"b\"}\n"
                                     "{\"input_ids\": [5, 6], \"labels\": [5, -100]}\n{\"q\": "
                                     "\"a\", \"a\": \"b\"}\n"),
                (demo_data_options){.input_key = "q", .output_key = "a"}) == 0);
    EXPECT(set.counts.read == 5 && set.counts.zero_length == 3 && set.counts.fully_masked == 1);
    EXPECT(arrlen(set.documents) == 2 && set.supervised_tokens == 2);
    char summary[256];
    demo_data_summary(&set, summary, sizeof summary);
    EXPECT_TEXT(summary, "5 read, 2 kept with 6 tokens, 2 of them supervised; 0 too long, 3 "
                         "empty, 0 cut, 1 fully masked");
    return true;
}

static bool streams_are_cut_into_documents(void) {
    const char *path = make_file("s.txt", "\xEF\xBB\xBFthe quick\r\nfox");
    EXPECT(load(path, (demo_data_options){.pretrain_mode = true, .max_len = 6}) == 0);
    EXPECT(arrlen(set.documents) == 3 && set.counts.read == 3 && set.tokens == 14 &&
           set.supervised_tokens == 14 - 3);
    EXPECT_TEXT(shown(0), "t|he qu");
    EXPECT_TEXT(shown(1), "i|ck\r\nf");
    EXPECT_TEXT(shown(2), "o|x");
    EXPECT(load(path, (demo_data_options){.max_len = 6}) == -1 &&
           holds(message.text, "s.txt: plain text needs --pretrain_mode"));
    EXPECT(load(path, (demo_data_options){.pretrain_mode = true}) == -1 &&
           holds(message.text, "set --max_len to 2 or more"));
    return true;
}

/* Texts of two files: ended, cut without an end, and side by side, as LLaMA-Factory's stage pt. */
static bool texts_end_and_are_joined_as_in_stage_pt(void) {
    char both[1100];
    const char *one = make_file("p.jsonl",
                                "{\"t\": \"abc\"}\n{\"t\": \"\"}\n{\"t\": \"defgh\"}\n");
    const char *two = make_file("r.jsonl", "{\"t\": \"ij\"}\n{\"t\": \"k\"}\n");
    demo_data_options how = {.input_key = "t",
                             .pretrain_mode = true,
                             .pretrain_eos = true,
                             .max_len = 5,
                             .long_documents = DEMO_LONG_CUT_BOTH};
    snprintf(both, sizeof both, "%s,%s", one, two);
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 4 && set.counts.zero_length == 1);
    EXPECT_TEXT(shown(0), "[B]|abc[E]");
    EXPECT_TEXT(shown(1), "[B]|defg");
    EXPECT_TEXT(shown(2), "[B]|ij[E]");
    how.long_documents = DEMO_LONG_CUT;
    EXPECT(load(both, how) == 0);
    EXPECT_TEXT(shown(1), "[B]|defg");
    how.pretrain_blocks = true;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 3 && set.counts.read == 5);
    EXPECT(set.tokens == 15 && set.supervised_tokens == 12 && set.counts.zero_length == 1);
    EXPECT_TEXT(shown(0), "a|bc[E]d");
    EXPECT_TEXT(shown(1), "e|fgh[E]");
    EXPECT_TEXT(shown(2), "i|j[E]k[E]");
    how.max_samples = 2; /* a part of each file: abc, and ij */
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 1 && set.counts.read == 2);
    how.max_len = 16;
    EXPECT(load(both, how) == -1 && holds(message.text, "0 kept"));
    EXPECT(load(make_file("s.txt", "one\n"), how) == -1 &&
           holds(message.text, "s.txt: is read as one text"));
    EXPECT(load(make_file("i.jsonl", "{\"input_ids\": [1, 2]}\n"), how) == -1 &&
           holds(message.text, "i.jsonl:1: \"input_ids\" are tokens already"));
    return true;
}

/* numpy 2.4.6: numpy.random.default_rng(seed).permutation(23) */
static bool permutations_are_those_of_numpy(void) {
    static const struct {
        uint64_t seed;
        int64_t order[23];
    } known[] = {
        {42,
         {18, 10, 17, 22, 16, 15, 7, 6, 9, 3, 0, 19, 12, 5, 11, 14, 21, 2, 4, 20, 1, 13, 8}},
        {7, {15, 4, 18, 3, 14, 12, 10, 0, 19, 17, 8, 7, 1, 21, 13, 6, 16, 5, 22, 20, 2, 9, 11}},
        {(1ull << 32) + 5,
         {2, 4, 6, 20, 5, 18, 14, 19, 22, 15, 9, 12, 8, 10, 16, 7, 11, 13, 0, 1, 21, 3, 17}}};
    int64_t order[23];
    for (int i = 0; i < 3; i++) {
        demo_permutation(order, 23, known[i].seed);
        EXPECT(!memcmp(order, known[i].order, sizeof order));
    }
    demo_permutation(order, 1, 3);
    EXPECT(order[0] == 0 && demo_held_count(0.2, 23) == 5 && demo_held_count(7, 23) == 7);
    EXPECT(demo_held_count(1e-9, 23) == 1);
    static const double none[] = {1, 2.5, -1, NAN, INFINITY, 1e10};
    for (int i = 0; i < 6; i++)
        EXPECT(demo_held_size_wrong("val_size", none[i], &message) == -1 &&
               holds(message.text, "a fraction below 1 or a whole number of at least 2"));
    EXPECT(!demo_held_size_wrong("val_size", 0, &message) &&
           !demo_held_size_wrong("val_size", 0.999, &message) &&
           !demo_held_size_wrong("val_size", 2, &message));
    return true;
}

static bool broken_data_is_named(void) {
    static const char *const cases[][2] = {
        {"", "x.jsonl: the file is empty; give one with at least one record"},
        {"\xEF\xBB\xBF", "x.jsonl: the file is empty; give one with at least one record"},
        {"\n\r\n", "x.jsonl: only empty lines; one JSON object per line is needed"},
        {"{\"q\": \"a\", \"a\": \"b\"}\n\n{\"q\": \"a\", \"a\": }\n",
         "x.jsonl:3: broken JSON at column 17; one whole object"},
        {"{\"q\": \"a\", \"a\": \"b\"} {}\n", "x.jsonl:1: broken JSON at column 22"},
        {"[1]\n", "x.jsonl:1: the line is a list, but an object {...} is needed"},
        {"[{\"q\": \"a\", \"a\": \"b\"},\n 5]",
         "x.jsonl:2: the line is a number, but an object {...} is needed"},
        {"[{\"q\": \"a\", \"a\": \"b\"}] {}",
         "x.jsonl: broken JSON at column 24; a list of objects"},
        {"[{\"q\": {\"a\": 1, \"a\": 2}}]", "x.jsonl:1: key \"a\" occurs twice"},
        {"{\"q\": \"a\", \"a\": \"b\"}\n{\"q\": \"\xC3\xA9\", \"a\": \"\xFF\"}",
         "x.jsonl:2: byte 18 is not UTF-8; convert the file to UTF-8"},
        {"{\"q\": \"\xC0\xAF\", \"a\": \"b\"}", "x.jsonl:1: byte 7 is not UTF-8"},
        {"{\"q\": \"\xED\xA0\x80\", \"a\": \"b\"}", "x.jsonl:1: byte 7 is not UTF-8"},
        {"{\"q\": \"\xF4\x90\x80\x80\", \"a\": \"b\"}", "x.jsonl:1: byte 7 is not UTF-8"},
        {"{\"q\": \"\xE2\x82", "x.jsonl:1: byte 7 is not UTF-8"},
        {"\n{\"q\": \"a\", \"b\": 1, \"c\": 2}\n",
         "x.jsonl:2: no key \"a\"; set --output_key to one of those present: \"q\", \"b\", "
         "\"c\""},
        {"{}\n", "x.jsonl:1: no key \"q\"; set --input_key to one of those present: none"},
        {"{\"q\": 3, \"a\": \"b\"}\n", "x.jsonl:1: \"q\" is a number, but text is needed"},
        {"{\"q\": \"a\", \"a\": null}\n", "x.jsonl:1: \"a\" is null, but text is needed"},
        {"{\"q\": [{\"role\": \"user\"}], \"a\": \"b\"}\n",
         "x.jsonl:1: \"q\" is a list, but text is needed; demos/prepare.py makes a token file of "
         "lists of messages"},
        {"{\"q\": \"a\\u0000b\", \"a\": \"b\"}\n", "x.jsonl:1: the line has a zero character"},
        {"{\"\\u0000\": 1, \"q\": \"a\", \"a\": \"b\"}\n", /* within the first bytes */
         "x.jsonl:1: the line has a zero character"},
        {"{\"input_ids\": \"abc\"}\n",
         "x.jsonl:1: \"input_ids\" is text, but a list is needed"},
        {"{\"input_ids\": [1], \"labels\": 1}\n",
         "x.jsonl:1: \"labels\" is a number, but a list is needed"},
        {"{\"input_ids\": [1, 2, 259]}\n",
         "x.jsonl:1: input_ids[2] is 259, but it must be a whole number from 0 to 258"},
        {"{\"input_ids\": [1, -2]}\n",
         "x.jsonl:1: input_ids[1] is -2, but it must be a whole number from 0 to 258"},
        {"{\"input_ids\": [1, 2.0000000001]}\n",
         "input_ids[1] is 2.0000000001, but it must be"},
        {"{\"input_ids\": [1.5]}\n",
         "x.jsonl:1: input_ids[0] is 1.5, but it must be a whole number from 0 to 258"},
        {"{\"input_ids\": [1, \"2\"]}\n",
         "x.jsonl:1: input_ids[1] is text, but a number is needed"},
        {"{\"input_ids\": [1, 2, 3], \"labels\": [1, 2]}\n",
         "x.jsonl:1: 2 labels for 3 input_ids; give one for each token"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [1]}\n",
         "x.jsonl:1: 1 loss_mask for 2 input_ids; give one for each token"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [1, 2]}\n",
         "x.jsonl:1: loss_mask[1] is 2, but it must be a whole number from 0 to 1"},
        {"{\"input_ids\": [1, 2, 3], \"labels\": [2, 3, -100]}\n",
         "labels[0] is 2 but input_ids[0] is 1; a label must be -100 or"},
        {"{\"input_ids\": [1, 2], \"labels\": [1, -100]}\n",
         "no supervised token in the whole set (1 read, 1 kept with 2 tokens, 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(load(make_file("x.jsonl", cases[i][0]), ask) == -1);
        if (!holds(message.text, cases[i][1])) EXPECT_TEXT(message.text, cases[i][1]);
        EXPECT(!set.documents);
    }
    return true;
}

/* Alpaca's prompt is two texts: one alone is taken only by its name. */
static bool half_a_prompt_is_refused(void) {
    const char *path = make_file(
        "h.jsonl", "{\"instruction\": \"a\", \"input\": \"b\", \"output\": \"c\"}");
    demo_data_options how = {.output_key = "output"};
    EXPECT(load(path, how) == -1 &&
           holds(message.text, "h.jsonl:1: the record has both \"instruction\" and \"input\""));
    how.input_key = "input";
    EXPECT(load(path, how) == 0);
    EXPECT_TEXT(shown(0), "[B]b|c[E]");
    return true;
}

/* The sentence of a failed load, behind the path and what follows it. */
static bool load_says(const char *path, demo_data_options how, const char *sentence) {
    char whole[1200];
    EXPECT(load(path, how) == -1 && !set.documents);
    snprintf(whole, sizeof whole, "%s%s", path, sentence);
    EXPECT_TEXT(message.text, whole);
    return true;
}

/* Text for a model whose folder says that bytes are no tokens of it. */
static bool text_of_other_models_is_refused(void) {
    static const char *const records[] = {
        "{\"q\": \"a\", \"a\": \"b\"}", "{\"q\": [1], \"a\": \"b\"}",
        "{\"q\": {\"b\": 1}, \"a\": \"b\"}",
        "{\"instruction\": \"i\", \"input\": \"x\", \"a\": \"b\"}",
        "{\"instruction\": \"i\", \"output\": \"x\", \"a\": \"b\"}"};
#define MAKES  "; make a token file of lists of messages and give it: type this"
#define JOINED ": set the key of the prompt, or let demos/prepare.py join instruction and input"
    static const struct {
        int record;
        const char *prepare, *sentence;
    } cases[] = {
        {1, "type this", "\"q\" is a list, but text is needed" MAKES " --apply_chat_template"},
        {2, "type this",
         "\"q\" is an object, but text is needed" MAKES " --apply_chat_template"},
        {1, "type this --apply_chat_template",
         "\"q\" is a list, but text is needed" MAKES " --apply_chat_template"},
        {3, "type this",
         "the record has both \"instruction\" and \"input\"" JOINED ": type this"},
        {4, "type this",
         "the record has both \"instruction\" and \"output\"" JOINED ": type this"},
        {4, NULL, "the record has both \"instruction\" and \"output\"" JOINED}};
#undef MAKES
#undef JOINED
    char sentence[600];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *path = make_file("o.jsonl", records[cases[i].record]);
        demo_data_options how = {.input_key = cases[i].record < 3 ? "q" : NULL,
                                 .output_key = "a",
                                 .folder = scratch,
                                 .prepare = cases[i].prepare};
        snprintf(sentence, sizeof sentence, ":1: %s", cases[i].sentence);
        if (!load_says(path, how, sentence)) return false;
    }
    const int64_t end = 7;
    demo_data_options how = ask;
    how.folder = scratch;
    how.end = &end;
    snprintf(sentence, sizeof sentence,
             ":1: is text, which without a tokenizer is read as bytes and ends in EOS 257, but "
             "\"eos_token_id\" of %s/config.json is 7; set it to 257, or give input_ids",
             scratch);
    if (!load_says(make_file("o.jsonl", records[0]), how, sentence)) return false;
    how.end = NULL;
    how.vocab_size = 258;
    if (!load_says(make_file("o.jsonl", records[0]), how,
                   ":1: text without a tokenizer needs a vocabulary of 259 (bytes, BOS and "
                   "EOS), but the model has 258; give input_ids"))
        return false;
    how.vocab_size = 259;
    EXPECT(load(make_file("o.jsonl", records[0]), how) == 0);
    return true;
}

/* Where the folder has a template for chats, the hint says so; not for text that has another. */
static bool chat_templates_are_hinted_at(void) {
    static const char hint[] = " (add --apply_chat_template for the model's chat template)";
    static const struct {
        const char *file, *holds, *prepare;
        bool plain, hinted;
    } cases[] = {{"none", "", "type this", false, false},
                 {"chat_template.jinja", "", "type this", false, true},
                 {"chat_template.json", "", "type this", false, true},
                 {"tokenizer_config.json", "{\"chat_template\": 1}", "type this", false, true},
                 {"tokenizer_config.json", "{\"other\": 1}", "type this", false, false},
                 {"chat_template.jinja", "", "type this", true, false},
                 {"chat_template.jinja", "", "type --kind steps", false, false},
                 {"chat_template.jinja", "", "type --apply_chat_template", false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char sentence[600];
        demo_data_options how = {.input_key = "q",
                                 .folder = scratch,
                                 .prepare = cases[i].prepare,
                                 .pretrain_mode = cases[i].plain};
        const char *made = make_file(cases[i].file, cases[i].holds);
        snprintf(
            sentence, sizeof sentence,
            ":1: is text, which only demos/prepare.py can tokenize with the tokenizer in %s; "
            "make a token file and give it%s: %s",
            scratch, cases[i].hinted ? hint : "", cases[i].prepare);
        bool said = load_says(make_file("t.jsonl", "{\"q\": \"a\"}"), how, sentence);
        EXPECT(demo_folder_has(scratch, cases[i].file) && !remove(made) &&
               !demo_folder_has(scratch, cases[i].file));
        if (!said) return false;
    }
    return true;
}

/* Options are named as whoever asks for the data calls them; of many keys the first are shown. */
static bool messages_have_names(void) {
    static char line[2000], shown_keys[1200], sentence[1600];
    demo_data_options how = {
        .input_key = "q", .output_key = "zz", .output_option = "label_key"};
    const char *path = make_file("n.jsonl", "{\"q\": \"a\", \"b\": \"\"}");
    if (!load_says(path, how,
                   ":1: no key \"zz\"; set --label_key to one of those present: \"q\", \"b\""))
        return false;
    how.output_option = NULL;
    if (!load_says(path, how,
                   ":1: no key \"zz\"; set --output_key to one of those present: \"q\", \"b\""))
        return false;
    how.output_key = "b";
    for (int named = 0; named < 2; named++) {
        how.output_option = named ? "some_key" : NULL;
        how.length_option = named ? "some_len" : NULL;
        snprintf(
            sentence, sizeof sentence,
            ": no supervised token in the whole set (1 read, 0 kept with 0 tokens, 0 of them "
            "supervised; 0 too long, 1 empty, 0 cut, 0 fully masked); check --%s and --%s",
            named ? "some_key" : "output_key", named ? "some_len" : "max_len");
        if (!load_says(path, how, sentence)) return false;
    }
    size_t used = 0, seen = 0;
    for (int key = 0; key < 9; key++) {
        used += (size_t)snprintf(line + used, sizeof line - used, "%s\"%0100d\": 1",
                                 key ? ", " : "{", key);
        seen += (size_t)snprintf(shown_keys + seen, sizeof shown_keys - seen, "%s\"%0100d\"",
                                 key ? ", " : "", key);
    }
    snprintf(line + used, sizeof line - used, "}");
    snprintf(sentence, sizeof sentence,
             ":1: no key \"q\"; set --input_key to one of those present: %.255s", shown_keys);
    return load_says(make_file("n.jsonl", line), how, sentence);
}

/* Positions count from the first token that is none of padding. */
static bool positions_count_from_zero(void) {
    static const struct {
        const char *positions;
        int place; /* of the wrong one; -1: none is */
        const char *value;
    } cases[] = {{"[0, 1, 2]", -1, ""},
                 {"[1, 2, 3]", 0, "1"},
                 {"[0, 2, 2]", 1, "2"},
                 {"[0, 1, 0]", 2, "0"}};
    char line[400], sentence[300];
    for (int padded = 0; padded < 2; padded++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            char *all = strdup(cases[i].positions);
            all[strlen(all) - 1] = 0;
            snprintf(
                line, sizeof line,
                padded ? "{\"input_ids\": [7, 65, 66, 67, 7], \"attention_mask\": [0, 1, 1, 1, "
                         "0], \"position_ids\": [9, %s, 9]}"
                       : "{\"input_ids\": [65, 66, 67], \"position_ids\": [%s]}",
                all + 1);
            free(all);
            const char *path = make_file("p.jsonl", line);
            snprintf(sentence, sizeof sentence,
                     ":1: position_ids[%d] is %s, but a document's positions must be 0, 1, 2, "
                     "...; give each document its own record",
                     cases[i].place + padded, cases[i].value);
            if (cases[i].place >= 0 && !load_says(path, ask, sentence)) return false;
            if (cases[i].place >= 0) continue;
            EXPECT(load(path, ask) == 0);
            EXPECT_TEXT(shown(0), "A|BC");
        }
    return load_says(make_file("p.jsonl", "{\"input_ids\": [65, 66], \"position_ids\": [0]}"),
                     ask, ":1: 1 position_ids for 2 input_ids; give one for each token") &&
           load_says(make_file("p.jsonl", "{\"input_ids\": [65, 66], \"position_ids\": 0}"),
                     ask, ":1: \"position_ids\" is a number, but a list is needed");
}

/* Every length that a record is cut to, and arrays that are as long as it says. */
static bool records_are_cut_to_any_length(void) {
    for (int ends = 0; ends < 2; ends++)
        for (int64_t most = 0; most < 8; most++) {
            demo_record record = {.ends_in_eos = ends};
            demo_document *d = &record.document;
            for (int32_t t = 0; t < 5; t++) {
                demo_push(d, 70 + t, t == 3);
                arrput(d->targets, t);
                arrput(d->shares, 1);
            }
            demo_record_cut(&record, most);
            int64_t kept = most && most < 5 ? most : 5;
            bool cut = kept < 5 && ends;
            EXPECT(d->tokens == kept && arrlen(d->ids) == kept &&
                   arrlen(d->loss_mask) == kept && arrlen(d->targets) == kept &&
                   arrlen(d->shares) == kept);
            EXPECT(d->ids[kept - 1] == (cut ? DEMO_EOS : 70 + kept - 1));
            EXPECT(d->loss_mask[kept - 1] == (cut ? kept > 1 : kept == 4));
            EXPECT(demo_supervised(d) == (kept > 3) + (cut && kept > 1 && kept < 4));
            d->loss_mask[0] = 1; /* as a target of a process reward model may have */
            EXPECT(demo_supervised(d) == (kept > 3) + (cut && kept > 1 && kept < 4) + 1);
            demo_document_free(d);
        }
    demo_data_options both = {.input_key = "q",
                              .output_key = "a",
                              .max_len = 6,
                              .long_documents = DEMO_LONG_CUT_BOTH};
    EXPECT(load(make_file("c.jsonl", "{\"q\": \"abcdefgh\", \"a\": \"ijklmnop\"}\n"
                                     "{\"q\": \"a\", \"a\": \"ijklmnop\"}\n"
                                     "{\"q\": \"ab\", \"a\": \"cd\"}\n"),
                both) == 0);
    for (int i = 0; i < 3; i++)
        EXPECT(arrlen(set.documents[i].ids) == set.documents[i].tokens &&
               arrlen(set.documents[i].loss_mask) == set.documents[i].tokens &&
               set.documents[i].tokens == 6);
    return true;
}

/* Texts that are compared by their last number must have one, in the response. */
static bool answers_have_numbers(void) {
    static const char wrong[] =
        ":%d: the right answer has no number, but responses are compared with its last "
        "number; set --%s to a key whose text has a number, or remove the line";
    static const struct {
        const char *lines;
        int line; /* that is refused; 0: none is */
    } cases[] = {{"{\"q\": \"a\", \"a\": \"is 0\"}", 0},
                 {"{\"q\": \"a\", \"a\": \"9.\"}\n{\"q\": \"7\", \"a\": \"none\"}", 2},
                 {"{\"q\": \"a\", \"a\": \"/:\"}", 1},
                 {"{\"q\": \"a\", \"a\": \"\"}\n{\"q\": \"a\", \"a\": \"1\"}", 0},
                 {"{\"input_ids\": [65, 305, 48], \"loss_mask\": [0, 1, 0]}", 1},
                 {"{\"input_ids\": [65, 66, 48], \"loss_mask\": [0, 0, 1]}", 0}};
    demo_data_options how = {
        .input_key = "q", .output_key = "a", .number = true, .vocab_size = 400};
    char sentence[300];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *path = make_file("n.jsonl", cases[i].lines);
        how.output_option = i % 2 ? "label_key" : NULL;
        snprintf(sentence, sizeof sentence, wrong, cases[i].line,
                 i % 2 ? "label_key" : "output_key");
        if (cases[i].line && !load_says(path, how, sentence)) return false;
        if (!cases[i].line) EXPECT(load(path, how) == 0);
        how.number = false;
        EXPECT(load(path, how) == 0);
        how.number = true;
    }
    return true;
}

/* Characters of UTF-8 and what looks like them: each place of each length. */
static bool characters_are_whole(void) {
    static const struct {
        const char *text;
        int wrong; /* byte; -1: none is */
    } cases[] = {{"\xFF{}", 0},
                 {"\"\xC2\x80\"", -1},
                 {"\"\xC1\xBF\"", 1},
                 {"\"\xC2\x7F\"", 1},
                 {"\"\xC2\xC0\"", 1},
                 {"\"\xDF\xBF\"", -1},
                 {"\"\xE0\x9F\xBF\"", 1},
                 {"\"\xE0\xA0\x80\"", -1},
                 {"\"\xE2\x82x\"", 1},
                 {"\"\xE2\x82\xC0\"", 1},
                 {"\"\xED\x9F\xBF\"", -1},
                 {"\"\xEE\x80\x80\"", -1},
                 {"\"\xEF\xBF\xBF\"", -1},
                 {"\"\xF0\x8F\xBF\xBF\"", 1},
                 {"\"\xF0\x90\x80\x80\"", -1},
                 {"\"\xF0\x9F\x98x\"", 1},
                 {"\"\xF0\x9Fx\x98\"", 1},
                 {"\"\xF0\x9F\x98\x7F\"", 1},
                 {"\"\xF4\x8F\xBF\xBF\"", -1},
                 {"\"\xF5\x80\x80\x80\"", 1},
                 {"\"\xF3\xBF\xBF\xBF\"", -1}};
    char sentence[200];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *path = make_file("u.txt", cases[i].text);
        demo_data_options how = {.pretrain_mode = true, .max_len = 9};
        snprintf(sentence, sizeof sentence, ": byte %d is not UTF-8; convert the file to UTF-8",
                 cases[i].wrong);
        if (cases[i].wrong >= 0 && !load_says(path, how, sentence)) return false;
        if (cases[i].wrong < 0) EXPECT(load(path, how) == 0);
    }
    return true;
}

/* The shortest piece; texts that fill their pieces; and several streams. */
static bool streams_fill_their_pieces(void) {
    char both[1100];
    demo_data_options how = {.pretrain_mode = true, .max_len = 2};
    const char *one = make_file("one.txt", "abcdef"), *two = make_file("two.txt", "ghi");
    EXPECT(load(one, how) == 0 && arrlen(set.documents) == 3 && set.counts.read == 3 &&
           !set.counts.zero_length);
    how.max_len = 3;
    EXPECT(load(one, how) == 0 && arrlen(set.documents) == 2 && set.counts.read == 2);
    for (how.max_len = 0; how.max_len < 2; how.max_len++)
        if (!load_says(one, how,
                       ": plain text is cut into documents of --max_len tokens; set "
                       "--max_len to 2 or more"))
            return false;
    how.max_len = 4;
    snprintf(both, sizeof both, "%s,%s", one, two);
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 3 &&
           set.documents[2].ids[0] == 'g');
    how.max_samples = 2;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 2 && set.counts.read == 2);
    how.probs = "1,1";
    EXPECT(load(both, how) == -1);
    EXPECT_TEXT(message.text,
                "plain text has no records to sample by weight; leave the weights out");
    return true;
}

/* A backslash that is one is no zero character; nor is what a number begins with. */
static bool backslashes_are_text(void) {
    static const struct {
        const char *line;
        bool taken;
    } cases[] = {{"{\"q\": \"a\\\\u0000b\", \"a\": \"c\"}", true},
                 {"{\"q\": \"a\\\\\\u0000b\", \"a\": \"c\"}", false},
                 {"{\"q\": \"a\\u0001b\", \"a\": \"c\"}", true},
                 {"{\"q\": \"a\", \"a\": \"\\u0000\"}", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        EXPECT(!load(make_file("s.jsonl", cases[i].line), ask) == cases[i].taken &&
               (cases[i].taken || holds(message.text, "s.jsonl:1: the line has a zero")));
    return true;
}

/* Into as little room as there is. */
static bool summaries_fit(void) {
    char whole[256], text[256];
    EXPECT(load(make_file("f.jsonl", "{\"q\": \"a\", \"a\": \"1\"}\n"), ask) == 0);
    demo_data_summary(&set, whole, sizeof whole);
    for (size_t size = 1; size <= strlen(whole) + 1; size++) {
        memset(text, '#', sizeof text);
        demo_data_summary(&set, text, size);
        EXPECT(strlen(text) == size - 1 && !strncmp(text, whole, size - 1) &&
               text[size] == '#' && text[sizeof text - 1] == '#');
    }
    return true;
}

/* FNV-1a by its own examples; and every number of a set counts. */
static bool digests_see_everything(void) {
    EXPECT(demo_digest(DEMO_DIGEST_EMPTY, "", 0) == UINT64_C(0xcbf29ce484222325));
    EXPECT(demo_digest(DEMO_DIGEST_EMPTY, "a", 1) == UINT64_C(0xaf63dc4c8601ec8c));
    EXPECT(demo_digest(DEMO_DIGEST_EMPTY, "foobar", 6) == UINT64_C(0x85944171f73967e8));
    EXPECT(demo_digest(demo_digest(DEMO_DIGEST_EMPTY, "foo", 3), "bar", 3) ==
           UINT64_C(0x85944171f73967e8));
    EXPECT(demo_digest_number(DEMO_DIGEST_EMPTY, 0x61) ==
           demo_digest(DEMO_DIGEST_EMPTY, "a\0\0\0\0\0\0\0", 8));
    uint64_t seen[16];
    for (int way = 0; way < 16; way++) {
        demo_dataset some = {0};
        for (int i = 0; i < 2; i++) {
            demo_document d = {0};
            for (int32_t t = 0; t < 3; t++) demo_push(&d, 5 + t, t == 1);
            if (i) d.ids[way == 1 ? 0 : 2] += way == 1 || way == 2;
            if (!i) d.ids[2] += way == 3;
            d.loss_mask[way == 4 ? 0 : 2] += (way == 4 && i) || (way == 5 && !i) ||
                                             (way == 6 && i);
            if (way == 7 && i) d.tokens = 2;
            if (way == 8 && !i) d.tokens = 2;
            for (int32_t t = 0; t < 3 && way > 8; t++) {
                arrput(d.targets, t + (way == 10 && i && t == 2) + (way == 11 && !i && !t));
                arrput(d.shares,
                       (float)(t + (way == 12 && i && t == 2) + (way == 13 && !i && !t)));
            }
            arrput(some.documents, d);
        }
        if (way == 14) demo_document_free(&some.documents[1]), arrsetlen(some.documents, 1);
        if (way == 15) arrput(some.documents, (demo_document){0});
        seen[way] = demo_digest_documents(&some);
        for (int before = 0; before < way; before++) EXPECT(seen[before] != seen[way]);
        demo_data_free(&some);
    }
    return true;
}

static bool templates_are_checked(void) {
    EXPECT(demo_template_checked("User: {}\n", message.text, sizeof message.text) &&
           !*message.text);
    EXPECT(!demo_template_checked("User:", message.text, sizeof message.text) &&
           holds(message.text, "has no {}"));
    EXPECT(demo_template_checked("User: {}\\n", message.text, sizeof message.text) &&
           holds(message.text, "backslash"));
    EXPECT(!demo_template_checked(NULL, message.text, sizeof message.text) && !*message.text);
    demo_data_options holeless = ask;
    holeless.input_template = "no hole";
    EXPECT(load(make_file("h.jsonl", "{\"q\": \"a\", \"a\": \"b\"}\n"), holeless) == -1 &&
           holds(message.text, "but has none"));
    return true;
}

/* ---- real data ---- */

static bool real_questions_load(void) {
    static const struct {
        const char *name, *in, *out;
        int64_t rows;
    } files[] = {
        {"gsm8k_train.jsonl", "question", "answer", 7473},
        {"gsm8k_test.jsonl", "question", "answer", 1319},
        {"gsm8k_preferences.jsonl", "prompt", "chosen", 3275},
        {"gsm8k_labeled.jsonl", "prompt", "completion", 5276},
    };
    for (int i = 0; i < 4; i++) {
        demo_data_options how = {.input_key = files[i].in,
                                 .output_key = files[i].out,
                                 .input_template = "User: {}\nAssistant: "};
        const char *path = real_path(files[i].name);
        if (!path) continue;
        snprintf(message.text, sizeof message.text, "%s", path);
        EXPECT(load(path, how) == 0);
        EXPECT(set.counts.read == files[i].rows &&
               arrlen(set.documents) + set.counts.zero_length == set.counts.read);
        how.max_len = 512;
        int64_t whole = set.tokens;
        EXPECT(load(path, how) == 0 && set.counts.dropped_long > 0 && set.tokens < whole);
        how.long_documents = DEMO_LONG_CUT;
        EXPECT(load(path, how) == 0 && set.counts.cut > 0 &&
               set.counts.cut + set.counts.dropped_long > 0);
        for (int64_t d = 0; d < arrlen(set.documents); d++) {
            const demo_document *document = &set.documents[d];
            EXPECT(document->tokens <= 512 && document->ids[0] == DEMO_BOS &&
                   document->ids[document->tokens - 1] == DEMO_EOS);
        }
    }
    return true;
}

static bool real_text_loads(void) {
    EXPECT(load(real_path("tinyshakespeare.txt"),
                (demo_data_options){.pretrain_mode = true, .max_len = 1000}) == 0);
    EXPECT(set.tokens == 1115394 && arrlen(set.documents) == 1116 &&
           set.documents[1115].tokens == 394);
    return true;
}

static const trainer_case cases[] = {
    CASE(text_is_masked),
    CASE(line_ends_and_marks_do_not_matter),
    CASE(text_is_utf8),
    CASE(ids_carry_their_own_mask),
    CASE(long_documents_are_dropped_or_cut),
    CASE(empty_and_masked_documents_are_counted),
    CASE(streams_are_cut_into_documents),
    CASE(texts_end_and_are_joined_as_in_stage_pt),
    CASE(permutations_are_those_of_numpy),
    CASE(broken_data_is_named),
    CASE(half_a_prompt_is_refused),
    CASE(text_of_other_models_is_refused),
    CASE(chat_templates_are_hinted_at),
    CASE(messages_have_names),
    CASE(positions_count_from_zero),
    CASE(records_are_cut_to_any_length),
    CASE(answers_have_numbers),
    CASE(characters_are_whole),
    CASE(streams_fill_their_pieces),
    CASE(backslashes_are_text),
    CASE(summaries_fit),
    CASE(digests_see_everything),
    CASE(templates_are_checked),
    CASE_ON(real_questions_load, "gsm8k_train.jsonl"),
    CASE_ON(real_text_loads, "tinyshakespeare.txt"),
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    trainer_cases(cases, sizeof cases / sizeof *cases);
    demo_data_free(&set);
    return test_summary();
}
