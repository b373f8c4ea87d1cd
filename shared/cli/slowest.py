"""Where the tests' time goes: a pytest plugin behind `./run_all.sh test --slowest`.

python -m pytest -p shared.cli.slowest ...
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

NUM_TESTS = 25


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table below pytest's own summary; with several processes, of all of them."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    durations = seconds_by_test(r for r in reports if isinstance(r, pytest.TestReport))
    terminalreporter.section("where the time goes")
    for line in table(durations):
        terminalreporter.write_line(line)


def seconds_by_test(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Return the seconds of each test by its id: set-up, call and clean-up together.

    What several tests share is built in the set-up of the first one, and counts there.
    """
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.nodeid] += report.duration
    return dict(seconds)


def table(durations: dict[str, float]) -> list[str]:
    """Return the lines: seconds and number of tests by folder and file, then the slowest tests."""
    folders: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for test, seconds in durations.items():
        folder, _, file = test.split("::")[0].rpartition("/")
        folders[folder][file].append(seconds)
    lines = [_row(durations.values(), "all tests; collecting them and imports come on top")]
    for folder, files in sorted(folders.items(), key=lambda item: -_sum(item[1].values())):
        lines.append(_row(chain(*files.values()), f"{folder}/"))
        by_time = sorted(files.items(), key=lambda item: -sum(item[1]))
        lines += [_row(each, f"  {file}") for file, each in by_time]
    lines += ["", f"The {NUM_TESTS} slowest tests:"]
    slowest = sorted(durations, key=lambda test: -durations[test])[:NUM_TESTS]
    return lines + [f"{durations[test]:9.1f} s  {test}" for test in slowest]


def _sum(files: Iterable[Iterable[float]]) -> float:
    return sum(chain(*files))


def _row(seconds: Iterable[float], name: str) -> str:
    each = list(seconds)
    return f"{sum(each):9.1f} s  {len(each):5}  {name}"
