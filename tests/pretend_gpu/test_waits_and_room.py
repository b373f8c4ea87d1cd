"""Beside a GPU that is only believed in: who waits for it, and what fits into it."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest

from lessons.lesson20_less_communication.results import RECIPES, bytes_needed
from shared.exercises.lessons import ROOT
from tests.pretend_gpu.test_pretend_gpu import beside, environment, pytestmark, script

__all__ = ["beside", "environment", "pytestmark"]  # fixtures, and where these tests are skipped
TEXT = ("--dataset", ROOT / "shared" / "data")  # is quickly read
COUNT = """
import runpy, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from shared.capstone.record import Record

class Waits(TorchDispatchMode):
    seen, by_step = 0, []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        name, kinds = func.overloadpacket.__name__, {x.device.type for x in tensors}
        moved = name in ("_to_copy", "copy_") and kinds == {"cpu", "cuda"}
        later = (kwargs or {}).get("non_blocking") or any(x is True for x in args)
        reads = name in ("_local_scalar_dense", "nonzero", "equal", "masked_select")
        Waits.seen += (moved and not later) or (reads and "cuda" in kinds)
        return result

def add(self, *args, own=Record.add):
    own(self, *args)
    Waits.by_step.append(Waits.seen)

Record.add = add
sys.argv = sys.argv[1:]
with Waits():
    runpy.run_path(sys.argv[0], run_name="__main__")
print("waits", *(b - a for a, b in zip(Waits.by_step, Waits.by_step[1:])))
"""


def test_the_capstones_steps_do_not_wait(beside, tmp_path):
    config = (script("23").parent / "configs" / "tiny.toml").read_text()
    config = config.replace("log_every = 1", "log_every = 9").replace("evaluate_every = 3", "")
    (tmp_path / "quiet.toml").write_text(config)
    (tmp_path / "count.py").write_text(COUNT)
    run = [tmp_path / "count.py", script("23"), "--config", tmp_path / "quiet.toml"]
    said = beside(1, *run, "--mode", "ddp", "--out", tmp_path / "out")
    # In the second step DDP tells the ranks its new order of gradients, there and back.
    assert "waits 2 0 0 0 0\n" in said
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["peak_mib"] < 100, "what measures the GPU's arithmetic is no memory of the run"


@pytest.fixture
def refused(environment):
    """Run a script beside two GPUs of so many MiB: the one line that it leaves with."""

    def run(lesson: str, mib: int, *args: object, **more: str) -> str:
        command = [sys.executable, script(lesson), "--device", "cuda", *args]
        ended = subprocess.run(
            [str(word) for word in command],
            env={**environment, "PRETEND_GPUS": "2", "PRETEND_MIB": str(mib), **more},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr
        (line,) = (each for each in ended.stderr.splitlines() if each.startswith("error: "))
        return line

    return run


def test_a_preset_is_refused_where_it_does_not_fit_and_runs_where_it_does(
    refused, beside, tmp_path
):
    out = ("--out", tmp_path / "out")
    line = refused("20", 16_000, "--preset", "large", *out)
    assert "--preset large needs about 34.7 GB on each of 1 GPU(s)" in line
    assert "take --preset small or 3 GPUs" in line
    assert "take --preset tiny" in refused("20", 10, "--preset", "small", *out)
    args = Namespace(method="all_reduce", engine="by_hand")
    predicted = bytes_needed(args, RECIPES["small"], 1, True) / 2**20
    run = [script("20"), "--preset", "small", "--steps", "4", *TEXT, *out]
    (tmp_path / "room.py").write_text("import torch; print(torch.cuda.mem_get_info()[1])")
    assert beside(1, tmp_path / "room.py", PRETEND_MIB="64") == f"{64 << 20}\n"
    beside(1, *run, "--method", "all_reduce", PRETEND_MIB="64")
    measured = json.loads((tmp_path / "out" / "metrics.json").read_text())["peak_mib"]
    assert predicted == pytest.approx(measured, rel=0.1)


def test_gpus_by_a_number_that_is_not_there(refused, tmp_path):
    args = ("--preset", "tiny", "--out", tmp_path)
    line = refused("20", 1000, *args, CUDA_VISIBLE_DEVICES="7")
    assert "CUDA_VISIBLE_DEVICES=7 names none of them" in line
