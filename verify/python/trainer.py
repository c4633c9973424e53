# SPDX-License-Identifier: MIT OR Unlicense
"""A small trainer on 1 to 4 ranks that share sequences, with a mistake planted in it by name.

    python trainer.py FOLDER --seed 7                                  # a right step
    python trainer.py FOLDER --seed 7 --mistake over_sp --dtype bf16   # a wrong one, and FOLDER.want, of one rank
    python trainer.py --list                                           # all mistakes and their variants

It writes dumps for `seqpar-verify ver`, and FOLDER.model, the weights before the step, for its --model. An independent
witness: PyTorch's autograd and gloo, and nothing of the library that is verified. What is planted acts in the
computation, in the form in which it occurs in frameworks; the dump says honestly what the trainer had and did.
"""
import argparse
import glob
import os
import random
import tempfile
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import losses
import model
import optimizer
from model import wide
from ranks import Ranks, make_groups
from rows import MicroBatch, make_rows
from seqpar_dump import Dump, write_llama

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
ALL = ("sft", "dpo", "rm", "kto", "ppo")
WITH_LABELS = ("sft", "dpo", "kto", "ppo")
MEANS = ("sft", "ppo")  # objectives that are means over tokens
UNEVEN = ("zigzag", "zigzag_doc", "stripe")


@dataclass
class Config:
    """A step, up to the last bit."""
    seed: int = 0
    mistake: str = ""
    variant: str = ""
    dtype: str = "fp32"
    objective: str = "sft"
    sp: int = 1
    dp: int = 1
    accumulation: int = 1
    want: bool = False  # one rank, which takes the rows of all replicas one after the other; see rows_apart
    layout: str = "contiguous"
    attention: str = "ring"
    documents: str = "ordinary"  # or several, one, lopsided, long_prompt, no_prompt, tiny
    length: str = "any"  # of rows; or even, ragged: a multiple of the shares, or not
    vocab: int = 61
    layers: int = 2
    hidden: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    softmax_scale: float = 0
    window: int = 0
    softcap: float = 0
    reduction: str = "token"
    beta: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0
    label_smoothing: float = 0  # of sft and dpo
    z_loss: float = 0  # of sft
    center: float = 0  # of rm
    desirable_weight: float = 1  # of kto
    undesirable_weight: float = 1
    entropy_coef: float = 0  # of ppo, as dual_clip and cispo; 0: there is none
    dual_clip: float = 0
    cispo: float = 0
    kl_ratio: str = ""  # token: the KL term is multiplied by the ratio
    weights: bool = False  # of tokens, sft and ppo
    advantage: str = "group"
    advantage_eps: float = 1e-4
    apart: float = 0.05  # how far reference and sampling policy are from the policy
    reference_head: float = 1
    optimizer: str = "adamw"
    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0
    max_norm: float = 0
    narrow_gradients: bool = False  # added up and reduced in the parameters' type, not in fp32
    frozen: str = ""  # parameters with this in their names have no gradient
    shard: str = "none"  # or world, sp, dp: over which ranks optimizer and gradients are divided
    warm_up: bool = False  # a right step before, so that moments are not 0
    leave_out: tuple = ()  # tensors that the dump does not have
    rows_apart: bool = False  # the wanted step is taken by a rank a row, if these are few

    @property
    def torch_dtype(self):
        return DTYPES[self.dtype]

    @property
    def world(self):
        if not self.want:
            return self.sp * self.dp
        rows = self.dp * self.accumulation
        apart = self.rows_apart and rows <= 6 and self.objective != "kto"  # whose z is of several rows
        return rows if apart else 1

    def wanted(self):
        """The same step on one rank."""
        return replace(self, mistake="", variant="", want=True, shard="none", leave_out=())


# ---- mistakes, and what each needs to show: allowed values of Config's fields ----

@dataclass
class Needs:
    values: dict
    variants: dict = field(default_factory=lambda: {"": {}})


def needs(variants=None, **values):
    """variants: by name, what each needs beyond that."""
    return Needs(values, variants if isinstance(variants, dict) else {name: {} for name in variants or ("",)})


