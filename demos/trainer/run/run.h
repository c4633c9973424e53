/* SPDX-License-Identifier: MIT OR Unlicense */
/* run.h - keeps runs apart. A run must not overwrite its own inputs, only one run at a time may
 * write into a folder, and a run may resume a checkpoint only if certain options are the same.
 *
 * flock locks ckpt_path/lock and save_path/lock. The kernel releases the locks when the process
 * ends for any reason. */
#ifndef DEMO_RUN_H
#define DEMO_RUN_H

#include <fcntl.h>
#include <time.h>
#include <sys/file.h>
#include "checkpoint.h"
#include "trainer/base/escape.h"

typedef struct { /* a folder into which only one run at a time may write */
    const char *option, *path;
    int lock;  /* descriptor + 1; 0: not held */
    bool made; /* the run made the folder */
} demo_claim;

enum { DEMO_CHECKPOINTS, DEMO_MODEL, DEMO_CLAIMS };

typedef struct {
    char id[DEMO_RUN_ID]; /* recorded in checkpoints */
    /* step of the checkpoint to resume from; DEMO_NOTHING_SAVED: a new run */
    int64_t from;
    const char *root; /* folder of all checkpoints */
    demo_claim claims[DEMO_CLAIMS];
} demo_run;

/* a pair of key and value in the metadata of a checkpoint, or in the first line of generate's
   OUT.part */
typedef struct {
    char key[DEMO_NAME_LIMIT + 8], value[64];
} demo_note;

/* ---- files are compared by device and inode, not by path ---- */

/* The identity of a file. If the path does not exist, device and inode are those of its deepest
   existing parent folder, and rest is the path below that folder. */
typedef struct {
    dev_t device;
    ino_t inode;
    char rest[DEMO_PATH_LIMIT + 64];
} demo_file_id;

/* Strips components from the end of the path until the rest of it exists. */
static demo_file_id demo_file_id_of(const char *path) {
    demo_file_id id = {0};
    struct stat there = {0};
    char part[sizeof id.rest], rest[sizeof id.rest];
    snprintf(part, sizeof part, "%s", path);
    while (stat(*part ? part : ".", &there)) {
        char *slash = strrchr(part, '/'), *name = slash ? slash + 1 : part;
        if (*name && strcmp(name, ".")) {
            snprintf(rest, sizeof rest, "/%s%s", name, id.rest);
            memcpy(id.rest, rest, sizeof rest);
        }
        if (!*part || (slash == part && !part[1])) break; /* the current folder was removed */
        if (slash)
            slash[slash == part] = 0;
        else
            *part = 0;
    }
    id.device = there.st_dev;
    id.inode = there.st_ino;
    return id;
}

static bool demo_same_file(const char *a, const char *b) {
    demo_file_id x = demo_file_id_of(a), y = demo_file_id_of(b);
    return x.device == y.device && x.inode == y.inode && !strcmp(x.rest, y.rest);
}

/* ---- inputs and outputs of a run ---- */

static const demo_binding *demo_binding_of(const demo_binding *bindings, int count,
                                           const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(bindings[i].name, name)) return &bindings[i];
    return NULL;
}

/* The value of a path option; NULL if it is not given, or if this trainer lacks the option. */
static const char *demo_option_path(const demo_binding *bindings, int count, const char *name) {
    const demo_binding *b = demo_binding_of(bindings, count, name);
    return b ? *(const char *const *)b->variable : NULL;
}

static bool demo_option_on(const demo_binding *bindings, int count, const char *name) {
    const demo_binding *b = demo_binding_of(bindings, count, name);
    return b && *(const bool *)b->variable;
}

/* Options that name inputs: files, or model folders (for some trainers comma lists). */
static const char *const demo_inputs[] = {
    "dataset",         "prompt_data",     "eval_dataset",
    "pretrain_data",   "pretrain",        "ref_pretrain",
    "reward_pretrain", "critic_pretrain", "adapter_name_or_path",
    "teacher_model"};
