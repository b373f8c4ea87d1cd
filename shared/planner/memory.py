"""Bytes on a rank by kind, before anything is run."""

from dataclasses import replace
from functools import lru_cache

from shared.planner.activations import (
    embedding_bytes,
    head_bytes,
    in_flight,
    kept_and_again,
)
from shared.planner.limits import check_shape
from shared.planner.outcomes import Memory
from shared.planner.specs import STATE_BYTES, ModelSpec, Plan


def memory_per_rank(model: ModelSpec, plan: Plan) -> Memory:
    """Return the bytes of the fullest rank, by kind, with those of every pipeline rank in `stages`.

    Parameters, gradients and optimizer are 2, 2 and 12 bytes a parameter in mixed precision and 4,
    4 and 8 in float32 (`STATE_BYTES`). A rank has those of its own layers (`plan.layers`), the
    first the embeddings and the last the head as well; a tied matrix is on both, and once where
    they are one rank. Of what tensor parallelism cuts it has a part, `Parameters.on(tp)`. Over the
    dp x cp data-parallel ranks ZeRO cuts the optimizer (stage 1), gradients (2), parameters (3), in
    equal parts, the last one padded.

    Activations: each layer, embedding and head keep bytes of each micro-batch in flight
    (`in_flight`). Where backward computes again, the bytes of one layer come on top, when those of
    the head, on the last stage, have just been freed.

    With `plan.lora` gradients and optimizer are those of the adapters alone; frozen weights have 2
    bytes (4 in float32). In float32, for a model of the course that is trained whole, this is what
    its engines keep, to the byte.
    Raises InputError for a model that cannot be cut so (`check_shape`).
    """
    check_shape(model, plan)
    kept = _activations(model, replace(plan, dp=1, zero=0))
    ranks = [_of_rank(model, plan, rank, kept[rank]) for rank in range(plan.pp)]
    return replace(max(ranks, key=lambda memory: memory.total), stages=tuple(ranks))


@lru_cache(maxsize=64)  # the search asks for each stage of ZeRO in turn
def _activations(model: ModelSpec, plan: Plan) -> list[int]:
    return [activation_bytes(model, plan, rank) for rank in range(plan.pp)]


def adapter_parameters(model: ModelSpec, plan: Plan, rank: int) -> int:
    """Parameters of LoRA's adapters on a rank of the pipeline."""
    return sum(plan.layers(model)[rank]) * model.adapters(plan.lora) // plan.tp


def _of_rank(model: ModelSpec, plan: Plan, rank: int, activations: int) -> Memory:
    whole, flat, part = _numbers(model, plan, rank)
    # Parameters are cut from stage 3 on, gradients from 2, the optimizer from 1. Stages 1 and 2
    # have parameters in what is cut, a flat tensor with its padding.
    parameters = part if plan.zero == 3 else flat if plan.zero and not plan.lora else whole
    trained, own = whole, part
    if plan.lora:
        trained = adapter_parameters(model, plan, rank)
        own = -(-trained // (plan.dp * plan.cp))
        parameters += own if plan.zero == 3 else trained
    numbers = parameters, own if plan.zero >= 2 else trained, own if plan.zero else trained
    sizes = STATE_BYTES[plan.precision]
    states = [size * number for size, number in zip(sizes, numbers, strict=True)]
    return Memory(*states, activations=activations, rank=rank)


def _numbers(model: ModelSpec, plan: Plan, rank: int) -> tuple[int, int, int]:
    """Parameters of a pipeline rank: whole, padded to be cut, and one part of them.

    ZeRO-3 pads and cuts each unit. The other stages do it with one flat tensor, or with two where
    a matrix is tied to another stage's.
    """
    units, shards = unit_sizes(model, plan, rank), plan.dp * plan.cp
    flats, total = units, sum(units)
    if plan.zero < 3:
        apart = model.tied and plan.pp > 1 and rank in (0, plan.pp - 1)
        alone = _matrix(model, plan) if apart else 0
        flats = [total - alone, alone]
    part = sum(-(-size // shards) for size in flats)
    return total, shards * part, part


def unit_sizes(model: ModelSpec, plan: Plan, rank: int) -> list[int]:
    """Parameters on a pipeline rank: embedding, positions, each layer, last norm, output matrix."""
    units = [model.layer.on(plan.tp)] * sum(plan.layers(model)[rank])
    if rank == 0:
        units += [_matrix(model, plan), model.embeddings.whole]
    if rank == plan.pp - 1:
        shared = model.tied and plan.pp == 1  # the embedding has the matrix
        units += [model.head.whole, *([] if shared else [_matrix(model, plan)])]
    return units


def _matrix(model: ModelSpec, plan: Plan) -> int:
    return model.head.cut // plan.tp


def activation_bytes(model: ModelSpec, plan: Plan, rank: int) -> int:
    """The most bytes that a pipeline rank keeps for backward at one moment of a step."""
    kept, again = kept_and_again(model, plan)
    layers = plan.layers(model)[rank]
    held = [count * kept for count in layers]
    held[0] += embedding_bytes(model, plan) if rank == 0 else 0
    head = head_bytes(model, plan) if rank == plan.pp - 1 else 0
    held[-1] += head
    most = 0
    for *alive, chunk in in_flight(plan, rank):
        now = sum(count * size for count, size in zip(alive, held, strict=True))
        freed = head if chunk == plan.chunks - 1 else 0
        most = max(most, now, now - freed + again * (layers[chunk] > 0))
    return most


def gathered_bytes(model: ModelSpec, plan: Plan) -> int:
    """Bytes that ZeRO-3 needs beside `memory_per_rank`, for a moment: what it gathers.

    Parameters of the largest unit, and its gradients where it is trained. Source: lesson 13.
    """
    if plan.zero < 3 or plan.dp * plan.cp == 1:
        return 0
    largest = max(max(unit_sizes(model, plan, rank)) for rank in range(plan.pp))
    return largest * sum(STATE_BYTES[plan.precision][: 1 if plan.lora else 2])
