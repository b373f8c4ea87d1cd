"""Two tasks on sentences of random words that nothing but word order can solve.

"distance": name the word three places to the left. "place": name the word with position 3, the
fourth of the sentence. Every word of a sentence is asked, and the words say nothing about one
another, so a model that does not know the order can only bet on the most frequent word, in
"distance" of the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from shared.plots import BLUE, GREEN, GREY, MEANING, VERMILION, theory, use_style
from shared.results import typical_speed

Run = Mapping[str, Any]
TASKS = ("distance", "place")
NUM_WORDS = 16
OFFSET = 3
VARIANT_COLORS = {"none": GREY, "sinusoidal": BLUE, "learned": GREEN, "rotary": VERMILION}
VARIANT_MARKERS = {"none": "x", "sinusoidal": "o", "learned": "s", "rotary": "^"}
IGNORED = -100  # cross_entropy's mark for "no target here": the first words of "distance"


def make_batch(
    task: str, batch: int, length: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """Random sentences and, for every word of them, the word that is to be named there."""
    assert task in TASKS, f"task {task!r} is none of {TASKS}"
    words = torch.randint(NUM_WORDS, (batch, length), generator=generator)
    if task == "place":
        return words, words[:, OFFSET, None].expand(batch, length)
    targets = words.roll(OFFSET, dims=1)
    targets[:, :OFFSET] = IGNORED
    return words, targets


@torch.no_grad()
def accuracy(model: nn.Module, task: str, length: int) -> Float[Tensor, "length"]:
    """Share of right answers at each position of 256 sentences that are always the same.

    NaN at the positions that are not asked, so take `nanmean()` for the share of all answers.
    """
    words, targets = make_batch(task, 256, length, torch.Generator().manual_seed(12345))
    asked = targets != IGNORED
    device = next(model.parameters()).device
    right = (model(words.to(device)).argmax(-1).cpu() == targets) & asked
    return right.sum(0) / asked.sum(0)


def order_blind_ceiling(task: str, length: int, num_sentences: int = 4000) -> float:
    """The best accuracy that is possible for a reader who knows the words but not their order.

    The best bet is the most frequent word: of all words for "place", of all other words for
    "distance", where the asker's own word cannot be the answer. The mean over random sentences.
    """
    words, _ = make_batch(task, num_sentences, length, torch.Generator().manual_seed(0))
    own = torch.nn.functional.one_hot(words, NUM_WORDS)  # (B, L, V)
    counts = own.sum(1, keepdim=True)  # (B, 1, V)
    if task == "place":
        return float(counts.amax(-1).double().mean() / length)
    return float((counts - own).amax(-1).double().mean() / (length - 1))


def accuracy_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each task and variant: per cent right by length of the sentence, mean over seeds.

    A run is a dict with "task", "variant", "curve" ([step, share] pairs) and "by_length"
    ([length, share] pairs, the first length being the longest in training).
    """
    rows = []
    for task in TASKS:
        for variant, mine in _by_variant(runs, task).items():
            row: dict[str, Any] = {"task": task, "positions": variant}
            for column, (length, _) in enumerate(mine[0]["by_length"]):
                shares = [run["by_length"][column][1] for run in mine]
                row[f"% at {length} words"] = round(100 * sum(shares) / len(shares), 1)
            rows.append(row | typical_speed([run["speed"] for run in mine if "speed" in run]))
    return rows


def draw_tasks(runs: Sequence[Run]) -> Figure:
    """Both tasks: how the variants learn (left), and what is left on longer sentences (right)."""
    use_style()
    figure, axes = plt.subplots(len(TASKS), 2, figsize=(8.6, 5.8), sharey=True)
    length = runs[0]["by_length"][0][0]
    titles = {"distance": "distance (3 to the left)", "place": "place (the 4th word)"}
    for (left, right), task in zip(axes, TASKS, strict=True):
        draw_learning(left, runs, task, length)
        draw_lengths(right, runs, task)
        left.set_title(f"{titles[task]}: learning")
        right.set_title("longer sentences than in training (grey)")
    for left in axes[:, 0]:
        left.legend(loc=(0.66, 0.3), fontsize=8)
    return figure


def draw_learning(ax: Axes, runs: Sequence[Run], task: str, length: int) -> None:
    """Accuracy over training steps: a line a variant (mean over seeds) in a band (all seeds)."""
    for variant, mine in _by_variant(runs, task).items():
        _band(ax, [run["curve"] for run in mine], variant)
    ceiling = 100 * order_blind_ceiling(task, length)
    ax.axhline(ceiling, color=MEANING["theory"], linewidth=1, linestyle="--", label="order-blind")
    ax.set(
        xlabel=f"training step (tested on {length} words)",
        ylabel="right answers (%)",
        ylim=(0, 104),
    )


def draw_lengths(ax: Axes, runs: Sequence[Run], task: str) -> None:
    """Accuracy by length of the test sentences; the lengths of training are shaded."""
    lengths = [length for length, _ in runs[0]["by_length"]]
    for variant, mine in _by_variant(runs, task).items():
        _band(ax, [run["by_length"] for run in mine], variant)
    theory(ax, lengths, [100 * order_blind_ceiling(task, each) for each in lengths], "order-blind")
    ax.axvspan(0, lengths[0], color=GREY, alpha=0.15, linewidth=0)
    ax.set(xlabel="words in the sentence", ylim=(0, 104), xticks=lengths)
    ax.set_xlim(lengths[0] / 2, lengths[-1] * 1.02)


def _by_variant(runs: Sequence[Run], task: str) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {variant: [] for variant in VARIANT_COLORS}
    for run in runs:
        if run["task"] == task:
            found[run["variant"]].append(run)
    return {variant: mine for variant, mine in found.items() if mine}


def _band(ax: Axes, series: Sequence[Sequence[Sequence[float]]], variant: str) -> None:
    points = torch.tensor(series, dtype=torch.float64)  # (seeds, points, 2)
    x, shares = points[0, :, 0], 100 * points[:, :, 1]
    color = VARIANT_COLORS[variant]
    ax.plot(
        x,
        shares.mean(0),
        VARIANT_MARKERS[variant] + "-",
        markersize=3.5,
        color=color,
        label=variant,
    )
    ax.fill_between(x, shares.amin(0), shares.amax(0), color=color, alpha=0.18, linewidth=0)
