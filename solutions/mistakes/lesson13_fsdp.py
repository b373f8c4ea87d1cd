"""Wrong answers to lesson 13 that people really give, and what the check must say to each."""

import functools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shared.exercises.mistakes import mistake
from shared.ranks.collectives import all_gather, reduce_scatter
from shared.sharding.backward import inside_backward
from shared.sharding.flat import partition
from shared.sharding.hybrid import HybridShard, mesh_groups
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
    def _reduce_scatter(self, filling):
        self._reducing = dist.all_reduce(filling, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self):
        if self._reducing is not None:
            self._reducing.wait()
            assert self.filling is not None
            mean = self.own_part(self.filling).to(self.shard.dtype, copy=True)
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
            self._collect_anew()


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
        assert self.filling is not None
        self.sent = self.filling.clone()


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
        inside = flat is self.flat or flat is self.filling
        return [piece if inside else piece.clone() for piece in super().pieces(flat)]


@mistake("13.1", says="gradients travel in float32")
class FlatUnit(right.FlatUnit):
    def _reduce_scatter(self, filling):
        self.filling = filling.float()
        super()._reduce_scatter(self.filling)


@mistake("13.1", says="the part is chosen by the rank in the world")
class FlatUnit(right.FlatUnit):
    @property
    def _index(self):
        return dist.get_rank() % self.num_ranks


