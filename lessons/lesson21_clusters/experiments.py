"""torch's own analyzer on our recordings, what launchers set, a real firewall between two nodes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lessons.lesson21_clusters.beside_torch import torchs_words
from lessons.lesson21_clusters.laboratory import small_run
from shared.clusters.recordings import Recording, dump, from_dump, own_groups
from shared.ranks.launching import free_port
from shared.ranks.links import INTERFACE, Links
from shared.ranks.logs import last_words
from shared.ranks.processes import supervise

PREFLIGHT = Path(__file__).with_name("preflight.py")
Dump = tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]


def dumped(rank: int, fault: str, ranks: int, timeout: float) -> Dump:
    """What torch recorded on a rank of a small run with a fault, and the groups it was in."""
    small_run(rank, fault, ranks, timeout)
    return dump(), own_groups()


def our_recordings(dumps: Sequence[Dump]) -> list[Recording]:
    """The same as our functions read it."""
    return [from_dump(rank, each, groups) for rank, (each, groups) in enumerate(dumps)]


def for_torchs_analyzer(rank: int, of_rank: Dump) -> dict[str, Any]:
    """The dump as `torchfrtrace` reads it: gloo's has no groups by name, NCCL's has them."""
    whole, members = of_rank
    groups = {
        name: {"name": name, "desc": "", "ranks": str(list(ranks))}
        for name, ranks in members.items()
    }
    entries = [
        {**each, "process_group": (each["process_group"][0], "")} for each in whole["entries"]
    ]
    return {**whole, "rank": rank, "pg_config": groups, "entries": entries}


def ask_torch(dumps: Sequence[Dump], first: int = 0) -> list[str]:
    """What torch's analyzer says where it reads rank `first` first, then those after it."""
    ranks = [*range(first, len(dumps)), *range(first)]
    whole = {rank: for_torchs_analyzer(rank, each) for rank, each in enumerate(dumps)}
    return torchs_words(whole, ranks)


SAY = """import json, os, sys
ours = json.loads(os.environ["BEFORE"])
own = {n: os.environ[n] for n in os.environ if n not in (*ours, "BEFORE", "FOUND")}
own["arguments"] = " ".join(sys.argv[1:])
path = os.path.join(os.environ["FOUND"], f"{own.get('RANK', 'none')}_{os.getpid()}.json")
open(path, "w").write(json.dumps(own))
"""


def launchers(ranks: int = 2) -> dict[str, list[str]]:
    """Commands that start a script on this machine's CPU."""
    here = Path(sys.executable).parent
    return {
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            f"--nproc_per_node={ranks}",
        ],
        "deepspeed": [
            *(str(here / "deepspeed"), "--num_accelerators", str(ranks)),
            *("--master_port", str(free_port())),
        ],
        "accelerate": [
            *(str(here / "accelerate"), "launch", "--cpu", "--num_processes", str(ranks)),
            *("--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no"),
        ],
    }


def environments(ranks: int = 2) -> dict[str, list[dict[str, str]]]:
    """What each launcher set for the ranks that it started, by its name; all at the same time."""
    with ThreadPoolExecutor() as pool:
        commands = launchers(ranks)
        return dict(zip(commands, pool.map(environment_of, commands.values()), strict=True))


def side_by_side(found: Mapping[str, Sequence[Mapping[str, str]]]) -> list[dict[str, str]]:
    """A row a variable, a column a launcher: what the last rank's environment has."""
    of_torch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    own = {name: dict(ranks[-1]) for name, ranks in found.items()}
    rest = sorted({variable for each in own.values() for variable in each} - set(of_torch))
    skipped = ("COURSE_PROCESS_TOKENS", "arguments", "ACCELERATE_DYNAMO")
    rest = [each for each in rest if not each.startswith(skipped)]
    rows = [{"variable": "ranks started"} | {name: str(len(r)) for name, r in found.items()}]
    for variable in (*of_torch, *rest, "arguments"):
        values = {name: _short(each.get(variable, "")) for name, each in own.items()}
        rows.append({"variable": variable} | values)
    return rows


def _short(value: str) -> str:
    return value if len(value) <= 24 else f"{value[:21]}..."


