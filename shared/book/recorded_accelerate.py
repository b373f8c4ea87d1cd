"""What Accelerate does to plain objects and in a step, seen from outside while it does it."""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shared.book.film import BLUE_LIGHT, EMPTY, Film, one_picture, runs
from shared.book.planned import State
from shared.ecosystem.engines import forget_accelerate
from shared.measuring.traffic import count_traffic
from shared.plots import ORANGE, SKY
from shared.training.quiet_deepspeed import import_deepspeed

ACCELERATE_CHOICES = (("no", "yes"), (1, 2))


def accelerate_step(ranks: int, split_batches: str, accumulation: int) -> State:
    """What Accelerate makes of four plain objects, and of a step: seen before and after."""
    import_deepspeed("cuda")  # which Accelerate imports, and which talks
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress")  # of tqdm's, in a notebook
        import accelerate  # noqa: F401  # once, before the ranks are forked

    recorded = runs(_accelerate_rank, ranks, ACCELERATE_CHOICES)[split_batches, accumulation]
    rows = [f"rank {r}" for r in range(ranks)]
    return one_picture([each[0] for each in recorded], rows, "prepare()") | {
        "columns": ["model", "samples", "gradient", "learning rate"],
        "numbers": recorded[0][1],
    }


class _Seen:
    """A rank's row: its model, its samples, its gradient, its learning rate."""

    def __init__(self) -> None:
        self.film, self.row = Film(), [EMPTY] * 4

    def show(self, says: str, **cells: list[str]) -> None:
        for name, cell in cells.items():
            self.row[("model", "samples", "gradient", "rate").index(name)] = cell
        self.film.shoot([list(self.row)], says)


def _plain() -> tuple[Any, Any, Any, Any]:
    """A model, an optimizer, a loader and a schedule, as one process has them."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.arange(48.0).view(48, 1)), batch_size=12)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=48)
    return model, optimizer, loader, schedule


def _accelerate_rank(split_batches: str, accumulation: int) -> tuple[Film, dict[str, str]]:
    accelerator = _accelerator(split_batches == "yes", accumulation)
    model, optimizer, loader, schedule = _plain()
    seen, before = _Seen(), len(loader)
    seen.show(
        "Plain objects: a model, a loader of 4 batches of 12 samples, an optimizer, a schedule.",
        model=[type(model).__name__, BLUE_LIGHT],
        rate=[f"{schedule.get_last_lr()[0]:.3f}", BLUE_LIGHT],
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen.show(
        f"prepare() wrapped the model, and the loader has {len(loader)} batches a rank now.",
        model=[type(model).__name__, SKY],
    )
    with count_traffic() as traffic:
        for number, (batch,) in enumerate(loader, 1):
            seen.show(
                f"Micro-batch {number}: {len(batch)} samples a rank; each rank has its own.",
                samples=[f"{int(batch[0])} to {int(batch[-1])}", SKY],
            )
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                _show_gradient(seen.show, model, accelerator.sync_gradients)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                break
    rate = schedule.get_last_lr()[0]
    moved = f"{round((1 - rate) * 48)}"
    says = f"schedule.step() moved the schedule by {moved} of its 48 steps."
    seen.show(says, rate=[f"{rate:.3f}", SKY], gradient=EMPTY)
    return seen.film, {
        "batches a rank in an epoch, before and after": f"{before}, {len(loader)}",
        "all-reduces in a step": str(traffic.count("all_reduce")),
        "steps of the schedule in a step": moved,
    }


def _accelerator(split_batches: bool, accumulation: int) -> Any:
    """An Accelerator in the group that is open, without what one before it has left."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    forget_accelerate()
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {"LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, and not used
    config = DataLoaderConfiguration(split_batches=split_batches)
    return Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=accumulation)


def _show_gradient(show: Any, model: nn.Module, synchronised: bool) -> None:
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    value = f"{parameter.grad.item():.2f}"
    if synchronised:
        show("backward() has averaged the gradients.", gradient=[f"mean {value}", SKY])
    else:
        show("Not the last micro-batch: nothing is sent.", gradient=[f"own {value}", ORANGE])
