#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""nf4.py - matrices in four bits as bitsandbytes keeps them: verify/second/golden_nf4.tsv, which test_numerics reads.

    python3 verify/second/golden/nf4.py > verify/second/golden_nf4.tsv        needs torch and bitsandbytes; 0.50.2 made it

Columns: rows, columns, kind of the values (value() below, nf4_value of verify/support/nf4.h), crc32 of codes, scales, steps and of
the values that come back, offset; and of small ones all of steps, scales and codes, bytes in hex."""
import ctypes
import zlib

import numpy
import torch


def no_library(*_):
    raise OSError("left out")


# Its library for CPUs takes bytes from a table that is coarser than the midpoints which its kernels for GPUs and the code
# without a library go by.
ctypes.cdll.LoadLibrary, kept = no_library, ctypes.cdll.LoadLibrary
import bitsandbytes  # noqa: E402
import bitsandbytes.functional  # noqa: E402
ctypes.cdll.LoadLibrary = kept

SHAPES = [(7, 11, 0), (37, 61, 1), (3, 64, 2), (128, 129, 0), (67, 1009, 1), (300, 64, 1), (131, 257, 2)]


def value(n, kind):
    h = (n * 2654435761 + kind * 40503 + 12345) & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 2246822519 & 0xFFFFFFFF
    h ^= h >> 13
    single = numpy.float32
    return single(h % 20011 - 10005) / single(10005) * single([1, 0.02, 0.0003][kind])


def line(rows, cols, kind):
    x = numpy.array([value(n, kind) for n in range(rows * cols)], dtype=numpy.float32).reshape(rows, cols)
    codes, state = bitsandbytes.functional.quantize_4bit(torch.tensor(x), blocksize=64, compress_statistics=True,
                                                         quant_type="nf4")
    back = bitsandbytes.functional.dequantize_4bit(codes, state).numpy().tobytes()
    parts = [codes.numpy().tobytes(), state.absmax.numpy().tobytes(), state.state2.absmax.numpy().tobytes()]
    fields = [rows, cols, kind, *(f"{zlib.crc32(part):08x}" for part in (*parts, back)),
              f"{int(state.offset.numpy().view(numpy.uint32)):08x}"]
    small = rows * cols < 3000
    return "\t".join(map(str, fields + ([part.hex() for part in reversed(parts)] if small else ["-"] * 3)))


print("# SPDX-License-Identifier: MIT OR Unlicense")
print(f"# bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}: verify/second/golden/nf4.py")
for shape in SHAPES:
    print(line(*shape))
