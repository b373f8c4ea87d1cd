"""Say what this machine has for the course, what it lacks, and what to do about it.

python -m shared.cli.doctor [--no-setup]     exit status 1 if something needed is missing
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shared.cli.accelerators import gpu_gib, look_at_compiler, look_at_deepspeed, look_at_torch
from shared.cli.command import ROOT
from shared.cli.finding import GOOD, MISSING, NOTE, Finding
from shared.cli.machine import GIB, memory_gib, num_cores, processor_name
from shared.cli.setup import SetupFailed, find_need, installed_course
from shared.cli.torch_names import look_at_names

NUM_MIN_GIB_DISK = 3
MIN_GIB_SMALL, MIN_GIB_LARGE = 3.5, 64  # for two ranks of preset small; of a GPU, for all large
MAX_RANKS = 4  # the scripts are tested with up to 6


def examine(root: Path, *, no_setup: bool) -> Iterator[Finding]:
    """Yield the findings in the order in which one depends on another."""
    yield look_at_python()
    if not no_setup:
        yield look_at_set_up(root)
    yield from look_at_machine(root)
    yield from look_at_pins(root)
    yield look_at_course(root)
    yield look_at_datasets_name()
    yield from look_at_torch()
    if "torch" in sys.modules:
        yield look_at_names()
    yield from look_at_compiler()
    yield look_at_deepspeed()
    yield look_at_kernel()
    yield from look_at_variables(root)


def look_at_python() -> Finding:
    """Return which interpreter runs this."""
    found = f"{platform.python_version()}, {sys.executable}"
    return Finding("Python", GOOD, found)


def look_at_set_up(root: Path) -> Finding:
    """Return whether .venv is ready."""
    try:
        need = find_need(root)
    except SetupFailed as error:
        return Finding("set-up", MISSING, str(error))
    if need is None:
        return Finding("set-up", GOOD, ".venv is ready")
    return Finding("set-up", MISSING, need.reason, "./run_all.sh setup")


def look_at_machine(root: Path) -> Iterator[Finding]:
    """Yield findings on cores, memory, shared memory and disk."""
    cores = num_cores()
    advice = "" if cores > 1 else "two ranks will share one core: right, but slow"
    yield Finding("cores", NOTE if advice else GOOD, f"{cores}, {processor_name()}", advice)
    memory = memory_gib()
    advice = (
        ""
        if memory > MIN_GIB_SMALL
        else "4 GiB are comfortable for two ranks: close other programs"
    )
    yield Finding("memory", NOTE if advice else GOOD, f"{memory:.1f} GiB", advice)
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total / GIB
        advice = "" if size > 0.2 else "in a container: start it with --shm-size=1g or --ipc=host"
        yield Finding("/dev/shm", NOTE if advice else GOOD, f"{size:.2f} GiB", advice)
    free = shutil.disk_usage(root).free / GIB
    advice = "" if free > NUM_MIN_GIB_DISK else "set-up takes 2 GiB, with CUDA's libraries 8 GiB"
    yield Finding("disk", NOTE if advice else GOOD, f"{free:.0f} GiB free", advice)


def look_at_pins(root: Path) -> Iterator[Finding]:
    """Yield whether what is installed is what is pinned; DeepSpeed has a finding of its own."""
    with open(root / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    needed = [pin for pin in project["dependencies"] if not pin.startswith("deepspeed==")]
    missing, other = compare_pins(needed)
    by_name = f"pip install {' '.join(missing)}"  # "-e ." alone would replace a GPU machine's torch
    advice = f"./run_all.sh setup, or in an environment of your own: {by_name}"
    if missing:
        yield Finding("packages", MISSING, f"not installed: {', '.join(missing)}", advice)
    if other:
        advice = "figures in the text may differ a little"
        yield Finding("packages", NOTE, ", ".join(other), advice)
    if not missing and not other:
        yield Finding("packages", GOOD, "as pinned in pyproject.toml")
    missing, other = compare_pins(project["optional-dependencies"]["dev"])
    if missing or other:
        advice = "needed by ./run_all.sh test and to change the course; lessons run without them"
        found = [f"{package} (not installed)" for package in missing] + other
        yield Finding("dev packages", NOTE, ", ".join(found), advice)


def compare_pins(requirements: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the requirements that are not installed, and texts on those in another version."""
    missing, other = [], []
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
            continue
        if installed.split("+")[0] != version:  # 2.13.0+cpu is 2.13.0
            other.append(f"{name} {installed} (pinned: {version})")
    return missing, other


def look_at_course(root: Path) -> Finding:
    """Return whether scripts and notebooks, which start elsewhere, import shared/ from here."""
    found = installed_course(Path(sys.executable))
    advice = "python -m pip install --no-deps -e ."
    if found is None:
        return Finding("course", MISSING, "not installed in this environment", advice)
    if found != root:
        return Finding("course", MISSING, f"another copy is installed: {found}", advice)
    return Finding("course", GOOD, "installed from this folder")


