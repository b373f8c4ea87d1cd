"""Training on a mesh of three axes: each part of a model on its own rank, and what they send."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.data.rows import Rows, Targets, inputs_and_targets, own_rows, padded
from shared.ddp.averaging import sum_flat
from shared.errors import InputError
from shared.parallel3d.cutting import Model, check_widths, cut_model, cut_stages, make_table
from shared.parallel3d.mesh import Mesh3D
from shared.parallel3d.norm import norm_of_pieces
from shared.parallel3d.replicas import Replicas, ReplicatedWeights
from shared.parallel3d.sharded_replicas import make_sharded_replicas
from shared.sharding.clipping import scale_to
from shared.sharding.stages import BUCKET_SIZE
from shared.tensor_parallel.marks import cut_dim, is_partial
from shared.tensor_parallel.models import named_tensors, uncut
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy


class Parallel3D:
    """A language model or Transformer, trained on the mesh as by one process.

    Args:
        model: the same on every rank in its sizes; rank 0's numbers count. Its
            parameters are freed: do not use it afterwards.
        mesh: what `make_groups` has made.
        optimizer_class: torch.optim.AdamW, and its settings as keywords.
        num_micro_batches: those of one replica in a step.
        schedule: "gpipe", "1f1b" or "interleaved", the last with `chunks` stages a rank.
        zero: what is sharded over the replicas: 0 nothing, 1 the optimizer's states, 2 gradients
            as well, 3 parameters as well. `ReplicatedWeights`, `ShardedStates` and
            `ShardedParameters` say what a rank keeps.
        checkpoint: a layer keeps its input alone, and is computed again in backward.
        sequence_parallel: what lies between the layers' cut parts is cut along the sequence.
            Each rank of tp then sends its part from stage to stage, without it the whole vectors.
        cast: what the model's parts run in, also where they are computed again.
        bucket_size: elements that travel at once under ZeRO 1 and 2.
        costs: those of the model's parts (`parts_of`), by which it is cut into stages; without
            them the layers are shared out as evenly as can be (`stage_layers` of the planner).

    Dropout: seed each replica and stage for itself, and the ranks of tp alike. Raises InputError,
    before the model is changed, where the mesh does not fit the model or the schedule.
    """

    share = (0, 1)  # every rank is given a whole batch, of which its replica takes its own rows

    def __init__(
        self,
        model: Model,
        mesh: Mesh3D,
        optimizer_class: type[Optimizer],
        *,
        num_micro_batches: int,
        schedule: str = "1f1b",
        chunks: int = 1,
        zero: int = 0,
        checkpoint: bool = False,
        sequence_parallel: bool = False,
        cast: torch.autocast | None = None,
        costs: Sequence[float] | None = None,
        bucket_size: int = BUCKET_SIZE,
        **settings: Any,
    ) -> None:
        self.mesh, self.num_micro_batches = mesh, num_micro_batches
        self.table = make_table(schedule, mesh.pp.size, num_micro_batches, chunks)
        self.cuts = cut_stages(model, mesh.pp.size * chunks, costs)
        check_widths(model, mesh.tp.size)
        if zero not in range(4):
            raise InputError(f"zero must be a stage of ZeRO, 0 to 3, got {zero}")
        self.pad_id, self.sequence_parallel = model.config.pad_id, sequence_parallel
        self.pipeline = cut_model(
            model,
            mesh,
            self.cuts,
            recompute=checkpoint,
            sequence_parallel=sequence_parallel,
            cast=cast,
        )
        self.names = _names(model, self.pipeline)
        given = (self.pipeline, mesh.dp, optimizer_class)
        if zero == 0:
            self.replicas: Replicas = ReplicatedWeights(*given, **settings)
        else:
            self.replicas = make_sharded_replicas(zero, *given, bucket_size, **settings)

    @property
    def model(self) -> nn.Module:
        """This rank's stages."""
        return self.pipeline

    @property
    def optimizer(self) -> Optimizer:
        """What `set_learning_rate` sets."""
        return self.replicas.optimizer

    def forward_backward(self, batch: Rows, num_tokens: int | None = None) -> Tensor:
        """Forward and backward of this replica's rows of a global batch, the same on every rank.

        Returns the loss of the global batch, the same on every rank. Raises InputError for fewer
        rows than micro-batches. An error in training drops all gradients, also an earlier call's.
        """
        dp, tp = self.mesh.dp, self.mesh.tp.group
        num_tokens = batch.num_tokens if num_tokens is None else num_tokens
        if self.sequence_parallel:
            batch = padded(batch, self.mesh.tp.size, self.pad_id)
        pieces = own_rows(batch, dp.index, dp.size, self.num_micro_batches)
        inputs, targets = inputs_and_targets(pieces, self.pad_id)
        # The replicas' gradients are averaged afterwards, and their parts are to be summed.
        scale = dp.size / max(num_tokens, 1)

        def loss(logits: Tensor, targets: Targets) -> Tensor:
            losses = vocab_parallel_cross_entropy(logits, targets.tokens, tp, targets.ignored)
            return losses.sum() * scale

        try:
            parts = self.pipeline.train_step(self.table, inputs, loss, targets)
        except Exception:
            self.replicas.drop()
            raise
        like = next(self.pipeline.parameters())
        total = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))
        for part in parts:
            total += part / dp.size
        for axis in (self.mesh.pp, dp):  # the last stage alone has a loss
            dist.all_reduce(total, group=axis.group)
        return total

    def global_loss(self, part: Tensor) -> Tensor:
        """What forward_backward() returns is that already."""
        return part

    def average_gradients(self) -> None:
        """Let the gradients be those of the global batch. Call it between backward and step."""
        self.replicas.average()
        self._sum_over_positions()

    def _sum_over_positions(self) -> None:
        """Under sequence parallelism: add what each rank of tp knows of its own positions."""
        pieces = self.replicas.pieces()
        own = [grad for p, grad in pieces if is_partial(p)]
        sum_flat(own, self.mesh.tp.group)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients to this norm of the whole model's; returns what it was."""
        pieces = self.replicas.pieces()
        axes = [self.mesh.tp, self.mesh.pp]
        if self.replicas.in_parts:
            axes.append(self.mesh.dp)
        norm = norm_of_pieces(pieces, *(axis.group for axis in axes))
        scale_to([gradient for _, gradient in pieces], norm, max_norm)
        return norm

    def whole_state_dict(self, key: str | None = None) -> dict[str, Tensor]:
        """The uncut model's state dict, on the CPU of every rank; a collective.

        With a `key` ("exp_avg"), what the optimizer keeps for each parameter instead.
        """
        own: dict[str, Tensor] = {}
        pieces = self.replicas.whole(key)
        for name, tensor in self.names.items():
            value = pieces.get(tensor) if isinstance(tensor, nn.Parameter) else tensor
            if value is not None and (key is None or isinstance(tensor, nn.Parameter)):
                value = uncut(value, cut_dim(tensor), self.mesh.tp.group)
                own[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        found: list[Any] = [None] * self.mesh.pp.size
        dist.all_gather_object(found, own, group=self.mesh.pp.group)
        return {name: value for stage in found for name, value in stage.items()}


def _names(model: nn.Module, pipeline: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters and saved buffers by their names in the uncut model."""
    own = {id(tensor) for tensor in (*pipeline.parameters(), *pipeline.buffers())}
    return {name: tensor for name, tensor in named_tensors(model).items() if id(tensor) in own}
