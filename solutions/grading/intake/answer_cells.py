"""References and known mistakes as exercise cells, the way a student would have typed them.

An exercise cell may import from the course only what the lesson's setup cell imports, and sees
nothing of solutions/. So everything else that an answer needs (helpers, constants, base classes,
from the solution module or from shared/) is written into the cell in front of it, under names that
no other cell uses: a cell stands on its own and no other cell can pull it down.

Sources are read with ast and never run: the grader imports neither torch nor an answer.
"""

import ast
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from solutions.grading.intake.sources import (
    Definition,
    Module,
    Renamed,
    WithoutAnnotations,
    bound_by,
    copied,
)
from solutions.grading.results import Lesson

OURS = ("shared", "solutions")


@dataclass(frozen=True)
class KnownMistake:
    """A wrong answer of solutions/mistakes: its exercise, what the check must say, its cell."""

    exercise: str
    says: str
    cell: str


def known_wrong(course: Path, lesson: Lesson) -> dict[str, tuple[tuple[str, str], ...]]:
    """For each exercise the first of its known mistakes, as (what is said to it, its cell)."""
    if not (course / "solutions" / "mistakes" / f"lesson{lesson.folder}.py").is_file():
        return {}
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    answers = AnswerCells(course, lesson)
    for id, says, node in answers.labelled():
        if id not in found:  # to write a cell takes some hundredths of a second
            found[id] = ((says, answers.typed(node, id)),)
    return found


