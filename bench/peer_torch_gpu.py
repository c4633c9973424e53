#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""PyTorch on the same GPU, for bench_gpu to compare with: requests come in by lines, milliseconds go out.

    peer_torch_gpu.py --serve [--cpu]     first says "ready ..." or why it is not
    peer_torch_gpu.py --list              what it can be asked for

    attention_forward tokens=16384 heads=16 dim=128 causal=1 backend=flash dtype=bf16 seconds=2
    ok 1.23 1.24 1.22 ...                 or: refused: WHY

A backend is forced and never replaced: where PyTorch has no such kernel for a shape or type, the answer is "refused". The
case last asked for is kept, so that turns do not build it again."""
import contextlib
import sys
import time
import warnings

BACKENDS = {
    "attention_forward": ("flash", "cudnn", "efficient", "math", "flex"),
    "attention_backward": ("flash", "flash-deterministic", "cudnn", "efficient", "math", "flex"),
    "rmsnorm_forward": ("compiled", "eager"), "rmsnorm_backward": ("compiled", "eager"), "rope": ("compiled", "eager"),
    "swiglu_forward": ("compiled", "eager"), "swiglu_backward": ("compiled", "eager"),
    "linear_cross_entropy": ("chunked",), "adamw": ("fused+clip+cast",),
}
CHUNK = 4096  # rows of logits at a time
SAMPLES = 20


def give_up(why):
    print(why, flush=True)
    sys.exit(3)


def import_torch(device):
    global torch, F
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        give_up("no torch here")
    if device == "cuda" and not torch.cuda.is_available():
        give_up("torch finds no GPU here")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")  # ours are as exact in fp32
    import torch._functorch.config as functorch
    functorch.donated_buffer = False  # a graph goes backward many times


class Case:
    """A call to be timed, and how to undo what it needed."""

    def __init__(self, device, request):
        self.device, self.request = device, request
        self.number = lambda key: int(request[key])
        self.dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[request["dtype"]]
        self.undo = contextlib.ExitStack()
        self.call = getattr(self, request["name"])(request["backend"])

    def normal(self, *shape, dtype=None, scale=1.0):
        return (torch.randn(*shape, device=self.device) * scale).to(dtype or self.dtype)

    def compiled(self, function, backend):
        if backend == "eager":
            return function
        return torch.compile(function, backend="eager" if self.device == "cpu" else "inductor", dynamic=False)

    def backward(self, out, leaves, grad):
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    # ---- attention ----

    def attention(self, backend, grad):
        tokens, heads, dim = self.number("tokens"), self.number("heads"), self.number("dim")
        causal = self.number("causal") == 1
        q, k, v, dout = (self.normal(1, tokens, heads, dim).transpose(1, 2) for _ in range(4))
        for t in (q, k, v):
            t.requires_grad_(grad)
        run = self.flex(tokens, causal) if backend == "flex" else self.sdpa(backend, causal)
        return run, (q, k, v), dout

    def sdpa(self, backend, causal):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        kernel = {"flash": SDPBackend.FLASH_ATTENTION, "flash-deterministic": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                  "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}[backend]

        def run(q, k, v):
            with sdpa_kernel([kernel]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return run

    def flex(self, tokens, causal):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        mask = None
        if causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=self.device, _compile=self.device != "cpu")
        attention = flex_attention if self.device == "cpu" else torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: attention(q, k, v, block_mask=mask)

    def attention_forward(self, backend):
        run, leaves, _ = self.attention(backend, False)
        return lambda: run(*leaves)

    def attention_backward(self, backend):
        run, leaves, dout = self.attention(backend, True)
        if backend == "flash-deterministic":
            torch.use_deterministic_algorithms(True)
            self.undo.callback(torch.use_deterministic_algorithms, False)
        return self.backward(run(*leaves), leaves, dout)

    # ---- rows ----

    def rmsnorm(self, backend, grad):
        x, gain = self.normal(self.number("rows"), self.number("width")), self.normal(self.number("width"))
        x.requires_grad_(grad), gain.requires_grad_(grad)
        return self.compiled(lambda x, gain: F.rms_norm(x, gain.shape, gain, 1e-5), backend), (x, gain)

    def rmsnorm_forward(self, backend):
        run, inputs = self.rmsnorm(backend, False)
        return lambda: run(*inputs)

    def rmsnorm_backward(self, backend):
        run, inputs = self.rmsnorm(backend, True)
        return self.backward(run(*inputs), inputs, self.normal(self.number("rows"), self.number("width")))

    def rope(self, backend):
        rows, heads = self.number("rows"), self.number("heads")
        half = self.number("width") // heads // 2
        x = self.normal(rows, heads, 2 * half)
        angle = torch.arange(rows, dtype=torch.float64)[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        cosine, sine = angle.cos().float().to(self.device), angle.sin().float().to(self.device)

        def turn(x, cosine, sine):
            p, q = x[..., :half].float(), x[..., half:].float()
            return torch.cat((p * cosine - q * sine, q * cosine + p * sine), -1).to(x.dtype)
        run = self.compiled(turn, backend)
        return lambda: run(x, cosine, sine)

    def swiglu(self, backend, grad):
        inputs = [self.normal(self.number("rows"), self.number("width")).requires_grad_(grad) for _ in range(2)]
        return self.compiled(lambda gate, up: F.silu(gate) * up, backend), inputs

    def swiglu_forward(self, backend):
        run, inputs = self.swiglu(backend, False)
        return lambda: run(*inputs)

    def swiglu_backward(self, backend):
        run, inputs = self.swiglu(backend, True)
        return self.backward(run(*inputs), inputs, self.normal(self.number("rows"), self.number("width")))

    # ---- loss and update ----

    def linear_cross_entropy(self, backend):
        tokens, hidden, vocab = self.number("tokens"), self.number("hidden"), self.number("vocab")
        x, table = self.normal(tokens, hidden).requires_grad_(), self.normal(vocab, hidden, scale=1 / 32).requires_grad_()
        targets = (torch.arange(tokens) * 7919 % vocab).to(self.device)

        def call():
            x.grad = table.grad = None
            for first in range(0, tokens, CHUNK):
                part = slice(first, first + CHUNK)
                F.cross_entropy((x[part] @ table.t()).float(), targets[part], reduction="sum").backward()
        return call

    def adamw(self, backend):
        p = self.normal(self.number("count"), dtype=torch.float32).requires_grad_()
        p.grad = self.normal(self.number("count"), dtype=torch.float32)
        optimizer = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
        working = None if self.dtype == torch.float32 else torch.empty_like(p, dtype=self.dtype, requires_grad=False)

        def call():
            torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=True)
            optimizer.step()
            if working is not None:
                working.copy_(p.detach())
        return call


def settle(device):
    if device == "cuda":
        torch.cuda.synchronize()


def wall_of(device, call, times):
    began = time.perf_counter()
    for _ in range(times):
        call()
    settle(device)
    return (time.perf_counter() - began) / times


def samples(device, call, seconds):
    """Milliseconds of calls, in runs of at least 10 ms, as bench_gpu takes its own."""
    once = wall_of(device, call, 1)
    times, end, ms = max(1, int(0.01 / once) + 1), time.perf_counter() + seconds, []
    while len(ms) < SAMPLES and (len(ms) < 3 or time.perf_counter() < end):
        ms.append(1e3 * wall_of(device, call, times))
    return ms


class Server:
    def __init__(self, device):
        self.device, self.key, self.case = device, None, None

    def drop(self):
        if self.case:
            self.case.undo.close()
        self.key = self.case = None
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def answer(self, text):
        words = text.split()
        request = dict(word.split("=", 1) for word in words[1:])
        request["name"], seconds = words[0], float(request.pop("seconds", "1"))
        if request.get("backend") not in BACKENDS.get(words[0], ()):
            return f"refused: {words[0]} knows no backend {request.get('backend')}"
        if request != self.key:
            self.drop()
            self.case = Case(self.device, request)
            self.key = request
            for _ in range(2):  # compiles, and warms up
                self.case.call()
            settle(self.device)
        return "ok " + " ".join(f"{ms:.6g}" for ms in samples(self.device, self.case.call, seconds))


def serve(device):
    import_torch(device)
    warnings.simplefilter("ignore")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"ready torch {torch.__version__} on {name}", flush=True)
    server = Server(device)
    for line in sys.stdin:
        try:
            answer = server.answer(line)
        except Exception as error:  # out of memory, no such kernel: the row says so
            server.drop()
            answer = "refused: " + " ".join(str(error).split())[:90]
        print(answer, flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def main():
    if "--list" in sys.argv:
        for name, backends in BACKENDS.items():
            print(name, *backends)
    elif "--serve" in sys.argv:
        serve("cpu" if "--cpu" in sys.argv else "cuda")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
