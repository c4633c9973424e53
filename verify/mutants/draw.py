# SPDX-License-Identifier: MIT OR Unlicense
"""draw.py - draws mutants by a seed and plants them all in a copy of the tree, each behind a
switch: SEQPAR_FAULT=7 turns mutant 7 on. A mutant is a copy of its whole function, which the
function calls when the switch is on. So several fit into one function, and one build is enough.

SEQPAR_FAULT=-1 turns none on and appends to the file SEQPAR_REACHED the number of each mutant
whose function is called."""
import ast
import filecmp
import fnmatch
import glob
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
import kinds
import source

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

# asm names: whatever headers a unit includes later, nothing is declared twice.
SWITCH = """#if !defined(SEQPAR__MUTANTS)
#define SEQPAR__MUTANTS
#ifdef __cplusplus
extern "C" {
#endif
extern char *seqpar__mutant_getenv(const char *) __asm__("getenv");
extern int seqpar__mutant_atoi(const char *) __asm__("atoi");
extern int seqpar__mutant_open(const char *, int, ...) __asm__("open");
extern int seqpar__mutant_dprintf(int, const char *, ...) __asm__("dprintf");
extern int seqpar__mutant_close(int) __asm__("close");
__attribute__((weak)) int seqpar__fault;
__attribute__((weak)) char seqpar__mutants_reached[%d];
__attribute__((weak, noinline)) int seqpar__mutant_reached(int number) {
    const char *path = seqpar__mutant_getenv("SEQPAR_REACHED");
    int file = -1;
    if (seqpar__mutants_reached[number]) return 0;
    seqpar__mutants_reached[number] = 1;
    if (path) file = seqpar__mutant_open(path, 02001 | 0100, 0600); /* append, create */
    if (file >= 0) seqpar__mutant_dprintf(file, "%%d\\n", number), seqpar__mutant_close(file);
    return 0;
}
__attribute__((constructor)) static void seqpar__mutant_begin(void) {
    const char *number = seqpar__mutant_getenv("SEQPAR_FAULT");
    if (number) seqpar__fault = seqpar__mutant_atoi(number);
}
#ifdef __cplusplus
}
#endif
#define SEQPAR__MUTANT(n) \\
    (seqpar__fault == (n) || (seqpar__fault < 0 && seqpar__mutant_reached(n)))
#endif
"""
PYTHON_SWITCH = """
def _mutant(number):
    import os
    if os.environ.get("SEQPAR_FAULT") == "-1" and os.environ.get("SEQPAR_REACHED"):
        with open(os.environ["SEQPAR_REACHED"], "a") as file:
            file.write(f"{number}\\n")
    return os.environ.get("SEQPAR_FAULT") == str(number)

"""


@dataclass
class Mutant:
    number: int
    part: str
    kind: str
    function: source.Function
    start: int
    end: int
    new: str

    def text(self):
        return self.function.text[:self.start] + self.new + self.function.text[self.end:]

    def lines(self):
        """The lines that change, before and after, without needless blanks."""
        text = self.function.text
        begin = text.rfind("\n", 0, self.start) + 1
        end = text.find("\n", self.end)
        end = len(text) if end < 0 else end
        new = text[begin:self.start] + self.new + text[self.end:end]
        return " ".join(text[begin:end].split()), " ".join(new.split())

    def key(self):
        return (self.function.file, self.function.name) + self.lines()


@dataclass
class Part:
    name: str
    files: list
    chapters: list
    suites: list


def rows(name):
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        lines = [line.rstrip("\n") for line in file if line.strip() and line[0] != "#"]
    return [line.split("\t") for line in lines]


def read_parts():
    dumps = sorted(f[5:-2] for f in os.listdir(os.path.join(ROOT, "verify/tests"))
                   if fnmatch.fnmatch(f, "test_dump*.c"))
    found = []
    for name, files, chapters, suites in rows("parts.tsv"):
        listed = [suite for word in suites.split(" ")
                  for suite in (dumps if word == "test_dumps" else [word])]
        listed = list(dict.fromkeys(listed))  # test_dumps has some that stand before it
        found.append(Part(name, files.split(" "), chapters.split(","), listed))
    return found


