"""Runs on forked ranks, watched moment by moment, and where what they hold is drawn."""

import functools
import itertools
from collections.abc import Callable, Iterable
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

    def shoot(self, row: Any, says: str) -> bool:
        """Whether the moment is another one than the last, and kept."""
        other = not self.rows or self.rows[-1] != row
        if other:
            self.rows.append(row)
            self.says.append(says)
        return other


def one_picture(films: list[Film], rows: list[str], begin: str) -> State:
    """The ranks' films side by side, with the same events in the same order.

    It begins at the first moment of which it says `begin`.
    """
    assert all(film.says == films[0].says for film in films), [film.says for film in films]
    frames = [
        list(itertools.chain(*moment)) for moment in zip(*(f.rows for f in films), strict=True)
    ]
    says = films[0].says
    return {"rows": rows, "frames": frames, "says": says, "begins": first_of(says, begin)}


def first_of(says: Iterable[str], begin: str) -> int:
    """The first moment of which a film says `begin`."""
    return next(n for n, words in enumerate(says) if begin in words)


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
    tenths = size * 10 % 1024 == 0
    return f"{size / 1024:,.{1 if tenths else 2}f} KiB"


# Where a drawing puts the ranks: column and row of each

Places = list[tuple[float, float]]


def in_rows(rows: list[list[int]]) -> Places:
    """Rows of ranks, each in the middle."""
    widest = max(map(len, rows))
    found = {
        rank: (column + (widest - len(row)) / 2, number)
        for number, row in enumerate(rows)
        for column, rank in enumerate(row)
    }
    return [found[rank] for rank in range(len(found))]


def around(ranks: int) -> Places:
    """There along the upper row, and back along the lower one."""
    above = ranks if ranks < 3 else -(-ranks // 2)
    return in_rows([list(range(above)), list(range(ranks - 1, above - 1, -1))])


def down_a_tree(ranks: int) -> Places:
    """A rank stands below the one whose number has its lowest bit cleared."""
    deepest = max(rank.bit_count() for rank in range(ranks))
    return in_rows(
        [[r for r in range(ranks) if r.bit_count() == depth] for depth in range(deepest + 1)]
    )


def below_the_first(ranks: int) -> Places:
    """Rank 0 above all others."""
    others = list(range(1, ranks))
    return in_rows([[0], *(others[n : n + 4] for n in range(0, len(others), 4))])
