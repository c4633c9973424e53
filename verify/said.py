#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""said.py FOLDER > verify/said.tsv: the table of said.h, from what suites of dumps wrote there.

    for suite in $(ls verify/test_dump*.c | sed 's/.*test_//; s/.c$//'); do
        SAID=FOLDER/$suite build/test_$suite
    done

Of each test the number of words that are said. Of each sentence the first FEW of a suite that
differ in numbers, or the first of all where it has none. What changed is to be read: the table is
no truth of its own."""
import os
import re
import sys

FEW, WIDTH, INDENT, MOST = 2, 96, 14, 1500
NUMBER = re.compile(r"(?<![\w.])-?\d[\d.]*(?:e[-+]?\d+)?")


def texts(path):
    """Each test's name and what was said in it."""
    with open(path, encoding="utf-8", errors="replace") as file:
        parts = re.split(r"^\x01(said|test)\n", file.read(), flags=re.MULTILINE)
    said, turns = [], {}
    for kind, text in zip(parts[1::2], parts[2::2]):
        if kind == "said":
            said.append(text)
            continue
        name = text.strip()
        turns[name] = turns.get(name, 0) + 1
        yield name if turns[name] == 1 else f"{name}#{turns[name]}", said
        said = []


def sentences(text):
    """Lines that were wrapped are put together again; what mistakes.h says is left out."""
    found, last = [], ""
    for line in text.split("\n\n  ")[0].splitlines():
        word, labelled = line.split(" ", INDENT + 1), re.match(r"    [a-z]", line)
        first = line.split()[0] if line.split() else ""
        wrapped = line.startswith(" ") and not labelled and \
            len(last) + 1 + len(first) > WIDTH
        if wrapped and found:
            found[-1] += " " + line.strip()
        elif word and first:
            found.append(" ".join(line.split()))
        last = line.rstrip()
    return found


def is_good(sentence):
    """Not of this machine: no path of its own, no JSON, nothing of the clock."""
    return len(sentence) < MOST and not re.search(r'[{}\t"]|-nan|/tmp|--budget|\.partial', sentence)


def rows(path, plain):
    seen = {}
    for name, said in texts(path):
        words = len(" ".join(said).split())
        if words and not re.search(r"--budget", " ".join(said)):
            yield name, f"words {words}"
        for sentence in dict.fromkeys(s for text in said for s in sentences(text)):
            numbers = tuple(NUMBER.findall(sentence))
            known = (seen if numbers else plain).setdefault(NUMBER.sub("#", sentence), [])
            if is_good(sentence) and numbers not in known and len(known) < FEW:
                known.append(numbers)
                yield name, sentence


def main(folder):
    print("# SPDX-License-Identifier: MIT OR Unlicense")
    print("# What tests of dumps hear of the oracle: suite, test, a sentence or how many words. verify/said.py made it.")
    plain = {}
    for suite in sorted(os.listdir(folder)):
        for name, what in rows(os.path.join(folder, suite), plain):
            print(f"test_{suite}\t{name}\t{what}")


if __name__ == "__main__":
    main(sys.argv[1])
