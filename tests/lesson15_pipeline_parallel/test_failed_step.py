"""A step that ends in an error, or that cannot begin, leaves nothing behind in the pipeline."""

import itertools
from functools import partial

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import nn

from lessons.lesson15_pipeline_parallel.experiments.counting import most_kept
from lessons.lesson15_pipeline_parallel.experiments.runs import (
    language_model,
    sum_loss,
    token_rows,
)
from shared.errors import InputError
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import (
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
)
from shared.pipeline.stages import parts_of, split_stages
from shared.ranks.forked import run_ranks


def small_pipeline(stages_a_rank: int = 1) -> Pipeline:
    parts = parts_of(language_model(num_layers=2 * stages_a_rank))
    return Pipeline(parts, split_stages([1.0] * len(parts), dist.get_world_size() * stages_a_rank))


def batches_of(count: int) -> list[torch.Tensor]:
    return [token_rows(1 + m % 2, 5 + m, seed=m) for m in range(count)]


def refusals(rank: int) -> list[str]:
    pipeline, said = small_pipeline(), []
    tables = [
        (one_f_one_b_schedule(2, 4), 5),
        (one_f_one_b_schedule(2, 4), 3),
        (one_f_one_b_schedule(3, 4), 4),
        (interleaved_schedule(2, 4, 2), 4),
        (one_f_one_b_schedule(2, 4)[::-1], 4),
    ]
    for table, count in tables:
        with pytest.raises(InputError) as why:
            pipeline.train_step(table, batches_of(count), sum_loss)
        said.append(str(why.value))
    with pytest.raises(InputError) as why:
        pipeline.train_step(
            one_f_one_b_schedule(2, 4), batches_of(4), sum_loss, targets=batches_of(3)
        )
    return [*said, str(why.value)]


def test_a_table_that_does_not_fit_is_refused_with_both_numbers():
    for said in run_ranks(refusals, 2, timeout=30):
        assert said == [
            "a table of 4 micro-batches for 5: make the schedule of 5",
            "a table of 4 micro-batches for 3: make the schedule of 3",
            "a table of 3 rows for a pipeline of 2 ranks: make the schedule of 2",
            "a table of 4 stages for a pipeline of 2",
            "the table has stage 1 in row 0, and this pipeline has it on its rank 1",
            "3 targets for 4 micro-batches",
        ]


def counted_clock(rank: int) -> list[tuple[float, float]]:
    pipeline, ticks = small_pipeline(), itertools.count()
    pipeline.clock = lambda: float(next(ticks))
    pipeline.train_step(one_f_one_b_schedule(2, 4), batches_of(4), sum_loss)
    return [(event.start, event.end) for event in pipeline.events]


def test_all_times_of_an_event_are_the_pipelines_clock():
    for events in run_ranks(counted_clock, 2, timeout=30):
        times = list(itertools.chain.from_iterable(events))
        assert times == sorted(times)
        assert len(set(times)) == len(times)


def peaks(rank: int) -> list[int]:
    pipeline, found = small_pipeline(), []
    for make in (gpipe_schedule, one_f_one_b_schedule):
        pipeline.train_step(make(2, 4), batches_of(4), sum_loss)
        found += [stage.peak_in_flight for stage in pipeline.stages.values()]
    return found


def test_the_peak_is_that_of_the_last_step():
    assert run_ranks(peaks, 2, timeout=30) == [[4, 2], [4, 1]]


class Planned(Exception):
    """What the test raises."""


def fail_at(pipeline: Pipeline, where: str, number: int) -> list:
    """Let the `number`-th forward of this rank, or the backward through it, raise; the handles."""
    calls = itertools.count()

    def raises(*_):
        raise Planned(where)

    def hook(part: nn.Module, args, output):
        if next(calls) == number:
            if where == "forward":
                raise Planned(where)
            output[0].register_hook(raises)

    return [next(iter(pipeline.stages.values())).parts[0].register_forward_hook(hook)]


NOBODY = ("", 0, [])


def after_an_error(rank: int, make, chunks: int, failures) -> list[list[torch.Tensor]]:
    """Losses and parameters after a good step, from equal weights: by the step that failed before.

    A failure is (where, the number of the rank's forward, the ranks).
    """
    found = []
    for where, number, who in (NOBODY, *failures):
        pipeline = small_pipeline(chunks)
        table, batches = make(dist.get_world_size(), 4), batches_of(4)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
        pipeline.train_step(table, batches, sum_loss)  # its gradients are there when a step fails
        if where:
            handles = fail_at(pipeline, where, number) if rank in who else []
            had = [parameter.grad.clone() for parameter in pipeline.tied]
            try:
                pipeline.train_step(table, batches_of(4), sum_loss)
                assert rank not in who
            except Planned:
                assert rank in who
                for parameter, grad in zip(pipeline.tied, had, strict=True):
                    torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0)
            assert not any(stage.in_flight for stage in pipeline.stages.values())
            assert not any(link.pending for link in pipeline.links.values())
            for handle in handles:
                handle.remove()
        optimizer.zero_grad()
        losses = pipeline.train_step(table, batches[::-1], sum_loss)
        optimizer.step()
        found.append([*losses, *(p.detach() for p in pipeline.parameters())])
    return found


BOTH = [0, 1]
IN_1F1B = [("forward", 2, BOTH), ("forward", 0, BOTH), ("backward", 1, BOTH), ("forward", 3, [0])]
IN_1F1B.append(("backward", 1, [1]))  # rank 0 has no error, and does not wait for ever


@pytest.mark.parametrize(
    ("schedule", "chunks", "failures"),
    [
        (gpipe_schedule, 1, [("forward", 2, BOTH)]),
        (one_f_one_b_schedule, 1, IN_1F1B),
        (
            partial(interleaved_schedule, num_chunks=2),
            2,
            [("forward", 1, BOTH), ("backward", 2, BOTH)],
        ),
    ],
    ids=["gpipe", "1f1b", "interleaved"],
)
def test_an_error_and_zero_grad_are_as_if_the_step_had_not_been(schedule, chunks, failures):
    for good, *others in run_ranks(after_an_error, 2, schedule, chunks, failures, timeout=60):
        for after in others:
            torch.testing.assert_close(after, good, rtol=0, atol=0)


def test_what_was_sent_goes_when_it_is_known_to_have_come():
    few, many = (
        run_ranks(most_kept, 4, one_f_one_b_schedule, m, 4 * m, timeout=120) for m in (8, 32)
    )
    border = 4 * 64 * 64 * 4  # bytes of a micro-batch's vectors
    more = [b - a for a, b in zip(few, many, strict=True)]
    assert max(more) < border, more  # 1F1B keeps as much of 32 micro-batches as of 8
