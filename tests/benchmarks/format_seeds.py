"""Lesson 09's experiments from five sets of initial weights: what each 16-bit format costs.

python tests/benchmarks/format_seeds.py     some nine minutes on two cores
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lessons.lesson09_mixed_precision.experiments.formats import (
    first_model,
    round_stochastically,
    round_weights,
    train_in_format,
    train_stored_in,
)
from shared.results import format_table
from shared.training.loss import label_smoothed_loss
from shared.training.precision import DynamicLossScaler
from shared.training.reference_run import learning_rate, reference_batches
from shared.training.schedules import set_learning_rate

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHARE, STEPS = 2.0**-11, 25
SEEDS = (None, 0, 1, 2, 3)  # None: the weights of the reference run


class Kahan:
    """Rounds to bf16, and keeps what was cut off in a second number for the next step.

    A second number of bf16 is Kahan's sum; with one of float32 the two together are a master.
    """

    def __init__(self, rest: torch.dtype) -> None:
        self.rest, self.cut_off = rest, list[Tensor]()

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Round the parameters in place."""
        self.cut_off = self.cut_off or [torch.zeros_like(p) for p in parameters]
        for parameter, rest in zip(parameters, self.cut_off, strict=True):
            whole = parameter + rest
            parameter.copy_(whole.to(dtype))
            rest.copy_((whole - parameter).to(self.rest))


def arithmetic(seed: int | None) -> dict[str, float]:
    """Differences from float32's loss where the arithmetic is done in a format."""
    exact = train_in_format(FP32, STEPS, SHARE, seed=seed)[-1]
    scaler = DynamicLossScaler(2.0**24, growth_interval=5)
    runs = {
        "fp16": train_in_format(FP16, STEPS, SHARE, seed=seed),
        "bf16": train_in_format(BF16, STEPS, SHARE, seed=seed),
        "fp16 scaled": train_in_format(FP16, STEPS, SHARE, scaler, seed),
        "fp16, share 1/64": train_in_format(FP16, STEPS, 1 / 64, seed=seed),
    }
    return {name: round(run[-1] - exact, 4) for name, run in runs.items()}


def storage(seed: int | None, rate: float | None, steps: int = STEPS) -> dict[str, float]:
    """Differences from float32's loss where the weights are kept in a format."""
    draw = torch.Generator().manual_seed(0)
    exact = train_stored_in(FP32, steps, rate, seed)[0][-1]
    ways = {
        "fp16": (FP16, round_weights),
        "bf16": (BF16, round_weights),
        "bf16 stochastic": (BF16, lambda weights, _: round_stochastically(weights, draw)),
        "bf16 Kahan": (BF16, Kahan(BF16)),
        "bf16 masters": (BF16, Kahan(FP32)),
    }
    runs = {
        name: train_stored_in(dtype, steps, rate, seed, keep)
        for name, (dtype, keep) in ways.items()
    }
    return {name: round(losses[-1] - exact, 4) for name, (losses, _) in runs.items()}


def moments(seed: int | None, beta2: float, half: bool, steps: int = 50) -> tuple[float, Tensor]:
    """The last loss of the reference run so far, and AdamW's second moments."""
    model = first_model(seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, beta2), eps=1e-5)
    for number, batch in enumerate(reference_batches()[:steps], start=1):
        set_learning_rate(optimizer, learning_rate(number))
        optimizer.zero_grad()
        logits = model(batch.src, batch.tgt_in)
        loss = label_smoothed_loss(logits, batch.tgt_out, smoothing=0.0)
        loss.backward()
        optimizer.step()
        for state in optimizer.state.values() if half else ():
            round_weights([state["exp_avg"], state["exp_avg_sq"]], BF16)
    second = [optimizer.state[p]["exp_avg_sq"].flatten() for p in parameters]
    return loss.item(), torch.cat(second)


def clipped(seed: int | None, eps: float, order: str) -> float:
    """The loss after 25 steps of the reference run, clipped before or after unscaling or not."""
    model, scaler = first_model(seed), DynamicLossScaler()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), eps=eps, weight_decay=0.01)
    for number, batch in enumerate(reference_batches()[:STEPS], start=1):
        set_learning_rate(optimizer, learning_rate(number))
        optimizer.zero_grad()
        logits = model(batch.src, batch.tgt_in)
        loss = label_smoothed_loss(logits, batch.tgt_out, smoothing=0.0)
        scaler.scale(loss).backward()
        if order == "right":
            scaler.unscale_(optimizer)
        if order != "none":
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def moments_row(seed: int | None, beta2: float) -> dict[str, float]:
    """What bf16 moments change: the loss, and the second moment beside float32's, per weight."""
    (exact, v), (loss, rounded) = (moments(seed, beta2, half) for half in (False, True))
    ratio = (rounded[v > 0] / v[v > 0]).quantile(torch.tensor([0.1, 0.5, 0.9]))
    return {"loss": round(loss - exact, 5), "v, 10 %": ratio[0].item(), "median": ratio[1].item()}


def show(title: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print a table under its title."""
    print(f"\n{title}\n{format_table(list(rows))}", flush=True)


def main() -> None:
    """Print a table for each experiment, a row for each seed."""
    torch.set_num_threads(1)
    show("arithmetic in the format", ({"seed": seed, **arithmetic(seed)} for seed in SEEDS))
    for rate in (1e-5, 1e-4, 3e-4, 1e-3, 3e-3):
        show(f"weights, rate {rate:g}", ({"seed": seed, **storage(seed, rate)} for seed in SEEDS))
    for steps in (25, 50):
        own = partial(storage, rate=None, steps=steps)
        show(f"weights, the run's own rate, {steps}", ({"seed": s, **own(s)} for s in SEEDS))
    for beta2 in (0.98, 0.999):
        show(f"bf16 moments, beta2 {beta2}", ({"seed": s, **moments_row(s, beta2)} for s in SEEDS))
    orders = ("right", "wrong", "none")
    for eps in (1e-5, 1e-8):
        losses = ({"seed": s, **{o: clipped(s, eps, o) for o in orders}} for s in SEEDS)
        show(f"clipping, eps {eps:g}", losses)


if __name__ == "__main__":
    main()
