"""Pristine lessons, and what is taken out of a submitted notebook, whatever is in it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.intake import lesson as lesson_module
from solutions.grading.intake.lesson import read_lessons, take_answers
from solutions.grading.intake.notebook import MAX_CODE_CHARACTERS, borrowed, look
from solutions.grading.results import Outcome

COURSE = Path(__file__).resolve().parents[2]
LESSON = read_lessons(COURSE, ["02"])["02"]
PRISTINE = (COURSE / "lessons/lesson02_attention/lesson.ipynb").read_bytes()
PADDING = '@exercise("02.2")\ndef padding_mask(tokens, pad_id=0):\n    return tokens != pad_id\n'
CAUSAL = '@exercise("02.3")\ndef causal_mask(length, device=None):\n    return length\n'
IDS = ["02.1", "02.2", "02.3", "02.4a", "02.4b", "02.5"]


def code(source: object, **more: object) -> dict:
    """A code cell as JSON has it."""
    return {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], **more}


def notebook(*cells: object, **more: object) -> bytes:
    """A notebook with these cells; texts are sources of code cells."""
    cells = [code(each) if isinstance(each, str) else each for each in cells]
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells, **more}
    return json.dumps(content).encode()


def test_a_pristine_lesson_has_exercises_names_points_setup_and_stubs():
    assert [each.id for each in LESSON.exercises] == IDS == list(LESSON.stubs)
    assert [each.points for each in LESSON.exercises] == [3, 1, 1, 2, 1, 5]
    assert LESSON.exercises[1].name == "padding_mask"
    assert LESSON.folder == "lesson02_attention" and LESSON.number == "02"
    assert "from shared.exercises.notebook import check, exercise" in LESSON.setup
    assert all("raise NotImplementedError" in stub for stub in LESSON.stubs.values())


def test_what_is_the_exercise_itself_is_read_from_the_checks():
    forbidden = read_lessons(COURSE, ["15"])["15"].forbidden
    assert forbidden["15.1"] == ("shared.pipeline.stages.split_stages",)
    assert "shared.pipeline.schedules.gpipe" in forbidden["15.4"]  # made of other constants


@pytest.mark.parametrize("given", ["02", "2", " 2", "lesson02_attention"])
def test_a_lesson_is_named_by_number_or_folder(given):
    assert list(read_lessons(COURSE, [given])) == ["02"]


@pytest.mark.parametrize("given", ["99", "two", "", "../02"])
def test_an_unknown_lesson_is_an_input_error_that_names_the_known_ones(given):
    with pytest.raises(InputError, match=r"no lesson .* \(lessons: 01 02"):
        read_lessons(COURSE, ["01", given])


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A small course with a copy of the grader, to change something in it."""
    shutil.copytree(
        COURSE / "lessons/lesson01_positional_encoding", tmp_path / "lessons/lesson01_a"
    )
    shutil.copytree(COURSE / "solutions/grading", tmp_path / "grading")
    shutil.copytree(COURSE / "shared", tmp_path / "shared")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/pairs.txt").write_text("1")
    monkeypatch.setattr(lesson_module, "__file__", str(tmp_path / "grading/intake/lesson.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "old", "new", "same"),
    [
        ("lessons/lesson01_a/checks.py", '"""', '"""\n', False),
        ("shared/errors.py", '"""', '""" ', False),
        ("datasets/pairs.txt", "1", "2", False),
        ("grading/results.py", '"""', '""" ', False),
        ("grading/sandbox/inside/judge.py", '"""', '""" ', False),
        ("lessons/lesson01_a/lesson.ipynb", "float32.", "f32.", False),  # in a stub
        ("lessons/lesson01_a/lesson.ipynb", '"## ', '"### ', True),  # in the prose
        ("grading/unknown.txt", "", "x", True),
    ],
)
def test_the_digest_follows_what_can_change_a_grade(course, changed, old, new, same):
    path = course / changed
    path.touch()
    before = read_lessons(course)["01"].digest
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert (read_lessons(course)["01"].digest == before) is same


def test_the_pristine_notebook_answers_with_its_own_stubs():
    answers = take_answers("Ada", LESSON, PRISTINE)
    assert answers.cells == LESSON.stubs
    assert answers.student == "Ada" and answers.lesson == "02"
    assert not answers.problems and not answers.notes


def test_another_lessons_notebook_is_called_by_its_name():
    lesson = read_lessons(COURSE, ["01"])["01"]
    reasons = {reason for _, reason in take_answers("Ada", lesson, PRISTINE).problems.values()}
    assert reasons == {"this notebook holds exercises of lesson 02, none of lesson 01"}


NOT_A_NOTEBOOK = {
    "blank": (b" \n ", "empty file"),
    "web page": (b"\n<!DOCTYPE html><html></html>", "a web page was saved"),
    "cut off": (PRISTINE[:5000], "not JSON: "),
    "merge conflict": (b'{\n"a": 1,\n>>>>>>> mine\n}', "not JSON: .* line 3"),
    "UTF-16": ("{}".encode("utf-16"), "no notebook: it has no nbformat"),
    "a list": (b"[1, 2]", "no notebook: it has no nbformat number"),
    "no format": (b'{"cells": []}', "it has no nbformat number"),
    "format 3": (notebook(nbformat=3), "wrong version: notebook format 3; save it as format 4"),
    "format in words": (notebook(nbformat="4"), "wrong version: notebook format '4'"),
    "nested format": (notebook(nbformat=[[]]), "notebook format list"),
    "long format": (notebook(nbformat="x" * 10**6), "wrong version: .{0,80}$"),
    "cells a text": (notebook(cells="none"), "it has no list of cells"),
    "no cells": (notebook(), "the notebook has no cell of code"),
    "nested lists": (b"[" * 500_000, "nested too deeply"),
    "nested cells": (notebook(cells=0)[:-2] + b'{"a":' * 90_000, "nested too deeply"),
    "long number": (b'{"nbformat": ' + b"4" * 10_000 + b"}", "not JSON: Exceeds the limit"),
    "too many values": (b"[" + b"[]," * 600_000, "more than 1000000 values"),
    "too much code": (notebook(*["a + b +" * 20_000] * 15), "its cells hold 2100000 characters"),
}


@pytest.mark.parametrize("case", NOT_A_NOTEBOOK)
def test_what_is_no_notebook_has_one_reason_for_every_exercise(case):
    data, words = NOT_A_NOTEBOOK[case]
    answers = take_answers("Ada", LESSON, data)
    assert not answers.cells and list(answers.problems) == IDS
    ((outcome, reason),) = set(answers.problems.values())
    assert outcome is Outcome.UNREADABLE
    assert "\n" not in reason and len(reason) < 200
    assert re.search(words, reason), reason


def changed(old: str, new: str) -> str:
    assert old in PADDING
    return PADDING.replace(old, new)


LOST = 'cell 1 defines padding_mask and is not marked .*: put @exercise."02.2". back$'
MISSING = {
    "deleted": ([], "no cell of exercise 02.2$"),
    "all broken": (["@exercise(02."], "no cell of exercise 02.2; cell 1: syntax error in line 1"),
    "inside an if": (["if True:\n    " + changed("\n", "\n    ")], "no cell of exercise 02.2"),
    "no text": ([code(7), code(None), code([PADDING, 1])], "no cell of exercise 02.2"),
    "in prose": ([{"cell_type": "markdown", "source": PADDING}], "no cell of exercise"),
    "in a text": (['text = """' + "\n" + PADDING + '"""'], "no cell of exercise 02.2"),
    "commented out": (["#" + changed("\n", "\n#")], "no cell of exercise 02.2"),
}
UNREADABLE = {
    "other id": ([changed("02.2", "02.9"), CAUSAL], LOST),
    "no decorator": ([PADDING.split("\n", 1)[1]], LOST),
    "long number for id": ([changed('"02.2"', "0x" + "f" * 5000)], LOST),
    "twice": ([PADDING, CAUSAL, PADDING], r"there 2 times \(cells 1 and 3\)"),
    "two in one": ([PADDING + CAUSAL], "the exercises 02.2 and 02.3: give each"),
    "two ids": (['@exercise("02.3")\n' + PADDING], "the exercises 02.3 and 02.2"),
    "other name": ([changed("padding_mask", "mask")], "called padding_mask; the cell defines mask"),
    "syntax error": ([PADDING + "    return ("], r"syntax error in line 4 .* \(return \(\)"),
    "broken decorator": ([changed('2.2")', '2.2"')], "syntax error in line 1 of the cell"),
    "tabs": ([PADDING + "\treturn 1\n"], "syntax error in line 4.*(tabs|indent)"),
    "magic": (["%%timeit\n" + PADDING], r"syntax error in line 1 of the cell: .* \(%%timeit\)"),
    "assigned": (
        ["padding_mask = 3"],
        r"cell 1 defines padding_mask and is not marked .*: put @ex",
    ),
    "null byte": ([PADDING + "\0"], "null bytes"),
    "parentheses": ([PADDING + "(" * 5000], "too many nested parentheses"),
    "minus signs": ([PADDING + "-" * 90_000 + "1"], "Python cannot read the cell"),
    "half character": ([PADDING + "'\ud800'"], "surrogates not allowed"),
    "long cell": ([PADDING + "#" * MAX_CODE_CHARACTERS], "it has 2000082 characters"),
}
REFUSED = [(Outcome.MISSING, *case) for case in MISSING.values()]
REFUSED += [(Outcome.UNREADABLE, *case) for case in UNREADABLE.values()]


@pytest.mark.parametrize(("outcome", "cells", "words"), REFUSED, ids=[*MISSING, *UNREADABLE])
def test_a_cell_that_cannot_be_taken_has_its_reason_and_costs_the_others_nothing(
    outcome, cells, words
):
    alone = "02.3" not in json.dumps(cells)
    answers = take_answers("Ada", LESSON, notebook(*cells, *[CAUSAL] * alone))
    found, reason = answers.problems["02.2"]
    assert found is outcome, reason
    assert re.search(words, reason), reason
    assert "\n" not in reason and len(reason) < 250
    assert set(answers.cells) | set(answers.problems) == set(IDS)
    assert not alone or answers.cells == {"02.3": CAUSAL}


ACCEPTED = {
    "a list of lines": code(PADDING.splitlines(keepends=True)),
    "metadata damaged": code(PADDING, metadata={"nbgrader": [1], "tags": 7}),
    "outputs damaged": code(PADDING, outputs=[None, 3, {"data": []}], execution_count="x"),
    "no metadata": {"cell_type": "code", "source": PADDING},
    "other quotes": code(changed('"', "'")),
    "with a helper": code("def pad(x):\n    return x\n\n" + PADDING),
    "wrong escape": code(PADDING + 'text = "\\d"\n'),
    "other decorators": code(changed("def ", "@staticmethod\ndef ")),
    "Windows lines": code(changed("\n", "\r\n")),
    "umlauts": code(PADDING + "# größer, 长\n"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_does_no_harm_is_taken_as_it_is(case):
    cell = ACCEPTED[case]
    damaged = (None, 3, [], {"cell_type": 4}, {}, "x = (", "!ls")
    answers = take_answers("Ada", LESSON, b"\xef\xbb\xbf" + notebook(cell, *damaged))
    assert answers.cells == {"02.2": "".join(cell["source"])}


LINES = [
    "%%capture out",
    "%%ranks 2",
    "%matplotlib inline",
    "%load_ext x",
    "%pip install x",
    "?torch",
]


@pytest.mark.parametrize("line", [*LINES, "!rm -rf ~", "%time !ls"])
def test_a_command_that_changes_nothing_is_commented_out(line):
    answers = take_answers("Ada", LESSON, notebook(f"{line}\n{PADDING}"))
    assert answers.cells == {"02.2": f"# {line}\n{PADDING}"}


ASKED = f"{PADDING}if True:\n    !ls\n    files = !ls\n    size = %time len('!')\npadding_mask?\n"
ASKED += "%time table = [3]\n"


def test_commands_within_code_leave_it_code():
    (cell,) = take_answers("Ada", LESSON, notebook(ASKED)).cells.values()
    assert cell.splitlines()[-6:] == [
        "if True:",
        "    pass  # !ls",
        "    files = None  # !ls",
        "    size = len('!')",
        "# padding_mask?",
        "table = [3]",
    ]


def test_what_looks_like_a_command_in_a_cell_that_is_python_stays():
    cell = PADDING + 'text = """\n!ls\n%time\nreally?\n"""\nx = (7\n  % 3)\n'
    assert take_answers("Ada", LESSON, notebook(cell)).cells == {"02.2": cell}
    one, more = "%time y = 3\n", "".join(f"!ls {number}\n" for number in range(40))
    answers = take_answers("Ada", LESSON, notebook(one + cell))
    assert answers.cells == {"02.2": "y = 3\n" + cell}
    (many,) = take_answers("Ada", LESSON, notebook(more + PADDING)).cells.values()
    assert many == more.replace("!", "# !") + PADDING


@pytest.mark.parametrize(
    ("other", "uses", "named"),
    [
        ("def pad(x):\n    return x", "pad(tokens)", "pad (cell 1)"),
        ("import einops", "einops.rearrange(tokens, 'a -> a')", "einops (cell 1)"),
        ("from math import tau, inf as big", "tau * big", "big (cell 1), tau (cell 1)"),
        ("size = 3", "tokens.sum(size)", "size (cell 1)"),
        *(("x = F = len = 3", f"({own})", "") for own in ("F.relu(tokens)", "len(tokens)")),
        *(("x = 3", own, "") for own in ("causal_mask(3)", "[x for x in tokens]", "unknown")),
    ],
)
def test_what_an_answer_uses_from_a_cell_that_is_not_taken_is_noted(other, uses, named):
    cell = changed("tokens != pad_id", uses)
    answers = take_answers("Ada", LESSON, notebook(other, cell, CAUSAL))
    note = f"uses {named}, but only exercise cells are graded: move it into this cell"
    assert answers.notes == ({"02.2": (note,)} if named else {})


def test_what_a_flagged_cell_has_imported_is_flagged_in_every_cell():
    source = "from shared.model import attention\nimport math\n" + PADDING
    uses = CAUSAL.replace("length\n", "attention.causal_mask(length)\n")
    flags = take_answers("Ada", LESSON, notebook(source, uses)).flags
    assert list(map(str, flags["02.3"])) == ["line 1 uses attention, of a cell that needs a look"]
    assert not take_answers("Ada", LESSON, notebook(source, CAUSAL)).flags["02.3"]


def test_names_that_a_match_or_an_async_function_binds_are_the_answer_s_own():
    """Where another cell has the same names, an honest answer heard that it takes them there."""
    source = """async def helper(rows):
    match rows:
        case [first, *rest]: return first, rest
        case {"a": 1, **more}: return more
        case whole: return whole
    return outside"""
    other = look("first = rest = more = whole = helper = outside = 1", 7)
    assert borrowed(look(source), [other], frozenset()) == ["outside (cell 7)"]


def test_a_right_answer_in_the_wrong_cell_is_named():
    cells = json.loads(PRISTINE)
    name = LESSON.exercises[0].name
    answer = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells["cells"].append({**answer, "source": f"def {name}(*args):\n    return args"})
    answers = take_answers("Ada", LESSON, json.dumps(cells).encode())
    outcome, why = answers.problems["02.1"]
    assert outcome is Outcome.UNREADABLE
    assert f"is as it was, and cell {len(cells['cells'])} defines {name}: move it" in why
    assert len(answers.problems) == 1
