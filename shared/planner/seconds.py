"""Seconds of a step by kind: a roofline of compute, memory and links, with eight fitted numbers.

Left out: how well a kernel suits its shapes (one share of the peak for all products), kernel
launches, stragglers, data loading, the optimizer's update, messages that slow each other down.
"""

from dataclasses import replace

from shared.errors import InputError
from shared.planner.activations import layer_bytes, score_bytes, tokens
from shared.planner.limits import check_shape
from shared.planner.memory import adapter_parameters, unit_sizes
from shared.planner.outcomes import FITTED, Fitted, StepTime
from shared.planner.simulation import schedule_time
from shared.planner.specs import STATE_BYTES, Cluster, ModelSpec, Plan


def step_time(model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted = FITTED) -> StepTime:
    """Return the seconds of a training step on the slowest pipeline rank, by kind.

    Compute, of all micro-batches: matrix products at a share of the peak, forward once and
    backward twice, and once more where backward computes again; and what a layer keeps for
    backward, through the GPU's memory. Tensor parallelism: 4 all-reduces of the stream's vectors a
    layer (6 where the layer is computed again), each 2 (t - 1) / t of their bytes; with `cp`, keys
    and values are gathered. These, times (p - 1) / (v m), are the bubble. Pipeline: what the
    messages between stages, forwards and backwards, make the schedule longer (`schedule_time`).
    Data parallelism: see `gradient_seconds`.

    Raises InputError for a model that cannot be cut so, and for more GPUs than there are.
    Source: Narayanan et al. 2021 (arXiv 2104.04473), sections 2 and 3.
    """
    check_shape(model, plan)
    if plan.num_gpus > cluster.gpus:
        raise InputError(f"the plan needs {plan.num_gpus} GPUs, the cluster has {cluster.gpus}")
    batches = plan.num_micro_batches
    computing = compute_seconds(model, plan, cluster, fitted)
    messages = layer_message_seconds(model, plan, cluster, fitted)
    return StepTime(
        compute=batches * computing,
        tensor_parallel=batches * messages,
        pipeline=pipeline_seconds(model, plan, cluster, fitted, (computing, messages)),
        bubble=plan.bubble * batches * (computing + messages),
        data_parallel=gradient_seconds(model, plan, cluster, fitted, computing),
        model_flops=trained_flops(model, plan) * model.seq_len * plan.batch / plan.num_gpus,
        peak_flops=cluster.peak_flops,
    )


def trained_flops(model: ModelSpec, plan: Plan) -> int:
    """FLOPs of a token in a step without recomputation; frozen weights need no gradients."""
    products = model.num_layers * (model.layer_flops - model.attention_flops) + model.head_flops
    return model.flops - (products if plan.lora else 0)


def exposed_seconds(
    model: ModelSpec, plan: Plan, cluster: Cluster, time: StepTime, fitted: Fitted = FITTED
) -> float:
    """Seconds of a step in which nothing hides behind compute, given `step_time` of the plan."""
    computing = compute_seconds(model, plan, cluster, fitted)
    bare = gradient_seconds(model, replace(plan, overlap=False), cluster, fitted, computing)
    return time.total - time.data_parallel + bare


def compute_seconds(model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted) -> float:
    """Forward and backward of one micro-batch on the pipeline rank with the most work."""
    n, moved = tokens(model, plan), layer_bytes(model, plan)
    trained = 2 if plan.lora else 3  # frozen weights need no gradients of their own
    passes, scores, traffic = trained, 3, 2 * moved
    if plan.checkpoint == "full":
        passes, scores, traffic = trained + 1, 4, traffic + moved
    elif plan.checkpoint == "selective" and not model.fused_attention:
        scores, traffic = 4, traffic + score_bytes(model, plan)
    products = passes * (model.layer_flops - model.attention_flops)
    reached = fitted.attention if model.fused_attention else 1.0
    attention = scores * model.attention_flops / reached
    rate = cluster.peak_flops * cluster.achievable * fitted.matmul * plan.tp
    rate *= fitted.throttled if cluster.throttled else 1.0
    often = fitted.traffic + (0.0 if plan.fused else fitted.eager)
    layer = n * (products + attention) / rate + often * traffic / cluster.memory_bandwidth
    work = [sum(counts) * layer for counts in plan.layers(model)]
    work[-1] += n * trained * model.head_flops / rate
    return max(work)


