"""Recordings out of a folder of dumps as it lies there: NCCL's watchdog writes one a rank.

`nccl_trace_rank_0` or `comm_lib_trace_rank_0`, pickled or as JSON, or under whatever name ends with
the rank or has "rank" before it. Nothing in a file is run.
"""

import ast
import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shared.clusters.recordings import PlainData, Recording, from_dump, group_of
from shared.errors import InputError

Dump = dict[str, Any]
_NAMED, _LAST = re.compile(r"rank[ _-]?(\d+)", re.IGNORECASE), re.compile(r"(\d+)$")
_ENDINGS = ("", ".json", ".pickle", ".pkl")
_BROKEN = (
    pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError,
    OverflowError,
)  # fmt: skip


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name says."""
    if named := _NAMED.findall(path.name):
        return int(named[-1])
    name = path.stem if path.suffix in _ENDINGS else path.name
    last = _LAST.search(name)
    return int(last[1]) if last else None


def read_dump(path: Path) -> Dump:
    """One rank's dump. Raises InputError for what is none."""
    data = path.read_bytes()
    try:
        text = data.lstrip()[:1] in (b"{", b"[")
        found = json.loads(data) if text else PlainData(io.BytesIO(data)).load()
        found = {"entries": found} if isinstance(found, list) else found  # an older torch's
        entries = [{**call, "profiling_name": call["profiling_name"]} for call in found["entries"]]
        return {**found, "entries": entries}
    except _BROKEN as error:
        raise InputError(f"{path} is no dump of torch's flight recorder: {error!r:.200}") from None


def read_dumps(paths: Iterable[Path]) -> dict[int, Dump]:
    """The dumps of these files by rank. Raises InputError for two of one rank, and for no rank."""
    found: dict[int, Dump] = {}
    for path in sorted(paths):
        dump, rank = read_dump(path), rank_in_name(path)
        rank = int(dump.get("rank", -1)) if rank is None else rank
        if rank < 0:
            raise InputError(f"{path}: its name says no rank: call it rank_0, say")
        if rank in found:
            raise InputError(f"{path} is the second dump of rank {rank}: give those of one moment")
        found[rank] = dump
    return found


def recordings_of(dumps: Mapping[int, Dump]) -> list[Recording]:
    """Each rank's recording; the groups' ranks are what the dumps say, or else who called."""
    return [from_dump(rank, dump, members_in(rank, dumps)) for rank, dump in dumps.items()]


def members_in(rank: int, dumps: Mapping[int, Dump]) -> dict[str, tuple[int, ...]]:
    """The ranks of each group that a rank is in.

    NCCL's dumps have them, as text; gloo's have none, and torch 2.2's neither: there a group has
    those who called it, and the default group everybody.
    """
    config = dumps[rank].get("pg_config") or {}
    members = {
        str(group.get("name", name)): tuple(_ranks(group["ranks"]))
        for name, group in config.items()
    }
    everybody = members.pop("", ()) or tuple(sorted(dumps))  # gloo's entry for it, without a name
    for entry in dumps[rank]["entries"]:
        name = group_of(entry)
        if name not in members:
            default = "default_pg" in tuple(entry.get("process_group", ()))
            callers = (r for r, dump in dumps.items() if name in map(group_of, dump["entries"]))
            members[name] = everybody if default else tuple(sorted(callers))
    return members


def _ranks(words: str | Iterable[int]) -> list[int]:
    return [int(rank) for rank in (ast.literal_eval(words) if isinstance(words, str) else words)]
