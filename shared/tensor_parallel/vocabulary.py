"""A vocabulary over several ranks: embedding, and a loss that never has a row of logits whole."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shared.errors import InputError
from shared.ranks.collectives import Group
from shared.tensor_parallel.conjugates import Message, sum_over_ranks
from shared.tensor_parallel.linears import cut


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are shared out: a rank looks up its own tokens, the others are 0."""

    def __init__(
        self, embedding: nn.Embedding, group: Group = None, leave: Message = sum_over_ranks
    ) -> None:
        """Keep this rank's rows of rank 0's embedding.

        Raises InputError where the ranks cannot have equal parts of the vocabulary.
        """
        super().__init__()
        self.group, self.leave = group, leave
        self.weight = cut(embedding.weight, 0, group, "tokens of a vocabulary")

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Return the tokens' vectors: one all-reduce."""
        own, mine = place(tokens, self.weight.shape[0], self.group)
        vectors = F.embedding(own, self.weight).masked_fill(~mine.unsqueeze(-1), 0.0)
        return self.leave(vectors, self.group)


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*batch part"],
    targets: Int[Tensor, "*batch"],
    group: Group = None,
    ignore_index: int = -100,
) -> Float[Tensor, "*batch"]:
    """Return each position's cross-entropy, from this rank's part of the vocabulary's logits.

    What `F.cross_entropy(reduction="none")` gives for the whole rows, with 0 where the target is
    `ignore_index`; float32 at the least. Three numbers a position are sent in forward (the largest
    logit, the sum of the exponentials, the target's logit), none in backward. On the CPU, raises
    InputError for a target that is outside of the whole vocabulary.
    """
    if logits.device.type == "cpu" and targets.numel():  # a GPU would have to be waited for
        size = logits.shape[-1] * dist.get_world_size(group)
        outside = ((targets < 0) | (targets >= size)) & (targets != ignore_index)
        if outside.any():
            raise InputError(
                f"target {int(targets[outside][0])} is outside of the vocabulary of {size} tokens"
            )
    return _CrossEntropy.apply(logits, targets, group, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: Group, ignore_index: int
    ) -> Tensor:
        ranks = dist.get_world_size(group)
        wide = torch.promote_types(logits.dtype, torch.float32)
        top = logits.amax(-1).to(wide)
        if ranks > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits.to(wide) - top.unsqueeze(-1)  # a new tensor, V / t wide, the only one
        own, mine = place(targets, logits.shape[-1], group)
        right = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        softmax = shifted.exp_()
        sums = torch.stack([softmax.sum(-1), right])
        if ranks > 1:
            dist.all_reduce(sums, group=group)
        softmax /= sums[0].unsqueeze(-1)
        ignored = targets == ignore_index
        ctx.save_for_backward(softmax, own, mine, ignored)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, own, mine, ignored = ctx.saved_tensors
        upstream = gradients[0].masked_fill(ignored, 0.0).unsqueeze(-1)
        gradient = softmax * upstream
        gradient.scatter_add_(-1, own.unsqueeze(-1), -upstream * mine.unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None


def place(
    tokens: Int[Tensor, "*batch"], part: int, group: Group
) -> tuple[Int[Tensor, "*batch"], Tensor]:
    """Tokens as numbers in this rank's part of the vocabulary, and which lie in it (else 0)."""
    own = tokens - part * dist.get_rank(group)
    mine = (own >= 0) & (own < part)
    return own.masked_fill(~mine, 0), mine


VOCABULARY_MULTIPLE = (
    60  # the vocabulary is padded_vocabulary to a multiple of this, whatever the number of ranks
)


def padded_vocabulary(size: int) -> int:
    """A vocabulary's size, rounded up so that up to six ranks have equal parts."""
    return math.ceil(size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
