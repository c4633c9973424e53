# SPDX-License-Identifier: MIT OR Unlicense
"""What a right verdict does not exclude. Mistakes are planted in steps of few documents, ranks or micro-batches. One that changes
nothing there is one that the right step's verdict must name as not excluded, or one that cannot be made there.

    test_excluded.py ORACLE FOLDER
"""
import json
import pathlib
import shutil
import subprocess
import sys

ORACLE, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])

# Steps, and mistakes that cannot be made in them.
WIDE = "--sp 3 --dp 2 --accumulation 2"  # 4 heads are not dealt to 3 ranks
NARROW = "--sp 2 --layout contiguous --docs 2 --tokens 8"
ONE_BATCH = {"micro_batches_lost", "token_zero_ignored"}  # and no target is token 0
NOT_ZIGZAG = {"half_not_updated", "tokens_permuted", "layout_mistaken", "gathered_in_rank_order", "side_tensor_not_split"}
STEPS = [("sft", WIDE, {"heads_permuted"}), ("sft", "--sp 2 --docs 1 --tokens 24", ONE_BATCH), ("sft", NARROW, ONE_BATCH | NOT_ZIGZAG),
         ("dpo", WIDE, {"heads_permuted"}), ("dpo", NARROW, ONE_BATCH | NOT_ZIGZAG | {"mean_of_means"})]  # of one replica's pairs
OPEN = [[], ["mean_over_sequences", "positions_run_on", "labels_cross_documents", "documents_ignored"],
        ["mean_of_means"], ["mean_of_means"], []]

failed = passed = 0


def check(name, holds, why=""):
    global failed, passed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"ok excluded_{name}" if holds else f"FAIL excluded_{name}: {why}")


def run(*words):
    return subprocess.run([ORACLE, *map(str, words)], capture_output=True, text=True)


def gen(folder, objective, sizes, *more):
    shutil.rmtree(folder, ignore_errors=True)
    return run("gen", "--out", folder, "--objective", objective, *sizes.split(), *more)


def ver(folder, *more):
    return run("ver", folder / "got", "--model", folder / "model", *more)


names = [m["name"] for m in json.loads(run("list", "--json").stdout)]
for number, ((objective, sizes, impossible), left_open) in enumerate(zip(STEPS, OPEN)):
    right, other, unsaid, hidden = FOLDER / "right", FOLDER / "other", [], 0
    gen(right, objective, sizes)
    said = ver(right, "--complete", "--json")
    verdict = json.loads(said.stdout)
    check(f"{number}_open", verdict["not_excluded"] == left_open, verdict["not_excluded"])
    check(f"{number}_complete", (said.returncode, verdict["verdict"]) == ((4, "insufficient") if left_open else (0, "right")), said.returncode)
    check(f"{number}_plain", ver(right).returncode == (4 if number == 2 else 0), ver(right).stdout[:200])  # 2: its loss shows nothing
    by_stage = {name.split(" ")[0] for stage in verdict["stages"] for name in stage.get("not_excluded", [])}
    check(f"{number}_stages", by_stage == set(left_open), by_stage)
    for name in names:
        if "does not change the gradient" not in gen(other, objective, sizes, "--mistake", name).stderr:
            continue
        hidden += 1
        if name not in left_open and name not in impossible:
            unsaid.append(name)
    check(f"{number}_said", hidden and not unsaid, f"{hidden} change nothing, of which not said: {unsaid}")

gen(FOLDER / "right", *STEPS[2][:2])
text = " ".join(ver(FOLDER / "right").stdout.split())
for name, part in zip(("summary", "stage", "step"), ("; 1 known mistake gives the same here: mean_of_means", "so not excluded: mean_of_means (ranks' micro-batches)",
             "to see them: a step whose ranks and micro-batches have unequal counts and losses")):
    check(name, part in text, text[:300])

# every mistake that a right number may hide has an entry that says which step shows it; attention has one for all
listed = pathlib.Path("verify/oracle/verdict/tell_apart.h").read_text()
listed = listed[listed.index("} apart[]"):listed.index("enum { APART")].replace('"', " ").split()
SHOWS = {"another_decay", "another_lr", "shard_not_updated", "shards_swapped", "token_lost", "token_held_twice"}
without = [m["name"] for m in json.loads(run("list", "--json").stdout)
           if m["family"] not in ("scale", "attention") and m["name"] not in listed and m["name"] not in SHOWS]
check("steps", not without, without)
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
