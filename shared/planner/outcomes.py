"""What the planner says of a plan: its bytes, its seconds, and both together."""

import math
from dataclasses import dataclass

from shared.planner.specs import Plan


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by kind; `stages` has every pipeline rank's, of which this is the most.

    `activations` are what autograd keeps for backward, at the worst moment of a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    rank: int = 0
    stages: tuple["Memory", ...] = ()

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Fitted:
    """The three numbers that are fitted to published runs (`shared/planner/fit.py`).

    `matmul`: the share of `cluster.achievable` that matrix products reach in a training step.
    `link`: the share of a link's bytes/s that collectives reach. `traffic`: how often each byte
    that a layer keeps for backward goes through the GPU's memory, in forward and again in backward.
    """

    matmul: float
    link: float
    traffic: float


FITTED = Fitted(matmul=0.90, link=0.45, traffic=3.6)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by kind; what overlaps with compute is left out.

    `model_flops` are those of a step on one GPU without recomputation, `peak_flops` a GPU's.
    """

    compute: float
    tensor_parallel: float
    pipeline: float
    bubble: float
    data_parallel: float
    model_flops: float = 0.0
    peak_flops: float = math.inf

    @property
    def total(self) -> float:
        """Seconds of a step."""
        parts = (self.compute, self.tensor_parallel, self.pipeline, self.bubble)
        return sum(parts) + self.data_parallel

    @property
    def achieved_flops(self) -> float:
        """FLOP/s of a GPU, recomputation not counted."""
        return self.model_flops / self.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `achieved_flops` as a share of the peak."""
        return self.achieved_flops / self.peak_flops


@dataclass(frozen=True)
class Choice:
    """A plan with what it needs and takes."""

    plan: Plan
    memory: Memory
    time: StepTime
