# SPDX-License-Identifier: MIT OR Unlicense
"""run.py - do the suites see a tired programmer's mistakes?   make mutants SEED=7 COUNT=50

Draws COUNT mutants by SEED over all parts of parts.tsv, builds the tree once with all of them
in it (draw.py says how), and runs for each the suites of its part until one is red. A suite is
run once without a mutant first: what it then fails is not held against mutants; mutants whose
function it does not call are not tried on it. Writes to build/mutants/SEED.COUNT.PARTS:

    mutants.tsv     number, part, kind, file, function, line, old and new text, verdict, by
    survivors.diff  each mutant that no suite saw, and which suites call its function
    score.tsv       by part: drawn, seen, set aside (equivalent.tsv), survived, score

A survivor is a missing test, or it changes nothing that anybody can see; the second kind goes
into equivalent.tsv, with the reason.

A run that was interrupted goes on where it was. PARTS="llama mpi": drawn from these parts alone.
MUTANTS="3 14": only these, again. SEQPAR_DATA: data sets for suites that read real ones."""
import difflib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
import draw

WORKERS = 2
LIMIT = 900  # seconds of processor time of a suite without a mutant
ORACLE = ["build/seqpar-verify", "build/verify_sp"]
VERDICTS = ["seen", "set aside", "survived"]
RUNNING = set()
SPDX = "SPDX-License-Identifier: MIT OR Unlicense"
COLUMNS = "number part kind file function line old new verdict by".split()


def without_make():
    """The environment without what a make above leaves there."""
    return {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}


@functools.cache
def demos():
    """What the Makefile builds before suites that run the demos."""
    listed = subprocess.run(["make", "-s", "--eval", "listed: ; @echo $(DEMOS)", "listed"], cwd=draw.ROOT,
                            env=without_make(), capture_output=True, text=True, check=True).stdout.split()
    return [f"build/{name}" for name in listed + ["reward_server_for_tests"]]


class Suite:
    """A suite, or what TEST_ONLY leaves of it, and what it does without a mutant."""

    def __init__(self, text):
        self.text, (self.name, _, self.only) = text, text.partition(":")
        self.shell = os.path.exists(os.path.join(draw.ROOT, f"verify/tests/test_{self.name}.sh"))
        self.reached, self.fails, self.seconds = set(), set(), 0.0
        self.known = self.usable = False

    def program(self):
        """on_cpu_NAME: suite NAME on the CUDA device, whose kernels the CPU runs."""
        on_cpu = self.name.startswith("on_cpu_")
        return f"build/on_cpu_test_{self.name[7:]}" if on_cpu else f"build/test_{self.name}"

    def targets(self):
        if not self.shell:
            return [self.program()]
        return ORACLE if self.name.startswith("oracle") else ORACLE + demos()

    def command(self):
        return ["bash", f"verify/tests/test_{self.name}.sh"] if self.shell else [self.program()]


def environment(suite, number, more):
    env = dict(without_make(), SEQPAR_FAULT=str(number), OMP_WAIT_POLICY="passive", **more)
    env.setdefault("SEQPAR_DATA", os.path.join(draw.ROOT, "../shared/data"))
    env.setdefault("MALLOC_PERTURB_", "165")  # as ci/run.sh
    if suite.only:
        env["TEST_ONLY"] = suite.only
    return env


