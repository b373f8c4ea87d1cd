"""Bytes on every rank, as measured, are the formula's: for every plan of four ranks."""

import pytest

from lessons.lesson16_parallelism_3d.experiments.plan_bytes import all_plans, by_formula, measured
from lessons.lesson16_parallelism_3d.experiments.results import KINDS

PLANS = all_plans()
pytestmark = pytest.mark.full  # the notebook counts some of them


@pytest.fixture(scope="module")
def kept():
    """What four ranks kept under every plan; started once."""
    return measured(PLANS)


@pytest.mark.parametrize("number", range(len(PLANS)), ids=[str(plan) for plan in PLANS])
def test_every_rank_keeps_what_the_formula_says(number, kept):
    stages = by_formula(PLANS[number]).stages
    for rank, (stage, memory) in enumerate(kept[number]):
        for kind in KINDS:
            found, said = getattr(memory, kind), getattr(stages[stage], kind)
            assert found == said, f"rank {rank}: {found} bytes of {kind}, by formula {said}"
