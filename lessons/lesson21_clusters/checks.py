"""Lesson 21: what tells a right answer from a wrong one.

The oracle of 21.1 and 21.2 is the definition in plain Python, of 21.3 recordings that were made to
come apart in one known way, and a real run whose fault is known.
"""

import functools
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from lessons.lesson21_clusters.laboratory import (
    Table,
    Timeline,
    cut,
    recording,
    recordings,
    recordings_of_a_fault,
)
from shared.clusters.recordings import Recording
from shared.clusters.verdicts import Hang, Odd, Straggler
from shared.errors import InputError
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    alike,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.seeds import fresh_seed

exercise_21_1 = checks_for(
    "21.1",
    name="find_odd",
    difficulty=2,
    minutes=15,
    hint=(
        "For each rank three sets of links: out, in, and among the others, where the diagonal "
        "is left out; the others' median is .quantile(0.5)."
    ),
)


def names(found: Sequence[Odd]) -> str:
    """Who is called odd, as a reader wants it."""
    return ", ".join(f"rank {odd.rank} ({odd.slow})" for odd in found) or "nobody"


@exercise_21_1.check("one rank whose links are slow")
def one_odd(find_odd) -> None:
    for n in (3, 4, 6):
        for slow in ("sending", "receiving", "both"):
            table = Table(n, fresh_seed())
            rank = table.draw(n)
            seconds = table.slowed(rank, slow, 20.0)
            got = find_odd(seconds)
            diagonal = find_odd(seconds.clone().fill_diagonal_(1000.0))
            healthy = [odd.rank for odd in got if odd.rank != rank]
            said = [odd.slow for odd in got if odd.rank == rank]
            flipped = {"sending": "receiving", "receiving": "sending"}.get(slow)
            recognise(
                {
                    "the diagonal is looked at: a rank has no link to itself": (
                        [odd.rank for odd in got] != [odd.rank for odd in diagonal]
                    ),
                    "the two directions are exchanged: row i has the seconds from rank i": (
                        said == [flipped]
                    ),
                    "healthy ranks are named: each has a link to the slow one, which counts": (
                        bool(healthy)
                    ),
                    "the typical link is taken over the rank's own links, too: with three ranks "
                    "most links are the slow ones": n == 3 and slow == "both" and not got,
                    "a rank that receives slowly is not found: look at columns as well": (
                        slow == "receiving" and not got
                    ),
                    "a rank that sends slowly is not found: look at rows as well": (
                        slow == "sending" and not got
                    ),
                },
                expected=f"rank {rank} of {n} ({slow}) and nobody else",
                seen=names(got),
            )
            expect_equal([(o.rank, o.slow) for o in got], [(rank, slow)], what="who is odd, where")


@exercise_21_1.check("by how much")
def ratios(find_odd) -> None:
    for n in (3, 5):
        for slow in ("receiving", "both"):
            seconds = Table(n, fresh_seed()).slowed(n - 2, slow, 20.0)
            (got,) = find_odd(seconds)
            kind = type(got.ratio).__name__
            expect(isinstance(got.ratio, float), expected="a ratio that is a float", seen=kind)
            expect_close(
                torch.tensor(got.ratio),
                torch.tensor(odd_ratio(seconds, n - 2)),
                what="the ratio: its fastest link over the others' median",
                looks_like={
                    "the lower of the two in the middle, as .median() has it": torch.tensor(
                        odd_ratio(seconds, n - 2, statistics.median_low)
                    )
                },
                rtol=1e-3,
            )


def links_among(seconds: Tensor, without: int) -> list[float]:
    """The links that neither begin nor end at a rank."""
    others = [rank for rank in range(len(seconds)) if rank != without]
    return [seconds[a, b].item() for a in others for b in others if a != b]


def odd_ratio(seconds: Tensor, rank: int, middle=statistics.median) -> float:
    """The larger of a rank's two ratios, in plain Python."""
    others = [each for each in range(len(seconds)) if each != rank]
    typical = middle(links_among(seconds, rank))
    out = min(seconds[rank, each].item() for each in others)
    into = min(seconds[each, rank].item() for each in others)
    return max(out, into) / typical


