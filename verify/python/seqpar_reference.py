# SPDX-License-Identifier: MIT OR Unlicense
"""Right values of the operations of a training step, to compare with: arrays of numpy or torch in, the same out.

    import seqpar_reference
    torch.testing.assert_close(mine, seqpar_reference.attention(q, k, v, cu_seqlens=cu_seqlens))

    positions, labels                       of packed documents
    places, split, unsplit, pack            which rank or row has which token
    attention, attention_gradient, merge
    log_probs                               from logits, with what terms of losses take
    sft, dpo, rm, kto, ppo, value           losses of a step, with gradient=True their derivatives
    advantages, gae                         of PPO
    norm, clip, adamw, sgd                  of gradients
    step                                    log-probs, loss, gradients and update of a model

Nothing is computed here: each call writes a dump and reads what `seqpar-verify run` makes of it, in fp64. What that refuses is a
ValueError with its sentence.

Arrays of tokens are of one row of packed documents; ones in front, as a batch of one row has them, are kept. cu_seqlens, (documents
+ 1), says where documents begin and where the last one ends; None: the row is one document. Results are on the device of the array
that they belong to and have its dtype, rounded once; loss, norm and lse have float64 where that array has, else float32; integers
that are computed have int64.
"""
import json
import math
import os
import re
import subprocess
import tempfile

import numpy

from seqpar_dump import ATTENTION, Dump
from seqpar_verify import binary

REAL = {"F64": "float64", "F32": "float32", "I64": "int64", "I32": "int32"}


# ---- calling the binary ----

def _read(path):
    """Shape, dtype and bytes by name, of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def _write(folder, ranks, sp, step, keywords):
    for rank, rows in enumerate(ranks):
        dump = Dump(folder, rank, len(ranks), sp=sp, accumulation=len(rows), **keywords)
        for number, row in enumerate(rows):
            dump.micro_batch(number, **{name: x for name, x in row.items() if name not in ATTENTION})
            dump.attention(number, **{name: x for name, x in row.items() if name in ATTENTION})
        dump.step(**step)


def _run(operation, ranks, *words, sp=1, step=None, **keywords):
    """What `seqpar-verify run OPERATION` makes of ranks[rank][micro-batch][name]: tensors by name, for each rank."""
    with tempfile.TemporaryDirectory(prefix="seqpar_reference.") as folder:
        dump, right = os.path.join(folder, "dump"), os.path.join(folder, "right")
        _write(dump, ranks, sp, step or {}, keywords)
        said = subprocess.run([binary(), "run", operation, dump, "--out", right, *map(str, words)],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if said.returncode:
            raise (ValueError if said.returncode in (2, 3) else RuntimeError)(_sentence(said.stderr, dump))
        return [_read(os.path.join(right, f"rank{rank}.safetensors")) for rank in range(len(os.listdir(right)))]


def _sentence(said, dump):
    """Without the temporary folder, of which the caller knows nothing."""
    return re.sub(rf"{re.escape(dump)}(/rank0\.safetensors)?: |{re.escape(dump)}/|^error: ", "", said.strip())


# ---- arrays ----

def _array(x):
    return x if hasattr(x, "detach") else numpy.asarray(x)


def _tokens(x, trailing=0):
    """How many tokens an array has that is to have so many dimensions behind them. The binary refuses others."""
    shape = _array(x).shape
    return shape[max(0, len(shape) - 1 - trailing)] if shape else 1


def _result(tensor, like, dtype=None, shape=None):
    """Numbers that were computed, as an array of the kind of `like`: of its dtype, or of that which is named."""
    name, own_shape, data = tensor
    x = numpy.frombuffer(data, numpy.dtype(REAL[name]).newbyteorder("<")).astype(REAL[name]).reshape(own_shape if shape is None else shape)
    like = _array(like)
    if not hasattr(like, "detach"):
        return x.astype(dtype or like.dtype)
    import torch
    return torch.from_numpy(x).to(device=like.device, dtype=getattr(torch, dtype) if dtype else like.dtype)


def _wide(x):
    return "float64" if str(_array(x).dtype).endswith("float64") else "float32"


def _moved(tensor, like, shape):
    """Bytes that were moved, as an array of the dtype of `like`."""
    data = bytearray(tensor[2]) if tensor else bytearray()
    if not hasattr(like, "detach"):
        return numpy.frombuffer(data, like.dtype).reshape(shape)
    import torch
    x = torch.frombuffer(data, dtype=like.dtype) if data else torch.empty(0, dtype=like.dtype)
    return x.reshape(shape).to(like.device)


def _row(tokens, cu_seqlens=None, **arrays):
    """A micro-batch that is not split."""
    cu_seqlens = [0, tokens] if cu_seqlens is None else cu_seqlens
    return {"index": numpy.arange(tokens), "cu_seqlens": cu_seqlens, **{name: x for name, x in arrays.items() if x is not None}}


def _end(cu_seqlens):
    return int(cu_seqlens[-1]) if len(cu_seqlens) else 0


def _is_list(x):
    """Of arrays, one for each micro-batch; a list of numbers is one array."""
    return isinstance(x, (list, tuple)) and len(x) > 0 and numpy.ndim(x[0]) > 0


def _rows(first, **arrays):
    """The micro-batches of a step. first: the name of an array that is there in any case: of tokens, or cu_seqlens."""
    lists = {name: x if _is_list(x) else [x] for name, x in arrays.items() if x is not None}
    count = len(lists[first])
    for name, x in lists.items():
        if len(x) != count:
            raise ValueError(f"{name} has {len(x)} micro-batches and {first} has {count}; give one array for each")
    each = [{name: x[i] for name, x in lists.items()} for i in range(count)]
    return [_row(_end(row[first]) if first == "cu_seqlens" else _tokens(row[first]), **row) for row in each]


def _replicas(rows, replicas):
    """The rows of each data-parallel replica: the first ones are those of replica 0."""
    if replicas < 1 or len(rows) % replicas:
        raise ValueError(f"replicas is {replicas} and there are {len(rows)} micro-batches; give as many for each replica")
    each = len(rows) // replicas
    return [rows[i * each:(i + 1) * each] for i in range(replicas)]


# ---- packed documents ----

def positions(cu_seqlens):
    """Each token's place in its document: (cu_seqlens[-1])."""
    made = _run("positions", [[_row(_end(cu_seqlens), cu_seqlens)]])
    return _result(made[0]["0.positions"], cu_seqlens, "int64")


