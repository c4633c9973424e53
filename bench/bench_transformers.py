#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""SFT steps and sampled text of a real model, beside transformers on the same cores: both take turns, on the same rows.

    make build/steps; pip install torch transformers
    python3 bench/bench_transformers.py MODEL TEXT [--rows 1024,4096,311+97+53+223+149+159] [--threads 1,2] [--rounds 3] [--json FILE] [--markdown FILE]
    python3 bench/bench_transformers.py --tiny          a small model of random weights, once, for its answers alone

MODEL is a Hugging Face folder, TEXT any text. A step is forward, backward, clipping and AdamW in float32 over one row of one or
several documents: for transformers scaled_dot_product_attention and the fused AdamW, several documents packed with their positions,
or padded to the longest, and all of it with gradient checkpointing and without; each side's fastest way counts. Losses and gradient norms of all steps must agree. Text: 16 prompts of 64 tokens, 64 more of each, the likeliest
token every time, by generate() with its cache. Figures are medians of rounds, after one that is not counted.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROMPTS, PROMPT, FRESH = 16, 64, 64
RATE = 1e-5
LIMITS = 2e-4, 5e-3  # relative, of losses and norms; float32 of transformers is 1e-5 and 7e-4 from float64 in a first step
TINY_LIMITS = 2e-6, 2e-5  # two layers: 1e-7 and 2e-7 are seen
SAME = 0.8  # share of tokens: two that are equally likely may change places, and the text goes on from there


PACKED, PADDED = "packed", "padded"


