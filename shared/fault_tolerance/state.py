"""What a run consists of at any moment: all that decides what its next step will be."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class Stateful(Protocol):
    """Something that can write its state down in plain values and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in tensors, numbers, strings and containers of these."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state that `state_dict` returned."""
        ...


class Schedule(Stateful, Protocol):
    """Sets the optimizer's learning rate, step by step: torch.optim.lr_scheduler's classes do."""

    def step(self) -> None:
        """Set the next step's rate."""
        ...


class ResumableIndices(Stateful, Protocol):
    """A sampler that knows its epoch and its place in it, such as ResumableSampler."""

    epoch: int

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's indices from the current place to the end of the epoch."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        ...


@dataclass
class TrainingState:
    """Everything that a run needs to resume, but for the random generators, which are global.

    `model` may be wrapped (DDP, or the wrappers of lesson 06). `step` counts the steps that are
    done; `losses` holds one number for each of them.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    sampler: ResumableIndices
    step: int = 0
    losses: list[float] = field(default_factory=list)


TakeStep = Callable[[list[int]], float]  # this rank's indices in, the step's loss out