enum { DEMO_INPUTS = 10, DEMO_INPUT_FILES = 4 /* the first of them are files */ };

typedef struct {
    const char *option, *below, *only_with;
} demo_output;

static const demo_output demo_outputs[] = {
    {"metrics_path", "", NULL},
    {"use_tensorboard", "/events.out.tfevents", NULL},
    {"wandb_offline", "/wandb-history.jsonl", NULL},
    {"save_path", "/model.safetensors", NULL},
    {"save_path", "/config.json", NULL},
    {"save_path", "/training_loss.svg", "plot_loss"},
    {"save_path", "/ema/model.safetensors", "enable_ema"},
    {"save_path", "/ema/config.json", "enable_ema"},
    {"save_path", "/merged/model.safetensors", "save_merged"},
    {"save_path", "/merged/config.json", "save_merged"},
    {"save_path", "/critic/model.safetensors", "save_value_network"},
    {"save_path", "/critic/config.json", "save_value_network"},
    {"save_path", "/lock", NULL},
    {"ckpt_path", "/latest", NULL},
    {"ckpt_path", "/lock", NULL},
    {"ckpt_path", "/reference.safetensors", "precompute_ref"},
    {"output_path", "", NULL},
    {"output_path", ".part", NULL}};
enum { DEMO_OUTPUTS = (int)(sizeof demo_outputs / sizeof *demo_outputs) };

/* Writes the path of output i; false if this run does not write that output. */
static bool demo_output_path(char *path, size_t size, const demo_binding *bindings, int count,
                             int i) {
    const demo_output *o = &demo_outputs[i];
    const char *given = demo_option_path(bindings, count, o->option);
    if (!given || (o->only_with && !demo_option_on(bindings, count, o->only_with)))
        return false;
    snprintf(path, size, "%s%s", given, o->below);
    return true;
}

/* Refuses input and output paths that are longer than DEMO_PATH_LIMIT. */
static int demo_paths_fit(const demo_binding *bindings, int count, demo_error *error) {
    static const char *const names[] = {"metrics_path",    "save_path",     "ckpt_path",
                                        "use_tensorboard", "wandb_offline", "output_path"};
    const int outputs = (int)(sizeof names / sizeof *names);
    for (int i = 0; i < outputs + DEMO_INPUTS; i++) {
        const char *name = i < outputs ? names[i] : demo_inputs[i - outputs];
        const char *at = demo_option_path(bindings, count, name);
        for (; at; at = strchr(at, ',') && i >= outputs ? strchr(at, ',') + 1 : NULL) {
            size_t length = i < outputs ? strlen(at) : strcspn(at, ",");
            if (length > DEMO_PATH_LIMIT)
                return demo_fail(error,
                                 "--%s: %.40s... has %lld characters, at most %d are possible; "
                                 "give a shorter path",
                                 name, at, (long long)length, DEMO_PATH_LIMIT);
        }
    }
    return 0;
}

/* Refuses an input file that an output would replace. */
static int demo_check_input(const demo_binding *bindings, int count, const char *option,
                            const char *input, demo_error *error) {
    char path[DEMO_PATH_LIMIT + 64];
    for (int i = 0; i < DEMO_OUTPUTS; i++)
        if (demo_output_path(path, sizeof path, bindings, count, i) &&
            demo_same_file(path, input))
            return demo_fail(error,
                             "--%s would overwrite %.300s, which --%s reads; give another --%s",
                             demo_outputs[i].option, input, option, demo_outputs[i].option);
    return 0;
}

/* Refuses an input folder that is a checkpoint in ckpt_path, since old checkpoints there are
   removed. */
