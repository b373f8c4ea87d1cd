"""Gradients that come in parts, sparse or wide; parameters that a forward writes to."""

from functools import partial

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import checkpoint as torchs

from shared.errors import InputError
from shared.ranks.forked import run_ranks
from shared.sharding.clipping import clip_parts
from solutions.ddp_buckets import average_gradients_flat
from solutions.lesson06_ddp import BucketedDDP
from solutions.lesson10_zero import ZeroStage1, ZeroStage2, ZeroStage3
from solutions.lesson11_gradient_checkpointing import checkpoint
from solutions.lesson13_fsdp import FullyShard, hybrid_shard

WAYS = {
    "plain": lambda function, x: function(x),
    "lesson 11's": checkpoint,
    "re-entrant": partial(torchs.checkpoint, use_reentrant=True),
}
DATA_PARALLEL = {
    "stage 1": ZeroStage1,
    "stage 2": ZeroStage2,
    "stage 2, a parameter a bucket": partial(ZeroStage2, bucket_size=1),
    "stage 2, some a bucket": partial(ZeroStage2, bucket_size=20),
}

SHARDED = {
    "FullyShard": FullyShard,
    "hybrid": lambda net, units: hybrid_shard(net, (1, 2), units),
}


class Looped(nn.Module):
    """A block used three times, each time checkpointed, behind a head that may be tied to it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.block, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.tied = tied
        if tied:
            self.head.weight = self.block.weight

    def forward(self, x: Tensor, way) -> Tensor:
        h = self.first(x)
        for _ in range(3):
            h = torch.tanh(way(self.block, h))
        return (way(self.head, h) if self.tied else self.head(h)).square().mean()


class Block(nn.Module):
    """A unit that checkpoints a part of itself twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, way) -> Tensor:
        h = way(self.twice, x)
        return way(self.twice, torch.tanh(h + self.once(h)))


class Tied(nn.Module):
    """A checkpointed head whose weight the embedding has: its second part comes last of all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Linear(4, 4, bias=False), Block()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, way) -> Tensor:
        h = self.norm(self.block(self.embedding(x), way))
        return way(lambda h: self.head(h).square().mean(), h)


def after_a_step(engine, units, net: nn.Module, x: Tensor, way) -> dict[str, Tensor]:
    if engine in SHARDED.values():
        sharded = engine(net, units)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        sharded(x, way).backward()
        sharded.finish_gradient_sync()
        optimizer.step()
        return sharded.full_state_dict()
    of = net if engine is ZeroStage3 else net.parameters()
    settings = {"units": units} if engine is ZeroStage3 else {}
    optimizer = engine(of, torch.optim.SGD, lr=1.0, **settings)
    net(x, way).backward()
    optimizer.step()
    return optimizer.full_state_dict() if engine is ZeroStage3 else net.state_dict()


def made(model) -> nn.Module:
    torch.manual_seed(0)
    return model()


def test_parts_of_a_gradient_are_summed_by_every_stage_and_by_full_sharding():
    def largest_errors(rank):
        found = {}
        for name, model in (
            ("looped", partial(Looped, False)),
            ("looped, tied", partial(Looped, True)),
            ("tied", Tied),
        ):
            twin = made(model)
            xs = [torch.full((1, 4), 1.0 + each) for each in range(dist.get_world_size())]
            sum(twin(x, WAYS["plain"]) / len(xs) for x in xs).backward()
            right = {key: p.detach() - p.grad for key, p in twin.named_parameters()}
            cases = [(each, kind, False) for each, kind in DATA_PARALLEL.items()]
            for each, kind in {"stage 3": ZeroStage3, **SHARDED}.items():
                cases += [(f"{each}, {u}", kind, u) for u in (None, "block", "none")]
            for (case, kind, chosen), (each, way) in (
                (case, way) for case in cases for way in WAYS.items()
            ):
                net = made(model)
                units = {"block": [net.block], "none": []}.get(chosen)
                state = after_a_step(kind, units, net, xs[rank], way)
                error = max((state[key] - right[key]).abs().max().item() for key in right)
                found[f"{name}: {case}: {each}"] = error
        return found

    found = run_ranks(largest_errors, 2)[0]
    assert {case: error for case, error in found.items() if error > 1e-6} == {}
    assert len(found) == 3 * 13 * 3


def test_a_sparse_gradient_is_the_dense_one_in_every_flat_tensor():
    def weights(rank, sparse):
        found = []
        for kind in (ZeroStage2, ZeroStage3, FullyShard, BucketedDDP, average_gradients_flat):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 2))
            engine, optimizer = net, None
            if kind in (FullyShard, BucketedDDP):
                engine = kind(net)
            elif kind is not average_gradients_flat:
                of = net if kind is ZeroStage3 else net.parameters()
                optimizer = kind(of, torch.optim.SGD, lr=1.0)
            optimizer = optimizer or torch.optim.SGD(engine.parameters(), lr=1.0)
            engine(torch.tensor([rank, 2, 2])).square().sum().backward()
            getattr(engine, "finish_gradient_sync", lambda: None)()
            if kind is average_gradients_flat:
                kind(net)
            optimizer.step()
            whole = getattr(engine, "full_state_dict", getattr(optimizer, "full_state_dict", None))
            found.append((whole or net.state_dict)()["0.weight"].clone())
        return found

    def both(rank):
        return weights(rank, True), weights(rank, False)

    for sparse, dense in run_ranks(both, 2):
        assert all(torch.equal(a, dense[0]) for a in sparse)
        assert all(torch.allclose(a, dense[0]) for a in dense)


class Normed(nn.Linear):
    """Keeps its weight's rows at length 1 by writing to it, as nn.Embedding(max_norm=1) does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight))
        return super().forward(x)


