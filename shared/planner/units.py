"""Quantities with their units, and models and clusters described by JSON files."""

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import InputError
from shared.planner.hugging_face import from_config
from shared.planner.specs import Cluster, ModelSpec

BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
BITS = {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8}
UNITS = {
    "bytes": BYTES,
    "bytes/s": {f"{unit}/s": size for unit, size in (BYTES | BITS).items()},
    "FLOP/s": {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}
# What the fields of a cluster are measured in; the others are plain numbers.
MEASURED = {
    "memory": "bytes",
    "peak_flops": "FLOP/s",
    "inner": "bytes/s",
    "outer": "bytes/s",
    "memory_bandwidth": "bytes/s",
    "latency": "seconds",
}
Spec = TypeVar("Spec", ModelSpec, Cluster)


def quantity(given: object, kind: str, name: str) -> float:
    """Read "80 GB" or "400 Gbit/s" as bytes, bytes/s, FLOP/s or seconds.

    Raises InputError, with what was given and the units that are known, for a missing or an
    unknown unit, and for no number.
    """
    known = ", ".join(UNITS[kind])
    found = re.fullmatch(r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(\S*)\s*", str(given))
    try:
        number = float(found[1]) if found else None
    except ValueError:
        number = None
    if found is None or number is None:
        raise InputError(f"{name} must be a number with a unit ({known}), got {given!r}")
    if found[2] not in UNITS[kind]:
        what = f"has no unit: {given!r}" if not found[2] else f"has an unknown unit: {given!r}"
        raise InputError(f"{name} {what}; known are {known}")
    if number < 0:
        raise InputError(f"{name} must not be negative, got {given!r}")
    return number * UNITS[kind][found[2]]


def read_model(path: Path, seq_len: int | None = None) -> ModelSpec:
    """A model from a JSON object with the fields of ModelSpec, or a Hugging Face config.json.

    With `seq_len` tokens a sequence, where given. Raises InputError for what is wrong.
    """
    values = _load(path)
    if "model_type" in values:
        return _named(path, partial(from_config, values, seq_len))
    return with_sequence(_build(ModelSpec, values, path), seq_len)


def with_sequence(model: ModelSpec, seq_len: int | None) -> ModelSpec:
    """The model with `seq_len` tokens a sequence, and positions for them; None: with its own."""
    if seq_len is None:
        return model
    positions = max(model.num_positions, seq_len) if model.num_positions else 0
    return replace(model, seq_len=seq_len, num_positions=positions)


def read_cluster(path: Path, gpus: int | None = None) -> Cluster:
    """A cluster from a JSON object with the fields of Cluster, quantities as "80 GB".

    `gpus`, where given, counts before the file's. Raises InputError for what is wrong.
    """
    values = _load(path)
    if gpus is not None:
        values["gpus"] = gpus
    for name, kind in MEASURED.items():
        if name in values:
            values[name] = quantity(values[name], kind, f"{path}: {name}")
    return _build(Cluster, values, path)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold one JSON object, not a {type(values).__name__}")
    return values


def _build(kind: type[Spec], values: dict[str, Any], path: Path) -> Spec:
    known = {field.name: field for field in fields(kind)}
    unknown = sorted({*values} - {*known})
    if unknown:
        raise InputError(f"{path}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [name for name, field in known.items() if _needed(field) and name not in values]
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} must be given")
    return _named(path, partial(kind, **values))


def _named(path: Path, make: Callable[[], Spec]) -> Spec:
    try:
        return make()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _needed(field: Field[Any]) -> bool:
    return field.default is MISSING
