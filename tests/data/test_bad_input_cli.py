"""The training script, given data that cannot be used: one clear line, a status, no traceback."""

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.ranks.torchrun import python

SCRIPT = Path(__file__).resolve().parents[2] / "lessons" / "lesson04_training" / "train.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="lesson 04 has no script")

ENGLISH = [f"The man number {n} reads a book." for n in range(60)]
GERMAN = [f"Der Mann Nummer {n} liest ein Buch." for n in range(60)]


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def write(folder: Path, **files: bytes) -> None:
    """Good files for all splits, but for those given: write(folder, train_en=b"...")."""
    folder.mkdir(parents=True)
    for split in ("train", "val", "test"):
        (folder / f"{split}.en").write_bytes(files.get(f"{split}_en", text(ENGLISH)))
        (folder / f"{split}.de").write_bytes(files.get(f"{split}_de", text(GERMAN)))


def lengths(folder: Path) -> None:
    write(folder, train_de=text(GERMAN[:-3]))


def empty_lines(folder: Path) -> None:
    write(folder, val_en=text([*ENGLISH[:4], "", *ENGLISH[5:]]))


def not_utf8(folder: Path) -> None:
    write(folder, test_de=text(GERMAN[:7]) + "für".encode("latin-1") + b"\n" + text(GERMAN[8:]))


def truncated(folder: Path) -> None:
    write(folder)
    (folder / "train.en").unlink()
    (folder / "train.en.gz").write_bytes(gzip.compress(text(ENGLISH))[:-12])


def no_folder(folder: Path) -> None:
    pass


def endless(folder: Path) -> None:
    write(folder, test_en=text([*ENGLISH[:4], "endless " * 3000, *ENGLISH[5:]]))


def no_column(folder: Path) -> None:
    folder.mkdir(parents=True)
    rows = [{"en": en, "ger": de} for en, de in zip(ENGLISH, GERMAN, strict=True)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


CASES: dict[Callable[[Path], None], list[str]] = {
    lengths: ["train.en has 60 lines", "train.de has 57", "line 58"],
    empty_lines: ["val.en: 1 line is empty (5)", "--empty drop"],
    not_utf8: ["test.de, line 8", "0xfc", "iconv"],
    truncated: ["train.en.gz", "truncated"],
    endless: ["test: sentence 5", "the model takes 512", "endless endless"],
    no_folder: ["neither a folder nor one of grammar, multi30k, wmt16"],
    no_column: ["train.jsonl, line 1", "en, ger", "'de'"],
}


def flags(folder: Path, out: Path) -> list[str]:
    return ["--preset", "tiny", "--device", "cpu", "--dataset", str(folder), "--out", str(out)]


def command(folder: Path, out: Path, *arguments: str) -> list[str]:
    return [python(), str(SCRIPT), *flags(folder, out), *arguments]


def environment() -> dict[str, str]:
    """Without what a launcher of this test run may have set."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def expect_one_line(stderr: str, words: list[str]) -> None:
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    for some in words:
        assert some in stderr


@pytest.mark.parametrize("spoil", CASES, ids=lambda spoil: spoil.__name__)
def test_bad_data_is_one_line_and_loses_nothing(tmp_path, run_script, spoil):
    """Run in this process, since starting one takes seconds; two real starts follow below."""
    folder, out = tmp_path / "data", tmp_path / "out"
    spoil(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    out.mkdir()
    (out / "metrics.json").write_text("of the run before")
    ended = run_script(SCRIPT, *flags(folder, out))
    assert (ended.status, ended.out) == (2, "")
    expect_one_line(ended.err, CASES[spoil])
    assert (out / "metrics.json").read_text() == "of the run before"
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.full
def test_one_process_ends_with_status_2(tmp_path):
    not_utf8(tmp_path / "data")
    done = run(*command(tmp_path / "data", tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    expect_one_line(done.stderr, CASES[not_utf8])


def test_two_ranks_say_it_once(tmp_path):
    lengths(tmp_path / "data")
    _, *script = command(tmp_path / "data", tmp_path / "out")
    launcher = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run(*launcher, *script)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr  # torchrun's summary repeats it, indented
    assert "line 58 of train.en has no partner" in done.stderr


@pytest.mark.full
def test_half_and_endless_pairs_can_be_left_out_and_the_run_says_so(tmp_path):
    write(tmp_path / "data", train_en=text(["", "endless " * 3000, *ENGLISH[2:]]))
    done = run(*command(tmp_path / "data", tmp_path / "out", "--empty", "drop"))
    assert done.returncode == 0, done.stderr
    assert "dropped 1 pairs with an empty side" in done.stderr
    assert "left out 1 pairs longer than 512 tokens" in done.stderr
    assert (tmp_path / "out" / "metrics.json").is_file()
