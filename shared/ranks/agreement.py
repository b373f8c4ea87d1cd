"""Ranks that must agree: a difference is an error on every rank, before it becomes a hang."""

import contextlib
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shared.errors import InputError
from shared.ranks.group import current_rank, current_world_size

LATE = 2.0  # seconds by which a network disk may show a new file later to another machine


def agree_on(what: str, value: Any, advice: str = "") -> None:
    """Compare a small value (anything that pickles and has ==) over all ranks.

    Collectives are matched by their order alone. A rank that has one batch more than the others,
    or another model, waits in an all-reduce that nobody joins, for minutes, without a word. One
    exchange beforehand costs a message and says who differs.

    Raises InputError on every rank, with each rank's value, unless all are equal; `advice` says
    what to do. Without a process group, or with one rank, there is nothing to compare.
    """
    values = gathered(value)
    if any(other != values[0] for other in values):
        seen = ", ".join(f"rank {rank}: {_short(other)}" for rank, other in enumerate(values))
        raise InputError(f"the ranks differ in {what} ({seen})" + (f"; {advice}" if advice else ""))


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks; call on every rank."""
    values = [value] * current_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def first_word(own: str) -> str:
    """Return what the first rank that has something to say says, else ""; call on every rank."""
    return next(filter(None, gathered(own)), "")


@contextlib.contextmanager
def refused_by_any() -> Generator[None]:
    """Raise on every rank what one of them refuses within, in its words; all come to its end.

    For what rank 0 alone writes: with its error on rank 0 the others would wait for it.
    """
    why = ""
    try:
        yield
    except InputError as error:
        why = str(error)
    if words := first_word(why):
        raise InputError(words)


def appears(file: Path) -> bool:
    """Whether a file that another machine has written is there, at once or within LATE seconds."""
    until = time.monotonic() + LATE
    while not (there := os.path.exists(file)) and time.monotonic() < until:
        time.sleep(0.05)
    return there


def agree_on_folder(folder: Path, what: str) -> None:
    """Make a folder for all ranks to write to, and see that it is one and the same; a collective.

    On several machines a path may lead to a disk of each. Then every rank writes its part of a
    checkpoint, all end well, and nobody can read it again. So rank 0 leaves a file, and the others
    look for it.

    Raises InputError on every rank, beginning with `what`, where one cannot write or sees no file.
    """
    place = f"rank {current_rank()} on {socket.gethostname()}"
    names = gathered(f".seen_{uuid.uuid4().hex}")
    own, of_rank_0 = folder / names[current_rank()], folder / names[0]
    try:
        with refused_by_any():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                own.write_text(" ")  # a full disk takes an empty file
            except OSError as error:
                words = f"cannot be written ({error.strerror}): give a folder that can"
                words += f" ({place})" * (len(names) > 1)
                raise InputError(f"{what} {folder} {words}") from None
        blind = list(filter(None, gathered("" if appears(of_rank_0) else place)))
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
    if blind:
        raise InputError(
            f"{what} {folder} is not one folder for all: what rank 0 writes there is not seen by"
            f" {', '.join(blind[:8])}; give one on a disk that all nodes share"
        )


def agree_on_place(folder: Path, what: str) -> None:
    """See that what is written beside a folder can take its name, for all ranks; a collective.

    A link stays: the folder is the one that it leads to. Raises InputError as `agree_on_folder`,
    and for a mount point, which cannot be renamed.
    """
    agree_on_folder(folder, what)
    agree_on_folder(folder.resolve().parent, f"{what} writes beside its folder:")
    with refused_by_any():
        if os.path.ismount(folder.resolve()):
            raise InputError(f"{what} {folder} is a mount point: give a folder inside it")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def fingerprint(texts: Iterable[str]) -> str:
    """A short name for texts without NUL characters, equal only where all and their order are."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:12]
