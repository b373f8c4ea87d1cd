"""Right answers to lesson 13 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import torch
import torch.distributed as dist
from torch import nn

from shared.ranks.collectives import all_gather, reduce_scatter
from solutions import lesson13_fsdp as right
from solutions.alternatives.sharding_by_module import ByModule
from solutions.alternatives.sharding_models import AnyModel, FromModel, Watched


class NewTensors:
    """A flat unit with lists of pieces, whose shard is cut by index, all from scratch."""

    def __init__(self, parameters, compute_dtype=None, group=None):
        self.parameters, self.group = list(parameters), group
        self.n, self.me = dist.get_world_size(group), dist.get_rank(group)
        self.trained = self.parameters[0].requires_grad
        self.places, at = [], 0
        for p in self.parameters:
            self.places.append((at, at + p.numel(), tuple(p.shape)))
            at += p.numel()
        self.part = -(-at // self.n)
        dtype = self.parameters[0].dtype
        whole = torch.zeros(self.part * self.n, dtype=dtype)
        for p, (a, b, _) in zip(self.parameters, self.places, strict=True):
            whole[a:b] = p.detach().flatten()
        dist.broadcast(whole, group_src=0, group=group)
        kept = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        mine = whole[self.me * self.part : (self.me + 1) * self.part].clone().to(kept)
        self.shard = nn.Parameter(mine, requires_grad=self.trained)
        self.flat = torch.zeros(self.part * self.n, dtype=compute_dtype or dtype)
        self.users = self.pending = 0
        self.coming = self.leaving = None
        self.free()

    @property
    def is_whole(self):
        return self.flat.untyped_storage().size() != 0

    def pieces(self, flat):
        return [flat[a:b].view(shape) for a, b, shape in self.places]

    def own_part(self, flat):
        return flat[self.me * self.part : (self.me + 1) * self.part]

    def full(self, part):
        found = torch.cat(self._collected(part.detach()))
        return self.pieces(found)

    def _collected(self, part):
        lists = [torch.empty_like(part) for _ in range(self.n)]
        dist.all_gather(lists, part.contiguous(), group=self.group)
        return lists

    def gather(self):
        if not self.is_whole:
            with torch.no_grad():
                self.flat.untyped_storage().resize_(len(self.flat) * self.flat.itemsize)
                self.coming = all_gather(self.flat, self.shard.to(self.flat.dtype), self.group)
                for p, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
                    p.data = piece

    def wait(self):
        coming, self.coming = self.coming, None
        if coming:
            coming.wait()

    def free(self):
        self.wait()
        for p in self.parameters:
            p.data = torch.empty(0, dtype=self.flat.dtype)
        self.flat.untyped_storage().resize_(0)

    def reduce(self):
        self.finish()
        grads = []
        for p, (a, b, _) in zip(self.parameters, self.places, strict=True):
            grads.append(self.flat.new_zeros(b - a) if p.grad is None else p.grad.flatten())
            p.grad = None
        grads.append(self.flat.new_zeros(len(self.flat) - self.places[-1][1]))
        flat = torch.cat(grads).div_(self.n)
        del grads
        part = flat.new_empty(self.part)
        self.leaving = reduce_scatter(part, flat, self.group), part, flat

    def finish(self):
        if self.leaving:
            work, part, flat = self.leaving
            work.wait()
            flat.untyped_storage().resize_(0)
            self.leaving = None
            if self.shard.grad is None:
                self.shard.grad = part.to(self.shard.dtype)
            else:
                self.shard.grad += part


class Derived(right.FlatUnit):
    """The mean divided after the sum; whole gradients freed one by one."""

    @torch.no_grad()
    def reduce(self):
        self.finish()
        grads = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        for p in self.parameters:
            p.grad = None
        self.filling = torch.zeros(len(self.flat), dtype=self.flat.dtype)
        for i, piece in enumerate(self.pieces(self.filling)):
            if i in grads:
                piece.copy_(grads.pop(i) / self.num_ranks)
        self._reduce_scatter(self.filling)


class Chained(nn.Module):
    """One hook object a unit, with the message under way in a list that the units share."""

    def __init__(self, module, units):
        super().__init__()
        self.run, self.units, self.sent = [module], [], []
        for each in units:
            parameters = list(each.parameters())
            unit = right.FlatUnit(parameters)
            self.units.append(unit)
            each.register_forward_pre_hook(lambda *_, unit=unit: self.fetch(unit))
            each.register_forward_hook(lambda _, __, y, unit=unit: self.passed(unit, y))
            for p in parameters:
                p.register_post_accumulate_grad_hook(lambda _, unit=unit: self.arrived(unit))
        self.own = nn.ParameterList([u.shard for u in self.units])

    def forward(self, x):
        return self.run[0](x)

    def fetch(self, unit):
        unit.gather()
        unit.wait()

    def passed(self, unit, y):
        unit.free()
        if torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(
                [y], lambda _: self.back(unit), mode="any"
            )

    def back(self, unit):
        self.fetch(unit)
        self.finish_gradient_sync()

    def arrived(self, unit):
        if sum(p.grad is None for p in unit.parameters) == 0:
            unit.free()
            unit.reduce()
            self.sent.append(unit)

    def finish_gradient_sync(self):
        while self.sent:
            self.sent.pop().finish()


class Counted(right.FullyShard):
    """The reference, whose units are remembered whole by a flag of the class's own."""

    def acquire(self, unit):
        if not unit.is_whole:
            unit.gather()
        unit.wait()

    def full_state_dict(self):
        whole = {}
        for name, (unit, place) in self.names().items():
            whole[name] = unit.full(unit.shard)[place].clone()
        rest = {k: v for k, v in self.module.state_dict().items() if k not in whole}
        return {**whole, **rest}