def layer_message_seconds(model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted) -> float:
    """Tensor- and context-parallel messages of one micro-batch, for the most layers of a rank."""
    size, t, passes = _size(plan), plan.tp, 6 if plan.checkpoint == "full" else 4
    vectors = tokens(model, plan) * model.d_model * size
    seconds = 0.0
    if t > 1:
        rate = cluster.link(t, 1) * fitted.link
        seconds += passes * (2 * (t - 1) / t * vectors / rate + cluster.latency)
        seconds *= 1 - (fitted.tp_hidden if plan.tp_overlap else 0.0)
    if plan.cp > 1:  # keys and values in forward and again in backward, their gradients back
        whole = 2 * plan.micro_batch * model.seq_len * model.kv_width * size // t
        rate = cluster.link(plan.cp, t) * fitted.link
        gathers = passes // 2 + 1
        seconds += gathers * ((plan.cp - 1) / plan.cp * whole / rate + cluster.latency)
    return max(map(sum, plan.layers(model))) * seconds


def pipeline_seconds(
    model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted, work: tuple[float, float]
) -> float:
    """By how much messages between stages make a step longer.

    `work`: seconds of a micro-batch's compute and messages within layers, on the slowest rank, for
    all ranks. A step takes at least as long as a rank's messages one after the other. Where a node
    holds several stages of one pipeline, a border between nodes is taken to have the cards of all
    of them, which is too fast: it has one.
    """
    if plan.pp == 1:
        return 0.0
    vectors = tokens(model, plan) * model.d_model * _size(plan) / plan.tp
    stride = plan.num_gpus // plan.pp  # stages are furthest apart
    message = vectors / (cluster.link(plan.pp, stride) * fitted.link) + cluster.latency
    backward = 3.0 if plan.checkpoint == "full" else 2.0
    forward = sum(work) / plan.chunks / (1 + backward)
    shape = plan.pp, plan.num_micro_batches, plan.chunks, backward
    # To a thousandth of a forward, so that plans that differ in ZeRO alone are simulated once.
    longer = schedule_time(*shape, round(message / forward, 3)) - schedule_time(*shape, 0.0)
    busy = plan.num_micro_batches * (2 * plan.chunks * message - work[0])
    return max(forward * longer, busy)


def gradient_seconds(
    model: ModelSpec, plan: Plan, cluster: Cluster, fitted: Fitted, compute: float
) -> float:
    """Messages of gradients and parameters in a step, less what overlaps with compute.

    Of n ranks each sends (n - 1) / n of the bytes in a reduce-scatter or an all-gather. ZeRO-0
    reduces gradients (both) once a step, ZeRO-1 reduce-scatters them and gathers parameters,
    ZeRO-2 reduce-scatters after every micro-batch, ZeRO-3 gathers parameters in forward and in
    backward of every micro-batch as well. With `overlap` gradients travel behind one micro-batch's
    backward, 2/3 of its `compute`, ZeRO-3's messages behind all of it, the others behind nothing;
    of all these the share `fitted.hidden`, the rest behind nothing either.
    """
    n = plan.dp * plan.cp
    if n == 1:
        return 0.0
    trained, frozen = max(sum(unit_sizes(model, plan, rank)) for rank in range(plan.pp)), 0
    if plan.lora:
        frozen = trained
        trained = max(adapter_parameters(model, plan, rank) for rank in range(plan.pp))
    rate = cluster.link(n, plan.tp) * fitted.link
    byte = (n - 1) / n * trained / rate  # seconds of 1 B a weight
    weight, gradient, _ = STATE_BYTES[plan.precision]
    share = fitted.hidden if plan.overlap else 0.0

    def left(seconds: float, behind: float) -> float:
        return (1 - share) * seconds + share * max(0.0, seconds - behind)

    if plan.zero == 0:
        return left(2 * gradient * byte, 2 / 3 * compute)
    if plan.zero == 3:
        whole = (n - 1) / n * frozen / rate  # frozen weights are gathered, and send no gradients
        sent = (2 * weight + gradient) * byte + 2 * weight * whole
        return plan.num_micro_batches * left(sent, compute)
    times = plan.num_micro_batches if plan.zero == 2 else 1
    return times * left(gradient * byte, 2 / 3 * compute) + weight * byte


def _size(plan: Plan) -> int:
    """Bytes of a number that travels between layers."""
    return 2 if plan.precision == "mixed" else 4
