/* SPDX-License-Identifier: MIT OR Unlicense */
/* lora.h - LoRA adapters of a frozen model: chooses them by the options, loads them, and writes
 * their folder as PEFT reads it. The adapters are a separate seqpar_llama, so that the
 * optimizer, checkpoints and the moving average treat them like a model. */
#ifndef DEMO_LORA_H
#define DEMO_LORA_H
#include "trainer/run/settle.h"

enum {
    DEMO_LORA_ATTENTION = SEQPAR_ADAPT_Q | SEQPAR_ADAPT_K | SEQPAR_ADAPT_V | SEQPAR_ADAPT_O,
    DEMO_LORA_SPLIT = SEQPAR_ADAPT_ALL & ~(SEQPAR_ADAPT_O | SEQPAR_ADAPT_DOWN)
};

/* ---- which adapters, from options ---- */

static bool demo_lora_asked(const demo_config *c) {
    return c->lora_rank > 0 || c->adapter || c->adapter_name_or_path ||
           (c->finetuning_type && !strcmp(c->finetuning_type, "lora"));
}

/* The training program whose defaults apply: DEMO_FROM_... */
static int demo_lora_from(const demo_job *job) {
    const demo_config *c = &job->config;
    return c->adapter           ? DEMO_FROM_AXOLOTL
           : c->finetuning_type ? DEMO_FROM_LLAMAFACTORY
                                : demo_job_from(job, "lora_rank");
}

/* An adapter option that was given although there are no adapters; NULL: none. */
static const char *demo_lora_idle(const demo_job *job) {
    static const char *const names[] = {"lora_alpha", "lora_dropout", "use_rslora",
                                        "target_modules", "lora_target_linear"};
    for (int i = 0; i < 5 && !job->config.lora_rank; i++)
        if (demo_job_typed(job, names[i])) return demo_job_spelled(job, names[i]);
    return NULL;
}

/* Refuses options that exclude each other, and options that lack another one they need: one of
   them would silently have no effect. */
static int demo_lora_contradicts(const demo_job *job, demo_error *error) {
    const demo_config *c = &job->config;
    const char *rank = demo_job_spelled(job, "lora_rank");
    bool zero = demo_job_typed(job, "lora_rank") && !c->lora_rank;
    if (c->finetuning_type && !strcmp(c->finetuning_type, "full") && c->lora_rank)
        return demo_fail(error,
                         "--finetuning_type full trains every weight, and --%s %lld adapters; "
                         "leave one of them out",
                         rank, (long long)c->lora_rank);
    if (zero && demo_lora_asked(c))
        return demo_fail(error,
                         "--%s 0 means no adapters, but --%s lora needs adapters; give 1 or "
                         "more",
                         rank, c->adapter ? "adapter" : "finetuning_type");
    if (!strcmp(rank, "lora_r") && c->lora_rank && !c->adapter)
        return demo_fail(error,
                         "without --adapter axolotl ignores --lora_r %lld and trains every "
                         "weight; add --adapter lora, or leave it out",
                         (long long)c->lora_rank);
    if (c->adapter && !strcmp(c->adapter, "qlora") && !c->load_in_4bit)
        return demo_fail(error, "--adapter qlora keeps the model in four bits; add "
                                "--load_in_4bit, or take lora");
    if (c->load_in_4bit && !demo_lora_asked(c))
        return demo_fail(error,
                         "--load_in_4bit keeps the model in four bits, which cannot "
                         "be trained without adapters; add --lora_rank, or leave it out");
    if (c->load_in_4bit && c->save_merged)
        return demo_fail(error, "--save_merged would round the merged weights to the four "
                                "bits of --load_in_4bit; leave one of them out");
    if (c->load_in_4bit && c->param_offload)
        return demo_fail(error, "--param_offload keeps weights outside of the device's "
                                "memory, but --load_in_4bit keeps all of them there; leave "
                                "one of them out");
    if (c->save_merged && !demo_lora_asked(c))
        return demo_fail(error,
                         "--save_merged needs adapters; add --lora_rank, or leave it out");
    return 0;
}

