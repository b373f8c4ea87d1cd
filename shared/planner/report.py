"""A survey in words: the best plans, what limits them, why others do not fit, what is assumed."""

from collections import Counter
from collections.abc import Sequence

from shared.planner.memory import gathered_bytes
from shared.planner.outcomes import Choice
from shared.planner.search import Refusal, Survey, describe
from shared.planner.seconds import FITTED, exposed_seconds, step_time
from shared.planner.specs import STATE_BYTES, Cluster, ModelSpec, Plan
from shared.planner.variants import USABLE

SECONDS = {
    "compute": "compute",
    "tensor_parallel": "messages within layers",
    "pipeline": "messages between stages",
    "bubble": "bubble",
    "data_parallel": "messages between replicas",
}
BYTES = ("parameters", "gradients", "optimizer", "activations")
TOO_MANY = 1.15  # published plans that ran in 80 GB need up to 89 GB by our count, 1.11 times


def headline(name: str, model: ModelSpec, gpu: str, cluster: Cluster, batch: int) -> str:
    """What is planned for."""
    nodes = f"{cluster.gpus} {gpu} GPUs, {cluster.gpus_per_node} a node"
    return (
        f"{name}: {model.num_parameters / 1e9:.2f} billion parameters, sequences of "
        f"{model.seq_len:,} tokens, {batch} a step ({batch * model.seq_len:,} tokens)\n"
        f"{nodes}: {cluster.memory / 1e9:.0f} GB, {cluster.peak_flops / 1e12:.0f} TFLOP/s; links "
        f"of {cluster.inner / 1e9:.0f} GB/s inside a node and {cluster.outer / 1e9:.1f} GB/s a GPU "
        f"between nodes"
    )


def best_of_layouts(choices: Sequence[Choice], count: int) -> list[Choice]:
    """The fastest choices, of each dp x tp x pp the best alone."""
    found: dict[tuple[int, int, int], Choice] = {}
    for each in choices:
        found.setdefault((each.plan.dp, each.plan.tp, each.plan.pp), each)
    return list(found.values())[:count]


def table(model: ModelSpec, choices: Sequence[Choice], cluster: Cluster) -> list[str]:
    """Five lines for each choice: plan, speed, bytes by kind, seconds by kind, what limits it."""
    lines = []
    for number, choice in enumerate(choices, 1):
        plan, memory, time = choice.plan, choice.memory, choice.time
        tokens = plan.batch * model.seq_len / time.total / plan.num_gpus
        bare = exposed_seconds(model, plan, cluster, time)
        slower = f"; {bare:.2f} s with nothing hidden behind compute" if bare > time.total else ""
        units = gathered_bytes(model, plan)
        more = f", and {units / 1e9:.1f} for two units that are gathered" if units else ""
        lines += [
            f"{number}. {describe(plan)}",
            f"   {time.total:.2f} s a step, {tokens:,.0f} tokens/s a GPU, "
            f"{time.achieved_flops / 1e12:.0f} TFLOP/s a GPU, MFU {time.mfu:.1%}{slower}",
            "   GB of the fullest GPU: "
            + ", ".join(f"{kind} {getattr(memory, kind) / 1e9:.1f}" for kind in BYTES)
            + f"; {memory.total / 1e9:.1f} in all{more}",
            "   seconds: "
            + ", ".join(f"{word} {getattr(time, kind):.2f}" for kind, word in SECONDS.items()),
            f"   limited by {limits(choice, cluster, units)}",
        ]
    return lines


def limits(choice: Choice, cluster: Cluster, gathered: int = 0) -> str:
    """What the plan waits for most beside compute, and which bytes fill the GPU."""
    time, memory = choice.time, choice.memory
    waits = {word: getattr(time, kind) for kind, word in SECONDS.items() if kind != "compute"}
    most = max(waits, key=lambda word: waits[word])
    fills = max(BYTES, key=lambda kind: getattr(memory, kind))
    share = (memory.total + gathered) / (USABLE * cluster.memory)
    words = f"compute ({time.compute / time.total:.0%})"
    if waits[most] > 0:
        words += f", then {most} ({waits[most] / time.total:.0%})"
    return f"{words}; {share:.0%} of the usable memory is taken, most of it by {fills}"