static int demo_input_stays(const demo_binding *bindings, int count, const char *option,
                            const char *folder, demo_error *error) {
    char resolved[PATH_MAX];
    char *slash = realpath(folder, resolved) ? strrchr(resolved, '/') : NULL;
    const char *root = demo_option_path(bindings, count, "ckpt_path");
    if (!root || !slash || demo_checkpoint_step(slash + 1) < 0) return 0;
    *slash = 0;
    if (!demo_same_file(*resolved ? resolved : "/", root)) return 0;
    return demo_fail(error,
                     "--%s %.300s is a checkpoint in ckpt_path, where old ones are removed; "
                     "give another --ckpt_path",
                     option, folder);
}

/* Checks all inputs: none may be replaced or removed by an output. */
static int demo_check_inputs(const demo_binding *bindings, int count, demo_error *error) {
    static const char *const files[] = {"/model.safetensors", "/config.json"};
    char one[DEMO_PATH_LIMIT + 1], path[DEMO_PATH_LIMIT + 64];
    for (int i = 0; i < DEMO_INPUTS; i++)
        for (const char *at = demo_option_path(bindings, count, demo_inputs[i]); at;
             at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
            snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
            if (i < DEMO_INPUT_FILES &&
                demo_check_input(bindings, count, demo_inputs[i], one, error))
                return -1;
            for (int k = 0; i >= DEMO_INPUT_FILES && k < 2; k++) {
                snprintf(path, sizeof path, "%s%s", one, files[k]);
                if (demo_check_input(bindings, count, demo_inputs[i], path, error)) return -1;
            }
            if (i >= DEMO_INPUT_FILES &&
                demo_input_stays(bindings, count, demo_inputs[i], one, error))
                return -1;
        }
    return 0;
}

/* Refuses a metrics file that is also another output: both would be damaged. */
static int demo_outputs_apart(const demo_binding *bindings, int count, demo_error *error) {
    char metrics[DEMO_PATH_LIMIT + 64], path[DEMO_PATH_LIMIT + 64];
    if (!demo_output_path(metrics, sizeof metrics, bindings, count, 0)) return 0;
    for (int i = 1; i < DEMO_OUTPUTS; i++)
        if (demo_output_path(path, sizeof path, bindings, count, i) &&
            demo_same_file(metrics, path))
            return demo_fail(error,
                             "--metrics_path %.300s is also where --%s writes; give another",
                             metrics, demo_outputs[i].option);
    return 0;
}

/* Refuses output paths that cannot be written, before training starts. */
static int demo_outputs_free(const demo_binding *bindings, int count, demo_error *error) {
    char path[DEMO_PATH_LIMIT + 64];
    struct stat kind;
    for (int i = 1; i < DEMO_OUTPUTS; i++) {
        if (!demo_output_path(path, sizeof path, bindings, count, i)) continue;
        bool there = !stat(path, &kind);
        if (there ? !S_ISREG(kind.st_mode) : errno == ENOTDIR)
            return demo_fail(
                error, "--%s would write %.300s, but %s; move it away or give another --%s",
                demo_outputs[i].option, path,
                there ? "it exists and is not a regular file" : "a part of this path is a file",
                demo_outputs[i].option);
    }
    return 0;
}

/* Refuses to overwrite a file that is not an old metrics file. */
static int demo_metrics_ours(const demo_binding *bindings, int count, demo_error *error) {
    static const char *const begins[] = {"{\"step\": ", "{\"rollout\": "};
    const char *path = demo_option_path(bindings, count, "metrics_path");
    char begin[16];
    struct stat kind;
    int file = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
    ssize_t length = file < 0 || fstat(file, &kind) || !S_ISREG(kind.st_mode)
                         ? 0
                         : read(file, begin, sizeof begin);
    if (file >= 0) close(file);
    for (int i = 0; i < 2 && length > 0; i++) {
        size_t same = strlen(begins[i]);
        if (!memcmp(begin, begins[i], (size_t)length < same ? (size_t)length : same)) return 0;
    }
    if (length <= 0) return 0;
    return demo_fail(error,
                     "--metrics_path %.300s exists and has no metrics in it; give another, "
                     "or move it away",
                     path);
}

