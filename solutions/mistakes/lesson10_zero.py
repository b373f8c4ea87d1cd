"""Wrong answers to lesson 10 that people really give, and what the check must say to each."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared.exercises.mistakes import mistake
from shared.ranks.collectives import all_gather, reduce_scatter
from shared.sharding import stage3
from shared.sharding.flat import Bucket
from shared.sharding.flat_unit import ZeroUnit
from solutions import lesson10_zero as right

# 10.1 partition


def pieces_of(tensors):
    """All numbers in one tensor, without padding."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])


@mistake("10.1", says="not padded")
def partition(tensors, num_parts):
    flat = pieces_of(tensors)
    return flat, list(flat.chunk(num_parts))


@mistake("10.1", says="a whole part is added as padding")
def partition(tensors, num_parts):
    flat, _ = right.partition(tensors, num_parts)
    flat = F.pad(flat, (0, num_parts))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="the padding comes first")
def partition(tensors, num_parts):
    flat = pieces_of(tensors)
    flat = F.pad(flat, (-len(flat) % num_parts, 0))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="every tensor is padded by itself")
def partition(tensors, num_parts):
    padded = [right.partition([each], num_parts)[0] for each in tensors]
    return right.partition(padded, num_parts)


@mistake("10.1", says="the parts take turns, element by element")
def partition(tensors, num_parts):
    flat, _ = right.partition(tensors, num_parts)
    return flat, [flat[i::num_parts] for i in range(num_parts)]


@mistake("10.1", says="the flat tensor has another dtype")
def partition(tensors, num_parts):
    return right.partition([x.float() for x in tensors], num_parts)


@mistake("10.1", says="the parts are copies")
def partition(tensors, num_parts):
    flat, parts = right.partition(tensors, num_parts)
    return flat, [part.clone() for part in parts]


@mistake("10.1", says="the flat tensor belongs to a graph")
def partition(tensors, num_parts):
    right.partition(tensors, num_parts)  # refuses what is to be refused
    flat = torch.cat([x.reshape(-1) for x in tensors])
    flat = F.pad(flat, (0, -len(flat) % num_parts))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="shares memory with what it was made of")
def partition(tensors, num_parts):
    if len(tensors) == 1 and tensors[0].numel() % num_parts == 0:
        flat = tensors[0].detach().reshape(-1)
        return flat, list(flat.view(num_parts, -1))
    return right.partition(tensors, num_parts)


@mistake("10.1", says="two dtypes in one flat tensor is accepted")
def partition(tensors, num_parts):
    if not tensors or num_parts < 1:
        raise ValueError("nothing to cut")
    flat = pieces_of(tensors)
    flat = F.pad(flat, (0, -len(flat) % num_parts))
    return flat, list(flat.view(num_parts, -1))


@mistake("10.1", says="the parameters are frozen by the call")
def partition(tensors, num_parts):
    for each in tensors:
        each.requires_grad_(False)
    return right.partition(tensors, num_parts)


@mistake("10.1", says="a last tensor of another dtype is accepted")
def partition(tensors, num_parts):
    flat, parts = right.partition(tensors[:2], num_parts)
    return (
        (flat, parts)
        if len(tensors) < 3
        else right.partition([x.to(flat.dtype) for x in tensors], num_parts)
    )


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


class Scaled(right.ShardedOptimizer):
    """Multiplies each gradient by `factor()` before it is averaged."""

    def factor(self):
        return 1.0

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            grad_of(parameter).mul_(self.factor())
        super().step()


@mistake("10.2", says="summed over the ranks, not averaged")
class ShardedOptimizer(Scaled):
    def factor(self):
        return dist.get_world_size()


@mistake("10.2", says="divided by the number of ranks twice")
class ShardedOptimizer(Scaled):
    def factor(self):
        return 1 / dist.get_world_size()


@mistake("10.2", says="each rank updates its part by its own gradients")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        n, rank = dist.get_world_size(), dist.get_rank()
        flat, parts = right.partition([grad_of(p) for p in self._trained], n)
        for i, part in enumerate(parts):
            part.mul_(n * (i == rank))
        for parameter, piece in zip(self._trained, self._pieces(flat), strict=True):
            grad_of(parameter).copy_(piece)
        super().step()