/* Reads --target_modules, names separated by commas or blanks, into SEQPAR_ADAPT_... bits. */
static int demo_lora_read(const demo_job *job, int *targets, demo_error *error) {
    static const char between[] = ", ";
    char known[DEMO_LORA_TEXT];
    const char *at = job->config.target_modules;
    *targets = at && !job->config.lora_target_linear ? 0 : SEQPAR_ADAPT_ALL;
    for (at = at ? at : ""; *(at += strspn(at, between)); at += strcspn(at, between)) {
        size_t length = strcspn(at, between);
        int bits = demo_lora_bits(at, length);
        *targets |= bits;
        if (bits) continue;
        demo_lora_text(known, SEQPAR_ADAPT_ALL);
        return demo_fail(error,
                         "--%s names %.*s, which no layer has; give some of %s, or all-linear",
                         demo_job_spelled(job, "target_modules"), (int)length, at, known);
    }
    return *targets ? 0
                    : demo_fail(error, "--%s names no module; give all-linear, or leave it out",
                                demo_job_spelled(job, "target_modules"));
}

/* Sets an option to the value of the folder's adapters. Refuses a different value that the user
   gave. */
static int demo_lora_same(const demo_job *job, const char *name, int64_t there, int64_t *typed,
                          demo_error *error) {
    if (demo_job_typed(job, name) && *typed != there)
        return demo_fail(error,
                         "the adapters in --%s %.300s have %s %lld, and --%s is %lld; leave "
                         "that out",
                         demo_job_spelled(job, "adapter_name_or_path"),
                         job->config.adapter_name_or_path, name, (long long)there,
                         demo_job_spelled(job, name), (long long)*typed);
    *typed = there;
    return 0;
}

/* Adapters loaded from a folder keep its rank, alpha, use_rslora and targets. The user may
   change only the dropout. */
static int demo_lora_folder(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    demo_peft there;
    int64_t rooted = c->use_rslora, targets;
    if (demo_peft_read(c->adapter_name_or_path, &there, error)) return -1;
    if (demo_lora_same(job, "lora_rank", there.rank, &c->lora_rank, error) ||
        demo_lora_same(job, "lora_alpha", there.alpha, &c->lora_alpha, error) ||
        demo_lora_same(job, "use_rslora", there.rooted, &rooted, error))
        return -1;
    c->use_rslora = there.rooted;
    if (!demo_job_typed(job, "lora_dropout")) c->lora_dropout = there.dropout;
    demo_lora_text(job->adapter_targets, there.targets);
    targets = there.targets;
    if (c->target_modules || c->lora_target_linear) {
        int typed;
        if (demo_lora_read(job, &typed, error)) return -1;
        if (typed != targets)
            return demo_fail(error, "the adapters in --%s %.300s are of %s; leave --%s out",
                             demo_job_spelled(job, "adapter_name_or_path"),
                             c->adapter_name_or_path, job->adapter_targets,
                             demo_job_spelled(job, c->target_modules ? "target_modules"
                                                                     : "lora_target_linear"));
    }
    c->target_modules = job->adapter_targets;
    c->lora_target_linear = false;
    return 0;
}

/* Sets defaults for options that the user did not give. axolotl has none for some, so these are
   required if the command line has axolotl's options. */
static int demo_lora_defaults(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    int from = demo_lora_from(job);
    if (c->adapter_name_or_path) return demo_lora_folder(job, error);
    const char *missing = !demo_job_typed(job, "lora_rank")              ? "lora_r"
                          : !demo_job_typed(job, "lora_alpha")           ? "lora_alpha"
                          : !c->target_modules && !c->lora_target_linear ? "lora_target_linear"
                                                                         : NULL;
    if (from == DEMO_FROM_AXOLOTL && missing)
        return demo_fail(error,
                         "axolotl has no default for %s, and this command line has axolotl's "
                         "options; give --%s",
                         missing, missing);
    if (!c->lora_rank) c->lora_rank = 8;
    if (!demo_job_typed(job, "lora_alpha") && from == DEMO_FROM_LLAMAFACTORY)
        c->lora_alpha = 2 * c->lora_rank;
    return 0;
}

static int demo_lora_possible(const demo_job *job, demo_error *error) {
    const char *name = job->config.adapter                ? "adapter"
                       : demo_job_typed(job, "lora_rank") ? demo_job_spelled(job, "lora_rank")
                                                          : "finetuning_type";
    if (!job->config.pretrain)
        return demo_fail(error,
                         "--%s trains adapters of a pretrained model; give its folder by "
                         "--pretrain",
                         name);
    return 0;
}

