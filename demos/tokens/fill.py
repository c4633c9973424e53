# SPDX-License-Identifier: MIT OR Unlicense
"""Documents into the token file: a record is a document, or texts follow each other in
documents of --max_len tokens.

All of these take what the processes made in the order of the data, so that the file does not
depend on how many there are.
"""
import array
import collections
import itertools
from .base import little
from .data_sets import data_files, data_items, stream_items
from .processes import batches, in_order, worker_batch, worker_stream
from .token_file import IDS, MASK, OFFSETS

GROUP = 1000  # texts that LLaMA-Factory makes blocks of at a time


def make_records(o, now, maker, file, counts, progress):
    for made, counted in in_order(o, now, maker, worker_batch, batches(iter(data_items(o)))):
        file.add(made)
        counts.update(counted)
        progress.step(counts, file.sections[OFFSETS].at)


def make_blocks(o, now, maker, file, counts, progress):
    """Texts, each with its EOS, side by side in documents of max_len tokens, which begin with
    BOS in the place of their first token where the tokenizer puts one before a text. What fills
    no document is left out."""
    left, begin = array.array("i"), maker.folder.prefix[:1]
    begin = begin if maker.folder.bos in begin else []
    for made, counted in in_order(o, now, maker, worker_batch, batches(iter(data_items(o)))):
        left.frombytes(made[IDS])
        counts.update({name: n for name, n in counted.items()
                       if name not in ("kept", "supervised", "fully_masked")})
        whole = len(left) // o.max_len * o.max_len
        for at in range(0, whole, o.max_len):
            ids = array.array("i", begin) + left[at + len(begin):at + o.max_len]
            mask = b"\0" + b"\1" * (o.max_len - 1)
            file.add({IDS: ids.tobytes(), MASK: mask, OFFSETS: [o.max_len]})
            counts.update(kept=1, supervised=o.max_len - 1)
        left = left[whole:]
        progress.step(counts, file.sections[OFFSETS].at if file.sections else 0)


def make_groups(o, now, maker, file, counts, progress):
    """Plain texts one after the other, in documents of max_len tokens. As in LLaMA-Factory what
    is left of every 1,000 texts is left out, and each document begins with BOS in the place of
    a token, where the tokenizer puts one before a text."""
    texts, folder = collections.deque(), maker.folder
    pad = folder.pad if folder.pad >= 0 else folder.eos
    llama = "Llama" in str(folder.config.get("tokenizer_class"))
    begins = folder.config.get("add_bos_token", llama)
    first = folder.bos if begins and folder.bos >= 0 else None

    def flush(count):
        taken = (texts.popleft() for _ in range(count))
        ids = array.array("i", itertools.chain.from_iterable(taken))
        for at in range(0, len(ids) - o.max_len + 1, o.max_len):
            block = ids[at:at + o.max_len]
            if first is not None:
                block[0] = first
            mask = bytearray(i != pad for i in block)
            mask[0] = 0
            file.add({IDS: little("i", block), MASK: bytes(mask), OFFSETS: [len(block)]})
            counts.update(kept=1, supervised=mask.count(1), fully_masked=int(not any(mask)))

    for made, counted in in_order(o, now, maker, worker_batch, batches(iter(data_items(o)))):
        counts.update(read=counted["read"])
        ids, at = array.array("i", made[IDS]), 0
        for length in made[OFFSETS]:
            texts.append(ids[at:at + length])
            at += length
        while len(texts) >= GROUP:
            flush(GROUP)
        progress.step(counts, file.sections[OFFSETS].at if file.sections else 0)
    flush(len(texts))


def make_stream(o, now, maker, file, counts, progress):
    """Plain text as documents of max_len tokens, every token of them learnt."""
    left = array.array("i")
    files = list(itertools.chain.from_iterable(data_files(o)))
    made = in_order(o, now, maker, worker_stream, stream_items(files))
    for part in itertools.chain(made, [None]):
        left.frombytes(part or b"")
        whole = len(left) if part is None else len(left) // o.max_len * o.max_len
        for at in range(0, whole, o.max_len):
            if counts["kept"] >= o.max_samples:
                return
            ids = left[at:min(at + o.max_len, whole)]
            mask = b"\0" + b"\1" * (len(ids) - 1)
            file.add({IDS: ids.tobytes(), MASK: mask, OFFSETS: [len(ids)]})
            counts.update(read=1, kept=1, supervised=len(ids) - 1,
                          fully_masked=int(len(ids) == 1))
        left = left[whole:]
        progress.step(counts, file.sections[OFFSETS].at if file.sections else 0)
