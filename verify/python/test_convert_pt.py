# SPDX-License-Identifier: MIT OR Unlicense
"""seqpar_convert in one process: what it makes of npz files and of SGLang's, byte by byte, and what it refuses, by sentences.
Needs numpy alone: files of torch are pickles, which a stand-in reads. test_convert_pt.py FOLDER"""
import contextlib
import io
import json
import pathlib
import pickle
import sys
import types

import numpy
import seqpar_convert

folder = pathlib.Path(sys.argv[1])
KINDS = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}
failed = 0


def check(name, found, wanted):
    global failed
    failed += found != wanted
    print(f"ok {name}" if found == wanted else f"FAIL {name}: {found}, not {wanted}")


def load(path, map_location, weights_only):
    """torch.load, which runs what a pickle says where weights_only is not set."""
    data = pathlib.Path(path).read_bytes()
    if map_location != "cpu":
        raise RuntimeError("no such device here")
    if weights_only and b"posix" in data:
        raise pickle.UnpicklingError("Weights only load failed; weights_only is set\nand more")
    return pickle.loads(data)


def program(*words):
    """Exit code and what is said of `python -m seqpar_convert`."""
    sys.argv = ["seqpar_convert.py", *map(str, words)]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            seqpar_convert.main()
        except SystemExit as e:
            if isinstance(e.code, str):
                return 1, e.code
            return e.code, said.getvalue()
    return 0, said.getvalue()


def sentence(call, *words):
    try:
        return call(*words)
    except SystemExit as e:
        return e.code


def read(out):
    """Metadata, and shape and values of tensors, by file."""
    found = {}
    for path in sorted(out.iterdir()):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8:8 + size]), data[8 + size:]
        metadata = header.pop("__metadata__")
        tensors = {n: (x["shape"], numpy.frombuffer(body[slice(*x["data_offsets"])], KINDS[x["dtype"]]).tolist()) for n, x in header.items()}
        found[path.name] = metadata, tensors
    return found


def placed(case, write, files):
    """A folder of files, which `write` writes: (path, value)."""
    (folder / case).mkdir()
    for name, value in files.items():
        (folder / case / name).parent.mkdir(exist_ok=True)
        write(folder / case / name, value)
    return folder / case


def refuses(case, where, wanted, *words, kind="sglang"):
    """One sentence, and nothing is left."""
    out = folder / f"{case}.out"
    code, said = program(kind, where, out, *words)
    check(f"convert_refuses_{case}", (code, said), (1, "error: " + wanted.format(at=where, out=out)))
    check(f"convert_leaves_{case}", list(folder.glob(f"{case}.out*")), [])


# ---- npz ----

def npz(path, arrays):
    with open(path, "wb") as file:
        numpy.savez(file, **arrays)


def test_npz():
    rank = {"metadata.rank": "007", "metadata.world": "9", "metadata.sp": "3", "metadata.objective": "dpo"}
    where = placed("npz", npz, {"b.npz": {**rank, "0.ids": [3, 4], "grad.w": [[0.5]]}, "a.npz": {**rank, "metadata.rank": "123456789"}, "c.txt": {}})
    check("convert_npz", program("npz", where, folder / "npz_out"), (0, ""))
    metadata = {"seqpar_dump": "1", "world": "9", "sp": "3", "objective": "dpo"}
    check("convert_npz_files", read(folder / "npz_out"), {
        "rank7.safetensors": ({**metadata, "rank": "7"}, {"0.ids": ([2], [3, 4]), "grad.w": ([1, 1], [0.5])}),
        "rank123456789.safetensors": ({**metadata, "rank": "123456789"}, {})})
    check("convert_npz_alone", list(folder.glob("npz_out?*")), [])


