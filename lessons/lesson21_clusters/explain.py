"""Why a run hung, out of what it left: the flight recorder's dumps, or the watchdog's lines.

    python lessons/lesson21_clusters/explain.py FOLDER     dumps (nccl_trace_rank_0 ...), or logs
    python lessons/lesson21_clusters/explain.py run.log    a log of several ranks; - is pasted text

NCCL's watchdog dumps at a time-out, to /tmp/nccl_trace_rank_N unless TORCH_FR_DUMP_TEMP_FILE says
where; bring all ranks' files together. A log may also have torch's own word of two calls that
differ (TORCH_DISTRIBUTED_DEBUG=DETAIL). Nothing in a file is run. Exit status 0: what was compared
is alike, 1: a call was found at which the ranks came apart, 2: there was nothing to compare.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lessons.lesson21_clusters.beside_torch import mismatches, torchs_words
from shared.clusters.dumps import (
    Dump,
    members_in,
    rank_in_name,
    read_dump,
    read_dumps,
    recordings_of,
)
from shared.clusters.hangs import compared, explain_hang
from shared.clusters.recordings import Recording
from shared.clusters.verdicts import Hang, describe_hang, names
from shared.clusters.watchdog import read_log
from shared.errors import InputError
from shared.script import run_script

LOGS = "a group's ranks are known from its lines: one without a line of it may be the one missing"
ALONE = "of one rank alone: who did not come to its call is in the others' dumps or lines"
NOTED = 10  # names of what was not read
NEXT = (
    "alike on all ranks compared: look at the call that came back on none, and at its ranks' links "
    "(preflight.py); py-spy dump --pid PID shows where a rank stands, ncclras what NCCL sees"
)


def sources(path: Path) -> tuple[dict[int, Dump], str, list[str]]:
    """The dumps by rank, the text of the logs, and the names of what is neither."""
    if str(path) == "-":
        return {}, sys.stdin.read(), []
    if not path.exists():
        raise InputError(f"{path} is not there: a folder of dumps or logs, a log, or - for stdin")
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    dumps, logs, damaged, others = list[Path](), list[str](), list[str](), list[str]()
    for file in files:
        try:
            read_dump(file)
            dumps.append(file)
        except InputError as error:
            text = file.read_text(errors="replace")
            if any(word in text for word in ("WorkNCCL", "ProcessGroupNCCL", "CollectiveFinger")):
                logs.append(text)
            elif rank_in_name(file) is not None:
                damaged.append(str(error))
            else:
                others.append(file.name)
    return read_dumps(dumps), "\n".join(logs), damaged + others


def first_to_look_at(hangs: Sequence[Hang]) -> str:
    """Of several groups that hang: who is waited for, and waits for nobody itself."""
    awaited = {rank for hang in hangs for rank in (*hang.missing, *hang.odd, *hang.stuck)}
    waiting = {rank for hang in hangs for rank in hang.last if rank not in hang.missing}
    roots = sorted(awaited - waiting)
    return f"{names(roots)} waits in none of these: look there first" if roots else ""


def beside(dumps: dict[int, Dump]) -> list[str]:
    """What torch's own analyzer says, where this torch has one."""
    known = {  # gloo's have no groups by name
        rank: {
            name: {"name": name, "desc": "", "ranks": str(list(ranks))}
            for name, ranks in members_in(rank, dumps).items()
        }
        for rank in dumps
    }
    whole = {rank: {**each, "pg_config": known[rank]} for rank, each in dumps.items()}
    try:
        said = torchs_words(whole, sorted(dumps), partial=True)
    except ImportError:
        return ["torch's own analyzer is not in this version of torch"]
    return [f"torch's analyzer: {line}" for line in said] or ["torch's analyzer finds nothing"]


def report(recordings: Sequence[Recording], notes: Sequence[str]) -> int:
    """Print the verdict and what it rests on; the exit status."""
    if not any(each.calls for each in recordings):
        raise InputError(f"nothing to compare: {'; '.join(notes) or 'no call was recorded'}")
    hangs = explain_hang(recordings)
    for hang in hangs:
        print(f"group {hang.group}: {describe_hang(hang)}")
        if 0 < len(hang.made) < len(hang.missing):
            print(f"only {names(tuple(hang.made))} made it: why do most not?")
    if len(hangs) > 1 and (words := first_to_look_at(hangs)):
        print(words)
    if not hangs:
        alone = len({each.rank for each in recordings if each.calls}) == 1
        print(ALONE if alone else NEXT)
    for line in [*compared(recordings), *notes]:
        print(f"  {line}")
    return 1 if hangs else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a folder of dumps or of logs, a log, or -")
    path = parser.parse_args().path
    dumps, text, neither = sources(path)
    notes = [f"not read: {each}" for each in neither[:NOTED]]
    notes += [f"and {len(neither) - NOTED} more"] * (len(neither) > NOTED)
    recordings = recordings_of(dumps)
    if dumps and (any(each.calls for each in recordings) or not text):
        ranks = sorted(dumps)
        print(f"dumps of {names(ranks)}")
        if text:
            notes.append("logs lie there as well: give one of them to read it")
        called = {r for each in recordings for own in each.members.values() for r in own}
        if absent := sorted(called - {*dumps}):
            notes.append(
                f"no dump of {names(absent)}: they died, or theirs was not brought; nothing is "
                "known of their calls"
            )
        status = report(recordings, notes)
        print("\n".join(beside(dumps)))
        sys.exit(status)
    notes += [f"no call in the dumps of {names(sorted(dumps))}"] * bool(dumps)
    recordings, more = read_log(text)
    recordings = mismatches(text) or recordings  # of two that differ the others wait in vain
    if not recordings and not more:
        why = "; ".join(notes) or "no such line in it"
        raise InputError(f"{path}: neither dumps nor the watchdog's lines: {why}")
    sys.exit(report(recordings, [*more, LOGS, *notes]))


if __name__ == "__main__":
    run_script(main)
