"""A stage that sleeps: a pipeline whose work takes a known time on any number of cores."""

import time
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from shared.pipeline.stages import Activations, Part


class _Pause(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class SleepingPart(Part):
    """A small matrix whose forward takes `seconds`, its backward `backward_seconds` (as long).

    It sleeps: with more ranks than cores, work that computes would wait for a core. A batch has
    the shape (rows, 8).
    """

    def __init__(self, seconds: float, backward_seconds: float | None = None) -> None:
        super().__init__(lambda batch: [tuple(batch.shape)])
        self.seconds = seconds, seconds if backward_seconds is None else backward_seconds
        self.matrix = nn.Linear(8, 8)

    def forward(self, activations: Activations, batch: Tensor) -> Activations:
        """The matrix on what came, or on the batch in the first stage."""
        return (_Pause.apply(self.matrix(activations[0] if activations else batch), *self.seconds),)