@exercise_21_1.check("nobody, and more than one")
def others_odd(find_odd) -> None:
    table = Table(4, fresh_seed())
    plain = table.plain()
    four_times = torch.ones(3, 3)
    four_times[0] = 4.0
    for what, seconds in {
        "links that are all alike": plain,
        "one slow cable, between ranks 1 and 3": table.cable(1, 3, 30.0),
        "two nodes of two ranks, slow between them": table.nodes(2, 30.0),
        "two ranks, one of which may be slow: there are no others": plain[:2, :2],
        "one rank": plain[:1, :1],
        "a rank whose links take four times as long, and no more": four_times,
    }.items():
        got = find_odd(seconds)
        expect(not got, expected=f"nobody: {what}", seen=names(got))
    for scale in (1e-3, 1e3):
        got = find_odd(scale * table.slowed(2, "both", 20.0))
        mistake = "a limit in seconds: what is slow depends on the network"
        expect(
            [o.rank for o in got] == [2],
            expected=f"rank 2 alone, all seconds times {scale:g}",
            seen=names(got),
            mistake=mistake,
        )
    two = table.wider(7).slowed(1, "both", 10.0, also=(4, 40.0))
    got = [odd.rank for odd in find_odd(two)]
    looks_like = {"the worst comes first": [1, 4], "only one rank is named": [4]}
    expect_equal(got, [4, 1], what="the odd ranks, the worst first", looks_like=looks_like)
    close_to = table.slowed(0, "sending", 6.0)
    expect_equal(
        [len(find_odd(close_to, factor)) for factor in (3.0, 12.0)],
        [1, 0],
        what="odd ranks of links six times as slow, by factor 3 and 12",
        looks_like={"factor is not looked at": [1, 1]},
    )


@exercise_21_1.check("tables that are none")
def bad_tables(find_odd) -> None:
    plain = Table(3, fresh_seed()).plain()
    expect_raises(InputError, find_odd, plain[:2], what="a table of 2 x 3")
    for bad, what in ((math.nan, "that is NaN"), (math.inf, "without an end"), (-1.0, "of -1 s")):
        holes = plain.clone()
        holes[0, 2] = bad
        expect_raises(InputError, find_odd, holes, what=f"a link {what}")


exercise_21_2 = checks_for(
    "21.2",
    name="find_straggler",
    difficulty=2,
    minutes=15,
    hint=(
        "A rank's column against all other columns, step by step: late beyond the others' "
        "median, and what it cost beyond the slowest of them."
    ),
)


def lateness(seconds: Tensor, rank: int, factor: float) -> tuple[int, float]:
    """In how many steps a rank is late and what it cost, in plain Python."""
    late, lost = 0, 0.0
    for row in seconds.tolist():
        others = row[:rank] + row[rank + 1 :]
        late += row[rank] > factor * statistics.median(others)
        lost += max(0.0, row[rank] - max(others))
    return late, lost


def who(found: Straggler | None) -> str:
    """Who is named."""
    return "nobody" if found is None else f"rank {found.rank}"


@exercise_21_2.check("a rank that is late in most steps")
def late(find_straggler) -> None:
    for ranks in (2, 3, 5):
        times = Timeline(ranks, 21, fresh_seed())
        rank = times.draw(ranks)
        seconds = times.late(rank, 13, 6.0)
        got = find_straggler(seconds)
        recognise(
            {
                "the axes are exchanged: a row is a step": (
                    lambda got=got, seconds=seconds, rank=rank: (
                        got is None and who(find_straggler(seconds.T)) == f"rank {rank}"
                    )
                ),
                "nobody is named: is the rank's own time in the median that it is compared with?": (
                    got is None and ranks < 4
                ),
                "a rank is named that is not late": got is not None and got.rank != rank,
            },
            expected=f"rank {rank} of {ranks}, late in 13 of 21 steps",
            seen=who(got),
        )
        count, lost = lateness(seconds, rank, 2.0)
        assert count == 13, f"the laboratory made {count} late steps in place of 13"
        expect_equal((got.rank, got.late, got.steps), (rank, 13, 21), what="rank, late, steps")
        behind = (seconds[:, rank] - cut(seconds, rank).amax(1)).sum()
        own, others = seconds[:, rank], cut(seconds, rank)
        ahead = (own - others.amax(1)).clamp(min=0)
        in_late = ahead[own > 2.0 * others.quantile(0.5, dim=1)].sum()
        middle = (seconds[:, rank] - cut(seconds, rank).quantile(0.5, dim=1)).clamp(min=0).sum()
        expect_close(
            torch.tensor(float(got.lost), dtype=torch.float64),
            torch.tensor(lost, dtype=torch.float64),
            what="the seconds that it cost",
            looks_like={
                "steps in which it is ahead are taken off": behind,
                "only the steps in which it is late: it is behind in others, too": in_late,
                "compared with the median: the others wait for the slowest of themselves": middle,
                "all that it took, not what it was behind": seconds[:, rank].sum(),
            },
            rtol=1e-5,
        )


