"""States of pictures by a run: engines on forked ranks, watched, when the book is built."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.book.clock import Clock
from shared.book.film import BLUE_LIGHT, EMPTY, Film, around, first_of, kib, one_picture, runs
from shared.book.planned import State
from shared.ddp.averaging import average_flat
from shared.measuring.traffic import Traffic, count_traffic
from shared.plots import ORANGE, SKY, VERMILION
from shared.sharding.counting import ring_bytes
from shared.tensor_parallel.conjugates import copy_to_ranks, sum_over_ranks
from shared.tensor_parallel.linears import ColumnParallelLinear, RowParallelLinear

# DDP

DDP_CHOICES = ((4, 6, 8), (4, 8, 16, 1024))  # layers, KiB of a bucket
DDP_CELLS = {"own": ORANGE, "sent": VERMILION, "mean": SKY}
SQUARE = 4 * 32 * 32  # bytes of a layer


def ddp_step(ranks: int, layers: int, bucket_kib: int, link: str = "fast") -> State:
    """A step under torch's DDP: which gradients are there, which travel, which are means."""
    recorded = runs(_ddp_rank, ranks, DDP_CHOICES)[layers, bucket_kib]
    assert all(events == recorded[0] for events in recorded), recorded
    events, clock = recorded[0], Clock(link)
    sizes = [SQUARE * len(which) for kind, which in events if kind == "sent"]
    moments, ready = _ddp_moments(events, clock)
    shown = [[EMPTY] * layers for _ in range(ranks)]
    frames, everybody = [[list(row) for row in shown]], "+".join(map(str, range(ranks)))
    for _, kind, which, _ in moments:
        for rank, row in enumerate(shown):
            for n in which:
                row[n] = [f"{kind} {everybody if kind == 'mean' else rank}", DDP_CELLS[kind]]
        frames.append([list(row) for row in shown])
    says = ["Forward is over; no gradient is there yet.", *(words for *_, words in moments)]
    return {
        "rows": [f"rank {r}" for r in range(ranks)],
        "columns": [f"layer {n}" for n in range(layers)],
        "frames": frames,
        "says": says,
        "begins": first_of(says, "is sent"),
        "numbers": {
            "messages": len(sizes),
            "bytes of each": ", ".join(kib(size) for size in sizes),
            "gradients that are there when the first is sent": ready[0],
            "messages sent before the last gradient is there": sum(n < layers for n in ready),
            "of the messages' time behind backward": f"{clock.hidden():.0%}",
        },
        "moves": ["", *("*" * (kind == "mean") for _, kind, *_ in moments)],
        "places": around(ranks),
        "slots": ranks,
        "piece": kib(SQUARE),
        "legend": "A band is a rank's own gradient; all bands: the mean.",
        "lanes": clock.lanes([0.0, *(time for time, *_ in moments)]),
    }


Moment = tuple[float, str, list[int], str]  # when, what, of which layers, in words


def _ddp_moments(
    events: list[tuple[str, list[int]]], clock: Clock
) -> tuple[list[Moment], list[int]]:
    """Events and arrivals by time, and how many gradients were there at each message."""
    moments, ready, arrivals, there = list[Moment](), list[int](), list[Moment](), 0
    for kind, which in events:
        names = _list(which)
        if kind == "own":
            there += 1
            clock.compute(1.0, names, f"backward of layer {names}")
            moments.append(
                (clock.now, kind, which, f"Backward: layer {names}'s gradient is there.")
            )
            continue
        ready.append(there)
        waits = " It waits for the one before." if clock.free > clock.now else ""
        says = f"The bucket of layers {names} is sent.{waits}"
        moments.append((clock.now, kind, which, says))
        there_at = clock.send(SQUARE * len(which), names, f"message of layers {names}")
        arrivals.append((there_at, "mean", which, f"Layers {names}: the mean is on every rank."))
    *others, (time, kind, which, says) = arrivals
    last = (time, kind, which, f"{says} All have arrived: backward() returns.")
    return sorted([*moments, *others, last], key=lambda moment: moment[0]), ready


def _ddp_rank(layers: int, bucket_kib: int) -> list[tuple[str, list[int]]]:
    """In the order of a rank: "own", a layer's gradient is there; "sent", a bucket's layers."""
    linears = [nn.Linear(32, 32, bias=False) for _ in range(layers)]
    model = DistributedDataParallel(nn.Sequential(*linears), bucket_cap_mb=bucket_kib / 1024)
    place = {id(layer.weight): n for n, layer in enumerate(linears)}
    events = list[tuple[str, list[int]]]()

    def on_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append(("sent", sorted(place[id(p)] for p in bucket.parameters())))
        assert bucket.buffer().nbytes == SQUARE * len(events[-1][1])
        return dist.all_reduce(bucket.buffer().div_(ranks), async_op=True).get_future().then(_first)

    ranks = dist.get_world_size()
    model.register_comm_hook(None, on_bucket)
    for layer in linears:
        layer.weight.register_post_accumulate_grad_hook(
            lambda parameter: events.append(("own", [place[id(parameter)]]))
        )
    for _ in range(2):  # the first step is in the order of the model, and buckets are made anew
        events.clear()
        model(torch.randn(4, 32)).square().mean().backward()
    return events