def test_npz_refused():
    both = "has no metadata.rank and metadata.world; add both as arrays of a string"
    whole = "metadata.{} is {!r}; give a whole number"
    for case, arrays, wanted in (
            ("none", {"x": [1]}, both), ("no_world", {"metadata.rank": "0"}, both), ("no_rank", {"metadata.world": "1"}, both),
            *((f"rank_{at}", {"metadata.rank": text, "metadata.world": "1"}, whole.format("rank", text[:40]))
              for at, text in enumerate(("", "one", "-1", "\u00b2", "1.0", "1234567890", "../../rank0", "x" * 41))),
            ("world", {"metadata.rank": "0", "metadata.world": "two"}, whole.format("world", "two")),
            ("complex", {"metadata.rank": "0", "metadata.world": "1", "w": [1j]}, "w: ValueError arrays of complex128 are not written; give one of "
             "bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64")):
        wanted = "{at}/a.npz: " + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in wanted)
        refuses(f"npz_{case}", placed(f"npz_{case}", npz, {"a.npz": arrays}), wanted, kind="npz")
    first = {"metadata.rank": "3", "metadata.world": "4"}
    where = placed("npz_two", npz, {"a.npz": first, "b.npz": {**first, "metadata.rank": "03"}})
    refuses("npz_two", where, "{at}/b.npz: a second file of rank 3", kind="npz")
    refuses("npz_sp", where, "--sp is 0; give a number from 1", "--sp", 0, kind="npz")


# ---- the folders ----

def test_folders():
    empty = placed("empty", None, {})
    (folder / "file").write_text("")
    for kind, what in (("npz", ".npz"), ("sglang", ".pt")):
        refuses(f"empty_{kind}", empty, f"{{at}}: no {what} file", kind=kind)
        refuses(f"no_folder_{kind}", folder / "nowhere", "{at}: no such folder", kind=kind)
        refuses(f"no_directory_{kind}", folder / "file", "{at}: no such folder", kind=kind)
    check("convert_escapes", program("npz", folder / "tw\u00f6\nlines\\", "out"), (1, f"error: {folder}/tw\u00f6\\nlines\\: no such folder"))


def failing(at):
    """A writer that finds no room for the rank that is so many behind the first."""
    def write(path, tensors, metadata):
        pathlib.Path(path).write_text("begun")
        if path.endswith(f"/rank{at}.safetensors"):
            raise OSError(28, "No space left on device")
    return write


def test_save(write=seqpar_convert._write):
    ranks = {0: ({}, {}), 1: ({"sp": "2"}, {})}
    for at in ranks:
        seqpar_convert._write = failing(at)
        said = sentence(seqpar_convert.save, f"{folder}/full", ranks)
        check(f"convert_full_{at}", (said, list(folder.glob("full*"))), (f"error: {folder}/full: No space left on device; nothing was written", []))
    seqpar_convert._write = write
    (folder / "taken").mkdir()
    check("convert_taken", sentence(seqpar_convert.save, f"{folder}/taken", ranks), f"error: {folder}/taken: is there already; name a folder that is not")
    (folder / "text").write_text("")
    check("convert_under_a_file", sentence(seqpar_convert.save, f"{folder}/text/out", ranks),
          f"error: {folder}/text/out: cannot be made: Not a directory")
    check("convert_saves", sentence(seqpar_convert.save, f"{folder}/deep/saved", ranks), None)
    check("convert_saved", read(folder / "deep" / "saved"), {"rank0.safetensors": ({"seqpar_dump": "1", "rank": "0"}, {}),
                                                           "rank1.safetensors": ({"seqpar_dump": "1", "sp": "2", "rank": "1"}, {})})
    check("convert_saved_alone", [p.name for p in (folder / "deep").iterdir()], ["saved"])


# ---- names and values ----

def test_words():
    for text, wanted in (("0", True), ("007", True), ("123456789", True), ("1234567890", False), ("", False), ("-1", False), ("x", False),
                         ("\u00b2", False), ("1x", False)):
        check(f"convert_whole_{text}", seqpar_convert.is_whole(text), wanted)
    for why, wanted in ((ValueError("first\nsecond"), "ValueError first"), (OSError(), "OSError"), (KeyError("x" * 300), "KeyError '" + "x" * 190),
                        (ValueError("y" * 189), "ValueError " + "y" * 189)):
        check(f"convert_reason_{type(why).__name__}_{len(str(why))}", seqpar_convert.reason(why), wanted)
    for name, wanted in (("step=0___rank=1___name=ids.pt", {"step": "0", "rank": "1", "name": "ids"}), ("name=a=b=c.pt", {"name": "a=b=c"}),
                         ("run___name=ids___.pt", {"name": "ids"}), ("ids.pt", {})):
        check(f"convert_tags_{name}", seqpar_convert.tags_of(pathlib.Path("step=9___x=1") / name), wanted)


