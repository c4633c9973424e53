/* SPDX-License-Identifier: MIT OR Unlicense */
/* Token files: what is in one is used in place; what is not as demos/trainer/data/token_file.h says is
 * refused by name, and nothing that a file may hold ends the program. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include <sys/wait.h>
#include "trainer/data/pairs.h"
#include "support/test.h"

static char path[256], folder[256];
static demo_error why;

/* ---- writing one ---- */

static unsigned char *file; /* the one at hand, stb_ds array */

static void put(const void *bytes, size_t size) {
    if (size) memcpy(arraddnptr(file, size), bytes, size);
}

static demo_token_head *head(void) { return (demo_token_head *)file; }

static demo_token_section *section(int name) {
    demo_token_section *table = (demo_token_section *)(file + sizeof(demo_token_head));
    for (uint32_t i = 0; i < head()->sections; i++)
        if ((int)table[i].name == name) return &table[i];
    return NULL;
}

static void *inside(int name) { return file + section(name)->begin; }

/* Checksums that fit what is there now, as far as that can be reached. */
static void seal_sections(void) {
    demo_token_section *table = (demo_token_section *)(file + sizeof(demo_token_head));
    for (uint32_t i = 0; i < head()->sections && i < DEMO_SECTIONS; i++)
        if (table[i].begin <= (uint64_t)arrlen(file) &&
            table[i].bytes <= (uint64_t)arrlen(file) - table[i].begin)
            table[i].crc = demo_crc32(0, file + table[i].begin, table[i].bytes);
}

static void seal_head(void) {
    uint64_t end = sizeof(demo_token_head) + head()->sections * sizeof(demo_token_section);
    if (end <= (uint64_t)arrlen(file)) head()->crc = demo_crc32(0, file + 16, end - 16);
}

static void seal(void) {
    seal_sections();
    seal_head();
}

enum { WORDS = 7, DOCUMENTS = 4, TOKENS = 13 };
static const char text_of_words[] =
    "ab\xE2\x82\xAC<s></s>"; /* a, b, a euro in two, none, <s>, </s> */
static const uint64_t word_offsets[WORDS + 1] = {0, 1, 2, 3, 5, 5, 8, 12};
static const uint8_t flags[WORDS] = {0, 0, 0, 0, 0, 1, 1};
static const uint64_t offsets[DOCUMENTS + 1] = {0, 4, 7, 9, 13};
static const int32_t ids[TOKENS] = {5, 0, 1, 6, 5, 2, 3, 0, 1, 1, 1, 0, 6};
static const uint8_t mask[TOKENS] = {0, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1};
static const int32_t stops[2] = {6, 4};
static const double margins[DOCUMENTS / 2] = {0.5, NAN};
static const uint8_t labels[DOCUMENTS] = {1, 0, 0, 1};
static const int32_t choices[2] = {3, 1}, targets[TOKENS] = {-100, -100, 3,    1,    -100, 3, 3,
                                                             -100, 1,    -100, -100, -100, 3};
static const float shares[TOKENS] = {0, 0, 1, 0.25f, 0, 0, 0.5f, 0, 1, 0, 0, 0, 0.75f};
static const uint64_t prompt_offsets[DOCUMENTS + 1] = {0, 1, 1, 2, 2};
static const char about[] = "{\"counts\": {\"read\": 9, \"dropped_long\": 5, \"cut\": 2}}";

static void make(uint32_t kind) {
    const struct {
        int name;
        const void *bytes;
        size_t size;
    } all[] = {{DEMO_OFFSETS, offsets, sizeof offsets},
               {DEMO_IDS, ids, sizeof ids},
               {DEMO_MASK, mask, sizeof mask},
               {DEMO_STOPS, stops, sizeof stops},
               {DEMO_WORD_OFFSETS, word_offsets, sizeof word_offsets},
               {DEMO_WORDS, text_of_words, sizeof text_of_words - 1},
               {DEMO_WORD_FLAGS, flags, sizeof flags},
               {DEMO_ABOUT, about, sizeof about - 1},
               {DEMO_MARGINS, margins, sizeof margins},
               {DEMO_LABELS, labels, sizeof labels},
               {DEMO_PROMPT_OFFSETS, prompt_offsets, sizeof prompt_offsets},
               {DEMO_PROMPT_TEXT, "pq", 2},
               {DEMO_ANSWER_OFFSETS, prompt_offsets, sizeof prompt_offsets},
               {DEMO_ANSWER_TEXT, "12", 2},
               {DEMO_TARGETS, targets, sizeof targets},
               {DEMO_SHARES, shares, sizeof shares},
               {DEMO_CHOICES, choices, sizeof choices}};
    demo_token_head h = {.version = DEMO_TOKENS_VERSION,
                         .kind = kind,
                         .bos = 5,
                         .eos = 6,
                         .pad = -1,
                         .words = WORDS,
                         .documents = DOCUMENTS,
                         .tokens = TOKENS,
                         .tokenizer_bytes = 9,
                         .tokenizer_crc = demo_crc32(0, (const unsigned char *)"tokenizer", 9)};
    demo_token_section table[DEMO_SECTIONS];
    memcpy(h.magic, demo_token_magic, 8);
    for (int i = 0; i < DEMO_SECTIONS; i++)
        if (demo_token_section_needed(kind, all[i].name))
            table[h.sections++] = (demo_token_section){.name = (uint32_t)all[i].name,
                                                       .bytes = all[i].size};
    arrsetlen(file, 0);
    put(&h, sizeof h);
    put(table, h.sections * sizeof *table);
    for (uint32_t i = 0; i < h.sections; i++) {
        while (arrlen(file) % DEMO_TOKENS_ALIGNED) put("", 1);
        ((demo_token_section *)(file + sizeof h))[i].begin = (uint64_t)arrlen(file);
        put(all[table[i].name - 1].bytes, all[table[i].name - 1].size);
    }
    head()->bytes = (uint64_t)arrlen(file);
    seal();
}

