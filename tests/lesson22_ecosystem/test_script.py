"""The script: one curve by every engine, what it made of the model; bad input."""

import pytest

from shared.exercises.lessons import ROOT
from tests.threads import engines_of

SCRIPT = ROOT / "lessons" / "lesson22_ecosystem" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


MADE = {  # engine -> on how many ranks it is tried here, and what it makes of the model
    "accelerate": (2, "DistributedDataParallel"),
    "deepspeed": (2, "DeepSpeedEngine, ZeRO-3"),
    "fsdp2": (3, "FSDPWithLoss"),
    "trainer_fsdp": (2, "DistributedDataParallel"),
    "trainer_deepspeed": (2, "DeepSpeedEngine"),
    "trainer": (2, "DistributedDataParallel"),
    "fabric": (3, "DistributedDataParallel"),
}
QUICK = ("accelerate", "deepspeed")
FULL = [pytest.param(each, marks=pytest.mark.full) for each in MADE if each not in QUICK]


@pytest.mark.parametrize("engine", [*QUICK, *FULL])
def test_an_engine_has_the_curve_of_one_process_and_leaves_no_thread_of_gloo(engine, launch_on):
    ranks, made = MADE[engine]
    (_, metrics) = launch_on(SCRIPT, (ranks,), *TINY, "--engine", engine)[ranks]
    assert metrics["losses"] == pytest.approx(metrics["alone"], abs=5e-6)
    (row,) = metrics["table"]
    assert row["what it made"] == made


def test_every_engine_is_tried(monkeypatch):
    # "ddp" is the first, whose threads tests/frame/test_threads_at_exit.py counts
    assert {"ddp", *MADE} == set(engines_of(SCRIPT, monkeypatch))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--steps", "51"), "--steps 51: the reference run has 2 to 50 steps"),
        (("--steps", "1"), "the reference run has 2 to 50 steps"),
        (("--engine", "horovod"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)


def test_a_framework_that_is_missing_is_named(refused, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "accelerate" else found(name)
    )
    said = refused(SCRIPT, *TINY, "--engine", "accelerate")
    assert "needs accelerate, which is not installed here" in said