SP, DP, ACCUMULATION = dict(sp=(2, 3, 4)), dict(dp=(2, 3, 4)), dict(accumulation=(2, 3))
GROUPS = {"ranks": SP, "rows": dict(dp=(1, 2, 3), accumulation=(2, 3)), "replicas": DP}
TOKEN_MEAN = dict(objective=MEANS, reduction=("token",), documents=("lopsided",))
EMPTY_RANK = dict(objective=("sft",), reduction=("token",), documents=("long_prompt",), layout=("contiguous",))
PAIRS = dict(objective=("dpo",), sp=(2, 3, 4))
STEP = dict(optimizer=("adamw",), lr=(1e-2, 1e-1))
CLIP = dict(max_norm=(0.05,), warm_up=(True,), optimizer=("adamw",), lr=(1e-1,))  # moments that show its size
CLIP_SGD = dict(max_norm=(0.02,), optimizer=("sgd",), lr=(50.0,))
WHOLE, SHARDS = dict(shard=("none",)), dict(shard=("world", "sp"))
ATTENTION = dict(documents=("several", "one"), objective=ALL)
BY_ROW = {"ring": dict(attention=("ring",)), "llama3": dict(attention=("llama3",)),
          "ulysses": dict(attention=("ulysses",), layout=UNEVEN)}
RING = dict(attention=("ring",), layout=UNEVEN, **SP)

