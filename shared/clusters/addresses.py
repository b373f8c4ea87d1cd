"""Under which address the other ranks will look for this one, and whether they get through."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from shared.errors import InputError
from shared.ranks.agreement import gathered
from shared.ranks.group import Rank

Reach = Bool[Tensor, "caller called"]


def own_address() -> tuple[str, str]:
    """The address that gloo would take, and why: a named interface, or the host's name.

    GLOO_SOCKET_IFNAME names the interface; without it gloo asks what the host's name means. (NCCL
    looks at NCCL_SOCKET_IFNAME, and otherwise prefers what is not loopback.) Raises InputError for
    an interface that is not there.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return _address_of(name), name
    try:
        return socket.gethostbyname(socket.gethostname()), "host name"
    except OSError:
        return "127.0.0.1", "host name unknown"


def _address_of(interface: str) -> str:
    known = {name for _, name in socket.if_nameindex()}
    if interface not in known:
        raise InputError(
            f"GLOO_SOCKET_IFNAME={interface} is no interface of this machine: it has"
            f" {', '.join(sorted(known))}"
        )
    try:  # Linux: SIOCGIFADDR of <linux/sockios.h>
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = interface.encode().ljust(256, b"\0")
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])
    except OSError:
        return ""  # it has no IPv4 address


@dataclass(frozen=True)
class Door:
    """Where a rank listens."""

    address: str
    port: int


def reach(rank: Rank, seconds: float = 2.0, address: str = "", *, answers: bool = True) -> Reach:
    """Which rank gets a TCP connection to which: every rank listens, every rank calls all others.

    A free port of the address under which gloo will listen. `answers=False` lets this rank behave
    like one behind a firewall. Collective; all ranks get the table.
    """
    with socket.socket() as door:
        door.bind((address or own_address()[0], 0))
        if answers:
            door.listen(rank.world_size)
        here = Door(*door.getsockname()[:2])
        doors: list[Door] = gathered(here)
        row = [
            _gets_through(each, seconds) or number == rank.rank for number, each in enumerate(doors)
        ]
        rows: Sequence[list[bool]] = gathered(row)  # and nobody closes before all have called
    return torch.tensor(rows)


def _gets_through(door: Door, seconds: float) -> bool:
    try:
        with socket.create_connection((door.address, door.port), timeout=seconds):
            return True
    except OSError:
        return False


def unreached(table: Reach) -> list[tuple[int, list[int]]]:
    """The ranks that somebody does not reach, each with those who do not."""
    missed = [
        (called, (~table[:, called]).nonzero().flatten().tolist()) for called in range(len(table))
    ]
    return [(called, callers) for called, callers in missed if callers]
