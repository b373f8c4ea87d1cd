"""The folder of a run's checkpoints, looked at from every machine before there is a group."""

import contextlib
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.clusters.addresses import Meeting
from shared.clusters.report import Finding, Report
from shared.ranks.agreement import appears


def look_at_saves(meeting: Meeting, reports: Sequence[Report], folder: Path) -> list[Finding]:
    """Whether the folder is there for all ranks, takes a file, and is one: every rank calls it.

    It is not made: a disk that is not mounted would pass.
    """
    mark = meeting.gathered("mark", uuid.uuid4().hex, _as_mark)[0]
    own, of_rank_0 = (folder / f".preflight_{mark}_{rank}" for rank in (meeting.rank, 0))
    why = ""
    try:
        why = "" if folder.is_dir() else "is not there: is its disk mounted?"
        if not why:
            own.write_text(" ")  # a full disk takes an empty file
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
    whys = meeting.gathered("writes", why, str)
    if not any(whys):
        why = "is another folder than rank 0's: is it on a shared disk?"
        whys = meeting.gathered("sees", "" if appears(of_rank_0) else why, str)
    with contextlib.suppress(OSError):
        own.unlink(missing_ok=True)
    found = []
    for why in dict.fromkeys(filter(None, whys)):
        ranks = [rank for rank, said in enumerate(whys) if said == why]
        hosts = ", ".join(dict.fromkeys(reports[rank].host for rank in ranks))
        found.append(Finding(tuple(ranks), f"--saves {folder} {why} (ranks {ranks} on {hosts})"))
    return found


def _as_mark(found: Any) -> str:
    """A part of a file's name that comes from elsewhere."""
    if not re.fullmatch("[0-9a-f]{32}", found):
        raise ValueError(f"no mark: {found}")
    return found
