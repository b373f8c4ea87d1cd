"""./run_all.sh test --slowest: where the tests' time goes."""

import os
import re
import subprocess
import sys

from shared.cli.slowest import NUM_TESTS, table

TESTS = """
import time
import pytest

@pytest.fixture(scope="module", autouse=True)
def shared():
    time.sleep(0.3)

def test_quick(): pass

@pytest.mark.parametrize("seconds", [0.2, 0.4])
def test_slow(seconds): time.sleep(seconds)
"""


def test_set_up_and_both_processes_count(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(TESTS)
    plugins = ["-p", "xdist.plugin", "-p", "shared.cli.slowest", "-n", "2", "--dist", "loadscope"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", f"{tmp_path}/pytest.ini", *plugins, str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # the others take seconds
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in ("one", "two"):
        row = re.search(rf"^ +([\d.]+) s +3 +test_{folder}.py$", done.stdout, re.MULTILINE)
        assert row, done.stdout
        assert float(row[1]) >= 0.9
    slowest = done.stdout.partition("slowest tests:\n")[2].splitlines()
    assert slowest[0].endswith("test_slow[0.4]")


def test_folders_and_files_are_ordered_by_their_time():
    durations = {"a/x.py::one": 1.0, "a/y.py::two[b/c]": 3.0, "b/z.ipynb::Cell 0": 2.0}
    lines = table(durations)
    assert [line.split()[-1] for line in lines[1:6]] == ["a/", "y.py", "x.py", "b/", "z.ipynb"]
    assert lines[1].split()[:3] == ["4.0", "s", "2"]
    many = {f"a/x.py::{number}": float(number) for number in range(100)}
    slowest = table(many)[-NUM_TESTS:]
    assert slowest[0].split() == ["99.0", "s", "a/x.py::99"]
