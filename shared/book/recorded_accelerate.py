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
from shared.plots import GREEN, ORANGE, SKY
from shared.training.quiet_deepspeed import import_deepspeed

ACCELERATE_CHOICES = (("no", "yes"), (1, 2))
STEPS, BATCH = 48, 12  # samples, and as many steps of the schedule; samples of a batch
MOST = 4.2  # steps of the schedule that the bar has room for: three ranks make three


def accelerate_step(ranks: int, split_batches: str, accumulation: int) -> State:
    """What Accelerate makes of four plain objects, and of a step: seen before and after."""
    import_deepspeed("cuda")  # which Accelerate imports, and which talks
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress")  # of tqdm's, in a notebook
        import accelerate  # noqa: F401  # once, before the ranks are forked

    recorded = runs(_accelerate_rank, ranks, ACCELERATE_CHOICES)[split_batches, accumulation]
    rows = [f"rank {r}" for r in range(ranks)]
    state = one_picture([seen.film for seen, _ in recorded], rows, "prepare()")
    return {
        **state,
        **_drawn([seen for seen, _ in recorded], accumulation),
        "columns": ["model", "samples", "gradient", "learning rate"],
        "numbers": recorded[0][1],
    }


class _Seen:
    """A rank's row: its model, its samples, its gradient, its learning rate."""

    def __init__(self) -> None:
        self.film, self.row = Film(), [EMPTY] * 4
        self.batches: list[list[int]] = []  # samples of its micro-batches
        self.sent: list[bool] = []  # after each of them
        self.moments: list[tuple[int, float]] = []  # micro-batches so far, steps of the schedule

    def show(self, says: str, moved: float = 0, **cells: list[str]) -> None:
        for name, cell in cells.items():
            self.row[("model", "samples", "gradient", "rate").index(name)] = cell
        if self.film.shoot([list(self.row)], says):
            self.moments.append((len(self.batches), moved))


def _drawn(ranks: list[_Seen], accumulation: int) -> State:
    """The micro-batches as the ranks took them, and how far the schedule moved for it.

    The axis is in batches of one process. A step of the schedule is what one process does after
    `accumulation` of them.
    """
    size = len(ranks[0].batches[0]) / BATCH
    each, number = size * len(ranks), len(ranks[0].batches)  # batches at once, how often
    bars = [
        (rank, m * each + rank * size, m * each + (rank + 1) * size, text, (text, SKY))
        for rank, seen in enumerate(ranks)
        for m, batch in enumerate(seen.batches)
        for text in [f"{batch[0]} to {batch[-1]}"]
    ]
    for m, sent in enumerate(ranks[0].sent):
        text, colour = ("mean of all", GREEN) if sent else ("each its own", ORANGE)
        bars.append((len(ranks), m * each, (m + 1) * each, text, (text, colour)))
    return {
        "legend": "A bar is a micro-batch, by its samples; behind the last come the first again.",
        "lanes": {
            "names": [*(f"rank {rank}" for rank in range(len(ranks))), "gradients"],
            "bars": bars,
            "times": [each * m for m, _ in ranks[0].moments],
            "end": each * number,
            "says": f"samples in the order in which they are taken, {BATCH} a batch",
        },
        "fills": {
            "title": "Schedule; the line: one process, as many samples",
            "unit": "steps",
            "kinds": [("steps of the schedule", GREEN)],
            "labels": ["schedule"],
            "line": each * number / accumulation,
            "most": MOST,
            "steps": [[[moved]] for _, moved in ranks[0].moments],
        },
    }


def _plain() -> tuple[Any, Any, Any, Any]:
    """A model, an optimizer, a loader and a schedule, as one process has them."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    samples = TensorDataset(torch.arange(float(STEPS)).view(STEPS, 1))
    loader = DataLoader(samples, batch_size=BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    return model, optimizer, loader, schedule


def _accelerate_rank(split_batches: str, accumulation: int) -> tuple[_Seen, dict[str, str]]:
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
            seen.batches.append([int(sample) for sample in batch])
            seen.show(
                f"Micro-batch {number}: {len(batch)} samples a rank; each rank has its own.",
                samples=[f"{int(batch[0])} to {int(batch[-1])}", SKY],
            )
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                seen.sent.append(accelerator.sync_gradients)
                _show_gradient(seen.show, model, accelerator.sync_gradients)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                break
    rate = schedule.get_last_lr()[0]
    moved = round((1 - rate) * STEPS)
    says = f"schedule.step() moved the schedule by {moved} of its {STEPS} steps."
    seen.show(says, moved, rate=[f"{rate:.3f}", SKY], gradient=EMPTY)
    return seen, {
        "batches a rank in an epoch, before and after": f"{before}, {len(loader)}",
        "all-reduces in a step": str(traffic.count("all_reduce")),
        "steps of the schedule in a step": str(moved),
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