/* ---- one run in a folder at a time ---- */

static void demo_lock_text(char *text, size_t size, const char *tool, const char *dataset) {
    char host[256] = "", since[32], whole[400];
    time_t now = time(NULL);
    struct tm local;
    gethostname(host, sizeof host - 1);
    strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S", localtime_r(&now, &local));
    snprintf(whole, sizeof whole, "train_%s, process %ld on %.60s, since %s, with %.150s", tool,
             (long)getpid(), host, since, dataset);
    demo_escape(text, (int64_t)size, whole);
}

static seqpar_status demo_lock_refused(int file, const demo_claim *claim, seqpar_error *error) {
    char other[400];
    ssize_t length = pread(file, other, sizeof other - 1, 0);
    other[length > 0 ? length : 0] = 0;
    close(file);
    return seqpar_fail(error, SEQPAR_ERR_OPTION,
                       "%s %.120s is in use by %.280s; wait for it, or give another --%s",
                       claim->option, claim->path, *other ? other : "a run that has just begun",
                       claim->option);
}

/* Opens and locks the file. Returns its descriptor, or -1 with a message. A run removes its
   lock file when it ends, so the locked file may no longer be at this path. In that case the
   path is opened again. */
static int demo_lock_take(const char *path, const demo_claim *claim, seqpar_error *error) {
    for (;;) {
        struct stat held, named;
        char shown[1024];
        /* a symbolic link is refused, since its target is not a file of this run */
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (file < 0)
            return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                               "cannot open %.300s: %s; move it away or give another --%s",
                               path, errno == ELOOP ? "it is a link" : strerror(errno),
                               claim->option),
                   -1;
        if (!fstat(file, &held) && !S_ISREG(held.st_mode)) {
            close(file);
            return seqpar_fail(
                       error, SEQPAR_ERR_FILE_OPEN,
                       "%.300s is not a regular file; move it away or give another --%s", path,
                       claim->option),
                   -1;
        }
        if (flock(file, LOCK_EX | LOCK_NB)) {
            if (errno == EWOULDBLOCK) return demo_lock_refused(file, claim, error), -1;
            const char *why = strerror(errno);
            fprintf(stderr,
                    "notice: %s cannot be locked here (%s); make sure that no other run uses "
                    "this %s\n",
                    demo_escape(shown, sizeof shown, path), why, claim->option);
            return file;
        }
        if (!fstat(file, &held) && !stat(path, &named) && held.st_dev == named.st_dev &&
            held.st_ino == named.st_ino)
            return file;
        close(file);
    }
}

static seqpar_status demo_lock(demo_claim *claim, const char *text, seqpar_error *error) {
    char path[1100], others[6] = "";
    if (demo_make_folder(claim->path, error)) return error->status;
    snprintf(path, sizeof path, "%s/lock", claim->path);
    int file = demo_lock_take(path, claim, error);
    if (file < 0) return error->status;
    if (pread(file, others, 6, 0) > 0 && memcmp(others, "train_", 6)) {
        close(file);
        return seqpar_fail(
            error, SEQPAR_ERR_FILE_OPEN,
            "%.300s was not written by seqpar; move it away or give another --%s", path,
            claim->option);
    }
    claim->lock = file + 1;
    if (ftruncate(file, 0) || write(file, text, strlen(text)) < 0)
        return seqpar_fail(error, SEQPAR_ERR_FILE_WRITE,
                           "cannot write %.300s: %s; make room or give another --%s", path,
                           strerror(errno), claim->option);
    return SEQPAR_OK;
}

/* Releases the lock. Also removes the folder if this run made it and saved nothing there. */
static void demo_unlock(demo_claim *claim) {
    char path[1100];
    if (!claim->lock) return;
    snprintf(path, sizeof path, "%s/lock", claim->path);
    unlink(path);
    close(claim->lock - 1);
    claim->lock = 0;
    if (claim->made) rmdir(claim->path);
}

