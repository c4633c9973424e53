# SPDX-License-Identifier: MIT OR Unlicense
"""What seqpar_trainer leaves of a step of TRL's DPOTrainer, KTOTrainer, GRPOTrainer and RewardTrainer on two ranks, judged: right steps,
and steps with a mistake in the loss.

    test_recorder_trl.py ORACLE FOLDER [CASE...]
"""
import contextlib
import io
import os
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "frameworks"))
from common import on_ranks, tiny_llama

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, RLOOTrainer)

import seqpar_trainer
from test_recorder import check, ver

LETTERS = "~_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # ~ ends a text, _ pads


def tokenizer():
    words = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="_"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_", eos_token="~")


def text(draw, low, high):
    return "".join(draw.choice(LETTERS[2:]) for _ in range(draw.randint(low, high)))


def settings(kind, folder, **more):
    common = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, use_cpu=True, bf16=False, report_to=[],
                  logging_steps=1, save_strategy="no", disable_tqdm=True, learning_rate=1e-3, train_sampling_strategy="sequential",
                  gradient_checkpointing=False, max_grad_norm=0.5)
    return kind(f"{folder}/out", **{**common, **more})


def pairs():
    draw = random.Random(3)
    return [dict(prompt=text(draw, 2, 6), chosen=text(draw, 3, 12), rejected=text(draw, 3, 12)) for _ in range(16)]


def dpo(folder, **more):
    rows = Dataset.load_from_disk(f"{pathlib.Path(folder).parent}/pairs")  # of a file, as ranks share what is computed of it
    return DPOTrainer(tiny_llama(), tiny_llama(seed=7), settings(DPOConfig, folder, **more), train_dataset=rows,
                      processing_class=tokenizer())


def kto(folder, **more):
    rows = [dict(prompt=x["prompt"], completion=x["chosen"], label=i % 3 != 0) for i, x in enumerate(pairs())]
    return KTOTrainer(tiny_llama(), tiny_llama(seed=7), settings(KTOConfig, folder, **more), train_dataset=Dataset.from_list(rows),
                      processing_class=tokenizer())