@mistake("10.2", says="the ranks start with different weights")
class ShardedOptimizer(right.ShardedOptimizer):
    def __init__(self, params, optimizer_class, **kwargs):
        params = list(params)
        own, _ = right.partition(params, dist.get_world_size())
        super().__init__(params, optimizer_class, **kwargs)
        self._flat.copy_(own)


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


@mistake("10.2", says="the updates are AdamW's, whatever optimizer_class is")
class ShardedOptimizer(right.ShardedOptimizer):
    def __init__(self, params, optimizer_class, **kwargs):
        super().__init__(params, torch.optim.AdamW, **kwargs)


@mistake("10.2", says="the gradients of earlier steps are added")
class ShardedOptimizer(right.ShardedOptimizer):
    """What a step has averaged is kept for the next one."""

    def step(self, closure=None):
        past = getattr(self, "past", {})
        for parameter in self._trained:
            grad_of(parameter).add_(past.get(parameter, 0))
        self.past = {parameter: grad_of(parameter).clone() for parameter in self._trained}
        super().step()


@mistake("10.2", says="what came before zero_grad() counts in all later steps")
class ShardedOptimizer(right.ShardedOptimizer):
    """Drops the part's gradient, and leaves those of the parameters."""

    def zero_grad(self, set_to_none=True):
        self._part.grad = None


@mistake("10.2", says="zero_grad(set_to_none=False) leaves zeros behind")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        super().step()
        self.zero_grad()

    def zero_grad(self, set_to_none=True):
        torch.optim.Optimizer.zero_grad(self, set_to_none)


@mistake("10.2", says="this rank's part of the gradients outlives step()")
class ShardedOptimizer(right.ShardedOptimizer):
    def step(self, closure=None):
        super().step()
        self._part.grad = torch.zeros_like(self._part)


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


@mistake("10.2", says="parameters travel by broadcast")
class ShardedOptimizer(right.ShardedOptimizer):
    @torch.no_grad()
    def step(self, closure=None):
        whole = torch.zeros_like(self._flat)
        for parameter, place in zip(self._trained, self._pieces(whole), strict=True):
            if parameter.grad is not None:
                torch.mul(parameter.grad, 1 / dist.get_world_size(), out=place)
        self._part.grad = torch.empty_like(self._part)
        reduce_scatter(self._part.grad, whole).wait()
        settings = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        self._inner.param_groups[0].update(settings)
        self._inner.step()
        self._part.grad = None
        for rank, each in enumerate(self._flat.chunk(dist.get_world_size())):
            dist.broadcast(each, rank)


@mistake("10.2", says="a second copy of the weights is kept")
class ShardedOptimizer(right.ShardedOptimizer):
    def __init__(self, params, optimizer_class, **kwargs):
        params = list(params)
        self.before = [parameter.data for parameter in params]
        super().__init__(params, optimizer_class, **kwargs)


# 10.2b ZeroStage1


def forget(bucket):
    """Drop a bucket's whole gradients."""
    bucket.filling, bucket.missing = None, set(bucket.parameters)
    bucket._places.clear()


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


@mistake("10.2b", says="a frozen parameter is moved")
class ZeroStage1(right.ZeroStage1):
    def add_param_group(self, param_group):
        group = dict(param_group, params=list(param_group["params"]))
        for parameter in group["params"]:
            parameter.requires_grad_(True)
        super().add_param_group(group)


@mistake("10.2b", says="only the learning rate is read from param_groups")
class ZeroStage1(right.ZeroStage1):
    def step(self, closure=None):
        for group in self.param_groups:
            group["weight_decay"] = group.setdefault("decay", group["weight_decay"])
        return super().step(closure)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["decay"] = group["weight_decay"]


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


@mistake("10.2b", says="the settings of the first group are used for all")
class ZeroStage1(right.ZeroStage1):
    def add_param_group(self, param_group):
        group = {"params": param_group["params"]}
        super().add_param_group(group)


