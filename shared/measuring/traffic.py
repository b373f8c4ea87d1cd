"""Count what a rank communicates: every operation it starts, with its bytes and its peer."""

import contextlib
import functools
import re
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# One name for each of the forms in which torch issues an operation.
_PUBLIC = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "monitored_barrier": "barrier",
    "recv_any_source": "recv",
}
_SUFFIXES = ("_coalesced", "_into_tensor", "_tensor", "_single", "_base", "_out")
_NAMESPACES = ("c10d", "_c10d_functional")
_NO_TRAFFIC = re.compile("wait|wrap_tensor")  # the second half of a functional collective
_PEER_ARGUMENTS = ("dst", "src", "root_rank")


@dataclass(frozen=True)
class Call:
    """One operation that this rank started.

    `num_bytes` is what the rank hands in: the whole tensor for all_reduce, broadcast and
    reduce_scatter, its own part for all_gather, the message for send, the buffer for recv, 0 for a
    barrier. `peer` is the other side of send and recv or the root of broadcast, reduce, gather
    and scatter, as a rank of the whole world; None where there is none (recv from anyone).
    `ranks` are those of its group, also of the whole world.
    `at` is time.perf_counter() when it started; `content` what was sent, where that was asked for.
    """

    op: str
    num_bytes: int
    peer: int | None
    group_size: int
    at: float
    content: torch.Tensor | None = field(default=None, compare=False)
    ranks: tuple[int, ...] = field(default=(), compare=False)


@dataclass
class Traffic:
    """The operations of one rank, in the order in which it started them."""

    calls: list[Call] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of all sends; what a collective puts on the wire its library chooses."""
        return self.bytes_of("send")

    @property
    def ops(self) -> list[str]:
        """Return the names of the operations, in order."""
        return [call.op for call in self.calls]

    def count(self, op: str) -> int:
        """Return how often the operation was started."""
        return self.ops.count(op)

    def bytes_of(self, op: str) -> int:
        """Return the bytes that all calls of the operation were handed."""
        return sum(call.num_bytes for call in self.calls if call.op == op)


@contextlib.contextmanager
def count_traffic(keep: bool = False) -> Generator[Traffic]:
    """Record every operation of torch.distributed that this thread starts inside the block.

    The count is taken at the dispatcher, below the Python functions: it does not matter how they
    were imported, and what torch's DDP starts from C++ in the middle of backward is seen as well.
    Names are those of torch.distributed (`all_reduce`, `send`; `isend` counts as `send`,
    `all_gather_into_tensor` as `all_gather`). Each operator then passes through Python: count in
    one run, take times in another. `keep` copies what is sent, to look at the messages themselves.
    Source: the way of torch.distributed.tensor.debug.CommDebugMode.
    """
    traffic = Traffic()
    with _Recorder(traffic, keep):
        yield traffic


class _Recorder(TorchDispatchMode):
    def __init__(self, traffic: Traffic, keep: bool) -> None:
        super().__init__()
        self.traffic, self.keep = traffic, keep

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports the compiler at the first operator: seconds, in every rank.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES and not _NO_TRAFFIC.search(func.__name__):
            self.traffic.calls.append(_call(func, args, kwargs or {}, self.keep))
        return func(*args, **(kwargs or {}))


def _call(func: Any, args: tuple, kwargs: dict[str, Any], keep: bool) -> Call:
    began = time.perf_counter()
    op, names, handed = _read_schema(func)
    given = dict(zip(names, args, strict=False)) | kwargs
    group = _group(given)
    peer = next((given[name] for name in _PEER_ARGUMENTS if name in given), None)
    tensors = [] if op == "barrier" else tree_leaves([given.get(name) for name in handed])
    return Call(
        op=op,
        num_bytes=sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)),
        peer=None if peer is None else dist.get_global_rank(group, peer),
        group_size=group.size(),
        at=began,
        content=tensors[0].clone() if keep and op == "send" else None,
        ranks=tuple(dist.get_process_group_ranks(group)),
    )


@functools.cache
def _read_schema(func: Any) -> tuple[str, list[str], list[str]]:
    """Return an operator's public name, its arguments, and those that hold a rank's tensors."""
    names = [argument.name for argument in func._schema.arguments]
    handed = [name for name in names if name.startswith("input")] or names[:1]
    return _public_name(func._schema.name.split("::")[1]), names, handed


def _public_name(name: str) -> str:
    name = name.rstrip("_")
    if name in _PUBLIC:
        return _PUBLIC[name]
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix).rstrip("_")
    return _PUBLIC.get(name, name)


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        boxed = given["process_group"]
        return boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
    return dist.distributed_c10d._resolve_process_group(given["group_name"])
