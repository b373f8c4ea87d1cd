"""The doctor's findings on torch, GPUs, the compiler and DeepSpeed."""

import contextlib
import datetime
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from shared.cli.finding import GOOD, MISSING, NOTE, Finding
from shared.cli.machine import GIB, has_nvidia
from shared.cli.torch_build import VARIABLE


def look_at_torch() -> Iterator[Finding]:
    """Yield findings on torch, gloo, every GPU that torch sees, and NCCL."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Finding("torch", MISSING, f"{type(error).__name__}: {error}", "./run_all.sh setup")
        return
    yield Finding("torch", GOOD, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield look_at_gloo()
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        if not has_nvidia():
            yield Finding("CUDA", GOOD, "no NVIDIA GPU here: the CPU and gloo are used")
        elif torch.version.cuda is None:
            advice = f"remove .venv, then {VARIABLE}= ./run_all.sh setup"
            yield Finding("CUDA", MISSING, "a GPU, but a torch built without CUDA", advice)
        else:
            from shared.ranks.gpus import why_none

            yield Finding("CUDA", MISSING, f"torch is built for {built}, sees no GPU", why_none())
        return
    for index in range(torch.cuda.device_count()):
        yield look_at_gpu(index)
    yield look_at_nccl()


def look_at_gpu(index: int) -> Finding:
    """Return what a GPU is, and whether torch has code for it and others leave room on it."""
    import torch

    from shared.ranks.gpus import check_architecture

    gpu, name = torch.cuda.get_device_properties(index), f"GPU {index}"
    bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
    found = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, {bf16}, CUDA {torch.version.cuda}"
    try:
        check_architecture(torch.device("cuda", index))
        free, total = torch.cuda.mem_get_info(index)
    except ValueError as error:
        return Finding(name, MISSING, str(error), "install a torch that has code for it")
    except RuntimeError as error:
        return Finding(name, MISSING, str(error).splitlines()[0], "`nvidia-smi` shows who has it")
    if free < total / 2:
        found += f", {free / GIB:.1f} GiB free"
        return Finding(name, NOTE, found, "`nvidia-smi` shows who has the rest")
    return Finding(name, GOOD, found)


def gpu_gib() -> list[float]:
    """Return the memory of every GPU that torch sees, in GiB."""
    import torch

    places = range(torch.cuda.device_count())
    return [torch.cuda.get_device_properties(place).total_memory / GIB for place in places]


def look_at_gloo() -> Finding:
    """Return whether a group of one rank can add: host names that do not resolve show here."""
    import torch
    import torch.distributed as dist

    wait = datetime.timedelta(seconds=20)
    with tempfile.TemporaryDirectory() as folder:
        try:
            address = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=address, rank=0, world_size=1, timeout=wait)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        except (RuntimeError, ValueError) as error:
            advice = (
                "often a host name without an address: try GLOO_SOCKET_IFNAME=lo (Linux), lo0 (Mac)"
            )
            return Finding("gloo", MISSING, str(error).splitlines()[0], advice)
    return Finding("gloo", GOOD, "a group of one added its number")


def look_at_nccl() -> Finding:
    """Return NCCL's version, and how many ranks this machine's GPUs take."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    if not dist.is_nccl_available():
        return Finding("NCCL", MISSING, "not in this torch", "install torch's CUDA build for Linux")
    version = ".".join(map(str, nccl.version()))
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        advice = "one rank on the GPU (--nproc 1), or two on the CPU, which is run_all.sh's choice"
        return Finding("NCCL", NOTE, f"{version}, one GPU", advice)
    return Finding("NCCL", GOOD, f"{version}, up to {num_gpus} ranks")


def look_at_compiler() -> Iterator[Finding]:
    """Yield findings on what DeepSpeed's ops and torch.compile are built with."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    advice = "apt install g++ (or your system's): for torch.compile and DeepSpeed's ops, not before"
    yield Finding("C++", GOOD if compiler else NOTE, compiler or "none", "" if compiler else advice)
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ninja = shutil.which("ninja", path=folders)
    advice = "pip install ninja, and put the environment's bin folder on PATH"
    yield Finding("ninja", GOOD if ninja else NOTE, ninja or "none", "" if ninja else advice)


def look_at_deepspeed() -> Finding:
    """Return DeepSpeed's version and which of its ops this machine could build."""
    if importlib.util.find_spec("deepspeed") is None:
        return Finding("DeepSpeed", NOTE, "not installed", "needed from lesson 09 on")
    try:
        with _quiet():
            deepspeed = importlib.import_module("deepspeed")
            builders = dict(importlib.import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS)
            builders.pop("deepspeed_not_implemented", None)  # a placeholder, not an op
            able = sorted(name for name in builders if _can_build(builders[name]))
    except Exception as error:  # its import runs compilers and probes devices: anything may come
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Finding("DeepSpeed", NOTE, found, "needed from lesson 09 on")
    others = sorted(set(builders) - set(able))
    found = f"{deepspeed.__version__}; can be built here: {', '.join(able) or 'no op'}"
    return Finding("DeepSpeed", GOOD, found, f"cannot: {', '.join(others)}" if others else "")


def _can_build(builder: Any) -> bool:
    try:
        made = builder() if isinstance(builder, type) else builder
        return bool(made.is_compatible(verbose=False))
    except Exception:  # a probe of a device that is not there
        return False


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep DeepSpeed's remarks, also those of the compilers that it starts, off the table."""
    sys.stdout.flush()
    saved = [os.dup(1), os.dup(2)]
    logging.disable(logging.WARNING)
    with open(os.devnull, "w") as nothing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            logging.disable(logging.NOTSET)
