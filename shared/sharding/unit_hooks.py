"""When units are gathered, freed and reduced: the hooks that ZeRO-3 and FullyShard share."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from shared.sharding.backward import at_backward, at_end_of_backward, backward_id, inside_backward
from shared.sharding.flat_unit import FlatUnit

Unit = TypeVar("Unit", bound=FlatUnit)


def default_units(model: nn.Module) -> Iterator[nn.Module]:
    """The model's children; of a list of layers, each layer."""
    for child in model.children():
        in_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        yield from default_units(child) if in_list else [child]


class UnitHooks(Generic[Unit]):
    """The units of a module, gathered before each use and freed after it.

    Before a unit's forward its parameters are gathered, and freed after it; gathered again for its
    backward, and freed when its gradients are there, which then are reduce-scattered. So beside
    the shards, and the module's own unit, a rank holds two units at the most: one of parameters and
    one of gradients. All ranks call the same units in one order. What is counted, and when:

        event                    users    pending   besides
        before forward           +1       +1        gathered; pending only with gradients
        after forward            -1                 freed at 0 users, unless it is kept whole
        before backward          +1                 gathered; what travels is finished
        last gradient is there   0                  freed, reduced: it travels, and is in `_left`;
                                                    not inside of a re-entrant checkpoint
        after backward           -1       -1        at 0 pending: reduced if not in `_left`, which
                                                    it leaves; freed at 0 users
        end of backward                             what travels is finished
        end of a step            0        0         what is not complete is reduced; all is freed
        an error in forward      as before it       freed at 0 users
        an error in backward     0        0         at the next forward: all is freed, and what is
                                                    no shard's gradient yet is dropped

    "After backward" comes when all inputs' gradients are computed; a module whose inputs need none
    has no such moment. No count goes below 0.
    """

    reshard_after_forward = True
    compute_dtype: torch.dtype | None = None

    def _shard(
        self,
        module: nn.Module,
        modules: Sequence[nn.Module],
        make_unit: Callable[[list[nn.Parameter]], Unit],
    ) -> None:
        """Make the units of these modules, and of the module's other parameters; hook them up."""
        self.units: list[Unit] = []
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self._travelling: Unit | None = None
        self._left = set[Unit]()  # sent in a backward that has not passed all their modules
        self._in_backward = False  # also after one that ended in an error
        self._module = [module]  # in a list: its parameters are none of an nn.Module's that has it
        for submodule in [*modules, module]:
            self._make_units(submodule, make_unit)
        self._hook_errors(module)
        inside = {part for submodule in modules for part in submodule.modules()}
        rest = [p for m in module.modules() if m not in inside for p in m.parameters(recurse=False)]
        for submodule in modules:
            self._hook(submodule, list(submodule.parameters()))
        self._hook(module, rest)

    @property
    def module(self) -> nn.Module:
        """The module that was sharded."""
        return self._module[0]

    def _kind(self, parameter: nn.Parameter) -> Any:
        """Parameters of one kind may be in one unit."""
        return parameter.dtype, parameter.device, parameter.requires_grad

    def _make_units(
        self, module: nn.Module, make_unit: Callable[[list[nn.Parameter]], Unit]
    ) -> None:
        kinds: dict[Any, list[nn.Parameter]] = {}
        for p in module.parameters():
            if p not in self._unit_of:
                kinds.setdefault(self._kind(p), []).append(p)
        # Weakly: autograd keeps its hooks out of the collector's sight, and with a method this
        # object and its groups, which would outlive destroy_process_group().
        found = WeakMethod(self._on_gradient)
        for own in kinds.values():
            unit = make_unit(own)
            self.units.append(unit)
            self._unit_of |= dict.fromkeys(own, unit)
            for parameter in own if unit.trained else ():
                parameter.register_post_accumulate_grad_hook(partial(_call, found))

    # Parameters: gathered and freed

    def acquire(self, unit: Unit) -> None:
        """Make a unit whole for a module that is about to compute with it."""
        unit.gather()
        unit.wait()

    def _use(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.users += 1
            self.acquire(unit)
            unit.note_versions()

    def _hook(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Gather a module's units before its forward and backward, and free them afterwards."""
        # A tied parameter is in one unit, and all modules that have it gather that unit.
        units = list(dict.fromkeys(self._unit_of[p] for p in parameters))

        def before_forward(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            self._use(units)
            for unit in units:
                unit.pending += torch.is_grad_enabled()
            return at_backward(partial(self._after_backward, units), self._cast((args, kwargs)))

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            training = torch.is_grad_enabled()
            for unit in units:
                unit.refuse_writes()
                unit.users -= 1
                kept = training and unit.trained and not self.reshard_after_forward
                if unit.users <= 0 and not kept:
                    unit.free()
            outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            if outputs and training:
                register_multi_grad_hook(outputs, before_backward, mode="any")

        def before_backward(_: Tensor) -> None:
            self._begin_backward()
            self._use(units)
            self._finish_travelling()  # before gradients of these units come

        if units:
            module.register_forward_pre_hook(before_forward, with_kwargs=True)
            module.register_forward_hook(after_forward)

    def _hook_errors(self, module: nn.Module) -> None:
        """Notice a backward that ended in an error, and undo what a failed forward has counted."""
        uses: dict[Unit, tuple[int, int]] = {}

        def before(_: nn.Module, __: Any) -> None:
            if not inside_backward():  # where a forward is computed again
                if self._in_backward:
                    self._forget()
                uses.update({unit: (unit.users, unit.pending) for unit in self.units})

        def after(_: nn.Module, __: Any, output: Any) -> None:
            # torch.utils.checkpoint cuts a forward short by an error of its own, in backward.
            if output is None and not inside_backward():
                self._undo_forward(uses)
            uses.clear()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)  # without output after an error

    def _undo_forward(self, uses: dict[Unit, tuple[int, int]]) -> None:
        for unit, (unit.users, unit.pending) in uses.items():
            if unit.users <= 0:
                unit.free()

    def _cast(self, inputs: Any) -> Any:
        """Floating-point inputs in the dtype that the unit computes in."""
        dtype = self.compute_dtype

        def cast(x: Any) -> Any:
            floats = isinstance(x, Tensor) and x.is_floating_point()
            return x.to(dtype) if floats and dtype is not None else x

        return tree_map(cast, inputs)

    # Gradients

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward, self._backward = True, backward_id()
            at_end_of_backward(self._end_backward)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """After a unit's last gradient nothing in this backward reads its parameters any more.

        One from a re-entrant checkpoint's own backward may be a part: `_after_backward` comes then.
        """
        self._begin_backward()
        unit = self._unit_of[parameter]
        unit.arrived += backward_id() == self._backward
        if unit.arrived == len(unit.parameters):
            self._reduce(unit)

    def _after_backward(self, units: list[Unit]) -> None:
        """Backward has passed a module. A unit that some rank did not use all of leaves here."""
        self._begin_backward()
        for unit in units:
            # Its last gradient may have set the users to 0 before: below it, a unit that two
            # modules hold in the next micro-batch would be freed by the first of them.
            unit.users = max(unit.users - 1, 0)
            unit.pending = max(unit.pending - 1, 0)
            if unit.pending <= 0 and unit.trained and unit not in self._left:
                self._reduce(unit)  # also if nothing of it was used here: others may have
            elif unit.users <= 0:
                unit.free()
            if unit.pending <= 0:
                self._left.discard(unit)

    def _reduce(self, unit: Unit) -> None:
        self._finish_travelling()
        unit.free()
        unit.users = unit.arrived = 0
        unit.reduce()
        self._left.add(unit)
        self._travelling = unit

    def _finish_travelling(self) -> None:
        if self._travelling is not None:
            self._travelling.finish()
            self.on_shard_gradient(self._travelling)
            self._travelling = None

    def on_shard_gradient(self, unit: Unit) -> None:
        """Called when `unit.shard.grad` holds the group's mean; there is nothing left to do."""

    def _end_backward(self) -> None:
        """Nothing travels on: an optimizer's zero_grad() would not know of it."""
        self._finish_travelling()
        self._in_backward = False
        for unit in self.units:
            unit.arrived = 0

    def _reduce_all(self) -> None:
        """Send what is not complete, wait for all of it, and free what is still whole."""
        for unit in self.units:
            if unit.trained and any(p.grad is not None for p in unit.parameters):
                self._reduce(unit)
        self._finish_travelling()
        self._free_all()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.users = unit.pending = unit.arrived = 0
            unit.free()
        self._left.clear()
        self._in_backward = False

    def _drop_gradients(self) -> None:
        self._travelling = None
        for unit in self.units:
            unit.drop()

    def _forget(self) -> None:
        """Drop the gradients that are no shard's yet, and all that the hooks have counted."""
        self._drop_gradients()
        self._free_all()

    # The whole model

    def names(self) -> dict[str, tuple[Unit, int]]:
        """Where each parameter of the module is: its unit and its place in it; tied names, too."""
        places = {p: (unit, i) for unit in self.units for i, p in enumerate(unit.parameters)}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: places[p] for name, p in named}

    def each_whole(
        self,
        part_of: Callable[[Unit], Tensor],
        take: Callable[[Tensor, str], Any],
    ) -> dict[str, Any]:
        """What `take` makes of every parameter's whole tensor, by name; one unit at a time.

        `part_of` a unit is something shaped as its shard: the shard, or what an optimizer keeps
        for it. Every rank takes part.
        """
        found: dict[str, Any] = {}
        places = self.names()
        for unit in self.units:
            pieces = unit.full(part_of(unit))
            mine = {name: i for name, (own, i) in places.items() if own is unit}
            found |= {name: take(pieces[i], name) for name, i in mine.items()}
            del pieces  # before the next unit's are made
        return found

    def _state_dict_of(self, part_of: Callable[[Unit], Tensor]) -> dict[str, Tensor]:
        """The module's state_dict() with whole parameters made of these parts, and its buffers."""
        whole = self.each_whole(part_of, lambda tensor, _: tensor.clone())
        state = self.module.state_dict()
        return {name: whole[name] if name in whole else x.clone() for name, x in state.items()}


def _call(found: WeakMethod, parameter: nn.Parameter) -> None:
    if method := found():
        method(parameter)
