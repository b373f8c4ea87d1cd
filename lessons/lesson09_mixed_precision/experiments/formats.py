"""Training as a 16-bit format would have it, on any machine: results rounded, sums in float32.

A tensor core multiplies 16-bit numbers, adds in float32 and rounds the result. So does this: the
output of every module without children (linear layers, norms, embeddings, ReLU), every weight that
one reads and every gradient that leaves one is rounded to the format. What lies between modules
(attention's scores and softmax, the residual sums) is not. It is as fast as float32 is here, and no
machine's 16-bit kernels play a part.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from shared.data.batching import Batch
from shared.model.transformer import Transformer
from shared.training.loss import label_smoothed_loss
from shared.training.reference_run import (
    CONFIG,
    learning_rate,
    reference_batches,
    reference_model,
    reference_optimizer,
)
from shared.training.schedules import set_learning_rate


class Rounded(torch.autograd.Function):
    """The nearest number of a format, forward; the nearest gradient of it, backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype).to(grads[0].dtype), None


@contextlib.contextmanager
def rounding(model: nn.Module, dtype: torch.dtype) -> Generator[None]:
    """Round what every layer without children gives, and the gradient that comes back to it."""
    leaves = [each for each in model.modules() if not list(each.children())]

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return Rounded.apply(output, dtype) if isinstance(output, Tensor) else None

    handles = [each.register_forward_hook(hook) for each in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logits_in(
    model: nn.Module, batch: Batch, dtype: torch.dtype
) -> Float[Tensor, "batch target vocab"]:
    """The model's logits with weights, layer outputs and all their gradients in the format."""
    if dtype == torch.float32:
        return model(batch.src, batch.tgt_in)
    weights = {name: Rounded.apply(p, dtype) for name, p in model.named_parameters()}
    with rounding(model, dtype):
        return functional_call(model, weights, (batch.src, batch.tgt_in))


def first_model(seed: int | None) -> Transformer:
    """The reference model with its own initial weights, or those of a different seed."""
    if seed is None:
        return reference_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(CONFIG)


def train_in_format(
    dtype: torch.dtype, steps: int, share: float = 1.0, scaler: Any = None, seed: int | None = None
) -> list[float]:
    """The losses of the reference run, computed in a format; weights and AdamW stay float32.

    Each batch is taken as one of 1 / share equal micro-batches of a larger batch: its loss counts
    with `share`, and the gradients are added up (multiplied) in float32 afterwards. With a power of
    two, float32 gives the same bits whatever the share is. A scaler scales, unscales and skips.
    """
    model = first_model(seed)
    optimizer = reference_optimizer(list(model.parameters()))
    losses = []
    for number, batch in enumerate(reference_batches()[:steps], start=1):
        set_learning_rate(optimizer, learning_rate(number))
        optimizer.zero_grad()
        loss = label_smoothed_loss(logits_in(model, batch, dtype), batch.tgt_out, smoothing=0.0)
        part = loss * share
        (part if scaler is None else scaler.scale(part)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], share)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def round_weights(parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Replace every number by the nearest of a format, in place."""
    for parameter in parameters:
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def round_stochastically(parameters: Sequence[Tensor], generator: torch.Generator) -> None:
    """Replace every float32 number by one of its two bf16 neighbours, the nearer one more often.

    In place. The mean of what comes out is the number itself: bf16 is the upper half of a float32,
    and a random lower half carries into it as often as the true lower half is large.
    """
    for parameter in parameters:
        bits = parameter.detach().view(torch.int32)
        bits += torch.randint(0, 2**16, bits.shape, generator=generator, dtype=torch.int32)
        bits &= -(2**16)


def train_stored_in(
    dtype: torch.dtype,
    steps: int,
    rate: float | None,
    seed: int | None = None,
    keep: Callable[[Sequence[Tensor], torch.dtype], None] = round_weights,
) -> tuple[list[float], float]:
    """Losses where only the *weights* are kept in a format, and the share of weights ever moved.

    Forward, backward and AdamW are float32; after each step `keep` rounds the weights. The learning
    rate is constant, or the reference run's own where it is None.
    """
    model = first_model(seed)
    parameters = list(model.parameters())
    optimizer = reference_optimizer(parameters)
    round_weights(parameters, dtype)
    before = [p.detach().clone() for p in parameters]
    moved = [torch.zeros_like(p, dtype=torch.bool) for p in parameters]
    losses = []
    for number, batch in enumerate(reference_batches()[:steps], start=1):
        set_learning_rate(optimizer, learning_rate(number) if rate is None else rate)
        optimizer.zero_grad()
        logits = model(batch.src, batch.tgt_in)
        loss = label_smoothed_loss(logits, batch.tgt_out, smoothing=0.0)
        loss.backward()
        optimizer.step()
        keep(parameters, dtype)
        for ever, parameter, first in zip(moved, parameters, before, strict=True):
            ever |= parameter != first
        losses.append(loss.item())
    return losses, torch.cat([ever.flatten() for ever in moved]).float().mean().item()


def layer_gradients(model: nn.Module, batch: Batch, share: float = 1.0) -> Float[Tensor, "count"]:
    """The gradients at the outputs of all linear layers, in float32, in one vector."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: found.append(grad.detach().flatten()))

    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    handles = [each.register_forward_hook(hook) for each in layers]
    logits = model(batch.src, batch.tgt_in)
    (share * label_smoothed_loss(logits, batch.tgt_out, smoothing=0.0)).backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return torch.cat(found)
