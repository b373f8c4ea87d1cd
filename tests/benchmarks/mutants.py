"""Who notices a fault in a room of shared/: a lesson's checks, its notebook, or its tests.

python -m tests.benchmarks.mutants shared/lora 19 [--count 30] [--seed 3]

One operator, comparison, constant or call of the room is changed at a time. The lesson's references
go through their checks; where those are content, the notebook's cells run and their printed text is
compared; where that is the same, the quick tests of tests/lessonNN run (not its script's), and each
that fails is named: it proves what nothing else of the lesson does.
"""

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import io
import linecache
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0  # seconds for one look at what is unchanged
PATIENCE = 3.0  # so many times as long, for a mutant: a hang is noticed, too
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED = ("to", "detach", "requires_grad_", "float", "clone", "contiguous", "mul_", "div_", "add_")


class Mutant(NamedTuple):
    """A module of the room as it is, but for one place."""

    module: str  # "shared.lora.layers"
    place: str  # "layers.py:41: a + b -> a - b"
    source: str


def places(tree: ast.Module) -> list[ast.AST]:
    """Where something can be changed inside a function, in the order of the file."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                found += [node for node in ast.walk(statement) if _changeable(node)]
    return found


def _changeable(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            return type(op) in SWAPS
        case ast.Compare(ops=[op]):
            return type(op) in SWAPS
        case ast.Constant(value=bool() | int()):
            return True
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in DROPPED
    return False


def changed(tree: ast.Module, number: int) -> tuple[str, str, str]:
    """The source with its so-manyth place changed, and that place before and after."""
    node: Any = places(tree)[number]
    before = ast.unparse(node)
    match node:
        case ast.Compare():
            node.ops[0] = SWAPS[type(node.ops[0])]()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant():
            node.value += 1
        case ast.Call(func=ast.Attribute(value=on)):
            node.func, node.args = ast.Name("_same", ast.Load()), [on, *node.args]
        case _:
            node.op = SWAPS[type(node.op)]()
    after = ast.unparse(node)
    same = "\ndef _same(value, *_, **__):\n    return value\n"
    return ast.unparse(tree) + same * ("_same(" in after), before, after


def mutants(room: Path, count: int, seed: int) -> Iterator[Mutant]:
    """So many changes of the room's modules, chosen by the seed."""
    files = {path: path.read_text(encoding="utf-8") for path in sorted(room.rglob("*.py"))}
    every = [(path, n) for path in files for n in range(len(places(ast.parse(files[path]))))]
    random.Random(seed).shuffle(every)
    for path, number in every[:count]:
        tree = ast.parse(files[path])
        line = getattr(places(tree)[number], "lineno", 0)
        source, before, after = changed(tree, number)
        module = ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts)
        yield Mutant(module, f"{path.name}:{line}: {before[:50]} -> {after[:50]}", source)


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the mutant where its module is imported."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.file = str(ROOT / Path(*mutant.module.split("."))) + ".py"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of the changed module; None for every other."""
        if fullname != self.mutant.module:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self.file)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source under the module's own name and file."""
        module.__file__ = self.file
        exec(compile(self.mutant.source, self.file, "exec"), vars(module))


def by_checks(number: str) -> list[str]:
    """The exercises whose reference is no longer right."""
    from shared.exercises.mistakes import hear_references

    return [heard.exercise for heard in hear_references(number) if not heard.as_expected][:1]


def by_notebook(number: str) -> list[str]:
    """The first cell that raises or prints something else than is stored."""
    import nbformat

    from shared.exercises.answers import new_module

    (path,) = (ROOT / "lessons").glob(f"lesson{number}_*/lesson.ipynb")
    os.chdir(path.parent)
    module = new_module(number)
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    for count, cell in enumerate(cells):
        later = "\n".join(each.source for each in cells[count + 1 :])
        ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
        # Other processes take the files as they are.
        if (ignored or "launch(" in cell.source) and not _binds(cell.source, later):
            continue
        name, printed = f"<cell {count}>", io.StringIO()
        linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(True), name)
        with contextlib.redirect_stdout(printed):
            exec(compile(cell.source, name, "exec"), vars(module))
        stored = "".join(o.get("text", "") for o in cell.outputs if o.get("name") == "stdout")
        if not ignored and printed.getvalue() != stored:
            return [f"cell {count}"]
    return []


def _binds(source: str, later: str) -> bool:
    """Whether a cell binds a name that a later one has."""
    stores = [
        n for n in ast.walk(ast.parse(source)) if isinstance(getattr(n, "ctx", None), ast.Store)
    ]
    bound = {n.id for n in stores if isinstance(n, ast.Name)} | set(
        re.findall(r"^(?:def|class|from .* import|import) (\w+)", source, re.MULTILINE)
    )
    return any(re.search(rf"\b{name}\b", later) for name in bound)


def by_tests(number: str) -> list[str]:
    """The quick tests of the lesson that fail."""
    import pytest

    class Failures:
        names: list[str] = []  # noqa: RUF012

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                self.names.append(report.nodeid.partition("tests/")[2])

    (folder,) = (ROOT / "tests").glob(f"lesson{number}_*")
    files = [str(each) for each in folder.glob("test_*.py") if "script" not in each.name]
    options = ["-q", "-p", "no:cacheprovider", "-p", "shared.cli.proven", "--short"]
    status = pytest.main([*options, *files], plugins=[Failures()])
    return Failures.names or ([f"pytest left with {status}"] if status else [])


def look(who: Any, number: str, mutant: Mutant | None, limit: float = LIMIT) -> list[str]:
    """What one of the three notices, in a process of its own; a hang or a death is noticed."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sink = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(sink, stream)
        if mutant:
            sys.meta_path.insert(0, Importer(mutant))
        try:
            seen = who(number)
        except BaseException as error:
            seen = [f"{type(error).__name__}"]
        sender.send(seen)
        os._exit(0)
    sender.close()
    seen = ["no answer"]
    if receiver.poll(limit):
        with contextlib.suppress(EOFError):
            seen = receiver.recv()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return seen


def main() -> None:
    """Print who notices each mutant, and how many each has noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", type=Path)
    parser.add_argument("lessons", nargs="+", metavar="NN")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    os.environ |= {"TORCH_HANDLE_IMPLEMENTATION": "solution", "TORCH_HANDLE_QUICK": "1"}
    os.environ["OMP_NUM_THREADS"] = "1"
    import matplotlib as mpl
    import torch._dynamo
    import torch.distributed.fsdp  # what takes seconds to import and is none of ours

    mpl.use("agg")
    torch.set_num_threads(1)
    lookers = [(who, nn) for who in (by_checks, by_notebook, by_tests) for nn in args.lessons]
    limits = {}
    for who, number in lookers:
        began = time.monotonic()
        seen = look(who, number, None)
        limits[who, number] = 10 + PATIENCE * (time.monotonic() - began)
        print(f"unchanged: {who.__name__} {number}: {seen or 'content'}", flush=True)
        assert not seen, "what fails without a mutant notices nothing"
    noticed = Counter[str]()
    began = time.monotonic()
    for mutant in mutants(args.room, args.count, args.seed):
        for who, number in lookers:
            if seen := look(who, number, mutant, limits[who, number]):
                noticed[who.__name__] += 1
                print(f"{who.__name__:<12} {number}  {mutant.place}\n    {', '.join(seen)}")
                break
        else:
            noticed["nobody"] += 1
            print(f"nobody           {mutant.place}")
        sys.stdout.flush()
    seconds = time.monotonic() - began
    print(f"{args.room}: {dict(noticed)} of {noticed.total()} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
