"""DeepSpeed's JSON files as lesson 10's script reads them: checked before DeepSpeed sees them."""

import difflib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shared.errors import InputError
from shared.script import has_bf16
from shared.training.quiet_deepspeed import quiet_deepspeed

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# The sections and keys of DeepSpeed that a data-parallel run can use. DeepSpeed itself
# ignores a key that it does not know here, which turns a slip of the pen into another run.
USED = {
    *BATCH,
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "optimizer", "scheduler"),
    *("gradient_clipping", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("data_types", "communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "checkpoint", "aio", "comms_logger"),
    *("activation_checkpointing", "flops_profiler", "tensorboard", "csv_monitor", "seed"),
    *("memory_breakdown", "dataloader_drop_last", "disable_allgather", "sparse_gradients"),
    *("log_level", "timers", "disable_python_gc", "vocabulary_size", "wandb", "comet"),
}

# Where a text is never meant: the names of a run's monitors may be numbers.
NUMBERS = {"optimizer", "scheduler", "zero_optimization", "gradient_clipping", "bf16", "fp16"}


def read_config(
    path: Path,
    device: torch.device,
    world_size: int,
    micro_batch: int,
    rate: float,
    hidden_size: int = 0,
) -> dict[str, Any]:
    """A configuration that this run can use: `auto` filled in, batch sizes agreed.

    `auto` becomes what the script would do by itself: `micro_batch` rows, `rate` as the learning
    rate, bf16 on a GPU, and buckets by the model's `hidden_size`, as the Trainer's; elsewhere the
    key is left out, which is DeepSpeed's default. (DeepSpeed knows no `auto`; with Hugging Face's
    Trainer it is the Trainer that fills it in.)

    Raises InputError for what DeepSpeed cannot read, a key given twice, unknown or of no use here,
    text for a number or a boolean, a stage that is none, batch sizes that contradict each other,
    fp16 or bf16 where the device has none, and NVMe without a folder.
    """
    config = _parsed(path)
    for key in config:
        if key not in USED and key in keys_of_deepspeed():
            raise InputError(f"{path}: this run makes no use of DeepSpeed's {key!r}: leave it out")
        if key not in USED:
            near = difflib.get_close_matches(key, USED, 1)
            advice = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{path}: DeepSpeed has no key {key!r} at the top level{advice}")
    stage = zero_section(config).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"{path}: zero_optimization.stage is {stage!r}; ZeRO has 0, 1, 2 and 3")
    own = {"train_micro_batch_size_per_gpu": micro_batch, "lr": rate}
    own |= _buckets(hidden_size, stage) | {"enabled": device.type == "cuda"}
    config = _filled(config, own)
    for name, value in _texts(config):
        if value.strip(" ,").lower() in ("true", "false"):  # an unquoted False is one, for hjson
            what = "true or false without quotes, in small letters"
        elif name.partition(".")[0] in NUMBERS and _is_number(value):
            what = "the number without quotes"
        else:
            continue
        raise InputError(f"{path}: {name} is the text {value!r}; write {what}")
    _check_batch(path, config, world_size, micro_batch)
    _check_precision(path, config, device)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero_section(config).get(key, 1) == 0:  # DeepSpeed takes it, and divides by it
            raise InputError(f"{path}: zero_optimization.{key} is 0; it must be 1 or more")
    for key in ("offload_optimizer", "offload_param"):
        section = zero_section(config).get(key) or {}
        if not isinstance(section, dict):
            raise InputError(f"{path}: {key} is {section!r}; it must be an object")
        if section.get("device") == "nvme":
            _check_nvme(path, key, section)
    return config


class _Asked(dict):
    """A configuration that notes which keys are asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: object, default: Any = None, /) -> Any:
        self.asked.add(str(key))
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def keys_of_deepspeed() -> set[str]:
    """The keys that the installed DeepSpeed looks up at the top level."""
    quiet_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    config = _Asked({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(config)
    return config.asked


def _buckets(hidden_size: int, stage: int) -> dict[str, int]:
    """What the Trainer puts in the place of `auto`."""
    if not hidden_size:
        return {}
    own = {"reduce_bucket_size": hidden_size**2}
    if stage == 3:
        own["stage3_prefetch_bucket_size"] = int(0.9 * hidden_size**2)
        own["stage3_param_persistence_threshold"] = 10 * hidden_size
    return own


def _texts(section: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(section, dict):
        for key, value in section.items():
            yield from _texts(value, f"{name}.{key}".lstrip("."))
    elif isinstance(section, list):
        for value in section:
            yield from _texts(value, name)
    elif isinstance(section, str):
        yield name, section


def _is_number(text: str) -> bool:
    """Whether DeepSpeed would compare it with numbers: "1e-3", as YAML's files have it."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def zero_section(config: dict[str, Any]) -> dict[str, Any]:
    """The zero_optimization section; empty where there is none."""
    return config.get("zero_optimization") or {}


