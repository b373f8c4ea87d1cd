"""A learner's answers, from an older notebook into the course's: what is carried, what is kept.

Nothing here runs a cell, and nothing is written: `carry` changes notebooks in memory.
"""

import ast
import copy
import difflib
import inspect
import io
import re
import tokenize
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shared.errors import InputError
from shared.exercises.answers import EXERCISE, names_bound, names_used
from shared.exercises.cells import COURSE_ID, source_of
from shared.exercises.commands import as_python

Definition = ast.FunctionDef | ast.ClassDef
HEAD = re.compile(r"^@exercise\(.*\)\s*\n(?:@.*\n)*(?:class|def)\s+(\w+)", re.MULTILINE)


@dataclass
class Notebook:
    """A notebook as Jupyter writes it: where it is, in words, and what is in it."""

    place: str
    content: dict[str, Any]
    changed: bool = False

    @property
    def cells(self) -> list[dict[str, Any]]:
        """All cells, in order."""
        return self.content["cells"]

    def exercises(self) -> dict[str, dict[str, Any]]:
        """Return the cells of exercises by id; InputError where one is there twice."""
        found: dict[str, dict[str, Any]] = {}
        for cell in self.cells:
            for id in EXERCISE.findall(source_of(cell)) if cell["cell_type"] == "code" else []:
                if id in found:
                    raise InputError(f"{self.place} holds exercise {id} twice: keep one")
                found[id] = cell
        return found

    def setup(self) -> str:
        """Return the source of the first cell of code, which imports what the others use."""
        code = (cell for cell in self.cells if cell["cell_type"] == "code")
        return next((source_of(cell) for cell in code), "")


@dataclass
class Carried:
    """What came of it: a line for each answer, how many were carried, texts to be kept."""

    lines: list[str] = field(default_factory=list)
    count: int = 0
    kept: list[str] = field(default_factory=list)

    def keep(self, source: str, title: str, why: str) -> None:
        """Note that a text has no place in the course's notebooks, and why."""
        text = f"# {title}: {why}\n{source.rstrip()}\n"
        if text not in self.kept:
            self.kept.append(text)
            self.lines.append(f"{title}: {why}; kept in a file")


def carry(old: Notebook, course: list[Notebook]) -> Carried:
    """Carry the answers and the learner's own cells of a notebook into the course's notebooks.

    An answer that is in the course's notebook stays: the older one is kept in a file, where it is
    different. So is what no longer has an exercise, or a notebook. What was changed in the course's
    other cells does not come along.
    """
    done = Carried()
    exercises = {id: (cell, new) for new in course for id, cell in new.exercises().items()}
    targets: dict[int, dict[str, Any]] = {}  # by the identity of an old cell: its cell now
    home: Notebook | None = None
    for number, cell in old.exercises().items():
        source = source_of(cell)
        name, now = _name(source), _renumbered(number, source, exercises)
        title, found = f"{number} {name}".rstrip(), exercises.get(now)
        if found is not None:
            targets[id(cell)], home = found[0], home or found[1]
        if _is_open(source):
            continue
        if found is None:
            done.keep(source, title, "the course has no such exercise now")
        elif len(EXERCISE.findall(source)) > 1:
            done.keep(source, title, "its cell holds several exercises: give each its own")
        elif (theirs := _name(source_of(found[0]))) and name != theirs:
            done.keep(source, title, f"the exercise is {now} {theirs} now")
        else:
            _put(EXERCISE.sub(f'@exercise("{now}")', source), title, *found, old, done)
    if any("id" not in cell for cell in old.cells):
        done.lines.append(
            "its cells have no ids: cells of your own were not told apart, and stay behind"
        )
    if home is not None:
        _put_own_cells(old, home, targets, done)
    else:
        for cell in filter(_is_own, old.cells):
            done.keep(source_of(cell), "a cell of your own", "its notebook is none of the course's")
    return done


def _put(
    source: str, title: str, cell: dict[str, Any], new: Notebook, old: Notebook, done: Carried
) -> None:
    """Put an answer into its cell, unless another one is there; say what to look at."""
    present = source_of(cell)
    if present.strip() == source.strip():
        done.lines.append(f"{title}: there already")
        return
    if not _is_open(present):
        done.keep(source, title, "another answer is there, and stays")
        return
    done.lines.append(f"{title}: carried")
    done.count += 1
    if _tree(source) is None:
        done.lines.append("  it is no Python yet")
    elif changes := list(_contract_changes(source, present)):
        done.lines += [f"  {change}" for change in ["its contract has changed:", *changes]]
        done.kept.append(f"# {title}: the contract as it is now\n{present}\n")
    cell["source"], new.changed = source.splitlines(keepends=True), True
    own = names_bound([source, *map(source_of, new.exercises().values())])
    gone = names_used(source) & names_bound([old.setup()]) - names_bound([new.setup()]) - own
    for name in sorted(gone):
        done.lines.append(f"  it uses {name}, which the notebook's first cell no longer defines")
    if gone:
        done.keep(old.setup(), "the first cell", "as it was")


