# SPDX-License-Identifier: MIT OR Unlicense
"""What seqpar_trainer leaves of a Trainer's step on two ranks, judged: right, with gradients that are half of what they should be, in
float64, and of a model that seqpar-verify does not compute.

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

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "frameworks"))
from common import on_ranks

import torch
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, Trainer,
                          TrainerCallback, TrainingArguments)

import seqpar_trainer

VOCAB, TOKENS, PROMPTS = 64, (24, 17, 21, 13), (9, 3, 14, 2)  # two micro-batches of each rank


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


class OneLess(TrainerCallback):
    """Takes a row from what the second rank has of the step."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, *_, **__):
        if args.process_index == 1:
            self.trainer.seqpar_recorder.rows.pop()


def step(folder, net, half=False, less=False, groups=False, **keywords):
    """A step, written to folder/dump; what was printed. groups: the Trainer's own AdamW, which spares norms its decay."""
    args = TrainingArguments(f"{folder}/out", per_device_train_batch_size=1, gradient_accumulation_steps=2, use_cpu=True,
                             max_steps=2 if keywords.get("step") else 1, report_to=[], logging_steps=1, save_strategy="no",
                             train_sampling_strategy="sequential", disable_tqdm=True, weight_decay=0.1 if groups else 0, learning_rate=0.02)
    optimizer = None if groups else torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = Trainer(net, args, train_dataset=list(rows()), optimizers=(optimizer, None))
    if half:
        backward = trainer.accelerator.backward
        trainer.accelerator.backward = lambda loss, **named: backward(loss / 2, **named)
    seqpar_trainer.record(trainer, f"{folder}/dump", **keywords)
    if less:
        trainer.add_callback(OneLess(trainer))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer.train()
    return said.getvalue()


def steps(rank, out):
    """All of them; what was printed, by name."""
    return {"half": step(f"{out}/half", llama(), half=True), "right": step(f"{out}/right", llama()),
            "wide": step(f"{out}/wide", llama(torch.float64)), "other": step(f"{out}/other", gpt2()),
            "without": step(f"{out}/without", llama(), model=False), "less": step(f"{out}/less", llama(), less=True),
            "groups": step(f"{out}/groups", llama(), groups=True), "later": step(f"{out}/later", llama(), step=2), "never": step(f"{out}/never", llama(), step=3)}


def refused(out):
    """What is said of what cannot be recorded."""
    args = TrainingArguments(f"{out}/out", use_cpu=True, report_to=[])
    encoder = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    twice = Trainer(llama(), args)
    seqpar_trainer.record(twice, f"{out}/first")
    for trainer, more, words in ((twice, {}, f"this trainer is recorded to {out}/first already"),
                                 (Trainer(encoder, args), {}, "T5ForConditionalGeneration is an encoder and a decoder; give a decoder"),
                                 (Trainer(llama(), args), dict(step=0), "step is 0; the first one is 1"),
                                 ("no", {}, "a str is no Trainer of transformers or TRL")):
        try:
            seqpar_trainer.record(trainer, f"{out}/second", **more)
            yield "accepted", words
        except ValueError as error:
            yield str(error), words


def ver(oracle, folder, *options):
    """Exit code and the headline in one line."""
    said = subprocess.run([oracle, "ver", folder, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return said.returncode, " ".join(re.split(r"\n {4}(?=\S)", said.stdout)[0].split())


def content(dump):
    """Of the first rank's file."""
    return pathlib.Path(dump, "rank0.safetensors").read_bytes()


def check(name, got, code, *words):
    missing = [word for word in words if word not in got[1]]
    print(f"ok recorder_{name}" if got[0] == code and not missing else f"FAIL recorder_{name}: {got}, not {code} with {missing}")


def main(oracle, out):
    os.makedirs(out, exist_ok=True)
    printed, others = on_ranks(steps, out)
    check("one_rank_speaks", (0, "".join(others.values()) or "nothing"), 0, "nothing")
    half, wide, other = (f"{out}/{name}/dump" for name in ("half", "wide", "other"))
    check("says_how", (0, printed["half"]), 0, f"seqpar-verify ver {half} --model {half}/model --strict")
    check("half_unjudged", ver(oracle, half), 0, f"right: places, labels, loss, norm, step (5 of 12 stages); gradients of parameters were NOT judged: give --model {half}/model")
    check("half_strict", ver(oracle, half, "--strict"), 4, "insufficient: ", "gradients not judged: it takes --model")
    check("half_judged", ver(oracle, half, "--model", f"{half}/model"), 1, "wrong: one of over_dp, over_accumulation")
    for name in "right", "wide", "groups":
        dump = f"{out}/{name}/dump"
        check(f"{name}_judged", ver(oracle, dump, "--model", f"{dump}/model", "--strict"), 0, "right: ", ", loss, gradients, norm, step (")
    with open(f"{wide}/rank1.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    check("float64_is_declared", (0, header["__metadata__"]["dtype"] + " " + header["grad.lm_head.weight"]["dtype"]), 0, "float32 F64")
    check("other_family", (0, printed["other"]), 0, f'seqpar_trainer.record(trainer, "{other}_sp1")', f"ver {other} --want {other}_sp1")
    check("other_has_no_model", (int(os.path.exists(f"{other}/model")), ""), 0)
    check("without_model", (int(os.path.exists(f"{out}/without/dump/model")), printed["without"]), 0, "dump_sp1")
    later = f"{out}/later/dump"
    check("later_judged", ver(oracle, later, "--model", f"{later}/model", "--strict"), 0, "right: ", ", loss, gradients, norm, step (")
    check("later_is_another", (int(content(later) == content(f"{out}/right/dump")), ""), 0)
    check("less", (int(os.path.exists(f"{out}/less/dump/rank0.safetensors")), printed["less"]), 0,
          "nothing is written: ranks have 2, 1 rows in this step")
    check("never", (int(os.path.exists(f"{out}/never/dump/rank0.safetensors")), printed["never"]), 0,
          "nothing is written: the run had 2 steps, and step 3 was asked for")
    for number, (said, words) in enumerate(refused(out)):
        check(f"refuses_{number}", (0, said), 0, words)
    families = pathlib.Path(__file__).parents[2] / "demos/trainer/model/families.h"
    known = re.findall(r'DEMO_NAMED\("(\w+)"', families.read_text())
    check("families", (int(sorted(known) != sorted(seqpar_trainer.FAMILIES)), json.dumps(known)), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
