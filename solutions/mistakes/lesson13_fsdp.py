"""Wrong answers to lesson 13 that people really give, and what the check must say to each."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from shared.exercises.mistakes import mistake
from shared.sharding.backward import inside_backward
from shared.sharding.flat import partition
from shared.sharding.hybrid import HybridShard
from solutions import lesson13_fsdp as right

# 13.1 FlatUnit


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


# 13.1b ChainShard


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


# 13.2 ModelShard


@mistake("13.2", says="parameters() are the whole parameters, not the shards")
class ModelShard(right.ModelShard):
    def parameters(self, recurse=True):
        return iter([nn.Parameter(x) for x in self.full_state_dict().values()])


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


@mistake("13.2", says="two levels below it is accepted")
class ModelShard(right.ModelShard):
    """Looked for among a unit's children alone."""

    def __init__(self, module, units=None, **kwargs):
        if units is not None:
            deep = {part for unit in units for part in list(unit.modules())[1:]}
            deep -= {child for unit in units for child in unit.children()}
            units = [unit for unit in units if unit not in deep]
        super().__init__(module, units, **kwargs)


@mistake("13.2", says="does not return the sharded module itself")
class ModelShard(right.ModelShard):
    def train(self, mode=True):
        super().train(mode)


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


@mistake("13.2b", says="on_shard_gradient() is called before shard.grad holds the mean")
class FullyShard(right.FullyShard):
    def _reduce(self, unit):
        super()._reduce(unit)
        self.on_shard_gradient(unit)


@mistake("13.2b", says="compute_dtype is not used")
class FullyShard(right.FullyShard):
    def __init__(self, module, units=None, compute_dtype=None, **kwargs):
        super().__init__(module, units, **kwargs)


@mistake("13.2b", says="reshard_after_forward=False is not used")
class FullyShard(right.FullyShard):
    def __init__(self, *args, reshard_after_forward=True, **kwargs):
        super().__init__(*args, **kwargs)


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


@mistake("13.3", says="a unit is gathered more often than for forward and for backward")
class PrefetchingShard(right.FullyShard):
    """The order of the list of units, in backward as well."""

    def acquire(self, unit):
        super().acquire(unit)
        at = self.units.index(unit)
        for ahead in self.units[at + 1 : at + 2]:
            if sum(each.is_whole for each in self.units) < 2:
                ahead.gather()


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


# 13.4 hybrid_shard


@mistake("13.4", says="the mean is taken inside a node alone")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    model = right.hybrid_shard(module, mesh, units, compute_dtype)
    model.on_shard_gradient = lambda unit: None
    return model


@mistake("13.4", says="the ranks start with different numbers")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    own = {name: x.detach().clone() for name, x in module.state_dict().items()}
    model = right.hybrid_shard(module, mesh, units, compute_dtype)
    inside = right.FullyShard(nn.ParameterList(own.values()), [], group=model.group)
    whole = [x.clone() for x in inside.full_state_dict().values()]
    model.load_full_state_dict(dict(zip(own, whole, strict=True)))
    return model


def own_gradient(unit):
    """What has arrived in the shard."""
    assert unit.shard.grad is not None
    return unit.shard.grad


@mistake("13.4", says="different shards are averaged with each other")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    model = right.hybrid_shard(module, mesh, units, compute_dtype)
    share = 1 / dist.get_world_size()
    model.on_shard_gradient = lambda unit: dist.all_reduce(own_gradient(unit).mul_(share))
    return model


@mistake("13.4", says="the message between replicas is not waited for")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    """What arrives too late is a copy here, so that it is too late every time."""
    model = right.hybrid_shard(module, mesh, units, compute_dtype)
    model.on_shard_gradient = lambda unit: dist.all_reduce(
        own_gradient(unit).clone(), group=model.replicas, async_op=True
    )
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


@mistake("13.4", says="a mesh of 2 x 2 on 3 ranks is accepted")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    world = dist.get_world_size()
    size = mesh[1] if world % mesh[1] == 0 else 1
    return right.hybrid_shard(module, (world // size, size), units, compute_dtype)


@mistake("13.4", says="`units` is not handed on")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    return right.hybrid_shard(module, mesh, None, compute_dtype)
