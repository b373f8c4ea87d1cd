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


@mistake("12.1", says="the warm-up steps are in the trace")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    plan = schedule(wait=wait, warmup=0, active=warmup + active, repeat=1)
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, plan=plan)


@mistake("12.1", says="more steps than `active` are in the trace")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    plan = schedule(wait=wait, warmup=warmup, active=active + 1, repeat=1)
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, plan=plan)


@mistake("12.1", says="the schedule begins again after its first cycle")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, repeat=0)


@mistake("12.1", says="profiler.step() is not called")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    path = folder / f"rank_{current_rank()}.json"
    with profile(acc_events=True) as profiler:
        for batch in batches:
            with record_function("forward"):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(path))
    return path


@mistake("12.1", says="the batch is drawn outside of its label")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(
        model, optimizer, batches, loss_of, folder, wait, warmup, active, draw_inside=False
    )


@mistake("12.1", says="all batches are drawn before the first step")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, list(batches), loss_of, folder, wait, warmup, active)


@mistake("12.1", says='there is no label "optimizer"')
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    labels = ("data", "forward", "backward", "update")
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, labels=labels)


@mistake("12.1", says="the labels lie in one another")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    path = folder / f"rank_{current_rank()}.json"

    def write(profiler):
        profiler.export_chrome_trace(str(path))

    plan, waiting = schedule(wait=wait, warmup=warmup, active=active, repeat=1), iter(batches)
    with profile(schedule=plan, on_trace_ready=write, acc_events=True) as profiler:
        while True:
            with record_function("data"):
                batch = next(waiting, END)
            if batch is END:
                return path
            with record_function("backward"):
                with record_function("forward"):
                    loss = loss_of(model, batch)
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()


@mistake("12.1", says="training ends with the trace")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, stops=True)


@mistake("12.1", says="a number is read from the device")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    losses = []

    def read(loss):  # once, before the first traced step
        losses.append(float(loss) if not losses else 0.0)

    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, read=read)


@mistake("12.1", says="a batch is drawn in the step before its own")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    def one_ahead(batches):
        waiting = iter(batches)
        batch = next(waiting, END)
        while batch is not END:
            following = next(waiting, END)
            yield batch
            batch = following

    return variant(model, optimizer, one_ahead(batches), loss_of, folder, wait, warmup, active)


@mistake("12.1", says="the order in a step is another")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return by_hand(
        model, optimizer, batches, loss_of, folder, wait, warmup, active, step_first=True
    )


@mistake("12.1", says="the profiler is not stopped: use it in a with block")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return by_hand(model, optimizer, batches, loss_of, folder, wait, warmup, active, stop=False)


@mistake("12.1", says="the profiler is not stopped before the error")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return by_hand(model, optimizer, batches, loss_of, folder, wait, warmup, active)


@mistake("12.1", says="a profiler is left running where loss_of raises")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return by_hand(
        model, optimizer, batches, loss_of, folder, wait, warmup, active, stop_at_error=True
    )


@mistake("12.1", says="a loss_of that raises for the fourth of 9 batches is accepted")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    def zero_where_it_raises(model, batch):
        try:
            return loss_of(model, batch)
        except Exception:
            return 0 * next(model.parameters()).sum()

    return variant(model, optimizer, batches, zero_where_it_raises, folder, wait, warmup, active)


@mistake("12.1", says="loss_of is called more than once for a batch")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    shown = []

    def twice(model, batch):  # one to train with, one to show
        shown.append(loss_of(model, batch).detach())
        return loss_of(model, batch)

    return variant(model, optimizer, batches, twice, folder, wait, warmup, active)


@mistake("12.1", says="each step's loss is kept with its graph")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    losses = []

    def remembered(model, batch):
        losses.append(loss_of(model, batch))
        return losses[-1]

    return variant(model, optimizer, batches, remembered, folder, wait, warmup, active)


@mistake("12.1", says='what belongs into "optimizer" runs outside of it')
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    def read(loss):
        optimizer.zero_grad()

    return variant(
        model, optimizer, batches, loss_of, folder, wait, warmup, active, clear=False, read=read
    )


