"""Wrong answers to lesson 13 that people really give, and what the check must say to each."""

import contextlib
import functools
import time

import torch
import torch.distributed as dist
from torch import nn

from shared.exercises.mistakes import mistake
from shared.fsdp.hybrid import HybridShard, mesh_groups
from shared.zero.flat import all_gather, partition, reduce_scatter
from solutions import lesson13_fsdp as right

# 13.1 FlatUnit


@mistake("13.1", says="the shard is a tensor")
class FlatUnit(right.FlatUnit):
    def __init__(self, *args):
        super().__init__(*args)
        self.shard = self.shard.detach()


@mistake("13.1", says="the shard has 16 bits")
class FlatUnit(right.FlatUnit):
    def __init__(self, parameters, compute_dtype=None, group=None):
        super().__init__(parameters, compute_dtype, group)
        dtype = self.flat.dtype if compute_dtype is None else self.shard.dtype
        self.shard = nn.Parameter(self.shard.detach().to(dtype), self.trained)


@mistake("13.1", says="the shard has the dtype that computes")
class FlatUnit(right.FlatUnit):
    def __init__(self, parameters, compute_dtype=None, group=None):
        super().__init__(parameters, compute_dtype, group)
        if compute_dtype is not None:
            self.shard = nn.Parameter(self.shard.detach().to(compute_dtype), self.trained)


@mistake("13.1", says="the shard of frozen parameters is trained")
class FlatUnit(right.FlatUnit):
    def __init__(self, *args):
        super().__init__(*args)
        self.shard.requires_grad_(True)


