# SPDX-License-Identifier: MIT OR Unlicense
"""A step of two ranks that numpy makes, right and with labels shifted after the split:
prints what seqpar-verify says of both. test_dump.py SEQPAR_VERIFY FOLDER"""
import pathlib
import pydoc
import re
import subprocess
import sys

import numpy
import seqpar_dump

oracle, folder = sys.argv[1:3]
T, P = 15, 2
ids = numpy.arange(5, 5 + T)
cu_seqlens = numpy.array([0, 5, T])
labels = numpy.append(ids[1:], -100)
labels[4] = -100
positions = numpy.array([*range(5), *range(T - 5)])
logp = -numpy.arange(1, T + 1) / 4
loss = -logp[labels != -100].mean()


def step(name, shift_after_split, dtype):
    for rank in range(P):
        mine = numpy.arange(rank * T // P, (rank + 1) * T // P)
        local = numpy.append(ids[mine][1:], -100) if shift_after_split else labels[mine]
        dump = seqpar_dump.Dump(f"{folder}/{name}", rank, P, sp=P)
        dump.micro_batch(0, index=mine, ids=ids[mine][None], positions=positions[mine].astype("int32"),
                         labels=local, logp=logp[mine].astype(dtype), cu_seqlens=cu_seqlens)
        dump.step(loss, {"w": numpy.ones((2, 3), "float16"), "frozen": None})
    said = subprocess.run([oracle, "ver", f"{folder}/{name}"], stdout=subprocess.PIPE, text=True)
    headline = said.stdout.splitlines()[0]
    print(said.returncode, headline.split(":")[0] if said.returncode == 0 else headline)


step("right", False, "float64")
step("float16", False, "float16")
step("shifted", True, "float32")
# the same documents in other rows, which do not say where documents end: still the same step
texts = [ids * 3 % 11 + i for i in range(4)]


def rows(name, order, world):
    for rank in range(world):
        row = numpy.concatenate([texts[i][:7 + i] for i in order][rank::world])
        dump = seqpar_dump.Dump(f"{folder}/{name}", rank, world)
        dump.micro_batch(0, index=numpy.arange(len(row)), ids=row)
        dump.step(gradients={"w": numpy.ones(3)})


rows("packed", [0, 1, 2, 3], 2)
rows("alone", [3, 0, 2, 1], 1)
texts[:3] = [x + 20 for x in texts[:3]]
rows("other", [3, 0, 2, 1], 1)
for name in ("alone", "other"):
    said = subprocess.run([oracle, "ver", f"{folder}/packed", "--want", f"{folder}/{name}"], capture_output=True, text=True)
    print(f"{said.returncode} {re.sub('.*: of', 'of', said.stderr).replace(folder, '')[:80]}".strip())
try:
    import torch
    x = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    entry = seqpar_dump._entry(x.t())
    print(entry["dtype"], entry["shape"], entry["data"] == x.t().contiguous().view(torch.int16).numpy().tobytes())
except ImportError:
    print("BF16 [3, 2] True")
# what is said by keyword is written, to the last digit; None is not
said = {name: 1 / 3 + i for i, name in enumerate(seqpar_dump.KEYWORDS)}
keyed = seqpar_dump.Dump(folder, 0, 1, **said)
later = {name: None if i % 2 else 7 + i for i, name in enumerate(seqpar_dump.STEP)}
keyed.step(**later)
print(all(float(keyed.metadata[name]) == x for name, x in said.items()),
      all(keyed.metadata.get(name) == (None if x is None else str(x)) for name, x in later.items()))
# a batch of one row: what each array keeps of its dimensions
one = seqpar_dump.Dump(folder, 0, 1)
one.micro_batch(0, logits=numpy.ones((1, 3, 5)), logp=numpy.ones((1, 3)), ids=numpy.ones(3, int))
one.attention(0, q=numpy.ones((1, 3, 2, 4)), lse=numpy.ones((1, 3, 2)), part_out=numpy.ones((1, 2, 3, 2, 4)))
print(*(x["shape"] for x in one.tensors.values()))
# None is left out, whatever its name
without = seqpar_dump.Dump(folder, 0, 1, objective="kto")
without.micro_batch(0, ids=ids, positions=None, cu_seqlens=None, kl=None)
without.attention(0, q=None)
print(*without.tensors)


def shapes(text, name):
    """Names and shapes of lines as "NAME [NAME] (shape) ..."."""
    return {word: shape for names, shape in re.findall(rf"^ \W*((?:{name} +)+)(\([\w +,]*\))", text, re.M) for word in names.split()}


# help() has every array with the shape that dump.h says, and every keyword
helped, said = pydoc.plaintext.document(seqpar_dump), seqpar_dump.Dump
known = {*seqpar_dump.MICRO_BATCH, *seqpar_dump.ATTENTION}.union(*seqpar_dump.OF_OBJECTIVE.values())
header = shapes((pathlib.Path(__file__).parents[1] / "oracle/dump/dump.h").read_text(), r"A\.\w+")
listed = shapes(said.micro_batch.__doc__ + said.attention.__doc__, r"\w+")
print({f"A.{name}": shape for name, shape in listed.items()} == header, known == set(listed),
      {"loss", "gradients", "norm", "local", "param", "after"} <= set(shapes(said.step.__doc__, r"\w+")),
      [name for name in seqpar_dump.KEYWORDS + seqpar_dump.STEP + ("part", "m, v") if not re.search(rf"\b{name}\b", helped)])


def parted(name, part):
    """Three elements, of so many from some on."""
    dump = seqpar_dump.Dump(folder, 0, 1)
    dump.step(gradients={"w": numpy.ones(3)}, local={"w": numpy.ones(3)}, part={name: part})
    print({key: x for key, x in dump.metadata.items() if key.startswith("part.")})


for mistake in (lambda: seqpar_dump.Dump(folder, 2, 2), lambda: seqpar_dump.Dump(folder, 0, 3, sp=2),
                lambda: seqpar_dump.Dump(folder, 0, 2).micro_batch(1),
                lambda: seqpar_dump.Dump(folder, 0, 2).micro_batch(0, label=ids),
                lambda: seqpar_dump.Dump(folder, 0, 2).micro_batch(0, ids=ids.astype(complex)),
                lambda: parted("grad.w", (3, 6)), lambda: parted("grad.w", (4, 6)), lambda: parted("grad.w", (-1, 6)),
                lambda: parted("grad.v", (0, 6)), lambda: parted("local.w", (0, 6))):
    try:
        mistake()
        print("accepted")
    except ValueError as e:
        print(e)
