"""The known answers to a lesson as exercise cells, the way a student would have typed them.

A cell may use what the lesson's setup cell imports, and sees nothing of solutions/. So whatever
else of the course an answer needs (helpers, constants, base classes) is written in front of it,
under names that no other cell uses. Sources are read with ast and never run: the grader imports
neither torch nor an answer.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from solutions.grading.intake.sources import Definition, bound_by, imported_by, parsed
from solutions.grading.results import Lesson

OURS = ("shared.", "solutions.")
Origin = tuple[str, str]  # a module and a name in it, "" for the module itself


@dataclass(frozen=True)
class KnownAnswer:
    """A definition of the course that answers an exercise; `says` is what a mistake must hear."""

    exercise: str
    says: str
    module: str
    node: Any


class Module(NamedTuple):
    """The top level of a source file; where a name is bound several times, the last one counts.

    `shadowed` are names that functions and classes in it give to things of their own.
    """

    tree: ast.Module
    imports: dict[str, Origin]
    definitions: dict[str, ast.stmt]
    shadowed: set[str]


class KnownAnswers:
    """References, alternatives and mistakes of one lesson, and their cells."""

    def __init__(self, course: Path, lesson: Lesson) -> None:
        self.course, self.folder = course, lesson.folder
        self.names = {each.id: each.name for each in lesson.exercises}
        self.path, self.module = cache(self._path), cache(self._module)
        self.setup = _read(lesson.setup)
        origins = {self.resolve(*origin): name for name, origin in self.setup.imports.items()}
        self.in_setup = {o: name for o, name in origins.items() if o[1] or not _ours(o)}

    def references(self) -> Iterator[KnownAnswer]:
        """The right answers of solutions/ or, where later lessons need them, of shared/."""
        for id, name in self.names.items():
            yield self._defined(id, f"solutions.{self.folder}", name)

    def alternatives(self) -> Iterator[KnownAnswer]:
        """Right answers in another style, in the order of their file."""
        home = f"solutions.alternatives.{self.folder}"
        table: Any = self.module(home).definitions["ALTERNATIVES"] if self.path(home) else None
        for id, answers in zip(table.value.keys, table.value.values, strict=True) if table else ():
            for each in answers.elts:
                yield self._defined(ast.literal_eval(id), home, each.id)

    def mistakes(self) -> Iterator[KnownAnswer]:
        """Wrong answers, in the order of their file."""
        home = f"solutions.mistakes.{self.folder}"
        for node in self.module(home).tree.body if self.path(home) else ():
            for call in filter(_is_label, getattr(node, "decorator_list", ())):
                id, says = map(ast.literal_eval, (call.args[0], call.keywords[0].value))
                yield KnownAnswer(id, says, home, node)

    def _defined(self, id: str, module: str, name: str) -> KnownAnswer:
        module, name = self.resolve(module, name)
        return KnownAnswer(id, "", module, self.module(module).definitions[name])

    def cell(self, answer: KnownAnswer) -> str:
        """The text of an answer's cell: imports, then what the answer needs, then itself."""
        cell = _Cell(self)
        cell.names[answer.module, answer.node.name] = self.names[answer.exercise]
        own = cell.add(answer.module, answer.node)
        label = ast.Call(ast.Name("exercise"), [ast.Constant(answer.exercise)], [])
        own.decorator_list = [label, *own.decorator_list]
        code = "\n\n\n".join(ast.unparse(ast.fix_missing_locations(part)) for part in cell.parts)
        return "\n".join([*sorted(cell.imports), "\n", code] if cell.imports else [code])

    def _path(self, name: str) -> Path | None:
        """Where a module of the course lies; None if it is no module."""
        base = self.course.joinpath(*name.split("."))
        places = base.with_suffix(".py"), base / "__init__.py"
        return next((each for each in places if each.exists()), None)

    def _module(self, name: str) -> Module:
        path = self.path(name)
        assert path is not None, f"there is no module {name}"
        return _read(path.read_text(encoding="utf-8"))

    def resolve(self, module: str, name: str) -> Origin:
        """Follow re-exports to where a name is defined."""
        while name and _ours((module, name)):
            if self.path(f"{module}.{name}"):
                return f"{module}.{name}", ""
            if name not in self.module(module).imports:
                break
            module, name = self.module(module).imports[name]
        return module, name


