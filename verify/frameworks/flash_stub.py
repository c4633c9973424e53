# SPDX-License-Identifier: MIT OR Unlicense
"""Stands in for the flash-attn package on a CPU: its four low-level functions, in plain torch.

Only what ring attentions call of it: a block's output and natural log-sum-exp, and a block's
gradients from the given output and log-sum-exp. The causal mask is aligned to the bottom right,
as flash-attn 2.1 and later have it.
"""
import importlib.machinery
import sys
import types

import torch


def _parts(q, k, v, scale, causal, left, right, softcap):
    """Of one document (tokens, heads, width): scores of each head, and their slope by
    softcap."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(),
                          k.float().repeat_interleave(group, 1)) * scale
    slope = torch.ones_like(scores)
    if softcap:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, 1 - bounded ** 2
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal or right >= 0:
        seen &= distance >= -(0 if causal else right)
    if left >= 0:
        seen &= distance <= left
    return scores.masked_fill(~seen, float("-inf")), slope, group


def _forward(q, k, v, *how):
    scores, _, group = _parts(q, k, v, *how)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights,
                        v.float().repeat_interleave(group, 1)).to(q.dtype), lse


def _backward(dout, q, k, v, out, lse, dq, dk, dv, *how):
    scores, slope, group = _parts(q, k, v, *how)
    dout, kk, vv = dout.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
    delta = (dout * out.float()).sum(-1).T[..., None]
    dscores = weights * (torch.einsum("qhd,khd->hqk", dout, vv) - delta) * slope * how[0]
    dq.copy_(torch.einsum("hqk,khd->qhd", dscores, kk))
    of_keys = torch.einsum("hqk,qhd->khd", dscores, q.float())
    of_values = torch.einsum("hqk,qhd->khd", weights, dout)
    for to, x in ((dk, of_keys), (dv, of_values)):
        to.copy_(x.view(len(k), -1, group, x.shape[-1]).sum(2))


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1,
                        window_size_right=-1, softcap=0.0, alibi_slopes=None,
                        return_softmax=False):
    rows = [
        _forward(*row, softmax_scale, causal, window_size_left, window_size_right, softcap)
        for row in zip(q, k, v)
    ]
    return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]), None, None


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale,
                         causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                         alibi_slopes=None, deterministic=False, rng_state=None):
    for row in zip(dout, q, k, v, out, softmax_lse, dq, dk, dv):
        _backward(*row, softmax_scale, causal, window_size_left, window_size_right, softcap)


def _spans(cu_q, cu_k):
    q, k = cu_q.tolist(), cu_k.tolist()
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(q, q[1:], k, k[1:])]


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p, softmax_scale, causal, window_size_left=-1,
                               window_size_right=-1, softcap=0.0, alibi_slopes=None,
                               return_softmax=False, block_table=None, leftpad_k=None,
                               seqused_k=None, zero_tensors=False):
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), float("-inf"))
    for a, b in _spans(cu_seqlens_q, cu_seqlens_k):
        out[a], lse[:, a] = _forward(q[a], k[b], v[b], softmax_scale, causal, window_size_left,
                                     window_size_right, softcap)
    return out, lse, None, None


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q,
                                cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                softmax_scale, causal, window_size_left=-1,
                                window_size_right=-1, softcap=0.0, alibi_slopes=None,
                                deterministic=False, rng_state=None, zero_tensors=False):
    for a, b in _spans(cu_seqlens_q, cu_seqlens_k):
        _backward(dout[a], q[a], k[b], v[b], out[a], softmax_lse[:, a], dq[a], dk[b], dv[b],
                  softmax_scale, causal, window_size_left, window_size_right, softcap)


def install():
    """Makes `import flash_attn` find this."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType(
        "flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    package.__version__, package.__path__, package.flash_attn_interface = "2.8.3", [], interface
    for function in (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward,
                     _flash_attn_varlen_backward):
        setattr(interface, function.__name__, function)
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(package, name, None), setattr(interface, name, None)
    padding = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    # there to be imported, not to be called
    for name, names in (("bert_padding", padding), ("utils", ()),
                        ("utils.distributed", ("all_gather",))):
        module = types.ModuleType(f"flash_attn.{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__ = []
        for n in names:
            setattr(module, n, None)
        sys.modules[module.__name__] = module
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})
