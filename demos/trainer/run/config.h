/* SPDX-License-Identifier: MIT OR Unlicense */
/* config.h - the options that all trainers share. */
#ifndef DEMO_CONFIG_H
#define DEMO_CONFIG_H

#include "options.h"

typedef struct {
    const char *dataset, *eval_dataset, *input_key, *output_key, *input_template, *truncation;
    const char *pretrain, *save_path, *ckpt_path, *metrics_path, *lr_scheduler, *optim, *device;
    const char *param_dtype, *save_dtype, *max_shard_size, *use_tensorboard, *wandb_offline;
    const char *layout, *schedule, *ring_attn_func, *sequence_parallel_mode, *offload_path;
    const char *from, *loss_definition, *bf16, *eval_strategy, *dataset_probs;
    const char *target_modules, *finetuning_type, *adapter, *adapter_name_or_path;
    const char *activation_offloading;
    bool activations_away; /* offload activations; set from activation_offloading */
    int long_documents;    /* DEMO_LONG_...; from truncation, or the default of the program */
    bool pretrain_mode, pretrain_eos, pretrain_blocks, train_on_inputs, packing_samples,
        load_checkpoint, gradient_checkpointing, tiled_mlp, relaxed_attention, cublas,
        tie_word_embeddings, plot_loss, json, overwrite, enable_ema, dry_run, print_prepare,
        sharded_checkpoint, async_save, adam_offload, param_offload, stochastic_rounding,
        lora_target_linear, use_rslora, save_merged, load_in_4bit;
    int64_t max_len, pack_len, cell, max_samples, train_batch_size, micro_train_batch_size;
    int64_t max_steps, warmup_steps;
    /* as typed: a number of steps or, below 1, a fraction of all steps; demo_job_steps computes
       save_steps and eval_steps from them */
    double save_asked, eval_asked;
    int64_t saves_per_epoch, evals_per_epoch;
    int64_t save_steps, eval_steps, logging_steps, max_ckpt_num, seed, zero_stage, omp_threads;
    int64_t ddp_timeout;
    int64_t ring_attn_size, ring_head_stride, ulysses_size, data_parallel_size, world_size;
    int64_t sequence_parallel_ring_degree;
    int64_t gradient_accumulation_steps;
    int64_t hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim;
    int64_t intermediate_size, lora_rank, lora_alpha;
    double max_epochs, max_norm, learning_rate, lr_warmup_ratio, min_lr_ratio, l2, adam_eps;
    double lora_dropout, label_smoothing, z_loss, rope_theta, ema_beta, aux_loss_coef, val_size;
    double adam_betas[2];
} demo_config;

/* The options of every trainer. The defaults train a small new model in minutes on two
   cores. */
