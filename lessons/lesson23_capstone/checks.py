"""Lesson 23: what tells a right answer from a wrong one.

The oracles are torch's own attention, the flat tensor itself, and for plans what their ranks keep
and send when they run.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

from lessons.lesson23_capstone.laboratory import (
    SLIM,
    TOY,
    messages,
    promises,
    run_plan,
    spec_of_table,
)
from shared.capstone.budgets import BARE, Budget, Promise
from shared.errors import InputError
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, expect_raises, recognise
from shared.exercises.seeds import fresh_seed
from shared.measuring.memory import saved_bytes
from shared.planner.memory import memory_per_rank
from shared.planner.outcomes import FITTED
from shared.planner.seconds import step_time

# 23.1

exercise_23_1 = checks_for(
    "23.1",
    name="grouped_attention",
    difficulty=3,
    minutes=20,
    hint=(
        "A product with a head of keys does not ask how many queries there are, nor from "
        "which heads they come: in which shape is each head of keys read once, and who may "
        "see whom then?"
    ),
    forbidden=("torch.nn.functional.scaled_dot_product_attention",),
)
SIZES = ((2, 6, 3, 5, 5, 4), (1, 4, 1, 3, 7, 2), (3, 4, 4, 6, 6, 5), (2, 8, 2, 1, 9, 4))


def _tensors(size: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    batch, heads, groups, length, keys, width = size
    draw = torch.Generator().manual_seed(fresh_seed())
    shapes = ((batch, heads, length, width), *[(batch, groups, keys, width)] * 2)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]


def _torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object = None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@exercise_23_1.check("what torch's own attention gives with enable_gqa")
def equal(grouped_attention) -> None:
    for size in SIZES:
        q, k, v = _tensors(size, torch.float64)
        repeats = size[1] // size[2]
        got = grouped_attention(q, k, v)
        expect_equal(tuple(got.shape), tuple(q.shape), what="the output's shape")
        plain = (q * math.sqrt(q.shape[-1]), k, v)
        looks_like = {
            "head h reads head h % kv_heads: neighbours are to share one": _torchs(
                q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1)
            ),
            "the scores are not divided by sqrt(head_dim)": _torchs(*plain),
            "keys are grouped, values are not": _torchs(
                q, k.repeat_interleave(repeats, 1), v.repeat(1, repeats, 1, 1)
            ),
            "scaled by sqrt(heads x head_dim), the width of all heads": _torchs(
                q / math.sqrt(q.shape[1]), k, v
            ),
        }
        expect_close(got, _torchs(q, k, v), what=f"the output for {size}", looks_like=looks_like)


@exercise_23_1.check("masks, and a decoder that asks for its last positions")
def masked(grouped_attention) -> None:
    for size in SIZES:
        q, k, v = _tensors(size, torch.float64)
        length, keys = size[3], size[4]
        last = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
        first = torch.ones(length, keys, dtype=torch.bool).tril()
        got = grouped_attention(q, k, v, None, True)
        looks_like = {
            "causal hides nothing": _torchs(q, k, v),
            "queries are taken to be the first positions, they are the last": _torchs(
                q, k, v, first
            ),
        }
        expect_close(got, _torchs(q, k, v, last), what="the causal output", looks_like=looks_like)
        for shape in ((size[0], 1, 1, keys), (length, keys), (*size[:2], length, keys)):
            mask = torch.rand(shape) < 0.7
            mask[..., 0], mask[..., -1] = True, False  # there is a key to look at, either way round
            what = f"mask of shape {shape}"
            got = grouped_attention(q, k, v, mask)
            looks_like = {
                "True in a mask hides: here it marks what may be looked at": _torchs(
                    q, k, v, ~mask
                ),
                "the mask is not looked at": _torchs(q, k, v),
            }
            expect_close(got, _torchs(q, k, v, mask), what=f"a {what}", looks_like=looks_like)
            both = grouped_attention(q, k, v, mask, True)
            want = _torchs(q, k, v, mask & last)
            looks_like = {
                "causal replaces the mask: both count": _torchs(q, k, v, last),
                "the mask replaces causal: both count": _torchs(q, k, v, mask),
            }
            expect_close(both, want, what=f"causal, and a {what}", looks_like=looks_like)


@exercise_23_1.check("no copy of keys or values")
def lean(grouped_attention) -> None:
    q, k, v = (x.requires_grad_() for x in _tensors((1, 16, 2, 8, 64, 32), torch.float32))
    scores = 16 * 8 * 64 * 4
    kept = saved_bytes(lambda: grouped_attention(q, k, v), ignore=(q, k, v))
    copies = 8 * k.nbytes
    recognise(
        {"keys or values are copied for every head that shares them": kept >= copies},
        expected=f"at most {2 * scores + 2 * q.nbytes:,} bytes kept for backward beside q, k and v",
        seen=f"{kept:,} bytes; the keys of all heads would be {copies:,}",
        hint="a product broadcasts by copying: let the shared queries be more rows instead",
    )


# 23.2

exercise_23_2 = checks_for(
    "23.2",
    name="read_part",
    difficulty=2,
    minutes=15,
    hint=(
        "Where do this rank's part and file f begin and end in the whole? Read what both have "
        "in common; the last file has filling behind it."
    ),
)
CUTS = ((10, 2, 3), (10, 3, 2), (7, 4, 3), (12, 3, 3), (5, 4, 8), (1, 3, 2), (23, 5, 1), (23, 1, 4))


class Files:
    """The files of some ranks, and what was read of them. Behind the end is what nobody wants."""

    def __init__(self, whole: torch.Tensor, saved: int) -> None:
        size = -(-len(whole) // saved)
        filling = torch.full((size * saved - len(whole),), math.nan, dtype=whole.dtype)
        self.files = torch.cat([whole, filling]).split(size)
        self.pieces: list[tuple[int, int, int]] = []

    def read(self, file: int, begin: int, end: int) -> torch.Tensor:
        """A piece of a file, as a checkpoint's reader gives it."""
        expect(
            0 <= file < len(self.files) and 0 <= begin <= end <= len(self.files[0]),
            expected=f"pieces of the files 0 to {len(self.files) - 1}, {len(self.files[0])} each",
            seen=f"read({file}, {begin}, {end})",
            mistake="a piece is asked for that no file has",
        )
        self.pieces.append((file, begin, end))
        return self.files[file][begin:end].clone()


