/* SPDX-License-Identifier: MIT OR Unlicense */
/* checkpoint.h - writes and reads checkpoints. A checkpoint is a folder with model.safetensors,
 * config.json, optimizer.safetensors, and `run`, the id of the run that wrote it.
 *
 * A checkpoint is written as CKPT/global_stepN.tmp. When it is complete, CKPT/latest is set to
 * its final name, and then the folder is renamed. If the run is killed between the two, the
 * next run renames the folder. So CKPT/latest always names a complete checkpoint. After that
 * the oldest checkpoints of this run are removed, and nothing else. The files hold whole
 * tensors and whole optimizer moments, so a run with any number of data-parallel and
 * sequence-parallel ranks and any ZeRO stage can read them. A checkpoint whose files do not
 * match its manifest is skipped, and the previous one is used. With --sharded_checkpoint each
 * rank writes a file with its shard of weights and moments (shards.h). */
#ifndef DEMO_CHECKPOINT_H
#define DEMO_CHECKPOINT_H

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>
#include "trainer/data/data.h"
#include "manifest.h"
#include "options.h"
#include "async_save.h"
#include "trainer/model/save_model.h"
#include "trainer/base/escape.h"

/* Longest path that a user may give, in bytes. Buffers are larger, since they also hold names
   of files in that folder. */
enum { DEMO_PATH_LIMIT = 1000 };

typedef struct {  /* the training state except for tensors */
    int64_t step; /* optimizer steps done */
    int64_t seed, train_batch_size, documents;
    int64_t extra[2]; /* numbers that the objective stores */
    int64_t optimizer_t;
    int64_t shards;  /* number of shards; 0: not sharded */
    demo_sum **sums; /* stb_ds array: checksums of this rank's shards */
    /* writes the shards in the background; NULL: they are written synchronously */
    demo_async *async;
    char run[DEMO_RUN_ID];       /* id of the run; "": none, in the folder of a critic */
    uint64_t reference;          /* digest of the reference model; 0: none */
    const demo_average *average; /* the weights' moving average; NULL: none */
    const seqpar_safetensors_pair *notes; /* further metadata, such as options */
    int64_t note_count;
} demo_state;

/* ---- folders ---- */

static seqpar_status demo_make_folder(const char *path, seqpar_error *error) {
    char part[DEMO_PATH_LIMIT + 200];
    if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part)
        return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                           "the path %.80s... has %lld characters, at most %d are possible; "
                           "give a shorter one",
                           path, (long long)strlen(path), DEMO_PATH_LIMIT);
    for (char *slash = part + 1;; slash++) {
        if (*slash && *slash != '/') continue;
        char kept = *slash;
        *slash = 0;
        if (mkdir(part, 0777) && errno != EEXIST)
            return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "cannot make folder %s: %s", part,
                               strerror(errno));
        *slash = kept;
        if (!kept) break;
    }
    struct stat kind;
    if (stat(part, &kind) || !S_ISDIR(kind.st_mode))
        return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                           "%s exists but is not a folder; give another", part);
    if (access(part, W_OK | X_OK))
        return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "cannot write into %s: %s", part,
                           strerror(errno));
    return SEQPAR_OK;
}

static char *demo_read_text(const char *path, seqpar_error *error) {
    const char *why;
    size_t size;
    char *text = demo_read_whole(path, 1 << 20, &size, &why);
    if (!text) seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "cannot read %s: %s", path, why);
    return text;
}

/* Saves the moving average of the weights in fp64, so that a resumed run continues with the
   same bits. Collective. */
static seqpar_status demo_save_average(seqpar_ctx *ctx, const seqpar_llama *model,
                                       const char *folder, const demo_average *average) {
    char path[1280];
    demo_transfer store = {.ctx = ctx, .model = model, .average = (demo_average *)average};
    snprintf(path, sizeof path, "%s/average.safetensors", folder);
    return demo_save_tensors(&store, path, 1, demo_no_prefix, demo_average_get,
                             SEQPAR_DTYPE_F64, NULL, 0);
}

/* ---- checkpoints ---- */

/* Lists the per-element states of this optimizer, and the prefixes of their names in files.
   Fills state (DEMO_STATES) and prefix (DEMO_STATES); returns their number. */
enum { DEMO_STATES = 3 };
static int demo_optimizer_states(const seqpar_ctx *ctx, const seqpar_optim *optim, int *state,
                                 const char **prefix) {
    static const char *const prefixes[DEMO_STATES] = {"exp_avg.", "exp_avg_sq.", "master."};
    static const int states[DEMO_STATES] = {SEQPAR_STATE_M, SEQPAR_STATE_V,
                                            SEQPAR_STATE_MASTER};
    int count = 0;
    for (int i = 0; i < DEMO_STATES; i++)
        if (seqpar_optim_keeps(ctx, optim, states[i])) {
            state[count] = states[i];
            prefix[count++] = prefixes[i];
        }
    return count;
}

