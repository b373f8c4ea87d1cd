"""Lesson 13: bytes after every operator of a step, counted, beside the formula."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.measuring.live import NEGLIGIBLE_IN_A_MODEL, LiveBytes, settle
from shared.training.engine import finish

WIDTH = 64  # a matrix of it takes 16 KiB, a row 256 bytes


@dataclass
class Timeline:
    """What was alive after each operator, in order, with the operator's name."""

    points: list[tuple[str, int]] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # of these, whole parameters
    averaged: list[int] = field(default_factory=list)  # and gradients of shards

    @property
    def peak(self) -> int:
        """The most bytes at any point."""
        return max(size for _, size in self.points)


class _EveryOperator(TorchDispatchMode):
    def __init__(self, live: LiveBytes, timeline: Timeline) -> None:
        super().__init__()
        self.live, self.timeline = live, timeline
        self.model: Any = None  # a FullyShard, of which is known what is whole
        self.looks = True  # False: what is made is remembered, and nothing is counted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see shared.measuring.traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # a view of what was never made here: a buffer inside of gloo
            self.live.add(x for x in tree_leaves(result) if type(x) is Tensor)
        if not self.looks:
            return result
        if func.namespace == "c10d":
            settle(0.002)  # until gloo's threads hold nothing that they should not
        self.timeline.points.append((func._schema.name.split("::")[1], self.live.now()))
        if self.model is not None:
            flats = [unit.flat.untyped_storage().nbytes() for unit in self.model.units]
            grads = [p.grad.nbytes for p in self.model.parameters() if p.grad is not None]
            self.timeline.whole.append(sum(flats))
            self.timeline.averaged.append(sum(grads))
        return result


@contextmanager
def recording() -> Generator[_EveryOperator]:
    """Write down what is alive after every operator inside the block, of what is made there.

    What the library of collectives allocates for itself is left out: gloo copies a gather through
    a buffer of the whole's size, NCCL does not.
    """
    with _EveryOperator(LiveBytes(NEGLIGIBLE_IN_A_MODEL), Timeline()) as recorder:
        yield recorder


class Matrices(nn.Module):
    """Blocks of two matrices without biases: units of one size, rows far smaller."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Each block after the other, to one number."""
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def units_of(model: nn.Module, choice: str) -> list[nn.Module]:
    """The modules that are units by a word: root (none), block, or linear.

    Blocks are the members of lists; what is beside them (embeddings, norms, the output) is a unit
    by itself where it has parameters. Raises KeyError for another word.
    """

    def children(module: nn.Module) -> list[nn.Module]:
        found = []
        for child in module.children():
            listed = isinstance(child, nn.ModuleList | nn.ModuleDict)
            nested = any(isinstance(each, nn.ModuleList) for each in child.children())
            found += children(child) if listed or nested else [child]
        return [each for each in found if any(True for _ in each.parameters())]

    def linears() -> list[nn.Module]:
        return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]

    return {"root": list, "block": lambda: children(model), "linear": linears}[choice]()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Train once; FullyShard waits for its gradients, torch's engine does so by itself."""
    optimizer.zero_grad()
    model(x).backward()
    finish(model)
    optimizer.step()


def count_step(
    wrap: Callable[[nn.Module, Sequence[nn.Module]], nn.Module],
    choice: str = "block",
    num_blocks: int = 4,
) -> tuple[Timeline, int]:
    """The third step of a wrapped `Matrices`, operator by operator, without the update; and what
    is there before it."""
    torch.manual_seed(0)
    x = torch.randn(1, WIDTH)
    with recording() as recorder:
        timeline, live = recorder.timeline, recorder.live
        net = Matrices(num_blocks)
        model = wrap(net, units_of(net, choice))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
        recorder.looks = False
        for _ in range(2):
            one_step(model, optimizer, x)
        optimizer.zero_grad()
        recorder.looks = True
        kept = [x for state in optimizer.state.values() for x in state.values()]
        live.add(x.to_local() for x in kept if isinstance(x, DTensor))  # made out of sight
        settle(0.02)
        before = live.now()
        timeline.points.clear()
        recorder.model = model if hasattr(model, "units") else None
        model(x).backward()
        finish(model)
    return timeline, before


def with_fsdp2(net: nn.Module, units: Sequence[nn.Module], **settings: Any) -> nn.Module:
    """torch's fully_shard on the same units, and on the root.

    A unit that shares a parameter with another stays with the root: torch's engine refuses it.
    """
    holders = [set(unit.parameters()) for unit in units]
    for i, unit in enumerate(units):
        if not any(holders[i] & other for other in holders[:i] + holders[i + 1 :]):
            fully_shard(unit, **settings)
    fully_shard(net, **settings)
    return net


def with_ddp(net: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
    """torch's DDP, which knows no units."""
    return nn.parallel.DistributedDataParallel(net)


def unit_sizes(choice: str, num_blocks: int = 4) -> list[int]:
    """The elements of each unit of `Matrices`, in the order of forward."""
    matrix = WIDTH * WIDTH
    return {
        "root": [2 * num_blocks * matrix],
        "block": [2 * matrix] * num_blocks,
        "linear": [matrix] * (2 * num_blocks),
    }[choice]