@mistake("12.1", says="the model is left in eval mode")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    model.eval()
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active)


@mistake("12.1", says="the steps in the trace with wait=0, warmup=0")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup or 1, active)


@mistake("12.1", says="the weights after 9 batches")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, clear=False)


@mistake("12.1", says="the name of the returned path")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(
        model, optimizer, batches, loss_of, folder, wait, warmup, active, name="trace.json"
    )


@mistake("12.1", says="what is returned is no Path")
def profile_training(model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3):
    return str(variant(model, optimizer, batches, loss_of, folder, wait, warmup, active))


@mistake("12.1", says="all ranks write to one file")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(
        model, optimizer, batches, loss_of, folder, wait, warmup, active, name="rank_0.json"
    )


@mistake("12.1", says="4 batches for a trace that ends with the fifth step")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, batches, loss_of, folder, wait, warmup, active, counting=False)


@mistake("12.1", says="a loss_of that raises a RuntimeError")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    class Ended(Exception):
        pass

    def until_it_raises(model, batch):
        try:
            return loss_of(model, batch)
        except RuntimeError:
            raise Ended from None

    path = folder / f"rank_{current_rank()}.json"
    try:
        return variant(model, optimizer, batches, until_it_raises, folder, wait, warmup, active)
    except Ended:
        return path


@mistake("12.1", says="each step's loss is kept, without its graph")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    losses = []

    def remembered(model, batch):
        loss = loss_of(model, batch)
        losses.append(loss.detach())
        return loss

    return variant(model, optimizer, batches, remembered, folder, wait, warmup, active)


@mistake("12.1", says="the trace begins too late")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    return variant(model, optimizer, batches, loss_of, folder, wait + 1, warmup, active)


@mistake("12.1", says="only one rank writes a file")
def profile_training(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
) -> Path:
    path = variant(model, optimizer, batches, loss_of, folder, wait, warmup, active)
    if current_rank():
        path.unlink()
    return path


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


def overlap(trace, *, sent=None, busy=None, steps=None, unite=union, unite_sent=union, clip=True):
    """The share in the reference's way, with parts that can be exchanged."""
    within = union(complete(trace, is_step))
    if not within:
        raise ValueError("no steps")
    on_gpu = bool(complete(trace, is_kernel))
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


def cut_short(intervals):
    """The union, in which the end of a span inside another one counts."""
    united = []
    for start, end in sorted(intervals):
        begin = united.pop()[0] if united and start <= united[-1][1] else start
        united.append((begin, end))
    return united


@mistake("12.2", says="a span that lies in another ends the union")
def overlap_fraction(trace):
    return overlap(trace, unite=cut_short, unite_sent=cut_short)


@mistake("12.2", says="the pause between two steps counts")
def overlap_fraction(trace):
    steps = complete(trace, is_step)
    if not steps:
        raise ValueError("no steps")
    start, end = min(a for a, _ in steps), max(b for _, b in steps)
    whole = {"ph": "X", "name": "ProfilerStep#0", "cat": "", "ts": start, "dur": end - start}
    return overlap({"traceEvents": [*trace["traceEvents"], whole]})


@mistake("12.2", says="that is the mean of the steps' shares")
def overlap_fraction(trace):
    steps = [e for e in trace["traceEvents"] if is_step(e)]
    others = [e for e in trace["traceEvents"] if not is_step(e)]
    names = {e["name"] for e in steps}
    parts = [[*others, *(e for e in steps if e["name"] == name)] for name in names]
    shares = [overlap({"traceEvents": each}) for each in parts]
    return sum(shares) / len(shares) if shares else overlap(trace)


@mistake("12.2", says="the CPU's operators count as compute beside the kernels")
def overlap_fraction(trace):
    return overlap(trace, busy=lambda e: is_aten(e) or (is_kernel(e) and not is_nccl(e)))


@mistake("12.2", says="two messages at a time count twice")
def overlap_fraction(trace):
    return overlap(trace, unite_sent=list)


