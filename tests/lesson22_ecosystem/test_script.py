"""The script: one curve by every engine, what it made of the model; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson22_ecosystem" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.mark.parametrize(
    ("engine", "ranks", "made"),
    [
        ("accelerate", 2, "DistributedDataParallel"),
        ("deepspeed", 2, "DeepSpeedEngine, ZeRO-3"),
        pytest.param("fsdp2", 3, "FSDPWithLoss", marks=pytest.mark.full),
        pytest.param("trainer_fsdp", 2, "DistributedDataParallel", marks=pytest.mark.full),
        pytest.param("trainer_deepspeed", 2, "DeepSpeedEngine", marks=pytest.mark.full),
        pytest.param("trainer", 1, "DistributedDataParallel", marks=pytest.mark.full),
        pytest.param("fabric", 3, "DistributedDataParallel", marks=pytest.mark.full),
    ],
)
def test_an_engine_has_the_curve_of_one_process(engine, ranks, made, launch_on):
    (_, metrics) = launch_on(SCRIPT, (ranks,), *TINY, "--engine", engine)[ranks]
    assert metrics["losses"] == pytest.approx(metrics["alone"], abs=5e-6)
    (row,) = metrics["table"]
    assert row["what it made"] == made


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--steps", "51"), "--steps 51: the reference run has 2 to 50 steps"),
        (("--steps", "1"), "the reference run has 2 to 50 steps"),
        (("--engine", "horovod"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, tmp_path, run_script):
    status, _, err = run_script(SCRIPT, *TINY, "--out", tmp_path, *args)
    assert status == 2
    assert words in err.strip().splitlines()[-1]


def test_a_framework_that_is_missing_is_named(tmp_path, run_script, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "accelerate" else found(name)
    )
    status, _, err = run_script(SCRIPT, *TINY, "--out", tmp_path, "--engine", "accelerate")
    assert status == 2
    assert "needs accelerate, which is not installed here" in err.strip().splitlines()[-1]
