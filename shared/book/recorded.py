"""States of pictures by a run: engines on forked ranks, watched, when the book is built."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.book.film import BLUE_LIGHT, EMPTY, Film, Row, kib, one_picture, runs
from shared.book.planned import State
from shared.ddp.averaging import average_flat
from shared.measuring.traffic import Traffic, count_traffic
from shared.plots import ORANGE, SKY, VERMILION
from shared.sharding.counting import ring_bytes
from shared.sharding.fully_shard import FullyShard
from shared.sharding.prefetch import PrefetchingShard
from shared.tensor_parallel.conjugates import copy_to_ranks, sum_over_ranks
from shared.tensor_parallel.linears import ColumnParallelLinear, RowParallelLinear

# DDP


DDP_CHOICES = ((4, 6, 8), (4, 8, 16, 1024))  # layers, KiB of a bucket


def ddp_step(ranks: int, layers: int, bucket_kib: int) -> State:
    """A step under torch's DDP: which gradients are there, which travel, which are means."""
    recorded = runs(_ddp_rank, ranks, DDP_CHOICES)[layers, bucket_kib]
    film, sizes, before_last = recorded[0][0], recorded[0][1], recorded[0][2]
    rows = [f"rank {r}" for r in range(ranks)]
    state = one_picture([each[0] for each in recorded], rows, "is sent")
    there = sum("gradient is there." in says for says in film.says[: state["begins"]])
    return state | {
        "columns": [f"layer {n}" for n in range(layers)],
        "numbers": {
            "messages": len(sizes),
            "bytes of each": ", ".join(kib(size) for size in sizes),
            "gradients that are there when the first is sent": there,
            "messages sent before the last gradient is there": before_last,
        },
    }


def _ddp_rank(layers: int, bucket_kib: int) -> tuple[Film, list[int], int]:
    linears = [nn.Linear(32, 32, bias=False) for _ in range(layers)]
    model = DistributedDataParallel(nn.Sequential(*linears), bucket_cap_mb=bucket_kib / 1024)
    place = {id(layer.weight): n for n, layer in enumerate(linears)}
    shown, film, sizes, ready = [EMPTY] * layers, Film(), list[int](), list[int]()

    def show(which: list[int], cell: list[str], says: str) -> None:
        for n in which:
            shown[n] = cell
        film.shoot([list(shown)], says)

    def on_gradient(parameter: nn.Parameter) -> None:
        n = place[id(parameter)]
        ready.append(len(sizes))
        show([n], ["own", ORANGE], f"backward: layer {n}'s gradient is there.")

    def on_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        whose = sorted(place[id(p)] for p in bucket.parameters())
        sizes.append(bucket.buffer().nbytes)
        show(whose, ["sent", VERMILION], f"The bucket of layers {_list(whose)} is sent.")
        return dist.all_reduce(bucket.buffer().div_(ranks), async_op=True).get_future().then(_first)

    ranks = dist.get_world_size()
    model.register_comm_hook(None, on_bucket)
    for layer in linears:
        layer.weight.register_post_accumulate_grad_hook(on_gradient)
    for _ in range(2):  # the first step is in the order of the model, and buckets are made anew
        film, shown = Film(), [EMPTY] * layers
        sizes.clear()
        ready.clear()
        film.shoot([list(shown)], "Forward is over; no gradient is there yet.")
        model(torch.randn(4, 32)).square().mean().backward()
        show(
            list(range(layers)),
            ["mean", SKY],
            "backward() returns when all messages have arrived: each gradient is the mean.",
        )
    return film, sizes, ready[-1]


def _first(future: torch.futures.Future[Any]) -> Tensor:
    return future.value()[0]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# Full sharding


FSDP_CHOICES = ((2, 4), ("freed", "kept"), ("no", "yes"))


