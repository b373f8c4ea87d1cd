"""The script: on one to three ranks, killed, told to stop, run again, on other data, bad input."""

import itertools
import json
import os
import re
import runpy
import signal

import pytest
import torch

from lessons.lesson08_fault_tolerance.experiments import resumable_runs as lesson08_runs
from lessons.lesson08_fault_tolerance.experiments.resumable_runs import share_of
from shared.data.corpora import load_corpus
from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.fault_tolerance.checkpoints import checkpoints_in
from shared.fault_tolerance.preemption import SIGNS, notice_of_sigterm
from shared.ranks.group import Rank
from shared.ranks.launching import launch

SCRIPT = ROOT / "lessons" / "lesson08_fault_tolerance" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.mark.full
def test_on_three_ranks_it_rehearses_and_times(tmp_path):
    metrics = launch(SCRIPT, 3, [*TINY, "--out", tmp_path])
    words = "resumed from step 8: weights equal bit for bit; a save stops training"
    assert words in metrics["headline"]
    assert len(metrics["saves"]) == 4
    (row,) = metrics["table"]
    assert min(row["tokens/s"], row["ms a step"], row["peak MiB"]) > 0
    assert len(metrics["losses"]) == row["steps"] == 12
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == {
        "checkpoints",
        "metrics.json",
        "resumed.png",
    }


def test_every_size_can_be_shared_by_one_to_six_ranks():
    for name, size in runpy.run_path(str(SCRIPT))["SIZES"].items():
        assert all(size.batch % ranks == 0 for ranks in range(1, 7)), name
    with pytest.raises(InputError, match="32 cannot be shared evenly by 3 ranks: start 1, 2, 4"):
        share_of(32, Rank(0, 0, 3, torch.device("cpu"), "gloo"))


@pytest.fixture
def start(run_script, tmp_path):
    """Start the script in this process, which keeps the lock on --out: a new one each time."""
    outs = (tmp_path / f"out{number}" for number in itertools.count())

    def started(*args):
        out = next(outs)
        return run_script(SCRIPT, *TINY, "--untimed", "--out", out, *args), out

    return started


def test_sigterm_saves_and_asks_for_another_turn(tmp_path, start, monkeypatch):
    """Told in the middle of step 7, where no checkpoint is due: nothing is computed twice."""
    untouched, untouched_out = start()
    assert untouched.status == 0
    calls, whole = [], lesson08_runs.noisy

    def noisy_and_told(words: list[int]) -> list[int]:
        calls.append(words)
        if len(calls) == 200 + 60 + 60 + 6:  # an epoch of four steps, two more, six pairs
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(words)

    kept, before = tmp_path / "kept", signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(lesson08_runs, "noisy", noisy_and_told)
    told, out = start("--checkpoints", kept)
    monkeypatch.setattr(lesson08_runs, "noisy", whole)
    assert (told.status, told.err) == (99, "")
    assert signal.getsignal(signal.SIGTERM) == before
    assert "stopped by SIGTERM after step 7 of 12, saved in" in told.out
    assert (out / "requeue").read_text() in told.out
    assert not (out / "metrics.json").exists()
    assert checkpoints_in(kept)[-1].name == "step_00000007.pt"
    again, again_out = start("--checkpoints", kept)
    assert again.status == 0
    assert "resuming from step 7 of 12" in again.out
    results = [
        json.loads((each / "metrics.json").read_text()) for each in (untouched_out, again_out)
    ]
    for name in ("losses", "checksum"):
        assert results[0][name] == results[1][name]


