# SPDX-License-Identifier: MIT OR Unlicense
"""Steps of models that transformers made and computed, judged by the model as it is read and computed here: both spellings of
config.json; and one that says otherwise, which must be wrong.

    test_families.py ORACLE FOLDER
"""
import json
import os
import re
import subprocess
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from seqpar_dump import Dump

VOCAB, IGNORED, LENGTHS, PROMPTS = 61, -100, (90, 7, 33), (5, 1, 9)
ROPES = {
    "default": dict(),
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=4.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    "yarn": dict(factor=4.0, original_max_position_embeddings=64),
    "yarn, all keys": dict(factor=8.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0, truncate=False,
                           mscale=0.7, mscale_all_dim=1.3),
    "yarn, attention_factor": dict(factor=4.0, original_max_position_embeddings=64, attention_factor=1.3)}
# What each family has beyond a plain Llama, and a change of its config.json that must be wrong or refused.
FAMILIES = {
    "llama, attention_bias": ("Llama", dict(attention_bias=True), dict(attention_bias=False)),
    "llama, mlp_bias": ("Llama", dict(mlp_bias=True), dict(mlp_bias=False)),
    "llama, both biases, tied": ("Llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True), dict(rms_norm_eps=0.1)),
    "qwen2": ("Qwen2", dict(), dict(model_type="llama", architectures=["LlamaForCausalLM"])),
    "qwen2, tied": ("Qwen2", dict(tie_word_embeddings=True), dict(rms_norm_eps=0.1)),
    "qwen2, window from layer 1 on": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
                                      dict(layer_types=["sliding_attention"] * 4, max_window_layers=0)),
    "qwen2, window of all layers": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=0), dict(sliding_window=8)),
    "qwen3": ("Qwen3", dict(), dict(rms_norm_eps=0.1)),
    "qwen3, attention_bias, window": ("Qwen3", dict(attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=3),
                                      dict(sliding_window=6)),
    "smollm3": ("SmolLM3", dict(), dict(no_rope_layers=[1, 1, 1, 1])),
    "smollm3, every second, biases": ("SmolLM3", dict(no_rope_layers=[1, 0, 1, 0], attention_bias=True, mlp_bias=True),
                                      dict(no_rope_layers=[1, 1, 1, 0])),
    "phi3": ("Phi3", dict(), dict(num_attention_heads=2, num_key_value_heads=2, head_dim=12)),
    "phi3, window": ("Phi3", dict(sliding_window=9), dict(sliding_window=None)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), dict(num_experts_per_tok=1)),
    "mixtral, window": ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=2, sliding_window=9), dict(sliding_window=None)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=20), dict(norm_topk_prob=True)),
    "qwen3_moe, some layers, normed": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20,
                                                        decoder_sparse_step=2, norm_topk_prob=True), dict(norm_topk_prob=False))}


def rows():
    """A row of packed documents: ids and shifted labels of each."""
    draw = torch.Generator().manual_seed(3)
    for length, prompt in zip(LENGTHS, PROMPTS):
        ids = torch.randint(VOCAB, (length,), generator=draw)
        labels = torch.full_like(ids, IGNORED)
        labels[prompt - 1:-1] = ids[prompt:]
        yield ids, labels


def step(model):
    """Log-probs, loss and gradients, document by document: transformers knows no packed ones."""
    logp, count = [], sum(int((labels != IGNORED).sum()) for _, labels in rows())
    for ids, labels in rows():
        logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        logp.append(torch.where(labels == IGNORED, 0, logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]))
    logp = torch.cat(logp)
    loss = -logp.sum() / count
    loss.backward()
    return logp, loss, {name: p.grad for name, p in model.named_parameters()}


def write(folder, logp, loss, gradients, world=2):
    """As ranks that share the row would: each has a stretch of it."""
    ids, labels = (torch.cat(x) for x in zip(*rows()))
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    for rank in range(world):
        index = torch.arange(len(ids)).chunk(world)[rank]
        dump = Dump(folder, rank, world, sp=world)
        dump.micro_batch(0, index=index, ids=ids[index], positions=positions[index], labels=labels[index], logp=logp[index],
                         cu_seqlens=cu_seqlens)
        dump.step(loss, gradients)


def judge(oracle, folder, change=None):
    path = f"{folder}/model/config.json"
    with open(path) as file:
        config = text = file.read()
    if change:
        config = change(json.loads(text))
        with open(path, "w") as file:
            json.dump(config, file)
    said = subprocess.run([oracle, "ver", f"{folder}/dump", "--model", f"{folder}/model"], capture_output=True, text=True)
    with open(path, "w") as file:
        file.write(text)
    return re.sub("^right: .*", "right", (said.stdout or said.stderr).split("\n")[0])


