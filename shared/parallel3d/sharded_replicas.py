"""ZeRO over the replicas of a 3D mesh: states, gradients and parameters in parts over dp."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.parallel3d.cutting import is_block
from shared.parallel3d.mesh import Axis
from shared.parallel3d.norm import Pieces
from shared.pipeline.executor import Pipeline
from shared.sharding.fully_shard import FullyShard
from shared.sharding.stages import ZeroStage1, ZeroStage2
from shared.tensor_parallel.marks import is_tied_copy


class _Sharded:
    """What the stages share: a gradient of which a replica has a piece, and tied weights.

    A weight that several stages have travels alone, so that their ranks have equal pieces of it:
    these are added up here, after the replicas', and not by the pipeline. So 1/dp of it is sent.
    """

    in_parts = True

    def __init__(self, pipeline: Pipeline, dp: Axis) -> None:
        self.dp, self.tied = dp, pipeline.tied
        self.parameters = list(pipeline.parameters())
        pipeline.sum_tied = False

    def pieces(self) -> Pieces:
        raise NotImplementedError

    @torch.no_grad()
    def _sum_tied(self) -> None:
        for parameter, piece in self.pieces():
            if parameter in self.tied:
                dist.all_reduce(piece, group=self.tied[parameter])


class ShardedStates(_Sharded):
    """Stages 1 and 2 over buckets of parameters, which are laid end to end in flat tensors.

    A rank keeps its parameters, as views of the flat tensors; a dp-th of the optimizer's states
    (and of float32 masters, for 16-bit parameters); and from `average` to the next zero_grad a
    dp-th of the gradients. Stage 1 has whole gradients from the first backward to `average`.
    Stage 2 reduces them while a backward goes on, once a micro-batch: beside the parts it has the
    gradients of one bucket, in a flat tensor, and of the parameters that wait for the next.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        dp: Axis,
        kind: type[ZeroStage1],
        optimizer_class: type[Optimizer],
        bucket_size: int,
        **settings: Any,
    ) -> None:
        super().__init__(pipeline, dp)
        trained = [p for p in self.parameters if p.requires_grad]
        groups = [[p for p in trained if p not in self.tied], list(self.tied)]
        if any(is_tied_copy(p) for p in self.tied):
            groups.reverse()  # the output matrix, whose gradient comes first
        self.optimizer = kind(
            [{"params": group} for group in groups if group],
            optimizer_class,
            bucket_size=bucket_size,
            group=dp.group,
            **settings,
        )

    def average(self) -> None:
        """Reduce what is not reduced yet: a reduce-scatter a bucket."""
        self.optimizer.reduce_gradients()
        self._sum_tied()

    def pieces(self) -> Pieces:
        """What this replica's part of each bucket has of each parameter."""
        found: list[tuple[nn.Parameter, Tensor]] = []
        for bucket in self.optimizer.buckets:
            if bucket.grad is not None:
                found += _cut_out(bucket.parameters, bucket.shapes, bucket.grad, self.dp.index)
        return found

    def drop(self) -> None:
        """Also what is in the buckets."""
        self.optimizer.zero_grad()

    def whole(self, key: str | None = None) -> dict[nn.Parameter, Tensor]:
        """The parameters themselves, or the replicas' parts of what is kept, put together."""
        if key is None:
            return {p: p.detach() for p in self.parameters}
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self.optimizer.buckets:
            kept = self.optimizer.inner.state.get(bucket.master, {})
            if key in kept:
                found |= zip(bucket.parameters, bucket.full(kept[key]), strict=True)
        return found


class ShardedParameters(_Sharded):
    """Stage 3 over units: each layer, and each other module that has parameters.

    A rank keeps a dp-th of its parameters, of their gradients and of the optimizer's states. A
    unit is whole in its forward and its backward, of every micro-batch anew; beside it there are
    whole gradients of one unit at the most.
    """

    def __init__(
        self, pipeline: Pipeline, dp: Axis, optimizer_class: type[Optimizer], **settings: Any
    ) -> None:
        super().__init__(pipeline, dp)
        self.sharded = FullyShard(pipeline.own, _units(pipeline), group=dp.group)
        shards = [shard for shard in self.sharded.shards if shard.requires_grad]
        self.optimizer = optimizer_class(shards, **settings)

    def average(self) -> None:
        """Wait for what backward has reduced."""
        self.sharded.finish_gradient_sync()
        self._sum_tied()

    def pieces(self) -> Pieces:
        """What this replica's shards have of each parameter."""
        found: list[tuple[nn.Parameter, Tensor]] = []
        for unit in self.sharded.units:
            if unit.shard.grad is not None:
                found += _cut_out(unit.parameters, unit.shapes, unit.shard.grad, self.dp.index)
        return found

    def drop(self) -> None:
        """By FullyShard: nobody calls the forward of `own`, a list, which would forget the rest."""
        self.sharded.zero_grad()
        self.sharded.finish_gradient_sync()  # nothing is left to send: frees what is still whole

    def whole(self, key: str | None = None) -> dict[nn.Parameter, Tensor]:
        """The shards, or what the optimizer keeps for them, put together."""
        found: dict[nn.Parameter, Tensor] = {}
        for unit in self.sharded.units:
            kept = self.optimizer.state.get(unit.shard, {})
            if key is None or key in kept:
                pieces = unit.full(unit.shard if key is None else kept[key])
                found |= zip(unit.parameters, pieces, strict=True)
        return found


def _units(pipeline: Pipeline) -> list[nn.Module]:
    """Layers whole, with their recomputation; of other parts each module, tied weights alone."""
    units: list[nn.Module] = []
    for part in pipeline.own:
        units += [part] if is_block(part) else part.children()
    return [unit for unit in units if any(True for _ in unit.parameters())]


def _cut_out(
    parameters: Sequence[nn.Parameter], shapes: Sequence[torch.Size], part: Tensor, index: int
) -> Pieces:
    """The pieces of the parameters that lie in part `index` of a flat tensor, as views of it."""
    found: list[tuple[nn.Parameter, Tensor]] = []
    begin, at = index * len(part), 0
    for parameter, shape in zip(parameters, shapes, strict=True):
        ends = [min(max(x - begin, 0), len(part)) for x in (at, at + shape.numel())]
        if ends[0] < ends[1]:
            found.append((parameter, part[ends[0] : ends[1]]))
        at += shape.numel()
    return found


def make_sharded_replicas(
    zero: int,
    pipeline: Pipeline,
    dp: Axis,
    optimizer_class: type[Optimizer],
    bucket_size: int,
    **settings: Any,
) -> ShardedStates | ShardedParameters:
    """The replicas of ZeRO stage 1, 2 or 3."""
    if zero == 3:
        return ShardedParameters(pipeline, dp, optimizer_class, **settings)
    kind = ZeroStage1 if zero == 1 else ZeroStage2
    return ShardedStates(pipeline, dp, kind, optimizer_class, bucket_size, **settings)