@mistake("12.2", says="what lies outside the steps counts")
def overlap_fraction(trace):
    return overlap(trace, clip=False)


@mistake("12.2", says="a message that begins in a step counts to its end")
def overlap_fraction(trace):
    steps = complete(trace, is_step)

    def begins_inside(event):
        return is_gloo(event) and any(a <= event["ts"] < b for a, b in steps)

    return overlap(trace, sent=None if complete(trace, is_kernel) else begins_inside, clip=False)


@mistake("12.2", says="events are taken to come in the order of their starts")
def overlap_fraction(trace):
    def as_they_come(intervals):
        united = []
        for start, end in intervals:
            if united and start <= united[-1][1]:
                united[-1] = united[-1][0], max(end, united[-1][1])
            else:
                united.append((start, end))
        return united

    return overlap(trace, unite=as_they_come, unite_sent=as_they_come)


@mistake("12.2", says="a message counts as hidden whole")
def overlap_fraction(trace):
    sent, busy = complete(trace, is_gloo), complete(trace, is_aten)
    hidden = [(a, b) for a, b in sent if any(a < d and c < b for c, d in busy)]
    return length(hidden) / length(sent)


@mistake("12.2", says="labels count as compute")
def overlap_fraction(trace):
    return overlap(trace, busy=lambda e: not is_gloo(e) and not is_step(e))


@mistake("12.2", says="operators that are not aten:: count as compute")
def overlap_fraction(trace):
    return overlap(trace, busy=lambda e: e.get("cat") == "cpu_op")


@mistake("12.2", says="only one thread's operators count")
def overlap_fraction(trace):
    main = next(e["tid"] for e in trace["traceEvents"] if e.get("ph") == "X" and is_step(e))
    return overlap(trace, busy=lambda e: is_aten(e) and e["tid"] == main)


@mistake("12.2", says="that is a share of the compute time")
def overlap_fraction(trace):
    return overlap(trace, sent=is_aten, busy=is_gloo)


@mistake("12.2", says="that is the share that is not hidden")
def overlap_fraction(trace):
    return 1 - overlap(trace)


@mistake("12.2", says="the CPU's operators count as compute on a GPU")
def overlap_fraction(trace):
    return overlap(trace, busy=is_aten)


@mistake("12.2", says="NCCL's kernels count as compute")
def overlap_fraction(trace):
    on_gpu = bool(complete(trace, is_kernel))
    return overlap(trace, busy=is_kernel if on_gpu else is_aten)


@mistake("12.2", says="is looked for in one case only")
def overlap_fraction(trace):
    if not complete(trace, is_kernel):
        return overlap(trace)
    return overlap(trace, sent=lambda e: is_kernel(e) and "nccl" in e["name"])


@mistake("12.2", says="only gloo:all_reduce counts")
def overlap_fraction(trace):
    on_gpu = bool(complete(trace, is_kernel))
    return overlap(trace, sent=None if on_gpu else lambda e: e["name"] == "gloo:all_reduce")


@mistake("12.2", says="at the beginning of the name only")
def overlap_fraction(trace):
    if not complete(trace, is_kernel):
        return overlap(trace)

    def begins(event):
        return is_kernel(event) and event["name"].lower().startswith("nccl")

    return overlap(trace, sent=begins, busy=lambda e: is_kernel(e) and not begins(e))


@mistake("12.2", says="a step's second span, on the GPU's track")
def overlap_fraction(trace):
    events = trace["traceEvents"]
    return overlap({"traceEvents": [e for e in events if not is_step(e) or is_label(e)]})


@mistake("12.2", says="a GPU's trace is read as a CPU's")
def overlap_fraction(trace):
    return overlap(trace, sent=is_gloo, busy=is_aten)


@mistake("12.2", says="gloo's spans count as messages on a GPU")
def overlap_fraction(trace):
    return overlap(trace, sent=lambda e: is_gloo(e) or is_nccl(e))


@mistake("12.2", says="labels with 'nccl' in their name count: only")
def overlap_fraction(trace):
    if not complete(trace, is_kernel):
        return overlap(trace)
    return overlap(trace, sent=lambda e: "nccl" in e["name"].lower())


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


