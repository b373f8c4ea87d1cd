"""DeepSpeed, imported without its log and without what it would compile."""

import logging
import os
from typing import Any

import torch

from shared.errors import InputError


def quiet_deepspeed() -> Any:
    """Import DeepSpeed without its log and without its compiled collectives.

    On a CPU its first engine otherwise compiles `deepspeed_shm_comm` (minutes, once), which speeds
    up collectives inside one machine and changes no number; and to know which operators could be
    compiled here, each process tries a linker, whose words stand among ours.
    Raises InputError where it is missing.
    """
    try:
        import deepspeed
    except ImportError as error:
        words = f"DeepSpeed is not installed here ({error}): pip install deepspeed"
        raise InputError(words) from None
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # before it is looked up
    deepspeed.utils.logger.setLevel(logging.CRITICAL)
    return deepspeed


def import_deepspeed(device: str) -> None:
    """Import DeepSpeed for `--device`; before there is a group, which its defaults would keep.

    Raises InputError where it is missing.
    """
    on_gpu = device != "cpu" and torch.cuda.is_available()
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    quiet_deepspeed()
