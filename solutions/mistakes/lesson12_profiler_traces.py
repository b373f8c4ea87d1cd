"""Wrong answers to lesson 12, each with the words that the check must say to it."""

from pathlib import Path

from torch.profiler import profile, record_function, schedule

from shared.exercises.mistakes import mistake
from shared.ranks.group import current_rank

# 12.1 profile_training

END = object()


def variant(
    model,
    optimizer,
    batches,
    loss_of,
    folder,
    wait,
    warmup,
    active,
    *,
    repeat=1,
    name=None,
    clear=True,
    read=None,
    counting=True,
    stops=False,
    labels=("data", "forward", "backward", "optimizer"),
    outer=None,
    draw_inside=True,
    step_calls=True,
    plan=None,
):
    """The reference with parts that can be exchanged."""
    path = folder / (name or f"rank_{current_rank()}.json")
    plan = plan or schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    data, forward, backward, update = labels
    waiting, steps = iter(batches), 0

    def write(profiler):
        profiler.export_chrome_trace(str(path))

    with profile(schedule=plan, on_trace_ready=write, acc_events=True) as profiler:
        while not (stops and steps == wait + warmup + active):
            around = record_function(outer or "step")
            with around if outer else record_function("nothing"):
                if draw_inside:
                    with record_function(data):
                        batch = next(waiting, END)
                else:
                    batch = next(waiting, END)
                    with record_function(data):
                        pass
                if batch is END:
                    break
                with record_function(forward):
                    loss = loss_of(model, batch)
                with record_function(backward):
                    loss.backward()
                with record_function(update):
                    optimizer.step()
                    if clear:
                        optimizer.zero_grad()
            if read:
                read(loss.detach())
            steps += 1
            if step_calls:
                profiler.step()
    if counting and steps < wait + warmup + active:
        raise ValueError(f"{wait + warmup + active} batches needed, got {steps}")
    return path


def by_hand(
    model,
    optimizer,
    batches,
    loss_of,
    folder,
    wait,
    warmup,
    active,
    *,
    step_first=False,
    stop=True,
    stop_at_error=False,
):
    """A profiler that is started and, where nothing goes wrong, stopped."""
    path, number = folder / f"rank_{current_rank()}.json", 0
    profiler = profile(
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        acc_events=True,
    )
    profiler.start()
    for batch in labelled(batches):
        with record_function("forward"):
            loss = loss_of(model, batch)
        with record_function("backward"):
            loss.backward()
        if step_first:
            profiler.step()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        number += 1
        if not step_first:
            profiler.step()
    few = number < wait + warmup + active
    if stop_at_error if few else stop:
        profiler.stop()
    if few:
        raise ValueError(f"{number} batches, {wait + warmup + active} needed")
    return path


def labelled(batches):
    """The batches, each drawn under its label."""
    waiting = iter(batches)
    while True:
        with record_function("data"):
            batch = next(waiting, END)
        if batch is END:
            return
        yield batch


@mistake("12.1", says="the first steps are in the trace")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    plan = schedule(wait=0, warmup=0, active=wait + warmup + active, repeat=1)
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, plan=plan)


@mistake("12.1", says="all batches are drawn before the first step")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, list(batches), loss_of, folder, wait, warmup, active)


@mistake("12.1", says="the order in a step is another")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return by_hand(
        model, optimizer, batches, loss_of, folder, wait, warmup, active, step_first=True
    )


@mistake("12.1", says="the profiler is not stopped before the error")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return by_hand(model, optimizer, batches, loss_of, folder, wait, warmup, active)


@mistake("12.1", says="each step's loss is kept with its graph")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    losses = []

    def remembered(model, batch):
        losses.append(loss_of(model, batch))
        return losses[-1]

    return variant(model, optimizer, batches, remembered, folder, wait, warmup, active)


@mistake("12.1", says="what is returned is no Path")
def profile_training(model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3):
    return str(variant(model, optimizer, batches, loss_of, folder, wait, warmup, active))


# 12.2 overlap_fraction


def complete(trace, wanted):
    """Start and end of the spans that are wanted, as they come."""
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and "dur" in event and wanted(event)
    ]


def union(intervals):
    """Sorted, and none touches the next."""
    united = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def common(one, other):
    """What each of one has in common with each of the other."""
    pairs = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(start, end) for start, end in pairs if start < end]


def length(intervals):
    """The sum of the lengths."""
    return sum(end - start for start, end in intervals)


def is_kernel(event):
    """Whether it ran on a GPU."""
    return event.get("cat") == "kernel"


def is_nccl(event):
    """Whether it is a kernel of NCCL's."""
    return is_kernel(event) and "nccl" in event["name"].lower()


