"""What the sharding room's docstrings promise of hooks, counters and whole tensors."""

import weakref

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.errors import InputError
from shared.measuring.live import settle
from shared.ranks.forked import run_ranks
from shared.sharding.backward import at_backward, at_end_of_backward, inside_backward
from shared.sharding.fully_shard import FullyShard
from shared.sharding.prefetch import PrefetchingShard
from shared.sharding.zero_reference import build_zero


def test_a_forward_that_is_computed_again_is_inside_of_backward():
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(inside_backward())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not inside_backward()


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_backward_is_heard_of_unless_it_failed(fails):
    heard = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: Tensor) -> None:
        at_end_of_backward(lambda: heard.append(x.grad is not None))
        if fails:
            raise RuntimeError("boom")

    y.register_hook(hook)
    if fails:
        with pytest.raises(RuntimeError, match="boom"):
            y.sum().backward()
    else:
        y.sum().backward()
    assert heard == ([] if fails else [True])


def test_inputs_call_once_when_backward_has_passed_all_of_them():
    calls = []
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (x, other), named = at_backward(lambda: calls.append(1), ((a, "as it is"), {"y": b * 2}))
    assert other == "as it is"
    (x * named["y"]).sum().backward()
    assert calls == [1]
    assert torch.equal(a.grad, torch.full((2,), 2.0))
    at_backward(lambda: calls.append(2), (torch.ones(2),))
    assert calls == [1], "no input needs a gradient: never"


class Twice(nn.Module):
    """A layer that is used twice, between two that are used once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.tanh(self.again(torch.tanh(self.first(x))))))


def test_counters_are_what_the_table_says():
    class Watched(FullyShard):
        def note(self, event: str) -> None:
            if hasattr(self, "events"):
                unit = self.units[1]
                left = unit in self._left
                row = (event, unit.users, unit.pending, unit.is_whole, left)
                self.events.append(row)

        def acquire(self, unit):
            super().acquire(unit)
            self.note("acquired")

        def _after_backward(self, units):
            super()._after_backward(units)
            self.note("passed")

        def on_shard_gradient(self, unit):
            self.note("arrived")

    def work(rank: int):
        model = Watched(Twice())
        model.events = []
        loss = model(torch.ones(1, 4, requires_grad=True)).sum()
        model.note("forward")
        loss.backward()
        model.note("backward")
        model.finish_gradient_sync()
        model.note("step")
        return model.events

    assert run_ranks(work, 1)[0] == [
        ("acquired", 0, 0, False, False),  # the first layer
        ("acquired", 1, 0, True, False),
        ("acquired", 1, 1, True, False),
        ("acquired", 0, 2, False, False),  # the last
        ("forward", 0, 2, False, False),
        ("acquired", 0, 2, False, False),  # the last: backward
        ("passed", 0, 2, False, False),
        ("acquired", 1, 2, True, False),
        ("arrived", 1, 2, True, False),  # the last one's gradient
        ("passed", 0, 1, False, False),
        ("acquired", 1, 1, True, False),
        ("passed", 0, 0, False, False),  # its gradients are there and it has left
        ("acquired", 0, 0, False, False),  # the first
        ("arrived", 0, 0, False, False),
        ("passed", 0, 0, False, False),
        ("arrived", 0, 0, False, False),
        ("backward", 0, 0, False, False),
        ("step", 0, 0, False, False),
    ]


class Nested(nn.Module):
    """A weight that a unit has, and the module around it uses once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) @ self.weight


def test_a_unit_that_two_modules_hold_stays_whole_in_later_micro_batches_too():
    def work(rank: int):
        torch.manual_seed(0)
        net = Nested()
        twin = nn.Linear(4, 4, bias=False)
        twin.load_state_dict({"weight": net.weight.detach().clone()})
        model = FullyShard(net)
        for number in range(3):
            x = torch.full((1, 4), number + 1.0, requires_grad=True)
            model(x).sum().backward()
            (torch.tanh(twin(x)) @ twin.weight).sum().backward()
        model.finish_gradient_sync()
        grads = model.each_whole(lambda unit: unit.shard.grad, lambda grad, _: grad.clone())
        return grads["inner.weight"], twin.weight.grad

    torch.testing.assert_close(*run_ranks(work, 2)[0])