@exercise_23_2.check("every rank's part, from other numbers of ranks")
def parts(read_part) -> None:
    for numel, saved, ranks in CUTS:
        draw = torch.Generator().manual_seed(fresh_seed())
        saved_as = torch.randn(numel, generator=draw)  # float32: the part's dtype is another
        whole = saved_as.double()
        new = -(-numel // ranks)
        padded = torch.cat([whole, whole.new_zeros(new * ranks - numel)])
        for rank in range(ranks):
            files = Files(saved_as, saved)
            got = read_part(files.read, numel, saved, ranks, rank, torch.float64)
            what = f"part {rank} of {ranks}, of {numel} numbers from {saved} files"
            recognise(
                {
                    "the part is not filled up: ranks need parts of one length": len(got) < new,
                    "the filling behind the end is taken for numbers": bool(got.isnan().any()),
                    "the part has another dtype than asked for": got.dtype != torch.float64,
                },
                expected=f"{what}: {new} numbers of float64, zeros behind the end",
                seen=f"{len(got)} of {got.dtype}, {int(got.isnan().sum())} of them are filling",
            )
            own = padded[rank * new : (rank + 1) * new]
            looks_like = {
                "the old parts are dealt out in turn: a rank's part lies in one piece": (
                    padded[rank::ranks][:new] if len(padded[rank::ranks]) >= new else padded[:new]
                ),
                "every rank gets the first part": padded[:new],
            }
            expect_close(got, own, what=what, looks_like=looks_like if rank else None)


@exercise_23_2.check("no number is read that is not needed")
def frugal(read_part) -> None:
    for numel, saved, ranks in CUTS:
        whole = torch.arange(float(numel))
        new = -(-numel // ranks)
        for rank in range(ranks):
            files = Files(whole, saved)
            read_part(files.read, numel, saved, ranks, rank)
            needed = max(0, min(new, numel - rank * new))
            count = sum(end - begin for _, begin, end in files.pieces)
            old = len(files.files[0])
            touched = {i // old for i in range(rank * new, rank * new + needed)}
            recognise(
                {
                    "a file is asked for nothing": any(
                        end == begin for _, begin, end in files.pieces
                    ),
                    "a piece is read twice": len(set(files.pieces)) < len(files.pieces),
                    "every number is read by itself: a piece of a file is one read": (
                        len(files.pieces) == count == needed > len(touched)
                    ),
                    "the whole tensor is read, by every rank": count >= numel > needed,
                    "more of a file is read than is needed: whole files, or to their end": (
                        count > needed
                    ),
                    "one file is read in several pieces": len(files.pieces) > len(touched),
                },
                expected=f"{needed} numbers in {len(touched)} pieces",
                seen=f"{count} numbers in {len(files.pieces)} pieces",
            )


# 23.3

exercise_23_3 = checks_for(
    "23.3",
    name="choose_plan",
    difficulty=3,
    minutes=30,
    hint=(
        "For each of candidates(model, budget): memory_per_rank(model, plan) has parameters, "
        "gradients and optimizer; step_time(model, plan, budget.cluster, BARE) has tensor_parallel,"
        " pipeline and data_parallel. min() with a key that is a pair does the rest."
    ),
)
LINK = 1e6
BUDGETS = {  # bytes a rank: what they leave open
    "plenty": Budget(4, 5e6, LINK, 10.0),
    "ZeRO": Budget(4, 1.7e6, LINK, 10.0),
    "tight": Budget(4, 1.0e6, LINK, 10.0),
    "three ranks": Budget(3, 3.0e6, LINK, 10.0, batch=6),
}


def _best(among: list[Promise]) -> Promise:
    return min(among, key=lambda each: (round(each.seconds, 9), each.kept))


@exercise_23_3.check("the fastest plan that fits, and what it promises")
def chosen(choose_plan) -> None:
    for table, name in ((TOY, "plenty"), (TOY, "ZeRO"), (TOY, "tight"), (SLIM, "three ranks")):
        budget, spec = BUDGETS[name], spec_of_table(table)
        every = promises(spec, budget)
        fitting = [each for each in every if each.kept <= budget.memory]
        best, answer = _best(fitting), choose_plan(spec, budget)
        own = next((each for each in every if each.plan == answer.plan), None)
        total = memory_per_rank(spec, answer.plan).total
        time = step_time(spec, answer.plan, budget.cluster, BARE)
        slow = step_time(spec, answer.plan, budget.cluster, FITTED)
        recognise(
            {
                "the plan is none of the candidates": own is None,
                "activations are counted into what is kept: the budget is for model states": (
                    answer.kept == total
                ),
                f"seconds with FITTED: its links reach {FITTED.link} of the budget's": (
                    math.isclose(answer.seconds, messages(slow))
                ),
                "the bubble is no message: it is counted into the seconds": (
                    time.bubble > 0 and math.isclose(answer.seconds, time.total)
                ),
                "the plan does not fit: its ranks keep more than the budget has": (
                    own is not None and own.kept > budget.memory
                ),
                "the plan that keeps the least, however long it sends": (
                    answer.plan == min(every, key=lambda each: each.kept).plan != best.plan
                ),
                "of plans that send the same, not the one that keeps the least": (
                    own is not None
                    and math.isclose(own.seconds, best.seconds)
                    and own.kept > best.kept
                ),
                "the first plan that fits, not the fastest": (
                    answer.plan == fitting[0].plan != best.plan
                ),
            },
            expected=_words(best, ".10g"),  # a bubble is the tenth digit
            seen=_words(answer, ".10g"),
        )
        expect_equal(_words(answer), _words(best), what=f"the promise for {budget.memory:g} bytes")


def _words(promise: Promise, digits: str = ".4f") -> str:
    plan = promise.plan
    mesh = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}, ZeRO-{plan.zero}"
    return f"{mesh}: {promise.kept:,} bytes, {promise.seconds:{digits}} s"


@exercise_23_3.check("the plan runs, and keeps its promise")
def kept(choose_plan) -> None:
    budget = BUDGETS["tight"]
    answer = choose_plan(spec_of_table(TOY), budget)
    counted = run_plan(TOY, answer.plan)
    off = abs(answer.kept - counted.kept) / counted.kept
    seconds = counted.sent / budget.link
    late = abs(answer.seconds - seconds) / seconds
    recognise(
        {
            "the ranks keep more than the budget has": counted.kept > budget.memory,
            "the promise of bytes is off by more than 1 %": off > 0.01,
            "the promise of seconds is off by more than 25 %": late > 0.25,
        },
        expected=f"{counted.kept:,} bytes and {seconds:.3f} s, as 4 ranks had them",
        seen=f"promised {answer.kept:,} bytes ({off:.1%} off), {answer.seconds:.3f} s "
        f"({late:.0%} off)",
    )


@exercise_23_3.check("budgets that no plan keeps")
def refused(choose_plan) -> None:
    spec = spec_of_table(TOY)
    least = min(each.kept for each in promises(spec, BUDGETS["tight"]))
    small = dataclasses.replace(BUDGETS["tight"], memory=least - 1)
    expect_raises(
        InputError, choose_plan, spec, small, what="a budget of too few bytes", mentions=(least,)
    )
    slow = dataclasses.replace(BUDGETS["tight"], deadline=0.5)
    best = _best([each for each in promises(spec, slow) if each.kept <= slow.memory])
    just = dataclasses.replace(BUDGETS["tight"], memory=best.kept)
    what = "the promise for just the bytes that it keeps"
    expect_equal(_words(choose_plan(spec, just)), _words(best), what=what)
    expect_raises(
        InputError,
        choose_plan,
        spec,
        slow,
        what="a deadline that no plan meets",
        hint="memory decides who may take part; the deadline is asked of the fastest of these",
        mentions=(f"{best.seconds:.3g}",),
    )
