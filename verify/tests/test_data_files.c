/* SPDX-License-Identifier: MIT OR Unlicense */
/* Files of data and of results: folders, endings, gzip, several sets in one, what cannot be
   read, and writing as a whole or not at all. */
#define STB_DS_IMPLEMENTATION
#include <poll.h>
#include <pthread.h>
#include "support/trainer_documents.h"

/* ---- reading ---- */

static bool samples_and_files_are_limited_and_joined(void) {
    char both[1100];
    const char *one = make_file("1.jsonl",
                                "{\"q\": \"a\", \"a\": \"1\"}\n{\"q\": \"b\", \"a\": \"2\"}\n");
    const char *two = make_file("2.jsonl", "{\"q\": \"c\", \"a\": \"3\"}\nnot JSON\n");
    snprintf(both, sizeof both, "%s,%s", one, two);
    demo_data_options how = ask;
    how.max_samples = 2; /* a half of each; the broken line is never reached */
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 2);
    EXPECT_TEXT(shown(0), "[B]Q a? |1[E]");
    EXPECT_TEXT(shown(1), "[B]Q c? |3[E]");
    how.probs = "1,0"; /* until the first is used up */
    how.max_samples = 9;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 2);
    EXPECT_TEXT(shown(1), "[B]Q b? |2[E]");
    how.probs = "1";
    EXPECT(load(both, how) == -1 && holds(message.text, "1 weights (1) for 2 data sets"));
    how.probs = NULL;
    how.max_samples = 1;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 1);
    how.max_samples = 0;
    EXPECT(load(both, how) == -1 && holds(message.text, "2.jsonl:2: broken JSON") &&
           !set.documents);
    return true;
}

/* A list of records, gzip in one part or two, and keys inside objects: the same documents. */
static bool other_files_hold_the_same(void) {
    static const char *const shapes[] = {
        "{\"q\": \"a\", \"a\": \"b\"}\n{\"q\": \"c\", \"a\": \"d\"}\n",
        "\xEF\xBB\xBF [\n {\"q\": \"a\", \"a\": \"b\"},\n {\"q\": \"c\", \"a\": \"d\"}\n]\n"};
    char path[600];
    for (int i = 0; i < 4; i++) {
        const char *made = make_file(i % 2 ? "l.jsonl" : "l.json", shapes[i % 2]);
        if (i > 1) {
            snprintf(path, sizeof path, "%s.gz", made);
            remove(path);
            size_t half = strlen(shapes[i % 2]) / 2;
            for (int part = 0; part < i - 1; part++) { /* as cat a.gz b.gz */
                gzFile file = gzopen(path, "ab");
                const char *from = shapes[i % 2] + (part ? half : 0);
                gzwrite(file, from, (unsigned)(i == 2 || part ? strlen(from) : half));
                gzclose(file);
            }
            made = path;
        }
        EXPECT(load(made, ask) == 0 && arrlen(set.documents) == 2);
        EXPECT_TEXT(shown(0), "[B]Q a? |b[E]");
        EXPECT_TEXT(shown(1), "[B]Q c? |d[E]");
    }
    EXPECT(load(make_file("b.jsonl.gz", "none"), ask) == -1 &&
           holds(message.text, "b.jsonl.gz: cannot be read: it is not a complete gzip file"));
    demo_data_options deep = ask;
    deep.input_key = "x.y.q";
    deep.output_key = "z.a";
    EXPECT(load(make_file("k.jsonl", "{\"x\": {\"y\": {\"q\": \"a\"}}, \"z.a\": \"b\"}"),
                deep) == 0);
    EXPECT_TEXT(shown(0), "[B]Q a? |b[E]");
    EXPECT(load(make_file("k.jsonl", "{\"x\": {\"y\": 1}}"), deep) == -1 &&
           holds(message.text,
                 "no key \"x.y.q\"; set --input_key to one of those present: \"x\""));
    return true;
}

/* Of a folder every file of the train split is read, in the order of names; a file is named without
   a line where it is wrong as a whole, whatever was read before it. */
