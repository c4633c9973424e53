# SPDX-License-Identifier: MIT OR Unlicense
"""One optimizer step of models that transformers made, by transformers and by build/train_sft on 1 to 4 ranks, all in float64: the
loss, every gradient (a step of plain descent shows it) and a step of AdamW.

    test_family_steps.py TRAIN_SFT FOLDER [--markdown FILE]
"""
import filecmp
import json
import os
import subprocess
import sys

import torch
import transformers
from safetensors.torch import load_file

# Models compute norms, softmaxes and angles in what they call float32, whatever their parameters are.
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

from test_families import FAMILIES, IGNORED, LENGTHS, PROMPTS, ROPES, SHAPE, rows  # noqa: E402: after that

RANKS = (1, 2, 3, 4)
# Relative, of the loss, the gradients and the AdamW step (L2, of the worst tensor). The worst that was seen is 4e-16, 2e-12 (the
# bias of keys, what is left of sums that cancel) and 4e-12 (where a gradient is small AdamW divides by it).
LIMITS = (1e-14, 1e-11, 3e-11)
# name: class, keys, what a reader should know it by
MODELS = {f"llama, rope {name}": ("Llama", dict(rope_parameters=dict(rope, rope_theta=5000.0, rope_type=name.split(",")[0])))
          for name, rope in ROPES.items() if name in ("default", "linear", "dynamic", "llama3", "yarn")}
MODELS["mistral, window"] = ("Mistral", dict(sliding_window=7))
MODELS.update({name: (kind, keys) for name, (kind, keys, _) in FAMILIES.items()})
MODELS["mixtral, balanced"] = MODELS["mixtral"]
MODELS["qwen3_moe, some layers, balanced"] = MODELS["qwen3_moe, some layers, normed"]
OPTIMIZERS = {"sgd": ("--optim sgd --learning_rate 1 --max_norm 0", lambda p: torch.optim.SGD(p, lr=1), 0),
              "adamw": ("--optim adamw --learning_rate 1e-3 --max_norm 0.5 --l2 0.1",
                        lambda p: torch.optim.AdamW([{"params": [x for x in p if x.dim() > 1], "weight_decay": 0.1},
                                                     {"params": [x for x in p if x.dim() == 1], "weight_decay": 0}],
                                                    lr=1e-3, betas=(0.9, 0.95), eps=1e-8), 0.5)}


def model_of(kind, keys):
    config = getattr(transformers, f"{kind}Config")(
        **dict(SHAPE, num_hidden_layers=4, head_dim=8, pad_token_id=None, bos_token_id=1, eos_token_id=2,
               rope_parameters=dict(rope_type="default", rope_theta=5000.0)) | keys)
    config._experts_implementation = "eager"  # the others know no float64
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.05))
    return model


def balance_of(model):
    """The load-balancing loss of all documents together, which transformers has of a padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows()], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids, _ in rows()], batch_first=True)
    return model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss


def loss_of(model):
    count, total = sum(int((labels != IGNORED).sum()) for _, labels in rows()), 0
    for ids, labels in rows():
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total = total - torch.where(labels == IGNORED, 0, logp.gather(-1, labels.clamp(min=0)[:, None])[:, 0]).sum()
    return total / count


def weights_of(folder):
    return {name: x.double() for name, x in load_file(f"{folder}/model.safetensors").items()}


def far(got, want, before, names):
    """The worst tensor's relative L2 error of what a step has changed."""
    assert got.keys() == want.keys(), (got.keys() ^ want.keys())
    # torch's maximum is NaN where one of them is; Python's would pass over it
    return float(torch.stack([(got[n] - want[n]).norm() / (want[n] - before[n]).norm().clamp(min=1e-12) for n in names]).max())


def moved(before, after):
    """The tensors that plain descent moves: where a gradient is 0 (keys that do not turn have such biases) AdamW divides rounding
    by rounding."""
    size = {n: float((after[n] - before[n]).norm()) for n in after}
    return [n for n in size if not size[n] <= 1e-9 * max(size.values())]


