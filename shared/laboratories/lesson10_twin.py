"""Lesson 10: the unsharded AdamW in one process, and what an answer that is wrong makes of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.laboratories.lesson06_nets import Case, Net, clone

SETTINGS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2}
RATES = (0.03, 0.06, 0.01, 0.04, 0.02)


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
    case: Case,
    seed: int,
    started: dict[str, Tensor],
    *,
    grouped: bool = False,
    wrong: str = "",
    rank: int = 0,
) -> list[dict[str, Tensor]]:
    """The weights after each step in one process, or what one wrong way gives (see `_gradients`).

    The unsharded AdamW takes the mean of all ranks' gradients.
    """
    net = case.net()
    net.load_state_dict({**net.state_dict(), **started})
    groups = groups_of(net) if grouped else [{"params": list(net.parameters())}]
    if wrong == "one group":
        groups = [{"params": group["params"]} for group in groups]
    late = groups.pop() if grouped else None
    optimizer = torch.optim.AdamW(groups, **SETTINGS)
    steps = []
    for step, rate in enumerate(RATES):
        if late is not None and step == 2:
            optimizer.add_param_group(late)
        if not grouped and wrong != "first rate":
            optimizer.param_groups[0]["lr"] = rate
        if wrong != "never zeroed":
            optimizer.zero_grad()
        _gradients(case, net, seed, step, wrong, rank)
        optimizer.step()
        steps.append(clone(dict(net.named_parameters())))
    return steps


def _gradients(case: Case, net: Net, seed: int, step: int, wrong: str, rank: int) -> None:
    """Add the mean gradient over the ranks; `wrong`: "sum", "own" (this rank's), "last part".

    With "no zeros" AdamW leaves a parameter alone that no rank used.
    """
    ranks = [rank] if wrong == "own" else range(case.world_size)
    for each in ranks:
        for part in range(case.quiet if wrong == "last part" else 0, case.quiet + 1):
            scale = 1 if wrong in ("sum", "own") else 1 / case.world_size
            (scale * case.loss(net, seed, each, step, part)).backward()
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = None if wrong == "no zeros" else torch.zeros_like(parameter)


@torch.no_grad()
def twin_output(case: Case, seed: int, weights: dict[str, Tensor], start: Any) -> Tensor:
    """The loss of a plain net with these weights."""
    net = case.net()
    net.load_state_dict({**net.state_dict(), **start, **weights})
    return case.loss(net, seed, 0, 99)
