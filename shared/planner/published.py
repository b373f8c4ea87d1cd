"""Published training runs: what was trained, how it was laid out, how fast it went.

`published_runs.json` has them by family, that is by engine and machines, each with its source and
with what we read into it where the source says nothing. A family's `model`, `plan` and `cluster`
are shared by its runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shared.planner.models import GPUS
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.variants import shorter_ends


@dataclass(frozen=True)
class Run:
    """A row of a published table.

    `flops` are those of a step and a GPU as the source counts them; `seconds` of a step, as printed
    or from the FLOP/s or tokens/s that are printed.
    """

    name: str
    model: ModelSpec
    plan: Plan
    cluster: Cluster
    flops: float
    seconds: float
    gib: float = 0.0

    @property
    def published(self) -> float:
        """FLOP/s of a GPU as the source counts them."""
        return self.flops / self.seconds


@cache
def families(claimed: bool = True) -> Mapping[str, list[Run]]:
    """The runs by family; `claimed` False: those that nothing is fitted to or promised for."""
    table = json.loads(Path(__file__).with_name("published_runs.json").read_text(encoding="utf-8"))
    return {
        name: [_run(family, row) for row in family["runs"]]
        for name, family in table.items()
        if family.get("claimed", True) == claimed
    }


def published(*names: str) -> list[Run]:
    """The runs of these families, named by how their names begin."""
    every = {**families(), **families(False)}
    return [
        run
        for name in names
        for label, runs in every.items()
        if label.startswith(name)
        for run in runs
    ]


def _run(family: dict[str, Any], row: dict[str, Any]) -> Run:
    model = ModelSpec(**family.get("model", {}) | row.get("model", {}))
    values = family.get("plan", {}) | row.get("plan", {})
    plan = Plan(**{name: value for name, value in values.items() if name != "cut"})
    if "cut" in values:
        plan = replace(plan, cut=shorter_ends(model.num_layers, plan.num_stages))
    gpus = plan.num_gpus
    cluster = GPUS[row.get("gpu") or family["gpu"]](gpus)
    cluster = replace(cluster, **family.get("cluster", {}) | row.get("cluster", {}))
    tokens = plan.batch * model.seq_len
    operations = {
        "model": model.flops,
        "recomputed": model.flops + model.num_layers * model.layer_flops,
        "square": replace(model, fused_attention=False).flops,  # the half that a causal mask hides
    }[family.get("flops", "model")]
    flops = operations * tokens / gpus
    if "tflops" in row:
        seconds = flops / (row["tflops"] * 1e12)
    elif "seconds" in row:
        seconds = row["seconds"]
    else:
        speed = row.get("tokens_per_s_of_all") or row["tokens_per_s"] * gpus
        seconds = tokens / speed
    return Run(row["name"], model, plan, cluster, flops, seconds, row.get("gib", 0.0))