static void save(void) {
    demo_error error;
    if (demo_write_atomically(path, (const char *)file, (size_t)arrlen(file), &error))
        printf("# %s\n", error.text);
}

static demo_dataset set;
static demo_pair_set pairs;
static demo_labelled_set labelled;
static demo_data_options options;

/* As the trainer of this kind does. 0: it was taken. */
static int load(uint32_t kind) {
    why.text[0] = 0;
    demo_data_free(&set);
    demo_pairs_free(&pairs);
    demo_labelled_free(&labelled);
    if (kind == DEMO_TOKENS_PAIRS)
        return demo_pairs_load(&pairs, path,
                               &(demo_pair_options){.data = options, .margins = true}, &why);
    if (kind == DEMO_TOKENS_LABELLED)
        return demo_labelled_load(&labelled, path, &(demo_labelled_options){.data = options},
                                  &why);
    return kind >= DEMO_TOKENS_PROMPTS ? demo_data_of_file(&set, path, kind, &options, &why)
                                       : demo_data_load(&set, path, &options, &why);
}

static int load_saved(uint32_t kind) { return save(), load(kind); }

/* ---- what is in it ---- */

static int document_is(const demo_document *d, int64_t i) {
    return d->tokens == (int64_t)(offsets[i + 1] - offsets[i]) &&
           !memcmp(d->ids, ids + offsets[i], (size_t)d->tokens * sizeof *ids) &&
           !memcmp(d->loss_mask, mask + offsets[i], (size_t)d->tokens);
}

static void test_documents(void) {
    make(DEMO_TOKENS_SFT);
    test_expect(!load_saved(DEMO_TOKENS_SFT), "%s", why.text);
    test_expect(arrlen(set.documents) == DOCUMENTS && set.tokens == TOKENS &&
                    set.supervised_tokens == 6 && set.counts.read == 9 &&
                    set.counts.dropped_long == 5 && set.counts.cut == 2,
                "%lld documents, %lld tokens, %lld learnt", (long long)arrlen(set.documents),
                (long long)set.tokens, (long long)set.supervised_tokens);
    for (int64_t i = 0; i < arrlen(set.documents); i++)
        test_expect(document_is(&set.documents[i], i), "document %lld", (long long)i);
    test_expect(arrlen(set.documents) &&
                    (const unsigned char *)set.documents[0].ids >= set.file->map,
                "ids are copied");
    options.max_samples = 3;
    test_expect(!load(DEMO_TOKENS_SFT) && arrlen(set.documents) == 3 && set.tokens == 9,
                "max_samples leaves %lld documents", (long long)arrlen(set.documents));
    options.max_samples = 0;
    test_end("documents");
}

