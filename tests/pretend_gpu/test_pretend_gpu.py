"""The course beside GPUs that a CPU's torch only believes in: see pretend_cuda.py."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.group import ADDRESS_VARIABLES, LAUNCHER_VARIABLES
from shared.ranks.visible import HIDDEN, VISIBLE

HERE = Path(__file__).parent
PINNED = re.search(r"torch==([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
OURS = {"PYTHON_EXEC", "PYTHONPATH", HIDDEN, VISIBLE, *ADDRESS_VARIABLES, *LAUNCHER_VARIABLES}
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),  # the first compiles
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling the GPU needs g++"),
    pytest.mark.skipif(
        importlib.metadata.version("torch") not in (PINNED, f"{PINNED}+cpu"),
        reason=f"the GPU is made of private names of torch {PINNED} for the CPU",
    ),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

RANKS = """
import sys, torch
from shared.ranks.forked import run_ranks
from shared.ranks.visible import without_gpus
if sys.argv[1] == "hidden":
    without_gpus()
weight = torch.ones(3, requires_grad=True)
def step(rank=0):
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()
    return torch.cuda.is_initialized()
spoil = {"backward": weight.sum().backward, "AdamW": step, "is_available": torch.cuda.is_available}
for name in sys.argv[2:]:
    spoil[name]()
try:
    print(run_ranks(step, 2))
except RuntimeError as error:
    print("refused:", error)
try:
    without_gpus()
except ValueError as error:
    print("too late:", error)
"""
LAUNCH = """
import sys
from shared.ranks.launching import launch, launch_nodes
from shared.ranks.visible import without_gpus
without_gpus()
on_gpu = launch("train.py", 1, ["--preset", "tiny"])
print("on", on_gpu["device"])
exec(sys.argv[1])
"""
SEEN = "import torch, shared.exercises.notebook; print(torch.cuda.device_count())"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """An environment in which Python has pretend GPUs; what they need is compiled once."""
    own = {name: value for name, value in os.environ.items() if name not in OURS}
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own.setdefault("PRETEND_BUILD", str(caches / "torch_handle"))
    own |= {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, HERE / "build.py"], env=own, check=True)
    return own


@pytest.fixture
def beside(environment):
    """Run a command beside so many GPUs; what it printed."""

    def run(gpus: int, *command: object, cwd: Path = ROOT, **more: str) -> str:
        ended = subprocess.run(
            [str(word) for word in command],
            env={**environment, "PRETEND_GPUS": str(gpus), **more},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def script(lesson: str) -> Path:
    return next((ROOT / "lessons").glob(f"lesson{lesson}_*")) / "train.py"


@pytest.mark.parametrize("spoilt_by", ["backward", "AdamW", "is_available"])
def test_ranks_are_refused_where_a_fork_can_do_no_backward(spoilt_by, beside):
    said = beside(2, sys.executable, "-c", RANKS, "visible", spoilt_by)
    assert said.startswith("refused: run_ranks forks, and ")
    assert "shared.ranks.visible.without_gpus" in said
    assert "too late: torch has looked for GPUs in this process" in said


def test_ranks_run_where_no_gpu_is_visible_and_where_nobody_has_looked_for_one(beside):
    said = beside(2, sys.executable, "-c", RANKS, "hidden", "backward", "AdamW", "is_available")
    assert said == "[False, False]\n"
    assert beside(2, sys.executable, "-c", RANKS, "visible") == "[False, False]\n"


def test_a_notebook_sees_no_gpu_and_a_script_that_reads_answers_does(beside):
    assert beside(2, sys.executable, "-m", "IPython", "-c", SEEN) == "0\n"
    assert beside(2, sys.executable, "-c", SEEN) == "2\n"


def test_a_launched_script_has_the_gpu_and_two_ranks_beside_one_gpu_run_in_the_notebooks_cell(
    beside,
):
    folder = script("02").parent
    cells = nbformat.read(folder / "lesson.ipynb", as_version=4).cells
    (cell,) = [each.source for each in cells if "= launch(" in each.source]
    said = beside(1, sys.executable, "-c", LAUNCH, cell, cwd=folder)
    assert said.startswith("on Pretend GPU\nranks: 2\n")


@pytest.mark.parametrize("lesson", ["04", "06", "07"])
def test_a_cell_that_measures_a_gpu_does_it_in_a_process_of_its_own(lesson, beside, tmp_path):
    cells = nbformat.read(script(lesson).with_name("lesson.ipynb"), as_version=4).cells
    (cell,) = [each.source for each in cells if "with_gpus(" in each.source]
    names = "from shared.ranks.visible import num_gpus, torch_sees_gpus, with_gpus, without_gpus"
    program = f"import torch\n{names}\nwithout_gpus()\n{cell}\nassert not torch_sees_gpus()\n"
    (tmp_path / "cell.py").write_text(program)
    said = beside(2, sys.executable, tmp_path / "cell.py")
    assert said
    assert "nothing to measure" not in said
    assert "not measured here" not in said


@pytest.mark.parametrize(
    ("lesson", "engine"),
    [("13", "fsdp2"), ("10", "zero2"), ("10", "deepspeed")],  # 10 imports what looks for GPUs
)
def test_on_the_cpu_torchs_own_helpers_leave_the_gpus_alone(lesson, engine, beside, tmp_path):
    args = ["--preset", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    beside(2, *TORCHRUN, script(lesson), *args, "--engine", engine)
    assert json.loads((tmp_path / "metrics.json").read_text())["device"] == "cpu"


def test_the_courses_own_answers_are_right_beside_gpus(beside, tmp_path):
    todo = [sys.executable, "-m", "shared.exercises.todo", "06", tmp_path / "results", "120"]
    beside(2, *todo, TORCH_HANDLE_IMPLEMENTATION="solution", MPLBACKEND="agg")
    lines = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    outcomes = [line["status"]["outcome"] for line in lines if "status" in line]
    assert outcomes == ["right"] * len(lines[0]["exercises"])


def test_the_reference_curve_on_gpus(beside, tmp_path):
    args = ["--curve", "--engine", "ddp", "--out", str(tmp_path)]
    beside(2, *TORCHRUN, script("06"), *args)
    row = json.loads((tmp_path / "metrics.json").read_text())["table"][0]
    assert row["largest difference"] <= row["tolerance"]
