"""A chain of units under observation: its weights, and how many elements are whole when."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lessons.lesson13_fsdp.laboratory.sharded_modules import (
    Observed,
    observe_bytes,
    observe_calls,
)
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all

SIZES = ((5, 7), (7, 3), (3, 4))  # odd: shards are padded
NUM_STEPS = 3


@dataclass
class ChainSeen:
    """One rank's weights at the start and at the end, and elements of the module's parameters."""

    own: Tensor
    state: Tensor
    kept: int  # elements of the shards
    listed: int  # tensors in parameters()
    after_forward: int
    between: int
    evaluated: int


def make_chain() -> nn.Sequential:
    """Products with a bias and a tanh; each is a unit."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in SIZES))


def chain_loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
    """The loss of one rank's rows."""
    draw = torch.Generator().manual_seed(seed % 10_000 + 100 * step + rank)
    return (model(torch.randn(4, 5, generator=draw)) - 1).square().mean()


def observe_weights(answer: Any, seed: int, rank: int) -> tuple[int, ChainSeen]:
    """Three steps of SGD with momentum on the shards, an evaluation at the end."""
    seed_all(seed + rank)
    net = make_chain()
    own = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    model = answer(net, list(net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    whole = lambda: sum(p.numel() for p in net.parameters())  # noqa: E731
    shards = [p.numel() for p in model.parameters()]
    seen = ChainSeen(own, own, sum(shards), len(shards), 0, 0, 0)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = chain_loss(model, seed, step, rank)
        seen.after_forward = max(seen.after_forward, whole())
        loss.backward()
        model.finish_gradient_sync()
        seen.between = max(seen.between, whole())
        optimizer.step()
    with torch.no_grad():
        chain_loss(model, seed, NUM_STEPS, rank)
    seen.evaluated = whole()
    pieces = [piece for unit in model.units for piece in unit.full(unit.shard)]
    seen.state = torch.cat([piece.flatten() for piece in pieces]).detach()
    return seed, seen


def twin_weights(seed: int, start: Tensor, num_ranks: int) -> list[Tensor]:
    """The weights after each step of one process, on the mean of the ranks' gradients."""
    net = make_chain()
    nn.utils.vector_to_parameters(start.clone(), net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    after = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (chain_loss(net, seed, step, rank) / num_ranks).backward()
        optimizer.step()
        after.append(nn.utils.parameters_to_vector(net.parameters()).detach().clone())
    return after


@once_an_answer
def observed_chain(answer: Any) -> Observed:
    """What is seen of an answer to 13.1b."""

    def make(net: nn.Module, units: Any, mesh: Any = None) -> nn.Module:
        return answer(net, units)

    seed = fresh_seed()
    rows: dict[int, dict[Any, Callable[[int], Any]]] = {n: {} for n in (1, 2, 3)}
    for n in rows:
        rows[n][n, "weights"] = functools.partial(observe_weights, answer, seed)
    for choice in ("block", "linear"):
        for n in (2, 3):
            rows[n][n, "calls", choice] = functools.partial(observe_calls, make, choice)
        rows[2]["bytes", choice] = functools.partial(observe_bytes, make, choice)
    return Observed(rows)
