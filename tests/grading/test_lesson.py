"""Pristine lessons, and what is taken out of a submitted notebook, whatever is in it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.intake import lesson as lesson_module
from solutions.grading.intake.lesson import read_lessons, take_answers
from solutions.grading.intake.notebook import MAX_BYTES, MAX_CELL_CHARACTERS
from solutions.grading.results import Outcome

COURSE = Path(__file__).resolve().parents[2]
LESSON = read_lessons(COURSE, ["02"])["02"]
PRISTINE = (COURSE / "lessons/02_attention/lesson.ipynb").read_bytes()
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
    assert LESSON.folder == "02_attention" and LESSON.number == "02"
    assert "from shared.exercises.notebook import check, exercise" in LESSON.setup
    assert all("raise NotImplementedError" in stub for stub in LESSON.stubs.values())


@pytest.mark.parametrize("given", ["02", "2", " 2", "02_attention"])
def test_a_lesson_is_named_by_number_or_folder(given):
    assert list(read_lessons(COURSE, [given])) == ["02"]


@pytest.mark.parametrize("given", ["99", "two", "", "../02", "0"])
def test_an_unknown_lesson_is_an_input_error_that_names_the_known_ones(given):
    with pytest.raises(InputError, match=r"no lesson .* \(lessons: 01 02"):
        read_lessons(COURSE, ["01", given])


def small_course(place: Path) -> Path:
    shutil.copytree(COURSE / "lessons/01_positional_encoding", place / "lessons/01_a")
    (place / "shared/exercises").mkdir(parents=True)
    (place / "shared/exercises/expecting.py").write_text("x = 1\n")
    (place / "datasets").mkdir()
    (place / "datasets/pairs.txt").write_text("a\n")
    return place


@pytest.mark.parametrize(
    "changed", ["lessons/01_a/checks.py", "shared/exercises/expecting.py", "datasets/pairs.txt"]
)
def test_the_digest_changes_with_what_can_change_a_grade(tmp_path, changed):
    course = small_course(tmp_path)
    before = read_lessons(course)["01"].digest
    assert read_lessons(course)["01"].digest == before
    with (course / changed).open("a") as file:
        file.write("\n")
    assert read_lessons(course)["01"].digest != before


def test_the_digest_changes_with_any_file_of_the_grader(tmp_path, monkeypatch):
    """Also with those in its folders: what runs in the kernel above all."""
    grader = tmp_path / "grading"
    shutil.copytree(COURSE / "solutions/grading", grader)
    course = small_course(tmp_path / "course")
    monkeypatch.setattr(lesson_module, "__file__", str(grader / "intake/lesson.py"))
    digests = {read_lessons(course)["01"].digest}
    for name in ("results.py", "sandbox/inside/guard.py", "intake/cells.py"):
        with (grader / name).open("a") as file:
            file.write("\n")
        digests.add(read_lessons(course)["01"].digest)
    assert len(digests) == 4


@pytest.mark.parametrize(("old", "new", "same"), [("# ", "# ", True), ("float32.", "f32.", False)])
def test_the_digest_follows_the_notebook_where_it_counts(tmp_path, old, new, same):
    course = small_course(tmp_path)
    before = read_lessons(course)["01"].digest
    path = course / "lessons/01_a/lesson.ipynb"
    content = json.loads(path.read_text())
    for cell in content["cells"]:
        cell["source"] = "".join(cell["source"]).replace(old, new)
        cell["outputs"] = []
    path.write_text(json.dumps(content))
    assert (read_lessons(course)["01"].digest == before) is same


def test_the_pristine_notebook_answers_with_its_own_stubs():
    answers = take_answers("Ada", LESSON, PRISTINE)
    assert answers.cells == LESSON.stubs
    assert answers.student == "Ada" and answers.lesson == "02"
    assert not answers.problems and not answers.notes


# Each case: the notebook, the exercises that are taken, and of those that are not one's reason.
NOT_A_NOTEBOOK = {
    "empty": (b"", "empty file"),
    "blank": (b" \n ", "empty file"),
    "web page": (b"\n<!DOCTYPE html><html></html>", "a web page was saved"),
    "cut off": (PRISTINE[:5000], "not JSON: "),
    "not JSON": (b"def f(): pass", "not JSON: Expecting value in line 1"),
    "merge conflict": (b'{\n"a": 1,\n>>>>>>> mine\n}', "not JSON: .* in line 3"),
    "a zip": (b"PK\x03\x04\xff\xff", "not UTF-8 text: byte 4 is 0xff"),
    "UTF-16": ("{}".encode("utf-16"), "not UTF-8 text: byte 0 is 0xff"),
    "a list": (b"[1, 2]", "no notebook: it has no nbformat number"),
    "no format": (b'{"cells": []}', "it has no nbformat number"),
    "format 2": (notebook(nbformat=2), "wrong version: notebook format 2;"),
    "format 5": (notebook(nbformat=5), "wrong version: notebook format 5;"),
    "format in words": (notebook(nbformat="4"), 'wrong version: notebook format "4"'),
    "format true": (notebook(nbformat=True), "wrong version: notebook format true"),
    "format 4.0": (notebook(nbformat=4.0), "wrong version"),
    "long format": (notebook(nbformat="x" * 10**6), "wrong version: .{0,80}$"),
    "cells a text": (notebook(cells="none"), "it has no list of cells"),
    "cells none": (notebook(cells=None), "it has no list of cells"),
    "nested lists": (b"[" * 500_000, "nested too deeply"),
    "nested cells": (notebook(cells=0)[:-2] + b'{"a":' * 90_000, "nested too deeply"),
    "long number": (b'{"nbformat": ' + b"4" * 10_000 + b"}", "not a notebook: Exceeds the limit"),
    "too many values": (b"[" + b"[]," * 600_000, "more than 1000000 values"),
    "too much code": (notebook(*["a + b +" * 20_000] * 15), "its cells hold 2100000 characters"),
    "too large": (b" " * (MAX_BYTES + 1), "has 20 MB; at most 20 are read"),
}


@pytest.mark.parametrize("case", NOT_A_NOTEBOOK)
def test_what_is_no_notebook_has_one_reason_for_every_exercise(case):
    data, words = NOT_A_NOTEBOOK[case]
    answers = take_answers("Ada", LESSON, data)
    assert not answers.cells
    assert list(answers.problems) == IDS
    assert set(answers.problems.values()) == {(Outcome.UNREADABLE, answers.problems["02.1"][1])}
    reason = answers.problems["02.1"][1]
    assert "\n" not in reason and len(reason) < 200
    assert re.search(words, reason), reason


NAMED = {"nbgrader": {"grade_id": "exercise-02-2"}}
UNREADABLE, MISSING = Outcome.UNREADABLE, Outcome.MISSING
CELLS = {
    "missing": ([CAUSAL], MISSING, "no cell of exercise 02.2"),
    "deleted": ([], MISSING, "no cell of exercise 02.2"),
    "twice": ([PADDING, CAUSAL, PADDING], UNREADABLE, r"there 2 times \(cells 1 and 3\)"),
    "two in one": ([PADDING + CAUSAL], UNREADABLE, "the exercises 02.2 and 02.3: give each"),
    "two ids": (['@exercise("02.3")\n' + PADDING], UNREADABLE, "the exercises 02.3 and 02.2"),
    "other id": ([PADDING.replace("02.2", "02.9")], MISSING, "as exercise 02.9, not 02.2: put"),
    "mixed up": ([PADDING.replace("02.2", "02.3")], MISSING, "as exercise 02.3, not 02.2: put"),
    "other name": (
        [PADDING.replace("padding_mask", "mask")],
        UNREADABLE,
        "is called padding_mask; the cell defines mask",
    ),
    "no decorator": (
        [PADDING.split("\n", 1)[1]],
        MISSING,
        '@exercise."02.2". is missing above padding_mask in cell 1',
    ),
    "inside an if": (
        ["if True:\n    " + PADDING.replace("\n", "\n    ")],
        MISSING,
        "no cell of exercise 02.2",
    ),
    "syntax error": ([PADDING + "    return ("], UNREADABLE, "syntax error in line 4 of the cell"),
    "broken decorator": (
        [PADDING.replace('2.2")', '2.2"')],
        UNREADABLE,
        "syntax error in line 1 of the cell",
    ),
    "broken, named": (
        [code("@exercise(02.", metadata=NAMED)],
        UNREADABLE,
        "syntax error in line 1",
    ),
    "tabs": ([PADDING + "\treturn 1\n"], UNREADABLE, "syntax error in line 4.*(tabs|indent)"),
    "magic": (["%%timeit\n" + PADDING], UNREADABLE, r"line 1 .* notebook command \(%%timeit\)"),
    "line magic": ([PADDING + "x = %env"], UNREADABLE, "syntax error in line 4"),
    "shell": ([PADDING + "\n!rm -rf ~"], UNREADABLE, r"line 5 .* notebook command \(!rm -rf ~\)"),
    "null byte": ([PADDING + "\0"], UNREADABLE, "null bytes"),
    "parentheses": ([PADDING + "(" * 5000], UNREADABLE, "too many nested parentheses"),
    "minus signs": ([PADDING + "-" * 90_000 + "1"], UNREADABLE, "Python cannot read the cell"),
    "half character": ([PADDING + "'\ud800'"], UNREADABLE, "lone surrogate"),
    "long cell": ([PADDING + "#" * MAX_CELL_CHARACTERS], UNREADABLE, "has 200082 characters"),
    "number": (
        [code(7, metadata=NAMED)],
        UNREADABLE,
        "cell 1 is damaged: its source is no text but int",
    ),
    "null": ([code(None, metadata=NAMED)], UNREADABLE, "its source is no text but NoneType"),
    "mixed list": ([code([PADDING, 1], metadata=NAMED)], UNREADABLE, "no text but list"),
    "unnamed number": ([code(7)], MISSING, "no cell of exercise 02.2; cell 1 is damaged"),
    "in prose": ([{"cell_type": "markdown", "source": PADDING}], MISSING, "no cell of exercise"),
    "in a text": ([f"text = '''\n{PADDING}'''"], MISSING, "no cell of exercise 02.2"),
    "commented out": (["#" + PADDING.replace("\n", "\n#")], MISSING, "no cell of exercise 02.2"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_cell_that_cannot_be_taken_has_its_reason(case):
    cells, outcome, words = CELLS[case]
    answers = take_answers("Ada", LESSON, notebook(*cells))
    found, reason = answers.problems["02.2"]
    assert found is outcome, reason
    assert re.search(words, reason), reason
    assert "\n" not in reason and len(reason) < 250
    assert set(answers.cells) | set(answers.problems) == set(IDS)


ACCEPTED = {
    "a list of lines": code(PADDING.splitlines(keepends=True)),
    "metadata a number": code(PADDING, metadata=3),
    "nbgrader a list": code(PADDING, metadata={"nbgrader": [1], "tags": 7}),
    "outputs damaged": code(PADDING, outputs=[None, 3, {"data": []}], execution_count="x"),
    "no metadata": {"cell_type": "code", "source": PADDING},
    "other quotes": code(PADDING.replace('"', "'")),
    "with a helper": code("def pad(x):\n    return x\n\n" + PADDING),
    "wrong escape": code(PADDING + 'text = "\\d"\n'),
    "other decorators": code(PADDING.replace("def ", "@staticmethod\ndef ")),
    "Windows lines": code(PADDING.replace("\n", "\r\n")),
    "umlauts": code(PADDING + "# größer, 长\n"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_does_no_harm_is_taken_as_it_is(case):
    cell = ACCEPTED[case]
    answers = take_answers("Ada", LESSON, notebook(cell, None, 3, [], {"cell_type": 4}, {}))
    source = cell["source"]
    assert answers.cells == {"02.2": source if isinstance(source, str) else "".join(source)}


@pytest.mark.parametrize("line", ["%%time", "%%capture", "%matplotlib inline", "%load_ext x"])
def test_a_command_that_changes_nothing_is_left_out_and_noted(line):
    answers = take_answers("Ada", LESSON, notebook(f"{line}\n{PADDING}"))
    assert answers.cells == {"02.2": f"# {line}\n{PADDING}"}
    assert answers.notes == {"02.2": (f"without {line}",)}


def test_one_broken_cell_costs_the_others_nothing():
    answers = take_answers("Ada", LESSON, notebook("x = (", PADDING + "  (", CAUSAL, "!ls"))
    assert answers.cells == {"02.3": CAUSAL}


def test_a_byte_order_mark_is_no_matter():
    answers = take_answers("Ada", LESSON, b"\xef\xbb\xbf" + notebook(PADDING))
    assert list(answers.cells) == ["02.2"]


def test_the_old_format_is_read_and_noted():
    old = {"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "input": PADDING}]}, 3]}
    answers = take_answers("Ada", LESSON, json.dumps(old).encode())
    assert answers.cells == {"02.2": PADDING}
    assert answers.notes == {"": ("the notebook has the old format 3",)}


def test_another_lessons_notebook_is_called_by_its_name():
    lesson = read_lessons(COURSE, ["01"])["01"]
    reasons = {reason for _, reason in take_answers("Ada", lesson, PRISTINE).problems.values()}
    assert reasons == {"this notebook holds exercises of lesson 02, none of lesson 01"}


@pytest.mark.parametrize(
    ("other", "uses", "named"),
    [
        ("def pad(x):\n    return x", "pad(tokens)", "pad (cell 1)"),
        ("import einops", "einops.rearrange(tokens, 'a -> a')", "einops (cell 1)"),
        ("from math import tau, inf as big", "tau * big", "big (cell 1), tau (cell 1)"),
        ("size = 3", "tokens.sum(size)", "size (cell 1)"),
    ],
)
def test_what_an_answer_uses_from_a_cell_that_is_not_taken_is_noted(other, uses, named):
    cell = PADDING.replace("tokens != pad_id", uses)
    answers = take_answers("Ada", LESSON, notebook(other, cell))
    note = f"uses {named}, but only exercise cells are graded: move it into this cell"
    assert answers.notes == {"02.2": (note,)}


@pytest.mark.parametrize(
    "uses", ["F.relu(tokens)", "causal_mask(3)", "[x for x in tokens]", "len(tokens)", "unknown"]
)
def test_what_setup_exercises_and_python_give_is_not_noted(uses):
    cell = PADDING.replace("tokens != pad_id", uses)
    assert not take_answers("Ada", LESSON, notebook("x = F = 3", cell, CAUSAL)).notes
