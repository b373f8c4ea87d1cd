"""Trainings that differ in what they send, the seconds of their messages, and the figures."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.data.text import load_text
from shared.ddp.wrapping import ddp_of_fixed_buffers
from shared.less_communication.states import ErrorFeedback, LowRank, TopK
from shared.measuring.timing import repetitions
from shared.measuring.traffic import Call, count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.plots import MEANING, VARIANTS
from shared.ranks import collectives
from shared.ranks.links import sent_by_card
from shared.training.language_recipes import Recipe, load_tokens, rows
from shared.training.schedules import set_learning_rate

RECIPE = Recipe(64, 1, 4, 500, 16, 16, 150, 200_000, peak=3e-3)
NEAR = 10  # steps over which a loss is averaged
METHODS = ("all-reduce", "fp16", "top-k 1 %", "one bit", "PowerSGD 2", "local SGD 8", "DiLoCo 8")
LOSSY = ("fp16", "PowerSGD 2", "one bit", "top-k 1 %", "local SGD, every 1", "local SGD, every 8")
CURVES = LOSSY[-repetitions(len(LOSSY)) :]
EVERY = 8
SEEDS = range(repetitions(5))


@dataclass(frozen=True)
class Task:
    """A text as tokens and the model that learns it."""

    ids: Tensor
    config: TransformerConfig


def load_task() -> Task:
    """The beginning of the standard library's sources."""
    ids, vocab_size = load_tokens(load_text("stdlib"), RECIPE)
    return Task(ids, RECIPE.config(vocab_size))


@dataclass
class Run:
    """One training to the fixed loss: losses over all ranks, and some steps' messages."""

    losses: list[float]
    calls: list[list[Call]]  # of EVERY steps afterwards, where they were counted


def stepper(
    task: Task, wrap: Callable[..., Any], name: str, seed: int, mine: slice
) -> Callable[[int], Tensor]:
    """A fresh model's steps on the rows `mine` of each batch: number in, loss of these rows out.

    `wrap(name, model)` gives a model and what follows each step.
    """
    torch.manual_seed(seed)
    model, after = wrap(name, LanguageModel(task.config))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))

    def work(step: int) -> Tensor:
        tokens, follow = rows(task.ids, step, seed, RECIPE.batch, RECIPE.length, mine)
        set_learning_rate(optimizer, RECIPE.learning_rate(step, 2 * RECIPE.steps, RECIPE.peak))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), follow.flatten())
        loss.backward()
        optimizer.step()
        after()
        return loss.detach()

    return work


def train(
    rank: int, task: Task, wrap: Callable[..., Any], name: str, seed: int, target: float
) -> Run:
    """Train on this rank's rows until the mean of the last ten losses is at the target.

    Ends at RECIPE.steps at the latest. The messages of seed 0 are counted in steps of their own.
    """
    ranks = dist.get_world_size()
    share = RECIPE.batch // ranks
    work = stepper(task, wrap, name, seed, slice(share * rank, share * (rank + 1)))
    run = Run([], [])
    while len(run.losses) < RECIPE.steps and steps_to(run.losses, target) is None:
        loss = work(len(run.losses) + 1) / ranks
        dist.all_reduce(loss)
        run.losses.append(loss.item())
    for step in range(EVERY if seed == 0 else 0):
        with count_traffic() as traffic:
            work(len(run.losses) + 1 + step)
        run.calls.append(traffic.calls)
    return run


def computing_seconds(
    rank: int, task: Task, wrap: Callable[..., Any], ranks: int, steps: int
) -> dict[str, float]:
    """Each method's processor seconds of a step without messages: on a group of one, by turns.

    The step of one of `ranks` ranks, with its rows, and what the method does to a message.
    """
    mine = slice(RECIPE.batch // ranks)
    work = {name: stepper(task, wrap, name, 0, mine) for name in METHODS}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for step in range(1, repetitions(steps) + 3):
        for name in METHODS:
            began = time.process_time()
            work[name](step)
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(taken[2:]) for name, taken in seconds.items()}


def states() -> dict[str, Any]:
    """A fresh state for each hook."""
    return {
        "fp16": None,
        "top-k 1 %": TopK(0.01),
        "one bit": ErrorFeedback(),
        "PowerSGD 2": LowRank(2, start=0),
    }


def ddp_with(model: nn.Module, state: Any = None, hook: Any = None) -> DistributedDataParallel:
    """torch's DDP, with a hook if one is given."""
    ddp = ddp_of_fixed_buffers(model)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return ddp


def wire_bytes(calls: Sequence[Call], ranks: int) -> float:
    """What a rank sends: by ring for all_reduce, its own part to each other for all_gather."""
    others = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * others, "all_gather": ranks - 1, "all_to_all": others}
    return sum(factor.get(call.op, 1) * call.num_bytes for call in calls)


