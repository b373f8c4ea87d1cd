"""The script's sizes, its check of flags, its table and figure; how long each loop is."""

import argparse
import ast
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lessons.lesson22_ecosystem import loops
from shared.ecosystem.task import Task
from shared.errors import InputError
from shared.measuring.largest import largest
from shared.plots import MEANING, use_style
from shared.ranks.group import Rank
from shared.results import write_results
from shared.training.reference_run import NUM_STEPS, reference_model

NEEDS = {
    "accelerate": "accelerate",
    "trainer": "transformers",
    "trainer_fsdp": "transformers",
    "trainer_deepspeed": "transformers",
    "deepspeed": "deepspeed",
    "fabric": "lightning_fabric",
}


@dataclass(frozen=True)
class Size:
    """How many steps of the reference run."""

    steps: int


SIZES = {"tiny": Size(4), "small": Size(NUM_STEPS), "large": Size(NUM_STEPS)}


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments; raises InputError for a framework that is missing, and for too many steps."""
    needed = NEEDS.get(args.engine)
    if needed and importlib.util.find_spec(needed) is None:
        raise InputError(
            f"--engine {args.engine} needs {needed}, which is not installed here: pip install"
            f" {needed.replace('_', '-')}, or take --engine ddp"
        )
    if args.steps is not None and not 2 <= args.steps <= NUM_STEPS:
        raise InputError(f"--steps {args.steps}: the reference run has 2 to {NUM_STEPS} steps")
    return args


def code_lines(functions: Sequence[Callable]) -> int:
    """Lines of code of these functions, without signature, docstring, comments and blank lines."""
    return sum(_body_lines(function) for function in functions)


def _body_lines(function: Callable) -> int:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    lines: set[int] = set()
    for statement in tree.body[1:]:  # the first is the docstring
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                lines.add(node.lineno)  # ty: ignore
    return len(lines)


def lines_of(engine: str) -> int:
    """Lines of code of an engine's loop, what it shares or is configured by included."""
    parts: list[Callable] = [loops.LOOPS[engine]]
    parts += {"deepspeed": [loops.zero3], "fsdp2": [loops.by_blocks]}.get(engine, [])
    parts += [loops.trainer] if engine.startswith("trainer_") else []
    return code_lines(parts)


def row_of(engine: str, seen: Mapping[str, Any], alone: Sequence[float]) -> dict[str, Any]:
    """One line of the table: what came of the model, how far off it is, what it sent and keeps."""
    gap = largest(abs(a - b) for a, b in zip(seen["losses"], alone, strict=True))
    return {
        "engine": engine,
        "what it made": seen["wrapped"],
        "lines": lines_of(engine),
        "gap": rounded(gap),
        "messages a step": seen["messages"],
        "KiB a step": round(seen["bytes"] / 2**10, 1),
        "kept, bytes a parameter": round(seen["kept"] / count_parameters()),
    }


def rounded(gap: float) -> float:
    """One digit; 0 below 5e-6, where float32's rounding differs from machine to machine."""
    return 0.0 if gap < 5e-6 else float(f"{gap:.1g}")


def count_parameters() -> int:
    """Of the reference model."""
    return sum(p.numel() for p in reference_model().parameters())


def conclude(
    args: argparse.Namespace, rank: Rank, task: Task, losses: list[float], alone: list[float]
) -> None:
    """The table, the headline and the figure; on rank 0."""
    messages, sent = task.messages()
    seen = {"losses": losses, "messages": messages, "bytes": sent, "kept": task.kept}
    row = row_of(args.engine, seen | {"wrapped": task.wrapped}, alone)
    words = (
        f"{args.engine} on {rank.world_size} ranks is {row['what it made']}, off the curve of one"
    )
    words += f" process by {row['gap']:g} (rounding is 0); {row['KiB a step']:g} KiB a step"
    figures = {"ecosystem.png": draw(args.engine, losses, alone)}
    more: dict[str, Any] = {"losses": losses, "alone": alone}
    write_results(args, rank, headline=words, table=[row], figures=figures, **more)


def draw(engine: str, losses: list[float], alone: list[float]) -> Figure:
    """The curve under an engine, over that of one process."""
    use_style()
    figure, axis = plt.subplots(figsize=(6, 3.4))
    steps = range(1, len(losses) + 1)
    axis.plot(steps, alone, color=MEANING["idle"], linewidth=5, label="one process")
    axis.plot(steps, losses, color=MEANING["by hand"], label=engine)
    axis.set(xlabel="step", ylabel="loss (nats per token)", title=f"{engine}: the reference curve")
    axis.legend()
    return figure
