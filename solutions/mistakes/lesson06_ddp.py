"""Wrong answers to lesson 06 that people really give, and what the check must say to each."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from shared.exercises.mistakes import mistake
from solutions import ddp_buckets
from solutions import lesson06_ddp as right


def everywhere(tensors, src=0):
    """Broadcast without comparing anything."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src)
        with torch.no_grad():
            tensor.copy_(whole)


def named(module):
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


# 06.1 broadcast_parameters


@mistake("06.1", says="src is not used")
def broadcast_parameters(module, src=0):
    right.broadcast_parameters(module, 0)


@mistake("06.1", says="does not say which tensor differs in its shape")
def broadcast_parameters(module, src=0):
    try:
        right.broadcast_parameters(module, src)
    except ValueError:
        raise ValueError("the models differ") from None


def compared(module, tensors, what):
    """All ranks raise where a layout of some tensors differs from rank 0's; then the broadcast."""
    layouts = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(layouts, [(name, *what(each)) for name, each in tensors])
    for each in layouts:
        differing = set(each) ^ set(layouts[0])
        if differing:
            raise ValueError(f"the models differ: {differing}")


@mistake("06.1", says="a buffer that differs between the ranks (shift) is accepted")
def broadcast_parameters(module, src=0):
    parameters = module.named_parameters()
    compared(module, parameters, lambda p: (p.shape, str(p.dtype), p.requires_grad))
    everywhere(module.parameters(), src)
    values = [list(module.buffers())]
    dist.broadcast_object_list(values, src)
    for buffer, value in zip(module.buffers(), values[0], strict=True):
        buffer.resize_(value.shape).copy_(value)


@mistake("06.1", says="ranks that differ in a number of tensors hang")
def broadcast_parameters(module, src=0):
    """Each rank looks only for its own tensors in the source's list."""
    own = {name: (x.shape, x.dtype, x.requires_grad) for name, x in module.named_parameters()}
    own |= {name: (x.shape, x.dtype, x.requires_grad) for name, x in module.named_buffers()}
    of_source = [own]
    dist.broadcast_object_list(of_source, src)
    wrong = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(wrong, [name for name in own if own[name] != of_source[0].get(name)])
    if any(wrong):
        raise ValueError(f"the models differ: {wrong}")
    everywhere(named(module), src)


@mistake("06.1", says="a tensor is given new memory")
def broadcast_parameters(module, src=0):
    for tensor in named(module):
        received = tensor.detach().contiguous().clone()
        dist.broadcast(received, src)
        tensor.data = received


# 06.2 average_gradients


