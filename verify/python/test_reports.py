# SPDX-License-Identifier: MIT OR Unlicense
"""Looks at what seqpar-verify ver --html and --junit wrote, against numbers that are counted
here from the dump. Needs nothing but Python.

    test_reports.py page PAGE DUMP JSON     JSON: what --json said of the same dump
    test_reports.py junit XML JSON
    test_reports.py write KIND FOLDER [FROM] a dump made here, or one made of another
"""
import html.parser
import json
import math
import os
import re
import struct
import sys
import xml.etree.ElementTree as xml

LEFT, WIDE = 116, 960
FORMATS = {"I64": "q", "I32": "i", "F32": "f", "F64": "d"}


# ---- safetensors ----

def read_file(path):
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        header, data = json.loads(f.read(size)), f.read()
    tensors = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            code = FORMATS[t["dtype"]]
            values = struct.unpack(f"<{(end - begin) // struct.calcsize(code)}{code}", data[begin:end])
            tensors[name] = [t["dtype"], t["shape"], list(values)]
    return header["__metadata__"], tensors


def write_file(path, metadata, tensors):
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, values) in tensors.items():
        raw = struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def read_dump(folder):
    ranks = {}
    for name in os.listdir(folder):
        metadata, tensors = read_file(f"{folder}/{name}")
        ranks[int(metadata["rank"])] = metadata, tensors
    return [ranks[r] for r in range(len(ranks))]


def write_dump(folder, ranks):
    os.makedirs(folder, exist_ok=True)
    for r, (metadata, tensors) in enumerate(ranks):
        write_file(f"{folder}/rank{r}.safetensors", metadata, tensors)


# ---- attention of a row, by its definition ----

def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def attention(x, begins):
    """Right out, lse, dq, dk, dv as {name: [token][head]: numbers} of q, k, v, dout of the same shape."""
    tokens, heads, kv_heads, n = len(x["q"]), len(x["q"][0]), len(x["k"][0]), len(x["q"][0][0])
    zeros = lambda count: [[[0.0] * n for _ in range(count)] for _ in range(tokens)]
    right = {"out": zeros(heads), "lse": zeros(heads), "dq": zeros(heads), "dk": zeros(kv_heads), "dv": zeros(kv_heads)}
    for t in range(tokens):
        for h in range(heads):
            g, keys = h * kv_heads // heads, range(begins[t], t + 1)
            scores = [dot(x["q"][t][h], x["k"][u][g]) / math.sqrt(n) for u in keys]
            lse = max(scores) + math.log(sum(math.exp(s - max(scores)) for s in scores))
            p = [math.exp(s - lse) for s in scores]
            dp = [dot(x["dout"][t][h], x["v"][u][g]) for u in keys]
            right["lse"][t][h] = [lse]
            for u, weight, of in zip(keys, p, dp):
                ds = weight * (of - dot(p, dp)) / math.sqrt(n)
                for i in range(n):
                    right["out"][t][h][i] += weight * x["v"][u][g][i]
                    right["dq"][t][h][i] += ds * x["k"][u][g][i]
                    right["dk"][u][g][i] += ds * x["q"][t][h][i]
                    right["dv"][u][g][i] += weight * x["dout"][t][h][i]
    return right


def by_heads(tensor, token):
    """[head]: numbers of one token of (tokens, heads, n) or (tokens, heads)."""
    shape, values = tensor[1] + [1] * (3 - len(tensor[1])), tensor[2]
    at = lambda h: (token * shape[1] + h) * shape[2]
    return [values[at(h):at(h) + shape[2]] for h in range(shape[1])]


# ---- what is wrong in a row, token by token ----

