# SPDX-License-Identifier: MIT OR Unlicense
"""Writes down the first step of a Trainer of transformers, or of TRL's SFTTrainer, for `seqpar-verify ver`.

    trainer = SFTTrainer(...)
    seqpar_trainer.record(trainer, "dump")     # the one line more
    trainer.train()                            # dump/ is there after the first step

    seqpar-verify ver dump --model dump/model --strict

Gradients are judged by the model as it was before the step: dump/model, which rank 0 leaves where seqpar-verify computes such
models (FAMILIES); of a PEFT model dump/adapter, too, for --adapter. Of others, or with model=False, it prints the line that
records the same step on one rank, for --want.

Labels and log-probs are those of the loss: what torch's cross_entropy, or TRL's chunked log-probs, were called with.
Gradients are taken behind their reduction and before they are clipped. A batch of several rows is written as several
micro-batches. Where a loss of another kernel is used (Liger's), its labels are not seen, and are not judged; where
gradients are sharded (FSDP, ZeRO) they are not seen either. Ranks have rows of their own; if they share sequences:

    record(trainer, "dump", sp=2, row=lambda inputs, b: dict(index=places, cu_seqlens=cu_seqlens))
        what row b of this rank's inputs is in the whole: the places of its tokens, the documents of all ranks' row
"""
import os
from contextlib import contextmanager

import torch

import seqpar_dump

IGNORED = -100
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "qwen3_moe")  # those of demos/trainer/model/families.h


def record(trainer, folder, sp=1, row=None, model=True, **keywords):
    """Before trainer.train(). keywords: those of seqpar_dump.Dump, as reduction= and dtype=. model=False: without its weights."""
    from transformers import TrainerCallback
    recorder = _Recorder(trainer, folder, sp, row, model, keywords)

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            recorder.take_gradients()

        def on_step_end(self, args, state, control, **_):
            control.should_log = recorder.watches or control.should_log
            return control

        def on_log(self, args, state, control, logs=None, **_):
            if recorder.watches and "loss" in (logs or {}):
                recorder.write(logs["loss"])

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


def _filled(x, tokens, value):
    """To a row's length: labels and log-probs of the last token may be left out."""
    return torch.nn.functional.pad(x, (0, tokens - x.shape[-1]), value=value)


class _Recorder:
    def __init__(self, trainer, folder, sp, row, model, keywords):
        self.trainer, self.folder, self.sp, self.row, self.keywords = trainer, folder, sp, row, keywords
        self.leaves_model = model
        self.rows, self.losses, self.gradients, self.norm, self.watches = [], [], None, None, True
        self.whole_step, self.clip = trainer.training_step, trainer.accelerator.clip_grad_norm_
        trainer.training_step, trainer.accelerator.clip_grad_norm_ = self.training_step, self.clip_grad_norm

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
        return (getattr(config, "model_type", None) in FAMILIES and type(model).__name__.endswith("ForCausalLM")
                and self.are_known() and not getattr(config, "quantization_config", None)
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

    def say_what_follows(self):
        if self.trainer.args.process_index:
            return
        if self.leaves_model:
            adapter = f" --adapter {os.path.join(self.folder, 'adapter')}" if self.adapters() else ""
            print(f"seqpar_trainer: seqpar-verify ver {self.folder} --model {os.path.join(self.folder, 'model')}{adapter} --strict")
            return
        one = f"{str(self.folder).rstrip(os.sep)}_sp1"
        print(f"seqpar_trainer: gradients are judged by the same step on one rank: there, all of its rows in one process, "
              f"seqpar_trainer.record(trainer, \"{one}\"), then seqpar-verify ver {self.folder} --want {one} --strict")

    # ---- micro-batches ----

    def training_step(self, model, inputs, *rest, **named):
        if not self.rows:
            self.leave_model()
        self.losses = []
        given = {name: x.detach().clone() for name, x in inputs.items() if torch.is_tensor(x)}
        with self._cross_entropy(), self._chunked_log_probs():
            result = self.whole_step(model, inputs, *rest, **named)
        for b in range(given["input_ids"].shape[0]):
            self.rows.append(self._row(given, b))
        return result

    def _row(self, inputs, b):
        batch, tokens = inputs["input_ids"].shape
        arrays = dict(index=torch.arange(tokens), ids=inputs["input_ids"][b], cu_seqlens=_documents(inputs, b))
        if inputs.get("position_ids") is not None:
            arrays["positions"] = inputs["position_ids"].expand(batch, -1)[b]
        if self.losses:
            labels, logp = self.losses[0]
            arrays["labels"] = _filled(labels.reshape(batch, -1)[b], tokens, IGNORED)
            arrays["logp"] = _filled(logp.reshape(batch, -1)[b], tokens, 0)
        return dict(arrays, **(self.row(inputs, b) if self.row else {}))

    @contextmanager
    def _cross_entropy(self):
        whole = torch.nn.functional.cross_entropy

        def watched(logits, target, *rest, **named):
            if logits.dim() == 2 and not target.is_floating_point():
                ignored = named.get("ignore_index", IGNORED)
                logp = -whole(logits.detach(), target, reduction="none", ignore_index=ignored)
                self.losses.append((target.masked_fill(target == ignored, IGNORED), logp))
            return whole(logits, target, *rest, **named)

        torch.nn.functional.cross_entropy = watched
        try:
            yield
        finally:
            torch.nn.functional.cross_entropy = whole

    @contextmanager
    def _chunked_log_probs(self):
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
            self.losses.append((labels, output.log_probs.detach()))

        hook, utils._ChunkedLogProbFunction = self.model().register_forward_hook(take), Watched
        try:
            yield
        finally:
            utils._ChunkedLogProbFunction = whole
            hook.remove()

    # ---- the step ----

    def take_gradients(self):
        if self.watches and self.gradients is None:
            self.gradients = {name: None if p.grad is None else p.grad.detach().clone()
                              for name, p in self.model().named_parameters()}

    def clip_grad_norm(self, *rest, **named):
        self.take_gradients()
        norm = self.clip(*rest, **named)
        if self.watches and norm is not None:
            self.norm = float(norm)
        return norm

    def write(self, loss):
        trainer, args = self.trainer, self.trainer.args
        trainer.training_step, trainer.accelerator.clip_grad_norm_, self.watches = self.whole_step, self.clip, False
        if args.bf16 or args.fp16:
            self.keywords.setdefault("dtype", "bfloat16" if args.bf16 else "float16")
        elif all(p.dtype == torch.float64 for p in self.model().parameters()):
            self.keywords.setdefault("dtype", "float32")  # in which transformers computes norms, softmaxes and rotary angles
        dump = seqpar_dump.Dump(self.folder, args.process_index, args.world_size, sp=self.sp,
                                accumulation=len(self.rows), **self.keywords)
        for number, arrays in enumerate(self.rows):
            dump.micro_batch(number, **arrays)
        rounded = round(loss, 4) == loss  # older versions log no more digits: nothing is judged by them
        dump.step(None if rounded else loss, self.gradients, norm=self.norm)
        self.say_what_follows()
