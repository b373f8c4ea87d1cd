"""How long a pipeline's schedule takes where a message between stages takes time."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

Work = tuple[Literal["F", "B"], int, int]  # forward or backward, micro-batch, stage


def simulate(
    orders: Sequence[Sequence[Work]], backward: float = 1.0, message: float = 0.0
) -> float:
    """The time of a step, in forwards of a stage.

    Every rank keeps to its order and begins as soon as its inputs have arrived. A backward takes
    `backward` forwards, a message `message`; sending takes no time of the rank's.
    """
    last = max(stage for order in orders for _, _, stage in order)
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(orders), [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            place, now = at[rank], free[rank]
            while place < len(order):
                kind, batch, stage = work = order[place]
                other = ("F", batch, stage - 1) if kind == "F" else ("B", batch, stage + 1)
                own = now if kind == "F" else ends.get(("F", batch, stage))
                if own is None:
                    break
                begin = max(now, own)
                if stage != (0 if kind == "F" else last):
                    arrived = ends.get(other)
                    if arrived is None:
                        break
                    begin = max(begin, arrived + message)
                now = ends[*work] = begin + (1.0 if kind == "F" else backward)
                place += 1
            left -= place - at[rank]
            at[rank], free[rank] = place, now
        assert left < before, "these orders end in a deadlock"
    return max(free)


def order_of(pp: int, batches: int, chunks: int, rank: int) -> list[Work]:
    """What a rank of 1F1B does, or with `chunks` above 1 of its interleaved form.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
    """
    total, warmup = batches * chunks, (chunks - 1) * pp + (1 + (chunks > 1)) * (pp - 1 - rank)
    forwards, backwards = [], []
    for k in range(total):
        batch, chunk = k // (pp * chunks) * pp + k % pp, k % (pp * chunks) // pp
        forwards.append(("F", batch, chunk * pp + rank))
        backwards.append(("B", batch, (chunks - 1 - chunk) * pp + rank))
    warmup = min(warmup, total)
    order: list[Work] = forwards[:warmup]
    for forward, back in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, back]
    return order + backwards[total - warmup :]


@lru_cache(maxsize=4096)
def schedule_time(pp: int, batches: int, chunks: int, backward: float, message: float) -> float:
    """`simulate` for 1F1B or interleaved stages, which from some micro-batches on repeat it."""

    def of(count: int) -> float:
        return simulate(
            [order_of(pp, count, chunks, rank) for rank in range(pp)], backward, message
        )

    few = batches - max(0, -(-(batches - 4 * pp) // (2 * pp))) * 2 * pp
    if few == batches:
        return of(batches)
    two, one = of(few), of(few - 2 * pp)
    return two + (batches - few) / (2 * pp) * (two - one)
