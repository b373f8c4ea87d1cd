"""How torchrun is called. Without torch itself: run_all.sh starts lessons and needs no engine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# In the scripts' environment: the call of run_all.sh, which their metrics.json repeats.
RUN = "TORCH_HANDLE_RUN"


def torchrun_command(
    script: Path, nproc: int, args: Sequence[str] = (), max_restarts: int = 0
) -> list[str]:
    """The command that starts `nproc` ranks on this machine, on a port of torchrun's own choice.

    When a rank dies, all are ended and started again, `max_restarts` times at most.
    """
    launcher = [*_torchrun(), "--standalone"]
    launcher += [f"--max-restarts={max_restarts}"] if max_restarts else []
    return [*launcher, f"--nproc_per_node={nproc}", str(script), *args]


def node_command(
    script: Path, nodes: int, nproc: int, address: str, args: Sequence[str] = ()
) -> list[str]:
    """The command that is given on each of several machines; the same on all of them."""
    launcher = [*_torchrun(), f"--nnodes={nodes}"]
    launcher += ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}"]
    return [*launcher, f"--nproc_per_node={nproc}", str(script), *args]


def _torchrun() -> list[str]:
    """Start torchrun by the interpreter that it starts the ranks by (see torchrun's own page)."""
    return [os.environ.get("PYTHON_EXEC", sys.executable), "-m", "torch.distributed.run"]
