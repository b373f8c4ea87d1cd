"""What backward needs: bytes that a micro-batch leaves behind, and how many are in flight.

16 bits: Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5. float32: exactly what the
engines of this course keep of a `LanguageModel` with fused attention and norms, on a CPU.
"""

from functools import cache

from shared.planner.simulation import order_of
from shared.planner.specs import ModelSpec, Plan


def tokens(model: ModelSpec, plan: Plan) -> int:
    """Tokens of a micro-batch on one rank, which without `cp` are those of whole sequences."""
    return plan.micro_batch * model.seq_len // plan.cp


def is_ours(model: ModelSpec, plan: Plan) -> bool:
    """Whether this is a model of the course in float32, whose bytes are known exactly."""
    same = not model.gated and model.bias and model.norm == "layer" and model.fused_attention
    same = same and model.kv_width == model.d_model and model.num_experts == 1
    return plan.precision == "float32" and same and not model.qk_norm


def spread(model: ModelSpec, plan: Plan, whole: int) -> int:
    """Bytes of a micro-batch with `whole` bytes a token that only sequence parallelism cuts."""
    return tokens(model, plan) * whole // (plan.tp if plan.sequence_parallel else 1)


def layer_bytes(model: ModelSpec, plan: Plan) -> int:
    """Bytes that one layer keeps of a micro-batch where nothing is computed again.

    Of the residual stream's width are the inputs of the norms and of the two blocks behind them,
    and dropout's masks; cut by heads or inner features are queries, keys, values, the attention's
    result, what is between the matrices of the feed-forward, and the scores.
    """
    d, f = model.d_model, model.d_ff
    if is_ours(model, plan):  # norms keep two numbers a token; masks of dropout are float32
        whole = 4 * (4 * d + 4 + 2 * d * model.dropout)
        cut = 4 * (4 * d + model.num_heads + f)  # ReLU keeps its result alone
        return spread(model, plan, whole) + tokens(model, plan) * cut // plan.tp
    size = 2 if plan.precision == "mixed" else 4
    whole = size * 4 * d + 2 * d * model.dropout
    inner = (3 if model.gated else 2) * f * model.top_k
    cut = size * (2 * model.width + 2 * model.kv_width + inner)
    cut += 4 * model.num_heads if model.fused_attention else 0
    return (
        spread(model, plan, whole) + tokens(model, plan) * cut // plan.tp + score_bytes(model, plan)
    )


def score_bytes(model: ModelSpec, plan: Plan) -> int:
    """The part of `layer_bytes` that is the softmax, its dropout mask and result; 0 where fused."""
    if model.fused_attention:
        return 0
    size = 2 if plan.precision == "mixed" else 4
    per_score = 2 * size + 1 if model.dropout else size
    return tokens(model, plan) * per_score * model.num_heads * model.seq_len // plan.tp


def input_bytes(model: ModelSpec, plan: Plan) -> int:
    """Bytes of the vectors of a micro-batch that enter a layer on one rank."""
    return spread(model, plan, (2 if plan.precision == "mixed" else 4) * model.d_model)


def kept_and_again(model: ModelSpec, plan: Plan) -> tuple[int, int]:
    """Bytes that a layer keeps of a micro-batch, and those made again when backward comes to it."""
    everything = layer_bytes(model, plan)
    if plan.checkpoint == "full":
        return input_bytes(model, plan), everything - input_bytes(model, plan)
    if plan.checkpoint == "selective":
        return everything - score_bytes(model, plan), score_bytes(model, plan)
    return everything, 0


def embedding_bytes(model: ModelSpec, plan: Plan) -> int:
    """Bytes that the embeddings keep of a micro-batch: dropout's mask.

    Ours keep also which row of its part of the vocabulary a token is, and whether it is there.
    """
    mask = model.dropout * model.d_model
    if not is_ours(model, plan):
        return spread(model, plan, mask)
    return spread(model, plan, 4 * mask) + 9 * tokens(model, plan)


def head_bytes(model: ModelSpec, plan: Plan) -> int:
    """Bytes that last norm, output matrix and loss keep of a micro-batch; logits in float32.

    The loss of ours also keeps each target's place, whether it is there, and which do not count.
    """
    n, d = tokens(model, plan), model.d_model
    logits = n * 4 * model.vocab_size // plan.tp
    if not is_ours(model, plan):
        return spread(model, plan, (4 if plan.precision == "mixed" else 8) * d) + logits
    return spread(model, plan, 8 * d + 8) + logits + 10 * n


def in_flight(plan: Plan, rank: int) -> frozenset[tuple[int, ...]]:
    """When a backward begins: of each of a rank's stages, how many micro-batches wait for theirs.

    The last number of each tuple is the stage (0 to chunks - 1) whose backward begins. For 1F1B
    this is min(p - rank, m) at the most, for interleaving (v - 1) p + 2 (p - 1 - rank) + 1.
    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
    """
    if plan.chunks == 1:
        return frozenset([(min(plan.pp - rank, plan.num_micro_batches), 0)])
    few = min(plan.num_micro_batches, 4 * plan.pp)  # from there on it repeats itself
    return _interleaved(plan.pp, few, plan.chunks, rank)


@cache
def _interleaved(pp: int, batches: int, chunks: int, rank: int) -> frozenset[tuple[int, ...]]:
    alive, seen = [0] * chunks, set[tuple[int, ...]]()
    for kind, _, stage in order_of(pp, batches, chunks, rank):
        if kind == "B":
            seen.add((*alive, stage // pp))
        alive[stage // pp] += 1 if kind == "F" else -1
    return frozenset(seen)
