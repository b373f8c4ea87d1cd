"""The script: on one, two and four ranks, killed under torchrun, run again, and bad input."""

import pytest

from shared.exercises.lessons import ROOT
from shared.fault_tolerance.checkpoints import checkpoints_in
from shared.ranks.launching import launch

SCRIPT = ROOT / "lessons" / "08_fault_tolerance" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


def test_killed_twice_under_torchrun_it_ends_as_if_it_had_not_been(tmp_path):
    args = [*TINY, "--untimed", "--out"]
    untouched = launch(SCRIPT, 2, [*args, tmp_path / "untouched"])
    assert (untouched["restarts"], untouched["began_at"]) == (0, 0)
    kills = ["--kill", "6:1", "8:0:0.5"]
    killed = launch(SCRIPT, 2, [*args, tmp_path / "killed", *kills], max_restarts=2)
    assert (killed["restarts"], killed["began_at"]) == (2, 4)
    for name in ("losses", "checksum"):
        assert killed[name] == untouched[name]


def test_on_four_ranks_it_rehearses_and_times(tmp_path):
    metrics = launch(SCRIPT, 4, [*TINY, "--out", tmp_path])
    assert metrics["headline"].startswith("resumed from step 8: weights equal bit for bit; a save")
    assert len(metrics["table"]) == 4
    assert len(metrics["losses"]) == 12
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoints",
        "metrics.json",
        "resumed.png",
    }


def test_the_same_command_again_goes_on(tmp_path, run_script):
    where = ("--out", tmp_path / "out", "--checkpoints", tmp_path / "kept", "--untimed")
    status, _, err = run_script(SCRIPT, *TINY, *where)
    assert (status, err) == (0, "")
    newest = checkpoints_in(tmp_path / "kept")[-1]
    newest.write_bytes(newest.read_bytes()[:5000])
    with pytest.warns(UserWarning, match="is cut short"):
        status, _, _ = run_script(SCRIPT, *TINY, *where)
    assert status == 0
    newest.write_bytes(newest.read_bytes()[:5000])
    (tmp_path / "kept" / "step_00000008.pt").write_text("nor this")
    with pytest.warns(UserWarning, match="is tried"):
        result = run_script(SCRIPT, *TINY, *where)
    expect_error(result, "none of the 2 checkpoints")


def expect_error(result: tuple[int, str, str], *words: str) -> None:
    status, _, err = result
    assert status == 2
    for word in ("error: ", *words):
        assert word in err.strip().splitlines()[-1]


def test_bad_input_is_one_line(tmp_path, run_script):
    (tmp_path / "file").write_text("in the way")
    out = ("--out", tmp_path / "out", "--untimed")
    for kill in ("soon", "3", "3:0:1.5", "3:0:0.5:1"):
        expect_error(run_script(SCRIPT, *TINY, *out, "--kill", kill), "--kill", kill)
    result = run_script(SCRIPT, *TINY, *out, "--checkpoints", tmp_path / "file" / "x")
    expect_error(result, "cannot be written")
    kept = ("--checkpoints", tmp_path / "kept")
    assert run_script(SCRIPT, *TINY, *out, *kept)[0] == 0
    result = run_script(SCRIPT, "--reference", "--device", "cpu", *out, *kept)
    expect_error(result, "is of another model")


@pytest.mark.parametrize("save", ["background", "elastic"])
def test_other_ways_to_save(save, tmp_path, run_script):
    status, out, err = run_script(SCRIPT, *TINY, "--out", tmp_path, "--save", save, "--untimed")
    assert (status, err) == (0, "")
    assert "not rehearsed" in out
