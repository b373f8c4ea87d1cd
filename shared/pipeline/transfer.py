"""What travels between stages: activations forwards, their gradients backwards."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass
class Link:
    """The way to one neighbour: a group for activations, one for gradients, and what is sent.

    A group for each direction: what one sends then cannot stand behind what the other has not
    received yet. Sending does not wait, and `pending` keeps what is not known to have left: with
    gloo, all that was sent since the last finish().
    """

    peer: int
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    pending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    received_at: float = 0.0  # of time.perf_counter()

    def send(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Start to send."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.peer, group=group)
        assert work is not None, "this rank is in the group"
        self.pending = [each for each in self.pending if not each[0].is_completed()]
        self.pending.append((work, tensor))

    def receive(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Fill the tensor with what comes; waits for it."""
        work = dist.irecv(tensor, self.peer, group=group)
        assert work is not None, "this rank is in the group"
        work.wait()
        self.received_at = time.perf_counter()
        return tensor

    def finish(self) -> None:
        """Wait until all has left."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, link: Link, *tensors: Tensor) -> Tensor:
        ctx.link, ctx.like = link, [(x.shape, x.dtype, x.device) for x in tensors]
        for tensor in tensors:
            link.send(tensor.detach(), link.activations)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        link = ctx.link
        empty = [torch.empty(shape, dtype=t, device=where) for shape, t, where in ctx.like]
        return None, *(link.receive(each, link.gradients) for each in empty)


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, link: Link, empty: Sequence[Tensor], _: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        return tuple(link.receive(each, link.activations) for each in empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for gradient in gradients:
            ctx.link.send(gradient, ctx.link.gradients)
        return None, None, None


def send_activation(link: Link, *tensors: Tensor) -> Tensor:
    """Send a stage's output on, without waiting: a message for each tensor on link.activations.

    Returns a number on which to call backward(): that waits for a gradient of each tensor, in the
    same order, which the next stage sends back on link.gradients, and goes on with them. What has
    not left is in link.pending, as after link.send, so that link.finish() waits for it. Nothing
    else is kept: backward needs no more than the shapes.
    """
    return _Send.apply(link, *tensors)


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