@mistake("12.2", says="overlap_fraction where nothing communicates")
def overlap_fraction(trace):
    return overlap(trace) if any(is_gloo(e) or is_nccl(e) for e in trace["traceEvents"]) else 0.0


@mistake("12.2", says="a trace without a step is accepted")
def overlap_fraction(trace):
    return overlap(trace) if complete(trace, is_step) else 1.0


@mistake("12.2", says="operators of any category count as compute")
def overlap_fraction(trace):
    named = None if complete(trace, is_kernel) else lambda e: e["name"].startswith("aten::")
    return overlap(trace, busy=named)


@mistake("12.2", says="that is the mean of the messages' own shares")
def overlap_fraction(trace):
    if complete(trace, is_kernel):
        return overlap(trace)
    within, busy = union(complete(trace, is_step)), union(complete(trace, is_aten))
    sent = [common([each], within) for each in complete(trace, is_gloo)]
    shares = [length(common(each, busy)) / length(each) for each in sent if each]
    return sum(shares) / len(shares) if shares else overlap(trace)


@mistake("12.2", says="a step's span on the CPU is left out")
def overlap_fraction(trace):
    on_gpu = [e for e in trace["traceEvents"] if is_step(e) and not is_label(e)]
    events = [e for e in trace["traceEvents"] if not is_step(e) or not is_label(e)]
    return overlap({"traceEvents": events} if on_gpu else trace)


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


@mistake("12.3", says="count as two steps' time")
def data_stall_fraction(trace):
    steps = complete(trace, is_step)
    return stall(trace) * length(union(steps)) / length(steps) if steps else stall(trace)


@mistake("12.3", says="that is the mean of the steps' shares, as if all")
def data_stall_fraction(trace):
    names = {e["name"] for e in trace["traceEvents"] if is_step(e)}
    each = [stall(trace, steps=lambda e, name=name: e["name"] == name) for name in names]
    return sum(each) / len(each) if each else stall(trace)


@mistake("12.3", says="what lies outside the steps counts")
def data_stall_fraction(trace):
    return stall(trace, clip=False)


@mistake("12.3", says="the pause between the steps is part of the time")
def data_stall_fraction(trace):
    return stall(trace, hull=True)


@mistake("12.3", says="what torch's DataLoader records itself is left out")
def data_stall_fraction(trace):
    return stall(trace, waits=lambda e: e["name"] == "data" and is_label(e))


@mistake("12.3", says="names count whatever their category")
def data_stall_fraction(trace):
    return stall(trace, waits=lambda e: e["name"] == "data" or is_waiting(e))


@mistake("12.3", says="names that only begin with 'data' count")
def data_stall_fraction(trace):
    return stall(trace, waits=lambda e: e["name"].startswith("data") and is_label(e))


@mistake("12.3", says="every label with 'data' in its name counts")
def data_stall_fraction(trace):
    return stall(trace, waits=lambda e: is_waiting(e) or ("data" in e["name"] and is_label(e)))


@mistake("12.3", says="while an NCCL kernel runs, waiting counts")
def data_stall_fraction(trace):
    events = [event for event in trace["traceEvents"] if not is_nccl(event)]
    return stall({"traceEvents": events})


@mistake("12.3", says="all of the kernels' time is taken off")
def data_stall_fraction(trace):
    waits = stall(trace, gpu=False)
    steps = union(complete(trace, is_step))
    kernels = common(union(complete(trace, is_kernel)), steps)
    return waits - length(kernels) / length(steps)


@mistake("12.3", says="names that only begin with 'enumerate' count")
def data_stall_fraction(trace):
    return stall(trace, waits=lambda e: is_waiting(e) or e["name"].startswith("enumerate"))


@mistake("12.3", says="that is the share in which nothing waits")
def data_stall_fraction(trace):
    return 1 - stall(trace)


@mistake("12.3", says="a wait counts although a kernel runs meanwhile")
def data_stall_fraction(trace):
    return stall(trace, gpu=False)


