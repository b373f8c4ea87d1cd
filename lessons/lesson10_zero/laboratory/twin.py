"""Lesson 10: the unsharded optimizer in one process, and what wrong answers make of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lessons.lesson10_zero.laboratory.nets import Slopes, TwoOutputs
from shared.exercises.nets import Case, Net, clone
from shared.exercises.remembered import once_an_answer

SETTINGS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2}
CHANGES = (1.5, 2.0, 0.2, 3.0, 0.5)  # of every group's settings, from step to step
JOIN_STEP = 2  # the step before which the last of several groups joins
SMALL_STEPS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0}  # of weights from 1 to 2, in bf16
NUM_SMALL_STEPS = 16
EXTRA_BACKWARD_STEP = 1  # the step that begins with a backward pass too many, before zero_grad()


@dataclass(frozen=True)
class StageCase(Case):
    """Training steps of the net, and how they are made.

    `kind` is the optimizer that is sharded; `grouped`: three groups, the last of which joins late;
    `with_closure`: every step takes a closure; `absent`: a rank and step without any backward.
    """

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    grouped: bool = False
    with_closure: bool = False
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
    case: StageCase, seed: int, started: dict[str, Tensor], wrong: str = "", rank: int = 0
) -> list[dict[str, Tensor]]:
    """The weights after each step in one process, or what one wrong way gives (see `_gradients`).

    The unsharded optimizer takes the mean of all ranks' gradients.
    """
    # Tensors hash by identity: an answer's case begins with the same ones on every rank.
    return _twin_steps(case, seed, tuple(started.items()), wrong, rank if wrong == "own" else 0)


@once_an_answer
def _twin_steps(
    case: StageCase, seed: int, started: tuple[tuple[str, Tensor], ...], wrong: str, rank: int
) -> list[dict[str, Tensor]]:
    """What `twin_steps` returns; it computes for all ranks at once what is the same on all."""
    net = case.net()
    net.load_state_dict({**net.state_dict(), **dict(started)})
    groups = groups_of(net) if case.grouped else [{"params": list(net.parameters())}]
    if wrong == "one group":
        groups = [{"params": group["params"]} for group in groups]
    late = groups.pop() if case.grouped else None
    kind = torch.optim.AdamW if wrong == "AdamW" else case.kind
    optimizer: Any = kind(groups, **SETTINGS)
    steps = []
    for step in range(len(CHANGES)):
        if late is not None and step == JOIN_STEP:
            optimizer.add_param_group(late)
        changed = {"first settings": 0, "first group": 1}.get(wrong)
        change(optimizer.param_groups[:changed], step, decay=wrong != "lr alone")
        if wrong not in ("never zeroed", "nothing zeroed"):
            optimizer.zero_grad()
        _gradients(case, net, seed, step, wrong, rank)
        optimizer.step()
        steps.append(clone(dict(net.named_parameters())))
    return steps


def _gradients(case: StageCase, net: Net, seed: int, step: int, wrong: str, rank: int) -> None:
    """Add the mean gradient over the ranks; `wrong`: "sum", "own" (this rank's), "last part".

    "mean of parts" divides by the number of backward passes as well. With "no zeros" AdamW leaves
    a parameter alone that no rank used.
    """
    ranks = [rank] if wrong == "own" else range(case.world_size)
    first = case.quiet if wrong == "last part" else 0
    if step == EXTRA_BACKWARD_STEP and wrong in ("nothing zeroed", "nothing dropped"):
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
def twin_output(case: StageCase, seed: int, weights: dict[str, Tensor], start: Any) -> Tensor:
    """The loss of a plain net with these weights."""
    net = case.net()
    net.load_state_dict({**net.state_dict(), **start, **weights})
    return case.loss(net, seed, 0, 99)


def rows_of(rank: int, step: int) -> Tensor:
    """The rows of a rank for the model with two outputs."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator).double()


def twin_of_outputs(
    started: dict[str, Tensor], num_ranks: int, lost: str = "nothing"
) -> dict[str, Tensor]:
    """What the unsharded AdamW makes of the model with two outputs; `lost`: whose gradients are."""
    net = TwoOutputs()
    net.load_state_dict(started)
    optimizer = torch.optim.AdamW(net.parameters(), **SETTINGS)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (net(rows_of(rank, step)).square().mean() / num_ranks).backward()
        for name, p in net.named_parameters():
            if p.grad is None or name.startswith(lost):
                p.grad = torch.zeros_like(p)
        optimizer.step()
    return clone(dict(net.named_parameters()))


def twin_of_halves(started: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    """What AdamW makes of unsharded float32 masters; the weights are their roundings."""
    net = Slopes()
    net.load_state_dict(started)
    weights = list(net.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, **SETTINGS | SMALL_STEPS)
    for _ in range(NUM_SMALL_STEPS):
        net.zero_grad()
        for rank in range(num_ranks):
            (net(torch.tensor(1.0 + rank, dtype=torch.bfloat16)) / num_ranks).backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.detach())
    return clone(dict(net.named_parameters()))


def nearest_own(case: StageCase, seed: int, started: dict[str, Tensor], got: Tensor) -> Tensor:
    """Of the ranks' own first steps, for each number the one that is nearest to what was seen."""
    ranks = range(case.world_size)
    steps = [twin_steps(case, seed, started, "own", rank)[0] for rank in ranks]
    own = torch.stack([torch.cat([x.flatten() for x in weights.values()]) for weights in steps])
    return own.gather(0, (own - got).abs().argmin(0, keepdim=True))[0]
