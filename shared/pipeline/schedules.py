"""Pipeline schedules as plain tables: which rank does what in which slot of time.

A table has a row for each rank and a column for each slot. A cell is a forward or a backward of
one micro-batch through one stage, which takes a slot, or None where the rank waits. A schedule is
really the *order* of a rank's work; `timetable` finds the slots, and says when there are none.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from shared.errors import InputError


class Cell(NamedTuple):
    """One piece of work: forward ("F") or backward ("B") of a micro-batch through a stage."""

    kind: Literal["F", "B"]
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Order = list[Cell]
Table = list[list[Cell | None]]


def gpipe_schedule(num_stages: int, num_micro_batches: int) -> Table:
    """All forwards, then all backwards, the last micro-batch first. A stage on each rank.

    The table has a row for each stage and 2 (m + p - 1) slots for p stages and m micro-batches.
    Every stage keeps the activations of all micro-batches at once.
    Raises InputError, which says the number, for one below 1.
    Source: Huang et al. 2019, section 2.3.
    """
    _check(num_stages, num_micro_batches)
    batches = range(num_micro_batches)
    return timetable(
        [
            [*(Cell("F", m, s) for m in batches), *(Cell("B", m, s) for m in reversed(batches))]
            for s in range(num_stages)
        ]
    )


def one_f_one_b_schedule(num_stages: int, num_micro_batches: int) -> Table:
    """Forwards until the first backward can begin, then one of each in turns, then backwards.

    As many slots as GPipe. The oldest micro-batch goes back first, and stage s keeps the
    activations of at most num_stages - s micro-batches at once.
    Raises InputError, which says the number, for one below 1.
    Source: Narayanan et al. 2019 (PipeDream), section 3.2, with the flush of Narayanan et al. 2021,
    section 2.2.1.
    """
    _check(num_stages, num_micro_batches)
    orders = []
    for s in range(num_stages):
        forwards = [Cell("F", m, s) for m in range(num_micro_batches)]
        backwards = [Cell("B", m, s) for m in range(num_micro_batches)]
        orders.append(_alternating(forwards, backwards, warmup=num_stages - 1 - s))
    return timetable(orders)


def interleaved_schedule(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Table:
    """1F1B over `num_chunks` stages a rank: rank r has the stages r, r + num_ranks, ...

    The stages are smaller, so that a rank waits for shorter pieces of work; it sends more often.
    Micro-batches come in groups of p = num_ranks: a rank takes p of them through its first stage,
    the same p through its next, and so on, and backwards from its last stage to its first. The
    table has 2 (v m + p - 1) slots, v = num_chunks. For v > 1 at most (v - 1) p + 2 (p - 1 - r) + 1
    forwards of rank r wait for their backward at once; for v = 1 it is 1F1B.
    Raises InputError, which says the number, for one below 1 and for micro-batches that are no
    multiple of num_ranks.
    Source: Narayanan et al. 2021, section 2.2.2.
    """
    _check(num_ranks, num_micro_batches)
    if num_chunks < 1:
        raise InputError(f"the stages of a rank must be 1 or more, got {num_chunks}")
    if num_micro_batches % num_ranks:
        raise InputError(
            f"interleaving goes by groups of {num_ranks} micro-batches, one a rank, and "
            f"{num_micro_batches} are no multiple of it: take "
            f"{-(-num_micro_batches // num_ranks) * num_ranks}"
        )
    group = num_ranks * num_chunks
    total = num_micro_batches * num_chunks
    orders = []
    for rank in range(num_ranks):
        forwards, backwards = [], []
        for k in range(total):
            micro_batch = k // group * num_ranks + k % num_ranks
            chunk = k % group // num_ranks
            forwards.append(Cell("F", micro_batch, chunk * num_ranks + rank))
            last = num_chunks - 1 - chunk
            backwards.append(Cell("B", micro_batch, last * num_ranks + rank))
        warmup = (num_chunks - 1) * num_ranks
        warmup += 2 * (num_ranks - 1 - rank) if num_chunks > 1 else num_ranks - 1 - rank
        orders.append(_alternating(forwards, backwards, warmup))
    return timetable(orders)


def _alternating(forwards: Order, backwards: Order, warmup: int) -> Order:
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [cell for pair in pairs for cell in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def timetable(orders: Sequence[Order]) -> Table:
    """Give every rank's work, in its order, the earliest slots in which its inputs are there.

    A forward needs the stage before it, a backward the next stage and its own forward, each
    in an earlier slot. Raises InputError for orders that end in a deadlock; it names who waits.
    """
    stages = 1 + max((cell.stage for order in orders for cell in order), default=0)
    done: set[Cell] = set()
    places = [0] * len(orders)
    table: Table = [[] for _ in orders]
    while any(at < len(order) for at, order in zip(places, orders, strict=True)):
        now = []
        for rank, order in enumerate(orders):
            cell = order[places[rank]] if places[rank] < len(order) else None
            ready = cell is not None and done.issuperset(prerequisites(cell, stages))
            table[rank].append(cell if ready else None)
            now += [cell] if ready else []
            places[rank] += ready
        if not now:
            waits = [
                f"rank {rank} for {order[at]} of stage {order[at].stage}"
                for rank, (at, order) in enumerate(zip(places, orders, strict=True))
                if at < len(order)
            ]
            raise InputError(f"deadlock: {', '.join(waits)} waits for what nobody does before it")
        done.update(now)
    return table


def prerequisites(cell: Cell, num_stages: int) -> set[Cell]:
    """The work that must be done before this work can begin."""
    kind, micro_batch, stage = cell
    if kind == "F":
        return {Cell("F", micro_batch, stage - 1)} if stage else set()
    next_stage = {Cell("B", micro_batch, stage + 1)} if stage + 1 < num_stages else set()
    return next_stage | {Cell("F", micro_batch, stage)}


def idle_share(table: Table) -> float:
    """The part of all slots in which ranks wait, between 0 and 1: the bubble."""
    cells = [cell for row in table for cell in row]
    return cells.count(None) / len(cells)


def bubble(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """The bubble by formula: (p - 1) / (v m + p - 1). Source: Narayanan et al. 2021, section 2.2.

    The paper divides by the time without bubble; here it is a share of the whole time.
    """
    return (num_ranks - 1) / (num_chunks * num_micro_batches + num_ranks - 1)


def peak_in_flight(table: Table, stage: int) -> int:
    """The most micro-batches of which a stage keeps the activations at one time."""
    cells = (cell for row in table for cell in row if cell is not None)  # a stage is in one row
    return kept_at_once(cell for cell in cells if cell.stage == stage)


def kept_at_once(row: Iterable[Cell | None]) -> int:
    """The most forwards of a rank, over all its stages, that wait for their backward at one time.

    `row` is what the rank does, in order: its row of a table, or the cells that it ran.
    """
    waiting = peak = 0
    for cell in row:
        if cell is not None:
            waiting += 1 if cell.kind == "F" else -1
        peak = max(peak, waiting)
    return peak


def check_table(table: Table, num_ranks: int, num_stages: int, num_micro_batches: int) -> None:
    """Raise InputError, with both numbers, for a table of other ranks, stages or micro-batches."""
    if len(table) != num_ranks:
        raise InputError(
            f"a table of {len(table)} rows for a pipeline of {num_ranks} ranks: "
            f"make the schedule of {num_ranks}"
        )
    places = [(row, cell) for row, cells in enumerate(table) for cell in cells if cell]
    stages = len({cell.stage for _, cell in places})
    if stages != num_stages:
        raise InputError(f"a table of {stages} stages for a pipeline of {num_stages}")
    for row, cell in places:
        if cell.stage % num_ranks != row:
            raise InputError(
                f"the table has stage {cell.stage} in row {row}, and this pipeline has it on "
                f"its rank {cell.stage % num_ranks}"
            )
    known = {cell.micro_batch for _, cell in places}
    if known != set(range(num_micro_batches)):
        raise InputError(
            f"a table of {len(known)} micro-batches for {num_micro_batches}: "
            f"make the schedule of {num_micro_batches}"
        )


def _check(num_stages: int, num_micro_batches: int) -> None:
    for what, number in (("stages", num_stages), ("micro-batches", num_micro_batches)):
        if number < 1:
            raise InputError(f"the number of {what} must be 1 or more, got {number}")
