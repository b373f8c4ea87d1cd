"""Ranks that meet before there is a group: what each has to say, and who reaches whom by TCP.

A wrong interface or a firewall keeps gloo and NCCL from making a group at all, so what finds them
cannot send through one. torchrun's store is there earlier: all ranks have reached it.
"""

import ipaddress
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from shared.errors import InputError, NoGroup

PROBE = 1 << 15  # bytes: several packets of 9,000
Reached = Sequence[Sequence[str]]  # [caller][called]: "" where a connection came about, or why not


@dataclass(frozen=True)
class Meeting:
    """The ranks of a launcher at their store; `patience` in seconds."""

    store: dist.Store
    rank: int
    world_size: int
    patience: float = 60.0

    def gathered(
        self, key: str, value: Any, read: Callable[[Any], Any] = lambda found: found
    ) -> list[Any]:
        """Every rank's value, in the order of ranks; every rank calls it, once for each key.

        As JSON, since whoever reaches the store's port can write there; `read` makes the value of
        what JSON leaves of it. Raises NoGroup, which names them, for ranks that did not come, and
        where what is there is none of a rank's.
        """
        self.store.set(f"{key}_{self.rank}", json.dumps(value))
        names = [f"{key}_{rank}" for rank in range(self.world_size)]
        until = time.monotonic() + self.patience
        while not self.store.check(names):
            if time.monotonic() > until:
                missing = [n for n, name in enumerate(names) if not self.store.check([name])]
                raise NoGroup(
                    f"ranks {missing} of {self.world_size} did not come within {self.patience:g} s:"
                    " are all of them started, or have they ended with an error?"
                )
            time.sleep(0.02)
        return [self._found(name, read) for name in names]

    def _found(self, name: str, read: Callable[[Any], Any]) -> Any:
        try:
            return read(json.loads(self.store.get(name)))
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise NoGroup(
                f"{name!r} in the store is nothing that a rank writes: does another program use"
                " its port?"
            ) from None


def meet(patience: float = 60.0) -> Meeting:
    """Meet the ranks that torchrun started, or oneself alone without it.

    Raises NoGroup where the store cannot be reached.
    """
    if "RANK" not in os.environ:
        return Meeting(dist.HashStore(), 0, 1, patience)
    try:
        found = dist.rendezvous("env://", timeout=timedelta(seconds=patience))
        store, rank, world_size = next(found)
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise NoGroup(f"no store at {where}: {str(error).splitlines()[0]}") from None
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(dist.PrefixStore(f"meeting_{again}", store), rank, world_size, patience)


def own_address() -> tuple[str, str]:
    """The address that gloo would take, and why: a named interface, or the host's name.

    GLOO_SOCKET_IFNAME names the interface; without it gloo asks what the host's name means. (NCCL
    looks at NCCL_SOCKET_IFNAME, and otherwise takes loopback last.) Raises InputError for an
    interface that is not there.
    """
    if given := os.environ.get("GLOO_SOCKET_IFNAME"):  # gloo opens all of them
        first, *_ = [_address_of(name) for name in given.removesuffix(",").split(",")]
        return first, given
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


def reach(
    meeting: Meeting, address: str, seconds: float = 2.0, answers: bool = True
) -> list[list[str]]:
    """Let every rank call every other by TCP, at a free port of the address that each gives.

    And send so much that packets are as large as the machine lets them be: a network that carries
    less (its MTU) lets a call through, and a group, whose first large message then waits for ever.
    Where a call came through there is ""; otherwise the system's words. `answers=False` lets this
    rank behave like one behind a firewall. Every rank calls it, once in a meeting, and
    gets the whole table.
    """
    with socket.socket() as door:
        own = own_address()[0]
        door.bind((address if address == own else own, 0))
        if answers:
            door.listen(meeting.world_size)
        doors = meeting.gathered("door", (address, door.getsockname()[1]), _as_door)
        row = [
            "" if called == meeting.rank else _call(host, port, seconds)
            for called, (host, port) in enumerate(doors)
        ]
        # Nobody closes before all have called.
        return meeting.gathered("reached", row, partial(_as_row, world_size=meeting.world_size))


def _as_door(found: Any) -> tuple[str, int]:
    host, port = found
    host, port = str(host), int(port)
    if host:  # an interface may have none
        ipaddress.ip_address(host)
    if not 0 < port < 1 << 16:
        raise ValueError(f"no port: {port}")
    return host, port


def _as_row(found: Any, world_size: int) -> list[str]:
    if not isinstance(found, list) or list(map(type, found)) != [str] * world_size:
        raise ValueError(f"no {world_size} texts: {found}")
    return found


def _call(host: str, port: int, seconds: float) -> str:
    try:
        with socket.create_connection((host, port), timeout=seconds) as line:
            line.sendall(bytes(PROBE))
            until = time.monotonic() + seconds
            while (waiting := _on_the_way(line)) and time.monotonic() < until:
                time.sleep(0.002)
    except OSError as error:
        return error.strerror or "timed out"
    if not waiting:
        return ""
    return (
        f"it answers, but {waiting:,} of {PROBE:,} bytes do not arrive within {seconds:g} s: are"
        " packets lost that are larger than the MTU of something between?"
    )


def _on_the_way(line: socket.socket) -> int:
    """Bytes that the other machine has not confirmed; its system does, without its program.

    Source: tcp(7), SIOCOUTQ. 0 on systems that do not say.
    """
    try:
        import fcntl
        import termios

        return struct.unpack("i", fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4)))[0]
    except (ImportError, OSError):
        return 0
