"""The way of one word's vector through the heads of an attention; shapes from a forward pass."""

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from shared.model.attention import MultiHeadAttention
from shared.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

Shapes = dict[str, tuple[int, ...]]
HEADS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)  # a colour a head
PALE = "#d9d9d9"
BOX = {"boxstyle": "round,pad=0.3", "edgecolor": "none"}
CELL, GAP = 0.5, 1.3  # width of a number; between the rows of q, k and v


def recorded_shapes(
    attention: MultiHeadAttention, x: Float[Tensor, "batch length d_model"]
) -> Shapes:
    """The shape of what each part makes of x in one pass of self-attention."""
    shapes: Shapes = {"x": tuple(x.shape)}

    def projected(module: object, inputs: object, output: Tensor) -> None:
        shapes["projected"] = tuple(output.shape)

    def combined(module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        shapes["combined"], shapes["output"] = tuple(inputs[0].shape), tuple(output.shape)

    hooks = [
        attention.w_q.register_forward_hook(projected),
        attention.w_o.register_forward_hook(combined),
    ]
    kept, attention.keep_weights = attention.keep_weights, True
    try:
        with torch.no_grad():
            keys, values = attention.project(x, x)
            attention.attend(x, keys, values)
    finally:
        attention.keep_weights = kept
        for hook in hooks:
            hook.remove()
    assert attention.weights is not None, "keep_weights was on"
    shapes["heads"], shapes["weights"] = tuple(values.shape), tuple(attention.weights.shape)
    return shapes


def draw_heads(ax: Axes, shapes: Shapes) -> None:
    """From the bottom up: a vector, its projections, the heads, all parts together, the output."""
    _, num_heads, _, head_dim = shapes["heads"]
    d_model = shapes["x"][-1]
    width = d_model * CELL
    lefts = [number * (width + GAP) for number in range(3)]
    middle, right = lefts[1] + width / 2, lefts[2] + width
    ax.set(xlim=(-4.6, right + 0.3), ylim=(-0.8, 12.1))
    ax.axis("off")
    whole, colors = [PALE] * d_model, [HEADS[i // head_dim] for i in range(d_model)]
    _row(ax, middle - width / 2, 0, whole)
    for name, left in zip("qkv", lefts, strict=True):
        place = left + width / 2
        _arrow(ax, (middle, 0.6), (place, 1.55))
        ax.text(place, 1.9, f"$W_{name}$", ha="center", va="center", bbox=BOX | {"facecolor": PALE})
        _arrow(ax, (place, 2.3), (place, 2.95))
        _row(ax, left, 3, colors)
        ax.text(left - 0.25, 3.25, name, ha="right", va="center", fontsize=10, style="italic")
    for head in range(num_heads):
        color, place = HEADS[head], (head + 0.5) * right / num_heads
        for left in lefts:
            start = left + (head + 0.5) * head_dim * CELL
            ax.plot([start, place], [3.55, 5.35], color=color, linewidth=1.1)
        box = BOX | {"facecolor": color}
        words = f"head {head}\nsoftmax(q kᵀ / √{head_dim}) v"
        ax.text(place, 5.9, words, ha="center", va="center", color="white", fontsize=8, bbox=box)
        end = middle - width / 2 + (head + 0.5) * head_dim * CELL
        ax.plot([place, end], [6.45, 7.75], color=color, linewidth=1.1)
    _row(ax, middle - width / 2, 7.8, colors)
    _arrow(ax, (middle, 8.4), (middle, 9.15))
    ax.text(middle, 9.55, "$W_o$", ha="center", va="center", bbox=BOX | {"facecolor": PALE})
    _arrow(ax, (middle, 9.95), (middle, 10.75))
    _row(ax, middle - width / 2, 10.8, whole)
    for y, name, key in (
        (0.25, "word vectors", "x"), (3.25, "projected", "projected"), (4.45, "cut", "heads"),
        (5.9, "weights", "weights"), (8.05, "side by side", "combined"),
        (11.05, "output", "output"),
    ):  # fmt: skip
        ax.text(-4.5, y, f"{name}\n{shapes[key]}", ha="left", va="center", fontsize=9, color=BLACK)


def _row(ax: Axes, left: float, y: float, colors: list[str]) -> None:
    """The numbers of one word, a cell each."""
    for i, color in enumerate(colors):
        cell = (left + i * CELL, y)
        ax.add_patch(Rectangle(cell, CELL, 0.5, facecolor=color, edgecolor="white"))


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "->", "lw": 1.5, "color": GREY, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style)
