# SPDX-License-Identifier: MIT OR Unlicense
"""What seqpar_trainer leaves of a Trainer's step, judged: right, with gradients that are half of what they should be, in float64,
and of a model that seqpar-verify does not compute.

    test_recorder.py ORACLE FOLDER
"""
import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import seqpar_trainer

VOCAB, TOKENS, PROMPTS = 64, (24, 17), (9, 3)


def llama(dtype=torch.float32):
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)).to(dtype)


def gpt2():
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64, attn_pdrop=0, embd_pdrop=0,
                                      resid_pdrop=0, bos_token_id=1, eos_token_id=2))


def rows():
    draw = torch.Generator().manual_seed(5)
    for tokens, prompt in zip(TOKENS, PROMPTS):
        ids = torch.randint(VOCAB, (tokens,), generator=draw)
        labels = ids.clone()
        labels[:prompt] = -100
        yield dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))


def step(folder, model, half=False, **keywords):
    """A step of two micro-batches, written to folder/dump; what was printed."""
    args = TrainingArguments(f"{folder}/out", per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=1, use_cpu=True,
                             report_to=[], logging_steps=1, save_strategy="no", max_grad_norm=0, disable_tqdm=True)
    trainer = Trainer(model, args, train_dataset=list(rows()), optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))
    if half:
        backward = trainer.accelerator.backward
        trainer.accelerator.backward = lambda loss, **named: backward(loss / 2, **named)
    seqpar_trainer.record(trainer, f"{folder}/dump", **keywords)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer.train()
    return said.getvalue()


def ver(oracle, folder, *options):
    """Exit code and the headline in one line."""
    said = subprocess.run([oracle, "ver", folder, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return said.returncode, " ".join(re.split(r"\n {4}(?=\S)", said.stdout)[0].split())


def check(name, got, code, *words):
    missing = [word for word in words if word not in got[1]]
    print(f"ok recorder_{name}" if got[0] == code and not missing else f"FAIL recorder_{name}: {got}, not {code} with {missing}")


def main(oracle, out):
    half, right, wide, said, other = (f"{out}/{name}" for name in ("half", "right", "wide", "said", "other"))
    printed = step(half, llama(), half=True)
    check("says_how", (0, printed), 0, f"seqpar-verify ver {half}/dump --model {half}/dump/model --strict")
    check("half_unjudged", ver(oracle, f"{half}/dump"), 0, "right: places, positions, labels, loss (4 of 12 stages); gradients were NOT judged: "
          f"give --model {half}/dump/model")
    check("half_strict", ver(oracle, f"{half}/dump", "--strict"), 4, "insufficient: ", "gradients not judged: it takes --model")
    check("half_judged", ver(oracle, f"{half}/dump", "--model", f"{half}/dump/model"), 1, "wrong: over_accumulation")
    step(right, llama())
    check("right_judged", ver(oracle, f"{right}/dump", "--model", f"{right}/dump/model", "--strict"), 0, "right: ", ", gradients (")
    step(wide, llama(torch.float64))
    check("float64", ver(oracle, f"{wide}/dump", "--model", f"{wide}/dump/model", "--strict"), 0, "right: ", ", gradients (")
    step(said, llama(torch.float64), dtype="float64")
    check("float64_said", ver(oracle, f"{said}/dump", "--model", f"{said}/dump/model"), 4, "insufficient: ", "declare it: metadata dtype float32")
    printed = step(other, gpt2())
    check("other_family", (0, printed), 0, f'seqpar_trainer.record(trainer, "{other}/dump_sp1")', f"ver {other}/dump --want {other}/dump_sp1")
    check("other_has_no_model", (int(os.path.exists(f"{other}/dump/model")), ""), 0)
    printed = step(f"{out}/without", llama(), model=False)
    check("without_model", (int(os.path.exists(f"{out}/without/dump/model")), printed), 0, "dump_sp1")
    families = pathlib.Path(__file__).parents[2] / "demos/trainer/families.h"
    known = re.findall(r'DEMO_NAMED\("(\w+)"', families.read_text())
    check("families", (int(sorted(known) != sorted(seqpar_trainer.FAMILIES)), json.dumps(known)), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
