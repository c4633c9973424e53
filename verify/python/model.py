# SPDX-License-Identifier: MIT OR Unlicense
"""A small causal language model: pre-norm RMSNorm, rotary, grouped-query attention, SwiGLU. Weights: a dict by name."""
import torch
import torch.nn.functional as F

from attention import Attention, Setting, rotary


def shapes(c):
    yield "embed_tokens", (c.vocab, c.hidden)
    for i in range(c.layers):
        layer = f"layers.{i}."
        yield layer + "input_norm", (c.hidden,)
        yield layer + "q_proj", (c.heads * c.head_dim, c.hidden)
        yield layer + "k_proj", (c.kv_heads * c.head_dim, c.hidden)
        yield layer + "v_proj", (c.kv_heads * c.head_dim, c.hidden)
        yield layer + "o_proj", (c.hidden, c.heads * c.head_dim)
        yield layer + "post_norm", (c.hidden,)
        yield layer + "gate_proj", (2 * c.hidden, c.hidden)
        yield layer + "up_proj", (2 * c.hidden, c.hidden)
        yield layer + "down_proj", (c.hidden, 2 * c.hidden)
    yield "norm", (c.hidden,)
    yield ("score", (1, c.hidden)) if c.objective == "rm" else ("lm_head", (c.vocab, c.hidden))


def weights(c, copy=0, noise=0.0, head=1.0):
    """The policy; or a frozen copy that differs from it a little, as a reference or a policy of some steps ago does.

    Its log-probs are spread widely, so that means over different tokens differ. A head below 1 makes all tokens more
    alike: random ones get more likely. Rounded to c.dtype last, so that all dtypes have the same model."""
    draw, drift = torch.Generator().manual_seed(c.seed), torch.Generator().manual_seed(c.seed + 7919 * copy)
    made = {}
    for name, shape in shapes(c):
        x = torch.randn(shape, generator=draw, dtype=torch.float64)
        x = 1 + 0.1 * x if name.endswith("norm") else x if name == "embed_tokens" else x * shape[-1] ** -0.5
        if noise and x.dim() > 1:
            x = x + noise * x.std() * torch.randn(shape, generator=drift, dtype=torch.float64)
        made[name] = (x * 2 * head if name == "lm_head" else x).to(c.torch_dtype)
    return made


def wide(x):
    """fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, weight):
    y = wide(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def forward(c, w, share, ranks, tape=None):
    """Last hidden states of this rank's tokens."""
    x = F.embedding(share.ids, w["embed_tokens"])
    for i in range(c.layers):
        layer = {name.removeprefix(f"layers.{i}."): weight for name, weight in w.items()}
        setting = Setting(c, share, ranks, tape if i == 0 else None)
        x = x + attend(c, layer, rms_norm(x, layer["input_norm"]), share.positions, setting)
        y = rms_norm(x, layer["post_norm"])
        x = x + F.linear(F.silu(F.linear(y, layer["gate_proj"])) * F.linear(y, layer["up_proj"]), layer["down_proj"])
    return rms_norm(x, w["norm"])


def attend(c, layer, x, positions, setting):
    q, k, v = (F.linear(x, layer[name]).view(len(x), heads, c.head_dim)
               for name, heads in (("q_proj", c.heads), ("k_proj", c.kv_heads), ("v_proj", c.kv_heads)))
    out = Attention.apply(rotary(q, positions), rotary(k, positions), v, setting)
    return F.linear(out.reshape(len(x), c.heads * c.head_dim), layer["o_proj"])


def log_probs(w, hidden, labels):
    """Of each label, in fp32 at least. Where there is none: of token 0."""
    logits = wide(F.linear(hidden, w["lm_head"]))
    return torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
