"""Make .venv or mend it, before ./run_all.sh does anything else.

A stamp inside .venv is written last, so an interrupted set-up is one without a stamp. It holds what
the environment was made from; whatever differs is set up again. Only the standard library is used.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.cli.machine import moves
from shared.cli.torch_build import VARIABLE, choose_build, pip_install
from shared.ranks.logs import last_words
from shared.ranks.processes import supervise

STAMP = "torch-handle.json"
CONSTRAINTS = "shared/cli/constraints.txt"  # what the pinned packages bring, pinned as well
SAYS_EVERY = 10.0  # seconds, where there is no terminal
NUM_LOG_LINES = 15
# What pip removes: its last words for the minutes in which it copies what it installs.
_ASIDE = re.compile(r"^ *(?:Attempting un|Found existing|Uninstalling|Successfully un).*\n?", re.M)


class SetupFailed(RuntimeError):
    """Set-up cannot continue; the message says why and what to do."""


@dataclass(frozen=True)
class Need:
    """What stands between .venv and a ready environment."""

    reason: str
    from_scratch: bool


def ensure_environment(root: Path, *, python_named: bool = False) -> Path:
    """Return the interpreter of a ready .venv, setting it up first where needed.

    `python_named`: the user chose this interpreter (PYTHON=...), so a .venv made from another
    version of Python is replaced. SetupFailed with the log's last lines if it does not work out.
    """
    if find_need(root, python_named=python_named) is None:
        return _interpreter(root)
    with _one_at_a_time(root):
        need = find_need(root, python_named=python_named)  # another set-up may have been faster
        if need is None:
            return _interpreter(root)
        print(f"set-up: {need.reason}", flush=True)
        began = time.monotonic()
        # What was asked for once holds until .venv is removed, where nothing else is said.
        said = _stored(root) | {**os.environ}
        asked = {key: value for key, value in said.items() if key == VARIABLE}
        _install(root, need.from_scratch, asked)
        if not _imports_torch(root):
            print("set-up: torch cannot be imported; starting again from an empty .venv")
            _install(root, from_scratch=True, asked=asked)
            if not _imports_torch(root):
                raise SetupFailed(f"torch cannot be imported after set-up\n{_tail(_log(root))}")
        _stamp_file(root).write_text(json.dumps(_stamp(root) | asked), encoding="utf-8")
        print(f"set-up: done in {time.monotonic() - began:.0f} s", flush=True)
    return _interpreter(root)


def ensure_book(root: Path) -> None:
    """Install what the book is built with into .venv, where it is not there: few take it along."""
    if _finds(_interpreter(root), "sphinx_book_theme"):
        return
    with _one_at_a_time(root):
        _step(root, "installing what builds the book", _pip(root, ".[book]"), _PIP_ADVICE)


def environment_python(root: Path) -> Path | None:
    """Return the interpreter of .venv if it runs, set up or not."""
    return _interpreter(root) if _version_of(_interpreter(root)) else None


def check_active(python: Path) -> None:
    """Raise SetupFailed where an environment of the user's own cannot import torch or the course.

    The message names the command that helps.
    """
    if installed_course(python) is None:
        raise SetupFailed(
            f"{python} does not know the course: python -m pip install --no-deps -e ."
            " (./run_all.sh doctor --no-setup says what else it lacks)"
        )
    if not _finds(python, "torch"):
        raise SetupFailed(
            f"{python} has no torch: activate the environment that has, or leave --no-setup out"
        )


def installed_course(python: Path) -> Path | None:
    """Return where `python` imports shared/ from when it is started elsewhere; None: nowhere."""
    spec = "importlib.util.find_spec('shared.cli.setup')"
    code = f"import importlib.util; print({spec}.origin)"
    done = subprocess.run(
        [python, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    return Path(done.stdout.strip()).parents[2] if done.returncode == 0 else None


def find_need(root: Path, *, python_named: bool = False) -> Need | None:
    """Return what .venv lacks; None when it is ready."""
    folder = root / ".venv"
    ours = _version_text(sys.version_info[:2])
    if not folder.exists():
        return Need(f"making .venv with Python {ours} (about 5 minutes, once)", True)
    if not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise SetupFailed(
            f"{folder} is there and is not a virtual environment: move it away and run this again"
        )
    version = _version_of(_interpreter(root))
    if version is None:
        return Need("the interpreter in .venv does not run: making .venv anew", True)
    if version < (3, 11):
        return Need(f".venv has Python {_version_text(version)}: making it anew", True)
    if python_named and version != sys.version_info[:2]:
        theirs = _version_text(version)
        return Need(f".venv has Python {theirs}, PYTHON names {ours}: making it anew", True)
    if not (stamp := _stored(root)):
        return Need(".venv is unfinished: completing it", False)
    if stamp | _stamp(root) == stamp:
        return None
    if stamp.get("root") != str(root):
        return Need("the folder was moved or copied: making .venv anew", True)
    if stamp.get("python") != _version_text(version):
        return Need("the Python behind .venv was replaced: making .venv anew", True)
    return Need("the pinned packages changed since the last set-up: installing again", False)


def _install(root: Path, from_scratch: bool, asked: Mapping[str, str]) -> None:
    """Run venv and pip; everything they say goes to runs/setup.log."""
    folder = root / ".venv"
    # From inside .venv this is the Python that it was made from, which survives .venv's removal.
    base = getattr(sys, "_base_executable", None) or sys.executable
    _stamp_file(root).unlink(missing_ok=True)  # unfinished from here until the new stamp
    if from_scratch or not _has_pip(root):
        if folder.exists():
            shutil.rmtree(folder)
        _step(root, "making .venv", [base, "-m", "venv", str(folder)], _VENV_ADVICE)
    _take_torch(root, {**os.environ, **asked})
    _step(root, "installing the pinned packages", _pip(root, ".[dev]"), _PIP_ADVICE)
    enable_saving(folder)


def _take_torch(root: Path, env: Mapping[str, str]) -> None:
    """Install the build of torch for this machine, where it is another than pip's ordinary one."""
    build = choose_build(_interpreter(root), root / CONSTRAINTS, env)
    if build.says:
        print(f"set-up: {build.says}", flush=True)
    try:
        for command in build.commands:
            _step(root, "installing torch", command, _PIP_ADVICE)
    except SetupFailed:
        if build.asked_for:
            raise
        why = _tail(_log(root), 1).strip()  # which the next step's log replaces
        print(f"set-up: that cannot be had from here ({why}): pip's own, with CUDA", flush=True)


