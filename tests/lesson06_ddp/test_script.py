"""The script: six engines, one curve, any number of ranks, bad input."""

import json
from argparse import Namespace

import pytest
import torch
from torch import nn

from lessons.lesson06_ddp.experiments.engine_comparisons import follow_curve, load_task
from lessons.lesson06_ddp.experiments.engine_runs import Run, tabulate
from shared.data.batching import collate
from shared.ddp.engines import ENGINES
from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.group import Rank
from shared.training.engine import DataParallelEngine, train_step

SCRIPT = ROOT / "lessons" / "lesson06_ddp" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def compared(launch_on):
    """Folder and metrics of the tiny comparison on 4 ranks; the notebook has 2."""
    return launch_on(SCRIPT, (4,), *TINY)[4]


def test_six_engines_one_curve(compared):
    out, metrics = compared
    losses = metrics["losses"]
    assert list(losses) == list(ENGINES)
    for name in ENGINES:
        assert losses[name] == pytest.approx(losses["single"], abs=1e-4)
    assert metrics["world_size"] == 4
    assert {path.name for path in out.iterdir()} == {"metrics.json", "engines.png"}


def test_messages_and_bytes_are_counted_exactly(compared):
    rows = {row["engine"]: row for row in compared[1]["table"]}
    assert rows["single"]["all-reduces"] == 0
    assert rows["naive"]["all-reduces"] == rows["overlapped"]["all-reduces"] == 47
    assert {rows[name]["all-reduces"] for name in ("flat", "bucketed", "ddp")} == {1}
    assert len({rows[name]["MiB"] for name in ENGINES[1:]}) == 1


def test_one_engine_trains_a_translator(tmp_path, run_script):
    args = (*TINY, "--engine", "bucketed", "--out", tmp_path, "--bucket-mb", 0.05)
    status, out, _ = run_script(SCRIPT, *args)
    assert status == 0
    assert "BLEU" in out
    written = {"metrics.json", "training.png", "translator.pt"}
    assert {path.name for path in tmp_path.glob("[!.]*")} == written
    row = json.loads((tmp_path / "metrics.json").read_text())["table"][0]
    assert row["engine"] == "bucketed"
    assert min(row[name] for name in ("tokens/s", "ms a step", "peak MiB")) > 0


def test_what_was_not_counted_has_no_number(compared, tmp_path, run_script):
    status, out, _ = run_script(SCRIPT, *TINY, "--steps", 1, "--out", tmp_path)
    assert status == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    for row in metrics["table"]:
        assert row.keys() == {"engine", "last loss"}
    assert "all-reduces" not in out
    (loss,), (first, *_) = (each["losses"]["single"] for each in (metrics, compared[1]))
    assert loss == pytest.approx(first, abs=1e-4), "ranks do not change the batches"


def test_in_weak_scaling_every_rank_has_as_many_tokens_as_one_alone():
    made = {
        "preset": "tiny",
        "device": "cpu",
        "engine": "all",
        "steps": 3,
        "seed": 0,
        "max_tokens": None,
    }
    made |= {"dataset": "grammar", "source": "de", "target": "en", "empty": "drop"}
    planned, tokens = [], []
    for ranks, weak in ((1, True), (2, False), (2, True)):
        args = Namespace(**made, weak=weak)
        task = load_task(args, Rank(0, 0, ranks, torch.device("cpu"), "gloo"))
        planned.append(args.max_tokens)
        tokens.append(sum(task.num_tokens))
    assert planned[1:] == [planned[0], 2 * planned[0]]
    assert tokens[2] > 1.5 * tokens[0]


def test_a_ratio_that_is_no_quotient_of_the_medians_says_so():
    """Median steps of 10 and 20 ms, and ratios of 4, 2 and 3."""
    made = {"ddp": [0.001, 0.010, 0.010], "naive": [0.004, 0.020, 0.030]}
    made["single"] = [0.004, 0.010, 0.030]
    runs = [Run(DataParallelEngine(None, None, 2, name=n), [], s, 9) for n, s in made.items()]
    row = tabulate(runs, {name: [1.0] for name in made}, 2)[1]
    assert (row["ms a step"], row["time / ddp by step"], row["efficiency, %"]) == (20, 3, 50)


class Biased(nn.Module):
    """One number more or less for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, src, tgt_in):
        return self.bias.expand(*tgt_in.shape, 8)


@pytest.mark.parametrize(("max_norm", "moved"), [(1.0, 1.0), (100.0, 10.0)])
def test_gradients_are_clipped_once_they_are_averaged(max_norm, moved):
    model = Biased()

    def arrive():
        model.bias.grad = torch.zeros(8)
        model.bias.grad[5] = 10.0

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = DataParallelEngine(model, optimizer, finish=arrive)
    train_step(engine, collate([([4, 5], [6])]), max_norm=max_norm)
    assert model.bias.norm().item() == pytest.approx(moved, rel=1e-5)


def test_the_curve_wants_ranks_that_divide_its_batches(tmp_path):
    args = Namespace(precision=None, engine="all", out=tmp_path, preset=None)
    with pytest.raises(InputError, match="batches of 32 pairs, which 3 ranks do not divide"):
        follow_curve(args, Rank(0, 0, 3, torch.device("cpu"), "gloo"), None)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--bucket-mb", "0"), "--bucket-mb must be above 0"),
        (("--curve", "--precision", "bf16"), "--curve compares in float32"),
        (("--max-tokens", "3"), "budget of 3"),
    ],
)
def test_bad_input_is_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
