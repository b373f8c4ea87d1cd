"""What of shared/ a class gets through lesson NN: what earlier lessons left, and NN's helpers.

Modules of earlier lessons stay whole. Of those of NN and later ones only what the lessons' own
code needs stays, statement by statement; where an answer of NN stands, a line takes the learner's.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from shared.exercises.cells import code_of
from solutions.built import NEEDED_BEFORE, built_in
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_with_answers
from solutions.grading.intake.sources import bound_by, imported_by, parsed
from solutions.grading.results import Lesson

Place = tuple[str, str]  # a module and a name in it
IMPORTS = ast.Import, ast.ImportFrom
YOURS = """\
# Not in this edition: an exercise of this week. Taken from your notebook, when it is used.
{name} = withheld("{id}", "{name}")"""


class ClassEdition:
    """The modules of shared/ as the edition through a lesson has them, read from a whole course."""

    def __init__(
        self,
        course: Path,
        through: int,
        *,
        solved: bool = False,
        lessons: Mapping[str, Lesson] | None = None,
    ) -> None:
        """`solved`: with the week's answers where something needs them, as checks do.

        `lessons`: all of the course with their answers, where the caller has read them.
        """
        self.course, self.through, self.solved = course, through, solved
        lessons = lessons or read_with_answers(course)
        self.known = KnownAnswers(course, next(iter(lessons.values())))
        self.answers: dict[Place, str] = {}  # of lesson NN and later ones, in shared/
        self.earlier: dict[str, str] = {}  # where those of the lessons before it are, by exercise
        for number, lesson in lessons.items():
            for id, place in lesson.answers.items():
                if int(number) < through:
                    self.earlier[id] = place
                else:
                    module, _, name = place.rpartition(".")
                    self.answers[module, name] = id
        self._top = cache(self._statements)
        self.kept: set[Place] = set()
        self.modules: set[str] = set()  # those that are there, as a whole or in part
        for path in sorted(course.joinpath("shared").rglob("*.py")):
            if self.whole(name := self._name(path)):
                self._need_module(name)
        for code in self._code_of_lessons():
            self._need_imports(_tree(code))

    def whole(self, module: str) -> bool:
        """Whether a module stays as it is: the frame's, or built by an earlier lesson."""
        return built_in(module) < self.through

    def withheld(self, module: str, name: str) -> bool:
        """Whether this is an answer of the week; later weeks' stay where a script needs them."""
        if self.solved:
            return False
        id = self.answers.get((module, name), "")
        return id.startswith(f"{self.through:02}.") and id not in NEEDED_BEFORE

    @cached_property
    def early(self) -> list[str]:
        """The exercises, none solved yet, whose answers are here since these lessons need them."""
        return sorted(id for place, id in self.answers.items() if self._is_early(place))

    def _is_early(self, place: Place) -> bool:
        there = place in self.kept or self.whole(place[0])
        return there and not self.withheld(*place)

    def files(self) -> Iterator[tuple[str, str | None]]:
        """For each module of shared/ its file and its text in the edition; None where it is not."""
        for path in sorted(self.course.joinpath("shared").rglob("*.py")):
            module, file = self._name(path), path.relative_to(self.course).as_posix()
            text = path.read_text(encoding="utf-8")
            used = any(f"{each}.".startswith(f"{module}.") for each in self.modules)
            if self.whole(module) or (used and path.name == "__init__.py"):
                yield file, text
            else:
                yield file, self._in_part(module, text) if module in self.modules else None

    def can_use(self, code: str) -> bool:
        """Whether all that a test or benchmark takes of the course is in the edition."""
        for _, module, name in _imported(_tree(code)):
            if module.split(".")[0] == "solutions":
                return False
            if module.split(".")[0] == "shared" and not self._has(module, name):
                return False
        return True

    def _has(self, module: str, name: str) -> bool:
        module, name = self.known.resolve(module, name)
        if (module, name) in self.answers:
            return self._is_early((module, name))
        path = self.known.path(module)
        there = self.whole(module) or (path is not None and path.name == "__init__.py")
        return there or (module, name) in self.kept

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.course).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _code_of_lessons(self) -> Iterator[str]:
        for folder in sorted(self.course.glob("lessons/lesson[0-9][0-9]_*")):
            if int(folder.name[6:8]) <= self.through:
                yield from (each.read_text(encoding="utf-8") for each in folder.rglob("*.py"))
                yield code_of(folder / "lesson.ipynb")

    def _need_imports(self, tree: ast.AST) -> None:
        """Everything that the imports anywhere in a piece of code name."""
        modules = dict[str, str]()
        for local, module, name in _imported(tree):
            if module.split(".")[0] != "shared":
                continue
            self._hand_on(module, name)
            module, name = self.known.resolve(module, name)
            if name:
                self._need(module, name)
            else:
                modules[local] = module
        self._need_attributes(tree, modules)

    def _hand_on(self, module: str, name: str) -> None:
        """Keep the import by which a module has a name that others take from it."""
        if self.known.path(module) and name in self.known.module(module).imports:
            self.kept.add((module, name))
            self._enter(module)

    def _enter(self, module: str) -> None:
        """Have a module in the edition, with what happens in it at import in any case."""
        if module not in self.modules:
            self.modules.add(module)
            for node in self._top(module):
                if not isinstance(node, IMPORTS) and not _binds(node):
                    self._follow(module, node)

    def _need_attributes(self, tree: ast.AST, modules: dict[str, str]) -> None:
        """What is taken of modules that are known by a name: `batching.Batch`."""
        for local, name in _attributes(tree) if modules else ():
            if local in modules:
                self._need(*self.known.resolve(modules[local], name))

    def _need_module(self, module: str) -> None:
        self.modules.add(module)
        self._need_imports(self.known.module(module).tree)

    def _need(self, module: str, name: str) -> None:
        """A definition and, unless it is withheld, what it needs itself."""
        if module.split(".")[0] != "shared" or self.whole(module) or (module, name) in self.kept:
            return
        self.kept.add((module, name))
        self._enter(module)
        if not self.withheld(module, name):
            for node in self._top(module):
                if name in _binds(node):
                    self._follow(module, node)

    def _statements(self, module: str) -> list[ast.stmt]:
        """Those of a module; a table whose rows say `lesson="NN"` without those of later ones."""
        return [self._taught(each) for each in self.known.module(module).tree.body]

    def _taught(self, node: ast.stmt) -> ast.stmt:
        match node:
            case ast.Assign(targets=targets, value=ast.Tuple(elts=[ast.Call(), *_] as rows)):
                own = [each for each in rows if self._has_come(each)]
                if len(own) < len(rows):
                    return ast.copy_location(ast.Assign(targets, ast.Tuple(own, ast.Load())), node)
        return node

    def _has_come(self, row: Any) -> bool:
        lesson = [each.value for each in getattr(row, "keywords", ()) if each.arg == "lesson"]
        return all(int(ast.literal_eval(each)) <= self.through for each in lesson)

    def _follow(self, module: str, node: ast.stmt) -> None:
        source = self.known.module(module)
        self._need_imports(node)
        modules = dict[str, str]()
        for name in _used(node):
            if name in source.imports:
                self._hand_on(*source.imports[name])
                origin = self.known.resolve(*source.imports[name])
                if origin[1]:
                    self._need(*origin)
                else:
                    modules[name] = origin[0]
            elif name in source.definitions:
                self._need(module, name)
        self._need_attributes(node, modules)

    def _in_part(self, module: str, text: str) -> str:
        """The text of a module with the kept statements alone, and the withheld ones replaced."""
        lines, done, parts = text.splitlines(), 0, list[str]()
        kept = [node for node in self._top(module) if self._stays(module, node)]
        used = {name for node in kept for name in _used(node)}
        used |= {name for home, name in self.kept if home == module}  # handed on to others
        marked = False
        whole = self.known.module(module).tree.body
        for number, (node, before_cut) in enumerate(zip(self._top(module), whole, strict=True)):
            before, done = lines[done : _first_line(node) - 1], node.end_lineno or 0
            own = lines[_first_line(node) - 1 : done]
            if node is not before_cut:
                own = _with_these(node, lines)
            names = [each for each in _binds(node) if (module, each) in self.kept]
            if isinstance(node, IMPORTS):
                parts += [*(line for line in before if not line), *_shortened(node, own, used)]
            elif any(self.withheld(module, each) for each in names):
                id = self.answers[module, names[0]]
                parts += ["", *YOURS.format(name=names[0], id=id).splitlines(), ""]
                marked = True
            elif node in kept:
                parts += [*before, *own]
            if number == 0:
                parts += ["", "MARK"]
        line = ["from shared.exercises.withheld import withheld"] if marked else []
        at = parts.index("MARK")
        text = "\n".join([*parts[:at], *line, *parts[at + 1 :]])
        return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"

    def _stays(self, module: str, node: ast.stmt) -> bool:
        names = _binds(node)
        if isinstance(node, IMPORTS) or any(self.withheld(module, each) for each in names):
            return False
        return not names or any((module, each) in self.kept for each in names)


