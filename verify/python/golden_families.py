# SPDX-License-Identifier: MIT OR Unlicense
"""Writes verify/second/golden_families.h: what transformers' own models give, in float64, for the models and the documents of test_slow.c.

    golden_families.py verify/second/golden_families.h

Each document is a row of one right-padded batch, which is what transformers knows of documents; attention_mask keeps the padding
out of the load-balancing loss.  Parameters go in and gradients come out by save_pretrained and from_pretrained, so the names and
the shapes are those of checkpoint files.
"""
import math
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

# The models compute norms, softmaxes and angles in what they call float32, whatever their parameters are.
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

VOCAB, IGNORED, COUNT, SMOOTHING, ZLOSS = 9, -100, 7, .1, .01
# ids, targets, weights, seeds of entropy and of logp of each document, as in test_slow.c
DOCUMENTS = [
    ([3, 1, 4, 1, 5], [1, 4, 1, IGNORED, 7], [1, .5, 2, 1, 1], [.1, 0, -.2, .3, .1], [0, .3, -.1, .2, .5]),
    ([8], [2], [0], [.1], [-.4]),
    ([2, 6, 2], [6, 3, IGNORED], [1.5, 1, 1], [0, .2, .1], [0, 1, .2]),
    ([0, 7, 7], [7, 7, IGNORED], [1, 1, 1], [0, 0, 0], [0, 0, 0]),
]

SMALL = dict(vocab_size=VOCAB, hidden_size=8, intermediate_size=5, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
             rms_norm_eps=1e-5, max_position_embeddings=48, bos_token_id=None, eos_token_id=None, pad_token_id=None)
PLAIN = dict(rope_type="default", rope_theta=100.0)
YARN = dict(rope_type="yarn", rope_theta=10.0, factor=3.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=.5,
            attention_factor=1.7)
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, 0, dict(num_hidden_layers=3, tie_word_embeddings=True, use_sliding_window=True,
                                                sliding_window=2, max_window_layers=1)),
    "llama_biases": (transformers.LlamaConfig, 0, dict(num_hidden_layers=2, attention_bias=True, mlp_bias=True,
                                                       tie_word_embeddings=False)),
    "qwen3": (transformers.Qwen3Config, 0, dict(num_hidden_layers=2, rms_norm_eps=1e-2, tie_word_embeddings=False)),
    "smollm3": (transformers.SmolLM3Config, 0, dict(num_hidden_layers=3, no_rope_layer_interval=2, attention_bias=True,
                                                    tie_word_embeddings=True, rope_parameters=YARN)),
    "mixtral": (transformers.MixtralConfig, .3, dict(num_hidden_layers=2, intermediate_size=3, num_local_experts=4,
                                                     num_experts_per_tok=2, sliding_window=3, tie_word_embeddings=False)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, .5, dict(num_hidden_layers=4, num_experts=5, num_experts_per_tok=3,
                                                        moe_intermediate_size=3, decoder_sparse_step=2, norm_topk_prob=False,
                                                        attention_bias=True, tie_word_embeddings=True)),
    "qwen3_moe_normed": (transformers.Qwen3MoeConfig, 0, dict(num_hidden_layers=2, num_experts=3, num_experts_per_tok=2,
                                                              moe_intermediate_size=2, norm_topk_prob=True,
                                                              tie_word_embeddings=False)),
}
LAYER = ("input_layernorm", "q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj", "post_attention_layernorm")
MLP = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def place(name):
    """Where a tensor comes in slow.h's table: a key to sort by."""
    parts = name.split(".")
    if parts[1] == "embed_tokens":
        return (0,)
    if parts[1] != "layers":
        return (2, parts[0] == "lm_head")
    layer, module, bias = int(parts[2]), parts[-2], parts[-1] == "bias"
    if module in LAYER:
        return 1, layer, LAYER.index(module), bias
    if module == "gate":
        return 1, layer, len(LAYER), -1
    expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else 0
    return 1, layer, len(LAYER), expert, [module in names for names in MLP].index(True), bias


def parameter(k):
    return .5 * math.sin(0.37 * (k + 1) * (k + 1))


def direction(k):
    """Not along the parameters: by those, two matrices that are multiplied have the same slope."""
    return math.cos(0.53 * (k + 1) * (k + 1))