@mistake("13.1", says="every rank has the whole tensor")
class FlatUnit(right.FlatUnit):
    def __init__(self, parameters, compute_dtype=None, group=None):
        super().__init__(parameters, compute_dtype, group)
        whole = torch.cat([x.flatten() for x in self.full(self.shard)])
        self.shard = nn.Parameter(whole, self.trained)

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        for parameter, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
            parameter.data = piece

    def reduce(self):
        for parameter in self.parameters:
            parameter.grad = None

    def full(self, part):
        return right.FlatUnit.full(self, part[: len(self.flat) // self.num_ranks])


@mistake("13.1", says="the shards take turns, element by element")
class FlatUnit(right.FlatUnit):
    def own_part(self, flat):
        return flat[self._index :: self.num_ranks]

    def gather(self):
        pass

    def reduce(self):
        for parameter in self.parameters:
            parameter.grad = None


@mistake("13.1", says="rank 0 of the group decides the numbers")
class FlatUnit(right.FlatUnit):
    def __init__(self, parameters, compute_dtype=None, group=None):
        _, parts = partition(parameters, dist.get_world_size(group))
        super().__init__(parameters, compute_dtype, group)
        with torch.no_grad():
            self.shard.copy_(parts[self._index])


@mistake("13.1", says="the whole tensor stays alive between uses")
class FlatUnit(right.FlatUnit):
    def __init__(self, parameters, *args):
        parameters = list(parameters)
        self.originals = [parameter.data for parameter in parameters]
        super().__init__(parameters, *args)


@mistake("13.1", says="parameters keep elements between uses")
class FlatUnit(right.FlatUnit):
    def free(self):
        self.wait()
        if self.is_whole:
            for parameter, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
                parameter.data = piece
        self.flat.untyped_storage().resize_(0)


@mistake("13.1", says="the memory is not given back by free()")
class FlatUnit(right.FlatUnit):
    def free(self):
        self.wait()
        self.flat = self.flat.new_empty(len(self.flat))
        self.flat.untyped_storage().resize_(0)
        self._filling = self._reduced = self.flat
        for parameter in self.parameters:
            parameter.data = self.flat.new_empty(0)


@mistake("13.1", says="whole in another dtype than compute_dtype")
class FlatUnit(right.FlatUnit):
    def __init__(self, parameters, compute_dtype=None, group=None):
        super().__init__(parameters, None, group)


@mistake("13.1", says="gather() waits for the message")
class FlatUnit(right.FlatUnit):
    def gather(self):
        super().gather()
        self.wait()


@mistake("13.1", says="a unit that is whole is gathered again")
class FlatUnit(right.FlatUnit):
    @torch.no_grad()
    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        own = self.own_part(self.flat)
        own.copy_(self.shard)
        self._gathering = all_gather(self.flat, own, self.group)
        for parameter, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
            parameter.data = piece


@mistake("13.1", says="float32 travels where 16 bits compute")
class FlatUnit(right.FlatUnit):
    @torch.no_grad()
    def gather(self):
        if not self.is_whole:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            self.wide = self.shard.new_empty(len(self.flat))
            self._gathering = all_gather(self.wide, self.shard.detach(), self.group)
            for parameter, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
                parameter.data = piece

    def wait(self):
        super().wait()
        if self.is_whole and hasattr(self, "wide"):
            self.flat.copy_(self.wide)
            del self.wide


@mistake("13.1", says="is_whole says False while gather()'s message is under way")
class FlatUnit(right.FlatUnit):
    @property
    def is_whole(self):
        return self._gathering is None and super().is_whole

    def gather(self):
        if self._gathering is None:
            super().gather()


@mistake("13.1", says="a rank that lacks a gradient sends nothing")
class FlatUnit(right.FlatUnit):
    def reduce(self):
        if all(parameter.grad is not None for parameter in self.parameters):
            super().reduce()


@mistake("13.1", says="nothing arrives in shard.grad")
class FlatUnit(right.FlatUnit):
    def finish(self):
        super().finish()
        self.shard.grad = None


@mistake("13.1", says="whole gradients are left behind")
class FlatUnit(right.FlatUnit):
    def reduce(self):
        kept = [parameter.grad for parameter in self.parameters]
        super().reduce()
        for parameter, grad in zip(self.parameters, kept, strict=True):
            parameter.data = torch.empty_like(grad) if grad is not None else parameter.data
            parameter.grad = grad


@mistake("13.1", says="reduce() waits for the message")
class FlatUnit(right.FlatUnit):
    def reduce(self):
        super().reduce()
        super().finish()


@mistake("13.1", says="gradients are all-reduced")
class FlatUnit(right.FlatUnit):
    def _send(self):
        self._reducing = dist.all_reduce(self._filling, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self):
        if self._reducing is not None:
            self._reducing.wait()
            mean = self.own_part(self._filling).to(self.shard.dtype, copy=True)
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
            self._reducing, self._filling = None, self.flat


@mistake("13.1", says="the gradients are summed, not averaged")
class FlatUnit(right.FlatUnit):
    def reduce(self):
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.num_ranks)
        super().reduce()


@mistake("13.1", says="over the whole world, not over the group")
class FlatUnit(right.FlatUnit):
    def reduce(self):
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.num_ranks / dist.get_world_size())
        super().reduce()


@mistake("13.1", says="takes the place of the first")
class FlatUnit(right.FlatUnit):
    def finish(self):
        if self._reducing is not None:
            self.shard.grad = None
        super().finish()


@mistake("13.1", says="shard.grad has another dtype")
class FlatUnit(right.FlatUnit):
    def finish(self):
        super().finish()
        if self.shard.dtype != self.flat.dtype and self.shard.grad is not None:
            small = self.shard.grad.to(self.flat.dtype)
            self.shard.grad = None
            self.shard.grad_dtype = None
            self.shard.grad = small


@mistake("13.1", says="full() returns what computes, rounded")
class FlatUnit(right.FlatUnit):
    def full(self, part):
        return [x.to(self.flat.dtype) for x in super().full(part)]


@mistake("13.1", says="the numbers of before the update are gathered")
class FlatUnit(right.FlatUnit):
    def __init__(self, *args):
        super().__init__(*args)
        self.first = self.shard.detach().numpy().copy()

    @torch.no_grad()
    def gather(self):
        if not self.is_whole:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            self._gathering = all_gather(
                self.flat, torch.from_numpy(self.first).to(self.flat.dtype), self.group
            )
            for parameter, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
                parameter.data = piece


