"""The most bytes that a rank of the course's own engines has in a step: does a preset fit a GPU?

`memory_per_rank` counts what is kept, in two precisions. Here the moment counts as well, and what
autocast casts. tests/training/test_room.py counts steps of the course's models beside it.
"""

from dataclasses import replace
from typing import Literal

from shared.planner.activations import embedding_bytes, in_flight, layer_bytes, spread, tokens
from shared.planner.memory import memory_per_rank
from shared.planner.specs import ModelSpec, Plan

# Of the numbers that compute: float32; bf16 by autocast, of float32 weights; bf16 weights, whose
# float32 masters the optimizer has.
Held = Literal["float32", "autocast", "bf16"]
LOGITS = 12  # bytes a logit: the softmax, its gradient, and that of the loss, in float32
CUT_LOGITS = {False: 8, True: 10}  # of `vocab_parallel_cross_entropy`: float32, and by autocast
DDP = 1  # numbers a parameter in its buckets
STEP = 4  # bytes a parameter that AdamW's step needs for a moment: the roots of the squares


def peak_bytes(
    model: ModelSpec,
    plan: Plan,
    held: Held = "float32",
    logits: int = LOGITS,
    beside: int = 0,
) -> int:
    """The most bytes on the fullest rank of a plan, whose own `precision` is not looked at.

    A backward's begin, when all activations are there and the loss's gradient, or AdamW's step.
    `beside`: numbers a parameter that are kept besides, all the time, as DDP's buckets are.
    """
    plan = replace(plan, precision="mixed" if held == "bf16" else "float32")
    most = 0
    for rank, kept in enumerate(memory_per_rank(model, plan).stages):
        states = kept.parameters + kept.optimizer + kept.gradients * beside
        casts = kept.parameters // 2 if held == "autocast" else 0  # as long as the graph lives
        begin = states + casts + activations(model, plan, held, logits, rank)
        if plan.num_micro_batches > plan.pp - rank:  # as many in flight once more, after a backward
            begin += kept.gradients
        most = max(most, begin, states + kept.gradients + kept.optimizer * STEP // 8)
    return most


def loss_bytes(model: ModelSpec, plan: Plan) -> int:
    """Bytes that the last stage needs beside `memory_per_rank`, for a moment: the loss's backward.

    Kept is the softmax alone, 4 bytes a logit. With cross entropy as torch computes it in float32
    two gradients of its size join it; one in 16 bits, or in parts, needs less.
    """
    return tokens(model, plan) * (LOGITS - 4) * model.vocab_size // plan.tp


def activations(model: ModelSpec, plan: Plan, held: Held, logits: int, rank: int) -> int:
    """The most bytes that a pipeline rank has for backward, gradients of logits included."""
    entering, kept = layer_kept(model, plan, held)
    again = 0
    if plan.checkpoint != "none":
        kept, again = entering, kept - entering
    layers = plan.layers(model)[rank]
    sizes = [count * kept for count in layers]
    sizes[0] += embedding_bytes(replace(model, dropout=False), plan) if rank == 0 else 0
    head = 0
    if rank == plan.pp - 1:
        head = tokens(model, plan) * logits * model.vocab_size // plan.tp
        head += spread(model, plan, (6 if held == "autocast" else 8) * model.d_model)
        head += norm_bytes(model, plan)
    most = 0
    for *alive, chunk in in_flight(plan, rank):
        now = sum(count * size for count, size in zip(alive, sizes, strict=True))
        most = max(most, now + head * (chunk == plan.chunks - 1), now + again)
    return most


def layer_kept(model: ModelSpec, plan: Plan, held: Held) -> tuple[int, int]:
    """Bytes that enter a layer of a micro-batch, and all that it keeps where none is made again.

    Autocast: the residual stream is float32; the norms' results are cast once for each of the four
    matrices that read them (only casts of weights are kept for the next reader).
    """
    d, f = model.d_model, model.d_ff
    masks = spread(model, plan, 2 * d * model.dropout)  # a byte each, on a GPU
    if held != "autocast":
        half = 2 if held == "bf16" else 1
        whole = layer_bytes(replace(model, dropout=False), replace(plan, precision="float32"))
        # `layer_bytes` has three between SwiGLU's matrices, as where a kernel makes SiLU again.
        whole += tokens(model, plan) * 4 * f * model.top_k * model.gated // plan.tp
        if held == "float32":
            whole += grouped_bytes(model, plan)
        whole += 2 * norm_bytes(model, plan)
        return spread(model, plan, 4 * d) // half, whole // half + masks
    matrices = 5 if model.gated else 4
    whole = 2 * 4 * d + 16 + 2 * matrices * d
    cut = 2 * (2 * model.width + 2 * model.kv_width) + 4 * model.num_heads
    cut += (
        2 * (4 if model.gated else 1) * f * model.top_k
    )  # of SwiGLU: both inputs, the SiLU and the product
    kept = spread(model, plan, whole) + tokens(model, plan) * cut // plan.tp
    return spread(model, plan, 4 * d), kept + 2 * norm_bytes(model, plan) + masks


def norm_bytes(model: ModelSpec, plan: Plan) -> int:
    """What RMSNorm in plain operators keeps beside its input and result: what its gain scales."""
    return spread(model, plan, 4 * model.d_model) if model.norm == "rms" else 0


def grouped_bytes(model: ModelSpec, plan: Plan) -> int:
    """What attention keeps more where heads share keys in float32: a GPU has no kernel for that.

    Flash attention wants 16 bits, the memory-efficient kernel as many heads of keys as of queries
    (docs.pytorch.org, scaled_dot_product_attention). What is left copies keys and values for each
    head, and keeps the scores.
    """
    if not model.fused_attention or model.kv_width == model.width:
        return 0
    copies = 2 * (model.width - model.kv_width) - model.num_heads
    scores = model.num_heads * model.seq_len
    return tokens(model, plan) * 4 * (copies + scores) // plan.tp
