"""A step under full sharding, by a run: which rank has which unit, moment by moment."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shared.book.clock import Clock
from shared.book.film import BLUE_LIGHT, EMPTY, Film, Row, around, kib, one_picture, runs
from shared.book.planned import State
from shared.measuring.traffic import Traffic, count_traffic
from shared.plots import MEANING, ORANGE, SKY, VERMILION
from shared.sharding.counting import ring_bytes
from shared.sharding.fully_shard import FullyShard
from shared.sharding.prefetch import PrefetchingShard

UNIT = 4 * 32 * 32  # bytes
FSDP_CHOICES = ((2, 4), ("freed", "kept"), ("no", "yes"))
Seen = tuple[str, int, str]  # what happened to which unit, in which half of the step


def fsdp_step(
    ranks: int, layers: int, after_forward: str, prefetch: str, link: str = "fast"
) -> State:
    """A step under the course's FullyShard: which rank has which unit at which moment."""
    recorded = runs(_fsdp_rank, ranks, FSDP_CHOICES)[layers, after_forward, prefetch]
    _, traffic, most, seen, ends = recorded[0]
    rows = [f"rank {r} {kind}" for r in range(ranks) for kind in ("weights", "gradients")]
    state = one_picture([each[0] for each in recorded], rows, "whole gradient")
    clock = Clock(link)
    times = _fsdp_times(seen, clock)
    names = [seen[end - 1][0] if end else "" for end in ends]
    held = [[_fsdp_held(frame[0], frame[1], ranks)] for frame in state["frames"]]
    return state | {
        "columns": [f"unit {n}" for n in range(layers)],
        "numbers": {
            "all-gathers": traffic.count("all_gather"),
            "reduce-scatters": traffic.count("reduce_scatter"),
            "a rank sends, round a ring": kib(ring_bytes(traffic)),
            "units whole at once, at most": most,
            "of the messages' time behind work": f"{clock.hidden():.0%}",
        },
        "moves": ["*" if name in ("wait", "finish") else "" for name in names],
        "places": around(ranks),
        "lines": ["weights", "gradients"],
        "slots": ranks,
        "piece": f"a unit has {kib(UNIT)}",
        "legend": "A band is a rank's part of a unit: all bands, and it is whole.",
        "lanes": clock.lanes([times[end] for end in ends]),
        "fills": {
            "title": f"KiB of a rank; the line: unsharded, {8 * layers} KiB",
            "unit": "KiB",
            "kinds": list(FSDP_KINDS.items()),
            "labels": ["each rank"],
            "line": 8 * layers,
            "most": 9.5 * layers,
            "steps": held,
        },
    }


FSDP_KINDS = {
    "own shards": MEANING["parameters"],
    "gathered": BLUE_LIGHT,
    "gradients": MEANING["gradients"],
}


def _fsdp_held(weights: Row, gradients: Row, ranks: int) -> list[float]:
    """KiB of a rank's shards, of what it has gathered beside them, and of its gradients."""
    unit = UNIT / 1024
    whole = sum(not text.startswith("shard") for text, _ in weights)
    grown = [(ranks if "sent" in text else 1) for text, _ in gradients if text]
    gathered = whole * unit * (ranks - 1) / ranks
    return [len(weights) * unit / ranks, gathered, sum(grown) * unit / ranks]


def _fsdp_times(seen: list[Seen], clock: Clock) -> list[float]:
    """The time after each of the events, and before the first."""
    times, arrives, there = [0.0], dict[tuple[str, int], float](), set[int]()
    done = set[int]()  # whose backward is over, which freeing or sending tells
    for name, unit, phase in seen:
        if phase == "backward" and name in ("free", "reduce") and unit not in done:
            clock.compute(2.0, f"{unit}", f"backward of unit {unit}")
            done.add(unit)
        if name == "gather":
            if unit not in there:  # not asked for once more, on its way or whole
                arrives["wait", unit] = clock.send(UNIT, f"{unit}", f"all-gather of unit {unit}")
            there.add(unit)
        elif name == "free":
            there.discard(unit)
        elif name == "computed":
            clock.compute(1.0, f"{unit}", f"forward of unit {unit}")
        elif name == "reduce":
            sent = clock.send(UNIT, f"{unit}", f"reduce-scatter of unit {unit}")
            arrives["finish", unit] = sent
        clock.now = max(clock.now, arrives.pop((name, unit), 0.0))
        times.append(clock.now)
    return times


def _fsdp_rank(
    layers: int, after_forward: str, prefetch: str
) -> tuple[Film, Traffic, int, list[Seen], list[int]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))
    phase, most, seen, ends = ["forward"], [0], list[Seen](), list[int]()
    for number, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, n=number: seen.append(("computed", n, "forward")))
    kind = PrefetchingShard if prefetch == "yes" else FullyShard
    sharded = kind(model, reshard_after_forward=after_forward == "freed")
    film, everybody = Film(), "+".join(map(str, range(ranks)))

    def shoot(says: str) -> None:
        weights, gradients = _fsdp_cells(sharded.units, rank, everybody)
        most[0] = max(most[0], sum(unit.is_whole for unit in sharded.units))
        if film.shoot([weights, gradients], says):
            ends.append(len(seen))

    def after(name: str, unit: int) -> None:
        seen.append((name, unit, phase[0]))
        shoot(f"{phase[0]}: unit {unit} {WATCHED[name]}")

    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for number, unit in enumerate(sharded.units):
        for name in WATCHED:
            _watch(unit, name, functools.partial(after, name, number))
    for _ in range(2):  # prefetch follows the order of the step before
        film, phase[0], most[0] = Film(), "forward", 0
        seen.clear()
        ends.clear()
        shoot("Between two steps each rank has its shard of every unit.")
        with count_traffic() as traffic:
            loss = sharded(torch.randn(4, 32)).square().mean()
            phase[0] = "backward"
            loss.backward()
            sharded.finish_gradient_sync()
        shoot("The optimizer updates each rank's shards by their own gradients.")
        optimizer.step()
        optimizer.zero_grad()
    return film, traffic, most[0], seen, ends


def _fsdp_cells(units: Any, rank: int, everybody: str) -> tuple[Row, Row]:
    """What a rank has of each unit's weights and of its gradients."""
    weights, gradients = [], []
    for unit in units:
        coming = [f"arriving {rank}", VERMILION]
        whole = coming if unit.is_on_its_way else [f"whole {everybody}", SKY]
        weights.append(whole if unit.is_whole else [f"shard {rank}", BLUE_LIGHT])
        gradients.append(_gradient(unit, rank, everybody))
    return weights, gradients


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


def _gradient(unit: Any, rank: int, everybody: str) -> list[str]:
    if unit._reducing is not None:
        return [f"sent {everybody}", VERMILION]
    return EMPTY if unit.shard.grad is None else [f"mean {rank}", ORANGE]