def look_at_datasets_name() -> Finding:
    """Return whether our folder datasets/ hides the Hugging Face package of the same name."""
    spec = importlib.util.find_spec("datasets")
    if spec is None or spec.origin is None:
        found = "the package datasets is not installed"
        return Finding("datasets", MISSING, found, "./run_all.sh setup (needed by lesson 04)")
    if "site-packages" not in spec.origin and "dist-packages" not in spec.origin:
        return Finding("datasets", MISSING, f"is {spec.origin}", "unset PYTHONPATH")
    return Finding("datasets", GOOD, "is the Hugging Face package")


def look_at_kernel() -> Finding:
    """Return whether `python3`, the notebooks' kernel, is this environment's Python."""
    try:
        kernels = importlib.import_module("jupyter_client.kernelspec")
        spec = kernels.KernelSpecManager().get_kernel_spec("python3")
    except ImportError:
        return Finding("Jupyter", MISSING, "not installed", "./run_all.sh setup")
    except Exception as error:  # NoSuchKernel lives in the module that may be absent
        return Finding("Jupyter", MISSING, str(error), "python -m ipykernel install --sys-prefix")
    python = spec.argv[0]
    if Path(python).is_absolute() and Path(python).parent != Path(sys.executable).parent:
        advice = "python -m ipykernel install --sys-prefix, with this environment's python"
        return Finding("Jupyter", NOTE, f"kernel python3 is {python}", advice)
    return Finding("Jupyter", GOOD, "kernel python3 is this environment's Python")


def look_at_variables(root: Path) -> Iterator[Finding]:
    """Yield findings on variables of the shell that change what the course does."""
    if os.environ.get("TORCH_HANDLE_IMPLEMENTATION"):
        advice = "unset it: with it, notebooks run the solutions in place of your answers"
        yield Finding("environment", NOTE, "TORCH_HANDLE_IMPLEMENTATION is set", advice)
    folders = [Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(":") if p]
    if root in folders:
        advice = "unset it: datasets/ could hide the package of that name"
        yield Finding("environment", NOTE, "PYTHONPATH names this folder", advice)


def show(findings: Iterable[Finding]) -> int:
    """Print the findings as they come; return 1 if something needed is missing, else 0."""
    width = max(shutil.get_terminal_size().columns, 60)
    missing = []
    for finding in findings:
        head = f"{finding.name:<12} {finding.state:<8} "
        indent = " " * len(head)
        print(textwrap.fill(head + finding.found, width, subsequent_indent=indent), flush=True)
        if finding.advice:
            text = f"{indent}-> {finding.advice}"
            print(textwrap.fill(text, width, subsequent_indent=indent + "   "), flush=True)
        if finding.state == MISSING:
            missing.append(finding.name)
    print("\nwhen something fails: lessons/when_something_does_not_work.md")
    print(f"needed and missing: {', '.join(missing) or 'nothing'}")
    return 1 if missing else 0


def what_to_type(gpus: Sequence[float], memory: float, *, no_setup: bool) -> list[tuple[str, str]]:
    """Return the commands to begin with on a machine with these GiB, of each GPU and of its own."""
    run = "./run_all.sh --no-setup" if no_setup else "./run_all.sh"
    size = "" if not gpus or min(gpus) >= MIN_GIB_LARGE else " --preset small"
    on_cpu = " --preset tiny" if memory < MIN_GIB_SMALL else ""
    folder = "" if no_setup else ".venv/bin/"
    ranks = min(len(gpus), MAX_RANKS)
    found = [(f"{run} --nproc {ranks}{size}", f"the scripts, {ranks} GPU(s)")] if gpus else []
    if ranks > 1:
        launch = f"{folder}torchrun --nproc_per_node=gpu lessons/lesson04_training/train.py"
        found.append((launch + size, "one script on all GPUs"))
    else:
        of, what = (" --device cpu", "the scripts") if gpus else (" 01", "one script")
        found.append((run + of + on_cpu, f"{what}, two ranks on the CPU"))
    what = "the lessons, the first in lessons/lesson01_*: their ranks are on the CPU, always"
    return [*found, (f"{folder}jupyter lab", what)]


def main() -> int:
    """Show the findings, and where nothing is missing what to type; return the exit status."""
    no_setup = "--no-setup" in sys.argv[1:]
    status = show(examine(ROOT, no_setup=no_setup))
    if status == 0:
        print("to begin with, on this machine:")
        for command, what in what_to_type(gpu_gib(), memory_gib(), no_setup=no_setup):
            print(f"  {command}   # {what}")
    return status


if __name__ == "__main__":
    sys.exit(main())
