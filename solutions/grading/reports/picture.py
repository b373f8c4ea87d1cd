"""The picture of a class: how far each exercise was solved."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shared.plots import BLUE, ORANGE, SKY, VERMILION, use_style
from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import plain, show_points

# From the left: what is solved, what was tried, what was not.
BARS = {
    "right": (BLUE, (Outcome.RIGHT,)),
    "partly right": (SKY, (Outcome.PARTLY,)),
    "wrong": (VERMILION, (Outcome.WRONG,)),
    "stopped, or cannot be graded": (ORANGE, (Outcome.STOPPED, Outcome.UNREADABLE)),
    "not solved, or not handed in": ("#d9d9d9", (Outcome.UNSOLVED, Outcome.MISSING)),
}
INCHES = 0.27  # a bar and the gap below it


def draw_class(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the picture as PNG, a bar an exercise; the same verdicts give the same bytes."""
    by_exercise: dict[str, list[Verdict]] = {}
    for each in verdicts:
        by_exercise.setdefault(each.exercise, []).append(each)
    lessons = list(dict.fromkeys(each.lesson for each in verdicts))
    places = [  # lessons are set apart
        row + 0.5 * lessons.index(these[0].lesson) for row, these in enumerate(by_exercise.values())
    ]
    bottom = max(places, default=0) + 0.5
    with plt.style.context("default"):  # whatever matplotlibrc the machine has
        use_style()
        figure = Figure(figsize=(10.0, 1.5 + INCHES * (bottom + 0.5)))
        FigureCanvasAgg(figure)
        ax = figure.add_subplot()
        alone = len({each.student for each in verdicts}) == 1
        for place, these in zip(places, by_exercise.values(), strict=True):
            _draw_bar(ax, place, these, alone)
        names = [plain(f"{each[0].exercise} {each[0].name}")[:44] for each in by_exercise.values()]
        ax.set_yticks(places, names, parse_math=False)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.set_axisbelow(True)
        what = "points (%)" if alone else "students (%); the number at the right has it all right"
        ax.set(xlim=(0, 100), ylim=(bottom, -0.5), xlabel=what)
        patches = [Patch(color=color, label=label) for label, (color, _) in BARS.items()]
        place = {"loc": "outside upper left", "alignment": "left", "ncols": len(BARS)}
        said = {"title": headline(verdicts), "title_fontsize": 12, "fontsize": 9}
        legend = figure.legend(handles=patches, **place, **said, handlelength=1)
        legend.get_title().set_parse_math(False)
        figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _draw_bar(ax: Axes, place: float, these: Sequence[Verdict], alone: bool) -> None:
    """One bar, from nobody to everybody; of a student who is alone, from 0 to all points."""
    left, first = 0.0, these[0]
    for color, outcomes in BARS.values():
        some = [each for each in these if each.outcome in outcomes]
        share = sum(v.points / v.max if v.max else 0.0 for v in some) if alone else len(some)
        width = 100 * share / len(these)
        ax.barh(place, width, left=left, height=0.78, color=color)
        left += width
    right = f"{sum(each.outcome is Outcome.RIGHT for each in these)} of {len(these)}"
    points = f"{show_points(first.points)} of {first.max}"
    ax.text(101, place, points if alone else right, va="center", fontsize=9)
    if alone and left == 0:  # no bar: say why
        ax.text(1, place, first.outcome, va="center", fontsize=9)


def headline(verdicts: Sequence[Verdict]) -> str:
    """What is seen: the exercises that fewest have right or, of one student, the result."""
    students = {v.student for v in verdicts}
    right = Counter(v.exercise for v in verdicts if v.outcome is Outcome.RIGHT)
    names = {v.exercise: v.name for v in verdicts}
    if not names:
        return "Nothing was graded"
    if len(students) == 1:
        return f"One student: {right.total()} of {len(names)} exercises right"
    fewest = min(right[id] for id in names)
    if fewest == len(students):
        return f"All {fewest} students have every exercise right"
    hardest = [plain(id) for id in names if right[id] == fewest]
    if len(hardest) == 1:
        said = plain(f"{hardest[0]} {names[hardest[0]]}")
        return f"Hardest: {said}, which {fewest} of {len(students)} have right"
    said = ", ".join(hardest) if len(hardest) <= 8 else f"{len(hardest)} exercises"
    return f"Hardest: {said}; {fewest} of {len(students)} have each right"