def laid(shapes, number):
    """number(0), number(1), ... over all tensors in slow.h's order."""
    at, tensors = 0, {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        tensors[name] = torch.tensor([number(k) for k in range(at, at + count)]).reshape(shape)
        at += count
    return tensors


def saved(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    return {name: tensors[name] for name in sorted(tensors, key=place)}


def loaded(config, tensors):
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager",
                                                           experts_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    assert all(p.dtype == torch.float64 for p in [*model.parameters(), *model.buffers()])
    return model


def batch():
    """Documents padded at the end, by a token that would count."""
    most = max(len(ids) for ids, *_ in DOCUMENTS)
    ids = torch.tensor([ids + [4] * (most - len(ids)) for ids, *_ in DOCUMENTS])
    mask = torch.tensor([[1] * len(ids) + [0] * (most - len(ids)) for ids, *_ in DOCUMENTS])
    return ids, mask


def token_loss(logits, target, weight, entropy_seed, logp_seed):
    logp, lse = logits.log_softmax(-1), logits.logsumexp(-1)
    loss = -entropy_seed * (logp.exp() * logp).sum()
    if target == IGNORED:
        return loss
    cross_entropy = -(1 - SMOOTHING) * logp[target] - SMOOTHING * logp.mean()
    return loss + logp_seed * logp[target] + weight * (cross_entropy + ZLOSS * lse**2) / COUNT


def margin(router_logits, top, mask):
    """How far the least likely chosen expert is from the likeliest other: the choice must not hang on rounding."""
    gaps = [1.0]
    for layer in router_logits:
        best = layer.softmax(-1).sort(-1, descending=True).values[mask.flatten().bool()]
        gaps.append((best[:, top - 1] - best[:, top]).min().item())
    return min(gaps)


def numbers(values):
    lines, line = [], "   "
    for text in (f"{value:.17g}" for value in values):
        if len(line) + len(text) > 96:
            lines.append(line)
            line = "   "
        line += f" {text},"
    return "\n".join([*lines, line])


def golden(name, make, balance, changes):
    config = make(**{**SMALL, "rope_parameters": PLAIN, **changes})
    shapes = {name: x.shape for name, x in saved(AutoModelForCausalLM.from_config(config)).items()}
    model = loaded(config, laid(shapes, parameter))
    ids, mask = batch()
    sparse = "num_experts_per_tok" in changes
    out = model(input_ids=ids, attention_mask=mask, **({"output_router_logits": True} if sparse else {}))
    logits = [out.logits[d, :len(document[0])] for d, document in enumerate(DOCUMENTS)]
    loss = sum(token_loss(logits[d][t], *(x[t] for x in document[1:])) for d, document in enumerate(DOCUMENTS)
               for t in range(len(document[0])))
    if sparse:
        gap = margin(out.router_logits, config.num_experts_per_tok, mask)
        print(f"{name}: balance {out.aux_loss.item():.6f}, choices by {gap:.2g} or more", file=sys.stderr)
        assert gap > 1e-6
        loss = loss + balance * out.aux_loss
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad if p.grad is not None else torch.zeros_like(p))
    gradient, along = saved(model), laid(shapes, direction)
    yield f"static const golden_tensor {name}_tensors[] = {{"
    for tensor, g in gradient.items():
        yield (f'    {{"{tensor}", {g.shape[0] if g.dim() > 1 else 1}, {g.shape[-1]},\n'
               f"     {(g * along[tensor]).sum():.17g}, {g.norm():.17g}}},")
    yield f"}};\nstatic const double {name}_logits[] = {{\n{numbers(torch.cat(logits).flatten().tolist())}\n}};"
    yield (f"static const golden_family {name}_golden = {{\n    \"{name}\", {len(gradient)}, {name}_tensors, {name}_logits, "
           f"{loss.item():.17g},\n    {balance:g}}};\n")


HEAD = f"""/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * golden_families.h - made by verify/python/golden_families.py with transformers {transformers.__version__} and torch
 * {torch.__version__.split('+')[0]}, all in float64.
 */
#ifndef GOLDEN_FAMILIES_H
#define GOLDEN_FAMILIES_H

#include <stdint.h>

/* The gradient's inner product with test_slow.c's other_wave, and its norm. */
typedef struct {{
    const char *name;
    int64_t rows, cols;
    double along, norm;
}} golden_tensor;

/* The logits are those of the documents' tokens, without padding. */
typedef struct {{
    const char *name;
    int64_t tensors;
    const golden_tensor *tensor;
    const double *logits;
    double loss, balance;
}} golden_family;
"""
with open(sys.argv[1], "w") as out:
    print(HEAD, file=out)
    for family, (make, balance, changes) in FAMILIES.items():
        print(*golden(family, make, balance, changes), sep="\n", file=out)
    print("#endif", file=out)
