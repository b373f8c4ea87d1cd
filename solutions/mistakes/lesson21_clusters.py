"""Wrong answers to lesson 21, each with the words that the check must say to it."""

from collections import Counter

import torch

from shared.errors import InputError
from shared.exercises.mistakes import mistake
from solutions import lesson21_clusters as right
from solutions.lesson21_clusters import Hang, Odd, Straggler

# 21.1 find_odd


def odd_by(
    fastest=lambda links: links.min(), diagonal=False, whole=False, directions="both", limit=None
):
    """The function, with what is to go wrong."""

    def find_odd(seconds, factor=4.0):
        n = len(seconds)
        found = []
        apart = ~torch.eye(n, dtype=torch.bool)
        for rank in range(n if n > 2 else 0):
            others = torch.arange(n) != rank
            among = seconds[apart] if whole else seconds[others][:, others][apart[:-1, :-1]]
            typical = limit or among.quantile(0.5)
            row = seconds[rank] if diagonal else seconds[rank, others]
            column = seconds[:, rank] if diagonal else seconds[others, rank]
            out, into = fastest(row) / typical, fastest(column) / typical
            slow = {(True, True): "both", (True, False): "sending", (False, True): "receiving"}
            words = slow.get((bool(out > factor), bool(into > factor)))
            if words and directions in ("both", words):
                found.append(Odd(rank, words, float(max(out, into))))
        return sorted(found, key=lambda odd: -odd.ratio)

    return find_odd


@mistake("21.1", says="healthy ranks are named")
def find_odd(seconds, factor=4.0):
    return odd_by(fastest=lambda links: links.mean())(seconds, factor)


@mistake("21.1", says="the diagonal is looked at")
def find_odd(seconds, factor=4.0):
    return odd_by(diagonal=True)(seconds, factor)


@mistake("21.1", says="the typical link is taken over the rank's own links, too")
def find_odd(seconds, factor=4.0):
    return odd_by(whole=True)(seconds, factor)


@mistake("21.1", says="a rank that receives slowly is not found")
def find_odd(seconds, factor=4.0):
    return [odd for odd in right.find_odd(seconds, factor) if odd.slow != "receiving"]


@mistake("21.1", says="a rank that sends slowly is not found")
def find_odd(seconds, factor=4.0):
    return [odd for odd in right.find_odd(seconds, factor) if odd.slow != "sending"]


@mistake("21.1", says="only one rank is named")
def find_odd(seconds, factor=4.0):
    return right.find_odd(seconds, factor)[:1]


@mistake("21.1", says="the ratio: its fastest link over the others' median")
def find_odd(seconds, factor=4.0):
    found = right.find_odd(seconds, factor)
    return [
        Odd(odd.rank, odd.slow, float(seconds.max() / seconds[seconds > 0].min())) for odd in found
    ]


@mistake("21.1", says="a link that is NaN is accepted")
def find_odd(seconds, factor=4.0):
    return right.find_odd(seconds.nan_to_num(0.0), factor)


# 21.2 find_straggler


def slowest(seconds, factor, late, rank_of):
    """A straggler of these counts, where there is one in most steps."""
    ranks = seconds.shape[1]
    if ranks == 1:
        return None
    found = []
    for rank in range(ranks):
        own, others = seconds[:, rank], seconds[:, torch.arange(ranks) != rank]
        count = int(late(own, others, seconds).sum())
        if 2 * count > len(seconds):
            lost = (own - others.amax(1)).clamp(min=0).sum().item()
            found.append(Straggler(rank, count, len(seconds), lost))
    return rank_of(found) if found else None


def dearest(found):
    return max(found, key=lambda each: each.lost)


@mistake("21.2", says="one long pause decides")
def find_straggler(seconds, factor=2.0):
    means = seconds.mean(0)
    rank = int(means.argmax())
    others = means[torch.arange(len(means)) != rank]
    if len(means) == 1 or means[rank] <= factor * others.median():
        return None
    return right.find_straggler(seconds, factor) or Straggler(rank, 1, len(seconds), 0.0)


@mistake("21.2", says="nobody is named: is the rank's own time in the median")
def find_straggler(seconds, factor=2.0):
    def late(own, others, whole):
        return own > factor * whole.quantile(0.5, dim=1)

    return slowest(seconds, factor, late, dearest)


