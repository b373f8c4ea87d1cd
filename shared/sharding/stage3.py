"""ZeRO stage 3: parameters in parts as well, whole only while a module computes with them."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.errors import InputError
from shared.sharding.flat_unit import ZeroUnit
from shared.sharding.stages import ZeroStage2
from shared.sharding.unit_hooks import UnitHooks, default_units


class ZeroStage3(UnitHooks[ZeroUnit], ZeroStage2):
    """Stage 2 whose parameters are in parts as well: gathered for a module, and freed after it.

    The optimizer's face of what `FullyShard` is as a module: the hooks are the same, and so are
    their rules. `units` are the modules whose parameters are gathered together; None:
    `default_units(model)`. Parameters outside of them form one more unit, that of the whole model.
    A unit is gathered before its module's forward and freed after it, gathered again for the
    module's backward, and freed when its gradients are complete, which then are reduce-scattered.
    Between steps a parameter has no elements: read the model with `full_state_dict()` or inside
    `gathered()`. A unit's parameters are used in the forward of its module and nowhere else, and
    every rank calls the same modules in the same order. Raises InputError for a unit that has no
    forward, such as a ModuleList.

    After a backward that ended in an error, a forward or a step without zero_grad() is an error.
    Source: Rajbhandari et al. 2020, section 5.3; the hooks are those of DeepSpeed's stage 3.
    """

    stage = 3

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        units: Sequence[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        self.model = model
        self._chosen = list(default_units(model) if units is None else units)
        for submodule in self._chosen:
            if type(submodule).forward is nn.Module.forward:
                kind = type(submodule).__name__
                raise InputError(f"a {kind} is never called, so never gathered: give its elements")
        super().__init__(model.parameters(), optimizer_class, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The model's parameters are one group; RuntimeError for a second."""
        if self.param_groups:
            raise RuntimeError("stage 3 trains its model's parameters, in one group")
        super().add_param_group(param_group)

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[ZeroUnit]:
        """One unit a module and dtype; its frozen parameters are a unit that is not trained."""
        self._shard(self.model, self._chosen, lambda own: ZeroUnit(own, group=self.group))
        self.frozen = [unit for unit in self.units if not unit.trained]
        return [unit for unit in self.units if unit.trained]

    @contextlib.contextmanager
    def gathered(self, write: bool = False) -> Generator[None]:
        """Inside, every parameter is whole; with `write`, what is written there is kept."""
        self._use(self.units)
        for unit in self.units:
            unit.writing += write
        try:
            yield
        finally:
            for unit in self.units:
                unit.writing -= write
                if write:
                    unit.store_back()
                unit.users -= 1
                if unit.users <= 0:
                    unit.free()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict() with whole tensors; every rank takes part, each gets it."""
        return self._state_dict_of(lambda unit: unit.part)

    def state_dict(self) -> dict[str, Any]:
        """As in stage 1, and the parts of frozen parameters."""
        return {**super().state_dict(), "frozen": [unit.part.clone() for unit in self.frozen]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in stage 1, and the parts of frozen parameters."""
        state = dict(state_dict)
        parts, own = state.pop("frozen", []), [unit.part for unit in self.frozen]
        sizes, here = [part.numel() for part in parts], [part.numel() for part in own]
        if {"stage": self.stage, **self._place()}.items() <= state.items() and sizes != here:
            raise InputError(f"the state's frozen parts have {sizes} elements, these {here}")
        super().load_state_dict(state)
        for mine, part in zip(own, parts, strict=True):
            mine.copy_(part)

    def _publish(self, bucket: ZeroUnit) -> None:
        """The part is all that there is: the next forward gathers it."""
        bucket.round()

    # Gradients

    def _end_backward(self) -> None:
        """Send what is not complete, and free what is still whole: no more gradients will come."""
        self._reduce_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and forget a backward that ended in an error."""
        self._drop_gradients()
        if self._in_backward:
            self._free_all()
        self._averaged = False

    def _forget(self) -> None:
        self._refuse_failed_backward()
