#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""demos/01_ring.c from Python: ring attention on four ranks through libseqpar.so, and the bits of one rank.

    make shared && python3 demos/ring.py [libseqpar.so]
"""
import os
import sys
from ctypes import (CDLL, CFUNCTYPE, POINTER, Structure, addressof, c_char, c_char_p, c_double, c_float, c_int,
                    c_int64, c_uint64, c_void_p, sizeof)

VERSION = "0.2.0"  # of the seqpar.h that the structs below follow
ZIGZAG, RING = 1, 0  # of enum seqpar_layout_id and seqpar_schedule_id
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 1000, 4, 2, 32
WIDE, NARROW = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", "build", "libseqpar.so")
try:
    lib = CDLL(path)
    lib.seqpar_version.restype = c_char_p
    version = lib.seqpar_version().decode()
except (OSError, AttributeError) as error:
    sys.exit(f"ring.py: {error}; make shared builds build/libseqpar.so")
if version != VERSION:
    sys.exit(f"ring.py: {path} is seqpar {version}, but the structs in ring.py are those of {VERSION}")


def struct(name, *fields):
    """The class of seqpar_NAME. fields: a type and the names of some fields that have it, in the order of seqpar.h."""
    made = type(name, (Structure,), {"_fields_": [(field, kind) for kind, names in fields for field in names.split()]})
    size = lib["seqpar_sizeof_" + name]()
    if sizeof(made) != size:
        sys.exit(f"ring.py: seqpar_{name} has {sizeof(made)} bytes here and {size} in {path}; compare its fields with seqpar.h")
    return made


Error = struct("error", (c_int, "status"), (c_int64, "rank"), (c_char * 512, "text"))
Comm = struct("comm", (c_void_p, "table"), (c_int64, "rank size"), (c_void_p, "error"),
              (c_int64, "bytes_sent messages_sent queue_groups queue_sum"), (c_void_p, "device"), (c_int64, "contexts"), (c_void_p, "state"))
# of a context the comms are read here, and only the library looks at the rest
Ctx = struct("ctx", (c_void_p, "error device queue"), (POINTER(Comm), "world sp"),
             (c_char * (lib.seqpar_sizeof_ctx() - 5 * sizeof(c_void_p)), "rest"))
Row = struct("row", (c_int64, "index tokens cell docs"), (POINTER(c_int64), "cu_seqlens"),
             (c_void_p, "ids targets position_ids doc_source prefix_lens"))
Share = struct("share", (c_void_p, "pieces"), (c_int64, "count tokens"), (c_void_p, "rows"), (c_int64, "row_count"),
               (c_int, "layout"), (c_int64, "sp_size sp_rank"))
AttnDesc = struct("attn_desc", (c_int64, "heads kv_heads head_dim"), (c_double, "scale"), (c_int, "layout schedule"),
                  (c_int64, "heads_k_stride ulysses_size"), (c_int, "ulysses_replicate full"), (c_int64, "window"),
                  (c_double, "softcap dropout"), (c_int, "relaxed"), (c_void_p, "kernel"))
AttnIo = struct("attn_io", (c_void_p, "q k v out lse dout dq dk dv sinks dsinks"), (c_uint64, "dropout_seed dropout_stream"),
                (c_int64, "q_stride k_stride v_stride dq_stride dk_stride dv_stride"))
RankMain = CFUNCTYPE(c_int, POINTER(Comm), c_void_p)

for name, result, *arguments in [
        ("random_normal", c_double, c_uint64, c_uint64, c_uint64),
        ("run_threads", c_int, c_int64, RankMain, c_void_p, POINTER(Error)),
        ("device_cpu", c_void_p, c_int64),
        ("device_close", None, c_void_p),
        ("ctx_open", c_int, POINTER(Ctx), POINTER(Comm), c_void_p, c_int64),
        ("ctx_close", None, POINTER(Ctx)),
        ("attn_open", c_int, POINTER(Ctx), POINTER(c_void_p), POINTER(Row), c_int64, POINTER(AttnDesc)),
        ("attn_share", POINTER(Share), c_void_p),
        ("attn_forward", c_int, POINTER(Ctx), c_void_p, POINTER(AttnIo)),
        ("attn_close", None, POINTER(Ctx), c_void_p),
        ("scatter", None, c_void_p, c_void_p, POINTER(Share), c_int64, c_int64),
        ("gather", None, c_void_p, c_void_p, POINTER(Share), c_int64, c_int64)]:
    function = getattr(lib, "seqpar_" + name)
    function.restype, function.argtypes = result, arguments

cu_seqlens = (c_int64 * 4)(0, 420, 421, TOKENS)  # three documents, one of a single token
row = Row(tokens=TOKENS, cell=32, docs=3, cu_seqlens=cu_seqlens)
q, k, v = [(c_float * (TOKENS * width))(*[lib.seqpar_random_normal(1, stream, i) for i in range(TOKENS * width)])
           for stream, width in enumerate((WIDE, NARROW, NARROW))]


def attend(ctx, out):
    attn = c_void_p()
    desc = AttnDesc(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, layout=ZIGZAG, schedule=RING)
    status = lib.seqpar_attn_open(ctx, attn, row, 1, desc)
    if status:
        return status
    mine = lib.seqpar_attn_share(attn)  # the tokens this rank holds
    widths = {"q": WIDE, "k": NARROW, "v": NARROW, "out": WIDE, "lse": HEADS}
    own = {name: (c_float * (mine.contents.tokens * width))() for name, width in widths.items()}
    for name, whole in ("q", q), ("k", k), ("v", v):
        lib.seqpar_scatter(own[name], whole, mine, 0, widths[name] * sizeof(c_float))
    io = AttnIo(**{name: addressof(array) for name, array in own.items()})
    status = lib.seqpar_attn_forward(ctx, attn, io)
    lib.seqpar_gather(out, own["out"], mine, 0, WIDE * sizeof(c_float))
    lib.seqpar_attn_close(ctx, attn)
    return status


def run(ranks):
    out, sent, error = (c_float * (TOKENS * WIDE))(), {}, Error()

    @RankMain
    def rank_main(world, user):  # in a thread of its own on every rank
        device, ctx = lib.seqpar_device_cpu(1), Ctx()
        status = lib.seqpar_ctx_open(ctx, world, device, ranks)
        if not status:
            status = attend(ctx, out)
        if not status:
            sent[world.contents.rank] = ctx.sp.contents.bytes_sent
        lib.seqpar_ctx_close(ctx)
        lib.seqpar_device_close(device)
        return status

    if lib.seqpar_run_threads(ranks, rank_main, None, error):
        sys.exit(error.text.decode())
    print(f"{ranks} rank{'s' if ranks > 1 else ' '}: out[999] = {out[999 * WIDE]:.5g} ..., rank 0 sent {sent[0]} bytes")
    return bytes(out)


same = run(1) == run(4)
print("identical bits:", "yes" if same else "no")
sys.exit(not same)
