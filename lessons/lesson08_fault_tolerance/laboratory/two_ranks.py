"""What two ranks do with an answer, and whether each of them comes back."""

import copy
import io
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lessons.lesson08_fault_tolerance.laboratory.files import names_in
from lessons.lesson08_fault_tolerance.laboratory.small_runs import (
    LENGTH,
    CountedSampler,
    WatchedRun,
    content_of,
    draw_numbers,
    equal,
    states_now,
    toy,
    train,
)
from shared.exercises.seeds import seed_all
from shared.exercises.wrong import Wrong
from shared.ranks.watching import LOOK, IdleWatch, can_watch

QUIET = 1.0  # seconds without any work after which a rank that is waited for will not come back
PATIENCE = 10.0  # seconds for it where its work cannot be watched
SAVED = "step_00000002.pt"


@dataclass(frozen=True)
class Back:
    """How a rank came back: with a result, or refused, with the words of a ValueError."""

    result: Any = None
    refused: str | None = None


def together(rank: int, folder: Path, alone: Wrong, act: Callable[..., Any], *args: Any) -> Back:
    """Return how `act(rank, *args)` ended, once all ranks are back; raise `alone` if they are not.

    A rank that does nothing any more, while this one is back, waits in a collective for it.
    """
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    try:
        back = Back(act(rank, *args))
    except ValueError as error:
        back = Back(refused=str(error))
    (folder / f"back_{rank}").touch()
    watch, deadline = IdleWatch(), time.monotonic() + PATIENCE
    while missing := _missing(folder):
        slow = time.monotonic() > deadline and not can_watch()
        if slow or watch.idle_seconds(missing) > QUIET:
            how = "without an error" if back.refused is None else "with an error"
            alone.seen = f"rank {rank} was back {how}; rank {min(missing)} waits and never returns"
            raise Wrong(alone.mistake, alone.expected, alone.seen, alone.hint)
        time.sleep(LOOK / 10)
    return back


def _missing(folder: Path) -> dict[int, int | None]:
    """Return the process ids of the ranks that are not back; None before it is known."""
    ranks = range(dist.get_world_size())
    late = [rank for rank in ranks if not (folder / f"back_{rank}").exists()]
    files = {rank: folder / f"pid_{rank}" for rank in late}
    texts = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
    return {rank: int(text) if text else None for rank, text in texts.items()}


@dataclass(frozen=True)
class Saved:
    """What a rank saw right after a save: the file on rank 0, its own folder, its generators.

    `returned` is the name of the path that it was given.
    """

    there: bool
    own: list[str]
    states: dict[str, Any]
    returned: str


def save_after_steps(rank: int, folder: Path, save: Callable[..., Any], seed: int) -> Saved:
    """Take two steps, then save into a folder of this rank's own; rank 0 takes its time."""
    seed_all(seed + 1000 * rank)
    state = toy(1, rank, 2)
    train(state, 2)
    whole = torch.save

    def slow(content: Any, file: Any, *args: Any, **options: Any) -> None:
        time.sleep(0.0 if rank or isinstance(file, io.BytesIO) else 0.15)
        whole(content, file, *args, **options)

    with mock.patch.object(torch, "save", slow):
        path = save(folder / f"rank_{rank}", state)
    there = (folder / "rank_0" / SAVED).is_file()
    returned = path.name if isinstance(path, Path) else ""
    return Saved(there, names_in(folder / f"rank_{rank}"), states_now(), returned)


def save_into_a_file(rank: int, folder: Path, save: Callable[..., Any]) -> Any:
    """Save where the folder is a file on rank 0's machine."""
    return save(folder / ("file" if rank == 0 else "fine"), toy(1, rank, 2))


def load_on_rank(
    rank: int, folder: Path, load: Callable[..., Any]
) -> tuple[int, dict[str, float], str]:
    """Return step, next numbers and file's name after a load, where only rank 0 has the folder."""
    seed_all(5)
    state, opened = toy(1, rank, 2), []

    def note(event: str, args: tuple) -> None:
        if event == "open" and rank and str(args[0]).startswith(f"{folder}/step_"):
            opened.append(str(args[0]))

    sys.addaudithook(note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = load(folder if rank == 0 else folder / "elsewhere", state)
    if opened:
        raise Wrong(
            "rank 1 opens the file itself: on another machine it is not there",
            expected="rank 0 reads, and sends what was in the file",
            seen=f"rank 1 opens {Path(opened[0]).name}, the path that it was sent",
        )
    return state.step, draw_numbers(), path.name if isinstance(path, Path) else ""


def load_where_rank_1_differs(rank: int, folder: Path, load: Callable[..., Any]) -> None:
    """Load where rank 1 has its samples in another order.

    A rank that refuses after it was changed leaves a file that says in what.
    """
    state = toy(1, rank, 2)
    state.sampler = CountedSampler(LENGTH, 2, rank, seed=11 + rank)
    before = copy.deepcopy(content_of(state))
    try:
        load(folder if rank == 0 else folder / "elsewhere", state)
    except ValueError:
        now = content_of(state)
        changed = [part for part in now if not equal(now[part], before[part])]
        if changed:
            (folder / f"changed on rank {rank}").write_text(", ".join(changed))
        raise


def resume_on_rank(rank: int, resume: Callable[[WatchedRun], Any]) -> tuple[int, list[int]]:
    """Return how often this rank loaded and at which steps it saved, in a run of 6 steps."""
    run = WatchedRun(toy(1, rank, 2))
    resume(run)
    return run.loads, run.saves