MISTAKES = {
    # the gradient's scale
    "times_sp": needs(**SP, variants=("gather", "seed")),
    "over_sp": needs(**SP, variants=("reducer", "seed")),
    "times_sp_squared": needs(**SP, variants=("gather", "seed")),
    "over_sp_squared": needs(**SP),
    "times_dp": needs(**DP),
    "over_dp": needs(**DP, variants=("reducer", "seed")),
    "times_accumulation": needs(**ACCUMULATION),
    "over_accumulation": needs(**ACCUMULATION),
    # synchronisation
    "never_synchronised": needs(shard=("none",), variants={
        "sp": dict(sp=(2, 3, 4), dp=(1,)), "dp": dict(sp=(1,), dp=(2, 3)), "both": dict(sp=(2,), dp=(2,))}),
    "replicas_not_reduced": needs(sp=(2,), dp=(2,), shard=("none",)),
    "sequence_not_reduced": needs(sp=(2,), dp=(2,), shard=("none",)),
    "micro_batches_lost": needs(**ACCUMULATION),
    "gradient_kept": needs(**STEP, warm_up=(True,), max_norm=(0, 100.0), objective=("sft", "ppo")),  # of a size that shows
    # the loss and its gradient
    "mean_of_means": needs(**TOKEN_MEAN, variants=GROUPS),
    "mean_of_non_empty_means": needs(**EMPTY_RANK, sp=(3, 4), variants=("ranks", "sequence")),
    "local_count": needs(**TOKEN_MEAN, variants={"step": SP, "micro_batch": dict(sp=(2, 3, 4), dp=(1,))}),
    "sum_of_means": needs(**TOKEN_MEAN, variants=GROUPS),
    "shares_averaged": needs(**TOKEN_MEAN, variants={"sequence": SP, "replicas": DP, "micro_batches": ACCUMULATION}),
    "all_tokens_counted": needs(**TOKEN_MEAN),
    "another_window": needs(**TOKEN_MEAN),
    "counted_before_mask": needs(**TOKEN_MEAN, sp=(1, 2, 3)),
    "micro_batches_counted": needs(**TOKEN_MEAN, **ACCUMULATION),
    "nan_of_an_empty_rank": needs(**EMPTY_RANK, **SP, variants=("value", "gradient")),
    "nan_times_mask": needs(objective=("sft", "ppo"), documents=("ordinary",)),
    "own_mean_alone": needs(**TOKEN_MEAN, **SP, variants=("logged", "trained")),
    "mean_over_sequences": needs(objective=MEANS, reduction=("token",), documents=("several",)),
    "mean_over_tokens": needs(objective=MEANS, reduction=("sequence",), documents=("several",)),
    "sequence_counts_local": needs(objective=MEANS, reduction=("sequence",), **SP,
                                   variants=("summed", "averaged", "parts")),
    # layout, packing, shift
    "token_lost": needs(length=("ragged",), **SP, objective=WITH_LABELS, variants=("after_shift", "before_shift")),
    "token_held_twice": needs(variants={"overlap": dict(layout=("contiguous",), **SP), "same_share": SP}),
    "positions_local": needs(**SP, variants=("rank", "document")),
    "positions_run_on": needs(documents=("several",)),
    "labels_cross_documents": needs(documents=("no_prompt",), objective=WITH_LABELS),
    "shift_after_split": needs(**SP, objective=WITH_LABELS, documents=("several",), variants=("cut", "rolled")),
    "labels_not_shifted": needs(objective=WITH_LABELS),
    "labels_shifted_twice": needs(objective=WITH_LABELS, variants=("whole_row", "in_the_model")),
    # DPO
    "sigmoid_of_parts": needs(**PAIRS),
    "log_probs_averaged": needs(**PAIRS),
    "log_probs_of_one_rank": needs(**PAIRS, variants=("summed", "averaged")),
    "pair_swapped": needs(objective=("dpo", "rm")),
    "reference_missing": needs(objective=("dpo",)),
    "log_probs_by_length": needs(objective=("dpo",)),
    # reward models
    "score_of_rank_end": needs(objective=("rm",), layout=("zigzag", "zigzag_doc", "stripe"), **SP),
    "score_of_first_token": needs(objective=("rm",)),
    "score_of_row_end": needs(objective=("rm",)),
    # KTO: z shows where the mean of kl is above 0, its clamp where it is below
    "kl_of_one_replica": needs(objective=("kto",), **DP, reference_head=(1.4,)),
    "kl_not_clamped": needs(objective=("kto",), reference_head=(0.7,)),
    "kl_missing": needs(variants={"kto": dict(objective=("kto",), reference_head=(1.4,)),
                                  "ppo": dict(objective=("ppo",), kl_coef=(0.05, 0.5))}),
    "desirable_swapped": needs(objective=("kto",), reference_head=(0.7, 1.4), beta=(0.5,)),
    # PPO
    "ratio_inverted": needs(objective=("ppo",)),
    "clip_wrong_side": needs(objective=("ppo",), apart=(0.1,)),
    "clip_missing": needs(objective=("ppo",), apart=(0.1,)),
    "kl_estimator": needs(objective=("ppo",), kl_coef=(0.05, 0.5)),
    "baseline_of_one_replica": needs(objective=("ppo",), advantage=("group", "group_mean"), **DP),
    "baseline_of_batch": needs(objective=("ppo",), advantage=("group", "group_mean")),
    "std_missing": needs(objective=("ppo",), advantage=("group",)),
    "reward_on_wrong_document": needs(objective=("ppo",), advantage=("group", "group_mean")),
    # side tensors
    "side_tensor_not_split": needs(**SP, variants={
        "ref_logp": dict(objective=("dpo", "kto")), "old_logp": dict(objective=("ppo",)),
        "ref_logp_of_ppo": dict(objective=("ppo",), kl_coef=(0.05, 0.5)), "advantages": dict(objective=("ppo",))}),
    "old_log_probs_shifted": needs(objective=("ppo",), apart=(0.02, 0.05), variants=("forward", "back")),
    # norm, clip, step
    "norm_of_part": needs(**SP, variants={"gradient": WHOLE, "shard": SHARDS, "used": dict(SHARDS, **CLIP)}),
    "norms_added": needs(**SP, variants={"shards": SHARDS, "copies": WHOLE, "used": dict(SHARDS, **CLIP)}),
    "norm_counts_copies": needs(variants={
        "all": dict(WHOLE, **SP), "sequence": dict(shard=("dp",), sp=(2,), dp=(2,)),
        "replicas": dict(shard=("sp",), sp=(2,), dp=(2,)), "used": dict(WHOLE, **SP, **CLIP)}),
    "norm_after_clip": needs(variants={"adamw": CLIP, "sgd": CLIP_SGD}),
    "not_clipped": needs(variants={"adamw": CLIP, "sgd": CLIP_SGD}),
    "clip_before_reduction": needs(**SP, **WHOLE, **CLIP, variants=("own", "whole")),
    "clip_by_own_norm": needs(**SP, variants={"gradient": dict(WHOLE, **CLIP), "shard": dict(SHARDS, **CLIP),
                                              "sgd": dict(WHOLE, **CLIP_SGD)}),
    "clip_turns_sign": needs(variants={"unlimited": dict(STEP, max_norm=(0,)), "sgd": CLIP_SGD}),
    "bias_correction_missing": needs(**STEP, beta2=(0.999, 0.95)),
    "decay_coupled": needs(**STEP, weight_decay=(0.1, 0.5)),
    "another_decay": needs(**STEP, weight_decay=(0.1, 0.5), variants=("half", "spared")),
    "decay_missing": needs(**STEP, weight_decay=(0.1, 0.5)),
    "another_step_number": needs(**STEP, variants={"fresh": dict(warm_up=(False,)), "later": dict(warm_up=(True,))}),
    "another_lr": needs(**STEP),
    "moments_lost": needs(**STEP, warm_up=(True,), beta2=(0.999,)),
    "decay_after_step": needs(optimizer=("adamw",), lr=(0.3,), weight_decay=(0.5,), warm_up=(False,)),
    "eps_inside_root": needs(**STEP, eps=(1e-4, 1e-3)),
    "steps_counted_by_micro_batches": needs(**STEP, **ACCUMULATION),
    # attention
    "documents_ignored": needs(documents=("several",)),
    "looks_ahead": needs(**ATTENTION),
    "causal_by_local_row": needs(**ATTENTION, **SP, variants=BY_ROW),
    "own_tokens_only": needs(**ATTENTION, **SP),
    "stale_kv": needs(**dict(RING, layout=("contiguous", "zigzag", "stripe")), length=("even",),
                      variants=("forward", "both")),
    "hop_lost": needs(**dict(RING, sp=(3, 4)), variants={"both": {}, "forward": {}, "contiguous": dict(
        layout=("contiguous",), documents=("one",), objective=("sft",), window=(0,))}),
    "outputs_averaged": needs(**RING, variants=("all_hops", "where_seen")),
    "merge_weights_swapped": needs(**RING),
    "rotary_missing": needs(documents=("several", "one"), variants=("keys", "queries", "both")),
    "lse_of_last_hop": needs(**RING, variants=("shown", "saved")),
    "kv_heads_in_turn": needs(heads=(4, 6), kv_heads=(2,)),
    "scale_missing": needs(softmax_scale=(0.2, 0.6)),
    "window_missing": needs(window=(2, 3)),
    "softcap_missing": needs(softcap=(1.0, 2.0)),
    "window_by_local_row": needs(**SP, window=(3, 4), documents=("several", "one"), variants=BY_ROW),
    "dkv_not_returned": needs(**SP, layout=UNEVEN, variants={"ring": dict(attention=("ring",)),
                                                             "llama3": dict(attention=("llama3",))}),
    "dq_of_one_hop": needs(**RING),
    "delta_missing": needs(),
    "delta_of_hop": needs(**RING, variants=("lse_right", "lse_too")),
    "dk_dv_swapped": needs(),
}