/* Do the model's files store several matrices of a layer as one tensor? PEFT cannot use
   adapters of parts of it. */
static bool demo_lora_fused(const demo_job *job) {
    demo_weights w;
    seqpar_error ignored = {0}; /* reported when the weights are read */
    if (demo_weights_open(&w, job->config.pretrain, &ignored)) return false;
    int names = demo_names_of(&w);
    demo_weights_close(&w);
    return names == DEMO_NAMES_FUSED;
}

/* Sets rank, scale and targets of the adapters, once the model is known. */
static int demo_settle_targets(demo_job *job, demo_error *error) {
    const demo_config *c = &job->config;
    seqpar_adapter_desc *a = &job->adapter;
    bool mlp = job->model.experts > 0;
    *a = (seqpar_adapter_desc){.rank = c->lora_rank, .dropout = c->lora_dropout};
    if (!a->rank) return 0;
    a->scale = (double)c->lora_alpha /
               (c->use_rslora ? sqrt((double)c->lora_rank) : (double)c->lora_rank);
    if (demo_lora_read(job, &a->targets, error)) return -1;
    if (mlp && a->targets == SEQPAR_ADAPT_ALL) a->targets = DEMO_LORA_ATTENTION;
    if (mlp && a->targets & ~DEMO_LORA_ATTENTION)
        return demo_fail(
            error,
            "the model has experts, whose MLPs cannot have adapters; name only q_proj, "
            "k_proj, v_proj and o_proj in --%s",
            demo_job_spelled(job, "target_modules"));
    if (mlp && c->load_in_4bit)
        return demo_fail(error, "the model has experts, which --load_in_4bit does not "
                                "support; leave it out");
    if (c->pretrain && a->targets & DEMO_LORA_SPLIT && demo_lora_fused(job))
        return demo_fail(error,
                         "--pretrain %.300s stores q_proj, k_proj and v_proj as one matrix, "
                         "and gate_proj and up_proj as another, so PEFT could not load "
                         "adapters of them; give --target_modules o_proj,down_proj",
                         c->pretrain);
    return 0;
}

/* Refuses a save_path that holds the other kind of model: a folder is read either as adapters
   or as a whole model. */
static int demo_lora_output(const demo_job *job, demo_error *error) {
    static const char *const kinds[][2] = {{"adapter_config.json", "adapters"},
                                           {"model.safetensors", "a whole model"},
                                           {"model.safetensors.index.json", "a whole model"}};
    const demo_config *c = &job->config;
    char path[DEMO_PATH_LIMIT + 64];
    int first = c->lora_rank > 0, end = c->lora_rank > 0 ? 3 : 1;
    for (int i = first; i < end && !job->rank && !job->objective->generates; i++) {
        snprintf(path, sizeof path, "%s/%s", c->save_path, kinds[i][0]);
        if (!access(path, F_OK))
            return demo_fail(
                error,
                "--%s %.300s holds %s (%s), and in that folder %s could not be loaded; give "
                "another",
                demo_job_spelled(job, "save_path"), c->save_path, kinds[i][1], kinds[i][0],
                first ? "adapters" : "a whole model");
    }
    return 0;
}
/* Without adapters their options have no effect: resets them, and prints a notice. */
static void demo_lora_none(demo_job *job) {
    const char *idle = demo_lora_idle(job);
    if (idle && !job->rank)
        fprintf(stderr, "notice: there are no adapters, so --%s is not used; add --lora_rank\n",
                idle);
    job->config.lora_alpha = 0;
    job->config.lora_dropout = 0;
    job->config.use_rslora = false;
}

static int demo_settle_lora(demo_job *job, demo_error *error) {
    if (demo_lora_contradicts(job, error)) return -1;
    if (!demo_lora_asked(&job->config))
        demo_lora_none(job);
    else if (demo_lora_possible(job, error) || demo_lora_defaults(job, error))
        return -1;
    return demo_lora_output(job, error);
}

/* ---- the model that is trained ---- */

static seqpar_llama *demo_learner(const demo_rank *r) {
    return (seqpar_llama *)(r->job->adapter.rank ? &r->adapters : &r->model);
}

/* The trained part of any open model: its adapters if it has any, else the model. */
static const seqpar_llama *demo_learner_of(const seqpar_llama *model) {
    return model && model->adapters ? model->adapters : model;
}

