"""DeepSpeed's precision sections on lesson 04's reference run: one rank, no compiled op.

In a process of its own: importing DeepSpeed logs, probes for libraries with the linker, and
changes torch.distributed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from shared.exercises.lessons import ROOT
from shared.ranks.group import process_group
from shared.ranks.logs import last_words
from shared.training.quiet_deepspeed import quiet_deepspeed
from shared.training.reference_run import (
    learning_rate,
    loss_of,
    reference_batches,
    reference_model,
    reference_optimizer,
)
from shared.training.schedules import set_learning_rate

MARK = "results: "  # the line of stdout that is ours


def run_deepspeed(
    configs: Mapping[str, Mapping[str, Any]], steps: int, timeout: float = 280.0
) -> dict[str, dict[str, Any]]:
    """For each configuration the reference run's first losses, or DeepSpeed's error in one line.

    The optimizer is the reference run's own AdamW (a "client optimizer"), which DeepSpeed wraps as
    the configuration says. Where DeepSpeed is not installed, that is every configuration's error.
    """
    done = subprocess.run(
        [sys.executable, "-m", "lessons.lesson09_mixed_precision.experiments.deepspeed_precision"],
        input=json.dumps({"configs": configs, "steps": steps}),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ | {"DS_ACCELERATOR": "cpu"},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        said = "\n".join(last_words(done.stderr))
        raise RuntimeError(f"DeepSpeed's process left with {done.returncode}: {said}")
    return json.loads(lines[-1].removeprefix(MARK))


def _run(config: dict[str, Any], steps: int) -> dict[str, Any]:
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    try:
        engine, *_ = quiet_deepspeed().initialize(
            model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
        )
    except Exception as error:  # whatever DeepSpeed raises is what the page shows
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    losses = []
    for number, batch in enumerate(reference_batches()[:steps], start=1):
        set_learning_rate(optimizer, learning_rate(number))
        loss = loss_of(engine, batch, batch.num_tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return {"losses": losses}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with process_group("cpu"):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        results = {name: _run(each, asked["steps"]) for name, each in asked["configs"].items()}
        print(MARK + json.dumps(results))
