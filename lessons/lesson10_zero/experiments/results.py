"""What lesson 10's script keeps of a run, saves, and shows."""

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from lessons.lesson10_zero.experiments.config_files import notes_on
from lessons.lesson10_zero.experiments.counting import deepspeed_bytes, engine_bytes
from shared.errors import InputError
from shared.measuring.memory import peak_memory
from shared.planner.models import spec_of
from shared.planner.peak import peak_bytes
from shared.plots import MEANING, use_style
from shared.ranks.agreement import agree_on_folder, gathered, refused_by_any
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.sharding.counting import formula
from shared.training.checkpoint_files import cause_of, checksums_hold
from shared.training.engine import DataParallelEngine
from shared.training.language_recipes import Recipe, shared_out
from shared.training.named_checkpoint import is_empty
from shared.training.quiet_deepspeed import load_deepspeed, quiet_deepspeed

COLORS = {
    "weights": MEANING["parameters"],
    "gradients": MEANING["gradients"],
    "fp32 gradients": MEANING["gradients"],
    "gradients, buckets": MEANING["communication"],
    "optimizer states": MEANING["optimizer states"],
}


@dataclass
class Run:
    """A model under an engine, and what has been seen of it; `deepspeed` is DeepSpeed's."""

    name: str
    stage: int
    model: nn.Module
    engine: DataParallelEngine
    rows: int  # of a step, on each rank
    peak_rate: float
    half: bool
    deepspeed: Any = None
    known: set[int] = field(default_factory=set)  # storages that were there before
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def count(self, *inputs: Tensor) -> None:
        """Count this rank's bytes by kind, but for `inputs`; after backward, before the step."""
        if self.deepspeed is not None:
            self.kinds = deepspeed_bytes(self.deepspeed, self.known, inputs)
        else:
            self.kinds = engine_bytes(self.model, self.engine.optimizer, self.known, inputs)


@contextmanager
def _one_line(what: str) -> Generator[None]:
    """Turn whatever DeepSpeed raises for a configuration into an InputError of one line."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # pydantic's, asserts, its own: no common class
        words = str(error).replace("1 validation error for ", "").partition(" [type=")[0]
        words = " ".join(words.split())
        raise InputError(f"{what}: DeepSpeed refuses it: {words[:300]}") from error


def save(run: Run, folder: Path, rank: Rank, data: str, steps: int) -> None:
    """Save each rank's part, and what has to be the same when it is loaded. Call on all ranks.

    A checkpoint that is there is replaced once all ranks have written theirs. Raises InputError on
    every rank where the disk refuses; then the old one stays.
    """
    if rank.is_main:
        for torn in folder.glob(".*.pt.part"):  # of a run that was killed while it saved
            with contextlib.suppress(OSError):  # the others wait
                torn.unlink()
    agree_on_folder(folder, "--save")  # and nobody writes before that is gone
    parts, why = _parts(run, rank), ""
    aside = {folder / name: folder / f".{name}.part" for name in parts}
    about = json.dumps(_about(run, rank, data) | {"steps": steps}) + "\n"
    try:
        if run.deepspeed is not None:
            run.deepspeed.save_checkpoint(str(folder), tag="last")
        for path, content in zip(aside.values(), parts.values(), strict=True):
            with path.open("wb") as file:  # by its name torch would not say why it failed
                torch.save(content, file)
    except (OSError, RuntimeError) as error:
        why = cause_of(error)
    if reason := next(filter(None, gathered(why)), ""):
        for path in aside.values():
            path.unlink(missing_ok=True)
        raise InputError(f"--save {folder}: the checkpoint cannot be written: {reason}")
    for path, part in aside.items():
        part.replace(path)
    if rank.is_main:
        (folder / "about.json").write_text(about)
    dist.barrier()


def _parts(run: Run, rank: Rank) -> dict[str, Any]:
    """What this rank saves by hand, by the file's name; DeepSpeed writes its own files."""
    if run.deepspeed is not None:
        return {}
    parts = {f"rank_{rank.rank}.pt": run.engine.optimizer.state_dict()}
    if run.stage < 3 and rank.is_main:  # stage 3's weights are in its state
        parts["weights.pt"] = run.model.state_dict()
    return parts


def resume(run: Run, folder: Path, rank: Rank, data: str) -> int:
    """Load what `save` has saved; return the number of steps that it had made.

    Of an empty folder 0. Raises InputError on every rank for no checkpoint, for a damaged one, and
    for one of another engine, stage, number of ranks, precision, model or training text.
    """
    if is_empty(folder):
        return 0
    with refused_by_any():
        about = _about_there(folder)
    for key, value in _about(run, rank, data).items():
        if about.get(key) != value:
            advice = ""
            if key == "ranks" and run.deepspeed is not None:
                advice = "; DeepSpeed's ds_to_universal makes one for any number"
            raise InputError(
                f"--resume {folder}: {key} {about.get(key)} there, {value} in this run{advice}"
            )
    if run.deepspeed is not None:
        _look_at_parts(folder, rank)
        with _one_line(f"--resume {folder}"):
            load_deepspeed(run.deepspeed, folder, tag="last")
        return about["steps"]
    names = [f"rank_{rank.rank}.pt", *(["weights.pt"] if run.stage < 3 else [])]
    parts, why = list[Any](), ""
    for name in names:  # stage 3's weights are in its state
        try:
            file = folder / name
            if not checksums_hold(file):
                raise ValueError("changed bytes, or cut short")
            parts.append(torch.load(file, map_location=rank.device, weights_only=True))
        except Exception as error:  # a file cut short makes torch.load raise anything
            why = f"{name} is missing, damaged or cut short ({cause_of(error)})"
    if reason := next(filter(None, gathered(why)), ""):  # on every rank, whoever failed
        raise InputError(f"--resume {folder}: {reason}")
    if run.stage < 3:
        run.model.load_state_dict(parts[1])
    run.engine.optimizer.load_state_dict(parts[0])
    return about["steps"]