@exercise_21_2.check("nobody is a straggler")
def none_late(find_straggler) -> None:
    times = Timeline(3, 20, fresh_seed())
    pause = times.plain()
    pause[4, 1] = 500.0
    shared = times.plain()
    shared[::2] *= 9
    turns = times.plain()
    for step in range(20):
        turns[step, step % 3] *= 9
    for mistake, seconds in {
        "the slowest rank is named, though nobody is late": times.plain(),
        "one long pause decides: count steps, no means": pause,
        "late in half of the steps is not in most": times.late(1, 10, 9.0),
        "steps that are slow on all ranks (a save, an evaluation) count": shared,
        "ranks that are late in turn": turns,
    }.items():
        got = find_straggler(seconds)
        expect(got is None, expected="None", seen=who(got), mistake=mistake)
    alone = find_straggler(times.plain()[:, :1])
    expect(alone is None, expected="None for one rank", seen=who(alone))


def median_of_four(find_straggler) -> None:
    """Of an even number of others the median is the mean of two, in each step anew."""
    step = torch.tensor([0.0, 2, 2, 4, 5.5])  # of ranks 1 to 4: median 3, mean 3.375
    seconds = torch.stack([step, 8 * step, step, step, step])
    seconds[:, 0] = torch.tensor([6.5, 52, 6.5, 6, 5])
    got = find_straggler(seconds)
    late = 0 if got is None else got.late
    expected = (
        "rank 0, late in 3 of 5 steps, 10.5 s lost: the others' medians are 3, 24, 3, 3 and 3, the"
        " limits twice as much, and rank 0 takes 6.5, 52, 6.5, 6 and 5"
    )
    recognise(
        {
            "twice the median is late already: late is what takes more": late == 4,
            "the lower of two in the middle: of an even number the median is their mean": late == 5,
        },
        expected=expected,
        seen=str(got),
    )
    expect(got == Straggler(0, 3, 5, 10.5), expected=expected, seen=str(got))


@exercise_21_2.check("two late ranks, a factor, and what is no table of seconds")
def two_late(find_straggler) -> None:
    times = Timeline(6, 15, fresh_seed())
    seconds = times.late(1, 15, 4.0)
    seconds[:9, 4] = times.late(4, 15, 40.0)[:9, 4]
    got = find_straggler(seconds)
    looks_like = {
        "the one that is late most often, not the one that cost most, or the first": "rank 1"
    }
    expect_equal(who(got), "rank 4", what="the straggler that cost most", looks_like=looks_like)
    got = find_straggler(seconds.flip(1))
    looks_like = {"of two stragglers the last, not the one that cost most": "rank 4"}
    expect_equal(who(got), "rank 1", what="the same from right to left", looks_like=looks_like)
    found = [who(find_straggler(times.late(2, 15, 4.0), factor)) for factor in (2.0, 8.0)]
    expect_equal(
        found,
        ["rank 2", "nobody"],
        what="four times as slow, by factor 2 and 8",
        looks_like={"factor is not looked at": ["rank 2", "rank 2"]},
    )
    scaled = who(find_straggler(1e-4 * times.late(2, 15, 4.0)))
    expect_equal(scaled, "rank 2", what="the same a ten-thousandth as long")
    median_of_four(find_straggler)
    expect_raises(InputError, find_straggler, torch.zeros(0, 3), what="no steps")
    expect_raises(InputError, find_straggler, torch.zeros(3, 0), what="no ranks")
    for bad, what in ((math.nan, "that is NaN"), (-1.0, "of -1 s")):
        seconds = times.plain()
        seconds[3, 3] = bad
        expect_raises(InputError, find_straggler, seconds, what=f"a step {what}")


exercise_21_3 = checks_for(
    "21.3",
    name="explain_hang",
    difficulty=3,
    minutes=25,
    hint=(
        "calls[rank] = {call.number: call for call in its calls if call.group == group}; {} for a "
        "member without a recording. Start at the largest of the first numbers."
    ),
)


def seen_in(found: Sequence[Hang]) -> str:
    """What an answer found."""
    each = [f"group {h.group} no. {h.number}: missing {h.missing}, odd {h.odd}" for h in found]
    return "; ".join(each) or "nothing"