def hand_in(notebook: bytes, cells: Mapping[str, str]) -> bytes:
    """The pristine notebook with these exercise cells typed in, as a student saves it."""
    content = json.loads(notebook)
    stubs = {f"exercise-{id.replace('.', '-')}": cell for id, cell in cells.items()}
    for cell in content["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if name in stubs:
            cell["source"] = stubs.pop(name).splitlines(keepends=True)
    assert not stubs, f"the notebook has no cells for {sorted(stubs)}"
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


class AnswerCells:
    """The reference and the mistakes of one lesson, exercise by exercise."""

    def __init__(self, course: Path, lesson: Lesson) -> None:
        self.course, self.lesson = course, lesson
        self.setup = Module.read("", lesson.setup)
        self.names = {each.id: each.name for each in lesson.exercises}
        self.wrong_home = f"solutions.mistakes.lesson{lesson.folder}"
        self._modules: dict[str, Module] = {}

    @cached_property
    def references(self) -> dict[str, str]:
        """The cell of the right answer to each exercise, by id."""
        home = f"solutions.lesson{self.lesson.folder}"
        cells = {}
        for exercise in self.lesson.exercises:
            module, name = self.resolve(home, exercise.name)
            answer = self.module(module).definitions[name]
            assert isinstance(answer, Definition), f"{module}.{name} is no function and no class"
            cells[exercise.id] = _Cell(self, module).write(answer, exercise.id, exercise.name)
        return cells

    def labelled(self) -> Iterator[tuple[str, str, Definition]]:
        """Every wrong answer's exercise, what is said to it, and itself, in the file's order."""
        for node in self.module(self.wrong_home).tree.body:
            label = _label(node) if isinstance(node, Definition) else None
            if label and isinstance(node, Definition):
                yield *label, node

    def typed(self, node: Definition, id: str) -> str:
        """The cell of a wrong answer to an exercise."""
        return _Cell(self, self.wrong_home).write(node, id, self.names[id])

    @cached_property
    def mistakes(self) -> list[KnownMistake]:
        """Every wrong answer of the lesson, in the order of its file."""
        return [KnownMistake(id, says, self.typed(node, id)) for id, says, node in self.labelled()]

    @cached_property
    def alternatives(self) -> dict[str, list[str]]:
        """The right answers in another style to each exercise, by id, in the order of the file."""
        home = f"solutions.alternatives.lesson{self.lesson.folder}"
        if self.path(home) is None:
            return {}
        table = self.module(home).definitions["ALTERNATIVES"]
        assert isinstance(table, ast.Assign) and isinstance(table.value, ast.Dict), home
        found: dict[str, list[str]] = {}
        for key, answers in zip(table.value.keys, table.value.values, strict=True):
            id = ast.literal_eval(key) if key else ""
            for each in answers.elts if isinstance(answers, ast.List) else ():
                assert isinstance(each, ast.Name), f"{home}: {id} lists what is no name"
                module, name = self.resolve(home, each.id)
                answer = self.module(module).definitions[name]
                assert isinstance(answer, Definition), f"{module}.{name}: no function, no class"
                cell = _Cell(self, module).write(answer, id, self.names[id])
                found.setdefault(id, []).append(cell)
        return found

    def module(self, name: str) -> Module:
        """A module of the course, parsed once."""
        if name not in self._modules:
            path = self.path(name)
            assert path is not None, f"there is no module {name}"
            self._modules[name] = Module.read(name, path.read_text(encoding="utf-8"))
        return self._modules[name]

    def path(self, name: str) -> Path | None:
        """Where a module of the course lies; None if it is no module."""
        base = self.course.joinpath(*name.split("."))
        return next(
            (p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None
        )

    def resolve(self, module: str, name: str) -> tuple[str, str]:
        """Follow re-exports to (module, name) of the definition; a module has the name ""."""
        while name and module.split(".")[0] in OURS:
            if self.path(f"{module}.{name}"):
                return f"{module}.{name}", ""
            if name not in self.module(module).imports:
                break
            module, name = self.module(module).imports[name]
        return module, name

    @cached_property
    def in_setup(self) -> dict[tuple[str, str], str]:
        """What the setup cell has imported, by where it is defined."""
        found = {self.resolve(*origin): local for local, origin in self.setup.imports.items()}
        return {origin: local for origin, local in found.items() if origin[1] or not _ours(origin)}


def _ours(origin: tuple[str, str]) -> bool:
    return origin[0].split(".")[0] in OURS


def _label(node: Definition) -> tuple[str, str] | None:
    """(id, says) of the @mistake decorator."""
    for call in filter(_is_label, node.decorator_list):
        assert isinstance(call, ast.Call), f"{node.name} has a @mistake without its words"
        says = next(each.value for each in call.keywords if each.arg == "says")
        return ast.literal_eval(call.args[0]), ast.literal_eval(says)
    return None


def _is_label(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id == "mistake"


class _Cell:
    """One exercise cell while it is written: imports, then what the answer needs, then it."""

    def __init__(self, answers: AnswerCells, home: str) -> None:
        self.answers, self.home = answers, home
        self.imports: list[str] = []
        self.parts: list[ast.stmt] = []
        self.names: dict[tuple[str, str], str] = {}

    def write(self, answer: Definition, id: str, name: str) -> str:
        """The cell's text, with `answer` as the answer to exercise `id`, under `name`."""
        own = copy.copy(answer)
        own.name = name
        marked = [each for each in own.decorator_list if not _is_label(each)]
        label = ast.Call(ast.Name("exercise", ast.Load()), [ast.Constant(id)], [])
        own.decorator_list = [label, *marked]
        self.names[self.home, answer.name] = name
        self.add(own, self.home)
        code = "\n\n\n".join(ast.unparse(ast.fix_missing_locations(part)) for part in self.parts)
        return "\n".join([*sorted(set(self.imports)), "\n", code] if self.imports else [code])

    def add(self, node: ast.stmt, module: str) -> None:
        """Append a statement of a module, after all that it needs."""
        node = WithoutAnnotations().visit(copied(node))

        def attribute(owner: str, name: str) -> str | None:
            """`right.split_heads`, where `right` is a module of ours: the definition itself."""
            origin = self.answers.module(module).imports.get(owner)
            target = self.answers.resolve(*origin) if origin else ("", "")
            if target[1] or not _ours(target):
                return None
            return self.take(self.answers.resolve(target[0], name), name)

        renamed = Renamed(self.needs(node, module), attribute).visit(node)
        self.parts.append(renamed)

    def needs(self, node: ast.AST, module: str) -> dict[str, str]:
        """For each global name in a statement of a module, the name that it has in the cell."""
        source = self.answers.module(module)
        used = dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        renamed = {}
        for name in used:
            if name in source.imports:
                origin = self.answers.resolve(*source.imports[name])
                if origin[1] or not _ours(origin):  # our modules are met by their attributes
                    renamed[name] = self.take(origin, name)
            elif name in source.definitions:
                renamed[name] = self.take((module, name), name)
        return renamed

    def take(self, origin: tuple[str, str], local: str) -> str:
        """Make a definition or an import available in the cell; return its name there."""
        if origin in self.names:
            return self.names[origin]
        if origin in self.answers.in_setup:
            return self.answers.in_setup[origin]
        module, name = origin
        if _ours(origin):
            definition = copy.copy(self.answers.module(module).definitions[name])
            prefix = f"_{module.split('.')[-1]}_"
            self.names |= {(module, each): f"{prefix}{each}" for each in bound_by(definition)}
            if isinstance(definition, Definition):
                definition.name = f"{prefix}{name}"
            self.add(definition, module)
            return f"{prefix}{name}"
        if local in self.answers.setup.imports:  # bound to something else there
            local = f"_{local}"
        self.names[origin] = local
        what = f"from {module} import {name}" if name else f"import {module}"
        plain = local == (name or module.split(".")[0])
        self.imports.append(what if plain else f"{what} as {local}")
        return local
