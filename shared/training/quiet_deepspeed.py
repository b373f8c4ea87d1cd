"""DeepSpeed, imported without its log and without what it would compile."""

import logging
from typing import Any

from shared.errors import InputError


def quiet_deepspeed() -> Any:
    """Import DeepSpeed without its log and without its compiled collectives.

    On a CPU its first engine otherwise compiles `deepspeed_shm_comm` (minutes, once), which speeds
    up collectives inside one machine and changes no number. Raises InputError where it is missing.
    """
    try:
        import deepspeed
    except ImportError as error:
        words = f"DeepSpeed is not installed here ({error}): pip install deepspeed"
        raise InputError(words) from None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.CRITICAL)
    return deepspeed
