# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps liger-kernel==0.8.5
"""liger-kernel's chunked losses, which are plain torch: DPO, KTO and GRPO over a head, on two
replicas, in chunks that divide the batch and in such that do not.

The model is a head over given hidden states; its gradient is averaged over ranks, as DDP does.
"""
import tempfile

from common import IGNORED, VOCAB, check, factor, on_ranks, token_losses, ver, version

import torch
import torch.distributed as dist

WIDTH, TOKENS, PROMPTS = 8, 12, (3, 5, 2, 7, 4, 6)  # six sequences a micro-batch
BETA, KL_COEF = 0.1, 0.04
PAIRS = dict(objective="dpo", beta=BETA)
POLICY = dict(objective="ppo", kl_coef=KL_COEF, advantage="given")
TOO_FEW = "known: documented, num_items_in_batch is not told"
OF_BATCH = "known: documented, a mean over each local batch"
# name, class, its options, the dump's, micro-batches, whether it is told the step's tokens
CASES = [
    ("DPO, chunks of 1 pair", "DPO", dict(chunk_size=1), PAIRS, 1, False, ""),
    ("DPO, chunks of 2 pairs of 3", "DPO", dict(chunk_size=2), PAIRS, 1, False, ""),
    ("DPO hinge", "DPO", dict(loss_type="hinge"), dict(PAIRS, loss_type="hinge"), 1, False, ""),
    ("DPO robust", "DPO", dict(loss_type="robust", label_smoothing=0.2),
     dict(PAIRS, loss_type="robust", label_smoothing=0.2), 1, False, ""),
    ("KTO, chunks of 4 of 6", "KTO", dict(chunk_size=4), dict(objective="kto", beta=BETA), 1,
     False, ""),
    ("GRPO dapo", "GRPO", {}, POLICY, 1, False, ""),
    ("GRPO dapo, chunks of 4 of 6", "GRPO", dict(chunk_size=4), POLICY, 1, False, ""),
    ("GRPO dapo, 2 micro-batches", "GRPO", {}, POLICY, 2, True, ""),
    ("GRPO dapo, 2 micro-batches, without counts", "GRPO", {}, POLICY, 2, False, TOO_FEW),
    ("GRPO grpo", "GRPO", dict(loss_type="grpo"), dict(POLICY, reduction="sequence"), 1, False,
     ""),
    ("GRPO dr_grpo", "GRPO", dict(loss_type="dr_grpo", max_completion_length=TOKENS),
     dict(POLICY, reduction="constant", reduction_constant=2 * len(PROMPTS) * TOKENS), 1, False,
     ""),
    ("GRPO bnpo", "GRPO", dict(loss_type="bnpo"), POLICY, 1, False, OF_BATCH),
    ("GRPO dapo, sequence ratios", "GRPO", dict(importance_sampling_level="sequence"),
     dict(POLICY, importance="sequence"), 1, False, "")]


def heads():
    draw = torch.Generator().manual_seed(5)
    return [0.3 * torch.randn(VOCAB, WIDTH, generator=draw) for _ in range(3)]


def batch(number):
    """A micro-batch: hidden states, ids, shifted labels, and what its sequences were given."""
    draw = torch.Generator().manual_seed(number)
    hidden = torch.randn(len(PROMPTS), TOKENS, WIDTH, generator=draw)
    ids = torch.randint(0, VOCAB, (len(PROMPTS), TOKENS), generator=draw)
    labels = torch.full_like(ids, IGNORED)
    for i, prompt in enumerate(PROMPTS):
        labels[i, prompt + number - 1:-1] = ids[i, prompt + number:]
    return dict(hidden=hidden, ids=ids, labels=labels,
                advantages=torch.randn(len(PROMPTS), generator=draw),
                kl=torch.rand(len(PROMPTS), generator=draw),
                desirable=torch.arange(len(PROMPTS)) % 3 != 1)


def logps(x, weight):
    losses = token_losses(x["hidden"] @ weight.to(x["hidden"]).T, x["labels"])
    return -losses.view(x["labels"].shape)


# ---- the package's ----


def loss(kind, options, x, weight, reference, old, items, z):
    from liger_kernel import chunked_loss as liger
    options = dict(dict(compiled=False, use_ref_model=True), **options)
    if kind == "DPO":  # chosen answers first, then rejected ones
        both = [torch.cat((x[n][0::2], x[n][1::2])) for n in ("hidden", "labels")]
        loss_of = liger.LigerFusedLinearDPOLoss(beta=BETA, **options)
        return loss_of(weight, *both, ref_input=both[0], ref_weight=reference)[0]
    if kind == "KTO":
        loss_of = liger.LigerFusedLinearKTOLoss(beta=BETA, **options)
        return loss_of(x["hidden"], weight, x["labels"], preference_labels=x["desirable"],
                       ref_input=x["hidden"], ref_weight=reference, kl=z)[0]
    mask = x["labels"] != IGNORED
    loss_of = liger.LigerFusedLinearGRPOLoss(beta=KL_COEF, **options)
    return loss_of(x["hidden"], weight, x["labels"].clamp(min=0), mask.float(), x["advantages"],
                   ref_per_token_logps=logps(x, reference), old_per_token_logps=logps(x, old),
                   num_items_in_batch=items)[0]


