"""A slow network out of nothing: namespaces on this machine, joined by cables with a speed limit.

Linux, root, `ip` and `tc` (package iproute2). Each node is a network namespace, that is, a network
stack of its own; a pair of virtual Ethernet devices joins it to a bridge in one more namespace, and
a token bucket at either end lets no more than the given rate through.
Source: man pages ip-netns(8), veth(4), tc-tbf(8).
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Generator
from dataclasses import dataclass

from shared.errors import InputError

CLONE_NEWNET = 0x40000000  # <linux/sched.h>
INTERFACE = "eth0"


@dataclass(frozen=True)
class Links:
    """The nodes' namespaces, in order; node i has the address 10.77.0.(i + 1)."""

    names: tuple[str, ...]

    def address(self, node: int) -> str:
        """Where the others reach a node."""
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> None:
        """Move this thread, and all that it starts, into a node's namespace. No way back."""
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.names[node]}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot enter {namespace.name}: {os.strerror(error)}")

    def command(self, node: int, command: list[str]) -> list[str]:
        """The command that runs `command` on a node."""
        return ["ip", "netns", "exec", self.names[node], *command]


def why_not() -> str:
    """Why this machine cannot have throttled links; empty where it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: Linux with iproute2 is needed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with throttled_links(1, 100):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def throttled_links(nodes: int, mbit: float) -> Generator[Links]:
    """Join `nodes` namespaces by links of `mbit` megabits a second in each direction.

    Everything is removed at the end, whatever happens inside.
    Raises InputError for a speed that is not above 0, and subprocess.CalledProcessError where the
    machine does not allow it: ask why_not() first.
    """
    if not mbit > 0:
        raise InputError(f"a link of {mbit:g} Mbit/s carries nothing: take a speed above 0")
    mark = uuid.uuid4().hex[:8]
    hub = f"hub-{mark}"
    names = tuple(f"node{node}-{mark}" for node in range(nodes))
    with contextlib.ExitStack() as stack:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)  # and the devices in it
        _in(hub, "ip", "link", "add", "bridge", "type", "bridge")
        _in(hub, "ip", "link", "set", "bridge", "up")
        links = Links(names)
        for node, name in enumerate(names):
            port = f"port{node}"
            _in(hub, "ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE,
                "netns", name)  # fmt: skip
            _in(hub, "ip", "link", "set", port, "master", "bridge", "up")
            _in(name, "ip", "address", "add", f"{links.address(node)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _in(name, "ip", "link", "set", device, "up")
            _throttle(hub, port, mbit)
            _throttle(name, INTERFACE, mbit)
        yield links


def sent_by_card() -> int:
    """The bytes that this node's `INTERFACE` has sent so far, TCP's headers among them.

    Source: man 5 proc, /proc/net/dev.
    """
    with open("/proc/self/net/dev") as table:
        line = next(line for line in table if line.strip().startswith(f"{INTERFACE}:"))
    return int(line.split(":")[1].split()[8])


def _throttle(namespace: str, device: str, mbit: float) -> None:
    # A bucket of 256 KiB may pass at once after a rest; smaller ones make TCP stumble.
    _in(namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf",
        "rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "400ms")  # fmt: skip


def _in(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
