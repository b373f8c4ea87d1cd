"""Mistakes on purpose: both receive first, means of means, tied copies left alone."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.lesson15_pipeline_parallel.experiments.runs import (
    language_model,
    sum_loss,
    token_rows,
    train,
)
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import gpipe_schedule
from shared.pipeline.stages import parts_of, split_stages
from shared.training import reference_run


def both_receive_first(rank: int) -> None:
    """Two ranks exchange a tensor, and each receives before it sends."""
    come = torch.empty(4)
    dist.recv(come, 1 - rank)
    dist.send(torch.ones(4), 1 - rank)


def mean_of_means(lengths: Sequence[int]) -> float:
    """How far the gradient of the mean of the micro-batches' means is from that of all tokens.

    Relative to the latter's norm; one row in each micro-batch, of these lengths.
    """
    batches = [token_rows(1, length, seed=length) for length in lengths]
    tokens = [length - 1 for length in lengths]
    found = []
    for divisors in ([sum(tokens)] * len(tokens), [len(tokens) * n for n in tokens]):
        model = language_model()
        for batch, divisor in zip(batches, divisors, strict=True):
            (sum_loss(model(batch), batch) / divisor).backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    right, wrong = found
    return float((wrong - right).norm() / right.norm())


def tied_copies(rank: int, steps: int, summed: bool) -> Tensor:
    """The output matrix, or the embedding tied to it, as this rank has it after some steps."""
    model = reference_run.reference_model()
    tied, parts = model.output.weight, parts_of(model)
    cuts = split_stages([1.0] * len(parts), dist.get_world_size())
    pipeline = Pipeline(parts, cuts, sum_tied=summed)
    train(pipeline, gpipe_schedule(dist.get_world_size(), 4), steps)
    return tied.detach()
