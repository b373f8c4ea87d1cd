"""Reads an exercise cell without running it: what no answer needs, by line.

What is flagged has no points until an instructor has looked at it. The lists (names.py) are short
on purpose: the usual shortcuts, and whoever works at it finds another (see solutions/README.md).
"""

import ast
from collections import Counter
from collections.abc import Iterator

from solutions.grading.intake.literals import Literals
from solutions.grading.intake.names import (
    BACKWARD,
    CALLS,
    COMMON,
    FILES,
    FINE_OF_TORCH,
    FRAMES,
    GETTERS,
    HARMLESS,
    HELD,
    MADE_BY,
    MODULES,
    NOT_CALLED,
    NOT_OF_ANY,
    STARTS,
    TQDM,
)
from solutions.grading.intake.sources import STARRED, all_imported, bound_by, parsed, starred
from solutions.grading.results import Flag, Lesson

MAX_FLAGS = 6
MAX_DOTS = 30  # of a path that begins at an import


def audit(source: str, lesson: Lesson, id: str) -> tuple[Flag, ...]:
    """What needs a look in the cell of an exercise; nothing for broken Python."""
    try:
        tree, start = parsed(source), parsed(lesson.setup)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    try:
        found = set(_Cell(tree, start, lesson, id).flags())
    except RecursionError:  # of dotted(), on a chain of attributes
        return (Flag(1, "cannot be read"),)
    return tuple(sorted(found)[:MAX_FLAGS])


