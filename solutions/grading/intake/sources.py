"""Python sources as trees: what a file binds at its top level, and code under other names."""

import ast
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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


def copied(node: Any) -> Any:
    """A tree to change, without its places in the text; copy.deepcopy takes five times as long."""
    if isinstance(node, list):
        return [copied(each) for each in node]
    if isinstance(node, ast.AST):
        return type(node)(**{name: copied(value) for name, value in ast.iter_fields(node)})
    return node


@dataclass(frozen=True)
class Module:
    """The top level of a source file: what each name is bound to."""

    name: str
    imports: Mapping[str, tuple[str, str]]  # local name -> (module, name in it or "")
    definitions: Mapping[str, ast.stmt]
    tree: ast.Module

    @classmethod
    def read(cls, name: str, source: str) -> "Module":
        """Parse a module; where a name is defined several times, the last one counts."""
        tree = parsed(source)
        imports: dict[str, tuple[str, str]] = {}
        definitions: dict[str, ast.stmt] = {}
        for node in tree.body:
            imports |= {local: (module, name) for local, module, name in imported_by(node)}
            definitions |= dict.fromkeys(bound_by(node), node)
        return cls(name, imports, definitions, tree)


def bound_by(node: ast.stmt) -> list[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, Definition):
        return [node.name]
    stores = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return [n.id for n in stores if isinstance(n.ctx, ast.Store)]


def imported_by(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(name that is bound, module, name in the module or "") for what an import statement binds."""
    if isinstance(node, ast.ImportFrom):
        yield from ((a.asname or a.name, node.module or ".", a.name) for a in node.names)
    for each in node.names if isinstance(node, ast.Import) else ():
        # import torch.utils binds torch, and with "as" torch.utils
        module = each.name if each.asname else each.name.split(".")[0]
        yield each.asname or module, module, ""


class WithoutAnnotations(ast.NodeTransformer):
    """Drop the annotations of functions: they would only draw more of the course into the cell."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        for arg in _arguments(node.args):
            arg.annotation = None
        return self.generic_visit(node)


class Renamed(ast.NodeTransformer):
    """Give global names the names that they have in the cell; what shadows them stays."""

    def __init__(
        self, names: Mapping[str, str], attribute: Callable[[str, str], str | None]
    ) -> None:
        """`attribute("right", "split_heads")` is the new name of `right.split_heads`, if any."""
        self.names, self.attribute = names, attribute
        self.given: set[str] = set()  # names of a module's own that a function gives a value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = (
            self.attribute(node.value.id, node.attr) if isinstance(node.value, ast.Name) else None
        )
        if name and isinstance(node.ctx, ast.Store):
            self.given.add(name)
        return ast.Name(name, node.ctx) if name else self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.Global([self.names.get(name, name) for name in node.names])

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.Nonlocal([self.names.get(name, name) for name in node.names])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        inner = self.without(_shadows(node))
        node.args = inner.visit(node.args)
        node.body = [inner.visit(each) for each in node.body]
        if inner.given:
            node.body.insert(0, ast.Global(sorted(inner.given)))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return self.without(each.arg for each in _arguments(node.args)).generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Names assigned in a class body are attributes; its methods still see the globals."""
        fields = [
            n for each in node.body if not isinstance(each, Definition) for n in bound_by(each)
        ]
        outer = self.without(fields)
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        node.bases = [self.visit(each) for each in node.bases]
        node.keywords = [self.visit(each) for each in node.keywords]
        node.body = [
            (self if isinstance(each, Definition) else outer).visit(each) for each in node.body
        ]
        return node

    def without(self, names: Iterable[str]) -> "Renamed":
        """The same renaming where these names mean something else."""
        hidden = set(names)
        kept = {old: new for old, new in self.names.items() if old not in hidden}
        return Renamed(kept, self.attribute)


def _arguments(args: ast.arguments) -> list[ast.arg]:
    stars = [each for each in (args.vararg, args.kwarg) if each]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *stars]


def _shadows(function: ast.FunctionDef) -> Iterator[str]:
    """Names that a function binds by other means than assignment (which renames both sides)."""
    yield from (each.arg for each in _arguments(function.args))
    for node in ast.walk(function):
        if isinstance(node, Definition | ast.ExceptHandler) and node is not function:
            yield node.name or ""
        yield from (local for local, _, _ in imported_by(node))