class Ours:
    WAYS = (PACKED,)

    def __init__(self, program, model, threads, recompute):
        self.process = subprocess.Popen([program, model, str(threads), str(int(recompute))], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        answer = ""
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            fail(f"{self.process.args[0]} ended at '{line}'; what it said is above")
        return answer

    def step(self, path, ids, lengths, way):
        return tuple(map(float, self.ask(f"step {path} {','.join(map(str, lengths))}").split()))

    def texts(self, path, ids):
        seconds = float(self.ask(f"texts {path} {PROMPTS} {FRESH}"))
        return seconds, [list(map(int, self.process.stdout.readline().split())) for _ in range(PROMPTS)]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Theirs:
    WAYS = (PACKED, PADDED)

    def __init__(self, program, model, threads, recompute):
        import torch
        import transformers
        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        if recompute:
            self.model.gradient_checkpointing_enable()
        groups = [dict(params=[p for p in self.model.parameters() if (p.dim() > 1) == wide], weight_decay=0.1 if wide else 0)
                  for wide in (True, False)]
        self.adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def inputs(self, ids, lengths, way):
        """Labels: none is the next token of another document, and the model shifts them."""
        torch = self.torch
        parts = list(torch.tensor(ids).split(lengths))
        labels = [torch.cat((torch.tensor([-100]), part[1:])) for part in parts]
        if way == PACKED:
            positions = {} if len(parts) == 1 else dict(position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
            return dict(input_ids=torch.tensor([ids]), labels=torch.cat(labels)[None], **positions)
        pad = torch.nn.utils.rnn.pad_sequence
        return dict(input_ids=pad(parts, batch_first=True), labels=pad(labels, batch_first=True, padding_value=-100),
                    attention_mask=pad([torch.ones_like(part) for part in parts], batch_first=True))

    def step(self, path, ids, lengths, way):
        torch = self.torch
        began = time.perf_counter()
        loss = self.model(**self.inputs(ids, lengths, way), use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return time.perf_counter() - began, loss.item(), norm.item()

    def texts(self, path, ids):
        rows = self.torch.tensor(ids).reshape(PROMPTS, PROMPT)
        self.model.eval()
        began = time.perf_counter()
        with self.torch.no_grad():
            out = self.model.generate(rows, attention_mask=self.torch.ones_like(rows), max_new_tokens=FRESH, min_new_tokens=FRESH,
                                      do_sample=False)
        return time.perf_counter() - began, out[:, PROMPT:].tolist()

    def close(self):
        pass


def fail(sentence):
    sys.exit(f"error: {sentence}")


def take_turns(sides, call, inputs, *rest):
    """call's answers, (rounds) of each side; the first round, of what is done once only, is left out."""
    answers = [[] for _ in sides]
    for i, (path, ids) in enumerate(inputs):
        for k in range(len(sides)) if i % 2 else reversed(range(len(sides))):
            answers[k].append(getattr(sides[k], call)(path, ids, *rest))
    return answers


def rows_of(folder, ids, length, count):
    import array
    for i in range(count):
        part = array.array("i", ids[i * length:(i + 1) * length])
        path = f"{folder}/{length}_{i}"
        with open(path, "wb") as file:
            part.tofile(file)
        yield path, part.tolist()


def far(got, want):
    apart = [abs(g - w) / abs(w) if w else float("inf") for g, w in zip(got, want)]
    return max(a if a == a else float("inf") for a in apart)  # max alone passes over NaN


def steps(given, folder, ids, lengths, threads):
    """Seconds of each side with checkpointing and without, of its faster way, and how far losses and norms are apart."""
    inputs = list(rows_of(folder, ids, sum(lengths), given.rounds + 1))
    seconds, loss, norm = {}, 0, 0
    for recompute in (False, True):
        seconds[recompute], ours = [float("inf")] * 2, None
        for way in Theirs.WAYS if len(lengths) > 1 else Theirs.WAYS[:1]:
            kinds = [kind for kind in (Ours, Theirs) if way in kind.WAYS]
            sides = [kind(given.steps, given.model, threads, recompute) for kind in kinds]
            answers = take_turns(sides, "step", inputs, lengths, way)
            for side in sides:
                side.close()
            ours, theirs = ours or answers[0], answers[-1]
            loss = max(loss, far([a[1] for a in ours], [a[1] for a in theirs]))
            norm = max(norm, far([a[2] for a in ours], [a[2] for a in theirs]))
            for side, each in enumerate((ours, theirs)):
                seconds[recompute][side] = min(seconds[recompute][side], statistics.median(a[0] for a in each[1:]))
    return seconds, loss, norm


def sampled(given, folder, ids, threads):
    inputs = list(rows_of(folder, ids, PROMPTS * PROMPT, given.rounds + 1))
    sides = [kind(given.steps, given.model, threads, False) for kind in (Ours, Theirs)]
    ours, theirs = take_turns(sides, "texts", inputs)
    for side in sides:
        side.close()
    pairs = [(a, b) for x, y in zip(ours, theirs) for s, t in zip(x[1], y[1]) for a, b in zip(s, t)]
    return ([statistics.median(a[0] for a in each[1:]) for each in (ours, theirs)],
            sum(a == b for a, b in pairs) / (len(ours) * PROMPTS * FRESH))


def tiny_model(folder):
    import torch
    import transformers
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=307, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder, torch.randint(3, 307, (4 * PROMPTS * PROMPT,)).tolist()


def numbers(option, text, least, between=","):
    """A list; a document of one token has no loss."""
    if not all(n.isdecimal() and int(n) >= least for n in text.split(between)):
        fail(f"--{option} is '{text}'; give numbers from {least} on, such as {4 * least}{between}{5 * least}")
    return [int(n) for n in text.split(between)]


def compare(given, folder, ids):
    rows, threads = [numbers("rows", row, 2, "+") for row in given.rows.split(",")], numbers("threads", given.threads, 1)
    most = max([sum(row) for row in rows] + [PROMPTS * PROMPT]) * (given.rounds + 1)
    if len(ids) < most:
        fail(f"{given.text} has {len(ids)} tokens, {most} are wanted; give a longer text, or fewer --rounds")
    table = ["| what | threads | seqpar, tokens/s (with checkpointing) | transformers (with checkpointing) | best of each | agreement |",
             "|---|---:|---:|---:|---:|---|"]
    cases = []
    print("\n".join(table), flush=True)
    for count in threads:
        for row in rows:
            seconds, loss, norm = steps(given, folder, ids, row, count)
            length, several = sum(row), f" in {len(row)} documents" if len(row) > 1 else ""
            per = [[length / seconds[r][k] for r in (False, True)] for k in (0, 1)]
            limits = TINY_LIMITS if given.tiny else LIMITS
            ok = loss <= limits[0] and norm <= limits[1]
            cases.append(dict(what="step", tokens=length, documents=len(row), threads=count, ours=per[0], theirs=per[1], ratio=max(per[0]) / max(per[1]),
                              loss_apart=loss, norm_apart=norm, correct=ok))
            table.append(f"| SFT step, row of {length:,}{several} | {count} | {per[0][0]:.1f} ({per[0][1]:.1f}) | {per[1][0]:.1f} "
                         f"({per[1][1]:.1f}) | {max(per[0]) / max(per[1]):.2f} | loss {loss:.0e}, norm {norm:.0e}"
                         f"{'' if ok else ': WRONG'} |")
            print(table[-1], flush=True)
        seconds, same = sampled(given, folder, ids, count)
        per = [PROMPTS * FRESH / s for s in seconds]
        cases.append(dict(what="text", texts=PROMPTS, threads=count, ours=per[0], theirs=per[1], ratio=per[0] / per[1], same=same,
                          correct=same >= SAME))
        table.append(f"| {PROMPTS} texts of {FRESH} tokens | {count} | {per[0]:.1f} | {per[1]:.1f} | {per[0] / per[1]:.2f} | "
                     f"{same:.1%} of the tokens{'' if same >= SAME else ': WRONG'} |")
        print(table[-1], flush=True)
    for path, text in ((given.json, json.dumps(cases, indent=1)), (given.markdown, "\n".join(table))):
        if path:
            with open(path, "w") as file:
                file.write(text + "\n")
    return 0 if all(case["correct"] for case in cases) else 1


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?")
    options.add_argument("text", nargs="?")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--rows", default="1024,4096,311+97+53+223+149+159", help="tokens of each row; with + of its documents")
    options.add_argument("--threads", default="1,2")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", default=f"{HERE}/build/steps", help="the program that computes seqpar's side")
    options.add_argument("--json")
    options.add_argument("--markdown")
    given = options.parse_args()
    if not given.tiny and not given.text:
        fail("give MODEL and TEXT, or --tiny")
    if given.rounds < 1:
        fail(f"--rounds is {given.rounds}; give at least 1")
    if not os.access(given.steps, os.X_OK):
        fail(f"there is no program {given.steps}; type make build/steps")
    if not given.tiny and not os.path.exists(f"{given.model}/config.json"):
        fail(f"{given.model} is no model's folder, it has no config.json; demos/get_smollm2.py makes one")
    try:
        import transformers
    except ImportError:
        fail("this python3 has no transformers; type pip install torch transformers")
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if given.tiny:
            given.model, ids = tiny_model(f"{folder}/model")
            given.rows, given.threads, given.rounds = "97,37+2+59", "1", 1
        else:
            try:
                with open(given.text) as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError) as error:
                fail(f"{given.text} cannot be read as text: {error}")
            ids = transformers.AutoTokenizer.from_pretrained(given.model)(text)["input_ids"]
        return compare(given, folder, ids)


if __name__ == "__main__":
    sys.exit(main())
