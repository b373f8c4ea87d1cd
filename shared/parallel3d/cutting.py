"""A model cut twice: each layer over the ranks of tp, the list of its parts over those of pp."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.errors import InputError
from shared.model.language_model import LanguageModel
from shared.model.transformer import Transformer
from shared.parallel3d.mesh import Mesh3D
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import (
    Table,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
)
from shared.pipeline.stages import (
    Activations,
    Block,
    DecoderBlock,
    EncoderBlock,
    Part,
    Shapes,
    parts_of,
    split_stages,
)
from shared.planner.specs import stage_layers
from shared.tensor_parallel.marks import mark_tied_copy
from shared.tensor_parallel.models import parallel_model

Model = LanguageModel | Transformer
BLOCKS = (Block, EncoderBlock, DecoderBlock)
SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Recomputed(Part):
    """A part that keeps for backward what it was given, and nothing of what it computed."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.shapes)
        self.part = part

    def forward(self, activations: Activations, batch: Any) -> Activations:
        """The part's own forward; backward begins with another one, messages of tp included."""

        # checkpoint() keeps the tensors among its arguments alone: give them one by one
        def again(*activations: Tensor) -> Activations:
            return self.part(activations, batch)

        return checkpoint(again, *activations, use_reentrant=False)


def is_block(part: nn.Module) -> bool:
    """Whether a part is a layer of the model."""
    return isinstance(part.part if isinstance(part, Recomputed) else part, BLOCKS)


def make_table(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Table:
    """The schedule's table for the ranks of one pipeline; InputError for what fits no schedule."""
    if schedule not in SCHEDULES:
        raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if chunks != 1 and schedule != "interleaved":
        raise InputError(f"{chunks} stages a rank are for schedule 'interleaved', not {schedule!r}")
    if chunks > 1 and num_ranks == 1:
        raise InputError(f"{chunks} stages a rank need pp 2 or more: one would send to itself")
    if schedule == "interleaved":
        return interleaved_schedule(num_ranks, num_micro_batches, chunks)
    make = gpipe_schedule if schedule == "gpipe" else one_f_one_b_schedule
    return make(num_ranks, num_micro_batches)


def cut_stages(model: Model, num_stages: int, costs: Sequence[float] | None = None) -> list[range]:
    """The parts of each stage: by their costs, or else as many layers in each as `stage_layers`.

    In the latter case what stands before a layer goes with it, and the head with the last one.
    """
    parts = parts_of(model)
    if costs is not None:
        if len(costs) != len(parts):
            raise InputError(f"{len(costs)} costs for {len(parts)} parts: give one for each part")
        return split_stages(costs, num_stages)
    layers = [i for i, part in enumerate(parts) if is_block(part)]
    counts = stage_layers(len(layers), num_stages)
    ends = [0, *(layers[count - 1] + 1 for count in itertools.accumulate(counts[:-1])), len(parts)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def check_widths(model: Model, tp: int) -> None:
    """Raise InputError where `tp` ranks cannot have equal parts of the model's layers."""
    config = model.config
    widths = {"heads": config.num_heads, "d_ff": config.d_ff, "vocab_size": config.vocab_size}
    kv_heads: int = getattr(config, "num_kv_heads", 0)  # lesson 23's
    if kv_heads:
        widths["heads of keys"] = kv_heads
    for name, width in widths.items():
        if width % tp:
            raise InputError(
                f"{name} {width} cannot be shared out evenly over tp {tp}: take a tp that divides "
                f"it, or {name} {width + -width % tp}"
            )


def cut_model(
    model: Model,
    mesh: Mesh3D,
    cuts: Sequence[range],
    *,
    recompute: bool,
    sequence_parallel: bool,
    cast: torch.autocast | None = None,
) -> Pipeline:
    """This rank's part of rank 0's model: a part of each layer of its own stages.

    What this rank does not have of the model is freed: do not use it afterwards. A weight that
    several stages have is marked as a tied copy on all of their ranks but the first's.
    """
    tensors = [x.detach() for x in (*model.parameters(), *model.buffers())]
    for work in [dist.broadcast(x, 0, async_op=True) for x in tensors]:  # one wait, not one each
        assert work is not None
        work.wait()
    parallel_model(model, mesh.tp.group, sequence_parallel)
    parts = parts_of(model)
    for part in parts if sequence_parallel else ():  # what travels between stages is shorter too
        part.shapes = partial(_in_parts, part.shapes, mesh.tp.size)
    if cast is not None:
        for part in parts:
            part.forward = cast(part.forward)
    if recompute:
        parts = [Recomputed(part) if is_block(part) else part for part in parts]
    pipeline = Pipeline(parts, cuts, mesh.pp.ranks, sibling_pipelines=mesh.groups["pp"])
    for parameter, group in pipeline.tied.items():
        if dist.get_rank(group) > 0:
            mark_tied_copy(parameter)
    _free_others(model, pipeline)
    return pipeline


def _in_parts(shapes: Shapes, tp: int, batch: Any) -> list[tuple[int, ...]]:
    """The shapes that travel where each rank of tp has its own part of the sequence."""
    return [(rows, length // tp, width) for rows, length, width in shapes(batch)]


def _free_others(model: nn.Module, pipeline: nn.Module) -> None:
    own = {id(tensor) for tensor in (*pipeline.parameters(), *pipeline.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in own:
            tensor.data = tensor.new_empty(0)
