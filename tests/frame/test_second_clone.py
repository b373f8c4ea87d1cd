"""A script is not run with the `shared` of a different clone."""

import os
import shutil
import subprocess
import sys

import pytest

from shared.exercises.lessons import ROOT


@pytest.mark.parametrize("rank", ["0", "1"])
def test_it_is_refused_in_one_line_of_a_machines_first_rank(tmp_path, rank):
    script = tmp_path / "lessons" / "lesson01_x" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text("from shared.ranks.torchrun import RUN\nprint(RUN)")
    (tmp_path / "shared").mkdir()

    def run() -> subprocess.CompletedProcess:
        environment = os.environ | {"LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert run().returncode == 0  # it has no `shared` of its own
    shutil.copy(ROOT / "shared" / "__init__.py", tmp_path / "shared")
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    said = f"error: {script} is run with the environment of {ROOT}"
    assert done.stderr.startswith(said) if rank == "0" else not done.stderr
    assert len(done.stderr.splitlines()) == (rank == "0")
