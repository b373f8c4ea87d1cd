"""This machine's cores, memory and processor, within a container's limits."""

import os
import platform
import shutil
import sys
from pathlib import Path

GIB = 2**30
CONTROL_GROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Return how many cores this process may use; affinity and a container's quota count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = _limit("cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        return max(1, min(cores or 1, int(quota) // int(period)))
    return cores or 1


def memory_gib() -> float:
    """Return the main memory in GiB, or the container's part of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _limit("memory.max")
    return (min(memory, int(limit)) if limit.isdecimal() else memory) / GIB


def moves() -> bool:
    """Whether a line that is printed can be drawn again: on a terminal that knows how."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def has_nvidia() -> bool:
    """Whether the machine has an NVIDIA driver, and so a GPU that torch could use."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def processor_name() -> str:
    """Return the processor's model where the system tells it, its architecture otherwise."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_machine() -> dict[str, str]:
    """Return what a measured figure depends on: processor, cores, memory, Python, system."""
    return {
        "processor": processor_name(),
        "cores": str(num_cores()),
        "memory": f"{memory_gib():.0f} GiB",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _limit(name: str) -> str:
    """Return a limit of the control group as text; "" where there is none."""
    try:
        return (CONTROL_GROUP / name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