@mistake("13.1", says="the whole gradients stay alive after finish()")
class FlatUnit(right.FlatUnit):
    """What has been sent is kept until the next reduce() takes its place."""

    def reduce(self):
        super().reduce()
        self.sent = self._filling.clone()


@mistake("13.1", says="own_part() gives a copy")
class FlatUnit(right.FlatUnit):
    def gather(self):
        self.viewing = True
        super().gather()
        self.viewing = False

    def own_part(self, flat):
        part = super().own_part(flat)
        return part if getattr(self, "viewing", True) else part.clone()


@mistake("13.1", says="pieces() gives copies")
class FlatUnit(right.FlatUnit):
    def pieces(self, flat):
        inside = flat is self.flat or flat is self._filling
        return [piece if inside else piece.clone() for piece in super().pieces(flat)]


@mistake("13.1", says="gradients travel in float32")
class FlatUnit(right.FlatUnit):
    def _send(self):
        self._filling = self._filling.float()
        self._reduced = self._filling.new_empty(len(self.shard))
        self._reducing = reduce_scatter(self._reduced, self._filling, self.group)


# 13.2 FullyShard


@mistake("13.2", says="parameters() are the whole parameters, not the shards")
class FullyShard(right.FullyShard):
    def parameters(self, recurse=True):
        return iter([nn.Parameter(x) for x in self.full_state_dict().values()])


@mistake("13.2", says="the gradients are summed over the ranks")
class FullyShard(right.FullyShard):
    def on_shard_gradient(self, unit):
        unit.shard.grad.mul_(unit.num_ranks)


@mistake("13.2", says="only the last of two backward passes counts")
class FullyShard(right.FullyShard):
    def _reduce(self, unit):
        unit.shard.grad = None
        super()._reduce(unit)


@mistake("13.2", says="nothing is trained: the shards get no gradient")
class FullyShard(right.FullyShard):
    def on_shard_gradient(self, unit):
        unit.shard.grad = None


@mistake("13.2", says="each rank trains on its own gradients")
class FullyShard(right.FullyShard):
    """Every rank's own part of its own gradients."""

    def _reduce(self, unit):
        whole = {p: p.grad for p in unit.parameters}
        for p, grad in whole.items():
            p.grad = None if grad is None else torch.zeros_like(grad)
        seen = unit.shard.grad
        unit.shard.grad = None
        super()._reduce(unit)
        unit.finish()
        flat = unit.shard.new_zeros(len(unit.flat))
        for piece, grad in zip(unit.pieces(flat), whole.values(), strict=True):
            if grad is not None:
                piece.copy_(grad)
        parts = [torch.empty_like(flat) for _ in range(unit.num_ranks)]
        dist.all_gather(parts, flat)
        self.mine = getattr(self, "mine", {})
        self.mine[unit] = self.mine.get(unit, 0) + flat
        unit.shard.grad = unit.own_part(flat).clone() + (0 if seen is None else seen)


@mistake("13.2", says="the ranks start with different numbers")
class FullyShard(right.FullyShard):
    def __init__(self, module, *args, **kwargs):
        first = {name: x.detach().clone() for name, x in module.state_dict().items()}
        super().__init__(module, *args, **kwargs)
        self.load_full_state_dict(first)


@mistake("13.2", says="names are missing")
class FullyShard(right.FullyShard):
    def full_state_dict(self):
        whole = super().full_state_dict()
        return {name: whole[name] for name, _ in self.module.named_parameters()}


@mistake("13.2", says="has parameters without their numbers")
class FullyShard(right.FullyShard):
    def full_state_dict(self):
        return {name: x.clone() for name, x in self.module.state_dict().items()}


@mistake("13.2", says="a frozen parameter is moved")
class FullyShard(right.FullyShard):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for unit in self.units:
            if not unit.trained:
                unit.shard.data.mul_(0.99)


@mistake("13.2", says="units stay whole after an evaluation")
class FullyShard(right.FullyShard):
    def forward(self, *args, **kwargs):
        self.reshard_after_forward = torch.is_grad_enabled()
        with torch.enable_grad():
            return super().forward(*args, **kwargs)


