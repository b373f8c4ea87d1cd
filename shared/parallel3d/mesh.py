"""A mesh of three axes: which ranks talk to each other, and as whom."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shared.errors import InputError

AXES = ("pp", "dp", "tp")
Groups = dict[str, list[list[int]]]


def build_mesh(
    dp: int,
    tp: int,
    pp: int,
    world_size: int | None = None,
    order: Sequence[str] = AXES,
) -> Groups:
    """Return the groups of ranks along each axis of a dp x tp x pp mesh, by the axis's name.

    The last axis of `order` varies fastest, so that its groups are neighbouring ranks: with the
    default, tensor parallelism, which sends most, stays inside a node. A group has its ranks in
    ascending position along the axis; the groups are in ascending order of their first rank. On
    every axis each rank is in one group. `world_size` None: the product of the sizes.

    Raises InputError, which says the values, for a size below 1, for sizes that do not multiply to
    `world_size`, and for an order that does not name each axis once.
    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 3.
    """
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    _check(sizes, world_size, order)
    strides, ranks = dict[str, int](), 1
    for axis in reversed(order):
        strides[axis] = ranks
        ranks *= sizes[axis]
    groups: Groups = {}
    for axis in AXES:
        stride, size = strides[axis], sizes[axis]
        firsts = [rank for rank in range(ranks) if rank // stride % size == 0]
        groups[axis] = [[first + i * stride for i in range(size)] for first in firsts]
    return groups


def _check(sizes: Mapping[str, int], world_size: int | None, order: Sequence[str]) -> None:
    for axis, size in sizes.items():
        if size < 1:
            raise InputError(f"{axis} must be 1 or more, got {size}")
    if sorted(order) != sorted(AXES):
        raise InputError(f"order must name {', '.join(AXES)} once each, got {', '.join(order)}")
    product = math.prod(sizes.values())
    if world_size is not None and product != world_size:
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        others = sizes["tp"] * sizes["pp"]
        hint = f": take dp {world_size // others}" if world_size % others == 0 else ""
        raise InputError(f"{shape} is a mesh of {product} ranks, here are {world_size}{hint}")


@dataclass(frozen=True)
class Axis:
    """One axis as a rank sees it: its group along the axis, and its own place in the group."""

    ranks: list[int]
    index: int
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh3D:
    """The mesh as one rank sees it. `groups` are the lists of all ranks, as `build_mesh` made them.

    `dp`: ranks that have the same part of the model and other data. `tp`: ranks that share each
    layer. `pp`: ranks that have the stages of one copy, the first stage first.
    """

    dp: Axis
    tp: Axis
    pp: Axis
    groups: Groups

    def __str__(self) -> str:
        return f"dp {self.dp.size} x tp {self.tp.size} x pp {self.pp.size}"


def make_groups(groups: Groups) -> Mesh3D:
    """Make the process groups of what `build_mesh` returns; a collective of all ranks.

    Every rank makes every group, in the same order, also those that it is not in: `new_group` is
    a collective. Raises InputError where the lists are not about the ranks that there are.
    """
    me, ranks = dist.get_rank(), dist.get_world_size()
    own: dict[str, Axis] = {}
    for axis in AXES:
        named = sorted(rank for members in groups[axis] for rank in members)
        if named != list(range(ranks)):
            raise InputError(
                f"the groups of {axis} name {len(named)} ranks, here are {ranks}: "
                f"make them with build_mesh(dp, tp, pp, world_size={ranks})"
            )
        for members in groups[axis]:
            group = dist.new_group(members)
            if me in members:
                own[axis] = Axis(members, members.index(me), group)
    return Mesh3D(own["dp"], own["tp"], own["pp"], groups)
