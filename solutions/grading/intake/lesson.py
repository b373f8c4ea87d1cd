"""Pristine lessons of the course, and the exercise cells of a submitted notebook by their id.

An exercise cell is known by `@exercise("02.1")` alone. Where that is missing or broken, the cell is
looked for by what else names it, to say what is wrong; it is not graded.
"""

import ast
import builtins
import contextlib
import hashlib
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.errors import InputError
from shared.exercises.cells import source_of
from solutions.grading.intake.audit import audit
from solutions.grading.intake.known import known_wrong, own_answers
from solutions.grading.intake.notebook import (
    Cell,
    Unreadable,
    borrowed,
    find_answer,
    look,
    read_cells,
    written_beside,
)
from solutions.grading.intake.sources import parsed
from solutions.grading.results import Answers, Exercise, Flag, Lesson, Outcome

# What a grade can depend on besides the course: another torch may round another way.
RELEVANT = ("torch", "numpy", "deepspeed", "jaxtyping", "psutil")


def read_lessons(course: Path, numbers: Sequence[str] | None = None) -> dict[str, Lesson]:
    """The course's lessons by number, all or those that `numbers` names ("02" or "2").

    Raises InputError for a number that the course does not have.
    """
    machinery = _machinery(course)
    read = read_exercises(course, numbers)
    return {number: _completed(course, each, machinery) for number, each in read.items()}


def read_exercises(course: Path, numbers: Sequence[str] | None = None) -> dict[str, Lesson]:
    """The same, without what takes the time: known wrong answers, a digest, the course's own."""
    folders = lesson_folders(course)
    wanted = folders if numbers is None else sorted({_number(each, folders) for each in numbers})
    return {number: _read_lesson(folders[number]) for number in wanted}


def read_with_answers(course: Path) -> dict[str, Lesson]:
    """The exercises of all lessons, and where shared/ has the course's own answers."""
    read = read_exercises(course)
    return {n: replace(each, answers=own_answers(course, each)) for n, each in read.items()}


def lesson_folders(course: Path) -> dict[str, Path]:
    """The folders of the course's lessons by number."""
    notebooks = sorted((course / "lessons").glob("lesson[0-9][0-9]_*/lesson.ipynb"))
    return {path.parent.name.removeprefix("lesson")[:2]: path.parent for path in notebooks}


def _number(given: str, folders: Mapping[str, Path]) -> str:
    number = given.strip().removeprefix("lesson").split("_")[0].zfill(2)
    if number not in folders:
        known = " ".join(folders) or "none"
        raise InputError(f"there is no lesson {given!r} in the course (lessons: {known})")
    return number


def _read_lesson(folder: Path) -> Lesson:
    content = json.loads((folder / "lesson.ipynb").read_bytes())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    first = [each for each in cells if "setup" in each["metadata"].get("tags", [])]
    setup = "\n".join(map(source_of, first))
    marks = [each["metadata"]["nbgrader"] for each in cells if "nbgrader" in each["metadata"]]
    points = {each["grade_id"]: each["points"] for each in marks if each.get("grade")}
    exercises, stubs = [], {}
    for source in map(source_of, cells):
        for id, name in look(source).exercises:
            assert id not in stubs, f"{folder.name} holds exercise {id} twice"
            check = f"check-{id.replace('.', '-')}"
            assert check in points, f"{folder.name} has no cell {check}, which says the points"
            exercises.append(Exercise(id, name, points[check]))
            stubs[id] = source
    number = folder.name.removeprefix("lesson")[:2]
    return Lesson(number, folder.name, tuple(exercises), setup, stubs, "")


def _completed(course: Path, lesson: Lesson, machinery: list[str]) -> Lesson:
    folder = course / "lessons" / lesson.folder
    wrong, own = known_wrong(course, lesson), own_answers(course, lesson)
    files, exercises = _digests(folder, folder.rglob("*.py")), list(map(repr, lesson.exercises))
    parts = [lesson.setup, lesson.stubs, exercises, machinery, files, wrong]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return replace(lesson, wrong=wrong, answers=own, forbidden=_forbidden(folder), digest=digest)