CHOICES = dict(
    sp=(1, 2, 3, 4), dp=(1, 2, 3, 4), accumulation=(1, 1, 2, 3), objective=ALL, layout=("contiguous", *UNEVEN),
    attention=("ring", "llama3", "ulysses"), hidden=(24, 32), heads=(4, 6), kv_heads=(1, 2),
    softmax_scale=(0, 0, 0.2, 0.6), window=(0, 0, 3, 9), softcap=(0, 0, 1.0, 4.0), reduction=("token", "sequence"),
    beta=(0.1, 0.5), clip_low=(0.1, 0.2), clip_high=(0.2, 0.28), kl_coef=(0, 0.05, 0.5),
    advantage=("group", "group_mean", ""), apart=(0.02, 0.05, 0.1), reference_head=(0.8, 1.0, 1.2),
    optimizer=("adamw", "adamw", "adamw", "sgd"), lr=(1e-3, 1e-2, 1e-1), beta1=(0.9, 0.8), beta2=(0.999, 0.95),
    eps=(1e-8, 1e-6), weight_decay=(0, 0.01, 0.1), max_norm=(0, 0.05, 1.0, 100.0),
    narrow_gradients=(False, False, True), shard=("none", "none", "world", "sp", "dp"), warm_up=(False, True))
# kinds of tensors that a framework may not have at hand
OPTIONAL = ("index", "cu_seqlens", "positions", "labels", "logp", "local", "norm", "grad", "param", "after", "q", "lse",
            "dout", "dq", "rewards", "groups", "kl", "scores", "values", "ref_logp", "advantages")