def test_names():
    names = {"loss": "loss", "norm": "norm", "grad_norm": "norm", "grad__param__a.w": "grad.a.w", "param__a.w": "param.a.w", "param__": "param.",
             "": None, "hidden": None, "step": None, "grad.w": None}
    per_micro = {"input_ids": "ids", "position_ids": "positions", "cu_seqlens_q": "cu_seqlens", "shift_labels": "labels", "log_probs": "logp",
                 "ref_log_probs": "ref_logp", "old_log_probs": "old_logp"}
    per_micro.update({n: n for n in ("index", "ids", "logits", "loss_sum", "loss_count", "scores", "kl", "advantages", "old_values", "q", "part_lse")})
    for name, wanted in names.items():
        check(f"convert_name_{name}", seqpar_convert.name_of({"name": name, "micro_batch": "4"}), wanted)
    for micro, number in ((None, 0), ("0", 0), ("3", 3), ("00", 0), ("020", 20)):
        for name, ours in per_micro.items():
            tag = {"name": name} if micro is None else {"name": name, "micro_batch": micro}
            check(f"convert_name_{name}_{micro}", seqpar_convert.name_of(tag), f"{number}.{ours}")
    check("convert_name_none", seqpar_convert.name_of({}), None)


class Array:
    """An array of torch as far as the converter knows it."""

    def __init__(self, x):
        self.x, self.dtype = x, f"torch.{x.dtype.name}"

    def detach(self):
        return self

    cpu = contiguous = detach

    def numpy(self):
        return self.x


def test_values():
    for name, value, shape, data in (
            ("loss", 2.5, [], [2.5]), ("loss", 7, [], [7]), ("loss", numpy.array([[2.5]]), [], [2.5]), ("norm", Array(numpy.ones((1, 1, 1))), [], [1]),
            ("norm", [3], [], [3]), ("0.ids", [1, 2], [2], [1, 2]), ("0.ids", Array(numpy.array([[1, 2]])), [2], [1, 2]),
            ("0.ids", [[1, 2], [3, 4]], [2, 2], [1, 2, 3, 4]), ("0.ids", [[[1]]], [1], [1]), ("12.logits", [[[1, 2]]], [1, 2], [1, 2]),
            ("0.lse", [[1, 2]], [1, 2], [1, 2]), ("0.q", [[[[1]]]], [1, 1, 1], [1]), ("0.part_out", [[[[1]]]], [1, 1, 1, 1], [1]),
            ("0.part_out", [[[[[1]]]]], [1, 1, 1, 1], [1]), ("grad.lse", [[[1]]], [1, 1, 1], [1]), ("grad.0.ids", [[1]], [1, 1], [1])):
        entry = seqpar_convert.tensor_of("x.pt", name, value)
        found = entry["shape"], numpy.frombuffer(entry["data"], KINDS[entry["dtype"]]).tolist()
        check(f"convert_value_{name}_{numpy.shape(value) or type(value).__name__}", found, (shape, data))
    for name, value, wanted in (("loss", [1, 2], "loss has the shape [2], but it is one number"),
                                ("norm", Array(numpy.ones((2, 2))), "norm has the shape [2, 2], but it is one number"),
                                ("norm", [], "norm has the shape [0], but it is one number"),
                                ("loss", "abc", "loss: no numbers: ValueError could not convert string to float: 'abc'"),
                                ("loss", 10**400, "loss: no numbers: OverflowError int too large to convert to float"),
                                ("grad.w", None, "grad.w: ValueError arrays of object are not written; give one of bool, uint8, int8, int16, int32, "
                                 "int64, float16, bfloat16, float32, float64")):
        check(f"convert_value_refuses_{name}_{len(wanted)}", sentence(seqpar_convert.tensor_of, "x.pt", name, value), f"error: x.pt: {wanted}")
    said = sentence(seqpar_convert.tensor_of, "x.pt", "0.ids", [[1], [2, 3]])
    objects = "error: x.pt: 0.ids: ValueError arrays of object"  # numpy before 1.24 makes such an array of it
    check("convert_value_refuses_ragged", str(said).startswith(("error: x.pt: 0.ids: no numbers: ValueError ", objects)), True)


