# SPDX-License-Identifier: MIT OR Unlicense
"""Writes down a step of a Trainer of transformers, or of TRL's SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer or RewardTrainer,
for `seqpar-verify ver`.

    trainer = SFTTrainer(...)
    seqpar_trainer.record(trainer, "dump")     # the one line more
    trainer.train()                            # dump/ is there after the first step

    seqpar-verify ver dump --model dump/model --strict

    record(trainer, "dump", step=3)            # the third step: in the first one, DPO's and KTO's policy is the reference

Gradients are judged by the model as it was before the step: dump/model, which rank 0 leaves where seqpar-verify computes such
models (FAMILIES); of a PEFT model dump/adapter, too, for --adapter. Of others, or with model=False, it prints the line that
records the same step on one rank, for --want.

Labels and log-probs are those of the loss: what torch's cross_entropy, or TRL's chunked log-probs, were called with.
Gradients are taken behind their reduction and before they are clipped; parameters before and after the optimizer's step, which make
the dump three times as large (update=False: without). A batch of several rows is written as several
micro-batches; of DPO, KTO, GRPO and RM, as one row of packed documents without padding, with what the loss took beside
log-probs: those of the reference, old ones, advantages, rewards, scores, margins, KL terms. Settings such as beta and loss_type
are those of the trainer's args. What is not seen is left out, is not judged, and is said: labels where a loss of another kernel is
used (Liger's), sharded gradients (FSDP, ZeRO). Ranks have rows of their own; if they share sequences, of SFT:

    record(trainer, "dump", sp=2, row=lambda inputs, b: dict(index=places, cu_seqlens=cu_seqlens))
        what row b of this rank's inputs is in the whole: the places of its tokens, the documents of all ranks' row
"""
import os
from contextlib import contextmanager

import torch

import seqpar_dump
from seqpar_record import Update, losses_of
from seqpar_trl import IGNORED, Seen, filled, objective_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "qwen3_moe")  # those of demos/trainer/model/families.h


def record(trainer, folder, sp=1, row=None, model=True, step=1, update=True, **keywords):
    """Before trainer.train(). keywords: those of seqpar_dump.Dump, as reduction= and dtype=. model=False: without its weights.
    step: which step of the optimizer is written, from 1 on, counted from here. update=False: without parameters before and after it."""
    from transformers import TrainerCallback
    recorder = _Recorder(trainer, folder, sp, row, model, step, update, keywords)

    class Watch(TrainerCallback):
        def on_step_begin(self, *_, **__):
            recorder.begin_step()

        def on_pre_optimizer_step(self, *_, **__):
            recorder.take_gradients()

        def on_step_end(self, args, state, control, **_):
            control.should_log = recorder.is_near() or control.should_log
            return control

        def on_log(self, args, state, control, logs=None, **_):
            if recorder.watches and "loss" in (logs or {}):
                recorder.write(logs["loss"])

        def on_train_end(self, *_, **__):
            recorder.end()

    trainer.add_callback(Watch())


def _documents(inputs, b):
    """cu_seqlens of a row of its own: where positions begin anew, and where padding begins and ends."""
    tokens, positions, mask = inputs["input_ids"].shape[-1], inputs.get("position_ids"), inputs.get("attention_mask")
    starts = {0}
    if positions is not None:
        starts.update((positions.expand(b + 1, -1)[b] == 0).nonzero().flatten().tolist())
    if mask is not None and mask.dim() == 2:
        starts.update(((mask[b][1:] != mask[b][:-1]).nonzero().flatten() + 1).tolist())
    return torch.tensor(sorted(starts) + [tokens])


def _tensors(inputs):
    return {name: x.detach().clone() for name, x in inputs.items() if torch.is_tensor(x)}


