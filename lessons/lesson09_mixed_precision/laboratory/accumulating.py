"""Micro-batches of tokens, accumulated in one process and on ranks."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what DDP and optimizers import: once here, not in every forked rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.exercises.seeds import fresh_generator
from shared.measuring.traffic import count_traffic


@dataclass
class Tokens:
    """A micro-batch: as many rows as tokens."""

    x: Tensor
    y: Tensor
    num_tokens: int


@dataclass
class Many:
    """A micro-batch that says that it has so many tokens; `part` is what the loss is taken of."""

    part: Tokens
    num_tokens: int


def micro_batches(counts: Sequence[int]) -> list[Tokens]:
    """Random micro-batches with these numbers of tokens."""
    generator = fresh_generator()

    def draw(n: int, size: int) -> Tensor:
        return torch.randn(n, size, generator=generator, dtype=torch.float64)

    return [Tokens(draw(n, 4), draw(n, 3), n) for n in counts]


@dataclass
class Watch:
    """The mean loss per token, and the order in which forwards and backwards happen."""

    events: list[str] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def loss_of(self, model: nn.Module, batch: Tokens) -> Tensor:
        """Mean squared error per token."""
        self.events.append("forward")
        loss = (model(batch.x) - batch.y).square().sum() / batch.num_tokens
        if loss.requires_grad:  # not where an answer asks for the number alone
            loss.register_hook(lambda grad: self.events.append("backward"))
        self.losses.append(loss)
        return loss

    def keeps_a_graph(self) -> bool:
        """Whether backward could go through a loss once more: its activations are still alive."""
        for loss in self.losses:
            with contextlib.suppress(RuntimeError):
                loss.backward()
                return True
        return False


def small_net(seed: int = 3) -> nn.Module:
    """Two layers in float64, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def one_process(counts: Sequence[int]) -> tuple[nn.Module, list[Tokens], Watch]:
    """A net, micro-batches with these numbers of tokens, and who watches them."""
    return small_net(), micro_batches(counts), Watch()


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector; zeros where there is none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.detach().flatten() for grad in grads])


def weighted(net: nn.Module, parts: Sequence[Tokens], weights: Sequence[float]) -> Tensor:
    """The gradient of a sum of the parts' mean losses with these weights, in one process."""
    twin = copy.deepcopy(net)
    twin.zero_grad()
    for part, weight in zip(parts, weights, strict=True):
        (weight * Watch().loss_of(twin, part)).backward()
    return flat_gradient(twin)


def mean_loss(net: nn.Module, parts: Sequence[Tokens]) -> Tensor:
    """The mean loss per token of all parts together."""
    with torch.no_grad():
        errors = [(net(part.x) - part.y).square().sum() for part in parts]
    return torch.stack(errors).sum() / sum(part.num_tokens for part in parts)


def accumulate_on(
    rank: int,
    accumulate: Callable[..., Any],
    shares: Sequence[Sequence[Tokens]],
    before: float = 0.0,
    scale: float | None = None,
) -> dict[str, Any]:
    """Accumulate on this rank under torch's DDP; what the third time sent and gave.

    Every .grad holds `before` at the start; with a `scale` it goes through a scaler.
    """
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    net = small_net()
    ddp = DistributedDataParallel(net)
    for _ in range(3):  # torch's DDP rebuilds its buckets at the second
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, before)
        with count_traffic() as traffic:
            loss = accumulate(ddp, shares[rank], Watch().loss_of, scaler)
    return {
        "gradient": flat_gradient(net),
        "loss": float(loss),
        "sizes": [call.num_bytes for call in traffic.calls],
        "syncs": ddp.require_backward_grad_sync,
    }
