"""Wrong answers to lesson 13 that people really give, and what the check must say to each."""

import torch
import torch.distributed as dist
from torch import nn

from shared.exercises.mistakes import mistake
from shared.sharding.backward import inside_backward
from shared.sharding.flat import partition
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


@mistake("13.2", says="more is alive than a unit's parameters and its gradients")
class ModelShard(right.ModelShard):
    """The last unit's gradients travel while the next unit computes its own."""

    def before_backward(self, units, _):
        self.use(units)


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


# 13.4 hybrid_shard


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


@mistake("13.4", says="`units` is not handed on")
def hybrid_shard(module, mesh, units=None, compute_dtype=None):
    return right.hybrid_shard(module, mesh, None, compute_dtype)
