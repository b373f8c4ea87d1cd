"""Lesson 13: what becomes of a sharding's arguments, and who is told of a unit's use."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shared.exercises.seeds import seed_all
from shared.experiments.lesson13_memory import Matrices, units_of
from shared.laboratories.lesson13 import HALF, Make
from shared.laboratories.lesson13_nets import Net
from shared.measuring.traffic import count_traffic


def observe_acquired(answer: Any, rank: int) -> tuple[int, int]:
    """How often acquire() is called in a forward and in a backward of three units."""
    noted: list[Any] = []

    class Noting(answer):
        def acquire(self, unit: Any) -> None:
            noted.append(unit)
            super().acquire(unit)

    seed_all(0)
    net = Matrices(3)
    model: Any = Noting(net, units_of(net, "block"))
    loss = model(torch.randn(1, 64))
    forward = len(noted)
    loss.backward()
    model.finish_gradient_sync()
    return forward, len(noted) - forward


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
