"""The course beside GPUs that a CPU's torch only believes in: see pretend_cuda.py."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from shared.exercises.lessons import ROOT
from shared.ranks.group import ADDRESS_VARIABLES, LAUNCHER_VARIABLES
from shared.ranks.visible import HIDDEN, VISIBLE
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.results import Answers, Limits, Outcome
from solutions.grading.sandbox import process
from solutions.grading.sandbox.run import Workspace
from tests.pretend_gpu.check_order import check
from tests.warm.server import interpreter

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
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
# What each mechanism does with NCCL's groups and messages, in its shortest run.
MECHANISMS = [
    (2, "06", ""),  # all engines
    (2, "08", "--steps 9 --interval 4 --untimed --kill 7:1"),
    (2, "10", "--steps 2 --engine zero3"),
    (2, "10", "--steps 2 --deepspeed lessons/lesson10_zero/ds_gpu_zero3.json"),
    (2, "13", "--steps 2 --engine by_hand"),
    (2, "13", "--steps 2 --engine fsdp2"),
    (4, "13", "--steps 2 --engine hybrid"),
    (2, "14", "--steps 2"),
    (2, "15", "--steps 2 --schedule interleaved --chunks 2"),
    (4, "16", "--steps 2 --tp 2 --pp 2"),
    (2, "17", "--steps 2 --engine ring"),
    (2, "18", "--steps 2"),
    (2, "19", "--steps 2 --engine fsdp2"),
    (2, "20", "--steps 3 --method fp16"),
    (2, "22", "--steps 2"),
    (2, "23", "--steps 2 --mode 3d"),
    (2, "23", "--steps 2 --mode fsdp2"),
]

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
SEARCH = """
import pathlib, sys, torch
from lessons.lesson10_zero.experiments import search
from lessons.lesson10_zero.train import RECIPES, with_deepspeed
from shared.ranks.group import process_group
def try_some(fits):
    for layers in (1, 8, 1):
        try:
            fits(layers)
        except torch.OutOfMemoryError:
            print("out of memory")
        else:
            print("fits")
    return 1, "GPU"
search.WIDE |= {"d_model": 512, "num_heads": 8}
search.largest_that_fits, search.write_results = try_some, lambda *_, **__: None
with process_group() as rank:
    search.search(None, rank, pathlib.Path(sys.argv[1]), RECIPES["tiny"], with_deepspeed)
"""
SEEN = "import torch, shared.exercises.notebook; print(torch.cuda.device_count())"


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    """An environment in which Python has pretend GPUs; what they need is compiled once.

    Its torchrun and its notebooks fork their processes from one that has imported torch already.
    """
    own = {name: value for name, value in os.environ.items() if name not in OURS}
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own.setdefault("PRETEND_BUILD", str(caches / "torch_handle"))
    own |= {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, HERE / "build.py"], env=own, check=True)
    folder = tmp_path_factory.mktemp("warm")
    variables = {name: own[name] for name in ("PRETEND_BUILD", "PYTHONPATH", "OMP_NUM_THREADS")}
    with interpreter(folder, PRETEND_GPUS="1", **variables) as program:
        until = time.monotonic() + 120
        while not (folder / "socket").exists() and time.monotonic() < until:
            time.sleep(0.1)
        yield own | {"PYTHON_EXEC": str(program), "JUPYTER_PATH": str(folder)}


@pytest.fixture
def beside(environment):
    """Run Python beside so many GPUs; what it printed."""

    def run(gpus: int, *words: object, cwd: Path = ROOT, **more: str) -> str:
        ended = subprocess.run(
            [environment["PYTHON_EXEC"], *map(str, words)],
            env={**environment, "PRETEND_GPUS": str(gpus), **more},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


@pytest.fixture
def metrics_of(beside, tmp_path):
    """Run a lesson's script under torchrun beside as many GPUs as ranks; its metrics."""

    def run(ranks: int, lesson: str, *args: str, **more: str) -> dict:
        launched = [*TORCHRUN, f"--nproc_per_node={ranks}", "--max-restarts=1", script(lesson)]
        beside(ranks, *launched, "--preset", "tiny", "--out", tmp_path, *args, **more)
        return json.loads((tmp_path / "metrics.json").read_text())

    return run


def script(lesson: str) -> Path:
    return next((ROOT / "lessons").glob(f"lesson{lesson}_*")) / "train.py"


@pytest.mark.parametrize("spoilt_by", ["backward", "AdamW", "is_available"])
def test_ranks_are_refused_where_a_fork_can_do_no_backward(spoilt_by, beside):
    said = beside(2, "-c", RANKS, "visible", spoilt_by)
    assert said.startswith("refused: run_ranks forks, and ")
    assert "shared.ranks.visible.without_gpus" in said
    assert "too late: torch has looked for GPUs in this process" in said


def test_ranks_run_where_no_gpu_is_visible_and_where_nobody_has_looked_for_one(beside):
    said = beside(2, "-c", RANKS, "hidden", "backward", "AdamW", "is_available")
    assert said == "[False, False]\n"
    assert beside(2, "-c", RANKS, "visible") == "[False, False]\n"


def test_a_notebook_sees_no_gpu_and_a_script_that_reads_answers_does(beside):
    assert beside(2, "-m", "IPython", "-c", SEEN) == "0\n"
    assert beside(2, "-c", SEEN) == "2\n"