def labels(ids, cu_seqlens=None, labels=None):
    """The token to predict at each one: the next of its document, -100 at its last. ids: (tokens). labels, (tokens): where these are
    -100, as in a prompt, the result is."""
    made = _run("labels", [[_row(_tokens(ids), cu_seqlens, ids=ids, labels=labels)]])
    return _result(made[0]["0.labels"], ids, "int64", _array(ids).shape)


def _flat(x):
    """(tokens, ...) as (tokens, 1, all of it), which a dump can have."""
    if not x.shape:
        raise ValueError("a number has no tokens to be split; give an array (tokens, ...)")
    return x.reshape(len(x), 1, math.prod(x.shape[1:]))


def _spread(tokens, sp, layout, cu_seqlens, x=None):
    return _run("split", [[_row(tokens, cu_seqlens, q=x)]], "--sp", sp, "--layout", layout)


def places(tokens, sp, layout="zigzag", cu_seqlens=None):
    """The indices in the row of the tokens that each of sp ranks holds: a list of sp arrays. layout: contiguous, zigzag, stripe, or
    zigzag-doc, which cuts each document of cu_seqlens."""
    made = _spread(tokens, sp, layout, cu_seqlens)
    like = numpy.empty(0, int) if cu_seqlens is None else cu_seqlens
    return [_result(rank["0.index"], like, "int64") for rank in made]


def split(x, sp, layout="zigzag", cu_seqlens=None):
    """What each of sp ranks holds of x, (tokens, ...): a list of sp arrays. layout: as in places."""
    x = _array(x)
    made = _spread(_tokens(x, x.ndim), sp, layout, cu_seqlens, _flat(x))
    return [_moved(rank.get("0.q"), x, (-1, *x.shape[1:])) for rank in made]


