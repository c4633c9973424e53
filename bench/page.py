#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""The page of a CPU, from what `make bench` wrote into build/bench.

    page.py FOLDER [--tiny] [--note SENTENCE]      writes FOLDER/NAME_OF_THE_CPU.md and prints its path

--note: what a reader must know of this run, such as what else the machine did meanwhile.

transformers.json, of bench_transformers.py, is optional; the others must be there, and every case right."""
import argparse
import datetime
import json
import os
import re
import sys

# A page has 95 lines: of these shapes it gives the range, and build/bench/cpu.json each.
SMALL = ("256x", "512x", "S=768")
BENCHES = ("cpu", "chunks", "vocab", "ranks", "sample", "step")


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


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def left_out(cases):
    """What the rows that are not shown would have said, the worst of them included."""
    if not cases:
        return ""
    over = [value for case in cases for key, value in case.items() if key.endswith("_over_ours") and value]
    return f" Not shown: {len(cases)} smaller shapes, {span([case['share_of_peak'] for case in cases])} of peak" + \
        (f", peers {span(over)}." if over else ".")


def cpu(cases):
    small = [case for case in cases if case["shape"].startswith(SMALL)]
    shown = [case for case in cases if case not in small] or cases
    rows = [(case["case"], case["shape"], f"{case['gflops']:.1f}", f"{case['share_of_peak']:.2f}", peers(case)) for case in shown]
    return ["One thread, best run; GFLOP/s, the share of the machine's multiply-add peak, and the peers' time over ours."
            + left_out(small if shown != cases else []), ""] + \
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
    rows = [(case["case"], case["pass"], case["shape"], f"{case['ratio']:.2f}") for case in cases if not case["head_stride"]]
    return ["Ranks of this machine: the first time over the second.", ""] + table(("what", "pass", "shape", "ratio"), rows) + \
        strides([case for case in cases if case["head_stride"]])


def strides(cases):
    """A row for each stride: forward and backward side by side."""
    passes = {(case["head_stride"], case["pass"]): case["ratio"] for case in cases}
    bytes_of = {case["head_stride"]: case["exchange_bytes"] for case in cases}
    rows = [(str(s), f"{passes[s, 'forward']:.2f}", f"{passes[s, 'backward']:.2f}", f"{bytes_of[s] / 2**20:.2f}") for s in sorted(bytes_of)]
    return [f"llama3 on 4 ranks by `--ring_head_stride` ({cases[0]['shape']}): processor time over that of stride 1, and message buffers.",
            ""] + table(("stride", "forward", "backward", "MiB a rank"), rows)


def sample(cases):
    rows = [(str(case["texts"]), f"{case['tokens_per_second']:.0f}", f"{case['share_of_stream']:.2f}", f"{case['share_of_product']:.2f}")
            for case in cases]
    return ["Sampling, one thread: tokens/s, and the share of a loop that reads the weights, and of a large product.", ""] + \
        table(("texts at a time", "tokens/s", "of the loop", "of the product"), rows)


def step(cases):
    """Of a whole model and of adapters: first the plain step, then what an option makes of it."""
    rows, head = [], ""
    for case in cases:
        name = case["way"].strip()
        head = head if case["way"].startswith(" ") else name
        rows.append((name if name == head else f"{head}, {name}", f"{case['seconds']:.2f}", f"{case['over_products']:.3f}",
                     f"{case['peak'] / 1e6:.0f}", f"{case['of_bound']:.2f}"))
    return ["A step of SmolLM2-135M's shape, one thread: time over that of its products; peak of memory over weights + 1.2 activations.",
            ""] + table(("step", "seconds", "over products", "peak MB", "of the bound"), rows)


def transformers(cases):
    what = {"step": lambda c: f"SFT step, row of {c['tokens']:,}" + (f" in {c['documents']} documents" if c.get("documents", 1) > 1 else ""),
            "text": lambda c: f"{c['texts']} texts"}

    def best(value):
        return max(value) if isinstance(value, list) else value
    rows = [(what[c["what"]](c), str(c["threads"]), f"{best(c['ours']):.1f}", f"{best(c['theirs']):.1f}", f"{c['ratio']:.2f}") for c in cases]
    return ["SmolLM2-135M beside transformers on PyTorch, tokens/s, losses and texts compared.", ""] + \
        table(("what", "threads", "seqpar", "transformers", "ratio"), rows)


def check_peak(cases, tiny):
    """Nothing is faster than the peak: where it seems so, the peak was measured while something else ran. Tiny cases are not timed."""
    above = [case["share_of_peak"] for case in cases if not case["share_of_peak"] <= 1]
    if above and not tiny:
        fail(f"a share of the peak is {above[0]:.2f}; something else ran meanwhile: run make bench on a quiet machine")


def summary(cases, model):
    text = f"attention at {span([case['share_of_peak'] for case in cases if case['case'].startswith('attention')])} of the peak of a core"
    steps = [case["ratio"] for case in model or () if case["what"] == "step"]
    if steps:
        text += f", an SFT step of SmolLM2-135M at {span(steps)} of transformers' speed"
    return f"Summary: {text}, {datetime.date.today()}."


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--note", default="")
    given = options.parse_args()
    tiny, name = given.tiny, processor()
    found = {bench: load(bench, tiny) for bench in BENCHES}
    check_peak(found["cpu"], tiny)
    model = load("transformers", tiny, False)
    lines = [f"# {name}", "", "<!-- SPDX-License-Identifier: MIT OR Unlicense -->", "", summary(found["cpu"], model), "",
             f"{os.cpu_count()} cores, {datetime.date.today()}, `make bench BENCH_RESULTS=1`. Every result was right."
             + (f" {given.note}" if given.note else ""), ""]
    for bench in BENCHES:
        lines += globals()[bench](found[bench])
    if model:
        lines += transformers(model)
    os.makedirs(given.folder, exist_ok=True)
    path = f"{given.folder}/{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}.md"
    with open(path, "w") as file:
        file.write("\n".join(lines).rstrip() + "\n")
    print(path)


if __name__ == "__main__":
    main()
