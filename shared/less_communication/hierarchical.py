"""All-reduce over two kinds of links: inside a node, across nodes, inside again."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shared.errors import InputError
from shared.less_communication.states import Group, ready
from shared.ranks.collectives import all_gather, reduce_scatter


@dataclass(frozen=True)
class Levels:
    """A rank's two groups: those of its node, and those in its place in the other nodes."""

    inside: Group
    across: Group


def two_levels(nodes: int, device_type: str = "cpu") -> Levels:
    """The groups of this rank, where ranks are numbered node by node, as torchrun does.

    Collective. Raises InputError where the nodes cannot have equally many ranks.
    """
    ranks = dist.get_world_size()
    if nodes < 1 or ranks % nodes:
        fit = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise InputError(
            f"{ranks} ranks cannot be shared out evenly over {nodes} nodes: take one of {fit}"
        )
    shape, names = (nodes, ranks // nodes), ("across", "inside")
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return Levels(mesh["inside"].get_group(), mesh["across"].get_group())


def hierarchical_all_reduce(x: Tensor, inside: Group, across: Group) -> None:
    """Sum x over all ranks, in place, with as few bytes across nodes as there can be.

    Inside the node each of its m ranks gets the sum of an m-th of x (reduce_scatter); these are
    summed across the nodes (all_reduce) and put together inside (all_gather). Where m does not
    divide x, zeros fill it up. A group of one is sent nothing.
    Source: Goyal et al. 2017 (arXiv 1706.02677), section 4.
    """
    ranks = dist.get_world_size(inside)
    whole = F.pad(x.flatten(), (0, -x.numel() % ranks))
    part = whole.clone() if ranks == 1 else torch.empty_like(whole.chunk(ranks)[0])
    if ranks > 1:
        reduce_scatter(part, whole, inside).wait()
    if dist.get_world_size(across) > 1:
        dist.all_reduce(part, group=across)
    if ranks > 1:
        all_gather(whole, part, inside).wait()
    else:
        whole = part
    x.copy_(whole[: x.numel()].view_as(x))


def hierarchical_hook(levels: Levels, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over all ranks by `hierarchical_all_reduce`: a hook for torch's DDP."""
    buffer = bucket.buffer()
    buffer /= dist.get_world_size()
    hierarchical_all_reduce(buffer, levels.inside, levels.across)
    return ready(buffer)
