"""Lesson 23's script: its files, the planner's answer, the table and the figure."""

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shared.capstone.config import Config, read_config
from shared.capstone.modes import How, check_mode
from shared.capstone.record import Record, mfu
from shared.capstone.tasks import flops_of, model_spec, padded
from shared.errors import InputError
from shared.measuring.memory import peak_memory
from shared.planner.models import GPUS
from shared.planner.outcomes import Choice
from shared.planner.peak import CUT_LOGITS, DDP, LOGITS, peak_bytes
from shared.planner.report import best_of_layouts, headline, near_miss, refusals, table, utilization
from shared.planner.search import describe, none_fits, survey
from shared.planner.specs import ModelSpec
from shared.plots import MEANING, use_style
from shared.ranks.agreement import gathered, refused_by_any
from shared.ranks.group import Rank
from shared.results import write_results

CONFIGS = Path(__file__).resolve().parent / "configs"


def find_config(given: Path) -> Path:
    """A file as it is, or by its name in configs/."""
    if given.is_file():
        return given
    inside = CONFIGS / f"{given.name.removesuffix('.toml')}.toml"
    if given.parent == Path(".") and inside.is_file():
        return inside
    known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.toml")))
    raise InputError(f"--config {given}: no such file, and no name in configs/ ({known})")


def bytes_needed(args: argparse.Namespace, name: str, ranks: int, half: bool) -> int:
    """The most bytes on a rank: see `check_room`; 0 where nobody knows, or nothing is run."""
    config = read_config(find_config(args.config or Path(name)))
    spec = model_spec(config.model, padded(config.model.vocab_size))
    if config.plan or spec is None:
        return 0
    mode = args.mode or ("single" if ranks == 1 else "ddp")
    plan = check_mode(mode, config, ranks, How(args.checkpointing))
    logits = CUT_LOGITS[half] if mode == "3d" else LOGITS
    return peak_bytes(spec, plan, "autocast" if half else "float32", logits, DDP * (mode == "ddp"))


def plan_of(config: Config) -> tuple[ModelSpec, Any, list[Choice], list[str]]:
    """The planner on a file's model and machines: the model, cluster, best plans, and why not."""
    assert config.plan is not None, "a file that is planned has a [plan]"
    if config.plan.gpu not in GPUS:
        known = ", ".join(GPUS)
        raise InputError(f"plan.gpu must be one of {known}, not {config.plan.gpu!r}")
    spec = model_spec(config.model, padded(config.model.vocab_size))
    if spec is None:
        raise InputError("the planner knows language models: model.kind gpt or modern")
    cluster = GPUS[config.plan.gpu](config.plan.gpus)
    found = survey(spec, cluster, config.training.batch)
    if not found.choices:
        raise InputError(none_fits(found, cluster))
    best = best_of_layouts(found.choices, config.plan.count)
    return spec, cluster, best, [*refusals(found), *near_miss(spec, found, cluster)]


def print_plan(config: Config, args: argparse.Namespace, rank: Rank) -> None:
    """What the planner says of a run that is too large for here."""
    spec, cluster, best, others = plan_of(config)
    if not rank.is_main or config.plan is None:
        return
    name = f"{args.config or args.preset}"
    print(headline(name, spec, config.plan.gpu, cluster, config.training.batch), end="\n\n")
    print(*table(spec, best, cluster), sep="\n", end="\n\n")
    print(*others, sep="\n", end="\n\n")
    rows = [
        {
            "plan": describe(each.plan),
            "seconds a step": round(each.time.total, 3),
            "GB a GPU": round(each.memory.total / 1e9, 1),
            "MFU, %": utilization(spec, each, cluster),
        }
        for each in best
    ]
    words = f"planned, not run: {rows[0]['plan']}, {rows[0]['seconds a step']} s a step"
    write_results(args, rank, headline=words, table=rows)


@refused_by_any()  # what comes after it waits for all
def conclude(
    args: argparse.Namespace,
    rank: Rank,
    record: Record,
    spec: ModelSpec | None,
    peak: float,
    states: tuple[int | None, int],
    num_parameters: int,
) -> None:
    """Table, metrics and figure, on rank 0; call it on all ranks.

    `states` are the bytes of model states on the fullest rank, predicted and counted here.
    """
    most, memory = (max(gathered(each)) for each in (states[1], peak_memory(rank.device)))
    if not rank.is_main:
        return
    args.preset = args.config.stem if args.config else args.preset  # what was run
    speed, flops = record.tokens_per_second(), flops_of(spec, num_parameters)
    row: dict[str, Any] = {
        "mode": args.mode,
        "ranks": rank.world_size,
        "parameters": num_parameters,
        "last loss": round(record.losses[-1], 4),
        "held-out": round(record.held_out[-1][1], 4),
        "tokens/s": round(speed),
        "MFU, %": round(100 * mfu(speed, flops.per_token, peak, rank.world_size), 1),
        "peak MiB": round(memory / 2**20),
        "states, bytes: predicted": "-" if states[0] is None else states[0],
        "counted": most,
    }
    words = f"{args.mode} on {rank.world_size}: held-out loss {row['held-out']}, "
    words += f"{row['tokens/s']} tokens/s, MFU {row['MFU, %']} %; "
    words += kept(args.mode, len(record.losses), most, states[0])
    write_results(
        args,
        rank,
        headline=words,
        table=[row],
        figures={"training.png": draw(record, args.mode)},
        losses=record.losses,
        held_out=record.held_out,
        bytes_kept={"predicted": states[0], "measured": most},
        flops_per_token=[flops.per_token, flops.source],
        peak_flops=peak,
    )


def kept(mode: str, steps: int, most: int, predicted: int | None) -> str:
    """The counted bytes of the fullest rank's states beside those predicted, and what differs."""
    words = f"states of the fullest rank {most:,} bytes"
    words += "" if predicted is None else f", predicted {predicted:,}"
    if predicted and steps == 1 and most < predicted:
        words += ", which counts the optimizer's: the first step ends by making them"
    elif predicted and mode == "deepspeed" and most > predicted:
        words += ", which leaves out DeepSpeed's float32 copy (lesson 23, the closing picture)"
    return words


def draw(record: Record, mode: str) -> Figure:
    """The losses of training and of what is held out."""
    use_style()
    figure, ax = plt.subplots(figsize=(7, 4))
    last = max((step for step, _ in record.held_out), default=len(record.losses))
    steps = range(last - len(record.losses) + 1, last + 1)
    ax.plot(steps, record.losses, color=MEANING["by hand"], label="training")
    ax.plot(*zip(*record.held_out, strict=True), "o", color=MEANING["engine"], label="held out")
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training, mode {mode}")
    ax.legend()
    return figure
