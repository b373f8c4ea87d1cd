"""A budget, the plans that could be within it, and what is promised of one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shared.planner.limits import misfits
from shared.planner.outcomes import Fitted
from shared.planner.specs import Cluster, ModelSpec, Plan

BARE = Fitted(matmul=1.0, link=1.0, traffic=0.0)  # links as fast as they say


@dataclass(frozen=True)
class Budget:
    """What there is: `ranks`, each with `memory` bytes for model states, joined by `link` bytes/s.

    `batch` rows a step; a pipeline cuts those of a copy into `micro_batches`. The messages of a
    step may take `deadline` seconds.
    """

    ranks: int
    memory: float
    link: float
    deadline: float
    batch: int = 8
    micro_batches: int = 4

    @property
    def cluster(self) -> Cluster:
        """The ranks as the planner wants them: one link, no latency, compute for nothing."""
        return Cluster(self.ranks, self.memory, 1e18, self.ranks, self.link, self.link, 1e18, 0.0)


@dataclass(frozen=True)
class Promise:
    """A plan with what it will keep (bytes of model states) and take (seconds of messages)."""

    plan: Plan
    kept: int
    seconds: float


def candidates(model: ModelSpec, budget: Budget) -> Iterator[Plan]:
    """Every dp x tp x pp of all ranks with every stage of ZeRO that the model and batch allow."""
    n = budget.ranks
    for tp, pp in product(range(1, n + 1), repeat=2):
        if n % (tp * pp):
            continue
        dp = n // (tp * pp)
        pieces = dp * (budget.micro_batches if pp > 1 else 1)
        if budget.batch % pieces:
            continue
        plan = Plan(
            dp=dp,
            tp=tp,
            pp=pp,
            micro_batch=budget.batch // pieces,
            num_micro_batches=pieces // dp,
            precision="float32",
            overlap=False,
        )
        if not any(misfits(model, plan)):
            yield from (replace(plan, zero=zero) for zero in (range(4) if dp > 1 else (0,)))
