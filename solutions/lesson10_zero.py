"""Lesson 10, the instructor's side: ZeRO's three stages by hand, and DeepSpeed's configuration.

The lesson's one idea: between the two halves of an all-reduce every rank has a finished sum of one
part. Whoever stops there owns a part: of the updates (stage 1), of the gradients (stage 2), of the
parameters (stage 3). The classes live in shared/sharding, since later lessons train with them:
flat.py has a bucket (one flat tensor, this rank's part, the way of a gradient through it),
stages.py the optimizer around it, flat_unit.py and unit_hooks.py what gathers and frees, which
lesson 13 builds as a module; stage3.py is the optimizer's face of it.

Points are the difficulty at the exercise (24 in all). What to ask behind a right answer: which byte
of the 16 is divided by which stage; what is alive at the worst moment, and why two units; why
stages 1 and 2 send no more than DDP, and what four micro-batches do to that; what a rank may not
decide alone (to leave out a bucket); why dropping the flat tensor would free nothing in stage 3.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.errors import InputError
from shared.ranks.collectives import all_gather, reduce_scatter
from shared.sharding.flat import partition, views_of
from shared.sharding.flat_unit import ZeroUnit
from shared.sharding.stage3 import ZeroStage3
from shared.sharding.stages import ZeroStage1, ZeroStage2
from shared.sharding.unit_hooks import default_units

__all__ = [
    "ChainStage3",
    "ShardedOptimizer",
    "ZeroStage1",
    "ZeroStage2",
    "ZeroStage3",
    "partition",
    "zero_config",
]


class ShardedOptimizer(Optimizer):
    """Stage 1's idea alone: parameters of one dtype, all trained, one group, no masters."""

    def __init__(
        self, params: Iterable[nn.Parameter], optimizer_class: type[Optimizer], **kwargs: Any
    ) -> None:
        self._trained = list(params)
        self._flat, parts = partition(self._trained, dist.get_world_size())
        dist.broadcast(self._flat, 0)
        for parameter, piece in zip(self._trained, self._pieces(self._flat), strict=True):
            parameter.data = piece
        self._part = nn.Parameter(parts[dist.get_rank()])  # a view: updated in place
        self._inner = optimizer_class([self._part], **kwargs)
        super().__init__(self._trained, self._inner.defaults)

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return views_of(flat, [parameter.shape for parameter in self._trained])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, update this rank's part, and gather the parameters."""
        whole = torch.zeros_like(self._flat)
        for parameter, place in zip(self._trained, self._pieces(whole), strict=True):
            if parameter.grad is not None:
                torch.mul(parameter.grad, 1 / dist.get_world_size(), out=place)
        self._part.grad = torch.empty_like(self._part)
        reduce_scatter(self._part.grad, whole).wait()
        _copy_settings(self, self._inner)
        self._inner.step()
        self._part.grad = None
        all_gather(self._flat, self._part.detach()).wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        super().zero_grad(set_to_none=True)


class ChainStage3(Optimizer):
    """Stage 3's schedule alone: every parameter in a unit, trained, of one dtype, used once."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        units: Sequence[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        modules = list(default_units(model) if units is None else units)
        self._model, self._units = model, [ZeroUnit(list(m.parameters())) for m in modules]
        for module, unit in zip(modules, self._units, strict=True):
            self._hook(module, unit)
        self._inner = optimizer_class([unit.master for unit in self._units], **kwargs)
        super().__init__(model.parameters(), self._inner.defaults)

    def _hook(self, module: nn.Module, unit: ZeroUnit) -> None:
        def gather(*_: object) -> None:
            unit.gather()
            unit.wait()

        def after_forward(_: nn.Module, __: object, output: Tensor) -> None:
            unit.free()
            if output.requires_grad:
                output.register_hook(gather)

        def on_gradient(_: Tensor) -> None:
            if all(p.grad is not None for p in unit.parameters):
                unit.free()  # before the gradients are copied together
                unit.reduce()
                unit.finish()

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(after_forward)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parts; nothing is sent."""
        _copy_settings(self, self._inner)
        for unit in self._units:
            unit.master.grad, unit.grad = unit.grad, None
        self._inner.step()
        self._inner.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, this rank's parts of the averaged ones too."""
        for unit in self._units:
            unit.drop()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict() with whole tensors; every rank takes part, each gets it."""
        whole: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            whole |= dict(zip(unit.parameters, unit.full(unit.part), strict=True))
        state = self._model.state_dict()
        return state | {name: whole[p].clone() for name, p in self._model.named_parameters()}


def _copy_settings(mine: Optimizer, inner: Optimizer) -> None:
    """Let the inner optimizer's only group have the settings of the one that is seen."""
    settings = mine.param_groups[0].items()
    inner.param_groups[0].update({key: value for key, value in settings if key != "params"})


