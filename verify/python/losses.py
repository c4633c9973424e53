# SPDX-License-Identifier: MIT OR Unlicense
"""What a micro-batch adds to the step's loss: SFT, DPO, reward model, KTO, PPO with advantages of groups (GRPO).

The rule: sums and counts are added over the ranks of a sequence, over replicas and micro-batches before anything that
is not linear, and divided once. Every rank of a sequence has the same value then, and its backward pass goes to its own
tokens alone; gradients are to be summed over all ranks. Mistakes of the loss are planted here.
"""
import torch
import torch.nn.functional as F


class SumOverSequence(torch.autograd.Function):
    """The sum over the ranks of a sequence.

    Each of them starts its backward pass from the same loss, so that a seed goes to the own addend as it is. Were seeds
    summed, too, all gradients would be sp times too large."""

    @staticmethod
    def forward(ctx, x, ranks, sum_seeds):
        ctx.ranks, ctx.sum_seeds = ranks, sum_seeds
        return ranks.sum(x, "sp")

    @staticmethod
    def backward(ctx, seed):
        return ctx.ranks.sum(seed, "sp") if ctx.sum_seeds else seed, None, None


class Step:
    """What is known of the whole step before its first backward pass: counts, advantages, KTO's z."""

    def __init__(self, c, ranks, micro_batches):
        self.c, self.ranks, self.mistake, self.variant = c, ranks, c.mistake, c.variant
        # (world, micro-batches)
        self.counts = ranks.gather(torch.tensor([int(m.supervised.sum()) for m in micro_batches]))
        self.own_count = max(1, int(self.counts[ranks.rank].sum()))
        self.tokens = self._total((len(m.index) for m in micro_batches), "world")
        self.pairs = self._total((m.row.documents // 2 for m in micro_batches), "dp")
        self.documents = self._total((m.row.documents for m in micro_batches), "dp")
        for m in micro_batches:
            m.own_counts = m.by_document(torch.ones(len(m.index), dtype=torch.float64))
            m.counts = ranks.sum(m.own_counts, "sp")
        self.supervised_documents = self._total((int((m.counts > 0).sum()) for m in micro_batches), "dp")
        self.parts = self._total((int((m.own_counts > 0).sum()) for m in micro_batches), "world")

    def _total(self, numbers, over):
        return float(self.ranks.sum(torch.tensor(float(sum(numbers)), dtype=torch.float64), over))

    def whole(self, x):
        """A sum over this rank's tokens becomes one over the sequence's."""
        both = self.mistake in ("times_sp", "times_sp_squared") and self.variant == "gather"
        return SumOverSequence.apply(x, self.ranks, both)

    def report(self, micro_batches):
        """The step's loss, as a log of this rank shows it."""
        if self.mistake == "own_mean_alone":
            return sum(m.shown for m in micro_batches)
        return sum(self.ranks.sum(m.shown * m.divisor, "dp") / m.divisor for m in micro_batches)


# ---- means over tokens: SFT and PPO ----

def sft(step, m):
    e, of = step.c.label_smoothing, m.of_logits
    loss = (1 - e) * -m.logp - (e * of["mean_logp"] if e else 0)
    return mean_of_tokens(step, m, loss + step.c.z_loss * of["logits_lse"] ** 2 if step.c.z_loss else loss)


def ppo(step, m):
    ratio = torch.exp(m.old_logp - m.logp if step.mistake == "ratio_inverted" else m.logp - m.old_logp)
    clipped = ratio if step.mistake == "clip_missing" else ratio.clamp(1 - step.c.clip_low, 1 + step.c.clip_high)
    advantages = m.advantages.to(ratio.dtype)
    worse = torch.minimum if step.mistake == "clip_wrong_side" else torch.maximum
    loss = worse(-advantages * ratio, -advantages * clipped)
    if step.c.dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * step.c.dual_clip), loss)
    if step.c.cispo:
        loss = -ratio.detach().clamp(max=step.c.cispo) * advantages * m.logp
    if step.c.entropy_coef:
        loss = loss - step.c.entropy_coef * m.of_logits["entropy"]
    if step.c.kl_coef and step.mistake != "kl_missing":
        apart = m.ref_logp - m.logp
        kl = -apart if step.mistake == "kl_estimator" else torch.exp(apart) - apart - 1
        loss = loss + step.c.kl_coef * (kl * torch.exp(m.logp - m.old_logp) if step.c.kl_ratio else kl)
    return mean_of_tokens(step, m, loss)