static void demo_run_close(demo_run *run) {
    for (int i = 0; i < DEMO_CLAIMS; i++) demo_unlock(&run->claims[i]);
}

/* Locks ckpt_path and save_path, which may be the same folder. */
static seqpar_status demo_run_lock(demo_run *run, const char *save_path, const char *tool,
                                   const char *dataset, seqpar_error *error) {
    char text[400];
    run->claims[DEMO_CHECKPOINTS] = (demo_claim){
        .option = "ckpt_path", .path = run->root, .made = access(run->root, F_OK) != 0};
    run->claims[DEMO_MODEL] = (demo_claim){
        .option = "save_path", .path = save_path, .made = access(save_path, F_OK) != 0};
    demo_lock_text(text, sizeof text, tool, dataset);
    seqpar_status status = demo_lock(&run->claims[DEMO_CHECKPOINTS], text, error);
    return status || demo_same_file(run->root, save_path)
               ? status
               : demo_lock(&run->claims[DEMO_MODEL], text, error);
}

/* Is this an unfinished file of sharded weights, or of their index? */
static bool demo_half_shard(const char *name) {
    const char *end = strstr(name, ".tmp.");
    return end && demo_left_over(end) &&
           (!strncmp(name, "model-", 6) || !strncmp(name, "model.safetensors.index.json.", 29));
}

/* Removes unfinished files of a final model, left by a killed run. */
static bool demo_visit_half_model(const char *folder, const char *name, void *user) {
    char path[1400];
    size_t number = strncmp(name, "training_loss.svg.", 18) ? 0
                                                            : strspn(name + 18, "0123456789");
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (demo_list_has("ema,critic,merged", name) && demo_is_folder(path))
        demo_each_name(path, demo_visit_half_model, user);
    else if ((demo_checkpoint_file(name) && strstr(name, ".tmp.")) || demo_half_shard(name) ||
             !strncmp(name, "adapter_model.safetensors.tmp.", 30) ||
             (number && !strcmp(name + 18 + number, ".tmp")))
        unlink(path);
    return true;
}

/* ---- beginning ---- */

static seqpar_status demo_draw_id(char id[DEMO_RUN_ID], seqpar_error *error) {
    uint64_t drawn = 0;
    FILE *source = fopen("/dev/urandom", "rb");
    if (!source || fread(&drawn, sizeof drawn, 1, source) != 1)
        seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                    "cannot read /dev/urandom, which gives a run its random name: %s",
                    strerror(errno));
    if (source) fclose(source);
    snprintf(id, DEMO_RUN_ID, "%016llx", (unsigned long long)drawn);
    return error->status;
}

/* Refuses to start a new run in a folder that contains checkpoints. */
static seqpar_status demo_refuse_others(const demo_run *run, seqpar_error *error) {
    int64_t *steps = demo_checkpoints(run->root);
    if (arrlen(steps))
        seqpar_fail(error, SEQPAR_ERR_OPTION,
                    "ckpt_path %.300s holds checkpoints of an earlier run, the newest is "
                    "global_step%lld; go on from it with --load_checkpoint, give another "
                    "--ckpt_path or remove the folder",
                    run->root, (long long)arrlast(steps));
    arrfree(steps);
    return error->status;
}

/* Finds the checkpoint to resume and the id of its run, or draws a new id. writes: this process
   first takes the locks and removes incomplete files. */
