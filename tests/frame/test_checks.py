"""Every exercise's checks: right answers pass, each known mistake hears its own words."""

import ast
import re

import nbformat
import pytest

from shared.exercises.answers import read_cells
from shared.exercises.lessons import ROOT, load_checks, solution_module
from shared.exercises.mistakes import (
    Heard,
    hear_alternatives,
    hear_mistakes,
    hear_references,
    known_mistakes,
)

LESSONS = sorted(path.parent.name for path in (ROOT / "lessons").glob("*/checks.py"))
EXERCISES = [  # from the text: collecting tests imports no lesson
    id
    for path in sorted((ROOT / "lessons").glob("*/checks.py"))
    for id in re.findall(r'checks_for\(\s*"([^"]+)"', path.read_text(encoding="utf-8"))
]
# What checks and laboratories may import of ours: what they are written with, instruments, and
# data structures. Answers and references are none of these.
ALLOWED = re.compile(
    r"shared\.(?:errors|laboratories|measuring|ranks|model\.(?:config|language_model)|"
    r"data\.(?:sampling|batching)|planner\.(?:specs|outcomes|variants)|"
    r"experiments\.lesson(?:10_deepspeed|13_memory|14_blocks)|fault_tolerance\.(?:fitting|state)|"
    r"fsdp\.counting|pipeline\.(?:schedules|transfer)|"
    r"exercises\.(?:checks|comparing|expecting|on_ranks|"
    r"properties|rank_cases|remembered|seeds|stand_in|wrong))\b"
)


@pytest.mark.parametrize("id", EXERCISES)
def test_the_reference_passes_and_each_mistake_hears_its_own_words(id, record_property):
    number = id[:2]
    references = list(hear_references(number, id))
    mistakes = list(hear_mistakes(number, id))
    unheard = [said(each) for each in (*references, *mistakes) if not each.as_expected]
    words = [each.says for each in mistakes]
    confused = [
        f"{said(each)}\nwhich another mistake must hear: {other!r}"
        for each in mistakes
        for other in words
        if other != each.says and each.heard_words(other)
    ]
    record_property("mistakes heard", len(mistakes))
    assert not unheard + confused, "\n".join(unheard + confused)
    assert len(words) >= 3, "at least three mistakes that people really make"
    assert len(set(words)) == len(words), "two mistakes hear the same words"


OTHER_STYLES = [  # exercises that have right answers in another style, from the text as well
    id
    for path in sorted((ROOT / "solutions" / "alternatives").glob("lesson*.py"))
    for id in re.findall(r'^    "([^"]+)": \[', path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("id", OTHER_STYLES)
def test_right_answers_in_another_style_pass(id):
    heard = list(hear_alternatives(id[:2], id))
    refused = [said(each) for each in heard if not each.as_expected]
    assert not refused, "\n".join(refused)
    assert heard


def said(heard: Heard) -> str:
    """What an answer was told."""
    fault = heard.fault
    lines = ["nothing"] if fault is None else [f"at the check of {fault.title}", *fault.lines()]
    return "\n".join([f"{heard.exercise}: {heard.who} heard:", *lines])


@pytest.mark.parametrize("lesson", LESSONS)
def test_notebook_checks_solution_and_mistakes_have_the_same_exercises(lesson):
    number = lesson[:2]
    checks, solution = load_checks(number), solution_module(number)
    cells = read_cells(ROOT / "lessons" / lesson / "lesson.ipynb").exercises
    assert list(cells) == list(checks) == [id for id in EXERCISES if id[:2] == number]
    assert {mistake.id for mistake in known_mistakes(number)} == set(checks)
    for id, source in cells.items():
        body = ast.parse(source).body
        named = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert checks[id].name in named
        assert getattr(solution, checks[id].name).__doc__, f"{id}: no docstring in the reference"


def test_the_oracle_is_never_an_answer():
    offenders = []
    for lesson in LESSONS:
        checks = ROOT / "lessons" / lesson / "checks.py"
        laboratories = (ROOT / "shared" / "laboratories").glob(f"lesson{lesson[:2]}*.py")
        answers = {each.name for each in load_checks(lesson[:2]).values()}
        for path in (checks, *laboratories):
            for name in sorted(imported(path)):
                ours = name.split(".")[0] in ("shared", "solutions", "lessons")
                if ours and (not ALLOWED.match(name) or name.split(".")[-1] in answers):
                    offenders.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not offenders, "\n".join(offenders)


def imported(path) -> set[str]:
    """The names that a file imports anywhere in it, dotted in full."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_each_exercise_tells_difficulty_and_minutes():
    wrong = []
    for lesson in LESSONS:
        notebook = nbformat.read(ROOT / "lessons" / lesson / "lesson.ipynb", as_version=4)
        prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for id, checks in load_checks(lesson[:2]).items():
            dots = "●" * checks.difficulty + "○" * (5 - checks.difficulty)
            heading = re.search(rf"^### Exercise {id}\b.*", prose, re.MULTILINE)
            wanted = (dots, f"{checks.minutes} min")
            if heading is None or not all(each in heading[0] for each in wanted):
                wrong.append(f"### Exercise {id} should show {' and '.join(wanted)}: {heading}")
    assert not wrong, "\n".join(wrong)


def test_there_are_lessons():
    assert LESSONS, "no lesson has checks"