def unsplit(shares, index=None, layout="zigzag", cu_seqlens=None):
    """The row (tokens, ...) of which each rank has a share: the reverse of split. index: the places of each share's tokens, a list;
    None: as layout has them."""
    shares = [_array(x) for x in shares]
    if index is None:
        index = places(sum(map(len, shares)), len(shares), layout, cu_seqlens)
    if len(index) != len(shares):
        raise ValueError(f"there are {len(shares)} shares and {len(index)} arrays of index; give one for each")
    ranks = [[{"index": i, "q": _flat(x)}] for i, x in zip(index, shares)]
    made = _run("gather", ranks, sp=len(shares))
    return _moved(made[0]["0.q"], shares[0], (-1, *shares[0].shape[1:]))


def pack(ids, cu_seqlens, tokens, labels=None):
    """Documents in rows of at most so many tokens: a list of dicts with ids, positions, labels and cu_seqlens of a row. ids: (tokens of
    all documents). labels: as in labels()."""
    made = _run("pack", [[_row(_tokens(ids), cu_seqlens, ids=ids, labels=labels)]], "--tokens", tokens)[0]
    rows = [{name: made[f"{number}.{name}"] for name in ("ids", "positions", "labels", "cu_seqlens")}
            for number in range(sum(name.endswith(".index") for name in made))]
    return [{name: _result(x, ids, "int64") for name, x in row.items()} for row in rows]


# ---- attention ----

def attention(q, k, v, cu_seqlens=None, lse=False, softmax_scale=None, window=None, softcap=None):
    """Causal attention within each document: out (tokens, heads, dim of v); with lse=True also the logarithm of the softmax's sum
    (tokens, heads), as a pair. q: (tokens, heads, dim); k, v: (tokens, kv_heads, dim), each for heads / kv_heads adjacent heads; all
    after rotary. softmax_scale: 1 / sqrt(dim). window: a token sees itself and window - 1 before it. softcap: scores are
    softcap tanh(score / softcap)."""
    made = _run("attention", [[_row(_tokens(q, 2), cu_seqlens, q=q, k=k, v=v)]], "--dtype", "float64",
                softmax_scale=softmax_scale, window=window, softcap=softcap)[0]
    out = _result(made["0.out"], q, shape=(*_array(q).shape[:-1], _array(v).shape[-1]))
    return (out, _result(made["0.lse"], q, _wide(q), _array(q).shape[:-1])) if lse else out


def attention_gradient(q, k, v, dout, cu_seqlens=None, softmax_scale=None, window=None, softcap=None):
    """dq, dk, dv: gradients of a loss whose gradient by attention's out is dout (tokens, heads, dim of v). The rest as in attention."""
    made = _run("attention-gradient", [[_row(_tokens(q, 2), cu_seqlens, q=q, k=k, v=v, dout=dout)]], "--dtype", "float64",
                softmax_scale=softmax_scale, window=window, softcap=softcap)[0]
    return tuple(_result(made[f"0.d{name}"], x, shape=_array(x).shape) for name, x in (("q", q), ("k", k), ("v", v)))


def merge(part_out, part_lse):
    """out (tokens, heads, dim) and lse (tokens, heads) of attention over all keys, from parts over some keys each, as the hops of a ring
    give them. part_out: (parts, tokens, heads, dim); part_lse: (parts, tokens, heads), natural logarithm, -inf where a part has no key."""
    made = _run("merge", [[{"part_out": part_out, "part_lse": part_lse}]], "--dtype", "float64")[0]
    return _result(made["0.out"], part_out), _result(made["0.lse"], part_lse, _wide(part_lse))


# ---- losses of a step ----
#
# Each array may also be a list of arrays, one for each micro-batch of the step. replicas: of how many data-parallel replicas these
# are, the first ones of replica 0. reduction: token, the mean over all supervised tokens of the step; sequence, the mean over
# documents of each one's mean; constant, the sum / reduction_constant; micro and replica, the mean over micro-batches, or replicas,
# of each one's mean. A token without a label (-100) has no loss. gradient=True: (loss, derivatives), a dict of arrays by the name
# of the argument: logp or values, and mean_logp, logits_lse and entropy where the loss takes them.