class Row:
    def __init__(self, ranks, number):
        metadata = ranks[0][0]
        self.sp, micros = int(metadata.get("sp", 1)), int(metadata.get("accumulation", 1))
        self.first, micro = number // micros * self.sp, number % micros
        own = [tensors for _, tensors in ranks[self.first:self.first + self.sp]]
        get = lambda tensors, what: tensors.get(f"{micro}.{what}", [0, 0, None])[2]
        self.cu = get(own[0], "cu_seqlens")
        held = sum(len(get(tensors, "index")) for tensors in own)
        self.tokens = max(held, self.cu[-1] if self.cu else 0)
        self.end = self.cu[-1] if self.cu else self.tokens
        self.rank, self.holders, self.following = [-1] * self.tokens, [0] * self.tokens, {}
        columns = {what: [None] * self.tokens for what in ("ids", "positions", "labels", "logp")}
        for r, tensors in enumerate(own):
            last = None
            for i, t in enumerate(get(tensors, "index")):
                if not 0 <= t < self.tokens:
                    continue
                self.holders[t] += 1
                if self.rank[t] >= 0:
                    continue
                self.rank[t] = r
                if last is not None:
                    self.following[last] = t
                last = t
                for what, values in columns.items():
                    given = get(tensors, what)
                    values[t] = given[i] if given else None
        self.__dict__.update(columns)
        self.attention = {}
        for name in ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv"):
            for tensors in own:
                for i, t in enumerate(get(tensors, "index")):
                    if f"{micro}.{name}" in tensors and 0 <= t < self.tokens:
                        self.attention.setdefault(name, {})[t] = by_heads(tensors[f"{micro}.{name}"], i)

    def wrong_attention(self):
        """{mark: {token: 1}}; fp64 is off by far more than 1e-9 or not at all."""
        given, wrong = self.attention, {"out, lse": {}, "dq": {}, "dk": {}, "dv": {}}
        if set(given) != {"q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv"} or len(given["q"]) < self.tokens:
            return wrong
        right = attention(given, [self.begin(t) for t in range(self.tokens)])
        for name, by_token in right.items():
            for t, heads in enumerate(by_token):
                if any(not abs(x - y) <= 1e-9 for one, other in zip(heads, given[name][t]) for x, y in zip(one, other)):
                    wrong["out, lse" if name in ("out", "lse") else name][t] = 1
        return wrong

    def begin(self, t):
        return max(c for c in self.cu if c <= t) if self.cu else 0

    def ends(self, t):
        return t + 1 >= self.end or self.begin(t + 1) == t + 1

    def cut(self, t):
        return self.following.get(t) != t + 1 and not self.ends(t)

    def inside(self):
        return [t for t in range(self.end) if self.rank[t] >= 0]

    def marks(self):
        """What is wrong, as {mark: {token: times}}."""
        wrong = {"nobody": {t: 1 for t in range(self.tokens) if self.rank[t] < 0},
                 "twice": {t: n - 1 for t, n in enumerate(self.holders) if n > 1},
                 "position": {t: 1 for t in self.inside() if self.positions[t] not in (None, t - self.begin(t))},
                 "label": {}, "cut, no label": {}}
        for t in self.inside():
            label = self.labels[t]
            if label not in (None, -100) and t + 1 < self.end and label != (-100 if self.ends(t) else self.ids[t + 1]):
                wrong["label"][t] = 1
            if label == -100 and self.cut(t) and 0 < t < self.end - 1 and not self.ends(t - 1) and -100 not in (self.labels[t - 1], self.labels[t + 1]):
                wrong["cut, no label"][t] = 1
        return {**wrong, **self.wrong_attention()}


# ---- the page ----

class Tags(html.parser.HTMLParser):
    """As a browser reads it: every element is closed, in turn."""
    void = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in self.void or tag in ("path", "rect"), f"<{tag}/>"

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}>"


def boxes(element):
    """[(left, top, right, bottom)] of a path of boxes."""
    found = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+z", element.get("d"))
    return [(float(a), float(y), float(b), float(z)) for a, y, b, z in found]


def title(verdict):
    names = [m["name"] for m in verdict["mistakes"]]
    if not names:
        return verdict["verdict"] + (": unknown" if verdict["verdict"] == "wrong" else "")
    return verdict["verdict"] + (": one of " if len(names) > 1 else ": ") + ", ".join(names)


def headline(verdict):
    """What the verdict is called where it is of all stages."""
    return f"{verdict['verdict']}: {verdict['summary']}" if "summary" in verdict else title(verdict)


def check_self_contained(text):
    assert "prefers-color-scheme" in text and "@media" in text and "<script" not in text.lower()
    for wanted in re.findall(r"""(?:src|href|xlink:href|action|data)=["']([^"']*)""", text):
        assert wanted.startswith("#"), wanted
    assert not re.search(r"url\(|@import|<link|<img|<iframe", text)


