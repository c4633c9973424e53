/* SPDX-License-Identifier: MIT OR Unlicense */
/* deepspeed.h - reads DeepSpeed's configuration file, which commands of LLaMA-Factory and
 * axolotl name. ZeRO stage and offloading become options of the trainer. Batch sizes, gradient
 * clipping and types must be "auto" or agree with the command, as in transformers. Keys that
 * only change speed are ignored. All other keys are refused, with their name. */
#ifndef PROGRAM_DEEPSPEED_H
#define PROGRAM_DEEPSPEED_H

#include "sets.h"

typedef struct {
    program *p;
    const char *path;
} program_deepspeed;

static int program_deepspeed_wrong(const program_deepspeed *d, const program_node *value,
                                   const char *key, const char *fix) {
    const char *text = value->shape == PROGRAM_VALUE ? value->text : "{...}";
    return program_at(d->p, d->path, value->line,
                      "%.100s is %.100s, which is not supported: %s", key, text, fix);
}

/* ---- keys that are accepted with a single value ---- */

/* A key, and its only accepted value, which has no effect here; "*": any value is accepted.
   fix: what to do about other values. */
typedef struct {
    const char *key, *harmless, *fix;
} program_deepspeed_key;

#define PROGRAM_SUMS "gradients are always summed in fp32, over all ranks; leave it out"
static const program_deepspeed_key program_deepspeed_top[] = {
    {"zero_allow_untested_optimizer", "*", ""},
    {"zero_force_ds_cpu_optimizer", "*", ""},
    {"steps_per_print", "*", ""},
    {"wall_clock_breakdown", "*", ""},
    {"dump_state", "*", ""},
    {"memory_breakdown", "*", ""},
    {"disable_allgather", "*", ""},
    {"prescale_gradients", "false", PROGRAM_SUMS},
    {"gradient_predivide_factor", "1", PROGRAM_SUMS},
    {"sparse_gradients", "false", PROGRAM_SUMS},
    {"communication_data_type", "fp32", PROGRAM_SUMS},
    {"seq_parallel_communication_data_type", "fp32", PROGRAM_SUMS},
    {"sequence_parallel_size", "1", "give the trainer sequence_parallel_size"},
    {NULL, NULL, NULL}};
#define PROGRAM_QUANTIZED "weights and gradients are never quantised; leave it out"
static const program_deepspeed_key program_deepspeed_zero[] = {
    {"allgather_partitions", "*", ""},
    {"allgather_bucket_size", "*", ""},
    {"overlap_comm", "*", ""},
    {"reduce_scatter", "*", ""},
    {"reduce_bucket_size", "*", ""},
    {"contiguous_gradients", "*", ""},
    {"round_robin_gradients", "*", ""},
    {"sub_group_size", "*", ""},
    {"stage3_prefetch_bucket_size", "*", ""},
    {"stage3_param_persistence_threshold", "*", ""},
    {"stage3_model_persistence_threshold", "*", ""},
    {"stage3_max_live_parameters", "*", ""},
    {"stage3_max_reuse_distance", "*", ""},
    {"stage3_gather_16bit_weights_on_model_save", "*", ""},
    {"stage3_use_all_reduce_for_fetch_params", "*", ""},
    {"gather_16bit_weights_on_model_save", "*", ""},
    {"ignore_unused_parameters", "*", ""},
    {"memory_efficient_linear", "*", ""},
    {"zero_hpz_partition_size", "*", ""},
    {"load_from_fp32_weights", "true",
     "fp32 master weights are always loaded from the "
     "checkpoint; leave it out"},
    {"elastic_checkpoint", "*", ""},
    {"zero_quantized_weights", "false", PROGRAM_QUANTIZED},
    {"zero_quantized_gradients", "false", PROGRAM_QUANTIZED},
    {"zero_quantized_nontrainable_weights", "false", PROGRAM_QUANTIZED},
    {"mics_shard_size", "-1",
     "state is always sharded over all data-parallel ranks; leave it out"},
    {NULL, NULL, NULL}};

static const program_deepspeed_key *program_deepspeed_find(const program_deepspeed_key *table,
                                                           const char *key) {
    for (; table->key; table++)
        if (!strcmp(table->key, key)) return table;
    return NULL;
}

static bool program_is_auto(const program_node *value) {
    return value->shape == PROGRAM_VALUE && !strcmp(value->text, "auto");
}

/* Looks a key up in a table. Returns 1 if the key is there with an accepted value, 0 if it is
   not there, -1 with a message if its value is refused. */
