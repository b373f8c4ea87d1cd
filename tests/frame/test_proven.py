"""./run_all.sh test: what its last lines say was proven, and what was left out."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shared.cli import proven
from shared.cli.proven import EXERCISES, MISTAKES, SIGNS, STYLES, UNHEARD, UNTRIED

TESTS = """
import pytest

@pytest.mark.full
@pytest.mark.parametrize("number", range(3))
def test_long(number): pass

def test_known(record_property, pytestconfig):
    few = 2 if pytestconfig.getoption("short") else 1_500
    record_property("exercises whose reference is right", 1)
    record_property("known mistakes", few)
    record_property("not tried: known mistakes", 1_500 - few)
    for title in ("one", "two"):
        record_property("check that no known mistake fails", f"01.1, {title}")

def test_wrong(): assert "a" in "b"
"""
SCRIPTS = """
def test_one(): pass
def test_two(): assert %s
"""


@pytest.fixture
def run(tmp_path):
    """Runs the plugin on a course of its own: the last lines of what it says."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: long\n")
    for name, text in {
        "tests/frame/test_known.py": TESTS,
        "tests/lesson01_positional_encoding/test_script.py": SCRIPTS % True,
        "tests/lesson02_b/test_norm_script.py": SCRIPTS % False,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)

    def lines(*options):
        plugins = ["-p", "shared.cli.proven", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
        place = ["-c", f"{tmp_path}/pytest.ini", f"--rootdir={tmp_path}", "--import-mode=importlib"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, *place, *options, str(tmp_path)],
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # the others take seconds
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_a_short_run_says_what_it_left_out_whoever_collected_it(run, processes):
    lines = run("--short", *processes)
    known = f"1 {EXERCISES}, 2 known mistakes named in their own words"
    assert f"Proven: 1 of 2 scripts on several ranks, {known}, 0 of 1 other tests." in lines
    everything = "`./run_all.sh test --all` runs everything."
    left = "Left out: 3 long tests (tests/frame 3), 1,498 known mistakes; "
    assert left + everything in lines


def test_a_full_run_leaves_nothing_out_and_says_where_its_seconds_went(run):
    lines = run("--durations=25")
    sums = [each for each in lines if re.match(r" +\d+\.\d s  ", each)]
    assert {tuple(each.split()[2:]) for each in sums} == {
        ("5", "tests/frame/"),
        ("2", "tests/lesson01_positional_encoding/"),
        ("2", "tests/lesson02_b/"),
    }
    (line,) = [each for each in lines if each.startswith("Proven: ")]
    assert "1,500 known mistakes named" in line
    assert line.endswith(", 3 of 4 other tests.")
    assert not [each for each in lines if each.startswith("Left out")]
    assert "Checks that no known mistake fails: 01.1, one; 01.1, two." in lines


class Report:
    """What the plugin reads of pytest's reports."""

    def __init__(self, nodeid, good=True, **properties):
        self.nodeid, self.passed, self.failed = nodeid, good, not good
        self.user_properties = list(properties.items())


def test_a_notebook_counts_when_all_of_its_cells_are_equal():
    reports = [Report(f"lessons/{n}/lesson.ipynb::Cell {c}") for n in "abc" for c in range(4)]
    assert "3 notebooks equal" in proven.proven(reports, proven.count_properties(reports))
    reports.insert(5, Report("lessons/b/lesson.ipynb::Cell 9", good=False))
    assert "2 of 3 notebooks equal" in proven.proven(reports, proven.count_properties(reports))


def test_what_a_failed_test_has_tried_is_not_proven():
    reports = [Report("tests/a.py::x", good, **{MISTAKES: 7, STYLES: 2}) for good in (True, False)]
    counted = proven.count_properties(reports)
    assert (counted[MISTAKES], counted[STYLES]) == (7, 2)
    assert proven.proven([], proven.count_properties([])) == "Proven: nothing."


def test_rows_that_nothing_proves_are_not_among_the_proven():
    counted = proven.count_properties([Report("tests/a.py::x", **{SIGNS: 1_204, UNHEARD: 3})])
    said = f"Proven: 1,204 {SIGNS}. Not proven: 3 rows of checks."
    assert proven.proven([], counted) == said


@pytest.mark.parametrize(("mode", "proven_right"), [("solution", 1), ("", 0)])
def test_a_check_cell_that_passes_is_a_reference_that_is_right(mode, proven_right, monkeypatch):
    monkeypatch.setenv("TORCH_HANDLE_IMPLEMENTATION", mode)
    reports = []
    for good, source in ((True, 'check("01.1", f)'), (True, "f(3)"), (False, "check('01.2b', F)")):
        item = SimpleNamespace(cell=SimpleNamespace(source=source), user_properties=[])
        proven.pytest_itemcollected(item)
        reports.append(Report("lessons/a/lesson.ipynb::Cell", good, **dict(item.user_properties)))
    assert proven.count_properties(reports)[EXERCISES] == proven_right
    assert proven.exercise_checked(item) == ("01.2b" if mode else "")


def test_known_answers_alone_may_be_left_out():
    counted = proven.count_properties([Report("a", **{UNTRIED + STYLES: 80})])
    line = proven.left_out({}, counted)
    assert line.startswith("Left out: 80 right answers in another style; ")
    assert proven.left_out({}, proven.count_properties([])) == ""
