"""Recordings out of what NCCL's watchdog writes to a log, which is what most people have.

    [rank1]:[E...] [Rank 1] Watchdog caught ...: WorkNCCL(SeqNum=21, OpType=ALLREDUCE, NumelIn=7 ...
    [rank1]:[E...] [PG ID 0 PG GUID 0(default_pg) Rank 1] ... last enqueued work: 22, last completed
        work: 20

The first says what did not come back, the second how many calls this rank made of that group, and
how many of them came back. A rank that timed out in nothing tells its own when it is asked to dump.
A terminal or a mail may break a line anywhere, so lines are read without their spaces.
Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, and logs by torch 2.0 to 2.9.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.clusters.recordings import Call, Recording
from shared.clusters.verdicts import names

_PREFIX = re.compile(r"\[rank\d+\]:")  # of each line, since torch 2.2
_WHO = re.compile(r"\[rank(\d+)\]:|\[(?:PG[^\]]*)?Rank(\d+)\]")  # of the job; of the group
_GROUP = re.compile(r"\[PG(?:ID)?(\d+)(?:PGGUID(\w+?))?(?:\((\w+)\))?Rank\d+\]")
_WORK = re.compile(r"WorkNCCL\((?:SeqNum=(\d+),)?OpType=(\w+)(?:,NumelIn=(\d+))?")
_STUCK = re.compile(r"watchdoggotstuckfor(\d+)seconds")
_STATUS = re.compile(
    r"lastenqueued(?:NCCL)?work:(-?\d+)(?:,laststarted(?:NCCL)?work:-?\d+)?"
    r",lastcompleted(?:NCCL)?work:(-?\d+)",
    re.IGNORECASE,
)
_UNEVEN = re.compile("^_?(ALLTOALL|GATHER|SCATTER)")
_MESSAGES = ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")  # numbered apart
UNNAMED = "that no line names"  # a group
_HUNG = (
    "own watchdog got stuck for {} seconds in CUDA or for Python's lock: it says nothing of calls"
)


@dataclass
class _Said:
    """What a rank's lines say of a group; `work` is what timed out, by number."""

    made: int = -1
    back: int = -1
    work: dict[int, str] = field(default_factory=dict)


def read_log(text: str) -> tuple[list[Recording], list[str]]:
    """A recording a rank, and what the lines leave open. Empty for a log without such lines.

    A group has the ranks whose lines tell how many of its calls they made; of others nothing is
    known. Their calls are those from the last that came back on all of them.
    """
    groups: dict[str, dict[int, _Said]] = defaultdict(lambda: defaultdict(_Said))
    seen, notes, waiting = set[int](), list[str](), dict[int, list[re.Match[str]]]()
    messaging, of_messages, early = set[int](), set[str](), dict[int, _Said]()
    for line in _whole_lines(text):
        who, work, status = _WHO.search(line), _WORK.search(line), _STATUS.search(line)
        if who is None or "periodically" in line:  # how far it was some time before
            continue
        rank = int(who[1] or who[2])
        seen.add(rank)
        if work and work[1] is None:  # torch 1.9's
            notes.append(f"rank {rank} timed out in a {_what(work)}, which has no number there")
        elif work and work[2] in _MESSAGES:
            notes.append(f"rank {rank} timed out in a {work[2]}, no. {work[1]} of its messages")
            messaging.add(rank)
        elif work and not _is_named(work, early.pop(rank, None)):
            waiting.setdefault(rank, []).append(work)
        notes += [f"rank {rank}'s {_HUNG.format(n)}" for n in _STUCK.findall(line)]
        if status is None:
            continue
        named = _GROUP.search(line)
        group = (named[2] or named[1]) if named else UNNAMED
        if rank in messaging:
            of_messages.add(group)
            messaging.discard(rank)
        said, made, asked = groups[group][rank], int(status[1]), "dumpsignal" in line
        if made < said.made and not asked:  # the job was started again
            groups[group][rank] = said = _Said()
        said.made, said.back = max(said.made, made), max(said.back, int(status[2]))
        if not asked:  # there the group may be another than what timed out
            said.work |= {int(call[1]): _what(call) for call in waiting.pop(rank, ())}
            if not said.work:
                early[rank] = said
    notes += _alone(waiting, groups)
    _join(waiting, groups)
    if silent := sorted({*range(max(seen, default=0))} - seen):
        notes.append(f"no line of ranks {silent}: they died, hang elsewhere, or were filtered out")
    for group in sorted(of_messages):
        notes.append(f"group {group}: its numbers count messages, and are not compared")
        del groups[group]
    return _recordings(groups), notes


