"""Lesson 16: small tables of seconds, as the planner has them, from which formulas can be found.

Its fitted shares are 1 and its messages free unless a table is about them, so that each number has
one cause. Seconds are given in ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.planner.memory import unit_sizes
from shared.planner.outcomes import Fitted
from shared.planner.seconds import gradient_seconds, step_time
from shared.planner.specs import Cluster, ModelSpec, Plan

EXACT = Fitted(matmul=1.0, link=1.0, traffic=0.0)
FREE = Cluster(64, 80e9, 1e12, 8, 1e30, 1e30, 1e30, latency=0.0)


@dataclass(frozen=True)
class Row:
    """The arguments of an exercise's function, and what the planner says: all times in ms."""

    given: dict[str, Any]
    found: dict[str, float]


def pipeline_rows() -> list[Row]:
    """Compute and bubble of 16.4a."""
    return [
        _pipeline((4,), 2.0, 1.0, 1),
        _pipeline((4,), 2.0, 4.0, 1),
        _pipeline((4,), 2.0, 1.0, 3),
        _pipeline((4,), 2.0, 1.0, 1, recompute=True),
        _pipeline((2, 2), 2.0, 1.0, 4),
        _pipeline((3, 1), 2.0, 1.0, 4),
        _pipeline((1, 3), 2.0, 1.0, 4),
        _pipeline((2, 2), 2.0, 1.0, 8),
        _pipeline((2, 2, 2, 2), 2.0, 1.0, 8),
        _pipeline((2, 2, 2, 2), 2.0, 1.0, 8, chunks=2),
        _pipeline((2, 2, 2, 2), 2.0, 1.0, 8, chunks=2, recompute=True),
    ]


def _pipeline(
    layers: tuple[int, ...], layer: float, head: float, m: int, chunks: int = 1, recompute=False
) -> Row:
    d, pp = 64, len(layers)
    vocabulary = int(16 * d * head / layer)  # 32 d^2 FLOPs a token and layer, 2 d a word
    model = ModelSpec(sum(layers), d, 1, 4 * d, vocabulary, 4 * d, bias=False, tied=False)
    cut = tuple(count // chunks for _ in range(chunks) for count in layers)
    again = "full" if recompute else "none"
    plan = Plan(pp=pp, chunks=chunks, num_micro_batches=m, checkpoint=again, cut=cut)
    peak = model.layer_flops * model.seq_len / layer  # FLOPs a ms
    time = step_time(model, plan, _with(peak_flops=peak), EXACT)
    given = {"layers": layers, "layer": layer, "head": head, "num_micro_batches": m}
    given |= {"chunks": chunks, "recompute": recompute}
    return Row(given, {"compute": time.compute, "bubble": time.bubble})


def _with(**changed: Any) -> Cluster:
    return Cluster(**(vars(FREE) | changed))


def tensor_rows() -> list[Row]:
    """Messages within layers of 16.4b: vectors of 64 MB, 8 MB a ms inside a node."""
    return [
        _tensor(1, 1, 1),
        _tensor(2, 1, 1),
        _tensor(4, 1, 1),
        _tensor(8, 1, 1),
        _tensor(8, 2, 3),
        _tensor(8, 1, 1, recompute=True),
        _tensor(8, 1, 1, latency=1.0),
        _tensor(8, 1, 1, latency=1.0, recompute=True),
        _tensor(8, 1, 1, outer=1.0, node=4),
        _tensor(16, 1, 1, outer=0.5),
        _tensor(16, 1, 1, outer=1.0),
        _tensor(16, 1, 1, outer=2.0),
    ]


def _tensor(
    tp: int,
    layers: int,
    m: int,
    outer: float = 0.5,
    node: int = 8,
    latency: float = 0.0,
    recompute: bool = False,
) -> Row:
    model = ModelSpec(layers, 1600, 16, 1600, 1600, 20_000)  # 64 MB of vectors in 16 bits
    cluster = _with(inner=8e6, outer=outer * 1e6, gpus_per_node=node, latency=latency)
    again = "full" if recompute else "none"
    time = step_time(model, Plan(tp=tp, num_micro_batches=m, checkpoint=again), cluster, EXACT)
    given: dict[str, Any] = {"vectors": 64e6, "layers": layers, "tp": tp, "num_micro_batches": m}
    given |= {"cluster": cluster, "recompute": recompute}
    return Row(given, {"seconds": time.tensor_parallel})


def data_rows() -> list[Row]:
    """Messages between replicas of 16.4c: all gradients would take 24 ms over the link."""
    return [
        _data(1, 0, 4, 6.0, False),
        _data(2, 0, 4, 6.0, False),
        _data(4, 0, 4, 6.0, False),
        _data(8, 0, 4, 6.0, False),
        _data(4, 1, 4, 6.0, False),
        _data(4, 3, 4, 6.0, False),
        _data(4, 0, 4, 6.0, True),
        _data(4, 0, 8, 6.0, True),
        _data(4, 0, 4, 30.0, True),
        _data(4, 0, 4, 60.0, True),
        _data(4, 1, 4, 6.0, True),
        _data(4, 1, 4, 60.0, True),
        _data(4, 3, 4, 6.0, True),
        _data(4, 3, 8, 6.0, True),
        _data(4, 3, 4, 60.0, True),
    ]


def _data(dp: int, zero: int, m: int, compute: float, overlap: bool) -> Row:
    model = ModelSpec(2, 64, 1, 256, 512, 256)
    plan = Plan(dp=dp, zero=zero, num_micro_batches=m, overlap=overlap)
    size = 2.0 * sum(unit_sizes(model, plan, 0))
    link = size / 24
    time = gradient_seconds(model, plan, _with(inner=link, outer=link), EXACT, compute)
    given = {"size": size, "dp": dp, "link": link, "compute": compute, "num_micro_batches": m}
    return Row(given | {"zero": zero, "overlap": overlap}, {"seconds": time})


def show(rows: Sequence[Row]) -> None:
    """Print rows, each argument and each number in a column of its own."""
    cells = [_cells(row) for row in rows]
    widths = {name: max(len(name), *(len(row[name]) for row in cells)) for name in cells[0]}
    print("  ".join(name.rjust(width) for name, width in widths.items()))
    for row in cells:
        print("  ".join(row[name].rjust(width) for name, width in widths.items()))


def _cells(row: Row) -> dict[str, str]:
    given = dict(row.given)
    if "cluster" in given:
        cluster = given.pop("cluster")
        given |= {"node": cluster.gpus_per_node, "outer": cluster.outer / 1e6}
        given |= {"latency": cluster.latency, "inner": cluster.inner / 1e6}
        given["vectors"] /= 1e6
    if "size" in given:
        given = {"size/link": given.pop("size") / given.pop("link")} | given
    names = {"num_micro_batches": "m", "recompute": "again"}
    shown = {names.get(name, name): _word(value) for name, value in given.items()}
    return shown | {name: f"{ms:.4g} ms" for name, ms in row.found.items()}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}"
