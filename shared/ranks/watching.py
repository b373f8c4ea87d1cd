"""Whether ranks that are waited for still do anything: how a deadlock is told from slow work."""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

IDLE_TICKS = 2  # hundredths of a second of processor time that waiting itself may use meanwhile
CROWDED = 10  # times a limit by the clock, after which processor time is not asked for any more
LOOK = 0.1  # seconds between two looks at what the ranks are doing


class IdleWatch:
    """For how long nothing has happened in the ranks that are waited for.

    Only what was looked at counts: where the whole machine stood still, this process did, too.
    """

    def __init__(self) -> None:
        self.seen: dict[int, int | None] = {}
        self.last = time.monotonic()
        self.idle = 0.0

    def idle_seconds(self, pids: Mapping[int, int | None]) -> float:
        """Seconds without any work in these processes, by rank, as far as they were looked at."""
        now = {rank: _activity(pid) for rank, pid in pids.items()}
        if now.keys() != self.seen.keys() or any(
            ticks is None or ticks - (self.seen[rank] or 0) > IDLE_TICKS
            for rank, ticks in now.items()
        ):
            self.seen, self.idle = now, 0.0
        else:
            self.idle += min(time.monotonic() - self.last, 2 * LOOK)
        self.last = time.monotonic()
        return self.idle


def had_their_time(pids: Iterable[int | None], limit: float, by_the_clock: float) -> bool:
    """Whether one of the processes has had so many seconds of processor time, where that is known.

    On a machine that has other work the clock goes on while a rank waits for its turn.
    """
    if not can_watch() or by_the_clock >= CROWDED * limit:
        return True
    used = [0.0]
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5)
            used.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return max(used) >= limit


def can_watch() -> bool:
    """Whether idle ranks can be told from busy ones here: on Linux, if /proc shows our namespace.

    In another namespace of processes its numbers mean other processes.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _activity(pid: int | None) -> int | None:
    """Clock ticks of processor time so far, and bytes written: either means that it goes on.

    None while it waits for a disk or for its turn, while somebody has stopped it (SIGSTOP, a
    debugger), and where idle ranks cannot be told from busy ones. In a backward the first thread
    only waits for autograd's, so the time of all threads counts but of gloo's, which spins without
    an end over a message that nobody receives; what it sends are the bytes.
    """
    if not can_watch():
        return None
    done = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            name, _, rest = (thread / "stat").read_text().rpartition(")")  # proc(5)
            fields = rest.split()
            if name.endswith("(gloo_tcp_loop"):
                continue
            if fields[0] in "DRTt":
                return None
            done += int(fields[11]) + int(fields[12])  # user and kernel
    except OSError:
        return None
    with contextlib.suppress(OSError):  # some systems show it to nobody
        done += int(Path(f"/proc/{pid}/io").read_text().split()[3])  # wchar
    return done
