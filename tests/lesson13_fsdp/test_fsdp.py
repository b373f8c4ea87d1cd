"""The proofs: torch's fully_shard, one process, the one loss curve, calls and bytes by formula."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from shared.errors import InputError
from shared.exercises.on_ranks import on_ranks
from shared.measuring.traffic import count_traffic
from shared.ranks.forked import run_ranks
from shared.sharding.flat_unit import WholeUnit
from shared.sharding.fully_shard import FullyShard
from shared.sharding.hybrid import hybrid_shard
from shared.sharding.prefetch import PrefetchingShard
from shared.training.engine import DataParallelEngine, reference_curve
from shared.training.reference_run import (
    compare_with_record,
    loss_of,
    reference_batches,
    reference_model,
    reference_optimizer,
    shard,
)

STEPS = 3


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


def rows(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randint(13, (5,), generator=draw) for _ in range(2))


def losses_and_weights(make, rank: int, world_size: int, steps: int = STEPS):
    torch.manual_seed(rank)  # rank 0's numbers must win
    net = Net()
    sharded = make(net)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(1 + step % 2):  # every second step adds up two backward passes
            ids, wanted = rows(10 * step + part, rank)
            F.cross_entropy(sharded(ids), wanted).backward()
        sharded.finish_gradient_sync()
        optimizer.step()
    return sharded.full_state_dict()


def twin(world_size: int, steps: int = STEPS):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            for part in range(1 + step % 2):
                ids, wanted = rows(10 * step + part, rank)
                (F.cross_entropy(net(ids), wanted) / world_size).backward()
        optimizer.step()
    return net.state_dict()


MAKES = {
    "default": FullyShard,
    "root alone": lambda net: FullyShard(net, units=[]),
    "blocks": lambda net: FullyShard(net, units=[*net.layers, net.output]),
    "linears": lambda net: FullyShard(
        net, units=[m for m in net.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    ),
    "kept": lambda net: FullyShard(net, reshard_after_forward=False),
    "small ones whole": lambda net: FullyShard(net, keep_whole=20),
    "prefetch": PrefetchingShard,
}


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_one_process_has_the_same_weights(world_size):
    def work(rank: int):
        return [losses_and_weights(make, rank, world_size) for make in MAKES.values()]

    want = twin(world_size)
    for found in run_ranks(work, world_size):
        for name, state in zip(MAKES, found, strict=True):
            assert list(state) == list(want), name
            for key, value in want.items():
                torch.testing.assert_close(state[key], value, msg=f"{name}: {key}")


@pytest.mark.parametrize("mesh", [(2, 2), (1, 3), (3, 1), (2, 1)])
def test_hybrid(mesh):
    world_size = mesh[0] * mesh[1]
    found = run_ranks(
        lambda rank: losses_and_weights(lambda net: hybrid_shard(net, mesh), rank, world_size),
        world_size,
    )
    for state in found:
        for key, value in twin(world_size).items():
            torch.testing.assert_close(state[key], value)


# torch's own engine on the same units


def stack() -> nn.Module:
    """Units of several odd sizes; every parameter is in one of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes = [(5, 9), (9, 7), (7, 11), (11, 3)]
        return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes))


