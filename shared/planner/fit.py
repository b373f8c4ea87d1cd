"""The numbers of `step_time`, fitted to timed runs by least squares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shared.planner.outcomes import Fitted
from shared.planner.seconds import step_time
from shared.planner.specs import Cluster, ModelSpec, Plan


class Run(Protocol):
    """A step that somebody has timed: a published run, or one of your own."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def seconds(self) -> float: ...


def errors(runs: Sequence[Run], fitted: Fitted) -> list[float]:
    """By run, how much more FLOP/s are predicted than were published, as a share of the latter."""
    return [run.seconds / total(run, fitted) - 1 for run in runs]


def mean_error(runs: Sequence[Run], fitted: Fitted) -> float:
    """The mean of the errors without their signs."""
    return sum(map(abs, errors(runs, fitted))) / len(runs)


# Where each number begins, and the least and the most it can be.
BOUNDS = {
    "matmul": (0.8, 0.1, 1.0),
    "link": (0.5, 0.05, 1.0),
    "traffic": (2.0, 0.0, 50.0),
    "throttled": (0.9, 0.1, 1.0),
    "attention": (0.6, 0.1, 1.0),
    "eager": (1.0, 0.0, 50.0),
    "hidden": (0.5, 0.0, 1.0),
    "tp_hidden": (0.5, 0.0, 1.0),
}
THREE = ("matmul", "link", "traffic")


def fit(
    runs: Sequence[Run],
    names: Sequence[str] = THREE,
    weights: Sequence[float] | None = None,
    rounds: int = 20,
) -> Fitted:
    """The numbers of these names with the least squares of log(predicted / published seconds).

    Gauss-Newton with a step that shrinks where it would make things worse (Levenberg-Marquardt). A
    number that leaves its bounds is put back on them, and the others are solved without it. Numbers
    not named are `Fitted`'s own. `weights` of the runs, 1 if None.
    """
    start, least, most = np.array([BOUNDS[name] for name in names]).T
    given = {"matmul": 1.0, "link": 1.0, "traffic": 0.0}
    root = np.sqrt(np.ones(len(runs)) if weights is None else np.array(weights))

    def off(x: np.ndarray) -> np.ndarray:
        fitted = Fitted(**given | dict(zip(names, x.tolist(), strict=True)))
        return root * np.array([np.log(total(run, fitted) / run.seconds) for run in runs])

    x, here, damping = start, off(start), 1e-3
    for _ in range(rounds):
        steps = np.where(x + 1e-4 > most, -1e-4, 1e-4) * np.maximum(1.0, x)
        slopes = np.stack([(off(x + step) - here) / step.sum() for step in np.diag(steps)], axis=1)
        downhill = -slopes.T @ here
        free = ~((x <= least) & (downhill < 0) | (x >= most) & (downhill > 0))
        square, before = slopes[:, free].T @ slopes[:, free], here @ here
        while damping < 1e6:
            ridge = damping * np.diag(np.diag(square) + 1e-12)
            new = x.copy()
            new[free] += np.linalg.solve(square + ridge, downhill[free])
            new = np.clip(new, least, most)
            then = off(new)
            if then @ then <= before:
                x, here, damping = new, then, damping / 5
                break
            damping *= 5
        if before - here @ here < 1e-6 * before:
            break
    return Fitted(**given | dict(zip(names, x.tolist(), strict=True)))


def total(run: Run, fitted: Fitted) -> float:
    """Predicted seconds of a step."""
    return step_time(run.model, run.plan, run.cluster, fitted).total


@dataclass(frozen=True)
class LeftOut:
    """A family's errors by numbers that were fitted to the others: the planner's, a constant's.

    The constant is a share of the peak, of all FLOPs that are computed, recomputed ones too.
    """

    planner: list[float]
    constant: list[float]

    @property
    def mean(self) -> float:
        """The planner's mean error."""
        return sum(map(abs, self.planner)) / len(self.planner)

    @property
    def mean_constant(self) -> float:
        """The constant's."""
        return sum(map(abs, self.constant)) / len(self.constant)


def fit_families(given: Mapping[str, Sequence[Run]]) -> Fitted:
    """All numbers, fitted to families that count equally however many runs each has."""
    runs = [run for family in given.values() for run in family]
    weights = [1 / len(family) for family in given.values() for _ in family]
    return fit(runs, tuple(BOUNDS), weights)


def left_out(given: Mapping[str, Sequence[Run]]) -> dict[str, LeftOut]:
    """Each family by what is fitted to all others."""
    found = {}
    for name, family in given.items():
        rest = {other: runs for other, runs in given.items() if other != name}
        shares = [sum(map(share_of_peak, runs)) / len(runs) for runs in rest.values()]
        constant = sum(shares) / len(shares)
        off = [constant / share_of_peak(run) - 1 for run in family]
        found[name] = LeftOut(errors(family, fit_families(rest)), off)
    return found


def share_of_peak(run: Run) -> float:
    """Of a GPU's peak, what a run reached, with recomputed FLOPs counted."""
    model, flops = run.model, run.model.flops
    if run.plan.checkpoint == "full":
        flops += model.num_layers * model.layer_flops
    elif run.plan.checkpoint == "selective":
        flops += model.num_layers * model.attention_flops
    tokens = model.seq_len * run.plan.batch / run.plan.num_gpus
    return flops * tokens / run.seconds / run.cluster.peak_flops