def mean_of_tokens(step, m, loss):
    masked = (~m.supervised).nonzero()
    if step.mistake == "nan_times_mask" and len(masked):
        m.logp = m.logp.detach().index_fill(0, masked[0], -torch.inf)  # as it is dumped
        loss = loss.index_fill(0, masked[0], torch.inf) * m.supervised
    elif step.mistake == "nan_of_an_empty_rank" and step.variant == "gradient":
        loss = loss * m.supervised  # 0 times NaN is NaN, and so is the gradient
    else:
        loss = torch.where(m.supervised, loss, torch.zeros_like(loss))
    if step.c.weights:
        loss = loss * token_weights(m).to(loss.dtype)
    own = (loss * weights(step, m).to(loss.dtype)).sum()
    if step.mistake == "local_count":
        of_this = max(1, int(m.supervised.sum())) * step.c.accumulation
        m.divisor = step.own_count if step.variant == "step" else of_this
        return step.whole(loss.sum()) / m.divisor
    if step.mistake == "own_mean_alone":
        m.shown = loss.sum().detach() / step.own_count
        if step.variant == "trained":
            return loss.sum() / step.own_count / step.ranks.world
    if step.mistake == "nan_of_an_empty_rank" and not m.supervised.any():
        own = own + torch.nan  # a mean over nothing, whose gradient torch's cross-entropy leaves 0
    return step.whole(own)


def token_weights(m):
    """0.5, 1 or 1.5, by the token's id and place, so that each rank has those of its own."""
    return 0.5 + ((m.ids * 7 + m.positions) % 3).double() / 2


