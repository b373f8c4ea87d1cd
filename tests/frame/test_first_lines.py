"""The plain scripts: copied elsewhere, under torchrun, on two ranks, they train as one process."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.exercises.lessons import ROOT
from shared.ranks.torchrun import torchrun_command

SCRIPTS = sorted(ROOT.glob("lessons/*/plain.py"))
# DDP's reducer must not be the last owner of a group: see shared.ranks.group._outlive_models.
WATCHED = """
import gc, runpy
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def destroy(*args, destroy=dist.destroy_process_group):
    models = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    assert not models, "a model in DDP outlives its group: the rank may hang at its end"
    destroy(*args)

dist.destroy_process_group = destroy
runpy.run_path("plain.py", run_name="__main__")
assert not dist.is_initialized()
"""


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the epochs and the last weights of one process that takes whole batches."""
    plain = runpy.run_path(str(ROOT / "lessons" / "lesson06_ddp" / "plain.py"))
    model, (x, y) = plain["make_net"](), plain["make_data"]().tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(plain["EPOCHS"]):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        of_epoch = []
        for rows in order.split(plain["BATCH"]):
            loss = F.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            of_epoch.append(loss.item())
        losses.append(sum(of_epoch) / len(of_epoch))
    return losses, model.state_dict()


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """What the script left, by the names of the whole model."""
    if (folder / "plain_deepspeed").exists():
        (file,) = folder.glob("plain_deepspeed/*/mp_rank_00_model_states.pt")
        return torch.load(file, weights_only=False)["module"]
    if (folder / "plain_pipeline").exists():  # a file a layer
        return {
            f"{int(file.name[6:8])}.{name}": tensor
            for file in folder.glob("plain_pipeline/*/layer_*")
            for name, tensor in torch.load(file).items()
        }
    (file,) = folder.glob("plain_*.pt")
    return torch.load(file)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_plain_script_trains_as_one_process(script, tmp_path, one_process):
    frameworks = re.findall(r"^from (accelerate)|^import (deepspeed)", script.read_text(), re.M)
    for framework in filter(None, [name for found in frameworks for name in found]):
        pytest.importorskip(framework)
    shutil.copy(script, tmp_path)
    (tmp_path / "watched.py").write_text(WATCHED)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = torchrun_command(Path("watched.py"), 2)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    losses, weights = one_process
    said = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+)$", done.stdout, re.M)]
    assert said == pytest.approx(losses, abs=1e-3)
    left = saved_weights(tmp_path)
    assert left.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(left[name], tensor, atol=1e-4, rtol=1e-3)


KILLED = """
import os, runpy, signal
from pathlib import Path
from torch.optim import AdamW

calls, told = iter(range(1, 99)), Path("was_killed")

def step(self, *args, step=AdamW.step, **kwargs):
    if next(calls) == 14 and os.environ["RANK"] == "1" and not told.exists():
        told.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

AdamW.step = step
runpy.run_path("plain_resume.py", run_name="__main__")
"""


@pytest.mark.full
def test_a_run_that_is_killed_and_started_again_ends_bit_for_bit(tmp_path, monkeypatch):
    """Rank 1 dies in the second epoch, behind its first checkpoint; torchrun starts all again."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # lesson 08, the two nodes
    script = ROOT / "lessons" / "lesson08_fault_tolerance" / "plain_resume.py"
    said, left = [], []
    for name, restarts in ("plain_resume.py", 0), ("killed.py", 1):
        folder = tmp_path / name.removesuffix(".py")
        folder.mkdir()
        shutil.copy(script, folder)
        (folder / "killed.py").write_text(KILLED)
        command = torchrun_command(Path(name), 2, max_restarts=restarts)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert (folder / "was_killed").exists() == bool(restarts)
        said.append(done.stdout.splitlines())
        left.append(torch.load(folder / "plain_resume.pt"))
    assert said[0] == said[1]
    torch.testing.assert_close(left[0], left[1], rtol=0, atol=0)
    plain = runpy.run_path(str(script))
    net, (x, y) = plain["make_net"]().eval(), plain["make_data"](77, seed=2).tensors
    net.load_state_dict(left[0]["model"])
    assert said[0][-1].endswith(f"held out {F.mse_loss(net(x), y).item():.3f}")
