"""What torch's flight recorder has of a rank: its last calls of collectives, in order.

torch keeps the last TORCH_FR_BUFFER_SIZE calls of each process (2,000 by default), for NCCL and for
gloo, and writes a call down when it is made. gloo marks one as retired when it came back or gave
up, so after a time-out what counts is who made a call, not who came back from it.
Source: torch/distributed/flight_recorder, and torch._C._distributed_c10d._dump_fr_trace.
"""

import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

# Their inputs may have other sizes on other ranks: a root's, or uneven parts.
_UNEVEN = ("scatter", "gather", "all_to_all", "alltoall", "send", "recv")
# Whose frames say nothing about who called: a call comes from a script or a notebook's cell.
_LIBRARIES = (Path(torch.__file__).parent, Path(os.__file__).parent, Path(__file__).parents[1])
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

    `what` is equal on two ranks where the calls fit together ("all_reduce of 7 float32").
    """

    group: str
    number: int
    what: str
    at: str


@dataclass(frozen=True)
class Recording:
    """A rank's last calls, oldest first, and the ranks of the groups that it is in."""

    rank: int
    members: Mapping[str, tuple[int, ...]]
    calls: tuple[Call, ...]


def recorded(leave_out: tuple[str, ...] = ()) -> Recording:
    """This rank's recording as it is now, without the groups that are to be left out."""
    return from_dump(dist.get_rank(), dump(), own_groups(), leave_out)


def dump() -> dict[str, Any]:
    """What torch recorded in this process, as torch gives it; a fork's parent is left out."""
    found = pickle.loads(vars(_distributed_c10d)["_dump_fr_trace"]())
    own = [each for each in found["entries"] if each["time_created_ns"] > _forked]
    return {**found, "entries": own}


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
    """A recording out of what torch dumped."""
    entries = [each for each in dump["entries"] if not each["is_p2p"]]
    calls = [
        Call(
            str(each["process_group"][0]),
            each["collective_seq_id"],
            _what(each),
            _place(each.get("frames", ())),
        )
        for each in entries
    ]
    kept = {name: tuple(ranks) for name, ranks in members.items() if name not in leave_out}
    return Recording(rank, kept, tuple(call for call in calls if call.group in kept))


def _what(entry: Mapping[str, Any]) -> str:
    name = entry["profiling_name"].split(":")[-1].strip("_")
    types = entry["input_dtypes"] or ("",)
    kind = _TYPES.get(types[0], types[0])
    if any(each in name for each in _UNEVEN) and name not in ("all_gather", "reduce_scatter"):
        return f"{name} of {kind}".removesuffix(" of ")
    numbers = sum(torch.Size(size).numel() for size in entry["input_sizes"])
    return f"{name} of {numbers:,} {kind}" if kind else name


def _place(frames: Any) -> str:
    """The innermost frame of a script or a cell, as "train.py:88 in train"."""
    for frame in frames:
        file = Path(frame["filename"])
        if not any(file.is_relative_to(each) for each in _LIBRARIES):
            return f"{file.name}:{frame['line']} in {frame['name']}"
    return "?"