def weights(step, m):
    """What each token's loss is multiplied by. All ways to take a mean are one of these."""
    ones = torch.ones(len(m.index), dtype=torch.float64)
    by_sequence = (step.c.reduction == "sequence") != (step.mistake in ("mean_over_sequences", "mean_over_tokens"))
    if by_sequence:
        return _of_sequences(step, m)[m.document]
    if step.mistake == "all_tokens_counted":
        return ones / step.tokens
    counts, own = _groups(step, m)
    another = {"another_window": counts.sum() - 1, "micro_batches_counted": step.ranks.dp * step.c.accumulation,
               "counted_before_mask": (counts.sum() + step.tokens - step.documents) // 2}
    if step.mistake in another:
        return ones / another[step.mistake]
    if step.mistake == "shares_averaged":
        return ones / counts.sum() / len(counts)
    if step.mistake in ("mean_of_means", "sum_of_means", "mean_of_non_empty_means"):
        return ones / own.clamp(min=1) / {"mean_of_means": len(counts), "sum_of_means": 1,
                                          "mean_of_non_empty_means": int((counts > 0).sum())}[step.mistake]
    if step.mistake == "nan_of_an_empty_rank" and step.variant == "gradient":
        return ones * own / own / counts.sum()
    return ones / counts.sum()


def _of_sequences(step, m):
    """Of the tokens of each document: the mean over documents of their means."""
    if step.mistake != "sequence_counts_local":
        return 1 / m.counts.clamp(min=1) / step.supervised_documents
    number = {"summed": step.supervised_documents, "averaged": step.supervised_documents * step.ranks.sp,
              "parts": step.parts}[step.variant]
    return 1 / m.own_counts.clamp(min=1) / number


def _groups(step, m):
    """Counts of all groups that have a mean of their own, and that of this token's group."""
    c, ranks = step.counts.to(torch.float64), step.ranks
    rows = c.view(ranks.dp, ranks.sp, -1)
    counts, own = {"rows": (rows.sum(1), (ranks.replica, m.number)),
                   "replicas": (rows.sum((1, 2)), (ranks.replica,)),
                   "micro_batches": (rows.sum((0, 1)), (m.number,)),
                   "sequence": (rows.sum((0, 2)), (ranks.member,))}.get(step.variant, (c, (ranks.rank, m.number)))
    return counts.flatten(), counts[own]


# ---- pairs: DPO and reward models ----

def dpo(step, m):
    h = m.by_document(m.logp) - (0 if step.mistake == "reference_missing" else m.by_document(m.ref_logp))
    if step.mistake == "log_probs_by_length":
        h = h / m.counts.clamp(min=1).to(h.dtype)
    h, sp = h[0::2] - h[1::2], step.ranks.sp
    if step.mistake == "log_probs_of_one_rank":
        loss = _of_pairs(step, h)
        m.shown = loss.detach()
        return loss / (sp if step.variant == "averaged" else 1)
    if step.mistake == "sigmoid_of_parts":
        return step.whole(_of_pairs(step, h) / sp)
    return _of_pairs(step, step.whole(h) / (sp if step.mistake == "log_probs_averaged" else 1))


def _of_pairs(step, margin):
    if step.mistake == "pair_swapped":
        margin = -margin
    x, e = margin * (step.c.beta if step.c.objective == "dpo" else 1), step.c.label_smoothing
    return -(F.logsigmoid(x) * (1 - e) + F.logsigmoid(-x) * e).sum() / step.pairs


def rm(step, m):
    here = m.index == score_places(step, m)[:, None]  # (documents, tokens)
    m.scores = step.whole(torch.where(here, m.values, torch.zeros_like(m.values)).sum(1))
    chosen, rejected = m.scores[0::2], m.scores[1::2]
    return _of_pairs(step, chosen - rejected) + step.c.center * ((chosen + rejected) ** 2).sum() / step.pairs


def score_places(step, m):
    """The token whose value is a document's score: its last."""
    begins, ends = m.row.cu_seqlens[:-1], m.row.cu_seqlens[1:]
    if step.mistake == "score_of_first_token":
        return begins
    if step.mistake == "score_of_row_end":
        return torch.full_like(ends, len(m.row) - 1)
    if step.mistake != "score_of_rank_end":
        return ends - 1
    last = torch.zeros_like(ends)
    for places in m.all_places:  # a later rank's end takes the place of an earlier one's
        last[m.row.document_of(places)] = places
    return last


# ---- KTO ----

def kto(step, m):
    h = step.whole(m.by_document(m.logp - m.ref_logp))
    desirable = m.row.desirable.bool() != (step.mistake == "desirable_swapped")
    gain = torch.where(desirable, h - m.z, m.z - h)
    weight = torch.where(desirable, step.c.desirable_weight, step.c.undesirable_weight)
    return (weight * (1 - torch.sigmoid(step.c.beta * gain))).sum() / step.documents


def set_z(step, micro_batches):
    """z of each micro-batch: the mean over the documents of all replicas, not below 0."""
    own = torch.stack([torch.stack((m.kl.sum(), m.kl.new_tensor(len(m.kl)))) for m in micro_batches])
    if step.mistake == "kl_of_one_replica":
        whole = own
    elif step.c.want:  # one rank has the replicas' rows one after the other
        whole = own.view(-1, step.c.dp, 2).sum(1).repeat_interleave(step.c.dp, 0)
    else:
        whole = step.ranks.sum(own, "dp")
    for m, (total, number) in zip(micro_batches, whole):
        z = total / number if step.mistake != "kl_missing" else torch.zeros_like(total)
        m.z = z if step.mistake == "kl_not_clamped" else z.clamp(min=0)


# ---- PPO's advantages ----

def set_advantages(step, micro_batches):
    """Of each document: its reward less the mean of its group, over the group's standard deviation if asked for."""
    most = 8
    table = torch.full((len(micro_batches), most, 2), -1.0, dtype=torch.float64)
    for m in micro_batches:
        table[m.number, :m.row.documents] = torch.stack((m.row.rewards, m.row.groups.double()), 1)
    known = (table if step.mistake == "baseline_of_one_replica" else step.ranks.gather(table, "dp")).view(-1, 2)
    known = known[known[:, 1] >= 0]
    for m in micro_batches:
        advantages = torch.stack([_advantage(step, known, r, g) for r, g in zip(m.row.rewards, m.row.groups)])
        m.document_advantages = advantages.roll(1) if step.mistake == "reward_on_wrong_document" else advantages


def _advantage(step, known, reward, group):
    rewards = known[:, 0] if step.mistake == "baseline_of_batch" else known[known[:, 1] == group, 0]
    if not step.c.advantage:
        return reward
    centred = reward - rewards.mean()
    if step.c.advantage != "group" or step.mistake == "std_missing":
        return centred
    return centred / (rewards.std(correction=0) + step.c.advantage_eps)


OBJECTIVES = {"sft": sft, "dpo": dpo, "rm": rm, "kto": kto, "ppo": ppo}
