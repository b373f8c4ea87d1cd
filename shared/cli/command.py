"""The words after ./run_all.sh: understand them, set up, and hand over.

Only the standard library is used here: this runs before anything is installed.
"""

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from shared.cli.setup import SetupFailed, check_active, ensure_environment, environment_python
from shared.ranks.processes import raise_on_stop_signals, supervise

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130  # what a shell reports after Ctrl-C

USAGE = """\
usage: ./run_all.sh [NN ...]              run the lessons' scripts: all, or those named
       ./run_all.sh test [ARGUMENT ...]   test everything, or what pytest's arguments name
       ./run_all.sh notebooks [NN ...]    execute notebooks again and store their outputs
       ./run_all.sh doctor                what this machine has, lacks, and what to do
       ./run_all.sh setup                 make or mend .venv, and stop

  --no-setup        use the active environment as it is
  --nproc N         ranks per lesson (2)
  --preset NAME     tiny, small or large (default: by the device)
  --device NAME     cpu or cuda (default: by the machine)
  --time-limit S    seconds after which a lesson is stopped (900)
"""
WORDS = ("run", "test", "notebooks", "doctor", "setup")


@dataclass(frozen=True)
class Command:
    """One call of run_all.sh, understood."""

    word: str
    no_setup: bool = False
    lessons: list[str] = field(default_factory=list)
    nproc: int = 2
    preset: str | None = None
    device: str | None = None
    time_limit: float = 900.0
    pytest_arguments: list[str] = field(default_factory=list)


class UsageError(ValueError):
    """Words that the command does not know."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(words: list[str], root: Path = ROOT) -> Command:
    """Read the words after ./run_all.sh; UsageError says which one is wrong."""
    no_setup = "--no-setup" in words
    words = [word for word in words if word != "--no-setup"]
    if words and words[0] == "test":
        return Command("test", no_setup, pytest_arguments=words[1:])
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--preset", choices=("tiny", "small", "large"))
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--time-limit", type=float, default=900.0)
    found = parser.parse_args(words)
    word, names = "run", found.names
    if names and names[0] in WORDS:
        word, names = names[0], names[1:]
    if word in ("doctor", "setup") and names:
        raise UsageError(f"{word} takes no further word, got {' '.join(names)}")
    if word == "setup" and no_setup:
        raise UsageError("setup and --no-setup contradict each other")
    if word != "run" and any(option.startswith("--") for option in words):
        raise UsageError(f"{word} takes no options")
    if found.nproc < 1:
        raise UsageError(f"--nproc must be 1 or more, got {found.nproc}")
    if found.time_limit <= 0:
        raise UsageError(f"--time-limit must be above 0, got {found.time_limit:g}")
    lessons = [find_lesson(name, root) for name in names]
    return Command(
        word, no_setup, lessons, found.nproc, found.preset, found.device, found.time_limit
    )


def all_lessons(root: Path = ROOT) -> list[str]:
    """The folders of lessons/ in order: ["01_positional_encoding", ...]."""
    folders = (root / "lessons").glob("[0-9][0-9]_*/")
    return sorted(folder.name for folder in folders if folder.is_dir())


def find_lesson(name: str, root: Path = ROOT) -> str:
    """The lesson's folder for "02", "2" or "02_attention"."""
    folders = all_lessons(root)
    for folder in folders:
        if name == folder or (name.isdecimal() and int(name) == int(folder[:2])):
            return folder
    numbers = " ".join(folder[:2] for folder in folders) or "none yet"
    raise UsageError(f"unknown word {name!r}: neither a command nor a lesson (lessons: {numbers})")


def main() -> int:
    """Return the exit status; does not return where another program takes this one's place."""
    words = sys.argv[1:]
    if any(word in ("-h", "--help", "help") for word in words[:1]):
        print(USAGE, end="")
        return 0
    try:
        command = parse(words)
    except UsageError as error:
        print(f"run_all.sh: {error}\n{USAGE}", end="", file=sys.stderr)
        return 2
    raise_on_stop_signals()
    try:
        return carry_out(command)
    except SetupFailed as error:
        print(f"run_all.sh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nrun_all.sh: stopped; no process was left behind", file=sys.stderr)
        return INTERRUPTED


def carry_out(command: Command) -> int:
    """Set up if asked to, then do what the word says."""
    if command.no_setup:
        python = Path(sys.executable)
        if command.word != "doctor":
            check_active(python)
    elif command.word == "doctor":  # must also work where set-up does not
        python = environment_python(ROOT) or Path(sys.executable)
    else:
        python = ensure_environment(ROOT, python_named=bool(os.environ.get("PYTHON")))
    if command.word == "setup":
        print(f"ready: {python.parent.parent.relative_to(ROOT)}")
        return 0
    if command.word == "test":
        return run_tests(python, command.pytest_arguments)
    if command.word == "notebooks":
        arguments = [lesson[:2] for lesson in command.lessons]
        return supervise([str(python), "-m", "shared.cli.notebooks", *arguments]).status
    if command.word == "doctor":
        arguments = ["--no-setup"] if command.no_setup else []
        return supervise([str(python), "-m", "shared.cli.doctor", *arguments]).status
    os.execv(python, [str(python), "-m", "shared.cli.runner", *runner_arguments(command)])


def runner_arguments(command: Command) -> list[str]:
    """What shared/cli/runner.py is told."""
    arguments = [*command.lessons, f"--nproc={command.nproc}"]
    arguments.append(f"--time-limit={command.time_limit:g}")
    if command.preset:
        arguments.append(f"--preset={command.preset}")
    if command.device:
        arguments.append(f"--device={command.device}")
    return arguments


def run_tests(python: Path, arguments: list[str]) -> int:
    """Tests and notebooks under pytest on two processes, every exercise solved by its reference.

    In a course that was given without solutions/ the notebooks are the learner's to-do list.
    """
    has_path = any((ROOT / word.split("::")[0]).exists() for word in arguments)
    what = [] if has_path else ["tests", "lessons"]
    command = [str(python), "-m", "pytest", "--nbval", "-n", "2", "--dist", "loadscope"]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    if (ROOT / "solutions").is_dir():
        env["TORCH_HANDLE_IMPLEMENTATION"] = "solution"
    else:
        print(
            "Your own answers are tested: notebook cells that fail are what is left to do.",
            flush=True,
        )
    return supervise([*command, *what, *arguments], env=env, grace=10.0).status


if __name__ == "__main__":
    sys.exit(main())