def _forbidden(folder: Path) -> dict[str, tuple[str, ...]]:
    """The calls that are an exercise itself, as checks.py names them: `forbidden=(...)`.

    Constants of its top level may stand there; the module itself is not run, it would load torch.
    """
    found, constants = {}, dict[str, Any]()
    for node in parsed((folder / "checks.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            with contextlib.suppress(NameError):  # what is made of something imported
                exec(ast.unparse(node), constants)
        match node:
            case ast.Assign(value=ast.Call(args=[ast.Constant(value=id), *_], keywords=more)):
                given = {each.arg: each.value for each in more}
                if "forbidden" in given:
                    found[id] = eval(ast.unparse(given["forbidden"]), constants)
    return found


def _machinery(course: Path) -> list[str]:
    """What every lesson is graded with: shared/, the data, the grader, versions."""
    shared, data, own = course / "shared", course / "datasets", Path(__file__).resolve().parents[1]
    files = [*shared.rglob("*.py"), *shared.rglob("*.json")]
    files += [path for path in data.rglob("*") if path.is_file()]
    installed = (each for each in importlib.metadata.distributions() if each.name in RELEVANT)
    return [
        f"python {platform.python_version()}",
        *sorted(f"{each.name} {each.version}" for each in installed),
        *_digests(course, files),
        *_digests(own, own.rglob("*.py")),
    ]


def _digests(top: Path, files: Iterable[Path]) -> list[str]:
    """Name and digest of each file below a folder."""
    return [
        f"{path.relative_to(top)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(files)
    ]


def no_answers(student: str, lesson: Lesson, outcome: Outcome, reason: str) -> Answers:
    """The answers of a student of whom nothing can be read: one reason for every exercise."""
    problems = {exercise.id: (outcome, reason) for exercise in lesson.exercises}
    return Answers(student, lesson.number, {}, problems)


def take_answers(student: str, lesson: Lesson, notebook: bytes) -> Answers:
    """Take the exercise cells out of a submitted notebook.

    Every exercise of the lesson ends in `cells` or, with the reason, in `problems`. Never raises
    for anything that is in the notebook.
    """
    try:
        cells = read_cells(notebook)
    except Unreadable as reason:
        return no_answers(student, lesson, Outcome.UNREADABLE, str(reason))
    if other := _other_lesson(lesson, cells):
        reason = f"this notebook holds exercises of lesson {other}, none of lesson {lesson.number}"
        return no_answers(student, lesson, Outcome.MISSING, reason)
    known = look(lesson.setup).binds | {each.name for each in lesson.exercises} | {*dir(builtins)}
    taken, problems, notes = {}, {}, {}
    for exercise in lesson.exercises:
        answer = find_answer(exercise, cells)
        if not isinstance(answer, Cell):
            problems[exercise.id] = answer
            continue
        untouched = answer.source.strip() == lesson.stubs[exercise.id].strip()
        if untouched and (reason := written_beside(exercise, cells)):
            problems[exercise.id] = Outcome.UNREADABLE, reason
            continue
        taken[exercise.id] = answer
        if names := ", ".join(borrowed(answer, cells, known)[:3]):
            note = f"uses {names}, but only exercise cells are graded: move it into this cell"
            notes[exercise.id] = (note,)
    flags = {id: audit(cell.source, lesson, id) for id, cell in taken.items()}
    # Cells know one another's names: what one of them has imported is at hand in all of them.
    odd = {name for id, cell in taken.items() if flags[id] for name in cell.binds} - known
    for id, cell in taken.items():
        if names := sorted(cell.needs & odd):
            flags[id] += (Flag(1, f"uses {names[0]}, of a cell that needs a look", True),)
    sources = {id: cell.source for id, cell in taken.items()}
    return Answers(student, lesson.number, sources, problems, notes, flags)


def _other_lesson(lesson: Lesson, cells: Sequence[Cell]) -> str:
    """The lesson that a notebook belongs to when it is not `lesson`; "" when it may be."""
    numbers = Counter(id.split(".")[0] for each in cells for id, _ in each.exercises)
    return "" if lesson.number in numbers or not numbers else numbers.most_common(1)[0][0]
