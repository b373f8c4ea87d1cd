"""Lesson 06, the instructor's side: data parallelism by hand, in four versions.

The lesson's one idea: gradients are means over ranks, and everything else is about *when* they
travel, and in how many messages. All versions send the same bytes: `average_gradients` when
backward is over, `average_gradients_flat` as well, but in one message, `OverlappedDDP` while
backward runs, `BucketedDDP` while it runs and in few messages.

Points are the difficulty at the exercise (17 in all). What to ask behind a right answer: which
collective meets which (the n-th of one rank the n-th of the others); where the wait is, and what
would happen if it stood elsewhere; which message cannot be hidden (the last one).
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from shared.ddp.wrapping import Wrapped
from shared.errors import InputError
from solutions.ddp_buckets import average_gradients_flat as average_gradients_flat
from solutions.ddp_buckets import fill_buckets, started

T = TypeVar("T")


def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
    """Give every rank the parameters and buffers of rank `src`, in place.

    Names, shapes, dtypes and requires_grad are compared first. Raises ValueError on *every* rank
    when one differs from `src`, naming the rank and the first tensor that differs: a broadcast
    between different shapes would hang, crash or write nonsense.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    layout = [(name, tuple(x.shape), str(x.dtype), x.requires_grad) for name, x in named]
    layouts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, layout)
    for rank, theirs in enumerate(layouts):
        if theirs != layouts[src]:
            raise InputError(_difference(rank, theirs, src, layouts[src]))
    with torch.no_grad():
        for _, tensor in named:
            # A transposed parameter does not lie in memory row by row, as the backends ask.
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _difference(rank: int, layout: list, src: int, wanted: list) -> str:
    """Return what to say of the first tensor in which a rank's model differs from rank src's."""
    here = [tensor for tensor in layout if tensor not in wanted]
    there = [tensor for tensor in wanted if tensor not in layout]
    seen = "the same tensors in another order"
    if here or there:
        seen = f"rank {rank} has {_shown(here)}, rank {src} has {_shown(there)}"
    return f"the ranks' models differ: {seen}; build the same model on every rank"


def _shown(tensors: list) -> str:
    if not tensors:
        return "nothing instead"
    name, shape, dtype, requires_grad = tensors[0]
    return f"{name} {shape} {dtype}{'' if requires_grad else ' without gradient'}"


def average_gradients(module: nn.Module) -> None:
    """Replace every gradient, `parameter.grad`, by its mean over all ranks; call after backward().

    One all-reduce per parameter that requires a gradient, in the order of `parameters()`. One that
    has no gradient on this rank takes part with zeros: another rank may have one, and would wait.
    A tied parameter goes once, a frozen one not at all. `.grad` may also become a new tensor.
    """
    world_size = dist.get_world_size()
    for parameter in module.parameters():
        if parameter.requires_grad:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = own if own.is_sparse else own.contiguous()  # memory is added up, not strides
            dist.all_reduce(mean)
            parameter.grad = mean.div_(world_size)