def _loss(objective, rows, first, replicas, gradient, **keywords):
    like = first[0] if _is_list(first) else first
    ranks = _replicas(rows, replicas)
    made = _run("loss-gradient" if gradient else "loss", ranks, "--dtype", "float64", objective=objective, **keywords)
    loss = _result(made[0]["loss"], like, _wide(like))
    if not gradient:
        return loss
    names = [name for name in ("logp", "values", "mean_logp", "logits_lse", "entropy") if f"0.d{name}" in made[0]]
    found = {name: [_result(rank[f"{number}.d{name}"], like) for rank in made for number in range(len(ranks[0]))] for name in names}
    return loss, {name: x if _is_list(first) else x[0] for name, x in found.items()}


def log_probs(logits, labels):
    """A dict of arrays (tokens): logp, of the labels (0 where a label is -100); mean_logp, the mean of the log-probs of all ids;
    logits_lse, the logarithm of the sum of exponentials; entropy. logits: (tokens, vocabulary); labels: (tokens), shifted."""
    made = _run("log-probs", [[_row(_tokens(labels), None, labels=labels, logits=_array(logits).reshape(-1, _array(logits).shape[-1]))]],
                "--dtype", "float64")[0]
    return {name: _result(made[f"0.{name}"], logits, shape=_array(labels).shape)
            for name in ("logp", "mean_logp", "logits_lse", "entropy")}


def sft(labels, logp, *, weights=None, mean_logp=None, logits_lse=None, cu_seqlens=None, replicas=1, gradient=False, reduction=None,
        reduction_constant=None, label_smoothing=None, z_loss=None):
    """The loss of a step: the mean of -logp. labels: (tokens), shifted; logp: (tokens), log-probs of the labels. weights: (tokens), of
    each token's loss. label_smoothing needs mean_logp, (tokens), the mean of the log-probs of all ids; z_loss needs logits_lse, (tokens)."""
    rows = _rows("labels", cu_seqlens=cu_seqlens, labels=labels, logp=logp, weights=weights, mean_logp=mean_logp, logits_lse=logits_lse)
    return _loss("sft", rows, logp, replicas, gradient, reduction=reduction, reduction_constant=reduction_constant,
                 label_smoothing=label_smoothing, z_loss=z_loss)


def dpo(labels, logp, ref_logp, cu_seqlens, *, replicas=1, gradient=False, beta=0.1, loss_type=None, label_smoothing=None,
        simpo_gamma=None):
    """The loss of a step: the mean over pairs. labels, logp, and ref_logp under the reference model: (tokens). Documents 2i and 2i + 1 of
    cu_seqlens are chosen and rejected. loss_type: sigmoid, robust, hinge, ipo, ipo_mean or simpo."""
    rows = _rows("labels", cu_seqlens=cu_seqlens, labels=labels, logp=logp, ref_logp=ref_logp)
    return _loss("dpo", rows, logp, replicas, gradient, beta=beta, loss_type=loss_type, label_smoothing=label_smoothing,
                 simpo_gamma=simpo_gamma)


def rm(values, cu_seqlens, *, replicas=1, gradient=False, center=None):
    """The loss of a step of a reward model: the mean over pairs of -log sigmoid(chosen - rejected score). values: (tokens); a document's
    score is that of its last token. Documents 2i and 2i + 1 are chosen and rejected. center: of (chosen + rejected)^2."""
    return _loss("rm", _rows("values", cu_seqlens=cu_seqlens, values=values), values, replicas, gradient, center=center)


def kto(labels, logp, ref_logp, desirable, kl, cu_seqlens, *, replicas=1, gradient=False, beta=0.1, desirable_weight=None,
        undesirable_weight=None):
    """The loss of a step: the mean over documents. labels, logp, ref_logp: (tokens). desirable: (documents), 1 or 0. kl: (documents), the
    sum of policy - reference log-probs of the mismatched answer. desirable_weight, undesirable_weight: factors of their losses."""
    rows = _rows("labels", cu_seqlens=cu_seqlens, labels=labels, logp=logp, ref_logp=ref_logp, desirable=desirable, kl=kl)
    return _loss("kto", rows, logp, replicas, gradient, beta=beta, desirable_weight=desirable_weight,
                 undesirable_weight=undesirable_weight)