/* Writes optimizer.safetensors: metadata and, without shards, the optimizer's moments.
   Collective. */
static seqpar_status demo_save_optimizer(seqpar_ctx *ctx, const seqpar_llama *model,
                                         seqpar_optim *optim, const char *folder,
                                         const demo_state *state) {
    enum { NUMBERS = 8 };
    char path[1280], number[NUMBERS][32], reference[32];
    const int64_t values[] = {state->step,      state->seed,  state->train_batch_size,
                              state->documents, optim->t,     state->extra[0],
                              state->extra[1],  state->shards};
    static const char *const keys[] = {"step",        "seed",  "train_batch_size", "documents",
                                       "optimizer_t", "extra", "extra_1",          "shards"};
    seqpar_safetensors_pair *metadata = NULL; /* stb_ds array */
    const char *prefix[DEMO_STATES];
    int states[DEMO_STATES], count = demo_optimizer_states(ctx, optim, states, prefix);
    demo_transfer store = {.ctx = ctx, .model = model, .optim = optim, .state = states};
    if (state->shards) count = 0; /* the tensors are in the shards */
    for (int i = 0; i < NUMBERS; i++) {
        if (values[i] == 0 && !strcmp(keys[i], "shards")) continue;
        snprintf(number[i], sizeof number[i], "%lld", (long long)values[i]);
        arrput(metadata, ((seqpar_safetensors_pair){keys[i], number[i]}));
    }
    snprintf(reference, sizeof reference, "%016llx", (unsigned long long)state->reference);
    if (state->reference) arrput(metadata, ((seqpar_safetensors_pair){"reference", reference}));
    for (int64_t i = 0; i < state->note_count; i++) arrput(metadata, state->notes[i]);
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    seqpar_status status = demo_save_tensors(&store, path, count, prefix, demo_optimizer_get,
                                             ctx->device->accumulator, metadata,
                                             arrlen(metadata));
    arrfree(metadata);
    return status;
}

/* ---- the folder of checkpoints ---- */

/* N if the name is exactly global_stepN, else -1. */
static int64_t demo_checkpoint_step(const char *name) {
    char again[64];
    long long step = strncmp(name, "global_step", 11) ? -1 : strtoll(name + 11, NULL, 10);
    snprintf(again, sizeof again, "global_step%lld", step);
    return step >= 0 && !strcmp(name, again) ? step : -1;
}

/* Does a file name end like ".tmp.123"? Then the process that wrote the file was killed. */
static bool demo_left_over(const char *end) {
    return !strncmp(end, ".tmp.", 5) && end[5] && !end[5 + strspn(end + 5, "0123456789.")];
}

static bool demo_checkpoint_file(const char *name) {
    static const char *const names[] = {
        "model.safetensors",   "config.json", "optimizer.safetensors",
        "average.safetensors", "run",         DEMO_MANIFEST};
    const char *behind;
    if (demo_is_shard(name, &behind)) return !*behind || demo_left_over(behind);
    for (int i = 0; i < 6; i++) {
        size_t length = strlen(names[i]);
        if (!strncmp(name, names[i], length) &&
            (!name[length] || demo_left_over(name + length)))
            return true;
    }
    return false;
}

/* Calls visit for each name in a folder, except . and .., until visit returns false. Returns
   false in that case. */