#define DEMO_SHARED_BINDINGS(c) \
    {"from", \
     &(c).from, \
     DEMO_STRING, \
     NULL, \
     "program whose defaults and definitions are used; without it the program whose option " \
     "names are typed", \
     DEMO_ANY}, \
        {"loss_definition", \
         &(c).loss_definition, \
         DEMO_STRING, \
         NULL, \
         "program whose definition of the loss is used, where they differ " \
         "(verify/pages/DEFINITIONS.md); without it that of --from (for axolotl TRL's), or " \
         "seqpar's", \
         DEMO_ANY}, \
        {"dataset", \
         &(c).dataset, \
         DEMO_STRING, \
         NULL, \
         "training data: a comma list of .jsonl or .txt, folders, json@FOLDER; or a token file " \
         "(prepare.py)", \
         DEMO_ANY}, \
        {"dataset_probs", \
         &(c).dataset_probs, \
         DEMO_STRING, \
         NULL, \
         "sampling weights of these data sets, a comma list; sampling ends when one set is " \
         "used up; without it the sets follow one another", \
         DEMO_ANY}, \
        {"eval_dataset", &(c).eval_dataset, DEMO_STRING, NULL, "data to evaluate on", DEMO_ANY}, \
        {"val_size", \
         &(c).val_size, \
         DEMO_FLOAT, \
         "0", \
         "split off a part of the training data for evaluation: a fraction below 1, or a " \
         "number of documents or pairs (2 or more); the same that LLaMA-Factory, or " \
         "axolotl (val_set_size), splits off with this --seed", \
         DEMO_AT_LEAST(0)}, \
        {"max_len",    &(c).max_len, DEMO_INT, "1024", "longest document, in tokens", \
         DEMO_COUNT(2)}, \
        {"truncation", \
         &(c).truncation, \
         DEMO_STRING, \
         NULL, \
         "for documents longer than --max_len: drop, cut (the end) or cut_both (prompt and " \
         "response); without it, by the name of that option: max_len cut, cutoff_len " \
         "cut_both, sequence_len drop", \
         DEMO_ANY}, \
        {"max_samples", \
         &(c).max_samples, \
         DEMO_INT, \
         "100000000", \
         "use at most this many records, after mixing", \
         DEMO_COUNT(1)}, \
        {"packing_samples", \
         &(c).packing_samples, \
         DEMO_FLAG, \
         NULL, \
         "pack several documents into each row", \
         DEMO_ANY}, \
        {"pack_len", \
         &(c).pack_len, \
         DEMO_INT, \
         "0", \
         "tokens of a packed row; 0: max_len (for pairs twice that), and at least 2048 " \
         "with the defaults of seqpar and OpenRLHF", \
         DEMO_COUNT(0)}, \
        {"cell", \
         &(c).cell, \
         DEMO_INT, \
         "0", \
         "tokens of a cell: gradients are first summed in blocks of so many tokens of a " \
         "document; 0: 128, from token 16,384 on 256, from 131,072 on 512", \
         DEMO_BETWEEN(0, SEQPAR_MAX_TOKENS)}, \
        {"pretrain", \
         &(c).pretrain, \
         DEMO_STRING, \
         NULL, \
         "folder with config.json and model.safetensors to start from", \
         DEMO_ANY}, \
        {"lora_rank", \
         &(c).lora_rank, \
         DEMO_INT, \
         "0", \
         "train adapters (LoRA) of this rank and freeze the weights of --pretrain; 0: " \
         "train the weights", \
         DEMO_BETWEEN(0, SEQPAR_MAX_WIDTH)}, \
        {"lora_alpha", \
         &(c).lora_alpha, \
         DEMO_INT, \
         "16", \
         "adapters are scaled by this / lora_rank; LLaMA-Factory: 2 x lora_rank", \
         DEMO_COUNT(1)}, \
        {"lora_dropout", \
         &(c).lora_dropout, \
         DEMO_FLOAT, \
         "0", \
         "dropout probability of the adapters' input in training", \
         DEMO_BETWEEN(0, 0.99)}, \
        {"use_rslora", \
         &(c).use_rslora, \
         DEMO_FLAG, \
         NULL, \
         "adapters are scaled by lora_alpha / sqrt(lora_rank)", \
         DEMO_ANY}, \
        {"target_modules", \
         &(c).target_modules, \
         DEMO_STRING, \
         NULL, \
         "modules with adapters: names from q_proj, k_proj, v_proj, o_proj, gate_proj, " \
         "up_proj and down_proj, or all-linear, the default (of a model with experts: " \
         "those of attention)", \
         DEMO_ANY}, \
        {"load_in_4bit", \
         &(c).load_in_4bit, \
         DEMO_FLAG, \
         NULL, \
         "with --lora_rank: keep the layers' matrices in four bits (NF4), as QLoRA does", \
         DEMO_ANY}, \
        {"lora_target_linear", \
         &(c).lora_target_linear, \
         DEMO_FLAG, \
         NULL, \
         "the same as --target_modules all-linear", \
         DEMO_ANY}, \
        {"finetuning_type", \
         &(c).finetuning_type, \
         DEMO_STRING, \
         NULL, \
         "lora: adapters, of rank 8 unless --lora_rank says otherwise", \
         DEMO_ANY}, \
        {"adapter", &(c).adapter, DEMO_STRING, NULL, "lora: adapters, of rank --lora_r", \
         DEMO_ANY}, \
        {"adapter_name_or_path", \
         &(c).adapter_name_or_path, \
         DEMO_STRING, \
         NULL, \
         "folder with adapter_config.json: start from its adapters, with their rank, alpha " \
         "and target modules", \
         DEMO_ANY}, \
        {"save_merged", \
         &(c).save_merged, \
         DEMO_FLAG, \
         NULL, \
         "with adapters: also save the whole model with the adapters merged, in " \
         "save_path/merged", \
         DEMO_ANY}, \
        {"save_path", &(c).save_path, DEMO_STRING, "./ckpt", "folder for the final model", \
         DEMO_ANY}, \
        {"save_dtype", \
         &(c).save_dtype, \
         DEMO_STRING, \
         "auto", \
         "data type of the final model; auto: that of --pretrain, without it the type " \
         "computed in", \
         DEMO_ANY}, \
        {"max_shard_size", \
         &(c).max_shard_size, \
         DEMO_STRING, \
         "5GB", \
         "largest size of a file of the final model, such as 700MB or 5GB", \
         DEMO_ANY}, \
        {"overwrite", \
         &(c).overwrite, \
         DEMO_FLAG, \
         NULL, \
         "replace a model in save_path that seqpar did not write", \
         DEMO_ANY}, \
        {"ckpt_path", \
         &(c).ckpt_path, \
         DEMO_STRING, \
         NULL, \
         "folder for checkpoints; without it save_path/checkpoints_ and the trainer's name", \
         DEMO_ANY}, \
        {"save_steps", \
         &(c).save_asked, \
         DEMO_FLOAT, \
         "-1", \
         "steps from checkpoint to checkpoint; below 1: this fraction of all steps, " \
         "rounded up; -1: only when interrupted", \
         DEMO_COUNT(-1)}, \
        {"saves_per_epoch", \
         &(c).saves_per_epoch, \
         DEMO_INT, \
         "0", \
         "the same as --save_steps 1 / (this x --max_epochs), if that is below 1", \
         DEMO_COUNT(0)}, \
        {"max_ckpt_num", &(c).max_ckpt_num, DEMO_INT, "3", "number of checkpoints to keep", \
         DEMO_COUNT(1)}, \
        {"load_checkpoint", \
         &(c).load_checkpoint, \
         DEMO_FLAG, \
         NULL, \
         "go on from the newest checkpoint in ckpt_path, if there is one", \
         DEMO_ANY}, \
        {"eval_steps", \
         &(c).eval_asked, \
         DEMO_FLOAT, \
         "-1", \
         "steps from evaluation to evaluation; below 1: this fraction of all steps, " \
         "rounded up; -1: once an epoch; 0: only at the end", \
         DEMO_COUNT(-1)}, \
        {"evals_per_epoch", \
         &(c).evals_per_epoch, \
         DEMO_INT, \
         "0", \
         "the same as --eval_steps 1 / (this x --max_epochs), if that is below 1", \
         DEMO_COUNT(0)}, \
        {"eval_strategy", \
         &(c).eval_strategy, \
         DEMO_STRING, \
         NULL, \
         "when to evaluate: never, every eval_steps, or once an epoch", \
         DEMO_ANY}, \
        {"logging_steps", &(c).logging_steps, DEMO_INT, "10", "steps from log line to log line", \
         DEMO_COUNT(1)}, \
        {"metrics_path", \
         &(c).metrics_path, \
         DEMO_STRING, \
         NULL, \
         "file for a JSON line per step and evaluation", \
         DEMO_ANY}, \
        {"use_tensorboard", \
         &(c).use_tensorboard, \
         DEMO_STRING, \
         NULL, \
         "folder for TensorBoard's event files; each run has a folder in it", \
         DEMO_ANY}, \
        {"wandb_offline", \
         &(c).wandb_offline, \
         DEMO_STRING, \
         NULL, \
         "folder for the files of Weights & Biases, offline; each run has a folder in it", \
         DEMO_ANY}, \
        {"plot_loss", \
         &(c).plot_loss, \
         DEMO_FLAG, \
         NULL, \
         "draw the loss into save_path/training_loss.svg", \
         DEMO_ANY}, \
        {"dry_run", \
         &(c).dry_run, \
         DEMO_FLAG, \
         NULL, \
         "read options, model and data, print the plan and the memory that it needs, and stop", \
         DEMO_ANY}, \
        {"print_prepare", \
         &(c).print_prepare, \
         DEMO_FLAG, \
         NULL, \
         "print which data must become a token file first, and stop: a line of JSON for " \
         "each, with the arguments of demos/prepare.py (for the program seqpar)", \
         DEMO_ANY}, \
        {"json", \
         &(c).json, \
         DEMO_FLAG, \
         NULL, \
         "print the final summary as one JSON object; with --dry_run, the plan", \
         DEMO_ANY}, \
        {"train_batch_size", \
         &(c).train_batch_size, \
         DEMO_INT, \
         "32", \
         "documents of an optimizer step, over all ranks; if micro_train_batch_size and " \
         "gradient_accumulation_steps are set, their product x data_parallel_size", \
         DEMO_COUNT(1)}, \
        {"micro_train_batch_size", \
         &(c).micro_train_batch_size, \
         DEMO_INT, \
         "4", \
         "about how many rows a micro-batch has on a data-parallel rank; documents are " \
         "distributed by their tokens", \
         DEMO_COUNT(1)}, \
        {"gradient_accumulation_steps", \
         &(c).gradient_accumulation_steps, \
         DEMO_INT, \
         "0", \
         "micro-batches of a step; 0: from micro_train_batch_size", \
         DEMO_COUNT(0)}, \
        {"max_epochs", &(c).max_epochs,        DEMO_FLOAT, \
         "1",          "passes over the data", {0, DEMO_MOST, true}}, \
        {"max_steps", \
         &(c).max_steps, \
         DEMO_INT, \
         "-1", \
         "optimizer steps; 0: evaluate and save only; -1: from max_epochs", \
         DEMO_COUNT(-1)}, \
        {"learning_rate", \
         &(c).learning_rate, \
         DEMO_FLOAT, \
         "2e-3", \
         "peak learning rate; with --pretrain 5e-6 (sft), 1e-5 (dpo, kto) or 9e-6 (rm)", \
         DEMO_ABOVE(0)}, \
        {"lr_scheduler", \
         &(c).lr_scheduler, \
         DEMO_STRING, \
         "cosine_with_min_lr", \
         "constant, constant_with_warmup, linear, cosine, cosine_with_min_lr", \
         DEMO_ANY}, \
        {"lr_warmup_ratio", \
         &(c).lr_warmup_ratio, \
         DEMO_FLOAT, \
         "0.03", \
         "fraction of the steps that warm up", \
         DEMO_BETWEEN(0, 1)}, \
        {"warmup_steps", \
         &(c).warmup_steps, \
         DEMO_INT, \
         "-1", \
         "number of warm-up steps; -1: from lr_warmup_ratio", \
         DEMO_COUNT(-1)}, \
        {"min_lr_ratio", \
         &(c).min_lr_ratio, \
         DEMO_FLOAT, \
         "0.1", \
         "cosine_with_min_lr ends at this fraction of the peak", \
         DEMO_BETWEEN(0, 1)}, \
        {"optim", \
         &(c).optim, \
         DEMO_STRING, \
         "adamw", \
         "adamw, adamw_8bit (its moments take a quarter of the memory) or sgd", \
         DEMO_ANY}, \
        {"stochastic_rounding", \
         &(c).stochastic_rounding, \
         DEMO_FLAG, \
         NULL, \
         "keep no fp32 master weights of bf16 weights; updates are rounded stochastically", \
         DEMO_ANY}, \
        {"adam_betas", &(c).adam_betas,        DEMO_FLOATS2, \
         "0.9,0.95",   "decay of the moments", DEMO_BETWEEN(0, 1)}, \
        {"adam_eps", \
         &(c).adam_eps, \
         DEMO_FLOAT, \
         "1e-8", \
         "added to the root of the second moment; with 0 the update of a weight without " \
         "gradient would be 0/0", \
         DEMO_BETWEEN(1e-30, 1e30)}, \
        {"l2", \
         &(c).l2, \
         DEMO_FLOAT, \
         "0", \
         "weight decay, not applied to the gains of norms", \
         DEMO_AT_LEAST(0)}, \
        {"max_norm", \
         &(c).max_norm, \
         DEMO_FLOAT, \
         "1.0", \
         "largest gradient norm, beyond which gradients are clipped; 0: none", \
         DEMO_AT_LEAST(0)}, \
        {"enable_ema", \
         &(c).enable_ema, \
         DEMO_FLAG, \
         NULL, \
         "keep a moving average of the weights, saved in save_path/ema", \
         DEMO_ANY}, \
        {"ema_beta", \
         &(c).ema_beta, \
         DEMO_FLOAT, \
         "0.992", \
         "decay of the moving average in each step", \
         DEMO_BETWEEN(0, 1)}, \
        {"aux_loss_coef", \
         &(c).aux_loss_coef, \
         DEMO_FLOAT, \
         "0", \
         "coefficient of the load-balancing loss of a model with experts; with PPO also of the " \
         "critic, if it has experts", \
         DEMO_AT_LEAST(0)}, \
        {"sharded_checkpoint", \
         &(c).sharded_checkpoint, \
         DEMO_FLAG, \
         NULL, \
         "sharded checkpoints: each rank writes a file of its own, all at the same time", \
         DEMO_ANY}, \
        {"async_save", \
         &(c).async_save, \
         DEMO_FLAG, \
         NULL, \
         "write checkpoints (sharded) from a copy in memory while training goes on", \
         DEMO_ANY}, \
        {"zero_stage", \
         &(c).zero_stage, \
         DEMO_INT, \
         "2", \
         "0: optimizer state whole on every rank, 1 and 2: sharded, 3: weights sharded, " \
         "too; gradients are always sharded", \
         DEMO_BETWEEN(0, 3)}, \
        {"adam_offload", \
         &(c).adam_offload, \
         DEMO_FLAG, \
         NULL, \
         "offload the optimizer's state to the host's memory", \
         DEMO_ANY}, \
        {"param_offload", \
         &(c).param_offload, \
         DEMO_FLAG, \
         NULL, \
         "with --zero_stage 3: offload the weights, too; at most two layers are in the " \
         "device's memory", \
         DEMO_ANY}, \
        {"offload_path", \
         &(c).offload_path, \
         DEMO_STRING, \
         NULL, \
         "offload to files in this folder, mapped into memory and deleted at the end, " \
         "instead of to memory (not on a GPU)", \
         DEMO_ANY}, \
        {"gradient_checkpointing", \
         &(c).gradient_checkpointing, \
         DEMO_FLAG, \
         NULL, \
         "keep three activation tensors per layer, recompute the others", \
         DEMO_ANY}, \
        {"activation_offloading", \
         &(c).activation_offloading, \
         DEMO_STRING, \
         NULL, \
         "turn on --gradient_checkpointing and offload the tensors that it keeps to the " \
         "host's memory, except those of two layers; disk: to --offload_path", \
         DEMO_ANY}, \
        {"tiled_mlp", \
         &(c).tiled_mlp, \
         DEMO_FLAG, \
         NULL, \
         "compute the MLP in tiles of hidden_size tokens, and recompute it in backward", \
         DEMO_ANY}, \
        {"ring_attn_size",          &(c).ring_attn_size, DEMO_INT, "1", \
         "sequence-parallel ranks", DEMO_COUNT(1)}, \
        {"ring_head_stride", \
         &(c).ring_head_stride, \
         DEMO_INT, \
         "1", \
         "kv heads gathered at a time; sets --schedule llama3, unless another is given", \
         DEMO_COUNT(1)}, \
        {"data_parallel_size", \
         &(c).data_parallel_size, \
         DEMO_INT, \
         "0", \
         "data-parallel ranks; 0: from world_size, else 1", \
         DEMO_COUNT(0)}, \
        {"world_size", \
         &(c).world_size, \
         DEMO_INT, \
         "0", \
         "ranks in all; 0: data_parallel_size x ring_attn_size", \
         DEMO_COUNT(0)}, \
        {"layout", \
         &(c).layout, \
         DEMO_STRING, \
         NULL, \
         "which rank holds which tokens; default zigzag", \
         DEMO_ANY}, \
        {"schedule", \
         &(c).schedule, \
         DEMO_STRING, \
         NULL, \
         "how keys and values reach the queries of other ranks; default ring", \
         DEMO_ANY}, \
        {"ulysses_size", \
         &(c).ulysses_size, \
         DEMO_INT, \
         "0", \
         "of the sequence-parallel ranks, so many form a Ulysses group (all-to-all between " \
         "tokens and heads), and a ring connects the groups; 0: 1, with ulysses all", \
         DEMO_COUNT(0)}, \
        {"ring_attn_func", \
         &(c).ring_attn_func, \
         DEMO_STRING, \
         NULL, \
         "layout and schedule by axolotl's name", \
         DEMO_ANY}, \
        {"sequence_parallel_ring_degree", \
         &(c).sequence_parallel_ring_degree, \
         DEMO_INT, \
         "0", \
         "ranks of the ring: ring_attn_size / ulysses_size; 0: computed", \
         DEMO_COUNT(0)}, \
        {"sequence_parallel_mode", \
         &(c).sequence_parallel_mode, \
         DEMO_STRING, \
         NULL, \
         "layout and schedule by 360-LLaMA-Factory's name", \
         DEMO_ANY}, \
        {"relaxed_attention", \
         &(c).relaxed_attention, \
         DEMO_FLAG, \
         NULL, \
         "add up attention in order of arrival: a little faster, not reproducible bit for bit", \
         DEMO_ANY}, /* long: ranks wait while rank 0 writes a checkpoint or asks a server */ \
        {"ddp_timeout", \
         &(c).ddp_timeout, \
         DEMO_INT, \
         "3600", \
         "seconds that a process waits for others before it stops the run", \
         DEMO_AT_LEAST(1)}, \
        {"omp_threads", &(c).omp_threads, DEMO_INT, "0", "threads per rank; 0: cores / ranks", \
         DEMO_COUNT(0)}, \
        {"device", \
         &(c).device, \
         DEMO_STRING, \
         "cpu", \
         "cpu (fp32, fast), reference (fp64, naive) or cuda (make cuda)", \
         DEMO_ANY}, \
        {"param_dtype", \
         &(c).param_dtype, \
         DEMO_STRING, \
         "auto", \
         "auto: the type that the device computes in; bf16: weights and activations in " \
         "bf16, sums and optimizer in fp32", \
         DEMO_ANY}, \
        {"bf16", &(c).bf16, DEMO_STRING, NULL, "the same as --param_dtype bf16", DEMO_ANY}, \
        {"cublas", \
         &(c).cublas, \
         DEMO_FLAG, \
         NULL, \
         "with --device cuda: matrix products by cuBLAS, with a fixed number of rows", \
         DEMO_ANY}, \
        {"seed", \
         &(c).seed, \
         DEMO_INT, \
         "42", \
         "seed of new weights and of the order of documents", \
         DEMO_AT_LEAST(0)}, \
        {"hidden_size", \
         &(c).hidden_size, \
         DEMO_INT, \
         "128", \
         "width of a new model (without --pretrain), as are all options below", \
         DEMO_BETWEEN(1, SEQPAR_MAX_WIDTH)}, \
        {"num_hidden_layers", \
         &(c).num_hidden_layers, \
         DEMO_INT, \
         "4", \
         "layers", \
         DEMO_BETWEEN(1, SEQPAR_MAX_LAYERS)}, \
        {"num_attention_heads", &(c).num_attention_heads,         DEMO_INT, "4", \
         "query heads",         DEMO_BETWEEN(1, SEQPAR_MAX_WIDTH)}, \
        {"num_key_value_heads", &(c).num_key_value_heads,         DEMO_INT, "2", \
         "key and value heads", DEMO_BETWEEN(1, SEQPAR_MAX_WIDTH)}, \
        {"head_dim", \
         &(c).head_dim, \
         DEMO_INT, \
         "0", \
         "0: hidden_size / heads", \
         DEMO_BETWEEN(0, SEQPAR_MAX_WIDTH)}, \
        {"intermediate_size",  &(c).intermediate_size,           DEMO_INT, "0", \
         "0: 3 x hidden_size", DEMO_BETWEEN(0, SEQPAR_MAX_WIDTH)}, \
        {"tie_word_embeddings", \
         &(c).tie_word_embeddings, \
         DEMO_FLAG, \
         NULL, \
         "the output head and the embedding share their weights", \
         DEMO_ANY}, \
    { \
        "rope_theta", &(c).rope_theta, DEMO_FLOAT, "10000", "base of the rotary embedding", \
            DEMO_ABOVE(0) \
    }

/* The options of trainers whose texts have a prompt. */
#define DEMO_TRAINER_BINDINGS(c) \
    DEMO_SHARED_BINDINGS(c), { \
        "input_template", &(c).input_template, DEMO_STRING, \
            "User: {}\nAssistant: ", "template of the prompt, which replaces {}", DEMO_ANY \
    }
#endif
