"""Experts over ranks: the layer, and whose gradients are averaged over whom."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shared.ddp.averaging import sum_flat
from shared.errors import InputError
from shared.mixture_of_experts.dispatch import Dispatcher
from shared.mixture_of_experts.layer import MoELayer, by_expert, each_its_rows, weighted_sum
from shared.mixture_of_experts.marks import is_expert, mark_expert
from shared.mixture_of_experts.routing import (
    Routing,
    capacity_for,
    loads,
    top_k_router,
    within_capacity,
)
from shared.ranks.collectives import Group


class Parts(NamedTuple):
    """What a layer over ranks is made of; the lesson's script puts a learner's own here."""

    router: Callable[..., Routing] = top_k_router
    dispatcher: Callable[..., Any] = Dispatcher
    within_capacity: Callable[..., Tensor] = within_capacity


class ExpertParallelLayer(nn.Module):
    """A MoELayer whose experts are shared out over a group; each rank has rows of its own.

    Names of parameters are those of the whole layer, of the experts that this rank has. `bias` is
    what `update_bias` moves. After a forward, `routing` has what the router decided, `kept` the
    share of choices within capacity, and `handed` the rows that left for other ranks.
    """

    bias: Tensor

    def __init__(
        self,
        layer: MoELayer,
        group: Group = None,
        capacity_factor: float | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Take over the router and this rank's experts of `layer`, the same on every rank.

        With a `capacity_factor`, an expert takes that multiple of an even share of a rank's
        choices, from each rank; what is beyond is dropped. None: nothing is.
        Raises InputError where the ranks cannot have equally many experts.
        """
        super().__init__()
        self.num_experts, ranks = len(layer.experts), dist.get_world_size(group)
        if self.num_experts % ranks:
            raise InputError(
                f"{self.num_experts} experts cannot be shared out evenly over {ranks} ranks: take "
                f"a number of experts that {ranks} divides"
            )
        own = self.num_experts // ranks
        first = own * dist.get_rank(group)
        self.router, self.k, self.group = layer.router, layer.k, group
        self.capacity_factor, self.parts = capacity_factor, parts or Parts()
        mine = {str(i): layer.experts[i] for i in range(first, first + own)}
        self.experts = nn.ModuleDict(mine)
        for parameter in self.experts.parameters():
            mark_expert(parameter)
        self.register_buffer(
            "bias", torch.zeros(self.num_experts, device=layer.router.weight.device)
        )
        self.routing: Routing | None = None
        self.kept, self.handed = 1.0, 0

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return for each token the weighted sum of the outputs of its experts that took it."""
        tokens = x.reshape(-1, x.shape[-1])
        self.routing = self.parts.router(self.router(tokens), self.k, self.bias)
        experts = self.routing.experts
        order, token = by_expert(experts)
        if self.capacity_factor is not None:
            capacity = capacity_for(self.capacity_factor, experts.numel(), self.num_experts)
            keep = self.parts.within_capacity(experts, self.num_experts, capacity)
            order, token = (rows[keep.flatten()[order]] for rows in (order, token))
        counts = loads(experts.flatten()[order], self.num_experts)
        stay = counts.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
        self.handed = len(order) - int(stay.sum())
        way = self.parts.dispatcher(counts, self.group)
        rows = each_its_rows(
            self.experts.values(), way.dispatch(tokens[token]), way.counts.tolist()
        )
        weights = self.routing.weights.flatten()[order]
        self.kept = len(order) / max(1, experts.numel())
        return weighted_sum(way.combine(rows), weights, token, len(tokens)).view_as(x)


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every gradient that of the mean of all ranks' losses, in place; mesh of "dp" and "ep".

    What all ranks have is averaged over all ranks. An expert is on one rank of each ep group, where
    backward has added up what the ranks of that group owe it already: its gradients are summed
    over dp, and divided by the number of *all* ranks, since so many losses are in that sum.
    A parameter without a gradient counts as one of zeros: other ranks may have one. The mesh has
    all ranks of the world.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    experts = [p.grad for p in trained if is_expert(p) and p.grad is not None]
    others = [p.grad for p in trained if not is_expert(p) and p.grad is not None]
    sum_flat(experts, mesh["dp"].get_group())
    sum_flat(others)
    for gradient in (*experts, *others):
        gradient /= mesh.size()