typedef bool (*demo_visit)(const char *folder, const char *name, void *user);
static bool demo_each_name(const char *path, demo_visit visit, void *user) {
    DIR *folder = opendir(path);
    bool on = true;
    for (struct dirent *entry; folder && on && (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            on = visit(path, entry->d_name, user);
    if (folder) closedir(folder);
    return on;
}

static bool demo_is_folder(const char *path) {
    struct stat kind;
    return !lstat(path, &kind) && S_ISDIR(kind.st_mode);
}

/* Is the name that of a checkpoint file, or of the subfolder of PPO's critic? */
static bool demo_visit_is_ours(const char *folder, const char *name, void *user) {
    char path[1400];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return demo_checkpoint_file(name) || (!strcmp(name, "critic") && demo_is_folder(path) &&
                                          demo_each_name(path, demo_visit_is_ours, user));
}

static bool demo_visit_remove(const char *folder, const char *name, void *user) {
    char path[1400];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (demo_is_folder(path))
        demo_each_name(path, demo_visit_remove, user), rmdir(path);
    else
        unlink(path);
    return true;
}

/* Removes a folder if it contains only checkpoint files; else leaves it unchanged. */
static bool demo_remove_if_ours(const char *path) {
    if (!demo_is_folder(path) || !demo_each_name(path, demo_visit_is_ours, NULL)) return false;
    demo_each_name(path, demo_visit_remove, NULL);
    return !rmdir(path);
}

/* Removes a checkpoint folder, under the same condition. Renames it first, so that a partly
   removed one never has the name of a checkpoint. */
static bool demo_remove_checkpoint(const char *path) {
    char gone[1200];
    snprintf(gone, sizeof gone, "%s.gone", path);
    demo_remove_if_ours(gone);
    return demo_is_folder(path) && demo_each_name(path, demo_visit_is_ours, NULL) &&
           !rename(path, gone) && demo_remove_if_ours(gone);
}

static void demo_checkpoint_path(char *path, size_t size, const char *root, int64_t step) {
    snprintf(path, size, "%s/global_step%lld", root, (long long)step);
}

static bool demo_visit_checkpoint(const char *folder, const char *name, void *user) {
    char file[2][1300];
    int64_t **steps = (int64_t **)user, step = demo_checkpoint_step(name), at;
    snprintf(file[0], sizeof file[0], "%s/%s/optimizer.safetensors", folder, name);
    snprintf(file[1], sizeof file[1], "%s/%s/model.safetensors", folder, name);
    if (step < 0 || (access(file[0], F_OK) && access(file[1], F_OK))) return true;
    arrput(*steps, step);
    for (at = arrlen(*steps) - 1; at > 0 && (*steps)[at - 1] > step; at--)
        (*steps)[at] = (*steps)[at - 1];
    (*steps)[at] = step;
    return true;
}

/* The steps of all checkpoints under root, damaged or not, oldest first: an stb_ds array. */
static int64_t *demo_checkpoints(const char *root) {
    int64_t *steps = NULL;
    demo_each_name(root, demo_visit_checkpoint, &steps);
    return steps;
}

/* ---- a checkpoint's metadata ---- */

/* Reads an integer from the metadata; returns `missing` if the key does not exist. missing <
   low: the key is required. */
static int64_t demo_metadata_number(const seqpar_safetensors_file *file, const char *path,
                                    const char *key, int64_t low, int64_t missing,
                                    seqpar_error *error) {
    const char *text = seqpar_safetensors_metadata(file, key);
    int64_t value = missing;
    if (!text && missing < low)
        seqpar_fail(
            error, SEQPAR_ERR_FILE_FORMAT,
            "%.300s does not say \"%s\"; it is not a checkpoint of a trainer, take another",
            path, key);
    if (text && (!demo_read_int(text, &value) || value < low))
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: \"%s\" is \"%.40s\", but it must be a whole number of at least "
                    "%lld; the file is damaged, take another checkpoint",
                    path, key, text, (long long)low);
    return value;
}

static uint64_t demo_metadata_digest(const seqpar_safetensors_file *file, const char *path,
                                     const char *key, seqpar_error *error) {
    const char *text = seqpar_safetensors_metadata(file, key);
    if (text && (strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16))
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: \"%s\" is \"%.40s\", but it must be 16 digits 0-9 and a-f; the "
                    "file is damaged, take another checkpoint",
                    path, key, text);
    return text ? strtoull(text, NULL, 16) : 0;
}

/* Reads the training state, except for tensors and notes. */
static seqpar_status demo_read_state(const seqpar_safetensors_file *file, const char *path,
                                     demo_state *state, seqpar_error *error) {
    *state = (demo_state){
        .step = demo_metadata_number(file, path, "step", 0, -1, error),
        .seed = demo_metadata_number(file, path, "seed", 0, -1, error),
        .train_batch_size = demo_metadata_number(file, path, "train_batch_size", 1, -1, error),
        .documents = demo_metadata_number(file, path, "documents", 1, -1, error),
        .extra = {demo_metadata_number(file, path, "extra", INT64_MIN, -1, error),
                  demo_metadata_number(file, path, "extra_1", INT64_MIN, -1, error)},
        .optimizer_t = demo_metadata_number(file, path, "optimizer_t", 0, -1, error),
        .shards = demo_metadata_number(file, path, "shards", 0, 0, error),
        .reference = demo_metadata_digest(file, path, "reference", error)};
    if (!error->status && state->optimizer_t > state->step)
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: \"optimizer_t\" is %lld, more than its \"step\" %lld; the file is "
                    "damaged, take another checkpoint",
                    path, (long long)state->optimizer_t, (long long)state->step);
    return error->status;
}

static bool demo_is_run(const char *text) {
    return strlen(text) == DEMO_RUN_ID - 1 &&
           strspn(text, "0123456789abcdef") == DEMO_RUN_ID - 1;
}

/* Reads the id of the run that wrote the folder; "" if there is no file `run`, as in the
   subfolder of a critic. */
