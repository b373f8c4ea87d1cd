"""Shuts one kernel in: `python -I -S enter.py PLAN`, with nothing but the standard library.

Every step that the plan asks for must succeed, or the kernel does not start; which steps this
machine allows is found out once, by `solutions.grading.sandbox.confine`.

With namespaces there are three processes: this one, which the grader started and may kill; the
first process of the new process namespace, whose end ends everything in it; and the kernel.
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every processor
READ, READ_AND_RUN = 0b1100, 0b1101  # files and folders; and execute
FILE_ONLY = 0b1100000000000111  # execute, write, read, truncate, ioctl: what a file can be given
libc = ctypes.CDLL(None, use_errno=True)


def call(what: str, result: int) -> int:
    """The result of a C call; raises OSError, with what was tried, when it is -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), flags, options.encode() or None
    )
    call(f"mount {target}", result)


def die_with_parent() -> None:
    """Be killed when the parent is."""
    call("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def new_namespaces(plan: dict[str, Any]) -> None:
    """Own processes, network (loopback alone), semaphores; own mounts where they are allowed."""
    user, group = os.getuid(), os.getgid()
    flags = NEWPID | NEWNET | NEWIPC | NEWUTS | (NEWNS if plan["mounts"] else 0)
    flags |= NEWUSER if user else 0
    call("unshare", libc.unshare(flags))
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(each, 0x8914, up)  # SIOCSIFFLAGS
    if plan["mounts"]:
        mount("none", "/", None, MS_REC | MS_PRIVATE)
        size = f"size={plan['shared_memory']},mode=1777"
        mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, size)
        if plan["user"] is not None:
            open_the_way(plan["needed"])


def open_the_way(needed: Sequence[str]) -> None:
    """Put an empty folder over each one that only root may enter, and in it what is needed.

    An interpreter in root's home folder can be run by another user in this way, and the rest of
    that folder is out of sight.
    """
    closed: dict[str, list[str]] = {}
    for path in needed:
        for parent in reversed(_parents(path)):
            if not os.stat(parent).st_mode & 0o001:
                closed.setdefault(parent, []).append(path)
                break
    for parent, inside in closed.items():
        opened = [(path, os.open(path, os.O_PATH)) for path in inside]
        mount("tmpfs", parent, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
        for path, descriptor in opened:
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)


def _parents(path: str) -> list[str]:
    """The folder itself and those above it, from the inside out."""
    found = [path]
    while found[-1] != "/":
        found.append(os.path.dirname(found[-1]))
    return found


def become_first_process(own_proc: bool) -> None:
    """Fork into the new process namespace and on into the kernel's process; returns there only.

    With `own_proc` /proc shows the new namespace: in the old one, a process has another number.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    outer = os.fork()
    if outer:
        os._exit(wait_for(outer))
    die_with_parent()
    if own_proc:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    kernel = os.fork()
    if kernel:
        os._exit(wait_for(kernel))
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def wait_for(child: int) -> int:
    """Collect the dead until that child is among them; its status, 128 + n for signal n."""
    while True:
        process, status = os.waitpid(-1, 0)
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def give_up_rights(plan: dict[str, Any]) -> None:
    """Limits, then the user, then no way to gain anything again."""
    for name, value in plan["rlimits"].items():
        limit = getattr(resource, f"RLIMIT_{name}", None)
        if limit is not None:
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
    if plan["user"] is not None:
        os.setgroups([])
        os.setresgid(plan["user"], plan["user"], plan["user"])
        os.setresuid(plan["user"], plan["user"], plan["user"])
    if sys.platform == "linux":
        die_with_parent()
        call("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        os.umask(0o077)


def landlock(plan: dict[str, Any]) -> None:
    """Let the kernel see what it needs and write its own folder; no signals to the outside.

    Rules of the TCP kind are left out: ranks meet over loopback ports of the system's choice.
    """
    version = plan["landlock"]
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    scoped = 0b11 if version >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("=QQQ", rights, 0, scoped)[: 8 if version < 4 else 24]
    ruleset = call("landlock", libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0))
    grants = [(path, READ_AND_RUN) for path in plan["run"]]
    grants += [(path, READ) for path in plan["read"]]
    grants += [(path, rights & ~1) for path in plan["write"]]
    for path, granted in grants:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        granted &= rights if os.path.isdir(path) else rights & FILE_ONLY
        rule = struct.pack("=Qi", granted, descriptor)
        call(f"landlock {path}", libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(descriptor)
    call("landlock_restrict_self", libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def main() -> None:
    """Take the steps of the plan in their order and become the program that it names."""
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    if sys.platform == "linux":
        die_with_parent()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # should memory run out, this is what has to go
    if plan["user"] is not None:
        for path in plan["owned"]:
            os.chown(path, plan["user"], plan["user"])
    if plan["namespaces"]:
        new_namespaces(plan)
        die_with_parent()  # rights that were gained or given up make the system forget it
        become_first_process(plan["own_proc"])
    give_up_rights(plan)
    if plan["landlock"]:
        landlock(plan)
    os.chdir(plan["home"])
    os.execve(plan["argv"][0], plan["argv"], plan["environment"])


if __name__ == "__main__":
    main()
