"""One look, and one colour per meaning, through the whole course."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

if TYPE_CHECKING:  # the grader draws as well, and stays small because nothing in it loads torch
    from torch import Tensor

# Okabe and Ito's palette, which people with any colour vision can tell apart
# (jfly.uni-koeln.de/color). One meaning keeps one colour from the first lesson to the last.
BLACK, GREY = "#000000", "#8a8a8a"
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"

MEANING = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer states": GREEN,
    "activations": PURPLE,
    "compute": SKY,
    "communication": VERMILION,
    "idle": GREY,
    "by hand": BLUE,
    "engine": ORANGE,
    "theory": BLACK,
}
VARIANTS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, YELLOW)


def use_style() -> None:
    """Set matplotlib's defaults for the course; call once, at the start."""
    plt.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 96,
            "figure.constrained_layout.use": True,
            "savefig.dpi": 120,
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.prop_cycle": plt.cycler(color=VARIANTS),
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "image.cmap": "cividis",
        }
    )


def theory(ax: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """Draw a formula: a thin black line under the measured points."""
    ax.plot(x, y, color=MEANING["theory"], linewidth=1.0, linestyle="--", zorder=1, label=label)


def measured(
    ax: Axes, x: Sequence[float], y: Sequence[float], label: str, color: str | None = None
) -> None:
    """Draw measurements: points, not joined, so that no value is suggested between them."""
    ax.plot(x, y, "o", markersize=5, color=color, zorder=3, label=label)


def heat_map(
    ax: Axes,
    values: "Tensor",
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    signed: bool = False,
) -> AxesImage:
    """Draw a matrix; `signed` centres the colours on zero. Labels stand at each row and column."""
    limit = float(values.abs().max()) if signed else None
    image = ax.imshow(
        values.detach().cpu().numpy(),
        cmap="RdBu_r" if signed else "cividis",
        vmin=None if limit is None else -limit,
        vmax=limit,
        aspect="auto",
        interpolation="nearest",
    )
    ax.grid(False)
    if rows is not None:
        ax.set_yticks(range(len(rows)), rows)
    if columns is not None:
        ax.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    return image


def save_figure(figure: Figure, path: Path) -> None:
    """Write a script's figure as PNG and close it."""
    figure.savefig(path)
    plt.close(figure)