static seqpar_status demo_read_run(const char *folder, char run[DEMO_RUN_ID],
                                   seqpar_error *error) {
    char path[1280], *text;
    snprintf(path, sizeof path, "%s/run", folder);
    *run = 0;
    if (access(path, F_OK)) return SEQPAR_OK;
    if (!(text = demo_read_text(path, error))) return error->status;
    if (demo_is_run(text)) snprintf(run, DEMO_RUN_ID, "%s", text);
    free(text);
    return *run ? SEQPAR_OK
                : seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                              "%.300s does not hold the %d digits of a run's name", path,
                              DEMO_RUN_ID - 1);
}

/* ---- a checkpoint's manifest ---- */

typedef struct {
    const cJSON *manifest;
    /* folder: the checkpoint. below: "critic/" in that subfolder, else "" */
    const char *folder, *below;
    seqpar_error *error;
} demo_listing;

static void demo_listed(const demo_listing *l, const char *name) {
    char listed[300];
    snprintf(listed, sizeof listed, "%s%.250s", l->below, name);
    if (!demo_manifest_entry(l->manifest, listed))
        seqpar_fail(l->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s/" DEMO_MANIFEST " does not list %s, so nothing says whether it is "
                    "what was written",
                    l->folder, listed);
}

/* Checks that the manifest lists a file. Files that are not part of a checkpoint are never
   read, so they need not be listed. */
static bool demo_visit_listed(const char *folder, const char *name, void *user) {
    const demo_listing *l = (const demo_listing *)user;
    demo_listing inside = {l->manifest, l->folder, "critic/", l->error};
    char path[1400];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (!strcmp(name, "critic") && demo_is_folder(path))
        return demo_each_name(path, demo_visit_listed, &inside);
    if (demo_checkpoint_file(name) && !strstr(name, ".tmp.") && strcmp(name, DEMO_MANIFEST))
        demo_listed(l, name);
    return !l->error->status;
}

/* Checks that the manifest belongs to this step and to the run of the folder, that it lists
   every file that will be read, and that size and checksum of every file match. */
static seqpar_status demo_manifest_check(const char *folder, int64_t step,
                                         seqpar_error *error) {
    static const char *const needed[] = {"config.json", "optimizer.safetensors", "run"};
    cJSON *manifest = demo_manifest_read(folder, error);
    demo_listing listing = {manifest, folder, "", error};
    char run[DEMO_RUN_ID];
    if (!manifest) return error->status;
    for (int i = 0; i < 3; i++) demo_listed(&listing, needed[i]);
    demo_each_name(folder, demo_visit_listed, &listing);
    if (!error->status) demo_manifest_sums(manifest, folder, error);
    if (!error->status && !demo_read_run(folder, run, error))
        demo_manifest_names(manifest, folder, run, step, error);
    cJSON_Delete(manifest);
    return error->status;
}

/* The run id of a damaged checkpoint: from its file `run` if that is intact, else from the
   manifest; "" if unknown. */
static void demo_believed_run(const char *folder, char run[DEMO_RUN_ID]) {
    seqpar_error ignored[3] = {{0}};
    cJSON *manifest = demo_manifest_read(folder, &ignored[0]);
    const cJSON *file = demo_manifest_entry(manifest, "run"),
                *its = cJSON_GetObjectItemCaseSensitive(manifest, "run");
    bool damaged = (file && demo_manifest_file(folder, file, &ignored[1])) ||
                   demo_read_run(folder, run, &ignored[2]);
    if (damaged)
        snprintf(run, DEMO_RUN_ID, "%s",
                 cJSON_IsString(its) && demo_is_run(its->valuestring) ? its->valuestring : "");
    cJSON_Delete(manifest);
}

/* Opens optimizer.safetensors of the checkpoint of this step, and reads its metadata and the
   run id. */
static seqpar_status demo_open_state(seqpar_safetensors_file **file, demo_state *state,
                                     const char *folder, int64_t step, seqpar_error *error) {
    char path[1280];
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    *file = NULL;
    seqpar_status status = seqpar_safetensors_open(file, path, error);
    if (!status) status = demo_read_state(*file, path, state, error);
    if (!status && state->step != step)
        status = seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                             "%.300s is of step %lld, its folder's name says %lld; give the "
                             "folder its name back",
                             path, (long long)state->step, (long long)step);
    return status ? status : demo_read_run(folder, state->run, error);
}

/* Is the checkpoint complete? Checks that its tensor files exist and have whole headers, and
   that the metadata is valid. */
static bool demo_checkpoint_whole(const char *root, int64_t step, demo_state *state,
                                  seqpar_error *error) {
    seqpar_safetensors_file *file = NULL, *model = NULL;
    char folder[1100], path[1280];
    demo_checkpoint_path(folder, sizeof folder, root, step);
    seqpar_status status = demo_open_state(&file, state, folder, step, error);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    for (int64_t i = 0; !status && i < (state->shards ? state->shards : 1); i++) {
        if (state->shards) demo_shard_path(path, sizeof path, folder, i, state->shards);
        status = seqpar_safetensors_open(&model, path, error);
        seqpar_safetensors_close(model);
    }
    seqpar_safetensors_close(file);
    return !status;
}