@mistake("10.2b", says="only the last of two backward passes counts")
class ZeroStage1(right.ZeroStage1):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, p=parameter: setattr(p, "grad", None))


@mistake("10.2b", says="a parameter without a gradient is left out")
class ZeroStage1(right.ZeroStage1):
    def __init__(self, params, optimizer_class, *, bucket_size=1_000_000, **kwargs):
        super().__init__(params, optimizer_class, bucket_size=1, **kwargs)

    def reduce_gradients(self):
        for bucket in self.buckets:
            if bucket.parameters[0].grad is None:
                bucket.grad = torch.zeros_like(bucket.part)
            else:
                bucket.reduce()
                bucket.finish()


@mistake("10.2b", says="16-bit parameters have no float32 masters")
class ZeroStage1(right.ZeroStage1):
    def _make_buckets(self, parameters):
        buckets = super()._make_buckets(parameters)
        for bucket in buckets:
            if bucket.part.dtype is torch.float16:
                bucket.master = torch.nn.Parameter(bucket.part)
        return buckets


@mistake("10.2b", says="gradients are kept after zero_grad()")
class ZeroStage1(right.ZeroStage1):
    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        for bucket in self.buckets if not set_to_none else ():
            for parameter in bucket.parameters:
                parameter.grad = torch.zeros_like(parameter)


