"""Lesson 09, the instructor's side: training in 16 bits without losing what 16 bits cannot hold.

The lesson's one idea: fp16 lacks range and bf16 lacks precision, so each loses another quantity,
fp16 the small gradients and bf16 the small updates. A loss scale mends the first, a float32 master
copy the second, and 8 bits need a scale a factor. Everything else is bookkeeping: who skips, who is
rounded when, what travels.

Points are the difficulty at the exercise (12 in all). To ask behind a right answer: why a power
of two changes no digit of a gradient; why bf16 needs no loss scale and fp16 with masters still
does; what is read again from the 16-bit weights after the first step (nothing); which of the 16
bytes an optimizer could do without, and what that costs.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.errors import InputError
from shared.ranks.group import current_world_size
from shared.training.precision import DynamicLossScaler, MasterWeightAdamW

__all__ = ["DynamicLossScaler", "MasterWeightAdamW", "accumulate", "float8_linear"]


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], Float[Tensor, ""]],
    scaler: DynamicLossScaler | None = None,
) -> Float[Tensor, ""]:
    """Add the gradient of the mean loss per token of *all* micro-batches of *all* ranks to .grad.

    `loss_of(model, micro_batch)` is one micro-batch's mean loss per token, which counts with its
    share of the tokens (`micro_batch.num_tokens`); one in fp16 is weighted in float32. `model` is a
    DistributedDataParallel, which averages over ranks, or a plain module where there is no process
    group. Gradients travel once. Returns this rank's part of the loss, unscaled, without its graph:
    the ranks' parts add up. Raises ValueError when there is no micro-batch.
    """
    if not micro_batches:
        raise InputError("a step needs at least one micro-batch, got 0")
    ranks = current_world_size()
    device = next(model.parameters()).device
    tokens = torch.tensor(sum(each.num_tokens for each in micro_batches), device=device)
    if ranks > 1:
        dist.all_reduce(tokens)
    total = tokens.item()  # a weight of two ints is a python float, and exact
    parts = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        # The forward too: torch's DDP decides in forward whether backward will send.
        alone = number < len(micro_batches) and isinstance(model, DistributedDataParallel)
        with model.no_sync() if alone else contextlib.nullcontext():
            loss = loss_of(model, micro_batch)
            # In fp16 the factors would meet one by one: 65,536 alone is infinite there.
            loss = loss.float() if loss.dtype == torch.float16 else loss
            part = loss * (micro_batch.num_tokens / total)
            weighted = part * ranks  # the engine divides by it
            (weighted if scaler is None else scaler.scale(weighted)).backward()
        parts.append(part.detach())
    return torch.stack(parts).sum()


def float8_linear(
    x: Float[Tensor, "rows width"],
    weight: Float[Tensor, "out width"],
    dtype: torch.dtype = torch.float8_e4m3fn,
    by_row: bool = False,
) -> Float[Tensor, "rows out"]:
    """x @ weight.T of factors in 8 bits, added up and returned in float32.

    A factor is divided by its scale, so that the largest of its numbers in size becomes the
    format's largest, and cast; the product is multiplied by both scales. A factor has one scale, or
    `by_row` one for each of its rows. Rows of zeros give zeros.
    """
    (a, scale_a), (b, scale_b) = (_in_8_bits(each, dtype, by_row) for each in (x, weight))
    return (a.float() @ b.float().T) * scale_a * scale_b.T


def _in_8_bits(
    factor: Float[Tensor, "rows width"], dtype: torch.dtype, by_row: bool
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "scales 1"]]:
    """The factor over its scale, in the format; and the scale, or those of its rows."""
    largest = factor.float().abs().amax(1 if by_row else (0, 1), keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    return (factor.float() / scale).to(dtype), scale


NOTES = {
    "09.1": """
DynamicLossScaler: 3 points, 30 minutes. Equal to GradScaler 1, skip and growth 1, ranks 1.
Look for: isfinite, not isinf (NaN counts too); the verdict of one step forgotten in the next; the
count of clean steps set back by an overflow and by a growth; the flag reduced over the ranks by all
of them, also by those that saw nothing. Ask what happens when the optimizer steps on one rank only.
Common mistakes: 1 / growth_factor in place of backoff_factor (equal at the defaults); unscaling
twice after clipping; growth_interval off by one.
""",
    "09.2": """
MasterWeightAdamW: 4 points, 35 minutes. The numbers 1, float32 states 1, a state_dict that stays
float32 1, in place and group by group 1.
Look for: master.float() once, not in every step; copy_ into the parameter; lr read from the group
at each step. load_state_dict is where almost everybody falls: torch casts states to the parameter's
dtype. Ask for the bytes before they count them.
Common mistakes: squaring the bf16 gradient; m and v by zeros_like(parameter), which is bf16; L2
decay added to the gradient (Adam, not AdamW).
""",
    "09.3": """
accumulate: 2 points, 20 minutes. Look for: one number reduced before the first backward, the last
micro-batch outside no_sync, a backward for each micro-batch (so that its activations are freed).
Common mistakes: loss / len(micro_batches); this rank's tokens only; the factor world_size.
""",
    "09.4": """
float8_linear: 3 points, 20 minutes. Look for: abs() before amax; keepdim, so that the rows' scales
fit both sides (the weight's are transposed); sums of float32 numbers, not of 8-bit ones. Ask why
scales may go by rows of both factors and not by columns: a scale has to be the same for all numbers
that are added up, or it cannot be taken out of the sum.
Common mistakes: no scale, which loses small weights in silence; a division by a row of zeros.
""",
}