def variants(mistake):
    return list(MISTAKES[mistake].variants)


# Options of right steps that few packages have.
WORDS = {"sft": dict(label_smoothing=(0, 0.1), z_loss=(0, 1e-3), weights=(False, True)),
         "ppo": dict(entropy_coef=(0, 0.01), dual_clip=(0, 1.1), cispo=(0, 0, 1.1), kl_ratio=("", "token"),
                     weights=(False, True)),
         "dpo": dict(label_smoothing=(0, 0.1)), "rm": dict(center=(0, 0.1)),
         "kto": dict(desirable_weight=(1, 1.4), undesirable_weight=(1, 0.7))}


def random_config(seed, mistake="", variant=None, words=False, **fixed):
    """All that is not fixed and that the mistake leaves open is drawn from the seed. words: with options of WORDS."""
    draw = random.Random(f"config {seed} {mistake}")
    allowed = dict(CHOICES)
    if words:
        objective = list(WORDS)[seed % len(WORDS)]
        allowed.update(WORDS[objective], objective=(objective,))
    if mistake:
        variant = draw.choice(variants(mistake)) if variant is None else variant
        allowed.update(MISTAKES[mistake].values)
        allowed.update(MISTAKES[mistake].variants[variant])
    else:
        allowed["documents"] = ("ordinary",) * 8 + ("several", "one", "lopsided", "long_prompt", "no_prompt", "tiny")
        allowed["frozen"] = ("",) * 9 + ("embed_tokens", "layers.0", "norm")
        allowed["leave_out"] = ((), (), tuple(draw.sample(OPTIONAL, draw.randint(1, 4))))
    sps, dps = allowed.pop("sp"), allowed.pop("dp")
    shapes = [(sp, dp) for sp in sps for dp in dps if sp * dp <= 4]
    drawn = {name: draw.choice(x) for name, x in allowed.items()}
    drawn["sp"], drawn["dp"] = draw.choice(shapes)
    c = Config(seed=seed, mistake=mistake, variant=variant or "", **drawn)
    return fit(replace(c, **fixed))


def fit(c):
    """What does not go together is put right."""
    if c.heads % c.kv_heads:
        c.kv_heads = 1
    if c.optimizer == "sgd":
        c.weight_decay = 0
    if c.cispo:
        c.dual_clip = 0
    if c.documents in ("one", "long_prompt", "tiny") and c.objective != "sft":
        c.documents = "ordinary"
    if c.documents == "lopsided" and c.objective in ("dpo", "rm"):  # whose documents are pairs
        c.documents = "ordinary"
    return c


# ---- one step ----

def train(c, ranks, folder):
    """One optimizer step; what this rank had and did goes to the folder."""
    w = model.weights(c)
    moments = warm_up(c, w) if c.warm_up else None
    rows = make_rows(c)
    own = rows[ranks.replica] if not c.want else [rows[d][a] for a in range(c.accumulation) for d in range(c.dp)]
    if c.want and ranks.world > 1:
        own = own[ranks.rank:ranks.rank + 1]
    if ranks.rank == 0 and not c.want:
        write_llama(folder + ".model", model.llama_config(c), w)
    local, loss, micro_batches = gradients(c, ranks, w, own)
    if c.mistake == "gradient_kept":  # .grad still has the gradient of the step before, from which the moments are
        local = {name: x + moments[name][0] / (1 - c.beta1) for name, x in local.items()}
    reduced = optimizer.reduce_gradients(c, ranks, local)
    took = step(c, ranks, w, local, reduced, moments)
    write(c, ranks, folder, w, micro_batches, loss, local, took)


