"""Lesson 04's reference run under each engine: `train.py --curve`."""

import argparse
from typing import Any

from shared.ddp.engines import ENGINES, Engine, TrainStep, Wrap, reference_step
from shared.errors import InputError
from shared.experiments.lesson06_engines import ROUNDING
from shared.ranks.group import Rank
from shared.results import write_results
from shared.script import progress
from shared.training.reference_run import (
    GLOBAL_BATCH,
    TOLERANCE,
    checksum,
    compare_with_record,
    read_record,
    reference_model,
    run_reference,
)


def follow_curve(args: argparse.Namespace, rank: Rank, wrap: Wrap, train_step: TrainStep) -> None:
    """Take the script's own step through the run under each engine, or the one that is named.

    Raises AssertionError where a loss lies beyond the tolerance, and InputError where the run is
    another one: in bf16, or with ranks that cannot share its batches.
    """
    if args.precision == "bf16":
        raise InputError("--curve compares in float32, to the last digits: leave --precision out")
    if GLOBAL_BATCH % rank.world_size:
        raise InputError(
            f"--curve shares out batches of {GLOBAL_BATCH} pairs, which {rank.world_size} ranks do"
            " not divide: start 1, 2, 4 or 8"
        )
    args.preset = args.preset or "reference run"
    table = []
    for name in progress(ENGINES if args.engine == "all" else [args.engine], rank, "engines"):
        model = reference_model().to(rank.device)
        engine = wrap(name, model, rank.world_size, args.bucket_mb)
        losses = run_reference(reference_step(engine, rank, train_step))
        table.append(curve_row(engine, losses, checksum(model)))
    if rank.is_main:
        words = f"largest difference: {max(row['largest difference'] for row in table):.1e}"
        write_results(args, rank, headline=words, table=table)


def curve_row(engine: Engine, losses: list[float], checksum: str) -> dict[str, Any]:
    """How far an engine's reference run lies from lesson 04's record.

    Raises AssertionError where it lies beyond the tolerance.
    """
    record = read_record()
    return {
        "engine": engine.name,
        "last loss": round(losses[-1], 6),
        "largest difference": compare_with_record(losses),
        "rounding": ROUNDING,
        "tolerance": TOLERANCE,
        "weights": "bit for bit" if checksum == record["checksum_final"] else "within rounding",
    }
