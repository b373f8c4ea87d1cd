"""The versions by hand beside torch's DDP and beside one process: what checks do not look at."""

import pytest
import torch
import torch._dynamo  # imported once here, not in every forked rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lessons.lesson06_ddp.checks import expect_messages
from lessons.lesson06_ddp.laboratory.engines import Step
from shared.exercises.nets import Case
from shared.exercises.wrong import Wrong
from shared.measuring.traffic import count_traffic
from shared.ranks.agreement import agree_on, fingerprint
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks
from solutions.lesson06_ddp import (
    BucketedDDP,
    OverlappedDDP,
    average_gradients,
)

BY_HAND = [OverlappedDDP, BucketedDDP]


class Net(nn.Module):
    """Two dtypes, a tied weight, a transposed parameter, a frozen one, a buffer, a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.c.weight = self.b.weight
        self.norm = nn.BatchNorm1d(7)
        self.turned = nn.Parameter(torch.randn(3, 7).T)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.short = nn.Linear(3, 2).to(torch.bfloat16)

    def forward(self, x, use_c=True):
        h = self.norm(self.b(self.a(x).tanh()))
        h = self.c(h) if use_c else h
        return self.short((h @ self.turned + self.frozen).to(torch.bfloat16)).float()


def gradients(rank, engine, steps=3):
    """The gradients of every step, from weights that differ between the ranks."""
    torch.manual_seed(rank)
    net = Net()
    ddp = engine(net)
    found = []
    for step in range(steps):
        net.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()
        getattr(ddp, "finish_gradient_sync", lambda: None)()
        found.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_gradient_of_every_step_is_torchs(world_size):
    theirs = run_ranks(gradients, world_size, DistributedDataParallel)
    for engine in (*BY_HAND, lambda net: BucketedDDP(net, 0.0002)):
        ours = run_ranks(gradients, world_size, engine)
        for mine, want in zip(ours, theirs, strict=True):
            for step, wanted in zip(mine, want, strict=True):
                assert step.keys() == wanted.keys()
                for name, grad in step.items():
                    # A sum of three bf16 numbers depends on who adds first, by several per cent.
                    loose = {"rtol": 0.1, "atol": 0.01} if grad.dtype == torch.bfloat16 else {}
                    torch.testing.assert_close(grad, wanted[name], **loose)


def wrapper_facts(rank, engine):
    net = Net()
    ddp = engine(net)
    outer = nn.Sequential(ddp)
    state = ddp.state_dict()
    ddp.load_state_dict({name: each + 0 for name, each in state.items()})
    ddp.eval()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = ddp.nothing_of_the_kind
    return (
        list(state),
        list(net.state_dict()),
        next(iter(outer.state_dict())),
        net.training,
        ddp.b is net.b,
    )


@pytest.mark.parametrize("engine", BY_HAND)
def test_the_wrapper_stands_in_the_models_place(engine):
    names, bare, nested, training, same = run_ranks(wrapper_facts, 1, engine)[0]
    assert names == bare
    assert nested == "0.turned"
    assert not training
    assert same


def forgotten(rank, engine):
    ddp = engine(nn.Linear(2, 1))
    ddp(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"finish_gradient_sync\(\) was not called"):
        ddp(torch.ones(1, 2))
    with torch.no_grad():
        ddp(torch.ones(1, 2))  # looking is allowed
    ddp.finish_gradient_sync()
    ddp(torch.ones(1, 2)).sum().backward()
    loss = nn.functional.mse_loss(ddp.module(torch.ones(1, 2)), torch.ones(1, 1))
    with pytest.raises(RuntimeError, match=r"second backward\(\)"):
        loss.backward()
    ddp.finish_gradient_sync()


@pytest.mark.parametrize("engine", BY_HAND)
def test_a_step_that_is_not_finished_is_an_error_and_not_a_wrong_number(engine):
    run_ranks(forgotten, 2, engine)


def adopted_order(rank, engine):
    """Bytes of the messages that have left when backward comes to a layer registered last."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(n, n) for n in (3, 4, 5))

        def forward(self, x):
            x = self.first(x)[:, :4]
            x.register_hook(lambda grad: seen.append(len(traffic.calls)))
            return self.last(self.middle(x)[:, :3])

    ddp, counts = engine(Turned()), []
    for _ in range(3):
        seen: list[int] = []
        ddp.module.zero_grad()
        with count_traffic() as traffic:
            ddp(torch.ones(2, 5)).sum().backward()
        counts.append(seen[0])
        ddp.finish_gradient_sync()
    return counts


