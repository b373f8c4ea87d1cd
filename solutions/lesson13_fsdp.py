"""Lesson 13, the instructor's side: full sharding by hand, and what torch's fully_shard adds to it.

The lesson's one idea: ZeRO's stage 3 is a rule (whole only while it computes); FSDP is its
schedule: which tensors are one message, when the next one is fetched, what is thrown away. The
classes live in shared/sharding, since later lessons train with them: flat_unit.py has one flat
tensor and its shard, unit_hooks.py the hooks around forward and backward, fully_shard.py the module
around them, prefetch.py the order of a step, hybrid.py the mesh of two axes. checkpoint.py gives
the parameters out by rows, as DTensors.

Points are the difficulty at the exercise (23 in all). What to ask behind a right answer: why are
the two units at the worst moment one of parameters and one of gradients; why is a larger unit
cheaper in messages and dearer in bytes; which of the two gathers could be left out, and what that
costs; why may nothing be fetched ahead across optimizer.step(); what crosses the slow link in a
hybrid, and how many bytes of it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from shared.errors import InputError
from shared.sharding.flat_unit import FlatUnit
from shared.sharding.fully_shard import FullyShard
from shared.sharding.hybrid import HybridShard, hybrid_shard
from shared.sharding.prefetch import PrefetchingShard
from shared.sharding.unit_hooks import default_units

__all__ = [
    "ChainShard",
    "FlatUnit",
    "FullyShard",
    "HybridShard",
    "ModelShard",
    "PrefetchingShard",
    "hybrid_shard",
]


class ChainShard(nn.Module):
    """A chain of units, each called once: gathered for forward and backward, and freed after each.

    FullyShard's schedule without what real models add to it: no tied, frozen, unused or repeated
    units, one tensor in and one out, one dtype.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self._module = [module]  # in a list: parameters() are the shards alone
        self.units = [FlatUnit(list(each.parameters())) for each in units]
        self.shards = nn.ParameterList(unit.shard for unit in self.units)
        self._travelling: FlatUnit | None = None
        for each, unit in zip(units, self.units, strict=True):
            self._hook(each, unit)

    def forward(self, x: Tensor) -> Tensor:
        """The module's own forward."""
        return self._module[0](x)

    def _hook(self, module: nn.Module, unit: FlatUnit) -> None:
        def gather(*_: object) -> None:
            unit.gather()
            return unit.wait()  # at once: nothing is fetched ahead

        def before_backward(_: Tensor) -> None:
            gather()
            self.finish_gradient_sync()  # before this unit's gradients come: two units at most

        def after_forward(_: nn.Module, __: object, output: Tensor) -> None:
            unit.free()
            if output.requires_grad:
                output.register_hook(before_backward)

        def on_gradient(_: Tensor) -> None:
            if all(p.grad is not None for p in unit.parameters):
                unit.free()  # before the gradients are copied together
                unit.reduce()
                self._travelling = unit

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(after_forward)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)

    def finish_gradient_sync(self) -> None:
        """Wait for the reduce-scatter that is under way."""
        if self._travelling is not None:
            self._travelling.finish()
            self._travelling = None


