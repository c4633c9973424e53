# SPDX-License-Identifier: MIT OR Unlicense
"""Data sets: files and folders as a stream of records, or as parts of plain text.

A record is (path, number, payload, set): where it stands, its line or value, which set it is
of. Nothing is held but the record at hand, except for a .json file that is one list.
"""
import bisect
import gzip
import itertools
import os
import random
import re
import zlib
from .base import ALL_SAMPLES, Refused, json_of
from .dataset_info import infos_of

STREAM = 1 << 22  # characters of plain text that it takes at a time
AROUND = 256  # and those around them that it sees
DATA = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


def json_items(path):
    """Lines, or a list of records, whatever the file is called."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        mark = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
        file.seek(mark)
        listed = re.match(rb"\s*\[\s*[{\]]", file.read(4096))
        file.seek(mark)
        if not listed:
            yield from ((path, i + 1, line) for i, line in enumerate(file) if line.strip())
            return
        try:
            records = json_of(file.read(), "a list of objects, or one object per line")
        except Refused as why:
            raise Refused(f"{path}: {why}") from None
        yield from ((path, i + 1, record) for i, record in enumerate(records))


def parquet_items(path):
    try:
        import pyarrow.parquet
    except ImportError:
        raise Refused(f"{path}: .parquet is read by pyarrow, which is not "
                      "here; pip install pyarrow")
    number = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096):
        for record in batch.to_pylist():
            number += 1
            yield path, number, record


def file_items(path):
    if not os.path.isfile(path):
        raise Refused(f"{path} is not a file; give a .jsonl, .json, .jsonl.gz, .parquet or "
                      ".txt, a folder, or json@FOLDER")
    items = parquet_items(path) if path.endswith(".parquet") else json_items(path)
    if not path.endswith(DATA):
        raise Refused(f"{path} ends in neither .jsonl, .json, .jsonl.gz, .parquet nor "
                      ".txt; only these are read")
    try:
        yield from items
    except (EOFError, zlib.error, gzip.BadGzipFile) as why:
        raise Refused(f"{path} is not a complete gzip file ({why}); "
                      "download it again")
    except OSError as why:
        raise Refused(f"{path} cannot be read: {why.strerror}; check its permissions")


def folder_files(folder, split):
    """train.jsonl, train-00000-of-00002.parquet, train/*.jsonl and so on; a folder that names
    no split is all train."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(DATA))
    inside = os.path.join(folder, split)
    found = [name for name in names if re.match(rf"{split}[^a-zA-Z]", name)]
    if os.path.isdir(inside):
        found += [os.path.join(split, name)
                  for name in sorted(os.listdir(inside)) if name.endswith(DATA)]
    others = [name for name in os.listdir(folder) if re.match("test|valid|dev|eval", name)]
    if not found and split == "train" and not others:
        found = names
    if not found:
        raise Refused(f"{folder} has no data of --split {split} ({split}.jsonl, "
                      f"{split}-*.parquet, {split}/*.jsonl ...); it has "
                      f"{', '.join(sorted(os.listdir(folder))[:8]) or 'nothing'}")
    return [os.path.join(folder, name) for name in found]


def set_files(name, split):
    kind, at, folder = name.partition("@")
    if at and kind not in ("json", "parquet"):
        raise Refused(f"--dataset {name}: {kind}@ is unknown; give json@FOLDER "
                      "or parquet@FOLDER")
    path = folder if at else name
    return folder_files(path, split) if os.path.isdir(path) else [path]


def sampled(sets, weights, seed):
    """Every record from a set drawn by the weights, until one that is drawn has no further:
    nothing is read twice."""
    draw, ends = random.Random(seed), list(itertools.accumulate(weights))
    while True:
        records = sets[bisect.bisect_right(ends, draw.random() * ends[-1])]
        try:
            yield next(records)
        except StopIteration:
            return


def in_shares(sets, limit):
    """One set after the other; of each the same share, from its beginning, where the limit is
    below their sum."""
    there = [sum(1 for path in files for _ in file_items(path)) for files in sets]
    ends = [0, *itertools.accumulate(there)]
    limit = min(limit, ends[-1])
    for which, (files, begin, end) in enumerate(zip(sets, ends, ends[1:])):
        share = limit * end // ends[-1] - limit * begin // ends[-1]
        yield from itertools.islice(set_items(files, which), share)


def data_files(o):
    return [set_files(name, o.split) for name in o.dataset.split(",")]


def set_items(files, which):
    """Records, each with the number of its set."""
    return ((*item, which) for path in files for item in file_items(path))


def data_items(o):
    most = [info.most for info in infos_of(o)] if o.dataset_info else itertools.repeat(None)
    sets = [itertools.islice(set_items(files, which), limit)
            for which, (files, limit) in enumerate(zip(data_files(o), most))]
    if o.dataset_probs is not None and len(o.dataset_probs) != len(sets):
        raise Refused(f"--dataset_probs has {len(o.dataset_probs)} weights for {len(sets)} "
                      "data sets; give one for each")
    if o.dataset_probs is None and len(sets) > 1 and o.max_samples < ALL_SAMPLES:
        return in_shares(data_files(o), o.max_samples)
    items = itertools.chain.from_iterable(sets)
    if o.dataset_probs:
        items = sampled(sets, o.dataset_probs, o.seed)
    return itertools.islice(items, o.max_samples)


def line_begin(text):
    """Where the last line begins that begins with no space, so that a token ends before it; 0:
    nowhere."""
    at = text.rfind("\n")
    while at >= 0 and (at + 1 == len(text) or text[at + 1].isspace()):
        at = text.rfind("\n", 0, at)
    return at + 1


def stream_items(files):
    """Parts of plain text, cut where a line begins, each with some of the text around it."""
    for path in files:
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                context, text = "", ""
                while part := file.read(STREAM):
                    text += part
                    if at := line_begin(text):
                        yield path, context, text[:at], text[at:at + AROUND]
                        line = text.rfind("\n", 0, max(at - AROUND, 0)) + 1
                        context, text = text[line:at], text[at:]
                if text:
                    yield path, context, text, ""
        except OSError as why:
            raise Refused(f"{path} cannot be read: {why.strerror}; give a .txt of UTF-8")
        except UnicodeDecodeError as why:
            raise Refused(f"{path}: byte {why.start} of a part is not UTF-8 ({why.reason}); "
                          "convert the file to UTF-8")
