"""The notebook that is graded: the pristine setup, the learner's exercise cells, a verdict each.

Measuring cells, prose and figures of the lesson cannot change a grade and take a minute, so they
are left out. What judges (the checks, their order, the points) comes from the course alone.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from solutions.grading.results import Answers, Lesson

PART = "torch_handle"  # the metadata that says what a cell of the graded notebook is


def graded_notebook(
    lesson: Lesson,
    answers: Answers,
    *,
    wanted: Collection[str],
    stubbed: Collection[str],
    name: str,
    guard: Mapping[str, Any],
) -> str:
    """The text of the notebook that judges the exercises in `wanted`.

    Every exercise has its cell, because later ones may use it; the pristine stub stands in for
    those in `stubbed` and for those that were not handed in. `name` is what the guard is called,
    `guard` what it is started with.
    """
    start = f"import guard as {name}\n{name} = {name}.start(globals(), **{dict(guard)!r})"
    cells = [
        _cell("guard", start, "start"),
        _cell("setup", lesson.setup, "setup"),
        _cell("settle", f"{name}.settle()", "settle"),
    ]
    for exercise in lesson.exercises:
        own = answers.cells.get(exercise.id)
        source = lesson.stubs[exercise.id] if own is None or exercise.id in stubbed else own
        slug = exercise.id.replace(".", "-")
        cells.append(_cell(f"answer-{slug}", source, "answer", exercise.id))
        if exercise.id in wanted:
            judge = f"{name}.judge({exercise.id!r}, {exercise.name!r})"
            cells.append(_cell(f"verdict-{slug}", judge, "verdict", exercise.id))
        elif source is own:  # judged in an earlier run: what it does is not the next one's doing
            cells.append(_cell(f"after-{slug}", f"{name}.clear_up()", "after", exercise.id))
    return json.dumps(
        {
            "cells": cells,
            "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


def _cell(id: str, source: str, part: str, exercise: str = "") -> Mapping[str, Any]:
    return {
        "cell_type": "code",
        "id": id,
        "execution_count": None,  # nbval compares nothing in such a cell
        "metadata": {PART: {"part": part, "exercise": exercise}},
        "outputs": [],
        "source": source,
    }
