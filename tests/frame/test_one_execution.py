"""What a notebook stores is of one execution, and its sentences name the numbers of that one."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from shared.cli import notebooks
from shared.cli.changed import git
from shared.cli.notebooks import EXECUTED, digests
from shared.exercises.lessons import ROOT, lesson_folder

PATHS = sorted((ROOT / "lessons").glob("*/lesson.ipynb"))


def test_every_notebook_is_stored_from_one_execution():
    changed = git(ROOT, "diff", "--relative", "--name-only", "HEAD", "--", "lessons")
    offenders = []
    for path in PATHS:
        # What a learner has run is not as git has it: its outputs may be of many runs.
        as_in_git = changed is not None and str(path.relative_to(ROOT)) not in changed.split("\n")
        offenders += [f"{path.parent.name}: {what}" for what in pieces(path, as_in_git)]
    assert not offenders, "\n".join(offenders)


def pieces(path: Path, as_in_git: bool = True) -> Iterator[str]:
    """In what a notebook is not as one execution has left it."""
    notebook = nbformat.read(path, as_version=4)
    number = path.parent.name.removeprefix("lesson")[:2]
    again = f"store the whole again: ./run_all.sh notebooks {number}"
    stored, now = notebook.metadata.get(EXECUTED), digests(notebook)
    if stored is None:
        yield f"it carries no digests: {again}"
    elif stored["sources"] != now["sources"]:
        yield f"code has changed since it ran: {again}"
    elif as_in_git and stored["outputs"] != now["outputs"]:
        yield f"an output is not of the execution that stored the others: {again}"


def in_thousands(found: list[float]) -> float:
    (figure,) = found
    return figure / 1000


def second_over_first(found: list[float]) -> float:
    first, second = found
    return second / first


def largest_over_least(found: list[float]) -> float:
    return max(found) / min(found)


# What nbval does not compare: a number in prose, wherever it stands, and the output that it names.
# Each has one group; where a row says so, the number is made of those that the output names.
FAULTS = r"^(?:loader|buckets|item|kernels)(?: +\S+){3} +(\S+)$"
DROPPED = r"^nothing(?: +\d+ to \d+ %){"
SAID: list[tuple[str, str, str, *tuple[Callable[[list[float]], float], ...]]] = [
    ("02", r"(\d+) to \d+ % of the weight", r"1  either +\S+ +(\S+)"),
    ("02", r"to (\d+) % of the weight", r"0  either +\S+ +(\S+)"),
    ("02", r"still right for (\d+) %", r"0  either(?: +\S+){3} +(\S+)"),
    ("05", r"even, (\d+) KiB over", r"latency at (\d+) KiB"),
    *(
        ("06", rf"\| `{name}` \| [\w, ]+ \| (\S+)", rf"^{name} +(\S+) of torch's")
        for name in ("naive", "flat", "overlapped", "bucketed")
    ),
    ("06", r"1 MiB ours hid (\d+) %", r"^ours hides, .*?: (\d+) %"),
    ("06", r"1 MiB ours hid .* and DDP (\d+) %", r"^torch's DDP hides, .*?: (\d+) %"),
    ("06", r"of (\d+) % that could be", r"^at 1 MiB (\d+) % could"),
    ("06", r"25 MiB ours about (\d+) %", r"^ours hides, .* (\d+) %$"),
    (
        "07",
        r"padded evaluation by up to (\S+) points",
        r"padded .* 2 to 8 ranks: .* to (\S+) points",
    ),
    ("07", r"mean of means by up to (\d\.\d)", r"means, 9 to 16 ranks: .* to (\S+) points"),
    ("07", r"two workers are (\S+) times", r"^2 workers: .*, (\S+) times"),
    ("08", r"file by rank 0 takes about (\S+) ms", r"^ +1  one file, written by rank 0 +(\S+)"),
    ("08", r"other lengths (\d+) of 20 could", r"other lengths of 20 files +(\d+) unreadable"),
    ("08", r"and (\d+) loaded with the", r"other lengths of 20 files .* (\d+) hold parts"),
    ("08", r"all load, and (\d+) mix", r"equal lengths +of 20 files .* (\d+) hold parts"),
    ("11", r"under your `checkpoint` took (\S+) times", r"^every layer +(\S+) times the time"),
    ("11", r"every second layer (\d\.\d+)", r"^every second +(\S+) times the time"),
    ("12", r"all four take (\S+) to", FAULTS, min),
    ("12", r"all four take \S+ to (\S+)", FAULTS, max),
    ("12", r"program, and it read (\d\.\d+)", r"^kernels(?: +\S+){3} +(\S+)$"),
    (
        "12",
        r"one rank's longest is (\S+) times",
        r"^none +\d +\S+ +(\S+) +\S+$",
        largest_over_least,
    ),
    ("12", r"stored run from (\d+) to", r"step, MFU +(\S+) %", min),
    ("12", r"stored run from \d+ to (\d+) %", r"step, MFU +(\S+) %", max),
    ("12", r"Its gain was (\S+) where", r"^loader +\S+ +(\S+) +\S+ +\S+$"),
    ("12", r"where the trace promised (\d\.\d)", r"^loader +(\S+)(?: +\S+){3}$"),
    ("15", r"came out low: (\S+) % in", r"micro-batches, 1F1B: .*, (\S+) % measured"),
    ("15", r"and (\S+) % in place of .* for interleaving", r"interleaved: .*, (\S+) % measured"),
    ("15", r"take (\d+) ms in one piece", r"^ 1 +32 .* (\d+) ms"),
    ("15", r"ms in one piece and (\d+) in 32", r"^32 +1 .* (\d+) ms"),
    (
        "15",
        r"step (\S+) times as long, not",
        r"^(?:equal stages|one twice) .* (\d+) ms$",
        second_over_first,
    ),
    ("18", r"(?:loses|dropped) (\d+) to", DROPPED + r"1} +(\d+) to"),
    ("18", r"(?:loses|dropped) \d+ to (\d+) %", DROPPED + r"1} +\d+ to (\d+) %"),
    ("18", r"drops (\d+) to", DROPPED + r"3} +(\d+) to"),
    ("18", r"drops \d+ to (\d+) %", DROPPED + r"3} +\d+ to (\d+) %"),
    ("20", r"all-reduce's messages take (\d+) ms", r"bytes / 10 Mbit/s +(\S+)"),
    ("23", r"but by (\S+) s against", r"^dp 2 x tp 2, ZeRO-3 .* (\d+)$", in_thousands),
    ("23", r"s against (\S+) s a step", r"^tp 4 .* (\d+)$", in_thousands),
]


@pytest.mark.parametrize("number", sorted({row[0] for row in SAID}))
def test_a_sentence_says_the_number_that_its_page_shows(number):
    cells = nbformat.read(lesson_folder(number) / "lesson.ipynb", as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = (cell for cell in cells if cell.cell_type == "code")
    shown = "\n".join(output.get("text", "") for cell in code for output in cell.outputs)
    for _, said, where, *made in (row for row in SAID if row[0] == number):
        found = [float(each) for each in re.findall(where, shown, re.MULTILINE)]
        figure = made[0](found) if made else sum(found)
        places = re.findall(said, prose, re.MULTILINE)
        assert places and (made or len(found) == 1), f"{said!r} or {where!r} is not there"
        for words in places:
            off = abs(float(words) - figure)
            within = 0.501 * 10 ** -len(words.partition(".")[2])
            assert off <= within, f"{said!r} says {words}, the output {figure}"


FAILED = {
    "raise": CellExecutionError("traceback", "ValueError", "no"),
    "sleep": CellTimeoutError("A cell timed out"),
    "die": DeadKernelError("Kernel died"),
    "never start": RuntimeError("Kernel died before replying to kernel_info"),
}


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """The first of two notebooks that the command has stored; a stand-in runs their cells."""
    runs = itertools.count()

    def execute(notebook: NotebookNode, folder: Path, mode: str) -> None:
        if notebook.cells[0].source in FAILED:
            raise FAILED[notebook.cells[0].source]
        for cell in notebook.cells:
            cell.outputs = [nbformat.v4.new_output("stream", text=f"run {next(runs)}")]

    monkeypatch.setattr(notebooks, "execute", execute)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "find_lesson", lambda number: f"lesson{number}_toy")
    for number in ("01", "02"):
        path = tmp_path / "lessons" / f"lesson{number}_toy" / "lesson.ipynb"
        path.parent.mkdir(parents=True)
        sources = [number, f'@exercise("{number}.1")\ndef f(): ...']
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert notebooks.main(["01", "02"]) == 0
    return tmp_path / "lessons" / "lesson01_toy" / "lesson.ipynb"


def put_answer(notebook: NotebookNode) -> None:
    notebook.cells[1].source += "\n\nx = 1"


def put_own_cell(notebook: NotebookNode) -> None:
    notebook.cells.append(nbformat.v4.new_code_cell("3", id="my-own"))


def put_code(notebook: NotebookNode) -> None:
    notebook.cells[0].source += " + 1"


def put_output(notebook: NotebookNode) -> None:
    notebook.cells[0].outputs[0].text = "run 7"


def put_no_digests(notebook: NotebookNode) -> None:
    del notebook.metadata[EXECUTED]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put_answer, ""),
        (put_own_cell, ""),
        (put_code, "code has changed"),
        (put_output, "an output is not of the execution"),
        (put_no_digests, "it carries no digests"),
    ],
)
def test_what_is_not_of_one_execution_is_said_until_all_is_run(
    toy: Path, change: Callable[[NotebookNode], None], said: str
):
    assert not list(pieces(toy))
    notebook = nbformat.read(toy, as_version=4)
    change(notebook)
    nbformat.write(notebook, toy)
    (found,) = list(pieces(toy)) or [""]
    assert found.startswith(said) and bool(found) == bool(said)
    if said:  # the normaliser alone, which also takes the learner's cells for the course's
        assert notebooks.main(["01", "--no-run"]) == 0
        assert list(pieces(toy)) == [found]
    assert notebooks.main(["01"]) == 0
    assert not list(pieces(toy))


def test_a_learners_outputs_are_left_alone(toy: Path):
    notebook = nbformat.read(toy, as_version=4)
    put_output(notebook)
    nbformat.write(notebook, toy)
    assert not list(pieces(toy, as_in_git=False))


@pytest.mark.parametrize("failed", FAILED)
def test_a_notebook_that_fails_stays_as_it_was_and_the_next_is_run(toy: Path, capsys, failed: str):
    notebook = nbformat.read(toy, as_version=4)
    notebook.cells[0].source = failed
    nbformat.write(notebook, toy)
    after = toy.parents[1] / "lesson02_toy" / "lesson.ipynb"
    before = toy.read_bytes(), after.read_bytes()
    assert notebooks.main(["01", "02"]) == 1
    assert toy.read_bytes() == before[0]
    assert after.read_bytes() != before[1]
    said = capsys.readouterr().out
    assert f"lesson01_toy: failed, and left as it was\n{FAILED[failed]}" in said
    assert said.endswith("1 of 2 failed: lesson01_toy\n")
