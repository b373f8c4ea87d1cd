"""The file that describes a run: TOML, four tables, every key checked before anything starts."""

import dataclasses
import difflib
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from shared.errors import InputError

Kind = Literal["gpt", "modern", "translator"]
Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class ModelTable:
    """The model: `gpt` has GPT-2's shape, `modern` Llama's, `translator` is lesson 04's.

    `num_kv_heads` is of modern models, 0: as many as heads. `length` is in tokens, of a row.
    """

    kind: Kind = "gpt"
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 0
    d_ff: int = 512
    vocab_size: int = 2000
    length: int = 64
    fused: bool = True
    tied: bool = True


@dataclass(frozen=True)
class DataTable:
    """What is read: a text for language models, pairs for a translator; `size` bounds it.

    `size` counts characters of a text or pairs of a corpus, from the beginning.
    """

    dataset: str = "stdlib"
    size: int = 1_000_000


@dataclass(frozen=True)
class TrainingTable:
    """The run: `batch` rows a step on all ranks together; 0 for an interval is never."""

    batch: int = 16
    steps: int = 60
    warmup: int = 6
    peak: float = 1e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0
    log_every: int = 10
    evaluate_every: int = 0
    evaluate_batches: int = 2
    save_every: int = 0
    keep: int = 2


@dataclass(frozen=True)
class ParallelTable:
    """How the ranks share the work: `zero` is DeepSpeed's stage, or that of the 3d mesh.

    `tp`, `pp`, `micro_batches` and `schedule` are of mode 3d, whose copies are the ranks left.
    """

    zero: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    schedule: Schedule = "1f1b"


@dataclass(frozen=True)
class PlanTable:
    """A run that is planned and not made: the machines that the planner is to lay it over."""

    gpu: str = "h100"
    gpus: int = 64
    count: int = 3


@dataclass(frozen=True)
class Config:
    """All of a run's file. With `plan` the planner's answer is printed in place of a run."""

    model: ModelTable = field(default_factory=ModelTable)
    data: DataTable = field(default_factory=DataTable)
    training: TrainingTable = field(default_factory=TrainingTable)
    parallel: ParallelTable = field(default_factory=ParallelTable)
    plan: PlanTable | None = None


TABLES: dict[str, type[Any]] = {
    "model": ModelTable,
    "data": DataTable,
    "training": TrainingTable,
    "parallel": ParallelTable,
    "plan": PlanTable,
}


def read_config(path: Path) -> Config:
    """Read a run's file.

    Raises InputError, in one line, for a file that cannot be read, for a table or a key that is
    not known (the nearest known one is named), and for a value of another type or out of range.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"--config {path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} is no TOML: {error}") from None
    made = {}
    for name, values in content.items():
        if name not in TABLES:
            raise InputError(f"{path}: unknown table [{name}]{_nearest(name, TABLES)}")
        if not isinstance(values, dict):
            raise InputError(f"{path}: {name} must be a table: write [{name}] above its keys")
        made[name] = _make(TABLES[name], name, values, path)
    config = Config(**made)
    _check(config, path)
    return config


def _make(kind: type[Any], table: str, values: dict[str, Any], path: Path) -> Any:
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in known:
            raise InputError(f"{path}: unknown key {table}.{key}{_nearest(key, known, table)}")
        wanted = known[key].type
        if get_origin(wanted) is Literal:
            if value not in get_args(wanted):
                ones = ", ".join(get_args(wanted))
                raise InputError(f"{path}: {table}.{key} must be one of {ones}, not {value!r}")
        elif not _is(value, wanted):
            name = getattr(wanted, "__name__", wanted)
            raise InputError(f"{path}: {table}.{key} must be {name}, got {value!r}")
    return kind(**values)


def _is(value: object, wanted: Any) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is wanted


def _nearest(name: str, known: Any, table: str = "") -> str:
    """The known name that looks most like it, or all of them; keys of other tables as well."""
    if near := difflib.get_close_matches(name, list(known), n=1):
        return f": did you mean {table + '.' if table else ''}{near[0]}?"
    keys = {entry.name: other for other in TABLES for entry in dataclasses.fields(TABLES[other])}
    near = difflib.get_close_matches(name, list(keys), n=1) if table else []
    return f": did you mean {keys[near[0]]}.{near[0]}?" if near else f": known: {', '.join(known)}"


MAY_BE_ZERO = {"num_kv_heads", "zero", "warmup", "evaluate_every", "save_every"}  # and floats


def _check(config: Config, path: Path) -> None:
    """Raise InputError for numbers that no run could have."""
    for name, table in TABLES.items():
        for entry in dataclasses.fields(table):
            key, value = entry.name, getattr(getattr(config, name) or PlanTable(), entry.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            least = 0 if entry.type is float or key in MAY_BE_ZERO else 1
            if number and not value >= least:
                raise InputError(f"{path}: {name}.{key} must be {least} or more, got {value}")
            if value == math.inf and key != "max_norm":
                raise InputError(f"{path}: {name}.{key} must be finite, got inf")
    if config.parallel.zero > 3:
        raise InputError(f"{path}: parallel.zero must be 0 to 3, got {config.parallel.zero}")
    if not config.training.max_norm > 0:
        raise InputError(f"{path}: training.max_norm must be above 0, got 0: take inf for never")
    if config.training.warmup >= config.training.steps:
        given = config.training
        raise InputError(f"{path}: training.warmup {given.warmup} of {given.steps} steps is all")