def steps(rank, folder):
    from seqpar_dump import Dump
    results = []
    for number, (_, kind, options, facts, micro_batches, told, _) in enumerate(CASES):
        weight, reference, old = heads()
        weight.requires_grad_()
        every = [batch(2 * a + r) for a in range(micro_batches) for r in (0, 1)]
        items = sum(int((x["labels"] != IGNORED).sum()) for x in every) if told else None
        shown = 0.0
        dump = Dump(f"{folder}/{number}", rank, 2, accumulation=micro_batches, **facts)
        for a in range(micro_batches):
            x = every[2 * a + rank]
            z = torch.stack([y["kl"] for y in every[2 * a:2 * a + 2]]).mean()
            one = loss(kind, options, x, weight, reference, old, items, z)
            one = one if told else one / micro_batches
            one.backward()
            shown += float(one.detach())
            given = dict(dpo=(), kto=("desirable", "kl"), ppo=())[facts["objective"]]
            more = {n: x[n].double() for n in given}
            if kind == "GRPO":
                more.update(old_logp=logps(x, old).flatten(),
                            advantages=x["advantages"].repeat_interleave(TOKENS))
            length = x["ids"].numel()
            dump.micro_batch(a, index=torch.arange(length), ids=x["ids"].flatten(),
                             labels=x["labels"].flatten(), logp=logps(x, weight).flatten(),
                             ref_logp=logps(x, reference).flatten(),
                             cu_seqlens=torch.arange(0, length + 1, TOKENS), **more)
        both = torch.tensor(shown)
        dist.all_reduce(weight.grad), dist.all_reduce(both)
        dump.step(both / 2, {"head": weight.grad / 2})
        results.append((weight.grad / 2, float(both / 2)))
    return results


# ---- in plain torch, on one rank and in fp64 ----


def right(kind, options, micro_batches):
    weight, reference, old = (x.double() for x in heads())
    weight.requires_grad_()
    rows = [batch(i) for i in range(2 * micro_batches)]
    parts = []
    for i, x in enumerate(rows):
        x["hidden"] = x["hidden"].double()
        mask = (x["labels"] != IGNORED).double()
        logp, ref, before = (logps(x, w) * mask for w in (weight, reference, old))
        gain = BETA * (logp - ref.detach()).sum(1)
        if kind == "DPO":
            margin, smooth = gain[0::2] - gain[1::2], options.get("label_smoothing", 0)
            good, bad = (-torch.nn.functional.logsigmoid(s * margin) for s in (1, -1))
            losses = ((1 - smooth) * good - smooth * bad) / (1 - 2 * smooth)
            is_hinge = options.get("loss_type") == "hinge"
            parts.append(torch.relu(1 - margin) if is_hinge else losses)
        elif kind == "KTO":
            z = BETA * torch.stack([y["kl"] for y in rows[i // 2 * 2:i // 2 * 2 + 2]]).mean()
            parts.append(1 - torch.sigmoid(torch.where(x["desirable"], gain - z, z - gain)))
        else:
            lengths, change = mask.sum(1, keepdim=True), logp - before.detach()
            if "importance_sampling_level" in options:
                change = change.sum(1, keepdim=True) / lengths
            ratio, advantage = change.exp(), x["advantages"].double()[:, None]
            gains = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            apart = ref.detach() - logp
            losses = (KL_COEF * (apart.exp() - apart - 1) - gains) * mask
            if options.get("loss_type") == "grpo":
                parts.append(losses.sum(1) / lengths[:, 0])
            elif options.get("loss_type") == "dr_grpo":
                parts.append(losses.flatten())
            else:
                parts.append(losses[mask > 0])
    loss = torch.cat(parts).mean()
    loss.backward()
    return weight.grad, float(loss.detach())


if __name__ == "__main__":
    from seqpar_dump import Dump
    with tempfile.TemporaryDirectory() as folder:
        got = on_ranks(steps, folder)[0]
        for number, (name, kind, options, facts, count, _, mark) in enumerate(CASES):
            gradient, want = right(kind, options, count)
            Dump(f"{folder}/{number}.want", 0, 1, **facts).step(want, {"head": gradient})
            check("liger-kernel", version("liger-kernel"), f"chunked {name}, 2 ranks",
                  ver(f"{folder}/{number}", "--want", f"{folder}/{number}.want"),
                  f"gradient {factor({'head': got[number][0]}, {'head': gradient})}; loss "
                  f"{got[number][1]:.4f} of {want:.4f}", mark)
