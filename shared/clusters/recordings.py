"""What torch's flight recorder has of a rank: its last calls of collectives, in order.

torch keeps the last TORCH_FR_BUFFER_SIZE calls of each process (2,000 by default), of all its
groups together, for NCCL and for gloo, and writes a call down when it is made. gloo marks one as
retired when it came back or gave up, so after a time-out what counts is who made a call, not who
came back from it. NCCL's entries have a state: scheduled, started, completed.
Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, torch/distributed/flight_recorder,
and torch._C._distributed_c10d._dump_fr_trace.
"""

import io
import os
import pickle
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

# Their parts may have other sizes on other ranks. Of a gather the input, of a scatter the output
# is what all ranks have; the other side is the root's alone.
_UNEVEN = re.compile("all_?to_?all|_v$|_v_")
_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
# Whose frames say nothing about who called: a call comes from a script or a notebook's cell. By
# place for this machine's libraries, by the path's words for dumps that come from another.
_HERE = (Path(torch.__file__).parent, Path(os.__file__).parent, Path(__file__).parents[1])
_PASSED_ON = re.compile(
    r"/torch/(_\w+|autograd|distributed|nn|optim|utils)/|/typing_extensions\.py$|^<frozen"
    r"|/lib/python3[\d.]*/(?!site-packages|dist-packages)"
)
_LIBRARY = re.compile(rf"{_PASSED_ON.pattern}|/(site|dist)-packages/")
_TYPES = {"Float": "float32", "Double": "float64", "Long": "int64", "Int": "int32"}
_TYPES |= {"BFloat16": "bfloat16", "Half": "float16", "Byte": "uint8", "Bool": "bool"}


_forked = 0  # when this process was forked, in ns: what is older is its parent's recording


def _note_the_fork() -> None:
    global _forked
    _forked = time.time_ns()


os.register_at_fork(after_in_child=_note_the_fork)


@dataclass(frozen=True)
class Call:
    """A collective that a rank called: its group, its number there (from 1), what, and from where.

    `what` is equal on two ranks where the calls fit together ("all_reduce of 7 float32"). Of calls
    that travel as one, and have one number, `part` counts from 1. `state` is NCCL's, "" where
    nobody knows whether the call came back.
    """

    group: str
    number: int
    what: str
    at: str
    part: int = 0
    state: str = ""


@dataclass(frozen=True)
class Recording:
    """A rank's last calls, oldest first, and the ranks of the groups that it is in.

    One that is `full` has lost older calls: of a group that it shows no call of, it says nothing.
    """

    rank: int
    members: Mapping[str, tuple[int, ...]]
    calls: tuple[Call, ...]
    full: bool = False


class PlainData(pickle.Unpickler):
    """Reads lists, dicts, text and numbers, which is all that a dump holds, and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse: a file that names a function would have it called."""
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}, and is not read for that")


def recorded(leave_out: tuple[str, ...] = ()) -> Recording:
    """This rank's recording as it is now, without the groups that are to be left out."""
    return from_dump(dist.get_rank(), dump(), own_groups(), leave_out)


def dump() -> dict[str, Any]:
    """What torch recorded in this process, as torch gives it; a fork's parent is left out."""
    found = PlainData(io.BytesIO(vars(_distributed_c10d)["_dump_fr_trace"]())).load()
    entries = found["entries"]
    own = [entry for entry in entries if entry["time_created_ns"] > _forked]
    # Where the parent's last calls are still there, none of our own was lost.
    return {**found, "entries": own, "full": len(own) == len(entries) and _has_lost(entries)}


def own_groups() -> dict[str, tuple[int, ...]]:
    """The groups that this rank is in: torch's name for each, and its ranks."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return {pg.group_name: tuple(dist.get_process_group_ranks(pg)) for pg in groups}


def from_dump(
    rank: int,
    dump: Mapping[str, Any],
    members: Mapping[str, tuple[int, ...]],
    leave_out: tuple[str, ...] = (),
) -> Recording:
    """A recording out of what torch dumped, with NCCL or with gloo, by torch 2.2 to 2.13.

    Messages between two ranks are calls of a group of their own, "0 from rank 1 to 2", which are
    numbered in their order: torch's numbers count all messages of a rank. A full recording has
    lost the first ones, and with them the numbers; its messages are left out.
    """
    kept = {name: tuple(ranks) for name, ranks in members.items() if name not in leave_out}
    entries = [entry for entry in dump["entries"] if group_of(entry) in kept]
    full = dump.get("full", _has_lost(dump["entries"]))
    calls = list(_collectives(entries, full))
    messages = [] if full else list(_messages(entries, kept))
    pairs = {call.group: pair for pair, call in messages}
    calls += [call for _, call in messages]
    return Recording(rank, {**kept, **pairs}, tuple(calls), full)


def group_of(entry: Mapping[str, Any]) -> str:
    """torch's name of the group: a pair with its description, in old dumps only a number."""
    name = entry.get("process_group", entry.get("pg_id", ""))
    return str(name if isinstance(name, str | int) else name[0])