@pytest.mark.parametrize("kind", [FullyShard, ZeroStage3])
def test_a_parameter_that_is_written_to_in_forward_is_refused_and_not_lost(kind):
    def refused(rank):
        net = nn.Sequential(Normed(3, 3), nn.Linear(3, 2))
        engine = FullyShard(net) if kind is FullyShard else net
        if kind is ZeroStage3:
            zero = ZeroStage3(net, torch.optim.SGD, lr=1.0)
            with zero.gathered(write=True):
                net[1].weight.data.fill_(1.0)
                net(torch.ones(1, 3))  # what is written there, in forward as well, is kept
            weight = zero.full_state_dict()["0.weight"]
            assert torch.allclose(weight.norm(dim=1), torch.ones(3))
        with pytest.raises(InputError, match=r"shape \(3, 3\) was written to in forward"):
            engine(torch.ones(1, 3))

    run_ranks(refused, 1)


def test_a_parameter_that_is_kept_whole_may_be_written_to_in_forward():
    def written(rank):
        engine = FullyShard(nn.Sequential(Normed(3, 3), nn.Linear(3, 2)), keep_whole=100)
        engine(torch.ones(1, 3))
        half = FullyShard(nn.Sequential(Normed(3, 3)), compute_dtype=torch.bfloat16, keep_whole=100)
        with pytest.raises(InputError, match=r"compute with a new tensor; write with load_full_s"):
            half(torch.ones(1, 3))  # a copy computes
        return engine.full_state_dict()["0.weight"].norm(dim=1)

    assert torch.allclose(run_ranks(written, 1)[0], torch.ones(3))


def test_the_norm_of_float64_gradients_is_in_float64():
    def norm(rank):
        net = nn.Linear(3, 3).double()
        zero = ZeroStage1(net.parameters(), torch.optim.SGD, lr=1.0)
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 1e25)
        return zero.clip_grad_norm_(1.0).item()

    assert run_ranks(norm, 1) == [pytest.approx(12**0.5 * 1e25, rel=1e-14)]


def test_the_norm_does_not_depend_on_which_part_comes_first():
    """And the other rank has none."""

    def norm(rank):
        parts = [torch.ones(3), torch.full((4,), 1e25, dtype=torch.float64)] if rank else []
        found = clip_parts(parts, 1.0, None, device=torch.device("cpu"))
        return found.dtype, found.item(), float(sum(part.double().norm() for part in parts[1:]))

    (kind, own, _), (wide, other, clipped) = run_ranks(norm, 2)
    assert (kind, wide) == (torch.float32, torch.float64)
    assert own == pytest.approx(2e25, rel=1e-6)
    assert (other, clipped) == (2e25, pytest.approx(1.0))
