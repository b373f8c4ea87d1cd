"""The tile loop as one GPU kernel in Triton; import it where there is a GPU, and nowhere else.

Forward alone: what a tile's scores are computed into never leaves the chip. Written beside
`tiled_forward`, line for line. Its values are compared with torch's in Triton's interpreter, on a
CPU (TRITON_INTERPRET=1, Triton 3.9, a test where Triton is installed); it has not been run or
measured on a GPU where this course was made.
`python -m shared.long_context.triton_kernel` compares it with torch's own, values and seconds.
Source: triton-lang.org, tutorial 06, "Fused Attention".
"""

import math
import os

import torch
import torch.nn.functional as F
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from jaxtyping import Float
from torch import Tensor

from shared.errors import InputError
from shared.measuring.timing import fastest_seconds

TILE = 64


@triton.jit
def _tile_loop(
    q, k, v, output, logsumexp, length, scale,
    d: tl.constexpr, tile: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(1), tl.program_id(0) * tile
    places, features = i + tl.arange(0, tile), tl.arange(0, d)
    base = row * length * d
    at = base + places[:, None] * d + features[None, :]
    queries = tl.load(q + at, mask=places[:, None] < length, other=0.0)
    top = tl.full([tile], float("-inf"), tl.float32)
    total, summed = tl.zeros([tile], tl.float32), tl.zeros([tile, d], tl.float32)
    end = tl.minimum(i + tile, length) if is_causal else length
    for j in range(0, end, tile):
        keys = j + tl.arange(0, tile)
        there = base + keys[:, None] * d + features[None, :]
        key = tl.load(k + there, mask=keys[:, None] < length, other=0.0)
        value = tl.load(v + there, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(queries, tl.trans(key)) * scale
        seen = keys[None, :] < length
        if is_causal:
            seen = seen & (keys[None, :] <= places[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        # Each query sees key 0 in the first tile, so the maximum is a number from then on.
        higher = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        top = higher
    tl.store(output + at, (summed / total[:, None]).to(queries.dtype), places[:, None] < length)
    tl.store(logsumexp + row * length + places, top + tl.log(total), places < length)


def triton_forward(
    q: Float[Tensor, "*batch length d"],
    k: Float[Tensor, "*batch length d"],
    v: Float[Tensor, "*batch length d"],
    is_causal: bool = False,
) -> tuple[Float[Tensor, "*batch length d"], Float[Tensor, "*batch length"]]:
    """Return output and logsumexp as `tiled_forward` does, for as many keys as queries.

    Raises InputError where tensors are not on a GPU (and Triton does not interpret), shapes differ,
    or d is no power of two from 16 up.
    """
    d, runs = q.shape[-1], q.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if not runs or not q.shape == k.shape == v.shape or d < 16 or d & (d - 1):
        raise InputError(
            f"q, k, v of {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} on {q.device}: equal "
            "shapes on a GPU would do, whose width is a power of two from 16 up"
        )
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    length = q.shape[-2]
    output, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    grid = triton.cdiv(length, TILE), q.numel() // (length * d)
    tensors = q, k, v, output, logsumexp
    _tile_loop[grid](*tensors, length, 1 / math.sqrt(d), d=d, tile=TILE, is_causal=is_causal)
    return output, logsumexp


def main() -> None:
    for length in (1024, 4096, 16_384):
        q, k, v = (torch.randn(1, 16, length, 64, device="cuda").bfloat16() for _ in range(3))
        ours, theirs = (
            lambda q=q, k=k, v=v: triton_forward(q, k, v, True)[0],
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        gap = (ours() - theirs()).abs().max().item()
        ms = [1000 * fastest_seconds(run, 20, "cuda") for run in (ours, theirs)]
        print(f"{length:6}: off by {gap:.1e}; {ms[0]:.2f} ms, torch's own {ms[1]:.2f} ms")


if __name__ == "__main__":
    main()
