"""What keeps a graded kernel to itself on this machine, and the plan that starts one so.

Each layer is tried once. Where one is missing the others are used, and `Layers.lines` says so.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from solutions.grading.results import Limits

INSIDE = Path(__file__).with_name("inside")  # the files that run in the sandbox
# User numbers that no distribution hands out (systemd's list of ranges leaves them free).
FIRST_USER, NUM_USERS = 60578, 600
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt/conda")
READABLE = (
    *("/proc", "/sys", "/dev/urandom", "/dev/random", "/dev/zero", "/dev/full"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/protocols", "/etc/services"),
    *("/etc/passwd", "/etc/group", "/etc/localtime", "/etc/os-release", "/etc/fonts"),
)
SHARED_MEMORY = 64 << 20  # bytes of /dev/shm for one kernel: data loaders' workers use it
THREADS = 3  # for each process of the limit: the system counts threads


@dataclass(frozen=True)
class Layers:
    """The layers that hold here. `landlock` is its version, 0 where there is none."""

    landlock: int = 0
    namespaces: bool = False
    mounts: bool = False
    own_user: bool = False
    own_proc: bool = False

    def lines(self) -> list[str]:
        """What the terminal says, one line a layer."""
        network = "no network but its own loopback; what it starts ends with it"
        return [
            _line(True, "limits", "time, memory, processes, file sizes, output"),
            _line(
                bool(self.landlock),
                "files",
                "reads the interpreter and the course's copy, writes one temporary folder",
                "not kept from files that you can read: keep solutions/ off this machine's account",
            ),
            _line(
                self.namespaces,
                "network and processes",
                network,
                "the network is open, and processes are ended by searching for them",
            ),
            _line(bool(self.own_user or self.landlock), "user", self._user()),
        ]

    def _user(self) -> str:
        if self.own_user:
            return "runs as a user of its own"
        return "runs as you, kept in by the layers above" if os.getuid() else "runs as root"


def _line(holds: bool, name: str, words: str, otherwise: str = "") -> str:
    return f"  {'holds  ' if holds else 'MISSING'} {name}: {words if holds else otherwise or words}"


def landlock_version() -> int:
    """The version of Landlock that this kernel offers; 0 for none."""
    if sys.platform != "linux":
        return 0
    flag_version = 1
    return max(0, ctypes.CDLL(None).syscall(444, None, 0, flag_version))


@cache
def find_layers() -> Layers:
    """Try each layer with a process that does nothing."""
    if sys.platform != "linux":
        return Layers()
    landlock = landlock_version()
    for mounts in (True, False):
        tried = Layers(landlock, namespaces=True, mounts=mounts)
        if holds(tried):
            break
    else:
        tried = Layers(landlock)
        if landlock and not holds(tried):
            tried = Layers()
    with_user = replace(tried, own_user=True)
    tried = with_user if os.getuid() == 0 and holds(with_user) else tried
    with_proc = replace(tried, own_proc=tried.mounts)  # refused in containers that mask their /proc
    return with_proc if with_proc != tried and holds(with_proc) else tried


def holds(layers: Layers) -> bool:
    """Whether a process starts in these layers, and imports something."""
    with tempfile.TemporaryDirectory(prefix="probe_") as name:
        folder = Path(name)
        folder.chmod(0o755)
        home = folder / "home"
        home.mkdir()
        command = [sys.executable, "-c", "import json, socket; print(json.dumps(1))"]
        plan = make_plan(layers, home, folder, command, {}, Limits(), slot=0)
        file = folder / "plan.json"
        file.write_text(json.dumps(plan))
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", str(INSIDE / "enter.py"), str(file)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=30,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0 and done.stdout.strip() == b"1"


def make_plan(
    layers: Layers,
    home: Path,
    course: Path,
    argv: Sequence[str],
    environment: dict[str, str],
    limits: Limits,
    slot: int,
    owned: Sequence[Path] = (),
) -> dict[str, Any]:
    """The plan that `enter.py` follows: where the program may look, write and how much it gets."""
    interpreter = interpreter_folders()
    user = FIRST_USER + (os.getpid() * 8 + slot) % NUM_USERS if layers.own_user else None
    shm = ["/dev/shm"] if layers.mounts else []
    return {
        "argv": list(argv),
        "environment": environment,
        "home": str(home),
        "owned": [str(home), *map(str, owned)],
        "namespaces": layers.namespaces,
        "mounts": layers.mounts,
        "own_proc": layers.own_proc,
        "landlock": layers.landlock,
        "user": user,
        "shared_memory": SHARED_MEMORY,
        "needed": [*interpreter, str(course), str(home)],
        "run": [*interpreter, *SYSTEM],
        "read": [str(course), *READABLE],
        "write": [str(home), "/dev/null", *shm],
        "rlimits": resource_limits(layers, limits),
    }


def interpreter_folders() -> list[str]:
    """Where the interpreter, its library and its packages are; never the course's own folder."""
    course = Path(__file__).resolve().parents[3]
    found = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    for entry in map(Path, sys.path):
        inside = any(entry.resolve().is_relative_to(folder) for folder in found)
        ours = entry.resolve().is_relative_to(course) or course.is_relative_to(entry.resolve())
        if entry.is_dir() and not inside and not ours:
            found.append(entry.resolve())
    return sorted(map(str, found))


def resource_limits(layers: Layers, limits: Limits) -> dict[str, int]:
    """The limits that the system itself holds for each process, by the names of `resource`."""
    found = {
        "AS": limits.memory,
        "FSIZE": limits.file_size,
        "NOFILE": 256,
        "CORE": 0,
        "MEMLOCK": 1 << 20,
        "CPU": int(20 * limits.exercise_seconds) + 60,
    }
    if exact_process_count(layers):
        found["NPROC"] = THREADS * limits.num_processes
    return found


def exact_process_count(layers: Layers) -> bool:
    """Whether the system counts this kernel's processes apart from the user's others."""
    return layers.own_user or (layers.namespaces and os.getuid() != 0)
