"""Scaled steps with planted infinities, on one rank and on several; engines."""

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import Tensor, nn

from shared.measuring.traffic import count_traffic

GRAD_SCALER = [  # what is called where torch's own scaler does the work
    (torch.amp.GradScaler, name) for name in ("__init__", "scale", "unscale_", "step", "update")
]
# No two settings are each other's inverse, so that none can stand in for another.
SETTINGS = {
    "init_scale": 1000.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
}
REFUSED = [("init_scale", value) for value in (0.0, -1.0)]
REFUSED += [("growth_factor", value) for value in (1.0, 0.75)]
REFUSED += [("backoff_factor", value) for value in (1.0, 1.5, 0.0, -0.5)]
REFUSED += [("growth_interval", value) for value in (0, -2)]


@contextlib.contextmanager
def watching(places: Sequence[tuple[Any, str]]) -> Generator[list[str]]:
    """Note which of these functions, of modules or classes, are called inside the block."""
    called: list[str] = []

    def spy(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in places:
            real = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, spy(real, name)))
        yield called


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


def reaches(loss: Tensor, weight: Tensor) -> bool:
    """Whether backward of the loss gives the weight a gradient; nothing is changed."""
    if loss.grad_fn is None:
        return False
    return torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)[0] is not None


@dataclass
class ScalerRun:
    """What a scaler did over some steps."""

    scales: list[float] = field(default_factory=list)  # after each update
    stepped: list[bool] = field(default_factory=list)  # whether the optimizer was let through
    returned: list[Any] = field(default_factory=list)  # what step() returned
    values: list[list[float]] = field(default_factory=list)


def scaled_steps(scaler: Any, planted: Sequence[float], seed: int) -> ScalerRun:
    """Train with `scaler`; a planted number that is not 0 is written into a gradient."""
    weights, run = new_weights(seed), ScalerRun()
    for number, value in enumerate(planted):
        weights.optimizer.zero_grad()
        scaler.scale(weights.loss()).backward()
        if value:
            assert weights.second.grad is not None, "the second group has no gradient"
            weights.second.grad[number % 3, 1] = value
        if number % 3 == 0:  # as for clipping; otherwise step() has to do it
            scaler.unscale_(weights.optimizer)
        before = len(weights.optimizer.seen)
        run.returned.append(scaler.step(weights.optimizer))
        run.stepped.append(len(weights.optimizer.seen) > before)
        scaler.update()
        run.scales.append(scaler.get_scale())
        run.values.append(weights.values())
    return run


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


def two_at_once(scaler: Any, culprits: Sequence[Sequence[int]]) -> ScalerRun:
    """Steps of two optimizers under one scaler; in each an infinity is planted for some of them."""
    both, run = [new_weights(seed) for seed in (1, 2)], ScalerRun()
    for overflowing in culprits:
        for weights in both:
            weights.optimizer.zero_grad()
            scaler.scale(weights.loss()).backward()
        for culprit in overflowing:
            grad = both[culprit].first.grad
            assert grad is not None, "the first group has no gradient"
            grad[0] = math.inf
        scaler.unscale_(both[0].optimizer)  # only this one is clipped
        run.stepped += [scaler.step(weights.optimizer) is not False for weights in both]
        scaler.update()
        run.scales.append(scaler.get_scale())
        run.values.append([*both[0].values(), *both[1].values()])
    return run


def beside_another(make: Callable[..., Any]) -> tuple[float, float]:
    """The scales of a scaler without an overflow, and of one that has met one, before update()."""
    calm, other = make(init_scale=8.0), make(init_scale=1.0)
    weights, stranger = new_weights(0), new_weights(0)
    stranger.first.grad = torch.full((5,), math.inf)
    other.unscale_(stranger.optimizer)
    calm.scale(weights.loss()).backward()
    calm.step(weights.optimizer)
    calm.update()
    return calm.get_scale(), other.get_scale()


def overflow_on(rank: int, make: Callable[..., Any], culprits: Sequence[int]) -> dict[str, Any]:
    """Steps in which one rank alone meets an infinity, or in which one rank has no gradients."""
    scaler, weights = make(init_scale=8.0, growth_interval=100), new_weights(0)
    stepped, scales, sizes = [], [], []
    for number, culprit in enumerate(culprits):
        weights.optimizer.zero_grad()
        if culprit >= 0 or rank != 0:  # -1: rank 0 has no gradient at all
            scaler.scale(weights.loss()).backward()
        if rank == culprit and weights.first.grad is not None:
            weights.first.grad[2] = math.inf
        before = len(weights.optimizer.seen)
        with count_traffic() as traffic:
            if number > 1:  # as for clipping; otherwise step() has to do it
                scaler.unscale_(weights.optimizer)
            scaler.step(weights.optimizer)
            scaler.update()
        stepped.append(len(weights.optimizer.seen) > before)
        scales.append(scaler.get_scale())
        sizes.append([call.num_bytes for call in traffic.calls])
    return {"stepped": stepped, "scales": scales, "sizes": sizes}