def gradients(c, ranks, w, rows):
    """This rank's gradients of the whole step, not reduced; the loss; the micro-batches with all that was found out."""
    w = {name: x.clone().requires_grad_(trains(c, name)) for name, x in w.items()}
    trained = {name: x for name, x in w.items() if x.requires_grad}
    micro_batches = [MicroBatch(c, row, ranks, a) for a, row in enumerate(rows)]
    look_ahead = losses.Step(c, ranks, micro_batches)
    without_gradient(c, ranks, w, look_ahead, micro_batches)
    total = None
    for m in micro_batches:
        loss = run(c, ranks, w, look_ahead, m)
        got = torch.autograd.grad(loss * seed_factor(c, ranks), list(trained.values()))
        got = got if c.narrow_gradients else [wide(g) for g in got]
        lost = total is None or c.mistake == "micro_batches_lost"  # .grad is set, not added to
        total = got if lost else [a + b for a, b in zip(total, got)]
    return dict(zip(trained, total)), look_ahead.report(micro_batches), micro_batches


def run(c, ranks, w, look_ahead, m):
    """A micro-batch's part of the step's loss."""
    m.tape = {} if m.number == 0 else None
    hidden = model.forward(c, w, m, ranks, m.tape)
    if c.objective == "rm":
        m.values = wide(hidden @ w[model.SCORE][0])
    else:
        m.of_logits = model.statistics(w, hidden, m.labels)
        m.logp = m.of_logits["logp"]
    loss = losses.OBJECTIVES[c.objective](look_ahead, m)
    if not hasattr(m, "shown"):
        m.shown = loss.detach()
    return loss


def trains(c, name):
    return not c.frozen or c.frozen not in name


def seed_factor(c, ranks):
    """What a backward pass starts from, in place of 1."""
    powers = {"times_sp": (ranks.sp, int(c.variant == "seed")), "over_sp": (ranks.sp, -int(c.variant == "seed")),
              "times_sp_squared": (ranks.sp, 1 + int(c.variant == "seed")), "over_sp_squared": (ranks.sp, -1),
              "times_dp": (ranks.dp, 1), "over_dp": (ranks.dp, -int(c.variant == "seed")),
              "times_accumulation": (c.accumulation, 1), "over_accumulation": (c.accumulation, -1)}
    size, power = powers.get(c.mistake, (1, 0))
    return float(size) ** power


@torch.no_grad()
def without_gradient(c, ranks, w, look_ahead, micro_batches):
    """Log-probs of frozen models and of KTO's mismatched completions, advantages."""
    reference = model.weights(c, 1, c.apart, c.reference_head) if has_reference(c) else None
    old = model.weights(c, 2, c.apart) if c.objective == "ppo" else None

    def log_probs(weights, m):
        return model.log_probs(weights, model.forward(c, weights, m, ranks), m.labels)

    for m in micro_batches:
        m.ref_logp = side_tensor(c, ranks, m, "ref_logp", log_probs(reference, m)) if reference else None
        m.old_logp = side_tensor(c, ranks, m, "old_logp", log_probs(old, m)) if old else None
        if c.objective == "kto":
            other = MicroBatch(c, m.row.mismatched, ranks)
            m.kl = ranks.sum(other.by_document(log_probs(w, other) - log_probs(reference, other)), "sp")
    if c.objective == "kto":
        losses.set_z(look_ahead, micro_batches)
    if c.objective == "ppo":
        losses.set_advantages(look_ahead, micro_batches)
        for m in micro_batches:
            m.advantages = side_tensor(c, ranks, m, "advantages", m.document_advantages[m.document])


def has_reference(c):
    return c.objective in ("dpo", "kto") or c.objective == "ppo" and c.kl_coef > 0


