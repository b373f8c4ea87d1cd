"""A rank's GPU: taken for the group, or in one line why there is none that it could take."""

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from shared.errors import InputError, NoGroup
from shared.ranks.visible import VISIBLE

HIDES_ALL = ("", "-1", "NoDevFiles")  # the last is older Slurm's, of a job without GPUs
DRIVER = Path("/proc/driver/nvidia/gpus")  # Linux: a folder for each GPU, visible or not


def are_misnamed() -> bool:
    """Whether somebody chose among this machine's GPUs, and named none of them."""
    hidden = os.environ.get(VISIBLE, "") in HIDES_ALL
    return torch.backends.cuda.is_built() and not hidden and any(DRIVER.glob("*"))


def why_none() -> str:
    """Why torch sees no GPU."""
    said = os.environ.get(VISIBLE)
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built for the CPU alone"
    if said in HIDES_ALL:
        return f"{VISIBLE}={said} hides them all: unset it"
    if said is not None:
        return (
            f"{VISIBLE}={said} names none of them (give numbers of `nvidia-smi -L`, as 0,1), or "
            "the driver is too old for this torch: compare with nvidia-smi's head"
        )
    return "is there one, and is the driver new enough? See `nvidia-smi`"


def chosen_by() -> str:
    """CUDA_VISIBLE_DEVICES in words, where it may be the reason that there are few GPUs."""
    said = os.environ.get(VISIBLE)
    return "" if said is None else f" ({VISIBLE}={said})"


def take_gpu(device: torch.device) -> None:
    """Make it this process's GPU; raises InputError where torch or the GPU cannot be used.

    Without NCCL in torch; and NoGroup, since it may be this rank's alone, without code for this GPU
    in torch, and where another process has it for itself or has filled it.
    """
    if not dist.is_nccl_available():
        raise InputError(
            f"torch {torch.__version__} has no NCCL, by which GPUs talk: install torch's own build "
            "for CUDA on Linux, or use --device cpu (gloo)"
        )
    try:
        torch.cuda.set_device(device)
        check_architecture(device)
        torch.empty(1, device=device)
    except RuntimeError as error:  # among them OutOfMemoryError, and the driver's own
        raise NoGroup(
            f"GPU {device.index} cannot be used ({str(error).splitlines()[0]}): `nvidia-smi` shows "
            f"who has it; choose others by {VISIBLE}, or use --device cpu"
        ) from error


def check_architecture(device: torch.device) -> None:
    """Raise NoGroup unless torch has code for this GPU: of its generation, or to be compiled.

    Code for sm_80 runs on 8.0 to 8.9, that for compute_80 is compiled for everything from 8.0 on.
    Source: CUDA C++ Programming Guide, "Application Compatibility".
    """
    built, own = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or not built:
        return
    for name in built:
        kind, _, number = name.partition("_")
        major, minor = divmod(int(re.sub(r"\D", "", number)), 10)  # of sm_90a as well
        if (major, minor) <= own and (kind == "compute" or major == own[0]):
            return
    gpu, version = torch.cuda.get_device_name(device), ".".join(map(str, own))
    raise NoGroup(
        f"GPU {device.index} ({gpu}) has compute capability {version}, and torch "
        f"{torch.__version__} has code for {', '.join(built)}: install a torch that has it, or use "
        "--device cpu"
    )
