# SPDX-License-Identifier: MIT OR Unlicense
"""Tiny random models of every family that the trainers read: NAME.lm, a language model; NAME.flat, the same with a head of zeros,
by which all tokens are equally likely, so that all families write the same texts; NAME.score, a reward model.

    family_folders.py FOLDER
"""
import array
import json
import os
import random
import struct
import sys

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, LAYERS = 16, 2, 1, 8, 24, 259, 2
FAMILIES = {
    "llama": ("Llama", {}),
    "biased": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0])),
    "phi3": ("Phi3", dict(sliding_window=9)),
    "mixtral": ("Mixtral", dict(sliding_window=None, num_local_experts=3, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, decoder_sparse_step=2,
                                   norm_topk_prob=True))}


def config_of(kind, keys, score):
    return dict(model_type=kind.lower() if kind != "Qwen3Moe" else "qwen3_moe",
                architectures=[kind + ("ForSequenceClassification" if score else "ForCausalLM")], hidden_act="silu",
                num_hidden_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
                head_dim=HEAD_DIM, intermediate_size=WIDTH, vocab_size=VOCAB, rope_theta=5000.0 + len(kind), rms_norm_eps=1e-6,
                tie_word_embeddings=False, bos_token_id=256, eos_token_id=257, pad_token_id=258, **keys)


def projection(shapes, name, rows, cols, bias):
    shapes[f"{name}.weight"] = (rows, cols)
    if bias:
        shapes[f"{name}.bias"] = (rows,)


def mlp(shapes, name, names, width, bias=False):
    for part, rows, cols in zip(names, (width, width, HIDDEN), (HIDDEN, HIDDEN, width)):
        projection(shapes, f"{name}.{part}", rows, cols, bias)


def layer(shapes, name, kind, keys, number):
    attention, q, kv, bias = f"{name}.self_attn", HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, keys.get("attention_bias", False)
    plain = ("gate_proj", "up_proj", "down_proj")
    shapes[f"{name}.input_layernorm.weight"] = shapes[f"{name}.post_attention_layernorm.weight"] = (HIDDEN,)
    if kind == "Phi3":
        projection(shapes, f"{attention}.qkv_proj", q + 2 * kv, HIDDEN, False)
    else:
        for part, rows in zip("qkv", (q, kv, kv)):
            projection(shapes, f"{attention}.{part}_proj", rows, HIDDEN, bias or kind == "Qwen2")
    projection(shapes, f"{attention}.o_proj", HIDDEN, q, bias)
    if kind.startswith("Qwen3"):
        shapes[f"{attention}.q_norm.weight"] = shapes[f"{attention}.k_norm.weight"] = (HEAD_DIM,)
    if kind == "Phi3":
        projection(shapes, f"{name}.mlp.gate_up_proj", 2 * WIDTH, HIDDEN, False)
        projection(shapes, f"{name}.mlp.down_proj", HIDDEN, WIDTH, False)
    elif kind == "Mixtral":
        shapes[f"{name}.block_sparse_moe.gate.weight"] = (keys["num_local_experts"], HIDDEN)
        for expert in range(keys["num_local_experts"]):
            mlp(shapes, f"{name}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"), WIDTH)
    elif kind == "Qwen3Moe" and not (number + 1) % keys["decoder_sparse_step"]:
        shapes[f"{name}.mlp.gate.weight"] = (keys["num_experts"], HIDDEN)
        for expert in range(keys["num_experts"]):
            mlp(shapes, f"{name}.mlp.experts.{expert}", plain, keys["moe_intermediate_size"])
    else:
        mlp(shapes, f"{name}.mlp", plain, WIDTH, keys.get("mlp_bias", False))


def values_of(name, shape, draw):
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    middle = 1 if "norm" in name else 0
    return array.array("f", (middle + draw.gauss(0, 0.4) for _ in range(count)))


def write(folder, config, tensors):
    os.makedirs(folder)
    header, at = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = dict(dtype="F32", shape=shape, data_offsets=[at, at + 4 * len(values)])
        at += 4 * len(values)
    text = json.dumps(header).encode()
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(values.tobytes())
    with open(f"{folder}/config.json", "w") as file:
        file.write("{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in config.items()) + "\n}\n")


def main(out):
    for name, (kind, keys) in FAMILIES.items():
        draw, shapes = random.Random(name), {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
        for number in range(LAYERS):
            layer(shapes, f"model.layers.{number}", kind, keys, number)
        shapes["model.norm.weight"] = (HIDDEN,)
        body = {key: (shape, values_of(key, shape, draw)) for key, shape in shapes.items()}
        head = (VOCAB, HIDDEN), values_of("lm_head", (VOCAB, HIDDEN), draw)
        zeros = (VOCAB, HIDDEN), array.array("f", bytes(4 * VOCAB * HIDDEN))
        score = (1, HIDDEN), values_of("score", (1, HIDDEN), draw)
        write(f"{out}/{name}.lm", config_of(kind, keys, False), body | {"lm_head.weight": head})
        write(f"{out}/{name}.flat", config_of(kind, keys, False), body | {"lm_head.weight": zeros})
        write(f"{out}/{name}.score", config_of(kind, keys, True), body | {"score.weight": score})


if __name__ == "__main__":
    main(sys.argv[1])
