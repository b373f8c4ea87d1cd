"""Five modes, one curve; a checkpoint of each is resumed by each, on other numbers of ranks."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.lesson23_capstone.relay import english
from shared.capstone.config import Config, DataTable, ModelTable, ParallelTable, TrainingTable
from shared.capstone.modes import How, check_mode, held_out_loss, import_for, make
from shared.capstone.resuming import RUN, Origin, resume_run, save_run
from shared.capstone.tasks import (
    LanguageTask,
    TranslationTask,
    build_model,
    learning_rate,
    own_share,
)
from shared.data.corpora import load_corpus
from shared.errors import InputError
from shared.fault_tolerance.preemption import Notice
from shared.ranks.forked import run_ranks
from shared.ranks.group import Rank
from shared.training.engine import train_step
from shared.training.schedules import set_learning_rate

STEPS, RUN_STEPS = 2, 8
MODELS = {
    "gpt": ModelTable("gpt", 32, 4, 4, 0, 64, 400, 32),
    "modern": ModelTable("modern", 32, 4, 4, 2, 64, 400, 32, fused=False),
    "translator": ModelTable("translator", 32, 2, 4, 0, 64, 300, 64),
}
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}  # on a GPU
# By mode: the ranks that save and those that resume, and how they share the work then.
MODES = {
    "single": (1, 1, {}, {}),
    "ddp": (2, 3, {}, {}),
    "deepspeed": (2, 3, {"zero": 2}, {"zero": 3}),
    "fsdp2": (3, 2, {}, {}),
    "3d": (4, 2, {"tp": 2, "pp": 2, "micro_batches": 2}, {"tp": 1, "zero": 1}),
}


def config_of(kind: str, **parallel: int) -> Config:
    training = TrainingTable(batch=12, steps=RUN_STEPS, warmup=2, max_norm=0.5)
    data = DataTable("grammar", 60_000)
    return Config(MODELS[kind], data, training, ParallelTable(**parallel))


@pytest.fixture(scope="module")
def tasks():
    text, pairs = english(), load_corpus("grammar", "en", "de")
    made = {kind: LanguageTask(text, config_of(kind), 0) for kind in ("gpt", "modern")}
    config = Config(MODELS["translator"], DataTable("grammar", 500), config_of("gpt").training)
    return made | {"translator": TranslationTask(pairs, config, 0)}


def started(rank: int, mode: str, config: Config, task):
    ranks = dist.get_world_size()
    how = How()
    check_mode(mode, config, ranks, how)
    torch.manual_seed(0)
    model = build_model(config.model, task.vocab_size)
    return make(mode, model, config, Rank(rank, rank, ranks, torch.device("cpu"), "gloo"), how)


def trained(made, config: Config, task, first: int) -> list[tuple[float, float]]:
    """Loss and norm of some steps."""
    seen = []
    for step in range(first, first + STEPS):
        batch = task.batch(step)
        set_learning_rate(made.engine.optimizer, learning_rate(config, step, RUN_STEPS))
        own = own_share(batch, *made.engine.share)
        part, norm = train_step(made.engine, own, batch.num_tokens, config.training.max_norm)
        seen.append((made.engine.global_loss(part).item(), float(norm)))
    seen.append((held_out_loss(made.engine, task.held_out(1), own_share), 0.0))
    return seen


@pytest.fixture(scope="module")
def unbroken(tasks):
    """By model: the first steps of one process, and those after, of a run that is not stopped."""

    def work(rank: int, kind: str):
        config = config_of(kind)
        made = started(rank, "single", config, tasks[kind])
        return [trained(made, config, tasks[kind], first) for first in (1, STEPS + 1)]

    return {kind: run_ranks(work, 1, kind)[0] for kind in MODELS}


def save(rank: int, mode: str, kind: str, task, folder: Path):
    """The first steps, and a checkpoint of them."""
    config = config_of(kind, **MODES[mode][2])
    made = started(rank, mode, config, task)
    seen = trained(made, config, task, 1)
    place = Rank(rank, rank, dist.get_world_size(), torch.device("cpu"), "gloo")
    origin = Origin.of(config, task.vocab_size, 0, "text")
    save_run(folder, made, origin, STEPS, place, mode, keep=2)
    made.close()
    return seen


def resume(rank: int, mode: str, kind: str, task, folders: dict[str, Path]):
    """What comes after each checkpoint; one engine loads all of them in turn."""
    config, found = config_of(kind, **MODES[mode][3]), {}
    origin = Origin.of(config, task.vocab_size, 0, "text")
    made = started(rank, mode, config, task)
    for other, folder in folders.items():
        steps = resume_run(folder, made, origin)
        found[other] = steps, trained(made, config, task, STEPS + 1)
    made.close()
    return found


@pytest.fixture(scope="module")
def saved(tasks, tmp_path_factory):
    """Folder and losses of each mode that has saved the gpt."""
    import_for("deepspeed", "cpu")  # before there is a group
    root = tmp_path_factory.mktemp("saved")
    return {
        mode: (root / mode, run_ranks(save, ranks, mode, "gpt", tasks["gpt"], root / mode))
        for mode, (ranks, *_) in MODES.items()
    }


@pytest.fixture(scope="module", params=MODES)
def resumed(request, tasks, saved):
    """What one mode saw after the checkpoint of each; on ranks other than those that saved."""
    folders = {mode: folder for mode, (folder, _) in saved.items()}
    given = (request.param, "gpt", tasks["gpt"], folders)
    return run_ranks(resume, MODES[request.param][1], *given, timeout=200)


def near(steps: list[tuple[float, float]]) -> list:
    """Loss and norm; from the second step on the norm is of weights that Adam has moved, by far
    more than a rounding where a gradient is tiny."""
    return [(pytest.approx(loss, abs=2e-5), pytest.approx(norm, abs=1e-4)) for loss, norm in steps]


@pytest.mark.parametrize("mode", MODES)
def test_all_modes_have_the_losses_and_norms_of_one_process(mode, saved, unbroken):
    for of_rank in saved[mode][1]:
        assert of_rank == near(unbroken["gpt"][0])


@pytest.mark.parametrize("other", MODES)
def test_a_checkpoint_of_one_mode_goes_on_in_another_on_other_ranks(resumed, other, unbroken):
    for of_rank in resumed:
        assert of_rank[other] == (STEPS, near(unbroken["gpt"][1]))


@pytest.mark.parametrize("kind", ["modern", "translator"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("3d", "fsdp2"), *(pytest.param(*x, marks=pytest.mark.full) for x in
     (("deepspeed", "3d"), ("fsdp2", "deepspeed"), ("ddp", "single")))],
)  # fmt: skip
def test_the_other_models_are_the_same_everywhere_and_move_as_well(
    kind, one, other, tasks, unbroken, tmp_path
):
    import_for("deepspeed", "cpu")
    first, after = unbroken[kind]
    for seen in run_ranks(save, MODES[one][0], one, kind, tasks[kind], tmp_path):
        assert seen == near(first)
    given = (other, kind, tasks[kind], {one: tmp_path})
    for found in run_ranks(resume, MODES[other][1], *given):
        assert found[one] == (STEPS, near(after))


def test_old_checkpoints_go_and_a_half_written_one_is_none(tasks, tmp_path):
    def work(rank: int):
        config = config_of("gpt")
        made = started(rank, "ddp", config, tasks["gpt"])
        place = Rank(rank, rank, dist.get_world_size(), torch.device("cpu"), "gloo")
        origin = Origin.of(config, 448, 0, "text")
        for step in (2, 4, 6):
            save_run(tmp_path, made, origin, step, place, "ddp", keep=2)
        return None

    (tmp_path / ".step_00000008.part").mkdir()
    run_ranks(work, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000006"]
    notes = json.loads((tmp_path / "step_00000006" / RUN).read_text())
    assert (notes["step"], notes["mode"], notes["ranks"]) == (6, "ddp", 2)


# Nothing waits for a GPU


class Waits(TorchDispatchMode):
    """The operators that hand a number of the device to Python, or a size that depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen += [name] * (name in WAITING)
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_a_gpu(tasks):
    """The optimizer apart, whose step counts lie on the CPU wherever the model is."""

    def work(rank: int) -> dict[str, int]:
        found = {}
        for mode in ("ddp", "fsdp2", "3d"):
            config, task = config_of("gpt", pp=2, micro_batches=2), tasks["gpt"]
            made, batch = started(rank, mode, config, task), task.batch(1)
            made.engine.optimizer.step = lambda: None
            own, num_tokens = own_share(batch, *made.engine.share), batch.num_tokens
            with Waits() as waits:
                train_step(made.engine, own, num_tokens, config.training.max_norm)
            found[mode] = len(waits.seen)
        return found

    # On a CPU alone each forward looks at two numbers, whether all tokens are in the vocabulary,
    # and a vocabulary in parts at one, whether all targets are; a step of 3d has two of each.
    first, last = run_ranks(work, 2)
    assert first == {"ddp": 2, "fsdp2": 2, "3d": 4}
    assert last == {"ddp": 2, "fsdp2": 2, "3d": 2}


def test_told_in_one_step_all_ranks_hear_it_in_the_next():
    def work(rank: int) -> list[bool]:
        notice, heard = Notice(torch.device("cpu")), []
        for step in range(1, 6):
            notice.come |= rank == 1 and step == 3
            heard.append(notice.to_anyone_before())
        return heard

    assert run_ranks(work, 2) == [[False, False, False, True, True]] * 2


def test_compiling_for_a_gpu_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rank = Rank(0, 0, 1, torch.device("cuda", 0), "nccl")
    with pytest.raises(InputError, match="--compile on a GPU needs Triton"):
        make("single", None, config_of("gpt"), rank, How(compiled=True))
