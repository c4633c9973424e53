# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps veomni==0.1.12, and pip install torch transformers==5.8.0 torchdata
# datasets (and what its import then names)
"""VeOmni: whole steps of its trainers for text and for DPO, on rows that its collator packs and
splits; and its attention under Ulysses.

Its trainers are built without what reads files and draws curves. kernel() stands for the CUDA
kernel, in the slot that its attention has for another one.
"""
import os
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

os.environ.setdefault("MODELING_BACKEND", "veomni")
from common import (IGNORED, attention_inputs, check, check_attention, factor, norm,
                    on_ranks, row, tiny_llama, token_losses, ver, version)

import torch
import torch.distributed as dist

BETA = 0.1
# (lengths of documents, prompts) of each micro-batch of each replica
SHORT, UNEVEN = ([10, 13], [3, 2]), ([17, 6], [14, 4])
STEPS = [("text, Ulysses 2, 1 micro-batch", "text", 2, [[SHORT]]),
         ("text, Ulysses 2, 2 micro-batches", "text", 2, [[SHORT, UNEVEN]]),
         ("text, 2 replicas, 2 micro-batches", "text", 1, [[SHORT, UNEVEN], [UNEVEN, SHORT]]),
         ("DPO, Ulysses 2, 1 micro-batch", "dpo", 2, [[SHORT]]),
         ("DPO, Ulysses 2, 3 micro-batches", "dpo", 2, [[SHORT, UNEVEN, SHORT]]),
         ("DPO, 2 replicas, 1 micro-batch", "dpo", 1, [[SHORT], [UNEVEN]]),
         ("DPO, 2 replicas, 3 micro-batches", "dpo", 1,
          [[SHORT, UNEVEN, SHORT], [UNEVEN, SHORT, SHORT]])]


class Quiet:
    """Does nothing, whatever is asked of it."""

    def __getattr__(self, _):
        return lambda *_, **__: None


def kernel(query, key, value, *_, cu_seq_lens_q=None, softmax_scale=None, sliding_window=None,
           softcap=None, **__):
    """What transformers' _flash_attention_forward computes, of one packed row."""
    x = {n: t[0] for n, t in zip("qkv", (query, key, value))}
    cu_seqlens = [0, query.shape[1]] if cu_seq_lens_q is None else cu_seq_lens_q
    return attention(x, cu_seqlens, sliding_window or 0, softmax_scale,
                     softcap or 0.0)[None].to(query.dtype)


