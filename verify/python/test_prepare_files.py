# SPDX-License-Identifier: MIT OR Unlicense
"""What demos/prepare.py reads, writes and says, case by case: data sets, the token file, processes, options and their defaults, and
how it ends.

    test_prepare_files.py FOLDER
"""
import array
import collections
import contextlib
import ctypes
import datetime
import gzip
import io
import os
import random
import re
import resource
import signal
import struct
import sys
import time
import types
import zlib
from prepare_tables import OUT, Sentence, end, prepare, rows, write
import tokens
from tokens import data_sets, fill, option_rules, processes, token_file
from tokens.base import Refused

# ---- records of files ----


def items(name, data):
    path = write(f"items/{name}", data)
    return [(record[0] == path, *record[1:]) for record in data_sets.json_items(path)]


def line(number, raw):
    return True, number, raw


BROKEN = "broken JSON (Expecting ',' delimiter: line 1 column 10 (char 9)); a list of objects, or one object per line is needed"
rows("json_items", items, [
    (("a.jsonl", b'{"a": 1}\n\n {"b": 2}\n'), [line(1, b'{"a": 1}\n'), line(3, b' {"b": 2}\n')]),
    (("a.jsonl", b"\xef\xbb\xbf{}"), [line(1, b"{}")]),
    (("a.jsonl.gz", gzip.compress(b"{}\n")), [line(1, b"{}\n")]), (("a.json", b'[{"a": 1}, 5]'), [line(1, {"a": 1}), line(2, 5)]),
    (("a.jsonl", b'\xef\xbb\xbf [ {"a": 1}]'), [line(1, {"a": 1})]), (("a.json", b"[]"), []), (("a.json", b"[5]"), [line(1, b"[5]")]),
    (("a.json", b""), []),
    (("a.json", b" " * 4094 + b'[{"a": 1}]'), [line(1, {"a": 1})]), (("a.json", b" " * 4095 + b"[{}]"), [line(1, b" " * 4095 + b"[{}]")]),
    (("a.json", b'[{"a": 1}'), Sentence(f"{OUT}/items/a.json: {BROKEN}"))])


def parquet(records, batches):
    """With a reader of this file in the place of pyarrow's."""
    def read(path):
        assert path == "x.parquet"
        return types.SimpleNamespace(iter_batches=lambda batch_size: (types.SimpleNamespace(to_pylist=lambda: records[i:i + batches])
                                                                      for i in range(0, len(records), batches) if batch_size == 4096))
    here = {name: sys.modules.get(name) for name in ("pyarrow", "pyarrow.parquet")}
    sys.modules["pyarrow"], sys.modules["pyarrow.parquet"] = types.ModuleType("pyarrow"), types.SimpleNamespace(ParquetFile=read)
    sys.modules["pyarrow"].parquet = sys.modules["pyarrow.parquet"]
    try:
        return list(data_sets.parquet_items("x.parquet"))
    finally:
        for name, module in here.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def no_parquet():
    here, sys.modules["pyarrow"] = sys.modules.get("pyarrow"), None
    try:
        return list(data_sets.parquet_items("x.parquet"))
    finally:
        sys.modules.pop("pyarrow") if here is None else sys.modules.update(pyarrow=here)


rows("parquet_items", parquet, [((["a", "b", "c"], 2), [("x.parquet", 1, "a"), ("x.parquet", 2, "b"), ("x.parquet", 3, "c")])])
rows("parquet_none", no_parquet, [((), Sentence("x.parquet: .parquet is read by pyarrow, which is not here; pip install pyarrow"))])


def unreadable(why):
    """A file that is there, but whose records end so."""
    def ends(path):
        raise why
        yield
    whole, data_sets.json_items = data_sets.json_items, ends
    try:
        return list(data_sets.file_items(write("items/a.jsonl", b"{}")))
    finally:
        data_sets.json_items = whole


NO_GZIP = f"{OUT}/items/a.jsonl is not a complete gzip file ({{}}); download it again"
rows("file_items", unreadable, [
    ((EOFError("e"),), Sentence(NO_GZIP.format("e"))), ((zlib.error("z"),), Sentence(NO_GZIP.format("z"))),
    ((gzip.BadGzipFile("g"),), Sentence(NO_GZIP.format("g"))),
    ((PermissionError(13, "Permission denied"),), Sentence(f"{OUT}/items/a.jsonl cannot be read: Permission denied; check its permissions"))])
rows("file_items_whole", lambda name: [record for _, _, record in data_sets.file_items(write(f"items/{name}", b"{}"))],
    [(("a.jsonl",), [b"{}"]), (("a.json",), [b"{}"])])


def files(split, *names):
    """The files of a folder with these."""
    folder = os.path.join(OUT, "sets", "-".join(names).replace("/", "_") or "none")
    os.makedirs(folder, exist_ok=True)
    for name in names:
        write(os.path.join(os.path.relpath(folder, OUT), name), b"{}")
    return [os.path.relpath(path, folder) for path in data_sets.folder_files(folder, split)]


def none_of(split, names, has):
    folder = os.path.join(OUT, "sets", "-".join(names).replace("/", "_"))
    return Sentence(f"{folder} has no data of --split {split} ({split}.jsonl, {split}-*.parquet, {split}/*.jsonl ...); it has {has}")


MANY = [f"x{i}.txt" for i in range(10)]
rows("folder_files", files, [
    (("train", "train.jsonl"), ["train.jsonl"]), (("train", "train-1.parquet", "train-0.parquet", "test.jsonl"),
     ["train-0.parquet", "train-1.parquet"]),
    (("test", "train.jsonl", "test.jsonl.gz"), ["test.jsonl.gz"]),
    (("train", "train/b.jsonl", "train/a.jsonl", "train/c.txt"), ["train/a.jsonl", "train/b.jsonl"]),
    (("train", "train.jsonl", "train/a.jsonl"), ["train.jsonl", "train/a.jsonl"]),
    (("train", "b.jsonl", "a.json", "c.txt"), ["a.json", "b.jsonl"]),
    (("train", "trainer.jsonl"), ["trainer.jsonl"]), (("train", "trainer.jsonl", "train_0.jsonl"), ["train_0.jsonl"]),
    *((("train", "a.jsonl", other), none_of("train", ["a.jsonl", other], f"a.jsonl, {other}")) for other in ("test.txt", "valid.x", "dev",
     "eval.jsonl")),
    (("test", "a.jsonl"), none_of("test", ["a.jsonl"], "a.jsonl")), (("train", "c.txt"), none_of("train", ["c.txt"], "c.txt")),
    (("train", *MANY), none_of("train", MANY, ", ".join(MANY[:8]))),
    (("train", "tests", "a.jsonl"), none_of("train", ["tests", "a.jsonl"], "a.jsonl, tests"))])