def check_owners(figure, row):
    """The area of each rank's boxes is that of its tokens, and those of one token lie where it is."""
    area, columns = [0.0] * row.sp, {}
    paths = [p for p in figure.iter("path") if p.get("class") == "rank"]
    assert len(paths) == row.sp
    per_token = WIDE / row.tokens
    for r, path in enumerate(paths):
        for a, y, b, z in boxes(path):
            area[r] += (b - a) * (z - y)
            for t in range(round((a - LEFT) / per_token), round((b - LEFT) / per_token)):
                columns.setdefault(t, []).append((y, z))
            if z - y > 31.9:  # the whole column
                first, last = round((a - LEFT) / per_token), round((b - LEFT) / per_token)
                assert set(row.rank[first:last]) == {r}, f"tokens {first} to {last} are not rank {r}'s"
    for t, stack in columns.items():
        stack.sort()
        assert all(abs(z - y) < 0.03 for (_, z), (y, _) in zip(stack, stack[1:])), f"token {t}: {stack}"
        assert abs(stack[0][0] - 17) < 0.03 and stack[-1][1] < 49.03, f"token {t}: {stack}"
    for r in range(row.sp):
        wanted = row.rank.count(r) * per_token * 32
        assert abs(area[r] - wanted) < 0.02 * WIDE * 32 / row.sp + 1, f"rank {r} has {area[r]}, not {wanted}"


def check_documents(figure, row):
    """Documents that have a token lie side by side, odd and even by turns, padding behind them; a line stands where one begins."""
    boxes_of = [(r.get("class"), float(r.get("x")), float(r.get("width"))) for r in figure.iter("rect")
                if r.get("class") in ("odd", "even", "padding")]
    lines = [float(re.fullmatch(r"M([\d.]+) 0V[\d.]+", p.get("d")).group(1)) for p in figure.iter("path") if p.get("class") == "line"]
    place = lambda t: LEFT + WIDE * min(t, row.tokens) / row.tokens
    cut = list(zip(row.cu, row.cu[1:])) if row.cu else []
    filled = [(a, b) for a, b in cut if a < b]
    wanted = [(("even", "odd")[i % 2], a, b) for i, (a, b) in enumerate(filled if len(cut) <= 1000 else [])]
    wanted += [("padding", row.end, row.tokens)] * (row.end < row.tokens)
    assert [kind for kind, _, _ in boxes_of] == [kind for kind, _, _ in wanted], f"{boxes_of}, not {wanted}"
    for (_, left, wide), (_, a, b) in zip(boxes_of, wanted):
        assert abs(left - place(a)) < 0.02 and abs(wide - place(b) + place(a)) < 0.02, f"{left}, {wide}: not tokens {a} to {b}"
    starts = [place(a) for a, _ in cut if a > 0 and len(cut) <= 100]
    assert len(lines) == len(starts) and all(abs(x - y) < 0.02 for x, y in zip(lines, starts)), f"{lines}, not {starts}"


def check_names(figure):
    """Every strip has its name beside it; that of the scale stands where its numbers do."""
    at = {t.text: float(t.get("y")) for t in figure.iter("text") if t.get("class") == "at"}
    for strip in figure.iter("rect"):
        top, high = float(strip.get("y")), float(strip.get("height"))
        if strip.get("class") == "back" and high >= 11:
            assert sum(top < y < top + high for y in at.values()) == 1, f"the strip at {top}: {at}"
    numbers = {float(t.get("y")) for t in figure.iter("text") if t.get("class") == "on"} - {11}
    assert 0 < at["document"] < 14 and numbers == {at["token"]}, f"{at}, numbers at {numbers}"


STAGE_OF = {"nobody": "places", "twice": "places", "position": "positions", "label": "labels", "cut, no label": "labels",
            "out, lse": "attention", "dq": "attention", "dk": "attention", "dv": "attention"}


