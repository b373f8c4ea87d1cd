"""The script: every engine, DeepSpeed by file, checkpoints; bad input."""

import errno
import json

import pytest
import torch

from shared.exercises.lessons import ROOT

FOLDER = ROOT / "lessons" / "lesson10_zero"
SCRIPT = FOLDER / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))
STAGE_2 = (*TINY, "--engine", "zero2", "--steps", "3")


@pytest.fixture(scope="module")
def stage_2(launch_on):
    """Folder and metrics of stage 2 by hand on 2 ranks."""
    return launch_on(SCRIPT, (2,), *STAGE_2)[2]


def test_ranks_change_the_bytes_as_the_formula_says_and_not_the_curve(stage_2, metrics_of):
    (out, metrics), alone = stage_2, metrics_of(SCRIPT, *STAGE_2)
    for ranks, each in ((1, alone), (2, metrics)):
        (row,) = each["table"]
        assert each["world_size"] == ranks
        assert row["bytes a parameter"] == pytest.approx(row["formula"], abs=0.01)
        assert row["formula"] == 4 + 12 / ranks  # float32 on a CPU
    assert metrics["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert {path.name for path in out.iterdir()} == {"metrics.json", "zero.png"}


def test_deepspeed_by_file_on_two_ranks(stage_2, tmp_path_factory, launch_on):
    config = json.loads((FOLDER / "ds_zero3.json").read_text())
    config["bf16"]["enabled"] = False
    config["zero_optimization"]["reduce_bucket_size"] = 1000
    file = tmp_path_factory.mktemp("config") / "fp32.json"
    file.write_text(json.dumps(config))
    runs = launch_on(SCRIPT, (2,), *TINY, "--deepspeed", str(file), "--steps", "3")
    metrics = runs[2][1]
    (row,) = metrics["table"]
    # 8 rows a rank, as stage 2 by hand has had them; DeepSpeed's float32 keeps a master too.
    assert metrics["losses"] == pytest.approx(stage_2[1]["losses"], abs=1e-5)
    assert row["bytes a parameter"] == pytest.approx(20 / 2, abs=0.5)


@pytest.mark.parametrize(("engine", "precision"), [("zero1", "bf16"), ("zero3", "bf16")])
def test_stages_by_hand_in_16_bits(engine, precision, metrics_of):
    args = ("--engine", engine, "--precision", precision, "--steps", 2)
    assert "16.00 bytes a parameter" in metrics_of(SCRIPT, *TINY, *args)["headline"]


@pytest.mark.full
def test_a_resumed_run_continues_and_another_stage_is_refused(tmp_path, metrics_of, refused):
    place = tmp_path / "saved"
    args = (SCRIPT, *TINY, "--steps", 20, "--engine", "zero1")
    first = metrics_of(*args, "--save", place)["losses"]
    assert metrics_of(*args, "--resume", place)["losses"][0] < first[0] - 0.4
    other = refused(*args, "--engine", "zero2", "--resume", place)
    assert "stage 1 there, 2 in this run" in other
    part = place / "rank_0.pt"
    part.write_bytes(part.read_bytes()[:-200])
    assert "rank_0.pt is missing, damaged or cut short" in refused(*args, "--resume", place)
    about = json.loads((place / "about.json").read_text()) | {"ranks": 4}
    (place / "about.json").write_text(json.dumps(about))
    assert "ranks 4 there, 1 in this run" in refused(*args, "--resume", place)


@pytest.mark.full
def test_a_full_disk_costs_the_new_checkpoint_alone(tmp_path, run_script, monkeypatch):
    place, out = tmp_path / "saved", tmp_path / "out"
    args = (*TINY, "--out", out, "--engine", "zero1", "--save", place, "--steps")
    assert run_script(SCRIPT, *args, 2).status == 0
    before = {path.name: path.read_bytes() for path in place.iterdir()}

    def full(content, file):
        file.write(b"half of it")
        error = RuntimeError("enforce fail")  # what torch raises while it handles the disk's
        error.__context__ = OSError(errno.ENOSPC, "No space left on device")
        raise error

    monkeypatch.setattr(torch, "save", full)
    status, _, err = run_script(SCRIPT, *args, 3)
    assert status == 2
    assert f"--save {place}: the checkpoint cannot be written: No space left" in err
    assert "Traceback" not in err
    assert len(json.loads((out / "metrics.json").read_text())["losses"]) == 3
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path, run_script):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "saved"
    status, said, err = run_script(SCRIPT, *TINY, "--out", tmp_path, "--save", place)
    assert (status, said) == (2, "")
    assert f"--save {place} cannot be written" in err


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds no object"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4; ZeRO has 0, 1, 2 and 3"),
        ({"zero_optimization": 3}, "must be an object"),
        ({"train_batch_size": 99}, "train_batch_size 99 is not micro-batch 8"),
        ({"train_micro_batch_size_per_gpu": 0}, "whole number from 1 up"),
        ({"fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "nvme_path None is no folder",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line(changed, words, tmp_path, refused):
    file = tmp_path / "ds.json"
    config = json.loads((FOLDER / "ds_zero1.json").read_text())
    file.write_text(changed if isinstance(changed, str) else json.dumps(config | changed))
    assert words in refused(SCRIPT, *TINY, "--deepspeed", file)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--engine", "zero4"), "invalid choice"),
        (("--search",), "here is none"),
        (("--dataset", "nowhere"), "nowhere"),
        (("--deepspeed", "missing.json"), "No such file"),
        (("--deepspeed", "x.json", "--engine", "zero1"), "leave out the other flag"),
        (("--resume", "nothing"), "holds no checkpoint"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)


def test_fp16_is_refused_where_the_cpu_has_none(tmp_path, run_script, monkeypatch):
    import torch

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    config = json.loads((FOLDER / "ds_zero1.json").read_text())
    del config["bf16"]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config | {"fp16": {"enabled": True}}))
    status, _, err = run_script(SCRIPT, *TINY, "--out", tmp_path, "--deepspeed", file)
    assert status == 2
    assert "this CPU has none" in err


@pytest.mark.full
@pytest.mark.parametrize("full", ["GPU", "CPU"])
@pytest.mark.parametrize("limit", [0, 37])
def test_the_largest_that_fits_is_found_by_halving_and_what_was_full(limit, full):
    import torch

    from shared.measuring.largest import largest_that_fits, until

    def fits(number):
        if number > limit + 1 or (number > limit and full == "GPU"):
            raise torch.OutOfMemoryError
        if number > limit:  # less than what fills the GPU fills the CPU already
            raise MemoryError

    assert largest_that_fits(fits, most=64) == (limit, full)
    assert largest_that_fits(fits, most=5) == (min(limit, 5), full if limit < 5 else "")
    assert ("the CPU's memory was full" in until(full)) == (full == "CPU")
