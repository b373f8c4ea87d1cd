"""What the planner says of a plan: its bytes, its seconds, and both together."""

import math
from dataclasses import dataclass, replace

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
    """The numbers that are fitted to published runs (`shared/planner/fit.py`).

    `matmul`: the share of `cluster.achievable` that matrix products reach in a training step;
    `throttled`: the share of that which a GPU keeps whose clock its power limits; `attention`: the
    share of that which a fused attention's products reach. `link`: the share of a link's bytes/s
    that collectives reach. `traffic`: how often each byte that a layer keeps for backward goes
    through the GPU's memory, in forward and again in backward, and `eager`: how often more where
    operations are not fused. `hidden`: the share of the messages over dp that can hide behind
    compute; `tp_hidden`: the share of tp's that do where a plan overlaps them.
    """

    matmul: float
    link: float
    traffic: float
    throttled: float = 1.0
    attention: float = 1.0
    eager: float = 0.0
    hidden: float = 1.0
    tp_hidden: float = 0.0


FITTED = Fitted(0.86, 0.74, 4.3, 0.88, 0.69, eager=2.8, hidden=0.54, tp_hidden=0.81)


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

    def scaled(self, by: float) -> "StepTime":
        """The same with all seconds multiplied."""
        kinds = ("compute", "tensor_parallel", "pipeline", "bubble", "data_parallel")
        return replace(self, **{kind: by * getattr(self, kind) for kind in kinds})

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
