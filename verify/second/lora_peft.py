# SPDX-License-Identifier: MIT OR Unlicense
"""Writes verify/second/golden_lora.tsv: what PEFT and torch make of three steps of LoRA in float64, and holds train_sft against it.

    lora_peft.py verify/second/golden_lora.tsv      after make build/train_sft

The model and the first adapters are train_sft's (of a seed); losses, gradients and both optimizers are torch's. It also lets PEFT
read the trained folder, and compares its logits with those of the merged model. verify/tests/test_lora.sh runs the same commands.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

# The models compute norms, softmaxes and angles in what they call float32, whatever their parameters are.
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

DATA = Path(__file__).with_name("golden_lora.jsonl")
FRESH = "--num_hidden_layers 1 --hidden_size 8 --num_attention_heads 2 --num_key_value_heads 1 --intermediate_size 8 --seed 3"
PLAIN = "--device reference --train_batch_size 4 --lr_scheduler constant --warmup_steps 0 --max_norm 0 --packing_samples --max_len 64"
WAYS = {"adamw": "--optim adamw --learning_rate 0.01 --adam_betas 0.9,0.95 --l2 0.1", "sgd": "--optim sgd --learning_rate 0.5 --l2 0"}
STEPS, IGNORED = 3, -100


def train(folder, options):
    words = f"build/train_sft --dataset {DATA} --save_path {folder} --metrics_path {folder}.jsonl {PLAIN} {options}"
    subprocess.run(words.split(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def batch():
    records = [json.loads(line) for line in DATA.open()]
    width = max(len(r["input_ids"]) for r in records)
    rows = [[r["input_ids"] + [0] * (width - len(r["input_ids"])), [1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])),
             r["labels"] + [IGNORED] * (width - len(r["labels"]))] for r in records]
    return (torch.tensor([row[i] for row in rows]) for i in range(3))


def model_of(base, adapters):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapters, is_trainable=True, autocast_adapter_dtype=False)


def optimizer(way, learning):
    if way == "sgd":
        return torch.optim.SGD(learning, lr=.5)
    return torch.optim.AdamW(learning, lr=.01, betas=(.9, .95), eps=1e-8, weight_decay=.1)


def peft_steps(base, start, way):
    ids, attended, labels = batch()
    model = model_of(base, start)
    optim, losses = optimizer(way, [p for p in model.parameters() if p.requires_grad]), []
    for _ in range(STEPS):
        logits = model(input_ids=ids, attention_mask=attended).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses, {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def apart(a, b):
    return float(((a - b).norm() / b.norm()).detach())


def main(path):
    with tempfile.TemporaryDirectory() as room:
        base = train(f"{room}/base", f"{FRESH} --max_steps 0")
        lora = f"--pretrain {base} --lora_rank 2 --lora_alpha 5"
        start = train(f"{room}/start", f"{lora} --max_steps 0")
        lines = [f"# peft {peft.__version__}, torch {torch.__version__}, transformers {transformers.__version__}; {Path(__file__).name} "
                 "wrote this: SPDX-License-Identifier: MIT OR Unlicense"]
        for way, options in WAYS.items():
            losses, learnt = peft_steps(base, start, way)
            ours = train(f"{room}/{way}", f"{lora} {options} --max_steps {STEPS} --save_merged")
            said = [json.loads(line)["loss"] for line in open(f"{ours}.jsonl")]
            tensors = load_file(f"{ours}/adapter_model.safetensors")
            order = [key for key in json.loads(header(f"{ours}/adapter_model.safetensors")) if key != "__metadata__"]
            assert set(order) == set(learnt), set(order) ^ set(learnt)
            print(way, "loss off by", max(abs(a - b) for a, b in zip(said, losses)),
                  "adapters by", max(apart(tensors[name], learnt[name]) for name in order))
            lines.append("\t".join([way, "loss"] + [f"{loss:.17g}" for loss in losses]))
            lines += ["\t".join([way, name] + [f"{value:.17g}" for value in learnt[name].flatten().tolist()]) for name in order]
            ids, attended, _ = batch()
            merged = AutoModelForCausalLM.from_pretrained(f"{ours}/merged", dtype=torch.float64, attn_implementation="eager")
            print(way, "read by PEFT, logits of the merged model off by",
                  apart(merged(input_ids=ids, attention_mask=attended).logits, model_of(base, ours)(input_ids=ids, attention_mask=attended).logits))
    Path(path).write_text("\n".join(lines) + "\n")


def header(path):
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


if __name__ == "__main__":
    main(sys.argv[1])
