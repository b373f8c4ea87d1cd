"""Fully sharded data parallelism: every unit is whole only while its module computes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from shared.errors import InputError
from shared.fsdp.flat_unit import FlatUnit, WholeUnit
from shared.zero.stage3 import at_backward, default_units


class FullyShard(nn.Module):
    """A module of which each rank keeps a shard of every unit: gathered for use, freed after it.

    `units` are the modules whose parameters travel together, one message each; None: the module's
    children, of a list of layers each layer. Parameters outside of them are one more unit, the
    module's own, which is whole in all of its forward. Before a unit's forward its parameters are
    gathered, and freed after it; gathered again for its backward, and freed when its gradients
    are there, which then are reduce-scattered. So beside the shards a rank holds two units at the
    most: one of parameters and one of gradients.

    `parameters()` are the shards: make the optimizer of them, after this. `compute_dtype` is what
    the parameters and the inputs of the units are cast to; the shards stay float32. Parameters
    with fewer than `keep_whole` elements are not sharded. `reshard_after_forward=False` keeps the
    units whole between forward and backward. Every rank calls the same units in the same order.
    Source: Zhao et al. 2023 (arXiv 2304.11277); the schedule is that of ZeRO stage 3.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        keep_whole: int = 0,
        reshard_after_forward: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        modules = list(default_units(module)) if units is None else list(units)
        _check_units(module, modules)
        self._module = [module]  # in a list: its parameters are none of this module's
        self.compute_dtype, self.group = compute_dtype, group
        self.keep_whole, self.reshard_after_forward = keep_whole, reshard_after_forward
        self._travelling: FlatUnit | None = None
        self._left = set[FlatUnit]()  # sent in a backward that has not passed all their modules
        self._unit_of: dict[nn.Parameter, FlatUnit] = {}
        self.units: list[FlatUnit] = []
        for each in [*modules, module]:
            self._make_units(each)
        self.shards = nn.ParameterList(unit.shard for unit in self.units)
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        inside = {part for each in modules for part in each.modules()}
        rest = [p for m in module.modules() if m not in inside for p in m.parameters(recurse=False)]
        for each in modules:
            self._hook(each, list(each.parameters()))
        self._hook(module, rest)

    @property
    def module(self) -> nn.Module:
        """The module that was sharded."""
        return self._module[0]

    def _make_units(self, module: nn.Module) -> None:
        """One unit a module; dtypes, frozen parameters and small ones are units of their own."""
        kinds: dict[Any, list[nn.Parameter]] = {}
        for p in module.parameters():
            if p not in self._unit_of:
                kind = (p.numel() < self.keep_whole, p.dtype, p.device, p.requires_grad)
                kinds.setdefault(kind, []).append(p)
        for (small, *_), own in kinds.items():
            unit = (WholeUnit if small else FlatUnit)(own, self.compute_dtype, self.group)
            self.units.append(unit)
            self._unit_of |= dict.fromkeys(own, unit)
            for parameter in own if unit.trained else ():
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "FullyShard":
        """Set the mode of the module, too."""
        self.module.train(mode)
        return super().train(mode)

    # Parameters: gathered and freed

    def acquire(self, unit: FlatUnit) -> None:
        """Make a unit whole for a module that is about to compute with it."""
        unit.gather()
        unit.wait()

    def _hook(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Let the four moments of a module's step gather its units, or free them."""
        # A tied parameter is in one unit, and all modules that have it gather that unit.
        units = list(dict.fromkeys(self._unit_of[p] for p in parameters))

        def hold() -> None:
            for unit in units:
                unit.users += 1
                self.acquire(unit)

        def before_forward(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            hold()
            inputs = self._cast((args, kwargs))
            if torch.is_grad_enabled():
                for unit in units:
                    unit.pending += 1
            return at_backward(partial(self._passed, units), inputs)

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            training = torch.is_grad_enabled()
            for unit in units:
                unit.users -= 1
                if unit.users <= 0 and (self.reshard_after_forward or not training):
                    unit.free()
            outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            if outputs and training:
                register_multi_grad_hook(outputs, before_backward, mode="any")

        def before_backward(_: Tensor) -> None:
            hold()
            self._finish_travelling()  # before gradients of these units come

        if units:
            module.register_forward_pre_hook(before_forward, with_kwargs=True)
            module.register_forward_hook(after_forward)

    def _cast(self, inputs: Any) -> Any:
        """Floating-point inputs in the dtype that the unit computes in."""
        dtype = self.compute_dtype

        def cast(x: Any) -> Any:
            floats = isinstance(x, Tensor) and x.is_floating_point()
            return x.to(dtype) if floats and dtype is not None else x

        return tree_map(cast, inputs)

    def _passed(self, units: list[FlatUnit]) -> None:
        """Backward has passed a module. A unit that some rank did not use all of leaves here."""
        for unit in units:
            unit.users -= 1
            unit.pending -= 1
            if unit.pending <= 0 and unit.trained and unit not in self._left:
                self._reduce(unit)  # also if nothing of it was used here: others may have
            elif unit.users <= 0:
                unit.free()
            if unit.pending <= 0:
                self._left.discard(unit)

    # Gradients

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """After a unit's last gradient nothing in this backward reads its parameters any more."""
        unit = self._unit_of[parameter]
        if all(p.grad is not None for p in unit.parameters):
            self._reduce(unit)

    def _reduce(self, unit: FlatUnit) -> None:
        self._finish_travelling()
        unit.free()
        unit.users = 0
        unit.reduce()
        self._left.add(unit)
        self._travelling = unit

    def _finish_travelling(self) -> None:
        if self._travelling is not None:
            self._travelling.finish()
            self.on_shard_gradient(self._travelling)
            self._travelling = None

    def on_shard_gradient(self, unit: FlatUnit) -> None:
        """Called when `unit.shard.grad` holds the group's mean; there is nothing left to do."""

    def finish_gradient_sync(self) -> None:
        """Send what is not complete, wait for all of it, and free what is still whole.

        Call between backward() and step(); clip, or look at gradients, after it.
        """
        for unit in self.units:
            if unit.trained and any(p.grad is not None for p in unit.parameters):
                self._reduce(unit)
        self._finish_travelling()
        for unit in self.units:
            unit.users = unit.pending = 0
            unit.free()
        self._left.clear()

    # The whole model

    def names(self) -> dict[str, tuple[FlatUnit, int]]:
        """Where each parameter of the module is: its unit and its place in it; tied names, too."""
        named = self.module.named_parameters(remove_duplicate=False)
        units = {name: (self._unit_of[p], p) for name, p in named}
        return {
            name: (unit, next(i for i, own in enumerate(unit.parameters) if own is p))
            for name, (unit, p) in units.items()
        }

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state_dict() with whole parameters, not rounded, and its buffers.

        Every rank takes part, and each gets it. One unit at a time is gathered.
        """
        whole = self.each_whole(lambda unit: unit.shard, lambda tensor, _: tensor.clone())
        state = self.module.state_dict()
        return {
            name: whole.get(name, x if name in whole else x.clone()) for name, x in state.items()
        }

    def each_whole(
        self,
        part_of: Callable[[FlatUnit], Tensor],
        take: Callable[[Tensor, str], Any],
    ) -> dict[str, Any]:
        """What `take` makes of every parameter's whole tensor, by name; one unit at a time.

        `part_of(unit)` is the unit's shard, or what an optimizer keeps for it.
        """
        found: dict[str, Any] = {}
        places = self.names()
        for unit in self.units:
            pieces = unit.full(part_of(unit))
            mine = {name: i for name, (own, i) in places.items() if own is unit}
            found |= {name: take(pieces[i], name) for name, i in mine.items()}
        return found

    @torch.no_grad()
    def fill_shards(
        self,
        whole_of: Callable[[str], Tensor],
        part_of: Callable[[FlatUnit], Tensor],
    ) -> None:
        """Take this rank's parts out of whole tensors, by name: each_whole the other way round.

        One unit at a time is put together, in the same order on every rank.
        """
        places = self.names()
        for unit in self.units:
            flat = unit.shard.new_zeros(len(unit.flat))
            pieces = unit.pieces(flat)
            for name, (own, i) in places.items():
                if own is unit:
                    pieces[i].copy_(whole_of(name))
            part_of(unit).copy_(unit.own_part(flat))
            unit.free()

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's shards, and the buffers, out of a whole state_dict."""
        missing = sorted({*self.module.state_dict()} - {*state})
        if missing:
            raise InputError(f"the state has no {', '.join(missing)}")
        self.fill_shards(state.__getitem__, lambda unit: unit.shard)
        for name, buffer in self.module.named_buffers():
            if name in state:
                buffer.copy_(state[name])


def _check_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raises InputError for a unit that is no part of the module, is there twice, or nested."""
    names = {each: name or "the module itself" for name, each in module.named_modules()}
    for i, unit in enumerate(units):
        if unit not in names:
            raise InputError(f"unit {i}, a {type(unit).__name__}, is no part of the module")
        if unit is module:
            raise InputError("the module itself is a unit without being named: leave it out")
        if any(unit is other for other in units[:i]):
            raise InputError(f"{names[unit]} is named as a unit twice")
        inside = next((x for x in units if x is not unit and x in set(unit.modules())), None)
        if inside is not None:
            raise InputError(f"unit {names[unit]} contains another unit, {names[inside]}")
