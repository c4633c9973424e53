# SPDX-License-Identifier: MIT OR Unlicense
"""Other people's dumps as dumps for `seqpar-verify ver`.

    python -m seqpar_convert npz FOLDER OUT
        FOLDER/*.npz, one a rank. Arrays have the names of verify/oracle/dump.h ("0.ids", "grad.w"); metadata are strings in
        arrays without dimensions: "metadata.rank", "metadata.world", "metadata.sp" and what else differs from the defaults.
    python -m seqpar_convert sglang FOLDER OUT --sp 2 [--step 0] [--layout zigzag]
        What SGLang's dumper wrote (step=..___rank=..___name=...pt; needs torch). Names that are known: NAMES below, param__X,
        grad__param__X, and all of a micro-batch in dump.h. A tag micro_batch=A says which micro-batch; without it there is one.
        Tokens' places: name "index"; or --layout, of a row that divides by 2 sp.
"""
import argparse
import pathlib

import numpy

from seqpar_dump import ATTENTION, MICRO_BATCH, OF_OBJECTIVE, _entry, _write

NAMES = {"input_ids": "ids", "position_ids": "positions", "cu_seqlens_q": "cu_seqlens", "shift_labels": "labels",
         "log_probs": "logp", "ref_log_probs": "ref_logp", "old_log_probs": "old_logp"}
PER_MICRO_BATCH = {*MICRO_BATCH, *ATTENTION, *(name for names in OF_OBJECTIVE.values() for name in names)}


def refuse(sentence):
    raise SystemExit(f"error: {sentence}")


def flat(entry, name):
    """A micro-batch is one row: (1, n) is (n); attention keeps its heads."""
    if name.split(".")[-1] not in ATTENTION:
        entry["shape"] = [int(numpy.prod(entry["shape"]))]
    return entry


def save(folder, rank, tensors, metadata):
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    _write(str(pathlib.Path(folder) / f"rank{rank}.safetensors"), tensors, {"seqpar_dump": "1", "rank": str(rank), **metadata})


def convert_npz(folder, out):
    files = sorted(pathlib.Path(folder).glob("*.npz"))
    if not files:
        refuse(f"{folder}: no .npz file")
    for path in files:
        with numpy.load(path) as arrays:
            metadata = {k[9:]: str(arrays[k]) for k in arrays.files if k.startswith("metadata.")}
            if "rank" not in metadata or "world" not in metadata:
                refuse(f"{path}: arrays metadata.rank and metadata.world are missing")
            tensors = {k: _entry(arrays[k]) for k in arrays.files if not k.startswith("metadata.")}
        save(out, metadata.pop("rank"), tensors, metadata)


def tags(path):
    """step=0___rank=1___name=input_ids.pt as a dict."""
    return dict(part.split("=", 1) for part in path.name[:-len(".pt")].split("___") if "=" in part)


def sglang_name(tag):
    """The name in the dump, or None: nothing that is judged."""
    name = tag.get("name", "")
    if name.startswith("grad__param__"):
        return "grad." + name[len("grad__param__"):]
    if name.startswith("param__"):
        return "param." + name[len("param__"):]
    name = NAMES.get(name, name)
    if name in ("loss", "norm"):
        return name
    return f"{tag.get('micro_batch', 0)}.{name}" if name in PER_MICRO_BATCH else None


def places(layout, sp, rank, tokens):
    """Of the tokens that a rank holds, in the row before the split."""
    if layout == "contiguous":
        return numpy.arange(tokens) + rank % sp * tokens
    half, member = tokens // 2, rank % sp
    if tokens % 2:
        refuse(f"rank {rank} has {tokens} tokens: zigzag deals two equal pieces; dump the name index")
    return numpy.concatenate([numpy.arange(half) + member * half, numpy.arange(half) + (2 * sp - 1 - member) * half])


def convert_sglang(folder, out, sp, step, layout):
    import torch
    ranks = {}
    for path in sorted(pathlib.Path(folder).rglob("*.pt")):
        tag = tags(path)
        name = sglang_name(tag)
        if tag.get("step", "0") != str(step) or name is None:
            continue
        value = torch.load(path, map_location="cpu", weights_only=True)
        value = value["value"] if isinstance(value, dict) and "value" in value else value
        tensors = ranks.setdefault(int(tag["rank"]), {})
        if name in tensors and tag.get("recompute_status") != "recompute":
            refuse(f"{path}: a second {name} of rank {tag['rank']} in step {step}; tag micro-batches with micro_batch=A")
        tensors.setdefault(name, flat(_entry(value), name) if name.split(".")[0].isdigit() else _entry(value))
    if not ranks:
        refuse(f"{folder}: no file of step {step} whose name is known")
    for rank, tensors in ranks.items():
        micro = sorted({int(n.split(".")[0]) for n in tensors if n.split(".")[0].isdigit()})
        for a in micro:
            if layout and f"{a}.index" not in tensors and f"{a}.ids" in tensors:
                tensors[f"{a}.index"] = _entry(places(layout, sp, rank, tensors[f"{a}.ids"]["shape"][0]))
        save(out, rank, tensors, {"world": str(len(ranks)), "sp": str(sp), "accumulation": str(max(micro, default=0) + 1)})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["npz", "sglang"])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--layout", choices=["contiguous", "zigzag"])
    words = parser.parse_args()
    if words.kind == "npz":
        convert_npz(words.folder, words.out)
    else:
        convert_sglang(words.folder, words.out, words.sp, words.step, words.layout)


if __name__ == "__main__":
    main()
