"""A pipeline with its table and its optimizer, as an engine."""

import torch
import torch.distributed as dist
from torch import Tensor

from shared.data.rows import Rows, Targets, inputs_and_targets, own_rows
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import Table
from shared.sharding.clipping import clip_parts, scale_to
from shared.training.reference_run import sum_of_losses


class PipelineEngine:
    """Every rank has the tokens of a step; its stages train by the table, one micro-batch each.

    Args:
        pipeline: over all ranks of the world.
        table: a schedule's, for as many micro-batches as a step is to have.
        optimizer: of this rank's stages.
        pad_id: of sentence pairs: targets that have no loss.
    """

    share = (0, 1)

    def __init__(
        self, pipeline: Pipeline, table: Table, optimizer: torch.optim.Optimizer, pad_id: int = 0
    ) -> None:
        self.model, self.table, self.optimizer, self.pad_id = pipeline, table, optimizer, pad_id
        self._device = next(pipeline.parameters()).device
        self.num_micro_batches = 1 + max(c.micro_batch for row in table for c in row if c)

    def forward_backward(self, batch: Rows, num_tokens: int | None = None) -> Tensor:
        """The whole loss on the rank of the last stage, 0 on the others."""
        num_tokens = batch.num_tokens if num_tokens is None else num_tokens
        pieces = own_rows(batch, 0, 1, self.num_micro_batches)
        inputs, targets = inputs_and_targets(pieces, self.pad_id)

        def loss(logits: Tensor, targets: Targets) -> Tensor:
            return sum_of_losses(logits, *targets) / num_tokens

        parts = self.model.train_step(self.table, inputs, loss, targets)
        return sum(parts, torch.zeros((), device=self._device))

    def average_gradients(self) -> None:
        """Nothing: the pipeline has summed those of tied parameters."""

    def clip(self, max_norm: float) -> Tensor:
        """A tied parameter, which several ranks have, counts on the first of them."""
        counted, copies = list[Tensor](), list[Tensor]()
        for p in self.model.parameters():
            if p.grad is not None:
                again = p in self.model.tied and self.model.tied[p].rank() > 0
                (copies if again else counted).append(p.grad)
        norm = clip_parts(counted, max_norm, None, device=self._device)
        scale_to(copies, norm, max_norm)
        return norm

    def global_loss(self, part: Tensor) -> Tensor:
        """The last stage's, on every rank."""
        total = part.clone()
        dist.all_reduce(total)
        return total