static bool folders_are_read_in_order(void) {
    static const char *const first[] = {"{\"q\": \"a\", \"a\": \"1\"}\n",
                                        "\xEF\xBB\xBF[{\"q\": \"a\", \"a\": \"1\"}]"};
    char folder[600], path[2][700], more[1400];
    snprintf(folder, sizeof folder, "%s/split", scratch);
    EXPECT(!mkdir(folder, 0700));
    snprintf(path[0], sizeof path[0], "%s/train-0.json", folder);
    snprintf(path[1], sizeof path[1], "%s/train-1.jsonl", folder);
    bool good = true;
    for (int list = 0; list < 2 && good; list++) {
        demo_error error;
        const char *second = "\xEF\xBB\xBF{\"q\": \"b\", \"a\": \"2\"}";
        demo_write_atomically(path[0], first[list], strlen(first[list]), &error);
        demo_write_atomically(path[1], second, strlen(second), &error);
        for (int mixed = 0; mixed < 2 && good; mixed++) {
            demo_data_options how = ask;
            how.probs = mixed ? "1" : NULL;
            good = load(folder, how) == 0 && arrlen(set.documents) == 2 &&
                   !strcmp(shown(0), "[B]Q a? |1[E]") && !strcmp(shown(1), "[B]Q b? |2[E]");
        }
        snprintf(more, sizeof more, ": the file is empty; give one with at least one record");
        demo_write_atomically(path[1], "", 0, &error);
        char whole[2200];
        snprintf(whole, sizeof whole, "%s%s", path[1], more);
        for (int mixed = 0; mixed < 2 && good; mixed++) {
            demo_data_options how = ask;
            how.probs = mixed ? "1" : NULL;
            good = load(folder, how) == -1 && !strcmp(message.text, whole);
        }
    }
    remove(path[0]), remove(path[1]), rmdir(folder);
    EXPECT(good);
    /* one character behind the last line is a line, too */
    EXPECT(load(make_file("last.jsonl", "{\"q\": \"a\", \"a\": \"1\"}\nx"), ask) == -1 &&
           holds(message.text, "last.jsonl:2: broken JSON at column 1; one whole object"));
    return true;
}

/* What is packed comes out whole, whatever its size, and with a zero behind it. */
static bool gzip_holds_any_size(void) {
    static const size_t sizes[] = {0, 1, 65535, 65536, 65537, 131072, 300000};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const char *why_not = NULL, *path = in_scratch("any.gz");
        size_t packed = 0, whole, size = sizes[i];
        char *text = (char *)malloc(size + 1);
        uint32_t state = 7;
        for (size_t k = 0; k < size; k++) /* what is far behind comes again */
            text[k] = k < 30000 ? (char)((state = state * 1664525u + 1013904223u) >> 24)
                                : text[k - 30000];
        gzFile file = gzopen(path, "wb");
        gzwrite(file, text, (unsigned)size);
        gzclose(file);
        char *bytes = demo_read_file(path, &packed);
        char *got = demo_unzipped(bytes, packed, &whole, &why_not);
        EXPECT(got && whole == size && !memcmp(got, text, size) && !got[size]);
        free(got);
        EXPECT(!demo_unzipped(bytes, packed - 1, &whole, &why_not));
        EXPECT_TEXT(why_not, "it is not a complete gzip file");
        free(bytes);
        free(text);
    }
    return true;
}

static bool endings_are_whole(void) {
    static const struct {
        const char *name;
        bool data, jsonl;
    } cases[] = {
        {"x.jsonl", true, true},   {"x.json", true, true},     {"x.jsonl.gz", true, true},
        {"x.json.gz", true, true}, {"x.parquet", true, false}, {"x.txt", false, false},
        {"xjsonl", false, false},  {"x.jsonl ", false, false}, {".json", true, true},
        {"x.gz", false, false},    {"", false, false}};
    char text[] = ".jsonl";
    EXPECT(demo_ends_with(text, ".jsonl") && !demo_ends_with(text + 1, ".jsonl"));
    EXPECT(demo_name_ends(text, ".jsonl") && !demo_name_ends(text + 1, ".jsonl"));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(demo_is_jsonl(cases[i].name) == cases[i].jsonl);
        EXPECT(demo_data_name(cases[i].name) == cases[i].data);
    }
    EXPECT(load(".jsonl", ask) == -1 && holds(message.text, ".jsonl: cannot be read: No such"));
    return true;
}

