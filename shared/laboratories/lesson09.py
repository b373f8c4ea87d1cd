"""Lesson 09: scaled steps with planted infinities, AdamW by formula, micro-batches on ranks."""

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import Tensor, nn

from shared.measuring.traffic import count_traffic

HALVES = (torch.bfloat16, torch.float16)


class Recorder(torch.optim.SGD):
    """Plain descent that keeps the gradients of every step that it is allowed to make."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.seen: list[list[Tensor | None]] = []

    def step(self, closure: Any = None) -> Any:
        """Keep the gradients, then descend."""
        own = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([None if p.grad is None else p.grad.clone() for p in own])
        return super().step(closure)


@dataclass
class Weights:
    """Two groups of weights, one without a gradient, and the optimizer over them."""

    first: nn.Parameter
    second: nn.Parameter
    unused: nn.Parameter
    optimizer: Recorder

    def loss(self) -> Tensor:
        """A sum whose gradients differ from weight to weight."""
        return self.first.square().sum() + 3 * self.second.square().sum()

    def values(self) -> list[float]:
        """All weights in one list."""
        return [*self.first.tolist(), *self.second.flatten().tolist(), *self.unused.tolist()]


def new_weights(seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """Fresh weights, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in (5, (3, 2), 2)]
    groups = [{"params": made[:1]}, {"params": made[1:], "lr": 0.05}]
    return Weights(*made, Recorder(groups))


@dataclass
class Course:
    """What a scaler did over some steps."""

    scales: list[float] = field(default_factory=list)  # after each update
    stepped: list[bool] = field(default_factory=list)  # whether the optimizer was let through
    said: list[Any] = field(default_factory=list)  # what step() returned
    values: list[list[float]] = field(default_factory=list)


def scaled_steps(scaler: Any, planted: Sequence[float], seed: int) -> Course:
    """Train with `scaler`; a planted number that is not 0 is written into a gradient."""
    weights, course = new_weights(seed), Course()
    for number, value in enumerate(planted):
        weights.optimizer.zero_grad()
        scaler.scale(weights.loss()).backward()
        if value:
            assert weights.second.grad is not None, "the second group has no gradient"
            weights.second.grad[number % 3, 1] = value
        if number % 3 == 0:  # as for clipping; otherwise step() has to do it
            scaler.unscale_(weights.optimizer)
        before = len(weights.optimizer.seen)
        course.said.append(scaler.step(weights.optimizer))
        course.stepped.append(len(weights.optimizer.seen) > before)
        scaler.update()
        course.scales.append(scaler.get_scale())
        course.values.append(weights.values())
    return course


def scales_by_rule(
    planted: Sequence[float],
    settings: Mapping[str, Any],
    *,
    late: int = 0,
    keeps_count: bool = False,
    counts_skips: bool = False,
    every: bool = False,
) -> list[float]:
    """The scale after each step by GradScaler's rule, or by one that is wrong in one way."""
    scale, clean, scales = settings["init_scale"], 0, []
    for value in planted:
        if value:
            scale *= settings["backoff_factor"]
            clean = clean + 1 if counts_skips else clean if keeps_count else 0
        else:
            clean += 1
            due = settings["growth_interval"] + late
            if clean == due or (every and clean > due):
                scale *= settings["growth_factor"]
                clean = clean if every else 0
        scales.append(scale)
    return scales


def growing(scaler: Any, steps: int) -> list[float]:
    """The scale after each of some steps whose gradients are all zero."""
    weights, scales = new_weights(0), []
    for _ in range(steps):
        scaler.scale(0.0 * weights.loss())
        weights.first.grad = torch.zeros(5)
        scaler.step(weights.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def overflow_on(rank: int, make: Callable[..., Any], culprits: Sequence[int]) -> dict[str, Any]:
    """Steps in which one rank alone meets an infinity, or in which one rank has no gradients."""
    scaler, weights = make(init_scale=8.0, growth_interval=100), new_weights(0)
    stepped, scales, sizes = [], [], []
    for culprit in culprits:
        weights.optimizer.zero_grad()
        if culprit >= 0 or rank != 0:  # -1: rank 0 has no gradient at all
            scaler.scale(weights.loss()).backward()
        if rank == culprit and weights.first.grad is not None:
            weights.first.grad[2] = math.inf
        before = len(weights.optimizer.seen)
        with count_traffic() as traffic:
            scaler.step(weights.optimizer)
            scaler.update()
        stepped.append(len(weights.optimizer.seen) > before)
        scales.append(scaler.get_scale())
        sizes.append([call.num_bytes for call in traffic.calls])
    return {"stepped": stepped, "scales": scales, "sizes": sizes}


def holds_a(kind: type, thing: Any) -> bool:
    """Whether an answer is, or keeps as an attribute, an instance of torch's own."""
    return isinstance(thing, kind) or any(isinstance(v, kind) for v in vars(thing).values())


# 09.2


def torch_adam_runs(act: Callable[[], Any]) -> bool:
    """Call `act`; return whether torch's own Adam or AdamW computed anything in it."""
    from torch.optim import adam

    names = ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam")
    with contextlib.ExitStack() as stack:
        spies = [
            stack.enter_context(mock.patch.object(adam, name, wraps=getattr(adam, name)))
            for name in names
        ]
        act()
    return any(spy.called for spy in spies)


def half_parameters(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """Three 16-bit parameters of odd sizes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((7,), (3, 5), (2, 3, 1))
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(parameters: Sequence[Tensor], steps: int, seed: int) -> list[list[Tensor]]:
    """Random gradients for each step, in the parameters' dtype."""
    draw = torch.Generator().manual_seed(seed + 1)
    return [
        [(0.3 * torch.randn(p.shape, generator=draw)).to(p.dtype) for p in parameters]
        for _ in range(steps)
    ]


def descend(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    grads: Sequence[Sequence[Tensor]],
    rates: Sequence[float],
) -> None:
    """One step for each list of gradients; the rate of the last group is changed before each."""
    for step, rate in zip(grads, rates, strict=True):
        optimizer.param_groups[-1]["lr"] = rate
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.to(parameter.dtype, copy=True)
        optimizer.step()


def adamw_by_formula(
    start: Tensor,
    grads: Sequence[Tensor],
    rates: Sequence[float],
    group: Mapping[str, Any],
    *,
    coupled: bool = False,
    corrected: bool = True,
    inner_eps: bool = False,
    half_square: bool = False,
) -> Tensor:
    """The master after the steps in float32, or what a formula that is wrong in one way gives."""
    (beta1, beta2), decay, eps = group["betas"], group["weight_decay"], group["eps"]
    w, m, v = start.float(), torch.zeros(start.shape), torch.zeros(start.shape)
    for t, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        g = grad.float() + (decay * w if coupled else 0)
        w = w if coupled else w * (1 - rate * decay)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * ((grad * grad).float() if half_square else g * g)
        a, b = (1 - beta1**t, 1 - beta2**t) if corrected else (1.0, 1.0)
        root = (v / b + eps).sqrt() if inner_eps else (v / b).sqrt() + eps
        w = w - rate * (m / a) / root
    return w


def through_a_file(state: Any) -> Any:
    """What is left of a state after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)