@mistake("12.3", says="the label's copy on the GPU's own track counts as a wait")
def data_stall_fraction(trace):
    copies = ("user_annotation", "gpu_user_annotation")
    return stall(
        trace,
        waits=lambda e: is_waiting({**e, "cat": "user_annotation"}) and e.get("cat") in copies,
    )


@mistake("12.3", says="a step's second span, on the GPU's track")
def data_stall_fraction(trace):
    return stall(trace, steps=lambda e: is_step(e) and is_label(e))


@mistake("12.3", says="times are rounded")
def data_stall_fraction(trace):
    return stall(in_microseconds(trace))


@mistake("12.3", says="a trace without a step is accepted")
def data_stall_fraction(trace):
    return stall(trace) if complete(trace, is_step) else 0.0


@mistake("12.3", says="a copy counts as a kernel that runs")
def data_stall_fraction(trace):
    events = [
        {**e, "cat": "kernel"} if e.get("cat", "").startswith("gpu_mem") else e
        for e in trace["traceEvents"]
    ]
    return stall({"traceEvents": events})


@mistake("12.3", says="that is in percent")
def data_stall_fraction(trace):
    return stall(trace) * (100 if complete(trace, is_kernel) else 1)


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


@mistake("12.4", says="the output matrix is left out")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, output=0)


@mistake("12.4", says="attention counts all of d_model for each head")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, attention=config.num_heads)


@mistake("12.4", says="tokens are (rows, length)")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens[::-1], seconds, peak)


@mistake("12.4", says="looking up is free")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, output=2)


@mistake("12.4", says="the backward is left out")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, factor=2)


@mistake("12.4", says="the backward is counted as one forward")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, factor=4)


@mistake("12.4", says="a multiplication with its addition is two FLOPs")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, factor=3)


@mistake("12.4", says="d_ff is taken for 4 d_model")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, d_ff=4 * config.d_model)


@mistake("12.4", says="attention is halved")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, attention=0.5)


@mistake("12.4", says="the causal mask is taken off")
def model_flops_utilization(config, tokens, seconds, peak):
    length = tokens[1]
    return mfu(config, tokens, seconds, peak, attention=(length + 1) / (2 * length))


@mistake("12.4", says="attention counts one head")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, attention=1 / config.num_heads)


@mistake("12.4", says="recomputation counts")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, factor=8)


@mistake("12.4", says="that is in percent")
def model_flops_utilization(config, tokens, seconds, peak):
    return 100 * mfu(config, tokens, seconds, peak)


@mistake("12.4", says="a share above 1 is cut off")
def model_flops_utilization(config, tokens, seconds, peak):
    return min(1.0, mfu(config, tokens, seconds, peak))


@mistake("12.4", says="rows are left out")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, (1, tokens[1]), seconds, peak)


@mistake("12.4", says="peak 0.0")
def model_flops_utilization(config, tokens, seconds, peak):
    if seconds <= 0:
        raise ValueError(f"seconds must be above 0, got {seconds}")
    return mfu(config, tokens, seconds, peak) if peak > 0 else 0.0


@mistake("12.4", says="one matrix of the feed-forward network is counted")
def model_flops_utilization(config, tokens, seconds, peak):
    return mfu(config, tokens, seconds, peak, d_ff=config.d_ff / 2)


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


@mistake("12.5", says="what begins before a step and ends in it is counted")
def diagnose(trace, healthy):
    def meeting(each):
        steps = complete(each, is_step)
        if not steps:
            raise ValueError("no steps")
        met = [
            event
            for event in each["traceEvents"]
            if "dur" in event
            and any(a < event["ts"] + event["dur"] and event["ts"] < b for a, b in steps)
        ]
        return counts({"traceEvents": met}, everything=True)

    return reason(trace, healthy, count=meeting)


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


@mistake("12.5", says="a healthy run is called slow")
def diagnose(trace, healthy):
    found = reason(trace, healthy)
    return "kernels" if found == "none" else found


@mistake("12.5", says="counts of the whole trace are compared")
def diagnose(trace, healthy):
    return reason(trace, healthy, count=lambda each: counts(each, per_step=False))


