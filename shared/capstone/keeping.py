"""Bytes of model states on a rank, counted: parameters, gradients and the optimizer's."""

import gc
from typing import Any

import torch
from torch import Tensor

from shared.planner.memory import memory_per_rank
from shared.planner.specs import ModelSpec, Plan
from shared.training.engine import Engine

Known = set[int]


def floats_alive() -> dict[int, int]:
    """Bytes of the storages of all floating tensors that Python reaches, by address.

    Single numbers (step counts, losses) are left out. What C++ alone holds is not seen: DDP's
    buckets, which are another copy of the gradients, are such.
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    tensors = [getattr(x, "_local_tensor", x) for x in tensors]  # DTensor: what is on this rank
    return {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in tensors
        if type(x) in (Tensor, torch.nn.Parameter) and x.is_floating_point() and x.dim()
        if x.device.type != "meta"
    }


class Keeping:
    """The most bytes of model states in a step, around the averaging of gradients.

    Make it before the model, so that what was alive before does not count.
    """

    def __init__(self) -> None:
        self.known = set(floats_alive())
        self.most, self.steps = 0, 0

    def watch(self, engine: Engine) -> None:
        """Count in the next two steps: the optimizer's states are made at the end of the first."""
        average: Any = engine.average_gradients
        buffers = {x.untyped_storage().data_ptr() for x in engine.model.buffers()}

        def counted() -> None:
            self._look(buffers)
            average()
            self._look(buffers)
            self.steps += 1
            if self.steps == 2:
                engine.average_gradients = average  # ty: ignore[invalid-assignment]

        engine.average_gradients = counted  # ty: ignore[invalid-assignment]

    def _look(self, buffers: Known) -> None:
        alive = floats_alive()
        now = sum(n for at, n in alive.items() if at not in self.known and at not in buffers)
        self.most = max(self.most, now)


def predicted_states(spec: ModelSpec | None, plan: Plan) -> int | None:
    """The planner's bytes for the same on the fullest rank; None where it has no description."""
    if spec is None:
        return None
    memory = memory_per_rank(spec, plan)
    return memory.parameters + memory.gradients + memory.optimizer
