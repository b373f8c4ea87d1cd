"""What the ranks of dp do with the gradients of their equal parts of a model."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.ddp.averaging import average_flat
from shared.parallel3d.mesh import Axis
from shared.parallel3d.norm import Pieces
from shared.pipeline.executor import Pipeline


class Replicas(Protocol):
    """The optimizer of one rank, and how its gradients become means over the replicas."""

    in_parts: bool  # whether a replica has pieces of the means alone

    @property
    def optimizer(self) -> Optimizer:
        """What is stepped, and whose learning rate is set."""
        ...

    def average(self) -> None:
        """Let this rank's gradients, or its pieces of them, be means over the replicas."""
        ...

    def pieces(self) -> Pieces:
        """Every parameter that has a gradient on this rank, with its piece of the mean."""
        ...

    def drop(self) -> None:
        """Drop all gradients, and what a step that raised has left."""
        ...

    def whole(self, key: str | None = None) -> dict[nn.Parameter, Tensor]:
        """This rank's parameters, or what the optimizer keeps for them as `key`, not in pieces."""
        ...


class ReplicatedWeights:
    """Stage 0: each replica has all weights, gradients and optimizer states of its part.

    A rank keeps its parameters, from the first backward to zero_grad a gradient for each, and the
    optimizer's states. While gradients are averaged there is also one flat copy of those that
    have the same dtype.
    """

    in_parts = False

    def __init__(
        self, pipeline: Pipeline, dp: Axis, optimizer_class: type[Optimizer], **settings: Any
    ) -> None:
        self.dp = dp
        self.parameters = list(pipeline.parameters())
        self.trained = [p for p in self.parameters if p.requires_grad]
        self.optimizer = optimizer_class(self.trained, **settings)

    @torch.no_grad()
    def average(self) -> None:
        """One flat all-reduce for each dtype."""
        if self.dp.size == 1:
            return
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for _, gradient in self.pieces():
            kinds.setdefault(gradient.dtype, []).append(gradient)
        for gradients in kinds.values():
            average_flat(gradients, self.dp.group)

    def pieces(self) -> Pieces:
        """The gradients themselves."""
        return [(p, p.grad) for p in self.trained if p.grad is not None]

    def drop(self) -> None:
        """They are all in .grad."""
        self.optimizer.zero_grad()

    def whole(self, key: str | None = None) -> dict[nn.Parameter, Tensor]:
        """The parameters or states themselves."""
        state = self.optimizer.state
        found = self.parameters if key is None else [p for p in self.trained if p in state]
        return {p: p.detach() if key is None else state[p][key] for p in found}
