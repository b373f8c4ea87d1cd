"""Checkpoints for any number of ranks: one run that grows (one that shrinks: the notebook)."""

from functools import partial

import pytest

from lessons.lesson08_fault_tolerance.experiments.resumable_runs import reference_training
from shared.errors import InputError
from shared.fault_tolerance.checkpoints import resume_training
from shared.fault_tolerance.elastic import elastic_checkpoints_in, load_elastic, save_elastic
from shared.ranks.forked import run_ranks
from shared.training import reference_run


def go_on(rank, folder, until):
    state, take_step = reference_training()
    return resume_training(
        state, take_step, num_steps=until, batch_size=1, interval=5,
        save=partial(save_elastic, folder), load=partial(load_elastic, folder),
    )  # fmt: skip


def test_more_ranks_resume_on_the_curve_of_one(tmp_path):
    run_ranks(go_on, 1, tmp_path, 10)
    losses = run_ranks(go_on, 2, tmp_path, 15)[0]
    record = reference_run.read_record()["losses"][:15]
    assert losses == pytest.approx(record, abs=reference_run.TOLERANCE)


def test_each_rank_writes_a_share(tmp_path):
    run_ranks(go_on, 4, tmp_path, 5)
    parts = [path.stat().st_size for path in (tmp_path / "step_00000005").glob("*.distcp")]
    assert len(parts) == 4
    assert max(parts) < 1.5 * min(parts)
    weights = sum(x.nbytes for x in reference_run.reference_model().state_dict().values())
    assert 3 * weights < sum(parts) < 3.8 * weights, "weights and two moments, once in all"


def test_as_many_stay_as_are_to_be_kept(tmp_path):
    def save_five(rank):
        state, _ = reference_training()
        for state.step in range(1, 6):
            save_elastic(tmp_path, state, keep=4)

    run_ranks(save_five, 1)
    names = [path.name for path in elastic_checkpoints_in(tmp_path)]
    assert names == [f"step_{step:08d}" for step in (2, 3, 4, 5)]


def test_an_unfinished_folder_is_passed_over(tmp_path):
    run_ranks(go_on, 2, tmp_path, 10)
    (tmp_path / "step_00000010" / ".metadata").unlink()

    def began(rank):
        state, _ = reference_training()
        load_elastic(tmp_path, state)
        return state.step

    assert run_ranks(began, 2) == [5, 5]


def test_another_model_and_damage_are_refused(tmp_path):
    run_ranks(go_on, 2, tmp_path, 5)

    def other(rank):
        state, _ = reference_training()
        state.model.add_module("more", type(state.model.decoder_layers[0].feed_forward)(64, 8, 0.0))
        with pytest.raises(InputError, match="cannot be loaded into this model"):
            load_elastic(tmp_path, state)
        return True

    assert run_ranks(other, 2) == [True, True]
    for part in (tmp_path / "step_00000005").glob("*.distcp"):
        part.write_bytes(b"")

    def damaged(rank):
        state, _ = reference_training()
        with pytest.raises(InputError, match="step_00000005 cannot be loaded"):
            load_elastic(tmp_path, state)
        return True

    assert run_ranks(damaged, 2) == [True, True]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def refused(rank):
        state, _ = reference_training()
        with pytest.raises(InputError, match="cannot be written"):
            save_elastic(tmp_path / "file", state)
        return True

    assert run_ranks(refused, 2) == [True, True]