# ---- places ----

def test_places():
    """Row by row: sp, and which tokens each of its ranks holds."""
    for layout, row in (("contiguous", [[0, 1, 2, 3]]), ("contiguous", [[0, 1, 2], [3, 4, 5]]), ("contiguous", [[0], [1], [2]]),
                        ("zigzag", [[0, 1, 2, 3]]), ("zigzag", [[0, 3], [1, 2]]), ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
                        ("zigzag", [[0, 1, 2, 15, 16, 17], [3, 4, 5, 12, 13, 14], [6, 7, 8, 9, 10, 11]])):
        for rank in range(2 * len(row)):
            mine = row[rank % len(row)]
            check(f"convert_places_{layout}_{len(mine)}_{rank}_of_{len(row)}", seqpar_convert.places(layout, len(row), rank, len(mine)).tolist(), mine)
    for tokens in (1, 3, 5):
        said = sentence(seqpar_convert.places, "zigzag", 2, 3, tokens)
        check(f"convert_places_odd_{tokens}", said, f"error: rank 3 has {tokens} tokens: zigzag deals two equal pieces; dump the name index")


def test_add_places():
    def ids(*shape):
        return {"shape": list(shape)}
    for case, layout, tensors, micro, wanted in (
            ("no_layout", None, {"0.ids": ids(4)}, 1, {}), ("none", "zigzag", {"grad.w": ids(4)}, 1, {}),
            ("last", "contiguous", {"2.ids": ids(2), "10.ids": ids(1)}, 11, {"2.index": [2, 3], "10.index": [1]}),
            ("without_ids", "zigzag", {"1.logp": ids(4), "0.ids": ids(4)}, 2, {"0.index": [2, 3, 4, 5]}),
            ("a_row", None, {"0.ids": ids(2, 4)}, 1, {}), ("own", "contiguous", {"0.ids": ids(2, 4), "0.index": ids(9)}, 1, {})):
        given = dict(tensors)
        check(f"convert_add_{case}_count", seqpar_convert.add_places(given, layout, 2, 1), micro)
        check(f"convert_add_{case}", {n: numpy.frombuffer(x["data"], "<i8").tolist() for n, x in given.items() if n not in tensors}, wanted)
    for shape in ((2, 4), ()):
        said = sentence(seqpar_convert.add_places, {"3.ids": ids(*shape)}, "zigzag", 2, 5)
        check(f"convert_add_refuses_{len(shape)}", said, f"error: rank 5: 3.ids has the shape {list(shape)}; a micro-batch is one row of tokens")


# ---- SGLang ----

def pt(path, value):
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))


def named(*worlds, name="name=norm", value=1.5):
    """A file a rank, whose dumper says how large the world is, or nothing: None."""
    return {f"rank={rank}___{name}.pt": {"value": value, "meta": {} if world is None else {"world_size": world}} for rank, world in enumerate(worlds)}


