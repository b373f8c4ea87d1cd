"""Accelerate and Fabric behind the methods of the course's engines."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shared.data.rows import Rows
from shared.training.engine import DataParallelEngine

Wrapped = tuple[nn.Module, Any]


class FrameworkEngine(DataParallelEngine):
    """What a framework has wrapped, with its own backward and its own clipping."""

    def __init__(
        self, wrapped: Wrapped, backward: Callable[[Tensor], Any], clip: Callable[[float], Any]
    ) -> None:
        super().__init__(*wrapped, num_replicas=dist.get_world_size())
        self._backward, self._clip = backward, clip

    def forward_backward(self, batch: Rows, num_tokens: int | None = None) -> Tensor:
        """The framework averages over ranks, and parts are to be added."""
        part = self.loss(self.model, batch, batch.num_tokens if num_tokens is None else num_tokens)
        self._backward(part * self.num_replicas)
        return part.detach()

    def clip(self, max_norm: float) -> Tensor:
        """By the framework."""
        return self._clip(max_norm)


def forget_accelerate() -> None:
    """What Accelerate keeps of a training before, or of TrainingArguments before a fork."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerate_engine(model: nn.Module, optimizer: Any) -> FrameworkEngine:
    """Accelerate on the CPU, in the process group that is there."""
    from accelerate import Accelerator

    forget_accelerate()  # else it may train each rank alone
    runner = Accelerator(cpu=True)
    wrapped = runner.prepare(model, optimizer)
    clip = runner.clip_grad_norm_
    return FrameworkEngine(wrapped, runner.backward, lambda most: clip(model.parameters(), most))


def fabric_engine(model: nn.Module, optimizer: Any) -> FrameworkEngine:
    """Lightning Fabric on the CPU, in the process group that is there."""
    from lightning_fabric import Fabric

    runner = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    runner.launch()
    wrapped = runner.setup(model, optimizer)
    clip = runner.clip_gradients
    return FrameworkEngine(wrapped, runner.backward, lambda most: clip(*wrapped, max_norm=most))
