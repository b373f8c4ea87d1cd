"""Lesson 14's figures: two matrices over two ranks, bytes against tokens, what a rank keeps."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shared.plots import MEANING, VARIANTS, measured, theory

RANK_COLOURS = VARIANTS[:2]
WHOLE = "#d9d9d9"


def _matrix(
    ax: Axes, at: tuple[float, float], size: tuple[float, float], name: str, cut: str = ""
) -> None:
    """A matrix as a box; `cut` is "columns", "rows", "sums", or nothing for one that is whole."""
    (x, y), (width, height) = at, size
    for rank, colour in enumerate(RANK_COLOURS if cut else [WHOLE]):
        n = 2 if cut else 1
        wide, high = (width / n, height) if cut == "columns" else (width, height / n)
        corner = x + (wide * rank if cut == "columns" else 0), y
        if cut != "columns":
            corner = x, y + height - high * (rank + 1)
        ax.add_patch(Rectangle(corner, wide, high, facecolor=colour, edgecolor="white", alpha=0.75))
    ax.text(x + width / 2, y - 0.35, name, ha="center", va="top", fontsize=9)


def draw_pair() -> Figure:
    """Y = relu(X A), Z = Y B: columns first, rows second, and where something is sent."""
    figure, ax = plt.subplots(figsize=(9, 2.5))
    _matrix(ax, (0.0, 0.0), (1.2, 2.0), "X\nwhole on both")
    ax.text(1.55, 1.0, "f", fontsize=13, ha="center", color=MEANING["communication"])
    _matrix(ax, (1.9, 0.2), (2.4, 1.6), "A by columns", "columns")
    ax.text(4.6, 1.0, "→", fontsize=12, ha="center")
    _matrix(ax, (4.9, 0.0), (2.4, 2.0), "relu(XA)\neach has its columns", "columns")
    _matrix(ax, (7.7, -0.2), (1.2, 2.4), "B by rows", "rows")
    ax.text(9.25, 1.0, "→", fontsize=12, ha="center")
    _matrix(ax, (9.6, 0.0), (0.9, 2.0), "part 0\nof the sum")
    ax.patches[-1].set_facecolor(RANK_COLOURS[0])
    ax.text(10.72, 1.0, "+", fontsize=12, ha="center")
    _matrix(ax, (10.95, 0.0), (0.9, 2.0), "part 1\nof the sum")
    ax.patches[-1].set_facecolor(RANK_COLOURS[1])
    ax.text(12.2, 1.0, "g", fontsize=13, ha="center", color=MEANING["communication"])
    _matrix(ax, (12.5, 0.0), (0.9, 2.0), "Z\nwhole on both")
    ax.set(xlim=(-0.2, 13.6), ylim=(-1.4, 2.5))
    ax.set_axis_off()
    ax.set_title("Columns, then rows: nothing is sent between the two (blue rank 0, orange rank 1)")
    return figure


def draw_bytes(
    tokens: Sequence[int], tensor: Mapping[int, Sequence[int]], data: Mapping[int, int], ranks: int
) -> Figure:
    """Bytes that a rank sends for one layer and step, over the tokens of a step, by width."""
    figure, ax = plt.subplots(figsize=(7.5, 3.6))
    for colour, (width, sent) in zip(VARIANTS, tensor.items(), strict=False):
        slope = 4 * 8 * width * (ranks - 1) / ranks
        theory(ax, tokens, [slope * each for each in tokens], "8 b s h (t-1)/t x 4 bytes")
        measured(ax, tokens, sent, f"tensor parallel, h = {width}", colour)
        ax.axhline(data[width], color=colour, linewidth=1, alpha=0.6)
        ax.annotate(
            f"data parallel, h = {width}", (tokens[0], data[width]), xytext=(0, 3),
            textcoords="offset points", ha="left", fontsize=8, color=colour,
        )  # fmt: skip
        ax.plot(3 * width, data[width], "x", color=MEANING["theory"], markersize=8)
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    ax.legend(unique.values(), unique.keys(), fontsize=8, loc="lower right")
    ax.set(xscale="log", yscale="log", xlabel="tokens in a step (b s)", ylabel="bytes a rank sends")
    _plain_ticks(ax, tokens)
    ax.set_title("Tensor parallelism sends less below 3 h tokens a step (crosses)")
    return figure


def draw_kept(ranks: Sequence[int], kept: Mapping[str, Sequence[float]], square: float) -> Figure:
    """Bytes that a rank keeps of one layer, in units of s b h, over the number of ranks."""
    figure, ax = plt.subplots(figsize=(7, 3.4))
    many = [1 + 0.05 * i for i in range(61)]
    formulas = {
        "tensor parallel": [12.125 + (16 + 6 * square) / t for t in many],
        "and sequence parallel": [(28.125 + 6 * square) / t for t in many],
    }
    for colour, (name, seen) in zip(VARIANTS, kept.items(), strict=False):
        ax.plot(many, formulas[name], color=colour, linewidth=1, linestyle="--")
        measured(ax, ranks, seen, f"{name}, counted (dashed: its formula)", colour)
    ax.axhline(12.125, color=MEANING["idle"], linewidth=1)
    ax.annotate("12.125: not divided without sequence parallelism", (1, 12.125), xytext=(0, 4),
                textcoords="offset points", ha="left", fontsize=8)  # fmt: skip
    ax.legend(fontsize=8)
    ax.set(xlabel="ranks t", ylabel="bytes kept / (s b h)", xticks=list(ranks), ylim=(0, None))
    ax.set_title("With the sequence in parts as well, all that is kept is divided by t")
    return figure


def draw_times(times: Mapping[str, Mapping[int, Mapping[str, float]]], crossing: int) -> Figure:
    """Time of a tensor-parallel step over a data-parallel one, over the tokens of a step."""
    figure, ax = plt.subplots(figsize=(7, 3.2))
    for colour, (link, by_tokens) in zip(VARIANTS, times.items(), strict=False):
        ratios = [each["tensor parallel"] / each["data parallel"] for each in by_tokens.values()]
        ax.plot(list(by_tokens), ratios, "o-", color=colour, linewidth=1, label=link)
    ax.axhline(1, color=MEANING["theory"], linewidth=1)
    ax.axvline(crossing, color=MEANING["theory"], linewidth=1, linestyle="--")
    ax.set(xscale="log", xlabel="tokens in a step (dashed: 3 h)", ylabel="time, tensor / data")
    _plain_ticks(ax, list(next(iter(times.values()))))
    ax.set_title("What one step takes on two ranks, tensor over data parallel")
    ax.legend(fontsize=8)
    return figure


def _plain_ticks(ax: Axes, tokens: Sequence[int]) -> None:
    """Numbers, not powers of ten, at the measured points."""
    ax.set_xticks(tokens, [str(each) for each in tokens])
    ax.set_xticks([], minor=True)
