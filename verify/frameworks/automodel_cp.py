# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps nemo-automodel==0.7.0 (and what its import then names)
"""NeMo Automodel's block-diagonal context parallelism for packed rows: its batch cut in
shards, keys exchanged in each of its ways, and its masked or its varlen attention.

Its needed-only exchanges ask for a varlen kernel of CUDA; kernel() stands for flash-attn's.
"""
import sys
import types

from common import attention_inputs, check_attention, on_ranks

import torch

# documents, and tokens of the row; those behind the last document are padding
ROWS = [("", [0, 5, 16, 24], 24), (", padded", [0, 7, 21], 24), (", one document", [0, 24], 24),
        (", a rank of padding", [0, 3, 11], 24)]
WAYS = [("all-gather, masked SDPA", torch.float32, "dense", "allgather"),
        ("all-gather, varlen", torch.float16, "flash", "allgather"),
        ("halo", torch.float16, "flash", "halo"), ("all-to-all", torch.float16, "flash", "a2a")]


def kernel(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=True, **_):
    """flash-attn's, causal from the bottom right, of rows or of packed documents."""
    if q.dim() == 4:
        return kernel(q[0], k[0], v[0], [0, q.shape[1]], [0, k.shape[1]], softmax_scale)[None]
    out, group = [], q.shape[1] // k.shape[1]
    spans = [list(zip(cu[:-1], cu[1:])) for cu in (cu_seqlens_q, cu_seqlens_k)]
    for (a, b), (c, d) in zip(*spans):
        keys, values = (x[c:d].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys)
        scores = scores * (softmax_scale or q.shape[-1] ** -0.5)
        hidden = torch.ones(b - a, d - c).tril(int((d - c) - (b - a))) == 0
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(out).to(q.dtype)


def stand_in():
    """kernel() where flash-attn is looked for, and nothing that asks for CUDA."""
    from nemo_automodel.components.distributed.blockdiag_cp import kernels
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_func = flash.flash_attn_varlen_func = kernel
    sys.modules["flash_attn"], kernels.HAS_FLASH_VARLEN = flash, True
    kernels._varlen_backend_unavailable_reason = lambda *_: None


def attend(rank, world, rows_of):
    import torch.distributed as dist
    from nemo_automodel.components.distributed.blockdiag_cp import batch, runtime, state
    from torch.distributed.device_mesh import init_device_mesh
    stand_in()
    mesh, results = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), []
    for _, dtype, backend, exchange in WAYS:
        for _, cu, tokens in rows_of:
            state.configure_cp_varlen(attn_backend=backend, kv_exchange=exchange)
            documents = torch.zeros(1, tokens, dtype=torch.int64)
            for i, (a, b) in enumerate(zip(cu, cu[1:])):
                documents[0, a:b] = i + 1
            place = torch.arange(tokens)[None]
            rows = {n: place.clone() for n in ("input_ids", "labels", "position_ids")}
            rows["_packed_seq_ids"] = documents
            context, rows, _ = batch.make_cp_blockdiag_batch_and_ctx(mesh, None, rows)
            own = rows["input_ids"][0]
            x = attention_inputs(tokens, dtype=dtype)
            q, k, v = (x[n][own].transpose(0, 1)[None].requires_grad_() for n in "qkv")
            with context():
                out = runtime.cp_blockdiag_sdpa(q, k, v, enable_gqa=True)
                is_text = own < cu[-1]
                out.backward((x["dout"][own] * is_text[:, None, None]).transpose(0, 1)[None])
            if q.grad is None:  # a rank of padding, whose queries see nothing
                q.grad = torch.zeros_like(q)
            turned = {n: t[0].transpose(0, 1)[is_text] for n, t in
                      dict(out=out.detach(), dq=q.grad, dk=k.grad, dv=v.grad).items()}
            results.append(dict(index=own[is_text], **turned))
            dist.barrier()
    return results


if __name__ == "__main__":
    for world, rows_of in ((2, ROWS[:1]), (3, ROWS)):
        parts = iter(zip(*on_ranks(attend, world, rows_of, world=world)))
        for name, dtype, _, _ in WAYS:
            for row, cu, tokens in rows_of:
                x = attention_inputs(tokens, dtype=dtype)
                check_attention("nemo-automodel", f"packed, {name}, P {world}{row}",
                                next(parts), {n: t[:cu[-1]] for n, t in x.items()}, cu, "new")
