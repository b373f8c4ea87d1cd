"""Reads an exercise cell without running it: what an answer has no business with, by line.

A flag takes no points. It asks an instructor to look, and says where.
"""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from solutions.grading.intake.sources import parsed


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_FLAGS = 6
HARMLESS = _words(
    "torch math cmath typing typing_extensions collections itertools functools dataclasses "
    "contextlib copy random time datetime numpy jaxtyping einops abc enum operator numbers "
    "statistics string bisect heapq warnings logging re fractions decimal textwrap __future__ "
    "matplotlib tqdm json hashlib struct types weakref"
)
# A lesson whose setup imports one of these is about files, and so may its answers be.
FILES = _words("os pathlib tempfile io shutil json struct zlib pickle")
# Parts of torch that load code, start processes, or change what torch's functions do.
NOT_OF_TORCH = (
    "torch._C",
    "torch._dynamo",
    "torch.hub",
    "torch.library",
    "torch.multiprocessing",
    "torch.overrides",
    "torch.package",
    "torch.testing._internal",
    "torch.utils._python_dispatch",
    "torch.utils.cpp_extension",
)
MODULES = _words(
    "os sys subprocess socket ctypes threading multiprocessing importlib builtins inspect gc "
    "atexit pickle shutil io weakref traceback linecache pathlib glob tempfile urllib http "
    "asyncio platform"
)
CALLS = _words(
    "__import__ exec eval compile open globals locals vars breakpoint input get_ipython exit "
    "quit memoryview"
)
OF_OS = _words("_exit abort fork forkpty kill killpg popen putenv system")
FRAMES = _words(
    "tb_frame tb_next f_back f_locals f_globals f_code f_builtins gi_frame gi_code cr_frame "
    "ag_frame co_consts co_code user_ns"
)
COMMON = _words(
    "__init__ __call__ __len__ __iter__ __next__ __getitem__ __setitem__ __contains__ __enter__ "
    "__exit__ __repr__ __str__ __getattr__ __setattr__ __post_init__ __name__ __class__ __doc__ "
    "__version__ __all__ __annotations__ __slots__ __cause__ __context__"
)


@dataclass
class Bound:
    """What the names of a cell stand for: the dotted name of an import, "" for the rest."""

    names: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> set[str]:
        """The dotted names of everything that is imported, and of the modules it comes from."""
        full = {name for name in self.names.values() if name}
        return full | {name.rpartition(".")[0] for name in full} | {n.split(".")[0] for n in full}


@dataclass(frozen=True, order=True)
class Flag:
    """What needs a look, and in which line; `imports` names the module, where it is an import."""

    line: int
    what: str
    imports: str = ""

    def __str__(self) -> str:
        return f"line {self.line} {self.what}"


def audit(source: str, setup: str, exercises: Collection[str] = ()) -> tuple[Flag, ...]:
    """What needs a look in a cell, given the lesson's setup cell; nothing for broken Python.

    `exercises` are the names that the lesson asks for: the course's modules hold the answers.
    """
    tree, start = _parse(source), _parse(setup)
    if tree is None or start is None:
        return ()
    known, own = bound_by(start), bound_by(tree)
    visitor = _Visitor(known, Bound({**known.names, **own.names}), exercises)
    visitor.visit(tree)
    return tuple(sorted({*visitor.found, *_rebound(tree, known)})[:MAX_FLAGS])


def _parse(source: str) -> ast.Module | None:
    try:
        return parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def bound_by(tree: ast.AST) -> Bound:
    """Names that imports and assignments anywhere in a piece of code bind."""
    bound = Bound()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound.names.update(_imported(node))
    for _line, name in _top_level_names(tree):
        bound.names.setdefault(name, "")
    return bound


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(name, dotted name) for everything that an import statement binds."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module or '.'}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            yield alias.name.split(".")[0], alias.name.split(".")[0]