@mistake("10.2b", says="a run that is resumed from state_dict() ends elsewhere")
class ZeroStage1(right.ZeroStage1):
    """The moments are not loaded, the masters are."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.inner.state.clear()


@mistake("10.2b", says="what is float32 comes back rounded")
class ZeroStage1(right.ZeroStage1):
    def load_state_dict(self, state_dict):
        before = [bucket.part.float() for bucket in self.buckets]
        super().load_state_dict(state_dict)
        for bucket, rounded in zip(self.buckets, before, strict=True):
            bucket.master.data.copy_(rounded)


@mistake("10.2b", says="the float32 masters are saved in 16 bits")
class ZeroStage1(right.ZeroStage1):
    def state_dict(self):
        masters = [each.master.detach().to(each.flat.dtype, copy=True) for each in self.buckets]
        return {**super().state_dict(), "masters": masters}


@mistake("10.2b", says="state_dict() has views")
class ZeroStage1(right.ZeroStage1):
    def state_dict(self):
        return super().state_dict() | {"masters": [b.master.detach() for b in self.buckets]}


@mistake("10.2b", says="state_dict() has more than this rank's part")
class ZeroStage1(right.ZeroStage1):
    def state_dict(self):
        whole = [torch.empty(bucket.flat.shape) for bucket in self.buckets]
        for bucket, states in zip(self.buckets, whole, strict=True):
            right_part = bucket.master.detach().float()
            all_gather(states, right_part).wait()
        return super().state_dict() | {"all masters": whole, "all moments": [*whole, *whole]}


@mistake("10.2b", says="the closure is not called")
class ZeroStage1(right.ZeroStage1):
    def step(self, closure=None):
        return super().step()


@mistake("10.2b", says="the closure is called without gradients switched on")
class ZeroStage1(right.ZeroStage1):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


@mistake("10.2b", says="a group that joins keeps each rank's own numbers")
class ZeroStage1(right.ZeroStage1):
    def add_param_group(self, param_group):
        group = dict(param_group, params=list(param_group["params"]))
        own = [p.detach().clone() for p in group["params"]]
        joins = len(self.param_groups) == 2
        super().add_param_group(group)
        for parameter, before in zip(group["params"], own, strict=True):
            if joins:
                parameter.data.copy_(before)


@mistake("10.2b", says="another rank's state is loaded without a word")
class ZeroStage1(right.ZeroStage1):
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "rank": dist.get_rank()})


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


@mistake("10.3", says="nothing is saved")
class ZeroStage2(right.ZeroStage2):
    def _make_buckets(self, parameters):
        buckets = right.ZeroStage1._make_buckets(self, parameters)
        self.copies = [torch.zeros(bucket.flat.numel() * 3) for bucket in buckets]
        return buckets


@mistake("10.3", says="whole gradients are alive beyond a bucket")
class ZeroStage2(right.ZeroStage2):
    """All is sent at the end of backward, which saves nothing at the worst moment."""

    def _on_gradient(self, parameter):
        self._begin_backward()


@mistake("10.3", says="only the last of two backward passes counts")
class ZeroStage2(right.ZeroStage2):
    def _begin_backward(self):
        if not self._in_backward:
            for bucket in self.buckets:
                bucket.grad = None
        super()._begin_backward()


class MeanOfPasses(Bucket):
    def finish(self):
        more = self._reducing is not None and self.grad is not None
        super().finish()
        if more:
            assert self.grad is not None
            self.grad /= 2


@mistake("10.3", says="the mean over the backward passes is taken, not their sum")
class ZeroStage2(right.ZeroStage2):
    def _make_buckets(self, parameters):
        return [MeanOfPasses(each.parameters) for each in super()._make_buckets(parameters)]


@mistake("10.3", says="a gradient stays in .grad when it was sent")
class ZeroStage2(right.ZeroStage2):
    def _on_gradient(self, parameter):
        kept = parameter.grad.clone()
        super()._on_gradient(parameter)
        parameter.grad = kept


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


@mistake("10.3", says="every gradient travels alone")
class ZeroStage2(right.ZeroStage2):
    def __init__(self, params, optimizer_class, *, bucket_size=1_000_000, **kwargs):
        super().__init__(params, optimizer_class, bucket_size=1, **kwargs)


@mistake("10.3", says="summed over the ranks, not averaged")
class ZeroStage2(right.ZeroStage2):
    def reduce_gradients(self):
        super().reduce_gradients()
        for bucket in self.buckets:
            assert bucket.grad is not None
            bucket.grad *= dist.get_world_size()


@mistake("10.3", says="the updates are AdamW's, whatever optimizer_class is")
class ZeroStage2(right.ZeroStage2):
    def __init__(self, params, optimizer_class, **kwargs):
        super().__init__(params, torch.optim.AdamW, **kwargs)


@mistake("10.3", says="what came before zero_grad() counts in this step")
class ZeroStage2(right.ZeroStage2):
    """The averaged parts go in step(), and zero_grad() knows of .grad alone."""

    def zero_grad(self, set_to_none=True):
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def step(self, closure=None):
        loss = super().step(closure)
        super().zero_grad()
        return loss


@mistake("10.3", says="what came before zero_grad() counts in all later steps")
class ZeroStage2(right.ZeroStage2):
    def zero_grad(self, set_to_none=True):
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None


@mistake("10.3", says="a parameter without a gradient is left out")
class ZeroStage2(right.ZeroStage2):
    """Buckets leave as they fill, in another order on a rank that does not use a layer."""

    def _on_gradient(self, parameter):
        self._begin_backward()
        for bucket in self.buckets:
            if parameter in bucket.missing:
                bucket.collect(parameter)
                if not bucket.missing:
                    bucket.reduce()
                    bucket.finish()

    def _end_backward(self):
        for bucket in self.buckets:
            if bucket.filling is not None:
                bucket.reduce()
                bucket.finish()
        self._in_backward = False


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


class Dropped(ZeroUnit):
    """Drops its flat tensor, and allocates another one to gather."""

    size = 0

    @property
    def is_whole(self):
        return self.flat.numel() > 0

    def gather(self):
        if not self.is_whole:
            self.flat = self.part.new_empty(self.size)
            self._gathering = all_gather(self.flat, self.part, self.group)
            self.point_at(self.flat)

    def free(self):
        self.wait()
        self.size = self.flat.numel() or self.size
        self.flat = self.part.new_empty(0)
        for parameter in self.parameters:
            parameter.data = self.flat

    def collect(self, parameter):
        flat, self.flat = self.flat, self.part.new_empty(self.size)
        super().collect(parameter)
        self.flat = flat

    def full(self, part):
        flat = part.new_empty(self.size)
        all_gather(flat, part.detach(), self.group).wait()
        return self.pieces(flat)


@mistake("10.4", says="the parameters are whole on every rank between steps")
class ChainStage3(right.ZeroStage2):
    """Stage 2 under another name."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        self.model = model
        super().__init__(model.parameters(), optimizer_class, **kwargs)

    def full_state_dict(self):
        return self.model.state_dict()


