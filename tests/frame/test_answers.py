"""./run_all.sh answers: what a learner wrote, carried over a newer version of the course."""

import json
import locale
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from shared.cli.answers import KEPT, main, notebooks_of
from shared.cli.command import ROOT, parse
from shared.exercises.answers import read_cells
from shared.exercises.carrying import _is_open
from tests.frame.toy_course import RIGHT, STUBS, ToyCourse

EXTRA = "# note\nimport math"


@pytest.fixture
def made(tmp_path):
    """Make a course of one notebook in a folder, with the ids of cells as the course's have."""

    def make(name, exercises):
        course = ToyCourse(tmp_path / name)
        course.lesson.mkdir(parents=True, exist_ok=True)
        course.write(exercises)
        notebook = nbformat.read(course.notebook, as_version=4)
        for number, cell in enumerate(notebook.cells):
            cell.id = f"c-{number:08x}"
        nbformat.write(notebook, course.notebook)
        return course

    return make


def add_cells(course, cells):
    """Add cells of a learner's own, by the place at which each is to stand."""
    notebook = nbformat.read(course.notebook, as_version=4)
    for place, source in sorted(cells.items()):
        notebook.cells.insert(place, new_code_cell(source))
    nbformat.write(notebook, course.notebook)
    return course


def sources(course):
    return [cell.source for cell in nbformat.read(course.notebook, as_version=4).cells]


def answers(course, place, *words):
    return main([str(place), *words], course.root)


def kept(course):
    path = course.root / KEPT
    return path.read_text() if path.exists() else ""


def test_answers_come_over_and_a_second_time_changes_nothing(made, capsys):
    old, new = made("old", RIGHT), made("new", STUBS)
    before = new.notebook.read_text()
    assert answers(new, old.root, "--dry-run") == 0
    assert new.notebook.read_text() == before
    assert "2 cells would be carried into 1 notebook\n" in capsys.readouterr().out
    assert answers(new, old.notebook) == 0
    assert read_cells(new.notebook).exercises == RIGHT
    after = new.notebook.read_text()
    assert nbformat.writes(nbformat.reads(after, 4)) + "\n" == after, "as Jupyter writes it"
    assert answers(new, old.root) == 0
    assert new.notebook.read_text() == after
    assert "01.1 double: there already" in capsys.readouterr().out
    assert kept(new) == ""


def test_what_is_open_stays_open_and_half_an_answer_comes_over(made):
    half = {"01.1": "def helper(x): return x\n\n\n" + STUBS["01.1"]}
    newer = {"01.1": STUBS["01.1"].replace("2 x", "2 x, exactly"), "01.2": STUBS["01.2"]}
    new = made("new", newer)
    assert answers(new, made("old", STUBS).root) == 0
    assert read_cells(new.notebook).exercises == newer
    assert answers(new, made("half", half).root) == 0
    assert read_cells(new.notebook).exercises == {**half, "01.2": newer["01.2"]}


def test_a_changed_contract_is_said_and_kept(made, capsys):
    answer = STUBS["01.1"].replace("raise NotImplementedError", "return 2 * x")
    stub = STUBS["01.1"].replace("x: int", "x: float, times: int = 2").replace("2 x", "times x")
    new = made("new", {"01.1": stub})
    assert answers(new, made("old", {"01.1": answer}).root) == 0
    said = capsys.readouterr().out
    assert "double(x) is double(x, times=2) now" in said
    assert "- Return 2 x." in said
    assert "+ Return times x." in said
    assert read_cells(new.notebook).exercises["01.1"] == answer
    assert stub in kept(new)
    # An answer without a docstring does not say which contract it was written for.
    assert answers(made("same", STUBS), made("bare", RIGHT).root) == 0
    assert "contract has changed" not in capsys.readouterr().out


def test_nothing_is_lost(made, capsys):
    gone = {**RIGHT, "01.3": '@exercise("01.3")\ndef gone(x): return 3'}
    gone["01.1"] = '@exercise("01.1")\ndef double(x: int) -> int:\n    return ('
    new = made("new", {**STUBS, "01.1": RIGHT["01.1"]})
    old = made("old", gone)
    assert answers(new, old.root) == 0
    assert read_cells(new.notebook).exercises == RIGHT, "what is there stays"
    said = capsys.readouterr().out
    assert "the course has no such exercise now" in said
    assert gone["01.3"] in kept(new)
    assert gone["01.1"] in kept(new)
    before = kept(new)
    assert answers(new, old.root) == 0
    assert kept(new) == before
    for each in said, capsys.readouterr().out:
        assert each.endswith(f", 2 texts kept in {KEPT}\n"), "where they are is said each time"


def test_an_exercise_is_found_under_its_new_number_and_not_under_anothers_name(made):
    new = made("new", {"01.5": '@exercise("01.5")\ndef double(x):\n    raise NotImplementedError'})
    assert answers(new, made("old", RIGHT).root) == 0
    assert read_cells(new.notebook).exercises == {"01.5": RIGHT["01.1"].replace("01.1", "01.5")}
    assert RIGHT["01.2"] in kept(new)


