"""Threads of gloo at the end of a program: what a test runs in place of a script to count them.

While Python ends, a thread of gloo that wants its lock is an abort. They are counted at the very
end of `atexit`, so that the tests wait for no rare abort.
"""

import argparse
import runpy
import sys
from pathlib import Path

import pytest

TELLS = """
import atexit, contextlib, os
from pathlib import Path

def tell_threads(of=""):
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ends just now
            names.append(file.read_text())
    who = of or os.environ.get("RANK", "alone")
    Path(os.environ["THREADS"], who).write_text("".join(names))

atexit.register(tell_threads)  # before anything else registers: called after all
"""
RUNS = """
import gc, runpy, sys
gc.unfreeze()  # a cold interpreter has nothing frozen: caches of what is are not found
script = sys.argv[0] = {script!r}
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
"""


def telling(script: Path, folder: Path) -> Path:
    """Write a program into `folder` that runs this script and tells its threads; return it."""
    program = folder / script.name  # which errors name
    program.write_text(TELLS + RUNS.format(script=str(script)))
    return program


def told_in(folder: Path) -> dict[str, set[str]]:
    """What was told in this folder since the last call: who -> names of its threads at its end."""
    found = {file.name: set(file.read_text().split()) for file in folder.iterdir()}
    for name in found:
        (folder / name).unlink()
    return found


def expect_no_gloo(told: dict[str, set[str]], *who: str) -> None:
    """Expect that these programs, or ranks, told their threads, and none is gloo's."""
    assert sorted(told) == sorted(who)
    assert not [f"{each}: {names}" for each, names in told.items() if "gloo" in " ".join(names)]


def engines_of(script: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The choices of the script's --engine as its parser has them; [""] without one."""
    found: list[str] = []

    def parsed(parser: argparse.ArgumentParser, *_: object) -> None:
        actions = [each for each in parser._actions if each.dest == "engine"]
        found.extend(actions[0].choices or () if actions else [""])
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    return found
