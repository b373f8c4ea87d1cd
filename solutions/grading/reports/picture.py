"""The picture of a class: how far each exercise was solved."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shared.plots import BLUE, ORANGE, SKY, VERMILION, use_style
from solutions.grading.reports.summary import GROUPS, by_exercise
from solutions.grading.results import Outcome, Verdict

COLOURS = dict(zip(GROUPS, (BLUE, SKY, VERMILION, ORANGE, "#d9d9d9"), strict=True))
INCHES = 0.27  # a bar and the gap below it


def draw_class(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the picture as PNG, a bar an exercise; the same verdicts give the same bytes."""
    exercises = by_exercise(verdicts)
    lessons = list(dict.fromkeys(these[0].lesson for these in exercises))
    places = [  # lessons are set apart
        row + 0.5 * lessons.index(these[0].lesson) for row, these in enumerate(exercises)
    ]
    bottom = places[-1] + 0.5
    with plt.style.context("default"):  # whatever matplotlibrc the machine has
        use_style()
        figure = Figure(figsize=(10.0, 1.5 + INCHES * (bottom + 0.5)))
        FigureCanvasAgg(figure)
        ax = figure.add_subplot()
        left = [0.0] * len(exercises)
        for name, outcomes in GROUPS.items():
            widths = [
                100 * sum(each.outcome in outcomes for each in these) / len(these)
                for these in exercises
            ]
            ax.barh(places, widths, left=left, height=0.78, color=COLOURS[name], label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, these in zip(places, exercises, strict=True):
            ax.text(101, place, f"{_num_right(these)} of {len(these)}", va="center", fontsize=9)
        ax.set_yticks(places, [f"{each[0].exercise} {each[0].name}"[:44] for each in exercises])
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.set_axisbelow(True)
        what = "students (%); the number at the right has it all right"
        ax.set(xlim=(0, 100), ylim=(bottom, -0.5), xlabel=what)
        place = {"loc": "outside upper left", "alignment": "left", "ncols": len(GROUPS)}
        said = {"title": headline(verdicts), "title_fontsize": 12, "fontsize": 9}
        figure.legend(**place, **said, handlelength=1)
        figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _num_right(these: Sequence[Verdict]) -> int:
    return sum(each.outcome is Outcome.RIGHT for each in these)


def headline(verdicts: Sequence[Verdict]) -> str:
    """What is seen: the exercises that fewest have right."""
    exercises = by_exercise(verdicts)
    fewest, most = min(map(_num_right, exercises)), len(exercises[0])
    if fewest == most:
        return "Everybody has every exercise right"
    hardest = [these[0].exercise for these in exercises if _num_right(these) == fewest]
    named = ", ".join(hardest) if len(hardest) <= 8 else f"{len(hardest)} exercises"
    return f"Hardest: {named} (right for {fewest} of {most})"
