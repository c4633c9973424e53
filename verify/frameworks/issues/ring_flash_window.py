# SPDX-License-Identifier: MIT OR Unlicense
"""Title: window_size is taken by ring, zigzag and stripe, and applied to rows of each block:
wrong, without a word
Packages: ring-flash-attn torch
Mistake: window_by_local_row
Expected: the output of one rank with the same window, or a refusal, as alibi_slopes has it.
llama3's is right.
Why: each hop hands window_size to the kernel as it is, and the kernel counts rows of that
block, not places in the row. The README says that windows are not supported; the functions take
them. flash-attn is replaced by a few lines of torch here, the ring is not.
"""
import os
import sys
import types

os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29557")
import torch
import torch.distributed as dist


def attend(q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
           softcap=0.0, alibi_slopes=None, return_softmax=False):
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * softmax_scale
    rows, columns = q.shape[1], k.shape[1]
    distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
    seen = torch.full_like(distance, True, dtype=torch.bool)
    if causal or window_size_right == 0:
        seen &= distance >= 0
    if window_size_left >= 0:
        seen &= distance <= window_size_left
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).to(q.dtype), lse, None, None


def main(rank):
    torch.set_num_threads(1)
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "ring_flash_attn.adapters"):
        sys.modules[name] = types.ModuleType(name)
    flash = sys.modules["flash_attn.flash_attn_interface"]
    flash._flash_attn_forward, flash._flash_attn_varlen_forward = attend, None
    flash._flash_attn_backward = flash._flash_attn_varlen_backward = None
    adapters = sys.modules["ring_flash_attn.adapters"]
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    import ring_flash_attn
    dist.init_process_group("gloo", rank=rank, world_size=2)
    q, k, v = torch.randn(3, 1, 24, 2, 8, generator=torch.Generator().manual_seed(0)).half()
    own = slice(rank * 12, rank * 12 + 12)
    for window in ((-1, -1), (3, 0)):
        whole = attend(q, k, v, 0, 8 ** -0.5, True, *window)[0][:, own]
        out = ring_flash_attn.ring_flash_attn_func(q[:, own], k[:, own], v[:, own], causal=True,
                                                   window_size=window)
        away = float((out - whole).norm() / whole.norm())
        print(f"rank {rank}, window_size {window}: {away:.1e} away from one rank", flush=True)
    dist.barrier()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