def expect_hang(
    explain_hang,
    given: Sequence[Recording],
    want: tuple[int, tuple[int, ...], tuple[int, ...]],
    what: str,
    looks_like: dict[str, tuple] | None = None,
) -> Hang:
    """One hang, in one group, as it was made."""
    found = explain_hang(list(given))
    number, missing, odd = want
    expected = f"{what}: group 1 no. {number}, missing {missing}, odd {odd}"
    seen = seen_in(found)
    expect(len(found) == 1, expected=expected, seen=seen)
    got = (found[0].number, tuple(sorted(found[0].missing)), tuple(sorted(found[0].odd)))
    recognise(alike(got, looks_like or {}), expected=expected, seen=seen)
    expect(got == want, expected=expected, seen=seen)
    kinds = type(found[0].missing).__name__, type(found[0].odd).__name__
    expect_equal(kinds, ("tuple", "tuple"), what="the kinds of missing and odd")
    return found[0]


SUM, OTHER, SHORT = "all_reduce of 7 float32", "all_gather of 1 float32", "all_reduce of 6 float32"


@exercise_21_3.check("a rank that never made the call")
def missing_rank(explain_hang) -> None:
    found = explain_hang(recordings([[SUM] * 5] * 3))
    expect(not found, expected="nothing where all made the same calls", seen=seen_in(found))
    for late_rank in (2, 0):
        given = recordings([[SUM] * (9 if rank != late_rank else 6) for rank in range(3)])
        hang = expect_hang(
            explain_hang,
            given,
            (7, (late_rank,), ()),
            f"rank {late_rank} of 3 made 6 calls, the others 9",
            {
                "the last call that all made, not the first that one did not": (
                    6,
                    (late_rank,),
                    (),
                ),
                "the last call of all, not the first that one did not make": (9, (late_rank,), ()),
                "the ranks that wait are named, not the one that they wait for": (
                    (7, tuple(r for r in range(3) if r != late_rank), ())
                ),
            },
        )
        expect_equal((hang.group, hang.what), ("1", SUM), what="group and call")
        want = {each.rank: each.calls[-1] for each in given}
        expect_equal(dict(hang.last), want, what="the last call of every recorded member")
    died = recordings([[SUM] * 4] * 4)[:3]
    mistake = "a rank that left no recording is not missed"
    found = explain_hang(died)
    expect(
        bool(found), expected="rank 3, of which nothing is left", seen="nothing", mistake=mistake
    )
    expect_hang(explain_hang, died, (1, (3,), ()), "rank 3 of 4 left no recording")


@exercise_21_3.check("a rank that made another call")
def odd_rank(explain_hang) -> None:
    for odd in (2, 0):
        lists = [[SUM] * 6 for _ in range(3)]
        lists[odd][3] = OTHER
        others = tuple(rank for rank in range(3) if rank != odd)
        found = explain_hang(recordings(lists))
        recognise(
            {"numbers of calls alone are compared, not what they are": not found},
            expected=f"rank {odd} is odd at call no. 4",
            seen=seen_in(found),
        )
        looks_like = {
            "one rank's call is taken for the right one: most ranks decide": (4, (), others)
        }
        what = f"rank {odd} of 3 makes another call as its fourth"
        hang = expect_hang(explain_hang, recordings(lists), (4, (), (odd,)), what, looks_like)
        expect_equal(hang.what, SUM, what="the call of most")
    lines = recordings([[SUM] * 3] * 3, places=["train.py:80", "train.py:80", "train.py:95"])
    found = explain_hang(lines)
    mistake = "the same call from another line is no other call: `what` counts"
    expect(not found, expected="nothing", seen=seen_in(found), mistake=mistake)
    sizes = recordings([[SUM, SUM], [SUM, SHORT], [SUM, SUM]])
    expect_hang(explain_hang, sizes, (2, (), (1,)), "rank 1 sums six numbers, the others seven")
    two = recordings([[SUM, SUM], [SUM, OTHER]])
    what = "two ranks, two calls: no majority"
    looks_like = {"without a majority nobody can be right: all are odd": (2, (), (1,))}
    expect_hang(explain_hang, two, (2, (), (0, 1)), what, looks_like)
    both = recordings([[SUM] * 4, [SUM] * 4, [SUM, SUM, OTHER], [SUM, SUM], [SUM, SUM]])
    looks_like = {
        "a majority of those that made a call, not of all members": (3, (3, 4), (0, 1, 2))
    }
    what = "no. 3: rank 2 another call, ranks 3 and 4 none"
    expect_hang(explain_hang, both, (3, (3, 4), (2,)), what, looks_like)
    early = recordings([[SUM] * 6, [SUM, OTHER, *[SUM] * 4], [SUM] * 4])
    looks_like = {"missing ranks are looked for first: the earliest number counts": (5, (2,), ())}
    what = "no. 2: rank 1 another call; no. 5: rank 2 none"
    expect_hang(explain_hang, early, (2, (), (1,)), what, looks_like)