class _Recorder:
    def __init__(self, trainer, folder, sp, row, model, step, update, keywords):
        self.trainer, self.folder, self.sp, self.row, self.keywords = trainer, folder, sp, row, keywords
        self.leaves_model, self.step, self.number, self.is_over = model, step, 0, False
        self.rows, self.losses, self.gradients, self.norm = [], [], None, None
        self.wants_update, self.update = update, None
        self.objective = objective_of(trainer)
        self.refuse()
        self.whole_step, self.clip = trainer.training_step, trainer.accelerator.clip_grad_norm_
        self.whole_loss = trainer.compute_loss
        trainer.training_step, trainer.accelerator.clip_grad_norm_ = self.training_step, self.clip_grad_norm
        trainer.seqpar_recorder = self
        if self.objective:
            trainer.compute_loss = self.compute_loss
            self.objective.attach()

    def refuse(self):
        trainer, other = self.trainer, getattr(self.trainer, "seqpar_recorder", None)
        if other and not other.is_over:
            raise ValueError(f"this trainer is recorded to {other.folder} already; give that folder's step first, then record() again")
        if self.step < 1:
            raise ValueError(f"step is {self.step}; the first one is 1")
        if trainer.args.n_gpu > 1:
            raise ValueError(f"this process has {trainer.args.n_gpu} devices, whose losses are not seen; start one a device: torchrun")
        if getattr(getattr(trainer.model, "config", None), "is_encoder_decoder", False):
            raise ValueError(f"{type(self.model()).__name__} is an encoder and a decoder; give a decoder")
        if self.objective and (self.sp != 1 or self.row):
            raise ValueError(f"sp={self.sp}, row={self.row}: ranks that share sequences are recorded for SFT alone; write what "
                             f"{type(trainer).__name__} does with seqpar_dump.Dump")

    def begin_step(self):
        self.number += 1
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)  # accelerate's has torch's in it
        if self.watches and self.wants_update and isinstance(optimizer, torch.optim.Optimizer):
            self.update = Update(optimizer, self.model().named_parameters(), self.max_norm)

    def max_norm(self):
        """Of the clip, where there was one."""
        return None if self.norm is None else self.trainer.args.max_grad_norm

    @property
    def watches(self):
        return not self.is_over and self.number == self.step

    def is_near(self):
        """Whether the step's loss would otherwise be logged as a mean with earlier ones, or not at all."""
        return not self.is_over and self.number in (self.step - 1, self.step)

    def end(self):
        """Of the run."""
        if not self.is_over:
            self.detach()
            self.say(f"nothing is written: the run had {self.number} steps, and step {self.step} was asked for")

    def detach(self):
        trainer, self.is_over = self.trainer, True
        trainer.training_step, trainer.accelerator.clip_grad_norm_ = self.whole_step, self.clip
        if self.update:
            self.update.detach()
        if self.objective:
            trainer.compute_loss = self.whole_loss
            self.objective.detach()

    def say(self, text):
        if not self.trainer.args.process_index:
            print(f"seqpar_trainer: {text}")

    def model(self):
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    # ---- what gradients are judged by ----

    def adapters(self):
        """What PEFT says of the one adapter that learns; None where the model has none."""
        configs = getattr(self.model(), "peft_config", None)
        return next(iter(configs.values())) if configs else None

    def base(self):
        return self.model().get_base_model() if self.adapters() else self.model()

    def are_known(self):
        """Whether seqpar-verify computes these adapters, if there are any: LoRA that drops nothing."""
        adapters = self.adapters()
        return adapters is None or (list(self.model().peft_config) == ["default"] and adapters.peft_type == "LORA"
                                    and not adapters.lora_dropout and adapters.bias == "none" and not adapters.use_dora and not adapters.modules_to_save)

    def is_known(self):
        """Whether seqpar-verify computes this model: all of its weights are here."""
        model = self.base()
        config = getattr(model, "config", None)
        rewards = self.objective and "scores" in self.objective.names
        return (getattr(config, "model_type", None) in FAMILIES
                and type(model).__name__.endswith("ForSequenceClassification" if rewards else "ForCausalLM")
                and (not self.objective or self.objective.is_of_model()) and self.are_known()
                and not getattr(config, "quantization_config", None)
                and not getattr(config, "attention_dropout", 0) and all(p.numel() and not hasattr(p, "placements")
                                                                        for p in model.parameters()))

    def leave_model(self):
        """As it is before the step."""
        self.leaves_model = self.leaves_model and self.is_known()
        if not self.leaves_model or self.trainer.args.process_index:
            return
        model, options = self.base(), {}
        if self.adapters():
            self.model().save_pretrained(os.path.join(self.folder, "adapter"))
            options["state_dict"] = {name.replace(".base_layer.", "."): x for name, x in model.state_dict().items()
                                     if ".lora_" not in name}
        model.save_pretrained(os.path.join(self.folder, "model"), **options)

    def say_what_lacks(self, rounded):
        names = self.objective.names if self.objective else ("labels", "logp")
        for name in names:
            if not all(name in row for row in self.rows):
                self.say(f"{name} is not written: {self.objective.lacks(name) if self.objective else 'the loss did not show it'}")
        if not self.gradients or not any(x is not None for x in self.gradients.values()):
            self.say("gradients are not written: this rank's parameters have none, as where they are sharded")
        if self.update and not self.update.settings:
            self.say(self.update.lacks())
        if rounded:
            self.say("the loss is not written: this version of transformers logs four digits of it")

    def say_what_follows(self):
        if self.leaves_model:
            adapter = f" --adapter {os.path.join(self.folder, 'adapter')}" if self.adapters() else ""
            self.say(f"seqpar-verify ver {self.folder} --model {os.path.join(self.folder, 'model')}{adapter} --strict")
            return
        one = f"{str(self.folder).rstrip(os.sep)}_sp1"
        self.say(f"gradients are judged by the same step on one rank: there, all of its rows in one process, "
                 f"seqpar_trainer.record(trainer, \"{one}\"), then seqpar-verify ver {self.folder} --want {one} --strict")

    # ---- micro-batches ----

    def training_step(self, model, inputs, *rest, **named):
        if not self.watches:
            return self.whole_step(model, inputs, *rest, **named)
        if not self.rows:
            self.leave_model()
        if self.objective:
            return self.whole_step(model, inputs, *rest, **named)
        self.losses = []
        given = _tensors(inputs)

        def take(labels, logp, *_):
            self.losses.append((labels, logp.detach()))

        with losses_of(take), self._chunked_log_probs([self.model()], take):
            result = self.whole_step(model, inputs, *rest, **named)
        for b in range(given["input_ids"].shape[0]):
            self.rows.append(self._row(given, b))
        return result

    def compute_loss(self, model, inputs, *rest, **named):
        """A micro-batch of preferences, rewards or policies."""
        if not self.watches or not self.model().training:
            return self.whole_loss(model, inputs, *rest, **named)
        given, seen, reference = _tensors(inputs), Seen(), getattr(self.trainer, "ref_model", None)
        models = [self.model()] + ([self.trainer.accelerator.unwrap_model(reference)] if reference is not None else [])

        def take(labels, logp):
            (seen.policy if logp.requires_grad else seen.reference).append((labels, logp.detach()))

        with self.objective.watch(seen, models[0]), self._chunked_log_probs(models, take):
            result = self.whole_loss(model, inputs, *rest, **named)
        self.rows.append(self.objective.arrays(given, seen))
        return result

    def _row(self, inputs, b):
        batch, tokens = inputs["input_ids"].shape
        arrays = dict(index=torch.arange(tokens), ids=inputs["input_ids"][b], cu_seqlens=_documents(inputs, b))
        if inputs.get("position_ids") is not None:
            arrays["positions"] = inputs["position_ids"].expand(batch, -1)[b]
        if self.losses:
            labels, logp = self.losses[0]
            arrays["labels"] = filled(labels.reshape(batch, -1)[b], tokens, IGNORED)
            arrays["logp"] = filled(logp.reshape(batch, -1)[b], tokens, 0)
        return dict(arrays, **(self.row(inputs, b) if self.row else {}))

    @contextmanager
    def _chunked_log_probs(self, models, add):
        """TRL's: targets as they were given to it, log-probs as they were put back in the row."""
        try:
            from trl.trainer import utils
            whole = utils._ChunkedLogProbFunction
        except (ImportError, AttributeError):
            yield
            return
        targets = []

        class Watched:
            @staticmethod
            def apply(hidden, weight, bias, target, *rest):
                targets.append(target)
                return whole.apply(hidden, weight, bias, target, *rest)

        def take(module, given, output):
            mask = getattr(output, "label_mask", None)
            if mask is None or not targets:
                return
            labels, target = torch.full(mask.shape, IGNORED, device=mask.device), targets.pop()
            labels[mask] = target if target.numel() == mask.sum() else target.reshape(mask.shape)[mask]
            add(labels, output.log_probs)

        hooks, utils._ChunkedLogProbFunction = [model.register_forward_hook(take) for model in models], Watched
        try:
            yield
        finally:
            utils._ChunkedLogProbFunction = whole
            for hook in hooks:
                hook.remove()

    # ---- the step ----

    def take_gradients(self):
        if self.watches and self.gradients is None:
            self.gradients = {name: None if p.grad is None or hasattr(p.grad, "placements") else p.grad.detach().clone()
                              for name, p in self.model().named_parameters()}

    def clip_grad_norm(self, *rest, **named):
        self.take_gradients()
        norm = self.clip(*rest, **named)
        if self.watches and norm is not None:
            self.norm = float(norm)
        return norm

    def write(self, loss):
        args = self.trainer.args
        self.detach()
        counts = self.trainer.accelerator.gather(torch.tensor([len(self.rows)], device=args.device)).tolist()
        if len(set(counts)) > 1:
            self.say(f"nothing is written: ranks have {', '.join(map(str, counts))} rows in this step; take one where all have as many")
            return
        dump = seqpar_dump.Dump(self.folder, args.process_index, args.world_size, sp=self.sp,
                                accumulation=len(self.rows), **self.facts())
        for number, arrays in enumerate(self.rows):
            dump.micro_batch(number, **arrays)
        rounded = round(loss, 4) == loss  # older versions log no more digits: nothing is judged by them
        dump.step(None if rounded else loss, self.gradients, norm=self.norm, **(self.update.written() if self.update else {}))
        self.say_what_lacks(rounded)
        self.say_what_follows()

    def facts(self):
        """keywords= of record() come before what the trainer's args say."""
        facts, args = self.objective.facts() if self.objective else {}, self.trainer.args
        if args.bf16 or args.fp16:
            facts["dtype"] = "bfloat16" if args.bf16 else "float16"
        elif all(p.dtype == torch.float64 for p in self.model().parameters()):
            facts["dtype"] = "float32"  # in which transformers computes norms, softmaxes and rotary angles
        return {name: x for name, x in {**facts, **self.keywords}.items() if x is not None}
