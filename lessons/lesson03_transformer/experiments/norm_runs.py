"""What the script shows of its four training runs: the figure and the table."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from shared.plots import BLUE, VERMILION, measured, use_style

SMOOTHED = 5  # steps that a point of a loss curve is the mean of
COLORS = {"pre": BLUE, "post": VERMILION}


def frequency_loss(targets: Int[Tensor, "batch target"], pad_id: int = 0) -> float:
    """Nats per token for one who knows how frequent each token is, and nothing else."""
    _, counts = targets[targets != pad_id].unique(return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum())


def gradient_norms(model: Any) -> list[float]:
    """Length of the gradient of each layer's feed-forward, encoder first, then decoder."""
    layers = [*model.encoder_layers, *model.decoder_layers]
    parts = [[each.grad.flatten() for each in layer.feed_forward.parameters()] for layer in layers]
    return [float(torch.cat(part).norm()) for part in parts]


def draw_runs(runs: Sequence[dict[str, Any]], floor: float) -> Figure:
    """Training curves and, beside them, the gradients that the first step met.

    `floor` is the loss of a model that never looks at its input; a line marks it.
    """
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for run in runs:
        _draw_losses(left, run)
        if not run["warmup"]:  # the first gradients are the same with and without
            depths = range(1, len(run["first_gradients"]) + 1)
            color = COLORS[run["norm"]]
            measured(right, depths, run["first_gradients"], f"{run['norm']}-LN", color)
    words = "token frequencies alone"
    left.axhline(floor, color="black", linewidth=0.8, linestyle="--", label=words)
    left.set(
        xlabel="step", ylabel="loss (nats per token)", title="Four variants learn to translate"
    )
    right.set(xlabel="layer: encoder, then decoder", ylabel="gradient norm", yscale="log")
    right.set_title("The gradient of each layer at step 1")
    left.legend()
    right.legend()
    return figure


def _draw_losses(ax: Axes, run: dict[str, Any]) -> None:
    losses = run["losses"]
    starts = range(len(losses) - SMOOTHED + 1)
    smooth = [sum(losses[start : start + SMOOTHED]) / SMOOTHED for start in starts]
    style = "-" if run["warmup"] else ":"
    ax.plot(smooth, color=COLORS[run["norm"]], linestyle=style, label=run["variant"])


def tabulate(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a run: who trained it, where it got to, and the gradients that it began with."""
    return [
        {
            "variant": run["variant"],
            "rank": run["rank"],
            "validation loss": round(run["validation"], 3),
            "first encoder layer's gradient": round(run["first_gradients"][0], 3),
            "last decoder layer's gradient": round(run["first_gradients"][-1], 3),
            **run["speed"],
        }
        for run in runs
    ]
