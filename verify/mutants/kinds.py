# SPDX-License-Identifier: MIT OR Unlicense
"""kinds.py - what a tired programmer gets wrong, by text. Each kind yields (start, end, new
text) for each place of a function where it can happen."""
import ast
import re
from source import KEYWORDS, closing, split_arguments, variables

RELATIONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}


# A leak is for the sanitizers.
LEAK = re.compile(r"free|Delete|^fclose$|^close$", re.IGNORECASE)

# The order of their arguments does not matter; of these it does not where only equality is asked.
SAME = re.compile(r"MIN|MAX|^f?(min|max)$")
EQUAL = re.compile(r"^(str(n|case|ncase)?|mem)cmp$")


def in_body(f):
    return [(i, t) for i, t in enumerate(f.tokens) if t.start >= f.body]


def is_value(t):
    return t.kind == "number" or t.text in (")", "]") or \
        (t.kind == "name" and t.text not in KEYWORDS)


def relation(f, _):
    for i, t in in_body(f):
        if t.text in RELATIONS:
            yield t.start, t.end, RELATIONS[t.text]
        if t.text in ("SEQPAR__MIN", "SEQPAR__MAX"):
            yield t.start, t.end, "SEQPAR__MAX" if t.text.endswith("MIN") else "SEQPAR__MIN"


def logic(f, _):
    for i, t in in_body(f):
        if t.text in ("&&", "||"):
            yield t.start, t.end, "||" if t.text == "&&" else "&&"


def arithmetic(f, _):
    swap = {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
    for i, t in in_body(f):
        if t.text in swap and is_value(f.tokens[i - 1]):
            yield t.start, t.end, swap[t.text]
        if t.text == "+=":
            yield t.start, t.end, "="


def off_by_one(f, _):
    toks = f.tokens
    for i, t in in_body(f):
        if t.text in "+-" and is_value(toks[i - 1]) and toks[i + 1].text == "1":
            yield t.start, toks[i + 1].end, ""
        if t.text in ("<", "<=", ">", ">=") and toks[i + 1].kind == "name" \
                and toks[i + 2].text in (";", ")", "&&", "||"):
            yield toks[i + 1].end, toks[i + 1].end, " - 1"
            yield toks[i + 1].end, toks[i + 1].end, " + 1"


def other_number(text):
    digits = re.match(r"[\d.]+(?:[eE][-+]?\d+)?", text).group()
    if re.search(r"[.eE]", digits):
        value = float(digits)
        return [f"{1.0 if value == 0 else value * 2!r}{text[len(digits):]}"]
    value = int(digits)
    return [f"{n}{text[len(digits):]}" for n in (value - 1, value + 1) if n >= 0]


def constant(f, world):
    toks = f.tokens
    for i, t in in_body(f):
        if t.kind == "number" and t.text[:2] not in ("0x", "0X") and toks[i - 1].text != "[" \
                and not (toks[i - 1].text in "+-" and t.text == "1"):
            for new in other_number(t.text):
                yield t.start, t.end, new
        group = t.text.rpartition("_")[0]
        for other in world.constants.get(group, ()) if t.kind == "name" else ():
            if other != t.text and t.text in world.constants[group]:
                yield t.start, t.end, other


def variable(f, world):
    declared = variables(f)
    types = {name: kind for name, kind, _ in declared}
    places = {at for _, _, at in declared}
    toks = f.tokens
    for i, t in in_body(f):
        if t.kind != "name" or t.start in places:
            continue
        if toks[i - 1].text in (".", "->"):
            for other in world.members.get(t.text, ()):
                yield t.start, t.end, other
        elif t.text in types:
            for name, kind, at in declared:
                if kind == types[t.text] and name != t.text and at < t.start:
                    yield t.start, t.end, name


def statement_end(toks, i):
    """The index of the last token of the statement that begins at toks[i]."""
    if toks[i].text == "{":
        return closing(toks, i)
    if toks[i].text in ("if", "for", "while"):
        return statement_end(toks, closing(toks, i + 1) + 1)
    while toks[i].text != ";":
        i = closing(toks, i) + 1 if toks[i].text in "([{" else i + 1
    return i


def begins_statement(toks, i):
    return toks[i - 1].text in ("{", "}", ";", "else") or toks[i - 1].text == ")"


def dropped(f, _):
    toks = f.tokens
    for i, t in in_body(f):
        if t.text == "if":
            end = statement_end(toks, i)
            if end + 1 < len(toks) and toks[end + 1].text != "else":
                yield t.start, toks[end].end, ";"
        elif t.text == "!" and toks[i + 1].text != "=":
            yield t.start, t.end, ""
        elif t.text == "SEQPAR__TRY" and toks[i - 1].text in ("{", "}", ";", ")"):
            yield t.start, t.end, "(void)"
        elif t.kind == "name" and t.text not in KEYWORDS and toks[i + 1].text == "(" \
                and begins_statement(toks, i) and not LEAK.search(t.text):
            end = closing(toks, i + 1)
            if end + 1 < len(toks) and toks[end + 1].text == ";":
                yield t.start, toks[end + 1].end, ";"


def swapped(f, _):
    toks = f.tokens
    for i, t in in_body(f):
        name = toks[i - 1]
        if t.text != "(" or name.kind != "name" or name.text in KEYWORDS:
            continue
        if SAME.search(name.text) or (EQUAL.match(name.text) and toks[i - 2].text == "!"):
            continue
        parts = split_arguments(toks[i + 1:closing(toks, i)])
        for a, b in zip(parts, parts[1:]):
            one, two = f.text[a[0].start:a[-1].end], f.text[b[0].start:b[-1].end]
            if one != two and len(a) <= 6 and len(b) <= 6 and '"' not in one + two:
                gap = f.text[a[-1].end:b[0].start]
                yield a[0].start, b[-1].end, two + gap + one


def index(f, _):
    toks = f.tokens
    for i, t in in_body(f):
        if t.text == "[" and is_value(toks[i - 1]) and toks[i + 2].text == "]":
            inner = toks[i + 1]
            if inner.text in ("0", "1"):
                yield inner.start, inner.end, "1" if inner.text == "0" else "0"
            elif inner.kind == "name":
                yield inner.end, inner.end, " + 1"
                yield inner.end, inner.end, " - 1"


C_KINDS = {"off by one": off_by_one, "< for <=": relation, "&& for ||": logic,
           "wrong variable": variable, "dropped check or call": dropped,
           "swapped arguments": swapped, "wrong constant": constant, "+ for -": arithmetic,
           "wrong index": index}

# ---- Python: the same, by the syntax tree ----
PYTHON_RELATIONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
                    ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
                    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}