def _top_level_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that statements outside functions and classes bind, imports left out."""
    waiting = list(getattr(tree, "body", []))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.lineno, node.id
        if not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _rebound(tree: ast.Module, known: Bound) -> list[Flag]:
    """Flags for names of the setup cell that get another meaning."""
    found = [(line, name) for line, name in _top_level_names(tree) if name in known.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found += [(node.lineno, name) for name in node.names if name in known.names]
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [
                (node.lineno, name)
                for name, dotted in _imported(node)
                if known.names.get(name, dotted) != dotted
            ]
    return [Flag(line, f"gives {name} another meaning") for line, name in found]


class _Visitor(ast.NodeVisitor):
    """Collects flags."""

    def __init__(self, known: Bound, bound: Bound, exercises: Collection[str]) -> None:
        self.known, self.bound, self.exercises = known, bound, exercises
        self.known_modules = known.modules
        self.about_files = not self.known_modules.isdisjoint(FILES - {"json"})
        self.found: list[Flag] = []

    def _flag(self, node: ast.AST, what: str, imports: str = "") -> None:
        self.found.append(Flag(getattr(node, "lineno", 1), what, imports))

    def _dotted(self, node: ast.AST) -> str:
        """ "torch.nn.functional.relu" for F.relu; "" for what does not start at an import."""
        if isinstance(node, ast.Name):
            return self.bound.names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            start = self._dotted(node.value)
            return f"{start}.{node.attr}" if start else ""
        if isinstance(node, ast.Subscript):
            return self._dotted(node.value)
        return ""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imports(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imports(node, f"{node.module or '.'}.{alias.name}")

    def _imports(self, node: ast.AST, dotted: str) -> None:
        root = dotted.split(".")[0]
        if root in ("shared", "solutions"):
            fine = dotted in self.known.names.values()
        elif root in FILES and self.about_files:
            fine = True
        elif root in HARMLESS:
            fine = not dotted.startswith(NOT_OF_TORCH)
        else:
            parent = dotted.rpartition(".")[0]
            fine = dotted in self.known_modules or parent in self.known_modules - {""}
        if not fine:
            why = ", which can hold answers" if root == "shared" else ""
            self._flag(node, f"imports {dotted}{why}", imports=dotted)

    def visit_Name(self, node: ast.Name) -> None:
        known = node.id in CALLS and node.id not in self.bound.names
        known = known and not (node.id == "open" and self.about_files)
        if known or (_is_dunder(node.id) and node.id not in COMMON):
            self._flag(node, f"uses {node.id}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        start = self._dotted(node.value)
        if node.attr in FRAMES or (_is_dunder(node.attr) and node.attr not in COMMON):
            self._flag(node, f"uses .{node.attr}")
        elif start == "os" and (node.attr in OF_OS or node.attr.startswith(("exec", "spawn"))):
            self._flag(node, f"uses os.{node.attr}")
        else:
            self._reaches(node, start, node.attr)
        self.generic_visit(node)

    def _reaches(self, node: ast.AST, start: str, name: str) -> None:
        """Flag `start.name` where it is a part that an answer has no business with."""
        if start.split(".")[0] == "shared" and name in self.exercises:
            self._flag(node, f"reaches for {start}.{name}, an answer of the course")
        elif start and self._hidden(start, name):
            self._flag(node, f"reaches for {start}.{name}")

    def _hidden(self, start: str, name: str) -> bool:
        dotted = f"{start}.{name}"
        if dotted in self.known_modules:
            return False
        if start.split(".")[0] == "torch" and dotted.startswith(NOT_OF_TORCH):
            return True
        return start.split(".")[0] in ("torch", "shared", "math", "random") and name in MODULES

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if isinstance(text, str) and (text in FRAMES or (_is_dunder(text) and text not in COMMON)):
            self._flag(node, f"names {text!r} in a text")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        target = self._dotted(node.args[0]) if node.args else ""
        if name in ("setattr", "delattr") and target:
            self._flag(node, f"changes {target}")
        elif name == "getattr" and target:
            if _is_text(node.args[1:2]):
                self._reaches(node, target, str(ast.literal_eval(node.args[1])))
            else:
                self._flag(node, f"reads a computed name of {target}")
        elif name == "type" and len(node.args) == 3:
            self._flag(node, "builds a class by calling type")
        self.generic_visit(node)

    def _changes(self, targets: list[ast.expr]) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                self._changes(target.elts)
            elif isinstance(target, ast.Attribute | ast.Subscript):
                dotted = self._dotted(target)
                if dotted and not dotted.startswith("torch.backends."):
                    self._flag(target, f"changes {dotted}")

    def visit_Assign(self, node: ast.Assign) -> None:
        self._changes(node.targets)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._changes([node.target])
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._changes([node.target])
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._changes(node.targets)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for inner in node.body:
            names = [inner.name] if isinstance(inner, ast.FunctionDef) else []
            if isinstance(inner, ast.Assign):
                names = [each.id for each in inner.targets if isinstance(each, ast.Name)]
            for name in names:
                if _is_dunder(name) and name not in COMMON:
                    self._flag(inner, f"defines {name}")
        if node.keywords:
            self._flag(node, f"gives {node.name} a metaclass or keywords")
        self.generic_visit(node)


def _is_dunder(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


def _is_text(arguments: list[ast.expr]) -> bool:
    return bool(arguments) and isinstance(arguments[0], ast.Constant)
