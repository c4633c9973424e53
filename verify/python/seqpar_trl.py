# SPDX-License-Identifier: MIT OR Unlicense
"""What a batch of TRL's DPOTrainer, KTOTrainer, GRPOTrainer and RewardTrainer is in the terms of `seqpar-verify ver`: for
seqpar_trainer, which records them.

A batch is one row of packed documents: each is a sequence without the padding around it. Numbers are taken where the loss
takes them. A number that is not seen there is left out, and a setting that seqpar-verify does not compute is refused.
"""
import hashlib
from contextlib import contextmanager

import torch

IGNORED = -100


class Seen:
    """What the forward passes and functions of one call of compute_loss gave. Pairs are labels and log-probs."""

    def __init__(self):
        self.policy, self.reference, self.kl = [], [], []
        self.scores = self.values = None


def filled(x, tokens, value):
    """To a row's length: labels and log-probs of the last token may be left out."""
    return torch.nn.functional.pad(x, (0, tokens - x.shape[-1]), value=value)


def pack(kept, order, rows):
    """A row of the sequences of a batch in this order, each from the first to the last token of kept. rows: (batch, tokens) by name."""
    places = [kept[b].nonzero().flatten().tolist() for b in order]
    spans = [(b, at[0], at[-1] + 1) if at else (b, 0, 0) for b, at in zip(order, places)]
    bounds = torch.tensor([0] + [end - begin for _, begin, end in spans]).cumsum(0)
    return dict({name: torch.cat([x[b, begin:end] for b, begin, end in spans]) for name, x in rows.items()},
                index=torch.arange(int(bounds[-1])), cu_seqlens=bounds)


def refuse_unless(args, trainer, **allowed):
    """Settings by name with the values that seqpar-verify computes; versions without a setting have its default."""
    for name, values in allowed.items():
        given = getattr(args, name, values[0])
        given = getattr(given, "value", given)
        if given not in values:
            raise ValueError(f"{trainer} has {name}={given!r}, which seqpar-verify does not compute; give "
                             f"{' or '.join(map(repr, values))} for the recorded step")


class _Objective:
    """names: the arrays that a whole record has, beside index, ids and cu_seqlens."""
    names = ()

    def __init__(self, trainer):
        self.trainer, self.args = trainer, trainer.args
        self.refuse()

    def refuse(self):
        pass

    @contextmanager
    def watch(self, seen, model):
        """While compute_loss runs."""
        yield

    def attach(self):
        """Before the first step; detach() takes it back."""

    def detach(self):
        pass

    def lacks(self, name):
        """Why an array is not seen."""
        return "the loss did not show it"

    def is_of_model(self):
        """Whether the model alone gives the log-probs."""
        return True

    def common(self, given, seen):
        """The rows of the batch that all losses of log-probs have."""
        tokens = given["input_ids"].shape[1]
        rows = {"ids": given["input_ids"]}
        if given.get("position_ids") is not None:
            rows["positions"] = given["position_ids"].expand_as(given["input_ids"])
        if seen.policy:
            rows["labels"], rows["logp"] = self.one(seen.policy, tokens)
        if seen.reference:
            rows["ref_logp"] = self.one(seen.reference, tokens)[1]
        return rows

    @staticmethod
    def one(passes, tokens):
        """Labels and log-probs of the whole batch, of one forward pass or of several over parts of it."""
        labels, logp = (torch.cat(x) for x in zip(*passes))
        return filled(labels, tokens, IGNORED), filled(logp, tokens, 0)

    @staticmethod
    def kept(given, rows):
        """Tokens that belong to a document: those that are attended to, and those with a label."""
        kept = given["attention_mask"].bool()
        return kept | (rows["labels"] != IGNORED) if "labels" in rows else kept