def check_marks(figure, row, stages):
    drawn = {mark: {} for mark in STAGE_OF}
    wrong_at = row.marks()
    for cell in figure.iter("rect"):
        if cell.get("data-mark"):
            drawn[cell.get("data-mark")][float(cell.get("x"))] = int(cell.get("data-n"))
            wrong = stages[STAGE_OF[cell.get("data-mark")]]["verdict"] == "wrong"
            assert cell.get("class") == ("bad" if wrong else "maybe")
            begin = (float(cell.get("x")) - LEFT) * row.tokens / WIDE - 0.05
            named = min(t for t in wrong_at[cell.get("data-mark")] if t >= begin)
            assert re.search(rf"\btoken {named}\b", cell.find("title").text), cell.find("title").text
    for mark, wanted in wrong_at.items():
        if stages[STAGE_OF[mark]]["verdict"] in ("right", "not judged"):
            wanted = {}
        assert sum(drawn[mark].values()) == sum(wanted.values()), f"{mark}: {drawn[mark]}, not {wanted}"
        if row.tokens <= 1000:
            places = {round((x - LEFT) * row.tokens / WIDE): n for x, n in drawn[mark].items()}
            assert places == wanted, f"{mark}: {places}, not {wanted}"
        assert len(drawn[mark]) <= 1000
    words = "".join(figure.find("figcaption").itertext())
    for mark, wanted in wrong_at.items():
        if drawn[mark]:
            said = re.search(rf", {sum(wanted.values())} times?: (the first is )?token {min(wanted)}\b[^.]*\.", words)
            assert said, words
            near = sum(row.rank[t] >= 0 and (row.cut(t) or (t > 0 and row.cut(t - 1))) for t in wanted)
            if 4 * sum(map(row.cut, row.inside())) > row.tokens or not near:
                assert "cut" not in said.group(), said.group()
            elif near == sum(wanted.values()):
                assert said.group().endswith("; all of them next to a cut." if near > 1 else "; next to a cut."), said.group()
            else:
                assert said.group().endswith(f"; {near} of them next to a cut."), said.group()
            ranks = {row.first + row.rank[t] for t in wanted if row.rank[t] >= 0}
            on = "on all ranks" if len(ranks) == row.sp > 1 else f"on rank {min(ranks)} alone" if len(ranks) == 1 else \
                f"on {len(ranks)} of {row.sp} ranks" if len(ranks) > 4 else "on ranks " + ", ".join(map(str, sorted(ranks))) if ranks else ""
            assert on in said.group(), said.group()


def heated(figure, row):
    """{token: (rank, level)} of a row; where a column has several tokens, the largest level."""
    lanes = sorted({float(r.get("y")) for r in figure.iter("rect") if r.get("class") == "back" and r.get("height") == "12.0"})
    found = {}
    for path in figure.iter("path"):
        if re.fullmatch(r"h-?\d", path.get("class", "")):
            for a, y, b, z in boxes(path):
                for t in range(round((a - LEFT) * row.tokens / WIDE), round((b - LEFT) * row.tokens / WIDE)):
                    assert t not in found or row.tokens > 1000, f"token {t} is in two lanes"
                    found[t] = max(found.get(t, (0, -9)), (lanes.index(y), int(path.get("class")[1:])), key=lambda x: x[1])
    return found