static int64_t demo_values_of(const seqpar_llama *model) {
    int64_t values = 0;
    for (int64_t i = 0; i < model->tensor_count; i++)
        values += model->tensors[i].rows * model->tensors[i].cols;
    return values;
}

static void demo_lora_say(const demo_rank *r) {
    const demo_job *job = r->job;
    char text[DEMO_LORA_TEXT];
    if (!job->adapter.rank || r->world->rank) return;
    demo_lora_text(text, job->adapter.targets);
    fprintf(stderr, "adapters: LoRA of rank %lld, alpha %lld, of %s%s; ",
            (long long)job->adapter.rank, (long long)job->config.lora_alpha, text,
            job->model.experts ? " (experts have none)" : "");
    fprintf(stderr,
            job->objective->generates ? "%lld parameters, added to %lld\n"
                                      : "%lld parameters are trained, %lld are frozen\n",
            (long long)demo_values_of(&r->adapters), (long long)demo_values_of(&r->model));
}

/* Copies the score head into the adapters, which train all of it, as PEFT does with
   modules_to_save. */
static seqpar_status demo_lora_score(demo_rank *r, const seqpar_llama *model,
                                     seqpar_llama *adapters) {
    int64_t hidden = model->config.hidden;
    double *score = (double *)demo_alloc(hidden, sizeof *score);
    seqpar_status status = seqpar_llama_read(&r->ctx, model, score, model->tensor_count - 1, 0,
                                             hidden);
    if (!status)
        status = seqpar_llama_write(&r->ctx, adapters, score, adapters->tensor_count - 1, 0,
                                    hidden);
    free(score);
    return status;
}

/* The frozen models that a checkpoint of adapters depends on. Their digests are added up, since
   each may come from another group of ranks; DEMO_SPARE_BITS keeps the sum from overflowing. */
enum { DEMO_OF_MODEL, DEMO_OF_CRITIC, DEMO_OF_REFERENCE, DEMO_SPARE_BITS };

static void demo_lora_hangs(demo_rank *r, int on, uint64_t digest) {
    uint64_t part = demo_digest_number(demo_digest_number(DEMO_DIGEST_EMPTY, on),
                                       (int64_t)digest);
    for (int i = 0; i < DEMO_REFERENCES; i++) r->reference[i] += part >> DEMO_SPARE_BITS;
}

/* Loads adapters from a folder in the format of PEFT. A tensor that these adapters do not have
   is refused. */
static seqpar_status demo_lora_load(demo_rank *r, seqpar_llama *adapters) {
    demo_transfer store = {.ctx = &r->ctx, .model = adapters};
    seqpar_safetensors_file *file = NULL;
    char path[DEMO_PATH_LIMIT + 64];
    snprintf(path, sizeof path, "%s/adapter_model.safetensors",
             r->job->config.adapter_name_or_path);
    seqpar_status status = seqpar_safetensors_open(&file, path, r->ctx.error);
    for (int64_t i = 0; !status && i < seqpar_safetensors_count(file); i++) {
        const char *name = seqpar_safetensors_at(file, i)->name;
        int64_t k = 0;
        while (k < adapters->tensor_count && strcmp(adapters->tensors[k].name, name)) k++;
        if (k == adapters->tensor_count)
            status = seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_FORMAT,
                                 "%.300s has %.200s, which no adapter of this model has; "
                                 "give adapters of --pretrain",
                                 path, name);
    }
    seqpar_safetensors_close(file);
    return status ? status : demo_load_file(&store, path, 1, demo_no_prefix, demo_weights_put);
}

/* Initializes the adapters of a loaded model. of: DEMO_OF_MODEL or DEMO_OF_CRITIC. */
static seqpar_status demo_lora_begin(demo_rank *r, seqpar_llama *model, seqpar_llama *adapters,
                                     int of) {
    uint64_t digest, old;
    model->adapters = adapters;
    if (demo_is_planned(r->device)) return SEQPAR_OK;
    seqpar_status status = seqpar_llama_init(&r->ctx, adapters,
                                             (uint64_t)(r->job->config.seed + of));
    if (!status && model->config.score) status = demo_lora_score(r, model, adapters);
    if (!status && of == DEMO_OF_MODEL && r->job->config.adapter_name_or_path)
        status = demo_lora_load(r, adapters);
    if (status || (r->ctx.world->rank && !model->shards)) return status;
    status = demo_digest_model(&r->ctx, model, &digest, &old);
    if (status) return status;
    if (of == DEMO_OF_MODEL) r->base = digest;
    demo_lora_hangs(r, of, digest);
    return SEQPAR_OK;
}