class Following(right.FullyShard):
    """Prefetch by a table: what follows the n-th use of a unit."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.table, self.trace, self.on = {}, [], False

    def forward(self, *args, **kwargs):
        self.on = torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def acquire(self, unit):
        super().acquire(unit)
        if self.on:
            times = self.trace.count(unit)
            self.trace.append(unit)
            ahead = self.table.get((unit, times))
            waiting = [u for u in self.units if u.is_whole and u.users == 0]
            if ahead is not None and not waiting:
                ahead.gather()

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self.table = {
            (unit, self.trace[:i].count(unit)): following
            for i, (unit, following) in enumerate(zip(self.trace, self.trace[1:], strict=False))
        }
        self.trace = []


class Queued(right.FullyShard):
    """Prefetch by a queue of what is still to come in this step."""

    previous = ()

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self.previous, self.past = tuple(getattr(self, "past", ())), []
        self.queue = list(self.previous)

    def acquire(self, unit):
        super().acquire(unit)
        if getattr(self, "evaluating", False):
            return
        self.past = [*getattr(self, "past", []), unit]
        queue = getattr(self, "queue", [])
        if queue and queue[0] is unit:
            queue.pop(0)
            if queue and sum(u.is_whole for u in self.units) < 2:
                queue[0].gather()
        else:
            queue.clear()

    def forward(self, *args, **kwargs):
        self.evaluating = not torch.is_grad_enabled()
        return super().forward(*args, **kwargs)


def by_device_mesh(module, mesh, units=None, compute_dtype=None):
    """The groups from torch's own mesh; the mean over replicas at the end of backward."""
    from torch.distributed.device_mesh import init_device_mesh

    if min(mesh) < 1 or mesh[0] * mesh[1] != dist.get_world_size():
        raise ValueError(f"{mesh} are not {dist.get_world_size()} ranks")
    both = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("nodes", "shards"))
    inside, across = both.get_group("shards"), both.get_group("nodes")

    class AtTheEnd(right.FullyShard):
        def finish_gradient_sync(self):
            super().finish_gradient_sync()
            for shard in self.parameters():
                if shard.grad is not None:
                    dist.all_reduce(shard.grad, group=across)
                    shard.grad /= mesh[0]

    model = AtTheEnd(module, units, compute_dtype, group=inside)
    for tensor in [p.data for p in model.parameters()] + list(module.buffers()):
        dist.broadcast(tensor, group_src=0, group=across)
    return model


def by_arithmetic(module, mesh, units=None, compute_dtype=None):
    """The groups by stride; each gradient averaged when it arrives, and waited for at once."""
    nodes, size = mesh
    world, me = dist.get_world_size(), dist.get_rank()
    if nodes <= 0 or size <= 0 or nodes * size != world:
        raise ValueError(f"{nodes} x {size} is not {world}")
    table = torch.arange(world).view(nodes, size)
    made = {tuple(r): dist.new_group(r) for r in (*table.tolist(), *table.t().tolist())}
    node = made[tuple(table[me // size].tolist())]
    same = made[tuple(table[:, me % size].tolist())]

    class AtOnce(right.PrefetchingShard):
        def on_shard_gradient(self, unit):
            grad = unit.shard.grad
            dist.all_reduce(grad, group=same)
            grad.mul_(1 / nodes)

    first = [*module.parameters(), *module.buffers()]
    for tensor in first:  # before anything is cut
        dist.broadcast(tensor.detach(), 0)
    return AtOnce(module, units, compute_dtype, group=node)


class General(right.FullyShard):
    """What does more than a chain asks for does a chain as well."""


ALTERNATIVES = {
    "13.1": [NewTensors, Derived],
    "13.1b": [Chained, General],
    "13.2": [Watched, AnyModel],
    "13.2b": [FromModel, ByModule, Counted],
    "13.3": [Following, Queued],
    "13.4": [by_device_mesh, by_arithmetic],
}
