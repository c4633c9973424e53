/* SPDX-License-Identifier: MIT OR Unlicense */
/* A NULL in the place of each pointer of each public function: refused by name, never a crash. What may be NULL stands in a
   table of its own; a pointer of a prototype that is in neither is a failure, so that a new function cannot be forgotten. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "seqpar_llama.h"
#include "support/test.h"
#include <ctype.h>
#include <sys/wait.h>

/* ---- what was tried ---- */

enum { MOST = 1024, TOKENS = 7, WIDE = 8, VOCAB = 11 };
static char tried[MOST][96]; /* "function: pointer" */
static int tries;
static seqpar_error error;

static void note_tried(const char *function, const char *pointer) {
    if (tries < MOST) snprintf(tried[tries++], sizeof tried[0], "%s: %s", function, pointer);
}

static int is_tried(const char *function, const char *pointer) {
    char key[96];
    snprintf(key, sizeof key, "%s: %s", function, pointer);
    for (int i = 0; i < tries; i++)
        if (!strcmp(tried[i], key)) return 1;
    return 0;
}

static void function_name(char *out, size_t size, const char *call) {
    snprintf(out, size, "%.*s", (int)strcspn(call, "("), call);
}

/* The call returned POINTER and said which; said 0: it has nobody to tell. */
static void refused(const char *call, const char *pointer, seqpar_status status, int said) {
    char name[64], sentence[160];
    function_name(name, sizeof name, call);
    snprintf(sentence, sizeof sentence, "%s: %s is NULL", name, pointer);
    note_tried(name, pointer);
    test_expect(status == SEQPAR_ERR_POINTER, "%s without %s: %s", name, pointer,
                seqpar_status_name(status));
    test_expect(!said || !strncmp(error.text, sentence, strlen(sentence)),
                "%s without %s: '%s'", name, pointer, error.text);
    memset(&error, 0, sizeof error);
}
#define REFUSED(pointer, call)          refused(#call, pointer, call, 1)
#define REFUSED_SILENTLY(pointer, call) refused(#call, pointer, call, 0)

