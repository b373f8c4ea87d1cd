"""Pipelines by hand: schedules against their formulas, training against the whole model."""

import itertools

import pytest
import torch
import torch.distributed as dist

from lessons.lesson15_pipeline_parallel.experiments.counting import simulate
from lessons.lesson15_pipeline_parallel.experiments.runs import (
    language_model,
    largest_difference,
    sum_loss,
    token_rows,
)
from shared.errors import InputError
from shared.measuring.traffic import count_traffic
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import (
    Cell,
    gpipe_schedule,
    idle_share,
    interleaved_schedule,
    one_f_one_b_schedule,
    timetable,
)
from shared.pipeline.stages import parts_of, split_stages
from shared.ranks.forked import run_ranks


def every_table():
    """Of all small sizes."""
    for p, m in itertools.product((1, 2, 3, 4), range(1, 9)):
        yield gpipe_schedule(p, m)
        yield one_f_one_b_schedule(p, m)
        for v in (1, 2, 3):
            if m % p == 0:
                yield interleaved_schedule(p, m, v)


def test_the_simulated_step_is_the_table_and_a_message_is_waited_for():
    for table in every_table():
        assert simulate(table) == pytest.approx((len(table[0]), idle_share(table)))
        slots, waiting = simulate(table, backward=2)  # a backward twice as long: the same share
        assert (slots, waiting) == pytest.approx((1.5 * len(table[0]), idle_share(table)))
    # F0, a message, F0, B0, a message, B0
    assert simulate(one_f_one_b_schedule(2, 1), backward=2, message=0.5)[0] == 1 + 0.5 + 3 + 0.5 + 2
    assert simulate(one_f_one_b_schedule(4, 8), message=0.5)[0] == 30
    assert simulate(gpipe_schedule(4, 8), message=0.5)[0] == 25


def test_an_order_that_cannot_be_done_is_called_a_deadlock():
    orders = [[Cell("B", 0, 0), Cell("F", 0, 0)], [Cell("F", 0, 1), Cell("B", 0, 1)]]
    with pytest.raises(InputError, match="rank 0 for B0 of stage 0, rank 1 for F0 of stage 1"):
        timetable(orders)


@pytest.mark.parametrize(
    ("make", "sizes", "says"),
    [
        (gpipe_schedule, (0, 4), "number of stages must be 1 or more, got 0"),
        (one_f_one_b_schedule, (2, 0), "number of micro-batches must be 1 or more, got 0"),
        (interleaved_schedule, (4, 6, 2), "6 are no multiple of it: take 8"),
        (interleaved_schedule, (4, 4, 0), "stages of a rank must be 1 or more, got 0"),
    ],
)
def test_sizes_that_are_none_are_refused(make, sizes, says):
    with pytest.raises(InputError, match=says):
        make(*sizes)


def test_more_stages_than_parts_and_costs_below_nothing_are_refused():
    with pytest.raises(InputError, match="3 parts make 1 to 3 stages, got 4"):
        split_stages([1, 1, 1], 4)
    with pytest.raises(InputError, match="a cost cannot be below 0, got -1"):
        split_stages([1, -1], 1)
    with pytest.raises(InputError, match="a Linear has no list of parts"):
        parts_of(torch.nn.Linear(1, 1))


# In rows and lengths of several sizes.
BATCHES = [token_rows(1 + m % 3, 5 + m % 4) for m in range(6)]


def two_steps(rank: int, tie: bool) -> tuple[dict, None]:
    """Two stages a rank, and no zeroing of gradients between the steps."""
    model, p = language_model(tie), dist.get_world_size()
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = parts_of(model)
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), 2 * p))
    table = interleaved_schedule(p, len(BATCHES), 2)
    for _ in range(2):
        with count_traffic() as traffic:
            pipeline.train_step(table, BATCHES, sum_loss)
    times = sum((s + 1 < pipeline.num_stages) + (s > 0) for s in pipeline.stages)
    assert traffic.sent_bytes == times * sum(4 * x.numel() * 64 for x in BATCHES)
    assert [event.cell for event in pipeline.events] == [c for c in table[rank] if c]
    assert not any(stage.in_flight for stage in pipeline.stages.values())
    return {names[x]: x.grad for x in pipeline.parameters() if x in names}, None


@pytest.mark.parametrize("tie", [False, True])
def test_micro_batches_of_all_sizes_have_the_gradients_of_the_whole_model(tie):
    """The notebook has the other schedules, on two to four ranks, and one size."""
    found = run_ranks(two_steps, 3, tie)
    # On one thread as well: what is all but zero, as a bias of keys, is compared with itself.
    assert run_ranks(lambda rank: largest_difference(found, 2 * BATCHES, tie) < 2e-6, 1) == [True]


def wrong_cuts(rank: int) -> list[str]:
    parts, said = parts_of(language_model(False)), []
    for cuts in ([range(0, 3), range(4, 8)], [range(0, 3), range(3, 5), range(5, 8)]):
        with pytest.raises(InputError) as why:
            Pipeline(parts, cuts)
        said.append(str(why.value))
    with pytest.raises(InputError) as why:
        Pipeline(parts, [range(0, 4), range(4, 8)], ranks=[rank])
    return [*said, str(why.value)]


def test_cuts_that_are_none_are_refused_in_one_line():
    gap, uneven, alone = run_ranks(wrong_cuts, 2)[0]
    assert gap.endswith("are no cut of 8")
    assert uneven == "3 stages cannot be shared evenly by 2 ranks"
    assert alone == "one rank needs one stage: 2 would send to themselves"