@mistake("13.1", says="a gradient that is None counts as zeros, in its place")
class FlatUnit(right.FlatUnit):
    def reduce(self):
        found = [p.grad.flatten() / self.num_ranks for p in self.parameters if p.grad is not None]
        for parameter in self.parameters:
            parameter.grad = None
        self.filling = torch.cat([*found, *[x.new_zeros(-sum(map(len, found)) % self.num_ranks)
                                            for x in found[:1]]])  # fmt: skip
        self._reduced = self.filling.new_empty(len(self.filling) // self.num_ranks)
        self._reducing = reduce_scatter(self._reduced, self.filling, self.group)


# 13.1b ChainShard


@mistake("13.1b", says="parameters() are the whole parameters, not the shards")
class ChainShard(right.ChainShard):
    def __init__(self, module, units):
        super().__init__(module, units)
        for unit in self.units:
            unit.gather()
            unit.wait()
        self.shards = nn.ParameterList(
            nn.Parameter(p.detach().clone()) for p in module.parameters()
        )
        for unit in self.units:
            unit.free()


@mistake("13.1b", says="units stay whole after a forward")
class ChainShard(right.ChainShard):
    """Freed after backward alone."""

    def _hook(self, module, unit):
        super()._hook(module, unit)
        module._forward_hooks.clear()
        module.register_forward_hook(lambda _, __, output: self.again(unit, output))

    def again(self, unit, output):
        if output.requires_grad:
            output.register_hook(lambda _: self.finish_gradient_sync())


@mistake("13.1b", says="units stay whole after an evaluation")
class ChainShard(right.ChainShard):
    def forward(self, x):
        output = super().forward(x)
        for unit in [] if torch.is_grad_enabled() else self.units:
            unit.gather()
            unit.wait()
        return output


@mistake("13.1b", says="a module computes with parameters that are freed")
class ChainShard(right.ChainShard):
    """Gathered for forward, and not a second time."""

    def _hook(self, module, unit):
        super()._hook(module, unit)
        module._forward_hooks.clear()
        module.register_forward_hook(lambda *_: unit.free())


@mistake("13.1b", says="the shards get no gradient")
class ChainShard(right.ChainShard):
    def _hook(self, module, unit):
        super()._hook(module, unit)
        unit.finish = unit.wait


@mistake("13.1b", says="every unit is gathered before the first one computes")
class ChainShard(right.ChainShard):
    def forward(self, x):
        for unit in self.units:
            unit.gather()
            unit.wait()
        return super().forward(x)


@mistake("13.1b", says="the gradients leave after backward")
class ChainShard(right.ChainShard):
    def _hook(self, module, unit):
        super()._hook(module, unit)
        for parameter in unit.parameters:
            parameter._post_accumulate_grad_hooks.clear()

    def finish_gradient_sync(self):
        for unit in reversed(self.units):
            if not inside_backward():
                unit.free()
                unit.reduce()
                unit.finish()


@mistake("13.1b", says="or every unit's gradients, which are still under way")
class ChainShard(right.ChainShard):
    """All reduce-scatters are waited for at the end."""

    def finish_gradient_sync(self):
        if not inside_backward():
            for unit in self.units:
                unit.finish()


# 13.2 ModelShard


@mistake("13.2", says="parameters() are the whole parameters, not the shards")
class ModelShard(right.ModelShard):
    def parameters(self, recurse=True):
        return iter([nn.Parameter(x) for x in self.full_state_dict().values()])


@mistake("13.2", says="the gradients are summed over the ranks")
class ModelShard(right.ModelShard):
    def on_shard_gradient(self, unit):
        unit.shard.grad.mul_(unit.num_ranks)


@mistake("13.2", says="only the last of two backward passes counts")
class ModelShard(right.ModelShard):
    def reduce(self, unit):
        unit.shard.grad = None
        super().reduce(unit)


@mistake("13.2", says="only the first of two backward passes counts")
class ModelShard(right.ModelShard):
    """What a unit has got is kept from the second pass."""

    def finish_travelling(self):
        unit = self._travelling
        before = None if unit is None or unit.shard.grad is None else unit.shard.grad.clone()
        super().finish_travelling()
        if unit is not None and before is not None:
            unit.shard.grad = before


@mistake("13.2", says="nothing is trained: the shards get no gradient")
class ModelShard(right.ModelShard):
    def on_shard_gradient(self, unit):
        unit.shard.grad = None


@mistake("13.2", says="each rank trains on its own gradients")
class ModelShard(right.ModelShard):
    """Every rank's own part of its own gradients."""

    def reduce(self, unit):
        flat = unit.shard.new_zeros(len(unit.flat))
        for piece, p in zip(unit.pieces(flat), unit.parameters, strict=True):
            piece.copy_(p.grad)
        seen = unit.shard.grad
        super().reduce(unit)
        unit.finish()
        unit.shard.grad = unit.own_part(flat).clone() + (0 if seen is None else seen)


@mistake("13.2", says="the ranks start with different numbers")
class ModelShard(right.ModelShard):
    def __init__(self, module, *args, **kwargs):
        own = {p: p.detach().clone() for p in module.parameters()}
        super().__init__(module, *args, **kwargs)
        for unit in self.units:
            flat, _ = partition([own[p] for p in unit.parameters], unit.num_ranks)
            unit.shard.data.copy_(unit.own_part(flat))


@mistake("13.2", says="names are missing")
class ModelShard(right.ModelShard):
    def full_state_dict(self):
        whole = super().full_state_dict()
        return {name: whole[name] for name, _ in self._module[0].named_parameters()}


@mistake("13.2", says="has parameters without their numbers")
class ModelShard(right.ModelShard):
    def full_state_dict(self):
        return {name: x.clone() for name, x in self._module[0].state_dict().items()}


@mistake("13.2", says="units stay whole after an evaluation")
class ModelShard(right.ModelShard):
    """Freed where backward begins, which never comes."""

    def after_forward(self, units, output):
        for unit in units:
            unit.users += not torch.is_grad_enabled()
        super().after_forward(units, output)

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for unit in self.units:
            unit.users = 0
            unit.free()


@mistake("13.2", says="units stay whole after finish_gradient_sync()")
class ModelShard(right.ModelShard):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for unit in self.units:
            unit.gather()
            unit.wait()

    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit.free()
        return super().forward(*args, **kwargs)


@mistake("13.2", says="each module that has one of its parameters, a tied one as well")
class ModelShard(right.ModelShard):
    """A tied matrix is gathered for the first module that has it alone."""

    def _hook(self, module, parameters):
        hooked = getattr(self, "hooked", set())
        super()._hook(module, [p for p in parameters if p not in hooked])
        self.hooked = hooked | set(parameters)


@mistake("13.2", says="it begins with whichever of their gradients is computed first")
class ModelShard(right.ModelShard):
    """Backward is heard of at the first output alone."""

    def after_forward(self, units, output):
        super().after_forward(units, next(iter(tree_leaves(output)), None))


@mistake("13.2", says="`units` are not kept to")
class ModelShard(right.ModelShard):
    def __init__(self, module, units=None, **kwargs):
        named = None if units is None else [m for m in units if len(list(m.children())) == 0]
        super().__init__(module, named, **kwargs)


@mistake("13.2", says="kept whole from forward to backward")
class ModelShard(right.ModelShard):
    def after_forward(self, units, output):
        for unit in units:
            unit.users += torch.is_grad_enabled()
        super().after_forward(units, output)


@mistake("13.2", says="the gradients leave after backward")
class ModelShard(right.ModelShard):
    """The gradients are reduced together, in finish_gradient_sync()."""

    def on_gradient(self, unit, _):
        pass

    def finish_gradient_sync(self):
        for unit in self.units:
            self.reduce(unit)
        super().finish_gradient_sync()


@mistake("13.2", says="every unit is gathered before the first one computes")
class ModelShard(right.ModelShard):
    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit.gather()
            unit.wait()
        return super().forward(*args, **kwargs)


@mistake("13.2", says="every unit is whole at the worst moment")
class ModelShard(right.ModelShard):
    """What backward has gathered is freed at its end."""

    def reduce(self, unit):
        unit.free = lambda: None
        super().reduce(unit)
        del unit.free

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for unit in self.units:
            unit.free()


@mistake("13.2", says="more is alive than a unit's parameters and its gradients")
class ModelShard(right.ModelShard):
    """The last unit's gradients travel while the next unit computes its own."""

    def before_backward(self, units, _):
        self.use(units)


@mistake("13.2", says="a unit that contains another is accepted")
class ModelShard(right.ModelShard):
    def __init__(self, module, units=None, **kwargs):
        if units is not None:
            inner = {part for unit in units for part in list(unit.modules())[1:]}
            units = [unit for unit in units if unit not in inner]
        super().__init__(module, units, **kwargs)


@mistake("13.2", says="a unit that is named twice is accepted")
class ModelShard(right.ModelShard):
    def __init__(self, module, units=None, **kwargs):
        super().__init__(module, units and list(dict.fromkeys(units)), **kwargs)


@mistake("13.2", says="eval() does not reach the module")
class ModelShard(right.ModelShard):
    def train(self, mode=True):
        return nn.Module.train(self, mode)


@mistake("13.2", says="units are sharded over all ranks, not over the group")
class ModelShard(right.ModelShard):
    def __init__(self, module, units=None, *, group=None):
        super().__init__(module, units)


@mistake("13.2", says="numbers or buffers come from outside of the group")
class ModelShard(right.ModelShard):
    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


# 13.2b FullyShard


@mistake("13.2b", says="a frozen parameter is moved")
class FullyShard(right.FullyShard):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for unit in self.units:
            if not unit.trained:
                unit.shard.data.mul_(0.99)


@mistake("13.2b", says="leaves out of turn, or not at all")
class FullyShard(right.FullyShard):
    """A unit waits for its last gradient, which on another rank has come."""

    def _after_backward(self, units):
        for unit in units:
            unit.users -= 1
            unit.pending -= 1
            if unit.users <= 0:
                unit.free()


@mistake("13.2b", says="on_shard_gradient() is not called for each unit")
class FullyShard(right.FullyShard):
    def _finish_travelling(self):
        if self._travelling is not None:
            self._travelling.finish()
        self._travelling = None


@mistake("13.2b", says="on_shard_gradient() is called before shard.grad holds the mean")
class FullyShard(right.FullyShard):
    def _reduce(self, unit):
        super()._reduce(unit)
        self.on_shard_gradient(unit)


@mistake("13.2b", says="acquire() is not called in backward")
class FullyShard(right.FullyShard):
    def forward(self, *args, **kwargs):
        self.acquire = functools.partial(type(self).acquire, self)
        output = super().forward(*args, **kwargs)
        self.acquire = functools.partial(right.FullyShard.acquire, self)
        return output


@mistake("13.2b", says="frozen and trained parameters are in one unit")
class FullyShard(right.FullyShard):
    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: None)


