"""The whole Transformer as a picture; the shapes in it are recorded in a forward pass."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from matplotlib.axes import Axes
from torch import Tensor, nn

from shared.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION

Shapes = dict[str, tuple[int, ...]]
BOX = {"boxstyle": "round,pad=0.3", "edgecolor": "none"}
PALE = "#d9d9d9"
ENCODER, DECODER = 0.0, 6.2  # x of the two residual streams


def recorded_shapes(
    model: nn.Module, src: Int[Tensor, "batch source"], tgt: Int[Tensor, "batch target"]
) -> Shapes:
    """The shape of every module's output in one forward pass, by the module's name."""
    shapes: Shapes = {"src": tuple(src.shape), "tgt": tuple(tgt.shape)}

    def record(name: str):
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                shapes[name] = tuple(output.shape)

        return hook

    hooks = [each.register_forward_hook(record(name)) for name, each in model.named_modules()]
    try:
        with torch.no_grad():
            model(src, tgt)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def draw_transformer(ax: Axes, shapes: Shapes, num_layers: int) -> None:
    """Encoder and decoder, pre-LN: streams upwards, sub-layers beside them, shapes on the left."""
    ax.set(xlim=(-2.3, 10.4), ylim=(-1.3, 16.2))
    ax.axis("off")
    last = num_layers - 1
    _stream(ax, ENCODER, "source ids", shapes["src"], 9.1)
    _stream(ax, DECODER, "target ids, shifted right", shapes["tgt"], 13.2)
    parts = [("self-attention", BLUE), ("feed-forward", ORANGE)]
    _layer(ax, ENCODER, parts, f"encoder layer\n{num_layers} times")
    parts = [("causal self-attention", BLUE), ("cross-attention", VERMILION)]
    _layer(ax, DECODER, [*parts, ("feed-forward", ORANGE)], f"decoder layer\n{num_layers} times")
    for x, side in ((ENCODER, "src"), (DECODER, "tgt")):
        _shape(ax, x, 2.3, shapes[f"{side}_positions"])
    _shape(ax, ENCODER, 8.9, shapes[f"encoder_layers.{last}"])
    _shape(ax, DECODER, 12.4, shapes[f"decoder_layers.{last}"])
    _label(ax, ENCODER, 9.6, "norm", PALE, BLACK)
    _label(ax, DECODER, 13.4, "norm", PALE, BLACK)
    ax.annotate("", (DECODER, 15.6), (DECODER, 13.9), arrowprops=_arrow(GREY))
    _label(ax, DECODER, 14.7, "output (tied)", GREEN, "white")
    _shape(ax, DECODER, 15.6, shapes["output"], "logits")
    # The memory leaves the encoder's top and enters every decoder layer's cross-attention.
    ax.plot([ENCODER, ENCODER, 4.0, 4.0], [9.9, 11.2, 11.2, 7.55], color=PURPLE, linewidth=2)
    ax.plot([DECODER - 0.2, DECODER + 0.2], [7.55, 7.55], color="white", linewidth=8, zorder=3)
    start, end = (4.0, 7.55), (DECODER + 1.35, 7.55)
    ax.annotate("", end, start, arrowprops=_arrow(PURPLE) | {"shrinkA": 0, "zorder": 4})
    ax.text(0.2, 11.4, f"memory {shapes['encoder_norm']}", color=PURPLE, fontsize=9)
    ax.text(4.1, 7.75, "keys, values", color=PURPLE, fontsize=8)


def _stream(ax: Axes, x: float, name: str, shape: tuple[int, ...], top: float) -> None:
    ax.annotate("", (x, top), (x, -0.5), arrowprops=_arrow(GREY))
    ax.text(x, -1.1, f"{name} {shape}", ha="center", fontsize=9)
    _label(ax, x, 0.4, r"embedding $\times \sqrt{D}$", GREEN, "white")
    _label(ax, x, 1.5, "+ positions", PALE, BLACK)


def _layer(ax: Axes, x: float, parts: Sequence[tuple[str, str]], name: str) -> None:
    """The sub-layers of one layer: each reads the stream through a norm, and is added to it."""
    bottom = 2.8
    for number, (part, color) in enumerate(parts):
        low = bottom + 3.1 * number
        ax.plot([x, x + 2.2, x + 2.2, x], [low, low, low + 2.5, low + 2.5], color=color)
        _label(ax, x + 2.2, low + 0.55, "norm", PALE, BLACK)
        _label(ax, x + 2.2, low + 1.65, part, color, "white")
        plus = {"boxstyle": "circle,pad=0.05", "facecolor": "white", "edgecolor": GREY}
        ax.text(x, low + 2.5, "+", ha="center", va="center", bbox=plus)
    ax.text(x - 0.3, bottom + 1.2, name, ha="right", fontsize=9)


def _label(ax: Axes, x: float, y: float, text: str, color: str, ink: str) -> None:
    box = BOX | {"facecolor": color}
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color=ink, bbox=box)


def _shape(ax: Axes, x: float, y: float, shape: tuple[int, ...], name: str = "") -> None:
    ax.text(x - 0.25, y, f"{name} {shape}".strip(), ha="right", va="center", fontsize=8)


def _arrow(color: str) -> dict[str, object]:
    return {"arrowstyle": "->", "lw": 2, "color": color}
