"""The six engines of lesson 06 by name, and the size of their buckets."""

import math
from typing import Any

from shared.errors import InputError

ENGINES = ("single", "naive", "flat", "overlapped", "bucketed", "ddp")


def bucket_options(bucket_mb: float | None) -> dict[str, Any]:
    """The size of buckets as "bucketed" and torch's DDP take it; for None their own default.

    Raises InputError for a size that is none.
    """
    if bucket_mb is None:
        return {}
    if not 0 < bucket_mb < math.inf:
        raise InputError(f"--bucket-mb must be above 0 (and finite), got {bucket_mb}")
    return {"bucket_cap_mb": bucket_mb}