def zero_config(
    num_params: int, num_ranks: int, budget: int, batch_size: int, micro_batch: int
) -> dict[str, Any]:
    """DeepSpeed's configuration with the lowest ZeRO stage whose bytes a rank fit the budget.

    bf16 weights with float32 masters, no clipping, the optimizer is the caller's. The states may
    take nine tenths of `budget` bytes at a step's worst moment (20; the larger of 4 + 14/D and
    2 + 24/D; 2 + 24/D; 28/D bytes a parameter): the rest is for buckets, each at most a fiftieth
    of the parameters. Raises ValueError where no stage fits, or the batch cannot be cut.
    """
    times, left = divmod(batch_size, micro_batch * num_ranks)
    if left or not times:
        raise InputError(f"{batch_size} rows are no multiple of {micro_batch} x {num_ranks} ranks")
    D = num_ranks
    worst = [20, max(4 + 14 / D, 2 + 24 / D), 2 + 24 / D, 28 / D]
    fitting = [stage for stage, size in enumerate(worst) if size * num_params <= 0.9 * budget]
    if not fitting:
        raise InputError(f"{num_params} parameters on {D} ranks fit {budget} bytes in no stage")
    bucket = num_params // 100 * 2  # DeepSpeed wants an even number
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": times,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": fitting[0],
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": bucket,
            "stage3_param_persistence_threshold": 0,
        },
    }


NOTES = {
    "10.1": """
partition: 1 point, 10 minutes. Views, not copies; detached; the least padding.
Common mistakes: chunk() without padding (unequal parts); a whole part of zeros where it divides.
""",
    "10.2": """
ShardedOptimizer: 3 points, 25 minutes. Right numbers 1, bytes 1, messages 1.
Look for: an inner AdamW over the part alone, which is a view of the flat tensor; settings copied in
every step; zeros where there is no gradient. Ask where rank 0's weights come from, and what happens
without that.
Common mistakes: AdamW over everything and then "sharding" it; gradients all-reduced; the rate
read once; parts updated by one rank's gradients.
""",
    "10.2b": """
ZeroStage1: 4 points, 40 minutes. Groups and frozen 1, bytes 1, saved and resumed 1, masters 1.
Look for: param_groups of the model's parameters outside and of parts inside; what is frozen left
alone, and yet rank 0's; masters in the state_dict. Ask what an optimizer that is loaded needs.
Common mistakes: masters made again from the rounded weights; views in state_dict(): torch.save
writes all the memory behind them, whole weights on every rank; the first group's settings for all.
""",
    "10.3": """
ZeroStage2: 4 points, 40 minutes. Freed bucket by bucket 2, one order 1, the end of backward 1.
Look for: parameter.grad = None in the hook, after the copy; buckets from the last parameter; what
is sent when a gradient never comes. Ask for the bytes alive when the second bucket is sent.
Common mistakes: everything sent at the end of backward (right numbers, nothing saved at the worst
moment); the second backward's part in place of the sum.
""",
    "10.4": """
ChainStage3: 4 points, 45 minutes. Right numbers 1, freed after forward 1, two units at most 1,
messages 1.
Look for: resize_(0) on the storage, or an explanation of what else frees saved views; a second
gather in backward; parameters freed before their gradients are copied together.
Common mistakes: all units gathered at once; weights kept for backward; freed in a hook of the
input, which residual connections hold back.
""",
    "10.4b": """
ZeroStage3: 5 points, 45 minutes. The model's own unit and frozen parameters 2, tied and unused 1,
saved and resumed 1, masters 1.
Look for: freeing by count of users; what is left at the end of backward. Ask what a model does that
reads a weight outside of its unit's forward, and what DeepSpeed does (external parameters).
Common mistakes: parameters outside of all units left whole; a ModuleList as a unit; the parts
of the parameters not in state_dict().
""",
    "10.5": """
zero_config: 3 points, 25 minutes. Batch sizes that multiply, the stage from the budget, the keys
whose defaults hide the saving. Ask which key they would change first if the count is too high.
""",
}