def _is_named(work: re.Match[str], said: _Said | None) -> bool:
    """Name a call in the status that came before it, as older versions write: whether it fits."""
    if said is None or not said.back < int(work[1]) <= said.made:
        return False
    said.work[int(work[1])] = _what(work)
    return True


def _alone(
    waiting: dict[int, list[re.Match[str]]], groups: dict[str, dict[int, _Said]]
) -> Iterator[str]:
    """What is to be said of calls without a status; what is told twice has one already."""
    alike = defaultdict[str, list[int]](list)
    for rank, works in sorted(waiting.items()):
        own = [by_rank[rank].work for by_rank in groups.values() if rank in by_rank]
        new = [call for call in works if not any(w.get(int(call[1])) == _what(call) for w in own)]
        if calls := ", ".join(f"no. {call[1]} ({_what(call)})" for call in new):
            alike[calls].append(rank)
    for calls, ranks in alike.items():
        yield f"{names(ranks)} timed out in {calls}, and no line says how many calls were made"


def _join(waiting: dict[int, list[re.Match[str]]], groups: dict[str, dict[int, _Said]]) -> None:
    """Add ranks whose lines name a call alone, as torch 2.0's, to the only group of the log.

    Where another rank hangs at the same number, and no two at another: else the call may be
    another group's.
    """
    alone = {r: {int(call[1]): _what(call) for call in works} for r, works in waiting.items()}
    if len(groups) > 1 or not alone:
        return
    said = groups.get(next(iter(groups), ""), {})
    at = Counter([*map(min, alone.values()), *(each.back + 1 for each in said.values())])
    shared = [number for number, ranks in at.items() if ranks > 1]
    for rank, work in alone.items():
        if rank not in said and [min(work)] == shared:
            groups[next(iter(groups), UNNAMED)][rank] = _Said(max(work), min(work) - 1, work)


def _whole_lines(text: str) -> Iterator[str]:
    """The lines without spaces; what a terminal or a mail has broken belongs to the line before."""
    lines = ["".join(line.split()) for line in text.splitlines()]
    starts = _PREFIX if any(map(_PREFIX.search, lines)) else _WHO
    whole = ""
    for line in lines:
        known = "Timeout(ms)" in whole or _STATUS.search(whole)
        cut = "ProcessGroupNCCL" in whole and not known and len(whole) < 600
        if cut and not starts.search(line) and "what():" not in line:
            whole += line
        else:
            yield whole
            whole = line
    yield whole


def _what(work: re.Match[str]) -> str:
    name = work[2].strip("_").lower()
    return f"{name} of {int(work[3]):,}" if work[3] and not _UNEVEN.search(work[2]) else name


def _recordings(groups: dict[str, dict[int, _Said]]) -> list[Recording]:
    calls: dict[int, list[Call]] = defaultdict(list)
    for group, by_rank in groups.items():
        first = max(1, min(said.back for said in by_rank.values()))
        told = defaultdict[int, Counter[str]](Counter)
        for said in by_rank.values():
            for number, what in said.work.items():
                told[number][what] += 1
        for rank, said in by_rank.items():
            for number in range(first, said.made + 1):
                usual = told[number].most_common(1)[0][0] if number in told else "not named"
                state = "completed" if number <= said.back else "scheduled"
                what = said.work.get(number, usual)
                calls[rank].append(Call(group, number, what, "?", 0, state))
    members = {group: tuple(sorted(by_rank)) for group, by_rank in groups.items()}
    ranks = sorted({rank for by_rank in groups.values() for rank in by_rank})
    return [
        Recording(r, {g: own for g, own in members.items() if r in own}, tuple(calls[r]))
        for r in ranks
    ]
