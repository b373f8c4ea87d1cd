"""Lesson 15's runs: schedules whose work takes a fixed time, and trained models under them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from shared.data.batching import Batch
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.pipeline.executor import Event, Pipeline
from shared.pipeline.schedules import Table
from shared.pipeline.stages import Carry, Part, parts_of, split_stages
from shared.training import reference_run
from shared.training.loss import label_smoothed_loss
from shared.training.schedules import set_learning_rate

Schedule = Callable[[int, int], Table]  # ranks, micro-batches


class _Pause(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Padded(Part):
    """A small matrix, whose forward and whose backward take a fixed time each.

    They sleep: with more ranks than cores, work that computes would wait for a core.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda batch: [tuple(batch.shape)])
        self.seconds, self.matrix = seconds, nn.Linear(8, 8)

    def forward(self, carry: Carry, batch: Tensor) -> Carry:
        """The matrix on what came, or on the batch in the first stage."""
        return (_Pause.apply(self.matrix(carry[0] if carry else batch), self.seconds),)


@dataclass(frozen=True)
class Case:
    """A schedule of stages whose work takes `seconds[stage]`, forward and backward each."""

    schedule: Schedule
    num_micro_batches: int
    seconds: Sequence[float]


def padded_runs(rank: int, cases: Sequence[Case]) -> list[list[Event]]:
    """What this rank did in each case, after a short step to warm up."""
    found = []
    for case in cases:
        torch.manual_seed(0)
        parts = [Padded(each) for each in case.seconds]
        pipeline = Pipeline(parts, split_stages([1.0] * len(parts), len(parts)))
        size = dist.get_world_size()
        for count in (size, case.num_micro_batches):
            batches = [torch.ones(1, 8) for _ in range(count)]
            dist.barrier()
            pipeline.train_step(case.schedule(size, count), batches, lambda y, _: y.sum())
        found.append(pipeline.events)
    return found


def measured_bubble(runs: Sequence[Sequence[Event]]) -> float:
    """The share of all ranks' time, from the first start to the last end, in which nothing ran."""
    events = [event for each in runs for event in each]
    whole = max(e.end for e in events) - min(e.start for e in events)
    return 1 - sum(e.end - e.start for e in events) / (len(runs) * whole)


def step_seconds(runs: Sequence[Sequence[Event]]) -> float:
    """Seconds from the first start to the last end."""
    events = [event for each in runs for event in each]
    return max(e.end for e in events) - min(e.start for e in events)


def language_model(tie: bool = True, num_layers: int = 6) -> LanguageModel:
    """The lesson's small language model, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(15)
        return LanguageModel(
            TransformerConfig(
                400, 64, 4, num_layers, 256, dropout=0.0, max_len=64, tie_embeddings=tie
            )
        )


def token_rows(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens of the small model's vocabulary, (rows, length)."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 400, (rows, length), generator=draw)


def sum_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The sum over all positions of the cross-entropy of the token that follows."""
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )


def gradients(
    rank: int, schedule: Schedule, num_stages: int, batches: Sequence[Tensor], tie: bool = True
) -> tuple[dict[str, Tensor], dict[int, int]]:
    """This rank's gradients by name after a step, and the most micro-batches alive by stage."""
    model = language_model(tie)
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = parts_of(model)
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), num_stages))
    pipeline.train_step(schedule(dist.get_world_size(), len(batches)), batches, sum_loss)
    grads = {names[p]: p.grad for p in pipeline.parameters() if p.grad is not None}
    return grads, {s: stage.most_alive for s, stage in pipeline.stages.items()}


def largest_difference(
    found: Sequence[tuple[dict[str, Tensor], Any]], batches: Sequence[Tensor], tie: bool = True
) -> float:
    """The largest difference of any rank's gradients from the whole model's, over their largest."""
    model = language_model(tie)
    for batch in batches:
        sum_loss(model(batch), batch).backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen = {name for grads, _ in found for name in grads}
    assert seen == whole.keys(), f"gradients of {seen ^ whole.keys()} on one side only"
    off = [
        float((grad - whole[name]).abs().max() / whole[name].abs().max())
        for grads, _ in found
        for name, grad in grads.items()
    ]
    return max(off)


def curve(
    rank: int, schedule: Schedule, num_stages: int, num_micro_batches: int, steps: int
) -> list[float]:
    """The first losses of lesson 04's reference run under a schedule."""
    parts = parts_of(reference_run.reference_model())
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), num_stages))
    return train(pipeline, schedule(dist.get_world_size(), num_micro_batches), steps)


def train(pipeline: Pipeline, table: Table, steps: int) -> list[float]:
    """Train the reference run's model for some steps of a schedule; the losses, on every rank."""
    num_micro_batches = 1 + max(cell.micro_batch for row in table for cell in row if cell)
    optimizer = reference_run.reference_optimizer(list(pipeline.parameters()))
    losses = []
    for number, batch in enumerate(reference_run.reference_batches()[:steps], start=1):
        set_learning_rate(optimizer, reference_run.learning_rate(number))
        optimizer.zero_grad()
        pieces = [
            reference_run.shard(batch, m, num_micro_batches) for m in range(num_micro_batches)
        ]
        own = pipeline.train_step(table, pieces, partial(part_of_loss, batch.num_tokens))
        total = torch.tensor(float(sum(own)))
        dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
    return losses


def part_of_loss(all_tokens: int, logits: Tensor, piece: Batch) -> Tensor:
    """A micro-batch's part of the mean over the tokens of the whole batch."""
    mean = label_smoothed_loss(logits, piece.tgt_out, smoothing=0.0)
    return mean * (piece.num_tokens / all_tokens)
