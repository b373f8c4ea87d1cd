"""What the scripts share: the group, the flags, metrics, one line for a user's mistake."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks import group as distributed
from shared.ranks.group import Rank, process_group
from shared.ranks.launching import LaunchFailed, launch
from shared.ranks.torchrun import torchrun_command
from shared.script import checked_out, format_table, lesson_parser, positive_int, write_metrics

MAIN = Rank(0, 0, 1, torch.device("cpu"), "gloo")
SCRIPTS = sorted((ROOT / "lessons").glob("*/train.py"))


@pytest.fixture
def alone(monkeypatch):
    for name in distributed.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_torchrun_there_is_a_real_group_of_one(alone):
    with process_group("cpu") as rank:
        values = torch.ones(3)
        torch.distributed.all_reduce(values)
        assert (rank.rank, rank.world_size, rank.backend) == (0, 1, "gloo")
    assert not torch.distributed.is_initialized()


def test_the_group_is_torn_down_when_the_body_raises(alone):
    with pytest.raises(KeyError), process_group("cpu"):
        raise KeyError
    assert not torch.distributed.is_initialized()


def test_a_half_set_environment_is_named(alone):
    alone.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(InputError, match="WORLD_SIZE set but not RANK, LOCAL_RANK"),
        process_group(),
    ):
        pass


def test_more_ranks_than_devices(alone):
    alone.setattr(torch.cuda, "device_count", lambda: 1)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | address).items():
        alone.setenv(name, value)
    with pytest.raises(InputError, match=r"2 ranks on this machine and 1 GPU.*--device cpu"):
        process_group("cuda").__enter__()


def test_cuda_without_cuda(alone):
    alone.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="sees no CUDA device"):
        process_group("cuda").__enter__()


def test_counts_are_whole_and_positive(capsys):
    assert positive_int("3") == 3
    with pytest.raises(SystemExit):
        lesson_parser("01_x", "").parse_args(["--steps", "-2"])
    assert "got '-2'" in capsys.readouterr().err


def test_an_out_that_cannot_be_written(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(InputError, match=r"--out .*file/out cannot be written"):
        checked_out(blocker / "out")


def test_metrics_hold_the_table_and_the_world_size(tmp_path, capsys):
    rows = [{"variant": "none", "accuracy": 12.34567}, {"variant": "rotary", "accuracy": 100.0}]
    write_metrics(tmp_path, MAIN, headline="100 %", table=rows, curve=[1, 2])
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert record["world_size"] == 1
    assert record["table"] == rows
    assert record["curve"] == [1, 2]
    assert "none        12.35" in capsys.readouterr().out
    assert format_table([]) == "(no rows)"


def test_launch_shows_the_scripts_own_last_words(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys; print('error: the corpus is empty'); sys.exit(3)")
    with pytest.raises(LaunchFailed, match=r"error: the corpus is empty$"):
        launch(script, 2)


def test_launch_ends_a_script_that_hangs_and_all_its_ranks(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"file = pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK'])\n"
        "file.write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    with pytest.raises(LaunchFailed, match="not done after 8 s"):
        launch(script, 2, timeout=8)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    wait_until_gone(pids)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.1)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_every_script_runs_with_two_ranks_and_says_so(path, tmp_path):
    metrics = launch(path, 2, ["--preset", "tiny", "--out", tmp_path])
    assert metrics["world_size"] == 2
    assert metrics["lesson"] == path.parent.name
    assert metrics["table"]
    assert metrics["headline"]
    assert list(tmp_path.glob("*.png")), "a script draws at least one figure"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_every_script_refuses_an_out_in_one_line(path, tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, path, "--preset", "tiny", "--out", tmp_path / "file" / "x"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: --out .* cannot be written .*\n", done.stderr), done.stderr


def test_a_killed_rank_ends_the_run_with_an_error_and_leaves_nobody(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, pathlib, time, torch.distributed as dist\n"
        "from shared.ranks.group import process_group\n"
        "with process_group('cpu') as rank:\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'pid{{rank.rank}}').write_text(str(os.getpid()))\n"
        "    while True:\n"
        "        dist.barrier(); time.sleep(0.05)\n"
    )
    process = subprocess.Popen(
        torchrun_command(script, 2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in files]
    os.kill(pids[1], signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in printed
    wait_until_gone(pids)
