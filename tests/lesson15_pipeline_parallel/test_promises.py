"""What the pipeline's docstrings promise and no other test holds."""

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist

from lessons.lesson15_pipeline_parallel.experiments.runs import (
    language_model,
    sum_loss,
    token_rows,
)
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import (
    gpipe_schedule,
    interleaved_schedule,
    kept_at_once,
    one_f_one_b_schedule,
    peak_in_flight,
)
from shared.pipeline.stages import parts_of, split_stages
from shared.pipeline.transfer import connect, recv_activation, send_activation
from shared.ranks.forked import run_ranks


def pipeline_of_two(**options) -> Pipeline:
    parts = parts_of(language_model(num_layers=2))
    return Pipeline(parts, split_stages([1.0] * len(parts), dist.get_world_size()), **options)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_keeps_at_most_what_its_docstring_says(p, v):
    table = interleaved_schedule(p, 4 * p, v)
    for rank, row in enumerate(table):
        peak = kept_at_once(row)
        assert peak == (v - 1) * p + 2 * (p - 1 - rank) + 1
        assert peak <= sum(peak_in_flight(table, s) for s in range(rank, v * p, p))


def with_targets(rank: int) -> dict:
    batches, found = [token_rows(2, 6, seed=m) for m in range(3)], {}
    targets = [token_rows(2, 6, seed=m + 9) for m in range(3)]

    def loss(logits, target):
        found["targets"] = [*found.get("targets", []), target]
        return sum_loss(logits, target)

    pipeline = pipeline_of_two()
    found["losses"] = pipeline.train_step(gpipe_schedule(2, 3), batches, loss, targets)
    return found


def test_the_loss_gets_each_micro_batchs_target_and_the_last_rank_returns_its_parts():
    first, last = run_ranks(with_targets, 2, timeout=60)
    assert first == {"losses": []}
    model = language_model(num_layers=2)
    for m in range(3):
        assert last["targets"][m].equal(token_rows(2, 6, seed=m + 9))
        want = sum_loss(model(token_rows(2, 6, seed=m)), token_rows(2, 6, seed=m + 9))
        torch.testing.assert_close(last["losses"][m], want.detach())


def tied_gradients(rank: int) -> list[torch.Tensor]:
    batches, found = [token_rows(2, 6, seed=m) for m in range(3)], []
    for summed in (True, False):
        pipeline = pipeline_of_two(sum_tied=summed)
        pipeline.train_step(one_f_one_b_schedule(2, 3), batches, sum_loss)
        [(parameter, group)] = pipeline.tied.items()
        found.append(parameter.grad.clone())
    dist.all_reduce(parameter.grad, group=group)
    return [*found, parameter.grad]


def test_without_sum_tied_the_caller_sums_over_the_groups_in_tied():
    for summed, own, by_hand in run_ranks(tied_gradients, 2, timeout=60):
        assert not own.equal(summed)
        torch.testing.assert_close(by_hand, summed, rtol=0, atol=0)


def what_a_link_keeps(rank: int) -> list[int]:
    """Messages in `pending`: after a send, after its answer; then without one, after finish()."""
    (link,) = connect(2, [0, 1]).values()
    found = []
    for answered in (True, False):
        if rank == 0:
            end = send_activation(link, torch.ones(3, requires_grad=True) * 2)
            found.append(len(link.pending))
            if answered:
                end.backward()
            else:
                link.finish()
        else:
            (came,) = recv_activation(link, [(3,)])
            if answered:
                came.sum().backward()
                link.finish()
        found.append(len(link.pending))
    return found


def finished_before(rank: int) -> float:
    (link,) = connect(2, [0, 1]).values()
    if rank == 0:
        x = torch.ones(3, requires_grad=True)
        end = send_activation(link, x * 2)
        link.finish()
        end.backward()
        return x.grad.sum().item()
    (came,) = recv_activation(link, [(3,)])
    came.sum().backward()
    link.finish()
    return 6.0


def test_backward_after_finish_waits_for_the_gradients_alone():
    assert run_ranks(finished_before, 2, timeout=30) == [6.0, 6.0]


def test_a_link_keeps_a_message_until_it_is_answered_or_finished():
    assert run_ranks(what_a_link_keeps, 2, timeout=30) == [[1, 0, 1, 0], [0, 0]]


def gradients_behind_a_frozen_stage(rank):
    model = language_model(tie=False)
    parts = parts_of(model)
    half = len(parts) // 2
    for part in parts[:half]:
        for parameter in part.parameters():
            parameter.requires_grad_(False)
    pipeline = Pipeline(parts, [range(half), range(half, len(parts))])
    rows = [token_rows(2, 6, seed=m) for m in range(2)]
    pipeline.train_step(one_f_one_b_schedule(2, 2), rows, sum_loss, rows)
    return [p.grad is not None for p in pipeline.parameters()]


def test_a_frozen_stage_passes_its_activations_on():
    frozen, trained = run_ranks(gradients_behind_a_frozen_stage, 2)
    assert not any(frozen) and trained and all(trained)
