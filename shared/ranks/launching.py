"""Start a lesson's script under torchrun and take its numbers back."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.ranks.group import STACKS
from shared.ranks.links import INTERFACE, Links
from shared.ranks.logs import last_words, place_in_the_chain
from shared.ranks.processes import Outcome, supervise
from shared.ranks.torchrun import node_command, torchrun_command
from shared.ranks.visible import VISIBLE, environment_with_gpus, num_gpus

GRACE = 5.0  # seconds that the other node gets to end by itself after one has failed
_ENDED = Outcome(-signal.SIGINT, math.inf)


class LaunchFailed(RuntimeError):
    """A script left with an error, ran out of time, or did not run with the ranks asked for."""


@dataclass(frozen=True)
class _Agent:
    """One torchrun: its command, and what its environment has that ours has not."""

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    where: str = ""  # " on node 1", where there are several


def launch(
    script: str | Path,
    nproc: int = 2,
    args: Sequence[str] = (),
    timeout: float = 240.0,
    max_restarts: int = 0,
) -> dict[str, Any]:
    """Run a script with `nproc` ranks under torchrun; return its metrics.json as a dict.

    `script` is relative to the working folder, in a notebook the lesson's. Unless `args` names an
    `--out`, the results go to a folder that is removed afterwards; figures are then not kept.
    With `max_restarts`, torchrun starts all ranks again after one has died (lesson 08).

    Raises LaunchFailed with the last lines of the log when the script fails or takes longer than
    `timeout` seconds (then with every rank's stack), and when the world size it saw is not `nproc`.
    """
    with tempfile.TemporaryDirectory(prefix="launch_") as folder:
        path, arguments, metrics = _prepare(script, args, Path(folder))
        command = torchrun_command(path, nproc, arguments, max_restarts)
        agents = [_Agent(command, Path(folder) / "log")]
        return _run(agents, path, metrics, nproc, timeout)


def launch_nodes(
    script: str | Path,
    nodes: int = 2,
    nproc: int = 1,
    args: Sequence[str] = (),
    timeout: float = 240.0,
    links: Links | None = None,
    max_restarts: int = 0,
) -> dict[str, Any]:
    """Run a script as on `nodes` machines of `nproc` ranks each; return its metrics.json.

    This machine plays all of them: one torchrun agent a node, which meet at a port that is free
    now, or each in a network of its own where throttled `links` are given. The nodes share out
    the GPUs if there is one for each rank, and see none otherwise. With `max_restarts` the ranks
    of all nodes are started again after one has died, with a store of their own each time.
    Raises LaunchFailed as `launch` does; if one node fails, the others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="launch_") as folder:
        path, arguments, metrics = _prepare(script, args, Path(folder))
        meeting = f"{links.address(0)}:29500" if links else f"127.0.0.1:{free_port()}"
        agents = []
        for node, gpus in enumerate(_shares_of_gpus(nodes, nproc)):
            command = node_command(path, nodes, nproc, meeting, arguments)
            # On one machine its name need not lead back to it: say who is who.
            own = links.address(node) if links else "127.0.0.1"
            command[3:3] = [f"--local_addr={own}", f"--rdzv_conf=is_host={int(node == 0)}"]
            environment = {VISIBLE: gpus}
            if max_restarts:
                command[3:3] = [f"--max-restarts={max_restarts}"]
                environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see process_group
            if links:
                command = links.command(node, command)
                environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            log = Path(folder) / f"log{node}"
            agents.append(_Agent(command, log, environment, f" on node {node}"))
        return _run(agents, path, metrics, nodes * nproc, timeout)


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _prepare(script: str | Path, args: Sequence[str], folder: Path) -> tuple[Path, list[str], Path]:
    """The script's path, its arguments with an --out, and where its metrics will be."""
    path = Path(script).resolve()
    if not path.is_file():
        raise LaunchFailed(f"there is no script {path}")
    arguments = [str(argument) for argument in args]
    for place, argument in enumerate(arguments):
        if argument.startswith("--out="):
            arguments[place : place + 1] = ["--out", argument.removeprefix("--out=")]
            break
    if "--out" not in arguments:
        arguments += ["--out", str(folder)]
    metrics = Path(arguments[arguments.index("--out") + 1]) / "metrics.json"
    metrics.unlink(missing_ok=True)
    return path, arguments, metrics


