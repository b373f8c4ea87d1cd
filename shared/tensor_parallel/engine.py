"""A model that is cut over tensor-parallel ranks, as an engine, with copies of it or one alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared.data.rows import Rows, Text, inputs_and_targets, padded
from shared.ddp.averaging import average_flat
from shared.ranks.collectives import Group, local_part
from shared.sharding.clipping import clip_parts
from shared.tensor_parallel.marks import cut_dim
from shared.tensor_parallel.models import parallel_model, sum_partial_gradients
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from shared.training.reference_run import reference_model, reference_optimizer

CrossEntropy = Callable[[Tensor, Tensor, Group, int], Tensor]


class TensorParallelEngine:
    """Every rank of tp has the same rows, and its own part of the matrices and of the logits.

    Args:
        model: cut already (`parallel_model`).
        optimizer: of the parts that this rank has.
        tp: the ranks that share a copy of the model; None: all.
        dp: this rank's peers in the other copies, which share out the rows; None: one copy.
        sequence_parallel: lengths are padded to a multiple of tp: the padding has no loss.
        cast: what forward runs in.
        cross_entropy: of logits that are cut over tp: (logits, targets, tp, ignored target).
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        tp: Group = None,
        dp: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
        cast: AbstractContextManager | None = None,
        cross_entropy: CrossEntropy = vocab_parallel_cross_entropy,
    ) -> None:
        self.model: nn.Module = model
        self.optimizer, self.tp, self.dp = optimizer, tp, dp
        self.multiple = dist.get_world_size(tp) if sequence_parallel else 1
        self.pad_id, self.cast = model.config.pad_id, cast or nullcontext()
        self.cross_entropy = cross_entropy
        self.share = (0, 1) if dp is None else (dp.rank(), dp.size())

    def forward_backward(self, batch: Rows, num_tokens: int | None = None) -> Tensor:
        """The loss of these rows, times their share of the tokens; the same on all ranks of tp."""
        num_tokens = batch.num_tokens if num_tokens is None else num_tokens
        batch = padded(batch, self.multiple, self.pad_id)
        inputs = (batch.tokens,) if isinstance(batch, Text) else (batch.src, batch.tgt_in)
        _, (targets,) = inputs_and_targets([batch], self.pad_id)
        with self.cast:
            logits = self.model(*inputs)  # (B, L, V / tp)
        losses = self.cross_entropy(logits, targets.tokens, self.tp, targets.ignored)
        part = losses.sum() / num_tokens
        (part * self.share[1]).backward()  # the copies average, and parts are to be added
        return part.detach()

    def average_gradients(self) -> None:
        """Add what each rank knows of its own positions, then average over the copies."""
        sum_partial_gradients(self.model, self.tp)  # of norms, under sequence parallelism
        if self.dp is not None:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            average_flat(map(local_part, grads), self.dp)

    def clip(self, max_norm: float) -> Tensor:
        """A cut parameter counts on every rank of tp, of the others, which all have, one."""
        parts, copies = list[Tensor](), list[Tensor]()
        for p in self.model.parameters():
            if p.grad is not None:
                (parts if _is_cut(p) else copies).append(local_part(p.grad))
        device = (parts + copies)[0].device
        return clip_parts(parts, max_norm, self.tp, copies=copies, device=device)

    def global_loss(self, part: Tensor) -> Tensor:
        """The sum over the copies."""
        total = part.clone()
        if self.dp is not None:
            dist.all_reduce(total, group=self.dp)
        return total


def reference_engine(sequence_parallel: bool = False) -> TensorParallelEngine:
    """The reference run's model and optimizer, cut over all ranks."""
    model, everyone = reference_model(), dist.group.WORLD
    assert everyone is not None, "an engine needs a process group"
    parallel_model(model, everyone, sequence_parallel)
    optimizer = reference_optimizer(list(model.parameters()))
    return TensorParallelEngine(model, optimizer, sequence_parallel=sequence_parallel)


def _is_cut(p: nn.Parameter) -> bool:
    if isinstance(p, DTensor):
        return any(place.is_shard() for place in p.placements)
    return cut_dim(p) is not None
