"""Seconds of a step by kind: a roofline of compute, memory and links, with three fitted numbers.

Left out: how well a kernel suits its shapes (one share of the peak for all), kernel launches,
stragglers, data loading, the optimizer's update, messages that slow each other down, and the
overlap of tensor-parallel messages with compute.
"""

from dataclasses import replace

from shared.errors import InputError
from shared.planner.activations import layer_bytes, score_bytes, tokens
from shared.planner.limits import check_shape
from shared.planner.memory import unit_sizes
from shared.planner.outcomes import FITTED, Fitted, StepTime
from shared.planner.specs import STATE_BYTES, Cluster, ModelSpec, Plan


def step_time(model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted = FITTED) -> StepTime:
    """Return the seconds of a training step on the slowest pipeline rank, by kind.

    Compute, of all micro-batches: matrix products at a share of the peak, forward once and
    backward twice, and once more where backward computes again; and what a layer keeps for
    backward, through the GPU's memory. Tensor parallelism: 4 all-reduces of the stream's vectors a
    layer (6 where the layer is computed again), each 2 (t - 1) / t of their bytes; with `cp`, keys
    and values are gathered. Pipeline: vectors received forwards and gradients backwards, for each
    stage of the rank, each of tp ranks a part. These three, times (p - 1) / (v m), are the bubble.
    Data parallelism: see `gradient_seconds`.

    Raises InputError for a model that cannot be cut so, and for more GPUs than there are.
    Source: Narayanan et al. 2021 (arXiv 2104.04473), sections 2 and 3.
    """
    check_shape(model, plan)
    if plan.num_gpus > cluster.gpus:
        raise InputError(f"the plan needs {plan.num_gpus} GPUs, the cluster has {cluster.gpus}")
    batches = plan.num_micro_batches
    each = compute_seconds(model, plan, cluster, fitted)
    compute = batches * each
    tensor_parallel = batches * layer_message_seconds(model, plan, cluster, fitted)
    pipeline = batches * pipeline_seconds(model, plan, cluster, fitted)
    return StepTime(
        compute=compute,
        tensor_parallel=tensor_parallel,
        pipeline=pipeline,
        bubble=plan.bubble * (compute + tensor_parallel + pipeline),
        data_parallel=gradient_seconds(model, plan, cluster, fitted, each),
        model_flops=model.flops * model.seq_len * plan.batch / plan.num_gpus,
        peak_flops=cluster.peak_flops,
    )


def exposed_seconds(model: ModelSpec, plan: Plan, cluster: Cluster, time: StepTime) -> float:
    """Seconds of a step in which nothing hides behind compute, given `step_time` of the plan."""
    each = compute_seconds(model, plan, cluster, FITTED)
    bare = gradient_seconds(model, replace(plan, overlap=False), cluster, FITTED, each)
    return time.total - time.data_parallel + bare


def compute_seconds(model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted) -> float:
    """Forward and backward of one micro-batch on the pipeline rank with the most work."""
    n, moved = tokens(model, plan), layer_bytes(model, plan)
    flops, traffic = 3 * model.layer_flops, 2 * moved
    if plan.checkpoint == "full":
        flops, traffic = flops + model.layer_flops, traffic + moved
    elif plan.checkpoint == "selective" and not model.fused_attention:
        flops, traffic = flops + model.attention_flops, traffic + score_bytes(model, plan)
    rate = cluster.peak_flops * cluster.achievable * fitted.matmul * plan.tp
    layer = n * flops / rate + fitted.traffic * traffic / cluster.memory_bandwidth
    work = [sum(counts) * layer for counts in plan.layers(model)]
    work[-1] += n * 3 * model.head_flops / rate
    return max(work)


def layer_message_seconds(model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted) -> float:
    """Tensor- and context-parallel messages of one micro-batch, for the most layers of a rank."""
    size, t, passes = _size(plan), plan.tp, 6 if plan.checkpoint == "full" else 4
    vectors = tokens(model, plan) * model.d_model * size
    seconds = 0.0
    if t > 1:
        rate = cluster.link(t, 1) * fitted.link
        seconds += passes * (2 * (t - 1) / t * vectors / rate + cluster.latency)
    if plan.cp > 1:  # keys and values in forward and again in backward, their gradients back
        whole = 2 * plan.micro_batch * model.seq_len * model.kv_width * size // t
        rate = cluster.link(plan.cp, t) * fitted.link
        gathers = passes // 2 + 1
        seconds += gathers * ((plan.cp - 1) / plan.cp * whole / rate + cluster.latency)
    return max(map(sum, plan.layers(model))) * seconds


def pipeline_seconds(model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted) -> float:
    """Vectors and gradients that one micro-batch sends through the stages of a rank.

    Where a node holds several stages of one pipeline, a border between nodes is taken to have the
    cards of all of them, which is too fast: it has one.
    """
    if plan.pp == 1:
        return 0.0
    vectors = tokens(model, plan) * model.d_model * _size(plan) / plan.tp
    stride = plan.num_gpus // plan.pp  # stages are furthest apart
    rate = cluster.link(plan.pp, stride) * fitted.link
    return 2 * plan.chunks * (vectors / rate + cluster.latency)


def gradient_seconds(
    model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted, compute: float
) -> float:
    """Messages of gradients and parameters in a step, less what overlaps with compute.

    Of n ranks each sends (n - 1) / n of the bytes in a reduce-scatter or an all-gather. ZeRO-0
    reduces gradients (both) once a step, ZeRO-1 reduce-scatters them and gathers parameters,
    ZeRO-2 reduce-scatters after every micro-batch, ZeRO-3 gathers parameters in forward and in
    backward of every micro-batch as well. With `overlap` gradients travel behind one micro-batch's
    backward, 2/3 of its `compute`, ZeRO-3's messages behind all of it, the others behind nothing.
    """
    n = plan.dp * plan.cp
    if n == 1:
        return 0.0
    most = max(sum(unit_sizes(model, plan, rank)) for rank in range(plan.pp))
    byte = (n - 1) / n * most / (cluster.link(n, plan.tp) * fitted.link)  # seconds of 1 B a weight
    weight, gradient, _ = STATE_BYTES[plan.precision]
    backward = 2 / 3 * compute if plan.overlap else 0.0
    if plan.zero == 0:
        return max(0.0, 2 * gradient * byte - backward)
    if plan.zero == 3:
        hidden = compute if plan.overlap else 0.0
        each = (2 * weight + gradient) * byte - hidden
        return plan.num_micro_batches * max(0.0, each)
    times = plan.num_micro_batches if plan.zero == 2 else 1
    return times * max(0.0, gradient * byte - backward) + weight * byte


def _size(plan: Plan) -> int:
    """Bytes of a number that travels between layers."""
    return 2 if plan.precision == "mixed" else 4
