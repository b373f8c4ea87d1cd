"""A linear layer over several ranks: the matrix cut by its columns, or by its rows.

"Columns" and "rows" are those of A in Y = X A (Shoeybi et al. 2019). torch computes X W^T, so W is
cut along dim 0 where A is cut by columns, along dim 1 where A is cut by rows.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from shared.errors import InputError
from shared.ranks.collectives import Group
from shared.tensor_parallel.conjugates import Message
from shared.tensor_parallel.marks import mark_cut


class ColumnParallelLinear(nn.Module):
    """Its part of the outputs of a linear layer: the ranks' outputs, side by side, are the whole.

    `enter` is what the input comes through, whose gradient is a part on each rank: copy_to_ranks,
    or None where it has come through one already (queries, keys and values share one).
    """

    def __init__(self, linear: nn.Linear, group: Group, enter: Message | None) -> None:
        """Keep this rank's part of `linear`, of which rank 0's weights count.

        Raises InputError where the ranks cannot have equal parts of its outputs.
        """
        super().__init__()
        self.group, self.enter = group, enter
        self.weight = cut(linear.weight, 0, group, "outputs of a column-parallel layer")
        self.bias = None
        if linear.bias is not None:
            self.bias = cut(linear.bias, 0, group, "outputs of a column-parallel layer")

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch part"]:
        """Return this rank's columns of X A + b; forward sends nothing, backward sums in f."""
        if self.enter is not None:
            x = self.enter(x, self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are in parts: each rank's product is a part of the sum.

    `leave` brings the parts together: sum_over_ranks. The bias is whole on every rank, and is
    added once, after the sum.
    """

    def __init__(self, linear: nn.Linear, group: Group, leave: Message) -> None:
        """Keep this rank's part of `linear`, of which rank 0's weights count.

        Raises InputError where the ranks cannot have equal parts of its inputs.
        """
        super().__init__()
        self.group, self.leave = group, leave
        self.weight = cut(linear.weight, 1, group, "inputs of a row-parallel layer")
        self.bias = None if linear.bias is None else keep_whole(linear.bias, group)

    def forward(self, x: Float[Tensor, "*batch part"]) -> Float[Tensor, "*batch d_out"]:
        """Return X A + b from this rank's columns of X: one all-reduce, in g."""
        y = self.leave(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def cut(parameter: Shaped[Tensor, "..."], dim: int, group: Group, what: str) -> nn.Parameter:
    """This rank's part of rank 0's parameter along `dim`, in memory of its own.

    The part bears the dim as `cut_dim`, by which `whole_state_dict` puts it together again.
    Raises InputError, naming `what` is cut, where the parts cannot be equal.
    """
    size, ranks = parameter.shape[dim], dist.get_world_size(group)
    if size % ranks:
        raise InputError(f"{size} {what} cannot be cut into {ranks} equal parts")
    whole = keep_whole(parameter, group)
    mine = whole.detach().chunk(ranks, dim)[dist.get_rank(group)]
    part = nn.Parameter(
        mine.clone(memory_format=torch.contiguous_format), requires_grad=parameter.requires_grad
    )
    mark_cut(part, dim)
    return part


def keep_whole(parameter: Shaped[Tensor, "*shape"], group: Group) -> nn.Parameter:
    """A copy of rank 0's parameter on every rank of the group."""
    whole = parameter.detach().clone(memory_format=torch.contiguous_format)
    if dist.get_world_size(group) > 1:
        dist.broadcast(whole, group=group, group_src=0)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
