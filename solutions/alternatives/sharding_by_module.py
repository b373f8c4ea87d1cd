"""Lesson 13's FullyShard in another style, for alternatives/lesson13_fsdp.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from shared.sharding.backward import at_backward
from shared.sharding.flat_unit import WholeUnit
from shared.sharding.unit_hooks import default_units
from solutions import lesson13_fsdp as right


class ByModule(nn.Module):
    """FullyShard with one object for each module's hooks, and gradients counted down."""

    def __init__(
        self,
        module,
        units=None,
        compute_dtype=None,
        *,
        keep_whole=0,
        reshard_after_forward=True,
        group=None,
    ):
        super().__init__()
        self.again = reshard_after_forward
        chosen = list(default_units(module)) if units is None else list(units)
        parts = set(module.modules())
        for i, each in enumerate(chosen):
            inner = set(each.modules())
            if each not in parts or each is module or each in chosen[:i]:
                raise ValueError(f"unit {i} is not a part of its own")
            if any(other is not each and other in inner for other in chosen):
                raise ValueError(f"unit {i} contains another one")
        self._inner = [module]
        self.compute_dtype = compute_dtype
        self.units, self.home, self.sending, self.gone = [], {}, None, set()
        for each in [*chosen, module]:
            sorts = {}
            for p in each.parameters():
                if p not in self.home:
                    little = p.numel() < keep_whole
                    sorts.setdefault((p.dtype, p.requires_grad, little), []).append(p)
            for (*_, little), own in sorts.items():
                kind = WholeUnit if little else right.FlatUnit
                unit = kind(own, compute_dtype, group)
                self.units.append(unit)
                for p in own:
                    self.home[p] = unit
                    if p.requires_grad:
                        p.register_post_accumulate_grad_hook(self.arrived)
        self.shards = nn.ParameterList([u.shard for u in self.units])
        for b in module.buffers():
            dist.broadcast(b, group_src=0, group=group)
        covered = {m for each in chosen for m in each.modules()}
        for each in chosen:
            self.watch(each, each.parameters())
        outside = [m for m in module.modules() if m not in covered]
        self.watch(module, [p for m in outside for p in m.parameters(recurse=False)])

    def forward(self, *args, **kwargs):
        return self._inner[0](*args, **kwargs)

    def train(self, mode=True):
        self._inner[0].train(mode)
        self.training = mode
        return self

    def acquire(self, unit):
        unit.gather()
        unit.wait()

    def on_shard_gradient(self, unit):
        return unit

    def take(self, units):
        for u in units:
            u.users += 1
            self.acquire(u)

    def passed(self, units):
        for u in units:
            u.users -= 1
            u.pending -= 1
            if u.pending < 1 and u.trained and u not in self.gone:
                self.send(u)
            elif u.users < 1:
                u.free()
            if u.pending < 1:
                self.gone.discard(u)

    def watch(self, module, parameters):
        units = []
        for p in parameters:
            if self.home[p] not in units:
                units.append(self.home[p])

        def before(_, args, kwargs):
            self.take(units)
            if self.compute_dtype:
                args = [self.cast(x) for x in args]
                kwargs = {key: self.cast(x) for key, x in kwargs.items()}
            for u in units:
                u.pending += torch.is_grad_enabled()
            return at_backward(lambda: self.passed(units), (tuple(args), kwargs))

        def backward(_):
            self.take(units)
            self.settle()

        def after(_, __, output):
            for u in units:
                u.users -= 1
                if u.users < 1 and (self.again or not torch.is_grad_enabled()):
                    u.free()
            found = [x for x in tree_leaves(output) if getattr(x, "requires_grad", False)]
            if torch.is_grad_enabled() and found:
                torch.autograd.graph.register_multi_grad_hook(found, backward, mode="any")

        if units:
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)

    def cast(self, x):
        floating = isinstance(x, torch.Tensor) and x.dtype.is_floating_point
        return x.to(self.compute_dtype) if floating else x

    def arrived(self, p):
        unit = self.home[p]
        if not [q for q in unit.parameters if q.grad is None]:
            self.send(unit)

    def send(self, unit):
        self.settle()
        unit.users = 0
        unit.free()
        unit.reduce()
        self.gone.add(unit)
        self.sending = unit

    def settle(self):
        if self.sending is not None:
            self.sending.finish()
            self.on_shard_gradient(self.sending)
        self.sending = None

    def finish_gradient_sync(self):
        for u in self.units:
            if any(p.grad is not None for p in u.parameters):
                self.send(u)
        self.settle()
        for u in self.units:
            u.users = u.pending = 0
            u.free()
        self.gone.clear()

    def full_state_dict(self):
        found = {}
        for u in self.units:
            for p, whole in zip(u.parameters, u.full(u.shard), strict=True):
                found[p] = whole.clone()
        state = {k: v.clone() for k, v in self._inner[0].state_dict().items()}
        for name, p in self._inner[0].named_parameters(remove_duplicate=False):
            state[name] = found[p]
        return state
