"""The script's sizes, torch's own engines, predicted bytes, table and figure."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib.pyplot as plt
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from lessons.lesson20_less_communication.asking_torch import power_sgd_of_torch
from lessons.lesson20_less_communication.experiments import wire_bytes
from shared.ddp.wrapping import ddp_of_fixed_buffers
from shared.errors import InputError
from shared.less_communication.states import LowRank, TopK
from shared.measuring.traffic import Call, Traffic
from shared.planner.peak import DDP
from shared.plots import MEANING, use_style
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.training.language_recipes import RECIPES as STANDARD
from shared.training.language_recipes import Recipe, shared_out

RECIPES = STANDARD | {"small": replace(STANDARD["small"], num_layers=2)}
TORCHS = ("all_reduce", "fp16", "power_sgd", "local_sgd")


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments; raises InputError for what no method can do, before any rank waits."""
    TopK(args.density)
    LowRank(args.rank, args.start)
    if args.every < 1:
        raise InputError(f"--every {args.every} steps is never: take 1 or more")
    if args.engine == "torch" and args.method not in TORCHS:
        raise InputError(
            f"--engine torch has no {args.method}: leave it out, or take one of {', '.join(TORCHS)}"
        )
    if args.engine == "torch" and args.method == "power_sgd" and args.start < 2:
        raise InputError(f"torch's hook cannot begin at --start {args.start}: take 2 or more")
    return args


def torchs(args: argparse.Namespace, model: nn.Module) -> tuple[nn.Module, Callable[[], Any]]:
    """torch's own hook or averager."""
    if args.method == "local_sgd":
        averager = PeriodicModelAverager(period=args.every)
        averager.step = 1  # it averages in step 0, too
        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
        return model, lambda: averager.average_parameters(model.parameters())
    # one bucket: the hook's own callbacks send in an order of their own where there are several
    ddp = ddp_of_fixed_buffers(model, bucket_cap_mb=10_000)
    if args.method == "fp16":
        ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif args.method == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, args.rank, start_powerSGD_iter=args.start)
        over_gloo = dist.get_backend() == "gloo"
        ddp.register_comm_hook(
            state, power_sgd_of_torch if over_gloo else powerSGD_hook.powerSGD_hook
        )
    return ddp, lambda: None


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each rank: see `check_room`; DDP's buckets, and what a method remembers."""
    if args.method in ("local_sgd", "diloco"):  # by hand: where all agreed last, and a velocity
        beside = 2 if args.engine == "by_hand" else 0
    else:
        beside = DDP + (args.method in ("topk", "one_bit", "power_sgd"))  # what was not sent yet
    return recipe.most_bytes(shared_out(recipe, ranks), half, beside=beside)


@dataclass
class Seen:
    """A run: its losses, the seconds of its steps, and the messages of the counted ones."""

    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counted: list[list[Call]] = field(default_factory=list)

    def add(self, loss: Tensor, seconds: float, traffic: Traffic | None) -> None:
        """One step; its traffic if it was counted."""
        self.losses.append(loss)
        self.seconds.append(seconds)
        if traffic is not None:
            self.counted.append(traffic.calls)


def predicted_bytes(args: argparse.Namespace, model: nn.Module, ranks: int) -> float | None:
    """What a rank sends in a step by formula; None where it depends on DDP's buckets.

    All gradients are float32. A ring all-reduce sends 2 (n - 1) / n of a tensor.
    """
    ps = [p for p in model.parameters() if p.requires_grad]
    numbers, ring = sum(p.numel() for p in ps), 2 * (ranks - 1) / ranks
    if args.method == "power_sgd" and args.start < (args.steps or math.inf):
        state = LowRank(args.rank)
        thin = [p for p in ps if state.pays(p)]
        rest = sum(p.numel() for p in ps if not state.pays(p))
        sides = sum(state.rank_of(p) * (p.shape[0] + p.numel() // p.shape[0]) for p in thin)
        return 4 * ring * (rest + sides)
    if args.method in ("local_sgd", "diloco"):
        return 4 * ring * numbers / args.every
    return {"all_reduce": 4.0, "fp16": 2.0}.get(args.method, math.nan) * ring * numbers


def conclude(
    args: argparse.Namespace,
    rank: Rank,
    model: nn.Module,
    recipe: Recipe,
    batch: int,
    seen: Seen,
) -> None:
    """Bring the ranks' losses together; rank 0 writes the table and the figure."""
    training = of_all_ranks(rank, seen.losses, seen.seconds)
    if not rank.is_main:
        return
    calls, n = [call for step in seen.counted for call in step], rank.world_size
    sent = sum(wire_bytes(step, n) for step in seen.counted) / len(seen.counted)
    numbers = sum(p.numel() for p in model.parameters())
    whole = 4 * 2 * (n - 1) / n * numbers
    predicted = predicted_bytes(args, model, n)
    if args.engine == "torch" and args.method == "power_sgd" and predicted is not None:
        print(
            "note: torch's hook sends from other threads, which are not counted: bytes by formula"
        )
        sent = predicted
    share = round(sent / whole, 4) if n > 1 else "-"  # one rank sends nothing
    row: dict[str, Any] = {
        "method": args.method,
        "engine": args.engine,
        "ranks": n,
        **training.row(batch * recipe.length),
        "messages a step": round(len(calls) / len(seen.counted), 2),
        "KiB a step": round(sent / 2**10, 3),
        "of all-reduce's": share,
    }
    if args.mbit:
        row[f"message ms at {args.mbit:g} Mbit/s"] = round(1000 * sent * 8 / (args.mbit * 1e6), 2)
    words = f"{args.method} on 1 rank sends nothing"
    if n > 1:
        words = f"{args.method} on {n} ranks sends {row['KiB a step']:g} KiB a step, "
        words += f"{100 * sent / whole:.3g} % of all-reduce's"
    words += f"; loss {row['last loss']}"
    figures = {"less_communication.png": draw_run(training.losses, args.method, sent, whole)}
    more = {} if predicted is None or math.isnan(predicted) else {"predicted": predicted}
    results = {"losses": training.losses, "bytes_sent": {"measured": sent} | more}
    write_results(args, rank, headline=words, table=[row], figures=figures, **results)


def draw_run(losses: list[float], method: str, sent: float, whole: float) -> Figure:
    """The loss, and beside it what a step sends."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=[2, 1])
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    left.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training, {method}")
    sizes = [whole / 2**10, sent / 2**10]
    right.bar(["all-reduce", method], sizes, color=[MEANING["idle"], MEANING["communication"]])
    right.set(ylabel="KiB a rank sends in a step", title="Messages")
    return figure
