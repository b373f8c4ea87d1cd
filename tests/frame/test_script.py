"""What the scripts share: the group, the flags, metrics, one line for a user's mistake."""

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure

from shared import script
from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks import group as distributed
from shared.ranks.forked import run_ranks
from shared.ranks.group import Rank, process_group
from shared.ranks.launching import LaunchFailed, launch
from shared.ranks.torchrun import torchrun_command
from shared.results import format_table, write_results
from shared.script import (
    agree_on_arguments,
    autocast,
    checked_out,
    lesson_parser,
    positive_int,
    take_folder,
)

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
        lesson_parser("lesson01_x/train.py", "").parse_args(["--steps", "-2"])
    assert "got '-2'" in capsys.readouterr().err


def test_an_out_that_cannot_be_written(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(InputError, match=r"--out .*file/out cannot be written"):
        checked_out(blocker / "out")


def arguments(out, **given):
    """What `prepare` and `choose_preset` leave in a script's arguments."""
    settled = {"lesson": "lesson01_x", "preset": "small", "seed": 7, "answers": {}, "out": out}
    return argparse.Namespace(**settled | given)


def test_results_say_what_they_depend_on(tmp_path, capsys):
    rows = [{"variant": "none", "accuracy": 12.34567}, {"variant": "rotary", "accuracy": 100.0}]
    figures = {"a.png": plt.figure()}
    args = arguments(tmp_path)
    write_results(args, MAIN, headline="100 %", table=rows, figures=figures, curve=[1, 2])
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert {
        **record,
        "world_size": 1,
        "seed": 7,
        "preset": "small",
        "lesson": "lesson01_x",
    } == record
    assert record["table"] == rows
    assert record["curve"] == [1, 2]
    assert record["figures"] == ["a.png"]
    assert record["peak_mib"] > 0
    assert {"when", "commit", "arguments", "answers", "device", "torch"} <= set(record)
    assert "none        12.35" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "metrics.json"}
    assert format_table([]) == "(no rows)"


def test_the_tiny_preset_says_what_it_is_for(tmp_path, capsys):
    write_results(arguments(tmp_path, preset="tiny"), MAIN, headline="loss 2.1", table=[])
    assert "shows that the code runs and nothing else: loss 2.1" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_and_nothing_written(tmp_path, value):
    rows = [{"loss": 1.0}, {"loss": value}]
    with pytest.raises(InputError, match=f"table 1 loss = {value} is not finite"):
        write_results(arguments(tmp_path), MAIN, headline="", table=rows)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_the_files_and_not_the_table(tmp_path, capsys, monkeypatch):
    write_results(arguments(tmp_path), MAIN, headline="first", table=[{"loss": 1.0}])
    before = (tmp_path / "metrics.json").read_text()

    def full(figure, path, **options):
        Path(path).write_bytes(b"half a pic")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    figures = {"a.png": plt.figure()}
    rows = [{"loss": 2.5}]
    with pytest.raises(InputError, match=r"cannot be written .No space left on device"):
        write_results(arguments(tmp_path), MAIN, headline="", table=rows, figures=figures)
    assert "2.5" in capsys.readouterr().out
    assert (tmp_path / "metrics.json").read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.json"}


