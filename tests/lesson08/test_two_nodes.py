"""Two torchrun agents as two nodes: a rank dies on either, both start again, nothing is lost."""

import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.launching import launch, launch_nodes

SCRIPT = ROOT / "lessons" / "08_fault_tolerance" / "train.py"
ARGS = ("--preset", "tiny", "--device", "cpu", "--untimed")


@pytest.fixture(scope="module")
def untouched():
    """Two ranks on one machine, whom nobody disturbs."""
    return launch(SCRIPT, 2, ARGS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_on_either_node_starts_both_again(rank, untouched, tmp_path):
    args = [*ARGS, "--out", tmp_path, "--kill", f"6:{rank}"]
    metrics = launch_nodes(SCRIPT, nodes=2, nproc=1, args=args, max_restarts=2)
    assert metrics["began_at"] == 4
    for name in ("losses", "checksum"):
        assert metrics[name] == untouched[name]
