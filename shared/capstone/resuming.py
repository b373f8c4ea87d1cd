"""A run's checkpoints: folders by step, whole or not there, that any mode resumes on any ranks.

The tensors lie in torch's distributed format under their names in the whole model
(`shared.training.named_checkpoint`). Beside them lies what says whose they are. That and the
number of steps is all: batches and learning rates follow from seed and step, and without dropout
no random generator is drawn from.
"""

import json
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.capstone.config import Config
from shared.capstone.modes import Made
from shared.errors import InputError
from shared.ranks.agreement import first_word
from shared.ranks.group import Rank, current_rank
from shared.training.named_checkpoint import load_named, save_named

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

    Raises InputError on every rank where the disk refuses; what was there before still is.
    """
    place = folder / f"step_{step:08d}"
    notes = {"step": step, "mode": mode, "ranks": rank.world_size, **asdict(origin)}
    save_named(made.layout, made.optimizer, place, {RUN: json.dumps(notes, indent=1)})
    if rank.is_main:  # only older ones: those of a later step were left by a run that went wrong
        older = [each for each in saved_in(folder) if each.name < place.name]
        for each in older[: max(0, len(older) - (keep - 1))]:
            shutil.rmtree(each, ignore_errors=True)
    return place


def saved_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first: those that are written have other names."""
    return sorted(path for path in folder.glob("step_*") if NAME.fullmatch(path.name))


def resume_run(folder: Path, made: Made, origin: Origin) -> int:
    """Load the newest checkpoint of a folder, or the folder itself; returns its steps.

    A collective. Raises InputError on every rank, before anything is changed, where there is no
    checkpoint, where it is of another model or other data, naming what differs, and where no step
    is left. Warns on rank 0 where the learning rates from here on are not those of the run that was
    saved.
    """
    place, why, notes = folder, "", dict[str, Any]()
    try:
        place = folder if (folder / RUN).is_file() else (saved_in(folder) or [folder])[-1]
        notes = json.loads((place / RUN).read_text(encoding="utf-8"))
        why = _difference(notes, asdict(origin))
        if not why and notes["step"] >= origin.rates["steps"]:
            why = f"has made {notes['step']} steps of {origin.rates['steps']}: give more --steps"
    except OSError:
        why = "cannot be read: no folder of a run's checkpoint is there"
    except (ValueError, AttributeError, KeyError):  # no JSON, or no object
        why = f"has a damaged {RUN}"
    if words := first_word(why):
        raise InputError(f"checkpoint {place} {words}")
    there, here = notes.get("rates", origin.rates), origin.rates
    other = [f"{k} {there.get(k)}, here {v}" for k, v in here.items() if there.get(k) != v]
    if other and current_rank() == 0:
        words = "learning rates from here on are not those of the run that was saved"
        warnings.warn(f"{words}: {', '.join(other)}", stacklevel=2)
    return load_named(made.layout, made.optimizer, place)


def _difference(notes: dict[str, Any], own: dict[str, Any]) -> str:
    """What a checkpoint's origin has that this run has not, in words; "" for nothing."""
    for part, here in own.items():
        there = notes.get(part)
        if part == "rates" or there == here:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            key = next(k for k in {**here, **there} if here.get(k) != there.get(k))
            words = f"{key} {there.get(key)}, here {here.get(key)}"
            return f"is of another {part}: {words}" if part == "model" else f"is of other {words}"
        return f"is of {part} {there}, here {here}"
    return ""
