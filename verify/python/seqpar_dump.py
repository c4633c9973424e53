# SPDX-License-Identifier: MIT OR Unlicense
"""Writes down what a rank did in one training step, for `seqpar-verify ver`.

    import seqpar_dump
    dump = seqpar_dump.Dump("dump", rank, world, sp=4, accumulation=2)
    for a, batch in enumerate(micro_batches):
        ...                                            # forward and backward
        dump.micro_batch(a, index=places, ids=ids, positions=positions, labels=shifted_labels,
                         logp=logp, cu_seqlens=cu_seqlens)
    dump.step(loss, {n: p.grad for n, p in model.named_parameters()})  # reduced, before clip

Arrays of numpy, torch or JAX, also bf16 and fp16, are written bit for bit. What each is, and
which may be left out (all of them), stands in verify/oracle/dump.h. Needs numpy alone: safetensors'
own writer takes no bf16 from numpy, and its lower calls differ between versions.
"""
import json
import os

import numpy

DTYPES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
          "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
MICRO_BATCH = ("index", "ids", "positions", "labels", "logp", "ref_logp", "cu_seqlens")


def _entry(x):
    """Type, shape and bytes of an array, whoever's it is."""
    if hasattr(x, "detach"):  # torch, whose bf16 numpy does not know
        x = x.detach().cpu().contiguous()
        name = str(x.dtype).split(".")[-1]
        if name == "bfloat16":
            import torch
            x = x.view(torch.int16)
        x = x.numpy()
    else:
        x = numpy.ascontiguousarray(x) if numpy.ndim(x) else numpy.asarray(x)
        name = x.dtype.name
    if name not in DTYPES:
        raise ValueError(f"arrays of {name} are not written; give one of {', '.join(DTYPES)}")
    return {"dtype": DTYPES[name], "shape": list(x.shape), "data": x.astype(x.dtype.newbyteorder("<")).tobytes()}


def _write(path, tensors, metadata):
    """A safetensors file: the header's length, the header, and the bytes of all tensors."""
    header, at = {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": x["dtype"], "shape": x["shape"], "data_offsets": [at, at + len(x["data"])]}
        at += len(x["data"])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = f"{path}.tmp.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(x["data"] for x in tensors.values())
    os.replace(temporary, path)


class Dump:
    """What one rank did. The file appears, whole, when step() is called."""

    def __init__(self, folder, rank, world, sp=1, accumulation=1, objective="sft", beta=0.1):
        if not 0 <= rank < world or world % sp:
            raise ValueError(f"rank {rank} of {world}, sp {sp}: rank is 0 to world - 1, and sp divides world")
        self.path = os.path.join(folder, f"rank{rank}.safetensors")
        self.accumulation = accumulation
        self.metadata = {"seqpar_dump": "1", "rank": str(rank), "world": str(world), "sp": str(sp),
                         "accumulation": str(accumulation), "objective": objective, "beta": repr(float(beta))}
        self.tensors = {}
        os.makedirs(folder, exist_ok=True)

    def micro_batch(self, number, **arrays):
        """Arrays by name, of one row of tokens: those of MICRO_BATCH."""
        if not 0 <= number < self.accumulation:
            raise ValueError(f"micro-batch {number} of {self.accumulation}")
        for name, x in arrays.items():
            if name not in MICRO_BATCH:
                raise ValueError(f"what is {name}? a micro-batch has {', '.join(MICRO_BATCH)}")
            entry = _entry(x)
            if any(n != 1 for n in entry["shape"][:-1]):
                raise ValueError(f"{name} has shape {entry['shape']}; a micro-batch is one row, write several as several")
            entry["shape"] = [int(numpy.prod(entry["shape"]))]  # (1, n) is (n)
            self.tensors[f"{number}.{name}"] = entry

    def step(self, loss=None, gradients=None):
        """Loss as this rank reports it; whole gradients by parameter, None for those without."""
        if loss is not None:
            self.tensors["loss"] = _entry(numpy.float64(float(loss)))
        for name, x in (gradients or {}).items():
            if x is not None:
                self.tensors["grad." + name] = _entry(x)
        _write(self.path, self.tensors, self.metadata)
