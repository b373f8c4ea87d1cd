"""Collectives, message by message: whose numbers each rank holds in each chunk after each round.

A round is as long as a message: a rank sends at most one in it, and receives at most one.
"""

import functools
import itertools

from shared.book.film import around, below_the_first, down_a_tree
from shared.book.planned import State, count
from shared.plots import ORANGE, SKY

SUMS = ("reduce", "all_reduce", "reduce_scatter")
COLLECTIVES = ("broadcast", "scatter", "gather", "all_gather", *SUMS, "all_to_all")
PLACES = {"ring": around, "tree": down_a_tree, "central rank": below_the_first}
WAYS = tuple(PLACES)
READ = {"S": "the whole tensor", "orange, blue": "has just come, complete"}

Chunks = dict[int, frozenset[int]]  # of which ranks a message or a rank has numbers, by chunk
Message = tuple[int, int, Chunks]  # from, to, what
Film = list[tuple[list[Chunks], list[Message]]]  # what each rank holds, after which messages


def collective(operation: str, way: str, ranks: int) -> State:
    """A collective's rounds, and what each way of doing it sends."""
    films = {each: film(operation, each, ranks) for each in WAYS}
    shown, last = films[way], len(films[way]) - 1
    says = [f"Before the first of {count(last, 'round')}: what goes into {operation}."]
    for number, (_, messages) in enumerate(shown[1:], 1):
        source, to, what = messages[0]
        more = f", and {count(len(messages) - 1, 'message')} more" if len(messages) > 1 else ""
        sent = f"rank {source} sends {_parts(operation, what)} to rank {to}"
        says.append(f"Round {number} of {last}: {sent}{more}.")
    return {
        "rows": [f"rank {rank}" for rank in range(ranks)],
        "columns": [f"chunk {chunk}" for chunk in range(ranks)],
        "frames": [_frame(operation, *moment) for moment in shown],
        "numbers": {each: _cost(operation, films[each], ranks) for each in WAYS} | READ,
        "says": says,
        "begins": min(2, last),
        "piece": f"S/{ranks}{' each' * (operation == 'all_to_all')}",
        **_drawn(shown, way, ranks, 1 if operation in COLLECTIVES[:4] else ranks),
        "legend": "A band is a rank's numbers in a chunk; a tile's edge is orange where they have"
        " just come, blue where complete; an arrow is a message.",
    }


def ring(ranks: int) -> State:
    """An all-reduce around a ring: who is in the sum of each chunk after each step."""
    frames, steps = [], 2 * (ranks - 1)
    says = [f"Before the first step each of {ranks} ranks has its own numbers in each chunk."]
    for step, (held, messages) in enumerate(film("all_reduce", "ring", ranks)):
        frames.append([[_whose(row[c], ranks) for c in range(ranks)] for row in held])
        if not step:
            continue
        half = "reduce-scatter" if step < ranks else "all-gather"
        complete = sum(len(those) == ranks for row in held for those in row.values())
        _, to, (sent,) = messages[0]
        says.append(
            f"Step {step} of {steps} ({half}): rank 0 sent chunk {sent} to rank {to};"
            f" {complete} of {ranks * ranks} chunks are complete."
        )
    return {
        "rows": [f"rank {rank}" for rank in range(ranks)],
        "frames": frames,
        "columns": [f"chunk {chunk}" for chunk in range(ranks)],
        "numbers": {
            "steps, one after the other": steps,
            "each rank sends, of the tensor": f"{steps / ranks:.3f} S",
            "a central rank would send": f"{ranks - 1} S",
        },
        "says": says,
        "begins": min(3, len(frames) - 1),
        "piece": f"S/{ranks}",
        **_drawn(film("all_reduce", "ring", ranks), "ring", ranks, ranks),
        "legend": "A band is a rank's numbers in a chunk; an arrow is a message that has just"
        " come.",
    }


def _drawn(moments: Film, way: str, ranks: int, slots: int) -> State:
    """Where the ranks stand, and of each moment who sent to each of them: a digit, or a dot.

    In a tile each rank's numbers have a slot of their own, or one for all.
    """
    moves = []
    for _, messages in moments:
        sources = {to: str(source) for source, to, _ in messages}
        moves.append("".join(sources.get(rank, ".") for rank in range(ranks)))
    return {"moves": moves, "places": PLACES[way](ranks), "slots": slots}


@functools.cache
def film(operation: str, way: str, ranks: int) -> Film:
    """All rounds of a collective; what the ranks hold before the first comes first."""
    held = [_before(operation, rank, ranks) for rank in range(ranks)]
    moments: Film = [([dict(each) for each in held], [])]
    for number in range(3 * ranks):
        messages = [m for m in _round(operation, way, held, number) if m[2]]
        for _, to, what in messages:
            for chunk, those in what.items():
                held[to][chunk] = held[to].get(chunk, frozenset()) | those
        if messages:
            moments.append(([dict(each) for each in held], messages))
    return moments


def wanted(operation: str, rank: int, ranks: int) -> Chunks:
    """What a rank has to hold in the end."""
    everybody, chunks = frozenset(range(ranks)), range(ranks)
    if operation in ("broadcast", "scatter"):
        return {c: frozenset({0}) for c in chunks if operation == "broadcast" or c == rank}
    if operation in ("gather", "reduce") and rank:
        return {}
    if operation in ("gather", "all_gather"):
        return {c: frozenset({c}) for c in chunks}
    return {c: everybody for c in chunks if operation in ("reduce", "all_reduce") or c == rank}