def ppo(labels, logp, old_logp, advantages, *, ref_logp=None, weights=None, entropy=None, cu_seqlens=None, replicas=1,
        gradient=False, reduction=None, reduction_constant=None, clip_low=None, clip_high=None, kl_coef=None, dual_clip=None,
        cispo=None, entropy_coef=None, importance=None, kl_ratio=None):
    """The loss of a step of the policy, clipped to 1 - clip_low .. 1 + clip_high (0.2). All arrays: (tokens). kl_coef needs ref_logp,
    entropy_coef needs entropy. cispo: the largest ratio, in place of the clip. kl_ratio: token, the KL term is multiplied by the
    token's ratio. importance: token, or sequence (GSPO), which needs cu_seqlens as reduction="sequence" does."""
    rows = _rows("labels", cu_seqlens=cu_seqlens, labels=labels, logp=logp, old_logp=old_logp, advantages=advantages, ref_logp=ref_logp,
                 weights=weights, entropy=entropy)
    return _loss("ppo", rows, logp, replicas, gradient, reduction=reduction, reduction_constant=reduction_constant, clip_low=clip_low,
                 clip_high=clip_high, kl_coef=kl_coef, dual_clip=dual_clip, cispo=cispo, entropy_coef=entropy_coef,
                 importance=importance, kl_ratio=kl_ratio)


def value(labels, values, returns, *, old_values=None, cu_seqlens=None, replicas=1, gradient=False, reduction=None, reduction_constant=None,
          clip_value=None):
    """The loss of a step of PPO's critic: the mean of (values - returns)^2 / 2. All arrays: (tokens). clip_value needs old_values."""
    rows = _rows("labels", cu_seqlens=cu_seqlens, labels=labels, values=values, returns=returns, old_values=old_values)
    return _loss("value", rows, values, replicas, gradient, reduction=reduction, reduction_constant=reduction_constant,
                 clip_value=clip_value)


def advantages(rewards, groups, cu_seqlens, *, labels=None, replicas=1, advantage="group", advantage_eps=None):
    """PPO's advantages, (tokens), or a list where the arguments are lists, one for each micro-batch. rewards, groups: (documents);
    documents of one group answer one prompt. advantage: group, (reward - mean) / (deviation + advantage_eps); group_mean, without the
    division; rloo, reward - mean of the others. labels: (tokens); a token without a label has 0, as padding has."""
    rows = _rows("cu_seqlens" if labels is None else "labels", cu_seqlens=cu_seqlens, labels=labels, rewards=rewards, groups=groups)
    ranks = _replicas(rows, replicas)
    made = _run("advantages", ranks, "--dtype", "float64", objective="ppo", advantage=advantage, advantage_eps=advantage_eps)
    like = rewards[0] if _is_list(rewards) else rewards
    found = [_result(rank[f"{number}.advantages"], like, _wide(like)) for rank in made for number in range(len(ranks[0]))]
    return found if _is_list(rewards) else found[0]


def gae(labels, values, cu_seqlens=None, *, token_rewards=None, rewards=None, replicas=1, gamma=None, gae_lambda=None):
    """Generalised advantages and returns, as a pair of (tokens), not whitened: A_t = r_t + gamma V_{t+1} - V_t + gamma gae_lambda
    A_{t+1} within each document. labels, values and token_rewards, r: (tokens). rewards: (documents), in the place of token_rewards:
    r of a document's last token with a label. A token without a label has no value and no reward."""
    rows = _rows("labels", cu_seqlens=cu_seqlens, labels=labels, values=values, token_rewards=token_rewards, rewards=rewards)
    ranks = _replicas(rows, replicas)
    made = _run("gae", ranks, "--dtype", "float64", objective="ppo", advantage="gae", gamma=gamma, gae_lambda=gae_lambda)
    like = values[0] if _is_list(values) else values
    found = [[_result(rank[f"{number}.{name}"], like, _wide(like)) for rank in made for number in range(len(ranks[0]))]
             for name in ("advantages", "returns")]
    return tuple(x if _is_list(values) else x[0] for x in found)