static bool files_that_cannot_be_read_are_named(void) {
    EXPECT(load("no/such/file.jsonl", ask) == -1);
    EXPECT_TEXT(message.text,
                "no/such/file.jsonl: cannot be read: No such file or directory; give "
                "the path of a .jsonl or .txt file");
    EXPECT(load("data.parquet", ask) == -1 &&
           holds(message.text, "data.parquet: the name does not end in .jsonl,"));
    EXPECT(load("", ask) == -1 && load(NULL, ask) == -1);
    const char *zeros = make_file_sized("zeros.jsonl", "{\"q\": \"a\0b\", \"a\": \"c\"}\n", 23);
    EXPECT(load(zeros, ask) == -1 && holds(message.text, "zeros.jsonl:1: "));
    demo_data_options small = ask;
    small.vocab_size = 100;
    EXPECT(load(make_file("v.jsonl", "{\"q\": \"a\", \"a\": \"b\"}\n"), small) == -1);
    EXPECT(
        holds(message.text, "v.jsonl:1: text without a tokenizer needs a vocabulary of 259"));
    return true;
}

/* As Python's random.Random(42).random() picks by running sums 1, 3 and 4, until a set that is picked
   is used up; and shares of a limit, from the beginnings. */
static bool sets_are_mixed_by_the_rule(void) {
    static const int64_t there[] = {5, 3, 9}, fewer[] = {5, 2, 9};
    static const int32_t drawn_of[] = {1, 0, 1, 0, 1};
    static const int shares[][4] = {{0, 0, 0, 0},  {1, 0, 0, 1},  {3, 0, 1, 2},
                                    {6, 1, 1, 4},  {9, 2, 2, 5},  {12, 3, 2, 7},
                                    {16, 4, 3, 9}, {17, 5, 3, 9}, {18, 5, 3, 9}};
    double ends[3];
    EXPECT(!demo_mix_weights(ends, 3, "1,2,1", &message) && ends[0] == 1 && ends[1] == 3 &&
           ends[2] == 4);
    for (int64_t limit = 0; limit < 8; limit++) {
        int32_t *order = demo_mix_drawn(there, 3, ends, 42, limit);
        int64_t want = limit < 5 ? limit : 5;
        EXPECT(arrlen(order) == want &&
               (!want || !memcmp(order, drawn_of, (size_t)want * sizeof *order)));
        arrfree(order);
    }
    int32_t *order = demo_mix_drawn(fewer, 3, ends, 42, 9);
    EXPECT(arrlen(order) == 4);
    arrfree(order);
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        int counts[3] = {0};
        order = demo_mix_shared(there, 3, shares[i][0]);
        for (int64_t k = 0; k < arrlen(order); k++) {
            counts[order[k]]++;
            EXPECT(!k || order[k - 1] <= order[k]);
        }
        for (int set = 0; set < 3; set++) EXPECT(counts[set] == shares[i][1 + set]);
        arrfree(order);
    }
    static const int64_t none[] = {0, 0};
    EXPECT(!demo_mix_shared(none, 2, 5));
    return true;
}

/* The files of a folder: its train split, by names and by a folder of that name; all of them where no
   name is that of a split. */