def check_heat(figure, row, changed, verdict):
    found = heated(figure, row)
    if not found:
        return 0
    if row.tokens > 1000:
        per = -(-row.tokens // 1000)
        for t in range(row.tokens):
            others = [changed.get(u, 0) for u in range(t // per * per, t // per * per + per)]
            assert (found[t][1] > 0) == any(others), f"token {t}: {found[t]}"
        changed = {t: far for t, far in changed.items() if far >= max(changed.get(u, 0) for u in range(t // per * per, t // per * per + per))}
    for t in range(row.tokens if row.tokens <= 1000 else 0):
        rank, level = found[t]
        assert rank == row.rank[t], f"token {t} is in the lane of {rank}"
        if row.labels[t] == -100 or t >= row.end:
            assert level == -1, f"token {t} has no label and level {level}"
        elif changed is not None:
            far = changed.get(t, 0)
            assert level == (8 if math.isnan(far) else 0 if not far else level) and (level > 0) == (far != 0), f"token {t}: {level}, {far}"
    words = "".join(figure.find("figcaption").itertext())
    if changed is not None and row.tokens <= 1000:
        at = next(iter(re.findall(r"log-probs: (\d+) off by more than \S+: (?:the first is )?token (\d+)", words)), (0, 0))
        assert [int(x) for x in at] == ([len(changed), min(changed)] if changed else [0, 0]), words
    if changed:
        keys = ["".join(s.itertext()) for s in figure.iter("span") if re.fullmatch(r"h[1-7]", s.find("i").get("class"))]
        limits = [float(k.replace("from ", "")) for k in keys]
        assert len(limits) == 7 and limits == sorted(limits)
        for t, far in changed.items():
            around = {max(1, sum(limit <= far * slack for limit in limits)) for slack in (0.95, 1, 1.05)}
            assert math.isnan(far) or found[t][1] in around, f"token {t}: {found[t]}, by {far} in {limits}"
        worst = max((t for t in changed if not math.isnan(changed[t])), key=lambda t: changed[t])
        assert found[worst][1] == 7 if verdict == "wrong" else found[worst][1] < 4, f"the farthest has {found[worst]}"
    return 1


def check_page(page, folder, said, changed=None):
    text = open(page, encoding="utf-8").read()
    check_self_contained(text)
    tags = Tags()
    tags.feed(text)
    assert not tags.open, tags.open
    root = xml.fromstring(text.replace("<!DOCTYPE html>", ""))
    verdict = json.load(open(said))
    stages = {s["stage"]: s for s in verdict["stages"]}
    heading = root.find(".//h1")
    assert "".join(heading.itertext()) == headline(verdict) and verdict["verdict"] in heading.get("class")
    named = {m["name"] for s in stages.values() for m in s.get("mistakes", [])}
    shown = [s for s in root.iter("section") if s.get("data-mistake")]
    assert {s.get("data-mistake") for s in shown} == named and len(shown) == len(named)
    for section in shown:
        terms = [dt.text for dt in section.iter("dt")]
        assert terms == ["symptom", "cause", "right", "wrong", "by hand", "fix", "seen"]
        assert all("".join(dd.itertext()) for dd in section.iter("dd"))
    lines = [tr for tr in root.iter("tr") if tr.get("data-stage")]
    assert [tr.get("data-stage") for tr in lines] == list(stages)
    for tr in lines:
        words, stage = " ".join(tr.itertext()), stages[tr.get("data-stage")]
        assert stage["verdict"] in words and all(e in words for e in stage.get("evidence", [stage.get("needs")])), words
    ranks = read_dump(folder)
    metadata = ranks[0][0]
    rows = len(ranks) // int(metadata.get("sp", 1)) * int(metadata.get("accumulation", 1))
    figures = [f for f in root.iter("figure") if f.get("class") == "row"]
    assert len(figures) == min(4, rows), f"{len(figures)} of {rows} rows"
    left = [p.get("data-left") for p in root.iter("p") if p.get("data-left")]
    assert left == ([str(rows - 4)] if rows > 4 else []), left
    chosen = [int(f.get("data-row")) for f in figures]
    bad = [n for n in range(rows) if any(w and stages[STAGE_OF[mark]]["verdict"] not in ("right", "not judged")
                                         for mark, w in Row(ranks, n).marks().items())]
    assert set(bad[:4 - (changed is not None)]) <= set(chosen) and chosen == sorted(chosen), (bad, chosen)
    heat = 0
    for figure in figures:
        row = Row(ranks, int(figure.get("data-row")))
        check_owners(figure, row)
        check_documents(figure, row)
        check_names(figure)
        check_marks(figure, row, stages)
        if row.tokens <= 1000 or changed:
            heat += check_heat(figure, row, changed, stages["log-probs"]["verdict"])
    return root, stages, heat


def check_chart(root, bad, farthest):
    bars = [r for r in root.iter("rect") if r.get("data-tensor")]
    assert sum(b.get("class") == "bad" for b in bars) == bad, f"{len(bars)} bars, not {bad} bad ones"
    widths = [float(b.get("width")) for b in bars]
    if farthest is not None:
        assert farthest in bars[widths.index(max(widths))].find("title").text
    return len(bars)


# ---- JUnit ----

def check_junit(path, said):
    root = xml.parse(path).getroot()
    suite, = root.findall("testsuite")
    verdict = json.load(open(said))
    cases = suite.findall("testcase")
    assert [c.get("name") for c in cases] == [s["stage"] for s in verdict["stages"]]
    assert all(c.get("classname") == "seqpar-verify" for c in cases)
    skipped = failures = 0
    for case, stage in zip(cases, verdict["stages"]):
        kinds = [e.tag for e in case]
        evidence = stage.get("evidence", [])
        if stage["verdict"] == "wrong":
            failures += 1
            failure = case.find("failure")
            assert kinds == ["failure"] and failure.get("message") == title(stage)
            lines, mistakes = "".join(e + "\n" for e in evidence), stage["mistakes"]
            begin = lines + mistakes[0]["name"] + ": " if mistakes else lines
            assert failure.text.startswith(begin) and (mistakes or failure.text == lines)
            assert all(m.get("fix", "") in failure.text for m in mistakes)
        elif stage["verdict"] in ("insufficient", "not judged"):
            skipped += 1
            message = case.find("skipped").get("message")
            assert kinds == ["skipped"] and stage["verdict"] in message and all(e in message for e in evidence) and stage.get("needs", "") in message
        else:
            said = "".join(line + "\n" for line in [stage["verdict"], *evidence])
            assert kinds == ["system-out"] and case.find("system-out").text == said
    for element in root, suite:
        numbers = [int(element.get(k)) for k in ("tests", "failures", "skipped", "errors")]
        assert numbers == [len(cases), failures, skipped, 0], numbers
    assert suite.find("properties/property[@name='verdict']").get("value") == headline(verdict)
    print(len(cases), failures, skipped)


# ---- dumps ----

def whole_step(tokens, sp, cu, deal, **metadata):
    """A right step without numbers of a model. deal(t): the rank."""
    ids = [5 + t * 7 % 1009 for t in range(tokens)]
    ranks = []
    for r in range(sp):
        mine = [t for t in range(tokens) if deal(t) == r]
        begin = [max(c for c in cu if c <= t) for t in mine]
        labels = [-100 if t + 1 in cu or t + 1 >= cu[-1] else ids[t + 1] for t in mine]
        n = len(mine)
        tensors = {"0.index": ["I64", [n], mine], "0.cu_seqlens": ["I32", [len(cu)], cu],
                   "0.ids": ["I64", [n], [ids[t] for t in mine]], "0.labels": ["I64", [n], labels],
                   "0.positions": ["I32", [n], [t - b for t, b in zip(mine, begin)]]}
        ranks.append(({"seqpar_dump": "1", "rank": str(r), "world": str(sp), "sp": str(sp), **metadata}, tensors))
    return ranks


# Cut within a character: the second by evidence, the last by its label, the one before by the room for names. XML forbids U+FFFF.
HOSTILE = ["<script>alert(1)</script>", "x" * 94 + "\u00e9\u00e9", "a\"b'c&d", "]]>", "\x1b[31m\x07", "--><style>",
           "\uffff", "w" * 121 + "\u00e9\u00e9", "y" + "\u00e9" * 40 + "z"]


def hostile(factor, sp):
    ranks = whole_step(7, sp, [0, 3, 7], lambda t: t * sp // 7)
    for _, tensors in ranks:
        for i, name in enumerate(HOSTILE):
            tensors["grad." + name] = ["F64", [3], [1.0, 2.0, 3.0 + i * factor]]
    return ranks


def many(odd, far=0.5):
    ranks = whole_step(7, 1, [0, 3, 7], lambda t: 0)
    for i in range(60):
        ranks[0][1][f"grad.layers.{i}.w"] = ["F64", [2], [1.0, 2.0 + (far if i == odd else 1e-5 * (i > 45))]]
    return ranks


def drop(ranks, rank, at, again=None, micro=0):
    """Takes the token in that row out of a rank's tensors, or holds it again at the end. Those of attention go."""
    for _, tensors in ranks:
        for name in [n for n, tensor in tensors.items() if n.startswith(f"{micro}.") and len(tensor[1]) > 1]:
            del tensors[name]
    for name, tensor in ranks[rank][1].items():
        if name.startswith(f"{micro}.") and name != f"{micro}.cu_seqlens":
            if again is None:
                del tensor[2][at]
            else:
                tensor[2].append(tensor[2][again])
            tensor[1] = [len(tensor[2])]
    return ranks


def zigzag(t, tokens, sp):
    stretch = t * 2 * sp // tokens
    return min(stretch, 2 * sp - 1 - stretch)


def changed_logp(ranks, kind):
    """Behind token 40 on the rank that holds token 45, shrinking; {token: by how much}. logp_round: one, by little."""
    row, changed = Row(ranks, 0), {}
    for rank in range(row.sp):
        tensors = ranks[rank][1]
        for i, t in enumerate(tensors["0.index"][2]):
            if rank == row.rank[45] and t > 40 and row.labels[t] != -100 and len(changed) < (1 if kind == "logp_round" else 8):
                changed[t] = math.nan if kind == "logp_nan" and len(changed) == 2 else 8e-7 if kind == "logp_round" else 0.3 / 5 ** len(changed)
                tensors["0.logp"][2][i] += changed[t]
    return changed


def unlabelled_cut():
    """A right row with masked tokens, one at its only cut and one elsewhere."""
    ranks = whole_step(12, 2, [0, 12], lambda t: t // 6)
    ranks[0][1]["0.labels"][2][5] = ranks[0][1]["0.labels"][2][2] = -100
    return ranks


def one_cut_masked():
    """A right row with two cuts, one of which is masked: the other shows that nothing is wrong."""
    ranks = whole_step(18, 3, [0, 18], lambda t: t // 6)
    ranks[0][1]["0.labels"][2][5] = -100
    return ranks


def big(wrong):
    ranks = whole_step(4096, 8, [0, 17, 18, 1000, 4096], lambda t: t % 8 if wrong == "stripe" else zigzag(t, 4096, 8))
    for _, tensors in ranks:
        for i, t in enumerate(tensors["0.index"][2]):
            if 2000 <= t < 2011 or t == 4095:
                tensors["0.positions"][2][i] += 1
    return ranks


def written(kind, folder, of):
    kinds = {"hostile": lambda: hostile(1.0, 2), "hostile_want": lambda: hostile(0.0, 1),
             "many": lambda: many(55), "many_want": lambda: many(None),
             "many_nan": lambda: many(50, math.nan),
             "lost": lambda: drop(whole_step(61, 4, [0, 17, 18, 41, 61], lambda t: zigzag(t, 61, 4)), 2, 3),
             "twice": lambda: drop(whole_step(61, 4, [0, 17, 18, 41, 61], lambda t: zigzag(t, 61, 4)), 1, 0, 2),
             "padded": lambda: whole_step(64, 4, [0, 17, 18, 41, 61], lambda t: t // 16),
             "masked_cut": unlabelled_cut, "one_cut": one_cut_masked, "stripe": lambda: big("stripe"), "zigzag": lambda: big("zigzag"),
             "one": lambda: whole_step(61, 1, [0, 17, 18, 41, 61], lambda t: 0),
             "wide": lambda: whole_step(400, 40, [0, 17, 18, 41, 400], lambda t: t // 10)}
    if kind in kinds:
        write_dump(folder, kinds[kind]())
        return
    ranks = read_dump(of)
    if kind == "marginal":
        for _, tensors in ranks:
            tensors["norm"][2][0] *= 1.0012
    elif kind.startswith("mixed"):  # as float32 within a model in float64 makes them
        for metadata, tensors in ranks:
            metadata["dtype"] = kind.replace("mixed", "") or "tensors"
            for name, tensor in tensors.items():
                if name.endswith(".logp") or name.startswith("grad."):
                    tensor[2] = [x * (1 + (3e-7 if name.endswith(".logp") else 8e-7) * math.sin(7 * i)) for i, x in enumerate(tensor[2])]
    elif kind == "no_places":
        for _, tensors in ranks:
            for name in [n for n in tensors if n[0].isdigit()]:
                del tensors[name]
    elif kind == "unknown":
        for _, tensors in ranks:
            tensors["loss"][2][0] *= 1.37
    elif kind == "twice_later":
        drop(ranks, next(r for r in range(3, 6) if ranks[r][1]["2.index"][2]), 0, 0, 2)
    elif kind == "last_rows_wrong":
        next(values for _, tensors in ranks[3:] if (values := tensors["4.positions"][2]))[0] += 3
    else:
        changed = changed_logp(ranks, kind)
    write_dump(folder, ranks)
    if kind.startswith("logp"):
        json.dump(changed, open(folder + ".changed", "w"))


def main(what, *rest):
    if what == "write":
        written(rest[0], rest[1], rest[2] if len(rest) > 2 else None)
    elif what == "junit":
        check_junit(*rest)
    else:
        page, folder, said = rest[:3]
        given = dict(word.split("=", 1) for word in rest[3:])
        changed = {int(t): far for t, far in json.load(open(given["changed"])).items()} if "changed" in given else None
        root, stages, heat = check_page(page, folder, said, changed)
        if "heat" in given:
            assert heat == int(given["heat"]), f"{heat} rows with log-probs"
        if "bad" in given:
            bars = check_chart(root, int(given["bad"]), given.get("farthest"))
            assert bars == int(given.get("bars", bars)), bars
        for word in given.get("says", "").split("|"):
            assert word in "".join(root.itertext()), f"no word of '{word}'"


main(*sys.argv[1:])
