"""What ./run_all.sh does: understand its arguments, set up, and start the program that is meant.

Only the standard library is used here: this runs before anything is installed.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from shared.cli.machine import num_cores
from shared.cli.setup import (
    SetupFailed,
    check_active,
    ensure_book,
    ensure_environment,
    environment_python,
)
from shared.ranks.processes import raise_on_stop_signals, supervise

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130  # what a shell reports after Ctrl-C

USAGE = """\
usage: ./run_all.sh [NN ...]              run the lessons' scripts: all, or those named
       ./run_all.sh todo [NN ...]         which exercises of your notebooks are right, wrong, open
       ./run_all.sh answers FROM          carry your answers over an update of the course; FROM is
                                          a notebook, a folder, a revision of git; --dry-run
       ./run_all.sh test [ARGUMENT ...]   test the course, or what pytest's arguments name
       ./run_all.sh notebooks [NN ...]    execute notebooks again, store their outputs; --no-write,
                                          --mode reading (exercises stay open)
       ./run_all.sh book [--serve]        the lessons as a web site; --port N for --serve (8000)
       ./run_all.sh doctor                what this machine has, lacks, and what to do
       ./run_all.sh setup                 make or mend .venv, and stop

  --no-setup        use the active environment as it is
scripts:
  --nproc N         ranks per lesson (2)
  --jobs N          lessons at once (1); one whose headline is a time runs alone, at the end
  --preset NAME     tiny, small or large (default: by the device)
  --device NAME     cpu or cuda (default: by the machine)
  --time-limit S    seconds after which a lesson is stopped (900)
  --out DIR         where results, logs and the report go (runs)
todo:
  --watch           judge a lesson again whenever its notebook is saved
  --details, -v     below each wrong answer, all that the check says
  --time-limit S    seconds after which an exercise is stopped (60)
test:
  --all             everything, long tests and all known mistakes too; what a path names is whole
  --changed [REV]   what a change since the last commit, or since REV, can have broken
  --slowest         in the end, the slowest tests, and the seconds by folder
"""
MODULES = {
    "run": "shared.cli.runner",
    "todo": "shared.cli.todo",
    "answers": "shared.cli.answers",
    "notebooks": "shared.cli.notebooks",
    "doctor": "shared.cli.doctor",
    "book": "shared.book.build",
}
ACTIONS = (*MODULES, "test", "setup")


@dataclass(frozen=True)
class Command:
    """One call of run_all.sh: the action, and the arguments for the program that does it."""

    action: str
    no_setup: bool = False
    arguments: list[str] = field(default_factory=list)


class UsageError(ValueError):
    """Arguments that the command does not know."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(arguments: list[str], root: Path = ROOT) -> Command:
    """Return what the arguments of ./run_all.sh ask for; UsageError says which one is wrong."""
    no_setup = "--no-setup" in arguments
    rest = [word for word in arguments if word != "--no-setup"]
    action = rest.pop(0) if rest and rest[0] in ACTIONS else "run"
    if action == "setup" and no_setup:
        raise UsageError("setup and --no-setup contradict each other")
    if action in ("test", "book"):  # pytest and the book's builder know their own words
        return Command(action, no_setup, rest)
    if action in ("doctor", "setup"):
        if rest:
            raise UsageError(f"{action} takes no further argument, got {' '.join(rest)}")
        return Command(action, no_setup, ["--no-setup"] * no_setup)
    found = vars(_parser(action).parse_args(rest))
    for name in ("nproc", "jobs", "time_limit"):
        if name in found and not found[name] > 0:  # nor is NaN
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, got {found[name]:g}")
    if action == "answers":
        words = [found.pop("place")]
    else:
        words = [find_lesson(name, root) for name in found.pop("lessons")]
    return Command(action, no_setup, [*words, *_as_options(found)])


