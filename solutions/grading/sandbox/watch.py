"""What the processes of one grading use, looked at a few times a second; and their end."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from solutions.grading.results import Limits, Stop

MAX_FILES = 4096


@dataclass(frozen=True)
class Watch:
    """Called with the number of the pytest process: the limit that was passed, or None."""

    home: Path
    limits: Limits
    count: bool  # whether processes must be counted here, because the system does not

    def __call__(self, pid: int) -> Stop | None:
        processes = descendants(pid)
        if self.count and len(processes) > self.limits.num_processes:
            return Stop.PROCESSES
        memory = self.limits.memory
        # The first figure counts pages shared since a fork in each process; the second takes long.
        if sum(map(own_bytes, processes)) > memory < sum(map(exact_bytes, processes)):
            return Stop.MEMORY
        used, files = folder_use(self.home)
        over = used > self.limits.folder_size or files > MAX_FILES
        return Stop.FOLDER if over else None


def descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, and theirs; empty when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def own_bytes(process: psutil.Process) -> int:
    """Memory that no file backs; pages shared since a fork are counted in each."""
    try:
        info = process.memory_info()
    except psutil.Error:
        return 0
    return info.rss - getattr(info, "shared", 0)


def exact_bytes(process: psutil.Process) -> int:
    """A process's part of the memory: what it shares with n others counts 1/(n + 1)."""
    try:
        return process.memory_full_info().pss
    except (psutil.Error, AttributeError):  # it has gone, or this system does not tell
        return own_bytes(process)


def folder_use(folder: Path) -> tuple[int, int]:
    """Bytes and number of files below a folder; what vanishes meanwhile counts for nothing."""
    used = files = 0
    waiting = [str(folder)]
    while waiting and files <= MAX_FILES:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
    return used, files


def end_all(pid: int, home: Path, *, search: bool) -> None:
    """End a run's processes: its tree, frozen first so that none escapes by forking meanwhile.

    `search`: where no namespace holds them, also those that left the tree, by the home folder
    that they were started with.
    """
    for _ in range(5):
        found = [*descendants(pid), *(started_in(home) if search else ())]
        if not found:
            break
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.suspend()
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs([each for each in found if each.ppid() == os.getpid()], timeout=1.0)


def started_in(home: Path) -> Iterable[psutil.Process]:
    """Processes whose environment names the folder, as far as this user may look."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get("HOME") == str(home):
                yield process
