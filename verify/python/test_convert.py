# SPDX-License-Identifier: MIT OR Unlicense
"""Steps of `seqpar-verify gen` written as npz files and as SGLang's dumper writes them, and
converted back: the verdict is that of the step itself. test_convert.py SEQPAR_VERIFY FOLDER"""
import json
import pathlib
import subprocess
import sys

import numpy

oracle, folder = sys.argv[1], pathlib.Path(sys.argv[2])
KINDS = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4"}
SGLANG = {"ids": "input_ids", "positions": "position_ids", "labels": "shift_labels",
          "logp": "log_probs", "norm": "grad_norm"}
failed = 0


def check(name, right, why=""):
    global failed
    failed += not right
    print(f"ok {name}" if right else f"FAIL {name}: {why}")


def read(path):
    """Metadata and arrays of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__")
    arrays = {}
    for name, x in header.items():
        begin, end = (8 + size + at for at in x["data_offsets"])
        arrays[name] = numpy.frombuffer(data[begin:end], KINDS[x["dtype"]]).reshape(x["shape"])
    return metadata, arrays


def convert(*words):
    command = [sys.executable, "-m", "seqpar_convert", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def verdict(dump):
    said = subprocess.run([oracle, "ver", str(dump), "--want", str(dump.parent / "want"), "--json"],
                          stdout=subprocess.PIPE, text=True)
    return said.returncode, {**json.loads(said.stdout), "dump": None}  # folders differ


def as_npz(got, to):
    to.mkdir()
    for path in got.glob("*.safetensors"):
        metadata, arrays = read(path)
        said = {f"metadata.{k}": numpy.array(v) for k, v in metadata.items()}
        numpy.savez(to / f"{path.stem}.npz", **arrays, **said)


def sglang_tags(name):
    """The dumper's name and further tags, or None where it has no such name."""
    if name.startswith("grad."):
        return f"grad__param__{name[5:]}", ""
    if name[0].isdigit():
        micro, name = name.split(".", 1)
        return SGLANG.get(name, name), f"___micro_batch={micro}"
    return (SGLANG.get(name, name), "") if name in ("loss", "norm") else None


def as_sglang(got, to):
    import torch
    to.mkdir()
    for path in got.glob("*.safetensors"):
        metadata, arrays = read(path)
        for at, (name, x) in enumerate(arrays.items()):
            if not (known := sglang_tags(name)):
                continue
            file = (f"step=0___rank={metadata['rank']}___dump_index={at}___name={known[0]}"
                    f"___recompute_status=disabled{known[1]}.pt")
            value = torch.from_numpy(x.copy())
            value = value[None] if name[0].isdigit() and x.ndim == 1 else value
            meta = {"world_size": int(metadata["world"])}
            torch.save({"value": value, "meta": meta}, to / file)


def step(name, *words):
    made = folder / name
    subprocess.run([oracle, "gen", "--out", str(made), "--sp", "3", "--accumulation", "2", *words],
                   check=True, stdout=subprocess.PIPE)
    return made


def test_npz():
    for mistake in ("", "labels_not_shifted", "over_sp"):
        made = step(f"npz_{mistake}", *(["--mistake", mistake] if mistake else []))
        as_npz(made / "got", made / "npz")
        said = convert("npz", made / "npz", made / "back")
        check(f"convert_npz_{mistake or 'right'}", verdict(made / "back") == verdict(made / "got"),
              said.stderr or "the verdict is another one")


def test_sglang():
    try:
        import torch
    except ImportError:
        print("skip convert_sglang: no torch")
        return
    for mistake, code in (("", 0), ("shift_after_split", 1), ("over_sp", 1)):
        made = step(f"sglang_{mistake}", *(["--mistake", mistake] if mistake else []))
        as_sglang(made / "got", made / "pt")
        said = convert("sglang", made / "pt", made / "back", "--sp", 3)
        status, text = verdict(made / "back")
        names = [m["name"] for m in text["mistakes"]]
        check(f"convert_sglang_{mistake or 'right'}", (status, names) ==
              (code, [mistake] if mistake else []), said.stderr or f"{status}, {names}")
    (made / "pt" / "step=0___rank=0___name=log_probs.pt").write_bytes(b"none")
    said = convert("sglang", made / "pt", made / "bad", "--sp", 3)
    check("convert_sglang_refuses", said.returncode == 1 and "second 0.logp" in said.stderr
          or "torch reads no tensors" in said.stderr, said.stderr)
    check("convert_sglang_leaves_nothing", not (made / "bad").exists(), "a folder was made")