def sources():
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    return [f for f in done.stdout.splitlines() if os.path.isfile(os.path.join(ROOT, f))]


class World:
    """Every function of every part, and what kinds.py needs of all files."""

    def __init__(self, parts):
        self.parts, self.functions, self.texts = parts, defaultdict(list), {}
        self.constants, self.members = defaultdict(set), defaultdict(set)
        for file in sources():
            if any(fnmatch.fnmatch(file, f) for p in parts for f in p.files):
                with open(os.path.join(ROOT, file), encoding="utf-8") as opened:
                    self.add(file, opened.read())
        for table in (self.constants, self.members):
            for name in table:
                table[name] = sorted(table[name])

    def add(self, file, text):
        self.texts[file] = text
        read = source.python_functions if file.endswith(".py") else source.c_functions
        for f in read(file, text):
            part = next((p for p in self.parts if self.fits(p, f)), None)
            if part:
                self.functions[part.name].append(f)
        for struct in source.members(text):
            for name, kind in struct:
                self.members[name].update(n for n, k in struct if k == kind and n != name)
        for enum in re.findall(r"enum \w* ?\{(.*?)\}", text, re.DOTALL):
            for name in re.findall(r"\bSEQPAR_[A-Z0-9_]+\b", enum):
                group = name.rpartition("_")[0]
                if group not in ("SEQPAR", "SEQPAR_ERR"):
                    self.constants[group].add(name)

    @staticmethod
    def fits(part, f):
        return any(fnmatch.fnmatch(f.file, p) for p in part.files) \
            and (part.chapters[0] in "-*" or f.chapter in part.chapters)


def digest(world):
    """Of all that mutants are drawn from."""
    found = hashlib.sha256(json.dumps(sorted(world.texts.items())).encode())
    for name in ("draw.py", "kinds.py", "source.py", "parts.tsv"):
        with open(os.path.join(HERE, name), "rb") as file:
            found.update(file.read())
    return found.hexdigest()


# How wide heads are at most where the CPU runs the kernels: wider ones are the same text once more.
HEAD_DIM_MAX = 96
WIDER = re.compile(r"if constexpr \(SEQPAR_CUDA_HEAD_DIM_MAX > (\d+)\)[^;]*;")


def is_compiled(f, start):
    return not any(w.start() <= start < w.end() and int(w.group(1)) >= HEAD_DIM_MAX
                   for w in WIDER.finditer(f.text))


class Draw:
    def __init__(self, world, seed):
        self.world, self.random, self.seen = world, random.Random(seed), set()
        self.equivalent = {tuple(" ".join(text.split()) for text in row[:4])
                           for row in rows("equivalent.tsv")}

    def one(self, number, part):
        while True:
            f = self.random.choice(self.world.functions[part])
            all_kinds = kinds.PYTHON_KINDS if f.file.endswith(".py") else kinds.C_KINDS
            kind = self.random.choice(list(all_kinds))
            places = self.places(all_kinds[kind], f)
            if not places:
                continue
            mutant = Mutant(number, part, kind, f, *self.random.choice(places))
            if mutant.key() not in self.seen and mutant.lines()[0] != mutant.lines()[1]:
                self.seen.add(mutant.key())
                return mutant

    def places(self, kind, f):
        try:
            return [p for p in kind(f, self.world) if is_compiled(f, p[0])]
        except IndexError: # tokens ran out: a macro with braces of its own
            return []

    def all(self, count, parts):
        """Parts get mutants by the root of how many functions they have."""
        functions = self.world.functions
        weight = {p: len(functions[p]) ** 0.5 for p in parts if functions[p]}
        exact = {p: count * w / sum(weight.values()) for p, w in weight.items()}
        share = {p: int(x) for p, x in exact.items()}
        for p in sorted(exact, key=lambda p: share[p] - exact[p])[:count - sum(share.values())]:
            share[p] += 1
        names = [p for p in share for _ in range(share[p])]
        return [self.one(i + 1, p) for i, p in enumerate(names)]


