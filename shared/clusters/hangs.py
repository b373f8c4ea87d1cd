"""What all ranks' recordings say together: at which collective they came apart, and by whom."""

from collections import Counter
from collections.abc import Mapping, Sequence

from shared.clusters.recordings import Call, Recording
from shared.clusters.verdicts import Hang
from shared.errors import InputError


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
        if not made:  # a number that no recording has
            continue
        missing = tuple(rank for rank in calls if rank not in made)
        (what, votes), *_ = Counter(made.values()).most_common()
        majority = 2 * votes > len(made)
        odd = tuple(rank for rank, each in made.items() if each != what or not majority)
        if missing or odd:
            return Hang(group, number, what, missing, odd, last)
    return None
