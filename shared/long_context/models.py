"""Whole models whose sequences lie in parts on the ranks of a group."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn

from shared.ddp.averaging import sum_flat
from shared.errors import InputError
from shared.long_context.exchange import all_to_all_attention
from shared.long_context.orders import Order, balanced_order, plain_order, positions_of
from shared.long_context.ring import ring_attention
from shared.model.attention import MultiHeadAttention, Rotation
from shared.model.language_model import LanguageModel
from shared.model.transformer import Transformer
from shared.ranks.collectives import Group
from shared.tensor_parallel.blocks import keep_rank_0

Way = Literal["ring", "all_to_all"]
HIDDEN = -1e4  # divided by the root of the width and exponentiated it is 0; 16 bits can hold it
AttendParts = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def context_parallel(
    model: LanguageModel | Transformer,
    group: Group = None,
    way: Way = "ring",
    attend: AttendParts | None = None,
    order: Order | None = None,
) -> Order:
    """Let each rank of a group have a part of every sequence, in place; return who has which.

    Afterwards the model takes a rank's part of the tokens (`cut_sequence`) and returns that part's
    logits. All ranks have all parameters, those of rank 0; each one's gradients are those of its
    own positions, so `sum_gradients` has to follow backward. `attend(q, k, v, is_causal)` takes
    the place of this module's ring or exchange, and `order` that of the way's usual one.

    Raises InputError for attention with dropout, for heads that the ranks cannot share where the
    way is all_to_all, and for heads that share keys where it is the ring.
    """
    n = dist.get_world_size(group)
    if order is None:
        order = balanced_order(n) if way == "ring" else plain_order(n)
    if attend is None and way == "ring":
        attend = partial(_ring, group, order)
    elif attend is None:
        attend = partial(_exchange, group)
    for module in list(model.modules()):
        if isinstance(module, MultiHeadAttention):
            _check_attention(module, n, way)
            module.kernel = partial(attend_parts, attend)
            if module.rotate is not None:
                module.rotate = partial(_rotate_part, module.rotate, order, group)
    for name, child in list(model.named_children()):
        if name.endswith("positions"):
            setattr(model, name, PartOfPositions(child, order, group))
    keep_rank_0(model, group)
    return order


def attend_parts(
    attend: AttendParts,
    q: Float[Tensor, "batch heads target head_dim"],
    k: Float[Tensor, "batch heads source head_dim"],
    v: Float[Tensor, "batch heads source head_dim"],
    mask: Bool[Tensor, "#batch 1 1 source"] | None,
    causal: bool,
) -> Float[Tensor, "batch heads target head_dim"]:
    """What attends in place of MultiHeadAttention's heads; a mask may hide keys, such as padding.

    A mask would have to travel beside the keys. It travels inside of them: one feature more, 1 in
    each query and in each hidden key so low that its weight is 0.
    """
    if mask is not None:
        q, k = _with_hidden(q, k, mask)
    return attend(q, k, v, causal)


def sum_gradients(model: nn.Module, group: Group = None) -> None:
    """Add up over the ranks what each knows of its own positions; call after backward."""
    sum_flat((p.grad for p in model.parameters() if p.grad is not None), group)


class PartOfPositions(nn.Module):
    """The positions of a model whose sequences are in parts: each chunk begins where it lies."""

    def __init__(self, positions: nn.Module, order: Order, group: Group) -> None:
        super().__init__()
        self.inner, self.order, self.group = positions, order, group

    def forward(
        self, x: Float[Tensor, "batch part d_model"], start: int = 0
    ) -> Float[Tensor, "batch part d_model"]:
        """Return x with the positions of this rank's chunks."""
        mine = self.order[dist.get_rank(self.group)]
        chunks = x.chunk(len(mine), 1)
        size = chunks[0].shape[1]
        placed = [self.inner(c, start + i * size) for i, c in zip(mine, chunks, strict=True)]
        return torch.cat(placed, 1)


def _ring(group: Group, order: Order, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return ring_attention(q, k, v, group, causal, order)


def _exchange(group: Group, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return all_to_all_attention(q, k, v, group, causal)


def _with_hidden(q: Tensor, k: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of one feature more, whose product is added to the score of hidden keys."""
    d = q.shape[-1]
    q = q * ((d + 1) / d) ** 0.5  # scores are divided by the root of the width, now one more
    low = k.new_zeros(k.shape[:-1]).masked_fill(~mask[:, :, 0], HIDDEN)  # (B, H, S)
    return torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, low.unsqueeze(-1)], -1)


def _rotate_part(inner: Rotation, order: Order, group: Group, x: Tensor, at: Tensor) -> Tensor:
    """Turn queries or keys by where their chunks lie in the whole sequence."""
    length = x.shape[-2] * dist.get_world_size(group)
    mine = positions_of(order, dist.get_rank(group), length).to(at.device)
    return inner(x, mine[at])


def _check_attention(attention: MultiHeadAttention, ranks: int, way: Way) -> None:
    if attention.dropout:
        raise InputError(
            f"attention drops weights at a rate of {attention.dropout}: by tiles there are no "
            "weights to drop; set dropout to 0"
        )
    kv_heads = getattr(attention, "num_kv_heads", attention.num_heads)  # lesson 23's
    if way == "ring" and kv_heads != attention.num_heads:
        heads = f"{attention.num_heads} heads share {kv_heads} of keys"
        raise InputError(f"{heads}: the ring takes as many of each; use all_to_all")
    for heads in (attention.num_heads, kv_heads) if way == "all_to_all" else ():
        if heads % ranks:
            words = f"{heads} heads cannot be shared out evenly over {ranks} ranks"
            ring = (
                ": the ring cuts no heads, and would do" if kv_heads == attention.num_heads else ""
            )
            raise InputError(words + ring)
