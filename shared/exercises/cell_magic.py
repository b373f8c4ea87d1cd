"""`%%ranks 2`: a notebook's cell on forked ranks, to play with what the notebook has defined."""

import ast
import contextlib
import linecache
import re
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import CodeType
from typing import Any

from IPython.lib.pretty import pretty

from shared.errors import ShortError
from shared.exercises.waiting import can_be_stopped, first_lines
from shared.ranks.failures import Failure, RankFailed
from shared.ranks.forked import run_ranks

PATIENCE = 60.0  # seconds of processor time that a rank may take
QUIET = 5.0  # seconds without any work after which ranks that wait for each other are ended
FILENAME = "<%%ranks>"  # of a cell's code, in tracebacks
LINE = re.compile(r"(\d+)(?:\s+--return\s+(\w+(?:\s*,\s*\w+)*))?")


class CellFailed(ShortError):
    """A cell on ranks could not be run, or failed on one of them."""


def ranks(line: str, cell: str, names: dict[str, Any], *, says_how: bool = False) -> None:
    """Run a cell in processes of one gloo group; show each rank's prints and last value.

    `line` is the number of ranks and maybe `--return name,name`. The ranks see the notebook's
    `names`, with `rank` and `world_size` besides; what they change is gone afterwards, but for the
    names that are to be returned, each of which becomes a list by rank. Raises CellFailed, in one
    line, for what a rank raised and for ranks that do not come back; their first prints are shown.
    Interrupted, it raises `Stopped`, and with `says_how` it says after some seconds how to.
    """
    if (asked := LINE.fullmatch(line.strip())) is None or int(asked[1]) < 1:
        usage = "how many ranks, and maybe names to bring back: %%ranks 2 --return x,y"
        raise CellFailed(f"%%ranks takes {usage}; got %%ranks {line}")
    world_size, wanted = int(asked[1]), re.findall(r"\w+", asked[2] or "")
    try:
        body, last = _compiled(cell)
    except SyntaxError as error:
        text = linecache.getline(FILENAME, error.lineno or 0).strip()
        kind = type(error).__name__
        raise CellFailed(f"{kind}: {error.msg}, line {error.lineno}: {text}") from None

    def act(rank: int) -> dict[str, Any]:
        names.update(rank=rank, world_size=world_size)
        stream = files[rank].open("w", buffering=1, encoding="utf-8")  # by lines: it may be ended
        with stream:
            with first_lines(out=stream):
                exec(body, names)
                value = eval(last, names) if last else None
            if value is not None:
                print(pretty(value), file=stream)
        if missing := [name for name in wanted if name not in names]:
            raise NameError(f"--return {missing[0]}: this rank has no such name")
        return {name: names[name] for name in wanted}

    try:
        title = f"%%ranks {world_size}"
        with can_be_stopped(title, says_how=says_how), _printed(world_size) as files:
            by_rank = run_ranks(act, world_size, timeout=PATIENCE, quiet=QUIET)
    except RankFailed as failed:
        raise CellFailed(_in_a_line(failed)) from None
    except AttributeError as error:  # pickle does not find a class that only the ranks have
        raise CellFailed(f"{error}: an earlier cell must define what is returned") from None
    names.update({name: [of_rank[name] for of_rank in by_rank] for name in wanted})


@contextlib.contextmanager
def _printed(world_size: int) -> Generator[list[Path]]:
    """Yield a file for each rank to print into, and show them in the end, whatever that is."""
    with tempfile.TemporaryDirectory(prefix="printed_") as folder:
        files = [Path(folder) / str(rank) for rank in range(world_size)]
        try:
            yield files
        finally:
            for rank, file in enumerate(files):
                if file.exists():
                    text = file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
                    print(f"rank {rank}:{chr(10) if chr(10) in text else ' '}{text}".rstrip())


def _in_a_line(failed: RankFailed) -> str:
    if failed.kind is Failure.PEER_LOST:  # it is well: who is back has left a call out
        back = [f"already back: ranks {list(failed.back)}"] * bool(failed.back)
        return "; ".join([f"rank {failed.rank} lost a peer{failed.at}", *back])
    idle = f" (nobody did anything for {QUIET:g} s)" if failed.quiet else ""
    places = [late.place for late in failed.late if late.place]
    return "; ".join([failed.headline + failed.at + idle, *places])


def _compiled(cell: str) -> tuple[CodeType, CodeType | None]:
    """Return the code of a cell, and of its last line where that is a value to be shown."""
    cell = f"\n{cell}"  # its first line is the magic's
    linecache.cache[FILENAME] = (len(cell), None, cell.splitlines(True), FILENAME)
    tree, last = ast.parse(cell, FILENAME), None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not cell.rstrip().endswith(";"):
        last = compile(ast.Expression(tree.body.pop().value), FILENAME, "eval")  # ty: ignore
    return compile(tree, FILENAME, "exec"), last


def register(shell: Any, somebody_waits: Callable[[], bool]) -> None:
    """Make the magic known to a notebook's IPython shell."""

    def with_names(line: str, cell: str) -> None:
        ranks(line, cell, shell.user_ns, says_how=somebody_waits())

    shell.register_magic_function(with_names, "cell", "ranks")
