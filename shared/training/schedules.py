"""The learning rate over the steps of a training."""

import math

import torch


def warmup_schedule(step: int, d_model: int, warmup_steps: int) -> float:
    """The learning rate of Vaswani et al. 2017, section 5.3, at `step`, counted from 1.

    d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5): a straight line up to the peak
    (d_model * warmup_steps)^-0.5 at step `warmup_steps`, then down with the root of the step.
    Raises ValueError if `step` or `warmup_steps` is below 1.
    """
    if step < 1 or warmup_steps < 1:
        raise ValueError(f"steps count from 1: got step {step}, warmup_steps {warmup_steps}")
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def cosine_schedule(
    step: int, warmup_steps: int, total_steps: int, peak: float, floor: float = 0.0
) -> float:
    """Linear warm-up to `peak` at step `warmup_steps`, then half a cosine down to `floor`.

    Steps count from 1; the floor is reached at `total_steps` and kept after it.
    Raises ValueError if `step` is below 1 or the warm-up does not end before `total_steps`.
    """
    if step < 1:
        raise ValueError(f"steps count from 1: got step {step}")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warm-up of {warmup_steps} steps must end before step {total_steps}")
    if step < warmup_steps:
        return peak * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group this learning rate, from the next `step()` on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