# ---- planting ----
def c_copy(m):
    """The function under another name, which it does not say. A comment shows compiled() where
    the mutant stands."""
    name, text = m.function.name, m.function.text
    text = text[:m.start] + f"/*m{m.number}*/" + m.new + text[m.end:]
    text = re.sub(rf"\b{name}\b", f"{name}__m{m.number}", text, count=1)
    return f'#define __func__ "{name}"\n{text}\n#undef __func__'


def c_call(f, m):
    signature = f.text[:f.body]
    names = ", ".join(name for name, _ in source.parameters(f))
    call = f"{f.name}__m{m.number}{source.template_arguments(f)}({names});"
    plain = re.sub(r"\b(static|inline|SEQPAR_DEF|SEQPAR__\w+|__\w+__|NOINLINE)\b", "",
                   source.TEMPLATE.sub("", source.ATTRIBUTE.sub("", signature), count=1))
    if re.match(rf"\s*void\s+{f.name}\b", plain):
        return f" if (SEQPAR__MUTANT({m.number})) {{ {call} return; }}"
    return f" if (SEQPAR__MUTANT({m.number})) return {call}"


def planted_c(text, mutants, where):
    """The text with copies of functions; where gets the lines of each copy."""
    out, at = SWITCH % 4096, 0
    by_function = defaultdict(list)
    for m in mutants:
        by_function[m.function.start].append(m)
    for start in sorted(by_function):
        f = by_function[start][0].function
        out += text[at:start]
        for m in by_function[start]:
            first = out.count("\n") + 1
            out += c_copy(m) + "\n"
            where.append((first, out.count("\n") + 1, m.number))
        first = out.count("\n") + 1
        out += f.text[:f.body] + "".join(c_call(f, m) for m in by_function[start])
        where.append((first, out.count("\n") + 1, by_function[start][0].number))
        out += f.text[f.body:]
        at = start + len(f.text)
    return out + text[at:]


def planted_python(text, mutants):
    after = defaultdict(str)
    for m in mutants:
        indent = re.match(r" *", m.function.text).group()
        copy = "".join("    " + line if line.strip() else line
                       for line in m.text().splitlines(keepends=True))
        after[m.function.start + len(m.function.text)] += \
            f"{indent}if _mutant({m.number}):\n{copy}"
    for at in sorted(after, reverse=True):
        text = text[:at] + after[at] + text[at:]
    body = ast.parse(text).body
    imports = [n.end_lineno for n in body[:3] if isinstance(n, (ast.Expr, ast.ImportFrom))
               and getattr(n, "module", "__future__") == "__future__"]
    lines = text.splitlines(keepends=True)
    head = max(imports, default=0)
    return "".join(lines[:head]) + PYTHON_SWITCH + "".join(lines[head:])


def copy_tree(origin, tree):
    """Copies what differs, so that make builds what has to be built. How many files did."""
    changed = 0
    for file in sources():
        if file.startswith("verify/mutants/"):
            continue
        here, to = os.path.join(origin, file), os.path.join(tree, file)
        if os.path.exists(to) and filecmp.cmp(here, to, shallow=False):
            continue
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.copy(here, to)
        changed += 1
    return changed


class Planter:
    def __init__(self, world, tree):
        self.world, self.tree, self.where = world, tree, {}

    def plant(self, mutants):
        for file, text in self.world.texts.items():
            mine, self.where[file] = [m for m in mutants if m.function.file == file], []
            if mine and file.endswith(".py"):
                text = planted_python(text, mine)
            elif mine:
                text = planted_c(text, mine, self.where[file])
            path = os.path.join(self.tree, file)
            with open(path, encoding="utf-8") as old:
                same = old.read() == text
            if not same:
                with open(path, "w", encoding="utf-8") as new:
                    new.write(text)

    def at(self, file, line):
        """The mutant whose copy a compiler complains about."""
        file = os.path.normpath(file)
        copies = self.where.get(file, ())
        return next((n for first, last, n in copies if first <= line <= last), None)


