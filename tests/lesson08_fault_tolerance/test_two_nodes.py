"""Two torchrun agents as two nodes: deaths, start scripts, and what is refused on both."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.launching import free_port, launch, launch_nodes
from shared.ranks.links import INTERFACE, Links, throttled_links, why_not
from shared.ranks.processes import Outcome, supervise

FOLDER = ROOT / "lessons" / "lesson08_fault_tolerance"
SCRIPT, TWO_NODES, SBATCH = (FOLDER / name for name in ("train.py", "two_nodes.sh", "train.sbatch"))
TINY = ("--preset", "tiny", "--device", "cpu")
ARGS = (*TINY, "--untimed")
LIMIT = 240.0  # seconds, for a busy machine: a collective that nobody joins would last 600


@pytest.fixture(scope="module")
def untouched():
    """Two ranks on one machine, whom nobody disturbs."""
    return launch(SCRIPT, 2, ARGS)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_death_on_either_node_starts_both_again(rank, untouched, tmp_path):
    args = [*ARGS, "--out", tmp_path, "--kill", f"6:{rank}"]
    metrics = launch_nodes(SCRIPT, nodes=2, nproc=1, args=args, max_restarts=2)
    assert metrics["began_at"] == 4
    for name in ("losses", "checksum"):
        assert metrics[name] == untouched[name]


def path_with(*folders: Path) -> str:
    """PATH with these folders first, then this Python's."""
    return os.pathsep.join(map(str, [*folders, Path(sys.executable).parent, os.environ["PATH"]]))


