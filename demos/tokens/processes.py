# SPDX-License-Identifier: MIT OR Unlicense
"""Processes: work on parts, whose results come in the order of the parts.

Each process reads the model's folder once and keeps its Maker. None outlives the first
process, whatever ends that.
"""
import collections
import concurrent.futures
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import time
from .base import Refused
from .maker import Maker

BATCH = 256  # records that a process takes at a time
_maker = None


def end_with_parent(parent):
    """Even if that is killed; where the system can (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def worker_begin(options, now, parent):
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says what happened
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = Maker(options, now)


def worker_batch(items):
    return _maker.batch(items)


def worker_stream(item):
    return _maker.stream(item)


def batches(items):
    while batch := list(itertools.islice(items, BATCH)):
        yield batch


def in_order(o, now, maker, work, parts):
    """work(part) of every part, in their order, whoever did it."""
    if o.workers == 1:
        global _maker
        _maker = maker
        yield from map(work, parts)
        return
    # not forkserver, which newer Pythons take: its processes are no children of this one
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with concurrent.futures.ProcessPoolExecutor(o.workers, context, worker_begin,
                                                (o, now, os.getpid())) as pool:
        waiting = collections.deque()
        try:
            for part in parts:
                waiting.append(pool.submit(work, part))
                if len(waiting) >= 4 * o.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise Refused(f"one of the {o.workers} processes was killed, perhaps because "
                          "memory ran out; lower --workers")
        finally:
            for future in waiting:
                future.cancel()


class Progress:
    """A line on stderr, drawn anew where that is a terminal."""

    def __init__(self):
        self.began = self.drawn = time.monotonic()
        self.there = sys.stderr.isatty()

    def step(self, counts, tokens):
        now = time.monotonic()
        if not self.there or now - self.drawn < 0.2:
            return
        self.drawn = now
        rate = tokens / (now - self.began)
        print(f"\r{counts['read']:,} records, {tokens:,} tokens, {rate:,.0f} tokens/s \033[K",
              end="", file=sys.stderr, flush=True)

    def end(self):
        if self.there:
            print("\r\033[K", end="", file=sys.stderr)
        return time.monotonic() - self.began
