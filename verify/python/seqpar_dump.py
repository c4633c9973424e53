# SPDX-License-Identifier: MIT OR Unlicense
"""Writes down what a rank did in one training step, for `seqpar-verify ver`.

    import seqpar_dump
    dump = seqpar_dump.Dump("dump", rank, world, sp=4, accumulation=2)
    for a, batch in enumerate(micro_batches):
        ...                                            # forward and backward
        dump.micro_batch(a, index=places, ids=ids, positions=positions, labels=shifted_labels,
                         logp=logp, cu_seqlens=cu_seqlens)
    dump.step(loss, {n: p.grad for n, p in model.named_parameters()})  # reduced, before clip

Every rank writes a file of its own; it appears, whole, when step() is called. All arrays may be
left out: what is not there is not judged.

Give what the package itself used. Labels, positions and log-probs that are computed anew for the
dump, as they should be, are right whatever the package did, and hide what is to be found: take
labels where the loss takes them, behind every shift, split and mask, those that a model or a
kernel shifts inside included. Where they cannot be got at, leave them out: they are then not
judged, and the loss or the gradients may still tell.

More that is worth writing down:

    Dump(..., objective="ppo", clip_high=0.28, kl_coef=0.01, advantage="group", window=128)
        what differs from the defaults: KEYWORDS below has them all, help(seqpar_dump.Dump) what they mean
    Dump(..., dtype="bfloat16")
        what the model computes in (float64, float32, tf32, float16, bfloat16), where parameters
        and gradients are kept in another type; it sets how far right gradients may be apart. A
        model of transformers in float64 computes norms, softmaxes and rotary angles in float32:
        then dtype="float32"
    dump.attention(0, q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv)
        of layer 0, after rotary: (tokens, heads, head_dim), lse (tokens, heads) and natural
    dump.step(loss, grads, local=grads_before_reduction, norm=norm_before_clip,
              param=before, after=after, m=exp_avg_before, v=exp_avg_sq_before,
              optimizer="adamw", lr=1e-4, weight_decay=0.1, step=7, max_norm=1.0)
        STEP below has the optimizer's keywords; m and v are those before the step, absent: 0
    dump.step(..., part={"grad.w": (offset, total)})
        where this rank has a contiguous range of the flattened whole, as ZeRO and FSDP do, of
        the tensors of grad, param, after, m and v that are named so

Arrays of numpy, torch or JAX, also bf16 and fp16, are written bit for bit; an array that is None is
left out. help(seqpar_dump) has the shape and the meaning of each: below, at Dump.micro_batch,
Dump.attention and Dump.step. Needs numpy alone: safetensors' own writer takes no bf16 from numpy,
and its lower calls differ between versions.
"""
import json
import os

import numpy

DTYPES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
          "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
MICRO_BATCH = ("index", "ids", "positions", "labels", "logits", "logp", "ref_logp", "cu_seqlens", "boundaries")
OF_OBJECTIVE = {"sft": ("loss_sum", "loss_count", "weights", "mean_logp", "logits_lse"), "dpo": (),
                "rm": ("values", "scores", "margins"), "kto": ("desirable", "kl"),
                "ppo": ("old_logp", "advantages", "rewards", "groups", "values", "returns",
                        "token_rewards", "weights", "entropy"),
                "value": ("values", "returns", "old_values"), "other": ()}
OF_OBJECTIVE["grpo"] = OF_OBJECTIVE["ppo"]
ATTENTION = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "part_out", "part_lse")
KEYWORDS = ("reduction", "reduction_constant", "clip_low", "clip_high", "kl_coef", "kl_ratio", "on_policy", "dual_clip", "cispo", "z_loss",
            "entropy_coef", "importance", "advantage", "advantage_eps", "gamma", "gae_lambda", "clip_value",
            "loss_type", "label_smoothing", "simpo_gamma", "center", "desirable_weight", "undesirable_weight",
            "softmax_scale", "window", "softcap", "dtype")
