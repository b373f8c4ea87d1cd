"""The script: every way of checkpointing, on several ranks; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson11_gradient_checkpointing" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.mark.full
def test_ranks_change_neither_bytes_nor_flops(launch_on, metrics_of):
    args, rows = (*TINY, "--steps", "2"), []
    out, metrics = launch_on(SCRIPT, (4,), *args)[4]
    for each in (metrics, metrics_of(SCRIPT, *args)):
        (row,) = each["table"]
        rows.append([row[name] for name in ("layers again", "FLOPs / forward", "peak, MiB")])
    assert rows[0] == rows[1]
    assert (rows[0][0], metrics["world_size"]) == (4, 4)
    assert {path.name for path in out.iterdir()} == {"metrics.json", "checkpointing.png"}


def test_less_memory_for_more_flops_and_the_same_loss(tmp_path, metrics_of):
    text = tmp_path / "text"
    text.mkdir()
    text.joinpath("story.txt").write_text("a line of text to train on\n" * 200)
    rows = {}
    for args in (("none",), ("all",), ("sqrt",), ("plan", "--budget-mib", "0.3")):
        run = (*TINY, "--steps", 2, "--dataset", text, "--checkpointing", *args)
        (rows[args[0]],) = metrics_of(SCRIPT, *run)["table"]
    assert len({row["last loss"] for row in rows.values()}) == 1
    order = ["none", "sqrt", "all"]
    assert [rows[n]["FLOPs / forward"] for n in order] == sorted(
        rows[n]["FLOPs / forward"] for n in order
    )
    assert rows["none"]["peak, MiB"] > rows["sqrt"]["peak, MiB"] > rows["all"]["peak, MiB"]
    assert 0 < rows["plan"]["layers again"] < 4
    assert rows["plan"]["peak of the layers, MiB"] <= 0.3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--checkpointing", "some"), "invalid choice"),
        (("--checkpointing", "plan"), "--budget-mib belong together"),
        (("--budget-mib", "3"), "--budget-mib belong together"),
        (("--checkpointing", "plan", "--budget-mib", "0"), "above 0"),
        (("--checkpointing", "plan", "--budget-mib", "0.01"), "a budget of 10485 bytes"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
