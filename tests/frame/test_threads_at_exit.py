"""Nothing ends with a thread of gloo: while Python ends, one that wants its lock is an abort.

Threads are counted at the very end of `atexit`, so that the tests wait for no rare abort.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from shared.cli.command import all_lessons
from shared.exercises.lessons import ROOT
from shared.ranks.processes import supervise
from shared.ranks.torchrun import torchrun_command
from tests.threads import TELLS, engines_of, expect_no_gloo, telling
from tests.warm.server import interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")

# An optimizer makes torch import what it has put off.
TRAINS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(*, in_a_cycle):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.itself = [model] if in_a_cycle else []
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model
"""
# A forked rank leaves by os._exit: Python does not end in it, and a model in a cycle may stay.
FORKED = """
from shared.ranks.forked import run_ranks

def before(rank):
    leave = os._exit
    os._exit = lambda status: (tell_threads(f"forked_{rank}"), leave(status))

run_ranks(lambda rank: bool(train(in_a_cycle=False)), 2, before=before)
"""
ALONE = """
from shared.ranks.group import process_group
with process_group("cpu"):
    train(in_a_cycle=True)
"""
FAILS = """
from shared.errors import InputError
from shared.ranks.group import process_group
from shared.script import run_script

def main():
    with process_group("cpu"):
        model = train(in_a_cycle=True)  # which the error's frames keep until the script ends
        raise InputError("an error of the user's")

run_script(main)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A warm interpreter that has not imported what torch puts off."""
    with interpreter(tmp_path_factory.mktemp("warm"), lazily=True) as program:
        yield program


@pytest.fixture
def run(python, tmp_path):
    """Run a program of this text; return its exit status."""

    def run(program: str) -> int:
        file = tmp_path / "program.py"
        file.write_text(program)
        return subprocess.run([python, file], stderr=subprocess.DEVNULL, timeout=120).returncode

    return run


def test_a_thread_of_gloo_is_seen(threads, tmp_path, run):
    init = f"init_process_group('gloo', 'file://{tmp_path}/store', rank=0, world_size=1)"
    assert run(TELLS + TRAINS + f"dist.{init}\ntrain(in_a_cycle=False)") == 0
    assert {"gloo_tcp_loop", "pt_gloo_runloop"} <= threads()["alone"]


@pytest.mark.parametrize(
    ("program", "status", "who"),
    [(ALONE, 0, ["alone"]), (FAILS, 2, ["alone"]), (FORKED, 0, ["alone", "forked_0", "forked_1"])],
    ids=["alone", "fails", "forked"],
)
def test_a_program_ends_without_one(threads, run, program, status, who):
    assert run(TELLS + TRAINS + program) == status
    expect_no_gloo(threads(), *who)


def test_a_notebooks_kernel_ends_without_one(threads, python, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(python.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the warm one has it, whoever runs this
    cells = [nbformat.v4.new_code_cell(source) for source in (TELLS, TRAINS, FORKED, ALONE)]
    NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120).execute()
    expect_no_gloo(threads(), "alone", "forked_0", "forked_1")


def end_of(script: Path, ranks: int, args: list[str], folder: Path) -> None:
    """Run a lesson's script with what counts its threads; its engine may refuse the ranks."""
    log = folder / "log"
    words = ["--preset", "tiny", "--device", "cpu", "--out", str(folder), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = torchrun_command(telling(script, folder), ranks, words)
    outcome = supervise(command, env=environment, log=log, time_limit=240)
    said = log.read_text(errors="replace")
    assert outcome.status == 0 or "error: --engine" in said, said


# Engines on several ranks that no test of a lesson launches; 06's own are all in its first.
NOT_LAUNCHED = [
    *(("06", "ddp"), ("22", "ddp"), ("23", "")),
    *(("10", stage) for stage in ("zero1", "zero3")),
]


def runs() -> Iterator[tuple[str, str, int]]:
    """Lesson, engine and ranks of what runs here: the others are counted by `launch_on`."""
    for lesson in all_lessons():
        yield lesson, "first", 1
        tests = (ROOT / "tests" / lesson).glob("test_*.py")
        if not any("launch_on(" in file.read_text() for file in tests):
            yield lesson, "first", 2
        for number, engine in NOT_LAUNCHED:
            if lesson[6:8] == number:
                yield lesson, engine, 2


@pytest.mark.full
@pytest.mark.parametrize(("lesson", "engine", "ranks"), list(runs()))
def test_a_script_ends_without_one_though_torch_imports_while_there_is_a_group(
    lesson, engine, ranks, python, threads, tmp_path, monkeypatch
):
    """A module that is imported with the first optimizer may keep the group that is there.

    (torch.distributed.nn.functional did: see shared/ranks/group.py.) The warm interpreter, by which
    `launch_on` counts, has imported it before there is a group, so here the lazy one is taken.
    """
    script = ROOT / "lessons" / lesson / "train.py"
    if engine == "first":
        engine = engines_of(script, monkeypatch)[0]
    monkeypatch.setenv("PYTHON_EXEC", str(python))
    end_of(script, ranks, ["--engine", engine] if engine else [], tmp_path)
    expect_no_gloo(threads(), *map(str, range(ranks)))
