# SPDX-License-Identifier: MIT OR Unlicense
"""From each rank's gradient to new parameters: reduction, norm, clip, AdamW or SGD, whole or sharded.

Right: the sum over all ranks, whose losses were divided by the counts of the whole step; one norm of all parameters;
decay apart from the gradient. Computed in fp32 (fp64 for fp64), whatever the parameters' type is. Mistakes of all of
this are planted here.
"""
import torch


# ---- reduction ----

def reduce_gradients(c, ranks, local):
    """Gradients of the step, the same on all ranks."""
    over = {"never_synchronised": None, "replicas_not_reduced": "sp",
            "sequence_not_reduced": "dp"}.get(c.mistake, "world")
    if c.mistake == "clip_before_reduction":
        local = scaled(local, coefficient(c, norm_of(local)))
    flat = torch.cat([g.flatten() for g in local.values()])
    flat = ranks.sum(flat, over) if over else flat
    return unflatten(flat / averaged_over(c, ranks), local)


def averaged_over(c, ranks):
    """How many ranks the reducer averages over. It should not, where losses are divided by the whole count."""
    if c.mistake == "over_sp_squared" or c.mistake == "over_sp" and c.variant == "reducer":
        return ranks.sp
    return ranks.dp if c.mistake == "over_dp" and c.variant == "reducer" else 1


def unflatten(flat, like):
    parts = flat.split([x.numel() for x in like.values()])
    return {name: part.view(x.shape) for part, (name, x) in zip(parts, like.items())}


def scaled(tensors, factor):
    return {name: x * factor for name, x in tensors.items()}


# ---- shards ----

def shard_of(c, ranks, name, x):
    """The contiguous range of the flattened parameter that this rank updates. Without shards: all of it."""
    if c.shard == "none" or ranks.size(c.shard) == 1:
        return 0, x.numel()
    holders, place = ranks.size(c.shard), ranks.place(c.shard)
    return place * x.numel() // holders, (place + 1) * x.numel() // holders


def is_sharded(c, ranks):
    return c.shard != "none" and ranks.size(c.shard) > 1


def shard(c, ranks, tensors):
    if not is_sharded(c, ranks):
        return dict(tensors)
    return {name: x.flatten()[slice(*shard_of(c, ranks, name, x))] for name, x in tensors.items()}


# ---- norm and clip ----

def norm_of(tensors):
    return torch.sqrt(sum((x.double() ** 2).sum() for x in tensors.values()))


def whole_norm(c, ranks, own):
    """Of all parameters, each element once. own: this rank's shards, or all."""
    squares = norm_of(own) ** 2
    return torch.sqrt(ranks.sum(squares, c.shard) if is_sharded(c, ranks) else squares)


def shown_norm(c, ranks, local, own):
    """The norm as this rank reports it."""
    norm = norm_of(own)
    if c.mistake == "norm_of_part":
        return norm if is_sharded(c, ranks) else norm_of(local)
    if c.mistake == "norms_added":
        return ranks.sum(norm, c.shard if is_sharded(c, ranks) else "world")
    if c.mistake == "norm_counts_copies":
        return torch.sqrt(ranks.sum(norm ** 2, "world"))
    if c.mistake == "norm_after_clip":
        return whole_norm(c, ranks, scaled(own, coefficient(c, whole_norm(c, ranks, own))))
    if c.mistake == "clip_before_reduction" and c.variant == "own":
        return norm_of(local)
    return whole_norm(c, ranks, own)


def coefficient(c, norm):
    return min(1.0, c.max_norm / (float(norm) + 1e-6)) if c.max_norm else 1.0


def clip(c, ranks, local, own, shown):
    """The factor of all gradients, by the norm of the whole."""
    if c.mistake in ("not_clipped", "clip_before_reduction"):
        return 1.0
    if c.mistake == "clip_turns_sign":  # a limit of -1, or with its sign turned
        return -(c.max_norm or 1.0) / (float(whole_norm(c, ranks, own)) + 1e-6)
    if c.mistake == "clip_by_own_norm":
        return coefficient(c, norm_of(own) if is_sharded(c, ranks) else norm_of(local))
    if c.mistake in ("norm_of_part", "norms_added", "norm_counts_copies") and c.variant == "used":
        return coefficient(c, shown)
    return coefficient(c, whole_norm(c, ranks, own))


# ---- the step ----

def update(c, parameter, gradient, m, v, step):
    """The parameter after the step, in its own type, and the moments."""
    if c.optimizer == "sgd":
        return (parameter.to(gradient.dtype) - c.lr * gradient).to(parameter.dtype), m, v
    p = parameter.to(gradient.dtype)
    if c.mistake == "decay_coupled":
        gradient = gradient + c.weight_decay * p
    if c.mistake == "moments_lost":
        m, v = torch.zeros_like(m), torch.zeros_like(v)
    m = c.beta1 * m + (1 - c.beta1) * gradient
    v = c.beta2 * v + (1 - c.beta2) * gradient ** 2
    if c.mistake == "steps_counted_by_micro_batches":
        step *= c.accumulation
    if c.mistake == "another_step_number":
        step += 1
    lr = c.lr * (1.5 if c.mistake == "another_lr" else 1)
    change = lr * direction(c, m, v, step)
    keep = 1 - lr * c.weight_decay * decayed(c, p)
    p = (p - change) * keep if c.mistake == "decay_after_step" else p * keep - change
    return p.to(parameter.dtype), m, v


def decayed(c, parameter):
    """The part of the weight decay that this parameter gets."""
    if c.mistake in ("decay_coupled", "decay_missing"):
        return 0
    if c.mistake == "another_decay" and c.variant == "half":
        return 0.5
    return 0 if c.mistake == "another_decay" and parameter.numel() > 1000 else 1


def direction(c, m, v, step):
    if c.mistake != "bias_correction_missing":
        m, v = m / (1 - c.beta1 ** step), v / (1 - c.beta2 ** step)
    if c.mistake == "eps_inside_root":
        return m / torch.sqrt(v + c.eps)
    return m / (torch.sqrt(v) + c.eps)
