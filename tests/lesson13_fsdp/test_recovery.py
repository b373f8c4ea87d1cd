"""An error that every rank catches, then zero_grad() and a step: as if the batch had not been."""

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import Tensor, nn

from shared.ranks.forked import run_ranks
from shared.sharding.fully_shard import FullyShard
from shared.sharding.hybrid import hybrid_shard
from shared.sharding.prefetch import PrefetchingShard
from shared.sharding.zero_reference import build_zero
from solutions.lesson06_ddp import BucketedDDP, OverlappedDDP, average_gradients

STEPS = ("good", "good", "fails", "good", "good")


class Trap(torch.autograd.Function):
    """The identity; an error in backward where the trap is set."""

    @staticmethod
    def forward(ctx, x: Tensor, is_set: bool) -> Tensor:
        ctx.is_set = is_set
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.is_set:
            raise RuntimeError("boom")
        return grad, None


class Net(nn.Module):
    """Blocks of which the middle one fails: in the midst of its forward or of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, self.fails if number == 1 else "")
        return (x * self.scale).square().sum()


class Block(nn.Module):
    """Two layers with the trap between them, the second of a size that keep_whole keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, fails: str = "") -> Tensor:
        x = Trap.apply(torch.tanh(self.first(x)), fails == "backward")
        if fails == "forward":
            raise RuntimeError("boom")
        return Trap.apply(self.norm(x + self.second(x)), fails == "between units")


def zero(stage: int, **settings):
    def make(net: Net):
        optimizer = build_zero(stage, net, lr=0.1, **settings)
        whole = optimizer.full_state_dict if stage == 3 else net.state_dict
        return net, optimizer, lambda: None, whole

    return make


def sharded(kind, **settings):
    def make(net: Net):
        model = kind(net, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, model.finish_gradient_sync, model.full_state_dict

    return make


def by_hand(net: Net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer, lambda: average_gradients(net), net.state_dict


ENGINES = {
    "DDP by hand": by_hand,
    "ZeRO 1": zero(1),
    "ZeRO 2": zero(2),
    "ZeRO 2, buckets": zero(2, bucket_size=50),
    "ZeRO 3": zero(3),
    "FullyShard": sharded(FullyShard),
    "FullyShard, kept": sharded(FullyShard, reshard_after_forward=False),
    "FullyShard, small ones whole": sharded(FullyShard, keep_whole=8),
    "PrefetchingShard": sharded(PrefetchingShard),
    "HybridShard": sharded(hybrid_shard, mesh=(2, 1)),
}


def rows(rank: int, *number: int) -> Tensor:
    seed = sum(100**i * n for i, n in enumerate((rank, *number)))
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))


def weights(make, rank: int, fails: str, micro_batches: int = 1) -> dict[str, Tensor]:
    """Train; a batch that `fails` is given up, "" leaves it out."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer, finish, whole = make(net)
    for number, kind in enumerate(STEPS):
        if kind == "fails" and not fails:
            continue
        try:
            for part in range(micro_batches):
                last = part == micro_batches - 1
                net.fails = fails if kind == "fails" and last else ""
                model(rows(rank, number, part) * (100 if kind == "fails" else 1)).backward()
            finish()
        except RuntimeError as error:
            if "boom" not in str(error):
                raise
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.clone() for name, x in whole().items()}


@pytest.mark.parametrize("name", ENGINES)
def test_a_batch_that_failed_has_never_been(name):
    def both(rank: int):
        make = ENGINES[name]
        return {
            (fails, parts): weights(make, rank, fails, parts)
            for parts in (1, 2)
            for fails in ("", "backward", "between units", "forward")
        }

    for found in run_ranks(both, 2, timeout=60):
        for (fails, parts), state in found.items():
            for key, value in found["", parts].items():
                assert torch.equal(state[key], value), (fails, parts, key)


@pytest.mark.parametrize("kind", [OverlappedDDP, BucketedDDP])
def test_ddp_by_hand_says_that_a_backward_was_not_finished(kind):
    """Nothing is dropped in silence: the next forward is an error, finish and zero_grad mend it."""

    def sharing(net: Net):
        model = kind(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        return model, optimizer, model.finish_gradient_sync, net.state_dict

    def mended(net: Net):
        model, optimizer, finish, whole = sharing(net)
        plain = optimizer.zero_grad

        def zero_grad() -> None:
            if model._complete:
                finish()
            plain()

        optimizer.zero_grad = zero_grad
        return model, optimizer, finish, whole

    def both(rank: int):
        with pytest.raises(RuntimeError, match="finish_gradient_sync"):
            weights(sharing, rank, "backward")
        return weights(mended, rank, ""), weights(mended, rank, "backward")

    want, found = run_ranks(both, 2, timeout=60)[0]
    assert all(torch.equal(found[name], value) for name, value in want.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_on_a_backward_that_failed_is_an_error(stage):
    def step(rank: int):
        net = Net()
        optimizer = build_zero(stage, net, lr=0.1)
        net.fails = "backward"
        with pytest.raises(RuntimeError, match="boom"):
            net(rows(rank, 0)).backward()
        with pytest.raises(RuntimeError, match="zero_grad"):
            optimizer.step()

    run_ranks(step, 2)


@pytest.mark.parametrize("kind", [FullyShard, PrefetchingShard])
def test_gradients_are_dropped_by_either_zero_grad(kind):
    """After a backward that nobody finished, too; between forward and backward as well."""

    def work(rank: int):
        found = []
        for dropped in ("", "optimizer", "module", "between"):
            torch.manual_seed(0)
            model = kind(Net())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for number in range(3):
                if dropped in ("optimizer", "module"):
                    model(100 * rows(rank, 9)).backward()
                    (optimizer if dropped == "optimizer" else model).zero_grad()
                loss = model(rows(rank, number))
                if dropped == "between":
                    model.zero_grad()
                loss.backward()
                model.finish_gradient_sync()
                optimizer.step()
                optimizer.zero_grad()
            found.append(model.full_state_dict())
        return found

    for want, *others in run_ranks(work, 2):
        for found in others:
            assert all(torch.equal(found[name], value) for name, value in want.items())


class Late:
    """A message that arrives when it is waited for, and not before."""

    def __init__(self, unit, work):
        self.unit, self.work = unit, work

    def wait(self):
        self.work.wait()
        self.unit.shard.grad.fill_(1.0)


def largest_left(rank):
    torch.manual_seed(0)
    module = hybrid_shard(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1)), (2, 1))
    module(torch.ones(2, 300)).sum().backward()
    assert module._averaging, "its last averages are on their way"
    module._averaging = {unit: Late(unit, work) for unit, work in module._averaging.items()}
    module.zero_grad(set_to_none=False)
    return max(
        unit.shard.grad.abs().max().item() for unit in module.units if unit.shard.grad is not None
    )


def test_zeros_are_not_written_over_by_what_travels():
    assert run_ranks(largest_left, 2) == [0.0, 0.0]
