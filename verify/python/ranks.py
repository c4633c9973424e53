# SPDX-License-Identifier: MIT OR Unlicense
"""This process among the others: who shares a sequence with it, who trains on other rows, what moves between them.

Rank r is member r % sp of replica r // sp. Everything travels as bytes, so that no type is left out.
"""
import torch
import torch.distributed as dist


def make_groups(world):
    """The process groups of each sp that divides the world. All ranks call this in the same order."""
    return {sp: (dist.new_subgroups_by_enumeration([list(range(d * sp, d * sp + sp)) for d in range(world // sp)])[0],
                 dist.new_subgroups_by_enumeration([list(range(m, world, sp)) for m in range(sp)])[0])
            for sp in range(1, world + 1) if world % sp == 0}


class Ranks:
    def __init__(self, rank=0, world=1, sp=1, groups=None):
        self.rank, self.world, self.sp, self.dp = rank, world, sp, world // sp
        self.member, self.replica = rank % sp, rank // sp
        of_sequence, of_replicas = groups[sp] if groups else (None, None)
        self.groups = {"sp": of_sequence, "dp": of_replicas, "world": None}

    def size(self, over):
        return {"sp": self.sp, "dp": self.dp, "world": self.world}[over]

    def place(self, over):
        return {"sp": self.member, "dp": self.replica, "world": self.rank}[over]

    def sum(self, x, over):
        """x added up over the ranks of a sequence (sp), over replicas (dp), or over all (world)."""
        x = x.detach().clone()
        if self.size(over) > 1:
            dist.all_reduce(x, group=self.groups[over])
        return x

    def gather(self, x, over="world"):
        """x of every rank, stacked; it has the same shape on all of them."""
        parts = [torch.empty_like(x) for _ in range(self.size(over))]
        if len(parts) == 1:
            return x.detach()[None]
        dist.all_gather(parts, x.detach().contiguous(), group=self.groups[over])
        return torch.stack(parts)

    def exchange(self, to, like):
        """All-to-all in a sequence's group: to[r] goes to member r; like[r] has the shape of what comes from there."""
        if self.sp == 1:
            return list(to)
        sent = [_bytes([x]) for x in to]
        sizes = [x.numel() * x.element_size() for x in like]
        got = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(got, torch.cat(sent), sizes, [len(x) for x in sent], group=self.groups["sp"])
        return [_arrays(part, [x])[0] for part, x in zip(got.split(sizes), like)]

    def pass_on(self, arrays, like):
        """One hop of a ring: arrays go to the next member, those of the previous one, shaped like `like`, come."""
        if self.sp == 1:
            return arrays
        first = self.replica * self.sp
        sent, got = _bytes(arrays), torch.empty(sum(x.numel() * x.element_size() for x in like), dtype=torch.uint8)
        behind, ahead = (first + (self.member + step) % self.sp for step in (-1, 1))
        for move in [dist.isend(sent, ahead), dist.irecv(got, behind)]:
            move.wait()
        return _arrays(got, like)


def _bytes(arrays):
    # a clone has strides of its own, also where it has one element
    own = [x.detach().clone(memory_format=torch.contiguous_format) for x in arrays]
    return torch.cat([x.view(-1).view(torch.uint8) for x in own])


def _arrays(data, like):
    sizes = [x.numel() * x.element_size() for x in like]
    # a clone begins at an address that every type may begin at
    return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(data.split(sizes), like)]
