"""A survey in words: the best plans, what limits them, why others do not fit, what is assumed."""

from collections import Counter
from collections.abc import Sequence

from shared.planner.measured import days_and_hours, like_measured, tokens_per_second
from shared.planner.memory import gathered_bytes
from shared.planner.outcomes import FITTED, Choice
from shared.planner.peak import loss_bytes
from shared.planner.published import families
from shared.planner.search import Survey, bounds, describe
from shared.planner.seconds import step_time
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
# Of 100 published runs, each predicted by numbers fitted to other families than its own, 80 reached
# from the first to the second times what was predicted.
LIKELY = (0.90, 1.11)


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
    for choice in choices:
        found.setdefault((choice.plan.dp, choice.plan.tp, choice.plan.pp), choice)
    return list(found.values())[:count]


def table(
    model: ModelSpec, choices: Sequence[Choice], cluster: Cluster, measured: Plan | None = None
) -> list[str]:
    """Five lines for each choice: plan, speed, bytes by kind, seconds by kind, what limits it.

    `measured`: the plan of the run by which the seconds are scaled, if they are.
    """
    lines = []
    for number, choice in enumerate(choices, 1):
        plan, memory, time = choice.plan, choice.memory, choice.time
        units = gathered_bytes(model, plan)
        which = "a unit that is" if plan.lora else "two units that are"
        more = f", and {units / 1e9:.1f} for {which} gathered" if units else ""
        loss = loss_bytes(model, plan) / 1e9
        where = "loss of the last stage" if plan.pp > 1 else "loss"
        more += f", and {loss:.1f} for a moment at the {where}" if loss >= 0.05 else ""
        lines += [
            f"{number}. {describe(plan)}",
            f"   {time.total:.2f} s a step, {speed(model, choice, cluster, measured)}, "
            f"{time.achieved_flops / 1e12:.0f} TFLOP/s a GPU, "
            f"MFU {utilization(model, choice, cluster, measured, '%')}"
            + hiding(model, choice, cluster),
            "   GB of the fullest GPU: "
            + ", ".join(f"{kind} {getattr(memory, kind) / 1e9:.1f}" for kind in BYTES)
            + f"; {memory.total / 1e9:.1f} in all{more}",
            "   seconds: "
            + ", ".join(f"{word} {getattr(time, kind):.2f}" for kind, word in SECONDS.items()),
            f"   limited by {limits(choice, cluster, units)}",
        ]
    return lines


def likely(predicted: float) -> str:
    """What 80 of 100 runs of published kinds reach where so much is predicted."""
    least, most = (share * predicted for share in LIKELY)
    return f"{least:,.0f} to {most:,.0f}"


def unproven(model: ModelSpec, plan: Plan, cluster: Cluster, measured: Plan | None = None) -> str:
    """Why no published run says how wrong the seconds may be; empty where some do."""
    whys = {
        "experts": model.num_experts > 1,
        "LoRA": plan.lora > 0,
        "below a billion parameters": model.num_parameters < 1e9,
        "float32": plan.precision == "float32",
        "this machine": not was_timed(cluster),
    }
    if why := next((why for why, holds in whys.items() if holds), ""):
        return f"unproven for {why}"
    if measured is None:
        return ""
    if like_measured(plan, measured):
        return "scaled as measured"
    return "scaled by another layout's run: may be twice as far off"


def was_timed(cluster: Cluster) -> bool:
    """Whether published runs are of such GPUs and of links between the slowest and fastest."""
    known = [run.cluster for runs in families().values() for run in runs]
    for name in ("inner", "outer", "memory_bandwidth", "achievable"):
        values = [getattr(timed, name) for timed in known]
        if not min(values) <= getattr(cluster, name) <= max(values):
            return False
    return cluster.peak_flops in {timed.peak_flops for timed in known}


def utilization(
    model: ModelSpec,
    choice: Choice,
    cluster: Cluster,
    measured: Plan | None = None,
    unit: str = "",
) -> str:
    """MFU in percent, with the range of those runs that were tried, where some are like it."""
    percent = 100 * choice.time.mfu
    vague = unproven(model, choice.plan, cluster, measured)
    return f"{percent:.1f}{unit}" + ("" if vague else f" ({likely(percent)})")


def speed(model: ModelSpec, choice: Choice, cluster: Cluster, measured: Plan | None = None) -> str:
    """Tokens/s of a GPU, with the range of those runs that were tried."""
    tokens, why = tokens_per_second(model, choice), unproven(model, choice.plan, cluster, measured)
    return f"{tokens:,.0f} tokens/s a GPU ({why or f'{likely(tokens)} in 80 of 100 runs'})"


def hiding(model: ModelSpec, choice: Choice, cluster: Cluster) -> str:
    """The seconds if all of replicas' messages hide, and if none do, where that differs."""
    best, worst = bounds(model, choice, cluster)
    if worst - best < 0.005:
        return ""
    return (
        f"; {best:.2f} s with all messages between replicas hidden behind compute, "
        f"{worst:.2f} with none"
    )


