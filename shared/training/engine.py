"""An engine as those who train with it see it; the one step and the one curve of all engines.

Lessons 06, 10, 13, 14, 15 and 16 each build engines that send other things at other times. What
they have in common is `Engine`: a new one has its methods, and `reference_curve` then proves it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared.data.rows import Rows
from shared.training.reference_run import (
    NUM_STEPS,
    learning_rate,
    loss_of,
    reference_batches,
    shard,
)
from shared.training.schedules import set_learning_rate


class Engine(Protocol):
    """A model that ranks train together, with its optimizer.

    A checkpoint takes its state by a `Layout` (`shared/training/named_checkpoint.py`).
    """

    @property
    def model(self) -> nn.Module:
        """What this rank has of the model."""
        ...

    @property
    def optimizer(self) -> Any:
        """What zero_grad() and step() are called of, and whose learning rate is set."""
        ...

    @property
    def share(self) -> tuple[int, int]:
        """Which part of a global batch's rows this rank is given, of how many; (0, 1): all."""
        ...

    def forward_backward(self, batch: Rows, num_tokens: int | None = None) -> Tensor:
        """Add the gradients of this rank's rows to `.grad`; return this rank's part of the loss.

        `num_tokens` are those of the global batch, whose mean loss is meant; None: the batch's.
        """
        ...

    def average_gradients(self) -> None:
        """Let the gradients be those of the global batch. Call between backward and step."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients to this norm of the whole model's; return what it was."""
        ...

    def global_loss(self, part: Tensor) -> Tensor:
        """Turn what forward_backward() returned, any number of steps, into the losses of the
        global batches, the same on every rank; a collective.
        """
        ...


class StepResult(NamedTuple):
    """This rank's part of a step's loss, and the gradient's norm before it was clipped."""

    part: Tensor
    norm: Tensor | None


def train_step(
    engine: Engine, batch: Rows, num_tokens: int | None = None, max_norm: float | None = None
) -> StepResult:
    """Train on this rank's rows of a global batch; the arguments are `forward_backward`'s.

    A step that raises on all ranks and is caught there leaves nothing for the next one. But
    DDP (torch's or lesson 06's) refuses the next forward after an error in backward, DeepSpeed's
    engine the next step after one between micro-batches.
    """
    engine.optimizer.zero_grad()
    part = engine.forward_backward(batch, num_tokens)
    engine.average_gradients()  # wait: from here on all ranks hold the same means,
    # and only now their norm is that of the whole batch, and the same on every rank.
    norm = None if max_norm is None else engine.clip(max_norm)
    engine.optimizer.step()
    return StepResult(part, norm)


class Curve(NamedTuple):
    """A run's mean loss per token by step, and its gradients' norms where it was clipped."""

    losses: list[float]
    norms: list[float]


def reference_curve(
    engine: Engine, steps: Iterable[int] = range(NUM_STEPS), max_norm: float | None = None
) -> Curve:
    """Train these steps (from 0) of lesson 04's reference run; the losses are before each update.

    The engine's model is `reference_model()`, its optimizer has `reference_optimizer`'s settings.
    """
    batches, curve = reference_batches(), Curve([], [])
    device = next(engine.model.parameters()).device
    for i in steps:
        set_learning_rate(engine.optimizer, learning_rate(i + 1))
        own = shard(batches[i], *engine.share).to(device)
        part, norm = train_step(engine, own, batches[i].num_tokens, max_norm)
        curve.losses.append(engine.global_loss(part).item())
        if norm is not None:
            curve.norms.append(norm.item())
    return curve


@dataclass
class DataParallelEngine:
    """Ranks that differ in their rows alone: one process, DDP, ZeRO and full sharding.

    What is sent when is the business of model and optimizer, which average over the ranks.

    Args:
        model: called with a batch's tokens; after the engine's own wrapping.
        optimizer: of the parameters that this rank has after it.
        num_replicas: ranks that share out a batch. 1: each trains on the whole of it by itself.
        finish: called between backward and step; None: the model's `finish_gradient_sync`, if any.
        loss: (model, batch, tokens of the global batch) -> the batch's part of its mean loss.
        name: for tables.
    """

    model: Any
    optimizer: Any
    num_replicas: int = 1
    finish: Callable[[], object] | None = None
    loss: Callable[[Any, Any, int], Tensor] = loss_of
    name: str = ""

    @property
    def share(self) -> tuple[int, int]:
        """Rows by rank."""
        rank = dist.get_rank() if self.num_replicas > 1 else 0
        return rank, self.num_replicas

    def forward_backward(self, batch: Rows, num_tokens: int | None = None) -> Tensor:
        """The part is the sum over this rank's tokens over the number of tokens of *all* ranks.

        So the parts add up to the loss of the whole batch, however unequal they are.
        """
        part = self.loss(self.model, batch, batch.num_tokens if num_tokens is None else num_tokens)
        # Engines average, and parts are to be added: times the number of ranks. Hooks send each
        # gradient as it is complete, while backward goes on.
        (part * self.num_replicas).backward()
        return part.detach()

    def average_gradients(self) -> None:
        """Wait for what backward has begun to send, or send now."""
        if self.finish is None:
            finish(self.model)
        else:
            self.finish()

    def clip(self, max_norm: float) -> Tensor:
        """By the engine's own method where no rank has whole gradients, or else by torch's."""
        for owner in (self.optimizer, self.model):
            if hasattr(owner, "clip_grad_norm_"):
                return owner.clip_grad_norm_(max_norm)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # FSDP2's is in parts

    def global_loss(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts."""
        total = part.clone()
        if self.num_replicas > 1:
            dist.all_reduce(total)
        return total


def finish(model: Any) -> None:
    """Wait for the gradients, where a wrapped model wants to be told when."""
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
