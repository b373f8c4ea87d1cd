"""Real process groups inside a notebook: `run_ranks` forks, joins, runs, collects."""

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # while there is no group that it could keep: see group.py

from shared.ranks.failures import Failure, Late, RankFailed, kind_of, own_line
from shared.ranks.logs import without_frames
from shared.ranks.visible import HIDE_FIRST, why_not_fork, without_gpus
from shared.ranks.watching import CROWDED, LOOK, IdleWatch, had_their_time

GRACE = 2.0  # seconds that the other ranks get to end by themselves after one has failed


@dataclass(frozen=True)
class _Task:
    """What is the same for all ranks of a `run_ranks`, which meet in `folder`."""

    fn: Callable[..., Any]
    args: tuple
    world_size: int
    folder: Path
    patience: float  # seconds that a collective waits for a peer: no less than the parent
    before: Callable[[int], None] | None


@dataclass
class _Child:
    rank: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stack: Path
    outcome: dict[str, Any] | None = None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    quiet: float | None = None,
    before: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` processes of one gloo group; return their results.

    The processes are forked, so `fn` may be defined in a notebook cell; each uses one thread and
    meets the others through a file, not a port. What a rank prints is shown here, in the order
    of ranks, once all are done. Results travel by pickle: return tensors, numbers, dicts.
    `before(rank)` runs in the new process before it joins the group.

    `quiet` ends a deadlock early: when for so many seconds no rank that is not back has used the
    processor. `timeout` then counts seconds of processor time (at most ten times as many by the
    clock), so that a busy machine fools neither. Both on Linux; elsewhere the clock alone counts.

    Raises RankFailed when a rank raises (its traceback is in the message), dies (the signal is
    named) or is not back after `timeout` seconds (every rank's stack is shown), and RuntimeError
    once torch has looked for this process's GPUs (a backward does): its forks are of no use then.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if why := why_not_fork():
        raise RuntimeError(f"run_ranks forks, and {why}. {HIDE_FIRST}")
    folder = Path(tempfile.mkdtemp(prefix="ranks_"))
    patience = timeout if quiet is None else CROWDED * timeout
    task = _Task(fn, args, world_size, folder, patience, before)
    children: list[_Child] = []
    try:
        for rank in range(world_size):
            children.append(_start(rank, task))
        _collect(children, timeout, quiet)
    finally:
        _end(children)
        shutil.rmtree(folder, ignore_errors=True)
    return [_result(child) for child in children]


def _start(rank: int, task: _Task) -> _Child:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    stack = task.folder / f"stack_{rank}"
    # Not daemons: those may not have children, and a rank's DataLoader starts workers.
    process = context.Process(target=_child, args=(rank, task, sender, stack))
    process.start()
    sender.close()
    return _Child(rank, process, receiver, stack)


def _child(rank: int, task: _Task, pipe: Connection, stack: Path) -> None:
    """The life of one rank. Leaves by os._exit: a notebook's own exit handlers are not its."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends the ranks
    faulthandler.register(signal.SIGUSR1, file=stack.open("w"), all_threads=False)
    # OpenMP's thread pool does not survive a fork, and one thread a rank is faster here anyway.
    torch.set_num_threads(1)
    printed = io.StringIO()
    outcome: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        try:
            without_gpus()  # gloo's ranks: AdamW would make each a context on the first GPU
            if task.before:
                task.before(rank)
            # Wait until all have joined: a rank that is done at once would hang up on the others.
            os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
            dist.init_process_group(
                "gloo",
                init_method=f"file://{task.folder}/store",
                rank=rank,
                world_size=task.world_size,
                # The parent's clock must win: it shows where every rank stands.
                timeout=datetime.timedelta(seconds=task.patience + 30),
            )
            result = task.fn(rank, *task.args)
            outcome["result"] = pickle.dumps(result)
        except BaseException as error:
            frames = error.__traceback__
            own = frames.tb_next if frames else None  # the first frame is this function
            whole = "".join(traceback.format_exception(type(error), error, own))
            name, text = type(error).__name__, without_frames(str(error))
            outcome["error"], outcome["summary"] = without_frames(whole), f"{name}: {text}"
            outcome["name"], outcome["text"] = name, text
            outcome["exception"] = _travelling(error)
    outcome["printed"] = printed.getvalue()
    # A rank that failed leaves the others waiting; tearing the group down would wait with them.
    if "error" not in outcome and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    pipe.send(outcome)
    pipe.close()
    os._exit(0)


def _pids(children: Iterable[_Child]) -> dict[int, int | None]:
    return {child.rank: child.process.pid for child in children}


def _travelling(error: BaseException) -> bytes | None:
    """The error for the parent; None where pickle cannot make it again."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # whatever an error class of the caller's own does
        return None
    return packed


def _collect(children: list[_Child], timeout: float, quiet: float | None) -> None:
    began = time.monotonic()
    deadline = began + timeout
    waiting = {child.pipe: child for child in children}
    failures: list[_Child] = []
    watch = IdleWatch()
    asleep = False
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), timeout=left if quiet is None else LOOK)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            child = waiting.pop(pipe)
            child.outcome = _receive(child)
            if "error" in child.outcome:
                failures.append(child)
                deadline = min(deadline, time.monotonic() + GRACE)
        pids = _pids(waiting.values())
        asleep = quiet is not None and watch.idle_seconds(pids) > quiet
        late = time.monotonic() >= deadline
        if late and quiet is not None and not failures:
            late = had_their_time(pids.values(), timeout, time.monotonic() - began)
        if not ready and (asleep or late):
            break
    if failures:
        raise _failure(min(failures, key=_place_in_the_chain), children)
    if waiting:
        seconds = timeout if quiet is None else time.monotonic() - began
        raise _too_late(list(waiting.values()), children, seconds, quiet=asleep)


def _place_in_the_chain(failed: _Child) -> int:
    """Order failures from cause to consequence: a peer's lost connection comes after its death."""
    order = (Failure.DIED, Failure.RAISED, Failure.TO_ITSELF, Failure.PEER_LOST)
    return order.index(_kind(failed))


def _kind(failed: _Child) -> Failure:
    assert failed.outcome is not None
    if "died" in failed.outcome:
        return Failure.DIED
    return kind_of(failed.outcome["name"], failed.outcome["text"])


def _receive(child: _Child) -> dict[str, Any]:
    try:
        return child.pipe.recv()
    except (EOFError, OSError):  # OSError: it ended, or was ended, while it was sending
        child.process.join(1.0)
        code = child.process.exitcode or 0
        ended_by = signal.Signals(-code).name if code < 0 else ""
        how = f"was ended by {ended_by}" if ended_by else f"left with status {code}"
        return {"error": "", "summary": how, "died": True, "signal": ended_by}


def _failure(failed: _Child, children: list[_Child]) -> RankFailed:
    outcome = failed.outcome
    assert outcome is not None
    exception, back = outcome.get("exception"), _back(children)
    return RankFailed(
        _failure_words(failed, children, back),
        kind=_kind(failed),
        rank=failed.rank,
        error=None if exception is None else pickle.loads(exception),
        error_name=outcome.get("name", ""),
        error_text=outcome.get("text", ""),
        at=own_line(outcome["error"]),
        signal=outcome.get("signal", ""),
        back=tuple(back),
    )


def _back(children: list[_Child]) -> list[int]:
    return [c.rank for c in children if c.outcome is not None and "error" not in c.outcome]


def _failure_words(failed: _Child, children: list[_Child], back: list[int]) -> str:
    assert failed.outcome is not None
    head = f"rank {failed.rank} of {len(children)} "
    head += failed.outcome["summary"] if "died" in failed.outcome else "raised "
    running = [child.rank for child in children if child.outcome is None]
    tail = f"\nStill running then, and ended: ranks {running}" if running else ""
    tail += f"\nAlready back, without error: ranks {back}" if back else ""
    if "died" in failed.outcome:
        return head + tail
    printed = failed.outcome["printed"]
    said = f"\nIt had printed:\n{printed}" if printed else ""
    return f"{head}{failed.outcome['summary']}\n{failed.outcome['error']}{said}{tail}"


def _too_late(
    late: list[_Child], children: list[_Child], seconds: float, *, quiet: bool
) -> RankFailed:
    for child in late:
        if child.process.pid is not None and child.process.is_alive():
            os.kill(child.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    back = _back(children)
    seen = tuple(Late(child.rank, _stack_of(child)) for child in late)
    names = [one.rank for one in seen]
    lines = [f"ranks {names} of {len(children)} were not back after {seconds:.3g} s; back: {back}"]
    lines += [
        f"rank {one.rank} was here:\n{one.stack or '  (no stack: it does not answer)'}"
        for one in seen
    ]
    return RankFailed(
        "\n".join(lines),
        kind=Failure.LATE,
        rank=names[0],
        late=seen,
        seconds=seconds,
        quiet=quiet,
        back=tuple(back),
    )


def _stack_of(child: _Child) -> str:
    """What the rank wrote down when it was asked where it stands, but for what only starts it."""
    stack = child.stack.read_text() if child.stack.exists() else ""
    return stack.partition(f'  File "{__file__}"')[0].rstrip()


def _end(children: list[_Child]) -> None:
    for child in children:
        if child.outcome is None or "error" in child.outcome:
            child.process.kill()
        child.process.join(10.0)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        child.pipe.close()


def _result(child: _Child) -> Any:
    assert child.outcome is not None
    if child.outcome["printed"]:
        print(child.outcome["printed"], end="")
    return pickle.loads(child.outcome["result"])
