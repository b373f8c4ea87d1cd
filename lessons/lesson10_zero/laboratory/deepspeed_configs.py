"""What a DeepSpeed configuration is observed in: a small model on four ranks, its bytes counted."""

import json
from dataclasses import dataclass
from typing import Any

from lessons.lesson10_zero.experiments.asking_deepspeed import (
    BATCH_KEYS,
    HOST,
    STACK,
    STACK_SIZE,
    ask_deepspeed,
)


@dataclass(frozen=True)
class Order:
    """What is asked of a configuration: its function's arguments, and the stage that is right."""

    num_ranks: int
    per_parameter: float  # bytes: the budget
    stage: int | None  # None: nothing fits
    batch_size: int = 16
    micro_batch: int = 2
    num_params: int = STACK_SIZE

    @property
    def budget(self) -> int:
        """Bytes a rank."""
        return round(self.num_params * self.per_parameter)

    @property
    def arguments(self) -> tuple[int, int, int, int, int]:
        """What zero_config is called with."""
        sizes = self.num_params, self.num_ranks, self.budget
        return (*sizes, self.batch_size, self.micro_batch)

    def __str__(self) -> str:
        return f"{self.per_parameter:g} bytes a parameter on {self.num_ranks} ranks"


def worst(stage: int, num_ranks: int) -> float:
    """Bytes a parameter of DeepSpeed's states at a step's worst moment, bf16, without buckets.

    In torch's AdamW, tensor by tensor as on a CPU: beside masters, moments and float32 gradients it
    makes two tensors of their length. In stage 1 on more than five ranks, in backward, where the
    own part of the averaged gradients stands beside all of them. Counted in the lesson.
    """
    D = num_ranks
    return {0: 20.0, 1: max(4 + 14 / D, 2 + 24 / D), 2: 2 + 24 / D, 3: 28 / D}[stage]


def zero_of(config: Any) -> dict[str, Any]:
    """The zero_optimization section; empty where there is none."""
    section = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
    return section if isinstance(section, dict) else {}


def batch_product(config: dict[str, Any], num_ranks: int) -> tuple[Any, Any]:
    """The rows of a step as the configuration says, and as DeepSpeed multiplies them."""
    whole, micro, times = (config.get(key) for key in BATCH_KEYS)
    if not isinstance(micro, int):
        micro = None
    if whole is None and micro is not None:
        whole = micro * (times or 1) * num_ranks
    if times is None and micro:
        times = (whole or 0) // (micro * num_ranks)
    return whole, None if micro is None else micro * (times or 0) * num_ranks


def is_json(config: Any) -> bool:
    """Whether the configuration could stand in a file as it is."""
    try:
        return json.loads(json.dumps(config)) == config
    except (TypeError, ValueError):
        return False


def count_bytes(configs: list[dict[str, Any]], num_ranks: int) -> list[dict[str, Any]]:
    """DeepSpeed started with each configuration on `num_ranks` ranks, its bytes counted on rank 0.

    Raises RuntimeError with DeepSpeed's error where it cannot be started.
    """
    with HOST.ended():
        return ask_deepspeed("count", num_ranks, configs=configs, **STACK)[0]