def test_from_the_second_step_on_messages_leave_in_the_order_of_completion():
    first, second, third = run_ranks(adopted_order, 2, OverlappedDDP)[0]
    assert (first, second, third) == (0, 4, 4)


def test_ranks_with_different_numbers_of_batches():
    with pytest.raises(RankFailed, match=r"rank 0: 3, rank 1: 2\); drop the last"):
        run_ranks(lambda rank: agree_on("their number of batches", 3 - rank, "drop the last"), 2)


def test_agreeing_alone_needs_no_group():
    agree_on("anything", 1)
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])


def messages_of(rank, build, options):
    """Bytes of each all-reduce of a third step, when every bucket has its final size."""
    model = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(4)))
    ddp = build(model, **options)
    for _ in range(3):
        with count_traffic() as traffic:
            ddp(torch.ones(1, 400)).sum().backward()
            getattr(ddp, "finish_gradient_sync", lambda: None)()
    return [call.num_bytes for call in traffic.calls if call.op == "all_reduce"]


def test_torchs_first_bucket_is_smaller_only_where_no_size_is_given():
    layer = 4 * 400 * 400  # bytes; two of them are more than 1 MiB
    by_size = {
        (build.__name__, options.get("bucket_cap_mb")): run_ranks(messages_of, 2, build, options)[0]
        for build in (DistributedDataParallel, BucketedDDP)
        for options in ({}, {"bucket_cap_mb": 25})
    }
    assert by_size["DistributedDataParallel", None] == [2 * layer, 2 * layer]
    assert by_size["DistributedDataParallel", 25] == [4 * layer]
    assert by_size["BucketedDDP", None] == by_size["BucketedDDP", 25] == [2 * layer, 2 * layer]


def average_strided(rank, layout):
    model = nn.Linear(4, 3, bias=False)
    mine = torch.arange(12.0).view(3, 4) + rank
    if layout == "every second column":
        wide = torch.zeros(3, 8)
        wide[:, ::2] = mine
        mine = wide[:, ::2]
    elif layout == "by column" or rank == 1:
        mine = mine.t().contiguous().t()
    model.weight.grad = mine
    average_gradients(model)
    return model.weight.grad.tolist()


@pytest.mark.parametrize("layout", ["by column", "every second column", "another on each rank"])
def test_gradients_need_not_lie_row_by_row(layout):
    want = (torch.arange(12.0).view(3, 4) + 0.5).tolist()
    assert run_ranks(average_strided, 2, layout) == [want, want]


def test_sparse_gradients_are_averaged():
    def averaged(rank):
        model = nn.Embedding(5, 3, sparse=True)
        model(torch.tensor([rank, 2])).sum().backward()
        average_gradients(model)
        return model.weight.grad.to_dense()[:, 0].tolist()

    assert run_ranks(averaged, 2) == [[0.5, 0.5, 1.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("joined", [True, False])
def test_a_gradient_in_two_messages_is_not_said_to_be_several_in_one(joined):
    first, second, *others = Case().trainable_bytes()
    sizes = [first + second] if joined else [first // 2, first // 2, second]
    step = Step({}, [("all_reduce", size) for size in (*sizes, *others)], 0, 0, 0, 0)
    with pytest.raises(Wrong) as error:
        expect_messages(Case(), step, one_each=True)
    assert ("several gradients travel as one message" in error.value.mistake) == joined
