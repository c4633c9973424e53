# SPDX-License-Identifier: MIT OR Unlicense
"""What `seqpar-verify ver` says of steps with a mistake planted in them, and of right ones.

    python matrix.py build/seqpar-verify --seeds 3 --right 1000 --markdown matrix.md
    python matrix.py build/seqpar-verify --mistakes over_sp stale_kv --by-variant --right 0
    python matrix.py build/seqpar-verify --model --right 200   # and what --model says of the same steps

With --model a second table follows: what the stages log-probs and gradients say where each step is computed again from
the trainer's weights. A mistake that leaves the model's numbers as they are is not detected there.

detected: exit code 1. named: the mistake alone, by its name. among several: one of several names. named wrong: other
names only. insufficient: the dump shows nothing. Exit code 1 if a right step is accused, or a mistake never detected.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import fields, replace

from trainer import Config, MISTAKES, Workers, random_config, variants

COLUMNS = ("runs", "detected", "named", "among several", "named wrong", "insufficient")


class Verdict:
    def __init__(self, oracle, dump, *options):
        said = subprocess.run([oracle, "ver", dump, "--json", *options], capture_output=True, text=True)
        self.code, self.error = said.returncode, said.stderr.strip()
        self.answer = json.loads(said.stdout) if said.stdout.strip() else {}
        self.names = [m["name"] for m in self.answer.get("mistakes", [])]

    @property
    def word(self):
        return self.answer.get("verdict", "refused")

    @property
    def refused(self):
        return self.code not in (0, 1, 4)

    def wrong_stages(self):
        return [f"{stage['stage']}: {' '.join(m['name'] for m in stage['mistakes']) or 'unknown'}"
                for stage in self.answer.get("stages", []) if stage["verdict"] == "wrong"]

    def said(self):
        return self.error if self.refused else f"{self.word} [{'; '.join(self.wrong_stages())}]"

    def column(self, name):
        """How the mistake was named, if it was."""
        if self.code == 4:
            return "insufficient"
        if self.code != 1 or not self.names:
            return None
        if name not in self.names:
            return "named wrong"
        return "named" if len(self.names) == 1 else "among several"


OF_MODEL = ("log-probs", "gradients")


class ModelVerdict(Verdict):
    """With --model, of the stages that it judges alone."""

    def __init__(self, oracle, dump, folder, *options):
        super().__init__(oracle, dump, "--model", folder, *options)
        if self.refused:
            return
        self.whole = self.code
        stages = [s for s in self.answer["stages"] if s["stage"] in OF_MODEL and s["verdict"] != "not judged"]
        wrong = [s for s in stages if s["verdict"] == "wrong"]
        self.names = [m["name"] for m in wrong[0]["mistakes"]] if wrong else []
        unsure = not stages or any(s["verdict"] == "insufficient" for s in stages)
        self.code = 1 if wrong else 4 if unsure else 0
        self.answer = dict(self.answer, stages=stages)


class Runs:
    """Takes steps and asks for verdicts; says on stderr how far it is."""

    def __init__(self, given, workers, folder, total):
        self.given, self.workers, self.folder = given, workers, folder
        self.done, self.total, self.began = 0, total, time.time()
        self.refused = []
        self.of_model = None  # the last step's verdict with --model

    def verdict(self, c):
        dump, want = f"{self.folder}/dump", f"{self.folder}/want"
        for path in (dump, want, dump + ".model"):
            shutil.rmtree(path, ignore_errors=True)
        c = replace(c, leave_out=(*c.leave_out, *self.given.leave_out), rows_apart=self.given.rows_apart)
        self.workers.run(c, dump, want)
        self.done += 1
        each = (time.time() - self.began) / self.done
        print(f"\r{self.done} of {self.total}, {each:.2f} s each ", end="", file=sys.stderr)
        limit = self.given.bf16_tolerance if c.dtype == "bf16" else None
        options = ["--tolerance", limit] if limit else []
        verdict = Verdict(self.given.oracle, dump, "--want", want, *options)
        verdicts = [verdict]
        if self.given.model:
            self.of_model = ModelVerdict(self.given.oracle, dump, dump + ".model", *options)
            verdicts.append(self.of_model)
        for v in verdicts:
            if v.refused:
                self.refused.append(f"{again(c)}: {v.error}")
        return verdict


def brief(c):
    """A config without what is as by default."""
    return " ".join(f"{f.name}={getattr(c, f.name)}" for f in fields(Config) if getattr(c, f.name) != f.default)


def again(c):
    """How to take this step once more."""
    mistake = f" --mistake {c.mistake}" * bool(c.mistake) + f" --variant {c.variant}" * bool(c.variant)
    return f"trainer.py FOLDER --seed {c.seed} --dtype {c.dtype}{mistake}"


def plan(names, dtypes, seeds):
    return [(name, variant, dtype, seed) for name in names for variant in variants(name) for dtype in dtypes
            for seed in range(seeds)]


def count(row, verdict, name):
    row["runs"] += 1
    row["detected"] += verdict.code == 1
    if verdict.column(name):
        row[verdict.column(name)] += 1


def judge_mistakes(runs, todo, by_variant, log):
    """Rows of the table, and of that with --model."""
    rows, of_model = (defaultdict(lambda: dict.fromkeys(COLUMNS, 0)) for _ in range(2))
    for name, variant, dtype, seed in todo:
        c = random_config(seed, name, variant, dtype=dtype)
        verdict, key = runs.verdict(c), (" ".join((name, variant) if by_variant else (name,)), dtype)
        count(rows[key], verdict, name)
        print(f"{again(c)}: {verdict.said()}", file=log, flush=True)
        if runs.of_model:
            count(of_model[key], runs.of_model, name)
            print(f"    --model: {runs.of_model.said()}", file=log, flush=True)
    return rows, of_model


def judge_right(runs, number, dtypes, log):
    """Verdicts of right steps, also with --model, and those that were accused."""
    words, accused = defaultdict(int), []
    for seed in range(number):
        c = random_config(seed, dtype=dtypes[seed // 2 % len(dtypes)], words=runs.given.words)
        verdicts = {"": runs.verdict(c)}
        if runs.of_model:
            verdicts["--model: "] = runs.of_model
        for how, verdict in verdicts.items():
            words[how + verdict.word] += 1
            print(f"{again(c)}: {how}{verdict.said()} {brief(c)}", file=log, flush=True)
            if verdict.code == 1:
                accused.append(f"{again(c)}: {how}{verdict.said()}\n    {brief(c)}")
    return words, accused


# ---- tables ----

def table(rows):
    lines = [[name, dtype, *(str(row[x]) for x in COLUMNS)] for (name, dtype), row in rows.items()]
    return [["mistake", "type", *COLUMNS]] + lines


def aligned(lines):
    widths = [max(map(len, column)) for column in zip(*lines)]
    cells = [[x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths))] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def markdown(lines):
    head = [lines[0], ["---", "---", *["---:"] * len(COLUMNS)]]
    return "\n".join("| " + " | ".join(line) + " |" for line in head + lines[1:])


def report(rows, words, accused, refused):
    """What is said below the table, and whether something is wrong."""
    counts = ", ".join(f"{n} {word}" for word, n in sorted(words.items()))
    said = [f"right steps: {counts}; accused: {len(accused)}"] if words else []
    missed = sorted({name for (name, _) in rows} - {name for (name, _), row in rows.items() if row["detected"]})
    if missed:
        said.append(f"never detected: {', '.join(missed)}")
    if refused:
        said.append(f"refused: {len(refused)}; first {refused[0]}")
    return said + accused[:1], bool(missed or accused)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("oracle", nargs="?", default="build/seqpar-verify", help="the binary (build/seqpar-verify)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each variant of each mistake and type (2)")
    parser.add_argument("--right", type=int, default=100, help="right steps (100)")
    parser.add_argument("--words", action="store_true", help="right steps have options that few packages have: WORDS of trainer.py")
    parser.add_argument("--mistakes", nargs="*", choices=MISTAKES, default=list(MISTAKES), help="these alone")
    parser.add_argument("--dtypes", nargs="*", choices=("bf16", "fp32", "fp64"), default=["fp32", "bf16"])
    parser.add_argument("--bf16-tolerance", metavar="X", help="--tolerance for runs in bf16 (none is given)")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="NAME", help="kinds of tensors that no dump has")
    parser.add_argument("--rows-apart", action="store_true", help="wanted steps are taken by a rank a row")
    parser.add_argument("--model", action="store_true", help="judge with --model, too: a second table")
    parser.add_argument("--by-variant", action="store_true", help="a line for each variant of a mistake")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there, too")
    parser.add_argument("--log", metavar="FILE", help="write a line for each step there: verdict, stages, names")
    given = parser.parse_args()
    if not os.access(given.oracle, os.X_OK):
        parser.error(f"{given.oracle} cannot be run; give the path of seqpar-verify")
    return given


def main():
    given = arguments()
    todo = plan(given.mistakes, given.dtypes, given.seeds) if given.seeds else []
    with Workers() as workers, tempfile.TemporaryDirectory() as folder, open(given.log or os.devnull, "w") as log:
        runs = Runs(given, workers, folder, len(todo) + given.right)
        rows, of_model = judge_mistakes(runs, todo, given.by_variant, log)
        words, accused = judge_right(runs, given.right, given.dtypes, log)
    print(file=sys.stderr)
    said, wrong = report(rows, words, accused, runs.refused)
    tables = [table(rows)] * bool(rows) + [table(of_model)] * bool(of_model)
    print("\n".join("\nwith --model:\n" * i + aligned(x) for i, x in enumerate(tables)))
    print("\n".join(said))
    if given.markdown:
        parts = ["With `--model`:\n\n" * i + markdown(x) for i, x in enumerate(tables)]
        with open(given.markdown, "w") as file:
            file.write("\n\n".join(parts + said) + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