def is_gloo(event):
    """Whether it is a collective of gloo's."""
    return event["name"].startswith("gloo:")


def is_aten(event):
    """Whether it is an operator of torch's."""
    return event.get("cat") == "cpu_op" and event["name"].startswith("aten::")


def is_step(event):
    """Whether it is a step."""
    return event["name"].startswith("ProfilerStep#")


def overlap(trace, *, sent=None, busy=None, unite=union, unite_sent=union, clip=True, labels=False):
    """The share in the reference's way, with parts that can be exchanged."""
    within = union(complete(trace, is_step))
    if not within:
        raise ValueError("no steps")
    on_gpu = bool(complete(trace, is_kernel))
    if not on_gpu and not labels and complete(trace, lambda e: e["name"].startswith("nccl:")):
        raise ValueError("no kernels")
    sent = sent or (is_nccl if on_gpu else is_gloo)
    busy = busy or ((lambda e: is_kernel(e) and not is_nccl(e)) if on_gpu else is_aten)
    messages = unite_sent(complete(trace, sent))
    if clip:
        messages = common(messages, within)
    hidden = length(common(messages, unite(complete(trace, busy))))
    return hidden / length(messages) if messages else 1.0


@mistake("12.2", says="nested operators count twice")
def overlap_fraction(trace):
    return overlap(trace, unite=list)


@mistake("12.2", says="the pause between two steps counts")
def overlap_fraction(trace):
    steps = complete(trace, is_step)
    if not steps:
        raise ValueError("no steps")
    start, end = min(a for a, _ in steps), max(b for _, b in steps)
    whole = {"ph": "X", "name": "ProfilerStep#0", "cat": "", "ts": start, "dur": end - start}
    return overlap({"traceEvents": [*trace["traceEvents"], whole]})


@mistake("12.2", says="what lies outside the steps counts")
def overlap_fraction(trace):
    return overlap(trace, clip=False)


@mistake("12.2", says="only one thread's operators count")
def overlap_fraction(trace):
    main = next(e["tid"] for e in trace["traceEvents"] if e.get("ph") == "X" and is_step(e))
    return overlap(trace, busy=lambda e: is_aten(e) and e["tid"] == main)


@mistake("12.2", says="nobody knows what hid NCCL's messages")
def overlap_fraction(trace):
    return overlap(trace, labels=True)


@mistake("12.2", says="copies count as compute")
def overlap_fraction(trace):
    if not complete(trace, is_kernel):
        return overlap(trace)

    def busy(event):
        return event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") and not is_nccl(event)

    return overlap(trace, busy=busy)


@mistake("12.2", says="times are rounded")
def overlap_fraction(trace):
    return overlap(in_microseconds(trace))


def in_microseconds(trace):
    """The trace with whole numbers for times."""
    events = [
        {key: int(value) if key in ("ts", "dur") else value for key, value in event.items()}
        for event in trace["traceEvents"]
    ]
    return {**trace, "traceEvents": events}


# 12.3 data_stall_fraction


def is_label(event):
    """Whether it is a span by record_function on the CPU."""
    return event.get("cat") == "user_annotation"


def is_waiting(event):
    """Whether it waits for data."""
    ours = event["name"] == "data" or event["name"].startswith("enumerate(DataLoader)")
    return ours and is_label(event)


def stall(trace, *, waits=is_waiting, unite=union, clip=True, hull=False, steps=is_step, gpu=True):
    """The share in the reference's way, with parts that can be exchanged."""
    within = union(complete(trace, steps))
    if not within:
        raise ValueError("no steps")
    if hull:
        within = [(within[0][0], within[-1][1])]
    waiting = unite(complete(trace, waits))
    if clip:
        waiting = common(waiting, within)
    kernels = union(complete(trace, is_kernel)) if gpu else []
    return (length(waiting) - length(common(waiting, kernels))) / length(within)


@mistake("12.3", says="waits that lie in one another count twice")
def data_stall_fraction(trace):
    return stall(trace, unite=list)


@mistake("12.3", says="what lies outside the steps counts")
def data_stall_fraction(trace):
    return stall(trace, clip=False)


@mistake("12.3", says="names that only begin with 'data' count")
def data_stall_fraction(trace):
    return stall(trace, waits=lambda e: e["name"].startswith("data") and is_label(e))


@mistake("12.3", says="names that only begin with 'enumerate' count")
def data_stall_fraction(trace):
    return stall(trace, waits=lambda e: is_waiting(e) or e["name"].startswith("enumerate"))


@mistake("12.3", says="a step's second span, on the GPU's track")
def data_stall_fraction(trace):
    return stall(trace, steps=lambda e: is_step(e) and is_label(e))


