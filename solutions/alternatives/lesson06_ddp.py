"""Right answers to lesson 06 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import collections
import contextlib

import torch
import torch.distributed as dist

from shared.ddp.wrapping import Wrapped
from solutions.alternatives.ddp_buckets import CopyingDDP, ViewingDDP
from solutions.alternatives.ddp_starts import (
    all_started_then_waited,
    by_optimizer_groups,
    by_torchs_flatten,
    one_buffer_a_dtype,
    places_in_a_buffer,
    source_speaks_first,
)

# 06.3


class QueuedDDP(Wrapped):
    """A queue of what has not left: a hook pops from its head while the head is complete."""

    def __init__(self, module):
        super().__init__(module)
        one_buffer_a_dtype(module)
        self.order = [p for p in module.parameters() if p.requires_grad][::-1]
        self.silent = 0
        self.begin()
        for parameter in self.order:
            parameter.register_post_accumulate_grad_hook(self.completed)

    def begin(self):
        """A new step: all are waiting, none is complete, nothing is in flight."""
        self.waiting = collections.deque(self.order)
        self.complete = {id(p): False for p in self.order}
        self.flying = []

    def completed(self, parameter):
        """The hook."""
        if self.silent:
            return
        self.complete[id(parameter)] = True
        while self.waiting and self.complete[id(self.waiting[0])]:
            self.send(self.waiting.popleft())

    def send(self, parameter):
        """Start one message; a gradient that is not contiguous travels as a copy."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        flat = parameter.grad.contiguous()
        self.flying.append((parameter, flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_sync(self):
        """Send the rest, wait, divide."""
        while self.waiting:
            self.send(self.waiting.popleft())
        for parameter, flat, work in self.flying:
            work.wait()
            parameter.grad.copy_(flat).div_(dist.get_world_size())
        self.begin()

    @contextlib.contextmanager
    def no_sync(self):
        """A counter, so that it may be nested."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1


class Silence:
    """A context manager as a class: what it was before is restored."""

    def __init__(self, owner):
        self.owner = owner

    def __enter__(self):
        self.before, self.owner.sending = self.owner.sending, False

    def __exit__(self, *error):
        self.owner.sending = self.before
        return False


class NumberedDDP(Wrapped):
    """Hooks are closures over a number; flags in a tensor; futures divide when a sum has come."""

    def __init__(self, module):
        super().__init__(module)
        source_speaks_first(module)
        self.sending = True
        self.trainable = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.ready = torch.zeros(len(self.trainable) + 1, dtype=torch.bool)
        self.futures = []
        for number, parameter in enumerate(self.trainable):
            parameter.register_post_accumulate_grad_hook(self.hook(number))

    def hook(self, number):
        """The hook of one parameter."""

        def mark(_):
            if self.sending:
                self.ready[number] = True
                self.send_up_to(int((~self.ready).nonzero()[0]))

        return mark

    def send_up_to(self, end):
        """Start all messages below `end` that have not been started."""
        for parameter in self.trainable[len(self.futures) : end]:
            part = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if parameter.grad is not None:
                part.copy_(parameter.grad)
            work = dist.all_reduce(part.div_(dist.get_world_size()), async_op=True)
            self.futures.append((part, work.get_future()))

    def finish_gradient_sync(self):
        """Send the rest; the means become the gradients."""
        self.send_up_to(len(self.trainable))
        for parameter, (mean, future) in zip(self.trainable, self.futures, strict=True):
            future.wait()
            parameter.grad = mean
        self.ready.zero_()
        self.futures = []

    def no_sync(self):
        """An object with __enter__ and __exit__ in place of a generator."""
        return Silence(self)


# 06.5


def with_nullcontext(ddp, micro_batches, loss_of):
    """One loop whose context depends on the number; the losses are stacked."""
    if len(micro_batches) == 0:
        raise ValueError("a step needs at least one micro-batch")
    losses = []
    for left, micro_batch in zip(range(len(micro_batches) - 1, -1, -1), micro_batches, strict=True):
        with ddp.no_sync() if left else contextlib.nullcontext():
            losses.append(loss_of(ddp, micro_batch))
            losses[-1].backward()
    ddp.finish_gradient_sync()
    return torch.stack(losses).detach().sum()


def one_silence_for_all(ddp, micro_batches, loss_of):
    """A single silence around all but the last; the sum is kept in a tensor."""
    try:
        last = micro_batches[-1]
    except IndexError:
        raise ValueError("no micro-batch") from None

    def part(micro_batch):
        loss = loss_of(ddp, micro_batch)
        torch.autograd.backward(loss)
        return loss.detach()

    with ddp.no_sync():
        parts = [part(each) for each in micro_batches[:-1]]
    total = sum(parts, part(last))
    ddp.finish_gradient_sync()
    return total


ALTERNATIVES = {
    "06.1": [one_buffer_a_dtype, source_speaks_first],
    "06.2": [all_started_then_waited, by_optimizer_groups],
    "06.2b": [places_in_a_buffer, by_torchs_flatten],
    "06.3": [QueuedDDP, NumberedDDP],
    "06.4": [CopyingDDP, ViewingDDP],
    "06.5": [with_nullcontext, one_silence_for_all],
}
