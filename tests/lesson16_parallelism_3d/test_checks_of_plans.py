"""16.5's checks leave no verdict to rounding: many plans take equally long but for a last bit."""

import itertools
import random

import pytest

from lessons.lesson16_parallelism_3d import checks
from lessons.lesson16_parallelism_3d.laboratory import all_plans
from shared.exercises.checks import run_check
from shared.exercises.wrong import Wrong
from shared.planner.search import best_plans


@pytest.fixture
def question(monkeypatch):
    """Numbers with which ZeRO-0 and ZeRO-1 differ by one rounding in one sum and not in another."""
    monkeypatch.setattr(all_plans, "fresh_seed", lambda: 82)
    return all_plans.drawn()


def test_an_order_that_rounding_decides_is_no_fault(question):
    found = best_plans(question.model, question.cluster, question.batch)
    checks.expect_order(question, found)


def test_an_order_that_memory_decides_is_told():
    question = all_plans.LARGE
    found = best_plans(question.model, question.cluster, question.batch, 1000)
    alike = [
        (one, other)
        for one, other in itertools.pairwise(found)
        if one.memory.total < other.memory.total
        and all_plans.equally_fast(question.model, (one.plan, other.plan), question.cluster)
    ]
    one, other = random.Random(0).choice(alike)
    with pytest.raises(Wrong, match="the one with more memory comes first"):
        checks.expect_order(question, [other, one])


@pytest.mark.parametrize("seed", [0, 77, 98, 194])
def test_plans_that_tie_but_for_rounding_may_stand_either_way_round(seed, monkeypatch):
    """With these seeds plans are as fast as each other but for rounding."""
    monkeypatch.setenv("TORCH_HANDLE_SEED", str(seed))
    assert run_check(checks.best, best_plans) is None