def near_miss(model: ModelSpec, survey: Survey, cluster: Cluster) -> list[str]:
    """The fastest plan that misses the memory by little, where it is faster than the first one.

    Published plans ran that the count of bytes has refused, Llama 3's among them.
    """

    def seconds(each: Refusal) -> float:
        return exposed_seconds(model, each.plan, cluster, step_time(model, each.plan, cluster))

    limit = TOO_MANY * USABLE * cluster.memory
    close = [
        each
        for each in survey.refused
        if each.memory is not None and each.missing + USABLE * cluster.memory <= limit
    ]
    if not close or not survey.choices:
        return []
    near, best = min(close, key=seconds), survey.choices[0]
    if seconds(near) > 0.97 * exposed_seconds(model, best.plan, cluster, best.time):
        return []
    time = step_time(model, near.plan, cluster)
    reached = f"{time.total:.2f} s a step, {time.achieved_flops / 1e12:.0f} TFLOP/s a GPU"
    return [
        f"worth a try, since this count was at least 11 % too high for one plan that ran: "
        f"{describe(near.plan)}",
        f"   {near.words}, {reached}; {seconds(near):.2f} s with nothing hidden behind compute",
    ]


def refusals(survey: Survey) -> list[str]:
    """How many plans each limit stops, with an example of the nearest."""
    counts = Counter(each.limit for each in survey.refused)
    lines = [f"{len(survey.choices)} plans fit, {len(survey.refused)} do not:"]
    for limit, number in counts.most_common():
        stopped = [each for each in survey.refused if each.limit == limit]
        near = min(stopped, key=lambda each: each.missing)
        words = f"{describe(near.plan)}: {near.words}" if near.memory else near.words
        what = "plans" if near.memory else "layouts"
        lines.append(f"  {number} {what} stopped by {limit}, such as {words}")
    return lines


def assumptions(model: ModelSpec, cluster: Cluster, plan: Plan) -> list[str]:
    """Everything that the answer rests on."""
    weight, gradient, optimizer = STATE_BYTES[plan.precision]
    fused = "fused attention, which skips what a causal mask hides"
    scores = fused if model.fused_attention else "attention that keeps its scores"
    inside = plan.tp <= cluster.gpus_per_node
    where = "tp stays inside a node" if inside else "tp spans nodes, with all of their cards"
    # A file that leaves it out; of A100 and H100 it is known.
    unknown = " (`achievable`: 80 to 87% on A100 and H100)" if cluster.achievable == 1 else ""
    return [
        f"bytes a parameter: {weight} weight, {gradient} gradient, {optimizer} optimizer (Adam)",
        f"{1 - USABLE:.0%} of the memory is kept free for the driver, gaps and buffers",
        f"activations after Korthikanti et al. 2022, {scores}; logits in float32",
        "the sequence is cut as well wherever tp is above 1 (sequence parallelism); no plan has cp",
        "schedule 1F1B, interleaved (chunks) where all stages have equally many layers, or the "
        "first and the last one less",
        "a pipeline has ZeRO-0 or 1: DeepSpeed refuses 2 and 3 there (--pipeline-zero tries them)",
        "plans are ranked by their seconds with nothing hidden behind compute: how much is hidden "
        "is the weakest guess here",
        f"{where}; large products reach {cluster.achievable:.0%} of the peak{unknown}, those of a "
        f"step {FITTED.matmul:.0%} of that; collectives reach {FITTED.link:.0%} of a link",
        f"what a layer keeps goes through the GPU's memory {FITTED.traffic:.1f} times each way",
        "these three numbers are fitted to 21 published runs (mean error 3.5 %, worst 9 %); of 11 "
        "runs of NVIDIA's NeMo, not fitted, the mean error is 10 %: 8B 17 to 19 % too fast, 70B 1 "
        "to 2 % and 175B to 405B 7 to 15 % too slow",
        "where it is hidden, gradients and ZeRO-3's parameters travel behind compute as far as it "
        "lasts, at no cost; steps of torchtitan (ZeRO-3, not fitted) took 13 to 28 % longer than "
        "predicted so, those of its 8B on H100s 31 % or more",
        "four published plans that ran in 80 GB need 81 to 89 GB by this count, Llama 3's of the "
        "405B among them, and are refused here; a plan that takes nearly all of the memory may as "
        "well not fit: try it before you trust it",
        "left out: kernels by shape, stragglers, data loading, the optimizer's update, tp's "
        "messages behind compute, latency beyond one delay a message; FLOPs and MFU without "
        "recomputation",
    ]