static void test_kinds(void) {
    make(DEMO_TOKENS_PAIRS);
    test_expect(!load_saved(DEMO_TOKENS_PAIRS), "%s", why.text);
    test_expect(arrlen(pairs.pairs) == 2 && document_is(&pairs.pairs[1].chosen, 2) &&
                    document_is(&pairs.pairs[1].rejected, 3) && pairs.pairs[0].margin == 0.5 &&
                    pairs.pairs[1].margin == 0 && pairs.counts.without_margin == 1 &&
                    pairs.counts.two_prompts == 2,
                "pairs");
    make(DEMO_TOKENS_LABELLED);
    test_expect(!load_saved(DEMO_TOKENS_LABELLED), "%s", why.text);
    test_expect(arrlen(labelled.records) == DOCUMENTS && labelled.records[0].desirable &&
                    !labelled.records[1].desirable && labelled.records[0].prompt_tokens == 2 &&
                    labelled.counts.desirable == 2,
                "labels");
    make(DEMO_TOKENS_PROMPTS);
    test_expect(!load_saved(DEMO_TOKENS_PROMPTS), "%s", why.text);
    demo_slice second = demo_token_slice(set.file, DEMO_PROMPT_OFFSETS, DEMO_PROMPT_TEXT, 1);
    demo_slice third = demo_token_slice(set.file, DEMO_ANSWER_OFFSETS, DEMO_ANSWER_TEXT, 2);
    test_expect(!second.size && third.size == 1 && *third.bytes == '2', "prompts and answers");
    make(DEMO_TOKENS_STEPS);
    test_expect(!load_saved(DEMO_TOKENS_STEPS), "%s", why.text);
    test_expect(set.file && !memcmp(set.file->choices, choices, sizeof choices), "choices");
    for (int64_t i = 0; i < arrlen(set.documents); i++)
        test_expect(document_is(&set.documents[i], i) &&
                        !memcmp(set.documents[i].targets, targets + offsets[i],
                                (size_t)set.documents[i].tokens * sizeof *targets) &&
                        !memcmp(set.documents[i].shares, shares + offsets[i],
                                (size_t)set.documents[i].tokens * sizeof *shares),
                    "steps of document %lld", (long long)i);
    test_end("kinds");
}

/* What is counted of a file's records, and how many are taken. */
static void test_counts(void) {
    make(DEMO_TOKENS_PAIRS);
    test_expect(!load_saved(DEMO_TOKENS_PAIRS) && pairs.tokens == TOKENS &&
                    pairs.supervised_tokens == 6 && pairs.counts.read == 9 &&
                    pairs.counts.dropped_long == 5 && pairs.counts.cut == 2 &&
                    !pairs.counts.identical,
                "pairs: %lld tokens, %lld learnt", (long long)pairs.tokens,
                (long long)pairs.supervised_tokens);
    demo_pair_options without = {.data = options};
    demo_pairs_free(&pairs);
    test_expect(!demo_pairs_load(&pairs, path, &without, &why) && pairs.pairs[0].margin == 0 &&
                    !pairs.counts.without_margin,
                "margins that nobody asked for");
    options.max_samples = 1;
    test_expect(!load(DEMO_TOKENS_PAIRS) && arrlen(pairs.pairs) == 1 && pairs.tokens == 7 &&
                    pairs.supervised_tokens == 4 && !pairs.counts.without_margin,
                "one pair: %lld tokens", (long long)pairs.tokens);
    options.max_samples = 0;
    /* the first two documents become the same, then another response, then another prompt */
    for (int way = 0; way < 3; way++) {
        make(DEMO_TOKENS_PAIRS);
        ((uint64_t *)inside(DEMO_OFFSETS))[1] = 3, ((uint64_t *)inside(DEMO_OFFSETS))[2] = 6;
        int32_t *id = (int32_t *)inside(DEMO_IDS);
        uint8_t *learnt = (uint8_t *)inside(DEMO_MASK);
        memcpy(id + 3, id, 3 * sizeof *id);
        memcpy(learnt + 3, learnt, 3);
        learnt[6] = 0;
        if (way) id[3 + (way == 1 ? 2 : 1)] = 3;
        seal();
        test_expect(!load_saved(DEMO_TOKENS_PAIRS), "%s", why.text);
        test_expect(pairs.counts.identical == !way &&
                        pairs.counts.two_prompts == (way == 2) + 1,
                    "way %d: %lld identical, %lld with two prompts", way,
                    (long long)pairs.counts.identical, (long long)pairs.counts.two_prompts);
    }
    make(DEMO_TOKENS_LABELLED);
    test_expect(!load_saved(DEMO_TOKENS_LABELLED) && labelled.tokens == TOKENS &&
                    labelled.supervised_tokens == 6 && labelled.counts.undesirable == 2 &&
                    labelled.counts.read == 9 && labelled.counts.dropped_long == 5 &&
                    labelled.counts.cut == 2,
                "responses: %lld tokens, %lld learnt", (long long)labelled.tokens,
                (long long)labelled.supervised_tokens);
    for (int64_t i = 0; i < arrlen(labelled.records); i++)
        test_expect(document_is(&labelled.records[i].document, i), "response %lld",
                    (long long)i);
    options.max_samples = 3;
    test_expect(!load(DEMO_TOKENS_LABELLED) && arrlen(labelled.records) == 3 &&
                    labelled.counts.desirable == 1 && labelled.counts.undesirable == 2 &&
                    labelled.tokens == 9,
                "three responses");
    options.max_samples = 9;
    test_expect(!load(DEMO_TOKENS_LABELLED) && arrlen(labelled.records) == 4,
                "more than there are");
    options.max_samples = 0;
    make(DEMO_TOKENS_SFT);
    head()->bos = -1, head()->pad = 6;
    seal();
    test_expect(!load_saved(DEMO_TOKENS_SFT) && set.file->longest == 4 &&
                    set.file->largest == 6,
                "no BOS: %s", why.text);
    test_expect(demo_token_count(set.file, "read") == 9 &&
                    !demo_token_count(set.file, "zero_length") &&
                    !demo_token_count(set.file, "no"),
                "numbers of its description");
    test_end("counts");
}