@mistake("13.2", says="units stay whole after finish_gradient_sync()")
class FullyShard(right.FullyShard):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for unit in self.units:
            unit.gather()
            unit.wait()

    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit.free()
        return super().forward(*args, **kwargs)


@mistake("13.2", says="leaves out of turn, or not at all")
class FullyShard(right.FullyShard):
    """A unit waits for its last gradient, which on another rank has come."""

    def _passed(self, units):
        for unit in units:
            unit.users -= 1
            unit.pending -= 1
            if unit.users <= 0:
                unit.free()


@mistake("13.2", says="`units` are not kept to")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, **kwargs):
        named = None if units is None else [m for m in units if len(list(m.children())) == 0]
        super().__init__(module, named, compute_dtype, **kwargs)


@mistake("13.2", says="kept whole from forward to backward")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, **kwargs):
        super().__init__(module, units, compute_dtype, reshard_after_forward=False)


@mistake("13.2", says="more is alive than a unit's parameters and its gradients")
class FullyShard(right.FullyShard):
    """The last unit's gradients travel while the next unit computes its own."""

    finishing = False

    def _finish_travelling(self):
        if self.finishing:
            super()._finish_travelling()

    def _reduce(self, unit):
        before, self.finishing = self.finishing, True
        super()._reduce(unit)
        self.finishing = before

    def finish_gradient_sync(self):
        self.finishing = True
        super().finish_gradient_sync()
        self.finishing = False


@mistake("13.2", says="every unit is whole at the worst moment")
class FullyShard(right.FullyShard):
    """What backward has gathered is freed at its end."""

    def _passed(self, units):
        with self.kept(units):
            super()._passed(units)

    def _reduce(self, unit):
        with self.kept([unit]):
            super()._reduce(unit)

    @contextlib.contextmanager
    def kept(self, units):
        """Units that nobody can free inside."""
        for unit in units:
            unit.free = lambda: None
        yield
        for unit in units:
            unit.free = functools.partial(type(unit).free, unit)


@mistake("13.2", says="each module that has one of its parameters, a tied one as well")
class FullyShard(right.FullyShard):
    """A tied matrix is gathered for the first module that has it alone."""

    def _hook(self, module, parameters):
        hooked = getattr(self, "hooked", set())
        super()._hook(module, [p for p in parameters if p not in hooked])
        self.hooked = hooked | set(parameters)


@mistake("13.2", says="on_shard_gradient() is not called for each unit")
class FullyShard(right.FullyShard):
    def _finish_travelling(self):
        if self._travelling is not None:
            self._travelling.finish()
        self._travelling = None


@mistake("13.2", says="on_shard_gradient() is called before shard.grad holds the mean")
class FullyShard(right.FullyShard):
    def _reduce(self, unit):
        super()._reduce(unit)
        self.on_shard_gradient(unit)


@mistake("13.2", says="only the first of two backward passes counts")
class FullyShard(right.FullyShard):
    """A unit that has left does not leave again."""

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self.sent = set()

    def _finish_travelling(self):
        unit, self.sent = self._travelling, getattr(self, "sent", set())
        before = None if unit is None or unit.shard.grad is None else unit.shard.grad.clone()
        super()._finish_travelling()
        if unit is not None and unit in self.sent:
            unit.shard.grad = before
        self.sent |= {unit}


@mistake("13.2", says="acquire() is not called in backward")
class FullyShard(right.FullyShard):
    def forward(self, *args, **kwargs):
        self.acquire = functools.partial(type(self).acquire, self)
        output = super().forward(*args, **kwargs)
        self.acquire = functools.partial(right.FullyShard.acquire, self)
        return output


@mistake("13.2", says="units are sharded over all ranks, not over the group")
class FullyShard(right.FullyShard):
    def __init__(self, *args, group=None, **kwargs):
        super().__init__(*args, **kwargs)


@mistake("13.2", says="numbers or buffers come from outside of the group")
class FullyShard(right.FullyShard):
    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


@mistake("13.2", says="frozen and trained parameters are in one unit")
class FullyShard(right.FullyShard):
    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: None)