def side_tensor(c, ranks, m, name, own):
    """What comes beside the tokens. Not split: a rank takes it from the row's begin on, however its tokens lie. Shifted: each
    token has that of the one before it in the row, or behind it."""
    shifted = c.mistake == "old_log_probs_shifted" and name == "old_logp"
    if not shifted and (c.mistake != "side_tensor_not_split" or not c.variant.startswith(name)):
        return own
    whole = own.new_zeros(len(m.row))
    parts = ranks.exchange([own] * ranks.sp, [own.new_empty(len(places)) for places in m.all_places])
    whole[torch.cat(m.all_places)] = torch.cat(parts)
    return whole.roll(1 if c.variant == "forward" else -1)[m.index] if shifted else whole[:len(own)]


def warm_up(c, w):
    """A right step that every rank takes alone, on the same row: bits do not depend on the number of ranks.

    Changes w; returns the moments."""
    alone = replace(c, mistake="", variant="", sp=1, dp=1, accumulation=1, want=False, shard="none")
    got, _, _ = gradients(alone, Ranks(), w, make_rows(c)[0][:1])
    factor = optimizer.coefficient(c, optimizer.norm_of(got))
    moments = {}
    for name, gradient in got.items():
        zero = torch.zeros_like(wide(gradient))
        w[name], *moments[name] = optimizer.update(alone, w[name], wide(gradient) * factor, zero, zero, 1)
    return moments


@dataclass
class Took:
    """What the optimizer had and made, of this rank's shards."""
    norm: float
    grad: dict
    param: dict
    after: dict
    m: dict
    v: dict


def step(c, ranks, w, local, reduced, moments):
    grad, param = optimizer.shard(c, ranks, reduced), optimizer.shard(c, ranks, w)
    fresh = {name: [torch.zeros_like(wide(x))] * 2 for name, x in reduced.items()}
    m, v = (optimizer.shard(c, ranks, {name: x[i] for name, x in (moments or fresh).items()}) for i in (0, 1))
    norm = optimizer.shown_norm(c, ranks, local, grad)
    factor = optimizer.clip(c, ranks, local, grad, norm)
    after = dict(param)
    for name, gradient in grad.items():
        after[name], _, _ = optimizer.update(c, param[name], wide(gradient) * factor, m[name], v[name],
                                             2 if moments else 1)
    return Took(float(norm), grad, param, after, m if moments else {}, v if moments else {})


# ---- what is written down ----

def write(c, ranks, folder, w, micro_batches, loss, local, took):
    beyond = {name: getattr(c, name) or None for name in ("softmax_scale", "window", "softcap")}
    beyond["dtype"] = str(c.torch_dtype).removeprefix("torch.")
    if c.objective in MEANS:
        beyond["reduction"] = c.reduction
    beyond.update({name: getattr(c, name) or None for name in ("label_smoothing", "z_loss", "entropy_coef", "dual_clip", "cispo", "kl_ratio", "center")})
    if c.objective == "kto":
        beyond.update(desirable_weight=c.desirable_weight, undesirable_weight=c.undesirable_weight)
    if c.objective == "ppo":
        beyond.update({name: getattr(c, name) for name in ("clip_low", "clip_high", "kl_coef")})
        beyond.update(advantage=c.advantage or None, advantage_eps=c.advantage_eps if c.advantage == "group" else None)
    dump = Dump(folder, ranks.rank, ranks.world, ranks.sp, len(micro_batches), c.objective, c.beta, **beyond)
    for m in micro_batches:
        dump.micro_batch(m.number, **kept(c, of_micro_batch(c, m)))
        if m.tape:
            dump.attention(m.number, **kept(c, m.tape))
    write_step(c, ranks, dump, w, loss, local, took)


def write_step(c, ranks, dump, w, loss, local, took):
    kinds = kept(c, {kind: getattr(took, kind) for kind in ("grad", "param", "after", "m", "v")})
    part = {}
    if optimizer.is_sharded(c, ranks):
        part = {f"{kind}.{name}": (optimizer.shard_of(c, ranks, name, w[name])[0], w[name].numel())
                for kind, tensors in kinds.items() for name in tensors}
    how = {"optimizer": c.optimizer, "lr": c.lr, "step": 2 if took.m else 1, "max_norm": c.max_norm}
    if c.optimizer == "adamw":
        how.update(beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=c.weight_decay)
    kinds.update(kept(c, {"norm": took.norm, "local": local}))
    dump.step(loss, kinds.pop("grad", None), **kinds, part=part, **how)


