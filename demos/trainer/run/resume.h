/* SPDX-License-Identifier: MIT OR Unlicense */
/* resume.h - starts a run, or resumes it from one of its checkpoints. */
#ifndef DEMO_RESUME_H
#define DEMO_RESUME_H

#include "checkpoint.h"
#include "job_open.h"

static void demo_job_note(demo_job *job, const char *key, const char *value) {
    demo_note note;
    snprintf(note.key, sizeof note.key, "%s", key);
    snprintf(note.value, sizeof note.value, "%s", value);
    arrput(job->notes, note);
}

/* Padding tokens, whose embeddings get no gradient from inputs: that of the trained model, and
   that of a second trained model (PPO's critic). */
enum { DEMO_PADS = 2 };
static const char *const demo_pad_keys[DEMO_PADS] = {"pad_token_id", "critic_pad_token_id"};

static void demo_pads_of(const demo_job *job, char text[DEMO_PADS][32]) {
    char folder[DEMO_PATH_LIMIT + 1];
    seqpar_llama_config beside;
    int64_t untaught[DEMO_PADS] = {job->untaught};
    if (demo_definition_of(job)->padding && demo_beside(job, folder, &beside))
        untaught[1] = demo_untaught(folder, beside.vocab);
    for (int i = 0; i < DEMO_PADS; i++)
        snprintf(text[i], sizeof text[i], untaught[i] ? "%lld" : "none",
                 (long long)untaught[i] - 1);
}

static const char demo_targets_key[] = "target_modules"; /* of the adapters; "": no adapters */

/* Records the metadata of all checkpoints of this job, with which a resumed run is compared. */
static void demo_job_notes(demo_job *job, const demo_binding *bindings, int count,
                           const char *tool) {
    char text[32], pads[DEMO_PADS][32], targets[DEMO_LORA_TEXT];
    job->notes = demo_option_notes(bindings, count);
    demo_pads_of(job, pads);
    for (int i = 0; i < DEMO_PADS; i++) demo_job_note(job, demo_pad_keys[i], pads[i]);
    demo_lora_text(targets, job->adapter.targets);
    demo_job_note(job, demo_targets_key, targets);
    demo_job_note(job, "trainer", tool);
    snprintf(text, sizeof text, "%016llx", (unsigned long long)job->data);
    demo_job_note(job, "training_data", text);
    snprintf(text, sizeof text, "%lld", (long long)job->config.cell);
    demo_job_note(job, "cell", text);
}

/* A resumed run uses the cell size of its checkpoint, since cells determine the order of all
   sums. A checkpoint of version 0.2.0 has chunks of rows instead, so its sums cannot be
   continued bit for bit. */
static int demo_resume_cell(demo_job *job, const seqpar_safetensors_file *file,
                            const char *path, demo_error *error) {
    demo_config *c = &job->config;
    seqpar_error why = {0};
    if (seqpar_safetensors_metadata(file, "chunks")) {
        if (!job->rank)
            fprintf(stderr,
                    "notice: %s was written by 0.2.0, which summed gradients by rows; from "
                    "here on they are summed by documents, so their last bits can differ\n",
                    path);
        return 0;
    }
    int64_t cell = demo_metadata_number(file, path, "cell", 0, -1, &why);
    if (why.status) return demo_fail(error, "%s", why.text);
    if (c->cell && c->cell != cell)
        return demo_fail(error,
                         "the checkpoint was written with --cell %lld, this run has --cell "
                         "%lld; leave it out to go on",
                         (long long)cell, (long long)c->cell);
    c->cell = cell;
    return 0;
}

/* Refuses a checkpoint that was trained with other padding tokens. */
static int demo_resume_pads(const demo_job *job, const seqpar_safetensors_file *file,
                            demo_error *error) {
    char pads[DEMO_PADS][32];
    demo_pads_of(job, pads);
    for (int i = 0; i < DEMO_PADS; i++) {
        const char *there = seqpar_safetensors_metadata(file, demo_pad_keys[i]);
        if (there && strcmp(there, pads[i]))
            return demo_fail(
                error,
                "the checkpoint was written with %s %.30s, this run has %s: the embedding of "
                "that token gets no gradient from inputs; put the same into config.json to "
                "go on",
                demo_pad_keys[i], there, pads[i]);
    }
    return 0;
}

static int demo_resume_targets(const demo_job *job, const seqpar_safetensors_file *file,
                               demo_error *error) {
    const char *there = seqpar_safetensors_metadata(file, demo_targets_key);
    char targets[DEMO_LORA_TEXT];
    demo_lora_text(targets, job->adapter.targets);
    if (!there || !strcmp(there, targets)) return 0;
    return demo_fail(error,
                     "the checkpoint has adapters of %.64s, this run of %s; give the same "
                     "--target_modules to go on",
                     there, targets);
}

/* Refuses a checkpoint of another trainer, of other data, or of a later step than the last one
   of this run. */
