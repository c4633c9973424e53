# SPDX-License-Identifier: MIT OR Unlicense
"""Makes the dumps that a table of refusals names, and prints the table with their folders. Python's own library is enough.

    change_dumps.py TABLE OUT

A word BASE[CHANGE;CHANGE] of a table is the dump OUT/BASE/got, BASE.want[..] that of OUT/BASE/want, changed. A row =NAME makes OUT/NAME/got of the word behind it. A change begins
with the rank whose file it is of, or * for all, and a colon; ~ stands for a blank:

    0:sp=2            metadata; 0:sp! leaves it out
    0:-0.ids          without the tensor; grad.* is all that begin so
    0:0.ids[3]=7      an element, counted from the end if below 0; [*] are all, = # its own place
    0:0.ids@I32       another type, the same numbers
    0:0.ids#2x3       another shape: zeros behind, or cut; a tensor that is not there is made, of F64
    0:!               without the file
    0:>name           the file once more, as name.safetensors
"""
import fnmatch
import json
import os
import re
import struct
import sys

CODES = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "B", "U64": "Q"}


class Dump:
    """The files of a folder: of each its metadata and its tensors, as [dtype, shape, numbers]."""

    def __init__(self, folder):
        self.files = {}
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as file:
                raw = file.read()
            size, = struct.unpack_from("<Q", raw)
            head = json.loads(raw[8:8 + size])
            notes = head.pop("__metadata__")
            tensors = {key: self.tensor(raw[8 + size:], **about) for key, about in head.items()}
            self.files[name.split(".")[0]] = (notes, tensors)

    @staticmethod
    def tensor(data, dtype, shape, data_offsets):
        begin, end = data_offsets
        code = CODES[dtype]
        return [dtype, shape, list(struct.unpack(f"<{(end - begin) // struct.calcsize('<' + code)}{code}", data[begin:end]))]

    def change(self, text):
        rank, _, what = text.partition(":")
        for name in list(self.files) if rank == "*" else [f"rank{rank}"]:
            if what == "!":
                del self.files[name]
            elif what[0] == ">":
                self.files[what[1:]] = self.files[name]
            else:
                change_file(*self.files[name], what)

    def write(self, folder):
        os.makedirs(folder)
        for name, (notes, tensors) in self.files.items():
            head, data = {"__metadata__": notes}, b""
            for key, (dtype, shape, numbers) in tensors.items():
                more = struct.pack(f"<{len(numbers)}{CODES[dtype]}", *numbers)
                head[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(more)]}
                data += more
            text = json.dumps(head).encode()
            text += b" " * (-len(text) % 8)
            with open(os.path.join(folder, f"{name}.safetensors"), "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + data)


def change_file(notes, tensors, what):
    if what[0] == "-":
        for name in [name for name in tensors if fnmatch.fnmatchcase(name, what[1:])]:
            del tensors[name]
    elif what[-1] == "!":
        notes.pop(what[:-1], None)
    elif element := re.fullmatch(r"(.+)\[(-?\d+|\*)\]=(.+)", what):
        name, at, number = element.groups()
        numbers = tensors[name][2]
        for i in range(len(numbers)) if at == "*" else [int(at)]:
            value = i if number == "#" else float(number)
            numbers[i] = value if tensors[name][0][0] == "F" else int(value)
    elif "=" in what:
        key, _, value = what.partition("=")
        notes[key] = value.replace("~", " ")
    elif "@" in what:
        name, _, dtype = what.partition("@")
        tensors[name] = [dtype, tensors[name][1], [float(x) if dtype[0] == "F" else int(x) for x in tensors[name][2]]]
    else:
        name, _, sides = what.replace("~", " ").partition("#")
        shape, count = [int(side) for side in sides.split("x")] if sides else [], 1
        for side in shape:
            count *= side
        old = tensors.get(name, ["F64", None, []])
        tensors[name] = [old[0], shape, (old[2] + [0] * count)[:count]]


class Maker:
    """Dumps by their words."""

    def __init__(self, out):
        self.out, self.made = out, {}

    def make(self, word, folder):
        base, changes = WORD.fullmatch(word).groups()
        base, _, part = base.partition(".")
        dump = Dump(f"{self.out}/{base}/{part or 'got'}")
        for change in filter(None, changes.split(";")):
            dump.change(change)
        dump.write(folder)
        return folder

    def folder(self, match):
        if match.group() not in self.made:
            self.made[match.group()] = self.make(match.group(), f"{self.out}/d{len(self.made)}")
        return self.made[match.group()]


WORD = re.compile(r"(?<!\S)([a-z.]+)\[(\S*)\](?!\S)")


def main(table, out):
    maker = Maker(out)
    with open(table, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file if line.strip() and line[0] not in "#-"]
    for name, *columns in rows:
        if name[0] == "=":
            maker.make(columns[0], f"{out}/{name[1:]}/got")
        else:
            print("\t".join([name, columns[0], *(WORD.sub(maker.folder, words) for words in columns[1:3]), *columns[3:]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