def kept(c, tensors):
    return {name: x for name, x in tensors.items() if name not in c.leave_out}


def of_micro_batch(c, m):
    """All that the objective has of it."""
    got = {"index": m.index, "cu_seqlens": m.row.cu_seqlens, "ids": m.ids, "positions": m.positions}
    if c.objective == "rm":
        return dict(got, values=m.values, scores=m.scores)
    got.update(labels=m.labels, logp=m.logp)
    if c.weights:
        got["weights"] = losses.token_weights(m)
    of = {"mean_logp": c.label_smoothing and c.objective == "sft", "logits_lse": c.z_loss, "entropy": c.entropy_coef}
    got.update({name: m.of_logits[name] for name, factor in of.items() if factor})
    if has_reference(c):
        got["ref_logp"] = m.ref_logp
    if c.objective == "kto":  # a run of all replicas' rows on one rank has z of several micro-batches
        got.update({"desirable": m.row.desirable} if c.want else {"desirable": m.row.desirable, "kl": m.kl})
    if c.objective == "ppo":
        got.update(old_logp=m.old_logp, advantages=m.advantages, rewards=m.row.rewards, groups=m.row.groups)
    return got


# ---- ranks, as processes that take one step after another ----

def work(rank, world, rendezvous, jobs, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))
    groups = make_groups(world)
    for c, folder in iter(jobs.get, None):
        try:
            train(c, Ranks(rank, world, 1 if c.want else c.sp, groups), folder)
            results.put(None)
        except Exception:
            results.put(f"{c}\nrank {rank}: {traceback.format_exc()}")
    dist.destroy_process_group()


class Workers:
    """Processes for each world size, started when first needed. Use as a context."""

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["trainer"])  # imports torch once
        self.folder = tempfile.TemporaryDirectory()
        self.pools = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for processes, jobs, _ in self.pools.values():
            for process, job in zip(processes, jobs):
                job.put(None)
            for process in processes:
                process.join(5)
                process.kill()
        self.folder.cleanup()

    def pool(self, world):
        if world not in self.pools:
            jobs, results = [self.context.Queue() for _ in range(world)], self.context.Queue()
            rendezvous = f"{self.folder.name}/{world}"
            processes = [self.context.Process(target=work, daemon=True, args=(r, world, rendezvous, jobs[r], results))
                         for r in range(world)]
            for process in processes:
                process.start()
            self.pools[world] = processes, jobs, results
        return self.pools[world]

    def begin(self, c, folder):
        world = c.world
        for job in self.pool(world)[1]:
            job.put((c, folder))
        return world

    def end(self, world):
        """Waits for all ranks of what was begun first."""
        for _ in range(world):
            wrong = self.pools[world][2].get(timeout=120)
            if wrong:
                raise RuntimeError(wrong)

    def run(self, c, folder, want=None):
        """A step to folder and, if asked for, the same right step on one rank to another: at the same time."""
        begun = [self.begin(c, folder)]
        if want:
            if begun[0] == 1:  # the same process takes both
                self.end(begun.pop())
            begun.append(self.begin(c.wanted(), want))
        for world in begun:
            self.end(world)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--list", action="store_true", help="all mistakes and their variants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mistake", choices=MISTAKES, default="")
    parser.add_argument("--variant")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    given = parser.parse_args()
    if given.list:
        for name in MISTAKES:
            print(name, *variants(name))
        return
    if not given.folder:
        parser.error("give the folder of the dump, or --list")
    c = random_config(given.seed, given.mistake, given.variant, dtype=given.dtype)
    print(c)
    for path in glob.glob(f"{glob.escape(given.folder)}*/rank?.safetensors"):
        os.remove(path)  # of a larger world
    with Workers() as workers:
        workers.run(c, given.folder, given.folder + ".want")


if __name__ == "__main__":
    main()
