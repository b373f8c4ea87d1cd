"""Lesson 06: broadcasts between ranks whose weights differ, and between ranks whose models do."""

import functools
from typing import Any, ClassVar

import torch
from torch import nn

from shared.exercises.expecting import recognise
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed
from shared.laboratories.lesson06 import KNOWN_ERRORS
from shared.laboratories.lesson06_nets import Net, clone


class Broadcasts:
    """An answer to 06.1: on models that agree, from rank src, and on models that do not."""

    SOURCES = ((0, 2), (2, 3))  # src, number of ranks
    # How rank 1's model differs, and the tensors in which it does.
    DIFFERENCES: ClassVar = {
        "shape": ("middle.weight",),
        "name": ("extra.weight", "extra.bias"),
        "requires_grad": ("middle.weight",),
        "dtype": ("middle.weight",),
        "buffer": ("shift",),
        "number of buffers": ("more",),
        "number of tensors": ("last.weight", "last.bias", "shift"),  # rank 1 lacks the first two
    }

    def __init__(self, answer: Any) -> None:
        self.answer, self.seed = answer, fresh_seed()
        heard = {kind: functools.partial(self._mismatch, kind) for kind in self.DIFFERENCES}
        different = RankCases(2, heard)
        self.group_of: dict[int | str, RankCases] = dict.fromkeys(heard, different)
        for src, n in self.SOURCES:
            self.group_of[src] = RankCases(n, {src: functools.partial(self._broadcast, src)})

    def outcome(self, case: int | str, *, apart: str) -> list[Any]:
        """Return by rank what was seen of a source, or heard of a difference."""
        return self.group_of[case].seen(case, apart=apart, known=KNOWN_ERRORS)

    def _broadcast(self, src: int, rank: int) -> tuple[dict, dict, bool]:
        """State before and after on this rank, and whether the tensors are the same objects."""
        torch.manual_seed(self.seed + rank)
        net = Net(tied=True, frozen=True).double()
        by_columns = net.last.weight.detach().T.contiguous().T
        net.last.weight = nn.Parameter(by_columns)
        net.register_buffer("cache", torch.randn(4), persistent=False)  # in no state_dict
        before, objects = (
            clone({**net.state_dict(), **dict(net.named_buffers())}),
            self._tensors(net),
        )
        trains = [each.requires_grad for each in objects]
        self.answer(net, src=src)
        after = self._tensors(net)
        same = all(a is b for a, b in zip(objects, after, strict=True))
        recognise(
            {"requires_grad is changed": same and trains != [each.requires_grad for each in after]},
            expected="frozen parameters frozen, and the others not",
            seen="another requires_grad than before",
        )
        return before, clone({**net.state_dict(), **dict(net.named_buffers())}), same

    @staticmethod
    def _tensors(net: Net) -> list[torch.Tensor]:
        return [*net.parameters(), *net.buffers()]

    def _mismatch(self, kind: str, rank: int) -> tuple[str, str]:
        """What a rank hears when rank 1 has built another model: the error's name and words."""
        torch.manual_seed(self.seed + rank)
        net = Net().double()
        if rank == 1 and kind == "shape":
            net.middle.weight = nn.Parameter(torch.zeros(49, 1).double())  # as many numbers
        if rank == 1 and kind == "name":
            net.extra = nn.Linear(2, 2).double()
        if rank == 1 and kind == "requires_grad":
            net.middle.weight.requires_grad_(False)
        if rank == 1 and kind == "dtype":
            net.middle.float()
        if rank == 1 and kind == "buffer":
            net.shift = torch.randn(4).double()
        if rank == 1 and kind == "number of buffers":
            net.register_buffer("more", torch.randn(4))  # the last of all
        if rank == 1 and kind == "number of tensors":
            del net.last
        try:
            self.answer(net)
        except NotImplementedError:
            raise
        except Exception as error:  # whatever it is, the check judges it
            name = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            return name, str(error)
        return "", "no error"


@once_an_answer
def broadcasts(answer: Any) -> Broadcasts:
    """Return the laboratory of an answer to 06.1, one for all its checks."""
    return Broadcasts(answer)