def on_two_nodes(
    folder: Path, *commands: list, links: Links | None = None
) -> list[tuple[Outcome, str]]:
    """Run two_nodes.sh with each node's flags, in folder/NODE; how it ended and what it said.

    Nothing is ended here before the time limit: the nodes have to end by themselves.
    """
    meeting = f"{links.address(0)}:29500" if links else f"127.0.0.1:{free_port()}"

    def start(node: int) -> tuple[Outcome, str]:
        place = folder / str(node)
        place.mkdir(exist_ok=True)
        command = ["bash", TWO_NODES, node, len(commands), meeting, *commands[node]]
        own = {"NPROC": "1", "MAX_RESTARTS": "0", "SCRIPT": str(SCRIPT), "LOGS": str(place)}
        own |= {"PATH": path_with(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        own["LOCAL_ADDR"] = links.address(node) if links else "127.0.0.1"
        command = ["env", "-C", place, *command]
        command = [str(word) for word in command]
        if links:
            command = links.command(node, command)
            own["GLOO_SOCKET_IFNAME"] = INTERFACE
        log = folder / f"log{node}"
        outcome = supervise(command, env={**os.environ, **own}, log=log, time_limit=LIMIT)
        return outcome, log.read_text(errors="replace")

    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(start, range(len(commands))))


@pytest.mark.full
def test_two_machines_by_the_start_script(untouched, tmp_path):
    """Each node in a network of its own, where that may be made; each rank has a log of its own."""
    with ExitStack() as stack:
        links = None if why_not() else stack.enter_context(throttled_links(2, 1000))
        flags = [*ARGS, "--out", tmp_path / "out"]
        ends = on_two_nodes(tmp_path, flags, flags, links=links)
    assert [outcome.status for outcome, _ in ends] == [0, 0], ends
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["world_size"] == 2
    for name in ("losses", "checksum"):
        assert metrics[name] == untouched[name]
    logs = [next(tmp_path.glob(f"{n}/node{n}/two_nodes_*/attempt_0/0/stdout.log")) for n in (0, 1)]
    assert sorted("last loss" in log.read_text() for log in logs) == [False, True]


@pytest.mark.parametrize("words", [[], ["2", "2", "HOST"], ["0", "two", "HOST"], ["0", "2"]])
def test_the_start_script_says_how_it_is_used(words):
    done = subprocess.run(
        ["bash", TWO_NODES, *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "NODE from 0 to NODES - 1" in done.stderr


def expect_refused(ends: list[tuple[Outcome, str]], *words: str) -> None:
    for node, (outcome, said) in enumerate(ends):
        assert not outcome.timed_out, f"node {node} did not end: {said}"
        assert outcome.status != 0, f"node {node} noticed nothing: {said}"
        lines = [line for line in said.splitlines() if "error: " in line]
        for word in words:
            assert any(word in line for line in lines), f"node {node}: {said}"


@pytest.mark.full
def test_other_arguments_on_another_node_are_refused_on_both(tmp_path):
    flags = [*TINY, "--out", tmp_path / "out", "--steps"]
    ends = on_two_nodes(tmp_path, [*flags, 5], [*flags, 8])
    expect_refused(ends, "the ranks differ in --steps (rank 0: ")


def write_pairs(place: Path, last: str) -> None:
    """A data set that differs in its last sentence alone, in the folder `data`."""
    (place / "data").mkdir(parents=True)
    words = ("cat", "dog", "bird", "fish", "horse")
    lines = [f"the {a} sees the {b} and the {c}" for a in words for b in words for c in words]
    for split in ("train", "validation", "test"):
        for language in ("en", "de"):
            text = "\n".join([*lines, last]) + "\n"
            (place / "data" / f"{split}.{language}").write_text(text)


@pytest.mark.full
def test_other_data_on_another_node_is_refused_on_both(tmp_path):
    for node, last in enumerate(("the cow sees the cow", "the sow sees the cow")):
        write_pairs(tmp_path / str(node), last)
    flags = [*TINY, "--out", tmp_path / "out", "--dataset", "data"]
    ends = on_two_nodes(tmp_path, flags, flags)
    expect_refused(ends, "the ranks differ in their training data (rank 0: ")


@pytest.mark.full
def test_an_input_error_on_the_second_machine_is_said_there(tmp_path):
    write_pairs(tmp_path / "0", "the cow sees the cow")  # and none on the second machine
    flags = [*TINY, "--out", tmp_path / "out", "--dataset", "data"]
    ends = on_two_nodes(tmp_path, flags, flags)
    assert all(outcome.status != 0 and not outcome.timed_out for outcome, _ in ends)
    assert re.search(r"^.*error: .*data", ends[1][1], re.MULTILINE), ends[1][1]


FAKE_SRUN = """#!/usr/bin/env bash
# Two tasks in place of two nodes; SIGTERM goes to each agent and its ranks, who hear it twice.
pids=()
for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@" & pids+=($!); done
trap 'for pid in "${pids[@]}"; do kill -TERM "$pid" $(pgrep -P "$pid"); done' TERM
status=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
    if [[ $code -ne 0 ]]; then status=$code; fi
done
exit "$status"
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_batch_script_is_requeued_and_resumes(tmp_path):
    """Slurm's two commands are stand-ins; torchrun, its signals and the script are real."""
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    out, requeued = tmp_path / "out", tmp_path / "requeued"
    own = {"PATH": path_with(tmp_path), "NPROC": "1", "OUT": str(out), "REQUEUED": str(requeued)}
    own |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2"}
    own |= {"SLURM_JOB_NODELIST": "here", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["env", "-C", ROOT, "bash", SBATCH, *ARGS, "--steps", 60, "--interval", 5]
    command = [str(word) for word in command]
    told = threading.Event()

    def tell_when_it_trains(seconds: float) -> None:
        if not told.is_set() and next(out.glob("checkpoints/*/step_*.pt"), None):
            told.set()
            for pid in pids_of(tmp_path / "srun"):
                os.kill(pid, signal.SIGTERM)

    environment = {**os.environ, **own}
    log = tmp_path / "log"
    first = supervise(command, env=environment, log=log, time_limit=240, tick=tell_when_it_trains)
    said = log.read_text()
    assert told.is_set(), said
    assert first.status not in (0, 99), "torchrun's own: 1, or 134 where it aborts as it ends"
    step = int(re.findall(r"stopped by SIGTERM after step (\d+) of 60", said)[-1])
    assert requeued.read_text().split()[0] == "requeue"
    assert next(out.glob(f"checkpoints/*/step_{step:08d}.pt"))
    again = supervise(command, env=environment, log=log, time_limit=240)
    assert again.status == 0, log.read_text()
    assert json.loads((out / "metrics.json").read_text())["began_at"] == step
    assert len(requeued.read_text().splitlines()) == 1, "a run that is done is not requeued"
    assert not (out / "requeue").exists()


def pids_of(script: Path) -> list[int]:
    """Processes that run this shell script."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(script).encode() in words[:2]:
            found.append(int(each.parent.name))
    return found
