"""The Trainer's `fsdp` and `fsdp_config`, in all their spellings, as one set of options."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shared.ecosystem.arguments import Arguments, expect_known, spelled
from shared.errors import InputError

BY_CLASS, BY_SIZE, WHOLE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
_TAKEN = """
    activation_checkpointing auto_wrap_policy cpu_offload min_num_params offload_params
    reshard_after_forward sharding_strategy transformer_layer_cls_to_wrap version
"""
_IGNORED = """
    backward_prefetch backward_prefetch_policy cpu_ram_efficient_loading forward_prefetch
    limit_all_gathers state_dict_type sync_module_states use_orig_params xla_fsdp_settings
"""  # which change neither a number nor a unit under FSDP2
REFUSED = {"activation_checkpointing_offload", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}
KNOWN = {*_TAKEN.split(), *_IGNORED.split(), *REFUSED}
WAYS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
RESHARDS = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}


class FsdpOptions(NamedTuple):
    """How a model is cut into units, and what each of them does."""

    classes: list[str] | None  # None: the model's own `_no_split_modules`
    more_than: int | None  # parameters of a unit, where units go by size
    reshard: bool
    offload: bool
    checkpoint: bool


def fsdp_options(arguments: Arguments) -> FsdpOptions:
    """What the arguments say; `fsdp_config` is a dict; a path is read by `with_files`.

    Takes Accelerate's names ("fsdp_" before each) and older Trainers' ("full_shard auto_wrap
    offload"). Raises InputError for a name that is none of theirs, and for what FSDP2 cannot do.
    """
    given = _read(arguments.get("fsdp_config"))
    words = _words(arguments.get("fsdp"))
    ways = [given.get("sharding_strategy"), *(word for word in words if word in WAYS)]
    ways = [way for way in ways if way is not None] or ["FULL_SHARD"]
    reshard, *other = {RESHARDS.get(str(way).upper(), str(way).upper()) for way in ways}
    if other:
        raise InputError(f"fsdp is {' and '.join(map(str, ways))} at once: give one of them")
    way = ways[0]
    if not isinstance(reshard, bool) or _number(given, "version", 2) != 2:
        raise InputError(
            f"fsdp {way!r}, version {given.get('version', 2)}: translated are full_shard and "
            "shard_grad_op, version 2"
        )
    if given.get("reshard_after_forward") is not None:  # wins, as in the Trainer
        reshard = _true(given, "reshard_after_forward")
    policy = str(given.get("auto_wrap_policy", BY_CLASS)).upper()
    if policy not in (BY_CLASS, BY_SIZE, WHOLE):
        raise InputError(f"auto_wrap_policy {policy}: {BY_CLASS}, {BY_SIZE} or {WHOLE} would do")
    least = _number(given, "min_num_params", 0)
    if least and policy != BY_SIZE:
        raise InputError(f"min_num_params {least} counts with auto_wrap_policy {BY_SIZE} alone")
    classes = given.get("transformer_layer_cls_to_wrap")
    classes = classes.split(",") if isinstance(classes, str) else classes
    return FsdpOptions(
        [] if policy != BY_CLASS else [name.strip() for name in classes or []] or None,
        least if policy == BY_SIZE else None,
        reshard,
        "offload" in words or _true(given, "cpu_offload") or _true(given, "offload_params"),
        _true(given, "activation_checkpointing"),
    )


def _words(fsdp: Any) -> list[str]:
    """Those of an older Trainer's `fsdp`, in small letters."""
    words = re.split(r"[\s,]+", fsdp) if isinstance(fsdp, str) else fsdp or []
    if words is True:
        return []
    if not isinstance(words, list | tuple):
        raise InputError(f"fsdp must be true or words such as full_shard, got {fsdp!r}")
    words = [str(getattr(word, "value", word)).lower() for word in words]
    for word in words:
        expect_known("fsdp has no option", word, {*WAYS, "auto_wrap", "offload", "true", ""})
    return words


def _read(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping | None):
        how = "shared.ecosystem.fsdp_files.with_files reads a path"
        raise InputError(f"fsdp_config must be a dict, got {config!r}: {how}")
    given = {str(name).removeprefix("fsdp_"): value for name, value in (config or {}).items()}
    for name, value in given.items():
        expect_known("fsdp_config has no", name, KNOWN)
        if name in REFUSED and value:
            raise InputError(f"fsdp_config's {name} {value!r} is not translated: leave it out")
    return given


def _true(given: dict[str, Any], name: str) -> bool:
    return spelled(f"fsdp_config's {name}", given.get(name) or False, False)


def _number(given: dict[str, Any], name: str, like: int) -> int:
    return spelled(f"fsdp_config's {name}", given.get(name) or like, like)
