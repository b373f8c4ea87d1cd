"""Gradients in flat buffers: what lesson 06 sends at once, and what knows nothing of hooks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MIB: int = 2**20
FIRST_BUCKET_MB: float = 1.0  # torch's: the first message should leave early


def started(work: dist.Work | None) -> dist.Work:
    """Return the handle of an operation that was started with async_op=True."""
    assert work is not None, "this rank is not in the group"
    return work


def average_gradients_flat(module: nn.Module) -> None:
    """Replace every gradient, `parameter.grad`, by its mean over all ranks; one all-reduce a dtype.

    All gradients of one dtype travel in one flat tensor of that dtype. Who takes part is as in
    `average_gradients`: zeros where a parameter that requires a gradient has none, a tied parameter
    once, a frozen one not at all. Gradients need not lie in memory row by row. `.grad` may be the
    tensor that it was or a new one.
    """
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.to_dense()  # a sparse embedding's is not
            of_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
    for grads in of_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        # cat has copied, so the means have to be copied back.
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view(grad.shape))


class Bucket:
    """Neighbouring gradients in one flat tensor, which travels as one message."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        pieces = zip(parameters, self.flat.split(sizes), strict=True)
        self.views = {parameter: piece.view(parameter.shape) for parameter, piece in pieces}
        self.missing = set(parameters)
        self.work: dist.Work | None = None

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Write this rank's share of the mean into the bucket, and let .grad be that place."""
        view = self.views[parameter]
        if parameter.grad is None:  # not used on this rank, perhaps on another
            view.zero_()
        else:  # copy and division in one pass
            torch.mul(parameter.grad.to_dense(), 1 / dist.get_world_size(), out=view)
        parameter.grad = view
        self.missing.discard(parameter)

    def send(self) -> None:
        """Start the all-reduce."""
        self.work = started(dist.all_reduce(self.flat, async_op=True))

    def finish(self) -> None:
        """Wait, and be ready for the next step. The gradients are views: no copying back."""
        assert self.work is not None, "a bucket is sent before it is waited for"
        self.work.wait()
        self.work = None
        self.missing = set(self.views)


def fill_buckets(parameters: Sequence[nn.Parameter], bucket_cap_mb: float) -> list[Bucket]:
    """Cut `parameters`, in their order, into buckets of one dtype and device.

    A bucket is closed once it holds `bucket_cap_mb` MiB or more, the first of each kind once it
    holds 1 MiB, if that is less: the sooner a first message leaves, the better. This is torch's
    rule (reducer.cpp) where its bucket_cap_mb is left alone; a number that is given, even 25, is
    the limit of torch's first bucket as well.
    """
    done: list[list[nn.Parameter]] = []
    filling: dict[Any, list[nn.Parameter]] = {}
    caps: dict[Any, float] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        mine = filling.setdefault(kind, [])
        mine.append(parameter)
        cap = caps.setdefault(kind, min(bucket_cap_mb, FIRST_BUCKET_MB))
        if sum(each.nbytes for each in mine) >= cap * MIB:
            done.append(filling.pop(kind))
            caps[kind] = bucket_cap_mb
    return [Bucket(each) for each in [*done, *filling.values()]]