static void test_words(void) {
    static const char *const want[] = {"", "a", "b", "\xE2", "\x82\xAC", "", "", "", ""};
    make(DEMO_TOKENS_SFT);
    test_expect(!load_saved(DEMO_TOKENS_SFT), "%s", why.text);
    for (int32_t id = -1; id <= WORDS; id++) {
        demo_slice word = demo_token_word(set.file, id);
        test_expect(word.size == strlen(want[id + 1]) &&
                        (!word.size || !memcmp(word.bytes, want[id + 1], word.size)),
                    "id %d is %d bytes", id, (int)word.size);
    }
    demo_words words = demo_words_of(set.file), bytes = demo_words_of(NULL);
    test_expect(words.stop_count == 2 && demo_is_stop(&words, 4) && demo_is_stop(&words, 6) &&
                    !demo_is_stop(&words, DEMO_EOS) && demo_is_stop(&bytes, DEMO_EOS),
                "stops");
    test_end("words");
}

/* ---- what it goes with ---- */

static void refused(const char *part, uint32_t kind) {
    int failed = load_saved(kind);
    test_expect(failed && strstr(why.text, part) && !strncmp(why.text, path, strlen(path)),
                "'%s' instead of: %s", why.text, part);
}

static void test_goes_with(void) {
    char tokenizer[300];
    demo_error error;
    make(DEMO_TOKENS_SFT);
    options.max_len = 3;
    options.length_option = "some_len";
    refused("a document has 4 tokens, --some_len is 3", DEMO_TOKENS_SFT);
    options = (demo_data_options){.vocab_size = WORDS - 1};
    refused(
        "a tokenizer with ids up to 6 and uses ids up to 6, but the model's vocab_size is 6",
        DEMO_TOKENS_SFT);
    options = (demo_data_options){
        .vocab_size = WORDS, .folder = folder, .prepare = "type this"};
    test_expect(!load(DEMO_TOKENS_SFT), "a folder without tokenizer.json: %s", why.text);
    snprintf(tokenizer, sizeof tokenizer, "%s/tokenizer.json", folder);
    demo_write_atomically(tokenizer, "tokenizer", 9, &error);
    test_expect(!load(DEMO_TOKENS_SFT), "%s", why.text);
    demo_write_atomically(tokenizer, "tokenizes", 9, &error);
    refused("made with another tokenizer (9 bytes, crc32 ", DEMO_TOKENS_SFT);
    test_expect(strstr(why.text, "; make it again: type this") != NULL, "%s", why.text);
    remove(tokenizer);
    options = (demo_data_options){0};
    char two[600];
    snprintf(two, sizeof two, "%s,%s", path, path);
    test_expect(
        demo_data_load(&set, two, &options, &why) &&
            strstr(why.text, "is a token file, which cannot be combined with other data"),
        "%s", why.text);
    test_end("goes_with");
}

static void test_wrong_kind(void) {
    for (uint32_t is = DEMO_TOKENS_SFT; is <= DEMO_TOKENS_STEPS; is++)
        for (uint32_t wanted = DEMO_TOKENS_SFT; wanted <= DEMO_TOKENS_STEPS; wanted++) {
            char sentence[128];
            snprintf(sentence, sizeof sentence, "is of kind %s, for %s; make one of --kind %s",
                     demo_token_kinds[is], demo_token_readers[is], demo_token_kinds[wanted]);
            make(is);
            if (is != wanted) refused(sentence, wanted);
        }
    test_end("wrong_kind");
}

/* ---- what is wrong in it ---- */

static void cut_file(int64_t bytes) { arrsetlen(file, (size_t)(arrlen(file) - bytes)); }

static void pad_file(int64_t bytes) {
    while (bytes--) put("", 1);
}

/* The whole sentence behind the path. */
static void lie(const char *sentence, uint32_t kind) {
    char whole[600];
    snprintf(whole, sizeof whole, "%s: %s", path, sentence);
    test_expect(load_saved(kind) && !strcmp(why.text, whole), "'%s' instead of '%s'", why.text,
                whole);
}

