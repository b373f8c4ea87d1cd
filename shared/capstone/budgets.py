"""A budget, the plans that could be within it, and what a planner promises of one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shared.errors import InputError
from shared.planner.limits import misfits
from shared.planner.memory import memory_per_rank
from shared.planner.outcomes import Fitted
from shared.planner.seconds import step_time
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


def choose_plan(model: ModelSpec, budget: Budget) -> Promise:
    """Of `candidates` whose model states fit, the one whose messages take the fewest seconds.

    `kept` are parameters, gradients and optimizer states of the fullest rank, by
    `memory_per_rank`; `seconds` all messages of a step, by `step_time` on `budget.cluster` with
    the fitted numbers `BARE`, without compute and bubble. Of plans that take the same, the one
    that keeps the least. Raises InputError where none fits, which names the fewest bytes that a
    plan keeps, and where the fastest is beyond the deadline, which names its seconds.
    """
    found = []
    for plan in candidates(model, budget):
        memory = memory_per_rank(model, plan)
        time = step_time(model, plan, budget.cluster, BARE)
        kept = memory.parameters + memory.gradients + memory.optimizer
        found.append(Promise(plan, kept, time.tensor_parallel + time.pipeline + time.data_parallel))
    fitting = [each for each in found if each.kept <= budget.memory]
    if not fitting:
        least = min((each.kept for each in found), default=0)
        raise InputError(f"no plan fits {budget.memory:g} bytes: the leanest keeps {least}")
    best = min(fitting, key=lambda each: (round(each.seconds, 9), each.kept))
    if best.seconds > budget.deadline:
        raise InputError(
            f"the fastest plan that fits sends for {best.seconds:.3g} s, {budget.deadline:g} s are "
            "allowed"
        )
    return best
