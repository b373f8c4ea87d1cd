"""Every lesson's checks: the reference passes, each mistake hears its own words."""

import ast
import importlib
from functools import cache
from pathlib import Path

import nbformat
import pytest

from shared.exercises.answers import read_cells
from shared.exercises.lessons import ROOT, load_checks, solution_module
from shared.exercises.mistakes import mistakes_in, trials

LESSONS = sorted(path.parent.name for path in (ROOT / "lessons").glob("*/checks.py"))
EXERCISES = [(name, id) for name in LESSONS for id in load_checks(name[:2])]


@cache
def tried(lesson):
    """A lesson's references and mistakes, put before the checks once."""
    return list(trials(lesson[:2]))


@pytest.mark.parametrize("lesson", LESSONS)
def test_reference_passes_and_each_mistake_is_named(lesson):
    # Twice: the checks draw fresh random inputs, and none may depend on a lucky draw.
    twice = [*tried(lesson), *trials(lesson[:2])]
    wrong = [trial for trial in twice if not trial.as_expected]
    assert not wrong, "\n".join(f"{t.exercise} {t.says!r} heard:\n{t.heard}" for t in wrong)


@pytest.mark.parametrize(("lesson", "id"), EXERCISES)
def test_at_least_three_mistakes_each_with_its_own_words(lesson, id):
    module = importlib.import_module(f"solutions.mistakes.lesson{lesson}")
    mine = [each for each in mistakes_in(module) if each.id == id]
    assert len(mine) >= 3
    assert len({each.says for each in mine}) == len(mine), "two mistakes hear the same words"
    heard = {t.says: t for t in tried(lesson) if t.exercise == id and t.says}
    for each in mine:
        others = [other.says for other in mine if other is not each]
        confused = [says for says in others if heard[each.says].heard_words(says)]
        assert not confused, f"{each.says!r} also hears {confused}"


@pytest.mark.parametrize("lesson", LESSONS)
def test_mistakes_belong_to_exercises(lesson):
    module = importlib.import_module(f"solutions.mistakes.lesson{lesson}")
    assert {each.id for each in mistakes_in(module)} == set(load_checks(lesson[:2]))


@pytest.mark.parametrize("lesson", LESSONS)
def test_notebook_checks_and_solution_have_the_same_exercises(lesson):
    number = lesson[:2]
    cells = read_cells(ROOT / "lessons" / lesson / "lesson.ipynb")
    checks = load_checks(number)
    assert list(cells.exercises) == list(checks)
    for id, source in cells.exercises.items():
        body = ast.parse(source).body
        named = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert checks[id].name in named
        reference = getattr(solution_module(number), checks[id].name)
        assert reference.__doc__, f"{id}: the reference has no docstring"


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_oracle_is_never_the_solution(lesson):
    tree = ast.parse((ROOT / "lessons" / lesson / "checks.py").read_text())
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    own = {m for m in modules if m.split(".")[0] in ("shared", "solutions", "lessons")}
    # A configuration is what an exercise is given, a counter or a stand-in what it is measured
    # with; none of them is an answer.
    allowed = {
        "shared.exercises.expecting",
        "shared.ranks.forked",
        "shared.model.config",
        "shared.data.sampling",
    }
    allowed |= {f"shared.measuring.{name}" for name in ("memory", "traffic")}
    allowed |= {f"shared.restarting.{name}" for name in ("fitting", "training_state")}
    allowed.add("shared.exercises.stand_in")
    assert own <= allowed, f"checks.py may import {allowed} of ours, it imports {own - allowed}"


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_exercise_tells_difficulty_and_minutes(lesson):
    notebook = nbformat.read(ROOT / "lessons" / lesson / "lesson.ipynb", as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for id, checks in load_checks(lesson[:2]).items():
        dots = "●" * checks.difficulty + "○" * (5 - checks.difficulty)
        heading = [line for line in prose.splitlines() if line.startswith(f"### Exercise {id}")]
        assert heading, f"no heading '### Exercise {id}'"
        assert dots in heading[0], f"{heading[0]!r} should show {dots}"
        assert f"{checks.minutes} min" in heading[0], f"{heading[0]!r}: {checks.minutes} min"


def test_there_are_lessons():
    assert Path(ROOT / "lessons").is_dir()
    assert LESSONS, "no lesson has checks"