def _put_own_cells(
    old: Notebook, new: Notebook, targets: dict[int, dict[str, Any]], done: Carried
) -> None:
    """Put the cells that the learner has added behind those that they followed."""
    ids = {cell.get("id"): cell for cell in new.cells}
    here, there = set(map(id, new.cells)), {source_of(cell).strip() for cell in new.cells}
    after = next((c for c in new.cells if c["cell_type"] == "code"), new.cells[-1])
    count = 0
    for cell in old.cells:
        if _is_own(cell) and source_of(cell).strip() not in there:
            place = next(n for n, other in enumerate(new.cells) if other is after)
            after = copy.deepcopy(cell)
            if after["id"] in ids:
                after["id"] = uuid.uuid4().hex
            new.cells.insert(place + 1, after)
            new.changed, count = True, count + 1
        else:
            target = targets.get(id(cell))
            beside = target if id(target) in here else ids.get(cell.get("id"))
            after = beside or after
    if count:
        done.lines.append(f"and {count} cell{'s' * (count > 1)} of your own")
        done.count += count


def _is_own(cell: dict[str, Any]) -> bool:
    """Whether a cell is one that the learner has added, with something in it."""
    source, course = source_of(cell), COURSE_ID.match(cell.get("id", "c-00000000"))
    return bool(source.strip()) and not course and not EXERCISE.search(source)


def _renumbered(number: str, source: str, exercises: dict[str, Any]) -> str:
    """Return an exercise's id now: another one, where its lesson has the name under another."""
    lesson, name = number.split(".")[0], _name(source)
    own = {id: cell for id, (cell, _) in exercises.items() if id.split(".")[0] == lesson}
    names = {id: _name(source_of(cell)) for id, cell in own.items()}
    if not name or names.get(number) == name:
        return number
    return next((id for id in names if names[id] == name), number)


def _tree(source: str) -> ast.Module | None:
    """Return what a cell is but for Jupyter's own lines; None where it is no Python."""
    try:
        return as_python(source)[1]
    except (SyntaxError, ValueError, RecursionError):
        return None


def _definitions(source: str) -> list[Definition]:
    """Return what a cell marks as exercises; nothing where it is no Python."""
    tree = _tree(source)
    marked = [node for node in tree.body if isinstance(node, Definition)] if tree else []
    return [m for m in marked if any("exercise(" in ast.unparse(d) for d in m.decorator_list)]


def _name(source: str) -> str:
    """Return what a cell's first exercise is called, also where the cell is half typed."""
    named = [node.name for node in _definitions(source)] or HEAD.findall(source)
    return next(iter(named), "")


def _is_open(source: str) -> bool:
    """Whether a cell has nothing but stubs: no line of an answer, and no comment, as in a plan."""
    found, tree = _definitions(source), _tree(source)
    alone = tree is not None and bool(found) and len(tree.body) == len(found)
    return alone and all(map(_only_raises, found)) and not _has_comment(source)


def _has_comment(source: str) -> bool:
    plain = as_python(source)[0]  # with Jupyter's own lines as comments, which do not count
    lines = list(zip(source.split("\n"), plain.split("\n"), strict=True))
    tokens = tokenize.generate_tokens(io.StringIO(plain).readline)
    comments = (lines[token.start[0] - 1] for token in tokens if token.type == tokenize.COMMENT)
    return any(line == in_plain for line, in_plain in comments)


def _only_raises(node: Definition) -> bool:
    body = node.body[ast.get_docstring(node) is not None :]
    if isinstance(node, ast.ClassDef):
        methods = [member for member in body if isinstance(member, ast.FunctionDef)]
        written = [member for member in methods if not _is_empty(member)]
        return len(methods) == len(body) and all(map(_only_raises, written)) and bool(written)
    return len(body) == 1 and ast.unparse(body[0]).removesuffix("()") == "raise NotImplementedError"


def _is_empty(method: ast.FunctionDef) -> bool:
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in method.body
    )


def _contract_changes(answer: str, stub: str) -> Iterator[str]:
    """Yield what the stub says now and the answer's cell does not: parameters, docstrings."""
    before = {what: (words, text) for what, words, text in _contract(answer)}
    for what, words, text in _contract(stub):
        if what not in before:
            yield f"{what}{words} is new"
            continue
        old_words, old_text = before[what]
        if old_words != words:
            yield f"{what}{old_words} is {what}{words} now"
        if old_text and old_text != text:
            lines = difflib.ndiff(old_text.splitlines(), text.splitlines())
            yield from (line.rstrip() for line in lines if line.startswith(("- ", "+ ")))


def _contract(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, parameters and docstring of each exercise in a cell, and of its methods."""
    for node in _definitions(source):
        nodes = [("", node)]
        if isinstance(node, ast.ClassDef):
            nodes += [(f"{node.name}.", n) for n in node.body if isinstance(n, ast.FunctionDef)]
        for prefix, part in nodes:
            words = ""
            if isinstance(part, ast.FunctionDef):
                arguments = copy.deepcopy(part.args)
                for argument in ast.walk(arguments):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                words = f"({ast.unparse(arguments)})"
            yield prefix + part.name, words, inspect.cleandoc(ast.get_docstring(part) or "")
