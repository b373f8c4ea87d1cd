"""Fully sharded data parallelism: every unit is whole only while its module computes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.ddp.wrapping import refuse_prefixes
from shared.errors import InputError
from shared.sharding.clipping import clip_parts
from shared.sharding.flat_unit import FlatUnit, WholeUnit
from shared.sharding.unit_hooks import UnitHooks, default_units

SHOWN = 8  # differences of a state that a message names


class FullyShard(UnitHooks[FlatUnit], nn.Module):
    """A module of which each rank keeps a shard of every unit: gathered for use, freed after it.

    `units` are the modules whose parameters travel together, one message each; None: the module's
    children, of a list of layers each layer. Parameters outside of them are one more unit, the
    module's own, which is whole in all of its forward. When a unit is gathered and freed, and what
    is counted for that, says the table in `UnitHooks`.

    `parameters()` are the shards: make the optimizer of them, after this. `compute_dtype` is what
    the parameters and the inputs of the units are cast to; the shards stay float32. Parameters
    with fewer than `keep_whole` elements are not sharded. `reshard_after_forward=False` keeps
    trained units whole between forward and backward. Every rank calls the same units in the same
    order: messages meet by their number, so that another order mixes weights, unnoticed. One whose
    inputs need no gradient has a gradient on every rank or on none.

    Gradients are whole nowhere: torch.nn.utils.clip_grad_norm_ over `parameters()` sees the norm
    of this rank's shards. Clip with `clip_grad_norm_` of this class.

    After a backward that ended in an error on every rank, optimizer.zero_grad() and the next
    forward, or this module's zero_grad() alone, leave nothing of it.
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
        self.compute_dtype, self.group = compute_dtype, group
        self.keep_whole, self.reshard_after_forward = keep_whole, reshard_after_forward
        self._shard(module, modules, self._make_unit)
        self.shards = nn.ParameterList(unit.shard for unit in self.units)
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)

    def _kind(self, parameter: nn.Parameter) -> Any:
        return parameter.numel() < self.keep_whole, super()._kind(parameter)

    def _make_unit(self, parameters: list[nn.Parameter]) -> FlatUnit:
        kind = WholeUnit if parameters[0].numel() < self.keep_whole else FlatUnit
        return kind(parameters, self.compute_dtype, self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "FullyShard":
        """Set the mode of the module, too."""
        self.module.train(mode)
        return super().train(mode)

    # Gradients

    def finish_gradient_sync(self) -> None:
        """Send what is not complete, wait for all of it, and free what is still whole.

        Call between backward() and step(); look at gradients after it. A second call does nothing.
        """
        self._reduce_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: the shards', and what a backward has left that is not reduced."""
        self._drop_gradients()  # first: what travels would be written into the zeros
        super().zero_grad(set_to_none)
        if self._in_backward:  # which ended in an error
            self._free_all()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the whole model's gradient, in place, to this 2-norm at the most.

        Returns the norm as it was before, the same on every rank, all of which take part. Finishes
        the gradients first. Raises InputError for a max_norm below 0.
        """
        self.finish_gradient_sync()
        shards = [(unit.shard.grad, isinstance(unit, WholeUnit)) for unit in self.units]
        return clip_parts(
            [grad for grad, whole in shards if grad is not None and not whole],
            max_norm,
            self.group,
            copies=[grad for grad, whole in shards if grad is not None and whole],
            device=self.units[0].shard.device,
        )

    # The whole model

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state_dict() with whole parameters, not rounded, and its buffers.

        Every rank takes part, and each gets it. One unit at a time is gathered.
        """
        return self._state_dict_of(lambda unit: unit.shard)

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
            unit.free()  # a WholeUnit's parameters become what the shard is now
            del flat, pieces  # before the next unit's are made

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's shards, and the buffers, out of a whole state_dict.

        Raises InputError for names that are missing or unknown and for other shapes, before
        anything is changed.
        """
        shapes = {name: x.shape for name, x in self.module.state_dict().items()}
        shapes |= {name: unit.shapes[i] for name, (unit, i) in self.names().items()}
        wrong = [f"has no {name}" for name in shapes if name not in state]
        wrong += [f"has {name}, the module has not" for name in state if name not in shapes]
        wrong += [
            f"has {name} as {tuple(state[name].shape)}, the module as {tuple(shape)}"
            for name, shape in shapes.items()
            if name in state and state[name].shape != shape
        ]
        if wrong:
            refuse_prefixes(state, shapes)
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise InputError(f"the state {'; '.join(wrong[:SHOWN])}{more}")
        self.fill_shards(state.__getitem__, lambda unit: unit.shard)
        for name, buffer in self.module.named_buffers():
            if name in state:
                buffer.copy_(state[name])


def _check_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raises InputError for a unit that is no part of the module, is there twice, or nested."""
    names = {submodule: name or "the module itself" for name, submodule in module.named_modules()}
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
