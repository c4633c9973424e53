/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify run`: bad input, of which nothing is left, --json, types, and what an operation
   leaves as it was. */
#include <dirent.h>
#include <unistd.h>
#include <cjson/cJSON.h>
#define FOLDER "build/test_dump_run_input.d"
#include "support/run_dumps.h"

/* ---- bad input ---- */

static int nothing_left(void) {
    DIR *dir = opendir(FOLDER);
    struct dirent *entry;
    int left = 0;
    while (dir && (entry = readdir(dir)))
        left |= !strcmp(entry->d_name, "out") || strstr(entry->d_name, ".partial.") != NULL;
    if (dir) closedir(dir);
    return !left;
}

/* One sentence on stderr and nothing on stdout, nothing written. */
static void refuses(const char *test, int code, const char *sentence, const char *arguments) {
    char line[700];
    int is;
    snprintf(line, sizeof line,
             "rm -rf " FOLDER "/out; " ORACLE " run %s 2>&1 >" FOLDER "/stdout", arguments);
    is = code_of(line);
    test_expect(is == code && !strncmp(said, "error: ", 7) && strstr(said, sentence) &&
                    strchr(said, '\n') == said + strlen(said) - 1,
                "run %s: exit code %d, not %d; '%.500s', not '%s'", arguments, is, code, said,
                sentence);
    test_expect(code_of("cat " FOLDER "/stdout") == 0 && !*said, "stdout has '%.100s'", said);
    test_expect(nothing_left(), "something is left of it");
    test_end("run_refuses_%s", test);
}

static void refuses_dump(const char *test, int code, const char *sentence,
                         const char *operation) {
    char arguments[300];
    write_books("in", &made);
    snprintf(arguments, sizeof arguments, "%s " FOLDER "/in --out " FOLDER "/out%s", operation,
             "");
    if (strchr(operation, ' ')) /* with options */
        snprintf(arguments, sizeof arguments, "%.*s " FOLDER "/in --out " FOLDER "/out %s",
                 (int)strcspn(operation, " "), operation, strchr(operation, ' '));
    refuses(test, code, sentence, arguments);
}

#define IN FOLDER "/in"
#define TO " --out " FOLDER "/out"
static void test_usage(void) {
    make(1, 1, 1);
    put_everything();
    write_books("in", &made);
    refuses("no_operation", 2, "run needs an operation; give run OPERATION DUMP --out DIR", "");
    refuses("unknown", 2, "run has no operation 'atention'; give run OPERATION DUMP --out DIR",
            "atention " IN TO);
    refuses("no_dump", 2, "run needs the folder of a dump", "labels" TO);
    refuses("no_out", 2, "run needs --out", "labels " IN);
    refuses("three", 2, "what is 'more'?", "labels " IN " more" TO);
    refuses("split_of_what", 2, "run split needs --sp", "split " IN TO);
    refuses("pack_of_what", 2, "run pack needs --tokens", "pack " IN TO);
    refuses("step_of_what", 2, "run step needs --model", "step " IN TO);
    refuses("others_option", 2, "run attention takes no --sp", "attention " IN TO " --sp 2");
    refuses("others_flag", 2, "run positions takes no --unmasked",
            "positions " IN TO " --unmasked");
    refuses("dtype", 2, "--dtype is the type of the computed tensors; give float32",
            "loss " IN TO " --dtype float16");
    refuses("layout", 2, "--layout is 'zigzak'; give contiguous, zigzag",
            "split " IN TO " --sp 2 --layout zigzak");
    refuses("sp_zero", 2, "--sp is '0'; give a whole number", "split " IN TO " --sp 0");
    refuses("sp_of_tokens", 2, "run split: --sp is 900, and the longest row of index has",
            "split " IN TO " --sp 900");
    refuses("tokens_too_small", 2,
            "run pack: --tokens is 1, and document 0 of 0.cu_seqlens has ",
            "pack " IN TO " --tokens 1");
    refuses("no_folder", 3, "run labels: nowhere: cannot be opened as a folder; give",
            "labels nowhere" TO);
    refuses("out_in_nowhere", 3, "cannot be made: No such file or directory",
            "positions " IN " --out " FOLDER "/nowhere/out");
    refuses("no_model", 3, "run step: ", "step " IN TO " --model nowhere");
}

static void test_missing(void) {
    static const struct {
        const char *operation, *without, *takes;
    } all[] = {{"pack --tokens 90", "0.ids", "index and ids"},
               {"positions", "0.cu_seqlens", "index and cu_seqlens"},
               {"labels", "1.ids", "index, ids and cu_seqlens"},
               {"split --sp 2", "1.index", "index"},
               {"gather", "0.index", "index"},
               {"attention", "1.k", "index, cu_seqlens, q, k and v"},
               {"attention-gradient", "0.dout", "index, cu_seqlens, q, k, v and dout"},
               {"merge", "0.part_out", "part_out and part_lse"},
               {"loss", "1.logp", "index, labels and logp"},
               {"advantages", "0.groups", "index, cu_seqlens, rewards and groups"},
               {"step --model build", "0.labels", "index, ids and labels"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char sentence[200], test[64];
        make(1, 1, 2);
        put_everything();
        for (int64_t k = 0; k < rows(); k++) {
            put_row(k, "v", s.of[k].v, SEQPAR_SAFETENSORS_F64, 3, KV, OUT);
            put_row(k, "dout", s.of[k].dout, SEQPAR_SAFETENSORS_F64, 3, HEADS, OUT);
            put_documents(k, "rewards", s.of[k].rewards, s.of[k].docs, SEQPAR_SAFETENSORS_F64);
        }
        for (int64_t k = 0; k < made.rank[0].count; k++)
            if (!strcmp(made.rank[0].of[k].name, all[i].without))
                snprintf(made.rank[0].of[k].name, 32, "grad.other");
        snprintf(sentence, sizeof sentence,
                 "run %.*s: " FOLDER
                 "/in/rank0.safetensors: tensor %s is missing; the operation takes %s of every "
                 "micro-batch",
                 (int)strcspn(all[i].operation, " "), all[i].operation, all[i].without,
                 all[i].takes);
        snprintf(test, sizeof test, "without_%s", all[i].without);
        refuses_dump(test, 3, sentence, all[i].operation);
    }
}

/* A dump for all that goes wrong: of two ranks, or of one. */
static void make_bad(int64_t sp) {
    make(sp, 1, 2);
    put_everything();
    for (int64_t i = 0; i < rows(); i++) {
        put_row(i, "k", s.of[i].k, SEQPAR_SAFETENSORS_F64, 3, KV, DIM);
        put_row(i, "v", s.of[i].v, SEQPAR_SAFETENSORS_F64, 3, KV, OUT);
    }
}

static item *bad(const char *name) {
    item *t = find(&made.rank[made.world - 1], name);
    for (int64_t r = made.world - 1; r > 0 && (!t || !t->count); r--)
        t = find(&made.rank[r - 1], name);
    if (!t) exit(1);
    return t;
}

static void test_numbers(void) {
    make_bad(2);
    for (int64_t r = 0; r < 2; r++) /* padding is not looked at */
        for (int64_t i = 0; i < s.of[0].held[r]; i++)
            find(&made.rank[r], "0.q")->x[i * HEADS * DIM] = NAN;
    refuses_dump("nan_in_q", 3, "tensor 0.q or k, v or dout of this micro-batch", "attention");
    make_bad(2);
    for (int64_t r = 0; r < 2; r++)
        for (int64_t i = 0; i < s.of[0].held[r]; i++) find(&made.rank[r], "0.logp")->x[i] = NAN;
    refuses_dump("nan_in_logp", 3, "run loss: " IN ": tensor loss becomes NaN or Inf at",
                 "loss");
    make_bad(2);
    for (int64_t r = 0; r < 2; r++) {
        find(&made.rank[r], "loss")->dtype = SEQPAR_SAFETENSORS_F32;
        for (int64_t i = 0; i < s.of[0].held[r]; i++)
            find(&made.rank[r], "0.logp")->x[i] = -1e200;
    }
    refuses_dump("too_large", 3, "for which F32 has no room; give --dtype float64", "loss");
    make_bad(2);
    bad("grad.w")->x[3] = NAN;
    refuses_dump("nan_in_grad", 3, "run norm: " IN ": grad.w holds NaN or Inf", "norm");
    make_bad(2);
    bad("grad.w")->x[3] += 5;
    refuses_dump("grads_differ", 3, "away from that of another rank; write equal", "norm");
    make_bad(2);
    bad("0.index")->x[0] = 900;
    refuses_dump("index_outside", 3, "tensor 0.index is wrong: 0 tokens are held twice, 1 by",
                 "positions");
    make_bad(1);
    bad("0.ids")->dtype = SEQPAR_SAFETENSORS_I64;
    bad("0.ids")->x[0] = 3e9;
    refuses_dump("ids_too_large", 3, "tensor 0.ids has 3000000000 at", "pack --tokens 900");
    make_bad(1);
    bad("1.logp")->dtype = SEQPAR_SAFETENSORS_F32;
    refuses_dump("types_differ", 3, "tensor 1.logp has another type or shape than on another",
                 "split --sp 2");
}

static void test_states(void) {
    make_bad(2);
    refuses_dump("split_of_split", 2, "its sp is 2 already; run gather first", "split --sp 3");
    refuses_dump("pack_of_split", 2, "it packs the rows of one rank; run gather first",
                 "pack --tokens 900");
    refuses_dump("no_optimizer", 3, "metadata optimizer is none and lr 0; write optimizer",
                 "optimizer");
    say_all("optimizer", "sgd", 0);
    say_all("lr", "%g", 0.1);
    snprintf(bad("param.w")->name, 32, "param.b");
    snprintf(find(&made.rank[0], "param.w")->name, 32, "param.b");
    refuses_dump("no_param", 3, "tensor param.w is missing, and grad. is there", "optimizer");
    for (int64_t r = 0; r < 2; r++)
        snprintf(find(&made.rank[r], "grad.w")->name, 32, "local.g");
    refuses_dump("no_grad", 3, "tensors grad.NAME are missing", "norm");
    for (int64_t i = 0; i < rows(); i++)
        put_documents(i, "rewards", s.of[i].rewards, s.of[i].docs, SEQPAR_SAFETENSORS_F64);
    refuses_dump("advantage_given", 3, "metadata objective is sft and advantage is given",
                 "advantages");
    say_all("objective", "kto", 0);
    refuses_dump("step_of_kto", 3, "metadata objective is kto; step computes sft and dpo",
                 "step --model build");
    say_all("objective", "rm", 0);
    for (int64_t r = 0; r < 2; r++) {
        snprintf(find(&made.rank[r], "1.values")->name, 32, "local.x");
        snprintf(find(&made.rank[r], "0.scores")->name, 32, "local.y");
    }
    refuses_dump("no_scores", 3, "tensor values is missing in some micro-batch", "loss");
    say_all("objective", "sft", 0);
    for (int64_t i = 0; i < rows(); i++) {
        for (int64_t t = 0; t < s.of[i].n; t++) s.of[i].labels[t] = -100;
        put_row(i, "labels", s.of[i].labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
    }
    refuses_dump("no_label", 3, "tensor labels has no token to be learnt", "loss");
    make(1, 1, 1);
    s.of[0].docs = 1;
    s.of[0].cu[1] = s.of[0].n;
    put_documents(0, "cu_seqlens", NULL, 2, SEQPAR_SAFETENSORS_I64);
    put_everything();
    say_all("objective", "dpo", 0);
    refuses_dump("odd_pair", 3, "a row has a document without a partner", "loss");
    make(2, 1, 1);
    scale = 1;
    put_parts(0, 3);
    bad("0.part_lse")->shape[0] = bad("0.part_lse")->shape[0] == 3 ? 1 : 3;
    bad("0.part_lse")->shape[1] *= 3;
    refuses_dump("parts_differ", 3, "tensors 0.part_out and 0.part_lse have shapes that do",
                 "merge");
    make(2, 1, 1);
    put_parts(0, 3);
    bad("0.part_lse")->x[0] = NAN;
    refuses_dump("nan_in_lse", 3, "tensor 0.part_lse has nan at element 0", "merge");
}

/* --out is there: a folder, a file, one that is empty; nothing of it changes. Files cut off. */
static void test_files(void) {
    make_bad(2);
    write_books("in", &made);
    mkdir(FOLDER "/there", 0777);
    refuses("out_is_there", 3, "there: it is there already; give another --out",
            "positions " IN " --out " FOLDER "/there");
    refuses("out_is_there_slash", 3, "there: it is there already; give another --out",
            "positions " IN " --out " FOLDER "/there//");
    refuses("out_is_the_dump", 3, "in: it is there already", "positions " IN " --out " IN);
    if (system("touch " FOLDER "/file; rmdir " FOLDER "/there")) exit(1);
    refuses("out_is_a_file", 3, "file: it is there already",
            "positions " IN " --out " FOLDER "/file");
    if (system("truncate -s -1 " IN "/rank1.safetensors")) exit(1);
    refuses("cut_off", 3, "run positions: " IN "/rank1.safetensors", "positions " IN TO);
    if (system("truncate -s 5 " IN "/rank1.safetensors")) exit(1);
    refuses("cut_off_early", 3, "run positions: " IN "/rank1.safetensors", "positions " IN TO);
    if (system("rm " IN "/rank1.safetensors")) exit(1);
    refuses("rank_missing", 3, "no file of rank 1 of 2", "positions " IN TO);
    if (system("rm " IN "/*")) exit(1);
    refuses("nothing", 3, "no .safetensors file", "positions " IN TO);
}

/* ---- what is said of it ---- */

static const cJSON *tensor_said(const cJSON *all, int rank, const char *name) {
    const cJSON *one = cJSON_GetArrayItem(cJSON_GetObjectItem(all, "ranks"), rank), *t;
    cJSON_ArrayForEach(t, cJSON_GetObjectItem(one, "tensors")) {
        if (!strcmp(cJSON_GetObjectItem(t, "name")->valuestring, name)) return t;
    }
    return NULL;
}

static void test_json(void) {
    cJSON *all;
    const cJSON *t;
    make_bad(3);
    write_books("in", &made);
    runs("loss", "in", "out", "--json");
    all = cJSON_Parse(said);
    t = all ? tensor_said(all, 2, "loss") : NULL;
    test_expect(t && cJSON_IsTrue(cJSON_GetObjectItem(t, "replaced")) &&
                    fabs(cJSON_GetObjectItem(t, "value")->valuedouble - loss_of_tokens(0, 0)) <
                        1e-12 &&
                    !strcmp(cJSON_GetObjectItem(all, "operation")->valuestring, "loss") &&
                    cJSON_GetArraySize(cJSON_GetObjectItem(all, "ranks")) == 3,
                "'%s'", said);
    cJSON_Delete(all);
    runs("positions", "in", "out", "--json");
    all = cJSON_Parse(said);
    t = all ? tensor_said(all, 0, "1.positions") : NULL;
    test_expect(t && cJSON_IsFalse(cJSON_GetObjectItem(t, "replaced")) &&
                    cJSON_GetArrayItem(cJSON_GetObjectItem(t, "shape"), 0)->valueint ==
                        s.of[1].held[0] &&
                    !tensor_said(all, 0, "0.ids"),
                "'%s'", said);
    cJSON_Delete(all);
    runs("gather", "in", "out", "--json");
    all = cJSON_Parse(said);
    t = all ? cJSON_GetArrayItem(cJSON_GetObjectItem(all, "left_out"), 0) : NULL;
    test_expect(t && !strcmp(t->valuestring, "local.NAME"), "'%s'", said);
    cJSON_Delete(all);
    test_end("run_json");
}

/* Numbers of 16 bits are replaced by the nearest of 16 bits. */
static void test_half(void) {
    make_bad(2);
    for (int64_t r = 0; r < 2; r++)
        find(&made.rank[r], "loss")->dtype = SEQPAR_SAFETENSORS_BF16;
    write_books("in", &made);
    runs("loss", "in", "out", "");
    open_result();
    for (int64_t r = 0; r < 2; r++) {
        item *t = find(&got.rank[r], "loss");
        double want = loss_of_tokens(0, 0), unit = pow(2, floor(log2(fabs(want))) - 7);
        test_expect(t && t->dtype == SEQPAR_SAFETENSORS_BF16 &&
                        fabs(t->x[0] - want) <= unit / 2 && fmod(t->x[0], unit) == 0,
                    "bf16 of %g is %g", want, t ? t->x[0] : NAN);
    }
    runs("loss", "in", "out", "--dtype float64");
    open_result();
    test_expect(fabs(find(&got.rank[0], "loss")->x[0] - loss_of_tokens(0, 0)) < 1e-13,
                "--dtype does not hold");
    test_end("run_dtypes");
}

/* ---- what stays as it was ---- */

/* The type of computed numbers: of what they replace, else F64 where any file has that, last
   file or first, else F32; or what is said. */
static void test_types(void) {
    static const struct {
        int64_t wide; /* the rank that has a tensor of F64; -1: none */
        const char *options;
        seqpar_safetensors_dtype want;
    } table[] = {{-1, "", SEQPAR_SAFETENSORS_F32},
                 {2, "", SEQPAR_SAFETENSORS_F64},
                 {0, "", SEQPAR_SAFETENSORS_F64},
                 {2, "--dtype float32", SEQPAR_SAFETENSORS_F32},
                 {-1, "--dtype float64", SEQPAR_SAFETENSORS_F64}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(3, 1, 2);
        for (int64_t n = 0; n < rows(); n++) {
            put_row(n, "labels", s.of[n].labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            put_row(n, "logp", s.of[n].logp, SEQPAR_SAFETENSORS_F32, 1, 1, 1);
        }
        if (table[i].wide >= 0)
            put_weights(table[i].wide, "local", weights[0], 0, SEQPAR_SAFETENSORS_F64);
        write_books("in", &made);
        runs("loss", "in", "out", table[i].options);
        open_result();
        for (int64_t r = 0; r < 3; r++)
            test_expect(find(&got.rank[r], "loss") &&
                            find(&got.rank[r], "loss")->dtype == table[i].want,
                        "the loss of rank %lld has another type", (long long)r);
        test_end("run_type_%zu", i);
    }
}

/* Labels that have no room in I32 become I64; others stay. */
static void test_large_labels(void) {
    make(2, 1, 2);
    for (int64_t n = 0; n < rows(); n++) {
        for (int64_t t = 0; t < s.of[n].n; t++)
            s.of[n].ids[t] = n ? 3e9 + (double)t : INT32_MAX - (double)(t % 2);
        put_row(n, "ids", s.of[n].ids, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
        put_row(n, "labels", s.of[n].labels, SEQPAR_SAFETENSORS_I32, 1, 1, 1);
    }
    write_books("in", &made);
    runs("labels", "in", "out", "--unmasked");
    open_result();
    for (int64_t n = 0; n < rows(); n++) {
        const row *w = &s.of[n];
        double want[MOST];
        for (int64_t t = 0; t < w->n; t++)
            want[t] = t + 1 < w->n && document_of(w, t) == document_of(w, t + 1) ? w->ids[t + 1]
                                                                                 : -100;
        compare(n, "labels", want, 1, 0);
        for (int64_t r = 0; r < 2; r++) {
            item *t = find(&got.rank[r], n ? "1.labels" : "0.labels");
            int large = 0;
            for (int64_t k = 0; k < w->n; k++)
                large |= w->member[k] == r && want[k] > INT32_MAX;
            test_expect(t && t->dtype ==
                                 (large ? SEQPAR_SAFETENSORS_I64 : SEQPAR_SAFETENSORS_I32),
                        "labels of row %lld have another type", (long long)n);
        }
    }
    test_end("run_labels_without_room");
}

/* Each rank's own metadata stays its own; where tokens move, a replica's first rank's. */
static void test_notes(void) {
    static const struct {
        const char *operation, *options;
        int64_t sp, to;
    } table[] = {{"positions", "", 3, 3}, {"gather", "", 3, 1}, {"split", "--sp 2", 1, 2}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(table[i].sp, 2, 2);
        for (int64_t r = 0; r < made.world; r++)
            say(&made.rank[r], "note.own", "%.0f", (double)(r + 40), 0);
        write_books("in", &made);
        runs(table[i].operation, "in", "out", table[i].options);
        open_result();
        test_expect(got.world == 2 * table[i].to, "%lld ranks", (long long)got.world);
        for (int64_t r = 0; r < got.world; r++) {
            int64_t from = table[i].sp == table[i].to ? r : r / table[i].to * table[i].sp;
            const char *own = said_of(&got.rank[r], "note.own"),
                       *number = said_of(&got.rank[r], "rank");
            test_expect(own && atoi(own) == from + 40 && number && atoi(number) == r,
                        "rank %lld has the metadata of %s", (long long)r, own ? own : "none");
            test_expect(atoi(said_of(&got.rank[r], "sp")) == table[i].to, "another sp");
        }
        test_end("run_metadata_of_%s", table[i].operation);
    }
}

/* Files keep their names where no token moves. */
static void test_file_names(void) {
    make_bad(2);
    write_books("in", &made);
    if (rename(FOLDER "/in/rank1.safetensors", FOLDER "/in/of b.safetensors")) exit(1);
    runs("loss", "in", "out", "");
    test_expect(!access(FOLDER "/out/of b.safetensors", R_OK) &&
                    !access(FOLDER "/out/rank0.safetensors", R_OK) &&
                    access(FOLDER "/out/rank1.safetensors", R_OK),
                "files have other names");
    runs("gather", "in", "out", "");
    test_expect(!access(FOLDER "/out/rank0.safetensors", R_OK) &&
                    access(FOLDER "/out/of b.safetensors", R_OK),
                "the gathered file has another name");
    test_end("run_file_names");
}

/* Parameters keep their shape and type when ranks are gathered, those of a later rank, too;
   what is not written is said, each once. */
static void test_shapes(void) {
    make(2, 2, 1);
    fill(weights[0], WEIGHTS, 1);
    for (int64_t r = 0; r < made.world; r++) {
        item *t = put(&made.rank[r], "grad.wide", SEQPAR_SAFETENSORS_F64, 2, 3, 4, 1);
        memcpy(t->x, weights[0], (size_t)t->count * sizeof *t->x);
        if (r < 2) continue;
        t = put(&made.rank[r], "param.late", SEQPAR_SAFETENSORS_F32, 2, 2, 3, 1);
        for (int64_t i = 0; i < t->count; i++) t->x[i] = (float)weights[0][i];
    }
    put_weights(3, "local", weights[0], 0, SEQPAR_SAFETENSORS_F64);
    put_weights(1, "local", weights[0], 0, SEQPAR_SAFETENSORS_F64);
    put(&made.rank[0], "0.part_lse", SEQPAR_SAFETENSORS_F64, 1, 3, 1, 1);
    write_books("in", &made);
    runs("gather", "in", "out", "");
    test_expect(strstr(said, "left out: part_lse local.NAME\n") != NULL, "'%s'", said);
    open_result();
    for (int64_t r = 0; r < 2; r++) {
        item *wide = find(&got.rank[r], "grad.wide"), *late = find(&got.rank[r], "param.late");
        test_expect(wide && wide->dims == 2 && wide->shape[0] == 3 && wide->shape[1] == 4 &&
                        wide->dtype == SEQPAR_SAFETENSORS_F64 && wide->count == 12 &&
                        !memcmp(wide->x, weights[0], 12 * sizeof *wide->x),
                    "grad.wide is another");
        test_expect(late && late->dims == 2 && late->shape[0] == 2 && late->shape[1] == 3 &&
                        late->dtype == SEQPAR_SAFETENSORS_F32 && late->count == 6 &&
                        late->x[5] == (float)weights[0][5],
                    "param.late is another");
    }
    test_end("run_gather_shapes");
}

/* A step whose parameters the dump has not: all are written, whole, as the model has them. */
static void test_bare_step(void) {
    books want;
    test_expect(!gen("gen", "--sp 2 --accumulation 2 --tokens 37"), "%s", said);
    books_free(&made);
    read_books("gen/got", &made);
    read_books("gen/got", &want);
    for (int64_t r = 0; r < made.world; r++)
        for (int64_t i = 0; i < made.rank[r].count; i++)
            for (int k = 0; k < 3; k++) {
                static const char *const prefixes[] = {"grad.", "param.", "after."};
                item *t = &made.rank[r].of[i];
                if (strncmp(t->name, prefixes[k], strlen(prefixes[k]))) continue;
                free(t->x);
                *t = made.rank[r].of[--made.rank[r].count];
                i--;
                break;
            }
    write_books("in", &made);
    runs("step", "in", "out", "--model " FOLDER "/gen/model");
    books_free(&got);
    read_books("out", &got);
    for (int64_t r = 0; r < want.world; r++)
        for (int64_t i = 0; i < want.rank[r].count; i++) {
            const item *a = &want.rank[r].of[i], *b = find(&got.rank[r], a->name);
            if (strncmp(a->name, "grad.", 5) && strncmp(a->name, "after.", 6)) continue;
            test_expect(b && b->dims == a->dims && b->shape[0] == a->shape[0] &&
                            (a->dims < 2 || b->shape[1] == a->shape[1]) &&
                            test_distance(b->x, a->x, a->count) <= 1e-12,
                        "%s of rank %lld is another, or not there", a->name, (long long)r);
        }
    books_free(&want);
    test_end("run_step_without_parameters");
}
int main(int argc, char **argv) {
    test_begin(argc, argv);
    if (system("rm -rf " FOLDER)) return 1;
    mkdir(FOLDER, 0777);
    TEST(test_usage());
    TEST(test_missing());
    TEST(test_numbers());
    TEST(test_states());
    TEST(test_files());
    TEST(test_json());
    TEST(test_half());
    TEST(test_types());
    TEST(test_large_labels());
    TEST(test_notes());
    TEST(test_file_names());
    TEST(test_shapes());
    TEST(test_bare_step());
    books_free(&made);
    books_free(&got);
    return test_summary();
}
