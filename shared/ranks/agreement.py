"""Ranks that must agree: a difference is an error on every rank, before it becomes a hang."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from shared.errors import InputError
from shared.ranks.group import current_world_size


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
        seen = ", ".join(f"rank {rank}: {_short(each)}" for rank, each in enumerate(values))
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


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def fingerprint(texts: Iterable[str]) -> str:
    """A short name for texts without NUL characters, equal only where all and their order are."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:12]
