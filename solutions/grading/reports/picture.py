"""The picture of a class: how far each exercise was solved, and which mistakes were recognised."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shared.plots import BLUE, GREY, ORANGE, SKY, VERMILION, use_style
from solutions.grading.reports.pages import plain
from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import show_points

# From the left: what is solved, what was tried, what was not.
BARS = {
    "right": (BLUE, (Outcome.RIGHT,)),
    "partly right": (SKY, (Outcome.PARTLY,)),
    "wrong": (VERMILION, (Outcome.WRONG,)),
    "stopped, or cannot be graded": (ORANGE, (Outcome.STOPPED, Outcome.UNREADABLE)),
    "not solved, or not handed in": ("#d9d9d9", (Outcome.UNSOLVED, Outcome.MISSING)),
}
MAX_MISTAKES = 12
# In inches: the figure, a bar's row, the gap between lessons, the margins.
WIDTH, ROW, GAP, EDGE, HEAD, FOOT = 10.0, 0.26, 0.14, 0.15, 0.66, 0.55
TEXT_AT = 22.0  # where a mistake's words begin, in percent of the width of the bars above


def draw_class(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the picture as PNG; the same verdicts give the same bytes.

    Of a single student it shows the share of the points instead of the share of the class.
    """
    with plt.style.context("default"):  # whatever matplotlibrc the machine has
        use_style()
        figure = _figure(verdicts)
        FigureCanvasAgg(figure)
        figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _figure(verdicts: Sequence[Verdict]) -> Figure:
    """Two panels under one another; every length is given, so that 4 and 60 rows look alike."""
    names = {v.exercise: plain(f"{v.exercise} {v.name}")[:44] for v in verdicts}
    bars = _places(verdicts)
    mistakes = most_frequent(verdicts)
    texts = [_wrapped(words) for (_, words), _ in mistakes]
    above = max(bars.values(), default=0) + ROW
    below = sum(_height(lines) for lines in texts)
    left = 0.3 + 0.08 * max(map(len, names.values()), default=10)
    height = HEAD + above + FOOT + 0.3 + below + EDGE
    figure = Figure(figsize=(WIDTH, height))
    figure.set_layout_engine("none")

    def panel(top: float, tall: float) -> Axes:
        wide = WIDTH - left - 0.85
        bottom = height - top - tall
        return figure.add_axes((left / WIDTH, bottom / height, wide / WIDTH, tall / height))

    def title(top: float, text: str) -> None:
        figure.text(EDGE / WIDTH, 1 - top / height, text, fontsize=12, va="top", parse_math=False)

    title(EDGE, headline(verdicts))
    if bars:
        _legend(figure, 1 - (EDGE + 0.24) / height)
        _draw_exercises(panel(HEAD, above), bars, names, verdicts)
    several = bool(mistakes) and mistakes[0][1] > 1
    words = "Mistakes most often recognised" if several else "Mistakes recognised"
    title(HEAD + above + FOOT, words if mistakes else "No mistake was recognised")
    if mistakes:
        _draw_mistakes(panel(HEAD + above + FOOT + 0.3, below), mistakes, texts)
    return figure


def _places(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Where each exercise's bar stands, in inches from the top; lessons are set apart."""
    lessons = list(dict.fromkeys(v.lesson for v in verdicts))
    owners = {v.exercise: v.lesson for v in verdicts}
    return {
        id: row * ROW + lessons.index(lesson) * GAP
        for row, (id, lesson) in enumerate(owners.items())
    }


def _legend(figure: Figure, top: float) -> None:
    patches = [Patch(color=color, label=label) for label, (color, _) in BARS.items()]
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(EDGE / WIDTH, top),
        ncols=len(patches),
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        handlelength=1,
        columnspacing=1.5,
    )


def _draw_exercises(
    ax: Axes,
    places: dict[str, float],
    names: dict[str, str],
    verdicts: Sequence[Verdict],
) -> None:
    """One bar an exercise, from nobody to everybody; of a single student, from 0 to all points."""
    alone = len({v.student for v in verdicts}) == 1
    for id, place in places.items():
        these = [v for v in verdicts if v.exercise == id]
        left = 0.0
        for color, outcomes in BARS.values():
            some = [v for v in these if v.outcome in outcomes]
            share = sum(v.points / v.max if v.max else 0.0 for v in some) if alone else len(some)
            width = 100 * share / len(these)
            ax.barh(place, width, left=left, height=0.78 * ROW, color=color)
            left += width
        right = sum(v.outcome is Outcome.RIGHT for v in these)
        points = f"{show_points(these[0].points)} of {these[0].max}"
        said = points if alone else f"{right} of {len(these)}"
        ax.text(101, place, said, va="center", fontsize=9, color="#444444")
        if alone and left == 0:  # no bar: say why
            ax.text(1, place, these[0].outcome, va="center", fontsize=9, color="#444444")
    _plain_axes(ax, places.values(), [names[id] for id in places])
    what = "points (%)" if alone else "students (%); the number at the right has it all right"
    ax.set(xlim=(0, 100), ylim=(max(places.values()) + ROW / 2, -ROW / 2), xlabel=what)


def _plain_axes(ax: Axes, places: Iterable[float], labels: Sequence[str]) -> None:
    ax.set_yticks(list(places), labels, parse_math=False)
    ax.tick_params(axis="y", length=0)
    ax.set_axisbelow(True)
    ax.grid(axis="y", visible=False)


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


def most_frequent(verdicts: Sequence[Verdict]) -> list[tuple[tuple[str, str], int]]:
    """The mistakes most often recognised, ((exercise, its words), students); ties by exercise.

    Where at least three were made by several students, those that one made are left out.
    """
    counts = Counter(
        (v.exercise, " ".join(plain(v.mistake).split())) for v in verdicts if v.mistake
    )
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    repeated = [item for item in ordered if item[1] > 1]
    return (repeated if len(repeated) >= 3 else ordered)[:MAX_MISTAKES]


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, 68, max_lines=2, placeholder=" ...")


def _height(lines: Sequence[str]) -> float:
    return ROW if len(lines) < 2 else 1.5 * ROW


def _draw_mistakes(
    ax: Axes, mistakes: Sequence[tuple[tuple[str, str], int]], texts: Sequence[Sequence[str]]
) -> None:
    """One line a mistake: its exercise, a bar for the students, their number, its words."""
    most = mistakes[0][1]
    places: list[float] = []
    bottom = 0.0
    for (_, count), lines in zip(mistakes, texts, strict=True):
        place = bottom + _height(lines) / 2
        bottom += _height(lines)
        places.append(place)
        length = (TEXT_AT - 6) * count / most if most > 1 else 0.0
        ax.barh(place, length, height=0.7 * ROW, color=GREY)
        if most > 1:
            ax.text(length + 1, place, str(count), va="center", fontsize=9, color="#444444")
        start = TEXT_AT if most > 1 else 1.0
        ax.text(start, place, "\n".join(lines), va="center", fontsize=9.5, parse_math=False)
    _plain_axes(ax, places, [id for (id, _), _ in mistakes])
    ax.set(xlim=(0, 100), ylim=(bottom, 0), xticks=[])
    ax.grid(visible=False)
    ax.spines["bottom"].set_visible(False)