def write_data(path):
    with open(path, "w") as file:
        for (ids, _), prompt in zip(rows(), PROMPTS):
            labels = [IGNORED] * prompt + ids[prompt:].tolist()
            file.write(json.dumps(dict(input_ids=ids.tolist(), labels=labels)) + "\n")


def train(program, folder, options, ranks, to, balance):
    said = subprocess.run([program, "--pretrain", f"{folder}/model", "--dataset", f"{folder}/data.jsonl", "--packing_samples",
                           "--max_len", "128", "--pack_len", "128", "--train_batch_size", str(len(LENGTHS)), "--max_steps", "1",
                           "--device", "reference", "--lr_scheduler", "constant", "--warmup_steps", "0", "--ring_attn_size",
                           str(ranks), "--save_path", to, "--ckpt_path", f"{to}.ckpt", "--metrics_path", f"{to}.jsonl",
                           "--aux_loss_coef", str(balance), *options.split()], capture_output=True, text=True)
    if said.returncode:
        return said.stderr.strip().splitlines()[-1]
    with open(f"{to}.jsonl") as file:
        said = json.loads(file.readline())
    return said["loss"] + said.get("aux_loss", 0)


def one(program, folder, kind, keys, balance):
    """Errors of loss, gradients and AdamW step, and whether all ranks wrote the same bytes; or a sentence."""
    os.makedirs(folder)
    write_data(f"{folder}/data.jsonl")
    errors, same, names = [], True, None
    for name, (options, optimizer, clip) in OPTIMIZERS.items():
        model = model_of(kind, keys)
        model.save_pretrained(f"{folder}/model")
        before = weights_of(f"{folder}/model")
        loss = loss_of(model) + (balance * balance_of(model) if balance else 0)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer(list(model.parameters())).step()
        model.save_pretrained(f"{folder}/{name}")
        for ranks in RANKS:
            to = f"{folder}/{name}{ranks}"
            got = train(program, folder, options, ranks, to, balance)
            if isinstance(got, str):
                return got
            same = same and filecmp.cmp(f"{folder}/{name}{RANKS[0]}/model.safetensors", f"{to}/model.safetensors", shallow=False)
        want = weights_of(f"{folder}/{name}")
        if not errors:
            errors.append(abs(got - loss.item()) / loss.item())
            names = moved(before, want)
        errors.append(far(weights_of(f"{folder}/{name}{RANKS[0]}"), want, before, names))
    return errors, same


def main(program, out, *options):
    lines = ["# Families", "", "<!-- SPDX-License-Identifier: MIT OR Unlicense -->", "", f"One optimizer step of each family's models, made by transformers {transformers.__version__}, computed by it and "
             "by `train_sft`, both in float64:", "relative errors of the loss, of the gradients and of what a step of AdamW adds (L2, of the "
             "worst tensor). Written by", "`verify/python/test_family_steps.py --markdown`.", "",
             "| model (random, tiny) | loss | gradients | AdamW step | 1, 2, 3 and 4 ranks |", "|---|---:|---:|---:|---|"]
    for number, (name, (kind, keys)) in enumerate(MODELS.items()):
        said = one(program, f"{out}/{number}", kind, keys, 0.5 if "balanced" in name else 0)
        if isinstance(said, str):
            print(f"FAIL step of {name}: {said}")
            continue
        errors, same = said
        good = all(e <= limit for e, limit in zip(errors, LIMITS)) and same
        lines.append(f"| {name} | " + " | ".join(f"{e:.0e}" for e in errors) + f" | {'equal bytes' if same else 'differ'} |")
        print(f"ok step of {name}" if good else f"FAIL step of {name}: {lines[-1]}")
    if options[:1] == ("--markdown",):
        with open(options[1], "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