def filled(parameter):
    """The gradient, zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def trained(module):
    """What requires a gradient."""
    return [p for p in module.parameters() if p.requires_grad]


@mistake("06.2", says="the gradients are the sum over the ranks, not the mean")
def average_gradients(module):
    for parameter in trained(module):
        dist.all_reduce(filled(parameter))


@mistake("06.2", says="a frozen parameter is given a gradient")
def average_gradients(module):
    for parameter in module.parameters():
        dist.all_reduce(filled(parameter))
        parameter.grad /= dist.get_world_size()


@mistake("06.2", says="what a step does not use is left out")
def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@mistake("06.2", says="digits are lost: gradients are converted to a smaller dtype")
def average_gradients(module):
    for parameter in trained(module):
        small = filled(parameter).float()
        dist.all_reduce(small)
        parameter.grad.copy_(small / dist.get_world_size())


@mistake("06.2", says="they do not go in the order of parameters()")
def average_gradients(module):
    for parameter in reversed(trained(module)):
        dist.all_reduce(filled(parameter))
        parameter.grad /= dist.get_world_size()


# 06.2b average_gradients_flat


def flat_all_reduce(grads):
    """One message: the mean over the ranks, in the pieces of the gradients."""
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return flat.split([grad.numel() for grad in grads])


def by_dtype(tensors):
    """Lists of tensors of one dtype."""
    lists = {}
    for each in tensors:
        lists.setdefault(each.dtype, []).append(each)
    return lists.values()


@mistake("06.2b", says="the gradients are the sum over the ranks, not the mean")
def average_gradients_flat(module):
    right.average_gradients_flat(module)
    for parameter in trained(module):
        parameter.grad *= dist.get_world_size()


@mistake("06.2b", says="what a step does not use is left out")
def average_gradients_flat(module):
    """No message where this rank has no gradient of a dtype at all."""
    for parameters in by_dtype(trained(module)):
        if any(p.grad is not None for p in parameters):
            grads = [filled(p) for p in parameters]
            for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
                grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="a gradient that does not lie in memory row by row is still this rank's own")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.reshape(-1).copy_(mean)  # a copy, where the gradient is transposed


@mistake("06.2b", says="'NoneType' object has no attribute")
def average_gradients_flat(module):
    for grads in by_dtype(p.grad for p in module.parameters()):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="more bytes travel than the gradients have: a message is padded")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        row = torch.cat([grad.flatten() for grad in grads])
        padded = nn.functional.pad(row, (0, -len(row) % 1024))
        dist.all_reduce(padded)
        means = (padded[: len(row)] / dist.get_world_size()).split([g.numel() for g in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))


# 06.3 OverlappedDDP


@mistake("06.3", says="the ranks start from different weights")
class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module):
        start = {name: each.clone() for name, each in module.state_dict().items()}
        super().__init__(module)
        module.load_state_dict(start)


@mistake("06.3", says="a hook waits for its all-reduce")
class OverlappedDDP(right.OverlappedDDP):
    def _send(self, parameter):
        super()._send(parameter)
        self._works[-1].wait()


@mistake("06.3", says="the gradients are the sum over the ranks, not the mean")
class OverlappedDDP(right.OverlappedDDP):
    def _send(self, parameter):
        self._works.append(dist.all_reduce(filled(parameter), async_op=True))


@mistake("06.3", says="the ranks send in different orders")
class OverlappedDDP(right.OverlappedDDP):
    """Each hook sends at once; what is missing goes last."""

    def _send_what_is_next(self):
        self.sent = getattr(self, "sent", set())
        for parameter in self._complete.keys() - self.sent:
            self._send(parameter)
            self.sent.add(parameter)

    def finish_gradient_sync(self):
        for parameter in self._order:
            if parameter not in self.sent:
                self._send(parameter)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._complete.clear()
        self.sent.clear()


@mistake("06.3", says="each backward inside no_sync() divides by the world size")
class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        if not self._synchronise:
            parameter.grad /= dist.get_world_size()
        super()._on_gradient(parameter)


@mistake("06.3", says="two models in one program disturb each other")
class OverlappedDDP(right.OverlappedDDP):
    """All engines of a program share the switch."""

    silent = False

    @contextlib.contextmanager
    def no_sync(self):
        before, type(self).silent = self.silent, True
        try:
            yield
        finally:
            type(self).silent = before

    def _on_gradient(self, parameter):
        if not self.silent:
            super()._on_gradient(parameter)


# 06.4 BucketedDDP


@mistake("06.4", says="the ranks start from different weights")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        start = {name: each.clone() for name, each in module.state_dict().items()}
        super().__init__(module, bucket_cap_mb)
        module.load_state_dict(start)


@mistake("06.4", says="a hook waits for its all-reduce")
class BucketedDDP(right.BucketedDDP):
    def _send_what_is_next(self):
        super()._send_what_is_next()
        if self._sent:
            ddp_buckets.started(self.buckets[self._sent - 1].work).wait()


@mistake("06.4", says="the tied weight is reduced twice")
class BucketedDDP(right.BucketedDDP):
    """A second place in a bucket for the second place in the model."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)
        found = [p for each in module.modules() for p in each.parameters(recurse=False)]
        self.twice = [p for i, p in enumerate(found) if any(p is q for q in found[:i])]

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for parameter in self.twice:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class CutsOtherwise(right.BucketedDDP):
    """Buckets as `cut` makes them of the parameters, the last one first."""

    def _fill(self):
        order = [p for p in [*self.module.parameters()][::-1] if p.requires_grad]
        self.buckets = self.cut(order)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}


