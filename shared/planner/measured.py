"""A run of one's own beside the planner, and what its tokens/s mean: days, GPU hours, a price."""

import re
from dataclasses import replace

from shared.errors import InputError
from shared.planner.outcomes import Choice
from shared.planner.seconds import step_time
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.variants import shorter_ends

WORDS = re.compile(
    r"dp (?P<dp>\d+) x tp (?P<tp>\d+) x pp (?P<pp>\d+)(?:, (?P<chunks>\d+) chunks)?, "
    r"ZeRO-(?P<zero>\d), (?P<num_micro_batches>\d+) x (?P<micro_batch>\d+), "
    r"checkpoint (?P<checkpoint>\w+)"
)


def pace_of(model: ModelSpec, plan: Plan, cluster: Cluster, speed: float) -> float:
    """By what all seconds are to be multiplied, if a run of `plan` reached `speed` tokens/s a GPU.

    Of the published runs (`families`), by numbers that are fitted to other families, one of the
    same model, tp, pp and recomputation is then 2 % off on average in place of 5; of other layouts
    they are no nearer than before. Raises InputError for a speed that is not above 0.
    """
    if not speed > 0:
        raise InputError(f"a run has more than 0 tokens/s a GPU, got {speed:g}")
    seconds = step_time(model, plan, replace(cluster, gpus=plan.num_gpus)).total
    return plan.batch * model.seq_len / plan.num_gpus / speed / seconds


def read_plan(words: str, model: ModelSpec, like: Plan) -> Plan:
    """A plan in the words that the planner prints; what they do not say is as in `like`."""
    found = WORDS.match(re.sub(r" \(.*?\)", "", words).strip())
    if found is None:
        raise InputError(
            "a plan in words is 'dp 8 x tp 1 x pp 1, ZeRO-3, 1 x 2, checkpoint full', "
            f"not {words!r}"
        )
    values = {name: value for name, value in found.groupdict().items() if value is not None}
    checkpoint = values.pop("checkpoint")
    numbers = {name: int(value) for name, value in values.items()}
    plan = replace(like, **numbers, checkpoint=checkpoint, sequence_parallel=numbers["tp"] > 1)
    uneven = "a layer less" in words
    return replace(plan, cut=shorter_ends(model.num_layers, plan.num_stages) if uneven else None)


def tokens_per_second(model: ModelSpec, choice: Choice) -> float:
    """Tokens/s of a GPU."""
    plan = choice.plan
    return plan.batch * model.seq_len / choice.time.total / plan.num_gpus


def days_and_hours(tokens: float, gpus: int, speed: float) -> tuple[float, float]:
    """Days that so many tokens take at `speed` tokens/s a GPU, and the hours of all GPUs."""
    hours = tokens / speed / 3600
    return hours / 24 / gpus, hours