static int program_deepspeed_plain(const program_deepspeed *d,
                                   const program_deepspeed_key *table, const char *key,
                                   const program_node *value) {
    const program_deepspeed_key *known = program_deepspeed_find(table, key);
    if (!known) return 0;
    if (!strcmp(known->harmless, "*") || program_is_null(value) || program_is_auto(value))
        return 1;
    bool same = value->shape == PROGRAM_VALUE && demo_same_value(value->text, known->harmless);
    return same ? 1 : program_deepspeed_wrong(d, value, key, known->fix);
}

static int program_deepspeed_unknown(const program_deepspeed *d, const program_node *key) {
    return program_at(d->p, d->path, key->line,
                      "%.100s is an unknown key, which may change the results; leave it out",
                      key->text);
}

/* ---- values that must agree with the command, as transformers requires ---- */

/* Refuses a value that differs from the option of the command. otherwise: the default of the
   option. */
static int program_deepspeed_agrees(const program_deepspeed *d, const program_node *value,
                                    const char *key, const char *option,
                                    const char *otherwise) {
    const char *given = program_given(d->p, option);
    if (program_is_auto(value)) return 0;
    if (value->shape == PROGRAM_VALUE &&
        demo_same_value(value->text, given ? given : otherwise))
        return 0;
    return program_at(
        d->p, d->path, value->line,
        "%.100s is %.60s, but the command's %.60s is %.60s; write \"auto\", or the same value",
        key, value->shape == PROGRAM_VALUE ? value->text : "{...}", option,
        given ? given : otherwise);
}

/* Refuses a number if the command gives only its factors (micro-batch, accumulation steps,
   ranks), since the product is not known yet. */
static int program_deepspeed_batch(const program_deepspeed *d, const program_node *value) {
    if (program_is_auto(value) || program_given(d->p, "train_batch_size"))
        return program_deepspeed_agrees(d, value, "train_batch_size", "train_batch_size",
                                        "auto");
    return program_deepspeed_wrong(d, value, "train_batch_size",
                                   "it is micro-batch x accumulation steps x data-parallel "
                                   "ranks; write \"auto\"");
}

/* Reads the block {"enabled": ...} of a type. Its other keys are ignored: they are about loss
   scaling in fp16. */
static int program_deepspeed_type(const program_deepspeed *d, const char *key,
                                  const program_node *type) {
    const program_node *enabled = program_entry(type, "enabled");
    if (program_map_wanted(d->p, d->path, type, key)) return -1;
    if (!enabled || program_is_auto(enabled)) return 0;
    if (!strcmp(key, "bf16"))
        return program_deepspeed_agrees(d, enabled, "enabled of bf16", "bf16", "false");
    return demo_truth(enabled->text ? enabled->text : "") == 0
               ? 0
               : program_deepspeed_wrong(
                     d, enabled, "enabled of fp16",
                     "weights and activations are fp32 or bf16; write false");
}

/* Accepts only AdamW, with the same parameters as the command. */
static int program_deepspeed_optimizer(const program_deepspeed *d, const program_node *block) {
    const char *type = program_entry_text(block, "type");
    const program_node *params = program_entry(block, "params");
    if (!type || (strcmp(type, "AdamW") && strcmp(type, "Adam")))
        return program_at(
            d->p, d->path, block->line,
            "the type of optimizer is %.60s, but only AdamW is supported; leave the block "
            "out, and give optim",
            type ? type : "none");
    for (int64_t i = 0; params && i < arrlen(params->items); i += 2)
        if (!program_is_auto(&params->items[i + 1]) &&
            strcmp(params->items[i].text, "torch_adam"))
            return program_deepspeed_wrong(d, &params->items[i + 1], params->items[i].text,
                                           "options of the command set up the optimizer; "
                                           "write \"auto\"");
    return 0;
}

/* ---- ZeRO ---- */

/* Reads a block such as {"device": "cpu"}; for "nvme" also the folder. */
static int program_deepspeed_offload(const program_deepspeed *d, const char *key,
                                     const program_node *block) {
    const char *device = program_entry_text(block, "device"),
               *path = program_entry_text(block, "nvme_path");
    const char *option = !strcmp(key, "offload_param") ? "param_offload" : "adam_offload";
    const program_origin origin = {option, d->path, block->line};
    if (program_map_wanted(d->p, d->path, block, key)) return -1;
    if (!device || !strcmp(device, "none")) return 0;
    if (strcmp(device, "cpu") && strcmp(device, "nvme"))
        return program_deepspeed_wrong(d, program_entry(block, "device"), "device",
                                       "give cpu, nvme or none");
    program_said(d->p, option, "true", &origin);
    if (!strcmp(device, "nvme") && path) program_said(d->p, "offload_path", path, &origin);
    return 0;
}

