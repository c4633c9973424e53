# SPDX-License-Identifier: MIT OR Unlicense
"""A small causal language model: pre-norm RMSNorm, rotary, grouped-query attention, SwiGLU.

Weights are a dict by the names that Hugging Face's Llama gives them, so that a step's weights are a Llama folder."""
import torch
import torch.nn.functional as F

from attention import Attention, Setting, rotary


EPS, THETA = 1e-6, 100.0  # of RMSNorm and rotary; a low base: these texts are short


def shapes(c):
    yield "model.embed_tokens.weight", (c.vocab, c.hidden)
    for i in range(c.layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (c.hidden,)
        yield layer + "self_attn.q_proj.weight", (c.heads * c.head_dim, c.hidden)
        yield layer + "self_attn.k_proj.weight", (c.kv_heads * c.head_dim, c.hidden)
        yield layer + "self_attn.v_proj.weight", (c.kv_heads * c.head_dim, c.hidden)
        yield layer + "self_attn.o_proj.weight", (c.hidden, c.heads * c.head_dim)
        yield layer + "post_attention_layernorm.weight", (c.hidden,)
        yield layer + "mlp.gate_proj.weight", (2 * c.hidden, c.hidden)
        yield layer + "mlp.up_proj.weight", (2 * c.hidden, c.hidden)
        yield layer + "mlp.down_proj.weight", (c.hidden, 2 * c.hidden)
    yield "model.norm.weight", (c.hidden,)
    yield (SCORE, (1, c.hidden)) if c.objective == "rm" else (HEAD, (c.vocab, c.hidden))


SCORE, HEAD = "score.weight", "lm_head.weight"


def llama_config(c):
    """What Hugging Face's config.json has of it."""
    kind = "LlamaForSequenceClassification" if c.objective == "rm" else "LlamaForCausalLM"
    return {"architectures": [kind], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": c.layers,
            "hidden_size": c.hidden, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim, "intermediate_size": 2 * c.hidden, "vocab_size": c.vocab, "rope_theta": THETA,
            "rms_norm_eps": EPS, "tie_word_embeddings": False}


def weights(c, copy=0, noise=0.0, head=1.0):
    """The policy; or a frozen copy that differs from it a little, as a reference or a policy of some steps ago does.

    Its log-probs are spread widely, so that means over different tokens differ. A head below 1 makes all tokens more
    alike: random ones get more likely. Rounded to c.dtype last, so that all dtypes have the same model."""
    draw, drift = torch.Generator().manual_seed(c.seed), torch.Generator().manual_seed(c.seed + 7919 * copy)
    made = {}
    for name, shape in shapes(c):
        x = torch.randn(shape, generator=draw, dtype=torch.float64)
        if x.dim() == 1:
            x = 1 + 0.1 * x
        elif "embed_tokens" not in name:
            x = x * shape[-1] ** -0.5
        if noise and x.dim() > 1:
            x = x + noise * x.std() * torch.randn(shape, generator=drift, dtype=torch.float64)
        made[name] = (x * 2 * head if name == HEAD else x).to(c.torch_dtype)
    return made


def wide(x):
    """fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, weight):
    y = wide(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def forward(c, w, share, ranks, tape=None):
    """Last hidden states of this rank's tokens."""
    x = F.embedding(share.ids, w["model.embed_tokens.weight"])
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        layer = {name.split(".")[-2]: weight for name, weight in w.items() if name.startswith(prefix)}
        setting = Setting(c, share, ranks, tape if i == 0 else None)
        x = x + attend(c, layer, rms_norm(x, layer["input_layernorm"]), share.positions, setting)
        y = rms_norm(x, layer["post_attention_layernorm"])
        x = x + F.linear(F.silu(F.linear(y, layer["gate_proj"])) * F.linear(y, layer["up_proj"]), layer["down_proj"])
    return rms_norm(x, w["model.norm.weight"])


def attend(c, layer, x, positions, setting):
    q, k, v = (F.linear(x, layer[name]).view(len(x), heads, c.head_dim)
               for name, heads in (("q_proj", c.heads), ("k_proj", c.kv_heads), ("v_proj", c.kv_heads)))
    bare = c.variant if c.mistake == "rotary_missing" else ""
    q = q if bare in ("queries", "both") else rotary(q, positions, THETA)
    k = k if bare in ("keys", "both") else rotary(k, positions, THETA)
    out = Attention.apply(q, k, v, setting)
    return F.linear(out.reshape(len(x), c.heads * c.head_dim), layer["o_proj"])


def log_probs(w, hidden, labels):
    """Of each label, in fp32 at least. Where there is none: of token 0."""
    return statistics(w, hidden, labels)["logp"]


def statistics(w, hidden, labels):
    """The label's log-prob, the mean of those of all ids, the logarithm of the sum of exponentials, the entropy: (tokens) each."""
    logits = wide(F.linear(hidden, w[HEAD]))
    logp = torch.log_softmax(logits, -1)
    return {"logp": logp.gather(-1, labels.clamp(min=0)[:, None])[:, 0], "mean_logp": logp.mean(-1),
            "logits_lse": torch.logsumexp(logits, -1), "entropy": -(logp.exp() * logp).sum(-1)}
