# SPDX-License-Identifier: MIT OR Unlicense
"""Other people's dumps as dumps for `seqpar-verify ver`.

    python -m seqpar_convert npz FOLDER OUT
        FOLDER/*.npz, one a rank. Arrays have the names of verify/oracle/dump/dump.h ("0.ids",
        "grad.w"); metadata are strings in arrays without dimensions: "metadata.rank",
        "metadata.world", "metadata.sp" and what else differs from the defaults.
    python -m seqpar_convert sglang FOLDER OUT --sp 2 [--step 0] [--layout zigzag]
            [--metadata objective=dpo ...]
        What SGLang's dumper wrote (step=..___rank=..___name=...pt; needs torch). Names that
        are known: loss, norm, all of a micro-batch in dump.h, NAMES below, param__X and
        grad__param__X (reduced gradients, before clip). A tag micro_batch=A says which
        micro-batch; without it there is one. Tokens' places: name "index", or --layout, of a
        row that divides by sp (contiguous) or 2 sp (zigzag).

OUT is made whole, or not at all.
"""
import argparse
import os
import pathlib
import shutil

import numpy

from seqpar_dump import ATTENTION, MICRO_BATCH, OF_OBJECTIVE, _entry, _write, dimensions

NAMES = {"input_ids": "ids", "position_ids": "positions", "cu_seqlens_q": "cu_seqlens",
         "shift_labels": "labels", "log_probs": "logp", "ref_log_probs": "ref_logp",
         "old_log_probs": "old_logp", "grad_norm": "norm"}
PREFIXES = {"grad__param__": "grad.", "param__": "param."}
PER_MICRO_BATCH = {*MICRO_BATCH, *ATTENTION, *(n for names in OF_OBJECTIVE.values() for n in names)}


def refuse(sentence):
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    raise SystemExit(f"error: {''.join(shown)}")


def reason(why):
    return f"{type(why).__name__} {why}".strip().split("\n")[0][:200]


def is_whole(text):
    """A rank, a world or a micro-batch: digits alone, and few enough for a number that C reads."""
    return text.isascii() and text.isdigit() and len(text) < 10


def files_of(folder, found, what):
    """The files in order, or one sentence."""
    if not pathlib.Path(folder).is_dir():
        refuse(f"{folder}: no such folder")
    files = sorted(found(pathlib.Path(folder)))
    return files or refuse(f"{folder}: no {what}")


def save(out, ranks):
    """ranks: metadata and tensors by rank. Written beside and renamed."""
    if os.path.exists(out):
        refuse(f"{out}: is there already; name a folder that is not")
    beside = f"{out}.tmp.{os.getpid()}"
    try:
        os.makedirs(beside)
    except OSError as e:
        refuse(f"{out}: cannot be made: {e.strerror}")
    try:
        for rank, (metadata, tensors) in ranks.items():
            path = os.path.join(beside, f"rank{rank}.safetensors")
            _write(path, tensors, {"seqpar_dump": "1", **metadata, "rank": str(rank)})
        os.rename(beside, out)
    except OSError as e:
        refuse(f"{out}: {e.strerror}; nothing was written")
    finally:
        shutil.rmtree(beside, ignore_errors=True)


# ---- npz ----

def read_npz(path):
    """Metadata and tensors of a rank."""
    try:
        with numpy.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as e:  # a damaged archive fails in zipfile, zlib, ast and numpy
        refuse(f"{path}: numpy reads no arrays from it: {reason(e)}")
    metadata = {k[9:]: str(v) for k, v in arrays.items() if k.startswith("metadata.")}
    if "rank" not in metadata or "world" not in metadata:
        refuse(f"{path}: has no metadata.rank and metadata.world; add both as arrays of a string")
    for name in ("rank", "world"):  # a file is called by its rank
        if not is_whole(metadata[name]):
            refuse(f"{path}: metadata.{name} is {metadata[name][:40]!r}; give a whole number")
    metadata["rank"] = str(int(metadata["rank"]))
    tensors = {k: x for k, x in arrays.items() if not k.startswith("metadata.")}
    return metadata, {k: entry_of(path, k, x) for k, x in tensors.items()}


def entry_of(path, name, x):
    try:
        return _entry(x)
    except (ValueError, TypeError, AttributeError, RuntimeError) as e:
        refuse(f"{path}: {name}: {reason(e)}")


def convert_npz(folder, out):
    ranks = {}
    for path in files_of(folder, lambda f: f.glob("*.npz"), ".npz file"):
        metadata, tensors = read_npz(path)
        if metadata["rank"] in ranks:
            refuse(f"{path}: a second file of rank {metadata['rank']}")
        ranks[metadata["rank"]] = metadata, tensors
    save(out, ranks)


# ---- SGLang ----

def tags_of(path):
    """step=0___rank=1___name=input_ids.pt as a dict."""
    parts = path.name[:-len(".pt")].split("___")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def name_of(tag):
    """The name in the dump, or None: nothing that is judged."""
    name = tag.get("name", "")
    for prefix, ours in PREFIXES.items():
        if name.startswith(prefix):
            return ours + name[len(prefix):]
    name = NAMES.get(name, name)
    if name in ("loss", "norm"):
        return name
    micro = tag.get("micro_batch", "").lstrip("0") or "0"
    return f"{micro}.{name}" if name in PER_MICRO_BATCH else None