def environment_of(command: list[str]) -> list[dict[str, str]]:
    """Start a script that writes down what its environment has that ours has not."""
    with tempfile.TemporaryDirectory(prefix="launcher_") as folder:
        script, found = Path(folder) / "say.py", Path(folder) / "found"
        found.mkdir()
        script.write_text(SAY)
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "FOUND": str(found)}
        environment["BEFORE"] = json.dumps([*environment])
        log = Path(folder) / "log"
        done = supervise([*command, str(script)], env=environment, log=log, time_limit=240)
        said = "\n".join(last_words(log.read_text()))
        assert done.status == 0, f"{command[0]} left with {done.status}: {said}"
        return [json.loads(file.read_text()) for file in sorted(found.iterdir())]


def slow_sender(links: Links, node: int, mbit: float) -> None:
    """Throttle what a node sends, by `tc`; what it receives keeps its speed. Source: tc-tbf(8)."""
    rate = ["rate", f"{mbit:g}mbit", "burst", "16kb", "latency", "400ms"]
    command = ["tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *rate]
    subprocess.run(links.command(node, command), check=True, capture_output=True, text=True)


def readdress(links: Links, network: str) -> None:
    """Give node i the address NETWORK.(i + 1) in the place of the one that it has."""
    for node in range(len(links.names)):
        for command in (
            ["ip", "address", "flush", "dev", INTERFACE],
            ["ip", "address", "add", f"{network}.{node + 1}/24", "dev", INTERFACE],
        ):
            full = links.command(node, command)
            subprocess.run(full, check=True, capture_output=True, text=True)


def on_interfaces(links: Links, interfaces: Sequence[str]) -> Callable[[int], None]:
    """What `run_ranks` calls first in each rank: to its node, and gloo to the named interface.

    What gloo writes to stderr at each of its attempts is left out; the error has the last of it.
    """

    def enter(rank: int) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        links.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank]

    return enter


def called(rank: int) -> str:
    """Make a group of two, sum something, and say who opened the connection, by the kernel's table.

    An established connection whose own port is one that listens was accepted (man proc(5)).
    """
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2, f"a sum of {total.item()} on two ranks"
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A"}
    established = [row[1] for row in rows if row[3] == "01"]
    return "accepted" if any(each in listening for each in established) else "called"


def firewall(links: Links, node: int, open_port: int) -> None:
    """Drop every TCP packet that comes to a node but those to and from one port. For real.

    By rules of routing, which are asked before the table of the node's own addresses once that has
    moved behind them. They do not know who opened a connection, as a simple packet filter does not.
    Source: man ip-rule(8).
    """
    tcp = f"dev {INTERFACE} ipproto tcp"  # dev: by which it came in
    for rule in (
        f"add pref 1 {tcp} dport {open_port} lookup local",
        f"add pref 1 {tcp} sport {open_port} lookup local",
        f"add pref 2 {tcp} blackhole",
        "add pref 3 lookup local",
        "del pref 0",
    ):
        command = links.command(node, ["ip", "rule", *rule.split()])
        subprocess.run(command, check=True, capture_output=True, text=True)


def preflight_here(ranks: int) -> tuple[int, str]:
    """Start preflight.py under torchrun on this machine; exit status and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(PREFLIGHT), "--device", "cpu"]
    return _preflight(command, {})


def _preflight(command: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryDirectory(prefix="preflight_") as folder:
        log = Path(folder) / "log"
        done = supervise([*command, "--out", folder], env=whole, log=log, time_limit=240)
        return done.status, log.read_text(errors="replace").replace(folder, "DIR")


def preflight_on_nodes(
    links: Links, interfaces: Sequence[str], script: Path = PREFLIGHT
) -> tuple[int, str]:
    """Start preflight.py on namespaces that play nodes; the largest exit status, node 0's words.

    `interfaces` has each node's GLOO_SOCKET_IFNAME. Another script has to know --device and --out.
    """

    def run(node: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(interfaces)}"]
        command += [f"--node_rank={node}", "--nproc_per_node=1", "--rdzv_backend=static"]
        command += [f"--master_addr={links.address(0)}", "--master_port=29500", str(script)]
        command += ["--device", "cpu"]
        own = {"GLOO_SOCKET_IFNAME": interfaces[node]}
        return _preflight(links.command(node, command), own)

    with ThreadPoolExecutor(len(interfaces)) as pool:
        outcomes = list(pool.map(run, range(len(interfaces))))
    return max(status for status, _ in outcomes), outcomes[0][1]