# Nobody changes a tree: what has been found in one for an edition holds for the next week's.
_tree = cache(parsed)


@cache
def _imported(tree: ast.AST) -> list[tuple[str, str, str]]:
    nodes = (each for each in _statements_in(tree) if isinstance(each, IMPORTS))
    return [found for each in nodes for found in imported_by(each)]


def _statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """A tenth of all nodes: no expression imports anything."""
    yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, block, ()):
            yield from _statements_in(each)


@cache
def _attributes(tree: ast.AST) -> list[Place]:
    """(name, attribute) of all that is taken of a name."""
    nodes = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute))
    return [(each.value.id, each.attr) for each in nodes if isinstance(each.value, ast.Name)]


@cache
def _binds(node: ast.stmt) -> list[str]:
    return [] if isinstance(node, IMPORTS) else bound_by(node)


def _first_line(node: Any) -> int:
    """The line on which a statement begins, with its decorators."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _with_these(node: Any, lines: list[str]) -> list[str]:
    """The lines of a tuple with its elements' own lines."""
    own = (lines[each.lineno - 1 : each.end_lineno] for each in node.value.elts)
    parts = [line for each in own for line in (*each[:-1], each[-1].rstrip(",") + ",")]
    return [f"{node.targets[0].id} = (", *parts, ")"]


@cache
def _used(node: ast.AST) -> set[str]:
    """Names that a statement uses, those of annotations in quotes as well."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    quoted = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    return names | {each for each in quoted if isinstance(each, str) and each.isidentifier()}


def _shortened(node: Any, own: list[str], used: set[str]) -> list[str]:
    """An import statement with the names alone that are used."""
    names = [a for a in node.names if (a.asname or a.name.split(".")[0]) in used]
    if len(names) == len(node.names) or getattr(node, "module", "") == "__future__":
        return own
    if not names:
        return []
    short = ast.Import(names)
    if isinstance(node, ast.ImportFrom):
        short = ast.ImportFrom(node.module, names, node.level)
    return [ast.unparse(short)]
