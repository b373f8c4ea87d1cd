"""Pipelines by hand: schedules against their formulas, training against the whole model."""

import itertools

import pytest
import torch
import torch.distributed as dist

from lessons.lesson15_pipeline_parallel.experiments.counting import simulate
from shared.errors import InputError
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import (
    Cell,
    bubble,
    gpipe_schedule,
    idle_share,
    interleaved_schedule,
    one_f_one_b_schedule,
    peak_in_flight,
    timetable,
)
from shared.pipeline.stages import parts_of, split_stages
from shared.ranks.forked import run_ranks

SIZES = list(itertools.product((1, 2, 3, 4), range(1, 9)))


def every_table():
    """(table, ranks, micro-batches, stages a rank) for all small sizes."""
    for p, m in SIZES:
        yield gpipe_schedule(p, m), p, m, 1
        yield one_f_one_b_schedule(p, m), p, m, 1
        for v in (1, 2, 3):
            if m % p == 0:
                yield interleaved_schedule(p, m, v), p, m, v


def test_the_simulated_step_is_the_table_and_a_message_is_waited_for():
    for table, *_ in every_table():
        assert simulate(table) == pytest.approx((len(table[0]), idle_share(table)))
        slots, waiting = simulate(table, backward=2)  # a backward twice as long: the same share
        assert (slots, waiting) == pytest.approx((1.5 * len(table[0]), idle_share(table)))
    # F0, a message, F0, B0, a message, B0
    assert simulate(one_f_one_b_schedule(2, 1), backward=2, message=0.5)[0] == 1 + 0.5 + 3 + 0.5 + 2
    assert simulate(one_f_one_b_schedule(4, 8), message=0.5)[0] == 30
    assert simulate(gpipe_schedule(4, 8), message=0.5)[0] == 25


def test_idle_slots_are_the_formulas_bubble():
    for table, p, m, v in every_table():
        assert len(table[0]) == 2 * (v * m + p - 1)
        assert idle_share(table) == pytest.approx(bubble(p, m, v), abs=1e-12), (p, m, v)


def test_gpipe_keeps_all_micro_batches_and_one_f_one_b_at_most_p():
    for p, m in SIZES:
        assert [peak_in_flight(gpipe_schedule(p, m), s) for s in range(p)] == [m] * p
        alive = [peak_in_flight(one_f_one_b_schedule(p, m), s) for s in range(p)]
        assert alive == [min(p - s, m) for s in range(p)]


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


def language_model(tie: bool) -> LanguageModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        40, 16, 4, 6, 32, dropout=0.0, max_len=12, tie_embeddings=tie, norm="pre"
    )
    return LanguageModel(config)


def loss_of(logits, tokens):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )


def train_lm(rank: int, kind: str, num_micro_batches: int) -> list[dict]:
    """Without a tied matrix and with one: two steps without zeroing gradients between them."""
    return [train_one(rank, kind, num_micro_batches, tie) for tie in (False, True)]


def train_one(rank: int, kind: str, num_micro_batches: int, tie: bool) -> dict:
    model, p = language_model(tie), dist.get_world_size()
    names = {parameter: name for name, parameter in model.named_parameters()}
    chunks = 2 if kind == "interleaved" else 1
    parts = parts_of(model)
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), p * chunks))
    table = {
        "gpipe": lambda: gpipe_schedule(p, num_micro_batches),
        "1f1b": lambda: one_f_one_b_schedule(p, num_micro_batches),
        "interleaved": lambda: interleaved_schedule(p, num_micro_batches, chunks),
    }[kind]()
    for batches in micro_batches(num_micro_batches):
        with count_traffic() as traffic:
            pipeline.train_step(table, batches, loss_of)
    want = sum(4 * x.numel() * 16 for x in batches)
    sent = {
        "forward": sum(s + 1 < pipeline.num_stages for s in pipeline.stages) * want,
        "backward": sum(s > 0 for s in pipeline.stages) * want,
    }
    assert traffic.sent_bytes == sum(sent.values()), (traffic.sent_bytes, sent)
    assert [event.cell for event in pipeline.events] == [c for c in table[rank] if c]
    return {
        "grads": {names[x]: x.grad for x in pipeline.parameters() if x in names},
        "alive": {s: stage.peak_in_flight for s, stage in pipeline.stages.items()},
        "left": sum(len(stage.in_flight) for stage in pipeline.stages.values()),
    }


def micro_batches(count: int) -> list[list[torch.Tensor]]:
    """Of two steps, in rows and lengths of all sizes."""
    draw = torch.Generator().manual_seed(1)
    sizes = [(1 + m % 3, 5 + m % 4) for m in range(count)]
    return [[torch.randint(1, 40, size, generator=draw) for size in sizes] for _ in range(2)]


MORE_SIZES = [pytest.param(*each, marks=pytest.mark.full) for each in [(1, 3), (2, 1), (4, 2)]]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), *MORE_SIZES])
def test_gradients_are_those_of_the_whole_model(kind, p, m):
    """Four ranks with eight micro-batches are in the notebook."""
    if kind == "interleaved" and (m % p or p == 1):
        pytest.skip("interleaving needs several ranks and whole groups of micro-batches")
    for tie, *found in zip((False, True), *run_ranks(train_lm, p, kind, m), strict=True):
        model = language_model(tie)
        for batches in micro_batches(m):
            loss = sum(loss_of(model(x), x) for x in batches)
            loss.backward()
        seen = {}
        for rank in found:
            for name, grad in rank["grads"].items():
                torch.testing.assert_close(grad, seen.setdefault(name, grad))
            assert rank["left"] == 0
            if kind != "interleaved":
                most = {s: m if kind == "gpipe" else min(p - s, m) for s in rank["alive"]}
                assert rank["alive"] == most
        wanted = {name: x.grad for name, x in model.named_parameters()}
        assert seen.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(seen[name], grad, rtol=1e-4, atol=1e-4)


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
