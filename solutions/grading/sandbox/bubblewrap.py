"""The wall: one program in bubblewrap sees the interpreter, the course's copy and nothing else.

Every namespace of its own (files, processes, network with loopback alone, IPC, host name), no
capabilities, no way to gain any, a read-only system, a sized /tmp and /dev/shm that end with it,
and limits by prlimit. See bwrap(1), setpriv(1), prlimit(1).
"""

import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shared.errors import InputError
from solutions.grading.results import Limits

HOME, COURSE = "/tmp", "/course"
USER = 60578  # a number that no distribution hands out (systemd's list of ranges leaves it free)
NUM_USERS = 600
_runs = itertools.count()
SYSTEM = ("/lib", "/lib64", "/lib32", "/bin", "/sbin")
READABLE = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/hosts", "/etc/nsswitch.conf", "/etc/protocols", "/etc/services"),
    "/sys",
)
SHARED_MEMORY = 64 << 20  # bytes of /dev/shm: data loaders' workers use it
# Linux's packet filter, and the numbers of calls by machine, in the order of the names.
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW = (RETURN, 0, 0, 0x7FFF0000)
AF_VSOCK, NEW_NAMESPACES = 40, 0x7E020000
CALL_NAMES = """kind clone clone3 socket memfd_create shmget io_uring_setup unshare setns mount
    umount2 pivot_root add_key request_key keyctl bpf perf_event_open userfaultfd memfd_secret
    semget msgget mq_open"""
CALLS = {
    "x86_64": """0xC000003E 56 435 41 319 29 425 272 308 165 166 155 248 249 250 321 298 323 447
        64 68 240""",
    "aarch64": """0xC00000B7 220 435 198 279 194 425 97 268 40 39 41 217 218 219 280 241 282 447
        190 186 180""",
}
OTHERWISE = "or give --unconfined to run what students wrote as yourself, with all your rights"


def require() -> None:
    """Raise InputError, in one line, where bubblewrap is not installed or may not do its work."""
    for program, package in (
        ("bwrap", "bubblewrap"),
        ("prlimit", "util-linux"),
        ("setpriv", "util-linux"),
    ):
        if shutil.which(program) is None:
            raise InputError(
                f"answers run in bubblewrap, and there is no {program} here: install it (apt "
                f"install {package}), {OTHERWISE}"
            )
    probe = [sys.executable, "-c", "print(1)"]
    done = subprocess.run(
        command(probe, (), {}, Limits()), capture_output=True, text=True, check=False
    )
    if done.returncode or done.stdout.strip() != "1":
        why = " ".join(done.stderr.split())[:200] or f"status {done.returncode}"
        raise InputError(
            f"bubblewrap cannot make a sandbox here ({why}): as root it needs CAP_SYS_ADMIN, as "
            f"another user the system must allow user namespaces; grade on another machine, "
            f"{OTHERWISE}"
        )


