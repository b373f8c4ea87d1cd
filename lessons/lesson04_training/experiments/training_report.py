"""What the script shows of a training: its curve, and what it translates."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shared.plots import use_style

NUM_EXAMPLES = 10


def draw_training(
    losses: Sequence[float], held_out: Sequence[tuple[int, float]], dataset: str
) -> Figure:
    """The loss over the steps, in training and on sentences held out."""
    use_style()
    figure, ax = plt.subplots()
    ax.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training, label-smoothed")
    ax.plot(*zip(*held_out, strict=True), "o-", markersize=4, label="held out, not smoothed")
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training on {dataset}")
    ax.legend()
    return figure


def list_examples(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> list[dict[str, str]]:
    """The first translations, each beside what it should be."""
    rows = list(zip(sources, translations, references, strict=True))[:NUM_EXAMPLES]
    return [{"source": s, "translation": t, "reference": r} for s, t, r in rows]
