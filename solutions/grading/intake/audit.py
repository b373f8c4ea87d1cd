"""Reads an exercise cell without running it: what no answer needs, by line.

What is flagged has no points until an instructor has looked at it. The list is short on purpose:
it names the usual shortcuts, and whoever works at it finds another (see solutions/README.md).
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from solutions.grading.intake.sources import bound_by, imported_by, parsed
from solutions.grading.results import Lesson


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
FILES = _words("os pathlib tempfile io shutil struct zlib pickle")
# Parts of torch that load code, start processes, or change what torch's functions do.
NOT_OF_TORCH = (
    *("torch._C", "torch._dynamo", "torch.hub", "torch.library", "torch.multiprocessing"),
    *("torch.overrides", "torch.package", "torch.testing._internal"),
    *("torch.utils._python_dispatch", "torch.utils.cpp_extension"),
)
MODULES = _words("os sys subprocess ctypes threading importlib builtins inspect gc atexit platform")
CALLS = _words(
    "__import__ exec eval compile open globals locals vars breakpoint input get_ipython exit quit"
)
COMMON = _words(
    "__init__ __call__ __len__ __iter__ __next__ __getitem__ __setitem__ __contains__ __enter__ "
    "__exit__ __repr__ __str__ __getattr__ __setattr__ __post_init__ __name__ __class__ __doc__ "
    "__version__ __all__ __annotations__ __slots__ __cause__ __context__"
)
FRAMES = _words(
    "tb_frame tb_next f_back f_locals f_globals f_code f_builtins gi_frame gi_code cr_frame "
    "cr_code ag_frame ag_code co_code co_consts"
)
STARTS = ("exec", "spawn", "fork", "kill", "popen", "system", "_exit", "abort")


@dataclass(frozen=True, order=True)
class Flag:
    """What needs a look, and in which line; `spoils`: it changes things for other exercises."""

    line: int
    what: str
    spoils: bool = False

    def __str__(self) -> str:
        return f"line {self.line} {self.what}"


def audit(source: str, lesson: Lesson, id: str) -> tuple[Flag, ...]:
    """What needs a look in the cell of an exercise; nothing for broken Python."""
    try:
        tree, start = parsed(source), parsed(lesson.setup)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    known = {name: "" for node in start.body for name in bound_by(node)} | _imports(start)
    try:
        found = {*_found(tree, known, lesson, id)}
    except (RecursionError, IndexError):  # getattr without arguments
        return (Flag(1, "cannot be read"),)
    return tuple(sorted(found)[:MAX_FLAGS])


def _imports(tree: ast.AST) -> dict[str, str]:
    """Name to dotted name for everything that imports anywhere in a piece of code bind."""
    return {local: path for node in ast.walk(tree) for local, path in _imported(node)}


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    for local, module, name in imported_by(node):
        yield local, f"{module}.{name}" if name else module


def _found(tree: ast.Module, known: dict[str, str], lesson: Lesson, id: str) -> Iterator[Flag]:
    names = {**known, **_imports(tree)}
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= arguments
    for name in own & {n for n, path in names.items() if path.startswith("shared.")}:
        names[name] = ""  # something of the answer's own, under a name that the setup cell has, too
    about_files = any(each.split(".")[0] in FILES for each in known.values())

    def dotted(node: ast.AST) -> str:
        """ "torch.nn.functional.relu" for F.relu; "" for what does not start at an import."""
        if isinstance(node, ast.Name):
            return names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            begin = dotted(node.value)
            return f"{begin}.{node.attr}" if begin else ""
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            begin, name = dotted(node.args[0]), node.args[1]
            return f"{begin}.{name.value}" if begin and isinstance(name, ast.Constant) else ""
        return dotted(node.value) if isinstance(node, ast.Subscript) else ""

    answers = {each.name for each in lesson.exercises}
    yield from _rebound(tree, known)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        for what, spoils in (
            *_of_imports(node, known, about_files),
            *_of_names(node, own, about_files),
            *_of_changes(node, dotted),
        ):
            yield Flag(line, what, spoils)
        if isinstance(node, ast.Attribute | ast.Name | ast.Call) and (path := dotted(node)):
            if path.startswith("shared.") and path.rpartition(".")[2] in answers:
                yield Flag(line, f"reaches for {path}, an answer of the course")
            elif path.startswith(NOT_OF_TORCH) and path not in known.values():
                yield Flag(line, f"reaches for {path}", spoils=True)
            elif path.startswith(lesson.forbidden.get(id, ())):
                yield Flag(line, f"uses {path}, which is the exercise itself")


Said = tuple[str, bool]


def _of_imports(node: ast.AST, known: dict[str, str], about_files: bool) -> Iterator[Said]:
    for name, path in _imported(node):
        root = path.split(".")[0]
        ours = root in ("shared", "solutions")
        taught = path in known.values() or (
            not ours and any(each.startswith(f"{path}.") for each in known.values())
        )
        fine = not ours and (root in HARMLESS or (root in FILES and about_files))
        if not taught and (not fine or path.startswith(NOT_OF_TORCH)):
            why = ", which can hold answers" if root == "shared" else ""
            yield f"imports {path}{why}", root in MODULES - FILES
        if known.get(name, path) != path:
            yield f"gives {name} another meaning", True


def _of_names(node: ast.AST, own: set[str], about_files: bool) -> Iterator[Said]:
    """Names that reach what a program should not: frames, modules, code made of text."""
    name = ""
    if isinstance(node, ast.Name):
        if node.id in CALLS - own and not (node.id == "open" and about_files):
            yield f"uses {node.id}", node.id not in ("open", "exit", "quit", "input")
        name = node.id
    elif isinstance(node, ast.Attribute):
        name = node.attr
        if name in MODULES and not (name == "os" and about_files):
            yield f"reaches for .{name}", True
        elif isinstance(node.value, ast.Name) and node.value.id == "os" and name.startswith(STARTS):
            yield f"uses os.{name}", False
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        name = node.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value
    if name in FRAMES:
        yield f"uses {name}", True
    if (
        len(name) > 4
        and name[:2] == name[-2:] == "__"
        and name not in COMMON
        and name.isidentifier()
    ):
        yield f"uses {name}", True


def _of_changes(node: ast.AST, dotted: Callable[[ast.AST], str]) -> Iterator[Said]:
    """What was imported given other attributes, and attributes whose name is computed."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    else:
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
    for target in [part for each in targets for part in getattr(each, "elts", [each])]:
        path = dotted(target) if isinstance(target, ast.Attribute | ast.Subscript) else ""
        if path and not path.startswith("torch.backends."):
            yield f"changes {path}", True
    if isinstance(node, ast.ClassDef) and node.keywords:
        yield f"gives {node.name} a metaclass or keywords", True
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return
    path = dotted(node.args[0]) if node.args else ""
    if node.func.id in ("setattr", "delattr") and path:
        yield f"changes {path}", True
    elif node.func.id == "getattr" and path and not isinstance(node.args[1], ast.Constant):
        yield f"reads a computed name of {path}", True
    elif node.func.id == "type" and len(node.args) == 3:
        yield "builds a class by calling type", True


def _rebound(tree: ast.Module, known: dict[str, str]) -> Iterator[Flag]:
    """Names of the setup cell that get another meaning."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Global):
            continue
        for name in known.keys() & set(node.names):
            yield Flag(node.lineno, f"gives {name} another meaning", spoils=True)
    for node in tree.body:
        for name in known.keys() & set(bound_by(node)):
            yield Flag(node.lineno, f"gives {name} another meaning", spoils=True)