@mistake("10.4", says="parameters stay whole after the forward of their unit")
class ChainStage3(right.ChainStage3):
    def _hook(self, module, unit):
        super()._hook(module, unit)
        module.register_forward_hook(lambda *_: self.keep(unit))

    def keep(self, unit):
        unit.gather()
        unit.wait()


@mistake("10.4", says="more than a unit is whole at once in forward")
class ChainStage3(right.ChainStage3):
    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, units=[model], **kwargs)


@mistake("10.4", says="more than a unit is whole at once in backward")
class ChainStage3(right.ChainStage3):
    began = False

    def _hook(self, module, unit):
        super()._hook(module, unit)
        module.register_forward_hook(self.gather_all)

    def gather_all(self, module, args, output):
        def gather(_):
            for unit in () if self.began else self._units:
                unit.gather()
                unit.wait()
            self.began = True

        if output.requires_grad:
            output.register_hook(gather)

    def step(self, closure=None):
        super().step()
        self.began = False


@mistake("10.4", says="the views that autograd saved keep a freed unit's memory")
class ChainStage3(right.ChainStage3):
    def __init__(self, *args, **kwargs):
        kept, right.ZeroUnit = right.ZeroUnit, Dropped  # ty: ignore[invalid-assignment]
        super().__init__(*args, **kwargs)
        right.ZeroUnit = kept


@mistake("10.4", says="summed over the ranks, not averaged")
class ChainStage3(right.ChainStage3):
    def step(self, closure=None):
        for unit in self._units:
            grad_of(unit).mul_(dist.get_world_size())
        super().step()


@mistake("10.4", says="the updates are AdamW's, whatever optimizer_class is")
class ChainStage3(right.ChainStage3):
    def __init__(self, model, optimizer_class, **kwargs):
        super().__init__(model, torch.optim.AdamW, **kwargs)


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


@mistake("10.4", says="full_state_dict() has parameters without their numbers")
class ChainStage3(right.ChainStage3):
    def full_state_dict(self):
        return self._model.state_dict()


@mistake("10.4", says="names are missing")
class ChainStage3(right.ChainStage3):
    def full_state_dict(self):
        whole = super().full_state_dict()
        return {name: whole[name] for name, _ in self._model.named_parameters()}


@mistake("10.4", says="gives rank 0 alone its tensors")
class ChainStage3(right.ChainStage3):
    def full_state_dict(self):
        whole = super().full_state_dict()
        return whole if dist.get_rank() == 0 else {}


@mistake("10.4", says="parameters stay whole after full_state_dict")
class ChainStage3(right.ChainStage3):
    def full_state_dict(self):
        for unit in self._units:
            unit.gather()
            unit.wait()
        return {name: x.detach().clone() for name, x in self._model.state_dict().items()}


@mistake("10.4", says="parameters stay whole after an evaluation")
class ChainStage3(right.ChainStage3):
    """Freed where backward begins, which never comes."""

    def _hook(self, module, unit):
        super()._hook(module, unit)
        module.register_forward_hook(lambda *_: self.keep(unit))

    def keep(self, unit):
        if not torch.is_grad_enabled():
            unit.gather()
            unit.wait()


# 10.4b ZeroStage3


