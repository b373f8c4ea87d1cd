"""What neither check nor notebook holds: padded bytes, bits, refusals, and torch's engine."""

import warnings

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import nn
from torch.distributed.fsdp import fully_shard

from shared.errors import InputError
from shared.exercises.on_ranks import on_ranks
from shared.ranks.forked import run_ranks
from shared.sharding.flat_unit import WholeUnit
from shared.sharding.fully_shard import FullyShard
from shared.sharding.hybrid import hybrid_shard
from shared.sharding.prefetch import PrefetchingShard
from solutions.lesson06_ddp import BucketedDDP


class Net(nn.Module):
    """Odd sizes, a tied matrix, a frozen layer, a parameter outside of all units, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(3)
        )
        self.layers[1].requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.output = nn.Linear(7, 13)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(7))
        self.register_buffer("shift", torch.full((7,), 0.25))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale + self.shift
        for layer in self.layers:
            x = x + layer(x)
        return self.output(self.norm(x))


def stack() -> nn.Module:
    """Units of several odd sizes; every parameter is in one of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes = [(5, 9), (9, 7), (7, 11), (11, 3)]
        return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes))


# Bytes


def test_the_most_bytes_are_shards_and_two_units_where_they_are_padded_too():
    from lessons.lesson13_fsdp.experiments.step_memory import count_step, unit_sizes
    from shared.sharding.counting import bytes_at_rest, peak_bytes

    def work(rank: int):
        found = {}
        for choice in ("root", "block", "linear"):
            for kind in (FullyShard, PrefetchingShard):
                timeline, before = count_step(kind, choice)
                found[choice, kind is PrefetchingShard] = before, timeline.peak
        return found

    for found in run_ranks(work, 3):
        for (choice, ahead), (before, peak) in found.items():
            sizes = unit_sizes(choice)
            assert before == bytes_at_rest(sizes, 3)
            assert peak == peak_bytes(sizes, 3, ahead=int(ahead)), choice


# 16 bits


