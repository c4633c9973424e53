#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""The page of a CPU, from what `make bench` wrote into build/bench.

    page.py FOLDER [--tiny]      writes FOLDER/NAME_OF_THE_CPU.md and prints its path

transformers.json, of bench_transformers.py, is optional; the others must be there, and every case right."""
import datetime
import json
import os
import re
import sys

# A page has 80 lines; these shapes are in the JSON.
SMALL = ("256x", "512x", "S=768")
BENCHES = ("cpu", "chunks", "vocab", "ranks", "sample")


def fail(sentence):
    sys.exit(f"error: {sentence}")


def load(name, tiny, needed=True):
    path = f"build/bench/{'tiny_' if tiny else ''}{name}.json"
    if not os.path.exists(path):
        if needed:
            fail(f"there is no {path}; type make bench")
        return None
    with open(path) as file:
        data = json.load(file)
    cases = data if isinstance(data, list) else data["cases"]
    wrong = [case for case in cases if not case["correct"]]
    if wrong or not cases:
        fail(f"{path}: {len(wrong)} of {len(cases)} cases are wrong; a page is of right ones")
    return cases


def processor():
    with open("/proc/cpuinfo") as file:
        found = re.search(r"^model name\s*: (.*)", file.read(), re.M)
    return found.group(1).strip() if found else "CPU"


def table(heads, rows):
    """Columns after the first one to the right."""
    return ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"] + \
           ["| " + " | ".join(row) + " |" for row in rows] + [""]


def peers(case):
    """Their time over ours, of each library that is there."""
    found = {key[:-len("_over_ours")]: value for key, value in case.items() if key.endswith("_over_ours") and value}
    return ", ".join(f"{name} {value:.2f}" for name, value in found.items()) or "-"


def cpu(cases):
    shown = [case for case in cases if not case["shape"].startswith(SMALL)] or cases
    rows = [(case["case"], case["shape"], f"{case['gflops']:.1f}", f"{case['share_of_peak']:.2f}", peers(case)) for case in shown]
    return ["One thread; GFLOP/s, the share of the machine's multiply-add peak, and the peers' time over ours.", ""] + \
        table(("product or attention", "shape", "GFLOP/s", "of peak", "peers"), rows)


def chunks(cases):
    size = max(case["chunk"] for case in cases if case["chunk"] <= 128)
    rows = [(case["shape"], case["pass"], f"{case['relaxed_over_chunks']:.2f}") for case in cases if case["chunk"] == size]
    return [f"What equal bits cost attention: time of the relaxed path over that of chunks of {size} tokens.", ""] + \
        table(("shape", "pass", "ratio"), rows)


def vocab(cases):
    rows = [(case["entry"], f"{case['ms']:.0f}", f"{case['ratio']:.2f}") for case in cases]
    return ["The token layer of a vocabulary, over the products it cannot do without.", ""] + table(("entry", "ms", "ratio"), rows)


def ranks(cases):
    rows = [(case["case"], case["pass"], case["shape"], f"{case['ratio']:.2f}") for case in cases]
    return ["Ranks of this machine: the first time over the second.", ""] + table(("what", "pass", "shape", "ratio"), rows)


def sample(cases):
    rows = [(str(case["texts"]), f"{case['tokens_per_second']:.0f}", f"{case['share_of_stream']:.2f}", f"{case['share_of_product']:.2f}")
            for case in cases]
    return ["Sampling, one thread: tokens/s, and the share of a loop that reads the weights, and of a large product.", ""] + \
        table(("texts at a time", "tokens/s", "of the loop", "of the product"), rows)


def transformers(cases):
    what = {"step": lambda c: f"SFT step, row of {c['tokens']:,}", "text": lambda c: f"{c['texts']} texts"}

    def best(value):
        return max(value) if isinstance(value, list) else value
    rows = [(what[c["what"]](c), str(c["threads"]), f"{best(c['ours']):.1f}", f"{best(c['theirs']):.1f}", f"{c['ratio']:.2f}") for c in cases]
    return ["SmolLM2-135M beside transformers on PyTorch, tokens/s, losses and texts compared.", ""] + \
        table(("what", "threads", "seqpar", "transformers", "ratio"), rows)


def summary(cases, model):
    attention = max(case["share_of_peak"] for case in cases if case["case"].startswith("attention"))
    text = f"attention at {attention:.2f} of the peak of a core"
    steps = [case["ratio"] for case in model or () if case["what"] == "step"]
    if steps:
        text += f", an SFT step of SmolLM2-135M at {min(steps):.2f} to {max(steps):.2f} of transformers' speed"
    return f"Summary: {text}, {datetime.date.today()}."


def main():
    arguments = [word for word in sys.argv[1:] if word != "--tiny"]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        fail("usage: page.py FOLDER [--tiny]")
    tiny, name = "--tiny" in sys.argv, processor()
    found = {bench: load(bench, tiny) for bench in BENCHES}
    model = load("transformers", tiny, False)
    lines = [f"# {name}", "", "<!-- SPDX-License-Identifier: MIT OR Unlicense -->", "", summary(found["cpu"], model), "",
             f"{os.cpu_count()} cores, {datetime.date.today()}, `make bench BENCH_RESULTS=1`. Every result was right.", ""]
    for bench in BENCHES:
        lines += globals()[bench](found[bench])
    if model:
        lines += transformers(model)
    os.makedirs(arguments[0], exist_ok=True)
    path = f"{arguments[0]}/{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}.md"
    with open(path, "w") as file:
        file.write("\n".join(lines).rstrip() + "\n")
    print(path)


if __name__ == "__main__":
    main()
