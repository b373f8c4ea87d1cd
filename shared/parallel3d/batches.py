"""What a step trains on: a replica's rows of a batch, its micro-batches, and their loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shared.data.batching import Batch
from shared.errors import InputError
from shared.tensor_parallel.conjugates import Group
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

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


Rows = Text | Batch


def own_rows(batch: Rows, replica: int, num_replicas: int, num_micro_batches: int) -> list[Rows]:
    """This replica's rows of a global batch, as micro-batches of as equal sizes as can be.

    Raises InputError where there is not a row for each.
    """
    num_rows, pieces = len(_tensors(batch)[0][1]), num_replicas * num_micro_batches
    if num_rows < pieces:
        raise InputError(
            f"a batch of {num_rows} rows cannot be cut into {pieces} micro-batches "
            f"({num_micro_batches} on each of {num_replicas} replicas): take {pieces} rows or more"
        )
    ends = [i * num_rows // pieces for i in range(pieces + 1)]
    first = replica * num_micro_batches
    found: list[Rows] = []
    for i in range(first, first + num_micro_batches):
        own = {name: x[ends[i] : ends[i + 1]] for name, x in _tensors(batch)}
        found.append(replace(batch, **own))
    return found


def _tensors(batch: Rows) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in vars(batch).items() if isinstance(x, Tensor)]


def padded(batch: Rows, multiple: int, pad_id: int) -> Rows:
    """Lengths that `multiple` divides, for sequence parallelism: the padding has no loss."""

    def longer(x: Tensor, filling: int) -> Tensor:
        return F.pad(x, (0, -x.shape[1] % multiple), value=filling)

    if isinstance(batch, Text):
        return Text(longer(batch.tokens, pad_id), longer(batch.targets, NO_TARGET))
    src, tgt_in, tgt_out = (longer(x, pad_id) for x in (batch.src, batch.tgt_in, batch.tgt_out))
    return replace(batch, src=src, tgt_in=tgt_in, tgt_out=tgt_out)


class Losses:
    """Each micro-batch's part of the mean loss of a global batch of `num_tokens`.

    Parts are sums over the replicas and micro-batches; `num_replicas` undoes the mean that is
    taken of the replicas' gradients.
    """

    def __init__(self, pieces: Sequence[Rows], num_tokens: int, num_replicas: int, pad_id: int):
        self.inputs: list[Tensor | Batch] = []
        self._targets: dict[int, tuple[Tensor, int]] = {}
        self.scale = num_replicas / max(num_tokens, 1)
        for piece in pieces:
            text = isinstance(piece, Text)
            self.inputs.append(piece.tokens if text else piece)
            targets = (piece.targets, NO_TARGET) if text else (piece.tgt_out, pad_id)
            self._targets[id(self.inputs[-1])] = targets

    def part(
        self, logits: Float[Tensor, "batch length part"], given: Tensor | Batch, tp: Group
    ) -> Float[Tensor, ""]:
        """The part of what was computed from `given`, one of `inputs`; logits are cut over tp."""
        targets, ignored = self._targets[id(given)]
        return vocab_parallel_cross_entropy(logits, targets, tp, ignored).sum() * self.scale
