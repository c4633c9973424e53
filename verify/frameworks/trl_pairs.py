# SPDX-License-Identifier: MIT OR Unlicense
# pip install trl==1.16.0
"""TRL's DPO and KTO on two ranks with two micro-batches: _compute_loss with log-probs of a head
in place of a model's."""
import tempfile
from collections import defaultdict
from types import SimpleNamespace

from common import IGNORED, check, factor, on_ranks, row, token_losses, ver, version

import torch

LENGTHS, PROMPTS, MICRO, DESIRABLE = [9, 7], [3, 3], 2, (
    [1, 0], [1, 1], [0, 0], [0, 1])  # of each row, one a micro-batch and rank


def _row(number, weight):
    """A row of two documents: log-probs by the head and by a reference, and KL terms, which are
    made up."""
    draw = torch.Generator().manual_seed(100 + number)
    ids, _, labels, cu = row(LENGTHS, PROMPTS, seed=number)
    hidden = torch.randn(len(ids), 8, generator=draw)
    logp = -token_losses(hidden @ weight, labels)
    return ids, labels, cu, logp, logp.detach() + torch.randn(
        len(ids), generator=draw) / 4, torch.randn(2, generator=draw) + 0.5


def _loss(trainer_class, number, weight, accelerator):
    ids, labels, cu, logp, ref, kl = _row(number, weight)
    width = max(LENGTHS)
    pad = lambda t: torch.nn.utils.rnn.pad_sequence(list(t.split(LENGTHS)), batch_first=True)
    mask = pad((labels != IGNORED).float())
    completion = torch.cat((torch.zeros(2, 1), mask[:, :-1]),
                           1)  # of tokens, not of what predicts them
    refs = pad(ref * (labels != IGNORED)).sum(1)
    outputs = SimpleNamespace(log_probs=(pad(logp) * mask)[:, :-1],
                              entropy=torch.zeros(2, width - 1),
                              mean_logits=torch.zeros(2, width - 1),
                              is_top1=torch.zeros(2, width - 1, dtype=torch.bool))
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False,
        ld_alpha=None, precompute_ref_logps=True, beta=0.1, f_divergence_type="reverse_kl",
        loss_types=["sigmoid"], loss_weights=[1.0], label_smoothing=0.0, use_weighting=False,
        _tp_size=1, _total_train_tokens=0, _metrics=defaultdict(lambda: defaultdict(list)),
        calculate_KL=True, loss_type="kto", desirable_weight=1.0, undesirable_weight=1.0,
        _compute_kl_logps=lambda *_: kl, args=SimpleNamespace())
    batch = dict(input_ids=pad(ids), attention_mask=torch.ones(2, width),
                 completion_mask=completion, ref_chosen_logps=refs[:1],
                 ref_rejected_logps=refs[1:], ref_logps=refs, ref_KL_logps=torch.zeros(2),
                 label=torch.tensor(DESIRABLE[number]).bool())
    loss = trainer_class._compute_loss(trainer, lambda **_: outputs, batch, False)
    return loss[0] if isinstance(loss, tuple) else loss


def step(rank, objective, folder):
    import torch.distributed as dist
    from accelerate import Accelerator
    from seqpar_dump import Dump
    from trl import DPOTrainer, KTOTrainer
    accelerator, weight = Accelerator(cpu=True), torch.randn(
        8, 64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    dump, shown = Dump(folder, rank, 2, accumulation=MICRO, objective=objective), 0.0
    for a in range(MICRO):
        number = 2 * a + rank
        loss = _loss({"dpo": DPOTrainer, "kto": KTOTrainer}[objective], number, weight,
                     accelerator) / MICRO  # as training_step divides it
        loss.backward()
        shown += float(loss.detach())
        ids, labels, cu, logp, ref, kl = _row(number, weight)
        extra = dict(desirable=torch.tensor(DESIRABLE[number]),
                     kl=kl) if objective == "kto" else {}
        dump.micro_batch(a, index=torch.arange(len(ids)), ids=ids, labels=labels, cu_seqlens=cu,
                         logp=logp, ref_logp=ref, **extra)
    local, reduced, whole = weight.grad.clone(), weight.grad.clone(), torch.tensor(shown)
    dist.all_reduce(reduced), dist.all_reduce(whole)
    dump.step(whole / 2, {"head": reduced / 2}, local={"head": local})
    return {"head": reduced / 2}, float(whole / 2)


def one_rank(objective):
    """The same by hand: KTO's z of a micro-batch is the mean over the documents of both ranks,
    not below 0."""
    weight, total = torch.randn(8, 64,
                                generator=torch.Generator().manual_seed(5)).requires_grad_(), 0
    rows = [_row(number, weight) for number in range(2 * MICRO)]
    for number, (_, labels, _, logp, ref, _) in enumerate(rows):
        h = torch.stack([x.sum() for x in ((logp - ref) * (labels != IGNORED)).split(LENGTHS)])
        if objective == "dpo":
            total = total - torch.nn.functional.logsigmoid(0.1 * (h[0] - h[1])) / len(rows)
            continue
        z = torch.cat([rows[number // 2 * 2 + r][5] for r in range(2)]).mean().clamp(min=0)
        sign = torch.tensor(DESIRABLE[number]) * 2 - 1
        total = total + (1 - torch.sigmoid(0.1 * sign * (h - z))).sum() / 2 / len(rows)
    total.backward()
    return {"head": weight.grad}, float(total.detach())


if __name__ == "__main__":
    for objective in ("dpo", "kto"):
        with tempfile.TemporaryDirectory() as folder:
            got, want = on_ranks(step, objective, folder)[0], one_rank(objective)
            check("trl", version("trl"), f"{objective.upper()}, 2 ranks x 2", ver(folder),
                  f"gradient {factor(got[0], want[0])}; loss {got[1]:.4f} of {want[1]:.4f}")
