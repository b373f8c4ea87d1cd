"""The course as a sandbox sees it: for lesson NN the edition that its class has that week.

Nothing of a later lesson can be borrowed there, or carried out in a message, and the answers of the
week are in no file. Checks that are built on one of them get its module by the job, as text.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from solutions.grading.intake.class_edition import ClassEdition
from solutions.grading.intake.lesson import lesson_folders
from solutions.grading.intake.sources import uncollected
from solutions.grading.results import Lesson

INSIDE = Path(__file__).with_name("inside")


@dataclass(frozen=True)
class Copy:
    """A copy of the course, and the modules that checks need in another form than it has them."""

    folder: Path
    texts: dict[str, str]


class Editions:
    """Copies in a workspace: one of the whole course, and one a lesson that shares its files.

    A lesson without an answer of the course, such as a test's, is judged beside the whole.
    """

    def __init__(self, workspace: Path, course: Path) -> None:
        self.workspace, self.course, self.whole = workspace, course, workspace / "course"
        self.made: dict[str, Copy] = {}
        self.making = threading.Lock()
        leave = shutil.ignore_patterns("__pycache__", "*.pyc", "lesson.ipynb")
        for name in ("shared", "lessons", "datasets"):
            if (course / name).is_dir():
                shutil.copytree(course / name, self.whole / name, ignore=leave)
        for path in INSIDE.glob("[!_]*.py"):
            shutil.copy(path, self.whole / path.name)
        self.fonts = workspace / "caches" / "matplotlib"
        self.fonts.mkdir(parents=True)
        self._run("-c", "import matplotlib.font_manager")  # its list of fonts takes a second
        _let_read(self.fonts.parent)
        self._prepare(self.whole)

    def _prepare(self, copy: Path) -> None:
        """Compile what a run imports, which takes seconds, and let any user read it."""
        self._run("-m", "compileall", "-qq", str(copy))
        _let_read(copy)

    def _run(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "MPLCONFIGDIR": str(self.fonts)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,  # without it each run does it for itself
        )

    def of(self, lesson: Lesson) -> Copy:
        """The copy that a lesson is judged beside."""
        with self.making, uncollected():
            if lesson.folder not in self.made:
                self.made[lesson.folder] = self._made(lesson)
            return self.made[lesson.folder]

    def _made(self, lesson: Lesson) -> Copy:
        if not (self.course / "solutions" / f"{lesson.folder}.py").exists():
            return Copy(self.whole, {})
        week, own = int(lesson.number), {lesson.number: lesson}  # whose answers are withheld
        seen = dict(ClassEdition(self.course, week, lessons=own).files())
        needed = dict(ClassEdition(self.course, week, solved=True, lessons=own).files())
        texts = {
            name.removesuffix(".py").replace("/", "."): text
            for name, text in needed.items()
            if text is not None and text != seen[name]
        }
        whole = {name: (self.whole / name).read_text(encoding="utf-8") for name in seen}
        changed = {name: text for name, text in seen.items() if text != whole[name]}
        later = [each.name for n, each in lesson_folders(self.course).items() if int(n) > week]
        folder = self.workspace / lesson.folder
        leave = _left_out(self.whole, {*changed, *(f"lessons/{each}" for each in later)})
        shutil.copytree(self.whole, folder, ignore=leave, copy_function=os.link)
        for name, text in changed.items():
            if text is not None:
                (folder / name).write_text(text, encoding="utf-8")
        self._prepare(folder)
        return Copy(folder, texts)


def _let_read(top: Path) -> None:
    """Runs are users of their own."""
    for path in (top, *top.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _left_out(top: Path, names: Collection[str]) -> Callable[[str, list[str]], set[str]]:
    """For copytree: these files and folders, and what was compiled of them."""

    def ignore(where: str, entries: list[str]) -> set[str]:
        here = Path(where).relative_to(top)
        source = here.parent if here.name == "__pycache__" else here
        named = {each: each if source is here else f"{each.split('.')[0]}.py" for each in entries}
        return {each for each, name in named.items() if (source / name).as_posix() in names}

    return ignore