# ---- gradients ----
#
# Parameters and gradients are a dict of arrays, a list of them, or one array; results are of the same form.

def _named(x):
    if x is None or isinstance(x, dict):
        return x or {}
    return {str(i): y for i, y in enumerate(x)} if isinstance(x, (list, tuple)) else {"x": x}


def _formed(like, found):
    return found if isinstance(like, dict) else list(found.values()) if isinstance(like, (list, tuple)) else found["x"]


def norm(gradients):
    """The root of the sum of the squares of all gradients."""
    first = next(iter(_named(gradients).values()), 0.0)
    return _result(_run("norm", [[{}]], "--dtype", "float64", step={"gradients": _named(gradients)})[0]["norm"], first, _wide(first))


def _after(params, gradients, m=None, v=None, **keywords):
    step = {"gradients": _named(gradients), "param": _named(params), "m": _named(m), "v": _named(v), **keywords}
    made = _run("optimizer", [[{}]], "--dtype", "float64", step=step)[0]
    return _formed(params, {name: _result(made[f"after.{name}"], x) for name, x in _named(params).items()})


def _zeros(x):
    return x.new_zeros(x.shape) if hasattr(x, "detach") else numpy.zeros_like(x)


def clip(gradients, max_norm):
    """Gradients times max_norm / (norm + 1e-6) where that is below 1."""
    zeros = {name: _zeros(x) for name, x in _named(gradients).items()}
    moved = _after(zeros, _named(gradients), optimizer="sgd", lr=1.0, max_norm=max_norm)  # by -1 times the clipped gradient
    return _formed(gradients, {name: -x for name, x in moved.items()})


def adamw(params, gradients, m=None, v=None, *, lr, beta1=None, beta2=None, eps=None, weight_decay=None, step=1, max_norm=None):
    """Parameters after AdamW's step number `step` (1: the first). m, v: exponential averages before it, absent: 0. Gradients are as
    before the clip to max_norm."""
    return _after(params, gradients, m, v, optimizer="adamw", lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
                  step=step, max_norm=max_norm)


def sgd(params, gradients, *, lr, weight_decay=None, max_norm=None):
    """Parameters after a step of SGD without momentum; weight_decay is added to the gradient. Gradients are as before the clip."""
    return _after(params, gradients, optimizer="sgd", lr=lr, weight_decay=weight_decay, max_norm=max_norm)


# ---- a model ----

def step(model, ids, labels, *, cu_seqlens=None, ref_logp=None, replicas=1, objective="sft", reduction=None, reduction_constant=None,
         beta=0.1, m=None, v=None, **optimizer):
    """A step of sft or dpo of a Llama-type model, a folder in Hugging Face's form: a dict with loss, norm, logp (tokens; 0 without a
    label), gradients by parameter and, with optimizer="adamw" or "sgd" and lr, after, the parameters. All in float64. ids, labels and,
    of dpo, ref_logp: (tokens). The rest as in sft, dpo (sigmoid) and adamw."""
    rows = _rows("ids", ids=ids, labels=labels, cu_seqlens=cu_seqlens, ref_logp=ref_logp)
    ranks = _replicas(rows, replicas)
    made = _run("step", ranks, "--dtype", "float64", "--model", os.fspath(model), step={"m": _named(m), "v": _named(v), **optimizer},
                objective=objective, reduction=reduction, reduction_constant=reduction_constant, beta=beta)
    like = ids[0] if _is_list(ids) else ids
    logp = [_result(rank[f"{number}.logp"], like, "float64") for rank in made for number in range(len(ranks[0]))]
    found = {name: _result(x, like, "float64") for name, x in made[0].items() if x[0] == "F64"}
    return {"loss": found["loss"], "norm": found["norm"], "logp": logp if _is_list(ids) else logp[0],
            **{kind: {name[len(prefix):]: x for name, x in found.items() if name.startswith(prefix)}
               for kind, prefix in (("gradients", "grad."), ("after", "after."))}}