def test_ctrl_c_saves_and_asks_for_nothing(tmp_path, start, monkeypatch):
    whole, before = lesson08_runs.noisy, signal.getsignal(signal.SIGINT)

    def noisy_and_told(words: list[int]) -> list[int]:
        monkeypatch.setattr(lesson08_runs, "noisy", whole)
        os.kill(os.getpid(), signal.SIGINT)
        return whole(words)

    monkeypatch.setattr(lesson08_runs, "noisy", noisy_and_told)
    told, out = start("--checkpoints", tmp_path)
    assert (told.status, told.err) == (130, "")
    assert "stopped by Ctrl-C after step 1 of 12, saved in" in told.out
    assert checkpoints_in(tmp_path)[-1].name == "step_00000001.pt"
    assert not (out / "requeue").exists()
    assert signal.getsignal(signal.SIGINT) == before


def test_somebodys_ctrl_c_is_not_made_a_schedulers_notice_by_a_later_sigterm():
    with notice_of_sigterm(torch.device("cpu")) as notice:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert SIGNS[notice.come] == "Ctrl-C"


def write_data(folder, changed=""):
    """A data set of 60 pairs; `changed` takes the place of the last source sentence."""
    folder.mkdir(exist_ok=True)
    pairs = load_corpus("grammar", max_train=60).train
    sides = {"en": [pair.src for pair in pairs], "de": [pair.tgt for pair in pairs]}
    sides["en"][-1] = changed or sides["en"][-1]
    for language, lines in sides.items():
        for split in ("train", "validation", "test"):
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")


@pytest.mark.full
@pytest.mark.parametrize("save", ["wait", "elastic"])
def test_other_data_of_the_same_name_and_length_is_refused(save, tmp_path, start):
    args = ["--steps", 2, "--save", save, "--dataset", tmp_path / "data"]
    args += ["--checkpoints", tmp_path / "kept"]
    write_data(tmp_path / "data")
    assert start(*args)[0].status == 0
    write_data(tmp_path / "data", changed="the dog sees the dog")
    refused, _ = start(*args)
    expect_error(refused, "saved while training on data", "this run's data is", "step_00000002")
    fingerprints = re.findall(r"data (?:is )?([0-9a-f]{12})", refused.err)
    assert len(set(fingerprints)) == 2
    write_data(tmp_path / "data")
    assert start(*args)[0].status == 0


def test_the_same_command_again_goes_on(tmp_path, start):
    kept = tmp_path / "kept"
    ended, _ = start("--checkpoints", kept)
    assert (ended.status, ended.err) == (0, "")
    newest = checkpoints_in(kept)[-1]
    newest.write_bytes(newest.read_bytes()[:5000])
    with pytest.warns(UserWarning, match="is cut short"):
        ended, _ = start("--checkpoints", kept)
    assert ended.status == 0
    newest.write_bytes(newest.read_bytes()[:5000])
    (kept / "step_00000008.pt").write_text("nor this")
    with pytest.warns(UserWarning, match="is tried"):
        ended, _ = start("--checkpoints", kept)
    expect_error(ended, "none of the 2 checkpoints")


def expect_error(result: tuple[int, str, str], *words: str) -> None:
    status, _, err = result
    assert status == 2
    for word in ("error: ", *words):
        assert word in err.strip().splitlines()[-1]


@pytest.mark.full
def test_bad_input_is_one_line(tmp_path, start):
    (tmp_path / "file").write_text("in the way")
    for kill in ("soon", "3", "3:0:1.5", "3:0:0.5:1"):
        expect_error(start("--kill", kill)[0], "--kill", kill)
    expect_error(start("--checkpoints", tmp_path / "file" / "x")[0], "cannot be written")
    kept = ("--checkpoints", tmp_path / "kept")
    assert start(*kept)[0].status == 0
    expect_error(start("--reference", *kept)[0], "is of another model")
    expect_error(start("--reference", "--steps", "5")[0], "--reference has 50 steps in float32")
    if not torch.cuda.is_available():
        expect_error(start("--precision", "bf16", "--device", "auto")[0], "add --device cpu")


@pytest.mark.parametrize("save", ["background", "elastic"])
def test_other_ways_to_save(save, start):
    ended, _ = start("--save", save)
    assert (ended.status, ended.err) == (0, "")
    assert "not rehearsed" in ended.out
