"""Start a lesson's script under torchrun and take its numbers back."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.tools.logs import last_words
from shared.tools.processes import supervise


class LaunchFailed(RuntimeError):
    """A script left with an error, ran out of time, or did not run with the ranks asked for."""


def torchrun_command(script: Path, nproc: int, args: Sequence[str] = ()) -> list[str]:
    """The command that starts `nproc` ranks on this machine, on a port of torchrun's own choice."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={nproc}", str(script), *args]


def launch(
    script: str | Path, nproc: int = 2, args: Sequence[str] = (), timeout: float = 240.0
) -> dict[str, Any]:
    """Run a script with `nproc` ranks under torchrun; return its metrics.json as a dict.

    `script` is relative to the working folder, in a notebook the lesson's. Unless `args` names an
    `--out`, the results go to a folder that is removed afterwards; figures are then not kept.

    Raises LaunchFailed with the last lines of the log when the script fails or takes longer than
    `timeout` seconds, and when the world size it saw is not `nproc`.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise LaunchFailed(f"there is no script {path}")
    arguments = [str(each) for each in args]
    with tempfile.TemporaryDirectory(prefix="launch_") as folder:
        if "--out" in arguments:
            out = Path(arguments[arguments.index("--out") + 1])
        else:
            out = Path(folder)
            arguments += ["--out", folder]
        metrics = out / "metrics.json"
        metrics.unlink(missing_ok=True)
        log = Path(folder) / "log"
        outcome = supervise(
            torchrun_command(path, nproc, arguments),
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            log=log,
            time_limit=timeout,
        )
        said = "\n".join(last_words(log.read_text(errors="replace")))
        if outcome.timed_out:
            raise LaunchFailed(f"{path.name} was not done after {timeout:g} s:\n{said}")
        if outcome.status != 0:
            raise LaunchFailed(f"{path.name} left with status {outcome.status}:\n{said}")
        if not metrics.is_file():
            raise LaunchFailed(f"{path.name} wrote no {metrics.name}:\n{said}")
        result = json.loads(metrics.read_text())
    if result["world_size"] != nproc:
        raise LaunchFailed(f"asked for {nproc} ranks, {path.name} saw {result['world_size']}")
    return result
