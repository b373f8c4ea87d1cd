"""The reference run as frameworks want it: a model that returns its loss, rows, a collator.

Accelerate, the Trainer and Fabric bring a loop, a sampler or a wrapper of their own. What they are
all given is here, once; so what differs between two of them is theirs.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from shared.data.rows import NO_TARGET
from shared.measuring.live import live_tensors
from shared.measuring.traffic import Traffic
from shared.ranks.group import current_rank, current_world_size
from shared.sharding.counting import ring_bytes
from shared.training.reference_run import (
    CONFIG,
    GLOBAL_BATCH,
    NUM_STEPS,
    learning_rate,
    reference_batches,
    reference_model,
    reference_optimizer,
)
from shared.training.schedules import set_learning_rate

Row = dict[str, Tensor]
CPU = torch.device("cpu")
PAD = {"src": CONFIG.pad_id, "tgt_in": CONFIG.pad_id, "labels": NO_TARGET}


class WithLoss(nn.Module):
    """A model that returns its own loss, as those of transformers do.

    With `num_items_in_batch` the sum over this rank's tokens is divided by it (the tokens of all
    ranks, if the caller has counted them); without, the loss is the mean over this rank's tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.parts: list[Tensor] = []

    def forward(
        self,
        src: Int[Tensor, "batch source"],
        tgt_in: Int[Tensor, "batch target"],
        labels: Int[Tensor, "batch target"],
        num_items_in_batch: Tensor | int | None = None,
        **more: Any,  # the Trainer counts tokens only for a forward that takes any keyword
    ) -> dict[str, Tensor]:
        """The loss, under the name that the Trainer looks for."""
        logits = self.model(src, tgt_in).flatten(0, 1).float()
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=NO_TARGET, reduction="sum")
        tokens = (labels != NO_TARGET).sum()
        self.parts.append(torch.stack([total.detach(), tokens.to(total.dtype)]))
        return {"loss": total / (tokens if num_items_in_batch is None else num_items_in_batch)}

    def curve(self, all_ranks: bool = True) -> list[float]:
        """The mean loss per token of each global batch, however a loop has weighted it."""
        found = torch.stack(self.parts)
        if all_ranks and current_world_size() > 1:
            dist.all_reduce(found)
        return (found[:, 0] / found[:, 1]).tolist()


def rows_of(num_steps: int, batch: int = GLOBAL_BATCH) -> list[Row]:
    """The first `batch` sentence pairs of each of the reference run's global batches, in order."""
    rows = []
    for whole in reference_batches()[:num_steps]:
        labels = whole.tgt_out.masked_fill(whole.tgt_out == CONFIG.pad_id, NO_TARGET)
        for i in range(batch):
            rows.append({"src": whole.src[i], "tgt_in": whole.tgt_in[i], "labels": labels[i]})
    return rows


def pad_rows(rows: list[Row]) -> Row:
    """A batch of rows, padded to the longest of them."""
    found = {}
    for name, fill in PAD.items():
        longest = max(len(row[name]) for row in rows)
        padded = [F.pad(row[name], (0, longest - len(row[name])), value=fill) for row in rows]
        found[name] = torch.stack(padded)
    return found


@dataclass
class Task:
    """What a loop is given: model, rows, rates; this rank's place; what is to be looked at.

    On n ranks a step takes 32 // n rows of each global batch on each rank: on 1, 2 or 4 ranks the
    reference run itself.
    """

    num_steps: int = NUM_STEPS
    traffic: Traffic | None = None
    device: torch.device = CPU
    model: WithLoss = field(default_factory=lambda: WithLoss(reference_model()))
    marks: list[int] = field(default_factory=list)  # calls before each forward
    kept: int = 0  # bytes at rest, of all floating-point tensors; where traffic is counted
    wrapped: str = ""  # the class that the loop made of the model

    def __post_init__(self) -> None:
        self.rank, self.ranks = current_rank(), current_world_size()
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        self.model.to(self.device)
        self.rows = GLOBAL_BATCH // self.ranks
        self.data = rows_of(self.num_steps, self.rows * self.ranks)
        # The parameters are in here; they are sharded or kept.
        self._before = {} if self.traffic is None else _floats()
        self._own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        self.model.register_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        """Before a forward, and before every hook of an engine: nothing is gathered yet."""
        if self.traffic is None:
            return
        self.marks.append(len(self.traffic.calls))
        if len(self.marks) == self.num_steps:
            now = _floats()
            others = self._before.keys() - self._own
            self.kept = sum(size for place, size in now.items() if place not in others)

    def optimizer(self, parameters: Any) -> torch.optim.AdamW:
        """The reference run's, at the first step's rate."""
        made = reference_optimizer(list(parameters))
        for group in made.param_groups:
            group["lr"] = learning_rate(1)
        return made

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The reference run's rates, as a scheduler that is stepped once after each step."""
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"] = 1.0
        return LambdaLR(optimizer, lambda done: learning_rate(min(done + 1, NUM_STEPS)))

    def loader(self) -> DataLoader:
        """All rows in order, in batches of one rank: for who shares them out by himself."""
        return DataLoader(self.data, batch_size=self.rows, collate_fn=pad_rows)  # ty: ignore

    def batches(self) -> Iterator[tuple[float, Row, Tensor]]:
        """By step: the rate, this rank's rows, the number of tokens of all ranks."""
        for step, batch in enumerate(self.loader()):
            if step % self.ranks == self.rank:
                batch = {name: x.to(self.device) for name, x in batch.items()}
                count = count_tokens(batch)
                yield learning_rate(step // self.ranks + 1), batch, count

    def losses(self) -> list[float]:
        """The losses of the global batches; call it on all ranks."""
        return self.model.curve()

    def messages(self) -> tuple[int, int]:
        """Messages from one forward to the next, the last two, and what of them this rank sends."""
        assert self.traffic is not None
        calls = self.traffic.calls[self.marks[-2] : self.marks[-1]]
        return len(calls), round(ring_bytes(Traffic(calls)))


def one_process(num_steps: int, device: torch.device = CPU) -> list[float]:
    """The same batches in this process by itself: what every loop is held against.

    On 1, 2 or 4 ranks these are the losses of lesson 04's record.
    """
    batch = GLOBAL_BATCH // current_world_size() * current_world_size()
    rows, model = rows_of(num_steps, batch), WithLoss(reference_model()).to(device)
    optimizer = reference_optimizer(list(model.parameters()))
    for step in range(num_steps):
        set_learning_rate(optimizer, learning_rate(step + 1))
        whole = pad_rows(rows[step * batch : (step + 1) * batch])
        loss = model(**{name: x.to(device) for name, x in whole.items()})["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.curve(all_ranks=False)


def count_tokens(batch: Row) -> Tensor:
    """The tokens of a batch on all ranks: one message of eight bytes."""
    count = (batch["labels"] != NO_TARGET).sum()
    if current_world_size() > 1:
        dist.all_reduce(count)
    return count


def _floats() -> dict[int, int]:
    """The bytes of every storage that a floating-point tensor has, by its address."""
    floats = (x for x in live_tensors() if x.device.type != "meta" and x.is_floating_point())
    storages = [getattr(x, "_local_tensor", x).untyped_storage() for x in floats]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


Loop = Callable[[Task], None]
