"""What attention keeps for the backward pass, by formula, and the figure of the script's sweep."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shared.plots import MEANING, theory, use_style

FULL = "out of memory"  # what a row says where a measurement did not fit


def kept_by_module(
    batch: int,
    length: int,
    d_model: int,
    num_heads: int,
    *,
    fused: bool,
    causal: bool = False,
    itemsize: int = 4,
) -> int:
    """Bytes that self-attention keeps for backward, without dropout; exact on a CPU.

    Five tensors of (B, L, D): the input, queries, keys, values, and the heads' output. By hand
    the weights (B, H, L, L) come on top, and with `causal` the mask, one byte an entry. The fused
    kernel keeps one float32 per head and query instead: the logarithm of the softmax's
    denominator, from which backward makes the weights again.
    """
    vectors = 5 * batch * length * d_model * itemsize
    if fused:
        return vectors + 4 * batch * num_heads * length
    mask = length * length + length if causal else 0
    return vectors + batch * num_heads * length * length * itemsize + mask


def draw_sweep(table: Sequence[Mapping[str, Any]], sizes: Mapping[str, Any]) -> Figure:
    """Two panels: kept bytes over L with the formulas, and time by hand / time fused.

    `table` has the rows of lesson 02's script; `sizes` holds batch, d_model, causal and itemsize
    as `kept_by_module` wants them.
    """
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8))
    heads = max(row["heads"] for row in table)
    rows = [row for row in table if row["heads"] == heads]
    lengths = [row["L"] for row in rows]
    for name, fused in (("by hand", False), ("fused", True)):
        kept = [
            kept_by_module(length=n, num_heads=heads, fused=fused, **sizes) / 2**20 for n in lengths
        ]
        theory(left, lengths, kept, "formula" if fused else "")
        color = MEANING["engine" if fused else "by hand"]
        _points(left, rows, f"{name} MiB", f"{name}, {heads} heads", color)
    left.set(yscale="log", ylabel="kept for backward (MiB)")
    left.set_title("Bytes kept, and their formulas (lines)")
    for number in sorted({row["heads"] for row in table}):
        rows = [row for row in table if row["heads"] == number]
        _points(right, rows, "time ratio", f"{number} heads")
    right.axhline(1, color=MEANING["theory"], linewidth=1)
    right.set(ylim=(0, None), ylabel="time by hand / time fused")
    right.set_title("Forward and backward, by hand against fused")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="length L")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        ax.legend(fontsize=8)
    return figure


def _points(
    ax: Axes, rows: Sequence[Mapping[str, Any]], column: str, label: str, color: str | None = None
) -> None:
    """The rows in which the column holds a number."""
    found = [(row["L"], row[column]) for row in rows if row[column] not in ("", FULL)]
    if found:
        ax.plot(*zip(*found, strict=True), "o", color=color, label=label)
