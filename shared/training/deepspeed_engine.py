"""DeepSpeed's engine behind the methods of the course's own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.data.rows import Rows, own_rows
from shared.training.engine import DataParallelEngine


class DeepSpeedEngine(DataParallelEngine):
    """What `deepspeed.initialize` returned, for a step of `num_micro_batches` equal parts.

    DeepSpeed counts calls: its step() is called after each backward, and does something in the
    last call alone. That call is the optimizer's step here.
    """

    def __init__(self, engine: Any, num_micro_batches: int = 1) -> None:
        super().__init__(engine, _Stepping(engine), dist.get_world_size())
        self.num_micro_batches = num_micro_batches

    def forward_backward(self, batch: Rows, num_tokens: int | None = None) -> Tensor:
        """DeepSpeed averages over ranks and micro-batches, and the parts are to be summed.

        Raises RuntimeError after a step that ended in an error between two micro-batches.
        """
        if self.model.micro_steps % self.num_micro_batches:
            raise RuntimeError(
                "a step ended in an error between its micro-batches, and DeepSpeed does not drop "
                "what it has added up and counted: start the run again, from a checkpoint"
            )
        num_tokens = batch.num_tokens if num_tokens is None else num_tokens
        m, parts = self.num_micro_batches, []
        pieces = own_rows(batch, 0, 1, m) if m > 1 else [batch]
        for i, piece in enumerate(pieces, start=1):
            part = self.loss(self.model, piece, num_tokens)
            self.model.backward(part * (self.num_replicas * m))
            parts.append(part.detach())
            if i < m:
                self.model.step()
        return torch.stack(parts).sum()

    def average_gradients(self) -> None:
        """Nothing: backward() has."""

    def clip(self, max_norm: float) -> Tensor:
        """DeepSpeed clips in its step, and knows the norm then: read it after the step.

        `max_norm` limits the steps after it as well, until it is called again.
        """
        self.model.optimizer.clip_grad = max_norm
        return self.optimizer.norm


class _Stepping:
    """An optimizer's face of the engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.norm = torch.zeros(())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    def zero_grad(self) -> None:
        """Its step() has done it."""
        self.norm = torch.zeros(())

    def step(self) -> None:
        """The engine's own; the norm that `clip` gave out is there after it."""
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        if norm is not None:
            self.norm.fill_(float(norm))