class Tree:
    """A function's tree with places in its text. All of it is dedented first."""

    def __init__(self, f):
        self.indent = re.match(r" *", f.text).group()
        shift = len(self.indent)
        lines = f.text.splitlines(keepends=True)
        self.at, here = [], 0
        for line in lines:
            self.at.append(here)
            here += len(line)
        self.lines, self.shift = lines, shift
        plain = "".join(x[shift:] if x.strip() else x for x in lines)
        self.function = ast.parse(plain).body[0]
        self.nodes = [n for s in self.function.body for n in ast.walk(s)]

    def place(self, line, column):
        text = self.lines[line - 1][self.shift:]
        return self.at[line - 1] + self.shift + len(text.encode()[:column].decode())

    def span(self, node):
        return self.place(node.lineno, node.col_offset), \
            self.place(node.end_lineno, node.end_col_offset)


def between(f, tree, left, right, old, new):
    """The operator `old` between two operands."""
    start, end = tree.span(left)[1], tree.span(right)[0]
    at = f.text.find(old, start, end)
    if at >= 0 and "#" not in f.text[start:end]:
        yield at, at + len(old), new


def python_relation(f, _):
    tree = Tree(f)
    for n in tree.nodes:
        if isinstance(n, ast.Compare) and type(n.ops[0]) in PYTHON_RELATIONS:
            words = PYTHON_RELATIONS[type(n.ops[0])]
            yield from between(f, tree, n.left, n.comparators[0], *words)


def python_logic(f, _):
    tree = Tree(f)
    for n in tree.nodes:
        if isinstance(n, ast.BoolOp):
            words = ("and", "or") if isinstance(n.op, ast.And) else ("or", "and")
            yield from between(f, tree, n.values[0], n.values[1], *words)


def python_arithmetic(f, _):
    tree = Tree(f)
    for n in tree.nodes:
        if isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Add, ast.Sub)):
            signs = ("+", "-") if isinstance(n.op, ast.Add) else ("-", "+")
            yield from between(f, tree, n.left, n.right, *signs)


def python_constant(f, _):
    tree = Tree(f)
    for n in tree.nodes:
        if isinstance(n, ast.Constant) and type(n.value) in (int, float):
            for new in (n.value + 1, n.value - 1):
                yield *tree.span(n), repr(new)
        elif isinstance(n, ast.Constant) and type(n.value) is bool:
            yield *tree.span(n), repr(not n.value)


def python_variable(f, _):
    tree = Tree(f)
    names = {a.arg for a in tree.function.args.args} - {"self"}
    stored = [n for n in tree.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names |= {n.id for n in stored}
    for n in tree.nodes:
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names:
            for other in sorted(names - {n.id}):
                yield *tree.span(n), other


def python_dropped(f, _):
    tree = Tree(f)
    for n in tree.nodes:
        if isinstance(n, ast.If) and not n.orelse:
            start, end = tree.span(n.test)
            yield start, end, "False"
        elif isinstance(n, ast.Expr) and isinstance(n.value, ast.Call):
            yield *tree.span(n), "pass"
        elif isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not):
            yield tree.span(n)[0], tree.span(n.operand)[0], ""


def python_swapped(f, _):
    tree = Tree(f)
    for n in tree.nodes:
        if isinstance(n, ast.Call) and not SAME.search(getattr(n.func, "id", "")):
            for a, b in zip(n.args, n.args[1:]):
                (s, e), (s2, e2) = tree.span(a), tree.span(b)
                if f.text[s:e] != f.text[s2:e2]:
                    yield s, e2, f.text[s2:e2] + f.text[e:s2] + f.text[s:e]


PYTHON_KINDS = {"< for <=": python_relation, "&& for ||": python_logic,
                "+ for -": python_arithmetic, "wrong constant": python_constant,
                "wrong variable": python_variable, "dropped check or call": python_dropped,
                "swapped arguments": python_swapped}
