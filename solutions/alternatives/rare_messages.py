"""Right answers to lesson 20 that send rarely or over two levels, in another style."""

import torch
import torch.distributed as dist

from shared.errors import InputError
from shared.ranks.collectives import all_gather, reduce_scatter


def average(tensors, group):
    """All tensors by one message."""
    if tensors and dist.get_world_size(group) > 1:
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))


class ByVelocity:
    """Where the outer optimizer stands, and how fast it moves, for each parameter."""

    def __init__(self, parameters, every, outer_lr=1.0, outer_momentum=0.0, group=None):
        """Copies of the parameters are where the outer optimizer stands."""
        if every < 1 or not 0 <= outer_momentum < 1:
            raise InputError(f"every {every}, momentum {outer_momentum}")
        self.inner = [p for p in parameters if p.requires_grad]
        self.group, self.every, self.count = group, every, 0
        for p in self.inner:
            dist.broadcast(p.data, group=group, group_src=0)
        self.outer = [p.detach().clone() for p in self.inner]
        self.speed = [torch.zeros_like(o) for o in self.outer]
        self.rate, self.momentum = outer_lr, outer_momentum

    def step(self):
        """Count; agree."""
        self.count += 1
        agrees = self.count % self.every == 0
        if agrees:
            moved = [o - p.detach() for o, p in zip(self.outer, self.inner, strict=True)]
            average(moved, self.group)
            for o, v, g, p in zip(self.outer, self.speed, moved, self.inner, strict=True):
                v.mul_(self.momentum).add_(g)
                o.sub_(self.rate * (g + self.momentum * v))
                p.data.copy_(o)
        return agrees


class OneVector:
    """All parameters as one vector."""

    def __init__(self, parameters, every, outer_lr=1.0, outer_momentum=0.0, group=None):
        """Checked, broadcast, flattened."""
        if every < 1:
            raise InputError(f"{every} is no number of steps")
        if outer_momentum < 0 or outer_momentum >= 1:
            raise InputError(f"{outer_momentum} is no momentum")
        self.ps = [p for p in parameters if p.requires_grad]
        self.options = every, outer_lr, outer_momentum, group
        self.left = every
        self.base = self.flat()
        if len(self.base):
            dist.broadcast(self.base, group=group, group_src=0)
        self.write()
        self.v = torch.zeros_like(self.base)

    def flat(self):
        """The parameters now."""
        return torch.cat([torch.zeros(0), *[p.detach().flatten() for p in self.ps]])

    def write(self):
        """The base into the parameters."""
        for p, part in zip(self.ps, self.base.split([p.numel() for p in self.ps]), strict=True):
            p.data = part.view_as(p).clone()

    def step(self):
        """Count down; agree."""
        every, lr, momentum, group = self.options
        self.left -= 1
        if self.left:
            return False
        self.left = every
        moved = self.base - self.flat()
        average([moved], group)
        self.v = momentum * self.v + moved
        self.base = self.base - lr * (moved + momentum * self.v)
        self.write()
        return True


def by_lists(x, inside, across):
    """torch's collectives of lists."""
    m, n = dist.get_world_size(inside), x.numel()
    flat = torch.zeros(-(-n // m) * m, dtype=x.dtype)
    flat[:n] = x.flatten()
    parts = [part.clone() for part in flat.chunk(m)]
    mine = torch.empty_like(parts[0])
    if m == 1:
        mine = parts[0]
    else:
        dist.reduce_scatter(mine, parts, group=inside)
    if dist.get_world_size(across) > 1:
        dist.all_reduce(mine, group=across)
    if m > 1:
        dist.all_gather(parts, mine, group=inside)
    else:
        parts = [mine]
    x[:] = torch.cat(parts)[:n].view_as(x)


def by_tensors(x, inside, across):
    """torch's collectives of one tensor, begun and waited for."""
    m = dist.get_world_size(inside)
    if m == 1:
        if dist.get_world_size(across) > 1:
            dist.all_reduce(x, group=across)
        return
    length = (x.numel() + m - 1) // m
    whole = x.new_zeros(m, length)
    whole.view(-1)[: x.numel()].copy_(x.reshape(-1))
    mine = x.new_empty(length)
    reduce_scatter(mine, whole.view(-1), inside).wait()
    if dist.get_world_size(across) > 1:
        dist.all_reduce(mine, group=across, async_op=True).wait()
    all_gather(whole.view(-1), mine, inside).wait()
    x.copy_(whole.view(-1)[: x.numel()].view(x.shape))