/* The call, in a process of its own, says which on stderr and aborts. */
static void aborted(const char *call, const char *pointer, int status, const char *text) {
    char name[64], sentence[160];
    function_name(name, sizeof name, call);
    snprintf(sentence, sizeof sentence, "%s: %s is NULL", name, pointer);
    note_tried(name, pointer);
    test_expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT,
                "%s without %s: no abort (%d)", name, pointer, status);
    test_expect(!strncmp(text, sentence, strlen(sentence)), "%s without %s: '%s'", name,
                pointer, text);
}
#define ABORTS(pointer, call) \
    do { \
        char text[300] = ""; \
        int ends[2], status = 0; \
        pid_t child; \
        fflush(NULL); \
        if (pipe(ends)) abort(); \
        if (!(child = fork())) { \
            dup2(ends[1], 2); \
            (void)(call); \
            _exit(0); \
        } \
        close(ends[1]); \
        for (ssize_t n, at = 0; \
             (n = read(ends[0], text + at, sizeof text - 1 - (size_t)at)) > 0;) \
            at += n; \
        close(ends[0]); \
        waitpid(child, &status, 0); \
        aborted(#call, pointer, status, text); \
    } while (0)

/* ---- something that works, to leave one pointer out of ---- */

static int32_t ids[TOKENS] = {0, 4, 2, 9, 1, 3, 5},
               targets[TOKENS] = {4, 2, 9, 1, 3, 5, SEQPAR_IGNORE},
               positions[TOKENS] = {0, 1, 2, 3, 4, 5, 6};
static const int64_t cu_seqlens[2] = {0, TOKENS};
static const int64_t doc_source[1] = {0};
static seqpar_row row = {.tokens = TOKENS,
                         .cell = 2,
                         .docs = 1,
                         .cu_seqlens = cu_seqlens,
                         .ids = ids,
                         .targets = targets,
                         .position_ids = positions,
                         .doc_source = doc_source};
static const seqpar_tensor tensors[2] = {{"a", VOCAB, WIDE, 0, 1, 0},
                                         {"b", 1, WIDE, VOCAB *WIDE, 0, 1}};
static float floats[8][VOCAB * WIDE * 2];
static double doubles[4][64];
static seqpar_comm *world;
static seqpar_device *device;
static seqpar_ctx ctx;
static seqpar_split_desc split_desc = {SEQPAR_LAYOUT_ZIGZAG, 1, 0};
static seqpar_share share;

static void all_open(void) {
    world = seqpar_comm_self();
    world->error = &error;
    device = seqpar_device_cpu(1);
    test_expect(!seqpar_ctx_open(&ctx, world, device, 1), "no context: %s", error.text);
    test_expect(!seqpar_split(&error, &share, &row, 1, &split_desc), "no share: %s",
                error.text);
}

static void all_close(void) {
    seqpar_share_free(&share);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(world);
}

/* ---- by chapter ---- */

static void test_util(void) {
    char out[8];
    ABORTS("out", seqpar__escape(NULL, 8, "a"));
    ABORTS("text", seqpar__escape(out, 8, NULL));
    ABORTS("text", seqpar__utf8_length(NULL, 1));
    ABORTS("order", seqpar_shuffle(NULL, 1, 1, 1));
    test_end("null_util");
}

static seqpar_status no_rank(seqpar_comm *comm, void *user) {
    return (void)comm, (void)user, SEQPAR_OK;
}

static void test_comm(void) {
    int64_t one = 1;
    seqpar_transfer to = {0, &one, 8};
    seqpar_group group = {"g", 0, &to, 1, &to, 1}, nameless = group, sends = group,
                 recvs = group;
    seqpar_mismatch differ = {"a", "b", 0, 0, 0, 1, 8, 8}, mine = differ, theirs = differ;
    seqpar_request request;
    seqpar_comm *sub;
    nameless.name = NULL, sends.sends = NULL, recvs.recvs = NULL, mine.name = NULL,
    theirs.sent_name = NULL;
    REFUSED_SILENTLY("comm", seqpar_comm_begin(NULL, &group, NULL, &request));
    REFUSED("group", seqpar_comm_begin(world, NULL, NULL, &request));
    REFUSED("request", seqpar_comm_begin(world, &group, NULL, NULL));
    REFUSED("group->name", seqpar_comm_begin(world, &nameless, NULL, &request));
    REFUSED("group->sends", seqpar_comm_begin(world, &sends, NULL, &request));
    REFUSED("group->recvs", seqpar_comm_begin(world, &recvs, NULL, &request));
    REFUSED_SILENTLY("comm", seqpar_comm_wait(NULL, &request, NULL));
    REFUSED("request", seqpar_comm_wait(world, NULL, NULL));
    REFUSED_SILENTLY("comm", seqpar_comm_all_gather(NULL, &one, &one, &one, "g"));
    REFUSED("bytes", seqpar_comm_all_gather(world, &one, &one, NULL, "g"));
    REFUSED("name", seqpar_comm_all_gather(world, &one, &one, &one, NULL));
    one = 8;
    REFUSED("recv", seqpar_comm_all_gather(world, NULL, &one, &one, "g"));
    REFUSED("send", seqpar_comm_all_gather(world, &one, NULL, &one, "g"));
    REFUSED_SILENTLY("comm", seqpar_comm_barrier(NULL));
    REFUSED_SILENTLY("comm", seqpar_comm_broadcast(NULL, &one, 8, 0));
    REFUSED("data", seqpar_comm_broadcast(world, NULL, 8, 0));
    REFUSED_SILENTLY("comm", seqpar_comm_sum_i64(NULL, &one, 1));
    REFUSED("values", seqpar_comm_sum_i64(world, NULL, 1));
    REFUSED_SILENTLY("comm", seqpar_comm_max_i64(NULL, &one, 1));
    REFUSED("values", seqpar_comm_max_i64(world, NULL, 1));
    REFUSED_SILENTLY("comm", seqpar_comm_split(NULL, 0, 0, &sub));
    REFUSED("sub", seqpar_comm_split(world, 0, 0, NULL));
    ABORTS("comm", seqpar_comm_abort(NULL, "a"));
    ABORTS("text", seqpar_comm_abort(world, NULL));
    REFUSED("m", seqpar_comm_mismatch(&error, NULL));
    REFUSED("m->name", seqpar_comm_mismatch(&error, &mine));
    REFUSED("m->sent_name", seqpar_comm_mismatch(&error, &theirs));
    REFUSED("fn", seqpar_run_threads(2, NULL, NULL, &error));
    test_expect(!seqpar_run_threads(2, no_rank, NULL, NULL),
                "an error that is NULL is refused");
    test_end("null_comm");
}

static void test_fold(void) {
    const int64_t leaves[2] = {0, 1};
    const seqpar_node node = {0, 0};
    seqpar_fold fold;
    ABORTS("fold", seqpar_fold_init(NULL, leaves, 2));
    ABORTS("leaves", seqpar_fold_init(&fold, NULL, 2));
    ABORTS("fold", seqpar_fold_free(NULL));
    REFUSED_SILENTLY("fold", seqpar_fold_push(NULL, node, SEQPAR_FOLD_LEAF, 0));
    REFUSED_SILENTLY("fold", seqpar_fold_flush(NULL));
    test_end("null_fold");
}

static void test_rows(void) {
    const seqpar_document document = {.ids = ids, .tokens = TOKENS};
    const seqpar_pack_desc pack = {.pack_len = 8};
    seqpar_batch batch;
    seqpar_share other;
    seqpar_balance balance;
    seqpar_row bare = row;
    int64_t rank, local;
    REFUSED("batch", seqpar_pack(&error, NULL, &document, 1, &pack));
    REFUSED("documents", seqpar_pack(&error, &batch, NULL, 1, &pack));
    REFUSED("desc", seqpar_pack(&error, &batch, &document, 1, NULL));
    const seqpar_part part = {1, 1, 0, 0};
    int64_t first, count;
    REFUSED("first", seqpar_part_rows(&error, NULL, &count, &row, 1, &part));
    REFUSED("count", seqpar_part_rows(&error, &first, NULL, &row, 1, &part));
    REFUSED("rows", seqpar_part_rows(&error, &first, &count, NULL, 1, &part));
    REFUSED("part", seqpar_part_rows(&error, &first, &count, &row, 1, NULL));
    test_expect(!seqpar_part_rows(&error, &first, &count, NULL, 0, &part) && !first && !count,
                "no rows");
    ABORTS("batch", seqpar_batch_free(NULL));
    REFUSED("share", seqpar_split(&error, NULL, &row, 1, &split_desc));
    REFUSED("rows", seqpar_split(&error, &other, NULL, 1, &split_desc));
    REFUSED("desc", seqpar_split(&error, &other, &row, 1, NULL));
    ABORTS("share", seqpar_share_free(NULL));
    REFUSED("sp_rank", seqpar_split_owner(&error, NULL, &local, &row, 0, &split_desc));
    REFUSED("local", seqpar_split_owner(&error, &rank, NULL, &row, 0, &split_desc));
    REFUSED("row", seqpar_split_owner(&error, &rank, &local, NULL, 0, &split_desc));
    REFUSED("desc", seqpar_split_owner(&error, &rank, &local, &row, 0, NULL));
    REFUSED("balance", seqpar_split_balance(&error, NULL, &row, 1, SEQPAR_LAYOUT_ZIGZAG, 1));
    REFUSED("rows", seqpar_split_balance(&error, &balance, NULL, 1, SEQPAR_LAYOUT_ZIGZAG, 1));
    ABORTS("balance", seqpar_balance_poor(NULL, 1));
    ABORTS("local", seqpar_scatter(NULL, ids, &share, 0, 4));
    ABORTS("global", seqpar_scatter(targets, NULL, &share, 0, 4));
    ABORTS("share", seqpar_scatter(targets, ids, NULL, 0, 4));
    ABORTS("global", seqpar_gather(NULL, ids, &share, 0, 4));
    ABORTS("local", seqpar_gather(targets, NULL, &share, 0, 4));
    ABORTS("share", seqpar_gather(targets, ids, NULL, 0, 4));
    /* a row is one document where it has none */
    bare.docs = 0, bare.cu_seqlens = NULL, bare.doc_source = NULL;
    test_expect(!seqpar_split(&error, &other, &bare, 1, &split_desc),
                "docs 0 without cu_seqlens: %s", error.text);
    seqpar_share_free(&other);
    test_end("null_rows");
}

static int no_block(void *user, const seqpar_block *block, void *out, double *lse) {
    return (void)user, (void)block, (void)out, (void)lse, 0;
}
static int no_block_back(void *user, const seqpar_block *block, void *dq, void *dk, void *dv) {
    return (void)user, (void)block, (void)dq, (void)dk, (void)dv, 0;
}

static void test_devices(void) {
    const seqpar_block_kernel forward = {SEQPAR_DTYPE_F32, no_block, NULL, NULL},
                              backward = {SEQPAR_DTYPE_F32, NULL, no_block_back, NULL};
    seqpar_ctx other;
    seqpar_buffer buffer;
    ABORTS("device", seqpar_device_user_kernel(NULL, &forward));
    ABORTS("kernel", seqpar_device_user_kernel(device, NULL));
    ABORTS("kernel->forward", seqpar_device_user_kernel(device, &backward));
    ABORTS("kernel->backward", seqpar_device_user_kernel(device, &forward));
    ABORTS("device", seqpar_device_user_product(NULL, NULL));
    ABORTS("device", seqpar_device_read(NULL, doubles[0], floats[0], 0, 3, SEQPAR_DTYPE_F32));
    ABORTS("to", seqpar_device_read(device, NULL, floats[0], 0, 3, SEQPAR_DTYPE_F32));
    ABORTS("from", seqpar_device_read(device, doubles[0], NULL, 0, 3, SEQPAR_DTYPE_F32));
    ABORTS("device", seqpar_device_write(NULL, floats[0], 0, doubles[0], 3, SEQPAR_DTYPE_F32));
    ABORTS("to", seqpar_device_write(device, NULL, 0, doubles[0], 3, SEQPAR_DTYPE_F32));
    ABORTS("from", seqpar_device_write(device, floats[0], 0, NULL, 3, SEQPAR_DTYPE_F32));
    REFUSED_SILENTLY("ctx", seqpar_ctx_open(NULL, world, device, 1));
    REFUSED_SILENTLY("world", seqpar_ctx_open(&other, NULL, device, 1));
    ABORTS("ctx", seqpar_ctx_close(NULL));
    REFUSED_SILENTLY("ctx", seqpar_buffer_new(NULL, &buffer, 8, SEQPAR_MEM_SCRATCH));
    REFUSED("buffer", seqpar_buffer_new(&ctx, NULL, 8, SEQPAR_MEM_SCRATCH));
    ABORTS("ctx", seqpar_buffer_free(NULL, &buffer));
    ABORTS("buffer", seqpar_buffer_free(&ctx, NULL));
    test_expect(!seqpar_device_settle(NULL, NULL), "there is nothing to settle");
    test_end("null_devices");
}

static seqpar_attn_io attn_io_without(int tensor) {
    seqpar_attn_io io = {.q = floats[0],
                         .k = floats[1],
                         .v = floats[2],
                         .out = floats[3],
                         .lse = floats[4],
                         .dout = floats[5]};
    io.dq = floats[6], io.dk = floats[7], io.dv = floats[0];
    const void **in[4] = {&io.q, &io.k, &io.v, &io.dout};
    void **out[5] = {&io.out, &io.lse, &io.dq, &io.dk, &io.dv};
    if (tensor >= 0 && tensor < 4) *in[tensor] = NULL;
    if (tensor >= 4) *out[tensor - 4] = NULL;
    return io;
}

static void test_attention(void) {
    static const char *const names[9] = {"io->q",   "io->k",  "io->v",  "io->dout", "io->out",
                                         "io->lse", "io->dq", "io->dk", "io->dv"};
    const seqpar_attn_desc desc = {
        .heads = 1, .kv_heads = 1, .head_dim = 4, .layout = SEQPAR_LAYOUT_ZIGZAG};
    const seqpar_plan_desc plan_desc = {.sp_size = 1, .kv_heads = 1};
    seqpar_attn_io io = attn_io_without(-1);
    seqpar_plan plan;
    seqpar_attn *attn;
    REFUSED("plan", seqpar_plan_make(&error, NULL, &plan_desc));
    REFUSED("desc", seqpar_plan_make(&error, &plan, NULL));
    ABORTS("plan", seqpar_plan_free(NULL));
    ABORTS("from", seqpar_attn_dropout(NULL, 0, 0, 0, 0));
    REFUSED_SILENTLY("ctx", seqpar_attn_open(NULL, &attn, &row, 1, &desc));
    REFUSED("attn", seqpar_attn_open(&ctx, NULL, &row, 1, &desc));
    REFUSED("rows", seqpar_attn_open(&ctx, &attn, NULL, 1, &desc));
    REFUSED("desc", seqpar_attn_open(&ctx, &attn, &row, 1, NULL));
    test_expect(!seqpar_attn_open(&ctx, &attn, &row, 1, &desc), "%s", error.text);
    ABORTS("attn", seqpar_attn_share(NULL));
    REFUSED_SILENTLY("ctx", seqpar_attn_forward(NULL, attn, &io));
    REFUSED("attn", seqpar_attn_forward(&ctx, NULL, &io));
    REFUSED("io", seqpar_attn_forward(&ctx, attn, NULL));
    REFUSED_SILENTLY("ctx", seqpar_attn_backward(NULL, attn, &io));
    REFUSED("attn", seqpar_attn_backward(&ctx, NULL, &io));
    REFUSED("io", seqpar_attn_backward(&ctx, attn, NULL));
    for (int i = 0; i < 9; i++) {
        io = attn_io_without(i);
        if (i < 6 && i != 3) REFUSED(names[i], seqpar_attn_forward(&ctx, attn, &io));
        REFUSED(names[i], seqpar_attn_backward(&ctx, attn, &io));
        if (i < 3) REFUSED(names[i], seqpar_attn_run_threads(&error, &io, &row, &desc, 2));
    }
    io = attn_io_without(-1);
    REFUSED("io", seqpar_attn_run_threads(&error, NULL, &row, &desc, 2));
    REFUSED("row", seqpar_attn_run_threads(&error, &io, NULL, &desc, 2));
    REFUSED("desc", seqpar_attn_run_threads(&error, &io, &row, NULL, 2));
    seqpar_attn_close(&ctx, attn);
    seqpar_attn_close(&ctx, NULL);
    test_end("null_attention");
}

static seqpar_vocab_io vocab_io_without(int tensor) {
    seqpar_vocab_io io = {
        .hidden = floats[0], .table = floats[1], .targets = targets, .tokens = TOKENS};
    io.dhidden = floats[2], io.nodes = floats[3];
    if (tensor == 0) io.hidden = NULL;
    if (tensor == 1) io.table = NULL;
    if (tensor == 2) io.targets = NULL;
    if (tensor == 3) io.dhidden = NULL;
    if (tensor == 4) io.nodes = NULL;
    return io;
}

static seqpar_status no_tile(void *user, const seqpar_token_tile *tile) {
    return user || tile->rows ? SEQPAR_ERR_STEP : SEQPAR_OK;
}

static void test_token_tiles(void) {
    const seqpar_share share = {0};
    const seqpar_token_fold fold = {0};
    REFUSED("share", seqpar_token_tiles(&error, NULL, &fold, 1, 1, no_tile, NULL));
    REFUSED("fold", seqpar_token_tiles(&error, &share, NULL, 1, 1, no_tile, NULL));
    REFUSED("fn", seqpar_token_tiles(&error, &share, &fold, 1, 1, NULL, NULL));
    ABORTS("share", seqpar_token_tile_rows(NULL, 1, 1));
    ABORTS("share", seqpar_token_node_count(NULL, &fold, 1));
    ABORTS("fold", seqpar_token_node_count(&share, NULL, 1));
}

static void test_vocab(void) {
    static const char *const names[5] = {"io->hidden", "io->table", "io->targets",
                                         "io->dhidden", "io->nodes"};
    const seqpar_vocab_desc desc = {.hidden = WIDE, .vocab = VOCAB};
    seqpar_vocab_io io = vocab_io_without(-1), made = io;
    static float dlogits[TOKENS * VOCAB];
    made.dlogits = dlogits;
    REFUSED_SILENTLY("ctx", seqpar_vocab_forward(NULL, &io, &desc));
    REFUSED("io", seqpar_vocab_forward(&ctx, NULL, &desc));
    REFUSED("desc", seqpar_vocab_forward(&ctx, &io, NULL));
    ABORTS("desc", seqpar_vocab_node_count(NULL, NULL, NULL));
    test_token_tiles();
    REFUSED_SILENTLY("ctx", seqpar_vocab_backward(NULL, &io, NULL, NULL, &desc));
    REFUSED("io", seqpar_vocab_backward(&ctx, NULL, NULL, NULL, &desc));
    REFUSED("desc", seqpar_vocab_backward(&ctx, &io, NULL, NULL, NULL));
    REFUSED_SILENTLY("ctx", seqpar_vocab_nodes(NULL, &made, NULL, NULL, &desc, 0, 1));
    REFUSED("io", seqpar_vocab_nodes(&ctx, NULL, NULL, NULL, &desc, 0, 1));
    REFUSED("desc", seqpar_vocab_nodes(&ctx, &made, NULL, NULL, NULL, 0, 1));
    made.nodes = NULL;
    REFUSED("io->nodes", seqpar_vocab_nodes(&ctx, &made, NULL, NULL, &desc, 0, 1));
    for (int i = 0; i < 5; i++) {
        io = vocab_io_without(i);
        if (i < 3) REFUSED(names[i], seqpar_vocab_forward(&ctx, &io, &desc));
        REFUSED(names[i], seqpar_vocab_backward(&ctx, &io, NULL, NULL, &desc));
    }
    for (int i = 0; i < 2; i++) {
        const seqpar_vocab_teacher teacher = {i ? floats[0] : NULL, i ? NULL : floats[1], WIDE,
                                              0};
        io = vocab_io_without(-1);
        io.teacher = &teacher;
        REFUSED(i ? "io->teacher->table" : "io->teacher->hidden",
                seqpar_vocab_forward(&ctx, &io, &desc));
        REFUSED(i ? "io->teacher->table" : "io->teacher->hidden",
                seqpar_vocab_backward(&ctx, &io, NULL, NULL, &desc));
    }
    test_end("null_vocab");
}

static void test_losses(void) {
    const double weights[TOKENS] = {0};
    seqpar_sft_desc desc = {.count = TOKENS};
    seqpar_host_seeds seeds = {doubles[0], NULL, NULL}, none = {NULL, doubles[1], doubles[2]};
    seqpar_segments segments = {.width = 1};
    const int64_t leaf = 0;
    ABORTS("bytes", seqpar_nf4_at(NULL, 1));
    REFUSED("bytes", seqpar_nf4_quantize(&error, NULL, floats[0], 1));
    REFUSED("values", seqpar_nf4_quantize(&error, floats[1], NULL, 1));
    REFUSED("seeds", seqpar_sft_seeds(&error, NULL, targets, weights, TOKENS, &desc));
    REFUSED("targets", seqpar_sft_seeds(&error, &seeds, NULL, weights, TOKENS, &desc));
    REFUSED("desc", seqpar_sft_seeds(&error, &seeds, targets, weights, TOKENS, NULL));
    REFUSED("seeds->dlogp", seqpar_sft_seeds(&error, &none, targets, weights, TOKENS, &desc));
    test_expect(!seqpar_sft_seeds(&error, &seeds, targets, NULL, TOKENS, &desc),
                "terms that are 0 are wanted: %s", error.text);
    desc.label_smoothing = 0.1;
    REFUSED("seeds->dsmooth",
            seqpar_sft_seeds(&error, &seeds, targets, weights, TOKENS, &desc));
    desc.label_smoothing = 0, desc.z_loss = 1e-4;
    REFUSED("seeds->dzloss", seqpar_sft_seeds(&error, &seeds, targets, weights, TOKENS, &desc));
    ABORTS("desc", seqpar_sft_token_loss(0, 0, 0, NULL));
    REFUSED_SILENTLY("ctx", seqpar_sum_pieces(NULL, doubles[0], &leaf, doubles[1], 1, 1));
    REFUSED("sum", seqpar_sum_pieces(&ctx, NULL, &leaf, doubles[1], 1, 1));
    REFUSED("leaf", seqpar_sum_pieces(&ctx, doubles[0], NULL, doubles[1], 1, 1));
    REFUSED("values", seqpar_sum_pieces(&ctx, doubles[0], &leaf, NULL, 1, 1));
    REFUSED("segments", seqpar_segments_add(&error, NULL, doubles[0], &share));
    REFUSED("values", seqpar_segments_add(&error, &segments, NULL, &share));
    REFUSED("share", seqpar_segments_add(&error, &segments, doubles[0], NULL));
    REFUSED("segments", seqpar_segments_push(&error, NULL, 0, 0, doubles[0]));
    REFUSED("values", seqpar_segments_push(&error, &segments, 0, 0, NULL));
    REFUSED_SILENTLY("comm", seqpar_segments_sum(NULL, doubles[0], 1, &segments));
    REFUSED("sums", seqpar_segments_sum(world, NULL, 1, &segments));
    test_expect(!seqpar_segments_sum(world, NULL, 0, &segments), "no sums are refused");
    REFUSED("segments", seqpar_segments_sum(world, doubles[0], 1, NULL));
    ABORTS("segments", seqpar_segments_free(NULL));
    ABORTS("values", seqpar_segments_spread(NULL, doubles[0], &share));
    ABORTS("per_document", seqpar_segments_spread(doubles[0], NULL, &share));
    ABORTS("share", seqpar_segments_spread(doubles[0], doubles[1], NULL));
    test_end("null_losses");
}

static void test_objectives(void) {
    const seqpar_preference_desc preference = {.beta = 0.1};
    const seqpar_preference pair = {.chosen_tokens = 1, .rejected_tokens = 1};
    const seqpar_kto_desc kto = {.beta = 0.1};
    seqpar_pair_result result;
    seqpar_kto_result kto_result;
    ABORTS("x", seqpar_mean(NULL, 1));
    REFUSED("result", seqpar_preference_loss(&error, NULL, &pair, &preference));
    REFUSED("pair", seqpar_preference_loss(&error, &result, NULL, &preference));
    REFUSED("desc", seqpar_preference_loss(&error, &result, &pair, NULL));
    ABORTS("h", seqpar_kto_kl(NULL, 1));
    REFUSED("result", seqpar_kto_loss(&error, NULL, 0, 0, 1, &kto));
    REFUSED("desc", seqpar_kto_loss(&error, &kto_result, 0, 0, 1, NULL));
    ABORTS("desc", seqpar_policy_loss(0, 0, 1, NULL));
    ABORTS("aggregate", seqpar_token_weight(NULL, 1));
    test_expect(seqpar_mean(NULL, 0) == 0 && seqpar_kto_kl(NULL, 0) == 0,
                "an array of no elements is refused");
    test_end("null_objectives");
}

static seqpar_status no_leaf(void *user, void *value, int64_t leaf) {
    return (void)user, (void)value, (void)leaf, SEQPAR_OK;
}

static void test_optim_open(seqpar_optim *optim) {
    const seqpar_optim_desc desc = {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
    const seqpar_tensor nameless = {NULL, 1, WIDE, 0, 0, 0};
    int64_t first, count;
    REFUSED_SILENTLY("ctx", seqpar_optim_open(NULL, optim, tensors, 2, &desc));
    REFUSED("optim", seqpar_optim_open(&ctx, NULL, tensors, 2, &desc));
    REFUSED("tensors", seqpar_optim_open(&ctx, optim, NULL, 2, &desc));
    REFUSED("desc", seqpar_optim_open(&ctx, optim, tensors, 2, NULL));
    test_expect(seqpar_optim_open(&ctx, optim, &nameless, 1, &desc) == SEQPAR_ERR_POINTER &&
                    strstr(error.text, "tensors[].name"),
                "a tensor without a name: %s", error.text);
    memset(&error, 0, sizeof error);
    test_expect(!seqpar_optim_open(&ctx, optim, tensors, 2, &desc), "%s", error.text);
    ABORTS("ctx", seqpar_optim_close(NULL, optim));
    ABORTS("optim", seqpar_optim_close(&ctx, NULL));
    ABORTS("ctx", seqpar_blocks_own(NULL, &optim->blocks, 0, 0, &first, &count));
    ABORTS("blocks", seqpar_blocks_own(&ctx, NULL, 0, 0, &first, &count));
    ABORTS("first", seqpar_blocks_own(&ctx, &optim->blocks, 0, 0, NULL, &count));
    ABORTS("count", seqpar_blocks_own(&ctx, &optim->blocks, 0, 0, &first, NULL));
    ABORTS("optim", seqpar_optim_slice(NULL, 0, 0, &first, &count));
    ABORTS("first", seqpar_optim_slice(optim, 0, 0, NULL, &count));
    ABORTS("count", seqpar_optim_slice(optim, 0, 0, &first, NULL));
    ABORTS("ctx", seqpar_optim_keeps(NULL, optim, SEQPAR_STATE_M));
    ABORTS("optim", seqpar_optim_keeps(&ctx, NULL, SEQPAR_STATE_M));
}

static void test_step(seqpar_optim *optim) {
    const seqpar_token_fold *fold;
    const seqpar_leaves leaves = {no_leaf, NULL, 1}, leafless = {NULL, NULL, 1};
    const seqpar_step_nodes none = {.elements = VOCAB * WIDE, .node_stride = VOCAB * WIDE};
    int64_t first, count;
    REFUSED_SILENTLY("ctx", seqpar_step_begin(NULL, optim, &row, 1, SEQPAR_LAYOUT_ZIGZAG, 1));
    REFUSED("optim", seqpar_step_begin(&ctx, NULL, &row, 1, SEQPAR_LAYOUT_ZIGZAG, 1));
    REFUSED("rows", seqpar_step_begin(&ctx, optim, NULL, 1, SEQPAR_LAYOUT_ZIGZAG, 1));
    REFUSED_SILENTLY("ctx", seqpar_step_begin_plain(NULL, optim, 1));
    REFUSED("optim", seqpar_step_begin_plain(&ctx, NULL, 1));
    test_expect(!seqpar_step_begin(&ctx, optim, &row, 1, SEQPAR_LAYOUT_ZIGZAG, 1), "%s",
                error.text);
    REFUSED_SILENTLY("ctx", seqpar_step_rows(NULL, optim, 0, &first, &count));
    REFUSED("optim", seqpar_step_rows(&ctx, NULL, 0, &first, &count));
    REFUSED("first", seqpar_step_rows(&ctx, optim, 0, NULL, &count));
    REFUSED("count", seqpar_step_rows(&ctx, optim, 0, &first, NULL));
    REFUSED_SILENTLY("ctx", seqpar_step_fold(NULL, optim, &fold, &share, 0));
    REFUSED("optim", seqpar_step_fold(&ctx, NULL, &fold, &share, 0));
    REFUSED("fold", seqpar_step_fold(&ctx, optim, NULL, &share, 0));
    REFUSED("share", seqpar_step_fold(&ctx, optim, &fold, NULL, 0));
    test_expect(!seqpar_step_fold(&ctx, optim, &fold, &share, 0), "%s", error.text);
    REFUSED_SILENTLY("ctx", seqpar_fold_leaves(NULL, floats[0], 1, fold, &leaves));
    REFUSED("nodes", seqpar_fold_leaves(&ctx, NULL, 1, fold, &leaves));
    REFUSED("fold", seqpar_fold_leaves(&ctx, floats[0], 1, NULL, &leaves));
    REFUSED("leaves", seqpar_fold_leaves(&ctx, floats[0], 1, fold, NULL));
    REFUSED("leaves->leaf", seqpar_fold_leaves(&ctx, floats[0], 1, fold, &leafless));
    REFUSED_SILENTLY("ctx", seqpar_step_gradient(NULL, optim, &none));
    REFUSED("optim", seqpar_step_gradient(&ctx, NULL, &none));
    REFUSED("nodes", seqpar_step_gradient(&ctx, optim, NULL));
    test_expect(seqpar_step_gradient(&ctx, optim, &none) == SEQPAR_ERR_POINTER &&
                    strstr(error.text, "nodes->nodes"),
                "nodes that are NULL: %s", error.text);
    memset(&error, 0, sizeof error);
}

static void test_step_end(seqpar_optim *optim) {
    const seqpar_optim_part part = {SEQPAR_STATE_M, 0, 0, 3};
    const double rates[3] = {NAN, INFINITY, -INFINITY};
    REFUSED_SILENTLY("ctx", seqpar_step_norm(NULL, optim));
    REFUSED("optim", seqpar_step_norm(&ctx, NULL));
    REFUSED_SILENTLY("ctx", seqpar_step_end(NULL, optim, floats[0], (VOCAB + 1) * WIDE, 0.1));
    REFUSED("optim", seqpar_step_end(&ctx, NULL, floats[0], (VOCAB + 1) * WIDE, 0.1));
    REFUSED("params", seqpar_step_end(&ctx, optim, NULL, (VOCAB + 1) * WIDE, 0.1));
    for (int i = 0; i < 3; i++) {
        test_expect(seqpar_step_end(&ctx, optim, floats[0], (VOCAB + 1) * WIDE, rates[i]) ==
                            SEQPAR_ERR_NOT_FINITE &&
                        strstr(error.text, "learning rate"),
                    "a learning rate of %g: %s", rates[i], error.text);
        memset(&error, 0, sizeof error);
    }
    REFUSED_SILENTLY("ctx", seqpar_optim_read(NULL, optim, doubles[0], &part));
    REFUSED("optim", seqpar_optim_read(&ctx, NULL, doubles[0], &part));
    REFUSED("values", seqpar_optim_read(&ctx, optim, NULL, &part));
    REFUSED("part", seqpar_optim_read(&ctx, optim, doubles[0], NULL));
    REFUSED_SILENTLY("ctx", seqpar_optim_write(NULL, optim, doubles[0], &part));
    REFUSED("optim", seqpar_optim_write(&ctx, NULL, doubles[0], &part));
    REFUSED("values", seqpar_optim_write(&ctx, optim, NULL, &part));
    REFUSED("part", seqpar_optim_write(&ctx, optim, doubles[0], NULL));
    REFUSED_SILENTLY("ctx", seqpar_optim_read_own(NULL, optim, doubles[0], &part));
    REFUSED("optim", seqpar_optim_read_own(&ctx, NULL, doubles[0], &part));
    REFUSED("values", seqpar_optim_read_own(&ctx, optim, NULL, &part));
    REFUSED("part", seqpar_optim_read_own(&ctx, optim, doubles[0], NULL));
}

static void test_optimizer(void) {
    seqpar_optim optim;
    test_optim_open(&optim);
    test_step(&optim);
    test_step_end(&optim);
    seqpar_optim_close(&ctx, &optim);
    test_end("null_optimizer");
}

static void test_shards(void) {
    seqpar_shards shards;
    void *params;
    REFUSED_SILENTLY("ctx", seqpar_shards_open(NULL, &shards, tensors, 2, 0, 0));
    REFUSED("shards", seqpar_shards_open(&ctx, NULL, tensors, 2, 0, 0));
    REFUSED("tensors", seqpar_shards_open(&ctx, &shards, NULL, 2, 0, 0));
    test_expect(!seqpar_shards_open(&ctx, &shards, tensors, 2, 0, 0), "%s", error.text);
    ABORTS("ctx", seqpar_shards_close(NULL, &shards));
    ABORTS("shards", seqpar_shards_close(&ctx, NULL));
    REFUSED_SILENTLY("ctx", seqpar_shards_use(NULL, &shards, 0, -1, &params));
    REFUSED("shards", seqpar_shards_use(&ctx, NULL, 0, -1, &params));
    REFUSED("params", seqpar_shards_use(&ctx, &shards, 0, -1, NULL));
    REFUSED_SILENTLY("ctx", seqpar_shards_gather(NULL, &shards, floats[0], (VOCAB + 1) * WIDE));
    REFUSED("shards", seqpar_shards_gather(&ctx, NULL, floats[0], (VOCAB + 1) * WIDE));
    REFUSED("params", seqpar_shards_gather(&ctx, &shards, NULL, (VOCAB + 1) * WIDE));
    ABORTS("ctx", seqpar_shards_owns(NULL, &shards, 0, 0, 1));
    ABORTS("shards", seqpar_shards_owns(&ctx, NULL, 0, 0, 1));
    REFUSED_SILENTLY("ctx", seqpar_shards_read(NULL, &shards, doubles[0], 0, 0, 1));
    REFUSED("shards", seqpar_shards_read(&ctx, NULL, doubles[0], 0, 0, 1));
    REFUSED("values", seqpar_shards_read(&ctx, &shards, NULL, 0, 0, 1));
    REFUSED_SILENTLY("ctx", seqpar_shards_write(NULL, &shards, doubles[0], 0, 0, 1));
    REFUSED("shards", seqpar_shards_write(&ctx, NULL, doubles[0], 0, 0, 1));
    REFUSED("values", seqpar_shards_write(&ctx, &shards, NULL, 0, 0, 1));
    REFUSED_SILENTLY("ctx", seqpar_shards_read_own(NULL, &shards, doubles[0], 0, 0, 1));
    REFUSED("shards", seqpar_shards_read_own(&ctx, NULL, doubles[0], 0, 0, 1));
    REFUSED("values", seqpar_shards_read_own(&ctx, &shards, NULL, 0, 0, 1));
    seqpar_shards_close(&ctx, &shards);
    test_end("null_shards");
}

static void test_model_open(seqpar_llama *model, const seqpar_llama_config *config) {
    const seqpar_adapter_desc adapter = {2, 1, SEQPAR_ADAPT_ALL};
    seqpar_llama adapters;
    REFUSED_SILENTLY("ctx", seqpar_llama_open(NULL, model, config));
    REFUSED("model", seqpar_llama_open(&ctx, NULL, config));
    REFUSED("config", seqpar_llama_open(&ctx, model, NULL));
    REFUSED_SILENTLY("ctx", seqpar_llama_open_table(NULL, model, config));
    REFUSED("model", seqpar_llama_open_table(&ctx, NULL, config));
    REFUSED("config", seqpar_llama_open_table(&ctx, model, NULL));
    REFUSED_SILENTLY("ctx", seqpar_llama_open_sharded(NULL, model, config, 0, 0));
    REFUSED("model", seqpar_llama_open_sharded(&ctx, NULL, config, 0, 0));
    REFUSED("config", seqpar_llama_open_sharded(&ctx, model, NULL, 0, 0));
    test_expect(!seqpar_llama_open(&ctx, model, config), "%s", error.text);
    REFUSED_SILENTLY("ctx", seqpar_llama_open_adapters(NULL, &adapters, model, &adapter, 0, 0));
    REFUSED("adapters", seqpar_llama_open_adapters(&ctx, NULL, model, &adapter, 0, 0));
    REFUSED("model", seqpar_llama_open_adapters(&ctx, &adapters, NULL, &adapter, 0, 0));
    REFUSED("desc", seqpar_llama_open_adapters(&ctx, &adapters, model, NULL, 0, 0));
    REFUSED_SILENTLY("ctx", seqpar_llama_merge(NULL, model));
    REFUSED("model", seqpar_llama_merge(&ctx, NULL));
    REFUSED("model->adapters", seqpar_llama_merge(&ctx, model));
    REFUSED_SILENTLY("ctx", seqpar_llama_gather(NULL, model));
    REFUSED("model", seqpar_llama_gather(&ctx, NULL));
    ABORTS("ctx", seqpar_llama_drop(NULL, model));
    ABORTS("model", seqpar_llama_drop(&ctx, NULL));
    int64_t elements;
    ABORTS("model", seqpar_llama_trainable(NULL, &elements));
    ABORTS("elements", seqpar_llama_trainable(model, NULL));
    REFUSED_SILENTLY("ctx", seqpar_llama_read(NULL, model, doubles[0], 0, 0, 1));
    REFUSED("model", seqpar_llama_read(&ctx, NULL, doubles[0], 0, 0, 1));
    REFUSED("values", seqpar_llama_read(&ctx, model, NULL, 0, 0, 1));
    REFUSED_SILENTLY("ctx", seqpar_llama_write(NULL, model, doubles[0], 0, 0, 1));
    REFUSED("model", seqpar_llama_write(&ctx, NULL, doubles[0], 0, 0, 1));
    REFUSED("values", seqpar_llama_write(&ctx, model, NULL, 0, 0, 1));
    ABORTS("ctx", seqpar_llama_owns(NULL, model, 0, 0, 1));
    ABORTS("model", seqpar_llama_owns(&ctx, NULL, 0, 0, 1));
    ABORTS("ctx", seqpar_llama_close(NULL, model));
    ABORTS("model", seqpar_llama_close(&ctx, NULL));
    REFUSED_SILENTLY("ctx", seqpar_llama_init(NULL, model, 1));
    REFUSED("model", seqpar_llama_init(&ctx, NULL, 1));
    REFUSED_SILENTLY("ctx", seqpar_llama_init_tensor(NULL, model, 0, 1));
    REFUSED("model", seqpar_llama_init_tensor(&ctx, NULL, 0, 1));
}

static void test_model_batch(seqpar_llama *model, const seqpar_llama_config *config) {
    const seqpar_llama_batch_desc run = {.layout = SEQPAR_LAYOUT_ZIGZAG};
    const seqpar_vocab_seeds seeds = {0};
    const int64_t chosen[1] = {0};
    seqpar_llama_batch batch;
    seqpar_optim optim;
    REFUSED_SILENTLY("ctx", seqpar_llama_open_batch(NULL, model, &batch, &row, 1, &run));
    REFUSED("model", seqpar_llama_open_batch(&ctx, NULL, &batch, &row, 1, &run));
    REFUSED("batch", seqpar_llama_open_batch(&ctx, model, NULL, &row, 1, &run));
    REFUSED("rows", seqpar_llama_open_batch(&ctx, model, &batch, NULL, 1, &run));
    REFUSED("desc", seqpar_llama_open_batch(&ctx, model, &batch, &row, 1, NULL));
    test_expect(!seqpar_llama_open_batch(&ctx, model, &batch, &row, 1, &run), "%s", error.text);
    ABORTS("ctx", seqpar_llama_close_batch(NULL, model, &batch));
    ABORTS("model", seqpar_llama_close_batch(&ctx, NULL, &batch));
    ABORTS("batch", seqpar_llama_close_batch(&ctx, model, NULL));
    REFUSED_SILENTLY("ctx", seqpar_llama_forward(NULL, model, &batch, 0));
    REFUSED("model", seqpar_llama_forward(&ctx, NULL, &batch, 0));
    REFUSED("batch", seqpar_llama_forward(&ctx, model, NULL, 0));
    REFUSED_SILENTLY("ctx", seqpar_llama_values(NULL, model, &batch));
    REFUSED("model", seqpar_llama_values(&ctx, NULL, &batch));
    REFUSED("batch", seqpar_llama_values(&ctx, model, NULL));
    REFUSED_SILENTLY("ctx", seqpar_llama_logits(NULL, model, &batch, floats[0]));
    REFUSED("model", seqpar_llama_logits(&ctx, NULL, &batch, floats[0]));
    REFUSED("batch", seqpar_llama_logits(&ctx, model, NULL, floats[0]));
    REFUSED("logits", seqpar_llama_logits(&ctx, model, &batch, NULL));
    REFUSED_SILENTLY("ctx", seqpar_llama_backward(NULL, model, &batch, &optim, 0, &seeds));
    REFUSED("model", seqpar_llama_backward(&ctx, NULL, &batch, &optim, 0, &seeds));
    REFUSED("batch", seqpar_llama_backward(&ctx, model, NULL, &optim, 0, &seeds));
    REFUSED("optim", seqpar_llama_backward(&ctx, model, &batch, NULL, 0, &seeds));
    REFUSED("seeds", seqpar_llama_backward(&ctx, model, &batch, &optim, 0, NULL));
    ABORTS("config", seqpar_llama_balance(NULL, doubles[0], chosen, 1));
    ABORTS("slopes", seqpar_llama_balance(config, NULL, chosen, 1));
    ABORTS("chosen", seqpar_llama_balance(config, doubles[0], NULL, 1));
    seqpar_llama_close_batch(&ctx, model, &batch);
}

static void test_model(void) {
    const seqpar_llama_config config = {.layers = 1,
                                        .hidden = WIDE,
                                        .heads = 1,
                                        .kv_heads = 1,
                                        .head_dim = WIDE,
                                        .intermediate = WIDE,
                                        .vocab = VOCAB,
                                        .rope_theta = 10000,
                                        .rms_eps = 1e-5};
    const seqpar_llama_prompt prompt = {ids, 2, 0};
    const seqpar_llama_sample_desc desc = {.max_new_tokens = 1, .top_p = 1};
    seqpar_llama_text text;
    seqpar_llama model;
    test_model_open(&model, &config);
    test_model_batch(&model, &config);
    REFUSED_SILENTLY("ctx", seqpar_llama_generate(NULL, &model, &text, &prompt, 1, &desc));
    REFUSED("model", seqpar_llama_generate(&ctx, NULL, &text, &prompt, 1, &desc));
    REFUSED("texts", seqpar_llama_generate(&ctx, &model, NULL, &prompt, 1, &desc));
    REFUSED("prompts", seqpar_llama_generate(&ctx, &model, &text, NULL, 1, &desc));
    REFUSED("desc", seqpar_llama_generate(&ctx, &model, &text, &prompt, 1, NULL));
    ABORTS("texts", seqpar_llama_texts_free(NULL, 1));
    seqpar_llama_close(&ctx, &model);
    test_end("null_model");
}

/* Pointers that the file functions refuse with codes of their own. */
static void refused_file(const char *function, const char *pointer, seqpar_status status) {
    note_tried(function, pointer);
    test_expect(status && error.text[0], "%s without %s: %s '%s'", function, pointer,
                seqpar_status_name(status), error.text);
    memset(&error, 0, sizeof error);
}

static void test_file_reading(const char *path) {
    const seqpar_safetensors_part nameless = {.count = 3};
    seqpar_safetensors_part part = {.name = "a", .count = 3};
    seqpar_safetensors_tensor wanted;
    seqpar_safetensors_file *file;
    REFUSED("file", seqpar_safetensors_open(NULL, path, &error));
    refused_file("seqpar_safetensors_open", "path",
                 seqpar_safetensors_open(&file, NULL, &error));
    test_expect(!seqpar_safetensors_open(&file, path, &error), "%s", error.text);
    wanted = *seqpar_safetensors_at(file, 0);
    ABORTS("file", seqpar_safetensors_count(NULL));
    ABORTS("file", seqpar_safetensors_at(NULL, 0));
    ABORTS("file", seqpar_safetensors_find(NULL, "a"));
    ABORTS("name", seqpar_safetensors_find(file, NULL));
    REFUSED("file", seqpar_safetensors_expect(NULL, &wanted, &error));
    REFUSED("wanted", seqpar_safetensors_expect(file, NULL, &error));
    ABORTS("file", seqpar_safetensors_metadata_count(NULL));
    ABORTS("file", seqpar_safetensors_metadata_at(NULL, 0));
    ABORTS("file", seqpar_safetensors_metadata(NULL, "a"));
    ABORTS("key", seqpar_safetensors_metadata(file, NULL));
    REFUSED("file", seqpar_safetensors_read(NULL, floats[0], &part, &error));
    REFUSED("out", seqpar_safetensors_read(file, NULL, &part, &error));
    REFUSED("part", seqpar_safetensors_read(file, floats[0], NULL, &error));
    REFUSED("part->name", seqpar_safetensors_read(file, floats[0], &nameless, &error));
    REFUSED("file", seqpar_safetensors_read_f32(NULL, floats[0], &part, &error));
    REFUSED("out", seqpar_safetensors_read_f32(file, NULL, &part, &error));
    REFUSED("part", seqpar_safetensors_read_f32(file, floats[0], NULL, &error));
    REFUSED("file", seqpar_safetensors_read_f64(NULL, doubles[0], &part, &error));
    REFUSED("out", seqpar_safetensors_read_f64(file, NULL, &part, &error));
    REFUSED("part", seqpar_safetensors_read_f64(file, doubles[0], NULL, &error));
    part.count = 1; /* one value is a value */
    REFUSED("out", seqpar_safetensors_read(file, NULL, &part, &error));
    REFUSED("out", seqpar_safetensors_read_f32(file, NULL, &part, &error));
    REFUSED("out", seqpar_safetensors_read_f64(file, NULL, &part, &error));
    seqpar_safetensors_close(file);
}

/* ---- one token, element or byte wants a place, as many do ---- */

static void one_token(void) {
    static const int64_t cu[2] = {0, 1};
    const seqpar_row single = {.tokens = 1, .cell = 1, .docs = 1, .cu_seqlens = cu};
    const seqpar_attn_desc desc = {.heads = 1, .kv_heads = 1, .head_dim = WIDE};
    const seqpar_sft_desc sft = {.count = 1};
    static const char *const names[3] = {"io->q", "io->k", "io->v"};
    seqpar_host_seeds seeds = {doubles[0], NULL, NULL}, none = {NULL, doubles[1], doubles[2]};
    seqpar_segments segments = {.width = 1};
    seqpar_share one;
    test_expect(!seqpar_split(&error, &one, &single, 1, &split_desc) && one.tokens == 1, "%s",
                error.text);
    ABORTS("local", seqpar_scatter(NULL, ids, &one, 0, 4));
    ABORTS("global", seqpar_scatter(targets, NULL, &one, 0, 4));
    ABORTS("global", seqpar_gather(NULL, ids, &one, 0, 4));
    ABORTS("local", seqpar_gather(targets, NULL, &one, 0, 4));
    REFUSED("values", seqpar_segments_add(&error, &segments, NULL, &one));
    ABORTS("values", seqpar_segments_spread(NULL, doubles[0], &one));
    ABORTS("per_document", seqpar_segments_spread(doubles[0], NULL, &one));
    for (int i = 0; i < 3; i++) {
        seqpar_attn_io io = {.q = floats[0], .k = floats[1], .v = floats[2], .out = floats[3]};
        *(i == 0 ? &io.q : i == 1 ? &io.k : &io.v) = NULL;
        REFUSED(names[i], seqpar_attn_run_threads(&error, &io, &single, &desc, 1));
    }
    REFUSED("targets", seqpar_sft_seeds(&error, &seeds, NULL, NULL, 1, &sft));
    REFUSED("seeds->dlogp", seqpar_sft_seeds(&error, &none, targets, NULL, 1, &sft));
    seqpar_share_free(&one);
}

static void one_of_a_vocab(void) {
    static const char *const names[4] = {"io->hidden", "io->table", "io->targets",
                                         "io->dhidden"};
    const seqpar_vocab_desc desc = {.hidden = WIDE, .vocab = VOCAB};
    for (int i = 0; i < 4; i++) {
        seqpar_vocab_io io = vocab_io_without(i);
        io.tokens = 1;
        REFUSED(names[i], seqpar_vocab_backward(&ctx, &io, NULL, NULL, &desc));
    }
    for (int i = 0; i < 2; i++) {
        const seqpar_vocab_teacher teacher = {i ? floats[0] : NULL, i ? NULL : floats[1], WIDE,
                                              0};
        seqpar_vocab_io io = vocab_io_without(-1);
        io.teacher = &teacher;
        io.tokens = 1;
        REFUSED(i ? "io->teacher->table" : "io->teacher->hidden",
                seqpar_vocab_forward(&ctx, &io, &desc));
    }
}

static void one_element(void) {
    const seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_SGD};
    const seqpar_optim_part part = {.count = 1};
    static const int64_t leaves[1] = {0};
    seqpar_optim optim;
    seqpar_shards shards;
    seqpar_fold fold;
    ABORTS("leaves", seqpar_fold_init(&fold, NULL, 1));
    seqpar_fold_init(&fold, leaves, 1);
    REFUSED("tensors", seqpar_optim_open(&ctx, &optim, NULL, 1, &desc));
    test_expect(!seqpar_optim_open(&ctx, &optim, tensors, 2, &desc), "%s", error.text);
    REFUSED("params", seqpar_step_end(&ctx, &optim, NULL, 1, 0.1));
    REFUSED("values", seqpar_optim_read(&ctx, &optim, NULL, &part));
    REFUSED("values", seqpar_optim_write(&ctx, &optim, NULL, &part));
    REFUSED("values", seqpar_optim_read_own(&ctx, &optim, NULL, &part));
    seqpar_optim_close(&ctx, &optim);
    REFUSED("tensors", seqpar_shards_open(&ctx, &shards, NULL, 1, 0, 0));
    test_expect(!seqpar_shards_open(&ctx, &shards, tensors, 2, 0, 0), "%s", error.text);
    REFUSED("params", seqpar_shards_gather(&ctx, &shards, NULL, 1));
    seqpar_shards_close(&ctx, &shards);
    ABORTS("to", seqpar_device_read(device, NULL, floats[0], 0, 1, SEQPAR_DTYPE_F32));
    ABORTS("from", seqpar_device_read(device, doubles[0], NULL, 0, 1, SEQPAR_DTYPE_F32));
    ABORTS("to", seqpar_device_write(device, NULL, 0, doubles[0], 1, SEQPAR_DTYPE_F32));
    ABORTS("from", seqpar_device_write(device, floats[0], 0, NULL, 1, SEQPAR_DTYPE_F32));
}

static void one_byte(void) {
    const int64_t first = 1;
    int64_t none = 0;
    char byte = 0;
    REFUSED("recv", seqpar_comm_all_gather(world, NULL, &byte, &first, "one"));
    REFUSED("send", seqpar_comm_all_gather(world, &byte, NULL, &first, "one"));
    test_expect(!seqpar_comm_all_gather(world, NULL, NULL, &none, "none"), "%s", error.text);
    REFUSED("data", seqpar_comm_broadcast(world, NULL, 1, 0));
    REFUSED("data", seqpar_file_write_atomic("build/test_null.one", NULL, 1, &error));
}

static void test_one(void) {
    one_token();
    one_of_a_vocab();
    one_element();
    one_byte();
    test_end("null_one_is_enough");
}

static void test_files(void) {
    const char *path = "build/test_null.safetensors";
    const int64_t shape[1] = {3};
    seqpar_safetensors_tensor tensor;
    seqpar_safetensors_desc desc = {.path = path, .tensors = &tensor, .count = 1},
                            none = {.path = path, .count = 1};
    seqpar_safetensors_desc described = {
        .path = path, .tensors = &tensor, .count = 1, .metadata_count = 1};
    const void *data[1] = {floats[0]};
    seqpar_safetensors_writer *writer;
    memset(&tensor, 0, sizeof tensor);
    tensor.name = "a", tensor.dtype = SEQPAR_SAFETENSORS_F32, tensor.dims = 1;
    memcpy(tensor.shape, shape, sizeof shape);
    REFUSED("writer", seqpar_safetensors_create(NULL, &desc, &error));
    REFUSED("desc", seqpar_safetensors_create(&writer, NULL, &error));
    REFUSED("desc->tensors", seqpar_safetensors_create(&writer, &none, &error));
    REFUSED("desc->metadata", seqpar_safetensors_create(&writer, &described, &error));
    test_expect(!seqpar_safetensors_create(&writer, &desc, &error), "%s", error.text);
    refused_file("seqpar_safetensors_append", "writer",
                 seqpar_safetensors_append(NULL, "a", floats[0], 12, &error));
    REFUSED("name", seqpar_safetensors_append(writer, NULL, floats[0], 12, &error));
    REFUSED("data", seqpar_safetensors_append(writer, "a", NULL, 12, &error));
    REFUSED("data", seqpar_safetensors_append(writer, "a", NULL, 1, &error));
    seqpar_safetensors_abort(writer);
    refused_file("seqpar_safetensors_finish", "writer",
                 seqpar_safetensors_finish(NULL, &error));
    REFUSED("desc", seqpar_safetensors_save(NULL, data, &error));
    REFUSED("data", seqpar_safetensors_save(&desc, NULL, &error));
    test_expect(!seqpar_safetensors_save(&desc, data, &error), "%s", error.text);
    test_file_reading(path);
    refused_file("seqpar_file_write_atomic", "path",
                 seqpar_file_write_atomic(NULL, "", 0, &error));
    REFUSED("data", seqpar_file_write_atomic(path, NULL, 3, &error));
    remove(path);
    test_end("null_files");
}

/* ---- nothing is forgotten ---- */

/* "function: pointer" that may be NULL; the prototype or the field says so. `error` may be, of every function, and queue. */
static const char *const allowed[] = {
    "seqpar_run_threads: user",
    "seqpar_comm_free: comm",
    "seqpar_device_close: device",
    "seqpar_device_settle: device",
    "seqpar_attn_close: attn",
    "seqpar_attn_close: ctx",
    "seqpar_token_tiles: user",
    "seqpar_vocab_node_count: share",
    "seqpar_vocab_node_count: fold",
    "seqpar_vocab_backward: share",
    "seqpar_vocab_backward: fold",
    "seqpar_vocab_nodes: share",
    "seqpar_vocab_nodes: fold",
    "seqpar_sft_seeds: weights",
    "seqpar_kl: dlogp",
    "seqpar_ctx_open: device",
    "seqpar_safetensors_abort: writer",
    "seqpar_safetensors_close: file",
    "seqpar_need: names",
    "seqpar_need: pointers",
    "seqpar_need: function",
    "seqpar_must: names",
    "seqpar_must: pointers",
    "seqpar_must: function",
    "seqpar_fail: format",
    "seqpar_safetensors_whole: tensor",
};

static int is_allowed(const char *function, const char *pointer) {
    char key[96];
    snprintf(key, sizeof key, "%s: %s", function, pointer);
    if (!strcmp(pointer, "error") || !strcmp(pointer, "queue")) return 1;
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++)
        if (!strcmp(allowed[i], key)) return 1;
    return 0;
}

