"""What rules a plan out: sizes that cannot be cut, a cluster that is too small."""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import InputError
from shared.planner.specs import ModelSpec, Plan


@dataclass(frozen=True)
class Misfit:
    """A limit that a plan hits: its name, and in words where and by how much."""

    limit: str
    words: str


def misfits(model: ModelSpec, plan: Plan) -> Iterator[Misfit]:
    """What of this model cannot be cut as the plan wants it, the first limit first."""
    if plan.cut is None and plan.num_stages > model.num_layers:
        over = plan.num_stages - model.num_layers
        words = f"{plan.num_stages} stages for {model.num_layers} layers are {over} too many"
        yield Misfit("layers", words)
    if plan.cut is not None and sum(plan.cut) != model.num_layers:
        words = f"the cut has {sum(plan.cut)} layers, the model {model.num_layers}"
        yield Misfit("layers", words)
    cuts = {
        "heads": (model.num_heads, "heads"),
        "kv heads": (model.kv_heads, "heads of keys and values"),
        "d_ff": (model.d_ff, "inner features (d_ff)"),
        "vocabulary": (model.vocab_size, "tokens of a vocabulary"),
    }
    for limit, (size, what) in cuts.items():
        if size % plan.tp:
            yield Misfit(limit, _uneven(size, what, plan.tp, "tp"))
    ranks = plan.cp * (plan.tp if plan.sequence_parallel else 1)
    if model.seq_len % ranks:
        yield Misfit("sequence", _uneven(model.seq_len, "positions", ranks, "cp x tp"))


def check_shape(model: ModelSpec, plan: Plan) -> None:
    """Raise InputError, naming the first limit and both numbers, where there is a misfit."""
    for misfit in misfits(model, plan):
        raise InputError(misfit.words)


def _uneven(size: int, what: str, ranks: int, axis: str) -> str:
    more = -size % ranks
    fits = [n for n in range(1, min(size, ranks) + 1) if size % n == 0]
    fewer = "1 rank" if fits[-1] == 1 else f"{fits[-1]} ranks"
    return (
        f"{size} {what} cannot be shared out evenly over {axis} = {ranks}: {more} more would do, "
        f"or {fewer}"
    )