static int demo_resume_compare(demo_job *job, const char *tool,
                               const seqpar_safetensors_file *file, const demo_state *state,
                               demo_error *error) {
    const demo_config *c = &job->config;
    const char *trainer = seqpar_safetensors_metadata(file, "trainer");
    const char *data = seqpar_safetensors_metadata(file, "training_data");
    char own[32];
    snprintf(own, sizeof own, "%016llx", (unsigned long long)job->data);
    if (trainer && strcmp(trainer, tool))
        return demo_fail(error,
                         "the checkpoint in %.300s was written by train_%.20s, this is "
                         "train_%s; give another --ckpt_path",
                         c->ckpt_path, trainer, tool);
    if (state->seed != c->seed || state->train_batch_size != c->train_batch_size ||
        state->documents != job->usable_count)
        return demo_fail(
            error,
            "the checkpoint was written with seed %lld, train_batch_size %lld and %lld "
            "documents, this run has %lld, %lld and %lld; use the same to go on",
            (long long)state->seed, (long long)state->train_batch_size,
            (long long)state->documents, (long long)c->seed, (long long)c->train_batch_size,
            (long long)job->usable_count);
    if (data && strcmp(data, own))
        return demo_fail(error,
                         "the checkpoint in %.200s was trained on other data than %.200s: as "
                         "many documents, but different, in a different order or read with "
                         "different options; use the same to go on",
                         c->ckpt_path, c->dataset);
    if (state->step > job->last_step)
        return demo_fail(error,
                         "the checkpoint in %.300s is of step %lld, this run ends after step "
                         "%lld; raise --max_steps, or give another --ckpt_path",
                         c->ckpt_path, (long long)state->step, (long long)job->last_step);
    return 0;
}

/* Checks that the job can resume from the checkpoint. */
static int demo_job_resume(demo_job *job, const demo_binding *bindings, int count,
                           const char *tool, demo_error *error) {
    char folder[1110], path[1280];
    seqpar_safetensors_file *file = NULL;
    demo_state state;
    seqpar_error why = {0};
    demo_checkpoint_path(folder, sizeof folder, job->config.ckpt_path, job->run.from);
    /* the process that holds the lock may not have renamed the folder yet */
    if (access(folder, F_OK))
        demo_checkpoint_temporary(folder, sizeof folder, job->config.ckpt_path, job->run.from);
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    int wrong = demo_open_state(&file, &state, folder, job->run.from, &why)
                    ? (demo_fail(error, "%s", why.text))
                    : 0;
    if (!wrong)
        wrong = demo_resume_compare(job, tool, file, &state, error) ||
                demo_model_compare(&job->model, folder, error) ||
                demo_resume_cell(job, file, path, error);
    demo_note *notes = wrong ? NULL : demo_option_notes(bindings, count);
    if (!wrong)
        wrong = demo_options_compare(
            notes, file, job->objective->fixed ? job->objective->fixed : "", !job->rank, error);
    /* after the options, since padding depends on loss_definition, which is compared there */
    if (!wrong) wrong = demo_resume_pads(job, file, error);
    if (!wrong) wrong = demo_resume_targets(job, file, error);
    seqpar_safetensors_close(file);
    arrfree(notes);
    return wrong;
}

static int demo_job_paths(const demo_binding *bindings, int count, demo_error *error) {
    return demo_check_inputs(bindings, count, error) ||
                   demo_outputs_apart(bindings, count, error) ||
                   demo_metrics_ours(bindings, count, error) ||
                   demo_outputs_free(bindings, count, error)
               ? -1
               : 0;
}

/* Is an evaluation due after `done` rounds (steps or rollouts)? */
static bool demo_evaluation_due(const demo_job *job, int64_t done) {
    if (!arrlen(job->eval.documents)) return false;
    return done == job->rounds || (done && job->eval_every > 0 && done % job->eval_every == 0);
}

static void demo_job_logs(demo_job *job, const demo_binding *bindings, int count,
                          const char *tool) {
    bool goes_on = job->run.from != DEMO_NOTHING_SAVED;
    job->logs = (demo_logs_desc){
        .goes_on = goes_on,
        .from = goes_on ? job->run.from : 0,
        .again = goes_on && demo_evaluation_due(job, job->run.from / job->round_steps),
        .bindings = bindings,
        .binding_count = count};
    for (int i = 0; i < DEMO_SINKS; i++)
        if (!job->config.dry_run)
            job->logs.given[i] = demo_option_path(bindings, count, demo_sink_option[i]);
    snprintf(job->logs.name, sizeof job->logs.name, "%s_%s", tool, job->run.id);
}

/* The last checks before training. Rank 0 locks the folder of checkpoints, except in a dry run.
   0, or -1 with a message. */
static int demo_job_begin(demo_job *job, const demo_binding *bindings, int count,
                          const char *tool, demo_error *error) {
    const demo_config *c = &job->config;
    seqpar_error why = {0};
    job->run.root = c->ckpt_path;
    job->data = demo_job_digest(job, &job->train);
    if (demo_job_paths(bindings, count, error)) return -1;
    if (!job->rank && !c->overwrite && demo_check_foreign(c->save_path, &why))
        return demo_fail(error, "%s", why.text);
    if (demo_run_open(&job->run, !job->rank && !c->dry_run, c->load_checkpoint, c->save_path,
                      tool, c->dataset, &why) ||
        (c->dry_run && !c->load_checkpoint && demo_refuse_others(&job->run, &why)))
        return demo_fail(error, "%s", why.text);
    /* checked again: now that folders were made, a path with .. may lead elsewhere */
    if (demo_job_paths(bindings, count, error)) return -1;
    if (job->run.from != DEMO_NOTHING_SAVED &&
        demo_job_resume(job, bindings, count, tool, error))
        return -1;
    demo_job_notes(job, bindings, count, tool);
    demo_job_tell(job, bindings, count);
    demo_job_logs(job, bindings, count, tool);
    return 0;
}
#endif
