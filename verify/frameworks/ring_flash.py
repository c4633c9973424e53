# SPDX-License-Identifier: MIT OR Unlicense
# pip install ring-flash-attn==0.1.8 einops
"""ring-flash-attn: its rings, zigzag, stripe, llama3 and varlen, with flash_stub.py in place of
the CUDA kernels."""
import sys
import types

from common import attention_inputs, check_attention, on_ranks

import torch

# as flash-attn takes it; with fp32 the rings' .to(float32) makes no copy, and sums alias a
# block's buffer
HALF = torch.float16
ONE, TWO = [0, 24], [0, 12, 36]  # documents of multiples of 2 P, as varlen rings want them
UNEVEN = [0, 5, 16, 24]


def _places(cu_seqlens, rank, world, pieces):
    """Of each document the pieces of this rank: (0, 1) for contiguous, zigzag has two of 2
    P."""
    out = []
    for a, b in zip(cu_seqlens, cu_seqlens[1:]):
        n = (b - a) // pieces
        for i in ([rank] if pieces == world else [rank, pieces - 1 - rank]):
            out.append(torch.arange(a + i * n, a + (i + 1) * n))
    return torch.cat(out)


def cases(world):
    """Name, documents, index of a rank, the call."""
    from functools import partial
    import ring_flash_attn as rfa
    batch = lambda f: lambda q, k, v, cu, rank, window: [
        x[0]
        for x in f(q[None], k[None], v[None], causal=True, return_attn_probs=True, window_size=
                   (window - 1, 0) if window else (-1, -1))[:2]
    ]
    varlen = lambda f: lambda q, k, v, cu, rank, window: f(
        q, k, v, (torch.tensor(cu) // world).int(),
        max(b - a
            for a, b in zip(cu, cu[1:])) // world, causal=True, return_attn_probs=True)[:2]

    def llama3(q, k, v, cu, rank, window):
        prepared = rfa.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor(cu).int(), True, rank, world)
        return rfa.llama3_flash_attn_varlen_func(
            q, k, v, *prepared[:4], heads_k_stride=1, local_k_slice=prepared[4], causal=True,
            return_attn_probs=True, window_size=(window - 1, 0) if window else (-1, -1))[:2]

    contiguous = lambda cu, rank: torch.arange(cu[-1]).view(world, -1)[rank]
    return [("ring", ONE, 0, contiguous, batch(rfa.ring_flash_attn_func)),
            ("zigzag", ONE, 0, lambda cu, rank: _places(cu, rank, world, 2 * world),
             batch(rfa.zigzag_ring_flash_attn_func)),
            ("stripe", ONE, 0, lambda cu, rank: torch.arange(cu[-1])[rank::world],
             batch(rfa.stripe_flash_attn_func)),
            ("varlen ring", TWO, 0, lambda cu, rank: _places(cu, rank, world, world),
             varlen(rfa.ring_flash_attn_varlen_func)),
            ("varlen zigzag", TWO, 0, lambda cu, rank: _places(cu, rank, world, 2 * world),
             varlen(rfa.zigzag_ring_flash_attn_varlen_func)),
            ("llama3", UNEVEN, 0, contiguous, llama3),
            ("llama3, window 4", UNEVEN, 4, contiguous, llama3),
            ("ring, window 4", ONE, 4, contiguous, batch(rfa.ring_flash_attn_func))]


def attend(rank, world):
    import flash_stub
    flash_stub.install()
    # the adapter for transformers is not looked at, and imports what newer versions of it do
    # not have
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    results = []
    for name, cu, window, index_of, call in cases(world):
        x, index = attention_inputs(cu[-1], dtype=HALF), index_of(cu, rank)
        q, k, v = (x[n][index].requires_grad_() for n in ("q", "k", "v"))
        out, lse = call(q, k, v, cu, rank, window)
        out.backward(x["dout"][index])
        lse = lse.view(lse.shape[-2:]).T
        results.append((name, cu, window,
                        dict(index=index, out=out.detach(), lse=lse.detach(), dq=q.grad,
                             dk=k.grad, dv=v.grad)))
    return results


if __name__ == "__main__":
    for world in (2, 3):
        for of_ranks in zip(*on_ranks(attend, world, world=world)):
            name, cu, window, _ = of_ranks[0]
            check_attention("ring-flash-attn", f"{name}, P {world}", [r[3] for r in of_ranks],
                            attention_inputs(cu[-1], dtype=HALF), cu,
                            mark="known: its README has no windows; gallery 1.11",
                            **({"window": window} if window else {}))
