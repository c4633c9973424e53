#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""said.py FOLDER OTHER > verify/said.tsv: the table of said.h, from what suites of dumps wrote.

    for suite in $(ls verify/test_dump*.c | sed 's/.*test_//; s/.c$//'); do
        SAID=FOLDER/$suite build/test_$suite
    done

OTHER has the same of an oracle that was built with other options (OPT=-O1): what rounding may
change, such as which of equal ranks is the first, is left out.

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


def is_near(one, two):
    a, b = float(one), float(two)
    size = max(abs(a), abs(b))
    return a == b if one.isdigit() and two.isdigit() else abs(a - b) <= 0.005 * size or size < 1e-9


def is_said(sentence, others):
    """Whether one of them is the same but for rounding."""
    numbers, words = NUMBER.findall(sentence), NUMBER.sub("#", sentence)
    return any(len(numbers) == len(found) and all(map(is_near, numbers, found))
               for found in others.get(words, ()))


def by_words(said):
    """Sentences without their numbers, and these."""
    found = {}
    for sentence in {s for text in said for s in sentences(text)}:
        found.setdefault(NUMBER.sub("#", sentence), []).append(NUMBER.findall(sentence))
    return found


def rows(path, other, plain):
    seen, again = {}, dict(texts(other))
    for name, said in texts(path):
        others = by_words(again.get(name, []))
        words = len(" ".join(said).split())
        if words != len(" ".join(again.get(name, [])).split()):
            words = 0
        if words and not re.search(r"--budget", " ".join(said)):
            yield name, f"words {words}"
        for sentence in dict.fromkeys(s for text in said for s in sentences(text)):
            numbers = tuple(NUMBER.findall(sentence))
            known = (seen if numbers else plain).setdefault(NUMBER.sub("#", sentence), [])
            if not is_said(sentence, others):
                continue
            if is_good(sentence) and numbers not in known and len(known) < FEW:
                known.append(numbers)
                yield name, sentence


def main(folder, other):
    print("# SPDX-License-Identifier: MIT OR Unlicense")
    print("# What tests of dumps hear of the oracle: suite, test, a sentence or how many words. verify/said.py made it.")
    plain = {}
    for suite in sorted(set(os.listdir(folder)) & set(os.listdir(other))):
        for name, what in rows(*(os.path.join(f, suite) for f in (folder, other)), plain):
            print(f"test_{suite}\t{name}\t{what}")


if __name__ == "__main__":
    main(*sys.argv[1:])
