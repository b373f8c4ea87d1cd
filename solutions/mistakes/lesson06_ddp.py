"""Wrong answers to lesson 06 that people really give, and what the check must say to each."""

import contextlib

import torch
import torch.distributed as dist

from shared.exercises.mistakes import mistake
from solutions import lesson06_ddp as right

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


@mistake("06.2", says="some gradients are still this rank's own")
def average_gradients(module):
    """A vector's mean is not written back."""
    for parameter in trained(module):
        mean = filled(parameter) / dist.get_world_size()
        dist.all_reduce(mean)
        parameter.grad = mean if mean.dim() > 1 else parameter.grad


@mistake("06.2", says="several gradients travel as one message")
def average_gradients(module):
    right.average_gradients_flat(module)


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


@mistake("06.2b", says="the buffers are averaged as well")
def average_gradients_flat(module):
    right.average_gradients_flat(module)
    for buffer in module.buffers():
        buffer += dist.get_rank()  # what averages of other buffers than these would come to


@mistake("06.2b", says="a gradient that does not lie in memory row by row is still this rank's own")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.reshape(-1).copy_(mean)  # a copy, where the gradient is transposed


# 06.3 OverlappedDDP


@mistake("06.3", says="a hook waits for its all-reduce")
class OverlappedDDP(right.OverlappedDDP):
    def _send(self, parameter):
        super()._send(parameter)
        self._works[-1].wait()


@mistake("06.3", says="each backward inside no_sync() divides by the world size")
class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        if not self._synchronise:
            parameter.grad /= dist.get_world_size()
        super()._on_gradient(parameter)


@mistake("06.3", says="gradients are left behind")
class OverlappedDDP(right.OverlappedDDP):
    """The biases are forgotten."""

    def __init__(self, module):
        super().__init__(module)
        self._order = [p for p in self._order if p.dim() > 1]

    def _on_gradient(self, parameter):
        if parameter.dim() > 1:
            super()._on_gradient(parameter)


@mistake("06.3", says="what no_sync() had added up is lost")
class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        for parameter in self._order:
            if parameter not in self._complete:
                parameter.grad = torch.zeros_like(parameter)
        super().finish_gradient_sync()


@mistake("06.3", says="the last micro-batch's gradient is missing")
class OverlappedDDP(right.OverlappedDDP):
    """What leaves is what was there when no_sync() ended."""

    early: dict | None = None

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.early = {p: p.grad.clone() for p in self._order if p.grad is not None}

    def _send(self, parameter):
        parameter.grad = (self.early or {}).pop(parameter, parameter.grad)
        super()._send(parameter)


# 06.4 BucketedDDP


@mistake("06.4", says="all gradients travel as one message")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, 25 * (bucket_cap_mb > 0))


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
