"""The script: the same run on one and four ranks, translating, and bad input."""

import json

import pytest
import torch

from shared.exercises.lessons import ROOT
from shared.training.translator_files import load_translator

SCRIPT = ROOT / "lessons" / "lesson04_training" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(launch_on):
    """Folders and metrics of the tiny preset on 1 and 4 ranks."""
    return launch_on(SCRIPT, (1, 4), *TINY)


def test_ranks_share_one_run(trained):
    alone = trained[1][1]["losses"]
    assert len(alone) == 10
    assert alone[-1] < alone[0]
    assert trained[4][1]["world_size"] == 4
    torch.testing.assert_close(trained[4][1]["losses"], alone, rtol=1e-3, atol=1e-3)


def test_what_a_run_leaves_behind(trained):
    for out, metrics in trained.values():
        assert {path.name for path in out.iterdir()} == {
            "metrics.json",
            "training.png",
            "translator.pt",
        }
        assert json.loads((out / "metrics.json").read_text()) == metrics
        assert [row["score"] for row in metrics["scores"]][-1] == "exact match, %"
        assert all(row["signature"] for row in metrics["scores"][:-1])
        assert all(metrics["table"][0][name] > 0 for name in ("tokens/s", "ms a step", "peak MiB"))
        assert metrics["examples"][0].keys() == {"source", "translation", "reference"}
        assert not load_translator(out / "translator.pt")[0].training


def test_it_translates_with_what_it_has_saved(trained, run_script):
    sentences = ["The man sleeps.", "Today the woman buys a book."]
    for beam in (1, 3):
        args = ("--out", trained[4][0], "--beam", beam, "--translate", *sentences)
        status, out, err = run_script(SCRIPT, *args)
        assert (status, err) == (0, "")
        assert len(out.splitlines()) >= 1


def expect_error(result: tuple[int, str, str], *words: str) -> None:
    status, _, err = result
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    for word in ("error: ", *words):
        assert word in err


@pytest.mark.full
def test_bad_input_is_one_line(trained, tmp_path, run_script):
    out = trained[1][0]
    words = ("--translate", "The man sleeps.")
    result = run_script(SCRIPT, "--out", tmp_path / "mistyped", *words)
    expect_error(result, "no checkpoint", "train first")
    assert not (tmp_path / "mistyped").exists()
    whole = (out / "translator.pt").read_bytes()
    (tmp_path / "translator.pt").write_bytes(whole[: len(whole) // 2])
    expect_error(run_script(SCRIPT, "--out", tmp_path, *words), "cut short")
    (tmp_path / "translator.pt").write_text("not a model")
    expect_error(run_script(SCRIPT, "--out", tmp_path, *words), "not a checkpoint")
    result = run_script(SCRIPT, "--out", out, "--translate", "word " * 600)
    expect_error(result, "longer than the encoding", "512")
    result = run_script(SCRIPT, "--out", out / "metrics.json" / "x", *TINY)
    expect_error(result, "cannot be written")
    result = run_script(SCRIPT, *TINY, "--out", tmp_path / "a", "--dataset", "nowhere")
    expect_error(result, "nowhere")
    result = run_script(SCRIPT, *TINY, "--out", tmp_path / "b", "--max-tokens", 3)
    expect_error(result, "budget of 3")
    result = run_script(SCRIPT, "--preset", "tiny", "--out", tmp_path / "c", "--precision", "bf16")
    if not torch.cuda.is_available():
        expect_error(result, "bf16 on a CPU", "--device cpu")


def test_it_trains_on_the_users_own_files(tmp_path, run_script):
    folder = tmp_path / "mine"
    folder.mkdir()
    for side, word in (("fr", "chien"), ("de", "Hund")):
        lines = [f"{word} {n} {n * 7 % 10}" for n in range(60)]
        (folder / f"train.{side}").write_text("\n".join(lines) + "\n")
    args = ("--dataset", folder, "--source", "fr", "--steps", 3, "--out", tmp_path / "out")
    status, out, err = run_script(SCRIPT, *TINY, *args)
    assert (status, err) == (0, "")
    assert "exact match" in out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert len(metrics["losses"]) == 3
    assert any("no test split" in note for note in metrics["notes"])


def test_mine_with_nothing_solved_says_so(tmp_path, run_script):
    expect_error(run_script(SCRIPT, *TINY, "--out", tmp_path, "--mine"), "no exercise", "solved")