class ModelShard(nn.Module):
    """Any module, all of it trained and used by every rank in the same way: ChainShard's schedule.

    Each moment of the schedule is a method, so that a class that derives from this one can change
    it. Raises InputError for a unit that is no part of the module, contains another, or is there
    twice.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        modules = list(default_units(module)) if units is None else list(units)
        _refuse(module, modules)
        self._module, self.group = [module], group  # in a list, as in ChainShard
        self.units: list[FlatUnit] = []
        self._unit_of: dict[nn.Parameter, FlatUnit] = {}
        self._travelling: FlatUnit | None = None
        for each in [*modules, module]:
            self._make_units([p for p in each.parameters() if p not in self._unit_of])
        self.shards = nn.ParameterList(unit.shard for unit in self.units)
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        inside = {part for each in modules for part in each.modules()}
        rest = [p for m in module.modules() if m not in inside for p in m.parameters(recurse=False)]
        for each in modules:
            self._hook(each, list(each.parameters()))
        self._hook(module, rest)

    def kind(self, parameter: nn.Parameter) -> Any:
        """Parameters of one kind may be in one unit."""
        return parameter.dtype

    def make_unit(self, parameters: list[nn.Parameter]) -> FlatUnit:
        """A unit of these parameters, which are of one kind."""
        return FlatUnit(parameters, group=self.group)

    def _make_units(self, parameters: list[nn.Parameter]) -> None:
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault(self.kind(parameter), []).append(parameter)
        for own in kinds.values():
            unit = self.make_unit(own)
            self.units.append(unit)
            self._unit_of |= dict.fromkeys(own, unit)
            for parameter in own if unit.trained else ():
                parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, unit))

    def _hook(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        # A tied parameter is in one unit, and each module that has it is that unit's user.
        units = list(dict.fromkeys(self._unit_of[p] for p in parameters))

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.before_forward(units, (args, kwargs))

        if units:
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(lambda _, __, output: self.after_forward(units, output))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self._module[0](*args, **kwargs)

    def train(self, mode: bool = True) -> "ModelShard":
        """Set the mode of the module, too: it is hidden in a list."""
        self._module[0].train(mode)
        return super().train(mode)

    # The moments

    def use(self, units: Sequence[FlatUnit]) -> None:
        """Count one user more of each unit, and make it whole."""
        for unit in units:
            unit.users += 1
            unit.gather()
            unit.wait()

    def before_forward(self, units: list[FlatUnit], inputs: Any) -> Any:
        """What the module shall be given in place of these inputs, (args, kwargs)."""
        self.use(units)
        return inputs

    def after_forward(self, units: list[FlatUnit], output: Any) -> None:
        """Free what has no user left, and hear when backward comes to this module."""
        for unit in units:
            unit.users -= 1
            if unit.users <= 0:
                unit.free()
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if outputs and torch.is_grad_enabled():
            back = partial(self.before_backward, units)
            register_multi_grad_hook(outputs, back, mode="any")

    def before_backward(self, units: list[FlatUnit], _: Tensor) -> None:
        """Make the units whole again; what travels arrives before gradients of theirs come."""
        self.use(units)
        self.finish_travelling()

    def on_gradient(self, unit: FlatUnit, _: Tensor) -> None:
        """After a unit's last gradient nothing in this backward reads its parameters any more."""
        if all(p.grad is not None for p in unit.parameters):
            self.reduce(unit)

    def reduce(self, unit: FlatUnit) -> None:
        """Send a unit's gradients, one unit at a time."""
        self.finish_travelling()
        unit.users = 0
        unit.free()  # before the gradients are copied together
        unit.reduce()
        self._travelling = unit

    def finish_travelling(self) -> None:
        """Wait for the reduce-scatter that is under way."""
        if self._travelling is not None:
            self._travelling.finish()
            self.on_shard_gradient(self._travelling)
            self._travelling = None

    def on_shard_gradient(self, unit: FlatUnit) -> None:
        """`unit.shard.grad` holds the mean; there is nothing left to do."""

    def finish_gradient_sync(self) -> None:
        """Wait for what is still sent."""
        self.finish_travelling()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state_dict() with whole parameters, tied names and buffers."""
        whole: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            pieces = [piece.clone() for piece in unit.full(unit.shard)]
            whole |= dict(zip(unit.parameters, pieces, strict=True))
        state = {name: x.clone() for name, x in self._module[0].state_dict().items()}
        named = self._module[0].named_parameters(remove_duplicate=False)
        return state | {name: whole[p] for name, p in named}


def _refuse(module: nn.Module, units: Sequence[nn.Module]) -> None:
    for i, each in enumerate(units):
        if each is module or each not in set(module.modules()):
            raise InputError(f"unit {i}, a {type(each).__name__}, is no part inside of the module")
        if any(other in set(each.modules()) for other in [*units[:i], *units[i + 1 :]]):
            raise InputError(f"unit {i}, a {type(each).__name__}, is there twice or has a unit")


NOTES = {
    "13.1": """
FlatUnit: 3 points, 35 minutes. The shard and its numbers 1, memory given back 1, gradients 1.
Look for: resize_(0) on the storage and not `flat = None` (what autograd saved would keep it);
the float32 master rounded at gather(), never written back; group_src, not src, in a broadcast of
a group. Ask for the bytes of each message, and what happens to a gradient that is None.
Common mistakes: gather() that waits; the mean over the world in place of the group; a shard that
is a view of the whole tensor, which then is never freed; float32 messages for 16-bit parameters.
""",
    "13.1b": """
ChainShard: 3 points, 30 minutes. One process's weights 1, messages 1, two units at the most 1.
The four hooks and nothing else; about forty lines. Look for: the gather before backward in a hook
on the output; the parameters freed before the gradients are copied together; one reduce-scatter
under way at a time. Ask which two units are alive at the worst moment.
Common mistakes: everything gathered before the first unit computes; no gather before backward;
the reduce-scatters all waited for at the end.
""",
    "13.2": """
ModelShard: 4 points, 45 minutes. One process's weights 2, two units and messages 1, state_dict and
refusals 1. ChainShard's hooks around any module. Look for: the module's own unit, of what no unit
has; a tied matrix as one unit with two users; a hook on any of several outputs; full_state_dict()
with both names of a tied matrix. Ask what a second backward before the step does to shard.grad.
Common mistakes: everything gathered at the module's start (right numbers, nothing saved); kept
whole from forward to backward; all gradients sent in finish_gradient_sync(); parameters() of the
inner module handed to the optimizer; eval() that does not reach the module.
""",
    "13.2b": """
FullyShard: 5 points, 45 minutes. Used in part and twice 2, frozen 1, 16 bits 1, options 1.
Deriving from 13.2's class is the short way: with a method for each moment it is some sixty lines.
Look for: what is sent when a gradient never comes; `pending` counted in forward with gradients
alone; a unit reduced once in a backward; the cast at each unit; full_state_dict() from the shards
and not from rounded copies.
Common mistakes: a unit that waits for a gradient which comes on another rank alone; integers cast;
frozen units kept from forward to backward, or reduced; keep_whole in bytes.
""",
    "13.3": """
PrefetchingShard: 4 points, 30 minutes. On its way in forward 1, in backward 1, at most two 1, and
right where the order changes 1. Look for: the order recorded, not taken from the list of units;
a start without a wait; nothing across the end of a step. Ask what stays exposed: the first
gather, the one at the turn, and the reduce-scatters.
""",
    "13.4": """
hybrid_shard: 4 points, 30 minutes. Groups 1, values 1, bytes across nodes 1, refusals 1.
Look for: every rank makes every group; the gradient of a shard, not of a unit, crosses nodes;
rank 0's numbers in every node. Ask for the bytes across the slow link: 2 (r-1)/r of S/s.
Common mistakes: rows and columns exchanged (right numbers: only the link feels it); the mean over
one of the axes; replicas that start with different numbers.
""",
}
