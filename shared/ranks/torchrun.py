"""How torchrun is called. Without torch itself: run_all.sh starts lessons and needs no engine."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared.ranks.logs import without_frames

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


def tell_torchrun(message: str, callstack: str) -> None:
    """Write what torchrun shows of this rank, in the form of `record`, over what is there.

    A message that is a plain string torchrun takes, and complains of in two lines more.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            more = {"py_callstack": without_frames(callstack), "timestamp": str(int(time.time()))}
            words = {"message": without_frames(message), "extraInfo": more}
            whole = Path(f"{path}.{os.getpid()}")  # torchrun may read while this rank is stopped
            whole.write_text(json.dumps({"message": words}), encoding="utf-8")
            whole.replace(path)


def python() -> str:
    """The interpreter that torchrun starts the ranks by (see its own page): warm in the tests."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def _torchrun() -> list[str]:
    return [python(), "-m", "torch.distributed.run"]