def test_one_unit_at_a_time_is_put_together():
    def work(rank: int):
        model = FullyShard(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))
        alive, whole = [], []
        for unit in model.units:

            def full(part, full=unit.full):
                settle(0.005)  # gloo may hold what was sent a moment longer
                alive.append(sum(each() is not None for each in whole))
                pieces = full(part)
                whole.append(weakref.ref(pieces[0]._base))
                return pieces

            unit.full = full
        model.full_state_dict()
        return alive

    assert run_ranks(work, 2)[0] == [0] * 4


def test_nothing_is_fetched_ahead_in_an_evaluation_or_where_the_order_differs():
    class Net(nn.Sequential):
        turned = False

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self) if self.turned else self:
                x = layer(x)
            return x

    class Watched(PrefetchingShard):
        early = 0

        def acquire(self, unit):
            self.early += unit.is_on_its_way
            super().acquire(unit)

    def work(rank: int):
        net = Net(*(nn.Linear(4, 4) for _ in range(4)))
        model = Watched(net)

        def step(turned: bool) -> int:
            net.turned, model.early = turned, 0
            model(torch.ones(1, 4, requires_grad=True)).sum().backward()
            model.finish_gradient_sync()
            model.finish_gradient_sync()  # a second call does nothing
            return model.early

        found = [step(False), step(False)]
        model.early = 0
        with torch.no_grad():
            model(torch.ones(1, 4))
        return [*found, model.early, step(True), step(True)]

    assert run_ranks(work, 2)[0] == [0, 6, 0, 0, 6]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_state_of_other_parts_is_refused(stage):
    def work(rank: int):
        small, large = (build_zero(stage, nn.Linear(n, 2)) for n in (3, 5))
        with pytest.raises(InputError) as error:
            large.load_state_dict(small.state_dict())
        return str(error.value)

    assert run_ranks(work, 2)[0] == "the state's parts have [4] elements, these [6]"


def test_stage_3_refuses_a_forward_after_a_backward_that_failed():
    def work(rank: int):
        net = Twice()
        optimizer = build_zero(3, net)

        def boom(_: Tensor) -> None:
            raise RuntimeError("boom")

        out = net(torch.ones(1, 4, requires_grad=True))
        out.register_hook(lambda _: None)
        x = torch.ones(1, 4, requires_grad=True)
        handle = net.again.register_forward_hook(lambda _, __, y: y.register_hook(boom) and None)
        with pytest.raises(RuntimeError, match="boom"):
            net(x).sum().backward()
        handle.remove()
        with pytest.raises(RuntimeError, match=r"call zero_grad\(\)"):
            net(x)
        optimizer.zero_grad()
        assert {p.numel() for p in net.parameters()} == {0}
        net(x).sum().backward()
        optimizer.step()

    run_ranks(work, 2)


def test_units_of_zero_are_whole_inside_of_gathered_alone():
    def work(rank: int):
        net = Twice()
        optimizer = build_zero(3, net)
        sizes = []
        with optimizer.gathered():
            optimizer.zero_grad()
            sizes.append({p.numel() for p in net.parameters()})
            net(torch.ones(1, 4))
            sizes.append({p.numel() for p in net.parameters()})
        return [*sizes, {p.numel() for p in net.parameters()}]

    assert run_ranks(work, 2)[0] == [{16, 4}, {16, 4}, {0}]


def whole_after_forward(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    module = FullyShard(net, reshard_after_forward=False)
    module(torch.tensor([1, 2]))
    return [(unit.trained, unit.is_whole) for unit in module.units]


def test_only_trained_units_stay_whole_without_reshard_after_forward():
    for units in run_ranks(whole_after_forward, 2):
        assert len(units) == 3 and all(trained == whole for trained, whole in units)
