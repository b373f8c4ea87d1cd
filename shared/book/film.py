"""Runs on forked ranks, watched moment by moment: what recorded pictures are made of."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from shared.book.planned import State
from shared.exercises.answers import import_what_torch_puts_off
from shared.ranks.forked import run_ranks

Row = list[list[str]]
EMPTY, BLUE_LIGHT = ["", "#e6e6e6"], "#a6cee3"


class Film:
    """What one rank shows, moment by moment; a moment like the one before is left out."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.says: list[str] = []

    def shoot(self, row: Any, says: str) -> None:
        if not self.rows or self.rows[-1] != row:
            self.rows.append(row)
            self.says.append(says)


def one_picture(films: list[Film], rows: list[str], begin: str) -> State:
    """The ranks' films side by side, with the same events in the same order.

    It begins at the first moment of which it says `begin`.
    """
    assert all(film.says == films[0].says for film in films), [film.says for film in films]
    frames = [
        list(itertools.chain(*moment)) for moment in zip(*(f.rows for f in films), strict=True)
    ]
    says = films[0].says
    begins = next(n for n, words in enumerate(says) if begin in words)
    return {"rows": rows, "frames": frames, "says": says, "begins": begins}


@functools.cache
def runs(
    watched: Callable[..., Any], ranks: int, choices: tuple[tuple[Any, ...], ...]
) -> dict[tuple[Any, ...], list[Any]]:
    """What `watched(*variant)` returns on each rank, for all variants of the choices: one fork."""
    import_what_torch_puts_off()
    variants = list(itertools.product(*choices))
    recorded = run_ranks(lambda _: [watched(*each) for each in variants], ranks, timeout=240)
    return {variant: [rank[number] for rank in recorded] for number, variant in enumerate(variants)}


def kib(size: float) -> str:
    """Bytes in the unit of these small models."""
    return f"{size / 1024:,.1f} KiB"