def test_dimensions():
    """A batch of one row loses that dimension; a parameter, whatever it is called, keeps its own."""
    import seqpar_convert
    for name, shape, wanted in (("0.ids", (1, 5), [5]), ("1.logp", (5,), [5]), ("0.logits", (1, 5, 3), [5, 3]),
                                ("0.lse", (1, 5, 2), [5, 2]), ("10.q", (1, 5, 2, 4), [5, 2, 4]), ("0.q", (5, 2, 4), [5, 2, 4]),
                                ("grad.experts.0", (1, 5), [1, 5]), ("grad.w", (1, 5), [1, 5]), ("loss", (1,), []), ("norm", (), [])):
        found = seqpar_convert.tensor_of("x.pt", name, numpy.ones(shape))["shape"]
        check(f"convert_dimensions_{name}_{len(shape)}", found == wanted, f"{shape} becomes {found}, not {wanted}")


def test_places():
    """Micro-batches are counted from 0; a layout says where each one's tokens lie, of which none may say so itself."""
    import seqpar_convert
    ids = dict(shape=[4])
    named = {"0.ids": ids, "2.ids": ids, "2.index": "its own", "grad.w": dict(shape=[9])}
    check("convert_places_count", seqpar_convert.add_places(named, "zigzag", 2, 1) == 3, "not three micro-batches")
    check("convert_places_own", named["2.index"] == "its own", "an index of the dump is replaced")
    check("convert_places_made", numpy.frombuffer(named["0.index"]["data"], "<i8").tolist() == [2, 3, 4, 5], f"{named['0.index']}")
    check("convert_places_none", seqpar_convert.add_places({"loss": dict(shape=[])}, "zigzag", 2, 0) == 1, "not one micro-batch")
    bare = {"0.ids": ids}
    check("convert_places_without", seqpar_convert.add_places(bare, None, 2, 0) == 1 and "0.index" not in bare, f"{bare}")


def test_refusals():
    made = step("refused")
    as_npz(made / "got", made / "npz")
    (made / "empty").mkdir()
    (made / "text").mkdir()
    (made / "text" / "rank0.npz").write_text("no archive")
    (made / "two").mkdir()
    for name in ("a.npz", "b.npz"):
        (made / "two" / name).write_bytes((made / "npz" / "rank0.npz").read_bytes())
    (made / "bare").mkdir()
    numpy.savez(made / "bare" / "rank0.npz", x=numpy.ones(2))
    for case, rank in (("away", "../../rank0"), ("minus", "-1"), ("words", "one")):
        (made / case).mkdir()
        numpy.savez(made / case / "rank0.npz", **{"metadata.rank": rank, "metadata.world": "1"})
    (made / "array").mkdir()
    with open(made / "array" / "rank0.npz", "wb") as file:
        numpy.save(file, numpy.ones(2))
    (made / "killed").mkdir()
    (made / "killed" / "rank0.npz").write_bytes(b"")
    for case, words in {"away": "metadata.rank is '../../rank0'; give a whole number",
                        "minus": "metadata.rank is '-1'", "words": "metadata.rank is 'one'",
                        "array": "numpy reads no arrays", "killed": "numpy reads no arrays",
                        "empty": "no .npz file", "text": "numpy reads no arrays",
                        "two": "a second file of rank", "bare": "has no metadata.rank",
                        "nowhere": "no such folder"}.items():
        said = convert("npz", made / case, made / "out")
        right = said.returncode and words in said.stderr and said.stderr.count("\n") == 1
        check(f"convert_refuses_{case}", right and not (made / "out").exists(), said.stderr)
    said = convert("npz", made / "npz", made / "got")
    check("convert_keeps_what_is_there", said.returncode and "already" in said.stderr, said.stderr)


def test_damaged_pt():
    """What a killed rank or another program leaves is a sentence. The first two need no torch."""
    cases = {"empty": (b"", "name=input_ids", "is empty, as a rank that was killed leaves it"),
             "micro": (b"", "micro_batch=x___name=input_ids", "its name says no micro_batch")}
    try:
        import torch
        cases.update(meta=({"value": torch.ones(3), "meta": {"world_size": "two"}}, "name=input_ids",
                           "its world_size is two"),
                     text=({"value": "abc"}, "name=input_ids", "0.ids: ValueError"),
                     ragged=({"value": [[1], [2, 3]]}, "name=input_ids", "0.ids: no numbers"),
                     loss=({"value": torch.ones(3)}, "name=loss", "loss has the shape [3]"),
                     code=(b"cos\nsystem\n(S'false'\ntR.", "name=input_ids", "more than tensors"))
    except ImportError:
        print("skip convert_damaged_tensors: no torch")
    for case, (value, name, words) in cases.items():
        (folder / f"pt_{case}").mkdir()
        path = folder / f"pt_{case}" / f"step=0___rank=0___{name}.pt"
        path.write_bytes(value) if isinstance(value, bytes) else torch.save(value, path)
        said = convert("sglang", path.parent, folder / "pt_out")
        right = said.returncode == 1 and words in said.stderr and said.stderr.count("\n") == 1
        check(f"convert_refuses_pt_{case}", right and not (folder / "pt_out").exists(), said.stderr)


test_npz()
test_sglang()
test_dimensions()
test_places()
test_damaged_pt()
test_refusals()
sys.exit(failed > 0)
