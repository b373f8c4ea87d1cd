"""Right answers to lesson 21 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import math
import statistics
from itertools import chain

import numpy as np

from shared.errors import InputError
from solutions import lesson21_clusters as right
from solutions.lesson21_clusters import Hang, Odd, Straggler


def by_lists(seconds, factor=4.0):
    """Plain lists and statistics."""
    rows = seconds.tolist()
    n = len(rows)
    if any(len(row) != n for row in rows):
        raise InputError(f"not square: {n} rows of {len(rows[0])}")
    links = {(a, b): rows[a][b] for a in range(n) for b in range(n) if a != b}
    for pair, value in links.items():
        if not math.isfinite(value) or value < 0:
            raise InputError(f"link {pair}: {value} s")
    if n < 3:
        return []
    found = []
    for rank in range(n):
        typical = statistics.median(v for pair, v in links.items() if rank not in pair)
        out = min(v for (a, _), v in links.items() if a == rank) / typical
        into = min(v for (_, b), v in links.items() if b == rank) / typical
        if max(out, into) > factor:
            both = min(out, into) > factor
            slow = "both" if both else "sending" if out > into else "receiving"
            found.append(Odd(rank, slow, max(out, into)))
    found.sort(key=lambda odd: odd.ratio, reverse=True)
    return found


def by_numpy(seconds, factor=4.0):
    """NaN on the diagonal and nan-functions."""
    if seconds.dim() != 2 or seconds.size(0) != seconds.size(1):
        raise InputError(f"expected a square table, got {list(seconds.shape)}")
    table = seconds.double().numpy().copy()
    n = len(table)
    if not np.all(np.isfinite(table) & (table >= 0) | np.eye(n, dtype=bool)):
        raise InputError("a link without a time")
    np.fill_diagonal(table, np.nan)
    found = []
    for rank in range(n if n >= 3 else 0):
        rest = np.delete(np.delete(table, rank, 0), rank, 1)
        limit = np.nanmedian(rest)
        ratios = np.nanmin(table[rank]) / limit, np.nanmin(table[:, rank]) / limit
        slow = [
            words for words, r in zip(("sending", "receiving"), ratios, strict=True) if r > factor
        ]
        if slow:
            found.append(Odd(rank, "both" if len(slow) == 2 else slow[0], float(max(ratios))))
    return sorted(found, key=lambda odd: odd.ratio)[::-1]


def by_rows(seconds, factor=2.0):
    """Step by step, with lists."""
    if seconds.dim() != 2 or not seconds.numel():
        raise InputError(f"no steps, or no ranks: {tuple(seconds.shape)}")
    rows = seconds.tolist()
    if any(not math.isfinite(x) or x < 0 for x in chain(*rows)):
        raise InputError("a step without a time")
    ranks = len(rows[0])
    late, lost = [0] * ranks, [0.0] * ranks
    for row in rows if ranks > 1 else []:
        for rank, own in enumerate(row):
            others = row[:rank] + row[rank + 1 :]
            late[rank] += own > factor * statistics.median(others)
            lost[rank] += max(own - max(others), 0.0)
    named = [rank for rank in range(ranks) if late[rank] > len(rows) / 2]
    if not named:
        return None
    worst = max(named, key=lost.__getitem__)
    return Straggler(worst, late[worst], len(rows), lost[worst])


def by_columns(seconds, factor=2.0):
    """All ranks at a time, in numpy."""
    times = seconds.double().numpy()
    if times.ndim != 2 or times.size == 0 or not np.isfinite(times).all() or times.min() < 0:
        raise InputError(f"seconds of steps and ranks, finite, not negative: got {times.shape}")
    ranks = times.shape[1]
    if ranks == 1:
        return None
    others = np.stack([np.delete(times, rank, 1) for rank in range(ranks)], 1)
    late = (times > factor * np.median(others, 2)).sum(0)
    lost = np.maximum(times - others.max(2), 0).sum(0)
    lost_of_late = np.where(2 * late > len(times), lost, -1.0)
    rank = int(lost_of_late.argmax())
    if lost_of_late[rank] < 0:
        return None
    return Straggler(rank, int(late[rank]), len(times), float(lost[rank]))


def by_columns_of_calls(recordings):
    """A column of calls for each number, None where a rank has none."""
    ranks = [each.rank for each in recordings]
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise InputError(f"rank {rank} is there twice")
    found = []
    for group in sorted({name for each in recordings for name in each.members}):
        members = next(each.members[group] for each in recordings if group in each.members)
        tables = {rank: {} for rank in members}
        for each in recordings:
            for call in each.calls:
                if call.group == group:
                    tables[each.rank][call.number] = call
        full = [each.rank for each in recordings if each.full]
        members = [rank for rank in members if tables[rank] or rank not in full]
        begun = [min(table) for table in tables.values() if table]
        if not begun:
            continue
        end = max(max(table) for table in tables.values() if table)
        for number in range(max(begun), end + 1):
            column = {rank: tables[rank].get(number) for rank in members}
            missing = tuple(rank for rank, call in column.items() if call is None)
            kinds = [call.what for call in column.values() if call is not None]
            most = statistics.mode(kinds)
            sure = kinds.count(most) > len(kinds) - kinds.count(most)
            odd = tuple(
                r for r, call in column.items() if call and not (sure and call.what == most)
            )
            if missing + odd:
                last = {rank: table[max(table)] for rank, table in tables.items() if table}
                found.append(Hang(group, number, most, missing, odd, last))
                break
    return found


def by_sets(recordings):
    """Sets of (number, what), looked through from the front."""
    own = {}
    for each in recordings:
        if each.rank in own:
            raise InputError(f"two recordings of rank {each.rank}")
        own[each.rank] = each
    members = {}
    for each in recordings:
        members.update(each.members)
    hangs = []
    for group, ranks in sorted(members.items()):
        made = {
            rank: {c.number: c for c in own[rank].calls if c.group == group} if rank in own else {}
            for rank in ranks
        }
        ranks = [r for r in ranks if made[r] or r not in own or not own[r].full]
        present = [rank for rank in ranks if made[rank]]
        if not present:
            continue
        number = max(min(made[rank]) for rank in present)
        while any(number in made[rank] for rank in present):
            camps = {}
            for rank in ranks:
                if number in made[rank]:
                    camps.setdefault(made[rank][number].what, []).append(rank)
            largest = max(camps, key=lambda what: len(camps[what]))
            voters = sum(map(len, camps.values()))
            if len(camps[largest]) * 2 > voters:
                odd = [r for what, camp in camps.items() if what != largest for r in camp]
            else:
                odd = [rank for camp in camps.values() for rank in camp]
            missing = [rank for rank in ranks if number not in made[rank]]
            if odd or missing:
                last = {rank: made[rank][max(made[rank])] for rank in present}
                hangs.append(Hang(group, number, largest, tuple(missing), tuple(sorted(odd)), last))
                break
            number += 1
    return hangs


ALTERNATIVES = {
    "21.1": [by_lists, by_numpy],
    "21.2": [by_rows, by_columns],
    "21.3": [by_columns_of_calls, by_sets],
}
assert set(ALTERNATIVES) == set(right.NOTES)
