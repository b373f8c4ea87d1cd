"""Right answers to 06.4 in another style."""

import collections
import contextlib
import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist

from shared.ddp.wrapping import Wrapped
from solutions.alternatives.ddp_starts import one_buffer_a_dtype, source_speaks_first


@dataclasses.dataclass
class Bucket:
    """Parameters that travel together; `flat` is there while it does."""

    members: list
    complete: set = dataclasses.field(default_factory=set)
    flat: Any = None
    work: Any = None

    def is_full(self, limit):
        """Whether it holds `limit` MiB or more."""
        return sum(p.numel() * p.element_size() for p in self.members) >= limit * 2**20

    def send(self):
        """Join the gradients, with zeros where there is none, and start the message."""
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.members]
        self.flat = torch.cat([piece.reshape(-1) for piece in pieces])
        self.work = dist.all_reduce(self.flat, async_op=True)

    def receive(self):
        """Copy the means back."""
        self.work.wait()
        pieces = (self.flat / dist.get_world_size()).split([p.numel() for p in self.members])
        for parameter, piece in zip(self.members, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).clone()
        self.complete, self.flat, self.work = set(), None, None


class CopyingDDP(Wrapped):
    """Buckets are lists of parameters; the flat tensor is made when the bucket is sent."""

    def __init__(self, module, bucket_cap_mb=25):
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}: more than 0 is needed")
        super().__init__(module)
        one_buffer_a_dtype(module)
        self.quiet, self.sent, self.buckets, filling = False, 0, [], {}
        limits = collections.defaultdict(lambda: min(1, bucket_cap_mb))
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            dtype = parameter.dtype
            if dtype not in filling:
                filling[dtype] = Bucket([])
                self.buckets.append(filling[dtype])
            filling[dtype].members.append(parameter)
            if filling[dtype].is_full(limits[dtype]):
                del filling[dtype]
                limits[dtype] = bucket_cap_mb
        for bucket in self.buckets:
            for parameter in bucket.members:
                parameter.register_post_accumulate_grad_hook(lambda p, b=bucket: self.mark(b, p))

    def mark(self, bucket, parameter):
        """The hook: send every bucket from the head of the list that is complete."""
        if self.quiet:
            return
        bucket.complete.add(parameter)
        for head in itertools.islice(self.buckets, self.sent, None):
            if len(head.complete) < len(head.members):
                break
            head.send()
            self.sent += 1

    def finish_gradient_sync(self):
        """Send the rest, receive all."""
        for bucket in self.buckets[self.sent :]:
            bucket.send()
        for bucket in self.buckets:
            bucket.receive()
        self.sent = 0

    @contextlib.contextmanager
    def no_sync(self):
        """A stack of callbacks restores what was."""
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "quiet", self.quiet)
            self.quiet = True
            yield


class ViewingDDP(Wrapped):
    """Gradients live in the flat buffers; each is told by an index; a given cap counts at once."""

    def __init__(self, module, bucket_cap_mb=25):
        if not bucket_cap_mb > 0:
            raise ValueError(f"a bucket of {bucket_cap_mb} MiB holds nothing")
        super().__init__(module)
        source_speaks_first(module)
        first = 1 if bucket_cap_mb == 25 else bucket_cap_mb
        self.quiet, self.works = False, []
        self.groups = list(self.cut(first * 2**20, bucket_cap_mb * 2**20))
        self.flats = [torch.zeros(sum(p.numel() for p in g), dtype=g[0].dtype) for g in self.groups]
        self.views, self.missing = {}, []
        for number, (group, flat) in enumerate(zip(self.groups, self.flats, strict=True)):
            for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
                self.views[p] = number, piece.view_as(p)
                p.register_post_accumulate_grad_hook(self.arrive)
        self.missing = [set(group) for group in self.groups]

    def cut(self, first, others):
        """Per dtype, all parameters cut into buckets; one dtype after the other."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            bucket, size, limit = [], 0, first
            for p in reversed([p for p in parameters if p.dtype == dtype]):
                bucket, size = [*bucket, p], size + p.nbytes
                if size >= limit:
                    yield bucket
                    bucket, size, limit = [], 0, others
            if bucket:
                yield bucket

    def arrive(self, parameter):
        """The hook."""
        if self.quiet:
            return
        self.missing[self.gather(parameter)].discard(parameter)
        while len(self.works) < len(self.groups) and not self.missing[len(self.works)]:
            self.works.append(dist.all_reduce(self.flats[len(self.works)], async_op=True))

    def gather(self, parameter):
        """Put a gradient at its place, divided, and let it live there."""
        number, view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad / dist.get_world_size())
        parameter.grad = view
        return number

    def finish_gradient_sync(self):
        """Complete the buckets that wait, send them, wait for all."""
        for missing in self.missing[len(self.works) :]:
            for parameter in missing:
                self.gather(parameter)
        for flat in self.flats[len(self.works) :]:
            self.works.append(dist.all_reduce(flat, async_op=True))
        while self.works:
            self.works.pop().wait()
        self.missing = [set(group) for group in self.groups]

    @contextlib.contextmanager
    def no_sync(self):
        """Restored by finally."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before
