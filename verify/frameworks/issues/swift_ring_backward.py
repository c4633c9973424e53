# SPDX-License-Identifier: MIT OR Unlicense
"""Title: Ring attention (CUDA path): dq, dk and dv are wrong, the output is right
Packages: ms-swift torch
Mistake: delta_of_hop
Expected: the gradients of one rank to fp16's 1e-3. twinkle-kit has a copy of the file.
Why: the backward pass gives a block its own out and lse and a weighted dout, and does not use
what lse_grad gives: dq and dk miss it. Updates of lse[half_index1] in place change block_lse of
step 0, a view of it: dv is wrong, too. zigzag_ring_attn_npu.py takes those of the row.
"""
import os
import sys
from types import ModuleType

os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29561")
import torch
import torch.distributed as dist


def weights(q, k, scale, causal, lse=None):
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if causal:
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse[..., None]), lse


def forward(**a):
    p, lse = weights(a["q"], a["k"], a["softmax_scale"], a["causal"])
    return torch.einsum("hqk,khd->qhd", p, a["v"].float()).to(a["q"].dtype), lse, None, None


def backward(**a):
    q, k, v, dout, out = (a[n].float() for n in ("q", "k", "v", "dout", "out"))
    p, _ = weights(q, k, a["softmax_scale"], a["causal"], a["softmax_lse"])
    ds = torch.einsum("qhd,khd->hqk", dout, v) - (dout * out).sum(-1).T[..., None]
    ds *= p * a["softmax_scale"]
    a["dq"].copy_(torch.einsum("hqk,khd->qhd", ds, k))
    a["dk"].copy_(torch.einsum("hqk,qhd->khd", ds, q))
    a["dv"].copy_(torch.einsum("hqk,qhd->khd", p, dout))


def main(rank):
    torch.set_num_threads(1)
    flash = ModuleType("flash_attn.flash_attn_interface")
    flash._flash_attn_varlen_forward, flash._flash_attn_varlen_backward = forward, backward
    sys.modules["flash_attn.flash_attn_interface"] = flash
    from swift.sequence_parallel import zigzag_ring_attn as ring
    dist.init_process_group("gloo", rank=rank, world_size=2)
    q, k, v, dout = torch.randn(4, 24, 2, 8, generator=torch.Generator().manual_seed(0)).half()
    own = torch.arange(24).view(4, 6)[[rank, 3 - rank]].flatten()
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    want = torch.einsum("hqk,khd->qhd", weights(*whole[:2], 8 ** -0.5, True)[0], whole[2])
    want.backward(dout.float())
    part = [x[own][None].requires_grad_() for x in (q, k, v)]
    out = ring.zigzag_ring_flash_attn_varlen_func(*part, torch.tensor([0, 24]), 24, causal=True)
    out.backward(dout[own][None])
    away = lambda a, b: f"{float((a[0] - b[own]).norm() / b[own].norm()):.1e}"
    print(f"rank {rank}, away from one rank: out {away(out, want)}",
          *(f"d{n} {away(a.grad, b.grad)}" for n, a, b in zip("qkv", part, whole)), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