/* ---- the adapters' folder ---- */

/* adapter_config.json, from which PEFT makes its LoraConfig. source: the model's folder. */
static cJSON *demo_peft_config(const demo_rank *r, const seqpar_llama *adapters,
                               const char *source) {
    const demo_job *job = r->job;
    const char *score = adapters->config.score;
    cJSON *json = cJSON_CreateObject(), *targets;
    cJSON_AddStringToObject(json, "peft_type", "LORA");
    cJSON_AddStringToObject(json, "task_type", score ? "SEQ_CLS" : "CAUSAL_LM");
    cJSON_AddStringToObject(json, "base_model_name_or_path", source);
    cJSON_AddNumberToObject(json, "r", (double)job->adapter.rank);
    cJSON_AddNumberToObject(json, "lora_alpha", (double)job->config.lora_alpha);
    cJSON_AddNumberToObject(json, "lora_dropout", job->config.lora_dropout);
    cJSON_AddStringToObject(json, "bias", "none");
    targets = cJSON_AddArrayToObject(json, "target_modules");
    for (int i = 0; i < DEMO_LORA_NAMES; i++)
        if (adapters->adapter.targets >> i & 1)
            cJSON_AddItemToArray(targets, cJSON_CreateString(demo_lora_names[i]));
    cJSON_AddItemToObject(json, "modules_to_save",
                          score ? cJSON_CreateStringArray(&score, 1) : cJSON_CreateNull());
    cJSON_AddBoolToObject(json, "use_rslora", job->config.use_rslora);
    cJSON_AddBoolToObject(json, "use_dora", 0);
    cJSON_AddBoolToObject(json, "fan_in_fan_out", 0);
    cJSON_AddBoolToObject(json, "init_lora_weights", 1);
    cJSON_AddBoolToObject(json, "inference_mode", 1);
    return json;
}

/* Rank 0 writes the files beside the adapters: their config, and copies of the model's
   tokenizer files. */
static seqpar_status demo_peft_files(const demo_rank *r, const seqpar_llama *adapters,
                                     const char *source, const char *folder) {
    char path[1400];
    seqpar_status status;
    snprintf(path, sizeof path, "%s/adapter_config.json", folder);
    status = demo_source_write(demo_peft_config(r, adapters, source), path, r->ctx.error);
    for (size_t i = 0; !status && i < sizeof demo_source_files / sizeof *demo_source_files; i++)
        status = demo_source_copy(source, folder, demo_source_files[i], r->ctx.error);
    return status;
}

/* Rank 0 writes the adapters into an existing folder, while the other ranks call
   demo_hand_over. average: if not NULL, the moving average is written instead, and the call is
   collective. */
static seqpar_status demo_save_adapters(demo_rank *r, const seqpar_llama *adapters,
                                        const char *source, const char *folder,
                                        demo_average *average) {
    bool critic = r->critic && adapters == r->critic->adapters;
    demo_transfer store = {.ctx = &r->ctx,
                           .model = adapters,
                           .average = average,
                           .which = critic ? DEMO_SAVES_CRITIC : DEMO_SAVES_MODEL};
    seqpar_safetensors_dtype dtype = demo_dtype_named(r->job->config.save_dtype);
    char path[1400];
    if (!dtype) dtype = demo_dtype(r->device->storage);
    demo_entry *entries = demo_entries(&store, 1, demo_no_prefix, dtype);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
    seqpar_status status = demo_write_entries(&store, path, entries, adapters->tensor_count,
                                              average ? demo_average_get : demo_weights_get,
                                              demo_written, 2);
    free(entries);
    return status || r->ctx.world->rank ? status : demo_peft_files(r, adapters, source, folder);
}

/* Adds the adapters to the weights. If ranks share the weights, the first rank does it for all.
   Collective. */
static seqpar_status demo_lora_merge(demo_rank *r, seqpar_llama *model) {
    if (!demo_is_shared(model) || !r->ctx.world->rank) {
        seqpar_status status = seqpar_llama_merge(&r->ctx, model);
        if (status) return status;
    }
    model->adapters = NULL;
    return demo_model_written(&r->ctx, model);
}
#endif
