"""Nodes on one machine, and what a launch says about ranks that hang or never meet."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from shared.errors import InputError
from shared.ranks import launching
from shared.ranks.group import process_group
from shared.ranks.launching import LaunchFailed, launch, launch_nodes
from shared.ranks.processes import Outcome

PLACES = """
import json, os, pathlib, sys
import torch.distributed as dist
from shared.ranks.group import process_group

with process_group("cpu") as rank:
    own = {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")}
    places = [None] * rank.world_size
    dist.all_gather_object(places, own)
    if rank.is_main:
        record = {"world_size": rank.world_size, "places": places}
        out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
        (out / "metrics.json").write_text(json.dumps(record))
"""


def test_two_nodes_of_two_ranks(tmp_path):
    script = tmp_path / "places.py"
    script.write_text(PLACES)
    places = launch_nodes(script, nodes=2, nproc=2)["places"]
    assert [place["RANK"] for place in places] == [0, 1, 2, 3]
    assert [place["LOCAL_RANK"] for place in places] == [0, 1, 0, 1]
    assert [place["GROUP_RANK"] for place in places] == [0, 0, 1, 1]


FAILS = """
import os, sys, time
if os.environ["GROUP_RANK"] == "1":
    print("error: no space left on this node")
    sys.exit(3)
time.sleep(600)
"""


def test_a_node_that_fails_ends_the_others_and_is_named(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with pytest.raises(LaunchFailed, match=r"on node . left with(.|\n)*no space left"):
        launch_nodes(script, timeout=100)


REPORT = """\
error: no space left
Traceback (most recent call last):
  File "/torch/distributed/run.py", line 1028, in main
Root Cause (first observed failure):
  rank      : 1 (local_rank: 0)
  exitcode  : 3 (pid: 28513)
"""


@pytest.mark.parametrize("failed", [Outcome(3, 21.9), launching._ENDED], ids=["left", "ended"])
def test_the_node_that_failed_is_named_though_another_was_done_sooner(monkeypatch, failed):
    said = ("[W1128 18:49:24.5 TCPStore.cpp:138] [c10d] recvValue failed on SocketImpl()", REPORT)

    def supervise_all(agents, *_):
        for agent, words in zip(agents, said, strict=True):
            agent.log.write_text(words)
        return [Outcome(1, 21.5), failed]

    monkeypatch.setattr(launching, "_supervise_all", supervise_all)
    with pytest.raises(
        LaunchFailed, match=r"on node 1 left with status .*:\nerror: no space left$"
    ):
        launch_nodes(__file__)


HANGS_AFTERWARDS = """
import time
from shared.ranks.group import process_group

def hangs_behind_its_group():
    time.sleep(600)

with process_group("cpu") as rank:
    pass
if rank.rank == 1:
    hangs_behind_its_group()
"""


HANGS = """
import time
import torch.distributed as dist
from shared.ranks.group import process_group

def forgets_the_barrier():
    time.sleep(600)

with process_group("cpu") as rank:
    dist.barrier() if rank.rank == 0 else forgets_the_barrier()
"""


def test_a_launch_that_hangs_shows_where_every_rank_stands(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    for seconds in (12, 120):  # on a busy machine the imports alone may take longer than the first
        with pytest.raises(LaunchFailed) as caught:
            launch(script, 2, timeout=seconds)
        if "had not reached process_group() yet" not in str(caught.value):
            break
    first, second = str(caught.value).split("rank 1 was here:")
    assert f"not done after {seconds} s" in first
    assert "in barrier" in first.split("rank 0 was here:")[1]
    assert "in forgets_the_barrier" in second


@pytest.mark.full
def test_a_rank_that_hangs_behind_its_group_has_not_left(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS_AFTERWARDS)
    for seconds in (12, 120):
        with pytest.raises(LaunchFailed) as caught:
            launch(script, 2, timeout=seconds)
        if "had not reached process_group() yet" not in str(caught.value):
            break
    assert "in hangs_behind_its_group" in str(caught.value).split("rank 1 was here:")[1]


@pytest.mark.full
def test_a_launch_that_ends_too_early_says_who_had_not_come(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(LaunchFailed, match="rank 0 had not reached process_group") as caught:
        launch(script, 2, timeout=5)
    assert "rank 1 had not reached" in str(caught.value)


ALONE = """
from shared.ranks.group import process_group
from shared.script import run_script

def main():
    with process_group("cpu", timeout=2):
        pass

run_script(main)
"""


PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
PLACE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def alone(run_script, tmp_path):
    """The one line that ALONE leaves where a launcher has set these, with exit status 2."""
    (tmp_path / "alone.py").write_text(ALONE)

    def run(**variables: str) -> str:
        done = run_script(tmp_path / "alone.py", **PLACE | variables)
        assert done.status == 2, done.err
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.err
        assert "Traceback" not in done.err
        return errors[0]

    return run


def test_a_port_in_use_is_named(alone):
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} is in use" in alone(MASTER_PORT=port)


@pytest.mark.full
def test_ranks_that_never_arrive_speak_for_themselves(alone):
    assert "2 ranks did not meet at 127.0.0.1:1 within 2 s" in alone(RANK="1")


WAITS = """
from shared.ranks import group
from shared.script import run_script

group.PATIENCE = 1

def main():
    with group.process_group("cpu", timeout=3):
        pass

run_script(main)
"""


@pytest.mark.full
def test_a_rank_says_for_whom_it_waits():
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = PLACE | {"MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, "-W", "ignore", "-c", WAITS]
    done = subprocess.run(
        command, env=os.environ | place, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "rank 0 has waited 1 s for rank(s) 1 of 2, and waits up to 3 s" in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "2 ranks did not meet at 127.0.0.1" in error
    assert "rank(s) 1 of 2 did not come" in error


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, "WORLD_SIZE set but not RANK"),
        ({"MASTER_PORT": ""}, "set but not MASTER_PORT"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000' is no port"),
        ({"LOCAL_WORLD_SIZE": "3"}, "one machine has more ranks than all together"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2: ranks count from 0 to 1"),
    ],
)
def test_a_contradictory_environment_is_refused(monkeypatch, variables, words):
    for name, value in (PLACE | variables).items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=words), process_group("cpu"):
        pass
