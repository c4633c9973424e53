# SPDX-License-Identifier: MIT OR Unlicense
"""The token file, which demos/trainer/data/token_file.h describes.

Sections grow beside the file in temporary files, since what stands before them, their sizes and
checksums, is known last. The whole file then takes its name at once: a run that ends early
leaves no file, and not half of one.
"""
import array
import contextlib
import json
import os
import struct
import tempfile
import zlib
from .base import little

KINDS = {"sft": 1, "pairs": 2, "labelled": 3, "prompts": 4, "steps": 5}
# Names of the sections, as in token_file.h.
(OFFSETS, IDS, MASK, STOPS, WORD_OFFSETS, WORDS, WORD_FLAGS, ABOUT, MARGINS, LABELS,
 PROMPT_OFFSETS, PROMPTS, ANSWER_OFFSETS, ANSWERS, TARGETS, SHARES, CHOICES) = range(1, 18)
MAGIC, VERSION, HEADER, ENTRY, ALIGNED = b"\x89SEQTOK\n", 1, 96, 32, 64


class Section:
    """Bytes that grow beside the file until all are there."""

    def __init__(self, folder):
        self.file, self.size, self.crc = tempfile.TemporaryFile(dir=folder), 0, 0

    def add(self, data):
        self.file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)


class Offsets:
    """Lengths as offsets from 0."""

    def __init__(self):
        self.at, self.values = 0, array.array("Q", [0])

    def add(self, lengths):
        for length in lengths:
            self.at += length
            self.values.append(self.at)


class TokenFile:
    def __init__(self, path):
        self.path, self.folder = path, os.path.dirname(os.path.abspath(path))
        self.sections = {}

    def add(self, made):
        for name, data in made.items():
            if name not in self.sections:
                lengths = isinstance(data, list)
                self.sections[name] = Offsets() if lengths else Section(self.folder)
            self.sections[name].add(data)

    def write(self, kind, folder, about):
        offsets = self.sections[OFFSETS]
        documents, tokens = len(offsets.values) - 1, offsets.at
        self.add({STOPS: little("i", folder.stops),
                  WORD_OFFSETS: [len(word) for word in folder.word],
                  WORDS: b"".join(folder.word), WORD_FLAGS: bytes(folder.flags),
                  ABOUT: json.dumps(about, ensure_ascii=False, sort_keys=True).encode()})
        for name, section in self.sections.items():
            if isinstance(section, Offsets):
                self.sections[name] = Section(self.folder)
                self.sections[name].add(little("Q", section.values))
        table, at = b"", HEADER + ENTRY * len(self.sections)
        for name, section in sorted(self.sections.items()):
            at = -(-at // ALIGNED) * ALIGNED
            table += struct.pack("<IIQQQ", name, section.crc, at, section.size, 0)
            at += section.size
        head = struct.pack("<QIIiiiiQQQII", at, KINDS[kind], len(self.sections), folder.bos,
                           folder.eos, folder.pad, folder.vocab, documents, tokens, folder.size,
                           folder.crc, 0).ljust(HEADER - 16, b"\0")
        sums = struct.pack("<II", VERSION, zlib.crc32(head + table))
        self.replace(MAGIC + sums + head + table)

    def replace(self, head):
        temporary = f"{self.path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(head)
                for _, section in sorted(self.sections.items()):
                    file.write(bytes(-file.tell() % ALIGNED))
                    section.file.seek(0)
                    while part := section.file.read(1 << 20):
                        file.write(part)
            os.replace(temporary, self.path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def replaceable(path):
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")