@refused_by_any()
def _look_at_parts(folder: Path, rank: Rank) -> None:
    for file in sorted((folder / "last").glob("*.pt"))[rank.rank :: rank.world_size]:
        try:
            why = "" if checksums_hold(file) else "is damaged or cut short"
        except OSError as error:
            why = f"cannot be read: {cause_of(error)}"
        if why:
            raise InputError(f"--resume {folder}: last/{file.name} {why}")


def _about_there(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "about.json").read_text())
    except (OSError, ValueError):
        raise InputError(f"--resume {folder} holds no checkpoint of this script") from None


def _about(run: Run, rank: Rank, data: str) -> dict[str, Any]:
    sizes = [list(getattr(p, "ds_shape", p.shape)) for p in run.model.parameters()]
    own = {} if run.deepspeed is None and run.stage == 3 else {"parameters": str(sizes)}
    mine = type(run.engine.optimizer).__module__.startswith("_answers")
    kind = "DeepSpeed" if run.deepspeed is not None else "by hand" + ", --mine" * mine
    place = {
        "engine": kind,
        "stage": run.stage,
        "ranks": rank.world_size,
        "bf16": run.half,
        "training text": data,
    }
    return place | own


@refused_by_any()  # what comes after it waits for all
def conclude(args: argparse.Namespace, rank: Rank, run: Run, tokens: int, count: int) -> None:
    """Add up the ranks' losses; rank 0 writes table and figure. Call on all ranks.

    `tokens` are those of a step on all ranks, `count` the model's parameters. Raises InputError
    where a loss is not finite.
    """
    advice = "use a lower learning rate or bf16 in place of fp16"
    training = of_all_ranks(rank, run.losses, run.seconds, mean=False, advice=advice)
    if not rank.is_main:
        return
    kinds = {f"{kind}, B": round(size / count, 2) for kind, size in run.kinds.items()}
    row = {
        "engine": run.name,
        "parameters": count,
        **training.row(tokens),
        **kinds,
        "bytes a parameter": round(sum(run.kinds.values()) / count, 2),
        "formula": round(formula(run.stage, rank.world_size, half=run.half), 2),
        "peak, MiB": round(peak_memory(rank.device) / 2**20),
    }
    losses = training.losses
    figures = {"zero.png": draw(losses, row, list(kinds))}
    words = f"{run.name}: {row['bytes a parameter']:.2f} bytes a parameter on each of "
    words += f"{rank.world_size} rank(s), formula {row['formula']:g}, loss {row['last loss']:.3f}"
    if (buckets := kinds.get("gradients, buckets, B", 0)) > row["formula"]:
        words += f"; {buckets:g} are buckets, by the file or else DeepSpeed's default:"
        words += " small models do not show ZeRO"
    write_results(args, rank, headline=words, table=[row], figures=figures, losses=losses)


def draw(losses: list[float], row: dict[str, Any], kinds: list[str]) -> Figure:
    """Left: the loss; right: the bytes a parameter by kind, and the formula as a line."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training with {row['engine']}")
    names, sizes = [*(kind[:-3] for kind in kinds), "all"], [*(row[kind] for kind in kinds)]
    colors = [COLORS.get(name, MEANING["idle"]) for name in names]
    bars = right.barh(names, [*sizes, row["bytes a parameter"]], color=colors)
    right.bar_label(bars, fmt="%.2f", padding=4)
    right.margins(x=0.18)
    right.axvline(row["formula"], color=MEANING["theory"], linestyle="--", linewidth=1)
    right.invert_yaxis()
    right.set(xlabel="bytes a parameter on rank 0 (dashed: formula)", title="What a rank keeps")
    return figure


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each rank: see `check_room`; 0 where a file of DeepSpeed's decides them."""
    if args.search or args.engine == "deepspeed":
        return 0
    stage = int(args.engine[-1])
    spec = spec_of(recipe.config(recipe.vocab_size), recipe.length)
    return peak_bytes(spec, shared_out(recipe, ranks, stage), "bf16" if half else "float32")


def start_deepspeed(rank: Rank, file: Path, **given: Any) -> Any:
    """deepspeed.initialize on this rank's device: its engine; quiet, its errors in one line.

    Raises InputError where DeepSpeed is missing, and where it refuses the configuration.
    """
    place = {"RANK": rank.rank, "LOCAL_RANK": rank.local_rank, "WORLD_SIZE": rank.world_size}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["DS_ACCELERATOR"] = rank.device.type
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's new names of collectives
    deepspeed = quiet_deepspeed()
    for words in notes_on(given["config"], file):
        if rank.is_main:
            print(f"note: {words}", file=sys.stderr, flush=True)
    with _one_line(str(file)):
        return deepspeed.initialize(model_parameters=given["model"].parameters(), **given)[0]
