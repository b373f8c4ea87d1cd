"""What travels between stages: activations forwards, their gradients backwards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(eq=False)
class Link:
    """The way to one neighbour: a group for activations, one for gradients, and what is sent.

    A group for each direction: what one sends then cannot stand behind what the other has not
    received yet. Sending does not wait, and `pending` keeps what is not known to have left. gloo
    says so of no message before somebody waits for it: an answer to it tells that it came, and
    `let_go` drops it.

    `received_at` is when the last message had come, by `clock`. Under NCCL a call comes back when
    the transfer is queued: only with a clock that waits for the GPU is it an arrival.
    """

    peer: int
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    pending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter
    received_at: float = 0.0
    sent: int = 0  # messages since the step began
    received: int = 0
    broken: bool = False  # a message could not be received: the neighbour is not there

    def begin_step(self, clock: Callable[[], float]) -> None:
        """Count the messages of a step from here on, and take times from its clock."""
        self.clock, self.sent, self.received = clock, 0, 0

    def send(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Start to send; the message is the last in `pending`."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.peer, group=group)
        assert work is not None, "this rank is in the group"
        self.pending = [message for message in self.pending if not message[0].is_completed()]
        self.pending.append((work, tensor))
        self.sent += 1

    def receive(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Fill the tensor with what comes; waits for it."""
        work = dist.irecv(tensor, self.peer, group=group)
        assert work is not None, "this rank is in the group"
        try:
            work.wait()
        except Exception:
            self.broken = True
            raise
        self.received += 1
        self.received_at = self.clock()
        return tensor

    def let_go(self, works: Sequence[dist.Work | None]) -> None:
        """Drop messages that have come, as an answer to them says, where they are still kept."""
        for work, _ in self.pending:
            if work in works:
                work.wait()  # comes back at once; of gloo, a second wait() never would
        self.pending = [(work, x) for work, x in self.pending if work not in works]

    def keep_last(self, count: int) -> None:
        """Let go all but the last `count` of the messages that were sent in this step."""
        self.let_go([work for work, _ in self.pending[: max(len(self.pending) - count, 0)]])

    def finish(self) -> None:
        """Wait until all has left."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, link: Link, _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.link, ctx.like = link, [(x.shape, x.dtype, x.device) for x in tensors]
        ctx.sent = []
        for tensor in tensors:
            link.send(tensor.detach(), link.activations)
            ctx.sent.append(ref(link.pending[-1][0]))  # the work itself would keep the tensor
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        link = ctx.link
        empty = [torch.empty(shape, dtype=t, device=where) for shape, t, where in ctx.like]
        gradients = [link.receive(buffer, link.gradients) for buffer in empty]
        link.let_go([sent() for sent in ctx.sent])  # who sends a gradient has had the activation
        return None, None, *gradients


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, link: Link, empty: Sequence[Tensor], _: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        return tuple(link.receive(buffer, link.activations) for buffer in empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for gradient in gradients:
            ctx.link.send(gradient, ctx.link.gradients)
        return None, None, None


def send_activation(link: Link, *tensors: Tensor) -> Tensor:
    """Send a stage's output on, without waiting: a message for each tensor on link.activations.

    Returns a number on which to call backward(): that waits for a gradient of each tensor, in the
    same order, which the next stage sends back on link.gradients, and goes on with them. What has
    not left is in link.pending, as after link.send, so that link.finish() waits for it.
    Backward needs no more than the shapes, and keeps nothing else.
    """
    # Backward runs only through what needs a gradient, and a frozen stage's output needs none.
    return _Send.apply(link, torch.zeros((), requires_grad=True), *tensors)


def recv_activation(
    link: Link,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Wait for what the stage before sends on link.activations: a tensor for each shape.

    The tensors have this dtype, lie on this device and require a gradient. In backward, when all
    are known, the gradients are sent back on link.gradients in the same order and without waiting,
    zeros for a tensor that was not used. What has not left is in link.pending, as after link.send.
    """
    empty = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    # Backward runs only through what needs a gradient.
    return _Receive.apply(link, empty, torch.zeros((), requires_grad=True))


def connect(num_stages: int, ranks: Sequence[int]) -> dict[tuple[int, int], Link]:
    """A link between each two neighbouring stages, by (own stage, the neighbour).

    Stage s lives on `ranks[s % len(ranks)]`. Every rank of the world makes all groups: the call
    is a collective.
    """
    me, links = dist.get_rank(), dict[tuple[int, int], Link]()
    for stage in range(num_stages - 1):
        ends = [ranks[s % len(ranks)] for s in (stage, stage + 1)]
        activations, gradients = dist.new_group(ends), dist.new_group(ends)
        if me == ends[0]:
            links[stage, stage + 1] = Link(ends[1], activations, gradients)
        if me == ends[1]:
            links[stage + 1, stage] = Link(ends[0], activations, gradients)
    return links
