"""What the notebook runs: all engines, one setting at a time, what each default becomes."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lessons.lesson22_ecosystem.asking import ask
from lessons.lesson22_ecosystem.loops import LOOPS
from lessons.lesson22_ecosystem.results import rounded, row_of
from shared.measuring.largest import largest
from shared.plots import MEANING
from shared.training.reference_run import learning_rate, read_record

BOTH = ["optimizer", "rates"]
ADAMW = {"adam_beta2": 0.98, "adam_epsilon": 1e-5, "weight_decay": 0.01}
# In words: what is changed in the reference run's arguments, and what of ours is left.
CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, BOTH),
    "seed = 1": ({"seed": 1}, BOTH),
    "max_grad_norm left out (1.0)": ({"max_grad_norm": 1.0}, BOTH),
    "the sampler left out (random)": ({"train_sampling_strategy": "random"}, BOTH),
    "the same, seed = 2": ({"train_sampling_strategy": "random", "seed": 2}, BOTH),
    "tokens counted on each rank alone": ({"average_tokens_across_devices": False}, BOTH),
    "its own AdamW, same numbers": (ADAMW, ["rates"]),
}
LINES = {
    "": "accelerate: nothing",
    "mean of means": "accelerate: the mean of the ranks' means",
    "parts averaged": "accelerate: parts not multiplied by the ranks",
    "scheduler prepared": "accelerate: the scheduler prepared as well",
}
RATES = ADAMW | {"learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 10}
AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}


def gap_of(losses: Sequence[float]) -> float:
    """The largest difference from the record of the reference run."""
    pairs = zip(losses, read_record()["losses"], strict=False)
    return rounded(largest(abs(a - b) for a, b in pairs))


def all_engines(num_steps: int, num_ranks: int = 2) -> dict[str, dict[str, Any]]:
    """What was seen of each engine, on rank 0."""
    return {name: ask("follow", num_ranks, engine=name, num_steps=num_steps)[0] for name in LOOPS}


def engine_rows(seen: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each engine."""
    record = read_record()["losses"]
    return [row_of(name, one, record[: len(one["losses"])]) for name, one in seen.items()]


def one_change_at_a_time(num_steps: int) -> dict[str, list[float]]:
    """The curve of each single change to the Trainer's arguments, or to Accelerate's loop."""
    given = [list(each) for each in CHANGES.values()]
    curves = ask("with_arguments", changes=given, num_steps=num_steps)[0]
    found = {f"Trainer: {name}": curve for name, curve in zip(CHANGES, curves, strict=True)}
    loops = ask("own_loops", names=list(LINES), num_steps=num_steps)[0]
    return found | {LINES[name]: curve for name, curve in loops.items()}


def rates_side_by_side(steps: int = 4) -> list[dict[str, Any]]:
    """The first rates of four schedules that are all called a linear warm-up."""
    found = ask("rates", num_steps=steps)[0]
    found = {"the reference run": [learning_rate(i + 1) for i in range(steps)]} | found
    return [
        {"schedule": name} | {f"step {i + 1}": round(1e3 * rate, 4) for i, rate in enumerate(each)}
        for name, each in found.items()
    ]


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A nested configuration as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def draw_messages(rows: Sequence[Mapping[str, Any]], parameters: int) -> Figure:
    """What each engine sends in a step, and what it keeps; the lines are DDP's formulas."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    names = [row["engine"] for row in rows][::-1]
    sent = [row["KiB a step"] for row in rows][::-1]
    kept = [row["kept, bytes a parameter"] for row in rows][::-1]
    left.barh(names, sent, color=MEANING["communication"])
    left.axvline(4 * parameters / 2**10, color="black", linestyle="--")
    left.set(
        xlabel="KiB a rank sends in a step, round a ring",
        title="Sent; the line: one all-reduce of the gradients",
    )
    right.barh(names, kept, color=MEANING["optimizer states"])
    right.axvline(12, color="black", linestyle="--")
    right.set(
        xlabel="bytes a parameter, between two steps",
        title="Kept; the line: weights and moments, whole",
    )
    return figure


def draw_gaps(seen: Mapping[str, Mapping[str, Any]], off: Mapping[str, Sequence[float]]) -> Figure:
    """How far each curve is from the record: all engines, and some with one setting changed."""
    figure, axis = plt.subplots(figsize=(7.5, 3.6))
    record = read_record()["losses"]
    curves = {name: one["losses"] for name, one in seen.items()} | dict(off)
    for name, losses in curves.items():
        gaps = [max(abs(a - b), 1e-8) for a, b in zip(losses, record, strict=False)]
        own = name in seen
        label = name if not own else f"{len(seen)} engines" if name == "ddp" else None
        color = MEANING["by hand"] if own else "black"
        style = "-" if own else ("--", ":", "-.")[list(off).index(name) % 3]
        axis.plot(range(1, len(gaps) + 1), gaps, style, color=color, label=label)
    axis.set(yscale="log", xlabel="step", ylabel="difference from the record (nats)")
    axis.set(title="Eight engines within rounding; one setting changed moves the curve")
    axis.set_ylim(top=10)
    axis.legend(fontsize=8, loc="upper right", ncols=4)
    return figure