static int program_deepspeed_stage(const program_deepspeed *d, const program_node *stage) {
    const program_origin origin = {"zero_stage", d->path, stage->line};
    const char *given = program_given(d->p, "zero_stage");
    if (stage->shape != PROGRAM_VALUE || strlen(stage->text) != 1 ||
        !strchr("0123", stage->text[0]))
        return program_deepspeed_wrong(d, stage, "stage", "give 0 to 3");
    if (given) return program_deepspeed_agrees(d, stage, "stage", "zero_stage", "");
    program_said(d->p, "zero_stage", stage->text, &origin);
    return 0;
}

/* Reads the block zero_optimization. */
static int program_deepspeed_zero_read(const program_deepspeed *d, const program_node *zero) {
    if (program_map_wanted(d->p, d->path, zero, "zero_optimization")) return -1;
    for (int64_t i = 0; i < arrlen(zero->items); i += 2) {
        const program_node *key = &zero->items[i], *value = key + 1;
        int plain = program_deepspeed_plain(d, program_deepspeed_zero, key->text, value);
        bool offload = !strncmp(key->text, "offload_", 8);
        if (plain < 0) return -1;
        if (plain) continue;
        if (!strcmp(key->text, "stage") ? program_deepspeed_stage(d, value)
            : offload                   ? program_deepspeed_offload(d, key->text, value)
                                        : program_deepspeed_unknown(d, key))
            return -1;
    }
    return 0;
}

/* ---- the file ---- */

/* Reads one top-level key. `shown` lists blocks about logging, profiling and I/O, which are
   ignored. */
static int program_deepspeed_key_read(const program_deepspeed *d, const program_node *key,
                                      const program_node *value) {
    static const char *const shown[] = {"activation_checkpointing",
                                        "comms_logger",
                                        "flops_profiler",
                                        "tensorboard",
                                        "wandb",
                                        "csv_monitor",
                                        "aio",
                                        "checkpoint",
                                        NULL};
    const char *name = key->text;
    int plain = program_deepspeed_plain(d, program_deepspeed_top, name, value);
    if (plain || program_is_listed(shown, name)) return plain < 0 ? -1 : 0;
    if (!strcmp(name, "train_batch_size")) return program_deepspeed_batch(d, value);
    if (!strcmp(name, "train_micro_batch_size_per_gpu"))
        return program_deepspeed_agrees(d, value, name, "micro_train_batch_size",
                                        d->p->from == DEMO_FROM_AXOLOTL ? "1" : "8");
    if (!strcmp(name, "gradient_accumulation_steps"))
        return program_deepspeed_agrees(d, value, name, name, "1");
    if (!strcmp(name, "gradient_clipping"))
        return program_deepspeed_agrees(d, value, name, "max_norm", "1");
    if (!strcmp(name, "bf16") || !strcmp(name, "fp16") || !strcmp(name, "amp"))
        return program_deepspeed_type(d, name, value);
    if (!strcmp(name, "optimizer")) return program_deepspeed_optimizer(d, value);
    if (!strcmp(name, "zero_optimization")) return program_deepspeed_zero_read(d, value);
    if (!strcmp(name, "scheduler"))
        return program_deepspeed_wrong(d, value, name,
                                       "options of the command set the schedule; leave the "
                                       "block out, and give lr_scheduler");
    return program_deepspeed_unknown(d, key);
}

/* Replaces --deepspeed FILE by the options that express the content of the file. */
static int program_deepspeed_options(program *p) {
    int i = program_find(p, "deepspeed");
    program_deepspeed d = {p, program_given(p, "deepspeed")};
    program_node root;
    if (i < 0 || !d.path) return 0;
    d.path = program_text("%s", d.path);
    program_drop(p, i);
    if (access(d.path, F_OK)) {
        demo_fail(p->error, "--deepspeed is %.300s: %s; give the path of the file", d.path,
                  strerror(errno));
        return program_error_placed(p);
    }
    if (program_yaml_read(p, d.path, &root)) return -1;
    for (int64_t k = 0; k < arrlen(root.items); k += 2)
        if (program_deepspeed_key_read(&d, &root.items[k], &root.items[k + 1])) return -1;
    return 0;
}

#endif
