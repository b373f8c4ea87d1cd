"""Lesson 13: what is sharded in the checks, and its twins in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.exercises.remembered import once_an_answer

RATE = 0.3


class Block(nn.Module):
    """A product whose bias a rank can leave out, or, when it is idle, all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)
        self.bias = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor, with_bias: bool, idle: bool) -> Tensor:
        if idle:
            return x.tanh()
        y = x @ self.weight.t()
        return (y + self.bias if with_bias else y).tanh()


class Net(nn.Module):
    """Odd sizes, a tied matrix, a frozen block, a buffer, a parameter outside of all units.

    `twice` calls the first block a second time; `named` gives blocks their inputs by name.
    """

    def __init__(self, *, frozen: bool = False, twice: bool = False, named: bool = False) -> None:
        super().__init__()
        self.twice, self.named = twice, named
        self.embedding = nn.Embedding(13, 7)
        self.layers = nn.ModuleList(Block(7) for _ in range(3))
        self.output = nn.Linear(7, 13)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.rand(7) + 0.5)
        self.register_buffer("shift", torch.randn(7))
        self.layers[1].requires_grad_(not frozen)

    def forward(self, ids: Tensor, with_bias: bool = True, idle: bool = False) -> Tensor:
        x = self.embedding(ids) * self.scale + self.get_buffer("shift")
        for layer in [*self.layers, *list(self.layers[:1]) * self.twice]:
            rests = idle and layer is self.layers[2]
            if self.named:
                x = x + layer(x=x, with_bias=with_bias, idle=rests)
            else:
                x = x + layer(x, with_bias, rests)
        return self.output(x)


@dataclass(frozen=True)
class Case:
    """Steps of a net on some ranks.

    `short`: rank 1 leaves out the biases of the blocks and, from the second step on, all of one.
    """

    world_size: int
    frozen: bool = False
    twice: bool = False
    short: bool = False
    named: bool = False
    units: str = "default"
    mesh: tuple[int, int] | None = None
    accumulate: bool = True
    keep_whole: int = 0
    keep_units: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What the answer is told besides, where it is anything."""
        small = {"keep_whole": self.keep_whole} if self.keep_whole else {}
        return small | ({"reshard_after_forward": False} if self.keep_units else {})

    def net(self) -> Net:
        """The net, with numbers of this process's own."""
        return Net(frozen=self.frozen, twice=self.twice, named=self.named)

    def chosen(self, net: Net) -> list[nn.Module] | None:
        """The units that are named."""
        named = {
            "default": None,
            "root": [],
            "some": [net.layers[2], net.output, net.layers[0]],
            "first": [net.embedding, net.layers[1]],
        }
        return named[self.units]

    def passes(self, step: int) -> int:
        """Backward passes of a step: every second step adds up two."""
        return 1 + (step % 2 if self.accumulate else 0)

    def loss(self, model: nn.Module, seed: int, step: int, part: int, rank: int) -> Tensor:
        """The loss of one rank's rows."""
        draw = torch.Generator().manual_seed(seed % 10_000 + 1000 * step + 100 * part + rank)
        ids, wanted = (torch.randint(13, (5,), generator=draw) for _ in range(2))
        short = self.short and rank == 1
        logits = model(ids, with_bias=not short, idle=short and step > 0)
        return nn.functional.cross_entropy(logits.float(), wanted)


NUM_STEPS = 3


def twin_steps(
    case: Case, seed: int, start: dict[str, Tensor], wrong: str = "", rank: int = 0
) -> list[dict[str, Tensor]]:
    """The weights after each step in one process, on the mean of all ranks' gradients.

    `wrong` names what goes wrong: "sum" over the ranks, "own" gradients alone, the "last" or the
    "first" backward pass alone, "node": the mean over a node's ranks alone, "again": their mean
    over all ranks.
    """
    # Tensors hash by identity: an answer's case begins with the same ones on every rank.
    return _twin_steps(
        case, seed, tuple(start.items()), wrong, rank if wrong in ("own", "node") else 0
    )


@once_an_answer
def _twin_steps(
    case: Case, seed: int, start: tuple[tuple[str, Tensor], ...], wrong: str, rank: int
) -> list[dict[str, Tensor]]:
    """What `twin_steps` returns; it computes for all ranks at once what is the same on all."""
    net = case.net()
    net.load_state_dict(dict(start))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    ranks: Sequence[int] = range(case.world_size)
    if wrong == "own":
        ranks = [rank]
    if wrong == "node" and case.mesh is not None:
        first = rank - rank % case.mesh[1]
        ranks = range(first, first + case.mesh[1])
    share = 1 if wrong == "sum" else len(ranks)
    if case.mesh is not None:
        share = {"replicas": case.mesh[1], "again": len(ranks) * case.mesh[0]}.get(wrong, share)
    steps = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        passes = range(case.passes(step))
        passes = {"last": passes[-1:], "first": passes[:1]}.get(wrong, passes)
        for part in passes:
            for each in ranks:
                (case.loss(net, seed, step, part, each) / share).backward()
        optimizer.step()
        steps.append({name: x.detach().clone() for name, x in net.named_parameters()})
    return steps


def nearest_own(case: Case, seed: int, start: dict[str, Tensor], step: int, seen: Tensor) -> Tensor:
    """Each number as the rank has it, trained by itself, that is nearest to the seen one."""
    owns = torch.stack(
        [
            flat(twin_steps(case, seed, start, wrong="own", rank=rank)[step])
            for rank in range(case.world_size)
        ]
    )
    return owns.gather(0, (owns - seen).abs().argmin(0, keepdim=True))[0]


def flat(weights: dict[str, Tensor]) -> Tensor:
    """All weights in one vector."""
    return torch.cat([each.flatten() for each in weights.values()])
