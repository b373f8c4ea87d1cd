"""Every exercise's checks: right answers pass, each known mistake hears its own words."""

import ast
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import TypeVar

import nbformat
import pytest

from shared.cli.changed import imports_of
from shared.cli.proven import CHANGED, MISTAKES, NEVER_FAILED, STYLES, UNTRIED, exercise_checked
from shared.cli.proven import EXERCISES as PROVEN
from shared.exercises.answers import read_cells
from shared.exercises.lessons import ROOT, load_checks, solution_module
from shared.exercises.mistakes import (
    Heard,
    hear_alternatives,
    hear_mistakes,
    hear_references,
    known_alternatives,
    known_mistakes,
)

T = TypeVar("T")

LESSONS = sorted(path.parent.name for path in (ROOT / "lessons").glob("*/checks.py"))
EXERCISES = [  # from the text: collecting tests imports no lesson
    id
    for path in sorted((ROOT / "lessons").glob("*/checks.py"))
    for id in re.findall(r'checks_for\(\s*"([^"]+)"', path.read_text(encoding="utf-8"))
]
# What checks and laboratories may import of ours: what they are written with, instruments, and
# data structures. Answers and references are none of these.
ALLOWED = re.compile(
    r"lessons\.\w+\.(?:laboratory|faults|asking)|lessons\.\w+\.experiments\.(?:asking_deepspeed|step_memory)|"
    r"shared\.(?:errors|measuring|ranks|model\.(?:config|language_model|single_layer)|"
    r"data\.(?:sampling|batching|rows)|planner\.(?:specs|outcomes|variants|memory|seconds)|"
    r"parallel3d\.(?:cutting|mesh|engine)|"
    r"fault_tolerance\.(?:fitting|state)|"
    r"sharding\.counting|training\.(?:engine|reference_run|schedules)|tensor_parallel\.marks|"
    r"long_context\.orders|mixture_of_experts\.(?:marks|parallel|routing\.Routing)|"
    r"lora\.(?:adapter|levels)|tensor_parallel\.models\.make_mesh|"
    r"clusters\.(?:addresses|links|recordings|report|verdicts)|"
    r"capstone\.(?:budgets|config|keeping|tasks)|"
    r"less_communication\.states|ecosystem\.(?:defaults|task)|pipeline\.(?:schedules|transfer)|"
    r"exercises\.(?:checks|comparing|expecting|nets|noting|on_ranks|"
    r"properties|rank_cases|remembered|seeds|wrong))\b"
)


@pytest.fixture
def first(pytestconfig):
    """All that an iterator gives, its first so many in a short run (`./run_all.sh test`)."""
    short = pytestconfig.getoption("short", default=False)

    def take(each: Iterator[T], few: int) -> list[T]:
        return list(islice(each, few if short else None))

    return take


@pytest.fixture(autouse=True)
def one_host_a_test(monkeypatch):
    """DeepSpeed and transformers are imported once for an exercise's answers, not once for each."""
    from shared.ranks.hosts import Host

    entered, ended = set[Host](), Host.ended

    def kept(host: Host) -> AbstractContextManager[None]:
        if host not in entered:
            entered.add(host)
            until_the_end.enter_context(ended(host))
        return nullcontext()

    with ExitStack() as until_the_end:
        monkeypatch.setattr(Host, "ended", kept)
        yield


@pytest.fixture(scope="session")
def in_notebooks(request):
    """Exercises whose reference is checked by a cell of a notebook in this run: once is enough."""
    return {exercise_checked(each) for each in request.session.items}


@pytest.mark.parametrize("id", EXERCISES)
def test_the_reference_passes_and_each_mistake_hears_its_own_words(
    id, first, in_notebooks, record_property
):
    number = id[:2]
    references = [] if id in in_notebooks else list(hear_references(number, id))
    mistakes = first(hear_mistakes(number, id), 2)
    unheard = [said(each) for each in (*references, *mistakes) if not each.as_expected]
    words = [each.says for each in known_mistakes(number) if each.id == id]
    confused = [
        f"{said(each)}\nwhich another mistake must hear: {other!r}"
        for each in mistakes
        for other in words
        if other != each.says and each.heard_words(other)
    ]
    record_property(PROVEN, len(references))
    record_property(MISTAKES, len(mistakes))
    record_property(UNTRIED + MISTAKES, len(words) - len(mistakes))
    failed = {each.fault.title for each in mistakes if each.fault is not None}
    # Where sights are changed, test_rows.py makes every check fail.
    whole = len(mistakes) == len(words) and id not in CHANGED
    for title, _ in load_checks(number)[id].checks if whole else ():
        if title not in failed:
            record_property(NEVER_FAILED, f"{id}, {title}")
    assert not unheard + confused, "\n".join(unheard + confused)
    fewest = 2 if id in CHANGED else 3
    assert len(words) >= fewest, f"at least {fewest} mistakes that people really make"
    assert len(set(words)) == len(words), "two mistakes hear the same words"


OTHER_STYLES = [  # exercises that have right answers in another style, from the text as well
    id
    for path in sorted((ROOT / "solutions" / "alternatives").glob("lesson*.py"))
    for id in re.findall(r'^    "([^"]+)": \[', path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("id", OTHER_STYLES)
def test_right_answers_in_another_style_pass(id, first, record_property):
    heard = first(hear_alternatives(id[:2], id), 1)
    record_property(STYLES, len(heard))
    record_property(UNTRIED + STYLES, len(known_alternatives(id[:2])[id]) - len(heard))
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
    number = lesson.removeprefix("lesson")[:2]
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
        laboratories = [
            p for p in (ROOT / "lessons" / lesson).rglob("*.py") if "laboratory" in str(p)
        ]
        answers = {each.name for each in load_checks(lesson.removeprefix("lesson")[:2]).values()}
        for path in (checks, *laboratories):
            for name in sorted(set(imports_of(path.read_text(encoding="utf-8")))):
                ours = name.split(".")[0] in ("shared", "solutions", "lessons")
                if ours and (not ALLOWED.match(name) or name.split(".")[-1] in answers):
                    offenders.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not offenders, "\n".join(offenders)


def test_each_exercise_tells_difficulty_and_minutes():
    wrong = []
    for lesson in LESSONS:
        notebook = nbformat.read(ROOT / "lessons" / lesson / "lesson.ipynb", as_version=4)
        prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for id, checks in load_checks(lesson.removeprefix("lesson")[:2]).items():
            dots = "●" * checks.difficulty + "○" * (5 - checks.difficulty)
            heading = re.search(rf"^### Exercise {id}\b.*", prose, re.MULTILINE)
            wanted = (dots, f"{checks.minutes} min")
            if heading is None or not all(each in heading[0] for each in wanted):
                wrong.append(f"### Exercise {id} should show {' and '.join(wanted)}: {heading}")
    assert not wrong, "\n".join(wrong)


def test_there_are_lessons():
    assert LESSONS, "no lesson has checks"
