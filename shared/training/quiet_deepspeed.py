"""DeepSpeed, imported without its log and without what it would compile."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from shared.errors import InputError

WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


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


def load_deepspeed(engine: Any, folder: Path, tag: str) -> None:
    """Let a DeepSpeed engine load its checkpoint, and nothing in it run code.

    It asks torch.load for whatever was pickled; torch obeys a variable more than its caller.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    kept: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals(kept):
            engine.load_checkpoint(str(folder), tag=tag)
    finally:
        del os.environ[WEIGHTS_ONLY]
        if before is not None:
            os.environ[WEIGHTS_ONLY] = before
