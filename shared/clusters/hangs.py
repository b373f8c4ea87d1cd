"""What all ranks' recordings say together: at which collective they came apart, and by whom."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.clusters.recordings import Call, Recording
from shared.errors import InputError


@dataclass(frozen=True)
class Hang:
    """A group's first call that not all of its ranks made alike.

    `missing` never made call `number`; `odd` made another one than most (all, where no call has a
    majority). `what` is the call of most. `last` has each recorded member's last call in the group.
    """

    group: str
    number: int
    what: str
    missing: tuple[int, ...]
    odd: tuple[int, ...]
    last: Mapping[int, Call] = field(default_factory=dict)


def explain_hang(recordings: Sequence[Recording]) -> list[Hang]:
    """One Hang for each group in which the ranks came apart, by the groups' names.

    Calls belong together by their number in the group. A recording keeps the last calls only, so
    they are compared from the latest of the numbers at which the ranks' recordings of the group
    begin. A member that left no recording, or no call of the group, is missing from the first call
    compared. Missing and odd ranks are those of the earliest number at which there are any.
    Where every member made the same calls, the group is not in the list: if it hangs, then inside
    that call, and the recordings do not say by whom.

    Raises InputError for two recordings of one rank.
    """
    by_rank = {each.rank: each for each in recordings}
    if len(by_rank) < len(recordings):
        ranks = sorted(each.rank for each in recordings)
        raise InputError(f"two recordings of one rank, of ranks {ranks}: give one of each")
    members = {name: ranks for each in recordings for name, ranks in each.members.items()}
    found = []
    for group in sorted(members):
        calls = {
            rank: {call.number: call for call in by_rank[rank].calls if call.group == group}
            if rank in by_rank
            else {}
            for rank in members[group]
        }
        hang = _first_difference(group, calls)
        if hang is not None:
            found.append(hang)
    return found


def _first_difference(group: str, calls: Mapping[int, Mapping[int, Call]]) -> Hang | None:
    if not any(calls.values()):
        return None
    first = max(min(own) for own in calls.values() if own)
    last = {rank: own[max(own)] for rank, own in calls.items() if own}
    for number in range(first, max(call.number for call in last.values()) + 1):
        made = {rank: own[number].what for rank, own in calls.items() if number in own}
        missing = tuple(rank for rank in calls if rank not in made)
        (what, votes), *_ = Counter(made.values()).most_common()
        majority = 2 * votes > len(made)
        odd = tuple(rank for rank, each in made.items() if each != what or not majority)
        if missing or odd:
            return Hang(group, number, what, missing, odd, last)
    return None


def describe_hang(hang: Hang, said: Mapping[int, str] | None = None) -> str:
    """One line about it; `said` has the errors of ranks, of which only the guilty ones' count."""
    said = said or {}
    guilty = hang.missing + hang.odd
    if hang.odd:
        others = "and the others do not make the same one"
        line = f"call no. {hang.number}: {_names(hang.odd)} {others} ({hang.what})"
    else:
        line = f"{hang.what} no. {hang.number} waits for {_names(hang.missing)}"
    for rank in guilty:
        if rank in hang.last:
            call = hang.last[rank]
            line += f"; rank {rank}'s last call: no. {call.number}, {call.what}, at {call.at}"
        elif rank in hang.missing:
            line += f"; rank {rank} left no call of this group"
        if said.get(rank):
            line += f"; rank {rank} said: {said[rank]}"
    return line


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