def enable_saving(venv: Path) -> None:
    """Ask Jupyter's server for what saving.py has, as `jupyter server extension enable` does."""
    asked = venv / "etc" / "jupyter" / "jupyter_server_config.d" / "torch_handle.json"
    asked.parent.mkdir(parents=True, exist_ok=True)
    asked.write_text('{"ServerApp": {"jpserver_extensions": {"shared.cli.saving": true}}}\n')


def _pip(root: Path, what: str) -> list[str]:
    return [*pip_install(_interpreter(root)), "-c", CONSTRAINTS, "-e", what]


_VENV_ADVICE = (
    "This Python cannot make environments. On Debian and Ubuntu: apt install python3-venv;"
    " or name another one: PYTHON=/path/to/python3.12 ./run_all.sh"
)
_PIP_ADVICE = (
    "Usual causes: no network, a full disk, a Python without builds of the pinned torch."
    " Nothing is lost: run it again and it continues from here. In an environment of your own,"
    " use ./run_all.sh --no-setup"
)


def _step(root: Path, what: str, command: list[str], advice: str) -> None:
    log = _log(root)
    on_terminal, said = moves(), 0.0

    def show(seconds: float) -> None:
        nonlocal said
        if not on_terminal and seconds - said < SAYS_EVERY:
            return
        line = f"  {what}, {seconds:.0f} s: {_tail(log, 1).strip()}"
        line = line[: shutil.get_terminal_size().columns - 1]
        if on_terminal:
            print(f"\r\033[K{line}", end="", flush=True)
        else:
            print(line, flush=True)
            said = seconds

    if not on_terminal:
        print(f"  {what}", flush=True)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    outcome = supervise(command, env=env, log=log, tick=show)
    if on_terminal:
        print(f"\r\033[K  {what}: {outcome.seconds:.0f} s", flush=True)
    if outcome.status != 0:
        raise SetupFailed(f"{what} failed. The last lines of {log}:\n{_tail(log)}\n{advice}")


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Generator[None]:
    """Hold a lock: of two set-ups in two terminals the second waits and finds it done."""
    try:
        (root / "runs").mkdir(exist_ok=True)
        lock = (root / "runs" / "setup.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise SetupFailed(
            f"{root} cannot be written ({error.strerror}): copy the course to a folder of your own,"
            " or use an environment that is there: --no-setup, with --out DIR for what comes out"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _interpreter(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


def _stamp_file(root: Path) -> Path:
    return root / ".venv" / STAMP


def _stored(root: Path) -> dict[str, str]:
    """The stamp of the last set-up; empty where that is unfinished."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(_stamp_file(root).read_text(encoding="utf-8")))
    return {}


def _log(root: Path) -> Path:
    return root / "runs" / "setup.log"


def _stamp(root: Path) -> dict[str, str]:
    version = _version_of(_interpreter(root))
    pins = b"".join((root / file).read_bytes() for file in ("pyproject.toml", CONSTRAINTS))
    return {
        "pins": hashlib.sha256(pins).hexdigest(),
        "python": _version_text(version) if version else "",
        "root": str(root),
    }


def _version_of(python: Path) -> tuple[int, int] | None:
    """Return the version as (3, 11); None if the interpreter does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        major, minor = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return major, minor


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _has_pip(root: Path) -> bool:
    command = [str(_interpreter(root)), "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _imports_torch(root: Path) -> bool:
    """Return whether torch can be imported: pip takes a half unpacked one for installed."""
    with open(_log(root), "a", encoding="utf-8") as log:
        command = [str(_interpreter(root)), "-c", "import torch"]
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0


def _finds(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)"
    return subprocess.run([python, "-c", code], cwd="/", check=False).returncode == 0


def _tail(log: Path, num_lines: int = NUM_LOG_LINES) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "\n".join(f"  {line}" for line in last_words(_ASIDE.sub("", text), num_lines))