/* One parameter, "const seqpar_row *rows"; of a function pointer's typedef nothing is seen here. */
static void check_parameter(const char *function, const char *begin, const char *end) {
    char name[64];
    const char *star = memchr(begin, '*', (size_t)(end - begin)), *last = end;
    while (last > begin && !isalnum((unsigned char)last[-1]) && last[-1] != '_') last--;
    for (end = last; last > begin && (isalnum((unsigned char)last[-1]) || last[-1] == '_');)
        last--;
    snprintf(name, sizeof name, "%.*s", (int)(end - last), last);
    if (star)
        test_expect(is_tried(function, name) || is_allowed(function, name),
                    "%s: NULL for %s is neither tried nor allowed", function, name);
}

static void check_prototype(const char *at, const char *end) {
    char function[64];
    const char *open = memchr(at, '(', (size_t)(end - at)), *name = open;
    while (name > at && (isalnum((unsigned char)name[-1]) || name[-1] == '_')) name--;
    snprintf(function, sizeof function, "%.*s", (int)(open - name), name);
    for (at = open + 1; at < end;) {
        const char *comma = memchr(at, ',', (size_t)(end - at));
        check_parameter(function, at, comma ? comma : end);
        at = comma ? comma + 1 : end;
    }
}

/* Every prototype of a header, up to its implementation. */
static int check_header(const char *path) {
    static char text[1 << 20];
    FILE *file = fopen(path, "r");
    int found = 0;
    test_expect(file != NULL, "%s cannot be read", path);
    if (!file) return 0;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    char *end = strstr(text, "Everything below is implementation");
    if (!end) end = strstr(text, "_IMPLEMENTATION) && !defined(");
    if (end) *end = 0;
    for (char *at = text; (at = strstr(at, "\nSEQPAR_DEF ")); found++) {
        char *semicolon = strchr(++at, ';');
        if (!semicolon) break;
        check_prototype(at, semicolon);
    }
    return found;
}

static void test_all_are_tried(void) {
    int core = check_header("seqpar.h"), model = check_header("seqpar_llama.h"),
        files = check_header("seqpar_safetensors.h");
    test_expect(core > 100 && model > 18 && files > 20, "%d, %d and %d prototypes were found",
                core, model, files);
    test_end("null_nothing_forgotten (%d pointers of %d functions)", tries,
             core + model + files);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    all_open();
    TEST(test_util());
    TEST(test_comm());
    TEST(test_fold());
    TEST(test_rows());
    TEST(test_devices());
    TEST(test_attention());
    TEST(test_vocab());
    TEST(test_losses());
    TEST(test_objectives());
    TEST(test_optimizer());
    TEST(test_shards());
    TEST(test_model());
    TEST(test_files());
    TEST(test_one());
    if (!getenv("TEST_ONLY")) test_all_are_tried();
    all_close();
    return test_summary();
}