def trained(engine: str, rank: int, keep: bool = False):
    """Losses, whole weights after three steps, and the last step's calls."""
    net = stack()
    units = list(net.children())
    if engine == "torch":
        for unit in units:
            fully_shard(unit, reshard_after_forward=not keep)
        model = fully_shard(net, reshard_after_forward=not keep)
    else:
        kind = {"by hand": FullyShard, "prefetch": PrefetchingShard}[engine]
        model = kind(net, units, reshard_after_forward=not keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        with count_traffic() as traffic:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if engine != "torch":
                model.finish_gradient_sync()
        optimizer.step()
        losses.append(loss.item())
    whole = (
        {name: x.full_tensor() for name, x in model.state_dict().items()}
        if engine == "torch"
        else model.full_state_dict()
    )
    calls = [(c.op, c.num_bytes) for c in traffic.calls]
    return losses, whole, calls


@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("keep", [False, True])
def test_torchs_fully_shard_does_the_same(world_size, keep):
    from shared.sharding.counting import part

    def work(rank: int):
        return [trained(engine, rank, keep) for engine in ("torch", "by hand", "prefetch")]

    sizes = [sum(p.numel() for p in unit.parameters()) for unit in stack().children()]
    parts = [4 * part(size, world_size) for size in sizes]
    for theirs, mine, ahead in run_ranks(work, world_size):
        assert len(theirs[2]) == len(mine[2])
        for ours in (mine, ahead):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
            for name, value in theirs[1].items():
                torch.testing.assert_close(ours[1][name], value)
            for engine in (ours, theirs):  # calls, by unit
                ops = [op for op, _ in engine[2]]
                assert ops.count("all_gather") == (1 if keep else 2) * len(sizes)
                assert ops.count("reduce_scatter") == len(sizes)
            gathers = [size for op, size in ours[2] if op == "all_gather"]
            assert sorted(gathers) == sorted(parts * (1 if keep else 2))
            reduced = [size for op, size in ours[2] if op == "reduce_scatter"]
            assert reduced == [world_size * each for each in reversed(parts)]


# The one loss curve


def curve(rank: int, make, world_size: int) -> list[float]:
    sharded = make(reference_model())
    optimizer = reference_optimizer(list(sharded.parameters()))
    return reference_curve(DataParallelEngine(sharded, optimizer, world_size)).losses


@pytest.mark.parametrize(
    ("world_size", "make"),
    [
        (1, FullyShard),
        (2, FullyShard),
        (4, PrefetchingShard),
        (4, partial(hybrid_shard, mesh=(2, 2))),
    ],
    ids=["1", "2", "4, prefetch", "2 x 2, hybrid"],
)
def test_the_curve_is_the_one_loss_curve(world_size, make):
    for losses in run_ranks(curve, world_size, make, world_size):
        assert compare_with_record(losses) < 5e-6


def test_three_ranks_train_the_same_batches():
    """32 rows are not shared by three: the first step's loss and gradient on 30 of them."""
    from dataclasses import replace

    batch = reference_batches()[0]
    tensors = {k: v[:30] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    batch = replace(batch, **tensors, num_tokens=int((batch.tgt_out[:30] != 0).sum()))
    model = reference_model()
    loss_of(model, batch, batch.num_tokens).backward()
    want = {name: p.grad for name, p in model.named_parameters()}

    def work(rank: int):
        sharded = FullyShard(reference_model())
        (3 * loss_of(sharded, shard(batch, rank, 3), batch.num_tokens)).backward()
        sharded.finish_gradient_sync()
        return sharded.each_whole(lambda unit: unit.shard.grad, lambda x, _: x.clone())

    for found in run_ranks(work, 3):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)


# Bytes


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_the_most_bytes_are_shards_and_two_units(world_size):
    from lessons.lesson13_fsdp.experiments.step_memory import count_step, unit_sizes
    from shared.sharding.counting import bytes_at_rest, peak_bytes

    def work(rank: int):
        found = {}
        for choice in ("root", "block", "linear"):
            for kind in (FullyShard, PrefetchingShard):
                timeline, before = count_step(kind, choice)
                found[choice, kind is PrefetchingShard] = before, timeline.peak
        return found

    for found in run_ranks(work, world_size):
        for (choice, ahead), (before, peak) in found.items():
            sizes = unit_sizes(choice)
            assert before == bytes_at_rest(sizes, world_size)
            assert peak == peak_bytes(sizes, world_size, ahead=int(ahead)), choice


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


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_computes_and_float32_is_kept(world_size):
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
        for rank in range(world_size):
            optimizer.zero_grad()
            twin(batch(step, rank)).float().square().mean().backward()
            grads.append([p.grad.bfloat16() / world_size for p in twin.parameters()])
        for p, *parts in zip(twin.parameters(), *grads, strict=True):
            p.grad = sum(parts).float()  # added in 16 bits, as they travel
        optimizer.step()
    for state in run_ranks(work, world_size):
        for name, value in twin.net.state_dict().items():
            assert state[name].dtype == torch.float32
            assert torch.equal(state[name], value), name


# Checkpoints


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_a_checkpoint_of_four_ranks_continues_elsewhere(world_size, tmp_path):
    from shared.sharding.checkpoint import load_by_rows, save_by_rows

    def steps(sharded, optimizer, numbers, rank, ranks):
        for step in numbers:
            optimizer.zero_grad()
            rows_of_step = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
            sharded(rows_of_step.chunk(ranks)[rank]).square().mean().backward()
            sharded.finish_gradient_sync()
            optimizer.step()

    def make():
        net = stack()
        sharded = FullyShard(net, list(net.children()))
        return sharded, torch.optim.AdamW(sharded.parameters(), lr=0.01)

    def first(rank: int):
        sharded, optimizer = make()
        steps(sharded, optimizer, range(3), rank, 4)
        save_by_rows(sharded, optimizer, tmp_path)
        steps(sharded, optimizer, range(3, 6), rank, 4)
        return sharded.full_state_dict()

    def second(rank: int):
        sharded, optimizer = make()
        for unit in sharded.units:
            unit.shard.data.zero_()
        load_by_rows(sharded, optimizer, tmp_path)
        steps(sharded, optimizer, range(3, 6), rank, world_size)
        return sharded.full_state_dict()

    want = run_ranks(first, 4)[0]
    for state in run_ranks(second, world_size):
        for name, value in want.items():
            torch.testing.assert_close(state[name], value)


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


def test_full_state_dict_is_a_state_dict():
    def work(rank: int):
        sharded = FullyShard(Net())
        state = sharded.full_state_dict()
        Net().load_state_dict(copy.deepcopy(state))
        return sorted(state) == sorted(Net().state_dict())

    assert all(run_ranks(work, 2))


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


class Blocks(nn.Sequential):
    """Five blocks, each with a norm that comes first and is small."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(5)))


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [({}, 8), ({"keep_whole": 100}, 8), ({"reshard_after_forward": False}, 4)],
    ids=["", "small ones whole", "kept"],
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