@mistake("13.2", says="the gradients leave after backward")
class FullyShard(right.FullyShard):
    """The gradients are reduced together, in finish_gradient_sync()."""

    def _on_gradient(self, parameter):
        pass

    def _passed(self, units):
        pass

    def finish_gradient_sync(self):
        for unit in self.units:
            if unit.trained:
                self._reduce(unit)
        super().finish_gradient_sync()


@mistake("13.2", says="compute_dtype is not used")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, **kwargs):
        super().__init__(module, units, **kwargs)


@mistake("13.2", says="full_state_dict() is rounded")
class FullyShard(right.FullyShard):
    def full_state_dict(self):
        dtype = self.compute_dtype or torch.float32
        return {name: x.to(dtype).to(x.dtype) for name, x in super().full_state_dict().items()}


@mistake("13.2", says="a unit that contains another is accepted")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, **kwargs):
        if units is not None:
            inner = {part for unit in units for part in list(unit.modules())[1:]}
            units = [unit for unit in units if unit not in inner]
        super().__init__(module, units, compute_dtype, **kwargs)


@mistake("13.2", says="a unit that is named twice is accepted")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, **kwargs):
        super().__init__(module, units and list(dict.fromkeys(units)), compute_dtype, **kwargs)


@mistake("13.2", says="keep_whole is not used")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, *, keep_whole=0, **kwargs):
        super().__init__(module, units, compute_dtype, **kwargs)


@mistake("13.2", says="reshard_after_forward=False is not used")
class FullyShard(right.FullyShard):
    def __init__(self, *args, reshard_after_forward=True, **kwargs):
        super().__init__(*args, **kwargs)


# 13.3 PrefetchingShard


@mistake("13.3", says="nothing is on its way while a unit computes")
class PrefetchingShard(right.FullyShard):
    """Nothing ahead."""


@mistake("13.3", says="the next unit is waited for before this one computes")
class PrefetchingShard(right.PrefetchingShard):
    def acquire(self, unit):
        super().acquire(unit)
        for each in self.units:
            each.wait()