def compiled_kernel(config: dict[str, Any]) -> str:
    """The kernel that DeepSpeed compiles for its own optimizer; "" where it takes torch's."""
    optimizer = config.get("optimizer") or {}
    kind = str(optimizer.get("type", "")).lower().replace("adamw", "adam")
    if kind not in ("adam", "adagrad", "lamb", "lion") or "torch_adam" in _switched_on(optimizer):
        return ""
    offload = zero_section(config).get("offload_optimizer") or {}
    if offload.get("device", "none") != "none" and kind != "lamb":
        return f"cpu_{kind}"
    return "" if kind == "adagrad" else f"fused_{kind}"


def _switched_on(optimizer: dict[str, Any]) -> set[str]:
    return {key for key, value in (optimizer.get("params") or {}).items() if value is True}


def compiling_words(config: dict[str, Any], file: Path) -> str:
    """What to say before DeepSpeed compiles in silence; "" where it compiles nothing."""
    from torch.utils.cpp_extension import get_default_build_root  # it looks for a GPU

    kernel = compiled_kernel(config)
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not kernel or any(root.rglob(f"{kernel}/{kernel}.so")):
        return ""
    words = f"DeepSpeed now compiles {kernel} for {file}, once: three to four minutes on two cores"
    words += ' without a word. "torch_adam": true in the optimizer\'s params compiles nothing.'
    for lock in root.rglob(f"{kernel}/lock"):
        words += f" {lock} is there: if no other start is compiling, one was stopped; remove it."
    return words


def notes_on(config: dict[str, Any], file: Path) -> list[str]:
    """What to say before DeepSpeed begins; takes out a scheduler, whose rates nobody would see."""
    rates = f"{file}'s scheduler is left out: the rates are the lesson's, up to the optimizer's lr"
    compiling = compiling_words(config, file)
    return [rates] * (config.pop("scheduler", None) is not None) + [compiling] * bool(compiling)


def accumulation(config: dict[str, Any], world_size: int) -> tuple[int, int]:
    """Rows of a micro-batch, and micro-batches of a step on each rank."""
    whole, micro, times = (config.get(key) for key in BATCH)
    micro = micro or (whole or 0) // ((times or 1) * world_size)
    return micro, times or (whole // (micro * world_size) if whole and micro else 1)


def _parsed(path: Path) -> dict[str, Any]:
    """The file as DeepSpeed reads it: by hjson, with comments and without commas, no key twice."""
    import hjson  # DeepSpeed needs it

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"--deepspeed {path} has {', '.join(map(repr, twice))} twice")
        return dict(pairs)

    try:
        config = hjson.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except OSError as error:
        raise InputError(f"--deepspeed {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"--deepspeed {path} is no text, and so no JSON") from None
    except hjson.HjsonDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"--deepspeed {path} is no JSON: {error.msg} in {where}") from None
    if not isinstance(config, dict):
        raise InputError(f"--deepspeed {path} holds no object {{...}}, but {config!r:.40}")
    if "bfloat16" in config:  # DeepSpeed takes both names
        if "bf16" in config:
            raise InputError(f"{path} has 'bf16' and 'bfloat16', which are one: give one of them")
        config["bf16"] = config.pop("bfloat16")
    for section in ("zero_optimization", "bf16", "fp16", "optimizer"):
        if not isinstance(config.get(section, {}), dict):
            raise InputError(f"{path}: {section} is {config[section]!r}; it must be an object")
    return config


def _filled(section: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    filled = {}
    for key, value in section.items():
        if isinstance(value, dict):
            filled[key] = _filled(value, own)
        elif value != "auto":
            filled[key] = value
        elif key in own:
            filled[key] = own[key]
    return filled


def _check_batch(path: Path, config: dict[str, Any], world_size: int, micro_batch: int) -> None:
    for key in BATCH:
        value = config.get(key, 1)
        if type(value) is not int or value < 1:
            raise InputError(f"{path}: {key} is {value!r}; it must be a whole number from 1 up")
    if config.get(BATCH[0]) is None and config.get(BATCH[1]) is None:
        config[BATCH[1]] = micro_batch
    micro, times = accumulation(config, world_size)
    whole = config.get(BATCH[0], micro * times * world_size)
    if not micro or whole != micro * times * world_size:
        raise InputError(
            f"{path}: train_batch_size {whole} is not micro-batch {micro} x accumulation {times} "
            f"x {world_size} ranks; leave one of the three out"
        )


def _check_precision(path: Path, config: dict[str, Any], device: torch.device) -> None:
    on = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
    if len(on) == 2:
        raise InputError(f"{path}: bf16 and fp16 are both enabled; choose one")
    if on == ["fp16"] and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise InputError(f"{path}: fp16 is enabled, and this CPU has none; use bf16 or float32")
    if on == ["bf16"] and device.type == "cuda" and not has_bf16(device):
        raise InputError(f"{path}: bf16 is enabled, and this GPU has none; use fp16")


def _check_nvme(path: Path, key: str, section: dict[str, Any]) -> None:
    folder = section.get("nvme_path")
    if not folder or not Path(folder).is_dir():
        raise InputError(
            f"{path}: {key} asks for NVMe, and nvme_path {folder!r} is no folder here; "
            'give one on an SSD, or "device": "cpu"'
        )
