"""Lesson 10: the unsharded optimizer in one process, and what wrong answers make of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.laboratories.lesson06_nets import Case, Net, clone

SETTINGS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2}
CHANGES = (1.5, 2.0, 0.2, 3.0, 0.5)  # of every group's settings, from step to step
JOINS = 2  # the step before which the last of several groups joins
DROPPED = 1  # the step that begins with a backward pass too many, before zero_grad()


@dataclass(frozen=True)
class Course(Case):
    """Training steps of the net, and how they are made.

    `kind` is the optimizer that is sharded; `grouped`: three groups, the last of which joins late;
    `closed`: every step takes a closure; `absent`: a rank and step without any backward.
    """

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    grouped: bool = False
    closed: bool = False
    absent: tuple[int, int] = (-1, -1)


def change(groups: Sequence[dict[str, Any]], step: int, *, decay: bool = True) -> None:
    """Change settings before a step, as schedules do."""
    for group in groups:
        group["lr"] *= CHANGES[step]
        group["weight_decay"] *= CHANGES[-1 - step] if decay else 1.0


def groups_of(net: Net) -> list[dict[str, Any]]:
    """Three groups of the net's parameters, no two of which have the same settings."""
    named = dict(net.named_parameters())
    last = [p for name, p in named.items() if name.startswith(("last", "spare"))]
    biases = [p for name, p in named.items() if name.endswith("bias") and not is_in(p, last)]
    rest = [p for p in named.values() if not is_in(p, last) and not is_in(p, biases)]
    return [
        {"params": rest},
        {"params": biases, "weight_decay": 0.0, "lr": 0.05},
        {"params": last, "betas": (0.5, 0.9), "lr": 0.01},
    ]


def is_in(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether the tensor is one of the others; == would compare their numbers."""
    return any(tensor is other for other in others)


def twin_steps(
    case: Course, seed: int, started: dict[str, Tensor], wrong: str = "", rank: int = 0
) -> list[dict[str, Tensor]]:
    """The weights after each step in one process, or what one wrong way gives (see `_gradients`).

    The unsharded optimizer takes the mean of all ranks' gradients.
    """
    net = case.net()
    net.load_state_dict({**net.state_dict(), **started})
    groups = groups_of(net) if case.grouped else [{"params": list(net.parameters())}]
    if wrong == "one group":
        groups = [{"params": group["params"]} for group in groups]
    late = groups.pop() if case.grouped else None
    kind = torch.optim.AdamW if wrong == "AdamW" else case.kind
    optimizer: Any = kind(groups, **SETTINGS)
    steps = []
    for step in range(len(CHANGES)):
        if late is not None and step == JOINS:
            optimizer.add_param_group(late)
        changed = {"first settings": 0, "first group": 1}.get(wrong)
        change(optimizer.param_groups[:changed], step, decay=wrong != "lr alone")
        if wrong not in ("never zeroed", "nothing zeroed"):
            optimizer.zero_grad()
        _gradients(case, net, seed, step, wrong, rank)
        optimizer.step()
        steps.append(clone(dict(net.named_parameters())))
    return steps


def _gradients(case: Course, net: Net, seed: int, step: int, wrong: str, rank: int) -> None:
    """Add the mean gradient over the ranks; `wrong`: "sum", "own" (this rank's), "last part".

    "mean of parts" divides by the number of backward passes as well. With "no zeros" AdamW leaves
    a parameter alone that no rank used.
    """
    ranks = [rank] if wrong == "own" else range(case.world_size)
    first = case.quiet if wrong == "last part" else 0
    if step == DROPPED and wrong in ("nothing zeroed", "nothing dropped"):
        first = -1
    for each in ranks:
        for part in range(first, case.quiet + 1):
            scale = 1 if wrong in ("sum", "own") else 1 / case.world_size
            scale /= case.quiet + 1 if wrong == "mean of parts" else 1
            scale /= case.world_size if wrong == "divided twice" else 1
            if (each, step) != case.absent:
                (scale * case.loss(net, seed, each, step, part)).backward()
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = None if wrong == "no zeros" else torch.zeros_like(parameter)


@torch.no_grad()
def twin_output(case: Course, seed: int, weights: dict[str, Tensor], start: Any) -> Tensor:
    """The loss of a plain net with these weights."""
    net = case.net()
    net.load_state_dict({**net.state_dict(), **start, **weights})
    return case.loss(net, seed, 0, 99)


def nearest_own(case: Course, seed: int, started: dict[str, Tensor], got: Tensor) -> Tensor:
    """Of the ranks' own first steps, for each number the one that is nearest to what was seen."""
    ranks = range(case.world_size)
    steps = [twin_steps(case, seed, started, "own", rank)[0] for rank in ranks]
    own = torch.stack([torch.cat([x.flatten() for x in weights.values()]) for weights in steps])
    return own.gather(0, (own - got).abs().argmin(0, keepdim=True))[0]