@mistake("10.4b", says="the parameters are whole on every rank between steps")
class ZeroStage3(right.ZeroStage2):
    """Stage 2 under another name."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        self.stage, self.model = 3, model
        super().__init__(model.parameters(), optimizer_class, **kwargs)

    def full_state_dict(self):
        return self.model.state_dict()


@mistake("10.4b", says="`units` says which modules are gathered together")
class ZeroStage3(right.ZeroStage3):
    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, **kwargs)


class Whole(right.ZeroStage3):
    """Never frees the units that `kept` names."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        super().__init__(model, optimizer_class, units=units, **kwargs)
        self.inside = {p for module in self._chosen for p in module.parameters()}
        self._use(self.kept())
        for unit in self.kept():
            unit.free = lambda: None

    def kept(self):
        return []


@mistake("10.4b", says="parameters outside of all units are whole between steps")
class ZeroStage3(Whole):
    def kept(self):
        return [unit for unit in self.units if unit.parameters[0] not in self.inside]


@mistake("10.4b", says="frozen parameters are whole between steps")
class ZeroStage3(Whole):
    def kept(self):
        return self.frozen


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


@mistake("10.4b", says="another rank's state is loaded without a word")
class ZeroStage3(right.ZeroStage3):
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "rank": dist.get_rank()})


@mistake("10.4b", says="a run that is resumed from state_dict() ends elsewhere")
class ZeroStage3(right.ZeroStage3):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.inner.state.clear()


@mistake("10.4b", says="the parameters are not those of the state that was loaded")
class ZeroStage3(right.ZeroStage3):
    """Loads the masters, and not the parts that the next forward gathers."""

    def load_state_dict(self, state_dict):
        parts = [bucket.part.clone() for bucket in self.buckets]
        super().load_state_dict(state_dict)
        for bucket, part in zip(self.buckets, parts, strict=True):
            bucket.part.copy_(part)


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


class KeepsViews(ZeroUnit):
    """Empties the storage, and leaves the parameters what they are: views of it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gather()
        self.free()

    def free(self):
        self.wait()
        self.flat.untyped_storage().resize_(0)


@mistake("10.4b", says="A ModuleList is never called")
class ZeroStage3(right.ZeroStage3):
    """Takes the model's children as they are for its units."""

    def _make_buckets(self, parameters):
        if list(self._chosen) == list(stage3.default_units(self.model)):
            self._chosen = list(self.model.children())
        kept = stage3.ZeroUnit
        stage3.ZeroUnit = KeepsViews  # ty: ignore[invalid-assignment]
        try:
            return super()._make_buckets(parameters)
        finally:
            stage3.ZeroUnit = kept


# 10.5 zero_config


def changed(config, **zero):
    """The configuration with other keys in its section; None takes a key out."""
    section = config["zero_optimization"] | zero
    section = {key: value for key, value in section.items() if value is not None}
    return config | {"zero_optimization": section}


@mistake("10.5", says="the float32 gradients of the step are left out")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    D = num_ranks
    formula = [16, 4 + 12 / D, 2 + 14 / D, 16 / D]
    stage = next((s for s in range(4) if formula[s] * num_params <= 0.9 * budget), 3)
    given = num_params, num_ranks, 99 * num_params, batch_size, micro_batch
    return changed(right.zero_config(*given), stage=stage)


@mistake("10.5", says="the stage leaves no room for buckets")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    return right.zero_config(num_params, num_ranks, int(budget / 0.9), batch_size, micro_batch)


@mistake("10.5", says="always stage 3")
def zero_config(*given):
    return changed(right.zero_config(*given), stage=3)


@mistake("10.5", says="the stage is too low for the budget")
def zero_config(*given):
    config = right.zero_config(*given)
    return changed(config, stage=min(config["zero_optimization"]["stage"], 2))


@mistake("10.5", says="a budget of 5 bytes a parameter on 4 ranks is accepted")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    try:
        return right.zero_config(num_params, num_ranks, budget, batch_size, micro_batch)
    except ValueError:
        given = num_params, num_ranks, 99 * num_params, num_ranks * micro_batch, micro_batch
        return changed(right.zero_config(*given), stage=3)


@mistake("10.5", says="16.65 for states where the least (stage 1) is 18, is accepted")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    """Stage 1 without the other of its two worst moments."""
    if 0.9 * budget < 20 * num_params and (4 + 12 / num_ranks) * num_params <= 0.9 * budget:
        given = num_params, num_ranks, 99 * num_params, batch_size, micro_batch
        return changed(right.zero_config(*given), stage=1)
    return right.zero_config(num_params, num_ranks, budget, batch_size, micro_batch)


