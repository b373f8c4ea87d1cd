"""What a run of the tests proved, and what it left out: a pytest plugin of `./run_all.sh test`.

python -m pytest -p shared.cli.proven [--short] [--cases FILE=06,10] ...
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

from shared.exercises.answers import CHECK

# What tests put on record by `record_property`: how many known answers were tried, or were not.
EXERCISES = "exercises whose reference is right"
STYLES, MISTAKES = "right answers in another style", "known mistakes"
VALUES = "recognised values told by their own words"
SIGNS, UNHEARD = "rows told by a changed sight", "rows that nothing proves"
# Exercises all of whose rows and checks tests/frame/test_rows.py hears.
CHANGED = (
    *("06.1", "06.2", "06.2b", "06.3", "06.4", "06.5"),
    *("10.1", "10.2", "10.2b", "10.3", "10.4", "10.4b"),
    *("13.1", "13.1b", "13.2", "13.2b", "13.3", "13.4"),
)
UNTRIED = "not tried: "  # before one of the last two
NEVER_FAILED = "check that no known mistake fails"  # of an exercise whose mistakes were all tried

SCRIPT = re.compile(r"tests/lesson[^/]+/test_(\w+_)?script\.py$")
LEFT_OUT = pytest.StashKey[dict[str, int]]()  # tests left out, by folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --short, which leaves out what is marked `full`, and --cases."""
    parser.addoption("--short", action="store_true", help="leave out tests that are marked full")
    others = "leave out a file's cases of other lessons, by their ids"
    parser.addoption("--cases", action="append", default=[], metavar="FILE=06,10", help=others)


def exercise_checked(item: Any) -> str:
    """The exercise whose reference this test puts before its checks; "" if it is no such cell."""
    found = CHECK.search(item.cell.source) if hasattr(item, "cell") else None
    solved = os.environ.get("TORCH_HANDLE_IMPLEMENTATION") == "solution"
    return found[1] if found and solved else ""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Put on record what a notebook's cell proves where it passes."""
    if exercise_checked(item):
        item.user_properties.append((EXERCISES, 1))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other lessons' cases and, where the run is short, what is `full`: count that."""
    _leave_out(config, items, _cases_of_others(items, config.getoption("cases")))
    full = [item for item in items if item.get_closest_marker("full")]
    if not config.getoption("short") or not full:
        return
    _leave_out(config, items, full)
    config.stash[LEFT_OUT] = Counter(item.nodeid.split("::")[0].rpartition("/")[0] for item in full)


def _leave_out(config: pytest.Config, items: list[pytest.Item], left: list[pytest.Item]) -> None:
    kept = set(items) - set(left)
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=left)


def _cases_of_others(items: list[pytest.Item], cases: list[str]) -> list[pytest.Item]:
    """Return the cases, of files in `cases` ("FILE=06,10"), whose ids name other lessons only."""
    wanted = dict(part.split("=") for part in cases)

    def is_other(file: str, case: str) -> bool:
        named = re.findall(r"lesson(\d\d)_|\[(\d\d)(?:\.\d+[a-z]?)?\]", case)
        return bool(named) and not any(max(number) in wanted[file] for number in named)

    ids = [(item, *item.nodeid.split("::", 1)) for item in items]
    return [item for item, file, case in ids if file in wanted and is_other(file, case)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts to the controlling process, which collects nothing itself."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left out"] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of one process: all collect the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in a line what was proven, and in another what was left out; of durations, the sums."""
    found = terminalreporter.stats
    if config.getoption("durations"):
        for line in seconds_by_folder(chain(*found.values())):
            terminalreporter.write_line(line)
    reports = [report for kind in ("passed", "failed", "error") for report in found.get(kind, [])]
    counted = count_properties(reports)
    terminalreporter.write_line(proven(reports, counted))
    spare = [
        text for report in reports for name, text in report.user_properties if name == NEVER_FAILED
    ]
    if spare:
        terminalreporter.write_line(f"Checks that no known mistake fails: {'; '.join(spare)}.")
    left = left_out(config.stash.get(LEFT_OUT, {}), counted)
    if left:
        terminalreporter.write_line(left)


def seconds_by_folder(reports: Iterable[Any]) -> list[str]:
    """Return a line for each folder, the longest first: seconds, number of tests, its name."""
    seconds, tests = Counter[str](), defaultdict[str, set[str]](set)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            folder = report.nodeid.split("::")[0].rpartition("/")[0]
            seconds[folder] += report.duration
            tests[folder].add(report.nodeid)
    return [
        f"{took:9.1f} s  {len(tests[name]):5,}  {name}/" for name, took in seconds.most_common()
    ]


def count_properties(reports: Iterable[pytest.TestReport]) -> Counter[str]:
    """Add up what passed tests have put on record."""
    total = Counter[str]()
    for report in reports:
        if report.passed:
            for name, count in report.user_properties:
                if isinstance(count, int):
                    total[name] += count
    return total


def proven(reports: Iterable[pytest.TestReport], counted: Counter[str]) -> str:
    """Return the line: notebooks, scripts, exercises and known answers, and how many tests else."""
    failed: dict[str, dict[str, bool]] = {"notebooks": {}, "scripts": {}}
    others = defaultdict[str, bool](bool)
    for report in reports:
        file = report.nodeid.split("::")[0]
        kind = "notebooks" if file.endswith(".ipynb") else "scripts" if SCRIPT.search(file) else ""
        if kind:
            failed[kind][file] = failed[kind].get(file, False) or report.failed
        elif not any(name in (EXERCISES, STYLES) for name, _ in report.user_properties):
            others[report.nodeid] = others[report.nodeid] or report.failed
    parts = [
        _so_many(failed["notebooks"], "notebooks equal to their stored outputs"),
        _so_many(failed["scripts"], "scripts on several ranks"),
        f"{counted[EXERCISES]:,} {EXERCISES}" if counted[EXERCISES] else "",
        f"{counted[STYLES]:,} {STYLES} right" if counted[STYLES] else "",
        f"{counted[MISTAKES]:,} {MISTAKES} named in their own words" if counted[MISTAKES] else "",
        *(f"{counted[kind]:,} {kind}" for kind in (VALUES, SIGNS) if counted[kind]),
        _so_many(others, "other tests"),
    ]
    unheard = f" Not proven: {counted[UNHEARD]:,} rows of checks." if counted[UNHEARD] else ""
    return f"Proven: {', '.join(part for part in parts if part) or 'nothing'}.{unheard}"


def _so_many(failed: dict[str, bool], what: str) -> str:
    """Return "16 scripts", "15 of 16 scripts" where some failed, "" for none."""
    good = len(failed) - sum(failed.values())
    of = f" of {len(failed):,}" if good < len(failed) else ""
    return f"{good:,}{of} {what}" if failed else ""


def left_out(tests: dict[str, int], counted: Counter[str]) -> str:
    """Return the line on what was not run, and how to run it; "" where that is nothing."""
    parts = []
    if tests:
        by_folder = sorted(tests.items(), key=lambda pair: (-pair[1], pair[0]))
        folders = ", ".join(f"{folder} {count:,}" for folder, count in by_folder)
        parts.append(f"{sum(tests.values()):,} long tests ({folders})")
    for what in (STYLES, MISTAKES):
        if counted[UNTRIED + what]:
            parts.append(f"{counted[UNTRIED + what]:,} {what}")
    everything = "`./run_all.sh test --all` runs everything"
    return f"Left out: {', '.join(parts)}; {everything}." if parts else ""
