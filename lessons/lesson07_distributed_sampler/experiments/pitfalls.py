"""What lesson 07's script shows of its runs: a row for each way of loading data, and a figure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from jaxtyping import Bool, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from shared.errors import InputError
from shared.plots import BLACK, BLUE, GREY, VERMILION, use_style
from shared.results import typical_speed

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """How many runs of which size."""

    seeds: int
    epochs: int
    samples: int
    batch: int  # of all ranks together
    d_hidden: int


PRESETS = {  # batches that 1 to 6 ranks share out evenly
    "tiny": Preset(seeds=1, epochs=3, samples=240, batch=60, d_hidden=16),
    "small": Preset(seeds=2, epochs=8, samples=3840, batch=120, d_hidden=64),
    "large": Preset(seeds=5, epochs=8, samples=61_440, batch=960, d_hidden=1024),
}


def what_was_seen(
    indices: Int[Tensor, "ranks steps batch"],
    hidden: Bool[Tensor, "ranks steps batch context"],
    epochs: int,
) -> dict[str, float]:
    """What the ranks were given, in per cent over all steps, and how often in another order.

    `different`: different samples of a step, of all that its ranks are given. `equal_noise`: steps
    in which a further rank hides the very places that the first one hides. `orders`: of rank 0's
    epochs.
    """
    ranks, steps, _ = indices.shape
    distinct = sum(len(indices[:, step].unique()) for step in range(steps))
    equal = (hidden[1:] == hidden[:1]).flatten(2).all(-1).any(0) if ranks > 1 else torch.zeros(1)
    return {
        "different": 100 * distinct / indices.numel(),
        "equal_noise": 100 * equal.double().mean().item(),
        "orders": len({tuple(epoch.flatten().tolist()) for epoch in indices[0].chunk(epochs)}),
        "epochs": epochs,
    }


def check_sizes(samples: int, batch: int, world_size: int) -> None:
    """Refuse what cannot be shared out: InputError with the numbers and what would do."""
    if samples < world_size:
        raise InputError(
            f"{samples} samples and {world_size} ranks: a dataset smaller than the world; most of "
            "an epoch would be padding; take more samples (--samples) or fewer ranks"
        )
    if not world_size <= batch <= samples:
        raise InputError(
            f"a global batch of {batch}, {samples} samples, {world_size} ranks: a step needs a "
            "sample for each rank, and an epoch a step; change --samples or --batch"
        )
    if batch % world_size:
        raise InputError(
            f"a global batch of {batch} cannot be shared evenly by {world_size} ranks: try --batch "
            f"{batch - batch % world_size} or {batch - batch % world_size + world_size}"
        )


def spread(values: Sequence[float]) -> float | str:
    """Return the standard deviation between seeds; "unknown" for a single one."""
    return round(statistics.stdev(values), 3) if len(values) > 1 else "unknown"


def tabulate(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a pitfall: what its ranks were given, what the model lost by it, what was reported.

    "cost" is the mean, over seeds, of the difference to the right way from the same seed.
    """
    names = sorted(dict.fromkeys(run["pitfall"] for run in runs), key=lambda name: name != "none")
    right = {run["seed"]: run["loss"] for run in runs if run["pitfall"] == "none"}
    rows = []
    for name in names:
        mine = [run for run in runs if run["pitfall"] == name]
        losses = [run["loss"] for run in mine]
        differences = [run["loss"] - right[run["seed"]] for run in mine if right]
        error = max(abs(run["reported"] - run["exact"]) for run in mine)
        rows.append(
            {
                "pitfall": name,
                "different samples a step, %": round(mine[0]["different"]),
                "orders": f"{mine[0]['orders']} in {mine[0]['epochs']} epochs",
                "steps with equal noise, %": round(mine[0]["equal_noise"]),
                "validation loss": round(statistics.mean(losses), 3),
                "spread": spread(losses),
                "cost": round(statistics.mean(differences), 3) if differences else "",
                "metric wrong by, points": round(100 * error, 2),
                **typical_speed([run["speed"] for run in mine if "speed" in run]),
            }
        )
    return rows


def headline(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the costs in one line, with the spread between seeds to compare them with."""
    loss, spread = f"validation loss {table[0]['validation loss']:.3f}", table[0]["spread"]
    if table[0]["cost"] == "":
        return f"{loss}, {table[0]['pitfall']}"
    costs = ", ".join(f"{row['pitfall']} {row['cost']:+.3f}" for row in table[1:])
    seeds = "of one seed, spread unknown" if spread == "unknown" else f"± {spread} between seeds"
    return f"{loss} {seeds}; {costs}"


def draw_runs(runs: Sequence[Run]) -> Figure:
    """Every run's validation loss, a column for each pitfall."""
    use_style()
    figure, ax = plt.subplots()
    losses: dict[str, list[float]] = {}
    for run in runs:
        losses.setdefault(run["pitfall"], []).append(run["loss"])
    draw_losses(ax, losses)
    ax.set_title("What each pitfall costs: a dot a seed, a bar for the mean")
    return figure


def draw_losses(ax: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    """A column of dots for each name; grey lines join what began from the same seed."""
    names, columns = list(losses), list(losses.values())
    for seed in zip(*columns, strict=True):
        ax.plot(range(len(names)), seed, color=GREY, linewidth=0.5, alpha=0.6, zorder=1)
    for place, values in enumerate(columns):
        color = BLUE if place == 0 else VERMILION
        ax.plot([place] * len(values), values, "o", color=color, markersize=4, alpha=0.7)
        mean = statistics.mean(values)
        ax.plot([place - 0.2, place + 0.2], [mean, mean], color=BLACK, linewidth=1.5)
    ax.set_xticks(range(len(names)), names)
    ax.set(xlim=(-0.5, len(names) - 0.5), ylabel="validation loss (nats a character)")