def test_a_second_run_into_the_same_folder_hears_who_holds_it(tmp_path):
    program = (
        "import sys, pathlib; from shared.script import run_script, take_folder\n"
        "def main():\n"
        f"    take_folder(pathlib.Path({str(tmp_path)!r}))\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
        "run_script(main)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"another run writes to it .process {holder.pid} on"):
            take_folder(tmp_path)
        holder.communicate("")
    assert list(tmp_path.iterdir()) == []


def differing(rank):
    args = lesson_parser("lesson01_x/train.py", "").parse_args(
        ["--steps", str(5 + 3 * rank), "--out", f"o{rank}"]
    )
    try:
        agree_on_arguments(args)
    except InputError as error:
        return str(error)
    return ""


def test_ranks_with_other_arguments_all_hear_which():
    words = "the ranks differ in --steps (rank 0: 5, rank 1: 8); start the same command everywhere"
    assert run_ranks(differing, 2) == [words, words]


def test_a_cpu_computes_in_bf16_only_if_it_is_meant():
    def chosen(*flags):
        args = lesson_parser("lesson01_x/train.py", "", precision=True).parse_args(flags)
        enabled = autocast(args, torch.device("cpu"))._enabled
        return args.precision, enabled

    assert chosen() == ("fp32", False)
    assert chosen("--precision", "bf16", "--device", "cpu") == ("bf16", True)
    with pytest.raises(InputError, match="add --device cpu if you mean it"):
        chosen("--precision", "bf16")


def test_a_group_ends_in_a_torch_without_the_newer_caches(monkeypatch):
    from torch.distributed.tensor import _redistribute, debug

    monkeypatch.delattr(debug, "_clear_sharding_prop_cache")
    monkeypatch.delattr(_redistribute, "_planner_cache")
    with process_group("cpu"):
        pass


def test_a_gpu_that_only_emulates_bf16_computes_in_float32(monkeypatch):
    def emulated(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
    args = lesson_parser("lesson01_x/train.py", "", precision=True).parse_args([])
    with warnings.catch_warnings(action="ignore"):  # there is no such GPU here
        autocast(args, torch.device("cuda"))
    assert args.precision == "fp32"


@pytest.mark.parametrize(("local_rank", "said"), [("0", "error: bad\n"), ("1", "")])
def test_an_error_is_said_once_a_machine_and_left_for_torchrun(
    local_rank, said, tmp_path, monkeypatch, capsys
):
    def main():
        raise InputError("bad")

    file = tmp_path / "error.json"
    for name, value in (("RANK", "3"), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with warnings.catch_warnings(action="ignore"), pytest.raises(SystemExit) as ended:
        script.run_script(main)  # record() would have a terminal, and says that it has none
    assert ended.value.code == 2
    assert capsys.readouterr().err == said
    assert json.loads(file.read_text())["message"]["message"] == "error: bad"


def test_torchrun_repeats_the_line_and_says_little_more(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "from shared.errors import InputError\nfrom shared.script import run_script\n"
        "def main():\n    raise InputError('the corpus is empty')\nrun_script(main)\n"
    )
    done = subprocess.run(
        torchrun_command(file, 1), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert re.search(r"traceback *: error: the corpus is empty$", done.stderr, re.MULTILINE)
    assert "message format" not in done.stderr


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


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_every_script_runs_with_three_ranks_and_says_so(path, tmp_path):
    metrics = launch(path, 3, ["--preset", "tiny", "--out", tmp_path])  # divides no power of two
    assert metrics["world_size"] == 3
    assert metrics["lesson"] == path.parent.name
    assert metrics["table"]
    assert metrics["headline"]
    assert list(tmp_path.glob("*.png")), "a script draws at least one figure"


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_every_script_refuses_an_out_in_one_line(path, tmp_path, run_script):
    (tmp_path / "file").touch()
    with warnings.catch_warnings(action="ignore"):  # record() would have a terminal
        status, _, err = run_script(path, "--preset", "tiny", "--out", tmp_path / "file" / "x")
    assert status == 2
    assert re.fullmatch(r"error: --out .* cannot be written .*\n", err), err


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


def test_torchrun_never_reads_half_of_an_error(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    replaced = []
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (replaced.append(file.exists()), replace(self, to))
    )

    frames = "\nframe #0: <unknown function> + 0x67 (0x7fe3 in /libtorch_cpu.so)"

    def fails():
        raise RuntimeError("lost" + frames)

    with pytest.raises(RuntimeError):
        script.run_script(fails)
    said = json.loads(file.read_text())["message"]
    assert said["message"] == "RuntimeError: lost"
    assert "in fails" in said["extraInfo"]["py_callstack"]
    assert "unknown function" not in str(said)
    assert replaced == [False], "it came into its place whole"
