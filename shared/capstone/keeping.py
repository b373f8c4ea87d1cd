"""Bytes of model states on a rank, counted: parameters, gradients and the optimizer's."""

import gc
from typing import Any

import torch
from torch import Tensor

from shared.measuring.live import live_tensors, settle
from shared.planner.memory import memory_per_rank
from shared.planner.specs import ModelSpec, Plan
from shared.training.engine import Engine

SETTLE = 0.02  # seconds


def floats_alive() -> dict[int, int]:
    """Bytes of the storages of all floating tensors that the collector sees, by address.

    Single numbers (step counts, losses) are left out. What C++ alone holds is not seen: DDP's
    buckets, which are another copy of the gradients, are such.
    """
    tensors = [getattr(x, "_local_tensor", x) for x in live_tensors()]  # of a DTensor: this rank's
    return {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in tensors
        if type(x) in (Tensor, torch.nn.Parameter) and x.is_floating_point() and x.dim()
        if x.device.type != "meta"
    }


class Keeping:
    """The most bytes of model states in a step, around the averaging of gradients.

    Make it before the model: what is alive then is set aside (`gc.freeze`) and does not count.
    """

    def __init__(self) -> None:
        self.most, self.steps = 0, 0
        self.thaws = not gc.get_freeze_count()  # what others froze before stays so
        gc.collect()
        gc.freeze()

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
                if self.thaws:
                    gc.unfreeze()

        engine.average_gradients = counted  # ty: ignore[invalid-assignment]

    def _look(self, buffers: set[int]) -> None:
        settle(SETTLE)  # gloo's thread may still hold what was sent
        alive = floats_alive()
        self.most = max(self.most, sum(n for at, n in alive.items() if at not in buffers))


def predicted_states(spec: ModelSpec | None, plan: Plan) -> int | None:
    """The planner's bytes for the same on the fullest rank; None where it has no description."""
    if spec is None:
        return None
    stages = memory_per_rank(spec, plan).stages  # activations may make another one the fullest
    return max(stage.parameters + stage.gradients + stage.optimizer for stage in stages)
