"""DeepSpeed's checkpoints for lesson 10: what is saved, converted, loaded on other ranks.

Every function runs on all ranks, with the rank's number first. See `ask_deepspeed`.
"""

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import main as make_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from lessons.lesson10_zero.experiments.deepspeed_tasks import deepspeed, error_of, stack, start

LAYERS, WIDTH = 4, 32
TAG = "step_2"


def save(rank: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train two steps, save in four forms, train two more.

    The forms: DeepSpeed's own (`save_checkpoint`), the 16-bit weights in one file
    (`save_16bit_model`), float32 weights in one file (what `zero_to_fp32.py` does), and the
    universal checkpoint, made of the first by `ds_to_universal`.

    Returns:
        The losses after the save, and each file with its bytes.
    """
    engine = _engine(config)
    for _ in range(2):
        _step(engine)
    place = Path(folder)
    engine.save_checkpoint(str(place), tag=TAG)
    if engine.zero_optimization_stage() == 3:
        engine.save_16bit_model(str(place), "weights_16bit.bin")
    dist.barrier()
    if rank == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(place), TAG)
        torch.save({name: x.clone() for name, x in weights.items()}, place / "weights_fp32.bin")
        _convert(place)
    dist.barrier()
    losses = [_step(engine) for _ in range(2)]
    engine.destroy()
    files = {p.relative_to(place).as_posix(): p.stat().st_size for p in place.rglob("*.*")}
    return {"losses": losses, "files": files}


def load(rank: int, config: dict[str, Any], folder: str, universal: bool) -> dict[str, Any]:
    """Load a checkpoint on these ranks and train two steps: the losses, or the error in a line."""
    if universal:
        config = config | {"checkpoint": {"load_universal": True}}
    engine = _engine(config)
    tag = f"{TAG}_universal" if universal else TAG
    error = error_of(lambda: engine.load_checkpoint(folder, tag=tag))
    losses = [] if error else [_step(engine) for _ in range(2)]
    engine.destroy()
    return {"error": error, "losses": losses}


def loads(rank: int, config: dict[str, Any], folder: str) -> dict[str, dict[str, Any]]:
    """What `load` gives for DeepSpeed's own form of a checkpoint, and for the universal one."""
    return {
        name: load(rank, config, folder, universal)
        for name, universal in (("sharded", False), ("universal", True))
    }


def built(rank: int, config: dict[str, Any], early: bool) -> dict[str, Any]:
    """The bytes a parameter that this rank holds of a model built before `zero.Init`, or inside.

    And what `load_state_dict` of a whole matrix says to the first layer then; the layer's shape
    beside, inside and after `GatheredParameters`, and what this rank reads of it in a second one
    when rank 0 has written sevens in the first.
    """
    if early:
        model = stack(LAYERS, WIDTH)
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = stack(LAYERS, WIDTH)
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    parts: list[Any] = [getattr(p, "ds_tensor", None) for p in model.parameters()]
    held += sum(part.nbytes for part in parts if part is not None)
    empty = torch.nn.Linear(WIDTH, WIDTH, bias=False).state_dict()
    weight: Any = model[0].weight
    shapes = [list(weight.shape)]
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        shapes.append(list(weight.shape))
        if rank == 0:
            torch.nn.init.constant_(weight, 7.0)
    shapes.append(list(weight.shape))
    with deepspeed.zero.GatheredParameters(weight):
        read = weight.detach().flatten()[-1:].tolist()
    return {
        "shapes": shapes,
        "read": read,
        "bytes a parameter": held / (LAYERS * WIDTH * WIDTH),
        "load_state_dict": error_of(lambda: model[0].load_state_dict(empty)),
    }


def _engine(config: dict[str, Any]) -> Any:
    model = stack(LAYERS, WIDTH)
    return start(model, config, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _step(engine: Any) -> float:
    """One step on the same rows on every rank: the numbers do not depend on how many there are."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def _convert(place: Path) -> None:
    asked = argparse.Namespace(
        input_folder=str(place / TAG),
        output_folder=str(place / f"{TAG}_universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        make_universal(asked)
