"""Bytes and FLOPs of attention, counted operator by operator; the machine's two limits."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shared.long_context.orders import Order
from shared.measuring.timing import fastest_seconds


class _Moved(TorchDispatchMode):
    """Adds up bytes; `_unsafe_view`, which follows a product of many dims, moves none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.total += sum(x.nbytes for x in (*given, *made))
        return result


def moved_bytes(run: Callable[[], Any]) -> int:
    """Bytes that the operators read and write, each tensor each time; views move nothing.

    What a cache spares is not known here: it is what the operators ask for.
    """
    with _Moved() as moved:
        run()
    return moved.total


def counted_flops(run: Callable[[], Any]) -> int:
    """FLOPs of the matrix products, by torch's own formulas."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def fused_flops(queries: int, keys: int, d: int, rows: int) -> int:
    """FLOPs of the two products of one attention, not causal: what the fused kernel computes."""
    return 4 * rows * queries * keys * d


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operator by operator: scores, softmax, product; not causal."""
    return (q / q.shape[-1] ** 0.5 @ k.mT).softmax(-1) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's one kernel; not causal."""
    return F.scaled_dot_product_attention(q, k, v)


def machine_limits() -> tuple[float, float]:
    """FLOPs a second of a large matrix product, bytes a second of a copy from memory to memory."""
    a = torch.randn(1024, 1024)
    product = fastest_seconds(lambda: a @ a, 15, "cpu")
    source = torch.zeros(2**26)  # 256 MiB: more than caches hold
    target = torch.empty_like(source)
    copy = fastest_seconds(lambda: target.copy_(source), 5, "cpu")
    return 2 * 1024**3 / product, 2 * source.nbytes / copy


def work_by_step(order: Order, length: int) -> list[list[float]]:
    """Percent of all seen pairs of positions that each rank computes in each step of the ring."""
    n, chunks = len(order), sum(len(each) for each in order)
    size = length // chunks
    full, diagonal = size * size, size * (size + 1) // 2
    total = length * (length + 1) / 2

    def pairs(mine: Any, theirs: Any) -> int:
        return sum(full * (b < a) + diagonal * (a == b) for a in mine for b in theirs)

    return [
        [100 * pairs(order[r], order[(r - step) % n]) / total for r in range(n)]
        for step in range(n)
    ]


def ring_steps(by_step: list[list[float]]) -> float:
    """Percent of all pairs for which a ring waits: each step lasts as long as its slowest rank."""
    return sum(max(row) for row in by_step)
