"""A cgroup around a run, where the system lets us make one: all its processes share one limit.

prlimit holds for each process alone, and the judge looks at the sum ten times a second; this is the
wall behind both. Root can make one where the cgroup file system is writable; see cgroups(7).
"""

import contextlib
import os
import shlex
import time
import uuid
from collections.abc import Generator, Iterable
from pathlib import Path

from solutions.grading.results import Limits

ROOT = Path("/sys/fs/cgroup")
YOUNG = 600.0  # seconds in which a group gets its processes
BESIDE = 1 << 30  # bytes for the judge, torch's pages and what lies in /dev/shm


@contextlib.contextmanager
def cgroup(limits: Limits, root: Path = ROOT) -> Generator[list[str]]:
    """The words before a command that put it into a new cgroup; none where none can be made.

    At the end whatever is in the group must have ended, and the group is removed.
    """
    memory = str(limits.memory + limits.folder_size + BESIDE)
    num_threads = str(limits.num_threads + 16)
    if (root / "cgroup.controllers").exists():  # version 2
        settings = {root: {"memory.max": memory, "memory.swap.max": "0", "pids.max": num_threads}}
    else:
        bytes_of = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
        settings = {root / "memory": bytes_of, root / "pids": {"pids.max": num_threads}}
    name, made = f"torch_handle_{os.getpid()}_{uuid.uuid4().hex}", []
    _remove_left_ones(settings)
    try:
        for parent, limit in settings.items():
            with contextlib.suppress(OSError):  # no right to, or no such controller
                (parent / name).mkdir()
                made.append(parent / name)
                for file, value in limit.items():
                    with contextlib.suppress(OSError):  # swap may not be counted
                        (parent / name / file).write_text(value)
        files = [shlex.quote(str(each / "cgroup.procs")) for each in made]
        join = "".join(f"{{ echo 0 > {each}; }} 2>/dev/null; " for each in files)
        yield ["sh", "-c", f'{join}exec "$@"', "sh"] if made else []
    finally:
        for _ in range(50):  # processes that were killed may take a moment to be gone
            for each in filter(Path.exists, made):
                with contextlib.suppress(OSError):
                    each.rmdir()
            if not any(map(Path.exists, made)):
                break
            time.sleep(0.02)


def _remove_left_ones(parents: Iterable[Path]) -> None:
    """Remove empty groups of graders that were killed; one with processes in it stays.

    So does a young one: its maker may have another number in a PID namespace of its own.
    """
    for group in (each for parent in parents for each in parent.glob("torch_handle_*_*")):
        maker = group.name.split("_")[2]
        with contextlib.suppress(OSError):
            is_old = time.time() - group.stat().st_mtime > YOUNG
            if is_old and maker.isdigit() and not Path("/proc", maker).exists():
                group.rmdir()
