"""Scripts whose learning rate has a schedule: it follows --steps, not the preset's number."""

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shared.exercises.lessons import ROOT

SCRIPTS = [
    path
    for path in sorted((ROOT / "lessons").glob("*/train.py"))
    if "recipe.learning_rate(" in path.read_text(encoding="utf-8")
]
STEPS = 9  # more than any of these presets has
ONCE = {"lesson19_lora": ("--base-steps", 1)}  # it trains twice, and each time ends at a rate of 0


@pytest.fixture
def moved():
    """How far the weights went in each step of a run, the largest of all optimizers."""
    before, steps = {}, []

    def weights(optimizer):
        return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def begin(optimizer, args, kwargs):
        before[id(optimizer)] = weights(optimizer)

    def end(optimizer, args, kwargs):
        pairs = zip(before.pop(id(optimizer)), weights(optimizer), strict=True)
        steps.append(max(float((a - b).abs().max()) for a, b in pairs if a.numel()))

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    yield steps
    for hook in hooks:
        hook.remove()


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_the_last_steps_move_the_weights(path, moved, run_script, tmp_path):
    torch.manual_seed(0)
    args = ("--preset", "tiny", "--device", "cpu", "--steps", STEPS, "--out", tmp_path)
    args += ONCE.get(path.parent.name, ())
    status, _, err = run_script(path, *args)
    assert status == 0, err
    engines = len(moved) // STEPS  # 06 compares some, which take turns
    last = moved[-4 * engines : -engines]  # a cosine is 0 in the very last step
    assert len(last) == 3 * engines > 0
    assert min(last) > 0
