"""What neither check nor notebook has: all fifty steps, odd curves, who imports frameworks."""

import math
import subprocess
import sys

import pytest

from lessons.lesson22_ecosystem.asking import HOST, ask
from lessons.lesson22_ecosystem.experiments import gap_of
from shared.ecosystem.explain import explain_difference
from shared.exercises.lessons import ROOT
from shared.training.reference_run import compare_with_record, read_record


@pytest.mark.full
@pytest.mark.parametrize("engine", ["accelerate", "trainer", "deepspeed"])
def test_all_fifty_steps(engine):
    with HOST.ended():
        compare_with_record(ask("follow", engine=engine, num_steps=50)[0]["losses"])


def test_no_framework_is_imported_by_those_who_need_none():
    code = (
        "import sys; from lessons.lesson22_ecosystem import checks, experiments, loops, train;"
        "print([n for n in ('accelerate', 'transformers', 'deepspeed', 'lightning_fabric')"
        " if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_curve_that_is_no_number_explains_nothing():
    def run(settings):
        return [1.0, math.nan if settings["lr"] else 2.0]

    assert explain_difference(run, {"lr": 1, "wd": 0}, {"lr": 0, "wd": 1}, 0.01) == ("lr",)


def test_an_engine_that_diverged_is_not_0_apart():
    first, *_ = read_record()["losses"]
    assert math.isnan(gap_of([first, math.nan]))
    assert math.isnan(gap_of([math.inf, math.nan]))
