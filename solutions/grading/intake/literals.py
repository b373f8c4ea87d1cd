"""What texts the names of a cell can stand for, as far as that can be read."""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence

from solutions.grading.intake.names import FRAMES, HELD, MODULES

DEPTH = 9  # of names that stand for names
MOST = 99  # texts of one expression
_ANY = ast.Constant(None)  # what is no text that could be read


class Literals:
    """The texts that a cell's expressions can be, read from constants, tables and loops over them.

    `stored` says how often the cell gives each name a value; where some of that cannot be read,
    nobody sees what the name is.
    """

    def __init__(
        self, start: Iterable[ast.AST], nodes: Sequence[ast.AST], stored: Mapping[str, int]
    ) -> None:
        self.given = dict[str, list[ast.expr]]()
        for node in (*(x for each in start for x in ast.walk(each)), *nodes):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.given.setdefault(name, []).append(value)
                case (
                    ast.For(target=target, iter=over) | ast.comprehension(target=target, iter=over)
                ):
                    self._loop(target, over)
                case ast.FunctionDef(decorator_list=[]):
                    self._call(node, nodes)
        self.stored, self.changed = stored, set[str]()
        for node in nodes:
            match node:
                case (
                    ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                    | ast.Attribute(value=ast.Name(id=name), attr="append" | "extend" | "update")
                ):
                    self.changed.add(name)

    def _loop(self, target: ast.expr, over: ast.expr) -> None:
        """What a loop's names are given: an item of `over`, or one of its parts."""
        match target, over:
            case ast.Name(id=name), _:
                self.given.setdefault(name, []).append(ast.Subscript(over, ast.Constant(0)))
            case ast.Tuple(elts=[_, inner]), ast.Call(func=ast.Name(id="enumerate"), args=[each]):
                self._loop(inner, each)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=each):
                for inner, part in zip(targets, each, strict=False):
                    self._loop(inner, part)
            case (
                ast.Tuple(elts=[key, value]),
                ast.Call(func=ast.Attribute(value=ast.Dict() as table, attr="items")),
            ):
                self._loop(key, ast.Tuple([each or _ANY for each in table.keys]))
                self._loop(value, ast.Tuple(table.values))
            case ast.Tuple(elts=targets), ast.Tuple(elts=rows) | ast.List(elts=rows):
                for number, inner in enumerate(targets):
                    parts = [getattr(row, "elts", ())[number : number + 1] for row in rows]
                    self._loop(inner, ast.Tuple([(*part, _ANY)[0] for part in parts]))

    def _call(self, function: ast.FunctionDef, nodes: Sequence[ast.AST]) -> None:
        """What a helper's arguments are given, where the cell does nothing but call it."""
        named = [x for x in nodes if isinstance(x, ast.Name) and x.id == function.name]
        calls = [x for x in nodes if isinstance(x, ast.Call) and x.func in named]
        for place, argument in enumerate(
            function.args.args if len(calls) == len(named) > 0 else ()
        ):
            given = [
                (
                    *call.args[place:],
                    *(x.value for x in call.keywords if x.arg == argument.arg),
                    _ANY,
                )[0]
                for call in calls
            ]
            one_of_them = ast.Subscript(ast.Tuple(given), ast.Constant(0))
            self.given.setdefault(argument.arg, []).append(one_of_them)

    def of(self, text: ast.expr, depth: int = DEPTH) -> list[str] | None:
        """All that an expression can be; None where nobody sees it."""
        match text:
            case ast.Constant(value=str(value)):
                return [value]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                before, after = self.of(left, depth - 1), self.of(right, depth - 1)
                both = before is not None and after is not None and len(before) * len(after) < MOST
                return [x + y for x in before for y in after] if both else None
            case ast.IfExp(body=body, orelse=other):
                return self._all((body, other), depth)
            case ast.Subscript(value=table):
                items = self._items(table)
                return None if items is None else self._all(items, depth)
            case ast.Name(id=name) if depth and name in self.given:
                given = self.given[name]
                known = len(given) == max(self.stored.get(name, 0), 1)
                return self._all(given, depth) if known else None
        return None

    def _all(self, texts: Iterable[ast.expr], depth: int) -> list[str] | None:
        found = [self.of(each, depth - 1) for each in texts] if depth else [None]
        return None if None in found else [x for each in found for x in each or ()]

    def _items(self, table: ast.expr, depth: int = DEPTH) -> list[ast.expr] | None:
        """What stands in a table or a list that is written out, or has a name."""
        match table:
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return items
            case ast.Dict(keys=keys, values=items):
                return [*(each or _ANY for each in keys), *items]
            case ast.Name(id=name) if depth and name not in self.changed:
                given = self.given.get(name, [])
                if given and len(given) == max(self.stored.get(name, 0), 1):
                    return self._items(given[0], depth - 1)
        return None

    def attributes(self, name: ast.expr) -> list[str] | None:
        """What getattr is asked for; None where nobody sees it, or sees that it is private."""
        texts = self.of(name)
        odd = [x for x in texts or () if x.startswith("_") or x in HELD | MODULES]
        return None if odd else texts

    def can_read_anything(self, text: ast.expr) -> bool:
        """Whether what is formatted by it can be asked for attributes that no answer needs."""
        texts = self.of(text)
        words = None if texts is None else {x for each in texts for x in re.findall(r"\w+", each)}
        return words is None or bool(words & FRAMES) or any(x.startswith("__") for x in words)

    def can_be_special(self, name: ast.expr, of_class: bool) -> bool:
        """Whether setattr can give a class, or anything at all, a name with two underscores."""
        texts = self.of(name)
        if texts is None:
            parts = (each.value for each in ast.walk(name) if isinstance(each, ast.Constant))
            return of_class or any("__" in each for each in parts if isinstance(each, str))
        return any(each.startswith("__") for each in texts)