def without_window(config):
    return dict(config, sliding_window=None)


def as_before_5(config):
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    return dict(config, rope_theta=theta, rope_scaling=None if rope["rope_type"] == "default" else rope)


def another(config):
    """A little less factor, or another base."""
    rope = config["rope_parameters"]
    key = "factor" if rope["rope_type"] not in ("default", "dynamic") else "rope_theta"
    return dict(config, rope_parameters=dict(rope, **{key: rope[key] * 0.9}))


def check(name, got, want):
    print(f"ok {name}" if got == want else f"FAIL {name}: '{got}' in place of '{want}'")


def take_step(model, folder):
    os.makedirs(folder)
    model.save_pretrained(f"{folder}/model")
    write(f"{folder}/dump", *step(model))


def another_place(config):
    """As transformers 4 wrote it: no list of layers, and the window's layers by their first."""
    config = as_before_5(config)
    config.pop("layer_types", None)
    return config


def family(oracle, folder, name, kind, keys, changed):
    config = getattr(transformers, f"{kind}Config")(
        **dict(SHAPE, num_hidden_layers=4, head_dim=8, pad_token_id=None, bos_token_id=1, eos_token_id=2, rope_parameters=dict(
            rope_type="default", rope_theta=5000.0)) | keys)
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():  # transformers' first values of biases and norms are 0 and 1, which could be left out unseen
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
    take_step(model, folder)
    check(name, judge(oracle, folder), "right")
    check(f"{name}, as before 5", judge(oracle, folder, another_place), "right")
    said = judge(oracle, folder, lambda c: dict(c, **changed))
    check(f"{name}, another", "wrong" if said.startswith("wrong") or "model" in said else said, "wrong")


SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, tie_word_embeddings=False)


def float64(oracle, out):
    """Norms, softmaxes and rotary angles are float32 whatever the type of parameters, and angles of late tokens are far off."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**dict(SHAPE, hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1,
                                                max_position_embeddings=1024), num_hidden_layers=2, head_dim=64, initializer_range=0.7,
                                         attn_implementation="eager")).double()
    model.save_pretrained(f"{out}/model")
    rows = [torch.randint(VOCAB, (tokens,)) for tokens in (500, 420)]
    count, kept, loss = sum(len(ids) - 1 for ids in rows), [], 0
    for ids in rows:
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        loss, kept = loss - logp.sum() / count, kept + [torch.nn.functional.pad(logp.detach(), (0, 1))]
    loss.backward()
    for name, options, want in ("unsaid", {}, "insufficient"), ("said", dict(dtype="float32"), "right"):
        dump = Dump(f"{out}/dump", 0, 1, accumulation=2, **options)
        for number, (ids, logp) in enumerate(zip(rows, kept)):
            dump.micro_batch(number, index=torch.arange(len(ids)), ids=ids, labels=torch.nn.functional.pad(ids[1:], (0, 1), value=IGNORED),
                             logp=logp, cu_seqlens=torch.tensor([0, len(ids)]))
        dump.step(gradients={n: p.grad for n, p in model.named_parameters()})
        said = judge(oracle, out)
        check(f"llama in float64, {name}", said.split(":")[0], want)


def main(oracle, out):
    float64(oracle, f"{out}/float64")
    shape = dict(SHAPE, num_hidden_layers=2, head_dim=24)
    for number, (name, rope) in enumerate(ROPES.items()):
        folder = f"{out}/{number}"
        torch.manual_seed(number)
        take_step(LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=dict(rope, rope_theta=5000.0,
                                                                             rope_type=name.split(",")[0]))), folder)
        check(f"rope {name}", judge(oracle, folder), "right")
        check(f"rope {name}, as before 5", judge(oracle, folder, as_before_5), "right")
        check(f"rope {name}, another", judge(oracle, folder, another).split(":")[0], "wrong")
    for window in (1, 7, None):
        folder = f"{out}/window{window}"
        take_step(MistralForCausalLM(MistralConfig(**shape, sliding_window=window)), folder)
        check(f"mistral, window {window}", judge(oracle, folder), "right")
        if window:
            check(f"mistral, window {window}, another", judge(oracle, folder, without_window).split(":")[0], "wrong")
    for number, (name, (kind, keys, changed)) in enumerate(FAMILIES.items()):
        family(oracle, f"{out}/family{number}", name, kind, keys, changed)


if __name__ == "__main__":
    main(*sys.argv[1:])
