"""Wrong answers to lesson 12, each with the words that the check must say to it."""

from torch.profiler import profile, record_function, schedule

from shared.exercises.mistakes import mistake
from shared.ranks.group import current_rank
from solutions import lesson12_profiler_traces as right

# 12.1 profile_training


@mistake("12.1", says="the first steps are in the trace")
def profile_training(*args, wait=1, warmup=1, active=3):
    return right.profile_training(*args, wait=0, warmup=0, active=wait + warmup + active)


@mistake("12.1", says="all batches are drawn before the first step")
def profile_training(model, optimizer, batches, *args, **steps):
    return right.profile_training(model, optimizer, list(batches), *args, **steps)


def by_hand(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3, step_first=False
):
    """A profiler that is started and, where nothing goes wrong, stopped."""
    path, number, waiting = folder / f"rank_{current_rank()}.json", 0, iter(batches)
    profiler = profile(
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        acc_events=True,
    )
    profiler.start()
    while True:
        with record_function("data"):
            batch = next(waiting, None)
        if batch is None:
            break
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
    if number < wait + warmup + active:
        raise ValueError(f"{number} batches, {wait + warmup + active} needed")
    profiler.stop()
    return path


@mistake("12.1", says="the order in a step is another")
def profile_training(*args, **steps):
    return by_hand(*args, **steps, step_first=True)


@mistake("12.1", says="the profiler is not stopped before the error")
def profile_training(*args, **steps):
    return by_hand(*args, **steps)


@mistake("12.1", says="each step's loss is kept with its graph")
def profile_training(model, optimizer, batches, loss_of, folder, **steps):
    losses = []

    def remembered(model, batch):
        losses.append(loss_of(model, batch))
        return losses[-1]

    return right.profile_training(model, optimizer, batches, remembered, folder, **steps)


@mistake("12.1", says="what is returned is no Path")
def profile_training(*args, **steps):
    return str(right.profile_training(*args, **steps))


# 12.2 overlap_fraction


def changed(trace, change):
    """The trace with each event changed; what becomes None is left out."""
    events = map(change, trace["traceEvents"])
    return {**trace, "traceEvents": [event for event in events if event is not None]}


@mistake("12.2", says="what lies outside the steps counts")
def overlap_fraction(trace):
    right.overlap_fraction(trace)  # refuses what holds no step
    spans = [event for event in trace["traceEvents"] if "dur" in event]
    end = max(event["ts"] + event["dur"] for event in spans)
    whole = {"ph": "X", "name": "ProfilerStep#0", "ts": 0, "dur": end}
    return right.overlap_fraction({"traceEvents": [*trace["traceEvents"], whole]})


@mistake("12.2", says="nobody knows what hid NCCL's messages")
def overlap_fraction(trace):
    return right.overlap_fraction(
        changed(trace, lambda e: None if e["name"].startswith("nccl:") else e)
    )


@mistake("12.2", says="copies count as compute")
def overlap_fraction(trace):
    copies = ("gpu_memcpy", "gpu_memset")
    return right.overlap_fraction(
        changed(trace, lambda e: {**e, "cat": "kernel"} if e.get("cat") in copies else e)
    )


def in_microseconds(event):
    """The event with whole numbers for times."""
    return {key: int(value) if key in ("ts", "dur") else value for key, value in event.items()}


@mistake("12.2", says="times are rounded")
def overlap_fraction(trace):
    return right.overlap_fraction(changed(trace, in_microseconds))


# 12.3 data_stall_fraction


@mistake("12.3", says="names that only begin with 'data' count")
def data_stall_fraction(trace):
    def by_its_beginning(event):
        known = {"data": "data", "enum": None}.get(event["name"][:4], event["name"])
        return known and {**event, "name": known}

    return right.data_stall_fraction(changed(trace, by_its_beginning))


@mistake("12.3", says="a step's second span, on the GPU's track")
def data_stall_fraction(trace):
    def on_the_cpu(event):
        step = event["name"].startswith("ProfilerStep#")
        return None if step and event.get("cat") != "user_annotation" else event

    return right.data_stall_fraction(changed(trace, on_the_cpu))


@mistake("12.3", says="times are rounded")
def data_stall_fraction(trace):
    return right.data_stall_fraction(changed(trace, in_microseconds))


# 12.4 model_flops_utilization


@mistake("12.4", says="the products of attention are left out")
def model_flops_utilization(config, tokens, seconds, peak):
    rows, length = tokens
    attention = 12 * rows * length * config.num_layers * length * config.d_model
    found = right.model_flops_utilization(config, tokens, seconds, peak)
    return found - attention / (seconds * peak)


@mistake("12.4", says="tokens are (rows, length)")
def model_flops_utilization(config, tokens, seconds, peak):
    return right.model_flops_utilization(config, tokens[::-1], seconds, peak)


@mistake("12.4", says="a share above 1 is cut off")
def model_flops_utilization(*args):
    return min(1.0, right.model_flops_utilization(*args))


# 12.5 diagnose


@mistake("12.5", says="the operator inside a read is counted as one more")
def diagnose(*traces):
    def inner_too(event):
        return {**event, "name": event["name"].replace("_local_scalar_dense", "item")}

    return right.diagnose(*(changed(each, inner_too) for each in traces))


@mistake("12.5", says="'nccl' is looked for in one case only")
def diagnose(*traces):
    def in_one_case(event):
        other = event.get("cat") == "kernel" and "nccl" not in event["name"]
        return {**event, "name": "another"} if other else event

    return right.diagnose(*(changed(each, in_one_case) for each in traces))


@mistake("12.5", says="messages are asked before reads")
def diagnose(trace, healthy):
    without_reads = changed(trace, lambda e: None if e["name"] == "aten::item" else e)
    messages = right.diagnose(without_reads, healthy) == "buckets"
    return "buckets" if messages else right.diagnose(trace, healthy)


@mistake("12.5", says="waiting is asked first")
def diagnose(*traces):
    waits = [right.data_stall_fraction(each) for each in traces]
    return "loader" if waits[0] - waits[1] >= 0.2 else right.diagnose(*traces)


@mistake("12.5", says="ten more, or twice as many, is enough")
def diagnose(trace, healthy):
    here, usual = right._counts(trace), right._counts(healthy)
    for name in here:
        if here[name] >= 10 + usual[name] or here[name] >= 2 * usual[name] > 0:
            return name
    return right.diagnose(trace, healthy)


@mistake("12.5", says="autograd nodes count as operators")
def diagnose(*traces):
    def as_operator(event):
        node = event["name"].endswith("Backward0")
        return {**event, "name": f"aten::{event['name']}"} if node else event

    return right.diagnose(*(changed(each, as_operator) for each in traces))