/* Is it a checkpoint of this run? */
static bool demo_checkpoint_of(const char *root, int64_t step, const char *run) {
    seqpar_error error = {0};
    char folder[1100], its[DEMO_RUN_ID];
    demo_checkpoint_path(folder, sizeof folder, root, step);
    return !demo_read_run(folder, its, &error) && *its && !strcmp(its, run);
}

/* ---- writing a checkpoint, and removing old ones ---- */

/* Removes the oldest checkpoints of the run until at most `keep` are left. Never removes that
   of step `latest`. */
static void demo_forget_checkpoints(const char *root, const char *run, int64_t keep,
                                    int64_t latest) {
    int64_t *steps = demo_checkpoints(root), *own = NULL;
    char path[1100];
    for (int64_t i = 0; i < arrlen(steps); i++) {
        demo_checkpoint_path(path, sizeof path, root, steps[i]);
        if (demo_each_name(path, demo_visit_is_ours, NULL) &&
            demo_checkpoint_of(root, steps[i], run))
            arrput(own, steps[i]);
    }
    for (int64_t i = 0, left = arrlen(own); left > keep && i < arrlen(own); i++) {
        demo_checkpoint_path(path, sizeof path, root, own[i]);
        if (own[i] != latest && demo_remove_checkpoint(path)) left--;
    }
    arrfree(steps);
    arrfree(own);
}

/* Makes the final name of a checkpoint available: removes an earlier checkpoint of the same
   run, and renames anything else to NAME.other. */
static seqpar_status demo_clear_way(const char *root, const demo_state *state,
                                    seqpar_error *error) {
    char path[1100], aside[1200], shown[2][512];
    struct stat there;
    demo_checkpoint_path(path, sizeof path, root, state->step);
    if (lstat(path, &there) ||
        (demo_checkpoint_of(root, state->step, state->run) && demo_remove_checkpoint(path)))
        return SEQPAR_OK;
    snprintf(aside, sizeof aside, "%s.other", path);
    if (!lstat(aside, &there) || rename(path, aside))
        return seqpar_fail(error, SEQPAR_ERR_FILE_WRITE,
                           "%.300s is in the place of a checkpoint and was not written by "
                           "this run; move it away and go on with --load_checkpoint",
                           path);
    fprintf(stderr,
            "notice: %s existed and was not written by this run; it was renamed to %s\n",
            demo_escape(shown[0], sizeof shown[0], path),
            demo_escape(shown[1], sizeof shown[1], aside));
    return SEQPAR_OK;
}

/* The temporary folder in which the checkpoint of this step is written. */
static void demo_checkpoint_temporary(char *path, size_t size, const char *root, int64_t step) {
    snprintf(path, size, "%s/global_step%lld.tmp", root, (long long)step);
}

/* Rank 0 calls this before any file is written. Makes the temporary folder and the file
   `run`. */
static seqpar_status demo_begin_checkpoint(const char *root, const demo_state *state,
                                           seqpar_error *error) {
    char temporary[1110], whose[1280];
    demo_checkpoint_temporary(temporary, sizeof temporary, root, state->step);
    /* the run id is in a separate file, so that equal runs write equal model and optimizer
       files */
    snprintf(whose, sizeof whose, "%s/run", temporary);
    demo_remove_if_ours(temporary);
    seqpar_status status = demo_make_folder(temporary, error);
    return status ? status
                  : seqpar_file_write_atomic(whose, state->run, (int64_t)strlen(state->run),
                                             error);
}

/* Rank 0 calls this when all files are written. Gives the checkpoint its final name, or removes
   it if writing failed (status). */
static seqpar_status demo_end_checkpoint(seqpar_status status, const char *root,
                                         const demo_state *state, seqpar_error *error) {
    char temporary[1110], final[1100], latest[1100];
    demo_checkpoint_temporary(temporary, sizeof temporary, root, state->step);
    demo_checkpoint_path(final, sizeof final, root, state->step);
    snprintf(latest, sizeof latest, "%s/latest", root);
    const char *name = strrchr(final, '/') + 1;
    if (!status)
        status = demo_manifest_write(temporary, state->run, state->step,
                                     state->sums ? *state->sums : NULL, error);
    if (!status) status = demo_clear_way(root, state, error);
    if (!status) status = seqpar_file_write_atomic(latest, name, (int64_t)strlen(name), error);
    if (status)
        demo_remove_if_ours(temporary);
    else if (rename(temporary, final))
        status = seqpar_fail(
            error, SEQPAR_ERR_FILE_WRITE,
            "cannot rename %.300s: %s; the checkpoint is complete, and --load_checkpoint "
            "renames it",
            temporary, strerror(errno));
    return status;
}

