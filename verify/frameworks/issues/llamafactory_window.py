# SPDX-License-Identifier: MIT OR Unlicense
"""Title: v1 with cp_size > 1: sliding_window, softcap and softmax_scale do not arrive
Packages: llamafactory torch
Mistake: window_missing
Expected: what the attention is asked for arrives, as it does with cp_size 1; or a refusal.
Why: new_flash_attn_forward takes them by **kwargs and hands on none of them; UlyssesAttention
sets softmax_scale to 1 / sqrt(head_dim). Models with a window, a cap of scores or a scale of
their own (Mistral, Gemma 2, Granite) are trained with another attention than is used later.
attn_fn stands for transformers' _flash_attention_forward here: it computes what it is told.
"""
import os

os.environ.update(DISABLE_VERSION_CHECK="1", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29562")
import torch
import torch.distributed as dist

TOKENS, HEADS, WIDTH = 24, 4, 8


def attention(query, key, value, attention_mask, query_length, is_causal, softmax_scale=None,
              sliding_window=None, softcap=None, **_):
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (softmax_scale or WIDTH ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(query_length)[:, None] - torch.arange(query_length)
    seen = (distance >= 0) & (distance < (sliding_window or query_length))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def main(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel as sp
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, TOKENS, HEADS, WIDTH, generator=draw)
    own = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
    for asked in ({}, {"sliding_window": 4}, {"softmax_scale": 0.5}, {"softcap": 1.0}):
        want = attention(q, k, v, None, TOKENS, True, **asked)[:, own]
        got = sp.new_flash_attn_forward(
            q[:, own], k[:, own], v[:, own], None, sequence_parallel_size=2,
            group=dist.group.WORLD, attn_fn=attention, query_length=TOKENS // 2, **asked)
        away = float((got - want).norm() / want.norm())
        print(f"rank {rank}, asked for {asked}: {away:.1e} away from one rank", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