def rm(folder, margins=True, **more):
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_labels=1, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1)
    net = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(net.score.weight)
    rows = [dict(x, margin=0.25 * (i % 3)) if margins else x for i, x in enumerate(pairs())]
    return RewardTrainer(net, settings(RewardConfig, folder, **more), train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


def length(completions, **_):
    """A reward that differs within groups."""
    return [sum(map(ord, text)) % 7 / 2 for text in completions]


def grpo(folder, rewards=length, **more):
    own = dict(num_generations=2, max_completion_length=9, beta=0.05, use_bias_correction_kl=False)
    args = settings(GRPOConfig, folder, **{**own, **more})
    net = tiny_llama()
    net.config._name_or_path = f"{pathlib.Path(folder).parent}/reference"  # where the trainer finds the reference
    return GRPOTrainer(net, rewards, args, train_dataset=Dataset.from_list([dict(prompt=x["prompt"]) for x in pairs()]),
                       processing_class=tokenizer())


# ---- mistakes, made behind what the recorder sees ----


def halved(trainer):
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss, **named: backward(loss / 2, **named)


def with_inputs(change):
    """The loss gets other inputs than its batch."""

    def mistake(trainer):
        whole = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs, *rest: whole(model, change(trainer, dict(inputs)), *rest)

    return mistake


def turned_over(trainer):
    """The rejected one is taken for the chosen one."""
    whole = trainer.compute_loss

    def compute_loss(*given, **named):
        functions, right = torch.nn.functional, torch.nn.functional.logsigmoid
        functions.logsigmoid = lambda x: right(-x)
        try:
            return whole(*given, **named)
        finally:
            functions.logsigmoid = right

    trainer.compute_loss = compute_loss


def setting(**values):
    return lambda trainer: [setattr(trainer, name, x) for name, x in values.items()]


def own_count(trainer, inputs):
    return dict(inputs, num_items_in_batch=inputs["completion_mask"].sum() * 2 * trainer.args.steps_per_generation)


def own_kl(trainer):
    trainer.accelerator.gather_for_metrics = lambda x, **_: x


def without_margin(trainer):
    whole = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **named: whole(model, {n: x for n, x in inputs.items() if n != "margin"}, **named)


KTO_WEIGHTS = dict(desirable_weight=1.5, undesirable_weight=0.8)
BEFORE = (without_margin, turned_over)  # the recorder is to be outside of these
PAIR = "insufficient: places, labels, log-probs, gradients, norm, step right; "
REWARDS = "insufficient: places, log-probs, rewards, gradients, norm, step right; "
PART = "; gradients not judged: it takes what the objective's loss is made of"  # of these losses, seqpar-verify has the values alone
HIDDEN = "loss shows nothing: a mean of replicas' or micro-batches' means is the same here"  # each has as many documents, and so as right
HALF = "wrong: one of over_dp, over_accumulation"
POLICY = "right: places, labels, log-probs, rewards, loss, gradients, norm, step (8 of 12 stages)"
GIVEN = "right: places, labels, log-probs, loss, gradients, norm, step (7 of 12 stages)"
# what is recorded, the trainer's settings, the mistake, the exit code with --model, and what the headline has
CASES = {
    "dpo": (dpo, {}, None, 4, PAIR, HIDDEN), "dpo_half": (dpo, {}, halved, 1, HALF),
    "dpo_beta": (dpo, {}, setting(beta=0.2), 1, "wrong: unknown"),
    "dpo_swapped": (dpo, {}, turned_over, 1, "wrong: pair_swapped"), "dpo_later": (dpo, dict(max_steps=2), None, 4, PAIR, HIDDEN),
    "dpo_ipo": (dpo, dict(loss_type="ipo"), None, 4, "labels, log-probs, norm, step right; ", HIDDEN, PART),
    "dpo_hinge": (dpo, dict(loss_type="hinge"), None, 4, "labels, log-probs, norm, step right; ", HIDDEN, PART),
    "dpo_robust": (dpo, dict(loss_type="robust", label_smoothing=0.1), None, 4, "labels, log-probs, norm, step right; ", HIDDEN, PART),
    "dpo_sums": (dpo, dict(precompute_ref_log_probs=True), None, 4, "insufficient: places, labels, log-probs, norm, step right" + PART),
    "kto": (kto, {}, None, 4, PAIR, HIDDEN), "kto_half": (kto, {}, halved, 1, HALF),
    "kto_beta": (kto, {}, setting(beta=0.2), 1, "wrong: unknown"),
    "kto_weights": (kto, KTO_WEIGHTS, None, 4, PAIR, HIDDEN),
    "kto_no_weights": (kto, KTO_WEIGHTS, setting(desirable_weight=1.0, undesirable_weight=1.0), 1, "wrong: option_not_applied"),
    "kto_own": (kto, {}, own_kl, 1, "wrong: kl_of_one_replica"),
    "kto_swapped": (kto, {}, with_inputs(lambda _, x: dict(x, label=~x["label"])), 1, "wrong: desirable_swapped"),
    "rm": (rm, dict(margins=False), None, 4, REWARDS, HIDDEN), "rm_half": (rm, dict(margins=False), halved, 1, HALF),
    "rm_swapped": (rm, dict(margins=False), turned_over, 1, "wrong: pair_swapped"),
    "rm_margins": (rm, {}, None, 4, "log-probs, rewards, norm, step right; ", HIDDEN, PART),
    "rm_margin": (rm, {}, without_margin, 1, "wrong: margin_missing"),
    "rm_center": (rm, dict(margins=False, center_rewards_coefficient=0.1), None, 4, "log-probs, rewards, norm, step right; ", HIDDEN, PART),
    "grpo": (grpo, {}, None, 0, POLICY), "grpo_half": (grpo, {}, halved, 1, HALF),
    "grpo_beta": (grpo, {}, setting(beta=0.1), 1, "wrong: unknown"),
    "grpo_own": (grpo, {}, with_inputs(own_count), 1, "wrong: mean_of_means"),
    "grpo_std": (grpo, {}, setting(scale_rewards="none"), 1, "wrong: std_missing"),
    "grpo_loss": (grpo, {}, setting(loss_type="grpo"), 1, "wrong: mean_over_sequences"),
    "grpo_sequence": (grpo, dict(loss_type="grpo"), None, 4, "log-probs, rewards, gradients, norm, step right; ", HIDDEN),
    "grpo_cispo": (grpo, dict(loss_type="cispo", epsilon_high=1.1), None, 0, POLICY),
    "grpo_kl_ratio": (grpo, dict(use_bias_correction_kl=True), None, 0, POLICY),
    "grpo_bnpo": (grpo, dict(loss_type="bnpo"), None, 0, POLICY), "grpo_dr": (grpo, dict(loss_type="dr_grpo"), None, 0, POLICY),
    "grpo_several": (grpo, dict(steps_per_generation=4, max_steps=2), None, 0, GIVEN),
    "grpo_two": (grpo, dict(rewards=[length, length]), None, 0, GIVEN),
}
LACKS = {"dpo_sums": "ref_logp is not written: precompute_ref_log_probs=True leaves their sums alone; give False",
         "grpo_several": "rewards is not written: advantages are not of the groups of one step alone",
         "grpo_two": "rewards is not written: several reward functions, or a weight: their sum is not shown"}


def refused(folder):
    """What is said of settings that seqpar-verify does not compute, and of trainers that it does not know."""
    for make, more, words in REFUSED:
        trainer = make(folder, **more) if callable(make) else make
        try:
            seqpar_trainer.record(trainer, folder)
            yield words, "accepted"
        except ValueError as error:
            yield words, str(error)


REFUSED = (
    (dpo, dict(loss_type="exo_pair", label_smoothing=0.1), "DPOTrainer has loss_type=['exo_pair'], which seqpar-verify does not compute"),
    (dpo, dict(ld_alpha=0.5), "DPOTrainer has ld_alpha=0.5, which seqpar-verify does not compute; give None or 1.0 for the recorded step"),
    (dpo, dict(label_smoothing=0.1), "DPOTrainer has label_smoothing=0.1"),
    (kto, dict(loss_type="apo_zero_unpaired"), "KTOTrainer has loss_type='apo_zero_unpaired'"),
    (grpo, dict(loss_type="sapo"), "GRPOTrainer has loss_type='sapo'"),
    (grpo, dict(loss_type="cispo", importance_sampling_level="sequence"), "has importance_sampling_level='sequence'"),
    (grpo, dict(use_bias_correction_kl=True, importance_sampling_level="sequence"),
     "GRPOTrainer with beta and use_bias_correction_kl has importance_sampling_level='sequence'"),
    (grpo, dict(delta=1.1), "GRPOTrainer has delta=1.1, below 1 + epsilon_high = 1.2"),
    (object(), {}, "a object is no Trainer of transformers or TRL"),
    (type("RLOO", (RLOOTrainer,), {"__init__": lambda self: None})(), {}, "TRL's RLOOTrainer is not recorded; give a Trainer, SFTTrainer"),
)


def step(name, folder):
    """A step, written to folder/dump; what was printed."""
    make, more, mistake, *_ = CASES[name]
    trainer = make(folder, **more)
    if mistake in BEFORE:
        mistake(trainer)
    seqpar_trainer.record(trainer, f"{folder}/dump", step=trainer.args.max_steps)
    if mistake and mistake not in BEFORE:
        mistake(trainer)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer.train()
    return said.getvalue()


def steps(rank, out, names):
    torch.manual_seed(rank)  # of the samples
    return {name: step(name, f"{out}/{name}") for name in names}


def main(oracle, out, *names):
    os.makedirs(out, exist_ok=True)
    tiny_llama(seed=7).save_pretrained(f"{out}/reference")
    Dataset.from_list(pairs()).save_to_disk(f"{out}/pairs")
    printed = on_ranks(steps, out, names or list(CASES))[0]
    for name, said in printed.items():
        _, _, _, code, *words = CASES[name]
        dump = f"{out}/{name}/dump"
        check(name, ver(oracle, dump, "--model", f"{dump}/model"), code, *words)
        check(f"{name}_says", (0, said), 0, f"seqpar-verify ver {dump} --model {dump}/model --strict", LACKS.get(name, ""))
    for number, (words, said) in enumerate(refused(f"{out}/refused")):
        check(f"refuses_{number}", (0, said), 0, words)


if __name__ == "__main__":
    main(*sys.argv[1:])
