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
    """Folder and metrics of the tiny preset on 4 ranks."""
    return launch_on(SCRIPT, (4,), *TINY)[4]


def test_ranks_share_one_run(trained, metrics_of):
    alone = metrics_of(SCRIPT, *TINY)["losses"]
    assert len(alone) == 10
    assert alone[-1] < alone[0]
    assert trained[1]["world_size"] == 4
    torch.testing.assert_close(trained[1]["losses"], alone, rtol=1e-3, atol=1e-3)


def test_what_a_run_leaves_behind(trained):
    out, metrics = trained
    written = {"metrics.json", "training.png", "translator.pt"}
    assert {path.name for path in out.iterdir()} == written
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert [row["score"] for row in metrics["scores"]][-1] == "exact match, %"
    assert all(row["signature"] for row in metrics["scores"][:-1])
    assert all(metrics["table"][0][name] > 0 for name in ("tokens/s", "ms a step", "peak MiB"))
    assert metrics["examples"][0].keys() == {"source", "translation", "reference"}
    assert not load_translator(out / "translator.pt")[0].training


def test_it_translates_with_what_it_has_saved(trained, run_script):
    sentences = ["The man sleeps.", "Today the woman buys a book."]
    for beam in (1, 3):
        args = ("--out", trained[0], "--beam", beam, "--translate", *sentences)
        status, out, err = run_script(SCRIPT, *args)
        assert (status, err) == (0, "")
        assert len(out.splitlines()) >= 1


@pytest.mark.full
def test_bad_input_is_one_line(trained, tmp_path, refused):
    out, _ = trained
    words = ("--translate", "The man sleeps.")
    said = refused(SCRIPT, "--out", tmp_path / "mistyped", *words)
    assert "no checkpoint" in said and "train first" in said
    assert not (tmp_path / "mistyped").exists()
    whole = (out / "translator.pt").read_bytes()
    (tmp_path / "translator.pt").write_bytes(whole[: len(whole) // 2])
    assert "cut short" in refused(SCRIPT, *words)
    (tmp_path / "translator.pt").write_text("not a model")
    assert "not a checkpoint" in refused(SCRIPT, *words)
    said = refused(SCRIPT, "--out", out, "--translate", "word " * 600)
    assert "longer than the encoding" in said and "512" in said
    assert "cannot be written" in refused(SCRIPT, "--out", out / "metrics.json" / "x", *TINY)
    other = (*TINY, "--out", tmp_path / "other")
    assert "nowhere" in refused(SCRIPT, *other, "--dataset", "nowhere")
    assert "budget of 3" in refused(SCRIPT, *other, "--max-tokens", 3)
    if not torch.cuda.is_available():
        said = refused(SCRIPT, *other, "--device", "auto", "--precision", "bf16")
        assert "bf16 on a CPU" in said and "--device cpu" in said


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


def test_mine_with_nothing_solved_says_so(refused):
    said = refused(SCRIPT, *TINY, "--mine")
    assert "no exercise" in said and "solved" in said
