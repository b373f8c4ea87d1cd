"""Which build of torch set-up takes, before pip brings the rest.

On Linux pip's ordinary torch brings CUDA along: gigabytes that a machine without an NVIDIA GPU
never uses. uv knows PyTorch's own index of CPU builds by name, and is asked for it.
"""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.cli.machine import has_nvidia

VARIABLE = "TORCH_INDEX_URL"
# Of an index, in `pip config list`: from its files, or from variables (":env:").
PIP_IS_TOLD = r"^(?:global|install|:env:)\.((?:extra-)?index-url|no-index|find-links)='.+'$"
UV = "uv==0.13.9"  # used here alone, before there is anything of pyproject.toml


@dataclass(frozen=True)
class Build:
    """What is said of a build, and what installs it: nothing where it is pip's ordinary one."""

    says: str = ""
    commands: tuple[list[str], ...] = ()
    asked_for: bool = False


def choose_build(
    python: Path, constraints: Path, env: Mapping[str, str], system: str = sys.platform
) -> Build:
    """The build for this machine, or from where TORCH_INDEX_URL says; "" means pip's ordinary."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    (pin,) = (line for line in lines if line.startswith("torch=="))
    pip = pip_install(python)
    if url := env.get(VARIABLE):
        says = f"torch from {VARIABLE}"
        return Build(says, ([*pip, "--no-deps", "--index-url", url, pin],), asked_for=True)
    if url is not None or system != "linux":
        return Build()
    if has_nvidia():
        return Build("torch with CUDA: there is an NVIDIA driver here")
    if _has_cuda(python):
        return Build("torch with CUDA, as .venv has it")
    if told := _pip_is_told(python, env):
        return Build(f"torch as pip finds it, by its {told}")
    uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python), "--system-certs"]
    return Build(
        f"torch for the CPU alone: there is no NVIDIA driver here ({VARIABLE}= takes pip's own,"
        f" with CUDA; {VARIABLE}=ADDRESS another index's)",
        ([*pip, UV], [*uv, "--no-deps", "--torch-backend", "cpu", pin]),
    )


def pip_install(python: Path) -> list[str]:
    """The command to which the names of packages are added."""
    return [str(python), "-m", "pip", "install", "--disable-pip-version-check"]


def _has_cuda(python: Path) -> bool:
    """Whether the environment has a torch with CUDA: somebody's choice, for machines elsewhere."""
    code = "import sys, torch; sys.exit(torch.version.cuda is None)"
    return (
        subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0
    )


def _pip_is_told(python: Path, env: Mapping[str, str]) -> str:
    """The setting by which pip asks elsewhere than at PyPI alone; "" where there is none."""
    command = [str(python), "-m", "pip", "config", "list"]
    done = subprocess.run(command, env={**env}, capture_output=True, text=True, check=False)
    found = re.search(PIP_IS_TOLD, done.stdout, re.MULTILINE)
    return found[1] if found else ""
