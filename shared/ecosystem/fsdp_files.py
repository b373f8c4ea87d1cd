"""A Trainer's `fsdp_config` that is the path of a JSON file, read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import InputError


def with_files(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with the content of the file that `fsdp_config` names in its place.

    Raises InputError for a file that cannot be read or is no JSON.
    """
    config = arguments.get("fsdp_config")
    if not isinstance(config, str | Path):
        return dict(arguments)
    try:
        read = json.loads(Path(config).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"fsdp_config {config}: {error}") from None
    except ValueError as error:
        words = "give what Accelerate's yaml has under fsdp_config, as JSON"
        raise InputError(f"fsdp_config {config} is no JSON: {error}; {words}") from None
    return {**arguments, "fsdp_config": read}