/* Saves weights and moments as shards, one file per rank. */
static seqpar_status demo_save_shards(seqpar_ctx *ctx, const seqpar_llama *model,
                                      seqpar_optim *optim, const char *folder,
                                      const demo_state *state) {
    const char *prefix[1 + DEMO_STATES] = {demo_shard_weights};
    int states[DEMO_STATES], count = demo_optimizer_states(ctx, optim, states, prefix + 1);
    demo_transfer store = {.ctx = ctx,
                           .model = model,
                           .optim = optim,
                           .state = states,
                           .run = state->run,
                           .step = state->step};
    demo_sum sum;
    seqpar_status status = ctx->world->rank
                               ? SEQPAR_OK
                               : demo_save_config(folder, &model->config, ctx->error);
    /* no rank writes before the folder exists */
    if (!status) status = seqpar_comm_barrier(ctx->world);
    if (!status && state->async)
        status = demo_copy_shard(&store, state->async, folder, 1 + count, prefix);
    else if (!status)
        status = demo_write_shard(&store, folder, 1 + count, prefix, &sum);
    if (!status && !state->async) arrput(*state->sums, sum);
    if (!status) status = demo_save_optimizer(ctx, model, optim, folder, state);
    return status ? status : seqpar_comm_barrier(ctx->world); /* all ranks wrote or copied */
}

/* Saves a model and its optimizer into an existing folder. All ranks send their shards of the
   state to rank 0, which writes; with --sharded_checkpoint every rank writes its own.
   Collective. */
static seqpar_status demo_save_checkpoint(seqpar_ctx *ctx, const seqpar_llama *model,
                                          seqpar_optim *optim, const char *folder,
                                          const demo_state *state) {
    const demo_save_form form = {.dtype = demo_dtype(ctx->device->storage)};
    if (state->shards) return demo_save_shards(ctx, model, optim, folder, state);
    const seqpar_llama *const models[DEMO_SAVED_MODELS] = {model};
    seqpar_status status = ctx->world->rank ? demo_hand_over(ctx, models, model)
                                            : demo_save_folder(ctx, model, folder, &form, NULL);
    if (!ctx->world->rank) status = demo_handed_over(ctx, model, status);
    return status ? status : demo_save_optimizer(ctx, model, optim, folder, state);
}

/* ---- the checkpoint to resume from ---- */

enum { DEMO_NOTHING_SAVED = -1 };

/* The step that root's file `latest` names; -1: there is no such file. why: set to what is
   wrong with `latest` if it names no checkpoint. */
static int64_t demo_latest_step(const char *root, char *why, size_t size) {
    char path[1100];
    seqpar_error error = {0};
    snprintf(path, sizeof path, "%s/latest", root);
    bool there = !access(path, F_OK);
    char *text = there ? demo_read_text(path, &error) : NULL;
    if (text) text[strcspn(text, " \r\n")] = 0;
    int64_t step = text ? demo_checkpoint_step(text) : -1;
    if (!there)
        snprintf(why, size, "is missing");
    else if (!text)
        snprintf(why, size, "cannot be read");
    else if (step < 0)
        snprintf(why, size, "names no checkpoint");
    else
        snprintf(why, size, "names global_step%lld, which does not exist", (long long)step);
    free(text);
    return step;
}

/* a checkpoint that a run can resume from */
typedef struct {
    int64_t step;
    char run[DEMO_RUN_ID];
} demo_candidate;

/* The intact checkpoints of these steps, newest first: an stb_ds array. */
static demo_candidate *demo_candidates(const char *root, const int64_t *steps) {
    demo_candidate *all = NULL;
    for (int64_t i = arrlen(steps); i-- > 0;) {
        demo_candidate one = {.step = steps[i]};
        demo_state state = {0};
        seqpar_error broken = {0};
        char folder[1100];
        demo_checkpoint_path(folder, sizeof folder, root, steps[i]);
        if (!demo_checkpoint_whole(root, steps[i], &state, &broken) ||
            demo_manifest_check(folder, steps[i], &broken))
            continue;
        memcpy(one.run, state.run, sizeof one.run);
        arrput(all, one);
    }
    return all;
}

/* Refuses to resume because `latest` is not valid; the message names the newest intact
   checkpoint. */