/* A sentence for everything that can be wrong though the checksums are right. */
static void test_lies(void) {
    enum {
        SFT = DEMO_TOKENS_SFT,
        PAIRS = DEMO_TOKENS_PAIRS,
        KTO = DEMO_TOKENS_LABELLED,
        PRM = DEMO_TOKENS_STEPS
    };
#define LIE(kind, change, sentence) make(kind), (change), seal(), lie(sentence, kind)
#define AGAIN                       "; make it again by demos/prepare.py"
    LIE(SFT, head()->version = 2,
        "is a token file of version 2, but only version 1 is supported" AGAIN);
    LIE(SFT, head()->bytes++,
        "has 884 bytes, but its header says 885; copy it once more, the end is missing");
    LIE(SFT, head()->sections = 99, "has a header with 99 sections, which is impossible" AGAIN);
    LIE(SFT, head()->kind = 0, "is of the unknown kind 0" AGAIN);
    LIE(SFT, head()->kind = 6, "is of the unknown kind 6" AGAIN);
    LIE(SFT, head()->eos = WORDS,
        "BOS 5, EOS 7 or PAD -1 is outside of its vocabulary of 7" AGAIN);
    LIE(SFT, head()->eos = -1,
        "BOS 5, EOS -1 or PAD -1 is outside of its vocabulary of 7" AGAIN);
    LIE(SFT, head()->pad = -2,
        "BOS 5, EOS 6 or PAD -2 is outside of its vocabulary of 7" AGAIN);
    LIE(SFT, head()->bos = WORDS,
        "BOS 7, EOS 6 or PAD -1 is outside of its vocabulary of 7" AGAIN);
    LIE(SFT, head()->words = -1,
        "BOS 5, EOS 6 or PAD -1 is outside of its vocabulary of -1" AGAIN);
    LIE(SFT, head()->pad = WORDS,
        "BOS 5, EOS 6 or PAD 7 is outside of its vocabulary of 7" AGAIN);
    LIE(SFT, head()->bos = -2,
        "BOS -2, EOS 6 or PAD -1 is outside of its vocabulary of 7" AGAIN);
    LIE(SFT, head()->sections = 18, "has a header with 18 sections, which is impossible" AGAIN);
    /* as many as there are bytes, and one more */
    LIE(SFT, head()->documents = 884, "section 1 has 40 bytes instead of 7080" AGAIN);
    LIE(SFT, head()->documents = 885, "885 documents with 13 tokens are impossible" AGAIN);
    LIE(SFT, head()->tokens = 884, "section 2 has 52 bytes instead of 3536" AGAIN);
    LIE(SFT, head()->tokens = 885, "4 documents with 885 tokens are impossible" AGAIN);
    LIE(SFT, head()->documents = 0, "0 documents with 13 tokens are impossible" AGAIN);
    LIE(SFT, head()->documents = 5, "section 1 has 40 bytes instead of 48" AGAIN);
    LIE(SFT, head()->documents = UINT64_MAX,
        "18446744073709551615 documents with 13 tokens are impossible" AGAIN);
    LIE(SFT, head()->tokens = UINT64_MAX / 4 + 2,
        "4 documents with 4611686018427387905 tokens are impossible" AGAIN);
    LIE(PAIRS, head()->documents = 3, "3 documents with 13 tokens are impossible" AGAIN);
    LIE(SFT, section(DEMO_IDS)->begin -= 64,
        "section 2 has 52 bytes from byte 384 on, but must lie between bytes 448 and 884" AGAIN);
    LIE(SFT, section(DEMO_IDS)->begin = UINT64_MAX - 7,
        "section 2 has 52 bytes from byte 18446744073709551608 on, but must lie between "
        "bytes 448 and 884" AGAIN);
    LIE(SFT, section(DEMO_IDS)->bytes = UINT64_MAX,
        "section 2 has 18446744073709551615 bytes from byte 448 on, but must lie between "
        "bytes 448 and 884" AGAIN);
    LIE(SFT, section(DEMO_IDS)->zero = 1,
        "section 2 follows section 1, which is the wrong order" AGAIN);
    LIE(SFT, section(DEMO_IDS)->name = 3,
        "section 3 follows section 3, which is the wrong order" AGAIN);
    LIE(SFT, section(DEMO_ABOUT)->name = 18,
        "section 18 follows section 7, which is the wrong order" AGAIN);
    LIE(SFT, section(DEMO_ABOUT)->name = 9, "a file of sft needs section 8" AGAIN);
    make(SFT), head()->kind = KTO, seal(),
               lie("a file of labelled needs section 10" AGAIN, KTO);
    LIE(SFT, file[section(DEMO_IDS)->begin - 1] = 1,
        "the bytes before section 2 are not zero" AGAIN);
    LIE(SFT, (put("x", 1), head()->bytes++), "1 bytes follow its last section" AGAIN);
    LIE(SFT, ((uint64_t *)inside(DEMO_OFFSETS))[1] = 7,
        "the offsets of section 1 do not rise from 0 to 13 (number 1 is 7)" AGAIN);
    LIE(SFT, ((uint64_t *)inside(DEMO_OFFSETS))[2] = UINT64_MAX,
        "the offsets of section 1 do not rise from 0 to 13 (number 2 is 18446744073709551615)" AGAIN);
    LIE(SFT, ((uint64_t *)inside(DEMO_OFFSETS))[0] = 1,
        "the offsets of section 1 do not rise from 0 to 13 (number 0 is 1)" AGAIN);
    LIE(SFT, ((uint64_t *)inside(DEMO_OFFSETS))[4] = 12,
        "the offsets of section 1 do not rise from 0 to 13 (number 4 is 12)" AGAIN);
    LIE(SFT, ((uint64_t *)inside(DEMO_WORD_OFFSETS))[3] = 1,
        "the offsets of section 5 do not rise from 0 to 12 (number 2 is 2)" AGAIN);
    LIE(SFT, ((uint64_t *)inside(DEMO_WORD_OFFSETS))[7] = 11,
        "the offsets of section 5 do not rise from 0 to 12 (number 7 is 11)" AGAIN);
    LIE(SFT, ((int32_t *)inside(DEMO_IDS))[6] = WORDS,
        "an id is 7, but its vocabulary has 7 tokens" AGAIN);
    LIE(SFT, ((int32_t *)inside(DEMO_IDS))[6] = -1,
        "an id is -1, but its vocabulary has 7 tokens" AGAIN);
    LIE(SFT, ((uint8_t *)inside(DEMO_MASK))[6] = 2,
        "its loss mask has bytes other than 0 and 1" AGAIN);
    LIE(SFT, ((uint8_t *)inside(DEMO_MASK))[4] = 1,
        "the first token of document 2 is supervised, but nothing predicts it" AGAIN);
    LIE(SFT, ((int32_t *)inside(DEMO_STOPS))[0] = 4,
        "its stop tokens (8 bytes) do not begin with EOS 6, or are outside of its vocabulary "
        "of 7" AGAIN);
    LIE(SFT, ((int32_t *)inside(DEMO_STOPS))[1] = 70,
        "its stop tokens (8 bytes) do not begin with EOS 6, or are outside of its vocabulary "
        "of 7" AGAIN);
    LIE(SFT, *(char *)inside(DEMO_ABOUT) = '[', "its description is not a JSON object" AGAIN);
    LIE(KTO, ((uint8_t *)inside(DEMO_LABELS))[2] = 2, "label 3 is 2, not 0 or 1" AGAIN);
    LIE(PAIRS, ((double *)inside(DEMO_MARGINS))[0] = -INFINITY, "margin 1 is -inf" AGAIN);
    LIE(PAIRS, memset(inside(DEMO_MASK), 0, 4), "document 1 has no supervised token" AGAIN);
    LIE(KTO, memset(inside(DEMO_MASK), 0, TOKENS), "document 1 has no supervised token" AGAIN);
    LIE(SFT, memset(inside(DEMO_MASK), 0, TOKENS),
        "no supervised token in the whole set (9 read, 4 kept with 13 tokens, 0 of them "
        "supervised; 5 too long, 0 empty, 2 cut, 0 fully masked); check --output_key and "
        "--max_len");
    /* the first and the last of what is listed */
    LIE(SFT, ((int32_t *)inside(DEMO_IDS))[0] = WORDS,
        "an id is 7, but its vocabulary has 7 tokens" AGAIN);
    LIE(SFT, ((int32_t *)inside(DEMO_IDS))[TOKENS - 1] = -1,
        "an id is -1, but its vocabulary has 7 tokens" AGAIN);
    LIE(SFT, ((uint8_t *)inside(DEMO_MASK))[TOKENS - 1] = 2,
        "its loss mask has bytes other than 0 and 1" AGAIN);
    LIE(SFT, ((uint8_t *)inside(DEMO_MASK))[0] = 1,
        "the first token of document 1 is supervised, but nothing predicts it" AGAIN);
    LIE(SFT, ((uint8_t *)inside(DEMO_MASK))[offsets[3]] = 1,
        "the first token of document 4 is supervised, but nothing predicts it" AGAIN);
    LIE(SFT, ((int32_t *)inside(DEMO_STOPS))[0] = WORDS,
        "its stop tokens (8 bytes) do not begin with EOS 6, or are outside of its vocabulary "
        "of 7" AGAIN);
    LIE(KTO, ((uint8_t *)inside(DEMO_LABELS))[0] = 2, "label 1 is 2, not 0 or 1" AGAIN);
    LIE(KTO, ((uint8_t *)inside(DEMO_LABELS))[3] = 255, "label 4 is 255, not 0 or 1" AGAIN);
    LIE(PAIRS, ((double *)inside(DEMO_MARGINS))[1] = INFINITY, "margin 2 is inf" AGAIN);
    LIE(PAIRS, ((uint8_t *)inside(DEMO_MASK))[offsets[3]] = 1,
        "the first token of document 4 is supervised, but nothing predicts it" AGAIN);
#define CHOSEN(bytes) \
    "its reward tokens (" #bytes \
    " bytes) are not 2 to 16 different ids of its vocabulary of 7" AGAIN
    LIE(PRM, ((int32_t *)inside(DEMO_CHOICES))[0] = 1, CHOSEN(8));
    LIE(PRM, ((int32_t *)inside(DEMO_CHOICES))[1] = WORDS, CHOSEN(8));
    LIE(PRM, ((int32_t *)inside(DEMO_CHOICES))[0] = -1, CHOSEN(8));
    LIE(PRM, (section(DEMO_CHOICES)->bytes = 4, head()->bytes -= 4, cut_file(4)), CHOSEN(4));
    LIE(PRM, (section(DEMO_CHOICES)->bytes = 7, head()->bytes -= 1, cut_file(1)), CHOSEN(7));
    LIE(PRM, (section(DEMO_CHOICES)->bytes = 68, head()->bytes += 60, pad_file(60)),
        CHOSEN(68));
    LIE(PRM, ((int32_t *)inside(DEMO_TARGETS))[0] = 3,
        "token 0, with loss mask 0, has the label 3 with probability 0" AGAIN);
    LIE(PRM, ((float *)inside(DEMO_SHARES))[0] = 1,
        "token 0, with loss mask 0, has the label -100 with probability 1" AGAIN);
    LIE(PRM, ((int32_t *)inside(DEMO_TARGETS))[12] = -100,
        "token 12, with loss mask 1, has the label -100 with probability 0.75" AGAIN);
    LIE(PRM, ((int32_t *)inside(DEMO_TARGETS))[12] = 2,
        "token 12, with loss mask 1, has the label 2 with probability 0.75" AGAIN);
    LIE(PRM, ((float *)inside(DEMO_SHARES))[12] = 1.25f,
        "token 12, with loss mask 1, has the label 3 with probability 1.25" AGAIN);
    LIE(PRM, ((float *)inside(DEMO_SHARES))[2] = -0.25f,
        "token 2, with loss mask 1, has the label 3 with probability -0.25" AGAIN);
    LIE(PRM, ((float *)inside(DEMO_SHARES))[2] = NAN,
        "token 2, with loss mask 1, has the label 3 with probability nan" AGAIN);
    /* shares need two choices; of three, or of all words, they are whole */
    LIE(PRM, (section(DEMO_CHOICES)->bytes = 12, head()->bytes += 4, put((int32_t[]){0}, 4)),
        "token 3, with loss mask 1, has the label 1 with probability 0.25" AGAIN);
    LIE(PRM, (section(DEMO_CHOICES)->bytes = 0, head()->bytes -= 8, cut_file(8)),
        "token 3, with loss mask 1, has the label 1 with probability 0.25" AGAIN);
#undef CHOSEN
#undef LIE
#undef AGAIN
    test_end("lies");
}

