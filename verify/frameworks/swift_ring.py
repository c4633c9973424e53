# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps ms-swift==4.6.0 twinkle-kit==0.5.1 (and what their imports then name);
# flash_stub.py in place of flash-attn
"""The zigzag ring for padding-free rows of ms-swift and of twinkle-kit.

Its backward pass gives each block its own out and lse; with those of the whole row in their
place, which is the control, all else being the package's, the gradients are right.
"""
import importlib

from common import attention_inputs, check_attention, module_file, on_ranks

import torch

HALF = torch.float16  # as flash-attn takes it
ROWS = [("", [0, 24]), (", 2 documents", [0, 24, 72])]
PACKAGES = {"ms-swift": "swift/sequence_parallel/zigzag_ring_attn.py",
            "twinkle-kit": "twinkle/model/transformers/strategy/sequence_parallel/"
                           "zigzag_ring_attn.py"}


def module(package):
    """Its ring; twinkle-kit's file alone, as the package's import waits for other programs."""
    if package == "ms-swift":
        return importlib.import_module("swift.sequence_parallel.zigzag_ring_attn")
    return module_file(package, PACKAGES[package])


def places(cu_seqlens, rank, world):
    """Of each document, two of its 2 P pieces."""
    pieces = [torch.arange(a, b).view(2 * world, -1)[[rank, 2 * world - 1 - rank]].flatten()
              for a, b in zip(cu_seqlens, cu_seqlens[1:])]
    return torch.cat(pieces)


def with_statistics_of_the_row(ring):
    """Blocks of the backward pass take out, lse and dout of the whole row."""
    whole, block = ring.zigzag_ring_flash_attn_varlen_backward, ring.backward
    row = {}

    def keep(group, dout, q, k, v, out, lse, cu, longest, half0, half1, *rest, **options):
        row.update(zip(("dout", "out", "lse", "half"), (dout[0], out[0], lse[0], half1)))
        return whole(group, dout, q, k, v, out, lse, cu, longest, half0, half1, *rest,
                     **options)

    def of_the_row(dout, q, k, v, out, lse, *rest):
        of = slice(None) if len(q) == len(row["out"]) else row["half"]
        return block(row["dout"][of], q, k, v, row["out"][of], row["lse"][:, of], *rest)

    ring.zigzag_ring_flash_attn_varlen_backward, ring.backward = keep, of_the_row
    return whole, block


def attend(rank, world, package):
    import flash_stub
    flash_stub.install()
    ring, results = module(package), []
    for control in (False, True):
        if control:
            kept = with_statistics_of_the_row(ring)
        for _, cu in ROWS:
            x, index = attention_inputs(cu[-1], dtype=HALF), places(cu, rank, world)
            q, k, v = (x[n][index][None].requires_grad_() for n in ("q", "k", "v"))
            longest = max(b - a for a, b in zip(cu, cu[1:]))
            out = ring.zigzag_ring_flash_attn_varlen_func(
                q, k, v, torch.tensor(cu).int(), longest, causal=True,
                group=torch.distributed.group.WORLD)
            out.backward(x["dout"][index][None])
            results.append(dict(index=index, out=out[0].detach(), dq=q.grad[0], dk=k.grad[0],
                                dv=v.grad[0]))
    return results


if __name__ == "__main__":
    for package in PACKAGES:
        for world in (2, 3):
            parts = iter(zip(*on_ranks(attend, world, package, world=world)))
            for control in (False, True):
                for name, cu in ROWS:
                    name = f"zigzag ring, P {world}{name}{', control' if control else ''}"
                    check_attention(package, name, next(parts),
                                    attention_inputs(cu[-1], dtype=HALF), cu, mark="new")
