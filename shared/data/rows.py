"""What a step trains on: rows of sentence pairs or of text, their micro-batches and targets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from shared.data.batching import Batch, moved
from shared.errors import InputError

NO_TARGET = -100  # a position that has no loss, as in F.cross_entropy


@dataclass(frozen=True)
class Text:
    """A language model's rows: tokens, and what follows each of them (-100 does not count)."""

    tokens: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]

    @property
    def num_tokens(self) -> int:
        """Positions that have a loss."""
        return int((self.targets != NO_TARGET).sum())

    def to(self, device: torch.device | str) -> "Text":
        """The same rows on another device; see `moved`."""
        return Text(moved(self.tokens, device), moved(self.targets, device))


Rows = Text | Batch
R = TypeVar("R", bound=Rows)


class Targets(NamedTuple):
    """The token to predict at each position, and the one that has no loss."""

    tokens: Int[Tensor, "batch length"]
    ignored: int


def own_rows(batch: R, replica: int, num_replicas: int, num_micro_batches: int) -> list[R]:
    """This replica's rows of a global batch, as micro-batches of as equal sizes as can be.

    Each has its own number of tokens. Raises InputError where there is not a row for each.
    """
    num_rows, pieces = len(_tensors(batch)[0][1]), num_replicas * num_micro_batches
    if num_rows < pieces:
        raise InputError(
            f"a batch of {num_rows} rows cannot be cut into {pieces} micro-batches "
            f"({num_micro_batches} on each of {num_replicas} replicas): take {pieces} rows or more"
        )
    ends = [i * num_rows // pieces for i in range(pieces + 1)]
    first = replica * num_micro_batches
    found: list[R] = []
    for i in range(first, first + num_micro_batches):
        own: dict[str, Any] = {name: x[ends[i] : ends[i + 1]] for name, x in _tensors(batch)}
        if isinstance(batch, Batch):  # what the last position may look at is what is not padding
            own["num_tokens"] = int(own["tgt_mask"][:, 0, -1].sum())
        found.append(replace(batch, **own))
    return found


def _tensors(batch: Rows) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in vars(batch).items() if isinstance(x, Tensor)]


def padded(batch: Rows, multiple: int, pad_id: int) -> Rows:
    """Lengths that `multiple` divides: the padding has no loss. Masks stay as they were."""

    def longer(x: Tensor, filling: int) -> Tensor:
        return F.pad(x, (0, -x.shape[1] % multiple), value=filling)

    if isinstance(batch, Text):
        return Text(longer(batch.tokens, pad_id), longer(batch.targets, NO_TARGET))
    src, tgt_in, tgt_out = (longer(x, pad_id) for x in (batch.src, batch.tgt_in, batch.tgt_out))
    return replace(batch, src=src, tgt_in=tgt_in, tgt_out=tgt_out)


def inputs_and_targets(
    pieces: Sequence[Rows], pad_id: int
) -> tuple[list[Tensor | Batch], list[Targets]]:
    """What a pipeline is given of each micro-batch, and what its last stage compares with."""
    inputs = [piece.tokens if isinstance(piece, Text) else piece for piece in pieces]
    targets = [
        Targets(piece.targets, NO_TARGET)
        if isinstance(piece, Text)
        else Targets(piece.tgt_out, pad_id)
        for piece in pieces
    ]
    return inputs, targets