def _has_lost(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether older calls were overwritten: torch counts them from 0 in `record_id`."""
    return bool(entries) and int(entries[0].get("record_id", 0)) > 0


def _collectives(entries: Sequence[Mapping[str, Any]], full: bool) -> Iterator[Call]:
    numbered = [
        ((group_of(entry), int(entry.get("collective_seq_id", entry.get("seq_id", 0)))), entry)
        for entry in entries
        if not entry.get("is_p2p") and not _MESSAGE.search(entry["profiling_name"])
    ]
    coalesced = {key for key, entry in numbered if "coalesced" in entry["profiling_name"]}
    parts, seen = Counter(key for key, _ in numbered), Counter[tuple[str, int]]()
    for key, entry in numbered:
        if full and key in coalesced and key == numbered[0][0]:
            continue  # some of its parts may be lost
        seen[key] += 1
        part = seen[key] if parts[key] > 1 else 0
        what = f"{_what(entry)}, part {part}" if part else _what(entry)
        state = _state(entry) if part in (0, parts[key]) else ""  # torch times the last part alone
        yield Call(*key, what, _place(entry.get("frames", ())), part, state)


def _messages(
    entries: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[int, int], Call]]:
    made, batches = Counter[str](), dict[tuple[str, Any], str]()
    for entry in entries:  # the entry that ends a batch knows whether it came back
        if entry.get("is_p2p") and "coalesced" in entry["profiling_name"]:
            batches[group_of(entry), entry["p2p_seq_id"]] = _state(entry)
    for entry in entries:
        found = _MESSAGE.search(entry["profiling_name"])
        if found is None:
            continue
        ranks = [members[group_of(entry)][int(number)] for number in found.groups()[1:]]
        source, target = ranks if found[1] == "send" else ranks[::-1]
        if source == target:
            continue
        group = f"{group_of(entry)} from rank {source} to {target}"
        made[group] += 1
        what = f"message of {_numbers(entry, 'input') or _numbers(entry, 'output')}"
        state = batches.get((group_of(entry), entry.get("p2p_seq_id")), _state(entry))
        call = Call(group, made[group], what, _place(entry.get("frames", ())), 0, state)
        yield (source, target), call


def _state(entry: Mapping[str, Any]) -> str:
    return "" if entry["profiling_name"].startswith("gloo:") else str(entry.get("state", ""))


def _what(entry: Mapping[str, Any]) -> str:
    name = entry["profiling_name"].split(":")[-1].strip("_")
    side = "output" if name == "scatter" else "input"
    numbers = _types(entry, side) if _UNEVEN.search(name) else _numbers(entry, side)
    return f"{name} of {numbers}" if numbers else name


def _numbers(entry: Mapping[str, Any], side: str) -> str:
    """How many numbers, tensor by tensor, and of which type."""
    kind = _types(entry, side)
    sizes = [torch.Size(size).numel() for size in entry.get(f"{side}_sizes", ())]
    return f"{' + '.join(f'{number:,}' for number in sizes)} {kind}".rstrip() if sizes else ""


def _types(entry: Mapping[str, Any], side: str) -> str:
    types = entry.get(f"{side}_dtypes") or ()
    types = (types,) if isinstance(types, str) else types
    return "/".join(dict.fromkeys(_TYPES.get(dtype, dtype) for dtype in types))


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame of a script or a cell, as "train.py:88 in train".

    Where all of the program is installed as a package, the innermost that is not torch's.
    """
    ours = [
        frame for frame in frames if not any(map(Path(frame["filename"]).is_relative_to, _HERE))
    ]
    for passed_on in (_LIBRARY, _PASSED_ON):
        for frame in ours:
            if not passed_on.search(Path(frame["filename"]).as_posix()):
                return f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"
    return "?"
