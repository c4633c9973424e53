# SPDX-License-Identifier: MIT OR Unlicense
# pip install torch==2.15.0
"""torch's context parallel: its ring with the CPU's flash attention, head-tail balancing on and
off, both ways to rotate k and v.

The dispatcher of context_parallel() knows CUDA's kernels alone, so that the two templates are
called as its handlers call them, on shards that context_parallel() itself made. FlexAttention's
way is run through _ContextParallel.
"""
from common import attention_inputs, check_attention, on_ranks

import torch

HEADS = dict(heads=4, kv_heads=4)  # repeated for GQA before the call, as SDPA's handlers expect
CASES = [(balanced, method, length) for method in ("allgather", "alltoall")
         for balanced in (True, False) for length in (24, 30)]


def ring(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as cp
    from torch.distributed.tensor.experimental._context_parallel import _attention as inner
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    step_back = lambda query, key, value, out, logsumexp, is_causal, grad_out: backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal)
    mesh, results = init_device_mesh("cpu", (world,)), []
    for balanced, method, length in CASES:
        x, index = attention_inputs(length, **HEADS), torch.arange(length)
        inner._cp_options.enable_load_balance = balanced
        cp.set_rotate_method(method)
        buffers = [t.transpose(0, 1)[None].contiguous() for t in x.values()] + [index]
        try:
            with cp.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4 + [0],
                                     no_restore_buffers=set(buffers)):
                q, k, v, dout, index = buffers
                out, lse = inner._templated_ring_attention(mesh.get_group(), 2, forward, q, k,
                                                           v, is_causal=True)[:2]
                dq, dk, dv = inner._templated_ring_attention_backward(
                    mesh.get_group(), 2, lambda **kw: (*step_back(**kw), None), dout,
                    "grad_out", q, k, v, out, lse, True)[:3]
        except (RuntimeError, AssertionError, ValueError) as error:
            results.append(str(error).splitlines()[0][:90])
            continue
        own = {n: t[0].transpose(0, 1) for n, t in dict(out=out, dq=dq, dk=dk, dv=dv).items()}
        results.append(dict(own, lse=lse[0].transpose(0, 1), index=index.clone()))
    return results


def flex(rank, world, documents):
    """FlexAttention with a mask of documents; every load balancer that torch has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as inner
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as lb
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    mesh, results = init_device_mesh("cpu", (world,)), []
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    mask = lambda b, h, q, k: (q >= k) & (document[q] == document[k])
    length = len(document)
    for balancer in (None, lb._HeadTailLoadBalancer(length, world, "cpu"),
                     lb._PerDocumentHeadTailLoadBalancer([documents], world, "cpu")):
        x = attention_inputs(length, heads=2, kv_heads=2, width=16)
        block_mask = create_block_mask(mask, 1, None, length, length, device="cpu",
                                       BLOCK_SIZE=128)
        buffers = [t.transpose(0, 1)[None].contiguous()
                   for t in x.values()] + [torch.arange(length)[None], block_mask]
        q, k, v, dout, index, block_mask = inner._context_parallel_shard(
            mesh, buffers, [2] * 4 + [1, 2], balancer)
        q = q.contiguous()  # on a CPU it has no backward pass
        (_, kk, vv), _ = inner._ContextParallel(
            2,
            inner._ContextParallel.AttentionType.FLEX).flex_input_fn(None, (q, k, v), {}, mesh)
        out = flex_attention(q, kk, vv, block_mask=block_mask)
        results.append(dict(out=out[0].transpose(0, 1), index=index[0]))
    return results


if __name__ == "__main__":
    from common import check, version
    for world in (2, 3):
        for case, got in zip(CASES, zip(*on_ranks(ring, world, world=world))):
            cut = "head-tail" if case[0] else "contiguous"
            name = f"ring, P {world}, {case[1]}, {cut}, {case[2]} tokens"
            if isinstance(got[0], str):
                check("torch", version("torch"), name, "refused", got[0])
                continue
            check_attention("torch", name, got, attention_inputs(case[2], **HEADS),
                            [0, case[2]])
    documents = [128, 256, 128]
    for name, got in zip(("contiguous", "head-tail", "head-tail by document"),
                         zip(*on_ranks(flex, 2, documents))):
        check_attention("torch", f"flex, P 2, {name}", got,
                        attention_inputs(512, heads=2, kv_heads=2, width=16),
                        [0, 128, 384, 512])