class Casting(nn.Module):
    """The one-process twin of compute_dtype: float32 weights, cast for use; inputs cast."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        for unit in net.children():
            unit.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16() for x in args))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = {name: p.bfloat16() for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, cast, (x,))


def test_bf16_computes_and_float32_is_kept():
    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))

    def work(rank: int):
        net = stack()
        sharded = FullyShard(net, list(net.children()), compute_dtype=torch.bfloat16)
        assert {p.dtype for p in sharded.parameters()} == {torch.float32}
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
        for step in range(6):
            optimizer.zero_grad()
            out = sharded(batch(step, rank))
            assert out.dtype == torch.bfloat16
            out.float().square().mean().backward()
            sharded.finish_gradient_sync()
            optimizer.step()
        return sharded.full_state_dict()

    twin = Casting(stack())
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    for step in range(6):
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            twin(batch(step, rank)).float().square().mean().backward()
            grads.append([p.grad.bfloat16() / 2 for p in twin.parameters()])
        for p, *parts in zip(twin.parameters(), *grads, strict=True):
            p.grad = sum(parts).float()  # added in 16 bits, as they travel
        optimizer.step()
    for state in run_ranks(work, 2):
        for name, value in twin.net.state_dict().items():
            assert state[name].dtype == torch.float32
            assert torch.equal(state[name], value), name


# Checkpoints


def test_torchs_engine_reads_the_checkpoint_and_one_process_too(tmp_path):
    import torch.distributed.checkpoint as dcp

    from shared.sharding.checkpoint import save_by_rows

    def save(rank: int):
        sharded = FullyShard(stack())
        save_by_rows(sharded, None, tmp_path)

    def load(rank: int):
        net = stack()
        for unit in net.children():
            fully_shard(unit)
        model = fully_shard(net)
        state = {"model": model.state_dict()}
        for value in state["model"].values():
            value.zero_()
        dcp.load(state, checkpoint_id=str(tmp_path))
        return {name: x.full_tensor() for name, x in state["model"].items()}

    run_ranks(save, 4)
    alone = {"model": {name: torch.zeros_like(x) for name, x in stack().state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(alone, checkpoint_id=str(tmp_path), no_dist=True)
    for found in (*run_ranks(load, 3), alone["model"]):
        for name, value in stack().state_dict().items():
            assert torch.equal(found[name], value)


# Bad input, in one line


def refused(make) -> str:
    def work(rank: int) -> str:
        try:
            make()
        except InputError as error:
            return str(error)
        return ""

    return on_ranks(work, 2, apart="")[0]


def test_bad_units_and_meshes_are_refused():
    net = Net()
    outside = nn.Linear(2, 2)
    assert "layers.0 contains another unit, layers.0.2" in refused(
        lambda: FullyShard(net, [net.layers[0], net.layers[0][2]])
    )
    assert "unit 0, a Linear, is no part" in refused(lambda: FullyShard(net, [outside]))
    assert "named as a unit twice" in refused(lambda: FullyShard(net, [net.norm, net.norm]))
    assert "the module itself" in refused(lambda: FullyShard(net, [net]))
    assert "2 replicas x 2 shards has 4 ranks, here are 2" in refused(
        lambda: hybrid_shard(net, (2, 2))
    )
    assert "-1 replicas" in refused(lambda: hybrid_shard(net, (-1, -2)))


def test_a_state_that_is_not_the_modules_is_refused():
    """As torch does, and before anything is changed."""

    def work(rank: int):
        sharded = FullyShard(Net())
        state = sharded.full_state_dict()
        wrong = {**state, "strange": torch.zeros(1), "output.bias": torch.zeros(3)}
        wrong |= {"shift": torch.zeros(1), "norm.weight": torch.zeros(7)}
        del wrong["scale"]
        with pytest.raises(InputError) as error:
            sharded.load_full_state_dict(wrong)
        after = sharded.full_state_dict()
        assert all(torch.equal(after[name], value) for name, value in state.items())
        sharded.load_full_state_dict({**state, "norm.weight": torch.full((7,), 2.0)})
        return str(error.value), sharded.full_state_dict()["norm.weight"].tolist()

    said, loaded = run_ranks(work, 2)[0]
    assert loaded == [2.0] * 7
    assert said.startswith("the state has no scale; has strange, the module has not; ")
    assert "has output.bias as (3,), the module as (13,)" in said
    assert "has shift as (1,), the module as (7,)" in said


def test_names_of_a_wrapped_model_are_said_once():
    def work(rank: int):
        sharded, said = FullyShard(Net()), []
        state = sharded.full_state_dict()
        for load in (sharded.load_full_state_dict, BucketedDDP(Net()).load_state_dict):
            for named in ("module.{}", "_orig_mod.{}", "module._orig_mod.{}"):
                with pytest.raises(InputError) as error:
                    load({named.format(name): x for name, x in state.items()})
                said.append(str(error.value))
        with pytest.raises(InputError) as error:
            sharded.load_full_state_dict({f"other.{name}": x for name, x in state.items()})
        return said, str(error.value)

    said, other = run_ranks(work, 1)[0]
    ways = ['"module."', '"_orig_mod."', '"module." and "_orig_mod."'] * 2
    for words, way in zip(said, ways, strict=True):
        assert words.startswith(f"the names of the state have {way} in them, as torch's DDP")
    assert len(other.split("; ")) == 9
    assert other.endswith(" more")


class Blocks(nn.Sequential):
    """Five blocks, each with a norm that comes first and is small."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(5)))


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [({"keep_whole": 100}, 8), ({"reshard_after_forward": False}, 4)],
    ids=["small ones whole", "kept"],
)
def test_one_unit_is_fetched_ahead_from_the_second_step_on(settings, ahead):
    class Watched(PrefetchingShard):
        def acquire(self, unit):
            early = unit.is_on_its_way
            super().acquire(unit)
            if not isinstance(unit, WholeUnit):
                self.early += early
            sharded = [each for each in self.units if not isinstance(each, WholeUnit)]
            self.most = max(self.most, sum(each.is_on_its_way for each in sharded))
            idle = sum(each.is_whole and not each.users for each in sharded)
            self.whole = max(self.whole, idle)

    def work(rank: int):
        net = Blocks()
        model = Watched(net, list(net), **settings)
        found = []
        for _ in range(3):
            model.early = model.most = model.whole = 0
            model(torch.ones(2, 32, requires_grad=True)).sum().backward()
            model.finish_gradient_sync()
            found.append((model.early, model.most, model.whole))
        return found

    first, *later = run_ranks(work, 2)[0]
    assert first[:2] == (0, 0)
    assert [each[:2] for each in later] == [(ahead, 1)] * 2
    if settings.get("reshard_after_forward", True):
        assert [each[2] for each in later] == [1, 1]
