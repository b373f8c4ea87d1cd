"""What texts the names of a cell can stand for, as far as that can be read."""

import ast
import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from solutions.grading.intake.names import FRAMES, HELD, MODULES
from solutions.grading.intake.sources import bound_at

DEPTH = 9  # of names that stand for names
MOST = 99  # texts of one expression
LONG = 10_000  # characters of a text that is put together
STEPS = 10_000  # of reading a cell: tables of tables can grow as any power of its length
_ANY = ast.Constant(None)  # what is no text that could be read


class Literals:
    """The texts that a cell's expressions can be, read from constants, tables and loops over them.

    Where a name is given something that cannot be read as well, nobody sees what it is; nor what is
    in a table that the cell does anything with but read it.
    """

    def __init__(self, start: Iterable[ast.AST], nodes: Sequence[ast.AST]) -> None:
        self.given, self.steps = dict[str, list[ast.expr]](), 0
        self.stored = Counter(name for node in nodes for name in bound_at(node))
        named = [node for node in nodes if isinstance(node, ast.Name)]
        uses, calls = Counter(node.id for node in named), defaultdict[str, list[ast.Call]](list)
        methods = set[ast.AST]()
        for node in nodes:
            match node:
                case ast.Call(func=ast.Name(id=name)):
                    calls[name].append(node)
                case ast.ClassDef():
                    methods |= set(ast.walk(node))
        for node in (*(x for each in start for x in ast.walk(each)), *nodes):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.given.setdefault(name, []).append(value)
                case (
                    ast.For(target=target, iter=over) | ast.comprehension(target=target, iter=over)
                ):
                    self._loop(target, over)
                case ast.FunctionDef(name=name, decorator_list=[]) if node not in methods:
                    if self.stored[name] == 1 and len(calls[name]) == uses[name]:
                        self._call(node, calls[name])
        read = {table for node in nodes for table in self._read_by(node)}
        self.changed = {x.id for x in named if isinstance(x.ctx, ast.Load) and x not in read}

    def _read_by(self, node: ast.AST) -> Iterable[ast.expr]:
        """The tables that a node looks into, and leaves as they are."""
        match node:
            case (
                ast.Subscript(value=table, ctx=ast.Load())
                | ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[table])
                | ast.Call(func=ast.Attribute(value=table, attr="items" | "keys" | "values"))
            ):
                return (table,)
            case ast.For(iter=table) | ast.comprehension(iter=table):
                return (table,)
            case ast.Call(args=tables) if self._pairs(node):
                return tables
        return ()

    def _pairs(self, over: ast.AST) -> bool:
        """Whether it is Python's own zip or enumerate."""
        name = getattr(getattr(over, "func", None), "id", "")
        return name in ("zip", "enumerate") and name not in self.stored

    def _loop(self, target: ast.expr, over: ast.expr) -> None:
        """What a loop's names are given: an item of `over`, or one of its parts."""
        match target, over:
            case ast.Name(id=name), _:
                self.given.setdefault(name, []).append(ast.Subscript(over, ast.Constant(0)))
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id=name)) if self._pairs(over):
                parts = _in_order(over.args) if name == "zip" else [_ANY, *over.args]
                for inner, part in zip(_in_order(targets), parts, strict=False):
                    self._loop(inner, part)
            case (
                ast.Tuple(elts=[key, value]),
                ast.Call(func=ast.Attribute(value=ast.Dict() as table, attr="items")),
            ):
                self._loop(key, ast.Tuple([each or _ANY for each in table.keys]))
                self._loop(value, ast.Tuple(table.values))
            case ast.Tuple(elts=targets), ast.Tuple(elts=rows) | ast.List(elts=rows):
                few = len(targets) * len(rows) < STEPS
                rows = [_in_order(getattr(row, "elts", ())) for row in rows]
                for number, inner in enumerate(_in_order(targets) if few else ()):
                    parts = [row[number : number + 1] for row in rows]
                    self._loop(inner, ast.Tuple([(*part, _ANY)[0] for part in parts]))

    def _call(self, function: ast.FunctionDef, calls: Sequence[ast.Call]) -> None:
        """What a helper's arguments are given, where the cell does nothing but call it."""
        arguments = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if not 0 < len(arguments) * len(calls) < STEPS:
            return
        given = list[dict[str, ast.expr]]()
        for call in calls:
            given.append(dict(zip(arguments, _in_order(call.args), strict=False)))
            given[-1] |= {each.arg: each.value for each in call.keywords if each.arg}
        for name in arguments:
            texts = ast.Tuple([each.get(name, _ANY) for each in given])
            self.given.setdefault(name, []).append(ast.Subscript(texts, ast.Constant(0)))

    def _known(self, name: str) -> bool:
        """Whether all that a name is given can be read."""
        return len(self.given.get(name, ())) == max(self.stored[name], 1)

    def of(self, text: ast.expr, depth: int = DEPTH) -> list[str] | None:
        """All that an expression can be; None where nobody sees it."""
        self.steps += 1
        if self.steps > STEPS or depth < -MOST:
            return None
        match text:
            case ast.Constant(value=str(value)):
                return [value]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                before, after = self.of(left, depth - 1), self.of(right, depth - 1)
                if before is None or after is None or len(before) * len(after) > MOST:
                    return None
                both = [x + y for x in before for y in after]
                return both if sum(map(len, both)) < LONG else None
            case ast.IfExp(body=body, orelse=other):
                return self._all((body, other), depth)
            case ast.Subscript(value=table):
                items = self._items(table)
                return None if items is None else self._all(items, depth)
            case ast.Name(id=name) if self._known(name):
                return self._all(self.given[name], depth)
        return None

    def _all(self, texts: Iterable[ast.expr], depth: int) -> list[str] | None:
        found = list[str]()
        for each in texts if depth > 0 else (_ANY,):
            texts_of_it = self.of(each, depth - 1)
            if texts_of_it is None or len(found) + len(texts_of_it) > MOST:
                return None
            found += texts_of_it
        return found

    def _items(self, table: ast.expr, depth: int = DEPTH) -> Iterable[ast.expr] | None:
        """What stands in a table or a list that is written out, or has a name."""
        match table:
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return items
            case ast.Dict(keys=keys, values=items):
                return chain((each or _ANY for each in keys), items)
            case ast.Name(id=name) if depth and name not in self.changed and self._known(name):
                return self._items(self.given[name][0], depth - 1)
        return None

    def attributes(self, name: ast.expr) -> list[str] | None:
        """What getattr is asked for; None where nobody sees it, or sees that it is private."""
        texts = self.of(name)
        odd = [x for x in texts or () if x.startswith("_") or x in HELD | MODULES]
        return None if odd else texts

    def formats_by(self, text: ast.expr) -> str:
        """Why what is formatted by it can be asked for attributes that no answer needs, or ""."""
        parts = [self.of(each) for each in self._parts(text)]
        fields = _fields(x for part in parts for x in part or ())
        if None in parts or fields is None:  # a field can have its beginning here, its end there
            texts = self.of(text)
            fields = None if texts is None else _fields(texts)
        if fields is None:
            return "a computed text"
        words = (x for each in fields for x in re.findall(r"\w+", each))
        odd = next((x for x in words if x in FRAMES or x.startswith("__")), "")
        return f"a text that reads {odd}" if odd else ""

    def _parts(self, text: ast.expr) -> Iterator[ast.expr]:
        """What a text is put together from: a loop that makes it longer adds the same each time."""
        waiting, seen = [text], set[str]()
        while waiting:
            match waiting.pop():
                case ast.BinOp(left=left, op=ast.Add(), right=right):
                    waiting += left, right
                case ast.Name(id=name) if name in seen:
                    pass
                case ast.Name(id=name) if self._known(name):
                    seen.add(name)
                    waiting += self.given[name]
                case other:
                    yield other

    def can_be_special(self, name: ast.expr, of_class: bool) -> bool:
        """Whether setattr can give a class, or anything at all, a name with two underscores."""
        texts = self.of(name)
        if texts is None:
            parts = (each.value for each in ast.walk(name) if isinstance(each, ast.Constant))
            return of_class or any("__" in each for each in parts if isinstance(each, str))
        return any(each.startswith("__") for each in texts)


def _in_order(items: Sequence[ast.expr]) -> Sequence[ast.expr]:
    """Items whose places are known: none, where one stands for any number of them."""
    return () if any(isinstance(each, ast.Starred) for each in items) else items


def _fields(texts: Iterable[str]) -> list[str] | None:
    """What texts read where they are formatted, in the place of a width, too; None: nobody sees."""
    found = list[str]()
    try:
        for _, field, spec, _ in (x for text in texts for x in string.Formatter().parse(text)):
            widths = (field for _, field, _, _ in string.Formatter().parse(spec or ""))
            found += (each for each in (field, *widths) if each)
    except ValueError:  # "{0", whose end may stand elsewhere
        return None
    return found
