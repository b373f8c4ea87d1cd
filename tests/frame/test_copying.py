"""The page "Copy from here": each row's files stand alone, and train a model that is not ours."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.torchrun import python, torchrun_command

# A link, or a plain name of what a student edition does not hold.
FILE = re.compile(r"(?:\]\(\.\./|`)([\w/]+\.py)(?=[)`])")


def copy_rows() -> dict[str, list[str]]:
    """The files of each row, by the lesson that its first column names."""
    page = (ROOT / "lessons" / "copy_from_here.md").read_text()
    rows = re.findall(r"^\| [^|]*\((\d\d)\) \| ([^|]*) \|", page, re.MULTILINE)
    return {number: FILE.findall(files) for number, files in rows}


ROWS = copy_rows()


def copied(numbers: list[str], place: Path) -> list[str]:
    """Copy the rows' files to a folder; return their import paths."""
    names = sorted({name for number in numbers for name in ROWS[number]})
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    return [name.removesuffix(".py").replace("/", ".") for name in names]


def environment(place: Path) -> dict[str, str]:
    """An environment in which the folder comes first, and the course is not to be found."""
    return {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}


@pytest.mark.full
@pytest.mark.parametrize("number", sorted(ROWS))
def test_the_files_of_a_row_need_nothing_else(number, tmp_path):
    modules = copied([number], tmp_path)
    program = tmp_path / "imports.py"
    program.write_text(
        f"import sys, {', '.join(modules)}\n"
        "for name, module in sys.modules.items():\n"
        "    if name.startswith(('shared.', 'solutions.')) and getattr(module, '__file__', None):\n"
        f"        assert module.__file__.startswith({str(tmp_path)!r}), module.__file__\n"
    )
    done = subprocess.run(
        [python(), program],
        env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Trained twice on two ranks, by torch's engines and by the copied ones; then stopped and resumed.
FOREIGN = """
import copy, pathlib, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler as TorchSampler

from shared.data.sampling import DistributedSampler, ResumableSampler
from shared.fault_tolerance.checkpoints import load_checkpoint, resume_training, save_checkpoint
from shared.fault_tolerance.state import TrainingState
from solutions.lesson05_collectives import ring_all_reduce
from solutions.lesson06_ddp import BucketedDDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
)
images, labels = torch.randn(64, 1, 8, 8), torch.randint(4, (64,))


def trained(engine, sampler, finish):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in torch.tensor(list(sampler)).split(8):
            loss = nn.functional.cross_entropy(engine(images[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            finish(engine)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in engine.parameters()])


place = {"num_replicas": world_size, "rank": rank}
theirs = trained(
    DistributedDataParallel(copy.deepcopy(net)), TorchSampler(labels, **place), lambda e: None
)
ours = trained(
    BucketedDDP(copy.deepcopy(net)), DistributedSampler(labels, **place),
    BucketedDDP.finish_gradient_sync,
)
assert torch.equal(ours, theirs), float((ours - theirs).abs().max())

summed, again = ours.clone(), ours.clone()
dist.all_reduce(summed)
ring_all_reduce(again)
assert torch.allclose(summed, again)

folder = pathlib.Path(sys.argv[1])


def run(num_steps, load):
    torch.manual_seed(5 + rank)
    engine = BucketedDDP(copy.deepcopy(net))
    optimizer = torch.optim.AdamW(engine.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = TrainingState(engine, optimizer, schedule, ResumableSampler(64, world_size, rank))

    def take_step(indices):
        loss = nn.functional.cross_entropy(engine(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        engine.finish_gradient_sync()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)  # a checkpoint holds one loss a step: that of all ranks
        return mean.item()

    resume_training(
        state, take_step, num_steps=num_steps, batch_size=8, interval=3,
        save=lambda state: save_checkpoint(folder, state), load=load,
    )
    return state


whole = run(9, lambda state: None)
for path in [*folder.iterdir()] if rank == 0 else []:
    path.unlink()
dist.barrier()
run(6, lambda state: None)
rest = run(9, lambda state: load_checkpoint(folder, state))
assert whole.losses == rest.losses, (whole.losses, rest.losses)
for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
    assert torch.equal(a, b)
sys.stdout.write(f"equal {len(rest.losses)}\\n")  # in one piece: two ranks write
dist.destroy_process_group()
"""


@pytest.mark.full
def test_lessons_05_to_08_around_a_net_that_is_not_ours(tmp_path):
    copied(["05", "06", "07", "08"], tmp_path)
    script = tmp_path / "foreign.py"
    script.write_text(FOREIGN)
    (tmp_path / "saved").mkdir()
    done = subprocess.run(
        torchrun_command(script, 2, [str(tmp_path / "saved")]),
        env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal 9") == 2  # the ranks' lines may run into each other
