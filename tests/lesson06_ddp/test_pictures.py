"""The picture of hooks and messages: the order recorded in backward, and when messages leave."""

import torch
from torch import nn

from lessons.lesson06_ddp.experiments.pictures import completed_order, leaving_times


class Crossed(nn.Module):
    """Its second layer is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.unused = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.late(self.early(x).tanh())


def test_gradients_come_in_the_order_of_backward_and_unused_ones_not_at_all():
    model = Crossed()
    order = completed_order(model, model(torch.randn(2, 3)).sum())
    assert order == ["late.weight", "early.weight"]
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks), "the hooks are gone"


def test_a_message_waits_for_all_before_it_and_for_the_end_where_a_gradient_never_comes():
    assert leaving_times("abc", "bac") == {"a": 2, "b": 2, "c": 3}
    assert leaving_times("abc", "ca") == {"a": 2, "b": 3, "c": 3}