/* No bit of a file can change, and no byte be missing, without a sentence. */
static void test_every_bit(void) {
    for (uint32_t kind = DEMO_TOKENS_SFT; kind <= DEMO_TOKENS_STEPS; kind++) {
        make(kind);
        for (int64_t i = 8; i < arrlen(file); i++) {
            unsigned char bit = (unsigned char)(1 << (i + (int64_t)test_seed) % 8);
            file[i] ^= bit;
            test_expect(load_saved(kind) && *why.text, "kind %u: byte %lld may change", kind,
                        (long long)i);
            file[i] ^= bit;
        }
        for (int64_t whole = arrlen(file), i = 8; i < whole; i++) {
            arrsetlen(file, (size_t)i);
            test_expect(load_saved(kind) && *why.text, "kind %u: %lld of %lld bytes are taken",
                        kind, (long long)i, (long long)whole);
            arrsetlen(file, (size_t)whole);
        }
    }
    test_end("every_bit");
}

static uint64_t draw(uint64_t below) {
    test_state ^= test_state << 13, test_state ^= test_state >> 7,
        test_state ^= test_state << 17;
    return test_state % below;
}

/* Whatever a head, a table and sections hold under right checksums, nothing crashes; what is
   taken has the sizes that it says. */
static void test_anything(void) {
    enum { TRIES = 6000 };
    static const uint64_t odd[] = {
        0, 1, 2, 63, 64, 255, INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX, UINT64_MAX / 8};
    int64_t taken = 0;
    for (int i = 0; i < TRIES; i++) {
        uint32_t kind = 1 + (uint32_t)draw(5);
        make(kind);
        for (uint64_t changes = 1 + draw(3); changes; changes--) {
            uint64_t value = draw(2) ? odd[draw(sizeof odd / sizeof *odd)] : draw(300);
            size_t size = (size_t)1 << draw(4);
            uint64_t room = draw(2) ? 96 + DEMO_SECTIONS * 32 : (uint64_t)arrlen(file);
            memcpy(file + 8 + draw((room - 16) / size) * size, &value, size);
        }
        if (!draw(8)) arrsetlen(file, 8 + draw((uint64_t)arrlen(file) - 8));
        if (arrlen(file) >= (int64_t)sizeof(demo_token_head)) {
            if (draw(4)) head()->bytes = (uint64_t)arrlen(file);
            seal();
        }
        taken += !load_saved(kind);
    }
    test_expect(taken < TRIES / 2, "%lld of %d were taken", (long long)taken, (int)TRIES);
    test_end("anything");
}