write("set/train.jsonl", b"{}")
rows("set_files", data_sets.set_files, [
    ((f"{OUT}/set", "train"), [f"{OUT}/set/train.jsonl"]), ((f"json@{OUT}/set", "train"), [f"{OUT}/set/train.jsonl"]),
    ((f"parquet@{OUT}/set", "train"), [f"{OUT}/set/train.jsonl"]),
    (("x.jsonl", "train"), ["x.jsonl"]), (("json@x.jsonl", "train"), ["x.jsonl"]),
    (("csv@x", "train"), Sentence("--dataset csv@x: csv@ is unknown; give json@FOLDER or parquet@FOLDER")),
    (("json", "train"), ["json"])])


def drawn(seed, weights, *counts):
    """What is drawn, by a sum of weights that is walked along."""
    draw, left, found = random.Random(seed), [0] * len(counts), []
    while True:
        at, which = draw.random() * sum(weights), 0
        while at >= weights[which]:
            at, which = at - weights[which], which + 1
        if left[which] == counts[which]:
            return found
        found.append((which, left[which]))
        left[which] += 1


def mixed(seed, weights, *counts):
    return list(data_sets.sampled([iter([(which, i) for i in range(count)]) for which, count in enumerate(counts)], weights, seed))


rows("sampled", mixed, [
    *(((seed, weights, *counts), drawn(seed, weights, *counts)) for seed in (1, 42) for weights,
     counts in (((1, 1), (9, 9)), ((0.25, 0.75), (5, 40)), ((3, 1, 2), (20, 20, 20)), ((0, 2), (1, 3)))),
    ((5, [0, 1], 2, 2), [(1, 0), (1, 1)]), ((5, [1, 0], 2, 2), [(0, 0), (0, 1)]), ((5, [1], 0), [])])
TEN, FIVE, ONE = (write(f"{name}.jsonl", b"".join(b'{"a": %d}\n' % i for i in range(count))) for name,
    count in (("ten", 10), ("five", 5), ("one", 1)))
NAMES = {TEN: "t", FIVE: "f", ONE: "o"}


def counted(found):
    """Each file's records by their lines, and the numbers of the sets."""
    return [f"{NAMES[path]}{number}.{which}" for path, number, _, which in found]


def numbered(name, first, last, which):
    return [f"{name}{i}.{which}" for i in range(first, last + 1)]


rows("in_shares", lambda sets, limit: counted(data_sets.in_shares(sets, limit)), [
    (([[TEN], [FIVE]], 6), numbered("t", 1, 4, 0) + numbered("f", 1, 2, 1)),
    (([[TEN], [FIVE]], 15), numbered("t", 1, 10, 0) + numbered("f", 1, 5, 1)),
    (([[TEN], [FIVE]], 99), numbered("t", 1, 10, 0) + numbered("f", 1, 5, 1)),
    (([[FIVE], [TEN]], 7), numbered("f", 1, 2, 0) + numbered("t", 1, 5, 1)),
    (([[ONE, FIVE], [TEN], [ONE]], 9), numbered("o", 1, 1, 0) + numbered("f", 1, 2, 0) + numbered("t", 1, 5, 1) + numbered("o", 1, 1, 2)),
    (([[TEN], [FIVE]], 1), numbered("f", 1, 1, 1))])


def read(words):
    o = prepare.options_of(["--pretrain", "none", "--output", f"{OUT}/new", *words.split()])
    return counted(data_sets.data_items(o))


LIMITED = '[{"max_samples":2},{"max_samples":9}]'
write("two/train.jsonl", b"{}\n{}\n")
NAMES[write("two/test.jsonl", b"{}\n")] = "w"
rows("data_items", read, [
    ((f"--dataset {OUT}/two --split test",), ["w1.0"]),
    ((f"--dataset {TEN}",), numbered("t", 1, 10, 0)), ((f"--dataset {TEN} --max_samples 3",), numbered("t", 1, 3, 0)),
    ((f"--dataset {FIVE},{TEN}",), numbered("f", 1, 5, 0) + numbered("t", 1, 10, 1)),
    ((f"--dataset {TEN},{FIVE} --max_samples 6",), numbered("t", 1, 4, 0) + numbered("f", 1, 2, 1)),
    ((f"--dataset {TEN},{FIVE} --dataset_info {LIMITED}",), numbered("t", 1, 2, 0) + numbered("f", 1, 5, 1)),
    ((f"--dataset {TEN},{FIVE} --dataset_probs 1,0 --max_samples 4",), numbered("t", 1, 4, 0)),
    ((f"--dataset {TEN},{FIVE} --dataset_probs 0,1",), numbered("f", 1, 5, 1)),
    ((f"--dataset {TEN},{FIVE} --dataset_probs 1",), Sentence("--dataset_probs has 1 weights for 2 data sets; give one for each")),
    ((f"--dataset {TEN} --dataset_probs 1,1",), Sentence("--dataset_probs has 2 weights for 1 data sets; give one for each"))])
rows("data_items_seed", lambda seed: [name[0] for name in read(f"--dataset {TEN},{FIVE} --dataset_probs 2,1 --seed {seed}")],
     [((seed,), ["tf"[which] for which, _ in drawn(seed, (2, 1), 10, 5)]) for seed in (1, 2, 42)])

# ---- plain text ----

rows("line_begin", data_sets.line_begin, [(("",), 0), (("a",), 0), (("a\nb",), 2), (("a\n",), 0), (("a\nb\n",), 2), (("a\n b",), 0),
    (("a\nb\n c\n\n",), 2), (("\na",), 1), (("\n",), 0), (("a\nb\ncd",), 4)])


def dealt(text, stream, around):
    whole = data_sets.STREAM, data_sets.AROUND
    data_sets.STREAM, data_sets.AROUND = stream, around
    try:
        path = write("dealt.txt", text)
        found = list(data_sets.stream_items([path]))
    finally:
        data_sets.STREAM, data_sets.AROUND = whole
    assert all(one[0] == path for one in found)
    return [one[1:] for one in found]