def test_a_launched_script_has_the_gpu_and_two_ranks_beside_one_gpu_run_in_the_notebooks_cell(
    beside,
):
    folder = script("02").parent
    cells = nbformat.read(folder / "lesson.ipynb", as_version=4).cells
    (cell,) = [each.source for each in cells if "= launch(" in each.source]
    said = beside(1, "-c", LAUNCH, cell, cwd=folder)
    assert said.startswith("on Pretend GPU\nranks: 2\n")


@pytest.mark.parametrize("lesson", ["04", "06", "07"])
def test_a_cell_that_measures_a_gpu_does_it_in_a_process_of_its_own(lesson, beside, tmp_path):
    cells = nbformat.read(script(lesson).with_name("lesson.ipynb"), as_version=4).cells
    (cell,) = [each.source for each in cells if "with_gpus(" in each.source]
    names = "from shared.ranks.visible import num_gpus, torch_sees_gpus, with_gpus, without_gpus"
    program = f"import torch\n{names}\nwithout_gpus()\n{cell}\nassert not torch_sees_gpus()\n"
    (tmp_path / "cell.py").write_text(program)
    said = beside(2, tmp_path / "cell.py")
    assert said
    assert "nothing to measure" not in said
    assert "not measured here" not in said


@pytest.mark.parametrize(
    ("lesson", "engine"),
    [("13", "fsdp2"), ("10", "zero2"), ("10", "deepspeed")],  # 10 imports what looks for GPUs
)
def test_on_the_cpu_torchs_own_helpers_leave_the_gpus_alone(lesson, engine, metrics_of):
    args = ["--device", "cpu", "--steps", "2", "--engine", engine]
    assert metrics_of(2, lesson, *args)["device"] == "cpu"


@pytest.mark.parametrize(("ranks", "lesson", "args"), MECHANISMS)
def test_ranks_call_nccl_in_one_order_and_compute_on_their_gpus(
    ranks, lesson, args, metrics_of, tmp_path
):
    log = str(tmp_path / "calls")
    metrics = metrics_of(ranks, lesson, *args.split(), PRETEND_NCCL_LOG=log)
    calls, found = check(log)
    assert metrics["device"] == "Pretend GPU"
    assert calls
    assert found == [] or "--kill" in args  # who was killed has made fewer


def test_the_courses_own_answers_are_right_beside_gpus(beside, tmp_path):
    todo = ["-m", "shared.exercises.todo", "06", tmp_path / "results", "120"]
    beside(2, *todo, TORCH_HANDLE_IMPLEMENTATION="solution", MPLBACKEND="agg")
    lines = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    outcomes = [line["status"]["outcome"] for line in lines if "status" in line]
    assert outcomes == ["right"] * len(lines[0]["exercises"])


def test_the_references_have_full_points_where_the_judge_is_beside_gpus(environment, monkeypatch):
    lesson = read_lessons(ROOT, ["06"])["06"]
    known = KnownAnswers(ROOT, lesson)
    cells = {each.exercise: known.cell(each) for each in known.references()}
    gpus = {name: environment[name] for name in ("PRETEND_BUILD", "PYTHONPATH")}
    own, gpus["PRETEND_GPUS"] = process.environment, "2"
    monkeypatch.setattr(process, "environment", lambda *given: own(*given) | gpus)
    with Workspace(ROOT, confined=False) as workspace:
        verdicts = workspace.grade(Answers("Ada", "06", cells, {}), lesson, Limits())
    assert {each.exercise: each.outcome for each in verdicts} == dict.fromkeys(cells, Outcome.RIGHT)


def said(notebook: NotebookNode) -> dict[int, str]:
    """What cells have printed whose words are the same on every machine."""
    cells = {
        place: cell.outputs
        for place, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
        and "nbval-ignore-output" not in cell.metadata.get("tags", [])
        and "with_gpus(" not in cell.source
    }
    return {
        place: "".join(each.text for each in outputs if each.get("name") == "stdout")
        for place, outputs in cells.items()
    }


@pytest.mark.parametrize("lesson", ["06", "13"])
def test_a_solved_notebook_says_beside_gpus_what_it_says_without(lesson, environment, monkeypatch):
    path = script(lesson).with_name("lesson.ipynb")
    notebook = nbformat.read(path, as_version=4)
    stored = said(notebook)
    monkeypatch.setenv("JUPYTER_PATH", environment["JUPYTER_PATH"])
    solved = {"TORCH_HANDLE_IMPLEMENTATION": "solution", "TORCH_HANDLE_QUICK": "1"}
    client = NotebookClient(notebook, kernel_name="python3", timeout=300)
    client.resources = {"metadata": {"path": str(path.parent)}}
    client.execute(env={**environment, **solved, "PRETEND_GPUS": "2"})
    assert said(notebook) == stored


def test_what_did_not_fit_leaves_nothing_to_what_is_tried_next(beside, tmp_path):
    shutil.copy(script("10").with_name("ds_zero3.json"), tmp_path)
    said = beside(1, "-c", SEARCH, tmp_path, PRETEND_MIB="100")
    assert said == "fits\nout of memory\nfits\n"


def test_the_reference_curve_on_gpus(metrics_of):
    row = metrics_of(2, "06", "--curve", "--engine", "ddp")["table"][0]
    assert row["largest difference"] <= row["tolerance"]