def test_jupyters_lines_and_half_typed_ones_hide_no_name(made, capsys):
    triple = STUBS["01.1"].replace("double", "triple")
    double = STUBS["01.1"].replace("01.1", "01.2")
    for number, (above, line) in enumerate([("%%time\n", ""), ("!pip install x\n", ""), ("", "(")]):
        new = made(f"new{number}", {"01.1": triple, "01.2": double})
        old = made(f"old{number}", {"01.1": above + RIGHT["01.1"] + line})
        assert answers(new, old.root) == 0
        carried = (above + RIGHT["01.1"] + line).replace("01.1", "01.2")
        assert read_cells(new.notebook).exercises == {"01.1": triple, "01.2": carried}
        said = capsys.readouterr().out
        assert ("it is no Python yet" in said) == bool(line)
        assert "contract" not in said
    nameless = '@exercise("01.1")\nde triple(x):'
    new = made("new", {"01.1": triple})
    assert answers(new, made("nameless", {"01.1": nameless}).root) == 0
    assert read_cells(new.notebook).exercises == {"01.1": triple}
    assert nameless in kept(new)


def test_only_an_untouched_stub_is_open(made):
    timed = {**STUBS, "01.1": "%%time\n" + STUBS["01.1"]}
    course = made("timed", timed)
    assert answers(course, made("old", RIGHT).root) == 0
    assert read_cells(course.notebook).exercises == RIGHT
    noted = {
        "01.1": STUBS["01.1"].replace("    raise", "    # plan: x + x\n    raise"),
        "01.2": STUBS["01.2"].replace("raise NotImplementedError", "self.inner.zero_grad()", 1),
    }
    course = made("stubs", STUBS)
    assert answers(course, made("noted", noted).root) == 0
    assert read_cells(course.notebook).exercises == noted
    assert answers(course, made("right", RIGHT).root) == 0
    assert read_cells(course.notebook).exercises == noted, "what is there stays"
    paths = sorted(ROOT.glob("lessons/lesson*/lesson.ipynb"))
    exercises = [source for path in paths for source in read_cells(path).exercises.values()]
    assert len(exercises) == 123
    assert all(map(_is_open, exercises))


def test_own_cells_of_a_notebook_with_two_lessons_come_into_the_first(made):
    new = made("new", {"01.1": STUBS["01.1"]})
    second = made("second", {"02.1": STUBS["01.1"].replace("01.1", "02.1")})
    lesson = new.root / "lessons" / "lesson02_toy"
    shutil.copytree(second.lesson, lesson)
    both = {id: RIGHT["01.1"].replace("01.1", id) for id in ("01.1", "02.1")}
    old = add_cells(made("old", both), {7: "mine = 1"})
    assert answers(new, old.notebook) == 0
    assert read_cells(new.notebook).exercises == {"01.1": both["01.1"]}
    assert read_cells(lesson / "lesson.ipynb").exercises == {"02.1": both["02.1"]}
    assert sources(new).count("mine = 1") == 1


def test_own_cells_without_a_place_are_kept_or_said(made, capsys):
    new = made("new", STUBS)
    other = add_cells(made("other", {"09.1": STUBS["01.1"].replace("01.1", "09.1")}), {1: EXTRA})
    assert answers(new, other.root) == 0
    assert EXTRA in kept(new)
    old = add_cells(made("old", RIGHT), {3: "mine = 1"})
    content = json.loads(old.notebook.read_text())
    for cell in content["cells"]:
        del cell["id"]
    old.notebook.write_text(json.dumps({**content, "nbformat_minor": 4}))
    capsys.readouterr()
    assert answers(new, old.root) == 0
    assert "cells of your own were not told apart, and stay behind" in capsys.readouterr().out
    assert read_cells(new.notebook).exercises == RIGHT


def test_own_cells_come_over_where_they_stood(made, capsys):
    old, new = made("old", RIGHT), made("new", STUBS)
    notebook = nbformat.read(old.notebook, as_version=4)
    place = [c.source for c in notebook.cells].index(RIGHT["01.2"])
    notebook.cells.insert(place, new_code_cell(EXTRA))
    notebook.cells[1].source += "\nfrom math import tau as spare\nimport numpy as np"
    notebook.cells[2].source += " * np.e"
    notebook.cells[place + 1].source += "\n\n    def far(self): return np.pi"
    nbformat.write(notebook, old.notebook)
    for _ in range(2):
        assert answers(new, old.root) == 0
        found = sources(new)
        assert found.count(EXTRA) == 1
        assert found.index(EXTRA) == place
    said = capsys.readouterr().out
    assert "and 1 cell of your own" in said
    assert "it uses np, which the notebook's first cell no longer defines" in said
    assert said.count("the first cell: as it was; kept") == kept(new).count("import numpy") == 1
    assert "spare" not in said


