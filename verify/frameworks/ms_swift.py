# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps ms-swift==4.6.0 modelscope==1.40.2 modelscope_hub addict json_repair ...
# (what its import then names)
"""ms-swift's sequence parallelism: GatherLoss and GatherTensor at Ulysses 2, ring 2, and the
all-to-all of its Ulysses."""
from common import IGNORED, check_losses, loss_case, token_losses, zigzag

import torch

PARTS = {}


def _package(ring):
    """Its one object, set up as its prepare() does for a world that is one sequence."""
    if PARTS.get("ring") != ring:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from swift.sequence_parallel import sequence_parallel as sp
        from swift.sequence_parallel.utils import GatherLoss
        world = dist.get_world_size()
        sp.device_mesh = init_device_mesh("cpu", (1, world, 1) if ring else (1, 1, world),
                                          mesh_dim_names=("data", "ring", "sequence"))
        sp.world_size, sp.dp_world_size = world, 1
        sp.sp_world_size, sp.rp_world_size = (1, world) if ring else (world, 1)
        PARTS.update(ring=ring, sp=sp, loss=GatherLoss)
    return PARTS["sp"]


def ulysses(place, logits, labels):
    _package(False)
    loss, whole = PARTS["loss"].apply(token_losses(logits, labels)[None], labels[None], 1, None)
    return loss[whole != IGNORED].sum() / (whole != IGNORED).sum()


def ring(place, logits, labels):
    _package(True)
    positions = torch.arange(len(place["ids"]))[None]
    loss, whole = PARTS["loss"].apply(
        token_losses(logits, labels)[None], labels[None], 1, positions)
    return loss[whole != IGNORED].sum() / (whole != IGNORED).sum()


def outputs(place, logits, labels):
    """As classifiers, rerankers and embeddings have it: the model's outputs, gathered."""
    _package(False)
    from swift.model.patcher import gather_sequence_parallel_outputs
    whole = gather_sequence_parallel_outputs({"logits": logits[None]})["logits"][0]
    return token_losses(whole, place["whole"]).sum() / (place["whole"] != IGNORED).sum()


if __name__ == "__main__":
    check_losses("ms-swift", [
        loss_case("GatherLoss, Ulysses 2", ulysses),
        loss_case("GatherLoss, Ulysses 2, a rank without labels", ulysses, prompts=(10,)),
        loss_case("GatherLoss, ring 2", ring, order=zigzag),
        loss_case("gather_sequence_parallel_outputs, Ulysses 2", outputs, mark="new")
    ])
