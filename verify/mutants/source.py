# SPDX-License-Identifier: MIT OR Unlicense
"""source.py - functions of C, CUDA and Python files by text, and where the types of names stand.
No parser: sources here are formatted, so a function in C begins at the margin and ends with a
brace there; in CUDA a method of a struct does the same four blanks from it."""
import ast
import re
from dataclasses import dataclass, field

KEYWORDS = set("if else for while do switch case default return sizeof break continue goto "
               "const static struct enum union inline typedef extern volatile void".split())
TOKEN = re.compile(r"""(?P<skip>/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'
    |(?m:^[ \t]*\#(?:\\\n|[^\n])*))
    |(?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[a-zA-Z]*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<op><<=|>>=|->|\+\+|--|&&|\|\||[-+*/%&|^<>=!]=|<<|>>|\.\.\.|[^\s\w])""",
                   re.VERBOSE | re.DOTALL)


@dataclass
class Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass
class Function:
    file: str
    name: str
    text: str       # with its signature (C) or decorators (Python)
    body: int       # where the body begins in text
    start: int      # in the file
    line: int
    chapter: str = ""
    tokens: list = field(default_factory=list)


def tokens(text):
    found = (Token(m.lastgroup, m.group(), m.start(), m.end()) for m in TOKEN.finditer(text))
    return [t for t in found if t.kind != "skip"]


C_FUNCTION = re.compile(r"^(?P<sign>[A-Za-z_][^;{}#=\"]*?\))\s*\{\n(?P<body>.*?\n)?\}$",
                        re.MULTILINE | re.DOTALL)
CUDA_FUNCTION = re.compile(r"^(?P<indent>|    )(?P<sign>[A-Za-z_][^;{}#=\"]*?\))(?: const)?\s*\{\n"
                           r"(?P<body>.*?\n)?(?P=indent)\}$", re.MULTILINE | re.DOTALL)
TEMPLATE = re.compile(r"\s*template <(.*?)>\s")
# What stands in front of a function's name with a bracket, or says how it is compiled.
ATTRIBUTE = re.compile(r"__attribute__\s*\(\(.*?\)\)(?=\s|$)|__launch_bounds__\(.*?\)", re.DOTALL)


CHAPTER = re.compile(r"^(?:   |/\* ---- )>>(\w+)  ", re.MULTILINE)


def c_name(signature):
    found = re.search(r"(\w+)\s*\(", ATTRIBUTE.sub("", signature))
    return found.group(1) if found else ""


def template_arguments(function):
    """<T, D> of a template, which a call cannot always tell; "" of others."""
    found = TEMPLATE.match(function.text)
    names = [p.split()[-1] for p in found.group(1).split(",")] if found else []
    return f"<{', '.join(names)}>" if names else ""


def c_functions(file, text):
    chapters = [(m.start(), m.group(1)) for m in CHAPTER.finditer(text)]
    for m in (CUDA_FUNCTION if file.endswith(".cu") else C_FUNCTION).finditer(text):
        name = c_name(m.group("sign"))
        if not name or name in KEYWORDS or name.isupper() or "..." in m.group("sign"):
            continue
        if re.search(rf"^\s*(__device__ )?{name}\(", m.group()): # a constructor
            continue
        chapter = [c for at, c in chapters if at < m.start()]
        yield Function(file, name, m.group(), m.group().index("{") + 1, m.start(),
                       text.count("\n", 0, m.start()) + 1, chapter[-1] if chapter else "",
                       tokens(m.group()))


def split_arguments(toks):
    """Lists of tokens between the commas at depth 0."""
    parts, depth = [[]], 0
    for t in toks:
        depth += (t.text in "([{") - (t.text in ")]}")
        if t.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(t)
    return [p for p in parts if p]


def closing(toks, at):
    """The index of the bracket that closes toks[at]."""
    depth = 0
    for i in range(at, len(toks)):
        depth += (toks[i].text in "([{") - (toks[i].text in ")]}")
        if depth == 0:
            return i
    return len(toks) - 1


def parameters(function):
    """(name, type) of each, in order."""
    toks = [t for t in function.tokens if t.start < function.body]
    names = [i for i, t in enumerate(toks) if t.text == function.name]
    begin = names[0] + 1
    found = []
    for part in split_arguments(toks[begin + 1:closing(toks, begin)]):
        pointer = re.search(r"\(\s*\*\s*(?:const\s+)?(\w+)", " ".join(t.text for t in part))
        words = [t.text for t in part if t.kind == "name" and t.text != "const"]
        if words == ["void"] and len(part) == 1:
            continue
        stars = "".join(t.text for t in part if t.text in "*[")
        found.append((pointer.group(1), "call") if pointer
                     else (words[-1], " ".join(words[:-1]) + stars.replace("[", "*")))
    return found


def declarations(toks, i):
    """What the statement at toks[i] declares: (name, type, start); [] where it is none."""
    while i < len(toks) and toks[i].text in ("const", "static", "struct", "volatile"):
        i += 1
    if i + 1 >= len(toks) or toks[i].kind != "name" or toks[i].text in KEYWORDS:
        return []
    base, i = toks[i].text, i + 1
    while i < len(toks) and toks[i].text in ("const", "long", "int", "char"):
        base, i = base + " " + toks[i].text, i + 1
    end, depth = i, 0
    while end < len(toks) and not (toks[end].text == ";" and depth == 0) and depth >= 0:
        depth += (toks[end].text in "([{") - (toks[end].text in ")]}")
        end += 1
    found = []
    for part in split_arguments(toks[i:end]):
        stars = [t for t in part if t.text in ("*", "const")]
        k = 0
        while k < len(part) and part[k].text in ("*", "const"):
            k += 1
        after = part[k + 1].text if k + 1 < len(part) else ";"
        if k >= len(part) or part[k].kind != "name" or part[k].text in KEYWORDS \
                or after not in ("=", ";", "["):
            return []
        kind = base + "*" * (sum(t.text == "*" for t in stars) + (after == "["))
        found.append((part[k].text, kind, part[k].start))
    return found


def variables(function):
    """(name, type, where it is declared) of parameters and locals."""
    found = [(name, kind, 0) for name, kind in parameters(function)]
    toks = function.tokens
    for i, t in enumerate(toks):
        if t.start < function.body:
            continue
        before = toks[i - 1].text
        if before in ("{", "}", ";") or (before == "(" and toks[i - 2].text == "for"):
            found += declarations(toks, i)
    return found


STRUCT = re.compile(r"^(?:typedef )?struct \w* ?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)


def members(text):
    """Structs of a file: lists of (member, type)."""
    found = []
    for m in STRUCT.finditer(text):
        toks = tokens(m.group(1))
        starts = [0] + [i + 1 for i, t in enumerate(toks) if t.text == ";"]
        found.append([(name, kind) for i in starts for name, kind, _ in declarations(toks, i)])
    return found


def python_functions(file, text):
    """Functions at the top of a module or of its classes."""
    lines = text.splitlines(keepends=True)
    at = [0]
    for line in lines:
        at.append(at[-1] + len(line))
    tree = ast.parse(text)
    nodes = [n for c in [tree] + [n for n in tree.body if isinstance(n, ast.ClassDef)]
             for n in c.body if isinstance(n, ast.FunctionDef)]
    for node in nodes:
        first = min([node.lineno] + [d.lineno for d in node.decorator_list])
        start, end = at[first - 1], at[node.end_lineno]
        yield Function(file, node.name, text[start:end], at[node.body[0].lineno - 1] - start,
                       start, first)