def fsdp_step(ranks: int, layers: int, after_forward: str, prefetch: str) -> State:
    """A step under the course's FullyShard: which rank has which unit at which moment."""
    recorded = runs(_fsdp_rank, ranks, FSDP_CHOICES)[layers, after_forward, prefetch]
    traffic, most = recorded[0][1:]
    rows = [f"rank {r} {kind}" for r in range(ranks) for kind in ("weights", "gradients")]
    state = one_picture([each[0] for each in recorded], rows, "whole gradient")
    return state | {
        "columns": [f"unit {n}" for n in range(layers)],
        "numbers": {
            "all-gathers": traffic.count("all_gather"),
            "reduce-scatters": traffic.count("reduce_scatter"),
            "a rank sends, round a ring": kib(ring_bytes(traffic)),
            "units whole at once, at most": most,
        },
    }


def _fsdp_rank(layers: int, after_forward: str, prefetch: str) -> tuple[Film, Traffic, int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))
    kind = PrefetchingShard if prefetch == "yes" else FullyShard
    sharded = kind(model, reshard_after_forward=after_forward == "freed")
    film, phase, most = Film(), ["forward"], [0]
    shard = f"{rank + 1}/{ranks}"

    def cells() -> list[Row]:
        weights, gradients = [], []
        for unit in sharded.units:
            whole = ["arriving", VERMILION] if unit.is_on_its_way else ["whole", SKY]
            weights.append(whole if unit.is_whole else [shard, BLUE_LIGHT])
            gradients.append(_gradient(unit, shard))
        most[0] = max(most[0], sum(unit.is_whole for unit in sharded.units))
        return [weights, gradients]

    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for number, unit in enumerate(sharded.units):
        for name, says in WATCHED.items():
            _watch(
                unit,
                name,
                lambda n=number, s=says: film.shoot(cells(), f"{phase[0]}: unit {n} {s}"),
            )
    for _ in range(2):  # prefetch follows the order of the step before
        film, phase[0], most[0] = Film(), "forward", 0
        film.shoot(cells(), "Between two steps each rank has its shard of every unit.")
        with count_traffic() as traffic:
            loss = sharded(torch.randn(4, 32)).square().mean()
            phase[0] = "backward"
            loss.backward()
            sharded.finish_gradient_sync()
        film.shoot(cells(), "The optimizer updates each rank's shards by their own gradients.")
        optimizer.step()
        optimizer.zero_grad()
    return film, traffic, most[0]


def _watch(unit: Any, name: str, after: Callable[[], None]) -> None:
    """Call `after` whenever the unit's method has done its work."""
    original = getattr(unit, name)

    def watched(*args: Any) -> Any:
        result = original(*args)
        after()
        return result

    setattr(unit, name, watched)


WATCHED = {
    "gather": "is being gathered.",
    "wait": "is whole.",
    "free": "is freed: each rank has its shard.",
    "reduce": "has its whole gradient, which is reduce-scattered.",
    "finish": "has its mean gradient, a shard on each rank.",
}


def _gradient(unit: Any, shard: str) -> list[str]:
    if unit._reducing is not None:
        return ["sent", VERMILION]
    return EMPTY if unit.shard.grad is None else [shard, ORANGE]


# Tensor parallelism

PARTS = {"whole": SKY, "columns": BLUE_LIGHT, "rows": BLUE_LIGHT, "a part of the sum": ORANGE}


TP_CHOICES = ((4, 64, 1024), (8, 32, 128))  # tokens, d_model


def tensor_parallel_step(ranks: int, tokens: int, d_model: int) -> State:
    """Two linear layers cut by columns, then by rows: what each rank has, and two messages."""
    recorded = runs(_tensor_parallel_rank, ranks, TP_CHOICES)[tokens, d_model]
    _, forward, backward, data_parallel = recorded[0]
    rows = [f"rank {r}" for r in range(ranks)]
    return one_picture([each[0] for each in recorded], rows, "Forward: ") | {
        "columns": ["X", "A", "gelu(X A)", "B", "Y"],
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