def _run(
    agents: Sequence[_Agent], path: Path, metrics: Path, num_ranks: int, timeout: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stacks_") as stacks:
        outcomes = _supervise_all(agents, Path(stacks), timeout)
        where = _stacks_in(Path(stacks), num_ranks)
    if cause := _cause(agents, outcomes):
        outcome, agent, log = cause
        said = "\n".join(last_words(log))
        if outcome.timed_out:
            raise LaunchFailed(f"{path.name} was not done after {timeout:g} s:\n{said}\n{where}")
        if port := re.search(r"port: (\d+).*EADDRINUSE", log):
            raise LaunchFailed(f"port {port[1]} is in use: try again, or end what uses it")
        raise LaunchFailed(f"{path.name}{agent.where} left with status {outcome.status}:\n{said}")
    if not metrics.is_file():
        said = "\n".join(last_words(agents[0].log.read_text(errors="replace")))
        raise LaunchFailed(f"{path.name} wrote no {metrics.name}:\n{said}")
    result = json.loads(metrics.read_text())
    if result["world_size"] != num_ranks:
        saw = result["world_size"]
        raise LaunchFailed(f"asked for {num_ranks} ranks, {path.name} saw {saw}")
    return result


def _cause(
    agents: Sequence[_Agent], outcomes: Sequence[Outcome]
) -> tuple[Outcome, _Agent, str] | None:
    """The node to blame, and its log; None where all went well.

    By the clock alone, a node that lost the others may come before the one that failed, which may
    even be ended before it has left by itself.
    """
    failed = []
    for agent, outcome in zip(agents, outcomes, strict=True):
        log = agent.log.read_text(errors="replace")
        place = place_in_the_chain(log)
        if outcome.status != 0 and (outcome != _ENDED or place == 0):
            failed.append((place, outcome.seconds, outcome, agent, log))
    return min(failed, key=lambda failure: failure[:2])[2:] if failed else None


class _Ended(Exception):
    """Another agent failed, or the caller was interrupted."""


def _supervise_all(agents: Sequence[_Agent], stacks: Path, timeout: float) -> list[Outcome]:
    """Run every agent to its end; _ENDED is one that was ended because another had failed."""
    over = threading.Event()
    asking, asked = threading.Lock(), threading.Event()

    def run(agent: _Agent) -> Outcome:
        deadline: list[float] = []

        def tick(seconds: float) -> None:
            if over.is_set():
                deadline[:] = deadline or [seconds + GRACE]
                if seconds > deadline[0]:
                    raise _Ended
            if seconds > timeout:
                with asking:  # nobody ends ranks before all have answered
                    if not asked.is_set():
                        _ask_for_stacks(stacks)
                        asked.set()

        # Before the defaults of ours: the reader's own OMP_NUM_THREADS. After: what a node needs.
        mine = environment_with_gpus()
        defaults = {"OMP_NUM_THREADS": "1", **mine, "PYTHONUNBUFFERED": "1"}
        environment = {**defaults, STACKS: str(stacks), **agent.environment}
        outcome = _ENDED
        with contextlib.suppress(_Ended):
            outcome = supervise(
                agent.command, env=environment, log=agent.log, time_limit=timeout, tick=tick
            )
        if outcome.status != 0:
            over.set()
        return outcome

    if len(agents) == 1:  # in the caller's own thread, where Ctrl-C arrives
        return [run(agents[0])]
    with ThreadPoolExecutor(len(agents)) as pool:
        try:
            return list(pool.map(run, agents))
        except BaseException:
            over.set()
            raise


def _ask_for_stacks(folder: Path) -> None:
    """Let every rank that is still there write down where it stands; see process_group."""
    asked = []
    for file in folder.iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.name.split("_")[1]), signal.SIGUSR1)
            asked.append(file)
    until = time.monotonic() + GRACE
    while any(file.stat().st_size == 0 for file in asked) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.1)  # from the first line to the last


def _stacks_in(folder: Path, num_ranks: int) -> str:
    """What the ranks wrote, by rank: innermost frame first."""
    told = dict.fromkeys(range(num_ranks), "had not reached process_group() yet")
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_size):
        text = file.read_text().strip()  # nothing from a rank that has left; one that was restarted
        told[int(file.name.split("_")[0])] = f"was here:\n{text}" if text else "had left"
    return "\n".join(f"rank {rank} {words}" for rank, words in sorted(told.items()))


def _shares_of_gpus(nodes: int, nproc: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each node: NCCL refuses two ranks on one device."""
    given = environment_with_gpus().get(VISIBLE)
    gpus = [str(i) for i in range(num_gpus())] if given is None else given.split(",")
    if len(gpus) < nodes * nproc:
        return [""] * nodes
    return [",".join(gpus[node * nproc : (node + 1) * nproc]) for node in range(nodes)]