def attention(x, cu_seqlens, window, scale, softcap):
    """common.whole_attention, with a gradient and in the type given."""
    q, k, v = (x[n] for n in "qkv")
    place = torch.arange(len(q))
    document = torch.searchsorted(torch.as_tensor(cu_seqlens), place, right=True)
    distance = place[:, None] - place
    seen = (distance >= 0) & (document[:, None] == document)
    if window:
        seen &= distance < window
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores * (scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


# ---- a step ----


def start(sp, dp):
    from veomni.distributed import parallel_state
    parallel_state.clear_parallel_state()
    return parallel_state.init_parallel_state(dp_size=dp, ulysses_size=sp, dp_mode="ddp",
                                              device_type="cpu")


def build(folder, sp):
    import flash_stub
    flash_stub.install()
    import flash_attn
    flash_attn.flash_attn_func = flash_attn.flash_attn_varlen_func = kernel  # looked for
    from veomni.arguments.arguments_types import OpsImplementationConfig
    from veomni.distributed.torch_parallelize import _materialize_and_load_weights
    from veomni.models import build_foundation_model
    from veomni.ops.kernels.attention import flash
    flash._flash_attention_forward = kernel
    eager = {
        f"{op}_implementation": "eager"
        for op in ("moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb",
                   "load_balancing_loss", "rms_norm_gated", "causal_conv1d",
                   "chunk_gated_delta_rule")
    }
    ops = OpsImplementationConfig(attn_implementation="flash_attention_2", **eager)
    model = build_foundation_model(folder, torch_dtype="float32", init_device="meta",
                                   ops_implementation=ops)
    # parallelize_model_ddp, whose wrapper is for a GPU of the rank's number
    _materialize_and_load_weights(model, folder, "cpu", should_skip_hf_weight_load=False,
                                  is_peft_model=False, adapter_path=None,
                                  broadcast_from_rank0=False)
    return torch.nn.parallel.DistributedDataParallel(model) if sp == 1 else model


def features(lengths, prompts, number, pairs):
    """A micro-batch as its data has it; of DPO, chosen and rejected are one sample."""
    ids, positions, labels, cu = row(lengths, prompts, seed=number)
    unshifted = torch.cat((torch.tensor([IGNORED]), labels[:-1]))
    cuts = [(0, len(ids))] if pairs else list(zip(cu[:-1], cu[1:]))
    return [dict(input_ids=ids[a:b], labels=unshifted[a:b], position_ids=positions[a:b],
                 attention_mask=torch.ones(b - a, dtype=torch.int64)) for a, b in cuts]


def trainer_of(kind, model, reference, optimizer):
    """Its trainer with what a step of it touches."""
    from veomni.data.data_collator import PostCollator
    from veomni.trainer.base import BaseTrainer
    from veomni.trainer.text_dpo_trainer import DPOConfig, TextDPOTrainer
    from veomni.trainer.text_trainer import TextTrainer
    trainer = (TextDPOTrainer if kind == "dpo" else TextTrainer).__new__(
        TextDPOTrainer if kind == "dpo" else TextTrainer)
    accelerator = SimpleNamespace(fsdp_config=SimpleNamespace(fsdp_mode="ddp"),
                                  dp_replicate_size=1)
    train = SimpleNamespace(enable_batch_invariant_mode=False, sync_each_train_step=False,
                            accelerator=accelerator, local_rank=0,
                            optimizer=SimpleNamespace(max_grad_norm=1e9))
    base = trainer.base = BaseTrainer.__new__(BaseTrainer)
    base.args = SimpleNamespace(train=train, dpo_config=DPOConfig(beta=BETA))
    base._reset_async_activation_offload_if_enabled = lambda: None
    base.model, base.optimizer, base.lr_scheduler = model, optimizer, Quiet()
    base.device, base.LOG_SAMPLE, base._callbacks = torch.device("cpu"), False, []
    base.model_fwd_context = base.model_bwd_context = nullcontext()
    base.state = SimpleNamespace(global_step=0)
    trainer.reference_model, trainer.post_forward = reference, PostCollator()
    shown = {}
    base.on_step_end = lambda **said: shown.update(said)
    return trainer, shown


def places(tokens, rank, sp):
    """Of a row, padded to a multiple of sp."""
    return torch.arange(-(-tokens // sp) * sp).view(sp, -1)[rank % sp]


class Seen:
    """Labels and log-probs of each call of its chunked log-probs."""

    def __init__(self):
        from veomni.ops.kernels.cross_entropy import chunk_logprobs
        self.calls, whole = [], chunk_logprobs._ChunkedLinearLogProbs.apply

        def watched(hidden, weight, labels, *rest):
            logp, entropy = whole(hidden, weight, labels, *rest)
            self.calls.append((labels.flatten(), logp.detach().flatten()))
            return logp, entropy

        chunk_logprobs._ChunkedLinearLogProbs = SimpleNamespace(apply=watched)

    def micro_batch(self, tokens):
        """ids have so many tokens on this rank; the reference model is asked first."""
        (labels, reference), (_, logp) = self.calls[:2]
        del self.calls[:2]
        short = tokens - len(labels)  # without SP it leaves out the last
        pad = torch.nn.functional.pad
        return dict(labels=pad(labels, (0, short), value=IGNORED), logp=pad(logp, (0, short)),
                    ref_logp=pad(reference, (0, short)))


def text_step(trainer, shown, batches, rows, rank, sp, dump):
    import seqpar_record
    base = trainer.base
    row = lambda ids, number: dict(index=places(rows[number][0], rank, sp),
                                   cu_seqlens=batches[number]["cu_seq_lens_q"],
                                   positions=batches[number]["position_ids"][0])
    with seqpar_record.record(base.model, base.optimizer, dump, sp=sp, row=row) as step:
        trainer.train_step(iter([[dict(b) for b in batches]]))
        # as its callback reports it
        loss = torch.tensor(shown["loss"])
        dist.all_reduce(loss)
        step.loss = loss / dist.get_world_size()


def dpo_step(trainer, shown, batches, rows, rank, sp, dump, gradients):
    from seqpar_dump import Dump
    seen = Seen()
    trainer.train_step(iter([[dict(b) for b in batches]]))
    dump = Dump(dump, rank, dist.get_world_size(), sp=sp, accumulation=len(batches),
                objective="dpo", beta=BETA)
    for number, (batch, (tokens, cu)) in enumerate(zip(batches, rows)):
        index = places(tokens, rank, sp)
        own = dict(index=index, ids=batch["input_ids"][0], positions=batch["position_ids"][0],
                   **seen.micro_batch(len(index)))
        is_text = index < tokens
        dump.micro_batch(number, cu_seqlens=cu, **{n: x[is_text] for n, x in own.items()})
    loss = torch.tensor(shown["loss"])
    dist.all_reduce(loss)
    dump.step(loss / dist.get_world_size(), gradients, norm=shown["grad_norm"])


def steps(rank, folder):
    """Each of STEPS on this rank: the norm that it reports, and the gradients."""
    return [step(rank, number, *case[1:], folder) for number, case in enumerate(STEPS)]


def step(rank, number, kind, sp, replicas, folder):
    from veomni.data.data_collator import MainCollator
    start(sp, len(replicas))
    model, reference = build(f"{folder}/model", sp), build(f"{folder}/reference", 0)
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=1e-3), {}
    optimizer.register_step_pre_hook(lambda *_: gradients.update(
        {n: p.grad.clone() for n, p in getattr(model, "module", model).named_parameters()}))
    trainer, shown = trainer_of(kind, model, reference, optimizer)
    collate, batches, rows = MainCollator(), [], []
    for a, packed in enumerate(replicas[rank // sp]):
        cu = torch.tensor([0, *torch.tensor(packed[0]).cumsum(0)])
        rows.append((int(cu[-1]), cu))
        batches.append(collate(features(*packed, 10 * (rank // sp) + a, kind == "dpo")))
    if kind == "text":
        text_step(trainer, shown, batches, rows, rank, sp, f"{folder}/{number}")
    else:
        dpo_step(trainer, shown, batches, rows, rank, sp, f"{folder}/{number}", gradients)
    return shown["grad_norm"], gradients


# ---- the same in plain transformers, on one rank ----


def sums_of(model, packed, number):
    """Log-probs of a row, and its labels and documents."""
    ids, positions, labels, cu = row(*packed, seed=number)
    logits = [model(input_ids=ids[a:b][None], use_cache=False).logits[0]
              for a, b in zip(cu[:-1], cu[1:])]
    return -token_losses(torch.cat(logits), labels), labels, cu


def one_rank(kind, replicas, models):
    model, reference = models
    model.zero_grad()
    rows = [(p, 10 * r + a) for r, all_of in enumerate(replicas) for a, p in enumerate(all_of)]
    if kind == "text":
        found = [sums_of(model, *x)[:2] for x in rows]
        loss = -sum(x.sum() for x, _ in found) / sum((n != IGNORED).sum() for _, n in found)
    else:
        losses = []
        for x in rows:
            logp, _, cu = sums_of(model, *x)
            margin = (logp - sums_of(reference, *x)[0].detach()).split(cu.diff().tolist())
            losses.append(-torch.nn.functional.logsigmoid(
                BETA * (margin[0].sum() - margin[1].sum())))
        loss = sum(losses) / len(losses)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


# ---- its attention ----

TOKENS = 24
ASKED = [("", {}, 4), (", 1 head of k and v", {}, 1), (", window 4", {"window": 4}, 4),
         (", scale 0.5", {"softmax_scale": 0.5}, 4), (", softcap 1", {"softcap": 1.0}, 4)]
DOCUMENTS = [0, 9, 24]


def attend(rank):
    from veomni.ops.kernels.attention import flash
    start(2, 1)
    flash._flash_attention_forward = kernel
    own, results = torch.arange(TOKENS).view(2, -1)[rank], []
    module = torch.nn.Linear(2, 2)
    module.is_causal, module.config = True, SimpleNamespace(
        _attn_implementation="veomni_flash_attention_2_with_sp")
    for _, asked, kv_heads in ASKED:
        x = attention_inputs(TOKENS, kv_heads=kv_heads)
        q, k, v = (x[n][own].requires_grad_() for n in "qkv")
        out = flash.flash_attention_forward(
            module, *(t.transpose(0, 1)[None] for t in (q, k, v)), None,
            scaling=asked.get("softmax_scale"), sliding_window=asked.get("window"),
            softcap=asked.get("softcap"), cu_seq_lens_q=torch.tensor(DOCUMENTS))[0][0]
        out.backward(x["dout"][own])
        results.append(dict(index=own, out=out.detach(), dq=q.grad, dk=k.grad, dv=v.grad))
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        models = tiny_llama(0), tiny_llama(9)
        for name, model in zip(("model", "reference"), models):
            model.save_pretrained(f"{folder}/{name}")
        norms, got = zip(*on_ranks(steps, folder)[0])
        for number, (name, kind, sp, replicas) in enumerate(STEPS):
            want = one_rank(kind, replicas, models)
            check("veomni", version("veomni"), name,
                  ver(f"{folder}/{number}", "--model", f"{folder}/model"),
                  f"gradient {factor(got[number], want)}; norm {norms[number]:.4f} of "
                  f"{norm(want):.4f}", "new")
    for (name, asked, kv_heads), got in zip(ASKED, zip(*on_ranks(attend))):
        check_attention("veomni", f"Ulysses 2{name}", got,
                        attention_inputs(TOKENS, kv_heads=kv_heads), DOCUMENTS, mark="new",
                        **asked)
