"""A step of the mesh's engine that ends in an error on every rank leaves nothing behind."""

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist

from shared.data.rows import Text
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import build_mesh, make_groups
from shared.ranks.forked import run_ranks
from shared.training.engine import train_step

CONFIG = TransformerConfig(
    24, 16, 4, 4, 32, dropout=0.0, max_len=16, tie_embeddings=True, norm="pre"
)


def rows(seed: int) -> Text:
    ids = torch.randint(0, 24, (8, 9), generator=torch.Generator().manual_seed(seed))
    return Text(ids[:, :-1], ids[:, 1:])


def after_an_error(
    rank: int, sizes: tuple[int, int, int], places: tuple[str, ...], options: dict[str, Any]
) -> dict[str, list[float]]:
    """Losses of three steps, by the place at which one between them failed; "" is nowhere."""
    mesh, found = make_groups(build_mesh(*sizes, dist.get_world_size())), {}
    for where in ("", *places):
        torch.manual_seed(0)
        engine = Parallel3D(
            LanguageModel(CONFIG), mesh, torch.optim.AdamW, lr=0.1, num_micro_batches=2, **options
        )
        losses = [train_step(engine, rows(0), max_norm=0.5).part.item()]
        if where:
            handle = raise_once(engine, where)
            with pytest.raises(ZeroDivisionError):
                train_step(engine, rows(1), max_norm=0.5)
            handle.remove()
            if options.get("zero") == 3:
                assert not any(unit.is_whole for unit in engine.replicas.sharded.units)
        for seed in (2, 3):
            losses.append(train_step(engine, rows(seed), max_norm=0.5).part.item())
        found[where] = losses
    return found


def raise_once(engine: Parallel3D, where: str):
    """Let the second micro-batch raise on every rank, after a layer or inside it."""
    calls = itertools.count()

    def raises(*_):
        raise ZeroDivisionError

    def hook(part, args, output):
        output = output[0] if isinstance(output, tuple) else output
        if next(calls) == 1:
            if where in ("forward", "halfway"):
                raises()
            output.register_hook(raises)

    part = engine.pipeline.own[1]
    if where in ("inside", "halfway"):
        part = next(m for name, m in part.named_modules() if name.endswith("self_attention"))
    return part.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 2), {"sequence_parallel": True}),
        ((2, 1, 2), {"zero": 1}),
        ((2, 1, 2), {"zero": 2}),
        ((2, 1, 2), {"zero": 3}),
        ((2, 1, 2), {"checkpoint": True}),
    ],
)
def test_an_error_and_the_next_step_are_as_if_the_step_had_not_been(sizes, options):
    places = ("forward", "backward")
    if "checkpoint" not in options:  # there a layer's forward runs twice
        places += ("inside", "halfway")
    for found in run_ranks(after_an_error, 4, sizes, places, options, timeout=90):
        assert found == dict.fromkeys(("", *places), found[""])
