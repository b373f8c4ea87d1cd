"""Part II's scripts, started the wrong way: one line and status 2, no hang, no process left."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from shared.exercises.lessons import ROOT
from shared.ranks import gpus
from shared.ranks import group as distributed
from shared.ranks.launching import LaunchFailed, launch
from shared.ranks.torchrun import python
from shared.script import run_script

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


ON_GPU = (*TINY, "--device", "cuda")


@pytest.mark.parametrize(
    ("visible", "device", "words"),
    [
        ("", "cuda", "CUDA_VISIBLE_DEVICES= hides them all: unset it"),
        ("NoDevFiles", "cuda", "CUDA_VISIBLE_DEVICES=NoDevFiles hides them all"),
        ("7", "cuda", "CUDA_VISIBLE_DEVICES=7 names none of them"),
        ("words", "auto", "CUDA_VISIBLE_DEVICES=words names none of them"),
    ],
)
def test_gpus_that_are_hidden_or_named_wrong(visible, device, words, start, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    args = (*TINY, "--device", device)
    expect_error(start(SCRIPTS[0], *args, CUDA_VISIBLE_DEVICES=visible), words, "--device cpu")


def test_a_few_gpus_of_those_that_are_there(start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = start(SCRIPTS[0], *ON_GPU, **LAUNCHED, CUDA_VISIBLE_DEVICES="0,7")
    expect_error(result, "2 ranks on this machine and 1 GPU(s) (CUDA_VISIBLE_DEVICES=0,7)")


def test_a_torch_for_the_cpu_alone(start, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    expect_error(start(SCRIPTS[0], *ON_GPU), "is built for the CPU alone", "--device cpu")


@pytest.fixture
def one_gpu(monkeypatch):
    """A torch that sees a GPU of compute capability 7.5, and has code for it and for newer ones."""
    known = {
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_name": lambda device: "Tesla T4",
        "get_device_capability": lambda device: (7, 5),
        "get_arch_list": lambda: ["sm_70", "sm_80", "sm_90"],
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return monkeypatch


def test_a_torch_without_nccl(start, one_gpu):
    one_gpu.setattr(torch.distributed, "is_nccl_available", lambda: False)
    expect_error(start(SCRIPTS[0], *ON_GPU), "has no NCCL", "--device cpu (gloo)")


@pytest.mark.parametrize(
    ("built", "runs"),
    [
        (["sm_70", "sm_80"], True),
        (["sm_75"], True),
        (["compute_70"], True),  # compiled for this GPU when it is needed
        (["sm_80", "sm_90a", "compute_90"], False),
        (["sm_60"], False),
    ],
)
def test_a_gpu_for_which_torch_has_no_code(built, runs, start, one_gpu):
    one_gpu.setattr(torch.cuda, "get_arch_list", lambda: built)
    if runs:
        gpus.check_architecture(torch.device("cuda", 0))
    else:
        result = start(SCRIPTS[0], *ON_GPU)
        words = "GPU 0 (Tesla T4) has compute capability 7.5", f"has code for {', '.join(built)}"
        expect_error(result, *words, "--device cpu")


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_that_another_process_has(rank, kind, start, one_gpu):
    def refuse(device: torch.device) -> None:
        raise kind("CUDA error: devices are busy or unavailable\nCompile with TORCH_USE_CUDA_DSA")

    one_gpu.setattr(torch.cuda, "device_count", lambda: 2)
    one_gpu.setattr(torch.cuda, "set_device", refuse)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}  # each for itself: the others may go on
    result = start(SCRIPTS[0], *ON_GPU, **LAUNCHED | place)
    expect_error(result, f"GPU {rank} cannot be used (CUDA error: devices are busy", "nvidia-smi")


def test_a_gpu_that_gets_full(capfd):
    def train() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "14.58 GiB of which 1.50 GiB is free. Including non-PyTorch memory, this process has"
        )

    with pytest.raises(SystemExit) as left:
        run_script(train)
    said = capfd.readouterr().err
    expect_error((left.value.code, said), "2.00 GiB", "1.50 GiB is free: take a smaller --preset")
    page, heading = re.findall(r'(lessons/\S+\.md), "(.+)"', said)[0]
    assert f"\n## {heading}\n" in (ROOT / page).read_text("utf-8")


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
def test_without_torchrun_it_runs_as_one_process(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    assert distributed.LAUNCHER_VARIABLES[0] not in environment
    command = [python(), str(SCRIPTS[0]), *TINY, "--device", "cpu", "--out", str(tmp_path)]
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