static bool folders_have_a_train_split(void) {
    static const struct {
        const char *files, *found; /* NULL: nothing is */
    } cases[] = {
        {"b.jsonl a.json notes.txt", "a.json b.jsonl"},
        {"train.jsonl other.json", "train.jsonl"},
        {"train-1.jsonl train-0.json.gz training.jsonl trainer.json",
         "train-0.json.gz train-1.jsonl"},
        {"train_2.jsonl test.jsonl", "train_2.jsonl"},
        {"a.json test.jsonl", NULL},
        {"a.json validation.jsonl", NULL},
        {"a.json dev.jsonl", NULL},
        {"a.json eval.jsonl", NULL},
        {"a.json latest.jsonl", "a.json latest.jsonl"},
        {"train.txt a.json", "a.json"},
        {"train/b.json train/a.jsonl train/c.txt z.json", "train/a.jsonl train/b.json"},
        {"train/b.json train.json", "train.json train/b.json"},
        {"notes.txt", NULL}};
    char folder[600], inside[700], path[800], list[200], sentence[900];
    snprintf(folder, sizeof folder, "%s/set", scratch);
    snprintf(inside, sizeof inside, "%s/train", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int named = 0; named < 2; named++) {
            char found[400] = "";
            mkdir(folder, 0700), mkdir(inside, 0700);
            snprintf(list, sizeof list, "%s", cases[i].files);
            for (char *file = strtok(list, " "); file; file = strtok(NULL, " ")) {
                snprintf(path, sizeof path, "%s/%s", folder, file);
                fclose(fopen(path, "wb"));
            }
            snprintf(path, sizeof path, "%s%s", named ? "json@" : "", folder);
            char **paths = demo_set_files(path, &message);
            for (int64_t k = 0; k < arrlen(paths); k++) {
                if (k) strcat(found, " ");
                strcat(found, paths[k] + strlen(folder) + 1);
            }
            demo_paths_free(paths);
            snprintf(list, sizeof list, "%s", cases[i].files);
            for (char *file = strtok(list, " "); file; file = strtok(NULL, " ")) {
                snprintf(path, sizeof path, "%s/%s", folder, file);
                remove(path);
            }
            EXPECT(!rmdir(inside) && !rmdir(folder));
            EXPECT_TEXT(found, cases[i].found ? cases[i].found : "");
            snprintf(sentence, sizeof sentence,
                     "%s has no data of a train split (train.jsonl, train-*.jsonl, "
                     "train/*.jsonl); name the file",
                     folder);
            if (!cases[i].found) EXPECT_TEXT(message.text, sentence);
        }
    EXPECT(!demo_set_files("parquet@there", &message));
    EXPECT_TEXT(message.text,
                "parquet@there: only json@FOLDER can be read directly; demos/prepare.py also "
                "reads parquet@FOLDER");
    char **paths = demo_set_files("json@a.jsonl", &message);
    EXPECT(arrlen(paths) == 1);
    EXPECT_TEXT(paths[0], "a.jsonl");
    demo_paths_free(paths);
    return true;
}

/* Why a file is not read, and how large one may be. */
static bool files_say_why(void) {
    const char *why_not, *path = make_file("five", "12345");
    size_t size = 9;
    char *text = demo_read_whole(path, 5, &size, &why_not);
    EXPECT(text && size == 5 && !text[5] && !why_not);
    free(text);
    EXPECT(!demo_read_whole(path, 4, &size, &why_not));
    EXPECT_TEXT(why_not, "it is too large for a file of this kind");
    EXPECT(!demo_read_whole(scratch, 9, &size, &why_not));
    EXPECT_TEXT(why_not, "it is a folder, not a file");
    EXPECT(!demo_read_whole("/dev/null", 9, &size, &why_not));
    EXPECT_TEXT(why_not,
                "it is a pipe, socket or device, not a regular file; write its contents "
                "to a file first");
    EXPECT(!demo_read_whole("no/such", 9, &size, &why_not));
    EXPECT_TEXT(why_not, "No such file or directory");
    for (size_t length = 65534; length < 65539; length++) { /* around the first room */
        char *bytes = (char *)malloc(length);
        memset(bytes, 'x', length);
        text = demo_read_file(make_file_sized("large", bytes, length), &size);
        EXPECT(text && size == length && !memcmp(text, bytes, length) && !text[length]);
        free(text);
        free(bytes);
    }
    static char name[5000];
    memset(name, 'n', sizeof name - 1);
    EXPECT(demo_write_atomically(name, "x", 1, &message) == -1 &&
           holds(message.text, ": File name too long; choose another path or make its folder"));
    EXPECT(demo_write_atomically("no/such", "x", 1, &message) == -1);
    EXPECT_TEXT(message.text, "cannot write no/such: No such file or directory; choose another "
                              "path or make its folder");
    EXPECT(demo_write_atomically("/dev/null", "x", 1, &message) == -1);
    EXPECT_TEXT(message.text,
                "cannot write /dev/null: it exists and is not a regular file; choose another "
                "path");
    return true;
}