def _parser(action: str) -> argparse.ArgumentParser:
    """Return the parser for the lessons and options of an action."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    if action == "answers":
        parser.add_argument("place", metavar="FROM")
        parser.add_argument("--dry-run", action="store_true")
        return parser
    parser.add_argument("lessons", nargs="*")
    if action == "run":
        parser.add_argument("--nproc", type=int, default=2)
        parser.add_argument("--jobs", type=int, default=1)
        parser.add_argument("--preset", choices=("tiny", "small", "large"))
        parser.add_argument("--device", choices=("cpu", "cuda"))
        parser.add_argument("--time-limit", type=float, default=900.0)
        parser.add_argument("--out", type=Path)
    if action == "notebooks":
        parser.add_argument("--mode", choices=("solution", "reading", "strict"))
        parser.add_argument("--no-write", action="store_true")
        parser.add_argument("--no-run", action="store_true")
    if action == "todo":
        parser.add_argument("--watch", action="store_true")
        parser.add_argument("-v", "--details", action="store_true")
        parser.add_argument("--time-limit", type=float, default=60.0)
    return parser


def _as_options(found: Mapping[str, Any]) -> list[str]:
    """Return parsed options as arguments again; those that were not given are left out."""
    options = []
    for name, value in found.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif value is not None and value is not False:
            options.append(f"{option}={value}")
    return options


def all_lessons(root: Path = ROOT) -> list[str]:
    """Return the folders of lessons/ in order: ["lesson01_positional_encoding", ...]."""
    folders = (root / "lessons").glob("lesson[0-9][0-9]_*/")
    return sorted(folder.name for folder in folders if folder.is_dir())


def find_lesson(name: str, root: Path = ROOT) -> str:
    """Return the folder for "02", "2", "lesson02" or its own name; UsageError if there is none."""
    folders = {folder.removeprefix("lesson")[:2]: folder for folder in all_lessons(root)}
    for number, folder in folders.items():
        given = name.removeprefix("lesson")
        if name == folder or (given.isdecimal() and int(given) == int(number)):
            return folder
    numbers = " ".join(folders) or "none yet"
    raise UsageError(f"unknown word {name!r}: neither a command nor a lesson (lessons: {numbers})")


def main() -> int:
    """Return the exit status; does not return where another program takes this one's place."""
    arguments = sys.argv[1:]
    first = next((word for word in arguments if word != "--no-setup"), "")
    if first in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    try:
        command = parse(arguments)
    except UsageError as error:
        print(f"run_all.sh: {error} (all words: ./run_all.sh --help)", file=sys.stderr)
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
    """Set up where that is wanted, do what the command asks for, and return the exit status."""
    if command.no_setup:
        python = Path(sys.executable)
        if command.action != "doctor":
            check_active(python)
    elif command.action == "doctor":  # must also work where set-up does not
        python = environment_python(ROOT) or Path(sys.executable)
    else:
        python = ensure_environment(ROOT, python_named=bool(os.environ.get("PYTHON")))
        if command.action == "book":
            ensure_book(ROOT)
    if command.action == "setup":
        print(f"ready: {python.parent.parent.relative_to(ROOT)}")
        return 0
    if command.action == "test":
        return run_tests(python, command.arguments)
    program = [str(python), "-m", MODULES[command.action], *command.arguments]
    if command.action in ("run", "todo"):  # they end what they started by themselves
        os.execv(python, program)
    return supervise(program).status


def run_tests(python: Path, arguments: list[str]) -> int:
    """Run tests and notebooks under pytest, one process more than cores; return its exit status.

    The one more computes while another waits for its ranks; from eight on, memory is the limit.
    Every exercise is solved by its reference. In a course that was given without solutions/ the
    notebooks are tested with the learner's own answers. What is marked `full` is left out, unless
    --all or a path asks for it. --changed selects by itself, and then becomes pytest.
    """
    revision, arguments = _split_changed(arguments)
    has_path = any((ROOT / word.split("::")[0]).exists() for word in arguments)
    what = [] if has_path or revision else ["tests", "lessons"]
    processes = str(min(8, num_cores() + 1))
    program = ["shared.cli.changed", revision] if revision else ["pytest"]
    command = [str(python), "-m", *program, "--nbval", "-n", processes, "--dist", "loadscope"]
    command += ["-p", "shared.cli.proven"]
    if not has_path and "--all" not in arguments:
        command.append("--short")
    arguments = ["--durations=25" if word == "--slowest" else word for word in arguments]
    arguments = [word for word in arguments if word != "--all"]
    # Once is enough where no output is compared: see repetitions() in shared/measuring/timing.py.
    env = {"OMP_NUM_THREADS": "1", "TORCH_HANDLE_QUICK": "1", **os.environ}
    env["CUDA_VISIBLE_DEVICES"] = ""  # see shared/ranks/visible.py; a class has no conftest.py
    if (ROOT / "solutions").is_dir():
        env["TORCH_HANDLE_IMPLEMENTATION"] = "solution"
    else:
        print(
            "Your own answers are tested: notebook cells that fail are what is left to do"
            " (./run_all.sh todo lists it by exercise).",
            flush=True,
        )
    return supervise([*command, *what, *arguments], env=env, grace=10.0).status


def _split_changed(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the revision that --changed names (HEAD; "" without the word), and the other words."""
    if "--changed" not in arguments:
        return "", arguments
    place = arguments.index("--changed")
    revision = arguments[place + 1 : place + 2]
    if not revision or revision[0].startswith("-"):
        return "HEAD", arguments[:place] + arguments[place + 1 :]
    return revision[0], arguments[:place] + arguments[place + 2 :]


if __name__ == "__main__":
    sys.exit(main())