def command(
    argv: Sequence[str],
    reads: Iterable[tuple[Path, str]],
    environment: Mapping[str, str],
    limits: Limits,
    *,
    seccomp: int | None = None,
) -> list[str]:
    """The command that runs `argv` in a sandbox.

    `reads` are folders and where they are seen, read-only; `seccomp` is an open file that holds
    `refused_calls()`. Each run of root's gets a user of its own; others stay who they are, in a
    user namespace.
    """
    root = os.getuid() == 0
    words = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    words += ["--hostname", "sandbox"]
    words += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if root:
        words += [w for cap in ("SETUID", "SETGID", "SETPCAP") for w in ("--cap-add", f"CAP_{cap}")]
    else:
        words += ["--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER)]
    words += ["--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    for path in READABLE:
        words += ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    # Before what is read: the course may lie below /tmp.
    for place, size in (("/dev/shm", SHARED_MEMORY), (HOME, limits.folder_size)):
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", place]
    seen = [(Path(each), each) for each in interpreter_folders()] + list(reads)
    for parent in _parents(place for _, place in seen):
        words += ["--perms", "0755", "--dir", parent]
    for path, place in seen:
        words += ["--ro-bind", str(path), place]
    words += ["--remount-ro", "/", "--chdir", HOME]
    words += ["--seccomp", str(seccomp)] if seccomp is not None else []
    if root:
        user = str(USER + (os.getpid() * 8 + next(_runs)) % NUM_USERS)
        words += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
        words += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    return [*words, *limited(limits), *argv]


def limited(limits: Limits) -> list[str]:
    """The command that runs another under the limits that the system holds for each process."""
    words = ["prlimit", f"--as={limits.memory}", f"--fsize={limits.file_size}", "--nofile=256"]
    words += ["--core=0", f"--memlock={1 << 20}", f"--cpu={int(20 * limits.exercise_seconds) + 60}"]
    return [*words, f"--nproc={limits.num_threads}"]


def interpreter_folders() -> list[str]:
    """Where the interpreter, its library and packages are; none that holds the course or HOME."""
    course = Path(__file__).resolve().parents[3]
    found = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    for entry in map(Path, sys.path):
        inside = any(entry.resolve().is_relative_to(folder) for folder in found)
        ours = entry.resolve().is_relative_to(course)
        above = any(Path(each).is_relative_to(entry.resolve()) for each in (course, HOME))
        if entry.is_dir() and not (inside or ours or above):
            found.append(entry.resolve())
    return sorted({str(each) for each in found if not each.is_relative_to("/usr")})


def _parents(places: Iterable[str]) -> list[str]:
    """The folders above these places, from the outside in: bwrap closes those that it makes."""
    found = {str(parent) for place in places for parent in Path(place).parents}
    return sorted(found - {"/", HOME})


def refused_calls() -> bytes:
    """A filter for bwrap's --seccomp: these calls are refused (EPERM).

    Files in memory (memfd_create, memfd_secret) and what no process holds (shmget, mq_open, others,
    keys) belong to no folder or process whose size could be limited. New namespaces give rights of
    their own there. A socket of AF_VSOCK leads to the machine around a virtual one from any network
    namespace, and io_uring makes sockets without asking. Where clone3 is unknown the C library
    takes clone, whose flags can be seen. The filter is a program for seccomp(2).
    """
    if os.uname().machine not in CALLS:
        return struct.pack("<HBBI", *ALLOW)
    numbers = (int(each, 0) for each in CALLS[os.uname().machine].split())
    named = dict(zip(CALL_NAMES.split(), numbers, strict=True))
    kind, clone, clone3, socket = map(named.pop, ("kind", "clone", "clone3", "socket"))
    refused = [*named.values(), *range(428, 433)]  # the calls behind mount's newer interface
    # (code, where to jump if so, and if not, by name; "" is the next line)
    lines = [
        ("", LOAD, 4, "", ""),  # the kind of machine: 32-bit calls have other numbers
        ("", EQUAL, kind, "", "refuse"),
        ("", LOAD, 0, "", ""),  # the number of the call
        ("", AT_LEAST, 0x40000000, "refuse", ""),  # x32's are the same, and this more
        *(("", EQUAL, number, "refuse", "") for number in refused),
        ("", EQUAL, clone3, "unknown", ""),
        ("", EQUAL, clone, "clone", ""),
        ("", EQUAL, socket, "socket", "allow"),
        ("clone", LOAD, 16, "", ""),  # its first argument
        ("", HAS_BITS, NEW_NAMESPACES, "refuse", "allow"),
        ("socket", LOAD, 16, "", ""),
        ("", EQUAL, AF_VSOCK, "refuse", "allow"),
        ("allow", *ALLOW[::3], "", ""),
        ("refuse", RETURN, 0x00050001, "", ""),
        ("unknown", RETURN, 0x00050026, "", ""),
    ]
    places = {label: place for place, (label, *_) in enumerate(lines) if label}
    jumps = [[places.get(to, n + 1) - n - 1 for to in line[3:]] for n, line in enumerate(lines)]
    return b"".join(
        struct.pack("<HBBI", code, *jump, value)
        for (_, code, value, *_), jump in zip(lines, jumps, strict=True)
    )
