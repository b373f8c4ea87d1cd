"""Right answers to lesson 12 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import bisect
import collections
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

# 12.1


def starts_and_stops(model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3):
    """start(), step() and stop() without a with block; the labels are entered by hand."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(folder, f"rank_{rank}.json")
    profiler = profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    )
    needed, seen, iterator = wait + warmup + active, 0, iter(batches)
    profiler.start()
    try:
        while True:
            try:
                with record_function("data"):
                    batch = next(iterator)
            except StopIteration:
                break
            with record_function("forward"):
                loss = loss_of(model, batch)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            seen += 1
            profiler.step()
    finally:
        profiler.stop()
    if seen < needed:
        raise ValueError(f"{seen} batches are too few: {needed} are needed")
    return path


def rest_without_profiler(
    model, optimizer, batches, loss_of, folder, *, wait=1, warmup=1, active=3
):
    """Profile the first steps, then train on without the profiler."""
    number = dist.get_rank() if dist.is_initialized() else 0
    path, total, iterator = folder / f"rank_{number}.json", wait + warmup + active, iter(batches)

    def step(batch):
        with record_function("forward"):
            loss = loss_of(model, batch)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))) as prof:
        for made in range(total):
            with record_function("data"):
                batch = next(iterator, None)
            if batch is None:
                raise ValueError(f"got {made} batches, {total} are needed")
            step(batch)
            prof.step()
    for batch in iterator:
        step(batch)
    return path


# 12.2 and 12.3


def edges(trace, **kinds):
    """Every moment at which something begins or ends, with what runs until the next."""
    changes = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("dur") is None:
            continue
        for kind, wanted in kinds.items():
            if wanted(event["name"], event.get("cat", "")):
                changes += [(event["ts"], kind, 1), (event["ts"] + event["dur"], kind, -1)]
    changes.sort(key=lambda change: change[0])
    running = dict.fromkeys(kinds, 0)
    for (at, kind, change), (after, _, _) in itertools.pairwise(changes):
        running[kind] += change
        if after > at:
            yield after - at, {name for name, count in running.items() if count > 0}


def has_kernels(trace):
    """Whether a GPU was at work."""
    return any(event.get("cat") == "kernel" and "dur" in event for event in trace["traceEvents"])


def swept_overlap(trace):
    """One sweep over all beginnings and ends."""
    gpu = has_kernels(trace)

    def sent(name, cat):
        return (cat == "kernel" and "nccl" in name.casefold()) if gpu else name[:5] == "gloo:"

    def busy(name, cat):
        if gpu:
            return cat == "kernel" and "nccl" not in name.casefold()
        return cat == "cpu_op" and name[:6] == "aten::"

    parts = list(edges(trace, step=is_step, sent=sent, busy=busy))
    labels = any(event["name"][:5] == "nccl:" for event in trace["traceEvents"])
    if (labels and not gpu) or not any("step" in running for _, running in parts):
        raise ValueError("no ProfilerStep in this trace, or no kernels")
    total = sum(time for time, running in parts if {"step", "sent"} <= running)
    hidden = sum(time for time, running in parts if {"step", "sent", "busy"} <= running)
    return 1.0 if total == 0 else hidden / total


def is_step(name, category):
    """Whether it is a step."""
    return name.startswith("ProfilerStep#")


def swept_stall(trace):
    """The same sweep: moments of steps in which something waits and no kernel runs."""

    def waits(name, cat):
        return cat == "user_annotation" and (
            name == "data" or name.startswith("enumerate(DataLoader)")
        )

    def runs(name, cat):
        return cat == "kernel"

    parts = list(edges(trace, step=is_step, waits=waits, runs=runs))
    total = sum(time for time, running in parts if "step" in running)
    if not total:
        raise ValueError("nobody called profiler.step()")
    return sum(time for time, running in parts if {"step", "waits"} == running) / total