def git(folder, *words):
    who = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "core.editor=true"]
    command = ["git", "-C", str(folder), *who, *words]
    environment = {**os.environ, "LC_ALL": "C", "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def commit(folder):
    for words in (["init", "-qb", "main"], ["add", "."], ["commit", "-qm", "as it is"]):
        assert git(folder, *words).returncode == 0


def test_a_revision_of_git_is_read_whatever_the_locale(made):
    before = locale.setlocale(locale.LC_CTYPE)
    answer = {**RIGHT, "01.1": RIGHT["01.1"] + "  # ×"}
    course = made("course", answer)
    commit(course.root)
    made("course", STUBS)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        assert answers(course, "HEAD") == 0
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert read_cells(course.notebook).exercises == answer


@pytest.mark.parametrize(
    ("says", "committed"), [("would be overwritten by merge", False), ("divergent", True)]
)
def test_what_the_page_says_about_git_pull_brings_the_answers(made, tmp_path, says, committed):
    page = (ROOT / "lessons" / "when_something_does_not_work.md").read_text().splitlines()
    (row,) = [line for line in page if line.startswith("| `git pull`") and says in line]
    *words, last = re.findall(r"`((?:git|\./run_all\.sh answers) [^`]+)`", row.split(" | ")[1])
    theirs = made("theirs", STUBS)
    commit(theirs.root)
    assert git(tmp_path, "clone", "-q", "theirs", "mine").returncode == 0
    newer = {**STUBS, "01.1": STUBS["01.1"].replace("2 x", "2 x, exactly")}
    made("theirs", newer)
    commit(theirs.root)
    mine = made("mine", {**STUBS, "01.1": RIGHT["01.1"]})
    if committed:
        commit(mine.root)
    pulled = git(mine.root, "pull")
    assert pulled.returncode
    assert says in pulled.stderr
    for command in words:
        done = git(mine.root, *shlex.split(command)[1:])
        conflict = "CONFLICT" in done.stdout
        assert conflict == (command == "git pull --no-rebase"), command
        assert conflict or done.returncode == 0, done.stderr
    assert read_cells(mine.notebook).exercises == newer
    assert answers(mine, *shlex.split(last)[2:]) == 0
    assert read_cells(mine.notebook).exercises == {**newer, "01.1": RIGHT["01.1"]}


def test_the_notebooks_of_a_folder_are_those_that_show(made, tmp_path, monkeypatch):
    new, hidden = made("new", STUBS), tmp_path / ".hidden" / "old"
    (hidden / ".ipynb_checkpoints").mkdir(parents=True)
    wrong = {**RIGHT, "01.1": RIGHT["01.1"].replace("2", "3")}
    for name in ("lesson-Copy1.ipynb", ".ipynb_checkpoints/lesson.ipynb"):
        shutil.copy(made("wrong", wrong).notebook, hidden / name)
    shutil.copy(made("old", RIGHT).notebook, hidden / "lesson.ipynb")
    monkeypatch.chdir(hidden)
    for place in (".", hidden, "../../.hidden/old"):
        found = [Path(each.place).name for each in notebooks_of(str(place), new.root)]
        assert found == ["lesson.ipynb", "lesson-Copy1.ipynb"]
    assert answers(new, ".") == 0
    assert read_cells(new.notebook).exercises == RIGHT


def test_where_nothing_can_be_kept_nothing_is_replaced(made, capsys):
    new = made("new", {**STUBS, "01.1": RIGHT["01.1"]})
    old = made("old", {**RIGHT, "01.1": RIGHT["01.1"].replace("2", "3")})
    (new.root / "runs").touch()
    before = new.notebook.read_text()
    assert answers(new, old.root) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "runs" in line
    assert said.out == ""
    assert new.notebook.read_text() == before


def test_bad_input_is_one_line_and_changes_nothing(made, tmp_path, capsys):
    new, old = made("new", STUBS), made("old", RIGHT)
    shutil.copy(old.notebook, tmp_path / "twice.ipynb")
    twice = json.loads((tmp_path / "twice.ipynb").read_text())
    twice["cells"] += twice["cells"]
    (tmp_path / "twice.ipynb").write_text(json.dumps(twice))
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken" / "b.ipynb"
    broken.parent.mkdir()
    shutil.copy(old.notebook, broken.with_name("a.ipynb"))
    broken.write_text('{"cells": [\n<<<<<<< HEAD')
    before = new.notebook.read_text()
    wrong = {
        tmp_path / "empty": "no notebook",
        tmp_path / "nowhere": "is no notebook, no folder, and no revision",
        broken.parent: "b.ipynb cannot be read as a notebook",
        tmp_path / "twice.ipynb": "holds exercise 01.1 twice",
        new.root: "is this course's own",
        new.notebook: "is this course's own",
    }
    for place, words in wrong.items():
        assert answers(new, place) == 2
        said = capsys.readouterr()
        (line,) = said.err.splitlines()
        assert words in line
        assert said.out == ""
    assert new.notebook.read_text() == before


def test_the_command_hands_on_what_it_is_asked():
    assert parse(["answers", "x", "--dry-run"]).arguments == ["x", "--dry-run"]
    assert parse(["answers", "x"]).arguments == ["x"]
