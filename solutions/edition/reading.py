"""Reading a written student edition: no answers in it, and nothing that points to them."""

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat

from solutions.edition.pages import TELLTALE
from solutions.grading.answer_cells import AnswerCells
from solutions.grading.intake.lesson import read_lessons


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `problem` is empty where it is as it should be."""

    what: str
    problem: str = ""


def lesson_numbers(root: Path) -> list[str]:
    """The lessons that have a notebook: ["01", "02", ...]."""
    return sorted(path.parent.name[:2] for path in root.glob("lessons/[0-9][0-9]_*/lesson.ipynb"))


def read_over(edition: Path, course: Path) -> Iterator[Finding]:
    """Look for answers, and for pointers to them, in the files of the edition."""
    told = sorted(_telltales(edition))
    yield Finding("no page speaks of answers that are not there", "\n".join(told))
    code = dict(_code(edition))
    bad = sorted(name for name, tree in code.items() if "solutions" in _imported(tree))
    bad = [name for name in bad if not name.endswith("/train.py")]  # see shared/exercises/mine.py
    yield Finding("nothing but the scripts imports solutions", "\n".join(bad))
    yield Finding("pip finds shared/ and nothing else", "\n".join(_packages(edition)))
    written = sorted(_typed_in(edition))
    yield Finding("every exercise cell is an empty stub", "\n".join(written))
    stays, leaks = _answers_in(course, lesson_numbers(edition), code)
    yield Finding("answers that only solutions/ holds are in no file", "\n".join(leaks))
    places = ", ".join(f"{path} ({' '.join(ids)})" for path, ids in sorted(stays.items()))
    yield Finding(f"answers that stay, because later lessons import them: {places or 'none'}")


def _packages(edition: Path) -> Iterator[str]:
    """What pip would look for beside shared/, and folders of shared/ that it would not find."""
    listing = tomllib.loads((edition / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = listing["tool"]["setuptools"]["packages"]["find"]["include"]
    yield from sorted(set(wanted) - {"shared*"})
    folders = {path.parent for path in (edition / "shared").rglob("*.py")}
    for folder in sorted(folders):
        if not (folder / "__init__.py").exists():
            yield f"{folder.relative_to(edition)} has no __init__.py"


def _telltales(edition: Path) -> Iterator[str]:
    for path in sorted([*edition.rglob("*.md"), *edition.glob("lessons/*/lesson.ipynb")]):
        name = path.relative_to(edition)
        if path.suffix == ".md":
            texts = [(str(name), path.read_text(encoding="utf-8"))]
        else:
            cells = enumerate(nbformat.read(path, as_version=4).cells)
            texts = [(f"{name}, cell {number}", cell.source) for number, cell in cells]
        for place, text in texts:
            for line in text.splitlines():
                if TELLTALE.search(line):
                    yield f"{place}: {line.strip()[:90]}"


def _code(edition: Path) -> Iterator[tuple[str, ast.Module]]:
    """Everything that Python runs: modules, and the code cells of notebooks, by name."""
    for path in edition.rglob("*.py"):
        yield str(path.relative_to(edition)), ast.parse(path.read_text(encoding="utf-8"))
    for path in edition.glob("lessons/*/lesson.ipynb"):
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                yield f"{path.relative_to(edition)}, cell {number}", ast.parse(cell.source)


def _imported(tree: ast.Module) -> set[str]:
    nodes = list(ast.walk(tree))
    names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def _body(node: ast.AST) -> str:
    """What a function or a class does, whatever its docstrings and annotations say."""
    functions = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
    bodies = [each.body[ast.get_docstring(each) is not None :] for each in functions]
    return "\n".join(ast.unparse(line) for body in bodies for line in body)


def _typed_in(edition: Path) -> Iterator[str]:
    """Exercises whose cell holds more than the stub: whoever teaches solved them in this copy."""
    for lesson in read_lessons(edition, lesson_numbers(edition)).values():
        for id, source in lesson.stubs.items():
            if set(_body(ast.parse(source)).splitlines()) != {"raise NotImplementedError"}:
                yield f"{id} in {lesson.folder}/lesson.ipynb"


def _answers_in(
    course: Path, numbers: Sequence[str], code: Mapping[str, ast.Module]
) -> tuple[dict[str, list[str]], list[str]]:
    """Ids of exercises by the module of shared/ that holds the answer; and answers that got out."""
    stays: dict[str, list[str]] = {}
    leaks = []
    definitions = ast.FunctionDef | ast.ClassDef
    bodies = {
        (name, _body(node))
        for name, tree in code.items()
        for node in ast.walk(tree)
        if isinstance(node, definitions)
    }
    for lesson in read_lessons(course, numbers).values():
        answers = AnswerCells(course, lesson)
        for exercise in lesson.exercises:
            module, name = answers.resolve(f"solutions.lesson{lesson.folder}", exercise.name)
            if module.startswith("shared."):
                stays.setdefault(module.replace(".", "/") + ".py", []).append(exercise.id)
                continue
            answer = _body(answers.module(module).definitions[name])
            leaks += [f"{exercise.id} in {place}" for place, body in bodies if body == answer]
    return stays, leaks
