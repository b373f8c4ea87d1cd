"""A run that was killed ends like one that was not: equal losses, equal weights, bit for bit."""

import contextlib
import os
import random
import signal
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lessons.lesson08_fault_tolerance.experiments.resumable_runs import reference_training
from shared.fault_tolerance.background import BackgroundSaver
from shared.fault_tolerance.checkpoints import (
    checkpoints_in,
    load_checkpoint,
    resume_training,
    save_checkpoint,
)
from shared.fault_tolerance.kills import dying_while_writing
from shared.fault_tolerance.random_states import random_states, set_random_states
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks
from shared.training import reference_run

STEPS, INTERVAL = 30, 6


def on_rank(rank, folder, way="wait", before_step=None, within_save=None):
    """Train the reference run; `before_step` and `within_save` are (step, rank) of a death."""
    state, step = reference_training()
    saver = BackgroundSaver(folder)
    save = saver.save if way == "background" else partial(save_checkpoint, folder)

    def take_step(indices):
        if before_step == (state.step, rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(indices)

    def save_or_die(state):
        if within_save is None or state.step < within_save[0] or rank != 0:
            return save(state)
        with dying_while_writing(within_save[1]):
            save(state)
            return saver.wait()

    losses = resume_training(
        state, take_step, num_steps=STEPS, batch_size=1, interval=INTERVAL,
        save=save_or_die, load=partial(load_checkpoint, folder),
    )  # fmt: skip
    saver.wait()
    return losses, reference_run.checksum(state.model)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """What both ranks of a run that nobody disturbed end with: losses and checksum."""
    return run_ranks(on_rank, 2, tmp_path_factory.mktemp("untouched"))[:1] * 2


def test_killed_before_random_steps(untouched, tmp_path):
    """While it saves in the background; the notebook has the way that waits."""
    draw = random.Random()
    for _ in range(2):  # twice the same run: it resumes, and is killed again
        place = draw.randrange(STEPS), draw.randrange(2)
        with contextlib.suppress(RankFailed):  # the second place may lie before the first
            run_ranks(on_rank, 2, tmp_path, "background", place)
    assert run_ranks(on_rank, 2, tmp_path, "background") == untouched


@pytest.mark.parametrize("way", ["wait", "background"])
@pytest.mark.parametrize("share", [0.0, pytest.param(0.6, marks=pytest.mark.full), 1.0])
def test_killed_within_a_save(share, way, untouched, tmp_path):
    with pytest.raises(RankFailed, match="rank 0 of 2 was ended by SIGKILL"):
        run_ranks(on_rank, 2, tmp_path, way, None, (20, share))
    whole = checkpoints_in(tmp_path)
    assert [path.name for path in whole] == ["step_00000012.pt", "step_00000018.pt"]
    torn = list(tmp_path.glob(".step_*.part"))
    assert [path.name.split(".")[1] for path in torn] == ["step_00000024"]
    if share == 0.0:  # the newest whole one is torn afterwards: it costs one interval more
        whole[-1].write_bytes(whole[-1].read_bytes()[:-1000])
    assert run_ranks(on_rank, 2, tmp_path, way) == untouched
    assert not list(tmp_path.glob(".step_*")), "what the dead left is cleared away"


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def test_random_states_go_through_a_file(tmp_path):
    for seed_one in (random.seed, np.random.seed, torch.manual_seed):
        seed_one(3)
    draws(), np.random.randn()  # numpy keeps the second of two normal numbers for later
    torch.save(random_states(), tmp_path / "states.pt")
    want = [*draws(), np.random.randn(), random.gauss(0, 1)]
    draws()
    set_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert [*draws(), np.random.randn(), random.gauss(0, 1)] == want


def test_a_background_save_is_of_one_moment(tmp_path):
    """Training continues while the thread writes; the file must not change with it."""

    def check(rank):
        state, _ = reference_training()
        saver = BackgroundSaver(tmp_path)
        before = reference_run.checksum(state.model)
        path = saver.save(state)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(1.0)
        saver.wait()
        fresh, _ = reference_training()
        assert load_checkpoint(tmp_path, fresh) == path
        assert reference_run.checksum(fresh.model) == before
        return dist.get_rank()

    assert run_ranks(check, 2) == [0, 1]
