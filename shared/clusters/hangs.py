"""What all ranks' recordings say together: at which collective they came apart, and by whom."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.clusters.recordings import Call, Recording
from shared.clusters.verdicts import Hang, names
from shared.errors import InputError

Place = tuple[int, int]  # a call's number in its group, and its part
CAME_BACK = {"completed", ""}  # "" where nobody knows


@dataclass(frozen=True)
class _Group:
    """A group's recorded calls by rank and place; `unknown` ranks have lost what they had of it."""

    name: str
    members: tuple[int, ...]
    calls: Mapping[int, Mapping[Place, Call]]
    unknown: tuple[int, ...]

    def places(self) -> list[Place]:
        """The places from which on no rank has lost a call."""
        first = max((min(own) for own in self.calls.values() if own), default=(0, 0))
        return sorted({at for own in self.calls.values() for at in own if at >= first})


def explain_hang(recordings: Sequence[Recording]) -> list[Hang]:
    """One Hang for each group in which the ranks came apart, by the groups' names.

    Calls belong together by their number in the group. A recording keeps the last calls only, so
    they are compared from the latest of the numbers at which the ranks' recordings of the group
    begin. A member that left no recording, or no call of the group, is missing from the first call
    compared, unless its recording is full: it may have lost what it had, and nobody waits for it.
    Missing and odd ranks are those of the earliest number at which there are any. Where every
    member made the same calls, but one came back on some ranks alone, the others are stuck in it.
    Where one came back on no rank, calls after it say nothing: NCCL's ranks run ahead, not equally
    far. Such a group is not in the list, nor is one whose calls are alike: see `compared`.

    Raises InputError for two recordings of one rank.
    """
    return [hang for group in _groups(recordings) if (hang := _came_apart(group)) is not None]


def compared(recordings: Sequence[Recording]) -> list[str]:
    """A line a group: which of whose calls an answer rests on, and of whom nothing is known."""
    lines = []
    for group in _groups(recordings):
        places, made = group.places(), [rank for rank, own in group.calls.items() if own]
        seen = [{own[at].state for own in group.calls.values() if at in own} for at in places]
        line = f"group {group.name} of {names(group.members)}: "
        line += (
            f"calls no. {places[0][0]} to {places[-1][0]}, recorded on {names(made)}"
            if places
            else "no call recorded"
        )
        for at, states in zip(places, seen, strict=True):
            if not states & CAME_BACK:
                line += f"; no. {at[0]} came back on no rank"
                break
        line += "; who came back is not recorded" if {""} in seen else ""
        if group.unknown:
            line += f"; unknown: {names(group.unknown)}, whose full buffer has lost its calls"
        lines.append(line)
    return lines


def _groups(recordings: Sequence[Recording]) -> Iterator[_Group]:
    """The groups by name and ranks: two that split one group may bear the same name."""
    by_rank = {recording.rank: recording for recording in recordings}
    if len(by_rank) < len(recordings):
        ranks = sorted(recording.rank for recording in recordings)
        raise InputError(f"two recordings of one rank, of ranks {ranks}: give one of each")
    pairs = {(name, tuple(own)) for each in recordings for name, own in each.members.items()}
    for name, members in sorted(pairs):
        calls = {rank: _calls_in(by_rank.get(rank), name, members) for rank in members}
        unknown = [r for r in members if r in by_rank and by_rank[r].full and not calls[r]]
        known = {rank: own for rank, own in calls.items() if rank not in unknown}
        yield _Group(name, members, known, tuple(unknown))


def _calls_in(
    recording: Recording | None, name: str, members: tuple[int, ...]
) -> Mapping[Place, Call]:
    if recording is None or tuple(recording.members.get(name, ())) != members:
        return {}
    return {(call.number, call.part): call for call in recording.calls if call.group == name}


def _came_apart(group: _Group) -> Hang | None:
    last = {rank: own[max(own)] for rank, own in group.calls.items() if own}
    for at in group.places():
        made = {rank: own[at] for rank, own in group.calls.items() if at in own}
        missing = tuple(rank for rank in group.calls if rank not in made)
        (what, votes), *_ = Counter(call.what for call in made.values()).most_common()
        majority = 2 * votes > len(made)
        odd = tuple(rank for rank, call in made.items() if call.what != what or not majority)
        if missing or odd:
            return Hang(group.name, at[0], what, missing, odd, last, made=made)
        stuck = tuple(rank for rank, call in made.items() if call.state not in CAME_BACK)
        if len(stuck) == len(made):
            return None  # all hang in this one: who was told to make more after it is no matter
        if stuck and any(call.state == "completed" for call in made.values()):
            return Hang(group.name, at[0], what, (), (), last, stuck)
    return None