def end(process):
    """Ends what was started here: its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def stop(*_):
    """Whoever ends this program ends what it started."""
    for process in list(RUNNING):
        end(process)
    os._exit(130)


def run(suite, number, tree, limit, watch, **more):
    """Runs until `watch` says of a line that it is enough. The exit code, and that line."""
    command = ["ci/limit.sh", f"{limit}:300", *suite.command()]
    process = subprocess.Popen(command, cwd=tree, env=environment(suite, number, more),
                               text=True, errors="replace", stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                               start_new_session=True)
    RUNNING.add(process)
    found, last = None, ""
    for line in process.stdout:
        last = line.strip() or last
        if watch(line):
            found = line.strip()
            break
    end(process)
    RUNNING.discard(process)
    return process.wait(), found, last


def failure(line):
    m = re.match(r"FAIL ([^\s:]+)", line)
    return m.group(1) if m else None


def control(suite, tree, out):
    """The suite without a mutant, to its end."""
    path = os.path.join(out, "reached." + re.sub(r"\W", "_", suite.text))
    if os.path.exists(path):
        os.remove(path)
    clock, summaries = time.time(), []

    def watch(line):
        if failure(line):
            suite.fails.add(failure(line))
        if re.match(r"\d+ passed, \d+ failed", line):
            summaries.append(line.strip())
        return False

    code, _, last = run(suite, -1, tree, LIMIT, watch, SEQPAR_REACHED=path)
    suite.seconds = time.time() - clock
    suite.usable = bool(summaries) and code in (0, 1)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            suite.reached = {int(n) for n in file.read().split()}
    says = summaries[-1] if summaries else f"not usable, exit code {code}: {last[:100]}"
    fails = f", fails {' '.join(sorted(suite.fails))[:150]}" if suite.fails else ""
    print(f"# {suite.text}: {says}, {suite.seconds:.0f} s, calls {len(suite.reached)} of them"
          + fails, flush=True)


def controlled(suite, tree, out, changed):
    """The same, or what is written of it."""
    suite.known = True
    path = os.path.join(out, "control." + re.sub(r"\W", "_", suite.text) + ".json")
    if os.path.exists(path) and not changed:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
        suite.reached, suite.fails = set(kept["reached"]), set(kept["fails"])
        suite.seconds, suite.usable = kept["seconds"], kept["usable"]
        return
    control(suite, tree, out)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"reached": sorted(suite.reached), "fails": sorted(suite.fails),
                   "seconds": suite.seconds, "usable": suite.usable}, file)


def sees(suite, mutant, tree):
    """What the suite says of the mutant; None where it is green."""
    def watch(line):
        return failure(line) and failure(line) not in suite.fails

    limit = max(60, int(4 * suite.seconds))
    code, line, last = run(suite, mutant.number, tree, limit, watch)
    if line:
        return line
    if code == -signal.SIGTERM and not last.startswith("limit: "):
        raise SystemExit(f"mutants: somebody ended {suite.text}")
    if not re.match(r"\d+ passed, \d+ failed", last) or code not in (0, 1):
        return f"exit code {code}: {last[:120]}"
    return None


# ---- the build ----
ON_CPU_OPT = f"ON_CPU_OPT=-O1 -DSEQPAR_CUDA_HEAD_DIM_MAX={draw.HEAD_DIM_MAX}"


def make(tree, targets):
    with open(os.path.join(tree, "../build.log"), "w", encoding="utf-8") as log:
        subprocess.run(["make", "-k", "-j2", "OPT=-O1", "WARN=-w", ON_CPU_OPT, *targets],
                       cwd=tree, env=without_make(), stdout=log, stderr=subprocess.STDOUT, check=False)


def prepare(world, mutants_drawn, draws, out):
    """Checks mutants in a tree that is not built: built trees change only where they differ."""
    tree = os.path.join(out, "checked")
    planter = draw.Planter(world, tree)
    draw.copy_tree(draw.ROOT, tree)
    make(tree, ["build/options.inc"])
    path, sources = os.path.join(out, "drawn.json"), draw.digest(world)
    kept = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
    known = kept["rounds"] if kept.get("sources") == sources else []
    settled = draw.settle(draws, planter, mutants_drawn, known)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"sources": sources, "rounds": known}, file)
    return settled


def build(trees, suites):
    targets = sorted({t for s in suites for t in s.targets()})
    make(trees[0], targets)
    for tree in trees[1:]:
        subprocess.run(["cp", "-a", "-u", trees[0] + "/.", tree], check=True)


# ---- the tables ----
def diff(m):
    old, new = m.function.text.splitlines(), m.text().splitlines()
    lines = list(difflib.unified_diff(old, new, lineterm="", n=2))[3:]
    line = m.function.line + m.function.text.count("\n", 0, m.start)
    head = f"# {m.number} {m.kind}: {m.function.file}:{line} {m.function.name}\n"
    return head + "\n".join(lines)


def write_mutants(path, mutants, verdicts):
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"# {SPDX}\n# " + "\t".join(COLUMNS) + "\n")
        for m in mutants:
            row = [str(m.number), m.part, m.kind, m.function.file, m.function.name,
                   str(m.function.line), *m.lines(), *verdicts.get(m.number, ("", ""))]
            file.write("\t".join(row).replace("\n", " ") + "\n")


def read_verdicts(path, mutants):
    """Those of a run that was ended, where the same were drawn."""
    found = {}
    if os.path.exists(path):
        keys = {m.number: m.key() for m in mutants}
        with open(path, encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file if line[0] != "#"]
        for row in rows:
            if row[8] and keys.get(int(row[0])) == (row[3], row[4], row[6], row[7]):
                found[int(row[0])] = (row[8], row[9])
    return found


def score_rows(mutants, verdicts):
    rows = []
    for part in list(dict.fromkeys(m.part for m in mutants)) + ["all"]:
        mine = [verdicts[m.number][0] for m in mutants if part in (m.part, "all")
                and verdicts.get(m.number, ("open",))[0] != "open"]
        seen, aside, survived = (mine.count(v) for v in VERDICTS)
        score = f"{100 * seen / (seen + survived):.0f} %" if seen + survived else "-"
        rows.append([part, len(mine), seen, aside, survived, score])
    return rows


def write_score(out, seed, mutants, verdicts):
    rows = [["part", "drawn", *VERDICTS, "score"]] + score_rows(mutants, verdicts)
    with open(os.path.join(out, "score.tsv"), "w", encoding="utf-8") as file:
        file.write(f"# {SPDX}\n# make mutants SEED={seed} COUNT={len(mutants)}\n")
        file.writelines("\t".join(map(str, row)) + "\n" for row in rows)
    for row in rows:
        print("{:<16} {:>6} {:>6} {:>10} {:>9} {:>7}".format(*row))


def write_survivors(out, mutants, verdicts):
    texts = [diff(m) + f"\n# {verdicts[m.number][1]}\n" for m in mutants
             if verdicts.get(m.number, ("",))[0] == "survived"]
    with open(os.path.join(out, "survivors.diff"), "w", encoding="utf-8") as file:
        file.write("\n".join(texts))
    print("\n".join(texts))


class Run:
    def __init__(self, out, mutants, parts, equivalent):
        self.out, self.mutants, self.lock = out, mutants, threading.Lock()
        self.parts = {p.name: p for p in parts}
        self.suites = {}
        self.table = os.path.join(out, "mutants.tsv")
        self.equivalent = equivalent
        self.verdicts, self.changed = read_verdicts(self.table, mutants), True
        self.trees = [os.path.join(out, str(i + 1)) for i in range(WORKERS)]

    def wanted(self, mutants):
        names = dict.fromkeys(s for m in mutants for s in self.parts[m.part].suites)
        self.suites = {name: Suite(name) for name in names}
        return list(self.suites.values())

    def on_a_tree(self, work, *arguments):
        """On a tree that nobody else uses."""
        with self.lock:
            tree = self.trees.pop()
        try:
            work(*arguments, tree)
        finally:
            with self.lock:
                self.trees.append(tree)

    def turn(self, suites, left):
        """What each suite does without a mutant, and then with each of `left`."""
        def begin(suite, tree):
            if not suite.known:
                controlled(suite, tree, self.out, self.changed)
            waiting.extend(pool.submit(self.on_a_tree, self.judge, m, s) for m, s in left
                           if s is suite)
        waiting = []
        with ThreadPoolExecutor(WORKERS) as pool:
            waiting.extend(pool.submit(self.on_a_tree, begin, s) for s in suites)
            for task in waiting: # grows
                task.result()

    def rounds(self, mutants):
        """Each mutant on the first suite of its part, then those that are left on the second,
        and so on: a suite that takes minutes runs for those alone that no other sees."""
        for turn in range(max((len(self.parts[m.part].suites) for m in mutants), default=0)):
            left = [(m, self.suites[name]) for m in mutants if self.verdict(m) == "open"
                    for name in self.parts[m.part].suites[turn:turn + 1]
                    if name not in self.tried(m)]
            suites = list(dict.fromkeys(s for _, s in left))
            print(f"# suite {turn + 1} of each part: {len(left)} mutants", flush=True)
            build(sorted(self.trees), suites)
            self.turn(suites, left)
        for m in mutants:
            if self.verdict(m) == "open":
                self.end(m)

    def verdict(self, m):
        return self.verdicts.get(m.number, ("open", ""))[0]

    def tried(self, m):
        return self.verdicts.get(m.number, ("", ""))[1].split()

    def judge(self, mutant, suite, tree):
        before = self.verdicts.get(mutant.number, ("", ""))[1]
        if not suite.usable or mutant.number not in suite.reached:
            return
        said = sees(suite, mutant, tree)
        if said:
            self.say(mutant, "seen", f"{suite.text}: {said}")
        else:
            self.say(mutant, "open", f"{before} {suite.text}".strip())

    def end(self, mutant):
        reached = self.verdicts.get(mutant.number, ("", ""))[1]
        if mutant.key() in self.equivalent:
            return self.say(mutant, "set aside", "equivalent.tsv")
        return self.say(mutant, "survived", "green: " + reached if reached
                        else "no suite of its part reaches the function")

    def say(self, mutant, verdict, by):
        with self.lock:
            self.verdicts[mutant.number] = (verdict, by.replace("\t", " "))
            write_mutants(self.table, self.mutants, self.verdicts)
            print(f"{mutant.number} {verdict}: {mutant.part}, {mutant.kind}, "
                  f"{mutant.function.name}: {by[:160]}", flush=True)


def main():
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    seed, count = int(os.environ.get("SEED", 7)), int(os.environ.get("COUNT", 50))
    names, again = os.environ.get("PARTS", ""), os.environ.get("MUTANTS", "").split()
    folder = ".".join([str(seed), str(count), *names.split()])
    out = os.path.join(draw.ROOT, "build/mutants", folder)
    os.makedirs(out, exist_ok=True)
    parts = draw.read_parts()
    world = draw.World(parts)
    draws = draw.Draw(world, seed)
    drawn = draws.all(count, [p.name for p in parts if not names or p.name in names])
    mutants = prepare(world, drawn, draws, out)
    todo = Run(out, mutants, parts, draws.equivalent)
    write_mutants(todo.table, mutants, todo.verdicts)
    left = [m for m in mutants
            if (str(m.number) in again if again else todo.verdict(m) == "open")]
    for m in left if again else ():
        todo.verdicts.pop(m.number, None)
    suites = todo.wanted(left)
    print(f"# {len(left)} mutants of {count} to try, on {len(suites)} suites", flush=True)
    todo.changed = draw.copy_tree(os.path.join(out, "checked"), todo.trees[0]) > 0
    todo.rounds(left)
    write_survivors(out, mutants, todo.verdicts)
    write_score(out, seed, mutants, todo.verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