static seqpar_status demo_refuse_latest(const char *root, const int64_t *steps, const char *why,
                                        seqpar_error *error) {
    demo_candidate *whole = demo_candidates(root, steps);
    if (arrlen(whole))
        seqpar_fail(
            error, SEQPAR_ERR_FILE_FORMAT,
            "ckpt_path %.300s holds checkpoints, but its file latest %s; the newest "
            "undamaged one is global_step%lld: write that name into the file to go on from it",
            root, why, (long long)whole[0].step);
    else
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "ckpt_path %.300s: its file latest %s, and all checkpoints there are "
                    "damaged; remove the folder or give another",
                    root, why);
    arrfree(whole);
    return error->status;
}

/* The newest checkpoint of this run before `step`; DEMO_NOTHING_SAVED if there is none. If the
   run is unknown (""), the result is used only if all checkpoints before `step` are of one
   run. */
static int64_t demo_candidate_before(const demo_candidate *whole, int64_t step,
                                     const char *run) {
    const demo_candidate *found = NULL;
    for (int64_t i = 0; i < arrlen(whole); i++) {
        if (whole[i].step >= step || (*run && strcmp(run, whole[i].run))) continue;
        if (!found)
            found = &whole[i];
        else if (strcmp(found->run, whole[i].run))
            return DEMO_NOTHING_SAVED;
    }
    return found ? found->step : DEMO_NOTHING_SAVED;
}

/* Refuses to choose a checkpoint automatically: the message lists the intact ones, so that the
   user can choose. */
static seqpar_status demo_refuse_damaged(const demo_candidate *whole, int64_t step,
                                         const char *why, seqpar_error *error) {
    char names[200] = "";
    for (int64_t i = 0; i < arrlen(whole) && i < 6; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%sglobal_step%lld",
                 i ? ", " : "", (long long)whole[i].step);
    if (*names)
        return seqpar_fail(
            error, SEQPAR_ERR_FILE_FORMAT,
            "global_step%lld in ckpt_path is damaged, and no earlier checkpoint is known to "
            "be of the same run; undamaged are %s: write one of these names into the file "
            "latest to go on from it (%.220s)",
            (long long)step, names, why);
    return seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                       "global_step%lld in ckpt_path is damaged, and so are all others "
                       "there; remove the folder and start training again (%.360s)",
                       (long long)step, why);
}

/* If the checkpoint of *step is damaged, sets *step to an earlier intact one and describes that
   in notice. Checks twice, since the process that holds the lock may rename the folder
   (demo_settle) after access() has found it. */
static seqpar_status demo_pass_over(const char *root, const int64_t *steps, int64_t *step,
                                    char *notice, size_t size, seqpar_error *error) {
    char path[1100], temporary[1110], run[DEMO_RUN_ID];
    seqpar_error broken;
    demo_checkpoint_path(path, sizeof path, root, *step);
    demo_checkpoint_temporary(temporary, sizeof temporary, root, *step);
    for (int times = 0; times < 2; times++) {
        broken = (seqpar_error){0};
        if (!demo_manifest_check(access(path, F_OK) ? temporary : path, *step, &broken))
            return SEQPAR_OK;
    }
    demo_believed_run(access(path, F_OK) ? temporary : path, run);
    demo_candidate *whole = demo_candidates(root, steps);
    int64_t before = demo_candidate_before(whole, *step, run);
    seqpar_status status = SEQPAR_OK;
    if (before == DEMO_NOTHING_SAVED) {
        status = demo_refuse_damaged(whole, *step, broken.text, error);
    } else {
        snprintf(notice, size,
                 "%s: the checkpoint is damaged, training goes on from global_step%lld",
                 broken.text, (long long)before);
        *step = before;
    }
    arrfree(whole);
    return status;
}

/* Sets *step to the checkpoint that `latest` names, or to DEMO_NOTHING_SAVED. If that
   checkpoint is damaged, chooses an earlier one and describes that in notice. The folder may
   still have its temporary name (demo_settle). */
static seqpar_status demo_find_checkpoint(const char *root, int64_t *step, char *notice,
                                          size_t size, seqpar_error *error) {
    char why[128], path[1100], temporary[1110];
    int64_t *steps = demo_checkpoints(root);
    seqpar_status status = SEQPAR_OK;
    *step = demo_latest_step(root, why, sizeof why);
    demo_checkpoint_path(path, sizeof path, root, *step);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (*step < 0 && !arrlen(steps) && !strcmp(why, "is missing"))
        *step = DEMO_NOTHING_SAVED;
    else if (*step < 0 || (access(path, F_OK) && access(temporary, F_OK)))
        status = demo_refuse_latest(root, steps, why, error);
    else
        status = demo_pass_over(root, steps, step, notice, size, error);
    arrfree(steps);
    return status;
}

/* Renames the checkpoint that `latest` names to its final name, if its run was killed before
   doing that. Only the process that holds the lock calls this. */
