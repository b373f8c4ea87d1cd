"""The three numbers of `step_time`, fitted to timed runs by least squares."""

from collections.abc import Sequence
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
    predicted = [step_time(run.model, run.plan, run.cluster, fitted).total for run in runs]
    return [run.seconds / each - 1 for run, each in zip(runs, predicted, strict=True)]


def mean_error(runs: Sequence[Run], fitted: Fitted) -> float:
    """The mean of the errors without their signs."""
    return sum(map(abs, errors(runs, fitted))) / len(runs)


def fit(runs: Sequence[Run], rounds: int = 8) -> Fitted:
    """The numbers with the least squares of relative errors in seconds (Gauss-Newton).

    Seconds are linear in 1 / matmul, 1 / link and traffic, but for what overlap hides. No share is
    above 1 and no traffic below 0: what would be is held there, and the others are solved anew.
    """

    def off(x: np.ndarray) -> np.ndarray:
        fitted = Fitted(1 / x[0], 1 / x[1], x[2])
        totals = [step_time(run.model, run.plan, run.cluster, fitted).total for run in runs]
        return np.array([t / run.seconds - 1 for t, run in zip(totals, runs, strict=True)])

    x, step, least = np.array([1.25, 2.0, 2.0]), 1e-4, np.array([1.0, 1.0, 0.0])
    for _ in range(rounds):
        here = off(x)
        slopes = np.stack([(off(x + step * each) - here) / step for each in np.eye(3)], axis=1)
        free, best = np.ones(3, dtype=bool), least
        while free.any():
            wanted = slopes @ x - here - slopes[:, ~free] @ least[~free]
            best = least.copy()
            best[free] = np.linalg.lstsq(slopes[:, free], wanted, rcond=None)[0]
            if (best >= least).all():
                break
            free &= best >= least
        x = np.maximum(best, least)
    return Fitted(float(1 / x[0]), float(1 / x[1]), float(x[2]))
