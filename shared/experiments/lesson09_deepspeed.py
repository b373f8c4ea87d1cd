"""DeepSpeed's precision sections on lesson 04's reference run: one rank, no compiled op."""

import contextlib
import logging
import os
from collections.abc import Generator, Mapping
from typing import Any

from shared.errors import InputError
from shared.training.reference_run import (
    learning_rate,
    loss_of,
    reference_batches,
    reference_model,
    reference_optimizer,
)
from shared.training.schedules import set_learning_rate


def quiet_deepspeed() -> Any:
    """Import DeepSpeed for the CPU, without its log and without its compiled collectives.

    On a CPU its first engine otherwise compiles `deepspeed_shm_comm` (minutes, once), which speeds
    up collectives inside one machine and changes no number. Raises InputError where it is missing.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # do not look for a GPU, and do not warn
    try:
        with (
            _without_stderr()
        ):  # it probes for libaio, and the linker complains where there is none
            import deepspeed
    except ImportError as error:
        raise InputError(
            f"DeepSpeed is not installed here ({error}): pip install deepspeed"
        ) from None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.CRITICAL)
    return deepspeed


@contextlib.contextmanager
def _without_stderr() -> Generator[None]:
    """Drop what this process and its children write to stderr, below Python."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def deepspeed_runs(
    rank: int, configs: Mapping[str, Mapping[str, Any]], steps: int
) -> dict[str, dict[str, Any]]:
    """For each configuration the reference run's first losses, or the error in one line.

    Call on a rank of `run_ranks`. The optimizer is the reference run's own AdamW (a "client
    optimizer"), which DeepSpeed wraps as the configuration says.
    """
    deepspeed = quiet_deepspeed()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "1"}
    return {name: _run(deepspeed, dict(config), steps) for name, config in configs.items()}


def _run(deepspeed: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=model.parameters(),
            config=config,
        )
    except Exception as error:  # whatever DeepSpeed raises is what the page shows
        words = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {words}"}
    losses = []
    for number, batch in enumerate(reference_batches()[:steps], start=1):
        set_learning_rate(optimizer, learning_rate(number))
        loss = loss_of(engine, batch, batch.num_tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    engine.destroy()
    return {"losses": losses, "weights": dtype}