def test_worlds():
    for case, files, words, world, sp in (
            ("said", named(4, 4), (), "4", "1"), ("first", named(4, 2), (), "4", "1"), ("last", named(2, 4), ("--sp", 2), "4", "2"),
            ("none", named(None, None), (), "2", "1"), ("zero", named(0), (), "1", "1"), ("one_says", named(None, 6), ("--sp", 3), "6", "3"),
            ("all_of_it", named(3), ("--sp", 3), "3", "3"), ("large", named((1 << 20) - 1), (), "1048575", "1"),
            ("bare", {"rank=0___name=norm.pt": 1.5, "rank=1___name=norm.pt": 1.5}, (), "2", "1"),
            ("text", {"rank=0___name=norm.pt": {"value": 1.5, "meta": "none"}}, (), "1", "1"),
            ("beside", {"rank=0___name=norm.pt": {"value": 1.5, "meta": {}, "world_size": 5}}, (), "1", "1"),
            ("without", {"rank=0___name=norm.pt": {"value": 1.5}}, (), "1", "1")):
        where = placed(f"world_{case}", pt, files)
        check(f"convert_world_{case}", program("sglang", where, folder / f"world_{case}.out", *words), (0, ""))
        check(f"convert_world_files_{case}", read(folder / f"world_{case}.out"), {
            f"rank{rank}.safetensors": ({"seqpar_dump": "1", "world": world, "sp": sp, "accumulation": "1", "rank": str(rank)}, {"norm": ([], [1.5])})
            for rank in range(len(files))})


def test_step():
    """Of two steps, one is asked for; names that say no step are of step 0."""
    files = {"step=0___rank=0___name=loss.pt": 1, "rank=1___name=loss.pt": 2, "step=1___rank=0___name=loss.pt": 3, "step=0___rank=0___name=hidden.pt": b"",
             "step=1___rank=x___name=hidden.pt": b"", "deep/step=1___rank=2___name=loss.pt": 4}
    where = placed("steps", pt, files)
    for words, wanted in (((), {"rank0": 1, "rank1": 2}), (("--step", 0), {"rank0": 1, "rank1": 2}), (("--step", 1), {"rank0": 3, "rank2": 4})):
        out = folder / f"steps{len(wanted)}{''.join(map(str, words))}"
        check(f"convert_{out.name}", program("sglang", where, out, *words), (0, ""))
        check(f"convert_{out.name}_files", {name.split(".")[0]: x[1]["loss"][1][0] for name, x in read(out).items()}, wanted)
    refuses("steps", where, "{at}: no file of step 2 has a name that is known", "--step", 2)


def micro_batches(most, least):
    """Two ranks of two micro-batches and one; the second writing of a log-prob is that of a recomputation."""
    ids = "rank={}___micro_batch={}___name=input_ids.pt"
    return {ids.format(most, 0): [[1, 2]], ids.format(most, "01"): [3, 4], ids.format(least, 0): [5, 6],
            f"rank={most}___name=log_probs___recompute_status=disabled.pt": [7, 8],
            f"rank={most}___name=log_probs___recompute_status=recompute.pt": [9, 9], f"rank={least}___name=index.pt": [8, 9]}


def test_micro_batches():
    """The accumulation is that of the rank that has most."""
    for most, places in (0, [0, 3]), (1, [1, 2]):
        where, out = placed(f"micro{most}", pt, micro_batches(most, 1 - most)), folder / f"micro{most}.out"
        said = program("sglang", where, out, "--sp", 2, "--layout", "zigzag", "--metadata", "objective=dpo", "note=a=b", "empty=")
        check(f"convert_micro_{most}", said, (0, ""))
        metadata = {"seqpar_dump": "1", "world": "2", "sp": "2", "accumulation": "2", "objective": "dpo", "note": "a=b", "empty": ""}
        wanted = {most: {"0.ids": [1, 2], "1.ids": [3, 4], "0.logp": [7, 8], "0.index": places, "1.index": places},
                  1 - most: {"0.ids": [5, 6], "0.index": [8, 9]}}
        check(f"convert_micro_files_{most}", read(out), {
            f"rank{rank}.safetensors": ({**metadata, "rank": str(rank)}, {n: ([2], x) for n, x in tensors.items()}) for rank, tensors in wanted.items()})


