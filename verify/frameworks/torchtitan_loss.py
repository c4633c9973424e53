# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps torchtitan==0.3.0, and pip install spmd_types==0.2.3 torchdata tyro (and
# what its import then names)
"""torchtitan: rows that it cuts for context parallelism, and its loss, whole and in chunks,
divided by the tokens of the step; its trainer adds gradients over ranks."""
from common import check_losses, contiguous, loss_case, zigzag

import torch


def shard(place, labels, balancer):
    """The labels of this rank as prepare_context_parallel_input cuts them."""
    if len(labels) == len(place["ids"]):
        return labels
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    positions = torch.arange(len(place["ids"]))[None]
    ids, own, _ = prepare_context_parallel_input(
        place["ids"][None], place["whole"][None], dict(positions=positions), mesh, "cpu",
        load_balancer_type=balancer)
    return own[0].clone()


def loss(place, logits, labels, balancer="headtail", chunks=None):
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    place["used"] = shard(place, labels, balancer)
    config, tokens = CrossEntropyLoss.Config(), torch.tensor(float(sum(place["counts"])))
    if not chunks:
        return CrossEntropyLoss(config)(logits[None], place["used"][None], tokens)[0]
    wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=config))
    wrapper.set_lm_head(torch.nn.Identity())
    return wrapper(logits[None], place["used"][None], tokens)[0]


def in_chunks(place, logits, labels):
    return loss(place, logits, labels, chunks=4)


def in_order(place, logits, labels):
    return loss(place, logits, labels, balancer=None)


if __name__ == "__main__":
    rows = dict(prompts=(3, 12, 9, 5), sp=1, mean=False)
    check_losses("torchtitan", [
        loss_case("CrossEntropyLoss, cp 2, head-tail", loss, order=zigzag, mean=False),
        loss_case("CrossEntropyLoss, cp 2, contiguous", in_order, order=contiguous, mean=False),
        loss_case("CrossEntropyLoss, cp 2, a rank without labels", in_order, prompts=(10,),
                  mean=False),
        loss_case("ChunkedLossWrapper, cp 2, head-tail", in_chunks, order=zigzag, mean=False),
        loss_case("CrossEntropyLoss, 2 ranks x 2", loss, **rows),
        loss_case("ChunkedLossWrapper, 2 ranks x 2", in_chunks, **rows)])