def load_pt(path):
    """The value, and what else the dumper says: its world, for one."""
    if not os.path.getsize(path):
        refuse(f"{path}: is empty, as a rank that was killed leaves it; dump the step anew")
    try:
        import torch
    except ImportError:
        refuse(f"{path}: torch is needed to read it; install torch")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a file of a rank that was killed may end anywhere
        why = "it holds more than tensors" if "weights_only" in str(e) else reason(e)
        refuse(f"{path}: torch reads no tensors from it: {why}")
    if isinstance(loaded, dict) and "value" in loaded:
        meta = loaded.get("meta")
        return loaded["value"], meta if isinstance(meta, dict) else {}
    return loaded, {}


def shaped(entry, name):
    """A micro-batch is one row: (1, n) is (n), (1, n, heads, dim) is (n, heads, dim)."""
    while len(entry["shape"]) > dimensions(name.split(".")[-1]) and entry["shape"][0] == 1:
        entry = dict(entry, shape=entry["shape"][1:])
    return entry


def tensor_of(path, name, value):
    single = name in ("loss", "norm")
    if not hasattr(value, "detach"):
        try:
            value = numpy.float64(value) if single else numpy.asarray(value)
        except (ValueError, TypeError, OverflowError) as e:
            refuse(f"{path}: {name}: no numbers: {reason(e)}")
    entry = entry_of(path, name, value)
    if single and numpy.prod(entry["shape"]) != 1:
        refuse(f"{path}: {name} has the shape {entry['shape']}, but it is one number")
    if single:
        return dict(entry, shape=[])
    return shaped(entry, name) if name.split(".")[0].isdigit() else entry


def read_sglang(folder, step):
    """Tensors by rank, and the number of ranks."""
    ranks, world = {}, 0
    for path in files_of(folder, lambda f: f.rglob("*.pt"), ".pt file"):
        tag = tags_of(path)
        name = name_of(tag)
        if tag.get("step", "0") != str(step) or name is None:
            continue
        for key in ("rank", "micro_batch"):
            if not is_whole(tag.get(key, "0" if key == "micro_batch" else "")):
                refuse(f"{path}: its name says no {key}, a whole number")
        tensors = ranks.setdefault(int(tag["rank"]), {})
        recomputed = tag.get("recompute_status") == "recompute"
        if name in tensors and not recomputed:
            refuse(f"{path}: a second {name} of rank {tag['rank']} in step {step}; tell "
                   "micro-batches apart by a tag micro_batch=A")
        value, meta = load_pt(path)
        said = meta.get("world_size", 0)
        if not isinstance(said, int) or not 0 <= said < 1 << 20:
            refuse(f"{path}: its world_size is {str(said)[:40]}; a whole number is needed")
        world = max(world, said)
        tensors.setdefault(name, tensor_of(path, name, value))
    if not ranks:
        refuse(f"{folder}: no file of step {step} has a name that is known")
    return ranks, world or len(ranks)


def places(layout, sp, rank, tokens):
    """Of the tokens that a rank holds, in the row before the split."""
    member = rank % sp
    if layout == "contiguous":
        return numpy.arange(tokens) + member * tokens
    if tokens % 2:
        refuse(f"rank {rank} has {tokens} tokens: zigzag deals two equal pieces; dump the "
               "name index")
    half = numpy.arange(tokens // 2)
    last = 2 * sp - 1 - member
    return numpy.concatenate([half + member * len(half), half + last * len(half)])


def add_places(tensors, layout, sp, rank):
    """As many micro-batches as the rank has."""
    micro = sorted({int(n.split(".")[0]) for n in tensors if n.split(".")[0].isdigit()})
    for a in micro:
        if layout and f"{a}.index" not in tensors and f"{a}.ids" in tensors:
            if len(tensors[f"{a}.ids"]["shape"]) != 1:
                refuse(f"rank {rank}: {a}.ids has the shape {list(tensors[f'{a}.ids']['shape'])}; a "
                       "micro-batch is one row of tokens")
            tokens = tensors[f"{a}.ids"]["shape"][0]
            tensors[f"{a}.index"] = _entry(places(layout, sp, rank, tokens))
    return max(micro, default=0) + 1


def convert_sglang(words):
    ranks, world = read_sglang(words.folder, words.step)
    metadata = {"world": str(world), "sp": str(words.sp)}
    if world % words.sp:
        refuse(f"--sp is {words.sp}; give a number that divides the world of {world}")
    most = max(add_places(t, words.layout, words.sp, rank) for rank, t in ranks.items())
    metadata["accumulation"] = str(most)
    for pair in words.metadata:
        key, given, value = pair.partition("=")
        metadata[key] = value if given else refuse(f"--metadata is {pair}; give KEY=VALUE")
    save(words.out, {rank: (metadata, tensors) for rank, tensors in ranks.items()})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["npz", "sglang"])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--layout", choices=["contiguous", "zigzag"])
    parser.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    words = parser.parse_args()
    if words.sp < 1:
        refuse(f"--sp is {words.sp}; give a number from 1")
    if words.kind == "npz":
        convert_npz(words.folder, words.out)
    else:
        convert_sglang(words)


if __name__ == "__main__":
    main()
