"""Lesson 04's reference run with every sequence in parts on the ranks of a group."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared.data.batching import Batch
from shared.long_context.models import AttendParts, Way, context_parallel, sum_gradients
from shared.long_context.orders import cut_sequence
from shared.model.transformer import Transformer
from shared.ranks.collectives import Group
from shared.training.reference_run import CONFIG, Step, reference_model, reference_optimizer
from shared.training.schedules import set_learning_rate


def context_reference(
    group: Group = None, way: Way = "ring", attend: AttendParts | None = None
) -> tuple[Transformer, Step]:
    """The reference model over a group and its step: each rank has some positions of all rows."""
    model = reference_model()
    order = context_parallel(model, group, way, attend)
    optimizer = reference_optimizer(list(model.parameters()))
    rank, chunks = dist.get_rank(group), sum(len(own) for own in order)

    def mine(tokens: torch.Tensor) -> torch.Tensor:
        # Padding that nobody attends to, and that has no loss, until the chunks are equal.
        padded = F.pad(tokens, (0, -tokens.shape[1] % chunks), value=CONFIG.pad_id)
        return cut_sequence(padded, order, rank, 1)

    def step(batch: Batch, rate: float) -> float:
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        logits = model(mine(batch.src), mine(batch.tgt_in))  # (B, T / n, V)
        follow = mine(batch.tgt_out).flatten()
        losses = F.cross_entropy(
            logits.flatten(0, 1), follow, ignore_index=CONFIG.pad_id, reduction="sum"
        )
        loss = losses / batch.num_tokens  # a part of the mean, whatever tokens this rank has
        loss.backward()
        sum_gradients(model, group)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        return total.item()

    return model, step
