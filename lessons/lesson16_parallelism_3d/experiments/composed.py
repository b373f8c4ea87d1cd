"""Lesson 16: training by a step that is composed of pieces, on a mesh and in one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lessons.lesson16_parallelism_3d.experiments.proofs import CONFIG, LENGTH
from shared.data.rows import NO_TARGET, Text
from shared.measuring.traffic import count_traffic
from shared.model.language_model import LanguageModel
from shared.parallel3d.cutting import cut_model, cut_stages
from shared.parallel3d.mesh import Groups, make_groups
from shared.pipeline.executor import Pipeline
from shared.training.engine import Curve

ROWS, MICRO_BATCHES, RATE = 14, 3, 3e-3


def tied_model() -> LanguageModel:
    """The small language model, with one matrix for embedding and output."""
    torch.manual_seed(0)
    return LanguageModel(replace(CONFIG, tie_embeddings=True))


def ragged_batch(step: int) -> Text:
    """Rows of very different numbers of targets: some are prompts that are not learned."""
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(1, CONFIG.vocab_size, (ROWS, LENGTH + 1), generator=draw)
    targets = rows[:, 1:].clone()
    for row, prompt in zip(targets, torch.randint(LENGTH, (ROWS,), generator=draw), strict=True):
        row[: int(prompt)] = NO_TARGET
    return Text(rows[:, :-1].contiguous(), targets)


def composed(
    rank: int,
    groups: Groups,
    steps: int,
    step: Callable[..., Any],
    clip: Callable[..., Any],
    limit: float,
) -> tuple[Curve, dict[str, int]]:
    """Loss and norm of each step on this rank, and the bytes of the last one by the mesh's axis."""
    mesh, model = make_groups(groups), tied_model()
    cuts = cut_stages(model, mesh.pp.size)
    pipeline: Pipeline = cut_model(model, mesh, cuts, recompute=False, sequence_parallel=False)
    pipeline.sum_tied = False
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
    curve, sent = Curve([], []), dict[str, int]()
    for number in range(steps):
        with count_traffic() as traffic:
            given = (pipeline, optimizer, ragged_batch(number), mesh, MICRO_BATCHES, limit, clip)
            loss, norm = step(*given)
        curve.losses.append(float(loss))
        curve.norms.append(float(norm))
        sent = {
            axis: sum(call.num_bytes for call in traffic.calls if set(call.ranks) == set(ranks))
            for axis, ranks in {each: getattr(mesh, each).ranks for each in ("tp", "dp")}.items()
        }
    return curve, sent


def alone(steps: int, limit: float) -> Curve:
    """The same steps in one process."""
    model, curve = tied_model(), Curve([], [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for number in range(steps):
        batch = ragged_batch(number)
        optimizer.zero_grad()
        logits = model(batch.tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=NO_TARGET)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        curve.losses.append(loss.item())
        curve.norms.append(norm.item())
    return curve
