"""Models whose feed-forward networks become layers of experts."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.mixture_of_experts.layer import MoELayer
from shared.mixture_of_experts.marks import is_expert
from shared.mixture_of_experts.parallel import ExpertParallelLayer, Parts
from shared.mixture_of_experts.routing import Routing
from shared.model.layers import PositionwiseFeedForward
from shared.ranks.collectives import Group


def give_experts(model: nn.Module, num_experts: int, k: int, *, alike: bool = False) -> None:
    """Put a MoELayer in the place of each feed-forward network, in place.

    The experts have the network's sizes. `alike`: they begin as copies of it, so that for k > 1 the
    model begins with the same outputs (Komatsuzaki et al. 2022, arXiv 2212.05055, "upcycling");
    else the first is the network itself and the others draw their own weights.
    """
    for parent, name, network in _networks(model):
        first = network.linear1.weight
        experts = [network, *(copy.deepcopy(network) for _ in range(num_experts - 1))]
        for expert in () if alike else experts[1:]:
            for matrix in (p for p in expert.parameters() if p.dim() > 1):
                nn.init.xavier_uniform_(matrix)
        layer = MoELayer(experts, first.shape[1], k)
        setattr(parent, name, layer.to(first.device, first.dtype))


def share_out(
    model: nn.Module,
    group: Group,
    capacity_factor: float | None = None,
    parts: Parts | None = None,
) -> None:
    """Put an ExpertParallelLayer in the place of each MoELayer, in place.

    The whole model must have the same numbers on every rank.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MoELayer):
                setattr(parent, name, ExpertParallelLayer(child, group, capacity_factor, parts))


def _networks(model: nn.Module) -> list[tuple[nn.Module, str, PositionwiseFeedForward]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, PositionwiseFeedForward)
    ]


def expert_layers(model: nn.Module) -> list[ExpertParallelLayer]:
    """The layers of experts that are shared out, in the model's order."""
    return [layer for layer in model.modules() if isinstance(layer, ExpertParallelLayer)]


def routings(model: nn.Module) -> list[Routing]:
    """What the routers decided in the last forward, layer by layer."""
    layers = [m for m in model.modules() if isinstance(m, MoELayer | ExpertParallelLayer)]
    return [layer.routing for layer in layers if layer.routing is not None]


def whole_state(model: nn.Module, group: Group = None) -> dict[str, Tensor]:
    """The parameters of the model before its experts were shared out, by name; a collective.

    Every rank gets them. Second names of tied ones, and buffers, are left out.
    """
    own = {n: p.detach() for n, p in model.named_parameters() if is_expert(p)}
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    others = {n: p.detach() for n, p in model.named_parameters() if not is_expert(p)}
    return others | {name: x for state in everyone for name, x in state.items()}


def total_loads(model: nn.Module) -> list[Tensor]:
    """Each layer's choices by expert, of all ranks of the world; a collective."""
    found = []
    for layer in expert_layers(model):
        assert layer.routing is not None
        counts = torch.bincount(layer.routing.experts.flatten(), minlength=layer.num_experts)
        dist.all_reduce(counts)
        found.append(counts)
    return found