class GradientSync(Wrapped):
    """What both versions share: the first broadcast, one hook a parameter, no_sync.

    A hook runs when a gradient is complete, all uses of the parameter added up
    (`register_post_accumulate_grad_hook`; it is handed the parameter, not the gradient).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        broadcast_parameters(module)
        self._synchronise = True
        self._complete: dict[nn.Parameter, None] = {}  # in the order of completion
        # Each parameter once, the last first: a guess, which the first step puts right.
        self._order = [p for p in module.parameters() if p.requires_grad][::-1]
        self._order_is_known = False
        for parameter in self._order:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; RuntimeError if the step before was never finished."""
        if self._complete and torch.is_grad_enabled():
            raise RuntimeError(
                "finish_gradient_sync() was not called after the last backward(): its gradients "
                "may still be travelling"
            )
        return super().forward(*args, **kwargs)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._synchronise:
            return
        if parameter in self._complete:
            raise RuntimeError(
                "a second backward() before finish_gradient_sync() (put all but the last under "
                "no_sync()), or a block used twice in a re-entrant checkpoint (use_reentrant=False)"
            )
        self._complete[parameter] = None
        self._send_what_is_next()

    def _start_over(self) -> None:
        """Be ready for the next step; after the first, send in the order that backward really has.

        Rank 0's order, for all: one gradient that is complete late, early in the order, holds all
        behind it back. A Transformer's encoder_norm, registered last, is such a one.
        """
        if not self._order_is_known:
            place = {parameter: i for i, parameter in enumerate(self._order)}
            real = [place[parameter] for parameter in self._complete]
            orders = [[*real, *sorted(set(place.values()) - set(real))]]
            dist.broadcast_object_list(orders, src=0)
            self._order = [self._order[i] for i in orders[0]]
            self._order_is_known = True
        self._complete.clear()

    def _send_what_is_next(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Inside, backward() adds to this rank's own gradients and sends nothing."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before


class OverlappedDDP(GradientSync):
    """Average gradients over the ranks while backward goes on, one message per parameter.

    Parameters and buffers are broadcast from rank 0 at the start. A hook starts the all-reduce of
    a gradient when it is complete, without waiting for it. Messages leave in one order on every
    rank, whatever the order in which its gradients are completed, because the n-th all-reduce of
    one rank meets the n-th of the others: in the first step the reverse order of `parameters()`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._works: list[dist.Work] = []

    def _send_what_is_next(self) -> None:
        for parameter in self._order[len(self._works) :]:
            if parameter not in self._complete:
                break
            self._send(parameter)

    def _send(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # not used on this rank, perhaps on another
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size()
        self._works.append(started(dist.all_reduce(parameter.grad, async_op=True)))

    def finish_gradient_sync(self) -> None:
        """Send what no hook has sent, then wait for all; afterwards gradients are means.

        Call between backward() and step(). Waiting inside the hook would be simpler and would
        undo the point: backward could not go on while the message travels.
        """
        for parameter in self._order[len(self._works) :]:
            self._send(parameter)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._start_over()


class BucketedDDP(GradientSync):
    """Average gradients over the ranks while backward goes on, in buckets: torch's way.

    Like OverlappedDDP, but gradients are gathered in flat buffers, each of one dtype, the last
    parameter first. A gradient joins the open buffer of its dtype, however large it is; a buffer is
    closed once it holds `bucket_cap_mb` MiB (of 2^20 bytes) or more, the first of each dtype at
    1 MiB or more, or at the cap where that is less. Each buffer is one all-reduce, started when its
    last gradient is complete, in the same order on every rank.

    Raises ValueError for a bucket_cap_mb of 0 or less.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25) -> None:
        if bucket_cap_mb <= 0:
            raise InputError(f"bucket_cap_mb must be above 0, got {bucket_cap_mb}")
        super().__init__(module)
        self._cap_mb, self._sent = bucket_cap_mb, 0
        self._fill()

    def _fill(self) -> None:
        self.buckets = fill_buckets(self._order, self._cap_mb)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._synchronise and parameter not in self._complete:
            self._bucket_of[parameter].take(parameter)
        super()._on_gradient(parameter)

    def _send_what_is_next(self) -> None:
        while self._sent < len(self.buckets) and not self.buckets[self._sent].missing:
            self.buckets[self._sent].send()
            self._sent += 1

    def finish_gradient_sync(self) -> None:
        """Complete and send what has not left, wait for all; afterwards gradients are means."""
        for bucket in self.buckets[self._sent :]:
            for parameter in list(bucket.missing):
                bucket.take(parameter)
        self._send_what_is_next()
        for bucket in self.buckets:
            bucket.finish()
        self._sent, first_step = 0, not self._order_is_known
        self._start_over()
        if first_step:
            self._fill()


def accumulate_gradients(
    ddp: OverlappedDDP | BucketedDDP,
    micro_batches: Sequence[T],
    loss_of: Callable[[nn.Module, T], Float[Tensor, ""]],
) -> Float[Tensor, ""]:
    """Backward through all micro-batches, communicating once; return the sum of their losses.

    `loss_of(ddp, micro_batch)` is that micro-batch's *part* of the loss of the step: parts are
    added, never averaged. Gradients are added to what `.grad` holds already, and the mean of that
    sum over the ranks ends in `.grad`: clearing is the caller's part. Raises ValueError when there
    is no micro-batch.
    """
    if not micro_batches:
        raise InputError("a step needs at least one micro-batch, got 0")
    *first, last = micro_batches
    losses = []
    with ddp.no_sync():
        for micro_batch in first:
            losses.append(_backward(loss_of(ddp, micro_batch)))
    losses.append(_backward(loss_of(ddp, last)))
    ddp.finish_gradient_sync()
    return torch.stack(losses).sum()


def _backward(loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
    loss.backward()
    return loss.detach()


NOTES = {
    "06.1": """
broadcast_parameters: 2 points, 15 minutes.
Look for: buffers too; frozen parameters too; in place, so that an optimizer made before still holds
them; the comparison on every rank, before the first broadcast. Ask what a rank does that alone
knows of the error: it raises, and the others wait.
Common mistakes: parameters() without buffers; src not used; named_parameters() compared by number.
""",
    "06.2": """
average_gradients: 2 points, 15 minutes. The zeros for a missing gradient are half of it.
Common mistakes: `if p.grad is not None` (hangs when one rank skips); the sum; averaging p, not
p.grad; a loop over modules, which finds a tied weight twice.
""",
    "06.2b": """
average_gradients_flat: 2 points, 15 minutes. The reference is in ddp_buckets.py.
Common mistakes: dtypes mixed in one cat, which converts; means never copied back, or by
reshape(-1).copy_(), which writes into a copy where a gradient is transposed.
""",
    "06.3": """
OverlappedDDP: 4 points, 30 minutes. Right numbers 1, overlap 1, fixed order 1, no_sync 1.
Look for: no wait in the hook; a list that says what is next; state that starts over.
The reference also learns the order of completion in its first step, as torch does: show the cell
that counts what encoder_norm holds back, and ask for it as an extra.
""",
    "06.4": """
BucketedDDP: 5 points, 45 minutes. Views instead of a second copy are worth a question, not points.
Common mistakes: never copied back; the half-full last bucket never sent; frozen parameters counted
as missing (hangs); buckets sent as they fill up, not in order; bytes counted as elements.
""",
    "06.5": """
accumulate_gradients: 2 points, 15 minutes. Forward under no_sync as well, for torch's sake; parts
are added, not averaged; the returned loss must not hold the graphs.
""",
}
