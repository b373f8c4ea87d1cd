"""Lesson 13's ModelShard in another style, and its FullyShard made of it: for lesson13_fsdp.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from shared.sharding.backward import at_backward
from shared.sharding.flat_unit import WholeUnit
from shared.sharding.unit_hooks import default_units
from solutions import lesson13_fsdp as right


def tensors_in(output):
    """The tensors of nested tuples, lists and dicts that need a gradient."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    inner = output.values() if isinstance(output, dict) else output
    return [x for each in inner for x in tensors_in(each)] if hasattr(inner, "__iter__") else []


class Watched(nn.Module):
    """What is asked for and no more: closures for each module, a list of who holds a unit."""

    def __init__(self, module, units=None, *, group=None):
        super().__init__()
        chosen = list(units) if units is not None else list(default_units(module))
        names = {m: n for n, m in module.named_modules()}
        names[module] = None
        for place, each in enumerate(chosen):
            if names.get(each) is None:
                raise ValueError(f"the unit {place} is not inside of the module")
        paths = [f"{names[each]}." for each in chosen]
        for place, path in enumerate(paths):
            if any(p.startswith(path) for i, p in enumerate(paths) if i != place):
                raise ValueError(f"{path} is there twice, or has another unit in it")
        self.inner, self.of, self.holders, self.late = (module,), {}, {}, []
        for each in [*chosen, module]:
            new = [p for p in each.parameters() if p not in self.of]
            if new:
                unit = right.FlatUnit(new, None, group)
                self.holders[unit] = []
                for p in new:
                    self.of[p] = unit
                    p.register_post_accumulate_grad_hook(lambda p: self.grown(self.of[p]))
        self.parts = nn.ParameterList([unit.shard for unit in self.holders])
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        taken = {m for each in chosen for m in each.modules()}
        outside = [m for m in module.modules() if m not in taken]
        for each in chosen:
            self.watch(each, {self.of[p] for p in each.parameters()})
        self.watch(module, {self.of[p] for m in outside for p in m.parameters(recurse=False)})

    def watch(self, module, units):
        units = [unit for unit in self.holders if unit in units]  # in one order on every rank

        def fetch(*_):
            for unit in units:
                self.holders[unit].append(module)
                unit.gather()
            for unit in units:
                unit.wait()

        def leave(_, __, output):
            for unit in units:
                self.holders[unit].remove(module)
                if not self.holders[unit]:
                    unit.free()
            state = {"begun": False}

            def begin(_):
                if not state["begun"]:
                    fetch()
                    self.settle()
                state["begun"] = True

            for tensor in tensors_in(output):
                tensor.register_hook(begin)

        module.register_forward_pre_hook(fetch)
        module.register_forward_hook(leave)

    def grown(self, unit):
        if None not in [p.grad for p in unit.parameters]:
            self.settle()
            self.holders[unit].clear()
            unit.free()
            unit.reduce()
            self.late.append(unit)

    def settle(self):
        for unit in self.late:
            unit.finish()
        self.late.clear()

    finish_gradient_sync = settle

    def forward(self, *args, **kwargs):
        return self.inner[0](*args, **kwargs)

    def train(self, mode=True):
        self.inner[0].train(mode)
        return super().train(mode)

    def full_state_dict(self):
        pieces = {}
        for unit in self.holders:
            for p, piece in zip(unit.parameters, unit.full(unit.shard), strict=True):
                pieces[p] = piece
        names = {n: pieces[p] for n, p in self.inner[0].named_parameters(remove_duplicate=False)}
        kept = self.inner[0].state_dict()
        return {n: names.get(n, x).detach().clone() for n, x in kept.items()}


class AnyModel(right.FullyShard):
    """What does more than is asked for does that as well."""


class FromModel(right.ModelShard):
    """FullyShard as the moments of ModelShard that it changes."""

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
        self.compute_dtype, self.small, self.again = (
            compute_dtype,
            keep_whole,
            reshard_after_forward,
        )
        self.left = set()
        super().__init__(module, units, group=group)

    def kind(self, parameter):
        return parameter.dtype, parameter.requires_grad, parameter.numel() < self.small

    def make_unit(self, parameters):
        small = parameters[0].numel() < self.small
        make = WholeUnit if small else right.FlatUnit
        return make(parameters, self.compute_dtype, self.group)

    def acquire(self, unit):
        unit.gather()
        unit.wait()

    def use(self, units):
        for unit in units:
            unit.users += 1
            self.acquire(unit)

    def before_forward(self, units, inputs):
        self.use(units)
        for unit in units:
            unit.pending += torch.is_grad_enabled()
        if self.compute_dtype is not None:
            inputs = tree_map_only(torch.Tensor, self.cast, inputs)
        return at_backward(lambda: self.passed(units), inputs)

    def cast(self, x):
        return x.to(self.compute_dtype) if x.is_floating_point() else x

    def after_forward(self, units, output):
        if not self.again and torch.is_grad_enabled():
            for unit in units:
                unit.users += unit.trained  # backward is a user that comes later
        super().after_forward(units, output)

    def passed(self, units):
        for unit in units:
            unit.users = max(unit.users - 1, 0)
            unit.pending = max(unit.pending - 1, 0)
            if unit.pending == 0 and unit.trained and unit not in self.left:
                self.reduce(unit)
            elif unit.users == 0:
                unit.free()
            if unit.pending == 0:
                self.left.discard(unit)

    def reduce(self, unit):
        super().reduce(unit)
        self.left.add(unit)

    def finish_gradient_sync(self):
        for unit in self.units:
            if any(p.grad is not None for p in unit.parameters):
                self.reduce(unit)
        super().finish_gradient_sync()
        for unit in self.units:
            unit.users = unit.pending = 0
            unit.free()
        self.left.clear()
