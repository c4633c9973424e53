# SPDX-License-Identifier: MIT OR Unlicense
"""Tables of what functions of demos/prepare.py give: rows(name, function, [(arguments, wanted), ...]). A sentence that it refuses
with is wanted as Sentence. Needs neither tokenizers nor jinja2."""
import os
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "demos"))
import prepare  # noqa: E402, F401 - of the tests
from tokens.base import Refused  # noqa: E402

OUT = sys.argv[1]
RESULTS = {True: 0, False: 0}


class Sentence(str):
    """What is refused is said so."""


def outcome(function, arguments):
    try:
        return function(*arguments)
    except Refused as why:
        return Sentence(why)
    except (Exception, SystemExit) as why:
        return f"{type(why).__name__} {why}"


def alike(got, wanted):
    return type(got) is type(wanted) and got == wanted


def rows(name, function, table):
    wrong = []
    for arguments, wanted in table:
        shown = repr(arguments)  # before the call, which may change them
        got = outcome(function, arguments)
        if not alike(got, wanted):
            wrong.append(f"{shown[:120]} gives {got!r}, not {wanted!r}")
    print(f"FAIL prepare_{name}: {wrong[0]}"[:600].replace("\n", "\\n") if wrong else f"ok prepare_{name}: {len(table)}", flush=True)
    RESULTS[not wrong] += 1


def write(name, data):
    path = os.path.join(OUT, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
    return path


def end():
    print(f"{RESULTS[True]} passed, {RESULTS[False]} failed")
    sys.exit(RESULTS[False] > 0 or not RESULTS[True])
