"""Of the plans within a budget the one that sends least, with what it promises."""

from shared.capstone.budgets import BARE, Budget, Promise, candidates
from shared.errors import InputError
from shared.planner.memory import memory_per_rank
from shared.planner.seconds import step_time
from shared.planner.specs import ModelSpec


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
    if not found:
        raise InputError(
            f"no plan: {budget.ranks} ranks cannot cut a batch of {budget.batch} and this model"
        )
    fitting = [promise for promise in found if promise.kept <= budget.memory]
    if not fitting:
        least = min(promise.kept for promise in found)
        raise InputError(f"no plan fits {budget.memory:g} bytes: the leanest keeps {least}")
    best = min(fitting, key=lambda promise: (round(promise.seconds, 9), promise.kept))
    if best.seconds > budget.deadline:
        raise InputError(
            f"the fastest plan that fits sends for {best.seconds:.3g} s, {budget.deadline:g} s are "
            "allowed"
        )
    return best
