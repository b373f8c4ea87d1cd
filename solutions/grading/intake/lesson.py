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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.errors import InputError
from solutions.grading.intake.answer_cells import known_wrong
from solutions.grading.intake.cells import Found, borrowed, find_answer, look, names_bound
from solutions.grading.intake.notebook import Unreadable, read_code_cells
from solutions.grading.intake.sources import parsed
from solutions.grading.results import Answers, Exercise, Lesson, Outcome

# What a grade can depend on besides the course: another torch may round another way.
RELEVANT = ("torch", "numpy", "deepspeed", "jaxtyping", "psutil")


def read_lessons(course: Path, numbers: Sequence[str] | None = None) -> dict[str, Lesson]:
    """The course's lessons by number, all or those that `numbers` names ("02" or "2").

    Raises InputError for a number that the course does not have.
    """
    folders = lesson_folders(course)
    if numbers is None:
        wanted = list(folders)
    else:
        wanted = sorted({_number(given, folders) for given in numbers})
    machinery = _machinery(course)
    return {number: _read_lesson(folders[number], machinery) for number in wanted}


def lesson_folders(course: Path) -> dict[str, Path]:
    """The folders of the course's lessons by number."""
    notebooks = sorted((course / "lessons").glob("[0-9][0-9]_*/lesson.ipynb"))
    return {path.parent.name[:2]: path.parent for path in notebooks}


def _number(given: str, folders: Mapping[str, Path]) -> str:
    number = given.strip().split("_")[0].zfill(2)
    if number not in folders:
        known = " ".join(folders) or "none"
        raise InputError(f"there is no lesson {given!r} in the course (lessons: {known})")
    return number


def _read_lesson(folder: Path, machinery: str) -> Lesson:
    content = json.loads((folder / "lesson.ipynb").read_bytes())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    setup = [_source(cell) for cell in cells if "setup" in cell["metadata"].get("tags", [])]
    points = {
        cell["metadata"]["nbgrader"]["grade_id"]: cell["metadata"]["nbgrader"]["points"]
        for cell in cells
        if cell["metadata"].get("nbgrader", {}).get("grade")
    }
    exercises, stubs = [], {}
    for cell in cells:
        for id, name in look(_source(cell)).exercises:
            assert id not in stubs, f"{folder.name} holds exercise {id} twice"
            stubs[id] = _source(cell)
            check = f"check-{id.replace('.', '-')}"
            assert check in points, f"{folder.name} has no cell {check}, which says the points"
            exercises.append(Exercise(id, name, points[check]))
    parts = ["\n".join(setup), *stubs.values(), *map(repr, exercises), machinery]
    parts += [f"{path.name} {_digest(path)}" for path in sorted(folder.glob("*.py"))]
    lesson = Lesson(
        number=folder.name[:2],
        folder=folder.name,
        exercises=tuple(exercises),
        setup="\n".join(setup),
        stubs=stubs,
        digest="",
        forbidden=_forbidden(folder),
    )
    wrong = known_wrong(folder.parents[1], lesson)
    digest = hashlib.sha256(json.dumps([parts, wrong]).encode()).hexdigest()
    return replace(lesson, wrong=wrong, digest=digest)


def _forbidden(folder: Path) -> dict[str, tuple[str, ...]]:
    """The calls that are an exercise itself, as checks.py names them: `forbidden=(...)`.

    Constants of its top level may stand there; the module itself is not run, it would load torch.
    """
    found, constants = {}, dict[str, Any]()
    tree = parsed((folder / "checks.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper():
            with contextlib.suppress(Exception):  # what is made of something imported
                constants[ast.unparse(node.targets[0])] = _value(node.value, constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for each in node.keywords:
                if each.arg == "forbidden" and node.args:
                    found[ast.literal_eval(node.args[0])] = _value(each.value, constants)
    return found


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    return eval(
        compile(ast.Expression(node), "checks.py", "eval"), {"__builtins__": {}}, dict(names)
    )


def _source(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


def _machinery(course: Path) -> str:
    """A digest of all that every lesson is graded with: shared/, the data, the grader, versions."""
    files = [*(course / "shared").rglob("*.py"), *(course / "shared").rglob("*.json")]
    files += [path for path in (course / "datasets").rglob("*") if path.is_file()]
    parts = [f"{path.relative_to(course)} {_digest(path)}" for path in sorted(files)]
    own = Path(__file__).resolve().parents[1]
    parts += [f"{path.relative_to(own)} {_digest(path)}" for path in sorted(own.rglob("*.py"))]
    parts += [f"{name} {version}" for name, version in _versions()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in RELEVANT:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "none"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
        cells, notes = read_code_cells(notebook)
    except Unreadable as reason:
        return no_answers(student, lesson, Outcome.UNREADABLE, str(reason))
    found = [look(cell.source, cell) for cell in cells]
    given = names_bound(parsed(lesson.setup)) | {each.name for each in lesson.exercises}
    taken, problems, more = {}, {}, {"": notes} if notes else {}
    for exercise in lesson.exercises:
        answer = find_answer(exercise, found)
        if not isinstance(answer, Found):
            problems[exercise.id] = answer
            continue
        taken[exercise.id] = answer.cell.source
        if own := tuple(_notes(answer, borrowed(answer, found, given | set(dir(builtins))))):
            more[exercise.id] = own
    if not taken and (other := _other_lesson(lesson, found)):
        reason = f"this notebook holds exercises of lesson {other}, none of lesson {lesson.number}"
        return no_answers(student, lesson, Outcome.MISSING, reason)
    return Answers(student, lesson.number, taken, problems, more)


def _notes(answer: Found, borrows: Sequence[str]) -> Iterator[str]:
    """What may explain why an answer does not run here."""
    if borrows:
        names = ", ".join(borrows[:3])
        yield f"uses {names}, but only exercise cells are graded: move it into this cell"
    if answer.left_out:
        yield f"without {', '.join(answer.left_out[:3])}"


def _other_lesson(lesson: Lesson, found: Sequence[Found]) -> str:
    """The lesson that a notebook belongs to when it is not `lesson`; "" when it may be."""
    numbers = Counter(id.split(".")[0] for each in found for id, _ in each.exercises)
    return "" if lesson.number in numbers or not numbers else numbers.most_common(1)[0][0]