def _first(future: torch.futures.Future[Any]) -> Tensor:
    return future.value()[0]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# Tensor parallelism

PARTS = {"whole": SKY, "columns": BLUE_LIGHT, "rows": BLUE_LIGHT, "a part of the sum": ORANGE}


TP_CHOICES = ((4, 64, 1024), (8, 32, 128))  # tokens, d_model


def tensor_parallel_step(ranks: int, tokens: int, d_model: int) -> State:
    """Two linear layers cut by columns, then by rows: what each rank has, and two messages."""
    recorded = runs(_tensor_parallel_rank, ranks, TP_CHOICES)[tokens, d_model]
    _, forward, backward, data_parallel = recorded[0]
    rows = [f"rank {r}" for r in range(ranks)]
    state = one_picture([each[0] for each in recorded], rows, "Forward: ")
    sides = [math.log2(size) for size in (tokens, d_model, 4 * d_model)]
    scale = min(300 / (3 * sides[1] + 2 * sides[2]), 80 / max(sides))
    t, d, f = (round(scale * side) for side in sides)
    return state | {
        "columns": ["X", "A", "gelu(X A)", "B", "Y"],
        "moves": ["*" * (" message, an all-reduce" in says) for says in state["says"]],
        "places": [(0, rank) for rank in range(ranks)],
        "cuts": ["", "columns", "columns", "rows", ""],
        "sum": PARTS["a part of the sum"],
        "shapes": [(d, t), (f, d), (f, t), (d, f), (d, t)],  # wide and high
        "legend": "Sides by their logarithms. Filled: what a rank has; pale: a part of the sum.",
        "numbers": {
            "all-reduces in forward, in backward": f"{forward.count('all_reduce')},"
            f" {backward.count('all_reduce')}",
            "a rank sends for them, round a ring": kib(ring_bytes(forward) + ring_bytes(backward)),
            "data parallel would send, for the same weights": kib(ring_bytes(data_parallel)),
            "weights of a rank": kib(4 * 8 * d_model * d_model / ranks),
        },
    }


def _tensor_parallel_rank(tokens: int, d_model: int) -> tuple[Film, Traffic, Traffic, Traffic]:
    torch.manual_seed(0)
    first, second = (nn.Linear(d_model, 4 * d_model, False), nn.Linear(4 * d_model, d_model, False))
    x = torch.randn(tokens, d_model, requires_grad=True)
    whole = second(F.gelu(first(x)))
    film, shown = Film(), [EMPTY] * 5

    def show(place: int, tensor: Tensor, how: str, says: str) -> None:
        shown[place] = [f"{'x'.join(map(str, tensor.shape))} {how}", PARTS[how]]
        film.shoot([list(shown)], says)

    def enter(x: Tensor, group: Any) -> Tensor:
        x = copy_to_ranks(x, group)
        x.register_hook(lambda g: show(0, g, "a part of the sum", SAYS["dx"]))
        return x

    def leave(part: Tensor, group: Any) -> Tensor:
        show(4, part, "a part of the sum", SAYS["part"])
        y = sum_over_ranks(part, group)
        y.register_hook(lambda g: show(4, g, "whole", SAYS["dy"]))
        return y

    column, row = ColumnParallelLinear(first, None, enter), RowParallelLinear(second, None, leave)
    show(0, x, "whole", "Each rank has the whole input X.")
    show(1, column.weight.T, "columns", "A is cut by its columns: a part on each rank.")
    show(3, row.weight.T, "rows", "B is cut by its rows, the same numbers as A's columns.")
    with count_traffic() as forward:
        hidden = F.gelu(column(x))
        show(2, hidden, "columns", "Forward: each rank has its columns of gelu(X A). Nothing sent.")
        y = row(hidden)
        show(4, y, "whole", "The first message, an all-reduce: Y is whole on every rank.")
    torch.testing.assert_close(y, whole)
    shown[:] = [EMPTY, shown[1], EMPTY, shown[3], EMPTY]
    hidden.register_hook(lambda g: show(2, g, "columns", SAYS["dh"]))
    with count_traffic() as backward:
        (given,) = torch.autograd.grad(y.square().sum(), x)
    show(0, given, "whole", "The second message, an all-reduce: X's gradient is whole.")
    torch.testing.assert_close(given, torch.autograd.grad(whole.square().sum(), x)[0])
    with count_traffic() as data_parallel:
        average_flat([first.weight.detach(), second.weight.detach()])
    return film, forward, backward, data_parallel


SAYS = {
    "part": "Each rank's rows of B give a product of the whole shape: a part of the sum.",
    "dy": "Backward: the gradient of Y is whole on every rank.",
    "dh": "Each rank has its columns of the gradient. Nothing is sent.",
    "dx": "Each rank's gradient of X is a part of the sum.",
}
