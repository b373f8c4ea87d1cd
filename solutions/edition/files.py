"""Which files of the course a class gets, and how they are written into a folder."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import nbformat

from shared.errors import InputError
from solutions.edition.pages import CONTRIBUTING, change_page, change_prose, change_pyproject

ROOT = Path(__file__).resolve().parents[2]
TOP = ("lessons", "shared", "datasets", "tests", "run_all.sh", "environment.yml", "README.md")
TOP += ("pyproject.toml", "LICENSE", "CONTRIBUTING.md", "AGENTS.md", ".gitignore")
# Of the tests, those of what stays, and of the pages: the others need answers or are about them.
KEPT_TESTS = ("tests/benchmarks/*", "tests/data/*", "tests/model/*", "tests/training/*")
KEPT_TESTS += ("tests/frame/test_links.py", "tests/frame/test_datasets_name.py")
# The first tries the checks on references and mistakes, the second runs lesson 04's script, the
# third repeats tests that a class does not get.
LEFT_OUT = ("shared/exercises/mistakes.py", "tests/data/test_bad_input_cli.py")
LEFT_OUT += ("tests/benchmarks/repeat_tests.py",)
NEEDS_ANSWERS = re.compile(r"^\s*(?:from|import) solutions\b", re.MULTILINE)
LITTER = ("__pycache__", ".ipynb_checkpoints", "*.egg-info", ".DS_Store", "*.pyc")


def course_files(course: Path) -> Iterator[str]:
    """The files of the course, as paths below its root: what git tracks, so no notes of one's own.

    Where the course is no git checkout, everything in its known folders.
    """
    listing = subprocess.run(
        ["git", "-C", str(course), "ls-files", "-z", "--", *TOP],
        capture_output=True,
        text=True,
        check=False,
    )
    tracked = [name for name in listing.stdout.split("\0") if name]
    if listing.returncode != 0 or not tracked:
        roots = [course / name for name in TOP]
        found = [path for root in roots for path in (root, *root.rglob("*")) if path.is_file()]
        tracked = [path.relative_to(course).as_posix() for path in found]
    for name in sorted(tracked):
        litter = any(fnmatch(part, each) for part in Path(name).parts for each in LITTER)
        if not litter and (course / name).is_file():
            yield name


def belongs(name: str, course: Path) -> bool:
    """Whether a class gets this file."""
    if name in LEFT_OUT:
        return False
    if not name.startswith("tests/"):
        return True
    text = (course / name).read_text(encoding="utf-8", errors="replace")
    return any(fnmatch(name, each) for each in KEPT_TESTS) and not NEEDS_ANSWERS.search(text)


def changed(name: str, course: Path, gone: Sequence[str]) -> str | None:
    """The text that takes a file's place, without word of tests that are gone; None: as it is."""
    path = course / name
    if name == "CONTRIBUTING.md":
        return CONTRIBUTING
    if name == "pyproject.toml":
        return change_pyproject(path.read_text(encoding="utf-8"))
    if path.suffix == ".md":
        return change_page(path.read_text(encoding="utf-8"), name, gone)
    if path.name == "lesson.ipynb":
        notebook = nbformat.read(path, as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
        prose = change_prose([cell.source for cell in cells], name, gone)
        for cell, source in zip(cells, prose, strict=True):
            cell.source = source
        return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"
    return None


def write_edition(folder: Path, course: Path = ROOT) -> int:
    """Write the edition into an empty or new folder; return the number of files.

    Raises InputError when the folder cannot be used, or when a page changed so that a passage to
    replace is not found; nothing is left in the folder then.
    """
    check_folder(folder, course)
    names = list(course_files(course))
    given = [name for name in names if belongs(name, course)]
    gone = [name for name in names if name.startswith("tests/") and name not in given]
    texts = {name: changed(name, course, gone) for name in given}
    for name, text in texts.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            shutil.copy(course / name, target)  # with its mode: run_all.sh stays executable
        else:
            target.write_text(text, encoding="utf-8")
    return len(texts)


def check_folder(folder: Path, course: Path) -> None:
    """Raise InputError unless the edition can go there."""
    place = folder.resolve()
    if place == course or course in place.parents:
        raise InputError(f"{folder} lies inside the course ({course}): name a folder outside it")
    if place.exists() and not place.is_dir():
        raise InputError(f"{folder} is a file: name a folder")
    if place.is_dir() and any(place.iterdir()):
        raise InputError(f"{folder} is not empty: name a new folder; nothing is overwritten")