static seqpar_status demo_run_open(demo_run *run, bool writes, bool goes_on,
                                   const char *save_path, const char *tool, const char *dataset,
                                   seqpar_error *error) {
    seqpar_safetensors_file *file = NULL;
    demo_state state = {0};
    char folder[1100], notice[640] = "", shown[1024];
    run->from = DEMO_NOTHING_SAVED;
    if (writes && demo_run_lock(run, save_path, tool, dataset, error)) return error->status;
    if (writes && demo_settle(run->root, error)) return error->status;
    if (writes && !goes_on && demo_refuse_others(run, error)) return error->status;
    if (goes_on && demo_find_checkpoint(run->root, &run->from, notice, sizeof notice, error))
        return error->status;
    if (*notice && writes)
        fprintf(stderr, "notice: %s\n", demo_escape(shown, sizeof shown, notice));
    if (writes) demo_clear_left_overs(run->root);
    if (writes) demo_each_name(save_path, demo_visit_half_model, NULL);
    demo_checkpoint_path(folder, sizeof folder, run->root, run->from);
    seqpar_status status = run->from == DEMO_NOTHING_SAVED || !writes
                               ? SEQPAR_OK
                               : demo_open_state(&file, &state, folder, run->from, error);
    seqpar_safetensors_close(file);
    if (status) return status;
    if (*state.run) return snprintf(run->id, sizeof run->id, "%s", state.run), SEQPAR_OK;
    return demo_draw_id(run->id, error);
}

/* ---- options that a resumed run must not change ---- */

/* Options that are not compared. Either they change no result (or only its rounding, with some
   layouts or --relaxed_attention), or a change of them is found by comparing the digest of the
   data, config.json or numbers in the checkpoint. */
static const char demo_free_options[] =
    "save_steps,max_ckpt_num,sharded_checkpoint,async_save,load_checkpoint,ddp_timeout,eval_steps,"
    "logging_steps,plot_loss,json,micro_train_batch_size,gradient_accumulation_steps,zero_stage,"
    "adam_offload,param_offload,offload_path,ref_offload,ref_reward_offload,"
    "gradient_checkpointing,activation_offloading,tiled_mlp,ring_attn_size,ring_head_stride,data_parallel_size,world_size,"
    "layout,schedule,ulysses_size,pack_len,packing_samples,ring_attn_func,sequence_parallel_mode,omp_threads,max_len,"
    "truncation,from,bf16,eval_strategy,val_size,"
    "max_samples,pretrain_mode,pretrain_eos,pretrain_blocks,train_on_inputs,seed,train_batch_size,cell,hidden_size,num_"
    "hidden_layers,num_attention_heads,num_key_value_heads,head_dim,intermediate_size,"
    "tie_word_embeddings,rope_theta,enable_ema,eval_temperature,eval_n_samples_per_prompt,"
    "prompt_max_len,micro_rollout_batch_size,remote_rm_timeout,remote_rm_retries,remote_rm_"
    "backoff,"
    "save_value_network,actor_num_nodes,actor_num_gpus_per_node,ref_num_nodes,ref_num_gpus_per_node,"
    "critic_num_nodes,critic_num_gpus_per_node,reward_num_nodes,reward_num_gpus_per_node,"
    "colocate_actor_ref,colocate_critic_reward,colocate_all_models,vllm_num_engines,"
    "vllm_tensor_parallel_size,precompute_ref,save_dtype,max_shard_size,overwrite,log_samples,dry_run,"
    "finetuning_type,adapter,lora_target_linear,save_merged,"
    "print_prepare,saves_per_epoch,sequence_parallel_ring_degree,teacher_offload";
/* Options that must be the same. Otherwise the saved state would not fit, or the following
   steps would minimize another loss. */
static const char demo_fixed_options[] =
    "optim,rollout_batch_size,n_samples_per_prompt,loss_definition,"
    "loss_agg_mode,lora_rank,lora_alpha,lora_dropout,use_rslora";

/* Formats a number with the fewest digits, from 6 on, that read back as the same number. */
static void demo_number_text(char *text, size_t size, double value) {
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, size, "%.*g", digits, value);
        if (!(strtod(text, NULL) < value) && !(strtod(text, NULL) > value)) return;
    }
}

/* Formats the value of an option. False if it is free text, such as a path, which is not
   compared. */
