# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps llamafactory==0.9.5 (and what its import then names)
"""LLaMA-Factory's v1 trainer at cp 2: sequence_parallel_loss, what its Ulysses hands on to the
attention, and the gradient's norm as fit() reports it."""
import os

os.environ["DISABLE_VERSION_CHECK"] = "1"
from functools import partial
from types import SimpleNamespace

from common import (IGNORED, attention_inputs, check, check_attention, check_losses, law,
                    loss_case, on_ranks, version, whole_attention)

import torch

TOKENS = 24
ASKED = [("", {}), (", window 4", {"window": 4}), (", scale 0.5", {"softmax_scale": 0.5}),
         (", softcap 1", {"softcap": 1.0})]


class OnHost(torch.Tensor):
    """A tensor that stays where it is: the package moves it to the GPU of its rank's number."""

    def to(self, *_, **__):
        return self.as_subclass(torch.Tensor)


def _package(cp=2):
    import flash_stub
    flash_stub.install()
    from llamafactory.v1.accelerator import interface
    interface.init_process_group = lambda **_: None  # there is one
    interface.DistributedInterface.sync = lambda _: None  # of a GPU
    return interface.DistributedInterface({"cp_size": cp, "dp_size": 1})


def _dim(name):
    from llamafactory.v1.accelerator.interface import Dim
    return Dim(name)


def loss(place, logits, labels):
    world = _package()
    from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel as sp
    sp.set_ulysses_sequence_parallel_group(world.get_group(_dim("cp")))
    unshifted = torch.cat((torch.tensor([IGNORED]), place["whole"][:-1]))[None]
    batch = dict(input_ids=place["ids"][None], labels=unshifted,
                 loss_weights=(unshifted != IGNORED).float())
    batch = {n: t.as_subclass(OnHost) for n, t in batch.items()}
    return sp.sequence_parallel_loss(lambda **_: SimpleNamespace(logits=logits[None]), batch)


def _flash(query, key, value, attention_mask, query_length, is_causal, softmax_scale=None,
           sliding_window=None, softcap=None, **_):
    """What transformers' _flash_attention_forward computes, of one row."""
    x = {n: t[0] for n, t in zip("qkv", (query, key, value))}
    right = whole_attention(x, [0, query_length], sliding_window or 0, softmax_scale,
                            softcap or 0.0)
    return right["out"][None].to(query.dtype)


def attend(rank):
    world = _package()
    from llamafactory.v1.plugins.model_plugins.parallelization.sequence_parallel import (
        new_flash_attn_forward)
    group = world.get_group(_dim("cp"))
    forward = partial(new_flash_attn_forward, group=group, mode="ulysses", attn_fn=_flash,
                      sequence_parallel_size=2)
    own, results = torch.arange(TOKENS).view(2, -1)[rank], []
    for _, asked in ASKED:
        x = attention_inputs(TOKENS)
        out = forward(*(x[n][own][None] for n in "qkv"), None, query_length=len(own),
                      is_causal=True, dropout=0.0, sliding_window=asked.get("window"),
                      softmax_scale=asked.get("softmax_scale"), softcap=asked.get("softcap"))
        results.append(dict(index=own, out=out[0]))
    return results


def fitted(rank, cp):
    """The norm that a step of fit() reports, of a sharded model of one weight."""
    world = _package(cp)
    from torch.distributed.fsdp import fully_shard
    from llamafactory.v1.core import base_trainer
    from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel as sp
    sp.set_ulysses_sequence_parallel_group(world.get_group(_dim("cp")))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 64, bias=False)
    fully_shard(model, mesh=world.model_device_mesh["mp_shard"])
    hidden = torch.randn(1, 16, 8)
    part = hidden if cp == 1 else hidden.view(1, cp, -1, 8)[:, rank]
    ids = torch.randint(0, 64, (1, 16))
    batch = dict(input_ids=ids, labels=ids, loss_weights=torch.ones(1, 16))
    batch = {n: t.as_subclass(OnHost) for n, t in batch.items()}
    nothing = lambda *_, **__: None

    class Quiet:
        """Whatever is asked of it, it does nothing."""

        def __getattr__(self, _):
            return nothing

    class Batches(list):
        set_epoch = nothing

    class Model:
        train, parameters = staticmethod(nothing), staticmethod(model.parameters)

        def __call__(self, **_):
            return SimpleNamespace(logits=model(part))

    state, arguments = SimpleNamespace(), SimpleNamespace(
        dist_config={"cp_size": cp}, max_grad_norm=1e9, logging_steps=1, save_steps=0)
    schedule = SimpleNamespace(step=nothing, get_last_lr=lambda: [0.0])
    trainer = SimpleNamespace(
        model=Model(), callback_handler=Quiet(), state=state, global_step=0,
        num_training_steps=1, _resume_epoch=0, train_batch_generator=Batches([[batch]]),
        args=arguments, dp_size=world.get_world_size(_dim("dp")), _deepspeed_engine=None,
        optimizer=Quiet(), lr_scheduler=schedule, _checkpoint=Quiet())
    base_trainer.BaseTrainer.fit(trainer)
    true = torch.sqrt(sum((p.grad.full_tensor() ** 2).sum() for p in model.parameters()))
    return state.grad_norm, float(true)


if __name__ == "__main__":
    check_losses("llamafactory", [
        loss_case("v1 sequence_parallel_loss, cp 2", loss),
        loss_case("v1 sequence_parallel_loss, cp 2, a rank without labels", loss,
                  prompts=(10,))])
    for (name, asked), got in zip(ASKED, zip(*on_ranks(attend))):
        check_attention("llamafactory", f"v1 Ulysses 2{name}", got,
                        {n: t for n, t in attention_inputs(TOKENS).items() if n != "dout"},
                        [0, TOKENS], mark="new", **asked)
    shown, true = on_ranks(fitted, 2)[0]
    check("llamafactory", version("llamafactory"), "v1 fit, cp 2, norm", law(shown, true, sp=2),
          f"{shown:.4f} of {true:.4f}", "new")
