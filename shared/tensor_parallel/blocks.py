"""The Transformer's blocks over the ranks of a mesh's axis."""

from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shared.errors import InputError
from shared.model.attention import MultiHeadAttention
from shared.model.layers import PositionwiseFeedForward
from shared.ranks.collectives import Group
from shared.tensor_parallel.conjugates import (
    Message,
    copy_to_ranks,
    gather_sequence,
    scatter_sum,
    sum_over_ranks,
)
from shared.tensor_parallel.linears import ColumnParallelLinear, RowParallelLinear, keep_whole
from shared.tensor_parallel.marks import cut_dim, mark_partial
from shared.tensor_parallel.regions import split_region

Block = TypeVar("Block", bound=nn.Module)
MeshOrGroup = DeviceMesh | dist.ProcessGroup  # a mesh of one axis, or the group along it


def parallel_block(block: Block, mesh: MeshOrGroup) -> Block:
    """Cut an encoder or decoder layer over the ranks of a mesh with one axis, in place; return it.

    Each rank has H / t whole heads of every attention, and F / t of the feed-forward's inner
    features. Norms and the output biases are whole, with rank 0's numbers. Two all-reduces in
    forward and two in backward (three and four in a layer with cross-attention). Names of
    parameters stay as they were.

    Raises InputError, before anything is changed, where the heads or features cannot be shared out
    evenly, and for a mesh of several axes.
    """
    group = group_of(mesh)
    _check(block, group)
    _cut(block, group, copy_to_ranks, sum_over_ranks)
    return block


def sequence_parallel_block(block: Block, mesh: MeshOrGroup) -> Block:
    """Cut a layer as `parallel_block` does, and what lies between along the sequence.

    Norms, dropout and the residual stream see L / t positions on each rank: the layer takes them
    and returns them. What was one all-reduce is a reduce-scatter and an all-gather. The gradients
    of norms and output biases are parts, of this rank's positions: `sum_partial_gradients` adds
    them up after backward. Source: Korthikanti et al. 2022, section 4.2.2.
    """
    group = group_of(mesh)
    _check(block, group)
    _cut(block, group, gather_sequence, scatter_sum)
    split_region(block.get_submodule("dropout"), group, None)
    for name, parameter in block.named_parameters():
        if name.startswith("norm") or name.endswith(("w_o.bias", "linear2.bias")):
            mark_partial(parameter)
    return block


def group_of(mesh: MeshOrGroup) -> dist.ProcessGroup:
    """The group of a mesh with one axis, or the group itself; InputError for several axes."""
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise InputError(
            f"a layer is cut over one axis of a mesh, such as mesh['tp']; this one has {mesh.ndim}"
            f" ({', '.join(names)})"
        )
    return mesh.get_group()


def _check(block: nn.Module, group: Group) -> None:
    ranks = dist.get_world_size(group)
    for module in block.modules():
        if isinstance(module, MultiHeadAttention) and module.num_heads % ranks:
            raise InputError(
                f"{module.num_heads} heads cannot be shared out evenly over {ranks} ranks: a head "
                f"is computed on one rank; take a number of heads that {ranks} divides"
            )
        if (heads := getattr(module, "num_kv_heads", 0)) % ranks:
            raise InputError(
                f"{heads} heads of keys cannot be shared out evenly over {ranks} ranks: take a "
                f"number of them that {ranks} divides"
            )
        if isinstance(module, PositionwiseFeedForward) and module.linear1.out_features % ranks:
            raise InputError(
                f"d_ff {module.linear1.out_features} cannot be shared out evenly over {ranks} ranks"
            )


def _cut(block: nn.Module, group: Group, enter: Message, leave: Message) -> None:
    for module in list(block.modules()):
        if isinstance(module, MultiHeadAttention):
            module.num_heads //= dist.get_world_size(group)
            if heads := getattr(module, "num_kv_heads", 0):  # lesson 23's
                setattr(module, "num_kv_heads", heads // dist.get_world_size(group))  # noqa: B010
            for name in ("w_q", "w_k", "w_v"):  # behind one copy, which is the region's
                setattr(module, name, ColumnParallelLinear(getattr(module, name), group, None))
            module.w_o = RowParallelLinear(module.w_o, group, leave)  # ty: ignore
            split_region(module, group, enter)
        elif isinstance(module, PositionwiseFeedForward):
            for name in module.inner:
                setattr(module, name, ColumnParallelLinear(getattr(module, name), group, None))
            module.linear2 = RowParallelLinear(module.linear2, group, leave)  # ty: ignore
            split_region(module, group, enter)
    keep_rank_0(block, group)


def keep_rank_0(module: nn.Module, group: Group) -> None:
    """Give the parameters that are not cut, here or by torch, rank 0's numbers, in place."""
    for parameter in module.parameters():
        if cut_dim(parameter) is None and not isinstance(parameter, DTensor):
            parameter.data.copy_(keep_whole(parameter, group).data)
