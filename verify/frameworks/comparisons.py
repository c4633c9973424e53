# SPDX-License-Identifier: MIT OR Unlicense
"""The comparisons that published tests of sequence parallelism make, applied to two dumps. verify/pages/TESTS.md has the results.

    comparisons.py NAME WANT GOT                exit code 0: the comparison NAME finds no difference
    comparisons.py --record FILE NAME WANT GOT  the same; a line with the result of every comparison is appended to FILE
    comparisons.py --table ORACLE               runs ORACLE mutants and prints comparisons.tsv, in minutes
    comparisons.py --page                       prints verify/pages/TESTS.md, of comparisons.tsv

Tensors and tolerances are those of the test named in each entry of COMPARISONS; the code is not. A tolerance is that of
torch.testing.assert_close: |got - want| <= atol + rtol |want|, for each element. Standard library alone.
"""
import array
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
TABLE = os.path.join(HERE, "comparisons.tsv")
CODES = {"F64": "d", "F32": "f", "I64": "q", "I32": "i"}  # the types that seqpar-verify gen writes, and those of fp32 dumps

# ---- a dump ----


def read_file(path):
    """The metadata and tensors of a safetensors file, each tensor flat."""
    with open(path, "rb") as file:
        data = file.read()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    facts, tensors = header.pop("__metadata__"), {}
    for name, entry in header.items():
        if entry["dtype"] not in CODES:
            raise SystemExit(f"error: {path}: {name} is {entry['dtype']}; give F64, F32, I64 or I32")
        first, last = (begin + x for x in entry["data_offsets"])
        tensors[name] = array.array(CODES[entry["dtype"]], data[first:last])
    return facts, tensors


class Dump:
    def __init__(self, folder):
        names = [name for name in os.listdir(folder) if name.endswith(".safetensors")] if os.path.isdir(folder) else []
        if not names:
            raise SystemExit(f"error: {folder} has no .safetensors file; give the folder of a dump")
        files = [read_file(os.path.join(folder, name)) for name in names]
        files.sort(key=lambda file: int(file[0]["rank"]))
        facts = files[0][0]
        self.sp, self.accumulation = int(facts.get("sp", "1")), int(facts.get("accumulation", "1"))
        self.ranks = [tensors for _, tensors in files]


def rows(want, got):
    """A rank's micro-batch of got with the same row of want, which is on one rank: (tensors, prefix, tensors, prefix)."""
    for rank, tensors in enumerate(got.ranks):
        for micro in range(got.accumulation):
            row = rank // got.sp * got.accumulation + micro
            yield want.ranks[0], f"{row}.", tensors, f"{micro}."


def places(tensors, prefix, name, index):
    """The tensor's rows at index, each a list."""
    flat = tensors[prefix + name]
    width = len(flat) // len(tensors[prefix + "index"])
    return [flat[i * width:(i + 1) * width] for i in index]


# ---- what a test compares ----


def close(got, want, rtol, atol, scaled):
    """assert_close. Scaled: atol is relative to the largest element of want, where that is below 1."""
    atol *= min(1, max(map(abs, want), default=1)) if scaled else 1
    return len(got) == len(want) and all(abs(a - b) <= atol + rtol * abs(b) for a, b in zip(got, want))


def loss(rtol, atol, ranks=None):
    return lambda want, got, scaled: all(close(x["loss"], want.ranks[0]["loss"], rtol, atol, False) for x in got.ranks[:ranks])


def length(tensors):
    return math.sqrt(sum(x * x for name, flat in tensors.items() if name.startswith("grad.") for x in flat))


def norm(rtol, atol, ranks=None):
    """The norm that a rank reports, against the norm of want's gradients."""
    return lambda want, got, scaled: all(close(x["norm"], [length(want.ranks[0])], rtol, atol, False) for x in got.ranks[:ranks])


def gradients(rtol, atol, names=None):
    """Reduced gradients, on every rank."""
    def check(want, got, scaled):
        mine = want.ranks[0]
        chosen = [f"grad.{name}" for name in names] if names else [name for name in mine if name.startswith("grad.")]
        return all(close(x[name], mine[name], rtol, atol, scaled) for x in got.ranks for name in chosen)
    return check


def tokens(names, rtol=0, atol=0):
    """Tensors of tokens, those of each rank at their places in the row."""
    def check(want, got, scaled):
        for mine, row, theirs, micro in rows(want, got):
            index = theirs[micro + "index"]
            for name in names:
                right = [x for at in places(mine, row, name, index) for x in at]
                if not close(theirs[micro + name], right, rtol, atol, scaled):
                    return False
        return True
    return check


