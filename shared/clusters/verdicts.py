"""What the functions of this room find, and each in one line of words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from shared.clusters.recordings import Call

OwnSeconds = Float[Tensor, "steps ranks"]


@dataclass(frozen=True)
class Odd:
    """A rank whose links are unlike the others': `slow` is "sending", "receiving" or "both".

    `ratio` is its fastest link in that direction over the typical link among the others.
    """

    rank: int
    slow: str
    ratio: float


@dataclass(frozen=True)
class Straggler:
    """A rank that is late in most steps: in `late` of `steps`, and the seconds that it cost."""

    rank: int
    late: int
    steps: int
    lost: float


@dataclass(frozen=True)
class Hang:
    """A group's first call that not all of its ranks made alike.

    `missing` never made call `number`; `odd` made another one than most (all, where no call has a
    majority). Where all made it alike, `stuck` never came back from it, and others did (NCCL's
    recordings say so). `what` is the call of most. `last` has each recorded member's last call in
    the group, `made` what it made as call `number`, where that is known.
    """

    group: str
    number: int
    what: str
    missing: tuple[int, ...]
    odd: tuple[int, ...]
    last: Mapping[int, Call] = field(default_factory=dict)
    stuck: tuple[int, ...] = ()
    made: Mapping[int, Call] = field(default_factory=dict)


def describe_odd(odd: Odd) -> str:
    """One line about it."""
    way = {"both": "both directions", "sending": "sending", "receiving": "receiving"}[odd.slow]
    return f"rank {odd.rank}'s links are {odd.ratio:.1f} times as slow as the others' ({way})"


def describe_straggler(found: Straggler) -> str:
    """One line about it."""
    return (
        f"rank {found.rank} is late in {found.late} of {found.steps} steps, and the others waited"
        f" {found.lost:.2f} s for it"
    )


def describe_hang(hang: Hang, said: Mapping[int, str] | None = None) -> str:
    """One line about it; `said` has the errors of ranks, of which only the guilty ones' count."""
    said = said or {}
    guilty = hang.missing + hang.odd + hang.stuck
    if hang.odd:
        others = "and the others " if hang.last.keys() - guilty else ""  # all are odd
        words = f"{names(hang.odd)} {others}do not make the same one"
        line = f"call no. {hang.number}: {words} ({hang.what})"
    elif hang.stuck:
        line = f"{hang.what} no. {hang.number} came back on the others, not on {names(hang.stuck)}"
    else:
        line = f"{hang.what} no. {hang.number} waits for {names(hang.missing)}"
    for rank in guilty:
        call = hang.made.get(rank)
        if rank in hang.odd and call is not None and call != hang.last[rank]:
            line += f"; rank {rank} made {call.what}{_at(call)}"
        if rank in hang.last:
            call = hang.last[rank]
            line += f"; rank {rank}'s last call: no. {call.number}, {call.what}{_at(call)}"
        elif rank in hang.missing:
            line += f"; rank {rank} left no recording or no call of this group"
        if said.get(rank):
            line += f"; rank {rank} said: {said[rank]}"
    return line


def names(ranks: Sequence[int]) -> str:
    """Some ranks in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _at(call: Call) -> str:
    return f", at {call.at}" if call.at != "?" else ""
