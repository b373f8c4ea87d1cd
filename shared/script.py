"""What every lesson's script shares: flags, presets, a progress bar, metrics, clean failure."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from shared.errors import InputError, NoGroup
from shared.exercises.notebook import NotSolved
from shared.ranks.group import Rank

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ("tiny", "small", "large")
T = TypeVar("T")
_started = time.perf_counter()


def lesson_parser(
    lesson: str, description: str | None, *, dataset: str | None = None
) -> argparse.ArgumentParser:
    """The parser with the flags that all scripts have; add the lesson's own to it.

    `lesson` is the folder's name and the default folder under runs/. `dataset`, when given, is
    the default of a `--dataset` flag; `--empty` says what to do with half pairs in it.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, help="size (small on a CPU, large on a GPU)")
    parser.add_argument("--steps", type=positive_int, help="training steps (the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--mine", action="store_true", help="run my answers from lesson.ipynb")
    out = ROOT / "runs" / lesson
    parser.add_argument("--out", type=Path, default=out, help=f"results (runs/{lesson})")
    if dataset is not None:
        parser.add_argument("--dataset", default=dataset, help=f"data ({dataset})")
        what = "pairs with an empty side: refuse the data, or leave them out (error)"
        parser.add_argument("--empty", choices=("error", "drop"), default="error", help=what)
    return parser


def positive_int(text: str) -> int:
    """An argparse type for counts; raises ArgumentTypeError with the value that was given."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def choose_preset(args: argparse.Namespace, device: torch.device, presets: Mapping[str, T]) -> T:
    """The preset that was asked for, or the one that fits the device."""
    return presets[args.preset or ("large" if device.type == "cuda" else "small")]


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main; a user's mistake is one line on stderr and exit status 2.

    So is an exercise that a learner's own answer uses and nobody solved. Only rank 0 says it, since
    all ranks were given the same; a rank that did not meet the others speaks for itself. Ctrl-C
    ends with status 130.
    """
    try:
        main()
    except (InputError, NotSolved) as error:
        if isinstance(error, NoGroup) or os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def progress(items: Iterable[T], rank: Rank, label: str) -> Iterable[T]:
    """A progress bar on rank 0's terminal; silent on other ranks and in log files."""
    quiet = not (rank.is_main and sys.stderr.isatty())
    return tqdm(items, desc=label, disable=quiet, leave=False)


def checked_out(out: Path, flag: str = "--out") -> Path:
    """Make the folder for results now, before hours of training, or say why it cannot be.

    Raises InputError, naming the flag that gave it, when it cannot be made or written to.
    """
    probe = out / f".writable_{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{flag} {out} cannot be written ({error.strerror}): give a folder that can"
        ) from None
    return out


def write_metrics(
    out: Path, rank: Rank, *, headline: str, table: Sequence[Mapping[str, Any]], **extra: Any
) -> None:
    """Print the table and write metrics.json; call on rank 0 only, last.

    `headline` is the figure that matters, for run_all.sh's line; `table` is a list of rows, each
    a mapping from column to value. `extra` must be JSON and goes in as it is.
    """
    assert rank.is_main, f"rank {rank.rank} must not write metrics"
    record = {
        "lesson": Path(sys.argv[0]).resolve().parent.name,
        "world_size": rank.world_size,
        "device": torch.cuda.get_device_name() if rank.device.type == "cuda" else "cpu",
        "backend": rank.backend,
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - _started, 2),
        "headline": headline,
        "table": [dict(row) for row in table],
        **extra,
    }
    path = checked_out(out) / "metrics.json"
    aside = path.with_suffix(".json.part")
    aside.write_text(json.dumps(record, indent=1) + "\n")
    aside.replace(path)
    print(format_table(table))
    print(f"{headline} ({path})")


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text: words to the left, numbers to the right."""
    if not rows:
        return "(no rows)"
    columns = list(rows[0])
    texts = [[_text(row.get(column, "")) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(text[i]) for text in texts)) for i, column in enumerate(columns)
    ]
    numeric = [all(isinstance(row.get(c), int | float) for row in rows) for c in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(columns), rule, *(line(text) for text in texts)])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