def known_wrong(course: Path, lesson: Lesson) -> dict[str, tuple[tuple[str, str], ...]]:
    """For each exercise the first of its known mistakes, as (what is said to it, its cell)."""
    known, found = KnownAnswers(course, lesson), dict[str, tuple[tuple[str, str], ...]]()
    for each in known.mistakes():
        if each.exercise not in found:  # to write a cell takes some hundredths of a second
            found[each.exercise] = ((each.says, known.cell(each)),)
    return found


def own_answers(course: Path, lesson: Lesson) -> dict[str, str]:
    """For each exercise the dotted name of the course's answer, where that lies in shared/."""
    known = KnownAnswers(course, lesson)
    found = known.references() if known.path(f"solutions.{lesson.folder}") else ()
    return {
        each.exercise: f"{each.module}.{each.node.name}"
        for each in found
        if each.module.startswith("shared.")
    }


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


@cache
def _read(source: str) -> Module:
    """Lessons share modules, and nobody changes a tree: to read one again takes a tenth of all."""
    module = Module(parsed(source), {}, {}, set())
    for node in module.tree.body:
        module.imports.update((local, (home, name)) for local, home, name in imported_by(node))
        module.definitions.update(dict.fromkeys(bound_by(node), node))
        for inner in ast.walk(node) if isinstance(node, Definition) else ():
            if isinstance(inner, ast.arg):
                module.shadowed.add(inner.arg)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                module.shadowed.add(inner.id)
    return module


def _ours(origin: Origin) -> bool:
    return f"{origin[0]}.".startswith(OURS)


def _is_label(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "mistake"


class _Cell(ast.NodeTransformer):
    """Writes one cell: gives what modules define the names that it has there, drops annotations."""

    def __init__(self, known: KnownAnswers) -> None:
        self.known, self.names = known, dict(known.in_setup)
        self.imports: set[str] = set()
        self.parts: list[Any] = []
        self.home = ""  # the module whose statement is being written
        self.given: set[str] = set()  # what was another module's, and a function gives it a value

    def add(self, module: str, node: Any) -> Any:
        """Append a copy of a statement of a module, after all that it needs; return the copy."""
        node = _copied(node)
        if isinstance(node, Definition):
            node.name = self.names[module, node.name]
            node.decorator_list = [each for each in node.decorator_list if not _is_label(each)]
        before, self.home, self.given = (self.home, self.given), module, set()
        self.parts.append(self.visit(node))
        self.home, self.given = before
        return self.parts[-1]

    def name_of(self, origin: Origin, local: str) -> str:
        """The name in the cell of something that a module calls `local`; it is made available."""
        module, name = origin
        if origin not in self.names and _ours(origin):
            source = self.known.module(module)
            for each in bound_by(source.definitions[name]):
                own = "_".join(["", *module.split(".")[-2:], each])
                self.names[module, each] = each if each in source.shadowed else own
            self.add(module, source.definitions[name])
        elif origin not in self.names:
            self.names[origin] = local
            what = f"from {module} import {name}" if name else f"import {module}"
            plain = local == (name or module.split(".")[0])
            self.imports.add(what if plain else f"{what} as {local}")
        return self.names[origin]

    def _origin(self, name: str) -> Origin:
        """Where a name of the module comes from; ("", "") for a local or a builtin one."""
        source = self.known.module(self.home)
        if name in source.imports:
            return self.known.resolve(*source.imports[name])
        return (self.home, name) if name in source.definitions else ("", "")

    def _renamed(self, name: str) -> str:
        origin = self._origin(name)
        alone = origin[1] or (origin[0] and not _ours(origin))  # ours are met by attributes
        return self.name_of(origin, name) if alone else name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._renamed(node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        origin = self._origin(node.value.id) if isinstance(node.value, ast.Name) else ("", "")
        if origin[1] or not _ours(origin):
            return self.generic_visit(node)
        name = self.name_of(self.known.resolve(origin[0], node.attr), node.attr)
        self.given |= {name} if isinstance(node.ctx, ast.Store) else set()
        return ast.Name(name, node.ctx)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.Global([self._renamed(name) for name in node.names])

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        self.generic_visit(node)
        if self.given:
            node.body.insert(0, ast.Global(sorted(self.given)))
            self.given = set()
        return node


def _copied(node: Any) -> Any:
    """A tree to change, without its places in the text; copy.deepcopy takes five times as long."""
    if isinstance(node, list):
        return [_copied(each) for each in node]
    if isinstance(node, ast.AST):
        return type(node)(**{name: _copied(value) for name, value in ast.iter_fields(node)})
    return node
