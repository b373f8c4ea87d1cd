"""Checkpoints that move between all engines: saved under one, the curve goes on under another."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shared.errors import InputError
from shared.parallel3d.checkpoint import OnMesh
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import build_mesh, make_groups
from shared.pipeline.engine import PipelineEngine
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import one_f_one_b_schedule
from shared.pipeline.stages import parts_of, split_stages
from shared.ranks.forked import run_ranks
from shared.sharding.checkpoint import ShardedByRows
from shared.sharding.fully_shard import FullyShard
from shared.sharding.zero_reference import SETTINGS
from shared.tensor_parallel.checkpoint import CutModel
from shared.tensor_parallel.engine import reference_engine
from shared.tensor_parallel.models import named_tensors
from shared.training.engine import DataParallelEngine, reference_curve
from shared.training.named_checkpoint import ModuleLayout, load_named, save_named
from shared.training.precision import MasterWeightAdamW
from shared.training.reference_run import (
    TOLERANCE,
    read_record,
    reference_model,
    reference_optimizer,
)

STEPS = 2  # of each engine in the relay
RECORD = read_record()["losses"]  # of one unbroken run


def one_process(rank: int):
    model = reference_model()
    return CutModel(model), DataParallelEngine(model, reference_optimizer([*model.parameters()]))


def sharded(rank: int):
    model, ranks = FullyShard(reference_model()), dist.get_world_size()
    optimizer = reference_optimizer(list(model.parameters()))
    return ShardedByRows(model), DataParallelEngine(model, optimizer, ranks)


def tensor_parallel(rank: int, sequence_parallel: bool = False):
    engine = reference_engine(sequence_parallel)
    return CutModel(engine.model), engine


def pipelined(rank: int):
    model = reference_model()
    parts, named = parts_of(model), named_tensors(model)
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), dist.get_world_size()))
    optimizer = reference_optimizer(list(pipeline.parameters()))
    table = one_f_one_b_schedule(dist.get_world_size(), 4)
    return CutModel(pipeline, named=named), PipelineEngine(pipeline, table, optimizer)


def on_mesh(rank: int, tp: int = 2, pp: int = 2, **options: Any):
    mesh = make_groups(build_mesh(2, tp, pp))
    settings = {"num_micro_batches": 2, **options, **SETTINGS}
    engine = Parallel3D(reference_model(), mesh, torch.optim.AdamW, **settings)
    return OnMesh(engine), engine


def optimizer_of(layout, engine):
    """The one that has the states: ZeRO's is around it."""
    return getattr(layout, "optimizer", engine.optimizer)


Engine = tuple[str, int, Callable]
ALL_OF_IT = {"zero": 3, "checkpoint": True, "sequence_parallel": True}
RELAY: list[Engine] = [
    ("fsdp", 4, sharded),
    ("tensor parallel", 2, tensor_parallel),
    ("one process", 1, one_process),
    ("dp 2 x tp 2 x pp 2, all of it", 8, partial(on_mesh, **ALL_OF_IT)),
    ("fsdp on fewer", 2, sharded),
    ("pipeline", 2, pipelined),
    ("dp 2 x pp 2, zero 1", 4, partial(on_mesh, tp=1, zero=1)),
    ("sequence parallel", 2, partial(tensor_parallel, sequence_parallel=True)),
    ("dp 2 x tp 2", 4, partial(on_mesh, pp=1)),
    ("one process once more", 1, one_process),
]


def train(engine, begin: int) -> list[float]:
    return reference_curve(engine, range(begin, begin + STEPS)).losses


@pytest.fixture(scope="module")
def relay(tmp_path_factory) -> tuple[list[float], list[Path]]:
    """The losses of two steps under each engine in turn, and the checkpoints between them."""
    root = tmp_path_factory.mktemp("relay")
    folders = [root / name for name, _, _ in RELAY]

    def work(rank: int, i: int) -> list[float]:
        layout, engine = RELAY[i][2](rank)
        optimizer = optimizer_of(layout, engine)
        if i:
            load_named(layout, optimizer, folders[i - 1])
        losses = train(engine, STEPS * i)
        save_named(layout, optimizer, folders[i])
        return losses

    losses = []
    for i, (_, ranks, _) in enumerate(RELAY):
        first, *others = run_ranks(work, ranks, i)
        assert all(other == pytest.approx(first) for other in others)
        losses += first
    return losses, folders


def test_the_curve_goes_on_from_engine_to_engine(relay):
    losses, _ = relay
    assert losses == pytest.approx(RECORD[: len(losses)], abs=TOLERANCE)


