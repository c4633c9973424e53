# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps yunchang==0.6.4; flash_stub.py in place of flash-attn
"""yunchang (USP): LongContextAttention, Ulysses 2 or ring 2, with torch's math kernel, whose
log-sum-exp it says is 0, and with flash."""
from common import attention_inputs, check_attention, on_ranks

import torch

TOKENS, CALL = 24, dict(causal=True)
CASES = [(kernel, ring, ulysses) for kernel in ("fa", "torch_math")
         for ring, ulysses in (("basic", 1), ("zigzag", 1), ("strip", 1), ("basic", 2))]


def attend(rank, world):
    import flash_stub
    flash_stub.install()
    from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType
    results = []
    for kernel, ring, ulysses in CASES:
        set_seq_parallel_pg(ulysses, world // ulysses, rank, world)
        extract = lambda t: EXTRACT_FUNC_DICT[ring](t[None], rank, world, rd=world // ulysses,
                                                    ud=ulysses)[0]
        index = extract(torch.arange(TOKENS)[:, None])[:, 0]
        x = attention_inputs(TOKENS, dtype=torch.float16 if kernel == "fa" else torch.float32,
                             kv_heads=2 if kernel == "fa" else 4)
        q, k, v = (x[n][index][None].requires_grad_() for n in ("q", "k", "v"))
        out = LongContextAttention(ring_impl_type=ring,
                                   attn_type=AttnType.from_string(kernel))(q, k, v, **CALL)
        own = dict(index=index, out=out[0].detach())
        # torch's kernels have no backward pass there; a ring of one rank sends to itself, which
        # gloo cannot
        if kernel == "fa" and ulysses == 1:
            out.backward(x["dout"][index][None])
            own.update(dq=q.grad[0], dk=k.grad[0], dv=v.grad[0])
        results.append(own)
        torch.distributed.barrier(
        )  # a group goes with its last name, also under a rank that still sends
    return results


if __name__ == "__main__":
    for (kernel, ring, ulysses), got in zip(CASES, zip(*on_ranks(attend, 2))):
        x = attention_inputs(TOKENS, dtype=torch.float16 if kernel == "fa" else torch.float32,
                             kv_heads=2 if kernel == "fa" else 4)
        check_attention("yunchang",
                        f"{kernel}, {'Ulysses 2' if ulysses == 2 else f'{ring} ring 2'}", got,
                        x, [0, TOKENS],
                        mark="known: its own comment says 'LSE is not available, use zeros'")
