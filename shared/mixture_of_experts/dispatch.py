"""Rows on their way to the rank that has their expert, and back."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from shared.errors import InputError
from shared.ranks.collectives import Group


def exchange(
    rows: Float[Tensor, "sent d_model"],
    send: Sequence[int],
    receive: Sequence[int],
    group: Group = None,
) -> Float[Tensor, "received d_model"]:
    """Send `send[r]` rows, in their order, to each rank r; return what came, by rank.

    `receive[r]` rows come from rank r. Backward is the same message the other way: the gradient of
    what came goes back to where it came from. In a group of one nothing is sent.
    """
    return _Exchange.apply(rows, list(send), list(receive), group)


class _Exchange(torch.autograd.Function):
    """An all-to-all of uneven parts: its own conjugate, with both lists swapped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list, receive: list, group: Group) -> Tensor:
        ctx.lists = send, receive
        ctx.group = group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.lists
        return _Exchange.apply(gradients[0], receive, send, ctx.group), None, None, None


def _all_to_all(
    rows: Shaped[Tensor, "sent *rest"], send: list[int], receive: list[int], group: Group
) -> Shaped[Tensor, "received *rest"]:
    if dist.get_world_size(group) == 1:
        return rows.clone()
    came = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), receive, send, group=group)
    return came


class Dispatcher:
    """The way of one layer's rows in one step: there by `dispatch`, back by `combine`.

    `counts` has how many rows each of this rank's own experts has got, of all ranks together.
    """

    counts: Int[Tensor, "own_experts"]

    def __init__(self, counts: Int[Tensor, "experts"], group: Group = None) -> None:
        """Tell the other ranks how many rows they will get, and hear from them.

        `counts` are this rank's rows for each expert of all ranks; rank r of the group has the
        experts from r times E / ranks on. One small all-to-all; none in a group of one.
        Raises InputError where the ranks cannot have equally many experts.
        """
        ranks = dist.get_world_size(group)
        if len(counts) % ranks:
            raise InputError(
                f"{len(counts)} experts cannot be shared out evenly over {ranks} ranks: take a "
                f"number of experts that {ranks} divides"
            )
        self.group = group
        mine = counts.view(ranks, -1)  # to rank, its expert
        theirs = _all_to_all(mine, [1] * ranks, [1] * ranks, group)  # from rank, own expert
        self.send, self.receive = mine.sum(1).tolist(), theirs.sum(1).tolist()
        self.counts = theirs.sum(0)
        # The rows come by rank, and of each rank by expert; an expert wants its own together.
        expert = torch.arange(theirs.shape[1], device=counts.device).repeat(ranks)
        self.order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)

    def dispatch(self, rows: Float[Tensor, "sent d_model"]) -> Float[Tensor, "received d_model"]:
        """Send rows, which lie by expert, to the ranks of their experts; return this rank's.

        What is returned lies by own expert, of each expert by rank.
        """
        return exchange(rows, self.send, self.receive, self.group)[self.order]

    def combine(self, outputs: Float[Tensor, "received d_model"]) -> Float[Tensor, "sent d_model"]:
        """Send the outputs back; return those of the rows given to `dispatch`, in their order."""
        by_rank = torch.empty_like(self.order)
        by_rank[self.order] = torch.arange(len(self.order), device=self.order.device)
        return exchange(outputs[by_rank], self.receive, self.send, self.group)
