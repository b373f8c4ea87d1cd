"""Lessons' scripts in tests, here or under torchrun; how tests are spread over processes."""

import contextlib
import json
import os
import runpy
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.threads import expect_no_gloo, telling, told_in
from tests.warm.server import interpreter

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for what tests launch as well: they have up to six ranks
# Nothing here loads torch before a test asks for it: pytest's controlling process needs none, and
# neither do the rules over files.


class Ended(NamedTuple):
    """How a script ended: its status, and what it wrote to stdout and stderr."""

    status: int
    out: str
    err: str


@pytest.fixture
def run_script(capfd, monkeypatch):
    """Run a script in this process, since starting one takes seconds: what became of it.

    Keywords are the environment's: of a launcher it sees nothing but these.
    """
    from shared.ranks.group import ADDRESS_VARIABLES, LAUNCHER_VARIABLES

    def run(script: Path, *args: object, **environment: str) -> Ended:
        for name in list(os.environ):
            mine = name in LAUNCHER_VARIABLES + ADDRESS_VARIABLES
            if mine or name.startswith(("TORCHELASTIC", "GROUP_")):
                monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, args)])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # a script sets it
        status = 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        return Ended(status, *capfd.readouterr())

    return run


@pytest.fixture
def refused(run_script, tmp_path):
    """The line that a script says to what it refuses: alone, or under argparse's or c10d's."""

    def run(script: Path, *args: object, **environment: str) -> str:
        ended = run_script(script, "--out", tmp_path, *args, **environment)
        assert ended.status == 2, ended
        *above, line = ended.err.strip().splitlines()
        assert not above or above[0].startswith(("usage: ", "[E")), ended.err
        assert "Traceback" not in ended.err
        assert "error: " in line
        return line

    return run


@pytest.fixture
def metrics_of(run_script, tmp_path):
    """The metrics of a script that ends well."""

    def run(script: Path, *args: object) -> dict[str, Any]:
        ended = run_script(script, "--out", tmp_path, *args)
        assert ended.status == 0, ended.err
        return json.loads((tmp_path / "metrics.json").read_text())

    return run


@pytest.fixture
def threads(tmp_path, monkeypatch):
    """A function that says what programs have told of their threads, see told_in()."""
    folder = tmp_path / "threads"
    folder.mkdir()
    monkeypatch.setenv("THREADS", str(folder))
    return partial(told_in, folder)


@pytest.fixture(scope="session")
def launch_on(tmp_path_factory):
    """Run a script under torchrun once on each number of ranks: number -> (folder, metrics).

    No rank may end with a thread of gloo: what is started for its results is counted as well.
    """
    from shared.ranks.launching import launch

    def launched(script: Path, counts: tuple[int, ...], *args: str) -> dict[int, tuple[Path, dict]]:
        runs = {}
        for ranks in counts:
            out, told = (tmp_path_factory.mktemp(name) for name in (f"ranks_{ranks}", "threads"))
            program = telling(script, tmp_path_factory.mktemp("program"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("THREADS", str(told))
                runs[ranks] = out, launch(program, nproc=ranks, args=[*args, "--out", str(out)])
            expect_no_gloo(told_in(told), *map(str, range(ranks)))
        return runs

    return launched


_WARM = contextlib.ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run on several processes, ranks and kernels start from a warm interpreter."""
    if sys.platform == "linux" and getattr(config.option, "numprocesses", None):
        folder = _WARM.enter_context(tempfile.TemporaryDirectory(prefix="warm_"))
        paths = filter(None, [folder, os.environ.get("JUPYTER_PATH")])
        os.environ["JUPYTER_PATH"] = os.pathsep.join(paths)
        os.environ["PYTHON_EXEC"] = str(_WARM.enter_context(interpreter(Path(folder))))


def pytest_unconfigure() -> None:
    _WARM.close()


# Files whose tests are long, one for each exercise or lesson, and share nothing.
SPREAD = ("tests/frame/test_checks.py", "tests/frame/test_notebooks.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each test of these files to whichever process is free; other files stay together."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Spreading(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(SPREAD) else super()._split_scope(nodeid)

    return Spreading(config, log)
