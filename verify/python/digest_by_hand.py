# SPDX-License-Identifier: MIT OR Unlicense
"""The digest that the program seqpar puts into the name of a token file, by another way: what demos/program/digest.h says in words.

    digest_by_hand.py PREPARE <LINE     LINE: what a trainer says with --print_prepare
"""
import json
import os
import sys

ENDINGS = (".jsonl", ".json", ".gz", ".parquet")
PLACES = {"--output", "--pretrain", "--dataset"}
OF_A_MODEL = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
              "generation_config.json", "config.json")


def of_file(path):
    with open(path, "rb") as file:
        data = file.read()
    return data + len(data).to_bytes(8, "little")


def of_text(text):
    return text.encode() + b"\0"


def is_data(name):
    return any(name.endswith(ending) and name != ending for ending in ENDINGS)


def of_set(path, top=True):
    """A file, or a folder's data and that of the folders in it, in the order of their names."""
    found = of_text(os.path.basename(path))
    if not os.path.isdir(path):
        return found + of_file(path)
    for name in sorted(os.listdir(path), key=os.fsencode):
        below = top and name[0] != "." and os.path.isdir(f"{path}/{name}")
        if below or is_data(name):
            found += of_set(f"{path}/{name}", False)
    return found


def of_prepare(path):
    """The script, and the modules beside it in the order of their names."""
    found, folder = of_file(path), os.path.join(os.path.dirname(path), "tokens")
    for name in sorted(os.listdir(folder), key=os.fsencode):
        if name.endswith(".py") and name[0] != ".":
            found += of_text(name) + of_file(os.path.join(folder, name))
    return found


def of_words(words):
    found, words = b"", iter(words)
    for word in words:
        found += of_text(word)
        if word in PLACES:
            next(words)
        elif word == "--tokenizer_chat_template":
            value = next(words)
            found += of_file(value) if os.path.exists(value) else of_text(value)
    return found


def digest(data):
    """FNV-1a of 64 bits."""
    found = 14695981039346656037
    for byte in data:
        found = (found ^ byte) * 1099511628211 % (1 << 64)
    return found


def main():
    words = json.loads(sys.stdin.readline())["words"]
    value = {word: words[i + 1] for i, word in enumerate(words[:-1])}
    data = of_words(words) + of_prepare(sys.argv[1])
    for name in OF_A_MODEL:
        path = f"{value['--pretrain']}/{name}"
        data += of_text(name) + (of_file(path) if os.path.exists(path) else b"")
    for path in value["--dataset"].split(","):
        data += of_set(path.partition("@")[2] if "@" in path and not os.path.exists(path) else path)
    print(f"{digest(data):016x}")


main()