static seqpar_status demo_settle(const char *root, seqpar_error *error) {
    char why[128], path[1100], temporary[1110];
    int64_t step = demo_latest_step(root, why, sizeof why);
    demo_checkpoint_path(path, sizeof path, root, step);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (step < 0 || !access(path, F_OK) || access(temporary, F_OK) || !rename(temporary, path))
        return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_FILE_WRITE,
                       "cannot rename %.300s: %s; the checkpoint is complete: remove what is "
                       "in the way",
                       temporary, strerror(errno));
}

/* Removes one entry of the folder if a killed run left it incomplete. */
static bool demo_visit_left_over(const char *folder, const char *name, void *user) {
    char path[1400], plain[256];
    size_t length = strlen(name);
    size_t end = length > 5 && !strcmp(name + length - 5, ".gone")  ? 5
                 : length > 4 && !strcmp(name + length - 4, ".tmp") ? 4
                                                                    : 0;
    (void)user;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(plain, sizeof plain, "%.*s", (int)(length - end), name);
    if (end && demo_checkpoint_step(plain) >= 0) demo_remove_if_ours(path);
    if ((!strncmp(name, "latest", 6) && demo_left_over(name + 6)) ||
        (!strncmp(name, "reference.safetensors", 21) && demo_left_over(name + 21)))
        unlink(path);
    return true;
}

/* Removes incomplete files of killed runs. Only the process that holds the lock calls this. */
static void demo_clear_left_overs(const char *root) {
    demo_each_name(root, demo_visit_left_over, NULL);
}

/* ---- reading a checkpoint ---- */

/* Reads the moving average of the weights. Refuses a checkpoint that has one if this run keeps
   none (average->share is NULL), and the reverse. */
static seqpar_status demo_load_average(seqpar_ctx *ctx, const seqpar_llama *model,
                                       const char *folder, demo_average *average) {
    char path[1280];
    demo_transfer store = {.ctx = ctx, .model = model, .average = average};
    snprintf(path, sizeof path, "%s/average.safetensors", folder);
    int there = !access(path, F_OK), kept = average->share != NULL;
    if (there != kept)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "the checkpoint %.300s was written with%s a moving average of the "
                           "weights; go on with%s --enable_ema",
                           folder, there ? "" : "out", there ? "" : "out");
    return kept ? demo_load_file(&store, path, 1, demo_no_prefix, demo_average_put) : SEQPAR_OK;
}

/* Reads only the metadata of a checkpoint, for ranks that do not hold the model. */
static seqpar_status demo_look_at_state(demo_state *state, const char *folder, int64_t step,
                                        seqpar_error *error) {
    seqpar_safetensors_file *file;
    seqpar_status status = demo_open_state(&file, state, folder, step, error);
    seqpar_safetensors_close(file);
    return status;
}

/* Reads model, optimizer and state from the checkpoint of this step. Every rank reads the files
   itself. */
static seqpar_status demo_load_checkpoint(seqpar_ctx *ctx, seqpar_llama *model,
                                          seqpar_optim *optim, const char *folder, int64_t step,
                                          demo_state *state) {
    char path[1280];
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    const char *prefix[1 + DEMO_STATES] = {demo_shard_weights};
    int states[DEMO_STATES], count = demo_optimizer_states(ctx, optim, states, prefix + 1);
    demo_transfer store = {.ctx = ctx,
                           .model = model,
                           .optim = optim,
                           .state = states,
                           .run = state->run,
                           .step = step};
    char master[160];
    seqpar_safetensors_file *file = NULL;
    snprintf(master, sizeof master, "master.%s", model->tensors[0].name);
    seqpar_status status = demo_open_state(&file, state, folder, step, ctx->error);
    if (!status && !state->shards && seqpar_optim_keeps(ctx, optim, SEQPAR_STATE_MASTER) &&
        !seqpar_safetensors_find(file, master))
        status = seqpar_fail(
            ctx->error, SEQPAR_ERR_OPTION,
            "%s was written without fp32 master weights, which weights in bf16 need; go on "
            "without --param_dtype bf16 or --bf16",
            path);
    if (!status && state->shards)
        status = demo_load_shards(&store, folder, state->shards, 1 + count, prefix);
    else if (!status) {
        /* a model folder may lack a score head, but a checkpoint of a model with one must have
           it */
        if (model->config.score) status = demo_head_there(model, folder, ctx->error);
        if (!status) status = demo_load_weights(ctx, model, folder);
        if (!status)
            status = demo_load_file(&store, path, count, prefix + 1, demo_optimizer_put);
    }
    if (!status && !seqpar_optim_keeps(ctx, optim, SEQPAR_STATE_MASTER) &&
        seqpar_safetensors_find(file, master))
        status = seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                             "%s was written in bf16, with fp32 master weights, which this "
                             "device does not keep; go on with --param_dtype bf16",
                             path);
    if (!status) optim->t = state->optimizer_t;
    seqpar_safetensors_close(file);
    return status;
}
#endif
