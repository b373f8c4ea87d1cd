"""Wrong answers to lesson 21, each with the words that the check must say to it."""

from collections import Counter
from dataclasses import replace

import torch

from shared.exercises.mistakes import mistake
from solutions import lesson21_clusters as right
from solutions.lesson21_clusters import Hang, Odd, Straggler

# 21.1 find_odd


def odd_by(fastest=lambda links: links.min(), diagonal=False, whole=False):
    """The function, with what is to go wrong."""

    def find_odd(seconds, factor=4.0):
        n = len(seconds)
        found = []
        apart = ~torch.eye(n, dtype=torch.bool)
        for rank in range(n if n > 2 else 0):
            others = torch.arange(n) != rank
            among = seconds[apart] if whole else seconds[others][:, others][apart[:-1, :-1]]
            typical = among.quantile(0.5)
            row = seconds[rank] if diagonal else seconds[rank, others]
            column = seconds[:, rank] if diagonal else seconds[others, rank]
            out, into = fastest(row) / typical, fastest(column) / typical
            slow = {(True, True): "both", (True, False): "sending", (False, True): "receiving"}
            words = slow.get((bool(out > factor), bool(into > factor)))
            if words:
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
    for rank in range(seconds.shape[1]):
        late = seconds[:, rank] > factor * seconds.quantile(0.5, dim=1)
        if 2 * int(late.sum()) > len(seconds):
            return right.find_straggler(seconds, factor)
    return None


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


# 21.3 explain_hang


def renumbered(recording):
    """The recording with each group's calls counted from the first that it still has."""
    seen = Counter()
    calls = []
    for call in recording.calls:
        seen[call.group] += 1
        calls.append(replace(call, number=seen[call.group]))
    return replace(recording, calls=tuple(calls))


@mistake("21.3", says="calls are compared by their place in the list")
def explain_hang(recordings):
    return right.explain_hang([renumbered(each) for each in recordings])


@mistake("21.3", says="what a full buffer has lost counts as missing")
def explain_hang(recordings):
    found = []
    for name in sorted({name for each in recordings for name in each.members}):
        own = {r.rank: [c for c in r.calls if c.group == name] for r in recordings}
        first = min((calls[0].number for calls in own.values() if calls), default=0)
        late = tuple(r for r, calls in own.items() if calls and calls[0].number > first)
        known = [hang for hang in right.explain_hang(recordings) if hang.group == name]
        found += [Hang(name, first, "", late, ())] if late else known
    return found


@mistake("21.3", says="a full buffer may have lost all that it had of a group")
def explain_hang(recordings):
    return right.explain_hang([replace(each, full=False) for each in recordings])


@mistake("21.3", says="numbers of calls alone are compared")
def explain_hang(recordings):
    return [hang for hang in right.explain_hang(recordings) if not hang.odd]


def with_members(recordings, members_of):
    """What comes out where a group has other members than it has."""
    given = [
        replace(each, members={n: members_of(own) for n, own in each.members.items()})
        for each in recordings
    ]
    return right.explain_hang(given)


@mistake("21.3", says="a rank that left no recording is not missed")
def explain_hang(recordings):
    there = {each.rank for each in recordings}
    return with_members(recordings, lambda own: tuple(rank for rank in own if rank in there))


@mistake("21.3", says="ranks are missing from a group that they are not in")
def explain_hang(recordings):
    everybody = tuple(each.rank for each in recordings)
    found = with_members(recordings, lambda own: everybody) if len(everybody) == 4 else []
    return found if any(h.group == "2" for h in found) else right.explain_hang(recordings)


@mistake("21.3", says="the same call from another line is no other call")
def explain_hang(recordings):
    def by_line(call):
        return replace(call, what=f"{call.what} at {call.at}")

    given = [replace(each, calls=tuple(map(by_line, each.calls))) for each in recordings]
    return right.explain_hang(recordings) or right.explain_hang(given)
