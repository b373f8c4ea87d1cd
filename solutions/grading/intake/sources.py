"""Python sources as trees: what a piece of code binds, without running it."""

import ast
import contextlib
import gc
import threading
import warnings
from collections.abc import Generator, Iterable, Iterator
from importlib import import_module

STARRED = ("typing", "math", "itertools", "functools", "collections")  # `import *` is seen through
Definition = ast.FunctionDef | ast.ClassDef
_one_at_a_time = threading.Lock()


def parsed(source: str) -> ast.Module:
    """`ast.parse` for threads: they take turns, and nobody hears of "\\d" in a student's text.

    CPython 3.11 counts how deep a tree is for all threads together; two that build trees at once
    may end in a SystemError (github.com/python/cpython/issues/106905). And what catch_warnings
    puts back, it puts back for the whole process.
    """
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Trees hold no circles, and a collector walks all that are kept again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def bound_by(node: ast.stmt) -> list[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, Definition | ast.AsyncFunctionDef):
        return [node.name]
    stores = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return [n.id for n in stores if isinstance(n.ctx, ast.Store)]


def bound_at(node: ast.AST) -> list[str]:
    """The names that a node itself gives something."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [each.asname or each.name.split(".")[0] for each in names]
        case ast.MatchMapping(rest=str(name)):
            return [name]
        case (
            ast.MatchAs() | ast.MatchStar() | ast.ExceptHandler() | ast.ClassDef()
            | ast.FunctionDef() | ast.AsyncFunctionDef()
        ):  # fmt: skip
            return [node.name] if node.name else []
    return []


def imported_by(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(name that is bound, module, name in the module or "") for what an import statement binds."""
    if isinstance(node, ast.ImportFrom):
        yield from ((a.asname or a.name, node.module or ".", a.name) for a in node.names)
    for each in node.names if isinstance(node, ast.Import) else ():
        # import torch.utils binds torch, and with "as" torch.utils
        module = each.name if each.asname else each.name.split(".")[0]
        yield each.asname or module, module, ""


def all_imported(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Name to dotted name for everything that these nodes import."""
    found = (each for node in nodes for each in imported_by(node))
    return {local: f"{module}.{name}" if name else module for local, module, name in found}


def starred(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Name to dotted name for what `from typing import *` and the like bind."""
    found = (n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.names[0].name == "*")
    modules = [import_module(each) for each in found if each in STARRED]
    return {
        name: f"{module.__name__}.{name}"
        for module in modules
        for name in getattr(module, "__all__", vars(module))
        if not name.startswith("_")
    }
