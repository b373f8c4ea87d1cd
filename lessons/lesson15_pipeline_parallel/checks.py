"""Lesson 15: what tells a right answer from a wrong one.

Cuts are held against all cuts, schedules against what a piece of work needs and against the
bubble's formula, what travels against one process that has all stages.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

from lessons.lesson15_pipeline_parallel.laboratory import chain as chains
from lessons.lesson15_pipeline_parallel.laboratory import links as lab
from lessons.lesson15_pipeline_parallel.laboratory import orders as order_lab
from lessons.lesson15_pipeline_parallel.laboratory import tables
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.seeds import fresh_seed

ENGINE = ("torch.distributed.pipelining.", "shared.pipeline.executor.")
SCHEDULES = (
    *(f"shared.pipeline.schedules.{name}" for name in ("gpipe", "one_f", "interleaved")),
    *ENGINE,
)


def expect_refused(answer: Callable[..., Any], *cases) -> None:
    """Cases: what it is, the number that the error must say, the arguments."""
    for what, seen, *args in cases:
        expect_raises(ValueError, answer, *args, what=what, mentions=[seen])


exercise_15_1 = checks_for(
    "15.1",
    name="split_stages",
    difficulty=2,
    minutes=25,
    hint=(
        "The best cut of the parts from i on into k stages: for each end j of the first stage, the "
        "larger of sum(costs[i:j]) and the best cut of the parts from j on into k - 1."
    ),
    forbidden=("shared.pipeline.stages.split_stages",),
)


def expect_cut(costs, num_stages, cuts) -> None:
    parts = [i for cut in cuts for i in cut]
    ends = [(cut.start, cut.stop) for cut in cuts if isinstance(cut, range)]
    one_short = [b for _, b in ends] == [*(a - 1 for a, _ in ends[1:]), len(costs) - 1]
    recognise(
        {
            "a range ends before its last number: the last part of each stage is missing": (
                one_short and len(ends) == len(cuts)
            ),
            "the stages are not given as ranges": not all(isinstance(cut, range) for cut in cuts),
            "a stage has no part: its rank would have nothing to do": not all(map(len, cuts)),
            "there are more or fewer stages than were asked for": len(cuts) != num_stages,
            "the parts do not stand in their order: stages are neighbours in the model": (
                parts != sorted(parts)
            ),
            "a part is in no stage, or in two": parts != list(range(len(costs))),
        },
        expected=f"{num_stages} ranges that make up range({len(costs)})",
        seen=f"{cuts}",
    )


@exercise_15_1.check("the slowest stage is the fastest of all cuts")
def best_cut(answer) -> None:
    draw = random.Random(fresh_seed())
    cases = [
        ([1.0] * 6 + [4.0], 3),
        ([0, 0, 9, 0], 2),
        ([1, 8, 3, 5], 3),
        ([2, 1, 1, 2], 2),
        ([9, 1, 1, 1, 1], 3),
        ([5, 1, 3, 2, 6], 3),
    ]
    for count in range(1, 8):
        for k in range(1, count + 1):
            cases.append(([draw.choice((0, 1, 2, 5, 9)) for _ in range(count)], k))
            cases.append(([round(draw.uniform(0, 4), 2) for _ in range(count)], k))
    found = []
    for costs, k in cases:
        free = min(costs) == 0
        what = f"{k} stages of {len(costs)} parts" + (", one of which costs 0," if free else "")
        found.append((costs, k, accepted(answer, list(costs), k, what=what)))
    for costs, k, cuts in found:
        expect_cut(costs, k, cuts)
    equal = all(max(map(len, cuts)) - min(map(len, cuts)) <= 1 for *_, cuts in found)
    equal |= all(len(set(map(len, cuts[:-1]))) <= 1 for *_, cuts in found)  # the rest in the last
    as_greedy = any(
        all(
            order_lab.slowest(costs, cuts) == order_lab.slowest(costs, fill(costs, k))
            for costs, k, cuts in found
        )
        for fill in (order_lab.greedy, order_lab.filled)
    )
    rounded = order_lab.best_of(
        found, lambda costs, cuts: order_lab.slowest([*map(int, costs)], cuts)
    )
    alike = any(order_lab.best_of(found, each) for each in (order_lab.squares, order_lab.spread))
    for costs, k, cuts in found:
        best = min(order_lab.slowest(costs, each) for each in order_lab.every_cut(len(costs), k))
        got = order_lab.slowest(costs, cuts)
        recognise(
            {
                "every stage has as many parts: they cost differently": equal and got > best,
                "each stage is filled to its share before the next: what is left over is in the "
                "last one": as_greedy and got > best,
                "the costs are rounded to whole numbers": rounded and got > best * (1 + 1e-9),
                "the stages' costs are made alike: the slowest one counts": (
                    alike and got > best * (1 + 1e-9)
                ),
                "there is a cut whose slowest stage is faster": got > best * (1 + 1e-9),
            },
            expected=f"a slowest stage of {best:.4g} for costs {costs} in {k} stages",
            seen=f"{got:.4g}, stages {cuts}",
        )


MANY_OPERATIONS = 300_000  # of 33,649 cuts; the table of best cuts needs a tenth of it


@exercise_15_1.check("many parts")
def many_parts(answer) -> None:
    draw = random.Random(fresh_seed())
    costs = []
    for _ in range(6):  # six stages of 20 each, so nothing can be below 20
        ends = sorted(draw.sample(range(1, 20), 3))
        costs += [b - a for a, b in itertools.pairwise((0, *ends, 20))]
    cuts = answer(order_lab.counted(costs, MANY_OPERATIONS), 6)
    expect_cut(costs, 6, cuts)
    expect_equal(order_lab.slowest(costs, cuts), 20, what="the slowest of 6 stages of 24 parts")


@exercise_15_1.check("what cannot be cut is refused")
def cut_refuses(answer) -> None:
    expect_refused(
        answer,
        ("4 stages of 3 parts", 4, [1, 1, 1], 4),
        ("0 stages", 0, [1, 1], 0),
        ("a cost of -1", -1, [1, -1], 1),
    )


# 15.2 and 15.2b

SEND_WAITS = (
    "it waits: before the other side has received, send_activation must be back, or two ranks "
    "that both send first wait for each other for ever"
)
SENT_AS = {
    "returned an invalid gradient": (
        "the gradient: the two tensors are exchanged: gradients come in the order in which the "
        "tensors were sent",
        "the buffers have the shapes of the tensors, in their order",
    ),
    "contiguous": (
        "a message is read from, or fills, a tensor that is not contiguous: the strides are those "
        "of the tensor that was given",
        "torch.empty of a shape is contiguous, empty_like() keeps strides; link.send() copies",
    ),
}
exercise_15_2 = checks_for(
    "15.2",
    name="send_activation",
    difficulty=3,
    minutes=25,
    hint=(
        "A torch.autograd.Function: forward calls link.send for every tensor and returns a "
        "number, torch.zeros(()); backward returns None for the link and, for every tensor, what "
        "link.receive fills an empty one with."
    ),
    forbidden=("shared.pipeline.transfer.send_", "shared.pipeline.transfer.recv_", *ENGINE),
)
exercise_15_2b = checks_for(
    "15.2b",
    name="recv_activation",
    difficulty=3,
    minutes=25,
    hint=(
        "The same the other way round. Autograd runs a Function's backward only if an input needs "
        "a gradient: give it a number that does, torch.zeros((), requires_grad=True)."
    ),
    forbidden=("shared.pipeline.transfer.send_", "shared.pipeline.transfer.recv_", *ENGINE),
)


def say(calls) -> str:
    """Operations as a reader wants them."""
    ops = [f"{c.op} of {c.num_bytes} bytes among {c.group_size}" for c in calls]
    return ", ".join(ops) or "no message"


def expect_way(calls, op, way, what) -> None:
    """Four messages of 12 bytes on one way, two a micro-batch."""
    other = next(each for each in lab.WAYS if each != way)
    mine = [c for c in calls if c.op == op]
    size = lab.WAYS[way]
    recognise(
        {
            f"{what}: nothing travels": not mine,
            f"{what} travel on link.{other}, not on link.{way}": all(
                c.group_size != size for c in mine
            ),
            f"{what}: not every tensor has its message": len(mine) < 4,
            f"{what}: more messages than tensors": len(mine) > 4,
            f"{what}: something else begins as well, which belongs to another moment": (
                len(calls) > len(mine)
            ),
            f"{what} travel in another dtype": any(c.num_bytes != lab.BYTES for c in mine),
        },
        expected=f"4 times {op} of {lab.BYTES} bytes among {size} (2 micro-batches of 2 tensors)",
        seen=say(calls),
    )
    expect_equal([c.op for c in calls], [op] * 4, what=f"{what}: all operations")


def expect_kept(kept, what) -> None:
    recognise(
        {
            f"{what}: nobody keeps what has not left: the message is lost with its tensor": (
                kept < 4
            )
        },
        expected="4 messages in link.pending while nobody has received, for link.finish()",
        seen=f"{kept}",
        hint="link.send() keeps them",
    )


def expect_pairs(got, want, what) -> None:
    """Two tensors for each of two micro-batches."""
    for m, pair in enumerate(want):
        for i, x in enumerate(pair):
            number = f"{what} of tensor {i + 1}, micro-batch {m}"
            nothing = {f"{what}: nothing comes of it": got[m][i] is None}
            recognise(nothing, expected=number, seen="None")
            turned = got[m][i].shape == pair[1 - i].shape != x.shape
            exchanged = turned and torch.equal(got[m][i], pair[1 - i])
            recognise(
                {
                    f"{what}: the two tensors are exchanged": exchanged,
                    f"{what}: the shapes are taken in another order than the tensors come": turned,
                },
                expected=f"{number} of shape {tuple(x.shape)}",
                seen=f"{tuple(got[m][i].shape)}",
            )
            looks_like = {
                f"{what}: the two tensors are exchanged": pair[1 - i].reshape(x.shape),
                f"{what}: one micro-batch's memory is used again for the next": want[1 - m][i],
                f"{what}: all are 1, not what came": x.new_ones(x.shape),
                f"{what}: divided by the number of tensors, or halved in another way": x / 2,
            }
            expect_close(got[m][i], x, what=number, atol=0, rtol=0, looks_like=looks_like)


@exercise_15_2.check("forward: on its way, in order, without waiting")
def sends(answer) -> None:
    seen = lab.sending(answer).seen("forward", apart=SEND_WAITS, known=SENT_AS)[lab.SENDER]
    expect_way(seen.calls, "send", "activations", "the activations")
    expect_kept(seen.kept, "the activations")
    expect_pairs(seen.came, seen.given, "what arrives")
    wrong = [each for each in seen.results if each]
    recognise(
        {"what comes back is no number that backward() can be called on": bool(wrong)},
        expected="a tensor with one element that requires a gradient",
        seen=wrong[0] if wrong else "",
    )


@exercise_15_2.check("backward: the gradients that come back")
def sends_back(answer) -> None:
    apart = "backward waits for gradients where none come: they come on link.gradients, in order"
    seen = lab.sending(answer).seen("backward", apart=apart, known=SENT_AS)[lab.SENDER]
    came = [call.op for call in seen.backward]
    recognise(
        {
            "a gradient is received only for a tensor that requires one: the other side sends one "
            "for each": came == ["recv"] * 3
        },
        expected="4 gradients, one of them for a tensor that requires none",
        seen=say(seen.backward),
    )
    expect_way(seen.backward, "recv", "gradients", "the gradients")
    expect_pairs(seen.back, seen.gradients, "the gradient")
    recognise(
        {"the tensors are kept until backward: it needs no more than their shapes": seen.held > 0},
        expected="none of 4 tensors in memory once they have left and nobody else has them",
        seen=f"{seen.held}",
    )


def expect_chain(answer, sends) -> None:
    for number in (2, 3):
        seed, ranks = chains.chain(answer, sends, number)
        found = ranks.seen(None, apart="a chain of stages does not come to its end")
        wanted = chains.chain_in_one_process(seed, number)
        for rank, (got, want) in enumerate(zip(found, wanted, strict=True)):
            both = (rank > 0) + (rank + 1 < number)
            expect_close(got.gradient, want, what=f"stage {rank}'s gradient, {number} stages")
            want_bytes = 4 * chains.WIDTH * sum(chains.CHAIN) * 2 * both
            expect_equal(got.sent, 2 * len(chains.CHAIN) * both, what=f"messages of rank {rank}")
            expect_equal(got.sent_bytes, want_bytes, what=f"bytes of rank {rank}")


@exercise_15_2.check("2 and 3 stages have the gradients of one process")
def sends_in_chain(answer) -> None:
    expect_chain(answer, True)


@exercise_15_2b.check("forward: what was sent, of the dtype that is asked for")
def receives(answer) -> None:
    apart = "it waits where nothing comes: activations come on link.activations, in order"
    seen = lab.receiving(answer).seen("forward", apart=apart)[lab.RECEIVER]
    expect_equal(seen.results, ["tuple of 2"] * 2, what="what comes back for two shapes")
    expect_equal(seen.came[0][0].dtype, lab.DTYPE, what="the dtype", mistake="dtype is not used")
    places = lab.asked_of_meta(answer)
    recognise(
        {"device is not used: the tensors lie elsewhere": bool(set(places) - {"meta"})},
        expected="two tensors on the device that is asked for, here meta",
        seen=f"tensors on {places}",
    )
    expect_way(seen.calls, "recv", "activations", "the activations")
    pairs = zip(*map(itertools.chain.from_iterable, (seen.came, seen.given)), strict=True)
    other = any(not torch.equal(got, want) for got, want in pairs)
    late = {"what comes is not waited for: the tensors are empty yet": other and seen.waits < 4}
    recognise(late, expected="what was sent, waited for", seen=f"{seen.waits} waits for 4 messages")
    expect_pairs(seen.came, seen.given, "what arrives")
    ends = {"what arrives needs no gradient: backward ends here": seen.kept < 4}
    recognise(ends, expected="tensors that require a gradient", seen=f"{seen.kept} of 4 do")


@exercise_15_2b.check("one shape")
def receives_one(answer) -> None:
    apart = "it waits where nothing comes: one shape is one message"
    seen = lab.receiving(answer).seen("one", apart=apart)[lab.RECEIVER]
    words = {"a single tensor comes back bare: a tuple of one is asked for": ["Tensor of 2"]}
    what = "what comes back for one shape"
    expect_equal(seen.results, ["tuple of 1"], what=what, looks_like=words)


@exercise_15_2b.check("backward: every gradient is sent back, in order, without waiting")
def receives_back(answer) -> None:
    apart = "backward waits until the other side has taken the gradients: sending must not wait"
    seen = lab.receiving(answer).seen("backward", apart=apart)[lab.RECEIVER]
    recognise(
        {
            "a tensor that nobody has used sends no gradient: the other side waits for it": (
                [c.op for c in seen.backward] == ["send"] * 3
            )
        },
        expected="a message for each tensor, zeros where it was not used",
        seen=say(seen.backward),
    )
    expect_way(seen.backward, "send", "gradients", "the gradients")
    expect_kept(seen.kept, "the gradients")
    expect_pairs(seen.back, seen.gradients, "the gradient")


@exercise_15_2b.check("2 and 3 stages have the gradients of one process")
def receives_in_chain(answer) -> None:
    expect_chain(answer, False)


# 15.3 to 15.5


def sizes(v_most=1):
    """Ranks, micro-batches and stages a rank, small ones and a few that are drawn."""
    draw = random.Random(fresh_seed())
    small = list(itertools.product((4, 2, 3, 1), (8, 1, 2, 3, 4, 6), range(v_most, 0, -1)))
    return [*small, *((draw.randint(5, 7), 7 * draw.randint(1, 2), 1) for _ in range(3))]


exercise_15_3 = checks_for(
    "15.3",
    name="gpipe_schedule",
    difficulty=1,
    minutes=10,
    hint="Write down each rank's order as a list of Cells; timetable() makes the table of it.",
    forbidden=SCHEDULES,
)


@exercise_15_3.check("all forwards, then all backwards")
def gpipe(answer) -> None:
    for p, m, _ in sizes():
        table = tables.made(answer, p, m)
        tables.expect_valid(table, p, m, 1)
        for rank in range(p):
            tables.expect_all_then_all(table, rank, m)
        tables.expect_slots(table, p, m, 1)


@exercise_15_3.check("numbers below 1 are refused")
def gpipe_refuses(answer) -> None:
    expect_refused(answer, ("0 stages", 0, 0, 4), ("-2 micro-batches", -2, 3, -2))


exercise_15_4 = checks_for(
    "15.4",
    name="one_f_one_b_schedule",
    difficulty=2,
    minutes=20,
    hint=(
        "Stage s begins with num_stages - 1 - s forwards (or all, if there are fewer), goes on "
        "with a forward and a backward in turns, and ends with the backwards that are left."
    ),
    forbidden=SCHEDULES,
)


@exercise_15_4.check("one forward, one backward; at most p - s alive")
def one_f_one_b(answer) -> None:
    for p, m, _ in sizes():
        table = tables.made(answer, p, m, signs_of=order_lab.turns_signs)
        tables.expect_valid(table, p, m, 1)
        for rank in range(p):
            tables.expect_turns(table, rank, m, 1)
        tables.expect_slots(table, p, m, 1)


@exercise_15_4.check("numbers below 1 are refused")
def one_f_one_b_refuses(answer) -> None:
    expect_refused(answer, ("-1 stages", -1, -1, 4), ("0 micro-batches", 0, 2, 0))


exercise_15_5 = checks_for(
    "15.5",
    name="interleaved_schedule",
    difficulty=4,
    minutes=40,
    hint=(
        "A rank's k-th forward: p micro-batches through its first stage, the same p through its "
        "second, ...; its k-th backward the same from its last stage. "
        "Warm-up: (v - 1) p + 2 (p - 1 - rank) forwards; for v = 1 that of 1F1B."
    ),
    forbidden=SCHEDULES,
)


@exercise_15_5.check("by groups of p micro-batches, with the smaller bubble")
def interleaved(answer) -> None:
    for p, m, v in sizes(3):
        if m % p:
            continue
        table = tables.made(answer, p, m, v, order_lab.interleaved_signs)
        tables.expect_valid(table, p, m, v)
        for rank, row in enumerate(table):
            where = f"rank {rank} of {p}, {m} micro-batches, {v} stages a rank"
            recognise(
                order_lab.groups_of(row, rank, p, m, v),
                expected=f"groups of {p} micro-batches through the stages "
                f"{[*range(rank, p * v, p)]} ({where})",
                seen=tables.say(row),
            )
            tables.expect_turns(table, rank, m, v)
        tables.expect_slots(table, p, m, v)


@exercise_15_5.check("what cannot be interleaved is refused")
def interleaved_refuses(answer) -> None:
    tables.expect_looked_at(answer, 4, 6, 2)
    expect_refused(
        answer,
        ("6 micro-batches on 4 ranks", 6, 4, 6, 2),
        ("0 stages a rank", 0, 4, 4, 0),
        ("0 ranks", 0, 0, 4, 2),
    )


exercise_15_6 = checks_for(
    "15.6",
    name="which_schedule",
    difficulty=1,
    minutes=10,
    hint=(
        "Look at the last rank first: does it turn back at once? Then at the first: how many "
        "forwards does it do before its first backward, and of how many stages?"
    ),
)
KINDS = ("gpipe", "1f1b", "interleaved", "none")


@exercise_15_6.check("each picture by its kind")
def recognised(answer) -> None:
    given, pictures = answer(), lab.pictures()
    expect(
        isinstance(given, dict) and set(given) == set(pictures),
        mistake="a picture has no answer, or there are answers without a picture",
        expected=f"a dict with the keys {', '.join(pictures)}",
        seen=f"{given!r}",
    )
    words = f"one of {', '.join(KINDS)} for each picture"
    known = all(each in KINDS for each in given.values())
    bad = "a word that is no kind of schedule"
    expect(known, mistake=bad, expected=words, seen=f"{given!r}")
    for letter, table in pictures.items():
        why = order_lab.signs(table).get(given[letter], "")
        expect(
            not why,
            mistake=f"{letter} is not {given[letter]!r}: {why}",
            expected="another kind",
            seen=f"{letter}: {given[letter]!r}",
        )