class Dpo(_Objective):
    names = ("labels", "logp", "ref_logp")
    losses = {"sigmoid": "sigmoid", "hinge": "hinge", "robust": "robust", "ipo": "ipo_mean"}

    def loss_types(self):
        given = self.args.loss_type
        return [given] if isinstance(given, str) else list(given)

    def refuse(self):
        given = self.loss_types()
        if len(given) != 1 or given[0] not in self.losses:
            raise ValueError(f"DPOTrainer has loss_type={given}, which seqpar-verify does not compute; give one of "
                             f"{', '.join(self.losses)} for the recorded step")
        refuse_unless(self.args, "DPOTrainer", f_divergence_type=("reverse_kl",), ld_alpha=(None, 1.0), use_weighting=(False,),
                      loss_weights=(None, [1.0]), rpo_alpha=(None,), reference_free=(False,))
        if given != ["robust"]:  # versions differ in whether the others apply it
            refuse_unless(self.args, "DPOTrainer", label_smoothing=(0.0,))

    def facts(self):
        kind = self.loss_types()[0]
        return dict(objective="dpo", beta=self.args.beta, loss_type=self.losses[kind],
                    label_smoothing=self.args.label_smoothing if kind == "robust" else None)

    def lacks(self, name):
        sums = name == "ref_logp" and self.args.precompute_ref_log_probs
        return "precompute_ref_log_probs=True leaves their sums alone; give False" if sums else super().lacks(name)

    def arrays(self, given, seen):
        rows, half = self.common(given, seen), given["input_ids"].shape[0] // 2
        order = [b for pair in range(half) for b in (pair, half + pair)]  # the batch has all chosen ones first
        return pack(self.kept(given, rows), order, rows)


class Kto(_Objective):
    names = ("labels", "logp", "ref_logp", "desirable", "kl")

    def refuse(self):
        refuse_unless(self.args, "KTOTrainer", loss_type=("kto",))

    def facts(self):
        return dict(objective="kto", beta=self.args.beta, desirable_weight=self.args.desirable_weight,
                    undesirable_weight=self.args.undesirable_weight)

    def lacks(self, name):
        sums = name == "ref_logp" and self.args.precompute_ref_log_probs
        return "precompute_ref_log_probs=True leaves their sums alone; give False" if sums else super().lacks(name)

    @contextmanager
    def watch(self, seen, model):
        """KL terms as they come out: of the policy, then of the reference. What their passes show is none of the loss's log-probs."""
        whole = getattr(self.trainer, "_compute_kl_logps", None)

        def watched(*given):
            policy, reference = list(seen.policy), list(seen.reference)
            logps = whole(*given)
            seen.policy[:], seen.reference[:] = policy, reference
            if logps is not None:
                seen.kl.append(logps.detach())
            return logps

        if whole is not None:
            self.trainer._compute_kl_logps = watched
        try:
            yield
        finally:
            if whole is not None:
                self.trainer._compute_kl_logps = whole

    def arrays(self, given, seen):
        rows = self.common(given, seen)
        row = pack(self.kept(given, rows), range(given["input_ids"].shape[0]), rows)
        reference = given.get("ref_KL_logps") if len(seen.kl) == 1 else seen.kl[1] if len(seen.kl) == 2 else None
        if reference is not None:
            row["kl"] = seen.kl[0] - reference
        return dict(row, desirable=given["label"].int())


class Reward(_Objective):
    names = ("scores", "values")

    def facts(self):
        return dict(objective="rm", center=self.args.center_rewards_coefficient)

    def lacks(self, name):
        return "the model has no head named score" if name == "values" else super().lacks(name)

    @contextmanager
    def watch(self, seen, model):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model

        def take_scores(module, given, output):
            seen.scores = output.logits.detach()[:, 0]

        def take_values(module, given, output):
            seen.values = output.detach()[..., 0]

        hooks = [model.register_forward_hook(take_scores)]
        if isinstance(getattr(base, "score", None), torch.nn.Module):
            hooks.append(base.score.register_forward_hook(take_values))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def arrays(self, given, seen):
        rows, half = self.common(given, seen), given["input_ids"].shape[0] // 2
        order = [b for pair in range(half) for b in (pair, half + pair)]
        if seen.values is not None and seen.values.shape == given["input_ids"].shape:
            rows["values"] = seen.values
        row = pack(self.kept(given, rows), order, rows)
        if seen.scores is not None:
            row["scores"] = seen.scores[order]
        if given.get("margin") is not None:
            row["margins"] = given["margin"].repeat_interleave(2)  # the rejected one's is not read
        return row


