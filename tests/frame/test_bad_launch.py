"""Part II's scripts, started the wrong way: one line and status 2, no hang, no process left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.exercises.lessons import ROOT
from shared.ranks import group as distributed
from shared.ranks.launching import LaunchFailed, launch

SCRIPTS = sorted((ROOT / "lessons").glob("lesson0[5-8]_*/train.py"))
TINY = ("--preset", "tiny")
LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)


@pytest.fixture
def start(run_script, tmp_path):
    """Run a script in this process with these variables: exit status and what it said."""

    def started(script: Path, *args: object, **environment: str) -> tuple[int, str]:
        given = args if "--out" in args else (*args, "--out", tmp_path)
        before = children()
        ended = run_script(script, *given, **environment)
        assert children() == before, "a process was left behind"
        assert not torch.distributed.is_initialized()
        return ended.status, ended.err

    return started


def children() -> set[int]:
    """The processes that this one started and that still run."""
    lines = subprocess.run(
        ["ps", "-o", "pid=,stat=,comm=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    fields = [line.split() for line in lines]
    return {int(pid) for pid, stat, name, *_ in fields if name != "ps" and "Z" not in stat}


def expect_error(result: tuple[int, str], *words: str) -> None:
    status, said = result
    assert status == 2
    assert len(said.strip().splitlines()) == 1, said
    for word in ("error: ", *words):
        assert word in said


def test_there_is_a_part_two():
    assert SCRIPTS


@each_script
def test_world_size_without_rank(start, script):
    result = start(script, *TINY, WORLD_SIZE="2")
    expect_error(result, "WORLD_SIZE set but not RANK, LOCAL_RANK", "start with torchrun")


@each_script
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
    ],
)
def test_a_place_that_cannot_be(start, script, changed, words):
    # Rank 0 says it for all; a rank that cannot be is none of them, and must say it itself.
    status, said = start(script, *TINY, **(LAUNCHED | changed))
    assert status == 2
    if changed.get("RANK", "0") == "0":
        expect_error((status, said), words)


@each_script
def test_an_out_that_cannot_be_written(start, script, tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    result = start(script, *TINY, "--device", "cpu", "--out", blocker / "out")
    expect_error(result, "--out", "cannot be written")


@each_script
def test_more_ranks_than_gpus(start, script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = start(script, *TINY, "--device", "cuda", **LAUNCHED)
    expect_error(result, "2 ranks on this machine and 1 GPU", "--device cpu (gloo)")
    # The other rank leaves as well, and says nothing: one line is enough.
    other = LAUNCHED | {"RANK": "1", "LOCAL_RANK": "1"}
    assert start(script, *TINY, "--device", "cuda", **other) == (2, "")


@each_script
def test_cuda_where_there_is_none(start, script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    expect_error(start(script, *TINY, "--device", "cuda"), "sees no CUDA device", "--device cpu")


def test_torchrun_ends_with_ranks_that_were_too_many(tmp_path):
    wrapper = tmp_path / "train.py"
    wrapper.write_text(
        "import os, pathlib, runpy, torch\n"
        f"me = pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK'])\n"
        "me.write_text(str(os.getpid()))\n"
        "torch.cuda.device_count = lambda: 1\n"
        f"runpy.run_path({str(SCRIPTS[0])!r}, run_name='__main__')\n"
    )
    with pytest.raises(LaunchFailed, match="2 ranks on this machine and 1 GPU"):
        launch(wrapper, 2, args=[*TINY, "--device", "cuda"], timeout=120)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.full
@each_script
def test_without_torchrun_it_runs_as_one_process(script, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    assert distributed.LAUNCHER_VARIABLES[0] not in environment
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    command = [python, str(script), *TINY, "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"world_size": 1' in (tmp_path / "metrics.json").read_text()