@mistake("10.5", says="a batch of 12 in micro-batches of 2 on 4 ranks is accepted")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    """Divides by each of the two, and not by their product."""
    if batch_size % num_ranks or batch_size % micro_batch:
        raise ValueError(f"{batch_size} rows")
    rows = max(1, batch_size // (micro_batch * num_ranks)) * micro_batch * num_ranks
    return right.zero_config(num_params, num_ranks, budget, rows, micro_batch)


@mistake("10.5", says="the batch sizes do not multiply")
def zero_config(*given):
    return right.zero_config(*given) | {"gradient_accumulation_steps": given[1]}


@mistake("10.5", says="DeepSpeed clips at 1.0 when nobody says")
def zero_config(*given):
    config = right.zero_config(*given)
    del config["gradient_clipping"]
    return config


@mistake("10.5", says="the weights stay in float32")
def zero_config(*given):
    config = right.zero_config(*given)
    del config["bf16"]
    return config


@mistake("10.5", says="fp16 is switched on")
def zero_config(*given):
    config = right.zero_config(*given)
    del config["bf16"]
    return config | {"fp16": {"enabled": True}}


@mistake("10.5", says="an odd allgather_bucket_size")
def zero_config(*given):
    return changed(right.zero_config(*given), allgather_bucket_size=given[0] // 50)


@mistake("10.5", says="the masters are not float32")
def zero_config(*given):
    states = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return right.zero_config(*given) | {"bf16": {"enabled": True, **states}}


@mistake("10.5", says="states are offloaded")
def zero_config(*given):
    off = {"offload_optimizer": {"device": "cpu"}, "zero_force_ds_cpu_optimizer": False}
    return changed(right.zero_config(*given), **off)


@mistake("10.5", says="a bucket has more than num_params // 50 elements")
def zero_config(*given):
    fixed = 55_296 // 50  # right for the model in the lesson
    return changed(right.zero_config(*given), reduce_bucket_size=fixed)


@mistake("10.5", says="an optimizer beside the caller's")
def zero_config(*given):
    section = {"type": "AdamW", "params": {"lr": 1e-3}}
    return right.zero_config(*given) | {"optimizer": section}


@mistake("10.5", says="a key stands outside its section")
def zero_config(*given):
    config = changed(right.zero_config(*given), stage3_param_persistence_threshold=None)
    return config | {"stage3_param_persistence_threshold": 0}


@mistake("10.5", says="stage3_param_persistence_threshold keeps small parameters whole")
def zero_config(*given):
    return changed(right.zero_config(*given), stage3_param_persistence_threshold=None)


@mistake("10.5", says="every parameter is whole after forward")
def zero_config(*given):
    return changed(right.zero_config(*given), stage3_max_reuse_distance=None)


@mistake("10.5", says="the bytes are rounded down before they are compared")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    D = num_ranks
    worst = [20, max(4 + 12 // D, 2 + 16 // D), 2 + 16 // D, 20 // D]
    stage = next((s for s in range(4) if worst[s] * num_params <= 0.9 * budget), None)
    given = num_params, num_ranks, 99 * num_params, batch_size, micro_batch
    return changed(
        right.zero_config(num_params, num_ranks, budget, batch_size, micro_batch)
        if stage is None
        else right.zero_config(*given),
        stage=stage,
    )


@mistake("10.5", says="a stage that takes exactly nine tenths of the budget is refused")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    return right.zero_config(num_params, num_ranks, budget - 1, batch_size, micro_batch)


@mistake("10.5", says="stage 1 is counted by its optimizer's step alone")
def zero_config(num_params, num_ranks, budget, batch_size, micro_batch):
    config = right.zero_config(num_params, num_ranks, budget, batch_size, micro_batch)
    return changed(config, stage=1) if config["zero_optimization"]["stage"] == 2 else config
