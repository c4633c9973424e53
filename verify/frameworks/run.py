# SPDX-License-Identifier: MIT OR Unlicense
"""Runs the adapters and prints what seqpar-verify says of each framework.

    python run.py [NAME ...] [--markdown FILE]   all adapters, or those named
    python run.py --issue NAME                   a report, ready to send, with what its repro
                                                 says here; --issue list: their names

An adapter whose package is not there is skipped.
"""
import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys

from common import HERE, VERIFY

ADAPTERS = [
    "torch_cp", "ring_flash", "yunchang_usp", "swift_ring", "ulysses_utils", "deepspeed_alst",
    "hf_trainer", "hf_ulysses", "trl_sft", "trl_grpo", "trl_pairs", "trl_reward", "ms_swift",
    "verl_loss", "llamafactory_v1", "axolotl_cp", "openrlhf_loss", "megatron_loss",
    "xtuner_loss", "small_losses", "veomni_steps", "automodel_cp",
    "automodel_window", "liger_chunked", "peft_ulysses", "torchtitan_loss",
    "source_cp", "source_gae"
]
SECONDS = 900
HEADS = ("framework", "version", "check", "verdict", "in plain torch", "finding")


def run(name):
    """Lines of an adapter, and why there are none, or no more."""
    process = subprocess.Popen([sys.executable, f"{HERE}/{name}.py"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "SEQPAR_VERIFY": VERIFY})
    try:
        out, error = process.communicate(timeout=SECONDS)
        lines = re.findall(r"^\w*(?:Error|Exception|Exit)\w*: .*", error, re.M)
        reason = (lines
                  or [f"exit code {process.returncode}"])[-1] if process.returncode else None
    except subprocess.TimeoutExpired:
        process.kill()
        out, reason = process.communicate()[0], f"not done after {SECONDS} s"
    return [line.split("\t") for line in out.splitlines() if line.count("\t") == 5], reason


def table(rows, markdown=False):
    rows = [list(HEADS)] + rows
    if markdown:
        rows.insert(1, ["---"] * len(HEADS))
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                     for row in rows)


def issue(name):
    path = HERE / "issues" / f"{name}.py"
    code = path.read_text()
    said = dict(
        re.findall(r"^(Title|Packages|Ranks|Mistake|Expected|Why): (.*?)(?=^\w+: |\Z)",
                   code.split('"""')[1], re.M | re.S))
    said = {key: " ".join(text.split()) for key, text in said.items()}
    explained = json.loads(
        subprocess.run([VERIFY, "explain", said["Mistake"], "--json"], capture_output=True,
                       text=True).stdout)
    got = subprocess.run([sys.executable, path], capture_output=True, text=True,
                         timeout=SECONDS)
    print(f"# {said['Title']}\n\n## Environment\n")
    ranks = said.get("Ranks", "two CPU ranks with gloo")
    print(f"Python {platform.python_version()}, {platform.system()}, {ranks}; "
          + ", ".join(f"{p} {importlib.metadata.version(p)}" for p in said["Packages"].split()))
    print(f"\n## What happens\n\n{said['Why']}\n\n```\n"
          + "\n".join(line for line in got.stdout.splitlines() if not line.startswith("["))
          + "\n```")
    print(f"\n## Expected\n\n{said['Expected']}\n\nRight: `{explained['right']}`. "
          f"Here: `{explained['wrong']}`. {explained['fix']}")
    repro = code.split("\n", 1)[1].split('"""')[2].strip()
    print(f"\n## Repro\n\n```python\n{repro}\n```")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--markdown", metavar="FILE")
    parser.add_argument("--issue", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.issue == "list":
        sys.exit(print("\n".join(sorted(p.stem for p in (HERE / "issues").glob("*.py")))))
    if arguments.issue:
        sys.exit(issue(arguments.issue))
    rows, skipped = [], []
    for name in arguments.names or ADAPTERS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        lines, reason = run(name)
        rows += lines
        if reason:
            skipped.append(f"{'stopped' if lines else 'skipped'}: {name}: {reason}")
    print("\n".join([table(rows), *skipped]))
    if arguments.markdown:
        open(arguments.markdown,
             "w").write("\n".join([table(rows, True), "", *(f"- {s}" for s in skipped), ""]))