def label_logp(rtol, atol):
    """Log-probs where both have the same label: what a dump of gen has of the logits."""
    def check(want, got, scaled):
        for mine, row, theirs, micro in rows(want, got):
            index, labels = theirs[micro + "index"], theirs[micro + "labels"]
            both = [k for k, i in enumerate(index) if labels[k] == mine[row + "labels"][i] != -100]
            right = [mine[row + "logp"][index[k]] for k in both]
            if not close([theirs[micro + "logp"][k] for k in both], right, rtol, atol, False):
                return False
        return True
    return check


Q_PROJ, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


@dataclass
class Comparison:
    name: str
    package: str
    commit: str
    file: str
    sizes: str  # of the test's own step
    compares: str
    checks: list
    missing: str = ""  # what the test has and a dump has not, or has otherwise


GIVEN = ("the test gives both sides the same inputs; here a wrong label, count or position changes the inputs of the attention, and is "
         "seen by that")
COMPARISONS = [
    Comparison(
        "transformers", "huggingface/transformers", "a3e026cb", "tests/trainer/distributed/test_trainer_distributed_fsdp.py",
        sizes="cp 2, dp 1, no accumulation, one text a row, no prompt",
        compares="the loss of each of 10 steps, rtol and atol 2e-2",
        checks=[loss(2e-2, 2e-2, ranks=1)],
        missing="a dump is one step; the losses of later steps depend on the gradients, too"),
    Comparison(
        "accelerate", "huggingface/accelerate", "07971586", "src/accelerate/test_utils/scripts/external_deps/test_torch_ulysses_sp.py",
        sizes="sp 2, dp 1 or 2, no accumulation, 64 tokens, 1 or 2 documents, no prompt",
        compares="logits, loss and the embedding's gradient, rtol and atol 1e-4 in fp32",
        checks=[label_logp(1e-4, 1e-4), loss(1e-4, 1e-4), gradients(1e-4, 1e-4, [EMBEDDING])],
        missing="log-probs of labels stand for the logits; the file is not in commit 16cb6eb8 of 2026-07-24"),
    Comparison(
        "deepspeed", "deepspeedai/DeepSpeed", "edaa7221", "tests/unit/ulysses_alst/test_ulysses_sp_hf.py",
        sizes="sp 2, dp 1, no accumulation, one row of 6 tokens, no prompt",
        compares="ids, positions, labels and the loss, exactly; the gradient of layer 0's q_proj, rtol 1.3e-6 and atol 1e-5 with ZeRO 3, "
                 "rtol 1.6e-2 and atol 1e-3 with ZeRO 2",
        checks=[tokens(["ids", "positions", "labels"]), loss(0, 0), gradients(1.3e-6, 1e-5, [Q_PROJ])]),
    Comparison(
        "verl", "verl-project/verl", "1dda039b", "tests/special_e2e/sft/compare_sft_engine_results.py",
        sizes="8 ranks: sp 2, or tp 2, pp 2 and cp 2",
        compares="the first step's loss, rtol and atol 1e-2, and its gradient norm, rtol 3e-2 and atol 1e-4",
        checks=[loss(1e-2, 1e-2, ranks=1), norm(3e-2, 1e-4, ranks=1)]),
    Comparison(
        "megatron", "NVIDIA/Megatron-LM", "d98e8a64", "tests/unit_tests/transformer/test_attention.py",
        sizes="attention alone; cp 4, or tp 2 with cp 2; 4 rows or documents of 256 tokens",
        compares="the attention block's output and its input's gradient, rtol and atol 1e-2",
        checks=[tokens(["out", "dq", "dk", "dv"], 1e-2, 1e-2)],
        missing="out, dq, dk and dv stand for the block's output and its input's gradient. As for transformer_engine, " + GIVEN),
    Comparison(
        "transformer_engine", "NVIDIA/TransformerEngine", "d0067d0d", "tests/pytorch/attention/run_attention_with_cp.py",
        sizes="attention alone; cp 2 or 4; documents of unequal lengths",
        compares="out, dq, dk and dv, rtol and atol 5e-3 in fp16",
        checks=[tokens(["out", "dq", "dk", "dv"], 5e-3, 5e-3)],
        missing=GIVEN),
    Comparison(
        "gradients", "every gradient", "", "", sizes="",
        compares="the gradient of every parameter on every rank, rtol and atol 1e-4, atol times the largest element",
        checks=[lambda want, got, scaled: gradients(1e-4, 1e-4)(want, got, True)]),
]


def result(comparison, want, got):
    """2: it finds a difference; 1: it does with atol scaled; 0: it finds none."""
    for value, scaled in ((2, False), (1, True)):
        if not all(check(want, got, scaled) for check in comparison.checks):
            return value
    return 0