class Grpo(_Objective):
    names = ("labels", "logp", "old_logp", "advantages", "rewards", "groups")
    reductions = {"dapo": "token", "cispo": "token", "grpo": "sequence", "bnpo": "micro", "dr_grpo": "constant"}

    def __init__(self, trainer):
        super().__init__(trainer)
        self.rewards, self.documents, self.divisor = None, 0, None

    def refuse(self):
        args = self.args
        if args.loss_type not in self.reductions:
            raise ValueError(f"GRPOTrainer has loss_type={args.loss_type!r}, which seqpar-verify does not compute; give one of "
                             f"{', '.join(self.reductions)} for the recorded step")
        refuse_unless(args, "GRPOTrainer", top_entropy_quantile=(1.0,), off_policy_mask_threshold=(None,), entropy_coef=(0.0,),
                      use_adaptive_entropy=(False,))
        if self.kl_ratio():
            refuse_unless(args, "GRPOTrainer with beta and use_bias_correction_kl", importance_sampling_level=("token",))
        if self.is_weighted():  # its KL term is not weighted
            refuse_unless(args, "GRPOTrainer with vllm_importance_sampling_correction", beta=(0.0,))
        if args.loss_type == "cispo":
            refuse_unless(args, "GRPOTrainer with loss_type='cispo'", importance_sampling_level=("token",), delta=(None,))
        high = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
        if args.delta is not None and args.delta < high:
            raise ValueError(f"GRPOTrainer has delta={args.delta}, below 1 + epsilon_high = {high}: seqpar-verify does not compute "
                             f"that; give {high} or more")

    def kl_ratio(self):
        return "token" if self.args.beta and getattr(self.args, "use_bias_correction_kl", False) else None

    def is_weighted(self):
        return bool(getattr(self.args, "use_vllm", False) and getattr(self.args, "vllm_importance_sampling_correction", False))

    def is_of_model(self):
        return getattr(self.args, "temperature", 1.0) == 1.0

    def is_of_step(self):
        """Whether a step has whole generation batches, and so whole groups."""
        return self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0

    def advantage(self):
        """How rewards become advantages; seqpar-verify has no name for the others."""
        scaled = {"group": "group", True: "group", "none": "group_mean", False: "group_mean"}.get(self.args.scale_rewards)
        summed = getattr(self.args, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
        return scaled if summed and self.is_of_step() else None

    def facts(self):
        args, reduction = self.args, self.reductions[self.args.loss_type]
        constant = self.documents * args.world_size * args.max_completion_length if reduction == "constant" else self.divisor
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        return dict(objective="ppo", beta=None, kl_coef=args.beta, clip_low=args.epsilon, dual_clip=args.delta, clip_high=high,
                    cispo=high if args.loss_type == "cispo" else None, kl_ratio=self.kl_ratio(),
                    importance=args.importance_sampling_level, advantage=self.advantage(),
                    reduction="constant" if constant else reduction, reduction_constant=constant)

    # ---- rewards, which the loss does not get: they go with the batch ----

    def attach(self):
        trainer = self.trainer
        self.calculate = getattr(trainer, "_calculate_rewards", None)
        self.generate = getattr(trainer, "_generate_and_score_completions", None)
        if self.calculate and self.generate:
            trainer._calculate_rewards, trainer._generate_and_score_completions = self.watch_rewards, self.watch_batch

    def detach(self):
        if self.calculate and self.generate:
            self.trainer._calculate_rewards, self.trainer._generate_and_score_completions = self.calculate, self.generate

    def watch_rewards(self, *given, **named):
        self.rewards = self.calculate(*given, **named)
        return self.rewards

    def watch_batch(self, *given, **named):
        """Rewards and groups of this rank's documents are shuffled and split together with its other tensors."""
        batch = self.generate(*given, **named)
        ids, mask = batch["prompt_ids"], batch["prompt_mask"].bool()
        begin = self.args.process_index * len(ids)
        batch["seqpar_groups"] = torch.tensor([self.group(ids[i][mask[i]], begin + i) for i in range(len(ids))], device=ids.device)
        if self.is_one_reward():
            batch["seqpar_rewards"] = self.rewards[begin:begin + len(ids), 0].to(ids.device)
        return batch

    def is_one_reward(self):
        weights = self.args.reward_weights
        return self.rewards is not None and self.rewards.shape[1] == 1 and (weights is None or list(weights) == [1.0])

    def group(self, prompt, place):
        """A number for the prompt, another one for each of its groups."""
        text = f"{prompt.tolist()} {place // self.trainer.num_generations}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")

    def lacks(self, name):
        if name in ("rewards", "groups") and self.advantage() is None:
            return "advantages are not of the groups of one step alone"
        return "several reward functions, or a weight: their sum is not shown" if name == "rewards" else super().lacks(name)

    # ---- the batch ----

    def arrays(self, given, seen):
        completion, prompt = given["completion_mask"], given["prompt_mask"]
        whole = dict(given, input_ids=torch.cat([given["prompt_ids"], given["completion_ids"]], 1),
                     attention_mask=torch.cat([prompt, completion], 1))
        rows = self.common(whole, seen)
        if "labels" in rows:
            self.add_tokens(rows, given, prompt.shape[1])
        row = pack(self.kept(whole, rows), range(len(completion)), rows)
        if self.advantage():
            row.update({name: given[f"seqpar_{name}"] for name in ("rewards", "groups") if f"seqpar_{name}" in given})
        self.count(given, len(completion))
        return row

    def add_tokens(self, rows, given, prompt):
        """Arrays of completion tokens stand, as labels do, one token before."""
        counted = given["completion_mask"] * given.get("tool_mask", 1)

        def shifted(x):
            return torch.nn.functional.pad(x.expand_as(counted), (prompt - 1, 1))

        rows["labels"] = rows["labels"].masked_fill(shifted(counted) == 0, IGNORED)
        advantages = given["advantages"]
        rows["advantages"] = shifted(advantages if advantages.dim() == 2 else advantages[:, None])
        old = given.get("old_per_token_logps")
        rows["old_logp"] = rows["logp"] if old is None else shifted(old)  # None: the loss takes its own
        if given.get("ref_per_token_logps") is not None:
            rows["ref_logp"] = shifted(given["ref_per_token_logps"])
        if self.is_weighted() and given.get("importance_sampling_ratio") is not None:
            rows["weights"] = shifted(given["importance_sampling_ratio"])

    def count(self, given, documents):
        """The divisors of dr_grpo and, where a generation batch is several steps', of dapo."""
        self.documents += documents
        if self.args.loss_type == "dapo" and self.args.gradient_accumulation_steps < self.args.steps_per_generation:
            share = self.args.gradient_accumulation_steps / self.args.steps_per_generation
            self.divisor = float(given["num_items_in_batch"]) * share


OBJECTIVES = {"DPOTrainer": Dpo, "KTOTrainer": Kto, "GRPOTrainer": Grpo, "RewardTrainer": Reward}


def objective_of(trainer):
    """None: of supervised tokens, as in SFTTrainer and transformers' Trainer."""
    for kind in type(trainer).__mro__:
        package, name = kind.__module__.split(".")[0], kind.__name__
        if name == "SFTTrainer" and package == "trl" or name == "Trainer" and package == "transformers":
            return None
        if package == "trl" and name in OBJECTIVES:
            return OBJECTIVES[name](trainer)
        if package == "trl" and not name.startswith("_"):
            raise ValueError(f"TRL's {name} is not recorded; give a Trainer, SFTTrainer, {', '.join(OBJECTIVES)}, or write its arrays with "
                             "seqpar_dump.Dump")
    raise ValueError(f"a {type(trainer).__name__} is no Trainer of transformers or TRL; for a loop of your own: seqpar_record.record")