static void test_names(void) {
    make(DEMO_TOKENS_SFT);
    save();
    test_expect(demo_is_token_file(path), "its magic is not seen");
    test_expect(!demo_is_token_file(folder) && !demo_is_token_file(NULL), "a folder is one");
    file[0] = '{';
    save();
    test_expect(!demo_is_token_file(path) && load(DEMO_TOKENS_SFT) &&
                    strstr(why.text, "does not end in .jsonl,"),
                "%s", why.text);
    test_end("names");
}

/* Reads behind the end of a mapped file in a process of its own: what that says, and how it
   ends. */
static int read_cut(const volatile unsigned char *at, const char *cut, char *said,
                    size_t size) {
    int ends[2], status = 0;
    ssize_t got;
    if (pipe(ends)) return -1;
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], 2);
        _exit(truncate(cut, 0) ? 3 : *at & 0);
    }
    close(ends[1]);
    got = read(ends[0], said, size - 1);
    said[got > 0 ? got : 0] = 0;
    close(ends[0]);
    return waitpid(child, &status, 0) == child ? status : -1;
}

/* One sentence in the place of a crash; not for what somebody else has mapped. */
static void test_cut(void) {
    char said[2048], other[300];
    make(DEMO_TOKENS_SFT);
    test_expect(!load_saved(DEMO_TOKENS_SFT), "%s", why.text);
    int status = read_cut((const unsigned char *)set.documents[0].ids, path, said, sizeof said);
    test_expect(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(said, path) &&
                    !strncmp(said, "error: ", 7) && strstr(said, "was truncated") &&
                    strchr(said, '\n') == said + strlen(said) - 1,
                "status %d: %s", status, said);
    snprintf(other, sizeof other, "%s.other", path);
    int descriptor = open(other, O_RDWR | O_CREAT, 0600);
    test_expect(write(descriptor, "text", 4) == 4, "cannot write %s", other);
    void *map = mmap(NULL, 4, PROT_READ, MAP_SHARED, descriptor, 0);
    status = read_cut((const unsigned char *)map, other, said, sizeof said);
    test_expect(status && !strstr(said, "was truncated"), "status %d: %s", status, said);
    munmap(map, 4);
    close(descriptor);
    remove(other);
    demo_data_free(&set);
    test_end("cut");
}