/* A key that stands twice, wherever; the same key in two objects is none. */
static bool keys_stand_once(void) {
    static const struct {
        const char *json, *twice;
    } cases[] = {{"{\"a\": 1, \"b\": 2}", NULL},
                 {"{\"a\": 1, \"a\": 2}", "a"},
                 {"{\"c\": 1, \"b\": 1, \"a\": 2, \"b\": 3}", "b"},
                 {"{\"a\": {\"a\": 1}, \"b\": {\"a\": 1}}", NULL},
                 {"{\"a\": [{\"x\": 1}, {\"x\": 1, \"y\": 1, \"x\": 2}]}", "x"},
                 {"[\"a\", \"a\"]", NULL},
                 {"{}", NULL},
                 {"{\"z\": {\"q\": {\"q\": 0, \"r\": 0, \"q\": 1}}, \"y\": 1}", "q"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cJSON *json = cJSON_Parse(cases[i].json);
        const char *twice = demo_json_twice(json);
        EXPECT_TEXT(twice ? twice : "none", cases[i].twice ? cases[i].twice : "none");
        cJSON_Delete(json);
    }
    return true;
}

/* ---- writing ---- */

static bool writing_is_all_or_nothing(void) {
    size_t size = 0;
    const char *path = make_file("whole", "old");
    EXPECT(demo_write_atomically(path, "new text", 8, &message) == 0);
    char *text = demo_read_file(path, &size);
    EXPECT(text && size == 8 && !strcmp(text, "new text"));
    free(text);
    EXPECT(demo_write_atomically(in_scratch("no/folder"), "x", 1, &message) == -1);
    EXPECT(
        holds(message.text,
              "no/folder: No such file or directory; choose another path or make its folder"));
    /* a folder is not replaced */
    EXPECT(demo_write_atomically(scratch, "x", 1, &message) == -1);
    char left[320];
    snprintf(left, sizeof left, "%s.%ld.tmp", scratch, (long)getpid());
    EXPECT(access(left, F_OK) != 0);
    return true;
}

/* What arrives in a pipe whose reader begins late. */
typedef struct {
    int descriptor;
    size_t bytes;
} late_reader;

static void *read_late(void *reader) {
    late_reader *r = (late_reader *)reader;
    struct pollfd more = {.fd = r->descriptor, .events = POLLIN};
    char part[4096];
    usleep(20000);
    for (ssize_t got = 1; got > 0; r->bytes += (size_t)(got > 0 ? got : 0))
        got = poll(&more, 1, 5000) > 0 ? read(r->descriptor, part, sizeof part) : 0;
    return NULL;
}

/* More than a pipe holds: writing waits for the reader. */
static bool a_pipe_takes_its_time(void) {
    static char text[200003];
    const char *path = in_scratch("pipe");
    late_reader reader = {0};
    pthread_t thread;
    EXPECT(mkfifo(path, 0600) == 0);
    EXPECT(!demo_open_output(path, 0) && errno == ENXIO); /* nobody reads it */
    reader.descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    EXPECT(reader.descriptor >= 0);
    FILE *file = demo_open_output(path, 1);
    EXPECT(file && !pthread_create(&thread, NULL, read_late, &reader));
    size_t written = fwrite(text, 1, sizeof text, file);
    bool closed = !fclose(file);
    pthread_join(thread, NULL);
    close(reader.descriptor);
    EXPECT(closed && written == sizeof text && reader.bytes == sizeof text);
    return true;
}

static const trainer_case cases[] = {
    CASE(samples_and_files_are_limited_and_joined),
    CASE(other_files_hold_the_same),
    CASE(folders_are_read_in_order),
    CASE(gzip_holds_any_size),
    CASE(endings_are_whole),
    CASE(files_that_cannot_be_read_are_named),
    CASE(writing_is_all_or_nothing),
    CASE(a_pipe_takes_its_time),
    CASE(sets_are_mixed_by_the_rule),
    CASE(folders_have_a_train_split),
    CASE(files_say_why),
    CASE(keys_stand_once),
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    trainer_cases(cases, sizeof cases / sizeof *cases);
    demo_data_free(&set);
    return test_summary();
}
