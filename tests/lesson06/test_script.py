"""The script: five engines, one curve, any number of ranks, bad input."""

import pytest

from shared.ddp.engines import ENGINES
from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "06_ddp" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def compared(launch_on):
    """Folder and metrics of the tiny comparison on 2 and 4 ranks."""
    return launch_on(SCRIPT, (2, 4), *TINY)


def test_five_engines_one_curve(compared):
    for ranks, (out, metrics) in compared.items():
        losses = metrics["losses"]
        assert list(losses) == list(ENGINES)
        for name in ENGINES:
            assert losses[name] == pytest.approx(losses["single"], abs=1e-4)
        assert losses["single"] == pytest.approx(compared[2][1]["losses"]["single"], abs=1e-4)
        assert metrics["world_size"] == ranks
        assert {path.name for path in out.iterdir()} == {"metrics.json", "engines.png"}


def test_messages_and_bytes_are_counted_exactly(compared):
    for _, metrics in compared.values():
        rows = {row["engine"]: row for row in metrics["table"]}
        assert rows["single"]["all-reduces"] == 0
        assert rows["naive"]["all-reduces"] == rows["overlapped"]["all-reduces"] == 47
        assert rows["bucketed"]["all-reduces"] == rows["ddp"]["all-reduces"] == 1
        assert len({rows[name]["MiB"] for name in ENGINES[1:]}) == 1


def test_one_engine_trains_a_translator(tmp_path, run_script):
    args = (*TINY, "--engine", "bucketed", "--out", tmp_path, "--bucket-mb", 0.05)
    status, out, _ = run_script(SCRIPT, *args)
    assert status == 0
    assert "BLEU" in out
    assert (tmp_path / "translator.pt").is_file()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--bucket-mb", "0"), "bucket_cap_mb must be above 0"),
        (("--max-tokens", "3"), "budget of 3"),
        (("--dataset", "nowhere"), "nowhere"),
        (("--mine",), "no exercise"),
    ],
)
def test_bad_input_is_one_line(args, words, tmp_path, run_script):
    status, _, err = run_script(SCRIPT, *TINY, "--out", tmp_path, *args)
    assert status == 2
    assert err.startswith("error: ")
    assert words in err
    assert len(err.strip().splitlines()) == 1