@mistake("13.2b", says="compute_dtype is not used")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, **kwargs):
        super().__init__(module, units, **kwargs)


@mistake("13.2b", says="full_state_dict() is rounded")
class FullyShard(right.FullyShard):
    def full_state_dict(self):
        dtype = self.compute_dtype or torch.float32
        return {name: x.to(dtype).to(x.dtype) for name, x in super().full_state_dict().items()}


@mistake("13.2b", says="keep_whole is not used")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, *, keep_whole=0, **kwargs):
        super().__init__(module, units, compute_dtype, **kwargs)


@mistake("13.2b", says="reshard_after_forward=False is not used")
class FullyShard(right.FullyShard):
    def __init__(self, *args, reshard_after_forward=True, **kwargs):
        super().__init__(*args, **kwargs)


@mistake("13.2b", says="a frozen unit stays whole from forward to backward")
class FullyShard(right.FullyShard):
    def _make_unit(self, parameters):
        unit = super()._make_unit(parameters)
        free = unit.free
        if not unit.trained:  # freed at the end of a step, or of an evaluation
            unit.free = lambda: None if torch.is_grad_enabled() and unit.pending else free()
        return unit


@mistake("13.2b", says="a frozen unit stays whole after its backward")
class FullyShard(right.FullyShard):
    def _after_backward(self, units):
        super()._after_backward([unit for unit in units if unit.trained])


@mistake("13.2b", says="a frozen unit is reduced")
class FullyShard(right.FullyShard):
    def _after_backward(self, units):
        super()._after_backward(units)
        for unit in units:
            if not unit.trained:
                unit.free()
                unit.reduce()
                unit.finish()
                unit.shard.grad = None


@mistake("13.2b", says="integers are cast to compute_dtype")
class FullyShard(right.FullyShard):
    def _cast(self, inputs):
        dtype = self.compute_dtype

        def cast(x):
            tensor = isinstance(x, torch.Tensor)
            return x.to(dtype) if tensor and dtype is not None else x

        return tree_map(cast, inputs)


@mistake("13.2b", says="only the module's inputs are cast")
class FullyShard(right.FullyShard):
    def forward(self, *args, **kwargs):
        args, kwargs = super()._cast((args, kwargs))
        return super().forward(*args, **kwargs)

    def _cast(self, inputs):
        return inputs


@mistake("13.2b", says="at_backward() wants those, too")
class FullyShard(right.FullyShard):
    """Inputs that are given by name pass by at_backward()."""

    def _hook(self, module, parameters):
        super()._hook(module, parameters)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook.__name__ == "before_forward":
                module._forward_pre_hooks[key] = functools.partial(self.without_names, hook)

    def without_names(self, hook, module, args, kwargs):
        changed, _ = hook(module, args, {})
        return changed, self._cast(kwargs)


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


@mistake("13.4", says="`units` is not handed on")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    return right.hybrid_shard(module, mesh, None, compute_dtype)
