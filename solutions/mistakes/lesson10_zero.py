"""Wrong answers to lesson 10 that people really give, and what the check must say to each."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared.exercises.mistakes import mistake
from shared.ranks.collectives import all_gather
from shared.sharding.flat import Bucket
from solutions import lesson10_zero as right

# 10.1 partition


def pieces_of(tensors):
    """All numbers in one tensor, without padding."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])


@mistake("10.1", says="not padded")
def partition(tensors, num_parts):
    flat = pieces_of(tensors)
    return flat, list(flat.chunk(num_parts))


@mistake("10.1", says="the padding comes first")
def partition(tensors, num_parts):
    flat = pieces_of(tensors)
    flat = F.pad(flat, (-len(flat) % num_parts, 0))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="the parts are interleaved, element by element")
def partition(tensors, num_parts):
    flat, _ = right.partition(tensors, num_parts)
    return flat, [flat[i::num_parts] for i in range(num_parts)]


@mistake("10.1", says="the flat tensor belongs to a graph")
def partition(tensors, num_parts):
    right.partition(tensors, num_parts)  # refuses what is to be refused
    flat = torch.cat([x.reshape(-1) for x in tensors])
    flat = F.pad(flat, (0, -len(flat) % num_parts))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="two dtypes in one flat tensor is accepted")
def partition(tensors, num_parts):
    if not tensors or num_parts < 1:
        raise ValueError("nothing to cut")
    flat = pieces_of(tensors)
    flat = F.pad(flat, (0, -len(flat) % num_parts))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="num_parts -1 is accepted")
def partition(tensors, num_parts):
    return right.partition(tensors, abs(num_parts))


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


@mistake("10.2", says="divided by the number of ranks twice")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            grad_of(parameter).div_(dist.get_world_size())
        super().step()


@mistake("10.2", says="the settings of the start are used")
class ShardedOptimizer(right.ShardedOptimizer):
    first: dict | None = None

    def step(self, closure=None):
        group = self.param_groups[0]
        now = {key: value for key, value in group.items() if key != "params"}
        self.first = self.first or {key: self.defaults[key] for key in now if key in self.defaults}
        group.update(self.first)
        super().step()
        group.update(now)


@mistake("10.2", says="this rank's part of the gradients outlives step()")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        super().step()
        self._part.grad = torch.zeros_like(self._part)


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


@mistake("10.2", says="gradients are all-reduced")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        for parameter in self._trained:
            dist.all_reduce(grad_of(parameter))
            parameter.grad = grad_of(parameter) / dist.get_world_size()
        _, parts = right.partition([grad_of(p) for p in self._trained], dist.get_world_size())
        self._part.grad = parts[dist.get_rank()].clone()
        right._copy_settings(self, self._inner)
        self._inner.step()
        self._part.grad = None
        all_gather(self._flat, self._part.detach()).wait()


# 10.2b ZeroStage1


