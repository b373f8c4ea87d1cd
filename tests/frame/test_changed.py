"""./run_all.sh test --changed: what a change selects, by git and the course, and what is said."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shared.cli import changed, command
from shared.cli.changed import Course, arguments, changed_files, only_prose_changed, select
from shared.cli.proven import SCRIPT, pytest_collection_modifyitems
from shared.errors import InputError
from shared.exercises.lessons import ROOT

pytest.importorskip("grimp", reason="it comes with the extra [dev]")
NOTEBOOK = "lessons/lesson06_ddp/lesson.ipynb"


@pytest.fixture(scope="module")
def course():
    return Course(ROOT)


# A file that changes, something that it selects, and something that it does not.
SELECTED = """
shared/lora/nf4.py                          notebook19                 notebook06
shared/lora/nf4.py                          lesson19_lora/script       lesson06_ddp/ddp
shared/lora/nf4.py                          frame/checks[19]           frame/checks[06]
lessons/lesson06_ddp/laboratory/__init__.py notebook06                 lesson19_lora/lora
lessons/lesson06_ddp/train.py               training/engines           frame/todo
lessons/lesson06_ddp/checks.py              frame/checks[06]           frame/checks
lessons/lesson06_ddp/lesson.ipynb           frame/signatures           frame/script
solutions/lesson06_ddp.py                   notebook06                 notebook19
solutions/mistakes/lesson06_ddp.py          frame/checks[06]           notebook06
solutions/alternatives/lesson06_ddp.py      frame/checks[06]           notebook06
solutions/grading/sandbox/inside/judge.py   grading/hostile            notebook06
shared/exercises/signatures.json            frame/signatures           data/hub
shared/book/glossary.toml                   book/book                  notebook06
lessons/lesson10_zero/ds_zero1.json         lesson10_zero/deepspeed    notebook06
lessons/lesson21_clusters/start/hostfile    lesson21_clusters/clusters notebook06
shared/exercises/todo.py                    frame/todo                 data/hub
solutions/nbgrader_config.py                grading/nbgrader           data/hub
tests/pretend_gpu/sitecustomize.py          pretend_gpu/pretend_gpu    data/hub
tests/threads.py                            frame/threads_at_exit      notebook06
tests/data/stand_in_hub.py                  data/hub                   frame/checks
tests/frame/conftest.py                     frame/todo                 data/hub
tests/frame/toy_course.py                   frame/todo                 data/hub
shared/cli/runner.py                        frame/run_all              frame/checks
shared/data/no_more.py                      frame/style                data/hub
README.md                                   frame/translation          notebook06
environment.yml                             frame/environment          notebook06
tests/promises.md                           frame/promises             notebook06
"""


@pytest.mark.parametrize("line", SELECTED.strip().splitlines())
def test_a_change_selects_what_uses_it_and_leaves_out_what_does_not(course, line):
    path, *others = line.split()
    found = {in_short(each) for each in course.affected(path)}
    assert [each in found for each in others] == [True, False]


def in_short(unit):
    """Return "notebook06" of its path, and "frame/links" of tests/frame/test_links.py."""
    notebook = re.sub(r"lessons/lesson(\d\d)_\w+/lesson.ipynb", r"notebook\1", unit)
    return re.sub(r"tests/(\w+/)test_|\.py", r"\1", notebook)


def test_every_script_is_tested_when_it_changes(course):
    scripts = [each for each in course.texts if each.endswith("/train.py")]
    assert len(scripts) == len(course.notebooks)
    for script in scripts:
        found = course.affected(script)
        folder = script.split("/")[1]
        assert [each for each in found if SCRIPT.fullmatch(each) and f"/{folder}/" in each], script


@pytest.mark.parametrize(
    "path",
    ["shared/ranks/forked.py", "tests/conftest.py", "pyproject.toml", "run_all.sh", "new." + "xyz"],
)
def test_what_all_use_and_what_nobody_is_known_to_read_selects_everything(course, path):
    assert course.affected(path) is None


def test_a_sentence_in_one_lesson_selects_its_notebook_and_the_rules_over_files(course):
    rules = {"layers", "links", "style", "translation", "notebooks", "one_execution", "checks"}
    files = {f"tests/frame/test_{each}.py" for each in rules}
    files |= {"tests/book/test_chinese.py", "tests/book/test_glossary.py"}
    found = course.affected(NOTEBOOK, prose=True)
    assert {each.split("[")[0] for each in found} == files | {NOTEBOOK}


def test_the_table_names_tests_that_exist(course):
    named = " ".join([*changed.READERS.values(), changed.CODE_READERS]).split()
    assert {each.split("[")[0] for each in named if "*" not in each} <= set(course.texts)


def test_who_still_names_a_module_that_is_gone_is_tested(course, monkeypatch):
    text = "from shared.data import corpora, no_more"
    monkeypatch.setitem(course.texts, "tests/data/test_hub.py", text)
    assert "tests/data/test_hub.py" in course.affected("shared/data/no_more.py")
    assert "tests/data/test_hub.py" not in course.affected("shared/data/no_other.py")


def test_a_file_is_whole_or_has_cases():
    selected = {"tests/a.py", "tests/a.py[06]", "tests/b.py[10]", "tests/b.py[06]", "tests/c.py[]"}
    words = ["--cases=tests/b.py=06,10", "--cases=tests/c.py="]
    assert arguments(selected) == ["tests/a.py", "tests/b.py", "tests/c.py", *words]


class Item:
    """What the plugin reads of a test that is not marked."""

    def __init__(self, nodeid):
        self.nodeid = nodeid

    def get_closest_marker(self, name):
        return None


def test_cases_of_other_lessons_are_left_out_and_those_of_none_stay():
    ids = [
        "x[06.1]",
        "x[10.4b]",
        "y[lesson06_ddp]",
        "y[lesson10_zero-2]",
        "z",
        "z[16-ranks]",
        "w[10]",
    ]
    items = [Item(f"{file}.py::{id}") for file in "ab" for id in ids]
    left = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    options = {"short": False, "cases": ["a.py=06,07"]}
    pytest_collection_modifyitems(SimpleNamespace(getoption=options.get, hook=hook), items)
    assert [each.nodeid[6:] for each in left] == ["x[10.4b]", "y[lesson10_zero-2]", "w[10]"]
    assert len(items) == 2 * len(ids) - 3


@pytest.fixture
def repository(tmp_path):
    """A checkout with a notebook and two files, and a function that is git."""

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath="]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a.ipynb").write_text(notebook("said"))
    (tmp_path / "b c.py").touch()
    (tmp_path / "d.py").touch()
    git("add", ".")
    git("commit", "-m", "all")
    return tmp_path, git


def notebook(prose, code="1"):
    cells = [{"cell_type": "markdown", "source": prose}, {"cell_type": "code", "source": code}]
    return json.dumps({"cells": cells})


def test_what_differs_is_new_or_gone_is_what_changed(repository):
    root, git = repository
    assert changed_files(root, "HEAD") == []
    (root / "b c.py").write_text("1")
    (root / "d.py").rename(root / "e.py")
    assert changed_files(root, "HEAD") == ["b c.py", "d.py", "e.py"]
    git("add", ".")
    git("commit", "-m", "more")
    assert changed_files(root, "HEAD") == []
    assert changed_files(root, "HEAD~1") == ["b c.py", "d.py", "e.py"]


def test_prose_is_what_leaves_the_code_as_it_was(repository):
    root, _ = repository
    for text, prose in [(notebook("new"), True), (notebook("said", code="2"), False)]:
        (root / "a.ipynb").write_text(text)
        assert only_prose_changed(root, "HEAD", "a.ipynb") is prose
    (root / "a.ipynb").write_text("<<<<<<< HEAD")
    assert not only_prose_changed(root, "HEAD", "a.ipynb")
    assert not only_prose_changed(root, "HEAD", "d.py")
    (root / "new.ipynb").write_text(notebook("new"))
    assert not only_prose_changed(root, "HEAD", "new.ipynb")


def test_no_checkout_no_such_revision_and_no_change_are_a_line_each(repository, tmp_path, capsys):
    root, _ = repository
    with pytest.raises(InputError, match="--changed no-such: git knows no such revision"):
        select(root, "no-such")
    assert select(root, "HEAD") == []
    assert capsys.readouterr().out == "nothing changed since HEAD: nothing to test\n"
    (root / ".git").rename(root / "git")
    with pytest.raises(InputError, match="this is no git checkout"):
        select(root, "HEAD")


@pytest.fixture
def run(monkeypatch, capsys, course):
    """Calls the program on a list of changed files: its status, what it says, what it becomes."""

    def result(*paths):
        became = []
        monkeypatch.setattr(changed, "changed_files", lambda root, revision: list(paths))
        if sys.modules["grimp"]:
            monkeypatch.setattr(changed, "Course", lambda root: course)
        monkeypatch.setattr(changed.os, "execv", lambda python, words: became.extend(words[2:]))
        status = changed.main("HEAD", "--short", "-x")
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err, became

    return result


def test_what_is_selected_is_said_with_its_reason_before_pytest_begins(run):
    status, said, _, became = run("solutions/mistakes/lesson06_ddp.py", "tests/data/test_hub.py")
    assert status == 0
    assert became[:3] == ["pytest", "--short", "-x"]
    assert "tests/frame/test_checks.py" in became
    assert "--cases=tests/frame/test_checks.py=06" in became
    assert len(said) == 3
    assert said[0].endswith(" test files: because solutions/mistakes/lesson06_ddp.py changed")
    assert said[2].endswith("in all, of 2 changed files")
    _, said, _, became = run("shared/lora/nf4.py")
    assert said[0].startswith("notebook 19, ")
    _, (line,), _, became = run("shared/lora/nf4.py", "shared/ranks/forked.py")
    assert line.startswith("everything: because shared/ranks/forked.py changed")
    assert became == ["pytest", "--short", "-x", "tests", "lessons"]


def test_without_grimp_a_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "grimp", None)
    status, _, err, became = run("README.md")
    assert (status, became) == (2, [])
    assert err == "run_all.sh: --changed needs grimp: python -m pip install -e '.[dev]'\n"


@pytest.mark.parametrize(
    ("words", "revision", "short", "rest"),
    [
        (["--changed"], "HEAD", True, []),
        (["--changed", "-x"], "HEAD", True, ["-x"]),
        (["-x", "--changed", "main", "--all"], "main", False, ["-x"]),
    ],
)
def test_the_command_hands_over_to_the_selection(words, revision, short, rest, monkeypatch):
    called = []

    def supervise(program, **_):
        called.extend(program)
        return SimpleNamespace(status=0)

    monkeypatch.setattr(command, "supervise", supervise)
    assert command.run_tests(ROOT, words) == 0
    assert called[1:5] == ["-m", "shared.cli.changed", revision, "--nbval"]
    assert ("--short" in called) is short
    assert called[len(called) - len(rest) :] == rest
    assert "lessons" not in called
