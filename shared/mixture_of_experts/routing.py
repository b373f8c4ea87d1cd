"""Which experts a token goes to, and what keeps their loads even."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.errors import InputError
from shared.ranks.collectives import Group


class Routing(NamedTuple):
    """What a router decides about each token, and what it thought of every expert."""

    experts: Int[Tensor, "tokens k"]
    weights: Float[Tensor, "tokens k"]
    probabilities: Float[Tensor, "tokens experts"]


def top_k_router(
    logits: Float[Tensor, "tokens experts"], k: int, bias: Float[Tensor, "experts"] | None = None
) -> Routing:
    """Send each token to its k most probable experts, the most probable one first.

    Weights are the probabilities of the chosen, for k > 1 divided by their sum. With k = 1 they
    stay as they are: divided they would be 1, and no gradient would reach the router. `bias` is
    added to the probabilities for the choice alone. Softmax runs in float32 at the least; weights
    and probabilities come back in the dtype of that.

    Raises InputError for a k below 1 or above the number of experts.
    Source: Shazeer et al. 2017 (arXiv 1701.06538); Fedus et al. 2021 (2101.03961) for k = 1;
    Wang et al. 2024 (2408.15664) for the bias.
    """
    num_experts = logits.shape[-1]
    if not 1 <= k <= num_experts:
        raise InputError(f"k = {k} of {num_experts} experts: take a k from 1 to {num_experts}")
    wide = torch.promote_types(logits.dtype, torch.float32)  # 16 bits make ties of near logits
    probabilities = logits.to(wide).softmax(-1)
    score = probabilities if bias is None else probabilities + bias
    experts = score.detach().topk(k, -1).indices
    weights = probabilities.gather(-1, experts)
    if k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights, probabilities)


def loads(experts: Int[Tensor, "tokens k"], num_experts: int) -> Int[Tensor, "experts"]:
    """How many choices fell on each expert."""
    return torch.bincount(experts.flatten(), minlength=num_experts)


def balance_loss(routing: Routing, group: Group = None) -> Float[Tensor, ""]:
    """Return Switch's loss, 1 for even loads: E times the sum of share times mean probability.

    The shares are those of all choices of all ranks of the group, the probabilities this rank's:
    the mean over ranks with equally many tokens is then the loss of the whole batch. A share is a
    count and has no gradient, a probability has one: the more an expert is chosen, the more its
    probability is pushed down. Without a process group this process is alone.

    Source: Fedus et al. 2021 (arXiv 2101.03961), section 2.2; Qiu et al. 2025 (2501.11873) for
    counts over all ranks.
    """
    num_experts = routing.probabilities.shape[-1]
    counts = loads(routing.experts, num_experts)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(counts, group=group)
    shares = counts.to(routing.probabilities.dtype) / counts.sum().clamp(min=1)
    mean = routing.probabilities.sum(0) / max(1, len(routing.probabilities))  # also of no tokens
    return num_experts * (shares * mean).sum()


@torch.no_grad()
def update_bias(
    bias: Float[Tensor, "experts"], counts: Int[Tensor, "experts"], rate: float = 1e-3
) -> None:
    """Raise by `rate` the bias of experts below the mean load, lower it above, in place.

    `counts` are those of all ranks. No gradient, so the language model's loss is left alone.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; Wang et al. 2024 (2408.15664).
    """
    mean = counts.double().mean()
    bias += rate * torch.sign(mean - counts).to(bias)


def capacity_for(factor: float, choices: int, num_experts: int) -> int:
    """Return how many rows an expert takes: `factor` times an even share, rounded up."""
    if factor <= 0:
        raise InputError(f"a capacity factor of {factor}: take 1 for an even share, or more")
    return math.ceil(factor * choices / num_experts)


def within_capacity(
    experts: Int[Tensor, "tokens k"], num_experts: int, capacity: int
) -> Bool[Tensor, "tokens k"]:
    """Mark the choices that are kept: the first `capacity` of each expert.

    First choices come before all second ones, and so on; among them earlier tokens come first.
    Raises InputError for a capacity below 0.
    Source: Lepikhin et al. 2020 (arXiv 2006.16668), algorithm 1.
    """
    if capacity < 0:
        raise InputError(f"a capacity of {capacity} rows: it must be 0 or more")
    in_turn = experts.t().flatten()  # all first choices, then all second ones
    chosen = torch.nn.functional.one_hot(in_turn, num_experts)  # (k T, E)
    place = (chosen.cumsum(0) * chosen).sum(-1)  # from 1: which of its expert's rows this is
    return (place <= capacity).view(experts.shape[1], -1).t()