def firsts(model: ModelSpec, survey: Survey, cluster: Cluster) -> list[str]:
    """Which plans would be first if all messages between replicas hid, and if none did."""
    lines = []
    ends = zip(*(bounds(model, choice, cluster) for choice in survey.choices), strict=True)
    for words, spans in zip(("all messages", "no messages"), ends, strict=True):
        at = spans.index(min(spans))
        which = "plan 1" if at == 0 else describe(survey.choices[at].plan)
        lines.append(f"first if {words} between replicas hide: {which}, {spans[at]:.2f} s")
    return lines


def costs(
    model: ModelSpec,
    choice: Choice,
    tokens: float,
    price: float | None,
    cluster: Cluster,
    measured: Plan | None = None,
) -> str:
    """Days and GPU hours of a training run by a plan, the days with a range, and the price."""
    pace = tokens_per_second(model, choice)
    days, hours = days_and_hours(tokens, cluster.gpus, pace)
    words = f"{tokens:.3g} tokens by plan 1: {days:,.1f} days, {hours:,.0f} GPU hours"
    words += "" if price is None else f", {price * hours:,.0f} at {price:g} an hour"
    if why := unproven(model, choice.plan, cluster, measured):
        return f"{words} ({why})"
    fast, slow = (days / share for share in reversed(LIKELY))
    return f"{words} ({fast:,.1f} to {slow:,.1f} days in 80 of 100 runs)"


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


def near_miss(model: ModelSpec, survey: Survey, cluster: Cluster, pace: float = 1.0) -> list[str]:
    """The fastest plan that misses the memory by little, where it is faster than the first one.

    Published plans ran that the count of bytes has refused, Llama 3's among them. `pace`: by what
    the seconds of the survey's choices are scaled.
    """
    limit = TOO_MANY * USABLE * cluster.memory
    close = [
        Choice(refusal.plan, refusal.memory, step_time(model, refusal.plan, cluster).scaled(pace))
        for refusal in survey.refused
        if refusal.memory is not None and refusal.missing + USABLE * cluster.memory <= limit
    ]
    if not close or not survey.choices:
        return []
    near = min(close, key=lambda choice: choice.time.total)
    if near.time.total > 0.97 * survey.choices[0].time.total:
        return []
    (missing,) = (refusal.words for refusal in survey.refused if refusal.plan == near.plan)
    return [
        "worth a try (plans that ran are counted at up to 1.11 times 80 GB): "
        f"{describe(near.plan)}",
        f"   {missing}, {near.time.total:.2f} s a step, "
        f"{near.time.achieved_flops / 1e12:.0f} TFLOP/s a GPU",
    ]


def refusals(survey: Survey) -> list[str]:
    """How many plans each limit stops, with an example of the nearest."""
    counts = Counter(refusal.limit for refusal in survey.refused)
    lines = [f"{len(survey.choices)} plans fit, {len(survey.refused)} do not:"]
    for limit, number in counts.most_common():
        stopped = [refusal for refusal in survey.refused if refusal.limit == limit]
        near = min(stopped, key=lambda refusal: refusal.missing)
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
        f"activations after Korthikanti et al. 2022, {scores}; logits in float32 have the 4 bytes "
        "that are kept, and 12 when the loss's backward begins (14 to 16 where a variable holds "
        "them), which a plan that fits is not asked for",
        "the sequence is cut as well wherever tp is above 1 (sequence parallelism); not searched: "
        "context parallelism (cp) and expert parallelism",
        "schedule 1F1B, interleaved (chunks) where all stages have equally many layers, or the "
        "first and the last one less; messages between stages as lesson 15 simulates them",
        "ZeRO-1 in a pipeline sends as torchtitan's FSDP does there, whose weights stay whole for "
        "a step; ZeRO-2 and 3 send with every micro-batch; DeepSpeed refuses them (--deepspeed)",
        f"{where}; large products reach {cluster.achievable:.0%} of the peak{unknown}, those of a "
        f"step {FITTED.matmul:.0%} of that"
        + (f" and of that {FITTED.throttled:.0%}, for the power" if cluster.throttled else "")
        + f", of fused attention {FITTED.attention:.0%}; collectives reach {FITTED.link:.0%} of a "
        f"link, and {FITTED.hidden:.0%} of those between replicas can hide behind compute",
        f"what a layer keeps goes through the GPU's memory {FITTED.traffic:.1f} times each way, "
        f"{FITTED.traffic + FITTED.eager:.1f} where operations are not fused (--eager)",
        "these numbers are fitted to 100 published runs of ten families; each family, predicted "
        "by the other nine, is 3 to 11 % off (the best constant: 4 to 31 %); MT-NLG's 530B, in "
        "none, is predicted 27 to 32 % too fast, four runs below a billion parameters up to 14 %",
        "four published plans that ran in 80 GB need 81 to 89 GB by this count, Llama 3's of the "
        "405B among them, and are refused here; and a plan that fits by this count may not: "
        "KempnerForge's 14 runs held 0.6 to 3.8 times what is counted, 11 of them more, and 0.93 "
        "to 1.13 times with 8 bytes of states a parameter (all in 16 bits), float32 gradients that "
        "stay whole between micro-batches, and whole logits of 10 bytes on every rank of tp",
        "left out: kernels by shape, stragglers, data loading, the optimizer's update, experts on "
        "own ranks, and in the search tp's messages behind compute; FLOPs and MFU without "
        "recomputation",
    ]
