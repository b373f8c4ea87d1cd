"""Clipping across shards: the norm of the whole mean gradient, as one process has it."""

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from shared.errors import InputError
from shared.ranks.forked import run_ranks
from shared.sharding.fully_shard import FullyShard
from shared.sharding.hybrid import hybrid_shard
from shared.sharding.prefetch import PrefetchingShard
from shared.sharding.stage3 import ZeroStage3
from shared.sharding.stages import ZeroStage1, ZeroStage2
from shared.sharding.zero_reference import build_zero

LIMITS = (0.25, 0.0, 1e6)


class Net(nn.Module):
    """Odd sizes, a tied matrix, a frozen layer, a layer that the first rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.some = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.output = nn.Linear(7, 13)
        self.output.weight = self.embedding.weight

    def forward(self, rank: int, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * step + rank)
        ids, wanted = (torch.randint(13, (5,), generator=draw) for _ in range(2))
        x = torch.tanh(self.frozen(self.embedding(ids)))
        x = x + self.some(x) * min(rank, 1)
        return F.cross_entropy(self.output(self.norm(x)), wanted)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def one_process(world_size: int):
    """The norms before clipping and the weights after it, of all ranks' mean."""
    model = net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3)
    norms = []
    for step, limit in enumerate(LIMITS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(rank, step) / world_size).backward()
        norms.append(nn.utils.clip_grad_norm_(trained, limit).item())
        optimizer.step()
    return norms, model.state_dict()


def clipped(model, optimizer, engine, whole, rank: int):
    norms = []
    for step, limit in enumerate(LIMITS):
        optimizer.zero_grad()
        model(rank, step).backward()
        norms.append(engine.clip_grad_norm_(limit).item())
        optimizer.step()
    with pytest.raises(InputError, match="max_norm must be 0 or more, got -1"):
        engine.clip_grad_norm_(-1)
    return norms, {name: x.clone() for name, x in whole().items()}


def same(found, world_size: int) -> None:
    norms, weights = one_process(world_size)
    assert found[0][0] == found[-1][0], "to the last bit the same on every rank"
    for own, state in found:
        assert own == pytest.approx(norms, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_stage_clips_as_one_process(stage, world_size):
    def train(rank: int):
        model = net()
        if stage == 3:
            optimizer = ZeroStage3(model, torch.optim.SGD, lr=0.3)
            return clipped(model, optimizer, optimizer, optimizer.full_state_dict, rank)
        kind = ZeroStage1 if stage == 1 else ZeroStage2
        optimizer = kind(model.parameters(), torch.optim.SGD, lr=0.3, bucket_size=60)
        return clipped(model, optimizer, optimizer, model.state_dict, rank)

    same(run_ranks(train, world_size), world_size)


@pytest.mark.parametrize("kind", [ZeroStage1, ZeroStage2])
def test_states_and_norms_are_those_of_a_group(kind):
    """Two groups of ranks that are no neighbours train each for itself."""

    def train(rank: int):
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        model = net()
        optimizer = kind(model.parameters(), torch.optim.SGD, lr=0.3, group=groups[rank % 2])
        return clipped(model, optimizer, optimizer, model.state_dict, rank // 2)

    found = run_ranks(train, 4)
    same(found[::2], 2)
    same(found[1::2], 2)


MAKES = {
    "FullyShard": FullyShard,
    "small ones whole": lambda net: FullyShard(net, keep_whole=20),
    "PrefetchingShard": PrefetchingShard,
    "2 x 2": lambda net: hybrid_shard(net, (2, 2)),
}


@pytest.mark.parametrize("name", MAKES)
def test_full_sharding_clips_as_one_process(name):
    def train(rank: int):
        model = MAKES[name](net())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        return clipped(model, optimizer, model, model.full_state_dict, rank)

    world_size = 4 if name == "2 x 2" else 2
    same(run_ranks(train, world_size), world_size)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_clipping_is_as_wrong_as_the_docstring_says(stage):
    def norm(rank: int):
        model = net()
        optimizer = build_zero(stage, model)
        model(rank, 0).backward()
        seen = nn.utils.clip_grad_norm_(model.parameters(), 1e6).item()
        return seen, optimizer.clip_grad_norm_(1e6).item()

    (first, right), (second, same) = run_ranks(norm, 2)
    assert right == same
    assert (first == second == 0) if stage > 1 else len({first, second, right}) == 3


def test_a_model_that_is_sharded_in_part_cannot_be_clipped_by_torch():
    """What lesson 13 says of "got mixed torch.Tensor and DTensor", and of its cure."""

    def work(rank: int) -> list[str]:
        said = []
        for root in (False, True):
            net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            for module in (net[0], net) if root else (net[0],):
                fully_shard(module)
            net(torch.ones(2, 4)).sum().backward()
            try:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        return said

    for first, then in run_ranks(work, 2):
        assert "got mixed torch.Tensor and DTensor" in first
        assert then == ""
