"""What a run says of its speed, by a clock that the test turns."""

from types import SimpleNamespace

import pytest
import torch

from shared.capstone import record
from shared.ranks.group import Rank


@pytest.mark.parametrize("evaluate_every", [1, 3, 4, 7])
def test_speed_is_that_of_the_steps_whenever_a_run_is_evaluated(
    evaluate_every, tmp_path, monkeypatch
):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(record, "synchronized_now", lambda _: clock.now)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]), global_loss=lambda part: part
    )
    rank = Rank(0, 0, 1, torch.device("cpu"), "gloo")
    run = record.Record(tmp_path, rank, every=4, first=1)
    for step in range(1, 17):
        clock.now += 0.5
        run.add(engine, step, torch.zeros(()), None, tokens=100)
        if step % evaluate_every == 0:
            clock.now += 60.0
            run.evaluated(step, 1.0)
    assert run.tokens_per_second() == 200.0
    assert run.speeds == [200.0] * 4