rows("stream_items", dealt, [
    (("ab\ncd\nef", 99, 2), [("", "ab\ncd\n", "ef"), ("cd\n", "ef", "")]), (("ab", 99, 2), [("", "ab", "")]), (("", 99, 2), []),
    (("ab\n", 99, 2), [("", "ab\n", "")]),
    (("ab\ncd\nef\ngh", 6, 2), [("", "ab\n", "cd"), ("ab\n", "cd\nef\n", "gh"), ("ef\n", "gh", "")]),
    (("abcdefgh\nijkl\nm", 99, 4), [("", "abcdefgh\nijkl\n", "m"), ("ijkl\n", "m", "")]),
    (("\nab\ncd", 99, 5), [("", "\nab\n", "cd"), ("\nab\n", "cd", "")]),
    (("a\nb\nc\nd\ne\nfghij", 99, 3), [("", "a\nb\nc\nd\ne\n", "fgh"), ("d\ne\n", "fghij", "")]),
    (("\ufeffa\r\nb", 99, 2), [("", "a\r\n", "b"), ("a\r\n", "b", "")])])
rows("stream_sizes", lambda: (data_sets.STREAM, data_sets.AROUND, processes.BATCH, fill.GROUP), [((), (1 << 22, 256, 256, 1000))])

# ---- the file ----


def sections():
    one = token_file.Section(OUT)
    one.add(b"ab")
    one.add(b"c")
    one.file.seek(0)
    offsets = token_file.Offsets()
    offsets.add([2, 0])
    offsets.add([3])
    return one.file.read(), one.size, one.crc, list(offsets.values), offsets.at


rows("sections", sections, [((), (b"abc", 3, zlib.crc32(b"abc"), [0, 2, 2, 5], 5))])
FOLDER = types.SimpleNamespace(stops=[2, 3], word=[b"a", b"", b"bc"], flags=bytearray([0, 1, 0]), bos=-1, eos=2, pad=5, vocab=3, size=1234,
    crc=99)


def padded(data):
    return data + bytes(-len(data) % 64)


def written_file(kind, number):
    """The file by the comment at the head of demos/trainer/data/token_file.h, and what prepare.py writes."""
    path = f"{OUT}/made.tokens"
    file = token_file.TokenFile(path)
    file.add({2: struct.pack("<2i", 5, 6), 3: b"\0\1", 1: [2]})
    file.add({2: struct.pack("<3i", 7, 8, 9), 3: b"\0\1\1", 1: [3]})
    file.write(kind, FOLDER, {"b": "\u00e9", "a": 1})
    whole = {1: struct.pack("<3Q", 0, 2, 5), 2: struct.pack("<5i", *range(5, 10)), 3: b"\0\1\0\1\1", 4: struct.pack("<2i", 2, 3),
        5: struct.pack("<4Q", 0, 1, 1, 3), 6: b"abc", 7: b"\0\1\0",
             8: '{"a": 1, "b": "\u00e9"}'.encode()}
    table, at, body = b"", 96 + 32 * 8, b""
    for name, data in whole.items():
        body = padded(bytes(at) + body)[at:]
        table += struct.pack("<IIQQQ", name, zlib.crc32(data), at + len(body), len(data), 0)
        body += data
    head = struct.pack("<QIIiiiiQQQI", at + len(body), number, 8, -1, 2, 5, 3, 2, 5, 1234, 99).ljust(80, b"\0")
    with open(path, "rb") as made:
        same = made.read() == b"\x89SEQTOK\n" + struct.pack("<II", 1, zlib.crc32(head + table)) + head + table + body
    return same, [name for name in os.listdir(OUT) if name.endswith(".tmp")]


rows("token_file", written_file, [((kind, number), (True, [])) for kind,
    number in (("sft", 1), ("pairs", 2), ("labelled", 3), ("prompts", 4), ("steps", 5))])


def big_section():
    """Longer than what is copied at a time, into a folder that is named by no slash."""
    here = os.getcwd()
    os.chdir(OUT)
    try:
        file = token_file.TokenFile("big.tokens")
        file.add({2: b"x" * ((1 << 20) + 5)})
        file.replace(b"head")
        with open("big.tokens", "rb") as made:
            return file.folder == os.getcwd(), made.read() == padded(b"head") + b"x" * ((1 << 20) + 5)
    finally:
        os.chdir(here)


rows("token_file_big", big_section, [((), (True, True))])


def not_written():
    """The temporary file goes, and what was there stays."""
    path = write("kept/made.tokens", b"before")
    file = token_file.TokenFile(path)
    file.add({2: b"x"})
    file.sections[2].file.close()
    with contextlib.suppress(ValueError):
        file.replace(b"head")
    return sorted(os.listdir(f"{OUT}/kept")), open(path, "rb").read()


rows("token_file_kept", not_written, [((), (["made.tokens"], b"before"))])

# ---- processes ----

rows("batches", lambda count: [list(batch) for batch in processes.batches(iter(range(count)))],
    [((0,), []), ((1,), [[0]]), ((256,), [list(range(256))]), ((257,), [list(range(256)), [256]]),
        ((513,), [list(range(256)), list(range(256, 512)), [512]])])


class Doubling:
    """What a process has: options are what it multiplies by."""

    def __init__(self, options, now):
        self.by, self.now = options.by, now

    def batch(self, part):
        return part * self.by, self.now


def doubled(workers, parts):
    whole, processes.Maker = processes.Maker, Doubling
    o = types.SimpleNamespace(workers=workers, by=2)
    try:
        return list(processes.in_order(o, "now", Doubling(types.SimpleNamespace(by=3), "own"), processes.worker_batch, range(parts)))
    finally:
        processes.Maker = whole


rows("in_order", doubled, [((1, 3), [(0, "own"), (3, "own"), (6, "own")]), ((2, 20), [(2 * i, "now") for i in range(20)]), ((2, 0), [])])


class Ending(Doubling):
    """A process that is ended at its second part."""

    def batch(self, part):
        return os._exit(1) if part == 1 else part


def broken():
    whole, processes.Maker = processes.Maker, Ending
    try:
        return list(processes.in_order(types.SimpleNamespace(workers=2, by=2), "now", None, processes.worker_batch, range(2)))
    finally:
        processes.Maker = whole


rows("in_order_broken", broken, [
    ((), Sentence("one of the 2 processes was killed, perhaps because memory ran out; lower --workers"))])