@mistake("12.3", says="times are rounded")
def data_stall_fraction(trace):
    return stall(in_microseconds(trace))


# 12.4 model_flops_utilization


def mfu(
    config, tokens, seconds, peak, *, products=1.0, output=1.0, attention=1.0, d_ff=None, factor=6
):
    """The formula with weights for its terms."""
    for value in (seconds, peak):
        if value <= 0:
            raise ValueError(f"must be above 0, got {value}")
    (rows, length), D = tokens, config.d_model
    body = config.num_layers * (4 * D * D + 2 * D * (d_ff or config.d_ff)) * products
    body += output * config.vocab_size * D + attention * config.num_layers * 2 * length * D
    return factor * rows * length * body / (seconds * peak)


@mistake("12.4", says="the products of attention are left out")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, attention=0)


@mistake("12.4", says="tokens are (rows, length)")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens[::-1], seconds, peak)


@mistake("12.4", says="a multiplication with its addition is two FLOPs")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, factor=3)


@mistake("12.4", says="the causal mask is taken off")
def model_flops_utilization(config, tokens, seconds, peak):
    length = tokens[1]
    return mfu(config, tokens, seconds, peak, attention=(length + 1) / (2 * length))


@mistake("12.4", says="a share above 1 is cut off")
def model_flops_utilization(config, tokens, seconds, peak):
    return min(1.0, mfu(config, tokens, seconds, peak))


@mistake("12.4", says="the length is max_len")
def model_flops_utilization(config, tokens, seconds, peak):
    longer = config.max_len / tokens[1]
    return mfu(config, tokens, seconds, peak, attention=longer)


# 12.5 diagnose


@mistake("12.5", says="the operator inside a read is counted as one more")
def diagnose(trace, healthy):
    def with_inner(each):
        found = counts(each)
        return {**found, "item": 2 * found["item"]} if inner(each) else found

    def inner(each):
        return any("_local_scalar_dense" in event["name"] for event in each["traceEvents"])

    return reason(trace, healthy, count=with_inner)


@mistake("12.5", says="'nccl' is looked for in one case only")
def diagnose(trace, healthy):
    def sent(event):
        return is_gloo(event) or (is_kernel(event) and "nccl" in event["name"])

    return reason(trace, healthy, count=lambda each: counts(each, messages=sent))


def is_sent(event):
    """Whether it is a message."""
    return is_gloo(event) or is_nccl(event)


def counts(trace, per_step=True, everything=False, copies=False, cut_off=False, messages=is_sent):
    """What happens in a step: reads, messages, operators."""
    steps = complete(trace, is_step)
    if not steps:
        raise ValueError("no steps")
    names = [
        event
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and (cut_off or "dur" in event)
        and (everything or any(a <= event["ts"] < b for a, b in steps))
    ]
    found = {
        "item": sum(is_aten(e) and e["name"] == "aten::item" for e in names),
        "buckets": sum(messages(e) for e in names),
        "kernels": sum(is_aten(e) for e in names),
    }
    names = {e["name"] for e in trace["traceEvents"] if e.get("ph") == "X" and is_step(e)}
    number = len(steps) if copies else len(names)
    return {name: count / (number if per_step else 1) for name, count in found.items()}


def reason(
    trace,
    healthy,
    *,
    order=("item", "buckets", "kernels"),
    stalled=0.2,
    count=counts,
    factor=2.0,
    most=10,
    loader_first=False,
):
    """The reference's questions, in an order and with limits that can be exchanged."""
    here, usual = count(trace), count(healthy)
    more = stall(trace) - stall(healthy)
    if loader_first and more >= stalled:
        return "loader"
    for name in order:
        if here[name] >= factor * usual[name] and here[name] - usual[name] >= most:
            return name
    return "loader" if more >= stalled else "none"


@mistake("12.5", says="messages are asked before reads")
def diagnose(trace, healthy):
    return reason(trace, healthy, order=("buckets", "item", "kernels"))


@mistake("12.5", says="waiting is asked first")
def diagnose(trace, healthy):
    return reason(trace, healthy, loader_first=True)


@mistake("12.5", says="ten more, or twice as many, is enough")
def diagnose(trace, healthy):
    here, usual = counts(trace), counts(healthy)
    for name in here:
        if here[name] >= 10 + usual[name] or here[name] >= 2 * usual[name] > 0:
            return name
    return reason(trace, healthy)


@mistake("12.5", says="autograd nodes count as operators")
def diagnose(trace, healthy):
    def with_nodes(each):
        events = [
            {**e, "name": f"aten::{e['name']}"} if e["name"].endswith("Backward0") else e
            for e in each["traceEvents"]
        ]
        return counts({"traceEvents": events})

    return reason(trace, healthy, count=with_nodes)
