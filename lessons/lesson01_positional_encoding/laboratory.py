"""What the checks compare an answer with: the formulas, number by number, in float64."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Angle = Callable[[float, int, int], float]


def angle(position: float, column: int, dim: int, base: float = 10_000) -> float:
    """The angle of a column at a position; the two columns of a pair share it."""
    pair = column // 2
    return position / base ** (2 * pair / dim)


def codes(positions: Sequence[int], dim: int, rule: Angle = angle) -> Tensor:
    """PE of several positions, one a row, float32; `rule` gives the angles."""
    rows = [
        [(math.cos if column % 2 else math.sin)(rule(p, column, dim)) for column in range(dim)]
        for p in positions
    ]
    return torch.tensor(rows, dtype=torch.float64).float()


def pair_angles(position: float, dim: int, base: float = 10_000) -> list[float]:
    """The angles of all pairs at a position, first pair first."""
    return [angle(position, column, dim, base) for column in range(0, dim, 2)]


def turn(angles: Sequence[float], *, halves: bool = False) -> Tensor:
    """The matrix, float64, that turns each pair (sin, cos) of a column vector by its angle.

    Pairs stand side by side or, with `halves`, in the first and the second half of the vector.
    """
    n = len(angles)
    matrix = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    for i, a in enumerate(angles):
        s, c = (i, n + i) if halves else (2 * i, 2 * i + 1)
        matrix[s, s] = matrix[c, c] = math.cos(a)
        matrix[s, c], matrix[c, s] = math.sin(a), -math.sin(a)
    return matrix


def turned(
    x: Tensor,
    positions: Sequence[float],
    *,
    halves: bool = False,
    backwards: bool = False,
    base: float = 10_000,
) -> Tensor:
    """Rotary embedding of x (..., L, K) by the matrices of `turn`, in x's dtype."""
    sign = -1 if backwards else 1
    matrices = [turn(pair_angles(sign * p, x.shape[-1], base), halves=halves) for p in positions]
    rows = zip(x.double().unbind(dim=-2), matrices, strict=True)
    return torch.stack([row @ matrix for row, matrix in rows], dim=-2).to(x.dtype)


def turned_in_sequence(x: Tensor, positions: Sequence[float]) -> Tensor:
    """`turned` for x (L, K), where a pair's second feature meets the first one already turned."""
    angles = torch.tensor([pair_angles(p, x.shape[-1]) for p in positions])
    result = turned(x, positions)
    result[:, 1::2] = result[:, 0::2] * angles.sin() + x[:, 1::2] * angles.cos()
    return result


def turned_unevenly(x: Tensor, positions: Sequence[float]) -> Tensor:
    """`turned` for x (L, K), where feature j has the angle of pair j mod K / 2, not of its own."""
    angles = torch.tensor([2 * pair_angles(p, x.shape[-1]) for p in positions])
    across = torch.stack([-x[:, 1::2], x[:, 0::2]], dim=-1).flatten(1)
    return x * angles.cos() + across * angles.sin()