def begun():
    """What a process does first, and what it has then."""
    calls, whole = [], (signal.signal, processes.end_with_parent, processes.Maker, processes._maker)
    signal.signal, processes.end_with_parent, processes.Maker = lambda *given: calls.append(given), calls.append, lambda *given: given
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    try:
        processes.worker_begin("options", "now", 7)
        return calls, processes._maker, os.environ["TOKENIZERS_PARALLELISM"]
    finally:
        signal.signal, processes.end_with_parent, processes.Maker, processes._maker = whole


rows("worker_begin", begun, [((), ([(signal.SIGINT, signal.SIG_IGN), 7], ("options", "now"), "false"))])


class Terminal(io.StringIO):
    """What is written, and ~ where it is flushed."""

    def __init__(self, there):
        super().__init__()
        self.there = there

    def isatty(self):
        return self.there

    def flush(self):
        self.write("~")


def progress(there, *times):
    """What is drawn where the clock shows these times: the first is the beginning, the last the end."""
    said, clock, monotonic = Terminal(there), iter(times), time.monotonic
    time.monotonic = lambda: next(clock)
    try:
        with contextlib.redirect_stderr(said):
            drawn = processes.Progress()
            for n in range(1, len(times) - 1):
                drawn.step({"read": 1000 * n}, 5000 * n)
            return drawn.end(), said.getvalue()
    finally:
        time.monotonic = monotonic


CLEAR = "\r\033[K"
rows("progress", progress, [
    ((False, 1.0, 3.0, 6.0), (5.0, "")), ((True, 1.0, 6.0), (5.0, CLEAR)), ((True, 1.0, 1.125, 1.25), (0.25, CLEAR)),
    ((True, 0.0, 0.25, 0.5), (0.5, f"\r1,000 records, 5,000 tokens, 20,000 tokens/s \033[K~{CLEAR}")),
    ((True, 1.0, 3.0, 3.125, 5.0, 9.0), (8.0, f"\r1,000 records, 5,000 tokens, 2,500 tokens/s \033[K~\r3,000 records, 15,000 tokens, 3,750 tokens/s \033[K~{CLEAR}"))])


def limits(hard, limit, pages):
    """What the most of a process's memory is set to."""
    set_to, whole = [], (resource.getrlimit, resource.setrlimit, os.sysconf)
    resource.getrlimit, resource.setrlimit = lambda which: (limit, hard), lambda which, pair: set_to.append((which, pair))
    os.sysconf = {"SC_PHYS_PAGES": pages, "SC_PAGESIZE": 4096}.get
    try:
        prepare.half_the_memory()
    finally:
        resource.getrlimit, resource.setrlimit, os.sysconf = whole
    return set_to


ENDLESS = resource.RLIM_INFINITY
rows("half_the_memory", limits, [((ENDLESS, ENDLESS, 10), [(resource.RLIMIT_DATA, (20480, ENDLESS))]),
    ((ENDLESS, 9000, 10), [(resource.RLIMIT_DATA, (9000, ENDLESS))]), ((70000, 60000, 10), [(resource.RLIMIT_DATA, (20480, 70000))])])


class Ends:
    """What a process does that has no parent, without ending this one."""

    def __init__(self):
        self.said, self.real = [], os._exit

    def __enter__(self):
        os._exit = self.said.append
        return self.said

    def __exit__(self, *_):
        os._exit = self.real


def orphan(parent):
    calls, real = [], ctypes.CDLL
    ctypes.CDLL = lambda name: types.SimpleNamespace(prctl=lambda *given: calls.append((name, *given)))
    try:
        with Ends() as said:
            processes.end_with_parent(parent)
    finally:
        ctypes.CDLL = real
    return calls, said


rows("end_with_parent", orphan, [((os.getppid(),), ([(None, 1, 9)], [])), ((os.getppid() + 1,), ([(None, 1, 9)], [1]))])

# ---- documents of several records ----


class Kept(token_file.TokenFile):
    """A token file, and what was added to it."""

    def __init__(self):
        super().__init__(f"{OUT}/kept.tokens")
        self.all = []

    def add(self, made):
        super().add(made)
        self.all.append(([*array.array("i", made[token_file.IDS])], [*made[token_file.MASK]], made[token_file.OFFSETS]))


class Steps:
    """The progress that is told."""

    def __init__(self):
        self.all = []

    def step(self, counts, tokens):
        self.all.append((counts["read"], tokens))


def together(make, given, folder=None, **options):
    """What becomes of batches that are made already."""
    o = types.SimpleNamespace(**{"max_len": 4, "max_samples": 99, **options})
    maker, file, counts, steps = types.SimpleNamespace(folder=folder), Kept(), collections.Counter(), Steps()
    whole, asked = (fill.in_order, fill.data_items, fill.data_files, fill.stream_items), []

    def in_order(*given_to):
        asked.append((*given_to[:3], given_to[3].__name__, list(given_to[4])))
        return iter(given)
    fill.in_order, fill.data_items, fill.data_files = in_order, lambda asks: [asks], lambda asks: [[asks]]
    fill.stream_items = lambda files: [files]
    try:
        make(o, "now", maker, file, counts, steps)
    finally:
        fill.in_order, fill.data_items, fill.data_files, fill.stream_items = whole
    work = "worker_stream" if make is fill.make_stream else "worker_batch"
    assert asked == [(o, "now", maker, work, [[o]])], asked
    return file.all, {key: n for key, n in counts.items() if n}, steps.all


def batch(*documents, **counts):
    ids = [i for one in documents for i in one]
    return {token_file.IDS: array.array("i", ids).tobytes(), token_file.MASK: bytes(len(ids)),
        token_file.OFFSETS: [len(one) for one in documents]}, {"read": len(documents), **counts}


def whole(ids, mask):
    return ids, mask, [len(ids)]


rows("make_records", lambda: together(fill.make_records, [batch([1, 2], [3]), batch([4], kept=1)]), [
    ((), ([([1, 2, 3], [0, 0, 0], [2, 1]), ([4], [0], [1])], {"read": 3, "kept": 1}, [(2, 3), (3, 4)]))])
LEARNT = [0, 1, 1, 1]


def blocks(prefix, bos, *given, **options):
    return together(fill.make_blocks, list(given), types.SimpleNamespace(prefix=prefix, bos=bos), **options)


