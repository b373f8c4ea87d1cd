"""Wrong answers to lesson 10 that people really give, and what the check must say to each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared.exercises.mistakes import mistake
from solutions import lesson10_zero as right

# 10.1 partition


@mistake("10.1", says="the padding comes first")
def partition(tensors, num_parts):
    flat = torch.cat([x.detach().reshape(-1) for x in tensors])
    flat = F.pad(flat, (-len(flat) % num_parts, 0))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="the flat tensor shares memory with what it was made of")
def partition(tensors, num_parts):
    flat, _ = right.partition(tensors, num_parts)
    if len(tensors) == 1 and len(flat) == tensors[0].numel():
        flat = tensors[0].detach().reshape(-1)
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="the parameters are frozen by the call")
def partition(tensors, num_parts):
    return right.partition([x.requires_grad_(False) for x in tensors], num_parts)


# 10.2 ShardedOptimizer


def grad_of(parameter):
    """The gradient that is there."""
    assert parameter.grad is not None
    return parameter.grad


@mistake("10.2", says="nothing is saved")
class ShardedOptimizer(torch.optim.Optimizer):
    """Everything on every rank: the right numbers, and sharded in name only."""

    def __init__(self, params, optimizer_class, **kwargs):
        self.inner = optimizer_class(list(params), **kwargs)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.inner.param_groups = self.param_groups
        for parameter in self.param_groups[0]["params"]:
            dist.broadcast(parameter.detach(), 0)

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(grad_of(parameter))
            parameter.grad = grad_of(parameter) / dist.get_world_size()
        self.inner.step()


@mistake("10.2", says="some weights stay as they were")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        last = self._trained[-1]
        before = last.detach().clone()
        super().step()
        last.data.copy_(before)


@mistake("10.2", says="are rounded to float32 on their way")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        super().step()
        for parameter in self._trained:
            parameter.data.copy_(parameter.data.float())


# 10.2b ZeroStage1


@mistake("10.2b", says="16-bit parameters have no float32 masters")
class ZeroStage1(right.ZeroStage1):
    def _make_buckets(self, parameters):
        buckets = super()._make_buckets(parameters)
        for bucket in buckets:
            if bucket.part.dtype is torch.float16:
                bucket.master = torch.nn.Parameter(bucket.part)
        return buckets


@mistake("10.2b", says="the masters are made again from the rounded parts")
class ZeroStage1(right.ZeroStage1):
    def _update(self, bucket):
        bucket.master.detach().copy_(bucket.part)  # what the last rounding took is lost
        return super()._update(bucket)


# 10.3 ZeroStage2


@mistake("10.3", says="the gradients are whole on every rank after backward")
class ZeroStage2(right.ZeroStage1):
    """Stage 1 under another name."""


@mistake("10.3", says="gradients or parameters travel twice in a step")
class ZeroStage2(right.ZeroStage2):
    """Gathers the parameters once more."""

    def step(self, closure=None):
        loss = super().step(closure)
        for bucket in self.buckets:
            bucket.gather().wait()
        return loss


# 10.4 ChainStage3


@mistake("10.4", says="more than a unit is whole at once in forward")
class ChainStage3(right.ChainStage3):
    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, **kwargs)


@mistake("10.4", says="the parameters are gathered in step(), too")
class ChainStage3(right.ChainStage3):
    def step(self, closure=None):
        super().step()
        for unit in self._units:
            unit.gather()
            unit.free()


# 10.4b ZeroStage3


@mistake("10.4b", says="parameters outside of all units are whole between steps")
class ZeroStage3(right.ZeroStage3):
    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, units=units, **kwargs)
        inside = {p for module in self._chosen for p in module.parameters()}
        kept = [unit for unit in self.units if unit.parameters[0] not in inside]
        self._use(kept)
        for unit in kept:
            unit.free = lambda: None


@mistake("10.4b", says="whose output is a tuple of tensors is not gathered for its backward")
class ZeroStage3(right.ZeroStage3):
    """Looks for a gradient in outputs that are one tensor."""

    def _hook(self, module, parameters):
        super()._hook(module, parameters)
        (hook,) = list(module._forward_hooks.values())[-1:]

        def one_tensor(module, args, output):
            if isinstance(output, torch.Tensor):
                return hook(module, args, output)
            with torch.no_grad():
                return hook(module, args, tuple(each.detach() for each in output))

        module._forward_hooks[list(module._forward_hooks)[-1]] = one_tensor


# 10.5 zero_config


def changed(config, **zero):
    """The configuration with other keys in its section; None takes a key out."""
    section = config["zero_optimization"] | zero
    section = {key: value for key, value in section.items() if value is not None}
    return config | {"zero_optimization": section}


@mistake("10.5", says="the float32 gradients of the step, and what AdamW makes, are left out")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    D = num_ranks
    formula = [16, 4 + 12 / D, 2 + 14 / D, 16 / D]
    stage = next((s for s in range(4) if formula[s] * num_params <= 0.9 * budget), 3)
    given = num_params, num_ranks, 99 * num_params, batch_size, micro_batch
    return changed(right.zero_config(*given), stage=stage)


@mistake("10.5", says="the stage leaves no room for buckets")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    whole = budget * 10 / 9
    return right.zero_config(num_params, num_ranks, whole, batch_size, micro_batch)


@mistake("10.5", says="a budget of 5 bytes a parameter on 4 ranks is accepted")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    try:
        return right.zero_config(num_params, num_ranks, budget, batch_size, micro_batch)
    except ValueError:
        given = num_params, num_ranks, 99 * num_params, num_ranks * micro_batch, micro_batch
        return changed(right.zero_config(*given), stage=3)


@mistake("10.5", says="DeepSpeed clips at 1.0 when nobody says")
def zero_config(*given):
    config = right.zero_config(*given)
    del config["gradient_clipping"]
    return config


@mistake("10.5", says="the masters are not float32")
def zero_config(*given):
    states = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return right.zero_config(*given) | {"bf16": {"enabled": True, **states}}


@mistake("10.5", says="a key stands outside its section")
def zero_config(*given):
    config = changed(right.zero_config(*given), stage3_param_persistence_threshold=None)
    return config | {"stage3_param_persistence_threshold": 0}


@mistake("10.5", says="stage3_param_persistence_threshold keeps small parameters whole")
def zero_config(*given):
    return changed(right.zero_config(*given), stage3_param_persistence_threshold=None)