STEP = ("optimizer", "lr", "beta1", "beta2", "eps", "weight_decay", "step", "max_norm")


def _entry(x):
    """Type, shape and bytes of an array, whoever's it is."""
    if hasattr(x, "detach"):  # torch, whose bf16 numpy does not know
        x = x.detach().cpu().contiguous()
        name = str(x.dtype).split(".")[-1]
        if name == "bfloat16":
            import torch
            x = x.view(torch.int16)
        x = x.numpy()
    else:
        x = numpy.ascontiguousarray(x) if numpy.ndim(x) else numpy.asarray(x)
        name = x.dtype.name
    if name not in DTYPES:
        raise ValueError(f"arrays of {name} are not written; give one of {', '.join(DTYPES)}")
    return {"dtype": DTYPES[name], "shape": list(x.shape), "data": x.astype(x.dtype.newbyteorder("<")).tobytes()}


def _write(path, tensors, metadata):
    """A safetensors file: the header's length, the header, and the bytes of all tensors."""
    header, at = {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": x["dtype"], "shape": x["shape"], "data_offsets": [at, at + len(x["data"])]}
        at += len(x["data"])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = f"{path}.tmp.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(x["data"] for x in tensors.values())
    os.replace(temporary, path)


def write_llama(folder, config, tensors):
    """A model in Hugging Face's form, for `seqpar-verify ver --model`: config.json, a dict, and weights by name."""
    os.makedirs(folder, exist_ok=True)
    _write(os.path.join(folder, "model.safetensors"), {name: _entry(x) for name, x in tensors.items()},
           {"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)


def _text(x):
    """A number as metadata: a float with all its digits."""
    return x if isinstance(x, str) else str(int(x)) if isinstance(x, (int, numpy.integer)) else repr(float(x))


def dimensions(name):
    """How many dimensions an array of a micro-batch or of the attention has; a batch of one row adds ones in front."""
    return {"logits": 2, "lse": 2, "part_out": 4}.get(name, 3 if name in ATTENTION else 1)


def _drop_ones(entry, name):
    """The shape without ones in front, as a batch of one row has them: (1, n) is (n)."""
    shape = entry["shape"]
    extra = max(0, len(shape) - dimensions(name))
    if any(n != 1 for n in shape[:extra]):
        raise ValueError(f"{name} has shape {shape}; a micro-batch is one row, write several as several")
    return dict(entry, shape=shape[extra:] or [1])


class Dump:
    """What one rank did. The file appears, whole, when step() is called.

    rank, world         this rank, and how many there are; rank r is member r % sp of replica r / sp
    sp                  ranks that share a sequence. If a step splits its sequences over different numbers of ranks:
                        the largest such number, each row a micro-batch, and empty arrays on a rank that holds
                        nothing of it
    accumulation        micro-batches of the step, on this rank; the same number on every rank
    objective           sft, dpo, rm, kto, ppo, or value for PPO's critic. grpo is ppo, with advantage group and reduction
                        sequence unless others are given. other: a loss that is none of these. It is not judged, nor
                        are gradients by --model
    beta                DPO and KTO
    reduction           SFT, PPO and value, how losses of tokens are averaged: token, sequence, constant (over
                        reduction_constant), micro, replica
    loss_type           DPO: sigmoid, robust, hinge, ipo, ipo_mean or simpo, with label_smoothing and simpo_gamma
    desirable_weight, undesirable_weight    KTO: factors of the losses of these documents
    center              RM: adds center (chosen score + rejected score)^2 to a pair's loss
    label_smoothing, z_loss                 SFT
    clip_low, clip_high, dual_clip, cispo, kl_coef, entropy_coef   PPO
    kl_ratio            PPO: none, or token: the KL term is multiplied by the token's ratio
    on_policy           PPO: no, or yes: old_logp must equal logp up to rounding
    importance          PPO: token, or sequence where all tokens of a document have one ratio (GSPO)
    advantage           PPO: given, group, group_mean, rloo, or gae with gamma and gae_lambda; advantage_eps
    clip_value          value
    softmax_scale, window, softcap          attention
    dtype               what the model computes in: float64, float32, tf32, float16 or bfloat16
    """

    def __init__(self, folder, rank, world, sp=1, accumulation=1, objective="sft", beta=0.1, **keywords):
        if not 0 <= rank < world or sp < 1 or world % sp:
            raise ValueError(f"rank {rank} of {world}, sp {sp}: rank is 0 to world - 1, and sp divides world")
        if objective not in OF_OBJECTIVE:
            raise ValueError(f"objective is {objective}; give one of {', '.join(OF_OBJECTIVE)}")
        self.path = os.path.join(folder, f"rank{rank}.safetensors")
        self.accumulation = accumulation
        self.names = MICRO_BATCH + OF_OBJECTIVE[objective]
        self.metadata = {"seqpar_dump": "1", "rank": str(rank), "world": str(world), "sp": str(sp),
                         "accumulation": str(accumulation), "objective": objective, "beta": repr(float(beta))}
        self._keywords(keywords, KEYWORDS)
        self.tensors = {}
        os.makedirs(folder, exist_ok=True)

    def micro_batch(self, number, **arrays):
        """Arrays by name, of one row of tokens. n: tokens of this rank, docs: documents of the whole row. Arrays of shape
        (docs) and cu_seqlens are the same on all ranks of a sequence; a leading 1, as of a batch of one row, is dropped.

        index         (n)         index of each token in the row before the split
        ids           (n)         tokens
        positions     (n)         as given to the model
        labels        (n)         the token to predict here, already shifted; -100: none
        logits        (n, vocab)  the input of the softmax
        logp          (n)         log-prob of the label; any value without a label
        ref_logp      (n)         the same under the reference model: DPO, KTO, PPO with kl_coef
        cu_seqlens    (docs + 1)  where documents begin in the row, and where the last one ends
        boundaries    (docs + 1)  where documents begin as meant, if the package's cu_seqlens may be others: the two are
                                  compared, and all else is judged by boundaries

        sft
        loss_sum      ()          this rank's sum of losses
        loss_count    ()          what this rank divides that sum by before its backward pass
        weights       (n)         a factor of each token's loss; of PPO, too
        mean_logp     (n)         with label_smoothing: mean of the log-probs of all ids
        logits_lse    (n)         with z_loss: log of the sum of exp of the logits

        dpo: documents 2i and 2i + 1 are the chosen and the rejected answer; rm: likewise
        values        (n)         rm: output of the score head. ppo with advantage gae: the critic's value when
                                  the text was sampled. value: the critic's value in training
        scores        (docs)      rm: the score of the document in the loss
        margins       (docs)      rm: margin of a pair, at its chosen document

        kto
        desirable     (docs)      1 or 0
        kl            (docs)      sum of policy - reference log-probs of the mismatched answer

        ppo
        old_logp      (n)         log-prob of the label when the text was sampled
        advantages    (n)         as the loss uses them
        rewards       (docs)
        groups        (docs)      which prompt the document answers: equal numbers are one group
        token_rewards (n)         gae: the whole reward of a token
        entropy       (n)         with entropy_coef: of the distribution over all ids

        value
        returns       (n)         of ppo with gae, too
        old_values    (n)         with clip_value: the value when the text was sampled
        """
        self._add(number, arrays, self.names)

    def attention(self, number, **arrays):
        """Arrays by name, of one call of the attention, after rotary, of this rank's n tokens; number: of the micro-batch
        with their index and cu_seqlens.

        q             (n, heads, head_dim)
        k             (n, kv_heads, head_dim)
        v             (n, kv_heads, head_dim)
        out           (n, heads, head_dim)
        lse           (n, heads)                     natural logarithm
        dout          (n, heads, head_dim)           gradients of the loss: this one and the next three
        dq            (n, heads, head_dim)
        dk            (n, kv_heads, head_dim)
        dv            (n, kv_heads, head_dim)
        part_out      (parts, n, heads, head_dim)    partial attention, each part over some of the keys, as a hop
                                                     of a ring gives it: the input of `seqpar-verify run merge`
        part_lse      (parts, n, heads)              -Inf: the part has no key
        """
        self._add(number, arrays, ATTENTION)

    def step(self, loss=None, gradients=None, norm=None, local=None, param=None, after=None, m=None, v=None,
             part=None, **keywords):
        """Writes the file. Dicts have an array of the parameter's shape by its name, None where there is none.

        loss          ()          as this rank reports it for the whole step
        gradients     (any)       after all reductions and before the clip
        norm          ()          of the gradient before the clip, as this rank reports it
        local         (any)       this rank's gradients before any reduction
        param         (any)       parameters before the optimizer's step
        after         (any)       parameters after it
        m, v          (any)       AdamW's moments before the step; absent: 0
        part                      {"grad.NAME": (offset, total)}: this rank has the elements of a flattened tensor of
                                  total elements from offset on; also param.NAME, after.NAME, m.NAME and v.NAME

        keywords: optimizer ("adamw" or "sgd"), lr, beta1, beta2, eps, weight_decay, max_norm (of the clip; absent: no
        clip) and step (1: the optimizer's first). lr and weight_decay may be dicts of numbers by parameter
        """
        for name, x in (("loss", loss), ("norm", norm)):
            if x is not None:
                self.tensors[name] = _entry(numpy.float64(float(x.detach() if hasattr(x, "detach") else x)))
        kinds = {"grad": gradients, "local": local, "param": param, "after": after, "m": m, "v": v}
        for kind, arrays in kinds.items():
            self.tensors.update({f"{kind}.{n}": _entry(x) for n, x in (arrays or {}).items() if x is not None})
        for name, (offset, total) in (part or {}).items():
            self._part(name, offset, total)
        self._keywords({name: self._by_parameter(name, x) if isinstance(x, dict) else x for name, x in keywords.items()}, STEP)
        _write(self.path, self.tensors, self.metadata)

    def _add(self, number, arrays, names):
        if not 0 <= number < self.accumulation:
            raise ValueError(f"micro-batch {number} of {self.accumulation}")
        for name, x in arrays.items():
            if name not in names:
                raise ValueError(f"what is {name}? a micro-batch has {', '.join(names)}")
            if x is not None:
                self.tensors[f"{number}.{name}"] = _drop_ones(_entry(x), name)

    def _part(self, name, offset, total):
        size = int(numpy.prod(self.tensors[name]["shape"])) if name in self.tensors else None
        if name.startswith("local.") or size is None:
            raise ValueError(f"part of {name}: name a tensor of grad, param, after, m or v that is written")
        if not 0 <= offset <= offset + size <= total:
            raise ValueError(f"part of {name}: {size} elements from {offset} on are none of {total}")
        self.metadata["part." + name] = f"{offset} {total}"

    def _by_parameter(self, key, numbers):
        """Writes the numbers that differ from the most common one, and returns that one."""
        if key not in ("lr", "weight_decay") or not numbers:
            raise ValueError(f"{key} is a dict of {len(numbers)} numbers; only lr and weight_decay take a dict, of one number or more")
        missing = sorted({n[6:] for n in self.tensors if n.startswith("param.")} - set(numbers))
        unknown = sorted(n for n in numbers if f"param.{n}" not in self.tensors)
        if missing or unknown:
            raise ValueError(f"{key}: no number for {', '.join(missing[:3])}; give one for every parameter in param=" if missing else
                             f"{key}: {', '.join(unknown[:3])} is not in param=")
        most = max(sorted(set(numbers.values())), key=list(numbers.values()).count)
        self.metadata.update({f"{key}.{n}": _text(x) for n, x in numbers.items() if x != most})
        return most

    def _keywords(self, given, known):
        for name, x in given.items():
            if name not in known:
                raise ValueError(f"what is {name}? the keywords here are {', '.join(known)}")
            if x is not None:
                self.metadata[name] = _text(x)
