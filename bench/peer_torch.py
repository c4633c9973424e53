#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""Seconds that PyTorch's scaled_dot_product_attention takes, one thread, fp32, for bench_cpu to compare with.

    peer_torch.py TOKENS HEAD_DIM CAUSAL SECONDS      prints the best seconds of forward and of backward

Without PyTorch the exit code is 3, and the table says so."""
import sys
import time

try:
    import torch
except ImportError:
    sys.exit(3)


def best(call, seconds):
    call()  # what is done once only
    least, end = float("inf"), time.process_time() + seconds
    while True:
        began = time.process_time()
        call()
        least = min(least, time.process_time() - began)
        if time.process_time() > end:
            return least


def main():
    tokens, dim, causal, seconds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", float(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, 1, tokens, dim) for _ in range(4))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        forward = best(lambda: sdpa(q, k, v, is_causal=causal), seconds)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = sdpa(*leaves, is_causal=causal)
    backward = best(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), seconds)
    print(f"{forward:.9f} {backward:.9f}")


main()
