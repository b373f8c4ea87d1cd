"""ZeRO stage 3: parameters in parts as well, whole only while a module computes with them."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shared.zero.flat import Bucket
from shared.zero.stages import ZeroStage2


class Unit(Bucket):
    """A bucket of which nothing is kept but the part: it is whole from hold() to let_go()."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(parameters, group)
        self.trained = self.parameters[0].requires_grad
        self.users = 0
        self.free()

    def _make_master(self) -> None:
        self.part = self.part.clone()
        super()._make_master()

    def hold(self) -> dist.Work | None:
        """Begin a use: start to gather where the unit is not whole already."""
        self.users += 1
        storage = self.flat.untyped_storage()
        if storage.nbytes():
            return None
        storage.resize_(self.flat.numel() * self.flat.element_size())
        self.point_at(self.flat)
        return self.gather()

    def let_go(self) -> None:
        """End a use; free the unit if it was the last."""
        self.users -= 1
        if self.users <= 0:
            self.free()

    def free(self) -> None:
        """Give the memory back. What autograd saved are views of it: whole again with the unit.

        A parameter has no elements now, so that using one by mistake is an error about its size.
        """
        self.users = 0
        self.flat.untyped_storage().resize_(0)
        for parameter in self.parameters:
            parameter.data = self.flat.new_empty(0)

    def keep(self) -> None:
        """Take over what was written to the parameters while they were whole."""
        self.part.copy_(self.own_part(self.flat))
        if self.master.data_ptr() != self.part.data_ptr():
            self.master.detach().copy_(self.part)


class AtBackward(torch.autograd.Function):
    """The identity; calls back when backward has passed everything behind it."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads


def at_backward(call: Callable[[], None], inputs: Any) -> Any:
    """Return a module's inputs; once backward has come to all that need a gradient, it calls.

    This module's use of them is meant: a tensor that others use too has its gradient much later.
    """
    leaves, structure = tree_flatten(inputs)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if places and torch.is_grad_enabled():
        passed = AtBackward.apply(call, *(leaves[i] for i in places))
        for i, tensor in zip(places, passed, strict=True):
            leaves[i] = tensor
    return tree_unflatten(leaves, structure)


class ZeroStage3(ZeroStage2):
    """Stage 2 whose parameters are in parts as well: gathered for a module, and freed after it.

    `units` are the modules whose parameters are gathered together; None: `default_units(model)`.
    Parameters outside of them form one more unit, that of the whole model. A unit is gathered
    before its module's forward and freed after it, gathered again for the module's backward, and
    freed when its gradients are complete, which then are reduce-scattered. Between steps a
    parameter has no elements: read the model with `full_state_dict()` or inside `gathered()`.
    A unit's parameters are used in the forward of its module and nowhere else, and every rank
    calls the same modules in the same order.
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
        self._modules = [*(default_units(model) if units is None else units), model]
        self._travelling: Unit | None = None
        super().__init__(model.parameters(), optimizer_class, **kwargs)
        # A tied parameter is in one unit, and all modules that have it gather that unit.
        uses = {module: list(module.parameters()) for module in self._modules[:-1]}
        inside = {each for module in uses for each in module.modules()}
        rest = [each for each in model.modules() if each not in inside]
        for module, own in (
            *uses.items(),
            (model, [p for each in rest for p in each.parameters(recurse=False)]),
        ):
            self._hook(module, list(dict.fromkeys(self._unit_of[p] for p in own)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The model's parameters are one group; RuntimeError for a second."""
        if self.param_groups:
            raise RuntimeError("stage 3 trains its model's parameters, in one group")
        super().add_param_group(param_group)

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        """One unit a module and dtype; its frozen parameters are a unit that is not trained."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._units, self._unit_of = list[Unit](), dict[nn.Parameter, Unit]()
        for module in self._modules:
            kinds: dict[Any, list[nn.Parameter]] = {}
            for p in module.parameters():
                if p not in self._unit_of:
                    kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append(p)
            for own in kinds.values():
                self._units.append(Unit(own, self.group))
                self._unit_of |= dict.fromkeys(own, self._units[-1])
        self.frozen = [unit for unit in self._units if not unit.trained]
        return [unit for unit in self._units if unit.trained]

    # Parameters: gathered and freed

    def _hook(self, module: nn.Module, units: list[Unit]) -> None:
        """Let the four moments of a module's step gather its units, or let go of them."""

        def hold() -> None:
            for work in [unit.hold() for unit in units]:
                if work is not None:
                    work.wait()

        def let_go() -> None:
            for unit in units:
                unit.let_go()

        def before_forward(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            hold()
            return at_backward(let_go, (args, kwargs))

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            let_go()
            outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, before_backward, mode="any")

        def before_backward(_: Tensor) -> None:
            self._begin_backward()
            hold()

        if units:
            module.register_forward_pre_hook(before_forward, with_kwargs=True)
            module.register_forward_hook(after_forward)

    @contextlib.contextmanager
    def gathered(self, write: bool = False) -> Generator[None]:
        """Inside, every parameter is whole; with `write`, what is written there is kept."""
        for work in [unit.hold() for unit in self._units]:
            if work is not None:
                work.wait()
        try:
            yield
        finally:
            for unit in self._units:
                if write:
                    unit.keep()
                unit.let_go()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict() with whole tensors; every rank takes part, each gets it."""
        with self.gathered():
            return {name: each.detach().clone() for name, each in self.model.state_dict().items()}

    def _publish(self, bucket: Bucket) -> None:
        """The part is all that there is: the next forward gathers it."""
        bucket.round()

    # Gradients

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """After a unit's last gradient nothing in this backward reads its weights any more."""
        self._begin_backward()
        unit = self._unit_of[parameter]
        if self._travelling is not None:
            self._travelling.finish()  # before this one begins to fill
            self._travelling = None
        unit.take(parameter)
        if not unit.missing:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        unit.free()
        unit.send()
        self._travelling = unit

    def _end_backward(self) -> None:
        """Send what is not complete, and free what is still whole: no more gradients will come."""
        for unit in self._units:
            if unit.filling is not None and unit is not self._travelling:
                if self._travelling is not None:
                    self._travelling.finish()
                self._send(unit)
            unit.free()
        if self._travelling is not None:
            self._travelling.finish()
        self._travelling, self._in_backward = None, False


def default_units(model: nn.Module) -> Iterator[nn.Module]:
    """The model's children; of a list of layers, each layer."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from default_units(child)
        else:
            yield child