rows("make_blocks", blocks, [
    (([], -1, batch([1, 2, 3], [4, 5], kept=2, supervised=9, fully_masked=1, cut=1)),
     ([whole([1, 2, 3, 4], LEARNT)], {"read": 2, "cut": 1, "kept": 1, "supervised": 3}, [(2, 4)])),
    (([], -1, batch([1, 2, 3]), batch([4, 5, 6, 7, 8, 9])), ([whole([1, 2, 3, 4], LEARNT), whole([5, 6, 7, 8], LEARNT)],
     {"read": 2, "kept": 2, "supervised": 6}, [(1, 0), (2, 8)])),
    (([0, 7], 0, batch([1, 2, 3, 4, 5, 6, 7, 8])), ([whole([0, 2, 3, 4], LEARNT), whole([0, 6, 7, 8], LEARNT)],
     {"read": 1, "kept": 2, "supervised": 6}, [(1, 8)])),
    (([7], 0, batch([1, 2, 3, 4])), ([whole([1, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3}, [(1, 4)])),
    (([7, 0], 0, batch([1, 2, 3, 4])), ([whole([1, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3}, [(1, 4)])),
    (([], -1, batch([1, 2, 3])), ([], {"read": 1}, [(1, 0)]))])


def groups(config, bos, pad, *given):
    size, fill.GROUP = fill.GROUP, 2
    try:
        return together(fill.make_groups, list(given), types.SimpleNamespace(config=config, bos=bos, pad=pad, eos=9))
    finally:
        fill.GROUP = size


LLAMA = {"tokenizer_class": "LlamaTokenizer"}
rows("make_groups", groups, [
    (({}, 0, -1, batch([1, 2], [3, 4, 5], [6, 7, 8, 8])), ([whole([1, 2, 3, 4], LEARNT), whole([6, 7, 8, 8], LEARNT)],
     {"read": 3, "kept": 2, "supervised": 6}, [(3, 4)])),
    (({}, 0, -1, batch([1, 2, 3]), batch([4, 5, 6, 7, 8])), ([whole([1, 2, 3, 4], LEARNT), whole([5, 6, 7, 8], LEARNT)],
     {"read": 2, "kept": 2, "supervised": 6}, [(1, 0), (2, 8)])),
    (({}, 0, -1, batch([1, 2, 9, 4])), ([whole([1, 2, 9, 4], [0, 1, 0, 1])], {"read": 1, "kept": 1, "supervised": 2}, [(1, 0)])),
    (({}, 0, 2, batch([1, 2, 9, 4])), ([whole([1, 2, 9, 4], [0, 0, 1, 1])], {"read": 1, "kept": 1, "supervised": 2}, [(1, 0)])),
    (({}, 0, 0, batch([0, 0, 0, 0])), ([whole([0] * 4, [0] * 4)], {"read": 1, "kept": 1, "fully_masked": 1}, [(1, 0)])),
    ((LLAMA, 0, -1, batch([1, 2, 3, 4])), ([whole([0, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3}, [(1, 0)])),
    ((LLAMA, -1, -1, batch([1, 2, 3, 4])), ([whole([1, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3}, [(1, 0)])),
    (({**LLAMA, "add_bos_token": False}, 0, -1, batch([1, 2, 3, 4])),
     ([whole([1, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3}, [(1, 0)])),
    (({"add_bos_token": True}, 5, -1, batch([1, 2, 3, 4])), ([whole([5, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3},
     [(1, 0)])), (({}, 0, -1), ([], {}, []))])


def of_stream(max_samples, *given):
    return together(fill.make_stream, [array.array("i", ids).tobytes() for ids in given], max_len=4, max_samples=max_samples)


rows("make_stream", of_stream, [
    ((9, [1, 2, 3], [4, 5, 6]), ([whole([1, 2, 3, 4], LEARNT), whole([5, 6], [0, 1])], {"read": 2, "kept": 2, "supervised": 4},
     [(0, 0), (1, 4), (2, 6)])),
    ((9, [1, 2, 3, 4, 5]), ([whole([1, 2, 3, 4], LEARNT), whole([5], [0])], {"read": 2, "kept": 2, "supervised": 3, "fully_masked": 1},
     [(1, 4), (2, 5)])),
    ((1, [1, 2, 3, 4, 5]), ([whole([1, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3}, [(1, 4)])),
    ((1, list(range(8))), ([whole([0, 1, 2, 3], LEARNT)], {"read": 1, "kept": 1, "supervised": 3}, [])),
    ((9,), ([], {}, [(0, 0)])), ((9, [1, 2, 3, 4]), ([whole([1, 2, 3, 4], LEARNT)], {"read": 1, "kept": 1, "supervised": 3},
     [(1, 4), (1, 4)]))])

# ---- options ----

NO_WEIGHTS = "ValueError "
rows("weights", prepare.weights, [(("0.5,2",), [0.5, 2.0]), (("0,1",), [0.0, 1.0]), (("1,0",), [1.0, 0.0]), (("0,0",), NO_WEIGHTS),
    (("1,-1",), NO_WEIGHTS), (("-1,3",), NO_WEIGHTS), (("inf,1",), NO_WEIGHTS), (("1,nan",), NO_WEIGHTS)])


def number(low, text):
    read = prepare.whole(low)
    return read(text), read.__name__


rows("whole", number, [((2, "2"), (2, "whole number from 2 on")), ((2, "3"), (3, "whole number from 2 on")), ((2, "1"), NO_WEIGHTS),
    ((0, "0"), (0, "whole number from 0 on")), ((0, "-1"), NO_WEIGHTS)])
NEEDED = ["--pretrain", "p", "--dataset", "d", "--output", "o"]
DEFAULTS = {
    "pretrain": "p", "dataset": "d", "output": "o", "kind": "sft", "input_key": None, "output_key": None, "prompt_key": None,
    "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": "margin",
    "label_key": None, "placeholder_token": None, "reward_tokens": None, "apply_chat_template": False, "tokenizer_chat_template": None,
    "template": None, "default_system": None, "dataset_info": None,
    "input_template": None, "csft_prompt": None, "train_on": "assistant", "pretrain_mode": False, "pretrain_eos": False,
    "pretrain_blocks": False, "max_len": 1024, "truncation": None,
    "max_samples": 100000000, "split": "train", "dataset_probs": None, "seed": 42, "workers": os.cpu_count(), "overwrite": False}


def options(*words):
    with contextlib.redirect_stderr(io.StringIO()):
        return vars(prepare.options_of(NEEDED + list(words)))


rows("options", options, [
    ((), DEFAULTS), *(((f"--{name}", value), {**DEFAULTS, name: value}) for name, value in (
        ("kind", "steps"), ("input_key", "x"), ("output_key", "x"), ("prompt_key", "x"), ("chosen_key", "x"), ("rejected_key", "x"),
        ("margin_key", "x"), ("label_key", "x"), ("placeholder_token", "x"),
        ("tokenizer_chat_template", "x"), ("template", "zephyr"), ("default_system", "x"), ("dataset_info", "x"), ("input_template", "x"),
        ("csft_prompt", "x"), ("train_on", "last"), ("train_on", "all"),
        ("truncation", "drop"), ("truncation", "cut"), ("truncation", "cut_both"), ("split", "test"))),
    *(((f"--{name}",), {**DEFAULTS, name: True}) for name in ("apply_chat_template", "pretrain_mode", "pretrain_eos", "pretrain_blocks",
     "overwrite")),
    *(((f"--{name}", str(low)), {**DEFAULTS, name: low}) for name, low in (("max_len", 0), ("max_samples", 1), ("seed", 0), ("workers", 1))),
    *(((f"--{name}", str(low - 1)), "SystemExit 2") for name, low in (("max_len", 0), ("max_samples", 1), ("seed", 0), ("workers", 1))),
    (("--dataset_probs", "1,2"), {**DEFAULTS, "dataset_probs": [1.0, 2.0]}),
    (("--reward_tokens", "a", "b"), {**DEFAULTS, "reward_tokens": ["a", "b"]}),
    *(((f"--{name}", "x"), "SystemExit 2") for name in ("kind", "template", "train_on", "truncation", "split", "dataset_probs")),
    (("--over",), "SystemExit 2")])


def missing(at):
    with contextlib.redirect_stderr(io.StringIO()):
        return prepare.options_of(NEEDED[:at] + NEEDED[at + 2:])


rows("options_needed", missing, [((i,), "SystemExit 2") for i in (0, 2, 4)])
TEXT = write("text.txt", b"a\n")
NONE = {"plain": False, "truncation": "cut", "alpaca": True, "by_form": True, "form_of_sets": "Human: {}\nAssistant: ", "input_key": "input",
    "input_template": "User: {}\nAssistant: "}


def settled(words, data=TEN):
    o = prepare.options_of(["--pretrain", "none", "--output", f"{OUT}/new", "--dataset", data, *words.split(" ")] if words else ["--pretrain",
        "none", "--output", f"{OUT}/new", "--dataset", data])
    before = dict(vars(o))
    option_rules.settle(o)
    return {key: value for key, value in vars(o).items() if key not in before or before[key] != value or key == "input_key"}


INFO = '--dataset_info [{"columns":{}}] --template qwen'
rows("settle", settled, [
    (("",), NONE), (("--input_key a",), {**NONE, "alpaca": False, "input_key": "a", "by_form": False}),
    (("--output_key a",), {**NONE, "by_form": False}), (("--apply_chat_template",), {**NONE, "by_form": False}),
    (("--input_template {}!",), {**{k: v for k, v in NONE.items() if k != "input_template"}, "form_of_sets": "{}!"}),
    (("--truncation drop",), {k: v for k, v in NONE.items() if k != "truncation"}),
    (("--kind prompts",), {**NONE, "truncation": "drop"}), (("--kind pairs",), NONE),
    (("--kind pairs --prompt_key p",), {**NONE, "by_form": False}), (("--kind pairs --chosen_key c",), {**NONE, "by_form": False}),
    (("--kind pairs --rejected_key c",), {**NONE, "by_form": False}),
    (("--kind pairs --input_key c",), {**NONE, "alpaca": False, "input_key": "c"}),
    (("--kind labelled",), {**NONE, "by_form": False, "output_key": "output", "label_key": "label"}),
    (("--kind labelled --output_key o --label_key l",), {**NONE, "by_form": False}),
    (("--pretrain_mode",), {**NONE, "alpaca": False, "by_form": False}),
    (("--pretrain_mode --pretrain_eos",), {**NONE, "alpaca": False, "by_form": False}),
    (("--pretrain_mode", TEXT), {**NONE, "plain": True, "alpaca": False, "by_form": False}),
    ((INFO,), {**NONE, "alpaca": False, "by_form": False, "input_key": "messages"}),
    ((INFO + " --kind labelled",), {**NONE, "alpaca": False, "by_form": False, "input_key": "messages", "output_key": "output",
     "label_key": "label"}),
    ((INFO + " --pretrain_mode --pretrain_eos --pretrain_blocks",),
     {**NONE, "alpaca": False, "by_form": False, "input_key": "messages", "pretrain_eos": False, "pretrain_blocks": False}),
    (("--kind steps --placeholder_token x",), {**NONE, "alpaca": False, "by_form": False, "reward_tokens": "", "label_key": "label"}),
    (("--kind steps --placeholder_token x --reward_tokens a b --input_key i --label_key l",),
     {**NONE, "alpaca": False, "by_form": False, "reward_tokens": "a b", "input_key": "i"})])


def refuses(words, sentence):
    return ((words,), Sentence(sentence))


FOR_SFT, ALIVE = "{} is for --kind sft, not for {}; leave it out", "; leave it out, or "
MARKS = " ".join("abcdefghijklmnopq")
PLAIN = f"{TEXT} is read as one text, but LLaMA-Factory's stage pt ends every line in EOS; give a .jsonl with one text in each record, or leave out --pretrain_eos"
STEPS = "--kind steps --placeholder_token x"
SHAPES = "--{} shapes prompts and responses, but steps have one text, which is taken as it is; leave it out"
rows("settle_refuses", settled, [
    refuses("--template qwen --apply_chat_template --input_template {}",
        "--apply_chat_template and --input_template are two ways to shape a text; leave out one of them"),
    refuses("--template qwen --input_template {}", "--template qwen and --input_template are two ways to shape a text; leave out one of them"),
    refuses("--pretrain_mode --output_key a", "--pretrain_mode trains on the text of --input_key only; leave out --output_key a"),
    refuses("--pretrain_eos", "--pretrain_eos needs --pretrain_mode; add it, or leave it out"),
    refuses("--pretrain_blocks", "--pretrain_blocks needs --pretrain_eos; add it, or leave it out"),
    refuses("--pretrain_mode --pretrain_blocks", "--pretrain_blocks needs --pretrain_eos; add it, or leave it out"),
    refuses("--pretrain_eos --pretrain_blocks", "--pretrain_eos needs --pretrain_mode; add it, or leave it out"),
    refuses("--pretrain_mode --pretrain_eos --pretrain_blocks --max_len 1",
        "--pretrain_blocks makes documents of --max_len tokens; give 2 or more"),
    refuses("--kind prompts --output_key a", "prompts have no responses; leave out --output_key a (--label_key is what a reward rule compares with)"),
    refuses("--kind pairs --pretrain_mode", FOR_SFT.format("--pretrain_mode", "pairs")),
    refuses("--kind pairs --train_on last", FOR_SFT.format("--train_on", "pairs")),
    refuses("--csft_prompt a", "--csft_prompt is for prompts; leave it out, or give --kind prompts"),
    refuses("--kind prompts --template qwen --csft_prompt a",
        "--csft_prompt is appended to the text of a prompt, but --template writes tokens; leave it out, or give --apply_chat_template"),
    refuses("--placeholder_token x", "--placeholder_token is for --kind steps, not for sft; leave it out"),
    refuses("--reward_tokens x y", "--reward_tokens is for --kind steps, not for sft; leave it out"),
    refuses("--kind steps", "no placeholder token; give the token after each step by --placeholder_token"),
    *(refuses(f"{STEPS} --{name}{value}", SHAPES.format(name)) for name,
     value in (("apply_chat_template", ""), ("template", " qwen"), ("dataset_info", " [{}]"), ("input_template", " {}"), ("output_key", " a"))),
    refuses(f"{STEPS} --truncation cut_both", "--truncation cut_both needs a prompt and a response, but train_prm has a single text; give cut or drop"),
    refuses(f"{STEPS} --reward_tokens a", "--reward_tokens a are 1; give 2 to 16"),
    refuses(f"{STEPS} --reward_tokens {MARKS}", f"--reward_tokens {MARKS} are 17; give 2 to 16"),
    refuses("--input_template {}{}", "--input_template must have {} once, in the place of the prompt, but has it twice: '{}{}'"),
    refuses("--input_template x", "--input_template must have {} once, in the place of the prompt, but has none: 'x'"),
    *(refuses(f"{INFO} --{name} a", f"--dataset_info and --{name} both name keys; leave out one of them") for name in ("input_key",
     "output_key", "label_key")),
    refuses(f"{INFO} --kind pairs --prompt_key a", "--dataset_info and --prompt_key both name keys; leave out one of them"),
    ((f"--pretrain_mode --pretrain_eos", TEXT), Sentence(PLAIN))])
rows("settle_takes", lambda words: settled(words)["plain"], [
    ((words,), False) for words in (
        "--pretrain_mode --pretrain_eos --pretrain_blocks --max_len 2", "--kind prompts --csft_prompt a", f"{STEPS} --reward_tokens a b",
        f"{STEPS} --reward_tokens {MARKS[:-2]}", f"{STEPS} --truncation cut",
        '--dataset_info [{"formatting":"completion"}]', "--dataset_info [{}] --pretrain_mode", "--dataset_info [{}] --apply_chat_template",
        "--kind prompts --csft_prompt a --apply_chat_template",
        "--tokenizer_chat_template x --apply_chat_template", "--kind prompts --truncation drop", "--pretrain_mode --max_len 1", "--max_len 1")])
rows("settle_steps_marks", lambda words: vars(types.SimpleNamespace(**settled(words)))["reward_tokens"],
    [((f"{STEPS} --reward_tokens {MARKS[:-2]}",), MARKS[:-2]), ((f"{STEPS} --reward_tokens a b",), "a b")])
rows("replaceable", lambda data: token_file.replaceable(write("there", data)),
    [((b"",), True), ((token_file.MAGIC,), True), ((token_file.MAGIC + b"x",), True), ((token_file.MAGIC[:-1],), False),
        ((b"x" + token_file.MAGIC,), False)])

# ---- what is said ----


def told(kind="sft", apply=False, train_on="assistant", stops=True, template=None, **counts):
    maker = types.SimpleNamespace(folder=types.SimpleNamespace(notices=lambda: ["of the folder"]),
        template=types.SimpleNamespace(stops_turns=lambda: stops, stops=("<a>", "<b>")))
    o = types.SimpleNamespace(kind=kind, apply_chat_template=apply, train_on=train_on, template=template, form_of_sets="F{}")
    return list(prepare.notices(o, maker, collections.Counter(counts)))[1:]


NEVER = ["the chat template ends what the assistant says in none of <a>, <b>, where sampling stops; name its token in generation_config.json's eos_token_id, or nothing learns to stop"]
APART = "in {} places a prompt's last characters and the answer's first are one token, and {} of {} prompts that were looked at have other tokens alone, as texts are sampled for them; a template " \
        "that ends prompts in a special token, or a line, has none of this"
READ_AS = "{} records were read as {}, as OpenRLHF 0.2 read that set{}; options that name keys say otherwise"
rows("notices", lambda counts, more: told(**counts, **more), [
    (({}, {}), []), (({"lapsed": 3}, {}), ["in 3 records user and assistant do not speak by turns, or too few or too many times; they are left out, as LLaMA-Factory does"]),
    (({"merged": 2, "read": 256}, {}), [APART.format(2, 0, 1)]), (({"apart": 1, "read": 257}, {}), [APART.format(0, 1, 2)]),
    (({"set org/x": 2}, {}), [READ_AS.format(2, "org/x", ", with prompts in the form 'F{}'")]),
    (({"set full-hh-rlhf": 1, "set y": 0}, {}), [READ_AS.format(1, "full-hh-rlhf", "")]),
    (({"ties": 4}, {}), ["4 pairs are ties and were left out (OpenRLHF 0.2 took the second answer for the better one)"]),
    (({"asked_twice": 2, "read": 4}, {}), []), (({"asked_twice": 3, "read": 4}, {}),
     ["in 3 of 4 pairs both responses begin with the prompt; if that is their prompt, leave out --prompt_key"]),
     (({"asked_twice": 3, "read": 5}, {}), ["in 3 of 5 pairs both responses begin with the prompt; if that is their prompt, leave out --prompt_key"]),
    (({"unknown": 5}, {}), ["5 documents hold characters that the tokenizer does not know"]), (({}, {"apply": True, "stops": False}), NEVER),
    (({}, {"apply": True}), []), (({}, {"stops": False}), []),
    (({}, {"apply": True, "stops": False, "template": "x"}), []), (({}, {"apply": True, "stops": False, "kind": "prompts"}), []),
    (({}, {"apply": True, "stops": False, "train_on": "all"}), []),
    (({}, {"apply": True, "stops": False, "train_on": "last", "kind": "pairs"}), NEVER)])
rows("about", lambda: prepare.about(types.SimpleNamespace(kind="sft", workers=3, output="o", overwrite=True, plain=False, alpaca=True,
    by_form=True, form_of_sets="x", seed=1), collections.Counter(a=1), "said"),
     [((), {"options": {"kind": "sft", "seed": 1}, "counts": {"a": 1}, "summary": "said"})])


class Whole:
    """What prepare() calls, so that no model is read."""

    def __init__(self, counts, tokens, blocks=False):
        self.counts, self.tokens, self.is_blocks, self.log, self.choices = counts, tokens, blocks, [], {"+": 43, "-": 45}

    def __call__(self, o, now):
        self.folder, self.log = types.SimpleNamespace(notices=lambda: ["a\x1b"]), self.log + [now]
        return self

    def blocks(self):
        return self.is_blocks

    def of(self, name):
        def make(o, now, maker, file, counts, progress):
            self.log.append(name)
            counts.update(self.counts)
            if self.tokens:
                file.sections[token_file.OFFSETS] = types.SimpleNamespace(at=self.tokens)
        return make


MAKES = ("make_stream", "make_groups", "make_blocks", "make_records")


def prepared(words, counts, tokens, data=TEN, blocks=False):
    """Which way it was made, what was written, and what was said, without the time it took."""
    whole, fake, written = {name: getattr(prepare, name) for name in ("Maker", *MAKES)}, Whole(counts, tokens, blocks), []
    write_whole, token_file.TokenFile.write = token_file.TokenFile.write, lambda file, kind, folder, about: written.append((kind,
        sorted(file.sections), about["summary"], file.path))
    prepare.Maker = fake
    for name in MAKES:
        setattr(prepare, name, fake.of(name))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            prepare.prepare(["--pretrain", "none", "--output", f"{OUT}/new", "--dataset", data, *words.split()])
    finally:
        vars(prepare).update(whole)
        token_file.TokenFile.write = write_whole
    now = fake.log[0]
    assert (now.minute, now.second, now.microsecond) == (0, 0, 0) and abs(now - datetime.datetime.now()) < datetime.timedelta(hours=1,
        seconds=9)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    return fake.log[1:], written, re.sub(r"[\d,]+(?= tokens/s)", "N", out.getvalue()), err.getvalue()


SAID = "{} read, {} kept with {} tokens, {} of them supervised; 0 too long, 0 empty, 0 cut, 0 fully masked"
RECORDS, PROMPTS = SAID.format("7 records", 6, 50, 40), SAID.format("7 records", 6, 50, 0)
GOOD = {"read": 7, "kept": 6, "supervised": 40}


def result(make, kind, said, names=(1,)):
    return [make], [(kind, list(names), said, f"{OUT}/new")], f"{OUT}/new: {kind}, {said}; N tokens/s\n", "notice: a\\x1b\n"


LEFT = f"{TEN}: nothing is left ({SAID.format('7 records', 0, 0, 0)}); raise --max_len, or check the data"
NO_TOKEN = f"{TEN}: no supervised token in the whole set ({PROMPTS}); raise --max_len, or check the data"
rows("prepare", prepared, [
    (("", GOOD, 50), result("make_records", "sft", RECORDS)), (("--pretrain_mode", GOOD, 50, TEXT), result("make_stream", "sft", RECORDS)),
    (("", GOOD, 50, TEN, True), result("make_groups", "sft", RECORDS)),
    (("--pretrain_mode --pretrain_eos --pretrain_blocks", GOOD, 50), result("make_blocks", "sft", RECORDS)),
    (("--kind prompts", {"read": 7, "kept": 6}, 50), result("make_records", "prompts", PROMPTS)),
    ((STEPS, GOOD, 50), result("make_records", "steps", RECORDS, (1, 17))), (("", {"read": 7}, 0), Sentence(LEFT)),
    (("", {"read": 7, "kept": 6}, 50), Sentence(NO_TOKEN))])


def ended(why):
    """The exit code and what is said, where prepare() ends so."""
    def fails(arguments):
        assert arguments is None
        if why:
            raise why
    whole = prepare.prepare, prepare.half_the_memory, signal.signal
    prepare.prepare, prepare.half_the_memory, handlers = fails, lambda: handlers.append("half"), []
    signal.signal = lambda number, handler: handlers.append((number, handler))
    code = None
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            prepare.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        prepare.prepare, prepare.half_the_memory, signal.signal = whole
    (number, handler), half = handlers
    try:
        handler(15, None)
    except SystemExit as stop:
        return code, said.getvalue(), number, half, stop.code


def exits(code, said=""):
    return code, said, signal.SIGTERM, "half", 143


rows("main", ended, [
    ((None,), exits(None)), ((Refused("no\x1b"),), exits(2, "error: no\\x1b\n")),
    ((ImportError("no x"),), exits(2, "error: no x; pip install tokenizers jinja2\n")),
    ((MemoryError(),), exits(1, "error: there is no memory left; give the data as one object per line, or lower --workers\n")),
    ((OSError(28, "No space left", "f"),), exits(1, "error: f: No space left; nothing was written\n")),
    ((OSError(28, "No space left"),), exits(1, "error: the output: No space left; nothing was written\n")),
    ((KeyboardInterrupt(),), exits(130))])

# ---- modules ----


def modules():
    """Files that the package does not list, or lists in vain; and who imports one that does not stand above it."""
    listed = [line.split()[0] for line in tokens.__doc__.splitlines() if line.startswith("    ")]
    folder, upwards = os.path.dirname(tokens.__file__), []
    for i, name in enumerate(listed):
        with open(f"{folder}/{name}.py", encoding="utf-8") as file:
            used = re.findall(r"^from \.(\w+) import", file.read(), re.M)
        upwards += [(name, one) for one in used if one not in listed[:i]]
    there = {name[:-3] for name in os.listdir(folder) if name.endswith(".py")} - {"__init__"}
    return there ^ set(listed), upwards


rows("modules", modules, [((), (set(), []))])
end()