/* What is written into a mapped file is seen; a file that takes its place is not it. */
static void test_changed(void) {
    const struct timespec times[2] = {{.tv_sec = 1000000007}, {.tv_sec = 1000000007}};
    make(DEMO_TOKENS_SFT);
    test_expect(!load_saved(DEMO_TOKENS_SFT), "%s", why.text);
    test_expect(!demo_token_file_changed(set.file), "untouched");
    save();
    test_expect(!demo_token_file_changed(set.file), "another took its place");
    test_expect(!load(DEMO_TOKENS_SFT), "%s", why.text);
    int descriptor = open(path, O_WRONLY);
    test_expect(pwrite(descriptor, "x", 1, 200) == 1 && !futimens(descriptor, times),
                "cannot write");
    close(descriptor);
    test_expect(demo_token_file_changed(set.file), "written to");
    demo_data_free(&set);
    test_end("changed");
}

int main(int argc, char **argv) {
    const char *temporary = getenv("TMPDIR");
    test_begin(argc, argv);
    snprintf(folder, sizeof folder, "%s/tokens-XXXXXX", temporary ? temporary : P_tmpdir);
    if (!mkdtemp(folder)) return fprintf(stderr, "cannot make %s; set TMPDIR\n", folder), 2;
    snprintf(path, sizeof path, "%s/data", folder);
    TEST(test_documents());
    TEST(test_kinds());
    TEST(test_counts());
    TEST(test_words());
    TEST(test_goes_with());
    TEST(test_wrong_kind());
    TEST(test_lies());
    TEST(test_every_bit());
    TEST(test_anything());
    TEST(test_names());
    TEST(test_cut());
    TEST(test_changed());
    remove(path);
    rmdir(folder);
    return test_summary();
}