# ---- which of them a compiler takes: what it warns of is red in suite `compiled` ----
UNITS = ["verify/library.c", "verify/seqpar_verify.c", "verify/tests/test_nccl.c", "demos/seqpar.c"] + \
    sorted(glob.glob("demos/train_*.c", root_dir=ROOT)) + ["demos/generate.c"]
FLAGS = "-std=gnu11 -D_GNU_SOURCE -march=native -fopenmp -I. -Ibuild -Idemos " \
    "-Iverify -ftrack-macro-expansion=0 -fmax-errors=0 " \
    "-Wall -Wextra -Werror -Wno-format-truncation -Wno-missing-field-initializers -Wno-type-limits".split()  # stb_ds compares a size_t with 0


ERROR = re.compile(r"^([^:\n]+):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", re.MULTILINE)


# The kernels as the CPU runs them (verify/stand_in/cuda_on_cpu.h).
CUDA = "-Wall -Wextra -Werror -Wno-unused-function -Wno-missing-field-initializers -std=c++17 -march=native -I. -DSEQPAR_CUBLAS -include verify/stand_in/cublas_on_cpu.h " \
    "-ftrack-macro-expansion=0 -fmax-errors=0 -x c++ seqpar_cuda.cu".split()


def compilations(mutants):
    """Of what holds these mutants."""
    found = []
    if any(not is_python(m) and not is_cuda(m) for m in mutants):
        found = [["gcc", *FLAGS, unit] for unit in UNITS]
        if shutil.which("mpicc"):
            found.append(["mpicc", *FLAGS, "-DDEMO_MPI", "demos/train_sft.c"])
    if any(is_cuda(m) for m in mutants):
        found.append(["g++", *CUDA])
    return found


def said(command, planter):
    return subprocess.run(command, cwd=planter.tree, capture_output=True, text=True,
                          check=False)


def refused(planter, mutants):
    """Mutants that do not compile; and errors that belong to none."""
    numbers, others = set(), []
    for command in compilations(mutants):
        errors = said(command + ["-fsyntax-only"], planter).stderr
        for file, line, what in ERROR.findall(errors):
            number = planter.at(file, int(line))
            numbers.add(number) if number else others.append(f"{file}:{line}: {what}")
    return numbers, others


def compiled(planter, mutants):
    """Mutants that stand in what is compiled: not below an #if that is off."""
    numbers = set()
    for command in compilations(mutants):
        text = said(command + ["-E", "-P", "-CC"], planter).stdout
        numbers |= {int(n) for n in re.findall(r"/\*m(\d+)\*/", text)}
    return numbers


def is_python(m):
    return m.function.file.endswith(".py")


def is_cuda(m):
    return m.function.file.endswith(".cu")


def python_compiles(m):
    text = "if 1:\n" + "".join(" " + line for line in m.text().splitlines(keepends=True))
    try:
        compile(text, m.function.file, "exec")
        return True
    except SyntaxError:
        return False


def wrong_ones(planter, mutants):
    """The numbers of those that do not compile, or that no program holds."""
    bad = {m.number for m in mutants if is_python(m) and not python_compiles(m)}
    if any(m.part == "mpi" for m in mutants) and not shutil.which("mpicc"):
        raise SystemExit("mutants: part mpi takes mpicc; install an MPI, or name other PARTS")
    planter.plant([m for m in mutants if m.number not in bad])
    wrong, others = refused(planter, mutants)
    if others and not wrong:
        raise SystemExit("mutants: the planted tree does not compile: " + others[0])
    held = {m.number for m in mutants if not is_python(m)}
    return bad | (wrong or held - compiled(planter, mutants))


def settle(draw, planter, mutants, known):
    """Draws anew until all compile. `known`: what rounds found before, of the same sources."""
    for turn in range(20):
        if turn == len(known):
            known.append(sorted(wrong_ones(planter, mutants)))
        if not known[turn]:
            planter.plant(mutants)
            return mutants
        bad = known[turn]
        print(f"# drawn anew: {len(bad)} that do not compile, or are not compiled", flush=True)
        mutants = [draw.one(m.number, m.part) if m.number in bad else m for m in mutants]
    raise SystemExit("mutants: after 20 draws some still do not compile")
