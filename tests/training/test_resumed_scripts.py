"""Scripts of lessons 13 to 16: a checkpoint moves between ranks and engines; none is half there."""

import json

import pytest

from shared.exercises.lessons import ROOT

SCRIPTS = {
    name[6:8]: ROOT / "lessons" / name / "train.py"
    for name in ("lesson13_fsdp", "lesson14_tensor_parallel", "lesson15_pipeline_parallel")
} | {"16": ROOT / "lessons" / "lesson16_parallelism_3d" / "train.py"}
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))
OTHERS = {  # a different engine to resume with, on one rank
    "13": ("--engine", "fsdp2"),
    "14": ("--engine", "single"),
    "15": ("--schedule", "gpipe", "--micro-batches", "4"),
    "16": ("--checkpointing",),
}


@pytest.mark.full
@pytest.mark.parametrize("lesson", SCRIPTS)
def test_a_run_is_resumed_on_other_ranks_with_the_same_losses(
    lesson, launch_on, metrics_of, tmp_path
):
    def losses(*args: object) -> list[float]:
        return metrics_of(SCRIPTS[lesson], *TINY, *args)["losses"]

    first = losses("--steps", 2, "--save", tmp_path / "alone")
    then = losses("--steps", 4, "--resume", tmp_path / "alone")
    saved = ("--steps", "2", "--save", str(tmp_path / "two"))
    metrics = launch_on(SCRIPTS[lesson], (2,), *TINY, *saved)[2][1]
    assert metrics["losses"] == pytest.approx(first, abs=1e-4)
    found = losses("--steps", 4, "--resume", tmp_path / "two", *OTHERS[lesson])
    assert len(found) == 2
    assert found == pytest.approx(then, abs=1e-4)


@pytest.mark.parametrize("lesson", SCRIPTS)
def test_a_folder_that_cannot_be_written_is_said_before_training(lesson, refused, tmp_path):
    place = tmp_path / "a_file"
    place.touch()
    said = refused(SCRIPTS[lesson], *TINY, "--steps", 2, "--save", place)
    assert said.startswith(f"error: --save {place} cannot be written")
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize("lesson", SCRIPTS)
def test_a_folder_without_a_checkpoint_is_said(lesson, refused, tmp_path):
    said = refused(SCRIPTS[lesson], *TINY, "--steps", 2, "--resume", tmp_path / "nothing")
    assert f"checkpoint {tmp_path / 'nothing'} cannot be read" in said


@pytest.mark.full
def test_bf16_of_lesson_16_is_near_float32_recomputed_as_well(run_script, tmp_path):
    found = {}
    for args in (("fp32",), ("bf16",), ("bf16", "--checkpointing")):
        given = (*TINY, "--steps", 3, "--out", tmp_path, "--precision", *args)
        status, out, err = run_script(SCRIPTS["16"], *given)
        assert status == 0, err
        found[args] = json.loads((tmp_path / "metrics.json").read_text())["losses"]
        assert ("in float32" in out) == (args[0] == "bf16")
    whole, half, again = found.values()
    assert half != whole
    assert half == pytest.approx(whole, abs=0.02)
    assert again == pytest.approx(half, abs=1e-6)


def test_flags_that_do_nothing_on_the_mesh_say_so(run_script, tmp_path):
    args = (*TINY, "--steps", 2, "--zero", 3, "--schedule", "gpipe", "--out", tmp_path)
    status, out, _ = run_script(SCRIPTS["16"], *args)
    assert status == 0
    assert "note: --zero 3 shares nothing out on dp 1" in out
    assert "note: --schedule gpipe orders nothing on pp 1" in out
    args = (*TINY, "--steps", 2, "--sequence-parallel", "--out", tmp_path)
    status, out, _ = run_script(SCRIPTS["14"], *args)
    assert status == 0
    assert "note: --sequence-parallel cuts nothing on tp 1" in out
