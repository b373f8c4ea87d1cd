"""A language model whose context one process could not keep: bytes counted, losses compared."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lessons.lesson17_long_context.experiments.torch_ring import torch_ring
from shared.long_context.models import Way, context_parallel, sum_gradients
from shared.long_context.orders import Order, balanced_order, cut_sequence, plain_order
from shared.long_context.ring import ring_attention
from shared.measuring.largest import largest
from shared.measuring.memory import saved_bytes
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel

VOCAB, WIDTH, HEADS, LAYERS = 64, 48, 12, 2
ENGINES = ("ring, plain order", "ring, balanced", "all to all")


def make_model(length: int, fused: bool) -> LanguageModel:
    """A small language model, the same in every process."""
    torch.manual_seed(17)
    return LanguageModel(
        TransformerConfig(
            vocab_size=VOCAB, d_model=WIDTH, num_heads=HEADS, num_layers=LAYERS,
            d_ff=4 * WIDTH, dropout=0.0, max_len=length, fused=fused,
        )
    )  # fmt: skip


def tokens_of(length: int) -> tuple[Tensor, Tensor]:
    """One row in which each token follows from the one before, and what follows."""
    ids = [1]
    for i in range(length):
        ids.append((5 * ids[-1] + 1 + i % 2) % VOCAB)
    whole = torch.tensor(ids)[None]
    return whole[:, :-1], whole[:, 1:]


def _loss(model: LanguageModel, tokens: Tensor, follow: Tensor, length: int) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), follow.flatten(), reduction="sum") / length


def _parts(model: LanguageModel, way: Way | None, length: int) -> list[Tensor]:
    whole = list(tokens_of(length))
    if way is None:
        return whole
    order = context_parallel(model, None, way)
    return [cut_sequence(x, order, dist.get_rank(), 1) for x in whole]


def kept_by_model(rank: int, way: Way | None, length: int, fused: bool = True) -> int:
    """Bytes that this rank keeps for backward, parameters left out; None is one process."""
    model = make_model(length, fused)
    parts = _parts(model, way, length)
    parameters = tuple(model.parameters())
    return saved_bytes(lambda: _loss(model, *parts, length), ignore=parameters)


def losses_of(rank: int, way: Way | None, length: int, steps: int) -> list[float]:
    """The whole loss before each step of training on one row."""
    model = make_model(length, fused=True)
    parts = _parts(model, way, length)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(model, *parts, length)
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        seen.append(total.item())
    return seen


def compared(rank: int, attends: Any, length: int = 48) -> list[tuple[float, float, float]]:
    """For each engine: the largest difference from one process; parts sent in forward, backward.

    `attends` are functions of q, k, v and an order. Values and gradients, causal, float64.
    """
    torch.manual_seed(17)
    n = dist.get_world_size()
    whole = [torch.randn(2, 12, length, 4, dtype=torch.float64) for _ in range(4)]
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    q, k, v = leaves
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = [want, *torch.autograd.grad(want, leaves, whole[3])]
    found = []
    for name, attend in zip(ENGINES, attends, strict=True):
        order: Order = balanced_order(n) if "balanced" in name else plain_order(n)
        op = "all_to_all" if "all" in name.split() else "send"
        mine = [cut_sequence(x, order, rank, 2).requires_grad_() for x in whole[:3]]
        with count_traffic() as forward:
            y = attend(*mine, order)
        with count_traffic() as back:
            grads = torch.autograd.grad(y, mine, cut_sequence(whole[3], order, rank, 2))
        own = [cut_sequence(x, order, rank, 2) for x in wanted]
        gap = largest((a - b).abs().max().item() for a, b in zip([y, *grads], own, strict=True))
        part = mine[1].nbytes
        found.append((gap, forward.bytes_of(op) / part, back.bytes_of(op) / part))
    return found


def beside_torch(rank: int, length: int = 48) -> tuple[float, list[str]]:
    """The largest difference between our ring and torch's, float32; what torch's sends."""
    torch.manual_seed(17)
    n = dist.get_world_size()
    order = balanced_order(n)
    mine = [cut_sequence(torch.randn(2, 4, length, 8), order, rank, 2) for _ in range(4)]
    with count_traffic() as traffic:
        theirs = torch_ring(*mine)
    leaves = [x.clone().requires_grad_() for x in mine[:3]]
    y = ring_attention(*leaves, None, True, order)
    ours = [y, *torch.autograd.grad(y, leaves, mine[3])]
    gap = largest((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    part = mine[0].nbytes
    return gap, [f"{call.op} of {call.num_bytes // part} parts" for call in traffic.calls]
