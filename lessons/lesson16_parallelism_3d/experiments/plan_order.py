"""Lesson 16: seconds of plans against each other, on ranks that compute at a given speed.

Two cores cannot play four GPUs that compute at the same time, but they can play four that wait:
each layer sleeps as long as its matrix products would take on a device of so many FLOP/s. What is
sent is real, between ranks in network namespaces of their own or behind the links that they have.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.flop_counter import FlopCounterMode

from lessons.lesson16_parallelism_3d.experiments.plan_bytes import all_plans
from shared.data.rows import Text
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.parallel3d.cutting import Recomputed
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import AXES, build_mesh, make_groups
from shared.planner.models import spec_of
from shared.planner.specs import ModelSpec, Plan
from shared.ranks.collectives import reduce_scatter
from shared.training.engine import train_step

CONFIG = TransformerConfig(  # torch counts no FLOPs of a fused attention on a CPU
    256, 128, 4, 4, 512, dropout=0.0, max_len=128, tie_embeddings=False, fused=False
)
LENGTH = 128


@dataclass(frozen=True)
class Setting:
    """What is the same for all plans: the speed of a device, the steps, which axis is innermost."""

    flops_per_second: float
    steps: int = 3
    order: Sequence[str] = AXES


def small_spec() -> ModelSpec:
    """The model whose plans are timed, as the planner sees it."""
    return spec_of(CONFIG, LENGTH)


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)  # two products for each one of forward
        return gradients[0], None


class _Paced:
    """Hooks by which a part takes its time: its FLOPs are counted once, then slept for.

    It sleeps first: a recomputation ends as soon as it has what backward needs.
    """

    def __init__(self, part: nn.Module, flops_per_second: float) -> None:
        self.rate, self.flops = flops_per_second, None
        self.counter = FlopCounterMode(display=False)
        part.register_forward_pre_hook(self.before)
        part.register_forward_hook(self.behind)

    def before(self, part: nn.Module, given: Any) -> Any:
        if self.flops is None:
            self.counter.__enter__()
        elif self.flops:
            (x, *others), batch = given
            return (_Wait.apply(x, self.flops / self.rate), *others), batch
        return None

    def behind(self, part: nn.Module, given: Any, carry: Any) -> None:
        if self.flops is None:
            self.counter.__exit__(None, None, None)
            self.flops = self.counter.get_total_flops()


def step_seconds(rank: int, plans: Sequence[Plan], setting: Setting) -> list[float]:
    """Median seconds of a step under each plan, until the slowest rank is done."""
    found = []
    for plan in plans:
        engine, batch = _prepared(plan, setting)
        taken = []
        for _ in range(setting.steps + 1):  # in the first one FLOPs are counted
            dist.barrier()
            began = time.perf_counter()
            train_step(engine, batch)
            dist.barrier()
            taken.append(time.perf_counter() - began)
        found.append(statistics.median(taken[1:]))
    return found


def bytes_between(rank: int, plan: Plan, setting: Setting, per_node: int) -> int:
    """Bytes that this rank hands in during a step for groups whose ranks are on several nodes."""
    engine, batch = _prepared(plan, setting)
    with count_traffic() as traffic:
        train_step(engine, batch)
    return sum(
        call.num_bytes
        for call in traffic.calls
        if call.op != "recv" and len({each // per_node for each in call.ranks}) > 1
    )


def _prepared(plan: Plan, setting: Setting) -> tuple[Parallel3D, Text]:
    torch.manual_seed(16)
    engine = Parallel3D(
        LanguageModel(CONFIG),
        make_groups(build_mesh(plan.dp, plan.tp, plan.pp, order=setting.order)),
        torch.optim.AdamW,
        num_micro_batches=plan.num_micro_batches,
        zero=plan.zero,
        checkpoint=plan.checkpoint == "full",
        sequence_parallel=plan.sequence_parallel,
    )
    for part in engine.pipeline.own:
        _Paced(part.part if isinstance(part, Recomputed) else part, setting.flops_per_second)
    ids = torch.randint(1, CONFIG.vocab_size, (plan.batch, LENGTH + 1))
    return engine, Text(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def plans_of_four(rows: int = 32, micro_batch: int = 8) -> list[Plan]:
    """Every plan of 4 ranks of `lesson16_memory`, all with the same sequences a step.

    Gradients travel behind backward under ZeRO-2 alone: the other engines send when it is over.
    """
    return [
        replace(
            plan,
            micro_batch=micro_batch,
            num_micro_batches=rows // (micro_batch * plan.dp),
            overlap=plan.zero == 2,
        )
        for plan in all_plans()
    ]


def message_seconds(rank: int, repeats: int = 20) -> dict[str, float]:
    """Median seconds of messages over all ranks: of one number, and of 1 MiB by collective."""
    size = dist.get_world_size()
    number, whole = torch.zeros(1), torch.zeros(2**18 // size * size)
    part = torch.empty(len(whole) // size)
    found = {}
    for name, send in {
        "all-reduce of a number": lambda: dist.all_reduce(number),
        "all-reduce of 1 MiB": lambda: dist.all_reduce(whole),
        "reduce-scatter of 1 MiB": lambda: reduce_scatter(part, whole).wait(),
    }.items():
        taken = []
        for _ in range(repeats):
            dist.barrier()
            time.sleep(0.02)  # as between the messages of a step
            began = time.perf_counter()
            send()
            taken.append(time.perf_counter() - began)
        found[name] = statistics.median(taken)
    return found