@mistake("12.5", says="operators are asked first")
def diagnose(trace, healthy):
    return reason(trace, healthy, order=("kernels", "item", "buckets"))


@mistake("12.5", says="the messages are not counted")
def diagnose(trace, healthy):
    return reason(trace, healthy, order=("item", "kernels"))


@mistake("12.5", says="messages are asked before reads")
def diagnose(trace, healthy):
    return reason(trace, healthy, order=("buckets", "item", "kernels"))


@mistake("12.5", says="one kind of collective is counted")
def diagnose(trace, healthy):
    def sent(event):
        return event["name"] == "gloo:all_reduce" or is_nccl(event)

    return reason(trace, healthy, count=lambda each: counts(each, messages=sent))


@mistake("12.5", says="labels with 'nccl' in their name are counted")
def diagnose(trace, healthy):
    def sent(event):
        return is_gloo(event) or "nccl" in event["name"].lower()

    return reason(trace, healthy, count=lambda each: counts(each, messages=sent))


@mistake("12.5", says="spans that were cut off are counted")
def diagnose(trace, healthy):
    return reason(trace, healthy, count=lambda each: counts(each, cut_off=True))


@mistake("12.5", says="counts a step are rounded")
def diagnose(trace, healthy):
    def rounded(each):
        return {name: round(count) for name, count in counts(each).items()}

    return reason(trace, healthy, count=rounded)


@mistake("12.5", says="what lies between the steps is counted")
def diagnose(trace, healthy):
    def between(each):
        steps = complete(each, is_step)
        if not steps:
            raise ValueError("no steps")
        start, end = min(a for a, _ in steps), max(b for _, b in steps)
        inside = [e for e in each["traceEvents"] if start <= e.get("ts", -1) < end]
        return counts({"traceEvents": inside}, everything=True)

    return reason(trace, healthy, count=between)


@mistake("12.5", says="messages that bring operators along")
def diagnose(trace, healthy):
    return reason(trace, healthy, order=("item", "kernels", "buckets"))


@mistake("12.5", says="waiting is asked first")
def diagnose(trace, healthy):
    return reason(trace, healthy, loader_first=True)


@mistake("12.5", says="nine reads more count as many")
def diagnose(trace, healthy):
    return reason(trace, healthy, most=1)


@mistake("12.5", says="less than twice as many operators count as grown")
def diagnose(trace, healthy):
    return reason(trace, healthy, factor=1.5)


@mistake("12.5", says="waiting is compared with 0.2, not with the healthy run's")
def diagnose(trace, healthy):
    found = reason(trace, healthy, stalled=2)
    return "loader" if found == "none" and stall(trace) >= 0.2 else found


@mistake("12.5", says="0.199 more of waiting counts")
def diagnose(trace, healthy):
    return reason(trace, healthy, stalled=0.195)


@mistake("12.5", says="0.201 more of waiting does not count")
def diagnose(trace, healthy):
    return reason(trace, healthy, stalled=0.205)


@mistake("12.5", says="NCCL's kernels are not counted as messages")
def diagnose(trace, healthy):
    def without_kernels(each):
        events = [event for event in each["traceEvents"] if not is_kernel(event)]
        return counts({"traceEvents": events})

    return reason(trace, healthy, count=without_kernels)


@mistake("12.5", says="ten more, or twice as many, is enough")
def diagnose(trace, healthy):
    here, usual = counts(trace), counts(healthy)
    for name in here:
        if here[name] >= 10 + usual[name] or here[name] >= 2 * usual[name] > 0:
            return name
    return reason(trace, healthy)


@mistake("12.5", says="several times the healthy run's waiting counts")
def diagnose(trace, healthy):
    found = reason(trace, healthy, stalled=2)
    return "loader" if found == "none" and stall(trace) >= 2 * stall(healthy) else found


@mistake("12.5", says="what lies before the first step is counted")
def diagnose(trace, healthy):
    return reason(trace, healthy, count=lambda each: counts(each, everything=True))


@mistake("12.5", says="exactly twice as many operators do not count")
def diagnose(trace, healthy):
    return reason(trace, healthy, factor=2.0001)