def gridded_overlap(trace):
    """By sorted borders and a tensor of what covers each piece between two of them."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    borders = sorted({t for e in events for t in (e["ts"], e["ts"] + e["dur"])})
    place = {t: number for number, t in enumerate(borders)}
    lengths = torch.tensor([b - a for a, b in itertools.pairwise(borders)], dtype=torch.float64)

    def covered(wanted):
        rows = torch.zeros(len(lengths), dtype=torch.bool)
        for e in filter(wanted, events):
            rows[place[e["ts"]] : place[e["ts"] + e["dur"]]] = True
        return rows

    kernel = [e for e in events if e.get("cat") == "kernel"]
    nccl = [e for e in kernel if "nccl" in e["name"].lower()]
    steps = covered(lambda e: "ProfilerStep#" in e["name"])
    labels = covered(lambda e: e["name"].startswith("nccl:")).any()
    if not steps.any() or (labels and not kernel):
        raise ValueError("no step, or labels without kernels")
    if kernel:
        sent, busy = covered(lambda e: e in nccl), covered(lambda e: e in kernel and e not in nccl)
    else:
        sent = covered(lambda e: e["name"].startswith("gloo:"))
        busy = covered(lambda e: e.get("cat") == "cpu_op" and e["name"].startswith("aten::"))
    sent &= steps
    total = lengths[sent].sum()
    return (lengths[sent & busy].sum() / total).item() if total > 0 else 1.0


def summed_by_step(trace):
    """Between each two neighbouring borders the same things run: add up the pieces."""
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]

    def during(a, b, wanted):
        return any(e["ts"] <= a and b <= e["ts"] + e["dur"] for e in spans if wanted(e))

    def waits(e):
        named = e["name"] == "data" or e["name"].startswith("enumerate(DataLoader)")
        return named and e.get("cat") == "user_annotation"

    borders = sorted({t for e in spans for t in (e["ts"], e["ts"] + e["dur"])})
    total = waited = 0
    for a, b in itertools.pairwise(borders):
        if during(a, b, lambda e: e["name"].startswith("ProfilerStep#")):
            total += b - a
            kernel = during(a, b, lambda e: e.get("cat") == "kernel")
            waited += (b - a) * (during(a, b, waits) and not kernel)
    if total == 0:
        raise ValueError("a trace without steps")
    return waited / total


# 12.4


def matrix_by_matrix(config, tokens, seconds, peak):
    """Forward product by product, then three times that; the error does not repeat the value."""
    if not seconds > 0 or not peak > 0:
        raise ValueError("seconds and peak must be positive")
    B, T = tokens
    D, F = config.d_model, config.d_ff

    def product(n, k, m):
        return 2 * n * k * m

    layer = 4 * product(B * T, D, D) + product(B * T, D, F) + product(B * T, F, D)
    heads = config.num_heads * B
    layer += product(T, D // config.num_heads, T) * heads * 2
    forward = config.num_layers * layer + product(B * T, D, config.vocab_size)
    return 3 * forward / seconds / peak


def by_the_papers_formula(config, tokens, seconds, peak):
    """6 N + 12 L H Q T a token, N without embeddings, biases and norms."""
    if seconds <= 0 or peak <= 0:
        raise ValueError(f"a step of {seconds} seconds, a peak of {peak}")
    L, D = config.num_layers, config.d_model
    N = L * (4 * D**2 + 2 * D * config.d_ff) + D * config.vocab_size
    a_token = 6 * N + 12 * L * config.num_heads * config.head_dim * tokens[1]
    return tokens[0] * tokens[1] * a_token / (peak * seconds)


# 12.5


def by_a_table(trace, healthy):
    """A table of three counts for both runs, then the first that has grown."""

    def table(each):
        events = [e for e in each["traceEvents"] if e.get("ph") == "X" and "dur" in e]
        steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
        if not steps:
            raise ValueError("no step in the trace")
        number = len({e["name"] for e in steps})
        rows = {"item": 0, "buckets": 0, "kernels": 0}
        for e in events:
            if all(not s["ts"] <= e["ts"] < s["ts"] + s["dur"] for s in steps):
                continue
            op = e.get("cat") == "cpu_op" and e["name"]
            rows["item"] += op == "aten::item"
            rows["kernels"] += str(op).startswith("aten::")
            nccl = e.get("cat") == "kernel" and "nccl" in e["name"].lower()
            rows["buckets"] += nccl or e["name"].startswith("gloo:")
        return {name: count / number for name, count in rows.items()}

    slow, fine = table(trace), table(healthy)
    grown = [k for k in slow if slow[k] >= 2 * fine[k] and slow[k] >= fine[k] + 10]
    if grown:
        return grown[0]
    return "loader" if swept_stall(trace) >= swept_stall(healthy) + 0.2 else "none"


def by_ratios(trace, healthy):
    """Ratios and differences side by side; bisection tells what begins within a step."""
    both = []
    for each in (trace, healthy):
        events = [e for e in each["traceEvents"] if e.get("ph") == "X" and "dur" in e]
        steps = sorted(
            (e["ts"], e["ts"] + e["dur"], e["name"])
            for e in events
            if e["name"].startswith("ProfilerStep#")
        )
        if not steps:
            raise ValueError("no steps")
        starts = [start for start, _, _ in steps]
        found = collections.Counter()
        for e in events:
            number = bisect.bisect_right(starts, e["ts"]) - 1
            if number >= 0 and e["ts"] < steps[number][1]:
                op = e.get("cat") == "cpu_op"
                found["operators"] += op and e["name"].startswith("aten::")
                found["reads"] += op and e["name"] == "aten::item"
                kernel = e.get("cat") == "kernel" and "nccl" in e["name"].lower()
                found["messages"] += kernel or e["name"].startswith("gloo:")
        both.append({k: v / len({name for _, _, name in steps}) for k, v in found.items()})
    words = {"reads": "item", "messages": "buckets", "operators": "kernels"}
    for kind, word in words.items():
        a, b = (counts.get(kind, 0) for counts in both)
        if a - b >= 10 and (b == 0 or a / b >= 2):
            return word
    return "none" if swept_stall(trace) - swept_stall(healthy) < 0.2 else "loader"


ALTERNATIVES = {
    "12.1": [starts_and_stops, rest_without_profiler],
    "12.2": [swept_overlap, gridded_overlap],
    "12.3": [swept_stall, summed_by_step],
    "12.4": [matrix_by_matrix, by_the_papers_formula],
    "12.5": [by_a_table, by_ratios],
}