def run(name, want, got, record=None):
    chosen = [c for c in COMPARISONS if c.name == name]
    if not chosen:
        raise SystemExit(f"error: no comparison is called '{name}'; give one of {', '.join(c.name for c in COMPARISONS)}")
    want, got = Dump(want), Dump(got)
    if record:
        with open(record, "a") as file:
            print(*(result(c, want, got) for c in COMPARISONS), sep="\t", file=file)
    return result(chosen[0], want, got) == 2


# ---- the table ----


def make_table(oracle):
    """Plants every mistake once; all comparisons see the same dumps."""
    with tempfile.TemporaryDirectory() as folder:
        record = os.path.join(folder, "record")
        command = f"'{sys.executable}' '{os.path.abspath(__file__)}' --record '{record}' gradients"
        done = subprocess.run([oracle, "mutants", "--json", "--score", command], stdout=subprocess.PIPE, text=True)
        with open(record) as file:
            results = file.read().splitlines()
    mutants = json.loads(done.stdout)
    if len(results) != len(mutants):
        raise SystemExit(f"error: {len(mutants)} mutants and {len(results)} results; a comparison stopped")
    listed = json.loads(subprocess.run([oracle, "list", "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout)
    families = {entry["name"]: entry["family"] for entry in listed}
    print("# SPDX-License-Identifier: MIT OR Unlicense")
    print("# Made by comparisons.py --table. 2: seen; 1: seen with the absolute tolerance scaled; 0: not seen.")
    print("objective", "mistake", "family", *(c.name for c in COMPARISONS), sep="\t")
    for m, line in zip(mutants, results):
        print(m["objective"], m["mistake"] or "(none)", families.get(m["mistake"], "-"), line, sep="\t")


def read_table():
    with open(TABLE) as file:
        lines = [line.rstrip("\n").split("\t") for line in file if not line.startswith("#")]
    return [{**dict(zip(lines[0], line)), **{name: int(x) for name, x in zip(lines[0][3:], line[3:])}} for line in lines[1:]]


# ---- the page ----

READ_ON = "2026-11-30"  # when the tests were read

PAGE = """# How good are your tests?

<!-- SPDX-License-Identifier: MIT OR Unlicense -->

A test of sequence parallelism runs a step on ranks and on one rank, and compares. It passes where it finds no difference: so a test
that compares little passes much. `seqpar-verify mutants --score CMD` counts that. It generates a step once right and once with each of
its mistakes ({count}: {sft} of SFT, {dpo} of DPO), on 3 sequence-parallel ranks by 2 replicas with 5 micro-batches, and runs
`CMD WANT GOT`: two folders, the right step on one rank and the step on 6 ranks ([what is in them](../python/seqpar_dump.py)). CMD is your
comparison; it is to exit with 0 if it finds no difference. A mistake is *seen* if it exits with another code.

## An example

The comparison that the Trainer's test of context parallelism makes: the loss, rtol and atol 2e-2.

<!-- score says -->
```
$ seqpar-verify mutants --score "python3 verify/frameworks/comparisons.py transformers"
{example}
...
{last}
```

`(none)` is the right step: a comparison that sees a difference there is too strict. `named` is the oracle's own verdict on the same
dump. [MISTAKES.md](MISTAKES.md) has what each mistake is. `--json` prints the list for a program.

A comparison of your own needs a few lines: the files are safetensors, `grad.NAME` is a reduced gradient, `loss` the reported loss, and
`2.labels`, `2.logp` or `2.out` are tensors of micro-batch 2, whose `2.index` says which places of the row the rank holds. The row is
micro-batch `rank // sp * accumulation + 2` in WANT. [comparisons.py](../frameworks/comparisons.py) has all of it.

## Comparisons of published tests

{date}. Each line is what one published test compares, read in its source at that commit, and applied to the same dumps. The score is
that of the comparison, on our step. It does not say whether the package is right. Nor does it say what the test's own step can show: where
there is one replica, a wrong factor of replicas changes nothing. The column *its own step* has the sizes. None of these tests trains
DPO: counted are the {sft} mistakes of SFT.

WANT is the right step. A run of the same code on one rank has some mistakes itself, those that have nothing to do with ranks, such as
`labels_not_shifted` and `labels_cross_documents`: to see these takes right values from elsewhere, as DeepSpeed's test has for labels.

Our gradients are small, since the loss is a mean over many tokens. An absolute tolerance that suits gradients near 1 passes much of
them. So there are two numbers where they differ: with the test's tolerance as it stands, and *scaled*, with its absolute part times the
largest element of the right tensor.

| package, commit, test | its own step | it compares | seen of {sft} | and every gradient |
|---|---|---|---|---|
{lines}

The last column is what is seen where the test also compares the gradient of every parameter, on every rank, with that of one rank
(rtol 1e-4, and an absolute tolerance of 1e-4 times the largest element). Alone, that sees {gradients}.

A loss by itself shows little of a random model, since such a model predicts all tokens about equally well whatever its attention does.
A loss cannot show a wrong factor of gradients either: one gradient or its norm does.

What each comparison lets pass, scaled, by [family](MISTAKES.md); `gradients` is that of the last column alone. `positions_run_on` changes
positions, q and k, but neither out nor a gradient of a parameter: an offset of a whole document cancels in rotary positions.

{passed}

Where a dump does not have what the test compares:

{missing}
- WANT has no parameters after the optimizer's step. Of the family `step` only what changes the norm can be seen.

## Tests without such a comparison

These were read too; there is nothing in them that could be applied to a dump.

- accelerate 16cb6eb8, `tests/deepspeed/test_alst_ulysses_sp.py`: trains 4 rows on 2 ranks; the run ends without an error.
- LLaMA-Factory ff6d4d12, `tests_v1/plugins/model_plugins/test_ulysses_cp.py`: the loss of a step on 2 ranks is not None; position ids of
  packed rows, gathered by a stand-in, are those expected.
- axolotl 067b021c, `tests/e2e/multigpu/patched/test_sp.py`: the training loss of 8 steps is below 2.5 and 5 percent more, and above 1e-5.
  The threshold is for its own model and data. The test is marked to be skipped.
- ring-flash-attention 89962823, `test/test_zigzag_ring_flash_attn_func.py` and its siblings: print the largest and the mean difference of
  out, lse, dq, dk and dv on each rank, for a reader; no difference fails.
- verl 1dda039b, `tests/models/test_transformers_ulysses.py`: the mean of all logits, and the gradient of that mean by layer 0's q_proj. A
  dump's gradients are those of its loss.

`make scores` makes the table again, in minutes.
"""


def name_some(names):
    return ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")


def of_family(table, name):
    """What a comparison lets pass: family, how many of how many, some names."""
    found = []
    for family in dict.fromkeys(row["family"] for row in table):
        rows_of = [row for row in table if row["family"] == family]
        passed = [row["mistake"] for row in rows_of if not row[name]]
        if passed:
            found.append(f"{family} {len(passed)} of {len(rows_of)} ({name_some(passed)})")
    return "; ".join(found) or "nothing"


def seen(table, name):
    least, most = sum(row[name] == 2 for row in table), sum(row[name] > 0 for row in table)
    return str(least) if least == most else f"{least}, scaled {most}"


def said_of(row):
    """The line that mutants prints."""
    verdict, not_seen = "right" if row["mistake"] == "(none)" else "named", "" if row["transformers"] == 2 else "not "
    return f"sft  {row['mistake']:<32} {verdict:<22} {not_seen}seen by CMD"


def listed(lines):
    return "\n".join(textwrap.fill(f"- {line}.", 138, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def make_page():
    table = read_table()
    wrong = [row for row in table if row["mistake"] != "(none)"]
    sft = [row for row in wrong if row["objective"] == "sft"]
    lines = []
    for c in COMPARISONS[:-1]:
        both = sum(2 in (row[c.name], row["gradients"]) for row in sft)
        lines.append(f"| {c.package} {c.commit}, `{c.file}` | {c.sizes} | {c.compares} | {seen(sft, c.name)} | {both} |")
    shown = [table[0], *sft[:2], next(row for row in sft if row["transformers"] == 2)]
    said = sum(row["transformers"] == 2 for row in wrong)
    return PAGE.format(
        date=READ_ON, count=len(wrong), sft=len(sft), dpo=len(wrong) - len(sft), lines="\n".join(lines),
        example="\n".join(map(said_of, shown)),
        last=f"{len(wrong)} mutants, {len(wrong)} named, {said} seen by CMD", gradients=seen(sft, "gradients"),
        passed=listed(f"{c.name}: {of_family(sft, c.name)}" for c in COMPARISONS),
        missing=listed(f"{c.name}: {c.missing}" for c in COMPARISONS if c.missing))


def main(words):
    if words[:1] == ["--page"] and len(words) == 1:
        print(make_page(), end="")
    elif words[:1] == ["--table"] and len(words) == 2:
        make_table(words[1])
    elif words[:1] == ["--record"] and len(words) == 5:
        return run(*words[2:], record=words[1])
    elif len(words) == 3 and not words[0].startswith("-"):
        return run(*words)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