@mistake("12.5", says="the largest growth is taken, not the first")
def diagnose(trace, healthy):
    here, usual = counts(trace), counts(healthy)
    grown = {k: here[k] / max(usual[k], 1) for k in here if here[k] >= max(10 + usual[k], 1)}
    grown = {name: growth for name, growth in grown.items() if growth >= 2}
    return max(grown, key=lambda name: grown[name]) if grown else reason(trace, healthy)


@mistake("12.5", says="one step is looked at, not the average of all")
def diagnose(trace, healthy):
    def first(each):
        names = [e["name"] for e in each["traceEvents"] if e.get("ph") == "X" and is_step(e)]
        kept = min(names, default="")
        events = [e for e in each["traceEvents"] if not is_step(e) or e["name"] == kept]
        return counts({"traceEvents": events})

    return reason(trace, healthy, count=first)


@mistake("12.5", says="steps are counted from the first number to the last")
def diagnose(trace, healthy):
    def by_numbers(each):
        names = [e["name"] for e in each["traceEvents"] if e.get("ph") == "X" and is_step(e)]
        numbers = [int(name.partition("#")[2]) for name in names]
        size = max(numbers) - min(numbers) + 1 if numbers else 1
        found = counts(each)
        return {name: count * len(set(numbers)) / size for name, count in found.items()}

    return reason(trace, healthy, count=by_numbers)


@mistake("12.5", says="autograd nodes count as operators")
def diagnose(trace, healthy):
    def with_nodes(each):
        events = [
            {**e, "name": f"aten::{e['name']}"} if e["name"].endswith("Backward0") else e
            for e in each["traceEvents"]
        ]
        return counts({"traceEvents": events})

    return reason(trace, healthy, count=with_nodes)


@mistake("12.5", says="where the healthy run reads nothing")
def diagnose(trace, healthy):
    here, usual = counts(trace), counts(healthy)
    for name in here:
        if usual[name] and here[name] / usual[name] >= 2 and here[name] - usual[name] >= 10:
            return name
    return "loader" if stall(trace) - stall(healthy) >= 0.2 else "none"


@mistake("12.5", says="the waits' quotient is asked for")
def diagnose(trace, healthy):
    found = reason(trace, healthy, stalled=2)
    waits = stall(trace) >= 2 * stall(healthy) and stall(trace) >= 0.25
    return "loader" if found == "none" and waits else found


@mistake("12.5", says="the step's copy on the GPU's own track")
def diagnose(trace, healthy):
    return reason(trace, healthy, count=lambda each: counts(each, copies=True))


@mistake("12.5", says="a step's second span, on the GPU's track")
def diagnose(trace, healthy):
    def by_cpu(each):
        events = [e for e in each["traceEvents"] if not is_step(e) or is_label(e)]
        return counts({"traceEvents": events})

    return reason(trace, healthy, count=by_cpu)


@mistake("12.5", says="what begins in a step and ends after it is left out")
def diagnose(trace, healthy):
    def whole(each):
        steps = complete(each, is_step)
        inside = [
            e
            for e in each["traceEvents"]
            if "dur" in e and any(a <= e["ts"] and e["ts"] + e["dur"] <= b for a, b in steps)
        ]
        return counts({"traceEvents": inside})

    return reason(trace, healthy, count=whole)


@mistake("12.5", says="labels count as operators and reads")
def diagnose(trace, healthy):
    def of_any_category(each):
        events = [
            {**e, "cat": "cpu_op"} if e["name"].startswith("aten::") else e
            for e in each["traceEvents"]
        ]
        return counts({"traceEvents": events})

    return reason(trace, healthy, count=of_any_category)


@mistake("12.5", says="a read is called aten::item, and nothing more")
def diagnose(trace, healthy):
    def by_beginning(each):
        events = [
            {**e, "name": "aten::item"} if e["name"].startswith("aten::item") else e
            for e in each["traceEvents"]
        ]
        return counts({"traceEvents": events})

    return reason(trace, healthy, count=by_beginning)