@mistake("21.2", says="the slowest rank is named, though nobody is late")
def find_straggler(seconds, factor=2.0):
    rank = int(seconds.median(0).values.argmax())
    found = right.find_straggler(seconds, factor)
    return found or Straggler(rank, 0, len(seconds), 0.0)


@mistake("21.2", says="compared with the median: the others wait for the slowest of themselves")
def find_straggler(seconds, factor=2.0):
    found = right.find_straggler(seconds, factor)
    if found is None:
        return None
    own = seconds[:, found.rank]
    others = seconds[:, torch.arange(seconds.shape[1]) != found.rank]
    lost = (own - others.quantile(0.5, dim=1)).clamp(min=0).sum().item()
    return Straggler(found.rank, found.late, found.steps, lost)


@mistake("21.2", says="steps in which it is ahead are taken off")
def find_straggler(seconds, factor=2.0):
    found = right.find_straggler(seconds, factor)
    if found is None:
        return None
    others = seconds[:, torch.arange(seconds.shape[1]) != found.rank]
    lost = (seconds[:, found.rank] - others.amax(1)).sum().item()
    return Straggler(found.rank, found.late, found.steps, lost)


# 21.3 explain_hang


def compared(
    recordings,
    *,
    first=max,
    by_place=False,
    what=lambda call: call.what,
    truth=None,
    everybody=False,
    died=True,
    one=False,
    missing_first=False,
    tie=True,
    heeds_full=True,
):
    """The function, with what is to go wrong."""
    by_rank = {each.rank: each for each in recordings}
    if len(by_rank) < len(recordings):
        raise InputError(f"two recordings of one rank: {sorted(e.rank for e in recordings)}")
    groups = {g: ranks for each in recordings for g, ranks in each.members.items()}
    found = []
    for group, members in sorted(groups.items()):
        members = tuple(by_rank) if everybody else members
        calls = {}
        for rank in members if died else [r for r in members if r in by_rank]:
            own = [c for c in by_rank[rank].calls if c.group == group] if rank in by_rank else []
            calls[rank] = {n if by_place else c.number: c for n, c in enumerate(own, 1)}
            if heeds_full and rank in by_rank and by_rank[rank].full and not own:
                del calls[rank]
        if not any(calls.values()):
            continue
        last = {rank: own[max(own)] for rank, own in calls.items() if own}
        begin = first(min(own) for own in calls.values() if own)
        numbers = range(begin, max(max(own) for own in calls.values() if own) + 1)
        for missing_alone in (True, False) if missing_first else (False,):
            hang = None
            for number in numbers:
                made = {rank: what(own[number]) for rank, own in calls.items() if number in own}
                missing = tuple(rank for rank in calls if rank not in made)
                (most, votes), *_ = Counter(made.values()).most_common()
                if truth is not None and truth in made:
                    most, votes = made[truth], len(made)
                sure = 2 * votes > len(made) or not tie
                odd = tuple(r for r, each in made.items() if each != most or not sure)
                if missing or (odd and not missing_alone):
                    words = most if isinstance(most, str) else most[0]
                    hang = Hang(group, number, words, missing, odd, last)
                    break
            if hang:
                found.append(hang)
                break
    return found[:1] if one else found


@mistake("21.3", says="calls are compared by their place in the list")
def explain_hang(recordings):
    return compared(recordings, by_place=True)


@mistake("21.3", says="what a full buffer has lost counts as missing")
def explain_hang(recordings):
    return compared(recordings, first=min)


@mistake("21.3", says="a full buffer may have lost all that it had of a group")
def explain_hang(recordings):
    return compared(recordings, heeds_full=False)


@mistake("21.3", says="numbers of calls alone are compared")
def explain_hang(recordings):
    return [hang for hang in compared(recordings) if not hang.odd]


@mistake("21.3", says="a rank that left no recording is not missed")
def explain_hang(recordings):
    return compared(recordings, died=False)


@mistake("21.3", says="ranks are missing from a group that they are not in")
def explain_hang(recordings):
    found = compared(recordings, everybody=len({r.rank for r in recordings}) == 4)
    return found if any(h.group == "2" for h in found) else right.explain_hang(recordings)


@mistake("21.3", says="the same call from another line is no other call")
def explain_hang(recordings):
    return compared(recordings, what=lambda call: (call.what, call.at))
