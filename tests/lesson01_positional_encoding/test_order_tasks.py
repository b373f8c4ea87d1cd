"""The bet of an order-blind reader is computed right, and what is not asked is not counted."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn

from lessons.lesson01_positional_encoding.experiments import order_tasks


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(AssertionError, match="'order' is none of"):
        order_tasks.make_batch("order", 1, 4, torch.Generator())


@pytest.mark.parametrize("task", order_tasks.TASKS)
def test_ceiling_equals_counting_all_sentences(task: str, monkeypatch) -> None:
    """With two words and four positions, every sentence and every order can be listed."""
    monkeypatch.setattr(order_tasks, "NUM_WORDS", 2)
    total = []
    for sentence in product(range(2), repeat=4):
        for asker in sentence:
            others = Counter(sentence)
            if task == "distance":
                others[asker] -= 1
            total.append(max(others.values()) / sum(others.values()))
    want = sum(total) / len(total)
    got = order_tasks.order_blind_ceiling(task, 4, num_sentences=20_000)
    assert got == pytest.approx(want, abs=0.01)


class AlwaysTheWordThreeToTheLeft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(words.roll(3, dims=1), order_tasks.NUM_WORDS).float()


def test_accuracy_is_by_position_and_skips_what_is_not_asked() -> None:
    share = order_tasks.accuracy(AlwaysTheWordThreeToTheLeft(), "distance", 10)
    assert share[:3].isnan().all()
    assert share[3:].tolist() == [1.0] * 7
    assert share.nanmean() == 1.0
    place = order_tasks.accuracy(AlwaysTheWordThreeToTheLeft(), "place", 10)
    assert place[6] == 1.0
    assert place[0] < 0.2