def bytes_a_step(run: Run, ranks: int) -> float:
    """The mean over the counted steps of what a rank sends."""
    return sum(wire_bytes(calls, ranks) for calls in run.calls) / len(run.calls)


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """After how many steps the mean of the last ten losses is at the target; None: never."""
    for step in range(NEAR, len(losses) + 1):
        if sum(losses[step - NEAR : step]) <= NEAR * target:
            return step
    return None


def message_seconds(
    rank: int, calls: Mapping[str, list[list[Call]]], repeats: int
) -> dict[str, float]:
    """For each method the seconds of the messages of a step, each the median of some repeats.

    The same operations with as many bytes, over whatever link there is.
    """
    return {
        name: sum(_seconds(step, repetitions(repeats)) for step in steps) / len(steps)
        for name, steps in calls.items()
    }


def _seconds(step: Sequence[Call], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        dist.all_reduce(torch.zeros(2**17))  # empties the link's bucket, which holds 256 KiB
        dist.barrier()  # who has received all still sends: the link's queue is to be empty
        began = time.perf_counter()
        for call in step:
            _send_again(call)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _send_again(call: Call) -> None:
    mine = torch.zeros(call.num_bytes, dtype=torch.uint8)
    if call.op == "all_gather":
        whole = torch.empty(call.group_size * call.num_bytes, dtype=torch.uint8)
        collectives.all_gather(whole, mine).wait()
    elif call.op == "all_reduce":
        dist.all_reduce(torch.zeros(call.num_bytes // 4))
    else:
        dist.broadcast(mine, 0)


def sent_by_node(answer: Callable[..., Any], numbers: int) -> int:
    """Bytes that this rank's network card has sent during one sum, by the kernel's count.

    `answer(x)` sums x over all ranks. Ranks of a node share a card; between them lies loopback.
    """
    x = torch.ones(numbers)
    answer(x.clone())  # connections are made
    dist.barrier()
    before = sent_by_card()
    dist.barrier()
    answer(x)
    dist.barrier()
    return sent_by_card() - before


def cluster_row(
    name: str, share: float, extra: float, parameters: float, bandwidth: float, compute: float
) -> dict[str, Any]:
    """Seconds of a step with all bytes, and with a share of them; which is less to a fixed loss.

    No overlap: messages after compute. `extra` is the factor in steps.
    """
    whole = 2 * 2 * parameters / bandwidth  # 16 bits, both halves of an all-reduce
    plain, less = compute + whole, (compute + share * whole) * extra
    return {
        "link": name,
        "messages / compute": round(whole / compute, 3),
        "plain, s": round(plain, 3),
        "less, s": round(less, 3),
        "gain": round(plain / less, 2),
    }


def break_even(share: float, extra: float) -> float:
    """The messages over compute of a plain step above which sending a share of the bytes pays.

    (1 + m) > extra (1 + share m); infinite where extra x share is 1 or more.
    """
    return (extra - 1) / (1 - extra * share) if extra * share < 1 else float("inf")


def draw_steps(needed: Mapping[str, Sequence[int | None]], target: float) -> Figure:
    """Steps to the fixed loss, a point a seed; a seed that never arrives has none."""
    figure, ax = plt.subplots(figsize=(8, 2.8))
    for row, (color, steps) in enumerate(zip(VARIANTS, needed.values(), strict=False)):
        arrived = [each for each in steps if each is not None]
        ax.plot(arrived, [row] * len(arrived), "o", color=color, alpha=0.7)
    ax.set_yticks(range(len(needed)), list(needed))
    ax.invert_yaxis()
    ax.set(xlabel=f"steps to a loss of {target}", xlim=(0, None))
    ax.set_title("fp16 takes all-reduce's steps, every other method more with most seeds")
    return figure


def draw_seconds(table: Mapping[str, Mapping[str, float]]) -> Figure:
    """Seconds to the fixed loss over those of the plain all-reduce, by link."""
    figure, ax = plt.subplots(figsize=(8, 3.8))
    links = list(next(iter(table.values())))
    for number, (name, by_link) in enumerate(table.items()):
        at = [place + 0.09 * (number - (len(table) - 1) / 2) for place in range(len(links))]
        ax.plot(at, [by_link[link] for link in links], "o", color=VARIANTS[number], label=name)
    ax.axhline(1, color=MEANING["theory"], linewidth=1)
    ax.set_xticks(range(len(links)), links)
    ax.set(yscale="log", xlabel="link", ylabel="seconds to the loss / all-reduce's")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5]
    ax.set_yticks(ticks, [str(tick) for tick in ticks])
    ax.set_yticks([], minor=True)
    faster = {link: sum(by_link[link] < 1 for by_link in table.values()) for link in links}
    counts = ", ".join(f"{n} of {len(table) - 1} at {link}" for link, n in faster.items())
    ax.set_title(f"Below the line, faster than all-reduce:\n{counts}")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