static bool demo_option_text(const demo_binding *b, char *text, size_t size) {
    const char *word = b->type == DEMO_STRING ? *(const char *const *)b->variable : NULL;
    const double *numbers = (const double *)b->variable;
    char second[32];
    if (b->type == DEMO_FLAG)
        snprintf(text, size, "%s", *(const bool *)b->variable ? "true" : "false");
    else if (b->type == DEMO_INT)
        snprintf(text, size, "%lld", (long long)*(const int64_t *)b->variable);
    else if (b->type == DEMO_STRING)
        snprintf(text, size, "%s", word ? word : "none");
    else {
        demo_number_text(text, size, numbers[0]);
        if (b->type == DEMO_FLOATS2) {
            demo_number_text(second, sizeof second, numbers[1]);
            snprintf(text + strlen(text), size - strlen(text), ",%s", second);
        }
    }
    return b->type != DEMO_STRING || !strncmp(demo_known_find(b->name)->kind, "choice:", 7);
}

/* All options by which a resumed run is compared. An stb_ds array. */
static demo_note *demo_option_notes(const demo_binding *bindings, int count) {
    demo_note *notes = NULL;
    for (int i = 0; i < count; i++) {
        demo_note note;
        if (demo_list_has(demo_free_options, bindings[i].name) ||
            !demo_option_text(&bindings[i], note.value, sizeof note.value))
            continue;
        snprintf(note.key, sizeof note.key, "option.%s", bindings[i].name);
        arrput(notes, note);
    }
    return notes;
}

/* Refuses changes of options that must be the same. Prints other changes, which may be
   intended. fixed: further options that must be the same. */
static int demo_options_compare(const demo_note *notes, const seqpar_safetensors_file *file,
                                const char *fixed, bool speaks, demo_error *error) {
    char others[600] = "", shown[1024];
    for (int64_t i = 0; i < arrlen(notes); i++) {
        const char *there = seqpar_safetensors_metadata(file, notes[i].key);
        const char *name = notes[i].key + 7;
        size_t used = strlen(others);
        /* 0.3.0 did not record it */
        if (!there && !strcmp(name, "loss_definition")) there = "seqpar";
        if (!there && !strcmp(name, "lora_rank")) there = "0";
        if (strncmp(notes[i].key, "option.", 7) || !there || !strcmp(there, notes[i].value))
            continue;
        if (demo_list_has(demo_fixed_options, name) || demo_list_has(fixed, name))
            return demo_fail(error,
                             "the checkpoint was written with --%s %.60s, this run has %s; use "
                             "the same to go on",
                             name, there, notes[i].value);
        snprintf(others + used, sizeof others - used, "%s--%s %s (%.60s)", used ? ", " : "",
                 name, notes[i].value, there);
    }
    if (*others && speaks)
        fprintf(stderr, "notice: other options than before (in brackets): %s\n",
                demo_escape(shown, sizeof shown, others));
    return 0;
}

/* Checks that the checkpoint has the config of the trained model. */
static int demo_model_compare(const seqpar_llama_config *c, const char *folder,
                              demo_error *error) {
    double now[DEMO_MODEL_NUMBERS], then[DEMO_MODEL_NUMBERS];
    char here[32], there[32];
    seqpar_llama_config saved;
    seqpar_error why = {0};
    if (demo_load_config(folder, &saved, &why)) return demo_fail(error, "%s", why.text);
    demo_model_numbers(c, now);
    demo_model_numbers(&saved, then);
    for (int i = 0; i < DEMO_MODEL_NUMBERS; i++) {
        demo_number_text(here, sizeof here, now[i]);
        demo_number_text(there, sizeof there, then[i]);
        if (strcmp(here, there))
            return demo_fail(error,
                             "the model in %.300s has %s %s, but this run's model has %s; "
                             "give the same --pretrain or options of the model to go on",
                             folder, demo_model_names[i], there, here);
    }
    return 0;
}
#endif
