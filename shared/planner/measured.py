"""A run of one's own beside the planner, and what its tokens/s mean: days, GPU hours, a price."""

import math
import re
from dataclasses import replace

from shared.errors import InputError
from shared.planner.outcomes import Choice
from shared.planner.seconds import step_time
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.variants import cuts_sequence, shorter_ends

WORDS = re.compile(
    r"dp (?P<dp>\d+) x tp (?P<tp>\d+) x pp (?P<pp>\d+)(?:, (?P<chunks>\d+) chunks"
    r"(?P<cut> \(first and last stage a layer less\))?)?, "
    r"ZeRO-(?P<zero>\d), (?P<num_micro_batches>\d+) x (?P<micro_batch>\d+), "
    r"checkpoint (?P<checkpoint>\w+)(?:, LoRA (?P<lora>\d+))?(?:, not for DeepSpeed)?"
)


def pace_of(model: ModelSpec, plan: Plan, cluster: Cluster, speed: float) -> float:
    """By what all seconds are to be multiplied, if a run of `plan` reached `speed` tokens/s a GPU.

    Of the published runs (`families`) one of the same model, tp, pp, recomputation and fusing is
    then about half as far off on average; one that differs in any of these is 1.6 to 1.7 times as
    far off as before (`like_measured`). Raises InputError for a speed that is not above 0 or is
    infinite.
    """
    if not 0 < speed < math.inf:
        raise InputError(f"a run has a finite speed, more than 0 tokens/s a GPU, got {speed:g}")
    seconds = step_time(model, plan, replace(cluster, gpus=plan.num_gpus)).total
    return plan.batch * model.seq_len / plan.num_gpus / speed / seconds


def like_measured(plan: Plan, measured: Plan) -> bool:
    """Whether a run of `measured` says how fast `plan` is."""
    names = ("tp", "pp", "checkpoint", "fused")
    return all(getattr(plan, name) == getattr(measured, name) for name in names)


def read_plan(words: str, model: ModelSpec, like: Plan) -> Plan:
    """A plan in the words that the planner prints; what they do not say is as in `like`."""
    found = WORDS.fullmatch(words.strip())
    if found is None:
        raise InputError(
            "a plan in words is 'dp 8 x tp 1 x pp 1, ZeRO-3, 1 x 2, checkpoint full', "
            f"not {words!r}"
        )
    values = {name: value for name, value in found.groupdict().items() if value is not None}
    checkpoint, uneven = values.pop("checkpoint"), values.pop("cut", None)
    numbers = {name: int(value) for name, value in values.items()}
    plan = replace(like, **numbers, checkpoint=checkpoint)
    cut = shorter_ends(model.num_layers, plan.num_stages) if uneven else None
    if uneven and cut is None:
        raise InputError(
            f"{model.num_layers} layers over {plan.num_stages} stages are uneven even where the "
            "first and the last stage have a layer less"
        )
    return replace(plan, cut=cut, sequence_parallel=cuts_sequence(model, plan))


def tokens_per_second(model: ModelSpec, choice: Choice) -> float:
    """Tokens/s of a GPU."""
    plan = choice.plan
    return plan.batch * model.seq_len / choice.time.total / plan.num_gpus


def days_and_hours(tokens: float, gpus: int, speed: float) -> tuple[float, float]:
    """Days that so many tokens take at `speed` tokens/s a GPU, and the hours of all GPUs."""
    hours = tokens / speed / 3600
    return hours / 24 / gpus, hours
