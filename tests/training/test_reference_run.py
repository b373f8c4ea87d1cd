"""The one loss curve: again, on four ranks, and what must not pass for it."""

import pytest
import torch
import torch.distributed as dist

from shared.data.batching import Batch
from shared.ranks.forked import run_ranks
from shared.training import reference_run
from shared.training.loop import mean_over_ranks
from shared.training.reference_run import compare_with_record, loss_of, make_record, shard
from shared.training.schedules import set_learning_rate


@pytest.fixture(scope="module")
def plain() -> dict:
    return make_record()


def test_the_record_is_reproduced(plain):
    record = reference_run.read_record()
    compare_with_record(plain["losses"])
    assert plain["checksum_first"] == record["checksum_first"] or (
        plain["torch"],
        plain["instructions"],
    ) != (record["torch"], record["instructions"])
    assert plain["losses"][0] > 4
    assert plain["losses"][-1] < 1.5


def test_a_rerun_is_equal_bit_for_bit_whatever_the_random_state(plain):
    torch.manual_seed(12345)
    again = make_record()
    assert again["losses"] == plain["losses"]
    assert again["checksum_final"] == plain["checksum_final"]
    assert again["checksum_final"] != again["checksum_first"]


def ranks_step(rank: int, mean_of_means: bool) -> list[float]:
    world_size = dist.get_world_size()
    model = reference_run.reference_model()
    optimizer = reference_run.reference_optimizer(list(model.parameters()))

    def step(batch: Batch, rate: float) -> float:
        mine = shard(batch, rank, world_size)
        optimizer.zero_grad()
        weight = mine.num_tokens if not mean_of_means else 1
        loss = loss_of(model, mine, mine.num_tokens) * weight
        loss.backward()
        mean = mean_over_ranks(model.parameters(), loss.detach(), weight)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        return mean.item()

    return reference_run.run_reference(step)


def test_four_ranks_reproduce_the_curve():
    """Lesson 04's notebook has two."""
    for losses in run_ranks(ranks_step, 4, False, timeout=200):
        assert compare_with_record(losses) <= 5e-6  # what rounding alone does


def test_the_mean_of_the_ranks_means_is_outside_the_tolerance():
    losses = run_ranks(ranks_step, 2, True, timeout=200)[0]
    with pytest.raises(AssertionError, match="in the record"):
        compare_with_record(losses)


def test_shards_make_up_the_batch_and_hold_different_numbers_of_tokens():
    batch = reference_run.reference_batches()[0]
    parts = [shard(batch, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([part.src for part in parts]), batch.src)
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert len({part.num_tokens for part in parts}) > 1
    with pytest.raises(AssertionError, match="5 ranks"):
        shard(batch, 0, 5)


def test_a_short_run_is_no_reproduction(plain):
    with pytest.raises(AssertionError, match="49 losses, 50 in the record"):
        compare_with_record(plain["losses"][:-1])