def test_refused():
    whole, known = "its name says no {}, a whole number", "rank=0___name=norm.pt"
    code = b"cposix\nsystem\n(S'false'\ntR."
    for case, files, wanted, *words in (
            ("no_rank", {"name=norm.pt": 1}, "{at}/name=norm.pt: " + whole.format("rank")),
            *((f"rank_{at}", {f"rank={text}___name=norm.pt": 1}, f"{{at}}/rank={text}___name=norm.pt: " + whole.format("rank"))
              for at, text in enumerate(("", "-1", "x", "\u00b2", "1234567890"))),
            *((f"micro_{at}", {f"rank=0___micro_batch={text}___name=ids.pt": 1}, f"{{at}}/rank=0___micro_batch={text}___name=ids.pt: "
               + whole.format("micro_batch")) for at, text in enumerate(("", "-1", "x", "\u00b2", "1234567890"))),
            ("second", {"rank=07___name=norm.pt": 1, "rank=7___name=norm.pt": 1}, "{at}/rank=7___name=norm.pt: a second norm of rank 7 in step 0; tell "
             "micro-batches apart by a tag micro_batch=A"),
            ("second_ids", {"step=3___rank=0___name=ids.pt": 1, "step=3___rank=0___name=input_ids.pt": 1}, "{at}/step=3___rank=0___name=input_ids.pt: a "
             "second 0.ids of rank 0 in step 3; tell micro-batches apart by a tag micro_batch=A", "--step", 3),
            *((f"world_{at}", {known: {"value": 1, "meta": {"world_size": world}}}, f"{{at}}/{known}: its world_size is {str(world)[:40]}; a whole number "
               "is needed") for at, world in enumerate(("two", -1, 1 << 20, 1.5, "x" * 41))),
            ("killed", {known: b""}, f"{{at}}/{known}: is empty, as a rank that was killed leaves it; dump the step anew"),
            ("code", {known: code}, f"{{at}}/{known}: torch reads no tensors from it: it holds more than tensors"),
            ("damaged", {known: b"none"}, f"{{at}}/{known}: torch reads no tensors from it: UnpicklingError "),
            ("no_value", {known: {"meta": {}}}, f"{{at}}/{known}: norm: no numbers: TypeError float() argument must be "),
            ("sp_0", named(2), "--sp is 0; give a number from 1", "--sp", 0), ("sp_minus", named(2), "--sp is -1; give a number from 1", "--sp", -1),
            ("sp_3", named(4), "--sp is 3; give a number that divides the world of 4", "--sp", 3),
            ("sp_4", named(2), "--sp is 4; give a number that divides the world of 2", "--sp", 4),
            ("metadata", named(2), "--metadata is dpo; give KEY=VALUE", "--metadata", "a=b", "dpo"),
            ("odd", {"rank=1___name=ids.pt": [1, 2, 3]}, "rank 1 has 3 tokens: zigzag deals two equal pieces; dump the name index", "--layout", "zigzag"),
            ("rows", {"rank=1___name=ids.pt": [[1, 2], [3, 4]]}, "rank 1: 0.ids has the shape [2, 2]; a micro-batch is one row of tokens",
             "--layout", "contiguous")):
        where = placed(f"pt_{case}", pt, files)
        out = folder / f"pt_{case}.out"
        code, said = program("sglang", where, out, *words)
        wanted = "error: " + wanted.format(at=where)
        check(f"convert_refuses_pt_{case}", (code, said[:len(wanted)] if wanted[-1] == " " else said, out.exists()), (1, wanted, False))
    check("convert_refuses_layout", program("sglang", folder, "out", "--layout", "ring")[0], 2)
    check("convert_refuses_kind", program("pickle", folder, "out")[0], 2)
    check("convert_helps", program("--help")[1].count("metadata.rank"), 1)
    sys.modules["torch"] = None
    refuses("without_torch", folder / "world_said", f"{{at}}/rank=0___name=norm.pt: torch is needed to read it; install torch")


sys.modules["torch"] = types.SimpleNamespace(load=load)
test_npz()
test_npz_refused()
test_folders()
test_save()
test_words()
test_names()
test_values()
test_places()
test_add_places()
test_worlds()
test_step()
test_micro_batches()
test_refused()
sys.exit(failed > 0)