@mistake("13.3", says="nothing is on its way in backward")
class PrefetchingShard(right.PrefetchingShard):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self._order = self._order[: len(self._order) // 2]


@mistake("13.3", says="a unit is gathered more often than for forward and for backward")
class PrefetchingShard(right.FullyShard):
    """The order of the list of units, in backward as well."""

    def acquire(self, unit):
        super().acquire(unit)
        at = self.units.index(unit)
        for ahead in self.units[at + 1 : at + 2]:
            if sum(each.is_whole for each in self.units) < 2:
                ahead.gather()


@mistake("13.3", says="another unit than the next one is on its way")
class PrefetchingShard(right.FullyShard):
    """The order of the list of units, and in backward the other way round."""

    last, way = None, 1

    def forward(self, *args, **kwargs):
        self.last, self.way = None, 1
        return super().forward(*args, **kwargs)

    def acquire(self, unit):
        super().acquire(unit)
        self.way = -1 if unit is self.last else self.way
        self.last = unit
        at = self.units.index(unit) + self.way
        if 0 <= at < len(self.units) and sum(each.is_whole for each in self.units) < 2:
            self.units[at].gather()


@mistake("13.3", says="more than two units are whole at a time")
class PrefetchingShard(right.PrefetchingShard):
    def acquire(self, unit):
        super().acquire(unit)
        at = len(self._seen)
        for ahead in self._order[at : at + 2] if self._training else ():
            ahead.gather()


@mistake("13.3", says="units stay whole after finish_gradient_sync()")
class PrefetchingShard(right.PrefetchingShard):
    """The first unit of the next step is fetched at the end of this one."""

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        if self._order:
            self._order[0].gather()


@mistake("13.3", says="must not touch the order")
class PrefetchingShard(right.PrefetchingShard):
    def forward(self, *args, **kwargs):
        self._training = True
        return right.FullyShard.forward(self, *args, **kwargs)


@mistake("13.3", says="the order is that of a first step for ever")
class PrefetchingShard(right.PrefetchingShard):
    def finish_gradient_sync(self):
        first = self._order
        super().finish_gradient_sync()
        self._order = first or self._order


@mistake("13.3", says="at the end of a step the next one's first unit is fetched")
class PrefetchingShard(right.PrefetchingShard):
    def acquire(self, unit):
        super().acquire(unit)
        if self._training and len(self._seen) == len(self._order):
            self._order[0].gather()


# 13.4 hybrid_shard


@mistake("13.4", says="the mean is taken inside a node alone")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    model = right.hybrid_shard(module, mesh, units, compute_dtype)
    model.on_shard_gradient = lambda unit: None
    return model


@mistake("13.4", says="the gradients are summed over the replicas")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    class Summed(HybridShard):
        def on_shard_gradient(self, unit):
            unit.shard.grad.mul_(mesh[0])
            super().on_shard_gradient(unit)

    right.hybrid_shard(nn.Linear(1, 1), mesh)  # refuses what is to be refused
    group, others = mesh_groups(*mesh)
    return Summed(module, units, compute_dtype, replicas=others, group=group)


@mistake("13.4", says="the ranks start with different numbers")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    own = {name: x.detach().clone() for name, x in module.state_dict().items()}
    model = right.hybrid_shard(module, mesh, units, compute_dtype)
    inside = right.FullyShard(nn.ParameterList(own.values()), [], group=model.group)
    whole = [x.clone() for x in inside.full_state_dict().values()]
    model.load_full_state_dict(dict(zip(own, whole, strict=True)))
    return model


@mistake("13.4", says="different shards are averaged with each other")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    model = right.hybrid_shard(module, mesh, units, compute_dtype)

    def over_all(unit):
        dist.all_reduce(unit.shard.grad)
        unit.shard.grad /= dist.get_world_size()

    model.on_shard_gradient = over_all
    return model


@mistake("13.4", says="rows and columns are exchanged")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    nodes, size = mesh
    if nodes < 1 or size < 1 or nodes * size != dist.get_world_size():
        raise ValueError("another mesh")
    rank = dist.get_rank()
    shards = [dist.new_group(list(range(i, nodes * size, nodes))) for i in range(nodes)]
    copies = [dist.new_group(list(range(i * nodes, (i + 1) * nodes))) for i in range(size)]
    return HybridShard(
        module, units, compute_dtype, replicas=copies[rank // nodes], group=shards[rank % nodes]
    )


@mistake("13.4", says="parameters are gathered across nodes")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    mesh_groups(*mesh)
    return right.PrefetchingShard(module, units, compute_dtype)


@mistake("13.4", says="a mesh of 2 x 2 on 3 ranks is accepted")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    world = dist.get_world_size()
    size = mesh[1] if world % mesh[1] == 0 else 1
    return right.hybrid_shard(module, (world // size, size), units, compute_dtype)


@mistake("13.4", says="a mesh of 2 x 3 on 3 ranks is accepted")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    nodes, left = divmod(dist.get_world_size(), mesh[1])
    if left:
        raise ValueError("nodes of another size")
    return right.hybrid_shard(module, (nodes, mesh[1]), units, compute_dtype)


@mistake("13.4", says="compute_dtype is not handed on")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    return right.hybrid_shard(module, mesh, units)


@mistake("13.4", says="the message between replicas is not waited for")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    class Started(HybridShard):
        def on_shard_gradient(self, unit):
            time.sleep(0.03 * (dist.get_rank(self.replicas) > 0))  # so that it shows
            unit.shard.grad.div_(mesh[0])
            dist.all_reduce(unit.shard.grad, group=self.replicas, async_op=True)

    group, others = mesh_groups(*mesh)
    return Started(module, units, compute_dtype, replicas=others, group=group)


@mistake("13.4", says="whole gradients cross the nodes")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    class Whole(HybridShard):
        def on_shard_gradient(self, unit):
            flat = unit.shard.new_empty(len(unit.flat))
            all_gather(flat, unit.shard.grad, self.group).wait()
            dist.all_reduce(flat, group=self.replicas)
            unit.shard.grad.copy_(unit.own_part(flat) / mesh[0])

    group, others = mesh_groups(*mesh)
    return Whole(module, units, compute_dtype, replicas=others, group=group)