def blocks(operation: str, what: Chunks) -> int:
    """The size of a message, in chunks: a sum is one however many are in it."""
    return sum(1 if operation in SUMS else len(those) for those in what.values())


def _before(operation: str, rank: int, ranks: int) -> Chunks:
    mine = frozenset({rank})
    if operation in ("broadcast", "scatter"):
        return dict.fromkeys(range(ranks), mine) if rank == 0 else {}
    if operation in ("gather", "all_gather"):
        return {rank: mine}
    return dict.fromkeys(range(ranks), mine)


def _round(operation: str, way: str, held: list[Chunks], number: int) -> list[Message]:
    """The messages of a round; after the last they are empty."""
    ranks = len(held)
    if way == "ring":
        return [_to_the_next(operation, held, rank, number) for rank in range(ranks)]
    branches = [[(rank, 0, 1)] for rank in range(1, ranks)]
    if way == "tree":
        sizes = [2**bit for bit in range((ranks - 1).bit_length())]
        branches = [[(r, r - size, size) for r in range(size, ranks, 2 * size)] for size in sizes]
    up = [] if operation in ("broadcast", "scatter") else branches
    down = [] if operation in ("gather", "reduce") else branches[::-1]
    if number < len(up):
        return [_to_the_root(operation, held, *branch) for branch in up[number]]
    now = down[number - len(up) :][:1]
    return [_from_the_root(operation, held, *branch) for branch in itertools.chain(*now)]


def _to_the_root(operation: str, held: list[Chunks], rank: int, root: int, size: int) -> Message:
    """All that a branch of `size` ranks has, but for what its own ranks get of each other."""
    stays = range(rank, rank + size) if operation == "all_to_all" else ()
    return rank, root, {c: those for c, those in held[rank].items() if c not in stays}


def _from_the_root(operation: str, held: list[Chunks], rank: int, root: int, size: int) -> Message:
    """What the ranks of a branch are to hold, of what its first rank has not."""
    ends = [wanted(operation, each, len(held)) for each in range(rank, min(rank + size, len(held)))]
    missing = {
        c: those if operation in SUMS else those - held[rank].get(c, frozenset())
        for c, those in held[root].items()
        if any(c in end for end in ends)
    }
    return root, rank, {c: those for c, those in missing.items() if those}


def _to_the_next(operation: str, held: list[Chunks], rank: int, number: int) -> Message:
    """A rank's message to its neighbour, who is the lower one where rank 0 is to have it all."""
    ranks, to = len(held), rank + (-1 if operation in ("gather", "reduce") else 1)
    opened = {  # from one end of the line to the other
        "broadcast": number - rank,
        "scatter": ranks - 1 - number + rank,
        "gather": rank + number,
        "reduce": number - (ranks - 1 - rank),
    }
    if operation in opened:
        chunk = opened[operation]
        least = to if operation == "scatter" else 0
        goes = 0 <= to < ranks and least <= chunk < ranks
        return rank, to % ranks, {chunk: held[rank][chunk]} if goes else {}
    if number >= (ranks - 1) * (2 if operation == "all_reduce" else 1):
        return rank, to % ranks, {}
    if operation == "all_to_all":
        source = (rank - number) % ranks
        further = [(source + distance) % ranks for distance in range(number + 1, ranks)]
        return rank, to % ranks, dict.fromkeys(further, frozenset({source}))
    chunk = (rank - number - (operation != "all_gather")) % ranks
    return rank, to % ranks, {chunk: held[rank][chunk]}


def _cost(operation: str, moments: Film, ranks: int) -> str:
    """Rounds, and what leaves and reaches the busiest ranks, in sizes of the whole tensor."""
    sent, received = [0] * ranks, [0] * ranks
    for _, messages in moments:
        for source, to, what in messages:
            sent[source] += blocks(operation, what)
            received[to] += blocks(operation, what)
    rounds = count(len(moments) - 1, "round")
    return f"{rounds}, out {max(sent) / ranks:.2f} S, in {max(received) / ranks:.2f} S"


def _frame(operation: str, held: list[Chunks], messages: list[Message]) -> list[list[list[str]]]:
    """A row a rank: whose numbers are in a chunk; coloured if just come, or complete."""
    came, ranks = {(to, chunk) for _, to, what in messages for chunk in what}, len(held)
    due = [wanted(operation, rank, ranks) for rank in range(ranks)]

    def cell(rank: int, chunk: int) -> list[str]:
        those = held[rank].get(chunk, frozenset())
        text, colour = _whose(those, ranks, "+" if operation in SUMS else " ")
        if (rank, chunk) in came:
            colour = ORANGE
        elif chunk in due[rank] and those >= due[rank][chunk]:
            colour = SKY
        return [text, colour]

    return [[cell(rank, chunk) for chunk in range(ranks)] for rank in range(ranks)]


def _whose(those: frozenset[int], full: int, sign: str = "+") -> list[str]:
    """Whose numbers, and a colour: the more, the darker; that of a message where all are there."""
    level = round(240 - 70 * (len(those) - 1) / max(1, full - 1))
    colour = SKY if len(those) == full else f"#{level:02x}{level:02x}{level:02x}"
    return [sign.join(map(str, sorted(those))), colour if those else "#ffffff"]


def _parts(operation: str, what: Chunks) -> str:
    """A message in words."""
    size = blocks(operation, what)
    return f"chunk {next(iter(what))}" if len(what) == size == 1 else count(size, "chunk")
