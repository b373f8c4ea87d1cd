"""Lesson 13: what becomes of a sharding's arguments, and who is told of a unit's use."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.exercises.seeds import seed_all
from shared.experiments.lesson13_memory import Matrices, units_of
from shared.laboratories.lesson13 import HALF, Make
from shared.laboratories.lesson13_nets import Net
from shared.measuring.traffic import count_traffic


@dataclass
class Told:
    """What a class derived from an answer learns in one step of three units."""

    forward: int  # calls of acquire()
    backward: int
    means: int  # calls of on_shard_gradient()
    early: int  # of these, the ones that did not find what shard.grad was in the end


def observe_acquired(answer: Any, rank: int) -> Told:
    """A step under a class that overrides what an answer's hooks call."""
    noted: list[Any] = []
    found: list[tuple[Any, Tensor | None]] = []

    class Noting(answer):
        def acquire(self, unit: Any) -> None:
            noted.append(unit)
            super().acquire(unit)

        def on_shard_gradient(self, unit: Any) -> None:
            grad = unit.shard.grad
            found.append((unit, None if grad is None else grad.clone()))

    seed_all(0)
    net = Matrices(3)
    model: Any = Noting(net, units_of(net, "block"))
    loss = model(torch.randn(1, 64))
    forward = len(noted)
    loss.backward()
    model.finish_gradient_sync()
    early = sum(seen is None or not torch.equal(seen, unit.shard.grad) for unit, seen in found)
    return Told(forward, len(noted) - forward, len(found), early)


class Ending(nn.Module):
    """Two products, and a parameter of the module's own whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().sum()


def observe_ending(make: Make, rank: int) -> int:
    """How many gathers the third step has; the first unit to be used is the first to leave."""
    seed_all(0)
    net = Ending()
    model = make(net, list(net.layers), None)
    for _ in range(3):
        with count_traffic() as traffic:
            model(torch.randn(1, 6)).backward()
            model.finish_gradient_sync()
    return traffic.count("all_gather")


@dataclass
class Alone:
    """A sharding over a group of one rank, beside another such group."""

    numel: int
    kept: int  # elements of the shards
    own: bool  # its numbers and buffers are this rank's
    group_sizes: set[int]


def observe_alone(answer: Any, rank: int) -> Alone:
    """Each of two ranks shards a module of its own over itself alone."""
    seed_all(rank)
    net, groups = Net(), [dist.new_group([0]), dist.new_group([1])]
    own = {name: x.detach().clone() for name, x in net.state_dict().items()}
    numel = sum(p.numel() for p in net.parameters())
    with count_traffic() as traffic:
        model = answer(net, None, group=groups[rank])
        model(torch.arange(5)).sum().backward()
        model.finish_gradient_sync()
    kept = sum(p.numel() for p in model.parameters())
    state = model.full_state_dict()
    same = all(torch.equal(state[name], x) for name, x in own.items() if name in state)
    return Alone(numel, kept, same, {call.group_size for call in traffic.calls})


def observe_output(make: Make, rank: int) -> torch.dtype:
    """What a module computes in on a mesh of 2 x 2 that is given bfloat16."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    return make(net, None, (2, 2), HALF)(torch.zeros(1, 4)).dtype