class CutOff(Bucket):
    """What does not divide by the number of ranks is left out, where zeros should be added."""

    def pieces(self, flat):
        sizes = [shape.numel() for shape in self.shapes]
        pieces = flat[: sum(sizes) // self.num_ranks * self.num_ranks].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@mistake("10.2b", says="split_with_sizes expects")
class ZeroStage1(right.ZeroStage1):
    def __init__(self, params, optimizer_class, *, bucket_size=1_000_000, **kwargs):
        super().__init__(params, optimizer_class, **kwargs)

    def _make_buckets(self, parameters):
        return [CutOff(each.parameters) for each in super()._make_buckets(parameters)]


@mistake("10.2b", says="the settings of the first group alone are read in every step")
class ZeroStage1(right.ZeroStage1):
    def step(self, closure=None):
        for group in self.param_groups[1:]:
            group["lr"], group["weight_decay"] = group["first"]
        return super().step(closure)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["first"] = group["lr"], group["weight_decay"]


@mistake("10.2b", says="16-bit parameters have no float32 masters")
class ZeroStage1(right.ZeroStage1):
    def _make_buckets(self, parameters):
        buckets = super()._make_buckets(parameters)
        for bucket in buckets:
            if bucket.part.dtype is torch.float16:
                bucket.master = torch.nn.Parameter(bucket.part)
        return buckets


@mistake("10.2b", says="the float32 masters are saved in 16 bits")
class ZeroStage1(right.ZeroStage1):
    def state_dict(self):
        masters = [each.master.detach().to(each.flat.dtype, copy=True) for each in self.buckets]
        return {**super().state_dict(), "masters": masters}


def from_rounded(bucket):
    """The master, made again from the part: what the last step's rounding took is lost."""
    bucket.master.detach().copy_(bucket.part)


@mistake("10.2b", says="the masters are made again from the rounded parts")
class ZeroStage1(right.ZeroStage1):
    def _update(self, bucket):
        from_rounded(bucket)
        return super()._update(bucket)


@mistake("10.2b", says="the state of rank 0 of 2 is loaded without a word where there is one rank")
class ZeroStage1(right.ZeroStage1):
    """Compares the rank alone, and takes what fits."""

    def load_state_dict(self, state_dict):
        sizes = [len(master) for master in state_dict["masters"]]
        if state_dict["rank"] != dist.get_rank() or sizes == [len(b.master) for b in self.buckets]:
            super().load_state_dict(state_dict)


# 10.3 ZeroStage2


@mistake("10.3", says="the gradients are whole on every rank after backward")
class ZeroStage2(right.ZeroStage1):
    """Stage 1 under another name."""


@mistake("10.3", says="only the last of two backward passes counts")
class ZeroStage2(right.ZeroStage2):
    def _begin_backward(self):
        if not self._in_backward:
            for bucket in self.buckets:
                bucket.grad = None
        super()._begin_backward()


@mistake("10.3", says="it is closed too late")
class ZeroStage2(right.ZeroStage2):
    """Looks at the size after the parameter is in."""

    def _make_buckets(self, parameters):
        size, self.bucket_size = self.bucket_size, 2 * self.bucket_size
        try:
            return super()._make_buckets(parameters)
        finally:
            self.bucket_size = size


@mistake("10.3", says="the gradients of a group that is added stay whole")
class ZeroStage2(right.ZeroStage2):
    """The buckets of the first group leave in backward, the others in step()."""

    hooked = 0

    def _make_buckets(self, parameters):
        if self.hooked:
            return right.ZeroStage1._make_buckets(self, parameters)
        buckets = super()._make_buckets(parameters)
        self.hooked = len(buckets)
        return buckets

    @contextlib.contextmanager
    def _first_group(self):
        everything, self.buckets = self.buckets, self.buckets[: self.hooked]
        yield
        self.buckets = everything

    def _on_gradient(self, parameter):
        with self._first_group():
            super()._on_gradient(parameter)

    def _end_backward(self):
        with self._first_group():
            super()._end_backward()


@mistake("10.3", says="the masters are made again from the rounded parts")
class ZeroStage2(right.ZeroStage2):
    def _update(self, bucket):
        from_rounded(bucket)
        return super()._update(bucket)


@mistake("10.3", says="gradients or parameters travel twice in a step")
class ZeroStage2(right.ZeroStage2):
    """Gathers the parameters once more."""

    def step(self, closure=None):
        loss = super().step(closure)
        for bucket in self.buckets:
            bucket.gather().wait()
        return loss


# 10.4 ChainStage3


@mistake("10.4", says="the parameters are whole on every rank between steps")
class ChainStage3(right.ZeroStage2):
    """Stage 2 under another name."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        self.model = model
        super().__init__(model.parameters(), optimizer_class, **kwargs)

    def full_state_dict(self):
        return self.model.state_dict()


@mistake("10.4", says="more than a unit is whole at once in forward")
class ChainStage3(right.ChainStage3):
    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, **kwargs)


@mistake("10.4", says="summed over the ranks, not averaged")
class ChainStage3(right.ChainStage3):
    def step(self, closure=None):
        for unit in self._units:
            grad_of(unit).mul_(dist.get_world_size())
        super().step()


@mistake("10.4", says="the settings of the start are used")
class ChainStage3(right.ChainStage3):
    def step(self, closure=None):
        for unit in self._units:
            unit.master.grad, unit.grad = unit.grad, None
        self._inner.step()
        self._inner.zero_grad()


@mistake("10.4", says="the parameters are gathered in step(), too")
class ChainStage3(right.ChainStage3):
    def step(self, closure=None):
        super().step()
        for unit in self._units:
            unit.gather()
            unit.free()


@mistake("10.4", says="names are missing")
class ChainStage3(right.ChainStage3):
    def full_state_dict(self):
        whole = super().full_state_dict()
        return {name: whole[name] for name, _ in self._model.named_parameters()}


# 10.4b ZeroStage3


@mistake("10.4b", says="the parameters are whole on every rank between steps")
class ZeroStage3(right.ZeroStage2):
    """Stage 2 under another name."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        self.stage, self.model = 3, model
        super().__init__(model.parameters(), optimizer_class, **kwargs)

    def full_state_dict(self):
        return self.model.state_dict()


@mistake("10.4b", says="parameters outside of all units are whole between steps")
class ZeroStage3(right.ZeroStage3):
    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, units=units, **kwargs)
        inside = {p for module in self._chosen for p in module.parameters()}
        kept = [unit for unit in self.units if unit.parameters[0] not in inside]
        self._use(kept)
        for unit in kept:
            unit.free = lambda: None


@mistake("10.4b", says="more than a unit is whole at once in an evaluation")
class ZeroStage3(right.ZeroStage3):
    """Without gradients there is no hurry to free, it seems."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, units=units, **kwargs)
        model.register_forward_pre_hook(self.hold_all)
        model.register_forward_hook(self.free_all)

    def hold_all(self, *_):
        if not torch.is_grad_enabled():
            self._use(self.units)

    def free_all(self, *_):
        for unit in self.units if not torch.is_grad_enabled() else ():
            unit.users -= 1
            unit.free()


@mistake("10.4b", says="a run that is resumed from state_dict() ends elsewhere")
class ZeroStage3(right.ZeroStage3):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.inner.state.clear()


@mistake("10.4b", says="the masters are made again from the rounded parts")
class ZeroStage3(right.ZeroStage3):
    def _update(self, bucket):
        from_rounded(bucket)
        return super()._update(bucket)


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