def test_every_engine_writes_the_same_names_and_shapes_and_no_rank_all_of_them(relay):
    tables = []
    for (_, ranks, _), folder in zip(RELAY, relay[1], strict=True):
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tables.append({name: tuple(each.size) for name, each in stored.items()})
        sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
        assert max(sizes) < 1.5 * sum(sizes) / ranks  # stages are not equal
    names = {f"model.{name}" for name in reference_model().state_dict()}
    assert names <= tables[0].keys()
    assert all(table == tables[0] for table in tables)


# What is asked of a checkpoint before anything is read


def test_what_cannot_be_loaded_is_said_on_every_rank(relay, tmp_path):
    def work(rank: int) -> list[str]:
        layout, engine = pipelined(rank)
        if rank == 1:  # one rank alone has a tensor that is not there
            layout.parameters["other.weight"] = next(iter(layout.parameters.values()))
        words = []
        for folder in (tmp_path, relay[1][0]):
            with pytest.raises(InputError) as error:
                load_named(layout, engine.optimizer, folder)
            words.append(str(error.value))
        return words

    for empty, other in run_ranks(work, 2):
        assert f"checkpoint {tmp_path} cannot be read" in empty
        assert "has no model other.weight" in other


def test_another_shape_is_said(tmp_path):
    save_named(CutModel(torch.nn.Linear(3, 2)), None, tmp_path)
    with pytest.raises(InputError, match=r"model weight of \(2, 3\), here \(2, 4\)"):
        load_named(CutModel(torch.nn.Linear(4, 2)), None, tmp_path)


def test_a_checkpoint_of_a_wrapped_model_says_so(tmp_path):
    wrapped = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})  # as torch's DDP names it
    save_named(ModuleLayout(wrapped), None, tmp_path)
    with pytest.raises(InputError, match=r'no model weight, but "module\.weight": save the model'):
        load_named(ModuleLayout(torch.nn.Linear(3, 2)), None, tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_saving_before_the_first_step_changes_nothing(kind, tmp_path):
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def made():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        return net, kind(net.parameters(), lr=0.1, weight_decay=0.1, **settings)

    def step(net, optimizer) -> torch.Tensor:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return net.weight.detach().clone()

    want = step(*made())
    net, optimizer = made()
    save_named(CutModel(net), optimizer, tmp_path)
    assert torch.equal(step(net, optimizer), want)
    load_named(CutModel(net), optimizer, tmp_path)
    optimizer.zero_grad()
    assert torch.equal(step(net, optimizer), want)


def masters_by_name(rank, folder):
    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).bfloat16()
        return model, MasterWeightAdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer, seed):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(2, 4).bfloat16()).float().square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    save_named(CutModel(model), optimizer, folder / "before")
    plain, its = made()
    for each in ((model, optimizer), (plain, its)):
        step(*each, 1)
    save_named(CutModel(plain), its, folder / "after")
    again, resumed = made()
    load_named(CutModel(again), resumed, folder / "after")
    for each in ((model, optimizer), (plain, its), (again, resumed)):
        step(*each, 2)
    return [torch.equal(each.weight, plain.weight) for each in (model, again)]


def test_master_weights_are_saved_by_name(tmp_path):
    assert run_ranks(masters_by_name, 1, tmp_path) == [[True, True]]


def trained_later(rank, folder):
    def made(frozen):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
        model[0].requires_grad_(not frozen)
        optimizer = MasterWeightAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return model, optimizer

    save_named(*as_layout(made(frozen=True)), folder)
    model, optimizer = made(frozen=False)
    load_named(*as_layout((model, optimizer)), folder)
    before = model[0].weight.detach().clone()
    model(torch.ones(2, 4).bfloat16()).float().sum().backward()
    optimizer.step()
    return (model[0].weight - before).abs().max().item()


def as_layout(made):
    return CutModel(made[0]), made[1]


def test_what_was_frozen_at_the_save_keeps_its_weights_when_it_is_trained(tmp_path):
    (moved,) = run_ranks(trained_later, 1, tmp_path / "frozen")
    assert 0 < moved < 5e-3  # a step of 1e-3, in bf16


def test_a_checkpoint_that_is_there_stays_where_the_new_one_cannot_take_its_place(
    tmp_path, monkeypatch
):
    rename = Path.rename

    def refusing(self, target):
        if self.name == ".kept.part":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    def saved(rank):
        layout = CutModel(torch.nn.Linear(2, 2))
        save_named(layout, None, tmp_path / "kept")
        monkeypatch.setattr(Path, "rename", refusing)
        with pytest.raises(InputError, match="Input/output error"):
            save_named(layout, None, tmp_path / "kept")
        return load_named(layout, None, tmp_path / "kept")

    run_ranks(saved, 1)