@mistake("06.4", says="from the first parameter to the last")
class BucketedDDP(CutsOtherwise):
    """Filled forwards, and sent last bucket first."""

    def cut(self, order):
        return ddp_buckets.fill_buckets(order[::-1], self._cap_mb)[::-1]


@mistake("06.4", says="a bucket behind the first is closed at more than bucket_cap_mb")
class BucketedDDP(CutsOtherwise):
    """For those behind the first a MiB is 1024 * 1044 bytes."""

    def cut(self, order):
        first = ddp_buckets.fill_buckets(order, self._cap_mb)[0]
        later = [p for p in order if p not in first.views]
        return [first, *ddp_buckets.fill_buckets(later, self._cap_mb * 1044 / 1024)]


@mistake("06.4", says="where a parameter is unused on one rank, the ranks send in different orders")
class BucketedDDP(right.BucketedDDP):
    """A bucket leaves as soon as it is complete, whichever it is."""

    def _send_what_is_next(self):
        for bucket in self.buckets:
            if not bucket.missing and bucket.work is None:
                bucket.send()
        self._sent = 0

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for parameter in list(bucket.missing):
                bucket.take(parameter)
        super().finish_gradient_sync()


@mistake("06.4", says="no_sync() also drops the gradient that was accumulated")
class BucketedDDP(right.BucketedDDP):
    """Each backward begins with an empty bucket, whatever .grad held."""

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for parameter in self._order:
            parameter.grad = None


@mistake("06.4", says="the parameter bucket_cap_mb of __init__ has a different default")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=32):
        super().__init__(module, bucket_cap_mb)


# 06.5 accumulate_gradients


def backward(loss):
    """Backward, and the number alone."""
    loss.backward()
    return loss.detach()


@mistake("06.5", says="every micro-batch sends its gradients")
def accumulate_gradients(ddp, micro_batches, loss_of):
    losses = [backward(loss_of(ddp, each)) for each in micro_batches]
    ddp.finish_gradient_sync()
    return torch.stack(losses).sum()


@mistake("06.5", says="nothing is sent: the last micro-batch is under no_sync() as well")
def accumulate_gradients(ddp, micro_batches, loss_of):
    with ddp.no_sync():
        losses = [backward(loss_of(ddp, each)) for each in micro_batches]
    ddp.finish_gradient_sync()
    return torch.stack(losses).sum()


@mistake("06.5", says="backward comes after all forwards")
def accumulate_gradients(ddp, micro_batches, loss_of):
    *first, last = micro_batches
    with ddp.no_sync():
        losses = [loss_of(ddp, each) for each in first]
    losses.append(loss_of(ddp, last))
    with ddp.no_sync():
        for loss in losses[:-1]:
            loss.backward()
    losses[-1].backward()
    ddp.finish_gradient_sync()
    return torch.stack(losses).detach().sum()


@mistake("06.5", says="all that .grad holds is divided by the number of micro-batches")
def accumulate_gradients(ddp, micro_batches, loss_of):
    loss = right.accumulate_gradients(ddp, micro_batches, loss_of)
    for parameter in ddp.parameters():
        parameter.grad /= len(micro_batches)
    return loss


@mistake("06.5", says="a step without micro-batches")
def accumulate_gradients(ddp, micro_batches, loss_of):
    if not micro_batches:
        return torch.zeros(())
    return right.accumulate_gradients(ddp, micro_batches, loss_of)


@mistake("06.5", says="an exception of loss_of leaves no_sync() on")
def accumulate_gradients(ddp, micro_batches, loss_of):
    if not micro_batches:
        raise ValueError("no micro-batch")
    silence, total = ddp.no_sync(), 0.0
    silence.__enter__()
    for number, each in enumerate(micro_batches, 1):
        if number == len(micro_batches):
            silence.__exit__(None, None, None)
        loss = loss_of(ddp, each)
        loss.backward()
        total = total + loss.detach()
    ddp.finish_gradient_sync()
    return total