class _Cell:
    """An exercise cell; `known` are the names of the setup cell and what they stand for."""

    def __init__(self, tree: ast.Module, start: ast.Module, lesson: Lesson, id: str) -> None:
        self.body, self.nodes = tree.body, list(ast.walk(tree))
        self.known = {name: "" for node in start.body for name in bound_by(node)}
        self.known |= all_imported(ast.walk(start))
        self.taught = set(self.known.values())
        self.about_files = any(each.split(".")[0] in FILES for each in self.taught)
        self.answers = {each.name for each in lesson.exercises}
        self.forbidden = lesson.forbidden.get(id, ())
        self.last_names = tuple(x for path in self.forbidden if (x := path.rpartition(".")[2]))
        # An argument is as good as a second value for its name.
        stored = Counter({node.arg for node in self.nodes if isinstance(node, ast.arg)})
        names = [node for node in self.nodes if isinstance(node, ast.Name)]
        stored.update(node.id for node in names if isinstance(node.ctx, ast.Store))
        self.own, self.read = {*stored}, {"*", *(node.id for node in names)}
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.classes = {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.called = {call.func for call in calls}
        self.plainly = {
            call.func for call in calls if all(isinstance(x, ast.Constant) for x in call.args)
        }
        self.names = starred(self.nodes) | self.known | all_imported(self.nodes)
        self.paths = dict[ast.AST, str]()
        for name in self.own & self.names.keys():
            if self.names[name].startswith("shared."):
                self.names[name] = ""  # the answer's own, under a name that the setup has, too
        self._follow_aliases(stored)
        self.texts = Literals(start.body, self.nodes)
        self.harmless = self._harmless()

    def _harmless(self) -> set[ast.AST]:
        """Nodes that honest answers have, in spite of their names."""
        asked = (each for each in self.nodes if getattr(each, "attr", "") == BACKWARD)
        asked = [each for each in asked if self.dotted(each) == f"torch._C.{BACKWARD}"]
        harmless = {part for each in asked for part in (each, *ast.iter_child_nodes(each))}
        for node in self.nodes:
            match node:  # an attribute of one's own, by its name
                case ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id="self"), attr="__dict__") as own,
                    slice=ast.Constant(),
                ):
                    harmless.add(own)
        return harmless

    def _follow_aliases(self, stored: Counter[str]) -> None:
        """Let a name that is given an import, or what an import has, and nothing else, be that."""
        once = {name for name, count in stored.items() if count == 1}
        for node in self.nodes:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Attribute())
                    | ast.NamedExpr(target=ast.Name(id=name), value=ast.Name() | ast.Attribute())
                ) if name in once and name not in self.names:
                    self.names[name] = self.dotted(node.value)
        self.paths.clear()

    def flags(self) -> Iterator[Flag]:
        """All that needs a look."""
        binds = [(node, bound_by(node)) for node in self.body]
        binds += [(node, node.names) for node in self.nodes if isinstance(node, ast.Global)]
        for node, names in binds:
            for name in self.known.keys() & set(names):
                yield Flag(node.lineno, f"gives {name} another meaning", spoils=True)
        more = self._paths, self._changes
        for node in self.nodes:
            line = getattr(node, "lineno", 1)
            for look in (self._imports, self._names, self._getters, self._formats, *more):
                yield from (Flag(line, what, spoils) for what, spoils in look(node))

    def dotted(self, node: ast.AST) -> str:
        """ "torch.nn.functional.relu" for F.relu; "" for what does not start at an import."""
        if node not in self.paths:
            self.paths[node] = self._dotted(node)
        return self.paths[node]

    def _dotted(self, node: ast.AST) -> str:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, "")
            case (
                ast.Attribute(value=value, attr=name)
                | ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=name), *_])
            ):
                begin = self.dotted(value)
                return f"{begin}.{name}" if begin and begin.count(".") < MAX_DOTS else ""
            case ast.Subscript(value=value) | ast.NamedExpr(value=value):
                return self.dotted(value)
        return ""

    def _is_taught(self, path: str) -> bool:
        """Whether the setup cell names it, or what it is a part of."""
        return any(f"{path}.".startswith(f"{each}.") for each in self.taught if each)

    def _is_no_tool(self, path: str) -> bool:
        """Whether it is a part of a harmless module that no answer needs."""
        parts = path.split(".")
        if parts[0] == "pickle" and "pickle" in self.taught:
            return False
        if parts[0] == "tqdm":
            return not set(parts) <= TQDM
        fine = path == "torch._utils" or path.startswith(FINE_OF_TORCH)
        return path.startswith(NOT_OF_ANY) and not fine

    def _imports(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        for name, path in all_imported([node]).items():
            if self.known.get(name, path) != path:
                yield f"gives {name} another meaning", True
        for each in node.names if isinstance(node, ast.Import) else ():
            yield from self._import(each.asname or each.name.split(".")[0], each.name)
        for name, path in all_imported([node]).items() if isinstance(node, ast.ImportFrom) else ():
            yield from self._import(name, path)

    def _import(self, name: str, path: str) -> Iterator[tuple[str, bool]]:
        root = path.split(".")[0]
        ours = root in ("shared", "solutions", "lessons")
        begins = not ours and any(each.startswith(f"{path}.") for each in self.taught)
        fine = not ours and (root in HARMLESS or (root in FILES and self.about_files))
        fine = fine and (name != "*" or path[:-2] in STARRED)  # nobody sees what is used of it
        parts = path.split(".")[2 if path.startswith("torch.types") else 1 :]  # warnings.sys
        fine = fine and not {part.lstrip("_") for part in parts} & (MODULES | HELD)
        if not (path in self.taught or begins) and (not fine or self._is_no_tool(path)):
            why = ", which can hold answers" if root in ("shared", "lessons") else ""
            yield f"imports {path}{why}", root in MODULES - FILES and name in self.read

    def _names(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """Names that reach what a program should not: frames, modules, code made of text."""
        is_attribute = not isinstance(node, ast.Name | ast.FunctionDef | ast.AsyncFunctionDef)
        match node:
            case ast.Name(id=name):
                if name in CALLS - self.own and not (name == "open" and self.about_files):
                    yield f"uses {name}", name not in ("open", "exit", "quit", "input")
            case (
                ast.Attribute(value=value, attr=name)
                | ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(str(name)), *_])
            ):
                if getattr(value, "id", "") == "os" and name.startswith(STARTS):
                    yield f"uses os.{name}", False
                elif name in HELD and self.dotted(value) and self.dotted(node) != "torch.types":
                    yield f"reaches for .{name}", True
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args) if (
                self.names.get(called, called).rpartition(".")[2] in GETTERS
            ):
                texts = [each.value for each in args if isinstance(each, ast.Constant)]
                name = ".".join(each for each in texts if isinstance(each, str))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.Constant(value=str(name)):
                is_attribute = False
            case ast.MatchClass(kwd_attrs=attributes):
                name = ".".join(attributes)
            case _:
                return
        for part in name.split(".") if node not in self.harmless else ():  # attrgetter takes a path
            module = part.lstrip("_") in MODULES and not (part == "os" and self.about_files)
            if module and is_attribute:
                yield f"reaches for .{part}", True
            dunder = len(part) > 4 and part[:2] == part[-2:] == "__" and part.isidentifier()
            if part in FRAMES or (dunder and part not in COMMON):
                yield f"uses {part}", True

    def _getters(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """What reads an attribute whose name nobody sees."""
        match node:
            case ast.Name(id="getattr") if node not in self.called:
                yield "uses getattr as a value", True
                return
            case ast.Name():
                name = self.dotted(node).rpartition(".")[2]
            case ast.Attribute(attr=name):
                pass
            case ast.MatchClass(kwd_attrs=attributes) if GETTERS & set(attributes):
                name = "attrgetter"
            case _:
                return
        if name in GETTERS and node not in self.plainly:
            yield f"reads a computed name by {name}", True

    def _formats(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """What formats by a text that can read what no answer needs."""
        match node:
            case (
                ast.Attribute(value=text, attr="format" | "format_map")
                | ast.Call(
                    func=ast.Name(id="getattr"),
                    args=[text, ast.Constant(value="format" | "format_map"), *_],
                )
            ) if what := self.texts.formats_by(text):
                yield f"formats by {what}", False
            case ast.MatchClass(kwd_attrs=names) if {"format", "format_map"} & set(names):
                yield "formats by a computed text", False

    def _paths(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """What belongs to a module and is no tool for an answer."""
        yield from self._path(node, "" if isinstance(node, ast.Subscript) else self.dotted(node))

    def _path(self, node: ast.AST, path: str) -> Iterator[tuple[str, bool]]:
        ours = path.startswith(("shared.", "lessons."))
        if ours and path.rpartition(".")[2] in self.answers:
            yield f"reaches for {path}, an answer of the course", False
        elif path.startswith("lessons.") and not self._is_taught(path):
            yield f"reaches for {path}, which can hold answers", False
        elif self._is_no_tool(path) and path not in self.taught and node not in self.harmless:
            yield f"reaches for {path}", True
        elif path.startswith(NOT_CALLED) and node in self.called:
            yield f"calls {path}", True
        elif self._is_forbidden(node, path):
            named = node.kwd_attrs[0] if isinstance(node, ast.MatchClass) else path
            yield f"uses {named}, which is the exercise itself", False

    def _is_forbidden(self, node: ast.AST, path: str) -> bool:
        """Whether it is what the exercise asks for, under this path or another of its library."""
        if isinstance(node, ast.MatchClass):
            return any(each.startswith(self.last_names) for each in node.kwd_attrs)
        roots = tuple(each.split(".")[0] for each in self.forbidden)
        parts = path.split(".")
        if path.startswith(roots) and any(each in self.last_names for each in parts):
            return True
        for module, _, begin in (each.rpartition(".") for each in self.forbidden):
            inside = begin and path.startswith(f"{module}.")
            if inside and any(each.startswith(begin) for each in parts):
                return True
        return path.startswith(self.forbidden)

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """What was imported given other attributes, and attributes whose name is computed."""
        match node:
            case ast.Attribute(ctx=ctx) | ast.Subscript(ctx=ctx) if not isinstance(ctx, ast.Load):
                path = self.dotted(node)
                if path and not path.startswith("torch.backends."):
                    yield f"changes {path}", True
            case ast.ClassDef(name=name, keywords=[_, *_]):
                yield f"gives {name} a metaclass or keywords", True
            case ast.ClassDef(name=name, bases=bases):
                made = (each for each in bases if isinstance(each, ast.Call))
                if any(self.dotted(each.func) not in MADE_BY for each in made):
                    yield f"lets {name} derive from what a call gives", True
            case ast.Call(func=ast.Name(id="type"), args=[_, _, _]):
                yield "builds a class by calling type", True
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[value, *name]):
                of_class = getattr(value, "id", "") in self.classes
                if path := self.dotted(value):
                    yield f"changes {path}", True
                elif name and self.texts.can_be_special(name[0], of_class):
                    yield "sets a special or a computed name by setattr", True
            case ast.Call(func=ast.Name(id="getattr"), args=[value, *name]):
                if (path := self.dotted(value)) and not isinstance(name[0], ast.Constant):
                    if (names := self.texts.attributes(name[0])) is None:
                        yield f"reads a computed name of {path}", True
                    for each in names or ():
                        yield from self._path(node, f"{path}.{each}")