@exercise_21_3.check("buffers that are full, and groups of some ranks")
def windows(explain_hang) -> None:
    full = recordings([[SUM] * 30, [SUM] * 30, [SUM] * 26], keep=[10, 12, 10])
    found = explain_hang(full)
    first = (found[0].number, found[0].missing) if found else (0, ())
    recognise(
        {
            "calls are compared by their place in the list: a full buffer has lost the first": (
                not found or first[0] < 17
            ),
            "what a full buffer has lost counts as missing": bool(found) and first[0] < 27,
        },
        expected="call no. 27, which rank 2 did not make; buffers begin at no. 21, 19 and 17",
        seen=seen_in(found),
    )
    expect_hang(explain_hang, full, (27, (2,), ()), "buffers begin at no. 21, 19 and 17")

    members = {"3": (2, 3), "2": (0, 1), "5": (0, 1, 2, 3), "4": (1, 2)}
    calls = {
        0: {"5": 4, "2": 6},
        1: {"5": 4, "2": 6},
        2: {"5": 4, "3": 8},
        3: {"5": 3, "3": 9},
    }
    given = [recording(rank, members, each, SUM) for rank, each in calls.items()]
    found = explain_hang(given)
    got = [(h.group, h.number, h.missing) for h in found]
    recognise(
        {
            "ranks are missing from a group that they are not in": any(
                set(ranks) - set(members[group]) for group, _, ranks in got
            ),
            "one group that hangs is told, and there are two": len(got) == 1,
            "groups are not told apart: numbers count within a group": not got,
        },
        expected="group 3 waits for rank 2 (no. 9), group 5 for rank 3 (no. 4), group 2 for nobody,"
        " and group 4 made no call",
        seen=seen_in(found),
    )
    expect_equal(got, [("3", 9, (2,)), ("5", 4, (3,))], what="groups, numbers, missing ranks")
    last = [{rank: call.number for rank, call in h.last.items()} for h in found]
    want = [{2: 8, 3: 9}, {0: 4, 1: 4, 2: 4, 3: 3}]
    expect_equal(last, want, what="the numbers of the members' last calls in each group")
    expect_raises(InputError, explain_hang, [*given, given[2]], what="two recordings of rank 2")
    one_buffer_for_all_groups(explain_hang)


def one_buffer_for_all_groups(explain_hang) -> None:
    """Ranks 2 and 3 made the call of all, and then so many of their own group that it is lost."""
    members = {"1": (0, 1, 2, 3), "2": (0, 1), "3": (2, 3)}
    calls = [{"1": 1, "2": 5}, {"1": 1, "2": 5}, {"3": 30}, {"3": 30}]
    for full, want in (((2, 3), []), ((3,), [("1", 1, (2,), ())])):
        found = explain_hang(
            [recording(r, members, calls[r], SUM, full=r in full) for r in range(4)]
        )
        got = [(h.group, h.number, tuple(h.missing), tuple(h.odd)) for h in found]
        accused = any(set(ranks) & set(full) for _, _, ranks, _ in got)
        recognise(
            {
                "a full buffer may have lost all that it had of a group: that rank is not missing "
                "(look at `full`)": accused,
                "a recording that is not full has lost nothing: without a call of the group its "
                "rank is missing": len(got) < len(want),
            },
            expected=f"{want or 'nothing'}: the recordings of ranks {full} are full",
            seen=seen_in(found),
        )
        expect_equal(got, want, what=f"what is found where ranks {full} have full recordings")


@exercise_21_3.check("what torch recorded of real runs")
def real(explain_hang) -> None:
    for fault, want in (("batches", (21, (2,), ())), ("mismatch", (21, (), (2,)))):
        expect_hang(explain_hang, _recorded(fault), want, f"--fault {fault} on three ranks")


@functools.cache
def _recorded(fault: str) -> tuple[Recording, ...]:
    return recordings_of_a_fault(fault)
