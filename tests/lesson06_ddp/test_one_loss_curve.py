"""Every engine, by the script's own step, gives lesson 04's loss curve on 1, 2 and 4 ranks."""

import runpy

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank

from lessons.lesson06_ddp.experiments.engine_runs import ROUNDING
from shared.ddp.engines import ENGINES
from shared.exercises.lessons import ROOT
from shared.ranks.forked import run_ranks
from shared.training.engine import reference_curve
from shared.training.reference_run import (
    checksum,
    compare_with_record,
    reference_model,
    reference_optimizer,
)

BETWEEN_RANKS = [name for name in ENGINES if name != "single"]  # which is the whole batch on each
script = runpy.run_path(str(ROOT / "lessons" / "lesson06_ddp" / "train.py"))


def all_curves(rank: int, world_size: int) -> dict[str, tuple[list[float], str]]:
    """Losses and checksum of the final weights by engine; the ranks' own first weights differ."""
    curves = {}
    for name in ENGINES if world_size == 1 else BETWEEN_RANKS:
        model = reference_model()
        if rank:  # what the first broadcast has to put right
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += rank
        engine = script["wrap"](name, model, reference_optimizer, world_size, 0.1)
        curves[name] = reference_curve(engine).losses, checksum(model)
    return curves


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.full)])
def by_rank(request):
    return run_ranks(all_curves, request.param, request.param, timeout=400)


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_the_curve_is_lesson_04s_within_rounding(by_rank, name):
    for curves in by_rank:
        losses, _ = curves[name]
        assert compare_with_record(losses) <= ROUNDING


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_all_ranks_end_with_the_same_bits(by_rank, name):
    assert len({curves[name][1] for curves in by_rank}) == 1


def test_by_hand_is_torchs_ddp_bit_for_bit(by_rank):
    if len(by_rank) > 2:
        pytest.skip("from three ranks on a sum has an order, and buckets of other sizes another")
    ends = {name: end for name, (_, end) in by_rank[0].items()}
    by_hand = ("naive", "flat", "overlapped", "bucketed")
    assert {ends[name] for name in by_hand} == {ends["ddp"]}


def test_one_rank_alone_does_what_single_does(by_rank):
    if len(by_rank) == 1:
        assert len({end for _, end in by_rank[0].values()}) == 1
