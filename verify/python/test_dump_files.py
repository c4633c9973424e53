# SPDX-License-Identifier: MIT OR Unlicense
"""What seqpar_dump writes, byte by byte, and what it refuses, by sentences. Needs numpy alone: arrays of torch are those of a
stand-in. test_dump_files.py FOLDER"""
import json
import os
import pathlib
import sys
import types

import numpy
import seqpar_dump

folder = pathlib.Path(sys.argv[1])
KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "<i1", "U8": "<u1", "BOOL": "?"}
failed = 0


def check(name, found, wanted):
    global failed
    failed += found != wanted
    print(f"ok {name}" if found == wanted else f"FAIL {name}: {found}, not {wanted}")


def read(path):
    """Metadata, and type, shape and values of each tensor. All that the format asks of a file is checked."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text, body = data[8:8 + size], data[8 + size:]
    header, at, found = json.loads(text), 0, {}
    padding = len(text) - len(text.rstrip(b" "))
    metadata = header.pop("__metadata__")
    right = size % 8 == 0 and padding < 8
    for name, x in header.items():
        begin, end = x["data_offsets"]
        right = right and begin == at
        found[name] = x["dtype"], x["shape"], numpy.frombuffer(body[begin:end], KINDS[x["dtype"]]).tolist()
        at = end
    return (metadata, found) if right and at == len(body) else (None, f"{text}, {len(body)} bytes")


def said_by(mistake):
    try:
        mistake()
    except ValueError as e:
        return str(e)
    return "accepted"


class Torch:
    """An array of torch as far as seqpar_dump knows it. Only a detached one has a number."""

    def __init__(self, x, dtype, detached=False):
        self.x, self.dtype, self.detached = x, dtype, detached

    def detach(self):
        return Torch(self.x, self.dtype, True)

    cpu = contiguous = detach

    def view(self, dtype):
        return Torch(self.x.view(dtype), dtype)

    def numpy(self):
        if self.dtype == "torch.bfloat16":
            raise TypeError("numpy knows no bfloat16")
        return self.x

    def __float__(self):
        return float(self.x) if self.detached else numpy.nan


def test_files():
    """A name's length moves the header's: the padding is any of 0 to 7 bytes."""
    for n in range(8):
        path = folder / f"file{n}"
        ones, pair = numpy.ones(3, "float32"), numpy.array([[1, -2]])
        seqpar_dump._write(path, {"x" * n: seqpar_dump._entry(ones), "pair": seqpar_dump._entry(pair)}, {"said": "so"})
        wanted = {"said": "so"}, {"x" * n: ("F32", [3], [1, 1, 1]), "pair": ("I64", [1, 2], [1, -2])}
        check(f"dump_file_{n}", read(path), wanted)
    seqpar_dump._write(folder / "file0", {}, {})
    check("dump_file_replaced", read(folder / "file0"), ({}, {}))
    check("dump_file_alone", sorted(p.name for p in folder.glob("file*")), [f"file{n}" for n in range(8)])


def test_temporary(replace=os.replace):
    """The file grows beside its place, under a name of this process, and is whole when it gets its own."""
    path, moves = folder / "beside" / "rank0.safetensors", []
    path.parent.mkdir()

    def moved(old, new):
        moves.append((old, new, read(pathlib.Path(old)), path.exists()))

    os.replace = moved
    seqpar_dump._write(path, {"x": seqpar_dump._entry(numpy.ones(1))}, {})
    os.replace = replace
    check("dump_temporary", moves, [(f"{path}.tmp.{os.getpid()}", path, ({}, {"x": ("F64", [1], [1])}), False)])


def test_entries():
    bits = numpy.array([0x3f80, -0x4000], "int16")
    sys.modules["torch"] = types.SimpleNamespace(int16="int16")
    for name, x, kind, shape, data in (
            ("big_endian", numpy.array([1, 2], ">i4"), "I32", [2], b"\1\0\0\0\2\0\0\0"),
            ("columns", numpy.array([[1, 2], [3, 4]], "int8").T, "I8", [2, 2], b"\1\3\2\4"),
            ("number", 2.0, "F64", [], numpy.float64(2).tobytes()),
            ("one", numpy.ones((), "uint8"), "U8", [], b"\1"),
            ("bool", [True, False], "BOOL", [2], b"\1\0"),
            ("torch", Torch(numpy.array([[5]], "float16"), "torch.float16"), "F16", [1, 1], b"\0\x45"),
            ("bfloat16", Torch(bits, "torch.bfloat16"), "BF16", [2], b"\x80\x3f\0\xc0")):
        check(f"dump_entry_{name}", seqpar_dump._entry(x), {"dtype": kind, "shape": shape, "data": data})
    known = "bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64"
    for name, x, kind in (("complex", numpy.ones(1, "complex64"), "complex64"),
                          ("torch", Torch(bits, "torch.uint16"), "uint16"), ("text", numpy.array("abc"), "str96")):
        check(f"dump_entry_refuses_{name}", said_by(lambda: seqpar_dump._entry(x)), f"arrays of {kind} are not written; give one of {known}")


def test_text():
    for x, wanted in (("a b", "a b"), (7, "7"), (numpy.int32(-3), "-3"), (True, "1"), (0.1, "0.1"), (2.0, "2.0"), (numpy.float32(0.5), "0.5")):
        check(f"dump_text_{x}", seqpar_dump._text(x), wanted)


def test_shapes():
    """Ones in front are dropped down to the dimensions that an array has; what has fewer keeps them."""
    for name, shape, wanted in (
            ("ids", (3,), [3]), ("ids", (1, 3), [3]), ("ids", (1, 1, 3), [3]), ("ids", (1, 1), [1]), ("ids", (1,), [1]), ("loss_sum", (), [1]),
            ("logits", (3, 5), [3, 5]), ("logits", (1, 3, 5), [3, 5]), ("logits", (1, 5), [1, 5]), ("logits", (5,), [5]),
            ("lse", (3, 2), [3, 2]), ("lse", (1, 3, 2), [3, 2]), ("lse", (1, 2), [1, 2]), ("q", (3, 2, 4), [3, 2, 4]),
            ("q", (1, 3, 2, 4), [3, 2, 4]), ("q", (1, 2, 4), [1, 2, 4]), ("q", (3, 8), [3, 8]), ("part_lse", (1, 3, 2), [1, 3, 2]),
            ("part_out", (1, 3, 2, 4), [1, 3, 2, 4]), ("part_out", (1, 1, 3, 2, 4), [1, 3, 2, 4]), ("ids", (0,), [0])):
        entry = {"dtype": "F32", "shape": list(shape), "data": name}
        found = seqpar_dump._drop_ones(entry, name)
        check(f"dump_shape_{name}_{'x'.join(map(str, shape))}", found, {"dtype": "F32", "shape": wanted, "data": name})
    for name, shape in (("ids", [2, 3]), ("ids", [1, 2, 3]), ("ids", [2, 1, 3]), ("ids", [0, 3]), ("logits", [2, 3, 5]), ("lse", [2, 3, 2]),
                        ("q", [2, 3, 2, 4]), ("part_out", [2, 1, 3, 2, 4])):
        said = said_by(lambda: seqpar_dump._drop_ones({"shape": shape}, name))
        check(f"dump_shape_refuses_{name}_{'x'.join(map(str, shape))}", said,
              f"{name} has shape {shape}; a micro-batch is one row, write several as several")


def test_begin():
    """Ranks at both ends of a world, and just outside; what else it takes and refuses."""
    for rank, world, sp in ((0, 1, 1), (0, 4, 2), (3, 4, 2), (3, 4, 4), (1, 3, 3)):
        dump = seqpar_dump.Dump(folder / "begun", rank, world, sp=sp, accumulation=5, beta=1 / 3)
        wanted = {"seqpar_dump": "1", "rank": str(rank), "world": str(world), "sp": str(sp), "accumulation": "5", "objective": "sft",
                  "beta": "0.3333333333333333"}
        check(f"dump_begins_{rank}_of_{world}_sp_{sp}", (dump.metadata, dump.path), (wanted, f"{folder}/begun/rank{rank}.safetensors"))
    for rank, world, sp in ((-1, 2, 1), (2, 2, 1), (3, 2, 1), (0, 0, 1), (0, 3, 2), (0, 2, 4), (0, 2, 0), (0, 2, -1)):
        check(f"dump_refuses_{rank}_of_{world}_sp_{sp}", said_by(lambda: seqpar_dump.Dump(folder / "none", rank, world, sp=sp)),
              f"rank {rank} of {world}, sp {sp}: rank is 0 to world - 1, and sp divides world")
    check("dump_refuses_objective", said_by(lambda: seqpar_dump.Dump(folder / "none", 0, 1, objective="orpo")),
          "objective is orpo; give one of sft, dpo, rm, kto, ppo, value, other, grpo")
    check("dump_refuses_keyword", said_by(lambda: seqpar_dump.Dump(folder / "none", 0, 1, clip=1)),
          f"what is clip? the keywords here are {', '.join(seqpar_dump.KEYWORDS)}")
    check("dump_refused_leaves_nothing", (folder / "none").exists(), False)


def test_arrays():
    """Names by objective, micro-batches at both ends and just outside."""
    for objective, names in seqpar_dump.OF_OBJECTIVE.items():
        dump = seqpar_dump.Dump(folder / "arrays", 0, 1, accumulation=3, objective=objective)
        known = seqpar_dump.MICRO_BATCH + names
        for number in (0, 2):
            dump.micro_batch(number, **{name: numpy.full((1, 2), at) for at, name in enumerate(known)})
        wanted = {f"{number}.{name}": at for number in (0, 2) for at, name in enumerate(known)}
        check(f"dump_arrays_{objective}", {name: x["data"][0] for name, x in dump.tensors.items()}, wanted)
        check(f"dump_arrays_refused_{objective}", said_by(lambda: dump.micro_batch(0, q=numpy.ones(2))),
              f"what is q? a micro-batch has {', '.join(known)}")
    dump = seqpar_dump.Dump(folder / "arrays", 0, 1, accumulation=3)
    dump.attention(2, **{name: numpy.full((1, 2, 3), at) for at, name in enumerate(seqpar_dump.ATTENTION)})
    check("dump_arrays_attention", {name: x["data"][0] for name, x in dump.tensors.items()},
          {f"2.{name}": at for at, name in enumerate(seqpar_dump.ATTENTION)})
    for number in (-1, 3, 4):
        for call in (dump.micro_batch, dump.attention):
            check(f"dump_{call.__name__}_{number}", said_by(lambda: call(number)), f"micro-batch {number} of 3")
    check("dump_attention_refused", said_by(lambda: dump.attention(0, ids=numpy.ones(2))),
          f"what is ids? a micro-batch has {', '.join(seqpar_dump.ATTENTION)}")


def test_step():
    """Each array of a step under its own name; None is left out."""
    given = ("gradients", "local", "param", "after", "m", "v")
    arrays = {kind: {"w": numpy.full((1, 2), at), "none": None} for at, kind in enumerate(given)}
    dump = seqpar_dump.Dump(folder / "step", 0, 1)
    dump.step(Torch(numpy.float32(1.5), "torch.float32"), norm=2.5, **arrays, part={"m.w": (0, 2), "grad.w": (3, 9)}, lr=0.5, step=None)
    metadata, found = read(folder / "step" / "rank0.safetensors")
    wanted = {"loss": ("F64", [], [1.5]), "norm": ("F64", [], [2.5])}
    kinds = ("grad",) + given[1:]
    wanted.update({f"{kind}.w": ("I64", [1, 2], [at, at]) for at, kind in enumerate(kinds)})
    check("dump_step_tensors", found, wanted)
    check("dump_step_metadata", {k: v for k, v in metadata.items() if k not in ("seqpar_dump", "rank", "world", "sp", "accumulation")},
          {"objective": "sft", "beta": "0.1", "part.m.w": "0 2", "part.grad.w": "3 9", "lr": "0.5"})
    said = said_by(lambda: dump.step(momentum=1))
    check("dump_step_refused", said, f"what is momentum? the keywords here are {', '.join(seqpar_dump.STEP)}")
    param = {name: numpy.ones(2) for name in ("a", "b", "c")}
    dump = seqpar_dump.Dump(folder / "own", 0, 1)
    dump.step(param=param, lr={"a": 0.5, "b": 0.25, "c": 0.5}, weight_decay={"a": 0, "b": 0, "c": 0}, optimizer="sgd")
    metadata = read(folder / "own" / "rank0.safetensors")[0]
    check("dump_step_by_parameter", {k: v for k, v in metadata.items() if k.startswith(("lr", "weight_decay"))},
          {"lr": "0.5", "lr.b": "0.25", "weight_decay": "0"})
    for keywords, wanted in (
            (dict(eps={"a": 1}), "eps is a dict of 1 numbers; only lr and weight_decay take a dict, of one number or more"),
            (dict(lr={}), "lr is a dict of 0 numbers; only lr and weight_decay take a dict, of one number or more"),
            (dict(lr={"a": 1, "c": 2}), "lr: no number for b; give one for every parameter in param="),
            (dict(lr={"a": 1, "b": 1, "c": 2, "d": 1}), "lr: d is not in param=")):
        check(f"dump_step_{'_'.join(keywords)}_refused", said_by(lambda: seqpar_dump.Dump(folder / "none", 0, 1).step(param=param, **keywords)), wanted)
    for name in ("loss", "norm"):
        for at, value in enumerate((0, Torch(numpy.float32(-2), "torch.float32"))):
            dump = seqpar_dump.Dump(folder / name, 0, 1)
            dump.step(**{name: value})
            check(f"dump_step_{name}_alone_{at}", read(folder / name / "rank0.safetensors")[1], {name: ("F64", [], [-2 * at])})


def test_part():
    """A range of a flattened whole: at both ends, and just outside."""
    dump = seqpar_dump.Dump(folder / "part", 0, 1)
    dump.tensors = {"grad.w": {"shape": [2, 3]}, "local.w": {"shape": [2, 3]}, "v.none": {"shape": [0]}, "m.one": {"shape": []}}
    where = "name a tensor of grad, param, after, m or v that is written"
    for name, offset, total, wanted in (
            ("grad.w", 0, 6, "accepted"), ("grad.w", 0, 7, "accepted"), ("grad.w", 1, 7, "accepted"), ("v.none", 4, 4, "accepted"),
            ("m.one", 8, 9, "accepted"), ("grad.w", -1, 7, "part of grad.w: 6 elements from -1 on are none of 7"),
            ("grad.w", 0, 5, "part of grad.w: 6 elements from 0 on are none of 5"), ("grad.w", 2, 7, "part of grad.w: 6 elements from 2 on are none of 7"),
            ("m.one", 9, 9, "part of m.one: 1 elements from 9 on are none of 9"), ("local.w", 0, 6, f"part of local.w: {where}"),
            ("local.none", 0, 6, f"part of local.none: {where}"), ("grad.none", 0, 6, f"part of grad.none: {where}")):
        dump.metadata = {}
        said = said_by(lambda: dump._part(name, offset, total))
        check(f"dump_part_{name}_{offset}_{total}", (said, dump.metadata), (wanted, {f"part.{name}": f"{offset} {total}"} if said == "accepted" else {}))


def test_model():
    """Twice into one folder: the second replaces the first."""
    for config, x in (({"hidden_size": 1}, [9]), ({"hidden_size": 2, "eps": 1e-5}, [1, 2])):
        seqpar_dump.write_llama(folder / "deep" / "model", config, {"lm_head.weight": numpy.array(x)})
    check("dump_model_weights", read(folder / "deep" / "model" / "model.safetensors"),
          ({"format": "pt"}, {"lm_head.weight": ("I64", [2], [1, 2])}))
    check("dump_model_config", (folder / "deep" / "model" / "config.json").read_text(), '{\n  "hidden_size": 2,\n  "eps": 1e-05\n}')
    check("dump_model_alone", sorted(p.name for p in (folder / "deep" / "model").iterdir()), ["config.json", "model.safetensors"])


test_files()
test_temporary()
test_entries()
test_text()
test_shapes()
test_begin()
test_arrays()
test_step()
test_part()
test_model()
sys.exit(failed > 0)
