"""A run's checkpoints: folders by step, whole or not there, that any mode resumes on any ranks.

The tensors lie in torch's distributed format under their names in the whole model
(`shared.training.named_checkpoint`). Beside them lies what says whose they are. That and the
number of steps is all: batches and learning rates follow from seed and step, and without dropout
no random generator is drawn from.
"""

import json
import math
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.capstone.config import Config
from shared.capstone.modes import Made
from shared.errors import InputError
from shared.ranks.agreement import agree_on_folder, first_word, gathered
from shared.ranks.group import Rank, current_rank
from shared.training.distributed_files import damage_of
from shared.training.named_checkpoint import is_empty, load_named, save_named

RUN = "run.json"
NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True)
class Origin:
    """What a checkpoint is of: it is resumed by the same model on the same data."""

    model: dict[str, Any]
    data: dict[str, Any]
    vocab_size: int
    seed: int
    rates: dict[str, float]  # what learning rates follow from; another one is told, not refused

    @classmethod
    def of(
        cls, config: Config, vocab_size: int, seed: int, fingerprint: str, steps: int | None = None
    ) -> "Origin":
        """That of a run; batches depend on their size as well. `steps` come before the file's."""
        model = {k: v for k, v in asdict(config.model).items() if k != "fused"}
        data = {**asdict(config.data), "text": fingerprint, "batch": config.training.batch}
        training = config.training
        rates = {"steps": steps or training.steps, "warmup": training.warmup, "peak": training.peak}
        return cls(model, data, vocab_size, seed, rates)


def save_run(
    folder: Path, made: Made, origin: Origin, step: int, rank: Rank, mode: str, keep: int
) -> Path:
    """Write `folder`/step_NNNNNNNN and remove older ones but for `keep` in all; a collective.

    Raises InputError on every rank where the disk refuses; what was there before still is. What
    dead runs have left half written goes.
    """
    place, before = folder / f"step_{step:08d}", _numbered(folder)
    number = 1 + max((int(n) for n, _ in before if n < math.inf), default=0)
    notes = {"step": step, "mode": mode, "ranks": rank.world_size, "number": number}
    save_named(
        made.layout, made.optimizer, place, {RUN: json.dumps(notes | asdict(origin), indent=1)}
    )
    if rank.is_main:  # only older ones: those of a later step were left by a run that went wrong
        older = [checkpoint for checkpoint in before if checkpoint[1].name < place.name]
        older.sort(key=lambda checkpoint: checkpoint[0] < math.inf)  # a damaged one goes first
        gone = [path for _, path in older[: max(0, len(older) - (keep - 1))]]
        for leftover in [*gone, *folder.glob(".step_*.part")]:
            shutil.rmtree(leftover, ignore_errors=True)
    return place


def saved_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, as they were written, the newest last.

    That need not be the one of most steps: a run may have gone back, or another been there before.
    """
    return [path for _, path in _numbered(folder)]


def _numbered(folder: Path) -> list[tuple[float, Path]]:
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted((_number(path), path) for path in found)


def _number(place: Path) -> float:
    """How many were written there before it; infinite where it does not say."""
    try:
        return float(json.loads((place / RUN).read_text(encoding="utf-8")).get("number", 0))
    except (OSError, ValueError, TypeError, AttributeError):
        return math.inf


def where_to_save(args: Any, rank: Rank) -> Path:
    """The folder of a run's checkpoints; rank 0 tells what will surprise whoever comes for them.

    `args` are a script's, with save, resume and out. A collective.
    """
    words, resumed = "", args.resume and args.resume.resolve()
    if args.save is None:
        try:
            agree_on_folder(args.out, "--out")
        except InputError as error:
            words = f"{error}: SIGTERM or Ctrl-C will save nothing without --save"
    elif (found := saved_in(args.save)) and args.save.resolve() not in (
        resumed,
        resumed and resumed.parent,
    ):
        words = f"--save {args.save} has another run's checkpoints, {found[-1].name} the newest:"
        words += " --resume takes whichever is written last"
    if words and rank.is_main:
        print(f"note: {words}", flush=True)
    return args.save or args.out / "checkpoints"


def resume_run(folder: Path, made: Made, origin: Origin) -> int:
    """Load the checkpoint of a folder that was written last, or the folder itself; its steps.

    Of an empty folder 0. A collective. Raises InputError on every rank, before anything is changed,
    where there is no checkpoint, where it is damaged, naming one beside it that is whole, where it
    is of another model or other data, naming what differs, and where no step is left. Warns on rank
    0 where the learning rates from here on are not those of the run that was saved.
    """
    if is_empty(folder):
        return 0
    place = folder if os.path.isfile(folder / RUN) else (saved_in(folder) or [folder])[-1]
    place = gathered(place)[0]  # what ranks list may differ for a moment
    notes, why = _notes(place, origin)
    if words := first_word(why):
        advice = _whole_beside(place, origin) if f"damaged {RUN}" in words else ""
        raise InputError(f"checkpoint {place} {words}{advice}")
    there, here = notes.get("rates", origin.rates), origin.rates
    other = [f"{k} {there.get(k)}, here {v}" for k, v in here.items() if there.get(k) != v]
    if other and current_rank() == 0:
        words = "learning rates from here on are not those of the run that was saved"
        warnings.warn(f"{words}: {', '.join(other)}", stacklevel=2)
    try:
        return load_named(made.layout, made.optimizer, place)
    except InputError as error:
        words = str(error).replace(str(place), "")
        if not any(phrase in words for phrase in ("damaged", "cut short", "cannot be read")):
            raise
        raise InputError(f"{error}{_whole_beside(place, origin)}") from None


def _notes(place: Path, origin: Origin) -> tuple[dict[str, Any], str]:
    """What a checkpoint says of itself, and why this run cannot resume it; "" where it can."""
    try:
        notes = json.loads((place / RUN).read_text(encoding="utf-8"))
        why = _difference(notes, asdict(origin))
        if not why and notes["step"] >= origin.rates["steps"]:
            why = f"has made {notes['step']} steps of {origin.rates['steps']}: give more --steps"
        return notes, why
    except OSError:
        return {}, "cannot be read: no folder of a run's checkpoint is there"
    except (ValueError, AttributeError, KeyError, TypeError):  # no JSON, or no object
        return {}, f"has a damaged {RUN}"


def _whole_beside(damaged: Path, origin: Origin) -> str:
    """The newest other checkpoint that is whole and of this run, in words; a collective."""
    for place in reversed(gathered(saved_in(damaged.parent))[0]):
        if place == damaged:  # on every rank: both are rank 0's
            continue
        if not first_word(_notes(place, origin)[1] or damage_of(place)):
            return f"; {place.name} beside it is whole: --resume {place}"
    return ""


def _difference(notes: dict[str, Any], own: dict[str, Any]) -> str:
    """What a checkpoint's origin has that this run has not, in words; "" for nothing."""
    for part, here in own.items():
        there = notes.get(part)
        if part == "rates" or there == here:
            continue
        if there is None:
            return f"has a damaged {RUN}, which names no {part}"
        if isinstance(here, dict) and isinstance(there, dict):
            key = next(k for k in {**here, **there} if here.get(k) != there.get(k))
            words = f"{key} {there.get(key)}, here {here.get(key)}"
            return f"is of another {part}: {words}" if part == "model" else f"is of other {words}"
        return f"is of {part} {there}, here {here}"
    return ""
